//! Objects of any size and alignment on a heap of pages: what a global allocator is made of.
//!
//! ```text
//!                 layout ──▶ size class?
//!            up to 32 KiB │                      │ larger, or aligned to more than a page
//!                         ▼                      ▼
//!    thread │ magazine: pop, push         cache of pages (up to 16)
//!           │     │ batch: store, spans          │
//!    class  │  central: lock, spans with room    │
//!           │     │ a span                       │
//!    heap   └─────┴── runs of pages ─────────────┴───── lock-free
//! ```
//!
//! An object is freed with the layout it was allocated with, and that says all: its class, or its number of pages. So
//! freeing looks nothing up, up to 1 KiB (above, a flag that says whether it may have room; `spans.rs`): the slot goes
//! into the freeing thread's own magazine, whoever allocated it. Owners, remote frees, orphaned spans do not exist;
//! what a thread frees of another's it reuses itself, or passes to the class in a batch.
//!
//! Worked: a thread frees 1,200 blocks of 64 bytes that another has allocated. The first goes the slow way, to a
//! magazine without room: room for 6, then 30, 126, 510, a batch. At the 511th what is loaded is full and becomes
//! the spare; at the 1021st the spare goes to the store of class 7, by one pointer. No block has been looked at but for
//! its first word. Were the store full, each of its 510 slots would find its span with one load; and the page of a
//! span all of whose slots are back would go to the heap.
//!
//! **Before saying no**: the thread's magazines, the shared ones, the spare spans and the caches within reach are
//! emptied, all other threads are called on to do the same when they next leave their fast path, and the heap is asked
//! once more.
//!
//! **Locks**, each held for a batch at most. Outside all others the scavenger's turn, then the shared thread's, then
//! the right to rounds; then one for each class, the register's, the tables', the heap's, none of them under another
//! but in two places that both have that right: a fork takes them in this order, and who empties sleeping threads takes
//! classes' under the register's. No memory is released under any of them but the first, which no allocation takes.

#![cfg_attr(
    not(feature = "std"),
    allow(
        dead_code,
        unused_imports,
        reason = "only with std do threads get structures of their own"
    )
)]

mod size_class;
mod length;
mod holes;
mod span;
mod mark;
mod store;
mod spans;
mod rack;
mod room;
mod central;
mod magazine;
mod presence;
mod register;
mod shelf;
mod thread;
mod tables;
mod stats;
mod snapshot;
mod check;
mod slots;
mod run;
mod twice;
mod shorten;
mod clear;
mod threads;
mod shared;
mod keeper;
mod relief;
mod punch;
mod close;
mod fork;
#[cfg(test)]
mod preempted;

pub use check::ObjectFault;
pub use fork::{Forks, Kin};
pub use keeper::{ABSENT, ASLEEP, AWAKE, Keeper, OFF};
pub use length::Length;
pub use run::Hold;
pub use size_class::{MarkedSize, SizeClass, SmallSize};
pub use snapshot::{ClassStats, Snapshot};
pub use span::Span;
pub use spans::Spans;
pub use stats::GlobalStats;
pub use thread::{Nobody, Seat, Thread, Working};

use core::alloc::Layout;
use core::ptr::{self, NonNull};

use crate::guard::Place;
use crate::heap::{self, Allocation, Config, NewHeapError, PageHeap};
use crate::source::{Purpose, Source};
use crate::sync::{AtomicUsize, Lock, Table};
use crate::units::{PageIndex, PageRun};

use central::Central;
use clear::Patience;
use magazine::Magazine;
use rack::Blanks;
use register::Register;
use size_class::{PAGE_BYTES, PAGE_SHIFT};
use tables::Tables;

/// Address space below which no heap is tried: eight pages.
const LEAST_BYTES: usize = 8 * PAGE_BYTES;

/// The object layer over a heap of pages. It lies in its own tables and is never unmade, but as a value's
/// ([`Heap`](crate::Heap)) or with a library that is unloaded (`close.rs`).
#[derive(Debug)]
pub struct Objects<S: Source> {
    heap: PageHeap<S>,
    spans: Spans,
    centrals: Table<Central>,
    blanks: Blanks,
    register: Register<Thread>,
    tables: Tables,
    /// Guards the shared thread.
    shared: Lock,
    /// Threads that have a cache of pages; the shared one is not counted.
    cached: AtomicUsize,
    /// Bytes of the slots and runs in which roomy blocks lie (`room.rs`).
    roomy: AtomicUsize,
    patience: Patience,
    keeper: Keeper,
    kin: Kin,
}

/// Memory just allocated that is to be zero.
#[derive(Clone, Copy, Debug)]
pub enum ToZero {
    /// A slot, whose bytes are anything.
    Slot(NonNull<u8>),
    /// A run of pages, of which something may be known.
    Run(Allocation),
}

/// What becomes of a block that gets another size.
#[derive(Clone, Copy, Debug)]
enum Moved {
    /// It stays.
    Not,
    /// There is memory for it.
    To(NonNull<u8>),
    /// It is there already, with what is in it, and the old one is freed.
    With(NonNull<u8>),
}

impl<S: Source + 'static> Objects<S> {
    /// Makes an object layer over a new heap of pages. The memory it takes stays as long as it does. On failure nothing
    /// stays reserved, and the source comes back. `keeper`: who scavenges, if anybody.
    ///
    /// The tables are reserved first, for as many pages as are wished for; should the heap get fewer, some address
    /// space is in vain.
    pub fn open(source: S, config: Config, keeper: Keeper) -> Result<&'static Self, (S, NewHeapError)> {
        let (mut source, mut failure) = (source, NewHeapError::NoPages);
        // A 64th for the tables and the gaps that alignment makes; 256th and 30,000th are needed for the tables.
        let budget = source.budget();
        let tables = if S::APART { 0 } else { budget / 64 };
        mark::draw_key();
        let mut wish = config.reserve.max(LEAST_BYTES).min(budget - tables);
        // Links are pages in 32 bits. The heap rounds up to whole granules.
        let (granule, most) = (
            source.granule().max(PAGE_BYTES),
            (u32::MAX as usize - 1).saturating_mul(PAGE_BYTES),
        );
        wish = wish.min(most - most % granule);
        loop {
            let pages = wish.next_multiple_of(granule) >> PAGE_SHIFT;
            if let Some((tables, reservation)) = Tables::reserve(&source, pages) {
                match PageHeap::try_new(
                    source,
                    Config {
                        reserve: wish,
                        ..config
                    },
                ) {
                    Ok(heap) => return Ok(Self::settle(heap, tables, keeper, config.sparse)),
                    Err((back, reason)) => {
                        // SAFETY: just reserved; `tables` has no drop, and is not used again.
                        unsafe { back.unreserve(Purpose::Metadata, reservation) };
                        (source, failure) = (back, reason);
                    }
                }
            }
            if wish <= LEAST_BYTES {
                return Err((source, failure));
            }
            wish = heap::lower(wish).max(LEAST_BYTES);
        }
    }

    /// Moves in.
    fn settle(heap: PageHeap<S>, tables: Tables, keeper: Keeper, sparse: bool) -> &'static Self {
        // SAFETY: the reservation is never given back from here on; this is the one call.
        let (centrals, spans) = unsafe { tables.tables(&heap) };
        // SAFETY: in the tables, zeroed; nobody else has it yet.
        unsafe { tables.shared_thread().as_ref() }.forget();
        heap.driver().set_beside(tables.beside());
        let place = tables.place::<S>();
        // SAFETY: room for it, aligned, nobody else's. It is written once and stays for ever.
        let objects = unsafe {
            place.write(Self {
                heap,
                spans,
                centrals,
                blanks: Blanks::new(),
                register: Register::new(),
                tables,
                shared: Lock::new(),
                cached: AtomicUsize::new(0),
                roomy: AtomicUsize::new(0),
                patience: Patience::new(sparse),
                keeper,
                kin: Kin::default(),
            });
            place.as_ref()
        };
        objects.shared().set_cache(objects.heap.lend());
        objects
    }

    // ---- allocating
    // ---------------------------------------------------------------------------------------------------------

    /// Memory for `layout`. `None` if there is no room, or no such layout. A large block does not come from the shelf:
    /// there the caller has looked.
    pub fn allocate(&self, thread: &Thread, layout: Layout) -> Option<NonNull<u8>> {
        match SizeClass::of(layout.size(), layout.align()) {
            Some(class) => self.allocate_slot(thread, class),
            None => {
                let run = self.allocate_run(thread, layout)?.run;
                Some(self.heap.address(run.start()))
            }
        }
    }

    /// As [`allocate`](Self::allocate), for memory that is to be zero: [`zero`](Self::zero) makes it so.
    pub fn allocate_to_zero(&self, thread: &Thread, layout: Layout) -> Option<ToZero> {
        Some(match SizeClass::of(layout.size(), layout.align()) {
            Some(class) => ToZero::Slot(self.allocate_slot(thread, class)?),
            None => ToZero::Run(self.allocate_run(thread, layout)?),
        })
    }

    /// Makes every byte of the layout's size zero, as far as it is not. Takes long for large blocks: for who holds
    /// nothing.
    pub fn zero(&self, fresh: ToZero, layout: Layout) -> NonNull<u8> {
        let (memory, zeroed) = match fresh {
            ToZero::Slot(memory) => (memory, false),
            ToZero::Run(allocation) => {
                let zeroed = allocation.is_zeroed() || self.clear(allocation.run, layout.size());
                (self.heap.address(allocation.run.start()), zeroed)
            }
        };
        if !zeroed {
            // SAFETY: just allocated, for at least so many bytes.
            unsafe { memory.write_bytes(0, layout.size()) };
        }
        memory
    }

    /// Makes the table reach as far as a run that was just taken, or gives it back.
    #[inline]
    fn covers(&self, cache: Option<usize>, run: PageRun) -> Option<()> {
        if run.end().0 > self.spans.covered() {
            self.cover(cache, run)?;
        }
        Some(())
    }

    #[cold]
    fn cover(&self, cache: Option<usize>, run: PageRun) -> Option<()> {
        // As far as the heap has grown, or else for this run.
        let source = self.heap.source();
        let cover = |pages| self.tables.cover(source, &self.spans, pages);
        let grown = self.heap.grown().0.max(run.end().0);
        if cover(grown).or_else(|_| cover(run.end().0)).is_err() {
            self.give_pages(cache, run);
            return None;
        }
        self.heap.driver().beside_reaches(self.spans.covered());
        Some(())
    }

    // ---- freeing
    // ------------------------------------------------------------------------------------------------------------

    /// Takes memory back. A large block does not go onto the shelf: there the caller has tried.
    ///
    /// # Safety
    ///
    /// It was allocated from this heap with this layout, and nothing uses it any more. The structure is one of this
    /// heap, and entered by the caller; or the shared one, whose lock he holds.
    pub unsafe fn free(&self, thread: &Thread, memory: NonNull<u8>, layout: Layout) {
        let Some(class) = SizeClass::of(layout.size(), layout.align()) else {
            self.free_large(thread, memory, layout);
            return;
        };
        // SAFETY: the caller's promise: a slot of this class that is given up.
        unsafe { self.free_slot(thread, class, memory) };
    }

    // ---- resizing
    // -----------------------------------------------------------------------------------------------------------

    /// Makes memory of `layout` `size` bytes long, where it is or elsewhere; the bytes up to the shorter length stay.
    /// `None` if there is no room: then nothing has changed.
    ///
    /// # Safety
    ///
    /// The memory was allocated from this heap with this layout and is the caller's; on success it is not, but what is
    /// returned. The structure as for [`free`](Self::free).
    pub unsafe fn resize(
        &self,
        thread: &Thread,
        memory: NonNull<u8>,
        layout: Layout,
        size: usize,
    ) -> Option<NonNull<u8>> {
        // SAFETY: the caller's promise.
        match unsafe { self.place_resized(thread, memory, layout, size) }? {
            Moved::Not => Some(memory),
            Moved::With(moved) => Some(moved),
            Moved::To(moved) => {
                // SAFETY: as `place_resized` says; the old is given up.
                unsafe {
                    Self::copy_resized(memory, layout, moved, size);
                    self.free(thread, memory, layout);
                }
                Some(moved)
            }
        }
    }

    /// Where memory of `layout` can be `size` bytes long. Elsewhere: then it has to be
    /// [copied](Self::copy_resized), and freed.
    ///
    /// # Safety
    ///
    /// As for [`resize`](Self::resize); if it is moved, it is the caller's until he frees it.
    unsafe fn place_resized(&self, thread: &Thread, memory: NonNull<u8>, layout: Layout, size: usize) -> Option<Moved> {
        // Rounded up to the alignment it must not overflow.
        let new = Layout::from_size_align(size, layout.align()).ok()?;
        let (old_class, new_class) = (
            SizeClass::of(layout.size(), layout.align()),
            SizeClass::of(size, layout.align()),
        );
        if old_class.is_some() && old_class == new_class || self.stays(thread, memory, layout, new) {
            return Some(Moved::Not);
        }
        if size > layout.size() {
            return self.allocate_grown(thread, memory, layout, new).map(Moved::To);
        }
        let moved = self.allocate(thread, new).map(Moved::To);
        // SAFETY: the caller's promise.
        moved.or_else(|| unsafe { self.shorten(thread, memory, layout, new) })
    }

    /// Brings what is in memory of `layout` to where it was placed anew, `size` bytes long.
    ///
    /// # Safety
    ///
    /// Both are the caller's, of so many bytes, and different memory.
    unsafe fn copy_resized(memory: NonNull<u8>, layout: Layout, moved: NonNull<u8>, size: usize) {
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(memory.as_ptr(), moved.as_ptr(), layout.size().min(size)) };
    }

    /// Every thread's structure, the shared one too. Only the counts of its magazines may be read.
    fn for_each_thread(&self, mut visit: impl FnMut(&Thread)) {
        visit(&self.shared());
        self.register.for_each(visit);
    }

    #[inline]
    fn central(&self, class: SizeClass) -> &Central {
        self.centrals.get(class.index())
    }

    /// Whether the address lies in the part of the heap that has grown.
    pub fn contains(&self, address: *const u8) -> bool {
        self.heap.page_of(address).is_some()
    }

    /// Where an address lies; `None` outside the heap.
    #[cfg_attr(not(feature = "checks"), allow(dead_code, reason = "for the checked build"))]
    pub fn place(&self, address: usize) -> Option<Place> {
        let page = self.heap.page_of(ptr::without_provenance(address))?;
        let tag = (page.0 < self.spans.covered()).then(|| self.span_at(page)).flatten();
        let (class, back) = tag.map_or((0, 0), |(class, back)| (class.bytes(), back));
        let span = page.0.saturating_sub(back);
        Some(Place { class, span })
    }

    /// How many bytes a block of this layout has: its slot, or its pages. Freed with that many it is the same block.
    pub fn usable_size(layout: Layout) -> usize {
        match SizeClass::of(layout.size(), layout.align()) {
            Some(class) => class.bytes(),
            None => length::pages_for(layout).0.saturating_mul(PAGE_BYTES),
        }
    }

    /// The spans, for the fast way.
    #[inline(always)]
    pub fn spans(&self) -> &Spans {
        &self.spans
    }

    /// The heap of pages below.
    pub fn heap(&self) -> &PageHeap<S> {
        &self.heap
    }

    /// The span a page is in; for checks.
    #[inline]
    fn span_at(&self, page: PageIndex) -> Option<(SizeClass, usize)> {
        self.spans.entry(page).tag()
    }
}
