//! [`Arena`], [`Local`](pageheap::arena::Local), [`Scope`](pageheap::arena::Scope).

use std::alloc::Layout;
use std::cell::Cell;
use std::collections::HashSet;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;

use pageheap::arena::{Arena, ArenaBox, ArenaConfig, ArenaError, Local, Pool, ProcessHeap, Reason};
use pageheap::source::{Region, System};
use pageheap::{Config, PageCount, PageHeap};

use super::common::addresses;

const PAGE: usize = 8192;

fn heap() -> PageHeap<System> {
    PageHeap::new(System, Config::new(addresses(1 << 30))).expect("a heap")
}

fn address<T: ?Sized>(value: &T) -> usize {
    std::ptr::from_ref(value).addr()
}

#[test]
fn values_of_all_kinds() -> Result<(), ArenaError> {
    let arena = Arena::new();
    let number = arena.alloc(1_u8)?;
    let pair = arena.alloc_with(|| (2_u64, 3_u8))?;
    let place = arena.alloc_uninit::<u32>()?.write(4);
    let copies = arena.alloc_slice_copy(&[1_u16, 2, 3])?;
    let clones = arena.alloc_slice_clone(&[String::from("a"), String::from("b")])?;
    let squares = arena.alloc_slice_with(5, |index| index * index)?;
    let odd = arena.alloc_iter((0..10).filter(|number| number % 2 == 1))?;
    let name = arena.alloc_str("name")?;
    let text = arena.alloc_fmt(format_args!("{}-{name}", 7))?;
    let steps = arena.alloc_str_with(|out| (0..3).try_for_each(|step| write!(out, "{step}é")))?;
    let room: &mut [MaybeUninit<u64>] = arena.alloc_uninit_slice(3)?;
    room.iter_mut().for_each(|cell| _ = cell.write(9));
    name.make_ascii_uppercase();
    squares[0] = 100;
    assert_eq!((*number, *pair, *place), (1, (2, 3), 4));
    assert_eq!(
        (&copies[..], &clones[..], &squares[..]),
        (
            &[1, 2, 3][..],
            &["a", "b"].map(String::from)[..],
            &[100, 1, 4, 9, 16][..]
        )
    );
    assert_eq!((&odd[..], &*name, &*text), (&[1, 3, 5, 7, 9][..], "NAME", "7-name"));
    assert_eq!(steps, "0é1é2é");
    clones.iter_mut().for_each(|clone| drop(std::mem::take(clone)));
    Ok(())
}

#[test]
fn nothing_takes_no_room() -> Result<(), ArenaError> {
    #[derive(Debug, PartialEq)]
    #[repr(align(4096))]
    struct Empty;
    let arena = Arena::new();
    let empty = arena.alloc(Empty)?;
    assert!(address(empty).is_multiple_of(4096));
    assert_eq!(arena.alloc_iter([(), (), ()])?.len(), 3);
    assert_eq!(arena.alloc_slice_with(1000, |_| Empty)?.len(), 1000);
    assert_eq!(arena.alloc_str("")?, "");
    assert_eq!(arena.alloc_str_with(|out| out.write_str(""))?, "");
    assert!(arena.alloc_slice_copy::<u64>(&[])?.is_empty());
    assert_eq!(arena.stats().reserved, 0);
    assert!(arena.local().alloc_iter(std::iter::empty::<u8>())?.is_empty());
    Ok(())
}

#[test]
fn over_aligned_values() -> Result<(), ArenaError> {
    let arena = Arena::new();
    let local = arena.local();
    for shift in 0..=22 {
        let layout = Layout::from_size_align(24, 1 << shift).expect("a layout");
        for memory in [arena.allocate(layout)?, local.allocate(layout)?] {
            assert!(memory.addr().get().is_multiple_of(1 << shift));
            // SAFETY: 24 bytes, allocated here.
            unsafe { memory.cast::<[u8; 24]>().write([7; 24]) };
        }
    }
    Ok(())
}

#[test]
fn an_error_says_what_was_asked_what_is_left_and_why() {
    let arena = Arena::with_config_in(ArenaConfig::new().limit(3 * PAGE + 5), heap()).expect("an arena");
    let error = arena.alloc([0_u8; 4 * PAGE]).expect_err("more than the limit");
    assert_eq!(
        (error.reason(), error.asked(), error.align(), error.left()),
        (Reason::Limit, 4 * PAGE, 1, 3 * PAGE + 5)
    );
    let text = error.to_string();
    assert_eq!(
        text,
        "no room for 32768 bytes aligned to 1: the arena's limit leaves 24581 bytes, in whole blocks of the backing"
    );

    let error = arena
        .alloc_uninit_slice::<u64>(usize::MAX / 4)
        .expect_err("more than there are addresses");
    assert_eq!(error.reason(), Reason::TooLarge);
    assert_eq!(arena.stats().reserved, 0);

    let small = PageHeap::new(System, Config::new(1 << 20).limit(PageCount(2))).expect("a heap");
    let arena = Arena::new_in(&small);
    let error = arena.alloc([0_u8; 3 * PAGE]).expect_err("more than the heap has");
    assert_eq!((error.reason(), error.left()), (Reason::NoPages, usize::MAX));
    assert_eq!(
        error.to_string(),
        "no room for 24576 bytes aligned to 1: the backing has no such pages"
    );
    arena.alloc(1).expect("a slab may be smaller than was wished");
}

#[test]
fn what_is_asked_at_once_is_had_or_the_arena_is_not() {
    let heap = heap();
    let config = ArenaConfig::new().limit(4 * PAGE);
    assert_eq!(
        Arena::with_config_in(config.prealloc(4 * PAGE), &heap)
            .expect("an arena")
            .stats()
            .reserved,
        4 * PAGE
    );
    let refused = Arena::with_config_in(config.prealloc(5 * PAGE).slab(PAGE), &heap).expect_err("too much");
    assert_eq!((refused.reason(), heap.stats().in_use.0), (Reason::Limit, 0));
}

#[test]
fn the_limit_is_never_exceeded_and_all_of_it_can_be_had() {
    let heap = heap();
    let arena = Arena::with_config_in(ArenaConfig::new().limit(100 * PAGE), &heap).expect("an arena");
    let mut bytes = 0;
    while arena.alloc([0_u8; 1000]).is_ok() {
        bytes += 1000;
        assert!(arena.stats().reserved <= 100 * PAGE && heap.stats().in_use.0 <= 100);
    }
    assert_eq!(arena.remaining(), 0);
    assert!(bytes > 98 * PAGE, "{bytes} of {}", 100 * PAGE);
}

#[test]
fn a_reset_keeps_pages_and_shrinking_gives_them_back() {
    let heap = heap();
    let mut arena = Arena::new_in(&heap);
    let fill = |arena: &Arena<&PageHeap<System>>| {
        let first = address(arena.alloc(0_u64).expect("room"));
        (0..10_000).for_each(|number| _ = arena.alloc([number; 16]).expect("room"));
        arena.alloc_uninit_slice::<u8>(100 * PAGE).expect("room");
        first
    };
    fill(&arena);
    let full = arena.stats();
    arena.reset();
    let empty = arena.stats();
    assert_eq!(
        (empty.reserved, empty.slabs, empty.allocated),
        (full.reserved, full.slabs, 0)
    );
    assert!(empty.peak >= full.allocated && empty.committed >= full.allocated);
    for _ in 0..100 {
        fill(&arena);
        arena.reset();
        assert_eq!(
            arena.stats().reserved,
            full.reserved,
            "a round like the last needs no more"
        );
    }
    arena.shrink_to(50 * PAGE);
    assert!(arena.stats().reserved <= 50 * PAGE);
    arena.shrink_to(0);
    assert_eq!(
        (arena.stats().reserved, arena.stats().committed, heap.stats().in_use.0),
        (0, 0, 0)
    );
    fill(&arena);
    drop(arena);
    assert_eq!(heap.stats().in_use.0, 0, "everything goes back");
}

#[test]
fn shrinking_leaves_what_is_in_use() -> Result<(), ArenaError> {
    let mut arena = Arena::new_in(heap());
    arena.reserve(1 << 20)?;
    let before = arena.stats().reserved;
    arena.alloc(5)?;
    arena.shrink_to(0);
    assert_eq!(
        (arena.stats().reserved, before),
        (1 << 20, 1 << 20),
        "the only slab is in use"
    );
    Ok(())
}

#[test]
fn the_last_block_grows_in_place() -> Result<(), ArenaError> {
    let arena = Arena::new();
    let local = arena.local();
    let layout = Layout::from_size_align(10, 1).expect("a layout");
    for hand in 0..2 {
        let allocate = || {
            if hand == 0 {
                arena.allocate(layout)
            } else {
                local.allocate(layout)
            }
        };
        let resize = |memory: NonNull<[u8]>, from, to| {
            let memory = NonNull::slice_from_raw_parts(memory.cast(), from);
            // SAFETY: allocated here, with this length.
            unsafe {
                if hand == 0 {
                    arena.resize_in_place(memory, to)
                } else {
                    local.resize_in_place(memory, to)
                }
            }
        };
        let first = allocate()?;
        assert!(resize(first, 10, 1000) && resize(first, 1000, 20) && resize(first, 20, 22));
        let second = allocate()?;
        assert_eq!(second.addr().get(), first.addr().get() + 24);
        assert!(!resize(first, 22, 30), "no longer the last");
        assert!(resize(first, 22, 24), "in the same grain");
        assert!(resize(second, 10, 0), "given back");
        assert_eq!(allocate()?.addr(), second.addr());
        assert!(!resize(second, 10, 1 << 30), "no slab has so much");
    }
    Ok(())
}

#[test]
fn a_local_that_is_alone_has_one_piece() -> Result<(), ArenaError> {
    let mut arena = Arena::with_config(ArenaConfig::new().slab(1 << 20))?;
    let local = arena.local();
    let first = address(local.alloc(0_u64)?);
    for index in 1..100_000_usize {
        let address = address(local.alloc(index)?);
        assert_eq!(address, first + 8 * index, "one behind the other");
    }
    drop(local);
    let used = arena.stats().allocated;
    assert!(used <= 800_000 + 64, "what a local does not use goes back: {used}");
    arena.reset();
    Ok(())
}

#[test]
fn a_local_uses_what_there_is_up_to_the_limit() -> Result<(), ArenaError> {
    for limit in [32 << 10, 64 << 10, 100 << 10, 1 << 20] {
        let arena = Arena::with_config(ArenaConfig::new().limit(limit))?;
        let local = arena.local();
        let count = (0..).take_while(|&value| local.alloc([value; 2]).is_ok()).count();
        let stats = arena.stats();
        assert!(
            16 * count + 2048 > stats.reserved,
            "{count} values of 16 bytes; {stats:?}"
        );
    }
    Ok(())
}

/// Regression: objects of more than half the first piece, or aligned to much, had a piece each, for ever.
#[test]
fn objects_of_a_few_kilobytes_share_pieces() -> Result<(), ArenaError> {
    let layouts = [(3072, 1), (6000, 8), (8192, 1), (16, 1024), (4096, 4096)];
    for (size, align) in layouts {
        let arena = Arena::new();
        let (local, layout) = (arena.local(), Layout::from_size_align(size, align).expect("a layout"));
        let places: Vec<usize> = (0..1000)
            .map(|_| local.allocate(layout).map(|block| block.addr().get()))
            .collect::<Result<_, _>>()?;
        // The first two may have pieces of their own. And some pieces end where a slab does.
        let distance = size.next_multiple_of(align.max(8));
        let apart = places.windows(2).filter(|pair| pair[1] != pair[0] + distance).count();
        assert!(apart <= 30, "{layout:?}: {apart} are not right behind the one before");
        drop(local);
        let allocated = arena.stats().allocated;
        assert!(allocated <= 1020 * distance, "{layout:?}: {allocated} bytes");
    }
    Ok(())
}

/// Regression: two of 32 KiB shared a piece of 64 KiB, less its head. So one did, and half of the piece was lost.
#[test]
fn locals_lose_little_at_the_ends_of_pieces() -> Result<(), ArenaError> {
    for (bytes, most) in [
        (3 << 10, 3600),
        (8 << 10, 9500),
        (16 << 10, 17_000),
        (24 << 10, 25_000),
        (32 << 10, 36_000),
    ] {
        let arena = Arena::new();
        let locals = [arena.local(), arena.local()];
        for _ in 0..500 {
            for local in &locals {
                local.alloc_uninit_slice::<u8>(bytes)?;
            }
        }
        let allocated = arena.stats().allocated;
        assert!(allocated <= 1000 * most, "{bytes}: {allocated} bytes");
    }
    Ok(())
}

/// What is too short for a local is for the arena's own objects, until it begins anew.
#[test]
fn what_is_left_is_cut_up_and_forgotten_with_a_reset() -> Result<(), ArenaError> {
    const LIMIT: usize = 32 << 10;
    let mut arena = Arena::with_config(ArenaConfig::new().limit(LIMIT))?;
    for (leaves, size) in [(true, 400), (false, 16), (true, 16)] {
        if leaves {
            let local = arena.local();
            local.alloc(0_u64)?;
            // Keeps the local's piece from being the last in the arena.
            arena.alloc(0_u64)?;
        }
        let mut grains = HashSet::new();
        while let Ok(block) = arena.alloc_slice_with(size, |_| 0_u8) {
            let grain = |offset: usize| address(block) + offset;
            assert!(
                (0..size).step_by(16).all(|offset| grains.insert(grain(offset))),
                "twice"
            );
        }
        assert!(size > 16 || 16 * grains.len() + 256 > LIMIT, "{}", grains.len());
        arena.reset();
    }
    Ok(())
}

/// Also of pieces that are not the last in the arena.
#[test]
fn locals_that_come_and_go_use_what_others_left() -> Result<(), ArenaError> {
    let arena = Arena::new();
    for _ in 0..10_000 {
        let local = arena.local();
        local.alloc([0_u8; 100])?;
        // The arena cuts it from behind the local's piece.
        arena.alloc([0_u8; 16])?;
    }
    let reserved = arena.stats().reserved;
    assert!(reserved < 4 << 20, "{reserved}");
    Ok(())
}

#[test]
fn a_scope_gives_back_what_was_allocated_in_it() -> Result<(), ArenaError> {
    let arena = Arena::new();
    let mut local = arena.local();
    let kept = local.alloc_iter(0..100)?;
    local.scoped(|scope| scope.alloc_slice_with(100_000, |index| index).map(|_| ()))?;
    let reserved = arena.stats().reserved;
    for round in 0..1000 {
        let sum = local.scoped(|mut scope| {
            let outer = scope.alloc_slice_with(100 + round, |index| index)?;
            let inner = scope.scoped(|scope| {
                let inner = scope.alloc_slice_with(50_000, |index| index)?;
                outer[0] = inner.len();
                Ok::<_, ArenaError>(inner.iter().sum::<usize>())
            })?;
            let behind = scope.alloc(inner)?;
            Ok::<_, ArenaError>(*behind + outer[0])
        })?;
        assert_eq!(sum, 50_000 * 49_999 / 2 + 50_000);
    }
    assert_eq!(
        arena.stats().reserved,
        reserved,
        "a scope that is entered again takes nothing new"
    );
    assert!(kept.iter().copied().eq(0..100));
    Ok(())
}

#[test]
fn a_scope_ends_also_when_it_panics() -> Result<(), ArenaError> {
    let arena = Arena::new();
    let mut local = arena.local();
    let before = address(local.alloc(1_u64)?);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        local.scoped(|scope| {
            scope.alloc([0_u8; 1000]).map(|_| ()).expect("room");
            panic!("on the way");
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(address(local.alloc(2_u64)?), before + 8);
    Ok(())
}

/// A scope has its own copy of the local's bounds; if it extends the piece, the new end must reach the local.
#[test]
fn a_piece_that_a_scope_made_longer_stays_so() -> Result<(), ArenaError> {
    let arena = Arena::new();
    let mut local = arena.local();
    local.alloc(1_u64)?;
    let inside = local.scoped(|mut scope| {
        scope.scoped(|scope| scope.alloc_slice_copy(&[7_u8; 20_000]).map(|bytes| address(&bytes[0])))
    })?;
    let allocated = arena.stats().allocated;
    let outside = local.alloc_slice_copy(&[8_u8; 20_000])?;
    assert_eq!((address(&outside[0]), arena.stats().allocated), (inside, allocated));
    Ok(())
}

#[test]
fn a_scope_goes_on_after_one_in_it_has_panicked() -> Result<(), ArenaError> {
    let arena = Arena::new();
    let mut local = arena.local();
    for bytes in [100, 3_000, 100_000] {
        local.scoped(|mut scope| {
            let before = scope.alloc_slice_copy(&[1_u64; 10])?;
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                scope.scoped(|scope| {
                    scope.alloc_slice_copy(&vec![0_u8; bytes]).map(|_| ()).expect("room");
                    panic!("on the way");
                })
            }));
            assert!(panicked.is_err());
            let behind = scope.alloc_slice_copy(&[2_u64; 10])?;
            assert_eq!(
                address(&behind[0]),
                address(&before[0]) + 80,
                "as if nothing had been there"
            );
            assert_eq!((&before[..], &behind[..]), (&[1; 10][..], &[2; 10][..]));
            Ok::<_, ArenaError>(())
        })?;
    }
    Ok(())
}

#[test]
fn a_piece_can_become_longer_after_a_scope_that_made_it_so_panicked() -> Result<(), ArenaError> {
    let arena = Arena::with_config(ArenaConfig::new().prealloc(1 << 20))?;
    let mut local = arena.local();
    let before = address(local.alloc(1_u64)?);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        local.scoped(|scope| panic!("on the way with {:?}", scope.alloc([0_u8; 10_000])))
    }));
    assert!(panicked.is_err());
    let behind = local.alloc_slice_copy(&[2_u8; 30_000])?;
    assert_eq!(address(&behind[0]), before + 8);
    Ok(())
}

#[test]
fn a_scope_before_anything_else_keeps_its_piece() -> Result<(), ArenaError> {
    let arena = Arena::new();
    let mut local = arena.local();
    let checkpoint = local.checkpoint();
    let inside = |local: &mut Local<'_>| local.scoped(|scope| scope.alloc([7_u64; 4]).map(|value| address(&value[0])));
    let first = inside(&mut local)?;
    assert_eq!(inside(&mut local)?, first, "entered again it begins at the same place");
    for round in 0..3_u64 {
        // A piece of its own, then one that is shared with later values.
        let large = local.alloc_slice_with(9_000, |_| round)?;
        let outside = local.alloc(round)?;
        inside(&mut local)?;
        assert!(large.iter().all(|&word| word == round) && *outside == round);
        // SAFETY: nothing allocated since the checkpoint is still used, and the local was not rewound past it.
        unsafe { local.rewind(checkpoint) };
    }
    let reserved = arena.stats().reserved;
    for _ in 0..100 {
        local.scoped(|scope| scope.alloc([0_u64; 6_000]).map(|_| ()))?;
        // SAFETY: as above.
        unsafe { local.rewind(checkpoint) };
    }
    assert_eq!(arena.stats().reserved, reserved, "what was rewound is used again");
    Ok(())
}

#[test]
fn a_checkpoint_is_a_scope_by_hand() -> Result<(), ArenaError> {
    let arena = Arena::new();
    let mut local = arena.local();
    let before = address(local.alloc(1_u64)?);
    let checkpoint = local.checkpoint();
    for size in [100, 10_000, 1_000_000] {
        local.alloc_slice_with(size, |_| 0_u8)?;
    }
    // SAFETY: nothing allocated since is used.
    unsafe { local.rewind(checkpoint) };
    assert_eq!(address(local.alloc(2_u64)?), before + 8);
    Ok(())
}

/// Counts its drops.
struct Counted<'a>(&'a Cell<usize>);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

#[test]
fn contents_are_dropped_by_boxes_and_nothing_else() -> Result<(), ArenaError> {
    let drops = Cell::new(0);
    let mut arena = Arena::new();
    arena.alloc(Counted(&drops))?;
    drop(arena.local().boxed(Counted(&drops))?);
    assert_eq!(drops.get(), 1);
    let kept = ArenaBox::into_inner(arena.boxed(Counted(&drops))?);
    assert_eq!(drops.get(), 1);
    drop(kept);
    assert_eq!(drops.get(), 2);
    let _ = ArenaBox::leak(arena.boxed(Counted(&drops))?);
    arena.reset();
    assert_eq!(drops.get(), 2);
    let mut boxed = arena.boxed(vec![1, 2])?;
    boxed.push(3);
    assert_eq!(format!("{boxed:?}"), "[1, 2, 3]");
    Ok(())
}

#[test]
fn a_slice_whose_making_panics_is_dropped() {
    let drops = Cell::new(0);
    let arena = Arena::new();
    let made = catch_unwind(AssertUnwindSafe(|| {
        let make = |index| {
            if index == 7 {
                panic!("the eighth")
            } else {
                Counted(&drops)
            }
        };
        arena.alloc_slice_with(10, make).map(|_| ())
    }));
    assert!(made.is_err());
    assert_eq!(drops.get(), 7);
    let made = catch_unwind(AssertUnwindSafe(|| {
        let make = (0..10).map(|index| {
            if index == 5 {
                panic!("the sixth")
            } else {
                Counted(&drops)
            }
        });
        arena.alloc_iter(make).map(|_| ())
    }));
    assert!(made.is_err());
    assert_eq!(drops.get(), 12);
}

#[test]
fn an_iterator_may_allocate_from_the_same_arena() -> Result<(), ArenaError> {
    let arena = Arena::new();
    let local = arena.local();
    let nested = local.alloc_iter((0..100_usize).map(|len| &*local.alloc_slice_with(len, |_| len).expect("room")))?;
    let shared = arena.alloc_iter((0..100_usize).map(|len| &*arena.alloc_slice_with(len, |_| len).expect("room")))?;
    for (len, (one, other)) in nested.iter().zip(shared.iter()).enumerate() {
        assert!(one.len() == len && one.iter().all(|&item| item == len) && one == other);
    }
    Ok(())
}

#[test]
fn a_display_that_fails_panics_as_in_format() -> Result<(), ArenaError> {
    struct Fails;
    impl std::fmt::Display for Fails {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("so far")?;
            Err(std::fmt::Error)
        }
    }
    let arena = Arena::new();
    let told = catch_unwind(AssertUnwindSafe(|| arena.alloc_fmt(format_args!("<{Fails}>")).is_ok()));
    assert!(told.is_err());
    let told = catch_unwind(|| arena.alloc_str_with(|_| Err(std::fmt::Error)).is_ok());
    assert!(told.is_err());
    assert_eq!(arena.alloc_fmt(format_args!("{}", "as before"))?, "as before");
    let full = Arena::with_config_in(ArenaConfig::new().limit(0), heap())?;
    assert_eq!(
        full.alloc_fmt(format_args!("{}", 17)).expect_err("no room").reason(),
        Reason::Limit
    );
    Ok(())
}

/// It grows around what is allocated between its steps; and it is whole, or there is none, whatever its maker says.
#[test]
fn text_is_made_in_steps() -> Result<(), ArenaError> {
    let arena = Arena::with_config_in(ArenaConfig::new().limit(64 << 10), heap())?;
    let mut beside = Vec::new();
    let text = arena.alloc_str_with(|out| {
        for step in 0..1000 {
            if step % 100 == 0 {
                beside.push(arena.alloc(step).expect("room"));
            }
            write!(out, "{step},")?;
        }
        Ok(())
    })?;
    assert_eq!(*text, (0..1000).map(|step| format!("{step},")).collect::<String>());
    assert!(beside.iter().zip(0..).all(|(&&mut step, index)| step == index * 100));
    for said in [Ok(()), Err(std::fmt::Error)] {
        let made = arena.alloc_str_with(|out| {
            while out.write_str("as long as there is room").is_ok() {}
            _ = out.write_char('.');
            said
        });
        assert_eq!(made.expect_err("no end").reason(), Reason::Limit);
    }
    Ok(())
}

#[test]
fn all_threads_get_memory_of_their_own() {
    let mut arena = Arena::with_config(ArenaConfig::new().slab(64 << 10)).expect("an arena");
    for round in 0..5 {
        let addresses: Vec<Vec<usize>> = std::thread::scope(|scope| {
            let arena = &arena;
            let work = |thread: usize| {
                move || {
                    let mut local = arena.local();
                    let mut kept: Vec<&mut [usize]> = Vec::new();
                    for index in 0..2000 {
                        let len = 1 + (index * 7 + thread) % 50;
                        kept.push(arena.alloc_slice_with(len, |_| thread).expect("room"));
                        kept.push(local.alloc_slice_with(len, |_| thread).expect("room"));
                        local.scoped(|scope| {
                            let inside = scope.alloc_slice_with(3 * len, |_| thread).expect("room");
                            assert!(inside.iter().all(|&word| word == thread));
                        });
                    }
                    assert!(kept.iter().all(|slice| slice.iter().all(|&word| word == thread)));
                    kept.iter().flat_map(|slice| slice.iter().map(address)).collect()
                }
            };
            let threads: Vec<_> = (0..4).map(|thread| scope.spawn(work(thread))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("no panic"))
                .collect()
        });
        let all: HashSet<usize> = addresses.iter().flatten().copied().collect();
        assert_eq!(
            all.len(),
            addresses.iter().map(Vec::len).sum::<usize>(),
            "round {round}"
        );
        arena.reset();
    }
}

#[test]
fn an_arena_stands_on_what_leads_to_a_heap() -> Result<(), ArenaError> {
    let lent = heap();
    Arena::new_in(&lent).alloc(1)?;
    Arena::new_in(heap()).alloc(1)?;
    Arena::new_in(Box::new(heap())).alloc(1)?;
    let shared = Arc::new(heap());
    let arena = Arena::new_in(Arc::clone(&shared));
    std::thread::scope(|scope| scope.spawn(|| arena.alloc(1).map(|_| ())).join().expect("no panic"))?;
    drop(arena);
    assert_eq!((shared.stats().in_use.0, lent.stats().in_use.0), (0, 0));
    let bytes: &'static mut [MaybeUninit<u8>] = Box::leak(Box::new_uninit_slice(1 << 20));
    let region = PageHeap::new(Region::from_static(bytes), Config::new(1 << 20)).expect("a heap");
    let arena = Arena::new_in(region);
    assert_eq!(arena.alloc_str("no system")?, "no system");
    assert!(ProcessHeap::get().is_some());
    Ok(())
}

#[test]
fn slabs_may_be_whole_huge_pages() -> Result<(), ArenaError> {
    const HUGE: usize = 2 << 20;
    let heap = heap();
    let arena = Arena::with_config_in(ArenaConfig::new().whole_huge_pages(true), &heap)?;
    let first = address(arena.alloc(1_u64)?);
    assert!(first.is_multiple_of(HUGE));
    assert_eq!(arena.stats().reserved, HUGE);
    let large = address(&arena.alloc_uninit_slice::<u8>(3 * HUGE)?[0]);
    assert!(large.is_multiple_of(HUGE));
    let page = heap.page_bytes();
    assert_eq!(arena.stats().reserved, 4 * HUGE + page, "a page for its foot");
    // So there is room for it within a limit of half a huge page more.
    let limited = || ArenaConfig::new().whole_huge_pages(true).limit(3 << 20);
    let tight = Arena::with_config_in(limited(), &heap)?;
    let pool = Pool::with_config_in(limited(), &heap)?;
    assert!(address(&tight.alloc_uninit_slice::<u8>(HUGE)?[0]).is_multiple_of(HUGE));
    let object = pool.alloc_uninit_slice::<u8>(HUGE - 8)?;
    assert!(address(&object[0]).is_multiple_of(HUGE));
    assert_eq!(
        (tight.stats().reserved, pool.stats().reserved),
        (HUGE + page, HUGE + page)
    );
    // What does more than fill them gets whole ones, as ever.
    arena.alloc_uninit_slice::<u8>(HUGE + 16)?;
    assert_eq!(arena.stats().reserved, 6 * HUGE + page);
    Ok(())
}

#[test]
fn arenas_are_shared_and_handles_are_sent() {
    fn shared<T: Send + Sync>() {}
    fn sent<T: Send>() {}
    shared::<Arena>();
    shared::<Arena<PageHeap<System>>>();
    shared::<Pool>();
    sent::<Local<'_>>();
    shared::<ArenaError>();
    shared::<ArenaBox<'_, u8>>();
}
