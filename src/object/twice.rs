//! A block that comes back with a mark in its first word, as free slots have it (`mark.rs`): freed twice, or by chance?
//! One with a flag (`spans.rs`), of more than 1 KiB, is free.
//!
//! ```text
//!   no slot of its class begins there ───────────────────────────────────────────▶ ends the process
//!   a flag ──────────────────────────────────────────────────────────────────────▶ ends the process
//!   a mark ── in this thread's magazine, or among the last in store ─────────────▶ ends the process
//!      │      home, in its span ─────────────────────────────────────────────────▶ ends the process
//!      │      elsewhere: in another thread's hands ──────────────────────────────▶ stays where it is
//!   no mark after all ───────────────────────────────────────────────────────────▶ a block like any other
//! ```
//!
//! Magazines of other threads may not be read; a block that is in one is not taken in again, and so not handed out
//! twice. Should it have been a block like any other after all, it is lost. That takes eight bytes that make a small
//! number under a key that the program does not know: once in 2⁵⁴ frees of random bytes (in 2³² where pointers have 32
//! bits, below 64 bytes in 2²²).
//!
//! What is not found: a block that was handed out again before it came back the second time; one of up to 1 KiB that
//! was written to after it was freed, in its first word, or whose memory went back to the system in between, mark and
//! all, and whose span was cut anew. Who wants those found too builds with the feature `checks`.

#![forbid(unsafe_code)]

use core::ptr::NonNull;

use crate::fatal;
use crate::source::Source;

use super::size_class::SizeClass;
use super::span::is_mapped;
use super::{Objects, Thread};

/// Whether a slot of the class whose word makes this number may have a mark there: in a magazine, or on its span's
/// list, if there are such; out of that into a magazine it comes as it is.
pub(super) fn is_a_mark(class: SizeClass, number: usize) -> bool {
    let most = if is_mapped(class) { 0 } else { class.slots() };
    number <= most as usize
}

impl<S: Source + 'static> Objects<S> {
    /// Whether the block, whose word makes this number, is free and to be left where it is. Aborts if it is found to be
    /// free, or is none.
    #[cold]
    pub(super) fn is_free_already(
        &self,
        thread: &Thread,
        memory: NonNull<u8>,
        class: SizeClass,
        number: usize,
    ) -> bool {
        // Aborts if no slot of the class begins there.
        let (span, slot) = self.spans.locate(class, memory.as_ptr());
        if !is_a_mark(class, number) {
            return false;
        }
        let central = self.central(class);
        if class.is_flagged()
            || thread.magazine(class).has(memory, class)
            || central.has_stored_lately(&self.spans, class, memory.as_ptr(), thread.hint())
            || central.has_at_home(&self.spans, class, span, slot)
        {
            fatal::abort(
                "a block was freed twice; its address, its size class",
                memory.addr().get(),
                class.bytes(),
            );
        }
        true
    }
}
