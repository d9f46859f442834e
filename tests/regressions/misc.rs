//! Documented contracts.

#[cfg(target_os = "linux")]
use pageheap::source::Purpose;
use pageheap::source::Simulated;
#[cfg(any(unix, windows))]
use pageheap::source::{Numbers, OverSystem, Source, Split, System, Verbs};
use pageheap::{Config, Heap, NewHeapError, PageCount, PageHeap, PageIndex};

/// "The run of pages that `bytes` bytes from `address` occupy, if it begins on a page and lies in the grown part of the
/// heap."
#[test]
fn run_of_is_as_documented() {
    let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 24)).expect("a heap");
    let run = heap.allocate(PageCount(2)).expect("room");
    let inside = heap.address(run.start()).as_ptr().wrapping_add(100);
    assert_eq!(heap.run_of(inside, 8192), None, "does not begin on a page");
    assert_eq!(
        heap.run_of(heap.address(PageIndex(1)).as_ptr(), 1 << (usize::BITS - 2)),
        None,
        "does not lie in the heap"
    );
}

/// Tables start at granules, and a slot is a cache line.
#[test]
fn a_granule_below_a_cache_line_is_refused() {
    for granule in [1, 4, 8, 32] {
        let heap = PageHeap::new(Simulated::new(granule), Config::new(1 << 24));
        assert_eq!(heap.err(), Some(pageheap::NewHeapError::Granule));
    }
}

#[test]
fn refusals_count_refusals() {
    let heap = PageHeap::new(Simulated::new(4096), Config::new(64 << 13)).expect("a heap");
    let cache = heap.cache().expect("a cache");
    let run = cache.allocate(PageCount(1)).expect("room");
    // SAFETY: allocated here.
    unsafe { cache.free(run) };
    // All 64 pages are in this cache: it must flush itself, then be served.
    assert!(cache.allocate(PageCount(64)).is_some());
    assert_eq!(heap.stats().refusals, 0, "nobody was told no");
}

/// Which refusals the statistic leaves out according to its description, and which not.
#[test]
fn refusals_leave_out_what_is_never_there() {
    let heap = PageHeap::new(Simulated::new(4096), Config::new(64 << 13)).expect("a heap");
    assert!(heap.allocate(PageCount(0)).is_none() && heap.allocate(PageCount(65)).is_none());
    assert!(heap.allocate_aligned(PageCount(1), 3).is_none());
    let one = heap.allocate(PageCount(1)).expect("room");
    assert!(heap.allocate_at(one).is_none() && heap.grow_in_place(one, PageCount(65)).is_none());
    assert_eq!(heap.stats().refusals, 0);
    assert!(heap.allocate(PageCount(64)).is_none(), "one is taken");
    let small = PageHeap::new(Simulated::new(4096), Config::new(64 << 13).limit(PageCount(4))).expect("a heap");
    assert!(small.allocate(PageCount(5)).is_none(), "the limit forbids it");
    assert_eq!((heap.stats().refusals, small.stats().refusals), (1, 1));
}

/// Documented as "cannot overflow", it shifted by more bits than there are.
#[test]
fn a_page_larger_than_the_address_space_holds_everything() {
    for shift in [usize::BITS, usize::BITS + 1, u32::MAX] {
        let pages = [0, 1, usize::MAX].map(|bytes| PageCount::holding(bytes, shift).0);
        assert_eq!(pages, [0, 1, 1], "pages of 2^{shift} bytes");
    }
    let half = 1 << (usize::BITS - 1);
    let pages = [0, 1, half, half + 1, usize::MAX].map(|bytes| PageCount::holding(bytes, usize::BITS - 1).0);
    assert_eq!(pages, [0, 1, 1, 2, 2]);
    assert_eq!(PageCount::holding(usize::MAX, 0).0, usize::MAX);
    const { assert!(PageCount::holding(8193, 13).0 == 2) };
}

/// When a library with a combined source was unloaded, all its memory stayed.
#[test]
#[cfg(target_os = "linux")]
fn two_sources_as_one_give_up_the_end_of_a_reservation() {
    let source = Split::new(System, System);
    let page = source.granule();
    for purpose in [Purpose::Pages, Purpose::Metadata] {
        let all = source.reserve(purpose, 8 * page, page).expect("8 pages");
        let end = all.base.as_ptr().wrapping_add(6 * page);
        let mut pages = [0; 2];
        // SAFETY: reads what the system knows of two pages, and writes that. The pages belong to the test's
        // reservation, of which nothing is used any more, and which is never unreserved.
        unsafe {
            let mut is_there = || libc::mincore(end.cast(), 2 * page, pages.as_mut_ptr()) == 0;
            assert!(is_there());
            source.trim(purpose, std::ptr::NonNull::new(end).unwrap(), 2 * page);
            assert!(!is_there(), "{purpose:?}");
        }
    }
}

/// A heap lay at the same place in its tables whatever its source had to be aligned to, and the source with it.
#[test]
#[cfg(any(unix, windows))]
fn a_source_lies_where_its_type_has_to() {
    #[repr(align(16384))]
    struct Aligned;

    // SAFETY: the system's verbs.
    unsafe impl Verbs for Aligned {
        fn granule(&self) -> usize {
            // Of a reference the compiler takes for granted what is asked here.
            let place = std::hint::black_box(std::ptr::from_ref(self)).addr();
            assert_eq!(place % align_of::<Self>(), 0);
            System.granule()
        }
    }

    let heap = Heap::new(OverSystem(Aligned), Config::new(1 << 24)).expect("a heap");
    let layout = std::alloc::Layout::new::<[u64; 5000]>();
    let block = heap.allocate(layout).expect("room");
    // SAFETY: allocated with this layout, and nothing uses it.
    unsafe { heap.free(block, layout) };
    assert!(heap.release(usize::MAX) > 0);
    heap.check().expect("sound");
}

/// Twice such a granule does not exist, and a build with checks for overflow panicked.
#[test]
#[cfg(any(unix, windows))]
fn half_of_all_addresses_are_one_granule_and_no_heap() {
    let half = 1 << (usize::BITS - 1);
    let numbers = Numbers::new(half, half).with_granule(half);
    let heap = PageHeap::new(Split::new(numbers, System), Config::new(half));
    let missing = 1 << (usize::BITS - 1);
    assert!(matches!(heap.err(), Some(NewHeapError::NoMetadata { asked, .. }) if asked == missing));
}
