//! Small regions.

use std::mem::MaybeUninit;

use pageheap::source::Region;
use pageheap::{Config, PageCount, PageHeap};

/// A heap over a region of a megabyte or less wished for a megabyte of pages at least, and had no room for its tables.
#[test]
fn a_small_region_is_a_small_heap() {
    for (bytes, least) in [(32 << 10, 1), (64 << 10, 4), (1 << 20, 120), (4 << 20, 500)] {
        for wish in [bytes, usize::MAX] {
            let memory: &'static mut [MaybeUninit<u8>] = Box::leak(Box::new_uninit_slice(bytes));
            let config = Config::new(wish).caches(1);
            let heap: PageHeap<Region> = PageHeap::new(Region::from_static(memory), config).expect("a heap");
            let pages = (0..).take_while(|_| heap.allocate(PageCount(1)).is_some()).count();
            assert!(pages >= least, "{pages} pages of {bytes} bytes, wished {wish}");
            heap.check().expect("sound");
        }
    }
}
