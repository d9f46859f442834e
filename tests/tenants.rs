//! A `Heap` for each tenant of a program: limits in bytes, owned together with what lies in it.

#![cfg(any(unix, windows))]

use std::alloc::Layout;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::thread;

use pageheap::source::{Memory, OverSystem, Purpose, Reservation, Source, System, Verbs};
use pageheap::{Config, Geometry, Heap, PageCount, PageHeap, SharedHeap};

use common::addresses;

mod common;

const SMALL: Layout = Layout::new::<[u64; 1000]>();

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

/// The system, with a count of the bytes reserved; not `Clone`.
struct Counted(&'static AtomicIsize);

// SAFETY: the system's verbs, plus a count.
unsafe impl Verbs for Counted {
    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        let reservation = System.reserve(purpose, bytes, align)?;
        self.0.fetch_add(reservation.bytes as isize, Ordering::Relaxed);
        Some(reservation)
    }

    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        self.0.fetch_sub(reservation.bytes as isize, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.unreserve(purpose, reservation) };
    }
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
