//! What `Cargo.toml` and `README.md` promise, and what no file may contain.

use super::House;

/// Lines that the workspace's manifest must have.
pub(crate) const LINTS: [&str; 7] = [
    "unsafe_op_in_unsafe_fn = \"deny\"\n",
    "missing_docs = \"deny\"\n",
    "missing_debug_implementations = \"deny\"\n",
    "undocumented_unsafe_blocks = \"deny\"\n",
    "missing_safety_doc = \"deny\"\n",
    "unexpected_cfgs = { level = \"deny\"\n",
    "[lints]\nworkspace = true\n",
];

pub(crate) fn lints(house: &House) -> Vec<String> {
    let manifest = house.text("Cargo.toml").unwrap_or_default();
    let missing = LINTS.iter().filter(|lint| !manifest.contains(lint.trim_end()));
    missing
        .map(|lint| format!("Cargo.toml:1: lacks `{}`", lint.trim_end().replace('\n', " ")))
        .collect()
}

/// The README's two commands: the main task, and the tests.
const COMMANDS: [&str; 2] = ["cargo run --release --example census", "cargo test"];

/// The README names the manifest's Rust version, shows the two commands, and names only examples that exist.
pub(crate) fn readme(house: &House) -> Vec<String> {
    let readme = house.text("README.md").unwrap_or_default();
    let manifest = house.text("Cargo.toml").unwrap_or_default();
    let mut findings = Vec::new();
    let version = manifest.lines().find_map(|line| line.strip_prefix("rust-version = "));
    let version = version.unwrap_or("?").trim_matches('"');
    if !readme.contains(&format!("Rust {version}")) {
        findings.push(format!(
            "README.md:1: does not say `Rust {version}`, the rust-version of Cargo.toml"
        ));
    }
    for command in COMMANDS {
        if !readme.lines().any(|line| line.trim() == command) {
            findings.push(format!("README.md:1: does not show `{command}` on a line of its own"));
        }
    }
    for (index, line) in readme.lines().enumerate() {
        let examples = line
            .split("--example ")
            .skip(1)
            .filter_map(|rest| rest.split([' ', '`']).next());
        let examples = examples.map(|name| format!("examples/{name}.rs"));
        let missing = examples.filter(|path| house.text(path).is_none());
        findings.extend(missing.map(|path| format!("README.md:{}: there is no {path}", index + 1)));
    }
    findings
}

/// The film in the README is one of this crate's pictures: its legend names every kind of page that they show.
pub(crate) fn film(house: &House) -> Vec<String> {
    let picture = house.text("src/picture.rs").unwrap_or_default();
    let film = house.text("docs/film.svg").unwrap_or_default();
    let names = picture.lines().find_map(|line| line.strip_prefix("const NAMES: "));
    let Some((_, names)) = names.and_then(|line| line.split_once('=')) else {
        return vec!["src/picture.rs:1: has no line `const NAMES: ...`".to_owned()];
    };
    let names = names.split('"').skip(1).step_by(2);
    let missing = names.filter(|name| !film.contains(&format!(">{name}</text>")));
    missing
        .map(|name| format!("docs/film.svg:1: has no {name}; run the example heap_map anew"))
        .collect()
}

/// No file names a path of the machine it was written on.
pub(crate) fn foreign_paths(house: &House) -> Vec<String> {
    let shared = ["..", "/shar", "ed"].concat();
    let root = ["/wo", "rk"].concat();
    let mut findings = Vec::new();
    let rust = house.rust.iter().map(|file| (&file.path, file.lines.join("\n")));
    let other = house.other.iter().map(|(path, text)| (path, text.clone()));
    for (path, text) in rust.chain(other) {
        for (index, line) in text.lines().enumerate() {
            let is_root = line.match_indices(&root).any(|(at, _)| {
                let part = |char: char| char.is_alphanumeric() || matches!(char, '_' | '-' | '.' | '/');
                let inner = |char: char| char.is_alphanumeric() || matches!(char, '_' | '-');
                !line[..at].ends_with(part) && !line[at + root.len()..].starts_with(inner)
            });
            if is_root || line.contains(&shared) {
                findings.push(format!("{path}:{}: names a path of one machine", index + 1));
            }
        }
    }
    findings
}
