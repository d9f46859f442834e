//! How an arena is configured.
//!
//! ```text
//!   limit   ├───────────────────────────────────────────┤   pages taken never exceed it
//!   prealloc├───────────┤                                   taken when the arena is made
//!   slab    ├──┤                                            taken at a time
//! ```

#![forbid(unsafe_code)]

/// The configuration of an arena: its limit, the size of its slabs, what it preallocates.
///
/// All methods are `const`. Sizes are in bytes and are rounded up to whole pages of the backing, except for the limit,
/// of which only whole pages can be used. (A list first rounds `slab` down to a power of two of slots.)
///
/// ```
/// use pageheap::arena::ArenaConfig;
///
/// const SMALL: ArenaConfig = ArenaConfig::new().limit(64 << 20).slab(1 << 20).prealloc(4 << 20);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ArenaConfig {
    pub(super) limit: Option<usize>,
    pub(super) slab: Option<usize>,
    pub(super) prealloc: usize,
    pub(super) whole_huge_pages: bool,
}

impl ArenaConfig {
    /// No limit but the backing's, slabs of a size the arena chooses, no preallocation.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            limit: None,
            slab: None,
            prealloc: 0,
            whole_huge_pages: false,
        }
    }

    /// Limits the arena to `bytes` bytes of pages, which is never exceeded: of 100,000 bytes 12 pages of 8 KiB can be
    /// used, of less than a page nothing. All pages that the arena has taken count, however much of them is handed out,
    /// and so does what a list needs to keep its books.
    #[must_use]
    pub const fn limit(mut self, bytes: usize) -> Self {
        self.limit = Some(bytes);
        self
    }

    /// Sets the size of a slab. In an arena or pool, an object larger than half a slab gets a block of its own, unless
    /// it fits what is left of the current slab. In a list this is the maximum size of the first slab, which holds a
    /// power of two of slots.
    #[must_use]
    pub const fn slab(mut self, bytes: usize) -> Self {
        self.slab = Some(bytes);
        self
    }

    /// Preallocates `bytes` bytes when the arena is made; if that fails, so does making the arena. The arena keeps them
    /// until it is told to shrink. In a list they are the first slab, and may have no more slots than a list:
    /// 4,026,531,839.
    #[must_use]
    pub const fn prealloc(mut self, bytes: usize) -> Self {
        self.prealloc = bytes;
        self
    }

    /// Whether blocks of 2 MiB and more are whole huge pages: their size a multiple of 2 MiB, aligned to 2 MiB, so that
    /// the kernel can back them with huge pages if it does so at all. Off by default: blocks may then lie anywhere. If
    /// on, slabs are at least 2 MiB, unless the configuration sets their size. (In an arena or pool, the block of an
    /// object that fills its huge pages has one ordinary page more, for the books.)
    ///
    /// Which huge pages to request for the heap, and so for the arenas on it, is set by
    /// [`HugePages`](crate::HugePages).
    #[must_use]
    pub const fn whole_huge_pages(mut self, on: bool) -> Self {
        self.whole_huge_pages = on;
        self
    }
}
