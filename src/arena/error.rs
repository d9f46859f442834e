//! Why an arena refused: what was requested, what was left, and the reason.
//!
//! ```text
//!   no room for 6144 bytes aligned to 64: the arena's limit leaves 4096 bytes, in whole blocks of the backing
//! ```

#![forbid(unsafe_code)]

use core::alloc::Layout;
use core::fmt;

/// Why an arena refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The arena's own limit; see [`ArenaConfig::limit`](super::ArenaConfig::limit).
    Limit,
    /// The backing has no pages: its own limit is reached, or the machine's memory is used up. Also for free lists; or
    /// it has fewer in a row than a list must take that has taken many short slabs (see [`FreeList`](super::FreeList)).
    NoPages,
    /// Nothing so large can exist, whatever the limit: it would have more bytes than addresses can count; or a
    /// preallocation would have more slots than any list.
    TooLarge,
    /// All slots are taken, and the list may not grow any further: its limit has no room for a slot, or it has as many
    /// slots as any list can have.
    NoSlots,
    /// The object does not fit a slot, in size or in alignment.
    SlotTooSmall,
    /// All shards have owners, so no further shard can be lent. Or a list was to be made for more owners than any list
    /// can have.
    NoShards,
}

/// A refused allocation. The arena is unchanged, with two exceptions. Memory allocated on the way stays allocated until
/// the reset: by an iterator that itself uses the arena, or for a slice of unknown length that could not grow in place.
/// And if the backing had no pages, the arena may have returned to it what it kept for later, unless the request
/// exceeds what the backing could ever supply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ArenaError {
    reason: Reason,
    asked: usize,
    align: usize,
    left: usize,
}

impl ArenaError {
    #[cold]
    pub(super) const fn new(reason: Reason, layout: Layout, left: usize) -> Self {
        Self {
            reason,
            asked: layout.size(),
            align: layout.align(),
            left,
        }
    }

    /// The same error, restated for the layout that the caller's caller requested.
    #[cold]
    pub(super) const fn asked_for(self, layout: Layout) -> Self {
        Self::new(self.reason, layout, self.left)
    }

    /// `count` objects of `T` would have more bytes than there can be.
    #[cold]
    pub(super) const fn too_large<T>(count: usize) -> Self {
        Self {
            reason: Reason::TooLarge,
            asked: count.saturating_mul(size_of::<T>()),
            align: align_of::<T>(),
            left: isize::MAX as usize,
        }
    }

    /// More shards were requested than can be had.
    #[cold]
    pub(super) const fn no_shards(asked: usize, left: usize) -> Self {
        Self {
            reason: Reason::NoShards,
            asked,
            align: 1,
            left,
        }
    }

    /// Why the request was refused.
    #[must_use]
    pub const fn reason(&self) -> Reason {
        self.reason
    }

    /// Bytes requested; for [`Reason::NoShards`], shards.
    #[must_use]
    pub const fn asked(&self) -> usize {
        self.asked
    }

    /// The requested alignment.
    #[must_use]
    pub const fn align(&self) -> usize {
        self.align
    }

    /// Bytes left of what ran out: of the limit for [`Reason::Limit`], [`Reason::NoPages`] and [`Reason::NoSlots`]
    /// (`usize::MAX` if there is none); of a slot for [`Reason::SlotTooSmall`]. For [`Reason::TooLarge`] the most bytes
    /// that any objects can have, `isize::MAX`, or that any list of such slots can. For [`Reason::NoShards`], shards.
    #[must_use]
    pub const fn left(&self) -> usize {
        self.left
    }
}

impl fmt::Display for ArenaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { asked, align, left, .. } = self;
        if self.reason == Reason::NoShards {
            return match left {
                0 => write!(f, "no room for {asked} shard: the list has none to lend"),
                _ => write!(f, "no room for {asked} shards: a list has {left} at the most"),
            };
        }
        write!(f, "no room for {asked} bytes aligned to {align}: ")?;
        match self.reason {
            Reason::Limit => write!(
                f,
                "the arena's limit leaves {left} bytes, in whole blocks of the backing"
            ),
            Reason::NoPages if *left == usize::MAX => write!(f, "the backing has no such pages"),
            Reason::NoPages => write!(
                f,
                "the backing has no such pages, though the arena's limit leaves {left} bytes"
            ),
            Reason::TooLarge if *left < isize::MAX as usize => write!(f, "such a list has {left} bytes at the most"),
            Reason::TooLarge => write!(f, "nothing can have more than {left} bytes"),
            Reason::NoSlots if *left == usize::MAX => write!(f, "no slot is free, and no list can have more"),
            Reason::NoSlots => write!(
                f,
                "no slot is free, and the list can have no more: its limit leaves {left} bytes"
            ),
            // The size fits, so it is the alignment that does not.
            Reason::SlotTooSmall if asked <= left => write!(f, "a slot has {left} bytes, but is aligned to less"),
            Reason::SlotTooSmall => write!(f, "a slot has {left} bytes"),
            Reason::NoShards => Ok(()),
        }
    }
}

impl core::error::Error for ArenaError {}
