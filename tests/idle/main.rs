//! Does a program that falls silent hold what it does not use? Without one more call into the allocator.
//!
//! Each test fills a process of its own and then sleeps; what is looked at is the process's resident size, never the
//! time. The bound is 1.10 of what is live, and 2 MiB.

#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

use std::process::Command;
use std::time::Duration;

use pageheap::GlobalHeap;

mod life;
mod shapes;
mod storm;

#[global_allocator]
static HEAP: GlobalHeap = GlobalHeap::new();

const CHILD: &str = "PAGEHEAP_TEST_CHILD";

/// How long a program is silent before it is looked at. The promise is two seconds; a machine that is busy otherwise
/// may be late.
const SILENCE: Duration = Duration::from_secs(2);
const MOST_SILENCE: Duration = Duration::from_secs(20);

/// Runs one test of this program in a child; whether it ended well.
fn run(name: &str) -> bool {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, name)
        .output()
        .unwrap();
    print!("{}", String::from_utf8_lossy(&output.stdout));
    if !output.status.success() {
        println!("{name}: {output:?}");
    }
    output.status.success()
}

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// A file read without the allocator.
fn read(path: &std::ffi::CStr) -> ([u8; 4096], usize) {
    let mut bytes = [0; 4096];
    // SAFETY: a path that ends with zero, and a buffer of that length.
    let read = unsafe {
        let file = libc::open(path.as_ptr(), libc::O_RDONLY);
        let read = libc::read(file, bytes.as_mut_ptr().cast(), bytes.len());
        libc::close(file);
        read
    };
    (bytes, usize::try_from(read).expect("it can be read"))
}

/// Resident bytes of this process: of anonymous memory.
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

/// Silence, and then what is resident, as soon as it is within the bound; `before` is what the program itself has.
fn settle(before: usize, live: usize) -> usize {
    let bound = before + live + live / 10 + (2 << 20);
    std::thread::sleep(SILENCE);
    let mut waited = SILENCE;
    while resident() > bound && waited < MOST_SILENCE {
        std::thread::sleep(Duration::from_millis(500));
        waited += Duration::from_millis(500);
    }
    let now = resident();
    println!(
        "{:.1} MiB after {:.1} s of silence; {:.1} MiB live, {:.1} before",
        mib(now),
        waited.as_secs_f64(),
        mib(live),
        mib(before)
    );
    assert!(now <= bound, "{} resident, {bound} are allowed\n{}", now, HEAP.stats());
    now
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
