//! Blocks freed where they do not belong: a `Heap` detects them before it accepts one. (A `GlobalHeap` pushes those of
//! up to 1 KiB to a magazine, and detects them when that is flushed: `processes`.) Each test runs in a process of its
//! own.

use std::alloc::Layout;
use std::process::Output;
use std::ptr::NonNull;

use pageheap::source::System;
use pageheap::{Config, Heap};

use super::child;
use super::common::addresses;

/// Which of the shapes below a child is to test.
const SHAPE: &str = "PAGEHEAP_TEST_SHAPE";

fn heap() -> Heap<System> {
    Heap::new(System, Config::new(addresses(1 << 30))).expect("a heap")
}

/// Runs the test `name` of this file in a child, for one shape.
fn run(name: &str, shape: usize) -> Output {
    let mut command = child::command(&format!("strangers::{name}"));
    child::output(command.env(SHAPE, shape.to_string()))
}

/// Sizes and alignments of blocks: in slots with a mark, in slots with a flag, and in pages.
const SHAPES: [(usize, usize); 8] = [
    (8, 8),
    (64, 8),
    (1000, 8),
    (5000, 8),
    (100_000, 8),
    (100, 16 << 10),
    (100_000, 2 << 20),
    (3 << 20, 16 << 20),
];

/// For each shape, in a child: `$work` gets a heap and one of its blocks, and returns the block and layout to free. The
/// process must end with the message and the address before anything else happens.
macro_rules! found_at_once {
    ($($name:ident: $messages:expr, $work:expr;)*) => {$(
        #[test]
        fn $name() {
            let Ok(shape) = std::env::var(SHAPE) else {
                for (number, (size, align)) in SHAPES.into_iter().enumerate() {
                    let output = run(stringify!($name), number);
                    let errors = String::from_utf8_lossy(&output.stderr);
                    let address = String::from_utf8_lossy(&output.stdout);
                    let address = address.lines().find_map(|line| line.split_once("frees ")).expect("an address").1;
                    let messages: &[&str] = &$messages;
                    let said = messages.iter().any(|message| errors.contains(message)) && errors.contains(address);
                    assert!(!output.status.success() && said, "{size} bytes at {align}: {output:?}");
                }
                return;
            };
            let (size, align) = SHAPES[shape.parse::<usize>().unwrap()];
            let (heap, layout) = (heap(), Layout::from_size_align(size, align).unwrap());
            let block = heap.allocate(layout).expect("room");
            // So that there is a magazine that could accept another, and the thread needs no lock.
            for _ in 0..40 {
                // SAFETY: allocated here; nothing uses it.
                unsafe { heap.free(heap.allocate(layout).expect("room"), layout) };
            }
            let work: fn(&Heap<System>, NonNull<u8>, Layout) -> (NonNull<u8>, Layout) = $work;
            let (block, layout) = work(&heap, block, layout);
            println!("frees {block:?}");
            // SAFETY: none: this is the misuse to be detected.
            unsafe { heap.free(block, layout) };
            std::process::exit(0);
        }
    )*};
}

found_at_once! {
    memory_of_nobodys_is_refused: ["not of this heap"], |_, _, layout| {
        (NonNull::from(vec![0_u64; layout.size().div_ceil(8)].leak()).cast(), layout)
    };
    another_heaps_block_is_refused: ["not of this heap"], |_, _, layout| {
        let other = Box::leak(Box::new(heap()));
        (other.allocate(layout).expect("room"), layout)
    };
    a_longer_one_is_refused: ["wrong layout"], |heap, block, layout| {
        // Blocks that the longer layout would cover.
        let _behind: Vec<_> = (0..8).map(|_| heap.allocate(Layout::new::<[u8; 40_000]>())).collect();
        let longer = if layout.size() > 1024 { layout.size() + (8 << 10) } else { layout.size() * 2 + (8 << 10) };
        (block, Layout::from_size_align(longer, layout.align()).expect("a layout"))
    };
    a_shorter_one_is_refused: ["wrong layout"], |_, block, layout| {
        let size = if layout.size() > 8 { layout.size() / 9 } else { 100 };
        let align = if size > 8192 { layout.align() } else { 8 };
        (block, Layout::from_size_align(size, align).expect("a layout"))
    };
    a_block_freed_twice_is_found: ["freed twice", "not allocated"], |heap, block, layout| {
        // SAFETY: allocated with this layout; the second free is the misuse to be detected.
        unsafe { heap.free(block, layout) };
        (block, layout)
    };
    // A block with this alignment is in no table.
    a_page_inside_what_is_aligned_to_more_is_refused: ["wrong layout", "not allocated"], |heap, _, layout| {
        let layout = Layout::from_size_align(layout.size() + 16384, 32 << 20).expect("a layout");
        let block = heap.allocate(layout).expect("room");
        // SAFETY: inside the block.
        (unsafe { block.add(8192) }, layout)
    };
    an_address_inside_is_refused: ["inside it", "wrong layout", "not allocated"], |_, block, layout| {
        // In the smallest class, the next slot begins at 8.
        let within = match layout.size() {
            8 => 4,
            0x10000.. => 8192,
            _ => 8,
        };
        // SAFETY: inside the block.
        (unsafe { block.add(within) }, layout)
    };
}

/// As for a free: otherwise its contents would be copied, and the block given up.
#[test]
fn another_heaps_block_is_not_resized() {
    if !child::is_one() {
        let output = run("another_heaps_block_is_not_resized", 0);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && errors.contains("not of this heap"),
            "{output:?}"
        );
        return;
    }
    let (own, other, layout) = (heap(), heap(), Layout::new::<[u64; 10]>());
    let _block = own.allocate(layout).expect("room");
    let block = other.allocate(layout).expect("room");
    // SAFETY: none: this is the misuse to be detected.
    let _resized = unsafe { own.resize(block, layout, 800) };
    std::process::exit(0);
}

/// Although another block lies over its place by then.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room")]
fn a_large_block_freed_twice_is_found_below_another() {
    if child::aborts(
        "strangers::a_large_block_freed_twice_is_found_below_another",
        "freed twice",
    ) {
        let (heap, of) = (heap(), |mib: usize| Layout::from_size_align(mib << 20, 8).unwrap());
        let [first, second] = [2; 2].map(|mib| heap.allocate(of(mib)).expect("room"));
        // SAFETY: allocated here, each freed once.
        [first, second]
            .into_iter()
            .for_each(|block| unsafe { heap.free(block, of(2)) });
        assert_eq!(heap.allocate(of(4)), Some(first), "over both");
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.free(child::wrong(second), of(2)) };
    }
}

/// A block aligned to more than 16 MiB is in no table, so nothing may be at its place.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals say more")]
fn a_block_freed_as_one_aligned_to_more_is_found() {
    if child::aborts(
        "strangers::a_block_freed_as_one_aligned_to_more_is_found",
        "wrong layout",
    ) {
        let (heap, of) = (heap(), |mib: usize| {
            Layout::from_size_align(1 << 20, mib << 20).unwrap()
        });
        let blocks = [16; 2].map(|mib| heap.allocate(of(mib)).expect("room"));
        let is_aligned = |block: &NonNull<u8>| block.addr().get().is_multiple_of(of(32).align());
        let block = blocks.into_iter().find(is_aligned).expect("one of two");
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.free(child::wrong(block), of(32)) };
    }
}

/// A slot beside one that the program has, and which it never had itself.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals say more")]
fn a_slot_that_was_never_allocated_is_refused() {
    if child::aborts("strangers::a_slot_that_was_never_allocated_is_refused", "freed twice") {
        let (heap, layout) = (heap(), Layout::new::<[u8; 5000]>());
        let block = heap.allocate(layout).expect("room");
        let beside = block.as_ptr().wrapping_add(heap.usable_size(layout));
        // SAFETY: none: this is the misuse to be detected.
        unsafe { heap.free(child::wrong(NonNull::new(beside).unwrap()), layout) };
    }
}
