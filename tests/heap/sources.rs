//! What a source does to a heap: failing calls, growing tables, and everything returned at the end.

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;

use pageheap::source::{Contents, Failure, HugePages, Purpose, Refused, Reservation, Source, Verb};
use pageheap::{Geometry, NewHeapError};

use super::*;

/// A bit of everything that calls the source. Works with whatever it gets.
fn exercise<const COMMITS: bool>(heap: &PageHeap<&Simulated<COMMITS>>) -> Vec<PageRun> {
    let mut live = Vec::new();
    live.extend(heap.allocate(PageCount(1)));
    live.extend(heap.allocate(PageCount(700)));
    live.extend(
        heap.allocate_aligned(PageCount(3), 1 << 20)
            .map(|allocation| allocation.run),
    );
    live.extend(heap.allocate_on(1, PageCount(5)));
    if let Some(cache) = heap.cache() {
        live.extend(cache.allocate(PageCount(2)));
        live.extend(cache.allocate(PageCount(40)));
    }
    live.extend(heap.allocate(PageCount(70_000)));
    live.extend(heap.allocate_at(run(100_000, 9)).map(|allocation| allocation.run));
    if let Some(run) = live.pop() {
        // SAFETY: pages of a simulated source are numbers.
        unsafe { heap.free(run) };
    }
    heap.scavenge(PageCount(1000));
    live.extend(heap.allocate(PageCount(600)));
    live
}

/// The k-th call of the verb fails, for every possible k. The heap stays sound, and works fully once the source has
/// recovered.
fn survives<const COMMITS: bool>(new: fn(usize) -> Simulated<COMMITS>, verb: Verb, times: usize) {
    for after in 0.. {
        let source = new(4096).failing(verb, Failure::Calls { after, times });
        let config = Config::new(by_width(1 << 33, 1 << 31)).shards(2);
        let heap: Result<PageHeap<&Simulated<COMMITS>>, _> = PageHeap::new(&source, config);
        if let Ok(heap) = heap {
            let mut live = exercise(&heap);
            heap.check().unwrap_or_else(|fault| panic!("{verb:?} {after}: {fault}"));
            if verb != Verb::Unreserve {
                source.heal();
            }
            live.extend(exercise(&heap));
            for &run in &live {
                let bytes = heap.pointer(run);
                source.assert_ready(bytes.cast(), bytes.len());
            }
            assert!(live.len() >= 7, "{verb:?} {after}: {live:?}");
            // SAFETY: pages of a simulated source are numbers.
            unsafe { heap.free_batch(&mut live) };
            heap.flush_shards();
            let stats = heap.stats();
            assert_eq!(stats.free, stats.grown, "{verb:?} {after}\n{stats}");
            heap.check().unwrap_or_else(|fault| panic!("{verb:?} {after}: {fault}"));
        }
        source.assert_all_returned();
        if source.failures(verb) == 0 {
            assert!(after > 0, "{verb:?} is never called");
            return;
        }
    }
}

#[test]
fn any_reserve_may_fail() {
    survives(Simulated::new, Verb::Reserve, 1);
    survives(Simulated::new, Verb::Reserve, 4);
    survives(Simulated::new, Verb::Reserve, usize::MAX);
}

#[test]
fn any_prepare_may_fail() {
    survives(Simulated::new, Verb::Prepare, 1);
    survives(Simulated::new, Verb::Prepare, 3);
    survives(Simulated::new, Verb::Prepare, usize::MAX);
}

#[test]
fn any_release_may_fail() {
    survives(Simulated::new, Verb::Release, 1);
    survives(Simulated::new, Verb::Release, usize::MAX);
}

#[test]
fn any_commit_may_fail() {
    let unknown = |granule| Simulated::committing(granule).with_contents(Contents::Unknown);
    for times in [1, 2, usize::MAX] {
        survives(Simulated::committing, Verb::Commit, times);
        survives(unknown, Verb::Commit, times);
    }
}

#[test]
fn any_call_of_a_source_that_commits_may_fail() {
    for verb in [Verb::Reserve, Verb::Prepare, Verb::Release, Verb::Unreserve] {
        survives(Simulated::committing, verb, 1);
    }
}

#[test]
fn what_could_not_be_committed_is_committed_the_next_time() {
    let heap = over(Simulated::committing(4096), Config::new(1 << 24));
    take(&heap, 4);
    give(&heap, 1, 2);
    heap.source().fail(Verb::Commit, Failure::Every(1));
    let scavenged = heap.stats().scavenged;
    assert_eq!(take(&heap, 10), None);
    assert_eq!(heap.stats().scavenged, scavenged, "as they were");
    assert_eq!(take(&heap, 2), Some((1, 2)), "these are Ready");
    heap.source().heal();
    let again = heap.allocate_tracked(PageCount(10)).expect("room");
    assert_eq!((numbers(again.run), again.is_zeroed()), ((4, 10), true));
    let bytes = heap.pointer(again.run);
    heap.source().assert_ready(bytes.cast(), bytes.len());
    check(&heap, 512, 498);
}

/// Regression: the lowest free pages were tried, and nothing else, now and ever after.
#[test]
fn if_nothing_can_be_committed_what_is_ready_is_used() {
    let heap = over(Simulated::committing(4096), Config::new(1 << 24));
    // 3 pages scavenged, 150 Ready, from 100; then Ready pages with holes.
    take(&heap, 512);
    give(&heap, 97, 3);
    heap.scavenge(PageCount(usize::MAX));
    give(&heap, 100, 150);
    for page in (260..300).step_by(3) {
        give(&heap, page, 2);
    }
    heap.source().fail(Verb::Commit, Failure::Every(1));
    assert_eq!(take(&heap, 149), Some((100, 149)), "across words");
    assert_eq!(take(&heap, 2), Some((260, 2)), "a page at 249, and a hole behind it");
    assert_eq!(take(&heap, 3), None);
    let cache = heap.cache().unwrap();
    assert_eq!(cache.allocate(PageCount(1)).map(numbers), Some((249, 1)));
    let aligned = heap.allocate_aligned(PageCount(1), 4 * 8192).expect("aligned").run;
    assert_eq!(heap.address(aligned.start()).addr().get() % (4 * 8192), 0);
    assert!((260..300).contains(&aligned.start().0), "{aligned}");
    let mut rest = 0;
    while take(&heap, 1).is_some() {
        rest += 1;
    }
    assert_eq!(rest, 28 - 2 - 1, "every page that is Ready");
    drop(cache);
    // It has grown meanwhile, by pages that cannot be committed either.
    check(&heap, 1024, 512 + 3);
}

#[test]
fn a_source_that_commits_need_not_know_what_pages_read_as() {
    let heap = over(
        Simulated::committing(4096).with_contents(Contents::Unknown),
        Config::new(1 << 24),
    );
    for _ in 0..2 {
        let all = heap.allocate_tracked(PageCount(512)).expect("room");
        assert_eq!(all.scavenged, PageCount::ZERO);
        let bytes = heap.pointer(all.run);
        heap.source().assert_ready(bytes.cast(), bytes.len());
        give(&heap, 0, 512);
        assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount(512));
        assert_eq!(heap.stats().scavenged, PageCount(512), "backed by nothing, if not zero");
    }
}

#[test]
fn any_unreserve_may_fail() {
    survives(Simulated::new, Verb::Unreserve, 1);
}

#[test]
fn a_refused_growth_is_tried_again_with_the_least() {
    let heap = heap(1 << 16);
    take(&heap, 16384);
    heap.source().fail(Verb::Prepare, Failure::Above(1000 * PAGE));
    assert_eq!(take(&heap, 10), Some((16384, 10)));
    check(&heap, 16394, 0);
    assert_eq!(take(&heap, 1001), None);
    heap.source().heal();
    assert_eq!(take(&heap, 1001), Some((16394, 1001)));
}

#[test]
fn a_heap_without_room_is_an_error_with_words() {
    let new = |source: &Simulated| {
        PageHeap::new(source, Config::new(1 << 24))
            .err()
            .map(|error| error.to_string())
    };
    let pages = Simulated::new(4096).failing(Verb::Reserve, Failure::Every(1));
    let tables = Simulated::new(4096).failing(Verb::Prepare, Failure::Every(1));
    let said = [
        "the source would not reserve 1048576 bytes of address space for the pages of the smallest heap, aligned as \
         requested",
        "the source has no memory for 8192 bytes of tables of the smallest heap",
    ];
    assert_eq!(new(&pages).as_deref(), Some(said[0]));
    assert_eq!(new(&tables).as_deref(), Some(said[1]));
    pages.assert_all_returned();
    tables.assert_all_returned();
    let large = Simulated::committing(2 * PAGE);
    let error = PageHeap::new(&large, Config::new(1 << 24)).err();
    assert_eq!(error, Some(NewHeapError::Granule));
    assert_eq!(
        NewHeapError::Granule.to_string(),
        "the source's granule is no power of two, less than a cache line, or more than a page where pages are committed"
    );
    large.assert_all_returned();
}

#[test]
fn dropping_returns_everything() {
    let source = Simulated::new(4096);
    let heap = PageHeap::new(&source, Config::new(by_width(1 << 34, 1 << 31)).shards(3)).expect("a heap");
    let live = exercise(&heap);
    assert!(!live.is_empty());
    drop(heap);
    source.assert_all_returned();
}

#[test]
fn heaps_share_a_source() {
    let source = Simulated::new(4096);
    let heap = || -> PageHeap<&Simulated> { PageHeap::new(&source, Config::new(1 << 30)).expect("a heap") };
    let (first, second) = (heap(), heap());
    let (a, b) = (first.allocate(PageCount(10)), second.allocate(PageCount(10)));
    let [a, b] = [(&first, a), (&second, b)].map(|(heap, run)| heap.pointer(run.expect("room")));
    assert_ne!(a, b);
    assert_eq!(second.page_of(a.as_ptr().cast()), None);
    drop(first);
    assert!(second.allocate(PageCount(1000)).is_some());
    drop(second);
    source.assert_all_returned();
}

/// A shared source is dropped with the last of its heaps.
#[test]
fn heaps_own_a_source_together() {
    fn used<S: Source>(source: S) {
        let heap = PageHeap::new(source, Config::new(1 << 24)).expect("a heap");
        assert!(heap.allocate(PageCount(3)).is_some());
        heap.check().expect("in order");
    }
    let source = Arc::new(Simulated::new(4096));
    let heap = || -> PageHeap<Arc<Simulated>> { PageHeap::new(source.clone(), Config::new(1 << 24)).expect("a heap") };
    let heaps = [heap(), heap()];
    let [a, b] = heaps
        .each_ref()
        .map(|heap| heap.pointer(heap.allocate(PageCount(3)).expect("room")));
    assert_ne!(a, b);
    drop(heaps);
    assert_eq!(Arc::strong_count(&source), 1);
    used(source.clone());
    used(Box::new(source.clone()));
    used(std::rc::Rc::new(source.clone()));
    source.assert_all_returned();
    assert_eq!(Arc::strong_count(&source), 1);
}

#[test]
fn a_terabyte_begins_small() {
    for shards in [0, 64] {
        let heap = over(
            Simulated::new(4096),
            Config::new(by_width(1 << 40, 1 << 31)).shards(shards).caches(1000),
        );
        take(&heap, 1);
        let bytes = heap.stats().metadata_bytes;
        assert!(bytes < 512 << 10, "{bytes} bytes");
        assert!(bytes <= 16 << 12, "{bytes} bytes");
    }
    let heap = over(Simulated::new(65536), Config::new(by_width(1 << 40, 1 << 31)));
    take(&heap, 1);
    let bytes = heap.stats().metadata_bytes;
    assert!(bytes < 512 << 10, "{bytes} bytes with granules of 64 KiB");
}

#[test]
fn metadata_is_little() {
    let sizes = [1_usize << 17, 1 << 20, 1 << 23, 5_000_000];
    for pages in sizes.into_iter().filter(|&pages| pages <= isize::MAX as usize / PAGE) {
        let heap = heap(pages);
        let mut sizes = vec![heap.stats().metadata_bytes];
        for part in 1..=8 {
            let grown = pages / 8 * part;
            heap.allocate_at(run(grown - 1, 1)).expect("room");
            sizes.push(heap.stats().metadata_bytes);
        }
        assert!(sizes.is_sorted(), "{sizes:?}");
        let bytes = sizes[8];
        // 64 caches, and rounding up to granules.
        let most = pages * 29 / 100 + (64 << 6) + (9 << 12);
        assert!(bytes <= most, "{bytes} bytes for {pages} pages");
    }
}

#[test]
fn tables_grow_with_one_level_as_with_five() {
    fn grows<const LEVELS: usize>() {
        let heap: PageHeap<Simulated, Geometry<LEVELS>> =
            PageHeap::with_shape(Simulated::new(4096), Config::new(by_width(1 << 36, 1 << 31))).expect("a heap");
        let mut end = 1;
        while end <= heap.capacity().0 {
            let page = heap.allocate_at(run(end - 1, 1));
            assert_eq!(taken(page), Some((end - 1, 1)), "{LEVELS} levels");
            end *= 2;
        }
        heap.check().expect("a sound heap");
    }
    grows::<1>();
    grows::<2>();
    grows::<3>();
    grows::<4>();
    grows::<5>();
}

#[test]
fn a_region_of_memory_is_a_heap() {
    use pageheap::source::Region;
    use std::mem::MaybeUninit;
    let bytes: &'static mut [MaybeUninit<u8>] = Box::leak(vec![MaybeUninit::new(0_u8); 4 << 20].into_boxed_slice());
    let region = Region::from_static(bytes);
    let heap: PageHeap<Region, Geometry<2, 12>> =
        PageHeap::with_shape(region, Config::new(usize::MAX / 2)).expect("a heap");
    assert!(heap.capacity().0 > 1000, "{:?}", heap.capacity());
    let all = heap.allocate(heap.capacity()).expect("all of it");
    let memory = heap.pointer(all);
    // SAFETY: the run is allocated here, and is memory.
    unsafe { memory.as_ptr().cast::<u8>().write_bytes(0xA5, memory.len()) };
    heap.check().expect("tables out of the pages' way");
}

#[test]
fn numbers_are_a_heap() {
    use pageheap::source::{Numbers, Split, System};
    let source = Split::new(Numbers::new(0x8000_0000, by_width(1 << 40, 1 << 30)), System);
    let heap: PageHeap<_, Geometry<5, 16>> =
        PageHeap::with_shape(source, Config::new(by_width(1 << 40, 1 << 31))).expect("a heap");
    let run = heap.allocate(PageCount(100)).expect("room");
    assert_eq!(heap.address(run.start()).addr().get() % (1 << 16), 0);
    assert!(heap.allocate(heap.capacity()).is_none());
    heap.check().expect("a sound heap");
}

/// Regression: tables that lay elsewhere were deducted from the pages' budget, and so was a page for an aligned base.
#[test]
fn all_frames_can_be_had_where_tables_come_from_elsewhere() {
    use pageheap::source::{Numbers, Split};
    let frames = |first, bytes| -> usize {
        let source = Split::new(Numbers::new(first, bytes), Simulated::new(4096));
        let heap = PageHeap::new(source, Config::new(usize::MAX)).expect("a heap");
        assert!(heap.allocate(heap.capacity()).is_some());
        heap.check().expect("a sound heap");
        heap.capacity().0
    };
    for pages in [1, 2, 15, 16, 128, 8192, 8191, 1 << 17] {
        assert_eq!(frames(BASE, pages * PAGE), pages);
        // Partial pages at either end do not count.
        assert_eq!(
            frames(BASE - 4096, pages * PAGE + 4096),
            pages,
            "from half a page below"
        );
        let fewer = (pages - 1).max(1);
        assert_eq!(
            frames(BASE - 4096, (fewer + 1) * PAGE),
            fewer,
            "half a page at either end"
        );
    }
    // No more than was asked for.
    let source = Split::new(Numbers::new(BASE, 64 * PAGE), Simulated::new(4096));
    let heap = PageHeap::new(&source, Config::new(16 * PAGE)).expect("a heap");
    assert_eq!(heap.capacity(), PageCount(16));
}

/// Regression: the ladder ended at a megabyte of pages, though there was room for tables of less.
#[test]
fn tables_from_elsewhere_may_have_little_room() {
    use pageheap::source::{Numbers, Region, Split};
    let capacity = |wish| {
        let mut tables = [0_u64; 256];
        // SAFETY: an array of our own, which outlives the heap.
        let tables = unsafe { Region::new(tables.as_mut_ptr().cast(), size_of_val(&tables)) }.with_granule(64);
        let pages = Numbers::new(BASE, 1 << 24).with_granule(64);
        PageHeap::<_, Geometry<1, 6, 2, 1>>::with_shape(Split::new(pages, tables), Config::new(wish).caches(0))
            .map(|heap| heap.capacity().0)
    };
    assert_eq!(capacity(128 << 10), Ok(2048));
    // By eighths, from a MiB.
    for wish in [1 << 20, 2 << 20, usize::MAX] {
        assert!(capacity(wish).expect("a smaller heap") >= 1024, "{wish}");
    }
}

/// A source that breaks its contract: what it reserves has another length, or is in the wrong place.
struct Careless {
    inner: Simulated,
    purpose: Purpose,
    granule: usize,
    /// What it says of the length.
    length: fn(usize) -> usize,
    /// The true length.
    given: Cell<usize>,
    off: usize,
}

// SAFETY: the contract is broken on purpose; the heap notices before anything is written. (The addresses come from a
// source that checks its user.)
unsafe impl Source for &Careless {
    fn granule(&self) -> usize {
        self.granule
    }

    fn budget(&self) -> usize {
        self.inner.budget()
    }

    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        let mut given = self.inner.reserve(purpose, bytes, align)?;
        if purpose == self.purpose {
            given.base = given.base.map_addr(|base| base.saturating_add(self.off));
            self.given.set(given.bytes);
            given.bytes = (self.length)(given.bytes);
        }
        Some(given)
    }

    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.prepare(purpose, start, bytes) }
    }

    unsafe fn commit(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.commit(start, bytes) }
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.release(start, bytes) }
    }

    unsafe fn advise(&self, start: NonNull<u8>, bytes: usize, huge: HugePages) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.advise(start, bytes, huge) }
    }

    unsafe fn unreserve(&self, purpose: Purpose, mut given: Reservation) {
        if purpose == self.purpose {
            given.base = NonNull::new(given.base.as_ptr().wrapping_sub(self.off)).expect("what was reserved");
            given.bytes = self.given.get();
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.unreserve(purpose, given) }
    }
}

#[test]
fn what_was_not_reserved_as_it_was_asked_for_is_no_heap() {
    let opens = |purpose, granule, length: fn(usize) -> usize, off| {
        let inner = Simulated::new(4096);
        let source = Careless {
            inner,
            purpose,
            granule,
            length,
            given: Cell::new(0),
            off,
        };
        let heap: Result<PageHeap<&Careless>, _> = PageHeap::new(&source, Config::new(1 << 22).caches(0));
        let error = heap.as_ref().err().copied();
        drop(heap);
        source.inner.assert_all_returned();
        error.map(|error| match error {
            NewHeapError::NoPages { .. } => "pages",
            NewHeapError::NoMetadata { .. } => "tables",
            _ => "granule",
        })
    };
    for (purpose, error) in [(Purpose::Pages, "pages"), (Purpose::Metadata, "tables")] {
        assert_eq!(opens(purpose, 4096, |bytes| bytes, 0), None);
        let short = opens(purpose, 4096, |bytes| bytes - 4096, 0);
        assert_eq!(short, Some(error), "{purpose:?}");
        assert_eq!(
            opens(purpose, 4096, |bytes| bytes, 64),
            Some(error),
            "not aligned: {purpose:?}"
        );
        let round_the_end = opens(purpose, 4096, |_| usize::MAX, 0);
        assert_eq!(round_the_end, Some(error), "{purpose:?}");
    }
    for granule in [0, 32, 96, 4095, 6000] {
        assert_eq!(
            opens(Purpose::Pages, granule, |bytes| bytes, 0),
            Some("granule"),
            "{granule}"
        );
    }
}

/// A source may give more than it is asked for, and the last granule then does not end where that does.
#[test]
fn advice_is_for_what_was_asked_for() {
    let source = Careless {
        inner: Simulated::new(4096),
        purpose: Purpose::Pages,
        granule: 4096,
        length: |bytes| bytes + 100,
        given: Cell::new(0),
        off: 0,
    };
    let config = Config::new(1 << 22).huge_pages(HugePages::Avoid);
    let heap: PageHeap<&Careless> = PageHeap::new(&source, config).expect("a heap");
    let [(_, bytes, huge)] = source.inner.advised()[..] else {
        panic!("{:?}", source.inner.advised());
    };
    assert_eq!((bytes, huge), (heap.capacity().bytes(13), HugePages::Avoid));
}
