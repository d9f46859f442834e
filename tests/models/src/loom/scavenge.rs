//! Can a page be handed out while the source has it back? Is what is counted as scavenged so?
//!
//! The source writes on the pages it is given back, and owners on theirs; loom fails where they meet. Who is told
//! that a page reads as zero looks whether it does.

use super::paper::{finish, give, heap_with, take};
use super::world::{CHUNK, One, Two};
use super::{explore, spawn};
use pageheap::PageCount;

#[test]
fn a_page_being_scavenged_is_nobodys() {
    explore(3, || {
        let heap = heap_with::<One>(1, &[(70, 1)]);
        let other = heap.clone();
        let thread = spawn(move || other.scavenge(PageCount(1)).0);
        // A run being released counts as allocated, but who would be told no for that waits until it is back.
        take(&heap, 1).expect("the page is free, or about to be again");
        assert!(thread.join().unwrap() <= 1);
        finish(&heap, 0, 0, Some(0));
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
        // Who chose it before the other marked it releases it again, which does no harm.
        assert!((1..=2).contains(&(mine + thread.join().unwrap())));
        finish(&heap, 1, 0, Some(1));
    });
}
