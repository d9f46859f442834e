//! Room to grow: a block that grows again and again lies in a longer slot, or run, than it needs.
//!
//! ```text
//!   realloc   737 ─▶ 921 ─▶ 1151 ─▶ 1438 ─▶ 1797 … 79,728 ─▶ 99,660 bytes     always a quarter more
//!   lies in   slots of these        a run of 12 pages         the run, longer if what lies behind is free
//!   moves     yes    yes    yes     yes     no      no        no
//! ```
//!
//! Who frees a block says how long it is, and by that it goes to a magazine, without a look at where it came from. So
//! a block of up to 1 KiB must lie in a slot of its class. Those above have a flag, which is looked at when they are
//! freed (`spans.rs`), and a flag can say more than "free": how often the block has moved to grow; or **roomy**, that
//! it lies in a slot of a longer class than it says, or is a run. A block that has moved is freed as any other. A roomy
//! one takes the slow way, which asks the table of spans what it really is.
//!
//! **When.** A block that has moved twice to grow, and is to grow again, gets room; if it grows to less than twice as
//! much it does so in steps, and one move is enough. Room is eight times what is asked for; where that is little, 64
//! times, up to 128 KiB, if there may be so much: most of its way lies before it. What that leaves unused is bounded:
//! all that grew have at most 1 MiB together, or a 32nd of the memory behind the heap if that is more, and never more
//! than a 32nd of the heap's limit; they get none over the soft limit, and where a heap has reached its limit only what
//! lies in a magazine, or on a shelf. A block that is made shorter, by a class or more, gives its room up; but if there
//! is no memory for it elsewhere it gets some, as it stays where it is (`shorten.rs`), however much others have. Pages
//! that a block has not grown into are not touched.
//!
//! I18: the heap's count of roomy bytes is the sum of the slots and runs whose flag says so. In the child of a fork it
//! may be more, by what threads that are not there were about to count.
//!
//! A block that has come to be as long as its run has no room any more, also if it is shorter by what lengths of runs
//! are rounded up: it is freed by the quick way, which asks nobody.
//!
//! A roomy block that is freed with a layout of more than 1 KiB, but not its own, is taken if it lies in as much: what
//! it lies in is known without that. If it is a run, and freed as a large block of just as many pages, it goes by the
//! quick way, and stays counted.
//!
//! Cost: a block that grows from 64 B to 64 KiB by quarters, and is freed, takes 10 ns a step, and took 98. A `Vec`
//! that grows to 4 KiB, and has no room, takes two hundredths more than before.

#![forbid(unsafe_code)]

use core::alloc::Layout;
use core::ptr::NonNull;

use crate::fatal;
use crate::source::Source;
use crate::sync::Ordering;

use super::length::Length;
use super::size_class::{PAGE_BYTES, PAGE_SHIFT, SizeClass};
use super::spans::{Room, Spans};
use super::{Objects, Thread};

/// A block that grows again gets so many times what it asks for,
const FACTOR: usize = 8;

/// or, if that is more, so many times, up to so many bytes.
const SHORT_FACTOR: usize = 64;
const SHORT_BYTES: usize = 128 << 10;

/// Bytes in roomy blocks that any heap may have.
const ALWAYS_BYTES: usize = 1 << 20;

/// One part in so many of the memory behind a heap may be in roomy blocks.
const SHARE: usize = 32;

/// Whether blocks of this layout have flags that are looked at: more than 1 KiB, and in the table.
#[inline]
pub(super) fn has_flag(layout: Layout) -> bool {
    match SizeClass::of(layout.size(), layout.align()) {
        Some(class) => class.is_flagged(),
        None => layout.align() <= PAGE_BYTES,
    }
}

impl<S: Source + 'static> Objects<S> {
    /// What the block lies in, if that is longer than its layout says.
    pub(super) fn room_of(&self, memory: NonNull<u8>, layout: Layout) -> Option<Room> {
        has_flag(layout).then(|| self.spans.room_at(memory)).flatten()
    }

    /// Whether a block stays where it is when it becomes a `new` one: a large one, or one with room.
    pub(super) fn stays(&self, thread: &Thread, memory: NonNull<u8>, old: Layout, new: Layout) -> bool {
        let class = |layout: Layout| SizeClass::of(layout.size(), layout.align());
        let grows = new.size() >= old.size();
        match (self.room_of(memory, old), class(new)) {
            (None, to) => class(old).is_none() && to.is_none() && self.resize_large(thread, memory, old, new),
            (Some(room), _) if grows && room.holds(new.size()) => true,
            (Some(Room::Run(run)), None) => {
                // Before it may be longer: in the child of a fork no more is flagged than is counted (I18).
                self.spans.leave_room(memory);
                let resized = self.resize_run(thread, run, new);
                if resized {
                    // As long as its block from now on.
                    self.discharge(Room::Run(run).bytes());
                } else {
                    self.spans.enter_room(memory);
                }
                resized
            }
            (Some(_), _) => false,
        }
    }

    /// Memory for a block that is to grow, and cannot where it is.
    pub(super) fn allocate_grown(
        &self,
        thread: &Thread,
        memory: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Option<NonNull<u8>> {
        let Some(class) = SizeClass::of(new.size(), new.align()) else {
            // What grows will grow again: so not to the shelf, whose runs have neighbours; and what it leaves is room.
            return self.allocate_apart(thread, new).or_else(|| self.allocate(thread, new));
        };
        let moves = if has_flag(old) { self.spans.moves(memory) } else { 0 };
        if Spans::is_restless(moves, old.size(), new.size())
            && let Some(roomy) = self.allocate_roomy(thread, new)
        {
            return Some(roomy);
        }
        let moved = self.allocate(thread, new)?;
        if class.is_flagged() {
            self.spans.note_move(moved, moves);
        }
        Some(moved)
    }

    /// Much more memory than `layout` says, if there may be such a block more, and it is at hand.
    fn allocate_roomy(&self, thread: &Thread, layout: Layout) -> Option<NonNull<u8>> {
        let least = layout.size().checked_mul(FACTOR)?;
        let most = SHORT_BYTES.min(layout.size().saturating_mul(SHORT_FACTOR));
        let wide = (most > least)
            .then(|| self.allocate_wide(thread, layout, most))
            .flatten();
        wide.or_else(|| self.allocate_wide(thread, layout, least))
    }

    /// Memory for a block of `layout`, with room up to `size` bytes.
    fn allocate_wide(&self, thread: &Thread, layout: Layout, size: usize) -> Option<NonNull<u8>> {
        let wide = Layout::from_size_align(size, layout.align()).ok()?;
        let (bytes, class) = (Self::usable_size(wide), SizeClass::of(size, layout.align()));
        // A slot may bring a span.
        let pages = class.map_or(bytes >> PAGE_SHIFT, SizeClass::pages);
        if pages > self.heap.limit().0 / SHARE || !self.charge(bytes) {
            return None;
        }
        let memory = match class {
            Some(class) => self.slot_at_hand(thread, class),
            None => Length::of(wide).and_then(|length| self.run_at_hand(thread, length)),
        };
        match memory {
            Some(memory) => self.spans.enter_room(memory),
            None => self.discharge(bytes),
        }
        memory
    }

    /// What a block lies in that is freed, of `bytes` bytes, if that may be longer; it has no flag of that any more.
    ///
    /// Aborts if it is shorter.
    #[cold]
    #[inline(never)]
    pub(super) fn take_room(&self, memory: NonNull<u8>, bytes: usize) -> Option<Room> {
        let room = self.spans.room_at(memory)?;
        if bytes > room.bytes() {
            fatal::abort(
                "a block was freed with the wrong layout; its address, the bytes it lies in",
                memory.addr().get(),
                room.bytes(),
            );
        }
        self.leave_room(memory, room);
        Some(room)
    }

    pub(super) fn leave_room(&self, memory: NonNull<u8>, room: Room) {
        self.spans.leave_room(memory);
        self.discharge(room.bytes());
    }

    /// Bytes in roomy blocks.
    pub(super) fn roomy_bytes(&self) -> usize {
        // Relaxed: a statistic.
        self.roomy.load(Ordering::Relaxed)
    }

    /// Counts bytes as roomy, if there may be so many.
    fn charge(&self, bytes: usize) -> bool {
        let backed = self.heap.backed().0;
        if backed.saturating_add(bytes >> PAGE_SHIFT) > self.heap.soft_limit().0 {
            return false;
        }
        let share = |pages: usize| (pages / SHARE).saturating_mul(PAGE_BYTES);
        let most = ALWAYS_BYTES.max(share(backed)).min(share(self.heap.limit().0));
        // Relaxed, thrice: a sum, on which nothing hangs. Looked at first, where all of it is taken for long.
        if self.roomy.load(Ordering::Relaxed).saturating_add(bytes) > most {
            return false;
        }
        let before = self.roomy.fetch_add(bytes, Ordering::Relaxed);
        let fits = before.saturating_add(bytes) <= most;
        if !fits {
            self.discharge(bytes);
        }
        fits
    }

    /// The same, whether there may be or not.
    pub(super) fn charge_anyway(&self, bytes: usize) {
        // Relaxed: see `charge`.
        self.roomy.fetch_add(bytes, Ordering::Relaxed);
    }

    fn discharge(&self, bytes: usize) {
        // Relaxed: see `charge`.
        self.roomy.fetch_sub(bytes, Ordering::Relaxed);
    }
}
