//! Sources that want commits: pages are handed out that were never committed.

use pageheap::source::{Contents, Failure, Simulated, Verb};
use pageheap::{Config, PageCount, PageHeap, PageIndex, PageRun};

fn heap(source: Simulated<true>) -> PageHeap<Simulated<true>> {
    PageHeap::new(source, Config::new(1 << 24)).expect("a heap")
}

fn assert_ready(heap: &PageHeap<Simulated<true>>, run: PageRun) {
    heap.source()
        .assert_ready(heap.address(run.start()), run.pages().0 << 13);
}

/// A failed commit gives the pages back without the scavenged bits it took: nobody will ever commit them.
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

/// Whether pages want a commit is kept in the bit that says they are zero: a source that does not promise zero is never
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

/// `Source::commit` is documented for ranges that are Prepared; a run that is partly Ready is committed as a whole.
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
