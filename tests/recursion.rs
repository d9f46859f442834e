//! An allocator never allocates from itself: tested here with one that would notice, as the allocator of the whole
//! process.

#![cfg(unix)]

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::thread;

use pageheap::{GlobalHeap, PageCount};

/// A heap that ends the process if it is called while it is at work on the same thread.
struct Watched(GlobalHeap);

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this is the heap's own thread: all that it does, it does for the heap.
#[cfg(target_os = "linux")]
fn is_background() -> bool {
    let mut name = [0_u8; 16];
    // SAFETY: room for the longest name there is.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name.starts_with(b"pageheap\0")
}

#[cfg(not(target_os = "linux"))]
fn is_background() -> bool {
    false
}

/// Marks the duration of one call.
struct Inside;

impl Inside {
    fn enter() -> Self {
        if INSIDE.replace(true) || is_background() {
            let text = b"the heap allocates from itself\n";
            // SAFETY: the bytes are live; the process ends.
            unsafe {
                libc::write(2, text.as_ptr().cast(), text.len());
                libc::abort();
            }
        }
        Self
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

// SAFETY: forwards to the heap.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _inside = Inside::enter();
        // SAFETY: the caller's promise.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let _inside = Inside::enter();
        // SAFETY: the caller's promise.
        unsafe { self.0.dealloc(block, layout) };
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let _inside = Inside::enter();
        // SAFETY: the caller's promise.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let _inside = Inside::enter();
        // SAFETY: the caller's promise.
        unsafe { self.0.realloc(block, layout, size) }
    }
}

#[global_allocator]
static HEAP: Watched = Watched(GlobalHeap::new().limit(512 << 20));

/// Every path: small and large, growth, threads and their ends, exhaustion, scavenging, the background thread.
#[test]
fn no_path_allocates_from_the_heap_itself() {
    let work = |seed: usize| {
        let mut kept: Vec<Vec<u8>> = Vec::new();
        for number in 0..300 {
            let mut block = vec![0_u8; (number * seed * 7919) % [50, 3000, 40_000, 200_000][number % 4] + 1];
            block.resize(block.len() * 2, 1);
            kept.push(block);
            if kept.len() > 20 {
                kept.swap_remove(number % 20);
            }
        }
    };
    for seed in 1..5 {
        thread::scope(|scope| (0..4).for_each(|number| drop(scope.spawn(move || work(seed + number)))));
    }
    let flush = || {
        let _inside = Inside::enter();
        HEAP.0.flush_thread();
        HEAP.0.scavenge(PageCount(usize::MAX));
        HEAP.0.stats()
    };
    assert!(flush().pages.calls.release > 0);
    // To the limit and back.
    let mut all = Vec::new();
    let mut refused = Vec::<u8>::new();
    while all.len() < 1000 && refused.try_reserve_exact(1 << 20).is_ok() {
        all.push(std::mem::take(&mut refused));
    }
    assert!(all.len() < 1000);
    drop(all);
    flush();
    work(9);
    // For it to look at what the system says of memory, and to give back all there is.
    assert!(HEAP.0.has_background_thread());
    thread::sleep(std::time::Duration::from_secs(3));
}
