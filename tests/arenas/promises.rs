//! What all four types promise, tested on each: `Arena`, `Pool`, `FreeList`, `ShardedFreeList`.

use std::alloc::Layout;
use std::cell::Cell;
use std::ptr::NonNull;

use pageheap::arena::{Arena, ArenaConfig, ArenaError, ArenaStats, FreeList, Pool, Reason, ShardedFreeList};
use pageheap::source::System;
use pageheap::{Config, PageCount, PageHeap};

use super::common::addresses;

const PAGE: usize = 8192;
const HUGE: usize = 2 << 20;

pub type Heap = PageHeap<System>;

/// One of the four types, on a borrowed heap.
trait Family<'h>: Sized + Send + Sync {
    /// Made for objects of `layout`; the bump arenas accept any layout.
    fn make(layout: Layout, config: ArenaConfig, heap: &'h Heap) -> Result<Self, ArenaError>;
    /// Allocates the layout that it was made for.
    fn bytes(&self) -> Result<NonNull<[u8]>, ArenaError>;
    fn counts(&self) -> ArenaStats;
    fn forget_all(&mut self);
    /// Allocates a value and forgets the reference, then a box, and drops it. Uses the typed interface.
    fn put<T>(&self, value: T, boxed: T) -> Result<(), ArenaError>;
}

macro_rules! bump_family {
    ($($arena:ident),*) => {$(
        impl<'h> Family<'h> for (Layout, $arena<&'h Heap>) {
            fn make(layout: Layout, config: ArenaConfig, heap: &'h Heap) -> Result<Self, ArenaError> {
                Ok((layout, $arena::with_config_in(config, heap)?))
            }

            fn bytes(&self) -> Result<NonNull<[u8]>, ArenaError> {
                self.1.allocate(self.0)
            }

            fn counts(&self) -> ArenaStats {
                self.1.stats()
            }

            fn forget_all(&mut self) {
                self.1.reset();
            }

            fn put<T>(&self, value: T, boxed: T) -> Result<(), ArenaError> {
                self.1.alloc(value)?;
                self.1.boxed(boxed).map(drop)
            }
        }
    )*};
}

bump_family!(Arena, Pool);

macro_rules! list_family {
    ($($list:ident($($owners:literal)?)),*) => {$(
        impl<'h> Family<'h> for $list<&'h Heap> {
            fn make(layout: Layout, config: ArenaConfig, heap: &'h Heap) -> Result<Self, ArenaError> {
                $list::with_config_in(layout, $($owners,)? config, heap)
            }

            fn bytes(&self) -> Result<NonNull<[u8]>, ArenaError> {
                self.allocate()
            }

            fn counts(&self) -> ArenaStats {
                self.stats()
            }

            fn forget_all(&mut self) {
                self.reset();
            }

            fn put<T>(&self, value: T, boxed: T) -> Result<(), ArenaError> {
                std::mem::forget(self.boxed(value)?);
                self.boxed(boxed).map(drop)
            }
        }
    )*};
}

list_family!(FreeList(), ShardedFreeList(2));

type OfArena<'h> = (Layout, Arena<&'h Heap>);
type OfPool<'h> = (Layout, Pool<&'h Heap>);

/// One test per promise; each runs on all four types.
macro_rules! promises {
    ($($promise:ident),* $(,)?) => {$(
        #[test]
        fn $promise() {
            checks::$promise::<OfArena<'_>>(&heap(usize::MAX));
            checks::$promise::<OfPool<'_>>(&heap(usize::MAX));
            checks::$promise::<FreeList<&Heap>>(&heap(usize::MAX));
            checks::$promise::<ShardedFreeList<&Heap>>(&heap(usize::MAX));
        }
    )*};
}

promises!(
    pages_are_the_users_heaps_and_all_return_on_drop,
    the_limit_is_in_bytes_and_an_error_says_what_is_left,
    a_full_heap_is_told_from_a_limit,
    what_is_asked_for_at_once_is_there_or_nothing_is,
    huge_pages_are_whole,
    statistics_add_up,
    nothing_and_what_is_aligned_to_much_are_right,
    contents_are_dropped_by_boxes_only,
    all_threads_may_use_it,
);

/// Memory given back before the statistics are read still counts in the peak.
#[test]
fn statistics_remember_what_was_given_back() {
    const BYTES: usize = 500_000;
    // A slab large enough for the block, so that giving it back lowers the slab's end.
    let config = ArenaConfig::new().slab(1 << 20);
    let check = |stats: ArenaStats| {
        assert!(stats.allocated < 1000 && stats.reserved == 1 << 20, "{stats}");
        for noted in [stats.committed, stats.peak] {
            assert!((BYTES..BYTES + (64 << 10)).contains(&noted), "{stats}");
        }
    };
    macro_rules! fallen {
        ($($arena:ident),*) => {$({
            for rounds in 1..4 {
                let heap = heap(usize::MAX);
                let mut arena = $arena::with_config_in(config, &heap).unwrap();
                for _ in 0..rounds {
                    let memory = arena.allocate(layout(BYTES, 8)).unwrap();
                    // SAFETY: allocated here, and not used.
                    assert!(unsafe { arena.resize_in_place(memory, 0) });
                    // A smaller amount than before does not change the peak.
                    arena.alloc([0_u8; 100]).unwrap();
                    if rounds == 3 {
                        arena.reset();
                    }
                }
                check(arena.stats());
                arena.reset();
                check(arena.stats());
                // Later allocations are not added to the old peak.
                arena.alloc([0_u8; 200]).unwrap();
                arena.alloc_uninit_slice::<u8>(600_000).unwrap();
                assert!(arena.stats().peak < 610_000, "{}", arena.stats());
                arena.reset();
                arena.shrink_to(0);
                assert_eq!(arena.stats().committed, 0, "{}", arena.stats());
            }
        }
    )*};}
    fallen!(Arena, Pool);
    let heap = heap(usize::MAX);
    let arena = Arena::with_config_in(config, &heap).unwrap();
    let mut local = arena.local();
    local.scoped(|scope| (0..BYTES / 1000).for_each(|_| _ = scope.alloc([0_u8; 1000]).unwrap()));
    drop(local);
    check(arena.stats());
}

/// Memory allocated after the end has fallen did not coexist with what was there before, so the peak does not add the
/// two. Nor does it count a slab that has been given back.
#[test]
fn statistics_count_nothing_that_was_not_there() {
    let heap = heap(usize::MAX);
    let pool = Pool::new_in(&heap);
    let give_back = |pool: &Pool<&Heap>, memory: NonNull<[u8]>| {
        // SAFETY: allocated here by the callers below, and not used.
        assert!(unsafe { pool.resize_in_place(memory, 0) });
    };
    give_back(&pool, pool.allocate(layout(500_000, 8)).unwrap());
    // More than a slab: it gets its own block.
    pool.alloc_uninit_slice::<u8>(1_200_000).unwrap();
    assert_eq!(pool.stats().peak, 1_200_000);

    // A whole slab except its footer of four words. Behind eight bytes, two halves of this do not fit.
    let room = (64 << 10) - 4 * size_of::<usize>();
    let half = room / 2;
    let mut pool = Pool::with_config_in(ArenaConfig::new().slab(64 << 10), &heap).unwrap();
    pool.alloc_uninit_slice::<u8>(8).unwrap();
    pool.alloc_uninit_slice::<u8>(half).unwrap();
    let halves = [(); 2].map(|()| pool.allocate(layout(half, 8)).unwrap());
    halves.into_iter().rev().for_each(|half| give_back(&pool, half));
    pool.shrink_to(0);
    let stats = pool.stats();
    let expected = (64 << 10, 8 + half, 8 + half, 8 + half + room);
    assert_eq!(
        (stats.reserved, stats.committed, stats.allocated, stats.peak),
        expected,
        "{stats}"
    );
}

/// A heap of at most this many pages.
pub fn heap(pages: usize) -> Heap {
    let config = Config::new(addresses(256 << 20)).limit(PageCount(pages.min(1 << 20)));
    PageHeap::new(System, config).expect("a heap")
}

/// The same, leaked, so that it lives as long as the test process.
fn small(pages: usize) -> &'static Heap {
    Box::leak(Box::new(heap(pages)))
}

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).expect("a layout")
}

/// Allocates until refused. Returns the count and the error.
fn all<'h>(arena: &impl Family<'h>) -> (usize, ArenaError) {
    let mut count = 0;
    loop {
        match arena.bytes() {
            Ok(_) => count += 1,
            Err(error) => return (count, error),
        }
    }
}

mod checks {
    use super::*;

    pub(super) fn pages_are_the_users_heaps_and_all_return_on_drop<'h, F: Family<'h>>(heap: &'h Heap) {
        let mut arena = F::make(layout(3000, 8), ArenaConfig::new(), heap).unwrap();
        for _ in 0..2 {
            (0..100).for_each(|_| assert!(heap.page_of(arena.bytes().unwrap().cast().as_ptr()).is_some()));
            assert_eq!(heap.stats().in_use.0 * PAGE, arena.counts().reserved);
            arena.forget_all();
        }
        drop(arena);
        assert_eq!(heap.stats().in_use, PageCount(0));
    }

    pub(super) fn the_limit_is_in_bytes_and_an_error_says_what_is_left<'h, F: Family<'h>>(heap: &'h Heap) {
        // One byte less than 12 pages leaves 11 whole pages.
        for (limit, pages) in [(12 * PAGE, 12), (12 * PAGE - 1, 11), (12 * PAGE + 100, 12)] {
            let config = ArenaConfig::new().limit(limit).slab(PAGE);
            let mut arena = F::make(layout(1000, 8), config, heap).unwrap();
            let (count, error) = all(&arena);
            let stats = arena.counts();
            assert!(
                stats.reserved <= limit && stats.reserved > (pages - 1) * PAGE,
                "{stats}"
            );
            assert!((pages * 7 - 7..=pages * 8).contains(&count), "{count} in {pages} pages");
            assert_eq!((error.asked(), error.align()), (1000, 8));
            assert!(matches!(error.reason(), Reason::Limit | Reason::NoSlots), "{error}");
            assert_eq!((error.left(), stats.limit), (limit - stats.reserved, limit));
            let text = error.to_string();
            assert!(
                text.contains("1000 bytes aligned to 8") && text.contains("limit leaves"),
                "{text}"
            );
            // The arena is unchanged, and after a reset as good as new.
            assert_eq!(arena.counts(), stats);
            arena.forget_all();
            assert_eq!(all(&arena).0, count);
        }
    }

    pub(super) fn a_full_heap_is_told_from_a_limit<F: Family<'static>>(_: &Heap) {
        let heap = small(5);
        let arena = F::make(layout(1000, 8), ArenaConfig::new().slab(PAGE), heap).unwrap();
        let (count, error) = all(&arena);
        assert_eq!((error.reason(), error.left()), (Reason::NoPages, usize::MAX), "{count}");
        drop(arena);
        let config = ArenaConfig::new().slab(PAGE).limit(10 * PAGE);
        let arena = F::make(layout(1000, 8), config, heap).unwrap();
        let (_, error) = all(&arena);
        assert_eq!(
            (error.reason(), error.left()),
            (Reason::NoPages, 10 * PAGE - arena.counts().reserved)
        );
        assert!(error.to_string().contains("though the arena's limit leaves"), "{error}");
    }

    pub(super) fn what_is_asked_for_at_once_is_there_or_nothing_is<'h, F: Family<'h>>(heap: &'h Heap) {
        let config = ArenaConfig::new().limit(64 * PAGE).slab(4 * PAGE).prealloc(32 * PAGE);
        let arena = F::make(layout(1000, 8), config, heap).unwrap();
        let reserved = arena.counts().reserved;
        assert_eq!(reserved, 32 * PAGE, "{}", arena.counts());
        (0..200).for_each(|_| assert!(arena.bytes().is_ok()));
        assert_eq!(arena.counts().reserved, reserved, "nothing more was taken");
        drop(arena);
        // A request that can never be met is refused at once; nothing is taken on the way.
        let fresh = small(128);
        let refused = |config| F::make(layout(1000, 8), config, fresh).err().unwrap();
        let error = refused(config.prealloc(65 * PAGE));
        assert_eq!(
            (error.reason(), error.asked(), error.left()),
            (Reason::Limit, 65 * PAGE, 64 * PAGE)
        );
        assert_eq!(
            refused(config.limit(64 * PAGE + 10).prealloc(64 * PAGE + 9)).reason(),
            Reason::Limit
        );
        assert_eq!(
            refused(ArenaConfig::new().slab(PAGE).prealloc(usize::MAX)).reason(),
            Reason::TooLarge
        );
        assert_eq!(fresh.stats().grown, PageCount(0));
        let error = F::make(layout(1000, 8), config.prealloc(8 * PAGE), small(4))
            .err()
            .unwrap();
        assert_eq!(error.reason(), Reason::NoPages);
        assert_eq!(heap.stats().in_use, PageCount(0), "nothing was kept");
    }

    pub(super) fn huge_pages_are_whole<'h, F: Family<'h>>(heap: &'h Heap) {
        // The tables of a sharded list count too, so one huge page would leave less than a huge page for slots.
        let config = ArenaConfig::new().whole_huge_pages(true).slab(HUGE).prealloc(2 * HUGE);
        let arena = F::make(layout(64 << 10, 8), config, heap).unwrap();
        let first = arena.bytes().unwrap().addr().get();
        assert!(first.is_multiple_of(HUGE), "{first:#x}");
        (0..100).for_each(|_| assert!(arena.bytes().is_ok()));
        // Except for those tables.
        assert!(arena.counts().reserved % HUGE <= PAGE, "{}", arena.counts());
        // The same holds without a slab size or preallocation.
        for size in [24, 6144, 64 << 10] {
            let config = ArenaConfig::new().whole_huge_pages(true);
            let arena = F::make(layout(size, 8), config, heap).unwrap();
            let count = 5 * HUGE / size;
            let first = arena.bytes().unwrap().addr().get();
            assert!(first.is_multiple_of(HUGE), "{first:#x}");
            (1..count).for_each(|_| assert!(arena.bytes().is_ok()));
            let stats = arena.counts();
            assert!(stats.slabs >= 2 && stats.reserved % HUGE <= PAGE, "{stats}");
            assert!(stats.reserved <= 4 * count * size, "{stats}");
        }
        // Nor is most of one wasted, if that is all that is left, or lists' nodes come on top of their slots.
        for (size, pages) in [(64, 16), (4096, 1), (4096, 2), (4096, 4), (64 << 10, 3), (300_000, 5)] {
            let config = ArenaConfig::new().whole_huge_pages(true).limit(pages * HUGE);
            let arena = F::make(layout(size, 8), config, heap).unwrap();
            let (count, _) = all(&arena);
            // All but a slot, and a seventh.
            assert!(
                (count + 1) * (size + 16) > pages * HUGE * 6 / 7,
                "{count} in {}",
                arena.counts()
            );
        }
        // A limit too small for a huge page is still used in full, and an explicit slab size is respected.
        let config = ArenaConfig::new().whole_huge_pages(true);
        for config in [config.limit(HUGE / 2), config.slab(HUGE / 4).limit(HUGE)] {
            let arena = F::make(layout(1000, 8), config, heap).unwrap();
            let (count, _) = all(&arena);
            let stats = arena.counts();
            assert!(count * 1100 > stats.limit * 9 / 10, "{count} in {stats}");
        }
    }

    pub(super) fn statistics_add_up<'h, F: Family<'h>>(heap: &'h Heap) {
        let config = ArenaConfig::new().limit(1 << 20).slab(4 * PAGE);
        let mut arena = F::make(layout(1000, 8), config, heap).unwrap();
        assert_eq!((arena.counts().allocated, arena.counts().limit), (0, 1 << 20));
        (0..100).for_each(|_| assert!(arena.bytes().is_ok()));
        let full = arena.counts();
        assert!((100_000..110_000).contains(&full.allocated), "{full}");
        assert!(
            full.allocated <= full.peak && full.peak <= full.committed + PAGE,
            "{full}"
        );
        assert!(
            full.committed <= full.reserved && full.reserved <= full.limit && full.slabs > 1,
            "{full}"
        );
        arena.forget_all();
        let empty = arena.counts();
        assert_eq!((empty.allocated, empty.peak), (0, full.peak), "{empty}");
        assert!(
            empty.committed >= full.peak && empty.committed <= empty.reserved,
            "{empty}"
        );
        (0..10).for_each(|_| assert!(arena.bytes().is_ok()));
        let few = arena.counts();
        assert!((10_000..80_000).contains(&few.allocated), "{few}");
        assert_eq!((few.peak, few.reserved), (full.peak, empty.reserved), "{few}");
        assert!(few.to_string().contains("at its peak"));
    }

    pub(super) fn nothing_and_what_is_aligned_to_much_are_right<'h, F: Family<'h>>(heap: &'h Heap) {
        for align in [1, 64, PAGE, 4 * PAGE] {
            for size in [0, 1, 100] {
                let arena = F::make(layout(size, align), ArenaConfig::new(), heap).unwrap();
                let mut starts: Vec<_> = (0..20)
                    .map(|_| {
                        let memory = arena.bytes().unwrap();
                        assert_eq!((memory.len(), memory.addr().get() % align), (size, 0), "{size} {align}");
                        // SAFETY: allocated here, with this length.
                        unsafe { memory.cast::<u8>().write_bytes(0xA5, size) };
                        memory.addr().get()
                    })
                    .collect();
                starts.sort_unstable();
                assert!(
                    starts.windows(2).all(|pair| pair[1] - pair[0] >= size),
                    "{size} {align}"
                );
                arena.put((), ()).unwrap();
            }
        }
        let arena = F::make(layout(isize::MAX as usize, 1), ArenaConfig::new(), heap);
        let error = arena.and_then(|arena| arena.bytes()).unwrap_err();
        assert!(matches!(error.reason(), Reason::NoPages | Reason::TooLarge), "{error}");
    }

    pub(super) fn contents_are_dropped_by_boxes_only<'h, F: Family<'h>>(heap: &'h Heap) {
        struct Counted<'c>(&'c Cell<u32>);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.set(self.0.get() + 1);
            }
        }
        let drops = Cell::new(0);
        let mut arena = F::make(Layout::new::<Counted<'_>>(), ArenaConfig::new(), heap).unwrap();
        arena.put(Counted(&drops), Counted(&drops)).unwrap();
        assert_eq!(drops.get(), 1, "the box's");
        arena.forget_all();
        drop(arena);
        assert_eq!(drops.get(), 1);
        let full = F::make(Layout::new::<Counted<'_>>(), ArenaConfig::new().limit(PAGE), heap);
        // A sharded list has tables of its own, which may leave no room for slots.
        let Ok(full) = full else { return };
        while full.bytes().is_ok() {}
        let before = drops.get();
        assert!(full.put(Counted(&drops), Counted(&drops)).is_err());
        assert_eq!(drops.get(), before + 2, "what was not put in is dropped");
    }

    pub(super) fn all_threads_may_use_it<'h, F: Family<'h>>(heap: &'h Heap) {
        let arena = F::make(layout(24, 8), ArenaConfig::new().slab(4 * PAGE), heap).unwrap();
        let mut starts: Vec<usize> = std::thread::scope(|scope| {
            let work = || {
                (0..1000)
                    .map(|_| arena.bytes().unwrap().addr().get())
                    .collect::<Vec<_>>()
            };
            let threads = [(); 4].map(|()| scope.spawn(work));
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        starts.sort_unstable();
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 24));
    }
}
