//! The controller always yields a number; the pauses keep the promise, whatever clocks and sleeps do.

use pageheap::internals::scavenge::pacer::{Controller, Pacer, QUANTUM};
use proptest::prelude::*;

use super::*;

/// Any number, finite or not.
fn number() -> impl Strategy<Value = f64> {
    prop_oneof![
        any::<f64>(),
        (-10.0..10.0_f64),
        Just(f64::NAN),
        Just(f64::INFINITY),
        Just(f64::MIN),
        Just(0.0)
    ]
}

proptest! {
    #[test]
    fn the_output_is_a_number_within_its_limits(steps in prop::collection::vec((number(), number(), number()), 1..60)) {
        let mut controller = Controller::default();
        for (input, wanted, period) in steps {
            let output = controller.next(input, wanted, period);
            prop_assert!((Controller::LEAST..=Controller::MOST).contains(&output), "{output} of {controller:?}");
        }
    }

    #[test]
    fn it_recovers_from_anything(steps in prop::collection::vec((number(), number(), number()), 0..20)) {
        let mut controller = Controller::default();
        for (input, wanted, period) in steps {
            let _ = controller.next(input, wanted, period);
        }
        // Then a well-behaved plant for a while: an hour of quanta.
        let (mut share, mut worked, mut passed) = (0.01, 0.0, 0.0);
        for round in 0..40_000 {
            let ratio = controller.next(share, 0.01, 1e6 / share);
            let pause = (1e6 / ratio).min(1e10);
            share = 1e6 / (1e6 + pause);
            if round >= 20_000 {
                worked += 1e6;
                passed += 1e6 + pause;
            }
        }
        prop_assert!((0.002..0.05).contains(&(worked / passed)), "{} of {controller:?}", worked / passed);
    }

    #[test]
    fn work_is_a_hundredth_and_a_burst_at_most(
        steps in prop::collection::vec((0..3 * QUANTUM, any::<bool>(), 0..30 * SECOND, 1..400_u64), 1..300)
    ) {
        // Starts with a full account; each look may come late, and sleeps may take up to four times too long.
        let mut pacer = Pacer::new();
        let (begin, mut now, mut total) = (1_000 * SECOND, 1_000 * SECOND, 0);
        for (worked, hurry, idle, late) in steps {
            now += worked;
            total += worked;
            let most = (now - begin) / 100 + 250 * MILLISECOND + 2 * 3 * QUANTUM;
            prop_assert!(total <= most, "{total} worked of {most} after {}", now - begin);
            let pause = pacer.pause(now, worked, 0, hurry);
            now += pause * late.max(100) / 100;
            if late % 7 == 0 {
                now += idle;
            }
        }
    }

    #[test]
    fn clocks_may_do_what_they_like(
        steps in prop::collection::vec((any::<u64>(), any::<u64>(), any::<usize>(), any::<bool>()), 1..100)
    ) {
        let mut pacer = Pacer::new();
        for (now, worked, granules, hurry) in steps {
            let pause = pacer.pause(now, worked, granules, hurry);
            prop_assert!(pause <= 2000 * SECOND, "{pause}");
        }
    }
}

#[test]
fn the_share_comes_to_a_hundredth_though_sleeps_are_long() {
    for (factor, more) in [(1.0, 0.0), (1.5, 0.0), (1.0, 60e3), (3.0, 4e6)] {
        let mut pacer = Pacer::new();
        let (mut now, mut worked, mut begin) = (SECOND, 0, 0);
        for round in 0..30_000 {
            if round == 15_000 {
                (worked, begin) = (0, now);
            }
            now += QUANTUM;
            worked += QUANTUM;
            let pause = pacer.pause(now, QUANTUM, 0, false);
            now += (pause as f64 * factor + more) as u64;
        }
        let share = worked as f64 / (now - begin) as f64;
        assert!(
            (0.007..=0.0101).contains(&share),
            "{share} where sleeps are {factor} times, and {more} ns, too long"
        );
    }
}

/// Looks cost what the heap is large: they come less often, and the account and the controller take both into account.
#[test]
fn looks_take_half_of_the_share_at_most() {
    for look in [
        0,
        20_000,
        MILLISECOND,
        4 * MILLISECOND,
        30 * MILLISECOND,
        100 * MILLISECOND,
    ] {
        let mut pacer = Pacer::new();
        let (period, rounds) = (250 * MILLISECOND, 30_000);
        let (begin, mut now, mut next) = (SECOND, SECOND, SECOND);
        let (mut looked, mut released) = (0, 0);
        for _ in 0..rounds {
            if now >= next {
                now += look;
                looked += look;
                pacer.looked(look, period);
                next = now + pacer.between_looks(period, false);
            }
            now += QUANTUM;
            released += QUANTUM;
            let pause = pacer.pause(now, QUANTUM, 0, false);
            now += pause;
            let most = (now - begin) / 100 + 250 * MILLISECOND + QUANTUM + look;
            assert!(looked + released <= most, "{looked} and {released} of {most}");
        }
        let share = |worked: u64| worked as f64 / (now - begin) as f64;
        assert!(share(looked) <= 0.0051, "{look}: looks take {}", share(looked));
        assert!(
            share(released) >= 0.0035,
            "{look}: the releasing gets {}",
            share(released)
        );
        assert!(
            share(looked + released) >= 0.007,
            "{look}: {}",
            share(looked + released)
        );
    }
}

#[test]
fn looks_that_find_nothing_new_are_frequent_while_half_of_the_account_is_left() {
    let (mut pacer, period, look) = (Pacer::new(), 250 * MILLISECOND, 10 * MILLISECOND);
    pacer.looked(look, period);
    assert_eq!(pacer.between_looks(period, false), period, "it may have been held up");
    let mut frequent = 1;
    loop {
        pacer.looked(look, period);
        assert_eq!(pacer.between_looks(period, false), 200 * look);
        if pacer.between_looks(period, true) > period {
            break;
        }
        frequent += 1;
    }
    assert_eq!(frequent, 12, "125 ms are left");
    // Clocks may do what they like.
    for apart in [200 * look, 200 * SECOND] {
        pacer.looked(u64::MAX, period);
        assert_eq!(pacer.between_looks(period, true), apart);
    }
}

#[test]
fn a_hurry_is_half_of_a_processor_until_the_account_is_empty() {
    let mut pacer = Pacer::new();
    let (mut now, mut worked) = (100 * SECOND, 0);
    while worked < 240 * QUANTUM {
        now += QUANTUM;
        worked += QUANTUM;
        let pause = pacer.pause(now, QUANTUM, 0, true);
        assert_eq!(pause, QUANTUM);
        now += pause;
    }
    for _ in 0..30 {
        now += QUANTUM;
        now += pacer.pause(now, QUANTUM, 0, true);
    }
    assert!(now - 100 * SECOND > SECOND, "then it is a hundredth");
}

/// A trim is charged 25 ms at most, and the debt is slept off even if there is nothing else to pay for.
#[test]
fn trimming_empties_the_account_and_makes_no_pause_of_its_own() {
    let (mut pacer, now) = (Pacer::new(), 100 * SECOND);
    assert_eq!(pacer.pause(now, 0, 0, true), 0);
    for left in (0..250).step_by(25).rev() {
        pacer.charge(SECOND);
        assert_eq!(pacer.pause(now, 0, 0, true), 0, "{left} ms left");
    }
    pacer.charge(3 * MILLISECOND);
    assert_eq!(pacer.pause(now, 0, 0, true), 300 * MILLISECOND);
    assert_eq!(pacer.pause(now + 300 * MILLISECOND, 0, 0, true), 0, "slept off");
}

#[test]
fn a_clock_that_stands_still_pays_for_its_granules() {
    let mut pacer = Pacer::new();
    // 10 µs each: a hundred take a millisecond, so five hundred cost half a second of pauses; the account pays for 50
    // such steps.
    let pauses: Vec<u64> = (0..100).map(|_| pacer.pause(0, 0, 500, false)).collect();
    assert!(pauses.iter().all(|&pause| pause > 0));
    assert!(pauses[60..].iter().all(|&pause| pause >= SECOND), "{pauses:?}");
}
