//! Where the structures lie that threads share, but for the first; and which thread goes where.
//!
//! ```text
//!   an annex:  plan: who goes where │ structure 1 │ 2 │ 3 │ …          made when there is to be a second structure
//! ```
//!
//! It is made once, with room for all structures that the heap may come to have, and stays as long as the heap. If it
//! lay among the pages, wherever there was room when threads met, it might halve the longest run of them for ever. So
//! it is a reservation for metadata, of its own. A source that has no room for another one, such as a
//! [`Region`](crate::source::Region) that is all one heap's, leaves but the pages: there it is a run of them.
//!
//! Worked: a heap of 1 GiB that four threads use has an annex for 15 structures, 50 KiB, three of which are used, and
//! so have memory behind them: 12 KiB. A heap that is limited to 1 MiB gets one of a 32nd of that, for 9.
//!
//! Cost: two calls of the source, once.

use core::ptr::{self, NonNull};

use crate::source::{Purpose, Reservation, Source};
use crate::sync::{AtomicPtr, AtomicU16, BiasedLock, Ordering};
use crate::units::{PageCount, PageRun};

use super::Thread;
use super::size_class::SizeClass;

/// How many structures there are in one at the most.
pub(super) const OTHERS: usize = 63;

/// How many seats threads have, by their identities: a power of two.
const SEATS: usize = 256;

/// How many of them a thread may have: its own, and those beside it. A power of two.
const CHOICE: usize = 4;

const _: () = assert!(SEATS == 1 << 8 && CHOICE.is_power_of_two());

/// An annex takes at most this part of the heap's limit: a 32nd.
const PART: usize = 32;

/// What comes before the structures.
const HEAD: usize = size_of::<Plan>().next_multiple_of(align_of::<Common>());

/// A structure that several threads share, and the lock under which they use it.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Common {
    pub(super) lock: BiasedLock,
    pub(super) thread: Thread,
}

impl Common {
    /// Makes one. It has no cache of pages.
    ///
    /// # Safety
    ///
    /// There is room for one, aligned, which the caller owns for as long as the heap lives.
    pub(super) unsafe fn make<'a>(place: NonNull<Self>) -> &'a Self {
        // SAFETY: the caller's promise. All-zero bytes are a valid thread's structure, to be made empty by `forget`.
        let common: &Self = unsafe {
            place.write_bytes(0, 1);
            (&raw mut (*place.as_ptr()).lock).write(BiasedLock::new());
            place.as_ref()
        };
        common.thread.forget();
        common
    }
}

/// Where an annex lies.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// Beside the heap's tables.
    Apart(Reservation),
    /// Among the heap's pages.
    Pages(PageRun),
}

/// The structures of an annex, and who goes where.
#[derive(Debug)]
pub(super) struct Plan {
    /// Null: not made yet. Written under the lock under which structures are made.
    others: [AtomicPtr<Common>; OTHERS],
    /// Where threads go, by their seats. Threads with the same seat are told apart by a tag; one of them has it, the
    /// others have those beside it. Those of threads that have ended are not given up, but taken.
    seats: [AtomicU16; SEATS],
    /// Which of a thread's seats is taken from another the next time.
    turn: AtomicU16,
    /// How many structures there is room for.
    room: usize,
    place: Place,
}

impl Plan {
    /// The structure of this number, from 1, if it has been made.
    #[inline(always)]
    pub(super) fn other(&self, number: usize) -> Option<&Common> {
        // Acquire: pairs with the release in `make_other`; it is complete.
        let common = self.others.get(number - 1)?.load(Ordering::Acquire);
        // SAFETY: null, or in the annex, which is given up when nobody uses the heap any more.
        unsafe { common.as_ref() }
    }

    /// Makes the structure of this number, from 1, if there is room for it. Only under the lock, and if it has not been
    /// made.
    pub(super) fn make_other(&self, number: usize) -> Option<&Common> {
        let other = self.others[..self.room].get(number - 1)?;
        let place = ptr::from_ref(self).cast_mut().cast::<Common>();
        // SAFETY: the annex begins with this plan, and was made with room for so many structures behind it, aligned;
        // ours for as long as the heap lives.
        let common = unsafe { Common::make(NonNull::new_unchecked(place.byte_add(HEAD)).add(number - 1)) };
        // Release: pairs with the acquire in `other`.
        other.store(ptr::from_ref(common).cast_mut(), Ordering::Release);
        Some(common)
    }

    /// The number of the structure that the thread `me` goes to; 0, the first, if it has no seat.
    #[inline(always)]
    pub(super) fn number_of(&self, me: usize) -> usize {
        let (seat, tag) = seat_of(me);
        // Relaxed: any answer will do.
        let entries = (0..CHOICE).map(|step| self.seats[seat ^ step].load(Ordering::Relaxed));
        let own = entries.into_iter().find(|entry| entry >> 8 == tag);
        own.map_or(0, |entry| usize::from(entry & 0xff))
    }

    /// The thread `me` goes to the structure of this number.
    pub(super) fn seat(&self, me: usize, number: usize) {
        let (seat, tag) = seat_of(me);
        // Relaxed, throughout: any answer will do. One that is not made yet is made by whoever comes.
        let entry = |step: &usize| self.seats[seat ^ step].load(Ordering::Relaxed);
        let mut steps = 0..CHOICE;
        let own = steps.clone().find(|step| entry(step) >> 8 == tag && entry(step) != 0);
        let step = own.or_else(|| steps.find(|step| entry(step) == 0)).unwrap_or_else(|| {
            // By turns: of threads that are more than their seats, or none of which has ended, none stays without.
            usize::from(self.turn.fetch_add(1, Ordering::Relaxed)) % CHOICE
        });
        self.seats[seat ^ step].store(tag << 8 | number as u16, Ordering::Relaxed);
    }
}

/// The seat and the tag of the thread `me`: the upper bits of a product with an odd number, in which those of an
/// address are mixed.
#[inline(always)]
pub(super) fn seat_of(me: usize) -> (usize, u16) {
    let mixed = (me as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
    (mixed as usize >> 8, mixed as u16 & 0xff)
}

/// A heap's annex, if it has one.
#[derive(Debug)]
pub(super) struct Annex {
    /// What it begins with. Null: not made yet. Written under the lock under which structures are made, once.
    plan: AtomicPtr<Plan>,
}

impl Annex {
    /// None.
    pub(super) const fn new() -> Self {
        Self {
            plan: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Its plan, if it has been made.
    #[inline(always)]
    pub(super) fn plan(&self) -> Option<&Plan> {
        // Acquire: pairs with the release in `make`; it is complete.
        let plan = self.plan.load(Ordering::Acquire);
        // SAFETY: null, or in the annex, which is given up when nobody uses the heap any more.
        unsafe { plan.as_ref() }
    }

    /// How many bytes one for so many structures has.
    pub(super) const fn bytes(room: usize) -> usize {
        HEAD + room * size_of::<Common>()
    }

    /// For how many structures, `most` or less, a heap of this limit has or may have an annex.
    pub(super) fn room(&self, limit: PageCount, most: usize) -> usize {
        let bytes = || (limit.0 / PART) << SizeClass::PAGE_SHIFT;
        let room = || bytes().saturating_sub(HEAD) / size_of::<Common>();
        self.plan().map_or_else(|| room().min(most), |plan| plan.room)
    }

    /// Makes an annex for `room` structures: of the source's, or else of what `pages` returns, pages of the heap. Only
    /// under the lock, and if there is none.
    pub(super) fn make<S: Source>(
        &self,
        source: &S,
        room: usize,
        pages: impl FnOnce(PageCount) -> Option<(PageRun, NonNull<u8>)>,
    ) -> Option<&Plan> {
        let room = room.min(OTHERS);
        let bytes = Self::bytes(room);
        let (place, start) = reserve(source, bytes).or_else(|| {
            let (run, start) = pages(PageCount::holding(bytes, SizeClass::PAGE_SHIFT))?;
            Some((Place::Pages(run), start))
        })?;
        let plan = start.cast::<Plan>();
        // SAFETY: memory of that length, on a page or a granule, and so aligned; ours as long as the heap lives.
        let plan = unsafe {
            plan.write(Plan {
                others: [const { AtomicPtr::new(ptr::null_mut()) }; OTHERS],
                seats: [const { AtomicU16::new(0) }; SEATS],
                turn: AtomicU16::new(0),
                room,
                place,
            });
            plan.as_ptr()
        };
        // Release: pairs with the acquire in `plan`.
        self.plan.store(plan, Ordering::Release);
        self.plan()
    }

    /// Bytes of it beside the heap's tables, and pages of the heap's.
    pub(super) fn size(&self) -> (usize, PageCount) {
        match self.plan().map(|plan| plan.place) {
            None => (0, PageCount(0)),
            Some(Place::Apart(reservation)) => (reservation.bytes, PageCount(0)),
            Some(Place::Pages(run)) => (0, run.pages()),
        }
    }

    /// At the end of a heap: gives it up, with all that is in it, to the source it is of. If it is a run of pages, that
    /// is returned.
    ///
    /// # Safety
    ///
    /// Nobody uses it any more.
    pub(super) unsafe fn give<S: Source>(&self, source: &S) -> Option<PageRun> {
        let place = self.plan()?.place;
        // Relaxed: nobody else is left.
        self.plan.store(ptr::null_mut(), Ordering::Relaxed);
        match place {
            Place::Pages(run) => Some(run),
            Place::Apart(reservation) => {
                // SAFETY: reserved by `reserve` of this source, given up once; nobody uses it (the caller's promise).
                unsafe { source.unreserve(Purpose::Metadata, reservation) };
                None
            }
        }
    }
}

/// Reserves and prepares so many bytes beside the heap's tables.
fn reserve<S: Source>(source: &S, bytes: usize) -> Option<(Place, NonNull<u8>)> {
    let granule = source.granule();
    let bytes = bytes.checked_next_multiple_of(granule)?;
    let reservation = Reservation::of(source, Purpose::Metadata, bytes, granule.max(align_of::<Common>()))?;
    // SAFETY: granules just reserved, for metadata.
    if unsafe { source.prepare(Purpose::Metadata, reservation.base, bytes) }.is_err() {
        // SAFETY: just reserved, and nothing refers to it.
        unsafe { source.unreserve(Purpose::Metadata, reservation) };
        return None;
    }
    Some((Place::Apart(reservation), reservation.base))
}
