//! The build that ships: blocks are what the heap hands out, and this layer adds nothing. Same shape as `sealed`.

use core::alloc::Layout;
use core::ptr::NonNull;

use super::Plain;

/// How many bytes of a block the program may use: all there are.
pub const fn usable_size(_layout: Layout, plain: usize) -> usize {
    plain
}

/// A slot of so many bytes leaves its span.
///
/// # Safety
///
/// It belongs to the caller, and has memory.
#[inline(always)]
pub const unsafe fn begin(_slot: *mut u8, _bytes: usize) {}

/// Allocates memory for `layout`, all zero if requested.
#[inline(always)]
pub fn allocate<P: Plain>(heap: &P, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
    heap.take(layout, zeroed)
}

/// Frees memory.
///
/// # Safety
///
/// As for [`Plain::give`].
#[inline(always)]
pub unsafe fn free<P: Plain>(heap: &P, memory: NonNull<u8>, layout: Layout) {
    // SAFETY: the caller's promise.
    unsafe { heap.give(memory, layout) };
}

/// Resizes a block to `size` bytes.
///
/// # Safety
///
/// As for [`Plain::resize`].
#[inline(always)]
pub unsafe fn resize<P: Plain>(heap: &P, memory: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>> {
    // SAFETY: the caller's promise.
    unsafe { heap.resize(memory, layout, size) }
}
