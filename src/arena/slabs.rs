//! The slabs of an arena: the one being cut, full ones, spare ones, and blocks for objects too large for a slab.
//!
//! ```text
//!   current                                     ┌────────────────── slab ──────────────────┬──────┐
//!   reserved, demanded:  used  full ──▶ full    │ cut ████████████░░░░░░ not yet cut        │ foot │
//!                        spare kept ──▶ kept    └──────────────────────────────────────────┴──────┘
//!   blocks  used  one object each, or one piece of a Local
//!           kept  the same, in which nothing lies
//! ```
//!
//! A thread that finds the current slab full comes here and takes the lock. It looks again (another thread may have
//! been faster), takes a spare or a new slab, closes the cursor and opens it on that slab. An object larger than half a
//! slab (larger than 64 KiB, if slabs grow with the arena) gets a block of its own, and the current slab stays: one
//! large object does not cost the small ones their place.
//!
//! **Reserved memory** is for everything. If the reservation is one slab as large as requested, large objects are cut
//! off it as well. The rest of the current slab is then lost; it is less than such an object and its alignment.
//!
//! **A reset** puts the used lists in front of the spare ones, whole lists at a time, in the order of use. Afterwards
//! no slab is open, as in a new arena. So a round like the last makes the same choices, finds the same slabs and blocks
//! for the same objects, and takes nothing new: large objects first look for blocks of exactly their size, and slabs
//! taken for small objects are opened for them only before a refusal. (Not always, if the last round began with what
//! rounds unlike it had left.) Of the blocks that no object used, as many are kept as bring the total to twice the most
//! that was ever in use at one time. The same holds for a block that a [`Local`](super::Local) gives back.
//!
//! **Before a request is refused**, any spare slab will do for it; then spare memory is returned to the backing, if
//! that may make room. Reserved memory stays. A request to the backing may be a system call, or make a heap collect
//! what it keeps: so a full one is asked once for each request here, for the shortest block that will do.
//!
//! Growth takes a lock, and is not lock-free, by choice. Two threads that need a slab at once would both take one, and
//! at the limit one of them would be refused while the other returns its slab.
//!
//! The foot of a slab links it into a list ([`lists`](super::lists)) and records how far the slab has ever been cut.
//! Feet are accessed under the lock, or with exclusive access to the arena. For the current slab the cursor knows this,
//! even if its end has fallen since; it is asked before anything is counted.
//!
//! Worked: slabs of 64 KiB on pages of 8 KiB, objects of 6 KiB. A slab has 65,536 − 32 bytes for objects: ten of them.
//! The eleventh finds 4,064 bytes left and comes here, and a slab is taken.

use core::alloc::Layout;
use core::ptr::{self, NonNull};

use super::account::{Account, HUGE_BYTES};
use super::backing::Backing;
use super::config::ArenaConfig;
use super::cursor::{Cursor, MOST_SLAB_BYTES, grains};
use super::error::{ArenaError, Reason};
use super::lists::{Blocks, Cut, FOOT_BYTES, Foot, Large, Queue, add, place, room};
use super::stats::ArenaStats;
use crate::sync::{AtomicPtr, AtomicUsize, Lock, Ordering};

// Relaxed throughout: feet, lists and counts are accessed under the lock, or with exclusive access to the arena.

/// The first slab of an arena that chooses the sizes itself.
const FIRST_BYTES: usize = 32 << 10;

/// The smallest slab, for tiny pages.
const LEAST_BYTES: usize = 256;

/// The largest slab of an arena that chooses the sizes itself: a huge page.
const LARGEST_BYTES: usize = 2 << 20;

/// The largest object that such an arena opens a slab for. It does not change as the arena grows, so that a round like
/// the last makes the same requests.
const LARGE_BYTES: usize = 64 << 10;

/// The queue of reserved slabs, which are kept until the arena is shrunk.
const RESERVED: usize = 0;

/// The queue of slabs taken on demand.
const DEMANDED: usize = 1;

/// Reserved slabs are used first.
const QUEUES: [usize; 2] = [RESERVED, DEMANDED];

/// All memory of an arena, cut by one cursor.
#[derive(Debug)]
pub(super) struct Slabs<B: Backing> {
    cursor: Cursor,
    lock: Lock,
    /// The slab that the cursor is in; null if none.
    current: AtomicPtr<Foot>,
    /// The queue it belongs to.
    current_queue: AtomicUsize,
    queues: [Queue; 2],
    blocks: Blocks,
    /// Bytes cut off slabs that are no longer current, and bytes of large blocks in use.
    full: AtomicUsize,
    /// Bytes ever cut off, as far as the feet record it.
    committed: AtomicUsize,
    /// The most that was ever in use, as far as recorded.
    peak: AtomicUsize,
    account: Account<B>,
    /// The size of a slab; 0 if the arena chooses.
    slab_bytes: usize,
    /// The largest object that a slab is opened for.
    large_bytes: usize,
}

impl<B: Backing> Slabs<B> {
    /// Creates the slabs of an arena: none, or the preallocation of the configuration.
    ///
    /// # Errors
    /// Fails if the preallocation cannot be made.
    pub(super) fn new(backing: B, config: &ArenaConfig, slab_bytes: Option<usize>) -> Result<Self, ArenaError> {
        // A smaller slab could never be a huge page.
        let huge = config.whole_huge_pages.then_some(HUGE_BYTES);
        let slab_bytes = config.slab.or(huge).or(slab_bytes).unwrap_or(0);
        let mut slabs = Self {
            cursor: Cursor::new(),
            lock: Lock::new(),
            current: AtomicPtr::new(ptr::null_mut()),
            current_queue: AtomicUsize::new(DEMANDED),
            queues: [Queue::new(), Queue::new()],
            blocks: Blocks::new(),
            full: AtomicUsize::new(0),
            committed: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            account: Account::new(backing, config),
            slab_bytes,
            large_bytes: LARGE_BYTES,
        };
        if slab_bytes != 0 {
            slabs.large_bytes = (slabs.next_slab_bytes() - FOOT_BYTES) / 2;
        }
        slabs.reserve(config.prealloc)?;
        Ok(slabs)
    }

    /// Takes slabs until `bytes` bytes are reserved: in one block if possible, if the arena chooses their size.
    ///
    /// # Errors
    /// Fails if they cannot be had: at once if the limit has no room for them, or the backing can never have so many.
    /// Slabs taken so far stay.
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<(), ArenaError> {
        self.account.may_reserve(bytes)?;
        while let missing @ 1.. = bytes.saturating_sub(self.account.reserved()) {
            // Or all there is would be taken. Each time: a heap that opens with the first slab knows no sooner.
            self.account.may_have(bytes)?;
            let size = if self.slab_bytes == 0 { missing } else { self.slab_bytes };
            let size = size.clamp(LEAST_BYTES, MOST_SLAB_BYTES);
            // If the limit has no room for a whole slab, the requested bytes may still fit.
            let least = if self.slab_bytes == 0 { FIRST_BYTES } else { missing };
            let slab = self.account.take_slab(size, least.clamp(LEAST_BYTES, size))?;
            // SAFETY: the arena is ours alone, and the foot new.
            unsafe { self.queues[RESERVED].spare.push(slab) };
        }
        Ok(())
    }

    /// Allocates memory for `layout`, whose size is not zero.
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

    /// Whether a piece of so many bytes would be cut from a slab, as far as one can tell without the lock.
    pub(super) fn would_cut(&self, bytes: usize) -> bool {
        bytes <= self.large_bytes || bytes <= self.cursor.left()
    }

    /// Allocates a piece of at least the layout's size, aligned to no more than a page. Returns how many bytes it has,
    /// and whether it is a block of its own, all of it: such a piece can be [given back](Self::give_piece). A backing
    /// that has just refused a block as short as one for this is asked only if `again`.
    pub(super) fn take_piece(&self, layout: Layout, again: bool) -> Result<(NonNull<u8>, usize, bool), ArenaError> {
        let bytes = grains(layout.size());
        if let Some(memory) = self.cursor.bump(layout.size(), layout.align()) {
            return Ok((memory, bytes, false));
        }
        let _guard = self.lock.lock();
        let (memory, block) = self.grow_locked(layout, again)?;
        // SAFETY: under the lock; the block has just been given to this piece. (Where pages are less aligned than a
        // piece, it may begin behind the block's first byte.)
        unsafe {
            let Some(foot) = block.filter(|&foot| Foot::block(foot).cast() == memory) else {
                return Ok((memory, bytes, false));
            };
            let whole = room(Foot::block(foot));
            self.cut(foot, whole);
            add(&self.full, whole - bytes);
            Ok((memory, whole, true))
        }
    }

    /// Takes a piece back: its block is kept for later objects, or returned to the backing if that is too many.
    ///
    /// # Safety
    ///
    /// The piece is a block of its own, of so many bytes, and nothing uses it any more.
    pub(super) unsafe fn give_piece(&self, piece: NonNull<u8>, bytes: usize) {
        let _guard = self.lock.lock();
        self.note_fall();
        self.note_peak();
        self.full
            .store(self.full.load(Ordering::Relaxed) - bytes, Ordering::Relaxed);
        // SAFETY: under the lock; the caller's promise; and the foot lies behind the piece.
        unsafe {
            self.blocks.keep(piece.add(bytes).cast());
            self.give_excess();
        }
    }

    #[cold]
    #[inline(never)]
    fn grow(&self, layout: Layout) -> Result<NonNull<u8>, ArenaError> {
        let _guard = self.lock.lock();
        Ok(self.grow_locked(layout, true)?.0)
    }

    /// Allocates under the lock. Also returns the foot of the block, if it is for this object alone. See
    /// [`take_piece`](Self::take_piece) for `again`.
    fn grow_locked(&self, layout: Layout, again: bool) -> Result<Cut, ArenaError> {
        if let Some(memory) = self.cursor.bump(layout.size(), layout.align()) {
            return Ok((memory, None));
        }
        // Slabs are aligned to pages; an object aligned to more gets a block aligned to it.
        let bytes = grains(layout.size());
        if bytes > self.large_bytes || layout.align() > self.account.page_bytes() || self.cursor.is_spent() {
            return self.grow_large(layout, again);
        }
        if let Some(memory) = QUEUES.into_iter().find_map(|queue| self.grow_into(queue, layout)) {
            return Ok((memory, None));
        }
        self.account.may_take(bytes, 1, again)?;
        let slab_bytes = self.next_slab_bytes();
        let attempt = || self.account.take_slab(slab_bytes, bytes + FOOT_BYTES);
        let slab = self.insist(attempt(), bytes, 1, attempt);
        let slab = slab.map_err(|error| error.asked_for(layout))?;
        // SAFETY: under the lock; the slab is new, and has the room.
        Ok((unsafe { self.open(DEMANDED, slab, layout) }, None))
    }

    /// Allocates one object that is large, or has a large alignment. `again` as above.
    fn grow_large(&self, layout: Layout, again: bool) -> Result<Cut, ArenaError> {
        // Slabs whose size was configured are for small objects, as long as there is anything else.
        if self.slab_bytes == 0
            && let Some(memory) = self.grow_into(RESERVED, layout)
        {
            return Ok((memory, None));
        }
        let (bytes, align) = (grains(layout.size()), layout.align());
        // A block of exactly this size, or else the shortest that is at most an eighth longer.
        let (need, unit) = (bytes + FOOT_BYTES, self.account.unit(bytes + FOOT_BYTES));
        let near = |foot: &Foot| {
            let more = foot.bytes.checked_sub(need)?;
            let cost = if more < unit { 0 } else { more };
            (cost <= need / 8 && foot.fits(bytes, align)).then_some(cost)
        };
        // SAFETY: under the lock.
        let kept = unsafe { self.blocks.kept.take(need.max(unit), near) };
        let attempt = || self.account.take_block(bytes, align);
        let may = self.account.may_take(bytes, align, again);
        let block = match kept.map_or_else(|| may.and_then(|()| attempt()), Ok) {
            Ok(block) => block,
            Err(error) => match QUEUES.into_iter().find_map(|queue| self.grow_into(queue, layout)) {
                Some(memory) => return Ok((memory, None)),
                None => may
                    .and_then(|()| self.insist(Err(error), bytes, align, attempt))
                    .map_err(|error| error.asked_for(layout))?,
            },
        };
        // SAFETY: under the lock; the block is ours, in no list, and has the room.
        Ok((unsafe { self.give_block(block, layout) }, Some(block)))
    }

    /// Cuts an object off a spare slab of a queue that has room for it, which becomes the current slab.
    fn grow_into(&self, queue: usize, layout: Layout) -> Option<NonNull<u8>> {
        let fits = |foot: &Foot| foot.fits(grains(layout.size()), layout.align()).then_some(0);
        if self.cursor.is_spent() {
            return None;
        }
        // SAFETY: under the lock; the slab is then ours, in no list, and has the room.
        unsafe {
            let slab = self.queues[queue].spare.take(fits)?;
            Some(self.open(queue, slab, layout))
        }
    }

    /// Makes a slab the current one, with an object as its first.
    ///
    /// # Safety
    ///
    /// Under the lock; the slab is the caller's, of that queue, in no list, and has room for the object. The cursor is
    /// not spent.
    unsafe fn open(&self, queue: usize, slab: NonNull<Foot>, layout: Layout) -> NonNull<u8> {
        self.leave();
        self.current.store(slab.as_ptr(), Ordering::Relaxed);
        self.current_queue.store(queue, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe {
            let block = Foot::block(slab);
            let (start, end) = place(block, layout);
            self.cursor.open(block.cast(), room(block), end);
            block.cast().add(start)
        }
    }

    /// Gives a block to one object.
    ///
    /// # Safety
    ///
    /// Under the lock; the block is the caller's, in no list, and has room for the object.
    unsafe fn give_block(&self, foot: NonNull<Foot>, layout: Layout) -> NonNull<u8> {
        self.note_fall();
        // SAFETY: the caller's promise.
        unsafe {
            let block = Foot::block(foot);
            let (start, end) = place(block, layout);
            self.cut(foot, end);
            self.blocks.used.push(foot);
            add(&self.full, end);
            block.cast().add(start)
        }
    }

    /// Closes the current slab, and records how far it was cut. If it is empty it becomes spare again.
    fn leave(&self) {
        let Some(foot) = self.current() else { return };
        let offset = self.cursor.close().unwrap_or(0);
        self.note_fall();
        self.current.store(ptr::null_mut(), Ordering::Relaxed);
        let queue = &self.queues[self.current_queue.load(Ordering::Relaxed)];
        add(&self.full, offset);
        // SAFETY: under the lock; the slab was the current one, and is in no list.
        unsafe {
            self.cut(foot, offset);
            let list = if offset == 0 { &queue.spare } else { &queue.used };
            list.push(foot);
        }
    }

    /// Takes the current slab and its queue; no slab is current then.
    fn take_current(&self) -> Option<(&Queue, NonNull<Foot>)> {
        let foot = self.current()?;
        self.current.store(ptr::null_mut(), Ordering::Relaxed);
        Some((&self.queues[self.current_queue.load(Ordering::Relaxed)], foot))
    }

    fn current(&self) -> Option<NonNull<Foot>> {
        NonNull::new(self.current.load(Ordering::Relaxed))
    }

    /// Returns the outcome of an attempt to take a block, which needs room for `bytes` bytes: of the first one, or of
    /// `attempt` after returning spare memory that may help.
    fn insist(
        &self,
        mut done: Result<NonNull<Foot>, ArenaError>,
        bytes: usize,
        align: usize,
        attempt: impl Fn() -> Result<NonNull<Foot>, ArenaError>,
    ) -> Result<NonNull<Foot>, ArenaError> {
        while let Err(error) = done
            && self.make_room(error.reason(), bytes, align)
        {
            done = attempt();
        }
        done
    }

    /// Returns spare memory that was not reserved to the backing, if that may help a request for a block that was
    /// refused. Returns whether it did.
    #[cold]
    fn make_room(&self, refused: Reason, bytes: usize, align: usize) -> bool {
        let Ok(whole) = self.account.block_bytes(bytes, align) else {
            return false;
        };
        // Under the limit as little as will do, since asking is free there. A backing, which may make a system call, is
        // asked again once it has got back as much as is requested of it.
        let enough = match refused {
            Reason::Limit => 1,
            Reason::NoPages => whole,
            _ => return false,
        };
        let demanded = &self.queues[DEMANDED];
        // SAFETY: under the lock the current slab stays.
        let uncut = self.uncut().map_or(0, |foot| unsafe { foot.as_ref().bytes });
        let spare = self.blocks.kept.bytes() + demanded.spare.bytes() + uncut;
        // A request that is too large is refused without side effects.
        if whole > self.account.left_without(spare) {
            return false;
        }
        let before = self.account.reserved();
        let given = || before - self.account.reserved();
        while given() < enough {
            // SAFETY: under the lock, which is all the lists need; nothing lies in spare memory.
            unsafe {
                let mut foot = self.blocks.kept.pop().or_else(|| demanded.spare.pop());
                if foot.is_none() && self.uncut().is_some() {
                    // If something is being cut off it at this moment, it is not spare.
                    self.leave();
                    foot = demanded.spare.pop();
                }
                let Some(foot) = foot else { break };
                self.give(foot);
            }
        }
        given() > 0
    }

    /// The current slab, if it is empty and was not reserved.
    fn uncut(&self) -> Option<NonNull<Foot>> {
        let is_demanded = self.current_queue.load(Ordering::Relaxed) == DEMANDED;
        self.current().filter(|_| is_demanded && self.cursor.offset() == 0)
    }

    /// If the end of the current slab fell, records how far it was cut before: in its foot, and for the peak. With
    /// exclusive access to the arena, or under the lock before anything more counts as full.
    #[inline(always)]
    fn note_fall(&self) {
        if self.cursor.has_fallen() {
            self.note_fallen();
        }
    }

    #[cold]
    fn note_fallen(&self) {
        if let (Some(offset), Some(foot)) = (self.cursor.take_fallen(), self.current()) {
            // SAFETY: under the lock the current slab stays.
            unsafe { self.cut(foot, offset) };
            self.raise_peak(self.full.load(Ordering::Relaxed) + offset);
        }
    }

    /// Records that a slab has been cut up to `offset`.
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

    /// The size of the next slab: as much as there is already, within bounds.
    fn next_slab_bytes(&self) -> usize {
        let bytes = match self.slab_bytes {
            0 => self.account.reserved().clamp(FIRST_BYTES, LARGEST_BYTES),
            bytes => bytes.clamp(LEAST_BYTES, MOST_SLAB_BYTES),
        };
        bytes.next_multiple_of(self.account.page_bytes())
    }

    /// Frees everything allocated, and keeps the slabs. O(1), plus a call to the backing for each large block returned.
    pub(super) fn reset(&mut self, large: Large) {
        self.note_fall();
        self.note_peak();
        let offset = self.cursor.offset();
        // SAFETY: with exclusive access to the arena.
        unsafe {
            if let Some((queue, foot)) = self.take_current() {
                self.cut(foot, offset);
                queue.used.push(foot);
            }
            self.queues.iter().for_each(|queue| queue.renew());
            match large {
                Large::Keep => {
                    self.blocks.note_most();
                    self.give_excess();
                    self.blocks.kept.join(&self.blocks.used);
                }
                Large::Return => {
                    while let Some(foot) = self.blocks.used.pop() {
                        self.give(foot);
                    }
                }
            }
        }
        // No slab is open, as in a new arena: if one were, large objects could be put into it.
        self.cursor.clear();
        self.full.store(0, Ordering::Relaxed);
    }

    /// Returns kept blocks to the backing, as far as all blocks exceed twice the most that was in use.
    ///
    /// # Safety
    ///
    /// The lists are the caller's.
    unsafe fn give_excess(&self) {
        // SAFETY: the caller's promise; nothing lies in kept blocks.
        unsafe {
            while let Some(foot) = self.blocks.pop_excess() {
                self.give(foot);
            }
        }
    }

    /// Returns empty slabs to the backing until at most `bytes` bytes are reserved or no empty slab is left.
    pub(super) fn shrink_to(&mut self, bytes: usize) {
        self.note_fall();
        let [reserved, demanded] = &self.queues;
        // SAFETY: with exclusive access to the arena: nobody else uses the lists, and nothing lies in spare slabs, nor
        // in the current one if it is not cut.
        unsafe {
            while self.account.reserved() > bytes
                && let Some(foot) = self
                    .blocks
                    .kept
                    .pop()
                    .or_else(|| demanded.spare.pop())
                    .or_else(|| reserved.spare.pop())
            {
                self.give(foot);
            }
            if self.account.reserved() > bytes
                && self.cursor.offset() == 0
                && self.cursor.close().is_some()
                && let Some((_, foot)) = self.take_current()
            {
                self.give(foot);
            }
        }
    }

    /// Returns a slab to the backing.
    ///
    /// # Safety
    ///
    /// The foot is in no list, and nothing in the slab is used.
    unsafe fn give(&self, foot: NonNull<Foot>) {
        // SAFETY: the caller's promise.
        unsafe {
            let high = foot.as_ref().high;
            self.committed
                .store(self.committed.load(Ordering::Relaxed) - high, Ordering::Relaxed);
            self.account.give(Foot::block(foot));
        }
    }

    /// Counts what is in use now, for the peak. With exclusive access to the arena, or under the lock.
    fn note_peak(&self) -> usize {
        let allocated = self.full.load(Ordering::Relaxed) + self.cursor.offset();
        self.raise_peak(allocated);
        allocated
    }

    fn raise_peak(&self, allocated: usize) {
        let peak = self.peak.load(Ordering::Relaxed).max(allocated);
        self.peak.store(peak, Ordering::Relaxed);
    }

    /// Returns statistics. Waits for a thread that is growing the arena.
    pub(super) fn stats(&self) -> ArenaStats {
        let _guard = self.lock.lock();
        self.note_fall();
        let offset = self.cursor.offset();
        // SAFETY: under the lock; feet in a list live.
        let high = self.current().map_or(0, |foot| unsafe { foot.as_ref().high });
        ArenaStats {
            limit: self.account.limit(),
            reserved: self.account.reserved(),
            committed: self.committed.load(Ordering::Relaxed) + offset.saturating_sub(high),
            allocated: self.note_peak(),
            peak: self.peak.load(Ordering::Relaxed),
            slabs: self.account.blocks(),
        }
    }

    /// The account, for what it knows of the limit.
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
        // SAFETY: with exclusive access to the arena; whatever was allocated has ended with it.
        unsafe {
            if let Some((_, foot)) = self.take_current() {
                self.give(foot);
            }
            for queue in &self.queues {
                queue.renew();
            }
            let spare = || self.queues.iter().find_map(|queue| queue.spare.pop());
            while let Some(foot) = spare().or_else(|| self.blocks.pop()) {
                self.give(foot);
            }
        }
    }
}
