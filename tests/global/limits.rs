//! Running out of memory, and recovering.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use pageheap::internals::has_fence;
use pageheap::source::{Region, System};
use pageheap::{Config, Heap, PageCount};

use super::*;

/// Allocates blocks of one size until there is no memory left.
fn exhaust<S: Source + Send + Sync>(heap: &GlobalHeap<S>, size: usize) -> Vec<Block> {
    let mut blocks = Vec::new();
    while let Some(block) = Block::new(heap, layout(size, 8), blocks.len() as u8) {
        blocks.push(block);
        assert!(blocks.len() < 10_000_000);
    }
    blocks
}

#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room, and blocks always move")]
fn a_limit_is_kept_used_and_survived() {
    const LIMIT: usize = if cfg!(debug_assertions) { 4 << 20 } else { 16 << 20 };
    // On a busy machine a background thread might have pages in hand for long.
    static HEAP: GlobalHeap = new_heap().limit(LIMIT).background(false);
    for size in [LIMIT / 16, 64, 8, 5000, 32 << 10, 40 << 10, LIMIT / 4, LIMIT / 16] {
        let blocks = exhaust(&HEAP, size);
        let used = blocks.len() * size;
        assert!(used <= LIMIT, "{size}: {used}");
        // Classes round up by an eighth, spans waste up to an eighth; blocks that are not slots round up to pages.
        assert!(used * 100 >= LIMIT * 70, "{size}: only {used} of {LIMIT} bytes");
        assert!(HEAP.stats().pages.refusals > 0);
        blocks.into_iter().for_each(|block| block.free(&HEAP));
        HEAP.check().unwrap();
    }
}

#[test]
fn a_block_too_many_leaves_the_others_alone() {
    static HEAP: GlobalHeap = new_heap().limit(4 << 20);
    let mut blocks = exhaust(&HEAP, 100 << 10);
    for block in &mut blocks {
        assert!(!block.resize(&HEAP, 4 << 20));
    }
    blocks.into_iter().for_each(|block| block.free(&HEAP));
    HEAP.check().unwrap();
}

#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room, and blocks always move")]
fn a_thread_that_begins_at_exhaustion_gets_null_and_recovers() {
    static HEAP: GlobalHeap = new_heap().limit(4 << 20);
    let mut blocks = exhaust(&HEAP, 8192);
    for size in [4096, 1024, 64, 8] {
        blocks.extend(exhaust(&HEAP, size));
    }
    thread::spawn(|| {
        assert!(Block::new(&HEAP, layout(8192, 8), 0).is_none());
        assert!(Block::new(&HEAP, layout(8, 8), 0).is_none());
        blocks.into_iter().for_each(|block| block.free(&HEAP));
        let again = exhaust(&HEAP, 8192);
        assert!(again.len() > 450, "{}", again.len());
        again.into_iter().for_each(|block| block.free(&HEAP));
    })
    .join()
    .unwrap();
}

/// Takes a word of pages into this thread's cache, where it stays.
fn fill_cache(heap: &GlobalHeap) {
    let blocks: Vec<_> = (0..2000)
        .map(|_| Block::new(heap, layout(1000, 8), 0).unwrap())
        .collect();
    blocks.into_iter().for_each(|block| block.free(heap));
}

/// Whether all pages under the limit can be allocated, except for some at the beginning.
fn has_all(heap: &GlobalHeap, bytes: usize) -> bool {
    let block = Block::new(heap, layout(bytes - (1 << 20), 8), 0);
    block.map(|block| block.free(heap)).is_some()
}

/// The pages in its cache are not those at the heap's end.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room, and blocks always move")]
fn what_a_thread_had_that_has_ended_is_there_for_others() {
    const LIMIT: usize = 32 << 20;
    static HEAP: GlobalHeap = new_heap().limit(LIMIT).background(false);
    fill_cache(&HEAP);
    thread::spawn(|| fill_cache(&HEAP)).join().unwrap();
    assert!(has_all(&HEAP, LIMIT), "{}", HEAP.stats());
}

/// Where the system offers an asymmetric fence. Not in one piece: the racks of the sleeping thread's magazines, some
/// KiB, stay where they are.
#[test]
#[cfg(target_os = "linux")]
#[cfg_attr(feature = "checks", ignore = "seals take room, and blocks always move")]
fn what_a_thread_has_that_sleeps_is_there_for_others() {
    if !has_fence() {
        return;
    }
    const LIMIT: usize = 32 << 20;
    static HEAP: GlobalHeap = new_heap().limit(LIMIT).background(false);
    let (to, from) = std::sync::mpsc::sync_channel::<()>(0);
    fill_cache(&HEAP);
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            fill_cache(&HEAP);
            to.send(()).unwrap();
            to.send(()).unwrap();
        });
        from.recv().unwrap();
        let blocks = exhaust(&HEAP, 1 << 20);
        let stats = HEAP.stats();
        let count = blocks.len();
        blocks.into_iter().for_each(|block| block.free(&HEAP));
        from.recv().unwrap();
        sleeper.join().unwrap();
        assert!(count >= (LIMIT >> 20) - 2, "{count} MiB\n{stats}");
    });
}

/// A thread that has used every class to the full: others can empty its magazines, but not take their racks.
#[test]
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
#[cfg_attr(feature = "checks", ignore = "seals make other sizes of blocks")]
fn a_sleeping_thread_keeps_its_plot_and_no_more() {
    if !has_fence() {
        return;
    }
    static HEAP: GlobalHeap = new_heap().limit(256 << 20).background(false);
    let (to, from) = std::sync::mpsc::sync_channel::<()>(0);
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let mut size = 8;
            while size <= 32 << 10 {
                // More than two batches.
                let count = 1100.min((1 << 20) / size + 260);
                let blocks: Vec<_> = (0..count)
                    .map(|_| Block::new(&HEAP, layout(size, 8), 1).unwrap())
                    .collect();
                blocks.into_iter().for_each(|block| block.free(&HEAP));
                size += (size / 9).max(8);
            }
            to.send(()).unwrap();
            to.send(()).unwrap();
        });
        from.recv().unwrap();
        HEAP.release(usize::MAX);
        let stats = HEAP.stats();
        from.recv().unwrap();
        sleeper.join().unwrap();
        assert_eq!(stats.magazine_bytes, 0, "{stats}");
        assert!((8..=16).contains(&stats.rack_pages.0), "{stats}");
        // The others are those of structures.
        assert!(stats.spans <= 2, "{stats}");
        assert_eq!(stats.pages.in_use.0, stats.rack_pages.0 + stats.span_pages.0, "{stats}");
    });
    HEAP.release(usize::MAX);
    let stats = HEAP.stats();
    assert_eq!(stats.rack_pages.0, 0, "of a thread that has ended: {stats}");
    HEAP.check().unwrap();
}

/// A thread that is preempted while it uses its shelf cannot be asked for what lies there, which is most of a small
/// heap. Threads that ran out of memory meanwhile were refused with an eighth of the limit live. Here threads free what
/// others allocated.
#[test]
fn nobody_is_refused_for_what_lies_on_shelves() {
    if !has_fence() {
        // Then it stays there.
        return;
    }
    assert!(one_of_three(|| {
        let heap: &'static GlobalHeap = Box::leak(Box::new(new_heap().limit(32 << 20).background(false)));
        let refused = refused_beside_shelves(heap);
        println!("{refused} refused, {}", heap.stats());
        refused == 0
    }));
}

/// How many requests are refused, each after a while.
fn refused_beside_shelves(heap: &'static GlobalHeap) -> usize {
    const THREADS: usize = 6;
    const LIVE: usize = 4 << 20;
    let live = AtomicUsize::new(0);
    let refused = AtomicUsize::new(0);
    let pools: [_; THREADS] = std::array::from_fn(|_| std::sync::Mutex::new(Vec::<(usize, usize)>::new()));
    let work = |number: usize| {
        let mut random = Random(1 + number as u64);
        for _ in 0..rounds(1_000_000) {
            let pool = &pools[random.below(THREADS)];
            if random.below(2) == 0 {
                let size = 1 + random.below(1 << 20);
                if live.fetch_add(size, Ordering::SeqCst) + size <= LIVE {
                    // SAFETY: not a layout of zero bytes.
                    let ask = || NonNull::new(unsafe { heap.alloc(layout(size, 8)) });
                    if let Some(block) = in_time(ask) {
                        let block = block.as_ptr();
                        pool.lock().unwrap().push((block.expose_provenance(), size));
                        continue;
                    }
                    refused.fetch_add(1, Ordering::SeqCst);
                }
                live.fetch_sub(size, Ordering::SeqCst);
            } else if let Some((block, size)) = pool.lock().unwrap().pop() {
                // SAFETY: allocated with this layout; only this thread took it out of the pool.
                unsafe { heap.dealloc(std::ptr::with_exposed_provenance_mut(block), layout(size, 8)) };
                live.fetch_sub(size, Ordering::SeqCst);
            }
        }
    };
    on_threads(THREADS, work);
    refused.into_inner()
}

#[test]
#[cfg_attr(feature = "checks", ignore = "blocks always move")]
fn where_all_is_taken_blocks_can_be_made_shorter() {
    static HEAP: GlobalHeap = new_heap().limit(8 << 20);
    let sizes = [
        (20_000, 12_000),
        (20_000, 1_100),
        (2_000, 1_500),
        (100_000, 100),
        (2 << 20, 30),
        (1 << 20, 9_000),
    ];
    let blocks = sizes.map(|(from, _)| Block::new(&HEAP, layout(from, 8), 0xa5).unwrap());
    let others = [64 << 10, 12_000, 1_500, 1_100, 100, 30, 8].map(|size| exhaust(&HEAP, size));
    let refused = HEAP.stats().pages.refusals;
    for (mut block, (_, to)) in blocks.into_iter().zip(sizes) {
        assert!(block.resize(&HEAP, to), "to {to}: {}", HEAP.stats());
        block.free(&HEAP);
    }
    assert_eq!(HEAP.stats().pages.refusals, refused, "none of them");
    HEAP.check().unwrap();
    others.into_iter().flatten().for_each(|block| block.free(&HEAP));
    assert_eq!(HEAP.stats().roomy_bytes, 0);
    HEAP.check().unwrap();
}

#[test]
fn what_other_threads_keep_is_asked_back() {
    static HEAP: GlobalHeap = new_heap().limit(8 << 20);
    let (to, from) = std::sync::mpsc::sync_channel::<()>(0);
    thread::scope(|scope| {
        let other = scope.spawn(move || {
            exhaust(&HEAP, 4096).into_iter().for_each(|block| block.free(&HEAP));
            // Full magazines and an idle thread, which then resumes work, on slow paths too.
            from.recv().unwrap();
            from.recv().unwrap();
            let blocks: Vec<_> = (0..300)
                .filter_map(|seed| Block::new(&HEAP, layout(16, 8), seed as u8))
                .collect();
            blocks.into_iter().for_each(|block| block.free(&HEAP));
            from.recv().unwrap();
        });
        to.send(()).unwrap();
        drop(
            exhaust(&HEAP, 64 << 10)
                .into_iter()
                .map(|block| block.free(&HEAP))
                .collect::<Vec<_>>(),
        );
        to.send(()).unwrap();
        to.send(()).unwrap();
        other.join().unwrap();
    });
    HEAP.flush_thread();
    HEAP.check().unwrap();
}

/// The layers below refuse at first and are asked again once stores and magazines have been emptied: this does not
/// count as a refusal.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room, and blocks always move")]
fn what_is_found_in_the_end_is_no_refusal() {
    static HEAP: GlobalHeap = new_heap().limit(8 << 20);
    for size in [4096, 100, 30_000, 60_000] {
        let room = exhaust(&HEAP, size).into_iter().map(|block| block.free(&HEAP)).count();
        let refusals = HEAP.stats().pages.refusals;
        // The freed memory lies in stores, magazines and on shelves, and has to be collected.
        let large = Block::new(&HEAP, layout(6 << 20, 8), 1).expect("room, in the end");
        assert_eq!(HEAP.stats().pages.refusals, refusals, "{room} blocks of {size}");
        assert!(Block::new(&HEAP, layout(6 << 20, 8), 1).is_none());
        assert_eq!(HEAP.stats().pages.refusals, refusals + 1);
        large.free(&HEAP);
    }
    HEAP.check().unwrap();
}

#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room, and blocks always move")]
fn a_limit_can_be_changed_while_the_heap_is_in_use() {
    static HEAP: GlobalHeap = new_heap().limit(4 << 20).background(false);
    assert_eq!((HEAP.current_limit(), HEAP.current_soft_limit()), (None, None));
    let blocks = exhaust(&HEAP, 100 << 10);
    assert_eq!(HEAP.current_limit(), Some(4 << 20));
    assert!(HEAP.set_limit((8 << 20) + 8191));
    assert_eq!(HEAP.current_limit(), Some(8 << 20));
    let more = exhaust(&HEAP, 100 << 10);
    assert!(
        more.len() * 10 >= blocks.len() * 9,
        "{} and {}",
        blocks.len(),
        more.len()
    );
    // A limit below what the heap has already: that memory stays, and no more is added.
    assert!(HEAP.set_limit(1 << 20));
    let there = more.len() + blocks.len();
    blocks.into_iter().chain(more).for_each(|block| block.free(&HEAP));
    assert!(
        exhaust(&HEAP, 100 << 10)
            .into_iter()
            .map(|block| block.free(&HEAP))
            .count()
            >= there / 10 * 9
    );
    HEAP.check().unwrap();
}

/// Also before anything has been allocated.
#[test]
fn a_soft_limit_can_be_changed_while_the_heap_is_in_use() {
    static HEAP: GlobalHeap = new_heap().background(false);
    assert!(HEAP.set_soft_limit(8 << 20));
    assert_eq!(HEAP.current_soft_limit(), Some(8 << 20));
    let fill = |size: usize| {
        let blocks: Vec<_> = (0..(7 << 20) / size)
            .map(|_| Block::new(&HEAP, layout(size, 8), 0).unwrap())
            .collect();
        blocks.into_iter().for_each(|block| block.free(&HEAP));
    };
    // Free runs that are too short for the next blocks.
    [100_000, 3 << 20].into_iter().for_each(fill);
    assert!(HEAP.stats().pages.backed.0 * 8192 <= 8 << 20, "{}", HEAP.stats());
    assert!(HEAP.set_soft_limit(usize::MAX));
    assert!(HEAP.current_soft_limit() > Some(usize::MAX - 8192));
    HEAP.check().unwrap();
}

/// What lies in stores only is freed by who needs it, and goes back at once.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room, and blocks always move")]
fn what_stores_give_up_for_a_soft_limit_goes_back() {
    static HEAP: GlobalHeap = new_heap().background(false);
    let blocks: Vec<_> = (0..3000)
        .map(|seed| Block::new(&HEAP, layout(4096, 8), seed as u8).unwrap())
        .collect();
    thread::spawn(|| blocks.into_iter().for_each(|block| block.free(&HEAP)))
        .join()
        .unwrap();
    let before = HEAP.stats();
    assert!(before.stored_bytes > 8 << 20, "{before}");
    assert!(HEAP.set_soft_limit(before.pages.backed.0 * before.pages.page_bytes));
    Block::new(&HEAP, layout(4 << 20, 8), 1).unwrap().free(&HEAP);
    let after = HEAP.stats();
    assert!(after.pages.peak_backed > before.pages.backed, "{after}");
    assert!(after.pages.backed <= before.pages.backed, "{before}\n{after}");
    HEAP.check().unwrap();
}

/// A block that was never written may contain the mark of a slot freed there earlier. Freeing it then mistook it for
/// such a slot, and it was lost.
#[test]
#[cfg_attr(feature = "checks", ignore = "blocks always move")]
fn a_block_never_written_that_is_shortened_in_a_full_heap_can_be_freed() {
    static HEAP: GlobalHeap = new_heap().limit(4 << 20).background(false);
    for round in 0..3 {
        // Leaves marks at the beginning of nearly every page.
        exhaust(&HEAP, 64).into_iter().for_each(|block| block.free(&HEAP));
        let long = layout(3 << 20, 8);
        // SAFETY: no size is zero; each block is freed with its layout.
        let short = unsafe {
            let block = HEAP.alloc(long);
            assert!(!block.is_null(), "round {round}");
            let rest: Vec<_> = [8192, 100].iter().flat_map(|&size| exhaust(&HEAP, size)).collect();
            let short = HEAP.realloc(block, long, 100);
            assert!(
                short.addr() - block.addr() < 8192,
                "in its first page, for there is no memory"
            );
            rest.into_iter().for_each(|block| block.free(&HEAP));
            short
        };
        let before = HEAP.stats().slot_bytes;
        // SAFETY: as above.
        unsafe { HEAP.dealloc(short, layout(100, 8)) };
        let after = HEAP.stats().slot_bytes;
        assert!(
            after < before,
            "round {round}: {before} bytes of slots before, {after} after"
        );
        HEAP.check().unwrap();
    }
}

/// Whichever way pages are taken, a heap over its soft limit gives up what it keeps.
#[test]
#[cfg_attr(feature = "checks", ignore = "blocks always move")]
fn what_a_heap_keeps_goes_for_blocks_that_grow_in_place_or_are_aligned() {
    let mib = |count: usize| layout(count << 20, 8);
    let make = |keep: Layout, count: usize| {
        let heap = Heap::new(System, Config::new(addresses(1 << 30)).soft_limit(PageCount(1024))).unwrap();
        let kept: Vec<_> = (0..count).map(|_| heap.allocate(keep).unwrap()).collect();
        let block = heap.allocate(mib(2)).unwrap();
        // SAFETY: allocated here, freed once, with its layout.
        kept.into_iter().for_each(|one| unsafe { heap.free(one, keep) });
        (heap, block)
    };
    let (heap, block) = make(mib(1), 6);
    let shelved = |heap: &Heap<System>| heap.stats().shelf_pages.0;
    assert!(shelved(&heap) > 0);
    for count in 2..8 {
        // SAFETY: the block's layout.
        let grown = unsafe { heap.resize(block, mib(count), (count + 1) << 20) };
        assert_eq!(grown, Some(block), "in place");
    }
    assert_eq!(shelved(&heap), 0, "pages on the shelf of a heap that grew in place");
    let (heap, _) = make(layout(64, 8), 100_000);
    let stored = |heap: &Heap<System>| heap.stats().stored_bytes;
    let before = stored(&heap);
    let aligned = Layout::from_size_align(2 << 20, 1 << 14).unwrap();
    (0..2).for_each(|_| _ = heap.allocate(aligned).unwrap());
    assert!(stored(&heap) < before, "{before} bytes stored before");
}

/// Those on the thread's own shelf, too: they have left it for a block elsewhere, which is not to be had.
#[test]
#[cfg_attr(feature = "checks", ignore = "blocks always move")]
fn a_block_grows_at_the_limit_into_pages_that_its_thread_has_freed() {
    const BYTES: usize = 128 << 10;
    static HEAP: GlobalHeap = new_heap().limit(8 << 20).background(false);
    for align in [8, BYTES] {
        let mut blocks = Vec::new();
        while let Some(block) = Block::new(&HEAP, layout(BYTES, align), blocks.len() as u8) {
            blocks.push(block);
        }
        let address = |block: &Block| block.memory.addr();
        blocks.sort_by_key(address);
        let pair = blocks
            .windows(2)
            .position(|pair| address(&pair[0]) + BYTES == address(&pair[1]));
        let pair = pair.expect("two neighbours");
        blocks.remove(pair + 1).free(&HEAP);
        let before = address(&blocks[pair]);
        assert!(blocks[pair].resize(&HEAP, 2 * BYTES), "aligned to {align}");
        assert_eq!(address(&blocks[pair]), before);
        blocks.into_iter().for_each(|block| block.free(&HEAP));
        HEAP.check().unwrap();
    }
}

/// A heap of 16 MiB, half of it free, nowhere more than 5 pages in a row, and what tears it.
fn torn() -> (Heap<System>, Vec<NonNull<u8>>) {
    let heap = Heap::new(System, Config::new(addresses(1 << 30)).limit(PageCount(2048))).unwrap();
    let mut kept: Vec<_> = std::iter::from_fn(|| heap.allocate(layout(40_000, 8))).collect();
    for number in (0..kept.len()).rev().step_by(2) {
        // SAFETY: allocated here, freed once, with its layout.
        unsafe { heap.free(kept.swap_remove(number), layout(40_000, 8)) };
    }
    (heap, kept)
}

/// Regression: a span has up to 16 pages, so blocks of 8 KiB were refused where blocks of 40,000 bytes were not.
#[test]
fn a_torn_heap_serves_what_fits_into_its_holes() {
    let (heap, kept) = torn();
    for size in [2064, 5000, 8192, 10_000, 16_384, 20_500, 32_000] {
        let layout = layout(size, 8);
        let blocks: Vec<_> = std::iter::from_fn(|| heap.allocate(layout)).collect();
        let used = blocks.len() * size;
        println!("{size}: {} blocks, {} KiB", blocks.len(), used >> 10);
        assert!(used >= 2 << 20, "{size}: {used} bytes of 8 MiB that are free");
        for (number, block) in blocks.iter().enumerate() {
            // SAFETY: within the block, this test's.
            unsafe { block.write_bytes(number as u8, size) };
        }
        heap.check().unwrap();
        for (number, block) in blocks.into_iter().enumerate() {
            // SAFETY: within the block; freed once, with its layout.
            unsafe {
                let bytes = std::slice::from_raw_parts(block.as_ptr(), size);
                assert!(all_are(bytes, number as u8), "{size}: block {number}");
                heap.free(block, layout);
            }
        }
        heap.release(usize::MAX);
        assert_eq!(heap.stats().roomy_bytes, 0);
    }
    // SAFETY: allocated in `torn`, freed once, with their layout.
    kept.into_iter()
        .for_each(|block| unsafe { heap.free(block, layout(40_000, 8)) });
    heap.check().unwrap();
    assert!(heap.allocate(layout(12 << 20, 8)).is_some(), "{}", heap.stats());
}

/// A block in a run of its own, for want of a span, is resized like any other, and freed by any thread.
#[test]
#[cfg_attr(feature = "checks", ignore = "blocks always move")]
fn a_block_in_a_hole_grows_shrinks_and_is_freed_by_others() {
    let (heap, kept) = torn();
    let blocks: Vec<_> = std::iter::from_fn(|| heap.allocate(layout(8192, 8))).collect();
    for (number, &block) in blocks.iter().enumerate() {
        // SAFETY: within the block, this test's.
        unsafe { block.write_bytes(number as u8, 8192) };
    }
    let holds = |number: usize, block: NonNull<u8>, size: usize| {
        // SAFETY: this test's block, which has as many bytes.
        let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), size) };
        assert!(all_are(bytes, number as u8), "block {number}");
    };
    // Where there is no memory for another block, each has what it lies in.
    for (number, (&block, to)) in blocks.iter().zip([7000, 3000, 1100].into_iter().cycle()).enumerate() {
        for (from, to) in [(8192, to), (to, 8192)] {
            // SAFETY: this test's block, with its layout.
            let resized = unsafe { heap.resize(block, layout(from, 8), to) };
            assert_eq!(resized, Some(block), "{from} to {to}: {}", heap.stats());
        }
        holds(number, block, to);
    }
    heap.check().unwrap();
    // To each of these, and freed by another thread.
    let (sizes, mut shortened) = ([7000, 3000, 8192, 12_000, 1024, 100].into_iter().cycle(), 0);
    for (number, (mut block, to)) in blocks.into_iter().zip(sizes).enumerate() {
        let mut size = 8192;
        // SAFETY: this test's block, with its layout.
        let resized = unsafe { heap.resize(block, layout(size, 8), to) };
        // A slot cannot become one of up to 1 KiB; a page can.
        assert!(resized.is_some() || to > 8192 || to <= 1024, "{to}: {}", heap.stats());
        shortened += usize::from(resized.is_some() && to <= 1024);
        if let Some(resized) = resized {
            (block, size) = (resized, to);
        }
        holds(number, block, size.min(1100));
        heap.check().unwrap();
        let address = block.expose_provenance();
        // SAFETY: as above; freed once.
        let free = || unsafe { heap.free(NonNull::with_exposed_provenance(address), layout(size, 8)) };
        thread::scope(|scope| scope.spawn(free).join()).unwrap();
    }
    assert!(shortened > 100, "{shortened}");
    heap.release(usize::MAX);
    assert_eq!(heap.stats().roomy_bytes, 0);
    // SAFETY: allocated in `torn`, freed once, with their layout.
    kept.into_iter()
        .for_each(|block| unsafe { heap.free(block, layout(40_000, 8)) });
    heap.check().unwrap();
}

/// Regression: of two free pages none could be had for a block of 8 KiB.
#[test]
fn little_memory_serves_a_block_of_a_page() {
    let bytes = Box::leak(Box::new([std::mem::MaybeUninit::uninit(); 64 << 10]));
    let heap = Heap::new(Region::from_static(bytes), Config::new(usize::MAX)).unwrap();
    let layout = layout(if cfg!(feature = "checks") { 8000 } else { 8192 }, 8);
    for _ in 0..100 {
        let block = heap.allocate(layout).unwrap();
        // SAFETY: this test's block, freed once, with its layout.
        unsafe { heap.free(block, layout) };
    }
    heap.check().unwrap();
}
