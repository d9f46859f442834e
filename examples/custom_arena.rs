//! A custom arena on the raw page heap, and its benchmark: a stack of bytes that is freed in reverse order.
//!
//! ```sh
//! cargo run --release --example custom_arena
//! ```
//!
//! The heap provides runs of pages, extends a run in place, refuses at the limit, and takes everything back. What is
//! left to write is the arithmetic, between the two lines below.

use std::cell::Cell;
use std::hint::black_box;
use std::ptr::NonNull;
use std::time::Instant;

use pageheap::source::System;
use pageheap::{Config, PageCount, PageHeap, PageRun};

// ---- 8< ----

/// Memory that is freed in the reverse order of its allocation, in a run that grows in place or not at all. Not
/// `Sync`: memory taken during `work` is given back before `work` returns.
struct Stack<'h> {
    heap: &'h PageHeap<System>,
    run: Cell<PageRun>,
    top: Cell<usize>,
}

impl<'h> Stack<'h> {
    fn new(heap: &'h PageHeap<System>) -> Option<Self> {
        let run = Cell::new(heap.allocate(PageCount(1))?);
        let top = Cell::new(0);
        Some(Self { heap, run, top })
    }

    /// Lends `bytes` zeroes to `work`, which may take more of the stack; frees them when it returns. `None` if there
    /// are none.
    fn with<R>(&self, bytes: usize, work: impl FnOnce(&mut [u8]) -> R) -> Option<R> {
        let (start, end) = (self.top.get(), self.top.get().checked_add(bytes)?);
        if end > self.heap.pointer(self.run.get()).len() {
            self.grow(end)?;
        }
        self.top.set(end);
        let memory = self.heap.address(self.run.get().start());
        // SAFETY: inside the run, which is ours, stays in place while we are borrowed, and is written to here first.
        // Nobody else has bytes between start and end: code that takes some before `work` has returned is called by
        // `work`, begins at the end, and takes the top back to there. (If it unwinds, those bytes stay taken until we
        // are dropped.)
        let memory = unsafe {
            let memory = memory.add(start);
            memory.write_bytes(0, bytes);
            NonNull::slice_from_raw_parts(memory, bytes).as_mut()
        };
        let result = work(memory);
        self.top.set(start);
        Some(result)
    }

    #[cold]
    fn grow(&self, bytes: usize) -> Option<()> {
        let (run, least) = (self.run.get(), bytes.div_ceil(self.heap.page_bytes()));
        let wish = PageCount(least.max(run.pages().0 * 2));
        let grown = self.heap.grow_in_place(run, wish);
        let (grown, _) = grown.or_else(|| self.heap.grow_in_place(run, PageCount(least)))?;
        self.run.set(grown);
        Some(())
    }
}

impl Drop for Stack<'_> {
    fn drop(&mut self) {
        // SAFETY: the run is ours, and what was in it ended with the closures, which borrowed us.
        unsafe { self.heap.free(self.run.get()) };
    }
}

// ---- 8< ----

/// Walks a tree of `level` levels, with scratch memory at each node.
fn walk(stack: &Stack<'_>, level: usize) -> Option<usize> {
    stack.with(64 << level, |scratch| {
        scratch[0] = level as u8;
        let below = if level == 0 {
            0
        } else {
            walk(stack, level - 1)? + walk(stack, level - 1)?
        };
        Some(below + usize::from(black_box(scratch)[0] == level as u8))
    })?
}

fn walk_boxed(level: usize) -> usize {
    let mut scratch = vec![0_u8; 64 << level].into_boxed_slice();
    scratch[0] = level as u8;
    let below = if level == 0 {
        0
    } else {
        walk_boxed(level - 1) + walk_boxed(level - 1)
    };
    below + usize::from(black_box(&mut scratch)[0] == level as u8)
}

fn main() {
    let heap = PageHeap::new(System, Config::new(16 << 20)).expect("address space");
    let stack = Stack::new(&heap).expect("a page");
    const LEVELS: usize = 12;
    let nodes = (1 << (LEVELS + 1)) - 1;
    let rounds = 200;
    let begin = Instant::now();
    for _ in 0..rounds {
        assert_eq!(walk(&stack, LEVELS), Some(nodes));
    }
    let stacked = begin.elapsed();
    let begin = Instant::now();
    for _ in 0..rounds {
        assert_eq!(walk_boxed(LEVELS), nodes);
    }
    let boxed = begin.elapsed();
    let each = |time: std::time::Duration| time.as_nanos() as f64 / (rounds * nodes) as f64;
    println!("scratch memory at {nodes} nodes of a tree, {rounds} rounds");
    println!(
        "  Stack       {:>8.1} ns a node, {} in use",
        each(stacked),
        heap.stats().in_use
    );
    println!("  Box<[u8]>   {:>8.1} ns a node (zeroed)", each(boxed));
    assert!(stack.with(1 << 30, |_| ()).is_none(), "beyond the heap");
    drop(stack);
    println!("  afterwards  {} in use", heap.stats().in_use);
}
