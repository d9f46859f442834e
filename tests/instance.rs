//! `Heap`: its own blocks, its own limit, and everything returned when it is dropped.

#![cfg(any(unix, windows))]

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering};
use std::thread;

use pageheap::source::{Contents, OverSystem, Purpose, Refused, Region, Reservation, Source, System, Verbs};
use pageheap::{Config, GlobalHeap, Heap, MapEntry, PageCount, PageUse};

use common::addresses;
use common::random::Random;
use counted::Counted;

mod common;
#[path = "common/counted.rs"]
mod counted;

fn small() -> Heap<System> {
    Heap::new(System, Config::new(addresses(1 << 30))).unwrap()
}

/// Heaps may follow each other in the same bytes. What one has left there means nothing to the next: nor, to the
/// checked build, that a block was freed, which it would then take for written to.
#[test]
fn what_a_heap_left_in_its_bytes_means_nothing_to_the_next() {
    let region: &Region = Box::leak(Box::new(Region::from_static(Box::leak(Box::new_uninit_slice(4 << 20)))));
    let heap = || Heap::new(region, Config::new(2 << 20)).unwrap();
    let [small, large] = [100, 1 << 20].map(|size| Layout::from_size_align(size, 8).unwrap());
    let first = heap();
    let blocks: Vec<_> = (0..4000).map(|_| first.allocate(small).unwrap()).collect();
    // SAFETY: blocks of this layout, freed once.
    blocks.iter().for_each(|&block| unsafe { first.free(block, small) });
    drop(first);
    let second = heap();
    let long = second.allocate(large).unwrap();
    let offset = |block: &NonNull<u8>| block.addr().get().wrapping_sub(long.addr().get());
    let inside: Vec<_> = blocks
        .iter()
        .filter(|block| offset(block) < large.size() - small.size())
        .collect();
    assert!(inside.len() > 2000);
    // SAFETY: inside the long block.
    inside
        .iter()
        .for_each(|block| unsafe { long.add(offset(block)).write_bytes(0x77, small.size()) });
    drop(second);
    let third = heap();
    let again: Vec<_> = (0..4000).map(|_| third.allocate(small).unwrap()).collect();
    assert!(inside.iter().filter(|block| again.contains(block)).count() > 2000);
}

#[test]
fn blocks_are_as_they_were_left_and_never_two_in_one_place() {
    let heap = small();
    let mut random = Random(0x5eed);
    // By address: the layout, and the byte written there.
    let mut live: BTreeMap<usize, (NonNull<u8>, Layout, u8)> = BTreeMap::new();
    let rounds = if cfg!(debug_assertions) { 20_000 } else { 200_000 };
    for round in 0..rounds {
        if random.below(5) < 3 || live.is_empty() {
            let shift = random.below(18) + 1;
            let layout = Layout::from_size_align(1 + random.below(1 << shift), 1 << random.below(14)).unwrap();
            let zeroed = random.below(4) == 0;
            let block = if zeroed {
                heap.allocate_zeroed(layout)
            } else {
                heap.allocate(layout)
            };
            let block = block.unwrap();
            let (start, end) = (block.addr().get(), block.addr().get() + layout.size());
            assert_eq!(start % layout.align(), 0);
            let before = live.range(..end).next_back();
            assert!(before.is_none_or(|(&at, (_, layout, _))| at + layout.size() <= start));
            // SAFETY: a live block of that size.
            let bytes = unsafe { std::slice::from_raw_parts_mut(block.as_ptr(), layout.size()) };
            assert!(!zeroed || bytes.iter().all(|&byte| byte == 0));
            bytes.fill(round as u8);
            live.insert(start, (block, layout, round as u8));
        } else {
            let number = random.below(live.len());
            let &start = live.keys().nth(number).unwrap();
            let (block, layout, seed) = live.remove(&start).unwrap();
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), layout.size()) };
            assert!(bytes.iter().all(|&byte| byte == seed));
            // SAFETY: allocated with this layout.
            unsafe { heap.free(block, layout) };
        }
        // The cost of looking a block up grows with their number.
        if live.len() > 300 {
            let all = std::mem::take(&mut live);
            // SAFETY: as above.
            all.into_values()
                .for_each(|(block, layout, _)| unsafe { heap.free(block, layout) });
        }
    }
    heap.check().unwrap();
}

/// Where the kernel makes huge pages unasked, it puts one behind the first block if as much is prepared around it.
#[test]
fn a_heap_begins_with_less_than_a_huge_page() {
    let heap = small();
    let grown = || heap.stats().pages.grown.0 * 8192;
    heap.allocate(Layout::new::<u64>()).unwrap();
    assert!(grown() < 2 << 20, "{} bytes", grown());
    heap.allocate(Layout::from_size_align(grown(), 8).unwrap()).unwrap();
    assert!(
        grown() % (4 << 20) == 0,
        "{} bytes: from then on in whole chunks",
        grown()
    );
}

#[test]
fn a_limit_is_its_own() {
    let config = Config::new(addresses(1 << 30)).limit(PageCount(512));
    let [one, other] = [(); 2].map(|()| Heap::new(System, config).unwrap());
    let layout = Layout::from_size_align(1000, 8).unwrap();
    let fill = |heap: &Heap<System>| std::iter::from_fn(|| heap.allocate(layout)).collect::<Vec<_>>();
    let blocks = fill(&one);
    assert!(blocks.len() * layout.size() > 512 * 8192 / 4 * 3, "{}", blocks.len());
    assert!(other.allocate(layout).is_some(), "the other has its own");
    // SAFETY: allocated with this layout.
    blocks.iter().for_each(|&block| unsafe { one.free(block, layout) });
    assert!(fill(&one).len() >= blocks.len() / 10 * 9);
    other.set_limit(PageCount(1024));
    assert_eq!(other.limit(), PageCount(1024));
}

/// The rest of the heap is full of blocks of a kibibyte: a block that is shortened stays in place, or keeps its first
/// pages.
#[test]
#[cfg_attr(feature = "checks", ignore = "blocks always move")]
fn a_block_can_be_made_shorter_where_there_is_no_memory() {
    let layout = |size| Layout::from_size_align(size, 8).unwrap();
    let sizes = [3_000, 20_000, 32_768, 40_000, 100_000, 1 << 20, 3 << 20];
    let to = [1, 8, 100, 700, 1_024, 1_025, 2_000, 12_000, 30_000];
    for (from, to) in sizes.iter().flat_map(|&from| to.map(|to| (from, to))) {
        let heap = Heap::new(System, Config::new(addresses(1 << 30)).limit(PageCount(512))).unwrap();
        let block = heap.allocate(layout(from)).unwrap();
        // SAFETY: a live block of that size.
        unsafe { (0..from).for_each(|at| block.add(at).write(at as u8 ^ 0x5a)) };
        let others: Vec<_> = [40_000, 1_000, to]
            .into_iter()
            .flat_map(|size| {
                std::iter::from_fn(|| heap.allocate(layout(size)))
                    .zip(std::iter::repeat(size))
                    .collect::<Vec<_>>()
            })
            .collect();
        // SAFETY: allocated with this layout.
        let shorter = unsafe { heap.resize(block, layout(from), to) };
        let (is_large, may_stay) = (from > 32 << 10, to > 1 << 10 || to > from);
        if to >= from {
            // SAFETY: as above, with its current layout.
            unsafe {
                heap.free(
                    shorter.unwrap_or(block),
                    layout(if shorter.is_some() { to } else { from }),
                )
            };
        } else if is_large || may_stay {
            let shorter = shorter.unwrap_or_else(|| panic!("{from} to {to}: {}", heap.stats()));
            // SAFETY: as above.
            unsafe { (0..to).for_each(|at| assert_eq!(shorter.add(at).read(), at as u8 ^ 0x5a, "{from} to {to}")) };
            // The rest of a large block can be allocated.
            assert!(
                from < 1 << 20 || heap.allocate(layout(50_000)).is_some(),
                "{from} to {to}: {}",
                heap.stats()
            );
            heap.check().unwrap();
            // SAFETY: as above.
            unsafe { heap.free(shorter, layout(to)) };
        } else {
            assert_eq!(shorter, None, "{from} to {to}");
            // SAFETY: the block is unchanged.
            unsafe { (0..from).for_each(|at| assert_eq!(block.add(at).read(), at as u8 ^ 0x5a)) };
            // SAFETY: as above.
            unsafe { heap.free(block, layout(from)) };
        }
        // SAFETY: as above.
        others
            .into_iter()
            .for_each(|(block, size)| unsafe { heap.free(block, layout(size)) });
        assert_eq!(heap.stats().roomy_bytes, 0, "{from} to {to}");
        heap.check().unwrap();
    }
}

/// A block that has grown in steps lies in a run with room, and keeps no more of it than it must.
#[test]
#[cfg_attr(feature = "checks", ignore = "blocks always move")]
fn a_block_with_room_gives_some_back_where_there_is_no_memory() {
    let layout = |size| Layout::from_size_align(size, 8).unwrap();
    let heap = Heap::new(System, Config::new(addresses(1 << 30)).limit(PageCount(8192))).unwrap();
    // Puts runs on the shelf, for when the block gets room.
    for size in [72_000, 80_000, 88_000, 96_000, 112_000, 128_000] {
        let run = heap.allocate(layout(size)).unwrap();
        // SAFETY: just allocated.
        unsafe { heap.free(run, layout(size)) };
    }
    let mut size = 700;
    let mut block = heap.allocate(layout(size)).unwrap();
    while size < 2_500 {
        let more = size * 5 / 4;
        // SAFETY: the live block, with its layout.
        block = unsafe { heap.resize(block, layout(size), more) }.unwrap();
        size = more;
    }
    let before = heap.stats().roomy_bytes;
    assert!(before > 48 << 10, "{}", heap.stats());
    for size in [1 << 20, 40_000, 1_100] {
        while heap.allocate(layout(size)).is_some() {}
    }
    // In runs of their own, for want of a span.
    let others = heap.stats().roomy_bytes - before;
    // SAFETY: as above.
    let shorter = unsafe { heap.resize(block, layout(size), 1_100) };
    assert_eq!(shorter, Some(block));
    assert_eq!(heap.stats().roomy_bytes, others + (40 << 10), "{}", heap.stats());
    heap.check().unwrap();
    // SAFETY: as above.
    unsafe { heap.free(block, layout(1_100)) };
    assert_eq!(heap.stats().roomy_bytes, others);
    heap.check().unwrap();
}

#[test]
fn a_soft_limit_is_its_own_and_can_be_changed() {
    let heap = Heap::new(System, Config::new(256 << 20).soft_limit(PageCount(4096))).unwrap();
    assert_eq!(heap.soft_limit(), PageCount(4096));
    let layouts = [100_000, 3 << 20].map(|size| Layout::from_size_align(size, 8).unwrap());
    // Free runs that are too short for the next blocks.
    let fill = |layout: Layout, bytes: usize| {
        let blocks: Vec<_> = (0..bytes / layout.size())
            .map(|_| heap.allocate(layout).unwrap())
            .collect();
        // SAFETY: this test's blocks, each freed once, with its layout.
        blocks.into_iter().for_each(|block| unsafe { heap.free(block, layout) });
    };
    heap.set_soft_limit(PageCount(1024));
    assert_eq!(heap.soft_limit(), PageCount(1024));
    for layout in layouts {
        fill(layout, 7 << 20);
    }
    assert!(heap.stats().pages.backed.0 <= 1024, "{}", heap.stats());
    heap.check().unwrap();
}

#[test]
fn what_it_tells_of_itself_agrees() {
    let heap = small();
    let layouts = [24, 1000, 20_000, 70_000].map(|size| Layout::from_size_align(size, 8).unwrap());
    for layout in layouts {
        (0..50).for_each(|_| assert!(heap.allocate(layout).is_some()));
    }
    let snapshot = heap.snapshot();
    assert_eq!(snapshot.stats, heap.stats());
    let live = snapshot.classes().iter().map(|class| class.live * class.slot_bytes);
    assert_eq!(live.sum::<usize>(), snapshot.stats.slot_bytes);
    assert!(snapshot.resident > 0 || !cfg!(target_os = "linux"));
    let pages = |is: fn(PageUse) -> bool| {
        let entries = heap.map().filter(|entry| is(entry.is));
        entries.map(|MapEntry { run, .. }| run.pages().0).sum::<usize>()
    };
    let (stats, span_pages) = (snapshot.stats.pages, snapshot.stats.span_pages);
    assert_eq!(pages(|is| matches!(is, PageUse::Span { .. })), span_pages.0);
    assert_eq!(pages(|is| is == PageUse::Run), stats.in_use.0 - span_pages.0);
    assert_eq!(
        pages(|is| is != PageUse::Metadata),
        stats.grown.0,
        "every page is named once"
    );
}

#[test]
fn all_goes_back_when_it_is_dropped_whatever_is_still_allocated() {
    static RESERVED: AtomicIsize = AtomicIsize::new(0);
    for round in 0..200_usize {
        let heap = Heap::new(OverSystem(Counted(&RESERVED)), Config::new(1 << 28)).unwrap();
        for number in 0..100 {
            let layout = Layout::from_size_align(number * round + 1, 1).unwrap();
            heap.allocate_zeroed(layout).unwrap();
        }
        assert!(heap.source().0.0.load(Ordering::Relaxed) > 0);
        drop(heap);
        assert_eq!(RESERVED.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn a_source_that_has_nothing_makes_no_heap_and_keeps_nothing() {
    static RESERVED: AtomicIsize = AtomicIsize::new(0);
    assert!(
        Heap::new(OverSystem(Counted(&RESERVED)), Config::new(usize::MAX >> 1))
            .is_ok_and(|heap| heap.stats().threads == 0)
    );
    assert_eq!(RESERVED.load(Ordering::Relaxed), 0);
}

/// What is missing may be tables of its own, which it takes before the pages: they are named, not the pages.
#[test]
fn a_region_that_is_too_small_is_told_how_much_is_missing() {
    let with_config = |bytes, config| {
        let region = Region::from_static(Box::leak(Box::new_uninit_slice(bytes)));
        Heap::new(region, config).map_err(|error| error.to_string())
    };
    let heap = |bytes| with_config(bytes, Config::new(1 << 30));
    // (How much is left of 8 KiB depends on where they begin.)
    let said = heap(8 << 10).unwrap_err();
    assert!(
        said.starts_with("the source has no memory for ") && said.contains(" bytes of tables "),
        "{said}"
    );
    assert!(said.ends_with(" bytes left"), "{said}");
    assert!(heap(40 << 10).is_ok());
    // Nobody names shards here, so there are none. (There were, and they took 64 bytes each.)
    assert!(with_config(40 << 10, Config::new(1 << 30).shards(1 << 20)).is_ok());
}

#[test]
fn threads_share_it_and_free_for_each_other() {
    let heap = small();
    let layout = Layout::from_size_align(200, 8).unwrap();
    let (to, from) = std::sync::mpsc::channel::<usize>();
    std::thread::scope(|scope| {
        for seed in 1..=4_u8 {
            let (heap, to) = (&heap, to.clone());
            scope.spawn(move || {
                for _ in 0..2_000 {
                    let block = heap.allocate(layout).unwrap();
                    // SAFETY: a live block of that size.
                    unsafe { block.write_bytes(seed, 200) };
                    to.send(block.expose_provenance().get()).unwrap();
                }
            });
        }
        drop(to);
        for address in from {
            let block = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(address)).unwrap();
            // SAFETY: sent by the thread that filled it, and freed once.
            unsafe {
                let bytes = std::slice::from_raw_parts(block.as_ptr(), 200);
                assert!(bytes.iter().all(|&byte| byte == bytes[0]));
                heap.free(block, layout);
            }
        }
    });
    heap.check().unwrap();
    heap.scavenge(PageCount(usize::MAX));
    assert_eq!(heap.stats().slot_bytes, 0);
}

/// Whether it goes on: so many times.
fn times(count: usize) -> impl FnMut() -> bool {
    let mut left = 0..count;
    move || left.next().is_some()
}

/// Allocates, fills, checks and frees blocks of many sizes, as long as it goes on.
fn churn(heap: &Heap<System>, seed: u8, mut goes_on: impl FnMut() -> bool) {
    let (mut random, mut blocks) = (Random(u64::from(seed)), Vec::new());
    while goes_on() {
        let size = 1 + random.below(if blocks.len() == 9 { 40_000 } else { 300 });
        let layout = Layout::from_size_align(size, 8).unwrap();
        let block = heap.allocate(layout).unwrap();
        // SAFETY: a live block of that size.
        unsafe { block.write_bytes(seed, size) };
        blocks.push((block, layout));
        for (block, layout) in blocks.drain(random.below(10).min(blocks.len())..) {
            // SAFETY: allocated and filled above, and freed once.
            unsafe {
                let bytes = std::slice::from_raw_parts(block.as_ptr(), layout.size());
                assert!(
                    bytes.iter().all(|&byte| byte == seed),
                    "another thread has written here"
                );
                heap.free(block, layout);
            }
        }
    }
}

/// A thread that makes all calls itself soon does without the lock; when others come, it goes on meanwhile.
#[test]
fn a_heap_that_one_thread_had_to_itself_is_for_all() {
    for _ in 0..20 {
        let (heap, over) = (&small(), &AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| churn(heap, 1, || !over.load(Ordering::Relaxed)));
            churn(&small(), 2, times(2000));
            let others = [3, 4].map(|seed| scope.spawn(move || churn(heap, seed, times(500))));
            others.into_iter().for_each(|other| other.join().unwrap());
            over.store(true, Ordering::Relaxed);
        });
        heap.check().unwrap();
    }
}

#[test]
fn heaps_come_and_go_in_many_threads() {
    std::thread::scope(|scope| {
        for seed in 1..=4_usize {
            scope.spawn(move || {
                let mut kept = Vec::new();
                for round in 0..50_usize {
                    let heap = small();
                    let layout = Layout::from_size_align(seed * round + 8, 8).unwrap();
                    assert!(heap.contains(heap.allocate(layout).unwrap().as_ptr()));
                    kept.push(heap);
                    if kept.len() > 5 {
                        kept.swap_remove(round % 5);
                    }
                }
            });
        }
    });
}

#[test]
fn a_block_may_be_used_to_its_usable_size_and_freed_with_it() {
    let heap = small();
    for size in (1..100_000).step_by(611) {
        for align in [1, 16, 256, 8192, 65536] {
            let layout = Layout::from_size_align(size, align).unwrap();
            let usable = heap.usable_size(layout);
            let whole = Layout::from_size_align(usable, align).unwrap();
            assert!(usable >= size && heap.usable_size(whole) == usable);
            let block = heap.allocate(layout).unwrap();
            // SAFETY: writes as many bytes as it has; freed with the size from `usable_size`.
            unsafe {
                block.write_bytes(1, usable);
                heap.free(block, whole);
            }
        }
    }
    heap.check().unwrap();
}

#[test]
fn collections_of_both_versions_live_in_it() {
    let heap = small();
    let mut old = allocator_api2_02::vec::Vec::new_in(&heap);
    let mut new = allocator_api2_04::vec::Vec::new_in(&heap);
    for number in 0..100_000_u64 {
        old.push(number);
        new.push(number);
    }
    old.truncate(10);
    old.shrink_to_fit();
    assert!(old.iter().copied().eq(0..10) && new.iter().copied().eq(0..100_000));
    let boxed = allocator_api2_04::boxed::Box::new_in([7_u8; 3000], &heap);
    assert!(heap.contains(boxed.as_ptr()));
    drop((old, new, boxed));
    // An allocator owned by the collection, and moved with it.
    let mut owned = allocator_api2_02::vec::Vec::new_in(small());
    owned.extend(0..5000);
    let moved = Box::new(owned);
    assert!(moved.iter().copied().eq(0..5000));
    heap.check().unwrap();
}

/// Boxes of both versions invent an address for a value of no bytes, and free that address.
#[test]
fn what_is_of_no_bytes_is_no_block() {
    #[repr(align(64))]
    struct Nothing;
    let heap = small();
    for _ in 0..10 {
        let old = allocator_api2_02::boxed::Box::new_in((), &heap);
        let new = allocator_api2_04::boxed::Box::new_in(Nothing, &heap);
        let slice = allocator_api2_04::boxed::Box::<[u8], _>::new_uninit_slice_in(0, &heap);
        drop((old, new, slice));
        let small = heap.allocate(Layout::new::<u8>()).expect("room");
        assert!(heap.contains(small.as_ptr()), "{small:?}");
        let mut grows = allocator_api2_02::vec::Vec::<u8, _>::new_in(&heap);
        grows.push(1);
        grows.clear();
        grows.shrink_to_fit();
        grows.extend(0..100);
        assert!(grows.iter().copied().eq(0..100));
    }
    use allocator_api2_04::alloc::Allocator;
    let layouts = [Layout::new::<()>(), Layout::new::<[u64; 9]>(), Layout::new::<()>()];
    // SAFETY: the heap's blocks, each replacing the previous one.
    unsafe {
        let [none, some, rest] = layouts;
        let block = Allocator::allocate(&heap, none).expect("nothing");
        let block = heap.grow_zeroed(block.cast(), none, some).expect("room");
        assert!(block.as_ref().iter().all(|&byte| byte == 0) && block.len() == some.size());
        let block = heap.shrink(block.cast(), some, rest).expect("nothing");
        heap.deallocate(block.cast(), rest);
    }
    heap.check().unwrap();
}

/// A global heap that is not the program's global allocator.
#[test]
fn collections_of_both_versions_live_in_a_global_heap_beside_the_programs() {
    static BESIDE: GlobalHeap = GlobalHeap::new().reserve(1 << 28);
    let mut old = allocator_api2_02::vec::Vec::new_in(&BESIDE);
    let build = || {
        let mut new = allocator_api2_04::vec::Vec::new_in(&BESIDE);
        new.extend(0..100_000_u64);
        new.truncate(50_000);
        new.shrink_to_fit();
        new
    };
    old.extend(0..100_000_u64);
    let new = thread::scope(|scope| scope.spawn(build).join().expect("a vector"));
    assert!(old.iter().copied().eq(0..100_000) && new.iter().copied().eq(0..50_000));
    assert!(BESIDE.contains(old.as_ptr().cast()) && BESIDE.contains(new.as_ptr().cast()));
    let nothing = allocator_api2_02::boxed::Box::new_in((), &BESIDE);
    let zeroes = allocator_api2_02::boxed::Box::<[u64], _>::new_zeroed_slice_in(3000, &BESIDE);
    // SAFETY: zero is a valid number.
    assert!(unsafe { zeroes.assume_init() }.iter().all(|&number| number == 0));
    drop((old, new, nothing));
    BESIDE.check().unwrap();
    BESIDE.flush_thread();
    BESIDE.release(usize::MAX);
    let used = BESIDE.stats().pages.in_use;
    assert!(used < PageCount(64), "{used:?}");
}

/// The first word of a larger block may still hold what was there when the memory was small blocks, and is copied along
/// with the block: it must not be taken for the mark of the small block that results.
#[test]
fn a_block_that_nobody_wrote_to_comes_back_when_it_was_made_smaller() {
    let small = Layout::from_size_align(512, 8).unwrap();
    for from in [2048, 40_000] {
        let heap = Heap::new(System, Config::new(64 << 20)).unwrap();
        let blocks: Vec<_> = (0..2000).map(|_| heap.allocate(small).unwrap()).collect();
        for block in blocks {
            // SAFETY: this test's blocks, each freed once, with its layout.
            unsafe { heap.free(block, small) };
        }
        heap.scavenge(PageCount(0));
        let before = heap.stats().slot_bytes;
        let large = Layout::from_size_align(from, 8).unwrap();
        let blocks: Vec<_> = (0..20).map(|_| heap.allocate(large).unwrap()).collect();
        for block in blocks {
            // SAFETY: as above.
            unsafe { heap.free(heap.resize(block, large, 512).unwrap(), small) };
        }
        assert_eq!(
            heap.stats().slot_bytes,
            before,
            "blocks from {from} bytes did not come back"
        );
    }
}

/// A block that has meanwhile become a rack, in which batches travel, is left alone.
#[test]
#[cfg(not(feature = "checks"))]
fn a_block_freed_twice_that_has_become_a_rack_does_no_harm() {
    let heap = Heap::new(System, Config::new(256 << 20)).unwrap();
    // As long as a rack of 126.
    let small = Layout::from_size_align(1 << 10, 8).unwrap();
    let blocks = [(); 3].map(|()| heap.allocate(small).unwrap());
    // SAFETY: this test's block.
    unsafe { heap.free(blocks[0], small) };
    heap.scavenge(PageCount(0));
    assert_eq!(heap.stats().rack_bytes, 0);
    let larger = (0..10).map(|step| Layout::from_size_align(1100 + step * 300, 8).unwrap());
    let use_batches = || {
        for layout in larger.clone() {
            let blocks: Vec<_> = (0..1000).map(|_| heap.allocate(layout).unwrap()).collect();
            // SAFETY: this test's blocks, each freed once, with its layout.
            blocks.into_iter().for_each(|block| unsafe { heap.free(block, layout) });
        }
    };
    use_batches();
    assert!(heap.stats().rack_bytes >= 1 << 10);
    // SAFETY: none: this is the misuse that must do no harm.
    unsafe { heap.free(blocks[0], small) };
    let others: Vec<_> = (0..100).map(|_| heap.allocate(small).unwrap()).collect();
    assert!(!others.contains(&blocks[0]), "a rack, and a block of the program");
    use_batches();
    heap.check().unwrap();
}

/// By a program's own loop, or on request.
#[test]
fn memory_goes_back_by_ticks_and_when_it_is_asked_for() {
    let heap = Heap::new(System, Config::new(256 << 20)).unwrap();
    let layout = Layout::from_size_align(100_000, 8).unwrap();
    let use_up = || {
        let blocks: Vec<_> = (0..300).map(|_| heap.allocate(layout).unwrap()).collect();
        // SAFETY: this test's blocks, each freed once, with its layout.
        blocks.into_iter().for_each(|block| unsafe { heap.free(block, layout) });
        assert!(heap.stats().pages.backed.0 > 3000, "{}", heap.stats());
    };
    use_up();
    assert_eq!(heap.release(8 << 20) >> 20, 8);
    assert!(heap.release(usize::MAX) > 20 << 20);
    assert!(heap.stats().pages.backed.0 < 20, "{}", heap.stats());
    assert!(heap.backed().0 < 20 && heap.peak_backed().0 > 3000);
    use_up();
    let now = std::cell::Cell::new(std::time::Duration::from_secs(1));
    let rest = (0..1000).any(|_| {
        let pause = heap.tick(&|| now.get());
        now.set(now.get().saturating_add(pause));
        pause == std::time::Duration::MAX
    });
    assert!(rest && heap.stats().pages.backed.0 < 20, "{}", heap.stats());
    heap.check().unwrap();
}

/// Freed runs lie on one shelf, for one thread that is alone with the heap and for many; others that need the pages get
/// them.
#[test]
fn a_large_block_comes_back_as_long_as_nothing_else_needs_its_pages() {
    let heap = Heap::new(System, Config::new(addresses(1 << 30)).limit(PageCount(512))).unwrap();
    let layouts = [40_000, 100_000, 1_000_000].map(|size| Layout::from_size_align(size, 8).unwrap());
    let pass = || {
        for _ in 0..40 {
            let blocks = layouts.map(|layout| heap.allocate(layout).unwrap());
            for (block, layout) in blocks.into_iter().zip(layouts) {
                // SAFETY: allocated with this layout, written to, and freed once.
                unsafe {
                    block.write_bytes(1, layout.size());
                    heap.free(block, layout);
                }
            }
            assert_eq!(layouts.map(|layout| heap.allocate(layout).unwrap()), blocks);
            // SAFETY: as above.
            blocks
                .into_iter()
                .zip(layouts)
                .for_each(|(block, layout)| unsafe { heap.free(block, layout) });
            let zeroed = heap.allocate_zeroed(layouts[1]).unwrap();
            assert_eq!(zeroed, blocks[1]);
            // SAFETY: a block of that size, freed once.
            unsafe {
                let bytes = std::slice::from_raw_parts(zeroed.as_ptr(), layouts[1].size());
                assert!(bytes.iter().all(|&byte| byte == 0));
                heap.free(zeroed, layouts[1]);
            }
        }
        let pages = layouts.map(|layout| layout.size().div_ceil(8192)).iter().sum();
        assert!(heap.stats().shelf_pages >= PageCount(pages), "{}", heap.stats());
    };
    // One thread, alone from the 16th call on; then more of them than can be alone one after another.
    for _ in 0..6 {
        pass();
        thread::scope(|scope| scope.spawn(pass).join().unwrap());
    }
    heap.check().unwrap();
    let most = Layout::from_size_align(480 << 13, 8).unwrap();
    let block = heap.allocate(most).expect("the shelf's pages too");
    assert_eq!(heap.stats().shelf_pages, PageCount(0));
    // SAFETY: allocated with this layout.
    unsafe { heap.free(block, most) };
    pass();
    heap.scavenge(PageCount(usize::MAX));
    assert_eq!(
        (heap.stats().shelf_pages, heap.stats().pages.backed),
        (PageCount(0), PageCount(0))
    );
    heap.check().unwrap();
}

/// The shelf's lists accept as many runs as were asked of them.
#[test]
#[cfg_attr(feature = "checks", ignore = "blocks always move")]
fn a_request_for_a_large_block_counts_once() {
    let heap = Heap::new(System, Config::new(addresses(1 << 30))).unwrap();
    let layout = |pages: usize| Layout::from_size_align(pages << 13, 8).unwrap();
    // SAFETY: this test's blocks, each freed once, with its layout.
    let free = |block, pages| unsafe { heap.free(block, layout(pages)) };
    // From here on the thread is alone with the heap.
    (0..40).for_each(|_| free(heap.allocate(layout(6)).unwrap(), 6));
    let asked: Vec<_> = (0..30).map(|_| heap.allocate(layout(7)).unwrap()).collect();
    let grown = (0..60).map(|_| {
        let block = heap.allocate(layout(6)).unwrap();
        // SAFETY: as above.
        unsafe { heap.resize(block, layout(6), 7 << 13) }.unwrap()
    });
    let all: Vec<_> = grown.chain(asked).collect();
    let before = heap.stats().shelf_pages.0;
    all.into_iter().for_each(|block| free(block, 7));
    let shelved = heap.stats().shelf_pages.0 - before;
    assert_eq!(shelved, (1 + 30) * 7, "one in the hand, and one for each request");
}

/// A thread takes large blocks from the shelf without the lock when another comes; new heaps again and again.
#[test]
fn a_shelf_that_one_thread_had_to_itself_is_for_all() {
    let rounds = if cfg!(debug_assertions) { 60 } else { 600 };
    for round in 0..rounds {
        let heap = &small();
        let work = |seed: usize, steps: usize| {
            let (mut random, mut blocks) = (Random(seed as u64 | 1), Vec::new());
            let free = |(block, layout, tag): (NonNull<u8>, Layout, u64)| {
                // SAFETY: a live block of this test, whose first word it wrote.
                unsafe {
                    assert_eq!(block.cast::<u64>().read(), tag, "another thread has written here");
                    heap.free(block, layout);
                }
            };
            for step in 0..steps {
                if random.below(2) == 0 && blocks.len() < 6 {
                    let layout = Layout::from_size_align(40_000 + 9_000 * random.below(3), 8).unwrap();
                    let (block, tag) = (heap.allocate(layout).unwrap(), (seed as u64) << 32 | step as u64);
                    // SAFETY: a block of that size.
                    unsafe { block.cast::<u64>().write(tag) };
                    blocks.push((block, layout, tag));
                } else if let Some(block) = blocks.pop() {
                    free(block);
                }
            }
            blocks.into_iter().for_each(free);
        };
        thread::scope(|scope| {
            scope.spawn(|| work(3 * round + 1, 4000));
            scope.spawn(|| {
                thread::sleep(std::time::Duration::from_micros(100 + round as u64 % 300));
                work(3 * round + 2, 500);
            });
        });
        heap.check().unwrap();
        assert_eq!(heap.stats().bytes_in_use(), 0, "{}", heap.stats());
    }
}

/// A check of a heap in use may report violations that are none; it must not end the process or do harm.
#[test]
fn a_check_beside_work_does_no_harm() {
    let heap = small();
    let checks = if cfg!(debug_assertions) { 300 } else { 3000 };
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let workers = [1, 2, 3].map(|seed| {
            let (heap, over) = (&heap, &over);
            scope.spawn(move || {
                let (mut random, mut blocks) = (Random(seed), Vec::new());
                while !over.load(Ordering::Relaxed) {
                    // All slots return to their spans, into lists that are then written again.
                    heap.scavenge(PageCount(1));
                    for _ in 0..random.below(400) {
                        let most = 1 << (1 + random.below(15));
                        let layout = Layout::from_size_align(1 + random.below(most), 8).unwrap();
                        blocks.extend(heap.allocate(layout).map(|block| (block, layout)));
                    }
                    while blocks.len() > random.below(1000) {
                        let (block, layout) = blocks.swap_remove(random.below(blocks.len()));
                        // SAFETY: allocated with this layout, and written to before it is freed, as programs do.
                        unsafe {
                            block.write_bytes(0xff, layout.size());
                            heap.free(block, layout);
                        }
                    }
                }
                // SAFETY: as above.
                blocks
                    .into_iter()
                    .for_each(|(block, layout)| unsafe { heap.free(block, layout) });
            })
        });
        while heap.stats().pages.in_use < PageCount(1000) {
            thread::yield_now();
        }
        for _ in 0..checks {
            // Any result is allowed.
            let _anything = heap.check();
        }
        over.store(true, Ordering::Relaxed);
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
    heap.check().unwrap();
}

thread_local! {
    static PROCESSOR: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// The system; what is asked for next after the heap itself, it does not reserve, or not prepare.
struct Stingy {
    reserves: bool,
    refuses: AtomicBool,
    made: AtomicUsize,
    balance: &'static AtomicIsize,
}

// SAFETY: the system's verbs, some of which are refused.
unsafe impl Verbs for Stingy {
    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        let is_later = self.made.fetch_add(1, Ordering::Relaxed) >= 3;
        let reservation = System
            .reserve(purpose, bytes, align)
            .filter(|_| !is_later || self.reserves)?;
        self.balance.fetch_add(reservation.bytes as isize, Ordering::Relaxed);
        Some(reservation)
    }

    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let is_later = self.made.load(Ordering::Relaxed) == 4;
        if is_later && self.refuses.swap(false, Ordering::Relaxed) {
            return Err(Refused);
        }
        // SAFETY: the caller's promise.
        unsafe { System.prepare(purpose, start, bytes) }
    }

    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        self.balance.fetch_sub(reservation.bytes as isize, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.unreserve(purpose, reservation) };
    }
}

/// They are made whatever the source refuses, and go back with the heap.
#[test]
fn structures_for_processors_lie_beside_the_tables_or_in_the_first_pages() {
    for (reserves, prepares) in [(true, true), (true, false), (false, true)] {
        let balance: &AtomicIsize = Box::leak(Box::default());
        let source = OverSystem(Stingy {
            reserves,
            refuses: AtomicBool::new(!prepares),
            made: AtomicUsize::new(0),
            balance,
        });
        let config = Config::new(addresses(1 << 30)).processors(4, || PROCESSOR.get());
        let heap = Heap::new(source, config).unwrap();
        let layout = Layout::new::<[u8; 100]>();
        let blocks = [0, 1, 2, 3].map(|number| {
            PROCESSOR.set(number);
            heap.allocate(layout).unwrap()
        });
        let (stats, is_apart) = (heap.stats(), reserves && prepares);
        assert_eq!(
            (stats.structure_pages.0 == 0, stats.pages.calls.reserve == 4),
            (is_apart, is_apart)
        );
        for (number, block) in blocks.into_iter().enumerate() {
            PROCESSOR.set(3 - number);
            // SAFETY: allocated with this layout, and freed once.
            unsafe { heap.free(block, layout) };
        }
        assert_eq!(heap.stats().bytes_in_use(), 0, "{}", heap.stats());
        heap.check().unwrap();
        drop(heap);
        assert_eq!(balance.load(Ordering::Relaxed), 0);
    }
}
