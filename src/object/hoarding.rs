//! Tests: what threads keep in their magazines, each and all together (`hoard.rs`), and what they tell the keeper of
//! the rest.

extern crate std;

use core::alloc::Layout;
use core::ptr::NonNull;
use std::vec::Vec;

use crate::source::Region;
use crate::units::PageCount;

use super::hoard::FREE_BYTES;
use super::keeper::{ABSENT, ASLEEP, AWAKE};
use super::resting::{Parts, Prints, Resting};
use super::thread::Staying;
use super::{Objects, SizeClass, Thread};

const LONG: Layout = Layout::new::<[u8; 4096]>();

fn class() -> SizeClass {
    SizeClass::of(LONG.size(), LONG.align()).unwrap()
}

/// A thread's structure, entered.
fn enter(objects: &Objects<Region>) -> Staying<'static> {
    // SAFETY: never destroyed.
    unsafe { objects.enlist().unwrap().as_ref() }.enter(objects).unwrap()
}

fn allocate(objects: &Objects<Region>, own: &Thread, blocks: u32) -> Vec<NonNull<u8>> {
    (0..blocks).map(|_| objects.allocate(own, LONG).unwrap()).collect()
}

fn free(objects: &Objects<Region>, own: &Thread, blocks: Vec<NonNull<u8>>) {
    // SAFETY: freed with its layout, by a thread that has entered.
    let free = |block| unsafe { objects.free(own, block, LONG) };
    blocks.into_iter().for_each(free);
}

/// Hoarded is what threads keep, not what they have fetched.
#[test]
fn threads_that_hand_all_away_leave_the_hoard_to_others() {
    let (objects, class) = (Objects::for_test(56 << 20, 1, false), class());
    let owned = |batches| {
        let own = enter(objects);
        let blocks = allocate(objects, &own, batches * class.batch());
        assert_eq!(own.magazine(class).spares(), 0);
        (own, blocks)
    };
    // More than each may have in spares, and all of them together.
    (0..17).for_each(|_| _ = owned(5));
    let (own, blocks) = owned(4);
    free(objects, &own, blocks);
    assert_eq!(own.magazine(class).spares(), 3);
}

/// What threads keep that only drop blocks is limited for all together, but for a little each.
#[test]
fn threads_that_only_drop_keep_little() {
    let (objects, class) = (Objects::for_test(64 << 20, 1, false), class());
    let maker = enter(objects);
    let droppers: Vec<_> = (0..100)
        .map(|_| {
            let own = enter(objects);
            free(objects, &own, allocate(objects, &maker, 4 * class.batch()));
            assert_eq!(own.magazine(class).spares(), 0, "it needs none");
            own
        })
        .collect();
    let room = |own: &Staying<'_>| own.magazine(class).room() as usize * class.bytes();
    let all: usize = droppers.iter().map(room).sum();
    assert!(all <= (16 << 20) + droppers.len() * FREE_BYTES, "{} MiB", all >> 20);
    assert!((15 << 10..=16 << 10).contains(&objects.hoard.taken()));
    assert!(droppers[0].magazine(class).is_wide(class) && !droppers[99].magazine(class).is_wide(class));
    // Who needs spares has the rest.
    let (own, blocks) = (enter(objects), allocate(objects, &maker, 1));
    free(objects, &own, blocks);
    let blocks = allocate(objects, &own, 4 * class.batch());
    free(objects, &own, blocks);
    assert!(own.magazine(class).spares() > 1);
    objects.check().unwrap();
}

/// Whose room is gone leaves it to others: at the end, with all slots, or with the long ones alone.
#[test]
fn what_a_thread_has_room_for_no_more_others_may_have() {
    let (objects, class) = (Objects::for_test(16 << 20, 1, false), class());
    let (maker, resting) = (enter(objects), Resting::default());
    let long = || Prints::of(0, SizeClass::all().map(|class| (class, class.is_flagged().into())));
    let long = (0..9).map(|_| resting.note(long())).last().unwrap();
    assert!(long.has_flagged() && !long.has(SizeClass::of(64, 1).unwrap()));
    let empties: [&dyn Fn(&Thread); 4] = [
        &|own| _ = objects.empty_seized(own, long),
        &|own| _ = objects.empty_seized(own, Parts::ALL),
        &|own| _ = objects.empty(own, None),
        &|own| objects.part(own),
    ];
    for empty in empties {
        let own = enter(objects);
        free(objects, &own, allocate(objects, &maker, class.batch()));
        let blocks = allocate(objects, &own, class.batch() - 1);
        assert!(objects.hoard.taken() > 0 && own.magazine(class).is_wide(class));
        empty(&own);
        assert_eq!(objects.hoard.taken(), 0);
        // The user finds out at its next visit.
        free(objects, &own, blocks);
        assert_eq!(own.magazine(class).is_wide(class), objects.hoard.taken() > 0);
        objects.empty(&own, None);
    }
}

/// Over a soft limit, and at a limit, where there is no page for a rack: half of each span stays in use, so no page is
/// freed, and what is released between live blocks (`punch.rs`) waits for the keeper.
#[test]
fn who_sends_slots_home_tells_the_keeper() {
    for is_full in [false, true] {
        let objects = Objects::for_test(8 << 20, 4, true);
        let own = enter(objects);
        let blocks: Vec<_> = if is_full {
            core::iter::from_fn(|| objects.allocate(&own, LONG)).collect()
        } else {
            allocate(objects, &own, 800)
        };
        if !is_full {
            objects.heap.set_soft_limit(PageCount(1));
        }
        objects.empty(&own, None);
        assert!(objects.keeper.change(ABSENT, AWAKE) && objects.keeper.change(AWAKE, ASLEEP));
        free(objects, &own, blocks.into_iter().step_by(2).collect());
        assert!(objects.keeper.is(AWAKE), "full: {is_full}");
    }
}

/// With blocks of all classes, few of them or many, in one order or another.
#[test]
fn a_plot_is_as_long_as_what_is_used_at_a_time() {
    let objects = Objects::for_test(64 << 20, 64, false);
    let own = enter(objects);
    let use_all = |count: u32| {
        for class in SizeClass::all() {
            let layout = Layout::from_size_align(class.bytes(), 8).unwrap();
            let blocks: Vec<_> = (0..count.min(3 * class.batch()))
                .map(|_| objects.allocate(&own, layout).unwrap())
                .collect();
            // SAFETY: freed with their layout, by a thread that has entered.
            blocks
                .into_iter()
                .for_each(|block| unsafe { objects.free(&own, block, layout) });
        }
    };
    let empty = || {
        objects.empty(&own, None);
        own.plot().pages().0
    };
    use_all(1);
    let few = empty();
    (0..100).for_each(|_| {
        use_all(1);
        empty();
    });
    assert_eq!(empty(), few);
    for count in [7, 40, 200, 2000, 2000, 7, 200] {
        use_all(count);
        empty();
    }
    assert!(few <= 2 && empty() <= 21, "{few}, {}", empty());
    objects.flush(&own);
    assert_eq!(own.plot().pages().0, 0);
}
