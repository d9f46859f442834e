//! What only Windows has: an error code for each thread, fibers, threads that are stopped at the end of the process,
//! memory that is charged when it is committed.

use std::alloc::{GlobalAlloc, Layout, alloc, dealloc};
use std::cell::RefCell;
use std::ffi::c_void;
use std::hint::black_box;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use windows_sys::Win32::Foundation::{GetLastError, SetLastError};
use windows_sys::Win32::System::Threading::{ConvertThreadToFiber, CreateFiber, DeleteFiber, SwitchToFiber};

use super::*;

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 8).unwrap()
}

/// Waits until it is so, or fails after ten seconds.
fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is() {
        assert!(
            begin.elapsed() < Duration::from_secs(10),
            "not {what}: {}",
            HEAP.stats()
        );
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn the_error_code_is_as_it_was() {
    const CODE: u32 = 4711;
    let keeps = |work: &dyn Fn()| {
        // SAFETY: numbers of this thread.
        unsafe {
            SetLastError(CODE);
            work();
            assert_eq!(GetLastError(), CODE);
        }
    };
    let works = move || {
        for shift in 3..27 {
            keeps(&|| {
                // SAFETY: freed with the layout it was allocated with.
                unsafe {
                    let block = black_box(alloc(layout(1 << shift)));
                    assert!(!block.is_null());
                    dealloc(block, layout(1 << shift));
                }
            });
        }
        keeps(&|| HEAP.flush_thread());
        keeps(&|| assert!(HEAP.release(usize::MAX) < usize::MAX));
        keeps(&|| assert!(HEAP.snapshot().resident > 0));
    };
    works();
    // The first use by a thread, too.
    thread::spawn(works).join().unwrap();
}

#[test]
fn threads_give_their_structures_back() {
    const NAME: &str = "windows::threads_give_their_structures_back";
    if !is_child() {
        return assert!(run(NAME));
    }
    let wave = || {
        let threads: Vec<_> = (0..8)
            .map(|number| {
                thread::spawn(move || (0..50).map(|word| format!("{number} {word}")).collect::<String>().len())
            })
            .collect();
        threads
            .into_iter()
            .for_each(|thread| assert!(thread.join().unwrap() > 0));
    };
    wave();
    let before = HEAP.stats();
    (0..200).for_each(|_| wave());
    let after = HEAP.stats();
    assert!(after.thread_structures <= before.thread_structures + 16, "{after}");
    wait_until("ended", || HEAP.stats().threads <= 4);
    HEAP.check().unwrap();
}

/// Destructors of Rust's thread-locals run after the thread's structure has gone back.
#[test]
fn destructors_of_thread_locals_may_allocate_and_free() {
    struct Last(Vec<String>);
    impl Drop for Last {
        fn drop(&mut self) {
            let more: Vec<String> = (0..100).map(|number| format!("{number} {}", self.0.len())).collect();
            DROPPED.fetch_add(more.len() + self.0.len(), Ordering::Relaxed);
        }
    }
    static DROPPED: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static LAST: RefCell<Last> = const { RefCell::new(Last(Vec::new())) };
    }
    const NAME: &str = "windows::destructors_of_thread_locals_may_allocate_and_free";
    if !is_child() {
        return assert!(run(NAME));
    }
    for _ in 0..50 {
        let add = |number: usize| LAST.with(|last| last.borrow_mut().0.push(number.to_string()));
        thread::spawn(move || (0..100).for_each(add)).join().unwrap();
    }
    assert_eq!(DROPPED.load(Ordering::Relaxed), 50 * 200);
    wait_until("ended", || HEAP.stats().threads <= 4);
    HEAP.check().unwrap();
}

/// The same for the main thread, whose destructors run when all other threads have been stopped, perhaps with locks.
#[test]
fn the_end_is_not_waited_for() {
    struct Last;
    impl Drop for Last {
        fn drop(&mut self) {
            let blocks: Vec<Vec<u8>> = (0..2000).map(|number| vec![1; number * 37 % 100_000]).collect();
            assert_eq!(blocks.iter().map(Vec::len).max(), Some(99_974));
        }
    }
    thread_local! {
        static LAST: Last = const { Last };
    }
    const NAME: &str = "windows::the_end_is_not_waited_for";
    if !is_child() {
        let begin = Instant::now();
        for _ in 0..20 {
            let status = child::command(NAME).status().expect("a child process");
            // 1: the lock of a stopped thread was met.
            assert!(matches!(status.code(), Some(7 | 1)), "{status:?}");
        }
        assert!(begin.elapsed() < Duration::from_secs(120));
        return;
    }
    LAST.with(|_| ());
    for seed in 0..8_usize {
        thread::spawn(move || {
            let mut kept = Vec::new();
            for number in seed.. {
                kept.push(vec![1_u8; number * 377 % 70_000]);
                if kept.len() > 50 {
                    kept.clear();
                    HEAP.flush_thread();
                }
            }
        });
    }
    thread::sleep(Duration::from_millis(30));
    std::process::exit(7);
}

/// In silence the background thread decommits what was freed.
#[test]
fn freed_memory_goes_back() {
    const NAME: &str = "windows::freed_memory_goes_back";
    if !is_child() {
        assert!(!run_with(NAME, &[("PAGEHEAP_BACKGROUND", "0")]), "nobody gave it back");
        return assert!(run(NAME));
    }
    let blocks: Vec<Vec<u8>> = (0..20_000).map(|number| vec![1; number % 20_000]).collect();
    let before = HEAP.stats().pages.backed;
    drop(blocks);
    let begin = Instant::now();
    while HEAP.stats().pages.backed.0 * 20 > before.0 {
        if begin.elapsed() > Duration::from_secs(10) {
            // Not a panic, which the parent would print.
            std::process::exit(1);
        }
        thread::sleep(Duration::from_millis(50));
    }
    assert!(HEAP.has_background_thread());
    HEAP.check().unwrap();
}

/// A block as long as the machine's memory and page file is refused, not promised; and nothing is lost.
#[test]
fn what_cannot_be_committed_is_refused() {
    static OTHER: GlobalHeap = GlobalHeap::new();
    let before = OTHER.stats().pages.in_use;
    // SAFETY: freed if it was there at all.
    unsafe {
        let block = OTHER.alloc(layout(usize::MAX / 4));
        assert!(block.is_null());
        let block = OTHER.alloc_zeroed(layout(40 << 20));
        assert!((0..40 << 20).step_by(4096).all(|at| block.add(at).read() == 0));
        block.write_bytes(1, 40 << 20);
        OTHER.dealloc(block, layout(40 << 20));
        OTHER.release(usize::MAX);
        // What was decommitted is zero when it comes back.
        let block = OTHER.alloc_zeroed(layout(40 << 20));
        assert!((0..40 << 20).step_by(4096).all(|at| block.add(at).read() == 0));
        OTHER.dealloc(block, layout(40 << 20));
    }
    OTHER.flush_thread();
    assert_eq!(
        OTHER.stats().pages.in_use.0.saturating_sub(before.0),
        OTHER.stats().span_pages.0
    );
    OTHER.check().unwrap();
}

/// A fiber that used the heap first is deleted, by its own thread or by another: the thread goes on either way.
#[test]
fn fibers_may_be_deleted_by_anybody() {
    static MAIN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    unsafe extern "system" fn fiber(_: *mut c_void) {
        drop(black_box(vec![1_u8; 1000]));
        // SAFETY: the thread's first fiber.
        unsafe { SwitchToFiber(MAIN.load(Ordering::Relaxed)) };
    }
    const NAME: &str = "windows::fibers_may_be_deleted_by_anybody";
    if !is_child() {
        return assert!(run(NAME));
    }
    for by_another in [false, true] {
        // SAFETY: fibers of this thread, each deleted once, when it does not run.
        let work = move || unsafe {
            MAIN.store(ConvertThreadToFiber(ptr::null()), Ordering::Relaxed);
            let other = CreateFiber(0, Some(fiber), ptr::null());
            assert!(!other.is_null());
            SwitchToFiber(other);
            let blocks: Vec<Vec<u8>> = (0..1000).map(|size| vec![2; size]).collect();
            let deleted = AtomicPtr::new(other);
            let delete = || DeleteFiber(deleted.load(Ordering::Relaxed));
            if by_another {
                thread::scope(|scope| scope.spawn(delete).join().unwrap());
            } else {
                delete();
            }
            assert!(
                blocks
                    .iter()
                    .enumerate()
                    .all(|(size, block)| block.iter().all(|&byte| byte == 2) && block.len() == size)
            );
            drop(blocks);
            let again: Vec<Vec<u8>> = (0..1000).map(|size| vec![3; size]).collect();
            assert!(again.iter().flatten().all(|&byte| byte == 3));
        };
        thread::spawn(work).join().unwrap();
        HEAP.check().unwrap();
    }
}
