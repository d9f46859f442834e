//! Blocks that grow again and again, and get room to (`object/room.rs`).

use std::collections::BTreeMap;
use std::sync::mpsc;

use pageheap::source::System;
use pageheap::{Config, Heap, PageCount};

use super::*;

/// Whether a growing block may get more memory than it needs: in the checked build every block moves.
const MAY_HAVE_ROOM: bool = !cfg!(feature = "checks");

/// A block of `to` bytes that has grown there from 64, a quarter at a time.
pub fn grown(heap: &GlobalHeap, align: usize, to: usize, seed: u8) -> Block {
    let mut block = Block::new(heap, layout(64, align), seed).unwrap();
    while block.layout.size() < to {
        let size = (block.layout.size() * 5 / 4).min(to);
        assert!(block.resize(heap, size));
    }
    block
}

/// Only what the heap keeps is left, and no bytes are counted as roomy.
fn all_is_back(heap: &GlobalHeap) {
    heap.flush_thread();
    heap.release(usize::MAX);
    heap.check().unwrap();
    let stats = heap.stats();
    assert_eq!(
        (stats.roomy_bytes, stats.pages.in_use),
        (0, stats.span_pages),
        "{stats}"
    );
    assert!(stats.slot_bytes < 4096, "{stats}");
}

#[test]
fn a_block_that_grows_step_by_step_keeps_its_bytes_and_seldom_moves() {
    static HEAP: GlobalHeap = new_heap();
    for align in [1, 8, 64, 4096, 8192, 1 << 15] {
        let mut block = Block::new(&HEAP, layout(64, align), align as u8).unwrap();
        let mut moves = Vec::new();
        while block.layout.size() < 60_000 {
            let before = block.memory;
            assert!(block.resize(&HEAP, block.layout.size() * 5 / 4));
            HEAP.check().unwrap();
            if block.layout.size() > 1100 && block.memory != before {
                moves.push(block.layout.size());
            }
        }
        // It moves once like any other block, then to a run of 12 pages.
        assert!(
            moves == [1151, 1438] || !MAY_HAVE_ROOM || align > 64,
            "{moves:?}, aligned to {align}"
        );
        assert!(HEAP.stats().roomy_bytes == 12 << 13 || !MAY_HAVE_ROOM || align > 64);
        while block.layout.size() < 3 << 20 {
            assert!(block.resize(&HEAP, block.layout.size() * 5 / 4));
            HEAP.check().unwrap();
        }
        block.free(&HEAP);
    }
    all_is_back(&HEAP);
}

/// Blocks of every length, freed, and resized to every other length.
#[test]
fn a_block_with_room_goes_back_whole() {
    static HEAP: GlobalHeap = new_heap();
    let sizes = [
        1000,
        1100,
        1700,
        2300,
        5000,
        16 << 10,
        16_385,
        20_000,
        32 << 10,
        32_769,
        40_000,
        200_000,
        1 << 20,
    ];
    for from in sizes {
        grown(&HEAP, 8, from, 1).free(&HEAP);
        HEAP.check().unwrap();
        for to in sizes {
            let mut block = grown(&HEAP, 8, from, 2);
            assert!(block.resize(&HEAP, to));
            HEAP.check().unwrap();
            // A shortened block has no room any more.
            let roomy = HEAP.stats().roomy_bytes;
            assert!(to >= from || roomy == 0, "{from} to {to}: {roomy}");
            block.free(&HEAP);
        }
    }
    all_is_back(&HEAP);
}

/// When there is no more room in long runs, there is in slots, whatever their alignment.
#[test]
fn an_aligned_block_with_room_in_a_slot_goes_back_as_what_it_is() {
    static HEAP: GlobalHeap = new_heap();
    let fill: Vec<Block> = (0..10).map(|seed| grown(&HEAP, 8, 1500, seed)).collect();
    let filled = HEAP.stats().roomy_bytes;
    for align in [8, 16, 64, 256, 512, 1024, 4096] {
        for to in (1500..11_500).step_by(250) {
            let block = grown(&HEAP, align, to, 7);
            HEAP.check().unwrap();
            let slot = HEAP.stats().roomy_bytes - filled;
            assert!(
                !MAY_HAVE_ROOM || align > 64 || (to..=32 << 10).contains(&slot),
                "{to}, {align}: {slot}"
            );
            block.free(&HEAP);
        }
    }
    fill.into_iter().for_each(|block| block.free(&HEAP));
    all_is_back(&HEAP);
}

/// A roomy block that has grown to exactly the pages of its run has no room left: it is freed by the fast path.
#[test]
#[cfg_attr(feature = "checks", ignore = "blocks always move")]
fn a_block_as_long_as_its_run_has_no_room() {
    static HEAP: GlobalHeap = new_heap();
    for from in [4200, 5000, 9000, 16 << 10, 20_000, 30_000] {
        for by_steps in [false, true] {
            let mut block = Block::new(&HEAP, layout(1100, 8), 1).unwrap();
            assert!([1500, 2000, from].iter().all(|&size| block.resize(&HEAP, size)));
            let (roomy, before) = (HEAP.stats().roomy_bytes, block.memory);
            assert_eq!(roomy, 128 << 10, "{from}");
            assert!(!by_steps || block.resize(&HEAP, 33_000));
            assert!(block.resize(&HEAP, roomy));
            assert_eq!((block.memory, HEAP.stats().roomy_bytes), (before, 0), "{from}");
            HEAP.check().unwrap();
            block.free(&HEAP);
            let again = Block::new(&HEAP, layout(roomy, 8), 2).unwrap();
            HEAP.check().unwrap();
            again.free(&HEAP);
        }
    }
    all_is_back(&HEAP);
}

/// Nor does a shorter block that would get a run of this length anyway: run lengths are an eighth of a doubling apart.
#[test]
#[cfg_attr(feature = "checks", ignore = "blocks always move")]
fn a_block_nearly_as_long_as_its_run_has_no_room() {
    static HEAP: GlobalHeap = new_heap();
    for from in [1500, 5000, 14_000, 17_500, 20_000, 25_000, 30_000] {
        for to in (33_000..260_000).step_by(4096) {
            let mut block = Block::new(&HEAP, layout(1100, 8), 1).unwrap();
            assert!(
                [1400, from, from + 1000, to]
                    .iter()
                    .all(|&size| block.resize(&HEAP, size))
            );
            HEAP.check().unwrap();
            block.free(&HEAP);
            assert_eq!(HEAP.stats().roomy_bytes, 0, "{from} to {to}");
        }
    }
    all_is_back(&HEAP);
}

/// A `Heap` uses only the slow path. The old layouts passed to it are as long as the blocks' usable size.
#[test]
fn a_heap_as_a_value_has_room_too() {
    let heap = Heap::new(System, Config::new(addresses(1 << 30))).unwrap();
    let sizes = [
        1100,
        3000,
        16 << 10,
        16_385,
        32 << 10,
        32_769,
        262_144,
        300_000,
        (1 << 20) + 1,
    ];
    let grown = |to: usize, align| {
        let (mut size, mut memory) = (1030, heap.allocate(layout(1030, align)).unwrap());
        while size < to {
            let next = (size * 5 / 4).min(to);
            // SAFETY: the live block, with its layout.
            memory = unsafe { heap.resize(memory, layout(size, align), next) }.unwrap();
            size = next;
        }
        memory
    };
    for align in [1, 64, 4096, 8192, 65536] {
        for from in sizes {
            for to in sizes.iter().copied().chain([1, 1000, 1024, 1025]) {
                let usable = |size| layout(heap.usable_size(layout(size, align)), align);
                let block = grown(from, align);
                // SAFETY: the live block, with its usable size.
                let moved = unsafe { heap.resize(block, usable(from), to) }.unwrap();
                heap.check().unwrap();
                let shorter = usable(to).size() < usable(from).size();
                assert!(
                    !shorter || heap.stats().roomy_bytes == 0,
                    "{from} to {to}, aligned to {align}"
                );
                // SAFETY: as above; nothing uses it any more.
                unsafe { heap.free(moved, usable(to)) };
                heap.check().unwrap();
                assert_eq!(heap.stats().roomy_bytes, 0);
            }
        }
    }
}

/// A small heap gives no room: behind blocks that grew, a block can be as long as it could without roomy blocks.
#[test]
#[cfg_attr(feature = "checks", ignore = "blocks always move")]
fn a_small_heap_gives_no_room() {
    let heap = Heap::new(System, Config::new(addresses(1 << 30)).limit(PageCount(64))).unwrap();
    let (mut size, mut block) = (64, heap.allocate(layout(64, 8)).unwrap());
    while size < 6000 {
        // SAFETY: the live block, with its layout.
        block = unsafe { heap.resize(block, layout(size, 8), size * 5 / 4) }.unwrap();
        size = size * 5 / 4;
    }
    assert_eq!(heap.stats().roomy_bytes, 0);
    assert!(heap.allocate(layout(320 << 10, 8)).is_some(), "{}", heap.stats());

    static HEAP: GlobalHeap = new_heap().limit(1 << 20);
    let blocks: Vec<_> = (0..20).map(|seed| grown(&HEAP, 8, 2400, seed)).collect();
    let large = Block::new(&HEAP, layout(500 << 10, 8), 1).unwrap();
    blocks.into_iter().chain([large]).for_each(|block| block.free(&HEAP));
    all_is_back(&HEAP);
}

/// However many blocks grow, their surplus is bounded, and it becomes available again when they are freed.
#[test]
fn room_is_bounded() {
    static HEAP: GlobalHeap = new_heap();
    for _ in 0..2 {
        let blocks: Vec<_> = (0..2000).map(|seed| grown(&HEAP, 8, 5000, seed as u8)).collect();
        let stats = HEAP.stats();
        let most = (1 << 20).max(stats.pages.backed.0 * stats.pages.page_bytes / 32);
        assert!(stats.roomy_bytes <= most, "{stats}");
        assert_eq!(stats.roomy_bytes > most / 2, MAY_HAVE_ROOM, "{stats}");
        // 10 MB of blocks, an eighth for rounding to classes, the room, and what lies in magazines and stores.
        assert!(stats.pages.backed.0 * stats.pages.page_bytes < 24 << 20, "{stats}");
        blocks.into_iter().for_each(|block| block.free(&HEAP));
    }
    all_is_back(&HEAP);
}

#[test]
fn over_the_soft_limit_there_is_no_room() {
    static HEAP: GlobalHeap = new_heap().soft_limit(1 << 20);
    let blocks: Vec<_> = (0..100).map(|seed| grown(&HEAP, 8, 30_000, seed)).collect();
    let before = HEAP.stats().roomy_bytes;
    let more: Vec<_> = (0..100).map(|seed| grown(&HEAP, 8, 5000, seed)).collect();
    assert!(HEAP.stats().roomy_bytes <= before);
    blocks.into_iter().chain(more).for_each(|block| block.free(&HEAP));
    all_is_back(&HEAP);
}

/// Room is not worth a refusal: in a full heap a block can grow as far as it could without roomy blocks.
#[test]
fn at_the_limit_a_block_grows_while_there_is_memory() {
    const LIMIT: usize = 4 << 20;
    static HEAP: GlobalHeap = new_heap().limit(LIMIT);
    let mut blocks: Vec<Block> = Vec::new();
    while let Some(block) = Block::new(&HEAP, layout(1100, 8), blocks.len() as u8) {
        blocks.push(block);
    }
    // One in three is freed; the others grow until they cannot.
    let mut index = 0;
    blocks = blocks.into_iter().fold(Vec::new(), |mut rest, block| {
        index += 1;
        if index % 3 == 0 {
            block.free(&HEAP);
        } else {
            rest.push(block);
        }
        rest
    });
    let count = blocks.len();
    let mut refused = 0;
    for step in 0..2 * count {
        let block = &mut blocks[step % count];
        let size = block.layout.size() * 5 / 4;
        refused += usize::from(!block.resize(&HEAP, size));
    }
    assert!(refused > 0);
    HEAP.check().unwrap();
    blocks.into_iter().for_each(|block| block.free(&HEAP));
    all_is_back(&HEAP);
    // And all of it is available again.
    let block = Block::new(&HEAP, layout(LIMIT * 4 / 5, 8), 1).unwrap();
    block.free(&HEAP);
}

/// Many blocks at once, each growing in its own steps, passed from thread to thread; no two may overlap.
#[test]
fn blocks_that_grow_are_handed_about() {
    static HEAP: GlobalHeap = new_heap().reserve(by_width(1 << 38, 128 << 20));
    const THREADS: usize = 3;
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel::<Block>()).unzip();
    std::thread::scope(|scope| {
        let threads = receivers.into_iter().enumerate().map(|(number, receiver)| {
            let next = senders[(number + 1) % THREADS].clone();
            scope.spawn(move || {
                let (mut random, mut blocks) = (Random(number as u64 + 5), Vec::new());
                for operation in 0..rounds(60_000) {
                    if blocks.len() < 40 {
                        blocks.push(Block::new(&HEAP, layout(1 + random.below(3000), 8), operation as u8).unwrap());
                    }
                    let index = random.below(blocks.len());
                    match random.below(20) {
                        0 => blocks.swap_remove(index).free(&HEAP),
                        1 => {
                            let _ended = next.send(blocks.swap_remove(index));
                        }
                        2 => assert!(blocks[index].resize(&HEAP, 1 + random.below(40_000))),
                        3 => blocks.extend(receiver.try_recv().ok()),
                        _ => {
                            let size = blocks[index].layout.size();
                            assert!(blocks[index].resize(&HEAP, if size > 300_000 { 1000 } else { size * 5 / 4 + 8 }));
                        }
                    }
                    overlap_none(&blocks);
                }
                drop(next);
                blocks.into_iter().for_each(|block| block.free(&HEAP));
                receiver.try_iter().for_each(|block| block.free(&HEAP));
                HEAP.flush_thread();
            })
        });
        let threads = threads.collect();
        drop(senders);
        join_all(threads);
    });
    // Blocks sent to a thread that had ended are lost with the channel, so only the sums are checked.
    HEAP.flush_thread();
    HEAP.check().unwrap();
}

/// No two blocks overlap in their usable bytes.
fn overlap_none(blocks: &[Block]) {
    let ends: BTreeMap<usize, usize> = blocks
        .iter()
        .map(|block| {
            (
                block.memory.addr(),
                block.memory.addr() + HEAP_USABLE.usable_size(block.layout),
            )
        })
        .collect();
    let mut before = 0;
    for (start, end) in ends {
        assert!(
            before <= start,
            "a block begins at {start:#x}, where another goes to {before:#x}"
        );
        before = end;
    }
}

/// Used only to ask for usable sizes.
static HEAP_USABLE: GlobalHeap = new_heap();

/// At the limit, room comes only from a magazine or a shelf.
#[test]
#[cfg_attr(feature = "checks", ignore = "blocks always move")]
fn at_the_limit_no_run_is_looked_for_to_give_room() {
    const FREED: usize = 8;
    let heap = Heap::new(System, Config::new(1 << 28).limit(PageCount(2048))).unwrap();
    let (run, long) = (layout(128 << 10, 8), layout(1900, 8));
    // SAFETY: live blocks with their layouts, here and below.
    let free = |block, layout| unsafe { heap.free(block, layout) };
    let small = heap.allocate(layout(1100, 8)).unwrap();
    // SAFETY: as above.
    let small = unsafe { heap.resize(small, layout(1100, 8), 1400) }.unwrap();
    // Free slots for it to move to.
    let next = [(); 4].map(|()| heap.allocate(long).unwrap());
    next.into_iter().for_each(|block| free(block, long));
    let mut runs: Vec<_> = std::iter::from_fn(|| heap.allocate(run)).collect();
    assert_eq!(heap.stats().pages.grown, heap.limit());
    (0..FREED).for_each(|_| free(runs.swap_remove(runs.len() / 2), run));
    // SAFETY: as above.
    let _small = unsafe { heap.resize(small, layout(1400, 8), 1900) }.unwrap();
    let again = (0..FREED).filter(|_| heap.allocate(run).is_some()).count();
    assert_eq!((heap.stats().roomy_bytes, again), (0, FREED));
}
