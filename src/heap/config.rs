//! The configuration of a heap.

#![forbid(unsafe_code)]

use core::hash::{Hash, Hasher};
use core::ptr;

use crate::fatal::{self, Number};
use crate::source::HugePages;
use crate::units::PageCount;

/// Which of several structures a caller uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Processors {
    pub(crate) count: usize,
    pub(crate) current: fn() -> usize,
}

impl Processors {
    /// The number of the processor that runs this.
    #[inline(always)]
    pub(crate) fn own(self) -> usize {
        fatal::unless_it_unwinds(
            self.current,
            "the function that tells processors has unwound; its address, how many there are",
            [
                Number::Address((self.current as *const ()).addr()),
                Number::Count(self.count),
            ],
        )
    }
}

impl PartialEq for Processors {
    fn eq(&self, other: &Self) -> bool {
        self.count == other.count && ptr::fn_addr_eq(self.current, other.current)
    }
}

impl Eq for Processors {}

impl Hash for Processors {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.count.hash(state);
        ptr::hash(self.current as *const (), state);
    }
}

/// A number of pages, or of bytes: how many pages these are, the heap's shape says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Amount {
    Pages(PageCount),
    Bytes(usize),
}

impl Amount {
    const UNLIMITED: Self = Self::Pages(PageCount(usize::MAX));

    /// How many whole pages of `1 << page_shift` bytes that is.
    pub(crate) fn pages(self, page_shift: u32) -> usize {
        match self {
            Self::Pages(pages) => pages.0,
            Self::Bytes(bytes) => bytes.checked_shr(page_shift).unwrap_or(0),
        }
    }
}

/// The configuration of a heap: how much address space it reserves, how far it may grow, how many caches it lends.
///
/// All methods are `const`, so a `Config` can stand in a `static`. [`PageHeap::new`](crate::PageHeap::new),
/// [`Heap::new`](crate::Heap::new) and [`GlobalHeap::with_source`](crate::GlobalHeap::with_source) take one, but not
/// all of them use every option:
///
/// | | `PageHeap` | `Heap` | `GlobalHeap` |
/// |---|---|---|---|
/// | [`caches`](Self::caches) | yes | always one | how many threads may have one at a time |
/// | [`shards`](Self::shards) | yes | unused | unused |
/// | [`sparse_zeroing`](Self::sparse_zeroing) | unused: it clears nothing | yes | yes |
/// | [`processors`](Self::processors) | unused | yes | where threads have no structures of their own |
/// | everything else | yes | yes | yes |
///
/// Pages of a `Heap` or a `GlobalHeap` are 8 KiB, fewer than 2^32 of them. `GlobalHeap::new` and
/// `GlobalHeap::in_region` bring their own configuration, which the methods of `GlobalHeap` change in bytes; a heap in
/// a region has one cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    pub(crate) reserve: usize,
    pub(crate) limit: Amount,
    pub(crate) soft_limit: Amount,
    pub(crate) align: usize,
    pub(crate) caches: usize,
    pub(crate) shards: usize,
    pub(crate) huge_pages: HugePages,
    pub(crate) lazily: bool,
    pub(crate) patient: bool,
    pub(crate) sparse: bool,
    pub(crate) processors: Option<Processors>,
    /// How many bytes of pages to begin with, if that is enough; at most a chunk.
    pub(crate) first: usize,
}

impl Config {
    /// The smallest reservation that the ladder tries, unless the caller asks for less.
    pub(crate) const LEAST_BYTES: usize = 1 << 20;

    /// A heap that reserves `bytes` of address space for its pages, or as much as it can get. Addresses cost no memory,
    /// only room under a limit on them (`ulimit -v`), so reserve what the heap may ever need, and use
    /// [`limit_bytes`](Self::limit_bytes) to keep it small. How much it got is what its limit is at the most:
    /// [`PageHeap::capacity`](crate::PageHeap::capacity), [`Stats::limit`](crate::Stats::limit). The defaults: no limit
    /// below the reservation, room for 64 caches, no shards.
    #[must_use]
    pub const fn new(bytes: usize) -> Self {
        Self {
            reserve: bytes,
            limit: Amount::UNLIMITED,
            soft_limit: Amount::UNLIMITED,
            align: 1,
            caches: 64,
            shards: 0,
            huge_pages: HugePages::System,
            lazily: false,
            patient: false,
            sparse: true,
            processors: None,
            first: usize::MAX,
        }
    }

    /// Limits the heap to `pages` pages, however much is reserved. A limit above the reservation counts as the
    /// reservation.
    ///
    /// A page is 8 KiB unless the heap's [`Geometry`](crate::Geometry) says otherwise: `PageCount(64 << 20)` would be
    /// no limit of 64 MiB but of 512 GiB, and so none. For a limit in bytes: [`limit_bytes`](Self::limit_bytes).
    #[must_use]
    pub const fn limit(mut self, pages: PageCount) -> Self {
        self.limit = Amount::Pages(pages);
        self
    }

    /// As [`limit`](Self::limit), which it replaces: limits the heap to `bytes` bytes of pages, rounded down to whole
    /// pages of whatever size the heap has. With less than one page, every allocation fails.
    ///
    /// ```
    /// # #[cfg(all(any(unix, windows), feature = "std"))] {
    /// use pageheap::source::System;
    /// use pageheap::{Config, Heap, PageCount};
    ///
    /// let heap = Heap::new(System, Config::new(1 << 30).limit_bytes(64 << 20)).unwrap();
    /// assert_eq!(heap.limit(), PageCount(8192)); // 64 MiB, in pages of 8 KiB.
    /// # }
    /// ```
    #[must_use]
    pub const fn limit_bytes(mut self, bytes: usize) -> Self {
        self.limit = Amount::Bytes(bytes);
        self
    }

    /// Sets a soft limit: at most `pages` pages should have memory behind them. This never makes an allocation fail.
    /// While the heap is above the limit, a thread that takes pages without memory behind them gives back free pages
    /// afterwards: as many as it has taken, or 256 (2 MiB) if it has taken fewer, but never more than the excess. If
    /// too few pages are free, a `Heap` or a `GlobalHeap` also gives up stores, the shelf and the memory between live
    /// blocks, keeps magazines small and, further above the limit, empties them, other threads' too. A program with
    /// more live than its soft limit pays for that all the time: its allocations took 1.1 to 12 times as long.
    #[must_use]
    pub const fn soft_limit(mut self, pages: PageCount) -> Self {
        self.soft_limit = Amount::Pages(pages);
        self
    }

    /// As [`soft_limit`](Self::soft_limit), which it replaces: at most `bytes` bytes of pages, rounded down to whole
    /// pages of whatever size the heap has, should have memory behind them.
    ///
    /// ```
    /// use pageheap::Config;
    ///
    /// const TENANT: Config = Config::new(1 << 30).limit_bytes(64 << 20).soft_limit_bytes(48 << 20);
    /// ```
    #[must_use]
    pub const fn soft_limit_bytes(mut self, bytes: usize) -> Self {
        self.soft_limit = Amount::Bytes(bytes);
        self
    }

    /// Sets the policy for huge pages behind the heap's pages. The heap passes it to the source once, for the whole
    /// reservation; the source may refuse, which changes nothing. The tables are not affected.
    #[must_use]
    pub const fn huge_pages(mut self, wish: HugePages) -> Self {
        self.huge_pages = wish;
        self
    }

    /// Whether memory that is given back gradually, by [`tick`](crate::PageHeap::tick) and
    /// [`scavenge`](crate::PageHeap::scavenge), stays resident until the system wants it (`MADV_FREE`).
    ///
    /// This is cheaper than giving it back at once and faulting it in again. But the process's resident size does not
    /// fall until the system is short of memory, which looks like a leak to monitoring. The heap never assumes that
    /// such pages are zero, and [`Stats::backed`](crate::Stats::backed) counts them, because nobody knows whether they
    /// still have memory (unless the source commits pages: then they have to be committed again, and do not count).
    /// What [`release`](crate::PageHeap::release), limits and memory pressure ask for is given back at once all the
    /// same.
    #[must_use]
    pub const fn release_lazily(mut self, on: bool) -> Self {
        self.lazily = on;
        self
    }

    /// Whether an allocation that finds no room waits for pages that are being released at the moment.
    ///
    /// Those pages belong to nobody while the source works on them: an eighth of the heap for each thread that
    /// scavenges, or a huge page. Off by default: an allocation never waits for a release, and is refused if such pages
    /// are all that is left. If on, it waits as long as the source's `release` takes: usually some microseconds, at
    /// most a good part of a second. This is for programs that end when an allocation is refused. An allocation that
    /// can be served never waits.
    #[must_use]
    pub const fn wait_for_release(mut self, on: bool) -> Self {
        self.patient = on;
        self
    }

    /// Whether the object layer, to zero used pages of 1 MiB or more, asks the source which of its pages are already
    /// zero and writes only to the others. On by default.
    ///
    /// `System` on Linux opens `/proc/thread-self/pagemap` for this and closes it again. Switch it off in two cases:
    ///
    /// * The program runs under a system-call filter that kills it when it opens a file. (The background thread of a
    ///   `GlobalHeap` opens files too.)
    /// * The process is restored page by page (`userfaultfd`, as by CRIU): a page that has not arrived yet would count
    ///   as zero.
    ///
    /// A fork waits for a thread that has the file open, for 0.1 s at most.
    #[must_use]
    pub const fn sparse_zeroing(mut self, on: bool) -> Self {
        self.sparse = on;
        self
    }

    /// Aligns the address of page 0 to `bytes`, rounded up to a power of two. This saves searching if runs with a large
    /// alignment are requested; it is never needed for correctness. If the source has no address so aligned with room
    /// behind it, or there is no such power of two, no heap is created
    /// ([`NewHeapError::NoPages`](crate::NewHeapError::NoPages)).
    #[must_use]
    pub const fn align(mut self, bytes: usize) -> Self {
        self.align = bytes;
        self
    }

    /// Provides room for `caches` handles ([`PageHeap::cache`](crate::PageHeap::cache)) at a time, 64 bytes each; a
    /// request for one more gets none. With little memory a `PageHeap` can do without: 0. A `Heap` always has exactly
    /// one.
    #[must_use]
    pub const fn caches(mut self, caches: usize) -> Self {
        self.caches = caches;
        self
    }

    /// Gives a `Heap` or a `GlobalHeap` several structures for its callers, each with a lock of its own, and `current`
    /// to tell which one a caller is to use: for kernels, in which threads have none of their own. `current` returns
    /// the number of the processor that runs it. `count` is how many there are: up to 64 have a structure of their own;
    /// of more each shares one with some others, as do those with numbers that are too large.
    ///
    /// Any answer of `current` is right: a thread may be moved to another processor at any time, and then waits for a
    /// lock, or keeps others waiting. `current` is called with each call of the heap, must not use the heap, and should
    /// take a nanosecond. If it unwinds, the process ends. A structure takes 3.3 KiB, all together a 32nd of the heap's
    /// limit at the most; those for which there is no room share the first. They lie beside the heap's tables, or, if
    /// the source has no more room there, in the heap's first pages.
    ///
    /// Without this, threads of a program with an operating system are told apart by themselves, and those of a kernel
    /// share one structure. For pages alone there are [`shards`](Self::shards).
    #[must_use]
    pub const fn processors(mut self, count: usize, current: fn() -> usize) -> Self {
        self.processors = Some(Processors { count, current });
        self
    }

    /// Creates `shards` caches that are addressed by a number, from 0, instead of a handle; 64 bytes each. They are for
    /// code that has no place to keep a handle for each thread but knows a number, such as that of the processor it
    /// runs on: see [`PageHeap::allocate_on`](crate::PageHeap::allocate_on).
    #[must_use]
    pub const fn shards(mut self, shards: usize) -> Self {
        self.shards = shards;
        self
    }
}
