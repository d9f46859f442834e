//! The caller's bytes as a source: both ends, edge cases, retried reservations, threads.

use std::mem::MaybeUninit;

#[cfg(all(unix, target_pointer_width = "64"))]
use pageheap::PageHeap;
#[cfg(all(unix, target_pointer_width = "64"))]
use pageheap::source::System;
use pageheap::{Config, Heap};
use proptest::prelude::*;

use super::*;

#[test]
fn a_ladder_of_failed_reservations_leaks_nothing() {
    let region = Region::from_static(bytes(256 * GRANULE, 0));
    let all = region.budget();
    assert_eq!(all, 256 * GRANULE);
    let mut wish = by_width(1 << 40, 1 << 30);
    let (pages, tables) = loop {
        let pages = region.reserve(Purpose::Pages, wish, 16 * GRANULE);
        let tables = region.reserve(Purpose::Metadata, (wish / 32).max(GRANULE), GRANULE);
        if let (Some(pages), Some(tables)) = (pages, tables) {
            break (pages, tables);
        }
        // SAFETY: just reserved, and unused.
        unsafe {
            pages.into_iter().for_each(|one| region.unreserve(Purpose::Pages, one));
            tables
                .into_iter()
                .for_each(|one| region.unreserve(Purpose::Metadata, one));
        }
        assert_eq!(region.budget(), all);
        wish /= 2;
    };
    assert_eq!(pages.bytes, 128 * GRANULE);
    let padding = all - pages.bytes - tables.bytes - region.budget();
    assert!(padding < 16 * GRANULE);
}

#[test]
fn heaps_dropped_in_any_order_leave_all_of_it() {
    let region = Region::from_static(bytes(64 * GRANULE, 100));
    let all = region.budget();
    assert_eq!(all, 63 * GRANULE, "an unaligned base costs the first granule");
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        for purpose in [Purpose::Pages, Purpose::Metadata] {
            let three = [1, 8, 2].map(|n| region.reserve(purpose, n * GRANULE, n * GRANULE).expect("room"));
            for index in order {
                // SAFETY: reserved above, and unused.
                unsafe { region.unreserve(purpose, three[index]) };
            }
            assert_eq!(region.budget(), all);
        }
    }
}

#[test]
fn promised_zeros_are_reported_once() {
    let block = bytes(32 * GRANULE, 0);
    block.fill(MaybeUninit::new(0));
    // SAFETY: filled with zeros above.
    let region = unsafe { Region::from_static(block).zeroed() };
    // SAFETY: Reserved ranges of reservations made here.
    let prepare = |one, offset, bytes| unsafe { region.prepare(Purpose::Pages, at(one, offset), bytes) };
    // SAFETY: reservations made here, and unused.
    let give = |purpose, one| unsafe { region.unreserve(purpose, one) };
    let first = region.reserve(Purpose::Pages, 8 * GRANULE, GRANULE).expect("room");
    assert_eq!(prepare(first, 0, 2 * GRANULE), Ok(Contents::Zero));
    assert_eq!(prepare(first, 2 * GRANULE, GRANULE), Ok(Contents::Zero));
    give(Purpose::Pages, first);
    let tables = region.reserve(Purpose::Metadata, 8 * GRANULE, GRANULE).expect("room");
    // SAFETY: a Reserved range.
    let answer = unsafe { region.prepare(Purpose::Metadata, at(tables, 4 * GRANULE), GRANULE) };
    assert_eq!(answer, Ok(Contents::Zero));
    give(Purpose::Metadata, tables);
    let second = region
        .reserve(Purpose::Pages, 32 * GRANULE, GRANULE)
        .expect("all of it");
    assert_eq!(prepare(second, 0, GRANULE), Ok(Contents::Unknown), "prepared before");
    assert_eq!(
        prepare(second, 3 * GRANULE, 25 * GRANULE),
        Ok(Contents::Zero),
        "up to the metadata of before"
    );
    assert_eq!(
        prepare(second, 28 * GRANULE, GRANULE),
        Ok(Contents::Unknown),
        "metadata before"
    );
    assert_eq!(
        prepare(second, 31 * GRANULE, GRANULE),
        Ok(Contents::Unknown),
        "above it we do not know"
    );
}

#[test]
fn memory_can_be_used_and_is_never_given_back() {
    let region = Region::from_static(bytes(16 * GRANULE, 8)).with_granule(200);
    assert_eq!(region.granule(), 256);
    let pages = region.reserve(Purpose::Pages, 1024, 1024).expect("room");
    // SAFETY: reserved here, and used only here.
    unsafe {
        assert_eq!(
            region.prepare(Purpose::Pages, pages.base, pages.bytes),
            Ok(Contents::Unknown)
        );
        pages.base.write_bytes(7, pages.bytes);
        assert_eq!(region.release(pages.base, pages.bytes), Err(Refused));
        assert_eq!(at(pages, pages.bytes - 1).read(), 7);
    }
}

#[test]
fn ranges_too_small_for_a_granule_hold_nothing() {
    for (count, skew) in [(0, 0), (GRANULE - 1, 0), (GRANULE, 1), (10, GRANULE - 5)] {
        let region = Region::from_static(bytes(count, skew));
        assert_eq!(region.budget(), 0);
        for purpose in [Purpose::Pages, Purpose::Metadata] {
            assert_eq!(region.reserve(purpose, GRANULE, GRANULE), None);
            assert_eq!(region.reserve(purpose, usize::MAX, GRANULE), None);
            assert_eq!(region.reserve(purpose, 0, GRANULE), None);
        }
    }
}

#[test]
fn threads_get_disjoint_parts() {
    let region = Region::from_static(bytes(128 * GRANULE, 0));
    let all = region.budget();
    let rounds = if cfg!(miri) { 20 } else { 5000 };
    std::thread::scope(|scope| {
        for mine in 1..=4_u8 {
            let region = &region;
            scope.spawn(move || {
                let purpose = if mine % 2 == 0 {
                    Purpose::Pages
                } else {
                    Purpose::Metadata
                };
                for round in 0..rounds {
                    let Some(one) = region.reserve(purpose, (1 + round % 7) * GRANULE, GRANULE) else {
                        continue;
                    };
                    // SAFETY: this thread's reservation, in the region's memory.
                    unsafe {
                        one.base.write(mine);
                        at(one, one.bytes - 1).write(mine);
                        assert_eq!((one.base.read(), at(one, one.bytes - 1).read()), (mine, mine));
                        region.unreserve(purpose, one);
                    }
                }
            });
        }
    });
    assert_eq!(region.budget(), all);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, ..ProptestConfig::default() })]

    /// Checked against a list of reservations: aligned, inside, disjoint, and all available again at the end.
    #[test]
    fn reservations_are_aligned_inside_and_disjoint(
        skew in 0_usize..GRANULE,
        steps in prop::collection::vec((any::<bool>(), 1_usize..9, 0_u32..5, any::<bool>(), 0_usize..8), 1..60),
    ) {
        let block = bytes(64 * GRANULE, skew);
        let (first, end) = (block.as_ptr().addr(), block.as_ptr().addr() + block.len());
        let region = Region::from_static(block);
        let all = region.budget();
        let mut kept: Vec<(Purpose, Reservation)> = Vec::new();
        for (pages, granules, shift, give, which) in steps {
            let purpose = if pages { Purpose::Pages } else { Purpose::Metadata };
            if give && !kept.is_empty() {
                let (purpose, one) = kept.swap_remove(which % kept.len());
                // SAFETY: reserved, unused, and given back once.
                unsafe { region.unreserve(purpose, one) };
            } else if let Some(one) = region.reserve(purpose, granules * GRANULE, GRANULE << shift) {
                let (low, high) = (one.base.addr().get(), one.base.addr().get() + one.bytes);
                prop_assert_eq!(low % (GRANULE << shift), 0);
                prop_assert!(first <= low && high <= end && granules * GRANULE <= one.bytes);
                for (_, other) in &kept {
                    let start = other.base.addr().get();
                    prop_assert!(high <= start || start + other.bytes <= low);
                }
                kept.push((purpose, one));
            }
        }
        for (purpose, one) in kept {
            // SAFETY: as above.
            unsafe { region.unreserve(purpose, one) };
        }
        prop_assert_eq!(region.budget(), all);
    }
}

#[test]
fn metadata_lies_above_a_gap_or_below_it() {
    let memory = bytes(64 * GRANULE, 0);
    let first = memory.as_mut_ptr().cast::<u8>();
    let (start, granule) = (first.addr(), |number: usize| first.wrapping_add(number * GRANULE));
    let region = Region::from_static(memory).with_gaps([granule(50).wrapping_add(1)..granule(60)]);
    let all = region.budget();
    let place = |granules, align| {
        let one = region.reserve(Purpose::Metadata, granules * GRANULE, align)?;
        Some((one, (one.base.addr().get() - start) / GRANULE))
    };
    let (above, at_60) = place(4, GRANULE).expect("room above");
    assert_eq!((at_60, above.bytes), (60, 4 * GRANULE));
    let (below, at_48) = place(2, GRANULE).expect("room below");
    assert_eq!(
        (at_48, below.bytes),
        (48, 2 * GRANULE),
        "the granule in which the gap begins is part of it"
    );
    // SAFETY: reserved above, and unused.
    unsafe { region.unreserve(Purpose::Metadata, below) };
    // SAFETY: as above.
    unsafe { region.unreserve(Purpose::Metadata, above) };
    assert_eq!(region.budget(), all);
    let (one, at_45) = place(5, GRANULE).expect("room below");
    assert_eq!(at_45, 45, "too long for the piece above");
    // SAFETY: as above.
    unsafe { region.unreserve(Purpose::Metadata, one) };
    assert!(place(51, GRANULE).is_none(), "longer than any piece");
    let pages = region
        .reserve(Purpose::Pages, 64 * GRANULE, GRANULE)
        .expect("pages may lie across a gap");
    let gap = region.gap(pages.base, pages.bytes);
    assert_eq!(gap, Some(50 * GRANULE + 1..60 * GRANULE));
    assert_eq!(region.gap(at(pages, 60 * GRANULE), GRANULE), None);
    assert_eq!(region.gap(at(pages, 55 * GRANULE), GRANULE), Some(0..GRANULE));
}

/// The number of reservations at an end has eight bits.
#[test]
fn an_end_has_room_for_255_reservations() {
    let region = Region::from_static(bytes(600 * GRANULE, 0));
    let all = region.budget();
    for purpose in [Purpose::Pages, Purpose::Metadata] {
        let kept: Vec<_> = std::iter::from_fn(|| region.reserve(purpose, GRANULE, GRANULE)).collect();
        assert_eq!((kept.len(), region.budget()), (255, all - 255 * GRANULE));
        // SAFETY: reserved above, and unused.
        kept.into_iter()
            .for_each(|one| unsafe { region.unreserve(purpose, one) });
        assert_eq!(region.budget(), all);
    }
}

/// A heap that is dropped leaves a shared region as it was, also while another heap lives.
#[test]
fn heaps_that_come_and_go_leave_a_shared_region_as_it_was() {
    let region: &'static Region = Box::leak(Box::new(Region::from_static(bytes(512 * GRANULE, 0))));
    let config = Config::new(128 * GRANULE);
    let first = Heap::new(region, config).expect("room");
    let left = region.budget();
    for _ in 0..20 {
        drop(Heap::new(region, config).expect("room again"));
        assert_eq!(region.budget(), left);
    }
    drop(first);
}

/// Such a region is divided in units longer than its granule, of which tables and pages lose one each.
#[test]
#[cfg(all(unix, target_pointer_width = "64"))]
fn a_heap_has_nearly_all_of_a_terabyte() {
    const BYTES: usize = 1 << 40;
    const TOP: usize = 1 << 32;
    let all = System.reserve(Purpose::Pages, BYTES, 1 << 21).expect("addresses");
    // SAFETY: reserved above; the tables will lie in this part.
    unsafe { System.prepare(Purpose::Pages, at(all, BYTES - TOP), TOP) }.expect("no memory is behind it yet");
    // SAFETY: a heap of pages touches its tables only.
    let region = unsafe { Region::new(all.base.as_ptr(), BYTES) };
    let heap = PageHeap::new(&region, Config::new(usize::MAX)).expect("a heap");
    assert!(heap.capacity().0 > BYTES / 8192 / 100 * 99, "{heap:?}");
    drop(heap);
    // SAFETY: reserved above, and no longer used.
    unsafe { System.unreserve(Purpose::Pages, all) };
}
