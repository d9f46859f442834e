//! Handlers of `pthread_atfork` that a constructor has registered before the first allocation. They run between the
//! heap's own, while it holds all of its locks for the fork: and may allocate, free, and open heaps.

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pageheap::arena::Arena;
use pageheap::source::System;
use pageheap::{Config, Heap, PageCount};

use super::forks::{Load, ended_well, fork, work};
use super::*;

const BUSY: &str = "early_handlers::a_handler_that_comes_before_the_heaps_own_may_allocate_and_free";
const FULL: &str = "early_handlers::in_a_full_heap_such_a_handler_is_refused_and_does_not_wait";
const OPENED: &str = "early_handlers::a_heap_that_such_a_handler_opens_is_held_too";
const NESTED: &str = "early_handlers::a_child_that_such_a_handler_makes_is_like_any_other";
const FRESH: &str = "early_handlers::such_a_handler_may_be_the_first_that_a_thread_allocates_in";

// SAFETY: the section holds pointers to functions, which are called once, with arguments that this one does not take.
// It is sorted by the number: another test has a constructor that allocates.
#[used]
#[unsafe(link_section = ".init_array.00001")]
static CONSTRUCTOR: extern "C" fn() = constructor;

/// Whether the handlers were registered before the heap opened.
static ARE_EARLY: AtomicBool = AtomicBool::new(false);

/// How often they have run here and in the processes that this one comes from.
static RUNS: AtomicUsize = AtomicUsize::new(0);

/// In which of the three they use the heap: bits.
static WHERE: AtomicUsize = AtomicUsize::new(PREPARE | PARENT | CHILD);
const PREPARE: usize = 1;
const PARENT: usize = 2;
const CHILD: usize = 4;

/// A heap that is first used in a handler, by threads that have a structure of another.
static OTHER: GlobalHeap = GlobalHeap::new().reserve(1 << 28);

/// What a handler before the fork leaves for the one after it.
struct Left {
    blocks: Vec<Vec<u8>>,
    heap: Heap<System>,
}

static LEFT: AtomicPtr<Left> = AtomicPtr::new(ptr::null_mut());

extern "C" fn constructor() {
    // SAFETY: no other thread is there to change the environment; the text is compared at once.
    let chosen = unsafe {
        let chosen = libc::getenv(c"PAGEHEAP_TEST_CHILD".as_ptr());
        (!chosen.is_null()).then(|| CStr::from_ptr(chosen))
    };
    let handlers: [unsafe extern "C" fn(); 3] = match chosen.map(CStr::to_bytes) {
        Some(name) if name == BUSY.as_bytes() || name == FRESH.as_bytes() => [prepare, parent, child],
        Some(name) if name == FULL.as_bytes() => [try_all, try_all, try_all],
        Some(name) if name == OPENED.as_bytes() => [open, look, look],
        Some(name) if name == NESTED.as_bytes() => [nothing, fork_again, nothing],
        _ => return,
    };
    // The first allocation opens the heap.
    ARE_EARLY.store(HEAP.source().is_none(), Ordering::Relaxed);
    let [before, parent, child] = handlers.map(Some);
    // SAFETY: functions of the program itself.
    assert_eq!(unsafe { libc::pthread_atfork(before, parent, child) }, 0);
}

/// Small blocks, large and huge ones; one of another heap; and what may take locks that no block takes.
fn use_heaps(seed: usize) {
    RUNS.fetch_add(1, Ordering::Relaxed);
    assert!(work(seed));
    // On the process's own heap, which is made and grows here, too.
    assert!(
        [100 << 10, 5 << 20]
            .iter()
            .all(|&bytes| Arena::new().reserve(bytes).is_ok())
    );
    for bytes in [1 << 20, 64 << 20] {
        let mut long: Vec<u8> = Vec::with_capacity(bytes);
        long.resize(5000, 1);
        long.reserve_exact(bytes + 5000);
        assert!(all_are(&long, 1));
    }
    let layout = Layout::new::<[u8; 300]>();
    // SAFETY: freed with the layout.
    unsafe {
        let block = OTHER.alloc(layout);
        assert!(!block.is_null());
        OTHER.dealloc(block, layout);
    }
    HEAP.flush_thread();
    HEAP.scavenge(PageCount(64));
    HEAP.release(1 << 20);
    assert!(HEAP.snapshot().stats.threads > 0);
    // Others may be at work: what it finds means nothing.
    let _ = HEAP.check();
}

unsafe extern "C" fn prepare() {
    if WHERE.load(Ordering::Relaxed) & PREPARE == 0 {
        return;
    }
    use_heaps(1);
    let left = Left {
        blocks: (0..200).map(|number| vec![9; number * number]).collect(),
        heap: Heap::new(System, Config::new(1 << 24)).unwrap(),
    };
    let last = LEFT.swap(Box::into_raw(Box::new(left)), Ordering::Relaxed);
    assert!(last.is_null(), "one fork at a time");
}

unsafe extern "C" fn parent() {
    follow(PARENT);
}

unsafe extern "C" fn child() {
    follow(CHILD);
}

fn follow(place: usize) {
    let left = LEFT.swap(ptr::null_mut(), Ordering::Relaxed);
    if !left.is_null() {
        // SAFETY: `prepare` has left it, for the one that comes next in each process.
        let Left { blocks, heap } = *unsafe { Box::from_raw(left) };
        assert!(blocks.iter().all(|block| all_are(block, 9)));
        assert!(heap.allocate(Layout::new::<u64>()).is_some());
    }
    if WHERE.load(Ordering::Relaxed) & place != 0 {
        use_heaps(place);
    }
}

/// Whether the child of a fork can do all that a process can.
fn is_good(seed: usize) -> bool {
    let has_threads = thread::scope(|scope| {
        let pair = [1, 2].map(|more| scope.spawn(move || work(seed + more)));
        pair.into_iter().all(|thread| thread.join().unwrap())
    });
    work(seed) && has_threads
}

/// Such a handler runs when all locks are held, by its own thread: in all three places, beside busy threads, and in
/// the children's children.
#[test]
fn a_handler_that_comes_before_the_heaps_own_may_allocate_and_free() {
    if !is_child() {
        return assert!(run(BUSY));
    }
    // SAFETY: no preconditions; it ends a process that hangs, and its children by themselves.
    unsafe { libc::alarm(240) };
    assert!(ARE_EARLY.load(Ordering::Relaxed));
    let _load = Load::new(4);
    let forks = if is_full() { 60 } else { 5 };
    for round in 0..forks {
        let inherited = vec![5_u8; 30_000];
        let runs = RUNS.load(Ordering::Relaxed);
        let id = fork(move || {
            let sound = all_are(&inherited, 5);
            drop(inherited);
            HEAP.check().unwrap();
            OTHER.check().unwrap();
            // Every other grandchild has no thread of the heap's before its own handler, which must not start one.
            let [place, more] = [[PREPARE | PARENT | CHILD, 2], [CHILD, 0]][round % 2];
            WHERE.store(place, Ordering::Relaxed);
            let grandchild = fork(|| {
                HEAP.check().unwrap();
                is_good(round) && has_keeper()
            });
            sound && RUNS.load(Ordering::Relaxed) == runs + 2 + more && is_good(round) && ended_well(grandchild)
        });
        assert!(ended_well(id), "child {round}");
        assert_eq!(RUNS.load(Ordering::Relaxed), runs + 2);
    }
}

/// Whether the heap's own thread starts, and works, in a process of one other thread.
fn has_keeper() -> bool {
    let begin = Instant::now();
    while !HEAP.has_background_thread() {
        drop(vec![1_u8; 3 << 20]);
        if begin.elapsed() > Duration::from_secs(30) {
            return false;
        }
    }
    // A thread that has been joined may be known for a moment longer.
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    while threads() != 2 && begin.elapsed() < Duration::from_secs(30) {
        thread::sleep(Duration::from_millis(5));
    }
    work(3) && threads() == 2
}

/// A thread gets its structure in the handler: in each of the places.
#[test]
fn such_a_handler_may_be_the_first_that_a_thread_allocates_in() {
    extern "C" fn life(_: *mut libc::c_void) -> *mut libc::c_void {
        let id = fork(|| {
            HEAP.check().unwrap();
            is_good(1)
        });
        ptr::without_provenance_mut(id as usize)
    }
    if !is_child() {
        return assert!(run(FRESH));
    }
    // SAFETY: as above.
    unsafe { libc::alarm(240) };
    assert!(ARE_EARLY.load(Ordering::Relaxed));
    let _load = Load::new(2);
    for round in 0..if is_full() { 30 } else { 9 } {
        WHERE.store([PREPARE, PARENT, CHILD][round % 3], Ordering::Relaxed);
        let (mut thread, mut id) = (MaybeUninit::uninit(), ptr::null_mut());
        // SAFETY: a thread that is joined, if there is one.
        unsafe {
            let created = libc::pthread_create(thread.as_mut_ptr(), ptr::null(), life, ptr::null_mut());
            assert_eq!(created, 0);
            assert_eq!(libc::pthread_join(thread.assume_init(), &raw mut id), 0);
        }
        assert!(ended_well(id.addr() as libc::pid_t), "round {round}");
    }
}

/// The heap that `open` has made, and whether another thread has had a block of it.
static MADE: AtomicPtr<Heap<System>> = AtomicPtr::new(ptr::null_mut());
static IS_USED: AtomicBool = AtomicBool::new(false);
static IS_WAITING: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn open() {
    let heap = Heap::new(System, Config::new(1 << 24)).unwrap();
    // Release: it is made; partner: the other thread's acquire.
    MADE.store(Box::into_raw(Box::new(heap)), Ordering::Release);
}

/// In the child there is no other thread.
unsafe extern "C" fn look() {
    thread::sleep(Duration::from_millis(50));
    assert!(!IS_USED.load(Ordering::Relaxed), "by one that is not forking");
}

/// It is let go with all others, and so must be held like them: another thread that knows it waits.
#[test]
fn a_heap_that_such_a_handler_opens_is_held_too() {
    if !is_child() {
        return assert!(run(OPENED));
    }
    // SAFETY: as above.
    unsafe { libc::alarm(240) };
    assert!(ARE_EARLY.load(Ordering::Relaxed));
    let layout = Layout::new::<u64>();
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            IS_WAITING.store(true, Ordering::Relaxed);
            while MADE.load(Ordering::Relaxed).is_null() {
                std::hint::spin_loop();
            }
            // SAFETY: made before this was written; never freed. Acquire: partner: the release in `open`.
            let heap = unsafe { &*MADE.load(Ordering::Acquire) };
            let got = heap.allocate(layout).is_some();
            IS_USED.store(true, Ordering::Relaxed);
            got
        });
        while !IS_WAITING.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
        // SAFETY: as above; the heap is made by then, before the fork.
        let has_memory = || unsafe { &*MADE.load(Ordering::Relaxed) }.allocate(layout).is_some();
        assert!(ended_well(fork(has_memory)));
        assert!(other.join().unwrap() && has_memory());
    });
}

/// The child that `fork_again` has made, and whether this is it.
static MADE_AGAIN: AtomicUsize = AtomicUsize::new(0);
static IS_NESTED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn nothing() {}

/// Once, in the parent. Its child goes on as if it were the parent of the first fork.
unsafe extern "C" fn fork_again() {
    if !IS_USED.swap(true, Ordering::Relaxed) {
        // SAFETY: the child uses no locks of other threads.
        let id = unsafe { libc::fork() };
        IS_NESTED.store(id == 0, Ordering::Relaxed);
        MADE_AGAIN.store(id as usize, Ordering::Relaxed);
        assert!(work(1));
    }
}

/// It took its parent's threads for its own: the heap's, too, so that it never got one.
#[test]
#[cfg_attr(target_env = "musl", ignore = "musl has a lock of its own while handlers run")]
fn a_child_that_such_a_handler_makes_is_like_any_other() {
    if !is_child() {
        return assert!(run(NESTED));
    }
    // SAFETY: as above.
    unsafe { libc::alarm(240) };
    assert!(ARE_EARLY.load(Ordering::Relaxed));
    while !HEAP.has_background_thread() {
        drop(vec![1_u8; 3 << 20]);
    }
    let _load = Load::new(3);
    let id = fork(|| work(2));
    if IS_NESTED.load(Ordering::Relaxed) {
        let is_alone = !HEAP.has_background_thread() && HEAP.snapshot().stats.threads == 1;
        HEAP.check().unwrap();
        let sound = is_alone && is_good(1) && has_keeper() && ended_well(fork(|| work(3)));
        // SAFETY: runs no handlers and no destructors.
        unsafe { libc::_exit(i32::from(!sound)) };
    }
    assert!(ended_well(id) && ended_well(MADE_AGAIN.load(Ordering::Relaxed) as libc::pid_t));
}

/// Blocks of several lengths, if there are any.
unsafe extern "C" fn try_all() {
    RUNS.fetch_add(1, Ordering::Relaxed);
    for bytes in [100, 5000, 64 << 10, 1 << 20] {
        let layout = Layout::from_size_align(bytes, 8).unwrap();
        // SAFETY: freed with the layout.
        unsafe {
            let block = HEAP.alloc(layout);
            if !block.is_null() {
                block.write_bytes(1, bytes);
                HEAP.dealloc(block, layout);
            }
        }
    }
}

/// Its last attempts wait for other threads, which may wait for this one: but not for ever.
#[test]
fn in_a_full_heap_such_a_handler_is_refused_and_does_not_wait() {
    if !is_child() {
        return assert!(run_with(FULL, &[("PAGEHEAP_LIMIT", "32M")]));
    }
    // SAFETY: as above.
    unsafe { libc::alarm(240) };
    assert!(ARE_EARLY.load(Ordering::Relaxed));
    let over = AtomicBool::new(false);
    let layout = Layout::new::<[u8; 60 << 10]>();
    // All there is, but for a little that they let others have.
    let full = || {
        let (mut blocks, mut count) = ([ptr::null_mut(); 1024], 0);
        while !over.load(Ordering::Relaxed) {
            // SAFETY: the layout is not empty; freed with it, once.
            unsafe {
                blocks[count] = HEAP.alloc(layout);
                if !blocks[count].is_null() {
                    count += 1;
                } else if count > 0 {
                    count -= 1;
                    HEAP.dealloc(blocks[count], layout);
                }
            }
        }
        // SAFETY: as above.
        blocks[..count]
            .iter()
            .for_each(|&block| unsafe { HEAP.dealloc(block, layout) });
    };
    thread::scope(|scope| {
        let threads = [(); 3].map(|()| scope.spawn(full));
        let forks = if is_full() { 100 } else { 20 };
        (0..forks).for_each(|_| assert!(ended_well(fork(|| true))));
        over.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(RUNS.load(Ordering::Relaxed), 2 * forks);
    });
    assert!(ended_well(fork(|| work(1))), "there is memory again");
}
