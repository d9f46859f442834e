//! The programs that are compared: one build of `workload` for each allocator, all with the same flags.

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

/// Ours in another way, to be compared with ours as it is: only by `--allocators`.
pub const VARIANTS: &[(&str, &str)] = &[("pageheap-no-thread", "ours_no_thread")];

/// A program that is there.
#[derive(Clone, Debug)]
pub struct Program {
    pub allocator: String,
    pub path: PathBuf,
}

/// The crate's own folder.
pub fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The programs of these allocators; built, unless `built` says that they are. What does not build is returned with
/// the compiler's last words.
pub fn programs(allocators: &[String], built: bool) -> (Vec<Program>, Vec<(String, String)>) {
    let place = folder().join("target/peers");
    fs::create_dir_all(&place).expect("the target folder can be written");
    let (mut programs, mut missing) = (Vec::new(), Vec::new());
    for (allocator, feature) in ALLOCATORS.iter().chain(VARIANTS) {
        if !allocators.iter().any(|name| name == allocator) {
            continue;
        }
        let path = place.join(allocator);
        let outcome = if built { Ok(()) } else { build(feature, &path) };
        match outcome {
            Ok(()) if path.exists() => programs.push(Program {
                allocator: (*allocator).to_owned(),
                path,
            }),
            Ok(()) => missing.push(((*allocator).to_owned(), "not built yet".to_owned())),
            Err(reason) => missing.push(((*allocator).to_owned(), reason)),
        }
    }
    (programs, missing)
}

fn build(feature: &str, to: &Path) -> Result<(), String> {
    eprintln!("building {}", to.file_name().unwrap_or_default().to_string_lossy());
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
    let output = Command::new(&program.path)
        .output()
        .expect("a program that was built can run");
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
