//! Which parts of a fixed range are taken, for the sources that own one: [`Region`](super::Region) and
//! [`Numbers`](super::Numbers).
//!
//! ```text
//!   first                                                    first + bytes
//!     ├skip┼─ bottom ────────┼╌╌╌╌╌ left ╌╌╌╌╌┼───── top ────┼rest┤
//!          0           bottom.edge       units - top.edge   units
//! ```
//!
//! Reservations stack up from both ends towards the middle, in **units**. A unit is the granule, doubled until the
//! range has fewer than 2^24 units: with granules of 4 KiB, a unit is 4 KiB up to 64 GiB, and 64 KiB for a terabyte.
//! Both edges and the number of reservations at each end are in one `u64`, so every change is one compare-exchange, and
//! there are no intermediate states:
//!
//! ```text
//!   63    56 55              32 31    24 23               0
//!   ┌───────┬──────────────────┬────────┬─────────────────┐
//!   │ live  │ edge             │ live   │ edge            │
//!   └───────┴─────── top ──────┴────────┴──── bottom ─────┘
//! ```
//!
//! A reservation that is given back is free at once if it was the innermost at its end, and in any case once its end
//! holds nothing more. So a heap that reserves, fails, gives back and requests less leaks nothing, and heaps dropped in
//! any order leave the range as it was. (What an alignment above the unit has skipped at the bottom comes back only
//! when that end holds nothing more: there is no room here to remember where it began.)
//!
//! The ledger knows the range only as numbers. `first` is passed to every call, because the address of a pointer is not
//! a constant.

#![forbid(unsafe_code)]

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

/// Bits of an edge.
const EDGE_BITS: u32 = 24;
/// The most units of a range: edges run from 0 to this.
const MOST_UNITS: usize = (1 << EDGE_BITS) - 1;
/// The most reservations that may exist at one end.
const MOST_LIVE: u64 = 255;
/// The least granule: with granules below a cache line, two heaps could share one.
const LEAST_GRANULE: usize = 64;

const _: () = assert!(
    2 * (EDGE_BITS + 8) == u64::BITS,
    "two ends, each an edge and a count of 8 bits"
);

/// The bookkeeping of one range.
#[derive(Debug)]
pub(super) struct Ledger {
    /// Both ends, packed. Written by any thread.
    taken: AtomicU64,
    /// Length of the range.
    bytes: usize,
    /// The unit of callers. A power of two.
    granule: usize,
    /// The unit of reservations, at least the granule: `1 << unit_shift` bytes. A shift, because a division by a
    /// variable may panic.
    unit_shift: u32,
}

/// A part of the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Bytes from the start of the range.
    pub(super) offset: usize,
    /// Length.
    pub(super) bytes: usize,
}

/// From which end of the range to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// From low addresses up.
    Bottom,
    /// From high addresses down.
    Top,
}

impl Ledger {
    /// A range of `bytes` of which nothing is taken. The granule is rounded up to a power of two of at least 64.
    pub(super) const fn new(bytes: usize, granule: usize) -> Ledger {
        let granule = match granule.checked_next_power_of_two() {
            Some(power) if power > LEAST_GRANULE => power,
            Some(_) => LEAST_GRANULE,
            None => 1 << (usize::BITS - 1),
        };
        let mut unit_shift = granule.trailing_zeros();
        while bytes >> unit_shift > MOST_UNITS {
            unit_shift += 1;
        }
        Ledger {
            taken: AtomicU64::new(0),
            bytes,
            granule,
            unit_shift,
        }
    }

    /// The same range with another granule. Nothing of it may be taken: that would be forgotten, and taken again.
    pub(super) const fn with_granule(self, granule: usize) -> Ledger {
        assert!(
            self.taken.into_inner() == 0,
            "a source gets its granule before anything is reserved"
        );
        Ledger::new(self.bytes, granule)
    }

    /// The unit of callers.
    pub(super) const fn granule(&self) -> usize {
        self.granule
    }

    /// Bytes that neither end has taken.
    pub(super) fn left(&self, first: usize) -> usize {
        // Relaxed: only an estimate; `take` decides.
        let taken = Taken::unpack(self.taken.load(Ordering::Relaxed));
        let grid = self.grid(first);
        grid.units.saturating_sub(taken.bottom.edge + taken.top.edge) << self.unit_shift
    }

    /// Takes at least `bytes`, at an address that is a multiple of `align`; from the top, also outside of `gaps`, which
    /// are ranges of addresses. `None` if there is no such part.
    pub(super) fn take(
        &self,
        first: usize,
        end: End,
        bytes: usize,
        align: usize,
        gaps: &[Range<*mut u8>],
    ) -> Option<Part> {
        if bytes == 0 || !align.is_power_of_two() {
            return None;
        }
        let grid = self.grid(first);
        let units = ((bytes - 1) >> self.unit_shift) + 1;
        let mut part = None;
        // Acquire: the thread that gave these units back has finished with them (partner: `give`, Release). Release: as
        // in `give`, for the part of the state that this update keeps.
        let update = self.taken.try_update(Ordering::AcqRel, Ordering::Relaxed, |packed| {
            let taken = Taken::unpack(packed);
            let (run, next) = self.place(grid, taken, end, units, align, gaps)?;
            let offset = grid.skip + (run.start << self.unit_shift);
            part = Some(Part {
                offset,
                bytes: run.units << self.unit_shift,
            });
            Some(next.pack())
        });
        update.ok().and(part)
    }

    /// Gives back what [`take`](Self::take) returned for `end`.
    pub(super) fn give(&self, first: usize, end: End, part: Part) {
        let grid = self.grid(first);
        let start = part.offset.saturating_sub(grid.skip) >> self.unit_shift;
        let stop = start + (part.bytes >> self.unit_shift);
        // Release: our last use of the units happens before the next owner's first (partner: `take`, Acquire). Acquire:
        // passes on what other threads have released at the same end.
        self.taken.update(Ordering::AcqRel, Ordering::Relaxed, |packed| {
            let mut taken = Taken::unpack(packed);
            match end {
                End::Bottom => taken.bottom.shrink(stop, start),
                End::Top => taken
                    .top
                    .shrink(grid.units.saturating_sub(start), grid.units.saturating_sub(stop)),
            }
            taken.pack()
        });
    }

    /// The units of a range that starts at `first`.
    fn grid(&self, first: usize) -> Grid {
        let skip = first.wrapping_neg() & ((1 << self.unit_shift) - 1);
        Grid {
            origin: first.wrapping_add(skip),
            skip,
            units: self.bytes.saturating_sub(skip) >> self.unit_shift,
        }
    }

    /// The place for `units` at one end, and the state once it is taken.
    fn place(
        &self,
        grid: Grid,
        taken: Taken,
        end: End,
        units: usize,
        align: usize,
        gaps: &[Range<*mut u8>],
    ) -> Option<(Run, Taken)> {
        // A unit is a multiple of any smaller alignment; a larger alignment is a whole number of units.
        let past_align = |unit: usize| grid.origin.wrapping_add(unit << self.unit_shift) & (align - 1);
        let ceiling = grid.units.checked_sub(taken.top.edge)?;
        let mut next = taken;
        match end {
            End::Bottom => {
                let floor = taken.bottom.edge;
                let start = floor + ((past_align(floor).wrapping_neg() & (align - 1)) >> self.unit_shift);
                next.bottom = taken.bottom.grown_to(start + units)?;
                (next.bottom.edge <= ceiling).then_some((Run { start, units }, next))
            }
            End::Top => {
                let mut ceiling = ceiling;
                let start = loop {
                    let highest = ceiling.checked_sub(units)?;
                    let start = highest.checked_sub(past_align(highest) >> self.unit_shift)?;
                    let address = |unit: usize| grid.origin.saturating_add(unit << self.unit_shift);
                    let is_in_it = |gap: &Range<usize>| !within(gap, address(start), address(ceiling)).is_empty();
                    let Some(gap) = gaps.iter().map(addresses).find(is_in_it) else {
                        break start;
                    };
                    // Below it. The units above are lost until this end holds nothing more.
                    ceiling = gap.start.checked_sub(grid.origin)? >> self.unit_shift;
                };
                // What alignment leaves below the reservation above belongs to this one, so giving back is exact.
                next.top = taken.top.grown_to(grid.units - start)?;
                (taken.bottom.edge <= start).then_some((
                    Run {
                        start,
                        units: ceiling - start,
                    },
                    next,
                ))
            }
        }
    }
}

/// The addresses of a gap. One that ends before it begins ends with the address space.
pub(super) fn addresses(gap: &Range<*mut u8>) -> Range<usize> {
    let (start, end) = (gap.start.addr(), gap.end.addr());
    start..if end < start { usize::MAX } else { end }
}

/// The part of a gap from `start` on and below `end`; perhaps empty.
fn within(gap: &Range<usize>, start: usize, end: usize) -> Range<usize> {
    gap.start.max(start)..gap.end.min(end)
}

/// The first gap in `bytes` bytes from the address `start`, in bytes from there. The gaps may be in any order.
pub(super) fn first_gap(gaps: impl Iterator<Item = Range<usize>>, start: usize, bytes: usize) -> Option<Range<usize>> {
    let parts = gaps.map(|gap| within(&gap, start, start.saturating_add(bytes)));
    let gap = parts.filter(|part| !part.is_empty()).min_by_key(|part| part.start)?;
    Some(gap.start - start..gap.end - start)
}

/// Units of a range.
#[derive(Clone, Copy)]
struct Grid {
    /// Address of unit 0.
    origin: usize,
    /// Bytes before it.
    skip: usize,
    /// How many.
    units: usize,
}

/// Consecutive units.
#[derive(Clone, Copy)]
struct Run {
    start: usize,
    units: usize,
}

/// What is taken at one end.
#[derive(Clone, Copy)]
struct Stack {
    /// Units from that end of the range to the innermost one taken.
    edge: usize,
    /// Reservations not yet given back. If there are none, `edge` is 0.
    live: u64,
}

impl Stack {
    /// With one more reservation, up to `edge`.
    fn grown_to(self, edge: usize) -> Option<Stack> {
        (self.live < MOST_LIVE).then_some(Stack {
            edge,
            live: self.live + 1,
        })
    }

    /// With the reservation between `outer` and `inner` (counted from this end) given back.
    fn shrink(&mut self, outer: usize, inner: usize) {
        self.live = self.live.saturating_sub(1);
        if self.live == 0 {
            self.edge = 0;
        } else if self.edge == outer {
            self.edge = inner;
        }
    }

    fn pack(self) -> u64 {
        (self.live << EDGE_BITS) | self.edge as u64
    }

    fn unpack(bits: u64) -> Stack {
        Stack {
            edge: bits as usize & MOST_UNITS,
            live: (bits >> EDGE_BITS) & MOST_LIVE,
        }
    }
}

/// Both ends.
#[derive(Clone, Copy)]
struct Taken {
    bottom: Stack,
    top: Stack,
}

impl Taken {
    fn pack(self) -> u64 {
        (self.top.pack() << 32) | self.bottom.pack()
    }

    fn unpack(bits: u64) -> Taken {
        Taken {
            bottom: Stack::unpack(bits),
            top: Stack::unpack(bits >> 32),
        }
    }
}
