//! What the system says of memory: the limit of our cgroup, how full it is, how long tasks have waited for memory.
//!
//! | read | version 2 | version 1 |
//! |---|---|---|
//! | limit | `memory.max`, `memory.high` | `memory.limit_in_bytes` |
//! | used | `memory.current` | `memory.usage_in_bytes` |
//! | stalls | `memory.pressure`, else `/proc/pressure/memory` | the latter |
//!
//! Three small files once a second, by the background thread, by raw system calls into a buffer on its stack: ~10 µs.
//! What is not there, or may not be read, is taken for no limit and no pressure; nothing is said about it. Used counts
//! the whole group, page cache included, as the kernel does when it decides whom to kill.
//!
//! From nine tenths of the limit, or when tasks have stalled for a tenth of the last ten seconds, all that is free goes
//! back at once, whatever was to be kept: a cgroup that is full reclaims or kills, and our free pages are the cheapest
//! there are.

use core::ffi::CStr;
use core::fmt::Write as _;

use crate::scavenge::pressure::{Pressure, group, number, stalled};
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

/// Where to look. Found out once.
pub(super) struct Watch {
    /// The group's folder; empty where there is none.
    folder: Text,
    second: bool,
}

impl Watch {
    /// Of the group this process is in.
    pub(super) fn new() -> Self {
        let none = Self {
            folder: Text::new(),
            second: false,
        };
        let groups = read(c"/proc/self/cgroup");
        let Some((path, second)) = group(groups.text()) else {
            return none;
        };
        let root = if second {
            "/sys/fs/cgroup"
        } else {
            "/sys/fs/cgroup/memory"
        };
        // Inside a container the path is often that of outside, and the group is the root that is seen.
        [path, ""]
            .into_iter()
            .map(|path| Self::at(root, path, second))
            .find(|watch| watch.usage() > 0)
            .unwrap_or(none)
    }

    fn at(root: &str, path: &str, second: bool) -> Self {
        let mut folder = Text::new();
        if write!(folder, "{root}{}", path.trim_end_matches('/')).is_err() {
            folder = Text::new();
        }
        Self { folder, second }
    }

    fn file(&self, name: &str) -> Text {
        let mut path = Text::new();
        if self.folder.len == 0 || write!(path, "{}/{name}", self.folder.text()).is_err() {
            return Text::new();
        }
        CStr::from_bytes_until_nul(&path.bytes).map_or(Text::new(), read)
    }

    fn usage(&self) -> u64 {
        let name = if self.second {
            "memory.current"
        } else {
            "memory.usage_in_bytes"
        };
        number(self.file(name).text()).unwrap_or(0)
    }

    /// How things stand now.
    pub(super) fn look(&self) -> Pressure {
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
                .or_else(|| stalled(read(c"/proc/pressure/memory").text()))
                .unwrap_or(0),
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
