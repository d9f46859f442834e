//! Resizing large blocks.

use std::alloc::{GlobalAlloc, Layout};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::SeqCst};

use pageheap::GlobalHeap;

use super::child;

const MIB: usize = 1 << 20;

/// A part of the block that the copy stops at.
const BYTES: usize = 64 << 10;

static PART: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
static STOPPED: AtomicBool = AtomicBool::new(false);
static SERVED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_fault(_: libc::c_int) {
    STOPPED.store(true, SeqCst);
    while !SERVED.load(SeqCst) {
        std::thread::yield_now();
    }
    protect(libc::PROT_READ | libc::PROT_WRITE);
}

fn protect(how: libc::c_int) {
    // SAFETY: within a live block.
    assert_eq!(unsafe { libc::mprotect(PART.load(SeqCst).cast(), BYTES, how) }, 0);
}

/// A thread copied the contents of a block that it resized while its structure was in use, for as long as that took.
/// Others, who need what lies on its shelf, wait some 30 ms for it, and were refused. (Here the copy takes as long as
/// it likes: part of the block cannot be read until the other is done.)
#[test]
#[cfg_attr(feature = "checks", ignore = "a freed block is kept back for a while")]
fn nobody_is_refused_while_a_large_block_is_copied() {
    static HEAP: GlobalHeap = GlobalHeap::new().reserve(1 << 30).limit(256 * MIB).background(false);
    let test = "realloc::nobody_is_refused_while_a_large_block_is_copied";
    if !child::is_of(test) {
        return child::runs(test);
    }
    let layout = |bytes| Layout::from_size_align(bytes, 8).unwrap();
    // SAFETY: no layout has size zero; blocks are freed with theirs.
    let alloc = |bytes| unsafe { HEAP.alloc(layout(bytes)) };
    // SAFETY: as above.
    let free = |block, bytes| unsafe { HEAP.dealloc(block, layout(bytes)) };
    let large = alloc(8 * MIB);
    let [_behind, gap] = [MIB, 9 * MIB].map(alloc);
    let runs = [(); 20].map(|()| alloc(MIB));
    for bytes in [MIB, BYTES] {
        while !alloc(bytes).is_null() {}
    }
    runs.into_iter().for_each(|run| free(run, MIB));
    assert_eq!(HEAP.stats().shelf_pages.bytes(13), 20 * MIB);
    free(gap, 9 * MIB);

    PART.store(large.map_addr(|at| (at + MIB).next_multiple_of(BYTES)), SeqCst);
    // SAFETY: a handler that uses atomics and system calls.
    unsafe { libc::signal(libc::SIGSEGV, on_fault as *const () as libc::sighandler_t) };
    protect(libc::PROT_NONE);
    let (moved, served) = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            while !STOPPED.load(SeqCst) {
                std::thread::yield_now();
            }
            let served = !alloc(20 * MIB).is_null();
            SERVED.store(true, SeqCst);
            served
        });
        // SAFETY: a live block of this layout.
        let moved = unsafe { HEAP.realloc(large, layout(8 * MIB), 8 * MIB + 1) };
        (moved, other.join().unwrap())
    });
    assert!(!moved.is_null() && moved != large && served, "{}", HEAP.stats());
}
