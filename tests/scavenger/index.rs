//! What is recorded about chunks: packing and unpacking, and when a chunk is worth scanning.

use pageheap::internals::scavenge::index::Chunk;
use proptest::prelude::*;

const PAGES: usize = 512;

proptest! {
    #[test]
    fn packed_and_back(looks in prop::collection::vec((0..=PAGES, any::<u64>(), any::<bool>(), any::<bool>()), 1..50)) {
        let (mut kept, mut chunk) = (0, Chunk::default());
        for (in_use, print, turned, done) in looks {
            chunk = Chunk { done, ..chunk.seen(in_use, print, turned) };
            kept = Chunk { done, ..Chunk::unpack(kept).seen(in_use, print, turned) }.pack();
            prop_assert_eq!(Chunk::unpack(kept), chunk);
            prop_assert!(chunk.peak >= in_use && chunk.in_use == in_use);
        }
    }
}

/// `looks` looks at a chunk, four per generation.
fn seen(chunk: Chunk, in_use: usize, looks: usize) -> Chunk {
    (0..looks).fold(chunk, |chunk, look| chunk.seen(in_use, in_use as u64, look % 4 == 0))
}

#[test]
fn a_dense_chunk_waits_for_a_whole_generation() {
    let dense = seen(Chunk::default(), PAGES, 8);
    assert!(
        !dense.is_ready(PAGES, false) && !dense.is_ready(PAGES, true),
        "nothing is free"
    );
    let after = seen(dense, 300, 4);
    assert!(!after.is_ready(PAGES, false), "it was dense in the generation before");
    assert!(after.is_ready(PAGES, true), "who is forced does not wait");
    let after = seen(after, 300, 4);
    assert!(after.is_ready(PAGES, false));
    assert!(!seen(after, 496, 1).is_ready(PAGES, false), "31 of 32 are dense");
    assert!(seen(after, 496, 1).is_ready(PAGES, true));
}

#[test]
fn a_chunk_that_fills_up_is_left_alone() {
    let calm = seen(Chunk::default(), 100, 12);
    assert!(calm.is_ready(PAGES, false));
    assert!(!calm.seen(101, 1, false).is_ready(PAGES, false));
    assert!(calm.seen(99, 1, false).is_ready(PAGES, false));
}

#[test]
fn done_until_the_bits_change() {
    let print = 0x1234_5678_9abc_def0;
    let chunk = seen(Chunk::default(), 100, 12).seen(100, print, false);
    let done = chunk.examined(true, false);
    assert!(!done.is_ready(PAGES, true));
    assert!(!done.seen(100, print, true).is_ready(PAGES, true));
    assert!(done.seen(100, !print, true).is_ready(PAGES, true));
    // Bits that the scavenger has changed, in two passes: that they are as before tells nothing.
    let done = chunk.examined(false, true).examined(true, true);
    assert!(!done.is_ready(PAGES, true));
    assert!(done.seen(100, print, true).is_ready(PAGES, true));
}
