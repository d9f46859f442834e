//! A chain of batches: what a stack's word says, and each batch of those behind it.
//!
//! ```text
//!   63        52 51      44 43                    0
//!   │ how many  │ fewest   │ the first one's place │        A ──▶ B ──▶ C      each has the word of those behind it
//! ```
//!
//! Twelve bits count 4,095 batches, more than the limits of a class allow, but for small slots if the class's lock is
//! held for long. A chain of more says so until it is empty: from then on the count says too much, and never too
//! little, so that nothing is passed over by those who empty it.
//!
//! Worked: `3 │ 2 │ A` are three batches, of which two have lain there since the mark was last set.

#![forbid(unsafe_code)]

/// The bits of a word that hold a place, the low-water mark above them, and the count at the top.
pub(super) const PLACE_BITS: u32 = 44;
const LOW_BITS: u32 = 8;

/// The largest count: so many or more. More batches than the limits of a class allow, but for small slots, if its lock
/// is held for long.
pub(super) const MOST: u32 = (1 << (u64::BITS - PLACE_BITS - LOW_BITS)) - 1;

/// The largest low-water mark; it saturates.
pub(super) const MOST_LOW: u32 = (1 << LOW_BITS) - 1;

/// Where a batch is: a number that the user chooses, not 0, below 2⁴⁴.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlace(pub(super) u64);

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

/// The first batch of a stack, how many there are, and how few there have been. 0: none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain(pub(super) u64);

impl Chain {
    /// No batches.
    pub const EMPTY: Self = Self(0);

    pub(super) const fn new(count: u32, low: u32, first: u64) -> Self {
        Self((count as u64) << (PLACE_BITS + LOW_BITS) | (low as u64) << PLACE_BITS | first)
    }

    /// How many. Once there have been more than can be counted, [`MOST`] until there are none.
    pub const fn count(self) -> u32 {
        (self.0 >> (PLACE_BITS + LOW_BITS)) as u32
    }

    /// The fewest there have been since the mark was last set, or 255 if that is less.
    pub(super) const fn low(self) -> u32 {
        (self.0 >> PLACE_BITS) as u32 & MOST_LOW
    }

    /// The same chain, marked anew.
    pub(super) fn marked(self) -> Self {
        let first = self.0 & ((1 << PLACE_BITS) - 1);
        Self::new(self.count(), self.count().min(MOST_LOW), first)
    }

    /// The first.
    pub const fn first(self) -> Option<BatchPlace> {
        let number = self.0 & ((1 << PLACE_BITS) - 1);
        if number == 0 { None } else { Some(BatchPlace(number)) }
    }

    /// Pushes a batch.
    pub(super) fn push(&mut self, links: &impl BatchLinks, batch: BatchPlace) {
        links.write(batch, *self);
        let count = (self.count() + 1).min(MOST);
        *self = Self::new(count, self.low(), batch.0);
    }

    /// How many there really are. O(batches), if they are too many to be counted.
    pub(super) fn len(mut self, links: &impl BatchLinks) -> usize {
        if self.count() < MOST {
            return self.count() as usize;
        }
        core::iter::from_fn(|| self.pop(links)).count()
    }

    /// Pops the first batch.
    pub fn pop(&mut self, links: &impl BatchLinks) -> Option<BatchPlace> {
        let batch = self.first()?;
        let rest = links.read(batch).first();
        let is_counted = self.count() < MOST;
        let count = self.count().saturating_sub(is_counted.into());
        *self = rest.map_or(Self::EMPTY, |first| Self::new(count, self.low().min(count), first.0));
        Some(batch)
    }
}

/// A chain that begins with this batch; its counts are unknown.
impl From<Option<BatchPlace>> for Chain {
    fn from(first: Option<BatchPlace>) -> Self {
        Self(first.map_or(0, BatchPlace::number))
    }
}

/// Access to one word in each batch, for the owner of the batch.
pub trait BatchLinks {
    /// The chain written last; its counts need not be kept.
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
