//! An arena whose backing was full asked it 17 times for each object, from 2 MiB down to 40 bytes of one page, and a
//! `Local` 53 times. Then it was asked too seldom: not for all blocks that would have done.

use std::alloc::Layout;
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use pageheap::arena::{Arena, ArenaConfig, Backing, Block, FreeList, Reason};

use super::gather::Few;

/// A backing that also refuses what `grants`, told the bytes and the alignment, does not grant.
struct Picky<F> {
    few: Few,
    grants: F,
}

// SAFETY: as for the other.
unsafe impl<F: Fn(usize, usize) -> bool> Backing for Picky<F> {
    fn page_bytes(&self) -> usize {
        self.few.page_bytes()
    }

    fn take(&self, bytes: usize, align: usize) -> Option<Block> {
        (self.grants)(bytes, align)
            .then(|| self.few.take(bytes, align))
            .flatten()
    }

    unsafe fn give(&self, memory: NonNull<[u8]>) {
        // SAFETY: passed on.
        unsafe { self.few.give(memory) };
    }
}

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

/// As long a block as one that was refused, but aligned to less, was not asked for.
/// For a longer one it went back to the backing, which was not even asked first.
#[test]
fn what_an_arena_keeps_stays_if_a_shorter_piece_will_do() {
    let backing = with_room(4 << 20);
    let mut arena = Arena::with_config_in(ArenaConfig::new().slab(4096), &backing).unwrap();
    assert!(arena.alloc(1_u8).is_ok() && arena.alloc_uninit_slice::<u8>(100 << 10).is_ok());
    backing.room.store(0, Ordering::Relaxed);
    assert!(arena.alloc([0_u8; 8000]).is_err());
    backing.room.store(4 << 20, Ordering::Relaxed);
    arena.reset();
    let room = || backing.room.load(Ordering::Relaxed);
    let before = room();
    assert!(arena.local().alloc([0_u64; 2]).is_ok());
    assert_eq!(room(), before);
}

#[test]
fn whole_huge_pages_may_be_pages_if_there_are_no_others() {
    let backing = Picky {
        few: with_room(16 << 20),
        grants: |_, align| align <= 4096,
    };
    let config = ArenaConfig::new().whole_huge_pages(true);
    let arena = Arena::with_config_in(config.prealloc((2 << 20) - 1), &backing).unwrap();
    assert_eq!(arena.stats().reserved, 2 << 20);
    let arena = Arena::with_config_in(config.slab(4 << 20), &backing).unwrap();
    arena.alloc_uninit_slice::<u8>((2 << 20) - 64).unwrap();
    assert_eq!(arena.stats().reserved, 2 << 20);
}

/// Two requests were rounded up to more than the limit. The third, a page more than the object, was not made.
#[test]
fn a_limit_has_room_for_an_object_of_a_huge_page_and_its_foot() {
    let config = ArenaConfig::new().whole_huge_pages(true).limit(3 << 20);
    let arena = Arena::with_config(config.slab((4 << 20) + (8 << 10))).unwrap();
    arena.alloc_uninit_slice::<u8>(2 << 20).unwrap();
    assert_eq!(arena.stats().reserved, (2 << 20) + (8 << 10));
}

/// Two arenas that looked whether the last page is there could each find it with the other, and both gave up.
#[test]
fn the_last_page_is_asked_for_again_if_it_was_there_a_moment_ago() {
    for (missed, enough) in [(0, true), (1, true), (3, true), (usize::MAX, false)] {
        // How often a page was asked for, once that counts.
        let pages = Cell::new(None);
        let backing = Picky {
            few: with_room(4 << 20),
            // The first request for a page is granted; then so many are not.
            grants: |bytes, _| {
                let before = pages.get().filter(|_| bytes == 4096);
                pages.set(before.map_or(pages.get(), |count| Some(count + 1)));
                before.is_none_or(|count| count == 0 || count > missed)
            },
        };
        let last_page = |take: &dyn Fn() -> bool| {
            pages.set(None);
            while take() {}
            assert_eq!(backing.few.room.load(Ordering::Relaxed), 0);
            backing.few.room.store(4096, Ordering::Relaxed);
            pages.set(Some(0));
            assert_eq!(take(), enough, "missed {missed} times");
            assert!(pages.get() <= Some(5), "not for ever");
            pages.set(None);
            while take() {}
            backing.few.room.store(4 << 20, Ordering::Relaxed);
        };
        let arena = Arena::new_in(&backing);
        last_page(&|| arena.alloc(0_u64).is_ok());
        let list = FreeList::new_in(Layout::new::<[u64; 8]>(), &backing).unwrap();
        last_page(&|| list.allocate().is_ok());
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
