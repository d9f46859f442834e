//! Examples that must not compile, and the one that must stay short.

use super::{House, caught, obeyed};

/// A block of code in the documentation, as shown.
#[derive(Debug)]
struct Block {
    path: String,
    /// The line where it begins, from 1.
    line: usize,
    /// The text after the three backquotes.
    info: String,
    text: Vec<String>,
}

/// All code blocks of the crate's documentation.
fn blocks(house: &House) -> Vec<Block> {
    let mut blocks = Vec::new();
    for file in house.src() {
        let mut open: Option<Block> = None;
        for (index, line) in file.lines.iter().enumerate() {
            let line = line.trim_start();
            let Some(text) = line.strip_prefix("//!").or_else(|| line.strip_prefix("///")) else {
                continue;
            };
            let text = text.strip_prefix(' ').unwrap_or(text);
            match (text.strip_prefix("```"), &mut open) {
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (Some(info), None) => {
                    open = Some(Block {
                        path: file.path.clone(),
                        line: index + 1,
                        info: info.to_owned(),
                        text: Vec::new(),
                    });
                }
                (None, Some(block)) => block.text.push(text.to_owned()),
                (None, None) => {}
            }
        }
    }
    blocks
}

/// An example that must not compile names the error, and has a twin that differs in one line and compiles: so the
/// compiler refuses that line and nothing else.
pub(crate) fn refusals(house: &House) -> Vec<String> {
    let blocks = blocks(house);
    let mut findings = Vec::new();
    for bad in blocks.iter().filter(|block| block.info.starts_with("compile_fail")) {
        let Block { path, line, info, text } = bad;
        let code = info.strip_prefix("compile_fail,E").unwrap_or_default();
        if code.len() != 4 || !code.bytes().all(|digit| digit.is_ascii_digit()) {
            findings.push(format!(
                "{path}:{line}: does not say by which error it fails: `compile_fail,E0502`"
            ));
        }
        let is_twin = |good: &&Block| {
            let differ = text.iter().zip(&good.text).filter(|(bad, good)| bad != good).count();
            good.info.is_empty() && good.text.len() == text.len() && differ == 1
        };
        if blocks.iter().find(is_twin).is_none() {
            findings.push(format!(
                "{path}:{line}: has no twin that differs in one line and compiles: put one into src/arena/misuse.rs"
            ));
        }
    }
    findings
}

const OWN_ARENA: &str = "examples/custom_arena.rs";
const OWN_ARENA_LINES: usize = 60;
const MARK: &str = "// ---- 8< ----";

/// The arena that a user writes on the heap, between two marks, is shorter than 60 lines.
pub(crate) fn own_arena(house: &House) -> Vec<String> {
    let text = house.text(OWN_ARENA).unwrap_or_default();
    let parts: Vec<&str> = text.split(MARK).collect();
    let [_, arena, _] = parts[..] else {
        return vec![format!("{OWN_ARENA}:1: the arena is not between two lines `{MARK}`")];
    };
    let lines = arena.trim().lines().count();
    if (10..OWN_ARENA_LINES).contains(&lines) && arena.contains("impl") {
        return Vec::new();
    }
    vec![format!(
        "{OWN_ARENA}:1: the arena has {lines} lines, fewer than {OWN_ARENA_LINES} are promised"
    )]
}

#[test]
fn what_must_not_compile_has_a_twin_that_does() {
    obeyed(refusals);
}

#[test]
fn what_does_not_compile_for_any_reason_is_caught() {
    let block = |info: &str, line: &str| format!("/// ```{info}\n/// let x = 1;\n/// {line}\n/// ```\n");
    let house = |info, twin: &str| [block(info, "x = 2;"), block("text", "f(x);"), twin.to_owned()].concat();
    let good = house("compile_fail,E0384", &block("", "f(x);"));
    let good = [("src/a.rs", good.as_str())];
    let bad = |info, twin: &str| caught(refusals, &[("src/a.rs", &house(info, twin))], &good);
    bad("compile_fail", &block("", "f(x);"));
    bad("compile_fail,E38", &block("", "f(x);"));
    bad("compile_fail,E0384", "");
    bad("compile_fail,E0384", &block("", "x = 2;"));
    bad("compile_fail,E0384", &block("no_run", "f(x);"));
    bad("compile_fail,E0384", &block("", "f(x);\n/// f(x);"));
    bad("compile_fail,E0384", &block("", "f(x);").replace("let", "const"));
}

#[test]
fn an_arena_of_ones_own_is_short() {
    obeyed(own_arena);
}

#[test]
fn an_arena_of_ones_own_that_is_long_is_caught() {
    let path = "examples/custom_arena.rs";
    let file = |lines: usize| {
        format!(
            "use x;\n\n// ---- 8< ----\n\nimpl A {{\n{}}}\n\n// ---- 8< ----\nf();\n",
            "    f();\n".repeat(lines)
        )
    };
    let (good, long) = (file(57), file(58));
    caught(own_arena, &[(path, &long)], &[(path, &good)]);
    caught(own_arena, &[(path, &good.replacen("8<", "", 1))], &[(path, &good)]);
    caught(own_arena, &[], &[(path, &good)]);
}
