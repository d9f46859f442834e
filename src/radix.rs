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
//! **Search.** First fit by address, starting at any page. A [`Cursor`] stands on an entry and carries the number of
//! free pages right before it. It moves right; at the end of a block it climbs to the parent's neighbour; where an
//! entry's `max` suffices it descends. Where the carried pages and the entry's `start` together suffice, it has found a
//! run that straddles entries, and no bit need be read. A search that ends near where it began costs a few loads. One
//! that finds nothing costs at most 7 · 4 loads and one for each 16 GiB grown: 90 loads for 1 TiB.
//!
//! **Summaries are advice**, and err on one side only. A node may promise too much: a claim leaves it as it is, and the
//! search that trips over the promise lowers it. That does no harm, because a claim is made on the bits. A node must
//! never promise too *little* with no thread on its way to correct it: those pages would be lost. So the invariant is:
//! once every thread has left the turnstile, every node covers the merge of its children, and every leaf covers its
//! bits. Two methods maintain it.
//!
//! *Raising*, after pages were given back, is a **join**. The releasing thread knows the run that it created. If a node
//! does not promise that run, one compare-exchange replaces its value by the least that promises both the old value and
//! the run. Nothing below is read and nothing is ever lowered, so nothing needs a second look. Then the thread passes a
//! fence, widens the run by what the siblings say, and proceeds to the parent. If a node already promises the run, the
//! walk ends: the thread that made it promise carries it up. When two runs meet, each releasing thread has a fence
//! between changing its node and reading the siblings, so the later one sees both. With one thread at a time join is
//! exact: a freed run changes nothing else.
//!
//! *Lowering*, after a promise was found broken, and raising whole regions use **protocol R**:
//!
//! ```text
//!   loop { fence;  old = node;  new = merge(children);  if old is right { break }  CAS(node, old, new) }
//!                                                                   and once more after a CAS that succeeded
//! ```
//!
//! Why protocol R loses no raise. Take the last successful CAS of R on a node, by thread P. After it P looked again and
//! found the children to match what it had written. Suppose thread Q raises a child later. Q has a fence between its
//! change and its read of the node; P has one between its CAS and its last read of the children. So one of the two saw
//! the other. If P saw Q's change, P's value includes it. If not, Q saw P's value or a later one, and found it
//! sufficient or joined to it. Upward by induction. A CAS may succeed on a value that went away and came back (ABA),
//! and publish what is no longer true. Its thread looks again and corrects that, and until then it is in the
//! [turnstile](crate::sync::Turnstile), which tells all others to conclude nothing.
//!
//! **What is carried up.** A node that came to promise more always is: its parent may promise less, and others may
//! already rely on the node. A node that came to promise less need not be: a parent that covered the old value covers
//! the new one, and a thread that has yet to carry up the old value carries up enough. So a correction that only lowers
//! ends where it began, and the parent keeps its promise until a search descends from it in vain. But a correction may
//! also raise. Pages released between its first look below and its CAS appear only in its second look, and their
//! release may have stopped here because the value that the CAS replaced already promised them. Such a correction is
//! carried up.
//!
//! Without the fence, or without the second look, updates are lost: `tests/models` keeps both variants, as models that
//! must fail. Protocol R and those counterexamples come from this project's own models; the tree is the Go proposal's.

#![forbid(unsafe_code)]

use core::marker::PhantomData;

use crate::bitmap;
use crate::geometry::{Block, MAX_CHUNK_WORDS, MAX_LEVELS, Shape};
use crate::summary::Summary;
use crate::sync::{AtomicU64, Ordering, Table, fence_after_rmw};

/// The summaries of a heap.
#[derive(Debug)]
pub struct Tree<G: Shape> {
    /// `levels[0]` is the root, `levels[G::LEAF]` has an entry for each chunk; the levels after it are empty. Every
    /// level but the root consists of whole blocks of children.
    levels: [Table<AtomicU64>; MAX_LEVELS],
    shape: PhantomData<G>,
}

/// The position of a search.
#[derive(Clone, Copy, Debug)]
pub struct Cursor {
    level: usize,
    index: usize,
    /// Free pages right before the entry, as far as known.
    carry: usize,
    /// It has moved to this entry from the previous one, and may thereby have left a block.
    moved: bool,
    /// Bit l: it has descended from an entry of level l, which promised a run in the block that it is now in or below.
    descents: u8,
}

/// A run of free pages, as seen from a node's region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Its length within the region, or more.
    pub pages: usize,
    /// It may begin with the region.
    pub at_start: bool,
    /// It may end with the region.
    pub at_end: bool,
}

impl Run {
    /// Whether `summary` already promises this run, so that its node need not change.
    #[inline(always)]
    #[must_use]
    pub fn is_told_by(&self, summary: Summary) -> bool {
        self.pages <= summary.max()
            && (!self.at_start || self.pages <= summary.start())
            && (!self.at_end || self.pages <= summary.end())
    }

    /// An upper bound for the run that this is part of, including pages outside the region.
    #[inline(always)]
    #[must_use]
    pub fn longest(&self) -> usize {
        if self.at_start || self.at_end {
            usize::MAX
        } else {
            self.pages
        }
    }

    /// The smallest summary that promises everything `summary` does, and this run.
    #[inline(always)]
    fn joined_to(&self, summary: Summary) -> Summary {
        let reach = |touches: bool, field: usize| if touches { field.max(self.pages) } else { field };
        let (start, end) = (reach(self.at_start, summary.start()), reach(self.at_end, summary.end()));
        Summary::new(start, summary.max().max(self.pages), end)
    }
}

/// The outcome of correcting a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// The node was right.
    None,
    /// It promises less than before, and more in no field: the nodes above promise enough.
    Lowered,
    /// It came to promise more at some time, and others may rely on that: this has to be carried up.
    Raised,
}

/// What a step of a search found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A run that begins at this page and straddles entries, if the summaries are right.
    Run(usize),
    /// This chunk has a run, if its leaf is right. `carry` free pages lie before it.
    Chunk {
        /// Index of the chunk.
        chunk: usize,
        /// Free pages right before the chunk.
        carry: usize,
    },
    /// This inner entry promised a run that does not exist. The search can continue.
    Broken {
        /// Its level.
        level: usize,
        /// Its index in the level.
        index: usize,
    },
    /// There is nothing up to the end of the heap.
    End,
}

impl Cursor {
    /// A cursor on the leaf of `chunk`, with nothing known about the pages before it.
    #[inline(always)]
    #[must_use]
    pub fn at<G: Shape>(chunk: usize) -> Self {
        Self {
            level: G::LEAF,
            index: chunk,
            carry: 0,
            moved: false,
            descents: 0,
        }
    }

    /// Moves to the next entry, with `carry` free pages right before that.
    #[inline(always)]
    pub fn advance(&mut self, carry: usize) {
        self.carry = carry;
        self.index += 1;
        self.moved = true;
    }

    /// As [`advance`](Self::advance), past an entry with a run as long as the one sought, but not at a place that will
    /// do. Whatever the cursor has descended from has kept its promise.
    #[inline(always)]
    pub fn pass(&mut self, carry: usize) {
        self.descents = 0;
        self.advance(carry);
    }

    /// Descends to the children of the current entry.
    #[inline(always)]
    fn descend<G: Shape>(&mut self) {
        self.descents |= 1 << self.level;
        self.level += 1;
        self.index <<= G::FANOUT_SHIFT;
        self.moved = false;
    }

    /// After the last entry of a block: climbs to the parent's neighbour. Returns the parent, as a broken promise, if
    /// the cursor had descended from it.
    #[inline(always)]
    fn climb<G: Shape>(&mut self) -> Option<Step> {
        self.level -= 1;
        self.index >>= G::FANOUT_SHIFT;
        self.forget_descent(self.level, self.index - 1)
    }

    /// The entry, as a broken promise, if the cursor has descended from it and not come back to it.
    #[inline(always)]
    fn forget_descent(&mut self, level: usize, index: usize) -> Option<Step> {
        let bit = 1 << level;
        if self.descents & bit == 0 {
            return None;
        }
        self.descents &= !bit;
        Some(Step::Broken { level, index })
    }

    /// At the end of the heap: the entries that the cursor is still below are broken promises too, lowest first. Then
    /// the end.
    #[cold]
    fn end<G: Shape>(&mut self) -> Step {
        let Some(level) = self.descents.checked_ilog2() else {
            return Step::End;
        };
        let level = level as usize;
        let parent = self.index >> ((self.level - level) as u32 * G::FANOUT_SHIFT);
        self.forget_descent(level, parent).unwrap_or(Step::End)
    }
}

/// Whether two blocks are equal, without a branch on any word.
#[inline(always)]
fn same(one: &Block, other: &Block) -> bool {
    one.iter()
        .zip(other)
        .fold(0, |differ, (one, other)| differ | (one ^ other))
        == 0
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

    /// Entries that `level` needs for a heap of `pages` pages: whole blocks, except in the root.
    #[must_use]
    pub fn entries(level: usize, pages: usize) -> usize {
        let entries = G::entries(level, pages);
        if level == 0 {
            entries
        } else {
            entries.next_multiple_of(1 << G::FANOUT_SHIFT)
        }
    }

    /// The current summary of one entry.
    #[inline(always)]
    pub fn load(&self, level: usize, index: usize) -> Summary {
        // Acquire: pairs with the releases in `replace` and `join`; the children that the summary was made from are
        // seen.
        Summary::from_bits(self.levels[level].get(index).load(Ordering::Acquire))
    }

    /// The current leaf of a chunk.
    #[inline(always)]
    pub fn leaf(&self, chunk: usize) -> Summary {
        self.load(G::LEAF, chunk)
    }

    /// The merge of the current children of an inner node.
    #[inline]
    pub fn merge(&self, level: usize, index: usize) -> Summary {
        Self::sum(level, &self.children(level, index))
    }

    /// The children of an inner node, read one after another.
    #[inline(always)]
    fn children(&self, level: usize, index: usize) -> Block {
        let (mut children, first) = ([0; MAX_CHUNK_WORDS], index << G::FANOUT_SHIFT);
        let cells = self.levels[level + 1].row(first, 1 << G::FANOUT_SHIFT);
        for (child, cell) in children.iter_mut().zip(cells) {
            // Acquire, as in `load`.
            *child = cell.load(Ordering::Acquire);
        }
        children
    }

    /// The summary of what lies below a node: its children, or the words of a chunk.
    #[inline(always)]
    fn sum(level: usize, below: &Block) -> Summary {
        if level == G::LEAF {
            return bitmap::summarize(&below[..G::CHUNK_WORDS]);
        }
        Summary::merge_block(&below[..1 << G::FANOUT_SHIFT], G::span_shift(level + 1))
    }

    /// Makes the leaf of `chunk`, and the nodes above it, promise a run that has become free in the chunk.
    ///
    /// For a thread that gave pages back, whose last write was the read-modify-write that did so, and that is inside
    /// the turnstile. Costs one compare-exchange for each level that did not promise as much: see *Raising* in the
    /// [module](self).
    pub fn raise(&self, chunk: usize, run: Run) {
        let (mut level, mut index, mut run) = (G::LEAF, chunk, run);
        while self.join(level, index, run) && level > 0 {
            // SeqCst fence: between our change of this node and the read of its siblings. Partner: the same fence in a
            // thread that raises one of those: the last of us sees what the others wrote.
            fence_after_rmw();
            run = self.widen(level, index, run);
            level -= 1;
            index >>= G::FANOUT_SHIFT;
        }
    }

    /// Adds a run to what a node promises. Returns whether the node had to change.
    #[inline]
    fn join(&self, level: usize, index: usize, run: Run) -> bool {
        let node = self.levels[level].get(index);
        // Acquire, as in `load`.
        let mut old = node.load(Ordering::Acquire);
        loop {
            let says = Summary::from_bits(old);
            if run.is_told_by(says) {
                return false;
            }
            // Release: publishes the children as they are to `load`. Acquire: what we read next is no older than the
            // node.
            let new = run.joined_to(says).to_bits();
            match node.compare_exchange_weak(old, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(seen) => old = seen,
            }
        }
    }

    /// A run of one entry as the entry's parent sees it: extended by what the siblings right before and behind it have.
    #[inline]
    fn widen(&self, level: usize, index: usize, run: Run) -> Run {
        let (span, first) = (1 << G::span_shift(level), index >> G::FANOUT_SHIFT << G::FANOUT_SHIFT);
        let (mut all, last) = (run, first + (1 << G::FANOUT_SHIFT));
        for sibling in (first..index).rev() {
            if !all.at_start {
                break;
            }
            let end = self.load(level, sibling).end();
            all.pages += end;
            all.at_start = end == span;
        }
        for sibling in index + 1..last {
            if !all.at_end {
                break;
            }
            let start = self.load(level, sibling).start();
            all.pages += start;
            all.at_end = start == span;
        }
        all
    }

    /// Makes the leaf of `chunk` promise at least what `bits` reads in the chunk. Returns whether it had to change.
    ///
    /// For a thread that gave back many pages and is inside the turnstile: its last write was a read-modify-write.
    #[inline]
    pub fn cover(&self, chunk: usize, bits: impl Fn() -> Block) -> Change {
        self.refresh(G::LEAF, chunk, None, bits, Summary::covers)
    }

    /// Makes the leaf of `chunk` say exactly what `bits` reads in the chunk. Returns whether it had to change.
    ///
    /// For a thread that found the leaf promising too much: its last write was the entry into the turnstile.
    #[inline]
    pub fn settle(&self, chunk: usize, bits: impl Fn() -> Block) -> Change {
        self.refresh(G::LEAF, chunk, None, bits, Self::exactly)
    }

    /// As [`settle`](Self::settle), for a caller that has already done the first round: it has read the leaf as `says`,
    /// then the bits as `seen`, whose summary is `truth`.
    #[inline]
    pub fn settle_from(
        &self,
        chunk: usize,
        says: Summary,
        seen: &Block,
        truth: Summary,
        bits: impl Fn() -> Block,
    ) -> Change {
        let first = self.replace(G::LEAF, chunk, says, truth);
        // SeqCst fence, as in `refresh`, which continues if this round was not the last.
        fence_after_rmw();
        if self.leaf(chunk) == truth && same(seen, &bits()) {
            return first;
        }
        self.refresh(G::LEAF, chunk, None, bits, Self::exactly).max(first)
    }

    /// Makes an inner node say exactly what its children do. Returns whether it had to change. As
    /// [`settle`](Self::settle).
    pub fn settle_node(&self, level: usize, index: usize) -> Change {
        self.refresh(level, index, None, || self.children(level, index), Self::exactly)
    }

    fn exactly(says: Summary, truth: Summary) -> bool {
        says == truth
    }

    /// Carries changes of the entries `first..=last` of a level towards the root, as long as this thread changes
    /// anything.
    ///
    /// The caller has changed at least one of them. About 25 ns for each node visited.
    pub fn propagate(&self, level: usize, first: usize, last: usize) {
        let (mut first, mut last) = (first, last);
        for level in (0..level).rev() {
            first >>= G::FANOUT_SHIFT;
            last >>= G::FANOUT_SHIFT;
            let change = (first..=last).fold(Change::None, |change, index| self.settle_node(level, index).max(change));
            if change == Change::None {
                return;
            }
        }
    }

    /// Protocol R; see the [module](self). `known` is what was last read below the node, and its sum. The sum is not
    /// computed again if nothing has changed, which is how nearly every second look ends.
    #[inline]
    fn refresh(
        &self,
        level: usize,
        index: usize,
        known: Option<(Block, Summary)>,
        below: impl Fn() -> Block,
        right: impl Fn(Summary, Summary) -> bool,
    ) -> Change {
        let node = self.levels[level].get(index);
        let (mut known, mut change) = (known, Change::None);
        loop {
            // SeqCst fence: between our change of a child (or of the node, the round before) and this read of both.
            // Partner: the same fence in every other `refresh` and `raise`. The write before it is a read-modify-write
            // in every round.
            fence_after_rmw();
            // Acquire, as in `load`.
            let says = Summary::from_bits(node.load(Ordering::Acquire));
            let now = below();
            let truth = match known {
                Some((seen, truth)) if same(&seen, &now) => truth,
                _ => Self::sum(level, &now),
            };
            known = Some((now, truth));
            if right(says, truth) {
                return change;
            }
            change = self.replace(level, index, says, truth).max(change);
        }
    }

    /// Replaces `old` by `new`, if the node still says `old`.
    #[inline(always)]
    fn replace(&self, level: usize, index: usize, old: Summary, new: Summary) -> Change {
        let change = if old.covers(new) {
            Change::Lowered
        } else {
            Change::Raised
        };
        let (node, old, new) = (self.levels[level].get(index), old.to_bits(), new.to_bits());
        // Release: publishes the children as we saw them to `load`. Acquire: on failure we read nothing older than the
        // winner saw.
        match node.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => change,
            Err(_) => Change::None,
        }
    }

    /// Moves right, within the block, to the first entry whose `max` suffices, or whose `start` does together with the
    /// carried pages, and returns that entry's summary; `None` at the end of the block or of the heap.
    #[inline(always)]
    fn skip(&self, at: &mut Cursor, count: usize, pages: usize) -> Option<Summary> {
        let whole = 1 << G::span_shift(at.level);
        if at.level == 0 || count > whole {
            return self.skip_any(at, count, G::entries(at.level, pages));
        }
        // No entry passed here is wholly free, so only the last entry's `end` is carried on. Entries beyond the heap's
        // end are zero.
        let rest = (1 << G::FANOUT_SHIFT) - (at.index & ((1 << G::FANOUT_SHIFT) - 1));
        let (mut found, mut carry, mut passed) = (None, at.carry, 0);
        for entry in self.levels[at.level].row(at.index, rest) {
            // Acquire, as in `load`: a proof reads the turnstile after this.
            let here = Summary::from_bits(entry.load(Ordering::Acquire));
            if here.part_has(carry, count) {
                found = Some(here);
                break;
            }
            carry = here.part_end();
            passed += 1;
        }
        at.moved |= passed > 0;
        at.index += passed;
        at.carry = carry;
        found
    }

    /// As [`skip`](Self::skip), at any level, for any count.
    fn skip_any(&self, at: &mut Cursor, count: usize, entries: usize) -> Option<Summary> {
        let whole = 1 << G::span_shift(at.level);
        let end = if at.level == 0 {
            entries
        } else {
            ((at.index | ((1 << G::FANOUT_SHIFT) - 1)) + 1).min(entries)
        };
        if at.index >= end {
            return None;
        }
        let (mut found, mut carry, mut passed) = (None, at.carry, 0);
        for entry in self.levels[at.level].row(at.index, end - at.index) {
            // Acquire, as in `skip`.
            let here = Summary::from_bits(entry.load(Ordering::Acquire));
            if here == Summary::NONE {
                carry = 0;
            } else if here.max() >= count || carry + here.start() >= count {
                found = Some(here);
                break;
            } else {
                carry = here.end() + if here.end() == whole { carry } else { 0 };
            }
            passed += 1;
        }
        at.moved |= passed > 0;
        at.index += passed;
        at.carry = carry;
        found
    }

    /// Continues the search until something promises `count` free pages in a row, or has broken its promise. The heap
    /// has `pages` pages.
    #[inline]
    pub fn next(&self, at: &mut Cursor, count: usize, pages: usize) -> Step {
        loop {
            while at.moved && at.level > 0 && at.index & ((1 << G::FANOUT_SHIFT) - 1) == 0 {
                if let Some(broken) = at.climb::<G>() {
                    return broken;
                }
            }
            let shift = G::span_shift(at.level);
            if at.index << shift >= pages {
                return at.end::<G>();
            }
            let Some(here) = self.skip(at, count, pages) else {
                continue;
            };
            if at.level == G::LEAF {
                return Step::Chunk {
                    chunk: at.index,
                    carry: at.carry,
                };
            }
            if at.carry + here.start() >= count {
                return Step::Run((at.index << shift) - at.carry);
            }
            at.descend::<G>();
        }
    }
}
