//! Which free pages are worth giving back: pure policy, without a clock or a system call.
//!
//! ```text
//!   page         0         …        255│256                           511
//!   free         ....####........._____│......##__......................      . free, _ free and scavenged, # in use
//!                                                 └── the candidate ──┘      highest first, as long as wanted
//! ```
//!
//! A candidate is a run of pages that are free and still backed by memory. It consists of whole granules of the
//! operating system and lies as high in its chunk as possible: first fit fills a heap from below, so what is free at
//! the top stays free longest (the proposal's policy). If a run would split a huge page, the candidate includes the
//! whole huge page, provided all of it is free.
//!
//! Worked example: 16 pages of a free chunk are wanted. The candidate is not pages 496..512 but 256..512: page 256
//! begins the huge page that contains page 496 (2 MiB are 256 pages of 8 KiB), and giving back a sixteenth of it would
//! split it.
//!
//! Cost: ~10 ns a chunk. The policy is that of Go's `findScavengeCandidate`, page for page (tests replay recorded
//! vectors); the driver is [`PageHeap::scavenge`](crate::PageHeap::scavenge).
//!
//! Related modules: [`index`] knows which chunks are worth a look, [`retention`] how much to keep, [`pacer`] how fast
//! to proceed. All of them turn numbers into numbers; their driver supplies the clock.

#![forbid(unsafe_code)]

pub mod index;
pub mod pacer;
pub mod pressure;
pub mod retention;

use crate::geometry::WORD_PAGES;

/// How long a candidate may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Its length and position are multiples of this: pages in a granule of the operating system. A power of two.
    pub least: usize,
    /// The number of pages wanted, rounded up to `least`. Zero means `least`.
    pub most: usize,
    /// Pages in a huge page, which is not split if it can be taken whole. A power of two.
    pub huge: usize,
}

/// The highest candidate in the words of a chunk, at or below the word of page `from`: its first page and its length.
#[must_use]
pub fn candidate(free: &[u64], scavenged: &[u64], from: usize, limits: Limits) -> Option<(usize, usize)> {
    let idle = |word: usize| idle_groups(free, scavenged, word, limits.least);
    let (word, bits) = (0..=from / WORD_PAGES)
        .rev()
        .map(|word| (word, idle(word)))
        .find(|&(_, bits)| bits != 0)?;
    let above = bits.leading_zeros() as usize;
    let end = (word + 1) * WORD_PAGES - above;
    let mut run = (bits << above).leading_ones() as usize;
    let mut below = word;
    // As long as every page down to the start of a word is idle, the run may continue in the word below.
    while below > 0 && run + above == (word + 1 - below) * WORD_PAGES {
        below -= 1;
        run += idle(below).leading_ones() as usize;
    }
    // Clamped first: a request for everything must not overflow.
    let most = limits.most.clamp(1, run).next_multiple_of(limits.least);
    let start = end - run.min(most);
    let huge = start & !(limits.huge - 1);
    let cut = start.next_multiple_of(limits.huge) <= end && huge >= end - run;
    let start = if cut { huge } else { start };
    Some((start, end - start))
}

/// The pages of a word that lie in whole aligned groups of `group` pages, all free and not scavenged.
fn idle_groups(free: &[u64], scavenged: &[u64], word: usize, group: usize) -> u64 {
    if group <= WORD_PAGES {
        return !fill_aligned(!free[word] | scavenged[word], group);
    }
    // A group of words: idle as a whole or not at all.
    let words = group / WORD_PAGES;
    let first = word & !(words - 1);
    let idle = |word: usize| free[word] & !scavenged[word] == u64::MAX;
    if (first..(first + words).min(free.len())).all(idle) {
        u64::MAX
    } else {
        0
    }
}

/// Keeps marks only in groups that are marked completely. `group` is a power of two, the pages in a granule: if a
/// system page that is longer than ours has memory, all of it has, even if part of it was never used.
pub fn keep_whole(scavenged: &mut [u64], group: usize) {
    let words = (group / WORD_PAGES).max(1);
    for group_of in scavenged.chunks_mut(words) {
        if words > 1 && group_of.iter().any(|&word| word != u64::MAX) {
            group_of.fill(0);
        }
        group_of
            .iter_mut()
            .for_each(|word| *word = !fill_aligned(!*word, group.min(WORD_PAGES)));
    }
}

/// Fills each aligned group of `group` bits that contains a one with ones. `group` is a power of two, at most 64.
#[must_use]
pub const fn fill_aligned(bits: u64, group: usize) -> u64 {
    let (mut bits, mut step) = (bits, 1);
    while step < group {
        // The lower of each pair of steps.
        let lower = if step == 32 {
            u32::MAX as u64
        } else {
            u64::MAX / ((1 << step) + 1)
        };
        bits |= (bits >> step) & lower | (bits & lower) << step;
        step *= 2;
    }
    bits
}
