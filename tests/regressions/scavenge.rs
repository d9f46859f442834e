//! A run under release is nobody's, and nobody who proves that there is no room knows of it.

use std::ptr::NonNull;
use std::sync::{Barrier, Mutex};
use std::thread;

use pageheap::source::{Contents, Purpose, Refused, Reservation, Simulated, Source};
use pageheap::{Config, PageCount, PageHeap};

/// A source whose release stops half way, for as long as another thread wants.
struct Slow<'a> {
    inner: Simulated,
    doors: Option<&'a [Barrier; 2]>,
    once: Mutex<bool>,
}

// SAFETY: every verb is the simulated source's.
unsafe impl Source for Slow<'_> {
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
        unreachable!()
    }
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        if !std::mem::replace(&mut *self.once.lock().unwrap(), true)
            && let Some(doors) = self.doors
        {
            doors.iter().for_each(|door| {
                door.wait();
            });
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.release(start, bytes) }
    }
    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        // SAFETY: the caller's promise.
        unsafe { self.inner.unreserve(purpose, reservation) }
    }
}

/// The whole heap is free, nobody has allocated anything, and one page cannot be had: a false "no", twice proved.
#[test]
fn no_refusal_while_the_only_pages_are_being_released() {
    let doors = [Barrier::new(2), Barrier::new(2)];
    let source = Slow {
        inner: Simulated::new(4096).with_contents(Contents::Unknown),
        doors: Some(&doors),
        once: Mutex::new(false),
    };
    let heap: PageHeap<Slow> = PageHeap::new(source, Config::new(64 << 13)).expect("a heap");
    let run = heap.allocate(PageCount(64)).expect("room");
    // SAFETY: the run is ours.
    unsafe { heap.free(run) };
    let answer = thread::scope(|scope| {
        scope.spawn(|| heap.scavenge(PageCount(64)));
        doors[0].wait();
        // Asked in the middle of the release; an implementation that waits or retries has its time.
        let asker = scope.spawn(|| heap.allocate(PageCount(1)));
        std::thread::sleep(std::time::Duration::from_millis(200));
        doors[1].wait();
        asker.join().unwrap()
    });
    assert!(answer.is_some(), "refused, with 64 of 64 pages free");
}
