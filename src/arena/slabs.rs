//! The slabs of an arena: what is being cut, what is full, what is kept for later, and what is too large for a slab.
//!
//! ```text
//!   used    current ──▶ full ──▶ full          ┌────────────────── slab ──────────────────┬──────┐
//!   spare   kept ──▶ kept                      │ cut ████████████░░░░░░ not yet cut        │ foot │
//!   large   one object each                    └──────────────────────────────────────────┴──────┘
//! ```
//!
//! Who finds the current slab full comes here, under the lock: looks again (another may have been before him), takes a
//! spare slab or a new one, closes the cursor and opens it on that. What would take more than half a slab (more than 64
//! KiB, where slabs grow with the arena) gets a block of its own, and the current slab stays: one large object does not
//! cost the small ones their place.
//!
//! Growing is under a lock and not lock-free by choice. Two who need a slab at the same time would both take one, and
//! at the limit one of them would be told that there is none while the other throws his back.
//!
//! The foot of a slab links it into one of the three lists, and notes how far the slab has ever been cut. Feet are read
//! and written under the lock, or with the arena for oneself. Of the current slab the cursor knows, also if its end has
//! fallen since; it is asked before anything is counted.
//!
//! **Reset** joins the used slabs to the spare ones, whole lists at a time, and goes on with the current slab from its
//! beginning: O(1), however many there are.
//!
//! Worked: slabs of 64 KiB, pages of 8 KiB, 6 KiB asked for again and again. A slab has 65,536 − 32 bytes for objects:
//! ten of them. The eleventh finds 4,064 bytes left, comes here, and a slab is taken.

use core::alloc::Layout;
use core::ptr::{self, NonNull};

use super::account::{Account, HUGE_BYTES};
use super::backing::Backing;
use super::config::{ArenaConfig, HugePages};
use super::cursor::{Cursor, MOST_BYTES, grains};
use super::error::ArenaError;
use super::stats::ArenaStats;
use crate::sync::{AtomicPtr, AtomicUsize, Lock, Ordering};

// Relaxed throughout: feet, lists and counts are read and written under the lock, or with the arena for oneself.

/// The first slab of an arena that chooses for itself.
const FIRST_BYTES: usize = 32 << 10;

/// The smallest slab: for pages that are tiny.
const LEAST_BYTES: usize = 256;

/// The largest slab of an arena that chooses for itself: a huge page.
const LARGEST_BYTES: usize = 2 << 20;

/// The largest object that such an arena puts into a slab with others. Does not change as the arena grows, so that a
/// round like the last asks for the same.
const LARGE_BYTES: usize = 64 << 10;

/// Spare slabs looked at for one that fits.
const LOOKS: usize = 16;

/// What stands at the end of a slab.
#[derive(Debug)]
#[repr(C)]
struct Foot {
    next: *mut Foot,
    /// The whole block, the foot included.
    block: NonNull<[u8]>,
    /// Bytes that have been cut off at least once since the block was taken.
    high: usize,
}

/// Room that the foot takes.
const FOOT_BYTES: usize = grains(size_of::<Foot>());

/// What a block holds beside its foot.
fn room(block: NonNull<[u8]>) -> usize {
    block.len() - FOOT_BYTES
}

/// A list of slabs by their feet, newest first.
#[derive(Debug)]
struct List {
    first: AtomicPtr<Foot>,
    last: AtomicPtr<Foot>,
}

impl List {
    fn new() -> Self {
        Self {
            first: AtomicPtr::new(ptr::null_mut()),
            last: AtomicPtr::new(ptr::null_mut()),
        }
    }

    fn first(&self) -> Option<NonNull<Foot>> {
        NonNull::new(self.first.load(Ordering::Relaxed))
    }

    /// # Safety
    ///
    /// The lists are the caller's, the foot lives and is in none.
    unsafe fn push(&self, foot: NonNull<Foot>) {
        let first = self.first.load(Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { (*foot.as_ptr()).next = first };
        self.first.store(foot.as_ptr(), Ordering::Relaxed);
        if first.is_null() {
            self.last.store(foot.as_ptr(), Ordering::Relaxed);
        }
    }

    /// # Safety
    ///
    /// The lists are the caller's.
    unsafe fn pop(&self) -> Option<NonNull<Foot>> {
        // SAFETY: passed on; any foot will do.
        unsafe { self.take_where(1, |_| true) }
    }

    /// Takes the first of the first `looks` that `fits`.
    ///
    /// # Safety
    ///
    /// The lists are the caller's.
    unsafe fn take_where(&self, looks: usize, fits: impl Fn(&Foot) -> bool) -> Option<NonNull<Foot>> {
        let mut before: Option<NonNull<Foot>> = None;
        let mut at = self.first();
        for _ in 0..looks {
            let foot = at?;
            // SAFETY: feet in a list live, and the list is the caller's.
            let (next, found) = unsafe { (foot.as_ref().next, fits(foot.as_ref())) };
            if found {
                match before {
                    None => self.first.store(next, Ordering::Relaxed),
                    // SAFETY: as above.
                    Some(before) => unsafe { (*before.as_ptr()).next = next },
                }
                if next.is_null() {
                    let last = before.map_or(ptr::null_mut(), NonNull::as_ptr);
                    self.last.store(last, Ordering::Relaxed);
                }
                return Some(foot);
            }
            before = Some(foot);
            at = NonNull::new(next);
        }
        None
    }

    /// Puts all of `other` in front, and leaves it empty.
    ///
    /// # Safety
    ///
    /// The lists are the caller's.
    unsafe fn join(&self, other: &Self) {
        let (first, last) = (other.first.load(Ordering::Relaxed), other.last.load(Ordering::Relaxed));
        let Some(end) = NonNull::new(last) else {
            return;
        };
        let own = self.first.load(Ordering::Relaxed);
        // SAFETY: the last foot of a list lives, and the lists are the caller's.
        unsafe { (*end.as_ptr()).next = own };
        if own.is_null() {
            self.last.store(last, Ordering::Relaxed);
        }
        self.first.store(first, Ordering::Relaxed);
        other.first.store(ptr::null_mut(), Ordering::Relaxed);
        other.last.store(ptr::null_mut(), Ordering::Relaxed);
    }
}

/// What becomes of large blocks at a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Large {
    /// They are kept as spare slabs.
    Keep,
    /// They go back to the backing.
    Return,
}

/// All memory of an arena, cut by one cursor.
#[derive(Debug)]
pub(super) struct Slabs<B: Backing> {
    cursor: Cursor,
    lock: Lock,
    used: List,
    spare: List,
    large: List,
    /// Bytes cut off slabs that are no longer current, and bytes of large blocks in use.
    full: AtomicUsize,
    /// Bytes ever cut off, as far as it is noted in the feet.
    committed: AtomicUsize,
    /// The most that was ever in use, as far as it has been noted.
    peak: AtomicUsize,
    account: Account<B>,
    /// Bytes of a slab; 0 if the arena chooses.
    slab_bytes: usize,
}

impl<B: Backing> Slabs<B> {
    /// No slabs yet, or as many as the configuration asks for at once.
    ///
    /// # Errors
    /// If these cannot be had.
    pub(super) fn new(backing: B, config: &ArenaConfig, slab_bytes: Option<usize>) -> Result<Self, ArenaError> {
        // Less than a huge page would never be one.
        let huge = (config.huge_pages == HugePages::Aligned).then_some(HUGE_BYTES);
        let slab_bytes = config.slab.or(huge).or(slab_bytes).unwrap_or(0);
        let mut slabs = Self {
            cursor: Cursor::new(),
            lock: Lock::new(),
            used: List::new(),
            spare: List::new(),
            large: List::new(),
            full: AtomicUsize::new(0),
            committed: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            account: Account::new(backing, config),
            slab_bytes,
        };
        slabs.reserve(config.prealloc)?;
        Ok(slabs)
    }

    /// Takes slabs until `bytes` bytes are reserved. Slabs of a size of the arena's choice: in one block, if it can be.
    ///
    /// # Errors
    /// If they cannot be had. What was taken stays.
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<(), ArenaError> {
        while let missing @ 1.. = bytes.saturating_sub(self.account.reserved()) {
            let size = if self.slab_bytes == 0 { missing } else { self.slab_bytes };
            let size = size.clamp(LEAST_BYTES, MOST_BYTES);
            // Where the limit has no room for a whole slab, what is asked for may yet fit.
            let slab = self.new_slab(size, missing.clamp(LEAST_BYTES, size))?;
            // SAFETY: the arena is ours alone, and the foot new.
            unsafe { self.spare.push(slab) };
        }
        Ok(())
    }

    /// Memory for `layout`, which is not of zero bytes.
    #[inline(always)]
    pub(super) fn allocate(&self, layout: Layout) -> Result<NonNull<u8>, ArenaError> {
        match self.cursor.bump(layout.size(), layout.align()) {
            Some(memory) => Ok(memory),
            None => self.grow(layout),
        }
    }

    /// See [`Cursor::move_end`].
    #[inline]
    pub(super) fn move_end(&self, start: NonNull<u8>, end: *const u8, new_end: *const u8) -> bool {
        self.cursor.move_end(start, end, new_end)
    }

    #[cold]
    #[inline(never)]
    fn grow(&self, layout: Layout) -> Result<NonNull<u8>, ArenaError> {
        let _guard = self.lock.lock();
        if let Some(memory) = self.cursor.bump(layout.size(), layout.align()) {
            return Ok(memory);
        }
        // Slabs begin on a border of pages; what is aligned to more gets a block that is aligned to it.
        let bytes = grains(layout.size());
        let slab_bytes = self.next_slab_bytes();
        let large = if self.slab_bytes == 0 {
            LARGE_BYTES
        } else {
            (slab_bytes - FOOT_BYTES) / 2
        };
        if bytes > large || layout.align() > self.account.page_bytes() || self.cursor.is_spent() {
            return self.grow_large(layout);
        }
        // SAFETY: under the lock.
        let kept = unsafe { self.spare.take_where(LOOKS, |foot| fits(foot, bytes)) };
        let slab = match kept {
            Some(slab) => slab,
            None => self
                .new_slab(slab_bytes, bytes + FOOT_BYTES)
                .map_err(|error| error.asked_for(layout))?,
        };
        self.leave();
        // SAFETY: the foot is of a slab that is ours, under the lock, and in no list.
        let block = unsafe {
            self.used.push(slab);
            slab.as_ref().block
        };
        self.cursor.open(block.cast(), room(block), bytes);
        Ok(block.cast())
    }

    /// A block for one object.
    fn grow_large(&self, layout: Layout) -> Result<NonNull<u8>, ArenaError> {
        let bytes = grains(layout.size());
        let aligned = |foot: &Foot| foot.block.addr().get() & (layout.align() - 1) == 0;
        // SAFETY: under the lock.
        let kept = unsafe { self.spare.take_where(LOOKS, |foot| fits(foot, bytes) && aligned(foot)) };
        let slab = match kept {
            Some(slab) => slab,
            // On a border of pages at least: after a reset it may be a slab.
            None => self
                .new_block(bytes, layout.align().max(self.account.page_bytes()))
                .map_err(|error| error.asked_for(layout))?,
        };
        self.note_fall();
        // SAFETY: the foot is of a block that is ours, under the lock, and in no list.
        let block = unsafe {
            self.cut(slab, bytes);
            self.large.push(slab);
            slab.as_ref().block
        };
        add(&self.full, bytes);
        Ok(block.cast())
    }

    /// Closes the current slab, and notes how far it was cut.
    fn leave(&self) {
        let offset = self.cursor.close();
        self.note_fall();
        if let (Some(offset), Some(foot)) = (offset, self.used.first()) {
            add(&self.full, offset);
            // SAFETY: under the lock; the first used slab is the current one.
            unsafe { self.cut(foot, offset) };
        }
    }

    /// Notes how far the current slab was cut before its end fell, if it did: in its foot, and for the peak. With the
    /// arena for oneself, or under the lock, before anything more counts as full.
    #[inline(always)]
    fn note_fall(&self) {
        if self.cursor.has_fallen() {
            self.note_fallen();
        }
    }

    #[cold]
    fn note_fallen(&self) {
        if let (Some(offset), Some(foot)) = (self.cursor.take_fallen(), self.used.first()) {
            // SAFETY: under the lock; the first used slab is the current one.
            unsafe { self.cut(foot, offset) };
            self.raise_peak(self.full.load(Ordering::Relaxed) + offset);
        }
    }

    /// Notes that a slab has been cut up to `offset`.
    ///
    /// # Safety
    ///
    /// The foot lives, and is the caller's.
    unsafe fn cut(&self, foot: NonNull<Foot>, offset: usize) {
        // SAFETY: the caller's promise.
        let high = unsafe { &mut (*foot.as_ptr()).high };
        if offset > *high {
            add(&self.committed, offset - *high);
            *high = offset;
        }
    }

    /// How large the next slab should be: as much as there is already, within bounds.
    fn next_slab_bytes(&self) -> usize {
        let bytes = match self.slab_bytes {
            0 => self.account.reserved().clamp(FIRST_BYTES, LARGEST_BYTES),
            bytes => bytes.clamp(LEAST_BYTES, MOST_BYTES),
        };
        bytes.next_multiple_of(self.account.page_bytes())
    }

    /// A slab of `bytes` bytes, or half, or a quarter, … down to `least`.
    fn new_slab(&self, bytes: usize, least: usize) -> Result<NonNull<Foot>, ArenaError> {
        let mut bytes = bytes.max(least);
        loop {
            // On a border of pages: the first object may want as much.
            match self.new_block(bytes - FOOT_BYTES, self.account.page_bytes()) {
                Err(_) if bytes > least => bytes = (bytes / 2).max(least),
                done => return done,
            }
        }
    }

    /// A block that holds `bytes` bytes and its foot.
    fn new_block(&self, bytes: usize, align: usize) -> Result<NonNull<Foot>, ArenaError> {
        let layout = bytes
            .checked_add(FOOT_BYTES)
            .and_then(|bytes| Layout::from_size_align(bytes, align).ok())
            .ok_or(ArenaError::too_large::<u8>(bytes))?;
        let block = self.account.take(layout)?.memory;
        // SAFETY: inside the block, which is ours alone; pages are in whole grains.
        let foot = unsafe { block.cast::<u8>().add(room(block)).cast::<Foot>() };
        // SAFETY: as above.
        unsafe {
            foot.write(Foot {
                next: ptr::null_mut(),
                block,
                high: 0,
            });
        }
        Ok(foot)
    }

    /// Forgets all that was allocated, and keeps the slabs. O(1), and a call to the backing for each large block that
    /// is to be returned.
    pub(super) fn reset(&mut self, large: Large) {
        self.note_fall();
        self.note_peak();
        // SAFETY: with the arena for ourselves.
        unsafe {
            match large {
                Large::Keep => self.spare.join(&self.large),
                Large::Return => self.give_all(&self.large),
            }
            let current = self.used.pop();
            self.spare.join(&self.used);
            if let Some(current) = current {
                // How far that is cut; nothing, if the cursor is in no slab and this is an older one.
                self.cut(current, self.cursor.offset());
                self.used.push(current);
                let block = current.as_ref().block;
                self.cursor.begin(block.cast(), room(block));
            } else {
                self.cursor.clear();
            }
        }
        self.full.store(0, Ordering::Relaxed);
    }

    /// Gives back slabs that nothing is allocated in, until not more than `bytes` bytes are reserved or there are no
    /// such slabs.
    pub(super) fn shrink_to(&mut self, bytes: usize) {
        self.note_fall();
        // SAFETY: with the arena for ourselves: nobody else uses the lists, and nothing lies in spare slabs, nor in the
        // current one if it is not cut.
        unsafe {
            while self.account.reserved() > bytes
                && let Some(foot) = self.spare.pop()
            {
                self.give(foot);
            }
            if self.account.reserved() > bytes && self.cursor.offset() == 0 && self.cursor.close().is_some() {
                if let Some(foot) = self.used.pop() {
                    self.give(foot);
                }
                if self.used.first().is_none() {
                    self.cursor.clear();
                }
            }
        }
    }

    /// Gives a slab back.
    ///
    /// # Safety
    ///
    /// The foot is in no list, and nothing in the slab is used.
    unsafe fn give(&self, foot: NonNull<Foot>) {
        // SAFETY: the caller's promise.
        unsafe {
            let Foot { block, high, .. } = foot.read();
            self.committed
                .store(self.committed.load(Ordering::Relaxed) - high, Ordering::Relaxed);
            self.account.give(block);
        }
    }

    /// Gives all slabs of a list back.
    ///
    /// # Safety
    ///
    /// The lists are the caller's, and nothing in the slabs is used.
    unsafe fn give_all(&self, list: &List) {
        // SAFETY: the caller's promise.
        unsafe {
            while let Some(foot) = list.pop() {
                self.give(foot);
            }
        }
    }

    /// Counts what is in use now, for the peak. With the arena for oneself, or under the lock.
    fn note_peak(&self) -> usize {
        let allocated = self.full.load(Ordering::Relaxed) + self.cursor.offset();
        self.raise_peak(allocated);
        allocated
    }

    fn raise_peak(&self, allocated: usize) {
        let peak = self.peak.load(Ordering::Relaxed).max(allocated);
        self.peak.store(peak, Ordering::Relaxed);
    }

    /// Counts. Waits for whoever is growing the arena.
    pub(super) fn stats(&self) -> ArenaStats {
        let _guard = self.lock.lock();
        self.note_fall();
        let offset = self.cursor.offset();
        // SAFETY: under the lock; feet in a list live.
        let high = self.used.first().map_or(0, |foot| unsafe { foot.as_ref().high });
        ArenaStats {
            limit: self.account.limit(),
            reserved: self.account.reserved(),
            committed: self.committed.load(Ordering::Relaxed) + offset.saturating_sub(high),
            allocated: self.note_peak(),
            peak: self.peak.load(Ordering::Relaxed),
            slabs: self.account.blocks(),
        }
    }

    /// The account, for what is known of the limit.
    pub(super) fn account(&self) -> &Account<B> {
        &self.account
    }

    /// Runs `work` under the lock.
    pub(super) fn locked<R>(&self, work: impl FnOnce() -> R) -> R {
        let _guard = self.lock.lock();
        work()
    }
}

impl<B: Backing> Drop for Slabs<B> {
    fn drop(&mut self) {
        // SAFETY: with the arena for ourselves; whatever was allocated has ended with it.
        unsafe {
            self.give_all(&self.used);
            self.give_all(&self.spare);
            self.give_all(&self.large);
        }
    }
}

fn fits(foot: &Foot, bytes: usize) -> bool {
    (bytes..=MOST_BYTES).contains(&room(foot.block))
}

/// Adds to a count, under the lock.
fn add(count: &AtomicUsize, amount: usize) {
    count.store(count.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
}
