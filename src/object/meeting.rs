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

use super::annex::{OTHERS, seat_of};
use super::commons::{INTRUSION, MEETINGS, OTHERS_BY_SEAT};
use super::{Forks, Keeper, Objects, SizeClass, Snapshot};

std::thread_local! {
    static PROCESSOR: core::cell::Cell<usize> = const { core::cell::Cell::new(0) };
}

/// Where a thread of these tests says it is.
fn processor() -> usize {
    PROCESSOR.get()
}

pub(super) fn at(number: usize) {
    PROCESSOR.set(number);
}

/// A heap that is told of so many processors.
pub(super) fn heap(bytes: usize, processors: usize) -> &'static Objects<Region> {
    let memory = std::boxed::Box::leak(std::boxed::Box::new_uninit_slice(bytes));
    let config = Config::new(usize::MAX).caches(1).processors(processors, processor);
    let keeper = Keeper::new(false, Notices::NONE, "");
    Objects::open(Region::from_static(memory), config, keeper).unwrap()
}

/// Allocates a block from the structure of this processor, and frees it there.
pub(super) fn use_once(objects: &Objects<Region>, layout: Layout) -> NonNull<u8> {
    let block = objects.take_shared(layout, false).unwrap();
    // SAFETY: freed with its layout.
    unsafe { objects.free_shared(block, layout) };
    block
}

/// A heap with whose first structure this thread is alone. `None` where there is no heavy fence: nobody ever is.
fn alone(layout: Layout) -> Option<&'static Objects<Region>> {
    let objects = Objects::for_test(16 << 20, 1, false);
    (0..100).for_each(|_| _ = use_once(objects, layout));
    let is_alone = objects.first().lock.enter(thread()).is_some();
    assert_eq!(is_alone, crate::sync::fence_heavy());
    is_alone.then_some(objects)
}

pub(super) fn made(objects: &Objects<Region>) -> usize {
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
    let mut snapshot = Snapshot::default();
    objects.take_snapshot(&mut snapshot, 0);
    assert!(snapshot.classes().iter().all(|class| class.live == 0));
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
    let objects = heap(3 << 20, 100);
    for number in 0..100 {
        at(number);
        use_once(objects, layout);
    }
    objects.release(PageCount(usize::MAX));
    let (structures, pages) = (made(objects), objects.stats().pages.in_use.0);
    assert!(
        (1..OTHERS).contains(&structures) && pages <= objects.heap.limit().0 / 32,
        "{structures}: {pages}"
    );
}

/// Each does so while the structure that it would use is locked.
#[test]
fn threads_that_meet_get_structures_of_their_own() {
    let (objects, layout) = (Objects::for_test(16 << 20, 1, false), Layout::new::<[u8; 100]>());
    // Whether it stays where it was, though another thread holds the lock.
    let meet = |objects: &Objects<Region>, number: usize| {
        let held = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let lock = &objects.common_made(number).lock;
                let _held = lock.lock(thread());
                held.wait();
                held.wait();
            });
            held.wait();
            let own = objects.common_made(number);
            let stays = ptr::eq(own, objects.common_to_lock(thread()));
            held.wait();
            stays
        })
    };
    assert_eq!(objects.commons.number(thread()), 0);
    for _ in 1..MEETINGS {
        assert!(meet(objects, 0) && !objects.commons.is_spread(), "not yet");
    }
    for number in 0..OTHERS_BY_SEAT {
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
    assert_eq!(
        (objects.commons.number(thread()), made(objects)),
        (OTHERS_BY_SEAT, OTHERS_BY_SEAT)
    );
    // There are no more: it goes to one that is free, and stays there.
    for _ in 0..3 {
        let own = objects.commons.number(thread());
        assert!(!meet(objects, own) && ![0, own].contains(&objects.commons.number(thread())));
    }
    assert_eq!(made(objects), OTHERS_BY_SEAT);
    objects.check().unwrap();
    let small = Objects::for_test(96 << 10, 1, false);
    for _ in 0..2 * MEETINGS {
        assert!(meet(small, 0), "no room for two");
    }
}

/// Who is alone with a structure is not disturbed, if there are others.
#[test]
fn a_thread_goes_where_nobody_else_is_alone() {
    let layout = Layout::new::<[u8; 100]>();
    let Some(objects) = alone(layout) else { return };
    let first = objects.first();
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
    // Nor if this one's own is locked, which no other thread takes long for.
    let held = first.lock.lock(64);
    assert!(!objects.common_to_lock(thread()).lock.is_anothers(thread()) && made(objects) == 2);
    drop(held);
}

/// However often others release memory, fork, or are refused.
#[test]
fn a_thread_stays_alone_where_others_come_to_empty_it() {
    let layout = Layout::new::<[u8; 100]>();
    let Some(objects) = alone(layout) else { return };
    let is_alone = || {
        use_once(objects, layout);
        objects.first().lock.enter(thread()).is_some()
    };
    drop(objects.commons.making.lock());
    assert!(objects.make_plan().is_some());
    let most = Layout::new::<[u8; 10 << 20]>();
    let kept = objects.take_shared(most, false).unwrap();
    let visits: [&(dyn Fn() + Sync); 4] = [
        &|| _ = objects.release(PageCount(usize::MAX)),
        &|| _ = objects.scavenge(PageCount(usize::MAX)),
        &|| assert!(objects.take_shared(most, false).is_none()),
        &|| {
            assert!(objects.try_hold_driver());
            objects.hold();
            objects.let_go();
            objects.let_go_driver();
        },
    ];
    for _ in 0..20 {
        for visit in visits {
            std::thread::scope(|scope| _ = scope.spawn(visit));
            assert!(objects.first().lock.enter(thread()).is_none(), "not visited");
            assert!(is_alone());
        }
    }
    // SAFETY: freed with its layout.
    unsafe { objects.free_shared(kept, most) };
}

/// A visitor holds the lock meanwhile. Elsewhere a thread would end another's turn.
#[test]
fn who_is_alone_waits_for_a_visitor() {
    let Some(objects) = alone(Layout::new::<[u8; 100]>()) else {
        return;
    };
    let first = objects.first();
    for number in 0..3 {
        _ = objects.common_made(number);
        let _visit = first.lock.visit(64);
        assert!(ptr::eq(objects.common_to_lock(thread()), first));
    }
    assert!(!ptr::eq(objects.common_to_lock(72), first), "another one");
}

/// A heap whose source has room for more tables.
pub(super) fn with_room() -> &'static Objects<Region> {
    let memory = std::boxed::Box::leak(std::boxed::Box::new_uninit_slice(16 << 20));
    let config = Config::new(8 << 20).caches(1);
    Objects::open(
        Region::from_static(memory),
        config,
        Keeper::new(false, Notices::NONE, ""),
    )
    .unwrap()
}

/// At first it is the one alone that has to give way, whether it was visited or not.
#[test]
fn who_comes_again_to_where_another_is_alone_goes_elsewhere() {
    let layout = Layout::new::<[u8; 100]>();
    for (visits, has_room) in [(0, true), (1, true), (2, true), (1, false)] {
        let objects = if has_room {
            with_room()
        } else {
            Objects::for_test(16 << 20, 1, false)
        };
        for times in 0..=MEETINGS / INTRUSION {
            (0..100 << times).for_each(|_| _ = use_once(objects, layout));
            if objects.first().lock.enter(thread()).is_none() {
                return assert_eq!(times, 0, "there is no heavy fence");
            }
            (0..visits).for_each(|_| drop(objects.first().lock.visit(64)));
            std::thread::scope(|scope| _ = scope.spawn(|| _ = use_once(objects, layout)));
            let parts = has_room && times == MEETINGS / INTRUSION;
            assert_eq!(made(objects), usize::from(parts));
            assert_eq!(objects.first().lock.is_mine(thread()), parts);
        }
    }
}

/// The latter keep in one structure what they would otherwise keep in sixteen.
#[test]
fn threads_that_use_a_heap_by_turns_part_and_those_that_do_so_one_after_another_do_not() {
    if !crate::sync::fence_heavy() {
        return;
    }
    // How many of a heap's threads find another alone with the first structure, and stay.
    let stays = |identity: &dyn Fn(usize) -> usize| {
        let objects = with_room();
        let first = objects.first();
        let comes = |&time: &usize| {
            let me = identity(time);
            let stays = ptr::eq(objects.common_to_lock(me), first);
            (0..100 << time).for_each(|_| drop(first.lock.lock_often(me)));
            stays
        };
        (0..10).take_while(comes).count()
    };
    assert_eq!(stays(&|time| 64 + 8 * time), 10);
    for threads in 2..=4 {
        let most = threads + MEETINGS as usize / INTRUSION as usize;
        assert_eq!(stays(&|time| 64 + 8 * (time % threads)), most, "{threads}");
    }
}

/// It may have ended.
#[test]
fn a_structure_is_taken_over_whose_thread_has_missed_two_rounds() {
    let layout = Layout::new::<[u8; 100]>();
    let Some(objects) = alone(layout) else { return };
    let (first, second) = (objects.first(), objects.common_made(1));
    (0..100).for_each(|_| drop(second.lock.lock_often(64)));
    let number = |me| {
        objects
            .commons()
            .position(|common| ptr::eq(common, objects.common_to_lock(me)))
    };
    let release = || std::thread::scope(|scope| _ = scope.spawn(|| objects.release(PageCount(usize::MAX))));
    // Refusals and forks are not rounds.
    for _ in 0..3 {
        objects.try_commons(None, |_| ());
    }
    assert_eq!(number(72), Some(2), "a new one");
    release();
    use_once(objects, layout);
    release();
    assert!(second.lock.is_deserted() && !first.lock.is_deserted());
    _ = objects.common_made(2).lock.lock(72);
    assert_eq!(number(80), Some(2), "where nobody is alone");
    (0..100).for_each(|_| drop(objects.common_made(2).lock.lock_often(72)));
    assert_eq!(number(88), Some(1), "where nobody has been for long");
    // The first, too.
    release();
    assert_eq!((number(96), made(objects)), (Some(0), 2));
}

/// Even if two have the same one.
#[test]
fn threads_have_seats_of_their_own() {
    // As threads with stacks of 8 MiB, 2 MiB and 64 KiB, guards included; and as small numbers.
    for distance in [0x80_1000_usize, 0x20_1000, 0x1_1000, 4] {
        let objects = heap(16 << 20, 2);
        let plan = objects.make_plan().unwrap();
        let first = (usize::MAX / 3) & !0xfff;
        let threads: std::vec::Vec<_> = (1..=16).map(|number| !first.wrapping_sub(number * distance)).collect();
        (1..).zip(&threads).for_each(|(number, &me)| plan.seat(me, number));
        let found = (1..)
            .zip(&threads)
            .filter(|&(number, &me)| plan.number_of(me) == number);
        assert!(found.count() >= 15, "{distance:#x}");
    }
    let objects = heap(16 << 20, 2);
    let plan = objects.make_plan().unwrap();
    let one = 0x1000_usize;
    let other = (one + 1..).find(|&other| seat_of(other).0 == seat_of(one).0 && seat_of(other) != seat_of(one));
    let other = other.unwrap();
    for (number, another) in [(1, 2), (3, 4), (0, 5)] {
        plan.seat(one, number);
        plan.seat(other, another);
        assert_eq!((plan.number_of(one), plan.number_of(other)), (number, another));
    }
}

/// So many that some agree in 16 bits, wherever these are taken from.
#[test]
fn no_two_threads_are_taken_for_one() {
    for distance in [0x80_1000_usize, 0x1_1000, 4] {
        let told_apart: std::collections::BTreeSet<_> = (1..=100_000)
            .map(|number| seat_of(distance.wrapping_mul(number)))
            .collect();
        assert_eq!(told_apart.len(), 100_000, "{distance:#x}");
    }
}

/// Even if some that had theirs have ended.
#[test]
fn threads_that_live_find_their_seats_in_the_end() {
    let objects = heap(16 << 20, 2);
    drop(objects.commons.making.lock());
    let plan = objects.make_plan().unwrap();
    // Of one choice.
    let (seat, _) = seat_of(0x1000);
    let mut found = (0x1000..).filter(|&me| seat_of(me).0 / 4 == seat / 4);
    let mut tags = std::collections::BTreeSet::new();
    let threads: std::vec::Vec<usize> = found
        .by_ref()
        .filter(|&me| tags.insert(seat_of(me).1))
        .take(12)
        .collect();
    let (ended, alive) = threads.split_at(8);
    (1..).zip(ended).for_each(|(number, &me)| plan.seat(me, number));
    let lost = || (1..).zip(alive).filter(|&(number, &me)| plan.number_of(me) != number);
    for _ in 0..16 {
        lost().for_each(|(number, &me)| plan.seat(me, number));
    }
    assert_eq!(lost().count(), 0);
}

/// There are no more, and somebody has had each of them: may be none of these lives.
#[test]
fn a_thread_that_finds_none_for_itself_does_not_stay_with_all_others() {
    // The second has no room for so many: 1 MiB, or half of that where structures are half as large.
    for (bytes, most) in [(16 << 20, OTHERS_BY_SEAT), (size_of::<usize>() << 17, 9)] {
        let (objects, layout) = (Objects::for_test(bytes, 1, false), Layout::new::<[u8; 100]>());
        (1..=OTHERS_BY_SEAT).for_each(|number| _ = objects.common_made(number));
        let made = made(objects);
        assert!((1..=most).contains(&made), "{made} of {most}");
        if !crate::sync::fence_heavy() {
            return;
        }
        for common in objects.commons() {
            // As another thread.
            (0..100).for_each(|_| drop(common.lock.lock_often(64)));
            assert!(common.lock.is_anothers(thread()));
        }
        (0..1000).for_each(|_| _ = use_once(objects, layout));
        let own = objects.common(thread());
        assert!(!ptr::eq(own, objects.first()) && own.lock.enter(thread()).is_some());
        let left = objects.commons().filter(|common| common.lock.is_anothers(thread()));
        assert_eq!(left.count(), made);
    }
}

/// In the child of a fork.
#[test]
fn a_childs_structures_are_shut_and_counted() {
    let (objects, layout) = (heap(16 << 20, 2), Layout::new::<[u8; 200]>());
    at(1);
    use_once(objects, layout);
    let (other, class) = (objects.commons.other(1).unwrap(), SizeClass::of(200, 1).unwrap());
    let magazine = other.thread.magazine(class);
    other.thread.demand().raise(1 << 20, &objects.hoard);
    assert!(other.thread.demand().keep_spare(1 << 20, false, &objects.hoard));
    assert!(magazine.count(class) > 0 && !magazine.is_shut());
    let counted = objects.stats().magazine_bytes;
    assert_eq!(counted, magazine.count(class) as usize * class.bytes());
    assert!(objects.try_hold_driver());
    objects.hold();
    assert!(objects.commons().all(|common| common.lock.is_held()) && objects.commons.making.try_lock().is_none());
    objects.recover(None);
    objects.let_go();
    objects.let_go_driver();
    assert!(objects.commons().all(|common| !common.lock.is_held()) && objects.commons.making.try_lock().is_some());
    assert!(magazine.is_shut() && magazine.count(class) > 0);
    assert_eq!(objects.hoard.taken(), 1 << 10, "in KiB");
    objects.check().unwrap();
}

/// Several come to the same one that is not there.
#[test]
fn a_structure_is_made_once() {
    for _ in 0..50 {
        let (objects, ready) = (heap(16 << 20, 2), std::sync::Barrier::new(4));
        let make = || {
            ready.wait();
            ptr::from_ref(objects.common_made(1)).addr()
        };
        let made: std::vec::Vec<_> = std::thread::scope(|scope| {
            let makers: std::vec::Vec<_> = (0..4).map(|_| scope.spawn(make)).collect();
            makers.into_iter().map(|maker| maker.join().unwrap()).collect()
        });
        assert!(made.iter().all(|&address| address == made[0]));
        assert_eq!(objects.stats().bytes_in_use(), 0, "no slot is lost");
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

/// What idle threads keep does not count towards a soft limit for long, nor does it grow with their number.
#[test]
fn what_other_structures_keep_goes_first_over_a_soft_limit() {
    let (objects, large) = (heap(32 << 20, 4), Layout::new::<[u8; 256 << 10]>());
    let share = objects.share_of_shelf();
    for number in 1..4 {
        at(number);
        let blocks: std::vec::Vec<_> = (0..10).map(|_| objects.take_shared(large, false).unwrap()).collect();
        // SAFETY: freed with its layout.
        blocks
            .into_iter()
            .for_each(|block| unsafe { objects.free_shared(block, large) });
    }
    assert_eq!(objects.share_of_shelf().0, share.0 / 2, "three have some");
    let kept = || -> usize {
        objects
            .other_commons()
            .map(|common| common.thread.shelf().pages().0)
            .sum()
    };
    assert!(kept() >= 3 * 32, "in their hands at least");
    objects.heap.set_soft_limit(PageCount(1));
    at(0);
    (0..40).for_each(|_| _ = objects.take_shared(large, false).unwrap());
    assert_eq!((kept(), objects.share_of_shelf()), (0, share));
}

/// A thread that is alone with one was preempted at work there.
#[test]
fn a_thread_over_the_soft_limit_waits_for_others_with_nothing_held() {
    let (objects, large) = (heap(32 << 20, 4), Layout::new::<[u8; 256 << 10]>());
    for number in 0..4 {
        at(number);
        use_once(objects, Layout::new::<[u8; 100]>());
    }
    let other = &objects.commons.other(1).unwrap().lock;
    (0..100).for_each(|_| drop(other.lock_often(64)));
    let Some(alone) = other.enter(64) else { return };
    objects.heap.set_soft_limit(PageCount(1));
    std::thread::scope(|scope| {
        let over = scope.spawn(|| {
            at(0);
            (0..40).for_each(|_| _ = objects.take_shared(large, false).unwrap());
        });
        // Until it waits there; or it needs not.
        while !other.is_held() && !over.is_finished() {
            std::thread::yield_now();
        }
        drop(objects.first().lock.lock(72));
        drop(alone);
    });
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
