//! A cache of pages: one word of the bitmap, owned; and a word of freed pages on their way back.
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
//! Go gives each P such a word for allocation. Ours goes both ways: a page freed into the owned word is simply owned
//! again, and pages freed elsewhere gather as long as they hit one word and leave together. A word of 64 pages costs
//! one swap to take and one compare-exchange to give back, so a page costs a 64th of that and two plain stores.
//!
//! Requests of up to 16 pages are tried in the word. The chance that a word has n pages in a row falls fast with n, and
//! longer ones would only tear it (the proposal's choice, and its reason).
//!
//! A slot has one owner at a time: a [`Cache`](crate::Cache) handle, or for `no_std` whoever holds the slot's shard for
//! the length of one call. Only the owner writes; the fields are atomics so that statistics may read them from
//! anywhere, which costs the owner nothing.
//!
//! **Seizing.** What the cache of a sleeping thread holds must not stay with it. So an owner says when it is at work,
//! by two plain stores around each call, and looks whether the heap is seizing in between. Who seizes (the scavenger)
//! says so, has the system pass a fence through every thread, and empties the caches whose owners are not at work.
//! Either he sees an owner busy, or the owner sees him: Dekker's way, with the fence paid by the one who seldom comes.
//!
//! ```text
//!   owner   busy = 1 ── light fence ── seizing? no: take pages … busy = 0      yes: busy = 0, go past the cache
//!   seizer  seizing = 1 ── heavy fence ── busy? no: flush …      seizing = 0   yes: leave it alone
//! ```
//!
//! Measured: allocate 1.2 ns and free 1.6 ns, refills and flushes aside.

#![forbid(unsafe_code)]

use crate::bitmap;
use crate::free_set::{Claim, FreeSet, Word};
use crate::geometry::{Shape, WORD_PAGES, WORD_SHIFT};
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence_light};

/// The longest run that is looked for in a cache.
pub const MAX_CACHED_PAGES: usize = 16;

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
    /// 1 while somebody works on it: whoever came first to a shard's, its owner to another.
    busy: AtomicU32,
    /// Free slots: the next free one, plus one. Owned slots: the last call for a flush that was heeded.
    pub(crate) link: AtomicU32,
    /// The word owned; means something while `free` is not zero, and for taking pages of it back.
    word: AtomicUsize,
    free: AtomicU64,
    scavenged: AtomicU64,
    /// The word of the buffered pages; means something while `buffer` is not zero.
    buffer_word: AtomicUsize,
    buffer: AtomicU64,
    refills: AtomicU64,
    flushes: AtomicU64,
}

// A slot is a cache line: two owners never share one.
#[cfg(not(any(loom, shuttle)))]
const _: () = assert!(size_of::<Slot>() == 64);

/// What a slot has done, and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotState {
    /// Pages held: owned and buffered.
    pub pages: usize,
    /// Of those, scavenged.
    pub scavenged: usize,
    /// Words taken.
    pub refills: u64,
    /// Words given back, from the cache or the buffer.
    pub flushes: u64,
}

impl Slot {
    /// An empty slot, as zeroed memory has it.
    pub(crate) fn new() -> Self {
        Self {
            busy: AtomicU32::new(0),
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

    // Relaxed throughout: one owner. Ownership passes with the heap's lock or with `busy`, which release and acquire.

    /// The owner's way in, for the length of one call: no read-modify-write. `None` while caches are being seized; the
    /// call then goes past the cache.
    #[inline(always)]
    pub(crate) fn own(&self, seizing: &AtomicU32) -> Option<Entered<'_>> {
        // Relaxed: the fence behind it keeps it before the load, to one who passes `fence_heavy` between his own store
        // and load (`PageHeap::seize_caches`): he sees us busy, or we see him seizing.
        self.busy.store(1, Ordering::Relaxed);
        let entered = Entered { slot: self };
        fence_light();
        // Acquire: pairs with the release that ends a seizure; the slot is as it left it.
        (seizing.load(Ordering::Acquire) == 0).then_some(entered)
    }

    /// Whether its owner is not at work on it. For who has let `seizing` be seen by a heavy fence: then he stays away.
    pub(crate) fn is_left(&self) -> bool {
        // Acquire: pairs with the release in `Entered::drop`; the slot is as its owner left it.
        self.busy.load(Ordering::Acquire) == 0
    }

    /// Whether it holds pages, read from anywhere: a moment's picture.
    pub(crate) fn holds_pages(&self) -> bool {
        self.free.load(Ordering::Relaxed) | self.buffer.load(Ordering::Relaxed) != 0
    }

    /// The owned word has no page left.
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

    /// Takes back a run that lies in one word. Whether the page was held, and so free, already: nothing has changed
    /// then.
    ///
    /// # Errors
    /// A page that is free already.
    #[inline(always)]
    pub(crate) fn free<G: Shape>(&self, set: &FreeSet<G>, start: usize, pages: usize) -> Result<(), usize> {
        let (word, mask) = (start >> WORD_SHIFT, bitmap::mask(start % WORD_PAGES, pages));
        if word == self.word.load(Ordering::Relaxed) {
            let free = self.free.load(Ordering::Relaxed);
            if free & mask != 0 {
                return Err(start);
            }
            self.free.store(free | mask, Ordering::Relaxed);
            return Ok(());
        }
        let buffer = self.buffer.load(Ordering::Relaxed);
        if word == self.buffer_word.load(Ordering::Relaxed) {
            if buffer & mask != 0 {
                return Err(start);
            }
            self.buffer.store(buffer | mask, Ordering::Relaxed);
            return Ok(());
        }
        self.turn_over(set, word, mask)
    }

    /// Sends the buffered pages home and begins to gather those of another word.
    #[inline(never)]
    fn turn_over<G: Shape>(&self, set: &FreeSet<G>, word: usize, mask: u64) -> Result<(), usize> {
        self.flush_buffer(set)?;
        self.buffer_word.store(word, Ordering::Relaxed);
        self.buffer.store(mask, Ordering::Relaxed);
        Ok(())
    }

    /// Makes `word` the owned one. The slot's must be empty.
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
    /// A page that was free there already: somebody freed it twice.
    #[inline]
    pub(crate) fn flush_buffer<G: Shape>(&self, set: &FreeSet<G>) -> Result<(), usize> {
        let free = self.buffer.load(Ordering::Relaxed);
        if free == 0 {
            return Ok(());
        }
        let index = self.buffer_word.load(Ordering::Relaxed);
        self.buffer.store(0, Ordering::Relaxed);
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
            self.free.store(0, Ordering::Relaxed);
            self.scavenged.store(0, Ordering::Relaxed);
            bump(&self.flushes);
            set.release_word(word)
        };
        self.flush_buffer(set).and(owned)
    }

    /// Drops what the slot holds, for good; what it has done stays counted.
    #[cfg_attr(
        not(feature = "std"),
        allow(dead_code, reason = "for fork, which needs an operating system")
    )]
    pub(crate) fn forget(&self) {
        self.free.store(0, Ordering::Relaxed);
        self.scavenged.store(0, Ordering::Relaxed);
        self.buffer.store(0, Ordering::Relaxed);
        self.busy.store(0, Ordering::Relaxed);
    }

    /// Becomes the slot's owner for the length of one call, if nobody is.
    #[inline]
    pub(crate) fn try_enter(&self) -> Option<Entered<'_>> {
        // Acquire: sees what the last owner left; partner: the release in `Entered::drop`. Not a swap: who fails writes
        // nothing.
        let entered = self.busy.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
        // `then`, not `then_some`: an `Entered` made in vain would let the next one in when dropped.
        entered.is_ok().then(|| Entered { slot: self })
    }

    /// What the slot holds and has done, read from anywhere: a moment's picture.
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

/// One who works on a shard's slot.
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
        // Release: hands the slot to the next `try_enter`, or to who seizes it.
        self.slot.busy.store(0, Ordering::Release);
    }
}

#[inline(always)]
fn bump(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}
