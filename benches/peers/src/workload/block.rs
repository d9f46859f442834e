//! A block from the program's allocator, owned: the only unsafe code of the workloads.
//!
//! A workload that freed a block without using it would measure nothing: the compiler may remove both calls. So a new
//! block has its first and its last byte written, and its address is passed to `black_box`.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error, realloc};
use std::hint::black_box;
use std::ptr::NonNull;

/// The alignment of every block: that of a `u64`, as for most blocks of a Rust program. No block is shorter, as no type
/// is: some allocators go a longer way for what is aligned beyond its size.
pub const ALIGN: usize = 8;

/// A block of at least [`ALIGN`] bytes.
#[derive(Debug)]
pub struct Block {
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: a block is memory that nobody else accesses.
unsafe impl Send for Block {}

fn layout(size: usize) -> Layout {
    debug_assert!(size >= ALIGN);
    // SAFETY: 8 is a power of two, and no workload asks for more than a few hundred MiB.
    unsafe { Layout::from_size_align_unchecked(size, ALIGN) }
}

impl Block {
    #[inline]
    pub fn new(size: usize) -> Self {
        // SAFETY: more than zero bytes.
        let start = unsafe { alloc(layout(size)) };
        let block = Self::made(start, size);
        block.touch(0);
        block.touch(size - 1);
        block
    }

    /// Not touched: `zeroed` workloads measure whether its pages are.
    #[inline]
    pub fn zeroed(size: usize) -> Self {
        // SAFETY: more than zero bytes.
        let start = unsafe { alloc_zeroed(layout(size)) };
        Self::made(start, size)
    }

    #[inline]
    fn made(start: *mut u8, size: usize) -> Self {
        match NonNull::new(black_box(start)) {
            Some(start) => Self { start, size },
            None => handle_alloc_error(layout(size)),
        }
    }

    /// Resizes the block as `Vec` does, keeping its contents.
    #[inline]
    pub fn resize(&mut self, size: usize) {
        // SAFETY: ours, with the layout it has; more than zero bytes.
        let start = unsafe { realloc(self.start.as_ptr(), layout(self.size), size) };
        match NonNull::new(black_box(start)) {
            Some(start) => (self.start, self.size) = (start, size),
            None => handle_alloc_error(layout(size)),
        }
        self.touch(size - 1);
    }

    /// Writes one byte.
    #[inline]
    pub fn touch(&self, at: usize) {
        debug_assert!(at < self.size);
        // SAFETY: inside the block, which this thread owns.
        unsafe { self.start.as_ptr().add(at).write_volatile(at as u8) }
    }

    /// Writes all of it, or its first `most` bytes.
    #[inline]
    pub fn fill(&self, byte: u8, most: usize) {
        // SAFETY: as in `touch`.
        unsafe { self.start.as_ptr().write_bytes(byte, self.size.min(most)) };
        black_box(self.start);
    }

    /// Whether the byte is zero.
    #[inline]
    pub fn is_zero(&self, at: usize) -> bool {
        debug_assert!(at < self.size);
        // SAFETY: as in `touch`; only for blocks made by `zeroed`, or bytes written.
        unsafe { self.start.as_ptr().add(at).read_volatile() == 0 }
    }

    pub fn size(&self) -> usize {
        self.size
    }
}

impl Drop for Block {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: ours, with its layout, and not used after this.
        unsafe { dealloc(self.start.as_ptr(), layout(self.size)) }
    }
}
