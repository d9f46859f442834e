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
//! A slot of a span is **out** (in a magazine, or in use) or **home**. Its bit in the span's **map** is set while it is
//! out. Slots are not touched when they leave or come home, so what
//! a program writes to a slot after freeing it leads nobody astray, and one that comes home twice is always noticed.
//! The lowest leave first.
//!
//! - **Up to 128 slots**, so from 64 bytes on: the map is in the entry.
//! - **More slots**: it is in a second table beside the pages, a row of two cache lines for each page:
//!
//! ```text
//!   rows     …│ row 40      │ row 41      │ row 42      │ …                      128 bytes a page: 1,024 bits
//!             │ 1101…1 0…0  │ 0000…0      │ 11…1        │
//!             └──── page 40 is a span of slots of 48 bytes, of 170 of which most are out
//! ```
//!
//! I10: out + home = all. I11: the row of a page that is in no such span is all zero. (A new span begins with the row
//! as it is. Who dissolves one hands its row over with the page, as one hands over the contents of pages.)
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
use super::size_class::{PAGE_BYTES, SizeClass};

/// What the table says of one page. All-zero bytes: in no span.
#[derive(Debug)]
#[repr(C, align(32))]
pub struct Span {
    /// Class + 1 in the upper bits; in the lowest 8, how many pages back the span begins. 0: in no span. Or [`LARGE`]
    /// or [`SHELVED`], with the number of the block's length, if it has one, in the lowest 8.
    tag: AtomicU32,
    /// Slots out; for a large block, its pages.
    used: AtomicU32,
    /// The map of up to 128 slots. A span of several pages has few slots, and keeps its holes in the second word
    /// (`holes.rs`).
    map: [AtomicU64; WORDS],
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

/// Words of the map in an entry.
const WORDS: usize = 2;

/// Words of a row.
const ROW_WORDS: usize = 16;

/// The map of a span of one page that has more slots than an entry has bits. All-zero bytes: all are home, or the page
/// is in no such span.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Row([AtomicU64; ROW_WORDS]);

/// The slots of a span at one moment. Read, changed and written back under the class lock; the bits of a row are
/// changed in place.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slots<'a> {
    /// Slots out.
    pub used: u32,
    map: [u64; WORDS],
    row: Option<&'a Row>,
}

/// A word of a span's map at one moment. Read, changed and written back under the class lock.
#[derive(Debug)]
#[must_use = "what has come home counts once the word is written back"]
pub struct Word<'a> {
    cell: &'a AtomicU64,
    index: usize,
    /// A bit for each slot that is out.
    out: u64,
}

// The smallest slots have 8 bytes.
const _: () = assert!(ROW_WORDS * 64 * 8 == PAGE_BYTES);

/// Whether a span of the class has more slots than its entry has bits for.
#[inline(always)]
pub(super) fn has_row(class: SizeClass) -> bool {
    class.slots() > WORDS as u32 * u64::BITS
}

impl Row {
    /// An empty row, as in zeroed memory.
    pub fn empty() -> Self {
        Self(core::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Reads the word that says where a slot is, so that it is in this processor's cache.
    #[inline(always)]
    pub fn prefetch(&self, slot: u32) {
        // Relaxed: as in `Span::prefetch`.
        _ = self.0[place(slot).0 % ROW_WORDS].load(Ordering::Relaxed);
    }

    /// Whether it is empty. For checks.
    pub fn is_empty(&self) -> bool {
        // Relaxed: of a page in no span with a row; such a row does not change.
        self.0.iter().all(|word| word.load(Ordering::Relaxed) == 0)
    }
}

impl Span {
    /// An entry in no span, as in zeroed memory.
    pub fn vacant() -> Self {
        Self {
            tag: AtomicU32::new(0),
            used: AtomicU32::new(0),
            map: [AtomicU64::new(0), AtomicU64::new(0)],
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

    /// How many pages back its span begins, if that is of `class`.
    #[inline(always)]
    pub fn back_in(&self, class: SizeClass) -> Option<usize> {
        // Relaxed: who holds a slot of the span has received it after the tag was written, and gives it up before that
        // is cleared; see `tag`. To anyone else, who misuses an address or suspects that it is misused, this is a
        // guess: what is concluded about a slot of the span is read under the class lock.
        let tag = self.tag.load(Ordering::Relaxed);
        let back = tag.wrapping_sub((class.index() as u32 + 1) << BACK_BITS) as usize;
        (back >> BACK_BITS == 0).then_some(back)
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

    /// The span's slots; of its first page's entry. With the page's row, if the class [has](has_row) rows.
    #[inline]
    pub fn slots<'a>(&self, row: Option<&'a Row>) -> Slots<'a> {
        // Relaxed: under the class lock.
        Slots {
            used: self.used.load(Ordering::Relaxed),
            map: [0, 1].map(|word| self.map[word].load(Ordering::Relaxed)),
            row,
        }
    }

    /// Reads the entry, so that it is in this processor's cache.
    #[inline(always)]
    pub fn prefetch(&self) {
        // Relaxed: nothing is concluded from it. (A compiler leaves out no atomic load, used or not.)
        _ = self.used.load(Ordering::Relaxed);
    }

    /// How many slots are out.
    #[inline(always)]
    pub fn used(&self) -> u32 {
        // Relaxed: under the class lock.
        self.used.load(Ordering::Relaxed)
    }

    /// Writes that back.
    #[inline(always)]
    pub fn set_used(&self, used: u32) {
        // Relaxed: as in `used`.
        self.used.store(used, Ordering::Relaxed);
    }

    /// The word of the map that says where a slot is. Under the class lock.
    #[inline(always)]
    pub fn word_of<'a>(&'a self, row: Option<&'a Row>, slot: u32) -> Word<'a> {
        let index = place(slot).0;
        let cell = match row {
            Some(row) => &row.0[index % ROW_WORDS],
            None => &self.map[index % WORDS],
        };
        // Relaxed: under the class lock.
        let out = cell.load(Ordering::Relaxed);
        Word { cell, index, out }
    }

    /// Writes them back.
    #[inline]
    pub fn set_slots(&self, slots: Slots<'_>) {
        // Relaxed: under the class lock, or for a span that no other thread knows yet.
        self.used.store(slots.used, Ordering::Relaxed);
        for (word, map) in self.map.iter().zip(slots.map) {
            word.store(map, Ordering::Relaxed);
        }
    }
}

impl Word<'_> {
    /// Whether it says where this slot is.
    #[inline(always)]
    pub fn is_of(&self, slot: u32) -> bool {
        self.index == place(slot).0
    }

    /// Takes one of its slots home that is out, and begins at `address`; the caller counts it. Aborts if it is not out.
    #[inline(always)]
    pub fn take_home(&mut self, class: SizeClass, address: usize, slot: u32) {
        let bit = place(slot).1;
        if self.out & bit == 0 {
            not_out(class, address);
        }
        self.out ^= bit;
    }

    /// Writes it back.
    #[inline(always)]
    pub fn close(self) {
        // Relaxed: under the class lock.
        self.cell.store(self.out, Ordering::Relaxed);
    }
}

impl<'a> Slots<'a> {
    /// The slots of a span that nobody knows yet.
    pub fn new(row: Option<&'a Row>) -> Self {
        Self { row, ..Self::default() }
    }

    /// Takes up to `wanted` of the lowest slots out and passes each to `take`, the lowest last: if `take` prepends each
    /// one, the result is in address order.
    #[inline(always)]
    pub fn draw(&mut self, class: SizeClass, wanted: u32, mut take: impl FnMut(u32)) {
        let (mut left, mut taken, mut words) = (wanted, [0; ROW_WORDS], 0);
        while left > 0 && words < words_of(class) {
            let home = !self.word(words) & all_of(class, words);
            let lowest = lowest(home, left);
            self.set_word(words, self.word(words) | lowest);
            left -= lowest.count_ones();
            taken[words] = lowest;
            words += 1;
        }
        self.used += wanted - left;
        for (word, mut taken) in (0..words as u32).zip(taken).rev() {
            while taken != 0 {
                let bit = taken.ilog2();
                taken ^= 1 << bit;
                take(word * u64::BITS + bit);
            }
        }
    }

    /// The holes of a span of the class.
    #[inline(always)]
    pub fn holes(&self, class: SizeClass) -> Grains {
        if class.is_flagged() { self.map[1] as Grains } else { 0 }
    }

    /// Takes out the slots that reach into grains which may go; see [`holes::claim`].
    pub fn claim(&mut self, class: SizeClass, span: PageIndex, granule: usize) -> Option<Claim> {
        let claim = holes::claim(class, span, self.map[0] as u32, self.holes(class), granule)?;
        self.map[0] |= u64::from(claim.slots);
        self.used += claim.slots.count_ones();
        self.map[1] ^= u64::from(claim.holes);
        Some(claim)
    }

    /// Puts the claimed slots home; the grains `gone` are holes from now on. Returns how many of them were not holes
    /// before: two concurrent claims may both have the grains behind the last slot.
    pub fn end_claim(&mut self, class: SizeClass, claim: Claim, gone: Grains) -> u32 {
        self.map[0] ^= u64::from(claim.slots);
        self.used -= claim.slots.count_ones();
        let before = self.holes(class);
        self.map[1] |= u64::from(claim.holes | gone);
        (gone & !before).count_ones()
    }

    /// Ends the holes that slots which are now out reach into. Returns how many grains.
    #[cold]
    pub fn fill(&mut self, class: SizeClass, span: PageIndex, granule: usize) -> u32 {
        let before = self.holes(class);
        let left = before & holes::granules_at_home(class, span, self.map[0] as u32, granule);
        self.map[1] = left.into();
        (before ^ left).count_ones()
    }

    /// Whether the slot is home.
    pub fn is_home(self, slot: u32) -> bool {
        let (word, bit) = place(slot);
        self.word(word) & bit == 0
    }

    /// How many slots are home, by the map; `None` if the record is impossible. For checks.
    pub fn count_home(mut self, class: SizeClass) -> Option<u32> {
        let mut filled = 0;
        if class.is_flagged() {
            filled = self.holes(class) & !holes::at_home(class, self.map[0] as u32);
            self.map[1] = 0;
        }
        let words = if self.row.is_some() { ROW_WORDS } else { WORDS };
        let beyond = (0..words).any(|word| self.word(word) & !all_of(class, word) != 0);
        let out: u32 = (0..words).map(|word| self.word(word).count_ones()).sum();
        (!beyond && filled == 0).then(|| class.slots() - out)
    }

    /// A word of the map.
    #[inline(always)]
    fn word(&self, word: usize) -> u64 {
        match self.row {
            // Relaxed: under the class lock, or for a span that no other thread knows yet.
            Some(row) => row.0[word % ROW_WORDS].load(Ordering::Relaxed),
            None => self.map[word % WORDS],
        }
    }

    #[inline(always)]
    fn set_word(&mut self, word: usize, map: u64) {
        match self.row {
            // Relaxed: as in `word`.
            Some(row) => row.0[word % ROW_WORDS].store(map, Ordering::Relaxed),
            None => self.map[word % WORDS] = map,
        }
    }
}

#[cold]
#[inline(never)]
fn not_out(class: SizeClass, address: usize) -> ! {
    fatal::abort(
        "a block was freed that is not allocated; its address, its size class",
        Number::Address(address),
        Number::Count(class.bytes()),
    )
}

/// Words of the map of a span of the class.
#[inline(always)]
fn words_of(class: SizeClass) -> usize {
    class.slots().div_ceil(u64::BITS) as usize
}

/// The lowest `count` of these bits, or all of them.
#[inline(always)]
fn lowest(bits: u64, count: u32) -> u64 {
    let mut rest = 0;
    if count < bits.count_ones() {
        rest = bits;
        (0..count).for_each(|_| rest &= rest - 1);
    }
    bits ^ rest
}

/// A word of the map of a span of the class, all slots out.
#[inline(always)]
fn all_of(class: SizeClass, word: usize) -> u64 {
    let slots = class.slots().saturating_sub(word as u32 * u64::BITS).min(u64::BITS);
    u64::MAX.checked_shr(u64::BITS - slots).unwrap_or(0)
}

/// The word and the bit of a slot in a map.
#[inline(always)]
fn place(slot: u32) -> (usize, u64) {
    ((slot / u64::BITS) as usize, 1 << (slot % u64::BITS))
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
            let (span, row) = (Span::vacant(), Row::empty());
            let row = has_row(class).then_some(&row);
            assert!(row.is_none() || class.pages() == 1 && !class.is_flagged(), "{class:?}");
            let mut out = std::collections::BTreeSet::new();
            let take_home = |slot| {
                let mut word = span.word_of(row, slot);
                assert!(word.is_of(slot) && !word.is_of(slot + u64::BITS));
                word.take_home(class, 0, slot);
                word.close();
            };
            for round in 0..40 {
                let mut slots = span.slots(row);
                let (wanted, home) = (1 + round * 7 % (all + 2), all - out.len() as u32);
                let mut drawn = std::vec::Vec::new();
                slots.draw(class, wanted, |slot| drawn.push(slot));
                assert_eq!(drawn.len() as u32, wanted.min(home), "{class:?}, round {round}");
                assert_eq!(slots.used as usize, out.len() + drawn.len());
                assert!(drawn.into_iter().all(|slot| slot < all && out.insert(slot)));
                let back: std::vec::Vec<u32> = out.iter().copied().filter(|slot| (slot * 31 + round) % 5 < 3).collect();
                span.set_slots(slots);
                for slot in back {
                    out.remove(&slot);
                    take_home(slot);
                }
                span.set_used(out.len() as u32);
                let slots = span.slots(row);
                assert_eq!(slots.count_home(class), Some(all - slots.used), "{class:?}: {slots:?}");
                for slot in 0..all {
                    assert_eq!(
                        slots.is_home(slot),
                        !out.contains(&slot),
                        "{class:?}, {slot} of {slots:?}"
                    );
                }
            }
            // I11: what leaves no slot out leaves no bit.
            out.into_iter().for_each(take_home);
            let slots = span.slots(row);
            assert!(
                (0..words_of(class)).all(|word| slots.word(word) == 0),
                "{class:?}: {slots:?}"
            );
        }
    }

    /// The lowest are drawn, lowest last, for a caller that prepends each one.
    #[test]
    fn slots_come_in_the_order_of_their_addresses() {
        for class in SizeClass::all() {
            let row = Row::empty();
            let (mut slots, mut last) = (Slots::new(has_row(class).then_some(&row)), class.slots() - 1);
            slots.draw(class, last, |slot| {
                assert_eq!((slot + 1, slot), (last, last - 1));
                last = slot;
            });
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
