//! Free lists: the stack, the readers, the shards.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32 as LoomU32, AtomicUsize};
use pageheap::internals::free_list::{Batch, Extent, FIRST_ERA, Hyaline, Links, Node, Nodes, Shards, Stack};
use pageheap::internals::{AtomicU32, AtomicU64, Barrier, Zeroed};

use super::{explore, explore_first, spawn};
use crate::hand::{Hand, Numbers, table};

/// A few slots, all nodes present, and their contents, which detect two owners.
pub struct Few<T> {
    nodes: Vec<T>,
    used: LoomU32,
    contents: Vec<UnsafeCell<usize>>,
}

// SAFETY: the cells are loom's: loom reports it if a thread accesses one at a wrong time.
unsafe impl<T: Sync> Sync for Few<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Few<T> {}

impl<T: Zeroed> Few<T> {
    pub fn new(slots: u32) -> Self {
        Self {
            nodes: (0..slots).map(|_| T::zeroed()).collect(),
            used: LoomU32::new(0),
            contents: (0..slots).map(|_| UnsafeCell::new(0)).collect(),
        }
    }

    /// Writes to a slot. loom fails if another thread's use of it is not known to be over.
    pub fn write(&self, slot: u32) {
        // SAFETY: loom checks that no other thread does so at this time.
        self.contents[slot as usize - 1].with_mut(|contents| unsafe { *contents += 1 });
    }

    pub fn read(&self, slot: u32) -> usize {
        // SAFETY: loom checks that no thread writes at this time.
        self.contents[slot as usize - 1].with(|contents| unsafe { *contents })
    }
}

impl<T> Few<T> {
    /// Takes up to `most` fresh slots, of the first `end`.
    pub fn fresh_below(&self, end: u32, most: u32) -> Option<(u32, u32)> {
        let mut used = self.used.load(Ordering::Acquire);
        loop {
            let count = most.min(end.saturating_sub(used));
            if count == 0 {
                return None;
            }
            match self
                .used
                .compare_exchange(used, used + count, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return Some((used + 1, count)),
                Err(now) => used = now,
            }
        }
    }
}

impl<T> Nodes<T> for Few<T> {
    fn node(&self, slot: u32) -> &T {
        &self.nodes[slot as usize - 1]
    }

    fn fresh(&self, most: u32, _: bool) -> Option<(u32, u32)> {
        self.fresh_below(self.nodes.len() as u32, most)
    }

    fn extent(&self) -> Extent {
        let exist = self.nodes.len() as u64;
        Extent {
            fresh: exist - u64::from(self.used.load(Ordering::Relaxed)),
            exist,
            more: 0,
        }
    }

    fn each_used(&self, visit: impl FnMut(u32)) {
        (1..=self.used.load(Ordering::Relaxed)).for_each(visit);
    }
}

struct Linked<'n>(&'n Few<AtomicU32>);

impl Links for Linked<'_> {
    fn next(&self, slot: u32) -> u32 {
        self.0.node(slot).load(Ordering::Relaxed)
    }

    fn set_next(&self, slot: u32, next: u32) {
        self.0.node(slot).store(next, Ordering::Relaxed);
    }
}

#[test]
fn pop_against_pop_pop_push_gives_no_slot_twice() {
    explore(4, || {
        let shared = Arc::new((Stack::new(), Few::<AtomicU32>::new(3)));
        let (stack, few) = &*shared;
        for slot in [3, 2, 1] {
            stack.push(&Linked(few), slot, slot);
        }
        let other = shared.clone();
        let thread = spawn(move || {
            let (stack, few) = &*other;
            let links = Linked(few);
            let first = stack.pop(&links).unwrap();
            let second = stack.pop(&links);
            few.write(first);
            stack.push(&links, first, first);
            second.inspect(|&slot| few.write(slot)).map_or(0, |_| 1)
        });
        let mine: Vec<u32> = (0..2).filter_map(|_| stack.pop(&Linked(few))).collect();
        mine.iter().for_each(|&slot| few.write(slot));
        let theirs = thread.join().unwrap();
        let left = core::iter::from_fn(|| stack.pop(&Linked(few)))
            .inspect(|&slot| few.write(slot))
            .count();
        assert_eq!(mine.len() + theirs + left, 3, "a slot was lost or made");
    });
}

#[test]
fn pop_against_push_push_loses_no_slot_and_makes_none() {
    explore(4, || {
        let shared = Arc::new((Stack::new(), Few::<AtomicU32>::new(3)));
        let (stack, few) = &*shared;
        stack.push(&Linked(few), 1, 1);
        let other = shared.clone();
        let thread = spawn(move || {
            let (stack, few) = &*other;
            for slot in [2, 3] {
                few.write(slot);
                stack.push(&Linked(few), slot, slot);
            }
        });
        let mine = stack.pop(&Linked(few)).expect("there is one all the time");
        few.write(mine);
        thread.join().unwrap();
        let left: Vec<u32> = core::iter::from_fn(|| stack.pop(&Linked(few))).collect();
        left.iter().for_each(|&slot| few.write(slot));
        assert_eq!(left.len(), 2, "a slot was lost or made");
        let all = left.iter().copied().chain([mine]).fold(0, |all, slot| all | 1 << slot);
        assert_eq!(all, 0b1110_u32, "a slot twice, or not at all");
    });
}

/// As above, with the popped slot pushed again: the slot below it, on either push, may be another thread's by then.
#[test]
fn pop_push_against_push_push_keeps_the_chain() {
    explore(3, || {
        let shared = Arc::new((Stack::new(), Few::<AtomicU32>::new(3)));
        let (stack, few) = &*shared;
        stack.push(&Linked(few), 1, 1);
        let other = shared.clone();
        let thread = spawn(move || {
            let (stack, few) = &*other;
            for slot in [2, 3] {
                few.write(slot);
                stack.push(&Linked(few), slot, slot);
            }
        });
        let mine = stack.pop(&Linked(few)).expect("there is one all the time");
        few.write(mine);
        stack.push(&Linked(few), mine, mine);
        thread.join().unwrap();
        let mut left: Vec<u32> = core::iter::from_fn(|| stack.pop(&Linked(few))).take(4).collect();
        left.iter().for_each(|&slot| few.write(slot));
        left.sort_unstable();
        assert_eq!(left, [1, 2, 3], "a slot twice, or not at all");
    });
}

#[test]
fn slots_in_batches_and_one_by_one_have_one_owner() {
    explore(3, || {
        let list = Arc::new(Numbers::new(Few::<AtomicU32>::new(3)));
        list.allocate_many(3);
        list.free_many([1, 2, 3]).unwrap();
        let other = list.clone();
        let thread = spawn(move || {
            let slot = other.allocate();
            slot.inspect(|&slot| other.nodes().write(slot));
            slot.map_or(0, |slot| {
                other.free(slot).unwrap();
                let again = other.allocate_many(1);
                again.iter().for_each(|&slot| other.nodes().write(slot));
                again.len()
            })
        });
        let mine = list.allocate_many(2);
        mine.iter().for_each(|&slot| list.nodes().write(slot));
        let live = (mine.len() + thread.join().unwrap()) as u64;
        assert_eq!((list.0.count_live(), list.count_free()), (live, 3 - live));
    });
}

/// Takes a slot, which must exist, and puts it back.
fn pair(list: &Numbers<Few<AtomicU32>>) {
    let slot = list.allocate().expect("a slot for each");
    list.nodes().write(slot);
    list.free(slot).unwrap();
}

#[test]
fn no_is_said_only_when_there_is_no_slot() {
    explore(3, || {
        // Two slots, two threads, one each at a time: neither may be refused.
        let list = Arc::new(Numbers::new(Few::<AtomicU32>::new(2)));
        let other = list.clone();
        let thread = spawn(move || (0..2).for_each(|_| pair(&other)));
        (0..2).for_each(|_| pair(&list));
        thread.join().unwrap();
        assert_eq!(list.0.count_live(), 0);
    });
}

#[test]
fn a_slot_that_goes_from_the_pocket_to_the_stack_is_not_missed() {
    explore(3, || {
        let list = Arc::new(Numbers::new(Few::<AtomicU32>::new(2)));
        // One slot is in the pocket, the thread that frees and allocates has the other.
        list.allocate_many(2);
        list.free(1).unwrap();
        let other = list.clone();
        let thread = spawn(move || {
            other.nodes().write(2);
            other.free(2).unwrap();
            let slot = other.allocate().expect("a slot for each");
            other.nodes().write(slot);
        });
        let slot = list.allocate().expect("a slot for each");
        list.nodes().write(slot);
        thread.join().unwrap();
        assert_eq!((list.0.count_live(), list.count_free()), (2, 0));
    });
}

#[test]
fn of_three_who_meet_at_the_pocket_each_has_a_slot() {
    explore(2, || {
        let list = Arc::new(Numbers::new(Few::<AtomicU32>::new(3)));
        list.allocate_many(3);
        list.free(1).unwrap();
        let threads: Vec<_> = [2, 3]
            .map(|slot| {
                let other = list.clone();
                spawn(move || {
                    other.nodes().write(slot);
                    other.free(slot).unwrap();
                    pair(&other);
                })
            })
            .into();
        pair(&list);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!((list.0.count_live(), list.count_free()), (0, 3));
    });
}

/// Slots, readers, and how often each slot was freed.
struct Read {
    few: Few<Node>,
    hyaline: Hyaline,
    /// What a reader finds: a slot, or 0.
    shared: [AtomicUsize; 2],
    era: AtomicU64,
    freed: AtomicUsize,
}

impl Read {
    fn new(slots: u32, spares: usize) -> Arc<Self> {
        let few = Few::<Node>::new(slots);
        let hyaline = Hyaline::new(&few, table(2), table(spares), Barrier::new());
        hyaline.admit(0);
        hyaline.admit(1);
        Arc::new(Self {
            few,
            hyaline,
            shared: [1, 2].map(AtomicUsize::new),
            era: AtomicU64::new(FIRST_ERA),
            freed: AtomicUsize::new(0),
        })
    }

    fn free(&self, first: u32, count: u32) {
        let mut slot = first;
        for _ in 0..count {
            self.few.write(slot);
            self.freed.fetch_add(1, Ordering::Relaxed);
            slot = self.few.node(slot).link();
        }
        assert_eq!(slot, 0, "the chain is as long as it says");
    }

    /// The reader of a record enters, looks at a place, and leaves.
    fn visit(&self, record: usize, place: usize) {
        self.hyaline.enter(record);
        let load = || self.shared[place].load(Ordering::Acquire);
        let slot = self.hyaline.protect(record, &self.era, load);
        if slot != 0 {
            self.few.read(slot as u32);
        }
        self.hyaline
            .leave(&self.few, record, |first, count| self.free(first, count));
    }

    /// The slots of a batch become unreachable, and are given to the readers.
    fn retire(&self, batch: Batch) {
        let first = batch.first as usize - 1;
        (first..first + batch.count as usize).for_each(|place| self.shared[place].store(0, Ordering::Release));
        self.hyaline
            .retire(&self.few, batch, |first, count| self.free(first, count))
            .unwrap();
    }

    fn finish(&self, freed: usize) {
        assert_eq!(self.freed.load(Ordering::Relaxed), freed);
    }
}

/// A batch of slots born in the first era.
fn batch(first: u32, count: u32) -> Batch {
    let oldest = FIRST_ERA;
    Batch { first, count, oldest }
}

#[test]
fn a_retired_slot_is_freed_once_and_not_under_a_reader() {
    explore(3, || {
        let world = Read::new(1, 2);
        let other = world.clone();
        let reader = spawn(move || other.visit(0, 0));
        world.retire(batch(1, 1));
        reader.join().unwrap();
        world.finish(1);
    });
}

#[test]
fn of_two_readers_the_last_frees() {
    explore(2, || {
        let world = Read::new(2, 1);
        world.few.node(1).link_to(2);
        let readers = [0, 1].map(|record| {
            let other = world.clone();
            spawn(move || other.visit(record, record))
        });
        world.retire(batch(1, 2));
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        world.finish(2);
    });
}

#[test]
fn a_reader_comes_again_while_two_retire() {
    explore(2, || {
        let world = Read::new(2, 4);
        let (other, third) = (world.clone(), world.clone());
        let reader = spawn(move || (0..2).for_each(|place| other.visit(0, place)));
        let second = spawn(move || third.retire(batch(2, 1)));
        world.retire(batch(1, 1));
        second.join().unwrap();
        reader.join().unwrap();
        world.finish(2);
    });
}

/// A reader comes twice. Between its visits, or while it is inside, the era advances, and a slot is born and retired
/// in it; also before the reader has announced that era, while its last announcement still stands.
#[test]
fn what_protect_gave_is_not_freed_though_it_is_young() {
    explore(3, || {
        let world = Read::new(2, 4);
        // It is born when the writer publishes it.
        world.shared[1].store(0, Ordering::Relaxed);
        let other = world.clone();
        let reader = spawn(move || [0, 1].into_iter().for_each(|place| other.visit(0, place)));
        world.era.fetch_add(1, Ordering::Relaxed);
        let oldest = world.era.load(Ordering::Relaxed);
        world.shared[1].store(2, Ordering::Release);
        let (first, count) = (2, 1);
        world.retire(Batch { first, count, oldest });
        reader.join().unwrap();
        world.finish(1);
    });
}

type List = Shards<Few<Node>>;

fn list(slots: u32, owners: usize) -> Arc<List> {
    crate::hand::list(Few::<Node>::new(slots), owners, 2)
}

/// Checks that every slot is in one place.
fn finish(list: &List, live: u64) {
    let mut seen = vec![false; list.nodes().nodes.len()];
    let census = list.census(|slot| {
        assert!(!core::mem::replace(&mut seen[slot as usize - 1], true), "{slot} twice");
    });
    assert_eq!(census.live, live);
    let used = u64::from(list.nodes().used.load(Ordering::Relaxed));
    let all = census.live + census.sharded + census.depot + census.retired;
    assert_eq!(all, used, "a slot was lost or made: {census:?}");
    assert_eq!(census.depot, list.in_depot());
}

#[test]
fn an_owner_and_one_who_gathers_share_no_slot() {
    explore(2, || {
        let list = list(2, 2);
        let (mine, theirs) = (hand(&list), hand(&list));
        // Both slots are in one shard, one of them in its pocket.
        let slots = [(); 2].map(|()| theirs.allocate().unwrap());
        slots.iter().for_each(|&slot| theirs.free(slot).unwrap());
        let thread = spawn(move || {
            let slot = theirs.allocate().expect("one of two is free");
            theirs.list.nodes().write(slot);
            theirs.free(slot).unwrap();
        });
        let slot = mine.allocate().expect("one of two is free");
        list.nodes().write(slot);
        thread.join().unwrap();
        finish(&list, 1);
    });
}

#[test]
fn the_slot_of_an_idle_owner_can_be_had() {
    explore(2, || {
        let list = list(2, 3);
        let [mine, theirs, idle] = [(); 3].map(|()| hand(&list));
        let slots = [(); 2].map(|()| idle.allocate().unwrap());
        idle.free(slots[0]).unwrap();
        let thread = spawn(move || {
            theirs.list.nodes().write(slots[1]);
            theirs.free(slots[1]).unwrap();
        });
        let slot = mine.allocate().expect("the idle owner's, or the other");
        list.nodes().write(slot);
        thread.join().unwrap();
        finish(&list, 1);
    });
}

/// Two owners allocate at the same time, from a list in which two slots are free, wherever they are.
fn each_takes_one(list: &List, mine: &Hand<Few<Node>>, theirs: Hand<Few<Node>>) {
    let thread = spawn(move || {
        let slot = theirs.allocate().expect("there are two for two");
        theirs.list.nodes().write(slot);
    });
    let slot = mine.allocate().expect("there are two for two");
    list.nodes().write(slot);
    thread.join().unwrap();
    finish(list, 2);
}

/// The largest model: two threads gather at once, and one waits for the other. So it has one preemption, and the slots
/// are in the lane instead of a third owner's shard, which saves looking at a shard. Of 377,350 interleavings it
/// explores the first 60,000, some 40 s; all of them, more than any other model has, on request.
#[test]
fn the_slots_of_one_shard_are_enough_for_two_who_gather() {
    explore_first(60_000, 1, || {
        let list = list(2, 2);
        let [mine, theirs] = [(); 2].map(|()| hand(&list));
        let slots = [(); 2].map(|()| list.allocate_as_guest(0).unwrap());
        slots
            .iter()
            .for_each(|&slot| list.free_as_guest(0, slot, list.nodes().node(slot)).unwrap());
        each_takes_one(&list, &mine, theirs);
    });
}

#[test]
fn a_shard_given_back_is_anothers_with_all_it_had() {
    explore(2, || {
        let list = list(1, 1);
        let first = hand(&list);
        let thread = spawn(move || {
            let slot = first.allocate().unwrap();
            first.list.nodes().write(slot);
            first.free(slot).unwrap();
            first.take_back();
        });
        let mine = Hand::lend(&list);
        if let Some(mine) = &mine {
            let slot = mine.allocate().expect("the only one, given back");
            list.nodes().write(slot);
        }
        thread.join().unwrap();
        finish(&list, u64::from(mine.is_some()));
    });
}

/// A slot passes from the pocket through a gathering thread back to its owner, which still remembers it.
#[test]
fn a_slot_out_of_the_pocket_comes_back_to_it() {
    explore(2, || {
        let list = list(1, 2);
        let (mine, theirs) = (hand(&list), hand(&list));
        let slot = theirs.allocate().unwrap();
        theirs.free(slot).unwrap();
        let (give, take) = (Arc::new(LoomU32::new(0)), Arc::new(LoomU32::new(0)));
        let (given, taken) = (give.clone(), take.clone());
        let thread = spawn(move || {
            if let Some(slot) = theirs.allocate() {
                theirs.list.nodes().write(slot);
                theirs.free(slot).unwrap();
            }
            // What the other thread had, if it is done with it.
            if given.load(Ordering::Acquire) != 0 {
                theirs.list.nodes().write(slot);
                theirs.free(slot).unwrap();
                taken.store(1, Ordering::Relaxed);
            }
        });
        let had = mine.allocate();
        if let Some(slot) = had {
            list.nodes().write(slot);
            give.store(1, Ordering::Release);
        }
        thread.join().unwrap();
        let live = had.is_some() && take.load(Ordering::Relaxed) == 0;
        finish(&list, u64::from(live));
    });
}

/// Two slots go from the depot to a shard as a batch, of which the owner takes one. The other can be had at any time.
#[test]
fn slots_on_their_way_to_a_shard_are_waited_for() {
    explore(1, || {
        let list = list(2, 2);
        let (mine, theirs) = (hand(&list), hand(&list));
        let slots = [(); 2].map(|()| list.allocate_as_guest(0).unwrap());
        for slot in slots {
            list.free_as_guest(0, slot, list.nodes().node(slot)).unwrap();
        }
        list.flush_lanes();
        assert_eq!(list.in_depot(), 2);
        each_takes_one(&list, &mine, theirs);
    });
}

/// Retired while nobody reads, two slots are passed on as a batch. The first could be had before, and so can be now.
#[test]
fn slots_on_their_way_to_readers_are_waited_for() {
    explore(2, || {
        let list = list(2, 2);
        let (mine, theirs) = (hand(&list), hand(&list));
        let slots = [(); 2].map(|()| theirs.allocate().unwrap());
        assert_eq!((theirs.allocate(), list.batch()), (None, 2));
        theirs.retire(slots[0]).unwrap();
        let thread = spawn(move || theirs.retire(slots[1]).unwrap());
        let slot = mine.allocate().expect("one was retired before");
        list.nodes().write(slot);
        thread.join().unwrap();
        finish(&list, 1);
    });
}

/// A list as that of long slots: each is a batch by itself, so that the second that is freed behind another goes to the
/// depot.
fn list_one_by_one(slots: u32, owners: usize) -> Arc<List> {
    crate::hand::list_in_batches(Few::<Node>::new(slots), owners, 2, 1)
}

#[test]
fn slots_that_go_to_the_depot_one_by_one_have_one_owner() {
    explore(2, || {
        let list = list_one_by_one(4, 2);
        let (mine, theirs) = (hand(&list), hand(&list));
        let slots = [(); 4].map(|()| theirs.allocate().unwrap());
        // One is in the pocket, one is loaded, one was before.
        slots[..3].iter().for_each(|&slot| theirs.free(slot).unwrap());
        assert_eq!(list.in_depot(), 0);
        let thread = spawn(move || {
            theirs.list.nodes().write(slots[3]);
            theirs.free(slots[3]).unwrap();
        });
        let slot = mine.allocate().expect("three are free");
        list.nodes().write(slot);
        thread.join().unwrap();
        finish(&list, 1);
    });
}

#[test]
fn slots_that_are_retired_one_by_one_are_had_one_by_one() {
    explore(2, || {
        let list = list_one_by_one(2, 2);
        let (mine, theirs) = (hand(&list), hand(&list));
        let slots = [(); 2].map(|()| theirs.allocate().unwrap());
        theirs.retire(slots[0]).unwrap();
        assert_eq!(list.in_depot(), 1, "it does not wait for another");
        let thread = spawn(move || {
            theirs.list.nodes().write(slots[1]);
            theirs.retire(slots[1]).unwrap();
            theirs.allocate().inspect(|&slot| theirs.list.nodes().write(slot))
        });
        let slot = mine.allocate().expect("one was retired before");
        list.nodes().write(slot);
        let other = thread.join().unwrap();
        assert!(other.is_some(), "the other is free, too");
        finish(&list, 2);
    });
}

/// The owner is inside for another slot, and stalls: the one in its pocket is there all the time.
#[test]
fn a_slot_in_the_pocket_of_one_at_work_is_waited_for() {
    explore(2, || {
        let list = list(2, 2);
        let (mine, theirs) = (hand(&list), hand(&list));
        let slots = [(); 2].map(|()| theirs.allocate().unwrap());
        theirs.free(slots[0]).unwrap();
        let thread = spawn(move || theirs.free(slots[1]).unwrap());
        let slot = mine.allocate().expect("one is free, in the pocket");
        list.nodes().write(slot);
        thread.join().unwrap();
        finish(&list, 1);
    });
}

/// A guest takes a slot and puts it back.
fn visit(list: &List) {
    let slot = list.allocate_as_guest(0).expect("one for each");
    list.nodes().write(slot);
    list.free_as_guest(0, slot, list.nodes().node(slot)).unwrap();
}

#[test]
fn guests_meet_in_a_lane() {
    explore(2, || {
        let list = list(2, 1);
        let other = list.clone();
        let thread = spawn(move || visit(&other));
        visit(&list);
        thread.join().unwrap();
        finish(&list, 0);
    });
}

/// The fence of one who enters is for one who gathers, and outside a model none: guests among themselves need nothing
/// of it. Nobody gathers, since each may take a fresh slot.
#[test]
fn guests_see_what_guests_left_without_a_fence() {
    explore(3, || {
        let list = list_one_by_one(2, 1);
        let other = list.clone();
        let thread = spawn(move || Barrier::without_light(|| visit(&other)));
        Barrier::without_light(|| visit(&list));
        thread.join().unwrap();
        finish(&list, 0);
    });
}

fn hand(list: &Arc<List>) -> Hand<Few<Node>> {
    Hand::lend(list).expect("a shard for each")
}
