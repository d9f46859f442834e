//! How much an arena has taken from its backing, and how much more it may take.
//!
//! ```text
//!   take: reserve the bytes under the limit ──▶ ask the backing ──▶ a block
//!                   │ too many                       │ none: the reservation goes back
//!                   ▼                                ▼
//!              Reason::Limit                   Reason::NoPages
//! ```
//!
//! The bytes are reserved first, so the limit holds at every moment. A request may therefore be refused because of
//! another that itself fails a moment later. Arenas that grow under a lock of their own never see that.
//!
//! Worked: limit 98,304, reserved 90,112, and a request for a block of 16 KiB. 106,496 would be too many, and the error
//! says that 8,192 are left.

use core::alloc::Layout;
use core::fmt;
use core::ops::Range;
use core::ptr::NonNull;

use super::backing::{Backing, Block};
use super::config::ArenaConfig;
use super::error::{ArenaError, Reason};
use crate::sync::{AtomicUsize, Ordering};

/// Bytes of a huge page on x86-64 and most of ARM.
pub(super) const HUGE_BYTES: usize = 2 << 20;

/// How often a block that was there a moment ago is asked for once more. Another arena that only looks whether it is
/// there has it for a moment; that it does so at each of these is most unlikely.
const RETRIES: u32 = 3;

/// A backing, and an account of what has been taken from it.
#[derive(Debug)]
pub(super) struct Account<B> {
    backing: B,
    page_bytes: usize,
    limit: usize,
    whole_huge_pages: bool,
    reserved: AtomicUsize,
    blocks: AtomicUsize,
    /// The length of the shortest block that the backing has refused since it last granted one, or got one back;
    /// `usize::MAX` if none. It may have room again, so this only says how often to ask.
    refused: AtomicUsize,
}

impl<B: Backing> Account<B> {
    /// An account with nothing taken.
    pub(super) fn new(backing: B, config: &ArenaConfig) -> Self {
        let page_bytes = backing.page_bytes();
        Self {
            backing,
            page_bytes,
            limit: config.limit.unwrap_or(usize::MAX),
            whole_huge_pages: config.whole_huge_pages,
            reserved: AtomicUsize::new(0),
            blocks: AtomicUsize::new(0),
            refused: AtomicUsize::new(usize::MAX),
        }
    }

    /// Takes a block for `layout`, which an error will report as the request.
    pub(super) fn take(&self, layout: Layout) -> Result<Block, ArenaError> {
        self.take_exactly(self.rounded(layout)?, layout)
    }

    /// Takes a block of so many bytes, which are whole pages, and so aligned, for `layout`.
    pub(super) fn take_exactly(&self, (bytes, align): (usize, usize), layout: Layout) -> Result<Block, ArenaError> {
        self.reserve(bytes)
            .map_err(|left| ArenaError::new(Reason::Limit, layout, left))?;
        let Some(block) = self.backing.take(bytes, align) else {
            // Relaxed, twice: numbers by themselves.
            self.reserved.fetch_sub(bytes, Ordering::Relaxed);
            self.refused.fetch_min(bytes, Ordering::Relaxed);
            return Err(self.no_pages(layout));
        };
        // Relaxed, twice: advice, and a statistic.
        self.refused.store(usize::MAX, Ordering::Relaxed);
        self.blocks.fetch_add(1, Ordering::Relaxed);
        debug_assert_eq!(
            block.memory.len(),
            bytes,
            "a block is whole pages, and no more than asked"
        );
        Ok(block)
    }

    /// To be called before requests that begin at `most` bytes and go down to `least`, the size and alignment of the
    /// shortest block: `None` if the backing has not even that one. If none of these was refused of late, this does not
    /// ask. Otherwise it asks once; a block that it gets goes back, since a longer one may be there.
    ///
    /// While it is here another arena may be refused it, and the other way round. So that not both give up, and the
    /// block stays free, the outcome is how often to ask for it once more.
    pub(super) fn tries(&self, most: usize, least: (usize, usize)) -> Option<Range<u32>> {
        if self.refused() > most {
            return Some(0..0);
        }
        match self.take_exactly(least, Layout::new::<u8>()) {
            Ok(block) => {
                // SAFETY: taken here, whole, and nothing has used it.
                unsafe { self.give(block.memory) };
                Some(0..RETRIES)
            }
            Err(error) => (error.reason() != Reason::NoPages).then_some(0..0),
        }
    }

    /// The refusal of a layout for which the backing has no block.
    pub(super) fn no_pages(&self, layout: Layout) -> ArenaError {
        ArenaError::new(Reason::NoPages, layout, self.left())
    }

    /// Gives a block back.
    ///
    /// # Safety
    ///
    /// The block was taken here, is given back whole, and nothing uses it any more.
    pub(super) unsafe fn give(&self, memory: NonNull<[u8]>) {
        // SAFETY: the caller's promise.
        unsafe { self.backing.give(memory) };
        // Relaxed, throughout: numbers by themselves.
        self.refused.store(usize::MAX, Ordering::Relaxed);
        self.reserved.fetch_sub(memory.len(), Ordering::Relaxed);
        self.blocks.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether a block for `bytes` bytes consists of whole huge pages.
    fn is_huge(&self, bytes: usize) -> bool {
        self.whole_huge_pages && bytes >= HUGE_BYTES
    }

    /// The unit of the length of a block for `bytes` bytes.
    pub(super) fn unit(&self, bytes: usize) -> usize {
        if self.is_huge(bytes) {
            HUGE_BYTES.max(self.page_bytes)
        } else {
            self.page_bytes
        }
    }

    /// So many bytes, less what would use only a part of a last huge page, if there are to be whole ones: for blocks
    /// that may be shorter.
    pub(super) fn whole(&self, bytes: usize) -> usize {
        let unit = if self.is_huge(bytes) { self.unit(bytes) } else { 1 };
        bytes & !(unit - 1)
    }

    /// The size and alignment of the block that holds `layout`.
    pub(super) fn rounded(&self, layout: Layout) -> Result<(usize, usize), ArenaError> {
        let (huge, unit) = (self.is_huge(layout.size()), self.unit(layout.size()));
        let bytes = layout.size().max(1).checked_next_multiple_of(unit);
        let bytes = bytes.filter(|&bytes| isize::try_from(bytes).is_ok());
        let align = if huge {
            layout.align().max(HUGE_BYTES)
        } else {
            layout.align()
        };
        bytes
            .map(|bytes| (bytes, align))
            .ok_or(ArenaError::new(Reason::TooLarge, layout, isize::MAX as usize))
    }

    /// Refuses a total of `bytes` bytes if the limit has no room for that many whole pages, whatever is given back.
    pub(super) fn may_reserve(&self, bytes: usize) -> Result<(), ArenaError> {
        let layout = Layout::from_size_align(bytes, 1).map_err(|_| ArenaError::too_large::<u8>(bytes))?;
        match bytes.checked_next_multiple_of(self.page_bytes) {
            Some(pages) if pages <= self.limit => Ok(()),
            _ => Err(ArenaError::new(Reason::Limit, layout, self.left())),
        }
    }

    /// Refuses a total of `bytes` bytes, which are not there yet, if the backing can never have so many.
    pub(super) fn may_have(&self, bytes: usize) -> Result<(), ArenaError> {
        if bytes <= self.backing.most_bytes() {
            return Ok(());
        }
        let layout = Layout::from_size_align(bytes, 1).map_err(|_| ArenaError::too_large::<u8>(bytes))?;
        Err(self.no_pages(layout))
    }

    /// Adds `bytes` to the reserved bytes if the limit allows; otherwise returns how much it leaves.
    fn reserve(&self, bytes: usize) -> Result<(), usize> {
        // Relaxed, twice: a number by itself.
        let mut reserved = self.reserved.load(Ordering::Relaxed);
        loop {
            let left = self.limit.saturating_sub(reserved);
            if bytes > left {
                return Err(left);
            }
            match self
                .reserved
                .compare_exchange_weak(reserved, reserved + bytes, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return Ok(()),
                Err(now) => reserved = now,
            }
        }
    }

    /// The page size in bytes.
    pub(super) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// The most that may be reserved.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes taken and not given back.
    pub(super) fn reserved(&self) -> usize {
        // Relaxed: a number by itself.
        self.reserved.load(Ordering::Relaxed)
    }

    /// The length of the shortest block that the backing has just refused; `usize::MAX` if it has not.
    pub(super) fn refused(&self) -> usize {
        // Relaxed: advice.
        self.refused.load(Ordering::Relaxed)
    }

    /// Bytes that may still be taken under the limit.
    pub(super) fn left(&self) -> usize {
        match self.limit {
            usize::MAX => usize::MAX,
            limit => limit.saturating_sub(self.reserved()),
        }
    }

    /// The largest possible block if `bytes` of the bytes taken were given back, as far as the limit and the backing
    /// can tell.
    pub(super) fn left_without(&self, bytes: usize) -> usize {
        let kept = self.reserved().saturating_sub(bytes);
        self.limit.min(self.backing.most_bytes()).saturating_sub(kept)
    }

    /// Blocks taken and not given back.
    pub(super) fn blocks(&self) -> usize {
        // Relaxed: a statistic.
        self.blocks.load(Ordering::Relaxed)
    }

    /// The debug output of an arena or a list: its limit, and what it has taken. Waits for nobody.
    pub(super) fn shown<'a, 'b>(&self, f: &'a mut fmt::Formatter<'b>, name: &str) -> fmt::DebugStruct<'a, 'b> {
        let mut shown = f.debug_struct(name);
        shown
            .field("limit", &Some(self.limit).filter(|&limit| limit != usize::MAX))
            .field("reserved", &self.reserved())
            .field("blocks", &self.blocks());
        shown
    }

    /// The backing.
    pub(super) fn backing(&self) -> &B {
        &self.backing
    }
}
