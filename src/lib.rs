//! The Go page allocator as a Rust crate; this root is a placeholder while the sources of memory are written.
#![no_std]

#[cfg(feature = "std")]
extern crate std;

pub mod source;
