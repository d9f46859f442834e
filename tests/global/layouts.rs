//! Every size and alignment, impossible ones included; zeroing; resizing.

use super::*;

static HEAP: GlobalHeap = new_heap().reserve(by_width(1 << 38, 128 << 20));

/// Sizes around every boundary: of classes, of pages, of runs.
fn sizes() -> Vec<usize> {
    let mut sizes = vec![1, 2, 3, 5, 7];
    for shift in 3..22 {
        for eighth in 8..16 {
            let size = (1_usize << shift) * eighth / 8;
            sizes.extend([size - 1, size, size + 1]);
        }
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

#[test]
fn every_layout_is_met() {
    for align in (0..22).map(|shift| 1 << shift) {
        let mut blocks = Vec::new();
        for (seed, &size) in sizes().iter().enumerate() {
            blocks.extend(Block::new(&HEAP, layout(size, align), seed as u8));
            if blocks.len() > 40 {
                blocks.swap_remove(seed % 40).free(&HEAP);
            }
        }
        blocks.into_iter().for_each(|block| block.free(&HEAP));
    }
}

#[test]
fn large_alignments_are_met_or_refused() {
    // Up to the largest alignment for which a layout of one byte more is valid.
    for align in (22..=by_width(30, 29)).map(|shift| 1 << shift) {
        for size in [1, 8192, align, align + 1] {
            // SAFETY: no layout has size zero.
            unsafe {
                let memory = HEAP.alloc(layout(size, align));
                assert_eq!(memory.addr() % align, 0);
                if !memory.is_null() {
                    memory.write(1);
                    HEAP.dealloc(memory, layout(size, align));
                }
            }
        }
    }
}

/// What a thread frees that is aligned to more than a page is what it gets next, and it does not touch page after page.
/// (In the checked build a block has a seal beside it, and few of them are as long as a run on a shelf.)
#[cfg(not(feature = "checks"))]
#[test]
fn aligned_blocks_are_those_freed_last() {
    static HEAP: GlobalHeap = new_heap();
    for (size, align) in [
        (8, 16384),
        (16384, 16384),
        (40960, 32768),
        (65536, 65536),
        (1 << 20, 1 << 20),
    ] {
        let wanted = layout(size, align);
        let some = || {
            (0..4)
                .map(|seed| Block::new(&HEAP, wanted, seed).unwrap())
                .collect::<Vec<_>>()
        };
        let free = |blocks: Vec<Block>| {
            let places: std::collections::BTreeSet<_> = blocks.iter().map(|block| block.memory).collect();
            blocks.into_iter().for_each(|block| block.free(&HEAP));
            places
        };
        // What is asked for is accepted from then on.
        free(some());
        let places = free(some());
        for _ in 0..100 {
            assert_eq!(free(some()), places, "{wanted:?}");
        }
    }
    HEAP.check().unwrap();
}

/// Blocks of one length, of which some happen to be aligned: what lies in the hand and on the list is looked at.
#[test]
fn an_aligned_block_is_none_that_happens_to_be_as_long() {
    static HEAP: GlobalHeap = new_heap();
    let aligned = [8, 16384, 65536].map(|align| layout(40960, align));
    let (mut blocks, mut random) = (Vec::new(), Random(1));
    for seed in 0..20_000 {
        blocks.extend(Block::new(&HEAP, aligned[random.below(3)], seed as u8));
        if blocks.len() > 6 || random.below(2) == 0 {
            blocks.swap_remove(random.below(blocks.len())).free(&HEAP);
        }
    }
    blocks.into_iter().for_each(|block| block.free(&HEAP));
    HEAP.check().unwrap();
}

#[test]
fn impossible_layouts_get_null_and_change_nothing() {
    static HEAP: GlobalHeap = new_heap();
    let block = Block::new(&HEAP, layout(100, 8), 1).unwrap();
    HEAP.flush_thread();
    let grown = HEAP.stats().pages.grown;
    let most = isize::MAX as usize;
    let [large, larger, largest] = [
        by_width(1 << 47, 1 << 28),
        by_width(1 << 50, 1 << 29),
        by_width(1 << 62, 1 << 30),
    ];
    for size in [large, larger, largest, most - 8192, most] {
        for align in [
            1,
            8,
            4096,
            8192,
            1 << 16,
            1 << 21,
            1 << 30,
            by_width(1 << 40, 1 << 29),
            largest,
        ] {
            let Ok(layout) = Layout::from_size_align(size, align) else {
                continue;
            };
            // SAFETY: no layout has size zero.
            unsafe {
                assert!(HEAP.alloc(layout).is_null(), "{layout:?}");
                assert!(HEAP.alloc_zeroed(layout).is_null(), "{layout:?}");
            }
        }
        // SAFETY: the block is ours; a refused resize leaves it as it is.
        unsafe { assert!(HEAP.realloc(block.memory, block.layout, size).is_null()) };
    }
    HEAP.flush_thread();
    assert_eq!(HEAP.stats().pages.grown, grown);
    for align in (31..usize::BITS - 1).map(|shift| 1 << shift) {
        // SAFETY: no layout has size zero.
        unsafe {
            let memory = HEAP.alloc(layout(1, align));
            assert!(memory.is_null() || memory.addr().is_multiple_of(align));
            if !memory.is_null() {
                HEAP.dealloc(memory, layout(1, align));
            }
        }
    }
    block.free(&HEAP);
    HEAP.flush_thread();
    HEAP.check().unwrap();
}

#[test]
fn zeroed_is_zero_after_any_history() {
    let mut random = Random(7);
    for round in 0..rounds(20_000) {
        let layout = layout(random.size(18), 1 << random.below(14));
        // SAFETY: no layout has size zero; the bytes read are the block's.
        unsafe {
            let memory = HEAP.alloc_zeroed(layout);
            let bytes = std::slice::from_raw_parts(memory, layout.size());
            assert!(all_are(bytes, 0), "{layout:?}");
            memory.write_bytes(0xA5, layout.size());
            HEAP.dealloc(memory, layout);
        }
        if round.is_multiple_of(1000) {
            HEAP.flush_thread();
            HEAP.scavenge(pageheap::PageCount(1000));
        }
    }
}

/// Not beside it, in pages of its own.
#[test]
fn a_zeroed_block_takes_the_place_of_the_one_freed_last() {
    let layout = layout(100 << 10, 8);
    // SAFETY: not of size zero; the bytes read are the block's.
    unsafe {
        let first = HEAP.alloc(layout);
        first.write_bytes(0xA5, layout.size());
        HEAP.dealloc(first, layout);
        let memory = HEAP.alloc_zeroed(layout);
        assert_eq!(memory, first);
        let bytes = std::slice::from_raw_parts(memory, layout.size());
        assert!(all_are(bytes, 0));
        HEAP.dealloc(memory, layout);
    }
}

#[test]
fn a_block_keeps_its_bytes_from_every_size_to_every_size() {
    let sizes: Vec<usize> = (0..21)
        .flat_map(|shift| [(1 << shift) - 1, 1 << shift, (1 << shift) + 1, (3 << shift) / 2])
        .filter(|&size| size > 0)
        .collect();
    let few = if cfg!(debug_assertions) { 3 } else { 1 };
    for align in [1, 8, 64, 8192, 4096, 1 << 15, 1 << 21].into_iter().step_by(few) {
        for &from in &sizes {
            for &to in &sizes {
                let mut block = Block::new(&HEAP, layout(from, align), (from + to) as u8).unwrap();
                assert!(block.resize(&HEAP, to));
                block.free(&HEAP);
            }
        }
    }
}

#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room, and blocks always move")]
fn a_large_block_grows_and_shrinks_where_it_is() {
    static HEAP: GlobalHeap = new_heap().reserve(by_width(1 << 38, 128 << 20));
    let mut block = Block::new(&HEAP, layout(200 << 10, 8), 3).unwrap();
    let place = block.memory;
    for size in [300 << 10, 40 << 20, 1 << 20, (1 << 20) - 1, 33 << 10, 600 << 10] {
        assert!(block.resize(&HEAP, size));
        assert_eq!(block.memory, place, "{size}");
    }
    let neighbour = Block::new(&HEAP, layout(200 << 10, 8), 4).unwrap();
    let grown = HEAP.stats().pages.grown;
    // SAFETY: the live block, with its layout; the resize is refused and leaves it as it is.
    assert!(unsafe { HEAP.realloc(block.memory, block.layout, by_width(8 << 40, 1 << 30)) }.is_null());
    assert_eq!(HEAP.stats().pages.grown, grown, "grew for a block that cannot");
    block.free(&HEAP);
    neighbour.free(&HEAP);
}

#[test]
fn blocks_freed_with_neighbours_exchanged_come_back_in_order() {
    static HEAP: GlobalHeap = new_heap();
    let layout = layout(640, 8);
    for round in 0..6 {
        // SAFETY: not of size zero.
        let blocks: Vec<_> = (0..6000).map(|_| unsafe { HEAP.alloc(layout) }).collect();
        let turns = blocks
            .windows(3)
            .filter(|trio| (trio[0] < trio[1]) != (trio[1] < trio[2]))
            .count();
        // Between batches they may turn, and where the first magazines were smaller.
        assert!(turns < 600, "round {round}: the addresses turn {turns} times");
        for pair in blocks.chunks(2).flat_map(|pair| pair.iter().rev()) {
            // SAFETY: allocated above with this layout, and freed once.
            unsafe { HEAP.dealloc(*pair, layout) };
        }
    }
}
