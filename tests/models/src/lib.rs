//! Models: the shipped concurrent parts of `pageheap` under a checker that decides how threads interleave.
//!
//! ```text
//!   loom      every interleaving up to some number of preemptions, and every value the memory model lets a load see;
//!             two or three threads, one or two operations each, one question to a test
//!   shuttle   thousands of random schedules of larger programs; sequentially consistent
//! ```
//!
//! Each file asks a question; the names of its tests are the answers. Only the geometry shrinks (two words to a chunk,
//! two children to a node) and the number of free pages. Every test ends in [`World::finish`](world::World::finish) or
//! its like: all invariants hold, and no page is lost or duplicated. `loom::negative` holds small copies of protocols
//! that look right and are not; they must fail.
//!
//! How to run them: `README.md`. Without `--cfg loom` or `--cfg shuttle` this crate is empty.

#![cfg(all(test, any(loom, shuttle)))]

#[cfg(not(debug_assertions))]
compile_error!("models without debug assertions miss half of what they are for: use --profile model");

mod hand;
#[cfg(loom)]
mod loom;
#[cfg(all(shuttle, not(loom)))]
mod shuttle;
