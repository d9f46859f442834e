//! Double frees: what happens when a freed block bears a mark in its first word, as free slots do (`mark.rs`). It may
//! be an accident; a block of more than 1 KiB whose flag is up (`spans.rs`) is certainly free.
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
//! Other threads' magazines may not be read. A marked block that may lie in one is not taken in again, and so is never
//! handed out twice. If it was an ordinary block after all, it is lost. For that, its first eight bytes must be its
//! address under a key that the program does not know: once in 2⁶⁴ frees of random bytes (in 2³² with 32-bit pointers).
//!
//! Not detected: a block that was handed out again before its second free; and, up to 1 KiB, a block whose first word
//! was written to after it was freed, or whose memory went back to the system meanwhile, mark and all, and whose span
//! was cut anew. To detect these too, build with the feature `checks`.

#![forbid(unsafe_code)]

use core::ptr::NonNull;

use crate::fatal::{self, Number};
use crate::source::Source;

use super::size_class::SizeClass;
use super::{Objects, Thread};

impl<S: Source + 'static> Objects<S> {
    /// For a freed block that bears a mark: returns if it must be left where it is. Aborts if it is found to be free,
    /// or not to be a slot of the class.
    #[cold]
    pub(super) fn leave_marked(&self, thread: &Thread, memory: NonNull<u8>, class: SizeClass) {
        // Aborts if no slot of the class begins there.
        let (span, slot) = self.spans.locate(class, memory.as_ptr());
        if thread.magazine(class).has(memory, class)
            || self.spans.has_stored_lately(class, memory.as_ptr(), thread.hint())
            || self.central(class).has_at_home(&self.spans, class, span, slot)
        {
            twice(memory, class);
        }
    }

    /// Aborts for a freed block whose flag is up.
    #[cold]
    pub(super) fn abort_flagged(&self, memory: NonNull<u8>, class: SizeClass) -> ! {
        // Aborts if no slot of the class begins there.
        self.spans.locate(class, memory.as_ptr());
        twice(memory, class)
    }
}

fn twice(memory: NonNull<u8>, class: SizeClass) -> ! {
    fatal::abort(
        "a block was freed twice; its address, its size class",
        Number::Address(memory.addr().get()),
        Number::Count(class.bytes()),
    )
}
