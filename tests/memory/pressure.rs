//! The files that say how short of memory the system is, changing while a program is at work.
//!
//! The program looks for them below its own folder, a test folder that contains a `proc` and a `sys`.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Instant;

use pageheap::Pressure;

use super::*;

static WATCHED: GlobalHeap = GlobalHeap::new()
    .system_root(".")
    .on_pressure(50, told)
    .on_pressure(97, alarmed);

/// What the hook was last told: percent filled, and stalled; and the total number of events.
static FILLED: AtomicU64 = AtomicU64::new(0);
static STALLED: AtomicU64 = AtomicU64::new(0);
static EVENTS: AtomicU64 = AtomicU64::new(0);
/// How often the hook of the lower threshold was called, and that of the higher one.
static TOLD: AtomicU64 = AtomicU64::new(0);
static ALARMED: AtomicU64 = AtomicU64::new(0);

/// Whether the next alarm forks; and how the child has ended.
static FORKS: AtomicBool = AtomicBool::new(false);
static STATUS: AtomicI32 = AtomicI32::new(-1);

fn alarmed(_: Pressure) {
    if FORKS.swap(false, Ordering::Relaxed) {
        fork_here();
    }
    ALARMED.fetch_add(1, Ordering::Relaxed);
}

fn told(pressure: Pressure) {
    TOLD.fetch_add(1, Ordering::Relaxed);
    FILLED.store(u64::from(pressure.filled()), Ordering::Relaxed);
    STALLED.store(u64::from(pressure.stalled), Ordering::Relaxed);
    EVENTS.fetch_add(pressure.events, Ordering::Relaxed);
}

fn write(path: impl AsRef<Path>, text: &str) {
    let path = path.as_ref();
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    // In one step: a reader must never see half of it.
    let half = path.with_extension("half");
    std::fs::write(&half, text).unwrap();
    std::fs::rename(half, path).unwrap();
}

/// Runs a test of this file in a folder of its own.
fn run_in_folder(name: &str) {
    let own = format!("pageheap-{}-{}", std::process::id(), name.replace(':', "-"));
    let folder: PathBuf = std::env::temp_dir().join(own);
    let prepare = |command: &mut Command| {
        _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        command.current_dir(&folder);
    };
    let well = child::ends_well_in_time(name, prepare);
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(well);
}

/// A program that never falls silent, and whose heap keeps its recent peak: 64 MiB, none of it in use.
struct Busy {
    over: &'static AtomicBool,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Busy {
    fn begin() -> Self {
        let over: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
        let thread = std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                // More than a shelf keeps, so that pages are taken and freed.
                for size in [200_000, 300_000, 400_000_usize] {
                    touch(size, 1);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Self {
            over,
            thread: Some(thread),
        }
    }

    /// Backs pages again that are not in use.
    fn fill(&self) {
        touch(100_000, (64 << 20) / 100_000);
        assert!(backed() >= 48 << 20, "{}", WATCHED.stats());
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Allocates `count` blocks, writes to them, and frees them.
fn touch(size: usize, count: usize) {
    use std::alloc::GlobalAlloc;
    // SAFETY: the layout is not empty; writes are inside the block; it is freed with its layout.
    unsafe {
        let blocks: Vec<_> = (0..count).map(|_| WATCHED.alloc(layout(size))).collect();
        for block in blocks {
            block.write_bytes(1, size);
            WATCHED.dealloc(block, layout(size));
        }
    }
}

fn backed() -> usize {
    WATCHED.stats().pages.backed.0 * 8192
}

/// For so long that the thread reads the files meanwhile.
const WHILE: Duration = Duration::from_millis(2500);

/// Nothing is given back for a while, though the thread has read the files.
fn stays() {
    std::thread::sleep(WHILE);
    assert!(backed() >= 48 << 20, "{}", WATCHED.stats());
}

/// How often each hook was called.
fn calls() -> (u64, u64) {
    (TOLD.load(Ordering::Relaxed), ALARMED.load(Ordering::Relaxed))
}

/// Waits until the thread has read files that say that there is enough memory.
fn until_no_hook_is_called() {
    let is_none_called = || {
        let before = calls();
        std::thread::sleep(WHILE);
        calls() == before
    };
    assert!((0..20).any(|_| is_none_called()));
}

#[test]
fn version_2_its_limit_its_events_and_its_stalls_are_followed() {
    const NAME: &str = "pressure::version_2_its_limit_its_events_and_its_stalls_are_followed";
    if !is_child() {
        return run_in_folder(NAME);
    }
    const GROUP: &str = "sys/fs/cgroup/a/b";
    let file = |name: &str, text: &str| write(Path::new(GROUP).join(name), text);
    write("proc/thread-self/cgroup", "0::/a/b\n");
    file("memory.current", "100000000\n");
    file("memory.max", "max\n");
    file("memory.high", "max\n");
    file("memory.events", "low 0\nhigh 5\nmax 0\noom 0\noom_kill 0\n");
    let busy = Busy::begin();
    busy.fill();
    stays();
    // The limit shrinks.
    file("memory.max", "105000000\n");
    assert!(soon(|| backed() < 16 << 20), "{}", WATCHED.stats());
    assert!(soon(|| FILLED.load(Ordering::Relaxed) == 95));
    // And shrinks further: now the other hook is called, and this one no longer.
    file("memory.max", "102000000\n");
    assert!(soon(|| ALARMED.load(Ordering::Relaxed) > 1));
    assert!(STALLED.load(Ordering::Relaxed) == 0 && FILLED.load(Ordering::Relaxed) == 95);
    file("memory.max", "1000000000\n");
    until_no_hook_is_called();
    // At ten percent none is.
    let before = calls();
    busy.fill();
    stays();
    assert_eq!(before, calls());
    // The limit is reached, if only for a moment.
    file("memory.events", "low 0\nhigh 6\nmax 2\noom 1\noom_kill 0\n");
    assert!(soon(|| backed() < 16 << 20), "{}", WATCHED.stats());
    assert!(soon(|| EVENTS.load(Ordering::Relaxed) == 4));
    std::thread::sleep(WHILE);
    assert_eq!(EVENTS.load(Ordering::Relaxed), 4, "told once");
    busy.fill();
    stays();
    // Tasks are stalled.
    file("memory.pressure", "some avg10=60.20 avg60=0.00 avg300=0.00 total=0\n");
    assert!(soon(|| backed() < 16 << 20), "{}", WATCHED.stats());
    assert!(soon(|| STALLED.load(Ordering::Relaxed) == 60));
    // What threads keep for themselves has been released too.
    drop(busy);
    assert!(soon(
        || WATCHED.stats().pages.cached.0 == 0 && WATCHED.stats().shelf_pages.0 == 0
    ));
}

/// Emptying the heap every second does not help a group that is full of files or of another program's memory.
#[test]
fn where_nothing_helps_less_is_tried() {
    const NAME: &str = "pressure::where_nothing_helps_less_is_tried";
    if !is_child() {
        return run_in_folder(NAME);
    }
    let file = |name: &str, text: &str| write(Path::new("sys/fs/cgroup/a").join(name), text);
    write("proc/thread-self/cgroup", "0::/a\n");
    file("memory.current", "96000000\n");
    file("memory.max", "100000000\n");
    file("memory.stat", "anon 1\nfile 60000000\ninactive_file 60000000\n");
    let busy = Busy::begin();
    busy.fill();
    stays();
    assert_eq!(TOLD.load(Ordering::Relaxed), 0);
    // It is no longer full of files. Free pages are released at looks 0, 1, 3, 7 and 15 of those that find it so.
    file("memory.stat", "anon 1\nfile 0\ninactive_file 0\n");
    assert!(soon(|| backed() < 16 << 20), "{}", WATCHED.stats());
    assert!(soon(|| TOLD.load(Ordering::Relaxed) > 8));
    busy.fill();
    std::thread::sleep(WHILE);
    let stays = backed() >= 48 << 20;
    let looks = TOLD.load(Ordering::Relaxed);
    if looks >= 15 {
        println!("{looks} looks: this machine is slow");
        std::process::exit(child::LATE);
    }
    assert!(stays, "{looks} looks: {}", WATCHED.stats());
    assert!(soon(|| backed() < 16 << 20), "{}", WATCHED.stats());
}

#[test]
fn version_1_its_limit_and_its_failures_are_followed() {
    const NAME: &str = "pressure::version_1_its_limit_and_its_failures_are_followed";
    if !is_child() {
        return run_in_folder(NAME);
    }
    const GROUP: &str = "sys/fs/cgroup/memory/docker";
    let file = |name: &str, text: &str| write(Path::new(GROUP).join(name), text);
    write("proc/thread-self/cgroup", "5:cpu:/x\n4:memory:/docker\n0::/\n");
    file("memory.usage_in_bytes", "100000000\n");
    file("memory.limit_in_bytes", "9223372036854771712\n");
    file("memory.failcnt", "7\n");
    let busy = Busy::begin();
    busy.fill();
    stays();
    file("memory.limit_in_bytes", "101000000\n");
    assert!(soon(|| backed() < 16 << 20), "{}", WATCHED.stats());
    file("memory.limit_in_bytes", "9223372036854771712\n");
    until_no_hook_is_called();
    busy.fill();
    stays();
    file("memory.failcnt", "8\n");
    assert!(soon(|| backed() < 16 << 20), "{}", WATCHED.stats());
    assert!(soon(|| EVENTS.load(Ordering::Relaxed) == 1));
    std::thread::sleep(WHILE);
    busy.fill();
    stays();
    // The figure of the whole system is used where the group has none.
    write(
        "proc/pressure/memory",
        "some avg10=11.00 avg60=0.00 avg300=0.00 total=0\n",
    );
    assert!(soon(|| backed() < 16 << 20), "{}", WATCHED.stats());
}

/// Sets how many files the process may have open; returns how many it might.
fn may_open(files: libc::rlim_t) -> libc::rlim_t {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a place to write to, and to read from.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        let before = std::mem::replace(&mut limit.rlim_cur, files);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
        before
    }
}

/// A server at its limit of open files. What could not be read counted as nothing, so at the next look all events since
/// the group was made were new.
#[test]
fn a_process_that_can_open_no_file_for_a_while_is_told_nothing_wrong() {
    const NAME: &str = "pressure::a_process_that_can_open_no_file_for_a_while_is_told_nothing_wrong";
    if !is_child() {
        return run_in_folder(NAME);
    }
    is_told_of_what_is_new(|| {
        free_some();
        std::thread::sleep(WHILE);
    });
}

/// If its group could not be found at the first look, it never was.
#[test]
fn a_process_that_can_open_no_file_at_first_is_told_later() {
    const NAME: &str = "pressure::a_process_that_can_open_no_file_at_first_is_told_later";
    if !is_child() {
        return run_in_folder(NAME);
    }
    is_told_of_what_is_new(|| ());
}

/// More than the thread is started for.
fn free_some() {
    (0..2).for_each(|_| touch(4 << 20, 1));
}

/// A process that has done this since it began can open no file for a while.
fn is_told_of_what_is_new(first: fn()) {
    let file = |name: &str, text: &str| write(Path::new("sys/fs/cgroup/a").join(name), text);
    write("proc/thread-self/cgroup", "0::/a\n");
    file("memory.current", "40000000\n");
    file("memory.max", "100000000\n");
    file("memory.events", "high 7\n");
    first();
    let enough = may_open(0);
    free_some();
    std::thread::sleep(WHILE);
    may_open(enough);
    std::thread::sleep(WHILE);
    assert_eq!(calls(), (0, 0), "{} events", EVENTS.load(Ordering::Relaxed));
    file("memory.events", "high 9\n");
    assert!(soon(|| EVENTS.load(Ordering::Relaxed) == 2));
}

#[test]
fn where_there_are_no_such_files_nothing_is_said_and_nothing_goes() {
    const NAME: &str = "pressure::where_there_are_no_such_files_nothing_is_said_and_nothing_goes";
    if !is_child() {
        return run_in_folder(NAME);
    }
    let busy = Busy::begin();
    busy.fill();
    stays();
    // Nonsense has no effect either.
    write("proc/thread-self/cgroup", "0::/a\n");
    write("proc/pressure/memory", "some avg10=lots\n");
    write("sys/fs/cgroup/a/memory.max", "-1\n");
    stays();
    assert_eq!(FILLED.load(Ordering::Relaxed) + EVENTS.load(Ordering::Relaxed), 0);
    drop(busy);
}

/// A program that only grows has nothing to give back, and needs to know most of all.
#[test]
fn a_program_that_frees_nothing_is_told_too() {
    const NAME: &str = "pressure::a_program_that_frees_nothing_is_told_too";
    if !is_child() {
        return run_in_folder(NAME);
    }
    write("proc/thread-self/cgroup", "0::/a\n");
    let file = |name: &str, text: &str| write(Path::new("sys/fs/cgroup/a").join(name), text);
    file("memory.current", "99000000\n");
    file("memory.max", "100000000\n");
    use std::alloc::GlobalAlloc;
    /// A megabyte more, given a block of 64.
    type Way = fn(*mut u8);
    let plain: Way = |_| {
        // SAFETY: the layout is not empty.
        let more = unsafe { WATCHED.alloc(layout(1 << 20)) };
        assert!(!more.is_null());
    };
    let in_place: Way = |block| {
        // SAFETY: the block's layout.
        let grown = unsafe { WATCHED.realloc(block, layout(64 << 20), 66 << 20) };
        assert!(grown == block || cfg!(feature = "checks"));
    };
    let aligned: Way = |_| {
        let layout = std::alloc::Layout::from_size_align(2 << 20, 1 << 14).unwrap();
        // SAFETY: the layout is not empty.
        let more = unsafe { WATCHED.alloc(layout) };
        assert!(!more.is_null());
    };
    for (number, way) in [plain, in_place, aligned].into_iter().enumerate() {
        assert!(is_told_after(way), "way {number}");
    }
}

/// Whether a program is told that does no more than this, given a block of 64 MiB.
fn is_told_after(way: fn(*mut u8)) -> bool {
    use std::alloc::GlobalAlloc;
    // A process of one thread: the harness has two.
    // SAFETY: the child allocates, starts a thread and exits.
    let child = unsafe { libc::fork() };
    if child != 0 {
        let mut status = 0;
        // SAFETY: waits for the child just forked.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        return status == 0;
    }
    // The first allocation does not start it, however large.
    // SAFETY: the layout is not empty.
    let block = unsafe { WATCHED.alloc(layout(64 << 20)) };
    assert!(!block.is_null());
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(ALARMED.load(Ordering::Relaxed), 0);
    way(block);
    let told = soon(|| ALARMED.load(Ordering::Relaxed) > 0);
    // SAFETY: ends the child without running the parent's handlers.
    unsafe { libc::_exit(i32::from(!told)) };
}

/// The child of this thread gets a background thread.
fn fork_here() {
    // SAFETY: the child allocates and frees, starts a thread, and exits, or is ended if it hangs.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no preconditions.
        unsafe { libc::alarm(120) };
        (0..2).for_each(|_| touch(4 << 20, 1));
        let begun = soon(|| WATCHED.has_background_thread());
        // SAFETY: ends the child without running the parent's handlers.
        unsafe { libc::_exit(i32::from(!begun)) };
    }
    let mut status = -1;
    // SAFETY: waits for the child just forked.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    STATUS.store(status, Ordering::Relaxed);
}

/// The background thread itself forks, in a hook. In the child it goes on, on its stack, and another one begins.
#[test]
fn a_child_of_the_thread_itself_gets_another_one() {
    const NAME: &str = "pressure::a_child_of_the_thread_itself_gets_another_one";
    if !is_child() {
        return run_in_folder(NAME);
    }
    write("proc/thread-self/cgroup", "0::/a\n");
    write("sys/fs/cgroup/a/memory.current", "99000000\n");
    write("sys/fs/cgroup/a/memory.max", "100000000\n");
    FORKS.store(true, Ordering::Relaxed);
    (0..2).for_each(|_| touch(4 << 20, 1));
    assert!(soon(|| ALARMED.load(Ordering::Relaxed) > 0));
    assert_eq!(STATUS.load(Ordering::Relaxed), 0);
}

/// How many files of that name the process has open.
fn open_events() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    files
        .filter_map(|file| std::fs::read_link(file.unwrap().path()).ok())
        .filter(|path| path.ends_with("memory.events"))
        .count()
}

/// If a fork happened while the thread had one of the files open, the child kept it open for ever.
#[test]
fn a_fork_waits_until_the_thread_has_closed_its_file() {
    const NAME: &str = "pressure::a_fork_waits_until_the_thread_has_closed_its_file";
    if !is_child() {
        return run_in_folder(NAME);
    }
    use std::io::Write;
    write("proc/thread-self/cgroup", "0::/a\n");
    std::fs::create_dir_all("sys/fs/cgroup/a").unwrap();
    // A pipe, so that a reader blocks until there is something to read.
    // SAFETY: a path that ends with zero.
    let made = unsafe { libc::mkfifo(c"sys/fs/cgroup/a/memory.events".as_ptr(), 0o600) };
    assert_eq!(made, 0);
    let mut options = std::fs::OpenOptions::new();
    let mut events = options
        .read(true)
        .write(true)
        .open("sys/fs/cgroup/a/memory.events")
        .unwrap();
    touch(4 << 20, 1);
    touch(4 << 20, 1);
    // After a while the fork proceeds without waiting for the thread; on a busy machine that may happen sooner. A fork
    // that comes late proves nothing.
    let mut is_closed = || {
        assert!(soon(|| open_events() == 2), "nobody reads");
        let begin = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                events.write_all(b"high 0\n").unwrap();
            });
            let before = begin.elapsed();
            // SAFETY: the child counts its open files and exits.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: as above.
                unsafe { libc::_exit(open_events() as i32) };
            }
            let took = begin.elapsed() - before;
            let mut status = 0;
            // SAFETY: waits for the child just forked.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert!(libc::WIFEXITED(status));
            let is_closed = libc::WEXITSTATUS(status) == 1;
            assert!(
                is_closed || took > Duration::from_millis(80),
                "it did not wait: {took:?}"
            );
            before < Duration::from_millis(10) && is_closed
        })
    };
    assert!((0..50).any(|_| is_closed()), "the child has the file");
}
