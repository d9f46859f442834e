//! What a general-purpose allocator must guarantee whatever happens: each test in a process of its own, as the
//! process's allocator.

#![cfg(target_os = "linux")]

use std::alloc::{GlobalAlloc, Layout, alloc, alloc_zeroed, dealloc, realloc};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pageheap::arena::ProcessHeap;
use pageheap::source::System;
use pageheap::{Config, Heap};

use super::common::random::Random;
use super::*;

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

/// Fewer rounds in unoptimised builds, unless this is a full run.
fn rounds(release: usize) -> usize {
    if cfg!(debug_assertions) && !is_full() {
        release / 10
    } else {
        release
    }
}

/// From here on the system refuses all advice.
fn refuse_advice() {
    filter::refuse(&[filter::Refusal::new(libc::SYS_madvise, libc::EPERM)]);
    // SAFETY: nothing is advised.
    let advised = unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_DONTNEED) };
    assert_eq!(advised, -1);
}

/// Requirement 1.
#[test]
fn a_layout_too_large_gets_null_and_changes_nothing() {
    if !is_child() {
        return assert!(run("requirements::a_layout_too_large_gets_null_and_changes_nothing"));
    }
    // SAFETY: null is not freed, and a failed realloc leaves the block as it is.
    unsafe {
        let block = alloc(layout(100, 8));
        block.write_bytes(9, 100);
        let before = HEAP.stats().pages.grown;
        let first = by_width(47, 30);
        for shift in first..usize::BITS as usize - 1 {
            for align in [1, 8, 4096, 1 << 21, 1 << 30] {
                let Ok(huge) = Layout::from_size_align((1 << shift) - 1 + (shift - first), align) else {
                    continue;
                };
                // Without a use of the result, the compiler may assume that the allocation succeeded.
                assert!(std::hint::black_box(alloc(huge)).is_null());
                assert!(std::hint::black_box(alloc_zeroed(huge)).is_null());
                let moved = realloc(block, layout(100, 8), huge.size().min(isize::MAX as usize - 7));
                assert!(std::hint::black_box(moved).is_null());
            }
        }
        assert!((0..100).all(|index| *block.add(index) == 9));
        assert_eq!(HEAP.stats().pages.grown, before);
        dealloc(block, layout(100, 8));
    }
}

/// Requirement 2.
#[test]
fn alignment_is_kept_up_to_2_mib_and_kept_or_refused_up_to_1_gib() {
    let name = "requirements::alignment_is_kept_up_to_2_mib_and_kept_or_refused_up_to_1_gib";
    if !is_child() {
        return assert!(run(name));
    }
    for shift in 0..=30 {
        for size in [1, 100, 5000, 70_000, 3 << 20] {
            let wanted = layout(size, 1 << shift);
            let keeps = |block: *mut u8| {
                assert!(!block.is_null() || shift > 21, "{wanted:?}");
                block.addr().is_multiple_of(wanted.align())
            };
            // SAFETY: freed with its layout at that time; null is not freed.
            unsafe {
                let [plain, zeroed] = [alloc(wanted), alloc_zeroed(wanted)];
                assert!(keeps(plain) && keeps(zeroed));
                if !zeroed.is_null() {
                    assert!((0..size).step_by(61).all(|index| *zeroed.add(index) == 0));
                    dealloc(zeroed, wanted);
                }
                if !plain.is_null() {
                    let moved = realloc(plain, wanted, 2 * size);
                    assert!(keeps(moved));
                    let (block, size) = if moved.is_null() {
                        (plain, size)
                    } else {
                        (moved, 2 * size)
                    };
                    dealloc(block, layout(size, wanted.align()));
                }
            }
        }
    }
}

/// Requirement 3: locked memory cannot be given back, and does not become zero because zeroed memory is requested.
#[test]
fn zeroed_is_zero_also_where_memory_is_locked_and_advice_refused() {
    let name = "requirements::zeroed_is_zero_also_where_memory_is_locked_and_advice_refused";
    if !is_child() {
        return assert!(run(name));
    }
    for (locked, refused) in [(false, false), (true, false), (true, true)] {
        if refused {
            refuse_advice();
        }
        let mut random = Random(3);
        for round in 0..rounds(400) {
            let size = random.size(21);
            // SAFETY: freed with the layout; locked memory is unlocked first, or stays locked.
            unsafe {
                let block = alloc_zeroed(layout(size, 8));
                assert!(
                    all_are(std::slice::from_raw_parts(block, size), 0),
                    "round {round}, {size} bytes"
                );
                block.write_bytes(0xff, size);
                if locked && round % 4 == 0 {
                    libc::mlock(block.cast(), size);
                }
                dealloc(block, layout(size, 8));
            }
            if round % 20 == 0 {
                let before = HEAP.stats().pages;
                HEAP.flush_thread();
                HEAP.scavenge(pageheap::PageCount(usize::MAX));
                let after = HEAP.stats().pages;
                assert!(
                    !refused || after.released == before.released,
                    "advice that was refused did something"
                );
            }
        }
    }
}

/// Requirements 4 and 5: no two live blocks overlap, and each keeps its bytes, over three million operations.
#[test]
fn no_two_blocks_overlap_and_each_keeps_its_bytes_over_millions_of_operations() {
    let name = "requirements::no_two_blocks_overlap_and_each_keeps_its_bytes_over_millions_of_operations";
    if !is_child() {
        return assert!(run(name));
    }
    let mut random = Random(0x5eed);
    // Each block is filled with a byte of its own: the block that was there first reveals an overlap.
    let mut live: Vec<(*mut u8, Layout, u8)> = Vec::new();
    let whole = |&(block, layout, fill): &(*mut u8, Layout, u8)| {
        // SAFETY: a live block of that size, completely filled.
        let bytes = unsafe { std::slice::from_raw_parts(block, layout.size()) };
        all_are(bytes, fill)
    };
    for step in 0..rounds(3_000_000) {
        let (what, fill) = (random.below(8), step as u8);
        let shift = if random.below(50) == 0 { 18 } else { 9 };
        let size = random.size(shift);
        if live.len() < 400 && what < 4 {
            let wanted = layout(size, 1 << random.below(8));
            // SAFETY: filled within its bounds.
            unsafe {
                let block = if what == 0 { alloc_zeroed(wanted) } else { alloc(wanted) };
                assert!(what != 0 || whole(&(block, wanted, 0)));
                block.write_bytes(fill, size);
                live.push((block, wanted, fill));
            }
        } else if !live.is_empty() {
            let place = random.below(live.len());
            let block = live.swap_remove(place);
            assert!(whole(&block), "{:?} at {:p}", block.1, block.0);
            // SAFETY: resized and freed with its layout, filled within its bounds.
            unsafe {
                if what < 6 {
                    let moved = realloc(block.0, block.1, size);
                    let kept = layout(size.min(block.1.size()), block.1.align());
                    assert!(whole(&(moved, kept, block.2)));
                    moved.write_bytes(fill, size);
                    live.push((moved, layout(size, block.1.align()), fill));
                } else {
                    dealloc(block.0, block.1);
                }
            }
        }
    }
    assert!(live.iter().all(whole));
}

/// Requirements 6 and 7: blocks cross threads that start and end, while a scavenger never rests.
#[test]
fn no_block_is_live_twice_under_threads_that_come_and_go_and_a_scavenger() {
    let name = "requirements::no_block_is_live_twice_under_threads_that_come_and_go_and_a_scavenger";
    if !is_child() {
        return assert!(run(name));
    }
    let over = AtomicBool::new(false);
    let (to, from) = mpsc::sync_channel::<(u8, Vec<u8>)>(200);
    let from = std::sync::Mutex::new(from);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                HEAP.scavenge(pageheap::PageCount(500));
            }
        });
        for wave in 0..rounds(100) {
            thread::scope(|scope| {
                for seed in 0..14_u8 {
                    let (to, from) = (to.clone(), &from);
                    scope.spawn(move || {
                        let mut random = Random(wave as u64 * 100 + u64::from(seed) + 1);
                        for _ in 0..200 {
                            let size = random.size(17);
                            if let Err(mpsc::TrySendError::Full(mine)) = to.try_send((seed, vec![seed; size])) {
                                drop(mine);
                                for (fill, bytes) in from.lock().unwrap().try_iter().take(20) {
                                    assert!(all_are(&bytes, fill));
                                }
                            }
                        }
                    });
                }
            });
        }
        over.store(true, Ordering::Relaxed);
    });
    drop(to);
    let left = from.into_inner().unwrap();
    assert!(left.iter().all(|(fill, bytes)| all_are(&bytes, fill)));
}

/// Requirement 8: two million blocks freed by threads that never allocate.
#[test]
fn two_million_blocks_freed_by_others_are_whole_and_used_again() {
    let name = "requirements::two_million_blocks_freed_by_others_are_whole_and_used_again";
    if !is_child() {
        return assert!(run(name));
    }
    let (to, from) = mpsc::sync_channel::<Vec<Box<[u64; 5]>>>(100);
    let freeing = thread::spawn(move || {
        let mut damaged = 0_usize;
        for batch in from {
            for block in batch {
                damaged += usize::from(block.iter().any(|&word| word != block[0]));
            }
        }
        damaged
    });
    for round in 0..2_000_u64 {
        to.send((0..1_000).map(|number| Box::new([round * number; 5])).collect())
            .unwrap();
    }
    drop(to);
    assert_eq!(freeing.join().unwrap(), 0);
    // All of them take 80 MB, and at most a twentieth is in use at a time.
    assert!(resident() <= 48 << 20, "{} bytes", resident());
}

/// Requirement 15.
#[test]
fn a_thread_that_begins_when_all_is_used_gets_null_and_recovers() {
    static SMALL: GlobalHeap = GlobalHeap::new().limit(8 << 20);
    use std::alloc::GlobalAlloc;
    if !is_child() {
        return assert!(run(
            "requirements::a_thread_that_begins_when_all_is_used_gets_null_and_recovers"
        ));
    }
    let wanted = layout(64 << 10, 8);
    // SAFETY: freed with the layout.
    unsafe {
        let mut all: Vec<usize> = Vec::new();
        for size in [64 << 10, 1000, 8] {
            let exhausted = || SMALL.alloc(layout(size, 8)).expose_provenance();
            let kept = std::iter::repeat_with(exhausted).take_while(|&block| block != 0);
            all.extend(kept.filter(|_| size == 64 << 10));
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                assert!(std::hint::black_box(SMALL.alloc(layout(40 << 10, 8))).is_null());
                let free = |block: usize| SMALL.dealloc(std::ptr::with_exposed_provenance_mut(block), wanted);
                all.drain(..).for_each(free);
                let block = SMALL.alloc(wanted);
                assert!(!block.is_null());
                SMALL.dealloc(block, wanted);
            });
        });
    }
}

/// Requirement 19: even if the system calls that a free makes fail.
#[test]
fn freeing_keeps_errno_also_when_its_system_calls_fail() {
    const VALUE: i32 = 77;
    if !is_child() {
        return assert!(run("requirements::freeing_keeps_errno_also_when_its_system_calls_fail"));
    }
    refuse_advice();
    // SAFETY: errno is this thread's; blocks are freed with their layouts.
    unsafe {
        for size in [8, 5000, 100_000, 8 << 20] {
            let blocks: Vec<_> = (0..50).map(|_| alloc(layout(size, 8))).collect();
            blocks.iter().for_each(|&block| block.write_bytes(1, size));
            let calls = HEAP.stats().pages.calls.release;
            *libc::__errno_location() = VALUE;
            blocks.into_iter().for_each(|block| dealloc(block, layout(size, 8)));
            HEAP.flush_thread();
            HEAP.scavenge(pageheap::PageCount(usize::MAX));
            assert_eq!(*libc::__errno_location(), VALUE);
            assert!(HEAP.stats().pages.calls.release > calls, "no call was made");
        }
    }
}

/// Requirement 22: what runs last of all, after every handler and destructor.
static AT_LAST: AtomicUsize = AtomicUsize::new(0);

#[used]
// SAFETY: the section holds function pointers; the function needs nothing of the runtime but memory.
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = {
    extern "C" fn destruct() {
        if AT_LAST.load(Ordering::Relaxed) == 1 {
            let texts: Vec<String> = (0..1000).map(|number| "u".repeat(number % 100)).collect();
            let right = texts.concat().len() == 49_500;
            drop(texts);
            // SAFETY: ends the process at once; the parent checks its status.
            unsafe { libc::_exit(if right { 0 } else { 1 }) }
        }
    }
    destruct
};

#[test]
fn destructors_of_the_program_may_allocate_while_twelve_threads_do() {
    if !is_child() {
        return (0..5).for_each(|_| {
            assert!(run(
                "requirements::destructors_of_the_program_may_allocate_while_twelve_threads_do"
            ));
        });
    }
    for seed in 0..12_u8 {
        thread::spawn(move || {
            for number in 0_usize.. {
                let block = vec![seed; number * 37 % 50_000];
                assert!(all_are(&block, seed));
            }
        });
    }
    thread::sleep(std::time::Duration::from_millis(20));
    AT_LAST.store(1, Ordering::Relaxed);
    // If the destructor did not run, the parent would see this status.
    std::process::exit(3);
}

extern "C" fn nothing(_: *mut libc::c_void) -> *mut libc::c_void {
    std::ptr::null_mut()
}

/// How much stack a thread with this function uses, measured by what it overwrites on a stack of known contents.
fn depth(start: extern "C" fn(*mut libc::c_void) -> *mut libc::c_void) -> usize {
    // More where the C library's minimum is higher: 128 KiB on ARM.
    const BYTES: usize = if libc::PTHREAD_STACK_MIN > 64 << 10 {
        libc::PTHREAD_STACK_MIN
    } else {
        64 << 10
    };
    let stack = vec![0xa5_u8; 2 * BYTES].leak();
    let skip = stack.as_ptr().align_offset(page());
    let stack = &mut stack[skip..skip + BYTES];
    // SAFETY: attributes that are initialised and used; a stack that is never freed, and a thread that is joined.
    unsafe {
        let (mut attributes, mut id) = (std::mem::zeroed(), std::mem::zeroed());
        assert_eq!(libc::pthread_attr_init(&mut attributes), 0);
        assert_eq!(
            libc::pthread_attr_setstack(&mut attributes, stack.as_mut_ptr().cast(), BYTES),
            0
        );
        assert_eq!(
            libc::pthread_create(&mut id, &attributes, start, std::ptr::null_mut()),
            0
        );
        assert_eq!(libc::pthread_join(id, std::ptr::null_mut()), 0);
    }
    BYTES - stack.iter().take_while(|&&byte| byte == 0xa5).count()
}

#[track_caller]
fn takes_at_most(start: extern "C" fn(*mut libc::c_void) -> *mut libc::c_void, bytes: usize) {
    let (with, without) = (depth(start), depth(nothing));
    assert!(
        with <= without + bytes,
        "{with} bytes, of which {without} are the C library's"
    );
}

/// Requirement 24: the deepest path.
#[test]
#[cfg_attr(any(debug_assertions, feature = "checks"), ignore = "about the build that ships")]
fn the_deepest_path_takes_four_kibibytes_of_stack() {
    extern "C" fn start(_: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: freed with the layouts; nothing else is called on this stack.
        unsafe {
            let first = alloc(Layout::new::<[u64; 4]>());
            for shift in 3..26 {
                let block = alloc(Layout::from_size_align_unchecked(1 << shift, 8));
                let moved = realloc(block, Layout::from_size_align_unchecked(1 << shift, 8), 3 << shift);
                dealloc(moved, Layout::from_size_align_unchecked(3 << shift, 8));
            }
            dealloc(first, Layout::new::<[u64; 4]>());
        }
        std::ptr::null_mut()
    }
    if !is_child() {
        return assert!(run("requirements::the_deepest_path_takes_four_kibibytes_of_stack"));
    }
    takes_at_most(start, 4 << 10);
}

/// Requirement 24: the call that opens a heap, of each kind.
#[test]
#[cfg_attr(any(debug_assertions, feature = "checks"), ignore = "about the build that ships")]
fn a_heap_opens_on_eight_kibibytes_of_stack() {
    static SECOND: GlobalHeap = GlobalHeap::new().reserve(1 << 30);
    extern "C" fn global(_: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: freed with the layout.
        unsafe {
            let block = SECOND.alloc(Layout::new::<u64>());
            assert!(!block.is_null());
            SECOND.dealloc(block, Layout::new::<u64>());
        }
        std::ptr::null_mut()
    }
    extern "C" fn value(_: *mut libc::c_void) -> *mut libc::c_void {
        assert!(Heap::new(System, Config::new(1 << 30)).is_ok());
        std::ptr::null_mut()
    }
    extern "C" fn process(_: *mut libc::c_void) -> *mut libc::c_void {
        assert!(ProcessHeap::get().is_some());
        std::ptr::null_mut()
    }
    if !is_child() {
        return assert!(run("requirements::a_heap_opens_on_eight_kibibytes_of_stack"));
    }
    takes_at_most(global, 8 << 10);
    takes_at_most(value, 8 << 10);
    takes_at_most(process, 8 << 10);
}

/// Requirement 24: a snapshot, which has 8 KiB itself, and is copied once by some compilations.
#[test]
#[cfg_attr(any(debug_assertions, feature = "checks"), ignore = "about the build that ships")]
fn a_snapshot_takes_twenty_kibibytes_of_stack() {
    extern "C" fn start(_: *mut libc::c_void) -> *mut libc::c_void {
        assert!(HEAP.snapshot().resident > 0);
        std::ptr::null_mut()
    }
    if !is_child() {
        return assert!(run("requirements::a_snapshot_takes_twenty_kibibytes_of_stack"));
    }
    takes_at_most(start, 20 << 10);
}

/// Requirement 26: twenty seconds in a full run.
#[test]
fn two_hundred_and_fifty_six_threads_damage_nothing() {
    if !is_child() {
        return assert!(run("requirements::two_hundred_and_fifty_six_threads_damage_nothing"));
    }
    let until = std::time::Instant::now() + std::time::Duration::from_secs(if is_full() { 20 } else { 4 });
    thread::scope(|scope| {
        for seed in 0..=255_u8 {
            scope.spawn(move || {
                let mut random = Random(u64::from(seed) + 1);
                let mut kept: Vec<Vec<u8>> = Vec::new();
                while std::time::Instant::now() < until {
                    kept.push(vec![seed; random.size(13)]);
                    if kept.len() > 30 {
                        let block = kept.swap_remove(random.below(30));
                        assert!(all_are(&block, seed));
                    }
                }
            });
        }
    });
}
