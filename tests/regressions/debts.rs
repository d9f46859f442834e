//! The thread that goes over the soft limit is the one that releases memory, not another thread, and not none.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use pageheap::source::{Contents, OverSystem, Purpose, Refused, Source, System, Verbs};
use pageheap::{Config, GlobalHeap, Heap, PageCount, PageHeap};

const MIB: usize = 1 << 20;

thread_local!(static TAKES_LITTLE: Cell<bool> = const { Cell::new(false) });

/// The system, slowed down, counting released pages by the kind of thread that released them.
#[derive(Default)]
struct Counted {
    by_much: AtomicUsize,
    by_little: AtomicUsize,
}

// SAFETY: the verb is the system's, delayed.
unsafe impl Verbs for Counted {
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let by = if TAKES_LITTLE.get() {
            &self.by_little
        } else {
            &self.by_much
        };
        by.fetch_add(bytes >> 13, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(1));
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }
}

/// A thread that left the structure shared by all threads of a `Heap` left its debt there, and the next thread paid it.
#[test]
fn who_takes_little_does_not_release_for_who_takes_much() {
    // All share one structure: as if on one processor.
    let (much, little) = who_pays(|config| config.processors(2, || 0));
    assert!(much > 0 && little == 0, "{much} and {little} pages");
}

/// Threads that meet get structures of their own, and with them a few pages, for which they release 256 at the most.
#[test]
fn with_several_structures_who_takes_much_releases_most() {
    let (much, little) = who_pays(|config| config);
    assert!(much > 4 * little, "{much} and {little} pages");
}

/// How many pages are released by a thread that takes much, and by three that take little.
fn who_pays(with: impl Fn(Config) -> Config) -> (usize, usize) {
    let source: &OverSystem<Counted> = Box::leak(Box::default());
    let config = Config::new(256 * MIB).soft_limit(PageCount(1200));
    let heap = Heap::new(source, with(config)).expect("a heap");
    let (over, ready) = (AtomicBool::new(false), Barrier::new(4));
    let take_little = || {
        let layout = Layout::new::<[u64; 3]>();
        let block = heap.allocate(layout).expect("room");
        // SAFETY: just allocated.
        unsafe { heap.free(block, layout) };
    };
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                TAKES_LITTLE.set(true);
                // Its first pages, taken while the heap is below the limit: later it would owe as many itself.
                take_little();
                ready.wait();
                while !over.load(Ordering::Relaxed) {
                    take_little();
                }
            });
        }
        ready.wait();
        let (mut live, mut bytes) = (Vec::new(), 0);
        for number in 0..200_usize {
            let layout = Layout::from_size_align(40_000 + number * 104_729 % 1_000_000, 16).unwrap();
            while bytes + layout.size() > 8 * MIB {
                let (block, layout): (_, Layout) = live.swap_remove(number * 31 % live.len());
                bytes -= layout.size();
                // SAFETY: allocated below, in an earlier round.
                unsafe { heap.free(block, layout) };
            }
            live.push((heap.allocate(layout).expect("room"), layout));
            bytes += layout.size();
        }
        over.store(true, Ordering::Relaxed);
    });
    let [much, little] = [&source.by_much, &source.by_little].map(|pages| pages.load(Ordering::Relaxed));
    (much, little)
}

/// A heap that once exceeded its limit, because everything was live, never again released anything below that size.
#[test]
fn a_limit_that_was_exceeded_is_kept_again() {
    let source: &OverSystem<Counted> = Box::leak(Box::default());
    let config = Config::new(64 * MIB).soft_limit(PageCount(128));
    let heap = PageHeap::new(source, config).expect("a heap");
    let live = heap.allocate(PageCount(512)).expect("room");
    assert!(heap.backed() >= PageCount(512));
    // SAFETY: ours, and no longer used.
    unsafe { heap.free(live) };
    heap.release(PageCount(usize::MAX));
    let runs = [16; 8].map(|pages| heap.allocate(PageCount(pages)).expect("room"));
    for run in runs.into_iter().step_by(2) {
        // SAFETY: as above.
        unsafe { heap.free(run) };
    }
    heap.allocate(PageCount(64)).expect("room");
    assert!(heap.backed() <= PageCount(128), "{} of 128", heap.backed().0);
}

/// The system, with growth stopped on demand, and a count of released pages.
#[derive(Debug)]
struct Stopped {
    stop: AtomicBool,
    has_stopped: AtomicBool,
    released: AtomicUsize,
}

// SAFETY: the verbs are the system's, delayed.
unsafe impl Verbs for Stopped {
    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        while self.stop.load(Ordering::SeqCst) {
            self.has_stopped.store(true, Ordering::SeqCst);
            thread::yield_now();
        }
        // SAFETY: the caller's promise.
        unsafe { System.prepare(purpose, start, bytes) }
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        self.released.fetch_add(bytes >> 13, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }
}

static STOPPED: OverSystem<Stopped> = OverSystem(Stopped {
    stop: AtomicBool::new(false),
    has_stopped: AtomicBool::new(false),
    released: AtomicUsize::new(0),
});

/// While a thread without a structure of its own was in a source's verb, holding the shared one, no other thread
/// released what it owed.
#[test]
fn who_holds_the_shared_structure_keeps_nobody_from_assisting() {
    static OTHER: GlobalHeap = GlobalHeap::new().reserve(64 * MIB).background(false);
    // SAFETY: the system's pages are memory.
    static HEAP: GlobalHeap<&OverSystem<Stopped>> =
        unsafe { GlobalHeap::with_source(&STOPPED, Config::new(1 << 30).soft_limit(PageCount(1024))) };
    let of = |mib: usize| Layout::from_size_align(mib * MIB, 16).unwrap();
    // SAFETY: no layout here is empty; what is freed was allocated with it.
    let (take, give) = unsafe {
        (
            |mib| NonNull::new(HEAP.alloc(of(mib))).expect("room"),
            |block: NonNull<u8>, mib| HEAP.dealloc(block.as_ptr(), of(mib)),
        )
    };
    // 64 MiB have been grown and 8 are backed; half of these are free, in pieces of 2.
    give(take(64), 64);
    HEAP.release(usize::MAX);
    let blocks = [2; 4].map(take);
    give(blocks[0], 2);
    give(blocks[2], 2);
    thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: as above. The thread's own structure belongs to the other heap.
            assert!(!unsafe { OTHER.alloc(of(1)) }.is_null());
            STOPPED.stop.store(true, Ordering::SeqCst);
            take(128);
        });
        while !STOPPED.has_stopped.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        let before = STOPPED.released.load(Ordering::SeqCst);
        take(4);
        let released = STOPPED.released.load(Ordering::SeqCst) - before;
        STOPPED.stop.store(false, Ordering::SeqCst);
        assert!(released >= 500, "{released} pages for 512 taken");
    });
}

/// The system, but a release of less than a chunk waits for another thread's allocation. Counts the waits in vain.
#[derive(Debug, Default)]
struct Waits {
    waiting: AtomicBool,
    allocated: AtomicBool,
    holes: AtomicUsize,
    in_vain: AtomicUsize,
}

// SAFETY: the verb is the system's, delayed.
unsafe impl Verbs for Waits {
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // Only once: the other thread may have to release something itself.
        if bytes < MIB && !self.waiting.swap(true, Ordering::SeqCst) {
            let comes = (0..500).any(|_| {
                thread::sleep(Duration::from_millis(10));
                self.allocated.load(Ordering::SeqCst)
            });
            self.in_vain.fetch_add(usize::from(!comes), Ordering::SeqCst);
        }
        self.holes.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }
}

/// The thread that exceeds a `Heap`'s soft limit gives back memory between blocks only after it has left the structure
/// that all threads share.
#[test]
#[cfg_attr(windows, ignore = "no holes where pages are committed")]
fn between_blocks_nothing_is_released_under_the_lock_of_a_heap() {
    let source: &OverSystem<Waits> = Box::leak(Box::default());
    let heap = Heap::new(source, Config::new(256 * MIB).soft_limit(PageCount(1024))).expect("a heap");
    let of = |bytes| Layout::from_size_align(bytes, 16).unwrap();
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(1));
                if source.waiting.load(Ordering::SeqCst) && !source.allocated.load(Ordering::SeqCst) {
                    heap.allocate(of(64)).expect("room");
                    source.allocated.store(true, Ordering::SeqCst);
                }
            }
        });
        // 7 MiB, of which every fourth block stays; then blocks of other sizes, so no span is free.
        let first: Vec<_> = (0..700).map(|_| heap.allocate(of(10_000)).expect("room")).collect();
        for (number, block) in first.into_iter().enumerate() {
            if number % 4 != 0 {
                // SAFETY: allocated above, and no longer used.
                unsafe { heap.free(block, of(10_000)) };
            }
        }
        for number in 0..600 {
            heap.allocate(of(2000 + number % 7 * 300)).expect("room");
        }
        ended.store(true, Ordering::SeqCst);
    });
    let stats = heap.stats();
    assert_eq!(source.in_vain.load(Ordering::SeqCst), 0, "{stats}");
    assert!(
        source.holes.load(Ordering::SeqCst) > 0 && stats.pages.holes.0 > 0,
        "{stats}"
    );
    assert!(heap.stats().pages.backed.0 <= 1024 + 1024 / 20, "{stats}");
}
