//! Holes: parts of a span that nobody uses, and behind which there is no memory any more.
//!
//! ```text
//!   slots of 9,216 bytes   │ out     │ home    │ home    │ out     │ home    │ out     │ home    │ home    │
//!   grains of 4 KiB        │   │   │   │ x │ x │ x │   │   │   │   │ x │   │   │   │   │ x │ x │ x │
//!                                      ╰─ holes ─╯
//! ```
//!
//! One slot keeps a span, and of slots that are freed here and there few spans come to be free: a program that had 40
//! MiB in blocks of 1 to 32 KiB, of lengths that changed, had 77 MiB in their spans. But a slot that is home is not
//! touched by anybody, if it has more than 1 KiB: neither a link nor a mark stands in it. So what lies between the
//! slots that are out can go back to the source, and the span stays what it is.
//!
//! **Grains** are what holes are counted in: 4 KiB, the shortest page of the systems that matter. Where the system's
//! are longer, holes are as many whole ones as lie between slots.
//!
//! I19: a hole lies in slots at home, or behind the last slot. Which grains are holes stands in the entry of the span's
//! first page, and changes under the lock of its class: a slot that is taken out ends the holes that it reaches into,
//! whether it is written to or not, and all of the system's page with them.
//!
//! Here is which grains may go, and what is written down; who lets them go is `punch.rs`.
//!
//! Worked: above, slots 1 and 2 have bytes 9,216 to 27,648, so grains 3 to 5 lie in them, from 12,288 to 24,576. When
//! slot 1 goes out, to 18,432, grains 3 and 4 are no holes any more, and 5 still is.
//!
//! Cost: a few nanoseconds for each slot that is out. Spans of slots up to 1 KiB, which have marks, have one page and
//! no holes.

#![forbid(unsafe_code)]

use crate::units::PageIndex;

use super::size_class::{MAX_SPAN_PAGES, PAGE_SHIFT, SizeClass};

/// log2 of the bytes in a grain.
pub const GRAIN_SHIFT: u32 = 12;

/// Grains in a page, and in the longest span.
pub const PAGE_GRAINS: usize = 1 << (PAGE_SHIFT - GRAIN_SHIFT);
pub const MAX_SPAN_GRAINS: usize = MAX_SPAN_PAGES * PAGE_GRAINS;

/// A bit for each grain of a span, the lowest for the first.
pub type Grains = u32;

/// A bit for each slot of a span that may have holes.
pub type Outs = u32;

const _: () = assert!(MAX_SPAN_GRAINS <= Grains::BITS as usize);

/// Slots taken out of a span, so that grains of it are nobody's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The slots.
    pub slots: Outs,
    /// Grains that lie in slots at home, and these are all that reach into them.
    pub grains: Grains,
    /// The holes that they reach into, and nobody else: not written down as long as they are out.
    pub holes: Grains,
}

/// Bytes of so many grains.
pub const fn bytes_of(grains: u32) -> usize {
    (grains as usize) << GRAIN_SHIFT
}

/// So many of the lowest bits.
fn lowest(count: usize) -> Grains {
    Grains::MAX.checked_shr(Grains::BITS - count as u32).unwrap_or(0)
}

/// The bits from one to before another.
pub fn between(first: usize, end: usize) -> Grains {
    lowest(end) & !lowest(first)
}

/// The numbers of the bits that are set.
fn each(bits: u32) -> impl Iterator<Item = u32> {
    let mut left = bits;
    core::iter::from_fn(move || {
        let first = (left != 0).then(|| left.trailing_zeros())?;
        left &= left - 1;
        Some(first)
    })
}

/// The grains that a slot reaches into.
fn grains_of(class: SizeClass, slot: u32) -> Grains {
    let begin = slot as usize * class.bytes();
    between(begin >> GRAIN_SHIFT, ((begin + class.bytes() - 1) >> GRAIN_SHIFT) + 1)
}

/// The grains of a span that lie in slots at home, if these are out.
pub fn at_home(class: SizeClass, out: Outs) -> Grains {
    let others = each(out).fold(0, |grains, slot| grains | grains_of(class, slot));
    lowest(class.pages() * PAGE_GRAINS) & !others
}

/// Those of them in whole granules of the source, of so many grains each, if the span begins at `span`: memory comes
/// and goes by these.
pub fn granules_at_home(class: SizeClass, span: PageIndex, out: Outs, granule: usize) -> Grains {
    let home = at_home(class, out);
    if granule == 1 {
        return home;
    }
    let (begin, end) = (span.0 * PAGE_GRAINS, class.pages() * PAGE_GRAINS);
    let first = begin.next_multiple_of(granule) - begin;
    let firsts = (first..(end + 1).saturating_sub(granule)).step_by(granule);
    let rows = firsts.map(|first| between(first, first + granule));
    rows.filter(|row| home & row == *row).fold(0, |all, row| all | row)
}

/// What may go of a span that begins at `span`: grains in slots at home that are no holes yet, as many at a time as the
/// source's `granule` has, and the slots that reach into those, or into holes that such a slot reaches into.
pub fn claim(class: SizeClass, span: PageIndex, out: Outs, holes: Grains, granule: usize) -> Option<Claim> {
    let home = lowest(class.slots() as usize) & !out;
    let grains = granules_at_home(class, span, out, granule) & !holes;
    let (mut slots, mut reached) = (0, 0);
    loop {
        let by = each(home).filter(|&slot| grains_of(class, slot) & (grains | reached) != 0);
        let by = by.fold(0, |slots, slot| slots | 1 << slot);
        if by == slots {
            break;
        }
        slots = by;
        reached = holes & !granules_at_home(class, span, out | slots, granule);
    }
    // Without a slot of it the span is not the caller's to stay in: the end of it, which is too short for one, stays.
    (slots != 0).then_some(Claim {
        slots,
        grains,
        holes: reached,
    })
}

/// The rows of grains, from the first on: where each begins, and how many it has.
pub fn rows(grains: Grains) -> impl Iterator<Item = (usize, usize)> {
    let mut left = grains;
    core::iter::from_fn(move || {
        let first = (left != 0).then(|| left.trailing_zeros() as usize)?;
        let count = (left >> first).trailing_ones() as usize;
        left &= !between(first, first + count);
        Some((first, count))
    })
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::collections::BTreeSet;

    use super::*;

    /// What a byte of a span lies in.
    fn slot_of(class: SizeClass, byte: usize) -> Option<u32> {
        let slot = (byte / class.bytes()) as u32;
        (slot < class.slots()).then_some(slot)
    }

    fn set(bits: u32) -> BTreeSet<usize> {
        (0..32).filter(|bit| bits & 1 << bit != 0).collect()
    }

    /// By each 128th byte of the span, as slots are multiples of that; of every class that may have holes, every
    /// granule, wherever the span begins.
    #[test]
    fn what_may_go_lies_in_slots_at_home() {
        let mut claims = 0;
        for class in SizeClass::all().filter(|class| class.is_flagged()) {
            assert!(class.slots() <= Outs::BITS && class.pages() > 1, "{class:?}");
            let all = (1 << class.slots()) - 1;
            let bytes = |grain: usize| (grain << GRAIN_SHIFT..(grain + 1) << GRAIN_SHIFT).step_by(128);
            let reaching = |grain| bytes(grain).filter_map(|byte| slot_of(class, byte)).collect();
            let reaching: std::vec::Vec<BTreeSet<u32>> = (0..class.pages() * PAGE_GRAINS).map(reaching).collect();
            let slots = |grain: usize| reaching[grain].iter().copied();
            let maps = (0..40_u32)
                .map(|seed| seed.wrapping_mul(0x9E37_79B9) >> 7 & all)
                .chain([0, all]);
            for out in maps {
                let grains = 0..class.pages() * PAGE_GRAINS;
                let is_home = |grain: &usize| slots(*grain).all(|slot| out & 1 << slot == 0);
                let home: BTreeSet<_> = grains.clone().filter(is_home).collect();
                assert_eq!(set(at_home(class, out)), home, "{class:?}, {out:#x}");
                for (granule, start) in [1, 2, 4, 16, 32]
                    .into_iter()
                    .flat_map(|by| [(by, 0), (by, 3), (by, 21)])
                {
                    let others = out | out.wrapping_mul(0x85EB_CA6B) & all;
                    let holes = granules_at_home(class, PageIndex(start), others, granule);
                    let rows = (0..=grains.end - granule.min(grains.end)).filter(|first| {
                        let row = *first..first + granule;
                        (start * PAGE_GRAINS + first).is_multiple_of(granule)
                            && row.end <= grains.end
                            && row.clone().all(|grain| home.contains(&grain))
                            && row.clone().any(|grain| holes & 1 << grain == 0)
                    });
                    let rows = rows.flat_map(|first| first..first + granule);
                    let naive: BTreeSet<_> = rows.filter(|grain| holes & 1 << grain == 0).collect();
                    let mut needed: BTreeSet<_> = naive.iter().flat_map(|&grain| slots(grain)).collect();
                    // The granule of a hole, and whether one of those slots reaches into it.
                    let row = |hole: usize| {
                        let first = hole - (start * PAGE_GRAINS + hole) % granule;
                        first..first + granule
                    };
                    let in_needed = |hole: &usize, needed: &BTreeSet<_>| {
                        row(*hole).any(|grain| slots(grain).any(|slot| needed.contains(&slot)))
                    };
                    // A hole more for each round, at the least.
                    let mut reached = BTreeSet::new();
                    for _ in 0..=holes.count_ones() {
                        reached.extend(set(holes).into_iter().filter(|hole| in_needed(hole, &needed)));
                        needed.extend(reached.iter().flat_map(|&hole| row(hole)).flat_map(slots));
                    }
                    let claim = claim(class, PageIndex(start), out, holes, granule);
                    let drawn =
                        std::format!("{class:?}, {out:#b} out, {holes:#b}, by {granule} from {start}: {claim:?}");
                    let Some(claim) = claim else {
                        assert!(needed.is_empty(), "{drawn}");
                        continue;
                    };
                    let needed = needed.iter().map(|&slot| slot as usize).collect();
                    assert_eq!((set(claim.grains), set(claim.slots)), (naive, needed), "{drawn}");
                    assert_eq!(set(claim.holes), reached, "{drawn}");
                    assert_eq!(claim.slots & out, 0, "{drawn}");
                    claims += 1;
                }
            }
        }
        assert!(claims > 5_000, "{claims}");
    }

    #[test]
    fn rows_are_as_long_as_they_can_be() {
        let of = |grains| rows(grains).collect::<std::vec::Vec<_>>();
        assert_eq!(of(0), []);
        assert_eq!(of(0b1101_1100), [(2, 3), (6, 2)]);
        assert_eq!(of(Grains::MAX), [(0, 32)]);
        assert_eq!(of(1 << 31 | 1), [(0, 1), (31, 1)]);
    }
}
