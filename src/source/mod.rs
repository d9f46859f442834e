//! Where address space comes from.
//!
//! A [`Source`] owns memory in four states, after the Go runtime's `mem.go`; every verb is a transition between two of
//! them, and a heap asks nobody else for memory (only the background thread maps its own stack):
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
//! | Prepared | may be made Ready at once; costs (almost) no memory |
//! | Ready | may be read and written |
//!
//! On Unix, Prepared memory is an anonymous mapping that faults in on first touch, so `commit` has nothing to do and
//! [`Source::COMMITS`] is `false`: the heap then never calls it. A source over bytes that are already there
//! ([`Region`]) makes every transition at once. A source over numbers that mean no memory at all (device pages, blocks
//! of a file) is as good as any other: **the heap never reads or writes the pages it manages**; only its metadata must
//! be real memory, and that is asked for under a [`Purpose`] of its own.
//!
//! Every failure means "not done": the state is as before and the heap goes on. Contents are as before too, but of what
//! was to lose them (`release`, `release_lazily`, `clear`): there they may be lost.

use core::ptr::NonNull;
use core::time::Duration;

mod ledger;
mod numbers;
#[cfg(all(unix, feature = "std", any(test, feature = "internals")))]
mod over_system;
#[cfg(all(any(target_os = "linux", target_os = "android"), feature = "std"))]
mod pagemap;
mod region;
mod shared;
#[cfg(any(test, feature = "internals"))]
mod simulated;
mod split;
#[cfg(all(unix, feature = "std"))]
mod unix;

pub use numbers::Numbers;
#[cfg(all(unix, feature = "std", any(test, feature = "internals")))]
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

/// The smallest granule a heap works with: a cache line, which its tables are aligned to.
pub const MIN_GRANULE: usize = 64;

/// What a reservation is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// The pages a heap hands out. The heap never touches them.
    Pages,
    /// The heap's own tables: bitmaps, summaries, caches. Read and written by the heap, must read as zero once
    /// prepared.
    Metadata,
}

/// What memory reads as after a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contents {
    /// Every byte reads as zero. (Memory from an operating system is then also backed by nothing until it is written.)
    Zero,
    /// Anything.
    Unknown,
}

/// What is wished of huge pages behind a range of pages. The system may do otherwise.
///
/// Huge pages make addresses quicker to translate and first touches cheaper, and make a program that touches little of
/// each pay for all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HugePages {
    /// Nothing: the system does what it has been told to do with programs that say nothing.
    #[default]
    System,
    /// That there be some, as early as they can be had (`MADV_HUGEPAGE`).
    Advise,
    /// That there be none (`MADV_NOHUGEPAGE`).
    Avoid,
}

/// The source could not do what it was asked. The state of the range is as before. So is what it contains, but where
/// that was to be lost: by [`release`](Source::release), [`release_lazily`](Source::release_lazily) and
/// [`clear`](Source::clear).
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
    /// Lowest address, aligned as it was asked for. May be a bare number where the purpose is [`Purpose::Pages`].
    pub base: NonNull<u8>,
    /// Length in bytes; at least what was asked for.
    pub bytes: usize,
}

impl Reservation {
    /// What a source reserves, if it is as long and as aligned as was asked, and does not go round the end of the
    /// addresses. What is not goes back: who wrote the source hears of it before anything is written where it should
    /// not be.
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
/// All verbs may be called from several threads at once, never for overlapping ranges. They must not unwind, must not
/// use a heap that stands on this source, and leave `errno` (where there is one) as they found it. They may allocate
/// from other heaps of this crate, if those have been opened before this source's: `reserve` and `prepare` are called
/// while a heap is being opened, and a second one would wait for the first for ever. A verb should return within
/// milliseconds: what `release` is at work on can be had by nobody meanwhile, a fork waits for it, and who allocates
/// for `prepare`. It should do with little stack: it runs on that of whoever allocates or frees, and, for a
/// `GlobalHeap` with a background thread, on that thread's, of 256 KiB.
///
/// # Safety
///
/// An implementation promises that
/// * [`granule`](Self::granule) is a power of two, and the same at every call;
/// * `reserve` returns ranges that overlap nothing else in use, aligned as asked, of at least the bytes asked for, and
///   not past the end of the address space: `base + (bytes - 1)` does not wrap;
/// * a range stays what it is, where it is, until it is unreserved, also when the source is moved meanwhile, as it is
///   into the heap: its memory is not part of the source's own value;
/// * memory that is Ready is nobody else's: of [`Purpose::Metadata`], what the heap has written is there until it
///   writes something else, discards or unreserves it;
/// * after `prepare` of [`Purpose::Metadata`] the range is Ready: readable, writable, and all zero;
/// * after `prepare` (and, where [`COMMITS`](Self::COMMITS) is true, `commit`) a range of [`Purpose::Pages`] is what
///   the source's users take it for: memory that may be read and written if the source is one of memory;
/// * [`Contents::Zero`] is returned only if every byte of the range reads as zero until it is next written;
/// * a failed verb changes no state, and no contents but those that `release` was to lose; and a verb touches nothing
///   outside the range it is given.
pub unsafe trait Source {
    /// Whether Prepared pages need [`commit`](Self::commit) before they are used. Where it is `false` the heap never
    /// calls it.
    const COMMITS: bool = false;

    /// Whether metadata comes from elsewhere than pages, as with [`Split`]: the [`budget`](Self::budget) is for pages
    /// alone, then.
    const APART: bool = false;

    /// The unit of every transition in bytes: the page size of the operating system, read at run time. A power of two,
    /// the same at every call. Ranges handed to the verbs start and end on multiples of it, counted from the
    /// reservation's base. Where it is longer than a chunk of the heap's [`Geometry`](crate::Geometry), 4 MiB by
    /// default, nothing is released.
    fn granule(&self) -> usize;

    /// An upper bound, in bytes, on what it makes sense to reserve for one heap, both purposes together (but where they
    /// are [`APART`](Self::APART)): the process's address-space limit less room for others, or the bytes a region has
    /// left. `usize::MAX` if nothing is known.
    fn budget(&self) -> usize;

    /// None → Reserved. `bytes` and `align` are multiples of the granule, `align` a power of two. `None` if it cannot
    /// be had.
    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation>;

    /// Reserved → Prepared (of [`Purpose::Metadata`]: → Ready, zeroed). Says what the range reads as.
    ///
    /// # Errors
    /// [`Refused`] if the operating system says no; the range stays Reserved.
    ///
    /// # Safety
    /// The range lies in a reservation of this source made for `purpose`, on granule borders, and is Reserved.
    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused>;

    /// Prepared → Ready, of [`Purpose::Pages`]; what is Ready already stays as it is, contents included. Called only
    /// where [`COMMITS`](Self::COMMITS).
    ///
    /// # Errors
    /// [`Refused`] if the memory cannot be had now; what was Prepared stays so.
    ///
    /// # Safety
    /// The range lies in a reservation for pages, on granule borders, is Prepared or Ready, and nobody else uses it.
    unsafe fn commit(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused>;

    /// Ready → Prepared, of [`Purpose::Pages`]: the memory goes back to where it came from, the addresses stay. Says
    /// whether the range reads as zero from now on.
    ///
    /// # Errors
    /// [`Refused`] if it was not done: the state is as before, so what was Ready still is. The contents may be lost,
    /// all or in part, and are never counted as zero.
    ///
    /// # Safety
    /// The range lies in a reservation for pages, on granule borders, is Ready (or Prepared), and nobody else uses it.
    /// Its contents are lost.
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused>;

    /// As [`release`](Self::release), but the memory may stay where it is until somebody needs it: cheaper, and cheaper
    /// to take back. Not overridden, it is `release`.
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

    /// Ready → Ready, of [`Purpose::Pages`], and every byte reads as zero: by writing to that part alone which may be
    /// anything else, if the source knows which that is, and it is a small one. Not overridden, it is refused.
    ///
    /// # Errors
    /// [`Refused`] if it is not done. The contents may be lost, all or in part, and are never counted as zero.
    ///
    /// # Safety
    /// The range lies in a reservation for pages, on granule borders, is Ready (or Prepared, where nothing
    /// [commits](Self::COMMITS)), and nobody else uses it. Its contents are lost.
    unsafe fn clear(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
        let _ = (start, bytes);
        Err(Refused)
    }

    /// Tells what is wished of huge pages behind a range of [`Purpose::Pages`], from now on. Not overridden, it is
    /// refused.
    ///
    /// # Errors
    /// [`Refused`] where there is no such thing, or it is not granted; nothing has changed.
    ///
    /// # Safety
    /// The range lies in a reservation for pages, on granule borders.
    unsafe fn advise(&self, start: NonNull<u8>, bytes: usize, huge: HugePages) -> Result<(), Refused> {
        let _ = (start, bytes, huge);
        Err(Refused)
    }

    /// Of [`Purpose::Metadata`]: what is in the range is of no use for now, and its memory may go back. Afterwards
    /// every byte reads as before or as zero, and may be written again at once. Doing nothing, as this does where it is
    /// not overridden, is well.
    ///
    /// # Safety
    /// The range lies in a reservation for metadata, on granule borders, and is Ready. It may be read meanwhile, but
    /// nobody writes to it.
    unsafe fn discard(&self, start: NonNull<u8>, bytes: usize) {
        let _ = (start, bytes);
    }

    /// Any state → None, of a whole reservation.
    ///
    /// # Safety
    /// `reservation` is exactly what [`reserve`](Self::reserve) returned for `purpose`, given up once; nothing in it is
    /// used again.
    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation);

    /// Any state → None, of the end of a reservation, whose beginning stays as it is for ever: nobody will unreserve
    /// it. For what is in use when a library is unloaded. Unless it is implemented, all stays.
    ///
    /// # Safety
    /// The range lies in a reservation of this source made for `purpose`, begins on a granule border and ends with it;
    /// nothing in it is used again, and no verb is called for the reservation again.
    unsafe fn trim(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) {
        let _ = (purpose, start, bytes);
    }

    /// How long this thread has worked, since any moment: what giving memory back costs is counted by it. Not
    /// overridden, nobody knows, and that is not counted.
    fn worked(&self) -> Option<Duration> {
        None
    }
}

/// A [`Source`] whose pages are memory: what may be stood upon by who reads and writes pages, as arenas do.
///
/// # Safety
///
/// Pages that are Ready (or Prepared, where nothing [commits](Source::COMMITS)) may be read and written through the
/// addresses of their reservation, until they are released or unreserved.
pub unsafe trait Memory: Source {}
