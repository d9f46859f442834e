//! [`GlobalHeap`]: the allocator of a whole program, by one line.
//!
//! ```text
//!   alloc ──▶ this thread's structure? ──▶ magazine of the class: pop ──▶ done              ~2 ns
//!                      │ no                       │ empty, or no class
//!                      ▼                          ▼
//!             first use: make one         Objects: class, span, pages, source
//!             ended, or another heap's: a shared structure, under its lock
//! ```
//!
//! [`GlobalHeap`] states what it promises its callers. The heap opens at the first call; threads that race to open it
//! wait for the one that does. Forks are handled in `fork.rs`, the background thread in `background/`.

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
#[cfg(all(any(unix, windows), feature = "std"))]
use crate::source::System;
use crate::source::{Region, Source};
use crate::units::PageCount;

#[cfg(not(all(any(unix, windows), feature = "std")))]
mod nowhere;
#[cfg(not(all(unix, feature = "std")))]
mod opening;
#[cfg(all(any(target_os = "linux", target_os = "android"), feature = "std"))]
mod pressure;
#[cfg(all(unix, not(any(target_os = "linux", target_os = "android")), feature = "std"))]
#[path = "unwatched.rs"]
mod pressure;
#[cfg(all(windows, feature = "std"))]
mod status;
#[cfg(all(any(unix, windows), feature = "std"))]
mod inside;
#[cfg(all(windows, feature = "std"))]
mod tls;
#[cfg(all(any(unix, windows), feature = "std"))]
mod background;
#[cfg(all(unix, feature = "std"))]
mod pthread;
#[cfg(all(any(unix, windows), feature = "std"))]
mod environment;
#[cfg(all(unix, feature = "std"))]
mod fork;
#[cfg(all(any(unix, windows), feature = "std"))]
mod forever;
#[cfg(all(any(unix, windows), feature = "std"))]
mod process;
#[cfg(all(target_os = "linux", feature = "std"))]
mod unload;

#[cfg(all(unix, feature = "std"))]
pub(crate) use fork::Opening;
#[cfg(not(all(any(unix, windows), feature = "std")))]
use nowhere as local;
#[cfg(not(all(unix, feature = "std")))]
pub(crate) use opening::Opening;
#[cfg(all(unix, feature = "std"))]
use pthread as local;
#[cfg(all(windows, feature = "std"))]
use tls as local;

pub(crate) use local::resident;

mod empty;
pub(crate) mod exhausted;
mod limits;
mod options;
mod inline;
mod large;
mod calls;

/// The address space a heap asks for: 4 TiB, or a quarter of a 32-bit one.
#[cfg(all(any(unix, windows), feature = "std"))]
const RESERVE_BYTES: usize = match 1_usize.checked_shl(42) {
    Some(bytes) => bytes,
    None => 1 << 30,
};

/// How many threads can have a cache of pages at a time, 64 bytes of address space each. Others go to the heap for
/// pages.
#[cfg(all(any(unix, windows), feature = "std"))]
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
/// With a hard limit, above which allocations fail:
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
/// after `main`, while other threads still run; in several copies in one process. Nothing has to be set up, and nothing
/// is torn down. The heap opens at the first allocation. If the source has no memory then, that allocation returns
/// null, and the next one tries again.
///
/// **Not in signal handlers.** The heap is not async-signal-safe: do not allocate or free in a signal handler or, in a
/// kernel, in an interrupt handler. Nor may a signal handler call `fork`: the handlers of forks wait for the heap's
/// locks, one of which the thread that was interrupted may hold. (POSIX has `_Fork` for this, which calls no handlers.)
///
/// # What it promises
///
/// In addition to the contract of [`GlobalAlloc`](core::alloc::GlobalAlloc):
///
/// * It never unwinds, and never allocates from itself. `errno` is preserved.
/// * Impossible layouts get null. A `realloc` that fails leaves the block unchanged.
/// * Detected misuse (a block freed twice, with another layout, or never allocated) ends the process, with a message
///   that names the address. Not all misuse is detected, and some only late: a small block of another heap, for
///   instance, only when it leaves the thread's magazine. `docs/reliability.md` has tables of this; the feature
///   `checks` detects more.
/// * `fork`: the child can allocate, free what it inherited, start threads and fork again, whatever the parent's other
///   threads were doing. What those threads held in caches and magazines is lost to the child. Handlers of
///   `pthread_atfork` may use the heap too. (One that was registered before this copy of the crate - by the constructor
///   of another library, by a program that loads a library with it later, or, on systems other than Linux, Android,
///   FreeBSD and NetBSD, by anybody before the first heap opened - must not wait for other threads that use it, and nor
///   must a child that it makes, before it returns; and in the child it must start no thread that uses an arena or a
///   `PageHeap`.)
///
/// # What it takes
///
/// * **A thread.** A heap made by `GlobalHeap::new()` starts a thread (named `pageheap`, on Unix) once the first MiB or
///   so has been freed, or a little earlier (`background` says when). The thread gives memory back, and follows memory
///   pressure (Linux, Windows) and the cgroup's limit (Linux). Without it (`background(false)`, or
///   `PAGEHEAP_BACKGROUND=0`) nothing follows those: [`tick`](Self::tick) does not look at them, and hooks set by
///   `on_pressure` are never called.
/// * **Stack.** 4 KiB at most; the call that opens the heap, which is the first, 8 KiB (the same for a
///   [`Heap`](crate::Heap) and the first arena on the process's heap). So threads may have 16 KiB. But
///   [`snapshot`](Self::snapshot) takes up to 20, as the snapshot has 8 and may be copied. (On x86-64, optimised.)
/// * **Addresses.** When the heap opens it reserves 4 TiB of address space, or what it can get, without memory behind
///   it: this shows in VIRT, not in RSS. (On Windows four times the RAM, or 64 GiB.) [`reserve`](Self::reserve) asks
///   for less.
/// * **Memory for each thread**: 3 KiB; 8 to 170 KiB of tables, from its first small block on; and what its magazines
///   and its shelf hold.
/// * **Its lifetime.** A value that is dropped or moved leaves its heap in place, addresses included, because threads
///   may refer to it. So it is meant to be a `static`: a program that repeatedly makes `GlobalHeap::new()` as a local
///   value, uses it and drops it runs out of addresses after some dozens. Use [`Heap`](crate::Heap) for heaps that are
///   dropped.
///
/// # Several
///
/// A program may have several, each complete in itself: with a limit of its own, also if that comes from the
/// environment (a process with two may take `PAGEHEAP_LIMIT` twice). But a thread has its own magazines in only one of
/// them, the first it calls, for as long as it lives. In the others it shares some with other such threads, as in a
/// [`Heap`](crate::Heap), which takes some ten times as long for a small block (a pair 32 ns instead of 3).
pub struct GlobalHeap<
    #[cfg(all(any(unix, windows), feature = "std"))] S: Source + 'static = System,
    #[cfg(not(all(any(unix, windows), feature = "std")))] S: Source + 'static,
> {
    /// Null until the heap is open; written once, under [`Opening`].
    objects: AtomicPtr<Objects<S>>,
    /// Here until the heap is open, unless it has no source yet. Only under [`Opening`].
    source: Cell<Option<S>>,
    config: Config,
    /// Applies the environment to the configuration and to whether there is a background thread.
    overridden: fn(Config, bool) -> (Config, bool),
    /// Starts the background thread, if there is to be one.
    background: Option<fn(&'static Objects<S>)>,
    /// The hooks that the thread notifies of pressure.
    notices: Notices,
    /// The directory below which the system's files are looked up: empty except in tests.
    root: &'static str,
    /// The program's hook, called before a refusal.
    exhausted: Option<fn(Layout) -> bool>,
}

// SAFETY: the cell is used only under the lock of `Opening`, and `objects` points to a value that is `Sync` if the
// source is.
unsafe impl<S: Source + Send + Sync + 'static> Sync for GlobalHeap<S> {}
// SAFETY: as above.
unsafe impl<S: Source + Send + Sync + 'static> Send for GlobalHeap<S> {}

// Nothing in it unwinds half way, as in the `PageHeap` below; a hook that unwinds ends the process. It holds the
// source, in the cell or behind the pointer.
impl<S: Source + UnwindSafe + 'static> UnwindSafe for GlobalHeap<S> {}
impl<S: Source + RefUnwindSafe + 'static> RefUnwindSafe for GlobalHeap<S> {}

#[cfg(all(any(unix, windows), feature = "std"))]
impl GlobalHeap<System> {
    /// A heap over the operating system's memory.
    ///
    /// When the heap opens, environment variables can override what the `static` says: `PAGEHEAP_RESERVE`,
    /// `PAGEHEAP_LIMIT` and `PAGEHEAP_SOFT_LIMIT` (bytes, or with `K`, `M`, `G`, `T`: `512M`), `PAGEHEAP_BACKGROUND=0`,
    /// `PAGEHEAP_HUGE_PAGES` (`system`, `advise`, `avoid`), `PAGEHEAP_RELEASE` (`at-once`, `lazily`) and
    /// `PAGEHEAP_SPARSE_ZEROING` (`0`, `1`). None is needed. A value that cannot be read, or a reservation of less than
    /// a megabyte, is ignored with a line on standard error; a misspelt name is not noticed
    /// ([`current_limit`](Self::current_limit) says what holds). Set-user-ID programs ignore all of them.
    #[must_use]
    pub const fn new() -> Self {
        // SAFETY: the system's pages are memory.
        let mut heap = unsafe { Self::with_source(System, Config::new(RESERVE_BYTES).caches(CACHES)) };
        heap.overridden = environment::overridden;
        heap.background(true)
    }
}

#[cfg(all(any(unix, windows), feature = "std"))]
impl Default for GlobalHeap<System> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const GAPS: usize> GlobalHeap<Region<GAPS>> {
    /// A heap over existing bytes, for programs without an operating system. The README has an example. If the bytes
    /// are not known until the program runs, see [`empty`](Self::empty). They belong to the heap for ever, even if this
    /// value is dropped.
    ///
    /// Without `std`, all threads share one structure under a spin lock, or those of each [processor](Self::processors)
    /// do. So an interrupt handler must not use the heap.
    /// (With `std` each thread has its own: 3 KiB, 8 to 170 for tables, and what its magazines hold.)
    #[must_use]
    pub const fn in_region(region: Region<GAPS>) -> Self {
        // SAFETY: a region's pages are memory, for as long as anything taken from it is in use (promised by whoever
        // created the region).
        unsafe { Self::with_source(region, Config::new(usize::MAX).caches(1)) }
    }
}

impl<S: Source + 'static> GlobalHeap<S> {
    /// A heap over another source of memory.
    ///
    /// # Safety
    ///
    /// The source's pages are memory: Ready pages can be read and written until they are released. What it reserves
    /// stays reserved even if the source is dropped.
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

    /// The address space to reserve, in bytes: 4 TiB by default (1 GiB if pointers have 32 bits). If there is not as
    /// much, the heap takes less. There is no memory behind it: it shows in VIRT, not in RSS. The smallest heap has 64
    /// KiB and the largest just under 32 TiB, whatever is requested.
    #[must_use]
    pub const fn reserve(mut self, bytes: usize) -> Self {
        self.config.reserve = bytes;
        self
    }

    // ---- inspecting, and giving memory back
    // ------------------------------------------------------------------------------------------------------

    /// Collects the statistics. O(heap): 2-3 ns for each 64 pages, and 80 counts for each structure that threads have
    /// or had, under the lock that threads begin and end with. [`backed`](Self::backed) is O(1). All zero before the
    /// first allocation.
    #[must_use]
    pub fn stats(&self) -> GlobalStats {
        self.opened().map(Objects::stats).unwrap_or_default()
    }

    /// Collects statistics by size class too, and asks the system for the process's resident size. The result can be
    /// displayed, written as JSON or for Prometheus, or compared with an earlier one. O(heap). All zero before the
    /// first allocation.
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
        let mut snapshot = Snapshot::default();
        if let Some(objects) = self.opened() {
            objects.take_snapshot(&mut snapshot, resident());
        }
        snapshot
    }

    /// Re-derives everything the heap claims about itself from its bits and spans. O(heap).
    ///
    /// No thread should be using the heap meanwhile: otherwise the check may report a fault that is none, but it does
    /// no harm. A thread that ends uses the heap until it has been joined; `std::thread::scope` alone waits for less.
    /// The check waits for threads that release or tick, for some seconds at most; after that, what such a thread
    /// has in hand may appear as such a fault.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn check(&self) -> Result<(), ObjectFault> {
        self.opened().map_or(Ok(()), Objects::check)
    }

    /// The source. `None` before the first allocation.
    #[must_use]
    pub fn source(&self) -> Option<&S> {
        self.opened().map(|objects| objects.heap().source())
    }

    /// What every page is, in address order; see [`PageHeap::map`](crate::PageHeap::map). Empty before the first
    /// allocation. Draw it with a [`Picture`](crate::Picture).
    pub fn map(&self) -> impl Iterator<Item = MapEntry> + '_ {
        self.opened().into_iter().flat_map(Objects::map)
    }

    /// Whether an address lies in the part of the heap that has grown: in a block, between blocks, or in free pages,
    /// but not in a [gap](Source::gap). O(1), or O(gaps); does not touch memory at the address.
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

    /// The size of a block allocated with this layout: the layout's size, rounded up to a slot or to pages. All of it
    /// may be used, and the block may be freed or resized with a layout of this size instead. O(1), the same for every
    /// heap.
    ///
    /// With the feature `checks` this is the layout's size: the bytes behind it belong to the checker.
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

    /// Gives back what this thread keeps for itself: free blocks to their classes, free pages and the tables for free
    /// blocks to the heap; and what lies there for the next large block of a certain length. This returns no memory to
    /// the system; for that call [`release`](Self::release), which reaches what other threads keep as well. Cost: 4 to
    /// 9 µs for each size class whose magazine is full, 150 if those of all 80 are, with a spare each.
    pub fn flush_thread(&self) {
        if let Some(objects) = self.opened() {
            self.with_thread(objects, |thread| objects.flush(thread));
        }
    }

    /// Releases the memory of up to `pages` free pages of 8 KiB to the source, including those in stores, and returns
    /// how many. If there are fewer, the memory between live blocks of more than 1 KiB goes back too, unless the heap
    /// [releases lazily](Self::release_lazily) or its source commits, as on Windows. What threads keep for themselves
    /// stays; [`release`](Self::release) reaches that too. How both differ from `tick`: [Giving memory
    /// back](crate#giving-memory-back).
    ///
    /// Cost: emptying the stores, 2-3 ns for each 64 pages examined, and for the pages released the same as `release`.
    pub fn scavenge(&self, pages: PageCount) -> PageCount {
        self.opened().map_or(PageCount::ZERO, |objects| objects.scavenge(pages))
    }

    /// Gives back the memory of free pages at once: `bytes` bytes or a little more (at least a page, or a huge page
    /// rather than splitting it). Returns how many bytes. It takes, in this order:
    ///
    /// * free pages of the heap, spans in store, and what threads keep for themselves, magazines and shelves included,
    ///   even if those threads sleep;
    /// * then the memory between live blocks of more than 1 KiB, in whole pages of the system (but not on Windows).
    ///
    /// What remains is live blocks, what shares a page with them, what threads at work have in hand meanwhile (and
    /// sleeping ones, if the system has no fence through all threads, as Linux and Windows have, but not Wine), and
    /// each live thread's tables for free blocks: 8 KiB if it has used few, 170 KiB at most
    /// (`GlobalStats::rack_pages`).
    ///
    /// Cost: ~140 ns for each 4 KiB, 10 µs for 2 MiB in a huge page. Any thread may call it at any time; no allocation
    /// waits for it. It waits for other threads that release, tick, check or fork, for a quarter of a second at the
    /// most, and then proceeds alongside them.
    pub fn release(&self, bytes: usize) -> usize {
        let pages = PageCount::holding(bytes, SizeClass::PAGE_SHIFT);
        let Some(objects) = self.opened() else { return 0 };
        // What this thread keeps does not need a fence through all threads.
        if !objects.reaches_threads()
            && let Some(thread) = self.enter()
        {
            objects.flush(&thread.stay());
            objects.settle_debts();
        }
        objects.release(pages).bytes(SizeClass::PAGE_SHIFT)
    }

    /// One step of the scavenger, for programs with a loop of their own and no background thread. Returns how long to
    /// wait before the next step; [`PageHeap::tick`](crate::PageHeap::tick) says what it gives back, and when.
    ///
    /// [`Duration::MAX`] means that there is nothing to do for now: everything has been given back, or the heap is not
    /// open yet. Nothing reports when that changes, so a loop looks again after a while:
    ///
    /// ```no_run
    /// use std::thread::sleep;
    /// use std::time::{Duration, Instant};
    /// use pageheap::GlobalHeap;
    ///
    /// #[global_allocator]
    /// static HEAP: GlobalHeap = GlobalHeap::new().background(false);
    ///
    /// let begin = Instant::now();
    /// loop {
    ///     let pause = HEAP.tick(&|| begin.elapsed());
    ///     sleep(pause.min(Duration::from_secs(1)));
    /// }
    /// ```
    ///
    /// While there is a background thread, that thread does this work, by its own clock: this then does nothing and
    /// returns `Duration::MAX`. The thread also follows the cgroup's limit and memory pressure; this does not.
    pub fn tick<C: Clock + ?Sized>(&self, clock: &C) -> Duration {
        match self.opened() {
            Some(objects) if !objects.keeper().is_there() => objects.tick(clock),
            _ => Duration::MAX,
        }
    }

    /// Whether the heap has a background thread now: from when `background` says, and not at all with
    /// `background(false)`. If the system refuses a thread, the heap tries again after twice as many freed bytes each
    /// time, up to 1 GiB.
    #[must_use]
    pub fn has_background_thread(&self) -> bool {
        self.opened().is_some_and(|objects| objects.keeper().is_there())
    }

    // ---- opening
    // ------------------------------------------------------------------------------------------------------------

    /// The heap, if it is open.
    #[inline(always)]
    fn opened(&self) -> Option<&'static Objects<S>> {
        // Acquire: pairs with the release in `open`; the heap is complete.
        let objects = self.objects.load(Ordering::Acquire);
        // SAFETY: null, or what `Objects::open` made, which is never destroyed.
        unsafe { objects.as_ref() }
    }

    /// The heap, opened if necessary. `None`: it cannot be opened, or the process is about to end.
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

    // ---- the thread's structure
    // ---------------------------------------------------------------------------------------------------------

    /// Fast path: this thread's structure, if it has one of this heap and no other thread is emptying it.
    #[inline(always)]
    fn enter(&self) -> Option<Working<'static>> {
        // Relaxed: compared, not followed.
        local::enter(self.objects.load(Ordering::Relaxed))
    }

    /// As `enter`, but also returns the heap.
    #[inline(always)]
    fn enter_with(&self) -> Option<(Working<'static>, &'static Objects<S>)> {
        // Relaxed: compared first. A thread that has a structure of the heap knew the heap when it got that structure.
        let objects = self.objects.load(Ordering::Relaxed);
        let thread = local::enter(objects)?;
        // SAFETY: a structure was entered by this address, so it is the address of a heap, which is never destroyed.
        Some((thread, unsafe { &*objects }))
    }

    /// This thread's structure, made now if necessary. `None` if it cannot have one, or not at the moment.
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

    /// Works with this thread's structure. `None` if it cannot have one, or not at the moment.
    #[inline]
    fn with_own<R>(&self, objects: &'static Objects<S>, work: impl FnOnce(&Thread) -> R) -> Option<R> {
        let thread = self.own(objects)?;
        let result = work(&thread.stay());
        objects.settle_debts();
        Some(result)
    }

    /// Works with this thread's structure, or with a shared one.
    #[inline]
    fn with_thread<R>(&self, objects: &'static Objects<S>, work: impl Fn(&Thread) -> R) -> R {
        let done = self.with_own(objects, &work);
        done.unwrap_or_else(|| work(&objects.shared()))
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
