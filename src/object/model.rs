//! The object layer as a model checker sees it: one class, its spans and its store, over the model's own memory.
//!
//! ```text
//!   ships       thread ── magazines ── store; Central: lock, spans ── heap of pages ── source
//!   modelled                           └──────────────────────────┘
//! ```
//!
//! This replaces `mod.rs` under a checker, because threads' structures there lie in zeroed memory, in which a
//! checker's atomics cannot be constructed. What the lower line spans is the shipped code. The model hands out pages,
//! and gets them back.

pub(super) mod size_class;
pub(super) mod length;
pub(super) mod holes;
pub(super) mod link;
pub(super) mod span;
pub(super) mod mark;
pub(super) mod chain;
pub(super) mod store;
pub(super) mod flag;
pub(super) mod spans;
pub(super) mod order;
pub(super) mod rack;
pub(super) mod batches;
pub(super) mod central;
pub(super) mod presence;
pub(super) mod resting;
pub(super) mod register;
pub(super) mod aside;

extern crate std;

use core::cell::Cell;
use core::fmt;
use core::ptr::NonNull;
use std::alloc::{Layout, alloc_zeroed, dealloc};

use crate::sync::{Table, Zeroed};
use crate::units::{PageIndex, PageRun};

use central::Central;
use rack::Rack;
use size_class::PAGE_BYTES;
use spans::Spans;
use store::{Lane, Walk};

pub use aside::{Aside, Lot, Passes};
pub use central::CentralState;
pub use chain::{BatchLinks, BatchPlace, Chain};
pub use holes::Claim;
pub use length::Length;
pub use link::Link;
pub use presence::Caller;
pub use register::{Listed, Listing, Register, Registered};
pub use size_class::SizeClass;
pub use span::Span;
pub use store::Store;

// SAFETY: the trait's promise is not relied on in a model.
unsafe impl Zeroed for Lane {
    fn zeroed() -> Self {
        Self::new()
    }
}

/// How many batches a model may bring.
const RACKS: usize = 64;

/// Slots that a thread has, by address.
pub type Slots = std::vec::Vec<usize>;

/// A class, and room for some spans of it.
pub struct Class {
    class: SizeClass,
    spans: Spans,
    central: Central,
    /// The spans' pages, and behind them racks, each used once.
    memory: NonNull<u8>,
    layout: Layout,
    racks: Cell<usize>,
    /// Grains that have stopped being holes.
    filled: Cell<usize>,
}

// SAFETY: the memory is accessed by the owner of a slot in it. The cells are used by one thread at a time: a checker
// runs one, and switches only at its own operations, none of which lies between the read and the write of a cell.
unsafe impl Send for Class {}
// SAFETY: as above.
unsafe impl Sync for Class {}

impl fmt::Debug for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Class").field("central", &self.central).finish()
    }
}

impl Class {
    /// The class of `bytes` bytes, and `spans` runs of pages for it.
    pub fn new(bytes: usize, spans: usize) -> Self {
        let class = SizeClass::of(bytes, 1).unwrap();
        let pages = spans * class.pages();
        let racks = RACKS * Rack::bytes(class.batch());
        let layout = Layout::from_size_align(pages * PAGE_BYTES + racks, PAGE_BYTES).unwrap();
        // SAFETY: not of zero bytes.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        // SAFETY: under a checker the address means nothing.
        let (tables, lanes) = unsafe {
            (
                (
                    Table::new(NonNull::dangling(), pages),
                    Table::new(NonNull::dangling(), pages * spans::PAGE_FLAGS),
                    Table::new(NonNull::dangling(), if span::has_row(class) { pages } else { 0 }),
                ),
                Table::new(NonNull::dangling(), 1),
            )
        };
        let spans = Spans::new(tables, lanes, memory, 1);
        spans.reaches(pages);
        Self {
            class,
            spans,
            central: Central::new(),
            memory,
            layout,
            racks: Cell::new(pages * PAGE_BYTES),
            filled: Cell::new(0),
        }
    }

    /// Slots in a span, and in a batch.
    pub fn counts(&self) -> (u32, u32) {
        (self.class.slots(), self.class.batch())
    }

    /// The number, among all slots, of the slot at an address.
    pub fn number(&self, slot: usize) -> usize {
        let (span, number) = self.spans.locate(self.class, self.memory.as_ptr().with_addr(slot));
        span.0 / self.class.pages() * self.class.slots() as usize + number as usize
    }

    /// Takes slots out of spans; `None` if the lock is held.
    pub fn take(&self, wanted: u32) -> Option<Slots> {
        let mut taken = false;
        let slots = with_rack(wanted, |rack| {
            let filled = self.central.take(&self.spans, self.class, wanted, rack);
            self.filled.set(self.filled.get() + filled.unwrap_or(0) as usize);
            taken = filled.is_some();
        });
        taken.then_some(slots)
    }

    /// Takes slots out of a run that no thread knows yet.
    pub fn take_fresh(&self, run: usize, wanted: u32) -> Slots {
        let run = PageRun::known(run * self.class.pages(), self.class.pages());
        with_rack(wanted, |rack| {
            self.central.take_fresh(&self.spans, self.class, run, wanted, rack);
        })
    }

    /// Returns slots to their spans. Returns how many of these that dissolved.
    pub fn give(&self, slots: Slots) -> usize {
        let mut left = None;
        let rest = with_rack(slots.len() as u32, |rack| {
            push(rack, &slots);
            left = self.central.give(&self.spans, self.class, rack);
        });
        assert!(rest.is_empty());
        self.left(left)
    }

    /// Returns a whole batch: into the store, if that has room, or to its spans, or else into the store after all.
    pub fn bring(&self, slots: Slots, hint: usize) -> usize {
        let stored = self.spans.store_batch(self.class, self.batch(&slots), hint);
        stored.map_or_else(|batch| self.send_home(batch, hint), |()| 0)
    }

    /// Returns a whole batch to its spans, or into the store if the lock is held.
    pub fn bring_home(&self, slots: Slots, hint: usize) -> usize {
        self.send_home(self.batch(&slots), hint)
    }

    fn send_home(&self, batch: Rack, hint: usize) -> usize {
        let sent = self.central.give_batch(&self.spans, self.class, batch, hint);
        sent.map_or(0, |(_rack, left)| self.left(left))
    }

    /// Takes a whole batch from the store.
    pub fn fetch(&self, hint: usize) -> Option<Slots> {
        let mut batch = self.spans.take_batch(self.class, hint)?;
        Some(drain(&mut batch))
    }

    /// Takes the batches that nobody has needed since the last call, as the keeper does.
    pub fn fetch_unneeded(&self) -> Slots {
        let (mut walk, mut slots) = (Walk::default(), Slots::new());
        while let Some(mut batch) = self.spans.take_unneeded(self.class, &mut walk) {
            slots.append(&mut drain(&mut batch));
        }
        slots
    }

    /// Whether the slot is in a batch stored lately.
    pub fn has_stored(&self, slot: usize) -> bool {
        let slot = self.memory.as_ptr().with_addr(slot);
        self.spans.has_stored_lately(self.class, slot, 0)
    }

    /// Claims whatever may go of a run, if that is a span: the slots in the way, and the claim.
    pub fn claim(&self, run: usize) -> Option<(Slots, Claim)> {
        let span = PageIndex(run * self.class.pages());
        let claim = self.central.claim(&self.spans, self.class, span, false)?;
        let slots = (0..self.class.slots()).filter(|slot| claim.slots & 1 << slot != 0);
        let slots = slots.map(|slot| self.spans.slot(self.class, span, slot).expose_provenance());
        Some((slots.collect(), claim))
    }

    /// Ends a claim all of whose grains have gone. Returns how many spans that dissolved, and how many grains are new
    /// holes.
    pub fn end_claim(&self, run: usize, claim: Claim) -> (usize, usize) {
        let (span, mut holes) = (PageIndex(run * self.class.pages()), 0);
        let (ended, counted) = ((claim, claim.grains), |more| holes = more);
        let left = self.central.end_claim(&self.spans, self.class, span, ended, counted);
        (self.left(left), holes as usize)
    }

    /// How many grains have stopped being holes, and how many are holes.
    pub fn holes(&self) -> (usize, usize) {
        let holes = self.spans.hole_bytes(usize::MAX) >> holes::GRAIN_SHIFT;
        (self.filled.get(), holes)
    }

    /// Takes out the span that is kept though it has no slot out. Returns whether there was one.
    pub fn take_spare(&self) -> bool {
        let spare = self.central.take_spare(&self.spans, self.class);
        spare.inspect(|&page| self.end(page)).is_some()
    }

    /// The class's figures.
    pub fn state(&self) -> CentralState {
        self.central.state(&self.spans, self.class)
    }

    fn left(&self, mut span: Option<PageIndex>) -> usize {
        let mut count = 0;
        while let Some(page) = span {
            span = self.spans.entry(page).behind.get();
            self.end(page);
            count += 1;
        }
        count
    }

    /// Counts the end of a dissolved span's holes.
    fn end(&self, span: PageIndex) {
        let holes = self.spans.holes_of(self.class, span) >> holes::GRAIN_SHIFT;
        self.filled.set(self.filled.get() + holes);
    }

    fn batch(&self, slots: &Slots) -> Rack {
        let room = self.class.batch();
        assert_eq!(slots.len(), room as usize);
        let place = self.racks.replace(self.racks.get() + Rack::bytes(room));
        assert!(
            place + Rack::bytes(room) <= self.layout.size(),
            "the model needs more racks"
        );
        // SAFETY: inside the memory, behind the pages, and nobody else's.
        let mut rack = unsafe { Rack::new(self.memory.add(place), room) };
        push(&mut rack, slots);
        rack
    }
}

impl Drop for Class {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nothing accesses it any more.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}

/// The slots that `fill` leaves in a rack with this much room.
fn with_rack(room: u32, fill: impl FnOnce(&mut Rack)) -> Slots {
    let mut words = std::vec![0_u64; Rack::bytes(room).div_ceil(size_of::<u64>())];
    // SAFETY: enough words, which outlive the rack.
    let mut rack = unsafe { Rack::new(NonNull::from(words.as_mut_slice()).cast(), room) };
    fill(&mut rack);
    drain(&mut rack)
}

fn drain(rack: &mut Rack) -> Slots {
    core::iter::from_fn(|| rack.pop())
        .map(|slot| slot.expose_provenance())
        .collect()
}

fn push(rack: &mut Rack, slots: &Slots) {
    for &slot in slots {
        // SAFETY: the caller owns the slots and gives them up; there is room.
        unsafe { rack.push(core::ptr::with_exposed_provenance_mut(slot)) };
    }
}
