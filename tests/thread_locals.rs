//! A program with large thread-locals: the C library puts them on the stack of each thread, including the background
//! thread. A process of its own, as all its threads have them. And one that has the C library keep much spare for those
//! of libraries loaded later.

#![cfg(target_os = "linux")]

use std::cell::Cell;
use std::time::Duration;

use pageheap::GlobalHeap;

#[global_allocator]
static HEAP: GlobalHeap = GlobalHeap::new();

std::thread_local! {
    static LARGE: Cell<[u8; 600 << 10]> = const { Cell::new([0; 600 << 10]) };
}

/// Whether one of the process's threads is called `pageheap`.
fn has_keeper() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .any(|name| name == "pageheap\n")
}

#[path = "common/child.rs"]
mod child;

#[test]
fn the_background_thread_is_born_where_thread_locals_are_large() {
    let used = LARGE.with(|large| std::hint::black_box(large).as_ptr().addr());
    assert_ne!(used, 0);
    // Two MiB, freed: the background thread must give them back.
    drop((0..2000).map(|_| vec![1_u8; 1000]).collect::<Vec<_>>());
    let soon = (0..400).any(|_| {
        std::thread::sleep(Duration::from_millis(25));
        has_keeper()
    });
    assert!(soon, "{}", HEAP.stats());
}

/// `sysconf` does not count what is spare: with 36,000 bytes the thread had too short a stack, and with 60,000 there
/// was none.
#[test]
#[cfg(target_env = "gnu")]
fn the_background_thread_is_born_where_much_is_spare_for_thread_locals() {
    if child::is_one() {
        return the_background_thread_is_born_where_thread_locals_are_large();
    }
    for spare in [36_000, 60_000, 1_000_000] {
        let mut command = child::command("the_background_thread_is_born_where_much_is_spare_for_thread_locals");
        command.env("GLIBC_TUNABLES", format!("glibc.rtld.optional_static_tls={spare}"));
        let output = child::output(&mut command);
        assert!(output.status.success(), "{spare}: {output:?}");
    }
}
