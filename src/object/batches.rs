//! Batches of a class on their way from thread to thread: full racks, in and out of the store.
//!
//! ```text
//!   a thread that frees                    the store (`store.rs`)                 a thread that allocates
//!   rack of 126 full ── store_batch ──▶ lane 3: batch ─▶ batch ─▶ batch ── take_batch ──▶ a rack of 126 to pop
//!                            └─ Err: full, so the slots go home to their spans (`central.rs`)
//! ```
//!
//! A thread with a whole batch too many leaves it here, and a thread that needs a batch takes it, without the class
//! lock: only the rack is touched, not its slots. So slots that circulate between threads never reach the spans. The
//! store holds at most 16 MiB of a class, and 32 MiB in all; but each of its 16 lanes accepts a 32nd of that, so it is
//! half as much again if many threads fill it. Once a second the scavenger takes the batches that nobody has needed
//! since its last visit; when the program is silent, or out of memory, all of them are taken.
//!
//! Worked: a batch of slots of 1 KiB is a rack with 126 of them, 127 KiB with the rack; the store takes 129 of these,
//! and each lane 4 in any case. Storing a batch costs three atomic read-modify-writes and taking one four, whatever is
//! in it.

#![forbid(unsafe_code)]

use super::rack::{Entry, Heads, Rack};
use super::size_class::SizeClass;
use super::spans::Spans;
use super::store::Walk;

/// The latest batches in the store that are searched for a block that looks freed twice.
const BATCHES_LOOKED_AT: usize = 8;

/// The most bytes that one class keeps in the store, and all classes together; each lane accepts its share in any case.
const STORE_BYTES: usize = 16 << 20;
const STORES_BYTES: usize = 32 << 20;

/// Bytes of a batch, rack included.
pub(super) fn batch_bytes(class: SizeClass) -> usize {
    class.batch() as usize * class.bytes() + Rack::bytes(class.batch())
}

impl Spans {
    /// Stores a batch of the class, a full rack, in the lane that `hint` picks: threads with different hints rarely
    /// contend. O(1).
    ///
    /// # Errors
    /// The batch, if the store is full.
    pub fn store_batch(&self, class: SizeClass, batch: Rack, hint: usize) -> Result<(), Rack> {
        let (bytes, kind) = (batch_bytes(class), class.index());
        if !self.store.has_room(kind, hint, STORE_BYTES / bytes) || !self.store.has_room_for(bytes, hint, STORES_BYTES)
        {
            return Err(batch);
        }
        self.store_batch_anyway(class, batch, hint);
        Ok(())
    }

    /// Stores a batch even if the store is full.
    pub(super) fn store_batch_anyway(&self, class: SizeClass, batch: Rack, hint: usize) {
        debug_assert_eq!(batch.len(), class.batch());
        let place = self.place_of(batch.into_memory());
        self.store
            .put(&Heads(self), class.index(), hint, place, batch_bytes(class));
    }

    /// Takes a batch of the class, if one is stored. O(1); if the lane that `hint` picks is empty, O(lanes).
    pub fn take_batch(&self, class: SizeClass, hint: usize) -> Option<Rack> {
        let place = self.store.take(&Heads(self), class.index(), hint, batch_bytes(class))?;
        Some(Heads(self).full(place, class.batch()))
    }

    /// Whether a batch of the class is stored, as far as can be seen. O(lanes).
    pub(super) fn has_batch(&self, class: SizeClass) -> bool {
        self.store.has_kind(class.index())
    }

    /// Whether any batch is stored, or in the hand of a thread that is about to put it back. O(lanes).
    pub(super) fn has_stored(&self) -> bool {
        self.store.has_any()
    }

    /// Takes a batch that has stayed in the store since the last walk.
    pub fn take_unneeded(&self, class: SizeClass, walk: &mut Walk) -> Option<Rack> {
        let place = self
            .store
            .take_unneeded(&Heads(self), class.index(), walk, batch_bytes(class))?;
        Some(Heads(self).full(place, class.batch()))
    }

    /// An upper bound on the batches of a class in the store, including those that a thread has in hand and is about to
    /// put back. O(lanes).
    pub fn most_stored(&self, class: SizeClass) -> usize {
        self.store.bytes() / batch_bytes(class)
    }

    /// Whether the store has twice as much as it may have: so much that it is worth waiting to bring a batch home.
    /// O(lanes).
    pub(super) fn is_overfull(&self, class: SizeClass) -> bool {
        let most = 2 * STORE_BYTES / batch_bytes(class);
        self.store.batches(class.index()).count as usize > most || self.store.bytes() > 2 * STORES_BYTES
    }

    /// Whether the slot is in one of the batches stored last in the lane of `hint`. O(their slots).
    pub fn has_stored_lately(&self, class: SizeClass, slot: Entry, hint: usize) -> bool {
        let heads = Heads(self);
        self.store
            .any_of_last(&heads, class.index(), hint, BATCHES_LOOKED_AT, |place| {
                // A stored batch, which the caller owns for the moment and only looks at.
                heads.slots(place, class.batch()).contains(&slot)
            })
    }
}
