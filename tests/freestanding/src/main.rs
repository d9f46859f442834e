//! A program with neither std nor libc: a page heap, and a global allocator, over arrays of its own.
//!
//! It checks itself and says so; any failure is a panic, exit code 101. `.ci/run` builds it and runs it.

#![no_std]
#![no_main]
#![no_builtins]

extern crate alloc;

mod memory;
mod system;

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Write;
use core::mem::MaybeUninit;

use pageheap::source::Region;
use pageheap::{Config, GlobalHeap, PageCount, PageHeap};

const BYTES: usize = 4 << 20;

/// Page-aligned bytes.
#[repr(align(8192))]
#[allow(dead_code)] // Reached by address only.
struct Bytes([MaybeUninit<u8>; BYTES]);

static mut PAGES: Bytes = Bytes([MaybeUninit::uninit(); BYTES]);

static mut OBJECTS: Bytes = Bytes([MaybeUninit::uninit(); BYTES]);

// SAFETY: the only mention of OBJECTS; bytes that live as long as the program.
#[global_allocator]
static HEAP: GlobalHeap<Region> = GlobalHeap::in_region(unsafe { Region::new((&raw mut OBJECTS).cast(), BYTES) });

fn main() {
    page_heap();
    collections();
    assert!(HEAP.check().is_ok(), "the global heap's books are right");
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

/// What `alloc` offers, on the global heap.
fn collections() {
    let boxes: Vec<Box<u64>> = (0..1000).map(Box::new).collect();
    assert!(
        boxes.iter().map(|boxed| **boxed).sum::<u64>() == 499_500,
        "boxes keep what they hold"
    );
    let mut map = BTreeMap::new();
    for key in (0..2000_u32).rev() {
        let mut value = String::new();
        write!(value, "value {key}").expect("a string can be written to");
        map.insert(key, value);
    }
    assert!(
        map.get(&1234).is_some_and(|value| value == "value 1234"),
        "a map finds what it was given"
    );
    map.retain(|key, _| key % 3 == 0);
    assert!(map.len() == 667, "a map forgets what it was told to");
    let mut bytes = Vec::new();
    for round in 0..1_000_000_u32 {
        bytes.push(round as u8);
    }
    assert!(
        bytes
            .iter()
            .rev()
            .step_by(256)
            .all(|&byte| byte == bytes[bytes.len() - 1]),
        "a vector grows by moving"
    );
    let mut more: Vec<u8> = Vec::new();
    assert!(
        more.try_reserve_exact(2 * BYTES).is_err(),
        "what there is no room for is refused"
    );
}
