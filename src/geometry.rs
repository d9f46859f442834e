//! The shape of a heap: how many pages make a word, a chunk, an entry of each level.
//!
//! ```text
//!   page   8 KiB                        1 << PAGE_SHIFT bytes, whatever the operating system's own page is
//!   word   64 pages      512 KiB        one 64-bit word of the bitmap; what a cache takes at once
//!   chunk  8 words         4 MiB        512 pages: one cache line of the bitmap, one leaf of the tree
//!   entry  8 chunks       32 MiB        level 3; then 256 MiB, 2 GiB, and 16 GiB at the root of five levels
//! ```
//!
//! A summary limits the tree to five levels: an entry of the root then covers 512 · 8⁴ = 2²¹ pages, the most that the
//! 21 bits of each field (and the one spare bit) can express. The root is as wide as the heap's range needs; a heap of
//! 1 TiB has 64 entries there.
//!
//! A [`Geometry`] is a type, so every shift is a compile-time constant. Fan-out and chunk size are parameters for the
//! sake of models and tests: a checker that tries every interleaving needs two words to a chunk and two children to a
//! node, in the code that ships.

#![forbid(unsafe_code)]

use core::fmt::Debug;

/// Pages in one word of the bitmap.
pub const WORD_PAGES: usize = 64;

/// log2 of [`WORD_PAGES`].
pub const WORD_SHIFT: u32 = WORD_PAGES.trailing_zeros();

/// The most levels a tree may have; see the [module](self) for why.
pub const MAX_LEVELS: usize = 5;

/// The most words a chunk may have: one cache line of 64 bytes.
pub const MAX_CHUNK_WORDS: usize = 8;

/// A cache line of words: those of a chunk, or the summaries of a node's children. Shorter blocks are padded with
/// zeros.
pub type Block = [u64; MAX_CHUNK_WORDS];

/// log2 of the most pages one summary can describe.
pub const MAX_SUMMARY_SHIFT: u32 = 21;

mod sealed {
    pub trait Sealed {}
}

/// The parameters of a [`Geometry`], as constants. Sealed: the only implementation is [`Geometry`].
pub trait Shape: sealed::Sealed + Copy + Debug + Send + Sync + 'static {
    /// Levels of the tree, the leaves included: 1..=5.
    const LEVELS: usize;
    /// log2 of the bytes in a page.
    const PAGE_SHIFT: u32;
    /// log2 of the children of a node.
    const FANOUT_SHIFT: u32;
    /// Words in a chunk: 1, 2, 4 or 8.
    const CHUNK_WORDS: usize;

    /// Bytes in a page.
    const PAGE_BYTES: usize = 1 << Self::PAGE_SHIFT;
    /// The level that has one entry for each chunk.
    const LEAF: usize = Self::LEVELS - 1;
    /// log2 of the pages in a chunk.
    const CHUNK_SHIFT: u32 = Self::CHUNK_WORDS.trailing_zeros() + WORD_SHIFT;
    /// Pages in a chunk.
    const CHUNK_PAGES: usize = 1 << Self::CHUNK_SHIFT;

    /// log2 of the pages that one entry of `level` covers. A level is at most [`LEAF`](Self::LEAF), here and below.
    #[inline(always)]
    fn span_shift(level: usize) -> u32 {
        Self::CHUNK_SHIFT + (Self::LEAF - level) as u32 * Self::FANOUT_SHIFT
    }

    /// How many entries of `level` cover the first `pages` pages.
    #[inline(always)]
    fn entries(level: usize, pages: usize) -> usize {
        let shift = Self::span_shift(level);
        (pages >> shift) + usize::from(pages & ((1 << shift) - 1) != 0)
    }
}

/// The shape of a heap, as a type: levels of the tree, page size, and (for models) fan-out and chunk size.
///
/// The default is five levels over 8 KiB pages, as in the Go runtime. A kernel will want `Geometry<5, 12>`: 4 KiB
/// pages. A small heap can do without the upper levels: `Geometry<1>` scans one summary for every 4 MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Geometry<
    const LEVELS: usize = MAX_LEVELS,
    const PAGE_SHIFT: u32 = 13,
    const FANOUT: usize = 8,
    const CHUNK_WORDS: usize = MAX_CHUNK_WORDS,
>;

impl Geometry {
    /// log2 of the bytes in a page of the default shape: 13. Pages of [`Heap`](crate::Heap) and
    /// [`GlobalHeap`](crate::GlobalHeap) are always these. For any other shape: [`Shape::PAGE_SHIFT`].
    ///
    /// ```
    /// use pageheap::{Geometry, PageCount};
    ///
    /// assert_eq!(PageCount::holding(64 << 20, Geometry::PAGE_SHIFT), PageCount(8192));
    /// ```
    pub const PAGE_SHIFT: u32 = <Self as Shape>::PAGE_SHIFT;

    /// Bytes in a page of the default shape: 8,192.
    pub const PAGE_BYTES: usize = <Self as Shape>::PAGE_BYTES;
}

impl<const L: usize, const P: u32, const F: usize, const W: usize> sealed::Sealed for Geometry<L, P, F, W> {}

impl<const L: usize, const P: u32, const F: usize, const W: usize> Geometry<L, P, F, W> {
    /// Fails to compile if the parameters do not describe a valid heap.
    const PROOF: () = {
        assert!(L >= 1 && L <= MAX_LEVELS, "LEVELS is 1..=5");
        assert!(
            F.is_power_of_two() && F >= 2 && F <= 8,
            "FANOUT is 2, 4 or 8: a block of children is one cache line"
        );
        assert!(
            W.is_power_of_two() && W <= MAX_CHUNK_WORDS,
            "CHUNK_WORDS is 1, 2, 4 or 8"
        );
        assert!(P >= 3 && P <= 30, "PAGE_SHIFT is 3..=30");
        let root = W.trailing_zeros() + WORD_SHIFT + (L as u32 - 1) * F.trailing_zeros();
        assert!(
            root <= MAX_SUMMARY_SHIFT,
            "an entry of the root covers at most 2^21 pages"
        );
    };
}

impl<const L: usize, const P: u32, const F: usize, const W: usize> Shape for Geometry<L, P, F, W> {
    const LEVELS: usize = {
        let () = Self::PROOF;
        L
    };
    const PAGE_SHIFT: u32 = P;
    const FANOUT_SHIFT: u32 = F.trailing_zeros();
    const CHUNK_WORDS: usize = W;
}

// The default geometry covers exactly what a summary can: log2 of an entry's pages is 21, 18, 15, 12, 9 by level.
const _: () = assert!(<Geometry as Shape>::CHUNK_SHIFT + 4 * <Geometry as Shape>::FANOUT_SHIFT == MAX_SUMMARY_SHIFT);

/// Whether a model checker explores the crate: it needs few of everything.
const IS_MODEL: bool = cfg!(any(
    all(loom, feature = "internals"),
    all(shuttle, feature = "internals")
));

/// How many hints there are. Under a model two: for one page, and for more.
pub const HINT_BANDS: usize = if IS_MODEL { 2 } else { 16 };

/// The run lengths that have their own hint, shortest first; see [`hints`](crate::hints).
pub const HINT_PAGES: [usize; HINT_BANDS] = *[1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 128, 256]
    .first_chunk()
    .unwrap();

// A search for one page has a hint, and the bands ascend.
const _: () = assert!(HINT_PAGES[0] == 1 && HINT_PAGES[1] == 2);

/// How many chunks can have a cache of their own at a time (`src/free_set/apart.rs`).
pub const BERTHS: usize = if IS_MODEL { 2 } else { 64 };

/// How often a proof that there is no room checks whether a thread has left the turnstile, before the bits decide.
pub const PROOF_ROUNDS: u32 = if IS_MODEL { 3 } else { 1 << 14 };

/// The same in a handler of a fork.
pub const PROOF_ROUNDS_FORKING: u32 = 1 << 4;

/// How often a proof that there is no room searches at most, if other threads free pages during each search: 0.3 ms.
/// (A model's other threads can disturb fewer.)
pub const PROOF_SEARCHES: u32 = if IS_MODEL { 1 << 6 } else { 1 << 10 };

/// How often it searches at most if the heap can grow, which does no harm.
pub const SEARCHES_TO_GROW: u32 = 8;

/// The most bytes in one batch between a thread and a size class: for slots so small that the batch has more than a
/// hundred of them, and for all others.
pub const BATCH_BYTES: [usize; 2] = if IS_MODEL { [0, 0] } else { [32 << 10, 512 << 10] };

/// The fewest slots in a batch, even if they take more bytes.
pub const FEWEST_SLOTS: usize = if IS_MODEL { 6 } else { 14 };
