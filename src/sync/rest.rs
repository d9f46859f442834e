//! Waiting for another thread that will be done in a moment, if it gets a processor.
//!
//! ```text
//!   round   0 … 6      7 … 63     64, 1088, 2112 …
//!           pauses     yields     sleeps of 100 µs
//! ```
//!
//! A yield does not help a thread that has a lower priority than the waiter and is to run on the same processor: a
//! real-time thread that only yields keeps the other from running, for ever. So the waiter sleeps in the end.
//!
//! Worked: a thread that is preempted while it seizes caches is back after some milliseconds. A waiter yields 57 times,
//! and then looks every 100 µs.

#![forbid(unsafe_code)]

use core::time::Duration;

use super::{AtomicU32, relax, wait_for};

/// Rounds before the waiter sleeps.
const ROUNDS_AWAKE: u32 = 1 << 6;

/// For how long it sleeps at a time, and for how many rounds that counts (as they do where a process is ending and who
/// is waited for with it: `windows.rs`).
const SLEEP: Duration = Duration::from_micros(100);
const ROUNDS_ASLEEP: u32 = 1 << 10;

/// Lets other threads run. Returns the number of the next round.
#[cold]
pub(crate) fn rest(round: u32) -> u32 {
    relax(round);
    round.saturating_add(if round < ROUNDS_AWAKE {
        1
    } else {
        sleep(SLEEP);
        ROUNDS_ASLEEP
    })
}

/// Sleeps for this time, or until a signal: other threads run, whatever their share of the processor has been.
pub(crate) fn sleep(time: Duration) {
    wait_for(&AtomicU32::new(0), 0, Some(time));
}

#[cfg(all(test, feature = "std", target_os = "linux"))]
mod tests {
    use super::*;

    extern crate std;

    /// Ten sleeps; a signal may end one early.
    #[test]
    fn who_waits_for_long_sleeps() {
        let begin = std::time::Instant::now();
        let last = (0..ROUNDS_AWAKE + 10).fold(0, |round, _| rest(round));
        assert_eq!(last, ROUNDS_AWAKE + 10 * ROUNDS_ASLEEP);
        assert!(begin.elapsed() >= 5 * SLEEP);
        assert_eq!(rest(u32::MAX), u32::MAX, "and never ends");
    }
}
