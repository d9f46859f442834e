//! A class's own store: its spans with room, under its own lock.
//!
//! ```text
//!   class 16   lock
//!              with room ──▶ span ⇄ span ⇄ span        full spans are on no list
//!              spare ─────────────────────┘            at most one span with no slot out
//! ```
//!
//! Magazines come here for slots by the batch, and bring them back by the batch. Slots are taken from the first span
//! with room; a span that has none left leaves the list, and comes back to its head with the first slot that comes
//! back. A span all of whose slots are back is kept if it is the only one, as the spare; the
//! next one is handed to the caller, who gives its pages to the heap of pages. What lies between a span's slots may go
//! back to the source without it (`holes.rs`).
//!
//! **The store.** A thread that has a whole batch too many leaves it here as it is, and one that needs a batch takes it
//! as it is: without the lock (`store.rs`), and no slot is touched, only its rack. So what goes round between threads,
//! or up and down in one, never comes to the spans. 16 MiB at the most, and 32 of all classes. Once a second the
//! scavenger takes what nobody has needed since it last came; when the program is silent, or somebody is out of memory,
//! all of it.
//!
//! **Nobody waits for a thread that does not run**, when allocating or freeing. Who finds the lock held for longer than
//! a short critical section takes slots out of a fresh span, which is nobody's yet, and leaves that for whoever holds
//! the lock next: it has *arrived*, and is taken to the others before anything else is done under the lock, so before
//! its first slot can come back to it. Who brings a batch puts it in store, be that full.
//!
//! Only slots are touched under the lock, never the heap of pages: growing, freeing and system calls happen outside.
//!
//! Misuse ends the process with a message that names the address, where a batch comes back: an address outside every
//! span, one in a span of another class (freed with another layout than it was allocated with), one inside a slot, a
//! slot that is not out.

use crate::sync::{AtomicU32, AtomicU64, Guard, Lock, Ordering};
use crate::units::{PageIndex, PageRun};

use super::holes::{Claim, Grains};
use super::mark;
use super::rack::{Entry, Heads, Rack};
use super::size_class::SizeClass;
use super::span::{Link, Slots};
use super::spans::Spans;
use super::store::Store;

/// Batches in store that are looked through for a block that seems to be freed twice.
const BATCHES_LOOKED_AT: usize = 8;

/// Bytes that a class keeps in store at the most, and all classes together.
const STORE_BYTES: usize = 16 << 20;
const STORES_BYTES: usize = 32 << 20;

/// Bytes of a batch, its rack included.
fn batch_bytes(class: SizeClass) -> usize {
    class.batch() as usize * class.bytes() + Rack::bytes(class.batch())
}

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
    /// How often slots were taken, and brought.
    refills: AtomicU64,
    flushes: AtomicU64,
    /// The span that arrived last, plus one; they are linked by `Span::behind`.
    arrived: AtomicU32,
    /// The fewest batches there were in store since [`unneeded`](Self::unneeded) was last asked.
    fewest: AtomicU32,
    /// The most spans there ever were.
    peak: AtomicU32,
    /// How many spans became none.
    released: AtomicU64,
    /// Whole batches.
    store: Store,
}

/// What a class says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CentralState {
    /// Spans.
    pub spans: u32,
    /// The most there ever were.
    pub peak_spans: u32,
    /// How many became none: their pages are the caller's.
    pub released_spans: u64,
    /// Slots out of them, those in store too.
    pub out: u64,
    /// Slots of the batches in store.
    pub stored: u64,
    /// How often slots were taken.
    pub refills: u64,
    /// How often they were brought.
    pub flushes: u64,
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
            refills: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            arrived: AtomicU32::new(0),
            peak: AtomicU32::new(0),
            released: AtomicU64::new(0),
            store: Store::new(),
            fewest: AtomicU32::new(0),
        }
    }

    /// The lock, with no span arrived.
    fn hold(&self, spans: &Spans, class: SizeClass) -> Guard<'_> {
        let guard = self.lock.lock();
        self.receive(spans, class);
        guard
    }

    /// The same, if it is free now or soon.
    fn hold_soon(&self, spans: &Spans, class: SizeClass) -> Option<Guard<'_>> {
        let guard = self.lock.lock_soon()?;
        self.receive(spans, class);
        Some(guard)
    }

    /// Takes spans in that have arrived. Under the lock.
    #[inline]
    fn receive(&self, spans: &Spans, class: SizeClass) {
        // Relaxed: a first look. Who has a slot of such a span knows that it has arrived.
        if self.arrived.load(Ordering::Relaxed) != 0 {
            self.receive_all(spans, class);
        }
    }

    #[cold]
    fn receive_all(&self, spans: &Spans, class: SizeClass) {
        // Acquire: pairs with the release in `take_fresh`; the entries are as they were left.
        let mut next = page_of(self.arrived.swap(0, Ordering::Acquire));
        while let Some(span) = next {
            let entry = spans.entry(span);
            next = entry.behind.get();
            let slots = entry.slots();
            spans.enter(class, PageRun::known(span.0, class.pages()));
            self.count_spans(1);
            add(&self.out, u64::from(slots.used));
            if slots.used < class.slots() {
                self.link_first(spans, span);
            }
        }
    }

    /// Makes `run`, which is covered and nobody else's, a span, and takes up to `wanted` slots out of it into the rack,
    /// which has room for them, without the lock.
    ///
    /// It arrives before it is entered: so a fork finds a span on the class's account or none at all. Who receives it
    /// enters it, too.
    pub fn take_fresh(&self, spans: &Spans, class: SizeClass, run: PageRun, wanted: u32, rack: &mut Rack) {
        let span = run.start();
        let (entry, mut slots) = (spans.entry(span), Slots::default());
        // Before it arrives: who receives it may hand out slots at once.
        if class.is_flagged() {
            spans.flag_all(run);
        }
        draw(spans, class, span, &mut slots, wanted, rack);
        entry.set_slots(slots);
        count_one(&self.refills);
        // Relaxed: only compared.
        let mut first = self.arrived.load(Ordering::Relaxed);
        loop {
            entry.behind.set(page_of(first));
            let number = span.0 as u32 + 1;
            // Release: what the entry says is seen by who receives the span.
            match self
                .arrived
                .compare_exchange_weak(first, number, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => break,
                Err(now) => first = now,
            }
        }
        spans.enter(class, run);
    }

    /// Takes a batch out of the store, as `hint` says: threads with other hints seldom meet. O(1).
    pub fn take_batch(&self, spans: &Spans, class: SizeClass, hint: usize) -> Option<Rack> {
        let place = self.store.take(&Heads(spans), hint)?;
        count_one(&self.refills);
        // Relaxed: as in `store_batch`.
        spans.stored.fetch_sub(batch_bytes(class), Ordering::Relaxed);
        // Relaxed, twice: a mark that may come out too high where two write, and then a batch goes that was needed.
        let left = self.store.count();
        if left < self.fewest.load(Ordering::Relaxed) {
            self.fewest.store(left, Ordering::Relaxed);
        }
        Some(Heads(spans).full(place, class.batch()))
    }

    /// As many batches as there are in store, or as it takes: some may be in somebody's hand who is about to put them
    /// back.
    pub fn most_stored(&self, class: SizeClass) -> usize {
        (self.store.count() as usize).saturating_add(STORE_BYTES / batch_bytes(class))
    }

    /// Bytes in store, racks included.
    pub fn stored_bytes(&self, class: SizeClass) -> usize {
        self.store.count() as usize * batch_bytes(class)
    }

    /// How many batches lay in store all the time since this was last asked: tcmalloc's low-water mark.
    pub fn unneeded(&self) -> u32 {
        // Relaxed: as in `take_batch`.
        let stored = self.store.count();
        self.fewest.swap(stored, Ordering::Relaxed).min(stored)
    }

    /// Puts a batch of the class in store: a full rack. O(1).
    ///
    /// # Errors
    /// The batch, if the store is full.
    pub fn store_batch(&self, spans: &Spans, class: SizeClass, batch: Rack, hint: usize) -> Result<(), Rack> {
        let bytes = batch_bytes(class);
        // Relaxed: a sum, by which nobody is told anything.
        let all = spans.stored.load(Ordering::Relaxed);
        if self.store.count() as usize >= STORE_BYTES / bytes || all + bytes > STORES_BYTES {
            return Err(batch);
        }
        self.put(spans, class, batch, hint);
        Ok(())
    }

    fn put(&self, spans: &Spans, class: SizeClass, batch: Rack, hint: usize) {
        debug_assert_eq!(batch.len(), class.batch());
        count_one(&self.flushes);
        // Relaxed: as in `store_batch`.
        spans.stored.fetch_add(batch_bytes(class), Ordering::Relaxed);
        self.store.put(&Heads(spans), hint, spans.place_of(batch.into_memory()));
    }

    /// Whether the slot is in one of the batches that went into the lane of `hint` last. O(their slots).
    pub fn has_stored_lately(&self, spans: &Spans, class: SizeClass, slot: Entry, hint: usize) -> bool {
        let heads = Heads(spans);
        self.store.any_of_last(&heads, hint, BATCHES_LOOKED_AT, |place| {
            // A batch of the store, which is the caller's for the moment; it is only looked at.
            heads.slots(place, class.batch()).contains(&slot)
        })
    }

    /// Whether the slot is home, in its span. O(slots of the span). `false` if the lock is held for long.
    pub fn has_at_home(&self, spans: &Spans, class: SizeClass, span: PageIndex, slot: u32) -> bool {
        let Some(_guard) = self.hold_soon(spans, class) else {
            return false;
        };
        let slots = spans.entry(span).slots();
        slots.is_home(class, span, slot, |slot| spans.link(class, span, slot))
    }

    /// Takes up to `wanted` slots into the rack, which has room for them. Fewer, or none, if the spans have no more.
    /// How many grains that were holes are none any more, of which the caller is to tell the heap; `None` if nothing
    /// could be seen, as the lock is held for long.
    pub fn take(&self, spans: &Spans, class: SizeClass, wanted: u32, rack: &mut Rack) -> Option<u32> {
        let _guard = self.hold_soon(spans, class)?;
        Some(self.take_held(spans, class, wanted, rack))
    }

    /// The same, however long that takes.
    #[must_use]
    pub fn take_at_last(&self, spans: &Spans, class: SizeClass, wanted: u32, rack: &mut Rack) -> u32 {
        let _guard = self.hold(spans, class);
        self.take_held(spans, class, wanted, rack)
    }

    /// Under the lock.
    fn take_held(&self, spans: &Spans, class: SizeClass, wanted: u32, rack: &mut Rack) -> u32 {
        let (mut left, mut filled) = (wanted, 0);
        while left > 0
            && let Some(span) = self.first.get()
        {
            let entry = spans.entry(span);
            let mut slots = entry.slots();
            if self.spare.get() == Some(span) {
                self.spare.set(None);
            }
            left -= draw(spans, class, span, &mut slots, left, rack);
            if slots.holes(class) != 0 {
                filled += slots.fill(class, span, spans.granule);
            }
            entry.set_slots(slots);
            if slots.used >= class.slots() {
                self.unlink(spans, span);
            }
        }
        add(&self.out, u64::from(wanted - left));
        count_one(&self.refills);
        filled
    }

    /// Takes slots back, all of the rack's. The first of the spans that are none any more, linked by `Span::behind`:
    /// their pages are the caller's, and their entries say which grains are holes.
    #[must_use]
    pub fn give(&self, spans: &Spans, class: SizeClass, rack: &mut Rack) -> Option<PageIndex> {
        let _guard = self.hold(spans, class);
        self.give_held(spans, class, rack)
    }

    /// The same, if the lock is not held for long.
    #[must_use]
    pub fn give_soon(&self, spans: &Spans, class: SizeClass, rack: &mut Rack) -> Option<Option<PageIndex>> {
        let _guard = self.hold_soon(spans, class)?;
        Some(self.give_held(spans, class, rack))
    }

    /// Takes a batch back that the store did not take, as [`give`](Self::give) does, and the rack is left; if the lock
    /// is held for long, into the store after all: `None`.
    #[must_use]
    pub fn give_batch(
        &self,
        spans: &Spans,
        class: SizeClass,
        batch: Rack,
        hint: usize,
    ) -> Option<(Rack, Option<PageIndex>)> {
        let mut batch = batch;
        if let Some(leaving) = self.give_soon(spans, class, &mut batch) {
            return Some((batch, leaving));
        }
        self.put(spans, class, batch, hint);
        None
    }

    /// Under the lock.
    fn give_held(&self, spans: &Spans, class: SizeClass, rack: &mut Rack) -> Option<PageIndex> {
        let mut leaving = None;
        let count = rack.len();
        let mut next = rack.pop();
        while let Some(mut slot) = next {
            let (span, mut number) = spans.locate(class, slot);
            let entry = spans.entry(span);
            let mut slots = entry.slots();
            let was_full = slots.used == class.slots();
            // Neighbours are often freed together.
            next = loop {
                if let Some(link) = slots.put(class, span, number) {
                    // SAFETY: the slot was the rack's and is the class's now; it is at least 8 bytes and aligned for
                    // them.
                    unsafe { mark::link_number(slot, link) };
                }
                let Some(other) = rack.pop() else { break None };
                match spans.number_in(class, span, other) {
                    Some(other_number) => (slot, number) = (other, other_number),
                    None => break Some(other),
                }
            };
            if self.came_home(spans, class, span, slots, was_full) {
                entry.behind.set(leaving);
                leaving = Some(span);
            }
        }
        add(&self.out, u64::from(count).wrapping_neg());
        count_one(&self.flushes);
        leaving
    }

    /// Writes back what a span's slots are, of which some have come home. Whether it is a span no more. Under the lock.
    #[inline]
    fn came_home(&self, spans: &Spans, class: SizeClass, span: PageIndex, slots: Slots, was_full: bool) -> bool {
        spans.entry(span).set_slots(slots);
        if was_full {
            self.link_first(spans, span);
        }
        let leaves = slots.used == 0 && !self.keep_spare(span);
        if leaves {
            self.release(spans, class, span);
        }
        leaves
    }

    /// Takes slots out of a span of the class, if it is one, that reach into grains which may go. Not of the spare,
    /// nor, where `one_stays`, of the only one with room. Not if the lock is held for long.
    pub fn claim(&self, spans: &Spans, class: SizeClass, span: PageIndex, one_stays: bool) -> Option<Claim> {
        let _guard = self.hold_soon(spans, class)?;
        let entry = spans.entry(span);
        if entry.tag() != Some((class, 0)) || self.spare.get() == Some(span) {
            return None;
        }
        // It may have arrived since the lock was held: it is entered behind that.
        self.receive(spans, class);
        let is_only = self.first.get() == Some(span) && entry.behind.get().is_none();
        if one_stays && is_only {
            return None;
        }
        let mut slots = entry.slots();
        let claim = slots.claim(class, span, spans.granule)?;
        entry.set_slots(slots);
        if slots.used == class.slots() {
            self.unlink(spans, span);
        }
        add(&self.out, claim.slots.count_ones().into());
        Some(claim)
    }

    /// Takes them home again, of which the grains `gone` are holes now: the new ones are `counted` under the lock. The
    /// span, if it is one no more: its pages are the caller's.
    #[must_use]
    pub fn end_claim(
        &self,
        spans: &Spans,
        class: SizeClass,
        span: PageIndex,
        (claim, gone): (Claim, Grains),
        counted: impl FnOnce(u32),
    ) -> Option<PageIndex> {
        let _guard = self.hold(spans, class);
        let entry = spans.entry(span);
        let mut slots = entry.slots();
        let was_full = slots.used == class.slots();
        counted(slots.end_claim(class, claim, gone));
        add(&self.out, u64::from(claim.slots.count_ones()).wrapping_neg());
        let leaves = self.came_home(spans, class, span, slots, was_full);
        leaves.then(|| {
            entry.behind.set(None);
            span
        })
    }

    /// Takes the spare out: a span no more, its pages are the caller's.
    #[must_use]
    pub fn take_spare(&self, spans: &Spans, class: SizeClass) -> Option<PageIndex> {
        let _guard = self.hold(spans, class);
        let span = self.spare.get()?;
        self.spare.set(None);
        self.release(spans, class, span);
        Some(span)
    }

    /// Unmakes a span with room that has no slot out. Under the lock.
    fn release(&self, spans: &Spans, class: SizeClass, span: PageIndex) {
        self.unlink(spans, span);
        self.count_spans(u32::MAX);
        add(&self.released, 1);
        spans.leave(class, span);
    }

    /// Counts spans more, or, wrapping, fewer. Under the lock.
    fn count_spans(&self, more: u32) {
        // Relaxed: written under the lock; for others a statistic.
        let spans = self.spans.load(Ordering::Relaxed).wrapping_add(more);
        self.spans.store(spans, Ordering::Relaxed);
        if spans > self.peak.load(Ordering::Relaxed) {
            self.peak.store(spans, Ordering::Relaxed);
        }
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
    pub fn state(&self, spans: &Spans, class: SizeClass) -> CentralState {
        // Relaxed: as in `receive`.
        if self.arrived.load(Ordering::Relaxed) != 0 {
            drop(self.hold_soon(spans, class));
        }
        // Relaxed: statistics.
        CentralState {
            stored: u64::from(self.store.count()) * u64::from(class.batch()),
            spans: self.spans.load(Ordering::Relaxed),
            peak_spans: self.peak.load(Ordering::Relaxed),
            released_spans: self.released.load(Ordering::Relaxed),
            out: self.out.load(Ordering::Relaxed),
            refills: self.refills.load(Ordering::Relaxed),
            flushes: self.flushes.load(Ordering::Relaxed),
        }
    }

    /// Walks the spans with room, under the lock; the second of `visit`'s arguments says whether it is the spare. For
    /// checks.
    pub fn for_each_with_room(&self, spans: &Spans, class: SizeClass, mut visit: impl FnMut(PageIndex, bool)) {
        let _guard = self.hold(spans, class);
        let spare = self.spare.get();
        let mut next = self.first.get();
        while let Some(span) = next {
            visit(span, Some(span) == spare);
            next = spans.entry(span).behind.get();
        }
    }

    /// How many slots of the span are out, and how many home, if that can be told; under the lock. `None` if it is no
    /// span of the class any more. For checks.
    pub fn count(&self, spans: &Spans, class: SizeClass, span: PageIndex) -> Option<(u32, Option<u32>)> {
        let _guard = self.hold(spans, class);
        let entry = spans.entry(span);
        (entry.tag() == Some((class, 0))).then(|| (entry.slots().used, spans.count_home(class, span)))
    }
}

/// The page that a number says, plus one.
fn page_of(number: u32) -> Option<PageIndex> {
    (number as usize).checked_sub(1).map(PageIndex)
}

/// Takes up to `wanted` slots out of one span into the rack: how many.
#[inline]
fn draw(spans: &Spans, class: SizeClass, span: PageIndex, slots: &mut Slots, wanted: u32, rack: &mut Rack) -> u32 {
    let (next, before) = (|slot| spans.link(class, span, slot), rack.len());
    let (first, bytes) = (spans.slot(class, span, 0), class.bytes());
    slots.draw(class, span, wanted, next, |slot| {
        // SAFETY: the slot was the class's and is the rack's now.
        unsafe { rack.push(first.wrapping_add(slot as usize * bytes)) };
    });
    rack.len() - before
}

/// Counts one more, also without the lock.
fn count_one(counter: &AtomicU64) {
    // Relaxed: a statistic.
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Adds to a counter that the holder of the lock writes.
fn add(counter: &AtomicU64, amount: u64) {
    // Relaxed: under the lock; for others a statistic.
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}
