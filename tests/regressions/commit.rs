//! Sources that need commits: pages were handed out that had never been committed.

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use pageheap::source::{Contents, Failure, Purpose, Refused, Region, Reservation, Simulated, Source, Verb};
use pageheap::{Config, Geometry, PageCount, PageHeap, PageIndex, PageRun};

fn heap(source: Simulated<true>) -> PageHeap<Simulated<true>> {
    PageHeap::new(source, Config::new(1 << 24)).expect("a heap")
}

fn assert_ready(heap: &PageHeap<Simulated<true>>, run: PageRun) {
    heap.source()
        .assert_ready(heap.address(run.start()), run.pages().0 << 13);
}

/// A failed commit gave the pages back without the scavenged bits that it had taken, so they would never be committed.
#[test]
fn a_failed_commit_is_not_forgotten() {
    let heap = heap(Simulated::committing(4096));
    heap.source().fail(Verb::Commit, Failure::Calls { after: 0, times: 1 });
    assert!(heap.allocate(PageCount(3)).is_none());
    let run = heap.allocate(PageCount(3)).expect("the source has healed");
    assert_ready(&heap, run);
}

/// The same through a cache.
#[test]
fn a_failed_commit_through_a_cache_is_not_forgotten() {
    let heap = heap(Simulated::committing(4096));
    let cache = heap.cache().expect("a cache");
    // Once for the cache's word, once for the heap's pages, once for those after the cache was flushed.
    heap.source().fail(Verb::Commit, Failure::Calls { after: 0, times: 3 });
    assert!(cache.allocate(PageCount(3)).is_none());
    heap.source().heal();
    cache.flush();
    let run = heap.allocate(PageCount(3)).expect("the source has healed");
    assert_eq!(run.start(), PageIndex(0));
    assert_ready(&heap, run);
}

/// A handle whose word had pages with and without memory was refused, again and again, when commits were: it kept the
/// word, and looked for pages with memory everywhere else.
#[test]
fn a_handle_is_not_refused_for_pages_of_its_own() {
    let config = Config::new(1 << 24).caches(2).limit(PageCount(128));
    let heap = PageHeap::new(Simulated::<true>::committing(4096), config).expect("a heap");
    let cache = heap.cache().expect("a cache");
    let run = |start, pages| PageRun::new(PageIndex(start), PageCount(pages)).unwrap();
    assert_eq!(heap.allocate(PageCount(128)), Some(run(0, 128)));
    // SAFETY: parts of that run, each freed once.
    unsafe {
        heap.free(run(0, 32));
        heap.free(run(64, 64));
        assert_eq!(heap.scavenge(PageCount(usize::MAX)), PageCount(96));
        heap.free(run(32, 32));
    }
    heap.source().fail(
        Verb::Commit,
        Failure::Calls {
            after: 0,
            times: usize::MAX,
        },
    );
    for page in 32..64 {
        let run = cache.allocate(PageCount(1)).expect("a page with memory");
        assert_eq!(run.start(), PageIndex(page));
        assert_ready(&heap, run);
    }
    assert!(cache.allocate(PageCount(1)).is_none());
}

/// Nor are others, for what lies in a shard.
#[test]
fn pages_with_memory_are_found_in_a_shard() {
    let run = |start, pages| PageRun::new(PageIndex(start), PageCount(pages)).unwrap();
    for has_grown in [true, false] {
        let limit = PageCount(if has_grown { 128 } else { 1024 });
        let config = Config::new(1 << 24).caches(0).shards(1).limit(limit);
        let heap = PageHeap::new(Simulated::<true>::committing(4096), config).expect("a heap");
        assert_eq!(heap.allocate(PageCount(128)), Some(run(0, 128)));
        // SAFETY: parts of that run, each freed once.
        unsafe {
            heap.free(run(0, 64));
            assert_eq!(heap.scavenge(PageCount(64)), PageCount(64));
            heap.free_on(0, run(64, 64));
        }
        heap.source().fail(Verb::Commit, Failure::Every(1));
        for page in 64..128 {
            let found = heap.allocate(PageCount(1)).expect("a page with memory");
            assert_eq!(found.start(), PageIndex(page));
            assert_ready(&heap, found);
        }
        assert!(heap.allocate(PageCount(1)).is_none());
    }
}

/// The bit that says a page is zero also says that it needs a commit: a source that does not promise zero was never
/// asked.
#[test]
fn what_a_source_knows_nothing_of_is_committed_too() {
    let heap = heap(Simulated::committing(4096).with_contents(Contents::Unknown));
    let run = heap.allocate(PageCount(3)).expect("room");
    assert_ready(&heap, run);
}

/// Released pages of unknown contents need a commit again.
#[test]
fn released_pages_of_unknown_contents_are_committed_again() {
    let heap = heap(Simulated::committing(4096));
    let run = heap.allocate(PageCount(512)).expect("room");
    assert_ready(&heap, run);
    // SAFETY: the run is ours.
    unsafe { heap.free(run) };
    heap.source().set_contents(Contents::Unknown);
    assert_eq!(heap.scavenge(PageCount(512)), PageCount(512));
    let run = heap.allocate(PageCount(512)).expect("room");
    assert_ready(&heap, run);
}

/// `Source::commit` is documented for ranges that are Prepared, but a run that was partly Ready was committed as a
/// whole.
#[test]
fn a_partly_scavenged_run_commits_only_what_is_prepared() {
    let heap = heap(Simulated::committing(4096));
    let run = heap.allocate(PageCount(1)).expect("room");
    // SAFETY: the run is ours.
    unsafe { heap.free(run) };
    // Page 0 is Ready, page 1 was never committed.
    let run = heap.allocate(PageCount(2)).expect("room");
    assert_ready(&heap, run);
}

/// A source that commits, and refuses every other release after it has overwritten the contents.
struct Scribbling {
    inner: Region,
    releases: AtomicUsize,
}

// SAFETY: a region's verbs; the caller of a release gives up the contents that it overwrites.
unsafe impl Source for &Scribbling {
    const COMMITS: bool = true;

    fn granule(&self) -> usize {
        self.inner.granule()
    }
    fn budget(&self) -> usize {
        self.inner.budget()
    }
    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        self.inner.reserve(purpose, bytes, align)
    }
    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.prepare(purpose, start, bytes) }
    }
    unsafe fn commit(&self, _: NonNull<u8>, _: usize) -> Result<(), Refused> {
        Ok(())
    }
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let refused = !self.releases.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
        // SAFETY: the caller gives the contents up.
        unsafe { start.write_bytes(if refused { 0x5a } else { 0 }, bytes) };
        if refused { Err(Refused) } else { Ok(Contents::Zero) }
    }
    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        // SAFETY: the caller's promise.
        unsafe { self.inner.unreserve(purpose, reservation) }
    }
}

/// One scavenger finds a run, a second releases and marks it, and the first one's release is refused. The mark stays,
/// since it brings the pages to `commit`, but must no longer mean zero.
#[test]
fn pages_whose_second_release_is_refused_are_not_zero() {
    let bytes = Box::leak(vec![MaybeUninit::<u8>::zeroed(); 1 << 20].into_boxed_slice());
    // SAFETY: zero bytes, just made.
    let region = unsafe { Region::from_static(bytes).zeroed() };
    let source = Scribbling {
        inner: region,
        releases: AtomicUsize::new(0),
    };
    let heap: PageHeap<&Scribbling, Geometry<5, 12>> = PageHeap::with_shape(&source, Config::new(1 << 20)).unwrap();
    let over = AtomicBool::new(false);
    let wrong = thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    heap.scavenge(PageCount(64));
                }
            });
        }
        let wrong = (0..200_000).find(|_| {
            let Some(page) = heap.allocate_tracked(PageCount(1)) else {
                return false;
            };
            let memory = heap.pointer(page.run).cast::<[u8; 4096]>();
            // SAFETY: a page of ours; its memory was zero at first and has since been written only by the source or
            // here.
            unsafe {
                let dirty = page.is_zeroed() && memory.read().iter().any(|&byte| byte != 0);
                memory.cast::<u8>().write_bytes(1, 4096);
                heap.free(page.run);
                dirty
            }
        });
        over.store(true, Ordering::Relaxed);
        wrong
    });
    assert_eq!(wrong, None, "the page allocated then was said to be zero");
}
