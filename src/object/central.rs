//! A class's central part: its spans with room, under the class lock.
//!
//! ```text
//!   class 16   lock
//!              with room ──▶ span ⇄ span ⇄ span        full spans are on no list
//!              spare ─────────────────────┘            at most one span with no slot out
//! ```
//!
//! Magazines fetch and return slots here in batches. Slots are taken from the first span with room. A span that runs
//! out leaves the list, and returns to its head when one of its slots comes back. A span that has all its slots back
//! is kept as the spare if the class has none; otherwise the caller gets its pages and returns them to the heap of
//! pages. Memory between a span's live slots may go back to the source before that (`holes.rs`).
//!
//! **Allocations and frees hardly ever wait for a thread that is not running.** A thread that needs slots and finds the
//! lock held for longer than a short critical section takes them from a fresh span, which no other thread knows yet,
//! and queues the span for the next holder of the lock: the span has *arrived*. That holder links it before it does
//! anything else, so before the first slot can come back to it. A thread that finds the lock held while it brings a
//! batch stores the batch, even if the store is full. But if that has twice what it may have, or if the thread has no
//! room for more and may not have more (`hoard.rs`), it waits first, four milliseconds at most: else threads that drop
//! what others have allocated fill the store, or their magazines, without end. And it waits for as long as it takes
//! where there is no memory for a rack or a span, and where stores and magazines are emptied: above the soft limit,
//! before a refusal, and in a flush.
//!
//! Only slots are handled under the lock, never the heap of pages: growing, freeing and system calls happen outside.
//!
//! Misuse is detected when a batch comes back, and ends the process with a message that names the address: an address
//! outside every span, one in a span of another class (freed with another layout than it was allocated with), one
//! inside a slot, a slot that is not out.

use crate::fatal::{self, Number};
use crate::guard;
use crate::sync::{AtomicU32, AtomicU64, Guard, Lock, Ordering};
use crate::units::{PageIndex, PageRun};

use super::holes::{Claim, Grains};
use super::link::Link;
use super::rack::Rack;
use super::size_class::SizeClass;
use super::span::Slots;
use super::spans::Spans;

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
    /// Slots out of their spans: in use, in magazines, and in stored batches.
    out: AtomicU64,
    /// How often slots were taken out of spans, and returned to them.
    refills: AtomicU64,
    flushes: AtomicU64,
    /// The span that arrived last, plus one; `Span::behind` links the others.
    arrived: AtomicU32,
    /// The most spans there ever were.
    peak: AtomicU32,
    /// How many spans were dissolved.
    released: AtomicU64,
}

/// How many milliseconds a thread waits for a class's lock where the store has far too much, or the hoard nothing.
const WAITS: u32 = 4;

/// A class's figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CentralState {
    /// Spans.
    pub spans: u32,
    /// The most spans there ever were.
    pub peak_spans: u32,
    /// How many were dissolved: their pages went to the caller.
    pub released_spans: u64,
    /// Slots out of their spans, stored ones included.
    pub out: u64,
    /// Slots of the batches in the store.
    pub stored: u64,
    /// How often slots were taken.
    pub refills: u64,
    /// How often slots were returned.
    pub flushes: u64,
}

impl Central {
    /// A class without spans, as in zeroed memory.
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
        }
    }

    /// Takes the lock and links the spans that have arrived.
    fn hold(&self, spans: &Spans, class: SizeClass) -> Guard<'_> {
        let guard = self.lock.lock();
        self.receive(spans, class);
        guard
    }

    /// Like [`hold`](Self::hold), if the lock is free now or soon.
    fn hold_soon(&self, spans: &Spans, class: SizeClass) -> Option<Guard<'_>> {
        let guard = self.lock.lock_soon()?;
        self.receive(spans, class);
        Some(guard)
    }

    /// The same, if the lock is free within so many milliseconds.
    fn hold_within(&self, spans: &Spans, class: SizeClass, waits: u32) -> Option<Guard<'_>> {
        let guard = self.lock.lock_within(waits)?;
        self.receive(spans, class);
        Some(guard)
    }

    /// Links the spans that have arrived. Under the lock.
    #[inline]
    fn receive(&self, spans: &Spans, class: SizeClass) {
        // Relaxed: a first look. A thread that has a slot of such a span knows that the span has arrived.
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
            let slots = spans.slots(class, span);
            spans.enter(class, PageRun::known(span.0, class.pages()));
            self.count_spans(1);
            add(&self.out, u64::from(slots.used));
            if slots.used < class.slots() {
                self.link_first(spans, span);
            }
        }
    }

    /// Makes a span of `run`, which is covered and not yet shared, and takes up to `wanted` slots from it into the
    /// rack, which has room for them. Does not take the lock.
    ///
    /// The span arrives before its pages are entered, so that a fork finds it either on the class's account or not at
    /// all. The thread that receives it enters it, too.
    pub fn take_fresh(&self, spans: &Spans, class: SizeClass, run: PageRun, wanted: u32, rack: &mut Rack) {
        let span = run.start();
        let (entry, mut slots) = (spans.entry(span), Slots::new(spans.row(class, span)));
        // Before it arrives: the receiver may hand out its slots at once.
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
            // Release: the thread that receives the span sees what its entry says; partner: `receive_all`.
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

    /// Whether the slot is home in its span. `false` if the lock is held for long.
    pub fn has_at_home(&self, spans: &Spans, class: SizeClass, span: PageIndex, slot: u32) -> bool {
        let Some(_guard) = self.hold_soon(spans, class) else {
            return false;
        };
        spans.slots(class, span).is_home(slot)
    }

    /// Takes up to `wanted` slots into the rack, which has room for them; fewer, or none, if the spans have no more.
    /// Returns how many grains stopped being holes, which the caller must report to the heap; `None` if the lock is
    /// held for long.
    pub fn take(&self, spans: &Spans, class: SizeClass, wanted: u32, rack: &mut Rack) -> Option<u32> {
        let _guard = self.hold_soon(spans, class)?;
        Some(self.take_held(spans, class, wanted, rack))
    }

    /// Like [`take`](Self::take), however long the lock takes.
    #[must_use]
    pub fn take_at_last(&self, spans: &Spans, class: SizeClass, wanted: u32, rack: &mut Rack) -> u32 {
        let _guard = self.hold(spans, class);
        self.take_held(spans, class, wanted, rack)
    }

    /// Does the work of `take`, under the lock.
    fn take_held(&self, spans: &Spans, class: SizeClass, wanted: u32, rack: &mut Rack) -> u32 {
        let (mut left, mut filled) = (wanted, 0);
        while left > 0
            && let Some(span) = self.first.get()
        {
            let entry = spans.entry(span);
            let mut slots = spans.slots(class, span);
            if self.spare.get() == Some(span) {
                self.spare.set(None);
            }
            let drawn = draw(spans, class, span, &mut slots, left, rack);
            if drawn == 0 {
                fatal::abort(
                    "a span's map says that no slot is there; its address, its size class",
                    Number::Address(spans.address(span).addr().get()),
                    Number::Count(class.bytes()),
                );
            }
            left -= drawn;
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

    /// Returns all slots of the rack to their spans. Returns the first of the spans that this dissolved, linked by
    /// `Span::behind`: their pages are the caller's, and their entries say which grains are holes.
    #[must_use]
    pub fn give(&self, spans: &Spans, class: SizeClass, rack: &mut Rack) -> Option<PageIndex> {
        spans.prefetch(class, rack.slots());
        let _guard = self.hold(spans, class);
        self.give_held(spans, class, rack)
    }

    /// Like [`give`](Self::give), unless the lock is held for long.
    #[must_use]
    pub fn give_soon(&self, spans: &Spans, class: SizeClass, rack: &mut Rack) -> Option<Option<PageIndex>> {
        spans.prefetch(class, rack.slots());
        let _guard = self.hold_soon(spans, class)?;
        Some(self.give_held(spans, class, rack))
    }

    /// Like [`give`](Self::give), unless the lock is held for some milliseconds: the holder may have no processor.
    #[must_use]
    pub fn give_within(&self, spans: &Spans, class: SizeClass, rack: &mut Rack) -> Option<Option<PageIndex>> {
        spans.prefetch(class, rack.slots());
        let wait = || self.hold_within(spans, class, WAITS);
        let _guard = self.hold_soon(spans, class).or_else(wait)?;
        Some(self.give_held(spans, class, rack))
    }

    /// Returns a batch that the store refused to the spans, as [`give`](Self::give) does, and hands back the empty
    /// rack. If the lock is held for long, stores the batch after all and returns `None`. Where the store has far too
    /// much already, the thread waits for the lock first, some milliseconds at most: the holder may have no processor,
    /// and threads that free all that others allocated would fill the store without end.
    #[must_use]
    pub fn give_batch(
        &self,
        spans: &Spans,
        class: SizeClass,
        batch: Rack,
        hint: usize,
    ) -> Option<(Rack, Option<PageIndex>)> {
        let mut batch = batch;
        spans.prefetch(class, batch.slots());
        let wait = || {
            spans
                .is_overfull(class)
                .then(|| self.hold_within(spans, class, WAITS))?
        };
        if let Some(_guard) = self.hold_soon(spans, class).or_else(wait) {
            let leaving = self.give_held(spans, class, &mut batch);
            return Some((batch, leaving));
        }
        spans.store_batch_anyway(class, batch, hint);
        None
    }

    /// Does the work of `give`, under the lock.
    fn give_held(&self, spans: &Spans, class: SizeClass, rack: &mut Rack) -> Option<PageIndex> {
        let mut leaving = None;
        let count = rack.len();
        let mut next = rack.pop();
        while let Some(mut slot) = next {
            let (span, mut number) = spans.locate(class, slot);
            let (entry, row) = (spans.entry(span), spans.row(class, span));
            let before = entry.used();
            let (mut used, mut word) = (before, entry.word_of(row, number));
            // Neighbours are often freed together.
            next = loop {
                if !word.is_of(number) {
                    core::mem::replace(&mut word, entry.word_of(row, number)).close();
                }
                word.take_home(class, slot.addr(), number);
                used = used.wrapping_sub(1);
                let Some(other) = rack.pop() else { break None };
                match spans.number_in(class, span, other) {
                    Some(other_number) => (slot, number) = (other, other_number),
                    None => break Some(other),
                }
            };
            word.close();
            entry.set_used(used);
            if self.came_home(spans, class, span, (before, used)) {
                entry.behind.set(leaving);
                leaving = Some(span);
            }
        }
        add(&self.out, u64::from(count).wrapping_neg());
        count_one(&self.flushes);
        leaving
    }

    /// After slots have come home to a span, of whose slots `before` were out and `used` are. Returns whether that
    /// dissolved it. Under the lock.
    #[inline]
    fn came_home(&self, spans: &Spans, class: SizeClass, span: PageIndex, (before, used): (u32, u32)) -> bool {
        if before == class.slots() {
            self.link_first(spans, span);
        }
        let leaves = used == 0 && !self.keep_spare(span);
        if leaves {
            self.release(spans, class, span);
        }
        leaves
    }

    /// Takes those slots out of a span, if it is one of the class, that reach into grains which may go. Refuses the
    /// spare and, if `one_stays`, the only span with room; also if the lock is held for long.
    pub fn claim(&self, spans: &Spans, class: SizeClass, span: PageIndex, one_stays: bool) -> Option<Claim> {
        let _guard = self.hold_soon(spans, class)?;
        let entry = spans.entry(span);
        if entry.tag() != Some((class, 0)) || self.spare.get() == Some(span) {
            return None;
        }
        // It may have arrived while the lock was free: a span is entered after it arrives.
        self.receive(spans, class);
        let is_only = self.first.get() == Some(span) && entry.behind.get().is_none();
        if one_stays && is_only {
            return None;
        }
        let mut slots = spans.slots(class, span);
        let claim = slots.claim(class, span, spans.granule)?;
        entry.set_slots(slots);
        if slots.used == class.slots() {
            self.unlink(spans, span);
        }
        add(&self.out, claim.slots.count_ones().into());
        Some(claim)
    }

    /// Takes claimed slots home again; the grains `gone` are holes now, and the new ones are `counted` under the lock.
    /// Returns the span if this dissolved it: its pages are the caller's.
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
        let mut slots = spans.slots(class, span);
        let before = slots.used;
        counted(slots.end_claim(class, claim, gone));
        entry.set_slots(slots);
        add(&self.out, u64::from(claim.slots.count_ones()).wrapping_neg());
        let leaves = self.came_home(spans, class, span, (before, slots.used));
        leaves.then(|| {
            entry.behind.set(None);
            span
        })
    }

    /// Takes the spare and dissolves it: its pages are the caller's.
    #[must_use]
    pub fn take_spare(&self, spans: &Spans, class: SizeClass) -> Option<PageIndex> {
        let _guard = self.hold(spans, class);
        let span = self.spare.get()?;
        self.spare.set(None);
        self.release(spans, class, span);
        Some(span)
    }

    /// Dissolves a span with room and no slot out. Under the lock.
    fn release(&self, spans: &Spans, class: SizeClass, span: PageIndex) {
        self.unlink(spans, span);
        self.count_spans(u32::MAX);
        add(&self.released, 1);
        spans.leave(class, span);
    }

    /// Adds to the number of spans or, wrapping, subtracts. Under the lock.
    fn count_spans(&self, more: u32) {
        // Relaxed: written under the lock; a statistic to other threads.
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

    /// The class's figures, readable by any thread: a snapshot.
    pub fn state(&self, spans: &Spans, class: SizeClass) -> CentralState {
        // Relaxed: as in `receive`.
        if self.arrived.load(Ordering::Relaxed) != 0 {
            drop(self.hold_soon(spans, class));
        }
        let batches = spans.store.batches(class.index());
        // Relaxed: statistics.
        CentralState {
            stored: u64::from(batches.count) * u64::from(class.batch()),
            spans: self.spans.load(Ordering::Relaxed),
            peak_spans: self.peak.load(Ordering::Relaxed),
            released_spans: self.released.load(Ordering::Relaxed),
            out: self.out.load(Ordering::Relaxed),
            refills: self.refills.load(Ordering::Relaxed) + batches.taken,
            flushes: self.flushes.load(Ordering::Relaxed) + batches.put,
        }
    }

    /// Visits the spans with room, under the lock; the second argument of `visit` says whether the span is the spare.
    /// For checks.
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
    /// longer a span of the class. For checks.
    pub fn count(&self, spans: &Spans, class: SizeClass, span: PageIndex) -> Option<(u32, Option<u32>)> {
        let _guard = self.hold(spans, class);
        let entry = spans.entry(span);
        (entry.tag() == Some((class, 0))).then(|| (spans.slots(class, span).used, spans.count_home(class, span)))
    }
}

/// The page whose index plus one is `number`.
fn page_of(number: u32) -> Option<PageIndex> {
    (number as usize).checked_sub(1).map(PageIndex)
}

/// Takes up to `wanted` slots of one span into the rack. Returns how many.
#[inline]
fn draw(spans: &Spans, class: SizeClass, span: PageIndex, slots: &mut Slots<'_>, wanted: u32, rack: &mut Rack) -> u32 {
    let (first, bytes, before) = (spans.slot(class, span, 0), class.bytes(), rack.len());
    slots.draw(class, wanted, |slot| {
        let slot = first.wrapping_add(slot as usize * bytes);
        // SAFETY: the slot was the class's and is the rack's now; its span has memory.
        unsafe {
            guard::begin(slot, bytes);
            rack.push(slot);
        }
    });
    rack.len() - before
}

/// Adds one, with or without the lock.
fn count_one(counter: &AtomicU64) {
    // Relaxed: a statistic.
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Adds to a counter that only the holder of the lock writes.
fn add(counter: &AtomicU64, amount: u64) {
    // Relaxed: under the lock; a statistic to other threads.
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}
