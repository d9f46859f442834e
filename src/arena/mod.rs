//! Arenas: memory with a lifetime of its own, on a heap of pages.
//!
//! ```text
//!                 Arena            Pool             FreeList          ShardedFreeList
//!   sizes         any              any              one               one
//!   freed         all at once,     all at once      one by one        one by one, or when the
//!                 or by scopes                                        last reader has gone
//!                   │                │                │                  │
//!                   └────────────────┴───────┬────────┴──────────────────┘
//!                                         Account      hard limit, statistics
//!                                            │ blocks: whole pages
//!                                         Backing      a heap: lent, owned, shared, the program's, the process's
//! ```
//!
//! An arena takes *blocks* (runs of pages) from a [`Backing`] and cuts them up. All four types share what is defined
//! here: the source of blocks ([`Backing`]), the configuration ([`ArenaConfig`]), the error ([`ArenaError`]) and the
//! statistics ([`ArenaStats`]).
//!
//! Worked: an arena with a limit of 100,000 bytes on pages of 8 KiB may hold 12 pages, 98,304 bytes. The limit applies
//! to the pages taken, however much of them is handed out, and is never exceeded, even for a moment. A request that
//! needs a 13th page gets an [`ArenaError`], which reports how much was requested, how much the limit leaves, and that
//! the limit was the reason.
//!
//! **Cost.** A block costs what a run of pages costs: some 15 ns if the heap has free pages, a system call if it has to
//! grow, and one page fault for each system page when it is first written. All other costs are the arenas' own.
//!
//! **The default heap.** `Arena::new()` and the other constructors without a backing use [`ProcessHeap`], one
//! [`PageHeap`](crate::PageHeap) for all such arenas. It is separate from the program's allocator: limits, statistics
//! and the background thread of a `GlobalHeap` do not cover it. Pages of dropped arenas stay in it for later arenas;
//! they return to the system when its `scavenge` or `tick` is called. To limit an arena, use [`ArenaConfig::limit`].
//!
//! **On the program's heap**, as in `Arena::new_in(&HEAP)` with `static HEAP: GlobalHeap`, what arenas hold counts
//! towards its limits and is in its statistics, and its background thread gives back what they no longer hold. So it is
//! on a [`Heap`](crate::Heap), without such a thread. [`Backing`] says what differs from a block of the program.
//!
//! **Collections.** With the feature `allocator-api2-02` or `allocator-api2-04`, references to arenas, pools, locals,
//! scopes, lists and owners are an `Allocator` of that version of the crate `allocator-api2`, on which the program then
//! depends too (`hashbrown` uses 0.2). A list serves what fits a slot: a `Vec` that grows by `push` doubles, so it is
//! refused, and ends the process, where twice its length does not fit; `with_capacity_in` can have all of the slot.
//!
//! ```
//! # #[cfg(feature = "allocator-api2-02")]
//! # fn main() {
//! # use allocator_api2_02 as allocator_api2;
//! use allocator_api2::vec::Vec;
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let mut words = Vec::new_in(&arena);
//! words.extend("grows in place while it is the last block".split(' '));
//! let words: &mut [&str] = words.leak(); // For as long as the arena is borrowed.
//! assert_eq!(words.len(), 9);
//! # }
//! # #[cfg(not(feature = "allocator-api2-02"))]
//! # fn main() {}
//! ```
//!
//! A `Vec` in a [`Local`] borrows the `Local`, so what it leaks lives only as long as that borrow. For a slice that
//! lives as long as the borrow of the arena, use `alloc_iter`.
//!
//! **What all types guarantee.** They are `Send` and `Sync` if the backing is. They allocate only from the backing.
//! Every failure is a value. All pages go back to the backing when the arena is dropped. Contents are not dropped
//! unless the type says so.
//!
//! # After a fork
//!
//! The child must not use an arena or a list that other threads were using. Each has a lock (to grow, to gather, to
//! lend a shard); its holder may not exist in the child, which would then wait forever. The child may read what is
//! already allocated.
//!
//! It may make new ones: on [`ProcessHeap`], a `GlobalHeap` or a `Heap`, whatever other threads were doing there; on a
//! [`PageHeap`](crate::PageHeap) only if no other thread was using that.

mod process;
mod backing;
mod config;
mod error;
mod stats;
mod account;
mod cursor;
mod lists;
mod slabs;
mod typed;
mod contents;
mod boxed;
mod bump;
mod generation;
mod pool;
mod pieces;
mod local;
mod api2;
mod on_process;
// Free lists: slots by number, then slots in memory, then the two public types.
mod stack;
mod node;
mod controller;
mod hyaline;
mod numbers;
#[allow(clippy::modulo_one, reason = "under a model there is one lane")]
mod shards;
mod free_slots;
mod slots;
mod slot_error;
mod slot_box;
#[doc(hidden)]
pub mod unsize;
mod free_list;
mod sharded;
mod owner;
mod lists_on_process;
#[cfg(doctest)]
mod misuse;

pub use backing::{Backing, Block};
pub use boxed::ArenaBox;
pub use bump::Arena;
pub use config::ArenaConfig;
pub use error::{ArenaError, Reason};
pub use free_list::FreeList;
pub use local::{Local, Scope, ScopeGuard};
pub use owner::{Guard, Owner};
pub use pieces::Checkpoint;
pub use pool::{Handle, Pool, StaleHandle};
pub use process::ProcessHeap;
pub use sharded::ShardedFreeList;
pub use slot_box::{ListHandle, SlotBox, SlotList};
pub use slot_error::SlotError;
pub use stats::ArenaStats;

#[doc(hidden)]
#[cfg(feature = "internals")]
pub mod internals {
    //! The parts, for tests and models.
    pub use super::controller::{Controller, MAX_BATCH};
    pub use super::free_slots::{FreeSlots, Taken as FreeSlot};
    pub use super::hyaline::{Batch, FIRST_ERA, Hyaline, Record};
    pub use super::node::{Extent, LIVE, Node, Nodes};
    pub use super::shards::{Census, FreeAlready, LANES, Pocket, Shard, Shards, Taken};
    pub use super::stack::{Links, NIL, Stack};
}
