//! Sequences of `GlobalAlloc` calls, beside a shadow map of all live blocks.
//!
//! ```text
//!   byte 0: which heap, its limit     then four bytes a step: what, which block or size (2), alignment
//! ```
//!
//! The subject is a fresh [`Heap`] with a limit that is soon reached, or the process's one [`GlobalHeap`], through the
//! trait. Every block is filled with a byte of its own and checked when it is resized or freed; no two may overlap,
//! and each is aligned, and zero if requested. Some grow by a quarter several times in a row. At the end everything is
//! freed, and the heap's figures must say so.

use std::alloc::{GlobalAlloc, Layout};
use std::collections::BTreeMap;
use std::ptr::NonNull;

use pageheap::source::System;
use pageheap::{Config, GlobalHeap, Heap, PageCount};

use super::Bytes;

/// The calls, on either heap.
trait Calls {
    fn allocate(&self, layout: Layout, zeroed: bool) -> Option<NonNull<u8>>;
    /// # Safety
    /// As for `GlobalAlloc::dealloc`.
    unsafe fn free(&self, block: NonNull<u8>, layout: Layout);
    /// # Safety
    /// As for `GlobalAlloc::realloc`.
    unsafe fn resize(&self, block: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>>;
}

impl Calls for Heap<System> {
    fn allocate(&self, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
        if zeroed {
            self.allocate_zeroed(layout)
        } else {
            self.allocate(layout)
        }
    }

    unsafe fn free(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.free(block, layout) };
    }

    unsafe fn resize(&self, block: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller's promise.
        unsafe { self.resize(block, layout, size) }
    }
}

impl Calls for GlobalHeap {
    fn allocate(&self, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
        // SAFETY: the size is not zero.
        NonNull::new(unsafe {
            if zeroed {
                self.alloc_zeroed(layout)
            } else {
                self.alloc(layout)
            }
        })
    }

    unsafe fn free(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.dealloc(block.as_ptr(), layout) };
    }

    unsafe fn resize(&self, block: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller's promise.
        NonNull::new(unsafe { self.realloc(block.as_ptr(), layout, size) })
    }
}

/// A live block and the byte it is filled with.
struct Block {
    memory: NonNull<u8>,
    layout: Layout,
    fill: u8,
}

impl Block {
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the block is ours, and all of it was written when it was made.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.layout.size()) }
    }

    fn verify(&mut self, size: usize) {
        let fill = self.fill;
        let wrong = first_other(&self.bytes()[..size], fill);
        assert_eq!(wrong, None, "{:?} at {:p} lost byte", self.layout, self.memory);
    }
}

/// The first byte that differs. Rows of bytes are compared with a row: in a fuzzed program each comparison of a loop is
/// a call, and one by one they take all of its time.
fn first_other(bytes: &[u8], fill: u8) -> Option<usize> {
    let row = [fill; 4096];
    let other = |part: &[u8]| part != &row[..part.len()];
    let part = bytes.chunks(row.len()).position(other)?;
    let position = bytes[part * row.len()..].iter().position(|&byte| byte != fill)?;
    Some(part * row.len() + position)
}

/// The most steps of one input.
pub const MOST_STEPS: usize = 150;

/// The most bytes that a block grows to by quarters.
const MOST_GROWN: usize = 192 << 10;

/// The most live blocks of one input.
const MOST_BLOCKS: usize = 64;

/// See the [module](self).
pub fn global(input: &[u8]) {
    static GLOBAL: GlobalHeap = GlobalHeap::new().background(false);
    let mut bytes = Bytes(input);
    let first = bytes.byte();
    if first % 4 == 0 {
        // The thread's own structure is made by its first call, and stays.
        let empty = || {
            let block = GLOBAL.allocate(Layout::new::<u8>(), false).expect("a byte");
            // SAFETY: just allocated, with this layout.
            unsafe { Calls::free(&GLOBAL, block, Layout::new::<u8>()) };
            GLOBAL.flush_thread();
            GLOBAL.stats().bytes_in_use()
        };
        let before = empty();
        steps(&GLOBAL, &mut bytes);
        assert_eq!(empty(), before, "{}", GLOBAL.stats());
        GLOBAL.check().expect("a heap without a fault");
        return;
    }
    let config = Config::new(1 << 28).limit(PageCount(16 << (first % 8)));
    let heap = Heap::new(System, config).expect("a heap of a quarter of a gigabyte");
    steps(&heap, &mut bytes);
    assert_eq!(heap.stats().bytes_in_use(), 0, "{}", heap.stats());
    heap.scavenge(PageCount(first % 3 * 50));
    heap.check().expect("a heap without a fault");
}

fn steps(heap: &impl Calls, bytes: &mut Bytes<'_>) {
    let mut live: BTreeMap<usize, Block> = BTreeMap::new();
    for step in 0..MOST_STEPS {
        if bytes.0.is_empty() {
            break;
        }
        let (what, number, align) = (bytes.byte(), bytes.below(1 << 16), bytes.byte());
        // Every order of magnitude up to 64 KiB, or up to half a MiB.
        let size = ((number >> (what >> 4)) << if align & 128 == 0 { 0 } else { 3 }).max(1);
        match what % 4 {
            0 | 1 if live.len() < MOST_BLOCKS => {
                let layout = Layout::from_size_align(size, 1 << (align % 18)).expect("a layout");
                if let Some(memory) = heap.allocate(layout, what % 4 == 1) {
                    enter(&mut live, memory, layout, what % 4 == 1, step as u8);
                }
            }
            2 => {
                if let Some(block) = choose(&mut live, number) {
                    let (mut start, mut size) = (block.memory.addr().get(), size);
                    live.insert(start, block);
                    let times = if what & 8 == 0 { 1 } else { 1 + (what >> 4) % 6 };
                    for _ in 0..times {
                        let Some(block) = live.remove(&start) else { break };
                        if what & 8 != 0 {
                            size = (block.layout.size() * 5 / 4 + 1).min(MOST_GROWN);
                        }
                        start = resize(heap, &mut live, block, size, step as u8);
                    }
                }
            }
            _ => {
                if let Some(block) = choose(&mut live, number) {
                    free(heap, block);
                }
            }
        }
    }
    live.into_values().for_each(|block| free(heap, block));
}

/// Resizes a block that is taken out of the map, and puts it back. Returns its address.
fn resize(heap: &impl Calls, live: &mut BTreeMap<usize, Block>, mut block: Block, size: usize, fill: u8) -> usize {
    let old = block.layout.size();
    block.verify(old);
    // SAFETY: the block is out of the map; it is resized, or stays as it was.
    match unsafe { heap.resize(block.memory, block.layout, size) } {
        Some(memory) => {
            block.memory = memory;
            block.layout = Layout::from_size_align(size, block.layout.align()).expect("a layout");
            block.verify(old.min(size));
            enter(live, memory, block.layout, false, fill);
            memory.addr().get()
        }
        None => {
            block.verify(old);
            let start = block.memory.addr().get();
            live.insert(start, block);
            start
        }
    }
}

fn enter(live: &mut BTreeMap<usize, Block>, memory: NonNull<u8>, layout: Layout, zeroed: bool, fill: u8) {
    let start = memory.addr().get();
    assert_eq!(start % layout.align(), 0, "{layout:?} at {start:#x}");
    let before = live.range(..start + layout.size()).next_back();
    let end = before.map_or(0, |(at, block)| at + block.layout.size());
    assert!(end <= start, "{layout:?} at {start:#x} overlaps a block up to {end:#x}");
    if zeroed {
        // SAFETY: allocated as zeroed, so every byte is one.
        let bytes = unsafe { std::slice::from_raw_parts(memory.as_ptr(), layout.size()) };
        assert_eq!(first_other(bytes, 0), None, "{layout:?} at {start:#x} is not zero");
    }
    // SAFETY: ours, of that size.
    unsafe { memory.write_bytes(fill, layout.size()) };
    live.insert(start, Block { memory, layout, fill });
}

/// Takes out the block that `number` picks.
fn choose(live: &mut BTreeMap<usize, Block>, number: usize) -> Option<Block> {
    let &start = live.keys().nth(number % live.len().max(1))?;
    live.remove(&start)
}

fn free(heap: &impl Calls, mut block: Block) {
    block.verify(block.layout.size());
    // SAFETY: allocated with this layout, and out of the map.
    unsafe { heap.free(block.memory, block.layout) };
}
