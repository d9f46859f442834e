//! The object layer across a `fork`, in both processes; see `heap/fork.rs` for the pages below.
//!
//! All locks are held across the fork, taken outermost first: the scavenger's, that under which shared structures are
//! made, theirs, the rounds lock, the classes', the register's, the tables', then the heap's. So in the child every
//! list is intact. (Taking the lock of a shared structure bars a thread that was alone with it.) The threads that do
//! not exist in the child may have been anywhere outside the locks:
//!
//! * A slot or span that such a thread had in hand stays out: the child loses it. The same is true of slots in the
//!   hands of a thread that was punching holes, and the holes it had count as memory.
//! * A magazine may be half changed, and is not read: its slots are lost, and its structure serves the next thread. The
//!   thread's plot goes back to the heap, except for a run that it was just adding, and all of it if it was being given
//!   up.
//! * The same is true of a cache of pages.
//! * A run, or a lot of them, that such a thread was about to put aside, to take from there, or to give back, is lost:
//!   64 MiB at most.
//!
//! So the child loses what those threads had cached - at most two batches of each class, 2 MiB of other spares and 128
//! pages per thread - and what a thread was about to take or put: all batches of a class in one lane of the store, or
//! the runs of one length on its shelf (at most 16 MiB of the one, 20 MiB of the other). Blocks in use belong to the
//! child, which uses and frees them like all others.
//!
//! Cost: ~90 locks, 4 µs, and one more for each structure that threads share, with a heavy fence if a thread is alone
//! with it; in the child O(heap), and a few nanoseconds for each structure. If spans have holes, their entries are read
//! to count them: 0.8 ms for each GiB of the heap.

use core::cell::Cell;
use core::fmt;
use core::ptr::{self, NonNull};

use crate::source::Source;
use crate::sync::{Ordering, thread};

use super::batches::batch_bytes;
use super::rack::Heads;
use super::size_class::{CLASSES, SizeClass};
use super::{Keeper, Objects, Thread};

/// A heap's place in the list of all heaps of the process, which `global/fork.rs` keeps.
#[derive(Default)]
pub struct Kin {
    /// The heap opened before it. Like all of this, used only under the list's lock.
    pub next: Cell<Option<NonNull<dyn Forks>>>,
    /// The heap opened after it.
    pub last: Cell<Option<NonNull<dyn Forks>>>,
}

// SAFETY: used only under the list's lock; `global/fork.rs` says why any thread may use what it leads to.
unsafe impl Sync for Kin {}
// SAFETY: as above.
unsafe impl Send for Kin {}

impl fmt::Debug for Kin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kin").finish_non_exhaustive()
    }
}

/// A function that ends a heap, given its address, when its library is unloaded: see [`Objects::abandon`].
pub type Abandon = unsafe fn(NonNull<()>);

/// What takes part in a fork.
pub trait Forks {
    /// Its place in the list.
    fn kin(&self) -> &Kin;

    /// What knows of the scavenging thread, if it may have one.
    fn keeper(&self) -> Option<&Keeper>;

    /// Before the fork, and before any heap is held: stops scavengers. Fails if that takes too long.
    fn try_hold_driver(&self) -> bool;

    /// Lets scavengers go on.
    fn let_go_driver(&self);

    /// Before the fork, with the scavengers of all heaps stopped: takes all locks, waiting for their holders.
    fn hold(&self);

    /// After the fork, in either process: releases them.
    fn let_go(&self);

    /// In the child, before the locks are released: forgets the threads that the child does not have. `own` is the
    /// structure of its one thread, of this heap or another.
    fn recover(&self, own: Option<NonNull<Thread>>);

    /// The function that ends the heap when its library is unloaded. `None`: it stays as it is.
    fn abandon(&self) -> Option<Abandon>;
}

impl<S: Source + 'static> Forks for Objects<S> {
    fn kin(&self) -> &Kin {
        &self.kin
    }

    fn keeper(&self) -> Option<&Keeper> {
        Some(&self.keeper)
    }

    fn try_hold_driver(&self) -> bool {
        self.heap.driver().try_hold()
    }

    fn let_go_driver(&self) {
        self.heap.driver().let_go();
    }

    fn hold(&self) {
        self.commons.making.hold();
        self.commons().for_each(|common| common.lock.hold(thread()));
        self.register.rounds.hold();
        SizeClass::all().for_each(|class| self.central(class).lock.hold());
        self.register.lock.hold();
        self.tables.lock.hold();
        self.heap.hold();
    }

    fn let_go(&self) {
        self.heap.let_go();
        self.tables.lock.let_go();
        self.register.lock.let_go();
        SizeClass::all().for_each(|class| self.central(class).lock.let_go());
        self.register.rounds.let_go();
        self.commons().for_each(|common| common.lock.let_go(thread()));
        self.commons.making.let_go();
    }

    fn recover(&self, own: Option<NonNull<Thread>>) {
        // The count is never too low: holes are added under the class's lock, and subtracted after they have ended.
        let has_holes = self.heap.hole_bytes() > 0;
        let holes = has_holes.then(|| self.spans.hole_bytes(self.heap.grown().0));
        self.heap.recover(holes.unwrap_or(0));
        self.clear_aside();
        let is_own = |thread: &Thread| own.is_some_and(|own| ptr::eq(own.as_ptr(), thread));
        let own = self.register.bereave(is_own, |thread| {
            let forget = |cache| self.heap.forget_cache(cache);
            thread.bereave(&self.spans, forget, |run| self.free_run(None, run));
        });
        // After the shelves, and what lay aside: these runs were counted when they were put there, and must not count
        // again as freed here.
        self.keeper.has_gone();
        // What the keeper, now gone, had been told of is counted by nobody.
        own.into_iter().for_each(Thread::shut);
        // Their locks are held.
        let shared: usize = self
            .commons()
            .map(|common| {
                common.lock.recover(thread());
                common.thread.shut();
                common.thread.demand().part()
            })
            .sum();
        self.hoard.recount(shared + own.map_or(0, |own| own.demand().part()));
        let cached = own.is_some_and(|own| own.cache().is_some());
        let threads = self.commons().map(|common| &common.thread).chain(own);
        let shelves = threads.filter(|thread| thread.shelf().has_share()).count();
        // Relaxed, twice: a number by itself.
        self.cached.store(cached.into(), Ordering::Relaxed);
        self.shelves.store(shelves, Ordering::Relaxed);
        let mut bytes = [0; CLASSES];
        SizeClass::all().for_each(|class| bytes[class.index()] = batch_bytes(class));
        self.spans.store.recount(&Heads(&self.spans), &bytes);
    }

    fn abandon(&self) -> Option<Abandon> {
        Some(Self::abandon)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::alloc::Layout;

    use super::*;
    use crate::object::length::Length;
    use crate::object::transfer::tests::make;
    use crate::object::{Hold, Magazine};
    use crate::source::Region;
    use crate::units::PageCount;

    fn heap() -> &'static Objects<Region> {
        Objects::for_test(16 << 20, 1, true)
    }

    fn enlist(objects: &Objects<Region>) -> &'static Thread {
        // SAFETY: never destroyed.
        unsafe { objects.enlist().unwrap().as_ref() }
    }

    fn class() -> SizeClass {
        SizeClass::of(64, 8).unwrap()
    }

    /// The thread frees a block into its magazine of the class.
    fn use_magazine<'a>(objects: &'static Objects<Region>, thread: &'a Thread) -> &'a Magazine {
        let (staying, layout) = (thread.enter(objects).unwrap(), Layout::new::<[u8; 64]>());
        let block = objects.allocate(&staying, layout).unwrap();
        // SAFETY: freed with its layout, by a thread that has entered.
        unsafe { objects.free(&staying, block, layout) };
        assert!(thread.magazine(class()).count(class()) > 0);
        thread.magazine(class())
    }

    /// What happens to a heap in the child of a fork, whose thread is `own`.
    fn be_forked(objects: &Objects<Region>, own: Option<&Thread>) {
        assert!(objects.try_hold_driver());
        objects.hold();
        objects.recover(own.map(NonNull::from));
        objects.let_go();
        objects.let_go_driver();
    }

    /// A lock that another thread holds at the fork is held in the child for ever.
    #[test]
    fn all_locks_are_held_for_the_fork() {
        let objects = heap();
        let held = || {
            let (own, register, tables) = (&objects.commons, &objects.register, &objects.tables);
            let alone = [&own.making, &register.rounds, &register.lock, &tables.lock].map(|lock| lock.is_held());
            let commons = objects.commons().map(|common| common.lock.is_held());
            let classes = SizeClass::all().map(|class| objects.central(class).lock.is_held());
            alone
                .into_iter()
                .chain(commons)
                .chain(classes)
                .collect::<std::vec::Vec<_>>()
        };
        assert!(held().len() > 4 + CLASSES && held().iter().all(|&held| !held));
        assert!(objects.try_hold_driver());
        objects.hold();
        assert!(held().iter().all(|&held| held));
        objects.let_go();
        objects.let_go_driver();
        assert!(held().iter().all(|&held| !held));
    }

    /// What the parent's threads had on their shelves is free in the child, but starts no thread there.
    #[test]
    fn a_child_wants_no_keeper_for_what_its_parents_threads_kept() {
        let objects = heap();
        let thread = enlist(objects);
        let staying = thread.enter(objects).unwrap();
        for pages in 5..=32 {
            let layout = Layout::from_size_align(pages << SizeClass::PAGE_SHIFT, 8).unwrap();
            let block = objects.allocate(&staying, layout).unwrap();
            // A length that is not exact shares its hand with the next one.
            // SAFETY: the thread has been entered; a block of this length, which is given up.
            match unsafe { objects.put_in_hand(&staying, block, Length::of(layout).unwrap()) } {
                Hold::Taken | Hold::Full(_) => (),
                Hold::Refused => panic!("{pages} pages"),
            }
        }
        let long = Layout::from_size_align(2 << 20, 8).unwrap();
        let block = objects.allocate(&staying, long).unwrap();
        // SAFETY: freed with its layout, by a thread that has entered.
        unsafe { objects.free(&staying, block, long) };
        drop(staying);
        assert!(thread.shelf().pages().0 > 256, "more than a MiB");
        assert_eq!(objects.aside.pages(), PageCount(256));
        be_forked(objects, None);
        assert_eq!((thread.shelf().pages().0, objects.aside.pages().0), (0, 0));
        assert!(!objects.keeper().is_wanted());
    }

    /// The child's thread keeps what it has. The part of the others can be had again, and what is freed into its
    /// magazines from here on is noticed.
    #[test]
    fn a_child_counts_its_own_thread_alone() {
        let (objects, part) = (heap(), 2 << 20);
        let hoards = |thread: &Thread| {
            thread.demand().raise(part, &objects.hoard);
            thread.demand().keep_spare(part, false, &objects.hoard)
        };
        let threads: std::vec::Vec<_> = core::iter::repeat_with(|| enlist(objects))
            .take_while(|thread| hoards(thread))
            .collect();
        let own = threads[0];
        let magazine = use_magazine(objects, own);
        assert!(!magazine.is_shut());
        be_forked(objects, Some(own));
        assert!(magazine.is_shut());
        assert_eq!(own.demand().part() << 10, part);
        let others = threads.iter().skip(1).filter(|_| hoards(enlist(objects)));
        assert_eq!(others.count(), threads.len() - 1);
    }

    /// Those of threads that do not exist are empty, and leave their share to the child's thread.
    #[test]
    fn a_child_counts_the_shelves_that_it_has() {
        let objects = heap();
        let large = Layout::new::<[u8; 100_000]>();
        let threads = [(); 5].map(|()| enlist(objects));
        let keep_two = |thread: &Thread| {
            let blocks = [(); 2].map(|()| make(objects, thread, large));
            let shelve = |&block: &NonNull<u8>| objects.shelve(thread, block, Length::of(large));
            assert!(blocks.iter().all(shelve));
        };
        threads
            .iter()
            .for_each(|thread| keep_two(&thread.enter(objects).unwrap()));
        keep_two(&objects.shared());
        // Relaxed, here and below: one thread.
        let shelves = || objects.shelves.load(Ordering::Relaxed);
        assert_eq!(shelves(), 6);
        be_forked(objects, Some(threads[0]));
        assert_eq!(shelves(), 2, "its own, and the shared one");
        be_forked(objects, None);
        assert_eq!(shelves(), 1);
    }

    /// The caches of threads that do not exist can be lent again.
    #[test]
    fn a_child_lends_the_caches_of_its_parents_threads() {
        let objects = Objects::for_test(16 << 20, 64, false);
        let threads: std::vec::Vec<_> = core::iter::repeat_with(|| enlist(objects))
            .take_while(|thread| thread.cache().is_some())
            .collect();
        assert!(threads.len() > 1);
        be_forked(objects, Some(threads[0]));
        let again = core::iter::repeat_with(|| enlist(objects)).take_while(|thread| thread.cache().is_some());
        assert_eq!(again.count(), threads.len() - 1);
    }

    /// What is freed into the structure that threads without their own share is noticed, too.
    #[test]
    fn a_childs_shared_structure_is_shut() {
        let (objects, layout) = (heap(), Layout::new::<[u8; 64]>());
        let shared = objects.shared();
        let block = objects.allocate(&shared, layout).unwrap();
        // SAFETY: freed with its layout, under the lock.
        unsafe { objects.free(&shared, block, layout) };
        drop(shared);
        let magazine = objects.first().thread.magazine(class());
        assert!(magazine.room() > 0 && !magazine.is_shut());
        be_forked(objects, None);
        assert!(magazine.room() > 0 && magazine.is_shut());
    }

    /// A thread that takes a batch has all of its lane in hand for a moment. In the child it does not exist.
    #[test]
    fn a_child_counts_the_batches_it_has() {
        let (objects, layout) = (heap(), Layout::new::<[u8; 64]>());
        let [allocates, frees] = [(); 2].map(|()| enlist(objects));
        {
            let [one, other] = [allocates, frees].map(|thread| thread.enter(objects).unwrap());
            let blocks: std::vec::Vec<_> = (0..3000).map(|_| objects.allocate(&one, layout).unwrap()).collect();
            // SAFETY: freed with their layout, by a thread that has entered.
            blocks
                .into_iter()
                .for_each(|block| unsafe { objects.free(&other, block, layout) });
        }
        let store = &objects.spans.store;
        let has_bytes = || !store.has_room_for(1, 0, 1);
        assert!(has_bytes());
        let (heads, hint) = (Heads(&objects.spans), frees.hint());
        let mut is_left = None;
        store.any_of_last(&heads, class().index(), hint, 1, |_| {
            be_forked(objects, None);
            is_left = Some(has_bytes());
            true
        });
        assert_eq!(is_left, Some(false), "bytes of batches that nobody has");
    }

    /// A thread that has run out of memory takes structures that nobody uses, and empties them one by one. The one that
    /// it has in hand may be half changed.
    #[test]
    fn a_child_loses_what_was_being_emptied() {
        let objects = heap();
        let thread = enlist(objects);
        let magazine = use_magazine(objects, thread);
        // SAFETY: its user is this thread, which does not use it again.
        unsafe { Thread::end(NonNull::from(thread)) };
        assert!(magazine.count(class()) > 0);
        assert!(
            objects
                .register
                .take_laden(None)
                .is_some_and(|taken| ptr::eq(taken, thread))
        );
        be_forked(objects, None);
        assert_eq!(magazine.count(class()), 0);
        assert!(ptr::eq(enlist(objects), thread), "it serves the next thread");
    }

    /// A structure that nobody used is whole in the child; that of a thread may be half changed.
    #[test]
    fn a_child_keeps_what_ended_threads_have_left() {
        let objects = heap();
        let (vacant, used) = (enlist(objects), enlist(objects));
        let [left, lost] = [vacant, used].map(|thread| use_magazine(objects, thread));
        // SAFETY: its user is this thread, which does not use it again.
        unsafe { Thread::end(NonNull::from(vacant)) };
        let slots = left.count(class());
        be_forked(objects, None);
        assert_eq!((left.count(class()), lost.count(class())), (slots, 0));
        assert!(left.is_shut());
        objects.release(PageCount(usize::MAX));
        assert_eq!(left.count(class()), 0);
        objects.check().unwrap();
    }
}
