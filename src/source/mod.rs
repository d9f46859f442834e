//! Where address space comes from.
//!
//! A [`Source`] owns memory in four states, after the Go runtime's `mem.go`. Every verb is a transition between two of
//! them. A heap gets memory from nowhere else (only the background thread maps its own stack):
//!
//! ```text
//!            reserve             prepare              commit
//!   None ──────────────▶ Reserved ─────────▶ Prepared ─────────▶ Ready
//!    ▲                                          ▲                  │
//!    │                                          └──── release ─────┘
//!    └────────── unreserve (from any state, whole reservations only) ─────────┘
//! ```
//!
//! | state | meaning |
//! |---|---|
//! | None | not ours |
//! | Reserved | ours, backed by nothing, must not be touched |
//! | Prepared | can be made Ready at once; costs (almost) no memory |
//! | Ready | may be read and written |
//!
//! On Unix, Prepared memory is an anonymous mapping that faults in on first touch, so `commit` has nothing to do.
//! [`Source::COMMITS`] is then `false`, and the heap never calls it. On Windows, Prepared memory is only reserved, and
//! `commit` is what charges for it. A source over existing bytes ([`Region`]) makes every transition at once. A source
//! over numbers that stand for no memory at all (device pages, blocks of a file) is as good as any other, because
//! **the heap never reads or writes the pages it manages**. Only its metadata must be real memory, and that is
//! requested under a [`Purpose`] of its own.
//!
//! Every failure means "not done": the state is as before, and the heap goes on. Contents are as before too, except
//! after `release`, `release_lazily` and `clear`, which may have destroyed some of them.

use core::ops::Range;
use core::ptr::NonNull;
use core::time::Duration;

mod ledger;
mod numbers;
#[cfg(all(any(unix, windows), feature = "std", any(test, feature = "internals")))]
mod over_system;
#[cfg(all(any(target_os = "linux", target_os = "android"), feature = "std"))]
mod pagemap;
mod region;
mod shared;
#[cfg(any(test, feature = "internals"))]
mod simulated;
mod split;
#[cfg(all(unix, feature = "std", not(miri)))]
mod unix;
#[cfg(all(unix, feature = "std", miri))]
#[path = "interpreted.rs"]
mod unix;
#[cfg(all(windows, feature = "std"))]
mod windows;

pub use numbers::Numbers;
#[cfg(all(any(unix, windows), feature = "std", any(test, feature = "internals")))]
#[doc(hidden)]
pub use over_system::{OverSystem, Verbs};
#[cfg(all(any(target_os = "linux", target_os = "android"), feature = "std"))]
pub(crate) use pagemap::{Turn, hold as hold_questions, let_go as let_go_questions, recover as recover_questions};
pub use region::Region;
#[cfg(any(test, feature = "internals"))]
pub use simulated::{Failure, Simulated, State, Verb};
pub use split::Split;
#[cfg(all(unix, feature = "std"))]
pub(crate) use unix::KeepErrno;
#[cfg(all(unix, feature = "std"))]
pub use unix::System;
#[cfg(all(windows, feature = "std"))]
pub(crate) use windows::KeepErrno;
#[cfg(all(windows, feature = "std"))]
pub use windows::System;

/// The smallest granule a heap works with: a cache line, which its tables are aligned to.
pub const MIN_GRANULE: usize = 64;

/// What a reservation is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// The pages a heap hands out. The heap never touches them.
    Pages,
    /// The heap's own tables: bitmaps, summaries, caches. The heap reads and writes them; they must read as zero once
    /// prepared.
    Metadata,
}

/// What memory reads as after a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contents {
    /// Every byte reads as zero. (In memory from an operating system, nothing is then behind it until it is written.)
    Zero,
    /// Anything.
    Unknown,
}

/// The policy for huge pages behind a range of pages. The system may do otherwise.
///
/// Huge pages speed up address translation and make first touches cheaper, but a program that touches little of each
/// page pays for all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HugePages {
    /// No policy: the system's own setting applies.
    #[default]
    System,
    /// Use huge pages, as early as possible (`MADV_HUGEPAGE`).
    Advise,
    /// Use none (`MADV_NOHUGEPAGE`).
    Avoid,
}

/// The source did not do what it was asked to do. The state of the range is as before. So are its contents, except
/// after [`release`](Source::release), [`release_lazily`](Source::release_lazily) and [`clear`](Source::clear), which
/// may have destroyed some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Refused;

impl core::fmt::Display for Refused {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("the memory source refused the transition")
    }
}

impl core::error::Error for Refused {}

/// A range of reserved addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reservation {
    /// Lowest address, aligned as requested. May be a bare number if the purpose is [`Purpose::Pages`].
    pub base: NonNull<u8>,
    /// Length in bytes; at least what was requested.
    pub bytes: usize,
}

impl Reservation {
    /// What a source reserves, if it is as long and as aligned as requested and does not wrap around the end of the
    /// address space. Otherwise it is given back: a faulty source is found out before anything is written where it
    /// should not be.
    pub(crate) fn of<S: Source>(source: &S, purpose: Purpose, bytes: usize, align: usize) -> Option<Self> {
        let reservation = source.reserve(purpose, bytes, align)?;
        let base = reservation.base.addr().get();
        let in_range = reservation.bytes >= bytes && base.checked_add(reservation.bytes.saturating_sub(1)).is_some();
        if in_range && base & (align - 1) == 0 {
            return Some(reservation);
        }
        // SAFETY: just reserved for this purpose, and nothing refers to it.
        unsafe { source.unreserve(purpose, reservation) };
        None
    }
}

/// A source of address space and memory. See the [module](self) for the four states.
///
/// Rules for all verbs:
///
/// * Verbs are called from several threads at once, but never for overlapping ranges.
/// * They must not unwind, must not use a heap that stands on this source, and must preserve `errno` (if there is one).
/// * They may allocate from other heaps of this crate if those were opened before this source's. `reserve` and
///   `prepare` are called while a heap is being opened, and the opening of a second one would wait for the first for
///   ever. That of arenas without one of their own is a heap, too: call
///   [`ProcessHeap::get`](crate::arena::ProcessHeap::get) before. (Both are also called later: when threads meet that
///   share a heap's structures.)
/// * That holds for heaps of the same copy of the crate. In a process that forks they must not allocate from another
///   copy's, as when that is the program's global allocator and the source is in a library with a copy of its own: the
///   fork may hold that heap already while it waits for this verb.
/// * They should return within milliseconds. While `release` is at work on pages, no thread can allocate them, and a
///   fork waits for it; an allocating thread waits for `prepare`.
/// * On Windows they must not need the loader: they are also called by threads that end, under its lock.
/// * They should need little stack. They run on the stack of the thread that allocates or frees and, for a `GlobalHeap`
///   with a background thread, on that thread's stack of 256 KiB.
///
/// A source over another one, which counts what goes back. Verbs that have a default may be left out:
///
/// ```
/// # #[cfg(all(any(unix, windows), feature = "std"))] {
/// use std::ptr::NonNull;
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// use pageheap::source::{Contents, Memory, Purpose, Refused, Reservation, Source, System};
/// use pageheap::{Config, PageCount, PageHeap};
///
/// #[derive(Default)]
/// struct Counting(AtomicUsize);
///
/// // SAFETY: every verb is the system's, whose promises hold for it.
/// unsafe impl Source for Counting {
///     const COMMITS: bool = System::COMMITS;
///
///     fn granule(&self) -> usize {
///         System.granule()
///     }
///
///     fn budget(&self) -> usize {
///         System.budget()
///     }
///
///     fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
///         System.reserve(purpose, bytes, align)
///     }
///
///     unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
///         // SAFETY: the caller's promise, as in the other verbs.
///         unsafe { System.prepare(purpose, start, bytes) }
///     }
///
///     unsafe fn commit(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
///         unsafe { System.commit(start, bytes) }
///     }
///
///     unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
///         self.0.fetch_add(bytes, Ordering::Relaxed);
///         unsafe { System.release(start, bytes) }
///     }
///
///     unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
///         unsafe { System.unreserve(purpose, reservation) };
///     }
/// }
///
/// // SAFETY: the pages are the system's, which are memory.
/// unsafe impl Memory for Counting {}
///
/// let heap = PageHeap::new(Counting::default(), Config::new(1 << 30)).unwrap();
/// let run = heap.allocate(PageCount(3)).unwrap();
/// // SAFETY: the run is ours, and nothing uses it.
/// unsafe { heap.free(run) };
/// let released = heap.scavenge(PageCount(usize::MAX));
/// assert_eq!(heap.source().0.load(Ordering::Relaxed), released.0 * heap.page_bytes());
/// # }
/// ```
///
/// # Safety
///
/// An implementation promises that
/// * [`granule`](Self::granule) is a power of two, and the same at every call;
/// * `reserve` returns ranges that overlap nothing else in use, are aligned as requested, have at least the bytes
///   requested, and do not extend past the end of the address space: `base + (bytes - 1)` does not wrap;
/// * a range stays what it is, where it is, until it is unreserved, even if the source is moved meanwhile, as it is
///   into the heap, or forgotten with it: the memory is not part of the source's own value;
/// * Ready memory belongs to nobody else: in [`Purpose::Metadata`], what the heap has written stays until the heap
///   overwrites, discards or unreserves it;
/// * after `prepare` of [`Purpose::Metadata`] the range is Ready: readable, writable, and all zero;
/// * after `prepare` (and, where [`COMMITS`](Self::COMMITS) is true, `commit`) a range of [`Purpose::Pages`] is what
///   the source's users take it for, outside its gaps: memory that may be read and written, if the source is
///   [`Memory`];
/// * [`gap`](Self::gap) tells of the same gaps at every call, whatever range it is asked for;
/// * [`Contents::Zero`] is returned only if every byte of the range, outside its gaps, reads as zero until it is next
///   written;
/// * a failed verb changes no state, and no contents except those that it was to destroy; and a verb touches nothing
///   outside the range it is given;
/// * no verb unwinds, or uses a heap that stands on this source.
pub unsafe trait Source {
    /// Whether Prepared pages need [`commit`](Self::commit) before they are used. If `false`, the heap never calls it.
    const COMMITS: bool = false;

    /// Whether metadata comes from elsewhere than pages, as in a [`Split`]. The [`budget`](Self::budget) is then for
    /// pages alone.
    const APART: bool = false;

    /// The unit of every transition in bytes: the page size of the operating system, read at run time. A power of two,
    /// the same at every call. Ranges handed to the verbs start and end on multiples of it, counted from the
    /// reservation's base. If it is longer than a chunk of the heap's [`Geometry`](crate::Geometry), 4 MiB by default,
    /// nothing is released.
    fn granule(&self) -> usize;

    /// An upper bound, in bytes, on what it makes sense to reserve for one heap, for both purposes together (unless
    /// they are [`APART`](Self::APART)): the process's address-space limit less room for other users, or the bytes that
    /// a region has left. `usize::MAX` if unknown.
    fn budget(&self) -> usize;

    /// None → Reserved. `bytes` and `align` are multiples of the granule, `align` a power of two. `None` if that is not
    /// available.
    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation>;

    /// Reserved → Prepared (for [`Purpose::Metadata`]: → Ready, zeroed). Returns what the range reads as.
    ///
    /// # Errors
    /// [`Refused`] if the operating system refuses; the range stays Reserved.
    ///
    /// # Safety
    /// The range lies in a reservation of this source made for `purpose`, on granule borders, and is Reserved.
    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused>;

    /// Prepared → Ready, for [`Purpose::Pages`]. What is already Ready stays as it is, including its contents. Called
    /// only if [`COMMITS`](Self::COMMITS).
    ///
    /// # Errors
    /// [`Refused`] if there is no memory now; what was Prepared stays so.
    ///
    /// # Safety
    /// The range lies in a reservation for pages, on granule borders, is Prepared or Ready, and nobody else uses it.
    unsafe fn commit(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused>;

    /// Ready → Prepared, for [`Purpose::Pages`]: the memory goes back to where it came from, the addresses stay.
    /// Returns whether the range reads as zero from now on.
    ///
    /// # Errors
    /// [`Refused`] if it was not done: the state is as before, so what was Ready still is. All or part of the contents
    /// may be lost; they are never taken for zero.
    ///
    /// # Safety
    /// The range lies in a reservation for pages, on granule borders, and nobody else uses it. Each granule of it is
    /// Ready or, if the source [commits](Self::COMMITS), perhaps Prepared: so it must not be touched. Its contents are
    /// lost.
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused>;

    /// Like [`release`](Self::release), but the memory may stay where it is until the system needs it. That is cheaper,
    /// and so is taking the memory back. By default the same as `release`.
    ///
    /// # Errors
    /// As for [`release`](Self::release).
    ///
    /// # Safety
    /// As for [`release`](Self::release).
    unsafe fn release_lazily(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise, which is the same.
        unsafe { self.release(start, bytes) }
    }

    /// Ready → Ready, for [`Purpose::Pages`]: afterwards every byte reads as zero. The source writes only to the part
    /// that may be non-zero, if it knows which part that is, and that part is small. By default it refuses.
    ///
    /// # Errors
    /// [`Refused`] if it was not done. All or part of the contents may be lost; they are never taken for zero.
    ///
    /// # Safety
    /// The range lies in a reservation for pages, on granule borders, is Ready (or Prepared, where nothing
    /// [commits](Self::COMMITS)), and nobody else uses it. Its contents are lost.
    unsafe fn clear(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
        let _ = (start, bytes);
        Err(Refused)
    }

    /// Sets the policy for huge pages behind a range of [`Purpose::Pages`], from now on. By default it refuses.
    ///
    /// # Errors
    /// [`Refused`] if there is no such policy, or it is not granted; nothing has changed.
    ///
    /// # Safety
    /// The range lies in a reservation for pages, on granule borders.
    unsafe fn advise(&self, start: NonNull<u8>, bytes: usize, huge: HugePages) -> Result<(), Refused> {
        let _ = (start, bytes, huge);
        Err(Refused)
    }

    /// For [`Purpose::Metadata`]: the contents of the range are not needed for now, and its memory may go back.
    /// Afterwards every byte reads as before or as zero, and may be written again at once. Doing nothing, the default,
    /// is correct.
    ///
    /// # Safety
    /// The range lies in a reservation for metadata, on granule borders, and is Ready. It may be read meanwhile, but no
    /// thread writes to it.
    unsafe fn discard(&self, start: NonNull<u8>, bytes: usize) {
        let _ = (start, bytes);
    }

    /// Any state → None, for a whole reservation.
    ///
    /// # Safety
    /// `reservation` is exactly what [`reserve`](Self::reserve) returned for `purpose`, given up once; nothing in it is
    /// used again.
    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation);

    /// Any state → None, for the end of a reservation. The beginning stays as it is for ever and will not be
    /// unreserved: this is for pages that are in use when a library is unloaded. By default everything stays.
    ///
    /// # Safety
    /// The range lies in a reservation of this source made for `purpose`, begins on a granule border and ends with it;
    /// nothing in it is used again, and no verb is called for the reservation again.
    unsafe fn trim(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) {
        let _ = (purpose, start, bytes);
    }

    /// The first gap in a range of [`Purpose::Pages`], in bytes from `start`: a part that is not memory and never will
    /// be, such as device registers between two pieces of RAM. The heap never hands out a page that touches a gap.
    /// Reservations contain gaps, and so may ranges for `prepare` and `advise`, which do nothing there, and for `trim`;
    /// ranges for `commit`, `release`, `release_lazily` and `clear` do not. The range asked for may end beyond the
    /// reservation. By default there are no gaps.
    ///
    /// It is called when the heap grows, for each run that is freed without an object layer above, and in the child of
    /// a fork, whose only thread may not be the one that last used the source.
    fn gap(&self, start: NonNull<u8>, bytes: usize) -> Option<Range<usize>> {
        let _ = (start, bytes);
        None
    }

    /// The processor time of this thread, from an arbitrary start: the cost of giving memory back is measured with it.
    /// By default unknown, and that cost is not counted.
    fn worked(&self) -> Option<Duration> {
        None
    }
}

/// A [`Source`] whose pages are memory, for users that read and write pages, as arenas do.
///
/// # Safety
///
/// Pages that are Ready (or Prepared, where nothing [commits](Source::COMMITS)) may be read and written through the
/// addresses of their reservation, until they are released or unreserved, unless they touch a [gap](Source::gap).
pub unsafe trait Memory: Source {}
