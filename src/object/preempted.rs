//! Tests: a thread preempted with a class lock held blocks nobody; one at work on its magazines keeps the keeper awake;
//! one preempted while it seizes structures keeps others from ending, but no longer than that; a request that would be
//! refused waits for one with a full shelf; those that sleep in a busy program keep nothing for long; and those that
//! have ended cost nothing.
//!
//! The test itself holds the lock, so a thread that waited for it would wait forever.

extern crate std;

use core::alloc::Layout;
use core::cell::Cell;
use core::ptr::NonNull;
use core::time::Duration;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;
use std::vec::Vec;

use super::*;
use crate::source::Region;
use crate::sync::{Owned, fence_heavy};
use crate::units::PageCount;

fn heap() -> &'static Objects<Region> {
    Objects::for_test(32 << 20, 1, true)
}

fn take(objects: &Objects<Region>, layout: Layout) -> NonNull<u8> {
    let block = objects.allocate(&objects.shared(), layout).unwrap();
    // SAFETY: a block of this layout.
    unsafe { block.write_bytes(1, layout.size()) };
    block
}

fn give(objects: &Objects<Region>, block: NonNull<u8>, layout: Layout) {
    // SAFETY: the test's blocks are freed with their layout.
    unsafe { objects.free(&objects.shared(), block, layout) };
}

fn take_all_pages(objects: &Objects<Region>) {
    for pages in [512, 64, 8, 1] {
        while objects.heap.allocate(PageCount(pages)).is_some() {}
    }
}

#[test]
fn who_finds_the_lock_held_takes_a_fresh_span_and_fills_the_store() {
    for (size, count, hoarded) in [
        (8, 5000, 0),
        (16, 5000, 0),
        (64, 5000, 0),
        (1000, 3000, 0),
        (20_000, 500, 0),
        (32 << 10, 300, 0),
        // All that magazines may have room for: it waits, but not without end.
        (4096, 300, 32 << 10),
        (20_000, 500, 32 << 10),
    ] {
        let (objects, layout) = (heap(), Layout::from_size_align(size, 8).unwrap());
        let class = SizeClass::of(size, 8).unwrap();
        objects.hoard.recount(hoarded);
        let held = objects.central(class).lock.lock();
        let mut blocks: Vec<_> = (0..count).map(|_| take(objects, layout)).collect();
        for round in 0..4 * count {
            give(objects, blocks.swap_remove(round * 7 % blocks.len()), layout);
            blocks.push(take(objects, layout));
        }
        blocks.into_iter().for_each(|block| give(objects, block, layout));
        drop(held);
        objects.check().unwrap();
        let stats = objects.stats();
        assert_eq!(stats.slot_bytes, 0, "{stats}");
        objects.scavenge(PageCount::ZERO);
        objects.check().unwrap();
        assert_eq!(objects.stats().spans, 0);
    }
}

/// But not without end: then it waits, some milliseconds for each batch.
#[test]
fn who_finds_the_lock_held_does_not_fill_the_store_without_end() {
    const MIB: usize = 1 << 20;
    let (objects, layout) = (Objects::for_test(128 * MIB, 1, true), Layout::new::<[u8; 64]>());
    let mut blocks: Vec<_> = (0..80 * MIB / 64).map(|_| take(objects, layout)).collect();
    let class = SizeClass::of(64, 8).unwrap();
    let held = objects.central(class).lock.lock();
    // Twice what the store may have, and one more batch for each wait.
    while blocks.len() * 64 > 46 * MIB {
        give(objects, blocks.pop().unwrap(), layout);
    }
    let (begin, before) = (Instant::now(), blocks.len());
    while begin.elapsed() < Duration::from_millis(50) && !blocks.is_empty() {
        give(objects, blocks.pop().unwrap(), layout);
    }
    let batches = (before - blocks.len()) / class.batch() as usize;
    drop(held);
    assert!(batches < 40, "{batches} of {}", before / class.batch() as usize);
    blocks.into_iter().for_each(|block| give(objects, block, layout));
    assert!(objects.stats().stored_bytes < 33 * MIB);
    objects.scavenge(PageCount::ZERO);
    assert_eq!(objects.stats().spans, 0);
    objects.check().unwrap();
}

#[test]
fn who_finds_the_lock_of_the_racks_class_held_keeps_his_racks() {
    let (objects, layout) = (heap(), Layout::from_size_align(8, 8).unwrap());
    let racks = SizeClass::of(4096, 8).unwrap();
    let count = 510 * 100;
    let blocks: Vec<_> = (0..count).map(|_| take(objects, layout)).collect();
    let held = objects.central(racks).lock.lock();
    blocks.into_iter().for_each(|block| give(objects, block, layout));
    let blocks: Vec<_> = (0..count).map(|_| take(objects, layout)).collect();
    drop(held);
    blocks.into_iter().for_each(|block| give(objects, block, layout));
    objects.scavenge(PageCount::ZERO);
    objects.check().unwrap();
    let stats = objects.stats();
    assert_eq!((stats.spans, stats.rack_bytes), (0, 0), "{stats}");
}

/// A thread is at work whenever the keeper looks: once the keeper slept, frees into its magazines would go unseen.
#[test]
fn the_keeper_does_not_sleep_before_all_magazines_are_empty() {
    if !fence_heavy() {
        // He sees into no thread's magazines.
        return;
    }
    let (objects, layout) = (heap(), Layout::from_size_align(1000, 8).unwrap());
    let keeper = objects.keeper();
    assert!(keeper.change(ABSENT, AWAKE));
    // SAFETY: never destroyed.
    let thread = unsafe { objects.enlist().unwrap().as_ref() };
    let staying = thread.enter(objects).unwrap();
    let block = objects.allocate(&staying, layout).unwrap();
    let now = Cell::new(Duration::from_secs(1));
    let tick = |times: usize| {
        let mut ticks = core::iter::repeat_with(|| {
            now.set(now.get() + Duration::from_millis(300));
            objects.tick(&|| now.get())
        });
        ticks.by_ref().take(times).any(|pause| pause == Duration::MAX)
    };
    assert!(tick(20), "he would go to sleep");
    assert!(keeper.change(AWAKE, ASLEEP));
    assert!(!tick(20), "but does not while somebody is at work");
    // SAFETY: the test's block.
    unsafe { objects.free(&staying, block, layout) };
    drop(staying);
    assert!(tick(20) && thread.is_bare(), "{}", objects.stats());
    let stats = objects.stats();
    assert_eq!(
        (stats.spans, stats.magazine_bytes),
        (1, 0),
        "that of threads' structures: {stats}"
    );
}

/// It waits for so long that it sleeps (`sync/rest.rs`).
#[test]
fn a_thread_that_ends_waits_for_a_preempted_seizer() {
    let objects = heap();
    // SAFETY: never destroyed.
    let thread = unsafe { objects.enlist().unwrap().as_ref() };
    let (owner, key, begin) = (thread.owner(), thread.key(), Instant::now());
    const AWAY: Duration = Duration::from_millis(20);
    owner.set(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(AWAY);
            owner.set(key);
        });
        drop(thread.enter_at_last(objects));
        assert!(begin.elapsed() >= AWAY);
    });
}

/// Three quarters of the heap lie on the shelf of a thread that is halted at work, for longer than yields take. A
/// request waits for 28 ms: on a busy machine the thread may be away for longer, and then all is repeated.
#[test]
fn a_request_waits_for_who_is_halted_at_work_with_a_full_shelf() {
    for _ in 0..20 {
        let objects = Objects::<Region>::for_test(16 << 20, 64, false);
        if !objects.reaches_threads() {
            return;
        }
        let (mebibytes, away) = served_beside_a_full_shelf(objects);
        if mebibytes == 12 {
            return;
        }
        assert!(away > Duration::from_millis(20), "{mebibytes} MiB, {away:?}");
    }
    panic!("refused each time");
}

/// How many of 12 MiB are served, and for how long the other thread was at work meanwhile.
fn served_beside_a_full_shelf(objects: &'static Objects<Region>) -> (usize, Duration) {
    // SAFETY: structures are never destroyed.
    let enlist = || unsafe { objects.enlist().unwrap().as_ref() };
    let of_pages = |pages| Layout::from_size_align(pages * PAGE_BYTES, 8).unwrap();
    let at_work = Barrier::new(2);
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let own = enlist().enter(objects).unwrap();
            let lengths = (5..=128).filter_map(Length::exactly);
            let blocks: Vec<_> = lengths
                .map(|length| (objects.allocate(&own, of_pages(length.pages())).unwrap(), length))
                .collect();
            for (block, length) in blocks {
                assert!(objects.shelve(&own, block, Some(length)));
            }
            let shelved = own.shelf().pages();
            let begin = Instant::now();
            at_work.wait();
            assert!(shelved.0 > 1500, "{shelved:?}");
            thread::sleep(Duration::from_millis(10));
            drop(own);
            begin.elapsed()
        });
        at_work.wait();
        let own = enlist().enter(objects).unwrap();
        let served = (0..12).take_while(|_| objects.allocate(&own, of_pages(128)).is_some());
        (served.count(), other.join().unwrap())
    })
}

/// Nobody else is there: nothing is asked for again and again.
#[test]
fn a_refusal_takes_two_rounds_if_the_second_finds_nothing() {
    let objects = Objects::<Region>::for_test(16 << 20, 64, false);
    // SAFETY: structures are never destroyed.
    let own = unsafe { objects.enlist().unwrap().as_ref() };
    let own = own.enter(objects).unwrap();
    let large = Layout::new::<[u8; 1 << 20]>();
    while objects.allocate(&own, large).is_some() {}
    let begun = objects.register.begun();
    assert_eq!(objects.allocate(&own, large), None);
    let rounds = if objects.reaches_threads() { 2 } else { 0 };
    assert_eq!(objects.register.begun() - begun, rounds);
}

/// Two rounds that find nothing are not enough if each is too late for a batch that is then stored.
#[test]
fn who_is_refused_looks_again_at_what_was_stored_meanwhile() {
    let objects = Objects::<Region>::for_test(16 << 20, 64, false);
    if !objects.reaches_threads() {
        return;
    }
    let layout = Layout::new::<[u8; 64]>();
    // SAFETY: structures are never destroyed.
    let [own, other] = [(); 2].map(|()| unsafe { objects.enlist().unwrap().as_ref() });
    let own = own.enter(objects).unwrap();
    // Leaves batches in the store.
    let go_by = |kept: usize| {
        let other = other.enter(objects).unwrap();
        let blocks: Vec<_> = (0..2000).map(|_| objects.allocate(&other, layout).unwrap()).collect();
        // SAFETY: freed with its layout, by a thread that has entered.
        let free = |block| unsafe { objects.free(&other, block, layout) };
        let freed = blocks.into_iter().enumerate().filter(|(number, _)| number % 50 >= kept);
        freed.for_each(|(_, block)| free(block));
        objects.part(&other);
    };
    // Of each span a block stays, and of those that racks lie in: no pages are found.
    go_by(1);
    for bytes in [512, 1024, 2048, 4096] {
        assert!(
            objects
                .allocate(&own, Layout::from_size_align(bytes, 8).unwrap())
                .is_some()
        );
    }
    objects.flush(&own);
    let begun = objects.register.begun();
    let refused = objects.try_at_last(&own, |_| {
        go_by(0);
        None::<()>
    });
    let rounds = objects.register.begun() - begun;
    assert!(refused.is_none() && rounds == 8, "{rounds} rounds");
}

/// It was refused when claims through its own cache made it count itself as one whose pages are on their way.
#[test]
fn a_request_waits_for_pages_on_their_way_with_and_without_a_cache() {
    for (caches, bytes) in [(0, 1 << 20), (64, 1 << 20), (0, 14_336), (64, 14_336)] {
        let objects = Objects::<Region>::for_test(16 << 20, caches, false);
        let layout = Layout::from_size_align(bytes, 8).unwrap();
        // SAFETY: structures are never destroyed.
        let own = unsafe { objects.enlist().unwrap().as_ref() };
        let own = own.enter(objects).unwrap();
        assert_eq!(own.cache().is_some(), caches > 0);
        let carried = objects.heap.allocate(PageCount(1000)).unwrap();
        objects.flush(&own);
        take_all_pages(objects);
        let under_way = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                let _pass = objects.heap.pass();
                under_way.wait();
                thread::sleep(Duration::from_millis(30));
                // SAFETY: allocated above; given up.
                unsafe { objects.heap.free(carried) };
            });
            under_way.wait();
            assert!(
                objects.allocate(&own, layout).is_some(),
                "{caches} caches, {bytes} bytes"
            );
        });
    }
}

/// What is in hand then is neither on the thread nor free: a request was refused for it.
#[test]
fn who_empties_what_it_keeps_is_waited_for() {
    let layout = Layout::from_size_align(5 * PAGE_BYTES, 8).unwrap();
    let all: [fn(&Objects<Region>, &Thread); 3] = [
        |objects, own| objects.part(own),
        |objects, own| _ = objects.flush(own),
        |objects, own| objects.flush_cache(own),
    ];
    for (number, empty) in all.into_iter().enumerate() {
        let objects = Objects::<Region>::for_test(64 << 20, 64, false);
        // SAFETY: structures are never destroyed.
        let own = unsafe { objects.enlist().unwrap().as_ref() };
        let own = own.enter(objects).unwrap();
        // A run on its shelf, and the rest of a word in its cache.
        let block = objects.allocate(&own, layout).unwrap();
        assert!(objects.shelve(&own, block, Length::exactly(5)));
        assert!(
            objects
                .heap
                .cache_at(own.cache().unwrap())
                .allocate(PageCount(1))
                .is_some()
        );
        // Who was there during an attempt is a reason for another one.
        let attempts_beside = || {
            let attempts = Cell::new(0);
            let refused = objects.heap.at_last(&mut 0, || {
                if attempts.replace(attempts.get() + 1) == 0 {
                    empty(objects, &own);
                }
                None::<()>
            });
            assert_eq!(refused, None);
            attempts.get()
        };
        assert_eq!([(); 2].map(|()| attempts_beside()), [2, 1], "way {number}");
    }
}

/// Others wait for that lock, a fork among them.
#[test]
fn who_holds_the_lock_of_the_shared_structure_does_not_sleep_before_a_refusal() {
    let objects = Objects::<Region>::for_test(16 << 20, 0, false);
    if !objects.reaches_threads() {
        return;
    }
    let [small, large] = [64, 1 << 20].map(|bytes| Layout::from_size_align(bytes, 8).unwrap());
    let [at_work, over] = [(); 2].map(|()| Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: structures are never destroyed.
            let own = unsafe { objects.enlist().unwrap().as_ref() };
            let own = own.enter(objects).unwrap();
            let block = objects.allocate(&own, small).unwrap();
            // SAFETY: freed with its layout, by a thread that has entered.
            unsafe { objects.free(&own, block, small) };
            at_work.wait();
            over.wait();
        });
        at_work.wait();
        while objects.allocate(&objects.shared(), large).is_some() {}
        let begun = objects.register.begun();
        let got = objects.allocate(&objects.shared(), large);
        let rounds = objects.register.begun() - begun;
        over.wait();
        // Those after which it would sleep are not made.
        assert!(got.is_none() && rounds <= 8, "{rounds} rounds");
    });
}

/// No span fits into the run that a sleeping thread keeps, but one slot does. It was served after all rounds, with
/// their sleeps, as another thread was at work and kept something.
#[test]
fn a_slot_in_a_run_of_its_own_is_found_in_the_first_round() {
    let objects = Objects::<Region>::for_test(16 << 20, 0, false);
    if !objects.reaches_threads() {
        return;
    }
    // SAFETY: structures are never destroyed.
    let [busy, asleep, asks] = [(); 3].map(|()| unsafe { objects.enlist().unwrap().as_ref() });
    let fits = |class: &SizeClass| class.bytes() > 4 * PAGE_BYTES - 1024 && class.bytes() <= 4 * PAGE_BYTES;
    let class = SizeClass::all().find(|class| fits(class) && class.pages() > 5).unwrap();
    let [small, slot, run] =
        [64, class.bytes(), 5 * PAGE_BYTES].map(|bytes| Layout::from_size_align(bytes, 8).unwrap());
    let (busy, asks) = (busy.enter(objects).unwrap(), asks.enter(objects).unwrap());
    let block = objects.allocate(&busy, small).unwrap();
    // SAFETY: freed with its layout, by a thread that has entered.
    unsafe { objects.free(&busy, block, small) };
    // Another behind it, so that it stays alone.
    let [kept, _behind] = [(); 2].map(|()| objects.allocate(&asleep.enter(objects).unwrap(), run).unwrap());
    take_all_pages(objects);
    assert!(objects.shelve(&asleep.enter(objects).unwrap(), kept, Length::exactly(5)));
    let begun = objects.register.begun();
    assert!(objects.allocate(&asks, slot).is_some());
    assert_eq!(objects.register.begun() - begun, 1);
}

/// A thread stopped with pages in hand was waited for in each of 32 rounds: ten seconds.
#[test]
fn who_has_waited_for_pages_on_their_way_in_vain_does_not_wait_again() {
    let objects = Objects::<Region>::for_test(16 << 20, 0, false);
    let _pass = objects.heap.pass();
    // Most of the waiting is over: beside busy threads, all of it would take minutes.
    const MOST: u32 = 1 << 20;
    let mut waits = MOST - 1000;
    for _ in 0..2 {
        assert_eq!(objects.heap.at_last(&mut waits, || None::<()>), None);
        assert_eq!(waits, MOST);
    }
}

/// The program is never silent. They kept it for as long as it was not; and later for as long as they wrote a line to a
/// log now and then.
#[test]
fn threads_that_rest_while_another_works_keep_nothing() {
    let objects = Objects::for_test(32 << 20, 2, true);
    let [line, small, large] = [64, 3000, 100_000].map(|size| Layout::from_size_align(size, 8).unwrap());
    let own = || {
        // SAFETY: never destroyed.
        let thread = unsafe { objects.enlist().unwrap().as_ref() };
        let entered = thread.enter(objects).unwrap();
        let blocks: Vec<_> = (0..1000).map(|_| objects.allocate(&entered, small).unwrap()).collect();
        // SAFETY: freed with its layout.
        let free = |block| unsafe { objects.free(&entered, block, small) };
        blocks.into_iter().for_each(free);
        let run = objects.allocate(&entered, large).unwrap();
        assert!(objects.shelve(&entered, run, Length::of(large)));
        thread
    };
    let [sleepers @ .., worker] = [(); 3].map(|()| own());
    let slots = |thread: &Thread| {
        let class = SizeClass::of(small.size(), small.align()).unwrap();
        thread.magazine(class).count(class)
    };
    let keeps = |thread: &Thread| (slots(thread), thread.shelf().pages().0, thread.demand().part());
    let seconds = Cell::new(0.0);
    let work_for = |looks: u32| {
        for _ in 0..looks {
            let entered = worker.enter(objects).unwrap();
            assert!(objects.allocate(&entered, small).is_some());
            drop(entered);
            for thread in [sleepers[0], worker] {
                assert!(objects.allocate(&thread.enter(objects).unwrap(), line).is_some());
            }
            assert!(objects.heap.allocate(PageCount(1)).is_some());
            seconds.set(seconds.get() + 0.25);
            objects.tick(&|| Duration::from_secs_f64(seconds.get()));
        }
    };
    work_for(32);
    assert!(sleepers.iter().all(|thread| keeps(thread).0 > 0 && keeps(thread).1 > 0));
    work_for(12);
    if fence_heavy() {
        sleepers.iter().for_each(|thread| assert_eq!(keeps(thread), (0, 0, 0)));
        assert!(sleepers[0].prints().any() && !sleepers[1].prints().any());
    }
    assert!(slots(worker) > 0, "it has worked all the time");
    objects.check().unwrap();
}

/// A program that had many threads once has their structures for ever.
#[test]
fn structures_that_have_been_emptied_cost_a_refusal_nothing() {
    let (objects, small) = (heap(), Layout::new::<[u8; 64]>());
    let enlist = || objects.enlist().expect("room for a structure");
    let threads: Vec<_> = (0..1000).map(|_| enlist()).collect();
    let (last, others) = threads.split_last().unwrap();
    for &thread in others {
        // SAFETY: never destroyed; this thread uses it, and no longer when it has ended.
        unsafe {
            let entered = thread.as_ref().enter(objects).unwrap();
            let block = objects.allocate(&entered, small).unwrap();
            objects.free(&entered, block, small);
            drop(entered);
            Thread::end(thread);
        }
    }
    let fences = || {
        let fences = || objects.stats().pages.calls.barrier;
        let before = fences();
        // SAFETY: as above.
        let entered = unsafe { last.as_ref() }.enter(objects).unwrap();
        assert!(objects.allocate(&entered, Layout::new::<[u8; 31 << 20]>()).is_none());
        fences() - before
    };
    // The first one empties them.
    let (first, second) = (fences(), fences());
    assert!(second < 10, "{first}, then {second} fences");
    objects.check().unwrap();
}
