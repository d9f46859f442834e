//! Sizes, opening comments, and what must not be left behind.

use super::House;
use super::lex::{Source, bracketed, find_word, line_of};

const FILE_LINES: usize = 600;
const FUNCTION_LINES: usize = 70;
const COLUMNS: usize = 120;

/// A function with a body; lines from 0.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) first: usize,
    pub(crate) last: usize,
}

/// The functions of a file, by brace matching: `fn name`, then the first brace outside the signature's brackets.
pub(crate) fn functions(file: &Source) -> Vec<Function> {
    let code = file.joined();
    let mut functions = Vec::new();
    for at in find_word(&code, "fn") {
        let name: String = code[at + 2..]
            .trim_start()
            .chars()
            .take_while(|char| super::lex::is_word(*char))
            .collect();
        if name.is_empty() {
            continue;
        }
        if let Some(open) = body(&code[at..]) {
            let len = bracketed(&code[at..], open).len();
            let first = line_of(&code, at) - 1;
            let last = line_of(&code, (at + open + 1 + len).min(code.len())) - 1;
            functions.push(Function { name, first, last });
        }
    }
    functions
}

/// Where the body of the function at the start of `code` opens; `None` if it has none.
fn body(code: &str) -> Option<usize> {
    let mut depth = 0;
    for (at, char) in code.char_indices() {
        match char {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            '{' if depth == 0 => return Some(at),
            ';' if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

/// Files of the crate have up to 600 lines, functions up to 70, lines up to 120 columns. `long` are files that predate
/// the rule: they may not grow, and leave the list when they obey.
pub(crate) fn sizes(house: &House, long: &[(&str, usize)]) -> Vec<String> {
    let mut findings = Vec::new();
    for file in &house.rust {
        let lines = file.lines.len();
        let most = long
            .iter()
            .find(|(path, _)| *path == file.path)
            .map_or(FILE_LINES, |(_, lines)| *lines);
        if lines > most && file.path.starts_with("src/") {
            findings.push(format!(
                "{}:{lines}: {lines} lines, {most} are allowed: cut it in two",
                file.path
            ));
        }
        for (index, line) in file.lines.iter().enumerate() {
            let columns = line.chars().count();
            if columns > COLUMNS {
                findings.push(format!(
                    "{}:{}: {columns} columns, {COLUMNS} are allowed",
                    file.path,
                    index + 1
                ));
            }
        }
        for function in functions(file) {
            let lines = function.last - function.first + 1;
            if lines > FUNCTION_LINES {
                let (path, line, name) = (&file.path, function.first + 1, &function.name);
                findings.push(format!(
                    "{path}:{line}: `{name}` has {lines} lines, {FUNCTION_LINES} are allowed"
                ));
            }
        }
    }
    for (path, _) in long {
        let file = house.rust.iter().find(|file| file.path == *path);
        if file.is_none_or(|file| file.lines.len() <= FILE_LINES) {
            findings.push(format!(
                "{path}:1: is not too long any more: take it off the list in tests/tidy.rs"
            ));
        }
    }
    findings
}

/// A file of the crate first says what it is.
pub(crate) fn essays(house: &House) -> Vec<String> {
    let without = house
        .src()
        .filter(|file| !file.lines.first().is_some_and(|line| line.starts_with("//! ")));
    without
        .map(|file| {
            format!(
                "{}:1: does not open with `//!`: what is it, in one sentence?",
                file.path
            )
        })
        .collect()
}

/// No macro that stands for unfinished work or debugging, and no comment that asks for it.
pub(crate) fn leftovers(house: &House) -> Vec<String> {
    let mut findings = Vec::new();
    for file in &house.rust {
        for (index, (code, comment)) in file.code.iter().zip(&file.comments).enumerate() {
            let macros = ["todo", "unimplemented", "dbg"];
            let called = macros
                .iter()
                .filter(|name| find_word(code, name).any(|at| code[at + name.len()..].starts_with('!')));
            // Split in two, so that a search for them finds nothing here.
            let marks = [concat!("FIX", "ME"), concat!("XX", "X"), concat!("TO", "DO")];
            let marked = marks.iter().filter(|mark| find_word(comment, mark).next().is_some());
            let place = format!("{}:{}", file.path, index + 1);
            findings.extend(
                called
                    .chain(marked)
                    .map(|what| format!("{place}: {what}: finish it, or say it in an issue")),
            );
        }
    }
    findings
}
