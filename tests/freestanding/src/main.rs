//! A program with neither std nor libc: a page heap, and a global allocator, over arrays of its own.
//!
//! It checks itself and says so; any failure is a panic, exit code 101. `.ci/run` builds it and runs it.

#![no_std]
#![no_main]
#![no_builtins]

mod memory;
mod system;

use core::fmt::Write;
use core::mem::MaybeUninit;

use pageheap::source::Region;
use pageheap::{Config, PageCount, PageHeap};

const BYTES: usize = 4 << 20;

/// Page-aligned bytes.
#[repr(align(8192))]
#[allow(dead_code)] // Reached by address only.
struct Bytes([MaybeUninit<u8>; BYTES]);

static mut PAGES: Bytes = Bytes([MaybeUninit::uninit(); BYTES]);

fn main() {
    page_heap();
    let _ = writeln!(system::Output, "freestanding: ok");
}

/// Every page of the region can be had, written, and had again.
fn page_heap() {
    // SAFETY: called once, and the only mention of PAGES; bytes that live as long as the program.
    let region = unsafe { Region::new((&raw mut PAGES).cast(), BYTES) };
    let heap: PageHeap<Region> =
        PageHeap::new(region, Config::new(BYTES)).expect("four megabytes are enough for a heap");
    let mut runs = [None; BYTES >> 13];
    for round in 1..=2 {
        let mut taken = 0;
        while let Some(run) = heap.allocate(PageCount(1 + taken % 3)) {
            let pointer = heap.pointer(run).cast::<u8>();
            // SAFETY: the run is ours, and its pages are the region's bytes.
            unsafe { pointer.write_bytes(round, run.pages().0 << 13) };
            runs[taken] = Some(run);
            taken += 1;
        }
        assert!(taken > 200, "half of the region at least is pages");
        for run in &mut runs[..taken] {
            let run = run.take().expect("it was allocated");
            // SAFETY: the run is ours, written above.
            let first = unsafe { heap.pointer(run).cast::<u8>().read() };
            assert!(first == round, "pages of two runs overlap");
            // SAFETY: ours, and not used any more.
            unsafe { heap.free(run) };
        }
        assert!(heap.stats().in_use == PageCount::ZERO, "all pages came back");
    }
}
