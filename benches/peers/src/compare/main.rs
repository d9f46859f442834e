//! Builds the workloads once for each allocator, runs them interleaved, and writes down who is how fast.
//!
//! ```text
//! compare [--allocators A,B] [--groups G,H] [--workloads V,W] [--rounds N] [--built] [--out DIR]
//! ```
//!
//! A round runs each chosen workload on each allocator once, one process a run, the allocators right after one another
//! and in another order each round: what else the machine does meets all of them alike. What is compared is the median
//! of the processor time an operation took.

mod figures;
mod programs;
mod table;

use figures::{Cell, Row, Run};
use programs::{ALLOCATORS, Program};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use table::Results;

/// What the command line asks for.
#[derive(Debug)]
struct Options {
    allocators: Vec<String>,
    /// All if empty.
    groups: Vec<String>,
    workloads: Vec<String>,
    rounds: usize,
    built: bool,
    /// Where the results go, beside the terminal.
    out: Option<PathBuf>,
}

impl Options {
    fn parse(args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            allocators: ALLOCATORS.iter().map(|(name, _)| (*name).to_owned()).collect(),
            groups: Vec::new(),
            workloads: Vec::new(),
            rounds: 3,
            built: false,
            out: None,
        };
        let mut args = args;
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
            let list = |text: String| text.split(',').map(str::to_owned).collect();
            match arg.as_str() {
                "--allocators" => options.allocators = list(value()?),
                "--groups" => options.groups = list(value()?),
                "--workloads" => options.workloads = list(value()?),
                "--rounds" => options.rounds = value()?.parse().map_err(|_| "--rounds needs a number")?,
                "--built" => options.built = true,
                "--out" => options.out = Some(value()?.into()),
                other => return Err(format!("no option is called {other}")),
            }
        }
        let unknown = options
            .allocators
            .iter()
            .find(|name| ALLOCATORS.iter().all(|(known, _)| known != name));
        unknown.map_or(Ok(()), |name| Err(format!("no allocator is called {name}")))?;
        Ok(options)
    }

    fn wants(&self, group: &str, workload: &str) -> bool {
        let none = self.groups.is_empty() && self.workloads.is_empty();
        none || self.groups.iter().any(|name| name == group) || self.workloads.iter().any(|name| name == workload)
    }
}

fn run(program: &Program, workload: &str) -> Option<Run> {
    let output = Command::new(&program.path)
        .arg(workload)
        .output()
        .expect("a program that was built can run");
    let run = Run::parse(&String::from_utf8_lossy(&output.stdout)).filter(|_| output.status.success());
    if run.is_none() {
        let words = String::from_utf8_lossy(&output.stderr);
        eprintln!(
            "{} on {workload}: {}: {}",
            program.allocator,
            output.status,
            words.trim()
        );
    }
    run
}

fn compare(options: &Options) -> Result<Results, String> {
    let (programs, missing) = programs::programs(&options.allocators, options.built);
    let first = programs.first().ok_or("no allocator could be built")?;
    let chosen = programs::workloads(first)
        .into_iter()
        .filter(|(group, name)| options.wants(group, name));
    let empty = vec![Cell::default(); programs.len()];
    let rows = chosen.map(|(group, workload)| Row {
        group,
        workload,
        cells: empty.clone(),
    });
    let mut rows: Vec<Row> = rows.collect();
    for round in 0..options.rounds {
        for row in &mut rows {
            eprint!("\rround {} of {}: {:24}", round + 1, options.rounds, row.workload);
            for turn in 0..programs.len() {
                let at = (turn + round) % programs.len();
                row.cells[at].runs.extend(run(&programs[at], &row.workload));
            }
        }
    }
    eprintln!();
    let allocators = programs.into_iter().map(|program| program.allocator).collect();
    Ok(Results {
        allocators,
        missing,
        rows,
    })
}

/// The terminal gets a table, the folder of `--out` a CSV.
fn report(options: &Options) -> Result<(), String> {
    let results = compare(options)?;
    print!("{}", results.text());
    if let Some(folder) = &options.out {
        let written = fs::create_dir_all(folder).and_then(|()| fs::write(folder.join("peers.csv"), results.csv()));
        written.map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    Ok(())
}

fn main() -> ExitCode {
    match Options::parse(std::env::args().skip(1)).and_then(|options| report(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}
