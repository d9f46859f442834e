//! Room to grow: a block that grows again and again gets a longer slot, or run, than it needs.
//!
//! ```text
//!   realloc   737 ─▶ 921 ─▶ 1151 ─▶ 1438 ─▶ 1797 … 79,728 ─▶ 99,660 bytes     always a quarter more
//!   lies in   slots of these        a run of 12 pages         the run, longer if what lies behind is free
//!   moves     yes    yes    yes     yes     no      no        no
//! ```
//!
//! A free states the block's size, and by that alone the block goes to a magazine, without a look at where it came
//! from. So a block of up to 1 KiB must lie in a slot of its own class. Larger blocks have a flag that every free
//! checks (`spans.rs`), and the flag can say more than "free". It counts how often the block has moved to grow; or it
//! says that the block is **roomy**: it lies in a slot of a longer class than its size implies, or in a run. A block
//! that has merely moved is freed like any other. A roomy one takes the slow path, which asks the table of spans what
//! it lies in.
//!
//! **When.** A block that has moved twice to grow, and grows again, gets room. If it grows to less than twice its
//! size, it grows in steps, and one move is enough. Room is eight times what is asked for. Where that is little, it is
//! 64 times, up to 128 KiB, if the bounds below allow: most of the block's growth is still ahead. Pages that a block
//! has not grown into are not touched.
//!
//! **Bounds.** All roomy blocks together take at most 1 MiB, or a 32nd of the memory behind the heap if that is more,
//! and never more than a 32nd of the heap's limit. Over the soft limit blocks get no room, and in a heap that has
//! reached its limit only what lies in a magazine or on a shelf. A block that is shortened by a class or more gives
//! its room up. But if there is no memory for the shorter block it stays where it is, and so gets room however much
//! others have (`shorten.rs`).
//!
//! **For want of a span.** A span has up to 16 pages, and a torn heap may have no such run although much is free. Then
//! a block of more than 1 KiB gets a run of its own, as short as it can be, if it fills a quarter of it: a block of 8
//! KiB needs one free page. It is flagged as roomy, which says where it lies, but is not counted: a run that is no
//! longer than slots are is no room to grow.
//!
//! I18: the heap's count of roomy bytes is the sum of the slots, and of the runs longer than slots, whose flag says
//! so. In the child of a fork it may be higher, by what threads that do not exist there were about to count.
//!
//! A block that has grown to the length of its run has no room any more, even if it is shorter by as much as run
//! lengths are rounded up: it is freed by the fast path, which does not check.
//!
//! A roomy block that is freed with a wrong layout of more than 1 KiB is accepted if it lies in at least that much:
//! what it lies in is known without the layout. If it is a run, and is freed as a large block of exactly that many
//! pages, it takes the fast path, and stays counted.
//!
//! Cost: a block that grows from 64 B to 64 KiB by quarters, and is freed, takes 10 ns a step, and took 98. A `Vec`
//! that grows to 4 KiB, and gets no room, takes two hundredths longer than before.

#![forbid(unsafe_code)]

use core::alloc::Layout;
use core::ptr::NonNull;

use crate::fatal::{self, Number};
use crate::source::Source;
use crate::sync::Ordering;
use crate::units::PageCount;

use super::length::Length;
use super::size_class::{PAGE_BYTES, PAGE_SHIFT, SizeClass};
use super::spans::{Room, Spans};
use super::{Objects, Thread};

/// A block that gets room gets this many times what it asks for,
const FACTOR: usize = 8;

/// or, if that is more, this many times, up to this many bytes.
const SHORT_FACTOR: usize = 64;
const SHORT_BYTES: usize = 128 << 10;

/// Bytes in roomy blocks that every heap may have.
const ALWAYS_BYTES: usize = 1 << 20;

/// A block gets a run of its own, for want of a span, if that is at most this many times as long.
const MOST_WASTE: usize = 4;

/// At most this fraction of the memory behind a heap may be in roomy blocks.
const SHARE: usize = 32;

/// Whether blocks of this layout have flags that are checked: more than 1 KiB, and in the table.
#[inline]
pub(super) fn has_flag(layout: Layout) -> bool {
    match SizeClass::of(layout.size(), layout.align()) {
        Some(class) => class.is_flagged(),
        None => layout.align() <= PAGE_BYTES,
    }
}

impl<S: Source + 'static> Objects<S> {
    /// What the block lies in, if that is longer than its layout implies.
    pub(super) fn room_of(&self, memory: NonNull<u8>, layout: Layout) -> Option<Room> {
        has_flag(layout).then(|| self.spans.room_at(memory)).flatten()
    }

    /// Whether a block can stay where it is when it is resized to `new`: a large one, or one with room. Resizes it if
    /// so.
    pub(super) fn stays(&self, thread: &Thread, memory: NonNull<u8>, old: Layout, new: Layout) -> bool {
        let class = |layout: Layout| SizeClass::of(layout.size(), layout.align());
        let grows = new.size() >= old.size();
        match (self.room_of(memory, old), class(new)) {
            (None, to) => class(old).is_none() && to.is_none() && self.resize_large(thread, memory, old, new),
            (Some(room), _) if grows && room.holds(new.size()) => true,
            (Some(Room::Run(run)), None) => {
                // Before the run may grow: in the child of a fork no more may be flagged than is counted (I18).
                self.spans.leave_room(memory);
                let resized = self.resize_run(thread, run, new);
                if resized {
                    // From now on it is exactly as long as its block.
                    self.discharge(Room::Run(run).spare_bytes());
                } else {
                    self.spans.enter_room(memory);
                }
                resized
            }
            (Some(_), _) => false,
        }
    }

    /// Memory for a block that must grow and cannot grow in place.
    pub(super) fn allocate_grown(
        &self,
        thread: &Thread,
        memory: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Option<NonNull<u8>> {
        let Some(class) = SizeClass::of(new.size(), new.align()) else {
            // A block that grows will grow again. So it does not come from the shelf, whose runs have neighbours; and
            // what it leaves behind is room.
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

    /// Much more memory than `layout` asks for, if one more such block is allowed and the memory is at hand.
    fn allocate_roomy(&self, thread: &Thread, layout: Layout) -> Option<NonNull<u8>> {
        let least = layout.size().checked_mul(FACTOR)?;
        let most = SHORT_BYTES.min(layout.size().saturating_mul(SHORT_FACTOR));
        let wide = (most > least)
            .then(|| self.allocate_wide(thread, layout, most))
            .flatten();
        wide.or_else(|| self.allocate_wide(thread, layout, least))
    }

    /// Memory for a block of `layout` with room up to `size` bytes.
    fn allocate_wide(&self, thread: &Thread, layout: Layout, size: usize) -> Option<NonNull<u8>> {
        let wide = Layout::from_size_align(size, layout.align()).ok()?;
        let (bytes, class) = (Self::usable_size(wide), SizeClass::of(size, layout.align()));
        // A slot may cost a whole span.
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

    /// Memory for a slot of this class in a run of its own, as short as it can be, if there is no room for a span.
    #[cold]
    pub(super) fn allocate_in_run(
        &self,
        thread: &Thread,
        cache: Option<usize>,
        class: SizeClass,
    ) -> Option<NonNull<u8>> {
        let pages = class.bytes().div_ceil(PAGE_BYTES);
        let wastes = class.bytes() < (pages * PAGE_BYTES).div_ceil(MOST_WASTE);
        if !class.is_flagged() || wastes || pages >= class.pages() {
            return None;
        }
        // Where those go that are freed.
        let shelved = Length::exactly(pages).and_then(|length| self.run_from_shelf(thread, length));
        let memory = match shelved {
            Some(memory) => memory,
            None => self.enter_run(thread, self.pages(cache, PageCount(pages))?.run)?,
        };
        self.spans.enter_room(memory);
        self.keep_below(thread);
        Some(memory)
    }

    /// What a block of `bytes` bytes that is being freed lies in, if that may be longer. Clears the flag that says so.
    ///
    /// Aborts if it is shorter.
    #[cold]
    #[inline(never)]
    pub(super) fn take_room(&self, memory: NonNull<u8>, bytes: usize) -> Option<Room> {
        let room = self.spans.room_at(memory)?;
        if bytes > room.bytes() {
            fatal::abort(
                "a block was freed with the wrong layout; its address, the bytes it lies in",
                Number::Address(memory.addr().get()),
                Number::Count(room.bytes()),
            );
        }
        self.leave_room(memory, room);
        Some(room)
    }

    pub(super) fn leave_room(&self, memory: NonNull<u8>, room: Room) {
        self.spans.leave_room(memory);
        self.discharge(room.spare_bytes());
    }

    /// Bytes in roomy blocks.
    pub(super) fn roomy_bytes(&self) -> usize {
        // Relaxed: a statistic.
        self.roomy.load(Ordering::Relaxed)
    }

    /// Counts bytes as roomy, unless that exceeds the bounds.
    fn charge(&self, bytes: usize) -> bool {
        let backed = self.heap.backed().0;
        if backed.saturating_add(bytes >> PAGE_SHIFT) > self.heap.soft_limit().0 {
            return false;
        }
        let share = |pages: usize| (pages / SHARE).saturating_mul(PAGE_BYTES);
        let most = ALWAYS_BYTES.max(share(backed)).min(share(self.heap.limit().0));
        // Relaxed, thrice: a sum that publishes nothing. The load comes first, for when the bounds stay exhausted for
        // long.
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

    /// Counts bytes as roomy, regardless of the bounds.
    pub(super) fn charge_anyway(&self, bytes: usize) {
        // Relaxed: see `charge`.
        self.roomy.fetch_add(bytes, Ordering::Relaxed);
    }

    fn discharge(&self, bytes: usize) {
        // Relaxed: see `charge`.
        self.roomy.fetch_sub(bytes, Ordering::Relaxed);
    }
}
