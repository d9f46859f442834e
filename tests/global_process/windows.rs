//! What only Windows has: an error code for each thread, fibers, threads that are stopped at the end of the process,
//! memory that is charged when it is committed.

use std::alloc::{GlobalAlloc, Layout, alloc, alloc_zeroed, dealloc, realloc};
use std::cell::RefCell;
use std::ffi::c_void;
use std::hint::black_box;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pageheap::arena::{ArenaConfig, ShardedFreeList};
use pageheap::internals::has_fence;
use windows_sys::Win32::Foundation::{CloseHandle, GetLastError, SetLastError, WAIT_OBJECT_0};
use windows_sys::Win32::System::Threading::{
    ConvertThreadToFiber, CreateFiber, CreateThread, DeleteFiber, FlsAlloc, FlsSetValue, INFINITE, SwitchToFiber,
    WaitForSingleObject,
};

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
                    let block = black_box(realloc(block, layout(1 << shift), 3 << shift));
                    assert!(!block.is_null());
                    dealloc(block, layout(3 << shift));
                    dealloc(black_box(alloc_zeroed(layout(1 << shift))), layout(1 << shift));
                }
            });
        }
        // SAFETY: null, as no heap is as long.
        keeps(&|| unsafe { assert!(black_box(alloc(layout(1 << 46))).is_null()) });
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

/// Rust's own entry in the table of callbacks stands before ours.
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

/// Has `last` called by this thread when it ends the process.
fn at_the_end(last: unsafe extern "system" fn(*const c_void)) {
    // SAFETY: a callback that lives as long as the process, with a value that is not null.
    unsafe { assert_ne!(FlsSetValue(FlsAlloc(Some(last)), ptr::dangling()), 0) };
}

/// What runs when `ExitProcess` has stopped all other threads, perhaps with locks: libraries' last code, and callbacks
/// of fiber-local slots.
#[test]
fn the_end_is_not_waited_for() {
    unsafe extern "system" fn last(_: *const c_void) {
        let blocks: Vec<Vec<u8>> = (0..2000).map(|number| vec![1; number * 37 % 100_000]).collect();
        let longest = blocks.iter().map(Vec::len).max().unwrap();
        drop(blocks);
        let mut huge = Vec::<u8>::new();
        let refused = huge.try_reserve_exact(1 << 46).is_err();
        println!("worked: {longest}, {refused}");
    }
    /// With which the system's own locks end a process that is ending. On Windows the code of `exit` stays.
    const TERMINATING: i32 = 0xC000_004B_u32.cast_signed();
    const NAME: &str = "windows::the_end_is_not_waited_for";
    if !is_child() {
        let end = |threads: &str| {
            let output = child::output(child::command(NAME).env("THREADS", threads));
            let said = String::from_utf8_lossy(&output.stdout).contains("worked: 73963, true");
            (output.status.code(), said, output)
        };
        let (code, worked, output) = end("0");
        assert!(code == Some(7) && worked, "{output:?}");
        let ended: Vec<_> = (0..20).map(|_| end("8")).collect();
        for (code, worked, output) in &ended {
            assert!(
                matches!((code, worked), (Some(7), true) | (Some(TERMINATING), false)),
                "{output:?}"
            );
        }
        let whole = ended.iter().filter(|end| end.1).count();
        println!("{whole} of 20 ran to their end");
        return;
    }
    at_the_end(last);
    let threads = std::env::var("THREADS").unwrap().parse().unwrap();
    for seed in 0..threads {
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

/// A list that is empty was asked for slots when all threads but one had been stopped, one of them inside its shard:
/// that was waited for forever.
#[test]
fn a_list_answers_at_the_end() {
    static LIST: OnceLock<ShardedFreeList> = OnceLock::new();
    unsafe extern "system" fn last(_: *const c_void) {
        let list = LIST.get().unwrap();
        let slots = (0..1 << 20).take_while(|_| list.allocate().is_ok()).count();
        println!("worked: {slots}");
    }
    const NAME: &str = "windows::a_list_answers_at_the_end";
    if !is_child() {
        for _ in 0..10 {
            let output = child::output(&mut child::command(NAME));
            assert!(
                String::from_utf8_lossy(&output.stdout).contains("worked: "),
                "{output:?}"
            );
            assert_eq!(output.status.code(), Some(7));
        }
        return;
    }
    let config = ArenaConfig::new().limit(1 << 20);
    let list = ShardedFreeList::with_config(layout(64), 16, config).unwrap();
    let list = LIST.get_or_init(|| list);
    at_the_end(last);
    for _ in 0..8 {
        thread::spawn(move || {
            loop {
                let slots: Vec<_> = (0..200).filter_map(|_| list.allocate().ok()).collect();
                // SAFETY: allocated just now.
                slots
                    .into_iter()
                    .for_each(|slot| unsafe { list.deallocate(slot.cast()) });
            }
        });
    }
    thread::sleep(Duration::from_millis(30));
    std::process::exit(7);
}

/// In silence the background thread decommits what was freed.
#[test]
fn freed_memory_goes_back() {
    const STAYED: i32 = 17;
    const NAME: &str = "windows::freed_memory_goes_back";
    if !is_child() {
        let without = child::command(NAME)
            .env("PAGEHEAP_BACKGROUND", "0")
            .status()
            .expect("a child process");
        assert_eq!(without.code(), Some(STAYED), "nobody gives it back");
        return assert!(run(NAME));
    }
    let blocks: Vec<Vec<u8>> = (0..20_000).map(|number| vec![1; number % 20_000]).collect();
    let before = HEAP.stats().pages.backed;
    drop(blocks);
    if !has_fence() {
        // Then the others do not reach what this thread keeps.
        HEAP.flush_thread();
    }
    let begin = Instant::now();
    while HEAP.stats().pages.backed.0 * 20 > before.0 {
        if begin.elapsed() > Duration::from_secs(10) {
            std::process::exit(STAYED);
        }
        thread::sleep(Duration::from_millis(50));
    }
    assert!(HEAP.has_background_thread());
    HEAP.check().unwrap();
}

/// What was decommitted is zero when it comes back, and a block that no system could commit is refused.
#[test]
fn what_went_back_is_committed_again() {
    static OTHER: GlobalHeap = GlobalHeap::new().background(false);
    let large = layout(40 << 20);
    // SAFETY: freed with the layout it was allocated with, and used only until then.
    unsafe {
        for _ in 0..3 {
            let block = OTHER.alloc_zeroed(large);
            assert!((0..large.size()).step_by(4096).all(|at| block.add(at).read() == 0));
            block.write_bytes(1, large.size());
            OTHER.dealloc(block, large);
            assert!(OTHER.release(usize::MAX) >= large.size());
        }
        assert!(OTHER.alloc(layout(usize::MAX / 4)).is_null());
    }
    assert!(OTHER.stats().pages.calls.commit >= 3);
    OTHER.check().unwrap();
}

/// A thread's structure is its own whichever fiber runs on it, and goes back when the thread ends.
#[test]
fn fibers_use_the_structure_of_their_thread() {
    static OTHER: GlobalHeap = GlobalHeap::new().background(false);
    static MAIN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    static FIBER: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    static BY_ANOTHER: AtomicBool = AtomicBool::new(false);
    /// Without the program's allocator: a thread has a structure of the heap it uses first.
    fn work() {
        let sizes = || (0..200).map(|number| layout(1 + number * 5));
        let mut blocks = [ptr::null_mut(); 200];
        // SAFETY: freed with the layout they were allocated with.
        unsafe {
            blocks
                .iter_mut()
                .zip(sizes())
                .for_each(|(block, layout)| *block = OTHER.alloc(layout));
            blocks
                .into_iter()
                .zip(sizes())
                .for_each(|(block, layout)| OTHER.dealloc(block, layout));
        }
    }
    unsafe extern "system" fn fiber(_: *mut c_void) {
        work();
        // SAFETY: the fiber that the thread began as.
        unsafe { SwitchToFiber(MAIN.load(Ordering::Relaxed)) };
    }
    unsafe extern "system" fn other(_: *mut c_void) -> u32 {
        work();
        // SAFETY: it does not run, and is deleted once.
        unsafe { DeleteFiber(FIBER.load(Ordering::Relaxed)) };
        work();
        0
    }
    unsafe extern "system" fn thread(_: *mut c_void) -> u32 {
        // SAFETY: fibers of this thread; this one is deleted once, when it does not run.
        unsafe {
            MAIN.store(ConvertThreadToFiber(ptr::null()), Ordering::Relaxed);
            FIBER.store(CreateFiber(0, Some(fiber), ptr::null()), Ordering::Relaxed);
            SwitchToFiber(FIBER.load(Ordering::Relaxed));
            assert_eq!(OTHER.stats().threads, 1);
            if BY_ANOTHER.load(Ordering::Relaxed) {
                run_raw(other);
            } else {
                DeleteFiber(FIBER.load(Ordering::Relaxed));
            }
        }
        work();
        assert_eq!(OTHER.stats().threads, 1);
        0
    }
    /// Runs a thread that Rust's library knows nothing of, to its end.
    fn run_raw(start: unsafe extern "system" fn(*mut c_void) -> u32) {
        // SAFETY: the function takes no argument; the handle is closed once.
        unsafe {
            let handle = CreateThread(ptr::null(), 0, Some(start), ptr::null(), 0, ptr::null_mut());
            assert_eq!(WaitForSingleObject(handle, INFINITE), WAIT_OBJECT_0);
            CloseHandle(handle);
        }
    }
    for by_another in [false, true] {
        BY_ANOTHER.store(by_another, Ordering::Relaxed);
        run_raw(thread);
        assert_eq!(OTHER.stats().threads, 0);
        OTHER.check().unwrap();
    }
}
