//! Models for shuttle: larger programs, thousands of random schedules.
//!
//! shuttle is sequentially consistent, so these models find a wrong order of steps, not a missing fence. In return
//! they combine growth, short-lived caches, scavenging and long runs. A failing schedule is printed and can be
//! replayed (`shuttle::replay`).

mod arenas;
mod aside;
mod free_lists;
mod negative;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use pageheap::internals::{FreeSet, Request};
use pageheap::source::Simulated;
use pageheap::{Config, Geometry, PageCount, PageHeap, PageIndex, PageRun};
use shuttle::scheduler::{PctScheduler, RandomScheduler, RoundRobinScheduler, Scheduler};
use shuttle::thread::spawn;
use shuttle::{Config as ShuttleConfig, FailurePersistence, Runner};

const GRANULE: usize = 1 << 13;
const CHUNK: usize = 128;

type Shape = Geometry<2, 13, 2, 2>;
type Heap = PageHeap<Simulated, Shape>;

/// Runs `body` in `iterations` random schedules, and as many with few preemptions at chosen depths.
fn explore(iterations: usize, body: impl Fn() + Send + Sync + Copy + 'static) {
    let began = Instant::now();
    run(RandomScheduler::new(iterations), body);
    run(PctScheduler::new(3, iterations), body);
    let name = std::thread::current().name().unwrap_or("?").to_owned();
    println!(
        "{name}: {} schedules, {:.1} s",
        2 * iterations,
        began.elapsed().as_secs_f64()
    );
}

fn run(scheduler: impl Scheduler + 'static, body: impl Fn() + Send + Sync + 'static) {
    let mut config = ShuttleConfig::new();
    config.failure_persistence = FailurePersistence::Print;
    config.stack_size = 1 << 18;
    Runner::new(scheduler, config).run(body);
}

/// A heap and who owns each of its pages. The stamps are not shuttle's, so they add no schedules.
struct World {
    heap: Heap,
    owners: Vec<AtomicUsize>,
}

impl World {
    fn new(chunks: usize) -> Arc<Self> {
        let pages = chunks * CHUNK;
        let config = Config::new(pages * GRANULE).caches(3).shards(1).wait_for_release(true);
        Arc::new(Self {
            heap: PageHeap::with_shape(Simulated::new(GRANULE), config).unwrap(),
            owners: (0..pages).map(|_| AtomicUsize::new(0)).collect(),
        })
    }

    /// A heap grown to its limit, with only these pages free.
    fn with(chunks: usize, free: &[(usize, usize)]) -> Arc<Self> {
        let world = Self::new(chunks);
        world.heap.allocate_at(run_of(0, chunks * CHUNK)).unwrap();
        for &(start, pages) in free {
            // SAFETY: allocated above, and unused.
            unsafe { world.heap.free(run_of(start, pages)) };
        }
        world
    }

    /// Stamps a run that `who` was given.
    fn stamp(&self, who: usize, run: PageRun) -> PageRun {
        for page in run.start().0..run.end().0 {
            let before = self.owners[page].swap(who, Ordering::SeqCst);
            assert_eq!(before, 0, "page {page} given to {who} while it is {before}'s");
        }
        run
    }

    /// Removes the stamps of a run that `who` is about to give back.
    fn unstamp(&self, who: usize, run: PageRun) -> PageRun {
        for page in run.start().0..run.end().0 {
            assert_eq!(self.owners[page].swap(0, Ordering::SeqCst), who);
        }
        run
    }

    fn take(&self, who: usize, pages: usize) -> Option<PageRun> {
        Some(self.stamp(who, self.heap.allocate(PageCount(pages))?))
    }

    fn give(&self, who: usize, run: PageRun) {
        // SAFETY: stamped as the caller's.
        unsafe { self.heap.free(self.unstamp(who, run)) };
    }

    /// After all threads have ended: every invariant holds, and every page is free, cached or stamped.
    fn finish(&self) {
        self.heap.check().unwrap();
        let stats = self.heap.stats();
        let stamped = self
            .owners
            .iter()
            .filter(|owner| owner.load(Ordering::SeqCst) != 0)
            .count();
        assert_eq!(stats.in_use.0, stamped, "{stats}");
        assert_eq!(stats.free.0 + stats.cached.0 + stats.in_use.0, stats.grown.0);
        self.heap.free_set().settle();
        self.heap.check().unwrap();
    }
}

fn run_of(start: usize, pages: usize) -> PageRun {
    PageRun::new(PageIndex(start), PageCount(pages)).unwrap()
}

#[test]
fn mixed_work_on_a_growing_heap_keeps_every_page() {
    explore(6000, || {
        let world = World::new(2);
        let threads: Vec<_> = (1..=3)
            .map(|who| {
                let world = world.clone();
                spawn(move || {
                    let sizes = [[1, 70, 3], [40, 1, 2], [100, 16, 1]][who - 1];
                    let runs: Vec<_> = sizes.iter().filter_map(|&pages| world.take(who, pages)).collect();
                    runs.into_iter().rev().skip(1).for_each(|run| world.give(who, run));
                    if who == 2 {
                        world.heap.scavenge(PageCount(50));
                    }
                    world.take(who, 2).into_iter().for_each(|run| world.give(who, run));
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish();
    });
}

#[test]
fn caches_that_come_and_go_lose_nothing() {
    explore(6000, || {
        let world = World::new(2);
        let threads: Vec<_> = (1..=3)
            .map(|who| {
                let world = world.clone();
                spawn(move || {
                    let cache = world.heap.cache().expect("one for each");
                    let take = |pages| Some(world.stamp(who, cache.allocate(PageCount(pages))?));
                    // SAFETY: stamped as this thread's.
                    let give = |run| unsafe { cache.free(world.unstamp(who, run)) };
                    let (one, two, many) = (take(1).unwrap(), take(2).unwrap(), take(20));
                    give(one);
                    many.into_iter().for_each(give);
                    let other = world.take(who, 1).unwrap();
                    give(other);
                    if who != 2 {
                        give(two);
                    }
                    drop(cache);
                    // The slot is lent again, with nothing left in it.
                    drop(world.heap.cache());
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(world.heap.stats().cached.0, 0);
        world.finish();
    });
}

#[test]
fn shards_named_by_all_serve_one_at_a_time() {
    explore(6000, || {
        let world = World::with(1, &[(60, 10)]);
        let threads: Vec<_> = (1..=3)
            .map(|who| {
                let world = world.clone();
                spawn(move || {
                    for _ in 0..2 {
                        let Some(run) = world.heap.allocate_on(0, PageCount(1)) else {
                            continue;
                        };
                        let run = world.stamp(who, run);
                        // SAFETY: stamped as this thread's.
                        unsafe { world.heap.free_on(0, world.unstamp(who, run)) };
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // (The pages that were never free have no owner either.)
        world.heap.flush_shards();
        assert_eq!((world.heap.stats().free.0, world.heap.stats().cached.0), (10, 0));
        world.heap.check().unwrap();
    });
}

/// As many pages as threads, each of which holds at most one: a thread that asks finds one, however the pages wander.
fn as_many_pages_as_threads(free: &'static [(usize, usize)]) {
    explore(8000, move || {
        let world = World::with(2, free);
        let threads: Vec<_> = (1..=3)
            .map(|who| {
                let world = world.clone();
                spawn(move || {
                    for _ in 0..3 {
                        let page = world.take(who, 1).expect("three pages, and two others");
                        world.give(who, page);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.heap.check().unwrap();
        assert_eq!(world.heap.stats().free.0, 3);
    });
}

#[test]
fn nobody_is_refused_the_third_page_of_a_chunk() {
    as_many_pages_as_threads(&[(5, 1), (63, 2)]);
}

#[test]
fn nobody_is_refused_the_third_page_of_two_chunks() {
    as_many_pages_as_threads(&[(5, 1), (70, 1), (CHUNK + 5, 1)]);
}

#[test]
fn a_page_carried_up_and_down_is_never_refused() {
    explore(12000, || {
        // One page wanders: it is given back low before the high one is taken, and the other way round. One is free at
        // any moment.
        let world = World::with(2, &[(CHUNK + 70, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            let (low, high) = (run_of(5, 1), run_of(CHUNK + 70, 1));
            // SAFETY: page 5 is in use, and nobody's.
            unsafe { other.heap.free(low) };
            for _ in 0..3 {
                if other.heap.allocate_at(high).is_none() {
                    return;
                }
                // SAFETY: just allocated; and the other page is free, or taken by the thread that asks.
                unsafe { other.heap.free(high) };
                if other.heap.allocate_at(low).is_none() {
                    return;
                }
                // SAFETY: just allocated.
                unsafe { other.heap.free(low) };
            }
        });
        world.heap.allocate(PageCount(1)).expect("one is free at any moment");
        thread.join().unwrap();
        world.heap.check().unwrap();
        assert_eq!(world.heap.stats().free.0, 1);
    });
}

/// One page is freed and taken again, forever, while another thread asks for an aligned page; no free page is aligned.
/// In turns, step by step, so that no search is undisturbed.
fn refused_while_a_page_comes_and_goes(scheduler: impl Scheduler + 'static) {
    run(scheduler, || {
        let odd: Vec<_> = (0..32).map(|index| (2 * index + 1, 1)).collect();
        let world = World::with(2, &odd);
        let (other, over) = (world.clone(), Arc::new(AtomicBool::new(false)));
        let stop = Arc::clone(&over);
        let thread = spawn(move || {
            let page = run_of(CHUNK + 1, 1);
            while !stop.load(Ordering::SeqCst) {
                // SAFETY: in use, and nobody else's.
                unsafe { other.heap.free(page) };
                other.heap.allocate_at(page).expect("nobody else asks for it");
            }
        });
        let refused = world.heap.allocate_aligned(PageCount(1), 2 * GRANULE).is_none();
        over.store(true, Ordering::SeqCst);
        thread.join().unwrap();
        assert!(refused);
        world.heap.check().unwrap();
    });
}

#[test]
fn a_refusal_ends_while_others_free_all_the_time() {
    refused_while_a_page_comes_and_goes(RoundRobinScheduler::new(1));
    refused_while_a_page_comes_and_goes(RandomScheduler::new(200));
}

#[test]
fn long_runs_that_collide_go_back_whole() {
    explore(6000, || {
        let world = World::with(2, &[(60, 140)]);
        let threads: Vec<_> = (1..=3)
            .map(|who| {
                let world = world.clone();
                spawn(move || {
                    let pages = [130, 70, 65][who - 1];
                    for _ in 0..2 {
                        if let Some(run) = world.take(who, pages) {
                            world.give(who, run);
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(world.heap.stats().free.0, 140);
        world.heap.check().unwrap();
        assert!(world.heap.allocate(PageCount(140)).is_some());
    });
}

#[test]
fn nobody_is_refused_a_page_for_its_being_scavenged() {
    explore(6000, || {
        let world = World::with(2, &[(5, 2), (CHUNK + 5, 2)]);
        let scavengers: Vec<_> = (0..2)
            .map(|_| {
                let world = world.clone();
                spawn(move || world.heap.scavenge(PageCount(3)).0)
            })
            .collect();
        let pages: Vec<_> = (0..4)
            .map(|_| world.take(1, 1).expect("four pages, and nobody keeps one"))
            .collect();
        pages.into_iter().for_each(|run| world.give(1, run));
        scavengers.into_iter().for_each(|thread| {
            thread.join().unwrap();
        });
        world.heap.check().unwrap();
        let stats = world.heap.stats();
        assert_eq!(stats.free.0, 4);
        assert!(stats.scavenged.0 <= 4);
    });
}

#[test]
fn a_batch_among_releases_tells_everybody() {
    explore(8000, || {
        let world = World::with(2, &[(100, 1)]);
        let (second, third) = (world.clone(), world.clone());
        let second = spawn(move || {
            let mut runs = [run_of(CHUNK + 3, 2), run_of(5, 1), run_of(126, 4)];
            // SAFETY: in use, and nobody's.
            unsafe { second.heap.free_batch(&mut runs) };
        });
        // SAFETY: in use, and nobody's.
        let third = spawn(move || unsafe { third.heap.free(run_of(CHUNK + 2, 1)) });
        let taken = world.heap.allocate(PageCount(1));
        assert!(taken.is_some());
        second.join().unwrap();
        third.join().unwrap();
        world.heap.check().unwrap();
        assert_eq!(world.heap.stats().free.0, 8);
        // 126..130 and 130 and 131..133 have become one run.
        assert!(taken.is_some_and(|run| run.start().0 >= 126) || world.heap.allocate(PageCount(7)).is_some());
    });
}

#[test]
fn a_set_of_four_words_to_a_chunk_covers_its_bits_whoever_releases() {
    use pageheap::internals::bitmap::Bitmap;
    use pageheap::internals::{Table, Tree};

    explore(8000, || {
        type Wide = Geometry<2, 13, 2, 4>;
        let pages = 512;
        // SAFETY: under a checker the address means nothing.
        let table = |len| unsafe { Table::new(core::ptr::NonNull::dangling(), len) };
        let levels = core::array::from_fn(|level| {
            table(if level < 2 {
                Tree::<Wide>::entries(level, pages)
            } else {
                0
            })
        });
        let set = Arc::new(FreeSet::<Wide>::new(
            Bitmap::new(table(8)),
            Bitmap::new(table(8)),
            Tree::new(levels),
        ));
        set.extend(pages, false);
        set.claim_at(0, pages).unwrap();
        // Three runs, in three words, that form one.
        let threads = [(60, 4), (64, 64), (128, 2)].map(|(start, count)| {
            let set = set.clone();
            spawn(move || set.release(start, count).unwrap())
        });
        for thread in threads {
            thread.join().unwrap();
        }
        set.check().unwrap();
        assert_eq!(set.claim(&Request::of(70)).map(|claim| claim.start), Some(60));
    });
}
