//! Memory in several pieces: what lies between them is never handed out and never touched.

use std::collections::BTreeSet;
use std::ops::Range;
use std::ptr::NonNull;

use pageheap::PageUse;
use pageheap::source::{Memory, OverSystem, Region, Source, Verbs};
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
    let heap: PageHeap<Region<GAPS>> = PageHeap::new(bytes.region(gaps), Config::new(usize::MAX).caches(2))?;
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
        (257..=260).contains(&lost),
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
    let heap: PageHeap<_> = PageHeap::new(bytes.region(&[gap]), Config::new(usize::MAX)).expect("a heap");
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
        let heap: PageHeap<OverSystem<Odd>> =
            PageHeap::new(OverSystem(Odd(gap)), Config::new(8 << 20)).expect("a heap");
        exhaust(&heap, 1);
        assert_eq!(heap.stats().grown, heap.capacity());
        assert_eq!(heap.check(), Ok(()));
    }
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
        // Nothing is written to a gap, even if there turns out to be no heap.
        let _ = exercise(&mut bytes, &gaps);
        bytes.assert_untouched(&gaps);
    }
}
