//! While memory is given back: no live page is altered, nothing is wrongly reported as zero, and a refusing system is
//! tolerated.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::filter::{Refusal, refuse};
use super::random::Random;
use super::shapes::blocks;
use super::*;

/// Allocates, verifies and frees blocks with a stamp in each page, until `stop`.
fn stamp(stop: &AtomicBool, seed: u64) -> usize {
    let mut random = Random(seed);
    let mut kept: Vec<(*mut u8, Layout, u64)> = Vec::new();
    let mut looks = 0;
    while !stop.load(Ordering::Relaxed) || !kept.is_empty() {
        let grow = !stop.load(Ordering::Relaxed) && random.below(200) >= kept.len();
        if grow {
            let most = [3000, 70_000, 600_000][random.below(3)];
            let layout = Layout::from_size_align(1 + random.below(most), 8).unwrap();
            let (zeroed, mark) = (random.below(3) == 0, random.below(1 << 30) as u64);
            // SAFETY: the layout is not empty; every write and read is inside the block.
            unsafe {
                let block = if zeroed { alloc_zeroed(layout) } else { alloc(layout) };
                assert!(!block.is_null());
                for at in (0..layout.size()).step_by(1024) {
                    assert!(!zeroed || block.add(at).read() == 0, "told to be zero");
                    block.add(at).write((mark >> (at / 1024 % 8)) as u8);
                }
                kept.push((block, layout, mark));
            }
        } else {
            let (block, layout, mark) = kept.swap_remove(random.below(kept.len()));
            // SAFETY: as above; the block is freed with its layout.
            unsafe {
                for at in (0..layout.size()).step_by(1024) {
                    assert_eq!(
                        block.add(at).read(),
                        (mark >> (at / 1024 % 8)) as u8,
                        "{at} of {layout:?}"
                    );
                    looks += 1;
                }
                dealloc(block, layout);
            }
        }
    }
    looks
}

/// Three threads stamp for a while, as another releases what it can.
fn storm(time: Duration) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop = &stop;
        let stamping: Vec<_> = (1..4)
            .map(|seed| scope.spawn(move || stamp(stop, seed * 0x9E37_79B9)))
            .collect();
        let releasing = scope.spawn(|| {
            let mut released = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                released += HEAP.release(usize::MAX) as u64;
                HEAP.scavenge(pageheap::PageCount(300));
            }
            released
        });
        thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        let looks: usize = stamping.into_iter().map(|thread| thread.join().unwrap()).sum();
        println!("{looks} looks, {} MiB released", releasing.join().unwrap() >> 20);
        assert!(looks > 1000);
    });
}

#[test]
fn nobodys_page_is_altered_in_a_storm_of_releases() {
    if !is_child() {
        return assert!(run("storm::nobodys_page_is_altered_in_a_storm_of_releases"));
    }
    storm(Duration::from_secs(4));
}

#[test]
fn without_madvise_all_works_and_nothing_is_said_to_be_zero() {
    if !is_child() {
        return assert!(run("storm::without_madvise_all_works_and_nothing_is_said_to_be_zero"));
    }
    refuse(&[Refusal::new(libc::SYS_madvise, libc::EPERM)]);
    drop(blocks(64 << 20, 5000));
    storm(Duration::from_secs(2));
    assert_eq!(HEAP.release(usize::MAX), 0);
}

/// As much as a process may usually lock without privileges.
const LOCKED: usize = 32 << 10;

/// Whether this process may lock that much: by its limit, or by its capabilities (bit 14 allows locking memory).
fn may_be_locked() -> bool {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a valid place to write to.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) }, 0);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let rights = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    let rights = u64::from_str_radix(rights.trim(), 16).unwrap();
    limit.rlim_cur >= LOCKED as libc::rlim_t || rights >> 14 & 1 == 1
}

#[test]
fn locked_pages_are_not_said_to_be_zero() {
    if !is_child() {
        return assert!(run("storm::locked_pages_are_not_said_to_be_zero"));
    }
    let layout = Layout::from_size_align(512 << 10, 4096).unwrap();
    // SAFETY: the layout is not empty; only the block is locked and written.
    unsafe {
        let block = alloc(layout);
        block.write_bytes(7, layout.size());
        // If nothing may be locked, there is nothing to test.
        let locked = libc::mlock(block.add(128 << 10).cast(), LOCKED) == 0;
        assert_eq!(locked, may_be_locked(), "{}", std::io::Error::last_os_error());
        dealloc(block, layout);
        HEAP.release(usize::MAX);
        for _ in 0..4 {
            let again = alloc_zeroed(layout);
            assert!(
                (0..layout.size()).all(|at| again.add(at).read() == 0),
                "locked: {locked}"
            );
            again.write_bytes(9, layout.size());
            dealloc(again, layout);
            HEAP.release(usize::MAX);
        }
    }
}

#[test]
fn a_quarter_of_a_gigabyte_of_data_is_enough() {
    if !is_child() {
        return assert!(run("storm::a_quarter_of_a_gigabyte_of_data_is_enough"));
    }
    let limit = libc::rlimit {
        rlim_cur: 256 << 20,
        rlim_max: 256 << 20,
    };
    // SAFETY: the limit is read from a valid place.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &limit) }, 0);
    let layout = Layout::from_size_align(1 << 20, 8).unwrap();
    let fill = || {
        // SAFETY: the layout is not empty.
        let blocks: Vec<_> = (0..400)
            .map(|_| unsafe { alloc(layout) })
            .take_while(|block| !block.is_null())
            .collect();
        let count = blocks.len();
        // SAFETY: freed with the layout they were allocated with.
        blocks.into_iter().for_each(|block| unsafe { dealloc(block, layout) });
        count
    };
    let (first, second) = (fill(), fill());
    assert!((128..400).contains(&first), "{first} MiB");
    assert!(second * 10 >= first * 8, "{first} MiB, then {second}");
}
