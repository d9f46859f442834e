//! `GlobalHeap` as a value, driven through `GlobalAlloc`: every layout, every way to run out of memory, many threads.
//! It is not this process's allocator, so the tests' own bookkeeping lies elsewhere.

use std::alloc::{GlobalAlloc, Layout};
use std::ops::Range;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use pageheap::GlobalHeap;
use pageheap::source::Source;

#[path = "../common/mod.rs"]
mod common;
mod buffers;
#[cfg(any(unix, windows))]
#[path = "../common/child.rs"]
mod child;
#[cfg(all(unix, feature = "checks"))]
mod commits;
mod growth;
mod layouts;
mod limits;
mod long;
#[cfg(any(unix, windows))]
mod processes;
mod random;
mod sources;
mod stray;
#[cfg(all(any(unix, windows), not(feature = "checks")))]
mod strangers;
mod threads;
#[cfg(all(any(unix, windows), not(feature = "checks")))]
mod twice;

use common::bytes::all_are;
use common::random::Random;
use common::{addresses, by_width, one_of_three};

/// A heap that reserves less than the default: this process has dozens of heaps, and its threads need stacks.
const fn new_heap() -> GlobalHeap {
    GlobalHeap::new().reserve(by_width(1 << 38, 32 << 20))
}

/// A block and the pattern written to it.
struct Block {
    memory: *mut u8,
    layout: Layout,
    seed: u8,
}

// SAFETY: a block belongs to its holder alone.
unsafe impl Send for Block {}

impl Block {
    /// A block filled from `seed`, or `None`.
    fn new<S: Source + Send + Sync>(heap: &GlobalHeap<S>, layout: Layout, seed: u8) -> Option<Self> {
        // SAFETY: no layout here has size zero.
        let memory = unsafe { heap.alloc(layout) };
        if memory.is_null() {
            return None;
        }
        assert_eq!(memory.addr() % layout.align(), 0, "{layout:?} at {memory:p}");
        let block = Self { memory, layout, seed };
        block.fill();
        Some(block)
    }

    /// Byte `index` of a block with this seed.
    fn byte(&self, index: usize) -> u8 {
        self.seed.wrapping_add((index / 61) as u8).wrapping_mul(31)
    }

    /// The bytes that are checked, in stretches of one value: all of a small block, some in each page of a large one.
    fn looked_at(size: usize) -> impl Iterator<Item = Range<usize>> {
        let (step, length) = if size <= 4096 { (61, 61) } else { (509, 1) };
        let starts = (0..size).step_by(step);
        let last = (size.saturating_sub(8)..size).map(|index| index..index + 1);
        starts.map(move |start| start..size.min(start + length)).chain(last)
    }

    fn fill(&self) {
        for stretch in Self::looked_at(self.layout.size()) {
            let byte = self.byte(stretch.start);
            // SAFETY: inside the block.
            unsafe { self.memory.add(stretch.start).write_bytes(byte, stretch.len()) };
        }
    }

    /// Fails if the first `kept` bytes of the block, which are now at `memory`, are not those that it was filled with.
    fn verify(&self, memory: *const u8, kept: usize) {
        for stretch in Self::looked_at(self.layout.size()).filter(|stretch| stretch.start < kept) {
            let end = stretch.end.min(kept);
            // SAFETY: inside the block.
            let bytes = unsafe { std::slice::from_raw_parts(memory.add(stretch.start), end - stretch.start) };
            assert!(
                all_are(bytes, self.byte(stretch.start)),
                "bytes from {} of {:?} at {memory:p}, {kept} kept: {bytes:?}",
                stretch.start,
                self.layout
            );
        }
    }

    fn free<S: Source + Send + Sync>(self, heap: &GlobalHeap<S>) {
        self.verify(self.memory, self.layout.size());
        // SAFETY: allocated with this layout.
        unsafe { heap.dealloc(self.memory, self.layout) };
    }

    /// Resizes the block to `size` bytes and says whether that worked. The contents are kept either way.
    fn resize<S: Source + Send + Sync>(&mut self, heap: &GlobalHeap<S>, size: usize) -> bool {
        let old = self.layout.size();
        // SAFETY: allocated with this layout; the size is not zero.
        let memory = unsafe { heap.realloc(self.memory, self.layout, size) };
        if memory.is_null() {
            self.verify(self.memory, old);
            return false;
        }
        let layout = Layout::from_size_align(size, self.layout.align()).unwrap();
        assert_eq!(memory.addr() % layout.align(), 0, "{layout:?} at {memory:p}");
        // The bytes that were checked before.
        self.verify(memory, old.min(size));
        *self = Self {
            memory,
            layout,
            ..*self
        };
        self.fill();
        true
    }
}

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

/// Joins threads of a scope. Joining waits for their destructors too, in which they give back what they have kept; the
/// end of a scope does not.
fn join_all(threads: Vec<ScopedJoinHandle<'_, ()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// What a heap answers that has room for what it is asked. It waits for who is off his processor with pages in hand,
/// but not for long (28 ms: `object/reclaim.rs`). So on a busy machine it may refuse after such a time, and the whole
/// run is to be repeated, but never sooner.
fn in_time<T>(ask: impl FnOnce() -> Option<T>) -> Option<T> {
    let begin = Instant::now();
    let answer = ask();
    let took = begin.elapsed();
    assert!(
        answer.is_some() || took > Duration::from_millis(20),
        "refused in {took:?}"
    );
    answer
}

/// Runs `work` on `count` threads, passing each its number, and joins them.
fn on_threads(count: usize, work: impl Fn(usize) + Sync) {
    std::thread::scope(|scope| {
        let work = &work;
        join_all((0..count).map(|number| scope.spawn(move || work(number))).collect());
    });
}

/// Fewer rounds in unoptimised builds.
const fn rounds(release: usize) -> usize {
    if cfg!(debug_assertions) { release / 10 } else { release }
}
