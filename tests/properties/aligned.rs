//! Requests for an alignment, in torn heaps, with any phase: each gets the lowest run that meets it.

use proptest::prelude::*;

use pageheap::internals::{Request, Shape};
use pageheap::source::Simulated;
use pageheap::{Config, Geometry, PageCount, PageHeap};

use super::cases;

/// Part of a heap: of each `period` pages the first `free` ones are free.
#[derive(Clone, Copy, Debug)]
struct Part {
    pages: usize,
    period: usize,
    free: usize,
}

fn parts() -> impl Strategy<Value = Vec<Part>> {
    let period = prop_oneof![1..=9_usize, 1..=70_usize, 1..=700_usize, Just(2), Just(8), Just(64)];
    let part = (1..=900_usize, period, any::<proptest::sample::Index>()).prop_map(|(pages, period, free)| Part {
        pages,
        period,
        free: free.index(period + 1),
    });
    proptest::collection::vec(part, 1..10)
}

fn request() -> impl Strategy<Value = Request> {
    let pages = prop_oneof![3 => 1..=9_usize, 2 => 1..=70_usize, 2 => 1..=600_usize];
    (pages, 0..=10_u32, any::<usize>()).prop_map(|(pages, shift, phase)| Request {
        pages,
        align: 1 << shift,
        phase: phase & ((1 << shift) - 1),
    })
}

/// What is done with a request.
#[derive(Clone, Copy, Debug)]
enum Way {
    Claim,
    /// Without the tree.
    ByBits,
    /// Claims, and gives back.
    Pair,
}

fn ways() -> impl Strategy<Value = Way> {
    prop_oneof![3 => Just(Way::Claim), 1 => Just(Way::ByBits), 1 => Just(Way::Pair)]
}

/// The lowest run, page by page.
fn lowest(free: &[bool], request: Request) -> Option<usize> {
    let (mut run, mut found) = (0, None);
    for page in (0..free.len()).rev() {
        run = if free[page] { run + 1 } else { 0 };
        if run >= request.pages && (page + request.phase).is_multiple_of(request.align) {
            found = Some(page);
        }
    }
    found
}

fn compare<G: Shape>(parts: &[Part], requests: &[(Request, Way)]) {
    let pages = |part: &Part| {
        (0..part.pages)
            .map(|page| page % part.period < part.free)
            .collect::<Vec<_>>()
    };
    let mut free: Vec<bool> = parts.iter().flat_map(pages).collect();
    let source = Simulated::new(4096);
    let heap: PageHeap<&Simulated, G> =
        PageHeap::with_shape(&source, Config::new(free.len() << G::PAGE_SHIFT)).expect("a heap");
    free.resize(heap.capacity().0, false);
    heap.allocate(PageCount(free.len())).expect("an empty heap");
    let set = heap.free_set();
    let mut page = 0;
    for run in free.chunk_by(|one, other| one == other) {
        if run[0] {
            set.release(page, run.len()).expect("in use");
        }
        page += run.len();
    }
    for &(request, way) in requests {
        let expected = lowest(&free, request);
        let found = match way {
            Way::ByBits => set.hold_by_bits(&request),
            Way::Claim | Way::Pair => set.claim(&request).map(|claim| claim.start),
        };
        assert_eq!(found, expected, "{request:?}, {way:?}");
        match (found, way) {
            (Some(start), Way::Pair) => set.release(start, request.pages).expect("held"),
            (Some(start), _) => free[start..start + request.pages].fill(false),
            (None, _) => {}
        }
    }
    set.check().expect("an invariant");
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn the_lowest_aligned_run(parts in parts(), requests in proptest::collection::vec((request(), ways()), 1..40)) {
        compare::<Geometry>(&parts, &requests);
        compare::<Geometry<1>>(&parts, &requests);
        compare::<Geometry<3, 13, 4, 2>>(&parts, &requests);
        compare::<Geometry<5, 13, 2, 1>>(&parts, &requests);
    }
}
