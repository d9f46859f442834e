//! Plots: memory of a thread's own, for the racks that its magazines use.
//!
//! ```text
//!   plot    run ─▶ link │ rack of 6 │ rack of 30 │ rack of 126     │ rack of 30 │     left      │
//!            ╰──▶ link │ rack of 510                      │            left                     │
//!   blank racks, by kind ──▶ ▒ ──▶ ▒
//! ```
//!
//! A rack in which slots travel is a slot itself, and passes from thread to thread (`rack.rs`). The rack that a
//! magazine has loaded does not: a thread that empties a sleeping thread's magazines cannot know whether that one was
//! interrupted in the middle of a push, and will write one more word there (`magazine.rs`). So that rack must stay
//! where it is for as long as its user lives, and lies in memory which nobody else needs: a few runs of pages, close
//! together. Slots are copied between it and the racks that travel, a batch at a time.
//!
//! A rack that has become too small, or was emptied by another thread, stays here, blank, for the next magazine that
//! needs one of its size.
//!
//! **Runs** are one page at first; each further one is half as long as the plot, four pages at most. Whatever is too
//! short at the end of one becomes smaller racks. All runs go back to the heap when the thread empties itself because
//! memory has run out, and when a structure without a user is emptied.
//!
//! Worked: a thread allocates and frees a few blocks of each of ten sizes: 20 racks of 6 and 30 slots, 3 KiB, in one
//! page of 8 KiB. One that has used all 80 classes to the full has 95 KiB of wide racks, and smaller ones that they
//! have outgrown: 13 pages if it used one class after another, 21 if all of them grew together.
//!
//! The cost: to copy a batch of 510 addresses takes some 60 ns, 0.1 ns for each block.

use core::ptr::{self, NonNull};

use crate::sync::{AtomicPtr, Ordering};
use crate::units::{PageCount, PageRun};

use super::rack::{Pile, Rack};
use super::size_class::{BATCH_SLOTS, PAGE_BYTES};

/// log2 of the smallest rack's room plus two.
const FIRST_LOG: u32 = 3;

/// Kinds of racks: with room for 6, 14, 30, 62, 126, 254, 510.
const KINDS: usize = ((BATCH_SLOTS[2] + 2).ilog2() - FIRST_LOG) as usize + 1;

/// Piles for each kind.
const PILES: usize = 2;

/// The most pages in a run.
const MOST_PAGES: usize = 4;

/// What every run begins with.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Link {
    /// The run taken before this one.
    before: *mut Self,
    run: PageRun,
}

/// The beginning of the first run.
#[repr(C, align(64))]
struct Ground {
    link: Link,
    /// Blank racks, by kind, in more piles than one as there may be one of each class.
    blanks: [[Pile; PILES]; KINDS],
    /// Where the next rack is made, and the end of that place.
    next: AtomicPtr<u8>,
    end: AtomicPtr<u8>,
    /// The run taken last.
    last: AtomicPtr<Link>,
}

// Racks begin behind them, aligned for a pile.
const _: () = assert!(size_of::<Link>() == Pile::MOST as usize + 1);

// And the longest rack fits.
const _: () = assert!(size_of::<Ground>() + Rack::MOST_BYTES <= PAGE_BYTES);

/// A thread's plot, for one thread at a time; others may read its length. It is the address of the ground; the low bits
/// of that, since a run begins a page, are the number of pages. All-zero bytes: none.
#[derive(Debug)]
pub struct Plot(AtomicPtr<u8>);

/// The kind with this much room.
fn kind(room: u32) -> usize {
    (room + 2).ilog2().saturating_sub(FIRST_LOG) as usize
}

impl Plot {
    /// The rooms that racks come in.
    pub fn rooms() -> impl DoubleEndedIterator<Item = u32> {
        (FIRST_LOG..FIRST_LOG + KINDS as u32).map(|log| (1 << log) - 2)
    }

    fn word(&self) -> *mut u8 {
        // Relaxed: one writer, and nothing depends on what other threads read.
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, word: *mut u8) {
        // Release: what it leads to is written. Partner: a fork, which copies all memory at one moment; its child,
        // which lacks this thread, may give up the plot.
        self.0.store(word, Ordering::Release);
    }

    /// Its length; to other threads a snapshot.
    pub fn pages(&self) -> PageCount {
        PageCount(self.word().addr() % PAGE_BYTES)
    }

    /// How many pages the next run should have.
    pub fn wanted(&self) -> PageCount {
        PageCount((self.pages().0 / 2).clamp(1, MOST_PAGES))
    }

    fn ground(&self) -> Option<&Ground> {
        let ground = self.word().map_addr(|address| address - address % PAGE_BYTES);
        // SAFETY: null, or the first run, which begins with its ground (`extend`) and is the plot's until `clear`.
        unsafe { ground.cast::<Ground>().as_ref() }
    }

    /// A blank rack. `None` if the plot has no more room.
    pub fn blank(&self, room: u32) -> Option<Rack> {
        debug_assert!(Self::rooms().any(|of| of == room));
        let ground = self.ground()?;
        let mut piles = ground.blanks[kind(room)].iter();
        // SAFETY: such a rack (`Ground::put`), which the caller owns now.
        let kept = piles
            .find_map(Pile::pop)
            .map(|memory| unsafe { Rack::new(memory, room) });
        kept.or_else(|| ground.carve(room))
    }

    /// Takes back a blank rack.
    ///
    /// # Safety
    ///
    /// The plot has made it, and has not been given up since.
    pub unsafe fn put(&self, rack: Rack) {
        debug_assert!(rack.is_empty() && self.ground().is_some());
        if let Some(ground) = self.ground() {
            ground.put(rack);
        }
    }

    /// Makes room by a run of pages, at `memory`.
    ///
    /// # Safety
    ///
    /// The caller owns the run, one page long at least; the plot owns it from here on.
    pub unsafe fn extend(&self, memory: NonNull<u8>, run: PageRun) {
        let end = memory.as_ptr().wrapping_add(run.pages().0 * PAGE_BYTES);
        let link = |before| Link { before, run };
        if let Some(ground) = self.ground() {
            // SAFETY: the caller's promise: a page at least.
            unsafe { memory.cast().write(link(ground.last())) };
            ground.set_last(memory.as_ptr().cast());
            ground.reach(memory.as_ptr().wrapping_add(size_of::<Link>()), end);
        } else {
            let begin = memory.as_ptr().wrapping_add(size_of::<Ground>());
            let ground = Ground {
                link: link(ptr::null_mut()),
                blanks: core::array::from_fn(|_| core::array::from_fn(|_| Pile::default())),
                next: AtomicPtr::new(begin),
                end: AtomicPtr::new(end),
                last: AtomicPtr::new(memory.as_ptr().cast()),
            };
            // SAFETY: as above.
            unsafe { memory.cast().write(ground) };
            self.set(memory.as_ptr());
        }
        self.set(self.word().map_addr(|address| address + run.pages().0));
    }

    /// Gives up the plot: calls `free` for each of its runs. Nobody uses a rack of it now, or ever will.
    pub fn clear(&self, mut free: impl FnMut(PageRun)) {
        let mut last = self.ground().map_or(ptr::null_mut(), Ground::last);
        self.set(ptr::null_mut());
        while let Some(link) = NonNull::new(last) {
            // SAFETY: the beginning of a run (`extend`), which nobody uses any more.
            let Link { before, run } = unsafe { link.read() };
            last = before;
            free(run);
        }
    }
}

impl Ground {
    fn last(&self) -> *mut Link {
        // Relaxed: one writer.
        self.last.load(Ordering::Relaxed)
    }

    fn set_last(&self, last: *mut Link) {
        // Release: the link is written; partner: a fork, as above.
        self.last.store(last, Ordering::Release);
    }

    /// Makes the next racks from `begin` to `end`. What is left elsewhere is made into smaller ones.
    fn reach(&self, begin: *mut u8, end: *mut u8) {
        for room in Plot::rooms().rev() {
            while let Some(rack) = self.carve(room) {
                self.put(rack);
            }
        }
        // Release, three times: in this order, so that a user that ends meanwhile leaves no place that is too long;
        // partner: the same thread, in destructors.
        self.end.store(ptr::null_mut(), Ordering::Release);
        self.next.store(begin, Ordering::Release);
        self.end.store(end, Ordering::Release);
    }

    fn carve(&self, room: u32) -> Option<Rack> {
        // Relaxed, throughout: one writer. (What is done with the rack, `Pile` publishes.)
        let (memory, end) = (self.next.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed));
        let behind = memory.wrapping_add(Rack::bytes(room));
        if behind > end {
            return None;
        }
        self.next.store(behind, Ordering::Relaxed);
        // SAFETY: as long as the rack, aligned, and nobody else's.
        NonNull::new(memory).map(|memory| unsafe { Rack::new(memory, room) })
    }

    fn put(&self, rack: Rack) {
        let mut piles = self.blanks[kind(rack.room())].iter();
        let pile = piles.find(|pile| pile.len() < Pile::MOST);
        debug_assert!(
            pile.is_some(),
            "there is one for each class at most, and some that were left"
        );
        if let Some(pile) = pile {
            pile.push(rack);
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::alloc::Layout;
    use std::collections::BTreeMap;
    use std::vec::Vec;

    use super::*;
    use crate::units::PageIndex;

    /// Memory for a run, which is leaked.
    fn memory(pages: PageCount) -> NonNull<u8> {
        let layout = Layout::from_size_align(pages.0 * PAGE_BYTES, PAGE_BYTES).unwrap();
        // SAFETY: not a layout of zero bytes.
        NonNull::new(unsafe { std::alloc::alloc(layout) }).unwrap()
    }

    fn plot() -> Plot {
        Plot(AtomicPtr::new(ptr::null_mut()))
    }

    /// Racks of all kinds, made and put back in turn: none overlaps another, and all lie in the plot.
    #[test]
    fn racks_lie_apart_and_within_the_runs() {
        let (plot, mut random) = (plot(), 1_u64);
        let (mut runs, mut racks, mut ends) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
        let rooms: Vec<_> = Plot::rooms().collect();
        for _ in 0..20_000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let (room, number) = (rooms[random as usize % KINDS], random as usize >> 8);
            if racks.len() > 100 || racks.len() % 3 == 2 && number % 2 == 0 {
                let rack: Rack = racks.swap_remove(number % racks.len());
                ends.remove(&rack.first().addr());
                // SAFETY: it made it.
                unsafe { plot.put(rack) };
                continue;
            }
            let rack = plot.blank(room).unwrap_or_else(|| {
                let (pages, before) = (plot.wanted(), plot.pages());
                let (memory, start) = (memory(pages), PageIndex(1000 * runs.len()));
                runs.insert(memory.addr().get(), (pages.0, start.0));
                // SAFETY: of this length, and nobody else's.
                unsafe { plot.extend(memory, PageRun::known(start.0, pages.0)) };
                assert_eq!(plot.pages().0, before.0 + pages.0);
                plot.blank(room).unwrap()
            });
            assert_eq!((rack.room(), rack.len()), (room, 0));
            let (begin, bytes) = (rack.first().addr().get() - 16, Rack::bytes(room));
            let (run, (pages, _)) = runs.range(..=begin).next_back().expect("in a run");
            assert!(begin + bytes <= run + pages * PAGE_BYTES, "within the run");
            ends.insert(rack.first().addr(), begin + bytes);
            let after = ends.range(..rack.first().addr()).next_back().map_or(0, |(_, &end)| end);
            let before = ends.range(rack.first().addr()..).nth(1);
            assert!(after <= begin, "behind the one before");
            assert!(
                before.is_none_or(|(next, _)| begin + bytes <= next.get() - 16),
                "and in front of the next"
            );
            racks.push(rack);
        }
        let most = racks.len() * Rack::MOST_BYTES / PAGE_BYTES;
        assert!(
            plot.pages().0 <= 2 * most,
            "what is put back is used again: {} pages",
            plot.pages().0
        );
        let mut freed = Vec::new();
        plot.clear(|run| freed.push((run.pages().0, run.start().0)));
        freed.sort_by_key(|&(_, start)| start);
        assert_eq!(freed.len(), runs.len());
        assert!(freed.iter().all(|run| runs.values().any(|of| of == run)), "each once");
        assert!(plot.pages().0 == 0 && plot.blank(6).is_none());
    }
}
