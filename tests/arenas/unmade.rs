//! What an arena is after it has said no, or after what was to be put into it panicked: as it was.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pageheap::arena::{Arena, ArenaConfig, ArenaError, Pool, Reason};
use pageheap::source::System;
use pageheap::{Config, PageHeap};

use super::common::addresses;

const MIB: usize = 1 << 20;

/// One slab, and no more.
const ONE: ArenaConfig = ArenaConfig::new().limit(MIB).slab(MIB);

fn heap() -> PageHeap<System> {
    PageHeap::new(System, Config::new(addresses(1 << 30))).expect("a heap")
}

/// A text without an end.
struct Endless;

impl fmt::Display for Endless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        loop {
            f.write_str("as long as there is room")?;
        }
    }
}

/// Three slices that an arena or a handle does not make: `$check` after each.
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
            let make = |index: usize| if index < 10 { index } else { panic!("the eleventh") };
            hand.alloc_slice_with(10_000, make).map(|_| ())
        }));
        assert!(made.is_err());
        check();
    }};
}

/// Whoever hit the limit left it full for all others.
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
    /// Where the next word lies, behind the one before.
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
