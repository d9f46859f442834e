//! How a heap gives memory back, and what it does when it runs short: the words a `static` may say.
//!
//! ```text
//!   GlobalHeap::new() .limit(…)          no more pages than that: beyond it …
//!                     .on_exhausted(f)   … f is asked, and then the answer is null
//!                     .soft_limit(…)     no more memory than that, as far as any is free
//!                     .background(false) no thread of its own: tick, release, scavenge
//!                     .on_pressure(80, f) the system is short: f is told, by the background thread
//!                     .huge_pages(…)     what is wished of them
//!                     .release_lazily(true) what goes back may stay resident until it is wanted elsewhere
//!                     .wait_for_release(true) nobody is refused what comes back in a moment
//!                     .sparse_zeroing(false) no file is opened to know what is zero
//! ```

#![forbid(unsafe_code)]

use core::alloc::Layout;

#[cfg(all(unix, feature = "std"))]
use crate::scavenge::pressure::{Notice, Pressure};
use crate::source::{HugePages, Source};
use crate::units::PageCount;

#[cfg(all(unix, feature = "std"))]
use super::background;
use super::{GlobalHeap, SizeClass};

#[cfg(all(unix, feature = "std"))]
impl<S: Source + Send + Sync + 'static> GlobalHeap<S> {
    /// Whether a background thread gives memory back while the program does something else, or nothing. On by default
    /// for [`new`](GlobalHeap::new), off for other sources.
    ///
    /// The thread is started when the first MiB has been freed, or threads have room for as much in their magazines,
    /// after the program's constructors have run: by a thread that frees, or begins, or is alone; never by the first
    /// allocation. It gives back what [`tick`](Self::tick) says: all that is free, within two seconds, once the program
    /// is silent, and what is above the last ten seconds' peak while it is not, at 1 % of one processor. It also
    /// follows the cgroup's limit and memory pressure (Linux): when they are high, all that is free goes back. For that
    /// it opens files, about once a second while it is awake.
    ///
    /// Without it memory goes back when [`tick`](Self::tick), [`release`](Self::release) or
    /// [`scavenge`](Self::scavenge) is called, and nobody follows cgroups and pressure.
    ///
    /// Verbs of a source other than [`System`](crate::source::System) run on that thread too: then its stack is 256
    /// KiB.
    ///
    /// ```
    /// use pageheap::GlobalHeap;
    ///
    /// static HEAP: GlobalHeap = GlobalHeap::new().background(false);
    /// ```
    #[must_use]
    pub const fn background(mut self, on: bool) -> Self {
        self.background = if on { Some(background::start::<S>) } else { None };
        self
    }

    /// Has the background thread tell of pressure, once a second for as long as it lasts: when the process's cgroup
    /// is filled to `from` percent of its limit (0 to 100), or its tasks have waited for memory for `from` percent of
    /// the last ten seconds, or the group has met a limit since the second before (an event). A threshold above 100 is
    /// told of events only. On Linux; elsewhere, and where the system does not say, nothing is heard. Nor is it without
    /// the background thread ([`background(false)`](Self::background), `PAGEHEAP_BACKGROUND=0`).
    ///
    /// It may be called up to four times, with a threshold and a hook each. In a second with pressure one hook is
    /// called: that of the highest threshold that is reached. If none is reached, but there was an event, it is the
    /// hook of the lowest threshold.
    ///
    /// The hook runs on that thread, whose stack is 256 KiB and whose signals are blocked. It may allocate and free;
    /// it must not unwind, nor fork. The thread exists from the first MiB freed on, or allocated by a thread
    /// that is alone.
    ///
    /// ```
    /// use pageheap::{GlobalHeap, Pressure};
    ///
    /// fn tell(pressure: Pressure) {
    ///     eprintln!("{} % of the limit, stalled {} %", pressure.filled(), pressure.stalled);
    /// }
    ///
    /// fn shrink(pressure: Pressure) {
    ///     tell(pressure);
    ///     // The program's own caches …
    /// }
    ///
    /// static HEAP: GlobalHeap = GlobalHeap::new().on_pressure(80, tell).on_pressure(95, shrink);
    /// ```
    ///
    /// In a library that may be closed by `dlclose` the hook must not need the loader (`dlopen`, `dlsym`, the first
    /// thread-local with a destructor): who closes it has the loader's lock, and waits for the hook.
    ///
    /// # Panics
    /// With a fifth threshold, which a `static` is not compiled with.
    #[must_use]
    pub const fn on_pressure(mut self, from: u8, hook: fn(Pressure)) -> Self {
        self.notices = self.notices.and(Notice { from, hook });
        self
    }

    /// Looks for the system's files, those of cgroups and of pressure, below `root` instead of `/`: for tests.
    #[doc(hidden)]
    #[cfg(feature = "internals")]
    #[must_use]
    pub const fn system_root(mut self, root: &'static str) -> Self {
        self.root = root;
        self
    }
}

impl<S: Source + 'static> GlobalHeap<S> {
    /// What is wished of huge pages behind the heap's; by default nothing, and the system does what it has been set
    /// to. Told to the system once, when the heap opens. It may refuse, and then nothing is different.
    ///
    /// ```
    /// use pageheap::{GlobalHeap, HugePages};
    ///
    /// static HEAP: GlobalHeap = GlobalHeap::new().huge_pages(HugePages::Advise);
    /// ```
    #[must_use]
    pub const fn huge_pages(mut self, wish: HugePages) -> Self {
        self.config = self.config.huge_pages(wish);
        self
    }

    /// Whether memory that goes back by and by stays resident until the system is short of it (`MADV_FREE`). Off by
    /// default, for who watches the process's resident size takes it for a leak. What [`release`](Self::release),
    /// limits and pressure ask for is given back at once all the same. See
    /// [`Config::release_lazily`](crate::Config::release_lazily).
    ///
    /// ```
    /// use pageheap::GlobalHeap;
    ///
    /// static HEAP: GlobalHeap = GlobalHeap::new().release_lazily(true);
    /// ```
    #[must_use]
    pub const fn release_lazily(mut self, on: bool) -> Self {
        self.config = self.config.release_lazily(on);
        self
    }

    /// Not more than `bytes` bytes of pages should have memory behind them. Nothing is refused for that: as long as
    /// there are more, a thread that takes pages without memory behind them gives back free ones afterwards: as many as
    /// it has taken, or 256 (2 MiB) if it has taken fewer, and never more than there are too many. If too few are free
    /// it empties stores as well. Rounded down to pages of 8 KiB. The same as
    /// [`Config::soft_limit`](crate::Config::soft_limit).
    #[must_use]
    pub const fn soft_limit(mut self, bytes: usize) -> Self {
        self.config = self.config.soft_limit(PageCount(bytes >> SizeClass::PAGE_SHIFT));
        self
    }

    /// Whether an allocation that finds no room waits for pages that are being released at the moment. Off by default:
    /// no allocation waits for a release. See [`Config::wait_for_release`](crate::Config::wait_for_release).
    ///
    /// ```
    /// use pageheap::GlobalHeap;
    ///
    /// static HEAP: GlobalHeap = GlobalHeap::new().limit(1 << 30).wait_for_release(true);
    /// ```
    #[must_use]
    pub const fn wait_for_release(mut self, on: bool) -> Self {
        self.config = self.config.wait_for_release(on);
        self
    }

    /// Whether a used block of 1 MiB or more that is to be zero is written only where the system says that it is not
    /// zero. On by default. See [`Config::sparse_zeroing`](crate::Config::sparse_zeroing).
    ///
    /// ```
    /// use pageheap::GlobalHeap;
    ///
    /// // Behind a filter of system calls that ends who opens a file.
    /// static HEAP: GlobalHeap = GlobalHeap::new().background(false).sparse_zeroing(false);
    /// ```
    #[must_use]
    pub const fn sparse_zeroing(mut self, on: bool) -> Self {
        self.config = self.config.sparse_zeroing(on);
        self
    }

    /// Asks `hook` before an allocation is refused that would fit the limit: whether it has freed something, and the
    /// allocation should be tried once more, 16 times at the most. It is told the layout of the block; with the feature
    /// `checks`, that of the block with its seal.
    ///
    /// It runs on the allocating thread, with none of the allocator's locks held. It may free and may call
    /// [`release`](Self::release); with an operating system it may allocate, and gets null where there is no room,
    /// without being asked again. It must not wait for a lock of the program's that an allocating thread may hold, and
    /// must not unwind: that ends the process.
    ///
    /// ```
    /// use std::alloc::Layout;
    /// use pageheap::GlobalHeap;
    ///
    /// fn drop_caches(_wanted: Layout) -> bool {
    ///     false // Nothing was found to free.
    /// }
    ///
    /// static HEAP: GlobalHeap = GlobalHeap::new().limit(1 << 30).on_exhausted(drop_caches);
    /// ```
    #[must_use]
    pub const fn on_exhausted(mut self, hook: fn(Layout) -> bool) -> Self {
        self.exhausted = Some(hook);
        self
    }
}
