//! The free lists with one thing omitted: small copies, which must fail; and as they ship, which pass.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::sync::atomic::{AtomicU32 as LoomU32, AtomicU64 as LoomU64, AtomicUsize, fence};
use pageheap::internals::AtomicU32;
use pageheap::internals::free_list::{Node, Nodes};

use super::free_lists::Few;
use super::{explore, spawn};

/// A stack like ours, with or without the tag.
fn pop_against_pop_pop_push(tag: u64) {
    explore(3, move || {
        let shared = Arc::new((LoomU64::new(1), Few::<AtomicU32>::new(3)));
        let links =
            |few: &Few<AtomicU32>| [1, 2, 3].map(|slot| few.node(slot).store((slot + 1) % 4, Ordering::Relaxed));
        links(&shared.1);
        let pop = move |head: &LoomU64, few: &Few<AtomicU32>| {
            let mut seen = head.load(Ordering::Acquire);
            while seen as u32 != 0 {
                let next = few.node(seen as u32).load(Ordering::Relaxed);
                let new = (seen & !0xFFFF_FFFF).wrapping_add(tag) | u64::from(next);
                match head.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return Some(seen as u32),
                    Err(now) => seen = now,
                }
            }
            None
        };
        let push = move |head: &LoomU64, few: &Few<AtomicU32>, slot: u32| {
            let mut seen = head.load(Ordering::Relaxed);
            loop {
                few.node(slot).store(seen as u32, Ordering::Relaxed);
                let new = (seen & !0xFFFF_FFFF).wrapping_add(tag) | u64::from(slot);
                match head.compare_exchange(seen, new, Ordering::Release, Ordering::Relaxed) {
                    Ok(_) => return,
                    Err(now) => seen = now,
                }
            }
        };
        let other = shared.clone();
        let thread = spawn(move || {
            let (head, few) = &*other;
            let first = pop(head, few);
            let second = pop(head, few);
            first.into_iter().for_each(|slot| push(head, few, slot));
            second
        });
        let (head, few) = &*shared;
        let mine = [pop(head, few), pop(head, few)];
        let theirs = thread.join().unwrap();
        let left = core::iter::from_fn(|| pop(head, few));
        let mut all: Vec<u32> = mine.into_iter().flatten().chain(theirs).chain(left.take(4)).collect();
        all.sort_unstable();
        assert_eq!(all, [1, 2, 3], "a slot twice, or not at all");
    });
}

#[test]
fn with_a_tag_a_stack_gives_no_slot_twice() {
    pop_against_pop_pop_push(1 << 32);
}

#[test]
#[should_panic = "a slot twice, or not at all"]
fn without_a_tag_it_does() {
    pop_against_pop_pop_push(0);
}

/// How a thread that finds no slot looks for one that is moving from the pocket to the stack.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    /// As it ships.
    AsItIs,
    /// It looks at the stack once.
    Once,
    /// The pocket is emptied without a Release.
    TakenRelaxed,
}

/// One slot is in the pocket, and another is put on the stack before the first is taken: one is always free.
fn a_slot_goes_to_the_stack(how: Look) {
    explore(3, move || {
        let shared = Arc::new((LoomU32::new(1), LoomU32::new(0)));
        let other = shared.clone();
        let thread = spawn(move || {
            let (pocket, head) = &*other;
            head.store(2, Ordering::Release);
            let take = if how == Look::TakenRelaxed {
                Ordering::Relaxed
            } else {
                Ordering::Release
            };
            pocket.store(0, take);
        });
        let (pocket, head) = &*shared;
        let none = head.load(Ordering::Acquire) == 0
            && pocket.load(Ordering::Acquire) == 0
            && (how == Look::Once || head.load(Ordering::Acquire) == 0);
        assert!(!none, "a no while a slot is free");
        thread.join().unwrap();
    });
}

#[test]
fn with_two_looks_at_the_stack_no_slot_is_missed() {
    a_slot_goes_to_the_stack(Look::AsItIs);
}

#[test]
#[should_panic = "a no while a slot is free"]
fn with_one_look_it_is() {
    a_slot_goes_to_the_stack(Look::Once);
}

#[test]
#[should_panic = "a no while a slot is free"]
fn if_the_pocket_is_emptied_relaxed_it_is() {
    a_slot_goes_to_the_stack(Look::TakenRelaxed);
}

/// A reader like ours, and a thread that retires; with or without the reader's fence.
fn a_reader_against_who_retires(fenced: bool) {
    explore(3, move || {
        let shared = Arc::new((LoomU64::new(0), LoomU64::new(1), Few::<Node>::new(1)));
        let other = shared.clone();
        let reader = spawn(move || {
            let (inside, place, few) = &*other;
            inside.store(1, Ordering::Release);
            if fenced {
                fence(Ordering::SeqCst);
            }
            if place.load(Ordering::Acquire) != 0 {
                few.read(1);
            }
            inside.store(0, Ordering::Release);
        });
        let (inside, place, few) = &*shared;
        place.store(0, Ordering::Release);
        fence(Ordering::SeqCst);
        if inside.load(Ordering::Acquire) == 0 {
            few.write(1);
        }
        reader.join().unwrap();
    });
}

#[test]
fn with_a_fence_a_reader_is_seen_or_sees() {
    a_reader_against_who_retires(true);
}

#[test]
#[should_panic = "Causality violation"]
fn without_it_he_reads_what_is_freed() {
    a_reader_against_who_retires(false);
}

/// How an owner and a gathering thread meet in a shard.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meeting {
    /// As it ships.
    AsItIs,
    /// The owner announces that it is inside, and looks whether a thread gathers, without a fence in between.
    OwnerWithoutFence,
    /// The gathering thread does the same.
    GathererWithoutFence,
    /// The owner leaves by a relaxed store.
    OwnerLeavesRelaxed,
    /// The gathering thread ends by a relaxed store.
    GathererEndsRelaxed,
}

/// The one slot of a shard is used twice by its owner, and once by a gathering thread: never by both.
fn an_owner_meets_one_who_gathers(how: Meeting) {
    explore(3, move || {
        let shared = Arc::new((LoomU32::new(0), LoomU32::new(0), Few::<Node>::new(1)));
        let other = shared.clone();
        let owner = spawn(move || {
            let (busy, frozen, few) = &*other;
            for _ in 0..2 {
                busy.store(1, Ordering::Relaxed);
                if how != Meeting::OwnerWithoutFence {
                    fence(Ordering::SeqCst);
                }
                if frozen.load(Ordering::Acquire) == 0 {
                    few.write(1);
                }
                let leave = if how == Meeting::OwnerLeavesRelaxed {
                    Ordering::Relaxed
                } else {
                    Ordering::Release
                };
                busy.store(0, leave);
            }
        });
        let (busy, frozen, few) = &*shared;
        frozen.store(1, Ordering::Relaxed);
        if how != Meeting::GathererWithoutFence {
            fence(Ordering::SeqCst);
        }
        if busy.load(Ordering::Acquire) == 0 {
            few.write(1);
        }
        let end = if how == Meeting::GathererEndsRelaxed {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        frozen.store(0, end);
        owner.join().unwrap();
    });
}

#[test]
fn an_owner_and_one_who_gathers_keep_apart() {
    an_owner_meets_one_who_gathers(Meeting::AsItIs);
}

#[test]
#[should_panic = "Causality violation"]
fn without_the_owners_fence_they_do_not() {
    an_owner_meets_one_who_gathers(Meeting::OwnerWithoutFence);
}

#[test]
#[should_panic = "Causality violation"]
fn without_the_gatherers_fence_they_do_not() {
    an_owner_meets_one_who_gathers(Meeting::GathererWithoutFence);
}

#[test]
#[should_panic = "Causality violation"]
fn what_an_owner_left_by_a_relaxed_store_is_not_handed_over() {
    an_owner_meets_one_who_gathers(Meeting::OwnerLeavesRelaxed);
}

#[test]
#[should_panic = "Causality violation"]
fn what_was_gathered_until_a_relaxed_store_is_not_handed_back() {
    an_owner_meets_one_who_gathers(Meeting::GathererEndsRelaxed);
}

/// A batch moves from the depot to a shard while a gathering thread looks for a slot, twice; a slot always exists.
/// With or without the word that announces the move.
fn a_batch_on_its_way_is_looked_for(told: bool) {
    explore(3, move || {
        // The depot's head with its tag, what is loaded, and whether a batch is on its way.
        let shared = Arc::new((LoomU64::new(1), LoomU64::new(0), LoomU32::new(0)));
        let other = shared.clone();
        let owner = spawn(move || {
            let (depot, loaded, moving) = &*other;
            if told {
                moving.store(1, Ordering::Relaxed);
            }
            if depot.compare_exchange(1, 1 << 32, Ordering::AcqRel, Ordering::Acquire) == Ok(1) {
                loaded.store(1, Ordering::Release);
            }
            if told {
                moving.store(2, Ordering::Release);
            }
        });
        let (depot, loaded, moving) = &*shared;
        let look = || {
            let before = moving.load(Ordering::Acquire);
            let held = loaded.load(Ordering::Acquire);
            let still = before == moving.load(Ordering::Acquire) && before % 2 == 0;
            (held, still, depot.load(Ordering::Acquire))
        };
        let (first, second) = (look(), look());
        let none = |(held, still, depot): (u64, bool, u64)| held == 0 && still && depot as u32 == 0;
        assert!(!(none(first) && first == second), "a slot was there all the time");
        owner.join().unwrap();
    });
}

#[test]
fn a_batch_that_is_said_to_be_on_its_way_is_waited_for() {
    a_batch_on_its_way_is_looked_for(true);
}

#[test]
#[should_panic = "a slot was there all the time"]
fn a_batch_that_is_not_is_missed() {
    a_batch_on_its_way_is_looked_for(false);
}

/// How the readers of a retired slot are counted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Count {
    /// As it ships: the number of readers is added after all have been told.
    AtTheEnd,
    /// One is added for each reader at the moment when it is told.
    OneByOne,
    /// As it ships, but counted down without ordering.
    Relaxed,
}

/// Two readers are inside and read a slot, which is retired meanwhile. The last to leave frees it, and nobody else.
fn two_readers_and_a_retired_slot(how: Count) {
    explore(3, move || {
        // Two records: 1 while a reader is inside, 2 when it has been told; the count; the slot; how often it was
        // freed.
        let records = [(); 2].map(|()| LoomU32::new(1));
        let shared = Arc::new((records, LoomU64::new(0), Few::<Node>::new(1), AtomicUsize::new(0)));
        let order = if how == Count::Relaxed {
            Ordering::Relaxed
        } else {
            Ordering::AcqRel
        };
        let free = |few: &Few<Node>, freed: &AtomicUsize| {
            few.write(1);
            freed.fetch_add(1, Ordering::Relaxed);
        };
        let readers = [0, 1].map(|reader: usize| {
            let shared = shared.clone();
            spawn(move || {
                let (records, refs, few, freed) = &*shared;
                few.read(1);
                if records[reader].swap(0, Ordering::AcqRel) == 2 && refs.fetch_sub(1, order) == 1 {
                    free(few, freed);
                }
            })
        });
        let (records, refs, few, freed) = &*shared;
        let mut told = 0;
        for record in records {
            if record
                .compare_exchange(1, 2, Ordering::AcqRel, Ordering::Acquire)
                .is_ok()
            {
                told += 1;
                if how == Count::OneByOne {
                    refs.fetch_add(1, order);
                }
            }
        }
        let all = if how == Count::OneByOne { 0 } else { told };
        // Readers that left before they were told are not waited for.
        if refs.fetch_add(all, order).wrapping_add(all) == 0 && (how != Count::OneByOne || told == 0) {
            free(few, freed);
        }
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert_eq!(freed.load(Ordering::Relaxed), 1, "freed once");
    });
}

#[test]
fn readers_counted_at_the_end_free_once() {
    two_readers_and_a_retired_slot(Count::AtTheEnd);
}

/// ```text
///   retires                         reader 0                    reader 1
///   tells 0, count 1
///                                   leaves, count 0: frees it
///   tells 1, count 1
///                                                               reads what is freed, leaves: frees it again
/// ```
#[test]
#[should_panic = "Causality violation"]
fn readers_counted_one_by_one_free_under_the_others() {
    two_readers_and_a_retired_slot(Count::OneByOne);
}

#[test]
#[should_panic = "Causality violation"]
fn readers_counted_without_ordering_are_still_reading() {
    two_readers_and_a_retired_slot(Count::Relaxed);
}
