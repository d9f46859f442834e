//! Size classes: which slot a layout gets, and how a span is cut into slots. Pure arithmetic, one table.
//!
//! ```text
//!   bytes     8  16  24 … 128 │ 144 160 … 256 │ 288 320 … 512 │ … │ 18 K 20 K … 32 K │ more: whole pages
//!   class     0   1   2    15 │  16  17    23 │  24  25    31 │   │   72   73     79 │ none
//!   step      8               │  16           │  32           │   │  2 K             │
//! ```
//!
//! There are eight steps to every doubling, so from 64 bytes on a slot is less than an eighth larger than what was
//! asked for. Below that the step is 8 bytes, to which most requests are aligned anyway.
//!
//! **One function for all.** [`SizeClass::of`] maps (size, align) to a class, for allocating, freeing and resizing
//! alike. A caller that frees with the layout it allocated with gets the same class again, without a lookup.
//!
//! **Alignment.** The size is first rounded up to a multiple `s` of the alignment `a`; then the slot's size is a
//! multiple of `a` too. Proof: let `g` be the step at `s`, a power of two as `a` is. The slot's size is `s` rounded up
//! to a multiple of `g`. If `a ≤ g`, every multiple of `g` is one of `a`. If `a > g`, then `s`, a multiple of `a`, is
//! already a multiple of `g`, and the slot's size is `s`. Spans begin on a page and slot i lies at `i · size`, so it
//! is aligned for every `a` up to a page.
//!
//! **Spans** are as short as possible with at most an eighth left over at the end and several slots: 1 page up to 1
//! KiB (8 slots or more), at most 16 pages.
//!
//! **A panic's memory** must be aligned to more than its layout says on some systems (`fatal.rs`): there, blocks of 49
//! to 56 bytes get slots of 64, and the class of 56 is not used.
//!
//! Worked: 100 bytes aligned to 64. Rounded up to 128; s − 1 = 127 has its highest bit at 6, so the class is 8 · 6 +
//! (127 >> 3) − 48 = 15: slots of 128 bytes, 64 in a span of one page.

#![forbid(unsafe_code)]

use core::alloc::Layout;
use core::hint::cold_path;

use crate::fatal::{self, Number};
use crate::geometry::{BATCH_BYTES, FEWEST_SLOTS, Geometry, Shape};

/// How many classes there are.
pub const CLASSES: usize = 80;

/// The largest slot. Anything larger is a run of pages.
pub const MAX_SLOT_BYTES: usize = 32 << 10;

const _: () = assert!(
    MAX_SLOT_BYTES == crate::guard::MOST_SLOT,
    "what is longer has no life to look back at"
);

/// The longest span: as much as a cache of pages serves.
pub const MAX_SPAN_PAGES: usize = 16;

/// log2 of the largest slot that bears its own mark while it is free (`mark.rs`). Larger slots have a flag in the
/// table of spans, for the kibibyte in which the slot begins.
pub const FLAG_SHIFT: u32 = 10;

/// log2 of the bytes in a page.
pub const PAGE_SHIFT: u32 = <Geometry as Shape>::PAGE_SHIFT;

/// Bytes in a page.
pub const PAGE_BYTES: usize = 1 << PAGE_SHIFT;

/// The fewest and the most slots in a batch: two less than a power of two, so that their table with its head is one.
/// Only the smallest slots have batches of more than 126: 510 up to 64 bytes, 254 up to 128 (32 KiB).
pub const BATCH_SLOTS: [usize; 3] = [FEWEST_SLOTS, 126, 510];

/// A size class. I9: its number is less than [`CLASSES`]; only `of` and `all` make one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SizeClass(u8);

/// The properties of a class.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Bytes in a slot.
    bytes: u32,
    /// ⌈2³² / bytes⌉; see [`SizeClass::slot_at`].
    reciprocal: u32,
    /// Slots in a span.
    slots: u16,
    /// Pages in a span.
    pages: u8,
    /// Slots in a batch.
    batch: u16,
}

static TABLE: [Entry; CLASSES] = {
    let mut table = [Entry::new(0); CLASSES];
    let mut class = 0;
    while class < CLASSES {
        table[class] = Entry::new(class);
        class += 1;
    }
    table
};

/// Sizes below this are looked up in a table.
const TABLED_BYTES: usize = MAX_SLOT_BYTES;

/// The class of size 8 · i, for each i.
static TABLED: [u8; TABLED_BYTES / 8 + 1] = {
    let mut table = [0; TABLED_BYTES / 8 + 1];
    let mut step = 0;
    while step < table.len() {
        if let Some(class) = SizeClass::of_other(8 * step, 1) {
            table[step] = class.0;
        }
        step += 1;
    }
    table
};

impl Entry {
    const fn new(class: usize) -> Self {
        let bytes = slot_bytes(class);
        let pages = span_pages(bytes);
        Self {
            bytes: bytes as u32,
            reciprocal: (1_u64 << 32).div_ceil(bytes as u64) as u32,
            slots: (pages * PAGE_BYTES / bytes) as u16,
            pages: pages as u8,
            batch: batch_slots(bytes) as u16,
        }
    }
}

/// How many slots of `bytes` bytes make a batch.
const fn batch_slots(bytes: usize) -> usize {
    const fn least(a: usize, b: usize) -> usize {
        if a < b { a } else { b }
    }
    let ([few_bytes, bytes_at_most], [fewest, some, most]) = (BATCH_BYTES, BATCH_SLOTS);
    let (small, other) = (least(few_bytes / bytes, most), least(bytes_at_most / bytes, some));
    let batch = if small > other { small } else { other };
    if batch < fewest {
        fewest
    } else {
        (1 << (batch + 2).ilog2()) - 2
    }
}

/// The inverse of [`SizeClass::of`] for align 1: the largest size in a class.
const fn slot_bytes(class: usize) -> usize {
    if class < 8 {
        return (class + 1) * 8;
    }
    // In the terms of `of`: class = 8 · log + top − 48 with 8 ≤ top < 16.
    let (log, top) = (6 + (class - 8) / 8, 8 + (class - 8) % 8);
    (top + 1) << (log - 3)
}

/// The fewest pages that hold several slots of `bytes` bytes with at most an eighth left over.
const fn span_pages(bytes: usize) -> usize {
    let several = if bytes > MAX_SLOT_BYTES / 2 { 4 } else { 8 };
    let mut pages = 1;
    while pages * PAGE_BYTES / bytes < several || pages * PAGE_BYTES % bytes * 8 > pages * PAGE_BYTES {
        pages += 1;
    }
    pages
}

// The last class is the largest slot, no span exceeds the maximum, and there is a rack for each batch.
const _: () = {
    assert!(slot_bytes(CLASSES - 1) == MAX_SLOT_BYTES);
    let mut class = 0;
    while class < CLASSES {
        assert!(span_pages(slot_bytes(class)) <= MAX_SPAN_PAGES);
        let batch = Entry::new(class).batch as usize;
        assert!((batch + 2).is_power_of_two() && batch >= BATCH_SLOTS[0] && batch <= BATCH_SLOTS[2]);
        class += 1;
    }
};

/// The class of the smallest slots that have flags in the table of spans.
const FIRST_FLAGGED: usize = {
    let mut class = 0;
    while slot_bytes(class) <= 1 << FLAG_SHIFT {
        class += 1;
    }
    class
};

// Sizes with the same number have the same class.
const _: () = {
    let mut class = FIRST_FLAGGED;
    while class < CLASSES {
        assert!(slot_bytes(class).is_multiple_of(1 << FLAGGED_STEP));
        class += 1;
    }
};

/// A size of up to `MOST` bytes, rounded up to its alignment if that is above 8, in steps of 2 to the `STEP` bytes. It
/// takes a comparison or two to make one, and it can index a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSize<const MOST: usize, const STEP: u32>(usize);

/// A size whose slot bears its own mark.
pub type MarkedSize = StepSize<{ 1 << FLAG_SHIFT }, 3>;

/// A size, known to be more than that, whose slot has a flag. All these slots are multiples of the step, so the table
/// is a sixteenth of what it would be with steps of eight.
pub type FlaggedSize = StepSize<MAX_SLOT_BYTES, FLAGGED_STEP>;

/// log2 of the step between the smallest classes with flags.
const FLAGGED_STEP: u32 = FLAG_SHIFT - 3;

impl<const MOST: usize, const STEP: u32> StepSize<MOST, STEP> {
    /// How many there are.
    pub const COUNT: usize = (MOST >> STEP) + 1;

    /// The largest.
    pub const MOST_BYTES: usize = MOST;

    /// A step.
    pub const STEP_BYTES: usize = 1 << STEP;

    /// The size, if it is aligned to at most 8 or was rounded up to its alignment. `None` for larger ones.
    #[inline(always)]
    pub const fn of(size: usize) -> Option<Self> {
        if size > MOST {
            cold_path();
            return None;
        }
        Some(Self(size.div_ceil(1 << STEP)))
    }

    /// Whether layouts with this alignment get the slots that their size alone implies.
    #[inline(always)]
    pub const fn is_met(align: usize) -> bool {
        align <= 8
    }

    /// Its number, less than [`COUNT`](Self::COUNT).
    #[inline(always)]
    pub const fn index(self) -> usize {
        self.0
    }
}

impl MarkedSize {
    /// The size of a layout, rounded up to its alignment, which has the layout's class (see [`SizeClass::rounded`]).
    /// `None` for larger ones. Alignments above 8 are taken for rare; of a constant one no branch is left.
    #[inline(always)]
    pub const fn of_layout(layout: Layout) -> Option<Self> {
        let size = if Self::is_met(layout.align()) {
            layout.size()
        } else {
            cold_path();
            SizeClass::rounded(layout.size(), layout.align())
        };
        Self::of(size)
    }
}

impl SizeClass {
    /// log2 of the bytes in a page.
    pub const PAGE_SHIFT: u32 = PAGE_SHIFT;

    /// Layouts aligned to more than this have neither a slot nor a length.
    pub const MOST_ALIGN: usize = PAGE_BYTES;

    /// The class of a layout; `None` if it needs whole pages. Size zero counts as one.
    #[inline(always)]
    pub const fn of(size: usize, align: usize) -> Option<Self> {
        match Self::of_small(size, align) {
            Some(class) => Some(class),
            None => Self::of_other(size, align),
        }
    }

    /// Whether this size exceeds every slot.
    #[inline(always)]
    pub const fn is_exceeded_by(size: usize) -> bool {
        size > MAX_SLOT_BYTES
    }

    /// Like [`of`](Self::of), for sizes below the largest slot aligned to at most 8, which is nearly everything: one
    /// load from a table, whose used part stays in the cache. `None` for others.
    #[inline(always)]
    pub const fn of_small(size: usize, align: usize) -> Option<Self> {
        if size < TABLED_BYTES && align <= 8 {
            Some(Self(TABLED[size.div_ceil(8)]))
        } else {
            None
        }
    }

    /// Like [`of`](Self::of), by arithmetic: for layouts that [`of_small`](Self::of_small) rejects.
    #[inline(always)]
    pub const fn of_other(size: usize, align: usize) -> Option<Self> {
        if size > MAX_SLOT_BYTES || align > Self::MOST_ALIGN {
            return None;
        }
        // Both are small: no overflow. The result is at most MAX_SLOT_BYTES, which every such alignment divides.
        let last = Self::rounded(size, align) - 1;
        // The highest bit, but at least 6: below 128 bytes there is one step, 8.
        let log = (last | 64).ilog2();
        let class = 8 * log as usize + (last >> (log - 3)) - 48;
        // A free computes the same.
        let wants_16 = fatal::PANICS_WANT_16 && slot_bytes(class) == fatal::PANIC_BYTES;
        Some(Self((class + wants_16 as usize) as u8))
    }

    /// A nonzero size rounded up to its alignment; with alignment 1 it has the same class as the layout. The size is a
    /// layout's, so this does not overflow.
    #[inline(always)]
    pub const fn rounded(size: usize, align: usize) -> usize {
        (size + (size == 0) as usize + align - 1) & !(align - 1)
    }

    /// Every class, smallest first.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..CLASSES as u8).map(Self)
    }

    /// The class with this number.
    pub const fn from_index(index: usize) -> Option<Self> {
        if index < CLASSES { Some(Self(index as u8)) } else { None }
    }

    /// The class's number, less than [`CLASSES`].
    #[inline(always)]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    #[inline(always)]
    fn entry(self) -> &'static Entry {
        match TABLE.get(self.index()) {
            Some(entry) => entry,
            None => fatal::abort(
                "no such size class",
                Number::Count(self.index()),
                Number::Count(CLASSES),
            ),
        }
    }

    /// Bytes in a slot.
    #[inline(always)]
    pub fn bytes(self) -> usize {
        self.entry().bytes as usize
    }

    /// Whether the table of spans records which of its slots are free, rather than the slots themselves.
    #[inline(always)]
    pub fn is_flagged(self) -> bool {
        self.index() >= FIRST_FLAGGED
    }

    /// Pages in a span.
    pub fn pages(self) -> usize {
        usize::from(self.entry().pages)
    }

    /// Slots in a span.
    pub fn slots(self) -> u32 {
        u32::from(self.entry().slots)
    }

    /// Slots in a batch, the most that change hands at once; a magazine holds as many, and each spare as many again.
    #[inline]
    pub fn batch(self) -> u32 {
        u32::from(self.entry().batch)
    }

    /// The slot that begins `offset` bytes into its span; `None` if none does.
    ///
    /// A multiplication replaces the division: with r = ⌈2³² / b⌉ the error r · b − 2³² is less than b ≤ 2¹⁵, and an
    /// offset is less than 2¹⁷, so the error of the product stays below 2³² and its upper half is exactly the
    /// quotient.
    #[inline]
    pub fn slot_at(self, offset: usize) -> Option<u32> {
        let entry = self.entry();
        let slot = (offset as u64 * u64::from(entry.reciprocal)) >> 32;
        let exact = slot * u64::from(entry.bytes) == offset as u64;
        (exact && slot < u64::from(entry.slots)).then_some(slot as u32)
    }
}

// The bounds that `slot_at` relies on.
const _: () = assert!(MAX_SLOT_BYTES <= 1 << 15 && MAX_SPAN_PAGES * PAGE_BYTES <= 1 << 17);

#[cfg(test)]
mod tests {
    use super::*;

    /// For every size and alignment the slot is large enough, aligned, and of the smallest such class.
    #[test]
    fn a_slot_holds_its_layout_and_is_aligned() {
        for align in (0..=PAGE_SHIFT).map(|shift| 1 << shift) {
            for size in 0..=MAX_SLOT_BYTES {
                let class = SizeClass::of(size, align).unwrap();
                let rounded = size.max(1).next_multiple_of(align);
                assert!(class.bytes() >= rounded, "{size}, {align}");
                let same = SizeClass::of(SizeClass::rounded(size, align), 1);
                assert_eq!(same, Some(class), "{size}, {align}, and the size rounded up");
                assert_eq!(class.bytes() % align.max(8), 0, "{size}, {align}: {class:?}");
                if fatal::PANICS_WANT_16 && rounded.next_multiple_of(8) == fatal::PANIC_BYTES {
                    assert_eq!(class.bytes(), fatal::PANIC_BYTES.next_multiple_of(16));
                    continue;
                }
                let below = class.index().checked_sub(1).and_then(SizeClass::from_index);
                assert!(below.is_none_or(|below| below.bytes() < rounded), "{size}, {align}");
                let waste = class.bytes() - rounded;
                assert!(rounded < 64 || waste * 8 <= rounded, "{size}, {align}: {waste} wasted");
            }
            assert_eq!(SizeClass::of(MAX_SLOT_BYTES + 1, align), None);
        }
        assert_eq!(SizeClass::of(1, 2 * PAGE_BYTES), None);
        assert_eq!(SizeClass::of(usize::MAX, 1), None);
    }

    /// Every offset into every span.
    #[test]
    fn a_slot_is_found_by_its_first_byte_only() {
        for class in SizeClass::all() {
            let bytes = class.pages() * PAGE_BYTES;
            assert!(bytes - class.slots() as usize * class.bytes() <= bytes / 8, "{class:?}");
            assert!(class.slots() >= 4 && class.batch() >= 2, "{class:?}");
            for offset in 0..bytes {
                let slot = offset / class.bytes();
                let begins = offset % class.bytes() == 0 && slot < class.slots() as usize;
                assert_eq!(
                    class.slot_at(offset),
                    begins.then_some(slot as u32),
                    "{class:?} + {offset}"
                );
            }
        }
    }
}
