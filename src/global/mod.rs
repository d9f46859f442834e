//! [`GlobalHeap`]: the allocator of a whole program, by one line.
//!
//! ```text
//!   alloc ──▶ this thread's structure? ──▶ magazine of the class: pop ──▶ done              ~2 ns
//!                      │ no                       │ empty, or no class
//!                      ▼                          ▼
//!             first use: make one         Objects: class, span, pages, source
//!             ended, or another heap's: the shared structure, under its lock
//! ```
//!
//! What it promises to its callers stands at [`GlobalHeap`]. The heap opens at the first call; threads that race for it
//! wait for the one that opens it. What becomes of it when the process forks: `fork.rs`; its thread: `background.rs`.

use core::alloc::Layout;
use core::cell::Cell;
use core::fmt;
use core::panic::{RefUnwindSafe, UnwindSafe};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use core::time::Duration;

use crate::fatal;
use crate::guard;
use crate::heap::{Clock, Config, MapEntry};
use crate::object::{GlobalStats, Keeper, ObjectFault, Objects, SizeClass, Snapshot, Thread, Working};
use crate::scavenge::pressure::Notices;
#[cfg(all(unix, feature = "std"))]
use crate::source::System;
use crate::source::{Region, Source};
use crate::units::PageCount;

#[cfg(not(all(unix, feature = "std")))]
mod nowhere;
#[cfg(all(unix, feature = "std"))]
mod pressure;
#[cfg(all(unix, feature = "std"))]
mod background;
#[cfg(all(unix, feature = "std"))]
mod pthread;
#[cfg(all(unix, feature = "std"))]
mod environment;
#[cfg(all(unix, feature = "std"))]
mod fork;
#[cfg(all(target_os = "linux", feature = "std"))]
mod unload;

#[cfg(all(unix, feature = "std"))]
pub(crate) use fork::Opening;
#[cfg(not(all(unix, feature = "std")))]
use nowhere as local;
#[cfg(not(all(unix, feature = "std")))]
pub(crate) use nowhere::Opening;
#[cfg(all(unix, feature = "std"))]
use pthread as local;

pub(crate) use local::resident;

mod exhausted;
mod options;
mod calls;

/// The address space a heap wishes for: 4 TiB, or a quarter of a 32-bit one.
#[cfg(all(unix, feature = "std"))]
const RESERVE_BYTES: usize = match 1_usize.checked_shl(42) {
    Some(bytes) => bytes,
    None => 1 << 30,
};

/// Threads that can have a cache of pages at a time, 64 bytes of address space each. Others go to the heap for pages.
#[cfg(all(unix, feature = "std"))]
const CACHES: usize = 1 << 14;

/// An allocator for `#[global_allocator]`.
///
/// ```
/// use pageheap::GlobalHeap;
///
/// #[global_allocator]
/// static HEAP: GlobalHeap = GlobalHeap::new();
///
/// let numbers: Vec<u32> = (0..1000).collect();
/// assert!(HEAP.stats().bytes_in_use() >= 4 * numbers.len());
/// ```
///
/// With a hard limit, beyond which allocations fail:
///
/// ```
/// use pageheap::GlobalHeap;
///
/// static HEAP: GlobalHeap = GlobalHeap::new().limit(256 << 20);
/// ```
///
/// # When it works
///
/// Always: before `main`, in constructors; in destructors of thread-locals and of pthread keys, in all of their rounds;
/// after `main`, while other threads still run; in several copies in one process. Nothing has to be set up, nothing is
/// torn down. The heap opens at the first allocation. If the source has no memory then, that returns null, and the next
/// one tries again.
///
/// **Not in signal handlers.** It is not async-signal-safe: neither allocate nor free there, nor, in a kernel, in a
/// handler of interrupts.
///
/// # What it promises
///
/// Beside [`GlobalAlloc`](core::alloc::GlobalAlloc)'s contract:
///
/// * It never unwinds, and never allocates from itself. `errno` stays as it was.
/// * Impossible layouts get null. A `realloc` that fails leaves the block as it was.
/// * Misuse that is found (a block freed twice, with another layout, or never allocated) ends the process, with a
///   message that names the address. Not all is found, and some of it late: a small block of another heap's, say, only
///   when it leaves the thread's magazine. `docs/reliability.md` has tables of that; the feature `checks` finds more.
/// * `fork`: the child allocates, frees what it inherited, starts threads and forks again, whatever the parent's other
///   threads were doing. What those had in caches and magazines is lost to the child.
///
/// # What it takes
///
/// * **A thread.** On Unix a heap that `GlobalHeap::new()` makes starts one, named `pageheap`, when the first MiB or so
///   has been freed. It gives memory back, and follows the cgroup's limit and memory pressure (Linux). Without it
///   (`background(false)`, or `PAGEHEAP_BACKGROUND=0`) nobody follows those: [`tick`](Self::tick) does not look at
///   them, and a hook of `on_pressure` is never called.
/// * **Addresses.** It reserves 4 TiB of them when it opens, or what it can get, without memory behind them: VIRT shows
///   that, RSS does not. [`reserve`](Self::reserve) asks for fewer.
/// * **For ever.** A value that is dropped or moved keeps its heap, addresses included, for threads may lead to it. So
///   it is meant to be a `static`: who makes `GlobalHeap::new()` as a local value, uses it and drops it, again and
///   again, has no addresses left after some dozens. [`Heap`](crate::Heap) is the one to be dropped.
///
/// # Several
///
/// A program may have several, and each is whole. But a thread has magazines of its own in one of them, the first that
/// it calls, as long as it lives; in the others it works under a lock that all such threads share: six times as long
/// for a small block.
pub struct GlobalHeap<
    #[cfg(all(unix, feature = "std"))] S: Source + 'static = System,
    #[cfg(not(all(unix, feature = "std")))] S: Source + 'static,
> {
    /// Null until the heap is open; written once, under [`Opening`].
    objects: AtomicPtr<Objects<S>>,
    /// Here until the heap is open. Only under [`Opening`].
    source: Cell<Option<S>>,
    config: Config,
    /// What the environment makes of that and of whether there is a background thread.
    overridden: fn(Config, bool) -> (Config, bool),
    /// Starts the background thread, if there is to be one.
    background: Option<fn(&'static Objects<S>)>,
    /// Whom the thread tells of pressure.
    notices: Notices,
    /// Below what it looks for the system's files: empty, but in tests.
    root: &'static str,
    /// The program's last word before a refusal.
    exhausted: Option<fn(Layout) -> bool>,
}

// SAFETY: the cell is used under the lock of `Opening` only, and `objects` leads to what is `Sync` if the source is.
unsafe impl<S: Source + Send + Sync + 'static> Sync for GlobalHeap<S> {}
// SAFETY: as above.
unsafe impl<S: Source + Send + Sync + 'static> Send for GlobalHeap<S> {}

// Nothing in it unwinds half way, as in the `PageHeap` below; a hook that does ends the process. It has the source, in
// the cell or behind the pointer.
impl<S: Source + UnwindSafe + 'static> UnwindSafe for GlobalHeap<S> {}
impl<S: Source + RefUnwindSafe + 'static> RefUnwindSafe for GlobalHeap<S> {}

#[cfg(all(unix, feature = "std"))]
impl GlobalHeap<System> {
    /// A heap over the operating system's memory.
    ///
    /// What the `static` says can be overridden, when the heap opens, by environment variables: `PAGEHEAP_RESERVE`,
    /// `PAGEHEAP_LIMIT` and `PAGEHEAP_SOFT_LIMIT` (bytes, or with `K`, `M`, `G`, `T`: `512M`), `PAGEHEAP_BACKGROUND=0`,
    /// `PAGEHEAP_HUGE_PAGES` (`system`, `advise`, `avoid`), `PAGEHEAP_RELEASE` (`at-once`, `lazily`) and
    /// `PAGEHEAP_SPARSE_ZEROING` (`0`, `1`). None is needed; what cannot be read, and a wish to reserve less than a
    /// megabyte, is ignored with a line on standard error, and set-user-ID programs do not look.
    #[must_use]
    pub const fn new() -> Self {
        // SAFETY: the system's pages are memory.
        let mut heap = unsafe { Self::with_source(System, Config::new(RESERVE_BYTES).caches(CACHES)) };
        heap.overridden = environment::overridden;
        heap.background(true)
    }
}

#[cfg(all(unix, feature = "std"))]
impl Default for GlobalHeap<System> {
    fn default() -> Self {
        Self::new()
    }
}

impl GlobalHeap<Region> {
    /// A heap over bytes that are there already: for programs without an operating system. Threads share one structure,
    /// under a lock that spins; so a handler of interrupts must not use it. An example is in the README.
    #[must_use]
    pub const fn in_region(region: Region) -> Self {
        // SAFETY: a region's pages are memory, for as long as anything taken from it is in use (the promise of its
        // maker).
        unsafe { Self::with_source(region, Config::new(usize::MAX).caches(1)) }
    }
}

impl<S: Source + 'static> GlobalHeap<S> {
    /// A heap over another source of memory.
    ///
    /// # Safety
    ///
    /// The source's pages are memory: Ready pages can be read and written until they are released. What it reserves
    /// stays reserved though it is dropped.
    #[must_use]
    pub const unsafe fn with_source(source: S, config: Config) -> Self {
        Self {
            objects: AtomicPtr::new(ptr::null_mut()),
            source: Cell::new(Some(source)),
            config,
            overridden: |config, background| (config, background),
            background: None,
            notices: Notices::NONE,
            root: "",
            exhausted: None,
        }
    }

    /// The address space to reserve, in bytes, 4 TiB where nothing is said (1 GiB where pointers have 32 bits); less is
    /// taken if there is not as much. There is no memory behind it: VIRT shows it, RSS does not. The smallest heap has
    /// 64 KiB, whatever is said.
    #[must_use]
    pub const fn reserve(mut self, bytes: usize) -> Self {
        self.config.reserve = bytes;
        self
    }

    /// Not more than `bytes` bytes of pages at a time, rounded down to pages of 8 KiB (less than one: nothing is to be
    /// had): whoever wants more gets null. Not counted are the heap's own tables, other heaps, and arenas on
    /// [`ProcessHeap`](crate::arena::ProcessHeap).
    #[must_use]
    pub const fn limit(mut self, bytes: usize) -> Self {
        self.config = self.config.limit(PageCount(bytes >> SizeClass::PAGE_SHIFT));
        self
    }

    // ---- what it knows
    // ------------------------------------------------------------------------------------------------------

    /// Counts. O(heap): 0.4 ns for each 64 pages. All zero before the first allocation.
    #[must_use]
    pub fn stats(&self) -> GlobalStats {
        self.opened().map(Objects::stats).unwrap_or_default()
    }

    /// Counts by classes too, and asks the system what the process has resident; to be shown, written as JSON or for
    /// Prometheus, or compared with an earlier one. O(heap). All zero before the first allocation.
    ///
    /// ```
    /// use pageheap::GlobalHeap;
    ///
    /// #[global_allocator]
    /// static HEAP: GlobalHeap = GlobalHeap::new();
    ///
    /// let before = HEAP.snapshot();
    /// let words: Vec<String> = (0..1000).map(|number| number.to_string()).collect();
    /// let after = HEAP.snapshot();
    /// println!("{}", after.since(&before));
    /// let mut text = String::new();
    /// after.prometheus(&mut text).unwrap();
    /// assert!(text.contains("pageheap_live_bytes "));
    /// # drop(words);
    /// ```
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.opened()
            .map(|objects| objects.snapshot(resident()))
            .unwrap_or_default()
    }

    /// Re-derives all the heap says of itself from its bits and spans. O(heap).
    ///
    /// For a heap nobody uses meanwhile: while somebody does, a fault that is none may be found, and no harm done. A
    /// thread that ends uses it until it has been joined; `std::thread::scope` alone waits for less. Who releases, or
    /// ticks, is waited for: some seconds at the most, then what he has in hand may be such a fault.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn check(&self) -> Result<(), ObjectFault> {
        self.opened().map_or(Ok(()), Objects::check)
    }

    /// What every page is, in order of address; see [`PageHeap::map`](crate::PageHeap::map). Nothing before the first
    /// allocation. To be drawn by a [`Picture`](crate::Picture).
    pub fn map(&self) -> impl Iterator<Item = MapEntry> + '_ {
        self.opened().into_iter().flat_map(Objects::map)
    }

    /// Whether an address lies in the part of the heap that has grown: in a block, between blocks, or in free pages.
    /// O(1), and touches no memory at the address.
    ///
    /// ```
    /// # use std::alloc::{GlobalAlloc, Layout};
    /// # use pageheap::GlobalHeap;
    /// static HEAP: GlobalHeap = GlobalHeap::new();
    ///
    /// let layout = Layout::new::<[u8; 100]>();
    /// // SAFETY: freed with the layout it was allocated with.
    /// unsafe {
    ///     let block = HEAP.alloc(layout);
    ///     assert!(HEAP.contains(block) && !HEAP.contains(&raw const HEAP as _));
    ///     HEAP.dealloc(block, layout);
    /// }
    /// ```
    #[must_use]
    pub fn contains(&self, address: *const u8) -> bool {
        self.opened().is_some_and(|objects| objects.contains(address))
    }

    /// How many bytes a block allocated with this layout has: the layout's size, rounded up to a slot or to pages. All
    /// may be used, and the block may be freed or resized with this size in its layout instead. O(1), the same for
    /// every heap.
    ///
    /// With the feature `checks` it is the layout's size: what lies behind is the checker's.
    ///
    /// ```
    /// # use std::alloc::Layout;
    /// # use pageheap::GlobalHeap;
    /// static HEAP: GlobalHeap = GlobalHeap::new();
    ///
    /// assert!(HEAP.usable_size(Layout::new::<[u8; 100]>()) >= 100);
    /// ```
    #[must_use]
    pub fn usable_size(&self, layout: Layout) -> usize {
        guard::usable_size(layout, Objects::<S>::usable_size(layout))
    }

    /// Gives back what this thread keeps for itself: free blocks to their classes, free pages to the heap. No memory
    /// goes to the system by that; who wants it to calls [`release`](Self::release), which includes this for all
    /// threads. Cost: ~7 µs where the magazines are full.
    pub fn flush_thread(&self) {
        if let Some(objects) = self.opened() {
            self.with_thread(objects, |thread| objects.flush(thread));
        }
    }

    /// Gives memory behind up to `pages` free pages of 8 KiB back to the source, what lies in store included, and
    /// returns how many. What threads keep for themselves stays: [`release`](Self::release) reaches that too. How both
    /// and `tick` differ: [Giving memory back](crate#giving-memory-back).
    ///
    /// Cost: stores are emptied, 0.4 ns for each 64 pages that are looked at, and for what goes back as `release`.
    pub fn scavenge(&self, pages: PageCount) -> PageCount {
        self.opened().map_or(PageCount::ZERO, |objects| objects.scavenge(pages))
    }

    /// Gives all memory behind free pages back, `bytes` bytes or a little more (not less than a page, or a huge page
    /// that would be cut), at once: free pages of the heap, spans in store, and what threads keep for themselves,
    /// magazines and shelves included, though they sleep; then what lies between live blocks of more than 1 KiB, by
    /// whole pages of the system. What stays are live blocks, what shares a page with them, and what threads that are
    /// at work meanwhile have in their hands (and those that sleep, where the system has no `membarrier`). Returns how
    /// many bytes.
    ///
    /// Cost: ~140 ns for each 4 KiB, 10 µs for 2 MiB in a huge page. Any thread may call it at any time; no allocation
    /// waits for it. It waits for who else releases, ticks, checks or forks, a quarter of a second at the most, and
    /// then goes on beside him.
    pub fn release(&self, bytes: usize) -> usize {
        let pages = PageCount::holding(bytes, SizeClass::PAGE_SHIFT);
        let released = self.opened().map_or(PageCount::ZERO, |objects| objects.release(pages));
        released.0 << SizeClass::PAGE_SHIFT
    }

    /// One step of the scavenger, for programs with a loop of their own and no background thread. Returns how long to
    /// wait before the next; see [`PageHeap::tick`](crate::PageHeap::tick) for what it gives back, and when.
    ///
    /// While there is a background thread, that is its work, by its own clock: then this does nothing, and returns
    /// [`Duration::MAX`]. That thread also follows the cgroup's limit and memory pressure; this does not.
    pub fn tick<C: Clock + ?Sized>(&self, clock: &C) -> Duration {
        match self.opened() {
            Some(objects) if !objects.keeper().is_there() => objects.tick(clock),
            _ => Duration::MAX,
        }
    }

    // ---- its limits, while it is in use
    // -------------------------------------------------------------------------------------

    /// The most bytes of pages the heap may grow to, as it is now. `None` before the first allocation.
    #[must_use]
    pub fn current_limit(&self) -> Option<usize> {
        Some(self.opened()?.heap().limit().0 << SizeClass::PAGE_SHIFT)
    }

    /// Changes the most bytes of pages the heap may grow to, whatever the `static` and the environment said: rounded
    /// down to pages of 8 KiB. What it has grown to stays, and can be had, but for blocks longer than the limit. Opens
    /// the heap if it is not open; `false` if it cannot be: nothing has changed.
    ///
    /// ```
    /// use pageheap::GlobalHeap;
    ///
    /// static HEAP: GlobalHeap = GlobalHeap::new();
    ///
    /// assert!(HEAP.set_limit(64 << 20) && HEAP.set_soft_limit(32 << 20));
    /// assert_eq!((HEAP.current_limit(), HEAP.current_soft_limit()), (Some(64 << 20), Some(32 << 20)));
    /// ```
    #[must_use]
    pub fn set_limit(&self, bytes: usize) -> bool {
        let objects = self.objects();
        objects.is_some_and(|objects| {
            objects.heap().set_limit(PageCount(bytes >> SizeClass::PAGE_SHIFT));
            true
        })
    }

    /// The most bytes of pages that should have memory behind them, as it is now; `usize::MAX` and the like are no
    /// limit. `None` before the first allocation.
    #[must_use]
    pub fn current_soft_limit(&self) -> Option<usize> {
        let pages = self.opened()?.heap().soft_limit();
        Some(pages.0.saturating_mul(1 << SizeClass::PAGE_SHIFT))
    }

    /// As [`set_limit`](Self::set_limit), for the most bytes of pages that should have memory behind them; see
    /// [`soft_limit`](Self::soft_limit). Takes effect with the next page that gets some, and with the next
    /// [`tick`](Self::tick).
    #[must_use]
    pub fn set_soft_limit(&self, bytes: usize) -> bool {
        let objects = self.objects();
        objects.is_some_and(|objects| {
            objects.heap().set_soft_limit(PageCount(bytes >> SizeClass::PAGE_SHIFT));
            true
        })
    }

    // ---- opening
    // ------------------------------------------------------------------------------------------------------------

    /// The heap, if it is open.
    #[inline(always)]
    fn opened(&self) -> Option<&'static Objects<S>> {
        // Acquire: pairs with the release in `open`; the heap is made.
        let objects = self.objects.load(Ordering::Acquire);
        // SAFETY: null, or what `Objects::open` made, which is never unmade.
        unsafe { objects.as_ref() }
    }

    /// The heap, which is opened if it is not. `None`: it cannot be, or the process is about to end.
    #[inline]
    fn objects(&self) -> Option<&'static Objects<S>> {
        if fatal::is_ending() {
            return None;
        }
        self.opened().or_else(|| self.open())
    }

    #[cold]
    fn open(&self) -> Option<&'static Objects<S>> {
        #[cfg(all(target_os = "linux", feature = "std"))]
        unload::register();
        let opening = Opening::begin();
        if let Some(objects) = self.opened() {
            return Some(objects);
        }
        let (config, background) = (self.overridden)(self.config, self.background.is_some());
        let keeper = Keeper::new(background, self.notices, self.root);
        match Objects::open(self.source.take()?, config, keeper) {
            Ok(objects) => {
                opening.enter(objects);
                // Release: pairs with `opened`.
                self.objects.store(ptr::from_ref(objects).cast_mut(), Ordering::Release);
                Some(objects)
            }
            Err((source, _)) => {
                self.source.set(Some(source));
                None
            }
        }
    }

    // ---- whose turn
    // ---------------------------------------------------------------------------------------------------------

    /// Fast: this thread's structure, to work with, if it has one of this heap and nobody is emptying it.
    #[inline(always)]
    fn enter(&self) -> Option<Working<'static>> {
        // Relaxed: compared, not followed.
        local::enter(self.objects.load(Ordering::Relaxed))
    }

    /// The same, with the heap.
    #[inline(always)]
    fn enter_with(&self) -> Option<(Working<'static>, &'static Objects<S>)> {
        // Relaxed: compared first. Who has a structure of the heap knew it when he got that.
        let objects = self.objects.load(Ordering::Relaxed);
        let thread = local::enter(objects)?;
        // SAFETY: a structure was entered by this address, so it is a heap's, which is never unmade.
        Some((thread, unsafe { &*objects }))
    }

    /// This thread's structure, made now if need be. `None` where it cannot have one, or has it not at the moment.
    #[inline]
    fn own(&self, objects: &'static Objects<S>) -> Option<Working<'static>> {
        self.enter().or_else(|| {
            local::enlist(objects)?;
            self.call_keeper(objects);
            #[cfg(all(target_os = "linux", feature = "std"))]
            unload::register_again();
            self.enter()
        })
    }

    /// Works with this thread's structure, or with the shared one.
    #[inline]
    fn with_thread<R>(&self, objects: &'static Objects<S>, work: impl FnOnce(&Thread) -> R) -> R {
        let Some(thread) = self.own(objects) else {
            return work(&objects.shared());
        };
        let result = work(&thread.stay());
        objects.settle_debts();
        result
    }
}

impl<S: Source + 'static> fmt::Debug for GlobalHeap<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GlobalHeap")
            .field("open", &self.opened().is_some())
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
