//! The beginning and the end of the process; a heap whose first use is a race.

use std::sync::Barrier;
#[cfg(target_os = "linux")]
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// Total bytes of the strings that the constructor allocated.
#[cfg(target_os = "linux")]
static BEFORE_MAIN: AtomicUsize = AtomicUsize::new(0);

/// Runs before `main` and before Rust's runtime.
#[cfg(target_os = "linux")]
#[used]
// SAFETY: the section holds function pointers; the function needs nothing of the runtime but memory.
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = {
    extern "C" fn construct() {
        let texts: Vec<String> = (0..100).map(|number| "w".repeat(number)).collect();
        BEFORE_MAIN.store(texts.concat().len(), Ordering::Relaxed);
    }
    construct
};

#[test]
#[cfg(target_os = "linux")]
fn constructors_may_allocate() {
    assert_eq!(BEFORE_MAIN.load(Ordering::Relaxed), 99 * 100 / 2);
}

/// What the system says of "the process" is what it says of its first thread, and of that nothing any more. (The child
/// of a fork, as a test does not run on the first thread.)
#[test]
#[cfg(target_os = "linux")]
fn resident_memory_is_known_once_the_first_thread_has_ended() {
    if !is_child() {
        return assert!(run("ends::resident_memory_is_known_once_the_first_thread_has_ended"));
    }
    let look = || {
        let state = || std::fs::read_to_string("/proc/self/stat").unwrap();
        while !state().contains(") Z ") {
            thread::sleep(std::time::Duration::from_millis(1));
        }
        // SAFETY: it ends the process, in which nothing else is left to do.
        unsafe { libc::_exit(i32::from(HEAP.snapshot().resident == 0)) }
    };
    // SAFETY: the child starts a thread, and ends its first one, whose stack stays.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            thread::spawn(look);
            libc::syscall(libc::SYS_exit, 0);
        }
        let mut status = -1;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        assert_eq!(status, 0);
    }
}

#[test]
fn a_process_may_end_while_threads_allocate() {
    // Of the C library, whichever it is.
    unsafe extern "C" {
        safe fn atexit(function: extern "C" fn()) -> std::ffi::c_int;
    }
    extern "C" fn after_main() {
        let texts: Vec<String> = (0..1000).map(|number| "v".repeat(number % 100)).collect();
        assert_eq!(texts.concat().len(), 49_500);
    }
    if !is_child() {
        return (0..10).for_each(|_| assert!(run("ends::a_process_may_end_while_threads_allocate")));
    }
    assert_eq!(atexit(after_main), 0);
    for seed in 0..12 {
        thread::spawn(move || {
            let mut kept = Vec::new();
            for number in 0_usize.. {
                kept.push(vec![seed as u8; number * 37 % 5000]);
                if kept.len() > 100 {
                    kept.swap_remove(number * 13 % 100);
                }
            }
        });
    }
    thread::sleep(std::time::Duration::from_millis(30));
    std::process::exit(0);
}

#[test]
fn the_first_use_may_be_raced_by_24_threads() {
    use std::alloc::{GlobalAlloc, Layout};
    static RACED: GlobalHeap = GlobalHeap::new();
    if !is_child() {
        // Requirement 12: 150 processes in a full run.
        let processes = if is_full() { 150 } else { 20 };
        return (0..processes).for_each(|_| assert!(run("ends::the_first_use_may_be_raced_by_24_threads")));
    }
    let barrier = Barrier::new(24);
    thread::scope(|scope| {
        for number in 0..24_usize {
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                let layout = Layout::from_size_align(64 << (number % 12), 8).unwrap();
                // SAFETY: freed with the layout; writes are inside the blocks.
                unsafe {
                    let blocks = [0; 10].map(|_| RACED.alloc(layout));
                    for block in blocks {
                        assert!(!block.is_null());
                        block.write_bytes(number as u8, layout.size());
                    }
                    for block in blocks {
                        assert!(block.read() == number as u8 && block.add(layout.size() - 1).read() == number as u8);
                        RACED.dealloc(block, layout);
                    }
                }
            });
        }
    });
}
