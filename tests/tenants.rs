//! A `Heap` for each tenant of a program: limits in bytes, owned together with what lies in it, asked before a refusal,
//! a thousand of them.

#![cfg(any(unix, windows))]

use std::alloc::{GlobalAlloc, Layout};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, AtomicPtr, AtomicUsize, Ordering};
use std::thread;

use allocator_api2_02::alloc::Allocator;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
use pageheap::HugePages;
use pageheap::source::{Memory, OverSystem, System};
use pageheap::{Config, Geometry, GlobalHeap, Heap, PageCount, PageHeap, SharedHeap};

use common::{addresses, new_heap};
use counted::Counted;

#[path = "common/child.rs"]
mod child;
mod common;
#[path = "common/counted.rs"]
mod counted;

const LARGE: Layout = match Layout::from_size_align(10 << 20, 8) {
    Ok(layout) => layout,
    Err(_) => panic!("a layout"),
};
const SMALL: Layout = Layout::new::<[u64; 1000]>();

/// A heap in which one large block has room, but not two.
fn for_one_large() -> Heap<System> {
    Heap::new(System, Config::new(addresses(1 << 30)).limit_bytes(16 << 20)).unwrap()
}

#[test]
fn limits_in_bytes_are_whole_pages_of_the_heaps_own_size() {
    const CONFIG: Config = Config::new(1 << 20).limit_bytes(100_000).soft_limit_bytes(50_000);
    let heap = Heap::new(System, CONFIG).unwrap();
    assert_eq!((heap.limit(), heap.soft_limit()), (PageCount(12), PageCount(6)));
    let pages: PageHeap<System> = PageHeap::new(System, CONFIG).unwrap();
    assert_eq!((pages.limit(), pages.soft_limit()), (PageCount(12), PageCount(6)));
    let pages: PageHeap<System, Geometry<5, 12>> = PageHeap::with_shape(System, CONFIG).unwrap();
    assert_eq!((pages.limit(), pages.soft_limit()), (PageCount(24), PageCount(12)));
    assert!(pages.allocate(PageCount(24)).is_some() && pages.allocate(PageCount(1)).is_none());
    // More than is reserved counts as the reservation, and the last one holds.
    let heap = |config| Heap::new(System, config).unwrap();
    assert_eq!(heap(CONFIG.limit_bytes(usize::MAX)).limit(), PageCount(128));
    assert_eq!(heap(CONFIG.limit(PageCount(7))).limit(), PageCount(7));
    assert_eq!(heap(CONFIG.limit(PageCount(7)).limit_bytes(8192)).limit(), PageCount(1));
    let nothing = heap(CONFIG.limit_bytes(8191));
    assert!(nothing.allocate(SMALL).is_none());
}

/// A value that owns a heap, and collections of both versions that lie in it.
#[test]
fn a_heap_lives_as_long_as_any_of_its_owners() {
    static RESERVED: AtomicIsize = AtomicIsize::new(0);
    struct Tenant<S: Memory + 'static> {
        heap: SharedHeap<S>,
        old: allocator_api2_02::vec::Vec<u64, SharedHeap<S>>,
        new: allocator_api2_04::vec::Vec<u64, SharedHeap<S>>,
    }
    let heap: SharedHeap<_> = Heap::new(OverSystem(Counted(&RESERVED)), Config::new(addresses(1 << 30)))
        .unwrap()
        .into();
    let mut tenant = Tenant {
        old: allocator_api2_02::vec::Vec::new_in(heap.clone()),
        new: allocator_api2_04::vec::Vec::new_in(heap.clone()),
        heap,
    };
    tenant.old.extend(0..100_000);
    tenant.new.extend(0..100_000);
    for start in [tenant.old.as_ptr(), tenant.new.as_ptr()] {
        assert!(tenant.heap.contains(start.cast()));
    }
    assert!(format!("{:?}", tenant.heap).starts_with("SharedHeap(Heap { limit: "));
    let Tenant { heap, mut old, new } = tenant;
    drop(heap);
    // A thread that is not scoped takes one along, which also frees there.
    let summed = thread::spawn(move || new.iter().sum::<u64>());
    old.extend(0..100_000);
    assert_eq!(summed.join().unwrap(), 99_999 * 50_000);
    old.truncate(1000);
    old.shrink_to_fit();
    assert!(old.iter().copied().eq(0..1000));
    old.allocator().check().unwrap();
    assert!(RESERVED.load(Ordering::Relaxed) > 0);
    drop(old);
    assert_eq!(RESERVED.load(Ordering::Relaxed), 0);
}

/// A block that the hook frees when it is called, and how often it was called.
#[derive(Default)]
struct Asked {
    spare: AtomicPtr<u8>,
    times: AtomicUsize,
}

impl Asked {
    fn times(&self) -> usize {
        self.times.load(Ordering::Relaxed)
    }

    /// A full heap: its hook frees the spare block.
    fn in_heap() -> (Arc<Self>, Heap<System>) {
        let asked = Arc::new(Self::default());
        let state = Arc::clone(&asked);
        let heap = for_one_large().on_exhausted(move |heap, wanted| state.free_the_spare(heap, wanted));
        let spare = heap.allocate(LARGE).unwrap();
        asked.spare.store(spare.as_ptr(), Ordering::Relaxed);
        (asked, heap)
    }

    fn free_the_spare(&self, heap: &Heap<System>, wanted: Layout) -> bool {
        // In the checked build the size includes the seal.
        let seal = wanted.size().checked_sub(LARGE.size());
        assert!(seal == Some(0) || cfg!(feature = "checks") && seal.is_some_and(|seal| seal < 100));
        self.times.fetch_add(1, Ordering::Relaxed);
        // The hook may allocate, and is not called for that.
        assert!(heap.allocate(LARGE).is_none());
        let spare = NonNull::new(self.spare.swap(ptr::null_mut(), Ordering::Relaxed));
        // SAFETY: allocated with this layout; nobody else has it.
        spare.inspect(|&spare| unsafe { heap.free(spare, LARGE) }).is_some()
    }
}

/// Allocates a large block in one of several ways.
type Way = fn(&Heap<System>) -> Option<NonNull<u8>>;

/// A small block, with something in it.
fn small(heap: &Heap<System>) -> NonNull<u8> {
    let block = heap.allocate(SMALL).unwrap();
    // SAFETY: a block of that size.
    unsafe { block.write_bytes(0x5a, SMALL.size()) };
    block
}

/// Whether that is still there.
fn is_small(block: NonNull<u8>) -> bool {
    // SAFETY: a block of that size at least, which was written to.
    unsafe { std::slice::from_raw_parts(block.as_ptr(), SMALL.size()) }
        .iter()
        .all(|&byte| byte == 0x5a)
}

const WAYS: [Way; 4] = [
    |heap| heap.allocate(LARGE),
    |heap| heap.allocate_zeroed(LARGE),
    |heap| {
        let block = small(heap);
        // SAFETY: the block just allocated; it is unchanged if this fails.
        let grown = unsafe { heap.resize(block, SMALL, LARGE.size()) };
        assert!(is_small(grown.unwrap_or(block)));
        grown
    },
    |heap| {
        let block = small(heap);
        // SAFETY: as above.
        let grown = unsafe { heap.grow(block, SMALL, LARGE) }.ok().map(NonNull::cast);
        assert!(is_small(grown.unwrap_or(block)));
        grown
    },
];

#[test]
fn the_hook_of_a_heap_is_asked_before_a_refusal_and_may_free() {
    for way in WAYS {
        let (asked, heap) = Asked::in_heap();
        assert!(way(&heap).is_some());
        assert_eq!(asked.times(), 1);
        assert_eq!(heap.stats().pages.refusals, 1, "the hook's own");
        assert!(way(&heap).is_none());
        assert_eq!((asked.times(), heap.stats().pages.refusals), (2, 3));
        heap.check().unwrap();
    }
}

#[test]
fn the_hook_of_a_heap_is_not_asked_for_what_cannot_be() {
    let (asked, heap) = Asked::in_heap();
    let beyond = Layout::from_size_align(17 << 20, 8).unwrap();
    assert!(heap.allocate(beyond).is_none() && heap.allocate_zeroed(beyond).is_none());
    let block = small(&heap);
    for size in [beyond.size(), usize::MAX] {
        // SAFETY: the block just allocated; it is unchanged, because this fails.
        assert!(unsafe { heap.resize(block, SMALL, size) }.is_none());
    }
    assert!(is_small(block));
    assert_eq!(asked.times(), 0);
}

#[test]
fn the_hook_of_a_heap_is_asked_as_long_as_it_frees_and_256_times_at_most() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let heap = for_one_large()
        .on_exhausted(|_, _| panic!("replaced"))
        .on_exhausted(move |_, _| count.fetch_add(1, Ordering::Relaxed) < 1000);
    heap.allocate(LARGE).unwrap();
    assert!(heap.allocate(LARGE).is_none());
    assert_eq!(asked.load(Ordering::Relaxed), 256);
    // The heap owns the hook.
    assert_eq!(Arc::strong_count(&asked), 2);
    drop(heap);
    assert_eq!(Arc::strong_count(&asked), 1);
}

/// As the heap calls it with nothing held: other threads use the heap meanwhile, also one that a thread was alone with.
#[test]
fn while_the_hook_of_a_heap_runs_others_go_on() {
    let heap = for_one_large().on_exhausted(|heap, _| {
        let work = || {
            for _ in 0..100 {
                let block = heap.allocate(SMALL).unwrap();
                // SAFETY: the block just allocated.
                unsafe { heap.free(block, SMALL) };
            }
            heap.check().unwrap();
        };
        work();
        thread::scope(|scope| scope.spawn(work).join().unwrap());
        heap.release(usize::MAX);
        false
    });
    for _ in 0..40 {
        // SAFETY: the block just allocated.
        unsafe { heap.free(heap.allocate(SMALL).unwrap(), SMALL) };
    }
    heap.allocate(LARGE).unwrap();
    WAYS.iter().for_each(|way| assert!(way(&heap).is_none()));
}

/// In a hook no other is called, whichever heap's it is: it would be called again, and so on.
#[test]
fn in_the_hook_of_a_heap_no_other_is_called() {
    static OTHERS: AtomicUsize = AtomicUsize::new(0);
    static GLOBAL: GlobalHeap = new_heap().limit(16 << 20).background(false).on_exhausted(|_| other());
    fn other() -> bool {
        OTHERS.fetch_add(1, Ordering::Relaxed);
        false
    }
    // SAFETY: the layout is not empty.
    let in_global = || !unsafe { GLOBAL.alloc(LARGE) }.is_null();
    let another = for_one_large().on_exhausted(|_, _| other());
    assert!(another.allocate(LARGE).is_some() && in_global());
    assert!(another.allocate(LARGE).is_none() && !in_global());
    assert_eq!(OTHERS.load(Ordering::Relaxed), 2);
    let heap = for_one_large().on_exhausted(move |_, _| {
        assert!(another.allocate(LARGE).is_none() && !in_global());
        false
    });
    heap.allocate(LARGE).unwrap();
    assert!(heap.allocate(LARGE).is_none());
    assert_eq!(OTHERS.load(Ordering::Relaxed), 2);
}

/// Nothing of the program's unwinds out of an allocation.
#[test]
fn a_hook_of_a_heap_that_unwinds_ends_the_process() {
    if child::ended("a_hook_of_a_heap_that_unwinds_ends_the_process", "has unwound").is_none() {
        let heap = for_one_large().on_exhausted(|_, _| panic!("a bug"));
        heap.allocate(LARGE).unwrap();
        let _ = heap.allocate(LARGE);
    }
}

/// As `Heap` has it under "What it costs".
#[test]
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn a_thousand_heaps_take_what_is_said() {
    if !child::is_one() {
        return child::runs("a_thousand_heaps_take_what_is_said");
    }
    for (reserved, mappings, kib, table_kib) in [(1 << 30, 12, 44, 16), (64 << 20, 8, 32, 8)] {
        let before = figures();
        let heaps: Vec<_> = (0..1000).map(|_| with_a_block(reserved)).collect();
        let taken: Vec<_> = figures()
            .iter()
            .zip(before)
            .map(|(after, before)| after.saturating_sub(before) as f64 / 1000.0)
            .collect();
        println!("{reserved} bytes: {taken:?}");
        for (taken, said) in taken.into_iter().zip([mappings, kib, table_kib]) {
            let said = f64::from(said);
            assert!((said * 0.75..said * 1.25).contains(&taken), "{taken}, not {said}");
        }
        drop(heaps);
    }
}

/// A heap with a small block that has been written to.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn with_a_block(reserved: usize) -> Heap<System> {
    let config = Config::new(reserved).huge_pages(HugePages::Avoid);
    let heap = Heap::new(System, config).unwrap();
    let block = heap.allocate(Layout::new::<[u64; 8]>()).unwrap();
    // SAFETY: a block of that size.
    unsafe { block.write_bytes(1, 64) };
    heap
}

/// How many mappings the process has, KiB of resident memory that is its own, and of page tables.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn figures() -> [usize; 3] {
    let read = |file| std::fs::read_to_string(file).unwrap();
    let status = read("/proc/self/status");
    let kib = |name| {
        let line = status.lines().find(|line| line.starts_with(name)).expect("a line");
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    [read("/proc/self/maps").lines().count(), kib("RssAnon:"), kib("VmPTE:")]
}
