//! Builds the workloads once for each allocator, runs them interleaved, and reports how fast each is.
//!
//! `--help` lists the options (`options.rs`).
//!
//! A round runs each chosen workload once on each allocator, one process per run. The allocators run right after one
//! another, and in another order each round, so that other load on the machine affects all of them alike. The
//! comparison is by the median processor time of an operation, with the least beside it. For exactly two allocators,
//! also by their ratio in each round, with an interval (`paired.rs`); with `--out` that is all that is written.

mod calls;
mod chart;
mod distance;
mod figures;
mod idle;
mod instructions;
mod latency;
mod options;
mod paired;
mod programs;
mod table;

use figures::{Cell, Row, Run};
use options::Options;
use programs::Program;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use table::{INSTRUCTIONS, LEAST, Results, TIME};

/// How much longer a run may take under a tool that counts.
const TOOLS: u32 = 10;

/// Of two allocators, how fast the first should be at least, relative to the second.
const AIM: f64 = 0.98;

fn run(program: &Program, workload: &str, patience: Duration) -> Option<Run> {
    let mut command = program.command();
    let output = run_within(command.arg(workload), patience)?;
    let run = Run::of(&output);
    if run.is_none() {
        let words = String::from_utf8_lossy(&output.stderr);
        eprintln!(
            "\n{} on {workload}: {}: {}",
            program.allocator,
            output.status,
            words.trim()
        );
    }
    run
}

/// What the command printed; `None`, reported on the terminal, if it took too long and was killed.
fn run_within(command: &mut Command, patience: Duration) -> Option<Output> {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("a program that was built can run");
    let end = Instant::now() + patience;
    while child.try_wait().expect("a child can be waited for").is_none() {
        if Instant::now() > end {
            child.kill().and_then(|()| child.wait()).expect("a child can be ended");
            eprintln!("\n{command:?}: not done after {patience:?}");
            return None;
        }
        thread::sleep(Duration::from_millis(2));
    }
    Some(child.wait_with_output().expect("it has ended"))
}

/// A cell of which a run failed stays empty: what is left of it would be its better runs.
fn compare(options: &Options, programs: &[Program], missing: Vec<(String, String)>) -> Result<Results, String> {
    let known = programs::workloads(&programs[0]);
    options.check_names(&known)?;
    let chosen = known.into_iter();
    let chosen = chosen.filter(|workload| options.wants(&workload.group, &workload.name));
    let empty = vec![Cell::default(); programs.len()];
    let mut rows: Vec<Row> = chosen
        .map(|workload| Row {
            workload,
            cells: empty.clone(),
        })
        .collect();
    let mut trips = Vec::new();
    for round in 0..options.rounds {
        for row in &mut rows {
            trips.push(distance::there_and_back());
            eprint!("\rround {} of {}: {:24}", round + 1, options.rounds, row.workload.name);
            for turn in 0..programs.len() {
                let at = (turn + round) % programs.len();
                row.cells[at]
                    .runs
                    .extend(run(&programs[at], &row.workload.name, options.patience));
            }
        }
    }
    for cell in rows.iter_mut().flat_map(|row| &mut row.cells) {
        if cell.runs.len() < options.rounds {
            cell.runs.clear();
        }
    }
    let patience = TOOLS * options.patience;
    if options.calls && calls::possible() {
        for row in &mut rows {
            eprint!("\rsystem calls: {:32}", row.workload.name);
            for (cell, program) in row.cells.iter_mut().zip(programs) {
                cell.calls = calls::count(program, &row.workload.name, (row.workload.ops / 10).max(1), patience);
            }
        }
    } else if options.calls {
        eprint!("\nsystem calls are not counted: there is no strace that may trace");
    }
    if options.instructions {
        for row in &mut rows {
            eprint!("\rinstructions: {:32}", row.workload.name);
            for (cell, program) in row.cells.iter_mut().zip(programs) {
                cell.instructions = instructions::count(program, &row.workload, patience);
            }
        }
    }
    eprintln!();
    let allocators = programs.iter().map(|program| program.allocator.clone()).collect();
    Ok(Results {
        allocators,
        missing,
        rows,
        distance: distance::text(&trips),
    })
}

fn write(folder: &Path, name: &str, text: &str) -> Result<(), String> {
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(folder.join(name), text));
    written.map_err(|error| format!("{}: {error}", folder.join(name).display()))
}

/// What the results are of: the tree, and the options.
fn origin() -> String {
    let mut command = Command::new("git");
    let tree = command
        .args(["describe", "--always", "--dirty"])
        .current_dir(programs::folder())
        .output();
    let tree = tree.map_or(String::new(), |output| {
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    });
    let options: Vec<String> = std::env::args().skip(1).collect();
    format!("\nTree {tree}: compare {}\n", options.join(" "))
}

/// The terminal gets tables; the folder of `--out` gets the tables, their figures as CSV, and charts.
fn report(options: &Options) -> Result<(), String> {
    let (programs, missing) = programs::programs(&options.allocators, options.built);
    if programs.is_empty() {
        return Err(format!("no allocator could be built: {missing:?}"));
    }
    if let Some(silence) = options.idle {
        let names: Vec<String> = programs.iter().map(|program| program.allocator.clone()).collect();
        let scenes = idle::scenes(&programs, silence, options.patience);
        let text = idle::text(&names, &scenes);
        print!("{text}");
        let Some(folder) = &options.out else { return Ok(()) };
        write(folder, "idle.txt", &(text + &origin()))?;
        write(folder, "idle.csv", &idle::csv(&names, &scenes))?;
        return scenes.iter().try_for_each(|scene| {
            write(
                folder,
                &format!("idle-{}.svg", scene.scenario),
                &idle::svg(&names, scene),
            )
        });
    }
    if options.latency {
        let latencies = latency::measure(options, &programs);
        print!("{}", latencies.text());
        let Some(folder) = &options.out else { return Ok(()) };
        write(folder, "latency.txt", &(latencies.text() + &origin()))?;
        return write(folder, "latency.csv", &latencies.csv());
    }
    let results = compare(options, &programs, missing)?;
    print!("{}{}", results.text(TIME), results.text(LEAST));
    if options.instructions {
        print!("{}", results.text(INSTRUCTIONS));
    }
    println!("{}", results.distance);
    if let [_, _] = results.allocators[..] {
        let text = paired::text(&results.allocators, &results.rows, AIM);
        print!("{text}");
        if let Some(folder) = &options.out {
            return write(folder, "paired.txt", &(text + &origin()));
        }
    }
    let Some(folder) = &options.out else { return Ok(()) };
    write(folder, "peers.md", &(results.markdown() + &origin()))?;
    write(folder, "peers.csv", &results.csv())?;
    results
        .pictures()
        .iter()
        .try_for_each(|(name, svg)| write(folder, name, svg))
}

fn main() -> ExitCode {
    if std::env::args().any(|arg| arg == "--help" || arg == "-h") {
        print!("{}", options::USAGE);
        return ExitCode::SUCCESS;
    }
    match Options::parse(std::env::args().skip(1)).and_then(|options| report(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}
