//! Memory in several pieces: what lies between them is never handed out and never touched.

#![allow(
    clippy::single_range_in_vec_init,
    clippy::cloned_ref_to_slice_refs,
    reason = "a list of one gap is one"
)]

use std::collections::BTreeSet;
use std::ops::Range;
use std::ptr::NonNull;

use pageheap::PageUse;
use pageheap::source::{Memory, OverSystem, Region, Source, Split, Verb, Verbs};
use proptest::prelude::*;

use super::*;

/// What the bytes of gaps hold, and what is written into pages.
const FOREIGN: u8 = 0xA5;
const OURS: u8 = 0x5A;

/// Bytes that belong to no one until they are split into pieces and gaps.
struct Bytes(Vec<u8>);

impl Bytes {
    fn new(bytes: usize) -> Self {
        Self(vec![FOREIGN; bytes])
    }

    /// A region over them with these gaps, which are offsets.
    fn region<const GAPS: usize>(&mut self, gaps: &[Range<usize>; GAPS]) -> Region<GAPS> {
        let base = self.0.as_mut_ptr();
        // SAFETY: the heaps of a test are dropped before its bytes, which nothing else uses meanwhile.
        let region = unsafe { Region::new(base, self.0.len()) };
        region.with_gaps(
            gaps.clone()
                .map(|gap| base.wrapping_add(gap.start)..base.wrapping_add(gap.end)),
        )
    }

    /// No byte of a gap has been written.
    #[track_caller]
    fn assert_untouched(&self, gaps: &[Range<usize>]) {
        for gap in gaps {
            let gap = gap.start.min(self.0.len())..gap.end.min(self.0.len());
            let touched = self.0[gap.clone()].iter().position(|&byte| byte != FOREIGN);
            assert_eq!(touched, None, "byte of gap {gap:?}");
        }
    }
}

/// Allocates runs of `pages` pages until there are none, and writes to all of them.
fn exhaust<S: Memory>(heap: &PageHeap<S>, pages: usize) -> Vec<PageRun> {
    let runs: Vec<PageRun> = std::iter::from_fn(|| heap.allocate(PageCount(pages))).collect();
    for &run in &runs {
        let bytes = heap.pointer(run);
        // SAFETY: memory, allocated above.
        unsafe { bytes.cast::<u8>().write_bytes(OURS, bytes.len()) };
    }
    runs
}

/// Pages below the capacity that touch no gap, found by looking at each byte range.
fn memory<S: Source>(heap: &PageHeap<S>, base: usize, gaps: &[Range<usize>]) -> BTreeSet<usize> {
    let is_memory = |page: &usize| {
        let start = heap.address(PageIndex(*page)).addr().get() - base;
        !gaps
            .iter()
            .any(|gap| gap.start < gap.end && gap.start < start + PAGE && gap.end > start)
    };
    (0..heap.capacity().0).filter(is_memory).collect()
}

/// Everything a heap does in several pieces, compared with the pages found one by one.
fn exercise<const GAPS: usize>(
    bytes: &mut Bytes,
    gaps: &[Range<usize>; GAPS],
) -> Result<usize, pageheap::NewHeapError> {
    let base = bytes.0.as_ptr().addr();
    let heap = PageHeap::new(bytes.region(gaps), Config::new(usize::MAX).caches(2))?;
    let memory = memory(&heap, base, gaps);
    let pages =
        |runs: &[PageRun]| -> BTreeSet<usize> { runs.iter().flat_map(|run| run.start().0..run.end().0).collect() };
    for length in [1, 3, 64, 1] {
        let mut runs = exhaust(&heap, length);
        let taken = pages(&runs);
        assert!(taken.is_subset(&memory), "{length}: {:?}", taken.difference(&memory));
        assert!(length > 1 || taken == memory, "lost: {:?}", memory.difference(&taken));
        let stats = heap.stats();
        assert_eq!(stats.in_use.0, taken.len(), "{stats}");
        assert_eq!(stats.grown.0, stats.in_use.0 + stats.free.0 + stats.gaps.0, "{stats}");
        assert_eq!(stats.backed.0, stats.grown.0 - stats.gaps.0, "{stats}");
        assert_eq!(
            stats.bytes_taken(),
            (stats.grown.0 - stats.free.0) * heap.page_bytes(),
            "{stats}"
        );
        assert_eq!(heap.check(), Ok(()));
        // SAFETY: allocated above, and not used any more.
        unsafe { heap.free_batch(&mut runs) };
        assert_eq!(heap.stats().in_use.0, 0);
    }
    let gap_pages: usize = (0..heap.stats().grown.0).filter(|page| !memory.contains(page)).count();
    let drawn = heap.map().filter(|entry| entry.is == PageUse::Gap);
    assert_eq!(drawn.map(|entry| entry.run.pages().0).sum::<usize>(), gap_pages);
    assert_eq!(heap.stats().gaps.0, gap_pages);
    bytes.assert_untouched(gaps);
    Ok(memory.len())
}

#[test]
fn gaps_are_neither_handed_out_nor_touched() {
    let mut bytes = Bytes::new(4 << 20);
    let whole = exercise(&mut bytes, &[]).expect("a heap");
    // Inside a page, across a chunk's end, and of no length at all.
    let gaps = [300_000..300_100, 1 << 20..3 << 20, 3_500_000..3_500_000];
    let pieces = exercise(&mut Bytes::new(4 << 20), &gaps).expect("a heap");
    let lost = whole - pieces;
    assert!(
        (256..=260).contains(&lost),
        "{lost} pages for a gap of 256 and one of 100 bytes"
    );
}

#[test]
fn the_first_pages_may_be_a_gap() {
    let gap = 0..1 << 20;
    assert!(exercise(&mut Bytes::new(2 << 20), &[gap]).expect("a heap") > 100);
}

#[test]
fn tables_lie_in_the_highest_piece_with_room() {
    // The last piece has 2,000 bytes: the tables lie below the gap, and the piece is not used.
    let gap = (2 << 20) - 102_000..(2 << 20) - 2000;
    let mut bytes = Bytes::new(2 << 20);
    assert!(exercise(&mut bytes, &[gap]).expect("a heap") > 200);
    let last = bytes.0.len() - 2000;
    assert!(bytes.0[last..].iter().all(|&byte| byte == FOREIGN));
}

#[test]
fn a_region_that_is_one_gap_is_no_heap() {
    for end in [1 << 20, usize::MAX >> 1] {
        let gap = 0..end;
        exercise(&mut Bytes::new(1 << 20), &[gap]).expect_err("no memory");
    }
}

#[test]
fn a_run_is_not_extended_into_a_gap() {
    let mut bytes = Bytes::new(1 << 20);
    let gap = 200_000..300_000;
    let heap = PageHeap::new(bytes.region(&[gap]), Config::new(usize::MAX)).expect("a heap");
    let run = heap.allocate(PageCount(20)).expect("room below the gap");
    assert!(heap.grow_in_place(run, PageCount(60)).is_none());
    let in_gap = heap
        .page_of(heap.address(PageIndex(30)).as_ptr())
        .expect("it has grown across");
    assert!(
        heap.allocate_at(PageRun::new(in_gap, PageCount(1)).expect("a run"))
            .is_none()
    );
    assert!(heap.grow_in_place(run, PageCount(21)).is_some());
}

/// As many pages as fit below a gap, or above it, with their tables: what cannot be used is what the documents say.
#[test]
fn a_heap_opens_with_what_its_pieces_have() {
    const KIB: usize = 1 << 10;
    for (length, gap, least) in [
        // RAM below the gap only.
        (16 * KIB, 640..16 * KIB, 600),
        (4 * KIB, 300..4 * KIB, 250),
        (2 * KIB, 48..2 * KIB, 16),
        // The piece above is too short for the tables.
        (16 * KIB, 12_000..16 * KIB - 16, 11_800),
        (16 * KIB, 16 * KIB - 17..16 * KIB - 16, 16_200),
        // They do not fit between the pages and the gap.
        (4 * KIB, 4 * KIB - 16..4 * KIB - 8, 4000),
        (64 * KIB, 64 * KIB - 16..64 * KIB - 8, 65_300),
        // They fit above it.
        (16 * KIB, 12_000..15_000, 13_200),
    ] {
        let (gap, length) = (gap.start * KIB..gap.end * KIB, length * KIB);
        let pages = exercise(&mut Bytes::new(length), &[gap.clone()]);
        let pages = pages.unwrap_or_else(|error| panic!("{length}, {gap:?}: {error}"));
        assert!(pages * PAGE >= least * KIB, "{length}, {gap:?}: {}", pages * PAGE / KIB);
    }
    // Behind several gaps, none of which leaves room above.
    let gaps = [
        2000 * KIB..2100 * KIB,
        2110 * KIB..2200 * KIB,
        2204 * KIB..3000 * KIB - 5,
    ];
    let pages = exercise(&mut Bytes::new(3000 * KIB), &gaps).expect("a heap");
    assert!(pages * PAGE > 1900 * KIB, "{pages}");
}

/// A scavenging thread has at most an eighth of the memory in hand, or a huge page, however wide the gaps.
#[test]
fn a_gap_does_not_count_in_what_a_thread_may_hold() {
    const MIB: usize = 1 << 20;
    let gap = BASE + 12 * MIB..BASE + 60 * MIB;
    let heap = over(Simulated::new(4096).with_gaps(&[gap]), Config::new(64 * MIB));
    while heap.allocate(PageCount(1)).is_some() {}
    give(&heap, 0, 12 * MIB / PAGE);
    assert_eq!(heap.scavenge(PageCount(usize::MAX)).0, 12 * MIB / PAGE);
    assert_eq!(heap.source().calls(Verb::Release), 6, "a huge page each");
}

#[test]
fn a_source_behind_another_has_its_gaps() {
    fn gaps_of<S: Memory>(source: S) -> usize {
        let heap = PageHeap::new(source, Config::new(usize::MAX)).expect("a heap");
        exhaust(&heap, 1);
        heap.stats().gaps.0
    }
    let gap = 100_000..200_000;
    let mut bytes = Bytes::new(1 << 20);
    let mut tables = Bytes::new(1 << 16);
    let (alone, boxed) = (bytes.region(&[gap.clone()]), Box::new(bytes.region(&[gap.clone()])));
    let shared = std::sync::Arc::new(bytes.region(&[gap.clone()]));
    let split = Split::new(bytes.region(&[gap.clone()]), tables.region(&[]));
    let pages = gaps_of(bytes.region(&[gap.clone()]));
    assert!((13..=14).contains(&pages), "{pages}, depending on where the bytes lie");
    assert_eq!(
        [gaps_of(&alone), gaps_of(boxed), gaps_of(shared), gaps_of(split)],
        [pages; 4]
    );
    bytes.assert_untouched(&[gap]);
}

#[test]
fn a_gap_that_ends_before_it_begins_reaches_to_the_end() {
    let mut bytes = Bytes::new(1 << 20);
    let base = bytes.0.as_mut_ptr();
    // SAFETY: the heap is dropped before its bytes.
    let region = unsafe { Region::new(base, 1 << 20) };
    let region = region.with_gaps([base.wrapping_add(500_000)..std::ptr::null_mut()]);
    let heap = PageHeap::new(region, Config::new(usize::MAX)).expect("a heap");
    exhaust(&heap, 1);
    drop(heap);
    let gap = 500_000..1 << 20;
    bytes.assert_untouched(&[gap]);
}

#[test]
fn pages_of_a_gap_cannot_be_freed() {
    let source = Simulated::new(4096).with_gaps(&[BASE + 10 * PAGE + 1..BASE + 12 * PAGE]);
    let heap = over(source, Config::new(64 * PAGE).caches(1));
    while heap.allocate(PageCount(1)).is_some() {}
    let cache = heap.cache().expect("a cache");
    for (start, pages) in [(10, 1), (11, 1), (9, 2), (9, 4), (0, 64)] {
        let run = run(start, pages);
        // SAFETY: pages of a simulated source are numbers.
        let errors = unsafe { [heap.try_free(run), cache.try_free(run), heap.try_free_batch(&mut [run])] };
        for error in errors {
            let error = error.expect_err("part of it is a gap");
            assert!(!error.is_free_already());
            assert_eq!(error.address(), BASE + start.max(10) * PAGE, "{error}");
        }
        assert!(
            heap.run_of(heap.address(PageIndex(start)).as_ptr(), pages * PAGE)
                .is_none()
        );
    }
    assert!(heap.allocate(PageCount(1)).is_none());
    give(&heap, 12, 1);
    give(&heap, 0, 10);
    assert_eq!(heap.check(), Ok(()));
}

#[test]
fn the_check_finds_a_free_page_in_a_gap() {
    let heap = over(
        Simulated::new(4096).with_gaps(&[BASE + 70 * PAGE..BASE + 71 * PAGE]),
        Config::new(128 * PAGE),
    );
    while heap.allocate(PageCount(1)).is_some() {}
    assert_eq!(heap.check(), Ok(()));
    // As a stray write might.
    heap.free_set().release(70, 1).expect("it was not free");
    let fault = heap.check().expect_err("a page in a gap is free").to_string();
    assert!(fault.contains("I20: page 70 is in a gap"), "{fault}");
}

/// A source that knows the state of every page sees no verb for a gap, whatever the granule.
#[test]
fn no_verb_is_called_for_a_gap() {
    fn work<const COMMITS: bool>(source: Simulated<COMMITS>) {
        let gaps = [BASE + 70_000..BASE + 80_000, BASE + (3 << 20)..BASE + (9 << 20) + 1];
        let heap = over(source.with_gaps(&gaps), Config::new(16 << 20).caches(1));
        for pages in [1, 5, 40, 300] {
            let mut runs: Vec<PageRun> = std::iter::from_fn(|| heap.allocate(PageCount(pages))).collect();
            assert!(runs.len() * pages > 700, "{pages}");
            for run in &runs {
                let bytes = heap.pointer(*run);
                heap.source().assert_ready(bytes.cast(), bytes.len());
            }
            // SAFETY: pages of a simulated source are numbers.
            unsafe { heap.free_batch(&mut runs) };
            assert!(heap.scavenge(PageCount(usize::MAX)).0 > 700);
            assert_eq!(heap.check(), Ok(()));
            let stats = heap.stats();
            assert_eq!(stats.free.0 + stats.gaps.0, stats.grown.0, "{stats}");
        }
    }
    work(Simulated::new(4 << 10));
    work(Simulated::new(64 << 10));
    work(Simulated::committing(4 << 10));
}

/// A source whose gaps are none.
struct Odd(Range<usize>);

// SAFETY: the verbs are the system's; the gaps only withhold pages.
unsafe impl Verbs for Odd {
    fn gap(&self, _start: NonNull<u8>, _bytes: usize) -> Option<Range<usize>> {
        Some(self.0.clone())
    }
}

/// No source may say so, but a heap must not grow for ever.
#[test]
fn gaps_that_are_none_do_not_stop_the_growth() {
    for gap in [0..0, usize::MAX - 1..usize::MAX, 0..usize::MAX] {
        let heap = PageHeap::new(OverSystem(Odd(gap)), Config::new(8 << 20)).expect("a heap");
        exhaust(&heap, 1);
        assert_eq!(heap.stats().grown, heap.capacity());
        assert_eq!(heap.check(), Ok(()));
    }
}

/// The longest piece of `length` bytes with these gaps.
fn longest_piece(length: usize, gaps: &[Range<usize>]) -> usize {
    let mut gaps: Vec<_> = gaps.iter().filter(|gap| !gap.is_empty()).cloned().collect();
    gaps.sort_unstable_by_key(|gap| gap.start);
    let (mut longest, mut end) = (0, 0);
    for gap in gaps {
        longest = longest.max(gap.start.min(length).saturating_sub(end));
        end = end.max(gap.end);
    }
    longest.max(length.saturating_sub(end))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 200 }))]

    #[test]
    fn any_gaps(
        length in 200_000_usize..3 << 20,
        gaps in prop::array::uniform4((0_usize..3 << 20, prop_oneof![0_usize..2, 1_usize..20_000, 1_usize..1 << 20])),
    ) {
        let gaps = gaps.map(|(start, bytes)| start..start + bytes);
        let mut bytes = Bytes::new(length);
        // Nothing is written to a gap, even if there turns out to be no heap; and then no smaller one either. (Where no
        // piece has more than a few pages, it is a matter of alignment which wish fits.)
        if exercise(&mut bytes, &gaps).is_err() && longest_piece(length, &gaps) >= 40 << 10 {
            for eighth in 1..8 {
                let heap: Result<PageHeap<_>, _> =
                    PageHeap::new(bytes.region(&gaps), Config::new(length / 8 * eighth).caches(2));
                prop_assert!(heap.is_err(), "{eighth} eighths open");
            }
        }
        bytes.assert_untouched(&gaps);
    }

    /// The tables would lie there: they lie below the gaps, or above, or between, and little is lost.
    #[test]
    fn gaps_near_the_end(
        length in 300_000_usize..3 << 20,
        gaps in prop::array::uniform3((1_usize..60_000, 1_usize..20_000)),
    ) {
        let gaps = gaps.map(|(before, bytes)| length - before..length - before + bytes);
        let pages = exercise(&mut Bytes::new(length), &gaps).expect("a heap");
        // At most 24 KiB are tables or lost to alignment, at either end.
        let first = gaps.iter().map(|gap| gap.start).min().expect("three");
        prop_assert!(pages + 6 >= first / PAGE, "{pages} pages, {length} bytes, {gaps:?}");
    }
}
