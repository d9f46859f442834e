//! The place of a heap that stays as long as the process: a `OnceLock` for a value too large to go over the stack.
//!
//! ```text
//!   static PLACE   taken 0 │ 4 KiB of nothing    ── open: 0 ─▶ 1, Room ─▶ written here ─▶ &'static PageHeap
//!                        1 │ a heap              ── open: there is no second ─▶ None
//! ```
//!
//! Worked: by way of a `OnceLock` the process's heap was on the stack three times, 11 KiB for the first arena of a
//! program; in place it takes 3.
//!
//! Cost: one exchange, once.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;

use crate::heap::{Config, PageHeap, Room};
use crate::source::Source;
use crate::sync::{AtomicU32, Ordering};

/// A place for one heap.
#[derive(Debug)]
pub(super) struct Forever<S: Source> {
    /// 1 once somebody may have written there.
    taken: AtomicU32,
    heap: UnsafeCell<MaybeUninit<PageHeap<S>>>,
}

// SAFETY: whoever takes the place writes to it, alone and once; all others have it by the reference that is returned
// then, which is one to a heap that they may share.
unsafe impl<S: Source + Send + Sync> Sync for Forever<S> {}

impl<S: Source> Forever<S> {
    /// One that nobody has taken.
    pub(super) const fn new() -> Self {
        Self {
            taken: AtomicU32::new(0),
            heap: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }

    /// Makes the heap. `None` if there is no room, or if this has been called before.
    pub(super) fn open(&'static self, source: S, config: Config) -> Option<&'static PageHeap<S>> {
        // Relaxed: one thread gets the 0, and what it writes it hands on with the reference.
        if self.taken.swap(1, Ordering::Relaxed) != 0 {
            return None;
        }
        let room = Room::reserve(source, config).ok()?;
        let place = self.heap.get().cast::<PageHeap<S>>();
        // SAFETY: room for one, and nobody else gets past the exchange; nothing is written there again, or moved away.
        unsafe {
            room.write(place);
            Some(&*place)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{Failure, Simulated, Verb};
    use crate::units::PageCount;

    #[test]
    fn there_is_one_heap_in_a_place() {
        static PLACE: Forever<Simulated> = Forever::new();
        let heap = PLACE.open(Simulated::new(4096), Config::new(1 << 20)).unwrap();
        assert!(PLACE.open(Simulated::new(4096), Config::new(1 << 20)).is_none());
        assert!(heap.allocate(PageCount(1)).is_some());
        assert_eq!(heap.check(), Ok(()));
    }

    #[test]
    fn a_place_in_vain_is_taken_all_the_same() {
        static PLACE: Forever<Simulated> = Forever::new();
        let source = Simulated::new(4096).failing(Verb::Reserve, Failure::Every(1));
        assert!(PLACE.open(source, Config::new(1 << 20)).is_none());
        assert!(PLACE.open(Simulated::new(4096), Config::new(1 << 20)).is_none());
    }
}
