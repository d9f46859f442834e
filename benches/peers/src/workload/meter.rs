//! Measures what a run costs, by the system's figures and without an allocation: processor time and faults from
//! `getrusage`, resident sizes from `/proc/self/status`, both read into the stack.

use std::time::Instant;

/// A moment.
#[derive(Debug)]
pub struct Reading {
    at: Instant,
    user_ns: u64,
    system_ns: u64,
    minor_faults: u64,
    major_faults: u64,
    switches: u64,
}

/// The cost between two moments.
#[derive(Debug)]
pub struct Cost {
    pub wall_ns: u64,
    pub user_ns: u64,
    pub system_ns: u64,
    pub minor_faults: u64,
    pub major_faults: u64,
    /// How often another program ran instead of ours.
    pub switches: u64,
}

impl Reading {
    pub fn now() -> Self {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: zeroes are a valid `rusage`, and the call writes one.
        let usage = unsafe {
            libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
            usage.assume_init()
        };
        let ns = |time: libc::timeval| time.tv_sec as u64 * 1_000_000_000 + time.tv_usec as u64 * 1000;
        Self {
            at: Instant::now(),
            user_ns: ns(usage.ru_utime),
            system_ns: ns(usage.ru_stime),
            minor_faults: usage.ru_minflt as u64,
            major_faults: usage.ru_majflt as u64,
            switches: usage.ru_nivcsw as u64,
        }
    }

    pub fn until(&self, end: &Self) -> Cost {
        Cost {
            wall_ns: (end.at - self.at).as_nanos() as u64,
            user_ns: end.user_ns - self.user_ns,
            system_ns: end.system_ns - self.system_ns,
            minor_faults: end.minor_faults - self.minor_faults,
            major_faults: end.major_faults - self.major_faults,
            switches: end.switches - self.switches,
        }
    }
}

/// A call that only a tracer sees: `compare --calls` counts the calls between two of them.
pub fn mark() {
    // SAFETY: has no preconditions.
    unsafe { libc::getppid() };
}

/// Resident kilobytes now, and the most there were.
pub fn resident_kb() -> (u64, u64) {
    let mut bytes = [0_u8; 4096];
    // SAFETY: a path that ends in zero; a buffer with its length; a descriptor of our own.
    let len = unsafe {
        let file = libc::open(c"/proc/self/status".as_ptr(), libc::O_RDONLY);
        let len = libc::read(file, bytes.as_mut_ptr().cast(), bytes.len());
        libc::close(file);
        len
    };
    let text = std::str::from_utf8(&bytes[..len.max(0) as usize]).unwrap_or("");
    let line = |name| text.lines().find_map(|line| line.strip_prefix(name));
    let figure = |name| {
        let digits = line(name).and_then(|rest| rest.split_whitespace().next());
        digits.and_then(|digits| digits.parse().ok()).unwrap_or(0)
    };
    (figure("VmRSS:"), figure("VmHWM:"))
}

/// Writes to standard output, bypassing all buffers.
pub fn say(words: &str) {
    // SAFETY: bytes with their length.
    unsafe { libc::write(libc::STDOUT_FILENO, words.as_ptr().cast(), words.len()) };
}
