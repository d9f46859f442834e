//! A cache of pages: one owned word of the bitmap, and one word of freed pages on their way back.
//!
//! ```text
//!   slot (one cache line)
//!   ┌─────────┬──────────────────────────────────────────────┬────────────────────────────────────┐
//!   │ whose?  │ word 17   free ..11.1111.1..   scavenged .1.. │ buffer: word 9   freed ....111.... │
//!   └─────────┴──────────────────────────────────────────────┴────────────────────────────────────┘
//!               ▲ refill: swap(0) on word 17 of the bitmap       │ other word freed, or flush:
//!               │ allocate: lowest run, no atomic operation      ▼ a compare-exchange on 9
//!               └ free into word 17: or the bits back
//! ```
//!
//! In Go each P has such a word for allocation. Here it serves both directions: a page freed into the owned word is
//! simply owned again, and pages freed elsewhere accumulate as long as they fall into one word, and return together. A
//! word of 64 pages costs one swap to take and one compare-exchange to give back, so a page costs a 64th of that and
//! two plain stores. Caches that are refilled at the same time keep apart (`free_set/apart.rs`).
//!
//! Requests of up to 16 pages are tried in the word. The chance that a word has n consecutive pages falls fast with n,
//! and longer runs would only fragment it (the proposal's choice, and its reason).
//!
//! A slot has one owner at a time: a [`Cache`](crate::Cache) handle or, for `no_std`, the caller that holds the
//! slot's shard for the length of one call. Only the owner writes. The fields are atomics so that statistics can read
//! them from any thread, which costs the owner nothing.
//!
//! **Seizing.** A sleeping thread must not keep the pages in its cache. So an owner marks itself busy, by two plain
//! stores around each call, and between them checks whether the heap is seizing. The seizing thread (the scavenger)
//! announces itself, has the system pass a fence through every thread, and empties the caches whose owners are not
//! busy. Either it sees the owner busy, or the owner sees it seizing: Dekker's algorithm, with the cost of the fence on
//! the rare side.
//!
//! ```text
//!   owner   busy = 1 ── light fence ── seizing? no: take pages … busy = 0      yes: busy = 0, go past the cache
//!   seizer  seizing = 1 ── heavy fence ── busy? no: flush …      seizing = 0   yes: leave it alone
//! ```
//!
//! Measured: allocate 1.2 ns and free 1.6 ns, without refills and flushes.

#![forbid(unsafe_code)]

use core::ptr;

use crate::bitmap;
use crate::free_set::{Claim, FreeSet, Word};
use crate::geometry::{Shape, WORD_PAGES, WORD_SHIFT};
use crate::sync::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence_light};

/// The longest run that is looked for in a cache.
pub const MAX_CACHED_PAGES: usize = 16;

/// What one refill that meets others counts for, and how much makes a cache keep apart.
const MEETING: u8 = 16;
const CROWDED: u8 = 24;

impl Word {
    /// Takes the lowest run of `count` pages out of the word, 1 ≤ count ≤ 64.
    #[inline(always)]
    pub fn take(&mut self, count: usize) -> Option<Claim> {
        let bit = bitmap::find_in_word(self.free, count)?;
        let mask = bitmap::mask(bit, count);
        self.free &= !mask;
        let scavenged = (self.scavenged & mask).count_ones() as usize;
        self.scavenged &= !mask;
        Some(Claim {
            start: self.index * WORD_PAGES + bit,
            scavenged,
        })
    }
}

/// The state of one cache, in a table of the heap.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Slot {
    /// 1 while a thread is working on it: the first to enter a shard's slot, or the owner of a handle's.
    busy: AtomicU8,
    /// Up to [`CROWDED`]: how often refills have met others lately. More: refills apart that are left, plus that.
    apart: AtomicU8,
    /// Free slots: the next free one, plus one. Owned slots: the last call for a flush that was heeded.
    pub(crate) link: AtomicU32,
    /// The owned word; meaningful while `free` is not zero, and for taking back pages of it.
    word: AtomicUsize,
    free: AtomicU64,
    scavenged: AtomicU64,
    /// The word of the buffered pages; meaningful while `buffer` is not zero.
    buffer_word: AtomicUsize,
    buffer: AtomicU64,
    refills: AtomicU64,
    flushes: AtomicU64,
}

// A slot is a cache line: two owners never share one (no false sharing).
#[cfg(not(any(loom, shuttle)))]
const _: () = assert!(size_of::<Slot>() == 64);

/// What a slot has done, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotState {
    /// Pages held: owned and buffered.
    pub pages: usize,
    /// How many of them are scavenged.
    pub scavenged: usize,
    /// Words taken.
    pub refills: u64,
    /// Words given back, from the cache or the buffer.
    pub flushes: u64,
}

impl Slot {
    /// An empty slot, equal to zeroed memory.
    pub(crate) fn new() -> Self {
        Self {
            busy: AtomicU8::new(0),
            apart: AtomicU8::new(0),
            link: AtomicU32::new(0),
            word: AtomicUsize::new(0),
            free: AtomicU64::new(0),
            scavenged: AtomicU64::new(0),
            buffer_word: AtomicUsize::new(0),
            buffer: AtomicU64::new(0),
            refills: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
        }
    }

    // Relaxed throughout, but where it says otherwise: one owner. Ownership passes with the heap's lock or with `busy`,
    // which release and acquire.

    /// The owner's entry, for the length of one call: no read-modify-write. `None` while caches are being seized; the
    /// call then bypasses the cache.
    #[inline(always)]
    pub(crate) fn own(&self, seizing: &AtomicU32) -> Option<Entered<'_>> {
        // Relaxed: the fence after it keeps it before the load, as seen by a thread that passes `fence_heavy` between
        // its own store and load (`PageHeap::seize_caches`): that thread sees us busy, or we see it seizing.
        self.busy.store(1, Ordering::Relaxed);
        let entered = Entered { slot: self };
        fence_light();
        // Acquire: pairs with the release that ends a seizure; the slot is as the seizure left it.
        (seizing.load(Ordering::Acquire) == 0).then_some(entered)
    }

    /// Whether its owner is not working on it. For a thread that has published `seizing` by a heavy fence: the owner
    /// then stays away.
    pub(crate) fn is_left(&self) -> bool {
        // Acquire: pairs with the release in `Entered::drop`; the slot is as its owner left it.
        self.busy.load(Ordering::Acquire) == 0
    }

    /// Whether it holds pages, read from any thread: a momentary view. Who finds that it holds none, because its owner
    /// is giving them back, then sees the owner at work ([`is_left`](Self::is_left)), or sees them in the set.
    pub(crate) fn holds_pages(&self) -> bool {
        // Acquire, both: pairs with the releases in `flush` and `flush_buffer`.
        self.free.load(Ordering::Acquire) | self.buffer.load(Ordering::Acquire) != 0
    }

    /// Whether the owned word has no page left.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.free.load(Ordering::Relaxed) == 0
    }

    /// Takes the lowest run of `count` pages out of the owned word, if `ready` says that the pages can be used.
    #[inline(always)]
    pub(crate) fn allocate(&self, count: usize, ready: impl FnOnce(Claim) -> bool) -> Option<Claim> {
        let free = self.free.load(Ordering::Relaxed);
        let bit = bitmap::find_in_word(free, count)?;
        let mask = bitmap::mask(bit, count);
        let start = self.word.load(Ordering::Relaxed) * WORD_PAGES + bit;
        let scavenged = self.scavenged.load(Ordering::Relaxed);
        let claim = Claim {
            start,
            scavenged: if scavenged == 0 {
                0
            } else {
                (scavenged & mask).count_ones() as usize
            },
        };
        if !ready(claim) {
            return None;
        }
        self.free.store(free & !mask, Ordering::Relaxed);
        if scavenged != 0 {
            self.scavenged.store(scavenged & !mask, Ordering::Relaxed);
        }
        Some(claim)
    }

    /// Frees a run that lies in one word.
    ///
    /// # Errors
    /// The first page that was already held, and so was free already; nothing has changed then. Or a page of another
    /// word: one of those collected there, which are on their way to the heap, where it was free already.
    #[inline(always)]
    pub(crate) fn free<G: Shape>(&self, set: &FreeSet<G>, start: usize, pages: usize) -> Result<(), usize> {
        let (word, mask) = (start >> WORD_SHIFT, bitmap::mask(start % WORD_PAGES, pages));
        if word == self.word.load(Ordering::Relaxed) {
            let free = self.free.load(Ordering::Relaxed);
            if free & mask != 0 {
                return Err(first_page(word, free & mask));
            }
            self.free.store(free | mask, Ordering::Relaxed);
            return Ok(());
        }
        let buffer = self.buffer.load(Ordering::Relaxed);
        if word == self.buffer_word.load(Ordering::Relaxed) {
            if buffer & mask != 0 {
                return Err(first_page(word, buffer & mask));
            }
            self.buffer.store(buffer | mask, Ordering::Relaxed);
            return Ok(());
        }
        self.turn_over(set, word, mask)
    }

    /// Flushes the buffered pages to the heap and begins to collect those of another word.
    #[inline(never)]
    fn turn_over<G: Shape>(&self, set: &FreeSet<G>, word: usize, mask: u64) -> Result<(), usize> {
        self.flush_buffer(set)?;
        self.buffer_word.store(word, Ordering::Relaxed);
        self.buffer.store(mask, Ordering::Relaxed);
        Ok(())
    }

    /// If the refill that comes should keep apart from those of other caches (`src/free_set/apart.rs`): the cache's
    /// number, and its last word.
    pub(crate) fn keeps_apart(&self) -> Option<(u32, usize)> {
        let apart = self.apart.load(Ordering::Relaxed);
        (apart > CROWDED).then(|| {
            self.apart.store(apart - 1, Ordering::Relaxed);
            self.berth()
        })
    }

    /// The cache's number, which others seldom share, and its last word.
    pub(crate) fn berth(&self) -> (u32, usize) {
        let number = (ptr::from_ref(self).addr() / size_of::<Self>()) as u32;
        (number | 1 << (u32::BITS - 1), self.word.load(Ordering::Relaxed))
    }

    /// Notes whether a refill that did not keep apart met others. After two that did, with fewer than eight between
    /// them that did not, the next ones keep apart; when those are over, one within the next sixteen is enough.
    pub(crate) fn note(&self, met: bool) {
        let before = self.apart.load(Ordering::Relaxed);
        let now = match (met, before) {
            (false, before) => before.saturating_sub(1),
            (true, before) if before + MEETING > CROWDED => u8::MAX,
            (true, before) => before + MEETING,
        };
        if now != before {
            self.apart.store(now, Ordering::Relaxed);
        }
    }

    /// The refills to come do not keep apart.
    pub(crate) fn come_back(&self) {
        self.apart.store(0, Ordering::Relaxed);
    }

    /// Whether it has kept apart lately, and so may have a berth.
    pub(crate) fn may_have_berth(&self) -> bool {
        self.apart.load(Ordering::Relaxed) != 0
    }

    /// Makes `word` the owned one. The slot's word must be empty.
    #[inline]
    pub(crate) fn fill(&self, word: Word) {
        debug_assert!(self.is_empty());
        self.word.store(word.index, Ordering::Relaxed);
        self.free.store(word.free, Ordering::Relaxed);
        self.scavenged.store(word.scavenged, Ordering::Relaxed);
        bump(&self.refills);
    }

    /// Gives the buffered pages back to the heap.
    ///
    /// # Errors
    /// A page that was already free there: it was freed twice.
    #[inline]
    pub(crate) fn flush_buffer<G: Shape>(&self, set: &FreeSet<G>) -> Result<(), usize> {
        let free = self.buffer.load(Ordering::Relaxed);
        if free == 0 {
            return Ok(());
        }
        let index = self.buffer_word.load(Ordering::Relaxed);
        // First, as the owner may end in the middle, and nothing may be in two places then. Release: after the mark of
        // an owner at work, for who finds nothing here; partner: `holds_pages`.
        self.buffer.store(0, Ordering::Release);
        bump(&self.flushes);
        set.release_word(Word {
            index,
            free,
            scavenged: 0,
        })
    }

    /// Gives everything back to the heap: at most two read-modify-writes on the bitmap.
    ///
    /// # Errors
    /// As [`flush_buffer`](Self::flush_buffer).
    pub(crate) fn flush<G: Shape>(&self, set: &FreeSet<G>) -> Result<(), usize> {
        let word = Word {
            index: self.word.load(Ordering::Relaxed),
            free: self.free.load(Ordering::Relaxed),
            scavenged: self.scavenged.load(Ordering::Relaxed),
        };
        let owned = if word.free == 0 {
            Ok(())
        } else {
            // First, and Release: as in `flush_buffer`.
            self.free.store(0, Ordering::Release);
            self.scavenged.store(0, Ordering::Relaxed);
            bump(&self.flushes);
            set.release_word(word)
        };
        self.flush_buffer(set).and(owned)
    }

    /// Drops what the slot holds, for good; its counters are kept.
    pub(crate) fn forget(&self) {
        self.free.store(0, Ordering::Relaxed);
        self.scavenged.store(0, Ordering::Relaxed);
        self.buffer.store(0, Ordering::Relaxed);
        self.apart.store(0, Ordering::Relaxed);
        self.busy.store(0, Ordering::Relaxed);
    }

    /// Becomes the slot's owner for the length of one call, if there is none.
    #[inline]
    pub(crate) fn try_enter(&self) -> Option<Entered<'_>> {
        // Acquire: sees what the last owner left; partner: the release in `Entered::drop`. Not a swap: an attempt that
        // fails writes nothing.
        let entered = self.busy.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
        // `then`, not `then_some`: an `Entered` made in vain would, when dropped, admit the next thread.
        entered.is_ok().then(|| Entered { slot: self })
    }

    /// What the slot holds and has done, read from any thread: a momentary view.
    pub(crate) fn state(&self) -> SlotState {
        let free = self.free.load(Ordering::Relaxed);
        let buffer = self.buffer.load(Ordering::Relaxed);
        SlotState {
            pages: (free.count_ones() + buffer.count_ones()) as usize,
            scavenged: (self.scavenged.load(Ordering::Relaxed) & free).count_ones() as usize,
            refills: self.refills.load(Ordering::Relaxed),
            flushes: self.flushes.load(Ordering::Relaxed),
        }
    }

    /// The words that hold pages of this slot: (index, pages), the owned one and the buffered one.
    pub(crate) fn words(&self) -> [(usize, u64); 2] {
        [
            (self.word.load(Ordering::Relaxed), self.free.load(Ordering::Relaxed)),
            (
                self.buffer_word.load(Ordering::Relaxed),
                self.buffer.load(Ordering::Relaxed),
            ),
        ]
    }
}

/// The right to work on a slot.
#[derive(Debug)]
pub(crate) struct Entered<'a> {
    slot: &'a Slot,
}

impl core::ops::Deref for Entered<'_> {
    type Target = Slot;

    #[inline(always)]
    fn deref(&self) -> &Slot {
        self.slot
    }
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: hands the slot to the next `try_enter`, or to the thread that seizes it; partner: the acquire there.
        self.slot.busy.store(0, Ordering::Release);
    }
}

#[inline(always)]
fn bump(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

/// The first of these pages of a word.
#[cold]
fn first_page(word: usize, pages: u64) -> usize {
    (word << WORD_SHIFT) + pages.trailing_zeros() as usize
}
