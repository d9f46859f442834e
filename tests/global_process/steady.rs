//! A steady state makes no system calls: counted with `strace`, in a process of its own, for each working thread.
//!
//! A thread warms up, makes a call that nothing else makes (`getppid`), goes on working, and makes it again. The calls
//! between a thread's two marks are what its allocations cost: no mmap, no munmap, no madvise, and no futex.
//!
//! With more threads than processors, a thread may be preempted while it holds the lock of a class. A thread that needs
//! this lock does not wait for it (`object/central.rs`).
//!
//! Where there is no `strace`, or it may not trace, the test prints that and passes.

#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// Calls that map or unmap memory, or wait for other threads.
const FORBIDDEN: [&str; 7] = ["mmap", "munmap", "mremap", "madvise", "mprotect", "brk", "futex"];

/// Per thread, between its marks; and a tenth as many of medium size.
const OPERATIONS: usize = 200_000;

/// Whether tracing works here.
fn traceable() -> bool {
    let output = Command::new("strace").args(["-f", "-o", "/dev/null", "true"]).output();
    output.is_ok_and(|output| output.status.success())
}

/// Runs a test of this program in a child under `strace`. Returns, for each thread that made two marks, its calls in
/// between.
fn calls_in_child(name: &str) -> Vec<BTreeMap<String, usize>> {
    let log = std::env::temp_dir().join(format!(
        "pageheap-{}-{}.strace",
        std::process::id(),
        name.replace(':', "-")
    ));
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-o"]);
    strace.arg(&log).arg(std::env::current_exe().unwrap());
    let output = child::output(&mut child::chosen(strace, name));
    let text = std::fs::read_to_string(&log).unwrap();
    std::fs::remove_file(&log).unwrap();
    assert!(output.status.success(), "{output:?}");
    between_marks(&text)
}

/// A line is `PID name(arguments) = result`; the second half of an interrupted call begins with `<...`.
fn between_marks(log: &str) -> Vec<BTreeMap<String, usize>> {
    let mut threads: BTreeMap<&str, (usize, BTreeMap<String, usize>)> = BTreeMap::new();
    for line in log.lines() {
        let (thread, rest) = line.split_once(' ').unwrap_or((line, ""));
        let Some((name, _)) = rest.trim_start().split_once('(') else {
            continue;
        };
        let (marks, calls) = threads.entry(thread).or_default();
        if name == "getppid" {
            *marks += 1;
        } else if *marks == 1 && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            *calls.entry(name.to_owned()).or_default() += 1;
        }
    }
    let marked = threads.into_values().filter(|(marks, _)| *marks == 2);
    marked.map(|(_, calls)| calls).collect()
}

#[test]
fn only_what_lies_between_the_marks_counts() {
    let log = "7 mmap(1) = 2\n7 getppid() = 1\n8 getppid() = 1\n7 futex(0x1 <unfinished ...>\n8  madvise(2) = 0\n\
               7 <... futex resumed>) = 0\n9 brk(0) = 1\n8 +++ exited with 0 +++\n7 getppid() = 1\n7 brk(0) = 1\n";
    assert_eq!(between_marks(log), [BTreeMap::from([("futex".to_owned(), 1)])]);
}

/// Frees random slots, or fills them with vectors of `sizes`.
fn churn(slots: &mut [Vec<u8>], seed: &mut u64, sizes: std::ops::Range<usize>, operations: usize) {
    for _ in 0..operations {
        *seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let at = (*seed >> 33) as usize % slots.len();
        let size = sizes.start + (*seed >> 40) as usize % sizes.len();
        slots[at] = if slots[at].capacity() > 0 {
            Vec::new()
        } else {
            black_box(Vec::with_capacity(size))
        };
    }
}

/// In the child: `threads` threads warm up, wait for each other, and work between two marks.
fn work(threads: usize) {
    static WARM: AtomicUsize = AtomicUsize::new(0);
    let worker = move |number: usize| {
        let mut seed = number as u64 + 1;
        let mut small = vec![Vec::new(); 2048];
        let mut middle = vec![Vec::new(); 128];
        let mut round = |operations| {
            churn(&mut small, &mut seed, 16..1040, operations);
            churn(&mut middle, &mut seed, 8 << 10..32 << 10, operations / 10);
        };
        // The first MiB of pages that is freed starts the background thread, once in a program's life.
        drop(black_box(Vec::<u8>::with_capacity(4 << 20)));
        round(4 * OPERATIONS);
        // Relaxed: it only keeps the threads working at the same time; no data depends on it.
        WARM.fetch_add(1, Ordering::Relaxed);
        while WARM.load(Ordering::Relaxed) < threads {
            thread::yield_now();
        }
        // SAFETY: no preconditions.
        unsafe { libc::getppid() };
        round(OPERATIONS);
        // SAFETY: as above.
        unsafe { libc::getppid() };
    };
    let workers: Vec<_> = (0..threads)
        .map(|number| thread::spawn(move || worker(number)))
        .collect();
    workers.into_iter().for_each(|worker| worker.join().unwrap());
}

#[track_caller]
fn steady(name: &str, threads: usize) {
    if is_child() {
        return work(threads);
    }
    if !traceable() {
        return eprintln!("skipped: there is no strace here that may trace");
    }
    let calls = calls_in_child(name);
    assert_eq!(calls.len(), threads, "{calls:?}");
    let forbidden = |calls: &BTreeMap<String, usize>| FORBIDDEN.iter().any(|name| calls.contains_key(*name));
    assert!(!calls.iter().any(forbidden), "calls of each thread: {calls:?}");
}

#[test]
fn one_thread_in_a_steady_state_makes_no_calls() {
    steady("steady::one_thread_in_a_steady_state_makes_no_calls", 1);
}

#[test]
fn eight_threads_in_a_steady_state_make_no_calls() {
    steady("steady::eight_threads_in_a_steady_state_make_no_calls", 8);
}
