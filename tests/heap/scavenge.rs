//! Giving memory back, and which memory is known to be zero.

use pageheap::source::{Contents, Failure, Verb};

use super::*;

/// A heap of two chunks; all pages are free and have been used.
fn used(source: Simulated) -> PageHeap<Simulated> {
    let heap = over(source, Config::new(1 << 23));
    take(&heap, 1024);
    give(&heap, 0, 1024);
    assert_eq!(heap.stats().scavenged.0, 0);
    heap
}

/// The pages marked as scavenged.
fn marked(heap: &PageHeap<Simulated>) -> Vec<usize> {
    let marked = |page: &usize| heap.free_set().words(page / 64).1 >> (page % 64) & 1 == 1;
    (0..heap.stats().grown.0).filter(marked).collect()
}

#[test]
fn new_pages_are_known_to_be_zero() {
    let heap = heap(4096);
    let first = heap.allocate_tracked(PageCount(5)).expect("room");
    assert!(first.is_zeroed());
    give(&heap, 0, 5);
    let again = heap.allocate_tracked(PageCount(8)).expect("room");
    assert_eq!((numbers(again.run), again.scavenged.0), ((0, 8), 3));
    assert!(!again.is_zeroed());
}

#[test]
fn the_highest_pages_go_first() {
    let heap = used(Simulated::new(4096));
    take(&heap, 300);
    // Free are 512 + 212 pages: a run from the top that splits no huge page.
    assert_eq!(heap.scavenge(PageCount(256)), PageCount(256));
    assert_eq!(marked(&heap), Vec::from_iter(768..1024));
    assert_eq!(heap.scavenge(PageCount(1)), PageCount(256));
    assert_eq!(marked(&heap), Vec::from_iter(512..1024));
    assert_eq!(
        heap.scavenge(PageCount(10)),
        PageCount(10),
        "the huge page is cut already"
    );
    assert_eq!(marked(&heap), Vec::from_iter(502..1024));
    assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount(202));
    assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount::ZERO);
    check(&heap, 1024, 724);
    let again = heap.allocate_tracked(PageCount(724)).expect("room");
    assert!(again.is_zeroed());
}

#[test]
fn nothing_wanted_nothing_released() {
    let heap = used(Simulated::new(4096));
    assert_eq!(heap.scavenge(PageCount::ZERO), PageCount::ZERO);
    assert_eq!(heap.source().calls(Verb::Release), 0);
    assert_eq!(marked(&heap), []);
}

#[test]
fn whole_granules_only() {
    let heap = used(Simulated::new(8 * PAGE));
    take(&heap, 1024);
    give(&heap, 100, 11);
    give(&heap, 600, 7);
    assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount::ZERO);
    give(&heap, 111, 1);
    assert_eq!(heap.scavenge(PageCount(1)), PageCount(8));
    assert_eq!(marked(&heap), Vec::from_iter(104..112));
    check(&heap, 1024, 19);
}

/// Touching a page backs its whole granule with memory. The pages beside it are marked as scavenged, since they have
/// never been used.
#[test]
fn a_granule_that_was_used_in_part_goes_back() {
    for granule in [2, 8, 64, 128] {
        let heap = used(Simulated::new(granule * PAGE));
        assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount(1024));
        take(&heap, 1);
        give(&heap, 0, 1);
        assert_eq!(heap.backed(), PageCount(1));
        // The others have no memory.
        assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount(1), "{granule}");
        assert_eq!((heap.backed(), marked(&heap).len()), (PageCount(0), 1024), "{granule}");
        assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount::ZERO, "{granule}");
    }
}

#[test]
fn a_granule_of_several_words() {
    let heap = used(Simulated::new(128 * PAGE));
    take(&heap, 1);
    assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount(1024 - 128));
    assert_eq!(marked(&heap), Vec::from_iter(128..1024));
}

#[test]
fn a_granule_beyond_a_chunk_is_left_alone() {
    let heap = used(Simulated::new(1024 * PAGE));
    assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount::ZERO);
    check(&heap, 1024, 1024);
}

#[test]
fn the_unknown_is_not_zero() {
    let heap = over(
        Simulated::new(4096).with_contents(Contents::Unknown),
        Config::new(1 << 23),
    );
    let new = heap.allocate_tracked(PageCount(100)).expect("room");
    assert_eq!(new.scavenged, PageCount::ZERO);
    give(&heap, 0, 100);
    assert_eq!(
        heap.scavenge(PageCount(usize::MAX)),
        PageCount(512),
        "released all the same"
    );
    assert_eq!(heap.stats().scavenged, PageCount(512), "gone, whatever it reads as");
    let again = heap.allocate_tracked(PageCount(100)).expect("room");
    assert_eq!(again.scavenged, PageCount::ZERO);
}

#[test]
fn a_refusal_leaves_the_pages() {
    let heap = used(Simulated::new(4096).failing(Verb::Release, Failure::Every(1)));
    assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount::ZERO);
    assert!(heap.source().calls(Verb::Release) > 0);
    assert_eq!(marked(&heap), []);
    check(&heap, 1024, 1024);
    heap.source().heal();
    assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount(1024));
    check(&heap, 1024, 1024);
}

#[test]
fn one_refusal_is_gone_past() {
    let heap = used(Simulated::new(4096).failing(Verb::Release, Failure::Calls { after: 0, times: 1 }));
    assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount(768));
    assert_eq!(marked(&heap), Vec::from_iter(0..768));
    assert_eq!(heap.stats().calls.release, 4);
}

/// While a run is in hand, other threads cannot allocate it.
#[test]
fn a_small_heap_is_released_in_small_runs() {
    for (pages, calls) in [(64, 8), (511, 9), (1024, 4), (4096, 8)] {
        let heap = over(Simulated::new(4096), Config::new(pages * PAGE));
        take(&heap, pages);
        give(&heap, 0, pages);
        assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount(pages));
        assert_eq!(heap.stats().calls.release, calls, "{pages} pages");
    }
}

#[test]
fn the_rest_of_a_granule_is_not_known() {
    // Granules of 16 pages, and a limit in the middle of one.
    let heap = over(Simulated::new(16 * PAGE), Config::new(1 << 23).limit(PageCount(20)));
    let first = heap.allocate_tracked(PageCount(20)).expect("room");
    assert!(first.is_zeroed());
    heap.set_limit(PageCount(64));
    let rest = heap.allocate_tracked(PageCount(44)).expect("room");
    assert!(!rest.is_zeroed());
    assert_eq!(taken(Some(rest)), Some((20, 44)));
    assert_eq!(rest.scavenged, PageCount(32), "what was prepared for it is known");
}

/// Growth within a prepared granule asks the source for nothing, so nothing is known.
#[test]
fn the_rest_of_a_granule_is_not_known_where_nothing_new_is_prepared() {
    let source = Simulated::new(16 * PAGE).with_contents(Contents::Unknown);
    let heap = over(source, Config::new(1 << 23).limit(PageCount(20)));
    take(&heap, 20);
    let prepared = heap.source().calls(Verb::Prepare);
    heap.set_limit(PageCount(32));
    let rest = heap.allocate_tracked(PageCount(12)).expect("room");
    assert_eq!(heap.source().calls(Verb::Prepare), prepared);
    assert!(!rest.is_zeroed());
}

#[test]
fn scavenged_pages_in_a_cache_are_counted_and_come_back() {
    let heap = heap(4096);
    let cache = heap.cache().expect("a cache");
    let one = cache.allocate_tracked(PageCount(1)).expect("room");
    assert!(one.is_zeroed());
    assert_eq!(heap.stats().scavenged.0, 511);
    cache.flush();
    assert_eq!(heap.stats().scavenged.0, 511);
    assert_eq!(
        heap.allocate_tracked(PageCount(63)).map(|taken| taken.scavenged.0),
        Some(63)
    );
}
