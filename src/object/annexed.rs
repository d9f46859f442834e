//! The structures that several threads share: where they lie, and how many there are.

extern crate std;

use core::alloc::Layout;
use core::ptr::{self, NonNull};

use crate::heap::Config;
use crate::scavenge::pressure::Notices;
use crate::source::{Purpose, Region, Source};
use crate::units::PageCount;

use super::commons::OTHERS_BY_SEAT;
use super::meeting::{at, heap, made, use_once, with_room};
use super::{Keeper, Objects};

/// There they are in no long block's way, whatever was in use when they were made.
#[test]
fn structures_lie_beside_the_tables_if_the_source_has_room() {
    let memory = std::boxed::Box::leak(std::boxed::Box::new_uninit_slice(8 << 20));
    let region: &Region = std::boxed::Box::leak(std::boxed::Box::new(Region::from_static(memory)));
    let budget = region.budget();
    // The first half, the middle, and the rest.
    let layouts = [2 << 20, 100_000, 1 << 20].map(|size| Layout::from_size_align(size, 8).unwrap());
    let all = Layout::from_size_align(3800 << 10, 8).unwrap();
    for room_for_table in [true, false] {
        let config = Config::new(4 << 20).caches(1);
        let objects = Objects::open(region, config, Keeper::new(false, Notices::NONE, "")).unwrap();
        let taken = (!room_for_table).then(|| {
            let (bytes, granule) = (region.budget(), region.granule());
            region
                .reserve(Purpose::Metadata, bytes & !(granule - 1), granule)
                .unwrap()
        });
        let [first, middle, rest] = layouts.map(|layout| objects.take_shared(layout, false).unwrap());
        // SAFETY: freed with its layout, here and below.
        unsafe { objects.free_shared(middle, layouts[1]) };
        let empty = objects.stats();
        (1..=3).for_each(|number| assert!(!ptr::eq(objects.common_made(number), objects.first())));
        let stats = objects.stats();
        assert_eq!(stats.bytes_in_use(), empty.bytes_in_use(), "{stats}");
        assert_eq!(
            (stats.structure_pages.0 == 0, stats.pages.in_use == empty.pages.in_use),
            (room_for_table, room_for_table)
        );
        assert_eq!(stats.pages.metadata_bytes > empty.pages.metadata_bytes, room_for_table);
        // SAFETY: as above.
        unsafe {
            objects.free_shared(first, layouts[0]);
            objects.free_shared(rest, layouts[2]);
        }
        assert_eq!(objects.take_shared(all, false).is_some(), room_for_table);
        objects.check().unwrap();
        // SAFETY: reserved above; and nobody uses the heap.
        unsafe {
            taken
                .into_iter()
                .for_each(|taken| region.unreserve(Purpose::Metadata, taken));
            Objects::close(NonNull::from(objects));
        }
        assert_eq!(region.budget(), budget, "all of it is given up");
    }
}

/// A run for all of them need not be had.
#[test]
fn in_a_torn_heap_there_are_as_many_structures_as_fit() {
    let objects = Objects::for_test(16 << 20, 1, false);
    let runs: std::vec::Vec<_> = core::iter::from_fn(|| objects.heap.allocate(PageCount(1))).collect();
    for run in runs.into_iter().filter(|run| run.start().0 % 8 > 5) {
        // SAFETY: once.
        unsafe { objects.heap.free(run) };
    }
    (1..=OTHERS_BY_SEAT).for_each(|number| _ = objects.common_made(number));
    assert!((1..OTHERS_BY_SEAT).contains(&made(objects)), "{}", made(objects));
    assert!(objects.stats().structure_pages.0 <= 2);
}

/// Of a heap whose source has room, at least. And the limit holds for them, too.
#[test]
fn with_a_higher_limit_there_are_more_structures() {
    let objects = with_room();
    objects.heap.set_limit(PageCount(64));
    let make = || {
        (1..=OTHERS_BY_SEAT).for_each(|number| _ = objects.common_made(number));
        made(objects)
    };
    assert!((1..OTHERS_BY_SEAT).contains(&make()));
    objects.heap.set_limit(PageCount(usize::MAX));
    assert_eq!(make(), OTHERS_BY_SEAT);
}

/// A granule is no reason to take more than that.
#[test]
fn structures_take_no_more_than_their_part() {
    for granule in [64, 4096, 64 << 10, 1 << 20] {
        let memory = std::boxed::Box::leak(std::boxed::Box::new_uninit_slice(16 << 20));
        let source = Region::from_static(memory).with_granule(granule);
        let keeper = Keeper::new(false, Notices::NONE, "");
        let objects = Objects::open(source, Config::new(8 << 20).caches(1), keeper).unwrap();
        _ = objects.common_made(1);
        let (bytes, pages) = objects.commons.annex_size();
        assert!(made(objects) == 1 && (1..=8 << 20 >> 5).contains(&(bytes + (pages.0 << 13))));
        assert_eq!(bytes > 0, granule <= 64 << 10, "{granule}");
    }
}

/// The heap's library is unloaded.
#[test]
fn the_structures_go_back_in_the_end() {
    let objects = heap(16 << 20, 3);
    for number in 0..3 {
        at(number);
        use_once(objects, Layout::new::<[u8; 200]>());
        use_once(objects, Layout::new::<[u8; 100_000]>());
    }
    assert_eq!(made(objects), 2);
    objects.settle_up();
    assert_eq!(objects.heap.stats().in_use.0, 0, "{}", objects.stats());
}
