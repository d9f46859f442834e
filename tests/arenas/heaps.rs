//! Arenas on heaps of objects: a program's `GlobalHeap`, a `Heap`.

use std::alloc::{GlobalAlloc, Layout};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pageheap::arena::{Arena, ArenaConfig, ArenaError, Backing, FreeList, Pool, Reason, ShardedFreeList};
use pageheap::source::System;
use pageheap::{Config, GlobalHeap, Heap, PageCount, PageUse};

use super::child::{aborts, wrong};
use super::common::addresses;

const PAGE: usize = 8192;

/// As many bytes as all heaps here reserve.
const RESERVED: usize = addresses(1 << 30);

fn heap(pages: usize) -> Heap<System> {
    Heap::new(System, Config::new(RESERVED).limit(PageCount(pages))).expect("a heap")
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 8).expect("a layout")
}

/// Takes blocks, and looks at each. They are in use while they are taken, and whole.
fn take_and_give(backing: &impl Backing, bytes_in_use: &dyn Fn() -> usize, contains: &dyn Fn(*const u8) -> bool) {
    assert_eq!(backing.page_bytes(), PAGE);
    assert!(backing.take(0, 1).is_none());
    let before = bytes_in_use();
    let asked = [
        (1, 1),
        (PAGE, PAGE),
        (20_000, 64),
        (17 * PAGE, 1),
        (17 * PAGE + 1, 2 << 20),
        (3 << 20, 8),
        (PAGE, 32 << 20),
    ];
    let taken = asked.map(|(bytes, align)| {
        let block = backing.take(bytes, align).expect("room");
        let memory = block.memory;
        assert_eq!(memory.len(), bytes.next_multiple_of(PAGE));
        assert!(memory.addr().get().is_multiple_of(align.max(PAGE)));
        assert!(contains(memory.cast().as_ptr()));
        // SAFETY: ours, and as long; it is read only if it is said to be zero.
        unsafe {
            assert!(!block.zeroed || memory.as_ref().iter().all(|&byte| byte == 0));
            memory.cast::<u8>().write_bytes(0xa5, memory.len());
        }
        memory
    });
    let bytes: usize = taken.iter().map(|memory| memory.len()).sum();
    assert_eq!(bytes_in_use() - before, bytes);
    for memory in taken {
        // SAFETY: ours, written above, and not used any more.
        unsafe {
            assert!(memory.as_ref().iter().all(|&byte| byte == 0xa5));
            backing.give(memory);
        }
    }
    assert_eq!(bytes_in_use(), before);
}

#[test]
fn blocks_are_as_long_and_as_aligned_as_asked_and_are_counted() {
    static HEAP: GlobalHeap = GlobalHeap::new().reserve(RESERVED).background(false);
    assert_eq!(HEAP.most_bytes(), usize::MAX, "not known before it is open");
    // The thread's structure is counted, too.
    // SAFETY: just taken.
    unsafe { HEAP.give(HEAP.take(1, 1).expect("room").memory) };
    let own = heap(usize::MAX);
    // The second time there are used pages.
    for _ in 0..2 {
        take_and_give(&HEAP, &|| HEAP.stats().bytes_in_use(), &|address| {
            HEAP.contains(address)
        });
        take_and_give(&own, &|| own.stats().bytes_in_use(), &|address| own.contains(address));
    }
    HEAP.check().unwrap();
    own.check().unwrap();
}

/// All four types, on one heap, while it has blocks of the program.
fn make_all<B: Backing + Copy>(heap: B, look: impl Fn(usize)) -> Result<(), ArenaError> {
    let arena = Arena::new_in(heap);
    arena.alloc_slice_with(10_000, |index| index)?;
    let pool = Pool::new_in(heap);
    pool.alloc([1_u8; 100])?;
    let list = FreeList::new_in(layout(64), heap)?;
    let slot = list.allocate()?;
    let shared = ShardedFreeList::new_in(layout(64), 2, heap)?;
    let other = shared.allocate()?;
    look(arena.stats().reserved + pool.stats().reserved + list.stats().reserved + shared.stats().reserved);
    // SAFETY: allocated above.
    unsafe {
        list.deallocate(slot.cast());
        shared.deallocate(other.cast());
    }
    Ok(())
}

#[test]
fn what_arenas_hold_is_in_use_and_all_of_it_returns() -> Result<(), ArenaError> {
    static HEAP: GlobalHeap = GlobalHeap::new().reserve(RESERVED).background(false);
    let heap = heap(8192);
    // SAFETY: never freed.
    assert!(!unsafe { HEAP.alloc(layout(100)) }.is_null());
    let kept = heap.allocate(layout(100)).expect("room");
    let before = [HEAP.stats().bytes_in_use(), heap.stats().bytes_in_use()];
    make_all(&HEAP, |reserved| {
        assert_eq!(HEAP.stats().bytes_in_use() - before[0], reserved);
        let runs = HEAP.map().filter(|entry| entry.is == PageUse::Run);
        assert!(runs.map(|entry| entry.run.pages().0).sum::<usize>() * PAGE >= reserved);
        HEAP.check().unwrap();
    })?;
    make_all(&heap, |reserved| {
        assert_eq!(heap.stats().bytes_in_use() - before[1], reserved);
        heap.check().unwrap();
    })?;
    assert_eq!([HEAP.stats().bytes_in_use(), heap.stats().bytes_in_use()], before);
    // SAFETY: allocated above, with this layout.
    unsafe { heap.free(kept, layout(100)) };
    HEAP.check().unwrap();
    heap.check().unwrap();
    Ok(())
}

#[test]
fn a_heap_may_be_lent_owned_or_shared() -> Result<(), ArenaError> {
    let shared = Arc::new(heap(1024));
    let arenas = [(); 2].map(|()| Arena::new_in(Arc::clone(&shared)));
    thread::scope(|scope| {
        let threads = arenas
            .each_ref()
            .map(|arena| scope.spawn(move || arena.alloc_slice_copy(&[1_u8; 100_000]).map(|_| ())));
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    assert!(arenas[0].backing().stats().bytes_in_use() >= 200_000);
    drop(arenas);
    assert_eq!(shared.stats().bytes_in_use(), 0);
    let owner = Arena::new_in(heap(1024));
    assert_eq!(*owner.alloc(7)?, 7);
    Ok(())
}

/// How often the hook of the next test was called.
static ASKED: AtomicUsize = AtomicUsize::new(0);

fn hook(_: Layout) -> bool {
    ASKED.fetch_add(1, Ordering::Relaxed);
    false
}

/// A heap that is not open yet does not know how much it can ever have; one slab later it does.
#[test]
fn a_heap_that_opens_for_an_arena_is_not_used_up_in_vain() {
    const LIMIT: usize = 16 << 20;
    static HEAP: GlobalHeap = GlobalHeap::new().reserve(RESERVED).background(false).limit(LIMIT);
    let config = ArenaConfig::new().slab(PAGE).prealloc(LIMIT + 1);
    let error = Pool::with_config_in(config, &HEAP).expect_err("a byte more than there is");
    assert_eq!((error.reason(), error.asked()), (Reason::NoPages, LIMIT + 1));
    assert!(HEAP.peak_backed() < 1 << 20, "{}", HEAP.peak_backed());
}

/// What the program keeps but does not use is for arenas, too. The hook is not: it might use the arena that asks.
#[test]
fn the_limit_holds_for_arenas_and_the_hook_is_not_called() {
    const LIMIT: usize = 4 << 20;
    static HEAP: GlobalHeap = GlobalHeap::new()
        .reserve(RESERVED)
        .background(false)
        .limit(LIMIT)
        .on_exhausted(hook);
    // SAFETY: allocated with the layouts they are freed with; not used.
    unsafe {
        let blocks = [100_000; 30].map(|bytes| HEAP.alloc(layout(bytes)));
        blocks
            .into_iter()
            .for_each(|block| HEAP.dealloc(block, layout(100_000)));
    }
    assert!(HEAP.stats().shelf_pages.0 > 256, "nothing to give up: {}", HEAP.stats());
    assert_eq!(HEAP.most_bytes(), LIMIT);
    let arena = Arena::new_in(&HEAP);
    let error = loop {
        if let Err(error) = arena.alloc([0_u8; 4096]) {
            break error;
        }
    };
    assert_eq!(error.reason(), Reason::NoPages);
    assert!(arena.stats().reserved > LIMIT - (1 << 20), "{}", HEAP.stats());
    assert!(HEAP.stats().pages.bytes_taken() <= LIMIT);
    assert_eq!(ASKED.load(Ordering::Relaxed), 0);
    // SAFETY: refused.
    assert!(unsafe { HEAP.alloc(layout(2 << 20)) }.is_null());
    assert_eq!(ASKED.load(Ordering::Relaxed), 1);
    // Nor where threads share a structure.
    let small = heap(16);
    assert!(small.take(17 * PAGE, 1).is_none());
    let all = small.take(small.limit().0 * PAGE, 1);
    assert!(all.is_some() && small.take(1, 1).is_none());
    assert!(small.stats().pages.refusals > 0);
}

#[test]
fn the_soft_limit_holds_for_arenas() {
    const SOFT: usize = 4 << 20;
    static HEAP: GlobalHeap = GlobalHeap::new().reserve(RESERVED).background(false).soft_limit(SOFT);
    let heap = heap(usize::MAX);
    heap.set_soft_limit(PageCount(SOFT / PAGE));
    // SAFETY: allocated with the layouts they are freed with; not used.
    unsafe {
        let blocks = [100_000; 30].map(|bytes| HEAP.alloc(layout(bytes)));
        blocks
            .into_iter()
            .for_each(|block| HEAP.dealloc(block, layout(100_000)));
        let blocks = [100_000; 30].map(|bytes| heap.allocate(layout(bytes)).expect("room"));
        blocks.into_iter().for_each(|block| heap.free(block, layout(100_000)));
    }
    let [one, other] = [HEAP.take(3 << 20, 1), heap.take(3 << 20, 1)];
    assert!(one.is_some() && other.is_some());
    assert!(HEAP.backed() <= SOFT, "{}", HEAP.stats());
    assert!(heap.backed().0 * PAGE <= SOFT, "{}", heap.stats());
}

#[test]
fn the_background_thread_gives_back_what_arenas_held() -> Result<(), ArenaError> {
    static HEAP: GlobalHeap = GlobalHeap::new().reserve(RESERVED);
    let arena = Arena::new_in(&HEAP);
    arena.alloc_slice_with(8 << 20, |_| 1_u8)?;
    assert!(HEAP.backed() >= 8 << 20);
    drop(arena);
    let begin = Instant::now();
    while HEAP.backed() > 1 << 20 && begin.elapsed() < Duration::from_secs(30) {
        thread::sleep(Duration::from_millis(10));
    }
    assert!(HEAP.backed() <= 1 << 20, "{}", HEAP.stats());
    Ok(())
}

#[test]
fn a_block_of_the_program_that_an_arena_gives_back_aborts() {
    let name = "heaps::a_block_of_the_program_that_an_arena_gives_back_aborts";
    if aborts(name, "an arena gave back what this heap had not given it") {
        let heap = heap(1024);
        let block = wrong(heap.allocate(layout(100_000)).expect("room"));
        // SAFETY: the call does not return.
        unsafe { heap.give(NonNull::slice_from_raw_parts(block, 13 * PAGE)) };
    }
}

#[test]
fn an_arenas_block_that_is_given_back_twice_aborts() {
    if aborts("heaps::an_arenas_block_that_is_given_back_twice_aborts", "freed twice") {
        let heap = heap(1024);
        let block = heap.take(40 * PAGE, 1).expect("room").memory;
        wrong(block.cast::<u8>());
        // SAFETY: the second call does not return.
        unsafe {
            heap.give(block);
            heap.give(block);
        }
    }
}

#[test]
fn an_arenas_block_that_is_freed_as_one_of_the_program_aborts() {
    let name = "heaps::an_arenas_block_that_is_freed_as_one_of_the_program_aborts";
    if aborts(name, "freed") {
        let heap = heap(1024);
        let block = heap.take(100_000, 1).expect("room").memory.cast::<u8>();
        wrong(block);
        // SAFETY: the call does not return.
        unsafe { heap.free(block, layout(100_000)) };
    }
}
