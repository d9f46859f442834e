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
//! so have memory behind them: 12 KiB. One that is limited to 1 MiB uses a 32nd of that, for 9 of them.
//!
//! Cost: two calls of the source, once; and for each call of a heap that has one, up to four looks at a seat.

use core::ptr::{self, NonNull};

use crate::source::{Purpose, Reservation, Source};
use crate::sync::{AtomicPtr, AtomicU16, AtomicU32, BiasedLock, Ordering};
use crate::units::{PageCount, PageRun};

use super::Thread;
use super::size_class::SizeClass;

/// How many structures there are in one at the most.
pub(super) const OTHERS: usize = 63;

/// How many seats threads have, by their identities: a power of two.
const SEATS: usize = 256;

/// How many of them a thread may have: its own, and those beside it. A power of two.
const CHOICE: usize = 4;

/// The bits of an entry that hold a structure's number. The others tell threads with the same choice of seats apart.
const NUMBER_BITS: u32 = 6;

const _: () = assert!(SEATS == 1 << 8 && CHOICE == 4 && OTHERS < 1 << NUMBER_BITS);

/// The structures in use take at most this part of the heap's limit, and an annex of what is reserved: a 32nd.
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
    seats: [AtomicU32; SEATS],
    /// Which of a thread's seats is taken from another the next time.
    turn: AtomicU16,
    /// How many structures there is room for.
    room: usize,
    /// Where they begin. (A pointer to the whole annex: one made of a reference to this plan might not leave it.)
    start: NonNull<Common>,
    place: Place,
}

impl Plan {
    /// How many structures there is room for.
    pub(super) fn room(&self) -> usize {
        self.room
    }

    /// The structure of this number, from 1, if it has been made.
    #[inline(always)]
    pub(super) fn other(&self, number: usize) -> Option<&Common> {
        // Acquire: pairs with the release in `make_other`; it is complete.
        let common = self.others.get(number - 1)?.load(Ordering::Acquire);
        // SAFETY: null, or in the annex, which is given up when nobody uses the heap any more.
        unsafe { common.as_ref() }
    }

    /// All that have been made, in the order of their numbers.
    pub(super) fn others(&self) -> impl Iterator<Item = &Common> {
        (1..=self.room).filter_map(|number| self.other(number))
    }

    /// Makes the structure of this number, from 1, if there is room for it. Only under the lock, and if it has not been
    /// made.
    pub(super) fn make_other(&self, number: usize) -> Option<&Common> {
        let other = self.others[..self.room].get(number - 1)?;
        // SAFETY: the annex was made with room for so many structures from there on, aligned; ours for as long as the
        // heap lives.
        let common = unsafe { Common::make(self.start.add(number - 1)) };
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
        let own = entries.into_iter().find(|&entry| is_of(entry, tag));
        own.map_or(0, |entry| entry as usize & ((1 << NUMBER_BITS) - 1))
    }

    /// The thread `me` goes to the structure of this number.
    pub(super) fn seat(&self, me: usize, number: usize) {
        let (seat, tag) = seat_of(me);
        // Relaxed, throughout: any answer will do. One that is not made yet is made by whoever comes.
        let entry = |step: &usize| self.seats[seat ^ step].load(Ordering::Relaxed);
        let mut steps = 0..CHOICE;
        let own = steps.clone().find(|step| is_of(entry(step), tag));
        let step = own.or_else(|| steps.find(|step| entry(step) == 0)).unwrap_or_else(|| {
            // By turns: of threads that are more than their seats, or none of which has ended, none stays without.
            usize::from(self.turn.fetch_add(1, Ordering::Relaxed)) % CHOICE
        });
        self.seats[seat ^ step].store(tag << NUMBER_BITS | number as u32, Ordering::Relaxed);
    }
}

/// The seat and the tag of the thread `me`: the upper bits of a product with an odd number, in which those of an
/// address are mixed. The tag has the two bits of the seat by which those of a choice differ. Together they are 32
/// bits: two threads with the same ones would take their entry from each other for as long as they live.
#[inline(always)]
pub(super) fn seat_of(me: usize) -> (usize, u32) {
    let mixed = ((me as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32;
    (mixed as usize >> 24, mixed & ((1 << (u32::BITS - NUMBER_BITS)) - 1))
}

/// Whether this is the entry of a thread with that tag. (An empty one is none.)
#[inline(always)]
fn is_of(entry: u32, tag: u32) -> bool {
    entry != 0 && entry >> NUMBER_BITS == tag
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
        // Acquire: pairs with the release in `begin`; it is complete.
        let plan = self.plan.load(Ordering::Acquire);
        // SAFETY: null, or in the annex, which is given up when nobody uses the heap any more.
        unsafe { plan.as_ref() }
    }

    /// How many bytes one for so many structures has.
    pub(super) const fn bytes(room: usize) -> usize {
        HEAD + room * size_of::<Common>()
    }

    /// For how many structures there is room in the part of so many pages that is for them.
    pub(super) fn room(pages: PageCount) -> usize {
        Self::part(pages).saturating_sub(HEAD) / size_of::<Common>()
    }

    fn part(pages: PageCount) -> usize {
        (pages.0 / PART) << SizeClass::PAGE_SHIFT
    }

    /// Makes one for `room` structures beside the heap's tables, if the source has room there, and granules that do not
    /// make it longer than its part of so many pages. Only under the lock, and if there is none.
    pub(super) fn make_apart<S: Source>(&self, source: &S, room: usize, of: PageCount) -> Option<&Plan> {
        let granule = source.granule();
        let bytes = Self::bytes(room).checked_next_multiple_of(granule)?;
        let bytes = Some(bytes).filter(|&bytes| bytes <= Self::part(of))?;
        let reservation = Reservation::of(source, Purpose::Metadata, bytes, granule.max(align_of::<Common>()))?;
        // SAFETY: granules just reserved, for metadata.
        if unsafe { source.prepare(Purpose::Metadata, reservation.base, bytes) }.is_err() {
            // SAFETY: just reserved, and nothing refers to it.
            unsafe { source.unreserve(Purpose::Metadata, reservation) };
            return None;
        }
        self.begin(room, reservation.base, Place::Apart(reservation))
    }

    /// Makes one of a run of the heap's pages, which begins there, for as many structures as fit. Only under the lock,
    /// and if there is none.
    pub(super) fn make_of(&self, (run, start): (PageRun, NonNull<u8>)) -> Option<&Plan> {
        let bytes = run.pages().0 << SizeClass::PAGE_SHIFT;
        self.begin(
            bytes.saturating_sub(HEAD) / size_of::<Common>(),
            start,
            Place::Pages(run),
        )
    }

    fn begin(&self, room: usize, start: NonNull<u8>, place: Place) -> Option<&Plan> {
        let plan = start.cast::<Plan>();
        // SAFETY: memory of that length, `HEAD` and more, on a page or a granule, and so aligned; ours as long as the
        // heap lives.
        let plan = unsafe {
            plan.write(Plan {
                others: [const { AtomicPtr::new(ptr::null_mut()) }; OTHERS],
                seats: [const { AtomicU32::new(0) }; SEATS],
                turn: AtomicU16::new(0),
                room: room.min(OTHERS),
                start: start.byte_add(HEAD).cast(),
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
