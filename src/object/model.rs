//! The object layer as a model checker sees it: one class, its spans and its store, over bytes of the model's own.
//!
//! ```text
//!   ships       thread ── magazines ── Central: store, lock, spans ── heap of pages ── source
//!   modelled                           └──────────────────────────┘
//! ```
//!
//! In place of `mod.rs` where a checker is at work: threads' structures lie in zeroed memory there, in which a
//! checker's atomics cannot be born. What is between the lines is the code that ships. Pages are handed out by the
//! model, and come back to it.

pub(super) mod size_class;
pub(super) mod length;
pub(super) mod span;
pub(super) mod mark;
pub(super) mod magazine;
pub(super) mod store;
pub(super) mod spans;
pub(super) mod central;
pub(super) mod presence;
pub(super) mod register;

extern crate std;

use core::fmt;
use core::ptr::NonNull;
use std::alloc::{Layout, alloc_zeroed, dealloc};

use crate::sync::{Ordering, Table, Zeroed};
use crate::units::{PageIndex, PageRun};

use central::Central;
use magazine::{Batch, List};
use size_class::PAGE_BYTES;
use span::Span;
use spans::Spans;

pub use central::CentralState;
pub use register::{Listed, Listing, Register, Registered};
pub use size_class::SizeClass;
pub use store::{BatchLinks, BatchPlace, Chain, Store};

// SAFETY: nothing is owed in a model.
unsafe impl Zeroed for Span {
    fn zeroed() -> Self {
        Self::vacant()
    }
}

/// Slots that a thread has, by address.
pub type Slots = std::vec::Vec<usize>;

/// A class, and room for some spans of it.
pub struct Class {
    class: SizeClass,
    spans: Spans,
    central: Central,
    memory: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is reached by who has a slot of it.
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
        let layout = Layout::from_size_align(pages * PAGE_BYTES, PAGE_BYTES).unwrap();
        // SAFETY: not of zero bytes.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        // SAFETY: under a checker the address means nothing.
        let table = unsafe { Table::new(NonNull::dangling(), pages) };
        let spans = Spans::new(table, memory);
        // Relaxed: nobody else has it yet.
        spans.covered.store(pages, Ordering::Relaxed);
        Self {
            class,
            spans,
            central: Central::new(),
            memory,
            layout,
        }
    }

    /// Slots in a span, and in a batch.
    pub fn counts(&self) -> (u32, u32) {
        (self.class.slots(), self.class.batch())
    }

    /// The number of the slot at an address, of all there are.
    pub fn number(&self, slot: usize) -> usize {
        let (span, number) = self
            .spans
            .slot_of(self.class, slot)
            .expect("the slot of an entered span");
        span.0 / self.class.pages() * self.class.slots() as usize + number as usize
    }

    /// Slots out of spans; `None` if the lock is held.
    pub fn take(&self, wanted: u32) -> Option<Slots> {
        Some(slots(self.central.take(&self.spans, self.class, wanted)?))
    }

    /// Slots out of a run that is nobody's yet.
    pub fn take_fresh(&self, run: usize, wanted: u32) -> Slots {
        let run = PageRun::known(run * self.class.pages(), self.class.pages());
        slots(self.central.take_fresh(&self.spans, self.class, run, wanted))
    }

    /// Slots back to their spans. How many of these are none any more.
    pub fn give(&self, slots: Slots) -> usize {
        self.left(self.central.give(&self.spans, self.class, list(&slots)))
    }

    /// A whole batch: into the store, if that has room, or to its spans, or into the store after all.
    pub fn bring(&self, slots: Slots, hint: usize) -> usize {
        let stored = self
            .central
            .store_batch(&self.spans, self.class, self.batch(&slots), hint);
        stored.map_or_else(
            |batch| self.left(self.central.give_batch(&self.spans, self.class, batch, hint)),
            |()| 0,
        )
    }

    /// A whole batch: to its spans, or into the store if the lock is held.
    pub fn bring_home(&self, slots: Slots, hint: usize) -> usize {
        self.left(
            self.central
                .give_batch(&self.spans, self.class, self.batch(&slots), hint),
        )
    }

    /// A whole batch out of the store.
    pub fn fetch(&self, hint: usize) -> Option<Slots> {
        Some(slots(
            self.central
                .take_batch(&self.spans, self.class, hint)?
                .into_list(self.class),
        ))
    }

    /// Whether the slot is in a batch that went into store lately.
    pub fn has_stored(&self, slot: usize) -> bool {
        let slot = NonNull::new(self.memory.as_ptr().with_addr(slot)).unwrap();
        self.central.has_stored_lately(&self.spans, self.class, slot, 0)
    }

    /// The span kept though it has no slot out, taken out: whether there was one.
    pub fn take_spare(&self) -> bool {
        self.central.take_spare(&self.spans, self.class).is_some()
    }

    /// What the class says of itself.
    pub fn state(&self) -> CentralState {
        self.central.state(&self.spans, self.class)
    }

    fn left(&self, mut span: Option<PageIndex>) -> usize {
        let mut count = 0;
        while let Some(page) = span {
            span = self.spans.entry(page).behind.get();
            count += 1;
        }
        count
    }

    fn batch(&self, slots: &Slots) -> Batch {
        assert_eq!(slots.len(), self.class.batch() as usize);
        let (_list, last) = (list(slots), *slots.last().unwrap());
        // SAFETY: the slots hang from the last, as many as a batch has, and are given up with the batch.
        unsafe { Batch::from_raw(NonNull::new(self.memory.as_ptr().with_addr(last)).unwrap()) }
    }
}

impl Drop for Class {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nothing reaches it any more.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}

fn slots(mut list: List) -> Slots {
    core::iter::from_fn(|| list.pop())
        .map(|slot| slot.expose_provenance())
        .collect()
}

fn list(slots: &Slots) -> List {
    let mut list = List::new();
    for &slot in slots {
        // SAFETY: the caller has the slots and gives them up.
        unsafe { list.push(core::ptr::with_exposed_provenance_mut(slot)) };
    }
    list
}
