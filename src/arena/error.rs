//! Why an arena could not: what was asked, what was left, for which reason.
//!
//! ```text
//!   no room for 6144 bytes aligned to 64: the arena's limit leaves 4096
//! ```

#![forbid(unsafe_code)]

use core::alloc::Layout;
use core::fmt;

/// For which reason an arena said no.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The arena's own limit; see [`ArenaConfig::limit`](super::ArenaConfig::limit).
    Limit,
    /// The backing had no pages: its limit, or the memory of the machine. Of a free list, too.
    NoPages,
    /// There are no such objects: more bytes than addresses can count.
    TooLarge,
    /// All slots are taken, and the list has as many as it may.
    NoSlots,
    /// The objects do not fit a slot, in size or alignment.
    SlotTooSmall,
    /// All shards have owners: what was asked for is one, and none is left. Or the list was to have more of them than
    /// any has.
    NoShards,
}

/// An allocation that was not made. The arena is as it was, but for what was allocated on the way: by an iterator that
/// uses it, too, or for a slice of unknown length that could not grow in place. That stays until the reset. And what it
/// kept for later may have gone back to a backing that had no pages; not for more than that could ever have.
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

    /// The same, said of what the caller's caller asked for.
    #[cold]
    pub(super) const fn asked_for(self, layout: Layout) -> Self {
        Self::new(self.reason, layout, self.left)
    }

    /// `count` objects of `T` are more bytes than there can be.
    #[cold]
    pub(super) const fn too_large<T>(count: usize) -> Self {
        Self {
            reason: Reason::TooLarge,
            asked: count.saturating_mul(size_of::<T>()),
            align: align_of::<T>(),
            left: isize::MAX as usize,
        }
    }

    /// So many shards were asked for, and fewer can be had.
    #[cold]
    pub(super) const fn no_shards(asked: usize, left: usize) -> Self {
        Self {
            reason: Reason::NoShards,
            asked,
            align: 1,
            left,
        }
    }

    /// For which reason.
    #[must_use]
    pub const fn reason(&self) -> Reason {
        self.reason
    }

    /// Bytes that were asked for; for [`Reason::NoShards`] shards.
    #[must_use]
    pub const fn asked(&self) -> usize {
        self.asked
    }

    /// The alignment that was asked for.
    #[must_use]
    pub const fn align(&self) -> usize {
        self.align
    }

    /// Bytes that were left of what ran out: of the limit for [`Reason::Limit`], [`Reason::NoPages`] and
    /// [`Reason::NoSlots`]; of a slot for [`Reason::SlotTooSmall`]; for [`Reason::NoShards`] shards.
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
                0 => write!(f, "no room for {asked} shard: all have owners"),
                _ => write!(f, "no room for {asked} shards: a list has {left} at the most"),
            };
        }
        write!(f, "no room for {asked} bytes aligned to {align}: ")?;
        match self.reason {
            Reason::Limit => write!(f, "the arena's limit leaves {left}"),
            Reason::NoPages if *left == usize::MAX => write!(f, "the backing has no such pages"),
            Reason::NoPages => write!(
                f,
                "the backing has no such pages, though the arena's limit leaves {left}"
            ),
            Reason::TooLarge => write!(f, "an object may have {left} at the most"),
            Reason::NoSlots => write!(f, "all slots are taken, and the limit leaves {left}"),
            Reason::SlotTooSmall => write!(f, "a slot has {left}"),
            Reason::NoShards => Ok(()),
        }
    }
}

impl core::error::Error for ArenaError {}
