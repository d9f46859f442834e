//! Blocks aligned to more than a page on a thread's shelf.
//!
//! ```text
//!              in use                         freed                          asked for
//!   entry      3 pages, no length     ─▶      length 3, on the shelf   ─▶    is it aligned? then 3 pages again
//! ```
//!
//! A block aligned to more than a page has no [`Length`], whatever its size: it gets just the pages it needs, and its
//! entry says so, so that one freed with another alignment is found out. On the shelf its run is like any other of that
//! length. Who asks for an aligned block looks at the run that leaves next, and takes it if it happens to be aligned:
//! most often it is the last such block to be freed.
//!
//! Worked: a pair of 16 KiB aligned to as much takes two pages. Each time it is the same run, from the hand of length
//! 2, with some 200 instructions instead of 1,390 through the set of free pages.
//!
//! Cost: that of a large block, an exchange by which it leaves the table, and two stores when it comes back.

#![forbid(unsafe_code)]

use core::alloc::Layout;
use core::ptr::NonNull;

use crate::source::Source;
use crate::units::{PageIndex, PageRun};

use super::length::{Length, pages_for};
use super::link::Nth;
use super::run::is_entered;
use super::{Objects, Thread};

/// The length of the run of a block aligned to more than a page, if such a run can lie on a shelf.
#[inline]
fn length_of(layout: Layout) -> Option<Length> {
    Length::exactly(pages_for(layout).0).filter(|_| is_entered(layout))
}

#[inline]
fn is_aligned(memory: NonNull<u8>, layout: Layout) -> bool {
    memory.addr().get() & (layout.align() - 1) == 0
}

impl<S: Source + 'static> Objects<S> {
    /// Fast path: takes a block aligned to more than a page from the hand of the thread's shelf, if a run of just so
    /// many pages lies there, and is aligned. The structure is as [`take_from_hand`](Self::take_from_hand) asks.
    #[inline]
    pub fn take_aligned_from_hand(&self, thread: &Thread, layout: Layout) -> Option<NonNull<u8>> {
        let length = length_of(layout)?;
        let hand = thread.hand(length);
        let start = PageIndex(hand.get()?.number() - 1);
        let memory = self.spans.address(start);
        if !is_aligned(memory, layout) {
            return None;
        }
        let entry = self.spans.entry(start);
        hand.take(length, entry);
        entry.enter_large(length.pages(), None);
        Some(memory)
    }

    /// Fast path: puts such a block in the hand of the thread's shelf, if that is empty, and returns the run's length:
    /// then the caller must [tell](Self::tell) the keeper. The structure is as [`put_in_hand`](Self::put_in_hand) asks;
    /// the caller gives the block up, if there is such a block.
    #[inline]
    pub fn put_aligned_in_hand(&self, thread: &Thread, memory: NonNull<u8>, layout: Layout) -> Option<Length> {
        let length = length_of(layout)?;
        let hand = thread.hand(length);
        if hand.get().is_some() {
            return None;
        }
        let start = self.spans.large_at(memory, length.pages(), None)?;
        let entry = self.spans.entry(start);
        // If it has left, another thread frees it at this moment: the slow path reports that.
        let is_put = entry.leave_large(None) && hand.put(length, Nth::new(start.0 + 1), entry);
        is_put.then_some(length)
    }

    /// A block aligned to more than a page, if the run of just so many pages that leaves the shelf next is aligned:
    /// most often the last such block to be freed.
    pub(super) fn aligned_from_shelf(&self, thread: &Thread, layout: Layout) -> Option<PageRun> {
        let length = length_of(layout)?;
        let from_list = || {
            let [_, listed] = thread.shelf().next_of(length);
            if !listed.is_none_or(|start| is_aligned(self.spans.address(start), layout)) {
                return None;
            }
            // Also if there is none: that counts as a request.
            let start = thread.shelf().take_listed(&self.spans, length)?;
            self.spans.entry(start).enter_large(length.pages(), None);
            Some(self.spans.address(start))
        };
        let memory = self.take_aligned_from_hand(thread, layout).or_else(from_list)?;
        Some(PageRun::known(self.spans.page_of(memory).0, length.pages()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::size_class::PAGE_BYTES;
    use super::*;

    #[test]
    fn an_aligned_block_comes_back_from_the_hand_as_what_is_asked_for() {
        const PAGES: usize = 5;
        let objects = Objects::for_test(4 << 20, 1, false);
        let own = objects.shared();
        let layout = |align| Layout::from_size_align(PAGES * PAGE_BYTES, align).unwrap();
        let (aligned, plain, length) = (layout(2 * PAGE_BYTES), layout(8), Length::exactly(PAGES).unwrap());
        let put = |block| objects.put_aligned_in_hand(&own, block, aligned);
        let take = || objects.take_aligned_from_hand(&own, aligned);
        let put_plain = |block| objects.shelve(&own, block, Some(length));
        let take_plain = || objects.run_from_shelf(&own, length);
        let entry = |block| objects.spans.entry(objects.spans.page_of(block));
        let [first, second] = [(); 2].map(|()| objects.allocate(&own, aligned).unwrap());
        assert!(take().is_none() && !put_plain(first), "it has another layout");
        assert_eq!(put(first), Some(length));
        assert!(put(first).is_none() && put(second).is_none(), "one is there");
        assert!(entry(first).is_shelved() && entry(second).is_large(PAGES, None));
        assert_eq!(take(), Some(first));
        assert!(entry(first).is_large(PAGES, None) && put(first).is_some());
        assert_eq!(take_plain(), Some(first));
        assert!(put(first).is_none() && put_plain(first), "it has another layout now");
        assert_eq!(take(), Some(first));
        let odd = core::iter::from_fn(|| objects.allocate(&own, plain))
            .find(|block| !block.addr().get().is_multiple_of(aligned.align()))
            .unwrap();
        assert!(put_plain(odd) && take().is_none(), "it is not aligned");
        assert_eq!(take_plain(), Some(odd));
        assert_eq!(length_of(layout(32 << 20)), None, "such blocks are not in the table");
        objects.check().unwrap();
    }
}
