//! Blocks that cross threads; threads that start and end; two heaps in one process.

use std::sync::{Barrier, Mutex, mpsc};
use std::thread;

use super::*;

#[test]
fn blocks_are_freed_by_whoever_has_them() {
    static HEAP: GlobalHeap = new_heap();
    let (count, rings) = (rounds(100_000), 3);
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..rings).map(|_| mpsc::sync_channel::<Block>(1000)).unzip();
    let ends: Vec<_> = receivers
        .into_iter()
        .enumerate()
        .map(|(index, receiver)| Mutex::new(Some((receiver, senders[(index + 1) % rings].clone()))))
        .collect();
    drop(senders);
    on_threads(rings, |index| {
        let (receiver, next) = ends[index].lock().unwrap().take().unwrap();
        let mut random = Random(index as u64 + 1);
        for number in 0..count {
            let block = Block::new(&HEAP, layout(random.size(13), 8), number as u8).unwrap();
            // A full channel in the ring must not deadlock it.
            if let Err(mpsc::TrySendError::Full(block) | mpsc::TrySendError::Disconnected(block)) = next.try_send(block)
            {
                block.free(&HEAP);
            }
            while let Ok(block) = receiver.try_recv() {
                block.free(&HEAP);
            }
        }
        drop(next);
        receiver.into_iter().for_each(|block| block.free(&HEAP));
    });
    HEAP.check().unwrap();
    HEAP.release(usize::MAX);
    let stats = HEAP.stats();
    assert_eq!(stats.magazine_bytes, 0, "{stats}");
    assert_eq!(stats.pages.in_use, stats.span_pages, "{stats}");
}

#[test]
fn one_thread_allocates_and_another_frees() {
    static HEAP: GlobalHeap = new_heap();
    let (sender, receiver) = mpsc::sync_channel::<Vec<Block>>(4);
    thread::scope(|scope| {
        let freeing = scope.spawn(move || {
            receiver.into_iter().flatten().for_each(|block| block.free(&HEAP));
        });
        for round in 0..rounds(500) {
            let batch = (0..1000).map(|number| Block::new(&HEAP, layout(64, 8), (round + number) as u8).unwrap());
            sender.send(batch.collect()).unwrap();
        }
        drop(sender);
        freeing.join().unwrap();
    });
    let stats = HEAP.stats();
    assert!(stats.pages.grown.0 * stats.pages.page_bytes < 8 << 20, "{stats}");
    HEAP.check().unwrap();
}

/// A thread that allocates blocks of these sizes and frees them, and others, at random; what it has in the end is left
/// to those that come later.
fn live_a_while(heap: &GlobalHeap, left: &Mutex<Vec<Block>>, mut random: Random, sizes: &Range<usize>) {
    let mut own = Vec::new();
    for number in 0..random.below(500) {
        let index = random.below(own.len().max(1));
        match random.below(10) {
            0..5 => {
                let size = sizes.start + random.below(sizes.len());
                own.extend(Block::new(heap, layout(size, 8), number as u8));
            }
            5..8 if !own.is_empty() => own.swap_remove(index).free(heap),
            8 => left.lock().unwrap().extend(own.drain(index..)),
            _ => {
                let mut others = left.lock().unwrap();
                let kept = others.len() - random.below(others.len().min(100) + 1);
                let taken = others.split_off(kept);
                drop(others);
                taken.into_iter().for_each(|block| block.free(heap));
            }
        }
    }
    left.lock().unwrap().append(&mut own);
}

/// In the end nothing is in use but the threads' structures. In the small heap many a block is refused.
#[test]
fn threads_that_free_each_others_blocks_and_end_at_any_moment_lose_nothing() {
    static SMALL: GlobalHeap = new_heap().reserve(8 << 20).background(false);
    static LARGE: GlobalHeap = new_heap().limit(256 << 20).background(false);
    let sizes = [
        8..1 << 10,
        1 << 10..8 << 10,
        8 << 10..33 << 10,
        32 << 10..96 << 10,
        8..40 << 10,
    ];
    for heap in [&SMALL, &LARGE] {
        for (wave, sizes) in sizes.iter().cycle().take(rounds(100)).enumerate() {
            let left = Mutex::new(Vec::new());
            on_threads(6, |line| {
                for turn in 0..4 {
                    let seed = ((1 + wave * 24 + line * 4 + turn) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                    on_threads(1, |_| live_a_while(heap, &left, Random(seed), sizes));
                }
            });
            heap.check().unwrap();
            let pop = || left.lock().unwrap().pop();
            on_threads(1, |_| std::iter::from_fn(pop).for_each(|block| block.free(heap)));
            heap.check().unwrap();
        }
        heap.release(usize::MAX);
        let (stats, snapshot) = (heap.stats(), heap.snapshot());
        let kept = stats.magazine_bytes + stats.stored_bytes + stats.rack_bytes;
        assert_eq!((kept, stats.pages.in_use), (0, stats.span_pages), "{stats}");
        let live = snapshot
            .classes()
            .iter()
            .map(|class| class.live)
            .filter(|&live| live > 0);
        assert!(live.eq([stats.thread_structures]), "{stats}");
    }
}

/// Except for a few slots, kept for the next thread that gets the structure; they are released with everything else
/// that is kept.
#[test]
fn threads_leave_nothing_behind() {
    static HEAP: GlobalHeap = new_heap();
    for number in 0..rounds(3_000) {
        thread::spawn(move || Block::new(&HEAP, layout(100, 8), number as u8).unwrap().free(&HEAP))
            .join()
            .unwrap();
    }
    let stats = HEAP.stats();
    assert!(stats.thread_structures <= 2 && stats.threads == 0, "{stats}");
    assert!(stats.magazine_bytes <= 16 << 10, "{stats}");
    HEAP.release(usize::MAX);
    assert_eq!(HEAP.stats().magazine_bytes, 0, "{}", HEAP.stats());
    HEAP.check().unwrap();
}

/// By the paths of a `Heap`.
#[test]
fn a_second_heap_serves_every_kind_of_request() {
    static FIRST: GlobalHeap = new_heap();
    static SECOND: GlobalHeap = new_heap();
    on_threads(3, |_| {
        Block::new(&FIRST, layout(100, 8), 1).unwrap().free(&FIRST);
        for size in [40, 700, 5000, 100_000, 1 << 20, 3 << 20] {
            for _ in 0..50 {
                // SAFETY: not of zero bytes; blocks of these sizes, each freed once.
                unsafe {
                    let used = SECOND.alloc(layout(size, 8));
                    used.write_bytes(0xEE, size);
                    SECOND.dealloc(used, layout(size, 8));
                    let zeroed = SECOND.alloc_zeroed(layout(size, 8));
                    assert!(!zeroed.is_null());
                    assert!(all_are(std::slice::from_raw_parts(zeroed, size), 0));
                    zeroed.write_bytes(0xAA, size);
                    let moved = SECOND.realloc(zeroed, layout(size, 8), 2 * size);
                    assert!(all_are(std::slice::from_raw_parts(moved, size), 0xAA));
                    SECOND.dealloc(moved, layout(2 * size, 8));
                }
            }
        }
    });
    assert_eq!(SECOND.stats().thread_structures, 0);
    SECOND.check().unwrap();
}

#[test]
fn a_thread_has_a_structure_of_one_heap_and_shares_the_others() {
    static FIRST: GlobalHeap = new_heap();
    static SECOND: GlobalHeap = new_heap();
    on_threads(3, |_| {
        let mut random = Random(5);
        let mut blocks = Vec::new();
        for number in 0..rounds(20_000) {
            let heap = if random.below(2) == 0 { &FIRST } else { &SECOND };
            blocks.push((
                heap,
                Block::new(heap, layout(random.size(14), 16), number as u8).unwrap(),
            ));
            if blocks.len() > 100 {
                let (heap, block) = blocks.swap_remove(random.below(100));
                block.free(heap);
            }
        }
        blocks.into_iter().for_each(|(heap, block)| block.free(heap));
    });
    assert!(FIRST.stats().thread_structures + SECOND.stats().thread_structures <= 3);
    for heap in [&FIRST, &SECOND] {
        heap.flush_thread();
        heap.check().unwrap();
        let stats = heap.stats();
        assert_eq!(stats.pages.in_use.0, stats.span_pages.0 + stats.rack_pages.0, "{stats}");
    }
}

#[test]
fn the_first_use_may_be_raced() {
    for _ in 0..20 {
        let heap: &'static GlobalHeap = Box::leak(Box::new(GlobalHeap::new().reserve(by_width(1 << 30, 8 << 20))));
        let barrier = Barrier::new(24);
        on_threads(24, |number| {
            barrier.wait();
            let blocks: Vec<_> = (1..100)
                .step_by(7)
                .map(|size| Block::new(heap, layout(size * 40, 8), number as u8).unwrap())
                .collect();
            blocks.into_iter().for_each(|block| block.free(heap));
        });
        heap.check().unwrap();
    }
}

/// A thread that ends may still refer to a heap that has been moved or dropped.
#[test]
fn a_heap_may_be_moved_and_dropped() {
    thread::spawn(|| {
        let heap = GlobalHeap::new().reserve(by_width(1 << 30, 8 << 20));
        let block = Block::new(&heap, layout(100, 8), 1).unwrap();
        let moved = Box::new(heap);
        let other = Block::new(&moved, layout(100, 8), 2).unwrap();
        block.free(&moved);
        other.free(&moved);
        drop(moved);
        let heap = GlobalHeap::new().reserve(by_width(1 << 30, 8 << 20));
        Block::new(&heap, layout(100, 8), 3).unwrap().free(&heap);
    })
    .join()
    .unwrap();
}

/// The keeper returns slots to their spans at any time, but a check does not count it as a user of the heap.
#[test]
fn a_check_waits_for_who_scavenges() {
    static HEAP: GlobalHeap = new_heap().limit(16 << 20).background(false);
    let start = std::sync::Barrier::new(2);
    for round in 0..if cfg!(debug_assertions) { 30 } else { 200 } {
        for size in [8, 64, 700] {
            let blocks = (0..2_000).filter_map(|_| Block::new(&HEAP, layout(size, 8), round as u8));
            let blocks: Vec<_> = blocks.collect();
            blocks.into_iter().for_each(|block| block.free(&HEAP));
        }
        thread::scope(|scope| {
            let releasing = scope.spawn(|| {
                start.wait();
                HEAP.release(usize::MAX);
            });
            start.wait();
            common::is_in_order(|| HEAP.check());
            releasing.join().unwrap();
        });
    }
}

/// Its blank racks are found too.
#[test]
fn a_thread_that_has_ended_keeps_nothing_from_who_empties_the_heap() {
    static HEAP: GlobalHeap = new_heap().background(false);
    thread::spawn(|| {
        let blocks: Vec<_> = (0..400)
            .map(|_| Block::new(&HEAP, layout(8000, 8), 1).unwrap())
            .collect();
        blocks.into_iter().for_each(|block| block.free(&HEAP));
    })
    .join()
    .unwrap();
    HEAP.scavenge(pageheap::PageCount(0));
    let stats = HEAP.stats();
    assert_eq!((stats.rack_bytes, stats.magazine_bytes), (0, 0), "{stats}");
}

/// Tests that need a fence through all threads do nothing where there is none. There is one if the kernel says so.
#[test]
#[cfg(target_os = "linux")]
fn there_is_a_fence_where_the_kernel_has_one() {
    const PRIVATE_EXPEDITED: libc::c_long = 8;
    // SAFETY: only queries the supported commands.
    let commands = unsafe { libc::syscall(libc::SYS_membarrier, 0, 0, 0) };
    let has_one = commands > 0 && commands & PRIVATE_EXPEDITED != 0;
    assert_eq!(pageheap::internals::has_fence(), has_one);
}

/// Memory kept by sleeping threads is reclaimed with barriers, and the barriers are counted.
#[test]
#[cfg(target_os = "linux")]
fn barriers_are_counted() {
    if !pageheap::internals::has_fence() {
        return;
    }
    static HEAP: GlobalHeap = new_heap().background(false);
    Block::new(&HEAP, layout(64, 8), 1).unwrap().free(&HEAP);
    let before = HEAP.stats().pages.calls.barrier;
    HEAP.release(usize::MAX);
    let stats = HEAP.stats();
    assert!(stats.pages.calls.barrier > before, "{stats}");
    assert_eq!(stats.magazine_bytes, 0, "{stats}");
}

/// The register is locked for a limited number of threads at a time. All threads are emptied, however many there are,
/// with one barrier per part.
#[test]
#[cfg(target_os = "linux")]
fn many_sleeping_threads_keep_nothing() {
    if !pageheap::internals::has_fence() {
        return;
    }
    static HEAP: GlobalHeap = new_heap().background(false);
    const THREADS: usize = 150;
    let full = std::sync::Barrier::new(THREADS + 1);
    let done = std::sync::Barrier::new(THREADS + 1);
    let (before, after) = thread::scope(|scope| {
        let sleeper = || {
            let blocks: Vec<_> = (0..40)
                .map(|number| Block::new(&HEAP, layout(200, 8), number).unwrap())
                .collect();
            blocks.into_iter().for_each(|block| block.free(&HEAP));
            full.wait();
            done.wait();
        };
        let threads = (0..THREADS).map(|_| scope.spawn(sleeper)).collect();
        full.wait();
        let before = HEAP.stats();
        HEAP.release(usize::MAX);
        let after = HEAP.stats();
        done.wait();
        join_all(threads);
        (before, after)
    });
    assert!(before.magazine_bytes >= THREADS * 40 * 200, "{before}");
    assert_eq!(after.magazine_bytes, 0, "{after}");
    assert!(after.pages.calls.barrier >= before.pages.calls.barrier + 5, "{after}");
    HEAP.check().unwrap();
}

/// A thread that only frees keeps next to nothing: the pages are available to the thread that allocates.
#[test]
fn large_blocks_that_another_thread_frees_are_of_use_again() {
    static HEAP: GlobalHeap = new_heap();
    const BYTES: usize = 860_000;
    let (sender, receiver) = mpsc::sync_channel::<Block>(1);
    let consumer = thread::spawn(move || receiver.into_iter().for_each(|block| block.free(&HEAP)));
    for number in 0..100 {
        sender
            .send(Block::new(&HEAP, layout(BYTES, 8), number).unwrap())
            .unwrap();
    }
    drop(sender);
    consumer.join().unwrap();
    let stats = HEAP.stats();
    // One with each thread, one in the channel, one in the hand; and new blocks do not exactly overlay old ones.
    assert!(
        stats.pages.peak_backed.0 * stats.pages.page_bytes < 8 * BYTES,
        "{stats}"
    );
    HEAP.check().unwrap();
}

/// A thread that frees what another has allocated, and then allocates, gets a slot of its own: if it got that one, it
/// and the neighbour's owner would write to one cache line again and again. The second round is with structures that
/// ended threads have left.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals make the blocks longer")]
fn a_thread_that_frees_first_gets_slots_apart() {
    static HEAP: GlobalHeap = new_heap();
    const THREADS: usize = 8;
    for round in 0..2 {
        let block = |seed| Block::new(&HEAP, layout(8, 8), seed).unwrap();
        let given: Vec<_> = (0..THREADS).map(|_| Mutex::new(Some(block(1)))).collect();
        let (all_have, got) = (Barrier::new(THREADS), Mutex::new(Vec::new()));
        on_threads(THREADS, |index| {
            given[index].lock().unwrap().take().unwrap().free(&HEAP);
            let own = block(2);
            all_have.wait();
            got.lock().unwrap().push(own.memory.addr());
            own.free(&HEAP);
        });
        let mut got = got.into_inner().unwrap();
        got.sort_unstable();
        assert!(
            got.windows(2).all(|pair| pair[1] - pair[0] >= 64),
            "round {round}: {got:x?}"
        );
    }
    HEAP.check().unwrap();
}

/// After some rounds a thread has the batches it needs, and does not go to the class for them: with one spare it would
/// 160 times. A thread that only frees keeps two batches, and passes on the rest. (On a busy machine a thread may seem
/// to sleep: nobody is there to empty it.)
#[test]
#[cfg_attr(feature = "checks", ignore = "seals make the blocks longer")]
fn a_thread_keeps_the_batches_it_needs_and_no_others() {
    static HEAP: GlobalHeap = new_heap().background(false);
    const BATCH: usize = 510;
    on_threads(1, |_| {
        let blocks = || -> Vec<_> {
            (0..8 * BATCH)
                .map(|seed| Block::new(&HEAP, layout(64, 8), seed as u8))
                .collect()
        };
        let free = |blocks: Vec<Option<Block>>| blocks.into_iter().flatten().for_each(|block| block.free(&HEAP));
        (0..3).for_each(|_| free(blocks()));
        let before = HEAP.stats().batches;
        (0..10).for_each(|_| free(blocks()));
        let visits = HEAP.stats().batches - before;
        assert!(visits <= 20, "{visits} visits\n{}", HEAP.stats());
        // Its own stay with it; those that another thread frees go to the class.
        let (before, given) = (HEAP.stats(), Mutex::new(Some(blocks())));
        on_threads(1, |_| {
            free(given.lock().unwrap().take().unwrap());
            let stats = HEAP.stats();
            assert!(stats.magazine_bytes < before.magazine_bytes / 2, "{before}\n{stats}");
            assert!(
                stats.stored_bytes >= before.stored_bytes + 5 * BATCH * 64,
                "{before}\n{stats}"
            );
        });
    });
    HEAP.check().unwrap();
}
