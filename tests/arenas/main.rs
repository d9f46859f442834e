//! The promises of arenas, one test each; and stories told by chance, beside a naive twin.

mod allocators;
mod arena;
mod pool;
mod promises;
mod stories;
#[allow(dead_code, reason = "some of it is for lists")]
#[path = "../model/blocks.rs"]
mod blocks;
#[path = "../model/arenas.rs"]
mod twins;
