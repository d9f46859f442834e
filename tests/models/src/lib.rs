//! Models: the concurrent parts of `pageheap`, the code that ships, under a checker that decides who goes when.
//!
//! ```text
//!   loom      every interleaving up to some number of preemptions, and every value the memory model lets a load see;
//!             two or three threads, one or two operations each, one question to a test
//!   shuttle   thousands of random schedules of larger programs; sequentially consistent
//! ```
//!
//! The name of a test is the answer to its question. What shrinks is the geometry (two words to a chunk, two children
//! to a node) and how many pages are free, nothing else. Every test ends in [`World::finish`](world::World::finish)
//! or its like: all invariants, no page lost or made. `loom::negative` holds small copies of protocols that look
//! right and are not; they must fail.
//!
//! How to run them: `README.md`. Without `--cfg loom` or `--cfg shuttle` there is nothing here.

#![cfg(all(test, any(loom, shuttle)))]

#[cfg(not(debug_assertions))]
compile_error!("models without debug assertions miss half of what they are for: use --profile model");

mod hand;
#[cfg(loom)]
mod loom;
#[cfg(all(shuttle, not(loom)))]
mod shuttle;
