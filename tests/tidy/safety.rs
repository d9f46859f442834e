//! `unsafe`, atomics and `cfg`: where they may occur, and what must be said about them.

use super::lex::{Source, bracketed, find_word, line_of};
use super::shape::functions;
use super::{House, at_home, stale};

/// A file either holds `unsafe` and is on the list, or forbids it; a file above one on the list cannot forbid it, and
/// holds none.
pub(crate) fn unsafe_homes(house: &House, homes: &[&str]) -> Vec<String> {
    let holds = |file: &Source| {
        find_word(&file.joined(), "unsafe")
            .next()
            .map(|at| line_of(&file.joined(), at))
    };
    let lived_in = |home: &str| house.src().any(|file| file.path == home && holds(file).is_some());
    let mut findings = stale(homes, lived_in);
    for file in house.src().filter(|file| !homes.contains(&file.path.as_str())) {
        let folder = file.path.strip_suffix("mod.rs").or(file.path.strip_suffix("lib.rs"));
        let above_a_home = folder.is_some_and(|folder| homes.iter().any(|home| home.starts_with(folder)));
        let forbids = file.code.iter().any(|line| line.starts_with("#![forbid(unsafe_code)]"));
        if let Some(line) = holds(file) {
            findings.push(format!(
                "{}:{line}: unsafe, in a file that is not one of its homes (tests/tidy.rs)",
                file.path
            ));
        } else if !forbids && !above_a_home {
            findings.push(format!(
                "{}:1: no `#![forbid(unsafe_code)]`, and no unsafe either",
                file.path
            ));
        }
    }
    findings
}

/// How many lines of code may lie between the reason and the `unsafe`: a statement that rustfmt has split.
const STATEMENT_LINES: usize = 3;

/// `unsafe {` and `unsafe impl` need a SAFETY comment above them, `unsafe fn` and `unsafe trait` a `# Safety` section
/// (except in an implementation of a trait, which has one).
pub(crate) fn safety_comments(house: &House) -> Vec<String> {
    let mut findings = Vec::new();
    for file in house.src() {
        for (index, code) in file.code.iter().enumerate() {
            for at in find_word(code, "unsafe") {
                let what = code[at + "unsafe".len()..].trim_start();
                let (word, reach) = if what.starts_with('{') || what.starts_with("impl") {
                    ("SAFETY:", STATEMENT_LINES)
                } else if what.starts_with("trait") || what.starts_with("fn ") && !implements(file, index) {
                    ("# Safety", 0)
                } else {
                    continue;
                };
                if !said_above(file, index, word, reach) {
                    let path = &file.path;
                    findings.push(format!("{path}:{}: unsafe without `{word}` right above it", index + 1));
                }
            }
        }
    }
    findings
}

/// Whether the comments above a line, past at most `reach` lines of code, contain `word`. Attributes do not count as
/// code.
fn said_above(file: &Source, index: usize, word: &str, reach: usize) -> bool {
    let mut code = 0;
    for above in (0..=index).rev() {
        if file.comments[above].contains(word) {
            return true;
        }
        let line = file.code[above].trim();
        let is_code = !line.is_empty() && !line.starts_with('#') && above != index;
        let is_blank = file.lines[above].trim().is_empty();
        code += usize::from(is_code);
        if code > reach || is_blank {
            return false;
        }
    }
    false
}

/// Whether the line is directly inside an `impl … for`, judged by indentation.
fn implements(file: &Source, index: usize) -> bool {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let own = indent(&file.code[index]);
    let outer = file.code[..index]
        .iter()
        .rev()
        .find(|line| !line.trim().is_empty() && indent(line) < own && !line.starts_with(['}', ')']));
    outer.is_some_and(|line| line.contains("impl") && line.contains(" for "))
}

/// Words of `cfg` that may occur only in their homes.
pub(crate) fn cfg_homes(house: &House, words: &[&str], homes: &[&str]) -> Vec<String> {
    let lived_in = |home: &str| {
        house
            .src()
            .any(|file| at_home(&[home], &file.path) && !cfgs(file, words).is_empty())
    };
    let mut findings = stale(homes, lived_in);
    for file in house.src().filter(|file| !at_home(homes, &file.path)) {
        let path = &file.path;
        findings.extend(cfgs(file, words).into_iter().map(|(line, word)| {
            format!("{path}:{line}: cfg({word}) outside its homes (tests/tidy.rs): ask a module that has it")
        }));
    }
    findings
}

/// Where a file's `cfg`, `cfg!` and `cfg_attr` use one of the words.
fn cfgs<'w>(file: &Source, words: &[&'w str]) -> Vec<(usize, &'w str)> {
    let code = file.joined();
    let mut said = Vec::new();
    for at in ["cfg", "cfg_attr"].iter().flat_map(|name| find_word(&code, name)) {
        let rest = &code[at..];
        let open = rest.find(|char: char| !char.is_alphanumeric() && !matches!(char, '_' | '!'));
        let Some(open) = open.filter(|&open| rest[open..].starts_with('(')) else {
            continue;
        };
        let condition = bracketed(rest, open);
        let words = words.iter().filter(|word| find_word(condition, word).next().is_some());
        said.extend(words.map(|word| (line_of(&code, at), *word)));
    }
    said
}

/// `core::sync::atomic` is named only in its homes; everything else uses `crate::sync`.
pub(crate) fn atomic_homes(house: &House, homes: &[&str]) -> Vec<String> {
    let named = |file: &Source| {
        let code = file.joined();
        let mut words = find_word(&code, "atomic");
        words.next().map(|at| line_of(&code, at))
    };
    let lived_in = |home: &str| {
        house
            .src()
            .any(|file| at_home(&[home], &file.path) && named(file).is_some())
    };
    let mut findings = stale(homes, lived_in);
    for file in house.src().filter(|file| !at_home(homes, &file.path)) {
        findings.extend(named(file).map(|line| {
            format!(
                "{}:{line}: atomics come from `crate::sync`, so that models see them",
                file.path
            )
        }));
    }
    findings
}

/// A thread gives back what it keeps of a global heap after its closure has returned, when a scope no longer waits for
/// it: a check that follows would find pages on their way. Joining waits for that too.
pub(crate) fn unjoined_threads(house: &House) -> Vec<String> {
    let tests = house.rust.iter().filter(|file| file.path.starts_with("tests/global/"));
    let findings = tests.flat_map(|file| {
        let unjoined = |begin: &usize| {
            let (first, rest) = (file.code[*begin].trim_end(), &file.code[*begin..]);
            let indent = &first[..first.len() - first.trim_start().len()];
            // The line with the call's closing parenthesis.
            let mut ends = rest
                .iter()
                .filter_map(|line| line.strip_prefix(indent))
                .map(str::trim_end);
            let end = ends.find(|line| !line.starts_with(' ') && line.ends_with([')', ';']));
            first.trim_start().starts_with("scope.spawn(")
                && end.is_some_and(|end| end.ends_with(");") && !end.contains(".join()"))
        };
        let lines = (0..file.code.len()).filter(unjoined);
        lines.map(|line| {
            format!(
                "{}:{}: not joined; the end of a scope waits for less",
                file.path,
                line + 1
            )
        })
    });
    findings.collect()
}

/// Other crates' locks may allocate; ours does not.
pub(crate) fn foreign_locks(house: &House, homes: &[&str]) -> Vec<String> {
    let locks = |file: &Source| -> Vec<(usize, &str)> {
        let code = file.joined();
        ["Mutex", "RwLock", "Condvar", "parking_lot"]
            .into_iter()
            .flat_map(|lock| {
                let lines = find_word(&code, lock).map(|at| line_of(&code, at));
                lines.map(move |line| (line, lock)).collect::<Vec<_>>()
            })
            .collect()
    };
    let lived_in = |home: &str| {
        house
            .src()
            .any(|file| at_home(&[home], &file.path) && !locks(file).is_empty())
    };
    let mut findings = stale(homes, lived_in);
    for file in house.src().filter(|file| !at_home(homes, &file.path)) {
        let found = locks(file).into_iter();
        findings.extend(
            found.map(|(line, lock)| format!("{}:{line}: {lock} may allocate; use crate::sync::Lock", file.path)),
        );
    }
    findings
}

const ORDERINGS: [&str; 5] = ["Relaxed", "Acquire", "Release", "AcqRel", "SeqCst"];

/// A line that uses atomic orderings has one of them named in a comment: above it in the same function, in that
/// function's documentation, or earlier in the file as "Relaxed throughout".
pub(crate) fn orderings(house: &House) -> Vec<String> {
    let mut findings = Vec::new();
    for file in house.src() {
        let functions = functions(file);
        for (index, code) in file.code.iter().enumerate() {
            if code.contains("Ordering::{") || code.contains("Ordering::*") {
                findings.push(format!(
                    "{}:{}: write `Ordering::Name` where it is used",
                    file.path,
                    index + 1
                ));
            }
            let used: Vec<&str> = ORDERINGS
                .into_iter()
                .filter(|name| code.contains(&format!("Ordering::{name}")))
                .collect();
            if used.is_empty() {
                continue;
            }
            let inside = functions.iter().filter(|f| f.first <= index && index <= f.last);
            let first = inside
                .map(|f| head(file, f.first))
                .max()
                .unwrap_or(index.saturating_sub(3));
            // "Acquire: … Release: …" explains both halves of AcqRel.
            let mut explained = used.clone();
            if used.contains(&"AcqRel") {
                explained.extend(["Acquire", "Release"]);
            }
            let named = |name: &&str| {
                let near = &file.comments[first..=index];
                let throughout = format!("{name} throughout");
                near.iter().any(|comment| find_word(comment, name).next().is_some())
                    || file.comments[..index]
                        .iter()
                        .any(|comment| comment.contains(&throughout))
            };
            if !explained.iter().any(named) {
                let (path, line, name) = (&file.path, index + 1, used[0]);
                findings.push(format!("{path}:{line}: no comment in this function says why {name}"));
            }
        }
    }
    findings
}

/// The first line of the comments and attributes right above line `index`.
fn head(file: &Source, index: usize) -> usize {
    let mut first = index;
    while first > 0 {
        let above = first - 1;
        let code = file.code[above].trim();
        let said = !file.comments[above].trim().is_empty();
        if !(code.starts_with('#') || code.is_empty() && said) {
            break;
        }
        first = above;
    }
    first
}
