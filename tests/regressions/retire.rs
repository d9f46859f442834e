//! Retired slots were offered to readers only at a multiple of the batch size, even if that size had changed since the
//! batch began; batches that readers would not take were offered again and again; and where few slots were free, each
//! was passed on alone, with a heavy fence of its own.

use std::alloc::Layout;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use pageheap::arena::{ArenaConfig, ShardedFreeList};
use pageheap::internals::Barrier;
use pageheap::internals::free_list::{Extent, Hyaline, LANES, MAX_BATCH, Node, Nodes, Pocket, Shards};

use super::gather::table;

#[test]
fn what_is_retired_is_passed_on_at_the_limit_of_then() {
    let layout = Layout::from_size_align(64, 8).unwrap();
    let list = ShardedFreeList::with_config(layout, 1, ArenaConfig::new().limit(1 << 20)).unwrap();
    let owner = list.owner().unwrap();
    let take = || owner.allocate().expect("a fifth is free").cast();
    let mut slots: Vec<NonNull<u8>> = (0..61).map(|_| take()).collect();
    let last = slots.pop().unwrap();
    // SAFETY: ours, and unknown to other threads.
    slots.into_iter().for_each(|slot| unsafe { owner.retire(slot) });
    assert_eq!(list.census(|_| ()).retired, 60, "fewer than a batch may have");
    while list.batch_limit() > 50 {
        take();
    }
    assert!(list.batch_limit() > 1 && list.gatherings() == 0);
    // SAFETY: as above.
    unsafe { owner.retire(last) };
    assert_eq!(list.census(|_| ()).retired, 0, "more than a batch may have by now");
}

/// How often slots are passed on, and how often none is found, while 900 of a list of about 1,800, of which `free` are
/// free, are replaced.
fn passes_with(free: usize) -> (usize, u64) {
    let layout = Layout::from_size_align(64, 8).unwrap();
    let list = ShardedFreeList::with_config(layout, 1, ArenaConfig::new().limit(160_000)).unwrap();
    let owner = list.owner().unwrap();
    let mut slots: VecDeque<NonNull<u8>> = std::iter::from_fn(|| list.allocate().ok()).map(NonNull::cast).collect();
    assert!(slots.len() > 1800);
    // SAFETY: ours.
    slots.drain(..free).for_each(|slot| unsafe { list.deallocate(slot) });
    let (mut passes, mut waiting, before) = (0, 0, list.gatherings());
    for _ in 0..900 {
        slots.push_back(owner.allocate().expect("some are free").cast());
        // SAFETY: ours, and unknown to other threads.
        unsafe { owner.retire(slots.pop_front().unwrap()) };
        let retired = list.census(|_| ()).retired;
        passes += usize::from(retired <= waiting);
        waiting = retired;
    }
    assert_eq!(list.batch_limit(), 1);
    (passes, list.gatherings() - before)
}

#[test]
fn where_few_slots_are_free_retired_ones_share_a_fence_all_the_same() {
    // 16 at a time; but what waits is at most what is free elsewhere, so that nobody has to gather it.
    let (passes, gatherings) = passes_with(190);
    assert!(
        passes < 900 / 12 && gatherings == 0,
        "{passes} passes, {gatherings} gatherings"
    );
    let (passes, gatherings) = passes_with(60);
    assert!(
        passes < 900 / 2 && gatherings == 0,
        "{passes} passes, {gatherings} gatherings"
    );
    // Both are needed: each is passed on at once. (They were in the lanes, from where they were gathered.)
    assert_eq!(passes_with(2), (900, 1));
}

const SLOTS: usize = 64;

/// Nodes, counting how often they are accessed. The controller is told that none is free.
struct Counted {
    nodes: Vec<Node>,
    used: AtomicUsize,
    looks: AtomicUsize,
}

impl Nodes for &Counted {
    fn node(&self, slot: u32) -> &Node {
        self.looks.fetch_add(1, Ordering::Relaxed);
        &self.nodes[slot as usize - 1]
    }

    fn fresh(&self, most: u32, _: bool) -> Option<(u32, u32)> {
        let used = self.used.load(Ordering::Relaxed);
        let count = (most as usize).min(SLOTS - used);
        self.used.store(used + count, Ordering::Relaxed);
        (count > 0).then_some((used as u32 + 1, count as u32))
    }

    fn extent(&self) -> Extent {
        Extent {
            fresh: 0,
            exist: SLOTS as u64,
            more: 0,
        }
    }

    fn each_used(&self, visit: impl FnMut(u32)) {
        (1..=self.used.load(Ordering::Relaxed) as u32).for_each(visit);
    }
}

#[test]
fn what_readers_would_not_take_is_not_offered_with_each_slot() {
    const READERS: usize = 40;
    let counted = Counted {
        nodes: (0..SLOTS).map(|_| Node::new()).collect(),
        used: AtomicUsize::new(0),
        looks: AtomicUsize::new(0),
    };
    // Without a spare node, a batch needs one slot more than there are readers.
    let hyaline = Hyaline::new(&&counted, table(READERS + 1), table(0), Barrier::new());
    let shards = Shards::new(&counted, table(LANES + READERS + 1), hyaline, Barrier::new(), MAX_BATCH);
    let owned = shards.lend().expect("a shard");
    let readers: Vec<_> = (0..READERS).map(|_| shards.lend().expect("a shard")).collect();
    let (shard, pocket) = (shards.shard(owned), Pocket::new());
    let slots: Vec<u32> = std::iter::from_fn(|| shards.allocate(shard, &pocket))
        .map(|taken| taken.0)
        .collect();
    assert_eq!((slots.len(), shards.batch()), (SLOTS, 1));
    readers.iter().for_each(|&reader| {
        shards.enter_reader(reader);
        shards.protect(reader, || ());
    });
    let before = counted.looks.load(Ordering::Relaxed);
    for &slot in &slots[..READERS] {
        assert_eq!(shards.retire(shard, slot, &counted.nodes[slot as usize - 1]), Ok(()));
    }
    let looks = counted.looks.load(Ordering::Relaxed) - before;
    assert_eq!(
        shards.census(|_| ()).retired as usize,
        READERS,
        "too few for the readers"
    );
    // A few looks per slot of an offered batch: of 1, 2, 4, … 32, in all fewer than two for each slot.
    assert!(looks < 12 * READERS, "{looks} looks at nodes");
    // Twice as many as at the last offer, which is enough.
    for &slot in &slots[READERS..] {
        assert_eq!(shards.retire(shard, slot, &counted.nodes[slot as usize - 1]), Ok(()));
    }
    assert_eq!(shards.census(|_| ()).retired, 0, "all of them wait for the readers");
    readers.iter().for_each(|&reader| shards.leave_reader(reader));
    assert_eq!(std::iter::from_fn(|| shards.allocate(shard, &pocket)).count(), SLOTS);
}
