//! A library with an allocator of its own, to be loaded and unloaded by `tests/global_process/libraries.rs`.

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use pageheap::source::System;
use pageheap::{Config, GlobalHeap, Heap, Pressure};

#[path = "../common/bytes.rs"]
mod bytes;

use bytes::all_are;

#[global_allocator]
static HEAP: GlobalHeap = GlobalHeap::new();

/// Allocates, verifies and frees blocks of all sizes; any thread may call it. Returns whether each block kept its
/// contents.
#[unsafe(no_mangle)]
pub extern "C" fn plugin_work(seed: usize) -> bool {
    let mut kept: Vec<Vec<u8>> = Vec::new();
    for number in 0..100_usize {
        let size = (seed * 7919 + number * 104_729) % [100, 1000, 8_000, 60_000][number % 4] + 1;
        kept.push(vec![number as u8; size]);
        if number % 3 == 0 {
            let block = kept.swap_remove(number * 31 % kept.len());
            if !all_are(&block, block[0]) {
                return false;
            }
        }
    }
    black_box(kept).iter().all(|block| all_are(block, block[0]))
}

/// A block of 100 bytes with the value `byte`, which the library never frees.
#[unsafe(no_mangle)]
pub extern "C" fn plugin_give(byte: u8) -> *const u8 {
    let layout = Layout::new::<[u8; 100]>();
    // SAFETY: the write is inside the block, if there is one.
    unsafe {
        let block = HEAP.alloc(layout);
        if !block.is_null() {
            block.write_bytes(byte, 100);
        }
        block
    }
}

/// A heap whose thread reports pressure every second.
static TOLD: GlobalHeap = GlobalHeap::new().on_pressure(0, hook);

/// How often it has reported.
static TIMES: AtomicUsize = AtomicUsize::new(0);

/// Takes its time, then opens and closes a heap.
fn hook(_: Pressure) {
    TIMES.fetch_add(1, Ordering::Relaxed);
    thread::sleep(Duration::from_millis(200));
    drop(Heap::new(System, Config::new(1 << 26)));
}

/// Frees enough that the heap above starts its thread. Returns how often that has reported.
#[unsafe(no_mangle)]
pub extern "C" fn plugin_told() -> usize {
    let layout = Layout::new::<[u8; 4 << 20]>();
    // SAFETY: allocated, if at all, with the layout it is freed with, and not used.
    unsafe {
        let block = TOLD.alloc(layout);
        if !block.is_null() {
            TOLD.dealloc(block, layout);
        }
    }
    TIMES.load(Ordering::Relaxed)
}

// Not in the libc crate.
unsafe extern "C" {
    fn __cxa_atexit(end: extern "C" fn(*mut c_void), argument: *mut c_void, library: *mut c_void) -> c_int;
}

#[used]
// SAFETY: the section is a list of functions that the loader calls one by one.
#[unsafe(link_section = ".init_array")]
static EARLY: extern "C" fn() = early;

#[used]
// SAFETY: as above.
#[unsafe(link_section = ".fini_array")]
static LATE: extern "C" fn() = late;

/// If `PAGEHEAP_TEST_LATE` is set: after the allocator has learned of the end, frees enough that the heap wants a
/// thread.
extern "C" fn late() {
    // SAFETY: the string ends with zero.
    if unsafe { !libc::getenv(c"PAGEHEAP_TEST_LATE".as_ptr()).is_null() } {
        (0..2).for_each(|_| drop(black_box(vec![1_u8; 4 << 20])));
    }
}

/// If `PAGEHEAP_TEST_OWN` is set: uses the heap before the allocator's own constructor has run. If
/// `PAGEHEAP_TEST_EARLY` is set: makes the copy of this library that follows in load order work before `main`, and lets
/// the process end a little later than it would.
extern "C" fn early() {
    extern "C" fn linger(_: *mut c_void) {
        // SAFETY: no preconditions.
        unsafe { libc::usleep(300_000) };
    }
    // SAFETY: strings end with zero; the function has this type; `linger` stays until the process has ended, since the
    // library was loaded at its start.
    unsafe {
        if !libc::getenv(c"PAGEHEAP_TEST_OWN".as_ptr()).is_null() {
            black_box(plugin_give(1));
        }
        if libc::getenv(c"PAGEHEAP_TEST_EARLY".as_ptr()).is_null() {
            return;
        }
        let work = libc::dlsym(libc::RTLD_NEXT, c"plugin_work".as_ptr());
        if !work.is_null() {
            std::mem::transmute::<*mut c_void, extern "C" fn(usize) -> bool>(work)(1);
            // Registered for no library: it runs not when a library ends but when the process does, after everything
            // registered later.
            __cxa_atexit(linger, std::ptr::null_mut(), std::ptr::null_mut());
        }
    }
}
