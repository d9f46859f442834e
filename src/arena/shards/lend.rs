//! Lending of shards, and a census of all slots.
//!
//! Shards are lent under a lock of their own (~15 ns); the one returned last is lent first. A leaked owner keeps its
//! shard, but not the slots in it, which a gatherer finds.

#![forbid(unsafe_code)]

use crossbeam_utils::CachePadded;

use super::{As, Control, LANES, Shard, Shards};
use crate::arena::hyaline::{Batch, FIRST_ERA};
use crate::arena::node::{Batches, Chain, LIVE, Nodes};
use crate::arena::numbers::unpack;
use crate::arena::stack::{Links, NIL, Stack};
use crate::sync::Ordering;

/// Where the slots are at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Allocated.
    pub live: u64,
    /// Free, in shards.
    pub sharded: u64,
    /// Free, in the depot.
    pub depot: u64,
    /// Retired, and not yet passed to Hyaline.
    pub retired: u64,
}

impl<N: Nodes> Shards<N> {
    /// Lends a shard to the caller alone, until [`take_back`](Self::take_back). `None` if all are lent.
    pub fn lend(&self) -> Option<usize> {
        let _guard = self.lending.lock();
        // Relaxed, throughout: under the lock. Except for `lent`, see below.
        let vacant = self.vacant.load(Ordering::Relaxed);
        if vacant != 0 {
            let shard = vacant as usize - 1;
            self.vacant
                .store(self.shards.get(shard).vacant.load(Ordering::Relaxed), Ordering::Relaxed);
            return Some(shard);
        }
        let lent = self.lent.load(Ordering::Relaxed);
        if LANES + lent >= self.shards.len() {
            return None;
        }
        self.hyaline.admit(lent);
        // Relaxed: a gatherer loads it after its heavy fence. The new owner makes its light fence before it does
        // anything, so either it is counted or it sees `frozen`.
        self.lent.store(lent + 1, Ordering::Relaxed);
        Some(LANES + lent)
    }

    /// Takes back a shard that the caller no longer uses, and [empties](Self::flush) it.
    pub fn take_back(&self, shard: usize) {
        self.flush(shard);
        let _guard = self.lending.lock();
        // Relaxed, throughout: under the lock.
        let next = self.vacant.load(Ordering::Relaxed);
        self.shards.get(shard).vacant.store(next, Ordering::Relaxed);
        self.vacant.store(shard as u32 + 1, Ordering::Relaxed);
    }

    /// Empties a shard that is the caller's: free slots go to the depot, retired ones to Hyaline, if it accepts them.
    /// While a thread gathers, some may stay: the next gatherer finds them, or whoever uses the shard next.
    pub fn flush(&self, shard: usize) {
        self.flush_as(self.shards.get(shard), As::Owner);
    }

    /// Empties the lanes in which no thread is at work.
    pub fn flush_lanes(&self) {
        (0..LANES).for_each(|lane| self.flush_as(self.shards.get(lane), As::Guest));
    }

    fn flush_as(&self, shard: &Shard, who: As) {
        let Some(section) = self.enter(shard, who) else {
            // A thread gathers: it empties what is still, and the next gatherer finds what it leaves. Or a thread is at
            // work in a lane.
            return;
        };
        let shard = section.shard;
        let way = shard.under_way();
        // Relaxed, throughout: inside the section. Release, for a store under way: as in `Move`.
        if shard.full.load(Ordering::Relaxed) != 0 {
            self.give(shard.pocket.load(Ordering::Relaxed), 1);
            shard.full.store(0, Ordering::Release);
        }
        for word in [&shard.loaded, &shard.previous] {
            let (first, count) = unpack(word.load(Ordering::Relaxed));
            if first != NIL {
                self.give(first, count);
                way.store(word, 0);
            }
        }
        let (first, count) = unpack(shard.retired.load(Ordering::Relaxed));
        let oldest = shard.oldest.load(Ordering::Relaxed);
        if first != NIL && self.reclaim(Batch { first, count, oldest }).is_ok() {
            way.store(&shard.retired, 0);
        }
    }

    /// Resets to the initial state, except for statistics: no shard is lent, no slot is anywhere, no reader is inside.
    /// `renew` makes every slot of the nodes fresh.
    pub fn reset(&mut self, renew: impl FnOnce(&mut N)) {
        for index in 0..self.shards_used() {
            self.shards.get(index).clear();
        }
        // Relaxed, throughout: nobody else is here.
        self.vacant.store(0, Ordering::Relaxed);
        self.lent.store(0, Ordering::Relaxed);
        self.depot = CachePadded::new(Stack::new());
        self.account.depot.store(0, Ordering::Relaxed);
        self.account.integral.store(0, Ordering::Relaxed);
        let sizes = Control::sizes(self.most, self.most);
        self.control.sizes.store(sizes, Ordering::Relaxed);
        self.control.era.store(FIRST_ERA, Ordering::Relaxed);
        self.hyaline.reset(&self.nodes);
        renew(&mut self.nodes);
    }

    /// The number of shards that may hold anything.
    pub(super) fn shards_used(&self) -> usize {
        // Relaxed: see `lend`.
        LANES + self.lent.load(Ordering::Relaxed)
    }

    /// How often a slot could be had only by gathering.
    pub fn gatherings(&self) -> u64 {
        // Relaxed: a statistic.
        self.account.gatherings.load(Ordering::Relaxed)
    }

    /// How many slots a batch may have now.
    pub fn batch(&self) -> u32 {
        self.control.limit()
    }

    /// Roughly how many slots are free in the depot.
    pub fn in_depot(&self) -> u64 {
        // Relaxed: a statistic.
        self.account.depot.load(Ordering::Relaxed) as u64
    }

    /// Calls `visit` for every slot in the depot, in a shard, or waiting to be retired, and counts each kind. For a
    /// list that no thread uses meanwhile.
    pub fn census(&self, mut visit: impl FnMut(u32)) -> Census {
        let mut census = Census::default();
        let chain = Chain(&self.nodes);
        let mut walk = |first: u32| {
            let mut count = 0;
            let mut slot = first;
            while slot != NIL {
                visit(slot);
                (slot, count) = (chain.next(slot), count + 1);
            }
            count
        };
        // Relaxed, throughout: nobody is at work.
        for index in 0..self.shards_used() {
            let shard = self.shards.get(index);
            if shard.full.load(Ordering::Relaxed) != 0 {
                census.sharded += walk(shard.pocket.load(Ordering::Relaxed));
            }
            for word in [&shard.loaded, &shard.previous] {
                census.sharded += walk(unpack(word.load(Ordering::Relaxed)).0);
            }
            census.retired += walk(unpack(shard.retired.load(Ordering::Relaxed)).0);
        }
        let mut batch = self.depot.top();
        while batch != NIL {
            census.depot += walk(batch);
            batch = Batches(&self.nodes).next(batch);
        }
        census.live = self.count_live();
        census
    }

    /// How many slots are allocated. Takes 1.5 ns for each slot ever used.
    pub fn count_live(&self) -> u64 {
        let mut live = 0;
        // Relaxed: a snapshot.
        self.nodes
            .each_used(|slot| live += u64::from(self.nodes.node(slot).link.load(Ordering::Relaxed) == LIVE));
        live
    }
}
