//! The structures that several threads share, in use: who goes where, and what becomes of what lies there.

extern crate std;

use core::alloc::Layout;
use core::ptr::{self, NonNull};
use core::time::Duration;

use crate::heap::Config;
use crate::scavenge::pressure::Notices;
use crate::source::Region;
use crate::sync::thread;
use crate::units::PageCount;

use super::commons::{Common, MEETINGS, OTHERS, SEATS, seat_of};
use super::{Keeper, Objects};

std::thread_local! {
    static PROCESSOR: core::cell::Cell<usize> = const { core::cell::Cell::new(0) };
}

/// Where a thread of these tests says it is.
fn processor() -> usize {
    PROCESSOR.get()
}

fn at(number: usize) {
    PROCESSOR.set(number);
}

/// A heap that is told of so many processors.
fn heap(bytes: usize, processors: usize) -> &'static Objects<Region> {
    let memory = std::vec![core::mem::MaybeUninit::uninit(); bytes].leak();
    let config = Config::new(usize::MAX).caches(1).processors(processors, processor);
    let keeper = Keeper::new(false, Notices::NONE, "");
    Objects::open(Region::from_static(memory), config, keeper).unwrap()
}

/// Allocates a block from the structure of this processor, and frees it there.
fn use_once(objects: &Objects<Region>, layout: Layout) -> NonNull<u8> {
    let block = objects.take_shared(layout, false).unwrap();
    // SAFETY: freed with its layout.
    unsafe { objects.free_shared(block, layout) };
    block
}

fn made(objects: &Objects<Region>) -> usize {
    objects.other_commons().count()
}

#[test]
fn each_processor_has_a_structure_of_its_own_and_what_lies_there() {
    let (objects, layout) = (heap(16 << 20, 4), Layout::new::<[u8; 200]>());
    let blocks = [0, 1, 2, 3].map(|number| {
        at(number);
        assert_eq!(made(objects), number.saturating_sub(1));
        use_once(objects, layout)
    });
    for (number, block) in blocks.into_iter().enumerate() {
        // A number that is too large counts as a smaller one.
        for number in [number, number + 4, number + 400] {
            at(number);
            assert_eq!(use_once(objects, layout), block);
        }
    }
    assert_eq!(made(objects), 3);
    assert!(objects.stats().magazine_bytes >= 4 * 200 && objects.stats().bytes_in_use() == 0);
    assert!(objects.snapshot(0).classes().iter().all(|class| class.live == 0));
    objects.release(PageCount(usize::MAX));
    assert_eq!(objects.stats().magazine_bytes, 0);
    objects.check().unwrap();
}

/// However many processors there are.
#[test]
fn many_processors_share_what_there_is_and_a_small_heap_has_no_room_for_structures() {
    let layout = Layout::new::<[u8; 200]>();
    for (bytes, count, most) in [
        (16 << 20, 100, OTHERS),
        (16 << 20, 1, 0),
        (16 << 20, 0, 0),
        (96 << 10, 100, 0),
    ] {
        let objects = heap(bytes, count);
        for number in 0..count {
            at(number);
            use_once(objects, layout);
        }
        assert_eq!(made(objects), most);
    }
    let objects = heap(1 << 20, 100);
    for number in 0..100 {
        at(number);
        use_once(objects, layout);
    }
    let structures = made(objects) * size_of::<Common>();
    assert!((1 << 14..=1 << 15).contains(&structures), "{structures}");
}

/// Each does so while the structure that it would use is locked.
#[test]
fn threads_that_meet_get_structures_of_their_own() {
    let (objects, layout) = (Objects::for_test(16 << 20, 1, false), Layout::new::<[u8; 100]>());
    // Whether it stays where it was, though the lock is held: by another, which soon releases it.
    let meet = |objects: &Objects<Region>, number: usize| {
        let held = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let lock = &objects.common_made(number).lock;
                let _held = lock.lock(thread());
                held.wait();
                std::thread::sleep(Duration::from_millis(1));
            });
            held.wait();
            let own = objects.common_made(number);
            ptr::eq(own, objects.common_to_lock(thread()))
        })
    };
    assert_eq!(objects.commons.number(thread()), 0);
    for _ in 1..MEETINGS {
        assert!(meet(objects, 0) && !objects.commons.is_spread(), "not yet");
    }
    for number in 0..OTHERS {
        assert_eq!((objects.commons.number(thread()), made(objects)), (number, number));
        // Others use those that there are.
        let held: std::vec::Vec<_> = objects.other_commons().map(|common| common.lock.lock(1)).collect();
        let moved = match number {
            0 => !meet(objects, 0),
            _ => !ptr::eq(objects.common_made(number), objects.common_to_lock(thread())),
        };
        assert!(moved, "{number}");
        drop(held);
        use_once(objects, layout);
    }
    assert_eq!((objects.commons.number(thread()), made(objects)), (OTHERS, OTHERS));
    // There are no more: it goes to one that is free, and stays there.
    for (own, other) in [(OTHERS, 1), (1, 2), (2, 1)] {
        assert_eq!((meet(objects, own), objects.commons.number(thread())), (false, other));
    }
    assert_eq!(made(objects), OTHERS);
    objects.check().unwrap();
    let small = Objects::for_test(96 << 10, 1, false);
    for _ in 0..2 * MEETINGS {
        assert!(meet(small, 0), "no room for two");
    }
}

/// Who is alone with a structure is not disturbed, if there are others.
#[test]
fn a_thread_goes_where_nobody_else_is_alone() {
    let (objects, layout) = (Objects::for_test(16 << 20, 1, false), Layout::new::<[u8; 100]>());
    (0..100).for_each(|_| _ = use_once(objects, layout));
    let first = objects.first();
    if first.lock.enter(thread()).is_none() {
        // Where there is no heavy fence, nobody ever is.
        return;
    }
    drop(objects.commons.making.lock());
    assert!(objects.make_plan().is_some());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            (0..100).for_each(|_| _ = use_once(objects, layout));
            assert_eq!((objects.commons.number(thread()), made(objects)), (1, 1));
            let own = objects.common(thread());
            assert!(!ptr::eq(own, objects.first()) && own.lock.enter(thread()).is_some());
        });
    });
    assert!(ptr::eq(objects.common(thread()), first) && first.lock.enter(thread()).is_some());
}

/// Most of them, at least.
#[test]
fn threads_have_seats_of_their_own() {
    // As threads with stacks of 8 MiB, 2 MiB and 64 KiB, guards included; and as small numbers.
    for distance in [0x80_1000_usize, 0x20_1000, 0x1_1000, 4] {
        let first = (usize::MAX / 3) & !0xfff;
        let mut seats: std::vec::Vec<_> = (0..16)
            .map(|number| seat_of(!first.wrapping_sub(number * distance)))
            .collect();
        assert!(seats.iter().all(|&seat| seat < SEATS));
        seats.sort_unstable();
        seats.dedup();
        assert!(seats.len() >= 12, "{distance:#x}: {seats:?}");
    }
}

/// A structure whose lock is held cannot be emptied: a request waits for it before it is refused.
#[test]
fn what_another_structure_keeps_is_found_though_its_lock_is_held() {
    let (objects, large) = (heap(4 << 20, 2), Layout::new::<[u8; 1 << 20]>());
    at(1);
    let mut blocks: std::vec::Vec<_> = core::iter::from_fn(|| objects.take_shared(large, false)).collect();
    // SAFETY: freed with its layout.
    unsafe { objects.free_shared(blocks.pop().unwrap(), large) };
    let other = || objects.commons.other(1).unwrap();
    assert!(other().thread.shelf().pages().0 >= 128);
    let held = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let lock = &other().lock;
            let _held = lock.lock(thread());
            held.wait();
            std::thread::sleep(Duration::from_millis(30));
        });
        held.wait();
        at(0);
        assert!(objects.take_shared(large, false).is_some());
    });
    // And without one, it is a refusal, of zeroed blocks and of blocks that grow too.
    let small = Layout::new::<[u8; 64]>();
    let block = objects.take_shared(small, false).unwrap();
    assert!(objects.take_shared(large, false).is_none() && objects.take_shared(large, true).is_none());
    // SAFETY: the block is of this layout.
    assert!(unsafe { objects.resize_shared(block, small, large.size()) }.is_none());
    assert!(objects.commons().all(|common| !common.lock.is_held()));
    objects.check().unwrap();
}

/// Nobody waits for who releases memory for a soft limit.
#[test]
fn nothing_is_released_under_the_lock_of_one_of_several() {
    let objects = heap(16 << 20, 2);
    for number in [1, 0, 1] {
        at(number);
        drop(objects.shared());
        assert!(objects.heap.owes(1), "from the first lock on");
        assert_eq!(objects.heap.take_debt(), 1);
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
