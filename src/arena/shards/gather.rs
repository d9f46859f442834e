//! Gathering: when nothing else is left, collects the slots of all shards, or proves that there are none.
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
//! One thread gathers at a time. The others wait for the lock, and mostly find in the depot what it put there. The
//! [parent module](super) explains why the proof holds.
//!
//! *A busy shard is waited for* until its section ends: its thread may be preempted, and as long as it holds slots a
//! "no" would be wrong. The gatherer first yields, then sleeps, so that a thread of lower priority can run. In the
//! child of a fork that thread may not exist, nor when the process is ending (Windows); there, and only there, the wait
//! is bounded.
//!
//! *Without the barrier* (the kernel granted it when the list was made, but now refuses it repeatedly) nobody can tell
//! whether an owner is inside. So owners carry on, and their shards are left alone. Lanes, which are entered by an
//! exchange, can be held by the gatherer as by any thread; and the requester's own shard is its own.
//!
//! Worked: an owner with three slots is preempted while it frees a fourth, and sleeps for 2 s. A thread that requests a
//! slot meanwhile yields for some milliseconds and looks 2,000 times more; then it gets one of the four.
//!
//! Cost: a lock, the heavy barrier, a look at every shard ever lent: some 5 us. What a gatherer finds is available to
//! all, and the controller makes batches smaller, so that the next gathering is not needed soon.

#![forbid(unsafe_code)]

use core::time::Duration;

use super::shard::Section;
use super::{ALL, GUESTS, LANES, Shard, Shards};
use crate::arena::hyaline::Batch;
use crate::arena::node::Nodes;
use crate::arena::numbers::unpack;
use crate::arena::stack::NIL;
use crate::fatal;
use crate::sync::{Calm, Ordering, process, relax, wait_for};

/// The number of looks between which the gatherer yields; between later ones it sleeps for a [`NAP`].
const YIELDS: u32 = 1 << 10;

/// See [`YIELDS`].
const NAP: Duration = Duration::from_millis(1);

/// How many looks the child of a fork takes at a shard that holds slots and does not move: some seconds.
const PATIENCE: u32 = YIELDS + 2000;

/// How often the kernel is asked for the barrier, which may fail for a passing lack of memory.
const TRIES: u32 = 16;

impl<N: Nodes> Shards<N> {
    /// Gathers what the shards hold, and takes a slot. `None` if at some moment meanwhile there was none. `own` is the
    /// caller's shard, if it has one; the caller is not inside.
    #[cold]
    pub(super) fn gather(&self, own: Option<&Shard>) -> Option<u32> {
        let _guard = self.gathering.lock();
        // The previous holder of the lock gathered for all.
        if let Some(slot) = self.detour(false) {
            return Some(slot);
        }
        // Relaxed, three times: a statistic; slots from here on are of another era; and the fence below.
        self.account.gatherings.fetch_add(1, Ordering::Relaxed);
        self.control.era.fetch_add(1, Ordering::Relaxed);
        self.control.frozen.store(ALL, Ordering::Relaxed);
        let seen = self.all_have_seen();
        if !seen {
            // Relaxed: owners carry on, and find in their shards what they left there.
            self.control.frozen.store(GUESTS, Ordering::Relaxed);
        }
        let slot = self.search(own, seen);
        // Release: what we took out of the shards; partner: the Acquire in `enter`.
        self.control.frozen.store(0, Ordering::Release);
        slot
    }

    /// Makes the heavy barrier. Returns false if the kernel refuses it.
    fn all_have_seen(&self) -> bool {
        (0..TRIES).any(|round| {
            let done = self.barrier.heavy();
            if !done {
                relax(round);
            }
            done
        })
    }

    /// Searches while all threads are kept out of the shards; if not `seen`, all but their owners.
    fn search(&self, own: Option<&Shard>, seen: bool) -> Option<u32> {
        // Where the thread that is waited for may not exist, the wait is bounded.
        let most = if fatal::is_shutting_down() {
            Some(YIELDS)
        } else {
            (process() != self.home).then_some(PATIENCE)
        };
        let mut last: Option<(u64, Calm)> = None;
        let mut round: u32 = 0;
        loop {
            let enough = most.is_some_and(|most| round >= most);
            let held = self.collect(own, seen);
            // While slots are held somewhere, the backing is not asked again and again, since that may cost system
            // calls each time; it was asked before. One that refused then is asked once more after a look at which
            // there was nothing, and before the one that may prove it: so its "no" lies between the two.
            let (_, empty) = self.depot.look();
            if (!empty || held == 0 || enough)
                && let Some(slot) = self.take_one(last.is_some() || enough)
            {
                return Some(slot);
            }
            let (head, empty) = self.depot.look();
            let calm = self.turnstile.calm();
            let now = calm.filter(|_| held == 0 && empty).map(|calm| (head, calm));
            if now.is_some() && now == last || enough {
                return None;
            }
            last = now;
            if now.is_none() {
                self.nap(round, seen);
            }
            round = round.saturating_add(1);
        }
    }

    /// Lets other threads finish what they are at.
    fn nap(&self, round: u32, seen: bool) {
        if round < YIELDS {
            relax(round);
        } else {
            // Nobody else changes the word, so nobody wakes us.
            let frozen = if seen { ALL } else { GUESTS };
            wait_for(&self.control.frozen, frozen, Some(NAP));
        }
    }

    /// Empties every shard that can be told to be still, and returns how many slots the busy ones hold.
    fn collect(&self, own: Option<&Shard>, seen: bool) -> u64 {
        let mut held = 0;
        for index in 0..self.shards_used() {
            let shard: &Shard = self.shards.get(index);
            if seen {
                // Acquire: pairs with the Release that ends a section: the shard is as it was left, and the next thread
                // to enter sees `frozen`.
                if shard.busy.load(Ordering::Acquire) == 0 {
                    self.empty(shard);
                } else {
                    held += shard.held();
                }
            } else if index < LANES {
                // Acquire, Relaxed: as a guest enters. Whether another guest sees `frozen` or not, no two are inside.
                let entered = shard.busy.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
                if entered.is_ok() {
                    let section = Section::of(shard);
                    self.empty(section.shard);
                } else {
                    held += shard.held();
                }
            } else if own.is_some_and(|own| core::ptr::eq(own, shard)) {
                self.empty(shard);
            }
        }
        held
    }

    /// Empties a shard that no thread is inside.
    fn empty(&self, shard: &Shard) {
        // Relaxed, throughout: ours while it is frozen, held, or the caller's; handed back by the Release in `gather`,
        // or by that of the section.
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
}
