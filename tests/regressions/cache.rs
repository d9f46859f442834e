//! Caches, and double frees that the contract of `try_free` allows.

use pageheap::source::Simulated;
use pageheap::{Config, PageCount, PageHeap, PageIndex, PageRun};

fn page(index: usize) -> PageRun {
    PageRun::new(PageIndex(index), PageCount(1)).expect("a run")
}

/// A double free found at the flush also lost the pages that were correctly freed into the same buffer.
#[test]
fn a_double_free_does_not_lose_the_other_pages_of_the_buffer() {
    let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 24)).expect("a heap");
    let _run = heap.allocate(PageCount(512)).expect("room");
    let cache = heap.cache().expect("a cache");
    // SAFETY: pages 200 to 203 are ours; the second 200 is not allocated from this heap.
    unsafe {
        heap.free(page(200));
        cache.try_free(page(201)).expect("ours");
        cache.try_free(page(202)).expect("ours");
        let twice = cache.try_free(page(200));
        // Another word, so the buffer is flushed, or the flush fails.
        let other = cache.try_free(page(300));
        if twice.is_err() || other.is_err() {
            let _ = cache.try_free(page(300));
        }
    }
    cache.flush();
    // 200, 201, 202, 300.
    assert_eq!(heap.stats().free.0 % 512, 4, "{}", heap.stats());
}

/// 2^32 shards: the list of vacant slots is 32 bits wide, so slot 2^32 came back as slot 0, which belongs to shard 0.
#[cfg(target_pointer_width = "64")] // Only there can one ask for so many.
#[test]
fn a_vacant_slot_is_not_taken_for_a_shard() {
    use pageheap::source::System;
    let config = Config::new(1 << 24).shards(1 << 32).caches(2);
    // Refusing such a heap is fine too.
    let Ok(heap) = PageHeap::new(System, config) else {
        return;
    };
    // Shard 0 owns a word.
    let run = heap.allocate_on(0, PageCount(1)).expect("room");
    drop(heap.cache().expect("a cache"));
    let cache = heap.cache().expect("a cache");
    let other = cache.allocate(PageCount(1)).expect("room");
    // A fresh cache takes the lowest free page, which is in the word after shard 0's.
    assert_eq!(
        (run.start(), other.start()),
        (PageIndex(0), PageIndex(64)),
        "the handle works on shard 0's slot"
    );
}
