//! A store of 1536-float vectors, as in a vector database: a sharded list stores, replaces and searches them from many
//! threads, while readers hold on to what they found.
//!
//! ```sh
//! cargo run --release --example vector_storage            # 10,000 vectors, 4 threads
//! cargo run --release --example vector_storage -- 50000 8
//! ```

use std::alloc::Layout;
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use pageheap::arena::{ArenaConfig, FreeList, Guard, Owner, ShardedFreeList};

const DIMENSIONS: usize = 1536;
type Vector = [f32; DIMENSIONS];

/// A table of vectors, each of which can be replaced while it is being read. Its slots come from its list.
struct Storage<'l> {
    list: &'l ShardedFreeList,
    table: Vec<AtomicPtr<Vector>>,
}

impl<'l> Storage<'l> {
    fn new(list: &'l ShardedFreeList, vectors: usize) -> Self {
        assert_eq!(list.layout(), Layout::new::<Vector>(), "slots for vectors");
        let table = (0..vectors).map(|_| AtomicPtr::default()).collect();
        Self { list, table }
    }

    /// Stores a vector; the one before is free when its last reader has left.
    fn put(&self, owner: &Owner<'_>, key: usize, value: f32) {
        assert!(std::ptr::eq(owner.list(), self.list), "an owner of this storage");
        // There are enough slots, except for those held by preempted readers: the loop waits for these.
        let slot = loop {
            match owner.allocate() {
                Ok(slot) => break slot.cast::<Vector>(),
                Err(_) => std::thread::yield_now(),
            }
        };
        // SAFETY: a slot of our own, as long as a vector; the old one is the list's too, and is unreachable by now.
        unsafe {
            slot.write([value; DIMENSIONS]);
            if let Some(old) = NonNull::new(self.table[key].swap(slot.as_ptr(), Ordering::AcqRel)) {
                owner.retire(old.cast());
            }
        }
    }

    /// The vector of a key, for as long as the guard lives.
    fn get<'g>(&self, guard: &'g Guard<'_>, key: usize) -> Option<&'g Vector> {
        assert!(std::ptr::eq(guard.list(), self.list), "a guard of this storage");
        let found = guard.protect(|| self.table[key].load(Ordering::Acquire));
        // SAFETY: a slot of the list, protected by its guard, and not written to while it is reachable.
        unsafe { found.as_ref() }
    }

    /// The key of the vector nearest to a query, by the dot product.
    fn nearest(&self, owner: &Owner<'_>, query: &Vector) -> usize {
        let product = |vector: &Vector| vector.iter().zip(query).map(|(a, b)| a * b).sum::<f32>();
        let best = (0..self.table.len())
            .filter_map(|key| {
                let guard = owner.enter();
                Some((key, product(self.get(&guard, key)?)))
            })
            .max_by(|(_, a), (_, b)| a.total_cmp(b));
        best.map_or(0, |(key, _)| key)
    }
}

fn main() {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<usize>());
    let mut next = |default| match numbers.next() {
        None => default,
        Some(Ok(number)) if number > 0 => number,
        Some(_) => panic!("usage: vector_storage [vectors] [threads]"),
    };
    let (vectors, threads) = (next(10_000), next(4));
    let layout = Layout::new::<Vector>();
    let config = ArenaConfig::new().limit((vectors + vectors / 4 + 1000 * threads) * (layout.size() + 64));
    let list = ShardedFreeList::with_config(layout, threads, config).expect("a list");
    let storage = Storage::new(&list, vectors);

    let built = clock(|| {
        on_threads(&storage, threads, |owner, thread| {
            (thread..vectors)
                .step_by(threads)
                .for_each(|key| storage.put(owner, key, key as f32 / vectors as f32));
        });
    });
    println!("{vectors} vectors built by {threads} threads in {built:.1?}");

    let searched = clock(|| {
        on_threads(&storage, threads, |owner, thread| {
            if thread == 0 {
                // One thread replaces vectors while the others search.
                (0..vectors).for_each(|key| storage.put(owner, key, key as f32 / vectors as f32));
            } else {
                assert_eq!(storage.nearest(owner, &[1.0; DIMENSIONS]), vectors - 1);
            }
        });
    });
    println!(
        "searched by {} threads while every vector was replaced: {searched:.1?}",
        threads - 1
    );
    println!("{}\n", list.stats());
    benchmark();
}

/// Runs `work` on `threads` threads, each with a shard of its own and its number.
fn on_threads(storage: &Storage<'_>, threads: usize, work: impl Fn(&Owner<'_>, usize) + Sync) {
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let work = &work;
            scope.spawn(move || work(&storage.list.owner().expect("a shard for each"), thread));
        }
    });
}

/// The time to allocate and free one vector, the best of many rounds.
fn benchmark() {
    let layout = Layout::new::<Vector>();
    let mut list = FreeList::new(layout).expect("a list");
    let sharded = ShardedFreeList::new(layout, 1).expect("a list");
    let owner = sharded.owner().expect("a shard");
    report("ShardedFreeList, by its owner", || {
        let slot = black_box(owner.allocate().expect("room"));
        // SAFETY: just allocated.
        unsafe { owner.deallocate(slot.cast()) };
    });
    report("FreeList, by &mut", || {
        let slot = black_box(list.allocate_mut().expect("room"));
        // SAFETY: just allocated.
        unsafe { list.deallocate_mut(slot.cast()) };
    });
    report("FreeList, shared", || {
        let slot = black_box(list.allocate().expect("room"));
        // SAFETY: just allocated.
        unsafe { list.deallocate(slot.cast()) };
    });
    report("Box, not filled", || drop(black_box(Box::<Vector>::new_uninit())));
}

fn report(name: &str, mut pair: impl FnMut()) {
    const PAIRS: u32 = 10_000;
    let best = (0..100).map(|_| clock(|| (0..PAIRS).for_each(|_| pair()))).min();
    let pair = best.unwrap_or_default().as_secs_f64() * 1e9 / f64::from(PAIRS);
    println!("{name:32} {pair:6.1} ns for allocating and freeing 6 KiB");
}

fn clock(work: impl FnOnce()) -> Duration {
    let begin = Instant::now();
    work();
    begin.elapsed()
}
