//! What all threads of a heap may keep in spares, and in room for frees, beyond a little of each class: one sum that
//! they do not exceed, unless a class's lock is held for milliseconds by a thread without a processor.
//!
//! ```text
//!   thread   spares: as much as it has fetched, up to 2 MiB,   ──╮
//!                    or one of each class, 8 MiB of all          ├▶ its part of the hoard: 32 MiB of all
//!            room for frees above 128 KiB of a class           ──╯
//! ```
//!
//! A thread that fetches batches and hands all away has no part, or not for long: it took the others' when fetching was
//! what counted. And one that only drops what others have made needs no spares; when rooms have half of the hoard, its
//! magazines stay at 128 KiB (or their first rack), and their slots go home, under the class's lock, instead of into
//! the store. (What an allocation widens does not count.)
//!
//! Worked: 200 threads that each use 2 MiB, one after another, leave 104 MB resident; without the common limit they
//! left 473. One thread makes blocks of 1 to 32 KiB, 5 MiB at a time, and 32 others drop them: 102 MiB resident instead
//! of 759 (`docs/measurements.md`).
//!
//! Cost: a read-modify-write when a thread's part grows or is given back, as when the thread ends.

#![forbid(unsafe_code)]

use core::cell::Cell;

use crate::sync::{AtomicUsize, Ordering};

use super::size_class::{BATCH_SLOTS, MarkedSize};

/// The bytes of a class that a thread has room for in any case, and then again in one spare. (In any case it also has
/// room for a magazine's first rack, which is more of the largest slots.)
pub const FREE_BYTES: usize = 128 << 10;

// So rooms count for blocks of more than 1 KiB alone, whose magazines are emptied together (`resting.rs`).
const _: () = assert!(FREE_BYTES > BATCH_SLOTS[1] * MarkedSize::MOST_BYTES);

/// The most KiB in the spares of a thread, besides those; but it may have one of each class while all threads have less
/// than `FIRST_KIB` (three mixed workers would else take all that others may have).
const SPARE_KIB: u16 = 2 << 10;
const FIRST_KIB: usize = HOARD_KIB / 4;

/// A thread that has fetched so many KiB, and kept no spare meanwhile, gives back what it has of the hoard for nothing.
const IDLE_KIB: u16 = 4 * SPARE_KIB;

/// The most KiB that all threads of a heap have, besides those; and for room only while they have less than that.
const HOARD_KIB: usize = 32 << 10;
const ROOM_KIB: usize = HOARD_KIB / 2;

/// The KiB that all threads of a heap have in spares because they needed them before, and in room for frees: first
/// come, first kept, until the thread ends or is emptied. Written by a thread that else goes to the store or to spans,
/// which shares lines anyway, and no longer once it has its part. A thread that is ended by force in mid-call may take
/// its part with it.
#[derive(Debug)]
pub struct Hoard(AtomicUsize);

impl Hoard {
    /// None taken.
    pub const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Takes so many KiB more, if all are at most `most` then; returns whether they are.
    fn take(&self, kib: usize, most: usize) -> bool {
        // Relaxed, here and below: a sum that publishes nothing. A look first: when all is taken, nobody writes.
        if self.0.load(Ordering::Relaxed) + kib > most {
            return false;
        }
        let taken = self.0.fetch_add(kib, Ordering::Relaxed) + kib <= most;
        if !taken {
            self.give(kib);
        }
        taken
    }

    /// Gives so many back.
    fn give(&self, kib: usize) {
        if kib > 0 {
            // Relaxed: as above.
            self.0.fetch_sub(kib, Ordering::Relaxed);
        }
    }

    /// How many are taken.
    #[cfg(test)]
    pub fn taken(&self) -> usize {
        // Relaxed: as above.
        self.0.load(Ordering::Relaxed)
    }

    /// In the child of a fork: this much is taken.
    pub fn recount(&self, kib: usize) {
        // Relaxed: the child has one thread.
        self.0.store(kib, Ordering::Relaxed);
    }
}

/// What a thread has needed, and what it keeps beyond what it may in any case; in KiB, as a structure has no room for
/// more. For one thread at a time. All-zero bytes: nothing.
#[derive(Debug, Default)]
pub struct Demand {
    /// Of the batches that had to come from elsewhere. Beyond the most that spares may have, it counts since a spare
    /// was last kept.
    fetched: Cell<u16>,
    spares: Cell<u16>,
    rooms: Cell<u16>,
    /// What it has of the hoard: the most that spares and rooms have had.
    part: Cell<u16>,
}

/// Rounded up, so that nothing is kept for nothing.
fn kib(bytes: usize) -> u16 {
    bytes.div_ceil(1 << 10) as u16
}

impl Demand {
    /// Counts a batch that had to come from elsewhere, or a part of one. If the thread has long kept none, it hands all
    /// away, and what it has of the hoard is of no use.
    pub fn raise(&self, bytes: usize, hoard: &Hoard) {
        self.fetched.set((self.fetched.get() + kib(bytes)).min(IDLE_KIB));
        if self.fetched.get() == IDLE_KIB {
            self.give_back(hoard);
        }
    }

    /// Counts a spare more, if all are then no more than the thread has needed, or, if this is the first of its class,
    /// the thread has needed as much as that one; and if the hoard has what they lack, for the latter a quarter of it.
    /// Returns whether that is so.
    pub fn keep_spare(&self, bytes: usize, is_first: bool, hoard: &Hoard) -> bool {
        let spares = self.spares.get() + kib(bytes);
        let needed = if is_first { kib(bytes) } else { spares };
        let fetched = self.fetched.get().min(SPARE_KIB);
        let most = if spares <= fetched { HOARD_KIB } else { FIRST_KIB };
        let keeps = needed <= fetched && self.covers(spares + self.rooms.get(), most, hoard);
        if keeps {
            self.spares.set(spares);
            self.fetched.set(fetched);
        }
        keeps
    }

    /// Counts one less. (A user that ended in mid-call may have left too few.)
    pub fn drop_spare(&self, bytes: usize) {
        self.spares.set(self.spares.get().saturating_sub(kib(bytes)));
    }

    /// Counts more room, if the hoard has what that lacks. Returns whether it has.
    pub fn keep_room(&self, bytes: usize, hoard: &Hoard) -> bool {
        self.count_room(bytes, ROOM_KIB, hoard)
    }

    /// The same, though the hoard has none.
    pub fn keep_room_anyway(&self, bytes: usize, hoard: &Hoard) {
        self.count_room(bytes, usize::MAX, hoard);
    }

    fn count_room(&self, bytes: usize, most: usize, hoard: &Hoard) -> bool {
        let rooms = self.rooms.get() + kib(bytes);
        let keeps = self.covers(self.spares.get() + rooms, most, hoard);
        if keeps {
            self.rooms.set(rooms);
        }
        keeps
    }

    /// Counts less.
    pub fn drop_room(&self, bytes: usize) {
        self.rooms.set(self.rooms.get().saturating_sub(kib(bytes)));
    }

    /// After the magazines with such room have lost it.
    pub fn drop_rooms(&self) {
        self.rooms.set(0);
    }

    /// Whether the thread's part is enough for so much, as it is, or with more of the hoard.
    fn covers(&self, all: u16, most: usize, hoard: &Hoard) -> bool {
        let part = self.part.get();
        if all > part && !hoard.take((all - part).into(), most) {
            return false;
        }
        self.part.set(part.max(all));
        true
    }

    /// The KiB that it has of the hoard.
    pub fn part(&self) -> usize {
        self.part.get().into()
    }

    /// After some spares or rooms have gone other than to be used: as if no more had been needed than are left.
    pub fn lower(&self, hoard: &Hoard) {
        self.fetched.set(self.fetched.get().min(self.spares.get()));
        self.give_back(hoard);
    }

    /// Gives back what it has of the hoard and does not use.
    fn give_back(&self, hoard: &Hoard) {
        let part = self.part.get();
        let left = part.min(self.spares.get() + self.rooms.get());
        self.part.set(left);
        hoard.give((part - left).into());
    }

    /// After all have gone: as if nothing had been needed.
    pub fn end(&self, hoard: &Hoard) {
        let part = self.part();
        self.forget();
        hoard.give(part);
    }

    /// The same, where the part is not given back.
    pub fn forget(&self) {
        for count in [&self.fetched, &self.spares, &self.rooms, &self.part] {
            count.set(0);
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;

    const MOST: usize = SPARE_KIB as usize;

    fn needy(hoard: &Hoard) -> Demand {
        let demand = Demand::default();
        [1, 2 * MOST, 1].iter().for_each(|kib| demand.raise(kib << 10, hoard));
        demand
    }

    #[test]
    fn all_threads_together_hoard_no_more_than_the_limit() {
        let hoard = Hoard::new();
        let hoards = |demand: &Demand| demand.keep_spare(MOST << 10, false, &hoard);
        let threads: Vec<_> = (0..).map(|_| needy(&hoard)).take_while(hoards).collect();
        assert!(threads.len() * MOST == HOARD_KIB && hoard.taken() == HOARD_KIB);
        assert!(!needy(&hoard).keep_spare(1, false, &hoard));
        threads[0].end(&hoard);
        assert!(needy(&hoard).keep_spare(MOST << 10, false, &hoard) && !threads[0].keep_spare(1, false, &hoard));
        hoard.recount(0);
        assert!(needy(&hoard).keep_spare(1, false, &hoard) && hoard.taken() == 1);
    }

    #[test]
    fn a_thread_has_of_the_hoard_what_it_has_needed_and_keeps() {
        let hoard = Hoard::new();
        let demand = needy(&hoard);
        assert_eq!(hoard.taken(), 0, "nothing yet");
        assert!((0..5).all(|_| demand.keep_spare(2 << 10, false, &hoard)));
        assert_eq!((demand.part(), hoard.taken()), (10, 10));
        // What has been taken is enough for as much again, in whole KiB.
        demand.drop_spare(2 << 10);
        assert!(demand.keep_spare(1025, false, &hoard) && demand.part() == 10);
        assert!(demand.keep_spare((MOST - 10) << 10, false, &hoard) && hoard.taken() == MOST);
        assert!(!demand.keep_spare(1, false, &hoard), "the thread may have no more");
        demand.drop_spare((MOST - 100) << 10);
        demand.lower(&hoard);
        assert_eq!((demand.part(), hoard.taken()), (100, 100));
        assert!(!demand.keep_spare(1, false, &hoard), "no more than that is needed now");
        demand.end(&hoard);
        assert_eq!((demand.part(), hoard.taken()), (0, 0));
        assert!(!demand.keep_spare(1, false, &hoard));
    }

    #[test]
    fn rooms_have_half_of_the_hoard_and_spares_the_rest() {
        let (hoard, demand) = (Hoard::new(), Demand::default());
        let other = needy(&hoard);
        assert!(demand.keep_room(ROOM_KIB << 10, &hoard) && !demand.keep_room(1, &hoard));
        assert!(!other.keep_room(1, &hoard) && other.keep_spare(MOST << 10, false, &hoard));
        assert_eq!(hoard.taken(), ROOM_KIB + MOST);
        demand.drop_room(2 << 10);
        assert!(demand.keep_room(2 << 10, &hoard), "its part is enough");
        demand.drop_rooms();
        demand.lower(&hoard);
        assert!(demand.part() == 0 && hoard.taken() == MOST && demand.keep_room(1, &hoard));
        // What its spares do not need any more, its rooms may have.
        other.drop_spare(1 << 10);
        assert!(other.keep_room(1, &hoard) && other.part() == MOST);
        other.lower(&hoard);
        assert!(other.part() == MOST && !other.keep_spare(1, false, &hoard));
    }

    /// Each class may have one, of a thread that has fetched as much once.
    #[test]
    fn first_spares_may_be_more_than_a_thread_has_needed() {
        let (hoard, demand) = (Hoard::new(), Demand::default());
        demand.raise(100 << 10, &hoard);
        assert!(!demand.keep_spare(101 << 10, true, &hoard));
        let keeps = |_: &usize| demand.keep_spare(100 << 10, true, &hoard);
        assert_eq!((0..).take_while(keeps).count(), FIRST_KIB / 100);
        assert!(!demand.keep_spare(1, false, &hoard) && demand.keep_spare(1, true, &hoard));
        assert!(
            needy(&hoard).keep_spare(MOST << 10, false, &hoard),
            "what is needed may be more"
        );
    }

    /// It kept spares once, and hands all away since then. Rooms stay.
    #[test]
    fn a_thread_that_keeps_no_spare_any_more_gives_its_part_back() {
        let hoard = Hoard::new();
        let demand = needy(&hoard);
        assert!(demand.keep_room(10 << 10, &hoard) && demand.keep_spare(MOST << 10, false, &hoard));
        for _ in 0..2 {
            demand.drop_spare(MOST << 10);
            (0..2).for_each(|_| demand.raise(MOST << 10, &hoard));
            assert_eq!(hoard.taken(), 10 + MOST, "it may yet keep some");
            assert!(demand.keep_spare(MOST << 10, false, &hoard));
        }
        demand.drop_spare(MOST << 10);
        (0..4).for_each(|_| demand.raise(MOST << 10, &hoard));
        assert_eq!((hoard.taken(), demand.part()), (10, 10));
        assert!(demand.keep_spare(MOST << 10, false, &hoard) && hoard.taken() == 10 + MOST);
    }

    /// Where a lock's holder has no processor.
    #[test]
    fn what_is_kept_anyway_counts_and_goes_back() {
        let (hoard, demand) = (Hoard::new(), Demand::default());
        assert!(hoard.take(ROOM_KIB, ROOM_KIB));
        assert!(!demand.keep_room(1, &hoard));
        demand.keep_room_anyway(5 << 10, &hoard);
        assert_eq!((hoard.taken(), demand.part()), (ROOM_KIB + 5, 5));
        demand.end(&hoard);
        assert_eq!((hoard.taken(), demand.part()), (ROOM_KIB, 0));
    }
}
