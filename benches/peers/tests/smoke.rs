//! Every workload runs, on whatever allocator the tests are built with, and prints what the runner reads.

use std::process::{Child, Command, Stdio};

fn begin(args: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_workload"));
    command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn end(workload: Child) -> String {
    let output = workload.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_workload_runs_and_says_what_it_cost() {
    let said = end(begin(&[]));
    let (sources, list) = said.split_once('\n').unwrap();
    let number = sources.strip_prefix("sources ").unwrap();
    assert!(u64::from_str_radix(number, 16).unwrap() != 0);
    assert!(list.lines().count() > 50, "{list}");
    let begin_few = |line: &str| {
        let [group, name, ops] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("not a workload: {line}");
        };
        let few = (ops.parse::<u64>().unwrap() / 1000).max(1);
        let begun = begin(&[name, &few.to_string()]);
        (begun, format!("group={group} workload={name} warm_up="), few)
    };
    let end_few = |(workload, first, few): (Child, String, u64)| {
        let said = end(workload);
        for field in [&*first, " user_ns=", " peak_kb="] {
            assert!(said.contains(field), "{first}: {said}");
        }
        let done = said
            .split(' ')
            .find_map(|word| word.strip_prefix("ops=")?.parse::<u64>().ok());
        assert!(done.unwrap() >= few, "{few} or more: {said}");
    };
    // Those that rest between two teeth do little else: meanwhile the others run.
    let (resting, busy): (Vec<_>, Vec<_>) = list.lines().partition(|line| line.contains(" sawtooth"));
    let resting: Vec<_> = resting.into_iter().map(begin_few).collect();
    for lines in busy.chunks(2) {
        let begun: Vec<_> = lines.iter().copied().map(begin_few).collect();
        begun.into_iter().for_each(end_few);
    }
    resting.into_iter().for_each(end_few);
}

/// The number that tells programs of different sources apart is one of all of them.
#[test]
fn every_source_is_in_the_number() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/workload");
    let main = std::fs::read_to_string(format!("{folder}/main.rs")).unwrap();
    for file in std::fs::read_dir(folder).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        assert!(main.contains(&format!("include_str!(\"{name}\")")), "{name}");
    }
}

#[test]
fn a_silence_begins_when_all_is_freed() {
    let said = end(begin(&["idle", "asleep", "0.01"]));
    let words: Vec<&str> = said.lines().map(|line| line.split('=').next().unwrap()).collect();
    assert_eq!(words, ["ready", "full", "freed", "end", "cpu_ns"]);
}

#[test]
fn single_calls_are_timed() {
    for scenario in [
        "clock",
        "small",
        "any",
        "large",
        "burst",
        "after-silence",
        "handoff",
        "crowd",
    ] {
        let said = end(begin(&["latency", scenario, "3000"]));
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines.len(), 2, "{said}");
        for (call, line) in ["allocate", "free"].iter().zip(lines) {
            assert!(line.starts_with(&format!("call={call} count=")), "{scenario}: {line}");
            assert!(
                line.contains(" p99.99=") && line.contains(" max="),
                "{scenario}: {line}"
            );
            assert!(!line.contains(" count=0 "), "{scenario}: {line}");
        }
    }
}

#[test]
fn what_is_not_there_is_refused() {
    for args in [
        &["no-such-workload"][..],
        &["pair-16", "0"],
        &["pair-16", "x"],
        &["idle", "nothing", "1"],
        &["latency", "nothing"],
        &["latency", "clock", "0"],
    ] {
        let output = begin(args).wait_with_output().unwrap();
        assert!(!output.status.success() && !output.stderr.is_empty(), "{args:?}");
    }
}
