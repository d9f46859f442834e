//! The latency test: how long single calls take, as percentiles, on each allocator.
//!
//! Each figure is the median over the rounds of what one process measured (`src/workload/latency.rs`), so a round in
//! which the machine was away for a moment does not decide even the maximum.

use super::Options;
use super::figures::median;
use super::programs::Program;
use super::table::figure;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The scenarios, and what they are.
pub const SCENARIOS: &[(&str, &str)] = &[
    ("clock", "nothing between two readings of the clock"),
    ("small", "65,536 slots of 16 to 1,040 B, replaced at random"),
    ("any", "8,192 slots of 16 B to 64 KiB, replaced at random"),
    ("large", "100 slots of 32 KiB to 1 MiB, replaced at random"),
    (
        "burst",
        "500,000 blocks of 16 to 1,040 B, freed at random, again and again",
    ),
    ("after-silence", "100,000 such blocks after a second without a call"),
    ("handoff", "16 to 1,040 B, allocated by one thread, freed by another"),
    (
        "crowd",
        "eight threads, each with 4,096 slots of 16 to 1,040 B, that pass blocks on",
    ),
];

/// What a line says of the calls of one kind, in nanoseconds.
const FIGURES: [&str; 6] = ["mean", "p50", "p99", "p99.9", "p99.99", "max"];

/// The kinds.
const CALLS: [&str; 2] = ["allocate", "free"];

/// A scenario, a kind of call, an allocator, and which figure: one value for each round.
type Key = (usize, usize, usize, usize);

/// All of them. Where a run failed, that of its allocator and scenario has none.
#[derive(Debug)]
pub struct Latencies {
    allocators: Vec<String>,
    values: BTreeMap<Key, Vec<f64>>,
}

/// Runs each scenario on each allocator, by turns.
pub fn measure(options: &Options, programs: &[Program]) -> Latencies {
    let mut values: BTreeMap<Key, Vec<f64>> = BTreeMap::new();
    let mut failed = Vec::new();
    for round in 0..options.rounds {
        for (scenario, (name, _)) in SCENARIOS.iter().enumerate() {
            eprint!("\rround {} of {}: {name:24}", round + 1, options.rounds);
            for turn in 0..programs.len() {
                let at = (turn + round) % programs.len();
                let mut command = programs[at].command();
                let output = super::run_within(command.args(["latency", name]), options.patience);
                let text = output.filter(|output| output.status.success());
                let text = text.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
                let Some(figures) = text.as_deref().and_then(parse) else {
                    eprintln!("\n{} failed on {name}", programs[at].allocator);
                    failed.push((scenario, at));
                    continue;
                };
                for (call, figures) in figures.iter().enumerate() {
                    for (which, value) in figures.iter().enumerate() {
                        values.entry((scenario, call, at, which)).or_default().push(*value);
                    }
                }
            }
        }
    }
    eprintln!();
    values.retain(|&(scenario, _, allocator, _), _| !failed.contains(&(scenario, allocator)));
    Latencies {
        allocators: programs.iter().map(|program| program.allocator.clone()).collect(),
        values,
    }
}

/// The figures of both kinds.
fn parse(text: &str) -> Option<[[f64; FIGURES.len()]; CALLS.len()]> {
    let mut both = [[0.0; FIGURES.len()]; CALLS.len()];
    for (call, figures) in CALLS.iter().zip(&mut both) {
        let line = text.lines().find(|line| line.starts_with(&format!("call={call} ")))?;
        let words: BTreeMap<&str, &str> = line.split(' ').filter_map(|word| word.split_once('=')).collect();
        for (name, value) in FIGURES.iter().zip(figures) {
            *value = words.get(name)?.parse().ok()?;
        }
    }
    Some(both)
}

impl Latencies {
    fn median(&self, key: Key) -> Option<f64> {
        median(self.values.get(&key)?.clone())
    }

    /// A table for each scenario and kind of call.
    pub fn text(&self) -> String {
        let mut text = String::new();
        self.each_call(|scenario, call| {
            let (name, about) = SCENARIOS[scenario];
            write!(text, "\n{name}, {}: {about}\n{:14}", CALLS[call], "ns").expect("a string");
            FIGURES
                .iter()
                .for_each(|name| write!(text, "{name:>10}").expect("a string"));
            text.push('\n');
            for (at, allocator) in self.allocators.iter().enumerate() {
                write!(text, "{allocator:14}").expect("a string");
                for which in 0..FIGURES.len() {
                    let value = figure(self.median((scenario, call, at, which)));
                    write!(text, "{value:>10}").expect("a string");
                }
                text.push('\n');
            }
        });
        text
    }

    pub fn csv(&self) -> String {
        let mut text = format!("scenario,call,allocator,{}\n", FIGURES.join(","));
        self.each_call(|scenario, call| {
            for (at, allocator) in self.allocators.iter().enumerate() {
                write!(text, "{},{},{allocator}", SCENARIOS[scenario].0, CALLS[call]).expect("a string");
                for which in 0..FIGURES.len() {
                    let value = self.median((scenario, call, at, which));
                    let value = value.map_or(String::new(), |value| format!("{value:.1}"));
                    write!(text, ",{value}").expect("a string");
                }
                text.push('\n');
            }
        });
        text
    }

    /// Every scenario and kind.
    fn each_call(&self, mut tell: impl FnMut(usize, usize)) {
        for (scenario, (name, _)) in SCENARIOS.iter().enumerate() {
            // Both are the same of the clock.
            let kinds = if *name == "clock" { 1 } else { CALLS.len() };
            (0..kinds).for_each(|call| tell(scenario, call));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let line = |call| format!("call={call} count=3 mean=4.5 p50=4 p99=5 p99.9=6 p99.99=7 max=8\n");
        let both = parse(&(line("allocate") + &line("free"))).unwrap();
        assert_eq!(both, [[4.5, 4.0, 5.0, 6.0, 7.0, 8.0]; 2]);
        assert!(parse(&line("free")).is_none());
        let values = [3.0, 1.0, 2.0].map(|max| max * 1000.0).to_vec();
        let latencies = Latencies {
            allocators: vec!["x".to_owned()],
            values: BTreeMap::from([((1, 0, 0, 5), values)]),
        };
        assert!(latencies.csv().contains("small,allocate,x,,,,,,2000.0\n"));
        assert_eq!(
            latencies.text().lines().filter(|line| line.starts_with("x ")).count(),
            15
        );
    }
}
