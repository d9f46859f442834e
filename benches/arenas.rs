//! Our arenas beside others.
//!
//! `cargo bench --bench arenas`. A round allocates a fixed number of objects and then resets the arena (or drops them
//! one by one, where that is the way). The result is the time per object, its share of the reset included. The memory
//! is warm after the first round: this measures arenas, not page faults.

#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

use std::hint::black_box;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, criterion_group, criterion_main};
use pageheap::arena::{Arena, ArenaConfig, Pool};

/// Objects in a round.
const OBJECTS: usize = 4096;

/// Sixteen bytes.
type Small = [u64; 2];

/// A vector of 1536 floats.
type Large = [f32; 1536];

/// Measures the time per object of rounds of `objects` objects.
fn each(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, objects: usize, mut round: impl FnMut()) {
    group.bench_function(name, |bench| {
        bench.iter_custom(|times| {
            let rounds = times.div_ceil(objects as u64);
            let start = Instant::now();
            (0..rounds).for_each(|_| round());
            start.elapsed().mul_f64(times as f64 / (rounds * objects as u64) as f64)
        });
    });
}

fn small(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("arena/16-bytes");
    // A value in registers, so that the copy is not measured.
    let value = |index: usize| -> Small { [index as u64, 2] };
    let mut bumpalo = bumpalo::Bump::new();
    each(&mut group, "bumpalo", OBJECTS, || {
        for index in 0..OBJECTS {
            black_box(bumpalo.alloc(value(index)));
        }
        bumpalo.reset();
    });
    let mut arena = Arena::new();
    each(&mut group, "Local", OBJECTS, || {
        let local = arena.local();
        for index in 0..OBJECTS {
            black_box(local.alloc(value(index)).expect("room"));
        }
        drop(local);
        arena.reset();
    });
    let arena = Arena::new();
    let mut local = arena.local();
    each(&mut group, "Scope", OBJECTS, || {
        local.scoped(|scope| {
            for index in 0..OBJECTS {
                black_box(scope.alloc(value(index)).expect("room"));
            }
        });
    });
    // As bumpalo is in any case: it is referenced from elsewhere, so it cannot be in registers.
    each(&mut group, "Scope-in-memory", OBJECTS, || {
        local.scoped(|scope| {
            let scope = black_box(&scope);
            for index in 0..OBJECTS {
                black_box(scope.alloc(value(index)).expect("room"));
            }
        });
    });
    let mut shared = Arena::new();
    each(&mut group, "Arena", OBJECTS, || {
        for index in 0..OBJECTS {
            black_box(shared.alloc(value(index)).expect("room"));
        }
        shared.reset();
    });
    let mut scope: bump_scope::Bump = bump_scope::Bump::new();
    each(&mut group, "bump-scope", OBJECTS, || {
        for index in 0..OBJECTS {
            black_box(scope.alloc(value(index)));
        }
        scope.reset();
    });
    // It cannot be reset: a new one for each round.
    each(&mut group, "typed-arena", OBJECTS, || {
        let typed = typed_arena::Arena::with_capacity(OBJECTS);
        for index in 0..OBJECTS {
            black_box(typed.alloc(value(index)));
        }
    });
    let mut boxes = Vec::with_capacity(OBJECTS);
    each(&mut group, "Box", OBJECTS, || {
        for index in 0..OBJECTS {
            boxes.push(black_box(Box::new(value(index))));
        }
        boxes.clear();
    });
    group.finish();
}

fn scopes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("arena/scope-of-4");
    let arena = Arena::new();
    let mut local = arena.local();
    each(&mut group, "Local", 1, || {
        // Without `expect` the whole `Result` would go through memory: four more stores per object.
        local.scoped(|scope| (0..4_u64).for_each(|index| _ = black_box(scope.alloc([index, 2]).expect("room"))));
    });
    let mut bump: bump_scope::Bump = bump_scope::Bump::new();
    each(&mut group, "bump-scope", 1, || {
        bump.scoped(|scope| (0..4_u64).for_each(|index| _ = black_box(scope.alloc([index, 2]))));
    });
    group.finish();
}

/// Time per object when `threads` threads allocate at once; `work` runs on each thread with its share of the objects.
fn on_threads(threads: usize, rounds: u64, work: impl Fn() + Sync) -> Duration {
    let barrier = Barrier::new(threads);
    let times = std::thread::scope(|scope| {
        let (barrier, work) = (&barrier, &work);
        let one = || {
            scope.spawn(move || {
                barrier.wait();
                let start = Instant::now();
                (0..rounds).for_each(|_| work());
                start.elapsed()
            })
        };
        let spawned: Vec<_> = (0..threads).map(|_| one()).collect();
        spawned.into_iter().map(|thread| thread.join().expect("no panic")).max()
    });
    times.unwrap_or_default()
}

/// Allocates `n` small objects on one thread.
type Allocate<'a> = &'a (dyn Fn(u64) + Sync);

/// Objects of 16 bytes from `threads` threads at once. `round` passes the allocating function to its runner, and
/// resets the arena afterwards.
fn small_on_threads(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    threads: usize,
    mut round: impl FnMut(&mut dyn FnMut(Allocate<'_>)),
) {
    // Per thread, in one measurement: it is reset before anything has to grow.
    let most = (2 << 20) / 16 / threads as u64;
    group.bench_function(BenchmarkId::new(name, threads), |bench| {
        bench.iter_custom(|times| {
            let mut left = times;
            let mut spent = Duration::ZERO;
            while left > 0 {
                let now = left.min(most);
                round(&mut |allocate| spent += on_threads(threads, 1, || allocate(now)));
                left -= now;
            }
            spent
        });
    });
}

fn threads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("arena/threads");
    let value = || black_box([1_u64, 2]);
    let mut arena = Arena::with_config(ArenaConfig::new().prealloc(8 << 20)).expect("memory");
    for threads in [1, 2, 4, 8, 16] {
        small_on_threads(&mut group, "Arena", threads, |run| {
            run(&|count| (0..count).for_each(|_| _ = black_box(arena.alloc(value()).expect("room"))));
            arena.reset();
        });
        small_on_threads(&mut group, "Local", threads, |run| {
            run(&|count| {
                let local = arena.local();
                (0..count).for_each(|_| _ = black_box(local.alloc(value()).expect("room")));
            });
            arena.reset();
        });
        // How bumpalo must be shared: it has no `&` that threads could use.
        let mut shared = Mutex::new(bumpalo::Bump::with_capacity(8 << 20));
        small_on_threads(&mut group, "Mutex<bumpalo>", threads, |run| {
            let lock = &shared;
            run(&|count| {
                (0..count).for_each(|_| _ = black_box(lock.lock().expect("no panic").alloc(value()) as *mut Small));
            });
            shared.get_mut().expect("no panic").reset();
        });
        // And what one does instead: an arena per thread, whose values go when the thread does.
        small_on_threads(&mut group, "bumpalo-each", threads, |run| {
            run(&|count| {
                let bump = bumpalo::Bump::with_capacity(count as usize * 16);
                (0..count).for_each(|_| _ = black_box(bump.alloc(value())));
            });
        });
        small_on_threads(&mut group, "Box", threads, |run| {
            run(&|count| {
                for _ in 0..count.div_ceil(1000) {
                    let boxes: Vec<Box<Small>> = (0..1000).map(|_| Box::new(value())).collect();
                    black_box(boxes);
                }
            });
        });
    }
    group.finish();
}

fn vectors(criterion: &mut Criterion) {
    const VECTORS: usize = 1024;
    let mut group = criterion.benchmark_group("pool/6-KiB");
    let mut pool = Pool::with_config(ArenaConfig::new().limit(64 << 20).prealloc(8 << 20)).expect("memory");
    each(&mut group, "Pool", VECTORS, || {
        for _ in 0..VECTORS {
            black_box(pool.alloc_uninit::<Large>().expect("room"));
        }
        pool.reset();
    });
    each(&mut group, "Pool-first-float-written", VECTORS, || {
        for _ in 0..VECTORS {
            let vector = pool.alloc_uninit_slice::<f32>(1536).expect("room");
            vector[0].write(black_box(1.0));
            black_box(vector);
        }
        pool.reset();
    });
    let mut bumpalo = bumpalo::Bump::with_capacity(8 << 20);
    each(&mut group, "bumpalo", VECTORS, || {
        for _ in 0..VECTORS {
            let layout = std::alloc::Layout::new::<Large>();
            black_box(bumpalo.alloc_layout(layout));
        }
        bumpalo.reset();
    });
    let mut boxes = Vec::with_capacity(VECTORS);
    each(&mut group, "Box", VECTORS, || {
        for _ in 0..VECTORS {
            boxes.push(black_box(Box::<Large>::new_uninit()));
        }
        boxes.clear();
    });
    group.finish();
}

fn paths(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pool/paths");
    let mut pool = Pool::with_config(ArenaConfig::new().prealloc(64 << 20)).expect("memory");
    // Half a slab each: every allocation but the first of two takes a kept slab.
    each(&mut group, "next-slab", 64, || {
        for _ in 0..64 {
            black_box(pool.alloc_uninit_slice::<u8>(500 << 10).expect("room"));
        }
        pool.reset();
    });
    each(&mut group, "large-2-MiB", 64, || {
        for _ in 0..64 {
            black_box(pool.alloc_uninit_slice::<u8>(2 << 20).expect("room"));
        }
        pool.reset();
    });
    let handle = pool.insert(17_u64).expect("room");
    group.bench_function("get", |bench| {
        bench.iter(|| *pool.get(black_box(handle)).expect("good"))
    });
    group.finish();
}

fn resets(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pool/reset");
    for slabs in [4, 16, 64, 256] {
        let config = ArenaConfig::new().slab(64 << 10).prealloc(slabs * (64 << 10));
        let mut pool = Pool::with_config(config).expect("memory");
        group.bench_function(BenchmarkId::from_parameter(slabs), |bench| {
            bench.iter_custom(|times| {
                let mut spent = Duration::ZERO;
                for _ in 0..times {
                    (0..slabs * 2).for_each(|_| _ = pool.alloc_uninit::<[u8; 32_000]>().expect("room"));
                    let start = Instant::now();
                    pool.reset();
                    spent += start.elapsed();
                }
                assert_eq!(pool.stats().slabs, slabs);
                spent
            });
        });
    }
    group.finish();
}

criterion_group!(benches, small, scopes, threads, vectors, paths, resets);
criterion_main!(benches);
