//! Moving what is in one run to another without copying it, where the source can.
//!
//! ```text
//!   from  ▓▓▓▓▓▓▓▓ in use          ░░░░░░░░ free, scavenged
//!   to    ········ in use    ──▶   ▓▓▓▓▓▓▓▓ in use
//! ```
//!
//! Both runs are the caller's. What the first leaves behind is what a release leaves behind: pages without memory, which
//! are marked before they are free.

use crate::geometry::Shape;
use crate::metadata::offset;
use crate::source::Source;
use crate::units::{PageIndex, PageRun};

use super::PageHeap;

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// Moves the contents of `from` to as many pages from `to` on, and frees `from`. False: nothing has happened, but to
    /// the contents of those pages. One or two system calls.
    ///
    /// # Safety
    ///
    /// Both are allocated from this heap, apart, the caller's, and nothing uses them at the moment; on success nothing
    /// uses `from` any more.
    #[cold]
    pub(crate) unsafe fn relocate(&self, from: PageRun, to: PageIndex) -> bool {
        let (start, pages) = (from.start().0, from.pages().0);
        let [old, new, bytes] = [start, to.0, pages].map(|pages| pages << G::PAGE_SHIFT);
        if S::COMMITS || !(old | new | bytes).is_multiple_of(self.source.granule()) {
            return false;
        }
        // SAFETY: two runs of the caller's, prepared, inside the reservation, on granule borders.
        let moved = unsafe {
            self.source
                .relocate(offset(self.base, old), offset(self.base, new), bytes)
        };
        let Ok(contents) = moved else { return false };
        let mark = self.to_mark(contents);
        self.driver.ceiling.change(0, if mark { pages } else { 0 });
        if let Err(page) = self.set.release_held(start, pages, mark) {
            self.free_already(page).abort();
        }
        true
    }
}
