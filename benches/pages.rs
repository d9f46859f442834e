//! The heap without a cache: single pages, runs, refusals, by the size and the fullness of the heap.
//!
//! `cargo bench --bench pages`. Heaps are of bare numbers, so sizes up to 1 TiB cost only their tables (34 MiB).

#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod support;

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use pageheap::internals::Word;
use pageheap::{PageCount, PageRun};
use support::{PAGE, Random, clock, empty, fragment, free, heap, run, take_all, timed};

const SIZES: [(&str, usize); 6] = [
    ("64MiB", 1 << 26),
    ("1GiB", 1 << 30),
    ("8GiB", 1 << 33),
    ("64GiB", 1 << 36),
    ("128GiB", 1 << 37),
    ("1TiB", 1 << 40),
];

/// The most pages that one round works on.
const MOST: usize = 1 << 18;

/// One page after another until the heap is exhausted, at the end of heaps of every size; then the cost of a refusal.
fn one_page(criterion: &mut Criterion) {
    for (name, bytes) in SIZES {
        let heap = heap(bytes);
        let pages = heap.capacity().0;
        let count = pages.min(MOST);
        let last = run(pages - count, count);
        if pages > count {
            heap.allocate(PageCount(pages - count)).expect("room");
        }

        criterion.bench_function(&format!("allocate-1/until-exhausted/{name}"), |bench| {
            bench.iter_custom(|rounds| {
                timed(rounds, count, || {
                    let time = clock(|| {
                        while let Some(page) = heap.allocate(PageCount(1)) {
                            black_box(page);
                        }
                    });
                    free(&heap, last);
                    time
                })
            });
        });
        take_all(&heap);
        criterion.bench_function(&format!("refusal/{name}"), |bench| {
            bench.iter(|| heap.allocate(PageCount(1)));
        });
        criterion.bench_function(&format!("refill/{name}"), |bench| {
            bench.iter_custom(|rounds| {
                take_all(&heap);
                free(&heap, last);
                timed(rounds, count / 64, || {
                    let time = clock(|| {
                        while let Some(word) = heap.free_set().claim_word() {
                            black_box(word);
                        }
                    });
                    free(&heap, last);
                    time
                })
            });
        });
    }
}

/// A random page freed in a heap of 8 GiB that is in use except for what was freed before; and whole words.
fn free_random(criterion: &mut Criterion) {
    let heap = heap(1 << 33);
    let mut order: Vec<usize> = (0..heap.capacity().0).collect();
    Random::new().shuffle(&mut order);
    for (name, range) in [("all", 0..order.len()), ("first-tenth", 0..order.len() / 10)] {
        criterion.bench_function(&format!("free-1/random/{name}"), |bench| {
            bench.iter_custom(|rounds| {
                timed(rounds, range.len(), || {
                    take_all(&heap);
                    clock(|| order[range.clone()].iter().for_each(|&page| free(&heap, run(page, 1))))
                })
            });
        });
    }
    let mut words: Vec<usize> = (0..heap.capacity().0 / 64).collect();
    Random::new().shuffle(&mut words);
    criterion.bench_function("flush-word/random", |bench| {
        bench.iter_custom(|rounds| {
            timed(rounds, words.len(), || {
                take_all(&heap);
                clock(|| words.iter().for_each(|&word| free(&heap, run(word * 64, 64))))
            })
        });
    });
    criterion.bench_function("flush-word/refilled-before", |bench| {
        bench.iter_custom(|rounds| {
            empty(&heap);
            timed(rounds, words.len(), || {
                let mut held: Vec<Word> = std::iter::from_fn(|| heap.free_set().claim_word()).collect();
                Random::new().shuffle(&mut held);
                clock(|| {
                    held.iter()
                        .for_each(|&word| heap.free_set().release_word(word).expect("held"))
                })
            })
        });
    });
}

/// Runs in a fragmented heap of 1 GiB: each allocation follows a free elsewhere, so the fragmentation stays constant.
fn runs(criterion: &mut Criterion) {
    for in_use in [50, 75, 95] {
        for (name, least, most) in [
            ("2", 2, 2),
            ("4", 4, 4),
            ("8", 8, 8),
            ("16", 16, 16),
            ("32", 32, 32),
            ("64", 64, 64),
            ("2..=16", 2, 16),
            ("2..=64", 2, 64),
        ] {
            let heap = heap(1 << 30);
            fragment(&heap, (100 - in_use) as f64 / 100.0);
            let mut random = Random::new();
            let mut live: Vec<PageRun> = Vec::new();
            let target = heap.capacity().0 / 64;
            while live.len() < target {
                let Some(run) = heap.allocate(PageCount(least + random.below(most - least + 1))) else {
                    break;
                };
                live.push(run);
            }
            if live.len() < 64 {
                continue;
            }
            // Half of them go, at random: room for the next, wherever it happens to be.
            random.shuffle(&mut live);
            let keep = live.len() / 2;
            live.drain(keep..).for_each(|run| free(&heap, run));
            let id = format!("allocate-run/in-use-{in_use}%/{name}");
            criterion.bench_function(&id, |bench| {
                bench.iter_custom(|rounds| {
                    const BATCH: usize = 64;
                    timed(rounds, BATCH, || {
                        random.shuffle(&mut live[..]);
                        let sizes: [usize; BATCH] = core::array::from_fn(|_| least + random.below(most - least + 1));
                        for run in live.drain(live.len() - BATCH.min(live.len())..) {
                            free(&heap, run);
                        }
                        clock(|| {
                            sizes
                                .iter()
                                .for_each(|&size| live.extend(heap.allocate(PageCount(size))))
                        })
                    })
                });
            });
        }
    }
}

/// One page at a time in a heap of 8 GiB, a random part of which is in use, until nothing is left.
fn fullness(criterion: &mut Criterion) {
    let heap = heap(1 << 33);
    let pages = heap.capacity().0;
    for (name, per_mille) in [("50%", 500), ("95%", 50), ("99.9%", 1)] {
        let mut random = Random::new();
        let holes: Vec<usize> = (0..pages).filter(|_| random.below(1000) < per_mille).collect();
        criterion.bench_function(&format!("allocate-1/in-use/{name}"), |bench| {
            bench.iter_custom(|rounds| {
                take_all(&heap);
                timed(rounds, holes.len(), || {
                    holes.iter().for_each(|&page| free(&heap, run(page, 1)));
                    clock(|| take_all(&heap))
                })
            });
        });
    }
}

/// A huge page's worth, aligned, allocated and freed; and a batch of frees.
fn large(criterion: &mut Criterion) {
    let heap = heap(1 << 33);
    criterion.bench_function("pair/512-pages-aligned", |bench| {
        bench.iter(|| {
            let huge = heap.allocate_aligned(PageCount(512), 512 * PAGE).expect("room").run;
            free(&heap, huge);
        });
    });
    criterion.bench_function("pair/1-page", |bench| {
        bench.iter(|| free(&heap, heap.allocate(PageCount(1)).expect("room")));
    });
    criterion.bench_function("free-batch/1024-random-pages-of-1024-chunks", |bench| {
        let mut order: Vec<usize> = (0..1024).map(|index| index * 512 + index * 37 % 512).collect();
        bench.iter_custom(|rounds| {
            take_all(&heap);
            timed(rounds, order.len(), || {
                Random::new().shuffle(&mut order);
                let mut runs: Vec<PageRun> = order.iter().map(|&page| run(page, 1)).collect();
                // SAFETY: all pages of the heap are allocated, and have no memory behind them.
                let time = clock(|| unsafe { heap.free_batch(&mut runs) });
                take_all(&heap);
                time
            })
        });
    });
}

/// One more block aligned to twice its length, behind many that have left a gap each.
fn gaps(criterion: &mut Criterion) {
    for (name, pages) in [("1-to-2", 1), ("4-to-8", 4)] {
        for live in [1 << 12, 1 << 16] {
            let heap = heap(1 << 33);
            heap.allocate(PageCount(live * 2 * pages)).expect("room");
            (0..live).for_each(|block| free(&heap, run((2 * block + 1) * pages, pages)));
            criterion.bench_function(&format!("pair/aligned/{name}/behind-{live}-gaps"), |bench| {
                bench.iter(|| {
                    let block = heap
                        .allocate_aligned(PageCount(pages), 2 * pages * PAGE)
                        .expect("room")
                        .run;
                    free(&heap, block);
                });
            });
        }
    }
}

criterion_group!(benches, one_page, free_random, runs, fullness, large, gaps);
criterion_main!(benches);
