//! Readers and retirement, on threads.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pageheap::arena::{ArenaConfig, FreeList, Owner, ShardedFreeList};

use super::twins::blocks::Blocks;

/// What is shared: two words that are equal while anybody may read them.
type Pair = [AtomicU64; 2];

fn list(slots: usize, owners: usize) -> ShardedFreeList {
    let layout = Layout::new::<Pair>();
    let config = ArenaConfig::new().limit(slots * 32 + owners * 400 + (64 << 10));
    ShardedFreeList::with_config(layout, owners, config).unwrap()
}

/// A slot with `value` in both words.
fn publish(owner: &Owner<'_>, value: u64) -> Option<*mut Pair> {
    let slot = owner.allocate().ok()?.cast::<Pair>();
    // SAFETY: ours. A reader who is late would read by atomics, and find out.
    let pair = unsafe { slot.as_ref() };
    pair.iter().for_each(|word| word.store(value, Ordering::Relaxed));
    Some(slot.as_ptr())
}

/// Makes a slot unreachable, and gives it back.
fn replace(owner: &Owner<'_>, place: &AtomicPtr<Pair>, new: *mut Pair) {
    if let Some(old) = NonNull::new(place.swap(new, Ordering::AcqRel)) {
        // SAFETY: out of reach for those who come now, and ours alone to give back.
        unsafe { owner.retire(old.cast()) };
    }
}

/// Reads both words, with some time between.
fn check(pair: *const Pair, pause: u32) {
    if pair.is_null() {
        return;
    }
    // SAFETY: a slot found inside; its memory is a pair as long as the list lives.
    let pair = unsafe { &*pair };
    let first = pair[0].load(Ordering::Relaxed);
    (0..pause).for_each(|_| std::hint::spin_loop());
    if pause.is_multiple_of(64) {
        std::thread::yield_now();
    }
    assert_eq!(
        first,
        pair[1].load(Ordering::Relaxed),
        "a slot was used again under a reader"
    );
}

/// Readers by guards of all three kinds, and writers who publish, replace and retire.
#[test]
fn readers_of_all_kinds_see_whole_values() {
    let list = list(4096, 8);
    let places: [AtomicPtr<Pair>; 16] = std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut()));
    let (end, reads, refused) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let (list, places, end, refused) = (&list, &places, &end, &refused);
            scope.spawn(move || {
                let owner = list.owner().unwrap();
                let mut value = thread;
                while !end.load(Ordering::Relaxed) {
                    value = value.wrapping_mul(0x5_DEEC_E66D).wrapping_add(11 + thread);
                    let Some(new) = publish(&owner, value) else {
                        refused.fetch_add(1, Ordering::Relaxed);
                        std::thread::yield_now();
                        continue;
                    };
                    replace(&owner, &places[value as usize >> 7 & 15], new);
                }
            });
        }
        for kind in 0..3 {
            let (list, places, end, reads) = (&list, &places, &end, &reads);
            scope.spawn(move || {
                let owner = list.owner().unwrap();
                for round in 0_u32.. {
                    let place = &places[round as usize & 15];
                    match kind {
                        0 => {
                            let _guard = owner.enter();
                            check(place.load(Ordering::Acquire), round & 127);
                        }
                        1 => {
                            let guard = owner.enter_bounded();
                            check(guard.protect(|| place.load(Ordering::Acquire)), round & 127);
                            check(guard.protect(|| places[7].load(Ordering::Acquire)), 3);
                        }
                        _ => {
                            let _guard = list.enter();
                            check(place.load(Ordering::Acquire), round & 127);
                        }
                    }
                    if end.load(Ordering::Relaxed) {
                        reads.fetch_add(u64::from(round), Ordering::Relaxed);
                        return;
                    }
                }
            });
        }
        std::thread::sleep(Duration::from_millis(500));
        end.store(true, Ordering::Relaxed);
    });
    assert!(reads.into_inner() > 100);
    let owner = list.owner().unwrap();
    places
        .iter()
        .for_each(|place| replace(&owner, place, std::ptr::null_mut()));
    owner.flush();
    assert_eq!(list.stats().allocated, 0);
    let all = std::iter::from_fn(|| owner.allocate().ok()).count();
    assert!(all >= 4096, "{all} slots are left");
}

#[test]
fn a_retired_slot_waits_for_who_was_inside_and_not_for_who_came_later() {
    let list = list(1, 2);
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let slots: Vec<_> = std::iter::from_fn(|| owner.allocate().ok()).collect();
    let inside = reader.enter();
    // SAFETY: nobody else knows of them.
    slots.iter().for_each(|slot| unsafe { owner.retire(slot.cast()) });
    owner.flush();
    assert!(owner.allocate().is_err(), "all are waiting");
    let later = list.enter();
    drop(inside);
    assert_eq!(std::iter::from_fn(|| owner.allocate().ok()).count(), slots.len());
    drop(later);
}

#[test]
fn guards_within_guards_count_as_the_outermost() {
    let list = list(1, 2);
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let slots: Vec<_> = std::iter::from_fn(|| owner.allocate().ok()).collect();
    let outer = reader.enter_bounded();
    let inner = reader.enter();
    drop(outer);
    // SAFETY: nobody else knows of them.
    slots.iter().for_each(|slot| unsafe { owner.retire(slot.cast()) });
    assert!(owner.allocate().is_err(), "all are waiting");
    drop(inner);
    assert!(owner.allocate().is_ok());
}

/// One reader sleeps inside; a writer goes on for many times all slots, with a few of them live.
fn sleeper(bounded: bool) -> Result<(), u64> {
    let list = list(2000, 2);
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let place = AtomicPtr::new(publish(&owner, 1).unwrap());
    let all = (!bounded).then(|| reader.enter());
    let some = bounded.then(|| reader.enter_bounded());
    let seen = some
        .as_ref()
        .map(|guard| guard.protect(|| place.load(Ordering::Acquire)));
    for value in 2..100_000 {
        let Some(new) = publish(&owner, value) else {
            return Err(value);
        };
        replace(&owner, &place, new);
    }
    // SAFETY: protected, and still inside.
    let kept = seen.is_none_or(|seen| unsafe { (*seen)[0].load(Ordering::Relaxed) } == 1);
    assert!(kept, "the one that was seen is as it was");
    drop((all, some));
    Ok(())
}

/// A guard for everything, taken by what `protect` calls, was undone by `protect`: it published the new era over it.
#[test]
fn a_guard_taken_while_another_protects_stands() {
    let list = list(2000, 2);
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let place = AtomicPtr::new(publish(&owner, 1).unwrap());
    let bounded = reader.enter_bounded();
    // The eras go on.
    for value in 2..20_000 {
        replace(&owner, &place, publish(&owner, value).unwrap());
    }
    let mut all = None;
    bounded.protect(|| {
        if all.is_none() {
            all = Some(reader.enter());
        }
        place.load(Ordering::Acquire)
    });
    // Whatever is retired from here on waits for him, so the slots come to an end.
    let ends = (20_000..100_000).any(|value| publish(&owner, value).map(|new| replace(&owner, &place, new)).is_none());
    assert!(
        ends,
        "retired slots were freed before a reader who may have seen them left"
    );
    drop((all, bounded));
}

#[test]
fn a_reader_who_sleeps_stops_what_is_retired_unless_he_is_bounded() {
    assert!(sleeper(false).is_err_and(|value| value > 1000), "he may see all of it");
    assert_eq!(sleeper(true), Ok(()), "he has seen one");
}

/// A bounded reader sleeps inside; 50 slots were allocated before, of which he has seen one. All are retired, in a row
/// or each among others that are younger; and many more are allocated and retired. How many slots can then not be had.
fn held_back_by_a_sleeper(apart: bool) -> usize {
    let list = list(8000, 2);
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let all: Vec<_> = std::iter::from_fn(|| owner.allocate().ok()).collect();
    // SAFETY: ours.
    all.iter().for_each(|slot| unsafe { owner.deallocate(slot.cast()) });
    let old: Vec<_> = (0..OLD).map(|value| publish(&owner, value).unwrap()).collect();
    let asleep = reader.enter_bounded();
    let seen = asleep.protect(|| old[7]);
    let retire = |slot: *mut Pair| {
        // SAFETY: ours, and nobody else comes upon it.
        unsafe { owner.retire(NonNull::new(slot).unwrap().cast()) };
    };
    let mut left = old.iter().copied();
    if apart {
        left.by_ref().for_each(retire);
        owner.flush();
    }
    for value in 0..100_000 {
        retire(publish(&owner, OLD + value).expect("he holds back only some"));
        if value % 1000 == 500 {
            left.next().into_iter().for_each(retire);
        }
    }
    owner.flush();
    // SAFETY: protected, and still inside.
    let value = unsafe { (*seen)[0].load(Ordering::Relaxed) };
    assert_eq!(value, 7, "the one that was seen is as it was");
    let had = std::iter::from_fn(|| owner.allocate().ok()).count();
    drop(asleep);
    let freed = std::iter::from_fn(|| owner.allocate().ok()).count();
    assert_eq!(had + freed, all.len(), "he has left");
    freed
}

const OLD: u64 = 50;

/// What a batch may have: who holds back one slot of it holds back all.
const BATCH: usize = 64;

#[test]
fn a_bounded_sleeper_holds_back_what_was_allocated_before() {
    let held = held_back_by_a_sleeper(true);
    // And what was allocated before the era went on: that is with each batch here.
    assert!((1..=OLD as usize + 2 * BATCH).contains(&held), "{held}");
}

#[test]
fn a_bounded_sleeper_holds_back_whole_batches() {
    let held = held_back_by_a_sleeper(false);
    assert!((1..=(OLD as usize + 2) * BATCH).contains(&held), "{held}");
}

/// Slots are memory as long as the list lives: no page goes back, whatever is retired, freed, or reset.
#[test]
fn no_page_goes_back_while_a_list_lives() {
    let blocks = Blocks::new(0);
    let config = ArenaConfig::new().slab(1 << 12).limit(1 << 18);
    let layout = Layout::new::<Pair>();
    let mut one = FreeList::with_config_in(layout, config, &blocks).unwrap();
    let mut list = ShardedFreeList::with_config_in(layout, 2, config, &blocks).unwrap();
    for _ in 0..3 {
        let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
        let slots: Vec<_> = std::iter::from_fn(|| owner.allocate().ok()).collect();
        let inside = reader.enter();
        for (index, slot) in slots.iter().enumerate() {
            // SAFETY: ours, each once.
            unsafe {
                match index % 3 {
                    0 => owner.deallocate(slot.cast()),
                    1 => list.deallocate(slot.cast()),
                    _ => owner.retire(slot.cast()),
                }
            }
        }
        drop(inside);
        drop((owner, reader));
        let singles: Vec<_> = std::iter::from_fn(|| one.allocate().ok()).collect();
        // SAFETY: ours, each once.
        singles.iter().for_each(|slot| unsafe { one.deallocate(slot.cast()) });
        let taken = blocks.count();
        assert!(slots.len() > 5000 && singles.len() > 5000 && taken > 8);
        list.reset();
        one.reset();
        assert_eq!((blocks.given(), blocks.count()), (0, taken), "a page went back");
        assert!(slots.iter().all(|slot| blocks.has(slot.addr().get(), slot.len())));
    }
    drop((list, one));
    assert!(blocks.is_empty() && blocks.given() > 8, "everything goes back");
}

#[test]
fn more_readers_than_records_share_them() {
    let list = list(64, 1);
    let owner = list.owner().unwrap();
    let slots: Vec<_> = std::iter::from_fn(|| owner.allocate().ok()).collect();
    let guards: Vec<_> = (0..1000).map(|_| list.enter()).collect();
    // SAFETY: nobody else knows of them.
    slots.iter().for_each(|slot| unsafe { owner.retire(slot.cast()) });
    assert!(owner.allocate().is_err());
    drop(guards);
    assert_eq!(std::iter::from_fn(|| owner.allocate().ok()).count(), slots.len());
    let began = Instant::now();
    drop((list.enter(), owner.enter()));
    assert!(began.elapsed() < Duration::from_secs(60));
}
