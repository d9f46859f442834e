//! Links between the entries of pages: what lists of spans, and of runs on a shelf, are made of.
//!
//! ```text
//!   a list     first ──▶ page 40 ──▶ page 7 ──▶ none        as stored   41, 8, 0
//! ```
//!
//! A link is the number of a page, not an address: half as long, and all zeros when it leads nowhere, as in memory
//! that was never written. Whoever owns the list, or holds its lock, follows it and changes it.
//!
//! Cost: a load to follow, a store to change; none is a read-modify-write.

#![forbid(unsafe_code)]

use crate::sync::{AtomicU32, Ordering};
use crate::units::PageIndex;

/// A page or none: its index plus one. A heap has fewer than 2³² pages.
#[derive(Debug)]
pub struct Link(AtomicU32);

impl Link {
    /// No page.
    pub fn none() -> Self {
        Self(AtomicU32::new(0))
    }

    /// The page.
    #[inline]
    pub fn get(&self) -> Option<PageIndex> {
        // Relaxed: under the class lock, or by the owner of the shelf.
        (self.0.load(Ordering::Relaxed) as usize).checked_sub(1).map(PageIndex)
    }

    /// Makes it lead where another link does.
    #[inline(always)]
    pub fn copy(&self, other: &Self) {
        // Relaxed, twice: as in `get`.
        self.0.store(other.0.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Makes it lead to `page`.
    #[inline]
    pub fn set(&self, page: Option<PageIndex>) {
        let number = page.map_or(0, |page| page.0 as u32 + 1);
        // Relaxed: as in `get`.
        self.0.store(number, Ordering::Relaxed);
    }

    /// The page as stored, with nothing added or subtracted.
    #[inline(always)]
    pub fn nth(&self) -> Option<Nth> {
        // Relaxed: as in `get`.
        let number = self.0.load(Ordering::Relaxed);
        (number != 0).then_some(Nth(number))
    }

    /// Makes it lead there.
    #[inline(always)]
    pub fn set_nth(&self, page: Nth) {
        // Relaxed: as in `get`.
        self.0.store(page.0, Ordering::Relaxed);
    }
}

/// A page as a [`Link`] stores it: its index plus one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nth(u32);

impl Nth {
    /// The page whose index plus one is `number`, which is not 0.
    #[inline(always)]
    pub const fn new(number: usize) -> Self {
        Self(number as u32)
    }

    /// Its index plus one.
    #[inline(always)]
    pub const fn number(self) -> usize {
        self.0 as usize
    }
}
