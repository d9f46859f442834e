//! Small programs of several threads, one or more for each layer: for Miri, which checks each access for data races,
//! wrong pointers and unset bytes. `.ci/run miri` runs them there; each seed is another order of events, and another
//! choice of what threads do. Like any test they run without it, too.
//!
//! What is checked beside Miri's own rules: no block or slot overlaps another. Whoever takes one writes to it, plainly,
//! whatever its last holder did. So all that one thread does before it frees a block must come before all that another
//! does after it got it, or Miri reports a race. Therefore threads are put in order by nothing but the allocator, in
//! the first half of what they do; in the second, blocks are also handed on ([`Mailboxes`]).
//!
//! Most memory is that of regions. What Miri has of the system is in `src/source/interpreted.rs`.

use std::alloc::{GlobalAlloc, Layout};
use std::hash::{BuildHasher, RandomState};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::thread;

use pageheap::arena::{Arena, ArenaConfig, FreeList, Owner, Pool, ShardedFreeList};
use pageheap::source::{Region, Source};
use pageheap::{Config, GlobalHeap, Heap, PageCount, PageHeap, PageRun};

use common::random::Random;

mod common;

const THREADS: usize = 3;

/// How much each thread does: little under Miri, which is slow, and checks each step.
const ROUNDS: usize = if cfg!(miri) { 40 } else { 4000 };

/// The stamp that this thread gives to what it holds.
fn stamp(thread: usize, round: usize) -> u64 {
    (thread as u64) << 32 | round as u64
}

/// The choices of this thread: always the same, but for Miri's seed.
fn random(thread: usize) -> Random {
    let seed = if cfg!(miri) {
        RandomState::new().hash_one(thread)
    } else {
        thread as u64
    };
    Random(seed << 1 | 1)
}

/// Runs the work on threads and joins them, and so waits for their destructors, too.
fn on_threads(threads: usize, work: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..threads).map(|number| scope.spawn(move || work(number))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

fn region(bytes: usize) -> Region {
    Region::from_static(Box::leak(Box::new_uninit_slice(bytes)))
}

/// A block of 16 bytes and more, stamped at both ends.
struct Held {
    memory: NonNull<u8>,
    layout: Layout,
    stamp: u64,
}

impl Held {
    fn new(memory: NonNull<u8>, layout: Layout, stamp: u64) -> Self {
        let held = Self { memory, layout, stamp };
        held.ends().for_each(|end| {
            // SAFETY: in the block, which is this thread's own.
            unsafe { end.write_unaligned(stamp) }
        });
        held
    }

    fn ends(&self) -> impl Iterator<Item = *mut u64> {
        let memory = self.memory.as_ptr();
        [0, self.layout.size() - 8]
            .into_iter()
            .map(move |offset| memory.wrapping_add(offset).cast())
    }

    /// Its memory, to be freed.
    fn check(self) -> (NonNull<u8>, Layout) {
        self.ends().for_each(|end| {
            // SAFETY: written by `new`.
            let found = unsafe { end.read_unaligned() };
            assert_eq!(
                found, self.stamp,
                "{:?}: somebody else has written to {:p}",
                self.layout, self.memory
            );
        });
        (self.memory, self.layout)
    }
}

/// For each thread a place where the one before it leaves blocks for it.
#[derive(Default)]
struct Mailboxes([AtomicPtr<Held>; THREADS]);

impl Mailboxes {
    /// Leaves a block for the next thread, and takes back what that has not collected.
    fn pass(&self, number: usize, held: Held) -> Option<Held> {
        self.swap((number + 1) % THREADS, Box::into_raw(Box::new(held)))
    }

    /// What was left for this thread.
    fn collect(&self, number: usize) -> Option<Held> {
        self.swap(number, ptr::null_mut())
    }

    fn swap(&self, number: usize, new: *mut Held) -> Option<Held> {
        // AcqRel: pairs with itself, in the other thread.
        let old = self.0[number].swap(new, Ordering::AcqRel);
        // SAFETY: null, or left here by `pass`, and taken once.
        (!old.is_null()).then(|| unsafe { *Box::from_raw(old) })
    }

    /// What nobody has collected.
    fn rest(&self) -> impl Iterator<Item = Held> {
        (0..THREADS).filter_map(|number| self.collect(number))
    }
}

/// One of those that a thread holds: there are some.
fn any<T>(held: &mut Vec<T>, random: &mut Random) -> T {
    held.swap_remove(random.below(held.len()))
}

// ---- pages

#[test]
fn pages() {
    let config = Config::new(1 << 20).caches(THREADS);
    let heap = PageHeap::new(region(1 << 20), config).unwrap();
    let bytes = heap.page_bytes();
    let hold = |run: PageRun, stamp| {
        let layout = Layout::from_size_align(run.pages().0 * bytes, bytes).unwrap();
        Held::new(heap.pointer(run).cast(), layout, stamp)
    };
    on_threads(THREADS, |number| {
        let (cache, mut random) = (heap.cache().unwrap(), random(number));
        let mut held: Vec<(PageRun, Held)> = Vec::new();
        for round in 0..ROUNDS {
            match random.below(10) {
                // More than there is, now and then: then others are looked at.
                0..5 => {
                    let pages = PageCount(1 + random.below(9));
                    let run = cache.allocate(pages).or_else(|| heap.allocate(pages));
                    held.extend(run.map(|run| (run, hold(run, stamp(number, round)))));
                }
                5..8 if !held.is_empty() => {
                    let (run, block) = any(&mut held, &mut random);
                    block.check();
                    // SAFETY: allocated by this heap, freed once.
                    unsafe {
                        match random.below(2) {
                            0 => cache.free(run),
                            _ => heap.free(run),
                        }
                    }
                }
                8 => drop(heap.scavenge(PageCount(4))),
                _ => cache.flush(),
            }
        }
        // SAFETY: as above.
        held.into_iter().for_each(|(run, block)| unsafe {
            block.check();
            cache.free(run);
        });
    });
    heap.check().unwrap();
    let stats = heap.stats();
    assert!(stats.in_use == PageCount(0) && stats.refills > 0, "{stats}");
}

// ---- objects

/// A small, mid or large block, of few sizes: so threads share classes, and seldom use one for the first time.
fn layout(random: &mut Random) -> Layout {
    const SIZES: [usize; 8] = [16, 16, 24, 64, 64, 64, 1500, 40_000];
    Layout::from_size_align(SIZES[random.below(SIZES.len())], 8).unwrap()
}

/// Takes, resizes, passes on and frees blocks, by whatever does so.
fn use_blocks(
    number: usize,
    mailboxes: &Mailboxes,
    take: impl Fn(Layout) -> Option<NonNull<u8>>,
    resize: impl Fn(NonNull<u8>, Layout, usize) -> Option<NonNull<u8>>,
    free: impl Fn(Held),
) {
    let (mut random, mut held, mut taken) = (random(number), Vec::new(), 0);
    for round in 0..ROUNDS {
        let stamp = stamp(number, round);
        match random.below(8) {
            0..4 => {
                let layout = layout(&mut random);
                let block = take(layout).map(|memory| Held::new(memory, layout, stamp));
                taken += usize::from(block.is_some());
                held.extend(block);
            }
            4 if round > ROUNDS / 2 => mailboxes.collect(number).into_iter().for_each(&free),
            _ if held.is_empty() => (),
            5 if round > ROUNDS / 2 => mailboxes
                .pass(number, any(&mut held, &mut random))
                .into_iter()
                .for_each(&free),
            6 => {
                let (memory, layout) = any(&mut held, &mut random).check();
                let to = self::layout(&mut random).size();
                let now = resize(memory, layout, to);
                let size = now.map_or(layout.size(), |_| to);
                let layout = Layout::from_size_align(size, layout.align()).unwrap();
                held.push(Held::new(now.unwrap_or(memory), layout, stamp));
            }
            _ => free(any(&mut held, &mut random)),
        }
    }
    assert!(taken > 0, "nothing is tested");
    held.into_iter().for_each(free);
}

/// Too slow for Miri.
fn check<S: Source + Send + Sync>(heap: &GlobalHeap<S>) {
    if !cfg!(miri) {
        heap.flush_thread();
        heap.check().unwrap();
    }
}

fn use_global<S: Source + Send + Sync>(heap: &GlobalHeap<S>, number: usize, mailboxes: &Mailboxes) {
    let take = |layout| {
        // SAFETY: no layout here has size zero.
        NonNull::new(unsafe { heap.alloc(layout) })
    };
    let resize = |memory: NonNull<u8>, layout, size| {
        // SAFETY: a block of this heap with that layout; the size is not zero, nor near the largest.
        NonNull::new(unsafe { heap.realloc(memory.as_ptr(), layout, size) })
    };
    use_blocks(number, mailboxes, take, resize, |held| free(heap, held));
}

fn free<S: Source + Send + Sync>(heap: &GlobalHeap<S>, held: Held) {
    let (memory, layout) = held.check();
    // SAFETY: allocated by this heap, with that layout, and given up.
    unsafe { heap.dealloc(memory.as_ptr(), layout) };
}

/// Threads that begin and end, each of which takes over what another has left.
#[test]
fn blocks_of_a_global_heap() {
    let heap: &GlobalHeap<Region> = Box::leak(Box::new(GlobalHeap::in_region(region(4 << 20))));
    let mailboxes = Mailboxes::default();
    for _ in 0..2 {
        on_threads(THREADS, |number| use_global(heap, number, &mailboxes));
    }
    mailboxes.rest().for_each(|held| free(heap, held));
    check(heap);
}

/// As above, in memory of the system's, by the paths of programs that say nothing of their sources.
#[test]
fn blocks_of_a_global_heap_in_memory_of_the_system() {
    let heap: &GlobalHeap = Box::leak(Box::new(GlobalHeap::new().reserve(16 << 20)));
    let mailboxes = Mailboxes::default();
    on_threads(THREADS, |number| use_global(heap, number, &mailboxes));
    mailboxes.rest().for_each(|held| free(heap, held));
    check(heap);
}

/// What a program has not written may be in any block: padding, or all of it.
#[test]
fn a_block_that_was_not_written_to_is_freed() {
    let heap: &GlobalHeap<Region> = Box::leak(Box::new(GlobalHeap::in_region(region(1 << 20))));
    for size in [8, 64, 2000, 50_000] {
        let layout = Layout::from_size_align(size, 8).unwrap();
        // SAFETY: the size is not zero; the value fits the block. It is not initialised, and so overwrites what the
        // heap has left there. Freed once.
        unsafe {
            let memory = heap.alloc(layout).cast::<MaybeUninit<u64>>();
            assert!(!memory.is_null());
            memory.write(MaybeUninit::uninit());
            heap.dealloc(memory.cast(), layout);
        }
    }
    check(heap);
}

/// Of so long blocks there are few in a batch: batches pass from thread to thread, through the stores and the spans.
#[test]
fn batches_of_a_global_heap() {
    let heap: &GlobalHeap<Region> = Box::leak(Box::new(GlobalHeap::in_region(region(8 << 20))));
    let layout = Layout::new::<[u64; 3800]>();
    on_threads(THREADS, |number| {
        for round in 0..if cfg!(miri) { 3 } else { 100 } {
            assert_eq!(take_and_free(heap, layout, 32, stamp(number, round)), 32);
        }
    });
    check(heap);
}

/// Takes so many blocks, or as many as there are, and then frees them. Returns how many there were.
fn take_and_free(heap: &GlobalHeap<Region>, layout: Layout, count: usize, stamp: u64) -> usize {
    let blocks = (0..count).map_while(|_| {
        // SAFETY: the size is not zero.
        let memory = NonNull::new(unsafe { heap.alloc(layout) })?;
        Some(Held::new(memory, layout, stamp))
    });
    let blocks: Vec<_> = blocks.collect();
    let count = blocks.len();
    blocks.into_iter().for_each(|held| free(heap, held));
    count
}

/// No room: what other threads keep is asked for, and taken from those that sleep.
#[test]
fn blocks_of_a_global_heap_that_is_full() {
    let heap: &GlobalHeap<Region> = Box::leak(Box::new(GlobalHeap::in_region(region(128 << 10))));
    let taken = AtomicUsize::new(0);
    let layout = Layout::new::<[u64; 100]>();
    on_threads(2, |number| {
        for round in 0..if cfg!(miri) { 1 } else { 10 } {
            let count = take_and_free(heap, layout, usize::MAX, stamp(number, round));
            taken.fetch_add(count, Ordering::Relaxed);
        }
    });
    assert!(taken.into_inner() > 20);
    check(heap);
}

/// All threads share its structures, and get some of their own as they meet.
#[test]
fn blocks_of_a_heap() {
    let heap = Heap::new(region(2 << 20), Config::new(2 << 20)).unwrap();
    let mailboxes = Mailboxes::default();
    let free = |held: Held| {
        let (memory, layout) = held.check();
        // SAFETY: allocated by this heap, with that layout, and given up.
        unsafe { heap.free(memory, layout) };
    };
    on_threads(THREADS, |number| {
        let take = |layout| heap.allocate(layout);
        // SAFETY: a block of this heap with that layout; the size is not zero, nor near the largest.
        let resize = |memory, layout, size| unsafe { heap.resize(memory, layout, size) };
        use_blocks(number, &mailboxes, take, resize, free);
        if number == 0 {
            heap.release(64 << 10);
        }
    });
    mailboxes.rest().for_each(free);
    if !cfg!(miri) {
        heap.check().unwrap();
    }
}

// ---- arenas

fn pages_for_arenas() -> PageHeap<Region> {
    PageHeap::new(region(8 << 20), Config::new(8 << 20)).unwrap()
}

#[test]
fn an_arena() {
    let heap = pages_for_arenas();
    let mut arena = Arena::new_in(&heap);
    for _ in 0..2 {
        on_threads(THREADS, |number| {
            let local = arena.local();
            let values: Vec<(&mut u64, &mut [u64])> = (0..ROUNDS)
                .map(|round| {
                    let own = local.alloc(stamp(number, round)).unwrap();
                    let many = arena.alloc_slice_copy(&[stamp(number, round); 40]).unwrap();
                    (own, many)
                })
                .collect();
            for (round, (own, many)) in values.into_iter().enumerate() {
                assert!(*own == stamp(number, round) && many.iter().all(|value| *value == *own));
            }
        });
        arena.reset();
    }
}

#[test]
fn a_pool() {
    let heap = pages_for_arenas();
    let mut pool = Pool::new_in(&heap);
    for _ in 0..2 {
        on_threads(THREADS, |number| {
            let handles: Vec<_> = (0..ROUNDS)
                .map(|round| pool.insert(stamp(number, round)).unwrap())
                .collect();
            for (round, handle) in handles.into_iter().enumerate() {
                assert_eq!(pool.get(handle), Ok(&stamp(number, round)));
            }
        });
        pool.reset();
    }
}

#[test]
fn a_free_list() {
    let (heap, layout) = (pages_for_arenas(), Layout::new::<[u64; 12]>());
    let list = FreeList::with_config_in(layout, ArenaConfig::new().limit(64 << 10), &heap).unwrap();
    let mailboxes = Mailboxes::default();
    let free = |held: Held| {
        // SAFETY: taken from this list, given up.
        unsafe { list.deallocate(held.check().0) }
    };
    on_threads(THREADS, |number| {
        let take = || list.allocate().ok().map(NonNull::cast);
        use_slots(number, layout, &mailboxes, take, free);
    });
    mailboxes.rest().for_each(free);
    assert_eq!(list.stats().allocated, 0);
}

#[test]
fn a_sharded_free_list() {
    let (heap, layout) = (pages_for_arenas(), Layout::new::<[u64; 12]>());
    let config = ArenaConfig::new().limit(64 << 10);
    let list = ShardedFreeList::with_config_in(layout, THREADS, config, &heap).unwrap();
    let mailboxes = Mailboxes::default();
    on_threads(THREADS, |number| {
        // The first has no shard of its own.
        let owner = (number > 0).then(|| list.owner().unwrap());
        let take = || match &owner {
            Some(owner) => owner.allocate().ok().map(NonNull::cast),
            None => list.allocate().ok().map(NonNull::cast),
        };
        // SAFETY: taken from this list, given up.
        let free = |held: Held| unsafe {
            match &owner {
                Some(owner) => owner.deallocate(held.check().0),
                None => list.deallocate(held.check().0),
            }
        };
        use_slots(number, layout, &mailboxes, take, free);
    });
    // SAFETY: as above.
    mailboxes
        .rest()
        .for_each(|held| unsafe { list.deallocate(held.check().0) });
    assert_eq!(list.stats().allocated, 0);
}

/// Takes, passes on and frees slots, by whatever does so.
fn use_slots(
    number: usize,
    layout: Layout,
    mailboxes: &Mailboxes,
    take: impl Fn() -> Option<NonNull<u8>>,
    free: impl Fn(Held),
) {
    let (mut random, mut held) = (random(number), Vec::new());
    // There are more than are taken here.
    let new = |round| Held::new(take().expect("a slot"), layout, stamp(number, round));
    for round in 0..2 * ROUNDS {
        match random.below(8) {
            0..4 if held.len() < 50 => held.push(new(round)),
            4 if round > ROUNDS => mailboxes.collect(number).into_iter().for_each(&free),
            _ if held.is_empty() => (),
            5 if round > ROUNDS => mailboxes
                .pass(number, any(&mut held, &mut random))
                .into_iter()
                .for_each(&free),
            _ => free(any(&mut held, &mut random)),
        }
    }
    held.into_iter().for_each(free);
}

/// Two replace a value, one reads it: what a reader may still see is not used again. The value is not atomic, so Miri
/// would report a race.
#[test]
fn readers_of_a_sharded_free_list() {
    let (heap, layout) = (pages_for_arenas(), Layout::new::<[u64; 2]>());
    let config = ArenaConfig::new().limit(64 << 10);
    let list = ShardedFreeList::with_config_in(layout, THREADS + 1, config, &heap).unwrap();
    let place = AtomicPtr::<[u64; 2]>::default();
    let replace = |owner: &Owner<'_, _>, new: *mut [u64; 2]| {
        // AcqRel: pairs with itself and with the load of a reader.
        if let Some(old) = NonNull::new(place.swap(new, Ordering::AcqRel)) {
            // SAFETY: no reader finds it any more, and it is retired once.
            unsafe { owner.retire(old.cast()) };
        }
    };
    let publish = |owner: &Owner<'_, _>, value| {
        if let Ok(slot) = owner.allocate() {
            let slot = slot.cast::<[u64; 2]>();
            // SAFETY: just allocated, with this layout.
            unsafe { slot.write([value; 2]) };
            replace(owner, slot.as_ptr());
        }
    };
    let first = list.owner().unwrap();
    publish(&first, 0);
    on_threads(THREADS, |number| {
        let owner = list.owner().unwrap();
        for round in 0..2 * ROUNDS {
            if number > 0 {
                publish(&owner, stamp(number, round));
                continue;
            }
            let guard = owner.enter();
            // Acquire: pairs with the exchange in `replace`.
            let found = guard.protect(|| place.load(Ordering::Acquire));
            // SAFETY: there is always one, and it is protected as long as the guard lives.
            let [first, second] = unsafe { *found };
            assert_eq!(first, second);
        }
        owner.flush();
    });
    replace(&first, ptr::null_mut());
    first.flush();
    assert_eq!(list.stats().allocated, 0);
}
