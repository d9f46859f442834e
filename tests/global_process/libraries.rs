//! Copies of the crate in libraries that are loaded and unloaded while threads that used them live on.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use super::*;

/// Tells a child process where that library is.
const LIBRARY: &str = "PAGEHEAP_TEST_LIBRARY";

/// The library of `tests/plugin`, built the way this test is: a copy for this process alone. Cargo replaces its output
/// on every call, so only one process builds and copies at a time.
fn built() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    // target/debug/deps/this: the profile's directory, and the one above it.
    let profile = exe.parent().and_then(Path::parent).unwrap();
    let lock = std::fs::File::create(profile.join("plugin.lock")).unwrap();
    lock.lock().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "-q", "--example", "plugin", "--manifest-path"]);
    cargo.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    // Built for another target, or for the host by its name: target/aarch64-unknown-linux-gnu/debug.
    let above = profile.parent().unwrap();
    let named = above.file_name().and_then(|name| name.to_str());
    // For 32-bit x86 there are i586 and i686.
    let arch = match std::env::consts::ARCH {
        "x86" => "i",
        arch => arch,
    };
    match named.filter(|name| name.starts_with(arch) && name.contains('-')) {
        Some(machine) => cargo
            .args(["--target", machine, "--target-dir"])
            .arg(above.parent().unwrap()),
        None => cargo.arg("--target-dir").arg(above),
    };
    if cfg!(feature = "checks") {
        cargo.args(["--features", "checks"]);
    }
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.status().unwrap().success());
    // Not among temporary files: where those lie, nothing may be executed on some systems.
    let copy = profile.join(format!("libplugin-{}.so", std::process::id()));
    std::fs::copy(profile.join("examples/libplugin.so"), &copy).unwrap();
    copy
}

/// An open library.
struct Library {
    handle: *mut libc::c_void,
    work: extern "C" fn(usize) -> bool,
    give: extern "C" fn(u8) -> *const u8,
    told: extern "C" fn() -> usize,
}

// SAFETY: a handle, and functions that any thread may call.
unsafe impl Sync for Library {}

impl Library {
    fn open(path: &Path) -> Self {
        let path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the library's constructors and functions are ours, and of these types.
        unsafe {
            let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            assert!(!handle.is_null(), "{:?}", std::ffi::CStr::from_ptr(libc::dlerror()));
            let [work, give, told] = [c"plugin_work", c"plugin_give", c"plugin_told"].map(|name| {
                let place = libc::dlsym(handle, name.as_ptr());
                assert!(!place.is_null(), "{name:?}");
                place
            });
            Self {
                handle,
                work: std::mem::transmute::<*mut libc::c_void, extern "C" fn(usize) -> bool>(work),
                give: std::mem::transmute::<*mut libc::c_void, extern "C" fn(u8) -> *const u8>(give),
                told: std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> usize>(told),
            }
        }
    }

    /// Unloads the library and says whether it is gone.
    fn close(self, path: &Path) -> bool {
        let path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: opened once; nothing of it is used any more except its blocks.
        unsafe {
            assert_eq!(libc::dlclose(self.handle), 0);
            libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD).is_null()
        }
    }
}

/// Bytes of address space, and resident bytes.
fn memory() -> [usize; 2] {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let mut pages = text
        .split_whitespace()
        .map(|number| number.parse::<usize>().unwrap() * page());
    [pages.next().unwrap(), pages.next().unwrap()]
}

/// Requirement 23: threads survive dlclose, and a hundred reloads leak nothing.
#[test]
fn a_library_with_a_heap_may_be_unloaded_a_hundred_times_while_its_threads_live() {
    let name = "libraries::a_library_with_a_heap_may_be_unloaded_a_hundred_times_while_its_threads_live";
    if !is_child() {
        return assert!(run(name));
    }
    let path = built();
    let reload = |round: usize| {
        let library = Library::open(&path);
        let (used, closed) = (Barrier::new(4), Barrier::new(4));
        let gone = thread::scope(|scope| {
            for seed in 0..3 {
                let (work, used, closed) = (library.work, &used, &closed);
                scope.spawn(move || {
                    assert!(work(round + seed));
                    used.wait();
                    closed.wait();
                    // The thread ends here and runs its key destructors.
                });
            }
            assert!((library.work)(round));
            used.wait();
            let gone = library.close(&path);
            closed.wait();
            gone
        });
        assert!(gone, "somebody keeps the library");
    };
    (0..5).for_each(reload);
    let (before, maps_before) = (memory(), maps());
    (0..100).for_each(reload);
    let (after, maps_after) = (memory(), maps());
    // 256 MiB of addresses (stacks and the C library's own), 16 MiB of memory.
    assert!(after[0] <= before[0] + (256 << 20), "{before:?}, {after:?}");
    assert!(after[1] <= before[1] + (16 << 20), "{before:?}, {after:?}");
    assert!(maps_after <= maps_before + 20, "{maps_before}, {maps_after}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_block_outlives_the_library_it_came_from() {
    if !is_child() {
        return assert!(run("libraries::a_block_outlives_the_library_it_came_from"));
    }
    let path = built();
    let mut blocks = Vec::new();
    let before = memory();
    for round in 0..40 {
        let library = Library::open(&path);
        assert!((library.work)(round));
        blocks.push((library.give)(round as u8));
        assert!(library.close(&path));
    }
    for (round, &block) in blocks.iter().enumerate() {
        // SAFETY: 100 bytes that are never freed.
        let bytes = unsafe { std::slice::from_raw_parts(block, 100) };
        assert!(all_are(bytes, round as u8));
    }
    // Each costs its pages, not its heap's terabytes of addresses.
    let after = memory();
    assert!(after[0] <= before[0] + 40 * (64 << 20), "{before:?}, {after:?}");
    assert!(after[1] <= before[1] + 40 * (1 << 20), "{before:?}, {after:?}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn sixteen_copies_live_side_by_side() {
    if !is_child() {
        // With 32-bit pointers, each would take a quarter of all addresses.
        let variables: &[_] = if usize::BITS < u64::BITS {
            &[("PAGEHEAP_RESERVE", "64M")]
        } else {
            &[]
        };
        return assert!(run_with("libraries::sixteen_copies_live_side_by_side", variables));
    }
    let path = built();
    let folder = path.with_extension("copies");
    std::fs::create_dir_all(&folder).unwrap();
    let paths: Vec<_> = (0..16)
        .map(|number| folder.join(format!("libcopy{number}.so")))
        .collect();
    for copy in &paths {
        std::fs::copy(&path, copy).unwrap();
    }
    let libraries: Vec<_> = paths.iter().map(|copy| Library::open(copy)).collect();
    for round in 0..3 {
        thread::scope(|scope| {
            let libraries = &libraries;
            let threads = [0, 1, 2, 3]
                .map(|seed| scope.spawn(move || assert!(libraries.iter().all(|library| (library.work)(round + seed)))));
            // Joined, so that they have ended completely: the scope alone does not wait for that, and the libraries are
            // closed next.
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
    for (library, path) in libraries.into_iter().zip(&paths) {
        assert!(library.close(path));
    }
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::remove_file(path).unwrap();
}

/// A library loaded at program start, whose heap is opened by another library's constructor: so early that its exit
/// handler is registered before the C library's own. Threads that run to the very end keep their heap.
#[test]
fn a_heap_that_opens_in_another_librarys_constructor_stays_until_the_end() {
    const NAME: &str = "libraries::a_heap_that_opens_in_another_librarys_constructor_stays_until_the_end";
    if !is_child() {
        let path = built();
        let other = path.with_extension("other.so");
        std::fs::copy(&path, &other).unwrap();
        let name = |path: &Path| path.file_name().unwrap().display().to_string();
        let output = child::command(NAME)
            .env(LIBRARY, &path)
            .env("PAGEHEAP_TEST_EARLY", "1")
            // The library named last is initialised first. There may be spaces in the folder's name.
            .current_dir(path.parent().unwrap())
            .env("LD_PRELOAD", format!("./{} ./{}", name(&other), name(&path)))
            .output()
            .unwrap();
        std::fs::remove_file(path).unwrap();
        std::fs::remove_file(other).unwrap();
        return assert_eq!(output.status.code(), Some(7), "{output:?}");
    }
    let library = Library::open(Path::new(&std::env::var_os(LIBRARY).unwrap()));
    let worked = Barrier::new(4);
    thread::scope(|scope| {
        for seed in 0..3 {
            let (work, worked) = (library.work, &worked);
            scope.spawn(move || {
                assert!(work(seed));
                worked.wait();
                while work(seed) {}
            });
        }
        worked.wait();
        std::process::exit(7);
    });
}

/// Makes the library's heap start its thread, and returns once that thread has called the pressure hook.
fn wait_for_a_hook(library: &Library) {
    let begin = Instant::now();
    while (library.told)() == 0 {
        assert!(begin.elapsed() < Duration::from_secs(60), "nobody tells of pressure");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Unloading waits for the heap's thread, which waits for any thread that opens or closes a heap: the unloading thread
/// must not be one.
#[test]
fn a_library_is_unloaded_while_its_hook_opens_a_heap() {
    if !is_child() {
        return assert!(run("libraries::a_library_is_unloaded_while_its_hook_opens_a_heap"));
    }
    let path = built();
    // SAFETY: no preconditions. If the test fails, it would hang without this.
    unsafe { libc::alarm(60) };
    let library = Library::open(&path);
    wait_for_a_hook(&library);
    assert!(library.close(&path));
    std::fs::remove_file(path).unwrap();
}

/// A program closes its libraries in an exit handler of its own: the heap's thread must not lose its code.
#[test]
fn a_library_that_is_closed_at_exit_keeps_its_thread() {
    const NAME: &str = "libraries::a_library_that_is_closed_at_exit_keeps_its_thread";
    if !is_child() {
        return assert!(run(NAME));
    }
    static HANDLE: AtomicPtr<libc::c_void> = AtomicPtr::new(std::ptr::null_mut());
    extern "C" fn close() {
        // SAFETY: opened and not closed yet; usleep has no preconditions. In that time the thread wakes up.
        unsafe {
            libc::dlclose(HANDLE.load(Ordering::Relaxed));
            libc::usleep(1_500_000);
        }
    }
    // Registered before the library is loaded, so it runs after the library's own exit handler.
    // SAFETY: a function that is never unloaded.
    assert_eq!(unsafe { libc::atexit(close) }, 0);
    let path = built();
    let library = Library::open(&path);
    wait_for_a_hook(&library);
    std::fs::remove_file(path).unwrap();
    HANDLE.store(library.handle, Ordering::Relaxed);
    std::process::exit(0);
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Closes the library, and gives a thread left behind the time to run into unmapped code.
fn close_and_wait(library: Library, path: &Path, threads_before: usize) {
    assert!(library.close(path), "somebody keeps the library");
    thread::sleep(Duration::from_millis(2500));
    assert_eq!(threads(), threads_before);
    std::fs::remove_file(path).unwrap();
}

/// The heap opened too early to learn of the end, never asked again, and yet started a thread.
#[test]
fn a_library_whose_constructor_allocates_takes_its_thread_with_it() {
    const NAME: &str = "libraries::a_library_whose_constructor_allocates_takes_its_thread_with_it";
    if !is_child() {
        return assert!(run_with(NAME, &[("PAGEHEAP_TEST_OWN", "1")]));
    }
    let path = built();
    let library = Library::open(&path);
    let (before, begin) = (threads(), Instant::now());
    while threads() == before {
        assert!(begin.elapsed() < Duration::from_secs(60), "no thread");
        assert!((library.work)(1));
    }
    close_and_wait(library, &path, before);
}

#[test]
fn a_library_that_allocates_only_as_it_is_closed_starts_no_thread() {
    const NAME: &str = "libraries::a_library_that_allocates_only_as_it_is_closed_starts_no_thread";
    if !is_child() {
        return assert!(run_with(NAME, &[("PAGEHEAP_TEST_LATE", "1")]));
    }
    let path = built();
    let library = Library::open(&path);
    let before = threads();
    close_and_wait(library, &path, before);
}

/// Closes a library while another thread forks: that one holds the library's heaps, and lets them go in a handler that
/// the C library forgets meanwhile.
#[test]
fn a_library_may_be_closed_while_another_thread_forks() {
    if !is_child() {
        return assert!(run("libraries::a_library_may_be_closed_while_another_thread_forks"));
    }
    static FORKS: AtomicBool = AtomicBool::new(false);
    /// Runs after the library's own, which is registered later, and takes its time.
    extern "C" fn linger() {
        FORKS.store(true, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(300));
    }
    // SAFETY: a function that is never unloaded; no preconditions. If the test fails, it would hang without the alarm.
    unsafe {
        libc::alarm(60);
        assert_eq!(libc::pthread_atfork(Some(linger), None, None), 0);
    }
    let path = built();
    for round in 0..3 {
        let library = Library::open(&path);
        assert!((library.work)(round));
        FORKS.store(false, Ordering::Relaxed);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut status = 0;
                // SAFETY: the child ends at once.
                unsafe {
                    let child = libc::fork();
                    if child == 0 {
                        libc::_exit(0);
                    }
                    assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                }
                assert_eq!(status, 0);
            });
            while !FORKS.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            assert!(library.close(&path), "somebody keeps the library");
        });
    }
    std::fs::remove_file(path).unwrap();
}

/// Whether the C library lets a handler of a fork close a library: before 2.36 that waits for itself.
fn handlers_may_close() -> bool {
    // SAFETY: returns a string that ends with zero and stays.
    let version = unsafe { std::ffi::CStr::from_ptr(libc::gnu_get_libc_version()) };
    let mut numbers = version
        .to_str()
        .unwrap()
        .split('.')
        .map(|number| number.parse().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(2_u32), Some(36))
}

/// A handler of a fork closes a library that holds its heaps for that fork: before it, in the parent or in the child,
/// which has no thread of the heap's to wait for.
#[test]
fn a_library_may_be_closed_by_a_handler_of_a_fork() {
    const NAME: &str = "libraries::a_library_may_be_closed_by_a_handler_of_a_fork";
    const PLACE: &str = "PAGEHEAP_TEST_PLACE";
    static HANDLES: [AtomicPtr<libc::c_void>; 3] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 3];
    extern "C" fn close<const PLACE: usize>() {
        let handle = HANDLES[PLACE].swap(std::ptr::null_mut(), Ordering::Relaxed);
        // SAFETY: a library that nobody uses any more.
        assert!(handle.is_null() || unsafe { libc::dlclose(handle) } == 0);
    }
    if !handlers_may_close() {
        return;
    }
    if !is_child() {
        for place in ["0", "1", "2"] {
            assert!(run_with(NAME, &[(PLACE, place)]), "{place}");
        }
        return;
    }
    let place: usize = std::env::var(PLACE).unwrap().parse().unwrap();
    // SAFETY: functions that are never unloaded; no preconditions. If the test fails, it would hang without the alarms.
    unsafe {
        libc::alarm(60);
        assert_eq!(
            libc::pthread_atfork(Some(close::<0>), Some(close::<1>), Some(close::<2>)),
            0
        );
        let path = built();
        let library = Library::open(&path);
        wait_for_a_hook(&library);
        HANDLES[place].store(library.handle, Ordering::Relaxed);
        let is_gone = || {
            let name = CString::new(path.to_str().unwrap()).unwrap();
            libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD).is_null()
        };
        let child = libc::fork();
        if child == 0 {
            libc::alarm(10);
            libc::_exit(i32::from(is_gone() != (place != 1)));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert_eq!((status, is_gone()), (0, place != 2));
        std::fs::remove_file(path).unwrap();
    }
}

/// A thread that is to be cancelled ends at the next point of cancellation. Closing a library waits for its heap's
/// thread, and must not be one in the middle of that.
#[test]
fn a_library_may_be_closed_by_a_thread_that_is_to_be_cancelled() {
    static HANDLE: AtomicPtr<libc::c_void> = AtomicPtr::new(std::ptr::null_mut());
    extern "C" fn life(_: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: this thread; a library that nobody uses any more.
        unsafe {
            assert_eq!(libc::pthread_cancel(libc::pthread_self()), 0);
            assert_eq!(libc::dlclose(HANDLE.load(Ordering::Relaxed)), 0);
        }
        std::ptr::null_mut()
    }
    if !is_child() {
        return assert!(run(
            "libraries::a_library_may_be_closed_by_a_thread_that_is_to_be_cancelled"
        ));
    }
    let path = built();
    let library = Library::open(&path);
    wait_for_a_hook(&library);
    HANDLE.store(library.handle, Ordering::Relaxed);
    let (mut closer, mut result) = (0, std::ptr::dangling_mut());
    // SAFETY: a thread that is joined. If the test fails, it would hang without the alarm.
    unsafe {
        libc::alarm(60);
        assert_eq!(
            libc::pthread_create(&raw mut closer, std::ptr::null(), life, std::ptr::null_mut()),
            0
        );
        assert_eq!(libc::pthread_join(closer, &raw mut result), 0);
    }
    assert!(result.is_null(), "cancelled");
    std::fs::remove_file(path).unwrap();
}
