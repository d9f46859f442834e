//! Small regions.

use std::alloc::{GlobalAlloc, Layout};
use std::mem::MaybeUninit;

use pageheap::source::{Numbers, Purpose, Region, Source, Split};
use pageheap::{Config, Geometry, GlobalHeap, Heap, PageCount, PageHeap};

/// A heap over a region of a megabyte or less asked for at least a megabyte of pages, and had no room for its tables.
#[test]
fn a_small_region_is_a_small_heap() {
    for (bytes, least) in [(32 << 10, 1), (64 << 10, 4), (1 << 20, 120), (4 << 20, 500)] {
        for wish in [bytes, usize::MAX] {
            let memory: &'static mut [MaybeUninit<u8>] = Box::leak(Box::new_uninit_slice(bytes));
            let config = Config::new(wish).caches(1);
            let heap = PageHeap::new(Region::from_static(memory), config).expect("a heap");
            let pages = (0..).take_while(|_| heap.allocate(PageCount(1)).is_some()).count();
            assert!(pages >= least, "{pages} pages of {bytes} bytes, wished {wish}");
            heap.check().expect("sound");
        }
    }
}

/// A heap of objects set aside a 64th of its pages for tables, although these lie elsewhere.
#[test]
fn a_heap_whose_tables_lie_elsewhere_has_the_whole_region() {
    let region = || {
        let bytes: &'static mut [MaybeUninit<u8>] = Box::leak(Box::new_uninit_slice((1 << 20) + 8192));
        let begin = bytes.as_ptr().align_offset(8192);
        Region::from_static(&mut bytes[begin..][..1 << 20])
    };
    let heap = Heap::new(Split::new(region(), region()), Config::new(usize::MAX)).expect("a heap");
    assert_eq!(heap.limit(), PageCount(128));
}

/// What `Region` documents for 64 KiB and less. A base that is not page-aligned costs the bytes before the next
/// boundary. Nothing guarantees where a boxed object lies (a sanitizer's allocator puts it elsewhere), so the type here
/// is aligned.
#[test]
fn small_regions_have_the_pages_they_are_said_to_have() {
    #[repr(align(8192))]
    struct Bytes([MaybeUninit<u8>; 192 << 10]);
    let region = |kib: usize, offset: usize| {
        let bytes = Box::leak(Box::new(Bytes([const { MaybeUninit::uninit() }; 192 << 10])));
        Region::from_static(&mut bytes.0[offset..][..kib << 10])
    };
    let all = Config::new(usize::MAX);
    let of_4_kib = |config| PageHeap::<Region, Geometry<5, 12>>::with_shape(region(64, 0), config).unwrap();
    let of_8_kib = PageHeap::new(region(64, 0), all).unwrap();
    let pages = [
        of_4_kib(all).limit().0,
        of_4_kib(all.caches(0)).limit().0,
        of_8_kib.limit().0,
    ];
    assert_eq!(pages, [13, 14, 6]);
    let objects = |kib, offset| Heap::new(region(kib, offset), all).map(|heap| heap.limit().0);
    assert!(objects(28, 0).is_err() && objects(32, 0).is_ok());
    for offset in [0, 1, 4096, 8191] {
        let seen = [40, 64, 128].map(|kib| objects(kib, offset));
        assert_eq!(seen, [1, 3, 11].map(Ok), "base {offset} bytes behind a page's border");
    }
}

/// A small heap of pages with a large alignment was refused, although a wish for less was granted.
#[test]
fn a_small_region_has_room_for_an_alignment() {
    for (kib, align, least) in [(256, 64 << 10, 20), (1200, 512 << 10, 80), (2048, 1 << 20, 120)] {
        for offset in [0, 4096, 100 << 10] {
            let memory: &'static mut [MaybeUninit<u8>] = Box::leak(Box::new_uninit_slice((kib << 10) + (4 << 20)));
            let begin = memory.as_ptr().align_offset(2 << 20) + offset;
            let region = Region::from_static(&mut memory[begin..][..kib << 10]);
            let heap = PageHeap::new(region, Config::new(usize::MAX).align(align)).expect("a heap");
            assert!(heap.capacity().0 >= least, "{} of {kib} KiB", heap.capacity());
        }
    }
}

/// In the smallest regions the first thread's structure took all three pages, and every allocation was refused.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room")]
fn a_global_heap_in_a_small_region_serves_its_first_thread() {
    for (kib, offset, pages) in [
        (36, 0, 1),
        (64, 0, 3),
        (64, 16, 3),
        (96, 0, 7),
        (128, 0, 11),
        (256, 0, 22),
    ] {
        let memory: &'static mut [MaybeUninit<u8>] = Box::leak(Box::new_uninit_slice((kib << 10) + 8192 + offset));
        let begin = memory.as_ptr().align_offset(8192) + offset;
        let heap = GlobalHeap::in_region(Region::from_static(&mut memory[begin..][..kib << 10]));
        let heap: &'static GlobalHeap<Region> = Box::leak(Box::new(heap));
        let layout = Layout::new::<[u64; 16]>();
        // SAFETY: not of zero bytes. A thread that has used no other heap.
        let take = move || unsafe { !heap.alloc(layout).is_null() };
        let served = std::thread::spawn(move || (0..).take_while(|_| take()).count()).join();
        assert!(
            served.unwrap() >= pages * 64,
            "{kib} KiB, {offset} bytes behind a page's border"
        );
    }
}

/// What was reserved was forgotten when the source got another granule, and so handed out twice.
#[test]
fn a_source_of_which_something_is_reserved_keeps_its_granule() {
    let memory: &'static mut [MaybeUninit<u8>] = Box::leak(Box::new_uninit_slice(1 << 16));
    let (region, numbers) = (Region::from_static(memory), Numbers::new(1 << 20, 1 << 20));
    // All that is reserved is back.
    let page = region.reserve(Purpose::Pages, 4096, 4096).expect("a page");
    // SAFETY: just reserved, not used.
    unsafe { region.unreserve(Purpose::Pages, page) };
    let region = region.with_granule(8192);
    region.reserve(Purpose::Pages, 8192, 8192).expect("a page");
    numbers.reserve(Purpose::Pages, 4096, 4096).expect("a page");
    std::panic::catch_unwind(|| region.with_granule(4096)).expect_err("a page is reserved");
    std::panic::catch_unwind(|| numbers.with_granule(8192)).expect_err("a page is reserved");
}

/// The tables are as long as the range, and lie at the end of the memory: they left next to nothing where that is at
/// the bottom of a range. (4.5 MiB at the bottom of 1 GiB had 16 pages.)
#[test]
fn memory_at_the_bottom_of_a_range_is_not_all_used_for_tables() {
    const RANGE: usize = 256 << 20;
    for kib in [512, 2048, 4608, 16 << 10] {
        let range: &'static mut [MaybeUninit<u8>] = Box::leak(Box::new_uninit_slice(RANGE));
        let base = range.as_mut_ptr().cast::<u8>();
        // SAFETY: borrowed for ever.
        let region = unsafe { Region::new(base, RANGE) };
        let region = region.with_gaps([base.wrapping_add(kib << 10)..base.wrapping_add(RANGE)]);
        let heap = Heap::new(region, Config::new(usize::MAX)).expect("a heap");
        let pages = kib / 8;
        assert!(
            heap.limit().0 >= pages - pages / 16 - 6,
            "{} pages of {pages}",
            heap.limit()
        );
    }
}

/// The table of spans may reach beyond the last page there can be, by a part of a granule. Whether the page behind the
/// last one is free was asked of a word that does not exist, which ended the process.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room")]
fn a_block_at_the_end_of_a_heap_asks_for_no_page_behind_it() {
    let (mut asked, mib) = (0, 1 << 20);
    for kib in (7 << 10..10 << 10).step_by(32) {
        let memory: &'static mut [MaybeUninit<u8>] = Box::leak(Box::new_uninit_slice(kib << 10));
        let region = Region::from_static(memory).with_granule(mib);
        let Ok(heap) = Heap::new(region, Config::new(usize::MAX)) else {
            continue;
        };
        let layout = |pages: usize| Layout::from_size_align(pages << 13, 8).unwrap();
        let first = heap.allocate(layout(200)).expect("a block");
        let rest = layout(heap.limit().0 - 200);
        let Some(last) = heap.allocate(rest) else { continue };
        asked += usize::from(heap.limit().0.is_multiple_of(512));
        // SAFETY: two blocks, with their layouts. The first is put aside, where whoever grows looks for it.
        unsafe {
            heap.free(first, layout(200));
            let _moved = heap.resize(last, rest, rest.size() + 8 * 8192);
        }
        heap.check().expect("sound");
    }
    assert!(asked > 0, "no heap ends with a chunk");
}
