//! When two threads find the heap too small, does it grow enough for both, and by no more than it must?

use super::paper::{finish, give, heap, run, take, take_from};
use super::world::{CHUNK, One, Two};
use super::{explore, spawn};
use pageheap::PageCount;

#[test]
fn two_who_find_it_empty_share_one_growth() {
    explore(2, || {
        let heap = heap::<One>(2);
        let other = heap.clone();
        let thread = spawn(move || take(&other, 1).unwrap());
        let mine = take(&heap, 1).unwrap();
        let theirs = thread.join().unwrap();
        assert_ne!(mine, theirs);
        let stats = heap.stats();
        assert_eq!((stats.grown.0, stats.growths), (CHUNK, 1));
        finish(&heap, CHUNK - 2, 0, Some(CHUNK - 2));
    });
}

/// One preemption: with two there are 165,842 interleavings, a quarter of the time of all models.
#[test]
fn two_who_want_more_than_one_growth_gives_both_get_it() {
    explore(1, || {
        let heap = heap::<Two>(2);
        let other = heap.clone();
        let thread = spawn(move || take(&other, 100).expect("there is room for both"));
        let mine = take(&heap, 100).expect("there is room for both");
        let theirs = thread.join().unwrap();
        assert!(mine.end() <= theirs.start() || theirs.end() <= mine.start());
        assert_eq!(heap.stats().grown.0, 2 * CHUNK);
        finish(&heap, 56, 0, None);
    });
}

#[test]
fn who_grows_at_the_limit_is_not_refused_for_what_another_took() {
    explore(2, || {
        let heap = heap::<One>(1);
        let other = heap.clone();
        let thread = spawn(move || take(&other, 64).expect("half of it"));
        take(&heap, 64).expect("the other half");
        thread.join().unwrap();
        finish(&heap, 0, 0, None);
        assert!(take(&heap, 1).is_none());
    });
}

#[test]
fn a_growth_and_a_release_meet_at_the_end_of_the_old_part() {
    explore(2, || {
        // (All pages of the first chunk are in use. Its last one comes back while a thread wants two.)
        let heap = heap::<Two>(2);
        heap.source().write(&heap.allocate_at(run(0, CHUNK)).unwrap());
        assert_eq!(heap.stats().grown.0, CHUNK);
        let other = heap.clone();
        let thread = spawn(move || give(&other, run(CHUNK - 1, 1)));
        take(&heap, 2).expect("it can grow");
        thread.join().unwrap();
        assert_eq!(heap.stats().grown.0, 2 * CHUNK);
        finish(&heap, CHUNK - 1, 0, None);
    });
}

#[test]
fn a_cache_and_an_allocation_grow_an_empty_heap_once() {
    explore(2, || {
        let heap = heap::<One>(2);
        let other = heap.clone();
        let thread = spawn(move || {
            let cache = other.cache().unwrap();
            take_from(&cache, 1).unwrap();
        });
        take(&heap, 1).unwrap();
        thread.join().unwrap();
        assert_eq!(heap.stats().grown.0, CHUNK);
        finish(&heap, CHUNK - 2, 0, None);
    });
}

#[test]
fn a_page_of_a_growth_is_claimed_by_number_though_it_is_just_being_added() {
    explore(2, || {
        let heap = heap::<One>(2);
        let other = heap.clone();
        // Where the heap has grown, but not yet published the pages, it is waited for.
        let thread = spawn(move || other.allocate_at(run(CHUNK - 1, 1)).is_some());
        take(&heap, 1).unwrap();
        assert!(thread.join().unwrap());
        finish(&heap, CHUNK - 2, 0, None);
        assert!(heap.allocate_at(run(CHUNK - 1, 1)).is_none());
        assert!(heap.allocate(PageCount(2 * CHUNK)).is_none());
    });
}
