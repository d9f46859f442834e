//! Under a limit: what is backed, and which hook is asked before a refusal.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use pageheap::source::{Contents, Failure, Verb};
use pageheap::{GlobalHeap, PageIndex, PageRun};

use super::*;

/// The counts match the bits.
#[track_caller]
fn agree<const COMMITS: bool>(heap: &PageHeap<Simulated<COMMITS>>) {
    let stats = heap.stats();
    assert_eq!(heap.backed().0, stats.grown.0 - stats.scavenged.0, "{stats}");
    heap.check().unwrap();
}

#[test]
fn a_soft_limit_is_kept_by_those_who_allocate() {
    const SOFT: usize = 4096;
    for granule in [4 << 10, 16 << 10, 64 << 10] {
        let config = Config::new(1 << 30).soft_limit(PageCount(SOFT));
        let heap = PageHeap::new(Simulated::new(granule), config).unwrap();
        let (mut most, mut seed) = (0, 1_u64);
        for _ in 0..400 {
            // Longer and longer runs, which do not fit where the shorter ones were.
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let length = 8 + (seed >> 33) as usize % 120;
            let runs: Vec<_> = (0..2000 / length)
                .map(|_| heap.allocate(PageCount(length)).unwrap())
                .collect();
            most = most.max(heap.backed().0);
            // SAFETY: just allocated.
            runs.into_iter().for_each(|run| unsafe { heap.free(run) });
            let high = heap.allocate(PageCount(3000 + length)).unwrap();
            most = most.max(heap.backed().0);
            // SAFETY: just allocated.
            unsafe { heap.free(high) };
        }
        agree(&heap);
        assert!(most <= SOFT + SOFT / 20 + 256, "{most} at most\n{}", heap.stats());
    }
}

/// More chunks than a thread looks at for one page: those above are live, and what is free lies below them.
#[test]
fn what_is_free_is_found_wherever_it_lies() {
    const SOFT: usize = 232 * 512;
    // The lowest part is free; no page is backed but those of the runs, and there are `left` pages above.
    let with_room_below = |left: usize| {
        let heap = PageHeap::new(Simulated::new(4096), Config::new((SOFT + left) << 13)).unwrap();
        let runs: Vec<_> = (0..232).map(|_| heap.allocate(PageCount(512)).unwrap()).collect();
        heap.set_soft_limit(PageCount(SOFT));
        // SAFETY: just allocated.
        runs[..32].iter().for_each(|run| unsafe { heap.free(*run) });
        heap
    };
    // By a thread that takes much at once, and so looks far.
    let heap = with_room_below(20_000);
    heap.allocate(PageCount(20_000)).unwrap();
    assert_eq!(heap.backed().0, SOFT + 20_000 - 32 * 512, "{}", heap.stats());
    agree(&heap);
    // By threads that take a page at a time, one after another.
    let heap = with_room_below(1000);
    for page in 0..1000 {
        let run = PageRun::new(PageIndex(SOFT + page), PageCount(1)).unwrap();
        heap.allocate_at(run).unwrap();
        assert!(heap.backed().0 <= SOFT + 8, "page {page}\n{}", heap.stats());
    }
    agree(&heap);
}

/// A gap neither counts as memory in use, nor uses up what a thread that assists may look at.
#[test]
fn a_gap_is_no_memory_to_the_scavenger() {
    const MIB: usize = 1 << 20;
    let gap = BASE + 32 * MIB..BASE + addresses(16 << 30).max(64 * MIB) - 32 * MIB;
    let reserve = gap.end - BASE + 128 * MIB;
    let source = Simulated::new(4096).with_gaps(std::slice::from_ref(&gap));
    let heap = PageHeap::new(source, Config::new(reserve)).unwrap();
    // All of the low piece, a run above the gap, and another one, which needs memory where the low piece has some free.
    let low: Vec<_> = (0..4096).map(|_| heap.allocate(PageCount(1)).unwrap()).collect();
    heap.allocate(PageCount(1024)).unwrap();
    heap.set_soft_limit(PageCount(6144));
    // SAFETY: numbers, allocated above.
    low[1..].iter().for_each(|run| unsafe { heap.free(*run) });
    let high = heap.allocate(PageCount(5000)).unwrap();
    assert!(heap.backed().0 <= 6144 + 256, "{}", heap.stats());
    heap.set_soft_limit(PageCount(usize::MAX));
    // SAFETY: as above.
    unsafe { heap.free(high) };
    // At work all the time: a tenth more than the peak stays backed.
    let clock = Hand::default();
    for _ in 0..400 {
        let run = heap.allocate(PageCount(1)).unwrap();
        clock.pass(Duration::from_millis(100));
        heap.tick(&clock);
        // SAFETY: as above.
        unsafe { heap.free(run) };
        clock.pass(Duration::from_millis(100));
        heap.tick(&clock);
    }
    assert!(heap.backed().0 < 1500, "{}", heap.stats());
    heap.check().unwrap();
}

#[test]
fn where_all_is_live_a_soft_limit_costs_little_and_refuses_nothing() {
    let config = Config::new(1 << 28).soft_limit(PageCount(1000));
    let heap = PageHeap::new(Simulated::new(4096), config).unwrap();
    let runs: Vec<_> = (0..20_000).map(|_| heap.allocate(PageCount(1)).unwrap()).collect();
    assert_eq!((runs.len(), heap.backed()), (20_000, PageCount(20_000)));
    assert!(heap.source().calls(Verb::Release) <= 400, "{}", heap.stats());
    agree(&heap);
}

#[test]
fn a_tick_brings_a_heap_below_its_soft_limit_while_work_goes_on() {
    let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 28)).unwrap();
    let run = heap.allocate(PageCount(8192)).unwrap();
    // SAFETY: just allocated.
    unsafe { heap.free(run) };
    let clock = Hand {
        now: Cell::new(Duration::from_secs(1)),
        step: Duration::from_micros(20),
        ..Hand::default()
    };
    heap.set_soft_limit(PageCount(2000));
    for step in 0..200 {
        let run = heap.allocate(PageCount(1 + step % 3)).unwrap();
        clock.pass(heap.tick(&clock).min(Duration::from_millis(100)));
        // SAFETY: just allocated.
        unsafe { heap.free(run) };
    }
    assert!(heap.backed().0 <= 2000, "{}", heap.backed().0);
    agree(&heap);
}

#[test]
fn below_a_limit_that_is_new_nothing_is_released() {
    let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 28)).unwrap();
    let [hole, kept] = [100; 2].map(|pages| heap.allocate(PageCount(pages)).unwrap());
    // SAFETY: just allocated.
    unsafe { heap.free(hole) };
    heap.set_soft_limit(PageCount(5000));
    let long = heap.allocate(PageCount(3000)).unwrap();
    assert_eq!(heap.source().calls(Verb::Release), 0, "{}", heap.stats());
    // Above it, the hole is released.
    heap.set_soft_limit(PageCount(2000));
    heap.allocate(PageCount(3000)).unwrap();
    assert!(heap.source().calls(Verb::Release) > 0, "{}", heap.stats());
    agree(&heap);
    // SAFETY: as above.
    [kept, long].into_iter().for_each(|run| unsafe { heap.free(run) });
}

#[test]
fn what_is_backed_is_counted_whatever_the_source_does() {
    let sources = [
        Simulated::new(4096).failing(Verb::Release, Failure::Every(3)),
        Simulated::new(4096).with_contents(Contents::Unknown),
    ];
    sources.into_iter().for_each(work);
    work(Simulated::committing(4096));
}

fn work<const COMMITS: bool>(source: Simulated<COMMITS>) {
    let heap = PageHeap::new(source, Config::new(1 << 26)).unwrap();
    let cache = heap.cache().unwrap();
    for round in 0..50 {
        let runs: Vec<_> = (1..40).filter_map(|pages| cache.allocate(PageCount(pages))).collect();
        // SAFETY: just allocated.
        runs.into_iter().for_each(|run| unsafe { cache.free(run) });
        heap.scavenge(PageCount(round * 7));
        agree(&heap);
    }
    heap.release(PageCount(usize::MAX));
    agree(&heap);
}

/// A block that the hook frees when it is called, and how often it was called.
static SPARE: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
static ASKED: AtomicUsize = AtomicUsize::new(0);
const LARGE: Layout = match Layout::from_size_align(10 << 20, 8) {
    Ok(layout) => layout,
    Err(_) => panic!("a layout"),
};

static HEAP: GlobalHeap = new_heap()
    .limit(16 << 20)
    .background(false)
    .on_exhausted(free_the_spare);

fn free_the_spare(wanted: Layout) -> bool {
    // In the checked build the size includes the seal.
    let seal = wanted.size().checked_sub(LARGE.size());
    assert!(seal == Some(0) || cfg!(feature = "checks") && seal.is_some_and(|seal| seal < 100));
    ASKED.fetch_add(1, Ordering::Relaxed);
    // The hook may allocate, and is not called for that.
    // SAFETY: layouts are not empty; the spare was allocated with its layout.
    unsafe {
        assert!(HEAP.alloc(LARGE).is_null());
        let spare = SPARE.swap(std::ptr::null_mut(), Ordering::Relaxed);
        if !spare.is_null() {
            HEAP.dealloc(spare, LARGE);
        }
        !spare.is_null()
    }
}

#[test]
fn the_hook_is_asked_before_a_refusal_and_may_free() {
    // SAFETY: layouts are not empty; blocks are freed with theirs.
    unsafe {
        SPARE.store(HEAP.alloc(LARGE), Ordering::Relaxed);
        let block = HEAP.alloc(LARGE);
        assert!(!block.is_null() && ASKED.load(Ordering::Relaxed) == 1);
        assert!(HEAP.alloc_zeroed(LARGE).is_null());
        assert_eq!(ASKED.load(Ordering::Relaxed), 2);
        assert!(
            HEAP.alloc(Layout::from_size_align(17 << 20, 8).unwrap()).is_null(),
            "beyond the limit"
        );
        assert_eq!(ASKED.load(Ordering::Relaxed), 2, "nobody is asked for what cannot be");
        HEAP.dealloc(block, LARGE);
        // The heap works as well as ever.
        let small = Layout::from_size_align(100, 8).unwrap();
        let blocks: Vec<_> = (0..100_000).map(|_| HEAP.alloc(small)).collect();
        assert!(blocks.iter().all(|block| !block.is_null()));
        blocks.into_iter().for_each(|block| HEAP.dealloc(block, small));
        HEAP.flush_thread();
        assert!(HEAP.release(usize::MAX) > 8 << 20);
        let again = HEAP.alloc(LARGE);
        assert!(!again.is_null());
        HEAP.dealloc(again, LARGE);
    }
}

/// What the program could do without, in pieces.
static ENTRIES: std::sync::Mutex<Vec<usize>> = std::sync::Mutex::new(Vec::new());
const ENTRY: Layout = match Layout::from_size_align(100_000, 8) {
    Ok(layout) => layout,
    Err(_) => panic!("a layout"),
};

static CACHE: GlobalHeap = new_heap().limit(64 << 20).background(false).on_exhausted(drop_an_entry);

fn drop_an_entry(_: Layout) -> bool {
    let entry = ENTRIES.lock().unwrap().pop();
    if let Some(entry) = entry {
        // SAFETY: allocated with this layout; nobody else has it.
        unsafe { CACHE.dealloc(std::ptr::with_exposed_provenance_mut(entry), ENTRY) };
    }
    entry.is_some()
}

/// After 16 calls of a hook that freed a little each time, the request was refused.
#[test]
fn the_hook_is_asked_as_long_as_it_frees() {
    // SAFETY: layouts are not empty; blocks are freed with theirs.
    unsafe {
        let entries: Vec<_> = (0..500).map(|_| CACHE.alloc(ENTRY).expose_provenance()).collect();
        assert!(entries.iter().all(|&entry| entry != 0));
        *ENTRIES.lock().unwrap() = entries;
        let wanted = Layout::from_size_align(24 << 20, 8).unwrap();
        let block = CACHE.alloc(wanted);
        let left = ENTRIES.lock().unwrap().len();
        assert!(!block.is_null() && left > 200, "{left} entries are left");
        CACHE.dealloc(block, wanted);
        while drop_an_entry(ENTRY) {}
    }
}
