//! Readers and retirement, on several threads.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::time::Duration;

use pageheap::arena::{ArenaConfig, FreeList, Owner, ShardedFreeList};

use super::twins::blocks::Blocks;

/// A shared slot: two words that are equal for as long as any thread may read them.
type Pair = [AtomicU64; 2];

fn list(slots: usize, owners: usize) -> ShardedFreeList {
    let layout = Layout::new::<Pair>();
    let config = ArenaConfig::new().limit(slots * 32 + owners * 400 + (64 << 10));
    ShardedFreeList::with_config(layout, owners, config).unwrap()
}

/// A slot with `value` in both words.
fn publish(owner: &Owner<'_>, value: u64) -> Option<*mut Pair> {
    let slot = owner.allocate().ok()?.cast::<Pair>();
    // SAFETY: allocated here. A late reader would read through atomics, and its check would fail.
    let pair = unsafe { slot.as_ref() };
    pair.iter().for_each(|word| word.store(value, Ordering::Relaxed));
    Some(slot.as_ptr())
}

/// Makes a slot unreachable, and retires it.
fn replace(owner: &Owner<'_>, place: &AtomicPtr<Pair>, new: *mut Pair) {
    if let Some(old) = NonNull::new(place.swap(new, Ordering::AcqRel)) {
        // SAFETY: unreachable for new readers, and this thread alone gives it back.
        unsafe { owner.retire(old.cast()) };
    }
}

/// The first word of a slot.
fn value_of(pair: *const Pair) -> u64 {
    // SAFETY: a slot stays memory, and a pair of atomics, as long as the list lives.
    let pair = unsafe { &*pair };
    pair[0].load(Ordering::Relaxed)
}

/// Reads both words, with a pause between.
fn check(pair: *const Pair, pause: u32) {
    if pair.is_null() {
        return;
    }
    // SAFETY: a slot found inside a guard; its memory is a pair as long as the list lives.
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

#[test]
fn readers_see_whole_values() {
    readers_see_whole_values_of(&list(4096, 8), 4096);
}

/// In batches of one slot, and of five.
#[test]
fn readers_see_whole_values_in_long_slots() {
    for (bytes, batch) in [(600_000, 1), (100_000, 5)] {
        let layout = Layout::from_size_align(bytes, 8).unwrap();
        let config = ArenaConfig::new().slab(64 * bytes).limit(65 * bytes);
        let list = ShardedFreeList::with_config(layout, 8, config).unwrap();
        assert_eq!(list.batch_limit(), batch);
        readers_see_whole_values_of(&list, 64);
    }
}

/// Readers that look once or several times inside a guard, also through nested guards; writers that publish, replace
/// and retire.
fn readers_see_whole_values_of(list: &ShardedFreeList, slots: usize) {
    let places: [AtomicPtr<Pair>; 16] = std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut()));
    let (end, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let (places, end) = (&places, &end);
            scope.spawn(move || {
                let owner = list.owner().unwrap();
                let mut value = thread;
                while !end.load(Ordering::Relaxed) {
                    value = value.wrapping_mul(0x5_DEEC_E66D).wrapping_add(11 + thread);
                    let Some(new) = publish(&owner, value) else {
                        std::thread::yield_now();
                        continue;
                    };
                    replace(&owner, &places[value as usize >> 7 & 15], new);
                }
            });
        }
        for kind in 0..3 {
            let (places, end, reads) = (&places, &end, &reads);
            scope.spawn(move || {
                let owner = list.owner().unwrap();
                for round in 0_u32.. {
                    let place = &places[round as usize & 15];
                    let guard = owner.enter();
                    check(guard.protect(|| place.load(Ordering::Acquire)), round & 127);
                    if kind > 0 {
                        let within = owner.enter();
                        check(within.protect(|| places[7].load(Ordering::Acquire)), 3);
                        // The end of one guard does not end the reader.
                        drop(if kind == 1 { within } else { guard });
                        // What a dropped guard protected stays while another guard is held.
                        let seen = owner.enter().protect(|| place.load(Ordering::Acquire));
                        check(seen, round & 31);
                    }
                    reads.fetch_add(1, Ordering::Relaxed);
                    if end.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
        }
        // Half a second; longer if the machine is so busy that hardly anything was read.
        let is_enough = || reads.load(Ordering::Relaxed) > 100;
        let long = (0..600).find(|&tenths| {
            std::thread::sleep(Duration::from_millis(100));
            tenths >= 4 && is_enough()
        });
        end.store(true, Ordering::Relaxed);
        assert!(long.is_some(), "{reads:?} reads in a minute");
    });
    let owner = list.owner().unwrap();
    places
        .iter()
        .for_each(|place| replace(&owner, place, std::ptr::null_mut()));
    owner.flush();
    assert_eq!(list.stats().allocated, 0);
    let all = std::iter::from_fn(|| owner.allocate().ok()).count();
    assert!(all >= slots, "{all} slots are left");
}

#[test]
fn a_retired_slot_waits_for_who_was_inside_and_not_for_who_came_later() {
    let list = list(1, 2);
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let slots: Vec<_> = std::iter::from_fn(|| owner.allocate().ok()).collect();
    let inside = reader.enter();
    inside.protect(|| slots[0]);
    // SAFETY: no other thread knows of them.
    slots.iter().for_each(|slot| unsafe { owner.retire(slot.cast()) });
    owner.flush();
    assert!(owner.allocate().is_err(), "all are waiting");
    let later = owner.enter();
    later.protect(|| ());
    drop(inside);
    assert_eq!(std::iter::from_fn(|| owner.allocate().ok()).count(), slots.len());
    drop(later);
}

/// A slot waits in its shard for others. Whoever enters before they are passed on is waited for, as if it might have
/// found the slot.
#[test]
fn who_enters_before_a_batch_is_passed_on_holds_it_back() {
    for flush in [false, true] {
        let list = list(1, 2);
        let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
        let slot = owner.allocate().unwrap();
        // SAFETY: no other thread knows of it.
        unsafe { owner.retire(slot.cast()) };
        if flush {
            owner.flush();
        }
        let inside = reader.enter();
        inside.protect(|| ());
        let had: Vec<_> = std::iter::from_fn(|| owner.allocate().ok()).collect();
        assert_eq!(had.contains(&slot), flush);
        drop(inside);
        assert_eq!(owner.allocate().ok(), Some(slot).filter(|_| !flush));
    }
}

#[test]
fn guards_within_guards_are_inside_until_the_last_is_dropped() {
    let list = list(1, 2);
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let slots: Vec<_> = std::iter::from_fn(|| owner.allocate().ok()).collect();
    let outer = reader.enter();
    outer.protect(|| slots[0]);
    let inner = reader.enter();
    drop(outer);
    // SAFETY: no other thread knows of them.
    slots.iter().for_each(|slot| unsafe { owner.retire(slot.cast()) });
    assert!(owner.allocate().is_err(), "all are waiting");
    drop(inner);
    assert!(owner.allocate().is_ok());
}

/// A reader that left at a late era and enters again has looked at nothing yet: it does not hold back slots younger
/// than what it saw. What it looks at from then on stays.
#[test]
fn who_enters_again_begins_where_he_was() {
    let list = list(2000, 2);
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let place = AtomicPtr::new(publish(&owner, 1).unwrap());
    let go_on = |values: std::ops::Range<u64>| {
        for value in values {
            replace(&owner, &place, publish(&owner, value).expect("nobody holds it back"));
        }
    };
    reader.enter().protect(|| place.load(Ordering::Acquire));
    let again = reader.enter();
    go_on(2..50_000);
    let seen = again.protect(|| place.load(Ordering::Acquire));
    go_on(50_000..100_000);
    assert_eq!(value_of(seen), 49_999);
}

/// The closure of `protect` may call `protect` and so publish a later era: too late for what it has read before.
#[test]
fn what_is_protected_while_another_protects_is_read_again() {
    let list = list(2000, 2);
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let places = [1, 2].map(|value| AtomicPtr::new(publish(&owner, value).unwrap()));
    let go_on = |values: std::ops::Range<u64>| {
        values.for_each(|value| replace(&owner, &places[0], publish(&owner, value).expect("the others go on")));
    };
    let guard = reader.enter();
    guard.protect(|| ());
    // The slot there is younger than the era that the reader has published, and is retired before it publishes a later
    // one.
    go_on(10..5000);
    let (mut inner, mut rounds) = (std::ptr::null_mut(), 0);
    let outer = guard.protect(|| {
        rounds += 1;
        let found = places[0].load(Ordering::Acquire);
        if rounds == 1 {
            go_on(5000..10_000);
            inner = guard.protect(|| places[1].load(Ordering::Acquire));
        }
        found
    });
    replace(&owner, &places[1], std::ptr::null_mut());
    go_on(10_000..15_000);
    assert_eq!(
        [inner, outer].map(|pair| value_of(pair)),
        [2, 9999],
        "after {rounds} rounds"
    );
}

#[test]
fn a_reader_who_sleeps_does_not_stop_what_is_retired() {
    let list = list(2000, 2);
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let place = AtomicPtr::new(publish(&owner, 1).unwrap());
    let asleep = reader.enter();
    let seen = asleep.protect(|| place.load(Ordering::Acquire));
    for value in 2..100_000 {
        replace(&owner, &place, publish(&owner, value).expect("the others go on"));
    }
    assert_eq!(value_of(seen), 1, "what was seen is as it was");
}

/// How long an era is depends on the slots that exist. Of those there could be, a 64th is more than any program has.
#[test]
fn a_sleeper_holds_back_few_slots_of_a_list_without_a_limit() {
    let list = ShardedFreeList::new(Layout::new::<Pair>(), 2).unwrap();
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let place = AtomicPtr::new(publish(&owner, 1).unwrap());
    let asleep = reader.enter();
    let seen = asleep.protect(|| place.load(Ordering::Acquire));
    for value in 2..100_000 {
        replace(&owner, &place, publish(&owner, value).expect("there is no limit"));
    }
    assert_eq!(value_of(seen), 1, "what was seen is as it was");
    // Two batches of an era, two in the shard, one that is retired, and the one that he has seen.
    let used = list.stats().committed / size_of::<Pair>();
    assert!(used <= 10 * BATCH, "{used} slots were used for one");
}

/// Eras advance with allocations, not only with retirements: nothing was allocated before the reader fell asleep.
#[test]
fn a_list_is_filled_and_goes_round_beside_a_sleeper() {
    let list = list(100_000, 2);
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let asleep = reader.enter();
    asleep.protect(|| ());
    let all = list.stats().limit / 32;
    let places: Vec<_> = (0..all * 6 / 10)
        .map(|value| AtomicPtr::new(publish(&owner, value as u64).expect("half is left")))
        .collect();
    for value in 0..5 * all {
        let new = publish(&owner, value as u64).expect("a reader who has seen nothing");
        replace(&owner, &places[value % places.len()], new);
    }
    drop(asleep);
}

/// A reader sleeps inside a guard. 50 slots were allocated before, and it has seen one of them. All are retired, in a
/// row or each among younger ones; many more are allocated and retired. Returns how many slots are held back.
fn held_back_by_a_sleeper(apart: bool) -> usize {
    let list = list(8000, 2);
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let all: Vec<_> = std::iter::from_fn(|| owner.allocate().ok()).collect();
    // SAFETY: allocated here.
    all.iter().for_each(|slot| unsafe { owner.deallocate(slot.cast()) });
    let old: Vec<_> = (0..OLD).map(|value| publish(&owner, value).unwrap()).collect();
    let asleep = reader.enter();
    let seen = asleep.protect(|| old[7]);
    let retire = |slot: *mut Pair| {
        // SAFETY: ours, and unreachable for other threads.
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
    assert_eq!(value_of(seen), 7, "the one that was seen is as it was");
    let had = std::iter::from_fn(|| owner.allocate().ok()).count();
    drop(asleep);
    let freed = std::iter::from_fn(|| owner.allocate().ok()).count();
    assert_eq!(had + freed, all.len(), "he has left");
    freed
}

const OLD: u64 = 50;

/// The size of a batch: a reader that holds back one of its slots holds back all.
const BATCH: usize = 64;

#[test]
fn a_sleeper_holds_back_what_was_allocated_before() {
    let held = held_back_by_a_sleeper(true);
    // Plus the slots allocated before the era advanced; here it advances with each batch.
    assert!((1..=OLD as usize + 2 * BATCH).contains(&held), "{held}");
}

#[test]
fn a_sleeper_holds_back_whole_batches() {
    let held = held_back_by_a_sleeper(false);
    assert!((1..=(OLD as usize + 2) * BATCH).contains(&held), "{held}");
}

/// Slots stay memory as long as the list lives: no page goes back, whatever is retired, freed or reset.
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
        inside.protect(|| slots[0]);
        for (index, slot) in slots.iter().enumerate() {
            // SAFETY: ours, each freed once.
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
        // SAFETY: ours, each freed once.
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

/// A forgotten guard stays inside, and its shard with it: the next owner does not get that record.
#[test]
fn a_forgotten_guard_keeps_its_shard() {
    let list = list(64, 2);
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let guard = reader.enter();
    let slot = owner.allocate().unwrap().cast::<u8>();
    let seen = guard.protect(|| slot);
    std::mem::forget(guard);
    drop(reader);
    assert!(list.owner().is_err(), "somebody is inside");
    // SAFETY: ours, and unreachable for other threads.
    unsafe { owner.retire(seen) };
    owner.flush();
    let rest: Vec<_> = std::iter::from_fn(|| owner.allocate().ok()).collect();
    assert!(
        rest.len() >= 63 && rest.iter().all(|slot| slot.cast() != seen),
        "a reader may see it"
    );
}

/// A reader that was forgotten inside is gone after a reset, and so is how far any reader had looked: one that has not
/// looked since holds back nothing.
#[test]
fn a_reset_forgets_who_was_inside_and_how_far_they_had_looked() {
    let mut list = list(64, 2);
    let all = |owner: &Owner<'_>| -> Vec<_> { std::iter::from_fn(|| owner.allocate().ok()).collect() };
    let retire_all = |owner: &Owner<'_>| {
        let slots = all(owner);
        // SAFETY: no other thread knows of them.
        slots.iter().for_each(|slot| unsafe { owner.retire(slot.cast()) });
        slots.len()
    };
    for enters in [false, true] {
        let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
        let forgotten = reader.enter();
        assert!(!all(&owner).is_empty());
        forgotten.protect(|| ());
        std::mem::forget(forgotten);
        drop((owner, reader));
        list.reset();
        let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
        let inside = enters.then(|| reader.enter());
        let retired = retire_all(&owner);
        assert_eq!(
            (retired >= 64, all(&owner).len()),
            (true, retired),
            "somebody enters: {enters}"
        );
        drop(inside);
        drop((owner, reader));
        list.reset();
    }
}

/// A batch that Hyaline refuses half way, because no spare node is left, gives back those it got: they are not slots.
#[test]
fn a_batch_that_is_refused_keeps_no_spare_nodes() {
    let list = list(2000, 3);
    let owners = [(); 3].map(|()| list.owner().unwrap());
    let all = || -> Vec<_> { std::iter::from_fn(|| owners[0].allocate().ok()).collect() };
    let slots = all();
    // SAFETY: ours, freed once.
    slots[3..]
        .iter()
        .for_each(|slot| unsafe { list.deallocate(slot.cast()) });
    let mut inside: Vec<_> = owners.iter().map(Owner::enter).collect();
    inside.iter().for_each(|guard| guard.protect(|| ()));
    // Six spare nodes: three for the first slot's readers, two for the second's, and one of two for the third's.
    for (slot, readers) in slots.iter().zip([3, 2, 2]) {
        inside.truncate(readers);
        // SAFETY: no other thread knows of it.
        unsafe { owners[0].retire(slot.cast()) };
        owners[0].flush();
    }
    assert_eq!(list.census(|_| ()).retired, 1, "the third stays, though it was flushed");
    drop(inside);
    owners[0].flush();
    let mut again = all();
    assert!(again.iter().all(|slot| list.owns(slot.cast().as_ptr())));
    let mut slots = slots;
    slots.sort();
    again.sort();
    assert_eq!(again, slots);
}

/// A slot that is retired while a thread gathers, and that Hyaline refuses, joins older ones that wait in the shard.
/// The batch is then as old as the oldest, which a sleeper may still read.
#[test]
fn a_batch_kept_beside_older_slots_is_as_old_as_they_are() {
    for _ in 0..20 {
        let list = list(100, 20);
        let owner = list.owner().unwrap();
        let (sleeper, readers) = (list.owner().unwrap(), [(); 16].map(|()| list.owner().unwrap()));
        let take = || owner.allocate().map(|slot| slot.cast::<u8>());
        // SAFETY: no other thread knows of it.
        let retire = |slot| unsafe { owner.retire(slot) };
        let slots: Vec<_> = std::iter::from_fn(|| take().ok()).collect();
        let asleep = sleeper.enter();
        let old = asleep.protect(|| slots[0]);
        // SAFETY: ours, freed once; and a gathering ends the era.
        let young = unsafe {
            owner.deallocate(slots[1]);
            let young = take().unwrap();
            assert!(take().is_err());
            owner.deallocate(young);
            take().unwrap()
        };
        let inside: Vec<_> = readers.iter().map(Owner::enter).collect();
        inside.iter().for_each(|guard| guard.protect(|| ()));
        // These use up the spare nodes.
        slots[2..5].iter().for_each(|&slot| retire(slot));
        retire(old);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert!(list.allocate().is_err(), "all are in use, or wait");
                }
            });
            let before = list.gatherings();
            while list.gatherings() < before + 3 {
                std::thread::yield_now();
            }
            retire(young);
            stop.store(true, Ordering::Relaxed);
        });
        drop(inside);
        owner.flush();
        assert!(
            std::iter::from_fn(|| take().ok()).all(|slot| slot != old),
            "a sleeper may read it"
        );
        drop(asleep);
    }
}

/// Regression: a batch was 64 slots, however long: 128 MiB were touched for two values.
#[test]
fn replacing_a_long_value_takes_few_slots() {
    for (owned, bytes, most) in [(true, 1 << 20, 16), (false, 1 << 20, 16), (true, 100_000, 32)] {
        let mut list = ShardedFreeList::new(Layout::from_size_align(bytes, 8).unwrap(), 1).unwrap();
        for round in ["as new", "after a reset"] {
            let owner = list.owner().unwrap();
            let allocate = || if owned { owner.allocate() } else { list.allocate() };
            let mut seen = std::collections::BTreeSet::new();
            let mut current = allocate().unwrap().cast::<u8>();
            for _ in 0..1000 {
                let old = std::mem::replace(&mut current, allocate().unwrap().cast());
                seen.insert(old);
                // SAFETY: allocated here, and nobody else knows it.
                unsafe { if owned { owner.retire(old) } else { list.retire(old) } };
            }
            assert!(seen.len() <= most, "{} slots of {bytes} bytes, {round}", seen.len());
            drop(owner);
            list.reset();
        }
    }
}

/// Regression: where a batch is a slot, each slot had an era of its own.
#[test]
fn eras_of_long_slots_are_as_few_as_those_of_others() {
    let config = ArenaConfig::new().limit(80 << 20);
    let list = ShardedFreeList::with_config(Layout::from_size_align(300_000, 8).unwrap(), 2, config).unwrap();
    let (owner, reader) = (list.owner().unwrap(), list.owner().unwrap());
    let all: Vec<_> = std::iter::from_fn(|| owner.allocate().ok()).collect();
    // SAFETY: allocated here, each freed once.
    all.iter().for_each(|slot| unsafe { owner.deallocate(slot.cast()) });
    let inside = reader.enter();
    // A reader looks again where the era has advanced since it last looked.
    let mut looks = 0;
    for _ in &all {
        owner.allocate().unwrap();
        inside.protect(|| looks += 1);
    }
    let eras = looks - all.len();
    assert!((32..=96).contains(&eras), "{eras} eras of {} slots", all.len());
}

/// Batches of long slots have fewer slots than there are readers. So spare nodes are used up, and what is refused is
/// offered again when it has doubled. Nothing becomes free under a reader, younger slots go round, and all come back.
#[test]
fn batches_of_long_slots_wait_for_many_readers() {
    const READERS: usize = 8;
    const SLOTS: usize = 128;
    for (bytes, most) in [(600_000, 1), (100_000, 5)] {
        let layout = Layout::from_size_align(bytes, 8).unwrap();
        let config = ArenaConfig::new().slab(SLOTS * bytes).limit((SLOTS + 1) * bytes);
        let list = ShardedFreeList::with_config(layout, READERS + 1, config).unwrap();
        assert_eq!(list.batch_limit(), most);
        let owner = list.owner().unwrap();
        let readers: Vec<_> = (0..READERS).map(|_| list.owner().unwrap()).collect();
        let rest = || std::iter::from_fn(|| owner.allocate().ok()).map(|slot| slot.as_ptr().cast::<Pair>());
        let mut all = Vec::from_iter(rest());
        let retire = |slot: *mut Pair| {
            // SAFETY: ours, and unreachable for other threads.
            unsafe { owner.retire(NonNull::new(slot).unwrap().cast()) };
            list.census(|_| ()).retired as usize
        };
        all.iter().copied().map(retire).for_each(drop);
        let old: Vec<_> = (0..SLOTS as u64 / 2)
            .map(|value| publish(&owner, value).unwrap())
            .collect();
        let mut inside: Vec<_> = readers.iter().map(Owner::enter).collect();
        inside.iter().for_each(|guard| guard.protect(|| ()));
        let waiting: Vec<_> = old.iter().map(|&slot| retire(slot)).collect();
        // What waited before a batch was accepted, and the slot that made it large enough.
        let accepted = waiting.windows(2).filter(|pair| pair[1] == 0).map(|pair| pair[0] + 1);
        assert!(accepted.max() >= Some(READERS), "{waiting:?}");
        let young = (0..10 * SLOTS).map_while(|_| publish(&owner, !0)).map(retire);
        assert_eq!(young.count(), 10 * SLOTS, "nobody has seen these");
        let mut again = Vec::new();
        while inside.pop().is_some() {
            again.extend(rest());
            assert_eq!(old.iter().any(|slot| again.contains(slot)), inside.is_empty());
            if !inside.is_empty() {
                assert!((0..).zip(&old).all(|(value, &slot)| value_of(slot) == value));
            }
        }
        all.sort();
        again.sort();
        assert_eq!(again, all);
    }
}

/// What threads without an owner have retired waits in the lanes, until they are flushed.
#[test]
fn a_flush_passes_on_what_was_retired_without_an_owner() {
    let list = list(64, 1);
    let retire = |count| {
        for slot in Vec::from_iter((0..count).map(|_| list.allocate().unwrap())) {
            // SAFETY: allocated here, and nobody else knows it.
            unsafe { list.retire(slot.cast()) };
        }
    };
    let waiting = || list.census(|_| ()).retired;
    retire(3);
    assert_eq!(waiting(), 3);
    list.flush();
    let all = list.census(|_| ());
    assert_eq!((all.retired, all.sharded, all.live), (0, 0, 0));
    // The owner's shard is its own to flush.
    let owner = list.owner().unwrap();
    // SAFETY: as above.
    unsafe { owner.retire(owner.allocate().unwrap().cast()) };
    list.flush();
    assert_eq!(waiting(), 1);
    owner.flush();
    assert_eq!(waiting(), 0);
}
