//! Rounds between resets: what was taken for one does for the next.

use std::alloc::Layout;

use pageheap::arena::{Arena, ArenaConfig, ArenaError, Pool};
use pageheap::source::System;
use pageheap::{Config, PageHeap};
use proptest::collection::vec;
use proptest::prelude::*;

use super::common::addresses;
use super::stories::cases;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn heap() -> PageHeap<System> {
    PageHeap::new(System, Config::new(addresses(1 << 30))).expect("a heap")
}

/// Ten rounds of objects of these sizes, in an arena or a pool: none needs more than the first.
macro_rules! ten_rounds {
    ($arena:ident, $config:expr, $sizes:expr) => {{
        let (heap, config, sizes) = (heap(), $config, $sizes);
        let mut arena = $arena::with_config_in(config, &heap)?;
        let mut first = None;
        for round in 0..10 {
            for (index, &bytes) in sizes.iter().enumerate() {
                if let Err(error) = arena.alloc_uninit_slice::<u8>(bytes) {
                    panic!("round {round}, object {index} of {sizes:?}, {config:?}: {error}");
                }
            }
            let reserved = arena.stats().reserved;
            assert_eq!(*first.get_or_insert(reserved), reserved, "round {round} of {sizes:?}");
            arena.reset();
        }
        arena.shrink_to(0);
        assert_eq!(
            (arena.stats().reserved, arena.stats().committed, heap.stats().in_use.0),
            (0, 0, 0)
        );
    }};
}

/// The slab after a reset was the last, a short one. What had no room in it closed it, empty as it was, and until the
/// next reset nobody looked there: every second round was refused. In the second, what was small would lie in the short
/// slab.
#[test]
fn a_slab_in_which_nothing_lies_is_found_again() -> Result<(), ArenaError> {
    let config = ArenaConfig::new().limit(72 * KIB).slab(64 * KIB);
    ten_rounds!(Pool, config, [30 * KIB, 30 * KIB, 6 * KIB]);
    ten_rounds!(Pool, config, [KIB, 30 * KIB, 30 * KIB, 6 * KIB]);
    ten_rounds!(Arena, config, [30 * KIB, 30 * KIB, 6 * KIB]);

    let mut pool = Pool::with_config_in(config, heap())?;
    let short = 6 * KIB;
    for bytes in [short, 30 * KIB] {
        pool.alloc_uninit_slice::<u8>(bytes)?;
        pool.shrink_to(0);
        assert_eq!(pool.stats().reserved, 64 * KIB, "one slab, which is in use");
    }
    Ok(())
}

/// Blocks were looked for among the sixteen that had been used last, and the first that was large enough was taken:
/// what was small took what was large, and what was large was not found. Each round took more, and had more then than
/// it could look through.
#[test]
fn a_round_like_the_last_takes_nothing_new() -> Result<(), ArenaError> {
    let mut sizes = vec![10 * MIB];
    sizes.extend([100 * KIB; 16]);
    ten_rounds!(Arena, ArenaConfig::new(), &sizes);
    ten_rounds!(Arena, ArenaConfig::new().limit(12 * MIB), &sizes);
    ten_rounds!(Arena, ArenaConfig::new().limit(12 * MIB), [MIB, 10 * MIB]);
    ten_rounds!(Arena, ArenaConfig::new().limit(16 * MIB), [100 * KIB, 15 * MIB]);
    ten_rounds!(Pool, ArenaConfig::new().limit(13 * MIB), &sizes);
    // Sizes by chance, from 1 KiB to 2 MiB.
    let mut seed = 1_u64;
    let sizes: Vec<usize> = (0..100)
        .map(|_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let number = (seed >> 33) as usize;
            (KIB << (number % 12)) + number % 1000
        })
        .collect();
    ten_rounds!(Arena, ArenaConfig::new(), &sizes);
    ten_rounds!(Pool, ArenaConfig::new().slab(128 * KIB), &sizes);
    Ok(())
}

/// The same objects in another order every time.
#[test]
fn rounds_in_any_order_do_with_what_one_needs() -> Result<(), ArenaError> {
    for limit in [usize::MAX, 12 * MIB] {
        let heap = heap();
        let mut arena = Arena::with_config_in(ArenaConfig::new().limit(limit), &heap)?;
        for round in 0..34 {
            for index in 0..17 {
                let bytes = if (index + round) % 17 == 0 { 10 * MIB } else { 100 * KIB };
                arena.alloc_uninit_slice::<u8>(bytes)?;
            }
            assert!(arena.stats().reserved <= 12 * MIB, "round {round}: {}", arena.stats());
            arena.reset();
        }
    }
    Ok(())
}

/// All was free, in blocks that were too small one by one, and a round of other objects was refused.
#[test]
fn blocks_that_are_of_no_use_make_room_under_the_limit() -> Result<(), ArenaError> {
    let heap = heap();
    let mut arena = Arena::with_config_in(ArenaConfig::new().limit(12 * MIB), &heap)?;
    for round in 0..10 {
        let (objects, bytes) = [(11, 1000 * KIB), (1, 11 * MIB), (40, 250 * KIB), (2, 5 * MIB)][round % 4];
        for _ in 0..objects {
            arena.alloc_uninit_slice::<u8>(bytes)?;
        }
        arena.reset();
    }
    arena.alloc_uninit_slice::<u8>(7 * MIB)?;
    arena.reset();
    let before = arena.stats().reserved;
    arena
        .alloc_uninit_slice::<u8>(13 * MIB)
        .expect_err("more than the limit");
    assert_eq!(arena.stats().reserved, before, "nothing goes back for nothing");
    Ok(())
}

/// What was taken at once was one block, and the first object of more than 64 KiB, or aligned to more than a page, had
/// all of it or none: behind it there was no room for a word, and for the latter none in an arena that was empty.
#[test]
fn what_was_taken_at_once_is_for_many_large_objects() -> Result<(), ArenaError> {
    let config = ArenaConfig::new().limit(16 * MIB).prealloc(16 * MIB);
    for large in [100 * KIB, 5 * MIB] {
        let arena = Arena::with_config_in(config, heap())?;
        for _ in 0..15 * MIB / large {
            arena.alloc_uninit_slice::<u8>(large)?;
            arena.alloc(1_u64)?;
        }
        assert_eq!(arena.stats().slabs, 1);
    }
    for shift in 12..20 {
        let arena = Arena::with_config_in(config, heap())?;
        let layout = Layout::from_size_align(8, 1 << shift).expect("a layout");
        for _ in 0..10 {
            assert!(arena.allocate(layout)?.addr().get().is_multiple_of(1 << shift));
            arena.alloc(1_u64)?;
        }
    }
    ten_rounds!(Arena, config, [100 * KIB, 8, 5 * MIB, 10 * MIB]);

    let heap = heap();
    let mut arena = Arena::new_in(&heap);
    arena.alloc(1_u64)?;
    arena.reserve(64 * MIB)?;
    let reserved = arena.stats().reserved;
    for _ in 0..100 {
        arena.alloc_uninit_slice::<u8>(100 * KIB)?;
    }
    assert_eq!(arena.stats().reserved, reserved, "that is what it was reserved for");
    Ok(())
}

/// At the limit a large object takes a slab that was reserved. It went back at the reset, as blocks of its own do.
#[test]
fn a_pool_keeps_a_slab_that_one_object_had() -> Result<(), ArenaError> {
    let config = ArenaConfig::new().limit(256 * KIB).slab(64 * KIB).prealloc(256 * KIB);
    let mut pool = Pool::with_config_in(config, heap())?;
    for _ in 0..10 {
        for _ in 0..4 {
            pool.alloc_uninit_slice::<u8>(60 * KIB)?;
        }
        assert_eq!(pool.stats().reserved, 256 * KIB);
        pool.reset();
        assert_eq!(pool.stats().reserved, 256 * KIB);
    }
    Ok(())
}

/// An object of a byte to two megabytes, seldom aligned to much.
fn layouts() -> impl Strategy<Value = Layout> {
    let size = (0_u32..21, 0_usize..1 << 20).prop_map(|(shift, more)| (1 << shift) + (more & ((1 << shift) - 1)));
    let align = prop_oneof![9 => Just(8_usize), 1 => (0_u32..18).prop_map(|shift| 1 << shift)];
    (size, align).prop_map(|(size, align)| Layout::from_size_align(size, align).expect("small"))
}

fn configs() -> impl Strategy<Value = ArenaConfig> {
    let slab = prop_oneof![Just(None), (12_u32..20).prop_map(|shift| Some(1_usize << shift))];
    let prealloc = prop_oneof![Just(0), 1_usize..4 << 20];
    (slab, prealloc).prop_map(|(slab, prealloc)| {
        let config = ArenaConfig::new().prealloc(prealloc);
        slab.map_or(config, |slab| config.slab(slab))
    })
}

/// As many rounds of these objects as asked, in `$order`: what is reserved after each.
macro_rules! rounds {
    ($arena:ident, $config:expr, $rounds:expr, $order:expr) => {{
        let heap = heap();
        let mut arena = $arena::with_config_in($config, &heap)?;
        let mut reserved = Vec::new();
        for round in 0..$rounds {
            for layout in $order(round) {
                arena.allocate(layout)?;
            }
            reserved.push(arena.stats().reserved);
            arena.reset();
        }
        Ok::<_, ArenaError>(reserved)
    }};
}

/// What the first round reserved is the limit of the others.
macro_rules! equal_rounds {
    ($arena:ident, $config:expr, $layouts:expr) => {{
        let config = $config;
        let order = |_| $layouts.iter().copied();
        let first = rounds!($arena, config, 1, order)?[0];
        prop_assert_eq!(
            rounds!($arena, config.limit(first), 5, order),
            Ok(vec![first; 5]),
            "{:?}",
            config
        );
    }};
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn whatever_a_round_needed_does_for_its_like(config in configs(), layouts in vec(layouts(), 1..60)) {
        equal_rounds!(Arena, config, layouts);
        equal_rounds!(Pool, config, layouts);
    }

    /// In another order each time, without a limit: what is kept stays within bounds.
    #[test]
    fn rounds_in_another_order_need_a_few_times_as_much(
        config in configs(),
        orders in vec(layouts(), 1..60).prop_flat_map(|layouts| vec(Just(layouts).prop_shuffle(), 12)),
    ) {
        let order = |round: usize| orders[round].iter().copied();
        let reserved = rounds!(Arena, config, 12, order)?;
        let bytes: usize = orders[0].iter().map(|layout| layout.size() + layout.align()).sum();
        let most = reserved.iter().max();
        prop_assert!(most <= Some(&(3 * bytes + (12 << 20))), "{:?}: {:?}", config, reserved);
    }
}

/// Each round has one object, a page longer than that of the last: all of them were kept.
#[test]
fn blocks_that_no_object_wanted_go_back() -> Result<(), ArenaError> {
    let mut arena = Arena::new_in(heap());
    for round in 0..200 {
        let bytes = 100 * KIB + round * 8 * KIB;
        arena.alloc_uninit_slice::<u8>(bytes)?;
        arena.reset();
        assert!(arena.stats().reserved <= 3 * bytes, "round {round}: {}", arena.stats());
    }
    Ok(())
}
