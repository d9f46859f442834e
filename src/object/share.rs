//! How much each thread's shelf may keep on its lists (`shelf.rs`), given how many have something there.
//!
//! ```text
//!   shelves with a share      1       2, 3      4 to 7      8 to 15      of an eighth of the heap's limit,
//!   pages on each one's lists 2,560   1,280     640         320          or of 20 MiB
//! ```
//!
//! A shelf gets a share when a list is to take its first run, and loses it when it is emptied. So threads that sleep,
//! or keep one block of a length at a time, leave all to the others.
//!
//! Cost: a read-modify-write when a shelf gets its share, and one when it is emptied; else a load where a thread finds
//! nothing on its shelf.

use crate::source::Source;
use crate::sync::Ordering;
use crate::units::{PageCount, PageIndex};

use super::length::Length;
use super::shelf::Shelf;
use super::span::Span;
use super::{Objects, Thread};

impl<S: Source + 'static> Objects<S> {
    /// What the lists of a thread's shelf may hold at the moment.
    #[inline]
    pub(super) fn share_of_shelf(&self) -> PageCount {
        // Relaxed: a number by itself.
        Shelf::share_of(self.heap.limit(), self.shelves.load(Ordering::Relaxed))
    }

    /// What they might hold if one shelf more had a share.
    pub(super) fn next_share(&self) -> PageCount {
        // Relaxed: as above.
        Shelf::share_of(self.heap.limit(), self.shelves.load(Ordering::Relaxed) + 1)
    }

    /// Sets anew what the thread's shelf may hold, after it had nothing to offer. One without a share gets it with the
    /// first run that goes on a list.
    #[inline]
    pub(super) fn share_shelves(&self, thread: &Thread) {
        if thread.shelf().has_share() {
            self.give_share(thread);
        }
    }

    /// Puts a block of this length on a list that has refused it, if that was for want of a share, and it may have one.
    /// Returns whether it did.
    #[cold]
    #[inline(never)]
    pub(super) fn put_with_share(&self, thread: &Thread, length: Length, start: PageIndex, entry: &Span) -> bool {
        let shelf = thread.shelf();
        if shelf.has_share() || !shelf.is_wanted(length) || length.pages() > self.next_share().0 {
            return false;
        }
        self.give_share(thread);
        shelf.put_listed(length, start, entry)
    }

    /// Gives the thread's shelf a share, as many as have one. It counts from now on, if it had none.
    pub(super) fn give_share(&self, thread: &Thread) {
        let shelf = thread.shelf();
        if !shelf.has_share() {
            // First, as `clear_shelf` does it last: where a thread ends in between, one is counted too many, for good.
            // Relaxed: a number by itself.
            self.shelves.fetch_add(1, Ordering::Relaxed);
        }
        shelf.share(self.share_of_shelf());
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::alloc::Layout;

    use super::super::length::MOST_PAGES;
    use super::super::resting::Parts;
    use super::super::transfer::tests::{drop_large, layout, make, two};
    use super::*;
    use crate::heap::Above;
    use crate::source::Region;

    /// So many blocks of this layout, allocated and then freed. How many are on the thread's shelf afterwards.
    fn use_many(objects: &Objects<Region>, thread: &Thread, layout: Layout, count: usize) -> usize {
        let made: std::vec::Vec<_> = (0..count).map(|_| make(objects, thread, layout)).collect();
        made.into_iter()
            .for_each(|block| _ = drop_large(objects, thread, block, layout));
        thread.shelf().pages().0 / Length::of(layout).unwrap().pages()
    }

    /// Relaxed: one thread.
    fn shelves(objects: &Objects<Region>) -> usize {
        objects.shelves.load(Ordering::Relaxed)
    }

    /// Beside 16 of them a thread's list had room for 4 such runs.
    #[test]
    fn threads_without_large_blocks_have_no_share_of_what_shelves_may_hold() {
        let objects = Objects::for_test(48 << 20, 32, false);
        let ([worker, other], buffer) = (two(objects), layout(13));
        for _ in 0..8 {
            let idle = two(objects);
            idle.iter().for_each(|idle| {
                assert!(objects.allocate(idle, Layout::new::<[u8; 64]>()).is_some());
                assert!(objects.allocate(idle, layout(MOST_PAGES + 1)).is_some());
            });
        }
        assert_eq!((shelves(objects), use_many(objects, &worker, buffer, 50)), (0, 50));
        assert_eq!(shelves(objects), 1);
        let whole = objects.share_of_shelf();
        // Nor has one with a block at a time, which goes in its hand, before it has two.
        (0..2).for_each(|_| _ = use_many(objects, &other, buffer, 1));
        assert_eq!(shelves(objects), 1);
        // Whatever lies aside that is not for it.
        let frame = make(objects, &worker, layout(MOST_PAGES + 1));
        // SAFETY: allocated here, with this layout, and given up.
        assert!(unsafe { objects.put_aside(frame, layout(MOST_PAGES + 1)) });
        _ = use_many(objects, &other, layout(20), 1);
        assert_eq!(shelves(objects), 1);
        assert!(use_many(objects, &other, buffer, 2) >= 2);
        assert_eq!((shelves(objects), objects.share_of_shelf().0), (2, whole.0 / 2));
    }

    /// What lies there with the block that it asks for goes on its list.
    #[test]
    fn a_thread_that_takes_a_lot_has_a_share() {
        let objects = Objects::for_test(16 << 20, 2, false);
        let ([maker, dropper], buffer) = (two(objects), layout(13));
        let made = [0; 5].map(|_| make(objects, &maker, buffer));
        made.into_iter()
            .for_each(|block| _ = drop_large(objects, &dropper, block, buffer));
        assert_eq!((shelves(objects), objects.aside.pages()), (0, PageCount(4 * 13)));
        make(objects, &maker, buffer);
        assert_eq!(maker.shelf().pages(), PageCount(3 * 13));
        assert_eq!((shelves(objects), maker.shelf().has_share()), (1, true));
    }

    #[test]
    fn a_shelf_has_no_share_that_is_too_short_for_its_blocks() {
        let objects = Objects::for_test(2 << 20, 2, false);
        let [own, _] = two(objects);
        assert!(objects.next_share().0 < 40);
        assert_eq!((use_many(objects, &own, layout(40), 2), shelves(objects)), (1, 0));
    }

    /// By whomever, and it has a share again with the next large block.
    #[test]
    fn a_shelf_has_a_share_until_it_is_emptied() {
        let objects = Objects::for_test(16 << 20, 2, false);
        let ([own, other], buffer) = (two(objects), layout(13));
        use_many(objects, &other, buffer, 2);
        let ways: [&dyn Fn(); 5] = [
            &|| _ = objects.flush(&own),
            &|| objects.part(&own),
            &|| _ = objects.empty_seized(&own, Parts::ALL),
            &|| _ = objects.clear_shelf_alone(&own, None),
            &|| {
                objects.heap.set_soft_limit(PageCount(1));
                objects.keep_below(&own);
                objects.heap.set_soft_limit(PageCount(usize::MAX));
            },
        ];
        for (number, empty) in ways.iter().enumerate() {
            for _ in 0..3 {
                assert_eq!(use_many(objects, &own, buffer, 5), 5);
                assert!(shelves(objects) == 2 && own.shelf().has_share());
            }
            (0..2).for_each(|_| empty());
            let left = (shelves(objects), own.shelf().has_share(), own.shelf().pages());
            assert_eq!(left, (1, false, PageCount::ZERO), "way {number}");
        }
    }

    /// It goes on using the two blocks that lay on its shelf: nothing is there.
    #[test]
    fn a_thread_that_rests_has_no_share() {
        let objects = Objects::for_test(32 << 20, 4, false);
        // SAFETY: never destroyed.
        let [rests, works]: [&Thread; 2] = [(); 2].map(|()| unsafe { objects.enlist().unwrap().as_ref() });
        let entered = rests.enter(objects).unwrap();
        use_many(objects, &entered, layout(13), 2);
        let _in_use = [(); 2].map(|()| make(objects, &entered, layout(13)));
        assert_eq!(rests.shelf().pages(), PageCount::ZERO);
        drop(entered);
        for look in 1..=9 {
            use_many(objects, &works.enter(objects).unwrap(), layout(13), 1 + look);
            assert_eq!(shelves(objects), 2, "look {look}");
            objects.trim(false);
        }
        let left = [rests, works].map(|thread| thread.shelf().has_share());
        assert_eq!(left, [!objects.reaches_threads(), true]);
        assert_eq!(shelves(objects), left.iter().filter(|&&has| has).count());
    }

    /// Such a heap takes the shelf's runs, and share, each time it takes pages. What is dropped then goes on lists all
    /// the same, for the next such blocks.
    #[test]
    fn lists_serve_a_heap_that_stays_over_its_soft_limit() {
        let objects = Objects::for_test(16 << 20, 2, false);
        let [own, _] = two(objects);
        objects.heap.set_soft_limit(PageCount(1));
        for _ in 0..3 {
            assert_eq!(use_many(objects, &own, layout(13), 16), 16);
        }
        let grown = objects.stats().pages.in_use;
        assert_eq!(
            (use_many(objects, &own, layout(13), 16), objects.stats().pages.in_use),
            (16, grown)
        );
    }

    /// At most twice the heap's part, once they all have looked how many they are.
    #[test]
    fn the_lists_of_all_threads_are_limited_together() {
        let objects = Objects::for_test(48 << 20, 16, false);
        let (threads, buffer) = ([0; 6].map(|_| two(objects)), layout(16));
        let use_all = || {
            let counts = threads.iter().flatten().map(|thread| {
                // All but the one in the hand.
                use_many(objects, thread, buffer, 75) - 1
            });
            counts.sum::<usize>() * 16
        };
        use_all();
        let (listed, whole) = (use_all(), Shelf::share_of(objects.heap.limit(), 1).0);
        assert!((whole..2 * whole).contains(&listed), "{listed} of {whole}");
        assert_eq!(shelves(objects), 12);
    }
}
