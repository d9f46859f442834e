//! What free lists promise, on one thread and on many.

#![cfg(all(any(unix, windows), feature = "std"))]

mod allocators;
mod boxes;
#[path = "../common/child.rs"]
mod child;
mod hammer;
mod misuse;
mod one;
#[path = "../common/random.rs"]
mod random;
mod readers;
#[cfg(any(target_os = "linux", target_os = "android"))]
mod refused;
mod twins;
