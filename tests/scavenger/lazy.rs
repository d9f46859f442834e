//! Lazy releases and huge pages, on sources that record their calls.

use std::alloc::{GlobalAlloc, Layout};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use pageheap::internals::has_fence;
use pageheap::source::{Contents, Failure, OverSystem, Refused, Source, System, Verb, Verbs};
use pageheap::{GlobalHeap, HugePages};

use super::*;

const PAGES: usize = 2048;

fn heap(source: Simulated, lazily: bool) -> PageHeap<Simulated> {
    PageHeap::new(source, Config::new(64 << 20).release_lazily(lazily)).unwrap()
}

/// Ticks until nothing is left to do; whether that point is reached.
fn rests(heap: &PageHeap<Simulated>, clock: &Hand) -> bool {
    (0..10_000).any(|_| match heap.tick(clock) {
        Duration::MAX => true,
        pause => {
            clock.pass(pause);
            false
        }
    })
}

/// Takes all pages, and frees all but every `keep`-th.
fn used(heap: &PageHeap<Simulated>, keep: usize) -> usize {
    torn(heap, PAGES, |page| page % keep != 1)
}

#[test]
fn what_goes_by_and_by_goes_lazily_and_is_never_zero() {
    for keep in [2, 7, PAGES * 2] {
        let heap = heap(Simulated::new(4096), true);
        let free = used(&heap, keep);
        let clock = hand();
        assert!(rests(&heap, &clock), "{}", heap.stats());
        let stats = heap.stats();
        assert_eq!(heap.source().calls(Verb::Release), 0, "{stats}");
        // Each page once, and counted once.
        assert_eq!(
            (stats.released, stats.released_lazily),
            (free as u64, free as u64),
            "{stats}"
        );
        assert_eq!(stats.backed.0, stats.grown.0 - stats.scavenged.0, "{stats}");
        assert!(stats.backed.0 >= PAGES, "it may all be there yet: {stats}");
        // At rest, nothing is released again.
        let calls = heap.source().calls(Verb::ReleaseLazily);
        assert!(rests(&heap, &clock));
        assert_eq!(heap.source().calls(Verb::ReleaseLazily), calls);
        // Pages that were never handed out are zero; the others are not reported as zero.
        let zero: usize = (0..free)
            .map(|_| heap.allocate_tracked(PageCount(1)).unwrap())
            .filter(|page| page.run.start().0 < PAGES)
            .map(|page| page.scavenged.0)
            .sum();
        assert_eq!(zero, 0);
        heap.check().unwrap();
    }
}

#[test]
fn a_release_is_at_once_and_a_scavenge_as_the_heap_has_it() {
    for lazily in [false, true] {
        let heap = heap(Simulated::new(4096), lazily);
        let free = used(&heap, 2);
        assert_eq!(heap.scavenge(PageCount(100)).0, 100);
        assert_eq!(heap.stats().released_lazily, if lazily { 100 } else { 0 });
        heap.release(PageCount(usize::MAX));
        let stats = heap.stats();
        assert_eq!(stats.released_lazily, if lazily { 100 } else { 0 });
        // Pages that were released lazily are now released at once, and known to be zero.
        assert_eq!(stats.backed.0, PAGES - free, "{stats}");
        heap.check().unwrap();
    }
}

#[test]
fn a_soft_limit_is_kept_at_once() {
    let heap = heap(Simulated::new(4096), true);
    used(&heap, 2);
    let clock = hand();
    assert!(rests(&heap, &clock));
    assert!(heap.backed().0 >= PAGES);
    // By the scavenger, from what it has released lazily before.
    heap.set_soft_limit(PageCount(1500));
    let run = heap.allocate(PageCount(1)).unwrap();
    // SAFETY: just allocated.
    unsafe { heap.free(run) };
    for _ in 0..100 {
        clock.pass(heap.tick(&clock).min(Duration::from_millis(250)));
    }
    assert!(heap.backed().0 <= 1500, "{}", heap.stats());
    heap.check().unwrap();
}

#[test]
fn a_busy_heap_keeps_its_peak_though_nobody_can_tell_what_is_backed() {
    let heap = heap(Simulated::new(4096), true);
    used(&heap, PAGES * 2);
    let clock = hand();
    let mut second = 0;
    while heap.source().calls(Verb::ReleaseLazily) == 0 && second < 100 {
        for _ in 0..4 {
            let run = heap.allocate(PageCount(1 + second % 3)).unwrap();
            heap.tick(&clock);
            clock.pass(Duration::from_millis(250));
            // SAFETY: just allocated.
            unsafe { heap.free(run) };
        }
        second += 1;
    }
    assert!((9..=13).contains(&second), "after {second} seconds");
}

#[test]
fn a_lazy_release_that_is_refused_leaves_the_pages() {
    let heap = heap(
        Simulated::new(4096).failing(Verb::ReleaseLazily, Failure::Every(1)),
        true,
    );
    used(&heap, 2);
    assert!(rests(&heap, &hand()));
    assert_eq!((heap.stats().released, heap.stats().released_lazily), (0, 0));
    heap.check().unwrap();
}

/// Memory of unknown contents used to be released again at each look, four times a second, if it consisted of whole
/// huge pages.
#[test]
fn what_is_not_known_is_released_once_though_it_is_all_of_the_heap() {
    let heap = heap(Simulated::new(4096).with_contents(Contents::Unknown), false);
    used(&heap, PAGES * 2);
    assert!(rests(&heap, &hand()), "{}", heap.stats());
    // The first campaign may repeat what it did before it knew that.
    let released = heap.stats().released as usize;
    assert!((PAGES - 1..=PAGES + 512).contains(&released), "{}", heap.stats());
}

/// Such memory counted as backed for ever, so a soft limit below the peak was never met again.
#[test]
fn what_has_gone_is_not_backed_though_nobody_knows_what_it_reads_as() {
    let heap = heap(Simulated::new(4096).with_contents(Contents::Unknown), false);
    heap.set_soft_limit(PageCount(PAGES / 4));
    let free = used(&heap, 7);
    heap.release(PageCount(usize::MAX));
    let stats = heap.stats();
    assert!(stats.released as usize >= free, "{stats}");
    assert_eq!(stats.scavenged, stats.free, "{stats}");
    assert_eq!(heap.backed().0, stats.grown.0 - stats.free.0, "{stats}");
    // And it is never taken for zero.
    let calls = heap.source().calls(Verb::Release);
    for _ in 0..free {
        let page = heap.allocate_tracked(PageCount(1)).unwrap();
        assert_eq!(page.scavenged.0, 0);
        // SAFETY: just allocated.
        unsafe { heap.free(page.run) };
    }
    // Below the limit, nothing is released on its account.
    assert!(heap.source().calls(Verb::Release) <= calls + 1);
    heap.check().unwrap();
}

#[test]
fn the_source_is_told_of_huge_pages_once_and_may_refuse() {
    for wish in [HugePages::System, HugePages::Advise, HugePages::Avoid] {
        for refuses in [false, true] {
            let source = Simulated::new(4096);
            if refuses {
                source.fail(Verb::Advise, Failure::Every(1));
            }
            let heap = PageHeap::new(source, Config::new(64 << 20).huge_pages(wish)).unwrap();
            used(&heap, 2);
            heap.release(PageCount(usize::MAX));
            let told = usize::from(wish != HugePages::System);
            assert_eq!(heap.source().calls(Verb::Advise), told);
            assert_eq!(heap.stats().calls.advise as usize, told);
            let advised = heap.source().advised();
            match advised.as_slice() {
                [] => assert!(told == 0 || refuses),
                all => assert!(!refuses && all == [(0, heap.capacity().0 * 8192, wish)]),
            }
            heap.check().unwrap();
        }
    }
}

/// The system, except that lazily released pages keep their contents or lose them at once, either of which the kernel
/// may do.
struct Fickle {
    random: AtomicU64,
    lost: AtomicUsize,
    kept: AtomicUsize,
}

// SAFETY: every verb is the system's; a lazy release reports the contents as unknown.
unsafe impl Verbs for Fickle {
    unsafe fn release_lazily(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let granule = System.granule();
        for offset in (0..bytes).step_by(granule) {
            let step = |random: u64| Some(random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
            let random = self.random.try_update(Ordering::Relaxed, Ordering::Relaxed, step);
            if random.unwrap_or_default() >> 40 & 1 == 0 {
                // SAFETY: the caller's promise: nothing uses it.
                unsafe { start.add(offset).write_bytes(0, granule) };
                self.lost.fetch_add(1, Ordering::Relaxed);
            } else {
                self.kept.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(Contents::Unknown)
    }
}

static FICKLE: OverSystem<Fickle> = OverSystem(Fickle {
    random: AtomicU64::new(1),
    lost: AtomicUsize::new(0),
    kept: AtomicUsize::new(0),
});

// SAFETY: the system's pages are memory.
static HEAP: GlobalHeap<&OverSystem<Fickle>> =
    unsafe { GlobalHeap::with_source(&FICKLE, Config::new(by_width(1 << 30, 256 << 20)).release_lazily(true)) };

/// The system, except that two times out of three it gives back only the first half of the range, and then refuses.
struct Halfway {
    asked: AtomicUsize,
    halves: AtomicUsize,
}

// SAFETY: every verb is the system's; after a refusal the contents are unknown, as a refusal implies.
unsafe impl Verbs for Halfway {
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let granule = System.granule();
        let half = (bytes / 2).next_multiple_of(granule);
        let whole = self.asked.fetch_add(1, Ordering::Relaxed).is_multiple_of(3);
        // SAFETY: the caller's promise, for all of the range or a part.
        let done = unsafe { System.release(start, if whole { bytes } else { half }) };
        if whole {
            return done;
        }
        self.halves.fetch_add(1, Ordering::Relaxed);
        Err(Refused)
    }
}

static HALFWAY: OverSystem<Halfway> = OverSystem(Halfway {
    asked: AtomicUsize::new(0),
    halves: AtomicUsize::new(0),
});

// SAFETY: the system's pages are memory.
static HALVED: GlobalHeap<&OverSystem<Halfway>> =
    unsafe { GlobalHeap::with_source(&HALFWAY, Config::new(by_width(1 << 30, 256 << 20))) };

#[test]
#[cfg_attr(windows, ignore = "decommitting is all or nothing")]
fn half_of_an_advice_is_taken_for_a_refusal() {
    stamp(&HALVED);
    let halves = HALFWAY.halves.load(Ordering::Relaxed);
    assert!(halves > 100, "{halves}");
    let pages = HALVED.stats().pages;
    assert!(pages.released > 0 && pages.calls.release > halves as u64, "{pages}");
    HALVED.check().unwrap();
}

/// Contents survive or vanish; zeroed blocks are zero, and live ones keep their contents.
#[test]
fn contents_survive_or_vanish_and_nobody_believes_either() {
    stamp(&HEAP);
    let (lost, survived) = (FICKLE.lost.load(Ordering::Relaxed), FICKLE.kept.load(Ordering::Relaxed));
    assert!(lost > 1000 && survived > 1000, "{lost} lost, {survived} kept");
}

/// Blocks, zeroed and not, with a stamp in each, while memory is given back: what is reported as zero is zero, and live
/// blocks stay as they are.
fn stamp<S: Source + Send + Sync + 'static>(heap: &GlobalHeap<S>) {
    let (clock, mut kept, mut random) = (hand(), Vec::new(), 12345_u64);
    let mut below = |end: usize| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % end
    };
    for round in 0..3000_usize {
        let most = [5000, 80_000, 700_000][below(3)];
        let layout = Layout::from_size_align(1 + below(most), 8).unwrap();
        // SAFETY: the layout is not empty; reads and writes are inside the block; it is freed with its layout.
        unsafe {
            let block = heap.alloc_zeroed(layout);
            let bytes = std::slice::from_raw_parts_mut(block, layout.size());
            assert!(all_are(bytes, 0), "round {round}, {layout:?}");
            bytes.fill(round as u8 | 1);
            kept.push((block, layout, round as u8 | 1));
            while kept.len() > 40 || round % 100 == 0 && !kept.is_empty() {
                let (block, layout, mark) = kept.swap_remove(below(kept.len()));
                let bytes = std::slice::from_raw_parts(block, layout.size());
                assert!(all_are(bytes, mark), "round {round}, {layout:?}");
                heap.dealloc(block, layout);
            }
        }
        if round % 100 < 10 {
            if !has_fence() {
                // Then the others do not reach it.
                heap.flush_thread();
            }
            // As if it had been silent for long.
            clock.pass(heap.tick(&clock).min(Duration::from_secs(2)));
        }
        if round % 50 == 0 {
            heap.scavenge(PageCount(below(2000)));
        }
    }
}
