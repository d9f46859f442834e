//! How short of memory the system is: what its files say, as numbers. Who reads them is `global/pressure.rs`.

#![forbid(unsafe_code)]

/// How things stand, as a callback is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Bytes that count against the limit; 0 where there is none.
    pub used: u64,
    /// A limit in bytes: of those set for our group and for the groups above it, the one that is fullest. `u64::MAX`:
    /// none.
    pub limit: u64,
    /// How much of the last ten seconds some task of ours waited for memory, in hundredths.
    pub stalled: u8,
    /// How often the group has met its limits since the last look: was slowed down, reclaimed from, or had somebody
    /// killed (`memory.events`; `memory.failcnt` of version 1).
    pub events: u64,
}

impl Pressure {
    /// How full the group is, in hundredths of its limit; more than 100 is 100.
    #[must_use]
    pub fn filled(&self) -> u8 {
        match self.limit {
            0 | u64::MAX => 0,
            limit => (u128::from(self.used) * 100 / u128::from(limit)).min(100) as u8,
        }
    }

    /// Whether all that is free should go at once.
    #[must_use]
    pub fn is_high(&self) -> bool {
        self.filled() >= 90 || self.stalled >= 10 || self.events > 0
    }
}

/// Who wants to be told, and from when on.
#[derive(Clone, Copy, Debug)]
pub struct Notice {
    /// Hundredths of the limit, or of the last ten seconds stalled. Events are always told.
    pub from: u8,
    /// Whom to tell.
    pub hook: fn(Pressure),
}

impl Notice {
    /// Tells, if it is time to.
    pub fn give(&self, pressure: Pressure) {
        if pressure.filled().max(pressure.stalled) >= self.from || pressure.events > 0 {
            (self.hook)(pressure);
        }
    }
}

/// Of `/proc/self/cgroup`, the path of the group that accounts for memory, and whether it is of version 2. Version 1
/// wins where both are there: then the controller is there.
pub fn group(text: &str) -> Option<(&str, bool)> {
    let mut second = None;
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        if controllers.split(',').any(|controller| controller == "memory") {
            return Some((path, false));
        }
        if controllers.is_empty() {
            second = Some((path, true));
        }
    }
    second
}

/// A limit or a size. `max`, and the kernel's way to say so in version 1, are none.
pub fn number(text: &str) -> Option<u64> {
    let number: u64 = text.trim().parse().ok()?;
    (number < 1 << 60).then_some(number)
}

/// The whole hundredths of `some avg10=12.34 …`.
pub fn stalled(text: &str) -> Option<u8> {
    let some = text.lines().find(|line| line.starts_with("some "))?;
    let share = some.split_whitespace().find_map(|word| word.strip_prefix("avg10="))?;
    share.split('.').next()?.parse().ok()
}

/// Of `memory.events`: how often the group was over `high`, at `max`, or out of memory, since it was made.
pub fn events(text: &str) -> u64 {
    let counts = text.lines().filter_map(|line| line.split_once(' '));
    counts
        .filter(|(name, _)| matches!(*name, "high" | "max" | "oom"))
        .filter_map(|(_, count)| number(count))
        .fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_that_tell_of_limits_are_added_up() {
        let text = "low 7\nhigh 1\nmax 20\noom 300\noom_kill 4000\noom_group_kill 5\n";
        assert_eq!(events(text), 321);
        assert_eq!(events("high\nmax x\n\noom 2"), 2);
        assert_eq!(events(""), 0);
    }

    #[test]
    fn groups_of_both_versions_are_found() {
        assert_eq!(group("0::/user.slice/a\n"), Some(("/user.slice/a", true)));
        assert_eq!(
            group("12:cpu:/x\n4:memory:/docker/1:2\n0::/\n"),
            Some(("/docker/1:2", false))
        );
        assert_eq!(group("1:name=systemd:/\n"), None);
        assert_eq!(group("nonsense"), None);
        assert_eq!(group(""), None);
    }

    #[test]
    fn numbers_and_words_are_told_apart() {
        assert_eq!(number("268435456\n"), Some(268_435_456));
        assert_eq!(number("max\n"), None);
        assert_eq!(number("9223372036854771712\n"), None);
        assert_eq!(number(""), None);
        let text = "some avg10=12.34 avg60=0.00 avg300=0.00 total=0\nfull avg10=99.00 avg60=0 avg300=0 total=0\n";
        assert_eq!(stalled(text), Some(12));
        assert_eq!(stalled("full avg10=1.00"), None);
        assert_eq!(stalled(""), None);
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
    }
}
