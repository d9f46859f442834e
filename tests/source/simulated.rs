//! The checking source: it catches every illegal step and produces every requested failure.

use pageheap::source::HugePages;

use super::*;

/// Takes one step with pages, legal or not. Returns whether it succeeded.
fn step<S: Source>(source: &S, verb: Verb, start: NonNull<u8>, bytes: usize) -> bool {
    step_for(source, verb, Purpose::Pages, start, bytes)
}

/// Like `step`, for either purpose.
fn step_for<S: Source>(source: &S, verb: Verb, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> bool {
    // SAFETY: a simulated source checks every range before it does anything; that is what is tested here.
    unsafe {
        match verb {
            Verb::Reserve => source.reserve(purpose, bytes, GRANULE).is_some(),
            Verb::Prepare => source.prepare(purpose, start, bytes).is_ok(),
            Verb::Commit => source.commit(start, bytes).is_ok(),
            Verb::Release => source.release(start, bytes).is_ok(),
            Verb::ReleaseLazily => source.release_lazily(start, bytes).is_ok(),
            Verb::Advise => source.advise(start, bytes, HugePages::Advise).is_ok(),
            Verb::Unreserve => {
                source.unreserve(purpose, Reservation { base: start, bytes });
                true
            }
        }
    }
}

/// The message with which `step` panics.
fn complaint<T>(step: impl FnOnce() -> T) -> String {
    match catch_unwind(AssertUnwindSafe(step)) {
        Ok(_) => panic!("an illegal step must panic"),
        Err(message) => *message.downcast::<String>().expect("a message"),
    }
}

/// `rrrrPPRR` in granules of 4 KiB.
fn prepared() -> (Simulated<true>, Reservation) {
    let source = Simulated::committing(GRANULE);
    let pages = source.reserve(Purpose::Pages, 8 * GRANULE, GRANULE).expect("pages");
    assert!(step(&source, Verb::Prepare, at(pages, 4 * GRANULE), 4 * GRANULE));
    assert!(step(&source, Verb::Commit, at(pages, 6 * GRANULE), 2 * GRANULE));
    (source, pages)
}

/// Checks that a step on granules `from..to` of `rrrrPPRR` panics and says `why`, and changes nothing.
fn is_illegal(verb: Verb, purpose: Purpose, from: usize, to: usize, why: &str) {
    let (source, pages) = prepared();
    let before = source.states();
    let text = complaint(|| step_for(&source, verb, purpose, at(pages, from * GRANULE), (to - from) * GRANULE));
    assert!(text.contains(why) && text.contains("..rrrrPPRR..\n"), "{text}");
    assert_eq!(source.states(), before);
}

#[test]
fn every_illegal_step_panics_with_a_drawing() {
    use Purpose::{Metadata, Pages};
    is_illegal(
        Verb::Prepare,
        Pages,
        3,
        5,
        "must be [Reserved], and some of it is Prepared",
    );
    is_illegal(Verb::Prepare, Pages, 6, 8, "some of it is Ready");
    is_illegal(Verb::Prepare, Metadata, 0, 1, "in a reservation for Pages");
    is_illegal(Verb::Prepare, Pages, 2, 2, "empty");
    is_illegal(Verb::Commit, Pages, 3, 5, "some of it is Reserved");
    is_illegal(Verb::Release, Pages, 3, 8, "some of it is Reserved");
    is_illegal(Verb::Release, Pages, 7, 9, "beyond the end");
    is_illegal(Verb::Release, Pages, 9, 10, "in no reservation");
    is_illegal(Verb::ReleaseLazily, Pages, 3, 8, "some of it is Reserved");
    is_illegal(Verb::Advise, Pages, 7, 9, "beyond the end");
    is_illegal(Verb::Unreserve, Pages, 0, 7, "no such reservation");
    is_illegal(Verb::Unreserve, Pages, 1, 8, "no such reservation");
    is_illegal(Verb::Unreserve, Metadata, 0, 8, "no such reservation");
}

#[test]
fn what_is_ready_may_be_committed_again() {
    let (source, pages) = prepared();
    assert!(step(&source, Verb::Commit, at(pages, 5 * GRANULE), 2 * GRANULE));
    assert!(source.states().contains("..rrrrPRRR..\n"), "{}", source.states());
}

#[test]
fn the_drawing_shows_the_place() {
    let (source, pages) = prepared();
    let text = complaint(|| step(&source, Verb::Prepare, at(pages, 8), GRANULE));
    assert!(
        text.contains("borders of granules") && text.contains("..rrrrPPRR..\n  ^\n"),
        "{text}"
    );
    let text = complaint(|| step(&source, Verb::Commit, at(pages, 3 * GRANULE), 2 * GRANULE));
    assert!(text.contains("..rrrrPPRR..\n     ^^\n"), "{text}");
    let text = complaint(|| source.assert_ready(at(pages, 5 * GRANULE + 9), GRANULE));
    assert!(text.starts_with("use of Pages") && text.contains("Prepared"), "{text}");
    source.assert_ready(at(pages, 6 * GRANULE + 9), GRANULE);
}

#[test]
fn reservations_are_checked_and_must_come_back_once() {
    let (source, pages) = prepared();
    assert!(complaint(|| source.assert_all_returned()).starts_with("not given back:"));
    assert!(step(&source, Verb::Unreserve, pages.base, pages.bytes));
    let text = complaint(|| step(&source, Verb::Unreserve, pages.base, pages.bytes));
    assert!(text.contains("no such reservation"), "given back twice: {text}");
    source.assert_all_returned();
    for (bytes, align) in [
        (GRANULE + 1, GRANULE),
        (0, GRANULE),
        (GRANULE, 3 * GRANULE),
        (GRANULE, GRANULE / 2),
    ] {
        assert!(complaint(|| source.reserve(Purpose::Pages, bytes, align)).contains("not whole granules"));
    }
}

#[test]
fn without_commits_prepared_pages_are_ready() {
    let source = Simulated::new(GRANULE);
    let pages = source.reserve(Purpose::Pages, GRANULE, GRANULE).expect("pages");
    assert!(complaint(|| source.assert_ready(pages.base, 1)).contains("Reserved"));
    assert!(step(&source, Verb::Prepare, pages.base, GRANULE));
    source.assert_ready(pages.base, GRANULE);
    assert!(step(&source, Verb::Release, pages.base, GRANULE));
    assert!(complaint(|| step(&source, Verb::Commit, pages.base, GRANULE)).contains("nothing to commit"));
}

#[test]
fn metadata_touched_too_early_is_noticed() {
    let source = Simulated::new(GRANULE);
    let tables = source.reserve(Purpose::Metadata, 4 * GRANULE, GRANULE).expect("tables");
    // SAFETY: real memory, though not ours to touch yet; that is the point.
    unsafe {
        assert_ne!(at(tables, 100).read(), 0, "Reserved metadata does not look cleared");
        at(tables, GRANULE + 3).write(0);
    }
    let prepare = |offset, bytes| step_for(&source, Verb::Prepare, Purpose::Metadata, at(tables, offset), bytes);
    assert!(prepare(0, GRANULE));
    let text = complaint(|| prepare(GRANULE, 2 * GRANULE));
    assert!(
        text.contains("written before it was prepared, at offset 0x1003"),
        "{text}"
    );
    step_for(&source, Verb::Unreserve, Purpose::Metadata, tables.base, tables.bytes);
    source.assert_all_returned();
}

#[test]
fn ordered_failures_fire_and_change_nothing() {
    let source = Simulated::committing(GRANULE).failing(Verb::Reserve, Failure::Above(8 * GRANULE));
    assert_eq!(source.reserve(Purpose::Pages, 9 * GRANULE, GRANULE), None);
    let pages = source.reserve(Purpose::Pages, 8 * GRANULE, GRANULE).expect("not above");
    let on = |verb, index| step(&source, verb, at(pages, index * GRANULE), GRANULE);

    source.fail(Verb::Prepare, Failure::Calls { after: 1, times: 2 });
    assert_eq!(
        [0, 1, 1, 1].map(|index| on(Verb::Prepare, index)),
        [true, false, false, true]
    );
    assert!(source.states().contains("..PPrrrrrr.."), "{}", source.states());
    source.fail(Verb::Commit, Failure::Every(2));
    assert_eq!([0, 1, 1].map(|index| on(Verb::Commit, index)), [true, false, true]);
    source.fail(Verb::Release, Failure::Every(1));
    assert!(!on(Verb::Release, 0));
    assert!(
        complaint(|| on(Verb::Release, 2)).contains("Reserved"),
        "a wrong step does not hide behind a failure"
    );
    assert!(source.states().contains("..RRrrrrrr.."), "{}", source.states());
    source.heal();
    assert!(on(Verb::Release, 0));
    assert!(source.states().contains("..PRrrrrrr.."), "{}", source.states());
    assert_eq!(source.bytes_in(State::Reserved), 6 * GRANULE);
    assert_eq!((source.calls(Verb::Prepare), source.failures(Verb::Prepare)), (4, 2));
}

#[test]
fn a_failing_unreserve_loses_the_addresses() {
    let source = Simulated::new(GRANULE);
    let pages = source.reserve(Purpose::Pages, GRANULE, GRANULE).expect("pages");
    source.fail(Verb::Unreserve, Failure::Calls { after: 0, times: 1 });
    assert!(step(&source, Verb::Unreserve, pages.base, pages.bytes));
    source.assert_all_returned();
    let next = source.reserve(Purpose::Pages, GRANULE, GRANULE).expect("elsewhere");
    assert_ne!(next.base, pages.base);
    assert!(complaint(|| step(&source, Verb::Prepare, pages.base, GRANULE)).contains("in no reservation"));
}

#[test]
fn contents_are_what_was_set() {
    let source = Simulated::new(GRANULE).with_contents(Contents::Unknown);
    let pages = source.reserve(Purpose::Pages, 2 * GRANULE, GRANULE).expect("pages");
    // SAFETY: whole granules of a reservation, in order.
    unsafe {
        assert_eq!(
            source.prepare(Purpose::Pages, pages.base, GRANULE),
            Ok(Contents::Unknown)
        );
        source.set_contents(Contents::Zero);
        assert_eq!(source.release(pages.base, GRANULE), Ok(Contents::Zero));
    }
}

#[test]
fn huge_and_topmost_ranges_are_cheap() {
    let top = usize::MAX - (64 * GRANULE - 1);
    let source = Simulated::new(GRANULE).with_base(top).with_budget(usize::MAX / 2);
    let pages = source
        .reserve(Purpose::Pages, 64 * GRANULE, GRANULE)
        .expect("the very top");
    assert!(step(&source, Verb::Prepare, at(pages, 63 * GRANULE), GRANULE));
    source.assert_ready(at(pages, 64 * GRANULE - 1), 1);
    assert_eq!(source.reserve(Purpose::Pages, GRANULE, GRANULE), None, "nothing above");

    let wide = Simulated::new(GRANULE).with_budget(1 << 30);
    assert_eq!(wide.reserve(Purpose::Pages, 1 << 31, GRANULE), None, "over the budget");
    let pages = wide.reserve(Purpose::Pages, 1 << 29, 1 << 22).expect("pages");
    assert_eq!((pages.base.addr().get() % (1 << 22), wide.budget()), (0, 1 << 29));
    for index in [5, 1, 3, 2, 4] {
        assert!(step(&wide, Verb::Prepare, at(pages, index << 22), 1 << 22));
    }
    assert!(wide.states().contains("r*1024 P*5120 r*124928 \n"), "{}", wide.states());
}
