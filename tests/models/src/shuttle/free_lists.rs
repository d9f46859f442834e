//! A sharded list in random schedules: owners, guests, readers, and the last slot.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pageheap::internals::free_list::{GUESTS, Hyaline, LANES, Node, Nodes, Shards};
use pageheap::internals::{AtomicU32, Barrier, Table, Zeroed};
use shuttle::thread::spawn;

use super::explore;

/// A few slots and who has each. The stamps are not shuttle's: they add no schedules.
struct Few {
    nodes: Vec<Node>,
    used: AtomicU32,
    owners: Vec<AtomicUsize>,
    readers: Vec<AtomicUsize>,
}

impl Nodes for Few {
    fn node(&self, slot: u32) -> &Node {
        &self.nodes[slot as usize - 1]
    }

    fn fresh(&self, most: u32) -> Option<(u32, u32)> {
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

    fn extent(&self) -> (u64, u64) {
        let all = self.nodes.len() as u64;
        (all - u64::from(self.used.load(Ordering::SeqCst)), all)
    }

    fn each_used(&self, visit: impl FnMut(u32)) {
        (1..=self.used.load(Ordering::SeqCst)).for_each(visit);
    }
}

type List = Shards<Few>;

fn table<T: Zeroed>(len: usize) -> Table<T> {
    // SAFETY: under a checker the address means nothing.
    unsafe { Table::new(core::ptr::NonNull::dangling(), len) }
}

fn list(slots: usize, owners: usize) -> Arc<List> {
    let few = Few {
        nodes: (0..slots).map(|_| Node::zeroed()).collect(),
        used: AtomicU32::new(0),
        owners: (0..slots).map(|_| AtomicUsize::new(0)).collect(),
        readers: (0..slots).map(|_| AtomicUsize::new(0)).collect(),
    };
    let hyaline = Hyaline::new(&few, table(GUESTS + owners), table(4), Barrier::new());
    Arc::new(Shards::new(few, table(LANES + owners), hyaline, Barrier::new()))
}

fn stamp(list: &List, slot: u32, from: usize, to: usize) {
    let before = list.nodes().owners[slot as usize - 1].swap(to, Ordering::SeqCst);
    assert_eq!(before, from, "slot {slot} is {before}'s, not {from}'s");
}

/// Every slot is in one place, and nobody's.
fn finish(list: &List, slots: u64) {
    let mut seen = vec![false; list.nodes().nodes.len()];
    let census = list.census(|slot| {
        assert!(!core::mem::replace(&mut seen[slot as usize - 1], true), "{slot} twice");
    });
    let fresh = list.nodes().extent().0;
    assert_eq!(
        census.sharded + census.depot + census.retired + fresh,
        slots,
        "{census:?}"
    );
    assert_eq!((census.live, census.depot), (0, list.in_depot()));
}

/// As many slots as threads, each of which has at most one: whoever asks finds one, in whatever shard.
#[test]
fn the_last_slot_is_found_wherever_it_is() {
    explore(4000, || {
        let list = list(3, 2);
        let threads: Vec<_> = (1..=3)
            .map(|who| {
                let list = list.clone();
                spawn(move || {
                    let shard = list.lend();
                    for round in 0..3 {
                        let slot = match shard {
                            Some(shard) => list.allocate(shard),
                            None => list.allocate_as_guest(0),
                        };
                        let slot = slot.expect("one of three is free");
                        stamp(&list, slot, 0, who);
                        stamp(&list, slot, who, 0);
                        match shard {
                            Some(shard) if round != 1 => list.free(shard, slot).unwrap(),
                            _ => list.free_as_guest(0, slot).unwrap(),
                        }
                    }
                    if who == 2 {
                        shard.into_iter().for_each(|shard| list.take_back(shard));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        finish(&list, 3);
    });
}

/// Two exchange what is shared, and retire; two read, one of them bounded.
#[test]
fn what_is_read_is_nobody_elses() {
    explore(4000, || {
        let list = list(6, 3);
        let shared = Arc::new(AtomicU32::new(0));
        let writers: Vec<_> = (1..=2)
            .map(|who| {
                let (list, shared) = (list.clone(), shared.clone());
                spawn(move || {
                    let shard = list.lend().unwrap();
                    for _ in 0..3 {
                        let Some(slot) = list.allocate(shard) else {
                            continue;
                        };
                        stamp(&list, slot, 0, who);
                        let reads = list.nodes().readers[slot as usize - 1].load(Ordering::SeqCst);
                        assert_eq!(reads, 0, "slot {slot} is given to {who} while it is read");
                        let old = shared.swap(slot, Ordering::SeqCst);
                        if old != 0 {
                            list.nodes().owners[old as usize - 1].store(0, Ordering::SeqCst);
                            list.retire(shard, old).unwrap();
                        }
                    }
                    list.take_back(shard);
                })
            })
            .collect();
        let reader = {
            let (list, shared) = (list.clone(), shared.clone());
            spawn(move || {
                let shard = list.lend().unwrap();
                for all in [false, true] {
                    list.enter_reader(shard, all);
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
            list.free_as_guest(0, last).unwrap();
        }
        finish(&list, 6);
    });
}
