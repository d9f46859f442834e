//! Who gathers waited for one who held slots, and asked the backing for more at each of a million looks.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Barrier as Door, Mutex};
use std::time::Duration;

use pageheap::internals::free_list::{GUESTS, Hyaline, LANES, Node, Nodes, Pocket, Shards};
use pageheap::internals::{Barrier, Table};

const SLOTS: u32 = 8;

/// Nodes of a few slots, a backing that counts how often it is asked, and a place where an owner stops.
struct Gate<'d> {
    nodes: Vec<Node>,
    used: AtomicU32,
    asked: AtomicUsize,
    /// Where the next to look at a node waits, once to say that he is there, and once to go on.
    stop: Mutex<Option<&'d Door>>,
}

impl Nodes for &Gate<'_> {
    fn node(&self, slot: u32) -> &Node {
        if let Some(door) = self.stop.try_lock().ok().and_then(|mut stop| stop.take()) {
            door.wait();
            door.wait();
        }
        &self.nodes[slot as usize - 1]
    }

    fn fresh(&self, most: u32) -> Option<(u32, u32)> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let used = self.used.load(Ordering::Acquire);
        let count = most.min(SLOTS - used);
        self.used.fetch_add(count, Ordering::AcqRel);
        (count > 0).then_some((used + 1, count))
    }

    fn extent(&self) -> (u64, u64) {
        let used = self.used.load(Ordering::Relaxed);
        (u64::from(SLOTS - used), u64::from(SLOTS))
    }

    fn each_used(&self, visit: impl FnMut(u32)) {
        (1..=self.used.load(Ordering::Relaxed)).for_each(visit);
    }
}

/// A table in memory that stays.
fn table<T: pageheap::internals::Zeroed>(len: usize) -> Table<T> {
    let bytes = vec![0_u8; len * size_of::<T>() + align_of::<T>()].leak();
    let skip = bytes.as_ptr().align_offset(align_of::<T>());
    // SAFETY: aligned, zero, of that many entries, and nobody else's for ever.
    unsafe { Table::new(NonNull::from(&mut bytes[skip]), len) }
}

#[test]
fn the_backing_is_not_asked_while_slots_are_held() {
    let door = Door::new(2);
    let gate = Gate {
        nodes: (0..SLOTS).map(|_| Node::new()).collect(),
        used: AtomicU32::new(0),
        asked: AtomicUsize::new(0),
        stop: Mutex::new(None),
    };
    let hyaline = Hyaline::new(&&gate, table(GUESTS + 2), table(2), Barrier::new());
    let shards = Shards::new(&gate, table(LANES + 2), hyaline, Barrier::new());
    let owned = shards.lend().expect("a shard");
    let taken: Vec<u32> = (0..SLOTS)
        .map(|_| shards.allocate_as_guest(0).expect("a slot"))
        .collect();
    std::thread::scope(|scope| {
        // All are taken, and two are freed: into the owner's pocket, whence he takes it, and into his shard.
        let owner = scope.spawn(|| {
            let (shard, pocket) = (shards.shard(owned), Pocket::new());
            for &slot in &taken[..2] {
                let node = &gate.nodes[slot as usize - 1];
                assert_eq!(shards.free(shard, &pocket, (slot, std::ptr::null_mut()), node), Ok(()));
            }
            let first = shards.allocate(shard, &pocket).map(|(slot, _)| slot);
            *gate.stop.lock().unwrap() = Some(&door);
            (first, shards.allocate(shard, &pocket).map(|(slot, _)| slot))
        });
        // He is inside his shard now, and moves no more.
        door.wait();
        let before = gate.asked.load(Ordering::Relaxed);
        let guest = scope.spawn(|| shards.allocate_as_guest(0));
        std::thread::sleep(Duration::from_millis(300));
        let asked = gate.asked.load(Ordering::Relaxed) - before;
        door.wait();
        assert_eq!(owner.join().unwrap(), (Some(taken[0]), Some(taken[1])));
        assert_eq!(guest.join().unwrap(), None);
        assert!(asked <= 8, "asked {asked} times while it waited");
    });
}
