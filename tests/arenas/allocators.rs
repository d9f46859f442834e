//! Collections in arenas, through two versions of `allocator-api2`.

use std::alloc::Layout;

use pageheap::arena::{Arena, ArenaConfig, ArenaError, Pool, Reason};

/// What each version of the trait must do, on every kind of arena.
macro_rules! arenas_allocate {
    ($test:ident, $version:ident) => {
        mod $test {
            use $version::alloc::Allocator;
            use $version::{boxed::Box, vec::Vec};

            use super::*;

            fn collections(arena: impl Allocator + Copy) {
                let layout = |size: usize, align: usize| Layout::from_size_align(size, align).expect("a layout");
                let mut numbers = Vec::new_in(arena);
                numbers.push(0_u64);
                let start = numbers.as_ptr();
                (1..100).for_each(|number| numbers.push(number));
                assert_eq!(numbers.as_ptr(), start, "the last grows in place");
                let word = Box::new_in(String::from("word"), arena);
                numbers.extend(100..3000);
                assert_ne!(numbers.as_ptr(), start, "and is moved when it is not");
                numbers.truncate(10);
                numbers.shrink_to_fit();
                assert!(numbers.iter().copied().eq(0..10) && word.as_str() == "word");
                let over = arena.allocate_zeroed(layout(100, 512)).expect("room");
                assert!(over.len() >= 100 && over.addr().get().is_multiple_of(512));
                // SAFETY: allocated here, this long, and zeroed; grown, shrunk and freed with its current layout, and
                // not used again.
                unsafe {
                    assert!(over.as_ref()[..100].iter().all(|&byte| byte == 0));
                    over.cast::<u8>().write_bytes(7, 100);
                    let grown = arena
                        .grow_zeroed(over.cast(), layout(100, 512), layout(300, 1024))
                        .expect("room");
                    assert!(grown.addr().get().is_multiple_of(1024));
                    let bytes = &grown.as_ref()[..300];
                    assert!(bytes[..100].iter().all(|&byte| byte == 7) && bytes[100..].iter().all(|&byte| byte == 0));
                    let shrunk = arena
                        .shrink(grown.cast(), layout(300, 1024), layout(8, 8))
                        .expect("room");
                    assert_eq!(shrunk.cast::<u64>().read(), 0x0707_0707_0707_0707);
                    arena.deallocate(shrunk.cast(), layout(8, 8));
                }
                // What must be aligned to more than it is moves there, even to become shorter.
                for size in [48, 16] {
                    let blocks = || arena.allocate(layout(24, 8)).expect("room").cast::<u8>();
                    let mut blocks = std::iter::repeat_with(blocks);
                    let block = blocks.find(|block| !block.addr().get().is_multiple_of(4096));
                    let block = block.expect("one of two");
                    // SAFETY: allocated here, this long; grown or shrunk with its layout, and not used again.
                    let moved = unsafe {
                        block.write_bytes(7, 24);
                        if size > 24 {
                            arena.grow(block, layout(24, 8), layout(size, 4096))
                        } else {
                            arena.shrink(block, layout(24, 8), layout(size, 4096))
                        }
                    };
                    let moved = moved.expect("room");
                    assert!(moved.len() >= size && moved.addr().get().is_multiple_of(4096));
                    // SAFETY: as long as this, and so many bytes were written.
                    let kept = unsafe { &moved.as_ref()[..size.min(24)] };
                    assert!(kept.iter().all(|&byte| byte == 7));
                }
                let nothing = arena.allocate(layout(0, 64)).expect("takes nothing");
                assert!(nothing.is_empty() && nothing.addr().get().is_multiple_of(64));
                assert!(arena.allocate(layout(1 << 30, 1)).is_err(), "more than the limit");
            }

            #[test]
            fn of_all_kinds() -> Result<(), ArenaError> {
                const CONFIG: ArenaConfig = ArenaConfig::new().limit(4 << 20).slab(1 << 20);
                let (arena, pool) = (Arena::with_config(CONFIG)?, Pool::with_config(CONFIG)?);
                collections(&arena);
                collections(&pool);
                assert!(arena.stats().peak > 24_000 && pool.stats().peak > 24_000);
                assert_eq!(
                    pool.alloc_uninit_slice::<u8>(1 << 30)
                        .map(|_| ())
                        .unwrap_err()
                        .reason(),
                    Reason::Limit
                );
                // A local allocates from pieces. A block too large for one gets a piece of its own and is moved there.
                let mut local = arena.local();
                collections(&local);
                local.scoped(|mut scope| {
                    collections(&scope);
                    scope.scoped(|inner| collections(&inner));
                });
                collections(&local);
                Ok(())
            }
        }
    };
}

arenas_allocate!(of_version_02, allocator_api2_02);
arenas_allocate!(of_version_04, allocator_api2_04);

#[test]
fn vectors_of_both_versions() -> Result<(), ArenaError> {
    let arena = Arena::with_config(ArenaConfig::new().slab(1 << 20))?;
    let mut old = allocator_api2_02::vec::Vec::new_in(&arena);
    (0..10_000).for_each(|number| old.push(number));
    let mut new = allocator_api2_04::vec::Vec::new_in(&arena);
    (0..10_000).for_each(|number| new.push(number));
    old.extend_from_slice(&[1, 2, 3]);
    old.truncate(10_001);
    old.shrink_to_fit();
    assert!(old.iter().copied().eq((0..10_000).chain([1])));
    assert!(new.iter().copied().eq(0..10_000));
    Ok(())
}

#[test]
fn a_vector_that_is_alone_grows_in_place_and_gives_all_back() -> Result<(), ArenaError> {
    let pool = Pool::new();
    let mut numbers = allocator_api2_02::vec::Vec::new_in(&pool);
    numbers.push(0_u64);
    let start = numbers.as_ptr();
    (1..10_000).for_each(|number| numbers.push(number));
    assert_eq!(numbers.as_ptr(), start);
    drop(numbers);
    assert_eq!(pool.stats().allocated, 0);
    Ok(())
}

#[test]
fn so_does_one_of_a_local_that_is_alone() -> Result<(), ArenaError> {
    use allocator_api2_04::{alloc::Allocator, vec::Vec};

    let arena = Arena::with_config(ArenaConfig::new().slab(1 << 20).limit(1 << 20))?;
    let mut local = arena.local();
    /// Every growth must be in place.
    fn grow(numbers: &mut Vec<u64, impl Allocator>, most: u64) {
        numbers.push(0);
        let start = numbers.as_ptr();
        (1..most).for_each(|number| numbers.push(number));
        assert!(numbers.as_ptr() == start && numbers.iter().copied().eq(0..most));
    }
    let mut numbers = Vec::new_in(&local);
    grow(&mut numbers, 10_000);
    assert!(
        numbers.try_reserve(1 << 20).is_err(),
        "the slab has no such room, nor has the limit"
    );
    drop(numbers);
    local.scoped(|scope| grow(&mut Vec::new_in(&scope), 50_000));
    // The next scope reuses the same memory.
    local.scoped(|scope| grow(&mut Vec::new_in(&scope), 50_000));
    // If the vector is not last in its arena, it moves when it grows.
    let mut numbers = Vec::new_in(&local);
    numbers.push(0_u64);
    let behind = arena.alloc(7_u64)?;
    numbers.extend(1..60_000);
    assert!(numbers.iter().copied().eq(0..60_000) && *behind == 7);
    Ok(())
}

#[test]
fn elements_of_a_vector_in_a_scope_borrow_from_outside() {
    let (arena, text) = (Arena::new(), String::from("a b c"));
    arena.local().scoped(|scope| {
        let mut words = allocator_api2_04::vec::Vec::new_in(&scope);
        words.extend(text.split(' '));
        assert_eq!(words.as_slice(), ["a", "b", "c"]);
    });
}

#[test]
fn boxes_in_scopes() -> Result<(), ArenaError> {
    let arena = Arena::new();
    let mut local = arena.local();
    let length = local.scoped(|scope| {
        let mut words = allocator_api2_04::vec::Vec::new_in(&scope);
        words.push(allocator_api2_04::boxed::Box::new_in(String::from("word"), &scope));
        words.iter().map(|word| word.len()).sum::<usize>()
    });
    assert_eq!(length, 4);
    let boxed = allocator_api2_02::boxed::Box::new_in([0_u8; 100_000], &local);
    assert_eq!(boxed.len(), 100_000);
    Ok(())
}
