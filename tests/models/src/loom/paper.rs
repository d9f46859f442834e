//! A heap over pages of paper: a source of bare numbers with a cell for each page, so that loom sees every access to a
//! page, those of the source's own operations included.

use core::num::NonZero;
use core::ptr::NonNull;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use pageheap::internals::Shape;
use pageheap::source::{Contents, Purpose, Refused, Reservation, Source};
use pageheap::{Allocation, Config, PageCount, PageHeap, PageIndex, PageRun};

const PAGE_SHIFT: u32 = 13;
const PAGES: usize = 1 << 40;
const METADATA: usize = 1 << 44;

/// The pages of one heap, and their contents: 0 when prepared or released.
#[derive(Debug)]
pub struct Paper {
    cells: Vec<UnsafeCell<usize>>,
}

// SAFETY: the cells are loom's: loom reports it if a thread accesses one at a wrong time.
unsafe impl Sync for Paper {}
// SAFETY: as above.
unsafe impl Send for Paper {}

impl Paper {
    fn wipe(&self, start: NonNull<u8>, bytes: usize) {
        let first = (start.addr().get() - PAGES) >> PAGE_SHIFT;
        for cell in &self.cells[first..first + (bytes >> PAGE_SHIFT)] {
            // SAFETY: loom checks that no other thread is on the page.
            cell.with_mut(|contents| unsafe { *contents = 0 });
        }
    }

    /// What its first owner does.
    pub fn write(&self, allocation: &Allocation) {
        let run = allocation.run;
        for cell in &self.cells[run.start().0..run.end().0] {
            // SAFETY: as above.
            cell.with_mut(|contents| unsafe {
                assert!(!allocation.is_zeroed() || *contents == 0, "said to read as zero");
                *contents += 1;
            });
        }
    }

    /// What its last owner does.
    pub fn write_last(&self, run: PageRun) {
        for cell in &self.cells[run.start().0..run.end().0] {
            // SAFETY: as above.
            cell.with_mut(|contents| unsafe { *contents += 1 });
        }
    }
}

// SAFETY: one heap stands on it. The numbers for pages are nobody's memory and never followed; neither are those for
// metadata, because under a checker tables are boxes.
unsafe impl Source for Paper {
    fn granule(&self) -> usize {
        1 << PAGE_SHIFT
    }

    fn budget(&self) -> usize {
        usize::MAX
    }

    fn reserve(&self, purpose: Purpose, bytes: usize, _align: usize) -> Option<Reservation> {
        let base = match purpose {
            Purpose::Pages => PAGES,
            Purpose::Metadata => METADATA,
        };
        let base = NonNull::without_provenance(NonZero::new(base)?);
        Some(Reservation { base, bytes })
    }

    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        if purpose == Purpose::Pages {
            self.wipe(start, bytes);
        }
        Ok(Contents::Zero)
    }

    unsafe fn commit(&self, _: NonNull<u8>, _: usize) -> Result<(), Refused> {
        Ok(())
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        self.wipe(start, bytes);
        Ok(Contents::Zero)
    }

    unsafe fn unreserve(&self, _: Purpose, _: Reservation) {}
}

/// A heap on paper.
pub type Heap<G> = PageHeap<Paper, G>;
/// A cache of it.
pub type Cache<'h, G> = pageheap::Cache<'h, Paper, G>;

/// A heap that may grow to `chunks` chunks but has not yet, with two caches to lend and a shard. A thread that
/// finds no room waits for a scavenger.
pub fn heap<G: Shape>(chunks: usize) -> Arc<Heap<G>> {
    heap_that_waits(chunks, true, 1)
}

/// The same; `waits` says whether a thread that finds no room waits.
fn heap_that_waits<G: Shape>(chunks: usize, waits: bool, shards: usize) -> Arc<Heap<G>> {
    let pages = chunks * G::CHUNK_PAGES;
    let paper = Paper {
        cells: (0..pages).map(|_| UnsafeCell::new(0)).collect(),
    };
    let config = Config::new(pages << PAGE_SHIFT)
        .caches(2)
        .shards(shards)
        .wait_for_release(waits);
    Arc::new(PageHeap::with_shape(paper, config).unwrap())
}

/// A heap grown to `chunks` chunks and no further, in which only the pages of `free` are free; all others are in use.
pub fn heap_with<G: Shape>(chunks: usize, free: &[(usize, usize)]) -> Arc<Heap<G>> {
    full_but_for(heap::<G>(chunks), free)
}

/// The same, but a thread that finds no room is refused at once.
pub fn impatient_heap_with<G: Shape>(chunks: usize, free: &[(usize, usize)]) -> Arc<Heap<G>> {
    full_but_for(heap_that_waits::<G>(chunks, false, 1), free)
}

/// A heap as [`heap_with`] has it, without a shard. (Whoever flushes shards sees all that others did before they
/// entered the same turnstile.)
pub fn heap_of_no_shards_with<G: Shape>(chunks: usize, free: &[(usize, usize)]) -> Arc<Heap<G>> {
    full_but_for(heap_that_waits::<G>(chunks, true, 0), free)
}

fn full_but_for<G: Shape>(heap: Arc<Heap<G>>, free: &[(usize, usize)]) -> Arc<Heap<G>> {
    let all = heap.capacity().0;
    let whole = heap.allocate_at(run(0, all)).unwrap();
    heap.source().write(&whole);
    for &(start, pages) in free {
        give(&heap, run(start, pages));
    }
    heap.free_set().settle();
    heap
}

/// The run of `pages` pages from `start`.
pub fn run(start: usize, pages: usize) -> PageRun {
    PageRun::new(PageIndex(start), PageCount(pages)).unwrap()
}

/// Allocates and writes.
pub fn take<G: Shape>(heap: &Heap<G>, pages: usize) -> Option<PageRun> {
    let allocation = heap.allocate_tracked(PageCount(pages))?;
    heap.source().write(&allocation);
    Some(allocation.run)
}

/// Writes a last time and frees.
pub fn give<G: Shape>(heap: &Heap<G>, run: PageRun) {
    heap.source().write_last(run);
    // SAFETY: it is the caller's, if this model is right.
    unsafe { heap.free(run) };
}

/// Allocates from a cache and writes.
pub fn take_from<G: Shape>(cache: &Cache<'_, G>, pages: usize) -> Option<PageRun> {
    let allocation = cache.allocate_tracked(PageCount(pages))?;
    cache.heap().source().write(&allocation);
    Some(allocation.run)
}

/// Writes a last time and frees into a cache.
pub fn give_to<G: Shape>(cache: &Cache<'_, G>, run: PageRun) {
    cache.heap().source().write_last(run);
    // SAFETY: it is the caller's, if this model is right.
    unsafe { cache.free(run) };
}

/// After all threads have ended: every invariant holds, and these many pages are free, cached, and free and scavenged.
pub fn finish<G: Shape>(heap: &Heap<G>, free: usize, cached: usize, scavenged: Option<usize>) {
    heap.check().unwrap();
    let stats = heap.stats();
    assert_eq!(
        (stats.free.0, stats.cached.0),
        (free, cached),
        "pages were lost or made"
    );
    assert!(scavenged.is_none_or(|scavenged| stats.scavenged.0 == scavenged));
    heap.free_set().settle();
    heap.check().unwrap();
}
