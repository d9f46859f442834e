//! A block that comes back with a link in its first word, as free slots have it (`mark.rs`): freed twice, or by chance?
//!
//! ```text
//!   no slot of its class begins there ───────────────────────────────────────────▶ ends the process
//!   a link as in a magazine ── in this thread's, or among its last in store ─────▶ ends the process
//!      │                       elsewhere: in another thread's hands, as a rule ──▶ stays where it is
//!   that, or a number as on its span's list ── home, in its span ────────────────▶ ends the process
//!   nothing of this ─────────────────────────────────────────────────────────────▶ a block like any other
//! ```
//!
//! Magazines of other threads may not be read; a block that is in one is not taken in again, and so not handed out
//! twice. Should it have been a block like any other after all, it is lost. That takes eight bytes that make the
//! address of a slot of the same class under a key that the program does not know: in a heap of 1 GiB once in 2⁴⁰ frees
//! of random bytes.
//!
//! What is not found: a block that was written to after it was freed, in its first word; one that was handed out again
//! before it came back the second time. Who wants those found too builds with the feature `checks`.

#![forbid(unsafe_code)]

use core::ptr::NonNull;

use crate::fatal;
use crate::source::Source;

use super::size_class::SizeClass;
use super::{Objects, Thread};

impl<S: Source + 'static> Objects<S> {
    /// Whether the block, which comes back with this link, is free and to be left where it is. Aborts if it is found to
    /// be free, or is none.
    #[cold]
    pub(super) fn is_free_already(&self, thread: &Thread, memory: NonNull<u8>, class: SizeClass, link: usize) -> bool {
        // Aborts if no slot of the class begins there.
        let (span, slot) = self.spans.locate(class, memory.as_ptr());
        let central = self.central(class);
        let in_hand = link == 0 || self.spans.slot_of(class, link).is_some();
        let in_hand_here = in_hand
            && (thread.magazine(class).has(memory, class)
                || central.has_stored_lately(&self.spans, class, memory, thread.hint()));
        let at_home =
            (in_hand || link <= class.slots() as usize) && central.has_at_home(&self.spans, class, span, slot);
        if in_hand_here || at_home {
            fatal::abort(
                "a block was freed twice; its address, its size class",
                memory.addr().get(),
                class.bytes(),
            );
        }
        in_hand
    }
}
