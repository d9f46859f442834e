//! Looking for memory between blocks keeps no thread from that thread's own memory, and does not go on for ever.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use pageheap::source::{Contents, OverSystem, Purpose, Refused, Source, System, Verbs};
use pageheap::{Config, Heap, PageCount};

use super::common::{by_width, is_in_order};

const ONE: Layout = Layout::new::<[u8; 24 << 10]>();

/// The system, but the first release of exactly one block waits until another thread has tried to allocate.
#[derive(Debug, Default)]
struct Slow {
    asked: AtomicBool,
    /// 1: that thread got a block; 2: it got none.
    answer: AtomicU32,
}

// SAFETY: the verb is the system's, delayed.
unsafe impl Verbs for Slow {
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        if bytes == ONE.size() && !self.asked.swap(true, Ordering::SeqCst) {
            while self.answer.load(Ordering::SeqCst) == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        }
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }
}

/// A full heap with one free block gives nothing back, since a thread may ask for the block. With two, in two spans,
/// one can be allocated while the memory of the other is given back.
#[test]
#[cfg_attr(windows, ignore = "no holes where pages are committed")]
fn in_a_full_heap_a_block_is_there_while_memory_goes() {
    let source: &OverSystem<Slow> = Box::leak(Box::default());
    // Four spans of 12 pages (of 13 under a seal), a page for racks, and too few for a block outside of spans.
    let limit = PageCount(if cfg!(feature = "checks") { 55 } else { 51 });
    let heap = Heap::new(source, Config::new(1 << 24).limit(limit)).expect("a heap");
    let blocks: Vec<_> = core::iter::from_fn(|| heap.allocate(ONE)).collect();
    assert!(blocks.len() > 12, "{}", blocks.len());
    let (done, mut answers) = (AtomicBool::new(false), Vec::new());
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(1));
                if source.asked.load(Ordering::SeqCst) && source.answer.load(Ordering::SeqCst) == 0 {
                    let got = heap.allocate(ONE);
                    source.answer.store(if got.is_some() { 1 } else { 2 }, Ordering::SeqCst);
                }
            }
        });
        for block in [0, blocks.len() - 1] {
            // SAFETY: allocated above, and no longer used.
            unsafe { heap.free(blocks[block], ONE) };
            heap.release(usize::MAX);
            answers.push(source.answer.load(Ordering::SeqCst));
        }
        done.store(true, Ordering::SeqCst);
    });
    assert_eq!(answers, [0, 1], "{}", heap.stats());
    assert!(heap.stats().pages.holes.0 > 0, "{}", heap.stats());
    heap.check().unwrap();
    assert!(heap.allocate(ONE).is_some() && heap.allocate(ONE).is_none());
}

/// The system, but it refuses more pages on demand, and a release between `first` and `end` does not return until,
/// after its start, pages have been requested a given number of times.
#[derive(Debug, Default)]
struct Staged {
    is_full: AtomicBool,
    first: AtomicUsize,
    end: AtomicUsize,
    inside: AtomicBool,
    /// Requests for pages meanwhile, and the one at which the call ends.
    asked: AtomicUsize,
    last: AtomicUsize,
    may_end: AtomicBool,
    has_ended: AtomicBool,
}

impl Staged {
    /// Lets the other thread's call end, and waits for it.
    fn end_call(&self) {
        self.may_end.store(true, Ordering::SeqCst);
        while !self.has_ended.load(Ordering::SeqCst) {
            thread::yield_now();
        }
    }
}

// SAFETY: the verbs are the system's, delayed, or do nothing and say so.
unsafe impl Verbs for Staged {
    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        if purpose == Purpose::Pages && self.is_full.load(Ordering::SeqCst) {
            let inside = self.inside.load(Ordering::SeqCst);
            if inside && self.asked.fetch_add(1, Ordering::SeqCst) == self.last.load(Ordering::SeqCst) {
                self.end_call();
            }
            return Err(Refused);
        }
        // SAFETY: the caller's promise.
        unsafe { System.prepare(purpose, start, bytes) }
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let span = self.first.load(Ordering::SeqCst)..self.end.load(Ordering::SeqCst);
        if span.contains(&start.addr().get()) && !self.inside.swap(true, Ordering::SeqCst) {
            while !self.may_end.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(1));
            }
        }
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }
}

/// A heap is full not only when it has grown to its limit, but also when the rest up to the limit is shorter than a
/// span, and when its source has no more.
#[test]
fn a_heap_that_cannot_grow_is_full() {
    for (limit, refuses) in [(513, false), (1 << 13, true)] {
        let source: &OverSystem<Staged> = Box::leak(Box::default());
        let heap = Heap::new(source, Config::new(1 << 26).limit(PageCount(limit))).expect("a heap");
        let first = heap.allocate(ONE).expect("a block");
        // Once it has grown to a chunk: it begins with less.
        let long = Layout::new::<[u8; 1 << 20]>();
        let whole = heap.allocate(long).expect("a long block");
        // SAFETY: just allocated, and not used.
        unsafe { heap.free(whole, long) };
        source.is_full.store(refuses, Ordering::SeqCst);
        let blocks = core::iter::from_fn(|| heap.allocate(ONE)).count();
        assert!((100..200).contains(&blocks), "{blocks}");
        // SAFETY: allocated above, and no longer used.
        unsafe { heap.free(first, ONE) };
        heap.release(usize::MAX);
        assert_eq!(heap.stats().pages.holes.0, 0, "limit {limit}: {}", heap.stats());
        assert!(heap.allocate(ONE).is_some() && heap.allocate(ONE).is_none());
    }
}

/// A full heap: three of a span's four blocks are free, and in hand, when the last one is freed. A thread that wants a
/// long block gets the pages once the call ends, at whichever of its attempts that happens: the returning span is then
/// empty, and becomes the spare of its class.
#[test]
#[cfg_attr(windows, ignore = "no holes where pages are committed")]
#[cfg_attr(all(feature = "checks", not(windows)), ignore = "seals take room")]
fn pages_that_come_home_while_somebody_looks_for_them_are_found() {
    const LONG: Layout = Layout::new::<[u8; 90 << 10]>();
    for last in 0..6 {
        let source: &OverSystem<Staged> = Box::leak(Box::default());
        source.last.store(last, Ordering::SeqCst);
        let heap = Heap::new(source, Config::new(1 << 24)).expect("a heap");
        let mut blocks = vec![heap.allocate(ONE).expect("a block")];
        source.is_full.store(true, Ordering::SeqCst);
        blocks.extend(core::iter::from_fn(|| heap.allocate(ONE)));
        while heap.allocate(Layout::new::<[u8; 40 << 10]>()).is_some() {}
        blocks.sort_unstable();
        // Spans of four blocks, the first span being the lowest. A free slot in another span lets the first be taken in
        // hand.
        let span = &blocks[..4];
        source.end.store(span[3].addr().get() + ONE.size(), Ordering::SeqCst);
        source.first.store(span[0].addr().get(), Ordering::SeqCst);
        for block in span[..3].iter().chain(&blocks[9..10]) {
            // SAFETY: allocated above, and no longer used.
            unsafe { heap.free(*block, ONE) };
        }
        let got = thread::scope(|scope| {
            scope.spawn(|| {
                heap.release(usize::MAX);
                source.has_ended.store(true, Ordering::SeqCst);
            });
            while !source.inside.load(Ordering::SeqCst) {
                assert!(!source.has_ended.load(Ordering::SeqCst), "nothing was released");
                thread::sleep(Duration::from_millis(1));
            }
            // SAFETY: allocated above, and no longer used.
            unsafe { heap.free(span[3], ONE) };
            let got = heap.allocate(LONG);
            source.end_call();
            got
        });
        // Either it asked less often, and was refused while the pages were in hand, or it found them.
        let early = source.asked.load(Ordering::SeqCst) <= last;
        assert!(got.is_some() || early, "at {last}: {}", heap.stats());
        assert_eq!(heap.allocate(LONG).is_some(), got.is_none(), "at {last}");
        heap.check().unwrap();
    }
}

/// The system, counting calls; it may refuse.
#[derive(Debug, Default)]
struct Counted {
    refuses: AtomicBool,
    calls: AtomicUsize,
}

// SAFETY: the verb is the system's, or does nothing and says so.
unsafe impl Verbs for Counted {
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        if self.refuses.load(Ordering::SeqCst) {
            return Err(Refused);
        }
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }
}

/// Random blocks of changing sizes in a heap that has far more live memory than its soft limit. Returns the number of
/// calls to the source, and the most during one allocation.
fn calls_of(refuses: bool, blocks: usize, steps: usize) -> (usize, usize) {
    let source: &OverSystem<Counted> = Box::leak(Box::default());
    source.refuses.store(refuses, Ordering::SeqCst);
    let heap = Heap::new(source, Config::new(1 << 30).soft_limit(PageCount(256))).expect("a heap");
    let (mut random, mut live, mut most) = (7_u64, Vec::new(), 0);
    for _ in 0..steps {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let layout = Layout::from_size_align(1100 + random as usize % 31_000, 8).unwrap();
        let before = source.calls.load(Ordering::SeqCst);
        live.push((heap.allocate(layout).expect("room"), layout));
        most = most.max(source.calls.load(Ordering::SeqCst) - before);
        if live.len() > blocks {
            let (block, layout) = live.swap_remove((random >> 20) as usize % live.len());
            // SAFETY: allocated above, and no longer used.
            unsafe { heap.free(block, layout) };
        }
    }
    heap.check().unwrap();
    (source.calls.load(Ordering::SeqCst), most)
}

/// While memory between blocks is given back, slots are in hand in turn. A check that saw one in hand, and its class
/// after the slot had come back, would report a false fault, so it waits for the release. (Half of all runs failed;
/// hence eight.) Each hole has 4 KiB.
#[test]
#[cfg_attr(windows, ignore = "no holes where pages are committed")]
fn a_check_waits_until_no_slot_is_in_hand() {
    const SLOT: Layout = Layout::new::<[u8; 6144]>();
    for _ in 0..8 {
        let source: &OverSystem<Counted> = Box::leak(Box::default());
        let heap = Heap::new(source, Config::new(1 << 28)).expect("a heap");
        let blocks: Vec<_> = (0..4000).map(|_| heap.allocate(SLOT).expect("room")).collect();
        for &block in blocks.iter().step_by(2) {
            // SAFETY: allocated above, and no longer used.
            unsafe { heap.free(block, SLOT) };
        }
        thread::scope(|scope| {
            let release = scope.spawn(|| heap.release(usize::MAX));
            while !release.is_finished() {
                // The check waits for the turn. If the release makes way for another test's fork, it must get the turn
                // again.
                if source.calls.load(Ordering::SeqCst) > 0 {
                    is_in_order(|| heap.check());
                    thread::sleep(Duration::from_micros(100));
                }
            }
        });
        let calls = source.calls.load(Ordering::SeqCst);
        assert!(calls > 500, "{calls} calls\n{}", heap.stats());
    }
}

/// Each hole has 4 KiB.
#[test]
#[cfg_attr(windows, ignore = "no holes where pages are committed")]
fn one_allocation_waits_for_a_bounded_number_of_calls() {
    let source: &OverSystem<Counted> = Box::leak(Box::default());
    let heap = Heap::new(source, Config::new(1 << 28)).expect("a heap");
    let layout = Layout::new::<[u8; 6144]>();
    let blocks: Vec<_> = (0..4000).map(|_| heap.allocate(layout).expect("room")).collect();
    for &block in blocks.iter().step_by(2) {
        // SAFETY: allocated above, and no longer used.
        unsafe { heap.free(block, layout) };
    }
    heap.set_soft_limit(PageCount(256));
    let mut most = 0;
    for _ in 0..1000 {
        let before = source.calls.load(Ordering::SeqCst);
        heap.allocate(Layout::new::<[u8; 40_000]>()).expect("room");
        most = most.max(source.calls.load(Ordering::SeqCst) - before);
    }
    assert!((100..272).contains(&most), "{most} calls\n{}", heap.stats());
}

/// A heap that once had one very long block has free pages above all others for good. The memory between live blocks
/// goes all the same when the first allocation is over the limit, not after one for each 128 MiB of them.
#[test]
#[cfg_attr(windows, ignore = "no holes where pages are committed")]
fn what_a_heap_once_had_keeps_nobody_from_what_it_has() {
    const SLOT: Layout = Layout::new::<[u8; 6144]>();
    let long = Layout::from_size_align(by_width(16 << 30, 512 << 20), 8).unwrap();
    let heap = Heap::new(System, Config::new(by_width(32 << 30, 1 << 30))).expect("a heap");
    let blocks: Vec<_> = (0..4000).map(|_| heap.allocate(SLOT).expect("room")).collect();
    let longest = heap.allocate(long).expect("room");
    // SAFETY: allocated above, and no longer used.
    unsafe { heap.free(longest, long) };
    heap.release(long.size());
    for (index, &block) in blocks.iter().enumerate() {
        if index % 8 != 0 {
            // SAFETY: allocated above, and no longer used.
            unsafe { heap.free(block, SLOT) };
        }
    }
    heap.set_soft_limit(PageCount(256));
    let tries = (1..1000).find(|_| {
        heap.allocate(Layout::new::<[u8; 40_000]>()).expect("room");
        heap.stats().pages.holes.0 > 0
    });
    assert!(tries == Some(1), "{tries:?}\n{}", heap.stats());
}

/// Far above the limit, pages that are given back are taken again at once.
#[test]
fn a_heap_far_above_its_limit_does_not_turn_over_all_it_has() {
    let (all, _) = calls_of(false, 10_000, 40_000);
    assert!(all < 40_000 / 3, "{all} calls");
}

#[test]
#[cfg_attr(windows, ignore = "no holes where pages are committed")]
fn where_the_source_says_no_it_is_not_asked_for_each_span() {
    let (all, most) = calls_of(true, 3000, 20_000);
    assert!(all > 10, "{all} calls");
    assert!(most <= 4, "{most} calls of {all}");
}
