//! What a program has not written moves with a block, marks of free slots included (`object/stray.rs`).

use std::alloc::{GlobalAlloc, Layout};
use std::ptr::NonNull;

use pageheap::source::System;
use pageheap::{Config, GlobalHeap, Heap, PageCount};

use super::common::addresses;
use super::{layout, new_heap};

/// A heap, whichever it is.
trait Allocates {
    fn take(&self, layout: Layout) -> NonNull<u8>;
    /// # Safety
    ///
    /// As for `GlobalAlloc::dealloc`.
    unsafe fn give(&self, block: NonNull<u8>, layout: Layout);
    /// # Safety
    ///
    /// As for `GlobalAlloc::realloc`.
    unsafe fn resize(&self, block: NonNull<u8>, layout: Layout, size: usize) -> NonNull<u8>;
    fn slot_bytes(&self) -> usize;
    /// All pages that can go back to the set of free pages do; their contents stay.
    fn tidy(&self);
}

impl Allocates for GlobalHeap {
    fn take(&self, layout: Layout) -> NonNull<u8> {
        // SAFETY: no layout here has size zero.
        NonNull::new(unsafe { self.alloc(layout) }).unwrap()
    }

    unsafe fn give(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.dealloc(block.as_ptr(), layout) };
    }

    unsafe fn resize(&self, block: NonNull<u8>, layout: Layout, size: usize) -> NonNull<u8> {
        // SAFETY: the caller's promise.
        NonNull::new(unsafe { self.realloc(block.as_ptr(), layout, size) }).unwrap()
    }

    fn slot_bytes(&self) -> usize {
        self.stats().slot_bytes
    }

    fn tidy(&self) {
        self.flush_thread();
        self.scavenge(PageCount(0));
    }
}

impl Allocates for Heap<System> {
    fn take(&self, layout: Layout) -> NonNull<u8> {
        self.allocate(layout).unwrap()
    }

    unsafe fn give(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.free(block, layout) };
    }

    unsafe fn resize(&self, block: NonNull<u8>, layout: Layout, size: usize) -> NonNull<u8> {
        // SAFETY: the caller's promise.
        unsafe { Heap::resize(self, block, layout, size) }.unwrap()
    }

    fn slot_bytes(&self) -> usize {
        self.stats().slot_bytes
    }

    fn tidy(&self) {
        self.scavenge(PageCount(0));
    }
}

/// Blocks that nobody has written to, which move away and back. Returns how many bytes of slots stay in use.
fn move_and_return(heap: &impl Allocates) -> usize {
    let (small, long) = (layout(64, 8), layout(40_000, 8));
    // Threads' structures and racks.
    let block = heap.take(small);
    // SAFETY: allocated here, freed once, with its layout.
    unsafe { heap.give(block, small) };
    heap.tidy();
    let (before, mut returned) = (heap.slot_bytes(), 0);
    for size in (72..=1024).step_by(8) {
        let blocks: Vec<_> = (0..20_000).map(|_| heap.take(small)).collect();
        // SAFETY: as above.
        blocks.into_iter().for_each(|block| unsafe { heap.give(block, small) });
        heap.tidy();
        // After this there are pages for racks.
        let other = heap.take(small);
        let (block, next) = (heap.take(long), heap.take(long));
        // SAFETY: as above; a block that moves is resized and freed where it is then.
        unsafe {
            let away = heap.resize(block, long, 80_000);
            if size % 16 == 0 {
                // The slot is at hand.
                let first = heap.take(layout(size, 8));
                heap.give(first, layout(size, 8));
            }
            let back = heap.resize(away, layout(80_000, 8), size);
            let page = back.addr().get() & !8191;
            returned += usize::from(page == block.addr().get());
            heap.give(back, layout(size, 8));
            heap.give(next, long);
            heap.give(other, small);
        }
    }
    assert!(returned > 50, "{returned} of 120 blocks returned");
    heap.tidy();
    heap.slot_bytes() - before
}

/// Regression: when such a block was freed, it was taken for free already, and stayed where it was: with a `GlobalHeap`
/// 31 of 120 blocks.
#[test]
#[cfg_attr(feature = "checks", ignore = "every block begins with its seal")]
fn a_block_that_returns_to_where_its_first_word_was_a_mark_is_not_lost() {
    static HEAP: GlobalHeap = new_heap().background(false);
    assert_eq!(move_and_return(&HEAP), 0, "bytes of slots that nobody uses");
    let heap = Heap::new(System, Config::new(addresses(1 << 30))).unwrap();
    assert_eq!(move_and_return(&heap), 0, "bytes of slots of a `Heap` that nobody uses");
}

/// Regression: where a block was shortened for want of memory, a word that decoded to a mark was wiped, although the
/// program had written to some of its bytes: one value in 256 was lost.
#[test]
#[cfg_attr(feature = "checks", ignore = "every block begins with its seal")]
fn a_byte_that_was_written_stays_where_a_block_is_shortened_in_a_full_heap() {
    let heap = Heap::new(System, Config::new(addresses(1 << 26)).limit(PageCount(40))).unwrap();
    let fill = |size| std::iter::from_fn(|| heap.allocate(layout(size, 8))).collect::<Vec<_>>();
    let free = |blocks: Vec<NonNull<u8>>, size| {
        let layout = layout(size, 8);
        // SAFETY: allocated here, freed once, with its layout.
        blocks.into_iter().for_each(|block| unsafe { heap.free(block, layout) });
    };
    let long = layout(20 * 8192, 8);
    let lost = (0..=255_u8).filter(|&value| {
        // Leaves marks at the beginning of nearly every page.
        free(fill(64), 64);
        let block = heap.allocate(long).unwrap();
        // SAFETY: the block is ours, and so is what becomes of it.
        let (short, read, rest) = unsafe {
            block.write(value);
            let rest = [(8192, fill(8192)), (100, fill(100))];
            let short = heap.resize(block, long, 100).unwrap();
            (short, short.read(), rest)
        };
        assert!(
            short.addr().get() - block.addr().get() < heap.page_bytes(),
            "in its first page, for there is no memory"
        );
        rest.into_iter().for_each(|(size, blocks)| free(blocks, size));
        free(vec![short], 100);
        heap.check().unwrap();
        read != value
    });
    assert_eq!(lost.count(), 0, "values lost");
    assert_eq!(heap.stats().slot_bytes, 0);
}
