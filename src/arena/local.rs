//! [`Local`]: one thread's handle to an [`Arena`], which cuts without atomic operations; [`Scope`]: a part of its life;
//! [`ScopeGuard`]: a scope that no closure surrounds.
//!
//! ```text
//!   Local   room ──▶ pointer, end    pieces ◀──┐          allocates: pointer += size, if it is not past the end
//!   Scope   room ──▶ pointer, end    pieces ───┘          begins with the local's room, and does not touch that
//!     scope in it  ─▶ pointer, end   pieces ───┘          at its end the pieces taken since are put back
//! ```
//!
//! A handle stores its room by value. `alloc` and slice copies never pass the room's address to a function that is not
//! inlined: they pass a copy and store the result. So where the handle is a variable of the allocating function, the
//! compiler keeps its pointer and end in registers, and an allocation is an addition and a comparison, with no load,
//! and no store but the object. The handle is in memory, like any other variable, if a reference to it escapes:
//!
//! - it is passed to a function that is not inlined, or is a collection's allocator;
//! - the same function moves the end of a block (`resize_in_place`, and slices of unknown length: `alloc_iter`,
//!   `alloc_fmt`, `alloc_str_with`; and `alloc_slice_with` and `alloc_slice_clone`, if what makes the elements may
//!   panic);
//! - it is a local that has scopes, which refer to its pieces, or any handle with a guard, which refers to its room.
//!
//! A value allocated in a scope cannot leave it. A value allocated outside can be used inside:
//!
//! ```
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let mut local = arena.local();
//! let outside = local.alloc(1_u64)?;
//! let sum = local.scoped(|scope| {
//!     let inside = scope.alloc(*outside + 1)?;
//!     Ok::<u64, pageheap::arena::ArenaError>(*inside + *outside)
//! })?;
//! assert_eq!(sum, 3);
//! # Ok::<(), pageheap::arena::ArenaError>(())
//! ```
//!
//! ```compile_fail,E0521
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let mut local = arena.local();
//! let mut outside = &mut 0;
//! local.scoped(|scope| {
//!     outside = scope.alloc(17).unwrap(); // error: borrowed data escapes outside of closure
//! });
//! assert_eq!(*outside, 17);
//! ```
//!
//! Not even by way of something outside that takes what may borrow from it:
//!
//! ```compile_fail,E0521
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let mut local = arena.local();
//! let outside = std::cell::RefCell::new(Vec::new());
//! local.scoped(|scope| {
//!     outside.borrow_mut().push(&*scope.alloc(17).unwrap()); // error: borrowed data escapes outside of closure
//! });
//! assert_eq!(outside.into_inner().len(), 1);
//! ```
//!
//! The outer handle cannot be used inside a scope, since its allocations would be freed with the scope's:
//!
//! ```compile_fail,E0502
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let mut local = arena.local();
//! local.scoped(|scope| {
//!     scope.alloc(18).unwrap();
//!     local.alloc(17).unwrap(); // error: `local` is borrowed mutably
//! });
//! ```
//!
//! Values allocated in a scope may refer to each other, to those of the scopes around it, and to anything else that
//! outlives it: the scope's second lifetime says so to the compiler, as that of
//! [`std::thread::Scope`](https://doc.rust-lang.org/std/thread/struct.Scope.html) does.
//!
//! ```
//! use pageheap::arena::{Arena, ArenaError};
//!
//! let (arena, text) = (Arena::new(), String::from("c a b"));
//! let mut local = arena.local();
//! let first = local.scoped(|scope| {
//!     let words = scope.alloc_iter(text.split(' '))?;
//!     words.sort_unstable();
//!     Ok::<&str, ArenaError>(words[0]) // A part of `text`, not of the scope.
//! })?;
//! assert_eq!(first, "a");
//! # Ok::<(), ArenaError>(())
//! ```
//!
//! **A guard may be leaked**, and then never rewinds. So its scope has pieces of its own, a copy of the handle's, as it
//! has room of its own. If the handle's pieces had changed, and its room had not, the end of another piece would be
//! taken for that of the room.
//!
//! Worked: a local's room begins at 1,000. A scope begins there too, allocates 64 bytes up to 1,064, and ends. The
//! local's own room was never changed, so its next object is at 1,000.
//!
//! Measured: 16 bytes in 0.57 ns in registers, in 0.84 from memory (bumpalo 0.84); a scope with four objects in 3.7
//! (bump-scope 4.0). For the copies, each place that allocates has 40 to 60 more instructions on its cold path.

use core::alloc::Layout;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;
use core::mem::{self, MaybeUninit};
use core::ptr::NonNull;

use super::backing::Backing;
use super::boxed::ArenaBox;
use super::bump::Arena;
use super::error::ArenaError;
use super::pieces::{Checkpoint, Pieces, Room};
use super::process::ProcessHeap;
use super::typed::{self, Raw, typed_methods};

/// Runs `work` on copies of a handle's room and pieces, then stores the copies.
///
/// So a function that is not inlined never learns their addresses; the module's essay says why.
#[inline(always)]
fn aside<R>(room: &Cell<Room>, pieces: &Cell<Pieces>, work: impl FnOnce(&mut Room, &mut Pieces) -> R) -> R {
    let (mut room_copy, mut pieces_copy) = (room.get(), pieces.get());
    let result = work(&mut room_copy, &mut pieces_copy);
    room.set(room_copy);
    pieces.set(pieces_copy);
    result
}

/// Allocates memory for a layout whose size is not zero.
#[inline(always)]
fn allocate<B: Backing>(
    arena: &Arena<B>,
    room: &Cell<Room>,
    pieces: &Cell<Pieces>,
    layout: Layout,
) -> Result<NonNull<u8>, ArenaError> {
    let mut rest = room.get();
    if let Some(memory) = rest.cut(layout) {
        room.set(rest);
        return Ok(memory);
    }
    aside(room, pieces, |room, pieces| pieces.refill(room, arena, layout))
}

/// See `Raw::move_end`.
fn move_end<B: Backing>(
    arena: &Arena<B>,
    room: &Cell<Room>,
    pieces: &Cell<Pieces>,
    start: NonNull<u8>,
    end: *const u8,
    new_end: *const u8,
) -> bool {
    let mut rest = room.get();
    if pieces.get().move_end(&mut rest, start, end, new_end) {
        room.set(rest);
        return true;
    }
    aside(room, pieces, |room, pieces| {
        pieces.push_end(room, arena, start, end, new_end)
    })
}

/// Rewinds to a checkpoint.
///
/// # Safety
///
/// As for `Pieces::put_back`.
#[inline(always)]
unsafe fn rewind(room: &Cell<Room>, pieces: &Cell<Pieces>, checkpoint: Checkpoint<'_>) {
    match pieces.get().room_at(&checkpoint) {
        Some(now) => room.set(now),
        None => aside(room, pieces, |room, pieces| {
            // SAFETY: the caller's promise.
            *room = unsafe { pieces.put_back(checkpoint) };
        }),
    }
}

/// One thread's handle to an [`Arena`]: allocates without atomic operations, and in [scopes](Self::scoped).
///
/// Its allocations live as long as the borrow of the arena, even after the handle is dropped. The handle is `Send` but
/// not `Sync`; take one per thread.
///
/// ```
/// use pageheap::arena::Arena;
///
/// let arena = Arena::new();
/// let words = std::thread::scope(|scope| {
///     let thread = scope.spawn(|| {
///         let local = arena.local();
///         local.alloc_iter("a b c".split(' '))
///     });
///     thread.join().unwrap()
/// })?;
/// assert_eq!(words, ["a", "b", "c"]);
/// # Ok::<(), pageheap::arena::ArenaError>(())
/// ```
pub struct Local<'a, B: Backing = ProcessHeap> {
    arena: &'a Arena<B>,
    room: Cell<Room>,
    pieces: Cell<Pieces>,
}

// SAFETY: the pieces are the handle's alone, whichever thread has it; the arena is shared with other threads.
unsafe impl<B: Backing + Sync> Send for Local<'_, B> {}

impl<B: Backing> Arena<B> {
    /// Creates a handle for one thread. It takes no memory until the first allocation.
    #[must_use]
    pub const fn local(&self) -> Local<'_, B> {
        Local {
            arena: self,
            room: Cell::new(Room::NONE),
            pieces: Cell::new(Pieces::new()),
        }
    }
}

impl<'a, B: Backing> Local<'a, B> {
    typed_methods!('a);

    /// Runs `work` with a scope. When `work` returns or panics, everything allocated in the scope is freed for reuse by
    /// this handle. Values are not dropped.
    #[inline]
    pub fn scoped<'env, R>(&mut self, work: impl for<'s> FnOnce(Scope<'s, 'env, B>) -> R) -> R {
        Scope::enter(self.arena, &self.room, &self.pieces, work)
    }

    /// A scope that lasts until the guard is dropped, instead of as long as a closure; see [`ScopeGuard`]. Costs some
    /// loads and stores more than [`scoped`](Self::scoped).
    #[inline]
    #[must_use]
    pub fn scope_guard(&mut self) -> ScopeGuard<'_, B> {
        ScopeGuard::new(self.arena, &self.room, &self.pieces)
    }

    /// The handle's current position. With scopes this is not needed.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint<'a> {
        self.pieces.get().checkpoint(self.room.get())
    }

    /// Frees everything allocated since a checkpoint. Aborts if it detects that the checkpoint is another handle's.
    ///
    /// # Safety
    ///
    /// The checkpoint is of this handle, which has not been rewound to an earlier one since, and nothing that was
    /// allocated through this handle since is used any more, or is pinned and not dropped. Of a block that has grown
    /// since, that is what it has grown by.
    pub unsafe fn rewind(&mut self, checkpoint: Checkpoint<'a>) {
        // SAFETY: the caller's promise.
        unsafe { rewind(&self.room, &self.pieces, checkpoint) };
        // Checked here, but not for scopes, whose checkpoints nobody else can have.
        self.pieces.get().check(self.room.get());
    }

    /// The arena.
    #[must_use]
    pub const fn arena(&self) -> &'a Arena<B> {
        self.arena
    }
}

// SAFETY: pieces are the handle's alone. The caller of `rewind` promises that nothing rewound is in use, and what
// scopes hand out does not outlive them.
unsafe impl<B: Backing> Raw for Local<'_, B> {
    #[inline(always)]
    fn raw(&self, layout: Layout) -> Result<NonNull<u8>, ArenaError> {
        allocate(self.arena, &self.room, &self.pieces, layout)
    }

    #[inline]
    fn move_end(&self, start: NonNull<u8>, end: *const u8, new_end: *const u8) -> bool {
        move_end(self.arena, &self.room, &self.pieces, start, end, new_end)
    }
}

impl<B: Backing> fmt::Debug for Local<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Local")
            .field("arena", self.arena)
            .finish_non_exhaustive()
    }
}

impl<B: Backing> fmt::Debug for Scope<'_, '_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope")
            .field("arena", self.arena)
            .finish_non_exhaustive()
    }
}

impl<B: Backing> Drop for Local<'_, B> {
    #[inline]
    fn drop(&mut self) {
        self.pieces.get().leave(self.room.get(), self.arena);
    }
}

/// A part of a [`Local`]'s life: what is allocated in it is freed when it ends.
///
/// Its lifetime is unique to this scope, so a value allocated in a scope can neither leave it nor be mistaken for
/// another scope's. (With a [`ScopeGuard`] it is that of a borrow of the guard. If two such scopes are exchanged, both
/// guards are borrowed for as long as either is in use.) `'env` is what it may borrow from outside, as in a scope of
/// threads.
pub struct Scope<'s, 'env: 's, B: Backing = ProcessHeap> {
    arena: &'s Arena<B>,
    /// Its own copy: the room of the handle that entered the scope does not change.
    room: Cell<Room>,
    pieces: &'s Cell<Pieces>,
    /// Makes the lifetime invariant, so that it fits no other scope.
    brand: PhantomData<Cell<&'s ()>>,
    /// Makes `'env` outlive the scope wherever the scope is named, so that its values may borrow from outside.
    outside: PhantomData<Cell<&'env ()>>,
}

// SAFETY: as for `Local`. The cell that it shares is that of a handle or guard which is borrowed mutably for as long as
// the scope's lifetime, so nobody else uses it meanwhile.
unsafe impl<B: Backing + Sync> Send for Scope<'_, '_, B> {}

impl<'s, 'env, B: Backing> Scope<'s, 'env, B> {
    typed_methods!('s);

    /// Runs `work` with a scope inside this one; see [`Local::scoped`].
    #[inline]
    pub fn scoped<'inner, R>(&mut self, work: impl for<'t> FnOnce(Scope<'t, 'inner, B>) -> R) -> R {
        Scope::enter(self.arena, &self.room, self.pieces, work)
    }

    /// A scope inside this one that lasts until the guard is dropped; see [`ScopeGuard`].
    #[inline]
    #[must_use]
    pub fn scope_guard(&mut self) -> ScopeGuard<'_, B> {
        ScopeGuard::new(self.arena, &self.room, self.pieces)
    }

    /// A scope that starts at a handle's room.
    #[inline(always)]
    fn new(arena: &'s Arena<B>, room: &Cell<Room>, pieces: &'s Cell<Pieces>) -> Self {
        Self {
            arena,
            room: room.clone(),
            pieces,
            brand: PhantomData,
            outside: PhantomData,
        }
    }

    /// Runs `work` with a scope that starts at a handle's room.
    #[inline]
    fn enter<R>(
        arena: &Arena<B>,
        room: &Cell<Room>,
        pieces: &Cell<Pieces>,
        work: impl for<'t> FnOnce(Scope<'t, 'env, B>) -> R,
    ) -> R {
        /// Cleans up if `work` panics. It does not know where the handle's room is, and leaves it as it was: at worst
        /// the room is shorter than its piece, if the piece has become longer.
        struct Panicked<'b> {
            pieces: &'b Cell<Pieces>,
            checkpoint: Checkpoint<'b>,
        }
        impl Drop for Panicked<'_> {
            fn drop(&mut self) {
                let mut pieces = self.pieces.get();
                // SAFETY: as below.
                unsafe { pieces.put_back_all(self.checkpoint) };
                self.pieces.set(pieces);
            }
        }
        let checkpoint = pieces.get().checkpoint(room.get());
        let panicked = Panicked { pieces, checkpoint };
        let result = work(Scope::new(arena, room, pieces));
        mem::forget(panicked);
        // SAFETY: the checkpoint is of these pieces, whose owner is borrowed mutably by the code that entered the
        // scope: nothing else allocates from them or rewinds them. Scopes within this one have ended. What was
        // allocated has the scope's own lifetime, which ends in `work`.
        unsafe { rewind(room, pieces, checkpoint) };
        result
    }
}

// SAFETY: as for `Local`; a scope is rewound when nothing of its lifetime is left.
unsafe impl<B: Backing> Raw for Scope<'_, '_, B> {
    #[inline(always)]
    fn raw(&self, layout: Layout) -> Result<NonNull<u8>, ArenaError> {
        allocate(self.arena, &self.room, self.pieces, layout)
    }

    #[inline]
    fn move_end(&self, start: NonNull<u8>, end: *const u8, new_end: *const u8) -> bool {
        move_end(self.arena, &self.room, self.pieces, start, end, new_end)
    }
}

/// A [`Scope`] that ends when this guard is dropped, for what a closure is in the way of: a `?` or `break` that leaves
/// the scope, or an `.await` in it. Made by [`Local::scope_guard`] and [`Scope::scope_guard`].
///
/// ```
/// use pageheap::arena::{Arena, ArenaError, Local};
///
/// fn longest(local: &mut Local<'_>, text: &str) -> Result<Option<usize>, ArenaError> {
///     let mut guard = local.scope_guard();
///     let scope = guard.scope();
///     let lengths = scope.alloc_iter(text.split(' ').map(str::len))?; // If this returns, the scope ends as well.
///     Ok(lengths.iter().copied().max())
/// }
///
/// let arena = Arena::new();
/// assert_eq!(longest(&mut arena.local(), "any number of words")?, Some(6));
/// # Ok::<(), ArenaError>(())
/// ```
///
/// What is allocated in the scope borrows the guard:
///
/// ```compile_fail,E0505
/// use pageheap::arena::Arena;
///
/// let arena = Arena::new();
/// let mut local = arena.local();
/// let mut guard = local.scope_guard();
/// let inside = guard.scope().alloc(17).unwrap();
/// drop(guard); // error: `guard` is borrowed by `inside`
/// assert_eq!(*inside, 17);
/// ```
///
/// A leaked guard does no harm: the handle continues where it was. Memory that was taken for the scope, or was spare,
/// may be lost until the arena is reset. Guard and scope are `Send` but not `Sync`, as a `Local` is.
pub struct ScopeGuard<'l, B: Backing = ProcessHeap> {
    arena: &'l Arena<B>,
    /// The room and the pieces of the handle, which is not used before the guard is gone, dropped or leaked.
    handle: (&'l Cell<Room>, &'l Cell<Pieces>),
    /// Those of the scope, where it begins. It has a copy of the room.
    room: Cell<Room>,
    pieces: Cell<Pieces>,
    checkpoint: Checkpoint<'l>,
}

// SAFETY: as for `Scope`: the handle is borrowed mutably as long as there is a guard.
unsafe impl<B: Backing + Sync> Send for ScopeGuard<'_, B> {}

impl<'l, B: Backing> ScopeGuard<'l, B> {
    /// A guard of a scope that starts at a handle's room.
    #[inline]
    fn new(arena: &'l Arena<B>, room: &'l Cell<Room>, pieces: &'l Cell<Pieces>) -> Self {
        let all = pieces.get();
        pieces.set(all.in_use());
        Self {
            arena,
            handle: (room, pieces),
            room: room.clone(),
            pieces: Cell::new(all),
            checkpoint: all.checkpoint(room.get()),
        }
    }

    /// The scope. Called again, it begins anew: what was allocated in it is freed for reuse. Values are not dropped.
    #[inline]
    pub fn scope<'s, 'env: 's>(&'s mut self) -> Scope<'s, 'env, B> {
        self.rewind();
        Scope::new(self.arena, &self.room, &self.pieces)
    }

    /// Frees everything that was allocated in the scope.
    #[inline]
    fn rewind(&mut self) {
        // SAFETY: the checkpoint is of these pieces, which only this guard's scope uses. That has ended, and so have
        // those within it, those whose guards were leaked included: they and what was allocated in them borrow the
        // guard, which is borrowed mutably here.
        unsafe { rewind(&self.room, &self.pieces, self.checkpoint) };
    }
}

impl<B: Backing> Drop for ScopeGuard<'_, B> {
    #[inline]
    fn drop(&mut self) {
        self.rewind();
        let (room, pieces) = self.handle;
        room.set(self.room.get());
        pieces.set(self.pieces.get());
    }
}

impl<B: Backing> fmt::Debug for ScopeGuard<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScopeGuard")
            .field("arena", self.arena)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use std::ptr;

    use super::*;
    use crate::heap::{Config, PageHeap};
    use crate::source::System;

    fn place<T>(value: &T) -> usize {
        ptr::from_ref(value).addr()
    }

    /// Not the process's heap, which takes a quarter of all addresses if pointers have 32 bits.
    type Small = PageHeap<System>;

    fn arena() -> Arena<Small> {
        Arena::new_in(PageHeap::new(System, Config::new(32 << 20)).unwrap())
    }

    /// How much a scope takes: nothing, room that is there, a longer piece or another, one of its own.
    const BYTES: [usize; 5] = [0, 64, 3_000, 20_000, 200_000];

    /// Allocates so many bytes, by parts and at once, with objects of others in between.
    fn fill(hand: &impl Raw, arena: &Arena<Small>, bytes: usize, others: bool) -> Result<(), ArenaError> {
        for length in [bytes / 16; 16].into_iter().chain([bytes]) {
            let start = typed::room::<u8, _>(hand, length)?;
            // SAFETY: allocated above, and so long.
            unsafe { start.write_bytes(0xFF, length) };
            if others {
                arena.alloc(0_u64)?;
            }
        }
        Ok(())
    }

    #[test]
    fn what_the_scope_of_a_guard_allocated_is_given_back() -> Result<(), ArenaError> {
        let arena = arena();
        let mut local = arena.local();
        let before = place(local.alloc(1_u64)?);
        for bytes in BYTES {
            for others in [false, true] {
                let mut guard = local.scope_guard();
                for _ in 0..2 {
                    let mut scope = guard.scope();
                    assert_eq!(place(scope.alloc(2_u64)?), before + 8, "also when it begins anew");
                    let mut inner = scope.scope_guard();
                    assert_eq!(place(inner.scope().alloc(3_u64)?), before + 16);
                    fill(&inner.scope(), &arena, bytes, others)?;
                    drop(inner);
                    assert_eq!(place(scope.alloc(4_u64)?), before + 16);
                    fill(&scope, &arena, bytes, others)?;
                }
            }
        }
        assert_eq!(place(local.alloc(5_u64)?), before + 8);
        Ok(())
    }

    /// Its handle, the scopes around it and a checkpoint before it go on, and nothing that lives is overwritten.
    #[test]
    fn a_leaked_guard_does_no_harm() -> Result<(), ArenaError> {
        for (bytes, others) in BYTES.into_iter().flat_map(|bytes| [(bytes, false), (bytes, true)]) {
            let arena = arena();
            let mut local = arena.local();
            let first = local.alloc([1_u64; 4])?;
            let checkpoint = local.checkpoint();
            let second = place(local.alloc([2_u64; 4])?);
            local.scoped(|mut scope| {
                let outer = scope.alloc([3_u64; 4])?;
                let mut guard = scope.scope_guard();
                fill(&guard.scope(), &arena, bytes, others)?;
                mem::forget(guard);
                assert_eq!(place(scope.alloc(5_u64)?), place(outer) + 32, "where it was");
                let behind = arena.alloc([4_u64; 4])?;
                fill(&scope, &arena, bytes, others)?;
                assert_eq!((&*outer, &*behind), (&[3; 4], &[4; 4]));
                Ok::<_, ArenaError>(())
            })?;
            assert_eq!(place(local.alloc(5_u64)?), second + 32, "the scope around it has ended");
            let mut guard = local.scope_guard();
            fill(&guard.scope(), &arena, bytes, others)?;
            mem::forget(guard);
            fill(&local, &arena, bytes, others)?;
            // SAFETY: nothing that was allocated since is used.
            unsafe { local.rewind(checkpoint) };
            let again = place(local.alloc([2_u64; 4])?);
            assert_eq!(again, second, "what was allocated since is given back");
            mem::forget(local.scope_guard());
            drop(local);
            fill(&arena, &arena, bytes, others)?;
            assert_eq!(*first, [1; 4]);
        }
        Ok(())
    }
}
