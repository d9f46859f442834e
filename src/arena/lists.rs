//! Lists of slabs and blocks, linked by their feet: in the order of use, and by size.
//!
//! ```text
//!   Queue   spare ──take──▶ (current) ──▶ used          a reset puts used in front of spare: the same order again
//!
//!   Bins    0         1          2                8              15
//!           < 8 KiB   < 16 KiB   < 32 KiB    …    < 2 MiB   …    128 MiB and all that is larger
//! ```
//!
//! A foot is the last thing in its slab, and links it both ways, so an arena's lists need no other memory, and any slab
//! can leave its list. Lists are first in, first out, so that a round like the last finds what it needs at the front.
//!
//! Worked: blocks of 104 KiB are in bin 4, one of 10 MiB is in bin 11.
//!
//! Cost: a push 1 ns; a search at most [`LOOKS`] feet in each list; joining two lists, or asking how many bytes one
//! holds, O(1).

use core::alloc::Layout;
use core::array;
use core::ptr::{self, NonNull};

use super::account::Account;
use super::backing::Backing;
use super::cursor::{MOST_BYTES, grains, padding};
use super::error::ArenaError;
use crate::bitmap::ones;
use crate::sync::{AtomicPtr, AtomicUsize, Ordering};

// Relaxed throughout: feet and lists are accessed under the lock of their slabs, or with exclusive access to the arena.
// So no exchange is needed either, which costs ten times as much as a load and a store.

/// The number of lists.
const BINS: usize = 16;

/// The first list is for blocks of less than twice this many bytes, as a power of two.
const FIRST_BITS: u32 = 12;

/// How many slabs of a list are examined for one that fits.
const LOOKS: usize = 16;

/// The footer of a slab.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Foot {
    next: *mut Foot,
    before: *mut Foot,
    /// Bytes of the whole block, the foot included.
    pub(super) bytes: usize,
    /// Bytes that have been cut off at least once since the block was taken.
    pub(super) high: usize,
}

/// Bytes that the foot takes.
pub(super) const FOOT_BYTES: usize = grains(size_of::<Foot>());

impl Foot {
    /// The foot of a block that has just been taken.
    fn new(block: NonNull<[u8]>) -> Self {
        Self {
            next: ptr::null_mut(),
            before: ptr::null_mut(),
            bytes: block.len(),
            high: 0,
        }
    }

    /// The block whose foot this is.
    ///
    /// # Safety
    ///
    /// The foot lives, and the pointer comes from `take_block`, or from one to the block's memory.
    pub(super) unsafe fn block(foot: NonNull<Self>) -> NonNull<[u8]> {
        // SAFETY: the caller's promise; the block begins so many bytes before its foot.
        unsafe {
            let bytes = foot.as_ref().bytes;
            NonNull::slice_from_raw_parts(foot.cast::<u8>().sub(bytes - FOOT_BYTES), bytes)
        }
    }

    /// Whether the slab has room for `bytes` bytes aligned to `align`, and a cursor can count that far.
    pub(super) fn fits(&self, bytes: usize, align: usize) -> bool {
        let room = self.bytes - FOOT_BYTES;
        let need = padding(ptr::from_ref(self).addr() - room, align) + bytes;
        (need..=MOST_BYTES).contains(&room)
    }
}

/// The bytes of a block without its foot.
pub(super) fn room(block: NonNull<[u8]>) -> usize {
    block.len() - FOOT_BYTES
}

/// Where the first object in a block lies: its first byte and its end.
pub(super) fn place(block: NonNull<[u8]>, layout: Layout) -> (usize, usize) {
    let start = padding(block.addr().get(), layout.align());
    (start, start + grains(layout.size()))
}

/// An allocation, and the foot of its block, if that is for nothing else.
pub(super) type Cut = (NonNull<u8>, Option<NonNull<Foot>>);

impl<B: Backing> Account<B> {
    /// Takes a block that holds `bytes` bytes and its foot.
    pub(super) fn take_block(&self, bytes: usize, align: usize) -> Result<NonNull<Foot>, ArenaError> {
        let layout = self.block_layout(bytes, align)?;
        let block = self.take_exactly(self.block_size(layout)?, layout)?.memory;
        // SAFETY: inside the block, which is ours alone; pages are in whole grains.
        let foot = unsafe { block.cast::<u8>().add(room(block)).cast::<Foot>() };
        // SAFETY: as above.
        unsafe { foot.write(Foot::new(block)) };
        Ok(foot)
    }

    /// Takes a slab of `bytes` bytes, foot included, or half, or a quarter, … down to `least`. Each request may be a
    /// system call: so no number of pages is requested twice, and of a backing that is still full only the least.
    pub(super) fn take_slab(&self, bytes: usize, least: usize) -> Result<NonNull<Foot>, ArenaError> {
        let mut bytes = bytes.max(least);
        let layout = self.block_layout(least - FOOT_BYTES, 1)?;
        let shortest = self.block_size(layout)?;
        let mut tries = self.tries(bytes, shortest).ok_or_else(|| self.no_pages(layout))?;
        // By what is requested, which is rounded up: two blocks may be as long, but the longer one's aligned to more.
        let block = |bytes| self.block_size(self.block_layout(bytes - FOOT_BYTES, 1)?);
        loop {
            match self.take_block(bytes - FOOT_BYTES, 1) {
                Err(_) if block(bytes) != Ok(shortest) || tries.next().is_some() => bytes = (bytes / 2).max(least),
                done => return done,
            }
        }
    }

    /// Refuses a block that holds `bytes` bytes and its foot, if the backing has just refused one as short and is not
    /// to be asked `again`.
    pub(super) fn may_take(&self, bytes: usize, align: usize, again: bool) -> Result<(), ArenaError> {
        let layout = self.block_layout(bytes, align)?;
        let (bytes, _) = self.block_size(layout)?;
        if again || self.refused() > bytes {
            Ok(())
        } else {
            Err(self.no_pages(layout))
        }
    }

    /// The size of such a block.
    pub(super) fn block_bytes(&self, bytes: usize, align: usize) -> Result<usize, ArenaError> {
        let (bytes, _) = self.block_size(self.block_layout(bytes, align)?)?;
        Ok(bytes)
    }

    /// The size and alignment of the block for a [`block_layout`](Self::block_layout). An object that fills its huge
    /// pages gets a page more for the foot, not a huge page.
    fn block_size(&self, layout: Layout) -> Result<(usize, usize), ArenaError> {
        let (bytes, align) = self.rounded(layout)?;
        let over = layout.size() % self.unit(layout.size());
        if (1..=FOOT_BYTES).contains(&over) {
            return Ok((layout.size().next_multiple_of(self.page_bytes()), align));
        }
        Ok((bytes, align))
    }

    /// Aligned to at least a page.
    fn block_layout(&self, bytes: usize, align: usize) -> Result<Layout, ArenaError> {
        bytes
            .checked_add(FOOT_BYTES)
            .and_then(|bytes| Layout::from_size_align(bytes, align.max(self.page_bytes())).ok())
            .ok_or(ArenaError::too_large::<u8>(bytes))
    }
}

/// Slabs, linked by their feet, in the order in which they were pushed.
#[derive(Debug)]
pub(super) struct List {
    first: AtomicPtr<Foot>,
    last: AtomicPtr<Foot>,
    /// Of all blocks, feet included.
    bytes: AtomicUsize,
}

impl List {
    pub(super) fn new() -> Self {
        Self {
            first: AtomicPtr::new(ptr::null_mut()),
            last: AtomicPtr::new(ptr::null_mut()),
            bytes: AtomicUsize::new(0),
        }
    }

    fn is_empty(&self) -> bool {
        self.first.load(Ordering::Relaxed).is_null()
    }

    /// Bytes of all blocks, feet included.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Appends a slab.
    ///
    /// # Safety
    ///
    /// The lists are the caller's; the foot lives and is in none.
    pub(super) unsafe fn push(&self, foot: NonNull<Foot>) {
        let last = self.last.load(Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe {
            (*foot.as_ptr()).next = ptr::null_mut();
            (*foot.as_ptr()).before = last;
        }
        match NonNull::new(last) {
            None => self.first.store(foot.as_ptr(), Ordering::Relaxed),
            // SAFETY: feet in a list live, and the list is the caller's.
            Some(last) => unsafe { (*last.as_ptr()).next = foot.as_ptr() },
        }
        self.last.store(foot.as_ptr(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        self.count(unsafe { foot.as_ref().bytes });
    }

    /// Takes the first slab.
    ///
    /// # Safety
    ///
    /// The lists are the caller's.
    pub(super) unsafe fn pop(&self) -> Option<NonNull<Foot>> {
        // SAFETY: passed on.
        unsafe { self.take(|_| Some(0)) }
    }

    /// Takes, of the first [`LOOKS`] slabs, the one of least `cost`, or the first of several. Skips those whose cost is
    /// `None`, and stops at one whose cost is zero.
    ///
    /// # Safety
    ///
    /// The lists are the caller's.
    pub(super) unsafe fn take(&self, cost: impl Fn(&Foot) -> Option<usize>) -> Option<NonNull<Foot>> {
        let mut at = self.first.load(Ordering::Relaxed);
        let mut best: Option<(usize, NonNull<Foot>)> = None;
        for _ in 0..LOOKS {
            let Some(foot) = NonNull::new(at) else { break };
            // SAFETY: feet in a list live, and the list is the caller's.
            let (cost, next) = unsafe { (cost(foot.as_ref()), foot.as_ref().next) };
            if let Some(cost) = cost
                && best.is_none_or(|(least, ..)| cost < least)
            {
                best = Some((cost, foot));
                if cost == 0 {
                    break;
                }
            }
            at = next;
        }
        let (_, foot) = best?;
        // SAFETY: it is of this list.
        unsafe { self.unlink(foot) };
        Some(foot)
    }

    /// # Safety
    ///
    /// The lists are the caller's; `foot` is in this one.
    unsafe fn unlink(&self, foot: NonNull<Foot>) {
        // SAFETY: feet in a list live, and the list is the caller's.
        let Foot {
            next, before, bytes, ..
        } = unsafe { foot.read() };
        match NonNull::new(before) {
            None => self.first.store(next, Ordering::Relaxed),
            // SAFETY: as above.
            Some(before) => unsafe { (*before.as_ptr()).next = next },
        }
        match NonNull::new(next) {
            None => self.last.store(before, Ordering::Relaxed),
            // SAFETY: as above.
            Some(next) => unsafe { (*next.as_ptr()).before = before },
        }
        self.bytes.store(self.bytes() - bytes, Ordering::Relaxed);
    }

    /// Puts all slabs of `other` in front, and leaves `other` empty.
    ///
    /// # Safety
    ///
    /// The lists are the caller's.
    unsafe fn join(&self, other: &Self) {
        let Some(end) = NonNull::new(other.last.load(Ordering::Relaxed)) else {
            return;
        };
        let own = self.first.load(Ordering::Relaxed);
        // SAFETY: feet in a list live, and the lists are the caller's.
        unsafe { (*end.as_ptr()).next = own };
        match NonNull::new(own) {
            None => self.last.store(end.as_ptr(), Ordering::Relaxed),
            // SAFETY: as above.
            Some(own) => unsafe { (*own.as_ptr()).before = end.as_ptr() },
        }
        self.first.store(other.first.load(Ordering::Relaxed), Ordering::Relaxed);
        self.count(other.bytes());
        other.first.store(ptr::null_mut(), Ordering::Relaxed);
        other.last.store(ptr::null_mut(), Ordering::Relaxed);
        other.bytes.store(0, Ordering::Relaxed);
    }

    fn count(&self, bytes: usize) {
        add(&self.bytes, bytes);
    }
}

/// Slabs: the spare ones, which are empty, in the order in which they will be used; and those used in this round.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) spare: List,
    pub(super) used: List,
}

impl Queue {
    pub(super) fn new() -> Self {
        Self {
            spare: List::new(),
            used: List::new(),
        }
    }

    /// Makes the used slabs spare again, in the same order, in front of the others.
    ///
    /// # Safety
    ///
    /// The lists are the caller's.
    pub(super) unsafe fn renew(&self) {
        // SAFETY: passed on.
        unsafe { self.spare.join(&self.used) };
    }
}

/// Blocks, by size.
#[derive(Debug)]
pub(super) struct Bins {
    lists: [List; BINS],
    /// A bit for each list that is not empty.
    filled: AtomicUsize,
}

impl Bins {
    pub(super) fn new() -> Self {
        Self {
            lists: array::from_fn(|_| List::new()),
            filled: AtomicUsize::new(0),
        }
    }

    /// The bin for blocks of this size.
    fn of(bytes: usize) -> usize {
        (bytes.max(1).ilog2().saturating_sub(FIRST_BITS) as usize).min(BINS - 1)
    }

    /// The lists that are not empty, as bits.
    fn filled(&self) -> usize {
        self.filled.load(Ordering::Relaxed)
    }

    /// Bytes of all blocks, feet included.
    pub(super) fn bytes(&self) -> usize {
        ones(self.filled()).map(|bin| self.lists[bin].bytes()).sum()
    }

    /// # Safety
    ///
    /// The lists are the caller's; the foot lives and is in none.
    pub(super) unsafe fn push(&self, foot: NonNull<Foot>) {
        // SAFETY: the caller's promise.
        let bin = Self::of(unsafe { foot.as_ref().bytes });
        // SAFETY: passed on.
        unsafe { self.lists[bin].push(foot) };
        self.filled.store(self.filled() | 1 << bin, Ordering::Relaxed);
    }

    /// Takes a block not much larger than `bytes` bytes: from its bin or the next, chosen as by [`List::take`].
    ///
    /// # Safety
    ///
    /// The lists are the caller's.
    pub(super) unsafe fn take(&self, bytes: usize, cost: impl Fn(&Foot) -> Option<usize>) -> Option<NonNull<Foot>> {
        // SAFETY: passed on.
        ones(self.filled() & 0b11 << Self::of(bytes)).find_map(|bin| unsafe { self.take_from(bin, &cost) })
    }

    /// Takes one of the largest blocks.
    ///
    /// # Safety
    ///
    /// The lists are the caller's.
    pub(super) unsafe fn pop(&self) -> Option<NonNull<Foot>> {
        let largest = self.filled().checked_ilog2()? as usize;
        // SAFETY: passed on.
        unsafe { self.take_from(largest, |_| Some(0)) }
    }

    /// # Safety
    ///
    /// The lists are the caller's.
    unsafe fn take_from(&self, bin: usize, cost: impl Fn(&Foot) -> Option<usize>) -> Option<NonNull<Foot>> {
        // SAFETY: passed on.
        let foot = unsafe { self.lists[bin].take(cost) };
        self.note_empty(bin);
        foot
    }

    /// # Safety
    ///
    /// The lists are the caller's; `foot` is in one of these.
    unsafe fn remove(&self, foot: NonNull<Foot>) {
        // SAFETY: the caller's promise.
        unsafe {
            let bin = Self::of(foot.as_ref().bytes);
            self.lists[bin].unlink(foot);
            self.note_empty(bin);
        }
    }

    fn note_empty(&self, bin: usize) {
        if self.lists[bin].is_empty() {
            self.filled.store(self.filled() & !(1 << bin), Ordering::Relaxed);
        }
    }

    /// Puts all blocks of `other` in front, and leaves `other` empty.
    ///
    /// # Safety
    ///
    /// The lists are the caller's.
    pub(super) unsafe fn join(&self, other: &Self) {
        for bin in ones(other.filled()) {
            // SAFETY: passed on.
            unsafe { self.lists[bin].join(&other.lists[bin]) };
        }
        self.filled.store(self.filled() | other.filled(), Ordering::Relaxed);
        other.filled.store(0, Ordering::Relaxed);
    }
}

/// What a reset does with blocks of large objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Large {
    /// Keeps them for the large objects of the next round.
    Keep,
    /// Returns them to the backing.
    Return,
}

/// Blocks of one object each: those in use, and kept ones, in which nothing lies.
#[derive(Debug)]
pub(super) struct Blocks {
    pub(super) used: Bins,
    pub(super) kept: Bins,
    /// The most bytes in use at one time, as far as recorded.
    most: AtomicUsize,
}

impl Blocks {
    pub(super) fn new() -> Self {
        Self {
            used: Bins::new(),
            kept: Bins::new(),
            most: AtomicUsize::new(0),
        }
    }

    /// Records how much is in use, before that becomes less.
    pub(super) fn note_most(&self) {
        let most = self.most.load(Ordering::Relaxed).max(self.used.bytes());
        self.most.store(most, Ordering::Relaxed);
    }

    /// Keeps a block that was in use.
    ///
    /// # Safety
    ///
    /// The lists are the caller's; the foot is in the used ones, and nothing in its block is used.
    pub(super) unsafe fn keep(&self, foot: NonNull<Foot>) {
        self.note_most();
        // SAFETY: the caller's promise.
        unsafe {
            self.used.remove(foot);
            self.kept.push(foot);
        }
    }

    /// Takes a kept block, if they and the used ones exceed twice the most that was in use at one time.
    ///
    /// # Safety
    ///
    /// The lists are the caller's.
    pub(super) unsafe fn pop_excess(&self) -> Option<NonNull<Foot>> {
        let most = self.most.load(Ordering::Relaxed).saturating_mul(2);
        if self.kept.bytes() + self.used.bytes() <= most {
            return None;
        }
        // SAFETY: passed on.
        unsafe { self.kept.pop() }
    }

    /// Takes any block, a used one first.
    ///
    /// # Safety
    ///
    /// The lists are the caller's, and nothing in the blocks is used.
    pub(super) unsafe fn pop(&self) -> Option<NonNull<Foot>> {
        // SAFETY: passed on.
        unsafe { self.used.pop().or_else(|| self.kept.pop()) }
    }
}

/// Adds to a count, under the lock.
pub(super) fn add(count: &AtomicUsize, amount: usize) {
    count.store(count.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
}
