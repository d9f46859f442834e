//! What the layer does for a soft limit: it gives up what it keeps, so that the heap below has pages to release.
//!
//! ```text
//!   over the limit by │ anything       the stores of classes, and the shelf of who takes pages; magazines stay
//!                     │                small (32 KiB), and bring home what they have when they are full; what lies
//!                     │                between the live blocks of a span, where all that is not enough (`punch.rs`)
//!                     │ a 64th of it   his magazines, and, where that was not enough, those of others, spare spans
//! ```
//!
//! The heap asks when pages are taken that get memory, and it has found too little to release (`heap/limit.rs`). Slots
//! that nobody uses are not free pages, and one slot keeps a span: of 75 MiB that were resident under a limit of 64
//! with 40 MiB live, 34 lay in spans of which 7.5 MiB in magazines were all that was not home.
//!
//! None does without the others: four threads whose sizes change, 37 MiB live, had 99 MiB resident with neither small
//! magazines nor rounds, 90 with the ones, 63 with both; sixteen of all sizes 84, 83 with rounds alone, and 66. And one
//! thread that frees at random had 90 with both, and has 65 with holes.
//!
//! It costs what it must: a program that has more live than its soft limit pays for small magazines and rounds all the
//! time, as it does for the faults (binary trees 1.1 times as long, larson by eight threads 3 times, large blocks of
//! mixed sizes under a limit of nothing 12 times).
//!
//! What is emptied has to be filled again, at some cost to all. So threads are asked once for each 64th of the limit,
//! and MiB, that the heap has beyond it, by the one who comes first then, and 64 of them at a time: 2 system calls and
//! 7 µs for each that is full, beside the faults of a MiB. Who cannot have the right to a round goes without.

#![forbid(unsafe_code)]

use crate::source::Source;

use super::keeper::PART;
use super::size_class::SizeClass;
use super::{Magazine, Objects, Thread};

/// Slots that one call takes out of stores at the most, and a batch, if it does not take very much.
const RELIEF_SLOTS: usize = 8192;

/// As many for a page that it takes: who takes many touches them, which costs more.
const RELIEF_BY_PAGE: usize = 64;

/// Pages among which one call looks for holes at the most, some 30 µs, and system calls after which it
/// stops (the last row of grains may take some more, and one allocation may come twice: 261 is the most measured): a
/// millisecond at the most, and 200 µs as a rule. Half as many are not enough for who frees at random.
const LOOKED_AT: usize = 1 << 14;
const CALLS: usize = 128;

/// What a magazine has room for that is to be small, or six slots; and how many it gets at least.
const SMALL_BYTES: usize = 32 << 10;
const FEW_SLOTS: usize = 4;

impl<S: Source + 'static> Objects<S> {
    /// The heap is over its soft limit and found too little to release: stores are emptied until as much has come out
    /// of them, or for some 100 µs, and what that frees goes on to the source. A store holds few bytes and many spans:
    /// one slot keeps a span, so what is freed is not known before.
    #[cold]
    #[inline(never)]
    pub(super) fn relieve(&self) {
        let wanted = self.heap.take_shortfall();
        let most = RELIEF_SLOTS.max(wanted.saturating_mul(RELIEF_BY_PAGE));
        let (mut freed, mut left) = (0, most);
        for class in SizeClass::all() {
            while freed < wanted
                && left > 0
                && let Some(batch) = self.central(class).take_batch(&self.spans, class, 0)
            {
                left = left.saturating_sub(batch.len() as usize);
                freed += self.give_rack(None, class, Some(batch));
            }
        }
        // Also where no span was emptied: the next call goes on.
        if left < most {
            self.heap.assist_again(wanted);
        }
        let missing = wanted.saturating_sub(freed);
        if missing > 0 && !self.heap.owes(missing) {
            self.punch_few(missing);
        }
    }

    /// What is above the limit when all that is free has gone goes from between live blocks: by who holds nothing.
    pub(super) fn punch_over(&self) {
        self.punch_few(self.heap.backed().0.saturating_sub(self.heap.soft_limit().0));
    }

    /// Not many in one call, and none where the source says no: he that allocates waits for it.
    fn punch_few(&self, wanted: usize) {
        self.punch_some(wanted, |punched| {
            punched.looked < LOOKED_AT && punched.calls < CALLS && punched.refusals == 0
        });
    }

    /// Whether there is more memory behind pages than there should be.
    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.heap.backed() > self.heap.soft_limit()
    }

    /// Whether this magazine is not to grow any more, for the soft limit's sake: it gets few slots at a time, and
    /// brings them home when it is full.
    #[inline]
    pub(super) fn is_to_be_small(&self, magazine: &Magazine, class: SizeClass) -> bool {
        let next = magazine.next_room(class) as usize * class.bytes();
        self.is_over() && next > SMALL_BYTES && magazine.room() > 0
    }

    /// How many slots such a magazine gets.
    pub(super) fn few_of(class: SizeClass) -> u32 {
        (SMALL_BYTES / class.bytes()).max(FEW_SLOTS) as u32
    }

    /// Gives home what is loaded in a magazine, and keeps the rack, if the lock of the class is not held for long.
    /// Whether it could.
    pub(super) fn bring_home(&self, thread: &Thread, magazine: &Magazine, class: SizeClass) -> bool {
        let Some(mut rack) = magazine.unload() else {
            return false;
        };
        let leaving = self.central(class).give_soon(&self.spans, class, &mut rack);
        let _none = magazine.load(rack);
        if let Some(leaving) = leaving {
            self.give_spans(thread.cache(), class, leaving);
        }
        leaving.is_some()
    }

    /// Behind pages just taken: a heap over its soft limit has no shelves, and, far over it, nothing in magazines.
    #[inline]
    pub(super) fn keep_below(&self, thread: &Thread) {
        if self.is_over() {
            self.lighten(thread);
        }
    }

    #[cold]
    #[inline(never)]
    fn lighten(&self, thread: &Thread) {
        let mut freed = self.clear_shelf(thread, None);
        let mut asks_others = false;
        // Who finds another at it has asked for nothing yet.
        if let Some(rounds) = self.register.try_rounds()
            && self.heap.wants_round()
        {
            freed += self.empty(thread, None);
            if let Some(cache) = thread.cache() {
                self.heap.cache_at(cache).flush();
            }
            let over = self.heap.backed().0.saturating_sub(self.heap.soft_limit().0);
            // Under the lock of the shared structure nobody else is asked: they may be waiting for it.
            asks_others = thread.has_user() && freed < over;
            if asks_others && self.heap.barrier() {
                let _pass = self.heap.pass();
                rounds.go_on(PART, |part| freed += self.seize_part(part).pages);
            }
        }
        // Without the right to rounds: a fork takes that behind the right to seize caches.
        if asks_others {
            self.empty_stores(None);
            self.heap.seize_caches();
            // How much that was is not known; whatever it was, it may go.
            freed = freed.max(1);
        }
        if freed > 0 {
            self.heap.assist_again(freed);
        }
        if asks_others {
            self.punch_over();
        }
    }
}
