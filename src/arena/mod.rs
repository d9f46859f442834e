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
//!                                         Backing      a page heap: lent, owned, shared, or the process's
//! ```
//!
//! An arena takes *blocks* (runs of pages) from a [`Backing`] and cuts them up. What is common to all four is here:
//! where blocks come from ([`Backing`]), how an arena is set up ([`ArenaConfig`]), what it says when it cannot
//! ([`ArenaError`]), what it knows of itself ([`ArenaStats`]).
//!
//! Worked: an arena with a limit of 100,000 bytes on pages of 8 KiB may hold 12 pages, 98,304 bytes: the limit is on
//! pages taken, whatever is handed out of them, and is never exceeded, not for a moment. The request that would need a
//! 13th gets an [`ArenaError`] that says how much was asked for, how much the limit leaves, and that it was the limit.
//!
//! **Cost.** A block costs what a run of pages costs: some 15 ns where pages are at hand, a system call where the heap
//! has to grow, and one page fault for each page of the system's when it is first written. Everything else is in the
//! arenas.
//!
//! **Where pages come from, if nothing is said.** `Arena::new()` and its kin stand on [`ProcessHeap`], a
//! [`PageHeap`](crate::PageHeap) for all of them. It is apart from the program's allocator: limits, statistics and the
//! background thread of a `GlobalHeap` do not cover it. Pages of arenas that are dropped stay with it for the next
//! ones; they go back to the system when its `scavenge` or `tick` is called. [`ArenaConfig::limit`] limits an arena.
//!
//! **What all promise.** `Send` and `Sync` where the backing is; no allocation but from the backing; every failure is a
//! value; all pages go back when the arena is dropped; contents are not dropped unless the type says that it does so.
//!
//! **After a fork** the child must not use an arena or a list that other threads were using: each has a lock (to grow,
//! to gather, to lend a shard), and who held it may not exist there, so that the child would wait for ever. It may read
//! what is allocated. The same is true of the heap beneath, [`ProcessHeap`] included: a new arena waits as well if it
//! stands on a heap that another thread was growing.

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
// Free lists: numbers of slots, then slots in memory, then the two types.
mod stack;
mod node;
mod controller;
mod hyaline;
#[allow(clippy::modulo_one, reason = "under a model there is one lane")]
mod shards;
mod free_slots;
mod slots;
mod slot_error;
mod slot_box;
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
pub use local::{Local, Scope};
pub use owner::{Guard, Owner};
pub use pieces::Checkpoint;
pub use pool::{Handle, Pool, StaleHandle};
pub use process::ProcessHeap;
pub use sharded::ShardedFreeList;
pub use slot_box::{SlotBox, SlotList};
pub use slot_error::SlotError;
pub use stats::ArenaStats;

#[doc(hidden)]
#[cfg(feature = "internals")]
pub mod internals {
    //! The parts, for tests and models.
    pub use super::controller::{Controller, MAX_BATCH};
    pub use super::free_slots::{FreeSlots, Taken as FreeSlot};
    pub use super::hyaline::{Batch, FIRST_ERA, Hyaline, Record};
    pub use super::node::{LIVE, Node, Nodes};
    pub use super::shards::{Census, FreeAlready, LANES, Pocket, Shard, Shards, Taken};
    pub use super::stack::{Links, NIL, Stack};
}
