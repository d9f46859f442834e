//! A program with neither std nor libc: a page heap, and a global allocator, on arrays of its own.
//!
//! It checks itself and reports; any failure is a panic, exit code 101. `.ci/run` builds it and runs it.

#![no_std]
#![no_main]
#![no_builtins]

extern crate alloc;

mod memory;
mod system;

use alloc::alloc::Layout;
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt::Write;
use core::mem::MaybeUninit;
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;

use pageheap::arena::{Arena, ArenaConfig, FreeList, Pool, ShardedFreeList, SlotBox};
use pageheap::source::Region;
use pageheap::{Clock, Config, GlobalHeap, PageCount, PageHeap};

const BYTES: usize = 4 << 20;

/// Page-aligned bytes.
#[repr(align(8192))]
#[allow(dead_code)] // Reached by address only.
struct Bytes([MaybeUninit<u8>; BYTES]);

static mut PAGES: Bytes = Bytes([MaybeUninit::uninit(); BYTES]);

static mut OBJECTS: Bytes = Bytes([MaybeUninit::uninit(); BYTES]);

#[global_allocator]
static HEAP: GlobalHeap<Region<1>> = GlobalHeap::empty().processors(2, processor);

/// The processor that this program pretends to run on.
static PROCESSOR: AtomicUsize = AtomicUsize::new(0);

fn processor() -> usize {
    PROCESSOR.load(Ordering::Relaxed)
}

/// Bytes of OBJECTS that are not the heap's, as between two pieces of RAM; and what they hold.
const GAP: Range<usize> = BYTES / 8..BYTES / 4;
const FOREIGN: u8 = 0xA5;

fn main() {
    boot();
    page_heap();
    arenas();
    let growths = HEAP.stats().pages.growths;
    assert!(
        growths == 0,
        "heap and arenas allocate nothing but from what they stand on"
    );
    collections();
    each_processor_has_its_own();
    collections();
    PROCESSOR.store(0, Ordering::Relaxed);
    assert!(HEAP.stats().pages.growths > 0, "and that would have been seen");
    let blocks = HEAP.stats().bytes_in_use();
    rests(|clock| HEAP.tick(clock));
    let stats = HEAP.stats();
    assert!(
        stats.magazine_bytes == 0 && stats.stored_bytes == 0 && stats.bytes_in_use() == blocks,
        "silence empties magazines and stores, and nothing else"
    );
    assert!(HEAP.check().is_ok(), "the global heap's books are right");
    gap_is_left_alone();
    let _ = writeln!(system::Output, "freestanding: ok, but for a block freed twice:");
    misuse()
}

/// Frees a block twice, which is detected, and ends the program through its panic handler. The handler gets no memory,
/// and does not wait for any, although the stopped thread holds the heap's lock.
fn misuse() -> ! {
    let layout = Layout::new::<[u64; 8]>();
    // SAFETY: the size is not zero.
    let block = core::hint::black_box(unsafe { alloc::alloc::alloc(layout) });
    assert!(!block.is_null(), "there is room");
    system::IS_EXPECTED.store(true, Ordering::Relaxed);
    for _ in 0..2 {
        // SAFETY: the first time it is; the second free is the misuse to be detected.
        unsafe { alloc::alloc::dealloc(core::hint::black_box(block), layout) };
    }
    system::IS_EXPECTED.store(false, Ordering::Relaxed);
    panic!("a block was freed twice, and nobody minded");
}

/// Gives the global allocator its memory, which it has only once.
fn boot() {
    // SAFETY: a size that is not zero.
    let block = core::hint::black_box(unsafe { alloc::alloc::alloc(Layout::new::<u64>()) });
    assert!(block.is_null(), "no memory before there is a region");
    let gap = gap();
    for byte in 0..GAP.len() {
        // SAFETY: a byte of OBJECTS, of which nothing else knows yet.
        unsafe { gap.start.add(byte).write(FOREIGN) };
    }
    // SAFETY: called once; the bytes live as long as the program, and only those of the gap are mentioned elsewhere.
    let region = unsafe { Region::new((&raw mut OBJECTS).cast(), BYTES) };
    assert!(
        HEAP.init(region.with_gaps([gap.clone()])).is_ok(),
        "an empty heap takes a region"
    );
    assert!(
        HEAP.init(Region::from_static(&mut []).with_gaps([gap])).is_err(),
        "a heap with a region takes no other"
    );
}

/// The addresses of the gap.
fn gap() -> Range<*mut u8> {
    let start = (&raw mut OBJECTS).cast::<u8>();
    start.wrapping_add(GAP.start)..start.wrapping_add(GAP.end)
}

/// The heap has grown across the gap, and has not written to it.
fn gap_is_left_alone() {
    let pages = HEAP.stats().pages;
    assert!(pages.gaps.0 == GAP.len() >> 13, "the heap knows of the gap");
    assert!(pages.grown.0 > GAP.end >> 13, "the heap has pages behind the gap");
    for byte in 0..GAP.len() {
        // SAFETY: a byte of OBJECTS that the heap does not use.
        let value = unsafe { gap().start.add(byte).read() };
        assert!(value == FOREIGN, "nothing has written to the gap");
    }
}

/// Every page of the region can be allocated, written, and allocated again.
fn page_heap() {
    // SAFETY: called once, and the only mention of PAGES; the bytes live as long as the program.
    let region = unsafe { Region::new((&raw mut PAGES).cast(), BYTES) };
    let heap = PageHeap::new(region, Config::new(BYTES)).expect("four megabytes are enough for a heap");
    let mut runs = [None; BYTES >> 13];
    for round in 1..=2 {
        let mut taken = 0;
        while let Some(run) = heap.allocate(PageCount(1 + taken % 3)) {
            let pointer = heap.pointer(run).cast::<u8>();
            // SAFETY: the run is ours, and its pages are bytes of the region.
            unsafe { pointer.write_bytes(round, run.pages().0 << 13) };
            runs[taken] = Some(run);
            taken += 1;
        }
        assert!(taken > 200, "half of the region at least is pages");
        for run in &mut runs[..taken] {
            let run = run.take().expect("it was allocated");
            // SAFETY: the run is ours, written above.
            let first = unsafe { heap.pointer(run).cast::<u8>().read() };
            assert!(first == round, "pages of two runs overlap");
            // SAFETY: ours, and not used any more.
            unsafe { heap.free(run) };
        }
        assert!(heap.stats().in_use == PageCount::ZERO, "all pages came back");
    }
    // A region keeps its bytes, so nothing is given back; the scavenger finds that out.
    rests(|clock| heap.tick(clock));
    assert!(
        heap.stats().released == 0 && heap.check().is_ok(),
        "a tick breaks nothing"
    );
    assert!(heap.allocate(PageCount(200)).is_some(), "nor takes anything");
}

/// Ticks as a program's own loop would, on a clock of its own, until nothing is left to do.
fn rests(tick: impl Fn(&dyn Clock) -> Duration) {
    let now = Cell::new(Duration::from_secs(1));
    let rest = (0..1000).any(|_| {
        let pause = tick(&|| now.get());
        now.set(now.get().saturating_add(pause));
        pause == Duration::MAX
    });
    assert!(rest, "a silent heap comes to rest");
    assert!(now.get() > Duration::from_secs(2), "after a second of silence");
}

/// The four arenas, on the region used before.
fn arenas() {
    // SAFETY: `page_heap` has returned, and nothing else mentions PAGES; the bytes live as long as the program.
    let region = unsafe { Region::new((&raw mut PAGES).cast(), BYTES) };
    let heap = PageHeap::new(region, Config::new(BYTES)).expect("a heap");
    let config = ArenaConfig::new().limit(BYTES / 8);
    let full = "an arena of its own part of a quarter of the region";
    let mut arena = Arena::with_config_in(config, &heap).expect(full);
    let text = arena.alloc_fmt(format_args!("{} and {}", 1, 2)).expect(full);
    assert!(text == "1 and 2", "text can be put into an arena");
    let sum = arena
        .local()
        .scoped(|scope| scope.alloc_iter(0..100_u64).map(|numbers| numbers.iter().sum::<u64>()));
    assert!(sum == Ok(4950), "scopes need no system");
    arena.reset();
    let mut pool = Pool::with_config_in(config, &heap).expect(full);
    let handle = pool.insert([7_u64; 100]).expect(full);
    assert!(
        pool.get(handle).is_ok_and(|numbers| numbers[99] == 7),
        "a handle names what was inserted"
    );
    pool.reset();
    assert!(pool.get(handle).is_err(), "a handle is stale after a reset");
    let mut list = FreeList::with_config_in(Layout::new::<[u64; 8]>(), config, &heap).expect(full);
    drop(list.boxed([1_u64; 8]).expect(full));
    list.reset();
    let mut sharded = ShardedFreeList::with_config_in(Layout::new::<[u64; 8]>(), 2, config, &heap).expect(full);
    {
        let owner = sharded.owner().expect("two may own");
        let guard = owner.enter();
        let slot = SlotBox::into_raw(owner.boxed([2_u64; 8]).expect(full));
        let found = guard.protect(|| slot);
        // SAFETY: nothing else refers to the slot, and it is retired once.
        unsafe { owner.retire(slot.cast()) };
        // SAFETY: protected before it was retired, and the guard is still held.
        assert!(unsafe { found.read() } == [2; 8], "a guard holds what is retired");
        drop(guard);
    }
    sharded.reset();
    let many = core::iter::from_fn(|| sharded.allocate().ok()).count();
    assert!(many > 4000, "all of a list can be had");
    drop((arena, pool, list, sharded));
    assert!(heap.stats().in_use == PageCount::ZERO, "all pages came back");
}

/// What one processor frees, it gets again, and the other does not. Ends on the second one.
fn each_processor_has_its_own() {
    let layout = Layout::new::<[u64; 24]>();
    let at = |processor| PROCESSOR.store(processor, Ordering::Relaxed);
    // SAFETY: the size is not zero.
    let take = || unsafe { core::hint::black_box(alloc::alloc::alloc(layout)) };
    // SAFETY: blocks of this layout, which nothing uses any more.
    let give = |block| unsafe { alloc::alloc::dealloc(core::hint::black_box(block), layout) };
    let (first, second) = (take(), take());
    give(first);
    at(1);
    let other = take();
    assert!(
        !other.is_null() && other != first,
        "the first processor keeps what it has freed"
    );
    give(second);
    assert!(take() == second, "a processor may free what another has allocated");
    at(0);
    assert!(take() == first, "and it is still there");
    at(1);
    [first, second, other].into_iter().for_each(give);
}

/// What `alloc` offers, on the global heap.
fn collections() {
    let boxes: Vec<Box<u64>> = (0..1000).map(Box::new).collect();
    assert!(
        boxes.iter().map(|boxed| **boxed).sum::<u64>() == 499_500,
        "boxes keep what they hold"
    );
    let mut map = BTreeMap::new();
    for key in (0..2000_u32).rev() {
        let mut value = String::new();
        write!(value, "value {key}").expect("a string can be written to");
        map.insert(key, value);
    }
    assert!(
        map.get(&1234).is_some_and(|value| value == "value 1234"),
        "a map finds what it was given"
    );
    map.retain(|key, _| key % 3 == 0);
    assert!(map.len() == 667, "a map forgets what it was told to");
    let mut bytes = Vec::new();
    for round in 0..1_000_000_u32 {
        bytes.push(round as u8);
    }
    assert!(
        bytes
            .iter()
            .rev()
            .step_by(256)
            .all(|&byte| byte == bytes[bytes.len() - 1]),
        "a vector grows by moving"
    );
    let mut more: Vec<u8> = Vec::new();
    assert!(
        more.try_reserve_exact(2 * BYTES).is_err(),
        "what there is no room for is refused"
    );
}
