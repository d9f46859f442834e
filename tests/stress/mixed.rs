//! All operations at once, on heaps too small for all threads.

use std::thread;

use pageheap::internals::Shape;
use pageheap::source::{Simulated, Source, System};
use pageheap::{Config, Geometry, PageHeap, PageIndex, PageRun};

use super::worker::{NoStamp, Shared, Stamp, work};
use super::{Owners, all_is_free, deadline};

/// Runs `threads` threads on one heap.
fn mix<S: Source + Sync, G: Shape, T: Stamp>(heap: &PageHeap<S, G>, stamp: &T, threads: u32) {
    let owners = Owners::new(heap.capacity().0);
    let shared = Shared {
        heap,
        owners: &owners,
        stamp,
        deadline: deadline(),
        // Together the threads want half as much again as there is.
        most: heap.capacity().0 * 3 / 2 / threads as usize,
    };
    let steps: usize = thread::scope(|scope| {
        let shared = &shared;
        let workers: Vec<_> = (1..=threads).map(|me| scope.spawn(move || work(shared, me))).collect();
        let done = workers
            .into_iter()
            .map(|worker| worker.join().expect("a worker that ends"));
        done.sum()
    });
    println!("{threads} threads, {steps} steps\n{}", heap.stats());
    assert!(heap.stats().growths > 0, "{}", heap.stats());
    all_is_free(heap, &owners);
}

fn simulated<G: Shape>(pages: usize, threads: u32) {
    let config = Config::new(pages << G::PAGE_SHIFT)
        .shards(4)
        .caches(threads as usize * 3 / 4);
    let source = Simulated::new(4096);
    let heap: PageHeap<&Simulated, G> = PageHeap::with_shape(&source, config).expect("a heap");
    mix(&heap, &NoStamp, threads);
    drop(heap);
    source.assert_all_returned();
}

#[test]
fn two_threads() {
    simulated::<Geometry>(8192, 2);
}

#[test]
fn eight_threads() {
    simulated::<Geometry>(8192, 8);
}

#[test]
fn sixty_four_threads() {
    simulated::<Geometry>(3000, 64);
}

#[test]
fn eight_threads_in_a_deep_narrow_tree() {
    simulated::<Geometry<5, 13, 2, 1>>(1000, 8);
}

#[test]
fn sixteen_threads_without_a_tree() {
    simulated::<Geometry<1, 12>>(3000, 16);
}

/// Pages of real memory: each is stamped at both ends, must keep its stamps, and must be zero where that was promised.
struct Memory<'h> {
    heap: &'h PageHeap<System, Geometry>,
}

impl Memory<'_> {
    /// The first and last eight bytes of each page.
    fn cells(&self, run: PageRun) -> impl Iterator<Item = *mut u64> {
        let size = <Geometry as Shape>::PAGE_BYTES;
        (run.start().0..run.end().0).flat_map(move |page| {
            let page = self.heap.address(PageIndex(page)).as_ptr();
            [page.cast(), page.wrapping_add(size - 8).cast()]
        })
    }
}

impl Stamp for Memory<'_> {
    fn taken(&self, run: PageRun, zeroed: bool, owner: u32) {
        for cell in self.cells(run) {
            // SAFETY: inside a page of the caller's own, aligned; the pages of `System` are memory.
            unsafe {
                assert!(!zeroed || cell.read() == 0, "{run} is not zero");
                cell.write(u64::from(owner) << 48 ^ cell.addr() as u64);
            }
        }
    }

    fn freed(&self, run: PageRun, owner: u32) {
        for cell in self.cells(run) {
            // SAFETY: as above, and written when the page was taken.
            let found = unsafe { cell.read() };
            assert_eq!(
                found,
                u64::from(owner) << 48 ^ cell.addr() as u64,
                "{run} was written to"
            );
        }
    }
}

#[test]
fn eight_threads_on_memory() {
    let config = Config::new(32 << 20).shards(4).caches(6);
    let heap = PageHeap::new(System, config).expect("a heap");
    mix(&heap, &Memory { heap: &heap }, 8);
}
