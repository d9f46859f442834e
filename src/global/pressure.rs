//! What Linux says about memory: our cgroup's limit, how full it is, how long tasks have waited for memory.
//!
//! | read | version 2 | version 1 |
//! |---|---|---|
//! | limit | `memory.max`, `memory.high` | `memory.limit_in_bytes` |
//! | used | `memory.current` | `memory.usage_in_bytes` |
//! | less | `inactive_file` of `memory.stat` | `total_inactive_file` of it |
//! | stalls | `memory.pressure`, else `/proc/pressure/memory` | the latter |
//! | events | `memory.events`: high, max, oom; of groups above `memory.events.local` | `memory.failcnt` |
//!
//! A group is also limited by the groups above it, and their usage counts all of their groups together:
//!
//! ```text
//!   /sys/fs/cgroup                no limit                         Worked: b is filled to 10 hundredths, a to 95, by
//!   └── a          950 of 1000    ◀── this one counts              others. The kernel will reclaim from a, b included:
//!       └── b       20 of  200                                     so that is the situation.
//! ```
//!
//! Every folder from ours to the root is read, and the fullest counts. Missing folders are skipped: inside a container
//! the path is often the one outside, and the group is the visible root.
//!
//! Once a second the background thread reads four small files per folder, and one larger file where there is a limit.
//! It uses raw system calls and a buffer on its stack: ~15 µs, and 20 for each limit. What is missing or unreadable
//! counts as no limit and no pressure, without a message. If a file cannot be read just now, say because the process
//! has too many open, the look says nothing at all, and the next one has the events since the last that did. The usage
//! is that of the whole group except for files in memory that have not been used recently: a group that reads files
//! eventually fills up with them, and the kernel drops them first.
//!
//! The process's group is read line by line, because version 1 has a line for each of a dozen hierarchies. Its path may
//! be 980 bytes long; a longer one may count as none. It is read again once a minute, in case the process was moved.
//!
//! All free memory goes back at once, including what caches hold and what was to be kept, if the group is at nine
//! tenths of the limit, or tasks have stalled for a tenth of the last ten seconds, or the group has met one of its
//! limits since the last look. A full cgroup reclaims or kills, and our free pages are the cheapest there are. If that
//! does not help, it is repeated at growing intervals.
//!
//! A file that is open while the process forks would stay open in the child forever. So a reader holds a [`Turn`] from
//! before it opens one until it has closed it. A fork waits for the reader, for 0.1 s at most, and while the
//! process forks nothing is read. One turn covers a whole look: after half a look, events that could not be read would
//! all appear new at the next.
//!
//! All files are looked up below a root that is empty (that is, `/`) except in tests.

use core::fmt::Write as _;

use crate::scavenge::pressure::{Pressure, events, figure, group, number, stalled};
pub(super) use crate::source::Turn;
use crate::source::{KeepErrno, Source, System};

use files::{NotNow, Path, find_at, read_at};

mod files;

/// The process's group is looked up at each 64th look, the first included.
const LOOKS_TO_FIND: u32 = 64;

/// Where to look, and what was seen.
pub(super) struct Watch {
    /// The group's folder; empty if there is none.
    folder: Path,
    /// The length of the part of its path that is the root of all groups.
    top: usize,
    second: bool,
    root: &'static str,
    /// Events counted at the last look; none before the first.
    events: Option<u64>,
    looks: u32,
}

impl Watch {
    /// Watches the group of this process, as found below `root`.
    pub(super) fn new(root: &'static str) -> Self {
        Self {
            folder: Path::new(),
            top: 0,
            second: false,
            root,
            events: None,
            looks: 0,
        }
    }

    /// Finds the group, that of this thread: the process's file is its first thread's, which may have ended. If it is
    /// another one, its events are counted from here on; if there is none any more, the file can no longer be read. Not
    /// inlined: all of this is off the small stack before anything else is read.
    #[inline(never)]
    fn find(&mut self) -> Result<(), NotNow> {
        let mut found = Self::new(self.root);
        // Version 1 takes precedence if both exist: then it has the controller.
        find_at(self.root, "/proc/thread-self/cgroup", |line| {
            let (path, second) = group(line)?;
            found.follow(path, second);
            (!second).then_some(())
        })?;
        let is_other = (found.second, found.folder.text()) != (self.second, self.folder.text());
        if is_other && !found.folder.text().is_empty() {
            *self = found;
        }
        Ok(())
    }

    /// Sets the group.
    fn follow(&mut self, path: &str, second: bool) {
        let top = if second {
            "/sys/fs/cgroup"
        } else {
            "/sys/fs/cgroup/memory"
        };
        self.second = second;
        self.top = self.root.len() + top.len();
        self.folder = Path::new();
        if write!(self.folder, "{}{top}{}", self.root, path.trim_end_matches('/')).is_err() {
            self.folder = Path::new();
        }
    }

    /// The paths of the groups that limit this one: itself first, the root of all last.
    fn groups(&self) -> impl Iterator<Item = &str> {
        let folder = self.folder.text();
        let above = |group: &&str| folder.get(..group.rfind('/')?).filter(|group| group.len() >= self.top);
        core::iter::successors(Some(folder).filter(|folder| !folder.is_empty()), above)
    }

    /// How full a group is, by its own limit. Without a limit the usage is 0.
    fn group(&self, folder: &str) -> Result<Pressure, NotNow> {
        let (limits, used, files): (&[&str], _, _) = if self.second {
            (&["/memory.max", "/memory.high"], "/memory.current", "inactive_file")
        } else {
            (
                &["/memory.limit_in_bytes"],
                "/memory.usage_in_bytes",
                "total_inactive_file",
            )
        };
        let size = |name: &str| Ok(number(read_at(folder, name)?.text()));
        let least = |least: u64, name: &&str| Ok(least.min(size(name)?.unwrap_or(u64::MAX)));
        let limit = limits.iter().try_fold(u64::MAX, least)?;
        let used = if limit == u64::MAX {
            0
        } else {
            let files = find_at(folder, "/memory.stat", |line| figure(line, files))?;
            size(used)?.unwrap_or(0).saturating_sub(files.unwrap_or(0))
        };
        Ok(Pressure {
            used,
            limit,
            ..Pressure::default()
        })
    }

    /// Events since the beginning. Of groups above only their own count, or those of our siblings would be included.
    fn events(&self) -> Result<u64, NotNow> {
        let files = ["/memory.events"]
            .into_iter()
            .chain(core::iter::repeat("/memory.events.local"));
        let count = |(folder, file): (&str, &str)| {
            Ok(if self.second {
                events(read_at(folder, file)?.text())
            } else {
                number(read_at(folder, "/memory.failcnt")?.text()).unwrap_or(0)
            })
        };
        let mut groups = self.groups().zip(files).map(count);
        groups.try_fold(0, |all: u64, events| Ok(all.wrapping_add(events?)))
    }

    /// How much tasks have stalled, in percent: those of the group if it says so, else all.
    fn stalled(&self) -> Result<u8, NotNow> {
        for folder in self.groups().filter(|_| self.second) {
            if let Some(share) = stalled(read_at(folder, "/memory.pressure")?.text()) {
                return Ok(share);
            }
        }
        Ok(stalled(read_at(self.root, "/proc/pressure/memory")?.text()).unwrap_or(0))
    }

    fn try_look(&mut self) -> Result<Pressure, NotNow> {
        if self.looks.is_multiple_of(LOOKS_TO_FIND) {
            self.find()?;
        }
        let (events, stalled) = (self.events()?, self.stalled()?);
        let none = Pressure {
            limit: u64::MAX,
            ..Pressure::default()
        };
        let fuller = |seen, folder: &str| Ok(tighter(seen, self.group(folder)?));
        let seen = self.groups().try_fold(none, fuller)?;
        // Only now: whatever failed before is tried again, and no event is lost.
        self.looks = self.looks.wrapping_add(1);
        let before = self.events.replace(events).unwrap_or(events);
        Ok(Pressure {
            stalled,
            // The counter may have been reset.
            events: events.saturating_sub(before),
            ..seen
        })
    }

    /// The current situation; none if it cannot be read just now. The caller has a [`Turn`].
    pub(super) fn look(&mut self) -> Option<Pressure> {
        self.try_look().ok()
    }
}

/// Of two limits the one that is met sooner: the fuller one or, if they are equally full, the smaller one.
fn tighter(one: Pressure, other: Pressure) -> Pressure {
    // Exact, not in hundredths. A limit of 0 counts as one byte, or a group that uses nothing of it would equal any
    // other.
    let fullness = |of: Pressure, to: Pressure| u128::from(of.used) * u128::from(to.limit.max(1));
    let (ones, others) = (fullness(one, other), fullness(other, one));
    if others > ones || others == ones && other.limit < one.limit {
        other
    } else {
        one
    }
}

/// Whether the process is known to have one thread. Linux keeps a folder for each thread.
#[cold]
pub(super) fn is_alone() -> bool {
    // It has no such folder, and no background thread.
    if cfg!(miri) {
        return false;
    }
    let _errno = KeepErrno::new();
    let mut status = core::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a zero-terminated path, and a place to write to, which is read only if it was written.
    unsafe {
        // Links of the folder: its own, its parent's, and one for each folder in it.
        libc::stat(c"/proc/self/task".as_ptr(), status.as_mut_ptr()) == 0 && status.assume_init().st_nlink == 3
    }
}

/// Resident bytes of the process; 0 if the system does not say, and while the process forks.
pub(crate) fn resident() -> usize {
    let Some(_turn) = Turn::begin() else {
        return 0;
    };
    // What is said of the process is said of its first thread: zeros once that has ended. Before Linux 3.17 nothing
    // else is said.
    let files = ["/proc/thread-self/statm", "/proc/self/statm"];
    let texts = files.into_iter().filter_map(|file| read_at("", file).ok());
    let mut pages = texts.filter_map(|text| text.text().split_whitespace().nth(1)?.parse::<usize>().ok());
    pages.next().unwrap_or(0).saturating_mul(System.granule())
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::string::String;
    use std::{format, fs};

    use super::*;

    /// A system's files, below a folder of their own.
    struct Files {
        root: &'static str,
    }

    impl Files {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("pageheap-watch-{}-{name}", std::process::id()));
            let root = String::from(root.to_str().unwrap()).leak();
            Self { root }
        }

        fn write(&self, path: &str, text: &str) {
            let path = format!("{}/{path}", self.root);
            fs::create_dir_all(std::path::Path::new(&path).parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    impl Drop for Files {
        fn drop(&mut self) {
            fs::remove_dir_all(self.root).unwrap();
        }
    }

    /// The group itself may be nearly empty, or without a limit: the groups above it limit it all the same.
    #[test]
    fn limits_and_events_of_groups_above_count() {
        let files = Files::new("above");
        files.write("proc/thread-self/cgroup", "0::/a/b/c\n");
        let group = |group: &str, current: &str, max: &str, high: &str| {
            files.write(&format!("sys/fs/cgroup{group}/memory.current"), current);
            files.write(&format!("sys/fs/cgroup{group}/memory.max"), max);
            files.write(&format!("sys/fs/cgroup{group}/memory.high"), high);
        };
        group("/a/b/c", "20\n", "max\n", "max\n");
        group("/a/b", "50\n", "200\n", "max\n");
        group("/a", "1000\n", "max\n", "max\n");
        let mut watch = Watch::new(files.root);
        let look = |watch: &mut Watch| {
            let seen = watch.look().unwrap();
            (seen.used, seen.limit, seen.events)
        };
        assert_eq!(look(&mut watch), (50, 200, 0));
        // The fullest counts, even if its limit is the larger one.
        group("/a", "950\n", "2000\n", "1000\n");
        assert_eq!(look(&mut watch), (950, 1000, 0));
        assert!(watch.look().unwrap().is_high());
        group("/a/b/c", "20\n", "22\n", "max\n");
        assert_eq!(look(&mut watch), (950, 1000, 0));
        group("/a/b/c", "22\n", "22\n", "max\n");
        assert_eq!(look(&mut watch), (22, 22, 0));
        // Events of a group above, but not of groups beside ours, which it counts too.
        files.write("sys/fs/cgroup/a/b/memory.events", "high 7\nmax 3\n");
        assert_eq!(look(&mut watch).2, 0);
        files.write("sys/fs/cgroup/a/b/memory.events.local", "high 0\nmax 2\n");
        files.write("sys/fs/cgroup/a/b/c/memory.events", "high 1\nmax 0\n");
        assert_eq!(look(&mut watch).2, 3);
        assert_eq!(look(&mut watch).2, 0);
    }

    /// A group that may have nothing is full, unless it has nothing; then it hides no other.
    #[test]
    fn a_limit_of_zero_is_met_by_a_byte() {
        let files = Files::new("zero");
        files.write("proc/thread-self/cgroup", "0::/a/b\n");
        files.write("sys/fs/cgroup/a/memory.max", "1000\n");
        files.write("sys/fs/cgroup/a/memory.current", "700\n");
        files.write("sys/fs/cgroup/a/b/memory.high", "0\n");
        let mut watch = Watch::new(files.root);
        for (used, filled) in [("0\n", 70), ("1\n", 100), ("700\n", 100)] {
            files.write("sys/fs/cgroup/a/b/memory.current", used);
            assert_eq!(watch.look().unwrap().filled(), filled, "{used}");
        }
    }

    /// The given path may be the one outside a container, whose root is all that is visible.
    #[test]
    fn where_the_path_is_not_there_the_root_counts() {
        let files = Files::new("root");
        files.write("proc/thread-self/cgroup", "4:memory:/docker/1\n0::/\n");
        files.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "100\n");
        files.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "70\n");
        // Nothing is looked up above the root of the groups.
        files.write("sys/fs/cgroup/memory.limit_in_bytes", "1\n");
        files.write("sys/fs/cgroup/memory.usage_in_bytes", "1\n");
        let mut watch = Watch::new(files.root);
        assert_eq!(watch.look().unwrap().filled(), 70);
        // A group in between, as when the container has no namespace of its own.
        files.write("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "10\n");
        files.write("sys/fs/cgroup/memory/docker/memory.usage_in_bytes", "8\n");
        assert_eq!(watch.look().unwrap().filled(), 80);
    }

    #[test]
    fn a_process_that_is_moved_is_followed() {
        let files = Files::new("moved");
        for (group, used, events) in [("a", "70\n", "high 3\n"), ("b", "80\n", "high 5\n")] {
            files.write(&format!("sys/fs/cgroup/{group}/memory.max"), "100\n");
            files.write(&format!("sys/fs/cgroup/{group}/memory.current"), used);
            files.write(&format!("sys/fs/cgroup/{group}/memory.events"), events);
        }
        files.write("proc/thread-self/cgroup", "0::/a\n");
        let mut watch = Watch::new(files.root);
        assert_eq!(watch.look().unwrap().used, 70);
        files.write("proc/thread-self/cgroup", "0::/b\n");
        let mut events_of_100 = || (0..100).map(|_| watch.look().unwrap().events).sum::<u64>();
        assert_eq!(events_of_100(), 0);
        std::fs::remove_file(format!("{}/proc/thread-self/cgroup", files.root)).unwrap();
        assert_eq!(events_of_100(), 0);
        assert_eq!(
            watch.look().unwrap().used,
            80,
            "the file is out of reach, not the group"
        );
    }

    /// Files in memory do not get a group killed: the kernel drops them first.
    #[test]
    fn files_that_nobody_uses_do_not_count() {
        let files = Files::new("cached");
        files.write("proc/thread-self/cgroup", "0::/a\n");
        files.write("sys/fs/cgroup/a/memory.max", "1000\n");
        files.write("sys/fs/cgroup/a/memory.current", "950\n");
        let mut watch = Watch::new(files.root);
        assert_eq!(watch.look().unwrap().used, 950);
        // As long as the real file, with the line somewhere in the middle, and one that is longer than what is read at
        // once.
        let lines: String = (0..60)
            .map(|line| format!("figure_{line} {}\n", line * 1_000_003))
            .collect();
        let long = "x".repeat(3000);
        for (text, used) in [
            (format!("{lines}inactive_file 300\n{lines}"), 650),
            (format!("{lines}inactive_file 200"), 750),
            (format!("inactive_file 100\n{lines}inactive_file 200\n"), 850),
            (format!("{long}\ninactive_file 60\n"), 890),
            (format!("{lines}total_inactive_file 300\nactive_file 9\n"), 950),
            (format!("inactive_file 300{long}\n"), 950),
            (format!("inactive_file 2000\n{long}"), 0),
        ] {
            files.write("sys/fs/cgroup/a/memory.stat", &text);
            assert_eq!(watch.look().unwrap().used, used, "{text}");
        }
        files.write("proc/thread-self/cgroup", "4:memory:/b\n");
        files.write("sys/fs/cgroup/memory/b/memory.limit_in_bytes", "1000\n");
        files.write("sys/fs/cgroup/memory/b/memory.usage_in_bytes", "950\n");
        let text = format!("{lines}inactive_file 1\n{lines}total_inactive_file 150\n");
        files.write("sys/fs/cgroup/memory/b/memory.stat", &text);
        assert_eq!(Watch::new(files.root).look().unwrap().used, 800);
    }

    /// Docker's file of version 1, with `memory` as far back as possible; `last` is one more line.
    fn dockers(last: &str) -> String {
        let controllers = "rdma perf_event pids freezer hugetlb cpuset net_cls,net_prio devices blkio cpu,cpuacct \
                           name=systemd memory";
        let id = "0123456789abcdef".repeat(4);
        let line = |(number, controllers)| format!("{}:{controllers}:/docker/{id}\n", 12 - number);
        let lines: String = controllers.split(' ').enumerate().map(line).collect();
        lines + last
    }

    #[test]
    fn a_group_is_found_wherever_its_line_stands() {
        let files = Files::new("docker");
        let group = format!("docker/{}", "0123456789abcdef".repeat(4));
        files.write(&format!("sys/fs/cgroup/memory/{group}/memory.limit_in_bytes"), "100\n");
        files.write(&format!("sys/fs/cgroup/memory/{group}/memory.usage_in_bytes"), "70\n");
        // A group of version 2, which has no such controller if version 1 has it.
        files.write("sys/fs/cgroup/system.slice/memory.max", "100\n");
        files.write("sys/fs/cgroup/system.slice/memory.current", "10\n");
        for (text, filled) in [
            (dockers(""), 70),
            (dockers("0::/system.slice\n"), 70),
            (format!("0::/system.slice\n{}", dockers("")), 70),
            (dockers("").replace("memory", "freezer") + "0::/system.slice", 10),
            (dockers("").replace("memory", "freezer"), 0),
        ] {
            files.write("proc/thread-self/cgroup", &text);
            assert_eq!(Watch::new(files.root).look().unwrap().filled(), filled, "{text}");
        }
    }

    #[test]
    fn a_group_is_followed_however_deep() {
        let files = Files::new("deep");
        let group = |bytes| -> String { "/container".chars().cycle().take(bytes).collect() };
        for (bytes, used) in [(200, 61), (260, 62), (600, 63), (900, 64)] {
            files.write("proc/thread-self/cgroup", &format!("0::{}\n", group(bytes)));
            let path = format!("sys/fs/cgroup{}", group(bytes));
            files.write(&format!("{path}/memory.max"), "100\n");
            files.write(&format!("{path}/memory.current"), &format!("{used}\n"));
            assert_eq!(Watch::new(files.root).look().unwrap().used, used, "{bytes} bytes");
        }
        // Too long: nothing, and no harm.
        files.write("proc/thread-self/cgroup", &format!("0::{}\n", group(2000)));
        assert_eq!(Watch::new(files.root).look().unwrap().limit, u64::MAX);
    }
}
