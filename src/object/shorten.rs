//! Shortening a block when there is no memory for a shorter one.
//!
//! ```text
//!   was             becomes         what is done
//!   large           large           its end goes back, always (`run.rs`)
//!   large, 1-32 KiB more than 1 KiB it stays where it is, as a block with room; of a run no more than 40 KiB
//!   large           up to 1 KiB     its first page becomes a span, of which it is a slot; the rest goes back
//!   1-32 KiB        up to 1 KiB     refused, unless it lies in a run for want of a span: as a large one
//! ```
//!
//! A caller that shortens a block cannot handle a failure: `Vec::shrink_to_fit` ends the program. And shortening
//! matters most in a full heap. So it is done in place, if the block may lie in more than its size implies: above 1
//! KiB its flag can say so (`room.rs`). A block of up to 1 KiB must lie in a slot of its class. A run is long enough
//! to become a span; a slot is not. (A block aligned to more than a page is never a slot: it gives up its end.)
//!
//! Worked: a heap of 64 MiB is full, 40 of them one block of which 100 bytes are used. Its first page becomes a span
//! of 78 slots of 104 bytes, the block is one of them, and 5,119 pages are free.
//!
//! **Cost**: a copy of up to 1 KiB onto the stack and back, and freeing the pages. Where there is memory, none of this
//! runs.

use core::alloc::Layout;
use core::ptr::{self, NonNull};

use crate::source::Source;
use crate::units::{PageCount, PageRun};

use super::length::pages_for;
use super::rack::Few;
use super::room::has_flag;
use super::size_class::{FlaggedSize, MarkedSize, SizeClass};
use super::spans::Room;
use super::{Moved, Objects, Thread};

/// The longest slot without a flag.
const UNFLAGGED_BYTES: usize = MarkedSize::MOST_BYTES;

/// The shortest large block: nothing this long is a slot.
const SHORTEST_RUN: Layout = match Layout::from_size_align(FlaggedSize::MOST_BYTES + 1, 1) {
    Ok(layout) => layout,
    Err(_) => panic!("a layout"),
};

impl<S: Source + 'static> Objects<S> {
    /// Shortens a block that must become a slot, without memory for it. `None`: it is unchanged.
    ///
    /// # Safety
    ///
    /// The memory was allocated from this heap with the old layout and belongs to the caller; if it moves, it no
    /// longer does. The structure: as for [`free`](Self::free).
    #[cold]
    pub(super) unsafe fn shorten(
        &self,
        thread: &Thread,
        memory: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Option<Moved> {
        let class = SizeClass::of(new.size(), new.align()).filter(|_| has_flag(old))?;
        let room = self.room_of(memory, old);
        let leave = || room.into_iter().for_each(|room| self.leave_room(memory, room));
        let place = room.unwrap_or_else(|| match SizeClass::of(old.size(), old.align()) {
            Some(class) => Room::Slot(class),
            None => Room::Run(self.run_of(memory, old)),
        });
        if class.is_flagged() {
            // Before it may be shorter, as in `stays`.
            leave();
            let place = match place {
                Room::Run(run) => Room::Run(run.split_at(pages_for(SHORTEST_RUN)).map_or(run, |(head, _)| {
                    self.resize_run(thread, run, SHORTEST_RUN);
                    head
                })),
                slot => slot,
            };
            self.charge_anyway(place.spare_bytes());
            self.spans.enter_room(memory);
            return Some(Moved::Not);
        }
        let Room::Run(run) = place else { return None };
        let pages = PageCount(class.pages());
        let (span, rest) = match run.split_at(pages) {
            Some((span, rest)) => (span, Some(rest)),
            None if run.pages() == pages => (run, None),
            None => return None,
        };
        leave();
        // SAFETY: the caller owns the run, as it owns `memory`, and the run has no room any more; `span` is as long as
        // a span.
        let slot = unsafe { self.make_slot(thread, class, (span, rest), new) }?;
        Some(Moved::With(slot))
    }

    /// Makes the first part of a run a span, and moves the contents of the block into a slot of it; frees the second
    /// part, if there is one. (`None` would mean a fresh span without a slot.)
    ///
    /// # Safety
    ///
    /// The two parts are a large block's run of this heap, which the caller gives up, without room, and in the table.
    /// The first part is as long as a span of the class, that of the `new` layout, which has slots without flags: so of
    /// 1 KiB at most.
    unsafe fn make_slot(
        &self,
        thread: &Thread,
        class: SizeClass,
        (span, rest): (PageRun, Option<PageRun>),
        new: Layout,
    ) -> Option<NonNull<u8>> {
        let mut kept = [0_u8; UNFLAGGED_BYTES];
        let size = new.size().min(UNFLAGGED_BYTES);
        // SAFETY: the caller's promise: it owns the memory, a page at least, and `kept` has room for `size` bytes.
        unsafe { ptr::copy_nonoverlapping(self.spans.address(span.start()).as_ptr(), kept.as_mut_ptr(), size) };
        self.spans.entry(span.start()).leave();
        if let Some(rest) = rest {
            self.free_run(thread.cache(), rest);
        }
        let mut few = Few::default();
        // SAFETY: used here only.
        let mut rack = unsafe { few.rack() };
        self.central(class).take_fresh(&self.spans, class, span, 1, &mut rack);
        let slot = self.hand_out(NonNull::new(rack.pop()?)?, class);
        // SAFETY: a slot of the class, just taken: at least `size` bytes long; `kept` is on the stack. The block is of
        // this layout, and may move once more: the span has other slots.
        unsafe {
            ptr::copy_nonoverlapping(kept.as_ptr(), slot.as_ptr(), size);
            Some(self.settle_moved(thread, slot, new))
        }
    }
}
