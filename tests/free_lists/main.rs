//! Free lists: what they promise, alone and under many threads.

#![cfg(all(unix, feature = "std"))]

mod allocators;
mod hammer;
mod one;
mod readers;
mod twins;
