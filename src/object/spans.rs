//! All spans of a heap: from an address to the span and the slot, and back. And the words by which batches in store
//! hang together.
//!
//! ```text
//!   address ── − base, >> 12 ──▶ page ── table ──▶ class, pages back ──▶ span ── × reciprocal ──▶ slot
//! ```
//!
//! Nothing here is read from a slot that the program may have: only from those in a batch, or on a list, whose holder
//! asks.

use core::ptr::{self, NonNull};

use crate::fatal;
use crate::metadata::offset;
use crate::sync::{AtomicUsize, Ordering, Table};
use crate::units::{PageIndex, PageRun};

use super::length::Length;
use super::magazine::Batch;
use super::mark;
use super::size_class::{PAGE_SHIFT, SizeClass};
use super::span::Span;
use super::store::{BatchLinks, BatchPlace, Chain};

/// All spans of a heap, and the memory they describe.
#[derive(Debug)]
pub struct Spans {
    table: Table<Span>,
    /// Entries prepared. I14: a span lies below this. Raised under the lock of the tables.
    pub(super) covered: AtomicUsize,
    /// Bytes in the stores of all classes.
    pub(super) stored: AtomicUsize,
    /// The address of page 0.
    base: NonNull<u8>,
}

// SAFETY: an address, and a table of atomics. Slots are reached by whoever owns them, or under the lock of their class.
unsafe impl Send for Spans {}
// SAFETY: as above.
unsafe impl Sync for Spans {}

impl Spans {
    /// Spans over `table`, of the heap whose page 0 is at `base`.
    pub fn new(table: Table<Span>, base: NonNull<u8>) -> Self {
        Self {
            table,
            covered: AtomicUsize::new(0),
            stored: AtomicUsize::new(0),
            base,
        }
    }

    /// Spans of so many pages, none of which is memory.
    #[cfg(test)]
    pub fn for_test(pages: usize) -> Self {
        let entries: std::boxed::Box<[Span]> = (0..pages).map(|_| Span::vacant()).collect();
        // SAFETY: vacant entries, which are zero bytes; nobody else has them, and they are never freed.
        let table = unsafe { Table::new(NonNull::from(std::boxed::Box::leak(entries)).cast(), pages) };
        let spans = Self::new(table, NonNull::dangling());
        // Relaxed: nobody else has it.
        spans.covered.store(pages, Ordering::Relaxed);
        spans
    }

    /// How many pages the table reaches now.
    #[inline]
    pub fn covered(&self) -> usize {
        // Acquire: pairs with the release where it is raised; the entries below are prepared.
        self.covered.load(Ordering::Acquire)
    }

    /// The entry of a page that is covered.
    #[inline]
    pub fn entry(&self, page: PageIndex) -> &Span {
        self.table.get(page.0)
    }

    /// The same of any page, if the table has it: for who must not panic, and asks [`covered`](Self::covered) himself.
    #[inline(always)]
    pub fn entry_if(&self, page: PageIndex) -> Option<&Span> {
        (page.0 < self.table.len()).then(|| self.table.get(page.0))
    }

    /// The slot, as an address.
    #[inline]
    pub(super) fn slot(&self, class: SizeClass, span: PageIndex, slot: u32) -> *mut u8 {
        offset(self.base, (span.0 << PAGE_SHIFT) + slot as usize * class.bytes()).as_ptr()
    }

    /// Where the batch is that begins with this slot: slots are aligned to 8 bytes, and 2³² pages are 2⁴⁵ bytes.
    pub(super) fn place_of(&self, slot: NonNull<u8>) -> BatchPlace {
        let distance = slot.addr().get() - self.base.addr().get();
        BatchPlace::new(distance as u64 / 8 + 1)
    }

    /// The first slot of the batch there.
    pub(super) fn slot_at(&self, place: BatchPlace) -> NonNull<u8> {
        offset(self.base, (place.number() - 1) as usize * 8)
    }

    /// The span and the number of the slot of `class` that begins at `address`, if one does.
    pub fn slot_of(&self, class: SizeClass, address: usize) -> Option<(PageIndex, u32)> {
        let distance = address.wrapping_sub(self.base.addr().get());
        let page = distance >> PAGE_SHIFT;
        if page >= self.covered() {
            return None;
        }
        let (tagged, back) = self.entry(PageIndex(page)).tag()?;
        let span = page.checked_sub(back).filter(|_| tagged == class)?;
        Some((PageIndex(span), class.slot_at(distance - (span << PAGE_SHIFT))?))
    }

    /// The span and the number of the slot at `address`. Aborts if no slot of `class` begins there.
    #[inline]
    pub(super) fn locate(&self, class: SizeClass, address: *mut u8) -> (PageIndex, u32) {
        let distance = address.addr().wrapping_sub(self.base.addr().get());
        let page = distance >> PAGE_SHIFT;
        if page >= self.covered() {
            fatal::abort(
                "a block was freed that is not of this heap; its address, the heap's",
                address.addr(),
                self.base.addr().get(),
            );
        }
        let Some((tagged, back)) = self.entry(PageIndex(page)).tag() else {
            fatal::abort(
                "a block was freed that is not allocated, or with the wrong layout; its address, the class",
                address.addr(),
                class.bytes(),
            );
        };
        if tagged != class {
            fatal::abort(
                "a block was freed with the wrong layout; its address, its size class",
                address.addr(),
                tagged.bytes(),
            );
        }
        let span = page.saturating_sub(back);
        match class.slot_at(distance - (span << PAGE_SHIFT)) {
            Some(slot) => (PageIndex(span), slot),
            None => fatal::abort(
                "a block was freed by an address inside it; the address, its size class",
                address.addr(),
                class.bytes(),
            ),
        }
    }

    /// The first page of the large block of so many pages that begins at `memory` and is the program's, if there is
    /// one.
    pub fn large_at(&self, memory: NonNull<u8>, pages: usize) -> Option<PageIndex> {
        let page = self.page_at(memory)?;
        self.entry(page).is_large(pages).then_some(page)
    }

    /// The same of one that may lie on a shelf, with its entry.
    #[inline(always)]
    pub fn large_of(&self, memory: NonNull<u8>, length: Length) -> Option<(PageIndex, &Span)> {
        let page = self.page_at(memory)?;
        let entry = self.entry_if(page)?;
        entry.is_large_of(length).then_some((page, entry))
    }

    /// The page that begins there, if one does that is covered.
    #[inline(always)]
    fn page_at(&self, memory: NonNull<u8>) -> Option<PageIndex> {
        let distance = memory.addr().get().wrapping_sub(self.base.addr().get());
        // Where it is not a whole number of pages the rest makes it a number that no page has.
        let page = PageIndex(distance.rotate_right(PAGE_SHIFT));
        (page.0 < self.covered()).then_some(page)
    }

    /// The address of a page.
    #[inline(always)]
    pub fn address(&self, page: PageIndex) -> NonNull<u8> {
        offset(self.base, page.0 << PAGE_SHIFT)
    }

    /// The number of the slot at `address` if it is one of this span.
    #[inline]
    pub(super) fn number_in(&self, class: SizeClass, span: PageIndex, address: *mut u8) -> Option<u32> {
        let offset = address.addr().wrapping_sub(self.slot(class, span, 0).addr());
        if offset < class.pages() << PAGE_SHIFT {
            class.slot_at(offset)
        } else {
            None
        }
    }

    /// Says of each page of `run`, which has arrived, which span it is in.
    pub(super) fn enter(&self, class: SizeClass, run: PageRun) {
        for back in 0..run.pages().0 {
            self.entry(PageIndex(run.start().0 + back)).enter(class, back);
        }
    }

    /// Unmakes the span that begins at `span`. Under the lock of the class, so that a fork finds a span on the class's
    /// account or none at all.
    pub(super) fn leave(&self, class: SizeClass, span: PageIndex) {
        (0..class.pages()).for_each(|back| self.entry(PageIndex(span.0 + back)).leave());
    }

    /// The link that stands in a listed slot.
    #[inline]
    pub(super) fn link(&self, class: SizeClass, span: PageIndex, slot: u32) -> u32 {
        let slot = self.slot(class, span, slot);
        // SAFETY: a listed slot is the class's, whose lock is held, and `give` wrote to it. It lies in a span, which is
        // memory.
        unsafe { mark::number(slot) }
    }
}

impl Spans {
    /// How many slots of the span are home; `None` if what is written down cannot be. For checks, under the lock of the
    /// class or with nobody about.
    pub fn count_home(&self, class: SizeClass, span: PageIndex) -> Option<u32> {
        let slots = self.entry(span).slots();
        slots.count_home(class, span, |slot| self.link(class, span, slot))
    }
}

/// The words by which the batches of a class hang together: the second word of a batch's first slot. Where slots are
/// one word long it is the word of its last slot, so that all of them are one string, which is cut again when a batch
/// is taken out: twice 128 steps for 128 slots.
#[derive(Debug)]
pub(super) struct Strings<'a> {
    pub(super) spans: &'a Spans,
    pub(super) class: SizeClass,
}

impl Strings<'_> {
    fn is_wide(&self) -> bool {
        self.class.bytes() >= 2 * size_of::<u64>()
    }

    /// The batch there.
    pub(super) fn batch(&self, place: BatchPlace) -> Batch {
        // SAFETY: places are made of batches, and whoever asks has the batch.
        unsafe { Batch::from_raw(self.spans.slot_at(place)) }
    }

    /// The batch there, which is in store no more.
    pub(super) fn cut(&self, place: BatchPlace) -> Batch {
        let batch = self.batch(place);
        if !self.is_wide() {
            batch.string_last(self.class, ptr::null_mut());
        }
        batch
    }
}

impl BatchLinks for Strings<'_> {
    fn read(&self, place: BatchPlace) -> Chain {
        if self.is_wide() {
            // SAFETY: the caller has the batch, whose first slot has two words, of which the list uses the first.
            return Chain::from_bits(unsafe { self.spans.slot_at(place).cast::<u64>().add(1).read() });
        }
        let behind = NonNull::new(self.batch(place).behind_last(self.class));
        Chain::from(behind.map(|slot| self.spans.place_of(slot)))
    }

    fn write(&self, place: BatchPlace, behind: Chain) {
        if self.is_wide() {
            // SAFETY: as in `read`.
            unsafe { self.spans.slot_at(place).cast::<u64>().add(1).write(behind.into_bits()) };
            return;
        }
        let behind = behind
            .first()
            .map_or(ptr::null_mut(), |first| self.spans.slot_at(first).as_ptr());
        self.batch(place).string_last(self.class, behind);
    }
}
