//! Do the contents of a cache belong to one thread at a time, while another empties the cache without asking?
//!
//! The pages are cells that detect two owners. Two threads at work on one slot show up as a page lost or duplicated.

use super::paper::{finish, give_to, heap_with, take, take_from};
use super::world::{One, Two};
use super::{explore, spawn};
use pageheap::PageCount;

#[test]
fn a_cache_is_seized_or_used_but_not_both() {
    explore(3, || {
        let heap = heap_with::<One>(1, &[(62, 2)]);
        let other = heap.clone();
        let cache = heap.cache().unwrap();
        let page = take_from(&cache, 1).unwrap();
        give_to(&cache, page);
        let thread = spawn(move || other.release(PageCount::ZERO).0);
        // From the cache, or past it.
        let page = take_from(&cache, 1).expect("two are free, here or there");
        give_to(&cache, page);
        assert_eq!(thread.join().unwrap(), 0);
        drop(cache);
        finish(&heap, 2, 0, None);
    });
}

#[test]
fn what_a_sleeping_cache_holds_can_be_had_by_others() {
    explore(3, || {
        let heap = heap_with::<One>(1, &[(5, 1)]);
        let cache = heap.cache().unwrap();
        let page = take_from(&cache, 1).unwrap();
        give_to(&cache, page);
        assert_eq!(heap.stats().cached.0, 1);
        let other = heap.clone();
        let thread = spawn(move || {
            other.release(PageCount::ZERO);
            take(&other, 1).is_some()
        });
        assert!(thread.join().unwrap());
        drop(cache);
        finish(&heap, 0, 0, None);
    });
}

#[test]
fn a_cache_dropped_while_it_is_seized_goes_home_once() {
    explore(3, || {
        let heap = heap_with::<One>(1, &[(5, 1), (70, 1)]);
        let other = heap.clone();
        let cache = heap.cache().unwrap();
        let page = take_from(&cache, 1).unwrap();
        give_to(&cache, page);
        let thread = spawn(move || other.release(PageCount::ZERO).0);
        drop(cache);
        thread.join().unwrap();
        finish(&heap, 2, 0, None);
    });
}

#[test]
fn who_has_nothing_else_waits_for_a_seizure_and_is_not_refused() {
    explore(3, || {
        let heap = heap_with::<One>(1, &[(5, 1)]);
        let other = heap.clone();
        let cache = heap.cache().unwrap();
        let page = take_from(&cache, 1).unwrap();
        give_to(&cache, page);
        let thread = spawn(move || other.release(PageCount::ZERO).0);
        take_from(&cache, 1).expect("the page is ours, or on its way home");
        thread.join().unwrap();
        drop(cache);
        finish(&heap, 0, 0, None);
    });
}

#[test]
fn pages_seized_are_released_as_they_are() {
    explore(2, || {
        let heap = heap_with::<Two>(2, &[(5, 1), (133, 1)]);
        let other = heap.clone();
        let cache = heap.cache().unwrap();
        let page = take_from(&cache, 1).unwrap();
        give_to(&cache, page);
        let thread = spawn(move || other.release(PageCount(2)).0);
        let page = take_from(&cache, 1).expect("two are free");
        give_to(&cache, page);
        thread.join().unwrap();
        drop(cache);
        finish(&heap, 2, 0, None);
    });
}
