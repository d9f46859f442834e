//! What scopes unlike each other hold of the arena: a few times as much as was in use at one time.

use std::future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::task::{Context, Poll, Waker};

use pageheap::arena::{Arena, ArenaConfig, ArenaError, Local, Scope};
use pageheap::source::System;
use pageheap::{Config, PageHeap};
#[cfg(not(windows))]
use pageheap::{Geometry, PageCount};
use proptest::collection::vec;
use proptest::prelude::*;

use super::common::addresses;
use super::common::bytes::all_are;
use super::stories::cases;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn heap() -> PageHeap<System> {
    PageHeap::new(System, Config::new(addresses(1 << 30))).expect("a heap")
}

/// Enters a scope with objects of these sizes. `between` runs after each.
fn scope_of(
    local: &mut Local<'_>,
    sizes: impl IntoIterator<Item = usize>,
    mut between: impl FnMut() -> Result<(), ArenaError>,
) -> Result<(), ArenaError> {
    local.scoped(|scope| {
        for bytes in sizes {
            scope.alloc_uninit_slice::<u8>(bytes)?;
            between()?;
        }
        Ok(())
    })
}

/// However little is left of it: less than the head of another piece, too.
#[test]
fn what_a_local_leaves_ends_where_its_piece_does() -> Result<(), ArenaError> {
    for count in 500..520 {
        let arena = Arena::new();
        let local = arena.local();
        local.alloc(0_u64)?;
        // Makes the piece longer, by an odd number of words.
        local.alloc_uninit_slice::<u8>(20_000)?;
        let behind = arena.alloc([!0_u64; 2])?;
        for _ in 0..count {
            local.alloc(0_u64)?;
        }
        drop(local);
        assert_eq!(*behind, [!0; 2], "after {count} words");
    }
    Ok(())
}

/// Regression: each scope took a block for its object, and kept those of all before it: 2 GiB for 2 MiB in use.
#[test]
fn an_object_that_is_longer_in_each_scope_holds_a_few_times_its_size() -> Result<(), ArenaError> {
    for (objects, step) in [(1, KIB), (1, 16 * KIB), (5, 4 * KIB)] {
        let arena = Arena::new();
        let mut local = arena.local();
        for bytes in (1..=2 * MIB / objects).step_by(step) {
            scope_of(&mut local, vec![bytes; objects], || Ok(()))?;
            let reserved = arena.stats().reserved;
            assert!(
                reserved <= 4 * objects * bytes + 256 * KIB,
                "{objects} objects of {bytes} bytes: {reserved}"
            );
        }
    }
    Ok(())
}

/// Regression: as above. Eight of all spare pieces were looked at, and none was given back before a refusal. (Not
/// for any two scopes: a block serves objects of half its length and more, as `docs/arenas.md` says.)
#[test]
fn scopes_in_turn_are_not_refused_what_each_alone_may_have() -> Result<(), ArenaError> {
    let limit = 8 * MIB;
    let arena = Arena::with_config(ArenaConfig::new().limit(limit))?;
    let mut local = arena.local();
    // The rest is for a slab of small objects.
    for bytes in (KIB..limit - 256 * KIB).step_by(8 * KIB) {
        scope_of(&mut local, [bytes], || Ok(()))?;
    }
    for round in 0..50 {
        let small = 70 * KIB + 64 * round;
        scope_of(&mut local, [vec![small; 20], vec![4 * MIB + round]].concat(), || Ok(()))?;
        scope_of(&mut local, [7 * MIB - round], || Ok(()))?;
        scope_of(&mut local, [vec![2 * MIB + round; 3], vec![small; 10]].concat(), || {
            Ok(())
        })?;
    }
    Ok(())
}

/// A block for one large object does not stay with the local, also if nothing was allocated before: it goes back for
/// an object that it cannot serve.
#[test]
fn a_large_object_in_the_first_scope_leaves_no_block_behind() -> Result<(), ArenaError> {
    let arena = Arena::with_config(ArenaConfig::new().limit(8 * MIB))?;
    let mut local = arena.local();
    scope_of(&mut local, [4 * MIB], || Ok(()))?;
    scope_of(&mut local, [7 * MIB], || Ok(()))
}

/// A piece serves what it has room for to the byte, and nothing that is a grain longer: an object lies behind it.
#[test]
fn a_piece_that_is_a_grain_too_short_is_not_used() -> Result<(), ArenaError> {
    let arena = Arena::with_config(ArenaConfig::new().slab(MIB))?;
    let mut local = arena.local();
    // The local's first piece is not the last, so the next cannot be had by making it longer.
    local.alloc(0_u64)?;
    arena.alloc(0_u64)?;
    let (bytes, mut behind) = (40 * KIB, None);
    scope_of(&mut local, [bytes], || {
        behind = Some(arena.alloc(7_u64)?);
        Ok(())
    })?;
    let behind = behind.expect("made in the scope");
    for (more, again) in [(0, true), (8, false)] {
        local.scoped(|scope| {
            let slice = scope.alloc_slice_with(bytes + more, |_| 0xFF_u8)?;
            let end = slice.as_ptr_range().end.addr();
            assert_eq!(end == ptr::from_ref(behind).addr(), again, "{more} bytes more");
            Ok::<(), ArenaError>(())
        })?;
        assert_eq!(*behind, 7);
    }
    Ok(())
}

/// Regression: 300 MB for 720 KiB in use. Another local's objects lie between, so the pieces cannot go back to where
/// they were cut from.
#[test]
fn pieces_in_the_middle_of_a_slab_are_used_again() -> Result<(), ArenaError> {
    for objects in [1, 12] {
        let arena = Arena::new();
        let (mut local, other) = (arena.local(), arena.local());
        for bytes in (2 * KIB..60 * KIB).step_by(40) {
            scope_of(&mut local, vec![bytes; objects], || {
                other.alloc_uninit_slice::<u8>(16).map(|_| ())
            })?;
        }
        let reserved = arena.stats().reserved;
        assert!(
            reserved <= objects * 600 * KIB + MIB,
            "{objects} objects of up to 60 KiB: {reserved}"
        );
    }
    Ok(())
}

/// A piece that is too deep in the list of those that locals left, which are looked at from the front.
#[test]
fn all_that_locals_left_is_looked_at_before_a_refusal() -> Result<(), ArenaError> {
    let limit = MIB;
    let arena = Arena::with_config(ArenaConfig::new().slab(limit).limit(limit))?;
    let mut local = arena.local();
    let sizes = [vec![100 * KIB], vec![33 * KIB; 20]].concat();
    // What the arena allocates keeps pieces from being the last.
    let cut = || arena.alloc(0_u64).map(|_| ());
    local.alloc(0_u64)?;
    cut()?;
    scope_of(&mut local, sizes.iter().copied(), cut)?;
    while arena.alloc([0_u8; 512]).is_ok() {}
    drop(local);
    for bytes in [90 * KIB, 33 * KIB] {
        let mut local = arena.local();
        scope_of(&mut local, [bytes], || Ok(()))?;
    }
    Ok(())
}

/// Regression: an arena did not look at what locals had left, and was refused at its limit with 768 of 1,024 KiB free.
#[test]
fn what_locals_left_serves_the_arena_before_a_refusal() -> Result<(), ArenaError> {
    #[derive(Clone, Copy)]
    #[repr(align(256))]
    struct Aligned(u64);
    const OBJECTS: usize = 60_000;
    let arena = Arena::with_config(ArenaConfig::new().slab(256 * KIB).limit(MIB))?;
    let mut local = arena.local();
    scope_of(&mut local, vec![16; OBJECTS], || Ok(()))?;
    drop(local);
    let long = arena.alloc_slice_copy(&[!0_u8; 200 * KIB])?;
    let aligned = Vec::from_iter((0..500).map_while(|number| arena.alloc(Aligned(number)).ok()));
    let objects = Vec::from_iter((0..).map_while(|number| arena.alloc([number; 2]).ok()));
    assert_eq!(aligned.len(), 500);
    let bytes = long.len() + aligned.len() * 256 + objects.len() * 16;
    assert!(bytes > OBJECTS * 16, "{bytes} bytes in {} objects", objects.len());
    // None lies in another.
    assert!(long.iter().all(|&byte| byte == !0));
    assert!((0..).zip(&aligned).all(|(number, object)| object.0 == number));
    assert!((0..).zip(&objects).all(|(number, object)| **object == [number; 2]));
    let is_aligned = |object: &&mut Aligned| ptr::from_ref(&**object).addr().is_multiple_of(256);
    assert!(aligned.iter().all(is_aligned));
    let stats = arena.stats();
    assert!(stats.allocated <= stats.reserved && stats.reserved <= MIB, "{stats:?}");
    Ok(())
}

/// Regression: a slice that an arena refused had moved from piece to piece as it grew, and left no room to any object.
#[test]
fn what_was_not_made_does_not_eat_what_locals_left() -> Result<(), ArenaError> {
    let objects = |in_vain: fn(&Arena)| {
        let arena = Arena::with_config(ArenaConfig::new().slab(256 * KIB).limit(MIB))?;
        let mut local = arena.local();
        scope_of(&mut local, vec![16; 60_000], || Ok(()))?;
        drop(local);
        // Room for a few elements is left in the slab.
        arena.alloc_uninit_slice::<u8>(255 * KIB)?;
        in_vain(&arena);
        Ok::<usize, ArenaError>((0_u64..).map_while(|number| arena.alloc([number; 2]).ok()).count())
    };
    let all = objects(|_| ())?;
    let collected = objects(|arena| {
        arena.alloc_iter((0_u64..).filter(|_| true)).expect_err("no end");
    })?;
    let pushed = objects(|arena| {
        let mut numbers = allocator_api2_04::vec::Vec::new_in(arena);
        while numbers.try_reserve(1).is_ok() {
            numbers.push(0_u64);
        }
    })?;
    assert_eq!([collected, pushed], [all; 2]);
    Ok(())
}

/// An arena in which so many locals have left all but 600 bytes of their pieces; or, if not `leaves`, keep them.
fn with_short_pieces(limit: usize, locals: usize, leaves: bool) -> Result<Arena, ArenaError> {
    let arena = Arena::with_config(ArenaConfig::new().slab(256 * KIB).limit(limit))?;
    for _ in 0..locals {
        let local = arena.local();
        // The first is too long for what others have left.
        [1000, 1000, 1000, 480]
            .iter()
            .try_for_each(|&bytes| local.alloc_uninit_slice::<u8>(bytes).map(|_| ()))?;
        arena.alloc(0_u64)?;
        if leaves {
            drop(local);
        } else {
            std::mem::forget(local);
        }
    }
    Ok(arena)
}

/// Regression: what remained of a piece was dropped once it was shorter than 528 bytes, here after five objects.
#[test]
fn short_pieces_that_locals_left_serve_the_arena_to_the_end() -> Result<(), ArenaError> {
    const LOCALS: usize = 200;
    let objects = |leaves| {
        let arena = with_short_pieces(MIB, LOCALS, leaves)?;
        Ok::<usize, ArenaError>((0_u64..).map_while(|number| arena.alloc([number; 2]).ok()).count())
    };
    let gained = objects(true)? - objects(false)?;
    assert!(gained >= LOCALS * 35, "{gained} objects in {LOCALS} pieces");
    Ok(())
}

/// What remains of some, and is too short for the next object, was in front of the others: a search ends after 1,024.
#[test]
fn short_pieces_hide_no_longer_ones() -> Result<(), ArenaError> {
    const LOCALS: usize = 1200;
    let objects = |leaves| {
        let arena = with_short_pieces(8 * MIB, LOCALS, leaves)?;
        Ok::<usize, ArenaError>(
            (0_u8..=255)
                .cycle()
                .map_while(|byte| arena.alloc([byte; 400]).ok())
                .count(),
        )
    };
    let gained = objects(true)? - objects(false)?;
    assert!(gained >= LOCALS - 4, "{gained} objects in {LOCALS} pieces");
    Ok(())
}

#[test]
fn statistics_know_what_scopes_gave_back() -> Result<(), ArenaError> {
    let heap = heap();
    let mut arena = Arena::new_in(&heap);
    let mut local = arena.local();
    local.alloc(0_u64)?;
    for bytes in [4 * MIB, MIB, 5 * MIB] {
        local.scoped(|scope| {
            scope.alloc_uninit_slice::<u8>(bytes)?;
            let stats = arena.stats();
            assert!(
                (bytes..bytes + 64 * KIB).contains(&stats.allocated),
                "what lies in no scope is not allocated: {stats:?}"
            );
            assert!(stats.allocated <= stats.committed && stats.committed <= stats.reserved);
            Ok::<_, ArenaError>(())
        })?;
    }
    drop(local);
    let stats = arena.stats();
    assert!(stats.allocated < 64 * KIB && stats.peak >= 5 * MIB, "{stats:?}");
    arena.reset();
    arena.shrink_to(0);
    let stats = arena.stats();
    assert_eq!((stats.reserved, stats.committed, stats.slabs), (0, 0, 0));
    assert_eq!(heap.stats().in_use.0, 0);
    Ok(())
}

/// Regression: the values of a scope could borrow nothing from outside the closure.
#[test]
fn what_lies_in_a_scope_may_borrow_from_outside() -> Result<(), ArenaError> {
    let (arena, text) = (Arena::new(), String::from("a b c"));
    let mut local = arena.local();
    let letters = local.scoped(|mut scope| {
        let words = scope.alloc_iter(text.split(' '))?;
        let inner = String::from("d e");
        let more = scope.scoped(|scope| {
            let lists = scope.alloc([&*words, scope.alloc_iter(inner.split(' '))?])?;
            Ok::<_, ArenaError>(lists.concat().concat())
        })?;
        assert_eq!(words, ["a", "b", "c"]);
        Ok::<_, ArenaError>(more)
    })?;
    assert_eq!(letters, "abcde");
    Ok(())
}

/// Enters scopes of guards again and again, which take so many bytes: the arena has no more for them in the end.
fn guards_give_back(enter: impl Fn(&mut Local<'_>, usize)) -> Result<(), ArenaError> {
    let arena = Arena::new();
    let mut local = arena.local();
    let before = ptr::from_ref(local.alloc(1_u64)?).addr();
    let mut taken = Vec::new();
    for _ in 0..10 {
        for bytes in [64, 3_000, 20_000, MIB] {
            enter(&mut local, bytes);
        }
        taken.push(arena.stats().allocated);
    }
    assert_eq!(ptr::from_ref(local.alloc(2_u64)?).addr(), before + 8);
    assert!(taken[9] < taken[0] + MIB / 2, "{taken:?}");
    Ok(())
}

/// The scope of a guard ends as well if it is left by a panic, with all that was taken for it.
#[test]
fn a_scope_of_a_guard_ends_in_a_panic() -> Result<(), ArenaError> {
    guards_give_back(|local, bytes| {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let mut guard = local.scope_guard();
            let object = guard.scope().alloc_uninit_slice::<u8>(bytes).map(|object| object.len());
            panic!("on the way with {object:?} bytes");
        }));
        assert!(panicked.is_err());
    })
}

#[test]
fn guards_give_back_what_their_scopes_took() -> Result<(), ArenaError> {
    guards_give_back(|local, bytes| {
        let mut guard = local.scope_guard();
        assert_eq!(
            guard.scope().alloc_uninit_slice::<u8>(bytes).map(|object| object.len()),
            Ok(bytes)
        );
    })
}

/// A task that waits in a scope, and then goes on in another thread.
#[test]
fn a_scope_of_a_guard_may_be_awaited_in() -> Result<(), ArenaError> {
    let arena = Arena::new();
    let mut local = arena.local();
    let before = ptr::from_ref(local.alloc(1_u64)?).addr();
    let mut waits = true;
    let mut task = Box::pin(async {
        let mut guard = local.scope_guard();
        let scope = guard.scope();
        let inside = scope.alloc(2_u64)?;
        future::poll_fn(|_| match mem::take(&mut waits) {
            true => Poll::Pending,
            false => Poll::Ready(()),
        })
        .await;
        let behind = scope.alloc(3_u64)?;
        Ok::<u64, ArenaError>(*inside + *behind)
    });
    let mut resume = || task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(resume().is_pending());
    let sum = std::thread::scope(|threads| threads.spawn(resume).join());
    assert!(matches!(sum, Ok(Poll::Ready(Ok(5)))));
    drop(task);
    assert_eq!(ptr::from_ref(local.alloc(4_u64)?).addr(), before + 8);
    Ok(())
}

/// Objects in scopes in scopes: one for each size, of which every third begins a scope. Each is filled, and read again
/// when those after it are gone.
fn nested(scope: &mut Scope<'_, '_>, sizes: &[usize]) -> Result<(), ArenaError> {
    let Some((&bytes, rest)) = sizes.split_first() else {
        return Ok(());
    };
    let fill = bytes as u8 ^ sizes.len() as u8;
    let object = scope.alloc_slice_with(bytes, |_| fill)?;
    if sizes.len().is_multiple_of(3) {
        scope.scoped(|mut inner| nested(&mut inner, rest))?;
    } else {
        nested(scope, rest)?;
    }
    assert!(all_are(object, fill), "{bytes} bytes are overwritten");
    Ok(())
}

proptest! {
    #![proptest_config(cases(20))]

    /// Two threads enter scopes of all kinds at once.
    #[test]
    fn scopes_of_all_kinds_keep_what_lies_in_them_and_no_more(
        slab in prop_oneof![Just(None), (12_u32..20).prop_map(|shift| Some(1_usize << shift))],
        scopes in vec(vec((0_u32..18, 0_usize..1 << 17), 1..20), 1..16),
    ) {
        let config = ArenaConfig::new();
        let arena = Arena::with_config(slab.map_or(config, |slab| config.slab(slab)))?;
        let scopes: Vec<Vec<usize>> = scopes
            .iter()
            .map(|sizes| sizes.iter().map(|(shift, more)| (1 << shift) + (more & ((1 << shift) - 1))).collect())
            .collect();
        let most = scopes.iter().map(|sizes| sizes.iter().sum::<usize>()).max().unwrap_or(0);
        std::thread::scope(|threads| {
            for _ in 0..2 {
                threads.spawn(|| {
                    let mut local = arena.local();
                    for sizes in scopes.iter().chain(scopes.iter().rev()) {
                        local.scoped(|mut scope| nested(&mut scope, sizes)).expect("room");
                    }
                });
            }
        });
        let reserved = arena.stats().reserved;
        prop_assert!(reserved <= 2 * 4 * most + 6 * MIB, "{most} bytes at most, twice: {reserved}");
    }
}

/// Regression: with pages of 8 bytes a block may begin where a piece cannot, which then overlapped the block's foot.
/// (Where pages are committed, none is shorter than the system's.)
#[test]
#[cfg(not(windows))]
fn pages_less_aligned_than_a_piece_are_right() -> Result<(), ArenaError> {
    let heap: PageHeap<System, Geometry<5, 3>> =
        PageHeap::with_shape(System, Config::new(addresses(64 << 20))).expect("a heap");
    let mut arena = Arena::new_in(&heap);
    for bytes in [301_000, 301_008] {
        arena.alloc_uninit_slice::<u8>(bytes)?;
        arena.alloc_uninit_slice::<u8>(bytes)?;
    }
    arena.reset();
    let mut local = arena.local();
    for _ in 0..3 {
        for (bytes, count) in [(300_000, 4), (900_000, 1)] {
            local.scoped(|scope| (0..count).try_for_each(|_| scope.alloc_slice_with(bytes, |_| 1_u8).map(|_| ())))?;
        }
    }
    drop(local);
    drop(arena);
    assert_eq!(heap.stats().in_use, PageCount::ZERO);
    Ok(())
}
