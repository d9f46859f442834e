//! Collections in arenas, by `allocator-api2` of two versions.

use pageheap::arena::{Arena, ArenaConfig, ArenaError, Pool};

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
