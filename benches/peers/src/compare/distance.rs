//! How far apart two processors are: how long a cache line takes from one to the other and back.
//!
//! ```text
//!   one     ball := 1 ──────────────▶ 2? ── ball := 3 ──────────────▶ 4?        a trip is there and back
//!   other             1? ── ball := 2 ──────────────▶ 3? ── ball := 4
//! ```
//!
//! The host of a virtual machine moves its processors, and leaves them in place for seconds or minutes, across
//! processes. On one machine a trip took 50 ns at some times and 300 at others, and the time of two threads that share
//! cache lines varies accordingly. A reader of multi-threaded rows should know which it was.
//!
//! Worked: five attempts of 500 trips, the least of them: 5 × 500 × 300 ns are less than a millisecond. If both
//! threads share one processor a trip takes as long as a time slice, so an attempt is given up after 20 ms.

use std::hint;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const TRIES: u32 = 5;
const TRIPS: u32 = 500;
const PATIENCE: Duration = Duration::from_millis(20);

/// The value that ends the game.
const OVER: u32 = u32::MAX;

/// The ball, on lines of its own.
#[repr(align(256))]
struct Ball(AtomicU32);

/// Nanoseconds there and back; `None` if the two threads did not run at once.
pub fn there_and_back() -> Option<f64> {
    let ball = Ball(AtomicU32::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                // Acquire and release, here and below: a ball that is caught was thrown.
                match ball.0.load(Ordering::Acquire) {
                    OVER => return,
                    // An exchange, because a late thread must not overwrite the end.
                    odd if odd % 2 == 1 => {
                        let _late = ball
                            .0
                            .compare_exchange(odd, odd + 1, Ordering::AcqRel, Ordering::Relaxed);
                    }
                    _ => hint::spin_loop(),
                }
            }
        });
        let end = Instant::now() + PATIENCE;
        let tries = (0..TRIES).map(|number| {
            let start = Instant::now();
            (0..TRIPS)
                .all(|trip| throw(&ball, 2 * (number * TRIPS + trip) + 1, end))
                .then(|| start.elapsed().as_secs_f64() * 1e9 / f64::from(TRIPS))
        });
        let least = tries.flatten().min_by(f64::total_cmp);
        ball.0.store(OVER, Ordering::Release);
        least
    })
}

/// Throws the ball and waits until it is back. Returns whether it came in time.
fn throw(ball: &Ball, odd: u32, end: Instant) -> bool {
    ball.0.store(odd, Ordering::Release);
    while ball.0.load(Ordering::Acquire) == odd {
        if Instant::now() > end {
            return false;
        }
        hint::spin_loop();
    }
    true
}

/// The measured distances, for the reader of a table: the median and the extremes.
pub fn text(seen: &[Option<f64>]) -> String {
    let mut trips: Vec<f64> = seen.iter().copied().flatten().collect();
    trips.sort_by(f64::total_cmp);
    let (Some(least), Some(most)) = (trips.first(), trips.last()) else {
        return "No two threads ran at once: rows of several threads say little.".to_owned();
    };
    format!(
        "A cache line went from one processor to another and back in {:.0} ns ({least:.0} to {most:.0}), looked at \
         before {} rounds of a workload; before {} more there were not two processors at once.",
        trips[trips.len() / 2],
        trips.len(),
        seen.len() - trips.len(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trip_takes_some_time_or_there_is_no_second_processor() {
        let trip = there_and_back();
        assert!(trip.is_none_or(|trip| trip > 1.0 && trip < 1e6), "{trip:?}");
    }

    #[test]
    fn what_was_seen_is_told() {
        let told = text(&[Some(50.0), None, Some(300.0), Some(60.0)]);
        assert!(
            told.contains("60 ns (50 to 300)") && told.contains("3 rounds") && told.contains("before 1 more"),
            "{told}"
        );
        assert!(text(&[None]).contains("say little"));
    }
}
