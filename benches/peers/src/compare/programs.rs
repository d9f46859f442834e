//! The programs to compare: one build of `workload` for each allocator, all with the same flags.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Name, and the feature that builds it; all at their defaults. Ours is first.
pub const ALLOCATORS: &[(&str, &str)] = &[
    (OURS, "ours"),
    ("glibc", ""),
    ("mimalloc2", "mimalloc2"),
    ("mimalloc3", "mimalloc3"),
    ("jemalloc", "jemalloc"),
    ("snmalloc", "snmalloc"),
    ("rpmalloc", "rpmalloc"),
    ("rusty_alloc", "rusty_alloc"),
    ("tcmalloc", "tcmalloc"),
    ("talc", "talc"),
];

pub const OURS: &str = "pageheap";

/// Variants of ours, to compare with the default: the same program, with an environment variable. Only by
/// `--allocators`.
pub const VARIANTS: &[(&str, (&str, &str))] = &[("pageheap-no-thread", ("PAGEHEAP_BACKGROUND", "0"))];

/// What every other program gets: the default, in as many bytes. The length of the environment decides where a
/// program's stack is, and that alone can be a twentieth of a row.
const DEFAULT: (&str, &str) = ("PAGEHEAP_BACKGROUND", "1");

/// A program that exists.
#[derive(Clone, Debug)]
pub struct Program {
    pub allocator: String,
    pub path: PathBuf,
    /// The environment variable it gets, if any.
    pub variable: Option<(&'static str, &'static str)>,
}

impl Program {
    /// Runs it.
    pub fn command(&self) -> Command {
        self.told(Command::new(&self.path))
    }

    /// Runs it under another program.
    pub fn under(&self, tool: &str) -> Command {
        self.told(Command::new(tool))
    }

    fn told(&self, mut command: Command) -> Command {
        let (name, value) = self.variable.unwrap_or(DEFAULT);
        command.env(name, value);
        command
    }
}

/// The crate's own folder.
pub fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The programs of these allocators; builds them, unless `built` says that they exist. Those that do not build are
/// returned with the compiler's last words, and those that were built from other sources than the first.
pub fn programs(allocators: &[String], built: bool) -> (Vec<Program>, Vec<(String, String)>) {
    let place = folder().join("target/peers");
    fs::create_dir_all(&place).expect("the target folder can be written");
    let (mut programs, mut missing) = (Vec::new(), Vec::new());
    let chosen = |name: &str| allocators.iter().any(|chosen| chosen == name);
    for (allocator, feature) in ALLOCATORS {
        let variants = VARIANTS.iter().filter(|(name, _)| *allocator == OURS && chosen(name));
        let (own, variants) = (chosen(allocator), variants.collect::<Vec<_>>());
        if !own && variants.is_empty() {
            continue;
        }
        let path = place.join(allocator);
        let outcome = if built { Ok(()) } else { build(feature, &path) };
        match outcome {
            Ok(()) if path.exists() => {
                let program = |name: &str, variable| Program {
                    allocator: name.to_owned(),
                    path: path.clone(),
                    variable,
                };
                programs.extend(own.then(|| program(allocator, None)));
                programs.extend(variants.iter().map(|(name, variable)| program(name, Some(*variable))));
            }
            Ok(()) => missing.push(((*allocator).to_owned(), "not built yet".to_owned())),
            Err(reason) => missing.push(((*allocator).to_owned(), reason)),
        }
    }
    let sources: Vec<Option<String>> = programs.iter().map(sources).collect();
    let mut alike = sources.iter().map(|own| *own == sources[0]);
    programs.retain(|program: &Program| {
        let is_alike = alike.next().unwrap_or(false);
        if !is_alike {
            let reason = "it was built from other workloads: build it again".to_owned();
            missing.push((program.allocator.clone(), reason));
        }
        is_alike
    });
    (programs, missing)
}

/// The number of the sources that a program was built from, as it prints it first.
fn sources(program: &Program) -> Option<String> {
    let output = program.command().output().expect("a program that was built can run");
    let text = String::from_utf8_lossy(&output.stdout);
    Some(text.lines().next()?.strip_prefix("sources ")?.to_owned())
}

fn build(feature: &str, to: &Path) -> Result<(), String> {
    eprintln!("building {}", to.file_name().unwrap_or_default().to_string_lossy());
    // One of before must not stand in for it.
    let _ = fs::remove_file(to);
    let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args([
            "build",
            "--release",
            "--quiet",
            "--bin",
            "workload",
            "--features",
            feature,
        ])
        .args(["--target-dir", "target"])
        .current_dir(folder())
        .output()
        .map_err(|error| error.to_string())?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        let reason = words
            .lines()
            .rfind(|line| line.contains("error"))
            .unwrap_or("the build failed");
        return Err(reason.trim().chars().take(200).collect());
    }
    fs::copy(folder().join("target/release/workload"), to)
        .map(drop)
        .map_err(|error| error.to_string())
}

/// A workload, as the programs list it.
#[derive(Clone, Debug)]
pub struct Workload {
    pub group: String,
    pub name: String,
    pub ops: u64,
}

/// The workloads that a program has.
pub fn workloads(program: &Program) -> Vec<Workload> {
    let output = program.command().output().expect("a program that was built can run");
    let text = String::from_utf8(output.stdout).expect("names are text");
    let workload = |line: &str| {
        let mut words = line.split(' ').map(str::to_owned);
        let (group, name, ops) = (words.next()?, words.next()?, words.next()?);
        Some(Workload {
            group,
            name,
            ops: ops.parse().ok()?,
        })
    };
    text.lines().filter_map(workload).collect()
}
