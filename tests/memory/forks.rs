//! Who waits for whom: a fork in the middle of a large release waits for a part of it, not for all of it; clocks that
//! allocate block neither a fork nor a release.

use std::alloc::GlobalAlloc;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use pageheap::Config;
use pageheap::source::{Contents, OverSystem, Refused, Source, System, Verbs};

use super::*;

/// The system, slowed down, with a count of releases.
struct Slow {
    releases: AtomicUsize,
}

// SAFETY: every verb is the system's.
unsafe impl Verbs for Slow {
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        self.releases.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros(50));
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }
}

static SLOW: OverSystem<Slow> = OverSystem(Slow {
    releases: AtomicUsize::new(0),
});

// SAFETY: the system's pages are memory.
static OTHER: GlobalHeap<&OverSystem<Slow>> = unsafe { GlobalHeap::with_source(&SLOW, Config::new(1 << 30)) };

#[test]
fn a_fork_comes_in_between() {
    if !is_child() {
        return assert!(child::ends_well_in_time("forks::a_fork_comes_in_between", |_| ()));
    }
    fork_during(|| assert!(OTHER.release(usize::MAX) > 0));
}

/// By such a clock a tick takes no time, so one used to do all there was.
#[test]
fn a_fork_comes_in_between_though_the_clock_stands_still() {
    const NAME: &str = "forks::a_fork_comes_in_between_though_the_clock_stands_still";
    if !is_child() {
        return assert!(child::ends_well_in_time(NAME, |_| ()));
    }
    fork_during(|| {
        let mut second = 1;
        while OTHER.tick(&|| Duration::from_secs(second)) < Duration::MAX {
            second += 1;
        }
    });
}

/// Forks while another thread gives back the memory of a torn heap. Ends the process if forks had to wait for long.
fn fork_during(release: fn()) {
    // Runs of 5 pages, every other one free: about 50 per chunk.
    const SIZE: usize = 40_000;
    // SAFETY: the layout is not empty; blocks are freed with it.
    let blocks: Vec<_> = (0..16_000)
        .map(|_| unsafe { OTHER.alloc(layout(SIZE)) }.addr())
        .collect();
    for block in blocks.iter().step_by(2) {
        // SAFETY: as above.
        unsafe { OTHER.dealloc(std::ptr::with_exposed_provenance_mut(*block), layout(SIZE)) };
    }
    OTHER.flush_thread();
    let count = || SLOW.releases.load(Ordering::Relaxed);
    let releasing = std::thread::spawn(release);
    while count() < 100 {
        std::hint::spin_loop();
    }
    let mut meanwhile = [(); 5].map(|()| {
        let before = count();
        // SAFETY: the child exits at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::_exit(0) };
        }
        let after = count();
        assert!(child > 0, "it failed");
        let mut status = 0;
        // SAFETY: waits for the child just forked.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        after - before
    });
    let during = count();
    releasing.join().unwrap();
    // The heap is intact.
    OTHER.check().unwrap();
    println!("{meanwhile:?} releases while a fork waited, {during} of {}", count());
    meanwhile.sort_unstable();
    // Four of five: one may have been off its processor for long.
    if meanwhile[3] > 300 || count() <= during + 1000 {
        println!("they waited for too much, or came too late");
        std::process::exit(child::LATE);
    }
}

/// Ends the process as failed if it deadlocks.
fn not_for_ever() {
    // SAFETY: no preconditions.
    unsafe { libc::alarm(120) };
}

/// Allocates and frees a block of a heap.
fn touch<S: Source + Send + Sync + 'static>(heap: &GlobalHeap<S>, size: usize) -> bool {
    // SAFETY: the layout is not empty; blocks are freed with it.
    unsafe {
        let block = heap.alloc(layout(size));
        if block.is_null() {
            return false;
        }
        heap.dealloc(block, layout(size));
        true
    }
}

const fn small() -> GlobalHeap {
    GlobalHeap::new().reserve(64 << 20).background(false)
}

/// While each thread ticks a heap, its clock allocates from another heap, and from one that opens only then. A fork,
/// which holds all of them, completes.
#[test]
fn clocks_that_allocate_do_not_stop_a_fork() {
    static HEAPS: [GlobalHeap; 2] = [small(), small()];
    if !is_child() {
        return assert!(run("forks::clocks_that_allocate_do_not_stop_a_fork"));
    }
    not_for_ever();
    assert!(HEAPS.iter().all(|heap| touch(heap, 100)));
    let [over, ticks, opened] = [0; 3].map(AtomicUsize::new);
    std::thread::scope(|scope| {
        let ticking = [0, 1].map(|own| {
            let (over, ticks, opened) = (&over, &ticks, &opened);
            scope.spawn(move || {
                let time = AtomicUsize::new(1);
                let clock = || {
                    assert!(touch(&HEAPS[1 - own], 100) && touch(&HEAPS[1 - own], 100_000));
                    if time.load(Ordering::Relaxed).is_multiple_of(1000) && opened.fetch_add(1, Ordering::Relaxed) < 40
                    {
                        assert!(touch(Box::leak(Box::new(small())), 100));
                    }
                    Duration::from_millis(time.fetch_add(1, Ordering::Relaxed) as u64 * 200)
                };
                while over.load(Ordering::Relaxed) == 0 {
                    HEAPS[own].tick(&clock);
                    ticks.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        for round in 0..if common::is_full() { 200 } else { 50 } {
            // Both are at work throughout.
            let before = ticks.load(Ordering::Relaxed);
            while ticks.load(Ordering::Relaxed) < before + 3 {
                std::thread::yield_now();
            }
            // SAFETY: the child uses only the heaps, and exits.
            let child = unsafe { libc::fork() };
            if child == 0 {
                not_for_ever();
                let well = HEAPS.iter().all(|heap| touch(heap, 100) && touch(heap, 100_000));
                // SAFETY: as above.
                unsafe { libc::_exit(i32::from(!well)) };
            }
            let mut status = 0;
            // SAFETY: waits for the child just forked.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0, "round {round}");
        }
        over.store(1, Ordering::Relaxed);
        // With what they do as they end.
        ticking.into_iter().for_each(|thread| thread.join().unwrap());
    });
    assert!(opened.load(Ordering::Relaxed) > 1, "no heap was opened meanwhile");
    assert!(HEAPS.iter().all(|heap| heap.check().is_ok()));
}

static FULL: GlobalHeap = small().limit(8 << 20).on_exhausted(release_all);

/// How often the hook was called.
static ASKED: AtomicUsize = AtomicUsize::new(0);

fn release_all(_: Layout) -> bool {
    FULL.release(usize::MAX);
    ASKED.fetch_add(1, Ordering::Relaxed) == 0
}

/// In the middle of a tick the clock exhausts the heap, and the hook calls `release`, which the tick itself may be
/// holding up.
#[test]
fn a_hook_may_release_in_the_clock_of_a_tick() {
    if !is_child() {
        return assert!(run("forks::a_hook_may_release_in_the_clock_of_a_tick"));
    }
    not_for_ever();
    assert!(touch(&FULL, 100_000));
    let clock = || {
        if ASKED.load(Ordering::Relaxed) == 0 {
            // SAFETY: the layout is not empty; blocks are freed with it.
            unsafe {
                let block = FULL.alloc(layout(5 << 20));
                assert!(!block.is_null() && FULL.alloc(layout(5 << 20)).is_null());
                FULL.dealloc(block, layout(5 << 20));
            }
        }
        Duration::from_secs(1)
    };
    FULL.tick(&clock);
    assert_eq!(ASKED.load(Ordering::Relaxed), 2);
    assert!(FULL.release(usize::MAX) > 0);
    FULL.check().unwrap();
}

/// While the process forks none of the system's files is opened. Afterwards they are read as before, in both processes.
#[test]
fn files_are_read_after_a_fork() {
    if !is_child() {
        return assert!(run("forks::files_are_read_after_a_fork"));
    }
    let reads = || HEAP.snapshot().resident > 0;
    assert!(reads());
    // SAFETY: the child reads a file and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(!reads())) };
    }
    let mut status = -1;
    // SAFETY: waits for the child just forked.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert!(reads());
}
