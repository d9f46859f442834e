//! The heap's side of scavenging: claim a run, release it, mark it, give it back.
//!
//! ```text
//!   free ──claim──▶ nobody's ──release──▶ not backed ──mark scavenged──▶ ──give──▶ free, scavenged
//! ```
//!
//! A run being released counts as allocated meanwhile: that one sentence is the safety proof. No lock is held over the
//! system call, and nobody waits for it; a request that comes too late for the run takes another, or grows the heap. So
//! that there is another, each who scavenges has an eighth of the heap in hand at most, or a huge page, if it has two.
//!
//! Worked: a heap of 64 pages, its limit, all free, goes back by runs of 8. Who wants 20 pages meanwhile gets them; who
//! wants 60 may be refused, as if somebody had 8; in a heap that was made to he
//! [waits](crate::Config::wait_for_release).

use crate::bitmap;
use crate::geometry::{Block, MAX_CHUNK_WORDS, Shape, WORD_PAGES};
use crate::metadata::offset;
use crate::scavenge::{self, Limits};
use crate::source::{Contents, Source};
use crate::sync::Pass;
use crate::units::{PageCount, PageIndex, PageRun};

use super::PageHeap;

/// A huge page, as most systems have it.
pub(super) const HUGE_BYTES: usize = 2 << 20;

/// What came of releasing.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Released {
    /// Pages released.
    pub(super) pages: usize,
    /// Of those, the ones that are marked as scavenged now.
    pub(super) marked: usize,
}

impl Released {
    pub(super) fn add(&mut self, more: Self) {
        self.pages += more.pages;
        self.marked += more.marked;
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

    /// Gives memory behind free pages back to the source, highest address first, until `pages` pages (a few more
    /// where a huge page would be cut) or there is nothing left to give. Returns how many.
    ///
    /// Cost: 0.4 ns a word looked at, and one `release` for each run. Pages whose release the source refuses stay as
    /// they are. Of a heap that [releases lazily](crate::Config::release_lazily) this does so too.
    pub fn scavenge(&self, pages: PageCount) -> PageCount {
        self.timed(|| self.scavenge_with(pages, self.lazily, || ()))
    }

    /// As [`scavenge`](Self::scavenge), lazily or not; `between` is called after each chunk in which there was work.
    pub(super) fn scavenge_with(&self, pages: PageCount, lazily: bool, mut between: impl FnMut()) -> PageCount {
        let granule = (self.source.granule() >> G::PAGE_SHIFT).max(1);
        let mut released = 0;
        if granule > G::CHUNK_PAGES {
            return PageCount::ZERO;
        }
        for chunk in (0..self.set.grown().div_ceil(G::CHUNK_PAGES)).rev() {
            let now = self.scavenge_chunk(chunk, granule, pages.0 - released, lazily).pages;
            released += now;
            if released >= pages.0 {
                break;
            }
            if now > 0 {
                between();
            }
        }
        PageCount(released)
    }

    /// Pages of a huge page, or of a chunk, if that is less. One where the heap is smaller than two: then huge
    /// pages are not kept whole.
    pub(super) fn huge_pages(&self) -> usize {
        Self::in_hand(self.set.grown(), 1).1
    }

    /// Of a heap of so many pages, how many a scavenger may hold at once: an eighth, or one huge page, if there are
    /// two. So not much of what is free is nobody's, which somebody may miss where the heap cannot grow. And how many a
    /// huge page has, as above: not more. Both by one length, for the heap may grow between two looks.
    fn in_hand(grown: usize, granule: usize) -> (usize, usize) {
        let huge = Self::HUGE_PAGES;
        let least = if grown < 2 * huge { 0 } else { huge };
        let most = (grown / 8).max(least);
        let huge = if huge <= most.max(1) { huge } else { 1 };
        ((most / granule * granule).max(granule), huge)
    }

    /// A run that was made longer, so that no huge page is cut, may be longer than `most`: then the part above the next
    /// border.
    fn above(start: usize, run: usize, (most, huge): (usize, usize)) -> (usize, usize) {
        if run <= most {
            return (start, run);
        }
        let above = (start + run - most).next_multiple_of(huge);
        (above, start + run - above)
    }

    /// Releases up to `pages` pages of a chunk, more to keep a huge page whole, in runs of whole `granule`s.
    pub(super) fn scavenge_chunk(&self, chunk: usize, granule: usize, pages: usize, lazily: bool) -> Released {
        let (mut released, mut from) = (Released::default(), G::CHUNK_PAGES - 1);
        // Released, though the source does not say that they are zero.
        let mut unmarked = [0; MAX_CHUNK_WORDS];
        while released.pages < pages {
            let (most, huge) = Self::in_hand(self.set.grown(), granule);
            let limits = Limits {
                least: granule,
                most: most.min(pages - released.pages),
                huge,
            };
            let Some((start, run)) = self.candidate(chunk, from, limits, &unmarked) else {
                break;
            };
            let (start, run) = Self::above(start, run, (most, huge));
            let now = self.release_run((chunk << G::CHUNK_SHIFT) + start, run, lazily);
            released.add(now);
            if now.pages > now.marked {
                bitmap::set(&mut unmarked, start, run);
            }
            // What could not be released is no less a candidate than before: on to the word below.
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

    /// A run of the chunk worth releasing; but for those of `not`; see [`scavenge::candidate`].
    fn candidate(&self, chunk: usize, from: usize, limits: Limits, not: &Block) -> Option<(usize, usize)> {
        let (free, mut scavenged) = (self.set.free.chunk::<G>(chunk), self.set.scavenged.chunk::<G>(chunk));
        let granule = self.granule_pages();
        if granule > 1 {
            scavenge::keep_whole(&mut scavenged[..G::CHUNK_WORDS], granule);
        }
        scavenged.iter_mut().zip(not).for_each(|(word, not)| *word |= not);
        scavenge::candidate(&free[..G::CHUNK_WORDS], &scavenged[..G::CHUNK_WORDS], from, limits)
    }

    /// Claims, releases, marks and gives back one run.
    fn release_run(&self, start: usize, pages: usize, lazily: bool) -> Released {
        // Until the pages are back: whoever is about to say that there is no room looks again when they are.
        let _pass = self.scavengers.enter(start >> G::CHUNK_SHIFT);
        if self.set.hold(start, pages).is_err() {
            return Released::default();
        }
        self.counters.release.add(1);
        let address = offset(self.base, start << G::PAGE_SHIFT);
        // SAFETY: pages just taken are ours alone and lose their contents; they are prepared, inside the reservation,
        // and on granule borders: `candidate` was given the granule in pages, and a chunk is a multiple of it.
        let contents = unsafe {
            if lazily {
                self.source.release_lazily(address, pages << G::PAGE_SHIFT)
            } else {
                self.source.release(address, pages << G::PAGE_SHIFT)
            }
        };
        let count = |done| if done { pages as u64 } else { 0 };
        self.counters.released.add(count(contents.is_ok()));
        // What reads as zero has gone at once: the source has no lazy way, or none for these.
        self.counters
            .lazily
            .add(count(lazily && contents == Ok(Contents::Unknown)));
        if contents.is_ok()
            && let Some((table, bytes)) = self.driver.beside(start, pages, self.source.granule())
        {
            // SAFETY: entries of pages that are ours alone, so nobody writes to them, and what they say is that of a
            // free page, as zero does; prepared metadata on granule borders.
            unsafe { self.source.discard(table, bytes) };
            self.counters.discard.add(1);
        }
        // What was let go lazily may be there yet; all else has gone, whatever it reads as.
        let mark = contents.is_ok_and(|contents| self.to_mark(contents, !lazily));
        if !mark {
            self.forget_marks(start, pages);
        }
        if mark {
            let more = pages - self.set.scavenged_in(start, pages);
            self.driver.ceiling.change(0, more);
        }
        if let Err(page) = self.set.release_held(start, pages, mark) {
            self.free_already(page).abort();
        }
        Released {
            pages: if contents.is_ok() { pages } else { 0 },
            marked: if mark { pages } else { 0 },
        }
    }

    /// What pages read as that the caller holds is not known any more: marks of another scavenger's, perhaps, go. Where
    /// they bring pages to `commit` they stay, and mean zero no more, here or elsewhere.
    fn forget_marks(&self, start: usize, pages: usize) {
        if !S::COMMITS {
            self.driver.ceiling.change(self.set.take_scavenged(start, pages), 0);
        } else if self.set.scavenged_in(start, pages) > 0 {
            self.to_mark(Contents::Unknown, true);
        }
    }

    /// Whether memory that goes back by and by may stay until it is wanted.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn is_lazy(&self) -> bool {
        self.lazily
    }

    /// What changes when somebody begins to release, or has done.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn releases(&self) -> impl Eq {
        self.scavengers.look()
    }

    /// For who is about to [punch](Self::punch) pages near this one: until the pass is dropped what he holds is
    /// nobody's.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn scavenges(&self, page: PageIndex) -> Pass<'_> {
        self.scavengers.enter(page.0 >> G::CHUNK_SHIFT)
    }

    /// Gives the memory back behind a part of pages that stay allocated. Whether it has gone; what it reads as
    /// afterwards is not known. Nothing where pages have to be committed.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn punch(&self, page: PageIndex, begin: usize, bytes: usize) -> bool {
        let start = (page.0 << G::PAGE_SHIFT) + begin;
        if S::COMMITS || !(start | bytes).is_multiple_of(self.source.granule()) {
            return false;
        }
        self.counters.release.add(1);
        // SAFETY: the caller's memory, whose contents he gives up; prepared, inside the reservation, on granule
        // borders. Where the source does not commit it can be used again at once.
        unsafe { self.source.release(offset(self.base, start), bytes) }.is_ok()
    }

    /// Makes a run that the caller holds read as zero, by writing to what is not, if the source knows that to be
    /// little. Whether it does.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn clear(&self, run: PageRun) -> bool {
        let (start, bytes) = (run.start().0 << G::PAGE_SHIFT, run.pages().0 << G::PAGE_SHIFT);
        if !(start | bytes).is_multiple_of(self.source.granule()) {
            return false;
        }
        self.counters.clear.add(1);
        // SAFETY: the caller's pages, whose contents he gives up; allocated, so Ready where the source commits, inside
        // the reservation, on granule borders.
        unsafe { self.source.clear(offset(self.base, start), bytes) }.is_ok()
    }

    /// Makes a run that the caller holds read as zero, by giving its memory back instead of writing to it. Whether it
    /// does: one system call, and a page fault for each page touched again.
    pub(crate) fn wipe(&self, run: PageRun) -> bool {
        let (start, bytes) = (run.start().0 << G::PAGE_SHIFT, run.pages().0 << G::PAGE_SHIFT);
        if S::COMMITS || !(start | bytes).is_multiple_of(self.source.granule()) {
            return false;
        }
        self.counters.release.add(1);
        // SAFETY: the caller's pages, whose contents he gives up; prepared, inside the reservation, on granule borders.
        // Where the source does not commit they can be used again at once.
        let contents = unsafe { self.source.release(offset(self.base, start), bytes) };
        contents == Ok(Contents::Zero)
    }
}

#[cfg(test)]
mod tests {
    use crate::source::Simulated;

    use super::*;

    type Heap = PageHeap<Simulated>;

    /// If the heap grew between two looks at its length, a whole huge page was to be cut at the border it ended on.
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
