//! The driver, on the simulated source, whose pages have the operating system's size, and a clock set by hand.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pageheap::internals::{Shape, has_fence};
use pageheap::source::{Contents, Failure, Verb};
use pageheap::{Geometry, PageIndex, PageRun};

use super::*;

const PAGE: usize = 8192;

fn heap(source: Simulated, bytes: usize) -> PageHeap<Simulated> {
    PageHeap::new(source, Config::new(bytes)).unwrap()
}

/// Ticks as requested until nothing is left to do, for at most `most` by the clock. Returns how long that took.
fn until_rest<G: Shape>(heap: &PageHeap<Simulated, G>, clock: &Hand, most: Duration) -> Option<Duration> {
    let begin = clock.now.get();
    while clock.now.get() - begin <= most {
        match heap.tick(clock) {
            Duration::MAX => return Some(clock.now.get() - begin),
            pause => clock.pass(pause),
        }
    }
    None
}

/// Ticks as requested, and at least once, for so long by the clock.
fn tick_for(heap: &PageHeap<Simulated>, clock: &Hand, time: Duration) {
    let end = clock.now.get() + time;
    while clock.now.get() < end {
        clock.pass(heap.tick(clock).min(time));
    }
}

#[test]
fn a_silent_heap_holds_what_is_live_whatever_the_systems_page() {
    for granule in [4 << 10, 16 << 10, 64 << 10] {
        let heap = heap(Simulated::new(granule), 64 << 20);
        let per = (granule / PAGE).max(1);
        // Every other granule, and parts of the others.
        let whole = |page: usize| (page / per).is_multiple_of(2);
        torn(&heap, 4096, |page| whole(page) || per > 1 && page % per == 0);
        let clock = hand();
        let took = until_rest(&heap, &clock, Duration::from_secs(60)).expect("it comes to rest");
        let stats = heap.stats();
        assert_eq!(stats.scavenged.0, stats.grown.0 - 4096 + 2048, "{granule}: {stats}");
        assert!(took <= Duration::from_secs(20), "{took:?}");
        let calls = heap.source().calls(Verb::Release);
        assert_eq!(until_rest(&heap, &clock, Duration::from_secs(60)), Some(Duration::ZERO));
        assert_eq!(heap.source().calls(Verb::Release), calls);
        heap.check().unwrap();
    }
}

/// Nothing can be released in granules longer than a chunk: a silent heap began a new campaign at every look, for ever.
#[test]
fn where_nothing_can_be_released_a_silent_heap_rests() {
    let source = Simulated::new(8192);
    let heap: PageHeap<Simulated, Geometry<2, 6, 2, 1>> = PageHeap::with_shape(source, Config::new(64 << 10)).unwrap();
    let run = heap.allocate(PageCount(200)).unwrap();
    // SAFETY: just allocated; nothing uses it.
    unsafe { heap.free(run) };
    until_rest(&heap, &hand(), Duration::from_secs(60)).expect("it comes to rest");
    assert_eq!(heap.source().calls(Verb::Release), 0);
}

/// It was never silent, since it took what it could not release for needed, at each look.
#[test]
fn so_does_one_above_its_soft_limit() {
    let config = Config::new(64 << 10).soft_limit(PageCount(100));
    let heap: PageHeap<Simulated, Geometry<2, 6, 2, 1>> = PageHeap::with_shape(Simulated::new(8192), config).unwrap();
    let run = heap.allocate(PageCount(200)).unwrap();
    // SAFETY: just allocated; nothing uses it.
    unsafe { heap.free(run) };
    until_rest(&heap, &hand(), Duration::from_secs(60)).expect("it comes to rest");
}

#[test]
fn whole_heaps_go_within_a_second_of_silence() {
    let heap = heap(Simulated::new(4096), 64 << 20);
    torn(&heap, 8192, |_| true);
    let clock = hand();
    let took = until_rest(&heap, &clock, Duration::from_secs(60)).unwrap();
    assert!(
        took >= Duration::from_secs(1) && took <= Duration::from_secs(2),
        "{took:?}"
    );
    let stats = heap.stats();
    assert_eq!(stats.scavenged, stats.grown);
}

/// The clock was read before each chunk in which there might be something: in a heap that has grown to 1 TiB, which is
/// 262,144 chunks, these readings were a fifth of a second of work, in each campaign.
#[test]
fn a_campaign_passes_over_what_has_been_released() {
    let heap = heap(Simulated::new(4096), 1 << if usize::BITS > 32 { 34 } else { 30 });
    let all = heap.allocate(heap.capacity()).unwrap();
    // SAFETY: just allocated; nothing uses it.
    unsafe { heap.free(all) };
    heap.release(PageCount(usize::MAX));
    let _kept = heap.allocate(PageCount(1)).unwrap();
    torn(&heap, 512, |_| true);
    let clock = hand();
    until_rest(&heap, &clock, Duration::from_secs(60)).expect("it comes to rest");
    assert_eq!(heap.backed(), PageCount(1));
    let readings = clock.work.get().as_micros() / clock.step.as_micros();
    assert!(readings < 200, "the clock was read {readings} times");
}

#[test]
fn a_refusal_is_taken_for_an_answer() {
    for failure in [Failure::Every(1), Failure::Every(2)] {
        let heap = heap(Simulated::new(4096).failing(Verb::Release, failure), 64 << 20);
        torn(&heap, 4096, |page| page % 64 < 32);
        assert!(until_rest(&heap, &hand(), Duration::from_secs(600)).is_some());
        let calls = heap.source().calls(Verb::Release);
        assert!((32..=256).contains(&calls), "{calls} calls");
        heap.check().unwrap();
        // Refused memory is never reported as zero.
        let stats = heap.stats();
        let mut zeroed = 0;
        while let Some(page) = heap.allocate_tracked(PageCount(1)) {
            zeroed += page.scavenged.0;
        }
        assert!(
            zeroed <= stats.scavenged.0 + (heap.capacity().0 - stats.grown.0),
            "{zeroed} of {stats}"
        );
    }
}

#[test]
fn what_is_not_known_is_released_once_a_silence() {
    let heap = heap(Simulated::new(4096).with_contents(Contents::Unknown), 16 << 20);
    torn(&heap, 1024, |page| page % 2 == 0);
    let clock = hand();
    until_rest(&heap, &clock, Duration::from_secs(60)).expect("it comes to rest");
    let calls = heap.source().calls(Verb::Release);
    assert!((512..=1024).contains(&calls), "{calls} calls");
    // Released, but not reported as zero.
    assert_eq!(heap.stats().scavenged.0, 512);
    let zeroed = (0..512).map(|_| heap.allocate_tracked(PageCount(1)).unwrap().scavenged.0);
    assert_eq!(zeroed.sum::<usize>(), 0);
}

#[test]
fn a_load_that_swings_is_left_alone() {
    let heap = heap(Simulated::new(4096), 64 << 20);
    let clock = hand();
    for _ in 0..30 {
        torn(&heap, 4096, |_| true);
        for _ in 0..4 {
            // There is always some activity.
            torn(&heap, 1, |_| true);
            let _kept = heap.allocate(PageCount(1));
            heap.tick(&clock);
            clock.pass(Duration::from_millis(250));
        }
    }
    // A peak between two looks is noticed by what it costs: once in ten seconds, in huge pages.
    let calls = heap.source().calls(Verb::Release);
    assert!(calls <= 3 * 4096 / 256, "{calls} calls");
}

/// A run that is taken and freed between two looks leaves all bits as they were. The program looked silent, its memory
/// went; it had the same pages again before the next look, to which the heap looked as if all had gone, for ever.
#[test]
fn what_is_freed_before_each_look_is_a_sign_of_life_too() {
    for pages in [40, 300] {
        let heap = heap(Simulated::new(4096), 64 << 20);
        let (clock, mut due) = (hand(), Duration::ZERO);
        for _ in 0..300 {
            let run = heap.allocate(PageCount(pages)).unwrap();
            // SAFETY: just allocated.
            unsafe { heap.free(run) };
            if clock.now.get() >= due {
                due = clock.now.get().saturating_add(heap.tick(&clock));
            }
            clock.pass(Duration::from_millis(10));
        }
        // A run within a word of the bitmap is noticed only by what it costs.
        let calls = heap.source().calls(Verb::Release);
        assert!(pages < 64 || calls == 0, "{calls} calls");
        assert!(due < Duration::MAX, "{pages}: at rest, while there was work");
        until_rest(&heap, &clock, Duration::from_secs(60)).expect("it comes to rest");
        let stats = heap.stats();
        assert_eq!(stats.scavenged, stats.grown, "{pages}: {stats}");
    }
}

#[test]
fn above_the_peak_of_ten_seconds_goes_while_work_goes_on() {
    let heap = heap(Simulated::new(4096), 64 << 20);
    let clock = hand();
    torn(&heap, 4096, |page| page >= 100);
    let mut second = 0;
    while heap.source().calls(Verb::Release) == 0 && second < 100 {
        // A small load, low in the heap.
        let run = heap.allocate(PageCount(1 + second % 3)).unwrap();
        tick_for(&heap, &clock, Duration::from_secs(1));
        // SAFETY: just allocated.
        unsafe { heap.free(run) };
        second += 1;
    }
    assert!((9..=13).contains(&second), "after {second} seconds");
    // The highest pages go first.
    assert!(heap.free_set().words(4095 / 64).1 != 0);
}

/// Where little can be released between two looks, little of it is missed: the sum counts.
#[test]
fn a_load_that_swings_between_looks_pays_once_in_ten_seconds() {
    let heap = heap(Simulated::new(4096), 2 << 30);
    // A tick handles one chunk.
    let clock = Hand {
        step: Duration::from_micros(600),
        ..hand()
    };
    let mut looks = 0;
    for _ in 0..4 * 60 {
        let before = heap.source().calls(Verb::Release);
        let run = heap.allocate(PageCount(1 << 17)).unwrap();
        // SAFETY: just allocated; nothing uses it.
        unsafe { heap.free(run) };
        tick_for(&heap, &clock, Duration::from_millis(250));
        looks += u32::from(heap.source().calls(Verb::Release) > before);
    }
    assert!((1..=6 * 5).contains(&looks), "in {looks} looks something went");
}

/// One page that gained memory, as when a program grows slowly, made all that was free count as needed.
#[test]
fn above_the_peak_goes_while_a_little_is_added() {
    let heap = heap(Simulated::new(4096), 64 << 20);
    let clock = hand();
    torn(&heap, 4096, |page| page % 2 == 1);
    for _ in 0..80 {
        // Too long for the holes, and kept.
        let run = heap.allocate(PageCount(2)).unwrap();
        assert!(run.start().0 >= 4095, "page {}", run.start());
        tick_for(&heap, &clock, Duration::from_millis(500));
    }
    let (live, backed) = (heap.stats().in_use.0, heap.backed().0);
    assert!(backed <= live * 12 / 10, "{backed} pages for {live}");
}

fn page_run(page: usize) -> PageRun {
    PageRun::new(PageIndex(page), PageCount(1)).unwrap()
}

/// A heap whose system pages have two of its own: 2,048 are in use, 8,192 have gone, of which every other one was used
/// again.
fn every_other_page_again() -> PageHeap<Simulated> {
    let heap = heap(Simulated::new(2 * PAGE), 128 << 20);
    torn(&heap, 10_240, |page| page >= 2048);
    until_rest(&heap, &hand(), Duration::from_secs(60)).expect("it comes to rest");
    let every_other = (2048..10_240).step_by(2).map(page_run);
    let mut used: Vec<_> = every_other.map(|run| heap.allocate_at(run).unwrap().run).collect();
    // SAFETY: just allocated; nothing uses them.
    unsafe { heap.free_batch(&mut used) };
    assert_eq!(heap.backed(), PageCount(2048 + 4096));
    heap
}

/// A system page with one page of ours that was used again: the other one is marked already. It was taken for given
/// back once more, so half of what was too much stayed for another ten seconds.
#[test]
fn in_long_system_pages_all_that_is_too_much_goes() {
    let (heap, clock) = (every_other_page_again(), hand());
    for page in 0..52 {
        // A sign of life. SAFETY: a page that `torn` left allocated, freed once.
        unsafe { heap.free(page_run(page)) };
        tick_for(&heap, &clock, Duration::from_millis(250));
    }
    assert!(heap.backed().0 <= 2048 * 11 / 10, "after 13 seconds: {}", heap.stats());
}

/// What had no memory any more was counted, too.
#[test]
fn scavenge_says_how_many_pages_it_gains() {
    let heap = every_other_page_again();
    let some = heap.scavenge(PageCount(100));
    assert!((100..200).contains(&some.0), "{some:?}");
    assert_eq!(heap.backed(), PageCount(2048 + 4096 - some.0));
    assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount(4096 - some.0));
}

/// The pages of a chunk that are free and marked as scavenged.
fn gone(heap: &PageHeap<Simulated>, chunk: usize) -> u32 {
    let words = chunk * 8..chunk * 8 + 8;
    words.map(|word| heap.free_set().words(word).1.count_ones()).sum()
}

#[test]
fn whole_huge_pages_go_before_holes_that_lie_higher() {
    let heap = heap(Simulated::new(4096), 64 << 20);
    // The lowest chunk is free; in the one above, single pages are free.
    torn(&heap, 1024, |page| page < 512 || page % 2 == 1);
    // Each reading of the clock takes more than half a quantum, so each tick handles one chunk.
    let clock = Hand {
        step: Duration::from_micros(600),
        ..hand()
    };
    while heap.source().calls(Verb::Release) == 0 {
        assert!(clock.now.get() < Duration::from_secs(60), "{}", heap.stats());
        clock.pass(heap.tick(&clock).min(Duration::from_secs(1)));
    }
    assert_eq!((gone(&heap, 0), gone(&heap, 1)), (512, 0));
    until_rest(&heap, &clock, Duration::from_secs(600)).expect("it comes to rest");
    assert_eq!((gone(&heap, 0), gone(&heap, 1)), (512, 256));
}

/// Half of the lowest chunk is live; the other half is in caches that are at work, so the chunk looks full, though it
/// is not needed. Seven chunks above it that are not needed any more are released; this one only once it has not been
/// full for a generation.
#[test]
fn a_dense_chunk_is_left_alone_for_a_generation_unless_all_is_to_go() {
    if !has_fence() {
        // Then what lies in caches does not go.
        return;
    }
    let heap = heap(Simulated::new(4096), 64 << 20);
    torn(&heap, 9 * 512, |page| (256..8 * 512).contains(&page));
    // Pages that are freed now and then, as a sign of life.
    let mut live: Vec<_> = (8 * 512..9 * 512)
        .map(|page| PageRun::new(PageIndex(page), PageCount(1)).unwrap())
        .collect();
    let caches: Vec<_> = (0..4).map(|_| heap.cache().unwrap()).collect();
    let clock = hand();
    // A quarter of a second with some activity, so that the program does not count as silent.
    let mut quarter = |at_work: bool| {
        for cache in caches.iter().filter(|_| at_work) {
            let run = cache.allocate(PageCount(1)).unwrap();
            // SAFETY: just allocated.
            unsafe { cache.free(run) };
        }
        assert!(
            !at_work || (0..8).all(|word| heap.free_set().words(word).0 == 0),
            "full"
        );
        // SAFETY: pages that `torn` left allocated, each freed once.
        unsafe { heap.free_batch(&mut [live.pop().expect("enough")]) };
        tick_for(&heap, &clock, Duration::from_millis(250));
    };
    let above = |heap: &PageHeap<Simulated>| (1..8).map(|chunk| gone(heap, chunk)).sum::<u32>();
    let quarters = (1..80).find(|_| {
        quarter(true);
        above(&heap) == 7 * 512
    });
    assert!(
        (36..60).contains(&quarters.expect("all above goes")),
        "after ten seconds: {quarters:?}"
    );
    (0..12).for_each(|_| quarter(true));
    assert_eq!(gone(&heap, 0), 0, "while it is full: {}", heap.stats());
    let quarters = (1..40).find(|_| {
        quarter(false);
        gone(&heap, 0) > 0
    });
    // Caches are emptied within a second; then it takes one to two generations.
    assert!(
        (5..=12).contains(&quarters.expect("it goes")),
        "after {quarters:?} quarters of a second"
    );
}

#[test]
fn sleeping_caches_are_emptied_where_the_system_can() {
    let heap = heap(Simulated::new(4096), 16 << 20);
    let cache = heap.cache().unwrap();
    let run = cache.allocate(PageCount(1)).unwrap();
    // SAFETY: just allocated.
    unsafe { cache.free(run) };
    assert_eq!(heap.stats().cached, PageCount(64));
    until_rest(&heap, &hand(), Duration::from_secs(60)).unwrap();
    if cfg!(target_os = "linux") && has_fence() {
        assert_eq!(heap.stats().cached, PageCount::ZERO);
    }
    heap.check().unwrap();
}

#[test]
fn clocks_that_stand_still_or_jump_do_no_harm() {
    let heap = heap(Simulated::new(4096), 16 << 20);
    torn(&heap, 1024, |page| page % 3 == 0);
    let still = Hand::default();
    (0..100).for_each(|_| assert!(heap.tick(&still) > Duration::ZERO));
    let jumping = hand();
    for jump in [0, u64::MAX / 2, 5, u64::MAX, 1_000_000_000, 0] {
        jumping.now.set(Duration::from_nanos(jump));
        (0..20).for_each(|_| assert!(heap.tick(&jumping) > Duration::ZERO));
    }
    heap.check().unwrap();
}

/// To read it takes as long as one step works: nothing was ever released.
#[test]
fn with_a_clock_that_is_slow_to_read_memory_goes_back_too() {
    let heap = heap(Simulated::new(4096), 16 << 20);
    torn(&heap, 2048, |_| true);
    let slow = Hand {
        step: Duration::from_millis(1),
        ..hand()
    };
    until_rest(&heap, &slow, Duration::from_secs(60)).expect("it comes to rest");
    assert_eq!(heap.backed(), PageCount::ZERO);
}

/// A program that allocates and frees only from its magazine changes nothing visible elsewhere, yet it is not silent.
#[test]
#[cfg(target_os = "linux")]
fn a_program_that_lives_on_its_magazines_keeps_its_peak() {
    if !has_fence() {
        // What lies in magazines is out of reach.
        return;
    }
    use std::alloc::{GlobalAlloc, Layout};
    static HEAP: pageheap::GlobalHeap = new_heap().background(false);
    let (large, small) = (Layout::from_size_align(100_000, 8), Layout::from_size_align(200, 8));
    let (large, small) = (large.unwrap(), small.unwrap());
    // SAFETY: layouts are not empty; blocks are freed with theirs.
    unsafe {
        let blocks: Vec<_> = (0..600).map(|_| HEAP.alloc(large)).collect();
        blocks.into_iter().for_each(|block| HEAP.dealloc(block, large));
    }
    let (clock, peak) = (hand(), HEAP.stats().pages.backed.0);
    let mut due = Duration::ZERO;
    let mut pass = |time: Duration| {
        clock.pass(time);
        if clock.now.get() >= due {
            due = clock.now.get().saturating_add(HEAP.tick(&clock));
        }
    };
    for _ in 0..500 {
        // SAFETY: as above.
        unsafe { HEAP.dealloc(HEAP.alloc(small), small) };
        pass(Duration::from_millis(10));
    }
    assert!(HEAP.stats().pages.backed.0 * 10 >= peak * 9, "{}", HEAP.stats());
    // And then it falls silent.
    (0..200).for_each(|_| pass(Duration::from_millis(10)));
    assert!(HEAP.stats().pages.backed.0 < 50, "{}", HEAP.stats());
}

/// Nor does one that uses a large block again and again: it lies aside meanwhile, and is free at each look.
#[test]
fn a_program_that_lives_on_a_large_block_keeps_it() {
    use std::alloc::{GlobalAlloc, Layout};
    static HEAP: pageheap::GlobalHeap = new_heap().background(false);
    let block = Layout::from_size_align(16 << 20, 8).unwrap();
    let (clock, mut due) = (hand(), Duration::ZERO);
    let mut pass = |uses: bool| {
        if uses {
            // SAFETY: the layout is not empty; the block is freed with it.
            unsafe { HEAP.dealloc(HEAP.alloc(block), block) };
        }
        clock.pass(Duration::from_millis(10));
        if clock.now.get() >= due {
            due = clock.now.get().saturating_add(HEAP.tick(&clock));
        }
    };
    (0..500).for_each(|_| pass(true));
    let stats = HEAP.stats();
    assert_eq!(stats.pages.calls.release, 0, "{stats}");
    (0..200).for_each(|_| pass(false));
    assert!(HEAP.stats().pages.backed.0 < 50, "{}", HEAP.stats());
}

/// Whichever reading of the clock panics, nothing is left half done, and the next tick continues.
#[test]
fn a_clock_that_panics_leaves_a_heap_in_order() {
    for last in 0..12 {
        let heap = heap(Simulated::new(4096), 64 << 20);
        torn(&heap, 4096, |page| page.is_multiple_of(2));
        let (clock, reads) = (hand(), Cell::new(0));
        let read = || {
            assert!(reads.replace(reads.get() + 1) != last, "on purpose");
            clock.pass(Duration::from_millis(10));
            clock.work()
        };
        let ticks = AssertUnwindSafe(|| (0..100).for_each(|_| _ = heap.tick(&read)));
        assert!(catch_unwind(ticks).is_err());
        heap.check().unwrap();
        until_rest(&heap, &clock, Duration::from_secs(60)).expect("it comes to rest");
        let stats = heap.stats();
        assert_eq!(stats.scavenged.0, stats.grown.0 - 4096 + 2048, "{stats}");
        heap.check().unwrap();
    }
}
