//! When the system refuses to commit pages: a request is met with pages that need not be.
//!
//! ```text
//!   pages      │ A A │ s s s s │ A │ f f f f f f │          A allocated, f free, s free and scavenged
//!   first fit        └ commit: refused
//!   instead                        └──── taken as they are
//! ```
//!
//! First fit leads to the lowest pages, whatever state they are in. If these have been scavenged, and the system is at
//! its limit, `commit` fails, and would fail again for the next request: nothing could be allocated, with any number of
//! committed pages free above. So after such a failure, and only then, the bits are searched for the lowest run of
//! pages that are free and not scavenged.
//!
//! Worked: 32 blocks of 3 MiB are freed and released, then 32 that lie above these, and the system refuses to commit
//! anything more. A block of 64 B gets a page of the upper half, 96 MiB. It did not, nor did any other.
//!
//! Cost: none until a commit fails. Then a look at each 64 pages of the heap (one at a time, from the end of where the
//! run would be: what is missing there moves it on).

#![forbid(unsafe_code)]

use crate::free_set::Request;
use crate::geometry::{Shape, WORD_PAGES};
use crate::source::Source;
use crate::units::PageIndex;

use super::{Allocation, PageHeap};

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// As [`ready`](Self::ready), for a request that any pages can meet: if these cannot be committed, others may do.
    #[inline(always)]
    pub(super) fn ready_for(&self, request: &Request, start: usize) -> Option<Allocation> {
        let allocation = self.ready(start, request.pages);
        if S::COMMITS && allocation.is_none() {
            return self.take_committed(request);
        }
        allocation
    }

    /// The same before a refusal: others may keep pages that need not be committed.
    #[inline(always)]
    pub(super) fn ready_at_last(&self, request: &Request, start: usize) -> Option<Allocation> {
        let allocation = self.ready_for(request, start);
        if S::COMMITS && allocation.is_none() {
            return self.at_last(&mut 0, || self.take_committed(request));
        }
        allocation
    }

    /// Whether a grown page is free and has no memory behind it at this moment. If the source commits, it must then not
    /// be touched. An allocated page never lacks memory.
    ///
    /// Cost: a load; if the source commits, also a look at each cache, and if the page seems to be in one, the time of
    /// [`seize_caches`](Self::seize_caches).
    pub(crate) fn lacks_memory(&self, page: PageIndex) -> bool {
        let (word, bit) = (page.0 / WORD_PAGES, page.0 % WORD_PAGES);
        // What a cache holds is read in two steps, so it may be said of the wrong word. That decides nothing: what is
        // in caches is put back, and its mark with it. (Not if the owner is at work on it, or the system has no fence
        // for that.)
        if S::COMMITS && self.cached_in(word) >> bit & 1 == 1 {
            self.seize_caches();
        }
        self.set.scavenged.load(word) >> bit & 1 == 1
    }

    /// The lowest pages that meet the request without being committed.
    #[cold]
    fn take_committed(&self, request: &Request) -> Option<Allocation> {
        let mut from = 0;
        loop {
            let start = self.find_committed(request, from)?;
            if self.set.hold(start, request.pages).is_ok() {
                if self.set.scavenged_in(start, request.pages) == 0 {
                    return self.ready(start, request.pages);
                }
                self.release_or_abort(start, request.pages);
            }
            // Another thread has taken one of them, or scavenged it.
            from = start + 1;
        }
    }

    /// Where the lowest such pages begin, at `from` or behind it, at this moment.
    fn find_committed(&self, request: &Request, from: usize) -> Option<usize> {
        let grown = self.set.grown();
        let mut start = request.align_page(from)?;
        loop {
            let end = start.checked_add(request.pages).filter(|&end| end <= grown)?;
            match self.last_missing(start, end) {
                None => return Some(start),
                Some(page) => start = request.align_page(page + 1)?,
            }
        }
    }

    /// The last page of these that is not free, or is scavenged.
    fn last_missing(&self, start: usize, end: usize) -> Option<usize> {
        (start / WORD_PAGES..end.div_ceil(WORD_PAGES)).rev().find_map(|word| {
            let page = word * WORD_PAGES;
            let (first, behind) = (start.max(page) - page, end.min(page + WORD_PAGES) - page);
            let mask = u64::MAX << first & u64::MAX >> (WORD_PAGES - behind);
            let missing = mask & (!self.set.free.load(word) | self.set.scavenged.load(word));
            missing.checked_ilog2().map(|bit| page + bit as usize)
        })
    }
}
