//! The options of a `GlobalHeap`: how it gives memory back, and what it does when it runs short.
//!
//! ```text
//!   GlobalHeap::new() .limit(…)          no more pages than that: beyond it …
//!                     .on_exhausted(f)   … f is called, and then the allocation gets null
//!                     .soft_limit(…)     no more memory than that, as long as any is free
//!                     .background(false) no thread of its own: tick, release, scavenge
//!                     .on_pressure(80, f) the system is short of memory: the background thread calls f
//!                     .huge_pages(…)     the policy for huge pages
//!                     .release_lazily(true) released memory may stay resident until the system wants it
//!                     .wait_for_release(true) an allocation waits for pages that return in a moment
//!                     .sparse_zeroing(false) no file is opened to find out what is zero
//!                     .processors(4, f)  in a kernel: f tells which processor calls
//! ```

#![forbid(unsafe_code)]

use core::alloc::Layout;

#[cfg(all(any(unix, windows), feature = "std"))]
use crate::scavenge::pressure::{Notice, Pressure};
use crate::source::{HugePages, Source};

use super::GlobalHeap;
#[cfg(all(any(unix, windows), feature = "std"))]
use super::background;

#[cfg(all(any(unix, windows), feature = "std"))]
impl<S: Source + Send + Sync + 'static> GlobalHeap<S> {
    /// Whether a background thread gives memory back while the program does something else, or nothing. On by default
    /// for [`new`](GlobalHeap::new), off for other sources.
    ///
    /// The thread starts when the first MiB has been freed, or when the threads' magazines have room for as much, and
    /// after the program's constructors have run. It is started by a thread that frees, that begins to use the heap, or
    /// that is the only one; never by the first allocation.
    ///
    /// It gives back what [`tick`](Self::tick) says: all free memory within two seconds once the program is silent, and
    /// what exceeds the peak of the last ten seconds while it is not, at 1 % of one processor. What a thread keeps for
    /// itself counts as free once that has not changed for some eight seconds. The background thread also follows the
    /// cgroup's limit and memory pressure, about once a second while it is awake: it opens files on Linux; on Windows
    /// it asks whether physical memory is low. All free memory goes back at once, however long that takes, when the
    /// group is filled to 90 percent of its limit, when its tasks have waited for memory for a tenth of the last ten
    /// seconds, or when it has met a limit. While that lasts, this is repeated after 1, 2, 4, … seconds, in the end
    /// every 64.
    ///
    /// Without the thread, memory goes back only when [`tick`](Self::tick), [`release`](Self::release) or
    /// [`scavenge`](Self::scavenge) is called, and nothing follows cgroups and pressure. If the system refuses to
    /// create it, the heap works without it and tries again after twice as many freed bytes each time, up to 1 GiB;
    /// [`has_background_thread`](Self::has_background_thread) says whether it is there. The variable
    /// `PAGEHEAP_BACKGROUND=0` switches it off; `1` does not switch it on.
    ///
    /// The thread has the scheduling policy, the priority and the processors of the one that starts it. So a program
    /// with real-time or pinned threads better has none, and calls `tick` from a thread of its choice.
    ///
    /// The methods of a source other than [`System`](crate::source::System) run on that thread too; its stack is then
    /// 256 KiB.
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

    /// Has the background thread report memory pressure, once a second for as long as it lasts. There is pressure when
    /// the process's cgroup is filled to `from` percent of its limit (0 to 100), when its tasks have waited for memory
    /// for `from` percent of the last ten seconds, or when the group has met a limit since the previous second (an
    /// event). With a threshold above 100 only events are reported. On Windows there is an event in each second in
    /// which physical memory is low, and nothing else; on other systems, and if the system provides no data, nothing
    /// is reported. Nor is it without the background thread ([`background(false)`](Self::background),
    /// `PAGEHEAP_BACKGROUND=0`).
    ///
    /// Up to four thresholds can be set, each with a hook, by as many calls of `on_pressure`. In a second with pressure
    /// one hook is called: that of the highest threshold reached or, if there was an event but no threshold is reached,
    /// that of the lowest threshold.
    ///
    /// The hook runs on the background thread, which has a stack of 256 KiB and all signals blocked. It may allocate
    /// and free; it must neither unwind nor fork. The thread exists once the first MiB has been freed, or allocated by
    /// a thread that is the only one.
    ///
    /// ```
    /// use pageheap::{GlobalHeap, Pressure};
    ///
    /// fn tell(pressure: Pressure) {
    ///     eprintln!("memory is short: {pressure}");
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
    /// In a library that may be closed by `dlclose`, the hook must not need the loader (`dlopen`, `dlsym`, the first
    /// thread-local with a destructor): the thread that closes the library holds the loader's lock while it waits for
    /// the hook.
    ///
    /// # Panics
    /// On a fifth threshold; in a `static` that is a compile-time error.
    #[must_use]
    pub const fn on_pressure(mut self, from: u8, hook: fn(Pressure)) -> Self {
        self.notices = self.notices.and(Notice { from, hook });
        self
    }

    /// Looks up the system's files, those of cgroups and of pressure, below `root` instead of `/`: for tests.
    #[doc(hidden)]
    #[cfg(feature = "internals")]
    #[must_use]
    pub const fn system_root(mut self, root: &'static str) -> Self {
        self.root = root;
        self
    }
}

impl<S: Source + 'static> GlobalHeap<S> {
    /// Limits the heap to `bytes` bytes of pages at a time, rounded down to pages of 8 KiB (with less than one page,
    /// every allocation fails). Allocations beyond the limit get null: `Vec::try_reserve` and its like then return an
    /// error, while `Box`, `Vec::push` and most of `std` end the process ([`handle_alloc_error`]). In a full heap a
    /// block can nearly always be shortened, but not always from one to 32 KiB to at most 1 KiB, or below that: it has
    /// to move then, and there may be no room. So `shrink_to_fit` and `into_boxed_slice` may end the process too.
    ///
    /// A refusal takes some 30 µs; where other threads keep the heap busy meanwhile, up to some 30 ms.
    ///
    /// [`Stats::bytes_taken`](crate::Stats::bytes_taken) is what to compare with the limit, which covers what threads
    /// keep, their tables for free blocks included. (Before an allocation is refused, everything that is only kept is
    /// given up.) It covers arenas on this heap (`Arena::new_in(&HEAP)`), but not those on
    /// [`ProcessHeap`](crate::arena::ProcessHeap), the heap's metadata
    /// ([`Stats::metadata_bytes`](crate::Stats::metadata_bytes)), or other heaps.
    ///
    /// ```
    /// use pageheap::GlobalHeap;
    ///
    /// #[global_allocator]
    /// static HEAP: GlobalHeap = GlobalHeap::new().limit(64 << 20);
    ///
    /// let mut bytes: Vec<u8> = Vec::new();
    /// assert!(bytes.try_reserve(100 << 20).is_err());
    /// assert!(HEAP.stats().pages.bytes_taken() <= 64 << 20);
    /// ```
    ///
    /// [`handle_alloc_error`]: https://doc.rust-lang.org/std/alloc/fn.handle_alloc_error.html
    #[must_use]
    pub const fn limit(mut self, bytes: usize) -> Self {
        self.config = self.config.limit_bytes(bytes);
        self
    }

    /// The policy for huge pages behind the heap's pages; by default none, so the system's setting applies. The heap
    /// passes it to the system once, when it opens. The system may refuse, which changes nothing.
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

    /// Whether memory that is given back gradually stays resident until the system is short of it (`MADV_FREE`). Off by
    /// default, because to monitoring the resident size looks like a leak. What [`release`](Self::release), limits and
    /// pressure ask for is given back at once all the same. See
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

    /// Sets a soft limit: at most `bytes` bytes of pages, rounded down to pages of 8 KiB, should have memory behind
    /// them. This never makes an allocation fail. While the heap is above the limit, a thread that takes pages without
    /// memory behind them gives back free pages afterwards: as many as it has taken, or 256 (2 MiB) if it has taken
    /// fewer, but never more than the excess. If too few pages are free, more is given up, at a price:
    /// [`Config::soft_limit`](crate::Config::soft_limit) is the same and says what.
    #[must_use]
    pub const fn soft_limit(mut self, bytes: usize) -> Self {
        self.config = self.config.soft_limit_bytes(bytes);
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

    /// Whether zeroing a used block of 1 MiB or more writes only to the parts that the system reports as not zero. On
    /// by default. See [`Config::sparse_zeroing`](crate::Config::sparse_zeroing).
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

    /// Tells a heap in a kernel which processor it is called by, so that each has a structure with a lock of its own,
    /// and processors do not wait for one another: see [`Config::processors`](crate::Config::processors). Where threads
    /// have structures of their own (with the feature `std`, on Unix and Windows) only those use this that have none.
    ///
    /// ```
    /// use pageheap::GlobalHeap;
    /// use pageheap::source::Region;
    ///
    /// /// The number of the processor that runs this: a register, in a kernel.
    /// fn processor() -> usize {
    ///     0
    /// }
    ///
    /// static HEAP: GlobalHeap<Region> = GlobalHeap::empty().processors(4, processor);
    /// ```
    #[must_use]
    pub const fn processors(mut self, count: usize, current: fn() -> usize) -> Self {
        self.config = self.config.processors(count, current);
        self
    }

    /// Calls `hook` before refusing an allocation for want of memory, at the limit or because the system has none. What
    /// could not be met in an empty heap, such as a block longer than the limit, is refused without it. The hook
    /// returns whether it has freed something, so that the allocation should be tried again, 256 times at most. Each
    /// attempt takes some 30 µs, or up to as many milliseconds if other threads are busy with the heap. So free at
    /// least as much as is asked for, if that is known, and not one entry of a cache at a time. The hook receives the
    /// layout of the block; with the feature `checks`, that of the block with its seal.
    ///
    /// The hook runs on the allocating thread, with none of this heap's locks held. (If a verb of a source made the
    /// allocation, the rules for verbs hold for the hook.) It may free and may call
    /// [`release`](Self::release). With an operating system it may also allocate; it gets null if there is no room, and
    /// neither it nor the hook of another heap is called for that. Without one it must not, as it would be called
    /// again. It must not wait for a lock of the program that an allocating thread may hold. It must not unwind: that
    /// ends the process. It is not called for an arena on this heap, which gets an error.
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
