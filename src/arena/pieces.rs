//! What a [`Local`](super::Local) holds of its arena: pieces, and room in the newest.
//!
//! ```text
//!   arena    ░░██████████████████████████████████████████████░░░░░░░
//!              └─ piece ────────┘          └─ piece ────────┘          4 KiB, then 16, then 64 KiB
//!               head │ cut │ room           head │ cut │ room
//!                 ▲──────── link ────────────┘       ▲ pointer  ▲ end
//!   scopes       ┊ checkpoint: newest piece, pointer
//! ```
//!
//! A local takes pieces from its arena and bumps a pointer in the newest. When a piece is full but still the last thing
//! cut from the arena, it is extended in place (also for its last block, when that grows). So a single-threaded program
//! has one long piece. Otherwise a new piece is taken, and the rest of the old one is lost until the end of the scope
//! or the reset. An object larger than half a piece gets one of its own; if it has up to 8 KiB, the next piece is
//! longer, so that such objects share pieces, from the third on at the latest.
//!
//! All pieces are linked in the order in which they were taken. Rewinding to a [`Checkpoint`] unlinks those newer than
//! it. They wait in a list to be reused, so a scope that is entered a million times takes its pieces once.
//!
//! **A local has no spare pieces when it takes a new one.** If none of the first few serves, all go back to the arena,
//! which makes what it can of them. So a local never has more than was in use at one time. A piece that is a block of
//! its own is kept by the arena for large objects, or returned to the backing, also before a refusal; one that was cut
//! last is undone. Others are left for later pieces, of this local or another; and for objects that the arena would
//! otherwise refuse. From then on pieces that are cut for one object are of few sizes, so that they serve again.
//!
//! [`Room`] and [`Pieces`] are values. A handle stores them, and passes copies to functions that are not inlined;
//! [`local`](super::local) says why.
//!
//! Worked: 16 bytes with 1,000 bytes of room: the pointer moves by 16. Another 1,008 bytes: the piece of 4 KiB ends at
//! the arena's cursor, and both advance by 16 KiB.
//!
//! Cost: a cut is an addition and a comparison. To extend or take a piece, once in kilobytes, is a compare-exchange on
//! the arena. A scope with one object of 1 MiB takes 24 ns if its piece is spare, and 50 to 60 if a piece of another
//! size goes back for it.

use core::alloc::Layout;
use core::iter;
use core::marker::PhantomData;
use core::ptr::{self, NonNull};

use super::backing::Backing;
use super::bump::{Arena, HEAD_BYTES, LARGEST_BYTES, LAST_LOOKS, LEAST_BYTES, LOOKS, Piece, room_for};
use super::cursor::{GRAIN, grains, padding};
use super::error::ArenaError;
use super::typed::Raw;
use crate::fatal::{self, Number};

/// The first piece of a local.
const FIRST_BYTES: usize = 4 << 10;

/// The factor by which each piece is longer than the one before, up to the largest.
const GROWTH: usize = 4;

/// The rest of the piece being cut: where the next allocation begins, and how far it may reach. On grains; `pointer` ≤
/// `end`. Null at first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pointer: *mut u8,
    end: *mut u8,
}

/// One thread's pieces of an arena.
///
/// The matching room lies in the piece being cut, and reaches to its end. There are two exceptions: if a scope extended
/// the piece and then panicked, the room still ends where the piece did before; and if the guard of a scope that
/// extended it was leaked, so does `end`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    /// The piece being cut, and its end. Null at first.
    piece: *mut Piece,
    end: *mut u8,
    /// All pieces in use, newest first.
    taken: *mut Piece,
    /// Rewound pieces.
    spare: *mut Piece,
    /// The size of the next piece.
    step: usize,
    /// Whether a spare piece could not go back to where it was cut from.
    has_left: bool,
}

/// A position of a [`Local`](super::Local) at some time. It borrows the arena, because after a reset the memory is
/// reused.
#[derive(Clone, Copy, Debug)]
pub struct Checkpoint<'a> {
    taken: *mut Piece,
    piece: *mut Piece,
    pointer: *mut u8,
    arena: PhantomData<&'a ()>,
}

impl Room {
    /// No room.
    pub(super) const NONE: Self = Self {
        pointer: ptr::null_mut(),
        end: ptr::null_mut(),
    };

    /// Allocates memory for a layout whose size is not zero, if there is room.
    #[inline(always)]
    pub(super) fn cut(&mut self, layout: Layout) -> Option<NonNull<u8>> {
        let pointer = self.pointer;
        let padding = padding(pointer.addr(), layout.align());
        // Cannot overflow: each of the two is less than half of `usize`'s range.
        let need = padding + grains(layout.size());
        if need > self.end.addr() - pointer.addr() {
            return None;
        }
        self.pointer = pointer.wrapping_add(need);
        // SAFETY: in the piece, since `need` is not zero and there is enough room; a piece is not at null.
        Some(unsafe { NonNull::new_unchecked(pointer.wrapping_add(padding)) })
    }
}

impl Pieces {
    pub(super) const fn new() -> Self {
        Self {
            piece: ptr::null_mut(),
            end: ptr::null_mut(),
            taken: ptr::null_mut(),
            spare: ptr::null_mut(),
            step: FIRST_BYTES,
            has_left: false,
        }
    }

    /// Allocates memory for a layout that there is no room for.
    #[cold]
    #[inline(never)]
    pub(super) fn refill<B: Backing>(
        &mut self,
        room: &mut Room,
        arena: &Arena<B>,
        layout: Layout,
    ) -> Result<NonNull<u8>, ArenaError> {
        let size = grains(layout.size());
        let step = self.step;
        let need = size.saturating_add(grains(layout.align()));
        // Near a limit there may be room for less.
        if steps(step, need).any(|step| self.lengthen(room, arena, step.max(need))) {
            return room.cut(layout).map_or_else(|| self.refill(room, arena, layout), Ok);
        }
        if size > (step - HEAD_BYTES) / 2 || layout.align() > step / 8 {
            let roomy = Some(roomy(layout)).filter(|wish| self.has_left && arena.would_cut(HEAD_BYTES + wish.size()));
            let piece = roomy
                .and_then(|wish| self.take(arena, layout, wish, false).ok())
                .map_or_else(|| self.take_any(arena, layout), Ok)?;
            // Of larger objects too few would share a piece: what is lost at its end would be much.
            if size.max(layout.align()) <= LARGEST_BYTES / 8 {
                self.step = (step * GROWTH).min(LARGEST_BYTES);
            }
            return Self::whole(piece, layout);
        }
        let least = Layout::from_size_align(size.max(LEAST_BYTES), layout.align()).unwrap_or(layout);
        let wishes = steps(step, HEAD_BYTES + need.max(LEAST_BYTES))
            .map(|step| Layout::from_size_align(step - HEAD_BYTES, GRAIN).unwrap_or(layout));
        let piece = wishes
            .map(|wish| self.take(arena, least, wish, false))
            .find_map(Result::ok)
            .map_or_else(|| self.take_any(arena, layout), Ok)?;
        *room = self.begin(piece);
        self.step = (step * GROWTH).min(LARGEST_BYTES);
        // There is room now, whatever the alignment: that much was requested.
        room.cut(layout).map_or_else(|| self.refill(room, arena, layout), Ok)
    }

    /// Begins to cut a piece: all of it is room.
    fn begin(&mut self, piece: NonNull<Piece>) -> Room {
        self.piece = piece.as_ptr();
        self.end = end_of(piece);
        Room {
            pointer: start_of(piece).as_ptr(),
            end: self.end,
        }
    }

    /// Extends the piece by `bytes`, if it is the latest allocation of the arena, which must have room.
    fn lengthen<B: Backing>(&mut self, room: &mut Room, arena: &Arena<B>, bytes: usize) -> bool {
        let Some(piece) = NonNull::new(self.piece) else {
            return false;
        };
        // The end of the piece, not of the room, which may be shorter (see `Pieces`). Where the scope of a guard that
        // was leaked has extended it, the piece ends further up, and so does what the arena has cut: then this fails.
        let end = self.end;
        let new_end = end.wrapping_add(bytes);
        if !arena.move_end(piece.cast(), end, new_end) {
            return false;
        }
        debug_assert_eq!(end, end_of(piece), "no handle knows of what lies behind");
        // SAFETY: a piece in use is ours, its head too.
        unsafe { (*piece.as_ptr()).lengthen(bytes) };
        self.end = new_end;
        room.end = new_end;
        self.step = (self.step * GROWTH).min(LARGEST_BYTES);
        true
    }

    /// The place for `layout` in a piece of its own.
    fn whole(piece: NonNull<Piece>, layout: Layout) -> Result<NonNull<u8>, ArenaError> {
        let start = start_of(piece).as_ptr();
        let aligned = start.wrapping_add(padding(start.addr(), layout.align()));
        NonNull::new(aligned).ok_or(ArenaError::too_large::<u8>(layout.size()))
    }

    /// Takes a piece with room for `least`: a rewound one, one of the first that other locals have left, or a new one
    /// for `wish`, for which all rewound ones are given back. See `Slabs::take_piece` for `again`.
    fn take<B: Backing>(
        &mut self,
        arena: &Arena<B>,
        least: Layout,
        wish: Layout,
        again: bool,
    ) -> Result<NonNull<Piece>, ArenaError> {
        let bytes = room_for(wish).and_then(|room| room.checked_add(HEAD_BYTES));
        let new = bytes.and_then(|bytes| Layout::from_size_align(bytes, align_of::<Piece>()).ok());
        let (Some(least), Some(new)) = (room_for(least), new) else {
            return Err(ArenaError::too_large::<u8>(wish.size()));
        };
        let piece = match self.take_spare(least).or_else(|| arena.take_left(least, LOOKS)) {
            Some(piece) => piece,
            None => {
                self.give_back(arena);
                arena.take_piece(new, again)?
            }
        };
        Ok(self.add(piece))
    }

    /// Takes a piece with room for `layout`, and for no more if it is new. Before a refusal more of what was left is
    /// examined.
    fn take_any<B: Backing>(&mut self, arena: &Arena<B>, layout: Layout) -> Result<NonNull<Piece>, ArenaError> {
        self.take(arena, layout, layout, true).or_else(|error| {
            let left = room_for(layout).and_then(|room| arena.take_left(room, LAST_LOOKS));
            left.map(|piece| self.add(piece)).ok_or(error.asked_for(layout))
        })
    }

    /// Adds a piece, which is ours and in no list, to those in use.
    fn add(&mut self, piece: NonNull<Piece>) -> NonNull<Piece> {
        // SAFETY: ours, head included.
        unsafe { (*piece.as_ptr()).link = self.taken };
        self.taken = piece.as_ptr();
        piece
    }

    /// Gives the spare pieces back to the arena: the newest first, since the latest allocation can be undone.
    fn give_back<B: Backing>(&mut self, arena: &Arena<B>) {
        let mut newest = ptr::null_mut::<Piece>();
        // SAFETY: pieces in our lists are ours, heads included, and we use none of these again.
        unsafe {
            while let Some(piece) = NonNull::new(self.spare) {
                self.spare = piece.as_ref().link;
                (*piece.as_ptr()).link = newest;
                newest = piece.as_ptr();
            }
            while let Some(piece) = NonNull::new(newest) {
                newest = piece.as_ref().link;
                self.has_left |= !arena.leave(piece);
            }
        }
    }

    /// Takes one of the first spare pieces that serves an object that needs `room` bytes.
    fn take_spare(&mut self, room: usize) -> Option<NonNull<Piece>> {
        // SAFETY: pieces in our lists are ours, heads included.
        let (piece, first) = unsafe { Piece::take_from(self.spare, room, LOOKS) }?;
        self.spare = first;
        Some(piece)
    }

    #[inline(always)]
    pub(super) fn checkpoint<'a>(&self, room: Room) -> Checkpoint<'a> {
        Checkpoint {
            taken: self.taken,
            piece: self.piece,
            pointer: room.pointer,
            arena: PhantomData,
        }
    }

    /// The room at a checkpoint, if no piece was taken since; the piece may have been extended.
    #[inline(always)]
    pub(super) fn room_at(&self, checkpoint: &Checkpoint<'_>) -> Option<Room> {
        (self.taken == checkpoint.taken).then_some(Room {
            pointer: checkpoint.pointer,
            end: self.end,
        })
    }

    /// Aborts if the room does not begin in the piece being cut: other pieces lie where those of the checkpoint did. (A
    /// room that began behind the piece's end would have no end.)
    pub(super) fn check(&self, room: Room) {
        let piece = self.piece.addr()..=self.end.addr();
        if !piece.contains(&room.pointer.addr()) {
            not_its_own(room.pointer, self.piece);
        }
    }

    /// What a handle keeps of its pieces while the guard of a scope has a copy of all of them: those in use. If the
    /// guard is leaked, the handle goes on with these, and no piece is in both lists of spare ones.
    ///
    /// The scope may have extended the piece being cut. Then this handle cannot: the arena's cursor is past the end
    /// that it knows.
    pub(super) fn in_use(self) -> Self {
        Self {
            spare: ptr::null_mut(),
            ..self
        }
    }

    /// Rewinds to a checkpoint like [`put_back_all`](Self::put_back_all). But if no piece was being cut at that time,
    /// the first piece taken since stays, empty, unless it was for a large object. So a program that enters scopes and
    /// allocates nothing outside of them does not come here each time. Returns the room.
    ///
    /// # Safety
    ///
    /// As for `put_back_all`.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn put_back(&mut self, checkpoint: Checkpoint<'_>) -> Room {
        // SAFETY: the caller's promise. The first spare piece, if there is one, is ours, head included, like all in our
        // lists; and the piece that was put back last is the one taken first.
        unsafe {
            let room = self.put_back_all(checkpoint);
            match NonNull::new(self.spare) {
                Some(first) if checkpoint.piece.is_null() && !first.as_ref().is_large_block() => {
                    self.spare = first.as_ref().link;
                    (*first.as_ptr()).link = self.taken;
                    self.taken = first.as_ptr();
                    self.begin(first)
                }
                _ => room,
            }
        }
    }

    /// Makes the pieces taken since a checkpoint spare, and returns to the piece that was being cut at that time, if
    /// any. Returns the room in it, which is longer if the piece has been extended.
    ///
    /// # Safety
    ///
    /// The checkpoint is of these pieces, which have not been rewound past it since, and nothing allocated since is in
    /// use.
    pub(super) unsafe fn put_back_all(&mut self, checkpoint: Checkpoint<'_>) -> Room {
        let Checkpoint {
            taken, piece, pointer, ..
        } = checkpoint;
        while self.taken != taken {
            let Some(last) = NonNull::new(self.taken) else {
                not_its_own(pointer, taken);
            };
            // SAFETY: pieces in our lists are ours, heads included.
            unsafe {
                self.taken = last.as_ref().link;
                (*last.as_ptr()).link = self.spare;
            }
            self.spare = last.as_ptr();
        }
        self.piece = piece;
        self.end = NonNull::new(piece).map_or(ptr::null_mut(), end_of);
        Room { pointer, end: self.end }
    }

    /// See `Raw::move_end`.
    pub(super) fn move_end(&self, room: &mut Room, start: NonNull<u8>, end: *const u8, new_end: *const u8) -> bool {
        let (pointer, piece) = (room.pointer, self.piece);
        let is_last = start.addr().get() > piece.addr() && end.addr() == pointer.addr();
        if piece.is_null() || !is_last {
            return false;
        }
        // Distances from the start, not addresses: a new end may be past the end of the address space.
        let most = room.end.addr().wrapping_sub(start.addr().get());
        if new_end.addr().wrapping_sub(start.addr().get()) > most {
            return false;
        }
        room.pointer = pointer.wrapping_add(new_end.addr().wrapping_sub(end.addr()));
        true
    }

    /// Like `move_end`, if the piece has too little room: extends it, if possible.
    #[cold]
    #[inline(never)]
    pub(super) fn push_end<B: Backing>(
        &mut self,
        room: &mut Room,
        arena: &Arena<B>,
        start: NonNull<u8>,
        end: *const u8,
        new_end: *const u8,
    ) -> bool {
        let (most, wish) = (room.end.addr(), new_end.addr());
        let [most, wish] = [most, wish].map(|end| end.wrapping_sub(start.addr().get()));
        if room.pointer.addr() != end.addr() || wish <= most {
            return false;
        }
        let (step, missing) = (self.step, wish - most);
        steps(step, missing).any(|step| self.lengthen(room, arena, step.max(missing)))
            && self.move_end(room, start, end, new_end)
    }

    /// Gives unused memory back to the arena, for others.
    pub(super) fn leave<B: Backing>(mut self, room: Room, arena: &Arena<B>) {
        self.give_back(arena);
        // SAFETY: what was allocated in pieces that are not spare stays; of the one being cut, the rest is left, with a
        // head of its own.
        unsafe {
            let (pointer, end) = (room.pointer, self.end);
            let Some(piece) = NonNull::new(self.piece) else {
                return;
            };
            if pointer == end || arena.move_end(piece.cast(), end, pointer) {
                return;
            }
            let head = pointer.wrapping_add(padding(pointer.addr(), align_of::<Piece>()));
            let bytes = end.addr().saturating_sub(head.addr());
            if let Some(rest) = NonNull::new(head.cast::<Piece>())
                && Piece::is_worth_cutting(bytes)
            {
                rest.write(Piece::new(bytes, false));
                arena.leave(rest);
            }
        }
    }
}

#[cold]
fn not_its_own(pointer: *mut u8, piece: *mut Piece) -> ! {
    fatal::abort(
        "an arena rewound to a checkpoint that is not its own, or not behind it; the checkpoint's place",
        Number::Address(pointer.addr()),
        Number::Address(piece.addr()),
    )
}

/// What to try in turn: `step` bytes, then less, while at least `need`; `step` in any case.
fn steps(step: usize, need: usize) -> impl Iterator<Item = usize> {
    iter::successors(Some(step), move |step| Some(step / GROWTH).filter(|&less| less >= need))
}

/// A layout up to a quarter larger, and one of few: pieces that cannot go back must serve objects a little larger.
fn roomy(layout: Layout) -> Layout {
    let size = layout.size();
    let unit = size.next_power_of_two() / 8;
    size.checked_next_multiple_of(unit.max(GRAIN))
        .and_then(|size| Layout::from_size_align(size, layout.align()).ok())
        .unwrap_or(layout)
}

fn start_of(piece: NonNull<Piece>) -> NonNull<u8> {
    // SAFETY: a piece is at least as long as its head.
    unsafe { piece.add(1).cast() }
}

fn end_of(piece: NonNull<Piece>) -> *mut u8 {
    // SAFETY: the holder of a piece may read its head, which says how long it is.
    unsafe { piece.cast::<u8>().add(piece.as_ref().bytes()).as_ptr() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block at the end of the address space that would grow past it: its new end would be a small number.
    #[test]
    fn a_block_does_not_grow_around_the_end_of_the_address_space() {
        let at = |address: usize| ptr::without_provenance_mut::<u8>(address);
        let top = usize::MAX - 0xfff;
        let mut room = Room {
            pointer: at(top + 0x200),
            end: at(top + 0x800),
        };
        let pieces = Pieces {
            piece: at(top).cast(),
            ..Pieces::new()
        };
        let start = NonNull::new(at(top + 0x100)).unwrap();
        let moves =
            |room: &mut Room, length| pieces.move_end(room, start, room.pointer, start.as_ptr().wrapping_add(length));
        for length in [0x1000, 0x701, isize::MAX as usize] {
            assert!(!moves(&mut room, length));
        }
        assert_eq!(room.pointer, at(top + 0x200));
        assert!(moves(&mut room, 0x700) && moves(&mut room, 0x100));
    }
}
