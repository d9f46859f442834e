//! Forks under load: the child of a busy program is fully functional.

use std::alloc::{GlobalAlloc, Layout};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use pageheap::source::{Source, System};
use pageheap::{Config, Heap, PageCount};

use super::*;

/// Forks in the middle of the load and runs `child` in the child. It must not use std's locks: the test's own locks are
/// not held across the fork.
pub(super) fn fork(child: impl FnOnce() -> bool) -> libc::pid_t {
    // SAFETY: the child runs `child`, and ends without unwinding into the parent's frames.
    match unsafe { libc::fork() } {
        0 => {
            let done = panic::catch_unwind(panic::AssertUnwindSafe(child)).unwrap_or(false);
            // SAFETY: runs no handlers and no destructors.
            unsafe { libc::_exit(if done { 0 } else { 1 }) }
        }
        id => {
            assert!(id > 0);
            id
        }
    }
}

/// Whether the child succeeded, within a time that a hanging child exceeds.
pub(super) fn ended_well(id: libc::pid_t) -> bool {
    let began = Instant::now();
    loop {
        let mut status = 0;
        // SAFETY: our child, and a place for its status.
        let answer = unsafe { libc::waitpid(id, &mut status, libc::WNOHANG) };
        if answer == id {
            return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
        }
        if began.elapsed() > Duration::from_secs(60) {
            // SAFETY: our child.
            unsafe { libc::kill(id, libc::SIGKILL) };
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Blocks of every size, filled and verified.
pub(super) fn work(seed: usize) -> bool {
    let mut kept: Vec<Vec<u8>> = Vec::new();
    for number in 0..150_usize {
        let size = (seed * 7919 + number * 104_729) % [100, 1000, 10_000, 100_000][number % 4] + 1;
        kept.push(vec![number as u8; size]);
        if number % 3 == 0 {
            let block = kept.swap_remove(number * 31 % kept.len());
            if !all_are(&block, block[0]) {
                return false;
            }
        }
    }
    kept.iter().all(|block| all_are(block, block[0]))
}

/// Threads that never rest until this guard is dropped.
pub(super) struct Load {
    over: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Load {
    /// When it returns, all have begun. (One that begins holds a lock of Rust's library for a moment, and a child that
    /// was made meanwhile would wait for it for ever when it starts a thread.)
    pub(super) fn new(threads: usize) -> Self {
        let (over, begun) = (Arc::new(AtomicBool::new(false)), Arc::new(Barrier::new(threads + 1)));
        let start = |seed: usize| {
            let (over, begun) = (Arc::clone(&over), Arc::clone(&begun));
            thread::spawn(move || {
                begun.wait();
                let mut round = seed;
                while !over.load(Ordering::Relaxed) {
                    round += 1;
                    assert!(work(round));
                    if round.is_multiple_of(5) {
                        HEAP.flush_thread();
                        HEAP.scavenge(pageheap::PageCount(64));
                    }
                }
            })
        };
        let threads = (0..threads).map(start).collect();
        begun.wait();
        Self { over, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// Requirement 13: every child allocates, frees inherited blocks, starts a thread, and forks again.
#[test]
fn children_of_a_busy_process_work_free_what_they_inherit_start_threads_and_fork_again() {
    let name = "forks::children_of_a_busy_process_work_free_what_they_inherit_start_threads_and_fork_again";
    if !is_child() {
        return assert!(run(name));
    }
    let _load = Load::new(6);
    let forks = if is_full() { 250 } else { 10 };
    for round in 0..forks {
        let inherited: Vec<Vec<u8>> = (0..300_usize)
            .map(|number| vec![5; number * number % 20_000 + 1])
            .collect();
        let id = fork(move || {
            let sound = inherited.iter().all(|block| all_are(block, 5));
            drop(inherited);
            let threads = thread::scope(|scope| {
                let pair = [1, 2].map(|seed| scope.spawn(move || work(round + seed)));
                pair.into_iter().all(|thread| thread.join().unwrap())
            });
            // The check comes first: later the grandchild may have a scavenging thread of its own.
            let grandchild = fork(|| {
                HEAP.check().unwrap();
                work(round)
            });
            assert!(sound && work(round) && threads);
            ended_well(grandchild)
        });
        assert!(ended_well(id), "child {round}");
    }
}

/// The heaps of the next test: one with room, and one that refuses most of what is asked of it.
static MET: std::sync::OnceLock<[Heap<System>; 2]> = std::sync::OnceLock::new();

/// Allocates from both, and frees. Returns whether the first refused nothing.
fn use_both(round: usize) -> bool {
    let [heap, full] = MET.get().unwrap();
    let layout = |size| Layout::from_size_align(size, 8).unwrap();
    let pair = |heap: &Heap<System>, layout| {
        let block = heap.allocate(layout);
        // SAFETY: just allocated, with this layout.
        block.inspect(|&block| unsafe { heap.free(block, layout) }).is_some()
    };
    let sizes = [40, 700, 5000, 100_000, 1 << 20].map(|size| pair(heap, layout(size)));
    let refused = !round.is_multiple_of(16) || !pair(full, layout(7 << 20));
    refused && sizes.into_iter().all(|done| done)
}

extern "C" fn handler() {
    assert!(use_both(0));
}

/// Threads that meet in a heap get structures of their own there. A fork holds all of them, and whoever is refused does
/// so too. Handlers use the heaps before the fork, and after it in both processes.
#[test]
fn a_fork_finds_all_structures_that_threads_share() {
    if !is_child() {
        return assert!(run("forks::a_fork_finds_all_structures_that_threads_share"));
    }
    let heap = |limit| Heap::new(System, Config::new(1 << 28).limit(PageCount(limit))).unwrap();
    assert!(MET.set([heap(8192), heap(1024)]).is_ok());
    // Stays: so there is never room for what is asked of that heap.
    let kept = MET.get().unwrap()[1].allocate(Layout::new::<[u8; 2 << 20]>());
    assert!(kept.is_some());
    let handlers = Some(handler as unsafe extern "C" fn());
    // SAFETY: functions that stay, and allocate from a heap that may be used in a handler.
    assert_eq!(unsafe { libc::pthread_atfork(handlers, handlers, handlers) }, 0);
    // As in `Load::new`.
    let (over, begun) = (AtomicBool::new(false), Barrier::new(6));
    thread::scope(|scope| {
        for seed in 0..5 {
            let (over, begun) = (&over, &begun);
            scope.spawn(move || {
                begun.wait();
                let mut round = seed;
                while !over.load(Ordering::Relaxed) {
                    round += 1;
                    assert!(use_both(round));
                    if round % 1000 == 0 {
                        MET.get().unwrap()[0].release(1 << 20);
                    }
                }
            });
        }
        begun.wait();
        let forks = if cfg!(debug_assertions) && !is_full() { 20 } else { 150 };
        for round in 0..forks {
            let id = fork(|| {
                let used = (0..20).all(use_both);
                let sound = MET.get().unwrap().iter().all(|heap| heap.check().is_ok());
                let threads = thread::spawn(|| (0..20).all(use_both)).join().unwrap();
                used && sound && threads
            });
            let done = ended_well(id);
            over.store(!done || round + 1 == forks, Ordering::Relaxed);
            assert!(done, "child {round}");
        }
    });
}

/// The child's heap is consistent, wherever the parent's threads were.
#[test]
fn in_the_child_every_page_that_is_free_is_found() {
    if !is_child() {
        return assert!(run("forks::in_the_child_every_page_that_is_free_is_found"));
    }
    let _load = Load::new(4);
    for round in 0..20 {
        thread::sleep(Duration::from_millis(1));
        let id = fork(|| {
            let stats = HEAP.stats();
            // One thread with a structure of its own; no lock is held; the tree knows every free page.
            HEAP.check().unwrap();
            stats.threads == 1 && work(7)
        });
        assert!(ended_well(id), "child {round}");
    }
}

/// Forks from several threads at once, and while heaps are being opened.
#[test]
fn several_threads_may_fork_at_once_and_while_a_heap_opens() {
    if !is_child() {
        return assert!(run("forks::several_threads_may_fork_at_once_and_while_a_heap_opens"));
    }
    const LAYOUT: Layout = Layout::new::<[u8; 100]>();
    // SAFETY: freed with the layout.
    let uses = |heap: &GlobalHeap| unsafe {
        let block = heap.alloc(LAYOUT);
        let got = !block.is_null();
        heap.dealloc(block, LAYOUT);
        got
    };
    for _ in 0..10 {
        let other: &GlobalHeap = Box::leak(Box::new(GlobalHeap::new().reserve(addresses(1 << 30))));
        thread::scope(|scope| {
            for seed in 0..3 {
                scope.spawn(move || assert!(ended_well(fork(|| work(seed) && uses(other)))));
            }
            scope.spawn(move || assert!(uses(other)));
        });
    }
}

/// A thread that is refused again and again in a full heap holds what a fork needs, and must not wait meanwhile for
/// what the fork holds. Other threads keep all processors busy, so that each yield takes long.
#[test]
fn forks_do_not_wait_for_who_is_refused() {
    if !is_child() {
        return assert!(run("forks::forks_do_not_wait_for_who_is_refused"));
    }
    let heap = Heap::new(System, Config::new(1 << 26).limit(PageCount(64))).unwrap();
    let layout = std::alloc::Layout::new::<[u8; 1000]>();
    while heap.allocate(layout).is_some() {}
    let over = AtomicBool::new(false);
    let busy = 4 * thread::available_parallelism().map_or(2, usize::from);
    thread::scope(|scope| {
        for _ in 0..busy {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                assert!(heap.allocate(layout).is_none());
            }
        });
        let begin = Instant::now();
        (0..20).for_each(|_| assert!(ended_well(fork(|| true))));
        let took = begin.elapsed();
        over.store(true, Ordering::Relaxed);
        // It took 240 s; now it takes 0.3, or 1.5 beside fifteen other busy processes.
        assert!(took < Duration::from_secs(40), "twenty forks: {took:?}");
    });
}

/// A thread that first uses the heap in the child of a fork asks nothing of the C library that a thread of the parent's
/// may have been at.
#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn a_thread_begins_in_the_child_though_another_was_at_what_ends_the_process() {
    const NAME: &str = "forks::a_thread_begins_in_the_child_though_another_was_at_what_ends_the_process";
    unsafe extern "C" {
        fn __cxa_finalize(library: *mut libc::c_void);
    }
    extern "C" fn nothing() {}
    extern "C" fn life(_: *mut libc::c_void) -> *mut libc::c_void {
        drop(std::hint::black_box(vec![1_u8; 100]));
        ptr::null_mut()
    }
    if !is_child() {
        return assert!(run(NAME));
    }
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // So many that whoever looks through them holds their lock for long.
            // SAFETY: functions that are never unloaded; no library has this address.
            unsafe {
                (0..100_000).for_each(|_| assert_eq!(libc::atexit(nothing), 0));
                while !over.load(Ordering::Relaxed) {
                    __cxa_finalize((&raw const over).cast_mut().cast());
                }
            }
        });
        thread::sleep(Duration::from_millis(100));
        let end_well = (0..5).all(|_| {
            let child = || {
                let mut other = 0;
                // SAFETY: a thread that is joined.
                unsafe {
                    libc::pthread_create(&raw mut other, ptr::null(), life, ptr::null_mut()) == 0
                        && libc::pthread_join(other, ptr::null_mut()) == 0
                }
            };
            ended_well(fork(child))
        });
        over.store(true, Ordering::Relaxed);
        assert!(end_well);
    });
}

/// A thread that is alone with a heap works without its lock. A fork waits until that thread has left, because the
/// child will not have it.
#[test]
fn a_heap_that_another_thread_was_alone_with_is_good_in_the_child() {
    if !is_child() {
        return assert!(run(
            "forks::a_heap_that_another_thread_was_alone_with_is_good_in_the_child"
        ));
    }
    let pair = |heap: &Heap<System>, size| {
        let layout = std::alloc::Layout::from_size_align(size, 8).unwrap();
        let block = heap.allocate(layout).unwrap();
        // SAFETY: allocated above, with this layout.
        unsafe { heap.free(block, layout) };
    };
    for _ in 0..100 {
        let heap = Heap::new(System, Config::new(1 << 24)).unwrap();
        let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                (0..100).for_each(|_| pair(&heap, 64));
                begun.store(true, Ordering::Relaxed);
                while !over.load(Ordering::Relaxed) {
                    pair(&heap, 64);
                }
            });
            while !begun.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            let child = || {
                (0..50).for_each(|size| pair(&heap, 8 + 100 * size));
                heap.check().is_ok()
            };
            assert!(ended_well(fork(child)));
            over.store(true, Ordering::Relaxed);
        });
    }
}

/// Holes between blocks are counted anew in the child, unless the parent has none.
#[test]
fn a_child_has_the_holes_of_its_parent() {
    if !is_child() {
        return assert!(run("forks::a_child_has_the_holes_of_its_parent"));
    }
    let (heap, layout) = (
        Heap::new(System, Config::new(1 << 26)).unwrap(),
        Layout::new::<[u8; 9000]>(),
    );
    let block = || heap.allocate(layout).unwrap();
    let holes = || heap.stats().pages.holes.0;
    let is_right_in_a_child = || {
        let before = holes();
        ended_well(fork(|| heap.check().is_ok() && holes() == before))
    };
    let blocks: Vec<_> = (0..2000).map(|_| block()).collect();
    assert!(holes() == 0 && is_right_in_a_child());
    // SAFETY: allocated above, with this layout; each is freed once.
    let free = |block: &std::ptr::NonNull<u8>| unsafe { heap.free(*block, layout) };
    blocks.iter().step_by(2).for_each(free);
    heap.release(usize::MAX);
    // (Some systems cannot release parts of what is in use.)
    assert!(holes() > 500 || System.granule() > 4096);
    assert!(is_right_in_a_child());
    while holes() > 0 {
        block();
    }
    assert!(is_right_in_a_child());
}

/// A refused thread empties the caches of others: it takes the register's lock, then the classes' locks; a fork takes
/// them in the opposite order.
#[test]
fn forks_and_who_empties_others_do_not_wait_for_each_other() {
    if !is_child() {
        let name = "forks::forks_and_who_empties_others_do_not_wait_for_each_other";
        return assert!(run_with(name, &[("PAGEHEAP_LIMIT", "32M")]));
    }
    // SAFETY: no preconditions; it ends a process that hangs.
    unsafe { libc::alarm(120) };
    let over = AtomicBool::new(false);
    // Allocates all there is, retries again and again, and frees everything at the end.
    let full = || {
        let layout = Layout::new::<[u8; 64 << 10]>();
        let (mut blocks, mut count) = ([ptr::null_mut(); 1024], 0);
        while !over.load(Ordering::Relaxed) {
            // SAFETY: the layout is not empty.
            blocks[count] = unsafe { HEAP.alloc(layout) };
            count += usize::from(!blocks[count].is_null());
        }
        for &block in &blocks[..count] {
            // SAFETY: allocated above, with this layout.
            unsafe { HEAP.dealloc(block, layout) };
        }
    };
    // Fills many magazines a little.
    let trade = || {
        for words in 1..40 {
            let layout = Layout::array::<u64>(words).unwrap();
            // SAFETY: the layout is not empty.
            let blocks = [0; 20].map(|_| unsafe { HEAP.alloc(layout) });
            for block in blocks.into_iter().filter(|block| !block.is_null()) {
                // SAFETY: as above.
                unsafe { HEAP.dealloc(block, layout) };
            }
        }
        thread::yield_now();
    };
    // The exhausting threads start last: once they run, no thread can be started.
    let begin = Barrier::new(3);
    thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    trade();
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                begin.wait();
                full();
            });
        }
        begin.wait();
        let forks = if is_full() { 200 } else { 50 };
        (0..forks).for_each(|_| assert!(ended_well(fork(|| true))));
        over.store(true, Ordering::Relaxed);
    });
}

/// However heaps are opened and closed, the open ones, and only those, are held across a fork.
#[test]
fn heaps_that_come_and_go_in_any_order_do_not_break_forks() {
    if !is_child() {
        return assert!(run("forks::heaps_that_come_and_go_in_any_order_do_not_break_forks"));
    }
    let new = |_| Heap::new(System, Config::new(1 << 24)).unwrap();
    let mut heaps: Vec<_> = (0..40).map(new).collect();
    for round in 0..200_usize {
        drop(heaps.swap_remove(round * 7919 % heaps.len()));
        if round % 3 != 0 {
            heaps.push(new(0));
        }
        if heaps.is_empty() {
            break;
        }
        if round % 10 == 0 {
            let heaps = &heaps;
            let layout = std::alloc::Layout::new::<u64>();
            let child = fork(|| heaps.iter().all(|heap| heap.allocate(layout).is_some()));
            assert!(ended_well(child), "round {round}, {} heaps", heaps.len());
        }
    }
}
