//! A sharded list in random schedules: owners, guests, readers, and the last slot.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pageheap::internals::free_list::{Extent, Node, Nodes, Shards};
use pageheap::internals::{AtomicU32, Zeroed};
use shuttle::thread::spawn;

use super::explore;
use crate::hand::{Hand, Numbers};

/// A few slots and who owns each. The stamps are not shuttle's, so they add no schedules.
struct Few<T = Node> {
    nodes: Vec<T>,
    used: AtomicU32,
    owners: Vec<AtomicUsize>,
    readers: Vec<AtomicUsize>,
}

impl<T: Zeroed> Few<T> {
    fn new(slots: usize) -> Self {
        Self {
            nodes: (0..slots).map(|_| T::zeroed()).collect(),
            used: AtomicU32::new(0),
            owners: (0..slots).map(|_| AtomicUsize::new(0)).collect(),
            readers: (0..slots).map(|_| AtomicUsize::new(0)).collect(),
        }
    }

    fn stamp(&self, slot: u32, from: usize, to: usize) {
        let before = self.owners[slot as usize - 1].swap(to, Ordering::SeqCst);
        assert_eq!(before, from, "slot {slot} is {before}'s, not {from}'s");
    }
}

impl<T> Nodes<T> for Few<T> {
    fn node(&self, slot: u32) -> &T {
        &self.nodes[slot as usize - 1]
    }

    fn fresh(&self, most: u32, _: bool) -> Option<(u32, u32)> {
        let mut used = self.used.load(Ordering::SeqCst);
        loop {
            let count = most.min(self.nodes.len() as u32 - used);
            if count == 0 {
                return None;
            }
            let taken = self
                .used
                .compare_exchange(used, used + count, Ordering::SeqCst, Ordering::SeqCst);
            match taken {
                Ok(_) => return Some((used + 1, count)),
                Err(now) => used = now,
            }
        }
    }

    fn extent(&self) -> Extent {
        let exist = self.nodes.len() as u64;
        Extent {
            fresh: exist - u64::from(self.used.load(Ordering::SeqCst)),
            exist,
            more: 0,
        }
    }

    fn each_used(&self, visit: impl FnMut(u32)) {
        (1..=self.used.load(Ordering::SeqCst)).for_each(visit);
    }
}

type List = Shards<Few>;

fn list(slots: usize, owners: usize) -> Arc<List> {
    crate::hand::list(Few::<Node>::new(slots), owners, 4)
}

fn stamp(list: &List, slot: u32, from: usize, to: usize) {
    list.nodes().stamp(slot, from, to);
}

/// Every slot is in one place, and free.
fn finish(list: &List, slots: u64) {
    let mut seen = vec![false; list.nodes().nodes.len()];
    let census = list.census(|slot| {
        assert!(!core::mem::replace(&mut seen[slot as usize - 1], true), "{slot} twice");
    });
    let fresh = list.nodes().extent().fresh;
    assert_eq!(
        census.sharded + census.depot + census.retired + fresh,
        slots,
        "{census:?}"
    );
    assert_eq!((census.live, census.depot), (0, list.in_depot()));
}

/// As many slots as threads, each of which holds at most one: a thread that asks finds one, in whatever shard.
#[test]
fn the_last_slot_is_found_wherever_it_is() {
    explore(4000, || {
        let list = list(3, 2);
        let threads: Vec<_> = (1..=3)
            .map(|who| {
                let list = list.clone();
                spawn(move || {
                    let hand = Hand::lend(&list);
                    let free_as_guest = |slot| list.free_as_guest(0, slot, list.nodes().node(slot));
                    for round in 0..3 {
                        let slot = match &hand {
                            Some(hand) => hand.allocate(),
                            None => list.allocate_as_guest(0),
                        };
                        let slot = slot.expect("one of three is free");
                        stamp(&list, slot, 0, who);
                        stamp(&list, slot, who, 0);
                        match &hand {
                            Some(hand) if round != 1 => hand.free(slot).unwrap(),
                            _ => free_as_guest(slot).unwrap(),
                        }
                    }
                    if who == 2 {
                        hand.into_iter().for_each(Hand::take_back);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        finish(&list, 3);
    });
}

/// Two threads exchange a shared slot, and retire; a third reads, twice.
#[test]
fn what_is_read_is_nobody_elses() {
    explore(4000, || {
        let list = list(6, 3);
        let shared = Arc::new(AtomicU32::new(0));
        let writers: Vec<_> = (1..=2)
            .map(|who| {
                let (list, shared) = (list.clone(), shared.clone());
                spawn(move || {
                    let hand = Hand::lend(&list).unwrap();
                    for _ in 0..3 {
                        let Some(slot) = hand.allocate() else {
                            continue;
                        };
                        stamp(&list, slot, 0, who);
                        let reads = list.nodes().readers[slot as usize - 1].load(Ordering::SeqCst);
                        assert_eq!(reads, 0, "slot {slot} is given to {who} while it is read");
                        let old = shared.swap(slot, Ordering::SeqCst);
                        if old != 0 {
                            list.nodes().owners[old as usize - 1].store(0, Ordering::SeqCst);
                            hand.retire(old).unwrap();
                        }
                    }
                    hand.take_back();
                })
            })
            .collect();
        let reader = {
            let (list, shared) = (list.clone(), shared.clone());
            spawn(move || {
                let shard = list.lend().unwrap();
                for _ in 0..2 {
                    list.enter_reader(shard);
                    let slot = list.protect(shard, || shared.load(Ordering::SeqCst));
                    if slot != 0 {
                        let readers = &list.nodes().readers[slot as usize - 1];
                        readers.fetch_add(1, Ordering::SeqCst);
                        shuttle::thread::yield_now();
                        readers.fetch_sub(1, Ordering::SeqCst);
                    }
                    list.leave_reader(shard);
                }
                list.take_back(shard);
            })
        };
        writers.into_iter().for_each(|thread| thread.join().unwrap());
        reader.join().unwrap();
        let last = shared.load(Ordering::SeqCst);
        if last != 0 {
            stamp(
                &list,
                last,
                list.nodes().owners[last as usize - 1].load(Ordering::SeqCst),
                0,
            );
            list.free_as_guest(0, last, list.nodes().node(last)).unwrap();
        }
        finish(&list, 6);
    });
}

/// One stack for three threads, which allocate and free one by one and in batches; no thread is refused while fewer
/// slots are taken than there are.
#[test]
fn one_stack_serves_three() {
    explore(4000, || {
        let list = Arc::new(Numbers::new(Few::<AtomicU32>::new(6)));
        let threads: Vec<_> = (1..=3)
            .map(|who| {
                let list = list.clone();
                spawn(move || {
                    let take = |slot| list.nodes().stamp(slot, 0, who);
                    let first = list.allocate().expect("two for each");
                    take(first);
                    let batch = list.allocate_many(1);
                    batch.iter().copied().for_each(take);
                    assert_eq!(batch.len(), 1, "two for each");
                    list.nodes().stamp(first, who, 0);
                    list.free(first).unwrap();
                    batch.iter().for_each(|&slot| list.nodes().stamp(slot, who, 0));
                    list.free_many(batch).unwrap();
                    let batch = list.allocate_many(2);
                    assert_eq!(batch.len(), 2, "two for each");
                    batch.iter().copied().for_each(take);
                    batch.iter().for_each(|&slot| list.nodes().stamp(slot, who, 0));
                    list.free_many(batch).unwrap();
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(
            (list.count_free() + list.nodes().extent().fresh, list.0.count_live()),
            (6, 0)
        );
    });
}

/// The slot in the pocket is taken after another has gone to the stack. (loom explores one interleaving of this: it
/// forgets a thread's load of a word once another thread has loaded it, as each does before it exchanges.)
#[test]
fn a_list_in_which_a_slot_is_free_all_the_time_is_not_empty() {
    explore(4000, || {
        let list = Arc::new(Numbers::new(Few::<AtomicU32>::new(2)));
        assert_eq!(list.allocate_many(2), [1, 2]);
        list.free(1).unwrap();
        let other = list.clone();
        let thread = spawn(move || {
            other.free(2).unwrap();
            other.allocate().expect("one of two is free");
        });
        assert!(!list.0.is_empty(), "a slot was free all the time");
        thread.join().unwrap();
    });
}

/// One shard passes from owner to owner with everything in it; a thread that gets none uses the lane.
#[test]
fn a_shard_goes_from_hand_to_hand() {
    explore(4000, || {
        let list = list(3, 1);
        let threads: Vec<_> = (1..=3)
            .map(|who| {
                let list = list.clone();
                spawn(move || {
                    for _ in 0..2 {
                        let Some(hand) = Hand::lend(&list) else {
                            let slot = list.allocate_as_guest(0).expect("one for each");
                            stamp(&list, slot, 0, who);
                            stamp(&list, slot, who, 0);
                            list.free_as_guest(0, slot, list.nodes().node(slot)).unwrap();
                            continue;
                        };
                        let slot = hand.allocate().expect("one for each");
                        stamp(&list, slot, 0, who);
                        stamp(&list, slot, who, 0);
                        hand.free(slot).unwrap();
                        hand.take_back();
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        finish(&list, 3);
    });
}

/// One thread retires what two may be reading, by its shard and by the lane; the readers' records change hands.
#[test]
fn readers_hold_what_they_read_whoever_retires_it() {
    explore(4000, || {
        let list = list(4, 3);
        let shared = Arc::new(AtomicU32::new(0));
        let hand = Hand::lend(&list).unwrap();
        let readers = [(); 2].map(|()| {
            let (list, shared) = (list.clone(), shared.clone());
            spawn(move || {
                for _ in 0..2 {
                    let hand = Hand::lend(&list).unwrap();
                    list.enter_reader(hand.shard);
                    let slot = list.protect(hand.shard, || shared.load(Ordering::SeqCst));
                    if slot != 0 {
                        let readers = &list.nodes().readers[slot as usize - 1];
                        readers.fetch_add(1, Ordering::SeqCst);
                        shuttle::thread::yield_now();
                        readers.fetch_sub(1, Ordering::SeqCst);
                    }
                    list.leave_reader(hand.shard);
                    hand.take_back();
                }
            })
        });
        for round in 0..4 {
            let Some(slot) = hand.allocate() else {
                continue;
            };
            stamp(&list, slot, 0, 1);
            let reads = list.nodes().readers[slot as usize - 1].load(Ordering::SeqCst);
            assert_eq!(reads, 0, "slot {slot} is given while it is read");
            let old = shared.swap(slot, Ordering::SeqCst);
            if old != 0 {
                stamp(&list, old, 1, 0);
                let by_the_lane = || list.retire_as_guest(0, old, list.nodes().node(old));
                if round == 1 { by_the_lane() } else { hand.retire(old) }.unwrap();
            }
            if round == 2 {
                list.flush(hand.shard);
            }
        }
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        let last = shared.swap(0, Ordering::SeqCst);
        stamp(&list, last, 1, 0);
        hand.free(last).unwrap();
        hand.take_back();
        finish(&list, 4);
    });
}
