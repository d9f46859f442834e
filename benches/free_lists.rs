//! Free lists beside other allocators of equal objects: `slab`, `sharded-slab`, `Box`; and retirement beside `seize`.
//!
//! `cargo bench --bench free_lists`. Each result is for one allocation and one free, unless it says otherwise.
//! `two-threads` is the time of one thread while another does the same, or reads what is retired.

#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

use std::alloc::Layout;
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use pageheap::arena::{ArenaConfig, FreeList, Owner, ShardedFreeList};

/// A vector of 1536 floats, as in the document.
type Vector = [f32; 1536];

const CONFIG: ArenaConfig = ArenaConfig::new().limit(64 << 20);

fn list(layout: Layout) -> FreeList {
    FreeList::with_config(layout, CONFIG).expect("a list")
}

fn sharded(layout: Layout) -> ShardedFreeList {
    ShardedFreeList::with_config(layout, 8, CONFIG).expect("a list")
}

fn raw_pairs(criterion: &mut Criterion, name: &str, layout: Layout) {
    let mut list = list(layout);
    criterion.bench_function(&format!("free_list/{name}/shared"), |bench| {
        bench.iter(|| {
            let slot = black_box(list.allocate().expect("room"));
            // SAFETY: just allocated.
            unsafe { list.deallocate(slot.cast()) };
        });
    });
    criterion.bench_function(&format!("free_list/{name}/mut"), |bench| {
        bench.iter(|| {
            let slot = black_box(list.allocate_mut().expect("room"));
            // SAFETY: just allocated.
            unsafe { list.deallocate_mut(slot.cast()) };
        });
    });
    // Eight at a time: all but one go through the stack, not the pocket.
    let mut held: [Option<NonNull<u8>>; 8] = [None; 8];
    criterion.bench_function(&format!("free_list/{name}/shared-eight-pairs"), |bench| {
        bench.iter(|| {
            for place in &mut held {
                *place = Some(black_box(list.allocate().expect("room").cast()));
            }
            for slot in held.iter().rev().flatten() {
                // SAFETY: just allocated.
                unsafe { list.deallocate(*slot) };
            }
        });
    });
    let sharded = sharded(layout);
    let owner = sharded.owner().expect("a shard");
    criterion.bench_function(&format!("sharded/{name}/owner"), |bench| {
        bench.iter(|| {
            let slot = black_box(owner.allocate().expect("room"));
            // SAFETY: just allocated.
            unsafe { owner.deallocate(slot.cast()) };
        });
    });
    // Eight at a time: all but one go through the shard's batches, not its pocket.
    criterion.bench_function(&format!("sharded/{name}/owner-eight-pairs"), |bench| {
        bench.iter(|| {
            for place in &mut held {
                *place = Some(black_box(owner.allocate().expect("room").cast()));
            }
            for slot in held.iter().rev().flatten() {
                // SAFETY: just allocated.
                unsafe { owner.deallocate(*slot) };
            }
        });
    });
    criterion.bench_function(&format!("sharded/{name}/guest"), |bench| {
        bench.iter(|| {
            let slot = black_box(sharded.allocate().expect("room"));
            // SAFETY: just allocated.
            unsafe { sharded.deallocate(slot.cast()) };
        });
    });
    criterion.bench_function(&format!("rivals/{name}/malloc"), |bench| {
        bench.iter(|| {
            // SAFETY: the layout has bytes; freed once.
            unsafe { std::alloc::dealloc(black_box(std::alloc::alloc(layout)), layout) };
        });
    });
}

fn pairs(criterion: &mut Criterion) {
    raw_pairs(criterion, "64-bytes", Layout::from_size_align(64, 8).expect("a layout"));
    raw_pairs(criterion, "vector", Layout::new::<Vector>());
}

/// A value of 64 bytes is inserted and removed.
fn values(criterion: &mut Criterion) {
    let layout = Layout::new::<[u64; 8]>();
    let (list, sharded) = (list(layout), sharded(layout));
    let owner = sharded.owner().expect("a shard");
    criterion.bench_function("values/free_list", |bench| {
        bench.iter(|| black_box(list.boxed([7_u64; 8]).expect("room")));
    });
    criterion.bench_function("values/sharded", |bench| {
        bench.iter(|| black_box(owner.boxed([7_u64; 8]).expect("room")));
    });
    criterion.bench_function("values/Box", |bench| {
        bench.iter(|| black_box(Box::new([7_u64; 8])));
    });
    let mut slab = slab::Slab::with_capacity(16);
    criterion.bench_function("values/slab", |bench| {
        bench.iter(|| {
            let key = black_box(slab.insert([7_u64; 8]));
            slab.remove(key)
        });
    });
    let shards = sharded_slab::Slab::new();
    criterion.bench_function("values/sharded-slab", |bench| {
        bench.iter(|| {
            let key = black_box(shards.insert([7_u64; 8]).expect("room"));
            shards.remove(key)
        });
    });
}

/// 1000 slots taken, then all given back: the time per slot.
fn bulk(criterion: &mut Criterion) {
    const COUNT: usize = 1000;
    let layout = Layout::from_size_align(64, 8).expect("a layout");
    let (list, sharded) = (list(layout), sharded(layout));
    let owner = sharded.owner().expect("a shard");
    let mut held = [None; COUNT];
    let each = |rounds: u64, mut work: Box<dyn FnMut() + '_>| {
        let began = Instant::now();
        (0..rounds.div_ceil(COUNT as u64)).for_each(|_| work());
        began
            .elapsed()
            .mul_f64(rounds as f64 / (rounds.div_ceil(COUNT as u64) * COUNT as u64) as f64)
    };
    criterion.bench_function("bulk/free_list/batches-of-64", |bench| {
        bench.iter_custom(|rounds| {
            each(
                rounds,
                Box::new(|| {
                    held.chunks_mut(64).for_each(|batch| _ = list.allocate_batch(batch));
                    for batch in held.chunks_mut(64) {
                        // SAFETY: just allocated.
                        _ = unsafe { list.deallocate_batch(batch) };
                    }
                }),
            )
        });
    });
    criterion.bench_function("bulk/sharded/owner", |bench| {
        bench.iter_custom(|rounds| {
            each(
                rounds,
                Box::new(|| {
                    _ = owner.allocate_batch(&mut held);
                    // SAFETY: just allocated.
                    _ = unsafe { owner.deallocate_batch(&mut held) };
                }),
            )
        });
    });
    let mut boxes: Vec<Box<[u64; 8]>> = Vec::with_capacity(COUNT);
    criterion.bench_function("bulk/Box", |bench| {
        bench.iter_custom(|rounds| {
            each(
                rounds,
                Box::new(|| {
                    (0..COUNT).for_each(|_| boxes.push(Box::new([0; 8])));
                    boxes.clear();
                }),
            )
        });
    });
}

/// What a writer does: it publishes a new value and retires the old one.
fn exchange(owner: &Owner<'_>, place: &AtomicPtr<[u64; 8]>) {
    // There is none if a reader sleeps inside for long.
    let new = loop {
        match owner.allocate() {
            Ok(slot) => break slot.cast::<[u64; 8]>(),
            Err(_) => std::thread::yield_now(),
        }
    };
    // SAFETY: just allocated; what is unreachable is retired.
    unsafe {
        new.write([7; 8]);
        let old = place.swap(new.as_ptr(), Ordering::AcqRel);
        if let Some(old) = NonNull::new(old) {
            owner.retire(old.cast());
        }
    }
}

fn retirement(criterion: &mut Criterion) {
    let sharded = sharded(Layout::new::<[u64; 8]>());
    let owner = sharded.owner().expect("a shard");
    let place = AtomicPtr::new(std::ptr::null_mut());
    criterion.bench_function("retire/sharded/with-guard", |bench| {
        bench.iter(|| {
            let _guard = owner.enter();
            exchange(&owner, &place);
        });
    });
    criterion.bench_function("retire/sharded/protected", |bench| {
        bench.iter(|| {
            let guard = owner.enter();
            black_box(guard.protect(|| place.load(Ordering::Acquire)));
            exchange(&owner, &place);
        });
    });
    criterion.bench_function("retire/sharded/without", |bench| {
        bench.iter(|| exchange(&owner, &place))
    });
    criterion.bench_function("retire/sharded/guard-alone", |bench| {
        bench.iter(|| black_box(owner.enter()))
    });

    use seize::{Collector, Guard};
    let collector = Collector::new();
    let place: AtomicPtr<[u64; 8]> = AtomicPtr::new(Box::into_raw(Box::new([7; 8])));
    criterion.bench_function("retire/seize/with-guard", |bench| {
        bench.iter(|| {
            let guard = collector.enter();
            let new = Box::into_raw(Box::new([7_u64; 8]));
            let old = guard.swap(&place, new, Ordering::AcqRel);
            // SAFETY: unreachable, and from a box.
            unsafe { guard.defer_retire(old, seize::reclaim::boxed) };
        });
    });
    criterion.bench_function("retire/seize/protected", |bench| {
        bench.iter(|| {
            let guard = collector.enter();
            black_box(guard.protect(&place, Ordering::Acquire));
            let new = Box::into_raw(Box::new([7_u64; 8]));
            let old = guard.swap(&place, new, Ordering::AcqRel);
            // SAFETY: unreachable, and from a box.
            unsafe { guard.defer_retire(old, seize::reclaim::boxed) };
        });
    });
    criterion.bench_function("retire/seize/guard-alone", |bench| {
        bench.iter(|| black_box(collector.enter()))
    });
}

/// Runs `neighbour` on another thread, which is told when to end, while `work` is done.
fn beside(neighbour: impl FnOnce(&AtomicBool) + Send, work: impl FnOnce()) {
    struct End<'e>(&'e AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| neighbour(&end));
        // Also if the work panics.
        let _end = End(&end);
        work();
    });
}

/// Runs the same work on two threads.
fn both(criterion: &mut Criterion, name: &str, work: impl Fn() + Sync) {
    let each = |end: &AtomicBool| {
        while !end.load(Ordering::Relaxed) {
            (0..100).for_each(|_| work());
        }
    };
    beside(each, || {
        criterion.bench_function(&format!("two-threads/{name}"), |bench| bench.iter(&work));
    });
}

fn owner_pair(owner: &Owner<'_>) {
    let slot = black_box(owner.allocate().expect("room"));
    // SAFETY: just allocated.
    unsafe { owner.deallocate(slot.cast()) };
}

fn two_threads(criterion: &mut Criterion) {
    let layout = Layout::new::<[u64; 8]>();
    let (list, sharded) = (list(layout), sharded(layout));
    let each = |end: &AtomicBool| {
        let owner = sharded.owner().expect("a shard");
        while !end.load(Ordering::Relaxed) {
            (0..100).for_each(|_| owner_pair(&owner));
        }
    };
    beside(each, || {
        let owner = sharded.owner().expect("a shard");
        criterion.bench_function("two-threads/sharded/owner", |bench| bench.iter(|| owner_pair(&owner)));
    });
    both(criterion, "sharded/guest", || {
        let slot = black_box(sharded.allocate().expect("room"));
        // SAFETY: just allocated.
        unsafe { sharded.deallocate(slot.cast()) };
    });
    both(criterion, "free_list", || {
        let slot = black_box(list.allocate().expect("room"));
        // SAFETY: just allocated.
        unsafe { list.deallocate(slot.cast()) };
    });
    let shards = sharded_slab::Slab::new();
    both(criterion, "sharded-slab", || {
        let key = black_box(shards.insert([7_u64; 8]).expect("room"));
        shards.remove(key);
    });
    both(criterion, "Box", || drop(black_box(Box::new([7_u64; 8]))));
}

/// A value is published and the old one retired, while another thread reads it.
fn retirement_beside_a_reader(criterion: &mut Criterion) {
    let sharded = sharded(Layout::new::<[u64; 8]>());
    let owner = sharded.owner().expect("a shard");
    let place = AtomicPtr::new(std::ptr::null_mut());
    exchange(&owner, &place);
    let reader = |end: &AtomicBool| {
        let owner = sharded.owner().expect("a shard");
        while !end.load(Ordering::Relaxed) {
            let guard = owner.enter();
            let found = guard.protect(|| place.load(Ordering::Acquire));
            // SAFETY: protected, as long as the guard lives.
            black_box(unsafe { found.read() });
        }
    };
    beside(reader, || {
        criterion.bench_function("two-threads/retire/sharded", |bench| {
            bench.iter(|| {
                let _guard = owner.enter();
                exchange(&owner, &place);
            });
        });
    });

    use seize::{Collector, Guard};
    let collector = Collector::new();
    let place: AtomicPtr<[u64; 8]> = AtomicPtr::new(Box::into_raw(Box::new([7; 8])));
    let reader = |end: &AtomicBool| {
        while !end.load(Ordering::Relaxed) {
            let guard = collector.enter();
            let found = guard.protect(&place, Ordering::Acquire);
            // SAFETY: protected, as long as the guard lives.
            black_box(unsafe { found.read() });
        }
    };
    beside(reader, || {
        criterion.bench_function("two-threads/retire/seize", |bench| {
            bench.iter(|| {
                let guard = collector.enter();
                let new = Box::into_raw(Box::new([7_u64; 8]));
                let old = guard.swap(&place, new, Ordering::AcqRel);
                // SAFETY: out of reach, from a box.
                unsafe { guard.defer_retire(old, seize::reclaim::boxed) };
            });
        });
    });
}

criterion_group!(
    benches,
    pairs,
    values,
    bulk,
    retirement,
    two_threads,
    retirement_beside_a_reader
);
criterion_main!(benches);
