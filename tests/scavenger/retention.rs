//! How much is kept, second by second.

use pageheap::internals::scavenge::retention::{PERIOD, Retention};
use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn a_load_that_swings_within_ten_seconds_keeps_its_peak(
        period in 1..40_u64, most in 1000..1_000_000_usize, looks in 100..400_u64
    ) {
        let mut retention = Retention::new();
        for look in 0..looks {
            // Up and down once in `period` looks, a quarter of a second apart.
            let live = if look % period * 2 < period { most } else { most / 100 };
            let advice = retention.look(SECOND + look * PERIOD, live, 0, look);
            prop_assert!(!advice.silent);
            prop_assert!(look < period || advice.keep >= most, "{} of {most} at look {look}", advice.keep);
            prop_assert!(advice.keep <= most + most / 10);
        }
    }

    #[test]
    fn a_peak_is_forgotten_after_ten_seconds(most in 1000..1_000_000_usize, live in 0..1000_usize) {
        let mut retention = Retention::new();
        let _ = retention.look(SECOND, most, 0, 0);
        let mut keep_at = |look: u64| retention.look(SECOND + look * PERIOD, live, 0, look).keep;
        let keep: Vec<usize> = (1..60).map(&mut keep_at).collect();
        prop_assert!(keep[..35].iter().all(|&keep| keep == most + most / 10), "{keep:?}");
        prop_assert!(keep[40..].iter().all(|&keep| keep == live + live / 10), "{keep:?}");
    }

    #[test]
    fn silence_is_a_second_in_which_nothing_was_seen_to_change(
        times in prop::collection::vec((0..4 * PERIOD, any::<bool>()), 1..80)
    ) {
        let mut retention = Retention::new();
        let (mut now, mut print, mut quiet, mut looks) = (SECOND, 1, SECOND, 0);
        let _ = retention.look(now, 100, 0, print);
        for (pause, works) in times {
            now += pause;
            if works {
                (print, quiet, looks) = (print + 1, now, 0);
            } else {
                looks += 1;
            }
            let advice = retention.look(now, 100, 0, print);
            prop_assert_eq!(advice.silent, now - quiet >= SECOND && looks >= 4);
            prop_assert_eq!(advice.keep, if advice.silent { 100 } else { 110 });
        }
    }

    #[test]
    fn clocks_may_do_what_they_like(
        looks in prop::collection::vec((any::<u64>(), 0..1000_usize, any::<u64>()), 1..100)
    ) {
        let mut retention = Retention::new();
        for (now, live, print) in looks {
            prop_assert!(retention.look(now, live, 0, print).keep >= live);
        }
    }
}

#[test]
fn a_jump_of_the_clock_makes_no_silence() {
    let mut retention = Retention::new();
    let _ = retention.look(SECOND, 100, 0, 1);
    assert!(
        !retention.look(1_000 * SECOND, 100, 0, 1).silent,
        "one look is not four"
    );
    let mut retention = Retention::new();
    (0..20).for_each(|_| assert!(!retention.look(SECOND, 100, 0, 1).silent, "time stands still"));
}

#[test]
fn who_needed_more_meanwhile_was_not_silent() {
    let mut retention = Retention::new();
    for look in 0..20 {
        let advice = retention.look(SECOND + look * PERIOD, 100, 101, 1);
        assert!(!advice.silent, "look {look}");
    }
}
