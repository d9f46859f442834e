//! The program's code on the heap's thread: a source's verbs, and the stack they need.

use std::alloc::GlobalAlloc;
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use pageheap::Config;
use pageheap::source::{Contents, OverSystem, Refused, Source, System, Verbs};

use super::*;

/// The system, with a buffer on the stack for each release, and a count of releases.
struct Deep {
    releases: AtomicUsize,
}

// SAFETY: every verb is the system's.
unsafe impl Verbs for Deep {
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        black_box(&mut [0_u8; 128 << 10]);
        self.releases.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }
}

static DEEP: OverSystem<Deep> = OverSystem(Deep {
    releases: AtomicUsize::new(0),
});

// SAFETY: the system's pages are memory.
static OWN: GlobalHeap<&OverSystem<Deep>> =
    unsafe { GlobalHeap::with_source(&DEEP, Config::new(1 << 30)) }.background(true);

#[test]
fn a_source_has_room_for_a_buffer_on_the_threads_stack() {
    if !is_child() {
        return assert!(run("guests::a_source_has_room_for_a_buffer_on_the_threads_stack"));
    }
    for _ in 0..2 {
        // SAFETY: the layout is not empty; blocks are freed with it.
        unsafe { OWN.dealloc(OWN.alloc(layout(4 << 20)), layout(4 << 20)) };
    }
    assert!(soon(|| DEEP.releases.load(Ordering::Relaxed) > 0));
}
