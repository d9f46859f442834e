//! Heaps of many shapes, compared with the model.

use proptest::prelude::*;

use pageheap::internals::Shape;
use pageheap::source::{Contents, Simulated};
use pageheap::{Config, Geometry, PageCount, PageHeap};

use super::cases;
use super::common::BASE;
use super::model::{Options, Runner, decode};

/// How a heap is set up.
#[derive(Clone, Copy, Debug)]
struct Start {
    granule: usize,
    /// Pages of the range, at most.
    pages: usize,
    limit: usize,
    /// Where the range starts, in pages past a gigabyte boundary.
    shift: usize,
    zero: bool,
    shards: usize,
    caches: usize,
}

fn starts(most: usize) -> impl Strategy<Value = Start> {
    let granules = prop_oneof![3 => Just(4096), 1 => Just(16384), 1 => Just(65536)];
    let rest = (any::<bool>(), 0..3_usize, 0..4_usize);
    (granules, 1..=most, any::<u16>(), 0..70_usize, rest).prop_map(
        move |(granule, pages, limit, shift, (zero, shards, caches))| Start {
            granule,
            pages,
            limit: if limit % 4 == 0 {
                0
            } else {
                usize::from(limit) % (pages + 1)
            },
            shift,
            zero,
            shards,
            caches,
        },
    )
}

/// Steps as bytes, so that a fuzz target can find the same failures.
fn steps(most: usize) -> impl Strategy<Value = Vec<[u8; 4]>> {
    proptest::collection::vec(any::<[u8; 4]>(), 0..most)
}

fn config<G: Shape>(start: &Start) -> Config {
    let config = Config::new(start.pages << G::PAGE_SHIFT)
        .shards(start.shards)
        .caches(start.caches);
    if start.limit == 0 {
        config
    } else {
        config.limit(PageCount(start.limit))
    }
}

fn options(start: &Start) -> Options {
    Options {
        zero: start.zero,
        shards: start.shards,
        caches: start.caches,
    }
}

fn source<G: Shape, const COMMITS: bool>(start: &Start, source: Simulated<COMMITS>) -> Simulated<COMMITS> {
    let unit = start.granule.max(G::PAGE_BYTES);
    let contents = if start.zero { Contents::Zero } else { Contents::Unknown };
    source.with_base(BASE + start.shift * unit).with_contents(contents)
}

/// Compares one heap with the model, over a list of steps.
fn compare<G: Shape>(start: Start, bytes: &[[u8; 4]]) {
    let source = source::<G, false>(&start, Simulated::new(start.granule));
    let heap: PageHeap<&Simulated, G> = PageHeap::with_shape(&source, config::<G>(&start)).expect("a heap");
    let mut runner = Runner::new(&heap, options(&start));
    runner.run(&decode(bytes.as_flattened()));
    runner.finish();
    drop(runner);
    drop(heap);
    source.assert_all_returned();
}

/// The same, over a source that commits.
fn compare_committing<G: Shape>(start: Start, bytes: &[[u8; 4]]) {
    let start = Start { granule: 4096, ..start };
    let source = source::<G, true>(&start, Simulated::committing(start.granule));
    let heap: PageHeap<&Simulated<true>, G> = PageHeap::with_shape(&source, config::<G>(&start)).expect("a heap");
    let mut runner = Runner::new(&heap, options(&start));
    runner.run(&decode(bytes.as_flattened()));
    runner.finish();
    drop(runner);
    drop(heap);
    source.assert_all_returned();
}

macro_rules! shapes {
    ($($name:ident: $shape:ty, $pages:expr;)*) => {
        $(
            proptest! {
                #![proptest_config(cases(12))]
                #[test]
                fn $name(start in starts($pages), steps in steps(120)) {
                    compare::<$shape>(start, &steps);
                }
            }
        )*
    };
}

shapes! {
    default_shape: Geometry, 9000;
    one_level: Geometry<1>, 6000;
    two_levels_of_4k: Geometry<2, 12>, 6000;
    three_levels_of_64k: Geometry<3, 16>, 6000;
    four_levels_of_16k: Geometry<4, 14>, 6000;
    five_levels_of_4k: Geometry<5, 12>, 9000;
    five_levels_by_two_word_chunks: Geometry<5, 13, 2, 1>, 3000;
    four_levels_by_two_of_64k: Geometry<4, 16, 2, 2>, 3000;
    three_levels_by_four: Geometry<3, 13, 4, 2>, 4000;
    five_levels_by_four_word_chunks: Geometry<5, 12, 4, 1>, 4000;
    two_levels_of_wide_words: Geometry<2, 13, 8, 1>, 3000;
    one_level_of_words: Geometry<1, 16, 2, 1>, 2000;
    four_levels_of_half_chunks: Geometry<4, 13, 8, 4>, 5000;
}

proptest! {
    #![proptest_config(cases(12))]

    #[test]
    fn committing(start in starts(4000), steps in steps(120)) {
        compare_committing::<Geometry>(start, &steps);
        compare_committing::<Geometry<3, 12, 2, 1>>(start, &steps);
    }

    /// Heaps next to each other do not affect each other.
    #[test]
    fn several_heaps(start in starts(2000), steps in steps(90)) {
        let source = source::<Geometry<3, 12, 4, 2>, false>(&start, Simulated::new(start.granule));
        let heap = || -> PageHeap<&Simulated, Geometry<3, 12, 4, 2>> {
            PageHeap::with_shape(&source, config::<Geometry<3, 12>>(&start)).expect("a heap")
        };
        let heaps = [heap(), heap(), heap()];
        let mut runners = [&heaps[0], &heaps[1], &heaps[2]].map(|heap| Runner::new(heap, options(&start)));
        for (step, op) in decode(steps.as_flattened()).into_iter().enumerate() {
            runners[step % 3].step(op);
        }
        runners.iter_mut().for_each(Runner::finish);
    }
}
