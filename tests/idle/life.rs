//! The background thread's own life: when it starts, how it deals with signals and forks, and a program that wants
//! none.

use std::sync::atomic::{AtomicUsize, Ordering};

use pageheap::source::{Source, System};

use super::filter::{Refusal, refuse_in};
use super::shapes::blocks;
use super::*;

/// Threads of this process.
fn tasks() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// The thread called `pageheap`.
fn keeper() -> Option<std::path::PathBuf> {
    let named =
        |task: &std::path::PathBuf| std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name == "pageheap\n");
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks.map(|task| task.unwrap().path()).find(named)
}

/// Bytes of mapped address space.
fn mapped() -> usize {
    let number = |text: &str| usize::from_str_radix(text, 16).unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let bounds = maps
        .lines()
        .map(|line| line.split_once(' ').unwrap().0.split_once('-').unwrap());
    bounds.map(|(from, to)| number(to) - number(from)).sum()
}

/// Waits for something that another thread is about to do.
fn soon(what: impl Fn() -> bool) -> bool {
    (0..2400).any(|_| {
        std::thread::sleep(Duration::from_millis(25));
        what()
    })
}

/// How many threads there were once the constructor below had freed a hundred MiB.
static TASKS_IN_CONSTRUCTOR: AtomicUsize = AtomicUsize::new(0);

extern "C" fn constructor() {
    // For one test only: the others measure what they use themselves.
    if child::is_of("life::it_is_not_born_in_a_constructor") {
        drop(blocks(100 << 20, 100_000));
        TASKS_IN_CONSTRUCTOR.store(tasks(), Ordering::Relaxed);
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

#[test]
fn it_is_not_born_in_a_constructor() {
    if !is_child() {
        return assert!(run("life::it_is_not_born_in_a_constructor"));
    }
    assert_eq!(TASKS_IN_CONSTRUCTOR.load(Ordering::Relaxed), 1);
}

#[test]
fn it_is_not_born_for_little() {
    if !is_child() {
        return assert!(run("life::it_is_not_born_for_little"));
    }
    let before = tasks();
    drop(blocks(256 << 10, 1000));
    assert_eq!((keeper(), tasks()), (None, before));
}

#[test]
fn it_is_born_with_the_first_mebibyte_freed() {
    if !is_child() {
        return assert!(run("life::it_is_born_with_the_first_mebibyte_freed"));
    }
    let kept = blocks(2 << 20, 1000);
    let before = mapped();
    drop(kept);
    assert!(soon(|| keeper().is_some()));
    // The only new mapping is the thread's stack: for itself, plus what the C library and thread-locals need, which is
    // little here, or the C library's minimum (more on ARM), and a guard page below.
    let (stack, own) = (mapped() - before, if cfg!(debug_assertions) { 64 } else { 16 } << 10);
    println!("{} KiB of stack", stack >> 10);
    let most = (own + (24 << 10)).max(libc::PTHREAD_STACK_MIN) + (2 * System.granule()).max(16 << 10);
    assert!((own..=most).contains(&stack), "{stack} bytes");
    let status = std::fs::read_to_string(keeper().unwrap().join("status")).unwrap();
    let blocked = status.lines().find(|line| line.starts_with("SigBlk")).unwrap();
    let blocked = u64::from_str_radix(blocked.split_whitespace().nth(1).unwrap(), 16).unwrap();
    // All signals except the two that cannot be blocked, and the C library's own: two of GNU's, three of musl's.
    assert!(blocked.count_ones() >= 59, "{blocked:#x}");
    assert!(blocked >> (libc::SIGTERM - 1) & 1 == 1 && blocked >> (libc::SIGUSR1 - 1) & 1 == 1);
}

#[test]
fn a_child_has_none_and_gets_its_own() {
    if !is_child() {
        return assert!(run("life::a_child_has_none_and_gets_its_own"));
    }
    drop(blocks(200 << 20, 1000));
    assert!(soon(|| keeper().is_some()));
    for round in 0..40 {
        // While the thread is at work, and while it sleeps.
        drop(blocks(8 << 20, 1000 + round));
        // SAFETY: the child allocates, which is what is tested, starts a thread and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let gone = keeper().is_none();
            let before = resident();
            drop(blocks(100 << 20, 3000));
            let born = round % 10 != 0 || soon(|| keeper().is_some());
            let low = round % 20 != 0 || soon(|| resident() <= before + (4 << 20));
            // SAFETY: ends the child without running the parent's handlers.
            unsafe { libc::_exit(i32::from(!gone) + 2 * i32::from(!born) + 4 * i32::from(!low)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child just forked.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
            "child {round}: {status:#x}"
        );
    }
}

/// No thread can be created from the first instruction on: there is none, everything works, and memory is given back on
/// request.
#[test]
fn it_may_be_refused() {
    const NAME: &str = "life::it_may_be_refused";
    // The C library tries the second call if the first does not exist.
    static REFUSALS: &[Refusal] = &[
        Refusal::new(libc::SYS_clone3, libc::ENOSYS),
        Refusal::new(libc::SYS_clone, libc::EAGAIN),
    ];
    if !is_child() {
        return assert!(run_with(NAME, |command| refuse_in(command, REFUSALS)));
    }
    assert!(std::thread::Builder::new().spawn(|| ()).is_err(), "the filter refuses");
    let before = resident();
    // More often than the heap tries to start it.
    for round in 0..40 {
        let kept = blocks(8 << 20, 1000 + round);
        assert!(kept.iter().all(|block| all_are(block, 1)));
    }
    assert_eq!((keeper(), tasks()), (None, 1));
    drop(blocks(64 << 20, 100_000));
    assert!(HEAP.release(usize::MAX) > 0);
    assert!(resident() <= before + (4 << 20), "{}", HEAP.stats());
}

/// Regression: a start was tried sixteen times, which a hundred freed blocks of 1 MiB used up, and never again.
#[test]
fn one_that_was_refused_for_a_while_is_started_later() {
    if !is_child() {
        return assert!(run("life::one_that_was_refused_for_a_while_is_started_later"));
    }
    let kept = blocks(2 << 20, 1000);
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a limit of this process, read and written; the hard one stays. Nothing more can be mapped, a stack, say.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_AS, &raw mut limit), 0);
        let none = libc::rlimit { rlim_cur: 1, ..limit };
        assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &none), 0);
    }
    drop(kept);
    for round in 0..40 {
        drop(blocks(4 << 20, 100_000 + round));
    }
    assert_eq!((keeper(), HEAP.has_background_thread()), (None, false));
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
    let begun = (0..600).any(|round| {
        drop(blocks(4 << 20, 100_000 + round));
        HEAP.has_background_thread()
    });
    assert!(begun && soon(|| keeper().is_some()), "{}", HEAP.stats());
}

/// Allocates and frees 100 MiB of a heap.
fn use_up(heap: &GlobalHeap) {
    use std::alloc::{GlobalAlloc, Layout};
    let layout = Layout::from_size_align(100_000, 8).unwrap();
    // SAFETY: the layout is not empty; writes are inside the block; it is freed with its layout.
    unsafe {
        let blocks: Vec<_> = (0..1000).map(|_| heap.alloc(layout)).collect();
        for block in blocks {
            block.write_bytes(1, layout.size());
            heap.dealloc(block, layout);
        }
    }
}

#[test]
fn a_word_switches_it_off() {
    static WITH: GlobalHeap = GlobalHeap::new();
    static WITHOUT: GlobalHeap = GlobalHeap::new().background(false);
    if !is_child() {
        return assert!(run("life::a_word_switches_it_off"));
    }
    let before = tasks();
    use_up(&WITHOUT);
    std::thread::sleep(SILENCE);
    assert_eq!((keeper(), tasks()), (None, before));
    let backed = WITHOUT.stats().pages.backed.0 * 8192;
    assert!(backed >= 64 << 20, "nobody gives it back: {}", WITHOUT.stats());
    // The same heap without that setting.
    use_up(&WITH);
    assert!(soon(|| tasks() == before + 1), "{} of {before}", tasks());
}

#[test]
fn a_variable_switches_it_off() {
    const NAME: &str = "life::a_variable_switches_it_off";
    if !is_child() {
        for value in ["0", "1"] {
            let set = |command: &mut std::process::Command| {
                command.env("PAGEHEAP_BACKGROUND", value);
            };
            assert!(run_with(NAME, set));
        }
        return;
    }
    let before = tasks();
    drop(blocks(100 << 20, 100_000));
    if std::env::var_os("PAGEHEAP_BACKGROUND").unwrap() == "1" {
        return assert!(soon(|| tasks() == before + 1));
    }
    std::thread::sleep(SILENCE);
    assert_eq!((keeper(), tasks()), (None, before));
    assert!(HEAP.stats().pages.backed.0 * 8192 >= 64 << 20, "{}", HEAP.stats());
}

/// Ticks by a clock that began with the program. To the background thread, whose clock is the system's, time seemed to
/// jump back and forth, and nothing seemed silent.
#[test]
fn who_ticks_beside_it_does_not_disturb_it() {
    if !is_child() {
        return assert!(run("life::who_ticks_beside_it_does_not_disturb_it"));
    }
    let before = resident();
    drop(blocks(100 << 20, 100_000));
    assert!(soon(|| keeper().is_some()));
    std::thread::spawn(|| {
        let begin = std::time::Instant::now();
        loop {
            HEAP.tick(&|| begin.elapsed());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    });
    settle(before, 0);
}

/// An allocating thread may be in a callback of the loader, as when a backtrace is made, and so hold one of its locks;
/// creating a thread waits for another if a library is being loaded. So if there are several threads, a free starts the
/// background thread.
#[test]
fn an_allocation_starts_none_where_there_are_other_threads() {
    use std::alloc::{GlobalAlloc, Layout};
    static HEAP: GlobalHeap = GlobalHeap::new();
    static MADE: [AtomicUsize; 100] = [const { AtomicUsize::new(0) }; 100];
    fn layout(number: usize) -> Layout {
        Layout::from_size_align(600 * (1 + number), 8).unwrap()
    }
    extern "C" fn allocate(_: *mut libc::dl_phdr_info, _: usize, _: *mut libc::c_void) -> libc::c_int {
        for (number, made) in MADE.iter().enumerate() {
            // SAFETY: the layout is not empty.
            let block = unsafe { HEAP.alloc(layout(number)) };
            made.store(block.expose_provenance(), Ordering::Relaxed);
        }
        1
    }
    if !is_child() {
        return assert!(run("life::an_allocation_starts_none_where_there_are_other_threads"));
    }
    let before = tasks();
    assert!(before > 1, "the harness has two");
    // SAFETY: a function of this type, which ignores its arguments.
    unsafe { libc::dl_iterate_phdr(Some(allocate), std::ptr::null_mut()) };
    assert_eq!((tasks(), keeper()), (before, None));
    for (number, made) in MADE.iter().enumerate() {
        let block = std::ptr::with_exposed_provenance_mut(made.load(Ordering::Relaxed));
        // SAFETY: allocated above, with this layout.
        unsafe { HEAP.dealloc(block, layout(number)) };
    }
    assert!(soon(|| keeper().is_some()));
}
