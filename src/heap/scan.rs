//! The heap's side of scavenging: claim a run, release it, mark it, give it back.
//!
//! ```text
//!   free ──claim──▶ nobody's ──release──▶ not backed ──mark scavenged──▶ ──give──▶ free, scavenged
//! ```
//!
//! A run being released counts as allocated meanwhile: that one sentence is the safety proof. No lock is held during
//! the system call, and no thread waits for it. A request that arrives too late for the run takes another one, or grows
//! the heap. To leave another run, each scavenging thread has at most an eighth of the heap in hand, or one huge page
//! if the heap has two.
//!
//! Worked example: a heap of 64 pages, which is its limit, all free, is released in runs of 8. A request for 20 pages
//! meanwhile succeeds. A request for 60 may be refused, as if another caller held 8; a heap configured for it
//! [waits](crate::Config::wait_for_release).

use crate::bitmap;
use crate::geometry::{Block, MAX_CHUNK_WORDS, Shape, WORD_PAGES};
use crate::metadata::offset;
use crate::scavenge::{self, Limits};
use crate::source::{Contents, Source};
use crate::sync::Pass;
use crate::units::{PageCount, PageIndex, PageRun};

use super::PageHeap;

/// The size of a huge page on most systems.
pub(super) const HUGE_BYTES: usize = 2 << 20;

/// The result of a release.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Released {
    /// Pages released, in whole granules.
    pub(super) pages: usize,
    /// Those of them that were not scavenged already: only these are of any use. Others share granules with them.
    pub(super) gained: usize,
    /// Pages that are marked as scavenged now, and were not before.
    pub(super) marked: usize,
    /// Pages that were marked as scavenged, and are not any more.
    pub(super) forgotten: usize,
    /// The source has refused some.
    pub(super) refused: bool,
}

impl Released {
    pub(super) fn add(&mut self, more: Self) {
        self.pages += more.pages;
        self.gained += more.gained;
        self.marked += more.marked;
        self.forgotten += more.forgotten;
        self.refused |= more.refused;
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    const HUGE_PAGES: usize = {
        let huge = HUGE_BYTES >> G::PAGE_SHIFT;
        if huge == 0 {
            1
        } else if huge > G::CHUNK_PAGES {
            G::CHUNK_PAGES
        } else {
            huge
        }
    };

    /// Releases the memory of free pages to the source, highest address first, until `pages` pages (a few more rather
    /// than split a huge page) are released or nothing is left. Returns how many, without those that
    /// had no memory any more.
    ///
    /// Cost: 2 to 3 ns a word examined, and one `release` for each run. Pages whose release the source refuses stay as
    /// they are. In a heap that [releases lazily](crate::Config::release_lazily), this is lazy too.
    pub fn scavenge(&self, pages: PageCount) -> PageCount {
        self.timed(|| self.scavenge_with(pages, self.lazily, || ()))
    }

    /// As [`scavenge`](Self::scavenge), lazily or not; calls `between` after each chunk in which there was work.
    pub(super) fn scavenge_with(&self, pages: PageCount, lazily: bool, mut between: impl FnMut()) -> PageCount {
        let granule = self.granule_pages();
        let mut released = Released::default();
        if granule > G::CHUNK_PAGES {
            return PageCount::ZERO;
        }
        for chunk in (0..self.set.grown().div_ceil(G::CHUNK_PAGES)).rev() {
            let now = self.scavenge_chunk(chunk, granule, pages.0 - released.gained, lazily);
            released.add(now);
            if released.gained >= pages.0 {
                break;
            }
            if now.pages > 0 {
                between();
            }
        }
        PageCount(released.gained)
    }

    /// Pages in a huge page, or in a chunk, if that is less. One if the heap is smaller than two huge pages: then huge
    /// pages are not kept whole.
    pub(super) fn huge_pages(&self) -> usize {
        Self::in_hand(self.memory_in(self.set.grown()), 1).1
    }

    /// For a heap of `grown` pages of memory: how many a scavenging thread may hold at once, an eighth or one huge page
    /// if there are two; and how many pages a huge page has, as above, at most the former. The bound keeps most free
    /// memory available to others when the heap cannot grow. Both follow from one size, because the heap may grow
    /// between two reads.
    fn in_hand(grown: usize, granule: usize) -> (usize, usize) {
        let huge = Self::HUGE_PAGES;
        let least = if grown < 2 * huge { 0 } else { huge };
        let most = (grown / 8).max(least);
        let huge = if huge <= most.max(1) { huge } else { 1 };
        ((most / granule * granule).max(granule), huge)
    }

    /// A run that was extended so as not to split a huge page may be longer than `most`: then only the part above the
    /// next boundary.
    fn above(start: usize, run: usize, (most, huge): (usize, usize)) -> (usize, usize) {
        if run <= most {
            return (start, run);
        }
        let above = (start + run - most).next_multiple_of(huge);
        (above, start + run - above)
    }

    /// Releases up to `pages` pages of a chunk, more to keep a huge page whole, in runs of whole `granule`s. Pages in
    /// these that are already marked as scavenged do not count.
    pub(super) fn scavenge_chunk(&self, chunk: usize, granule: usize, pages: usize, lazily: bool) -> Released {
        let (mut released, mut from) = (Released::default(), G::CHUNK_PAGES - 1);
        // Released, but the source does not say that they are zero.
        let mut unmarked = [0; MAX_CHUNK_WORDS];
        while released.gained < pages {
            let (most, huge) = Self::in_hand(self.memory_in(self.set.grown()), granule);
            let limits = Limits {
                least: granule,
                most: most.min(pages - released.gained),
                huge,
            };
            let Some((start, run)) = self.candidate(chunk, from, limits, &unmarked) else {
                break;
            };
            let (start, run) = Self::above(start, run, (most, huge));
            let now = self.release_run((chunk << G::CHUNK_SHIFT) + start, run, lazily);
            released.add(now);
            if now.pages > 0 && now.marked == 0 {
                bitmap::set(&mut unmarked, start, run);
            }
            // What could not be released remains a candidate: continue with the word below.
            let end = if now.pages > 0 {
                start
            } else {
                start & !(WORD_PAGES - 1)
            };
            let Some(below) = end.checked_sub(1) else { break };
            from = below;
        }
        released
    }

    /// Pages of a chunk that are free and not marked as scavenged.
    pub(super) fn idle_in(&self, chunk: usize) -> usize {
        let (free, scavenged) = (self.set.free.chunk::<G>(chunk), self.set.scavenged.chunk::<G>(chunk));
        let words = free[..G::CHUNK_WORDS].iter().zip(&scavenged[..G::CHUNK_WORDS]);
        words
            .map(|(free, scavenged)| (free & !scavenged).count_ones() as usize)
            .sum()
    }

    /// A run of the chunk worth releasing, excluding those in `not`; see [`scavenge::candidate`].
    fn candidate(&self, chunk: usize, from: usize, limits: Limits, not: &Block) -> Option<(usize, usize)> {
        let (free, mut scavenged) = (self.set.free.chunk::<G>(chunk), self.set.scavenged.chunk::<G>(chunk));
        // Most chunks of a large heap: all that is free has been released. Whole granules of it are marked as a whole.
        if free
            .iter()
            .zip(&scavenged)
            .all(|(free, scavenged)| free & !scavenged == 0)
        {
            return None;
        }
        let granule = self.granule_pages();
        if granule > 1 {
            scavenge::keep_whole(&mut scavenged[..G::CHUNK_WORDS], granule);
        }
        scavenged.iter_mut().zip(not).for_each(|(word, not)| *word |= not);
        scavenge::candidate(&free[..G::CHUNK_WORDS], &scavenged[..G::CHUNK_WORDS], from, limits)
    }

    /// Claims, releases, marks and gives back one run.
    fn release_run(&self, start: usize, pages: usize, lazily: bool) -> Released {
        // Held until the pages are back: a thread that is about to report that there is no room looks again then.
        let _pass = self.scavengers.enter(start >> G::CHUNK_SHIFT);
        if self.set.hold(start, pages).is_err() {
            return Released::default();
        }
        self.counters.release.add(1);
        let address = offset(self.base, start << G::PAGE_SHIFT);
        // SAFETY: pages just taken are ours alone and lose their contents; they are prepared, inside the reservation,
        // and on granule boundaries: `candidate` was given the granule in pages, and a chunk is a multiple of it.
        let contents = unsafe {
            if lazily {
                self.source.release_lazily(address, pages << G::PAGE_SHIFT)
            } else {
                self.source.release(address, pages << G::PAGE_SHIFT)
            }
        };
        let count = |done| if done { pages as u64 } else { 0 };
        self.counters.released.add(count(contents.is_ok()));
        // What reads as zero was released at once: the source has no lazy release, or none for these pages.
        self.counters
            .lazily
            .add(count(lazily && contents == Ok(Contents::Unknown)));
        if contents.is_ok() {
            for (table, bytes) in self.driver.beside(start, pages, self.source.granule()) {
                // SAFETY: these entries belong to pages that are ours alone, so no thread writes to them; they describe
                // a free page, as zero does; prepared metadata on granule boundaries.
                unsafe { self.source.discard(table, bytes) };
                self.counters.discard.add(1);
            }
        }
        // What was released lazily may still be there; everything else is gone, whatever it reads as.
        let mark = contents.is_ok_and(|contents| self.to_mark(contents, !lazily));
        let more = pages - self.set.scavenged_in(start, pages);
        let forgotten = if mark {
            self.driver.ceiling.change(0, more);
            0
        } else {
            self.forget_marks(start, pages)
        };
        if let Err(page) = self.set.release_held(start, pages, mark) {
            self.free_already(page).abort();
        }
        Released {
            pages: if contents.is_ok() { pages } else { 0 },
            gained: if contents.is_ok() { more } else { 0 },
            marked: if mark { more } else { 0 },
            forgotten,
            refused: contents.is_err(),
        }
    }

    /// The contents of pages that the caller holds are no longer known: removes marks, for instance those of another
    /// scavenger. If the source commits, the marks stay, because they lead pages to `commit`; from then on no mark
    /// implies zero, here or elsewhere. Returns how many marks are removed.
    fn forget_marks(&self, start: usize, pages: usize) -> usize {
        if S::COMMITS {
            if self.set.scavenged_in(start, pages) > 0 {
                self.to_mark(Contents::Unknown, true);
            }
            return 0;
        }
        let marks = self.set.take_scavenged(start, pages).count;
        self.driver.ceiling.change(marks, 0);
        marks
    }

    /// Whether memory that is given back gradually may stay until the system wants it.
    pub(crate) fn is_lazy(&self) -> bool {
        self.lazily
    }

    /// A value that changes whenever a thread begins or finishes releasing.
    pub(crate) fn releases(&self) -> impl Eq {
        self.scavengers.look()
    }

    /// For a thread that is about to [punch](Self::punch) pages near this one: until the pass is dropped, what it holds
    /// belongs to nobody.
    pub(crate) fn scavenges(&self, page: PageIndex) -> Pass<'_> {
        self.scavengers.enter(page.0 >> G::CHUNK_SHIFT)
    }

    /// Where the chunk begins that ends right before page `end`, which is at most `grown`. `None` if none ends there or
    /// not all of its pages seem to be free: they need not all have been so at one instant.
    pub(crate) fn free_chunk_before(&self, end: usize) -> Option<usize> {
        if !end.is_multiple_of(G::CHUNK_PAGES) {
            return None;
        }
        let begin = end.checked_sub(G::CHUNK_PAGES)?;
        let words = self.set.free.chunk::<G>(begin >> G::CHUNK_SHIFT);
        let is_free = words[..G::CHUNK_WORDS].iter().all(|&word| word == u64::MAX);
        is_free.then_some(begin)
    }

    /// Releases the memory behind a part of pages that stay allocated. Returns whether it was released; what it reads
    /// as afterwards is unknown. Does nothing if pages have to be committed.
    pub(crate) fn punch(&self, page: PageIndex, begin: usize, bytes: usize) -> bool {
        self.release_allocated((page.0 << G::PAGE_SHIFT) + begin, bytes)
            .is_some()
    }

    /// Releases memory that stays allocated, and whose contents the caller gives up, unless it has to be committed.
    /// Returns what it reads as afterwards, if it was released.
    fn release_allocated(&self, start: usize, bytes: usize) -> Option<Contents> {
        if S::COMMITS || !(start | bytes).is_multiple_of(self.source.granule()) {
            return None;
        }
        self.counters.release.add(1);
        // SAFETY: the caller's memory, whose contents the caller gives up; prepared, inside the reservation, on granule
        // boundaries. A source that does not commit allows it to be used again at once.
        unsafe { self.source.release(offset(self.base, start), bytes) }.ok()
    }

    /// Makes a run that the caller holds read as zero by writing only to what is not zero, if the source knows that to
    /// be little. Returns whether it did.
    pub(crate) fn clear(&self, run: PageRun) -> bool {
        let (start, bytes) = (run.start().0 << G::PAGE_SHIFT, run.pages().0 << G::PAGE_SHIFT);
        if !(start | bytes).is_multiple_of(self.source.granule()) {
            return false;
        }
        self.counters.clear.add(1);
        // SAFETY: the caller's pages, whose contents the caller gives up; allocated, so Ready if the source commits,
        // inside the reservation, on granule boundaries.
        unsafe { self.source.clear(offset(self.base, start), bytes) }.is_ok()
    }

    /// Makes a run that the caller holds read as zero by releasing its memory instead of writing to it. Returns whether
    /// it did. Cost: one system call, and a page fault for each page touched again.
    pub(crate) fn wipe(&self, run: PageRun) -> bool {
        let (start, bytes) = (run.start().0 << G::PAGE_SHIFT, run.pages().0 << G::PAGE_SHIFT);
        self.release_allocated(start, bytes) == Some(Contents::Zero)
    }
}

#[cfg(test)]
mod tests {
    use crate::source::Simulated;

    use super::*;

    type Heap = PageHeap<Simulated>;

    /// If the heap grew between two reads of its size, a whole huge page was cut at the boundary it ended on.
    #[test]
    fn of_a_run_that_is_too_long_something_is_left_whatever_the_length() {
        let lengths = (0..5000).chain([1 << 16, 1 << 29]);
        for (grown, granule) in lengths.flat_map(|grown| [1, 2, 8, 256, 512].map(|granule| (grown, granule))) {
            let (most, huge) = Heap::in_hand(grown, granule);
            assert!(
                huge <= most && most.is_multiple_of(granule),
                "{grown} pages, {granule}: {most}, {huge}"
            );
            for run in [granule, huge, most, most + granule, most + huge, 2 * (most + huge)] {
                let (start, len) = Heap::above(1024, run, (most, huge));
                assert!(
                    len > 0 && len <= most && start + len == 1024 + run,
                    "{run} of {grown} pages: {len}"
                );
            }
        }
    }
}
