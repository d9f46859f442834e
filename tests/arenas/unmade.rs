//! An arena is unchanged after it refuses a request, or after a value's constructor panics, if what was made had not to
//! be cut from what a `Local` had left. A slice collected from an iterator of unknown length takes what it is long, and
//! asks for little more.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pageheap::arena::{Arena, ArenaConfig, ArenaError, Pool, Reason};
use pageheap::source::System;
use pageheap::{Config, PageCount, PageHeap};

use super::common::addresses;

const MIB: usize = 1 << 20;

/// Exactly one slab.
const ONE: ArenaConfig = ArenaConfig::new().limit(MIB).slab(MIB);

fn heap() -> PageHeap<System> {
    PageHeap::new(System, Config::new(addresses(1 << 30))).expect("a heap")
}

/// A text without end.
struct Endless;

impl fmt::Display for Endless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        loop {
            f.write_str("as long as there is room")?;
        }
    }
}

/// Four slices that cannot be made; `$check` runs after each.
macro_rules! in_vain {
    ($hand:expr, $check:expr) => {{
        let (hand, check) = ($hand, $check);
        let error = hand.alloc_iter((0_u64..).filter(|_| true)).expect_err("no end");
        assert_eq!(error.reason(), Reason::Limit);
        check();
        let error = hand.alloc_fmt(format_args!("{Endless}")).expect_err("no end");
        assert_eq!(error.reason(), Reason::Limit);
        check();
        let made = catch_unwind(AssertUnwindSafe(|| {
            hand.alloc_str_with(|out| out.write_str("so far").map(|()| panic!("no further")))
                .map(|_| ())
        }));
        assert!(made.is_err());
        check();
        let made = catch_unwind(AssertUnwindSafe(|| {
            let make = |index: usize| if index < 10 { index } else { panic!("the eleventh") };
            hand.alloc_slice_with(10_000, make).map(|_| ())
        }));
        assert!(made.is_err());
        check();
    }};
}

/// Regression: a request that hit the limit left the arena full for all others.
#[test]
fn what_was_not_made_takes_no_room() -> Result<(), ArenaError> {
    let (arena, pool) = (Arena::with_config_in(ONE, heap())?, Pool::with_config_in(ONE, heap())?);
    arena.alloc(1_u64)?;
    pool.alloc(1_u64)?;
    in_vain!(&arena, || assert_eq!(arena.stats().allocated, 8));
    in_vain!(&pool, || assert_eq!(pool.stats().allocated, 8));
    arena.alloc_uninit_slice::<u8>(MIB / 2 - 64)?;
    pool.alloc_uninit_slice::<u8>(MIB / 2 - 64)?;
    Ok(())
}

#[test]
fn a_handle_goes_on_where_it_was_before_what_was_not_made() -> Result<(), ArenaError> {
    let arena = Arena::with_config_in(ONE, heap())?;
    let mut local = arena.local();
    /// The next word lies directly behind the last one.
    macro_rules! next {
        ($hand:expr, $last:expr) => {
            || {
                let place = std::ptr::from_ref($hand.alloc(2_u64).expect("a word")).addr();
                assert_eq!(place, $last.replace(place) + 8);
            }
        };
    }
    let last = Cell::new(std::ptr::from_ref(local.alloc(1_u64)?).addr());
    in_vain!(&local, next!(local, last));
    local.scoped(|scope| in_vain!(&scope, next!(scope, last)));
    Ok(())
}

/// An arena that keeps a hundred slabs of 64 KiB, and holds a block of `others` bytes besides, on a heap of 64 MiB.
fn keeps(heap: &PageHeap<System>, others: usize) -> Result<Arena<&PageHeap<System>>, ArenaError> {
    let mut arena = Arena::with_config_in(ArenaConfig::new().slab(64 << 10), heap)?;
    (0..200).try_for_each(|_| arena.alloc_uninit_slice::<u8>(30_000).map(|_| ()))?;
    arena.reset();
    assert_eq!(arena.stats().reserved, 100 * (64 << 10));
    arena.alloc_uninit_slice::<u8>(others)?;
    Ok(arena)
}

/// Regression: the kept slabs went back one by one, and the backing was asked each time.
#[test]
fn nothing_goes_back_for_what_the_backing_could_never_have() -> Result<(), ArenaError> {
    let heap = PageHeap::new(System, Config::new(64 * MIB)).expect("a heap");
    let arena = keeps(&heap, 10 * MIB)?;
    let before = (arena.stats(), heap.stats().in_use);
    // Too much even if all kept slabs went back: the arena holds the rest itself.
    for bytes in [55 * MIB, 64 * MIB, isize::MAX as usize / 2] {
        let error = arena
            .alloc_uninit_slice::<u8>(bytes)
            .expect_err("more than the heap has");
        assert_eq!(error.reason(), Reason::NoPages);
        assert_eq!((arena.stats(), heap.stats().in_use), before);
    }
    Ok(())
}

/// Regression: all kept slabs went back, and the backing was asked a hundred times.
#[test]
fn what_is_kept_goes_back_in_few_steps() -> Result<(), ArenaError> {
    let heap = PageHeap::new(System, Config::new(64 * MIB)).expect("a heap");
    let other = Arena::new_in(&heap);
    other.alloc_uninit_slice::<u8>(40 * MIB)?;
    let arena = keeps(&heap, 8)?;
    let before = heap.stats().refusals;
    arena
        .alloc_uninit_slice::<u8>(30 * MIB)
        .expect_err("others have so much");
    assert_eq!(heap.stats().refusals - before, 2);
    Ok(())
}

/// Regression: at 32 KiB twice the room did not fit behind the slice, so it went to a block of its own, and half the
/// slab was lost.
#[test]
fn a_collected_slice_that_fits_the_slab_takes_no_more_of_it_than_its_length() -> Result<(), ArenaError> {
    const LENGTH: usize = 33_000;
    let config = ArenaConfig::new().slab(64 << 10);
    let (pool, arena) = (Pool::with_config(config)?, Arena::with_config(config)?);
    let slice = pool.alloc_iter((0..LENGTH).map(|index| index as u8).filter(|_| true))?;
    assert!(slice.iter().enumerate().all(|(index, &byte)| byte == index as u8));
    assert_eq!(slice.len(), LENGTH);
    let text = arena.alloc_fmt(format_args!("{:LENGTH$}", 'x'))?;
    assert_eq!(text.len(), LENGTH);
    for stats in [pool.stats(), arena.stats()] {
        assert_eq!((stats.allocated, stats.slabs, stats.reserved), (LENGTH, 1, 64 << 10));
    }
    Ok(())
}

/// Regression: the backing was asked twice for each further element, once twice the room did not fit behind the slice:
/// 151,000 times here.
#[test]
fn a_slice_that_fits_the_slab_hardly_asks_a_backing_that_has_no_more() -> Result<(), ArenaError> {
    // A slab of 1 MiB, and two pages.
    let heap = PageHeap::new(System, Config::new(addresses(1 << 30)).limit(PageCount(130))).expect("a heap");
    let pool = Pool::new_in(&heap);
    let slice = pool.alloc_iter((0..600_000).map(|index| index as u8).filter(|_| true))?;
    assert_eq!(slice.len(), 600_000);
    let refusals = heap.stats().refusals;
    assert!(refusals <= 4, "{refusals} refusals");
    Ok(())
}
