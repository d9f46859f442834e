//! Counts instructions per operation with `callgrind`: the same in every run, whatever else the machine does.
//!
//! A workload is run twice, with a hundredth and with a fiftieth of its operations. The difference is the cost of the
//! operations; starting and warming up cancel out.

use super::programs::{Program, Workload};
use std::process::Stdio;

/// A workload with fewer operations than this has operations too large for a simulated processor.
const LEAST_OPS: u64 = 500_000;

/// The share of the operations with which a workload warms up; these are counted too.
const WARM_UP: f64 = 1.0 / 8.0;

pub fn count(program: &Program, workload: &Workload) -> Option<f64> {
    if workload.ops < LEAST_OPS {
        return None;
    }
    let (few, many) = (workload.ops / 100, workload.ops / 50);
    let more = collected(program, &workload.name, many)?.checked_sub(collected(program, &workload.name, few)?)?;
    Some(more as f64 / ((many - few) as f64 * (1.0 + WARM_UP)))
}

fn collected(program: &Program, workload: &str, ops: u64) -> Option<u64> {
    let mut command = program.under("valgrind");
    command
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(&program.path);
    let output = command
        .arg(workload)
        .arg(ops.to_string())
        .stdout(Stdio::null())
        .output()
        .ok()?;
    parse(&String::from_utf8_lossy(&output.stderr)).filter(|_| output.status.success())
}

/// Parses the line `==PID== Collected : 12345`.
fn parse(words: &str) -> Option<u64> {
    words
        .lines()
        .find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_count_is_found() {
        assert_eq!(
            super::parse("==1== Events    : Ir\n==1== Collected : 1234\n"),
            Some(1234)
        );
        assert_eq!(super::parse("valgrind: no such file"), None);
    }
}
