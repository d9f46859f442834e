//! Bits and summaries: the arithmetic below the heap, without an atomic.
//!
//! `cargo bench --bench bits`

#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod support;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pageheap::internals::{Summary, bitmap};
use support::Random;

type Chunk = [u64; 8];

/// Chunks of several kinds, 64 of each, so that branch predictors cannot learn them.
fn kinds() -> Vec<(&'static str, Vec<Chunk>)> {
    let mut random = Random::new();
    let mut word = |share: usize| (0..64).fold(0_u64, |bits, _| bits << 1 | u64::from(random.below(1000) < share));
    let mut chunks = |share: usize| {
        (0..64)
            .map(|_| core::array::from_fn(|_| word(share)))
            .collect::<Vec<Chunk>>()
    };
    let mut kinds = vec![
        ("full", chunks(0)),
        ("empty", chunks(1000)),
        ("half", chunks(500)),
        ("free-1%", chunks(10)),
    ];
    let mut random = Random::new();
    let clustered = (0..64).map(|_| {
        let mut chunk = [0; 8];
        for _ in 0..6 {
            let length = 1 + random.below(64);
            bitmap::set(&mut chunk, random.below(512 - length), length);
        }
        chunk
    });
    kinds.push(("clusters-25%", clustered.collect()));
    kinds
}

fn bits(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("summarize");
    for (name, chunks) in kinds() {
        let mut next = chunks.iter().cycle();
        group.bench_function(name, |bench| {
            bench.iter(|| bitmap::summarize(black_box(next.next().unwrap())))
        });
    }
    group.finish();

    let mut group = criterion.benchmark_group("find");
    for (name, chunks) in kinds() {
        for count in [1, 4, 16, 64, 256] {
            let mut next = chunks.iter().cycle();
            let id = BenchmarkId::new(name, count);
            group.bench_function(id, |bench| {
                bench.iter(|| bitmap::find(black_box(next.next().unwrap()), black_box(count), 0));
            });
        }
    }
    group.finish();
}

fn merging(criterion: &mut Criterion) {
    let children: Vec<Summary> = kinds()[4].1.iter().map(|chunk| bitmap::summarize(chunk)).collect();
    let mut blocks = children.chunks(8).cycle();
    criterion.bench_function("merge/8", |bench| {
        bench.iter(|| Summary::merge(black_box(blocks.next().unwrap()).iter().copied(), 9));
    });
}

criterion_group!(benches, bits, merging);
criterion_main!(benches);
