//! Buffers that one thread makes and another drops: they lie in lots (`object/transfer.rs`) until one is made again.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::thread;

use pageheap::PageCount;
use pageheap::internals::has_fence;

use super::*;

const MIB: usize = 1 << 20;

fn block(heap: &GlobalHeap, size: usize) -> Block {
    Block::new(heap, layout(size, 8), size as u8).unwrap_or_else(|| panic!("{size} bytes refused: {}", heap.stats()))
}

/// Runs `body` beside a thread that drops what it is given, and does not end before.
fn with_dropper(heap: &'static GlobalHeap, body: impl FnOnce(&dyn Fn(Vec<Block>))) {
    let (sender, receiver) = mpsc::sync_channel::<Vec<Block>>(0);
    let dropped = Barrier::new(2);
    thread::scope(|scope| {
        let dropped = &dropped;
        let dropper = scope.spawn(move || {
            for blocks in receiver {
                blocks.into_iter().for_each(|block| block.free(heap));
                dropped.wait();
            }
        });
        body(&move |blocks| {
            sender.send(blocks).unwrap();
            dropped.wait();
        });
        dropper.join().unwrap();
    });
}

/// All come back but the one in the other thread's hand, whatever their number, and nothing else is used.
#[test]
#[cfg_attr(feature = "checks", ignore = "a freed block is kept back for a while")]
fn what_another_thread_drops_is_made_again_of_the_same_pages() {
    static HEAP: GlobalHeap = new_heap().background(false);
    with_dropper(&HEAP, |drop_all| {
        let make = || -> Vec<_> { (0..30).map(|_| block(&HEAP, 100_000)).collect() };
        let places = |blocks: &[Block]| {
            let mut places: Vec<_> = blocks.iter().map(|block| block.memory).collect();
            places.sort();
            places
        };
        drop_all(make());
        let first = make();
        let (found, grown) = (places(&first), HEAP.stats().pages.grown);
        drop_all(first);
        for _ in 0..10 {
            let again = make();
            let same = places(&again).iter().filter(|place| found.contains(place)).count();
            assert!(same >= 29, "{same} of 30");
            drop_all(again);
            assert_eq!(HEAP.stats().pages.grown, grown);
        }
        // One lies in the hand of the thread that drops.
        assert!(HEAP.stats().shelf_pages.0 >= 29 * 13, "{}", HEAP.stats());
        HEAP.check().unwrap();
    });
}

/// What lies in lots serves whatever is asked for, and goes back to the system.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room, and blocks always move")]
fn what_lies_in_lots_is_there_for_every_other_request() {
    if !has_fence() {
        // What the other thread keeps is out of reach.
        return;
    }
    static HEAP: GlobalHeap = new_heap().limit(16 * MIB).background(false);
    with_dropper(&HEAP, |drop_all| {
        block(&HEAP, 64).free(&HEAP);
        let requests: [&dyn Fn(); 4] = [
            &|| block(&HEAP, 12 * MIB).free(&HEAP),
            &|| {
                let blocks: Vec<_> = (0..12 * MIB / 1024).map(|_| block(&HEAP, 1000)).collect();
                blocks.into_iter().for_each(|block| block.free(&HEAP));
            },
            &|| {
                let mut small = block(&HEAP, MIB / 2);
                assert!(small.resize(&HEAP, 12 * MIB));
                small.free(&HEAP);
            },
            &|| {
                HEAP.release(usize::MAX);
                let stats = HEAP.stats();
                assert_eq!(stats.shelf_pages, PageCount::ZERO, "{stats}");
            },
        ];
        for request in requests {
            let made = std::iter::from_fn(|| Block::new(&HEAP, layout(MIB, 8), 1));
            let made: Vec<_> = made.collect();
            assert!(made.len() >= 13, "{}", HEAP.stats());
            drop_all(made);
            request();
            HEAP.check().unwrap();
        }
    });
}

/// Threads make buffers of some lengths and pass them on to be dropped, in a heap that has room for all that there may
/// be at once, but not for what all threads may keep: every buffer is whole, and nobody is refused.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room")]
fn buffers_of_many_threads_are_whole_and_none_is_refused() {
    assert!(one_of_three(|| {
        let heap = new_heap()
            .reserve(by_width(1 << 38, 128 << 20))
            .limit(48 * MIB)
            .background(false);
        are_served_buffers(Box::leak(Box::new(heap)))
    }));
}

fn are_served_buffers(heap: &'static GlobalHeap) -> bool {
    const PAIRS: usize = 3;
    let refused = AtomicBool::new(false);
    let make = |pair: usize, sender: SyncSender<Block>| {
        let new = |size| in_time(|| Block::new(heap, layout(size, 8), size as u8));
        let mut random = Random(pair as u64 + 1);
        let mut pages = 13;
        for _ in 0..rounds(20_000) {
            if random.below(50) == 0 {
                pages = [5, 13, 40, 128][random.below(4)];
            }
            sender.send(new(pages << 13)?).unwrap();
            if random.below(100) == 0 {
                new(4 * MIB)?.free(heap);
            }
        }
        Some(())
    };
    let pairs: [(SyncSender<Block>, _); PAIRS] = std::array::from_fn(|_| mpsc::sync_channel(3));
    let all_have_begun = Barrier::new(2 * PAIRS);
    thread::scope(|scope| {
        let threads = pairs.into_iter().enumerate().flat_map(|(pair, (sender, receiver))| {
            let (all_have_begun, make, refused) = (&all_have_begun, &make, &refused);
            // So that no thread's structure, which stays, lies between buffers.
            let begin = move || {
                block(heap, 64).free(heap);
                all_have_begun.wait();
            };
            let dropper = scope.spawn(move || {
                begin();
                receiver.into_iter().for_each(|block| block.free(heap));
            });
            let maker = scope.spawn(move || {
                begin();
                if make(pair, sender).is_none() {
                    refused.store(true, Ordering::Relaxed);
                }
            });
            [dropper, maker]
        });
        join_all(threads.collect());
    });
    heap.check().unwrap();
    if refused.into_inner() {
        return false;
    }
    block(heap, 44 * MIB).free(heap);
    true
}
