//! The memory sources, each checked against the contract of `pageheap::source::Source`.
//!
//! `keeps_the_contract` checks what every source must do; what only one of them does is tested in a module of its own.
//! Tests that set process limits do so in a child process: the test starts its own executable again with an environment
//! variable, and the child runs that one test under the limit.

use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use pageheap::source::{Contents, Failure, Numbers, Purpose, Refused, Region, Reservation};
use pageheap::source::{Simulated, Source, Split, State, Verb};

#[cfg(all(unix, feature = "std", not(miri)))]
#[path = "../common/child.rs"]
mod child;
#[path = "../common/mod.rs"]
mod common;
mod numbers;
mod region;
mod simulated;
#[cfg(all(unix, feature = "std", not(miri)))]
mod system;
#[cfg(all(windows, feature = "std"))]
mod windows;

use common::by_width;
use common::bytes::all_are;

/// The granule of most sources here.
const GRANULE: usize = 4096;

/// The address `offset` bytes into a reservation.
fn at(reservation: Reservation, offset: usize) -> NonNull<u8> {
    // Wrapping, as a reservation may be plain numbers.
    NonNull::new(reservation.base.as_ptr().wrapping_add(offset)).expect("a reservation does not contain 0")
}

/// Leaked bytes, the first one `skew` bytes past a granule boundary.
fn bytes(count: usize, skew: usize) -> &'static mut [MaybeUninit<u8>] {
    let block = Box::leak(Box::<[u8]>::new_uninit_slice(count + 2 * GRANULE));
    let border = block.as_ptr().addr().wrapping_neg() & (GRANULE - 1);
    &mut block[border + skew..][..count]
}

/// Reserves for both purposes, prepares, uses metadata and gives all back, several times over so that leaks show.
fn keeps_the_contract<S: Source>(source: &S, rounds: usize) {
    let granule = source.granule();
    assert!(granule.is_power_of_two());
    let budget = source.budget();
    for _ in 0..rounds {
        let pages = source.reserve(Purpose::Pages, 4 * granule, 2 * granule).expect("pages");
        let tables = source
            .reserve(Purpose::Metadata, 2 * granule, granule)
            .expect("metadata");
        assert_eq!(pages.base.addr().get() % (2 * granule), 0);
        assert_eq!(tables.base.addr().get() % granule, 0);
        assert!(4 * granule <= pages.bytes && 2 * granule <= tables.bytes);
        // SAFETY: whole granules of fresh reservations; the metadata is memory that nothing else uses.
        unsafe {
            assert_eq!(
                source.prepare(Purpose::Metadata, at(tables, granule), granule),
                Ok(Contents::Zero)
            );
            let table = std::slice::from_raw_parts_mut(at(tables, granule).as_ptr(), granule);
            assert!(all_are(table, 0));
            table.fill(0xEE);
            assert!(source.prepare(Purpose::Pages, pages.base, 2 * granule).is_ok());
            assert!(source.prepare(Purpose::Pages, at(pages, 3 * granule), granule).is_ok());
            if S::COMMITS {
                assert_eq!(source.commit(pages.base, granule), Ok(()));
            }
            let _ = source.release(pages.base, granule);
            source.unreserve(Purpose::Pages, pages);
            source.unreserve(Purpose::Metadata, tables);
        }
        assert_eq!(source.budget(), budget);
    }
}

#[test]
fn every_source_keeps_the_contract() {
    let region = Region::from_static(bytes(64 * GRANULE, 24));
    keeps_the_contract(&region, 3);
    keeps_the_contract(&Simulated::new(GRANULE), 3);
    let device = Simulated::committing(1 << 16).with_base(by_width(1 << 40, 1 << 30));
    keeps_the_contract(&device, 3);
    device.assert_all_returned();
    keeps_the_contract(&Split::new(Numbers::new(0, 1 << 30), &region), 3);
    keeps_the_contract(&Split::new(Simulated::committing(GRANULE), &region), 3);
    #[cfg(all(any(unix, windows), feature = "std", not(miri)))]
    {
        keeps_the_contract(&pageheap::source::System, 3);
        let frames = Numbers::new(1 << 31, by_width(1 << 40, 1 << 30)).with_granule(1 << 21);
        keeps_the_contract(&Split::new(frames, pageheap::source::System), 3);
    }
}
