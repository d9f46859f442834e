//! Blocks that are too long for a shelf: what is put aside when they are freed (`object/aside.rs`), and for whom it is.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pageheap::PageCount;
use pageheap::source::Region;

use super::*;

const MIB: usize = 1 << 20;

/// Pages that lie aside or on shelves.
fn kept<S: Source + 'static>(heap: &GlobalHeap<S>) -> usize {
    heap.stats().shelf_pages.0
}

fn block<S: Source + Send + Sync>(heap: &GlobalHeap<S>, size: usize) -> Block {
    Block::new(heap, layout(size, 8), size as u8).unwrap_or_else(|| panic!("{size} bytes refused"))
}

/// A program that uses some long blocks over and over gets the same pages, whatever it frees in between.
#[test]
#[cfg_attr(feature = "checks", ignore = "a freed block is kept back for a while")]
fn a_block_freed_is_the_next_of_its_length() {
    static HEAP: GlobalHeap = new_heap().background(false);
    let sizes = [2 * MIB, 3 * MIB + 1, 5 * MIB, 2 * MIB];
    let blocks = sizes.map(|size| block(&HEAP, size));
    let places = blocks.each_ref().map(|block| block.memory);
    blocks.into_iter().for_each(|block| block.free(&HEAP));
    assert_eq!(kept(&HEAP), sizes.map(|size| size.div_ceil(8192)).iter().sum());
    for _ in 0..3 {
        // The same number of pages is the same length.
        let again = [5 * MIB - 100, 3 * MIB + 8192, 2 * MIB, 2 * MIB].map(|size| block(&HEAP, size));
        let mut found = again.each_ref().map(|block| block.memory);
        assert_eq!((found[0], found[1]), (places[2], places[1]));
        found.sort();
        let mut all = places;
        all.sort();
        assert_eq!(found, all);
        assert_eq!(kept(&HEAP), 0);
        again.into_iter().for_each(|block| block.free(&HEAP));
    }
    (0..100).for_each(|_| block(&HEAP, 2 * MIB).free(&HEAP));
    assert_eq!(kept(&HEAP), sizes.map(|size| size.div_ceil(8192)).iter().sum());
    HEAP.check().unwrap();
}

/// Whoever needs other pages gets them as if nothing lay aside: in a heap of 16 MiB each request here takes what no
/// other pages could serve.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room, and blocks always move")]
fn what_lies_aside_is_there_for_every_other_request() {
    static HEAP: GlobalHeap = new_heap().limit(16 * MIB).background(false);
    // Its tables, and its thread's structure.
    block(&HEAP, 64).free(&HEAP);
    let fill = || {
        let blocks: Vec<_> = std::iter::from_fn(|| Block::new(&HEAP, layout(2 * MIB, 8), 1)).collect();
        assert_eq!(blocks.len(), 7, "{}", HEAP.stats());
        blocks.into_iter().for_each(|block| block.free(&HEAP));
        assert_eq!(kept(&HEAP), 7 * 256);
    };
    let no_other_pages: [&dyn Fn(); 6] = [
        &|| block(&HEAP, 14 * MIB).free(&HEAP),
        &|| Block::new(&HEAP, layout(4 * MIB, 2 * MIB), 1).unwrap().free(&HEAP),
        // Spans, a page cache, runs for a shelf.
        &|| {
            let blocks: Vec<_> = (0..14 * MIB / 1024).map(|_| block(&HEAP, 1000)).collect();
            blocks.into_iter().for_each(|block| block.free(&HEAP));
        },
        &|| {
            let blocks: Vec<_> = (0..14).map(|_| block(&HEAP, MIB)).collect();
            blocks.into_iter().for_each(|block| block.free(&HEAP));
        },
        // Zeroed, and not where it was zero.
        &|| {
            // SAFETY: freed with its layout; the bytes are those of the block.
            unsafe {
                let memory = HEAP.alloc_zeroed(layout(13 * MIB, 8));
                assert!(!memory.is_null());
                let bytes = std::slice::from_raw_parts(memory, 13 * MIB);
                assert!(all_are(bytes, 0));
                HEAP.dealloc(memory, layout(13 * MIB, 8));
            }
        },
        // In place: everything behind it is aside.
        &|| {
            let mut small = block(&HEAP, MIB);
            let place = small.memory;
            assert!(small.resize(&HEAP, 2 * MIB + MIB / 2));
            assert!(small.resize(&HEAP, 12 * MIB));
            assert_eq!(small.memory, place);
            small.free(&HEAP);
        },
    ];
    for request in no_other_pages {
        fill();
        request();
        assert_eq!(HEAP.stats().pages.grown, PageCount(16 * MIB / 8192));
        HEAP.release(usize::MAX);
        HEAP.check().unwrap();
    }
}

/// Zeroed memory is zero, also if what lies aside is not.
#[test]
fn a_zeroed_block_from_aside_is_zero() {
    static HEAP: GlobalHeap = new_heap().background(false);
    for size in [MIB + 1, 3 * MIB, by_width(40 << 20, 8 << 20)] {
        let used = block(&HEAP, size);
        used.free(&HEAP);
        // SAFETY: freed with its layout; the bytes are those of the block.
        unsafe {
            let memory = HEAP.alloc_zeroed(layout(size, 8));
            assert!(all_are(std::slice::from_raw_parts(memory, size), 0));
            HEAP.dealloc(memory, layout(size, 8));
        }
    }
}

/// A block aligned to more than a page is neither put aside nor taken from there.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals change alignments")]
fn an_alignment_above_a_page_does_without() {
    static HEAP: GlobalHeap = new_heap().background(false);
    block(&HEAP, 2 * MIB).free(&HEAP);
    assert_eq!(kept(&HEAP), 256);
    let aligned = Block::new(&HEAP, layout(2 * MIB, 16 << 10), 1).unwrap();
    assert_eq!(kept(&HEAP), 0);
    aligned.free(&HEAP);
    assert_eq!(kept(&HEAP), 0);
}

/// Each of the calls that give memory back gives that back too.
#[test]
#[cfg_attr(feature = "checks", ignore = "a freed block is kept back for a while")]
fn what_lies_aside_goes_back_to_the_system() {
    static HEAP: GlobalHeap = new_heap().background(false);
    let free = || {
        let blocks: Vec<_> = (0..12).map(|_| block(&HEAP, 2 * MIB)).collect();
        blocks.into_iter().for_each(|block| block.free(&HEAP));
        assert_eq!(kept(&HEAP), 8 * 256, "there are eight places");
    };
    let is_gone = || {
        let stats = HEAP.stats();
        // Without a fence through all threads this one keeps its cache of 64 pages.
        assert!(stats.shelf_pages.0 == 0 && stats.pages.backed.0 < 128, "{stats}");
    };
    free();
    HEAP.scavenge(PageCount(usize::MAX));
    is_gone();
    free();
    HEAP.release(usize::MAX);
    is_gone();
    free();
    // Silence, and then a program that goes on with other things, and needs no pages for them; by a clock of its own.
    let mut now = Duration::ZERO;
    let mut tick = || {
        now += Duration::from_millis(100);
        HEAP.tick(&|| now)
    };
    free();
    assert!((0..600).any(|_| tick() == Duration::MAX), "{}", HEAP.stats());
    is_gone();
    free();
    for _ in 0..600 {
        (0..100).for_each(|_| block(&HEAP, 64).free(&HEAP));
        tick();
    }
    is_gone();
}

/// `Duration::MAX` means that everything has been given back.
#[test]
#[cfg_attr(feature = "checks", ignore = "a freed block is kept back for a while")]
fn a_heap_that_rests_looks_again_at_what_was_put_aside_since() {
    static HEAP: GlobalHeap = new_heap().background(false);
    let mut now = Duration::ZERO;
    let mut rest = || {
        let mut tick = || {
            now += Duration::from_millis(300);
            HEAP.tick(&|| now)
        };
        assert!((0..200).any(|_| tick() == Duration::MAX), "{}", HEAP.stats());
    };
    for _ in 0..4 {
        let used = block(&HEAP, by_width(32 << 20, 8 << 20));
        rest();
        used.free(&HEAP);
        rest();
        let stats = HEAP.stats();
        // Without a fence through all threads this one keeps its cache of 64 pages.
        assert!(stats.shelf_pages.0 == 0 && stats.pages.backed.0 < 128, "{stats}");
    }
}

/// A limit that is lowered holds for what lies aside too.
#[test]
#[cfg_attr(feature = "checks", ignore = "a freed block is kept back for a while")]
fn a_block_longer_than_the_limit_is_refused() {
    static HEAP: GlobalHeap = new_heap().background(false);
    block(&HEAP, 4 * MIB).free(&HEAP);
    assert!(kept(&HEAP) > 0 && HEAP.set_limit(2 * MIB));
    assert!(Block::new(&HEAP, layout(4 * MIB, 8), 1).is_none());
    block(&HEAP, 2 * MIB).free(&HEAP);
}

/// A block of more than 64 MiB is not put aside.
#[test]
#[cfg_attr(feature = "checks", ignore = "a freed block is kept back for a while")]
#[cfg(target_pointer_width = "64")]
fn the_longest_blocks_go_back_at_once() {
    static HEAP: GlobalHeap = new_heap().background(false);
    for (size, pages) in [(64 * MIB, 8192), (64 * MIB + 1, 0)] {
        // SAFETY: freed with its layout, and never used.
        unsafe {
            let memory = HEAP.alloc(layout(size, 8));
            assert!(!memory.is_null());
            HEAP.dealloc(memory, layout(size, 8));
        }
        assert_eq!(kept(&HEAP), pages, "{size}");
    }
}

/// Over its soft limit a heap puts nothing aside, and what was put there before goes.
#[test]
#[cfg_attr(feature = "checks", ignore = "a freed block is kept back for a while")]
fn a_heap_over_its_soft_limit_puts_nothing_aside() {
    static HEAP: GlobalHeap = new_heap().background(false);
    let [first, second] = [(); 2].map(|()| block(&HEAP, 2 * MIB));
    first.free(&HEAP);
    assert!(HEAP.set_soft_limit(MIB));
    second.free(&HEAP);
    assert!(kept(&HEAP) <= 256);
    block(&HEAP, 3 * MIB).free(&HEAP);
    assert_eq!(kept(&HEAP), 0);
}

/// Also where nothing is taken from the heap's pages: blocks go where holes were between others.
#[test]
#[cfg_attr(feature = "checks", ignore = "a freed block is kept back for a while")]
fn what_lies_aside_goes_when_holes_are_filled_over_the_soft_limit() {
    static HEAP: GlobalHeap = new_heap().background(false);
    let blocks: Vec<_> = (0..512).map(|_| block(&HEAP, 16 << 10)).collect();
    let (gone, stay): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
    gone.into_iter().for_each(|(_, block)| block.free(&HEAP));
    HEAP.release(usize::MAX);
    if HEAP.stats().pages.holes.0 == 0 {
        // Some systems cannot release parts of what is in use.
        return stay.into_iter().for_each(|(_, block)| block.free(&HEAP));
    }
    block(&HEAP, 2 * MIB).free(&HEAP);
    let before = HEAP.stats();
    assert_eq!(before.shelf_pages.0, 256, "{before}");
    assert!(HEAP.set_soft_limit(before.pages.backed.0 * before.pages.page_bytes));
    let filling: Vec<_> = (0..64).map(|_| block(&HEAP, 16 << 10)).collect();
    let after = HEAP.stats();
    assert!(after.pages.holes < before.pages.holes, "{after}");
    assert_eq!((after.spans, after.shelf_pages.0), (before.spans, 0), "{after}");
    assert!(after.pages.backed <= before.pages.backed, "{before}\n{after}");
    let stay = stay.into_iter().map(|(_, block)| block);
    stay.chain(filling).for_each(|block| block.free(&HEAP));
    HEAP.check().unwrap();
}

/// Without an operating system, all threads share one structure; what lies aside needs none.
#[test]
#[cfg_attr(feature = "checks", ignore = "a freed block is kept back for a while")]
fn a_heap_in_bytes_of_the_callers_puts_aside_too() {
    static HEAP: GlobalHeap<Region> = GlobalHeap::empty();
    HEAP.init(Region::from_static(Box::leak(Box::new_uninit_slice(8 * MIB))))
        .unwrap();
    let used = block(&HEAP, 5 * MIB);
    let place = used.memory;
    used.free(&HEAP);
    let again = block(&HEAP, 5 * MIB);
    assert_eq!(again.memory, place);
    again.free(&HEAP);
    block(&HEAP, 6 * MIB).free(&HEAP);
    HEAP.check().unwrap();
}

/// Threads allocate, resize and free blocks of few lengths in a heap that has room for all of them, but not for what
/// lies aside besides: every block is whole, and nobody is refused.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room, and blocks always move")]
fn long_blocks_of_many_threads_are_whole_and_none_is_refused() {
    // Each thread has one block of at most 4 MiB, and one of at most 16 pages. So there is always a gap for another:
    // of seven pieces between the others, the longest has a seventh of what is left.
    assert!(one_of_three(|| {
        let heap = new_heap()
            .reserve(by_width(1 << 38, 64 << 20))
            .limit(48 * MIB)
            .background(false);
        are_served_long_blocks(Box::leak(Box::new(heap)))
    }));
}

fn are_served_long_blocks(heap: &'static GlobalHeap) -> bool {
    const THREADS: usize = 4;
    let (all_have_begun, refused) = (Barrier::new(THREADS), AtomicBool::new(false));
    let work = |thread: usize| {
        let new = |size| in_time(|| Block::new(heap, layout(size, 8), size as u8));
        let mut random = Random(thread as u64 + 1);
        let mut small = Vec::new();
        for _ in 0..rounds(4000) {
            let pages = [129, 200, 256, 300][random.below(4)];
            let mut long = new(pages << 13)?;
            if random.below(4) == 0 {
                small.clear();
                for _ in 0..random.below(16) {
                    small.push(new(8192)?);
                }
            }
            if random.below(4) == 0 {
                let size = [128, 129, 200, 300][random.below(4)] << 13;
                in_time(|| long.resize(heap, size).then_some(()))?;
            }
            long.free(heap);
            small.drain(..).for_each(|block| block.free(heap));
        }
        Some(())
    };
    on_threads(THREADS, |thread| {
        // So that no thread's structure, which stays, lies behind a long block of another's.
        block(heap, 64).free(heap);
        all_have_begun.wait();
        if work(thread).is_none() {
            refused.store(true, Ordering::Relaxed);
        }
    });
    heap.check().unwrap();
    if refused.into_inner() {
        return false;
    }
    block(heap, 44 * MIB).free(heap);
    true
}
