//! Sources that refuse, and sources that are not the system.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};

use pageheap::internals::has_fence;
use pageheap::source::{Contents, OverSystem, Purpose, Refused, Region, Reservation, System, Verbs};
use pageheap::{Config, Heap};

use super::*;

/// The system, except that every n-th request is refused, or every reservation above a size; 0 and MAX disable this.
#[derive(Debug)]
struct Moody {
    every: AtomicUsize,
    above: AtomicUsize,
    calls: AtomicUsize,
}

impl Moody {
    const fn new(every: usize, above: usize) -> OverSystem<Self> {
        OverSystem(Self {
            every: AtomicUsize::new(every),
            above: AtomicUsize::new(above),
            calls: AtomicUsize::new(0),
        })
    }

    fn refuses(&self) -> bool {
        let every = self.every.load(Ordering::Relaxed);
        every != 0 && self.calls.fetch_add(1, Ordering::Relaxed) % every == every - 1
    }
}

// SAFETY: the verbs are the system's; a refusal has no effect.
unsafe impl Verbs for Moody {
    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        if bytes > self.above.load(Ordering::Relaxed) || self.refuses() {
            return None;
        }
        System.reserve(purpose, bytes, align)
    }

    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        if self.refuses() {
            return Err(Refused);
        }
        // SAFETY: the caller's promise.
        unsafe { System.prepare(purpose, start, bytes) }
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        if self.refuses() {
            return Err(Refused);
        }
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }
}

const fn heap_over(source: &'static OverSystem<Moody>) -> GlobalHeap<&'static OverSystem<Moody>> {
    // SAFETY: the system's pages are memory.
    unsafe { GlobalHeap::with_source(source, Config::new(addresses(1 << 40))) }
}

#[test]
fn a_heap_opens_when_the_source_comes_round() {
    static SOURCE: OverSystem<Moody> = Moody::new(1, usize::MAX);
    static HEAP: GlobalHeap<&OverSystem<Moody>> = heap_over(&SOURCE);
    for _ in 0..3 {
        assert!(Block::new(&HEAP, layout(8, 8), 1).is_none() && HEAP.source().is_none());
    }
    SOURCE.every.store(0, Ordering::Relaxed);
    Block::new(&HEAP, layout(8, 8), 1).unwrap().free(&HEAP);
    assert!(HEAP.source().is_some_and(|source| std::ptr::eq(*source, &SOURCE)));
    HEAP.check().unwrap();
}

#[test]
fn large_reservations_may_be_refused() {
    for above in [64 << 20, 2 << 20, 256 << 10] {
        let source: &'static OverSystem<Moody> = Box::leak(Box::new(Moody::new(0, above)));
        let heap: &'static GlobalHeap<&'static OverSystem<Moody>> = Box::leak(Box::new(heap_over(source)));
        let mut blocks = Vec::new();
        while let Some(block) = Block::new(heap, layout(10_000, 8), 1) {
            blocks.push(block);
        }
        assert!(blocks.len() * 20_000 > above, "{above}: {} blocks", blocks.len());
        blocks.into_iter().for_each(|block| block.free(heap));
        heap.check().unwrap();
    }
}

#[test]
fn every_request_may_be_refused_at_times() {
    for every in 2..9 {
        let source: &'static OverSystem<Moody> = Box::leak(Box::new(Moody::new(0, usize::MAX)));
        let heap: &'static GlobalHeap<&'static OverSystem<Moody>> = Box::leak(Box::new(heap_over(source)));
        Block::new(heap, layout(8, 8), 0).unwrap().free(heap);
        source.every.store(every, Ordering::Relaxed);
        let (mut random, mut blocks, mut refused) = (Random(every as u64), Vec::new(), 0);
        for number in 0..rounds(20_000) {
            match Block::new(heap, layout(random.size(20), 8), number as u8) {
                Some(block) => blocks.push(block),
                None => refused += 1,
            }
            if blocks.len() > 200 {
                blocks.swap_remove(random.below(200)).free(heap);
            }
            if number % 500 == 0 {
                heap.scavenge(pageheap::PageCount(100));
            }
        }
        assert!(refused < rounds(20_000) / 10, "{refused}");
        blocks.into_iter().for_each(|block| block.free(heap));
        heap.flush_thread();
        heap.check().unwrap();
    }
}

#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room, and blocks always move")]
fn bytes_that_are_there_serve_as_well() {
    const BYTES: usize = 2 << 20;
    static mut MEMORY: [MaybeUninit<u8>; BYTES] = [MaybeUninit::uninit(); BYTES];
    // SAFETY: the only use of MEMORY.
    static HEAP: GlobalHeap<Region> = GlobalHeap::in_region(Region::from_static(unsafe {
        std::slice::from_raw_parts_mut((&raw mut MEMORY).cast(), BYTES)
    }));
    for size in [16, 1000, 9000, 100_000] {
        let mut blocks = Vec::new();
        while let Some(block) = Block::new(&HEAP, layout(size, 8), size as u8) {
            blocks.push(block);
        }
        assert!(blocks.len() * size > BYTES * 7 / 10, "{size}: {}", blocks.len());
        blocks.into_iter().for_each(|block| block.free(&HEAP));
    }
    HEAP.check().unwrap();
}

#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room, and blocks always move")]
fn a_small_region_is_a_small_heap() {
    for bytes in [48 << 10, 128 << 10, 300_000, 1 << 20] {
        let memory = Box::leak(Box::new_uninit_slice(bytes));
        let heap: &'static GlobalHeap<Region> = Box::leak(Box::new(GlobalHeap::in_region(Region::from_static(memory))));
        let mut blocks = Vec::new();
        while let Some(block) = Block::new(heap, layout(1000, 8), 1) {
            blocks.push(block);
        }
        assert!(
            bytes <= 64 << 10 || blocks.len() * 1000 > bytes / 100 * 40,
            "{bytes}: {} blocks",
            blocks.len()
        );
        blocks.into_iter().for_each(|block| block.free(heap));
        heap.check().unwrap();
    }
}

/// A kernel's heap in three pieces: blocks of every kind lie in them, and nothing else is written to.
#[test]
fn a_heap_in_several_pieces_leaves_gaps_alone() {
    static HEAP: GlobalHeap<Region<2>> = GlobalHeap::empty();
    const FOREIGN: u8 = 0xA5;
    let memory = vec![FOREIGN; 4 << 20].leak().as_mut_ptr();
    let at = |offset: usize| memory.wrapping_add(offset);
    let gaps = [300_000..700_000, 1_000_000..3_000_001].map(|gap| at(gap.start)..at(gap.end));
    // SAFETY: bytes that live for ever, and that nothing else uses.
    let region = unsafe { Region::new(memory, 4 << 20) }.with_gaps(gaps.clone());
    HEAP.init(region).unwrap();
    for size in [16, 1000, 9000, 40_000, 200_000] {
        let mut blocks = Vec::new();
        while let Some(block) = Block::new(&HEAP, layout(size, 8), size as u8) {
            let (start, end) = (block.memory.addr(), block.memory.addr() + size);
            assert!(
                gaps.iter()
                    .all(|gap| end <= gap.start.addr() || gap.end.addr() <= start),
                "{size}"
            );
            blocks.push(block);
        }
        assert!(blocks.len() * size > 400_000, "{size}: {}", blocks.len());
        if let Some(block) = blocks.first_mut() {
            // In place, across a gap, or by a move: there is no room for any.
            assert!(!block.resize(&HEAP, 3_000_000));
        }
        HEAP.check().unwrap();
        blocks.into_iter().for_each(|block| block.free(&HEAP));
        HEAP.flush_thread();
    }
    HEAP.check().unwrap();
    for gap in gaps {
        let length = gap.end.addr() - gap.start.addr();
        // SAFETY: bytes of the vector, which nothing writes to.
        let bytes = unsafe { std::slice::from_raw_parts(gap.start, length) };
        assert!(all_are(bytes, FOREIGN));
        assert!(!HEAP.contains(&bytes[length / 2]));
    }
    let stats = HEAP.stats().pages;
    assert!(stats.gaps.0 > (2_400_001 >> 13) - 4, "{stats}");
}

/// In a process of its own: what looks at the gap, which cannot be read, dies of that, and not with a message.
#[test]
fn a_block_freed_in_a_gap_is_found_without_looking_there() {
    const CHILD: &str = "PAGEHEAP_TEST_GAP";
    const BYTES: usize = 8 << 20;
    if std::env::var_os(CHILD).is_none() {
        let mut command = child::command("sources::a_block_freed_in_a_gap_is_found_without_looking_there");
        let output = child::output(command.env(CHILD, "1"));
        let (said, errors) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        let address = said
            .lines()
            .find_map(|line| line.split_once("frees "))
            .expect("an address")
            .1;
        assert!(
            !output.status.success() && errors.contains("pageheap: ") && errors.contains(address),
            "{output:?}"
        );
        return;
    }
    let all = System.reserve(Purpose::Pages, BYTES, 1 << 21).expect("addresses");
    let at = |offset: usize| all.base.as_ptr().wrapping_add(offset);
    let gap = BYTES / 4..BYTES / 2;
    for piece in [0..gap.start, gap.end..BYTES] {
        let start = NonNull::new(at(piece.start)).unwrap();
        // SAFETY: reserved above.
        unsafe {
            System.prepare(Purpose::Pages, start, piece.len()).unwrap();
            System.commit(start, piece.len()).unwrap();
        }
    }
    // SAFETY: reserved for this heap, and memory but for the gap.
    let region = unsafe { Region::new(all.base.as_ptr(), BYTES) };
    let region = region.with_gaps([at(gap.start)..at(gap.end)]);
    let heap = Heap::new(region, Config::new(usize::MAX)).unwrap();
    // Until it has grown across the gap.
    while heap.allocate(layout(1000, 8)).is_some() {}
    let block = NonNull::new(at(gap.start + (1 << 20))).unwrap();
    println!("frees {:#x}", block.addr());
    // SAFETY: it is not: that is to be found.
    unsafe { heap.free(block, layout(1000, 8)) };
}

/// Small enough for Miri: every path except growth, from two threads at once.
#[test]
fn a_region_serves_two_threads() {
    let memory = Box::leak(Box::new_uninit_slice(384 << 10));
    let heap: &'static GlobalHeap<Region> = Box::leak(Box::new(GlobalHeap::in_region(Region::from_static(memory))));
    on_threads(2, |thread| {
        let mut blocks: Vec<Block> = Vec::new();
        for number in 0..40 {
            let layout = layout(1 + (number * 37 + thread) % 200, 1 << (number % 7));
            blocks.push(Block::new(heap, layout, number as u8).unwrap());
            if number % 3 == 0 {
                blocks.swap_remove(number % blocks.len()).free(heap);
            } else if number % 11 == 0 {
                let index = number % blocks.len();
                assert!(blocks[index].resize(heap, layout.size() * 2));
            }
        }
        blocks.into_iter().for_each(|block| block.free(heap));
    });
    heap.flush_thread();
    heap.check().unwrap();
}

/// A region of new bytes, and their addresses.
fn region(bytes: usize) -> (Region, Range<usize>) {
    let memory = Box::leak(Box::new_uninit_slice(bytes));
    let start = memory.as_ptr().addr();
    (Region::from_static(memory), start..start + bytes)
}

#[test]
fn an_empty_heap_gets_its_memory_once() {
    static HEAP: GlobalHeap<Region> = GlobalHeap::empty();
    for _ in 0..2 {
        assert!(Block::new(&HEAP, layout(8, 8), 1).is_none());
    }
    assert!(!HEAP.set_limit(1 << 20) && HEAP.current_limit().is_none());
    let ((first, addresses), (second, others)) = (region(384 << 10), region(384 << 10));
    HEAP.init(first).unwrap();
    let second = HEAP
        .init(second)
        .expect_err("it has a region, though it is not open yet");
    let block = Block::new(&HEAP, layout(100, 8), 1).unwrap();
    assert!(addresses.contains(&block.memory.addr()));
    let second = HEAP.init(second).expect_err("it is open");
    block.free(&HEAP);
    HEAP.check().unwrap();
    // What was refused is as it was.
    let heap: &'static GlobalHeap<Region> = Box::leak(Box::new(GlobalHeap::in_region(second)));
    let second = region(384 << 10).0;
    heap.init(second).expect_err("it came with a region");
    let block = Block::new(heap, layout(100, 8), 1).unwrap();
    assert!(others.contains(&block.memory.addr()));
    block.free(heap);
}

#[test]
fn a_region_that_is_too_small_is_kept_all_the_same() {
    static HEAP: GlobalHeap<Region> = GlobalHeap::empty();
    HEAP.init(region(8 << 10).0).unwrap();
    for _ in 0..2 {
        assert!(Block::new(&HEAP, layout(8, 8), 1).is_none());
        HEAP.init(region(384 << 10).0).expect_err("it has a region");
    }
}

/// Two threads give a heap its memory while two others allocate: one region is taken, and all blocks lie in that.
#[test]
fn threads_race_to_give_an_empty_heap_its_memory() {
    for _ in 0..if cfg!(miri) { 3 } else { 50 } {
        assert!(one_of_three(is_given_one_region), "memory after `init`");
    }
}

/// Whether all get a block then.
fn is_given_one_region() -> bool {
    // Where threads do not reach what others keep, each needs some for itself.
    let kibibytes = if has_fence() { 128 } else { 384 };
    let heap: &'static GlobalHeap<Region> = Box::leak(Box::new(GlobalHeap::empty()));
    let (taken, blocks) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let (start, answered) = (Barrier::new(4), AtomicUsize::new(0));
    on_threads(4, |thread| {
        start.wait();
        if thread % 2 == 0 {
            let (region, addresses) = region(kibibytes << 10);
            if heap.init(region).is_ok() {
                taken.lock().unwrap().push(addresses);
            }
            // Release: with the load below. Taken or refused, the heap has memory now.
            answered.fetch_add(1, Ordering::Release);
        } else {
            // Acquire: with the addition above.
            while answered.load(Ordering::Acquire) == 0 {
                if let Some(block) = Block::new(heap, layout(1000, 8), 1) {
                    block.free(heap);
                }
                std::thread::yield_now();
            }
        }
        let block = in_time(|| Block::new(heap, layout(100, 8), 2));
        blocks.lock().unwrap().extend(block);
    });
    let taken = taken.into_inner().unwrap();
    assert_eq!(taken.len(), 1, "one region is taken");
    let blocks = blocks.into_inner().unwrap();
    let all = blocks.len() == 4;
    for block in blocks {
        assert!(taken[0].contains(&block.memory.addr()));
        block.free(heap);
    }
    heap.flush_thread();
    heap.check().unwrap();
    all
}

/// The system, which also allocates from another heap for its notes about pages, and has another thread empty the
/// magazines of sleeping threads.
#[derive(Debug)]
struct Noting;

/// 1: the next growth is interrupted in this way.
static ARMED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the verbs are the system's.
unsafe impl Verbs for Noting {
    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        static NOTES: GlobalHeap = new_heap();
        if purpose == Purpose::Pages && ARMED.swap(0, Ordering::Relaxed) == 1 {
            Block::new(&NOTES, layout(100, 8), 7).unwrap().free(&NOTES);
            std::thread::spawn(|| NESTED.release(0)).join().unwrap();
        }
        // SAFETY: the caller's promise.
        unsafe { System.prepare(purpose, start, bytes) }
    }
}

static NESTED: GlobalHeap<OverSystem<Noting>> = {
    // SAFETY: the system's pages are memory.
    unsafe { GlobalHeap::with_source(OverSystem(Noting), Config::new(by_width(1 << 30, 96 << 20))) }
};

/// A source that allocates from another heap uses this thread's structure in the middle of the first heap's work.
/// Afterwards the thread still counts as at work, and its magazines remain its own.
#[test]
#[cfg(any(target_os = "linux", windows))]
fn a_heap_used_inside_another_leaves_the_other_at_work() {
    let blocks: Vec<_> = (0..50)
        .map(|_| Block::new(&NESTED, layout(100, 8), 1).unwrap())
        .collect();
    blocks.into_iter().for_each(|block| block.free(&NESTED));
    let held = NESTED.stats().magazine_bytes;
    assert!(held >= 50 * 100);
    ARMED.store(1, Ordering::Relaxed);
    Block::new(&NESTED, layout(64 << 20, 8), 2).unwrap().free(&NESTED);
    assert_eq!(ARMED.load(Ordering::Relaxed), 0, "the heap did not grow");
    assert!(
        NESTED.stats().magazine_bytes >= held,
        "a thread's magazines were emptied while it worked"
    );
    NESTED.release(0);
    NESTED.check().unwrap();
}

/// The system, which notes in another heap what it does.
#[derive(Debug)]
struct Keeping;

static KEPT: GlobalHeap = new_heap().reserve(16 << 20);
/// 1: the next growth is noted.
static NOTED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the verbs are the system's.
unsafe impl Verbs for Keeping {
    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        if purpose == Purpose::Pages && NOTED.swap(0, Ordering::Relaxed) == 1 {
            Block::new(&KEPT, layout(100, 8), 7).unwrap().free(&KEPT);
        }
        // SAFETY: the caller's promise.
        unsafe { System.prepare(purpose, start, bytes) }
    }
}

static FULL: GlobalHeap<OverSystem<Keeping>> = {
    // SAFETY: the system's pages are memory.
    unsafe { GlobalHeap::with_source(OverSystem(Keeping), Config::new(16 << 20)) }
};

/// A thread begins in a full heap, which grows for the thread's structure. Meanwhile the source uses another heap, and
/// that makes one for the thread too. The thread keeps that one, and gives it back when it ends. (It kept the
/// other, and the second heap counted it for ever, or until a thread that began there found that it had ended.)
#[test]
fn a_thread_has_one_structure_though_the_source_uses_another_heap_as_it_begins() {
    let mut blocks: Vec<_> = Block::new(&FULL, layout(100, 8), 1).into_iter().collect();
    assert!(FULL.set_limit(2 << 20));
    // Of all lengths that a structure may have, too.
    let lengths = (1 << 10..=4 << 10).rev().step_by(64);
    for size in [40 << 10, 8 << 10].into_iter().chain(lengths) {
        blocks.extend(std::iter::from_fn(|| Block::new(&FULL, layout(size, 8), 1)));
    }
    assert!(FULL.set_limit(usize::MAX));
    let threads = || [FULL.stats().threads, KEPT.stats().threads];
    let before = threads();
    NOTED.store(1, Ordering::Relaxed);
    let meanwhile = std::thread::spawn(move || {
        let block = Block::new(&FULL, layout(100, 8), 2).unwrap();
        let meanwhile = threads();
        block.free(&FULL);
        meanwhile
    });
    let meanwhile = meanwhile.join().unwrap();
    assert_eq!(NOTED.load(Ordering::Relaxed), 0, "the heap did not grow");
    assert_eq!((before[1], threads()), (0, before), "what has ended has none");
    if before[0] > 0 {
        assert_eq!(meanwhile, [before[0], 1]);
    }
    blocks.into_iter().for_each(|block| block.free(&FULL));
    FULL.check().unwrap();
}
