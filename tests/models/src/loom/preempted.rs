//! Does a thread that is kept out of what is its own go on in the end, with nothing lost, wherever the one it waits for
//! was preempted?
//!
//! Shipped: caches of pages and their seizure (`own_at_last` in `heap/cached.rs`), and free lists (`retire_batch` in
//! `arena/shards/retire.rs`). loom reports a wait without end as too many branches.

use core::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use pageheap::PageCount;
use pageheap::internals::free_list::{Node, Nodes, Shards};

use super::free_lists::Few;
use super::paper::{finish, give_to, heap_with, take, take_from};
use super::world::One;
use super::{explore, spawn};
use crate::hand::Hand;

// ---- a cache of pages, and one who seizes it

/// The owner waits for the seizer, and a third thread for both: it asks until it has the page.
#[test]
fn who_flushes_while_the_cache_is_seized_keeps_nobody_from_its_page() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(5, 1)]);
        let cache = heap.cache().unwrap();
        let page = take_from(&cache, 1).unwrap();
        give_to(&cache, page);
        let (second, third) = (heap.clone(), heap.clone());
        let second = spawn(move || second.release(PageCount::ZERO).0);
        let third = spawn(move || {
            while take(&third, 1).is_none() {
                loom::thread::yield_now();
            }
        });
        cache.flush();
        second.join().unwrap();
        third.join().unwrap();
        drop(cache);
        finish(&heap, 0, 0, None);
    });
}

/// Who is kept out announces itself again and again. The seizer may find it at each of these times.
#[test]
fn who_waits_for_one_seizure_and_then_another_goes_on() {
    explore(2, || {
        let heap = heap_with::<One>(1, &[(5, 1), (70, 1)]);
        let cache = heap.cache().unwrap();
        let page = take_from(&cache, 1).unwrap();
        give_to(&cache, page);
        let other = heap.clone();
        let thread = spawn(move || other.release(PageCount::ZERO).0 + other.release(PageCount::ZERO).0);
        cache.flush();
        assert_eq!(heap.stats().cached.0, 0, "something came in that nobody put there");
        let page = take_from(&cache, 1).expect("two are free");
        give_to(&cache, page);
        cache.flush();
        thread.join().unwrap();
        finish(&heap, 2, 0, None);
    });
}

// ---- a free list, one who retires, and one who gathers

type List = Shards<Few<Node>>;

/// A list without spare nodes: so a reader inside is enough for a slot to be refused.
fn list(slots: u32, owners: usize) -> Arc<List> {
    crate::hand::list(Few::<Node>::new(slots), owners, 0)
}

fn hand(list: &Arc<List>) -> Hand<Few<Node>> {
    Hand::lend(list).expect("a shard for each")
}

/// Checks that every slot is in one place.
fn settle(list: &List, slots: usize, live: u64, retired: u64) {
    let mut seen = vec![false; slots];
    let census = list.census(|slot| {
        assert!(!core::mem::replace(&mut seen[slot as usize - 1], true), "{slot} twice");
    });
    assert_eq!((census.live, census.retired), (live, retired), "{census:?}");
    let all = census.live + census.sharded + census.depot + census.retired;
    assert_eq!(all, slots as u64, "a slot was lost or made: {census:?}");
}

/// Takes all `slots` slots; batches are small from here on.
fn take_all(hand: &Hand<Few<Node>>, slots: usize) -> Vec<u32> {
    let all: Vec<u32> = (0..slots).map(|_| hand.allocate().unwrap()).collect();
    assert_eq!(hand.allocate(), None);
    all
}

/// The hand's owner reads, and may have found any slot there is.
fn read(hand: &Hand<Few<Node>>) {
    hand.list.enter_reader(hand.shard);
    hand.list.protect(hand.shard, || ());
}

/// A reader is inside, so what is retired stays in the shard, which its owner cannot enter while the reader gathers.
#[test]
fn what_is_refused_while_another_gathers_stays_in_the_shard() {
    explore(3, || {
        let list = list(1, 2);
        let (mine, theirs) = (hand(&list), hand(&list));
        let slot = take_all(&theirs, 1)[0];
        read(&mine);
        let thread = spawn(move || theirs.retire(slot).unwrap());
        assert_eq!(mine.allocate(), None, "a reader is inside that may have found it");
        thread.join().unwrap();
        settle(&list, 1, 0, 1);
        list.leave_reader(mine.shard);
        let slot = mine.allocate().expect("the reader has left");
        list.nodes().write(slot);
        settle(&list, 1, 1, 0);
    });
}

/// The reader leaves while the owner waits: the batch is in the shard or free, and in any case there once.
#[test]
fn what_is_refused_until_the_reader_leaves_is_free_once() {
    explore(2, || {
        let list = list(1, 2);
        let (mine, theirs) = (hand(&list), hand(&list));
        let slot = take_all(&theirs, 1)[0];
        read(&mine);
        let thread = spawn(move || {
            theirs.list.nodes().write(slot);
            theirs.retire(slot).unwrap();
        });
        let early = mine.allocate();
        assert_eq!(early, None, "a reader is inside that may have found it");
        list.leave_reader(mine.shard);
        let late = mine.allocate();
        late.inspect(|&slot| list.nodes().write(slot));
        thread.join().unwrap();
        if late.is_none() {
            let slot = mine.allocate().expect("the reader has left");
            list.nodes().write(slot);
        }
        settle(&list, 1, 1, 0);
    });
}

/// Guests share a lane: one retires, and finds the lane in the hands of another.
#[test]
fn a_guest_whose_slot_is_refused_waits_for_another_guest() {
    explore(2, || {
        let list = list(2, 1);
        let mine = hand(&list);
        let slots = [(); 2].map(|()| list.allocate_as_guest(0).unwrap());
        assert_eq!((list.allocate_as_guest(0), mine.allocate()), (None, None));
        read(&mine);
        let threads = slots.map(|slot| {
            let other = list.clone();
            spawn(move || other.retire_as_guest(0, slot, other.nodes().node(slot)).unwrap())
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        list.leave_reader(mine.shard);
        for _ in slots {
            let slot = mine.allocate().expect("the reader has left");
            list.nodes().write(slot);
        }
        settle(&list, 2, 2, 0);
    });
}

/// One slot lies in the shard of a thread, retired, when the last readers leave. That thread is retiring another.
/// Returns whether a gatherer misses both.
fn batch_in_hand() -> bool {
    let missed = Arc::new(AtomicUsize::new(0));
    let count = missed.clone();
    explore(2, move || {
        let list = list(2, 3);
        let (mine, theirs, third) = (hand(&list), hand(&list), hand(&list));
        let slots = take_all(&theirs, 2);
        [&mine, &third].into_iter().for_each(read);
        theirs.retire(slots[0]).unwrap();
        settle(&list, 2, 1, 1);
        let thread = spawn(move || theirs.retire(slots[1]).unwrap());
        [&mine, &third]
            .iter()
            .for_each(|reader| list.leave_reader(reader.shard));
        let early = mine.allocate();
        count.fetch_add(usize::from(early.is_none()), Ordering::Relaxed);
        thread.join().unwrap();
        for _ in early.into_iter().count()..2 {
            let slot = mine.allocate().expect("the readers have left");
            list.nodes().write(slot);
        }
        settle(&list, 2, 2, 0);
    });
    missed.load(Ordering::Relaxed) > 0
}

/// The exception that `arena/shards/mod.rs` names. The thread need not be preempted for long: who gathers keeps it out.
#[test]
fn a_batch_that_readers_held_back_is_not_seen_in_hand() {
    assert!(batch_in_hand(), "then the exception is none, and can be struck out");
}
