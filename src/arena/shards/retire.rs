//! Retiring: slots that may still be read collect in the shard, and go to [`hyaline`](crate::arena::hyaline) a batch at
//! a time.
//!
//! ```text
//!   retire(slot) ──▶ shard.retired  x-x-x-…   a batch, or up to 16 ──▶ Hyaline ──▶ depot
//! ```
//!
//! Worked: 64 slots are retired while one reader is inside. The 64th pays for all: a heavy fence, a look at the
//! records, one compare-exchange into the reader's list. When the reader leaves, it puts the 64 into the depot as one
//! batch.
//!
//! Where few slots are free, batches shrink, down to one slot. Retired slots nevertheless collect, up to [`ENOUGH`], as
//! long as no more of them wait in all shards than are free elsewhere: a heavy fence for each would cost more than the
//! rest of the work. A thread that finds no slot passes them on. What it costs: a reader that sleeps holds back not
//! only the slots that it may have seen, but those that were retired together with one.
//!
//! Worked: of 2,000 slots 200 are free, for one owner and eight lanes. Each of these collects 16, though a batch has
//! one slot: a fence for 16 slots. When 50 are free, each collects five. Of slots that are so long that a batch may
//! never have more than two, each collects two.
//!
//! The size of a batch may change while it collects, so the condition is "at least". Hyaline refuses a batch with fewer
//! slots than there are readers if no spare nodes are left. Such a batch is offered again when it has doubled. With 3
//! readers and batches of one slot: offered at 1, at 2, and at 4, where it is accepted.

#![forbid(unsafe_code)]

use super::shard::Section;
use super::{As, FreeAlready, LANES, Shard, Shards};
use crate::arena::hyaline::Batch;
use crate::arena::node::{Chain, LIVE, Node, Nodes};
use crate::arena::numbers::{pack, unpack};
use crate::arena::stack::{Links, NIL};
use crate::sync::Ordering;

/// So many retired slots share a heavy fence, which costs up to some microseconds, wherever enough slots are free: a
/// slot's part of it is then about what the rest of its way costs.
const ENOUGH: u64 = 16;

impl<N: Nodes> Shards<N> {
    /// How many retired slots a shard collects before it passes them on, while `free` slots are available and a batch
    /// may have `limit`. If each shard has so many, they are no more than those; and never more than a batch may have.
    pub(super) fn patience(&self, free: u64, limit: u32) -> u32 {
        let share = free / self.shards_used() as u64;
        limit.max(share.min(ENOUGH) as u32).min(self.most)
    }

    /// Retires a slot through `shard`, a shard of this list that is the caller's: the slot becomes free once every
    /// reader that is inside and may have found it has left. `node` is the slot's.
    ///
    /// # Errors
    /// The slot is not allocated.
    #[inline]
    pub fn retire(&self, shard: &Shard, slot: u32, node: &Node) -> Result<(), FreeAlready> {
        self.retire_into(shard, As::Owner, slot, node)
    }

    /// Retires a slot through a lane near `hint`.
    ///
    /// # Errors
    /// The slot is not allocated.
    pub fn retire_as_guest(&self, hint: usize, slot: u32, node: &Node) -> Result<(), FreeAlready> {
        self.retire_into(self.shards.get(hint % LANES), As::Guest, slot, node)
    }

    #[inline(always)]
    fn retire_into(&self, shard: &Shard, who: As, slot: u32, node: &Node) -> Result<(), FreeAlready> {
        // Relaxed, throughout: the caller says that the slot is its own; and inside the section.
        if node.link.load(Ordering::Relaxed) != LIVE {
            return Err(FreeAlready);
        }
        let birth = node.word.load(Ordering::Relaxed);
        let Some(section) = self.enter(shard, who) else {
            node.link.store(NIL, Ordering::Relaxed);
            let (first, count, oldest) = (slot, 1, birth);
            self.retire_batch(shard, who, None, Batch { first, count, oldest });
            return Ok(());
        };
        let (first, count) = unpack(shard.retired.load(Ordering::Relaxed));
        node.link.store(first, Ordering::Relaxed);
        let (oldest, offer) = if first == NIL {
            (birth, 0)
        } else {
            let oldest = shard.oldest.load(Ordering::Relaxed);
            (birth.min(oldest), shard.offer.load(Ordering::Relaxed))
        };
        let count = count + 1;
        // That may have fallen since the last slot came. What Hyaline refused waits for more: see `keep`.
        if count >= self.control.patience().max(offer) {
            let first = slot;
            self.retire_batch(shard, who, Some(section), Batch { first, count, oldest });
        } else {
            shard.retired.store(pack(slot, count), Ordering::Relaxed);
            shard.oldest.store(oldest, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Retires a batch, or keeps it in the shard until there is more. If the caller is inside, the batch is what the
    /// shard has kept, and a slot.
    #[inline(never)]
    fn retire_batch(&self, shard: &Shard, who: As, section: Option<Section<'_>>, batch: Batch) {
        // Enter before the slots leave the shard, and stay until the batch is given to its readers: meanwhile no other
        // thread can see its slots, and none of them may be in use any more. Do not stay while waiting below, since a
        // gatherer waits for us.
        let pass = self.turnstile.enter(0);
        if let Some(section) = section {
            // Release: a thread that no longer sees the slots there sees us inside; partner: the Acquire in `held`.
            section.shard.retired.store(0, Ordering::Release);
        }
        let refused = self.reclaim(batch);
        drop(pass);
        let Err(mut batch) = refused else {
            return;
        };
        let mut round = 0;
        loop {
            if let Some(section) = self.enter(shard, who) {
                self.keep(section.shard, batch);
                return;
            }
            // A thread gathers, or (in a lane) is at work.
            round = crate::sync::rest(round);
            match self.reclaim(batch) {
                Ok(()) => return,
                Err(same) => batch = same,
            }
        }
    }

    /// Adds a batch that Hyaline refused to what the shard keeps. The caller is inside.
    fn keep(&self, shard: &Shard, batch: Batch) {
        let chain = Chain(&self.nodes);
        let last = (1..batch.count).fold(batch.first, |slot, _| chain.next(slot));
        // Relaxed throughout: inside the section.
        let (first, count) = unpack(shard.retired.load(Ordering::Relaxed));
        let (oldest, offer) = if first == NIL {
            (batch.oldest, 0)
        } else {
            let oldest = shard.oldest.load(Ordering::Relaxed);
            (batch.oldest.min(oldest), shard.offer.load(Ordering::Relaxed))
        };
        chain.set_next(last, first);
        shard.oldest.store(oldest, Ordering::Relaxed);
        // Hyaline wants a node per reader, so offering just one slot more is pointless: twice as many as it has refused
        // at one time are offered next. (With those that were there already it might be content.)
        shard
            .offer
            .store(offer.max(batch.count.saturating_mul(2)), Ordering::Relaxed);
        shard
            .retired
            .store(pack(batch.first, count + batch.count), Ordering::Relaxed);
    }

    /// Passes a batch to Hyaline, to be freed when its last reader leaves.
    pub(super) fn reclaim(&self, batch: Batch) -> Result<(), Batch> {
        self.hyaline
            .retire(&self.nodes, batch, |first, count| self.give(first, count))
    }

    // ---- readers

    /// The owner of shard `shard`, which is not inside, enters: what [`protect`](Self::protect) finds for it from now
    /// on is not freed before it leaves.
    #[inline]
    pub fn enter_reader(&self, shard: usize) {
        self.hyaline.enter(self.record(shard));
    }

    /// Returns the result of `load`; the slot is not freed before the owner of shard `shard`, which is inside, leaves.
    #[inline]
    pub fn protect<P>(&self, shard: usize, load: impl FnMut() -> P) -> P {
        self.hyaline.protect(self.record(shard), &self.control.era, load)
    }

    /// The owner of shard `shard` leaves.
    #[inline]
    pub fn leave_reader(&self, shard: usize) {
        let record = self.record(shard);
        self.hyaline
            .leave(&self.nodes, record, |first, count| self.give(first, count));
    }

    #[inline(always)]
    fn record(&self, shard: usize) -> usize {
        shard - LANES
    }
}
