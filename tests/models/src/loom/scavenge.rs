//! Can a page be handed out while the source has it back? Is every page that is counted as scavenged really so?
//!
//! The source writes to the pages it is given back, and owners to theirs; loom fails where they meet. A thread that is
//! told that a page reads as zero checks it.

use core::time::Duration;

use super::paper::{finish, give, give_to, heap_with, impatient_heap_with, take, take_from};
use super::world::{CHUNK, One, Two};
use super::{explore, spawn};
use pageheap::PageCount;

/// A clock that stands still; the scavenger's account is full.
fn still() -> Duration {
    Duration::from_secs(100)
}

#[test]
fn a_page_being_scavenged_is_nobodys() {
    explore(3, || {
        let heap = heap_with::<One>(1, &[(70, 1)]);
        let other = heap.clone();
        let thread = spawn(move || other.scavenge(PageCount(1)).0);
        // A run being released counts as allocated; but in this heap an allocation that would be refused for that
        // waits until the run is back.
        take(&heap, 1).expect("the page is free, or about to be again");
        assert!(thread.join().unwrap() <= 1);
        finish(&heap, 0, 0, Some(0));
    });
}

#[test]
fn who_does_not_wait_is_refused_what_is_being_scavenged_and_no_page_is_lost() {
    explore(3, || {
        let heap = impatient_heap_with::<One>(1, &[(70, 1)]);
        let other = heap.clone();
        let thread = spawn(move || other.scavenge(PageCount(1)).0);
        let taken = take(&heap, 1).map_or(0, |_| 1);
        assert!(thread.join().unwrap() <= 1);
        finish(&heap, 1 - taken, 0, None);
    });
}

/// At most an eighth of the heap, 16 pages, is in hand.
#[test]
fn a_heap_at_its_limit_has_some_left_while_it_is_scavenged() {
    explore(2, || {
        let heap = impatient_heap_with::<One>(1, &[(44, 20)]);
        let other = heap.clone();
        let thread = spawn(move || other.scavenge(PageCount(20)).0);
        take(&heap, 1).expect("four are free at any moment");
        thread.join().unwrap();
        finish(&heap, 19, 0, None);
    });
}

#[test]
fn a_page_freed_during_a_scavenge_is_marked_or_not_but_rightly() {
    explore(2, || {
        let heap = heap_with::<Two>(2, &[(5, 1), (CHUNK + 5, 1)]);
        let other = heap.clone();
        let thread = spawn(move || other.scavenge(PageCount(2)).0);
        let taken = take(&heap, 1).unwrap();
        give(&heap, taken);
        thread.join().unwrap();
        finish(&heap, 2, 0, None);
        // What is marked reads as zero.
        assert!(take(&heap, 1).is_some() && take(&heap, 1).is_some());
    });
}

#[test]
fn a_run_over_two_words_is_scavenged_or_broken_by_a_claim() {
    explore(3, || {
        let heap = heap_with::<One>(1, &[(62, 4)]);
        let other = heap.clone();
        let thread = spawn(move || other.scavenge(PageCount(4)).0);
        let taken = take(&heap, 1).map_or(0, |_| 1);
        let released = thread.join().unwrap();
        assert!(released <= 4);
        finish(&heap, 4 - taken, 0, None);
    });
}

#[test]
fn two_scavengers_both_release_a_page_but_count_it_once() {
    explore(3, || {
        let heap = heap_with::<One>(1, &[(70, 1)]);
        let other = heap.clone();
        let thread = spawn(move || other.scavenge(PageCount(1)).0);
        let mine = heap.scavenge(PageCount(1)).0;
        // The scavenger that chose it before the other marked it releases it again, which does no harm.
        assert!((1..=2).contains(&(mine + thread.join().unwrap())));
        finish(&heap, 1, 0, Some(1));
    });
}

#[test]
fn a_refill_takes_a_word_before_or_after_a_scavenge_has_it() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(62, 2)]);
        let other = heap.clone();
        let thread = spawn(move || other.scavenge(PageCount(2)).0);
        let cache = heap.cache().unwrap();
        // Its word may have been released, in part or as a whole, and says so.
        let page = take_from(&cache, 1).expect("two are free, or about to be again");
        give_to(&cache, page);
        assert!(thread.join().unwrap() <= 2);
        drop(cache);
        finish(&heap, 2, 0, None);
    });
}

#[test]
fn what_is_flushed_during_a_scavenge_is_released_or_not_but_marked_rightly() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(5, 1), (70, 1)]);
        let other = heap.clone();
        let cache = heap.cache().unwrap();
        let page = take_from(&cache, 1).unwrap();
        give_to(&cache, page);
        let thread = spawn(move || other.scavenge(PageCount(2)).0);
        cache.flush();
        assert!((1..=2).contains(&thread.join().unwrap()));
        drop(cache);
        finish(&heap, 2, 0, None);
        // What is marked reads as zero.
        assert!(take(&heap, 1).is_some() && take(&heap, 1).is_some());
    });
}

#[test]
fn a_tick_and_a_cache_at_work_share_no_page() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(62, 2)]);
        // More than the soft limit: the tick goes to work, and empties caches.
        heap.set_soft_limit(PageCount::ZERO);
        let other = heap.clone();
        let thread = spawn(move || other.tick(&still));
        let cache = heap.cache().unwrap();
        if let Some(page) = take_from(&cache, 1) {
            give_to(&cache, page);
        }
        thread.join().unwrap();
        drop(cache);
        finish(&heap, 2, 0, None);
    });
}

#[test]
fn a_fork_finds_no_page_in_the_hands_of_a_tick() {
    explore(3, || {
        let heap = heap_with::<One>(1, &[(5, 1), (70, 1)]);
        heap.set_soft_limit(PageCount::ZERO);
        let other = heap.clone();
        let thread = spawn(move || other.tick(&still));
        // The child would lack the scavenging thread, and lose all that it had in hand.
        let free = heap.at_a_fork(|| {
            heap.check().unwrap();
            heap.stats().free.0
        });
        assert_eq!(free, 2);
        thread.join().unwrap();
        finish(&heap, 2, 0, None);
    });
}

#[test]
fn a_fork_comes_between_two_chunks_of_a_release_and_finds_all_pages() {
    explore(3, || {
        let heap = heap_with::<Two>(2, &[(5, 1), (CHUNK + 5, 1)]);
        let other = heap.clone();
        let thread = spawn(move || other.release_as_a_layer(PageCount(usize::MAX)).0);
        let free = heap.at_a_fork(|| {
            heap.check().unwrap();
            heap.stats().free.0
        });
        assert_eq!(free, 2);
        assert_eq!(thread.join().unwrap(), 2);
        finish(&heap, 2, 0, Some(2));
    });
}

#[test]
fn two_who_scavenge_by_ticks_take_turns() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(5, 1), (70, 1)]);
        heap.set_soft_limit(PageCount::ZERO);
        let other = heap.clone();
        let thread = spawn(move || other.tick(&still));
        heap.tick(&still);
        thread.join().unwrap();
        finish(&heap, 2, 0, Some(2));
    });
}
