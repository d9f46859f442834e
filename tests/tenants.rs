//! A `Heap` for each tenant of a program: limits in bytes.

#![cfg(any(unix, windows))]

use std::alloc::Layout;

use pageheap::source::System;
use pageheap::{Config, Geometry, Heap, PageCount, PageHeap};

const SMALL: Layout = Layout::new::<[u64; 1000]>();

#[test]
fn limits_in_bytes_are_whole_pages_of_the_heaps_own_size() {
    const CONFIG: Config = Config::new(1 << 20).limit_bytes(100_000).soft_limit_bytes(50_000);
    let heap = Heap::new(System, CONFIG).unwrap();
    assert_eq!((heap.limit(), heap.soft_limit()), (PageCount(12), PageCount(6)));
    let pages: PageHeap<System> = PageHeap::new(System, CONFIG).unwrap();
    assert_eq!((pages.limit(), pages.soft_limit()), (PageCount(12), PageCount(6)));
    let pages: PageHeap<System, Geometry<5, 12>> = PageHeap::with_shape(System, CONFIG).unwrap();
    assert_eq!((pages.limit(), pages.soft_limit()), (PageCount(24), PageCount(12)));
    assert!(pages.allocate(PageCount(24)).is_some() && pages.allocate(PageCount(1)).is_none());
    // More than is reserved counts as the reservation, and the last one holds.
    let heap = |config| Heap::new(System, config).unwrap();
    assert_eq!(heap(CONFIG.limit_bytes(usize::MAX)).limit(), PageCount(128));
    assert_eq!(heap(CONFIG.limit(PageCount(7))).limit(), PageCount(7));
    assert_eq!(heap(CONFIG.limit(PageCount(7)).limit_bytes(8192)).limit(), PageCount(1));
    let nothing = heap(CONFIG.limit_bytes(8191));
    assert!(nothing.allocate(SMALL).is_none());
}
