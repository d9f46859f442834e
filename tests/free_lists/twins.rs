//! Property tests: lists against naive twins, the controller against its promises.

use std::alloc::Layout;

use pageheap::arena::{ArenaConfig, ShardedFreeList};
use pageheap::internals::free_list::{Controller, MAX_BATCH};
use pageheap::source::System;
use pageheap::{Config, PageCount, PageHeap};
use proptest::prelude::*;

#[path = "../model/blocks.rs"]
pub mod blocks;
#[path = "../common/bytes.rs"]
mod bytes;
#[path = "../model/lists.rs"]
mod lists;

/// One step: which operation, and a number for it.
fn steps() -> impl Strategy<Value = Vec<(u8, usize)>> {
    prop::collection::vec((any::<u8>(), any::<usize>()), 0..400)
}

/// After the first block, every n-th one is refused; 0: none.
fn refusals() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), 2_usize..6]
}

fn layouts() -> impl Strategy<Value = Layout> {
    (1_usize..300, 0_u32..7).prop_map(|(size, align)| Layout::from_size_align(size, 1 << align).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_free_list_is_its_twin(
        layout in layouts(), slab in 0_usize..40_000, limit in 10_000_usize..200_000, refuse in refusals(),
        story in steps()
    ) {
        lists::free_list(layout, slab, limit, refuse, &story);
    }

    #[test]
    fn a_sharded_list_is_its_twin(
        layout in layouts(), limit in 10_000_usize..200_000, refuse in refusals(), story in steps()
    ) {
        lists::sharded(layout, limit, refuse, &story);
    }

    #[test]
    fn drivers_of_fuzz_targets_take_anything(input in prop::collection::vec(any::<u8>(), 0..200)) {
        lists::fuzz_free_list(&input);
        lists::fuzz_sharded(&input);
    }

    #[test]
    fn the_controller_is_bounded_whatever_happens(
        integral in any::<i32>(), steps in prop::collection::vec((any::<u64>(), any::<u64>()), 0..100)
    ) {
        let mut state = Controller::from_integral(integral);
        for (free, all) in steps {
            let (next, batch) = state.step(free, all);
            prop_assert!((1..=MAX_BATCH).contains(&batch));
            prop_assert!((-1000..=1000).contains(&next.integral()));
            state = next;
        }
    }

    #[test]
    fn the_controller_recovers(steps in prop::collection::vec(0_u64..=1000, 0..200), plenty in 400_u64..=1000) {
        let mut state = Controller::default();
        steps.into_iter().for_each(|free| state = state.step(free, 1000).0);
        // After a shortage of any length, ten steps of plenty are enough for full batches, and they stay full.
        (0..10).for_each(|_| state = state.step(plenty, 1000).0);
        for _ in 0..10 {
            let (next, batch) = state.step(plenty, 1000);
            prop_assert_eq!(batch, MAX_BATCH);
            state = next;
        }
        // Plenty of any length is forgotten as fast.
        let mut batch = MAX_BATCH;
        for _ in 0..10 {
            (state, batch) = state.step(50, 1000);
        }
        prop_assert_eq!(batch, 1);
    }

    #[test]
    fn less_is_free_so_batches_are_not_larger(
        integral in -1000_i32..=1000, more in 0_u64..=1000, less in 0_u64..=1000
    ) {
        let state = Controller::from_integral(integral);
        let (less, more) = (less.min(more), less.max(more));
        prop_assert!(state.step(less, 1000).1 <= state.step(more, 1000).1);
    }
}

#[test]
fn the_essays_example_of_the_controller() {
    let mut state = Controller::default();
    let mut batches = Vec::new();
    for _ in 0..7 {
        let batch;
        (state, batch) = state.step(100, 1000);
        batches.push(batch);
    }
    assert_eq!(batches, [33, 27, 21, 14, 8, 2, 1]);
    let (state, batch) = state.step(600, 1000);
    assert_eq!((batch, state.integral()), (64, 200));
}

/// The controller runs when batches move: how much shards may keep depends on how much is free.
#[test]
fn a_list_that_fills_keeps_less_in_its_shards() {
    let config = ArenaConfig::new().limit(1 << 20);
    let list = ShardedFreeList::with_config(Layout::new::<[u64; 8]>(), 2, config).unwrap();
    let owner = list.owner().unwrap();
    let mut slots: Vec<_> = std::iter::from_fn(|| owner.allocate().ok()).collect();
    assert_eq!(list.batch_limit(), 1, "all are allocated");
    let all = slots.len();
    let mut free_to = |left: usize| {
        // SAFETY: allocated here.
        slots
            .drain(left..)
            .for_each(|slot| unsafe { owner.deallocate(slot.cast()) });
        list.batch_limit()
    };
    assert!(free_to(all * 95 / 100) < MAX_BATCH as usize / 2, "a twentieth is free");
    assert_eq!(free_to(all / 2), MAX_BATCH as usize, "a half is free");
    assert_eq!(free_to(0), MAX_BATCH as usize, "all are free");
    let half: Vec<_> = (0..all / 2).map(|_| owner.allocate().unwrap()).collect();
    assert_eq!(list.batch_limit(), MAX_BATCH as usize, "a half is free");
    let more: Vec<_> = (0..all * 45 / 100).map(|_| owner.allocate().unwrap()).collect();
    assert!(list.batch_limit() < 8, "a twentieth is free");
    assert_eq!(half.len() + more.len(), all / 2 + all * 45 / 100);
}

/// Regression: after a reset only the first slab counted as free, and once it was used up a batch was one slot.
#[test]
fn a_list_that_was_reset_keeps_as_much_in_its_shards_as_a_new_one() {
    let config = ArenaConfig::new().limit(1 << 20).slab(1 << 12);
    let mut list = ShardedFreeList::with_config(Layout::new::<[u64; 8]>(), 2, config).unwrap();
    let all = std::iter::from_fn(|| list.allocate().ok()).count();
    for _ in 0..3 {
        list.reset();
        let owner = list.owner().unwrap();
        let batches = (0..all / 2).map(|_| owner.allocate().map(|_| list.batch_limit()).unwrap());
        assert_eq!(batches.min(), Some(MAX_BATCH as usize), "a half is free");
    }
}

/// Regression: what the limit left counted as free although the backing had no more, so batches kept their length.
#[test]
fn a_list_that_fills_its_backing_keeps_less_in_its_shards() {
    let heap = PageHeap::new(System, Config::new(1 << 30).limit(PageCount(128))).unwrap();
    for config in [ArenaConfig::new(), ArenaConfig::new().limit(1 << 26)] {
        let mut list = ShardedFreeList::with_config_in(Layout::new::<[u64; 8]>(), 2, config, &heap).unwrap();
        for _ in 0..2 {
            while list.allocate().is_ok() {}
            // The controller does not forget earlier plenty at once.
            assert!((0..4).all(|_| list.allocate().is_err()));
            assert_eq!(list.batch_limit(), 1, "all are allocated");
            list.reset();
        }
    }
}
