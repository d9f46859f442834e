//! How short of memory the system is: the contents of its files as numbers, and what follows from them.
//!
//! ```text
//!   look, once a second      0  1  2  3  4  5  6  7  8 …  15 …  31 …  63 … 127      pressure is high all the time
//!   all free memory released *  *     *           *       *     *     *     *
//! ```
//!
//! `global/pressure.rs` reads those files.
//!
//! A process that has given back all its free memory, and finds the pressure just as high a second later, was not the
//! cause: a neighbour in the group is, or the group's page cache. Doing so every second forever would cost the program
//! a page fault for each page it uses again, and relieve nobody. So the intervals grow, in the end to a minute
//! ([`Patience`]).
//!
//! Worked example: a group is at 95 percent for an hour. All free memory is released at seconds 0, 1, 3, 7, 15, 31 and
//! 63, and then every 64 s. After eight seconds of calm the next pressure is answered at once; pressure that alternates
//! with calm, every ten seconds.

#![forbid(unsafe_code)]

use core::fmt;

/// The memory situation, as passed to a callback.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Pressure {
    /// Bytes that count against the limit, without what the kernel would drop first (files that have not been used
    /// recently); 0 if there is no limit.
    pub used: u64,
    /// A limit in bytes: of the limits of this process's group and of the groups above it, the one that is fullest.
    /// `u64::MAX` means none.
    pub limit: u64,
    /// How much of the last ten seconds some task of the group waited for memory, in percent: 0 to 100.
    pub stalled: u8,
    /// How often the group has met its limits since the last look: it was throttled, memory was reclaimed from it, or a
    /// process was killed (`memory.events`; `memory.failcnt` of version 1).
    pub events: u64,
}

impl Pressure {
    /// How full the group is, in percent of its limit: 0 to 100. With a limit of 0 it is 100 if the group uses
    /// anything; without a limit it is 0.
    #[must_use]
    pub fn filled(&self) -> u8 {
        match self.limit {
            u64::MAX => 0,
            limit => (u128::from(self.used) * 100 / u128::from(limit.max(1))).min(100) as u8,
        }
    }

    /// The value compared with thresholds: the worse of how full the group is and how long tasks have stalled.
    fn level(&self) -> u8 {
        self.filled().max(self.stalled)
    }

    /// Whether all free memory should be released at once.
    #[must_use]
    pub fn is_high(&self) -> bool {
        self.filled() >= 90 || self.stalled >= 10 || self.events > 0
    }
}

/// One line for a log: `96000 of 100000 bytes (96 %), stalled 3 %, limits met 2 times`.
impl fmt::Display for Pressure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit {
            u64::MAX => f.write_str("no limit")?,
            limit => write!(f, "{} of {limit} bytes ({} %)", self.used, self.filled())?,
        }
        let times = if self.events == 1 { "time" } else { "times" };
        write!(f, ", stalled {} %, limits met {} {times}", self.stalled, self.events)
    }
}

/// A hook, and the threshold from which it is notified.
#[derive(Clone, Copy, Debug)]
pub struct Notice {
    /// Percent of the limit, or of the last ten seconds stalled. Events are always reported; above 100 nothing else is.
    pub from: u8,
    /// The hook to call.
    pub hook: fn(Pressure),
}

impl Notice {
    /// Calls the hook if its threshold is reached.
    pub fn give(&self, pressure: Pressure) {
        if pressure.level() >= self.from || pressure.events > 0 {
            (self.hook)(pressure);
        }
    }
}

/// All hooks: one for each threshold.
#[derive(Clone, Copy, Debug)]
pub struct Notices([Option<Notice>; Self::MOST]);

impl Notices {
    /// The maximum number of thresholds.
    pub const MOST: usize = 4;
    /// No hook.
    pub const NONE: Self = Self([None; Self::MOST]);

    /// Adds a hook.
    ///
    /// # Panics
    /// If the maximum is exceeded; in a `static` that is a compile-time error.
    #[must_use]
    pub const fn and(mut self, notice: Notice) -> Self {
        let mut place = 0;
        while place < Self::MOST && self.0[place].is_some() {
            place += 1;
        }
        assert!(place < Self::MOST, "four thresholds of pressure at the most");
        self.0[place] = Some(notice);
        self
    }

    /// Whether there is any hook.
    #[must_use]
    pub fn are_any(&self) -> bool {
        self.0[0].is_some()
    }

    /// Notifies one hook: of those whose threshold is reached, the one with the highest; if there was an event but none
    /// is reached, the one with the lowest.
    pub fn give(&self, pressure: Pressure) {
        let level = pressure.level();
        let all = || self.0.iter().flatten();
        let reached = all().filter(|notice| level >= notice.from);
        let told = reached.max_by_key(|notice| notice.from);
        if let Some(notice) = told.or_else(|| all().min_by_key(|notice| notice.from)) {
            notice.give(pressure);
        }
    }
}

/// When to release all free memory under pressure that persists in spite of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Patience {
    /// How many looks to skip before the next release, and after it.
    left: u8,
    then: u8,
    /// Consecutive looks without pressure.
    calm: u8,
}

impl Patience {
    const MOST: u8 = 63;
    /// After this many calm looks, pressure counts as new.
    const CALM: u8 = 8;

    /// Records one look. Returns whether to release now.
    pub fn is_time(&mut self, high: bool) -> bool {
        if !high {
            (self.left, self.calm) = (self.left / 2, self.calm + 1);
            if self.calm == Self::CALM {
                *self = Self::default();
            }
            return false;
        }
        self.calm = 0;
        if self.left > 0 {
            self.left -= 1;
            return false;
        }
        (self.left, self.then) = (self.then, (2 * self.then + 1).min(Self::MOST));
        true
    }
}

/// From a line of `/proc/thread-self/cgroup`: the path of a group that may account for memory, and whether it is of
/// version 2.
pub fn group(line: &str) -> Option<(&str, bool)> {
    let mut parts = line.splitn(3, ':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let first = controllers.split(',').any(|controller| controller == "memory");
    (first || controllers.is_empty()).then_some((path, !first))
}

/// A limit or a size. `None` for `max`, and for its equivalent in version 1.
pub fn number(text: &str) -> Option<u64> {
    let number: u64 = text.trim().parse().ok()?;
    (number < 1 << 60).then_some(number)
}

/// The number in a line `name number` of `memory.stat`.
pub fn figure(line: &str, name: &str) -> Option<u64> {
    number(line.strip_prefix(name)?.strip_prefix(' ')?)
}

/// The whole percent of `some avg10=12.34 …`.
pub fn stalled(text: &str) -> Option<u8> {
    let some = text.lines().find(|line| line.starts_with("some "))?;
    let share = some.split_whitespace().find_map(|word| word.strip_prefix("avg10="))?;
    share.split('.').next()?.parse().ok()
}

/// From `memory.events`: how often the group was over `high`, at `max`, or out of memory since it was created.
pub fn events(text: &str) -> u64 {
    let counts = text.lines().filter_map(|line| line.split_once(' '));
    counts
        .filter(|(name, _)| matches!(*name, "high" | "max" | "oom"))
        .filter_map(|(_, count)| number(count))
        .fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::cell::Cell;

    use std::string::ToString;

    use super::*;

    std::thread_local! {
        /// What was reported last, as `threshold * 1000 + filled`, and how often.
        static TOLD: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
    }

    fn tell(from: u32, pressure: Pressure) {
        TOLD.set((from * 1000 + u32::from(pressure.filled()), TOLD.get().1 + 1));
    }

    /// What was reported since the last call.
    fn told() -> (u32, u32) {
        TOLD.replace((0, 0))
    }

    const FIFTY: Notice = Notice {
        from: 50,
        hook: |pressure| tell(50, pressure),
    };

    fn full(used: u64) -> Pressure {
        Pressure {
            used,
            limit: 100,
            ..Pressure::default()
        }
    }

    #[test]
    fn a_notice_is_given_from_its_threshold_on() {
        let stalled = |stalled| Pressure { stalled, ..full(0) };
        for (pressure, count) in [(full(49), 0), (full(50), 1), (full(51), 1), (full(100), 1)] {
            FIFTY.give(pressure);
            assert_eq!(told().1, count, "{pressure:?}");
        }
        for (pressure, count) in [(stalled(49), 0), (stalled(50), 1)] {
            FIFTY.give(pressure);
            assert_eq!(told().1, count, "{pressure:?}");
        }
        FIFTY.give(Pressure { events: 1, ..full(0) });
        assert_eq!(told(), (50_000, 1), "events are always told");
    }

    #[test]
    fn of_several_thresholds_the_highest_that_is_reached_is_told() {
        const NOTICES: Notices = Notices::NONE
            .and(Notice {
                from: 90,
                hook: |pressure| tell(90, pressure),
            })
            .and(FIFTY)
            .and(Notice {
                from: 70,
                hook: |pressure| tell(70, pressure),
            });
        for (used, expected) in [
            (0, (0, 0)),
            (49, (0, 0)),
            (50, (50_050, 1)),
            (69, (50_069, 1)),
            (70, (70_070, 1)),
            (89, (70_089, 1)),
            (90, (90_090, 1)),
            (100, (90_100, 1)),
        ] {
            NOTICES.give(full(used));
            assert_eq!(told(), expected, "{used}");
        }
        NOTICES.give(Pressure { events: 3, ..full(0) });
        assert_eq!(told(), (50_000, 1), "an event below all of them");
        Notices::NONE.give(full(100));
        assert_eq!(told().1, 0);
        assert!(NOTICES.are_any() && !Notices::NONE.are_any());
    }

    #[test]
    #[should_panic(expected = "four thresholds")]
    fn a_fifth_threshold_is_refused() {
        let _ = (0..5).fold(Notices::NONE, |notices, _| notices.and(FIFTY));
    }

    #[test]
    fn pressure_that_stays_is_answered_ever_more_seldom() {
        let mut patience = Patience::default();
        let times: std::vec::Vec<u32> = (0..300).filter(|_| patience.is_time(true)).collect();
        assert_eq!(times, [0, 1, 3, 7, 15, 31, 63, 127, 191, 255]);
        // After a while of calm: at once again, and again soon after.
        assert!((0..8).all(|_| !patience.is_time(false)));
        assert!(patience.is_time(true) && patience.is_time(true) && !patience.is_time(true));
        // Alternating.
        let times = (0..1000).filter(|look| patience.is_time(look % 2 == 0)).count();
        assert!((50..150).contains(&times), "{times} in 1000 looks");
    }

    #[test]
    fn events_that_tell_of_limits_are_added_up() {
        let text = "low 7\nhigh 1\nmax 20\noom 300\noom_kill 4000\noom_group_kill 5\n";
        assert_eq!(events(text), 321);
        assert_eq!(events("high\nmax x\n\noom 2"), 2);
        assert_eq!(events(""), 0);
    }

    #[test]
    fn groups_of_both_versions_are_found() {
        assert_eq!(group("0::/user.slice/a"), Some(("/user.slice/a", true)));
        assert_eq!(group("4:memory:/docker/1:2"), Some(("/docker/1:2", false)));
        assert_eq!(group("4:cpu,memory:/a"), Some(("/a", false)));
        assert_eq!(group("12:cpu:/x"), None);
        assert_eq!(group("1:name=systemd:/"), None);
        assert_eq!(group("nonsense"), None);
        assert_eq!(group(""), None);
    }

    #[test]
    fn numbers_and_words_are_told_apart() {
        assert_eq!(number("268435456\n"), Some(268_435_456));
        assert_eq!(number("max\n"), None);
        assert_eq!(number("9223372036854771712\n"), None);
        assert_eq!(number(""), None);
        assert_eq!(figure("inactive_file 4096", "inactive_file"), Some(4096));
        assert_eq!(figure("total_inactive_file 1", "inactive_file"), None);
        assert_eq!(figure("inactive_filed 1", "inactive_file"), None);
        let text = "some avg10=12.34 avg60=0.00 avg300=0.00 total=0\nfull avg10=99.00 avg60=0 avg300=0 total=0\n";
        assert_eq!(stalled(text), Some(12));
        assert_eq!(stalled("full avg10=1.00"), None);
        assert_eq!(stalled(""), None);
    }

    #[test]
    fn pressure_is_shown_in_words() {
        let some = Pressure {
            used: 96_000,
            limit: 100_000,
            stalled: 3,
            events: 1,
        };
        assert_eq!(
            some.to_string(),
            "96000 of 100000 bytes (96 %), stalled 3 %, limits met 1 time"
        );
        let none = Pressure {
            limit: u64::MAX,
            events: 0,
            ..some
        };
        assert_eq!(none.to_string(), "no limit, stalled 3 %, limits met 0 times");
    }

    #[test]
    fn pressure_is_high_when_full_or_stalled() {
        let calm = Pressure {
            used: 89,
            limit: 100,
            stalled: 9,
            events: 0,
        };
        assert!(!calm.is_high());
        assert!(Pressure { used: 90, ..calm }.is_high() && Pressure { stalled: 10, ..calm }.is_high());
        assert!(Pressure { events: 1, ..calm }.is_high());
        assert_eq!(
            Pressure {
                used: u64::MAX,
                limit: 1,
                ..calm
            }
            .filled(),
            100
        );
        assert_eq!(
            Pressure {
                limit: u64::MAX,
                ..calm
            }
            .filled(),
            0
        );
        let nothing = Pressure { limit: 0, ..calm };
        assert_eq!(nothing.filled(), 100);
        assert_eq!(Pressure { used: 0, ..nothing }.filled(), 0);
    }
}
