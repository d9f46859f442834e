//! The operating system as a source; the effect of process limits is tested in child processes.

use pageheap::source::System;

#[cfg(target_os = "linux")]
use filter::{Refusal, refuse_here};

use super::*;

#[cfg(target_os = "linux")]
#[path = "../common/filter.rs"]
mod filter;

/// More than a process can have.
const BEYOND: usize = by_width(1 << 62, 1 << 31);

/// Runs `test` of this module in a child process. Returns true in the child.
fn in_child(test: &str) -> bool {
    if !child::is_one() {
        child::runs(&format!("system::{test}"));
    }
    child::is_one()
}

fn give_back(reservation: Reservation) {
    // SAFETY: tests give back their own reservations, at the end.
    unsafe { System.unreserve(Purpose::Pages, reservation) };
}

#[test]
fn memory_is_zero_when_prepared_and_when_released() {
    let page = System.granule();
    let pages = System.reserve(Purpose::Pages, 64 * page, page).expect("64 pages");
    // SAFETY: written only where it is prepared.
    unsafe {
        let part = at(pages, 16 * page);
        assert_eq!(System.prepare(Purpose::Pages, part, 32 * page), Ok(Contents::Zero));
        let memory = std::slice::from_raw_parts_mut(part.as_ptr(), 32 * page);
        assert!(all_are(memory, 0));
        memory.fill(0xAB);
        let answer = System.release(at(pages, 20 * page), 8 * page);
        assert!(answer.is_ok());
        if cfg!(target_os = "linux") {
            assert_eq!(answer, Ok(Contents::Zero));
            assert!(all_are(&memory[4 * page..12 * page], 0));
        }
        assert!(all_are(&memory[..4 * page], 0xAB) && all_are(&memory[12 * page..], 0xAB));
        memory.fill(0xCD);
        assert_eq!(System.commit(part, 32 * page), Ok(()));
    }
    give_back(pages);
}

/// From 6.7 on, Linux knows which pages may be nonzero; only these are written.
#[test]
fn sparse_memory_is_cleared_where_it_is_not_zero() {
    let page = System.granule();
    let pages = System.reserve(Purpose::Pages, 1026 * page, page).expect("pages");
    let (first, last) = (at(pages, 0), at(pages, 1025 * page));
    // SAFETY: prepared before use; read and written only inside.
    unsafe {
        assert_eq!(System.prepare(Purpose::Pages, first, 1026 * page), Ok(Contents::Zero));
        first.write_bytes(0xAB, page);
        last.write_bytes(0xAB, page);
        let middle = at(pages, page);
        // Otherwise one byte written would count as the 512 pages of a huge page.
        let _ = System.advise(first, 1026 * page, pageheap::source::HugePages::Avoid);
        if System.clear(middle, 1024 * page).is_err() {
            give_back(pages);
            return println!("skipped: the system does not say what is zero");
        }
        let memory = std::slice::from_raw_parts_mut(middle.as_ptr(), 1024 * page);
        for (step, sparse) in [(1024, true), (100, true), (9, true), (8, false), (1, false)] {
            assert_eq!(System.release(middle, 1024 * page), Ok(Contents::Zero));
            // Pages are read too, which is no reason to clear them.
            assert_eq!(memory[0] + memory[500 * page], 0);
            memory.iter_mut().step_by(step * page).for_each(|byte| *byte = 1);
            let resident = || {
                let mut pages = [0_u8; 1024];
                assert_eq!(
                    libc::mincore(memory.as_ptr().cast_mut().cast(), 1024 * page, pages.as_mut_ptr()),
                    0
                );
                pages.iter().filter(|&&page| page & 1 != 0).count()
            };
            let before = resident();
            assert_eq!(System.clear(middle, 1024 * page).is_ok(), sparse, "one page of {step}");
            assert_eq!(resident(), before, "one page of {step}");
            assert!(!sparse || all_are(memory, 0), "one page of {step}");
        }
        for edge in [first, last] {
            assert!(
                (0..page).all(|byte| edge.add(byte).read() == 0xAB),
                "nothing beside the range"
            );
        }
    }
    give_back(pages);
}

#[test]
fn reservations_are_aligned_and_disjoint() {
    let page = System.granule();
    let mut kept: Vec<Reservation> = Vec::new();
    for shift in page.trailing_zeros()..=by_width(30, 27) as u32 {
        for bytes in [page, 3 * page, 1 << 21] {
            let pages = System
                .reserve(Purpose::Pages, bytes, 1 << shift)
                .expect("address space");
            assert_eq!(pages.base.addr().get() % (1 << shift), 0);
            assert!(bytes <= pages.bytes);
            for other in &kept {
                let (start, end) = (other.base.addr().get(), other.base.addr().get() + other.bytes);
                assert!(end <= pages.base.addr().get() || pages.base.addr().get() + pages.bytes <= start);
            }
            kept.push(pages);
        }
    }
    for pages in kept {
        // SAFETY: the ends of a reservation that is not in use.
        unsafe {
            assert_eq!(System.prepare(Purpose::Pages, pages.base, page), Ok(Contents::Zero));
            pages.base.write(1);
            let last = at(pages, pages.bytes - page);
            if last != pages.base {
                assert_eq!(System.prepare(Purpose::Pages, last, page), Ok(Contents::Zero));
                last.write(1);
            }
        }
        give_back(pages);
    }
}

#[test]
fn impossible_requests_are_refused() {
    let page = System.granule();
    let largest = usize::MAX & !(page - 1);
    assert_eq!(System.reserve(Purpose::Pages, 0, page), None);
    assert_eq!(System.reserve(Purpose::Pages, page + 1, page), None);
    assert_eq!(System.reserve(Purpose::Pages, page, 3 * page), None);
    assert_eq!(System.reserve(Purpose::Pages, largest, page), None);
    assert_eq!(System.reserve(Purpose::Pages, largest, 1 << 30), None);
    assert_eq!(System.reserve(Purpose::Pages, page, 1 << (usize::BITS - 1)), None);
    assert_eq!(System.reserve(Purpose::Pages, BEYOND, BEYOND), None);
}

#[cfg(target_os = "linux")]
#[test]
fn errno_is_kept_by_success_and_failure() {
    // SAFETY: this thread's errno.
    let errno = || unsafe { &mut *libc::__errno_location() };
    let page = System.granule();
    *errno() = 77;
    assert_eq!(System.reserve(Purpose::Pages, BEYOND, page), None);
    let pages = System
        .reserve(Purpose::Pages, page, by_width(1 << 30, 1 << 27))
        .expect("a page");
    // SAFETY: a reservation of our own; the second page deliberately no longer belongs to us.
    unsafe {
        assert!(System.prepare(Purpose::Pages, pages.base, page).is_ok());
        assert!(System.release(pages.base, page).is_ok());
        let locked = libc::mlock(pages.base.as_ptr().cast(), page) == 0;
        *errno() = 77;
        assert!(
            System.release(pages.base, page).is_err() || !locked,
            "locked memory cannot be given back"
        );
        System.unreserve(Purpose::Pages, pages);
        System.unreserve(
            Purpose::Pages,
            Reservation {
                base: at(pages, 1),
                bytes: 0,
            },
        );
    }
    let _ = System.budget();
    assert_eq!(*errno(), 77);
}

/// Sets a soft limit for this process.
fn limit(bytes: usize) {
    let mut limits = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a valid rlimit to fill and to read.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_AS, &mut limits), 0);
        limits.rlim_cur = bytes as libc::rlim_t;
        assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &limits), 0);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn the_address_space_limit_is_the_budget() {
    if !in_child("the_address_space_limit_is_the_budget") {
        return;
    }
    limit(512 << 20);
    assert_eq!(System.budget(), 384 << 20);
    assert_eq!(System.reserve(Purpose::Pages, 512 << 20, 4096 << 4), None);
    let pages = System
        .reserve(Purpose::Pages, 256 << 20, 4 << 20)
        .expect("half the limit");
    // What a first heap has reserved, a second one does not count on.
    assert_eq!(System.budget(), (512 << 20) / 4 * 3 - pages.bytes / 4 * 3);
    give_back(pages);
    assert_eq!(System.budget(), 384 << 20);
    // Aligning needs a surplus beyond the limit, so these fail; nothing must be left behind.
    for _ in 0..100 {
        let _ = System.reserve(Purpose::Pages, 64 << 20, 1 << 30).map(give_back);
    }
    give_back(
        System
            .reserve(Purpose::Pages, 256 << 20, 4 << 20)
            .expect("half the limit, again"),
    );
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_map_count_refuses_and_breaks_nothing() {
    if !in_child("a_full_map_count_refuses_and_breaks_nothing") {
        return;
    }
    let page = System.granule();
    let count = by_width(1 << 20, 1 << 18);
    let pages = System
        .reserve(Purpose::Pages, count * page, page)
        .expect("a million pages of addresses");
    // Every second page is accessible, so each adds two mappings, until there are no more.
    // SAFETY: pages of our own, each prepared once.
    let prepared = |count: usize| unsafe { System.prepare(Purpose::Pages, at(pages, 2 * count * page), page) };
    let Some(full) = (0..count / 2).find(|&count| prepared(count).is_err()) else {
        give_back(pages);
        return println!("this system counts no maps");
    };
    assert_eq!(prepared(full), Err(Refused), "refused again, and no worse");
    let mut kept = Vec::new();
    for shift in [12, 21, 30, 33].into_iter().filter(|&shift| shift < usize::BITS) {
        let align = page.max(1 << shift);
        kept.extend(System.reserve(Purpose::Pages, 3 * page, align));
        assert!(
            kept.iter()
                .all(|one: &Reservation| one.base.addr().get().is_multiple_of(page) && 3 * page <= one.bytes)
        );
    }
    give_back(pages);
    kept.into_iter().for_each(give_back);
    keeps_the_contract(&System, 1);
}

#[cfg(target_os = "linux")]
#[test]
fn a_terabyte_costs_no_memory() {
    if !in_child("a_terabyte_costs_no_memory") {
        return;
    }
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/statm").expect("own statistics");
        status
            .split(' ')
            .nth(1)
            .and_then(|pages| pages.parse::<usize>().ok())
            .expect("a number")
    };
    let before = resident();
    let Some(pages) = System.reserve(Purpose::Pages, by_width(1 << 40, 1 << 30), by_width(1 << 30, 1 << 21)) else {
        return;
    };
    let tables = System
        .reserve(Purpose::Metadata, by_width(1 << 30, 1 << 29), System.granule())
        .expect("a gigabyte, or half of one");
    // SAFETY: a Reserved range of our own.
    assert!(unsafe { System.prepare(Purpose::Metadata, tables.base, tables.bytes) }.is_ok());
    assert!(resident().saturating_sub(before) * System.granule() < 1 << 20);
    give_back(pages);
    give_back(tables);
}

/// Prepares a page, writes to it, releases it. Returns the results of `prepare` and `release`, and what the page then
/// reads.
#[cfg(target_os = "linux")]
fn use_a_page() -> (Result<Contents, Refused>, Result<Contents, Refused>, u8) {
    let page = System.granule();
    let pages = System.reserve(Purpose::Pages, page, page).expect("a page");
    // SAFETY: a page of our own, accessed only if it was prepared.
    unsafe {
        let prepared = System.prepare(Purpose::Pages, pages.base, page);
        let mut released = Err(Refused);
        let mut byte = 0;
        if prepared.is_ok() {
            pages.base.write_volatile(9);
            released = System.release(pages.base, page);
            byte = pages.base.read_volatile();
        }
        give_back(pages);
        (prepared, released, byte)
    }
}

#[cfg(target_os = "linux")]
#[test]
fn an_emulator_that_ignores_the_advice_is_found_out() {
    if in_child("an_emulator_that_ignores_the_advice_is_found_out") {
        // It pretends to have succeeded.
        refuse_here(&[Refusal::new(libc::SYS_madvise, 0)]);
        assert_eq!(use_a_page(), (Ok(Contents::Zero), Err(Refused), 9));
    }
}

/// Where `long` is 32 bits, a different call takes offsets in pages.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
const MMAP: libc::c_long = libc::SYS_mmap;
#[cfg(all(target_os = "linux", target_pointer_width = "32"))]
const MMAP: libc::c_long = libc::SYS_mmap2;

#[cfg(target_os = "linux")]
#[test]
#[cfg_attr(target_env = "musl", ignore = "its malloc, which the test uses, cannot do without")]
fn calls_refused_by_a_filter_are_not_done() {
    if in_child("calls_refused_by_a_filter_are_not_done") {
        refuse_here(&[Refusal::new(libc::SYS_madvise, libc::EPERM)]);
        assert_eq!(use_a_page(), (Ok(Contents::Zero), Err(Refused), 9));
        refuse_here(&[Refusal::new(libc::SYS_munmap, libc::ENOMEM)]);
        assert_eq!(
            use_a_page(),
            (Ok(Contents::Zero), Err(Refused), 9),
            "not given back, and nobody is told"
        );
        refuse_here(&[Refusal::new(libc::SYS_mprotect, libc::ENOSYS)]);
        assert_eq!(use_a_page(), (Err(Refused), Err(Refused), 0));
        // At least one of these must be misaligned at first. Parts that cannot be cut off stay, or the request is
        // refused.
        for _ in 0..8 {
            if let Some(pages) = System.reserve(Purpose::Pages, System.granule(), 1 << 26) {
                assert_eq!(pages.base.addr().get() % (1 << 26), 0);
            }
        }
        refuse_here(&[Refusal::new(MMAP, libc::EPERM)]);
        assert_eq!(System.reserve(Purpose::Pages, System.granule(), System.granule()), None);
    }
}
