//! Freeing pages, and what is refused.

use super::*;

#[test]
fn part_of_a_run_can_be_freed() {
    let heap = heap(2048);
    take(&heap, 1000);
    give(&heap, 500, 100);
    give(&heap, 0, 1);
    give(&heap, 999, 1);
    check(&heap, 1024, 24 + 102);
    assert_eq!(take(&heap, 100), Some((500, 100)));
}

#[test]
fn a_batch_in_any_order() {
    let heap = heap(1 << 16);
    take(&heap, 1 << 16);
    // Runs of 1 to 700 pages, one page apart, from the top to the middle and up again.
    let mut runs = Vec::new();
    let mut start = 3;
    for step in 0..150_usize {
        let pages = 1 + step * step * 31 % 700;
        runs.push(run(start, pages));
        start += pages + 1;
    }
    let freed: usize = runs.iter().map(|run| run.pages().0).sum();
    let shuffled: Vec<_> = (0..150).map(|step| runs[(149 - step * 7 % 150) % 150]).collect();
    let mut batch = shuffled;
    // SAFETY: pages of a simulated source are numbers.
    unsafe { heap.free_batch(&mut batch) };
    assert_eq!(batch, runs, "sorted");
    check(&heap, 1 << 16, freed);
    heap.free_set().settle();
    check(&heap, 1 << 16, freed);
    for each in runs.iter().filter(|run| run.pages().0 == 601) {
        assert_eq!(taken(heap.allocate_at(*each)), Some(numbers(*each)));
    }
    // SAFETY: as above; nothing is freed.
    unsafe { heap.free_batch(&mut []) };
}

/// Why `try_free` refuses a run: whether it is free already, and the page that the error names.
fn refused(heap: &PageHeap<Simulated>, start: usize, pages: usize) -> (bool, usize) {
    // SAFETY: pages of a simulated source are numbers.
    let error = unsafe { heap.try_free(run(start, pages)) }.expect_err("a refusal");
    let base = heap.address(PageIndex(0)).addr().get();
    (error.is_free_already(), (error.address() - base) / PAGE)
}

#[test]
fn what_is_free_is_not_freed() {
    let heap = heap(4096);
    take(&heap, 1000);
    give(&heap, 300, 10);
    assert_eq!(refused(&heap, 300, 10), (true, 300), "twice");
    assert_eq!(refused(&heap, 305, 1), (true, 305));
    assert_eq!(refused(&heap, 290, 11), (true, 300), "its end");
    assert_eq!(refused(&heap, 100, 800), (true, 300), "its middle");
    assert_eq!(refused(&heap, 1000, 1), (true, 1000), "never allocated");
    assert_eq!(refused(&heap, 990, 20), (true, 1000));
    check(&heap, 1024, 34);
    give(&heap, 100, 200);
    give(&heap, 310, 690);
    check(&heap, 1024, 24 + 900);
}

#[test]
fn what_is_outside_is_not_freed() {
    const FAR: usize = by_width(1 << 40, 1 << 18);
    let heap = heap(4096);
    assert_eq!(refused(&heap, 0, 1), (false, 0), "nothing has grown");
    take(&heap, 512);
    assert_eq!(refused(&heap, 512, 1), (false, 512));
    assert_eq!(refused(&heap, 500, 13), (false, 512), "its end");
    assert_eq!(refused(&heap, 4096, 1), (false, 4096));
    assert_eq!(refused(&heap, FAR, 1), (false, FAR));
    check(&heap, 512, 0);
}

#[test]
fn a_batch_with_a_fault_frees_nothing() {
    let heap = heap(4096);
    take(&heap, 2000);
    give(&heap, 1500, 1);
    let base = heap.address(PageIndex(0)).addr().get();
    let refused = |runs: &[(usize, usize)]| {
        let mut runs: Vec<_> = runs.iter().map(|&(start, pages)| run(start, pages)).collect();
        // SAFETY: pages of a simulated source are numbers.
        let error = unsafe { heap.try_free_batch(&mut runs) }.expect_err("a refusal");
        (error.is_free_already(), (error.address() - base) / PAGE)
    };
    assert_eq!(refused(&[(30, 5), (10, 5), (34, 1)]), (true, 34), "overlapping");
    assert_eq!(refused(&[(30, 5), (10, 5), (30, 5)]), (true, 30), "twice");
    assert_eq!(refused(&[(10, 20), (11, 2)]), (true, 11), "inside");
    assert_eq!(refused(&[(1400, 200), (10, 5)]), (true, 1500), "free");
    assert_eq!(refused(&[(5000, 1), (10, 5)]), (false, 5000), "outside");
    check(&heap, 2048, 49);
}

#[test]
fn errors_name_the_address() {
    let heap = heap(4096);
    let base = heap.address(PageIndex(0)).addr().get();
    take(&heap, 512);
    give(&heap, 7, 1);
    // SAFETY: pages of a simulated source are numbers.
    let [free, outside] = [run(7, 1), run(600, 1)].map(|run| unsafe { heap.try_free(run) }.expect_err("a refusal"));
    let seven = base + 7 * PAGE;
    assert_eq!(free.address(), seven);
    assert_eq!(
        free.to_string(),
        format!("the page at {seven:#x} is free already (freed twice, or never allocated)")
    );
    assert_eq!(
        outside.to_string(),
        format!(
            "the pages from 600 on, at {:#x}, are not of the heap at {base:#x}..{:#x}",
            base + 600 * PAGE,
            base + 512 * PAGE
        )
    );
}

/// Regression: for a page without an address the upper bits were shifted out, and the error named a page inside the
/// heap.
#[test]
fn an_error_about_a_page_without_an_address_names_no_other() {
    let heap = heap(4096);
    let base = heap.address(PageIndex(0)).addr().get();
    take(&heap, 512);
    for page in [usize::MAX / PAGE + 8, usize::MAX - 1, (usize::MAX - base) / PAGE + 1] {
        // SAFETY: pages of a simulated source are numbers.
        let error = unsafe { heap.try_free(run(page, 1)) }.expect_err("a refusal");
        assert_eq!(
            (error.is_free_already(), error.address()),
            (false, usize::MAX),
            "{page}"
        );
        let text = error.to_string();
        assert!(text.starts_with(&format!("the pages from {page} on, at ")), "{text}");
    }
}

// ---- misuse aborts --------------------------------------------------------------------------------------------------

/// Runs `test` of this module in a child process, which must abort with a message that contains `text`. Returns true in
/// the child.
fn aborts(test: &str, text: &str) -> bool {
    child::ended(&format!("free::{test}"), text).is_none()
}

fn child_heap() -> PageHeap<Simulated> {
    let heap = over(Simulated::new(4096).with_base(BASE), Config::new(1 << 24));
    take(&heap, 100);
    heap
}

#[test]
fn freeing_twice_aborts() {
    if aborts("freeing_twice_aborts", &format!("{:#x}", BASE + 5 * PAGE)) {
        let heap = child_heap();
        give(&heap, 5, 1);
        // SAFETY: the call does not return.
        unsafe { heap.free(run(0, 10)) };
    }
}

#[test]
fn freeing_outside_aborts() {
    if aborts("freeing_outside_aborts", &format!("{:#x}", BASE + 512 * PAGE)) {
        // SAFETY: the call does not return.
        unsafe { child_heap().free(run(512, 1)) };
    }
}

#[test]
fn a_batch_that_overlaps_aborts() {
    if aborts("a_batch_that_overlaps_aborts", &format!("{:#x}", BASE + 12 * PAGE)) {
        // SAFETY: the call does not return.
        unsafe { child_heap().free_batch(&mut [run(12, 3), run(10, 5)]) };
    }
}

#[test]
fn freeing_twice_through_a_cache_aborts() {
    if aborts("freeing_twice_through_a_cache_aborts", &format!("{BASE:#x}")) {
        let heap = child_heap();
        let cache = heap.cache().expect("a cache");
        let page = cache.allocate(PageCount(1)).expect("room");
        // SAFETY: the second call does not return.
        unsafe {
            cache.free(page);
            cache.free(page);
        }
    }
}

/// The first page that is free already, wherever the run begins.
#[test]
fn a_cache_says_which_page_is_free_already() {
    let heap = heap(4096);
    let cache = heap.cache().expect("a cache");
    let four = cache.allocate(PageCount(4)).expect("room");
    let other = heap.allocate(PageCount(80)).expect("room");
    for whole in [four, run(other.end().0 - 4, 4)] {
        let (_, tail) = whole.split_at(PageCount(2)).expect("two parts");
        // SAFETY: pages of a simulated source are numbers; what is free already is refused.
        let error = unsafe {
            cache.free(tail);
            cache.try_free(whole).expect_err("half of it is free")
        };
        assert_eq!(error.address(), heap.address(tail.start()).addr().get());
    }
}

/// A page of another word may turn out to be free already when the cache begins to collect those of this one.
#[test]
fn a_page_freed_past_a_cache_is_named_when_the_cache_gives_it_back() {
    let heap = heap(4096);
    take(&heap, 300);
    let cache = heap.cache().expect("a cache");
    // Its own word is neither of those below.
    cache.allocate(PageCount(1)).expect("room");
    // SAFETY: pages of a simulated source are numbers; what is free already is refused.
    let error = unsafe {
        cache.free(run(40, 1));
        heap.free(run(40, 1));
        cache.try_free(run(90, 1)).expect_err("40 is free")
    };
    assert_eq!(error.address(), heap.address(PageIndex(40)).addr().get());
    assert_eq!(taken(heap.allocate_at(run(90, 1))), None, "not freed");
}

#[test]
fn a_page_freed_through_a_cache_and_past_it_aborts_at_the_flush() {
    let test = "a_page_freed_through_a_cache_and_past_it_aborts_at_the_flush";
    if aborts(test, &format!("{:#x}", BASE + 128 * PAGE)) {
        let heap = child_heap();
        let cache = heap.cache().expect("a cache");
        take(&heap, 28);
        let page = cache.allocate(PageCount(1)).expect("room");
        // SAFETY: the pages are numbers; the flush does not return.
        unsafe {
            cache.free(page);
            heap.free(page);
        }
        cache.flush();
    }
}

#[test]
fn freeing_twice_through_a_shard_aborts_at_the_flush() {
    let test = "freeing_twice_through_a_shard_aborts_at_the_flush";
    if aborts(test, &format!("{:#x}", BASE + 70 * PAGE)) {
        let heap = over(Simulated::new(4096).with_base(BASE), Config::new(1 << 24).shards(1));
        take(&heap, 100);
        give(&heap, 70, 1);
        // SAFETY: the pages are numbers; the flush does not return.
        unsafe { heap.free_on(0, run(70, 1)) };
        heap.flush_shards();
    }
}

/// A double free, which the contract forbids; even so, one page is free afterwards, once.
#[test]
fn of_two_who_free_a_page_at_the_same_moment_one_is_told() {
    const ROUNDS: usize = 1000;
    let (heap, barrier) = (heap(512), std::sync::Barrier::new(2));
    take(&heap, 3);
    let rounds = |takes: bool| {
        let round = |_| {
            let taken = takes && heap.allocate_at(run(1, 1)).is_some();
            barrier.wait();
            // SAFETY: pages of a simulated source are numbers.
            let freed = unsafe { heap.try_free(run(1, 1)) }.is_ok();
            barrier.wait();
            (taken, freed)
        };
        (0..ROUNDS).map(round).collect::<Vec<_>>()
    };
    give(&heap, 1, 1);
    let (mine, theirs) = std::thread::scope(|scope| {
        let other = scope.spawn(|| rounds(false));
        (rounds(true), other.join().expect("no panic"))
    });
    for (round, (&(taken, mine), &(_, theirs))) in mine.iter().zip(&theirs).enumerate() {
        assert!(
            taken && mine != theirs,
            "round {round}: taken {taken}, freed {mine} and {theirs}"
        );
    }
    check(&heap, 512, 510);
}
