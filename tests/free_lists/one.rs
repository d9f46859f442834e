//! One thread: layouts, limits, misuse, boxes, batches, growth.

use std::alloc::Layout;
use std::cell::Cell;
use std::collections::HashSet;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use pageheap::arena::{Arena, ArenaConfig, FreeList, Reason, ShardedFreeList, SlotBox};
#[cfg(target_pointer_width = "64")]
use pageheap::arena::{Backing, Block};
use pageheap::source::System;
#[cfg(target_pointer_width = "64")]
use pageheap::source::{Purpose, Reservation, Source};
use pageheap::{Config, PageCount, PageHeap};

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

#[test]
fn slots_of_any_layout_are_apart_and_aligned() {
    for (size, align) in [
        (0, 1),
        (1, 1),
        (3, 1),
        (8, 8),
        (24, 16),
        (64, 64),
        (100, 4),
        (6144, 4),
        (5000, 4096),
        (10, 1 << 14),
    ] {
        let layout = layout(size, align);
        let list = FreeList::new(layout).unwrap();
        let mut starts: Vec<usize> = (0..500)
            .map(|byte| {
                let slot = list.allocate().unwrap();
                assert_eq!((slot.len(), slot.addr().get() % align), (size, 0), "{layout:?}");
                // SAFETY: allocated here, with this length.
                unsafe { slot.cast::<u8>().write_bytes(byte as u8, size) };
                slot.addr().get()
            })
            .collect();
        starts.sort_unstable();
        assert!(
            starts.windows(2).all(|pair| pair[1] - pair[0] >= size.max(1)),
            "{layout:?}"
        );
        let stats = list.stats();
        assert_eq!(stats.allocated, 500 * size.max(1).next_multiple_of(align), "{stats}");
        assert!(starts.iter().all(|&start| list.owns(start as *const u8)));
        // No slot starts inside another.
        assert!(
            (1..size).all(|inside| !list.owns((starts[250] + inside) as *const u8)),
            "{layout:?}"
        );
    }
}

#[test]
fn what_does_not_fit_is_an_error_that_says_so() {
    assert!(Layout::from_size_align(isize::MAX as usize, 1).is_ok_and(|layout| FreeList::new(layout).is_ok()));
    let list = FreeList::with_config(layout(64, 8), ArenaConfig::new().limit(100)).unwrap();
    let error = list.allocate().unwrap_err();
    assert_eq!(
        (error.reason(), error.asked(), error.left()),
        (Reason::NoSlots, 64, 100)
    );
    let list = FreeList::new(layout(16, 8)).unwrap();
    let long = list.boxed([0_u64; 3]).unwrap_err();
    assert_eq!(long.reason(), Reason::SlotTooSmall);
    let align = align_of::<u64>();
    assert_eq!(
        long.to_string(),
        format!("no room for 24 bytes aligned to {align}: a slot has 16 bytes")
    );
    assert_eq!(list.stats().allocated, 0);
    #[repr(align(32))]
    struct Wide;
    let wide = list.boxed(Wide).map(|_| ()).unwrap_err();
    assert_eq!((wide.reason(), wide.align()), (Reason::SlotTooSmall, 32));
    assert_eq!(
        wide.to_string(),
        "no room for 0 bytes aligned to 32: a slot has 16 bytes, but is aligned to less"
    );
}

/// The first slab is to be as long as can be: more than an address says. (Windows commits what is taken.)
#[test]
#[cfg(not(windows))]
fn a_slab_that_no_memory_could_hold_is_shortened() {
    let bytes = 1 << (usize::BITS / 2 + 1);
    let config = ArenaConfig::new().slab(usize::MAX).limit(bytes + (bytes >> 1));
    let list = FreeList::with_config(layout(bytes, 8), config).unwrap();
    assert!(list.allocate().is_ok(), "{}", list.stats());
    assert_eq!(list.allocate().unwrap_err().reason(), Reason::NoSlots);
}

#[test]
fn the_limit_is_kept_and_used_to_the_last_page() {
    let heap = PageHeap::new(System, Config::new(64 << 20)).unwrap();
    for (size, limit) in [
        (64, 1 << 20),
        (6144, 1 << 20),
        (100, 300_000),
        (8192, 8 << 20),
        (5, 20_000),
    ] {
        for prealloc in [0, limit & !8191] {
            let config = ArenaConfig::new().limit(limit).prealloc(prealloc).slab(1 << 15);
            let list = FreeList::with_config_in(layout(size, 1), config, &heap).unwrap();
            assert_eq!(list.stats().reserved, prealloc);
            assert!(list.remaining() == limit - prealloc && std::ptr::eq(*list.backing(), &heap));
            let mut count = 0;
            while list.allocate().is_ok() {
                count += 1;
            }
            let stats = list.stats();
            assert_eq!(list.remaining(), limit - stats.reserved);
            assert!(
                stats.reserved <= limit && stats.reserved + (32 << 10) + size > limit,
                "{size} {limit} {stats}"
            );
            // At most a slot and a page per slab are lost, and four bytes per slot.
            assert!(
                count * (size + 4) + stats.slabs * (size + 8192) >= stats.reserved,
                "{size} {count} {stats}"
            );
            assert_eq!(stats.peak, count * size);
        }
    }
    assert_eq!(heap.stats().in_use, PageCount(0), "lists give all back");
}

/// A heap whose limit rises by a page at a time, or by a slot's pages, gives a list short slabs. They used up its
/// places, and then it had no more slots, whatever the heap had.
macro_rules! outgrows_short_slabs {
    ($make:expr) => {
        for size in [6144_usize, 500_000] {
            let heap = PageHeap::new(System, Config::new(128 << 20).limit(PageCount(2))).unwrap();
            let list = $make(layout(size, 8), &heap).unwrap();
            let mut slots = Vec::new();
            let mut fill = |pages| {
                heap.set_limit(PageCount(pages));
                slots.extend(std::iter::from_fn(|| list.allocate().ok()));
                (slots.len(), list.stats().slabs)
            };
            let mut pages = 2;
            let (all, slabs) = loop {
                let before = fill(pages);
                pages += (size + 16).div_ceil(8192);
                if fill(pages) == before {
                    break before;
                }
            };
            assert!(slabs > 31, "{size}: {slabs}");
            // It waits for a slab as long as all of these.
            let error = list.allocate().unwrap_err();
            assert_eq!((error.reason(), error.left()), (Reason::NoPages, usize::MAX), "{error}");
            let (more, _) = fill(3 * pages);
            assert!(more >= 2 * all, "{size}: {more} after {all}");
            let (most, _) = fill(usize::MAX);
            assert!(most * size > 32 << 20, "{size}: {most} after {more}");
            // Each is found by its number, and by its address.
            let starts: HashSet<_> = slots.iter().map(|slot| slot.addr()).collect();
            assert_eq!(starts.len(), slots.len());
            for slot in slots {
                // SAFETY: allocated above, and freed once.
                unsafe { list.try_deallocate(slot.cast()).unwrap() };
            }
            assert_eq!(list.stats().allocated, 0);
        }
    };
}

#[test]
fn a_list_is_not_stuck_after_many_short_slabs() {
    outgrows_short_slabs!(FreeList::new_in);
}

#[test]
fn a_sharded_list_is_not_stuck_after_many_short_slabs() {
    outgrows_short_slabs!(|layout, heap| ShardedFreeList::new_in(layout, 1, heap));
}

#[test]
fn a_backing_that_is_full_is_told_from_a_limit() {
    let heap = PageHeap::new(System, Config::new(1 << 20).limit(PageCount(5))).unwrap();
    let list = FreeList::new_in(layout(1024, 8), &heap).unwrap();
    let held: Vec<_> = std::iter::from_fn(|| list.allocate().ok()).collect();
    assert!(held.len() >= 38, "{}", held.len());
    assert_eq!(list.allocate().unwrap_err().reason(), Reason::NoPages);
}

#[test]
fn a_list_that_cannot_be_made_keeps_nothing() {
    let heap: PageHeap<System> = PageHeap::new(System, Config::new(1 << 20).limit(PageCount(64))).unwrap();
    let config = ArenaConfig::new().prealloc(1 << 20);
    assert!(FreeList::with_config_in(layout(64, 8), config, &heap).is_err());
    // The tables have been taken by then.
    assert!(ShardedFreeList::with_config_in(layout(64, 8), 4, config, &heap).is_err());
    assert_eq!(heap.stats().in_use, PageCount(0));
}

#[test]
fn double_and_foreign_frees_are_errors() {
    let list = FreeList::new(layout(48, 16)).unwrap();
    let other = FreeList::new(layout(48, 16)).unwrap();
    let slot = list.allocate().unwrap().cast::<u8>();
    let foreign = other.allocate().unwrap().cast::<u8>();
    // SAFETY: our own slot is freed once; the other addresses must be refused.
    unsafe {
        for address in [foreign, slot.byte_add(16), slot.byte_add(1), NonNull::dangling()] {
            let error = list.try_deallocate(address).unwrap_err();
            assert!(error.is_foreign() && error.address() == address.addr().get(), "{error}");
        }
        // The next slot exists, but is not allocated.
        assert!(!list.try_deallocate(slot.byte_add(48)).unwrap_err().is_foreign());
        list.deallocate(slot);
        assert!(!list.try_deallocate(slot).unwrap_err().is_foreign());
        let mut batch = [Some(list.allocate().unwrap().cast()), None, Some(foreign), None];
        assert!(list.deallocate_batch(&mut batch).unwrap_err().is_foreign());
        assert_eq!(batch, [None, None, Some(foreign), None]);
        let mut twice = [Some(slot), None, Some(slot)];
        assert!(list.deallocate_batch(&mut twice).is_err());
        list.allocate().unwrap();
        let mut twice = [None, Some(slot), Some(slot)];
        assert!(!list.deallocate_batch(&mut twice).unwrap_err().is_foreign());
        assert_eq!(twice, [None, None, Some(slot)]);
    }
    assert_eq!(list.stats().allocated, 0);
}

/// What the memory's last user wrote must not make a slot look allocated that never was.
#[test]
fn a_slot_never_allocated_is_free_also_in_memory_that_was_used() {
    let heap = PageHeap::new(System, Config::new(2 << 20)).unwrap();
    let used = Arena::new_in(&heap);
    while let Ok(bytes) = used.alloc_uninit_slice::<u8>(4000) {
        bytes.fill(MaybeUninit::new(0xFF));
    }
    drop(used);
    let list = FreeList::new_in(layout(48, 16), &heap).unwrap();
    let sharded = ShardedFreeList::new_in(layout(48, 16), 1, &heap).unwrap();
    let firsts = [list.allocate().unwrap(), sharded.allocate().unwrap()];
    // SAFETY: far behind the slots in use, and in the same slab, as `is_foreign` says; it must be refused.
    let refused = unsafe {
        let [one, other] = firsts.map(|first| first.cast::<u8>().byte_add(48 * 1000));
        [list.try_deallocate(one), sharded.try_deallocate(other)]
    };
    assert!(refused.into_iter().all(|freed| !freed.unwrap_err().is_foreign()));
}

#[test]
fn the_slot_in_the_pocket_of_a_list_is_free() {
    let mut list = FreeList::new(layout(48, 16)).unwrap();
    let slots = [(); 3].map(|()| list.allocate().unwrap().cast::<u8>());
    let refused = |list: &FreeList, slot: NonNull<u8>| {
        // SAFETY: the slot is free, so it must be refused, alone or behind an empty entry.
        unsafe {
            assert!(!list.try_deallocate(slot).unwrap_err().is_foreign());
            let mut batch = [None, Some(slot)];
            assert!(!list.deallocate_batch(&mut batch).unwrap_err().is_foreign());
            assert_eq!(batch, [None, Some(slot)]);
        }
    };
    // The first is in the pocket, the others are on the stack.
    for (index, slot) in slots.into_iter().enumerate() {
        // SAFETY: ours, freed once.
        unsafe { list.deallocate(slot) };
        slots[..=index].iter().for_each(|&slot| refused(&list, slot));
        assert_eq!(list.stats().allocated, (2 - index) * 48);
    }
    // A batch takes the pocket's slot first, then the stack's, then slots never used.
    let mut batch = [None; 4];
    assert_eq!(list.allocate_batch(&mut batch), Ok(4));
    assert_eq!(batch[..3], [0, 2, 1].map(|index: usize| Some(slots[index])));
    assert_eq!((list.stats().allocated, list.stats().peak), (4 * 48, 4 * 48));
    // SAFETY: ours, freed once; no other thread uses the list.
    unsafe {
        list.deallocate_mut(slots[1]);
        refused(&list, slots[1]);
        list.deallocate_mut(slots[2]);
        refused(&list, slots[2]);
    }
    assert_eq!(
        [(); 2].map(|()| list.allocate_mut().unwrap().cast()),
        [slots[1], slots[2]]
    );
    // After a reset the pocket is empty.
    // SAFETY: ours, freed once.
    unsafe { list.deallocate(slots[2]) };
    list.reset();
    assert_eq!(list.stats().allocated, 0);
    assert_eq!([(); 3].map(|()| list.allocate().unwrap().cast()), slots);
}

/// Addresses without memory: a list does not touch what nobody has allocated.
#[derive(Debug)]
#[cfg(target_pointer_width = "64")]
struct Bare(Reservation);

// SAFETY: it would not be memory, if anything were allocated. Gives one block, once; nobody writes to it, so it counts
// as zero.
#[cfg(target_pointer_width = "64")]
unsafe impl Backing for Bare {
    fn page_bytes(&self) -> usize {
        1 << 16
    }

    fn take(&self, bytes: usize, _: usize) -> Option<Block> {
        assert!(bytes <= self.0.bytes);
        Some(Block {
            memory: NonNull::slice_from_raw_parts(self.0.base, bytes),
            zeroed: true,
        })
    }

    unsafe fn give(&self, _: NonNull<[u8]>) {}
}

/// The first slab had 2³⁰ slots at the most, and the rest of its memory was never used.
#[test]
#[cfg(target_pointer_width = "64")]
fn all_of_a_large_preallocation_is_for_slots() {
    const BYTES: usize = 32 << 30;
    let Some(reservation) = System.reserve(Purpose::Pages, BYTES, 1 << 16) else {
        println!("skipped: no addresses");
        return;
    };
    let base = reservation.base;
    let config = ArenaConfig::new().prealloc(BYTES).limit(BYTES);
    let list = FreeList::with_config_in(layout(8, 8), config, Bare(reservation)).unwrap();
    let last = BYTES / (8 + 4) - 1;
    let owns = |slot: usize| list.owns(base.as_ptr().wrapping_add(8 * slot));
    assert!(owns(0) && owns(1 << 30) && owns(last) && !owns(last + 1));
    assert_eq!(list.stats().reserved, BYTES);
    // More slots than there are numbers.
    let config = ArenaConfig::new().prealloc(2 * BYTES);
    let error = FreeList::with_config_in(layout(8, 8), config, Bare(reservation)).unwrap_err();
    let most = 4_026_531_839 * (8 + 4);
    assert_eq!(
        (error.reason(), error.asked(), error.left()),
        (Reason::TooLarge, 2 * BYTES, most)
    );
    drop(list);
    // SAFETY: reserved above, for pages, and nothing uses it.
    unsafe { System.unreserve(Purpose::Pages, reservation) };
}

/// What was too much is the preallocation, not a slot.
#[test]
fn a_preallocation_beyond_all_addresses_says_so() {
    let config = ArenaConfig::new().prealloc(usize::MAX);
    let said = format!(
        "no room for {} bytes aligned to 1: nothing can have more than {} bytes",
        usize::MAX,
        isize::MAX
    );
    assert_eq!(
        FreeList::with_config(layout(48, 16), config).unwrap_err().to_string(),
        said
    );
    assert_eq!(Arena::with_config(config).unwrap_err().to_string(), said);
}

/// A list without owners has no readers either: it works, and lends nothing.
#[test]
fn a_list_for_no_owners_is_used_by_itself() {
    let config = ArenaConfig::new().limit(1 << 20);
    let list = ShardedFreeList::with_config(layout(4096, 16), 0, config).unwrap();
    assert_eq!(list.owner().unwrap_err().reason(), Reason::NoShards);
    for _ in 0..1000 {
        let [freed, retired] = [(); 2].map(|()| list.allocate().unwrap().cast());
        // SAFETY: both are ours, and given back once.
        unsafe {
            list.deallocate(freed);
            list.retire(retired);
        }
    }
}

#[test]
fn a_sharded_list_finds_misuse_too() {
    let list = ShardedFreeList::new(layout(48, 16), 2).unwrap();
    let (owner, second) = (list.owner().unwrap(), list.owner().unwrap());
    let error = ShardedFreeList::new(layout(48, 16), 65_537).unwrap_err();
    assert_eq!(
        (error.reason(), error.asked(), error.left()),
        (Reason::NoShards, 65_537, 65_536)
    );
    assert_eq!(
        error.to_string(),
        "no room for 65537 shards: a list has 65536 at the most"
    );
    for owners in [usize::MAX, usize::MAX / 2, isize::MAX as usize] {
        let error = ShardedFreeList::new(layout(48, 16), owners).unwrap_err();
        assert_eq!((error.reason(), error.asked()), (Reason::NoShards, owners));
    }
    let error = list.owner().unwrap_err();
    assert_eq!((error.reason(), error.asked(), error.left()), (Reason::NoShards, 1, 0));
    assert_eq!(error.to_string(), "no room for 1 shard: the list has none to lend");
    let slot = owner.allocate().unwrap().cast::<u8>();
    // SAFETY: freed once, by one of them; otherwise it must be refused.
    unsafe {
        assert!(owner.try_deallocate(slot.byte_add(8)).unwrap_err().is_foreign());
        second.deallocate(slot);
        assert!(!owner.try_deallocate(slot).unwrap_err().is_foreign());
        assert!(!list.try_deallocate(slot).unwrap_err().is_foreign());
        let slot = list.allocate().unwrap().cast::<u8>();
        owner.retire(slot);
        assert!(
            !owner.try_deallocate(slot).unwrap_err().is_foreign(),
            "retired is not allocated"
        );
    }
    drop(second);
    assert!(list.owner().is_ok());
}

#[test]
fn batches_take_all_there_is_and_say_why_there_is_none() {
    let config = ArenaConfig::new().limit(1 << 16);
    let list = FreeList::with_config(layout(256, 1), config).unwrap();
    let sharded = ShardedFreeList::with_config(layout(256, 1), 1, config).unwrap();
    let (mut batch, mut other) = ([None; 1000], [None; 2]);
    let count = list.allocate_batch(&mut batch).unwrap();
    assert!((200..256).contains(&count), "{count}");
    let distinct: HashSet<_> = batch.iter().flatten().collect();
    assert_eq!(distinct.len(), count);
    assert_eq!(list.allocate_batch(&mut other), Err(list.allocate().unwrap_err()));
    assert_eq!((other, list.allocate_batch(&mut [])), ([None; 2], Ok(0)));
    // SAFETY: allocated here.
    unsafe { list.deallocate_batch(&mut batch) }.unwrap();
    assert_eq!(list.allocate_batch(&mut batch), Ok(count));
    let owner = sharded.owner().unwrap();
    let mut batch = [None; 1000];
    let count = owner.allocate_batch(&mut batch).unwrap();
    assert!((200..256).contains(&count), "{count}");
    let error = owner.allocate_batch(&mut other).unwrap_err();
    assert_eq!(error, owner.allocate().unwrap_err());
    assert_eq!((error.reason(), error.asked()), (Reason::NoSlots, 256));
    assert_eq!((other, owner.allocate_batch(&mut [])), ([None; 2], Ok(0)));
    // SAFETY: allocated here.
    unsafe { owner.deallocate_batch(&mut batch) }.unwrap();
    assert_eq!(batch, [None; 1000]);
    drop(owner);
    assert_eq!(std::iter::from_fn(|| sharded.allocate().ok()).count(), count);
}

/// Counts how often it is dropped.
pub(super) struct Counted<'a>(pub(super) &'a Cell<u32>, pub(super) u64);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

#[test]
fn boxes_drop_their_value_once_and_return_their_slot() {
    let drops = Cell::new(0);
    let list = FreeList::for_type::<Counted<'_>>();
    let boxed = list.boxed(Counted(&drops, 5)).unwrap();
    assert_eq!((boxed.1, list.stats().slabs), (5, 1));
    drop(boxed);
    assert_eq!(drops.get(), 1);
    let inner = SlotBox::into_inner(list.boxed(Counted(&drops, 6)).unwrap());
    assert_eq!((drops.get(), inner.1, list.stats().allocated), (1, 6, 0));
    drop(inner);
    let raw = SlotBox::into_raw(list.boxed(Counted(&drops, 7)).unwrap());
    assert_eq!(drops.get(), 2);
    // SAFETY: ours, dropped once.
    unsafe {
        raw.drop_in_place();
        list.deallocate(raw.cast());
    }
    assert_eq!((drops.get(), list.stats().allocated), (3, 0));
    let sharded = ShardedFreeList::new(list.layout(), 1).unwrap();
    let owner = sharded.owner().unwrap();
    drop((
        owner.boxed(Counted(&drops, 8)).unwrap(),
        sharded.boxed(Counted(&drops, 9)).unwrap(),
    ));
    assert_eq!((drops.get(), sharded.stats().allocated), (5, 0));
}

#[test]
fn a_destructor_that_panics_returns_the_slot() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("on purpose");
        }
    }
    let list = FreeList::for_type::<Panics>();
    let boxed = list.boxed(Panics).unwrap();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(boxed)));
    assert!(result.is_err());
    assert_eq!(list.stats().allocated, 0);
}

#[test]
fn a_list_that_is_reset_is_as_new() {
    let mut list = FreeList::with_config(layout(32, 8), ArenaConfig::new().limit(1 << 20).slab(1 << 12)).unwrap();
    let all = |list: &FreeList| std::iter::from_fn(|| list.allocate().ok()).collect::<Vec<_>>();
    let first = all(&list);
    let reserved = list.stats().reserved;
    list.reset();
    assert_eq!(list.stats().allocated, 0);
    // SAFETY: nobody holds it any more, so it must be refused.
    let refused = unsafe { list.try_deallocate(first[0].cast()) };
    assert!(!refused.unwrap_err().is_foreign());
    let second = all(&list);
    assert_eq!((first, reserved), (second, list.stats().reserved));
    list.reset();
    let slot = list.allocate_mut().unwrap();
    // SAFETY: just allocated.
    unsafe { list.deallocate_mut(slot.cast()) };
    assert_eq!(list.allocate_mut().unwrap(), slot);
}

#[test]
fn a_sharded_list_that_is_reset_is_as_new() {
    let config = ArenaConfig::new().limit(1 << 18).slab(1 << 12);
    let mut list = ShardedFreeList::with_config(layout(64, 8), 2, config).unwrap();
    let all = |list: &ShardedFreeList| {
        let owner = list.owner().expect("of two shards one is vacant");
        std::iter::from_fn(|| owner.allocate().ok()).collect::<Vec<_>>()
    };
    let first = all(&list);
    let before = list.stats();
    for _ in 0..3 {
        // Slots in a pocket, in batches, and retired under a reader; both owners are forgotten, one of them inside a
        // guard.
        let (one, other) = (list.owner().unwrap(), list.owner().unwrap());
        let guard = one.enter();
        guard.protect(|| first[0]);
        std::mem::forget(guard);
        for (index, slot) in first.iter().enumerate() {
            // SAFETY: ours, each freed once.
            unsafe {
                match index % 3 {
                    0 => one.deallocate(slot.cast()),
                    1 => other.deallocate(slot.cast()),
                    _ => other.retire(slot.cast()),
                }
            }
        }
        std::mem::forget((one, other));
        assert!(list.owner().is_err());
        list.reset();
        let stats = list.stats();
        assert_eq!(
            (stats.allocated, stats.reserved, stats.peak),
            (0, before.reserved, before.peak)
        );
        // SAFETY: nobody holds it any more, so it must be refused.
        let refused = unsafe { list.try_deallocate(first[0].cast()) };
        assert!(!refused.unwrap_err().is_foreign());
        assert_eq!(all(&list), first, "the lowest first, and all of them");
        assert_eq!(list.stats(), before);
    }
    let mut none = ShardedFreeList::new(layout(64, 8), 1).unwrap();
    none.reset();
    assert!(none.allocate().is_ok());
}

#[test]
fn the_pocket_of_an_owner_is_nobodys_secret() {
    let list = ShardedFreeList::with_config(layout(64, 8), 2, ArenaConfig::new().limit(1 << 16)).unwrap();
    let (owner, other) = (list.owner().unwrap(), list.owner().unwrap());
    let all: Vec<_> = std::iter::from_fn(|| owner.allocate().ok())
        .map(|slot| slot.cast::<u8>())
        .collect();
    // SAFETY: ours; freed once, or must be refused.
    unsafe {
        owner.deallocate(all[7]);
        assert!(!owner.try_deallocate(all[7]).unwrap_err().is_foreign(), "in the pocket");
        assert!(!list.try_deallocate(all[7]).unwrap_err().is_foreign());
        // The other owner takes the last slot out of the pocket; it is then freed through this owner.
        for _ in 0..3 {
            assert_eq!(other.allocate().unwrap().cast(), all[7]);
            assert!(owner.allocate().is_err());
            owner.deallocate(all[7]);
            assert!(owner.try_deallocate(all[7]).is_err());
            assert_eq!(owner.allocate().unwrap().cast(), all[7]);
            other.deallocate(all[7]);
            assert!(owner.try_deallocate(all[7]).is_err(), "remembered, and not his");
        }
        // A box in the same slot; then two frees in a row, after which one slot is in the pocket.
        let boxed = owner.boxed([1_u64; 8]).unwrap();
        assert_eq!((boxed.as_ptr().cast(), boxed[7]), (all[7].as_ptr().cast_const(), 1));
        drop(boxed);
        owner.deallocate(all[3]);
        owner.deallocate(all[5]);
        assert!([7, 3, 5].iter().all(|&index| owner.try_deallocate(all[index]).is_err()));
    }
    let mut three = [(); 3].map(|()| other.allocate().unwrap().cast::<u8>());
    three.sort_unstable();
    assert_eq!(three, [all[3], all[5], all[7]]);
    assert!(list.allocate().is_err());
}

#[test]
fn an_owner_takes_his_pocket_to_another_thread() {
    let list = ShardedFreeList::new(layout(64, 8), 1).unwrap();
    let owner = list.owner().unwrap();
    let slot = owner.boxed([5; 8]).map(SlotBox::into_raw).unwrap().addr();
    let slot = std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            let owner = owner;
            let same = owner.boxed([6_u64; 8]).unwrap();
            assert_ne!(same.as_ptr().addr(), slot.get());
            drop(same);
            owner.allocate().unwrap().addr()
        });
        thread.join().unwrap()
    });
    assert!(list.owns(slot.get() as *const u8));
}

#[test]
fn the_slots_of_a_forgotten_owner_can_be_had() {
    let config = ArenaConfig::new().limit(1 << 18);
    let list = ShardedFreeList::with_config(layout(64, 8), 2, config).unwrap();
    let all = std::iter::from_fn(|| list.allocate().ok()).collect::<Vec<_>>();
    let owner = list.owner().unwrap();
    // SAFETY: allocated here.
    all.iter().for_each(|slot| unsafe { owner.deallocate(slot.cast()) });
    std::mem::forget(owner);
    let second = list.owner().unwrap();
    assert_eq!(std::iter::from_fn(|| second.allocate().ok()).count(), all.len());
}
