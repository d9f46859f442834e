//! How an arena is set up.
//!
//! ```text
//!   limit   ├───────────────────────────────────────────┤   pages taken never exceed it
//!   prealloc├───────────┤                                   taken when the arena is made
//!   slab    ├──┤                                            taken at a time
//! ```

#![forbid(unsafe_code)]

/// How an arena is set up: its limit, the size of its slabs, what it takes at once.
///
/// `const` throughout. Sizes are in bytes and rounded up to whole pages of the backing, but for the limit, which is
/// kept to the byte.
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
    /// No limit but the backing's, slabs of the arena's own choice, nothing taken before it is needed.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            limit: None,
            slab: None,
            prealloc: 0,
            whole_huge_pages: false,
        }
    }

    /// The arena never holds more than `bytes` bytes of pages.
    #[must_use]
    pub const fn limit(mut self, bytes: usize) -> Self {
        self.limit = Some(bytes);
        self
    }

    /// Slabs are of `bytes` bytes; of an arena or pool, what takes more than half gets a block of its own. Of a list it
    /// is the first slab that is of so many bytes at most, in whole powers of two of slots.
    #[must_use]
    pub const fn slab(mut self, bytes: usize) -> Self {
        self.slab = Some(bytes);
        self
    }

    /// `bytes` bytes are taken when the arena is made, or it is not made. They stay its own until it is told to shrink.
    #[must_use]
    pub const fn prealloc(mut self, bytes: usize) -> Self {
        self.prealloc = bytes;
        self
    }

    /// Whether blocks of 2 MiB and more are whole huge pages: a multiple of 2 MiB, on a border of 2 MiB, so that a
    /// kernel that backs memory with huge pages can do so. Off by default: they may lie anywhere. Nothing is forced on
    /// a kernel that does not. Slabs are of 2 MiB at least, if the configuration does not say how large they are.
    ///
    /// What is wished of huge pages behind a heap, and so behind the arenas on it, is said by
    /// [`HugePages`](crate::HugePages).
    #[must_use]
    pub const fn whole_huge_pages(mut self, on: bool) -> Self {
        self.whole_huge_pages = on;
        self
    }
}
