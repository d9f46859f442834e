//! What a heap is asked to be.

#![forbid(unsafe_code)]

use crate::source::HugePages;
use crate::units::PageCount;

/// How a heap is set up: how much address space it reserves, how far it may grow, how many caches it lends.
///
/// `const` throughout, so that it can stand in a `static`. It is for [`PageHeap::new`](crate::PageHeap::new),
/// [`Heap::new`](crate::Heap::new) and [`GlobalHeap::with_source`](crate::GlobalHeap::with_source), and not all of them
/// heed all of it:
///
/// | | `PageHeap` | `Heap` | `GlobalHeap` |
/// |---|---|---|---|
/// | [`caches`](Self::caches) | yes | always one | how many threads may have one at a time |
/// | [`shards`](Self::shards) | yes | of no use | of no use |
/// | [`sparse_zeroing`](Self::sparse_zeroing) | of no use: it clears nothing | yes | yes |
/// | all else | yes | yes | yes |
///
/// The pages of a `Heap` and of a `GlobalHeap` have 8 KiB. `GlobalHeap::new` and `GlobalHeap::in_region` bring a
/// configuration of their own, which the methods of `GlobalHeap` change, by bytes; in a region there is one cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    pub(crate) reserve: usize,
    pub(crate) limit: Option<PageCount>,
    pub(crate) soft_limit: Option<PageCount>,
    pub(crate) align: usize,
    pub(crate) caches: usize,
    pub(crate) shards: usize,
    pub(crate) huge_pages: HugePages,
    pub(crate) lazily: bool,
    pub(crate) patient: bool,
    pub(crate) sparse: bool,
}

impl Config {
    /// The reservation below which the ladder does not go, unless asked for less.
    pub(crate) const LEAST_BYTES: usize = 1 << 20;

    /// A heap that reserves `bytes` of address space for its pages, or what it can get. No limit below that, room for
    /// 64 caches, no shards.
    #[must_use]
    pub const fn new(bytes: usize) -> Self {
        Self {
            reserve: bytes,
            limit: None,
            soft_limit: None,
            align: 1,
            caches: 64,
            shards: 0,
            huge_pages: HugePages::System,
            lazily: false,
            patient: false,
            sparse: true,
        }
    }

    /// Not more than `pages` pages, whatever is reserved. More than is reserved is as much as that.
    ///
    /// Pages have 8 KiB, if the heap's [`Geometry`](crate::Geometry) does not say otherwise. [`PageCount::holding`]
    /// makes pages of bytes, rounded up:
    ///
    /// ```
    /// use pageheap::{Config, PageCount};
    ///
    /// let limit = PageCount::holding(64 << 20, 13); // 64 MiB in pages of 2^13 bytes.
    /// assert_eq!(limit, PageCount(8192));
    /// let config = Config::new(1 << 30).limit(limit);
    /// ```
    #[must_use]
    pub const fn limit(mut self, pages: PageCount) -> Self {
        self.limit = Some(pages);
        self
    }

    /// Not more than `pages` pages should have memory behind them. Nothing is refused for that: as long as there are
    /// more, a thread that takes pages without memory behind them gives back free ones afterwards: as many as it has
    /// taken, or 256 (2 MiB) if it has taken fewer, and never more than there are too many. If too few are free, a
    /// `Heap` or a `GlobalHeap` empties stores as well.
    #[must_use]
    pub const fn soft_limit(mut self, pages: PageCount) -> Self {
        self.soft_limit = Some(pages);
        self
    }

    /// What is wished of huge pages behind the heap's. The source is told once, for all it has reserved; it may refuse,
    /// and then nothing is different. Tables are left alone.
    #[must_use]
    pub const fn huge_pages(mut self, wish: HugePages) -> Self {
        self.huge_pages = wish;
        self
    }

    /// Whether memory that goes back by and by, by [`tick`](crate::PageHeap::tick) and
    /// [`scavenge`](crate::PageHeap::scavenge), stays where it is until the system wants it (`MADV_FREE`).
    ///
    /// Cheaper than to give it back at once, and to take it back again; but the process's resident size does not fall
    /// before the system is short of memory, and whoever watches it takes that for a leak. Such pages are never taken
    /// for zero, and [`Stats::backed`](crate::Stats::backed) counts them, as nobody knows whether they are.
    /// [`release`](crate::PageHeap::release) and what limits and pressure ask for is given back at once all the same.
    #[must_use]
    pub const fn release_lazily(mut self, on: bool) -> Self {
        self.lazily = on;
        self
    }

    /// Whether an allocation that finds no room waits for pages that are being released at the moment.
    ///
    /// They are nobody's while the source is at work on them: an eighth of the heap for each who scavenges, or a huge
    /// page. Off by default: an allocation never waits for that, and where such pages are all that is left it is
    /// refused. On, it waits for as long as the source's `release` takes, some microseconds as a rule, a good part of a
    /// second at the most: for programs that end when they are refused. An allocation that can be served waits in
    /// neither case.
    #[must_use]
    pub const fn wait_for_release(mut self, on: bool) -> Self {
        self.patient = on;
        self
    }

    /// Whether a layer of objects asks the source which pages of a used block of 1 MiB or more are zero, when it is to
    /// be zero, and writes to the others alone. On by default.
    ///
    /// With `System` on Linux it opens `/proc/thread-self/pagemap` for that, and closes it again. To be switched off in
    /// a program that lives under a filter of system calls which ends it where it opens a file (the background thread
    /// of a `GlobalHeap` opens files too), and in one that is restored page by page from elsewhere (`userfaultfd`, as
    /// by CRIU): what has not come yet counts as zero. A fork waits for who has the file open, for 0.1 s at the most.
    #[must_use]
    pub const fn sparse_zeroing(mut self, on: bool) -> Self {
        self.sparse = on;
        self
    }

    /// The address of page 0 is a multiple of `bytes`, rounded up to a power of two. Saves searching where runs of a
    /// large alignment are asked for; never needed for correctness. Where the source has no address so aligned with
    /// room behind it, or there is no such power of two, there is no heap
    /// ([`NewHeapError::NoPages`](crate::NewHeapError::NoPages)).
    #[must_use]
    pub const fn align(mut self, bytes: usize) -> Self {
        self.align = bytes;
        self
    }

    /// Room for `caches` handles ([`PageHeap::cache`](crate::PageHeap::cache)) at a time, 64 bytes each. Who asks for
    /// one more gets none. Over little memory a `PageHeap` does without: 0. A `Heap` has one whatever is said.
    #[must_use]
    pub const fn caches(mut self, caches: usize) -> Self {
        self.caches = caches;
        self
    }

    /// Makes `shards` caches that are called by a number, from 0, and not by a handle; 64 bytes each. For code that has
    /// no place to keep a handle for each thread, but knows a number, as that of the processor it runs on: see
    /// [`PageHeap::allocate_on`](crate::PageHeap::allocate_on).
    #[must_use]
    pub const fn shards(mut self, shards: usize) -> Self {
        self.shards = shards;
        self
    }
}
