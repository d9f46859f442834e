//! Requirements 16 and 17: a system that refuses calls, from the start or from some moment on. Nothing is lost, nothing
//! is wrong, and whatever needs no new memory still works.

use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use pageheap::source::System;
use pageheap::{Config, Heap};

use super::filter::{Refusal, refuse, refuse_in};
use super::*;

fn rounds() -> usize {
    if cfg!(debug_assertions) { 300 } else { 3000 }
}

/// Everything an allocator can do without, refused at once.
static NEEDLESS: &[Refusal] = &[
    Refusal::new(libc::SYS_madvise, libc::EPERM),
    Refusal::new(libc::SYS_membarrier, libc::ENOSYS),
    Refusal::new(libc::SYS_prctl, libc::EPERM),
    Refusal::new(libc::SYS_getcpu, libc::ENOSYS),
    Refusal::new(libc::SYS_mremap, libc::ENOMEM),
    Refusal::new(libc::SYS_tgkill, libc::EPERM),
    Refusal::new(libc::SYS_rseq, libc::ENOSYS),
    Refusal::new(libc::SYS_prlimit64, libc::EPERM),
    Refusal::new(libc::SYS_getrandom, libc::ENOSYS),
];

/// With a 32-bit `long`, offsets are counted in pages, by another call.
#[cfg(target_pointer_width = "64")]
const MMAP: libc::c_long = libc::SYS_mmap;
#[cfg(target_pointer_width = "32")]
const MMAP: libc::c_long = libc::SYS_mmap2;

/// No mapping of 64 MiB or more.
static NO_LARGE_MAPPING: &[Refusal] = &[Refusal {
    call: MMAP,
    error: libc::ENOMEM,
    from: 64 << 20,
}];

#[test]
fn from_the_start_without_all_that_is_not_needed() {
    const NAME: &str = "hostile::from_the_start_without_all_that_is_not_needed";
    if !is_child() {
        let mut command = command(NAME);
        refuse_in(&mut command, NEEDLESS);
        return assert!(ends_well(&mut command));
    }
    work(rounds());
    assert_eq!(HEAP.release(usize::MAX), 0, "no advice, nothing given back");
}

/// Sleeping threads then keep what they have, but nothing else is kept.
#[test]
fn without_membarrier_memory_goes_back_all_the_same_but_for_caches() {
    const NAME: &str = "hostile::without_membarrier_memory_goes_back_all_the_same_but_for_caches";
    static REFUSALS: &[Refusal] = &[Refusal::new(libc::SYS_membarrier, libc::EPERM)];
    if !is_child() {
        let mut command = command(NAME);
        refuse_in(&mut command, REFUSALS);
        return assert!(ends_well(&mut command));
    }
    let before = resident();
    work(rounds());
    drop(blocks(256 << 20, 100_000));
    // What a thread keeps for itself: a shelf of at most 32 MiB, its magazines, a cache of pages.
    assert!(soon(|| resident() <= before + (56 << 20)), "{}", HEAP.stats());
    HEAP.flush_thread();
    assert!(soon(|| resident() <= before + (8 << 20)), "{}", HEAP.stats());
    // Who calls this gives what it keeps itself.
    drop(blocks(256 << 20, 100_000));
    HEAP.release(usize::MAX);
    assert!(soon(|| resident() <= before + (8 << 20)), "{}", HEAP.stats());
}

/// A thread that is alone with a heap has been told that there is a fence; the next thread finds it refused. It waits
/// as long as a processor may take, whoever else is busy: it yielded 4,096 times, and here waited for 12 seconds.
#[test]
fn a_fence_that_is_refused_later_costs_a_moment() {
    if !is_child() {
        return assert!(run("hostile::a_fence_that_is_refused_later_costs_a_moment"));
    }
    let heap = Heap::new(System, Config::new(1 << 24)).unwrap();
    let pair = || {
        let layout = Layout::new::<u64>();
        let block = heap.allocate(layout).unwrap();
        // SAFETY: allocated above, with this layout.
        unsafe { heap.free(block, layout) };
    };
    (0..100).for_each(|_| pair());
    refuse(&[Refusal::new(libc::SYS_membarrier, libc::EPERM)]);
    // SAFETY: a set of processors is plain bits; the calls read and write this one.
    unsafe {
        let mut here: libc::cpu_set_t = core::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu() as usize, &mut here);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&here), &raw const here), 0);
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let other = scope.spawn(|| {
            let begin = Instant::now();
            pair();
            begin.elapsed()
        });
        let took = other.join().unwrap();
        over.store(true, Ordering::Relaxed);
        assert!(took < Duration::from_secs(2), "{took:?}");
    });
}

#[test]
fn when_no_mapping_can_be_undone() {
    const NAME: &str = "hostile::when_no_mapping_can_be_undone";
    static REFUSALS: &[Refusal] = &[Refusal::new(libc::SYS_munmap, libc::ENOMEM)];
    if !is_child() {
        let mut command = command(NAME);
        refuse_in(&mut command, REFUSALS);
        return assert!(ends_well(&mut command));
    }
    work(rounds());
    // Heaps that are opened and dropped leave nothing but their addresses.
    for _ in 0..20 {
        use pageheap::source::System;
        let heap = pageheap::Heap::new(System, pageheap::Config::new(by_width(1 << 28, 4 << 20))).unwrap();
        assert!(heap.allocate(layout(100_000)).is_some());
    }
}

/// Requirement 17: no large mapping is available.
#[test]
fn where_no_large_mapping_can_be_had() {
    const NAME: &str = "hostile::where_no_large_mapping_can_be_had";
    if !is_child() {
        let mut command = command(NAME);
        refuse_in(&mut command, NO_LARGE_MAPPING);
        return assert!(ends_well(&mut command));
    }
    work_alone(1, rounds());
    let room = room(1 << 20, 1000);
    assert!((24..64).contains(&room), "{room} MiB");
    work_alone(2, rounds());
}

/// Later refusals: the heap cannot grow any more, and no thread can be created.
#[test]
fn when_the_heap_can_grow_no_more_and_no_thread_begins() {
    const NAME: &str = "hostile::when_the_heap_can_grow_no_more_and_no_thread_begins";
    if !is_child() {
        return assert!(run(NAME));
    }
    work_alone(1, rounds());
    let kept = blocks(1 << 20, 3000);
    refuse(&[
        Refusal::new(libc::SYS_mprotect, libc::ENOMEM),
        Refusal::new(libc::SYS_clone, libc::EAGAIN),
        Refusal::new(libc::SYS_clone3, libc::ENOSYS),
    ]);
    let (first, second) = (room(100_000, 100_000), room(100_000, 100_000));
    assert!(first > 10 && second * 10 >= first * 8, "{first}, then {second}");
    for size in [8, 500, 30_000] {
        assert!(room(size, 200) == 200, "{size}");
    }
    assert!(kept.iter().all(|block| all_are(block, 1)));
    HEAP.release(usize::MAX);
}

/// The filter does what it says: whatever it does not refuse is allowed.
#[test]
fn a_filter_refuses() {
    const NAME: &str = "hostile::a_filter_refuses";
    if !is_child() {
        let mut command = command(NAME);
        refuse_in(&mut command, NO_LARGE_MAPPING);
        command.arg0("filtered");
        return assert!(ends_well(&mut command));
    }
    // SAFETY: new mappings at unused addresses.
    let map = |bytes: usize| unsafe {
        let access = libc::PROT_READ;
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            access,
            libc::MAP_PRIVATE | libc::MAP_ANON,
            -1,
            0,
        ) != libc::MAP_FAILED
    };
    assert!(map(4096) && map(63 << 20) && !map(64 << 20) && !map(by_width(1 << 40, 1 << 30)));
}

/// Threads of a full heap yield while they wait for others that may hold what they need. When yielding was refused, an
/// allocation that had succeeded left an error in errno.
#[test]
fn where_yielding_is_refused_errno_is_as_it_was() {
    if !is_child() {
        return assert!(run("hostile::where_yielding_is_refused_errno_is_as_it_was"));
    }
    let mut blocks = Vec::with_capacity(1000);
    assert!(HEAP.set_limit(16 << 20));
    // Calls the heap directly: the compiler may assume that an allocation whose result is unused succeeds.
    use std::alloc::GlobalAlloc;
    // SAFETY: the layouts are not empty, and the block is freed with its own; errno is this thread's.
    let (block, error) = unsafe {
        while let Some(block) = std::ptr::NonNull::new(HEAP.alloc(layout(100_000))) {
            blocks.push(block);
        }
        while !HEAP.alloc(layout(90_000)).is_null() {}
        refuse(&[Refusal::new(libc::SYS_sched_yield, libc::EPERM)]);
        HEAP.dealloc(blocks[20].as_ptr(), layout(100_000));
        *libc::__errno_location() = 0;
        (HEAP.alloc(layout(90_000)), *libc::__errno_location())
    };
    assert!(HEAP.set_limit(1 << 30));
    assert!(!block.is_null());
    assert_eq!(error, 0);
}
