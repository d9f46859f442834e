//! A fork in the middle of a large release waits for a part of it, not for all.

use std::alloc::GlobalAlloc;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use pageheap::Config;
use pageheap::source::{Contents, Memory, Purpose, Refused, Reservation, Source, System};

use super::*;

/// The system, slowly, with a count of releases.
struct Slow {
    releases: AtomicUsize,
}

// SAFETY: every verb is the system's.
unsafe impl Source for Slow {
    fn granule(&self) -> usize {
        System.granule()
    }

    fn budget(&self) -> usize {
        System.budget()
    }

    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        System.reserve(purpose, bytes, align)
    }

    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise.
        unsafe { System.prepare(purpose, start, bytes) }
    }

    unsafe fn commit(&self, _: NonNull<u8>, _: usize) -> Result<(), Refused> {
        Ok(())
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        self.releases.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros(50));
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }

    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        // SAFETY: the caller's promise.
        unsafe { System.unreserve(purpose, reservation) }
    }
}

// SAFETY: as the system's.
unsafe impl Memory for Slow {}

static SLOW: Slow = Slow {
    releases: AtomicUsize::new(0),
};

// SAFETY: the system's pages are memory.
static OTHER: GlobalHeap<&Slow> = unsafe { GlobalHeap::with_source(&SLOW, Config::new(1 << 30)) };

#[test]
fn a_fork_comes_in_between() {
    if !is_child() {
        return assert!(run("forks::a_fork_comes_in_between"));
    }
    // Runs of 5 pages, every other free: some 50 to a chunk.
    const SIZE: usize = 40_000;
    // SAFETY: the layout is not empty; freed with it.
    let blocks: Vec<_> = (0..16_000)
        .map(|_| unsafe { OTHER.alloc(layout(SIZE)) }.addr())
        .collect();
    for block in blocks.iter().step_by(2) {
        // SAFETY: as above.
        unsafe { OTHER.dealloc(std::ptr::with_exposed_provenance_mut(*block), layout(SIZE)) };
    }
    OTHER.flush_thread();
    let count = || SLOW.releases.load(Ordering::Relaxed);
    let releasing = std::thread::spawn(|| OTHER.release(usize::MAX));
    while count() < 100 {
        std::hint::spin_loop();
    }
    for _ in 0..5 {
        let before = count();
        // SAFETY: the child ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as said.
            unsafe { libc::_exit(0) };
        }
        let after = count();
        let mut status = 0;
        // SAFETY: waits for the child just made.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        println!("{} releases while a fork waited", after - before);
        assert!(after - before <= 300, "{} releases", after - before);
    }
    let during = count();
    assert!(releasing.join().unwrap() > 0);
    assert!(
        count() > during + 1000,
        "{} after {during}: the forks came too late",
        count()
    );
    // The heap is as it should be.
    OTHER.check().unwrap();
}
