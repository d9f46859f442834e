//! The Go page allocator as a Rust crate: runs of pages from one reserved range, lock-free, over memory from anywhere.
//!
//! A [`PageHeap`] hands out runs of any number of pages, at any alignment, to any thread. Its pages come from a
//! [`Source`](source::Source): the operating system, bytes that the caller owns, or numbers without any memory behind
//! them. The heap never reads or writes the pages it manages, so they may be anything that can be counted.
//!
//! ```
//! # #[cfg(all(any(unix, windows), feature = "std"))] {
//! use pageheap::source::System;
//! use pageheap::{Config, PageCount, PageHeap};
//!
//! let heap = PageHeap::new(System, Config::new(1 << 30)).unwrap();
//! let run = heap.allocate(PageCount(3)).unwrap();
//! let bytes = heap.pointer(run);
//! assert_eq!(bytes.len(), 3 * 8192);
//! // SAFETY: the run is ours, and nothing uses it any more.
//! unsafe { heap.free(run) };
//! # }
//! ```
//!
//! # Which type to use
//!
//! | you want | type | gives memory back | limit in |
//! |---|---|---|---|
//! | the program's allocator | [`GlobalHeap`] | by itself, if made by `new()`; else by `tick`, `release` | bytes |
//! | an allocator that is dropped as a whole | [`Heap`] | by `tick`, `release`, or when dropped | pages |
//! | runs of pages | [`PageHeap`], [`Cache`] | by `tick`, `release`, or when dropped | pages |
//! | values that go together | [`arena::Arena`], [`arena::Pool`] | to the heap below, when dropped | bytes |
//! | slots of one size | [`arena::FreeList`], [`arena::ShardedFreeList`] | to the heap below, when dropped | bytes |
//!
//! A page is 8 KiB, [`Geometry::PAGE_BYTES`], unless the heap's shape says otherwise; [`PageCount::holding`] converts
//! bytes to pages, [`PageCount::bytes`] pages to bytes, and [`Config::limit_bytes`] takes a limit in bytes. Arenas take
//! their pages from [`arena::ProcessHeap`] unless they are given another heap (`Arena::new_in(&HEAP)`). The process's
//! heap is separate from the program's `GlobalHeap`, and gives nothing back to the system by itself.
//!
//! # Giving memory back
//!
//! Free memory stays with a heap until one of these is called:
//!
//! * **`tick(clock)`** gives back what the program has not needed for ten seconds, and all free memory once the program
//!   is idle. It works in steps of about a millisecond and uses 1 % of the time. Call it in a loop, and between calls
//!   wait for as long as it returns, but no longer than a second or so: `Duration::MAX` means that there is nothing
//!   left to do until memory is freed again, and nothing will wake the loop then ([`GlobalHeap::tick`] has the loop).
//!   The background thread of a `GlobalHeap` does this by itself, and is woken.
//! * **`scavenge(pages)`** gives back free pages now, on the calling thread, including those in the size classes'
//!   stores, and the memory between live blocks of more than 1 KiB (not with `release_lazily`, nor on Windows), but not
//!   what threads cache for themselves. (In a `Heap`, whose threads share what it caches, that goes back too, unless
//!   another thread holds the lock of it.)
//! * **`release(…)`** gives back all of that now, and also what threads and caches keep, even those of sleeping threads
//!   (where the system has a fence through all threads: Linux and Windows, but not Wine).
//!
//! With [`Config::release_lazily`], memory that `tick` and `scavenge` give back may stay resident until the system is
//! short of memory; memory that `release` gives back never does. A `PageHeap` has neither stores nor magazines, only
//! pages and caches. Memory that running threads are working on at that moment stays, and so do each live thread's
//! tables for free blocks, 8 to 170 KiB.
//!
//! # How it works, in brief
//!
//! One bit for each page says whether it is free, and one read-modify-write on a word of 64 such bits decides every
//! operation within it. A tree of summaries says where to look: for each region, the free pages at its start, in its
//! longest run, and at its end. The tree is only advice and corrects itself; pages are claimed on the bits. A [`Cache`]
//! owns one word and serves small requests from it without atomic read-modify-writes. Locks are only for rare
//! operations: growing the heap, lending caches, giving memory back.
//!
//! `ARCHITECTURE.md` in the repository follows one allocation down and up; each source file opens with its own story.
//!
//! # Features
//!
//! | feature | default | gives |
//! |---|---|---|
//! | `std` | yes | the operating system as a source, waiting on a futex instead of spinning |
//! | `checks` | no | a seal on every block of an object heap: misuse aborts the process with a message |
//! | `allocator-api2-02`, `-04` | no | `Allocator` of that version of `allocator-api2`: arenas, lists, heaps |
//! | `rust-dylib` | no | `thread_local!` for a thread's structure on all targets: if the crate is in a Rust `dylib` |
//!
//! Without `std` the crate is `no_std` and never allocates. It always needs 64-bit atomics.

#![no_std]
#![cfg_attr(docsrs, feature(doc_cfg))]
// Dead code is looked for in one build, in which everything has a use: that of the tests on Linux. Without `internals`
// nothing calls what only tests, models and benches need; other targets and features leave out more.
#![cfg_attr(
    not(all(
        target_arch = "x86_64",
        target_os = "linux",
        target_env = "gnu",
        feature = "internals",
        feature = "std",
        not(any(feature = "checks", feature = "rust-dylib"))
    )),
    allow(dead_code, unused_imports)
)]

// Tests need it where the crate does without.
#[cfg(any(feature = "std", test))]
extern crate std;

#[cfg(not(target_has_atomic = "64"))]
compile_error!("pageheap needs 64-bit atomics, which this target does not have");

// Reading order is import order: a module uses only modules above it (`tests/tidy.rs` checks that).

// Words.
mod geometry;
mod units;
mod summary;

// Ground.
mod fatal;
mod unindexed;
mod in_place;
mod sync;
pub mod source;

// Pages.
mod bitmap;
mod hints;
mod radix;
mod free_set;
mod check;
mod cache;
mod scavenge;
mod metadata;
mod heap;
mod picture;

// Arenas.
pub mod arena;

// Objects.
#[cfg_attr(
    any(all(loom, feature = "internals"), all(shuttle, feature = "internals")),
    allow(dead_code, reason = "models have slots, but no blocks")
)]
mod guard;
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
mod object;
#[cfg(any(all(loom, feature = "internals"), all(shuttle, feature = "internals")))]
#[path = "object/model.rs"]
#[doc(hidden)]
pub mod object;

// Doors.
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
mod global;
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
mod instance;
#[doc(hidden)]
#[cfg(feature = "internals")]
pub mod internals;

pub use check::Fault;
pub use geometry::{Geometry, Shape};
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
pub use global::GlobalHeap;
pub use heap::{
    Allocation, Cache, Calls, Clock, Config, Figure, FreeError, MapEntry, NewHeapError, PageHeap, PageUse, Stats,
};
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
pub use instance::Heap;
#[cfg(all(
    feature = "std",
    not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals")))
))]
pub use instance::SharedHeap;
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
pub use object::{ClassStats, GlobalStats, ObjectFault, Snapshot};
pub use picture::{Film, Picture};
pub use scavenge::pressure::Pressure;
pub use source::HugePages;
pub use units::{PageCount, PageIndex, PageRun};

/// The README's examples, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
