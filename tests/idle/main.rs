//! Does a program that falls silent, and makes no further call into the allocator, hold memory that it does not use?
//!
//! Each test fills a process of its own and then sleeps for two seconds. It measures the process's resident size
//! afterwards and the processor time spent meanwhile. The size may be 1.10 times what is live, plus 2 MiB; the time, 1
//! % of the silence, plus 250 ms, plus what emptying caches takes beyond what the scavenger's account is charged.
//!
//! On a busy machine a sleeping thread may be woken late. So a process that misses a bound says so by its exit status
//! and is run again, twice at most: one that is late three times is late. An attempt in which threads had to wait for a
//! processor does not count, unless there are many of them.

#![cfg(target_os = "linux")]

use std::ffi::CStr;
use std::io::Write;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pageheap::GlobalHeap;

#[path = "../common/bytes.rs"]
mod bytes;
#[path = "../common/child.rs"]
mod child;
#[path = "../common/filter.rs"]
mod filter;
mod life;
#[path = "../common/random.rs"]
mod random;
mod shapes;
mod storm;

use bytes::all_are;
use child::{LATE, is_one as is_child};

#[global_allocator]
static HEAP: GlobalHeap = GlobalHeap::new();

/// How long a program is silent before it is measured.
const SILENCE: Duration = Duration::from_secs(2);

/// How long it may have worked in that time: 1 % of it, 250 ms, and what emptying caches may take uncharged. That is
/// nothing (7 ms are charged as they are), except in unoptimised builds.
const WORK: Duration = Duration::from_millis(20 + 250 + if cfg!(debug_assertions) { 200 } else { 0 });

/// How often a process may be late.
const TRIES: usize = 3;

/// The exit status of one that was late and had to wait for a processor, for this long at least; and how often one is
/// run in all.
const DISTURBED: i32 = 76;
const WAIT: Duration = Duration::from_millis(100);
const TRIES_IN_ALL: usize = 15;

/// Runs one test of this program in a child, again if it was late, and says whether it succeeded.
fn run(name: &str) -> bool {
    run_with(name, |_| ())
}

/// Like `run`, for a child that is prepared in some way.
fn run_with(name: &str, prepare: impl Fn(&mut Command)) -> bool {
    // As many at a time as there are processors, and two at most: they should not disturb each other, but most of the
    // time they sleep.
    static TURNS: [Mutex<()>; 2] = [const { Mutex::new(()) }; 2];
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let lanes = std::thread::available_parallelism().map_or(1, |lanes| lanes.get().min(TURNS.len()));
    let turn = &TURNS[NEXT.fetch_add(1, Ordering::Relaxed) % lanes];
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    let mut late = 0;
    for attempt in 1..=TRIES_IN_ALL {
        let mut command = child::command(name);
        if huge_pages_come_unasked() {
            command.env("PAGEHEAP_HUGE_PAGES", "avoid");
        }
        prepare(&mut command);
        let output = child::output(&mut command);
        print!("{}", String::from_utf8_lossy(&output.stdout));
        if output.status.success() {
            return true;
        }
        println!("{name}, attempt {attempt}: {output:?}");
        match output.status.code() {
            Some(DISTURBED) => (),
            Some(LATE) if late + 1 < TRIES => late += 1,
            _ => return false,
        }
    }
    false
}

/// Whether the kernel makes huge pages that nobody asked for. Then it takes back what was released between blocks that
/// stay (`docs/memory.md`).
fn huge_pages_come_unasked() -> bool {
    let (bytes, len) = read(c"/sys/kernel/mm/transparent_hugepage/enabled");
    bytes[..len].starts_with(b"[always]")
}

/// Reads a file without the allocator: nothing, where there is none.
fn read(path: &CStr) -> ([u8; 4096], usize) {
    let mut bytes = [0; 4096];
    // SAFETY: a path that ends with zero, and a buffer of that length.
    let read = unsafe {
        let file = libc::open(path.as_ptr(), libc::O_RDONLY);
        let read = libc::read(file, bytes.as_mut_ptr().cast(), bytes.len());
        libc::close(file);
        read
    };
    (bytes, usize::try_from(read).unwrap_or(0))
}

/// Resident bytes of anonymous memory of this process.
fn resident() -> usize {
    let (bytes, len) = read(c"/proc/self/status");
    let text = std::str::from_utf8(&bytes[..len]).expect("text");
    let line = text.lines().find(|line| line.starts_with("RssAnon")).expect("a line");
    let kib: usize = line
        .split_whitespace()
        .nth(1)
        .expect("a number")
        .parse()
        .expect("a number");
    kib << 10
}

/// Processor time of all threads of this process.
fn worked() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid place to write to.
    let read = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(read, 0);
    Duration::new(
        u64::try_from(time.tv_sec).expect("what was worked"),
        time.tv_nsec as u32,
    )
}

/// For how long this process's threads have waited for a processor; no time, where the system does not say.
fn waited() -> Duration {
    let of_thread = |name: &str| {
        let mut path = [0; 64];
        write!(&mut path[..], "/proc/self/task/{name}/schedstat").expect("room for the zero behind it, too");
        let (bytes, len) = read(CStr::from_bytes_until_nul(&path).expect("a zero"));
        let text = std::str::from_utf8(&bytes[..len]).expect("text");
        let second = text.split_whitespace().nth(1);
        second.map_or(0, |number| number.parse().expect("a number"))
    };
    let mut nanoseconds = 0;
    // SAFETY: the folder is opened, read and closed here alone, with the C library's allocator. A name ends with zero.
    unsafe {
        let folder = libc::opendir(c"/proc/self/task".as_ptr());
        while let Some(entry) = libc::readdir(folder).as_ref() {
            let name = CStr::from_ptr(entry.d_name.as_ptr()).to_str().expect("a name");
            // Not the folder itself, or the one above.
            nanoseconds += if name.starts_with('.') { 0 } else { of_thread(name) };
        }
        libc::closedir(folder);
    }
    Duration::from_nanos(nanoseconds)
}

/// Stays silent, and returns what is resident then; `before` is what the program itself has. Ends the process if it is
/// late, or has worked too long.
fn settle(before: usize, live: usize) -> usize {
    let bound = before + live + live / 10 + (2 << 20);
    let (begin, waited_before) = (worked(), waited());
    std::thread::sleep(SILENCE);
    let (now, work) = (resident(), worked() - begin);
    let wait = waited().saturating_sub(waited_before);
    println!(
        "{:.1} MiB after {} s of silence and {} ms of work; {:.1} MiB live, {:.1} before",
        mib(now),
        SILENCE.as_secs(),
        work.as_millis(),
        mib(live),
        mib(before)
    );
    if now > bound || work > WORK {
        println!(
            "{now} resident, {bound} are allowed; {work:?} worked of {WORK:?}; {wait:?} waited\n{}",
            HEAP.stats()
        );
        // Waiting is no work.
        std::process::exit(if work > WORK || wait < WAIT { LATE } else { DISTURBED });
    }
    now
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
