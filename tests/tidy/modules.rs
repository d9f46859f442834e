//! The rule for imports: reading order is import order.

use super::House;
use super::lex::{Source, bracketed, find_word, is_word, line_of};

/// A module uses only modules declared above it in `lib.rs`; a file in a folder uses only siblings declared above it in
/// `mod.rs`.
///
/// A use is any path in code that begins with `crate::` or `super::`, also inside braces. `lib.rs` and `internals.rs`
/// are doors and may use everything. A path to a name that the crate root re-exports is a finding as well: it would
/// hide which module is used.
pub(crate) fn import_law(house: &House) -> Vec<String> {
    let Some(lib) = house.src().find(|file| file.path == "src/lib.rs") else {
        return vec!["src/lib.rs:1: there is none".to_owned()];
    };
    let order = declared(lib);
    let mut findings = Vec::new();
    for file in house.src().filter(|file| !is_door(&file.path)) {
        let own = module(&file.path);
        let Some(place) = order.iter().position(|name| *name == own[0]) else {
            findings.push(format!("{}:1: no `mod {};` in src/lib.rs", file.path, own[0]));
            continue;
        };
        let siblings = house
            .src()
            .find(|face| own.len() > 1 && face.path == format!("src/{}/mod.rs", own[0]))
            .map(declared)
            .unwrap_or_default();
        for (line, from_crate, path) in paths(file) {
            let names = resolve(&own, from_crate, &path);
            let wrong = match names.split_first() {
                Some((first, inner)) if *first == own[0] => looks_down(&siblings, &own, inner),
                Some((first, _)) => match order.iter().position(|name| name == first) {
                    Some(other) if other < place => None,
                    Some(_) => Some(format!("`{first}` is declared below `{}` in src/lib.rs", own[0])),
                    None if from_crate => Some(format!("`crate::{first}` is no module: name the one it is in")),
                    None => None,
                },
                None => None,
            };
            findings.extend(wrong.map(|wrong| format!("{}:{line}: {wrong}", file.path)));
        }
    }
    findings
}

fn looks_down(siblings: &[String], own: &[String], inner: &[String]) -> Option<String> {
    let place = |name: &String| siblings.iter().position(|sibling| sibling == name);
    let (me, other) = (own.get(1)?, inner.first()?);
    (place(other)? > place(me)?).then(|| format!("`{other}` is declared below `{me}` in src/{}/mod.rs", own[0]))
}

fn is_door(path: &str) -> bool {
    matches!(path, "src/lib.rs" | "src/internals.rs")
}

/// The modules a file declares, in order.
fn declared(file: &Source) -> Vec<String> {
    let mut names = Vec::new();
    for line in &file.code {
        let line = line.trim();
        let line = line
            .strip_prefix("pub(crate) ")
            .or(line.strip_prefix("pub "))
            .unwrap_or(line);
        if let Some(name) = line.strip_prefix("mod ").and_then(|rest| rest.strip_suffix(';')) {
            names.push(name.trim().to_owned());
        }
    }
    names
}

/// The path of a file's module from the root.
fn module(path: &str) -> Vec<String> {
    let path = path.trim_start_matches("src/").trim_end_matches(".rs");
    let path = path.strip_suffix("/mod").unwrap_or(path);
    path.split('/').map(str::to_owned).collect()
}

/// The path from the crate root that a path means inside `own`.
fn resolve(own: &[String], from_crate: bool, path: &str) -> Vec<String> {
    let mut base = if from_crate {
        Vec::new()
    } else {
        own[..own.len() - 1].to_vec()
    };
    for name in path.split("::") {
        if name == "super" {
            base.pop();
        } else {
            base.push(name.to_owned());
        }
    }
    base
}

/// Every path in a file's code that begins with `crate::` or `super::`: its line, whether it begins with `crate`, and
/// the rest.
fn paths(file: &Source) -> Vec<(usize, bool, String)> {
    let code = file.joined();
    let mut found = Vec::new();
    for root in ["crate", "super"] {
        for at in find_word(&code, root) {
            let is_first = !code[..at].ends_with("::");
            if let Some(rest) = code[at + root.len()..].strip_prefix("::")
                && is_first
            {
                let mut paths = Vec::new();
                expand(rest, "", &mut paths);
                found.extend(
                    paths
                        .into_iter()
                        .map(|path| (line_of(&code, at), root == "crate", path)),
                );
            }
        }
    }
    found
}

/// The paths of a use tree: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn expand(text: &str, prefix: &str, paths: &mut Vec<String>) {
    let text = text.trim_start();
    if text.starts_with('{') {
        let inside = bracketed(text, 0);
        let (mut depth, mut start) = (0, 0);
        for (at, char) in inside.char_indices().chain([(inside.len(), ',')]) {
            match char {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    expand(&inside[start..at], prefix, paths);
                    start = at + 1;
                }
                _ => {}
            }
        }
        return;
    }
    let len = text.find(|char| !is_word(char)).unwrap_or(text.len());
    if len == 0 {
        return;
    }
    let path = format!("{prefix}{}", &text[..len]);
    match text[len..].strip_prefix("::") {
        Some(rest) if rest.starts_with('{') || rest.starts_with(is_word) => expand(rest, &format!("{path}::"), paths),
        _ => paths.push(path),
    }
}
