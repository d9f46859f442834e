//! How runs get aside, and from there to who needs them: the shipped side of `aside.rs`.
//!
//! ```text
//!   freed by a thread whose shelf does not take it ──▶ a lot ──┬──▶ the shelf of a thread that needs that length
//!   freed, longer than on a shelf ───────────────────▶ alone ──┼──▶ who needs exactly that length
//!                                                              └──▶ the heap, before anybody takes a page from it
//! ```
//!
//! A thread that drops what another has made asks for no such runs itself, so its shelf takes none (`shelf.rs`). The
//! other one takes a whole lot when it has no such run, and so comes here once for many blocks.
//!
//! **Asked for.** Lots are for lengths that some thread has asked the heap for since it was last trimmed, a second ago
//! if there is a scavenger (`keeper.rs`). So buffers that grew and were cut, and lengths that a program used once, go
//! straight to the heap. And a shelf takes no lot with more runs than were asked of it before, so the first ones may be
//! too long for it; then they go to the heap.
//!
//! Worked: one thread fills buffers of 100,000 bytes, another drops them. That is a run of 13 pages each, so 16 of them
//! are a lot, which reaches the first thread's shelf by one exchange. It hands out the next 15 buffers without coming
//! here.
//!
//! Cost: a free into a lot takes two exchanges, one of them in a line that all threads share; a block out of a lot what
//! one off the shelf takes, 2 ns, and a cache miss for its entry in the table, which the other thread wrote last.

use core::alloc::Layout;
use core::ptr::NonNull;

use crate::fatal::{self, Number};
use crate::source::Source;
use crate::sync::{Ordering, thread};
use crate::units::{PageCount, PageIndex, PageRun};

use super::aside::{Lot, MOST_ASIDE, Passes};
use super::length::{Length, pages_for};
use super::size_class::PAGE_BYTES;
use super::span::Span;
use super::{Objects, Thread};

/// The longest block that is put aside: 64 MiB, which takes 2 µs to be given back.
const MOST_ASIDE_BYTES: usize = 64 << 20;

const _: () = assert!(
    MOST_ASIDE_BYTES / PAGE_BYTES <= MOST_ASIDE,
    "a place can say how long it is"
);

/// A lot has at most this fraction of the pages that the lists of a shelf may have, so that there is room for it beside
/// runs of other lengths.
const LOT_PART: usize = 2;

/// The bit of a length, of which there are 40.
#[inline]
const fn bit(length: Length) -> u64 {
    1 << length.index()
}

/// Whether a block of this layout, which is a large one, can lie aside alone: it is longer than on a shelf, and aligned
/// to at most a page.
#[inline]
const fn goes_aside(layout: Layout) -> bool {
    layout.align() <= PAGE_BYTES && Length::of_size(layout.size()).is_none() && layout.size() <= MOST_ASIDE_BYTES
}

impl<S: Source + 'static> Objects<S> {
    /// Fast path: takes a block that is longer than those on shelves, if one of exactly this length lies aside, and the
    /// heap's limit, which may have been lowered, is not less.
    #[inline]
    pub fn take_from_aside(&self, layout: Layout) -> Option<NonNull<u8>> {
        let pages = pages_for(layout);
        if !goes_aside(layout) || pages > self.heap.limit() {
            return None;
        }
        let start = self.aside.take(pages, thread())?;
        self.spans.entry(start).enter_large(pages.0, None);
        Some(self.spans.address(start))
    }

    /// Fast path: puts such a block aside, if there is room and the heap is not over its soft limit. If it did, the
    /// caller must [tell](Self::tell) the keeper.
    ///
    /// # Safety
    ///
    /// The caller gives the block up, if there is such a block.
    #[inline]
    #[must_use]
    pub unsafe fn put_aside(&self, memory: NonNull<u8>, layout: Layout) -> bool {
        if !goes_aside(layout) || self.is_over() {
            return false;
        }
        let pages = pages_for(layout);
        let Some(start) = self.spans.large_at(memory, pages.0, None) else {
            return false;
        };
        let entry = self.spans.entry(start);
        if !entry.put_aside(None) {
            return false;
        }
        let taken = self.aside.put(PageRun::known(start.0, pages.0), thread());
        if !taken {
            entry.enter_large(pages.0, None);
        }
        taken
    }

    /// Puts a block of this length in a lot, if some thread asks for such, there is room, and the heap is not over its
    /// soft limit: for a thread whose shelf does not take it. `entry` is the block's. If it did, the caller must
    /// [tell](Self::tell) the keeper.
    ///
    /// # Safety
    ///
    /// The caller gives the block up, if there is such a block.
    #[must_use]
    pub unsafe fn put_in_lot(&self, memory: NonNull<u8>, length: Length, entry: &Span) -> bool {
        // Relaxed: a hint.
        let is_asked = self.asked.load(Ordering::Relaxed) & bit(length) != 0;
        if !is_asked || self.is_over() || !entry.put_aside(Some(length)) {
            return false;
        }
        let run = PageRun::known(self.spans.page_of(memory).0, length.pages());
        let most = PageCount(self.share_of_shelf().0 / LOT_PART);
        let taken = self.aside.join(run, most, &entry.behind);
        if !taken {
            entry.unshelve(length);
        }
        taken
    }

    /// Takes a lot of this length, if the thread's shelf wants the other runs of it; one is the caller's. Others may
    /// put such runs there from now on.
    pub(super) fn take_lot(&self, thread: &Thread, length: Length) -> Option<PageIndex> {
        // Relaxed, twice: a hint.
        if self.asked.load(Ordering::Relaxed) & bit(length) == 0 {
            self.asked.fetch_or(bit(length), Ordering::Relaxed);
        }
        let (shelf, pages) = (thread.shelf(), PageCount(length.pages()));
        // Until these runs are on the shelf they belong to nobody. A request that would be refused waits for that, and,
        // by the other pass, looks once more for threads that keep something (`reclaim.rs`).
        let enter = || Passes::enter(|| self.heap.pass(), || self.heap.scavenges(PageIndex(0)));
        let share = if shelf.has_share() {
            shelf.most()
        } else {
            self.next_share()
        };
        let (lot, _passes) = self.aside.take_lot(pages, shelf.room_for(length, share), enter)?;
        if lot.runs() > 1 {
            self.give_share(thread);
        }
        Some(shelf.take_lot(&self.spans, length, lot))
    }

    /// Gives what lies aside back to the heap: pages are needed, or somebody looks for free ones. Called before each
    /// attempt to take pages.
    #[inline]
    pub(super) fn clear_aside(&self) {
        if self.aside.has_any() {
            self.give_aside();
        }
    }

    #[cold]
    #[inline(never)]
    fn give_aside(&self) {
        self.aside.empty(|| self.heap.pass(), |lot| self.give_lot(lot));
    }

    /// From now on nobody has asked for runs that lie aside.
    pub(super) fn forget_asked(&self) {
        // Relaxed: a hint.
        self.asked.store(0, Ordering::Relaxed);
    }

    /// Gives a lot back to the heap.
    fn give_lot(&self, lot: Lot) {
        let mut next = Some(lot.first());
        for _ in 0..lot.runs() {
            let start = next.unwrap_or_else(|| self.refuse_lot(lot));
            let entry = self.spans.entry(start);
            if !entry.is_shelved() {
                self.refuse_lot(lot);
            }
            // (That of a long run, which is alone, leads anywhere.)
            next = entry.behind.get();
            entry.leave();
            // Also tells the keeper, once more: it may have looked for this run, not found it, and gone to sleep.
            self.free_run(None, PageRun::known(start.0, lot.length().0));
        }
    }

    /// Reports that the links of a lot lead elsewhere. They are written before a run is put there, and not again unless
    /// two threads have freed it.
    #[cold]
    fn refuse_lot(&self, lot: Lot) -> ! {
        fatal::abort(
            "two threads have freed the same large block, or one like it; the address of another, its size",
            Number::Address(self.spans.address(lot.first()).addr().get()),
            Number::Count(lot.length().0 * PAGE_BYTES),
        )
    }
}

#[cfg(test)]
pub(super) mod tests {
    extern crate std;

    use super::super::Moved;
    use super::super::aside::MOST_RUNS;
    use super::super::keeper;
    use super::super::length::MOST_PAGES;
    use super::super::thread::Staying;
    use super::*;
    use crate::heap::Above;
    use crate::source::Region;
    use crate::sync::ASIDE;

    pub(in super::super) fn layout(pages: usize) -> Layout {
        Layout::from_size_align(pages * PAGE_BYTES, 8).unwrap()
    }

    /// Frees a block as `GlobalHeap` does. Returns whether it went in a lot.
    pub(in super::super) fn drop_large(
        objects: &Objects<Region>,
        thread: &Thread,
        memory: NonNull<u8>,
        layout: Layout,
    ) -> bool {
        let length = Length::of(layout);
        if objects.shelve(thread, memory, length) {
            return false;
        }
        let entry = objects.spans.entry(objects.spans.page_of(memory));
        // SAFETY: a live block of this layout, given up.
        unsafe {
            let taken = objects.put_in_lot(memory, length.unwrap(), entry);
            if !taken {
                objects.free(thread, memory, layout);
            }
            taken
        }
    }

    /// Two threads' structures of one heap.
    pub(in super::super) fn two(objects: &'static Objects<Region>) -> [Staying<'static>; 2] {
        // SAFETY: never destroyed.
        [0; 2].map(|_| unsafe { objects.enlist().unwrap().as_ref() }.enter(objects).unwrap())
    }

    /// A block, first of all from the thread's shelf.
    pub(in super::super) fn make(objects: &Objects<Region>, thread: &Thread, layout: Layout) -> NonNull<u8> {
        let shelved = Length::of(layout).and_then(|length| objects.run_from_shelf(thread, length));
        shelved.or_else(|| objects.allocate(thread, layout)).unwrap()
    }

    /// Who dropped it keeps one; the other gets the rest back, all of them by the first request.
    #[test]
    fn what_another_thread_drops_comes_back_all_at_once() {
        let objects = Objects::for_test(32 << 20, 2, false);
        let ([maker, dropper], buffer) = (two(objects), layout(13));
        let made = [0; 1 + MOST_RUNS].map(|_| make(objects, &maker, buffer));
        let in_lots = made.map(|block| drop_large(objects, &dropper, block, buffer));
        assert!(!in_lots[0] && in_lots[1..].iter().all(|&is| is));
        let (grown, pages) = (objects.heap.grown(), 13 * MOST_RUNS);
        assert_eq!(objects.aside.pages(), PageCount(pages));
        let again: [_; MOST_RUNS] = core::array::from_fn(|at| {
            let block = make(objects, &maker, buffer);
            let left = PageCount(pages - 13 * (at + 1));
            assert_eq!((objects.aside.pages(), maker.shelf().pages()), (PageCount::ZERO, left));
            block
        });
        assert!(
            again.iter().eq(made[1..].iter().rev()),
            "the one dropped last comes first"
        );
        assert_eq!(objects.heap.grown(), grown);
    }

    /// A thread that has asked for few such runs before keeps no more: it leaves a longer lot, which then goes to the
    /// heap. And no runs are put there that nobody has asked for lately.
    #[test]
    fn lots_are_for_who_asks() {
        let objects = Objects::for_test(32 << 20, 3, false);
        let ([maker, dropper], buffer) = (two(objects), layout(13));
        let [other, _] = two(objects);
        let made = [0; 9].map(|_| make(objects, &maker, buffer));
        let is_in_lot = |block| drop_large(objects, &dropper, block, buffer);
        assert_eq!(made[..5].iter().filter(|&&block| is_in_lot(block)).count(), 4);
        let one = make(objects, &other, buffer);
        assert_eq!(
            (objects.aside.pages(), other.shelf().pages()),
            (PageCount::ZERO, PageCount::ZERO)
        );
        objects.trim(false);
        assert!(!is_in_lot(made[5]), "nobody has asked since");
        let two = make(objects, &other, buffer);
        assert!(is_in_lot(made[6]) && is_in_lot(made[7]) && is_in_lot(made[8]));
        let three = make(objects, &other, buffer);
        assert_eq!(
            (objects.aside.pages(), other.shelf().pages()),
            (PageCount::ZERO, PageCount(2 * 13))
        );
        // SAFETY: live blocks of this layout.
        [one, two, three]
            .into_iter()
            .for_each(|block| unsafe { objects.free(&other, block, buffer) });
    }

    /// All places together hold eight lots; the rest goes to the heap. Whoever has no room for a lot leaves it, and
    /// gets a run from the heap, to which it then goes.
    #[test]
    fn lots_are_as_long_as_half_a_list() {
        let objects = Objects::for_test(176 << 20, 2, false);
        let ([maker, dropper], buffer) = (two(objects), layout(128));
        let lot = objects.share_of_shelf().0 / LOT_PART;
        assert!(lot <= 10 * 128);
        let made = [0; 100].map(|_| make(objects, &maker, buffer));
        let in_lots = made.map(|block| drop_large(objects, &dropper, block, buffer));
        assert_eq!(in_lots.iter().filter(|&&is| is).count(), ASIDE * (lot / 128));
        assert_eq!(objects.aside.pages(), PageCount(ASIDE * lot));
        let others = PageCount(lot - 128);
        maker.shelf().share(PageCount(others.0 - 1));
        assert!(objects.take_lot(&maker, Length::of(buffer).unwrap()).is_none());
        maker.shelf().share(others);
        assert!(objects.take_lot(&maker, Length::of(buffer).unwrap()).is_some());
        assert!(
            objects.take_lot(&maker, Length::of(buffer).unwrap()).is_none(),
            "its list is not empty"
        );
        assert_eq!(maker.shelf().pages(), others);
        assert!(objects.pages(None, PageCount(1)).is_some());
        assert_eq!(objects.aside.pages(), PageCount::ZERO);
    }

    /// A heap over its soft limit has no lots; nor is a block put in one twice.
    #[test]
    fn a_block_goes_in_a_lot_once_and_not_over_the_soft_limit() {
        let objects = Objects::for_test(16 << 20, 2, false);
        let ([maker, dropper], buffer) = (two(objects), layout(13));
        let [first, second, third] = [0; 3].map(|_| objects.allocate(&maker, buffer).unwrap());
        assert!(!drop_large(objects, &dropper, first, buffer) && drop_large(objects, &dropper, second, buffer));
        let length = Length::of(buffer).unwrap();
        let entry = |block| objects.spans.entry(objects.spans.page_of(block));
        // SAFETY: refused.
        assert!(!unsafe { objects.put_in_lot(second, length, entry(second)) });
        assert_eq!(objects.aside.pages(), PageCount(13));
        objects.heap.set_soft_limit(PageCount(1));
        // SAFETY: refused; a live block until then.
        assert!(!unsafe { objects.put_in_lot(third, length, entry(third)) });
        assert!(entry(third).is_large_of(length));
    }

    /// Two threads that free a block twice at the same moment may break the links of a lot. Here that is done by hand:
    /// the links end too early, or lead to a block that is in use.
    #[test]
    fn a_lot_whose_links_lead_elsewhere_ends_the_process() {
        const BREAK: &str = "PAGEHEAP_TEST_BREAK";
        let name = "object::transfer::tests::a_lot_whose_links_lead_elsewhere_ends_the_process";
        let Some(how) = std::env::var_os(BREAK) else {
            for how in ["nowhere", "in use"] {
                let mut child = std::process::Command::new(std::env::current_exe().unwrap());
                let output = child.args([name, "--exact", "--nocapture"]).env(BREAK, how).output();
                let (output, text) = (output.unwrap(), "two threads have freed the same large block");
                let said = std::string::String::from_utf8_lossy(&output.stderr);
                assert!(!output.status.success() && said.contains(text), "{how}: {said}");
            }
            return;
        };
        let objects = Objects::for_test(16 << 20, 2, false);
        let ([maker, dropper], buffer) = (two(objects), layout(13));
        let made = [0; 5].map(|_| make(objects, &maker, buffer));
        let is_in_lot = |block| drop_large(objects, &dropper, block, buffer);
        assert_eq!(made[..4].iter().filter(|&&block| is_in_lot(block)).count(), 3);
        let page = |block| objects.spans.page_of(block);
        let next = (how == "in use").then(|| page(made[4]));
        objects.spans.entry(page(made[2])).behind.set(next);
        objects.clear_aside();
    }

    /// Each way to take pages or to look for free ones gives back first what lies aside.
    #[test]
    fn what_lies_aside_goes_to_the_heap_before_pages_are_taken() {
        let objects = Objects::for_test(16 << 20, 1, false);
        // SAFETY: never destroyed.
        let entered = unsafe { objects.enlist().unwrap().as_ref() }.enter(objects).unwrap();
        let thread: &Thread = &entered;
        let [long, buffer] = [MOST_PAGES + 1, 13].map(layout);
        let length = Length::of(buffer).unwrap();
        let first = objects.allocate(thread, long).unwrap();
        let ways: [&dyn Fn(); 5] = [
            // SAFETY: a live block of this layout.
            &|| unsafe {
                let grown = objects.resize(thread, first, long, 2 * long.size());
                assert!(
                    matches!(grown, Some(Moved::Not)),
                    "in place, since what lies behind it is free"
                );
            },
            &|| assert!(objects.pages(thread.cache(), PageCount(1)).is_some()),
            &|| assert!(objects.pages_to_spare(thread.cache(), PageCount(1)).is_some()),
            &|| assert!(objects.allocate_apart(thread, layout(6)).is_some()),
            &|| assert!(objects.run_at_hand(thread, Length::exactly(7).unwrap()).is_some()),
        ];
        for (number, take) in ways.iter().enumerate() {
            let [alone, in_lot] = [long, buffer].map(|layout| objects.allocate(thread, layout).unwrap());
            // SAFETY: freed with their layouts, once each.
            unsafe {
                objects.free(thread, alone, long);
                assert!(objects.put_in_lot(in_lot, length, objects.spans.entry(objects.spans.page_of(in_lot))));
            }
            assert_eq!(objects.aside.pages(), PageCount(MOST_PAGES + 1 + 13));
            take();
            assert_eq!(objects.aside.pages(), PageCount::ZERO, "way {number}");
        }
    }

    /// Also where pages gained memory without any being asked for: slots in holes were taken.
    #[test]
    fn over_the_soft_limit_nothing_stays_aside() {
        let objects = Objects::for_test(16 << 20, 1, false);
        // SAFETY: never destroyed.
        let entered = unsafe { objects.enlist().unwrap().as_ref() }.enter(objects).unwrap();
        let (thread, long): (&Thread, _) = (&entered, layout(MOST_PAGES + 1));
        let put = objects.allocate(thread, long).unwrap();
        // SAFETY: freed with its layout.
        unsafe { objects.free(thread, put, long) };
        objects.heap.set_soft_limit(PageCount(1));
        objects.keep_below(thread);
        assert_eq!(objects.aside.pages(), PageCount::ZERO);
    }

    /// The keeper may have looked for it while it was in hand, and gone to sleep.
    #[test]
    fn who_gives_back_what_lay_aside_tells_the_keeper() {
        let objects = Objects::for_test(16 << 20, 1, true);
        let (keeper, long) = (objects.keeper(), layout(MOST_PAGES + 1));
        assert!(keeper.change(keeper::ABSENT, keeper::AWAKE));
        let block = objects.allocate(&objects.shared(), long).unwrap();
        // SAFETY: freed with its layout.
        unsafe { objects.free_shared(block, long) };
        assert!(keeper.change(keeper::AWAKE, keeper::ASLEEP));
        objects.clear_aside();
        assert!(keeper.is(keeper::AWAKE), "a MiB has become free");
    }
}
