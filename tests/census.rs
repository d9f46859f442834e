//! The example `census`, run as a user would: on a small directory, on a missing one, on nonsense.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

/// Through cargo, which builds it if only this test was requested.
fn census<A: AsRef<OsStr>>(arguments: &[A]) -> Output {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo.args(["run", "--quiet", "--offline", "--example", "census"]);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    cargo.arg("--").args(arguments).output().unwrap()
}

/// A directory of five files that count, one of them not UTF-8, and two that do not count.
fn fixture(name: &str) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("census").join(name);
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(root.join("deep/er")).unwrap();
    fs::create_dir_all(root.join("target")).unwrap();
    fs::write(root.join("one.rs"), "fn alpha() { beta(beta, 3); }\n").unwrap();
    fs::write(root.join("two.py"), "def beta(): return alpha_2 + beta\n").unwrap();
    fs::write(root.join("deep/three.md"), "beta beta gamma\n").unwrap();
    fs::write(root.join("deep/er/four.c"), b"int caf\xe9 = beta;\n").unwrap();
    fs::write(root.join("deep/er/five.toml"), "").unwrap();
    fs::write(root.join("image.png"), "beta").unwrap();
    fs::write(root.join("target/built.rs"), "beta").unwrap();
    root
}

/// The number after a label at the beginning of a line.
fn field(text: &str, label: &str) -> u64 {
    let line = text
        .lines()
        .find(|line| line.starts_with(label))
        .unwrap_or_else(|| panic!("no {label} in\n{text}"));
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .replace(',', "")
        .parse()
        .unwrap()
}

#[test]
fn a_directory_is_counted() {
    let root = fixture("directory");
    let output = census(&[
        OsStr::new("--threads"),
        OsStr::new("3"),
        OsStr::new("--top"),
        OsStr::new("2"),
        root.as_os_str(),
    ]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(field(&text, "files"), 5, "{text}");
    assert_eq!(field(&text, "bytes"), 30 + 34 + 16 + 17, "{text}");
    assert_eq!(field(&text, "words"), 15, "{text}");
    // fn alpha beta def return alpha_2 gamma int caf: the replacement for the broken letter is not a letter.
    assert_eq!(field(&text, "distinct"), 9, "{text}");
    assert!(text.contains("1 not UTF-8"), "{text}");
    let top: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("     ") && line.split_whitespace().count() == 2)
        .collect();
    assert_eq!(top.len(), 2, "{text}");
    assert_eq!(top[0].split_whitespace().collect::<Vec<_>>(), ["7", "beta"], "{text}");
    for word in [
        "in use",
        "cached",
        "free",
        "scavenged",
        "metadata",
        "refills",
        "flushes",
        "growths",
        "reserve",
    ] {
        assert!(text.contains(word), "no {word} in\n{text}");
    }
}

/// The heap's map, row by row, and the same map as a picture.
#[test]
fn the_heap_is_drawn() {
    let (root, svg) = (fixture("drawn"), fixture("picture").join("heap.svg"));
    let output = census(&[OsStr::new("--svg"), svg.as_os_str(), root.as_os_str()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines = text.lines().skip_while(|line| !line.starts_with("the map"));
    let head = lines.next().unwrap_or_else(|| panic!("no map in\n{text}"));
    assert!(head.contains("KiB a sign"), "{head}");
    let rows: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    assert!((1..=26).contains(&rows.len()), "{text}");
    let (last, whole) = rows.split_last().unwrap();
    assert!(whole.iter().all(|row| row.len() == 72) && last.len() <= 72, "{text}");
    // Threads' blocks lie in spans, and the tables come last.
    assert!(rows[0].contains('#') && last.trim_end().ends_with('m'), "{text}");
    assert!(rows.concat().chars().all(|sign| "#=c. m".contains(sign)), "{text}");

    let picture = fs::read_to_string(&svg).unwrap();
    well_formed(&picture);
    for word in ["spans", "metadata", "census: "] {
        assert!(picture.contains(word), "no {word} in\n{picture}");
    }
    let cells = picture.lines().filter(|line| line.contains("height=\"9\"")).count();
    assert!(cells >= rows.len(), "{cells} stretches\n{picture}");

    let output = census(&["--svg", "no/such/folder/heap.svg", root.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
}

/// Every element is closed, in order, and text is outside of them.
fn well_formed(svg: &str) {
    let mut open = Vec::new();
    for piece in svg.split('<').skip(1) {
        let (element, _) = piece.split_once('>').unwrap_or_else(|| panic!("not closed: {piece}"));
        let name = |element: &str| element.split_whitespace().next().unwrap().to_owned();
        assert_eq!(element.matches('"').count() % 2, 0, "{element}");
        if let Some(name) = element.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "{svg}");
        } else if !element.ends_with('/') {
            open.push(name(element));
        }
    }
    assert!(open.is_empty() && svg.starts_with("<svg "), "{open:?} in\n{svg}");
}

#[test]
fn a_file_is_counted_whatever_its_name() {
    let output = census(&[fixture("file").join("image.png")]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!((field(&text, "files"), field(&text, "words")), (1, 1), "{text}");
}

#[test]
fn what_is_not_there_is_an_error() {
    let output = census(&["no/such/place"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(
        errors.contains("census: no/such/place: no such file or directory"),
        "{errors}"
    );
}

#[test]
fn nonsense_is_an_error_and_help_is_none() {
    for arguments in [&["--threads"][..], &["--top", "many"], &["--fast"]] {
        let output = census(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(
            String::from_utf8(output.stderr).unwrap().starts_with("census: "),
            "{arguments:?}"
        );
    }
    let output = census(&["--help"]);
    assert!(output.status.success());
    assert!(String::from_utf8(output.stdout).unwrap().contains("usage: census"));
}
