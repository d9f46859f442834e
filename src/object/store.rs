//! Lock-free stacks of batches, which any thread may push to and pop from.
//!
//! ```text
//!   lane 0  3 │ A          how many, and the place of the first
//!               A ──▶ 2 │ B ──▶ 1 │ C ──▶ 0        what was the word before stands in each batch
//!   lane 1  0
//!   …
//! ```
//!
//! **Put** writes the lane's word into the batch and makes the batch the new word, by one compare-exchange. **Take**
//! swaps the word for 0, and so gets all batches; it keeps the first and puts the rest back, by one more
//! compare-exchange. If other threads have put batches meanwhile, it takes those too, pushes them onto the rest one by
//! one, and tries again. Only its owner ever reads a batch, so none is read after it has changed hands. And there is
//! no ABA problem: a compare-exchange that succeeds on an old word relies on nothing but what that word says, a count
//! and a first batch.
//!
//! Worked: three batches are there. One thread takes all and keeps A; before it puts B and C back, another thread puts
//! D. The first thread's exchange of 0 for `2 │ B` fails: it takes D, writes `2 │ B` into it, and exchanges 0 for `3 │
//! D`.
//!
//! Between the two steps of a take the lane looks empty: a thread that comes then tries the other lanes, and in the
//! end does without. Therefore there are several lanes, and each thread begins at its own. A thread preempted between
//! the steps, for however long, keeps nobody waiting. A fork's child that lacks the thread also lacks the batches.
//!
//! A compare-exchange fails only because another has succeeded, so all operations are lock-free. A put is one
//! read-modify-write, a take two.

#![forbid(unsafe_code)]

use crate::sync::{AtomicU64, Ordering, SHARED};

/// The bits of a word that hold a place; the others hold the count. A million batches are far more than a class keeps.
const PLACE_BITS: u32 = 44;

/// The largest count; it saturates.
const MOST: u32 = (1 << (u64::BITS - PLACE_BITS)) - 1;

/// Where a batch is: a number that the user chooses, not 0, below 2⁴⁴.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlace(u64);

impl BatchPlace {
    /// The place with this number.
    pub const fn new(number: u64) -> Self {
        debug_assert!(number != 0 && number >> PLACE_BITS == 0);
        Self(number)
    }

    /// Its number.
    pub const fn number(self) -> u64 {
        self.0
    }
}

/// The first batch of a stack, and how many there are. 0: none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain(u64);

impl Chain {
    /// No batches.
    pub const EMPTY: Self = Self(0);

    /// How many.
    pub const fn count(self) -> u32 {
        (self.0 >> PLACE_BITS) as u32
    }

    /// The first.
    pub const fn first(self) -> Option<BatchPlace> {
        let number = self.0 & ((1 << PLACE_BITS) - 1);
        if number == 0 { None } else { Some(BatchPlace(number)) }
    }

    /// Pushes a batch.
    fn push(&mut self, links: &impl BatchLinks, batch: BatchPlace) {
        links.write(batch, *self);
        let count = (self.count() + 1).min(MOST);
        *self = Self(u64::from(count) << PLACE_BITS | batch.0);
    }

    /// Pops the first batch.
    pub fn pop(&mut self, links: &impl BatchLinks) -> Option<BatchPlace> {
        let batch = self.first()?;
        let rest = links.read(batch).first();
        *self = Self(rest.map_or(0, |first| {
            u64::from(self.count().saturating_sub(1)) << PLACE_BITS | first.0
        }));
        Some(batch)
    }
}

/// A chain that begins with this batch; its count is unknown.
impl From<Option<BatchPlace>> for Chain {
    fn from(first: Option<BatchPlace>) -> Self {
        Self(first.map_or(0, BatchPlace::number))
    }
}

/// Access to one word in each batch, for the owner of the batch.
pub trait BatchLinks {
    /// The chain written last; the count need not be kept.
    fn read(&self, batch: BatchPlace) -> Chain;

    /// Writes the chain behind a batch.
    fn write(&self, batch: BatchPlace, behind: Chain);
}

impl Chain {
    /// As a number, which can be stored in a batch.
    pub const fn into_bits(self) -> u64 {
        self.0
    }

    /// The chain that [`into_bits`](Self::into_bits) gave.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

/// One stack. All-zero bytes: empty.
#[derive(Debug)]
struct Lane(AtomicU64);

impl Lane {
    fn count(&self) -> u32 {
        // Relaxed: a number by itself.
        Chain(self.0.load(Ordering::Relaxed)).count()
    }

    fn put(&self, links: &impl BatchLinks, batch: BatchPlace) {
        // Relaxed: only compared; what it leads to is not read.
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            let mut chain = Chain(word);
            chain.push(links, batch);
            // Release: the taker sees the batch and its word; partner: `take_all`.
            match self
                .0
                .compare_exchange_weak(word, chain.0, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    fn take(&self, links: &impl BatchLinks) -> Option<BatchPlace> {
        // Relaxed: a first look; a thread that comes too early goes without.
        if self.0.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut chain = self.take_all();
        let batch = chain.pop(links)?;
        self.put_back(links, chain);
        Some(batch)
    }

    fn take_all(&self) -> Chain {
        // Acquire: pairs with the releases of `put` and `put_back`, those before the last included: each put was a
        // read-modify-write, and so continues the release sequence of the one before.
        Chain(self.0.swap(0, Ordering::Acquire))
    }

    fn put_back(&self, links: &impl BatchLinks, mut chain: Chain) {
        while chain != Chain::EMPTY {
            // Release: as in `put`.
            let answer = self
                .0
                .compare_exchange(0, chain.0, Ordering::Release, Ordering::Relaxed);
            if answer.is_ok() {
                return;
            }
            let mut theirs = self.take_all();
            while let Some(batch) = theirs.pop(links) {
                chain.push(links, batch);
            }
        }
    }
}

/// The stacks, on a cache line of their own. All-zero bytes: empty.
#[derive(Debug)]
#[repr(align(64))]
pub struct Store {
    lanes: [Lane; SHARED],
}

impl Store {
    /// No batches.
    #[allow(clippy::new_without_default, reason = "public in models only")]
    pub fn new() -> Self {
        Self {
            lanes: core::array::from_fn(|_| Lane(AtomicU64::new(0))),
        }
    }

    /// How many batches: a snapshot. Batches that a thread is about to put back are not counted.
    pub fn count(&self) -> u32 {
        self.lanes.iter().map(Lane::count).fold(0, u32::saturating_add)
    }

    /// The lane that `hint` picks.
    fn lane(&self, hint: usize) -> &Lane {
        // A power of two; 1 in a model.
        &self.lanes[hint & (SHARED - 1)]
    }

    /// Puts a batch on the lane that `hint` picks. Lock-free.
    pub fn put(&self, links: &impl BatchLinks, hint: usize, batch: BatchPlace) {
        self.lane(hint).put(links, batch);
    }

    /// Takes the latest batch of the lane that `hint` picks, or else of another lane; `None` if every batch is being
    /// taken or put back by other threads. Lock-free.
    pub fn take(&self, links: &impl BatchLinks, hint: usize) -> Option<BatchPlace> {
        (0..SHARED).find_map(|step| self.lane(hint.wrapping_add(step)).take(links))
    }

    /// Whether `is_it` holds for one of the latest `most` batches of the lane that `hint` picks. The lane looks empty
    /// meanwhile.
    #[cold]
    pub fn any_of_last(
        &self,
        links: &impl BatchLinks,
        hint: usize,
        most: usize,
        mut is_it: impl FnMut(BatchPlace) -> bool,
    ) -> bool {
        let lane = self.lane(hint);
        let chain = lane.take_all();
        let mut rest = chain;
        let found = core::iter::from_fn(|| rest.pop(links)).take(most).any(&mut is_it);
        lane.put_back(links, chain);
        found
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::cell::RefCell;
    use std::collections::BTreeMap;
    use std::vec::Vec;

    use super::*;

    #[derive(Default)]
    struct Links(RefCell<BTreeMap<u64, Chain>>);

    impl BatchLinks for Links {
        fn read(&self, batch: BatchPlace) -> Chain {
            self.0.borrow()[&batch.0]
        }

        fn write(&self, batch: BatchPlace, behind: Chain) {
            self.0.borrow_mut().insert(batch.0, behind);
        }
    }

    #[test]
    fn what_is_put_is_taken_last_first_and_counted() {
        let (links, store) = (Links::default(), Store::new());
        let place = |number: u64| BatchPlace::new((1 << PLACE_BITS) - number);
        (1..=100).for_each(|number| store.put(&links, 3, place(number)));
        assert_eq!((store.count(), store.lane(3).count()), (100, 100));
        assert_eq!(store.take(&links, 3), Some(place(100)));
        // Other threads put some while all are taken.
        let chain = store.lane(3).take_all();
        assert_eq!((chain.count(), store.count(), store.take(&links, 3)), (99, 0, None));
        (101..=103).for_each(|number| store.put(&links, 3, place(number)));
        store.lane(3).put_back(&links, chain);
        assert_eq!(store.count(), 102);
        let has = |number, most| store.any_of_last(&links, 3, most, |batch| batch == place(number));
        assert!(has(1, 200) && !has(1, 3) && !has(100, 200));
        // A thread with another lane finds them too.
        let taken = core::iter::from_fn(|| store.take(&links, 1)).map(BatchPlace::number);
        let mut rest: Vec<_> = taken.collect();
        rest.sort_unstable_by(|a, b| b.cmp(a));
        let all: Vec<_> = (1..=99).chain(101..=103).map(|number| place(number).number()).collect();
        assert_eq!((rest, store.count()), (all, 0));
    }
}
