//! The operating system as a source, on Windows.

use pageheap::source::{HugePages, System};
use windows_sys::Win32::Foundation::{GetLastError, SetLastError};
use windows_sys::Win32::System::Memory::{MEM_COMMIT, MEM_RESERVE, MEMORY_BASIC_INFORMATION, VirtualQuery};

use super::*;

fn give_back(reservation: Reservation) {
    // SAFETY: tests give back their own reservations, at the end.
    unsafe { System.unreserve(Purpose::Pages, reservation) };
}

/// The system's word for the state of the page at `place`.
fn state(place: NonNull<u8>) -> u32 {
    let mut answer = MEMORY_BASIC_INFORMATION::default();
    // SAFETY: asks about an address, and there is a place for the answer.
    let length = unsafe { VirtualQuery(place.as_ptr().cast(), &mut answer, size_of_val(&answer)) };
    assert_eq!(length, size_of_val(&answer));
    answer.State
}

/// Pages are charged from `commit` to `release`, tables from `prepare` on; and each time they are zero at first.
#[test]
fn memory_is_committed_when_it_is_used() {
    let page = System.granule();
    let pages = System.reserve(Purpose::Pages, 64 * page, page).expect("64 pages");
    let part = at(pages, 16 * page);
    // SAFETY: used only where and while it is committed.
    unsafe {
        assert_eq!(
            System.prepare(Purpose::Pages, pages.base, 64 * page),
            Ok(Contents::Zero)
        );
        assert_eq!(state(part), MEM_RESERVE);
        for _ in 0..3 {
            assert_eq!(System.commit(part, 8 * page), Ok(()));
            assert_eq!((state(part), state(at(pages, 24 * page))), (MEM_COMMIT, MEM_RESERVE));
            let memory = std::slice::from_raw_parts_mut(part.as_ptr(), 8 * page);
            assert!(memory.iter().all(|&byte| byte == 0));
            memory.fill(0xAB);
            // What is committed already stays as it is.
            assert_eq!(System.commit(part, 9 * page), Ok(()));
            assert!(memory.iter().all(|&byte| byte == 0xAB));
            assert_eq!(System.release(part, 8 * page), Ok(Contents::Zero));
            assert_eq!((state(part), state(at(pages, 24 * page))), (MEM_RESERVE, MEM_COMMIT));
            assert_eq!(System.release(at(pages, 24 * page), page), Ok(Contents::Zero));
        }
        // Also where nothing is committed.
        assert_eq!(System.release(pages.base, 64 * page), Ok(Contents::Zero));
    }
    give_back(pages);
}

#[test]
fn every_alignment_can_be_had() {
    let page = System.granule();
    for shift in page.ilog2() as usize..=by_width(34, 27) {
        let pages = System.reserve(Purpose::Pages, 3 * page, 1 << shift).expect("addresses");
        assert_eq!(pages.base.addr().get() & ((1 << shift) - 1), 0);
        assert_eq!(
            (state(pages.base), state(at(pages, 2 * page))),
            (MEM_RESERVE, MEM_RESERVE)
        );
        give_back(pages);
    }
}

/// Threads that reserve at the same time take each other's places.
#[test]
fn threads_reserve_aligned() {
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let pages = System.reserve(Purpose::Pages, 1 << 20, 1 << 21).expect("addresses");
                    assert_eq!(pages.base.addr().get() & ((1 << 21) - 1), 0);
                    give_back(pages);
                }
            });
        }
    });
}

#[test]
fn impossible_requests_are_refused_and_the_error_code_is_kept() {
    const CODE: u32 = 4711;
    let page = System.granule();
    let largest = usize::MAX & !(page - 1);
    // SAFETY: a number of this thread.
    unsafe { SetLastError(CODE) };
    for (bytes, align) in [
        (0, page),
        (page + 1, page),
        (page, 3 * page),
        (page, 0),
        (largest, page),
        (largest, 1 << 30),
        (page, 1 << (usize::BITS - 1)),
        (1 << (usize::BITS - 2), page),
    ] {
        assert_eq!(System.reserve(Purpose::Pages, bytes, align), None, "{bytes}, {align}");
        // SAFETY: as above.
        assert_eq!(unsafe { GetLastError() }, CODE);
    }
    let pages = System.reserve(Purpose::Pages, page, page).expect("a page");
    // SAFETY: a reservation of its own; what is beyond its end belongs to nobody.
    unsafe {
        assert_eq!(
            System.commit(pages.base, 1 << 30),
            Err(Refused),
            "beyond the reservation"
        );
        assert_eq!(System.advise(pages.base, page, HugePages::Advise), Err(Refused));
        assert_eq!(System.advise(pages.base, page, HugePages::Avoid), Ok(()));
        assert_eq!(GetLastError(), CODE);
    }
    give_back(pages);
}
