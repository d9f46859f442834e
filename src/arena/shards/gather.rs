//! Gathering: when nothing is left in the open, the slots of all shards, or the proof that there are none.
//!
//! ```text
//!   frozen ← 1 ── heavy barrier ──▶ each shard: still? its slots to the depot ──▶ a slot for us ── frozen ← 0
//!                                               busy? how many does it hold?
//!                                    ▲                                    │ none
//!                                    └── somebody busy holds some, or ────┤
//!                                        this was the first such look     └─▶ nothing held anywhere at two looks, and
//!                                                                             the depot the same: "no"
//! ```
//!
//! One gathers at a time; the others wait for the lock, and mostly find in the depot what he put there. Why the proof
//! is one is told in the [module above](super).
//!
//! Cost: a lock, the heavy barrier, a look at every shard ever lent: some 5 us. What it finds it finds for all, and the
//! controller makes smaller batches, so that it is not needed again soon.

#![forbid(unsafe_code)]

use super::Shards;
use super::shard::unpack;
use crate::arena::hyaline::Batch;
use crate::arena::node::Nodes;
use crate::arena::stack::NIL;
use crate::sync::{Calm, Ordering, relax};

/// How long who gathers waits for one who holds slots and does not move: some seconds. He may be gone: of a process
/// that forked, one thread is left.
const PATIENCE: u32 = 1 << 20;

impl<N: Nodes> Shards<N> {
    /// Gathers what the shards hold, and takes a slot. `None` if at some moment meanwhile there was none.
    #[cold]
    pub(super) fn gather(&self) -> Option<u32> {
        let _guard = self.gathering.lock();
        // Who had the lock before us gathered for all.
        if let Some(slot) = self.detour() {
            return Some(slot);
        }
        // Relaxed, three times: statistics, slots from here on are of another era, and the fence below.
        self.account.gatherings.fetch_add(1, Ordering::Relaxed);
        self.control.era.fetch_add(1, Ordering::Relaxed);
        self.control.frozen.store(1, Ordering::Relaxed);
        let seen = self.barrier.heavy();
        let slot = if seen { self.search() } else { None };
        // Release: what we took out of the shards; partner: the Acquire in `enter`.
        self.control.frozen.store(0, Ordering::Release);
        slot
    }

    /// With everybody kept out of the shards.
    fn search(&self) -> Option<u32> {
        let mut last: Option<(u64, Calm)> = None;
        let mut round = 0;
        loop {
            let held = self.collect();
            // Where slots are held somewhere the backing is not asked again and again, which may cost system calls each
            // time: it is by who is about to say no.
            let (_, empty) = self.depot.look();
            if (!empty || held == 0 || round == PATIENCE)
                && let Some(slot) = self.take_one()
            {
                return Some(slot);
            }
            let (head, empty) = self.depot.look();
            let calm = self.turnstile.calm();
            let now = calm.filter(|_| held == 0 && empty).map(|calm| (head, calm));
            if now.is_some() && now == last || round == PATIENCE {
                return None;
            }
            last = now;
            if now.is_none() {
                relax(round);
            }
            round += 1;
        }
    }

    /// Empties every shard that is still; says how many slots the others hold.
    fn collect(&self) -> u64 {
        let mut held = 0;
        for index in 0..self.shards_used() {
            let shard = self.shards.get(index);
            // Acquire: pairs with the Release that ends a section: the shard is as it was left, and who comes next
            // sees `frozen`.
            if shard.busy.load(Ordering::Acquire) != 0 {
                held += shard.held();
                continue;
            }
            // Relaxed, throughout: ours while it is frozen; handed back by the Release in `gather`.
            if shard.full.load(Ordering::Relaxed) != 0 {
                shard.full.store(0, Ordering::Relaxed);
                self.give(shard.pocket.load(Ordering::Relaxed), 1);
            }
            for word in [&shard.loaded, &shard.previous] {
                let (first, count) = unpack(word.load(Ordering::Relaxed));
                if first != NIL {
                    word.store(0, Ordering::Relaxed);
                    self.give(first, count);
                }
            }
            let (first, count) = unpack(shard.retired.load(Ordering::Relaxed));
            let oldest = shard.oldest.load(Ordering::Relaxed);
            if first != NIL && self.reclaim(Batch { first, count, oldest }).is_ok() {
                shard.retired.store(0, Ordering::Relaxed);
            }
        }
        held
    }
}
