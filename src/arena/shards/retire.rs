//! Retiring: slots that others may still be reading gather in the shard, and go to [`hyaline`](crate::arena::hyaline) a
//! batch at a time.
//!
//! ```text
//!   retire(slot) ──▶ shard.retired  x-x-x-…   as many as a batch may have ──▶ Hyaline ──▶ depot
//! ```
//!
//! Worked: 64 slots are retired and one reader is inside. The 64th pays for all: a heavy fence, a look at the records,
//! one compare-exchange into the reader's list. When the reader leaves he puts the 64 into the depot, as one batch.
//!
//! How many a batch may have changes as it gathers, so what counts is "at least". Hyaline refuses a batch that has
//! fewer slots than there are readers, if it has no spare nodes left; such a one is offered again when it has grown to
//! twice its length: 3 readers, batches of one slot: offered at 1, 2, 4, and taken.

#![forbid(unsafe_code)]

use super::shard::{Section, pack, unpack};
use super::{As, FreeAlready, LANES, Shard, Shards};
use crate::arena::hyaline::Batch;
use crate::arena::node::{Chain, LIVE, Node, Nodes};
use crate::arena::stack::{Links, NIL};
use crate::sync::Ordering;

impl<N: Nodes> Shards<N> {
    /// Puts a slot back once all have left who are inside and may have found it, by a shard of this list that is the
    /// caller's. `node` is the slot's.
    ///
    /// # Errors
    /// The slot is not allocated.
    #[inline]
    pub fn retire(&self, shard: &Shard, slot: u32, node: &Node) -> Result<(), FreeAlready> {
        self.retire_into(shard, As::Owner, slot, node)
    }

    /// The same by a lane near `hint`.
    ///
    /// # Errors
    /// The slot is not allocated.
    pub fn retire_as_guest(&self, hint: usize, slot: u32, node: &Node) -> Result<(), FreeAlready> {
        self.retire_into(self.shards.get(hint % LANES), As::Guest, slot, node)
    }

    #[inline(always)]
    fn retire_into(&self, shard: &Shard, who: As, slot: u32, node: &Node) -> Result<(), FreeAlready> {
        // Relaxed, throughout: a slot that is the caller's, as he says; and inside the section.
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
        // The limit may have fallen since the last one came. What Hyaline would not take waits for more: see `keep`.
        if count >= self.control.limit.load(Ordering::Relaxed).max(offer) {
            shard.retired.store(0, Ordering::Relaxed);
            let first = slot;
            self.retire_batch(shard, who, Some(section), Batch { first, count, oldest });
        } else {
            shard.retired.store(pack(slot, count), Ordering::Relaxed);
            shard.oldest.store(oldest, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Retires a batch, or keeps it in the shard until there is more.
    #[inline(never)]
    fn retire_batch(&self, shard: &Shard, who: As, section: Option<Section<'_>>, batch: Batch) {
        // Inside before the section ends, and until the batch is given to its readers: nobody else can see its slots
        // meanwhile, and none of them may be in use any more. Not while we wait below: for who gathers waits for us.
        let pass = self.turnstile.enter(0);
        drop(section);
        let refused = self.reclaim(batch);
        drop(pass);
        let Err(mut batch) = refused else {
            return;
        };
        for round in 0.. {
            if let Some(section) = self.enter(shard, who) {
                self.keep(section.shard, batch);
                return;
            }
            // Somebody gathers, or (in a lane) is at work.
            crate::sync::relax(round);
            match self.reclaim(batch) {
                Ok(()) => return,
                Err(same) => batch = same,
            }
        }
    }

    /// Adds a batch, which Hyaline would not take, to what the shard keeps. The caller is inside.
    fn keep(&self, shard: &Shard, batch: Batch) {
        let chain = Chain(&self.nodes);
        let last = (1..batch.count).fold(batch.first, |slot, _| chain.next(slot));
        // Relaxed throughout: inside the section.
        let (first, count) = unpack(shard.retired.load(Ordering::Relaxed));
        let oldest = if first == NIL {
            batch.oldest
        } else {
            batch.oldest.min(shard.oldest.load(Ordering::Relaxed))
        };
        chain.set_next(last, first);
        shard.oldest.store(oldest, Ordering::Relaxed);
        let count = count + batch.count;
        // It wants a node for each reader, so there is no sense in one slot more: twice as many are offered next.
        shard.offer.store(count.saturating_mul(2), Ordering::Relaxed);
        shard.retired.store(pack(batch.first, count), Ordering::Relaxed);
    }

    /// Has a batch freed when its last reader leaves.
    pub(super) fn reclaim(&self, batch: Batch) -> Result<(), Batch> {
        self.hyaline
            .retire(&self.nodes, batch, |first, count| self.give(first, count))
    }

    // ---- readers

    /// The owner of shard `shard`, who is not inside, enters: what [`protect`](Self::protect) gives him from now on is
    /// not freed before he leaves.
    #[inline]
    pub fn enter_reader(&self, shard: usize) {
        self.hyaline.enter(self.record(shard));
    }

    /// What `load` gives, not to be freed before the owner of shard `shard`, who is inside, leaves.
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
