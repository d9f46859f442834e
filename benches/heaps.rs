//! Heaps as values: an allocation and its free in a `Heap` that one thread uses, in one that several have used, in a
//! `GlobalHeap`, and in the system's allocator.
//!
//! `cargo bench --bench heaps`. All do the same work. What a `Heap` takes more than a `GlobalHeap` is the price of
//! checking that a block is its own, and of the lock once there are several threads.

#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

use std::alloc::{GlobalAlloc, Layout, System as Malloc};
use std::hint::black_box;
use std::ptr::NonNull;
use std::thread;

use criterion::{Criterion, criterion_group, criterion_main};
use pageheap::source::System;
use pageheap::{Config, GlobalHeap, Heap};

static GLOBAL: GlobalHeap = GlobalHeap::new().reserve(1 << 30).background(false);

fn heap() -> Heap<System> {
    Heap::new(System, Config::new(1 << 30)).expect("addresses")
}

/// Allocates and frees one block.
fn pair(heap: &Heap<System>, layout: Layout) {
    let block = heap.allocate(black_box(layout)).expect("memory");
    // SAFETY: allocated above with this layout, and not used.
    unsafe { heap.free(black_box(block), layout) };
}

/// The same with an allocator for whole programs.
fn global_pair(allocator: &impl GlobalAlloc, layout: Layout) {
    // SAFETY: not of zero bytes; freed with the layout it was allocated with.
    unsafe {
        let block = allocator.alloc(black_box(layout));
        let block = black_box(NonNull::new(block).expect("memory"));
        allocator.dealloc(block.as_ptr(), layout);
    }
}

/// After 100,000 pairs another thread does this, twenty times.
fn in_between(heap: &Heap<System>, layout: Layout, work: impl Fn() + Sync) {
    for _ in 0..20 {
        (0..100_000).for_each(|_| pair(heap, layout));
        thread::scope(|scope| _ = scope.spawn(&work));
    }
}

fn pairs(criterion: &mut Criterion) {
    for (name, size) in [("64B", 64), ("4KiB", 4096), ("64KiB", 1 << 16)] {
        let layout = Layout::from_size_align(size, 8).expect("a layout");
        let [alone, released, used] = [(); 3].map(|()| heap());
        // What a scavenger's thread does.
        in_between(&released, layout, || _ = released.release(usize::MAX));
        in_between(&used, layout, || pair(&used, layout));
        // By processors, so threads that meet do not part; often enough that none is thought to be alone any more.
        let config = Config::new(1 << 30).processors(2, || 0);
        let shared = Heap::new(System, config).expect("addresses");
        in_between(&shared, layout, || pair(&shared, layout));
        let mut group = criterion.benchmark_group(format!("pair-{name}"));
        for (name, heap) in [
            ("heap-of-one-thread", &alone),
            ("heap-released-by-another", &released),
            ("heap-used-by-another", &used),
            ("heap-with-lock", &shared),
        ] {
            group.bench_function(name, |bench| bench.iter(|| pair(heap, layout)));
        }
        group.bench_function("global-heap", |bench| bench.iter(|| global_pair(&GLOBAL, layout)));
        group.bench_function("system", |bench| bench.iter(|| global_pair(&Malloc, layout)));
        group.finish();
    }
}

/// Several threads on one heap: the time of a pair in each of them. A flat line would be perfect, as far as there are
/// processors.
fn threads(criterion: &mut Criterion) {
    const PAIRS: u64 = 1000;
    let layout = Layout::new::<[u64; 8]>();
    let mut group = criterion.benchmark_group("pair-64B-threads");
    for threads in [1, 2, 4, 8] {
        let heap = heap();
        let measure = |rounds: u64, work: &(dyn Fn() + Sync)| {
            let begin = std::time::Instant::now();
            thread::scope(|scope| {
                (0..threads).for_each(|_| _ = scope.spawn(|| (0..rounds * PAIRS).for_each(|_| work())));
            });
            begin.elapsed() / PAIRS as u32
        };
        let name = |what: &str| format!("{what}/{threads}");
        group.bench_function(name("one-heap"), |bench| {
            bench.iter_custom(|rounds| measure(rounds, &|| pair(&heap, layout)));
        });
        group.bench_function(name("global-heap"), |bench| {
            bench.iter_custom(|rounds| measure(rounds, &|| global_pair(&GLOBAL, layout)));
        });
        group.bench_function(name("system"), |bench| {
            bench.iter_custom(|rounds| measure(rounds, &|| global_pair(&Malloc, layout)));
        });
    }
    group.finish();
}

fn lives(criterion: &mut Criterion) {
    let layout = Layout::new::<[u64; 8]>();
    criterion.bench_function("made-used-100-times-and-dropped", |bench| {
        bench.iter(|| {
            let heap = heap();
            (0..100).for_each(|_| _ = black_box(heap.allocate(layout)));
        });
    });
}

criterion_group!(benches, pairs, threads, lives);
criterion_main!(benches);
