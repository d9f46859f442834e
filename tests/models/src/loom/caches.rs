//! Do cached, flushed and refilled pages keep one owner each? Is a slot ever lent twice?

use std::sync::Arc;

use super::paper::{Heap, finish, give, give_to, heap_with, run, take, take_from};
use super::world::{CHUNK, One, Two};
use super::{explore, spawn};
use pageheap::PageCount;

#[test]
fn two_caches_refill_from_two_words() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(62, 4)]);
        let other = heap.clone();
        let thread = spawn(move || {
            let cache = other.cache().unwrap();
            take_from(&cache, 1).unwrap();
        });
        {
            let cache = heap.cache().unwrap();
            take_from(&cache, 1).unwrap();
        }
        thread.join().unwrap();
        finish(&heap, 2, 0, None);
    });
}

#[test]
fn a_cache_dropped_while_another_refills_gives_it_its_word_or_leaves_it_the_next() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(62, 3)]);
        let other = heap.clone();
        let thread = spawn(move || {
            let cache = other.cache().unwrap();
            let page = take_from(&cache, 1).unwrap();
            give_to(&cache, page);
        });
        let cache = heap.cache().unwrap();
        take_from(&cache, 1).unwrap();
        thread.join().unwrap();
        let cached = heap.stats().cached.0;
        finish(&heap, 2 - cached, cached, None);
        drop(cache);
        finish(&heap, 2, 0, None);
    });
}

#[test]
fn a_buffer_flushed_while_its_word_is_claimed_loses_nothing() {
    explore(2, || {
        let heap = heap_with::<Two>(2, &[(CHUNK + 5, 1)]);
        let other = heap.clone();
        // Page 70 is in use, and the cache's owner frees it: into the buffer, and home when the cache is dropped.
        let thread = spawn(move || {
            let cache = other.cache().unwrap();
            give_to(&cache, run(70, 1));
        });
        let taken = take(&heap, 1).unwrap();
        thread.join().unwrap();
        give(&heap, taken);
        finish(&heap, 2, 0, None);
    });
}

#[test]
fn a_slot_is_lent_to_one_at_a_time_and_lent_again() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(62, 2)]);
        let other = heap.clone();
        let thread = spawn(move || {
            let cache = other.cache().expect("one of two");
            take_from(&cache, 1).is_some()
        });
        {
            let cache = heap.cache().expect("the other of two");
            if let Some(page) = take_from(&cache, 1) {
                give_to(&cache, page);
            }
        }
        let kept = usize::from(thread.join().unwrap());
        finish(&heap, 2 - kept, 0, None);
        let again = (heap.cache(), heap.cache());
        assert!(again.0.is_some() && again.1.is_some() && heap.cache().is_none());
    });
}

#[test]
fn a_cache_sent_to_another_thread_is_the_same_cache() {
    explore(2, || {
        let leaked = Arc::into_raw(heap_with::<One>(1, &[(62, 2)]));
        // SAFETY: it lives until the end of this function.
        let heap: &'static Heap<One> = unsafe { &*leaked };
        let cache = heap.cache().unwrap();
        take_from(&cache, 1).unwrap();
        let thread = spawn(move || assert!(take_from(&cache, 1).is_some()));
        assert!(take(heap, 1).is_none(), "the second page is in the cache, or taken");
        thread.join().unwrap();
        finish(heap, 0, 0, None);
        // SAFETY: made by `into_raw` above, and nothing refers to it any more.
        drop(unsafe { Arc::from_raw(leaked) });
    });
}

#[test]
fn a_shard_serves_one_and_the_heap_the_other() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(62, 4)]);
        let other = heap.clone();
        let thread = spawn(move || other.allocate_on(0, PageCount(1)).unwrap().start());
        let mine = heap.allocate_on(0, PageCount(1)).unwrap().start();
        assert_ne!(mine, thread.join().unwrap());
        heap.flush_shards();
        finish(&heap, 2, 0, None);
    });
}

#[test]
fn of_three_who_name_a_shard_one_has_it_at_a_time() {
    explore(2, || {
        // A thread that finds the shard busy goes to the heap, and leaves the shard to its holder.
        let heap = heap_with::<One>(1, &[(62, 4)]);
        let go = |heap: &Heap<One>| heap.allocate_on(0, PageCount(1)).unwrap().start();
        let (second, third) = (heap.clone(), heap.clone());
        let second = spawn(move || go(&second));
        let third = spawn(move || go(&third));
        let pages = [go(&heap), second.join().unwrap(), third.join().unwrap()];
        assert!(pages[0] != pages[1] && pages[1] != pages[2] && pages[2] != pages[0]);
        heap.flush_shards();
        finish(&heap, 1, 0, None);
    });
}

#[test]
fn who_runs_out_takes_what_the_shards_hold() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(62, 1)]);
        let other = heap.clone();
        // The shard takes the page, and gets it back.
        let thread = spawn(move || {
            if let Some(page) = other.allocate_on(0, PageCount(1)) {
                // SAFETY: just allocated.
                unsafe { other.free_on(0, page) };
            }
        });
        let taken = usize::from(take(&heap, 1).is_some());
        thread.join().unwrap();
        let cached = heap.stats().cached.0;
        finish(&heap, 1 - taken - cached, cached, None);
        assert_eq!(usize::from(take(&heap, 1).is_some()), 1 - taken);
    });
}

/// The page is in the shard, or in the hands of the thread that flushes it, and always somebody else's to have.
#[test]
fn nobody_is_refused_for_what_another_thread_is_flushing_from_a_shard() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(62, 1)]);
        let page = heap.allocate_on(0, PageCount(1)).unwrap();
        // SAFETY: just allocated.
        unsafe { heap.free_on(0, page) };
        let other = heap.clone();
        let thread = spawn(move || other.flush_shards());
        assert!(take(&heap, 1).is_some());
        thread.join().unwrap();
        finish(&heap, 0, 0, None);
    });
}

/// Of two single pages, a cache takes both, finds no run of two, and gives them back.
#[test]
fn nobody_is_refused_for_what_a_cache_takes_in_vain() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(60, 1), (62, 1)]);
        let other = heap.clone();
        let thread = spawn(move || assert!(take(&other, 1).is_some()));
        let cache = heap.cache().unwrap();
        assert!(take_from(&cache, 2).is_none());
        thread.join().unwrap();
        finish(&heap, 1, 0, None);
    });
}

#[test]
fn a_call_for_a_flush_is_heeded_when_the_owner_next_comes_by() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(62, 1), (64, 1)]);
        let other = heap.clone();
        let cache = heap.cache().unwrap();
        let page = take_from(&cache, 1).unwrap();
        give_to(&cache, page);
        // The cache holds one page, and another is free; the other thread wants both in turn and at first gets one.
        let thread = spawn(move || usize::from(take(&other, 1).is_some()) + usize::from(take(&other, 1).is_some()));
        let mine = take_from(&cache, 2).is_some();
        assert!(!mine, "there are no two in a row");
        let theirs = thread.join().unwrap();
        assert!(theirs >= 1);
        // By now the call for a flush, if there was one, or our own request for two, has emptied the cache.
        finish(&heap, 2 - theirs, 0, None);
    });
}
