//! Is a request refused for pages that are on their way from the heap to a cache, or back, or for a batch that is on
//! its way back to the store?
//!
//! Shipped: caches, the heap below them, and the store. Copied: the rounds of `object/reclaim.rs`, as far as they have
//! to do with these. (Shipped code refuses after some rounds in any case. Here that counts as no refusal: the question
//! is which refusal stands.)
//!
//! ```text
//!   owner      takes the word out of the set ──────────────────── puts it into its cache
//!   requester            caches: none ── search: no ── and again ──── caches now?
//! ```

use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::sync::atomic::AtomicUsize;
use pageheap::internals::{Shape, Turnstile};

use super::objects::Shelf;
use super::paper::{Heap, finish, give_to, heap_of_no_shards_with, run, take, take_from};
use super::world::{One, Two};
use super::{explore, spawn};

const ROUNDS: usize = 3;

/// Whether a requester asks once more, after it has searched, what is in caches or stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asks {
    Again,
    NotAgain,
}

/// As `Objects::try_at_last`: whether the request is not refused, and how many pages it got.
fn request<G: Shape>(heap: &Heap<G>, pages: usize, asks: Asks) -> (bool, usize) {
    let mut was_bare = false;
    for _ in 0..ROUNDS {
        let found = heap.seize_as_a_layer();
        if take(heap, pages).is_some() {
            return (true, pages);
        }
        let is_bare = || asks == Asks::NotAgain || heap.look_as_a_layer() == (false, false);
        if was_bare && !found && is_bare() {
            return (false, 0);
        }
        was_bare = !found;
    }
    (true, 0)
}

/// Two pages are free. A cache takes their word, and gives out one.
fn refilled(asks: Asks) {
    explore(3, move || {
        let heap = heap_of_no_shards_with::<One>(1, &[(60, 1), (62, 1)]);
        let other = Arc::clone(&heap);
        let cache = heap.cache().unwrap();
        let thread = spawn(move || request(&other, 1, asks));
        let mine = usize::from(take_from(&cache, 1).is_some());
        let (served, theirs) = thread.join().unwrap();
        assert!(served, "refused for what was on its way to a cache");
        drop(cache);
        finish(&heap, 2 - mine - theirs, 0, None);
    });
}

#[test]
fn nobody_is_refused_for_what_is_on_its_way_to_a_cache() {
    refilled(Asks::Again);
}

#[test]
#[should_panic(expected = "refused for what was on its way to a cache")]
fn who_does_not_look_for_caches_again_is_refused() {
    refilled(Asks::NotAgain);
}

/// A cache collects a freed page, and gives it back when it collects one of another word. (Its own word is the first.)
#[test]
fn nobody_is_refused_for_what_is_on_its_way_from_a_cache() {
    explore(3, || {
        let heap = heap_of_no_shards_with::<Two>(2, &[]);
        let other = Arc::clone(&heap);
        let cache = heap.cache().unwrap();
        give_to(&cache, run(70, 1));
        let thread = spawn(move || request(&other, 1, Asks::NotAgain));
        give_to(&cache, run(133, 1));
        let (served, theirs) = thread.join().unwrap();
        assert!(served, "refused for what was on its way from a cache");
        drop(cache);
        finish(&heap, 2 - theirs, 0, None);
    });
}

/// A cache has collected two pages, and gives them back when it takes the word with the only free page, which leaves it
/// empty.
#[test]
fn nobody_is_refused_for_what_a_cache_gives_back_before_it_is_refilled() {
    explore(2, || {
        let heap = heap_of_no_shards_with::<One>(1, &[(5, 1)]);
        let other = Arc::clone(&heap);
        let cache = heap.cache().unwrap();
        give_to(&cache, run(70, 2));
        let thread = spawn(move || request(&other, 2, Asks::Again));
        let mine = usize::from(take_from(&cache, 1).is_some());
        let (served, theirs) = thread.join().unwrap();
        assert!(served, "refused for what was on its way from a cache");
        drop(cache);
        finish(&heap, 3 - mine - theirs, 0, None);
    });
}

/// A thread takes the only batch, announced, and sends it home. Who finds the store empty, and then that nobody is
/// there, sees it at home.
#[test]
fn nobody_is_refused_for_a_batch_on_its_way_home() {
    explore(4, || {
        let (shelf, movers, home) = (
            Shelf::new(),
            Arc::new(Turnstile::<1>::new()),
            Arc::new(AtomicUsize::new(0)),
        );
        shelf.put(1);
        let (other, turnstile, at_home) = (Arc::clone(&shelf), Arc::clone(&movers), Arc::clone(&home));
        // As `Objects::take_announced`.
        let thread = spawn(move || {
            let _pass = turnstile.enter(0);
            if other.take() > 0 {
                at_home.fetch_add(1, Ordering::AcqRel);
            }
        });
        if shelf.take() == 0 {
            let seen = movers.look();
            let got = home.fetch_add(0, Ordering::AcqRel) > 0;
            let stands = seen.1 == 0 && movers.look() == seen && !shelf.store.has_any();
            assert!(got || !stands, "refused for a batch on its way home");
        }
        thread.join().unwrap();
    });
}

/// Of two stored batches a thread takes one, and puts the other back.
fn stored(asks: Asks) {
    explore(3, move || {
        let shelf = Shelf::new();
        [1, 2].into_iter().for_each(|batch| shelf.put(batch));
        let other = Arc::clone(&shelf);
        let thread = spawn(move || other.take());
        let got = shelf.take() > 0 || asks == Asks::Again && shelf.store.has_any();
        assert!(got, "refused for what was on its way to the store");
        assert!(thread.join().unwrap() + shelf.take() > 0);
        while shelf.take() > 0 {}
        assert!(!shelf.store.has_any(), "bytes of batches that nobody has");
    });
}

#[test]
fn nobody_is_refused_for_what_is_on_its_way_to_the_store() {
    stored(Asks::Again);
}

#[test]
#[should_panic(expected = "refused for what was on its way to the store")]
fn who_does_not_look_for_stored_bytes_is_refused() {
    stored(Asks::NotAgain);
}
