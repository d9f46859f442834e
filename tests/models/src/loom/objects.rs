//! Does a slot have one owner at a time, on its way from the thread that frees it to the thread that gets it next?
//!
//! A thread that frees what another has allocated passes whole batches to the class's store, or slots to their spans;
//! a thread that ends returns everything; spans arrive without the lock. Each slot is a cell that detects two owners,
//! and a new owner that does not know that the last one is done. At the end every slot is counted.
//!
//! The class has slots of 32 KiB: four to a span, six to a batch.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicUsize;
use pageheap::internals::Table;
use pageheap::object::{BatchLinks, BatchPlace, Chain, Class, Slots, Store};

use super::{explore, spawn};

/// Runs of pages for spans.
const RUNS: usize = 4;

/// A class, and the contents of its slots.
struct World {
    class: Class,
    contents: Vec<UnsafeCell<usize>>,
    /// Holes that were ever made, in grains.
    made: AtomicUsize,
}

// SAFETY: the cells are loom's: loom reports it if a thread accesses one at a wrong time.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    fn new() -> Arc<Self> {
        let world = Self::of(32 << 10);
        assert_eq!(world.class.counts(), (4, 6));
        world
    }

    /// The same with slots of so many bytes.
    fn of(bytes: usize) -> Arc<Self> {
        let class = Class::new(bytes, RUNS);
        let slots = RUNS * class.counts().0 as usize;
        let (contents, made) = ((0..slots).map(UnsafeCell::new).collect(), AtomicUsize::new(0));
        Arc::new(Self { class, contents, made })
    }

    /// A world with a batch in the store.
    fn with_stored() -> Arc<Self> {
        let world = Self::new();
        world.bring(world.batch(0), 0);
        world
    }

    /// The slots of one run and half of the next: a batch.
    fn batch(&self, pair: usize) -> Slots {
        let runs = (2 * pair..).zip([4, 2]);
        runs.flat_map(|(run, wanted)| self.fresh(run, wanted)).collect()
    }

    /// Writes to slots that the caller owns.
    fn touch(&self, slots: &Slots) {
        for &slot in slots {
            // SAFETY: loom checks that no other thread does so at this time.
            self.contents[self.class.number(slot)].with_mut(|contents| unsafe { *contents += 1 });
        }
    }

    fn touched(&self, slots: Slots) -> Slots {
        self.touch(&slots);
        slots
    }

    fn fresh(&self, run: usize, wanted: u32) -> Slots {
        self.touched(self.class.take_fresh(run, wanted))
    }

    /// Takes slots as the object layer does: out of spans, or out of a fresh run if there are none or the lock is
    /// held.
    fn take(&self, run: usize, wanted: u32) -> Slots {
        match self.class.take(wanted) {
            Some(slots) if !slots.is_empty() => self.touched(slots),
            _ => self.fresh(run, wanted),
        }
    }

    fn fetch(&self, hint: usize) -> Slots {
        self.touched(self.class.fetch(hint).unwrap_or_default())
    }

    fn bring(&self, slots: Slots, hint: usize) -> usize {
        self.touch(&slots);
        self.class.bring(slots, hint)
    }

    fn give(&self, slots: Slots) -> usize {
        self.touch(&slots);
        self.class.give(slots)
    }

    /// Gives slots of any number of batches.
    fn give_all(&self, slots: Slots) -> usize {
        slots.chunks(6).map(|batch| self.give(batch.to_vec())).sum()
    }

    /// Releases what may go of a run, if it is a span. Returns how many spans that dissolved.
    fn punch(&self, run: usize) -> usize {
        let Some((slots, claim)) = self.class.claim(run) else {
            return 0;
        };
        // Releasing the memory has the effect of a write.
        self.touch(&slots);
        let (left, holes) = self.class.end_claim(run, claim);
        self.made.fetch_add(holes, Ordering::Relaxed);
        left
    }

    /// After all threads have ended: the store is emptied, everything goes home, and the `runs` runs that were spans
    /// are whole.
    fn finish(&self, left: usize, runs: usize) {
        let mut left = left;
        while let Some(slots) = self.class.fetch(0) {
            left += self.give(slots);
        }
        left += usize::from(self.class.take_spare());
        let state = self.class.state();
        assert_eq!(
            (state.out, state.stored, state.spans),
            (0, 0, 0),
            "slots were lost or made"
        );
        assert_eq!(left, runs, "spans were lost or made");
        let made = self.made.load(Ordering::Relaxed);
        assert_eq!(self.class.holes(), (made, 0), "holes were lost or made");
        assert_eq!(
            state.released_spans, runs as u64,
            "not every span that went was counted"
        );
    }
}

#[test]
fn a_batch_freed_by_one_is_whole_for_who_takes_it() {
    explore(2, || {
        let world = World::new();
        let slots = world.batch(0);
        let other = world.clone();
        let thread = spawn(move || other.bring(slots, 0));
        let mine = world.fetch(0);
        assert!(mine.is_empty() || mine.len() == 6);
        let left = world.give(mine) + thread.join().unwrap();
        world.finish(left, 2);
    });
}

#[test]
fn of_two_who_take_batches_and_one_who_brings_each_batch_is_for_one() {
    explore(2, || {
        let world = World::with_stored();
        let slots = world.batch(1);
        let other = world.clone();
        let thread = spawn(move || {
            let left = other.bring(slots, 0);
            (left, other.fetch(0))
        });
        let mine = world.fetch(0);
        let (left, theirs) = thread.join().unwrap();
        let left = left + world.give(mine) + world.give(theirs);
        world.finish(left, 4);
    });
}

#[test]
fn batches_that_nobody_needed_are_taken_once() {
    explore(2, || {
        let world = World::with_stored();
        let slots = world.batch(1);
        let (second, third) = (world.clone(), world.clone());
        let second = spawn(move || second.bring(slots, 0));
        let third = spawn(move || third.fetch(0));
        // The first call sets the mark.
        let mine = [(); 2].map(|()| world.touched(world.class.fetch_unneeded()));
        let left = second.join().unwrap() + world.give(third.join().unwrap());
        let left = mine.into_iter().fold(left, |left, slots| left + world.give_all(slots));
        world.finish(left, 4);
    });
}

/// A store of one lane by itself, and the words that link its batches, of a byte each: cells that detect two owners.
pub struct Shelf {
    pub store: Store,
    words: [UnsafeCell<u64>; 3],
}

// SAFETY: the cells are loom's: loom reports it if a thread accesses one at a wrong time.
unsafe impl Sync for Shelf {}
// SAFETY: as above.
unsafe impl Send for Shelf {}

impl Shelf {
    pub fn new() -> Arc<Self> {
        // SAFETY: under a checker the address means nothing.
        let store = Store::new(unsafe { Table::new(core::ptr::NonNull::dangling(), 1) });
        let words = [0; 3].map(UnsafeCell::new);
        Arc::new(Self { store, words })
    }

    fn word(&self, batch: BatchPlace) -> &UnsafeCell<u64> {
        &self.words[batch.number() as usize - 1]
    }

    pub fn put(&self, batch: u64) {
        self.store.put(self, 0, 0, BatchPlace::new(batch), 1);
    }

    /// How many batches it got: one or none.
    pub fn take(&self) -> usize {
        self.store.take(self, 0, 0, 1).into_iter().count()
    }
}

impl BatchLinks for Shelf {
    fn read(&self, batch: BatchPlace) -> Chain {
        // SAFETY: loom checks that no other thread writes at this time.
        Chain::from_bits(self.word(batch).with(|word| unsafe { *word }))
    }

    fn write(&self, batch: BatchPlace, behind: Chain) {
        // SAFETY: as above.
        self.word(batch).with_mut(|word| unsafe { *word = behind.into_bits() });
    }
}

/// A thread that puts back what it does not want finds another batch, and links that to its own.
#[test]
fn a_batch_that_is_linked_anew_is_whole_for_who_takes_it() {
    explore(2, || {
        let shelf = Shelf::new();
        [1, 2].into_iter().for_each(|batch| shelf.put(batch));
        let (second, third) = (shelf.clone(), shelf.clone());
        let second = spawn(move || second.put(3));
        let third = spawn(move || third.take());
        let mine = shelf.take();
        let theirs = third.join().unwrap();
        second.join().unwrap();
        let left = core::iter::repeat_with(|| shelf.take()).take_while(|&count| count > 0);
        assert_eq!(mine + theirs + left.count(), 3, "a batch was lost or made");
    });
}

#[test]
fn who_looks_for_a_block_in_store_loses_none() {
    explore(2, || {
        let world = World::with_stored();
        let slots = world.batch(1);
        let wanted = slots[1];
        let (second, third) = (world.clone(), world.clone());
        let second = spawn(move || second.bring(slots, 0));
        let third = spawn(move || third.fetch(0));
        world.class.has_stored(wanted);
        let left = second.join().unwrap() + world.give(third.join().unwrap());
        world.finish(left, 4);
    });
}

#[test]
fn a_thread_that_ends_leaves_all_it_has_to_others() {
    explore(2, || {
        let world = World::new();
        let (batch, rest) = (world.batch(0), world.fresh(2, 2));
        let other = world.clone();
        // Its spare to its spans, then its magazine, as an ending thread does.
        let thread = spawn(move || other.give(batch) + other.give(rest));
        let mine = world.take(3, 3);
        let left = thread.join().unwrap() + world.give(mine);
        let state = world.class.state();
        world.finish(left, state.spans as usize + left);
    });
}

#[test]
fn a_span_that_arrives_while_others_hold_the_lock_is_taken_in_once() {
    explore(2, || {
        let world = World::new();
        let slots = world.fresh(0, 1);
        let other = world.clone();
        // One thread returns what the other has of a fresh span.
        let thread = spawn(move || other.take(1, 2));
        let left = world.give(slots);
        let left = left + world.give(thread.join().unwrap());
        let state = world.class.state();
        assert_eq!(state.out, 0);
        let runs = left + state.spans as usize;
        assert!(runs == 1 || runs == 2, "{runs}");
        world.finish(left, runs);
    });
}

/// As below, in a class whose spans have their maps in rows.
#[test]
fn a_slot_of_a_span_with_a_row_may_be_freed_by_another_and_taken_by_a_third() {
    explore(2, || {
        let world = World::of(56);
        let (slots, second, third) = (world.fresh(0, 2), world.clone(), world.clone());
        let second = spawn(move || second.give(slots));
        let third = spawn(move || third.take(1, 3));
        let mine = world.take(2, 1);
        let left = second.join().unwrap() + world.give(third.join().unwrap()) + world.give(mine);
        let runs = left + world.class.state().spans as usize;
        assert!((1..=3).contains(&runs), "{runs}");
        world.finish(left, runs);
    });
}

#[test]
fn a_slot_of_a_span_that_has_just_arrived_may_be_freed_by_another() {
    explore(2, || {
        let world = World::new();
        let mailbox = Arc::new(AtomicUsize::new(0));
        let (second, third, sent) = (world.clone(), world.clone(), mailbox.clone());
        let second = spawn(move || {
            let slots = second.fresh(0, 1);
            // Release: pairs with the swaps below; as a program hands a block on.
            sent.swap(slots[0], Ordering::Release);
        });
        // A thread that receives the span at any time.
        let third = spawn(move || third.class.state());
        let receive = || match mailbox.swap(0, Ordering::Acquire) {
            0 => 0,
            slot => world.give(vec![slot]),
        };
        let early = receive();
        second.join().unwrap();
        third.join().unwrap();
        let left = early + receive();
        world.finish(left, 1);
    });
}

#[test]
fn a_batch_brought_while_the_lock_is_held_is_in_store_or_at_home() {
    explore(2, || {
        let world = World::new();
        let (batch, few) = (world.batch(0), world.fresh(2, 2));
        let other = world.clone();
        let thread = spawn(move || {
            other.touch(&batch);
            other.class.bring_home(batch, 0)
        });
        let left = world.give(few) + thread.join().unwrap();
        world.finish(left, 3);
    });
}

#[test]
fn a_store_is_emptied_while_batches_come_and_none_is_lost() {
    explore(1, || {
        let world = World::with_stored();
        let slots = world.batch(1);
        let other = world.clone();
        let thread = spawn(move || other.bring(slots, 0));
        // As the scavenger does.
        let mut left = 0;
        loop {
            let slots = world.fetch(0);
            if slots.is_empty() {
                break;
            }
            left += world.give(slots);
        }
        left += usize::from(world.class.take_spare());
        left += thread.join().unwrap();
        world.finish(left, 4);
    });
}

#[test]
fn what_is_given_back_between_slots_is_nobodys() {
    explore(2, || {
        let world = World::new();
        let kept = world.fresh(0, 1);
        let other = world.clone();
        let thread = spawn(move || {
            let slots = other.take(1, 2);
            other.give(slots)
        });
        let left = world.punch(0) + thread.join().unwrap();
        let left = left + world.give(kept);
        let runs = left + world.class.state().spans as usize;
        assert!(runs == 1 || runs == 2, "{runs}");
        world.finish(left, runs);
    });
}

#[test]
fn two_give_back_between_slots_that_are_freed_meanwhile() {
    explore(2, || {
        let world = World::new();
        let (kept, last) = (world.fresh(0, 3), world.fresh(1, 4));
        // The spare is another span.
        assert_eq!(world.give(last), 0);
        let (second, third) = (world.clone(), world.clone());
        let second = spawn(move || second.punch(0));
        let third = spawn(move || third.give(kept));
        let left = world.punch(0) + second.join().unwrap() + third.join().unwrap();
        world.finish(left, 2);
    });
}

#[test]
fn a_slot_that_is_taken_ends_the_holes_it_reaches_into() {
    explore(2, || {
        let world = World::new();
        let kept = world.fresh(0, 1);
        assert_eq!(world.punch(0), 0);
        // Three slots of 32 KiB.
        assert_eq!(world.class.holes(), (0, 24));
        let other = world.clone();
        let thread = spawn(move || other.take(1, 1));
        let left = world.punch(0);
        let mine = thread.join().unwrap();
        let (filled, holes) = world.class.holes();
        assert_eq!(holes + filled, world.made.load(Ordering::Relaxed));
        assert!(holes == 16 || holes == 24, "{holes}");
        let left = left + world.give(mine) + world.give(kept);
        let runs = left + world.class.state().spans as usize;
        world.finish(left, runs);
    });
}

#[test]
fn between_the_slots_of_a_span_that_arrives_meanwhile() {
    explore(2, || {
        let world = World::new();
        let other = world.clone();
        let thread = spawn(move || other.fresh(1, 1));
        let left = world.punch(1);
        let mine = thread.join().unwrap();
        let left = left + world.give(mine);
        world.finish(left, 1);
    });
}
