//! A whole process on `GlobalHeap`: everything std allocates, from before `main` to after it.

#![cfg(any(unix, windows))]

use std::collections::{BTreeMap, HashMap};
use std::panic;
#[cfg(unix)]
use std::process::Command;
use std::sync::mpsc;
use std::thread;

use child::is_one as is_child;
use common::is_full;
#[cfg(unix)]
use common::{addresses, by_width, bytes::all_are};
use pageheap::GlobalHeap;

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/child.rs"]
mod child;
#[cfg(target_os = "linux")]
#[path = "../common/filter.rs"]
mod filter;
#[cfg(unix)]
mod destructors;
#[cfg(target_os = "linux")]
mod early_handlers;
mod ends;
mod footprint;
#[cfg(unix)]
mod forks;
#[cfg(unix)]
mod libraries;
#[cfg(unix)]
mod requirements;
#[cfg(unix)]
mod steady;
#[cfg(windows)]
mod windows;

#[global_allocator]
static HEAP: GlobalHeap = GlobalHeap::new();

/// Runs one test of this program in a child and says whether it succeeded.
fn run(name: &str) -> bool {
    run_with(name, &[])
}

/// Like `run`, with these environment variables.
fn run_with(name: &str, variables: &[(&str, &str)]) -> bool {
    let output = child::output(child::command(name).envs(variables.iter().copied()));
    if !output.status.success() {
        println!("{name}: {output:?}");
    }
    output.status.success()
}

/// A thread that is to be cancelled ends at the next point of cancellation. A call that is one would unwind out of the
/// allocator, and keep what it has: a snapshot its turn, for which forks wait.
#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn no_call_is_a_point_of_cancellation() {
    use std::alloc::{GlobalAlloc, Layout};
    use std::ptr;

    const NAME: &str = "no_call_is_a_point_of_cancellation";
    static WARNS: GlobalHeap = GlobalHeap::new();
    extern "C" fn life(_: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: this thread; the block is never freed.
        unsafe {
            assert_eq!(libc::pthread_cancel(libc::pthread_self()), 0);
            assert!(!WARNS.alloc(Layout::new::<u64>()).is_null());
        }
        assert!(HEAP.snapshot().resident > 0);
        ptr::null_mut()
    }
    if !is_child() {
        return assert!(run_with(NAME, &[("PAGEHEAP_LIMIT", "nonsense")]));
    }
    let (mut thread, mut result) = (0, ptr::dangling_mut());
    // SAFETY: a thread that is joined.
    unsafe {
        assert_eq!(
            libc::pthread_create(&raw mut thread, ptr::null(), life, ptr::null_mut()),
            0
        );
        assert_eq!(libc::pthread_join(thread, &raw mut result), 0);
    }
    assert!(result.is_null(), "cancelled");
}

/// The heap obeys the environment variables that the process starts with.
#[test]
#[cfg_attr(feature = "checks", ignore = "about a few bytes")]
fn the_environment_overrides_a_limit() {
    const NAME: &str = "the_environment_overrides_a_limit";
    if !is_child() {
        // The child asks for 64 MiB.
        for (limit, code) in [("48M", 1), ("200M", 0), ("nonsense", 0)] {
            let output = child::output(child::command(NAME).env("PAGEHEAP_LIMIT", limit));
            assert_eq!(output.status.code(), Some(code), "{limit}: {output:?}");
        }
        return;
    }
    let mut large = Vec::<u8>::new();
    let got = large.try_reserve_exact(64 << 20).is_ok();
    drop(large);
    std::process::exit(if got { 0 } else { 1 });
}

/// Whoever may start a program must not thereby decide how much memory it gets.
#[test]
#[cfg(target_os = "linux")]
fn a_program_with_more_rights_than_its_caller_ignores_the_environment() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;

    const NAME: &str = "a_program_with_more_rights_than_its_caller_ignores_the_environment";
    /// What a child says that has no more rights, as where the file system grants none.
    const NO_MORE: i32 = 3;
    if is_child() {
        // SAFETY: no preconditions.
        if unsafe { libc::getauxval(libc::AT_SECURE) } == 0 {
            std::process::exit(NO_MORE);
        }
        let got = Vec::<u8>::new().try_reserve_exact(64 << 20).is_ok();
        std::process::exit(if got { 0 } else { 1 });
    }
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        println!("only root can give away rights");
        return;
    }
    struct Folder(std::path::PathBuf);
    impl Drop for Folder {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }
    // A new one, so that nobody has put a link there.
    let names = (0..100).map(|number| format!("pageheap-rights-{}-{number}", std::process::id()));
    let mut folders = names.map(|name| Folder(std::env::temp_dir().join(name)));
    let folder = folders.find(|folder| std::fs::create_dir(&folder.0).is_ok()).unwrap();
    let program = folder.0.join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
    std::fs::set_permissions(&folder.0, std::fs::Permissions::from_mode(0o711)).unwrap();
    let mut nobody = child::chosen(Command::new(&program), NAME);
    nobody
        .env("PAGEHEAP_LIMIT", "48M")
        .uid(65534)
        .gid(65534)
        .current_dir("/");
    // Another test's thread may have forked while the copy was open for writing; its child has closed it soon.
    let mut tries = 500;
    let output = loop {
        match nobody.output() {
            Err(error) if error.raw_os_error() == Some(libc::ETXTBSY) && tries > 0 => tries -= 1,
            output => break output,
        }
        thread::sleep(std::time::Duration::from_millis(10));
    };
    match output {
        Ok(output) => assert!(matches!(output.status.code(), Some(0 | NO_MORE)), "{output:?}"),
        // No such user in this container, or no programs in that folder.
        Err(error) => assert!(
            matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EINVAL)),
            "{error}"
        ),
    }
}

/// A reservation too small for any program used to end the process at its first allocation, without a message.
#[test]
fn nonsense_in_the_environment_is_as_if_it_were_not_there() {
    const NAME: &str = "nonsense_in_the_environment_is_as_if_it_were_not_there";
    if !is_child() {
        for value in ["0", "1", "8192", "1023K", "64m", "-1", ""] {
            assert!(run_with(NAME, &[("PAGEHEAP_RESERVE", value)]), "{value}");
        }
        return;
    }
    let large = vec![1_u8; 16 << 20];
    assert!(HEAP.contains(large.as_ptr()));
}

/// Resident bytes of this process.
#[cfg(target_os = "linux")]
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = text.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * page()
}

/// How many mappings this process has.
#[cfg(target_os = "linux")]
fn maps() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Bytes per page, as the kernel counts them.
#[cfg(unix)]
fn page() -> usize {
    // SAFETY: reads a number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

#[test]
fn collections_hold_what_was_put_in() {
    let mut words: HashMap<String, usize> = HashMap::new();
    let mut order: BTreeMap<usize, String> = BTreeMap::new();
    for number in 0..100_000_usize {
        let word = format!("word {}", number * 7919 % 10_007);
        *words.entry(word.clone()).or_default() += 1;
        order.insert(number * 31 % 100_003, word);
        if number % 3 == 0 {
            order.pop_first();
        }
    }
    assert_eq!(words.len(), 10_007);
    assert_eq!(words.values().sum::<usize>(), 100_000);
    assert!(order.values().all(|word| words.contains_key(word)));
    let mut bytes = Vec::new();
    for number in 0..3_000_000_u32 {
        bytes.push(number as u8);
    }
    bytes.shrink_to_fit();
    assert!(bytes.iter().enumerate().all(|(number, &byte)| byte == number as u8));
}

#[test]
fn strings_cross_threads() {
    let (to, from) = mpsc::sync_channel::<(usize, Vec<String>)>(16);
    let makers: Vec<_> = (0..4)
        .map(|maker| {
            let to = to.clone();
            thread::spawn(move || {
                for round in 0..200_usize {
                    let strings = (0..100).map(|number| "x".repeat((round * number) % 3000)).collect();
                    to.send((maker * 1000 + round, strings)).unwrap();
                }
            })
        })
        .collect();
    drop(to);
    let mut total = 0;
    for (name, strings) in from {
        for (number, string) in strings.iter().enumerate() {
            assert_eq!(string.len(), (name % 1000) * number % 3000);
        }
        total += strings.len();
    }
    makers.into_iter().for_each(|maker| maker.join().unwrap());
    assert_eq!(total, 4 * 200 * 100);
}

#[test]
fn unwinding_frees_what_was_allocated() {
    if !is_child() {
        // Where no other test allocates.
        return assert!(run("unwinding_frees_what_was_allocated"));
    }
    let unwind = || {
        let caught = panic::catch_unwind(|| {
            let kept: Vec<String> = (0..100).map(|number| "y".repeat(number)).collect();
            let dropped = kept.clone();
            if dropped.len() == 100 {
                panic::panic_any(kept);
            }
        });
        let kept = caught.unwrap_err().downcast::<Vec<String>>().unwrap();
        assert_eq!(kept[99].len(), 99);
    };
    let used = || {
        HEAP.flush_thread();
        HEAP.stats().bytes_in_use()
    };
    panic::set_hook(Box::new(|_| {}));
    // First what panics allocate only once.
    (0..10).for_each(|_| unwind());
    let before = used();
    (0..1000).for_each(|_| unwind());
    let after = used();
    drop(panic::take_hook());
    // Less than the smallest block of each time.
    assert!(after < before + 8000, "{before}, then {after}: {}", HEAP.stats());
}

/// Wherever its memory lies: unwinders assume a greater alignment than Rust's library declares (rust-lang/rust#161368).
#[test]
fn many_panics_at_once_unwind() {
    let mut held = Vec::new();
    for number in 0..64_usize {
        // About the size of the object that carries a panic.
        held.push(Box::new([number; 7]));
        let caught = panic::catch_unwind(|| panic::resume_unwind(Box::new(number)));
        assert_eq!(*caught.unwrap_err().downcast::<usize>().unwrap(), number);
    }
    assert!(held.iter().enumerate().all(|(number, held)| **held == [number; 7]));
}

#[test]
#[cfg(target_os = "linux")]
fn errno_is_as_it_was() {
    use std::alloc::{Layout, alloc, dealloc, realloc};
    const VALUE: i32 = 77;
    thread::spawn(|| {
        for size in [8, 4000, 32 << 10, 100 << 10, 50 << 20] {
            // SAFETY: errno is this thread's; the blocks are freed with the layouts they were allocated with.
            unsafe {
                *libc::__errno_location() = VALUE;
                let layout = Layout::from_size_align(size, 8).unwrap();
                let mut blocks: Vec<_> = (0..by_width(200, 10)).map(|_| alloc(layout)).collect();
                assert_eq!(*libc::__errno_location(), VALUE);
                blocks[0] = realloc(blocks[0], layout, 2 * size);
                blocks[0] = realloc(blocks[0], Layout::from_size_align(2 * size, 8).unwrap(), size);
                blocks.into_iter().for_each(|block| dealloc(block, layout));
                // Without a use of the result, the compiler may assume that the allocation succeeded.
                let impossible =
                    std::hint::black_box(alloc(Layout::from_size_align(by_width(1 << 47, 1 << 30), 8).unwrap()));
                assert!(impossible.is_null());
                HEAP.flush_thread();
                HEAP.scavenge(pageheap::PageCount(1000));
                assert_eq!(*libc::__errno_location(), VALUE);
            }
        }
    })
    .join()
    .unwrap();
}

#[test]
fn the_heap_knows_what_it_has() {
    let before = HEAP.stats();
    let block = vec![1_u8; 64 << 20];
    let during = HEAP.stats();
    assert!(during.bytes_in_use() >= block.len(), "{during}");
    assert!(
        during.pages.grown > before.pages.grown || before.pages.free.0 > 8192,
        "{before}\n{during}"
    );
    drop(block);
    let text = HEAP.stats().to_string();
    assert!(text.contains("in use") && text.contains("threads"), "{text}");
}
