//! An arena whose backing was full asked it 17 times for each object, from 2 MiB down to 40 bytes of one page, and a
//! `Local` 53 times.

use std::sync::atomic::Ordering;

use pageheap::arena::{Arena, ArenaConfig, Reason};

use super::gather::Few;

/// A backing with so much room.
fn with_room(bytes: usize) -> Few {
    let backing = Few::default();
    backing.room.store(bytes, Ordering::Relaxed);
    backing
}

/// How often the backing is asked while `work` runs.
fn asked(backing: &Few, work: impl FnOnce()) -> usize {
    let before = backing.asked.load(Ordering::Relaxed);
    work();
    backing.asked.load(Ordering::Relaxed) - before
}

#[test]
fn an_arena_asks_a_full_backing_once_for_each_object() {
    let backing = with_room(4 << 20);
    let arena = Arena::new_in(&backing);
    let fill = || while arena.alloc(0_u64).is_ok() {};
    let refused = || assert_eq!(arena.alloc(0_u64).unwrap_err().reason(), Reason::NoPages);
    for _ in 0..2 {
        // All lengths once, from 2 MiB down to a page, when it is refused for the first time.
        fill();
        assert_eq!(backing.room.load(Ordering::Relaxed), 0);
        for _ in 0..3 {
            assert_eq!(asked(&backing, refused), 1);
        }
        assert_eq!(asked(&backing, || assert!(arena.alloc([0_u8; 5000]).is_err())), 1);
        assert_eq!(asked(&backing, || assert!(arena.alloc([0_u8; 100_000]).is_err())), 1);
        // Room again: the arena grows at once, and by a slab as long as ever.
        backing.room.store(4 << 20, Ordering::Relaxed);
        let asked = asked(&backing, || {
            (0..200_000).for_each(|_| assert!(arena.alloc(0_u64).is_ok()))
        });
        assert_eq!(asked, 2, "a page, which goes back, and 2 MiB");
    }
}

#[test]
fn an_arena_asks_for_no_length_twice() {
    for (bytes, least) in [(8, 1), (5000, 2), (60_000, 15)] {
        let backing = with_room(4 << 20);
        let arena = Arena::new_in(&backing);
        (0..16).for_each(|_| assert!(arena.alloc_uninit_slice::<u8>(250 << 10).is_ok()));
        backing.room.store(0, Ordering::Relaxed);
        let lengths = std::iter::successors(Some(512), |pages| Some(pages / 2)).take_while(|&pages| pages > least);
        let asked = asked(&backing, || {
            assert!(arena.alloc_uninit_slice::<u8>(bytes).is_err());
        });
        assert_eq!(asked, lengths.count() + 1, "{bytes}");
    }
}

#[test]
fn a_local_asks_a_full_backing_once_for_each_object() {
    let backing = with_room(4 << 20);
    let arena = Arena::new_in(&backing);
    let local = arena.local();
    while local.alloc([0_u64; 2]).is_ok() {}
    for bytes in [8, 100, 3000, 10_000] {
        let refused = || assert!(local.alloc_uninit_slice::<u8>(bytes).is_err());
        assert_eq!(asked(&backing, refused), 1, "{bytes}");
    }
    // Room again.
    backing.room.store(4 << 20, Ordering::Relaxed);
    let asked = asked(&backing, || {
        (0..100_000).for_each(|_| assert!(local.alloc([0_u64; 2]).is_ok()))
    });
    assert!(asked <= 2, "asked {asked} times");
}

/// Where pieces are too long for slabs, each would be a block of its own.
#[test]
fn a_local_with_short_slabs_asks_a_full_backing_once_for_each_object() {
    for slab in [4096, 64 << 10, 128 << 10] {
        let backing = with_room(4 << 20);
        let arena = Arena::with_config_in(ArenaConfig::new().slab(slab), &backing).unwrap();
        let local = arena.local();
        while local.alloc([0_u64; 2]).is_ok() {}
        for bytes in [8, 100, 1000, 3000, 10_000] {
            let refused = || assert!(local.alloc_uninit_slice::<u8>(bytes).is_err());
            assert_eq!(asked(&backing, refused), 1, "{bytes} bytes, slabs of {slab}");
        }
        // Room again, for pieces of all lengths.
        backing.room.store(4 << 20, Ordering::Relaxed);
        let objects = (0..).take_while(|_| local.alloc([0_u64; 2]).is_ok()).count();
        assert!(objects > 240_000, "{objects} objects, slabs of {slab}");
    }
}

/// All of it, however small: longer pieces are refused first.
#[test]
fn a_local_uses_the_last_pages_of_a_backing() {
    let backing = with_room(4 << 20);
    let arena = Arena::new_in(&backing);
    let local = arena.local();
    while local.alloc([0_u64; 2]).is_ok() {}
    backing.room.store(40 << 10, Ordering::Relaxed);
    let mut objects = 0;
    let asked = asked(&backing, || {
        while local.alloc([0_u64; 2]).is_ok() {
            objects += 1;
        }
    });
    assert!(objects > 2400 && asked <= 40, "{objects} objects, asked {asked} times");
}
