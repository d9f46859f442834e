//! A block that comes back with the mark of a free slot: freed twice, or unlucky?
//!
//! ```text
//!   marked ── as in a magazine or batch? ── in this thread's magazine, or in store ──▶ ends the process
//!      │               │                    elsewhere ──▶ stays where it is: another thread's magazine, as a rule
//!      │       as on a span's list? ── on the list of its span ──▶ ends the process
//!      └────── neither, or not there ──▶ a block like any other, that begins with such bytes
//! ```
//!
//! The fast path of freeing looks at two bytes ([`Mark`]) and comes here if they are ones. Most that come are blocks
//! whose first word is a small negative number: they go on their way, ~20 ns later. A link to a slot of the same class
//! is no program's: then the block is looked for. Where it is not found another thread has it in hand, whose magazines
//! nobody may read; the block is not taken in again, and so cannot be handed out twice.
//!
//! What is not found: a block that was written to after it was freed, in its first word; one that was handed out again
//! before it came back the second time.
//!
//! That a block is left alone by mistake takes a first word that the program never wrote, but copied from memory it
//! never wrote to either, and that was a slot of the same class in its time. Then one block is lost. (Large blocks have
//! their first word wiped, so `realloc` does not bring it about.)

#![forbid(unsafe_code)]

use core::ptr::NonNull;

use crate::fatal;
use crate::source::Source;

use super::magazine::Mark;
use super::size_class::SizeClass;
use super::{Objects, Thread};

impl<S: Source + 'static> Objects<S> {
    /// Whether the block, which comes back with this mark, is free and to be left where it is. Aborts if it is found.
    #[cold]
    pub(super) fn is_free_already(&self, thread: &Thread, memory: NonNull<u8>, class: SizeClass, mark: Mark) -> bool {
        let Some((span, slot)) = self.spans.slot_of(class, memory.addr().get()) else {
            // Not one of the class: to be found out where all such are.
            return false;
        };
        let central = self.central(class);
        let is_linked = |next| next == 0 || self.spans.slot_of(class, next).is_some();
        let in_hand = mark.address().is_some_and(is_linked);
        let found = if in_hand {
            thread.magazine(class).has(memory, class) || central.has_stored(&self.spans, class, memory)
        } else {
            mark.number().is_some_and(|link| link <= class.slots())
                && central.has_listed(&self.spans, class, span, slot)
        };
        if found {
            fatal::abort(
                "a block was freed twice; its address, its size class",
                memory.addr().get(),
                class.bytes(),
            );
        }
        in_hand
    }
}
