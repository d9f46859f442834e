//! Holes: parts of a span that no live block touches and that have no memory behind them any more.
//!
//! ```text
//!   slots of 9,216 bytes   │ out     │ home    │ home    │ out     │ home    │ out     │ home    │ home    │
//!   grains of 4 KiB        │   │   │   │ x │ x │ x │   │   │   │ x │ x │   │   │   │ x │ x │ x │ x │
//!                                      ╰─ holes ─╯           ╰holes╯           ╰─── holes ───╯
//! ```
//!
//! One slot that is out keeps a whole span. When slots are freed here and there, few spans become empty: a program that
//! had 40 MiB in blocks of 1 to 32 KiB, whose lengths changed, had 77 MiB in their spans. But nobody touches a slot of
//! more than 1 KiB while it is home: it bears no mark. So the memory between the slots that are out can go back to the
//! source, and the span stays a span.
//!
//! **Grains** are the unit of holes: 4 KiB, the smallest page of the systems that matter. On a system with larger
//! pages, a hole is made of the whole pages that lie between slots that are out.
//!
//! I19: a hole lies in slots at home, or behind the last slot. The entry of the span's first page records which grains
//! are holes; it changes under the class lock. Taking a slot out ends the holes it reaches into, whether it is written
//! to or not, together with the rest of the same system page.
//!
//! This file decides which grains may go, and does the bookkeeping; `punch.rs` releases them.
//!
//! Worked: above, slots 1 and 2 have bytes 9,216 to 27,648, so they contain grains 3 to 5, from 12,288 to 24,576. When
//! slot 1 is taken out, up to 18,432, grains 3 and 4 stop being holes, and 5 still is one.
//!
//! Cost: a few nanoseconds for each slot that is out. Spans of slots up to 1 KiB, which have marks, have one page and
//! no holes.

#![forbid(unsafe_code)]

use crate::bitmap::ones;
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

/// Slots taken out of a span, so that nobody can use certain grains of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The slots.
    pub slots: Outs,
    /// Grains that lie in slots at home; the slots above are all that reach into them.
    pub grains: Grains,
    /// Existing holes that only these slots reach into; not recorded while the slots are out.
    pub holes: Grains,
}

/// Bytes of `grains` grains.
pub const fn bytes_of(grains: u32) -> usize {
    (grains as usize) << GRAIN_SHIFT
}

/// The `count` lowest bits.
fn lowest(count: usize) -> Grains {
    Grains::MAX.checked_shr(Grains::BITS - count as u32).unwrap_or(0)
}

/// The bits from `first` to before `end`.
pub fn between(first: usize, end: usize) -> Grains {
    lowest(end) & !lowest(first)
}

/// The numbers of the bits that are set.
fn each(bits: u32) -> impl Iterator<Item = u32> {
    ones(bits as usize).map(|bit| bit as u32)
}

/// The grains that a slot reaches into.
fn grains_of(class: SizeClass, slot: u32) -> Grains {
    let begin = slot as usize * class.bytes();
    between(begin >> GRAIN_SHIFT, ((begin + class.bytes() - 1) >> GRAIN_SHIFT) + 1)
}

/// The grains of a span that lie in slots at home, if `out` are the slots out.
pub fn at_home(class: SizeClass, out: Outs) -> Grains {
    let others = each(out).fold(0, |grains, slot| grains | grains_of(class, slot));
    lowest(class.pages() * PAGE_GRAINS) & !others
}

/// Those of them in whole granules of the source, `granule` grains each, for a span that begins at `span`. The source
/// maps and releases memory by granules.
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

/// What may go of a span that begins at `span`: grains in slots at home that are not holes yet, in whole granules of
/// the source, and the slots that reach into those grains, or into holes that such a slot reaches into.
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
    // Without a slot of its own the caller has no hold on the span; so the rest behind the last slot, if nothing else
    // may go, stays.
    (slots != 0).then_some(Claim {
        slots,
        grains,
        holes: reached,
    })
}

/// The rows of consecutive grains, from the first on: where each begins, and how many it has.
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

    /// The slot in which a byte of a span lies.
    fn slot_of(class: SizeClass, byte: usize) -> Option<u32> {
        let slot = (byte / class.bytes()) as u32;
        (slot < class.slots()).then_some(slot)
    }

    fn set(bits: u32) -> BTreeSet<usize> {
        (0..32).filter(|bit| bits & 1 << bit != 0).collect()
    }

    /// Looks at every 128th byte of the span, as slots are multiples of that; for every class that may have holes,
    /// every granule, and several places where the span begins.
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
                    // Each round reaches at least one more hole.
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
