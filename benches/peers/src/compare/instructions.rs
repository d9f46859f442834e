//! Counts instructions per operation with `callgrind`: the same in every run, whatever else the machine does.
//!
//! A workload is run twice, with a hundredth of its operations, or as many as it does at once, and with twice as many.
//! The difference is the cost of the operations; starting cancels out. (Of fill and thin that is the filling alone.)

use super::figures::Run;
use super::programs::{Program, Workload};
use std::time::Duration;

/// A workload with fewer operations than this has operations too large for a simulated processor.
const LEAST_OPS: u64 = 500_000;

pub fn count(program: &Program, workload: &Workload, patience: Duration) -> Option<f64> {
    if workload.ops < LEAST_OPS {
        return None;
    }
    let counted = |ops| collected(program, &workload.name, ops, patience);
    let (few, least) = counted(workload.ops / 100)?;
    let (many, most) = counted(2 * few.ops as u64)?;
    // What warms it up is counted too.
    let ops = many.ops + many.warm_up - few.ops - few.warm_up;
    Some(most.checked_sub(least)? as f64 / ops)
}

/// What was done, and by how many instructions.
fn collected(program: &Program, workload: &str, ops: u64, patience: Duration) -> Option<(Run, u64)> {
    let mut command = program.under("valgrind");
    command
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(&program.path);
    let output = super::run_within(command.arg(workload).arg(ops.to_string()), patience)?;
    Some((Run::of(&output)?, parse(&String::from_utf8_lossy(&output.stderr))?))
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
