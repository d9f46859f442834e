//! Lock-free stacks of batches, which any thread may push to and pop from.
//!
//! ```text
//!              class 0    class 1      …   blank racks       each lane: cache lines that few threads write
//!   lane 0     3 │ 2 │ A     0         …       1 │ 0 │ F     how many, the fewest lately, and the first one's place
//!                    A ──▶ B ──▶ C                           each batch has the place of the next
//!   lane 1     0             5 │ 5 │ D …       0
//!   …
//! ```
//!
//! **Put** writes the stack's word into the batch and makes the batch the new word, by one compare-exchange. **Take**
//! swaps the word for 0, and so gets all batches; it keeps the first and puts the rest back, by one more
//! compare-exchange. If other threads have put batches meanwhile, it takes those too, pushes them onto the rest one by
//! one, and tries again. Only its owner ever reads a batch, so none is read after it has changed hands. And there is
//! no ABA problem: a compare-exchange that succeeds on an old word relies on nothing but what that word says, two
//! counts and a first batch.
//!
//! Worked: three batches are there. One thread takes all and keeps A; before it puts B and C back, another thread puts
//! D. The first thread's exchange of 0 for `2 │ B` fails: it takes D, writes `2 │ B` into it, and exchanges 0 for `3 │
//! D`.
//!
//! Between the two steps of a take the stack looks empty: a thread that comes then tries the other lanes, and in the
//! end does without. A thread preempted between the steps, for however long, keeps nobody waiting. A fork's child that
//! lacks the thread also lacks the batches.
//!
//! A compare-exchange fails because another has succeeded (or, on some processors, for no reason, and not for long), so
//! all operations are lock-free. A put is three read-modify-writes, a take four.
//!
//! **Lanes.** A thread begins at its own lane, and looks into others only if that is empty, or if it holds so much that
//! the sum of all must be known. Counts, bytes and low-water marks are kept in each lane, and nothing that all threads
//! write is touched on the way. (With one line for the lanes of a class, and common counters, 16 threads that passed
//! blocks around took 1.0 to 1.6 times as long; `docs/measurements.md`, "Sixteen threads".)

#![forbid(unsafe_code)]

use crate::sync::{AtomicU64, AtomicUsize, Ordering, Table};

use super::chain::{BatchLinks, BatchPlace, Chain, MOST};
use super::size_class::{BATCH_SLOTS, CLASSES};

/// Stacks that are not of a class: one for each kind of blank racks.
pub const OTHER_STACKS: usize = ((BATCH_SLOTS[2] + 2).ilog2() - (BATCH_SLOTS[0] + 2).ilog2()) as usize + 1;

/// Stacks in each lane.
const STACKS: usize = CLASSES + OTHER_STACKS;

/// A lane accepts this part of what all lanes may hold, whatever the others hold: with 16 lanes, half of that in all.
const SHARE: usize = 32;

/// One stack. All-zero bytes: empty.
#[derive(Debug)]
#[repr(C)]
struct Stack {
    word: AtomicU64,
    /// How often a batch was put, and taken.
    put: AtomicU64,
    taken: AtomicU64,
}

impl Stack {
    fn chain(&self) -> Chain {
        // Relaxed: a first look, or numbers by themselves.
        Chain(self.word.load(Ordering::Relaxed))
    }

    fn put(&self, links: &impl BatchLinks, batch: BatchPlace) {
        // Relaxed: a statistic.
        self.put.fetch_add(1, Ordering::Relaxed);
        let mut before = self.chain();
        loop {
            let mut chain = before;
            chain.push(links, batch);
            // Release: the taker sees the batch and its word; partner: `take_all`. Relaxed: only compared; what it
            // leads to is not read.
            match self
                .word
                .compare_exchange_weak(before.0, chain.0, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => before = Chain(now),
            }
        }
    }

    fn take(&self, links: &impl BatchLinks) -> Option<BatchPlace> {
        // A thread that comes too early goes without.
        if self.is_empty() {
            return None;
        }
        let mut chain = self.take_all();
        let batch = chain.pop(links)?;
        self.put_back(links, chain);
        // Relaxed: a statistic.
        self.taken.fetch_add(1, Ordering::Relaxed);
        Some(batch)
    }

    fn is_empty(&self) -> bool {
        // Acquire: as in `take_all`, and pairs with its release, for one who goes on to ask `has_any`, or who is there.
        Chain(self.word.load(Ordering::Acquire)) == Chain::EMPTY
    }

    fn take_all(&self) -> Chain {
        // Acquire: pairs with the releases of `put` and `put_back`, those before the last included: each change of the
        // word is a read-modify-write, and so continues the release sequence of the one before. Release: who finds the
        // stack empty, by Acquire, sees that the taker had announced itself before, if it did (`Objects::announce`).
        Chain(self.word.swap(0, Ordering::AcqRel))
    }

    fn put_back(&self, links: &impl BatchLinks, mut chain: Chain) {
        while chain != Chain::EMPTY {
            // Release: as in `put`.
            let answer = self
                .word
                .compare_exchange(0, chain.0, Ordering::Release, Ordering::Relaxed);
            if answer.is_ok() {
                return;
            }
            let mut theirs = self.take_all();
            while let Some(batch) = theirs.pop(links) {
                chain.push(links, batch);
            }
        }
    }

    /// The fewest batches there have been since the last call. 0 if other threads change the word all the time: they
    /// need what there is.
    fn low(&self) -> u32 {
        let chain = self.chain();
        if chain.marked() == chain {
            // Nothing to write: an empty stack, or one that nobody has touched.
            return chain.low();
        }
        // Relaxed: a read-modify-write, so the release sequence of the last put continues.
        let answer = self
            .word
            .compare_exchange(chain.0, chain.marked().0, Ordering::Relaxed, Ordering::Relaxed);
        answer.map_or(0, |_| chain.low())
    }
}

/// A stack of each kind, for a few threads. All-zero bytes: empty. Two cache lines are fetched together by some
/// processors.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Lane {
    /// Bytes of the batches in it.
    bytes: AtomicUsize,
    stacks: [Stack; STACKS],
}

impl Lane {
    /// Empty stacks.
    #[allow(clippy::new_without_default, reason = "public in models only")]
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            bytes: AtomicUsize::new(0),
            stacks: core::array::from_fn(|_| Stack {
                word: zero(),
                put: zero(),
                taken: zero(),
            }),
        }
    }

    fn take(&self, links: &impl BatchLinks, kind: usize, bytes: usize) -> Option<BatchPlace> {
        let batch = self.stacks[kind].take(links)?;
        if bytes > 0 {
            // Relaxed: a sum that publishes nothing.
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        Some(batch)
    }
}

/// Where a walk over the lanes has got to.
#[derive(Debug, Default)]
pub struct Walk {
    /// The lane after the current one.
    next: usize,
    /// Batches of the current lane that are still to be taken.
    left: u32,
}

/// Stacks by kind, in lanes: a power of two.
#[derive(Debug)]
pub struct Store {
    lanes: Table<Lane>,
}

/// What a store counts of one kind of batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batches {
    /// How many there are: a snapshot. Batches that a thread is about to put back are not counted.
    pub count: u32,
    /// How often one was put.
    pub put: u64,
    /// How often one was taken.
    pub taken: u64,
}

impl Store {
    /// A store with these lanes.
    pub fn new(lanes: Table<Lane>) -> Self {
        debug_assert!(lanes.len().is_power_of_two() || lanes.is_empty());
        Self { lanes }
    }

    fn lanes(&self) -> impl Iterator<Item = &Lane> {
        (0..self.lanes.len()).map(|lane| self.lanes.get(lane))
    }

    /// The lane that `hint` picks.
    #[inline]
    fn lane(&self, hint: usize) -> &Lane {
        self.lanes.get(hint & (self.lanes.len() - 1))
    }

    /// How many batches of a kind there are.
    fn count(&self, kind: usize) -> u32 {
        let counts = self.lanes().map(|lane| lane.stacks[kind].chain().count());
        counts.fold(0, u32::saturating_add)
    }

    /// How many batches of a kind there are, and were put and taken.
    pub fn batches(&self, kind: usize) -> Batches {
        let mut sum = Batches {
            count: 0,
            put: 0,
            taken: 0,
        };
        for lane in self.lanes() {
            let stack = &lane.stacks[kind];
            // Relaxed, twice: statistics.
            let put = stack.put.load(Ordering::Relaxed);
            let taken = stack.taken.load(Ordering::Relaxed);
            let count = match stack.chain().count() {
                MOST => u32::try_from(put.saturating_sub(taken)).unwrap_or(u32::MAX),
                count => count,
            };
            sum.count = sum.count.saturating_add(count);
            sum.put += put;
            sum.taken += taken;
        }
        sum
    }

    /// Whether there is a batch of a kind: a snapshot, without those that a thread is about to put back.
    pub fn has_kind(&self, kind: usize) -> bool {
        self.lanes().any(|lane| !lane.stacks[kind].is_empty())
    }

    /// Whether any batch whose bytes are counted is here, or in the hand of a thread that is about to put it back. For
    /// one that has found none: it sees the bytes of those that it missed.
    pub fn has_any(&self) -> bool {
        // Relaxed: bytes are added before the batch is put, and less only after it is taken; who has found a stack
        // empty (by Acquire, in `is_empty`) sees that they were added.
        self.lanes().any(|lane| lane.bytes.load(Ordering::Relaxed) > 0)
    }

    /// Whether there are fewer than `most` batches of a kind; or fewer in the lane of `hint` than its share, which
    /// is all that is looked at then.
    pub fn has_room(&self, kind: usize, hint: usize, most: usize) -> bool {
        let own = self.lane(hint).stacks[kind].chain().count() as usize;
        own < most / SHARE || (self.count(kind) as usize) < most
    }

    /// Whether `bytes` more bytes are at most `most`; or, in the lane of `hint`, its share.
    pub fn has_room_for(&self, bytes: usize, hint: usize, most: usize) -> bool {
        // Relaxed: a sum that publishes nothing.
        let own = self.lane(hint).bytes.load(Ordering::Relaxed).saturating_add(bytes);
        own <= most / SHARE || self.bytes().saturating_add(bytes) <= most
    }

    /// Bytes of all batches, those included that a thread is about to put back.
    pub fn bytes(&self) -> usize {
        // Relaxed: a sum that publishes nothing.
        let bytes = self.lanes().map(|lane| lane.bytes.load(Ordering::Relaxed));
        bytes.fold(0, usize::saturating_add)
    }

    /// Puts a batch of a kind, of `bytes` bytes, on the lane that `hint` picks. Lock-free.
    pub fn put(&self, links: &impl BatchLinks, kind: usize, hint: usize, batch: BatchPlace, bytes: usize) {
        let lane = self.lane(hint);
        if bytes > 0 {
            // Relaxed: as in `has_room_for`. Before the batch is there: what is taken has been counted.
            lane.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        lane.stacks[kind].put(links, batch);
    }

    /// Takes the latest batch of a kind, of `bytes` bytes, from the lane that `hint` picks, or else from another;
    /// `None` if every batch is being taken or put back by other threads. Lock-free.
    pub fn take(&self, links: &impl BatchLinks, kind: usize, hint: usize, bytes: usize) -> Option<BatchPlace> {
        (0..self.lanes.len()).find_map(|step| self.lane(hint.wrapping_add(step)).take(links, kind, bytes))
    }

    /// Takes a batch of a kind, of `bytes` bytes, that nobody has needed since the last such walk over the lanes:
    /// tcmalloc's low-water mark, for each lane. `walk` begins as the default.
    pub fn take_unneeded(
        &self,
        links: &impl BatchLinks,
        kind: usize,
        walk: &mut Walk,
        bytes: usize,
    ) -> Option<BatchPlace> {
        loop {
            if let Some(left) = walk.left.checked_sub(1) {
                walk.left = left;
                if let Some(batch) = self.lane(walk.next - 1).take(links, kind, bytes) {
                    return Some(batch);
                }
            } else if walk.next == self.lanes.len() {
                return None;
            } else {
                walk.left = self.lane(walk.next).stacks[kind].low();
                walk.next += 1;
            }
        }
    }

    /// Whether `is_it` holds for one of the latest `most` batches of a kind in the lane that `hint` picks. The stack
    /// looks empty meanwhile.
    #[cold]
    pub fn any_of_last(
        &self,
        links: &impl BatchLinks,
        kind: usize,
        hint: usize,
        most: usize,
        mut is_it: impl FnMut(BatchPlace) -> bool,
    ) -> bool {
        let stack = &self.lane(hint).stacks[kind];
        let chain = stack.take_all();
        let mut rest = chain;
        let found = core::iter::from_fn(|| rest.pop(links)).take(most).any(&mut is_it);
        stack.put_back(links, chain);
        found
    }

    /// In the child of a fork: counts the bytes anew, given those of a batch of each kind. Batches that a thread had in
    /// hand are in no store.
    pub fn recount(&self, links: &impl BatchLinks, bytes: &[usize]) {
        for lane in self.lanes() {
            let counts = lane.stacks.iter().map(|stack| stack.chain().len(links));
            let sum = counts.zip(bytes).map(|(count, bytes)| count * bytes).sum();
            // Relaxed, twice: the child has one thread. A line that is not written is not copied.
            if lane.bytes.load(Ordering::Relaxed) != sum {
                lane.bytes.store(sum, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::cell::RefCell;
    use std::collections::BTreeMap;
    use std::vec::Vec;

    use super::*;
    use crate::object::Spans;
    use crate::object::chain::{MOST_LOW, PLACE_BITS};

    #[derive(Default)]
    struct Links(RefCell<BTreeMap<u64, Chain>>);

    impl BatchLinks for Links {
        fn read(&self, batch: BatchPlace) -> Chain {
            self.0.borrow()[&batch.0]
        }

        fn write(&self, batch: BatchPlace, behind: Chain) {
            self.0.borrow_mut().insert(batch.0, behind);
        }
    }

    const KIND: usize = 7;
    const BYTES: usize = 100;

    fn place(number: u64) -> BatchPlace {
        BatchPlace::new((1 << PLACE_BITS) - number)
    }

    fn store(lanes: usize) -> Store {
        Store::new(Spans::lanes_for_test(lanes))
    }

    fn count(store: &Store) -> u32 {
        store.batches(KIND).count
    }

    fn bytes(store: &Store, lane: usize) -> usize {
        // Relaxed: one thread.
        store.lane(lane).bytes.load(Ordering::Relaxed)
    }

    #[test]
    fn what_is_put_is_taken_last_first_and_counted() {
        let (links, store) = (Links::default(), store(4));
        let put = |number| store.put(&links, KIND, 3, place(number), BYTES);
        let take = |hint| store.take(&links, KIND, hint, BYTES);
        (1..=100).for_each(put);
        let stack = &store.lane(3).stacks[KIND];
        assert_eq!((count(&store), stack.chain().count()), (100, 100));
        assert_eq!(take(3), Some(place(100)));
        // Other threads put some while all are taken.
        let chain = stack.take_all();
        assert_eq!((chain.count(), count(&store), take(3)), (99, 0, None));
        (101..=103).for_each(put);
        stack.put_back(&links, chain);
        assert_eq!(count(&store), 102);
        let has = |number, most| store.any_of_last(&links, KIND, 3, most, |batch| batch == place(number));
        assert!(has(1, 200) && !has(1, 3) && !has(100, 200));
        // A thread with another lane finds them too.
        let taken = core::iter::from_fn(|| take(1)).map(BatchPlace::number);
        let mut rest: Vec<_> = taken.collect();
        rest.sort_unstable_by(|a, b| b.cmp(a));
        let all: Vec<_> = (1..=99).chain(101..=103).map(|number| place(number).number()).collect();
        assert_eq!((rest, count(&store)), (all, 0));
        assert_eq!(store.batches(KIND).taken, 103);
        assert_eq!(bytes(&store, 3), 0);
    }

    #[test]
    fn a_lane_has_its_share_and_all_together_the_rest() {
        let (links, store) = (Links::default(), store(4));
        let most = 2 * SHARE;
        let has_room = |hint| {
            (
                store.has_room(KIND, hint, most),
                store.has_room_for(BYTES, hint, most * BYTES),
            )
        };
        for number in 1..=most as u64 {
            assert_eq!(has_room(0), (true, true), "{number}");
            store.put(&links, KIND, 0, place(number), BYTES);
        }
        // The limit is reached; another lane still accepts its share.
        assert_eq!((has_room(0), has_room(1)), ((false, false), (true, true)));
        store.put(&links, KIND, 1, place(1001), BYTES);
        store.put(&links, KIND, 1, place(1002), BYTES);
        assert_eq!(has_room(1), (false, false));
        let mut of_kind = [0; KIND + 1];
        of_kind[KIND] = 50;
        store.recount(&links, &of_kind);
        assert_eq!((bytes(&store, 0), bytes(&store, 1)), (50 * most, 100));
    }

    #[test]
    fn what_nobody_needed_since_the_mark_is_known() {
        let (links, store) = (Links::default(), store(2));
        (1..=300).for_each(|number| store.put(&links, KIND, 0, place(number), BYTES));
        (301..=310).for_each(|number| store.put(&links, KIND, 1, place(number), BYTES));
        let unneeded = || {
            let (mut walk, mut of_lane) = (Walk::default(), [0; 2]);
            while store.take_unneeded(&links, KIND, &mut walk, BYTES).is_some() {
                of_lane[walk.next - 1] += 1;
            }
            of_lane
        };
        // The stacks were empty at first.
        assert_eq!(unneeded(), [0, 0]);
        for number in 401..=404 {
            store.take(&links, KIND, 1, BYTES);
            store.put(&links, KIND, 1, place(number), BYTES);
        }
        // More than a mark can say; and one batch was needed.
        assert_eq!(unneeded(), [255, 9]);
        assert_eq!((unneeded(), count(&store)), ([45, 1], 0));
    }

    /// It then says so until it has none.
    #[test]
    fn a_lane_with_more_batches_than_can_be_counted_hides_none() {
        let (links, store) = (Links::default(), store(2));
        let all = 2 * u64::from(MOST);
        let fill = || (1..=all).for_each(|number| store.put(&links, KIND, 1, place(number), BYTES));
        let number = || store.lane(1).stacks[KIND].chain().count();
        fill();
        for left in (1..all).rev() {
            assert!(store.take(&links, KIND, 0, BYTES).is_some());
            assert_eq!((number(), count(&store)), (MOST, left as u32));
        }
        store.take(&links, KIND, 1, BYTES);
        assert_eq!((number(), bytes(&store, 1)), (0, 0));
        fill();
        let mut of_kind = [0; KIND + 1];
        of_kind[KIND] = 3;
        store.recount(&links, &of_kind);
        assert_eq!(bytes(&store, 1), 3 * all as usize);
        // The scavenger finds all of them.
        let mut walks = 0;
        while number() > 0 {
            let mut walk = Walk::default();
            while store.take_unneeded(&links, KIND, &mut walk, 3).is_some() {}
            walks += 1;
        }
        assert_eq!(walks, 1 + all.div_ceil(MOST_LOW.into()));
        assert_eq!(bytes(&store, 1), 0);
    }
}
