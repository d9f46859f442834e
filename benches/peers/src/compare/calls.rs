//! Counts system calls with `strace`: those between the two marks that a workload puts around what it measures.
//!
//! The marks are calls of `getppid`, which nothing else makes; the meter's own `getrusage` is not counted. A tenth of
//! the operations is enough, because counts do not jitter as times do.

use super::figures::Run;
use super::programs::Program;
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, fs, process};

/// Calls by name, per 1,000 operations.
pub type Calls = BTreeMap<String, f64>;

/// Whether there is a `strace` that may trace.
pub fn possible() -> bool {
    let mut command = Command::new("strace");
    let quiet = command
        .args(["-o", "/dev/null", "true"])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

pub fn count(program: &Program, workload: &str, ops: u64, patience: Duration) -> Option<Calls> {
    let log = env::temp_dir().join(format!("pageheap-peers-{}.strace", process::id()));
    let mut command = program.under("strace");
    command.args(["-f", "-qq", "-o"]).arg(&log).arg(&program.path);
    command.arg(workload).arg(ops.to_string());
    let run = super::run_within(&mut command, patience).and_then(|output| Run::of(&output));
    let text = fs::read_to_string(&log);
    // It does not matter whether the log could be removed.
    let _ = fs::remove_file(&log);
    let (calls, ops) = (between_marks(&text.ok()?), run?.ops);
    let per_thousand = |(name, count)| (name, count as f64 * 1000.0 / ops);
    Some(calls.into_iter().map(per_thousand).collect())
}

/// A line is `PID name(arguments) = result`; the second half of an interrupted call begins with `<...`.
fn between_marks(log: &str) -> BTreeMap<String, u64> {
    let mut calls = BTreeMap::new();
    let mut inside = false;
    for line in log.lines() {
        let rest = line.split_once(' ').map_or("", |(_, rest)| rest.trim_start());
        let Some((name, _)) = rest.split_once('(') else {
            continue;
        };
        if name == "getppid" {
            inside = !inside;
        } else if inside && name != "getrusage" && is_name(name) {
            *calls.entry(name.to_owned()).or_insert(0) += 1;
        }
    }
    calls
}

fn is_name(word: &str) -> bool {
    word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

#[cfg(test)]
mod tests {
    #[test]
    fn calls_between_the_marks_count() {
        let log = "7 mmap(1) = 2\n7 getppid() = 1\n7 futex(0x1 <unfinished ...>\n8  madvise(2) = 0\n\
                   7 <... futex resumed>) = 0\n8 +++ exited with 0 +++\n7 madvise(3) = 0\n7 getppid() = 1\n\
                   7 brk(0) = 1\n";
        let calls = super::between_marks(log);
        assert_eq!(
            calls.into_iter().collect::<Vec<_>>(),
            [("futex".to_owned(), 1), ("madvise".to_owned(), 2)]
        );
    }
}
