//! A class's own store: its spans with room, under its own lock.
//!
//! ```text
//!   class 16   lock
//!              with room ──▶ span ⇄ span ⇄ span        full spans are on no list
//!              spare ─────────────────────┘            at most one span with no slot out
//! ```
//!
//! Magazines come here for slots by the batch, and bring them back by the batch. Slots are taken from the first span
//! with room, listed ones before fresh ones; a span that has none left leaves the list, and comes back to its head with
//! the first slot that comes back. A span all of whose slots are back is kept if it is the only one, as the spare; the
//! next one is handed to the caller, who gives its pages to the heap of pages.
//!
//! **The store.** A thread that has a whole batch too many leaves it here as it is, and one that needs a batch takes it
//! as it is: two words change under the lock, and no slot is touched. So what goes round between threads, or up and
//! down in one, never comes to the spans. 4 MiB at the most; the scavenger, and who is out of memory, empty it.
//!
//! Only slots are touched under the lock, never the heap of pages: growing, freeing and system calls happen outside.
//!
//! Misuse ends the process with a message that names the address, where a batch comes back: an address outside every
//! span, one in a span of another class (freed with another layout than it was allocated with), one inside a slot, a
//! slot that is not out.

use core::ptr::{self, NonNull};

use crate::fatal;
use crate::metadata::offset;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Lock, Ordering, Table};
use crate::units::{PageIndex, PageRun};

use super::magazine::{Batch, List};
use super::size_class::{PAGE_SHIFT, SizeClass};
use super::span::{Link, Slots, Span};

/// Bytes that a class keeps in store at the most.
const STORE_BYTES: usize = 4 << 20;

/// All spans of a heap, and the memory they describe.
#[derive(Debug)]
pub struct Spans {
    table: Table<Span>,
    /// Entries prepared. I14: a span lies below this. Raised under the lock of the tables.
    pub(super) covered: AtomicUsize,
    /// The address of page 0.
    base: NonNull<u8>,
}

// SAFETY: an address, and a table of atomics. Slots are reached by whoever owns them, or under the lock of their class.
unsafe impl Send for Spans {}
// SAFETY: as above.
unsafe impl Sync for Spans {}

/// One class. All-zero bytes: no spans.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Central {
    pub(super) lock: Lock,
    /// The first span with room.
    first: Link,
    /// The span with room that has no slot out.
    spare: Link,
    spans: AtomicU32,
    /// Slots out of spans: the program's, the magazines' and those of the batches in store.
    out: AtomicU64,
    /// Batches taken and brought.
    visits: AtomicU64,
    /// Batches in store, strung together by the second words of their first slots, and how many.
    store: AtomicPtr<u8>,
    stored: AtomicU32,
}

/// What a class says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CentralState {
    /// Spans.
    pub spans: u32,
    /// Slots out of them, those in store too.
    pub out: u64,
    /// Slots of the batches in store.
    pub stored: u64,
    /// Batches taken and brought.
    pub visits: u64,
}

impl Spans {
    /// Spans over `table`, of the heap whose page 0 is at `base`.
    pub fn new(table: Table<Span>, base: NonNull<u8>) -> Self {
        Self {
            table,
            covered: AtomicUsize::new(0),
            base,
        }
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

    /// The slot, as an address.
    #[inline]
    fn slot(&self, class: SizeClass, span: PageIndex, slot: u32) -> *mut u8 {
        offset(self.base, (span.0 << PAGE_SHIFT) + slot as usize * class.bytes()).as_ptr()
    }

    /// The span and the number of the slot at `address`. Aborts if no slot of `class` begins there.
    #[inline]
    fn locate(&self, class: SizeClass, address: *mut u8) -> (PageIndex, u32) {
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

    /// The number of the slot at `address` if it is one of this span.
    #[inline]
    fn number_in(&self, class: SizeClass, span: PageIndex, address: *mut u8) -> Option<u32> {
        let offset = address.addr().wrapping_sub(self.slot(class, span, 0).addr());
        if offset < class.pages() << PAGE_SHIFT {
            class.slot_at(offset)
        } else {
            None
        }
    }

    /// Makes `run`, which is covered and nobody else's, a span. Under the lock of the class.
    fn enter(&self, class: SizeClass, run: PageRun) {
        for back in 0..run.pages().0 {
            self.entry(PageIndex(run.start().0 + back)).enter(class, back);
        }
    }

    /// Unmakes the span that begins at `span`. Under the lock of the class, so that a fork finds a span on the class's
    /// account or none at all.
    fn leave(&self, class: SizeClass, span: PageIndex) {
        (0..class.pages()).for_each(|back| self.entry(PageIndex(span.0 + back)).leave());
    }

    /// The link that stands in a listed slot.
    #[inline]
    fn link(&self, class: SizeClass, span: PageIndex, slot: u32) -> u32 {
        let slot = self.slot(class, span, slot);
        // SAFETY: a listed slot is the class's, whose lock is held, and `put_link` wrote to it. It lies in a span,
        // which is memory.
        unsafe { slot.cast::<u32>().read() }
    }
}

impl Central {
    /// A class without spans: the one of zeroed memory.
    pub fn new() -> Self {
        Self {
            lock: Lock::new(),
            first: Link::none(),
            spare: Link::none(),
            spans: AtomicU32::new(0),
            out: AtomicU64::new(0),
            visits: AtomicU64::new(0),
            store: AtomicPtr::new(ptr::null_mut()),
            stored: AtomicU32::new(0),
        }
    }

    /// Takes a batch out of the store. O(1).
    pub fn take_batch(&self) -> Option<Batch> {
        // Relaxed: a first look, without the lock; who comes too early goes to the spans.
        if self.stored.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let _guard = self.lock.lock();
        // Relaxed, here and below: under the lock.
        let head = NonNull::new(self.store.load(Ordering::Relaxed))?;
        // SAFETY: `store_batch` put it there and strung it, and it is in store no more.
        let (batch, behind) = unsafe {
            let batch = Batch::from_raw(head);
            let behind = batch.unstring();
            (batch, behind)
        };
        self.store.store(behind, Ordering::Relaxed);
        self.stored
            .store(self.stored.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
        add(&self.visits, 1);
        Some(batch)
    }

    /// Puts a batch of the class in store. O(1).
    ///
    /// # Errors
    /// The batch, if the store is full, or a slot has not two words.
    pub fn store_batch(&self, class: SizeClass, batch: Batch) -> Result<(), Batch> {
        if class.bytes() < 2 * size_of::<*mut u8>() {
            return Err(batch);
        }
        let most = STORE_BYTES / (class.batch() as usize * class.bytes());
        let _guard = self.lock.lock();
        // Relaxed, here and below: under the lock.
        let stored = self.stored.load(Ordering::Relaxed);
        if stored as usize >= most {
            return Err(batch);
        }
        // SAFETY: a slot has two words (checked).
        unsafe { batch.string(self.store.load(Ordering::Relaxed)) };
        self.store.store(batch.into_raw().as_ptr(), Ordering::Relaxed);
        self.stored.store(stored + 1, Ordering::Relaxed);
        add(&self.visits, 1);
        Ok(())
    }

    /// Takes up to `wanted` slots. Fewer, or none, if the spans have no more.
    pub fn take(&self, spans: &Spans, class: SizeClass, wanted: u32) -> List {
        let mut list = List::new();
        let _guard = self.lock.lock();
        while list.len() < wanted
            && let Some(span) = self.first.get()
        {
            let entry = spans.entry(span);
            let mut slots = entry.slots();
            if self.spare.get() == Some(span) {
                self.spare.set(None);
            }
            draw(spans, class, span, &mut slots, wanted, &mut list);
            entry.set_slots(slots);
            if slots.used >= class.slots() {
                self.unlink(spans, span);
            }
        }
        add(&self.out, u64::from(list.len()));
        add(&self.visits, 1);
        list
    }

    /// Makes `run`, which is covered and nobody else's, a span, and adds it.
    pub fn add(&self, spans: &Spans, class: SizeClass, run: PageRun) {
        let _guard = self.lock.lock();
        spans.enter(class, run);
        self.count_spans(1);
        self.link_first(spans, run.start());
    }

    /// Takes slots back. The first of the spans that are none any more, linked by [`Span::behind`]: their pages are the
    /// caller's.
    #[must_use]
    pub fn give(&self, spans: &Spans, class: SizeClass, mut list: List) -> Option<PageIndex> {
        let mut leaving = None;
        let count = list.len();
        let _guard = self.lock.lock();
        let mut next = list.pop();
        while let Some(mut slot) = next {
            let (span, mut number) = spans.locate(class, slot);
            let entry = spans.entry(span);
            let mut slots = entry.slots();
            let was_full = slots.used == class.slots();
            // Neighbours are often freed together.
            next = loop {
                let link = slots.list(span, number);
                // SAFETY: the slot was the list's and is the class's now; it is at least 8 bytes and aligned for them.
                unsafe { slot.cast::<u32>().write(link) };
                let Some(other) = list.pop() else { break None };
                match spans.number_in(class, span, other) {
                    Some(other_number) => (slot, number) = (other, other_number),
                    None => break Some(other),
                }
            };
            entry.set_slots(slots);
            if was_full {
                self.link_first(spans, span);
            }
            if slots.used == 0 && !self.keep_spare(span) {
                self.unlink(spans, span);
                self.count_spans(u32::MAX);
                spans.leave(class, span);
                entry.behind.set(leaving);
                leaving = Some(span);
            }
        }
        add(&self.out, u64::from(count).wrapping_neg());
        add(&self.visits, 1);
        leaving
    }

    /// Takes the spare out: a span no more, its pages are the caller's.
    #[must_use]
    pub fn take_spare(&self, spans: &Spans, class: SizeClass) -> Option<PageIndex> {
        let _guard = self.lock.lock();
        let span = self.spare.get()?;
        self.spare.set(None);
        self.unlink(spans, span);
        self.count_spans(u32::MAX);
        spans.leave(class, span);
        Some(span)
    }

    /// Counts spans more, or, wrapping, fewer. Under the lock.
    fn count_spans(&self, more: u32) {
        // Relaxed: written under the lock; for others a statistic.
        let spans = self.spans.load(Ordering::Relaxed).wrapping_add(more);
        self.spans.store(spans, Ordering::Relaxed);
    }

    /// Makes a span with no slot out the spare, if there is none.
    fn keep_spare(&self, span: PageIndex) -> bool {
        let keep = self.spare.get().is_none();
        if keep {
            self.spare.set(Some(span));
        }
        keep
    }

    fn link_first(&self, spans: &Spans, span: PageIndex) {
        let (entry, second) = (spans.entry(span), self.first.get());
        entry.before.set(None);
        entry.behind.set(second);
        if let Some(second) = second {
            spans.entry(second).before.set(Some(span));
        }
        self.first.set(Some(span));
    }

    fn unlink(&self, spans: &Spans, span: PageIndex) {
        let entry = spans.entry(span);
        let (before, behind) = (entry.before.get(), entry.behind.get());
        match before {
            Some(before) => spans.entry(before).behind.set(behind),
            None => self.first.set(behind),
        }
        if let Some(behind) = behind {
            spans.entry(behind).before.set(before);
        }
    }

    /// What the class says of itself, read from anywhere: a moment's picture.
    pub fn state(&self, class: SizeClass) -> CentralState {
        // Relaxed: statistics.
        CentralState {
            stored: u64::from(self.stored.load(Ordering::Relaxed)) * u64::from(class.batch()),
            spans: self.spans.load(Ordering::Relaxed),
            out: self.out.load(Ordering::Relaxed),
            visits: self.visits.load(Ordering::Relaxed),
        }
    }

    /// Walks the spans with room, under the lock; the second of `visit`'s arguments says whether it is the spare. For
    /// checks.
    pub fn for_each_with_room(&self, spans: &Spans, mut visit: impl FnMut(PageIndex, bool)) {
        let _guard = self.lock.lock();
        let spare = self.spare.get();
        let mut next = self.first.get();
        while let Some(span) = next {
            visit(span, Some(span) == spare);
            next = spans.entry(span).behind.get();
        }
    }
}

impl Spans {
    /// How many slots of the span are listed, following the links. For checks, under the lock of the class or with
    /// nobody about.
    pub fn listed(&self, class: SizeClass, span: PageIndex) -> u32 {
        let (mut slots, mut count) = (self.entry(span).slots(), 0);
        while count <= slots.fresh && slots.unlist(span, |slot| self.link(class, span, slot)).is_some() {
            count += 1;
        }
        count
    }
}

/// Takes slots out of one span until the list has `wanted`, or the span has no more: listed ones first, then fresh
/// ones.
#[inline]
fn draw(spans: &Spans, class: SizeClass, span: PageIndex, slots: &mut Slots, wanted: u32, list: &mut List) {
    while list.len() < wanted
        && let Some(slot) = slots.unlist(span, |slot| spans.link(class, span, slot))
    {
        // SAFETY: the slot was the class's and is the list's now.
        unsafe { list.push(spans.slot(class, span, slot)) };
    }
    // Backwards, so that they come off the list in the order of their addresses.
    for slot in slots.freshen(class, wanted - list.len()).rev() {
        // SAFETY: as above.
        unsafe { list.push(spans.slot(class, span, slot)) };
    }
}

/// Adds to a counter that only the holder of the lock writes.
fn add(counter: &AtomicU64, amount: u64) {
    // Relaxed: under the lock; for others a statistic.
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}
