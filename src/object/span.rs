//! Spans: runs of pages cut into equal slots, described in a table beside the pages.
//!
//! ```text
//!   table    …│ page 40     │ page 41     │ page 42     │ page 43     │…      32 bytes a page
//!             │ tag 17, + 0 │ tag 17, + 1 │ tag 17, + 2 │ tag none    │
//!             │ list, used  │             │             │             │
//!             └──── the span at page 40, of class 16 ───┘
//!   pages    …│ slot 0 │ slot 1 │ slot 2 │ … │ slot 55 │ over │
//! ```
//!
//! The entry of a span's first page describes the span; the entries of the others say how far back that is. So any
//! address leads to its span with one subtraction, one shift and one load, two if the span has several pages. A page
//! outside any span has tag 0.
//!
//! A span's slots are in one of three places: **out** (in a magazine, or with the program), on the span's free **list**
//! (linked through the slots themselves by number, never by address, so that a program that writes to a slot it has
//! freed can lead us to a wrong slot of that span at worst, and is found out if the number is none), or **fresh**:
//! never taken out yet, and not touched.
//!
//! I10: out + listed + fresh = all. I11: fresh slots are the last ones.
//!
//! **Large blocks**, but those aligned to more than a page, are in the table by their first page, which says how many
//! pages the block has and whether the program has it or a thread's shelf. So a free of one is checked by one load.
//!
//! The tag may be read by anybody who holds a slot of the span; all else only under the lock of the class. The fields
//! are atomics with relaxed accesses, which cost what plain ones do; the lock orders them.

#![forbid(unsafe_code)]

use crate::fatal;
use crate::sync::{AtomicU32, Ordering};
use crate::units::PageIndex;

use super::length::Length;
use super::size_class::SizeClass;

/// What the table says of one page. All-zero bytes: in no span.
#[derive(Debug)]
#[repr(C, align(32))]
pub struct Span {
    /// Class + 1 in the upper bits, pages back to the span's first in the lowest 8. 0: in no span. Or [`LARGE`] or
    /// [`SHELVED`], and how many pages, if they are few, in the lowest 8.
    tag: AtomicU32,
    /// Slots out; of a large block its pages.
    used: AtomicU32,
    /// The first listed slot, plus one.
    listed: AtomicU32,
    /// Slots that were ever out: the number of the first fresh one.
    fresh: AtomicU32,
    /// The neighbours in the class's list of spans with room, or on the shelf; see [`Link`].
    pub(super) before: Link,
    pub(super) behind: Link,
}

/// How far back a page can say its span begins.
const BACK_BITS: u32 = 8;

/// The tag of the first page of a large block that is the program's. No class has it.
const LARGE: u32 = u32::MAX << BACK_BITS;

/// The same, of one that lies on a shelf.
const SHELVED: u32 = LARGE - (1 << BACK_BITS);

/// What such a tag has in its lowest bits: all ones where there are too many pages to say.
#[inline(always)]
const fn few(pages: usize) -> u32 {
    let most = (1 << BACK_BITS) - 1;
    if pages < most { pages as u32 } else { most as u32 }
}

/// A page, or none: its index plus one. A heap has fewer than 2³² pages.
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
        // Relaxed: under the lock of the class.
        (self.0.load(Ordering::Relaxed) as usize).checked_sub(1).map(PageIndex)
    }

    /// Makes it lead where another does.
    #[inline(always)]
    pub fn copy(&self, other: &Self) {
        // Relaxed, twice: as in `set`.
        self.0.store(other.0.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Makes it `page`.
    #[inline]
    pub fn set(&self, page: Option<PageIndex>) {
        let number = page.map_or(0, |page| page.0 as u32 + 1);
        // Relaxed: under the lock of the class.
        self.0.store(number, Ordering::Relaxed);
    }
}

/// The slots of a span at one moment. Read, changed and written back under the lock of the class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slots {
    /// Slots out.
    pub used: u32,
    /// The first listed slot, plus one.
    pub listed: u32,
    /// The first fresh slot.
    pub fresh: u32,
}

impl Span {
    /// An entry that belongs to no span: the one of zeroed memory.
    pub fn vacant() -> Self {
        Self {
            tag: AtomicU32::new(0),
            used: AtomicU32::new(0),
            listed: AtomicU32::new(0),
            fresh: AtomicU32::new(0),
            before: Link::none(),
            behind: Link::none(),
        }
    }

    /// The class of the span the page is in, and how many pages back that span begins. `None` outside any.
    #[inline]
    pub fn tag(&self) -> Option<(SizeClass, usize)> {
        // Relaxed: written before the span's first slot came out, and cleared after its last came back. Whoever holds a
        // slot, or the lock of the class, has been told of the one and has yet to hear of the other.
        let tag = self.tag.load(Ordering::Relaxed);
        let class = SizeClass::from_index(((tag >> BACK_BITS) as usize).wrapping_sub(1))?;
        Some((class, (tag & ((1 << BACK_BITS) - 1)) as usize))
    }

    /// Enters the page in a span of `class` that begins `back` pages before it.
    pub fn enter(&self, class: SizeClass, back: usize) {
        let tag = (class.index() as u32 + 1) << BACK_BITS | back as u32;
        // Relaxed: the program has no slot of the span yet; see `tag`.
        self.tag.store(tag, Ordering::Relaxed);
    }

    /// Takes the page out of its span, or the large block that begins here out of the table.
    pub fn leave(&self) {
        // Relaxed: nobody has a slot of the span, or the block, any more; see `tag`.
        self.tag.store(0, Ordering::Relaxed);
    }

    /// Enters a large block of so many pages that begins here, which is the caller's.
    #[inline]
    pub fn enter_large(&self, pages: usize) {
        // Relaxed, here and below: the block is the caller's, who hands this on with it.
        self.used.store(pages as u32, Ordering::Relaxed);
        self.tag.store(LARGE | few(pages), Ordering::Relaxed);
    }

    /// Whether a large block of so many pages begins here, and is the program's.
    #[inline]
    pub fn is_large(&self, pages: usize) -> bool {
        // Relaxed: as in `enter_large`.
        self.tag.load(Ordering::Relaxed) == LARGE | few(pages) && self.used.load(Ordering::Relaxed) as usize == pages
    }

    /// The same of a block that may lie on a shelf, which has few pages: by one comparison.
    #[inline(always)]
    pub fn is_large_of(&self, length: Length) -> bool {
        // Relaxed: as in `enter_large`.
        self.tag.load(Ordering::Relaxed) == LARGE | few(length.pages())
    }

    /// Whether the page is in no span, and no large block that is in the table begins here.
    pub fn is_vacant(&self) -> bool {
        // Relaxed: as in `enter_large`.
        self.tag.load(Ordering::Relaxed) == 0
    }

    /// The large block that begins here goes onto a shelf.
    #[inline(always)]
    pub fn shelve(&self, length: Length) {
        // Release: behind the link, as the child of a fork takes it at its word; partner: `is_shelved`.
        self.tag.store(SHELVED | few(length.pages()), Ordering::Release);
    }

    /// Whether a large block that begins here lies on a shelf.
    #[inline]
    pub fn is_shelved(&self) -> bool {
        // Acquire: pairs with the release in `shelve`.
        self.tag.load(Ordering::Acquire) >> BACK_BITS == SHELVED >> BACK_BITS
    }

    /// Takes it off again.
    #[inline(always)]
    pub fn unshelve(&self, length: Length) {
        // Relaxed: as in `enter_large`.
        self.tag.store(LARGE | few(length.pages()), Ordering::Relaxed);
    }

    /// The span's slots, of its first page's entry.
    #[inline]
    pub fn slots(&self) -> Slots {
        // Relaxed: under the lock of the class.
        Slots {
            used: self.used.load(Ordering::Relaxed),
            listed: self.listed.load(Ordering::Relaxed),
            fresh: self.fresh.load(Ordering::Relaxed),
        }
    }

    /// Writes them back.
    #[inline]
    pub fn set_slots(&self, slots: Slots) {
        // Relaxed: under the lock of the class, or of a span that nobody knows yet.
        self.used.store(slots.used, Ordering::Relaxed);
        self.listed.store(slots.listed, Ordering::Relaxed);
        self.fresh.store(slots.fresh, Ordering::Relaxed);
    }
}

impl Slots {
    /// Takes the first listed slot out; `next` reads the link that stands in a listed slot. `None` if none is listed.
    ///
    /// Aborts if the link leads nowhere, or in a circle: somebody has written to a slot after freeing it.
    #[inline]
    pub fn unlist(&mut self, span: PageIndex, next: impl FnOnce(u32) -> u32) -> Option<u32> {
        let slot = self.listed.checked_sub(1)?;
        let link = next(slot);
        if link > self.fresh || self.used >= self.fresh {
            fatal::abort(
                "a freed block was written to; its slot, the span's page",
                slot as usize,
                span.0,
            );
        }
        self.listed = link;
        self.used += 1;
        Some(slot)
    }

    /// Takes up to `wanted` fresh slots out: their numbers.
    #[inline]
    pub fn freshen(&mut self, class: SizeClass, wanted: u32) -> core::ops::Range<u32> {
        let first = self.fresh;
        let count = wanted.min(class.slots().saturating_sub(first));
        self.fresh += count;
        self.used += count;
        first..first + count
    }

    /// Puts a slot that is out on the list. What is to stand in it as the link.
    ///
    /// Aborts if no such slot can be out: it is fresh, or none is.
    #[inline]
    pub fn list(&mut self, span: PageIndex, slot: u32) -> u32 {
        if slot >= self.fresh || self.used == 0 {
            fatal::abort(
                "a block was freed that is not allocated; its slot, the span's page",
                slot as usize,
                span.0,
            );
        }
        self.used -= 1;
        core::mem::replace(&mut self.listed, slot + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_fresh_then_listed_and_the_count_is_kept() {
        let class = SizeClass::of(1024, 1).unwrap();
        let (mut slots, page) = (Span::vacant().slots(), PageIndex(0));
        let mut links = [0; 8];
        assert_eq!(slots.freshen(class, 3), 0..3);
        assert_eq!(slots.freshen(class, 30), 3..8);
        assert_eq!(slots.freshen(class, 1), 8..8);
        for slot in [2, 7, 0] {
            links[slot as usize] = slots.list(page, slot);
        }
        assert_eq!(slots.used, 5);
        let taken: [_; 4] = core::array::from_fn(|_| slots.unlist(page, |slot| links[slot as usize]));
        assert_eq!(taken, [Some(0), Some(7), Some(2), None]);
        assert_eq!((slots.used, slots.listed, slots.fresh), (8, 0, 8));
    }

    #[test]
    fn a_page_knows_its_span() {
        let span = Span::vacant();
        assert_eq!(span.tag(), None);
        for class in SizeClass::all() {
            span.enter(class, class.pages() - 1);
            assert_eq!(span.tag(), Some((class, class.pages() - 1)));
        }
        span.leave();
        assert_eq!(span.tag(), None);
    }
}
