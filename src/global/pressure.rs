//! What the system says of memory: the limit of our cgroup, how full it is, how long tasks have waited for memory.
//!
//! | read | version 2 | version 1 |
//! |---|---|---|
//! | limit | `memory.max`, `memory.high` | `memory.limit_in_bytes` |
//! | used | `memory.current` | `memory.usage_in_bytes` |
//! | stalls | `memory.pressure`, else `/proc/pressure/memory` | the latter |
//! | events | `memory.events`: high, max, oom | `memory.failcnt` |
//!
//! Five small files once a second, by the background thread, by raw system calls into a buffer on its stack: ~15 µs.
//! What is not there, or may not be read, is taken for no limit and no pressure; nothing is said about it. Used counts
//! the whole group, page cache included, as the kernel does when it decides whom to kill.
//!
//! From nine tenths of the limit, or when tasks have stalled for a tenth of the last ten seconds, or when the group has
//! met one of its limits since the last look, all that is free goes back at once, what caches hold too, whatever was to
//! be kept: a cgroup that is full reclaims or kills, and our free pages are the cheapest there are.
//!
//! All files lie below a root that is empty, `/` that is, but in tests.

use core::ffi::CStr;
use core::fmt::Write as _;

use crate::scavenge::pressure::{Pressure, events, group, number, stalled};
use crate::source::{KeepErrno, Source, System};

/// Text of a fixed size, ended by zero.
#[derive(Clone, Copy)]
struct Text {
    bytes: [u8; 256],
    len: usize,
}

impl core::fmt::Write for Text {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let end = self.len + text.len();
        // One byte stays zero.
        let place = self.bytes[..255].get_mut(self.len..end).ok_or(core::fmt::Error)?;
        place.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

impl Text {
    const fn new() -> Self {
        Self {
            bytes: [0; 256],
            len: 0,
        }
    }

    fn text(&self) -> &str {
        core::str::from_utf8(&self.bytes[..self.len]).unwrap_or("")
    }
}

/// Where to look, which is found out once, and what was seen.
#[derive(Clone, Copy)]
pub(super) struct Watch {
    /// The group's folder; empty where there is none.
    folder: Text,
    second: bool,
    root: &'static str,
    /// Events counted at the last look; none before the first.
    events: Option<u64>,
}

impl Watch {
    /// Of the group this process is in, by what lies below `root`.
    pub(super) fn new(root: &'static str) -> Self {
        let none = Self {
            folder: Text::new(),
            second: false,
            root,
            events: None,
        };
        let groups = read_at(root, "/proc/self/cgroup");
        let Some((path, second)) = group(groups.text()) else {
            return none;
        };
        let groups = if second {
            "/sys/fs/cgroup"
        } else {
            "/sys/fs/cgroup/memory"
        };
        // Inside a container the path is often that of outside, and the group is the root that is seen.
        let at = |path: &str| {
            let (mut folder, path) = (Text::new(), path.trim_end_matches('/'));
            if write!(folder, "{root}{groups}{path}").is_err() {
                folder = Text::new();
            }
            Self { folder, second, ..none }
        };
        let found = [path, ""].into_iter().map(at).find(|watch| watch.usage() > 0);
        found.unwrap_or(none)
    }

    fn file(&self, name: &str) -> Text {
        if self.folder.len == 0 {
            return Text::new();
        }
        let mut path = Text::new();
        if write!(path, "/{name}").is_err() {
            return Text::new();
        }
        read_at(self.folder.text(), path.text())
    }

    fn usage(&self) -> u64 {
        let name = if self.second {
            "memory.current"
        } else {
            "memory.usage_in_bytes"
        };
        number(self.file(name).text()).unwrap_or(0)
    }

    /// Events of all time.
    fn events(&self) -> u64 {
        if self.second {
            events(self.file("memory.events").text())
        } else {
            number(self.file("memory.failcnt").text()).unwrap_or(0)
        }
    }

    /// How things stand now.
    pub(super) fn look(&mut self) -> Pressure {
        let events = self.events();
        let before = self.events.replace(events).unwrap_or(events);
        let limits: &[&str] = if self.second {
            &["memory.max", "memory.high"]
        } else {
            &["memory.limit_in_bytes"]
        };
        let limits = limits.iter().filter_map(|name| number(self.file(name).text()));
        let limit = limits.min().unwrap_or(u64::MAX);
        let own = if self.second {
            stalled(self.file("memory.pressure").text())
        } else {
            None
        };
        Pressure {
            used: if limit == u64::MAX { 0 } else { self.usage() },
            limit,
            stalled: own
                .or_else(|| stalled(read_at(self.root, "/proc/pressure/memory").text()))
                .unwrap_or(0),
            // Somebody may have set it back.
            events: events.saturating_sub(before),
        }
    }
}

/// Resident bytes of the process; 0 where the system does not say.
pub(super) fn resident() -> usize {
    let pages = read(c"/proc/self/statm");
    let pages = pages
        .text()
        .split_whitespace()
        .nth(1)
        .and_then(|pages| pages.parse::<usize>().ok());
    pages.unwrap_or(0).saturating_mul(System.granule())
}

/// As [`read`], of the file that lies at `path` below `folder`.
fn read_at(folder: &str, path: &str) -> Text {
    let mut whole = Text::new();
    if write!(whole, "{folder}{path}").is_err() {
        return Text::new();
    }
    CStr::from_bytes_until_nul(&whole.bytes).map_or(Text::new(), read)
}

/// The first bytes of a file. Empty if it cannot be read.
fn read(path: &CStr) -> Text {
    let _errno = KeepErrno::new();
    let mut text = Text::new();
    // SAFETY: a path that ends with zero; a buffer of the length that is named; the file is closed once.
    unsafe {
        let file = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file >= 0 {
            let read = libc::read(file, text.bytes.as_mut_ptr().cast(), text.bytes.len() - 1);
            text.len = usize::try_from(read).unwrap_or(0);
            libc::close(file);
        }
    }
    text
}
