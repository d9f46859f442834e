//! Test names that the documents cite: a claim is as good as the test behind it, which may have been renamed.

use std::collections::HashSet;

use super::{House, caught, obeyed};

/// Documents whose claims cite test names.
const DOCUMENTS: &[&str] = &["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"];

/// A test's name has at least this many words; other names rarely do.
const WORDS: usize = 4;

/// Whether this is the whole name of a test: no part left out, no braces.
fn is_name(word: &str) -> bool {
    let ours = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_:/".contains(&byte);
    word.bytes().all(ours) && last(word).split('_').count() >= WORDS
}

fn last(word: &str) -> &str {
    word.rsplit([':', '/']).next().unwrap_or(word)
}

/// The word that `text` begins with, if one of `ends` follows.
fn word_before<'a>(text: &'a str, ends: &[char]) -> Option<&'a str> {
    let end = text.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')?;
    text[end..].starts_with(ends).then_some(&text[..end])
}

/// What a line declares: functions, and whatever is an argument of a macro that makes it one.
fn declared(line: &str) -> impl Iterator<Item = &str> {
    let functions = line
        .split("fn ")
        .skip(1)
        .filter_map(|rest| word_before(rest, &['(', '<']));
    functions.chain(word_before(line.trim_start(), &[':']))
}

/// Whatever a document puts in backquotes and looks like a test's name must be one.
fn tests_exist(house: &House) -> Vec<String> {
    let lines = house.rust.iter().flat_map(|file| &file.lines);
    let names: HashSet<&str> = lines.flat_map(|line| declared(line)).collect();
    let mut findings = Vec::new();
    for (path, text) in &house.other {
        let document = DOCUMENTS.contains(&path.as_str()) || path.starts_with("docs/") && path.ends_with(".md");
        for (index, line) in text.lines().enumerate().filter(|_| document) {
            for name in line.split('`').skip(1).step_by(2).filter(|word| is_name(word)) {
                if !names.contains(last(name)) {
                    findings.push(format!(
                        "{path}:{}: `{name}` is nowhere: name the test that shows it",
                        index + 1
                    ));
                }
            }
        }
    }
    findings
}

#[test]
fn documents_name_tests_that_exist() {
    obeyed(tests_exist);
    let test = (
        "tests/a.rs",
        "    fn it_is_as_the_document_says() {}\n    made_by_a_macro: 3;\n",
    );
    let says = |text| [("docs/a.md", text), test];
    let good = says("`a::it_is_as_the_document_says`, `made_by_a_macro`, `a_b_c`, `not_{this,that}_one_here`");
    caught(tests_exist, &says("`it_is_not_as_the_document_says`"), &good);
    caught(
        tests_exist,
        &says("good `made_by_a_macro`, bad `b::made_by_another_macro`"),
        &good,
    );
}
