//! Two sources as one: pages from the first, metadata from the second.
//!
//! For pages that must not hold the heap's own tables, because they are memory of a device, a file mapping to be kept
//! clean, or no memory at all: `Split::new(Numbers::new(first, bytes), System)`. Every verb is passed to the one source
//! that its [`Purpose`] selects, and costs what it costs there.
//!
//! The contract has only one granule: the larger of the two. Both are powers of two, so its multiples are multiples of
//! either, and each source sees only whole granules of its own.

use core::ops::Range;
use core::ptr::NonNull;
use core::time::Duration;

use super::{Contents, HugePages, Memory, Purpose, Refused, Reservation, Source};

/// A [`Source`] that takes pages from `P` and metadata from `M`, so that a heap may use all the pages of `P`. (If `P`
/// and `M` are the same source, the heap finds out by trying how many pages leave room for its tables.)
#[derive(Clone, Copy, Debug, Default)]
pub struct Split<P, M> {
    /// Supplies what is handed out.
    pages: P,
    /// Supplies the heap's tables.
    metadata: M,
}

impl<P, M> Split<P, M> {
    /// Pages from `pages`, metadata from `metadata`.
    #[must_use]
    pub const fn new(pages: P, metadata: M) -> Split<P, M> {
        Split { pages, metadata }
    }

    /// The source of pages.
    #[must_use]
    pub const fn pages(&self) -> &P {
        &self.pages
    }

    /// The source of metadata.
    #[must_use]
    pub const fn metadata(&self) -> &M {
        &self.metadata
    }
}

// SAFETY: every verb is that of one of the two sources, always the same one for a purpose, and that source's promises
// hold for it; ranges on borders of the common granule are on borders of each source's own. Ranges of the two may have
// equal addresses only if pages are not memory, and then they do not overlap in any sense that matters.
unsafe impl<P: Source, M: Source> Source for Split<P, M> {
    const COMMITS: bool = P::COMMITS;
    const APART: bool = true;

    /// The larger of the two.
    fn granule(&self) -> usize {
        self.pages.granule().max(self.metadata.granule())
    }

    /// The budget of the pages: metadata is a small fraction, and if its source has too little, `reserve` says so.
    fn budget(&self) -> usize {
        self.pages.budget()
    }

    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        match purpose {
            Purpose::Pages => self.pages.reserve(purpose, bytes, align),
            Purpose::Metadata => self.metadata.reserve(purpose, bytes, align),
        }
    }

    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        match purpose {
            // SAFETY: the caller's promise, for a reservation that `reserve` has taken from this source.
            Purpose::Pages => unsafe { self.pages.prepare(purpose, start, bytes) },
            // SAFETY: as above.
            Purpose::Metadata => unsafe { self.metadata.prepare(purpose, start, bytes) },
        }
    }

    unsafe fn commit(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
        // SAFETY: the caller's promise; a range of pages comes from this source.
        unsafe { self.pages.commit(start, bytes) }
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise; a range of pages comes from this source.
        unsafe { self.pages.release(start, bytes) }
    }

    unsafe fn release_lazily(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise; a range of pages comes from this source.
        unsafe { self.pages.release_lazily(start, bytes) }
    }

    unsafe fn clear(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
        // SAFETY: the caller's promise; a range of pages comes from this source.
        unsafe { self.pages.clear(start, bytes) }
    }

    unsafe fn advise(&self, start: NonNull<u8>, bytes: usize, huge: HugePages) -> Result<(), Refused> {
        // SAFETY: the caller's promise; a range of pages comes from this source.
        unsafe { self.pages.advise(start, bytes, huge) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller's promise; a range of metadata comes from this source.
        unsafe { self.metadata.discard(start, bytes) };
    }

    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        match purpose {
            // SAFETY: the caller's promise, for a reservation that `reserve` has taken from this source.
            Purpose::Pages => unsafe { self.pages.unreserve(purpose, reservation) },
            // SAFETY: as above.
            Purpose::Metadata => unsafe { self.metadata.unreserve(purpose, reservation) },
        }
    }

    unsafe fn trim(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) {
        match purpose {
            // SAFETY: the caller's promise, for a reservation that `reserve` has taken from this source.
            Purpose::Pages => unsafe { self.pages.trim(purpose, start, bytes) },
            // SAFETY: as above.
            Purpose::Metadata => unsafe { self.metadata.trim(purpose, start, bytes) },
        }
    }

    fn gap(&self, start: NonNull<u8>, bytes: usize) -> Option<Range<usize>> {
        self.pages.gap(start, bytes)
    }

    fn worked(&self) -> Option<Duration> {
        self.pages.worked()
    }
}

// SAFETY: pages are those of `P`.
unsafe impl<P: Memory, M: Source> Memory for Split<P, M> {}
