//! Large blocks that must be zero, where part of them is backed by memory, or all, or it is unknown.

use std::alloc::GlobalAlloc;
use std::io::Write;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use pageheap::Config;
use pageheap::source::{Contents, OverSystem, Purpose, Refused, Source, System, Verbs};

use super::filter::{Refusal, refuse};
use super::*;

const MIB: usize = 1 << 20;

/// A block that must be zero is zero; then it is touched in some places or everywhere.
fn use_block(heap: &impl GlobalAlloc, size: usize, step: usize) {
    // SAFETY: the layout is not empty; reads and writes are inside the block; it is freed with its layout.
    unsafe {
        let block = heap.alloc_zeroed(layout(size));
        assert!(!block.is_null());
        let bytes = std::slice::from_raw_parts_mut(block, size);
        assert!(all_are(bytes, 0), "of {size} bytes, touched every {step}");
        bytes.iter_mut().step_by(step).for_each(|byte| *byte = 0xee);
        heap.dealloc(block, layout(size));
    }
}

/// Like `use_block`, but checks only where it touches.
fn touch_block(size: usize, step: usize) {
    // SAFETY: as in `use_block`.
    unsafe {
        let block = HEAP.alloc_zeroed(layout(size));
        for at in (0..size).step_by(step) {
            assert_eq!(block.add(at).replace(1), 0, "{at} of {size}");
        }
        HEAP.dealloc(block, layout(size));
    }
}

/// Whether the system reports which memory is not zero.
fn is_told() -> bool {
    let bytes = 64 * System.granule();
    let pages = System.reserve(Purpose::Pages, bytes, System.granule());
    let start = pages.expect("64 pages").base;
    // SAFETY: just reserved, prepared before it is used, and never unreserved.
    unsafe {
        System.prepare(Purpose::Pages, start, bytes).expect("64 pages");
        System.clear(start, bytes).is_ok()
    }
}

/// Whether this is a process for the test of this name alone, in which the system reports that. If it is none, the test
/// has run in one.
fn is_alone_and_told(name: &str) -> bool {
    if !is_child() {
        // With huge pages, one byte would back 512 pages. Where the system is short of memory, a background thread
        // would give some back.
        let mut alone = command(name);
        alone.envs([("PAGEHEAP_HUGE_PAGES", "avoid"), ("PAGEHEAP_BACKGROUND", "0")]);
        assert!(ends_well(&mut alone));
        return false;
    }
    let is_told = is_told();
    if !is_told {
        println!("skipped: this system does not say what is zero");
    }
    is_told
}

/// Pages that were never written to are not written to, and so get no memory, however often the block is reused.
#[test]
fn what_is_zero_is_not_written() {
    if !is_alone_and_told("zeroed::what_is_zero_is_not_written") {
        return;
    }
    // For the last size, the system is asked several times.
    for size in [MIB, 3 * MIB, 16 * MIB, 64 * MIB, by_width(700, 128) * MIB] {
        touch_block(size, size / 16);
        let (before, calls) = (resident(), HEAP.stats().pages.calls);
        (0..50).for_each(|_| touch_block(size, size / 16));
        let (after, new) = (resident(), HEAP.stats().pages.calls);
        println!(
            "{} MiB: {} KiB more, {} questions",
            size >> 20,
            after.saturating_sub(before) >> 10,
            new.clear - calls.clear
        );
        assert!(after <= before + size / 8, "{before}, then {after}, of {size}");
        let questions = new.clear - calls.clear;
        assert!((40..=50).contains(&questions), "{questions}: some are known to be zero");
        assert_eq!(
            new.release, calls.release,
            "nothing given back, and nothing faulted in again"
        );
    }
}

/// What is written because the last use was dense is dense itself, whatever the program does with it.
#[test]
fn a_use_that_becomes_sparse_again_is_noticed() {
    if !is_alone_and_told("zeroed::a_use_that_becomes_sparse_again_is_noticed") {
        return;
    }
    let size = 3 * MIB;
    touch_block(size, size / 16);
    let before = resident();
    use_block(&HEAP, size, 1);
    (0..600).for_each(|_| touch_block(size, size / 16));
    let after = resident();
    assert!(after <= before + size / 8, "{before}, then {after}, of {size}");
}

/// A block at the heap's end that was used and freed is where a longer one begins, for which the heap grows: the pages
/// that are new are not written to, whoever may be asked what is zero.
#[test]
fn what_the_heap_has_grown_by_is_not_written() {
    const NAME: &str = "zeroed::what_the_heap_has_grown_by_is_not_written";
    if !is_child() {
        let mut alone = command(NAME);
        alone.env("PAGEHEAP_HUGE_PAGES", "avoid");
        return assert!(ends_well(&mut alone));
    }
    static DEAF: GlobalHeap = GlobalHeap::new().background(false).sparse_zeroing(false);
    let (short, long) = (layout(3 * MIB), layout(16 * MIB));
    // SAFETY: no layout is empty; reads and writes are inside the blocks; each is freed with its layout.
    unsafe {
        let used = DEAF.alloc(short);
        assert!(!used.is_null());
        used.write_bytes(0xee, short.size());
        DEAF.dealloc(used, short);
        let before = resident();
        let block = DEAF.alloc_zeroed(long);
        let more = resident().saturating_sub(before);
        assert_eq!(block, used, "it begins there");
        assert!(more < MIB, "{more} bytes more, of {}", long.size());
        assert!(all_are(std::slice::from_raw_parts(block, long.size()), 0));
        DEAF.dealloc(block, long);
    }
}

/// In the `static`, or in the environment.
#[test]
fn nobody_is_asked_where_that_is_not_wished() {
    const NAME: &str = "zeroed::nobody_is_asked_where_that_is_not_wished";
    if !is_child() {
        return assert!(ends_well(command(NAME).env("PAGEHEAP_SPARSE_ZEROING", "0")));
    }
    static DEAF: GlobalHeap = GlobalHeap::new().background(false).sparse_zeroing(false);
    for _ in 0..10 {
        use_block(&HEAP, MIB, 100_000);
        use_block(&DEAF, MIB, 100_000);
    }
    assert_eq!((HEAP.stats().pages.calls.clear, DEAF.stats().pages.calls.clear), (0, 0));
}

/// A dense block is written in full, and the system is hardly ever asked about it.
#[test]
fn what_is_dense_is_written() {
    if !is_child() {
        return assert!(run("zeroed::what_is_dense_is_written"));
    }
    for size in [MIB, 2 * MIB] {
        let before = HEAP.stats().pages.calls.clear;
        (0..200).for_each(|_| use_block(&HEAP, size, 500));
        let questions = HEAP.stats().pages.calls.clear - before;
        assert!((1..=10).contains(&questions), "{questions}");
    }
}

/// By several threads, in no order, and while memory is given back.
#[test]
fn every_block_is_zero() {
    if !is_child() {
        return assert!(run("zeroed::every_block_is_zero"));
    }
    let rounds = if cfg!(debug_assertions) { 30 } else { 300 };
    std::thread::scope(|scope| {
        for seed in 1..4 {
            scope.spawn(move || every_way(&HEAP, rounds, seed));
        }
        for _ in 0..rounds {
            HEAP.release(4 * MIB);
        }
    });
}

fn every_way(heap: &impl GlobalAlloc, rounds: usize, seed: usize) {
    let mut random = seed;
    for _ in 0..rounds {
        random = random.wrapping_mul(1_103_515_245).wrapping_add(12345) & 0x7fff_ffff;
        let size = MIB + (random >> 8) % (if random & 64 == 0 { 40 } else { 3 } * MIB);
        use_block(heap, size, [5000, 100_000, size / 3][random % 3]);
    }
}

/// The file cannot be opened, or gives no answer.
#[test]
fn where_nobody_answers() {
    const NAME: &str = "zeroed::where_nobody_answers";
    const WHAT: &str = "PAGEHEAP_TEST_REFUSES";
    if !is_child() {
        for what in ["openat", "ioctl"] {
            assert!(ends_well(command(NAME).env(WHAT, what)), "{what}");
        }
        return;
    }
    refuse(&[match std::env::var(WHAT).as_deref() {
        Ok("openat") => Refusal::new(libc::SYS_openat, libc::EPERM),
        _ => Refusal::new(libc::SYS_ioctl, libc::ENOTTY),
    }]);
    // SAFETY: reads a number.
    let errno = || unsafe { *libc::__errno_location() };
    // SAFETY: as above; it is written.
    unsafe { *libc::__errno_location() = 77 };
    every_way(&HEAP, 10, 1);
    assert_eq!(errno(), 77);
    assert!(!is_told());
}

/// Whether one of this process's first files is a pagemap. Allocates no memory.
fn has_pagemap() -> bool {
    (3..64).any(|file: u8| {
        let (mut name, mut target) = ([0_u8; 32], [0_u8; 64]);
        write!(&mut name[..], "/proc/self/fd/{file}").expect("room for the zero behind it, too");
        // SAFETY: a path that ends with zero, and a place to write to.
        let len = unsafe { libc::readlink(name.as_ptr().cast(), target.as_mut_ptr().cast(), target.len()) };
        usize::try_from(len).is_ok_and(|len| target[..len].ends_with(b"/pagemap"))
    })
}

/// The file that is asked is open for some microseconds; a child forked in that time would keep it for ever. A fork
/// waits for 0.1 s at most: one that took nearly that does not count.
#[test]
fn no_child_inherits_the_question() {
    if !is_child() {
        return assert!(run("zeroed::no_child_inherits_the_question"));
    }
    let done = std::sync::atomic::AtomicBool::new(false);
    let quick = std::cell::Cell::new(0);
    let inherited = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                touch_block(MIB, 1 << 16);
            }
        });
        let children = (0..200).filter(|_| {
            let begin = Instant::now();
            // SAFETY: the child checks its files and exits.
            let (status, took) = unsafe {
                let child = libc::fork();
                if child == 0 {
                    libc::_exit(has_pagemap().into());
                }
                let took = begin.elapsed();
                let mut status = -1;
                assert_eq!(libc::waitpid(child, &mut status, 0), child);
                (status, took)
            };
            assert!(libc::WIFEXITED(status), "{status}");
            quick.set(quick.get() + usize::from(took < Duration::from_millis(80)));
            libc::WEXITSTATUS(status) != 0 && took < Duration::from_millis(80)
        });
        let inherited = children.count();
        done.store(true, Ordering::Relaxed);
        inherited
    });
    println!("{} questions", HEAP.stats().pages.calls.clear);
    assert_eq!(inherited, 0, "of 200 children");
    assert!(quick.get() > 100, "{} of 200 forks were quick", quick.get());
}

/// The system, except that it clears what it is asked to, or destroys half of the contents or nothing, and refuses.
struct Vague {
    asked: AtomicUsize,
    cleared: AtomicUsize,
}

// SAFETY: every verb is the system's, or writes to all of the range it is given; after a refusal the contents are
// unknown.
unsafe impl Verbs for Vague {
    unsafe fn clear(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        let part = [bytes, bytes / 2, 0][asked % 3];
        // SAFETY: the caller's promise.
        unsafe { start.write_bytes(0, part) };
        if part == bytes {
            self.cleared.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        Err(Refused)
    }
}

#[test]
fn a_refusal_is_of_contents_that_nobody_knows() {
    if !is_child() {
        return assert!(run("zeroed::a_refusal_is_of_contents_that_nobody_knows"));
    }
    static SOURCE: OverSystem<Vague> = OverSystem(Vague {
        asked: AtomicUsize::new(0),
        cleared: AtomicUsize::new(0),
    });
    // SAFETY: the system's pages are memory.
    static VAGUE: GlobalHeap<&OverSystem<Vague>> =
        unsafe { GlobalHeap::with_source(&SOURCE, Config::new(by_width(1 << 32, 512 << 20))) };
    every_way(&VAGUE, if cfg!(debug_assertions) { 60 } else { 600 }, 7);
    let [asked, cleared] = [&SOURCE.asked, &SOURCE.cleared].map(|count| count.load(Ordering::Relaxed));
    assert!(
        asked > 2 * cleared && cleared > 2,
        "{asked} questions, {cleared} answers"
    );
    VAGUE.check().unwrap();
}

/// The system, except that what is released stays as it was, for who knows how long.
struct Reluctant {
    asked: AtomicUsize,
}

// SAFETY: the verbs are the system's, or do nothing and promise nothing.
unsafe impl Verbs for Reluctant {
    unsafe fn release(&self, _start: NonNull<u8>, _bytes: usize) -> Result<Contents, Refused> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        Ok(Contents::Unknown)
    }

    unsafe fn clear(&self, _start: NonNull<u8>, _bytes: usize) -> Result<(), Refused> {
        Err(Refused)
    }
}

#[test]
fn what_was_released_but_may_still_be_there_is_written() {
    if !is_child() {
        return assert!(run("zeroed::what_was_released_but_may_still_be_there_is_written"));
    }
    static SOURCE: OverSystem<Reluctant> = OverSystem(Reluctant {
        asked: AtomicUsize::new(0),
    });
    // SAFETY: the system's pages are memory.
    static KEPT: GlobalHeap<&OverSystem<Reluctant>> =
        unsafe { GlobalHeap::with_source(&SOURCE, Config::new(by_width(1 << 32, 512 << 20))) };
    (0..3).for_each(|_| use_block(&KEPT, 40 * MIB, 1 << 16));
    assert!(
        SOURCE.asked.load(Ordering::Relaxed) > 0,
        "nothing was to be gained by it"
    );
}

/// The system, in granules of two pages.
struct Coarse;

// SAFETY: every verb is the system's, for longer granules.
unsafe impl Verbs for Coarse {
    fn granule(&self) -> usize {
        System.granule().max(16 << 10)
    }
}

/// A used part that ends within a granule was written, however long: nobody can clear half a granule.
#[test]
fn a_used_part_is_asked_about_up_to_the_end_of_its_granule() {
    if !is_child() {
        return assert!(run("zeroed::a_used_part_is_asked_about_up_to_the_end_of_its_granule"));
    }
    // SAFETY: the system's pages are memory.
    static COARSE: GlobalHeap<&OverSystem<Coarse>> =
        unsafe { GlobalHeap::with_source(&OverSystem(Coarse), Config::new(by_width(1 << 32, 512 << 20))) };
    let [short, long] =
        [(3 * MIB) + (8 << 10), 16 * MIB].map(|bytes| Layout::from_size_align(bytes, 16 << 10).unwrap());
    // SAFETY: no layout is empty; reads and writes are inside the blocks; each is freed with its layout.
    unsafe {
        let used = COARSE.alloc(short);
        assert!(!used.is_null());
        used.write_bytes(0xee, short.size());
        COARSE.dealloc(used, short);
        let before = COARSE.stats().pages.calls.clear;
        let block = COARSE.alloc_zeroed(long);
        assert_eq!(block, used, "it begins there");
        assert_eq!(COARSE.stats().pages.calls.clear - before, 1);
        let bytes = std::slice::from_raw_parts(block, long.size());
        assert!(all_are(bytes, 0));
        COARSE.dealloc(block, long);
    }
}
