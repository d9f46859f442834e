//! Objects of any size and alignment, built on a heap of pages: the core of a global allocator.
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
//! The caller frees an object with the layout it allocated it with, and the layout determines the size class or the
//! number of pages. So freeing a block of up to 1 KiB looks nothing up. (A larger one has a flag that says whether it
//! lies in more room than its layout asks for; `spans.rs`.) The slot is pushed into the freeing thread's own magazine,
//! whichever thread allocated it. There are no owners, no remote-free queues and no orphaned spans: a thread reuses
//! the slots it frees, or passes them to the class in a batch.
//!
//! Worked: a thread frees 1,200 blocks of 64 bytes that another thread allocated. The first free takes the slow path,
//! because the magazine has no room yet (and takes two slots along, `begin_with_free`). Room grows to 6, then 30, 126
//! and 510 slots; 510 are a batch. At the 509th free the loaded rack is full, and its slots become the spare; at the
//! 1019th the spare moves to the store of class 7, by one pointer. Only the first word of each block has been touched.
//! Were the store full, each of the 510 slots would find its span with one load, and the pages of a span that has all
//! its slots back would go to the heap.
//!
//! **Before an allocation fails**, the layer empties the thread's magazines, the shared ones, the spare spans and all
//! caches it can reach, calls on all other threads to flush theirs when they next take a slow path, and asks the heap
//! once more.
//!
//! **Locks.** Each is held for one batch at most. From the outermost in: the scavenger's turn; the lock under which
//! shared structures are made, and theirs, by number (who takes one also waits for a thread that is alone with it,
//! which takes no lock meanwhile); the rounds lock; then one lock per class, the register's, the tables', the heap's.
//! These last four kinds never nest, except under the rounds lock, in two places: a fork takes them all in this order,
//! and a thread that empties sleeping threads takes class locks under the register's. Memory is released under none of
//! these locks but the first, which no allocation takes.

mod size_class;
mod length;
mod holes;
mod link;
mod span;
mod mark;
mod chain;
mod store;
mod flag;
mod spans;
mod order;
mod rack;
mod shape;
mod plot;
mod room;
mod batches;
mod central;
mod magazine;
mod presence;
mod resting;
mod register;
mod aside;
mod shelf;
mod hoard;
mod thread;
mod annex;
mod commons;
mod tables;
mod stats;
mod snapshot;
mod check;
mod fresh;
mod slots;
mod racks;
mod share;
mod transfer;
mod run;
mod aligned;
mod twice;
mod stray;
mod shorten;
mod clear;
mod threads;
mod shared;
mod keeper;
mod reclaim;
mod relief;
mod punch;
mod close;
mod fork;
#[cfg(test)]
mod preempted;
#[cfg(test)]
mod ended;
#[cfg(test)]
mod hoarding;
#[cfg(test)]
mod meeting;
#[cfg(test)]
mod annexed;

pub use check::ObjectFault;
pub use fork::{Abandon, Forks, Kin};
pub use keeper::{ABSENT, ASLEEP, AWAKE, Keeper, OFF};
pub use length::Length;
pub use run::Hold;
pub use size_class::{FlaggedSize, MarkedSize, SizeClass};
pub use snapshot::{ClassStats, Snapshot};
pub use span::Span;
pub use spans::Spans;
pub use stats::GlobalStats;
pub use stray::bears_mark;
pub use thread::{Nobody, Seat, Thread, Working};

/// For tests of what uses them above.
#[cfg(test)]
pub mod parts {
    pub use super::magazine::Magazine;
    pub use super::mark::{draw_key, is_on, key, write};
    pub use super::rack::Rack;
}

use core::alloc::Layout;
use core::ptr::{self, NonNull};

use crate::fatal;
use crate::guard::Place;
use crate::heap::{self, Allocation, Config, NewHeapError, PageHeap, Room};
use crate::in_place::write_fields;
use crate::source::{Purpose, Source};
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Table};
use crate::units::{PageCount, PageIndex, PageRun};

use aside::Aside;
use central::Central;
use clear::Patience;
use commons::Commons;
use hoard::Hoard;
use magazine::Magazine;
use rack::Blanks;
use register::Register;
use size_class::{MAX_SLOT_BYTES, PAGE_BYTES, PAGE_SHIFT};
use tables::Tables;

/// How much a heap begins with: less than a huge page, which a system that makes them unasked would put behind the
/// first block of a program that needs few.
const FIRST_BYTES: usize = 1 << 20;

/// The smallest address space worth trying for a heap: eight pages.
const LEAST_BYTES: usize = 8 * PAGE_BYTES;

/// The object layer over a heap of pages. It lies in its own tables and is never destroyed, unless it belongs to a
/// value ([`Heap`](crate::Heap)) or to a library that is unloaded (`close.rs`).
#[derive(Debug)]
pub struct Objects<S: Source> {
    heap: PageHeap<S>,
    spans: Spans,
    centrals: Table<Central>,
    blanks: Blanks,
    register: Register<Thread>,
    tables: Tables,
    commons: Commons,
    /// Threads that have a cache of pages, without the first shared one.
    cached: AtomicUsize,
    /// Shelves that have a share of what the lists of all may hold.
    shelves: AtomicUsize,
    /// How often no thread tries to get a structure (`threads.rs`).
    unlisted: AtomicU32,
    /// Bytes of the slots and runs that hold roomy blocks (`room.rs`).
    roomy: AtomicUsize,
    aside: Aside,
    /// A bit for each length of which some thread has lately found no run on its shelf (`transfer.rs`).
    asked: AtomicU64,
    hoard: Hoard,
    patience: Patience,
    keeper: Keeper,
    kin: Kin,
}

/// Memory just allocated that has yet to be zeroed.
#[derive(Clone, Copy, Debug)]
pub enum ToZero {
    /// A slot, with arbitrary contents.
    Slot(NonNull<u8>),
    /// A run of pages, some of which may be known to be zero.
    Run(Allocation),
}

/// What happens to a block that is resized.
#[derive(Clone, Copy, Debug)]
pub enum Moved {
    /// It stays where it is.
    Not,
    /// It moves to this memory: the caller copies the contents and frees the old block.
    To(NonNull<u8>),
    /// It has moved: the contents are there already, and the old block is freed.
    With(NonNull<u8>),
}

impl<S: Source + 'static> Objects<S> {
    /// Makes an object layer over a new heap of pages. The memory it takes stays taken as long as the layer lives. On
    /// failure nothing stays reserved, and the source is returned. `keeper` says who scavenges, if anyone.
    ///
    /// The tables are reserved first, for as many pages as requested. If the heap gets fewer pages, some of that
    /// address space is wasted; if it gets less than half of them, fewer are requested: the tables may have taken
    /// their room.
    pub fn open(source: S, config: Config, keeper: Keeper) -> Result<&'static Self, (S, NewHeapError)> {
        let (mut failure, mut source) = (NewHeapError::no_pages(&source, config.reserve), source);
        // The tables need a 49th of what they describe, and a 30,000th; the rest is for gaps from alignment.
        let budget = source.budget();
        let tables = if S::APART { 0 } else { budget / 48 };
        mark::draw_key();
        let mut wish = config.reserve.max(LEAST_BYTES).min(budget - tables);
        // Links store page numbers in 32 bits. The heap rounds up to whole granules.
        let (granule, most) = (
            source.granule().max(PAGE_BYTES),
            (u32::MAX as usize - 1).saturating_mul(PAGE_BYTES),
        );
        wish = wish.min(most - most % granule);
        loop {
            let pages = wish.next_multiple_of(granule) >> PAGE_SHIFT;
            match Tables::reserve(&source, pages) {
                Ok((tables, reservation)) => {
                    let config = Config {
                        reserve: wish,
                        // For whoever names them, which nobody does here.
                        shards: 0,
                        first: FIRST_BYTES,
                        ..config
                    };
                    match Room::reserve(source, config) {
                        Ok(room) if room.capacity().0 >= pages / 2 || wish <= LEAST_BYTES => {
                            return Ok(Self::settle(room, tables, keeper, &config));
                        }
                        Ok(room) => source = room.give_back(),
                        Err(other) => (source, failure) = other,
                    }
                    // SAFETY: just reserved; `tables` has no drop, and is not used again.
                    unsafe { source.unreserve(Purpose::Metadata, reservation) };
                }
                Err(bytes) => failure = NewHeapError::no_metadata(&source, bytes),
            }
            if wish <= LEAST_BYTES {
                return Err((source, failure));
            }
            wish = heap::lower(wish).max(LEAST_BYTES);
        }
    }

    /// Writes the layer into its tables. Not inlined: while `open` asks the source, its values are not on the stack.
    #[inline(never)]
    fn settle(room: Room<S>, tables: Tables, keeper: Keeper, config: &Config) -> &'static Self {
        // SAFETY: the reservation is never given back from here on; this is the only call.
        let (centrals, spans) = unsafe { tables.tables(room.base()) };
        // SAFETY: it lies in the tables, and nobody else has it yet.
        let commons = unsafe { Commons::new(tables.common(), config.processors) };
        let (place, beside) = (tables.place::<S>(), tables.beside());
        // SAFETY: there is space for it, aligned, and nobody else uses it. It is written once and stays forever.
        let objects = unsafe {
            let at = place.as_ptr();
            room.write(&raw mut (*at).heap);
            write_fields!(at, Self {
                spans,
                centrals,
                blanks: Blanks::new(),
                register: Register::new(),
                tables,
                commons,
                cached: AtomicUsize::new(0),
                shelves: AtomicUsize::new(0),
                unlisted: AtomicU32::new(0),
                roomy: AtomicUsize::new(0),
                aside: Aside::new(),
                asked: AtomicU64::new(0),
                hoard: Hoard::new(),
                patience: Patience::new(config.sparse),
                keeper,
                kin: Kin::default(),
            } after heap);
            place.as_ref()
        };
        objects.heap.driver().set_beside(beside);
        objects.shared_first().set_cache(objects.heap.lend());
        objects.begin_commons();
        objects
    }

    // ---- allocating
    // ---------------------------------------------------------------------------------------------------------

    /// Allocates memory for `layout`. `None` if there is no room, or the layout is impossible. Does not look for a
    /// large block on the shelf, unless it is aligned to more than a page: the caller has done that, if the structure
    /// is a thread's own.
    pub fn allocate(&self, thread: &Thread, layout: Layout) -> Option<NonNull<u8>> {
        match SizeClass::of(layout.size(), layout.align()) {
            Some(class) => self.allocate_slot(thread, class),
            None => {
                let run = self.allocate_run(thread, layout)?.run;
                Some(self.heap.address(run.start()))
            }
        }
    }

    /// Allocates memory that must be zero; the caller passes the result to [`zero`](Self::zero). Unlike
    /// [`allocate`](Self::allocate) it also looks on the shelf: next to the zeroing, that costs nothing.
    pub fn allocate_to_zero(&self, thread: &Thread, layout: Layout) -> Option<ToZero> {
        Some(match SizeClass::of(layout.size(), layout.align()) {
            Some(class) => ToZero::Slot(self.allocate_slot(thread, class)?),
            None => ToZero::Run(
                self.shelved_run(thread, layout)
                    .or_else(|| self.allocate_run(thread, layout))?,
            ),
        })
    }

    /// Zeroes the layout's bytes, except those known to be zero. Slow for large blocks, so call it with no lock and no
    /// structure held.
    pub fn zero(&self, fresh: ToZero, layout: Layout) -> NonNull<u8> {
        let (memory, bytes) = match fresh {
            ToZero::Slot(memory) => (memory, layout.size()),
            ToZero::Run(allocation) => {
                let (run, granule) = (allocation.run, self.heap.source().granule().div_ceil(PAGE_BYTES));
                // To the end of a granule, as the source can clear nothing shorter.
                let used = allocation.used().0.next_multiple_of(granule).min(run.pages().0);
                let bytes = PageCount(used).bytes(PAGE_SHIFT).min(layout.size());
                let cleared = used == 0 || self.clear(PageRun::known(run.start().0, used), bytes);
                (self.heap.address(run.start()), if cleared { 0 } else { bytes })
            }
        };
        // SAFETY: just allocated, with at least this many bytes.
        unsafe { memory.write_bytes(0, bytes) };
        memory
    }

    /// Extends the table to cover a run that was just taken, or gives the run back.
    #[inline]
    fn covers(&self, cache: Option<usize>, run: PageRun) -> Option<()> {
        if run.end().0 > self.spans.covered() {
            self.cover(cache, run)?;
        }
        Some(())
    }

    #[cold]
    fn cover(&self, cache: Option<usize>, run: PageRun) -> Option<()> {
        // Try to cover all that the heap has grown to, else just this run.
        let source = self.heap.source();
        let cover = |pages| self.tables.cover(source, &self.spans, pages);
        let grown = self.heap.grown().0.max(run.end().0);
        if cover(grown).or_else(|_| cover(run.end().0)).is_err() {
            self.free_run(cache, run);
            return None;
        }
        self.heap.driver().beside_reaches(self.spans.covered());
        Some(())
    }

    // ---- freeing
    // ------------------------------------------------------------------------------------------------------------

    /// Takes memory back. Does not put a large block on the shelf, unless it is aligned to more than a page: the caller
    /// has tried that, if the structure is a thread's own.
    ///
    /// # Safety
    ///
    /// It was allocated from this heap with this layout, and nothing uses it any more. The structure belongs to this
    /// heap and the caller has entered it; or it is the shared one, whose lock the caller holds.
    pub unsafe fn free(&self, thread: &Thread, memory: NonNull<u8>, layout: Layout) {
        let Some(class) = SizeClass::of(layout.size(), layout.align()) else {
            // SAFETY: the caller's promise.
            unsafe { self.free_large(thread, memory, layout) };
            return;
        };
        // SAFETY: the caller's promise: a slot of this class that the caller gives up.
        unsafe { self.free_slot(thread, class, memory) };
    }

    // ---- resizing
    // -----------------------------------------------------------------------------------------------------------

    /// Resizes memory of `layout` to `size` bytes, in place or elsewhere; the bytes up to the shorter length are kept.
    /// `None` if there is no room; then nothing has changed. If the block leaves a run, that goes to the heap (or
    /// aside), not on the shelf, so that blocks near it can grow; one aligned to more than a page goes there all the
    /// same. (A large block that becomes a slot seldom comes here: if there is a slot in the magazine,
    /// `global/calls.rs` moves it, and its run goes on the shelf.)
    ///
    /// Contents longer than a slot are left to the caller ([`Moved::To`]), who copies them when it has left the
    /// structure: some 100 MiB take longer than a thread that may need what lies in the structure waits. (If another
    /// empties the structure just when the caller comes back to free the old block, that goes on a shared shelf.)
    ///
    /// # Safety
    ///
    /// The memory was allocated from this heap with this layout and belongs to the caller. Once it has moved it no
    /// longer does; the new memory does. The structure: as for [`free`](Self::free).
    pub unsafe fn resize(&self, thread: &Thread, memory: NonNull<u8>, layout: Layout, size: usize) -> Option<Moved> {
        // SAFETY: the caller's promise.
        let placed = unsafe { self.place_resized(thread, memory, layout, size) }?;
        let Moved::To(moved) = placed else {
            return Some(placed);
        };
        if layout.size().min(size) > MAX_SLOT_BYTES {
            return Some(placed);
        }
        // SAFETY: as `place_resized` promises, which has made this layout; the old block is given up.
        unsafe {
            Self::copy_resized(memory, layout, moved, size);
            self.free(thread, memory, layout);
            let new = Layout::from_size_align_unchecked(size, layout.align());
            Some(Moved::With(self.settle_moved(thread, moved, new)))
        }
    }

    /// Finds where memory of `layout` can be `size` bytes long. If that is elsewhere ([`Moved::To`]), the caller must
    /// [copy](Self::copy_resized) the contents and free the old block.
    ///
    /// # Safety
    ///
    /// As for [`resize`](Self::resize); a block that moves belongs to the caller until it is freed.
    unsafe fn place_resized(&self, thread: &Thread, memory: NonNull<u8>, layout: Layout, size: usize) -> Option<Moved> {
        // Its size, rounded up to the alignment, must not overflow.
        let new = Layout::from_size_align(size, layout.align()).ok()?;
        let (old_class, new_class) = (
            SizeClass::of(layout.size(), layout.align()),
            SizeClass::of(size, layout.align()),
        );
        if old_class.is_some() && old_class == new_class || self.stays(thread, memory, layout, new) {
            return Some(Moved::Not);
        }
        if size > layout.size() {
            let moved = self.allocate_grown(thread, memory, layout, new).map(Moved::To);
            // What others need, and this thread keeps, has gone to the heap by now: perhaps the pages behind the block.
            return moved.or_else(|| self.stays(thread, memory, layout, new).then_some(Moved::Not));
        }
        let moved = self.allocate(thread, new).map(Moved::To);
        // SAFETY: the caller's promise.
        moved.or_else(|| unsafe { self.shorten(thread, memory, layout, new) })
    }

    /// Copies the contents of memory of `layout` to its new place, which is `size` bytes long.
    ///
    /// # Safety
    ///
    /// The caller owns both, they are of these lengths, and they do not overlap.
    pub unsafe fn copy_resized(memory: NonNull<u8>, layout: Layout, moved: NonNull<u8>, size: usize) {
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(memory.as_ptr(), moved.as_ptr(), layout.size().min(size)) };
    }

    /// Visits every thread's structure, including the shared ones. Only the counts of its magazines may be read. When
    /// the process ends, none: the thread that stopped may hold their locks, and may be the one that asks.
    fn for_each_thread(&self, mut visit: impl FnMut(&Thread)) {
        if !fatal::is_ending() {
            self.commons().for_each(|common| visit(&common.thread));
            self.register.for_each(visit);
        }
    }

    #[inline]
    fn central(&self, class: SizeClass) -> &Central {
        self.centrals.get(class.index())
    }

    /// Whether the address lies in the part of the heap that has grown, and in no gap.
    pub fn contains(&self, address: *const u8) -> bool {
        self.heap.memory_page_of(address).is_some()
    }

    /// Where an address lies. `None` outside the heap, and in its gaps.
    #[cfg_attr(not(feature = "checks"), allow(dead_code, reason = "for the checked build"))]
    pub fn place(&self, address: usize) -> Option<Place> {
        let page = self.heap.memory_page_of(ptr::without_provenance(address))?;
        let tag = (page.0 < self.spans.covered()).then(|| self.span_at(page)).flatten();
        let (class, back) = tag.map_or((0, 0), |(class, back)| (class.bytes(), back));
        let span = page.0.saturating_sub(back);
        Some(Place { class, span })
    }

    /// Whether there is memory at an address of the heap.
    #[cfg_attr(not(feature = "checks"), allow(dead_code, reason = "for the checked build"))]
    pub fn has_memory(&self, address: usize) -> bool {
        let page = self.heap.memory_page_of(ptr::without_provenance(address));
        page.is_some_and(|page| !self.heap.lacks_memory(page))
    }

    /// The usable bytes of a block of this layout: its slot, or its pages. Freeing it with that size names the same
    /// block.
    pub fn usable_size(layout: Layout) -> usize {
        match SizeClass::of(layout.size(), layout.align()) {
            Some(class) => class.bytes(),
            // One that is refused anyway may have no room to be rounded up.
            None => length::pages_for(layout)
                .0
                .checked_mul(PAGE_BYTES)
                .filter(|&bytes| Layout::from_size_align(bytes, layout.align()).is_ok())
                .unwrap_or(layout.size()),
        }
    }

    /// The spans, for the fast path.
    #[inline(always)]
    pub fn spans(&self) -> &Spans {
        &self.spans
    }

    /// The heap of pages below.
    pub fn heap(&self) -> &PageHeap<S> {
        &self.heap
    }

    /// The span that a page belongs to. For checks.
    #[inline]
    fn span_at(&self, page: PageIndex) -> Option<(SizeClass, usize)> {
        self.spans.entry(page).tag()
    }
}

#[cfg(test)]
impl Objects<crate::source::Region> {
    /// A heap of so many bytes, for a test.
    fn for_test(bytes: usize, caches: usize, background: bool) -> &'static Self {
        extern crate std;

        let memory = std::boxed::Box::leak(std::boxed::Box::new_uninit_slice(bytes));
        let source = crate::source::Region::from_static(memory);
        let keeper = Keeper::new(background, crate::scavenge::pressure::Notices::NONE, "");
        Self::open(source, Config::new(usize::MAX).caches(caches), keeper).unwrap()
    }
}
