//! Is a request refused though a slot was free all the time, while one gathers and another has the list grow?
//!
//! The list as it ships, over slots that come when the backing is asked for more. It is asked by a system call, during
//! which others run.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::sync::atomic::AtomicU32;
use loom::thread::yield_now;
use pageheap::internals::free_list::{Extent, Node, Nodes, Shards};

use super::free_lists::Few;
use super::{explore, spawn};
use crate::hand::{Hand, list};

/// How many slots there are without asking.
const FIRST: u32 = 1;

/// A few slots, of which one exists from the beginning. The backing has memory for the others once there is `room`, and
/// has refused before.
struct Growing {
    few: Few<Node>,
    room: AtomicU32,
}

impl Nodes for Growing {
    fn node(&self, slot: u32) -> &Node {
        self.few.node(slot)
    }

    fn fresh(&self, most: u32, again: bool) -> Option<(u32, u32)> {
        if !again {
            return self.few.fresh_below(FIRST, most);
        }
        // A read-modify-write: the system knows how much memory there is. AcqRel: its callers meet there.
        let end = self.room.fetch_add(0, Ordering::AcqRel);
        let taken = self.few.fresh_below(end, most);
        // Others run meanwhile.
        if end == FIRST || taken.is_some() {
            yield_now();
        }
        taken
    }

    fn extent(&self) -> Extent {
        self.few.extent()
    }

    fn each_used(&self, visit: impl FnMut(u32)) {
        self.few.each_used(visit);
    }
}

fn growing(slots: u32) -> Arc<Shards<Growing>> {
    let (few, room) = (Few::new(slots), AtomicU32::new(FIRST));
    list(Growing { few, room }, 2, 2)
}

/// Three slots, three requests. There is room for two slots before the one that is there is taken, so that one is free
/// at any time: in the end, perhaps, in the hands of a thread that has got both, and is about to give one to the depot.
/// That thread is in the turnstile then, but was not when the one who gathers looked first.
#[test]
fn a_slot_that_another_has_the_list_grow_by_is_not_missed() {
    explore(1, || {
        let list = growing(3);
        let [mine, theirs] = [(); 2].map(|()| Hand::lend(&list).expect("a shard for each"));
        let slot = theirs.allocate().expect("there is one");
        theirs.free(slot).unwrap();
        let thread = spawn(move || {
            theirs.list.nodes().room.fetch_add(2, Ordering::AcqRel);
            let take = || {
                let slot = theirs.allocate().expect("three for three");
                theirs.list.nodes().few.write(slot);
            };
            take();
            yield_now();
            take();
        });
        let slot = mine.allocate().expect("three for three");
        list.nodes().few.write(slot);
        thread.join().unwrap();
        let census = list.census(|_| ());
        assert_eq!((census.live, census.sharded + census.depot), (3, 0));
    });
}
