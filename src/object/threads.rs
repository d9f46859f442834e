//! How a thread gets a structure of its own, and what happens to it when the thread ends.
//!
//! ```text
//!   enlist ─▶ a vacant structure, or a new one ─▶ a cache of pages, if there is one to lend
//!   leave ──▶ cache, shelf and full magazines go back ─▶ vacant, with a few slots for the next
//! ```

use core::ptr::NonNull;

use crate::geometry::WORD_PAGES;
use crate::source::Source;
use crate::sync::{Ordering, Pass};
use crate::units::PageRun;

use super::hoard::FREE_BYTES;
use super::presence::Caller;
use super::rack::Rack;
use super::register::Listed;
use super::resting::Parts;
use super::size_class::SizeClass;
use super::{Objects, Thread};

/// The words of all threads' caches are at most this fraction of the heap's limit: an eighth.
const CACHED_PART: usize = 8;

/// The span in which threads' structures lie is at most this fraction of the heap's limit: a quarter.
const OWN_PART: usize = 4;

/// After there was no memory for one: how often no thread tries to get a structure. Each of its calls would, with some
/// system calls, and a search for ended threads under the register's lock.
const REST: u32 = 256;

/// A thread that ends leaves at most this many bytes of slots of a class to the next.
const INHERITED_BYTES: usize = 16 << 10;

impl<S: Source + 'static> Objects<S> {
    /// A structure for the calling thread. `None` if there is no memory for one, or was none a while ago.
    #[cold]
    pub fn enlist(&self) -> Option<NonNull<Thread>> {
        // Relaxed, here and below: how often does not matter.
        let rest = self.unlisted.load(Ordering::Relaxed);
        if rest > 0 {
            self.unlisted.store(rest - 1, Ordering::Relaxed);
            return None;
        }
        let caller = Caller::current();
        let taken = self.register.take(caller);
        let made = || {
            let made = self.new_thread(caller);
            if made.is_none() {
                self.unlisted.store(REST, Ordering::Relaxed);
            }
            Some((made?, false))
        };
        let (thread, has_ended) = taken.or_else(made)?;
        // SAFETY: never destroyed, and ours until we leave it.
        let own = unsafe { thread.as_ref() };
        // Another thread may be about to empty it.
        let entered = own.enter_at_last(self);
        if has_ended {
            // Perhaps in the middle of a call. (For those that end with notice `part` has done it.)
            entered.settle();
        }
        if entered.cache().is_none() {
            entered.set_cache(self.lend());
        }
        entered.calls.set(self.heap.flush_calls());
        Some(thread)
    }

    /// Lends a cache to a thread. An idle thread cannot be asked for what its cache holds, so the words of all caches
    /// together are limited to a fraction of the heap; threads beyond that get none for as long as they live (16 in a
    /// heap of 64 MiB), and take each span, and each run, from the heap itself.
    fn lend(&self) -> Option<usize> {
        let most = self.heap.limit().0 / WORD_PAGES / CACHED_PART;
        // Relaxed, twice: a number by itself.
        if self.cached.fetch_add(1, Ordering::Relaxed) < most
            && let Some(cache) = self.heap.lend()
        {
            return Some(cache);
        }
        self.cached.fetch_sub(1, Ordering::Relaxed);
        None
    }

    /// A new structure, in a slot of its own class. None in a very small heap: it would take the room of what the
    /// program asks for.
    fn new_thread(&self, caller: Caller) -> Option<NonNull<Thread>> {
        let class = SizeClass::of(size_of::<Thread>(), align_of::<Thread>())?;
        if class.pages() * OWN_PART > self.heap.limit().0 {
            return None;
        }
        let thread = self.take_slot(None, class)?.cast::<Thread>();
        // SAFETY: a slot of its size and alignment, ours forever. All-zero bytes are a valid structure: integers, null
        // pointers, no function.
        let own = unsafe {
            thread.write_bytes(0, 1);
            thread.as_ref()
        };
        own.forget();
        own.set_owner(self, Self::leave);
        self.register.add(thread, caller);
        Some(thread)
    }

    /// Ends a thread of this heap.
    ///
    /// # Safety
    ///
    /// `thread` is a structure of a heap of this type; the caller used it and does not use it again.
    unsafe fn leave(thread: NonNull<Thread>) {
        // SAFETY: structures and heaps are never destroyed; `home` was set with this function, by that heap.
        let (own, objects) = unsafe {
            let own = thread.as_ref();
            (own, &*own.home.get().cast::<Self>())
        };
        objects.part(&own.enter_at_last(objects));
        if let Some(cache) = own.cache() {
            own.set_cache(None);
            // Nobody owns what it holds any more, and a thread that runs out of pages does not look there.
            objects.heap.cache_at(cache).flush();
            objects.heap.take_back(cache);
            // Relaxed: a number by itself.
            objects.cached.fetch_sub(1, Ordering::Relaxed);
        }
        objects.register.give(thread);
    }

    /// Gives back what an ending thread keeps, except a few slots of each class, which the next thread gets with the
    /// structure.
    pub(super) fn part(&self, thread: &Thread) {
        let _pass = self.announce(thread);
        let cache = thread.cache();
        let magazines = SizeClass::all().map(|class| (class, thread.magazine(class)));
        let mut is_laden = !thread.stock().is_empty() || thread.plot().pages().0 > 0;
        for (class, magazine) in magazines.filter(|(_, magazine)| magazine.has_any()) {
            // The thread may end in the middle of a call.
            magazine.settle();
            while let Some(batch) = thread.take_spare(class) {
                self.store(thread, class, batch);
            }
            let [slots, room] = [magazine.count(class), magazine.room()].map(|count| count as usize * class.bytes());
            // What is inherited does not count as the next thread's.
            if slots > INHERITED_BYTES || room > FREE_BYTES {
                self.strip(thread, cache, class);
            } else if magazine.room() > 0 {
                // An open rack stays open: the keeper has been told of its room, or was awake. But of these classes the
                // next thread's first free must be noticed.
                if Self::begins_with_free(class) {
                    magazine.shut();
                }
                is_laden = true;
            }
        }
        if is_laden {
            thread.listing().load();
        }
        self.clear_shelf(thread, cache);
        thread.demand().end(&self.hoard);
    }

    /// Gives back the slots and runs of a structure that the caller owns, or that nobody uses; pages go through
    /// `cache`, if there is one. Returns how many pages that freed.
    pub(super) fn empty(&self, thread: &Thread, cache: Option<usize>) -> usize {
        self.empty_with(thread, cache, Parts::ALL, |class| self.strip(thread, cache, class))
    }

    /// The same for parts of a structure that the caller has seized, except that each magazine keeps its rack.
    pub(super) fn empty_seized(&self, thread: &Thread, parts: Parts) -> usize {
        self.empty_with(thread, None, parts, |class| {
            let mut pages = 0;
            thread
                .magazine(class)
                .seize(|slots| pages = self.give_slots(None, class, slots));
            pages
        })
    }

    fn empty_with(
        &self,
        thread: &Thread,
        cache: Option<usize>,
        parts: Parts,
        empty: impl Fn(SizeClass) -> usize,
    ) -> usize {
        let mut pages = 0;
        for class in SizeClass::all().filter(|&class| parts.has(class)) {
            while let Some(spare) = thread.take_spare(class) {
                pages += self.give_rack(cache, class, Some(spare));
            }
            pages += empty(class);
        }
        if parts == Parts::ALL {
            thread.demand().end(&self.hoard);
        } else if parts.has_slots() {
            if parts.has_flagged() {
                thread.demand().drop_rooms();
            }
            thread.demand().lower(&self.hoard);
        }
        pages += self.give_stock(thread, cache);
        if parts.has_shelf() {
            pages += self.clear_shelf(thread, cache);
        }
        pages
    }

    /// Gives back the runs on a thread's shelf, as `empty` does, and its share.
    pub(super) fn clear_shelf(&self, thread: &Thread, cache: Option<usize>) -> usize {
        let (mut pages, had_share) = (0, thread.shelf().has_share());
        thread.shelf().clear(&self.spans, |run| {
            pages += run.pages().0;
            self.free_run(cache, run);
        });
        if had_share {
            // Last: see `give_share`. Relaxed: a number by itself.
            self.shelves.fetch_sub(1, Ordering::Relaxed);
        }
        pages
    }

    /// The same for a caller that gives back nothing else, announced.
    pub(super) fn clear_shelf_alone(&self, thread: &Thread, cache: Option<usize>) -> usize {
        let _pass = (thread.shelf().pages().0 > 0).then(|| self.heap.pass());
        self.clear_shelf(thread, cache)
    }

    /// The caller is about to give back what its thread keeps. What it has in hand then is neither on the thread nor in
    /// the heap, and is missed by both looks of a request that fails: so that waits until this is dropped, before the
    /// caller makes an attempt of its own. None if the thread keeps nothing: then threads that are refused together do
    /// not wait for one another.
    pub(super) fn announce(&self, thread: &Thread) -> Option<Pass<'_>> {
        thread.keeps_any().then(|| self.heap.pass())
    }

    /// Takes a batch out of its store for the caller to send home, announced like that.
    pub(super) fn take_announced(&self, class: SizeClass) -> Option<(Pass<'_>, Rack)> {
        let pass = self.spans.has_batch(class).then(|| self.heap.pass())?;
        Some((pass, self.spans.take_batch(class, 0)?))
    }

    /// Gives back all that a thread keeps: its slots to their classes, its runs and pages to the heap, where what lies
    /// aside goes too. Returns how many pages that freed, but for those of its cache and those aside.
    pub fn flush(&self, thread: &Thread) -> usize {
        self.clear_aside();
        let _pass = self.announce(thread);
        let mut pages = self.empty(thread, thread.cache());
        pages += self.give_plot(thread, thread.cache());
        self.flush_cache(thread);
        pages
    }

    /// Gives back the pages in a thread's cache, if it has one.
    pub(super) fn flush_cache(&self, thread: &Thread) {
        if let Some(cache) = thread.cache() {
            self.heap.cache_at(cache).flush();
        }
    }

    /// Empties the stores of all classes: batches go to their spans, empty spans to the heap, and racks home. Returns
    /// how many pages that freed.
    ///
    /// Bounded, because threads that keep bringing batches, which is quicker, would keep it going: it takes as many
    /// batches as there were, and as many as other threads may have had in hand at that moment.
    pub(super) fn empty_stores(&self, cache: Option<usize>) -> usize {
        // A batch or a span in hand is neither here nor in the heap.
        let _pass = self.heap.pass();
        let mut pages = 0;
        for class in SizeClass::all() {
            for _ in 0..self.spans.most_stored(class) {
                let Some(batch) = self.spans.take_batch(class, 0) else {
                    break;
                };
                pages += self.give_rack(cache, class, Some(batch));
            }
        }
        pages += self.give_blanks(cache);
        let spares = SizeClass::all().map(|class| self.give_spare(cache, class));
        pages + spares.sum::<usize>()
    }

    /// Returns the spare span of a class to the heap. Returns how many pages it has.
    pub(super) fn give_spare(&self, cache: Option<usize>, class: SizeClass) -> usize {
        let Some(spare) = self.central(class).take_spare(&self.spans, class) else {
            return 0;
        };
        self.tell_left(class, spare);
        self.free_run(cache, PageRun::known(spare.0, class.pages()));
        class.pages()
    }

    /// Empties the thread if another has run out of memory since it last did. Called on slow paths.
    pub(super) fn heed_calls(&self, thread: &Thread) {
        let calls = self.heap.flush_calls();
        if thread.calls.replace(calls) != calls {
            self.flush(thread);
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::alloc::Layout;

    use super::*;
    use crate::heap::Above;
    use crate::object::length::Length;
    use crate::object::plot::Plot;
    use crate::source::Region;
    use crate::units::PageCount;

    fn heap() -> &'static Objects<Region> {
        Objects::for_test(16 << 20, 64, false)
    }

    /// A thread's structure, and a block that it has allocated and freed.
    fn used(objects: &Objects<Region>, layout: Layout) -> (&'static Thread, NonNull<u8>) {
        // SAFETY: never destroyed.
        let own: &'static Thread = unsafe { objects.enlist().unwrap().as_ref() };
        let staying = own.enter(objects).unwrap();
        let block = objects.allocate(&staying, layout).unwrap();
        // SAFETY: freed with its layout, by a thread that has entered.
        unsafe { objects.free(&staying, block, layout) };
        (own, block)
    }

    /// Each of its calls would ask again, with system calls, and search under the register's lock.
    #[test]
    fn where_there_is_no_memory_for_a_structure_threads_do_not_ask_with_each_call() {
        let objects = Objects::for_test(1 << 20, 1, false);
        let runs: std::vec::Vec<_> = core::iter::from_fn(|| objects.heap.allocate(PageCount(1))).collect();
        assert!(objects.enlist().is_none());
        // SAFETY: each is freed once.
        runs.into_iter().for_each(|run| unsafe { objects.heap.free(run) });
        assert_eq!((0..).find(|_| objects.enlist().is_some()), Some(REST));
        assert!(objects.enlist().is_some());
    }

    /// No fence through all threads is needed for that, and no silence.
    #[test]
    fn what_a_thread_that_ended_has_left_is_found() {
        let (objects, layout) = (heap(), Layout::new::<[u8; 64]>());
        let (own, _) = used(objects, layout);
        // SAFETY: this thread uses the structure, and does not use it again.
        unsafe { Thread::end(NonNull::from(own)) };
        assert!(
            !own.is_bare() && own.plot().pages().0 > 0,
            "something for the next thread"
        );
        objects.trim(false);
        assert!(own.is_bare() && own.plot().pages().0 == 0);
        objects.check().unwrap();
    }

    /// The next thread's first free of a small slot is treated apart (`begin_with_free`), and of longer ones is not.
    #[test]
    fn a_thread_leaves_its_racks_open_to_the_next_but_for_those_of_small_slots() {
        let objects = heap();
        for (bytes, is_shut) in [(8, true), (120, true), (128, false), (1000, false), (1500, false)] {
            let layout = Layout::from_size_align(bytes, 8).unwrap();
            let (own, _) = used(objects, layout);
            let magazine = own.magazine(SizeClass::of(bytes, 8).unwrap());
            assert!(magazine.room() > 0 && !magazine.is_shut());
            // SAFETY: this thread uses the structure, and does not use it again.
            unsafe { Thread::end(NonNull::from(own)) };
            assert!(magazine.room() > 0 && magazine.is_shut() == is_shut, "{bytes}");
        }
        objects.trim(false);
        objects.check().unwrap();
    }

    /// However many slots the last user of the structure has left, unless it is none.
    #[test]
    fn a_thread_that_takes_over_and_frees_first_is_not_given_that_slot() {
        for (bytes, kept) in [(64, 1), (64, 6), (64, 30), (64, 126), (8, 510)] {
            let (objects, layout) = (heap(), Layout::from_size_align(bytes, 8).unwrap());
            // SAFETY: never destroyed.
            let enlist = || unsafe { objects.enlist().unwrap().as_ref() };
            let own: &Thread = enlist();
            let magazine = own.magazine(SizeClass::of(bytes, 8).unwrap());
            // SAFETY: freed with their layout, by a thread that has entered.
            let free = |own: &Thread, block| unsafe { objects.free(own, block, layout) };
            let entered = own.enter(objects).unwrap();
            let blocks: std::vec::Vec<_> = (0..kept + 510)
                .map(|_| objects.allocate(&entered, layout).unwrap())
                .collect();
            while magazine.pop().is_some() {}
            blocks[..kept].iter().for_each(|&block| free(&entered, block));
            assert_eq!(magazine.count(SizeClass::of(bytes, 8).unwrap()) as usize, kept);
            drop(entered);
            // SAFETY: this thread uses the structure, and does not use it again.
            unsafe { Thread::end(NonNull::from(own)) };
            let next: &Thread = enlist();
            assert!(core::ptr::eq(own, next) && magazine.is_shut());
            let entered = next.enter(objects).unwrap();
            free(&entered, blocks[kept]);
            let got = objects.allocate(&entered, layout).unwrap();
            assert_ne!(got, blocks[kept], "{bytes} bytes, {kept} slots");
            assert!(blocks[..kept].contains(&got));
        }
    }

    /// A signal may end it there, for instance. No more is lost than the slot that it was about to take, if there was
    /// one, and the next user of the structure can go on.
    #[test]
    fn a_thread_may_end_in_the_middle_of_a_call() {
        let layout = Layout::new::<[u8; 200]>();
        let class = SizeClass::of(layout.size(), layout.align()).unwrap();
        for (left, emptied) in [0, 1, 2]
            .into_iter()
            .flat_map(|left| [false, true].map(|is| (left, is)))
        {
            let objects = heap();
            let (own, block) = used(objects, layout);
            let magazine = own.magazine(class);
            while magazine.count(class) > left {
                magazine.pop();
            }
            magazine.end_in_the_middle();
            // SAFETY: this thread uses the structure, and does not use it again.
            unsafe { Thread::end(NonNull::from(own)) };
            if emptied {
                objects.trim(false);
            }
            assert_eq!(
                objects.enlist(),
                Some(NonNull::from(own)),
                "the same, for the next thread"
            );
            let left = if emptied { 0 } else { left };
            assert_eq!(magazine.count(class), left.saturating_sub(1));
            let _entered = own.enter(objects).unwrap();
            // SAFETY: the first that was popped above; without its mark.
            unsafe {
                block.write_bytes(0, layout.size());
                objects.free(own, block, layout);
            }
            let all = left.saturating_sub(1) + 1;
            assert_eq!(magazine.count(class), all);
            (0..all).for_each(|_| assert!(magazine.pop().is_some()));
            assert_eq!(magazine.pop(), None);
        }
    }

    /// A call can do without a rack. In a full heap all threads flushed for one, and gave up their plots. What the
    /// thread itself keeps on its shelf is used.
    #[test]
    fn nobody_else_is_asked_for_pages_that_racks_would_get() {
        let (objects, large) = (heap(), Layout::new::<[u8; 8 * 8192]>());
        let (own, _) = used(objects, Layout::new::<[u8; 64]>());
        let entered = own.enter(objects).unwrap();
        let take = || objects.allocate(&entered, large);
        let shelve = |block| assert!(objects.shelve(own, block, Length::of(large)));
        let (first, second) = (take().unwrap(), take().unwrap());
        while take().is_some() {}
        while objects.pages(own.cache(), PageCount(1)).is_some() {}
        let room = Plot::rooms().max().unwrap();
        while objects.own_blank(own, room).is_some() {}
        let (calls, had) = (objects.heap.flush_calls(), own.plot().pages().0);
        shelve(first);
        (0..5000).for_each(|_| _ = objects.own_blank(own, room));
        assert_eq!(own.plot().pages().0, had + 8);
        shelve(second);
        let racks = (0..5000).filter_map(|_| objects.blank(own, room)).count();
        assert_eq!((racks >= 8, objects.heap.flush_calls()), (true, calls), "{racks}");
        // In turns with a large block, which finds its run broken up, once in a thousand times.
        objects.empty(own, own.cache());
        objects.give_plot(own, own.cache());
        let mut block = take().unwrap();
        let calls = objects.heap.flush_calls();
        for _ in 0..2000 {
            shelve(block);
            _ = objects.own_blank(own, room);
            let shelved = objects.run_from_shelf(own, Length::of(large).unwrap());
            block = shelved.or_else(take).expect("it was there before");
        }
        let made = objects.heap.flush_calls() - calls;
        assert!(made < 100, "{made} calls for a flush");
    }

    /// Each class has a limit, and so have all together.
    #[test]
    fn the_stores_of_all_classes_hold_no_more_than_their_limit() {
        let objects = Objects::for_test(128 << 20, 1, false);
        // SAFETY: never destroyed.
        let [allocates, frees] = [(); 2].map(|()| unsafe { objects.enlist().unwrap().as_ref() });
        let (allocates, frees) = (allocates.enter(objects).unwrap(), frees.enter(objects).unwrap());
        for kib in [20, 24, 28, 32] {
            let layout = Layout::from_size_align(kib << 10, 8).unwrap();
            let blocks: std::vec::Vec<_> = (0..(20 << 10) / kib)
                .map(|_| objects.allocate(&allocates, layout).unwrap())
                .collect();
            // SAFETY: freed with their layout, by a thread that has entered.
            blocks
                .into_iter()
                .for_each(|block| unsafe { objects.free(&frees, block, layout) });
        }
        let stored = SizeClass::all().map(|class| {
            let state = objects.central(class).state(&objects.spans, class);
            state.stored as usize * class.bytes()
        });
        let stored = stored.sum::<usize>() >> 20;
        assert!((24..=32).contains(&stored), "{stored} MiB");
    }

    #[test]
    fn rounds_for_some_threads_at_a_time_come_to_all_in_turn() {
        let objects = heap();
        let mut threads: std::vec::Vec<_> = (0..5).map(|_| objects.enlist().unwrap()).collect();
        // The one that was added last comes first.
        threads.reverse();
        let rounds = objects.register.rounds();
        for expected in [&threads[..2], &threads[2..4], &threads[4..], &threads[..2]] {
            let mut visited = std::vec::Vec::new();
            rounds.go_on(2, |part| part.for_each(|thread| visited.push(NonNull::from(thread))));
            assert_eq!(visited, expected);
        }
    }

    /// A thread that is always at work cannot be emptied by others: it does that itself on its next slow path.
    #[test]
    fn a_thread_at_work_gives_up_what_it_has_when_another_has_run_out() {
        let [small, other, large] = [64, 200, 1 << 20].map(|bytes| Layout::from_size_align(bytes, 8).unwrap());
        let class = SizeClass::of(small.size(), small.align()).unwrap();
        for frees in [false, true] {
            let objects = heap();
            // SAFETY: never destroyed.
            let [busy, asks] = [(); 2].map(|()| unsafe { objects.enlist().unwrap().as_ref() });
            let (busy, asks) = (busy.enter(objects).unwrap(), asks.enter(objects).unwrap());
            let (block, others) = (objects.allocate(&busy, small), objects.allocate(&asks, other));
            // SAFETY: freed with its layout, by a thread that has entered.
            unsafe { objects.free(&busy, block.unwrap(), small) };
            while objects.allocate(&asks, large).is_some() {}
            assert!(busy.magazine(class).count(class) > 0, "nobody else empties it");
            if frees {
                // SAFETY: as above.
                unsafe { objects.free(&busy, others.unwrap(), other) };
            } else {
                assert!(objects.allocate(&busy, other).is_some(), "its span has room");
            }
            assert_eq!(busy.magazine(class).count(class), 0, "frees: {frees}");
        }
    }

    /// What all threads together may have is limited, so a thread that ends makes room for others.
    #[test]
    fn a_thread_that_ends_gives_up_its_part_of_what_is_limited() {
        let objects = heap();
        for round in 0..100 {
            let thread = objects.enlist().unwrap();
            // SAFETY: never destroyed.
            let own = unsafe { thread.as_ref() };
            own.demand().raise(2 << 20, &objects.hoard);
            let hoards = own.demand().keep_spare(2 << 20, false, &objects.hoard);
            assert!(hoards, "a part of the hoard, in round {round}");
            assert!(own.cache().is_some(), "a cache of pages, in round {round}");
            // Relaxed: one thread.
            assert_eq!(objects.cached.load(Ordering::Relaxed), 1);
            // SAFETY: this thread uses the structure, and does not use it again.
            unsafe { Thread::end(thread) };
            assert_eq!(own.demand().part(), 0);
        }
    }
}
