//! An arena's cursor with one thing omitted: small copies, which must fail; and as it ships, which passes.

use core::sync::atomic::{AtomicUsize as Count, Ordering};
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, AtomicUsize};

use super::{explore, spawn};

/// What the copy omits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Without {
    /// Nothing: as it ships.
    Nothing,
    /// The turn beside the offset.
    Turn,
    /// Closing the slab before it is changed.
    Closing,
    /// The Release of the thread that gives back.
    Release,
    /// The Acquire of the thread that takes.
    Acquire,
    /// Noting what falls before it falls: it is noted afterwards.
    Note,
}

const CLOSED: u64 = 0xFF;
const TURN: u64 = 0x100;

/// Cells in a slab.
const CELLS: usize = 4;

/// A cursor over slabs of four cells; the first slab is open and one of its cells is taken.
struct Cursor {
    without: Without,
    state: AtomicU64,
    base: AtomicUsize,
    fallen: AtomicU64,
    /// How often each cell was handed out.
    counts: [Count; 2 * CELLS],
    /// The contents of each.
    cells: [UnsafeCell<usize>; 2 * CELLS],
}

// SAFETY: the cells are loom's: loom reports it if a thread accesses one at a wrong time.
unsafe impl Sync for Cursor {}

impl Cursor {
    fn new(without: Without) -> Arc<Self> {
        let cursor = Self {
            without,
            state: AtomicU64::new(TURN | 1),
            base: AtomicUsize::new(0),
            fallen: AtomicU64::new(0),
            counts: Default::default(),
            cells: [(); 2 * CELLS].map(|()| UnsafeCell::new(0)),
        };
        cursor.counts[0].store(1, Ordering::Relaxed);
        Arc::new(cursor)
    }

    fn unless(&self, left_out: Without, order: Ordering) -> Ordering {
        if self.without == left_out {
            Ordering::Relaxed
        } else {
            order
        }
    }

    /// Like `Cursor::bump`, for one cell.
    fn take(&self) -> Option<usize> {
        let acquire = self.unless(Without::Acquire, Ordering::Acquire);
        let mut state = self.state.load(acquire);
        loop {
            let offset = (state & CLOSED) as usize;
            let base = self.base.load(acquire);
            if offset >= CELLS {
                return None;
            }
            match self.state.compare_exchange(state, state + 1, acquire, acquire) {
                Ok(_) => return Some(self.handed_out(base + offset)),
                Err(now) => state = now,
            }
        }
    }

    fn handed_out(&self, cell: usize) -> usize {
        self.counts[cell].fetch_add(1, Ordering::Relaxed);
        cell
    }

    /// Like `Cursor::move_end`, for a cell that is given back; if that succeeds, it counts as never handed out.
    fn give_back(&self, cell: usize) -> bool {
        let state = self.state.load(Ordering::Acquire);
        let offset = (state & CLOSED) as usize;
        if offset > CELLS || self.base.load(Ordering::Acquire) + offset != cell + 1 {
            return false;
        }
        if self.without != Without::Note {
            self.fallen.fetch_max(state, Ordering::Relaxed);
        }
        let release = self.unless(Without::Release, Ordering::Release);
        let moved = self
            .state
            .compare_exchange(state, state - 1, release, Ordering::Relaxed);
        if moved.is_ok() {
            if self.without == Without::Note {
                self.fallen.fetch_max(state, Ordering::Relaxed);
            }
            self.counts[cell].fetch_sub(1, Ordering::Relaxed);
        }
        moved.is_ok()
    }

    /// Closes the slab. Returns how far it has ever been cut.
    fn close(&self) -> u64 {
        let state = if self.without == Without::Closing {
            self.state.load(Ordering::Acquire)
        } else {
            self.state.fetch_or(CLOSED, Ordering::Acquire)
        };
        let fallen = self.fallen.swap(0, Ordering::Relaxed);
        let fallen = if fallen / TURN == state / TURN { fallen } else { 0 };
        (state & CLOSED).max(fallen & CLOSED)
    }

    /// Goes on with the second slab, one cell of which is taken at once. The first slab is closed.
    fn open(&self) {
        self.base.store(CELLS, Ordering::Release);
        let turn = if self.without == Without::Turn { TURN } else { 2 * TURN };
        self.state.swap(turn | 1, Ordering::Release);
        self.handed_out(CELLS);
    }
}

/// One thread takes a cell while another takes one and turns the slab over; then the rest is taken. No cell twice.
fn one_takes_while_the_slab_turns_over(without: Without) {
    explore(3, move || {
        let cursor = Cursor::new(without);
        let other = Arc::clone(&cursor);
        let thread = spawn(move || {
            other.take();
            other.close();
            other.open();
        });
        cursor.take();
        thread.join().unwrap();
        while cursor.take().is_some() {}
        let most = cursor.counts.iter().map(|count| count.load(Ordering::Relaxed)).max();
        assert_eq!(most, Some(1), "a cell was handed out twice");
    });
}

#[test]
fn with_a_turn_no_cell_is_handed_out_twice() {
    one_takes_while_the_slab_turns_over(Without::Nothing);
}

/// ```text
///   takes                          another
///   reads offset 1, slab 0
///                                  takes cell 1 of slab 0, turns to slab 1, takes its cell 0: offset 1
///   offset is 1: takes cell 1 of slab 0
/// ```
#[test]
#[should_panic = "a cell was handed out twice"]
fn without_a_turn_one_is() {
    one_takes_while_the_slab_turns_over(Without::Turn);
}

#[test]
#[should_panic = "a cell was handed out twice"]
fn a_slab_that_is_changed_while_it_is_open_is_cut_twice() {
    one_takes_while_the_slab_turns_over(Without::Closing);
}

/// One thread writes to a cell and gives it back; another gets it and writes to it too.
fn a_cell_is_given_back(without: Without) {
    explore(3, move || {
        let cursor = Cursor::new(without);
        let write = |cursor: &Cursor, cell: usize| {
            // SAFETY: loom checks that no other thread does so at this time.
            cursor.cells[cell].with_mut(|contents| unsafe { *contents += 1 });
        };
        let other = Arc::clone(&cursor);
        let thread = spawn(move || {
            if let Some(cell) = other.take() {
                write(&other, cell);
                other.give_back(cell);
            }
        });
        if let Some(cell) = cursor.take() {
            write(&cursor, cell);
        }
        thread.join().unwrap();
    });
}

#[test]
fn who_gets_a_cell_next_sees_that_the_last_is_done_with_it() {
    a_cell_is_given_back(Without::Nothing);
}

#[test]
#[should_panic = "Causality violation"]
fn given_back_relaxed_it_is_still_written_to() {
    a_cell_is_given_back(Without::Release);
}

#[test]
#[should_panic = "Causality violation"]
fn taken_relaxed_it_is_still_written_to() {
    a_cell_is_given_back(Without::Acquire);
}

/// One thread takes a cell and gives it back while another closes the slab: if the cell could be given back, that is
/// known.
fn what_fell_is_known(without: Without) {
    explore(3, move || {
        let cursor = Cursor::new(without);
        let other = Arc::clone(&cursor);
        let thread = spawn(move || other.take().is_some_and(|cell| other.give_back(cell)));
        let high = cursor.close();
        cursor.open();
        let fell = thread.join().unwrap();
        // If not, the cell came from the second slab, or none was taken.
        let second = cursor.fallen.load(Ordering::Relaxed) / TURN == 2;
        assert!(!fell || second || high == 2, "what fell is forgotten");
    });
}

#[test]
fn what_is_noted_before_it_falls_is_known() {
    what_fell_is_known(Without::Nothing);
}

#[test]
#[should_panic = "what fell is forgotten"]
fn what_is_noted_afterwards_may_come_too_late() {
    what_fell_is_known(Without::Note);
}
