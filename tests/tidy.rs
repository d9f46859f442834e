//! The house rules, as an ordinary test: imports, `unsafe`, `cfg`, atomics, orderings, sizes, words, links.
//!
//! A rule reads a [`House`] (this repository, or the snippets of a self-test) and returns its findings, each as
//! `file:line: what is wrong, and what to do`. Every rule has a test beside it that shows it a bad house: a rule that
//! cannot fail is no rule. The lists at the top are the only places for exceptions, and a stale entry is a finding too.
//!
//! The rules read text, split into code and comments by `tidy/lex.rs`. That is enough for formatted code, and no parser
//! has to be trusted. What clippy and rustc can check, they check (`undocumented_unsafe_blocks`, `missing_docs`); the
//! rest is here.

#[path = "tidy/cited.rs"]
mod cited;
#[path = "tidy/examples.rs"]
mod examples;
#[path = "tidy/lex.rs"]
mod lex;
#[path = "tidy/manifest.rs"]
mod manifest;
#[path = "tidy/modules.rs"]
mod modules;
#[path = "tidy/safety.rs"]
mod safety;
#[path = "tidy/shape.rs"]
mod shape;
#[path = "tidy/titles.rs"]
mod titles;

use lex::Source;
use std::path::Path;
use std::sync::LazyLock;

/// Files that may hold `unsafe`, each for one of these reasons: memory two threads share (`sync`), memory not ours yet
/// (`source`, `metadata`), memory we hand out (`heap`), the system's own calls (`fatal`), and a register (`unindexed`).
/// All others forbid it.
const UNSAFE_HOMES: &[&str] = &[
    "src/arena/account.rs",
    "src/arena/api2.rs",
    "src/arena/backing.rs",
    "src/arena/boxed.rs",
    "src/arena/bump.rs",
    "src/arena/lists.rs",
    "src/arena/local.rs",
    "src/arena/pieces.rs",
    "src/arena/pool.rs",
    "src/arena/slabs.rs",
    "src/arena/typed.rs",
    "src/arena/free_list.rs",
    "src/arena/owner.rs",
    "src/arena/sharded.rs",
    "src/arena/slot_box.rs",
    "src/arena/slots.rs",
    "src/arena/unsize.rs",
    "src/fatal.rs",
    "src/global/background/unix.rs",
    "src/global/background/windows.rs",
    "src/global/environment.rs",
    "src/global/forever.rs",
    "src/global/fork.rs",
    "src/global/calls.rs",
    "src/global/inline.rs",
    "src/global/large.rs",
    "src/global/tls.rs",
    "src/global/tls/current.rs",
    "src/global/mod.rs",
    "src/global/pressure.rs",
    "src/global/pressure/files.rs",
    "src/global/pthread.rs",
    "src/global/pthread/current.rs",
    "src/global/status.rs",
    "src/global/unload.rs",
    "src/guard/mod.rs",
    "src/guard/plain.rs",
    "src/guard/sealed.rs",
    "src/heap/begin.rs",
    "src/heap/cached.rs",
    "src/heap/end.rs",
    "src/heap/grow.rs",
    "src/heap/ladder.rs",
    "src/heap/mod.rs",
    "src/heap/scan.rs",
    "src/instance/api2.rs",
    "src/instance/mod.rs",
    "src/metadata.rs",
    "src/object/annex.rs",
    "src/object/annexed.rs",
    "src/object/central.rs",
    "src/object/close.rs",
    "src/object/commons.rs",
    "src/object/ended.rs",
    "src/object/fork.rs",
    "src/object/hoarding.rs",
    "src/object/magazine.rs",
    "src/object/mark.rs",
    "src/object/meeting.rs",
    "src/object/mod.rs",
    "src/object/model.rs",
    "src/object/plot.rs",
    "src/object/register.rs",
    "src/object/run.rs",
    "src/object/transfer.rs",
    "src/object/shorten.rs",
    "src/object/stray.rs",
    "src/object/racks.rs",
    "src/object/slots.rs",
    "src/object/preempted.rs",
    "src/object/presence.rs",
    "src/object/rack.rs",
    "src/object/tables.rs",
    "src/object/thread.rs",
    "src/object/spans.rs",
    "src/object/flag.rs",
    "src/object/share.rs",
    "src/object/shared.rs",
    "src/object/threads.rs",
    "src/source/interpreted.rs",
    "src/source/mod.rs",
    "src/source/numbers.rs",
    "src/source/over_system.rs",
    "src/source/pagemap.rs",
    "src/source/region.rs",
    "src/source/shared.rs",
    "src/source/simulated.rs",
    "src/source/simulated/map.rs",
    "src/source/split.rs",
    "src/source/unix.rs",
    "src/source/windows.rs",
    "src/sync/model.rs",
    "src/sync/native.rs",
    "src/sync/windows.rs",
    "src/unindexed.rs",
];

/// Files and folders that may test whether a model checker is at work.
const MODEL_CFG_HOMES: &[&str] = &["src/cache.rs", "src/geometry.rs", "src/lib.rs", "src/sync/"];

/// Files and folders that may test for the operating system.
const SYSTEM_CFG_HOMES: &[&str] = &[
    "src/arena/on_process.rs",
    "src/arena/lists_on_process.rs",
    "src/arena/process.rs",
    "src/fatal.rs",
    "src/global/",
    "src/lib.rs",
    "src/object/presence.rs",
    "src/source/",
    "src/sync/",
];

/// Files and folders, outside the models, that may name `core::sync::atomic` directly.
const ATOMIC_HOMES: &[&str] = &[
    "src/arena/generation.rs",
    "src/fatal.rs",
    "src/global/",
    "src/object/presence.rs",
    "src/source/ledger.rs",
    "src/source/pagemap.rs",
    "src/source/region.rs",
    "src/source/unix.rs",
    "src/source/windows.rs",
    "src/sync/",
];

/// Tools for tests, which may use a lock that allocates.
const FOREIGN_LOCK_HOMES: &[&str] = &["src/source/simulated.rs"];

/// Files longer than the limit, with their length when the rule was introduced. They may only shrink, and leave the
/// list once they obey.
const LONG_FILES: &[(&str, usize)] = &[];

/// The files of a repository: Rust files split into code and comments, the others as they are.
struct House {
    rust: Vec<Source>,
    other: Vec<(String, String)>,
}

impl House {
    /// This repository, without build outputs.
    fn read() -> Self {
        let mut house = Self::of(&[]);
        house.walk(Path::new(env!("CARGO_MANIFEST_DIR")), "");
        house.rust.sort_by(|a, b| a.path.cmp(&b.path));
        house
    }

    /// A house of snippets.
    fn of(files: &[(&str, &str)]) -> Self {
        let mut house = Self {
            rust: Vec::new(),
            other: Vec::new(),
        };
        files.iter().for_each(|(path, text)| house.add(path, text));
        house
    }

    fn add(&mut self, path: &str, text: &str) {
        if path.ends_with(".rs") {
            self.rust.push(Source::new(path, text));
        } else {
            self.other.push((path.to_owned(), text.to_owned()));
        }
    }

    fn walk(&mut self, folder: &Path, prefix: &str) {
        for entry in std::fs::read_dir(folder).expect("a folder of the repository can be read") {
            let entry = entry.expect("an entry of it can be read");
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = format!("{prefix}{name}");
            // Outputs of builds and fuzzing, git's own files, and whatever a worktree links to.
            let ours = !matches!(name.as_str(), "target" | ".git" | "artifacts" | "proptest-regressions");
            let kind = entry.file_type().expect("an entry has a type");
            if kind.is_dir() && ours {
                self.walk(&entry.path(), &format!("{path}/"));
            } else if kind.is_file()
                && ours
                && let Ok(text) = std::fs::read_to_string(entry.path())
            {
                self.add(&path, &text);
            }
        }
    }

    /// The files of the crate itself.
    fn src(&self) -> impl Iterator<Item = &Source> {
        self.rust.iter().filter(|file| file.path.starts_with("src/"))
    }

    fn text(&self, path: &str) -> Option<String> {
        let other = self.other.iter().find(|(name, _)| name == path);
        let rust = self.rust.iter().find(|file| file.path == path);
        other
            .map(|(_, text)| text.clone())
            .or_else(|| rust.map(|file| file.lines.join("\n")))
    }
}

/// Whether `path` is one of `homes`, or lies in one that is a folder.
fn at_home(homes: &[&str], path: &str) -> bool {
    homes
        .iter()
        .any(|home| path == *home || home.ends_with('/') && path.starts_with(home))
}

/// Homes that nothing lives in: exceptions that are not needed.
fn stale(homes: &[&str], lived_in: impl Fn(&str) -> bool) -> Vec<String> {
    let empty = homes.iter().filter(|home| !lived_in(home));
    empty
        .map(|home| format!("{home}:1: has an exception in tests/tidy.rs that it does not need: take it off the list"))
        .collect()
}

type Rule = fn(&House) -> Vec<String>;

#[track_caller]
fn obeyed(rule: Rule) {
    // Once for all rules: a file is split letter by letter.
    static HOUSE: LazyLock<House> = LazyLock::new(House::read);
    let findings = rule(&HOUSE);
    assert!(
        findings.is_empty(),
        "{} finding(s)\n{}",
        findings.len(),
        findings.join("\n")
    );
}

/// Asserts that the rule finds something in `bad` and nothing in `good`.
#[track_caller]
fn caught(rule: Rule, bad: &[(&str, &str)], good: &[(&str, &str)]) {
    assert!(!rule(&House::of(bad)).is_empty(), "a bad house passes: {bad:?}");
    let findings = rule(&House::of(good));
    assert!(findings.is_empty(), "a good house fails: {findings:?}");
}

fn import_law(house: &House) -> Vec<String> {
    modules::import_law(house)
}

#[test]
fn a_module_uses_only_modules_above_it() {
    obeyed(import_law);
}

#[test]
fn a_module_that_looks_down_is_caught() {
    let lib = ("src/lib.rs", "mod low;\npub mod high;\npub mod internals;");
    let good = [
        lib,
        (
            "src/low.rs",
            "//! See [`high`](crate::high).\n// use crate::high::X;\nfn f() { \"crate::high\"; }",
        ),
        ("src/high.rs", "use crate::low::{X, Y};"),
        ("src/internals.rs", "pub use crate::high::X;"),
    ];
    let bad = |path, text| caught(import_law, &[lib, (path, text)], &good);
    bad("src/low.rs", "use crate::high::X;");
    bad("src/low.rs", "use crate::{low::Y, high::X};");
    bad("src/low.rs", "use super::high::X;");
    bad("src/low/mod.rs", "fn f() { crate::high::g() }");
    bad("src/low/part.rs", "fn f() -> crate::high::T { g() }");
    bad("src/high.rs", "use crate::Reexported;");
    bad("src/new.rs", "use crate::low::X;");
}

#[test]
fn a_sibling_that_looks_down_is_caught() {
    let lib = ("src/lib.rs", "mod a;");
    let face = ("src/a/mod.rs", "mod b;\nmod c;\nuse c::Z;");
    let good = [lib, face, ("src/a/c.rs", "use super::b::X;\nuse super::Face;")];
    caught(import_law, &[lib, face, ("src/a/b.rs", "use super::c::X;")], &good);
    caught(
        import_law,
        &[lib, face, ("src/a/b.rs", "use crate::a::{b::Y, c::X};")],
        &good,
    );
}

fn unsafe_homes(house: &House) -> Vec<String> {
    safety::unsafe_homes(house, UNSAFE_HOMES)
}

#[test]
fn unsafe_lives_in_its_homes() {
    obeyed(unsafe_homes);
}

#[test]
fn unsafe_away_from_home_is_caught() {
    let rule: Rule = |house| safety::unsafe_homes(house, &["src/a.rs"]);
    let home = ("src/a.rs", "fn f() { unsafe { g() } }");
    let good = [
        home,
        ("src/b.rs", "#![forbid(unsafe_code)]\n// unsafe\nfn f() {}"),
        ("src/lib.rs", "mod a;"),
    ];
    caught(rule, &[home, ("src/b.rs", "fn f() {}")], &good);
    caught(
        rule,
        &[home, ("src/b.rs", "// #![forbid(unsafe_code)]\nfn f() {}")],
        &good,
    );
    caught(rule, &[home, ("src/lib.rs", "fn f() { unsafe { g() } }")], &good);
    caught(rule, &[("src/a.rs", "fn f() { safe() }")], &good);
    caught(rule, &[("src/b.rs", "#![forbid(unsafe_code)]")], &good);
    // A module above an unsafe home cannot forbid `unsafe`, but may not hold any itself.
    let rule: Rule = |house| safety::unsafe_homes(house, &["src/a/b.rs"]);
    let home = ("src/a/b.rs", "unsafe impl Send for T {}");
    caught(
        rule,
        &[home, ("src/a/mod.rs", "unsafe impl Send for U {}")],
        &[home, ("src/a/mod.rs", "mod b;")],
    );
}

#[test]
fn unsafe_says_why() {
    obeyed(safety::safety_comments);
}

#[test]
fn unsafe_without_a_reason_is_caught() {
    let good = "// SAFETY: for\n// good reasons.\nunsafe impl Send for T {}\n\n/// # Safety\n///\n\
        /// Mind.\n#[inline]\npub unsafe fn f() {\n    // SAFETY: as above.\n    let x = g(\n        1,\n        unsafe
        /// { h() },\n    );\n}\n\
        unsafe impl T for U {\n    unsafe fn f() {}\n}\n";
    let good = good.replace("unsafe impl T for U", "// SAFETY: so.\nunsafe impl T for U");
    let bad = |text: &str| caught(safety::safety_comments, &[("src/a.rs", text)], &[("src/a.rs", &good)]);
    bad("unsafe impl Send for T {}");
    bad("fn f() { unsafe { g() } }");
    bad("// SAFETY: far away.\na;\nb;\nc;\nd;\nfn f() { unsafe { g() } }");
    bad("/// Does.\nunsafe fn f() {}");
    bad("impl T {\n    /// Does.\n    pub unsafe fn f() {}\n}");
}

const MODELS: &[&str] = &["loom", "shuttle"];
const SYSTEMS: &[&str] = &[
    "unix",
    "windows",
    "target_os",
    "target_family",
    "target_env",
    "target_vendor",
];

#[test]
fn model_checkers_are_named_in_few_places() {
    obeyed(|house| safety::cfg_homes(house, MODELS, MODEL_CFG_HOMES));
}

#[test]
fn operating_systems_are_named_in_few_places() {
    obeyed(|house| safety::cfg_homes(house, SYSTEMS, SYSTEM_CFG_HOMES));
}

#[test]
fn a_cfg_away_from_home_is_caught() {
    let rule: Rule = |house| safety::cfg_homes(house, MODELS, &["src/sync/"]);
    let home = ("src/sync/a.rs", "#[cfg(loom)]\nfn f() {}");
    let good = [home, ("src/b.rs", "// cfg(loom)\n#[cfg(test)]\nmod t;")];
    let bad = |text| caught(rule, &[home, ("src/b.rs", text)], &good);
    bad("#[cfg(all(\n    shuttle,\n    test\n))]\nfn f() {}");
    bad("fn f() { if cfg!(loom) {} }");
    bad("#![cfg_attr(not(loom), no_std)]");
    caught(rule, &[("src/sync/a.rs", "fn loom() {}")], &good);
    let rule: Rule = |house| safety::cfg_homes(house, SYSTEMS, &["src/fatal.rs"]);
    let home = ("src/fatal.rs", "#[cfg(target_os = \"linux\")]\nfn f() {}");
    let bad = ("src/heap/b.rs", "#[cfg(all(unix, feature = \"std\"))]\nfn f() {}");
    caught(rule, &[home, bad], &[home, ("src/b.rs", "fn unix() {}")]);
}

fn atomics(house: &House) -> Vec<String> {
    safety::atomic_homes(house, ATOMIC_HOMES)
}

#[test]
fn atomics_come_through_one_door() {
    obeyed(atomics);
}

#[test]
fn atomics_by_another_door_are_caught() {
    let rule: Rule = |house| safety::atomic_homes(house, &["src/sync/"]);
    let home = ("src/sync/native.rs", "pub use core::sync::atomic::AtomicU32;");
    let good = [
        home,
        ("src/a.rs", "//! core::sync::atomic\nuse crate::sync::AtomicU32;"),
    ];
    caught(rule, &[home, ("src/a.rs", "use core::sync::atomic::AtomicU32;")], &good);
    caught(
        rule,
        &[home, ("src/a.rs", "use std::sync::{Arc, atomic::AtomicU32};")],
        &good,
    );
    caught(rule, &[("src/a.rs", "fn f() {}")], &good);
}

#[test]
fn no_lock_that_may_allocate() {
    obeyed(|house| safety::foreign_locks(house, FOREIGN_LOCK_HOMES));
}

#[test]
fn a_lock_that_may_allocate_is_caught() {
    let good = [("src/a.rs", "// Never a Mutex.\nuse crate::sync::Lock;")];
    caught(
        |house| safety::foreign_locks(house, &[]),
        &[("src/a.rs", "use std::sync::Mutex;")],
        &good,
    );
    caught(
        |house| safety::foreign_locks(house, &[]),
        &[("src/a.rs", "static L: parking_lot::Once = x;")],
        &good,
    );
}

#[test]
fn tests_of_global_heaps_join_their_threads() {
    obeyed(safety::unjoined_threads);
}

#[test]
fn a_thread_that_is_not_joined_is_caught() {
    let rule = safety::unjoined_threads;
    let good = [
        (
            "tests/global/a.rs",
            "let thread = scope.spawn(work);\n// scope.spawn(x);\nscope.spawn(work).join();",
        ),
        ("tests/global/b.rs", "scope.spawn(|| {\n    work();\n})\n.join();\n"),
        ("tests/heap/a.rs", "scope.spawn(work);"),
    ];
    caught(
        rule,
        &[("tests/global/a.rs", "    scope.spawn(|| {\n        work();\n    });")],
        &good,
    );
    caught(rule, &[("tests/global/a.rs", "scope.spawn(work);")], &good);
}

#[test]
fn an_ordering_says_why() {
    obeyed(safety::orderings);
}

#[test]
fn an_ordering_without_a_reason_is_caught() {
    let good = [
        (
            "src/a.rs",
            "fn f() {\n    // Release: hands x to g.\n    a.store(1, Ordering::Release);\n}",
        ),
        (
            "src/b.rs",
            "/// Acquire: as in g.\n#[inline]\nfn f() { a.load(Ordering::Acquire) }\nfn g() { Ordering::Less }",
        ),
        (
            "src/c.rs",
            "// Relaxed throughout: one owner.\nfn f() {}\nfn g() { a.load(Ordering::Relaxed) }",
        ),
    ];
    let bad = |text| caught(safety::orderings, &[("src/a.rs", text)], &good);
    bad("fn f() { a.load(Ordering::Acquire) }");
    bad("fn f() {\n    // Release: no.\n    a.load(Ordering::Acquire)\n}");
    bad("fn g() {\n    // Acquire: of g.\n}\nfn f() { a.load(Ordering::Acquire) }");
    bad("use crate::sync::Ordering::{self, Acquire};");
}

fn sizes(house: &House) -> Vec<String> {
    shape::sizes(house, LONG_FILES)
}

#[test]
fn files_functions_and_lines_are_short() {
    obeyed(sizes);
}

#[test]
fn long_files_functions_and_lines_are_caught() {
    let rule: Rule = |house| shape::sizes(house, &[]);
    let body = |lines: usize| format!("fn f(a: [u8; 4]) {{\n{}}}\n", "    g();\n".repeat(lines));
    let file = |lines: usize| "// x\n".repeat(lines);
    let (short, long) = ("é".repeat(120), "é".repeat(121));
    let good = [
        ("src/a.rs", file(600)),
        ("src/b.rs", body(68)),
        ("tests/c.rs", format!("// {}", &short[..234])),
    ];
    let good: Vec<(&str, &str)> = good.iter().map(|(path, text)| (*path, text.as_str())).collect();
    caught(rule, &[("src/a.rs", &file(601))], &good);
    caught(rule, &[("src/b.rs", &body(69))], &good);
    caught(rule, &[("benches/b.rs", &body(69))], &good);
    caught(rule, &[("tests/c.rs", &long)], &good);
    // The list of long files: no growth, no stale entries.
    let rule: Rule = |house| shape::sizes(house, &[("src/a.rs", 700)]);
    caught(rule, &[("src/a.rs", &file(701))], &[("src/a.rs", &file(700))]);
    caught(rule, &[("src/a.rs", &file(600))], &[("src/a.rs", &file(650))]);
    caught(rule, &[], &[("src/a.rs", &file(650))]);
}

#[test]
fn files_open_with_an_essay() {
    obeyed(shape::essays);
}

#[test]
fn a_file_without_an_essay_is_caught() {
    let good = [
        ("src/a.rs", "//! What it is.\n\nfn f() {}"),
        ("tests/a.rs", "fn f() {}"),
    ];
    caught(shape::essays, &[("src/a.rs", "use x;\n//! Late.")], &good);
    caught(shape::essays, &[("src/a.rs", "// Plain.")], &good);
    caught(shape::essays, &[("src/a.rs", "")], &good);
}

#[test]
fn nothing_is_left_undone() {
    obeyed(shape::leftovers);
}

#[test]
fn what_is_left_undone_is_caught() {
    let good = [(
        "src/a.rs",
        concat!("//! A todo list, and dbg.\nfn f() { panic!(\"XX", "XL\") }"),
    )];
    let bad = |text: &str| caught(shape::leftovers, &[("src/a.rs", text)], &good);
    bad(concat!("fn f() { to", "do!() }"));
    bad(concat!("fn f() { un", "implemented!(\"x\") }"));
    bad("fn f() { dbg!(1); }");
    bad(&format!("// {}ME: x", "FIX"));
    bad(&format!("/// {}X", "XX"));
    bad(&format!("// {}DO: x", "TO"));
}

#[test]
fn the_manifest_keeps_its_lints() {
    obeyed(manifest::lints);
}

#[test]
fn a_manifest_without_lints_is_caught() {
    let good = manifest::LINTS.concat();
    caught(
        manifest::lints,
        &[("Cargo.toml", "[package]\n")],
        &[("Cargo.toml", &good)],
    );
    caught(
        manifest::lints,
        &[("Cargo.toml", &good.replace("deny", "warn"))],
        &[("Cargo.toml", &good)],
    );
    caught(manifest::lints, &[], &[("Cargo.toml", &good)]);
}

#[test]
fn the_readme_tells_the_truth() {
    obeyed(manifest::readme);
}

#[test]
fn a_readme_that_is_behind_is_caught() {
    let cargo = ("Cargo.toml", "rust-version = \"1.95\"\n");
    let readme =
        "Needs Rust 1.95.\n```sh\ncargo run --release --example census\ncargo test\n```\nSee [this](docs/a.md).\n";
    let (example, doc) = (("examples/census.rs", "fn main() {}"), ("docs/a.md", "A."));
    let good = [cargo, ("README.md", readme), example, doc];
    let bad = |rule: Rule, from, to| {
        let text = readme.replace(from, to);
        assert_ne!(text, readme);
        caught(rule, &[cargo, ("README.md", &text), example, doc], &good);
    };
    bad(manifest::readme, "1.95", "1.94");
    bad(manifest::readme, "cargo test\n", "");
    bad(manifest::readme, "cargo run --release --example census\n", "");
    bad(titles::links_lead_somewhere, "docs/a.md", "docs/b.md");
    caught(manifest::readme, &[cargo, ("README.md", readme), doc], &good);
    caught(manifest::readme, &[cargo, example, doc], &good);
}

#[test]
fn the_film_is_of_today() {
    obeyed(manifest::film);
    let picture = ("src/picture.rs", "const NAMES: [&str; 2] = [\"spans\", \"runs\"];");
    let film = |text| [picture, ("docs/film.svg", text)];
    let good = film("<text>spans</text><text>runs</text>");
    caught(manifest::film, &film("<text>spans</text>"), &good);
    caught(manifest::film, &good[1..], &good);
}

#[test]
fn no_path_of_one_machine() {
    obeyed(manifest::foreign_paths);
}

#[test]
fn a_path_of_one_machine_is_caught() {
    let good = [
        ("a.md", ".github/workflows, frame/works, rework/s"),
        ("src/a.rs", "use super::shared;"),
    ];
    let bad = |text: &str| {
        caught(manifest::foreign_paths, &[("a.md", text)], &good);
        caught(manifest::foreign_paths, &[("tests/a.rs", text)], &good);
    };
    bad(&["see ..", "/shar", "ed/x"].concat());
    bad(&["cd ", "/wo", "rk", "/x"].concat());
    bad(&["in ", "/wo", "rk", "."].concat());
}
