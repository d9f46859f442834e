//! What arenas promise, one test each; and random stories, checked against a naive twin.

mod allocators;
mod arena;
mod boxes;
#[path = "../common/child.rs"]
mod child;
#[path = "../common/mod.rs"]
mod common;
#[cfg(unix)]
mod forks;
mod handles;
mod heaps;
mod misuse;
mod pool;
mod promises;
mod rounds;
mod scopes;
mod stories;
mod unmade;
#[path = "../model/blocks.rs"]
mod blocks;
#[path = "../model/arenas.rs"]
mod twins;

use common::bytes;
