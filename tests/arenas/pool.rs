//! [`Pool`] and its handles.

use std::collections::HashSet;

use pageheap::arena::{ArenaConfig, ArenaError, ArenaStats, Handle, Pool, Reason};
use pageheap::source::System;
use pageheap::{Config, PageHeap};

use super::common::addresses;

fn heap() -> PageHeap<System> {
    PageHeap::new(System, Config::new(addresses(1 << 30))).expect("a heap")
}

#[test]
fn a_pool_keeps_its_slabs_and_returns_what_is_large() -> Result<(), ArenaError> {
    let heap = heap();
    let mut pool = Pool::with_config_in(ArenaConfig::new().slab(64 << 10), &heap)?;
    for _ in 0..100 {
        pool.alloc([0_u8; 6144])?;
    }
    let slabs = pool.stats();
    assert_eq!((slabs.slabs, slabs.reserved), (10, 10 * (64 << 10)), "ten to a slab");
    pool.alloc([0_u8; 40 << 10])?;
    pool.alloc_slice_with(1 << 20, |_| 0_u8)?;
    assert_eq!(pool.stats().slabs, 12);
    pool.reset();
    assert_eq!((pool.stats().slabs, pool.stats().allocated), (10, 0));
    for _ in 0..100 {
        pool.alloc([0_u8; 6144])?;
    }
    assert_eq!(pool.stats().slabs, 10);
    drop(pool);
    assert_eq!(heap.stats().in_use.0, 0);
    Ok(())
}

#[test]
fn the_limit_holds_for_slabs_and_large_blocks_together() -> Result<(), ArenaError> {
    let pool = Pool::with_config_in(ArenaConfig::new().limit(1 << 20).slab(256 << 10), heap())?;
    pool.alloc(0_u8)?;
    pool.alloc_uninit_slice::<u64>(700 << 7)?;
    let error = pool.alloc_uninit_slice::<u64>(300 << 7).expect_err("beyond the limit");
    assert_eq!(
        (error.reason(), error.left()),
        (Reason::Limit, (1 << 20) - (256 << 10) - (704 << 10))
    );
    assert_eq!(pool.remaining(), error.left());
    Ok(())
}

/// Regression: a pool that was told to take more than its heap can have took one slab after another until nothing was
/// left, and wrote to each, before it was refused.
#[test]
fn what_the_heap_can_never_have_is_refused_before_anything_is_taken() -> Result<(), ArenaError> {
    const MOST: usize = 1 << 20;
    let heap = PageHeap::new(System, Config::new(MOST).limit_bytes(MOST)).expect("a heap");
    let config = ArenaConfig::new().slab(8 << 10);
    let refused = Pool::with_config_in(config.prealloc(MOST + 1), &heap);
    let error = refused.expect_err("a byte more than there is");
    assert_eq!((error.reason(), error.asked()), (Reason::NoPages, MOST + 1));
    assert_eq!(heap.stats().grown.0, 0, "nothing was taken on the way");
    let mut pool = Pool::with_config_in(config, &heap)?;
    pool.alloc(0_u8)?;
    assert!(pool.reserve(MOST + 1).is_err());
    assert_eq!(pool.stats().slabs, 1);
    pool.reserve(MOST)?;
    assert_eq!(pool.stats().reserved, MOST, "all there is");
    Ok(())
}

/// Regression: a pool with slabs of 1 MiB and a lower limit was refused its whole preallocation.
#[test]
fn a_limit_below_a_slab_leaves_room_for_what_is_taken_at_once() -> Result<(), ArenaError> {
    let heap = heap();
    let config = ArenaConfig::new().limit(512 << 10).prealloc(256 << 10);
    let pool = Pool::with_config_in(config, &heap)?;
    assert!(
        (256 << 10..=512 << 10).contains(&pool.stats().reserved),
        "{}",
        pool.stats()
    );
    pool.alloc([0_u8; 100_000])?;
    let refused = Pool::with_config_in(config.prealloc(600 << 10), &heap).expect_err("more than the limit");
    assert_eq!(refused.reason(), Reason::Limit);
    Ok(())
}

#[test]
fn a_handle_is_good_until_the_reset() -> Result<(), ArenaError> {
    let (mut pool, other) = (Pool::new(), Pool::new());
    let number = pool.insert(17_u64)?;
    let words = pool.insert_slice(&[1_u32, 2, 3])?;
    let text = pool.insert_str("text")?;
    *pool.get_mut(number).expect("good") += 1;
    pool.get_mut(text).expect("good").make_ascii_uppercase();
    assert_eq!(
        (pool.get(number), pool.get(words), pool.get(text)),
        (Ok(&18), Ok(&[1, 2, 3][..]), Ok("TEXT"))
    );
    assert!(other.get(number).is_err(), "another pool's");
    assert_eq!(number, Clone::clone(&number));
    assert!(HashSet::from([number]).contains(&number));
    pool.reset();
    let again = pool.insert(19_u64)?;
    assert_ne!(number, again);
    let error = pool.get(number).expect_err("stale");
    assert!(error.to_string().contains("has been reset since"), "{error}");
    assert!(pool.get(words).is_err() && pool.get_mut(text).is_err());
    assert_eq!(pool.get(again), Ok(&19));
    Ok(())
}

#[test]
fn handles_go_where_their_values_may() {
    fn shared<T: Send + Sync>() {}
    shared::<Handle<u64>>();
    shared::<Handle<[String]>>();
}

#[test]
fn handles_are_as_small_as_they_say() {
    let sizes = [size_of::<Handle<u64>>(), size_of::<Handle<str>>()];
    if cfg!(target_pointer_width = "64") {
        assert_eq!(sizes, [16, 24]);
    } else {
        // 12 for one word and 16 for two, or both 16 where numbers of 64 bits are aligned to 8 bytes.
        assert!(sizes.iter().all(|&size| size <= 16), "{sizes:?}");
    }
}

#[test]
fn handles_of_values_of_size_zero_are_equal() -> Result<(), ArenaError> {
    let mut pool = Pool::new();
    let old = pool.insert(())?;
    assert_eq!(old, pool.insert(())?);
    pool.reset();
    assert_ne!(old, pool.insert(())?);
    Ok(())
}

#[test]
fn many_threads_fill_one_pool() -> Result<(), ArenaError> {
    let mut pool = Pool::with_config(ArenaConfig::new().slab(128 << 10).limit(256 << 20))?;
    for round in 0..5_u64 {
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let pool = &pool;
                scope.spawn(move || {
                    let handles: Vec<_> = (0..2000).map(|index| pool.insert([thread, index, round])).collect();
                    let large = pool.alloc_slice_with(100_000, |_| thread as u8).expect("room");
                    for (index, handle) in handles.into_iter().enumerate() {
                        let handle = handle.expect("room");
                        assert_eq!(pool.get(handle), Ok(&[thread, index as u64, round]));
                    }
                    assert!(large.iter().all(|&byte| byte == thread as u8));
                });
            }
        });
        pool.reset();
    }
    Ok(())
}

/// As JSON and as Prometheus text, the same figures by the same names.
#[test]
fn machines_can_read_statistics() {
    let limited = Pool::with_config(ArenaConfig::new().limit(4 << 20)).unwrap();
    limited.alloc([1_u8; 1000]).unwrap();
    for (pool, count) in [(&limited, 6), (&Pool::new(), 5)] {
        let (stats, mut json, mut text) = (pool.stats(), String::new(), String::new());
        stats.json(&mut json).unwrap();
        stats.prometheus_as("requests", &mut text).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(
            (json.as_object().unwrap().len(), text.lines().count()),
            (count, 3 * count)
        );
        assert_eq!(json["reserved_bytes"], stats.reserved);
        assert_eq!(json["allocated_bytes"], stats.allocated);
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.strip_prefix("requests_").unwrap().split_once(' ').unwrap();
            assert_eq!(json[name].to_string(), value, "{name}");
        }
    }
}

/// Each metric once, with a line for each pool that has it: the label tells them apart.
#[test]
fn pools_share_their_metrics_and_a_label_tells_them_apart() {
    let limited = Pool::with_config(ArenaConfig::new().limit(4 << 20)).unwrap();
    let free = Pool::new();
    limited.alloc([1_u8; 1000]).unwrap();
    let mut text = String::new();
    // One without a limit comes first: the other's is there all the same.
    let pools = [("free \"1\"", free.stats()), ("limited", limited.stats())];
    ArenaStats::prometheus_of("pool", "name", &pools, &mut text).unwrap();
    for (label, stats, count) in [(r#"free \"1\""#, free.stats(), 5), ("limited", limited.stats(), 6)] {
        let figures: Vec<_> = stats.figures().collect();
        assert_eq!(figures.len(), count);
        for figure in figures {
            let (name, help, value) = (figure.name, figure.help, figure.value);
            let head = format!("# HELP pool_{name} {help}.\n# TYPE pool_{name} gauge\n");
            let line = format!("\npool_{name}{{name=\"{label}\"}} {value}\n");
            assert_eq!(
                (text.matches(&head).count(), text.matches(&line).count()),
                (1, 1),
                "{text}"
            );
        }
    }
    assert_eq!(text.lines().count(), 2 * 6 + 5 + 6, "{text}");
}
