//! Spans: runs of pages cut into equal slots, described in a table beside the pages.
//!
//! ```text
//!   table    …│ page 40     │ page 41     │ page 42     │ page 43     │…      32 bytes a page
//!             │ tag 49, + 0 │ tag 49, + 1 │ tag 49, + 2 │ tag none    │
//!             │ map, used   │             │             │             │
//!             └──── the span at page 40, of class 48 ───┘
//!   pages    …│ slot 0 │ slot 1 │ slot 2 │ … │ slot 9 │ over │                slots of 2,304 bytes
//! ```
//!
//! The entry of a span's first page describes the span; the entries of its other pages say how far back the first is.
//! So any address leads to its span by one subtraction, one shift and one load, or two loads if the span has several
//! pages. A page outside any span has tag 0.
//!
//! A slot of a span is **out** (in a magazine, or in use) or **home**. The entry records which:
//!
//! - **Up to 128 slots**, so from 64 bytes on: one bit for each slot that is out. Slots are not touched when they
//!   leave or come home. The lowest leave first.
//! - **More slots**: those at home are either **fresh** - never out yet, and untouched - or on the span's **list**.
//!   The list is linked through the slots themselves, by number and never by address. So a program that writes to a
//!   slot after freeing it can at worst lead us to a wrong slot of the same span, and is caught if the number is out
//!   of range.
//!
//! I10: out + home = all. I11: fresh slots are the last ones.
//!
//! **Large blocks**, except those aligned to more than 16 MiB, are in the table too, by their first page: its entry
//! says how many pages the block has, and whether the program has it, or a shelf. So checking a free takes one
//! load.
//!
//! Any thread that holds a slot of the span may read its tag; everything else is accessed only under the class lock.
//! The fields are atomics with relaxed accesses, which cost the same as plain ones; the lock orders them.

#![forbid(unsafe_code)]

use crate::fatal::{self, Number};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::units::PageIndex;

use super::holes::{self, Claim, Grains};
use super::length::Length;
use super::link::Link;
use super::size_class::SizeClass;

/// What the table says of one page. All-zero bytes: in no span.
#[derive(Debug)]
#[repr(C, align(32))]
pub struct Span {
    /// Class + 1 in the upper bits; in the lowest 8, how many pages back the span begins. 0: in no span. Or [`LARGE`]
    /// or [`SHELVED`], with the number of the block's length, if it has one, in the lowest 8.
    tag: AtomicU32,
    /// Slots out; for a large block, its pages.
    used: AtomicU32,
    /// The first listed slot, plus one. In a span with a map: its lowest quarter.
    listed: AtomicU32,
    /// How many slots were ever out: the number of the first fresh one. In a span with a map: its next quarter.
    fresh: AtomicU32,
    /// The upper half of the map. A span of several pages has few slots, and keeps its holes here (`holes.rs`).
    upper: AtomicU64,
    /// The neighbours in the class's list of spans with room, or on a shelf; see [`Link`].
    pub(super) before: Link,
    pub(super) behind: Link,
}

/// Bits for how far back a page can say its span begins.
const BACK_BITS: u32 = 8;

/// The tag of the first page of a large block that is in use. No class has it.
const LARGE: u32 = u32::MAX << BACK_BITS;

/// The same for a large block on a shelf, or aside.
const SHELVED: u32 = LARGE - (1 << BACK_BITS);

/// The lowest bits of such a tag: all ones if the block has no length.
#[inline]
const fn number_of(length: Option<Length>) -> u32 {
    match length {
        Some(length) => length.index() as u32,
        None => (1 << BACK_BITS) - 1,
    }
}

/// The slots of a span at one moment. Read, changed and written back under the class lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slots {
    /// Slots out.
    pub used: u32,
    /// As in [`Span`].
    listed: u32,
    fresh: u32,
    upper: u64,
}

/// Words of a map.
const WORDS: usize = 2;

/// Whether a span of the class has few enough slots for a map.
#[inline(always)]
pub(super) fn is_mapped(class: SizeClass) -> bool {
    class.slots() <= WORDS as u32 * u64::BITS
}

impl Span {
    /// An entry in no span, as in zeroed memory.
    pub fn vacant() -> Self {
        Self {
            tag: AtomicU32::new(0),
            used: AtomicU32::new(0),
            listed: AtomicU32::new(0),
            fresh: AtomicU32::new(0),
            upper: AtomicU64::new(0),
            before: Link::none(),
            behind: Link::none(),
        }
    }

    /// The class of the span the page is in, and how many pages back that span begins. `None` outside any span.
    #[inline]
    pub fn tag(&self) -> Option<(SizeClass, usize)> {
        // It is written before the span's first slot leaves, and cleared after the last has come back. Whoever holds a
        // slot has received it after the one and gives it up before the other. Acquire: pairs with the release of
        // `enter`, for a thread that counts a span without holding a slot of it, and reads the record of its slots.
        let tag = self.tag.load(Ordering::Acquire);
        let class = SizeClass::from_index(((tag >> BACK_BITS) as usize).wrapping_sub(1))?;
        Some((class, (tag & ((1 << BACK_BITS) - 1)) as usize))
    }

    /// Enters the page in a span of `class` that begins `back` pages before it.
    pub fn enter(&self, class: SizeClass, back: usize) {
        let tag = (class.index() as u32 + 1) << BACK_BITS | back as u32;
        // Release: a thread that counts the span without holding a slot of it sees the record of its slots; partner:
        // `tag`. The program has no slot of it yet.
        self.tag.store(tag, Ordering::Release);
    }

    /// Takes the page out of its span, or the large block that begins here out of the table.
    pub fn leave(&self) {
        // Relaxed: nobody holds a slot of the span, or the block, any more; see `tag`.
        self.tag.store(0, Ordering::Relaxed);
    }

    /// Takes a large block of this length (`None`: one that has none) out of the table. Returns whether it was there
    /// and in use; if not, two threads free it at the same moment.
    #[inline]
    #[must_use]
    pub fn leave_large(&self, length: Option<Length>) -> bool {
        // Relaxed, twice: the caller owns the block; who frees its pages hands this over with them.
        self.tag
            .compare_exchange(LARGE | number_of(length), 0, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }

    /// Enters a large block of `pages` pages that begins here and that the caller owns. A block aligned to more than a
    /// page has no length, whatever its size.
    #[inline]
    pub fn enter_large(&self, pages: usize, length: Option<Length>) {
        // Relaxed, here and below: the caller owns the block, and hands this over with it.
        self.used.store(pages as u32, Ordering::Relaxed);
        self.tag.store(LARGE | number_of(length), Ordering::Relaxed);
    }

    /// Whether a large block of `pages` pages begins here and is in use.
    #[inline]
    pub fn is_large(&self, pages: usize, length: Option<Length>) -> bool {
        // Relaxed, twice: as in `enter_large`.
        let is_such = self.tag.load(Ordering::Relaxed) == LARGE | number_of(length);
        is_such && self.used.load(Ordering::Relaxed) as usize == pages
    }

    /// The same for a block that has a length, and so may lie on a shelf: one comparison.
    #[inline(always)]
    pub fn is_large_of(&self, length: Length) -> bool {
        // Relaxed: as in `enter_large`. (The other way round this takes one more register, which must be saved.)
        self.tag.load(Ordering::Relaxed).wrapping_sub(LARGE) == length.index() as u32
    }

    /// How many pages the large block has that begins here and is in use, if there is one.
    #[inline(always)]
    pub fn large_pages(&self) -> Option<usize> {
        // Relaxed, twice: as in `enter_large`.
        let is_large = self.tag.load(Ordering::Relaxed) >> BACK_BITS == LARGE >> BACK_BITS;
        is_large.then(|| self.used.load(Ordering::Relaxed) as usize)
    }

    /// Whether the page is in no span, and no large block in the table begins here.
    pub fn is_vacant(&self) -> bool {
        // Relaxed: as in `enter_large`.
        self.tag.load(Ordering::Relaxed) == 0
    }

    /// Marks the large block that begins here as shelved.
    #[inline(always)]
    pub fn shelve(&self, length: Length) {
        // Release: after its link, if it goes on a list, because the child of a fork trusts the tag; partner:
        // `is_shelved`. A hand is set after this.
        self.tag.store(SHELVED | length.index() as u32, Ordering::Release);
    }

    /// Whether a large block that begins here lies on a shelf, or aside.
    #[inline]
    pub fn is_shelved(&self) -> bool {
        // Acquire: pairs with the release in `shelve`.
        self.tag.load(Ordering::Acquire) >> BACK_BITS == SHELVED >> BACK_BITS
    }

    /// The same for a block that is put aside; without a length if it is longer than on a shelf. Returns whether it was
    /// in use; if not, two threads free it at the same moment.
    #[inline]
    #[must_use]
    pub fn put_aside(&self, length: Option<Length>) -> bool {
        let (used, shelved) = (LARGE | number_of(length), SHELVED | number_of(length));
        // Relaxed, twice: `Aside::put` or `join`, which follows, releases this to whoever takes the run.
        self.tag
            .compare_exchange(used, shelved, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }

    /// Marks it as in use again.
    #[inline(always)]
    pub fn unshelve(&self, length: Length) {
        // Relaxed: as in `enter_large`.
        self.tag.store(LARGE | length.index() as u32, Ordering::Relaxed);
    }

    /// The span's slots; of its first page's entry.
    #[inline]
    pub fn slots(&self) -> Slots {
        // Relaxed: under the class lock.
        Slots {
            used: self.used.load(Ordering::Relaxed),
            listed: self.listed.load(Ordering::Relaxed),
            fresh: self.fresh.load(Ordering::Relaxed),
            upper: self.upper.load(Ordering::Relaxed),
        }
    }

    /// Writes them back.
    #[inline]
    pub fn set_slots(&self, slots: Slots) {
        // Relaxed: under the class lock, or for a span that no other thread knows yet.
        self.used.store(slots.used, Ordering::Relaxed);
        self.listed.store(slots.listed, Ordering::Relaxed);
        self.fresh.store(slots.fresh, Ordering::Relaxed);
        self.upper.store(slots.upper, Ordering::Relaxed);
    }
}

impl Slots {
    /// Takes up to `wanted` slots out and passes each to `take`. If `take` prepends each one, the result is in address
    /// order, with slots that were out before in front. `next` reads the link in a listed slot; the span begins at
    /// address `first`.
    ///
    /// Aborts if a link is out of range or the list is circular: the program has written to a slot after freeing it.
    #[inline(always)]
    pub fn draw(
        &mut self,
        class: SizeClass,
        first: usize,
        wanted: u32,
        next: impl Fn(u32) -> u32,
        mut take: impl FnMut(u32),
    ) {
        if is_mapped(class) {
            let taken = self.take_lowest(class, wanted);
            for (word, mut taken) in (0..WORDS as u32).zip(taken).rev() {
                while taken != 0 {
                    let bit = taken.ilog2();
                    taken ^= 1 << bit;
                    take(word * u64::BITS + bit);
                }
            }
            return;
        }
        let mut left = wanted;
        while left > 0
            && let Some(slot) = self.unlist(class, first, &next)
        {
            take(slot);
            left -= 1;
        }
        self.freshen(class, left).rev().for_each(take);
    }

    /// Puts a slot that is out, and begins at `address`, back home. Returns the link to store in it, if any.
    ///
    /// Aborts if it is not out.
    #[inline]
    pub fn put(&mut self, class: SizeClass, address: usize, slot: u32) -> Option<u32> {
        let is_out = if is_mapped(class) {
            !self.is_in_map(slot)
        } else {
            slot < self.fresh && self.used > 0
        };
        if !is_out {
            fatal::abort(
                "a block was freed that is not allocated; its address, its size class",
                Number::Address(address),
                Number::Count(class.bytes()),
            );
        }
        self.used -= 1;
        if is_mapped(class) {
            let (word, bit) = place(slot);
            self.set_word(word, self.word(word) ^ bit);
            return None;
        }
        Some(core::mem::replace(&mut self.listed, slot + 1))
    }

    /// The holes of a span of the class.
    #[inline(always)]
    pub fn holes(&self, class: SizeClass) -> Grains {
        if class.is_flagged() { self.upper as Grains } else { 0 }
    }

    /// Takes out the slots that reach into grains which may go; see [`holes::claim`].
    pub fn claim(&mut self, class: SizeClass, span: PageIndex, granule: usize) -> Option<Claim> {
        let claim = holes::claim(class, span, self.listed, self.holes(class), granule)?;
        self.listed |= claim.slots;
        self.used += claim.slots.count_ones();
        self.upper ^= u64::from(claim.holes);
        Some(claim)
    }

    /// Puts the claimed slots home; the grains `gone` are holes from now on. Returns how many of them were not holes
    /// before: two concurrent claims may both have the grains behind the last slot.
    pub fn end_claim(&mut self, class: SizeClass, claim: Claim, gone: Grains) -> u32 {
        self.listed ^= claim.slots;
        self.used -= claim.slots.count_ones();
        let before = self.holes(class);
        self.upper |= u64::from(claim.holes | gone);
        (gone & !before).count_ones()
    }

    /// Ends the holes that slots which are now out reach into. Returns how many grains.
    #[cold]
    pub fn fill(&mut self, class: SizeClass, span: PageIndex, granule: usize) -> u32 {
        let before = self.holes(class);
        let left = before & holes::granules_at_home(class, span, self.listed, granule);
        self.upper = left.into();
        (before ^ left).count_ones()
    }

    /// Whether the slot is home. O(slots).
    pub fn is_home(mut self, class: SizeClass, first: usize, slot: u32, next: impl Fn(u32) -> u32) -> bool {
        if is_mapped(class) {
            return self.is_in_map(slot);
        }
        // At most as many steps as the span has slots, whatever the links say.
        let fresh = self.fresh;
        let mut listed = (0..fresh).map_while(|_| self.unlist(class, first, &next));
        slot >= fresh || listed.any(|listed| listed == slot)
    }

    /// How many slots are home, by the map or by following the links; `None` if the record is impossible. For checks.
    pub fn count_home(mut self, class: SizeClass, next: impl Fn(u32) -> u32) -> Option<u32> {
        if is_mapped(class) {
            let mut filled = 0;
            if class.is_flagged() {
                filled = self.holes(class) & !holes::at_home(class, self.listed);
                self.upper = 0;
            }
            let beyond = (0..WORDS).any(|word| self.word(word) & !all_of(class, word) != 0);
            let out: u32 = (0..WORDS).map(|word| self.word(word).count_ones()).sum();
            return (!beyond && filled == 0).then(|| class.slots() - out);
        }
        // Checked before a link is followed, so that nothing outside the span is read, whatever the record says.
        if self.fresh > class.slots() || self.listed > self.fresh {
            return None;
        }
        let (mut count, ever_out) = (0, self.fresh);
        while count <= ever_out && self.try_unlist(&next).ok()?.is_some() {
            count += 1;
        }
        Some(class.slots().checked_sub(ever_out)? + count)
    }

    /// A word of the map of slots that are out, for a span with a map.
    #[inline(always)]
    fn word(&self, word: usize) -> u64 {
        if word == 0 {
            u64::from(self.fresh) << u32::BITS | u64::from(self.listed)
        } else {
            self.upper
        }
    }

    #[inline(always)]
    fn set_word(&mut self, word: usize, map: u64) {
        if word == 0 {
            (self.listed, self.fresh) = (map as u32, (map >> u32::BITS) as u32);
        } else {
            self.upper = map;
        }
    }

    /// Whether the slot is home, by the map.
    #[inline(always)]
    fn is_in_map(&self, slot: u32) -> bool {
        let (word, bit) = place(slot);
        self.word(word) & bit == 0
    }

    /// Takes up to `wanted` of the lowest slots out, by the map. Returns which.
    #[inline]
    fn take_lowest(&mut self, class: SizeClass, wanted: u32) -> [u64; WORDS] {
        let mut left = wanted;
        core::array::from_fn(|word| {
            let home = !self.word(word) & all_of(class, word);
            let mut rest = 0;
            if left < home.count_ones() {
                rest = home;
                (0..left).for_each(|_| rest &= rest - 1);
            }
            let taken = home ^ rest;
            left -= taken.count_ones();
            self.used += taken.count_ones();
            self.set_word(word, self.word(word) | taken);
            taken
        })
    }

    /// Takes the first listed slot out. Aborts if its link is invalid.
    #[inline]
    fn unlist(&mut self, class: SizeClass, first: usize, next: impl FnOnce(u32) -> u32) -> Option<u32> {
        self.try_unlist(next).unwrap_or_else(|slot| {
            fatal::abort(
                "a freed block was written to; its address, its size class",
                Number::Address(first + slot as usize * class.bytes()),
                Number::Count(class.bytes()),
            )
        })
    }

    /// The same; returns the slot as an error if its link is invalid.
    #[inline]
    fn try_unlist(&mut self, next: impl FnOnce(u32) -> u32) -> Result<Option<u32>, u32> {
        let Some(slot) = self.listed.checked_sub(1) else {
            return Ok(None);
        };
        let link = next(slot);
        if link > self.fresh || self.used >= self.fresh {
            return Err(slot);
        }
        self.listed = link;
        self.used += 1;
        Ok(Some(slot))
    }

    /// Takes up to `wanted` fresh slots out. Returns their numbers.
    #[inline]
    fn freshen(&mut self, class: SizeClass, wanted: u32) -> core::ops::Range<u32> {
        let first = self.fresh;
        let count = wanted.min(class.slots().saturating_sub(first));
        self.fresh += count;
        self.used += count;
        first..first + count
    }
}

/// The map of a span with a map, all slots out.
#[inline(always)]
fn all_of(class: SizeClass, word: usize) -> u64 {
    let slots = class.slots().saturating_sub(word as u32 * u64::BITS).min(u64::BITS);
    u64::MAX.checked_shr(u64::BITS - slots).unwrap_or(0)
}

/// The word and the bit of a slot in a map.
#[inline(always)]
fn place(slot: u32) -> (usize, u64) {
    ((slot / u64::BITS) as usize % WORDS, 1 << (slot % u64::BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compared with a set, in every class: drawn slots were home, as many as there are; a slot that is put is home
    /// again.
    #[test]
    fn slots_are_out_or_home() {
        for class in SizeClass::all() {
            let all = class.slots();
            let links = core::cell::RefCell::new(std::vec![0; all as usize]);
            let next = |slot: u32| links.borrow()[slot as usize];
            let (mut slots, mut out) = (Span::vacant().slots(), std::collections::BTreeSet::new());
            for round in 0..40 {
                let (wanted, home) = (1 + round * 7 % (all + 2), all - out.len() as u32);
                let mut drawn = std::vec::Vec::new();
                slots.draw(class, 0, wanted, next, |slot| drawn.push(slot));
                assert_eq!(drawn.len() as u32, wanted.min(home), "{class:?}, round {round}");
                assert!(drawn.into_iter().all(|slot| slot < all && out.insert(slot)));
                let back: std::vec::Vec<u32> = out.iter().copied().filter(|slot| (slot * 31 + round) % 5 < 3).collect();
                for slot in back {
                    out.remove(&slot);
                    if let Some(link) = slots.put(class, 0, slot) {
                        links.borrow_mut()[slot as usize] = link;
                    }
                }
                assert_eq!(slots.used, out.len() as u32);
                assert_eq!(
                    slots.count_home(class, next),
                    Some(all - slots.used),
                    "{class:?}: {slots:?}"
                );
                for slot in 0..all {
                    let home = slots.is_home(class, 0, slot, next);
                    assert_eq!(home, !out.contains(&slot), "{class:?}, {slot} of {slots:?}");
                }
            }
        }
    }

    /// Fresh slots, and those of a map, are drawn lowest last, for a caller that prepends each one.
    #[test]
    fn slots_come_in_the_order_of_their_addresses() {
        for bytes in [8, 128, 1024, 32 << 10] {
            let class = SizeClass::of(bytes, 1).unwrap();
            let (mut slots, mut last) = (Slots::default(), class.slots() - 1);
            slots.draw(
                class,
                0,
                last,
                |_| 0,
                |slot| {
                    assert_eq!((slot + 1, slot), (last, last - 1));
                    last = slot;
                },
            );
            assert_eq!((last, slots.used), (0, class.slots() - 1));
        }
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

    /// Whoever comes second, in whichever of the two ways, is told.
    #[test]
    fn a_large_block_is_given_up_once() {
        for length in [None, Length::exactly(7)] {
            let entry = Span::vacant();
            entry.enter_large(7, length);
            assert!(entry.leave_large(length) && entry.is_vacant());
            assert!(!entry.leave_large(length));
            assert!(!entry.put_aside(None) && entry.is_vacant());
        }
        let entry = Span::vacant();
        entry.enter_large(700, None);
        assert!(entry.put_aside(None) && !entry.put_aside(None));
        assert!(!entry.leave_large(None) && entry.is_shelved());
    }
}
