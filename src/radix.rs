//! The tree of summaries over the bitmap: implicit levels, a search that climbs no higher than it must, and protocol R.
//!
//! ```text
//!   level 0   ┌──────────────── root: as wide as the heap's range, 16 GiB an entry ───────────────┐
//!   level 1   │ 8 children, one cache line │ …                                                    │
//!     …
//!   level 4   │ leaf = one chunk │ …                    (LEVELS = 5; with LEVELS = 1 the leaves are the root)
//!             ─────────────────────────────────────────────────────────────────────────────────────
//!   bitmap    8 words per leaf                          the truth; this module never sees it
//! ```
//!
//! Entry i of a level covers entries 8i .. 8i + 8 of the level below. There are no pointers: a parent is a shift away.
//!
//! **Search.** First fit by address, from any page on. [`Cursor`] stands on an entry and carries the free pages right before it.
//! It moves right; at the end of a block it climbs to the parent's neighbour; where an entry's `max` is enough it goes down; where
//! what it carries and the entry's `start` together are enough, a run has been found that straddles entries, and no bit need be
//! looked at. A search that ends near where it began costs a few loads; one that finds nothing costs at most 7 · 4 loads and one
//! for each 16 GiB grown: 90 loads for 1 TiB.
//!
//! **Summaries are advice.** A leaf may promise too much: a claim leaves it as it is, and the search that trips over the promise
//! lowers it. An inner node may be behind its children while somebody is on the way up. Neither can hurt, because a claim is made
//! on the bits. What must not happen is that a summary promises too *little* with nobody on the way: those pages would be lost.
//! Hence **protocol R**, for every node:
//!
//! ```text
//!   loop { fence;  old = node;  new = merge(children);  if old is right { break }  CAS(node, old, new) }     and once more
//!                                                                                    after a CAS that succeeded
//! ```
//!
//! Why this is exact when everybody has left: take the last successful CAS on a node, by P. P looked again after it and found the
//! children as it had written. If a child was changed later, by Q, then Q's change and Q's look at the node have a fence between
//! them, as have P's CAS and P's last look at the children: one of the two saw the other. If P saw Q's change, P's value has it.
//! If not, Q saw P's value, and found it right or would have written again - but P's was the last. Upward by induction: who
//! changes a node goes on to its parent. A CAS may succeed on a value that went away and came back (ABA); its author looks again and
//! mends it, and until then stands in the [turnstile](crate::sync::Turnstile), which tells everybody not to conclude anything.
//!
//! Without the fence, or without the second look, updates are lost: `tests/models` keeps both variants, as models that must fail.
//! The protocol and those counterexamples come from this project's own models; the tree is the Go proposal's.

#![forbid(unsafe_code)]

use core::marker::PhantomData;

use crate::geometry::{MAX_LEVELS, Shape};
use crate::summary::Summary;
use crate::sync::{AtomicU64, Ordering, Table, fence_after_rmw};

/// The summaries of a heap.
#[derive(Debug)]
pub struct Tree<G: Shape> {
    /// `levels[0]` is the root, `levels[G::LEAF]` has an entry for each chunk; those behind are empty. Every level but the root is
    /// made of whole blocks of children.
    levels: [Table<AtomicU64>; MAX_LEVELS],
    shape: PhantomData<G>,
}

/// Where a search stands.
#[derive(Clone, Copy, Debug)]
pub struct Cursor {
    level: usize,
    index: usize,
    /// Free pages right before the entry, as far as is known.
    carry: usize,
}

/// What a search came upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A run that begins at this page and straddles entries, if the summaries are right.
    Run(usize),
    /// This chunk holds a run, if its leaf is right. `carry` free pages are before it.
    Chunk {
        /// Index of the chunk.
        chunk: usize,
        /// Free pages right before the chunk.
        carry: usize,
    },
    /// Nothing up to the end of the heap.
    End,
}

impl Cursor {
    /// Stands right after `chunk`, the last `carry` pages of which are free.
    #[inline]
    #[must_use]
    pub fn after<G: Shape>(chunk: usize, carry: usize) -> Self {
        let mut cursor = Self {
            level: G::LEAF,
            index: chunk,
            carry,
        };
        cursor.advance::<G>(carry);
        cursor
    }

    /// Leaves the entry it stands on, with `carry` free pages right before the next.
    #[inline(always)]
    pub fn advance<G: Shape>(&mut self, carry: usize) {
        self.carry = carry;
        self.index += 1;
        while self.level > 0 && self.index & ((1 << G::FANOUT_SHIFT) - 1) == 0 {
            self.level -= 1;
            self.index >>= G::FANOUT_SHIFT;
        }
    }
}

impl<G: Shape> Tree<G> {
    /// The tree over these tables, zeroed: nothing free.
    #[must_use]
    pub const fn new(levels: [Table<AtomicU64>; MAX_LEVELS]) -> Self {
        Self {
            levels,
            shape: PhantomData,
        }
    }

    /// Entries that `level` needs for a heap of `pages` pages: whole blocks, but for the root.
    #[must_use]
    pub fn entries(level: usize, pages: usize) -> usize {
        let entries = G::entries(level, pages);
        if level == 0 {
            entries
        } else {
            entries.next_multiple_of(1 << G::FANOUT_SHIFT)
        }
    }

    /// One summary as it is now.
    #[inline(always)]
    pub fn load(&self, level: usize, index: usize) -> Summary {
        // Acquire: pairs with the release of `refresh`; the children it was made from are seen.
        Summary::from_bits(self.levels[level].get(index).load(Ordering::Acquire))
    }

    /// The leaf of a chunk as it is now.
    #[inline(always)]
    pub fn leaf(&self, chunk: usize) -> Summary {
        self.load(G::LEAF, chunk)
    }

    /// What the children of an inner node add up to now.
    #[inline]
    pub fn merge(&self, level: usize, index: usize) -> Summary {
        let first = index << G::FANOUT_SHIFT;
        let children = (first..first + (1 << G::FANOUT_SHIFT)).map(|child| self.load(level + 1, child));
        Summary::merge(children, G::span_shift(level + 1))
    }

    /// Makes the leaf of `chunk` promise at least what `bits` finds in the chunk. Whether it had to be changed.
    ///
    /// For those who gave pages: the caller's last write was the read-modify-write that did.
    #[inline]
    pub fn raise(&self, chunk: usize, bits: impl Fn() -> Summary) -> bool {
        self.refresh(G::LEAF, chunk, bits, Summary::covers)
    }

    /// Makes the leaf of `chunk` say exactly what `bits` finds in the chunk. Whether it had to be changed.
    ///
    /// For those who found it promising too much: the caller's last write was its entry into the turnstile.
    #[inline]
    pub fn settle(&self, chunk: usize, bits: impl Fn() -> Summary) -> bool {
        self.refresh(G::LEAF, chunk, bits, |old, new| old == new)
    }

    /// Carries changes of the leaves of the chunks `first..=last` towards the root, as far as this thread changes anything.
    ///
    /// The caller changed one of them at least. About 15 ns for each node looked at.
    pub fn propagate(&self, first: usize, last: usize) {
        let (mut first, mut last) = (first, last);
        for level in (0..G::LEAF).rev() {
            first >>= G::FANOUT_SHIFT;
            last >>= G::FANOUT_SHIFT;
            let mut changed = false;
            for index in first..=last {
                changed |= self.refresh(level, index, || self.merge(level, index), |old, new| old == new);
            }
            if !changed {
                return;
            }
        }
    }

    /// Protocol R; see the [module](self).
    #[inline]
    fn refresh(
        &self,
        level: usize,
        index: usize,
        merge: impl Fn() -> Summary,
        right: impl Fn(Summary, Summary) -> bool,
    ) -> bool {
        let node = self.levels[level].get(index);
        let mut changed = false;
        loop {
            // SeqCst fence: between our change of a child (or of the node, the round before) and this look at both. Partner: the
            // same fence in every other `refresh` of the node. The write before it is a read-modify-write, each time round.
            fence_after_rmw();
            // Acquire, as in `load`.
            let old = Summary::from_bits(node.load(Ordering::Acquire));
            let new = merge();
            if right(old, new) {
                return changed;
            }
            // Release: hands on the children as we saw them to `load`. Acquire: on failure we merge what the winner saw.
            let (old, new) = (old.to_bits(), new.to_bits());
            changed |= node
                .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
                .is_ok();
        }
    }

    /// Goes on until something promises `count` free pages in a row; the heap has `pages` pages.
    #[inline]
    pub fn next(&self, at: &mut Cursor, count: usize, pages: usize) -> Step {
        loop {
            if at.index >= G::entries(at.level, pages) {
                return Step::End;
            }
            let here = self.load(at.level, at.index);
            if here == Summary::NONE {
                at.advance::<G>(0);
                continue;
            }
            let shift = G::span_shift(at.level);
            if at.level == G::LEAF && (here.max() >= count || at.carry + here.start() >= count) {
                return Step::Chunk {
                    chunk: at.index,
                    carry: at.carry,
                };
            }
            if at.carry + here.start() >= count {
                return Step::Run((at.index << shift) - at.carry);
            }
            if here.max() >= count {
                at.level += 1;
                at.index <<= G::FANOUT_SHIFT;
                continue;
            }
            let carry = if here.end() == 1 << shift {
                at.carry + here.end()
            } else {
                here.end()
            };
            at.advance::<G>(carry);
        }
    }
}
