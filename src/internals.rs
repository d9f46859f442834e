//! The parts, for this crate's own tests, models, fuzz targets and benches. No promise of any kind.

#![forbid(unsafe_code)]

use crate::heap::{Allocation, PageHeap};
use crate::source::Source;
use crate::sync::fence_heavy;
use crate::units::PageCount;

pub use crate::check::Fault;
pub use crate::free_set::{Claim, FreeSet, Marks, Request, Word};
pub use crate::geometry::{HINT_PAGES, MAX_CHUNK_WORDS, MAX_LEVELS, Shape, WORD_PAGES};
pub use crate::hints::{Band, Hints, Mark};
pub use crate::metadata::{Metadata, Plan};
pub use crate::radix::{Cursor, Step, Tree};
pub use crate::summary::Summary;
pub use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Barrier, Calm, Guard, Lock, Pass, Table, Turnstile, Zeroed};
pub use crate::sync::{BiasedLock, Held, Owned, Owner, Stake, seize};

/// Whether the system makes all threads pass a fence when asked. Without that nobody reaches what a thread keeps for
/// itself, be it asleep, or what lies in a shard.
#[must_use]
pub fn has_fence() -> bool {
    fence_heavy()
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// As the object layer gives memory back: in turns with who forks.
    #[doc(hidden)]
    pub fn release_as_a_layer(&self, pages: PageCount) -> PageCount {
        let mut turn = self.driver().turn_within();
        self.timed(|| self.release_with(pages, || self.driver().pass_on(&mut turn)))
    }

    /// As the object layer announces that it has pages in hand, which others may be about to miss.
    #[doc(hidden)]
    pub fn pass_as_a_layer(&self) -> Pass<'_> {
        self.pass()
    }

    /// As the object layer empties the caches of sleeping threads.
    #[doc(hidden)]
    pub fn seize_as_a_layer(&self) -> bool {
        self.seize_caches()
    }

    /// As the object layer asks, before it reports that there is no room.
    #[doc(hidden)]
    pub fn look_as_a_layer(&self) -> (bool, bool) {
        self.look_at_caches()
    }

    /// As the object layer takes a run with room behind it.
    #[doc(hidden)]
    pub fn allocate_apart(&self, pages: PageCount, room: PageCount) -> Option<Allocation> {
        self.try_apart(pages, room)
    }

    /// The moment at which a process forks, as far as this heap has to do with it.
    #[doc(hidden)]
    pub fn at_a_fork<R>(&self, look: impl FnOnce() -> R) -> R {
        while !self.driver().try_hold() {}
        self.hold();
        let seen = look();
        self.let_go();
        self.driver().let_go();
        seen
    }
}

impl<G: Shape> FreeSet<G> {
    /// One word of the bitmaps: pages free, and of those, scavenged.
    #[must_use]
    pub fn words(&self, word: usize) -> (u64, u64) {
        (self.free.load(word), self.scavenged.load(word))
    }

    /// One summary as the tree has it.
    #[must_use]
    pub fn summary(&self, level: usize, index: usize) -> Summary {
        self.tree.load(level, index)
    }

    /// The hint of a band.
    #[must_use]
    pub fn hint(&self, band: Band) -> usize {
        self.hints.load(band).page()
    }
}

pub mod bitmap {
    //! See `src/bitmap.rs`.
    pub use crate::bitmap::*;
}

pub mod scavenge {
    //! See `src/scavenge.rs`.
    pub use crate::scavenge::*;
}

pub mod free_list {
    //! The parts of free lists: see `src/arena/`.
    pub use crate::arena::internals::*;
    use crate::sync::Ordering;

    impl Node {
        /// The slot this one is linked to.
        #[must_use]
        pub fn link(&self) -> u32 {
            // Relaxed: for one who has the chain to himself.
            self.link.load(Ordering::Relaxed)
        }

        /// Links the slot.
        pub fn link_to(&self, slot: u32) {
            // Relaxed: as above.
            self.link.store(slot, Ordering::Relaxed);
        }
    }
}
