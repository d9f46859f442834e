//! What the layer does for a soft limit: it gives up what it keeps, so that the heap below has pages to release.
//!
//! ```text
//!   over the limit by │ anything       the stores of classes, and the allocating thread's shelf; magazines stay small
//!                     │                (32 KiB), and send their slots home when they are full; what lies between the
//!                     │                live blocks of a span, if all that is not enough (`punch.rs`)
//!                     │ a 64th of it   the thread's magazines and, if that is not enough, other threads'; spare spans
//! ```
//!
//! The heap asks for this when pages are taken that need memory and it has found too little to release
//! (`heap/limit.rs`). Slots that nobody uses are not free pages, and one slot keeps a span: of 75 MiB resident under a
//! limit of 64, with 40 MiB live, 34 lay in spans whose only slots not home were 7.5 MiB in magazines.
//!
//! Each measure needs the others. Four threads with changing sizes, 37 MiB live, had 99 MiB resident with neither
//! small magazines nor rounds, 90 with small magazines, and 63 with both; sixteen threads of all sizes had 84, 83 with
//! rounds alone, and 66. And one thread that frees at random had 90 with both, and has 65 with holes.
//!
//! This has a price. A program with more live memory than its soft limit pays for small magazines and rounds all the
//! time, as it does for page faults (binary trees take 1.1 times as long, larson with eight threads 3 times, large
//! blocks of mixed sizes under a limit of nothing 12 times).
//!
//! What is emptied must be refilled, at a cost to all threads. So there is one round for each further 64th of the limit
//! that the heap is over it, or each MiB if that is more. The first thread to notice makes it, for 64 structures at a
//! time: 2 system calls, and up to 9 µs for each full magazine (130 for a structure in which all 80 are full), besides
//! the page faults of a MiB. A thread that cannot get the rounds lock does without. When its call ends, with nothing
//! held, the structures that threads share are emptied too: that takes a fence for each that another thread is alone
//! with, and waits for that thread.

#![forbid(unsafe_code)]

use crate::source::Source;

use super::keeper::PART;
use super::size_class::SizeClass;
use super::{Magazine, Objects, Thread};

/// The most slots that one call takes out of stores, plus a batch, unless it takes very many pages.
const RELIEF_SLOTS: usize = 8192;

/// The limit for each page that the call takes: a call that takes many pages touches them, which costs more.
const RELIEF_BY_PAGE: usize = 64;

/// One call looks for holes in at most this many pages, some 30 µs (a chunk of free pages counts as one: with nothing
/// else, 100 µs), and stops after this many system calls. (The last row of grains may take some more, and one
/// allocation may come twice: 261 calls are the most measured.) That is a millisecond at most, and 200 µs as a rule.
/// Half as many are not enough for a program that frees at random.
const LOOKED_AT: usize = 1 << 14;
const CALLS: usize = 128;

/// The room of a magazine that must stay small, or six slots; and how many slots it gets at least.
const SMALL_BYTES: usize = 32 << 10;
const FEW_SLOTS: usize = 4;

impl<S: Source + 'static> Objects<S> {
    /// The heap is over its soft limit and has found too little to release. Empties stores until as many pages have
    /// come out of them, or for some 100 µs, and passes what that frees on to the source. A store holds few bytes and
    /// many spans: as one slot keeps a span, what will be freed is not known in advance.
    #[cold]
    #[inline(never)]
    pub(super) fn relieve(&self) {
        let wanted = self.heap.take_shortfall();
        let most = RELIEF_SLOTS.max(wanted.saturating_mul(RELIEF_BY_PAGE));
        let (mut freed, mut left) = (0, most);
        for class in SizeClass::all() {
            while freed < wanted
                && left > 0
                && let Some((_pass, batch)) = self.take_announced(class)
            {
                left = left.saturating_sub(batch.len() as usize);
                freed += self.give_rack(None, class, Some(batch));
            }
        }
        // Also if no span became empty: the next call goes on.
        if left < most {
            self.heap.assist_again(wanted);
        }
        let missing = wanted.saturating_sub(freed);
        if missing > 0 && !self.heap.owes(missing) {
            self.punch_few(missing);
        }
    }

    /// Releases what is above the limit after all free pages have gone, from between live blocks. The caller holds
    /// nothing.
    pub(super) fn punch_over(&self) {
        self.punch_few(self.heap.backed().0.saturating_sub(self.heap.soft_limit().0));
    }

    /// Not many in one call, and none after the source refuses one: an allocation is waiting.
    fn punch_few(&self, wanted: usize) {
        self.punch_some(wanted, |punched| {
            punched.looked < LOOKED_AT && punched.calls < CALLS && punched.refusals == 0
        });
    }

    /// Whether more memory is behind pages than there should be.
    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.heap.backed() > self.heap.soft_limit()
    }

    /// Whether this magazine must stay small for the soft limit: it then gets few slots at a time, and sends them home
    /// when it is full.
    #[inline]
    pub(super) fn is_to_be_small(&self, magazine: &Magazine, class: SizeClass) -> bool {
        let next = magazine.next_room(class) as usize * class.bytes();
        self.is_over() && next > SMALL_BYTES && magazine.room() > 0
    }

    /// How many slots such a magazine gets.
    pub(super) fn few_of(class: SizeClass) -> u32 {
        (SMALL_BYTES / class.bytes()).max(FEW_SLOTS) as u32
    }

    /// Sends the loaded slots home and keeps the rack, unless the class lock is held for long. Returns whether it did.
    pub(super) fn bring_home(&self, thread: &Thread, magazine: &Magazine, class: SizeClass) -> bool {
        let Some(mut rack) = magazine.unload() else {
            return false;
        };
        let leaving = self.central(class).give_soon(&self.spans, class, &mut rack);
        magazine.load(rack);
        if let Some(leaving) = leaving {
            self.give_spans(thread.cache(), class, leaving);
        }
        leaving.is_some()
    }

    /// After pages were taken: a heap over its soft limit keeps no shelf and nothing aside, and, far over it, nothing
    /// in magazines.
    #[inline]
    pub(super) fn keep_below(&self, thread: &Thread) {
        if self.is_over() {
            self.lighten(thread);
        }
    }

    #[cold]
    #[inline(never)]
    fn lighten(&self, thread: &Thread) {
        let mut freed = self.aside.pages().0;
        self.clear_aside();
        freed += self.clear_shelf_alone(thread, None);
        let (mut is_short, mut asks_others) = (false, false);
        // A thread that finds another making a round has not asked for anything yet.
        if let Some(rounds) = self.register.try_rounds()
            && self.heap.wants_round()
        {
            let pass = self.announce(thread);
            freed += self.empty(thread, None);
            drop(pass);
            self.flush_cache(thread);
            let over = self.heap.backed().0.saturating_sub(self.heap.soft_limit().0);
            is_short = freed < over;
            // Not while holding the lock of the shared structure: other threads may be waiting for it.
            asks_others = thread.has_user() && is_short;
            if asks_others && self.heap.barrier() {
                let _pass = self.heap.pass();
                rounds.go_on(PART, |part| freed += self.seize_part(part).pages);
            }
        }
        // Later, with nothing held: a thread that is alone with one of them is waited for.
        if is_short {
            self.commons.call_round();
        }
        // After the rounds lock is released: a fork takes it after the right to seize caches.
        if asks_others {
            self.empty_stores(None);
            self.heap.seize_caches();
            // How much that freed is unknown; whatever it was, it may go.
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
