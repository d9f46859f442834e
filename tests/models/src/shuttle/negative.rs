//! Arenas and lists with one step omitted, in random schedules of three threads: small copies, which must fail; and as
//! they ship, which pass. Orderings are left to loom: here everything is sequentially consistent.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize as Stamp, Ordering::SeqCst};

use shuttle::sync::atomic::{AtomicU64, AtomicUsize};
use shuttle::thread::spawn;

use super::explore;

/// Whether a copy is as it ships.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Copy {
    Whole,
    /// The step that the test is about is omitted.
    Without,
}

/// Runs three threads, numbered from 1, on a shared value; then `end`.
fn three<T: Send + Sync + 'static>(
    shared: T,
    work: impl Fn(usize, &T) + Send + Sync + core::marker::Copy + 'static,
) -> T {
    let shared = Arc::new(shared);
    let threads: Vec<_> = (1..=3)
        .map(|who| {
            let shared = Arc::clone(&shared);
            spawn(move || work(who, &shared))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    Arc::into_inner(shared).expect("the threads have ended")
}

/// Slots that detect two owners.
struct Slots(Vec<Stamp>);

impl Slots {
    fn new(count: usize) -> Self {
        Self((0..=count).map(|_| Stamp::new(0)).collect())
    }

    fn stamp(&self, slot: usize, from: usize, to: usize) {
        assert_eq!(self.0[slot].swap(to, SeqCst), from, "slot {slot} has two owners");
    }
}

/// A stack whose head has a tag, or none.
fn a_stack(copy: Copy) {
    let tag = if copy == Copy::Whole { 1 << 32 } else { 0 };
    explore(4000, move || {
        let links = [0, 2, 3, 0].map(AtomicU64::new);
        let shared = three(
            (AtomicU64::new(1), links, Slots::new(3)),
            move |who, (head, links, slots)| {
                let change = |seen: u64, top: u64| (seen >> 32 << 32).wrapping_add(tag) | top;
                let pop = || loop {
                    let seen = head.load(SeqCst);
                    let top = seen as u32 as usize;
                    if top == 0 {
                        return None;
                    }
                    let next = links[top].load(SeqCst);
                    if head.compare_exchange(seen, change(seen, next), SeqCst, SeqCst).is_ok() {
                        slots.stamp(top, 0, who);
                        return Some(top);
                    }
                };
                let push = |slot: usize| {
                    slots.stamp(slot, who, 0);
                    loop {
                        let seen = head.load(SeqCst);
                        links[slot].store(u64::from(seen as u32), SeqCst);
                        if head
                            .compare_exchange(seen, change(seen, slot as u64), SeqCst, SeqCst)
                            .is_ok()
                        {
                            return;
                        }
                    }
                };
                let (first, second) = (pop(), pop());
                first.into_iter().for_each(push);
                pop().into_iter().for_each(push);
                second.into_iter().for_each(push);
            },
        );
        // All slots are back.
        let mut count = 0;
        let mut slot = shared.0.load(SeqCst) as u32 as usize;
        while slot != 0 && count < 4 {
            (slot, count) = (shared.1[slot].load(SeqCst) as usize, count + 1);
        }
        assert_eq!(count, 3, "a slot was lost, or has two owners");
    });
}

#[test]
fn a_stack_with_a_tag_gives_no_slot_twice() {
    a_stack(Copy::Whole);
}

#[test]
#[should_panic = "two owners"]
fn a_stack_without_a_tag_does() {
    a_stack(Copy::Without);
}

/// Two owners have a shard each, with a slot; a third gathers both. Without a look at who is inside.
fn gathering(copy: Copy) {
    explore(4000, move || {
        let shards = [1, 2].map(|slot| (AtomicUsize::new(0), AtomicUsize::new(slot)));
        let shared = (AtomicUsize::new(0), shards, Slots::new(2));
        three(shared, move |who, (frozen, shards, slots)| {
            if who == 3 {
                frozen.store(1, SeqCst);
                for (busy, loaded) in shards {
                    if copy == Copy::Without || busy.load(SeqCst) == 0 {
                        let slot = loaded.load(SeqCst);
                        loaded.store(0, SeqCst);
                        slots.stamp(slot, 0, if slot == 0 { 0 } else { who });
                    }
                }
                frozen.store(0, SeqCst);
                return;
            }
            let (busy, loaded) = &shards[who - 1];
            for _ in 0..2 {
                busy.store(1, SeqCst);
                if frozen.load(SeqCst) == 0 {
                    let slot = loaded.load(SeqCst);
                    if slot != 0 {
                        slots.stamp(slot, 0, who);
                        loaded.store(0, SeqCst);
                        slots.stamp(slot, who, 0);
                        loaded.store(slot, SeqCst);
                    }
                }
                busy.store(0, SeqCst);
            }
        });
    });
}

#[test]
fn who_gathers_leaves_alone_who_is_inside() {
    gathering(Copy::Whole);
}

#[test]
#[should_panic = "two owners"]
fn who_gathers_and_does_not_look_takes_from_who_is_inside() {
    gathering(Copy::Without);
}

/// Two readers, and a thread that retires what they may be reading. It adds the readers to the count when all have
/// been told, or each when it is told.
fn retiring(copy: Copy) {
    explore(4000, move || {
        // 0 nobody, 1 a reader, 2 told. The shared slot, the count, its readers now, how often it was freed.
        let records = [(); 2].map(|()| AtomicUsize::new(0));
        let shared = (
            records,
            AtomicUsize::new(1),
            AtomicU64::new(0),
            Stamp::new(0),
            Stamp::new(0),
        );
        let (_, _, _, _, freed) = three(shared, move |who, (records, place, refs, reading, freed)| {
            let free = || {
                assert_eq!(reading.load(SeqCst), 0, "freed under a reader");
                freed.fetch_add(1, SeqCst);
            };
            if who < 3 {
                let record = &records[who - 1];
                record.store(1, SeqCst);
                if place.load(SeqCst) != 0 {
                    reading.fetch_add(1, SeqCst);
                    shuttle::thread::yield_now();
                    reading.fetch_sub(1, SeqCst);
                }
                if record.swap(0, SeqCst) == 2 && refs.fetch_sub(1, SeqCst) == 1 {
                    free();
                }
                return;
            }
            place.store(0, SeqCst);
            let mut told = 0_u64;
            for record in records {
                if record.compare_exchange(1, 2, SeqCst, SeqCst).is_ok() {
                    told += 1;
                    if copy == Copy::Without {
                        refs.fetch_add(1, SeqCst);
                    }
                }
            }
            let rest = if copy == Copy::Without { 0 } else { told };
            let sum = refs.fetch_add(rest, SeqCst).wrapping_add(rest);
            if sum == 0 && (copy == Copy::Whole || told == 0) {
                free();
            }
        });
        assert_eq!(freed.into_inner(), 1, "freed once");
    });
}

#[test]
fn who_retires_counts_readers_when_all_are_told() {
    retiring(Copy::Whole);
}

#[test]
#[should_panic = "freed"]
fn who_counts_readers_one_by_one_frees_too_early() {
    retiring(Copy::Without);
}

/// A slab is replaced by the next while others cut it: it is closed and opened with another turn, or with the same
/// turn.
fn turns(copy: Copy) {
    const CLOSED: u64 = 0xFFFF;
    explore(4000, move || {
        // Slabs of 2 units: slab n has units 2 n and 2 n + 1. Turn and offset; the slab; the lock of the thread that
        // grows.
        let shared = (
            AtomicU64::new(0),
            AtomicUsize::new(0),
            shuttle::sync::Mutex::new(()),
            Slots::new(16),
        );
        three(shared, move |who, (state, slab, lock, units)| {
            let bump = || {
                loop {
                    let seen = state.load(SeqCst);
                    let (offset, base) = (seen & CLOSED, slab.load(SeqCst) * 2);
                    if offset >= 2 {
                        return false;
                    }
                    if state.compare_exchange(seen, seen + 1, SeqCst, SeqCst).is_ok() {
                        units.stamp(base + offset as usize, 0, who);
                        return true;
                    }
                }
            };
            for _ in 0..3 {
                while !bump() {
                    let _guard = lock.lock().unwrap();
                    if bump() {
                        break;
                    }
                    let turn = state.fetch_or(CLOSED, SeqCst) >> 16;
                    slab.store(slab.load(SeqCst) + 1, SeqCst);
                    let turn = if copy == Copy::Whole { turn + 1 } else { turn };
                    state.store(turn << 16, SeqCst);
                }
            }
        });
    });
}

#[test]
fn a_slab_with_a_turn_of_its_own_is_cut_as_itself() {
    turns(Copy::Whole);
}

#[test]
#[should_panic = "two owners"]
fn with_the_turn_of_the_one_before_it_is_taken_for_that() {
    turns(Copy::Without);
}
