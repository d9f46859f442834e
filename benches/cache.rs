//! The heap through caches, by the number of threads, each with a cache of its own.
//!
//! `cargo bench --bench cache`. The result is the wall time of the slowest thread over the operations of one thread: a
//! flat curve means that threads do not slow each other down, as long as each has a processor.

#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod support;

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use pageheap::{Cache, PageCount, PageHeap, PageRun};
use support::{Bare, clock, heap, run, timed};

/// Pages that a thread takes in one round.
const PAGES: usize = 1 << 15;

fn one_thread(criterion: &mut Criterion) {
    let heap = heap(1 << 33);
    let cache = heap.cache().expect("a slot");
    let pages = heap.capacity().0;
    criterion.bench_function("cache/allocate-1", |bench| {
        bench.iter_custom(|rounds| {
            timed(rounds, pages, || {
                let time = clock(|| (0..pages).for_each(|_| _ = black_box(cache.allocate(PageCount(1)))));
                support::free(&heap, run(0, pages));
                time
            })
        });
    });
    criterion.bench_function("cache/free-1-clustered", |bench| {
        bench.iter_custom(|rounds| {
            timed(rounds, pages, || {
                cache.flush();
                support::take_all(&heap);
                // SAFETY: every page is allocated, and has no memory behind it.
                clock(|| (0..pages).for_each(|page| unsafe { cache.free(run(page, 1)) }))
            })
        });
    });
    cache.flush();
    criterion.bench_function("cache/pair", |bench| {
        bench.iter(|| {
            let page = cache.allocate(PageCount(1)).expect("room");
            // SAFETY: just allocated.
            unsafe { cache.free(page) };
        });
    });
    criterion.bench_function("cache/pair-4-pages", |bench| {
        bench.iter(|| {
            let page = cache.allocate(PageCount(4)).expect("room");
            // SAFETY: just allocated.
            unsafe { cache.free(page) };
        });
    });
    criterion.bench_function("shard/pair", |bench| {
        let source = pageheap::source::Split::new(
            pageheap::source::Numbers::new(1 << 45, 1 << 31),
            pageheap::source::System,
        );
        let heap = PageHeap::new(source, pageheap::Config::new(1 << 30).shards(4)).expect("tables");
        bench.iter(|| {
            let page = heap.allocate_on(1, PageCount(1)).expect("room");
            // SAFETY: just allocated.
            unsafe { heap.free_on(1, page) };
        });
    });
}

/// Runs `work` on `threads` threads at once, each with a list that is kept from round to round; once beforehand, so
/// that the measured rounds meet no page fault. Returns the time of the slowest thread.
fn on_threads(
    heap: &PageHeap<Bare>,
    threads: usize,
    rounds: u64,
    work: impl Fn(&Cache<'_, Bare>, &mut Vec<PageRun>) + Sync,
) -> Duration {
    let barrier = Barrier::new(threads);
    let times = std::thread::scope(|scope| {
        let (barrier, work) = (&barrier, &work);
        let spawned: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(move || {
                    let (cache, mut held) = (heap.cache().expect("a slot"), Vec::new());
                    work(&cache, &mut held);
                    barrier.wait();
                    let start = Instant::now();
                    (0..rounds).for_each(|_| work(&cache, &mut held));
                    start.elapsed()
                })
            })
            .collect();
        spawned.into_iter().map(|thread| thread.join().expect("no panic")).max()
    });
    times.unwrap_or_default()
}

fn threads(criterion: &mut Criterion) {
    let heap = heap(1 << 35);
    for threads in [1, 2, 4, 8, 16, 32, 64] {
        criterion.bench_function(&format!("threads/bulk-allocate-and-free/{threads}"), |bench| {
            bench.iter_custom(|rounds| {
                let blocks = rounds.div_ceil(PAGES as u64);
                let time = on_threads(&heap, threads, blocks, |cache, held| {
                    held.extend((0..PAGES).map(|_| cache.allocate(PageCount(1)).expect("room")));
                    // SAFETY: just allocated, with no memory behind them.
                    held.drain(..).for_each(|page| unsafe { cache.free(page) });
                });
                time.mul_f64(rounds as f64 / (blocks * PAGES as u64) as f64)
            });
        });
        criterion.bench_function(&format!("threads/no-cache-pair/{threads}"), |bench| {
            bench.iter_custom(|rounds| {
                on_threads(&heap, threads, rounds, |_, _| {
                    support::free(&heap, heap.allocate(PageCount(1)).expect("room"))
                })
            });
        });
    }
}

criterion_group!(benches, one_thread, threads);
criterion_main!(benches);
