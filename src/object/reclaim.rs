//! Before a request is refused: what others keep goes back to the heap, in rounds.
//!
//! ```text
//!   own things ─▶ attempt ─▶ round ─▶ attempt ─▶ round ─▶ attempt ─▶ …       until one of them succeeds, or
//!                              │                   └─ all reached again, and nothing found: it was a refusal
//!                              └─ a thread was at work, and keeps something: sleep, and another round
//! ```
//!
//! A round empties the shared structures, those of ended threads, those of all threads that are not at work on theirs,
//! the stores, and caches of pages. It may come too early, or too late:
//!
//! - A thread that is at work cannot be emptied. If it was preempted there, its shelf may hold most of a small heap.
//!   And a yield seldom helps: who has had its share of the processor gets no more of it as long as those who yield
//!   have had less. So from the fifth round on the caller sleeps.
//! - Nor can a shared structure while its lock is held. Who holds one itself never sleeps: others wait for that lock.
//!   It makes a last attempt with the locks of all (`commons.rs`).
//! - If the caller is preempted between a round and its attempt, the others free to their shelves what the attempt then
//!   misses. So a refusal stands only when the next round has found nothing.
//! - What is on its way into a cache of pages, or back to a store, is in neither place, and nobody announces that: it
//!   happens too often. So caches and stores are looked at once more after the attempt. Who has pages in hand there is
//!   marked as at work on its cache, and is waited for like one at work on its structure; the bytes of a batch are
//!   counted until somebody keeps it.
//! - A thread that releases memory may have slots in hand (`punch.rs`), and one that empties what it keeps has some on
//!   their way to the heap: that one is waited for (`announce` in `threads.rs`).
//!
//! Two rounds are no proof: a thread that exchanges two runs between its shelf and the program, and does so again
//! before the second round, has kept one all the time, and the rounds may have seen none. And when others come and go
//! during sixteen attempts, the last one is believed.
//!
//! Nor is a new span found, for the slots that its taker leaves, if the taker keeps nothing and was preempted before
//! the span is in its class. And one slot is not found if a thread was preempted between two certain instructions of a
//! pop (`sync/owner.rs`).
//!
//! Worked: six threads on two processors, with 4 of 32 MiB in use. One of 150 runs of a million operations each had a
//! request refused when all eight rounds only yielded, none of them now.
//!
//! Cost of a refusal: two rounds, 20 to 40 µs, if nobody is at work, and as much again where threads share several
//! structures, with a heavy fence for each that a thread at work is alone with: 0.4 ms with eight. Up to eight rounds
//! if others keep freeing, and 28 ms of sleep if there is always somebody at work. Threads with pages on their way to
//! the heap are waited for as in a heap of pages, for a good part of a second in all (`heap/grow.rs`).

#![forbid(unsafe_code)]

use core::cell::Cell;
use core::time::Duration;

use crate::source::Source;
use crate::sync::{is_forking, relax, sleep};

use super::{Objects, Thread};

/// How many rounds there are at most,
const ROUNDS: u32 = 32;

/// and how many of those that reach all threads.
const ROUNDS_REACHING: u32 = 8;

/// A round of waiting in which a thread yields the processor.
const YIELDING_ROUND: u32 = 1 << 7;

/// How many rounds the caller only yields, for how long it sleeps after the others, and for how long it waits for
/// another thread that makes a round.
const ROUNDS_AWAKE: u32 = 4;
const SLEEP: Duration = Duration::from_millis(1);
const ROUND_MILLISECONDS: u32 = 20;

/// What a round has achieved.
struct Reclaimed {
    /// Nothing was out of reach: of no thread at work, and nothing that another thread's round has not yet looked at.
    reached: bool,
    /// A thread was at work on its structure, and keeps something.
    missed: bool,
    /// The system has the fence that it takes to reach threads and caches, as far as is known.
    fenced: bool,
    /// Pages were found anywhere.
    found: bool,
}

/// What there is after an attempt.
#[derive(Clone, Copy, Default)]
struct Left {
    /// A thread is at work on its cache of pages, and may have some in hand.
    in_hand: bool,
    /// Or a cache that can be reached holds pages, or there is a batch in a store, or on its way back there.
    any: bool,
}

impl<S: Source + 'static> Objects<S> {
    /// The last attempts before an allocation fails: first with what the thread itself keeps, then with everything
    /// within reach, in rounds. An attempt gets the cache to use, but not in rounds: the thread's own has just been
    /// flushed, and who claims through a cache counts as a thread with pages on their way, for which it would wait.
    #[cold]
    pub(super) fn try_at_last<R>(&self, thread: &Thread, attempt: impl Fn(Option<usize>) -> Option<R>) -> Option<R> {
        self.flush(thread);
        let got = attempt(thread.cache());
        if got.is_some() {
            return got;
        }
        // In a handler of a fork, others wait for this thread: it does not sleep, or make more rounds, for them.
        let may_sleep = thread.has_user() && !is_forking();
        let (mut was_reached, mut times_reached, mut waits) = (false, 0, 0);
        for round in 0..ROUNDS {
            let seen = self.heap.releases();
            let reclaimed = self.reclaim(thread);
            let left = Cell::new(Left::default());
            // At once: until the thread yields, others rarely get to free anything.
            let got = self.heap.at_last(&mut waits, || {
                let got = attempt(None);
                if got.is_none() {
                    left.set(self.look_again(reclaimed.fenced));
                }
                got
            });
            let left = left.get();
            let missed = reclaimed.missed || left.in_hand;
            let reached = reclaimed.reached && !left.in_hand;
            let stands = was_reached && reached && !reclaimed.found && !left.any;
            let is_calm = self.aside.is_bare_and(|| self.heap.releases() == seen);
            times_reached += u32::from(reached || !may_sleep);
            if got.is_some() || stands && is_calm || times_reached == ROUNDS_REACHING {
                return got;
            }
            was_reached = reached;
            // Let other threads run.
            if missed && may_sleep && round >= ROUNDS_AWAKE {
                sleep(SLEEP);
            } else {
                relax(YIELDING_ROUND);
            }
        }
        None
    }

    /// What an attempt may have missed because it was on its way into a cache or a store. To be called before
    /// [`at_last`](crate::PageHeap::at_last) sees whether anybody has come or gone.
    fn look_again(&self, fenced: bool) -> Left {
        let (in_hand, held) = self.heap.look_at_caches();
        // What nobody can reach is refused, not waited for.
        let any = in_hand || held && fenced || self.spans.has_stored();
        Left { in_hand, any }
    }

    /// Empties what it can reach.
    fn reclaim(&self, thread: &Thread) -> Reclaimed {
        let cache = thread.cache();
        let mut pages = 0;
        // If the caller holds the lock of a shared structure, that one is emptied now.
        let own = (!thread.has_user()).then_some(thread);
        let all = self.try_commons(own, |shared| pages += self.flush(shared));
        let mut reached = all;
        pages += self.flush(thread);
        pages += self.empty_vacant_by_one();
        // When many allocations fail at once, one round serves all that waited for it. Bounded.
        let (begun, mut missed, mut fenced) = (self.register.begun(), false, true);
        if let Some(rounds) = self.register.rounds_within(ROUND_MILLISECONDS)
            && self.register.begun() == begun
        {
            let seized = self.seize_threads(&rounds);
            pages += seized.pages;
            (missed, fenced) = (seized.missed, seized.fenced);
            reached &= !missed;
        } else {
            reached = false;
        }
        pages += self.empty_stores(cache);
        self.flush_cache(thread);
        // Those of sleeping threads.
        let cached = self.heap.seize_caches();
        let found = pages > 0 || cached;
        // Whoever holds such a lock may have been preempted. (Others that hold one do not wait for this thread.)
        missed |= own.is_none() && !all;
        Reclaimed {
            reached,
            missed,
            fenced,
            found,
        }
    }
}
