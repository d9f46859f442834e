//! Every workload runs, on whatever allocator the tests are built with, and prints what the runner reads.

use std::process::Command;

fn workload(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_workload"))
        .args(args)
        .output()
        .unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_workload_runs_and_says_what_it_cost() {
    let list = workload(&[]);
    assert!(list.lines().count() > 50, "{list}");
    for line in list.lines() {
        let [group, name, ops] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("not a workload: {line}");
        };
        let few = (ops.parse::<u64>().unwrap() / 1000).max(1).to_string();
        let said = workload(&[name, &few]);
        for field in [
            format!("group={group} workload={name} ops={few} "),
            " user_ns=".into(),
            " peak_kb=".into(),
        ] {
            assert!(said.contains(&field), "{line}: {said}");
        }
    }
}

#[test]
fn a_silence_begins_when_all_is_freed() {
    let said = workload(&["idle", "asleep", "0.01"]);
    let words: Vec<&str> = said.lines().map(|line| line.split('=').next().unwrap()).collect();
    assert_eq!(words, ["ready", "full", "freed", "end", "cpu_ns"]);
}

#[test]
fn what_is_not_there_is_refused() {
    for args in [
        &["no-such-workload"][..],
        &["pair-16", "0"],
        &["pair-16", "x"],
        &["idle", "nothing", "1"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_workload"))
            .args(args)
            .output()
            .unwrap();
        assert!(!output.status.success() && !output.stderr.is_empty(), "{args:?}");
    }
}
