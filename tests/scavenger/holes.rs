//! What is given back inside spans: whole pages of the system, whatever their length, and nothing that is live.

use std::alloc::{GlobalAlloc, Layout};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pageheap::source::{Contents, OverSystem, Refused, Source, System, Verbs};
use pageheap::{Config, GlobalHeap, PageCount};

use super::common::random::Random;
use super::*;

/// The system with longer pages; it knows which blocks are live, and refuses on demand.
#[derive(Debug)]
struct Coarse {
    granule: usize,
    live: Mutex<BTreeMap<usize, usize>>,
    refuses: AtomicBool,
    asked: AtomicUsize,
    faults: AtomicUsize,
}

impl Coarse {
    const fn new(granule: usize) -> OverSystem<Self> {
        OverSystem(Self {
            granule,
            live: Mutex::new(BTreeMap::new()),
            refuses: AtomicBool::new(false),
            asked: AtomicUsize::new(0),
            faults: AtomicUsize::new(0),
        })
    }
}

// SAFETY: the system's promises, for longer pages.
unsafe impl Verbs for Coarse {
    fn granule(&self) -> usize {
        self.granule.max(System.granule())
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let start_at = start.addr().get();
        let live = self.live.lock().unwrap();
        let last = live.range(..start_at + bytes).next_back();
        let is_fault = last.is_some_and(|(&block, &size)| block + size > start_at)
            || !(start_at | bytes).is_multiple_of(self.granule);
        self.faults.fetch_add(is_fault.into(), Ordering::Relaxed);
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        if self.refuses.load(Ordering::Relaxed) && asked.is_multiple_of(3) {
            return Err(Refused);
        }
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }
}

/// Several waves of blocks, few of which stay; the statistics must be true.
fn thin(source: &'static OverSystem<Coarse>, heap: &GlobalHeap<&'static OverSystem<Coarse>>) {
    let mut random = Random(88_172_645_463_325_252);
    let mut blocks: Vec<(*mut u8, Layout)> = Vec::new();
    for wave in 0..6 {
        for _ in 0..1500 {
            let layout = Layout::from_size_align(1025 + random.below(34_000), 8).unwrap();
            // SAFETY: the size is not zero; the writes are inside the block.
            unsafe {
                let block = heap.alloc(layout);
                assert!(!block.is_null());
                block.write_bytes(blocks.len() as u8 | 1, layout.size());
                blocks.push((block, layout));
                source.live.lock().unwrap().insert(block.addr(), layout.size());
            }
        }
        while blocks.len() > 250 {
            let (block, layout) = blocks.swap_remove(random.below(blocks.len()));
            source.live.lock().unwrap().remove(&block.addr());
            // SAFETY: allocated with this layout.
            unsafe {
                let stamp = block.read();
                let is_whole = all_are(std::slice::from_raw_parts(block, layout.size()), stamp);
                assert!(stamp != 0 && is_whole, "{block:?} of {layout:?}");
                heap.dealloc(block, layout);
            }
        }
        source.refuses.store(wave % 2 == 0, Ordering::Relaxed);
        heap.release(usize::MAX);
        let some = heap.stats().pages;
        heap.check().unwrap();
        source.refuses.store(false, Ordering::Relaxed);
        heap.release(usize::MAX);
        let all = heap.stats().pages;
        heap.check().unwrap();
        assert!(all.holes > PageCount(0) && all.holes >= some.holes, "{all}");
        assert!(wave % 2 != 0 || all.backed < some.backed, "{some}\n{all}");
        for pages in [some, all] {
            assert_eq!(
                pages.backed.0,
                pages.grown.0 - pages.scavenged.0 - pages.holes.0,
                "{pages}"
            );
        }
    }
    assert_eq!(source.faults.load(Ordering::Relaxed), 0);
    source.live.lock().unwrap().clear();
    // SAFETY: each block was allocated with its layout.
    blocks
        .into_iter()
        .for_each(|(block, layout)| unsafe { heap.dealloc(block, layout) });
    heap.release(usize::MAX);
    heap.check().unwrap();
    let pages = heap.stats().pages;
    // A few may remain besides this thread's own structure.
    assert!(pages.holes < PageCount(8) && pages.backed < PageCount(32), "{pages:?}");
}

#[test]
#[cfg_attr(windows, ignore = "no holes where pages are committed")]
#[cfg_attr(all(feature = "checks", not(windows)), ignore = "seals take room")]
fn what_is_given_back_is_whole_pages_of_the_system() {
    for granule in [4 << 10, 16 << 10, 64 << 10] {
        let source = Box::leak(Box::new(Coarse::new(granule)));
        // SAFETY: the system's pages are memory.
        let heap = unsafe { GlobalHeap::with_source(&*source, Config::new(by_width(1 << 30, 128 << 20))) };
        thin(source, Box::leak(Box::new(heap)));
    }
}
