//! Plain numbers as a source, alone and with metadata from another source.

use super::*;

#[test]
fn the_top_of_the_address_space_can_be_reserved() {
    let base = usize::MAX - 16 * GRANULE + 1;
    for bytes in [16 * GRANULE, usize::MAX] {
        let numbers = Numbers::new(base, bytes);
        assert_eq!(numbers.budget(), 16 * GRANULE);
        let pages = numbers.reserve(Purpose::Pages, 16 * GRANULE, GRANULE).expect("all");
        assert_eq!((pages.base.addr().get(), pages.bytes), (base, 16 * GRANULE));
        assert_eq!(numbers.reserve(Purpose::Pages, GRANULE, GRANULE), None);
        // SAFETY: reserved above.
        unsafe { numbers.unreserve(Purpose::Pages, pages) };
        assert_eq!(numbers.budget(), 16 * GRANULE);
    }
    assert_eq!(Numbers::new(usize::MAX, 1).budget(), 0);
}

#[test]
fn zero_is_never_handed_out() {
    let numbers = Numbers::new(0, 4 * GRANULE);
    assert_eq!(numbers.budget(), 3 * GRANULE);
    let pages = numbers
        .reserve(Purpose::Pages, 3 * GRANULE, GRANULE)
        .expect("all but the first");
    assert_eq!(pages.base.addr().get(), GRANULE);
    assert_eq!(Numbers::new(0, 0).budget(), 0);
}

#[test]
fn the_whole_address_space_is_reserved_in_larger_units() {
    let numbers = Numbers::new(0, usize::MAX);
    assert!(usize::MAX / 4 * 3 < numbers.budget());
    let pages = numbers
        .reserve(Purpose::Pages, 1 << (usize::BITS - 1), 1 << (usize::BITS - 2))
        .expect("half");
    assert_eq!(pages.base.addr().get(), 1 << (usize::BITS - 2));
    assert_eq!(numbers.reserve(Purpose::Metadata, GRANULE, GRANULE), None);
}

#[test]
fn a_split_takes_the_larger_granule_and_the_pages_budget() {
    let frames = Numbers::new(1 << 20, 1 << 24).with_granule(1 << 16);
    let split = Split::new(frames, Region::from_static(bytes(64 * GRANULE, 0)));
    assert_eq!((split.granule(), split.budget()), (1 << 16, 1 << 24));
    assert_eq!(
        (split.pages().granule(), split.metadata().granule()),
        (1 << 16, GRANULE)
    );
    const { assert!(!<Split<Numbers, Region> as Source>::COMMITS) };
    const { assert!(<Split<Simulated<true>, Region> as Source>::COMMITS) };
}
