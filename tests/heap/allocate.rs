//! Allocating pages: which ones are taken, and what happens when there are none.

use pageheap::{Fault, Geometry, Shape};

use super::*;

#[test]
fn zero_pages_are_none() {
    let heap = heap(512);
    assert_eq!(heap.allocate(PageCount::ZERO), None);
    assert_eq!(heap.allocate_tracked(PageCount::ZERO), None);
    assert_eq!(heap.allocate_aligned(PageCount::ZERO, PAGE), None);
    assert_eq!(heap.allocate_on(0, PageCount::ZERO), None);
    assert_eq!(heap.cache().expect("a cache").allocate(PageCount::ZERO), None);
    check(&heap, 0, 0);
}

#[test]
fn the_lowest_pages_come_first() {
    let heap = heap(4096);
    assert_eq!(take(&heap, 3), Some((0, 3)));
    assert_eq!(take(&heap, 5), Some((3, 5)));
    assert_eq!(take(&heap, 1), Some((8, 1)));
    give(&heap, 3, 5);
    assert_eq!(take(&heap, 6), Some((9, 6)));
    assert_eq!(take(&heap, 2), Some((3, 2)));
    assert_eq!(take(&heap, 3), Some((5, 3)));
    check(&heap, 512, 512 - 15);
}

#[test]
fn the_whole_heap_in_one_run() {
    let heap = heap(5000);
    assert_eq!(take(&heap, 5001), None);
    assert_eq!(take(&heap, 5000), Some((0, 5000)));
    assert_eq!(take(&heap, 1), None);
    check(&heap, 5000, 0);
    give(&heap, 0, 5000);
    assert_eq!(take(&heap, 5000), Some((0, 5000)));
}

#[test]
fn the_whole_of_a_terabyte_in_one_run() {
    let pages = by_width(1 << 40, 1 << 30) / PAGE;
    let heap = heap(pages);
    assert_eq!(take(&heap, pages), Some((0, pages)));
    assert_eq!(take(&heap, 1), None);
    give(&heap, pages / 2 - 1, 2);
    assert_eq!(take(&heap, 2), Some((pages / 2 - 1, 2)));
}

#[test]
fn the_limit_is_exact() {
    let heap = over(Simulated::new(4096), Config::new(1 << 30).limit(PageCount(777)));
    assert_eq!(heap.limit(), PageCount(777));
    assert_eq!(take(&heap, 700), Some((0, 700)));
    assert_eq!(take(&heap, 78), None);
    assert_eq!(take(&heap, 77), Some((700, 77)));
    assert_eq!(take(&heap, 1), None);
    assert_eq!(heap.stats().refusals, 2);
    check(&heap, 777, 0);
}

#[test]
fn a_limit_can_be_moved() {
    let heap = heap(4096);
    heap.set_limit(PageCount(100));
    assert_eq!(take(&heap, 101), None);
    assert_eq!(take(&heap, 100), Some((0, 100)));
    heap.set_limit(PageCount(10));
    assert_eq!(take(&heap, 1), None);
    give(&heap, 50, 20);
    assert_eq!(take(&heap, 20), Some((50, 20)), "what has grown stays");
    heap.set_limit(PageCount(101));
    assert_eq!(take(&heap, 2), None);
    assert_eq!(take(&heap, 1), Some((100, 1)));
    heap.set_limit(PageCount(usize::MAX));
    assert_eq!(heap.limit(), heap.capacity());
    assert_eq!(take(&heap, 3995), Some((101, 3995)));
}

#[test]
fn runs_cross_words_chunks_and_entries() {
    let heap = heap(3 << 15);
    let all = 3 << 15;
    assert_eq!(take(&heap, all), Some((0, all)));
    for border in [64, 512, 4096, 32768, 65536] {
        for (before, after) in [(1, 1), (3, 70), (600, 5), (63, 64)] {
            let before = before.min(border);
            give(&heap, border - before, before + after);
            assert_eq!(take(&heap, before + after + 1), None);
            let found = take(&heap, before + after);
            assert_eq!(found, Some((border - before, before + after)), "at {border}");
        }
    }
    check(&heap, all, 0);
}

#[test]
fn runs_freed_apart_are_found_as_one() {
    let heap = heap(8192);
    take(&heap, 8192);
    give(&heap, 4096, 600);
    give(&heap, 3000, 1000);
    assert_eq!(take(&heap, 1200), None);
    give(&heap, 4000, 96);
    assert_eq!(take(&heap, 1696), Some((3000, 1696)));
    check(&heap, 8192, 0);
}

#[test]
fn alignment_is_of_the_address() {
    // 3 pages below a 1 GiB boundary.
    let base = by_width(1 << 44, 0) + (1 << 30) - 3 * PAGE;
    let heap = over(Simulated::new(4096).with_base(base), Config::new(3 << 30));
    assert_eq!(heap.address(PageIndex(0)).addr().get(), base);
    for shift in 13..=30 {
        let allocation = heap.allocate_aligned(PageCount(2), 1 << shift).expect("room");
        let address = heap.address(allocation.run.start()).addr().get();
        assert!(address.is_multiple_of(1 << shift), "{address:#x}, {shift}");
    }
    let first = taken(heap.allocate_aligned(PageCount(1), 1 << 30));
    assert_eq!(first, Some((3 + (2 << 17), 1)), "the third border: two are taken");
    assert_eq!(heap.allocate_aligned(PageCount(1), by_width(1 << 40, 1 << 31)), None);
    heap.check().expect("a sound heap");
}

#[test]
fn alignment_takes_the_lowest_run_that_will_do() {
    let heap = over(Simulated::new(4096).with_base(BASE + 5 * PAGE), Config::new(1 << 26));
    assert_eq!(taken(heap.allocate_aligned(PageCount(4), 8 * PAGE)), Some((3, 4)));
    assert_eq!(taken(heap.allocate_aligned(PageCount(4), 16 * PAGE)), Some((11, 4)));
    assert_eq!(take(&heap, 1), Some((0, 1)));
    assert_eq!(taken(heap.allocate_aligned(PageCount(2), 2 * PAGE)), Some((1, 2)));
    assert_eq!(taken(heap.allocate_aligned(PageCount(1), 1)), Some((7, 1)));
}

#[test]
fn alignments_that_are_none_are_refused() {
    let heap = heap(4096);
    assert_eq!(heap.allocate_aligned(PageCount(1), 0), None);
    assert_eq!(heap.allocate_aligned(PageCount(1), 3 * PAGE), None);
    assert_eq!(heap.allocate_aligned(PageCount(1), 1 << (usize::BITS - 1)), None);
    assert_eq!(heap.allocate_aligned(PageCount(usize::MAX), PAGE), None);
    assert_eq!(take(&heap, usize::MAX), None);
    check(&heap, 0, 0);
}

#[test]
fn a_heap_can_be_aligned() {
    let source = Simulated::new(4096).with_base(BASE + PAGE);
    let heap = over(source, Config::new(1 << 20).align(1 << 30));
    assert!(heap.address(PageIndex(0)).addr().get().is_multiple_of(1 << 30));
    let source = Simulated::new(4096).with_base(BASE + PAGE);
    let heap = over(source, Config::new(1 << 20).align(3 << 20));
    assert!(heap.address(PageIndex(0)).addr().get().is_multiple_of(4 << 20));
}

#[test]
fn a_heap_does_not_grow_for_a_run_that_it_cannot_have() {
    let heap = heap(4096);
    let [first, second] = [(); 2].map(|()| heap.allocate(PageCount(1)).unwrap());
    let grown = heap.stats().grown;
    assert!(grown.0 < 2048);
    assert!(heap.grow_in_place(first, PageCount(2048)).is_none());
    assert!(heap.allocate_at(run(second.start().0, 2048)).is_none());
    assert_eq!(heap.stats().grown, grown);
    assert!(heap.grow_in_place(second, PageCount(2048)).is_some());
}

#[test]
fn allocate_at_takes_exactly_these() {
    let heap = heap(4096);
    assert_eq!(taken(heap.allocate_at(run(1000, 50))), Some((1000, 50)));
    assert_eq!(heap.allocate_at(run(1049, 2)), None);
    assert_eq!(heap.allocate_at(run(900, 101)), None);
    assert_eq!(heap.allocate_at(run(4000, 97)), None, "past the capacity");
    assert_eq!(heap.allocate_at(run(usize::MAX - 5, 5)), None);
    assert_eq!(taken(heap.allocate_at(run(900, 100))), Some((900, 100)));
    assert_eq!(taken(heap.allocate_at(run(4095, 1))), Some((4095, 1)));
    assert_eq!(take(&heap, 901), Some((1050, 901)));
    assert_eq!(take(&heap, 900), Some((0, 900)));
    check(&heap, 4096, 4096 - 50 - 100 - 1 - 901 - 900);
}

#[test]
fn extend_grows_a_run_in_place() {
    let heap = heap(2048);
    let first = heap.allocate(PageCount(10)).expect("room");
    let (longer, more) = heap.grow_in_place(first, PageCount(600)).expect("room behind it");
    assert_eq!((numbers(longer), numbers(more.run)), ((0, 600), (10, 590)));
    let wall = heap.allocate(PageCount(1)).expect("room");
    assert_eq!(heap.grow_in_place(longer, PageCount(601)), None);
    assert_eq!(heap.grow_in_place(longer, PageCount(600)), None, "nothing to add");
    assert_eq!(heap.grow_in_place(longer, PageCount(1)), None);
    assert_eq!(heap.grow_in_place(wall, PageCount(usize::MAX)), None);
    assert_eq!(
        heap.grow_in_place(wall, PageCount(2049 - 600)),
        None,
        "past the capacity"
    );
    let (longer, _) = heap
        .grow_in_place(wall, PageCount(2048 - 600))
        .expect("up to the capacity");
    assert_eq!(numbers(longer), (600, 1448));
    check(&heap, 2048, 0);
}

#[test]
fn shrink_gives_the_rest_back() {
    let heap = heap(2048);
    let all = heap.allocate(PageCount(1000)).expect("room");
    // SAFETY: pages of a simulated source are numbers.
    let shrink = |run, to| numbers(unsafe { heap.shrink(run, PageCount(to)) });
    assert_eq!(shrink(all, 1000), (0, 1000));
    assert_eq!(shrink(all, 0), (0, 1000));
    assert_eq!(shrink(all, 5000), (0, 1000));
    assert_eq!(shrink(all, 63), (0, 63));
    assert_eq!(take(&heap, 937), Some((63, 937)));
}

#[test]
fn pages_and_addresses_convert() {
    let heap = heap(4096);
    let base = heap.address(PageIndex(0)).addr().get();
    assert_eq!(
        heap.page_of(std::ptr::without_provenance(base)),
        None,
        "nothing has grown"
    );
    let all = heap.allocate(PageCount(600)).expect("room");
    let bytes = heap.pointer(all);
    assert_eq!((bytes.addr().get(), bytes.len()), (base, 600 * PAGE));
    let page = |address: usize| heap.page_of(std::ptr::without_provenance(address));
    assert_eq!(page(base), Some(PageIndex(0)));
    assert_eq!(page(base + 7 * PAGE + 5), Some(PageIndex(7)));
    assert_eq!(page(base - 1), None);
    assert_eq!(page(base + 1024 * PAGE - 1), Some(PageIndex(1023)));
    assert_eq!(page(base + 1024 * PAGE), None, "two chunks have grown");
    assert_eq!(page(0), None);
    let of = |address: usize, bytes| heap.run_of(std::ptr::without_provenance(address), bytes);
    assert_eq!(of(base + PAGE, PAGE + 1), Some(run(1, 2)));
    assert_eq!(of(base + PAGE, 0), None);
    assert_eq!(of(base - PAGE, 5), None);
}

#[test]
fn growth_is_by_need_and_an_eighth() {
    let heap = heap(by_width(1 << 20, 1 << 18));
    take(&heap, 1);
    check(&heap, 512, 511);
    take(&heap, 16384);
    assert_eq!(heap.stats().grown, PageCount(16384 + 512), "its end counts");
    take(&heap, 512);
    assert_eq!(
        heap.stats().grown,
        PageCount((16896_usize + 16896 / 8).next_multiple_of(512))
    );
    assert_eq!(heap.stats().growths, 3);
    take(&heap, by_width(500_000, 150_000));
    take(&heap, by_width(100_000, 50_000));
    let grown = heap.stats().grown.0;
    take(&heap, heap.stats().free.0 + 1);
    assert_eq!(
        heap.stats().grown.0,
        (grown + 8192).next_multiple_of(512),
        "64 MiB at most"
    );
}

#[test]
fn every_page_size_has_its_heap() {
    fn of<G: Shape>() {
        let source = Simulated::new(4096);
        let heap: PageHeap<Simulated, G> = PageHeap::with_shape(source, Config::new(64 << 20)).expect("a heap");
        assert_eq!(heap.capacity().0, (64 << 20) / G::PAGE_BYTES);
        let all = heap.allocate(heap.capacity()).expect("all of it");
        assert_eq!(heap.pointer(all).len(), 64 << 20);
        assert_eq!(heap.allocate(PageCount(1)), None);
        assert_eq!([heap.page_bytes(), heap.stats().page_bytes], [G::PAGE_BYTES; 2]);
        let checked: Result<(), Fault> = heap.check();
        assert_eq!(checked, Ok(()));
    }
    of::<Geometry<5, 12>>();
    of::<Geometry<5, 13>>();
    of::<Geometry<5, 16>>();
    of::<Geometry<1, 21>>();
    of::<Geometry<2, 3>>();
}

/// A step of 1 GiB is large where there are four in all.
#[test]
fn the_ladder_goes_down_by_small_steps_where_addresses_are_few() {
    use pageheap::source::{Failure, Verb};
    const MOST: usize = 3 << 29;
    let source = Simulated::new(4096).failing(Verb::Reserve, Failure::Above(MOST));
    let capacity = over(source, Config::new(1 << 31)).capacity().0 * PAGE;
    let least = by_width(1 << 30, MOST / 8 * 7);
    assert!((least..=MOST).contains(&capacity), "{capacity}");
}

#[test]
fn the_ladder_takes_what_it_can_get() {
    let heap = over(
        Simulated::new(4096).with_budget(10 << 20),
        Config::new(by_width(1 << 40, 1 << 31)),
    );
    assert!(heap.capacity().0 > (9 << 20) / PAGE, "{:?}", heap.capacity());
    let source = Simulated::new(4096).failing(
        pageheap::source::Verb::Reserve,
        pageheap::source::Failure::Above(5 << 20),
    );
    let heap = over(source, Config::new(64 << 20));
    // In steps of an eighth.
    let capacity = heap.capacity().0 * PAGE;
    assert!(capacity <= 5 << 20 && capacity > 4 << 20, "{capacity}");
    assert_eq!(take(&heap, 512), Some((0, 512)));
}

/// Who has too little memory learns how much of what was missing, and how much there was.
#[test]
fn a_heap_that_finds_no_room_says_how_much_it_needs() {
    for (budget, why) in [
        (
            12 << 10,
            "the source has no memory for 8192 bytes of tables of the smallest heap; it had 4096 bytes left",
        ),
        (
            4 << 10,
            "the source would not reserve 8192 bytes of address space for the pages of the smallest heap, aligned as \
             requested; it had 4096 bytes left",
        ),
    ] {
        let poor = Simulated::new(4096).with_budget(budget);
        let none: Result<PageHeap<&Simulated>, _> = PageHeap::new(&poor, Config::new(1 << 30));
        assert_eq!(none.map_err(|error| error.to_string()).err().as_deref(), Some(why));
        poor.assert_all_returned();
    }
}
