//! Tests that need a process of their own.

use std::process::Command;

use pageheap::source::System;
use pageheap::{Config, Heap};

use super::child::is_one as is_child;
use super::*;

/// The test `name` of this file, to run in a child.
fn child(name: &str) -> Command {
    child::command(&format!("processes::{name}"))
}

#[cfg(any(unix, not(feature = "checks")))]
fn run(name: &str) -> std::process::Output {
    child::output(&mut child(name))
}

#[test]
#[cfg(unix)]
fn a_quarter_of_a_gigabyte_is_enough_to_start_and_half_is_usable() {
    const LIMIT: usize = 256 << 20;
    static HEAP: GlobalHeap = GlobalHeap::new();
    if !is_child() {
        let output = run("a_quarter_of_a_gigabyte_is_enough_to_start_and_half_is_usable");
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let limit = libc::rlimit {
        rlim_cur: LIMIT as libc::rlim_t,
        rlim_max: LIMIT as libc::rlim_t,
    };
    // SAFETY: a valid limit.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
    let fill = |size: usize| {
        let mut blocks = Vec::with_capacity(100_000);
        while blocks.len() < blocks.capacity()
            && let Some(block) = Block::new(&HEAP, layout(size, 8), 1)
        {
            blocks.push(block);
        }
        let used = blocks.len() * size;
        blocks.into_iter().for_each(|block| block.free(&HEAP));
        used
    };
    let first = fill(1 << 20);
    assert!(first >= LIMIT / 2, "{first}");
    assert!(fill(64 << 10) >= LIMIT / 2);
    assert!(fill(LIMIT / 4) >= LIMIT / 4);
    assert!(fill(1 << 20) >= first / 10 * 8);
}

/// Nothing of the program's unwinds out of an allocation.
#[test]
fn a_hook_that_unwinds_ends_the_process() {
    static HEAP: GlobalHeap = new_heap().limit(1 << 20).on_exhausted(|_| panic!("a bug"));
    if child::ended("processes::a_hook_that_unwinds_ends_the_process", "has unwound").is_none() {
        drop(
            (0..1000)
                .map_while(|_| Block::new(&HEAP, layout(64 << 10, 8), 1))
                .collect::<Vec<_>>(),
        );
    }
}

/// As above.
#[test]
fn a_processor_that_unwinds_ends_the_process() {
    if child::ended("processes::a_processor_that_unwinds_ends_the_process", "has unwound").is_none() {
        let config = Config::new(addresses(1 << 28)).processors(2, || panic!("a bug"));
        let heap = Heap::new(System, config).unwrap();
        assert!((0..1000).all(|_| heap.allocate(layout(64, 8)).is_some()));
    }
}

/// Misuse ends the process with a message. If the child says on standard output which address is wrong, or some of
/// them, the message names one.
#[cfg(not(feature = "checks"))]
macro_rules! aborts {
    ($($(#[$condition:meta])* $name:ident: $message:literal, $work:expr;)*) => {$(
        $(#[$condition])*
        #[test]
        fn $name() {
            static HEAP: GlobalHeap = GlobalHeap::new();
            if !is_child() {
                let output = run(stringify!($name));
                let errors = String::from_utf8_lossy(&output.stderr);
                assert!(!output.status.success() && errors.contains($message), "{output:?}");
                let said = String::from_utf8_lossy(&output.stdout);
                let mut wrong = said.lines().filter_map(|line| Some(line.split_once("wrong: ")?.1)).peekable();
                let is_named = wrong.peek().is_none() || wrong.any(|address| errors.contains(address));
                assert!(is_named, "no address: {output:?}");
                return;
            }
            let work: fn(&GlobalHeap) = $work;
            work(&HEAP);
            HEAP.flush_thread();
        }
    )*};
}

/// Prints the address that the message must name.
#[cfg(not(feature = "checks"))]
fn says(address: *mut u8) -> *mut u8 {
    child::wrong(std::ptr::NonNull::new(address).unwrap()).as_ptr()
}

// Misuse that is detected at no cost.
#[cfg(not(feature = "checks"))]
aborts! {
    a_foreign_block_is_refused: "not of this heap", |heap| {
        Block::new(heap, layout(64, 8), 0).unwrap().free(heap);
        let stranger = Box::leak(Box::new([0_u8; 64]));
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(stranger.as_mut_ptr(), layout(64, 8)) };
    };
    a_foreign_large_block_is_refused: "not of this heap", |heap| {
        Block::new(heap, layout(64, 8), 0).unwrap().free(heap);
        let stranger = vec![0_u8; 1 << 20].leak();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(stranger.as_mut_ptr(), layout(1 << 20, 8)) };
    };
    another_layout_is_refused: "wrong layout", |heap| {
        let block = Block::new(heap, layout(64, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory, layout(640, 8)) };
    };
    another_layout_is_refused_to_a_thread_without_a_structure: "wrong layout", |heap| {
        let block = Block::new(heap, layout(2000, 8), 0).unwrap();
        let address = block.memory.expose_provenance();
        std::thread::scope(|scope| {
            let other = scope.spawn(move || {
                let memory = std::ptr::with_exposed_provenance_mut(address);
                // SAFETY: none: this is the misuse to be detected.
                unsafe { heap.dealloc(memory, layout(100, 8)) };
            });
            // The end of the scope does not wait until the thread has left its structure.
            other.join().unwrap();
        });
        // Where frees are not inlined it is found when what the thread has left goes home.
        heap.scavenge(pageheap::PageCount(usize::MAX));
    };
    a_small_block_is_not_freed_as_a_large_one: "wrong layout", |heap| {
        let block = Block::new(heap, layout(8192, 8192), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory, layout(100_000, 8)) };
    };
    a_large_block_is_not_freed_with_pages_of_a_span: "wrong layout", |heap| {
        let allocate = |size: usize, align: usize| Block::new(heap, layout(size, align), 0).unwrap();
        let (mut large, mut small) = (Vec::new(), Vec::new());
        for _ in 0..20 {
            large.push(allocate(40 << 10, 8));
            small.extend((0..64).map(|_| allocate(8192, 8192).memory));
        }
        // If a span lies directly behind the large block, the next two pages belong to it.
        let is_followed = |large: &&Block| small.contains(&large.memory.wrapping_add(40 << 10));
        let large = large.iter().find(is_followed).expect("a span behind one of them");
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(large.memory, layout(48 << 10, 8)) };
    };
    the_inside_of_a_block_is_refused: "inside it", |heap| {
        let block = Block::new(heap, layout(64, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory.add(8), layout(64, 8)) };
    };
    the_inside_of_a_run_with_room_is_refused: "not allocated", |heap| {
        let block = super::growth::grown(heap, 8, 2400, 1);
        assert!(heap.stats().roomy_bytes > 32 << 10);
        // In the kibibyte whose flag says that the block is roomy.
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory.add(8), block.layout) };
    };
    a_block_freed_twice_in_a_row_is_found: "freed twice", |heap| {
        let block = Block::new(heap, layout(64, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { (0..2).for_each(|_| heap.dealloc(block.memory, block.layout)) };
    };
    a_block_freed_twice_with_another_between_is_found: "freed twice", |heap| {
        let [first, second] = [(); 2].map(|()| Block::new(heap, layout(64, 8), 0).unwrap());
        // SAFETY: none: this is the misuse to be detected.
        unsafe { [&first, &second, &first].iter().for_each(|block| heap.dealloc(block.memory, block.layout)) };
    };
    a_block_of_eight_bytes_freed_twice_is_found: "freed twice", |heap| {
        let [first, second] = [(); 2].map(|()| Block::new(heap, layout(8, 8), 0).unwrap());
        // SAFETY: none: this is the misuse to be detected.
        unsafe { [&first, &second, &first].iter().for_each(|block| heap.dealloc(block.memory, block.layout)) };
    };
    a_block_freed_twice_with_a_thousand_between_is_found: "freed twice", |heap| {
        // Wherever it is by now: in the magazine, the spare, or a batch in the store.
        let blocks: Vec<_> = (0..1000).map(|_| Block::new(heap, layout(64, 8), 0).unwrap()).collect();
        // SAFETY: none: this is the misuse to be detected.
        unsafe {
            blocks.iter().for_each(|block| heap.dealloc(block.memory, block.layout));
            heap.dealloc(blocks[1].memory, blocks[1].layout);
        }
    };
    a_block_of_kibibytes_freed_twice_is_found_whatever_was_written_to_it: "freed twice", |heap| {
        let block = Block::new(heap, layout(5000, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe {
            heap.dealloc(block.memory, block.layout);
            block.memory.write_bytes(1, 100);
            heap.dealloc(block.memory, block.layout);
        }
    };
    a_block_of_kibibytes_freed_again_by_another_thread_is_found: "freed twice", |heap| {
        let block = Block::new(heap, layout(1500, 8), 0).unwrap();
        let address = block.memory.expose_provenance();
        // SAFETY: allocated here with this layout.
        unsafe { heap.dealloc(block.memory, block.layout) };
        // SAFETY: none: this is the misuse to be detected.
        let again = || unsafe { heap.dealloc(std::ptr::with_exposed_provenance_mut(address), layout(1500, 8)) };
        std::thread::scope(|scope| scope.spawn(again).join().unwrap());
    };
    a_block_of_kibibytes_is_not_freed_by_an_address_inside_it: "inside it", |heap| {
        let block = Block::new(heap, layout(5000, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory.add(2048), block.layout) };
    };
    a_large_block_that_became_a_slot_is_not_resized_again: "freed twice", |heap| {
        let block = Block::new(heap, layout(400_000, 8), 0).unwrap();
        // So that there are slots at hand.
        Block::new(heap, layout(300, 8), 0).unwrap().free(heap);
        // SAFETY: none the second time: this is the misuse to be detected.
        unsafe {
            assert_ne!(heap.realloc(block.memory, block.layout, 300), block.memory);
            heap.realloc(block.memory, block.layout, 300);
        }
    };
    a_large_block_is_not_resized_with_another_layout: "with the wrong layout", |heap| {
        let block = Block::new(heap, layout(400_000, 8), 0).unwrap();
        Block::new(heap, layout(300, 8), 0).unwrap().free(heap);
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.realloc(block.memory, layout(800_000, 8), 300) };
    };
    a_block_that_is_with_its_span_again_is_not_freed_twice: "freed twice", |heap| {
        let [first, _kept] = [(); 2].map(|()| Block::new(heap, layout(1024, 8), 0).unwrap());
        // SAFETY: none: this is the misuse to be detected.
        unsafe {
            heap.dealloc(first.memory, first.layout);
            heap.flush_thread();
            heap.dealloc(first.memory, first.layout);
        }
    };
    a_block_whose_span_is_a_large_block_by_now_is_not_freed: "not allocated", |heap| {
        // All slots of a span, whose pages return to the heap and are allocated from it again.
        let blocks: Vec<_> = (0..512).map(|_| Block::new(heap, layout(64, 8), 0).unwrap()).collect();
        // SAFETY: none: this is the misuse to be detected.
        unsafe {
            blocks.iter().for_each(|block| heap.dealloc(block.memory, block.layout));
            heap.release(usize::MAX);
            let large: Vec<_> = (0..64).map(|_| heap.alloc_zeroed(layout(64 << 10, 8))).collect();
            let lies_in = |block: &Block, large: *mut u8| block.memory.addr().wrapping_sub(large.addr()) < 64 << 10;
            let twice = blocks.iter().find(|block| large.iter().any(|&large| lies_in(block, large)));
            // What a free slot might contain: the block is no slot of its class, so this is detected at once.
            let block = twice.expect("pages are taken again, lowest first");
            block.memory.cast::<u64>().write(like_a_mark(heap));
            heap.dealloc(block.memory, block.layout);
        }
    };
    a_block_with_room_in_a_slot_is_not_freed_twice: "a block was freed", |heap| {
        let block = super::growth::grown(heap, 8, 3000, 0);
        assert!(heap.stats().roomy_bytes > 3000);
        // SAFETY: none: this is the misuse to be detected.
        unsafe { (0..2).for_each(|_| heap.dealloc(block.memory, block.layout)) };
    };
    a_block_with_room_in_a_run_is_not_freed_twice: "a block was freed", |heap| {
        let block = super::growth::grown(heap, 8, 20_000, 0);
        assert!(heap.stats().roomy_bytes > 32 << 10);
        // SAFETY: none: this is the misuse to be detected.
        unsafe { (0..2).for_each(|_| heap.dealloc(block.memory, block.layout)) };
    };
    a_block_with_room_is_not_freed_as_a_longer_one: "wrong layout", |heap| {
        let block = super::growth::grown(heap, 8, 3000, 0);
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory, layout(200 << 10, 8)) };
    };
    a_block_with_room_in_a_slot_is_not_freed_as_a_longer_one: "wrong layout", |heap| {
        // Ten blocks get a run: the eleventh has to make do with a slot.
        let blocks: Vec<Block> = (0..11).map(|seed| super::growth::grown(heap, 8, 3000, seed)).collect();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(blocks[10].memory, layout(32 << 10, 8)) };
    };
    a_page_inside_a_large_block_is_refused: "wrong layout", |heap| {
        let block = Block::new(heap, layout(100_000, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory.add(8192), block.layout) };
    };
    a_word_inside_a_large_block_is_refused: "large one, with the wrong layout", |heap| {
        let block = Block::new(heap, layout(100_000, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory.add(8), block.layout) };
    };
    the_page_before_a_heap_is_refused: "not of this heap", |heap| {
        let block = Block::new(heap, layout(100_000, 8), 0).unwrap();
        let before = (1..).map(|pages| block.memory.wrapping_sub(pages << 13));
        let first = before.into_iter().find(|&page| !heap.contains(page)).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(first, block.layout) };
    };
    a_byte_before_a_heap_is_refused: "not of this heap", |heap| {
        let block = Block::new(heap, layout(100_000, 8), 0).unwrap();
        let before = (1..).map(|pages| block.memory.wrapping_sub(pages << 13));
        let first = before.into_iter().find(|&page| !heap.contains(page)).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(first.wrapping_add(1), block.layout) };
    };
    a_large_block_is_not_freed_as_a_shorter_one: "large one, with the wrong layout", |heap| {
        let block = Block::new(heap, layout(100_000, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory, layout(90_000, 8)) };
    };
    a_large_block_is_not_freed_as_a_longer_one: "large one, with the wrong layout", |heap| {
        let block = Block::new(heap, layout(100_000, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory, layout(110_000, 8)) };
    };
    a_block_of_mebibytes_is_not_freed_as_one_for_the_shelf: "large one, with the wrong layout", |heap| {
        let block = Block::new(heap, layout(2 << 20, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory, layout(1 << 20, 8)) };
    };
    a_block_for_the_shelf_is_not_freed_as_a_longer_one: "large one, with the wrong layout", |heap| {
        let block = Block::new(heap, layout(1 << 20, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory, layout((1 << 20) + 8192, 8)) };
    };
    a_large_block_aligned_to_pages_is_not_freed_as_any_other: "large one, with the wrong layout", |heap| {
        let block = Block::new(heap, layout(100_000, 16384), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory, layout(100_000, 8)) };
    };
    a_large_block_aligned_to_pages_from_the_shelf_is_not_freed_as_any_other: "with the wrong layout", |heap| {
        Block::new(heap, layout(1 << 16, 1 << 16), 0).unwrap().free(heap);
        let block = Block::new(heap, layout(1 << 16, 1 << 16), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory, layout(1 << 16, 8)) };
    };
    a_large_block_aligned_to_pages_is_not_freed_twice: "a large block was freed twice", |heap| {
        let block = Block::new(heap, layout(1 << 16, 1 << 16), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe {
            heap.dealloc(block.memory, block.layout);
            heap.dealloc(block.memory, block.layout);
        }
    };
    a_large_block_of_another_heap_is_refused: "not of this heap", |heap| {
        static OTHER: GlobalHeap = GlobalHeap::new();
        let _own = Block::new(heap, layout(100_000, 8), 0).unwrap();
        let block = Block::new(&OTHER, layout(100_000, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory, block.layout) };
    };
    a_large_block_is_not_freed_twice: "freed twice", |heap| {
        let block = Block::new(heap, layout(1 << 20, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe {
            heap.dealloc(block.memory, block.layout);
            heap.dealloc(block.memory, block.layout);
        }
    };
    a_block_that_was_put_aside_is_not_freed_twice: "freed twice", |heap| {
        let block = Block::new(heap, layout(3 << 20, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe {
            heap.dealloc(block.memory, block.layout);
            heap.dealloc(block.memory, block.layout);
        }
    };
    a_long_block_freed_by_two_threads_at_the_same_moment_is_found: "free", |heap| {
        let block = Block::new(heap, layout(3 << 20, 8), 0).unwrap();
        let (address, at_once) = (block.memory.expose_provenance(), std::sync::Barrier::new(2));
        on_threads(2, |_| {
            at_once.wait();
            // SAFETY: none: this is the misuse to be detected.
            unsafe { heap.dealloc(std::ptr::with_exposed_provenance_mut(address), layout(3 << 20, 8)) };
        });
    };
    a_block_that_lies_in_a_lot_is_not_freed_twice: "freed twice", |heap| {
        let make = || Block::new(heap, layout(100_000, 8), 0).unwrap().memory.expose_provenance();
        let (first, second) = (make(), make());
        // The first one stays in the hand of that thread.
        on_threads(1, |_| {
            for address in [first, second, second] {
                // SAFETY: none: this is the misuse to be detected.
                unsafe { heap.dealloc(std::ptr::with_exposed_provenance_mut(address), layout(100_000, 8)) };
            }
        });
    };
    a_block_that_was_put_aside_is_not_resized: "freed twice", |heap| {
        let block = Block::new(heap, layout(3 << 20, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe {
            heap.dealloc(block.memory, block.layout);
            heap.realloc(block.memory, block.layout, 1 << 20);
        }
    };
    a_long_block_is_not_freed_as_a_longer_one: "large one, with the wrong layout", |heap| {
        let block = Block::new(heap, layout(3 << 20, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(block.memory, layout((3 << 20) + 1, 8)) };
    };
    a_large_block_that_is_in_the_heap_again_is_not_freed_twice: "free", |heap| {
        let [first, second] = [(); 2].map(|()| Block::new(heap, layout(200 << 10, 8), 0).unwrap());
        // SAFETY: none: this is the misuse to be detected. The first block is put on the shelf and popped from it; the
        // second returns to the heap.
        unsafe {
            heap.dealloc(first.memory, first.layout);
            heap.dealloc(second.memory, second.layout);
            assert_eq!(heap.alloc(first.layout), first.memory);
            heap.dealloc(second.memory, second.layout);
        }
    };
    a_fresh_slot_cannot_be_freed: "not allocated", |heap| {
        let block = Block::new(heap, layout(1024, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(says(block.memory.add(7 * 1024)), layout(1024, 8)) };
    };
    a_freed_block_written_to_and_freed_again_is_found_when_it_comes_home: "not allocated", |heap| {
        let block = Block::new(heap, layout(600, 8), 0).unwrap();
        let _kept = Block::new(heap, layout(600, 8), 0).unwrap();
        // SAFETY: none: this is the misuse to be detected.
        unsafe {
            heap.dealloc(block.memory, block.layout);
            says(block.memory).cast::<[u64; 2]>().write([7; 2]);
            heap.dealloc(block.memory, block.layout);
        }
    };
    a_freed_block_of_eight_bytes_written_to_and_freed_again_is_found_when_it_comes_home: "not allocated", |heap| {
        let [block, _kept] = [(); 2].map(|()| Block::new(heap, layout(8, 8), 0).unwrap());
        // SAFETY: none: this is the misuse to be detected.
        unsafe {
            heap.dealloc(block.memory, block.layout);
            says(block.memory).cast::<u64>().write(7);
            heap.dealloc(block.memory, block.layout);
        }
    };
}

/// What a program writes to slots that are with their spans again is not looked at: all go out once, as before.
#[test]
#[cfg(not(feature = "checks"))]
fn a_freed_slot_written_to_leads_nobody_astray() {
    static HEAP: GlobalHeap = new_heap();
    for size in [8, 48, 600] {
        let make = || (0..3000).map(|_| Block::new(&HEAP, layout(size, 8), 1).unwrap());
        let (blocks, first): (Vec<_>, Vec<_>) = make().map(|block| (block.memory, block)).unzip();
        first.into_iter().for_each(|block| block.free(&HEAP));
        HEAP.flush_thread();
        for memory in blocks {
            // SAFETY: none: this is the misuse that must do no harm. The pages are still there.
            unsafe { memory.cast::<u64>().write(u64::MAX / 3) };
        }
        let again: Vec<_> = make().collect();
        let places: std::collections::BTreeSet<_> = again.iter().map(|block| block.memory.addr()).collect();
        assert_eq!(places.len(), again.len(), "{size} bytes");
        again.into_iter().for_each(|block| block.free(&HEAP));
        HEAP.flush_thread();
        HEAP.check().unwrap();
    }
}

/// A second free that cannot be detected for certain, because another thread has the block: it is not handed out twice.
#[test]
#[cfg(not(feature = "checks"))]
fn a_block_freed_again_by_another_thread_is_handed_out_once() {
    static HEAP: GlobalHeap = new_heap();
    let blocks: Vec<_> = (0..20).map(|_| Block::new(&HEAP, layout(64, 8), 0).unwrap()).collect();
    let addresses: Vec<_> = blocks.iter().map(|block| block.memory.expose_provenance()).collect();
    blocks.into_iter().for_each(|block| block.free(&HEAP));
    let take = || (0..1000).map(|_| Block::new(&HEAP, layout(64, 8), 0).unwrap().memory.addr());
    let theirs = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            for &address in &addresses {
                // SAFETY: none: this is the misuse that must do no harm.
                unsafe { HEAP.dealloc(std::ptr::with_exposed_provenance_mut(address), layout(64, 8)) };
            }
            take().collect::<Vec<_>>()
        });
        other.join().unwrap()
    });
    let mut all: Vec<_> = take().chain(theirs).collect();
    all.sort_unstable();
    assert!(
        all.windows(2).all(|pair| pair[0] != pair[1]),
        "a block is handed out twice"
    );
}

/// A span of few slots writes nothing into slots that are home, so a program that writes to one does no harm.
#[test]
#[cfg(not(feature = "checks"))]
fn a_block_written_to_after_it_went_home_is_handed_out_once() {
    static HEAP: GlobalHeap = new_heap();
    let take = || -> Vec<_> { (0..8).map(|_| Block::new(&HEAP, layout(1024, 8), 0).unwrap()).collect() };
    let (kept, blocks) = (take(), take());
    let freed: Vec<_> = blocks.iter().map(|block| block.memory).collect();
    blocks.into_iter().for_each(|block| block.free(&HEAP));
    HEAP.flush_thread();
    for memory in &freed {
        // SAFETY: none: this is the misuse that must do no harm. A span whose slots are all home is kept if it is the
        // only one.
        unsafe { memory.cast::<u32>().write(u32::MAX) };
    }
    let again = take();
    let mut all: Vec<_> = again.iter().chain(&kept).map(|block| block.memory.addr()).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 16);
    HEAP.check().unwrap();
    again.into_iter().chain(kept).for_each(|block| block.free(&HEAP));
}

/// A word with the upper bytes of a free block's mark, and no other bit of it.
fn like_a_mark(heap: &GlobalHeap) -> u64 {
    let block = Block::new(heap, layout(64, 8), 0).unwrap();
    // SAFETY: freed with its layout. The heap's memory stays mapped, and no other thread uses the heap.
    let mark = unsafe {
        heap.dealloc(block.memory, block.layout);
        block.memory.cast::<u64>().read()
    };
    mark ^ u64::MAX >> 16
}

/// Contents that look like the mark of a free block but are the program's.
#[test]
fn a_block_may_hold_any_words() {
    static HEAP: GlobalHeap = new_heap();
    let out = || {
        HEAP.flush_thread();
        HEAP.scavenge(pageheap::PageCount(0));
        HEAP.stats().slot_bytes
    };
    for size in [8, 64, 1024] {
        let other = Block::new(&HEAP, layout(size, 8), 0).unwrap();
        let before = out();
        let words = [
            0,
            1,
            77,
            u64::MAX,
            u64::MAX << 32,
            like_a_mark(&HEAP),
            like_a_mark(&HEAP) & u64::MAX << 48,
            other.memory.addr() as u64,
        ];
        for word in words {
            // More than a magazine and its spare hold.
            let blocks: Vec<_> = (0..500)
                .map(|_| Block::new(&HEAP, layout(size, 8), 0).unwrap())
                .collect();
            for block in &blocks {
                // SAFETY: a write inside the block, which is then freed with its layout.
                unsafe {
                    block.memory.cast::<u64>().write(word);
                    HEAP.dealloc(block.memory, block.layout);
                }
            }
        }
        assert_eq!(out(), before, "blocks were lost");
        HEAP.check().unwrap();
        other.free(&HEAP);
    }
}

/// What the checked build detects: the message names address, size class and span.
#[cfg(feature = "checks")]
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "there is no safety: that is what must be found out"
)]
mod checked {
    #[cfg(unix)]
    use pageheap::Config;

    use super::*;
    #[cfg(unix)]
    use commits::Strict;

    /// Sizes and alignments of the fresh block that is misused; each child gets one of them.
    const SHAPES: [(usize, usize); 8] = [
        (1, 1),
        (8, 8),
        (100, 4),
        (1000, 64),
        (4096, 4096),
        (32 << 10, 16),
        (100_000, 8),
        (3 << 20, 65536),
    ];

    /// Runs a test in a child for each of the first `shapes` of these, which must abort with the message; in the child,
    /// the layout.
    fn found(name: &str, message: &str, shapes: usize) -> Option<Layout> {
        const SHAPE: &str = "PAGEHEAP_TEST_SHAPE";
        if is_child() {
            let number: usize = std::env::var(SHAPE).unwrap().parse().unwrap();
            let (size, align) = SHAPES[number];
            return Some(layout(size, align));
        }
        for (number, shape) in SHAPES[..shapes].iter().enumerate() {
            let output = child(name).env(SHAPE, number.to_string()).output().unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            let said = [message, "address 0x", "size class ", "span at page "];
            // What lies outside the heap has neither a class nor a span.
            let all = said[..if message == "not of this heap" { 2 } else { 4 }]
                .iter()
                .all(|said| errors.contains(said));
            assert!(!output.status.success() && all, "{shape:?}: {output:?}");
        }
        None
    }

    macro_rules! sealed {
        ($($name:ident: $message:literal, $work:expr;)*) => {$(
            #[test]
            fn $name() {
                static HEAP: GlobalHeap = new_heap();
                let Some(layout) = found(concat!("checked::", stringify!($name)), $message, SHAPES.len()) else {
                    return;
                };
                // Blocks before and behind it.
                let other = |seed| Block::new(&HEAP, layout, seed).unwrap();
                let (_before, block, _behind) = (other(1), other(2), other(3));
                let work: unsafe fn(&GlobalHeap, *mut u8, Layout) = $work;
                // SAFETY: none: this is the misuse to be detected.
                unsafe { work(&HEAP, block.memory, block.layout) };
            }
        )*};
    }

    sealed! {
        a_block_freed_twice_in_a_row_is_found: "freed twice", |heap, block, layout| unsafe {
            heap.dealloc(block, layout);
            heap.dealloc(block, layout);
        };
        a_block_freed_twice_with_others_between_is_found: "freed twice", |heap, block, layout| unsafe {
            let others = [(); 5].map(|()| heap.alloc(layout));
            heap.dealloc(block, layout);
            others.into_iter().for_each(|other| heap.dealloc(other, layout));
            heap.dealloc(block, layout);
        };
        a_block_freed_twice_by_two_threads_is_found: "freed twice", |heap, block, layout| unsafe {
            heap.dealloc(block, layout);
            heap.flush_thread();
            let address = block.expose_provenance();
            std::thread::scope(|scope| {
                let free = move || heap.dealloc(std::ptr::with_exposed_provenance_mut(address), layout);
                join_all(vec![scope.spawn(free)]);
            });
        };
        a_block_freed_by_an_address_inside_it_is_found: "not allocated", |heap, block, layout| unsafe {
            // At a word boundary, at least: no block begins at other addresses.
            heap.dealloc(block.add(layout.size().next_multiple_of(8)), layout);
        };
        a_block_freed_with_another_size_is_found: "wrong layout", |heap, block, layout| unsafe {
            heap.dealloc(block, Layout::from_size_align(layout.size() + 1, layout.align()).unwrap());
        };
        a_block_freed_with_another_alignment_is_found: "wrong layout", |heap, block, layout| unsafe {
            heap.dealloc(block, Layout::from_size_align(layout.size(), layout.align() * 2).unwrap());
        };
        a_byte_written_past_the_end_is_found: "written past its end", |heap, block, layout| unsafe {
            let past = block.add(layout.size());
            past.write(!past.read());
            heap.dealloc(block, layout);
        };
        a_zero_written_past_the_end_is_found: "written past its end", |heap, block, layout| unsafe {
            block.add(layout.size()).write(0);
            heap.dealloc(block, layout);
        };
        a_byte_written_before_the_beginning_is_found: "bytes before it", |heap, block, layout| unsafe {
            let before = block.sub(1);
            before.write(!before.read());
            heap.dealloc(block, layout);
        };
        an_overflow_is_found_by_resizing_too: "written past its end", |heap, block, layout| unsafe {
            block.add(layout.size()).write(0);
            heap.realloc(block, layout, layout.size() * 2);
        };
        a_resize_of_a_freed_block_is_found: "freed twice", |heap, block, layout| unsafe {
            heap.dealloc(block, layout);
            heap.realloc(block, layout, layout.size() * 2);
        };
        a_stranger_is_found: "not of this heap", |heap, _, layout| unsafe {
            let stranger = Box::leak(Box::new([0_u64; 64]));
            heap.dealloc(stranger.as_mut_ptr().cast(), layout);
        };
    }

    /// Frees a block, gives all memory back, and frees the block again.
    fn free_again<S: Source + Send + Sync>(heap: &GlobalHeap<S>, layout: Layout, between: impl FnOnce()) {
        // Many, so that the last one is not in the first page, which others may have next.
        let count = (128 << 10) / (layout.size() + 100) + 2;
        let blocks: Vec<_> = (0..count)
            .map(|seed| Block::new(heap, layout, seed as u8).unwrap())
            .collect();
        let last = blocks[count - 1].memory;
        blocks.into_iter().for_each(|block| block.free(heap));
        heap.release(usize::MAX);
        between();
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.dealloc(last, layout) };
    }

    #[test]
    fn a_block_freed_twice_is_found_after_its_memory_went_back() {
        static HEAP: GlobalHeap = new_heap();
        let name = "checked::a_block_freed_twice_is_found_after_its_memory_went_back";
        if let Some(layout) = found(name, "not allocated: its page has no memory", SHAPES.len()) {
            free_again(&HEAP, layout, || ());
        }
    }

    /// Its header must not be read.
    #[test]
    #[cfg(unix)]
    fn a_block_freed_twice_is_found_where_its_memory_has_to_be_committed() {
        // SAFETY: the source's pages are memory.
        static HEAP: GlobalHeap<Strict> = unsafe { GlobalHeap::with_source(Strict, Config::new(addresses(1 << 34))) };
        let name = "checked::a_block_freed_twice_is_found_where_its_memory_has_to_be_committed";
        if let Some(layout) = found(name, "not allocated: its page has no memory", SHAPES.len()) {
            free_again(&HEAP, layout, || ());
        }
    }

    /// A cache of pages takes what is free of 64 pages, with memory or without.
    #[test]
    #[cfg(unix)]
    fn a_block_freed_twice_is_found_where_its_page_is_in_a_cache() {
        // SAFETY: the source's pages are memory.
        static HEAP: GlobalHeap<Strict> = unsafe { GlobalHeap::with_source(Strict, Config::new(addresses(1 << 34))) };
        let name = "checked::a_block_freed_twice_is_found_where_its_page_is_in_a_cache";
        if !pageheap::internals::has_fence() {
            return;
        }
        if let Some(layout) = found(name, "not allocated: its page has no memory", SHAPES.len()) {
            free_again(&HEAP, layout, || {
                Block::new(&HEAP, super::layout(2000, 8), 1).unwrap();
            });
        }
    }

    /// Writes to a freed block, and has its slot handed out again; a zero too.
    fn written_to(heap: &GlobalHeap, name: &str, take: unsafe fn(&GlobalHeap, Layout) -> *mut u8) {
        let Some(layout) = found(name, "written to after it was freed", 5) else {
            return;
        };
        // SAFETY: none: this is the misuse to be detected.
        unsafe {
            let blocks = [(); 20].map(|()| heap.alloc(layout));
            heap.dealloc(blocks[7], layout);
            let written = if layout.size() < 1000 { 0x55 } else { 0 };
            blocks[7].add(layout.size() / 2).write_volatile(written);
            heap.dealloc(blocks[8], layout);
            while take(heap, layout) != blocks[7] {}
        }
    }

    #[test]
    fn a_write_to_a_freed_block_is_found() {
        static HEAP: GlobalHeap = new_heap();
        written_to(&HEAP, "checked::a_write_to_a_freed_block_is_found", GlobalHeap::alloc);
    }

    /// Before it is zeroed.
    #[test]
    fn a_write_to_a_freed_block_that_is_to_be_zero_is_found() {
        static HEAP: GlobalHeap = new_heap();
        let name = "checked::a_write_to_a_freed_block_that_is_to_be_zero_is_found";
        written_to(&HEAP, name, GlobalHeap::alloc_zeroed);
    }

    /// By another thread, which gets it with a batch.
    #[test]
    fn a_write_to_a_block_that_another_thread_freed_is_found() {
        static HEAP: GlobalHeap = new_heap();
        let name = "checked::a_write_to_a_block_that_another_thread_freed_is_found";
        let Some(layout) = found(name, "written to after it was freed", 3) else {
            return;
        };
        // SAFETY: none: this is the misuse to be detected.
        unsafe {
            // More than a thread may keep for itself.
            let blocks: Vec<_> = (0..60_000).map(|_| HEAP.alloc(layout)).collect();
            blocks.iter().for_each(|&block| HEAP.dealloc(block, layout));
            blocks.iter().for_each(|block| block.write_volatile(0x55));
            std::thread::scope(|scope| {
                let allocate = || (0..1000).for_each(|_| assert!(!HEAP.alloc(layout).is_null()));
                join_all(vec![scope.spawn(allocate)]);
            });
        }
    }

    /// A slot that was none for a while: its bytes belonged to a large block, which wrote to all but those that said
    /// that the slot was free. Nor is what the system has set to zero taken for written.
    #[test]
    fn what_others_wrote_where_a_block_lay_is_no_misuse() {
        static HEAP: GlobalHeap = new_heap().limit(2 << 20);
        let (small, large) = (layout(100, 8), layout(1 << 20, 8));
        // SAFETY: live blocks, freed with their layouts; writes stay inside.
        unsafe {
            let fill = || -> Vec<_> {
                (0..)
                    .map(|_| HEAP.alloc(small))
                    .take_while(|block| !block.is_null())
                    .collect()
            };
            let empty = |blocks: &[*mut u8]| blocks.iter().for_each(|&block| HEAP.dealloc(block, small));
            let blocks = fill();
            empty(&blocks);
            let long = HEAP.alloc(large);
            assert!(!long.is_null());
            let inside = |block: &*mut u8| (100..large.size() - 100).contains(&block.addr().wrapping_sub(long.addr()));
            let covered: Vec<_> = blocks.iter().copied().filter(inside).collect();
            covered
                .iter()
                .for_each(|block| long.add(block.addr() - long.addr()).write_bytes(0x77, 100));
            HEAP.dealloc(long, large);
            let again = fill();
            let same = again.iter().filter(|block| covered.contains(block)).count();
            assert!(same > 4000, "{same} of {}", covered.len());
            empty(&again);
            HEAP.release(usize::MAX);
            empty(&fill());
        }
    }

    /// Wherever it lies when it is freed again: in a magazine, in a spare, at the head of a batch in the store or
    /// inside one.
    #[test]
    fn any_of_three_hundred_freed_blocks_is_found_when_freed_again() {
        static HEAP: GlobalHeap = new_heap();
        const WHICH: &str = "PAGEHEAP_TEST_WHICH";
        const NAME: &str = "checked::any_of_three_hundred_freed_blocks_is_found_when_freed_again";
        if !is_child() {
            for number in 0..300_usize {
                let output = child(NAME).env(WHICH, number.to_string()).output().unwrap();
                let errors = String::from_utf8_lossy(&output.stderr);
                let found = errors.contains("freed twice") && !output.status.success();
                assert!(found, "block {number}: {output:?}");
            }
            return;
        }
        let number: usize = std::env::var(WHICH).unwrap().parse().unwrap();
        let blocks: Vec<_> = (0..300)
            .map(|seed| Block::new(&HEAP, layout(24, 8), seed as u8).unwrap())
            .collect();
        let (again, wanted) = (blocks[number].memory, blocks[number].layout);
        blocks.into_iter().for_each(|block| block.free(&HEAP));
        // SAFETY: none: this is the misuse to be detected.
        unsafe { HEAP.dealloc(again, wanted) };
    }

    #[test]
    fn what_was_freed_does_not_read_as_it_was() {
        static HEAP: GlobalHeap = new_heap();
        let block = Block::new(&HEAP, layout(1000, 8), 7).unwrap();
        let memory = block.memory;
        block.free(&HEAP);
        // SAFETY: the memory is the heap's, and no other thread uses this heap.
        assert!((0..1000).all(|index| unsafe { memory.add(index).read_volatile() } == 0xdf));
    }
}

/// In the child of a fork, flagged roomy bytes never exceed the count, whatever the parent's thread was doing (I18).
#[test]
#[cfg(unix)]
#[cfg_attr(feature = "checks", ignore = "blocks always move")]
fn a_child_counts_at_least_what_is_roomy() {
    use std::sync::atomic::{AtomicBool, Ordering};
    static HEAP: GlobalHeap = new_heap();
    static STOP: AtomicBool = AtomicBool::new(false);
    if !is_child() {
        // A small process forks quickly.
        let output = run("a_child_counts_at_least_what_is_roomy");
        return assert!(output.status.success(), "{output:?}");
    }
    let grower = std::thread::spawn(|| {
        while !STOP.load(Ordering::Relaxed) {
            // SAFETY: the live block, with its layout.
            unsafe {
                let (mut block, mut size) = (HEAP.alloc(layout(17_000, 8)), 17_000);
                for to in [19_000, 21_000, 250_000, 500_000] {
                    (block, size) = (HEAP.realloc(block, layout(size, 8), to), to);
                }
                HEAP.dealloc(block, layout(size, 8));
            }
        }
    });
    let broken = (0..rounds(6000)).filter(|_| {
        // SAFETY: the child checks its heap and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let fine = HEAP.check().is_ok();
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(!fine)) };
        }
        assert!(child > 0, "it failed");
        let mut status = 0;
        // SAFETY: waits for the child just forked.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status != 0
    });
    let broken = broken.count();
    STOP.store(true, Ordering::Relaxed);
    grower.join().unwrap();
    assert_eq!(broken, 0);
}
