//! Random operations, all verified: no two blocks overlap, and none loses a byte.

use std::collections::BTreeMap;

use super::*;

/// Live blocks by address, with their ends.
#[derive(Default)]
struct Shadow(BTreeMap<usize, usize>);

impl Shadow {
    fn add(&mut self, block: &Block) {
        let (start, end) = (block.memory.addr(), block.memory.addr() + block.layout.size());
        let before = self.0.range(..end).next_back();
        assert!(
            before.is_none_or(|(_, &before)| before <= start),
            "{:?} at {start:#x} overlaps",
            block.layout
        );
        self.0.insert(start, end);
    }

    fn remove(&mut self, block: &Block) {
        assert!(self.0.remove(&block.memory.addr()).is_some());
    }
}

fn churn(heap: &GlobalHeap, operations: usize, live: usize, bits: usize, seed: u64) {
    let (mut random, mut shadow) = (Random(seed), Shadow::default());
    let mut blocks: Vec<Block> = Vec::new();
    for operation in 0..operations {
        if blocks.len() < live && random.below(3) != 0 || blocks.is_empty() {
            let shifts = if random.below(8) == 0 { 17 } else { 5 };
            let align = 1 << random.below(shifts);
            let block = Block::new(heap, layout(random.size(bits), align), operation as u8).unwrap();
            shadow.add(&block);
            blocks.push(block);
            continue;
        }
        let index = random.below(blocks.len());
        if random.below(4) == 0 {
            shadow.remove(&blocks[index]);
            assert!(blocks[index].resize(heap, random.size(bits)));
            shadow.add(&blocks[index]);
        } else {
            let block = blocks.swap_remove(index);
            shadow.remove(&block);
            block.free(heap);
        }
    }
    blocks.into_iter().for_each(|block| block.free(heap));
}

#[test]
fn no_two_blocks_overlap() {
    static HEAP: GlobalHeap = new_heap();
    churn(&HEAP, rounds(2_500_000), 3_000, 9, 1);
    churn(&HEAP, rounds(500_000), 600, 17, 2);
    HEAP.flush_thread();
    HEAP.check().unwrap();
    let stats = HEAP.stats();
    assert_eq!(stats.magazine_bytes, 0, "{stats}");
    assert!(
        stats.slot_bytes < 4096,
        "more than a thread's structure is left:\n{stats}"
    );
    // What is left are the classes' spare spans, and spans with slots in a store.
    assert_eq!(stats.pages.in_use, stats.span_pages, "{stats}");
    HEAP.release(usize::MAX);
    let stats = HEAP.stats();
    assert_eq!(stats.stored_bytes, 0, "{stats}");
    assert!(stats.spans <= 1, "more than a thread's structure is left:\n{stats}");
    HEAP.check().unwrap();
}

#[test]
fn twelve_threads_at_once() {
    static HEAP: GlobalHeap = new_heap().reserve(by_width(1 << 38, 128 << 20));
    for round in 0..4 {
        on_threads(12, |thread| {
            churn(&HEAP, rounds(40_000), 300, 15, 100 * round + thread as u64 + 1)
        });
    }
    HEAP.flush_thread();
    HEAP.release(usize::MAX);
    HEAP.check().unwrap();
    let stats = HEAP.stats();
    assert_eq!(stats.magazine_bytes, 0, "{stats}");
    assert_eq!(stats.pages.in_use, stats.span_pages, "{stats}");
    assert!(stats.thread_structures <= 13, "{stats}");
}
