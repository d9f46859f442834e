//! Titles that other text points to: a link's anchor, or the name of a section in quotes, may outlive what it names.

use super::{House, caught, obeyed};

/// The record of what was tried, which others cite by the titles of its sections.
const RECORD: &str = "docs/measurements.md";

/// The headings of a document, but for its first.
fn headings(text: &str) -> impl Iterator<Item = &str> {
    let mut code = false;
    text.lines().filter_map(move |line| {
        code ^= line.starts_with("```");
        let heading = line.trim_start_matches('#');
        (!code && line.starts_with("##")).then(|| heading.trim())
    })
}

/// What a link to a heading ends in: letters, digits, `_`, and `-` for each space.
fn anchor(heading: &str) -> String {
    let kept = heading
        .chars()
        .filter(|&letter| letter.is_alphanumeric() || "_- ".contains(letter));
    kept.flat_map(char::to_lowercase)
        .map(|letter| if letter == ' ' { '-' } else { letter })
        .collect()
}

/// Links in documents, to other files and to headings, lead somewhere.
pub(crate) fn links_lead_somewhere(house: &House) -> Vec<String> {
    let mut findings = Vec::new();
    for (path, text) in house.other.iter().filter(|(path, _)| path.ends_with(".md")) {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        for (index, line) in text.lines().enumerate() {
            let links = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            for link in links.filter(|link| !link.contains(':')) {
                let (file, title) = link.split_once('#').unwrap_or((link, ""));
                let target = if file.is_empty() {
                    path.clone()
                } else {
                    joined(folder, file)
                };
                let there = match house.text(&target) {
                    Some(text) => title.is_empty() || headings(&text).any(|heading| anchor(heading) == title),
                    // A folder.
                    None => title.is_empty() && has_folder(house, &target),
                };
                if !there {
                    findings.push(format!("{path}:{}: `{link}` leads nowhere", index + 1));
                }
            }
        }
    }
    findings
}

/// `file`, as seen from `folder`.
fn joined(folder: &str, file: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in file.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." | "" => {}
            part => parts.push(part),
        }
    }
    parts.join("/")
}

fn has_folder(house: &House, path: &str) -> bool {
    let inside = format!("{path}/");
    let others = house.other.iter().map(|(path, _)| path);
    let all = others.chain(house.rust.iter().map(|file| &file.path));
    all.into_iter().any(|path| path.starts_with(&inside))
}

/// Whoever cites a section of the record by its title cites one that it has (a part of the title will do), and the
/// record's index has all of them.
fn the_record_has_what_is_cited(house: &House) -> Vec<String> {
    let Some(record) = house.text(RECORD) else {
        return Vec::new();
    };
    let titles: Vec<String> = headings(&record).map(str::to_lowercase).collect();
    let mut findings = Vec::new();
    let behind = record.split_once("## Index\n").map_or("", |(_, behind)| behind);
    let index = behind.split("\n## ").next().unwrap_or_default();
    for heading in headings(&record).filter(|&heading| heading != "Index") {
        if !index.contains(&format!("](#{})", anchor(heading))) {
            findings.push(format!("{RECORD}:1: its index lacks \"{heading}\""));
        }
    }
    let others = house.other.iter().filter(|(path, _)| path.ends_with(".md"));
    let others = others.map(|(path, text)| (path, text.clone()));
    let rust = house.rust.iter().map(|file| (&file.path, file.lines.join("\n")));
    // This file's own tests cite what is not there.
    for (path, text) in others.chain(rust).filter(|(path, _)| !path.starts_with("tests/tidy")) {
        for title in cited(&unwrapped(&text)) {
            if !titles.iter().any(|known| known.contains(&title.to_lowercase())) {
                findings.push(format!("{path}:1: {RECORD} has no section \"{title}\""));
            }
        }
    }
    findings
}

/// Text without line breaks and the marks of comments after them.
fn unwrapped(text: &str) -> String {
    let lines = text
        .lines()
        .map(|line| line.trim_start().trim_start_matches(['/', '!', '>']).trim());
    lines.collect::<Vec<_>>().join(" ")
}

/// The titles in quotes that follow the record's name: `…/measurements.md`, "One", "Another" and "A third".
fn cited(text: &str) -> Vec<&str> {
    let name = format!("{RECORD}`");
    let mut titles = Vec::new();
    for mut rest in text.split(&name).skip(1) {
        while let Some(quoted) = [", \"", " and \""]
            .iter()
            .find_map(|between| rest.strip_prefix(between))
        {
            let Some((title, after)) = quoted.split_once('"') else {
                break;
            };
            titles.push(title.trim_end_matches(','));
            rest = after;
        }
    }
    titles
}

#[test]
fn every_link_leads_somewhere() {
    obeyed(links_lead_somewhere);
    let b = (
        "docs/b.md",
        "# All\n\n## One `Heap`, once\n\n```sh\n## no heading\n```\n",
    );
    let good = [
        (
            "README.md",
            "[b](docs/b.md#one-heap-once), [c](https://x.y/#z), [d](docs)",
        ),
        ("docs/a.md", "[b](b.md), [r](../README.md), [own](#own)\n## Own\n"),
        b,
    ];
    for bad in [
        "[b](docs/b.md#two)",
        "[b](docs/c.md)",
        "[b](#one-heap-once)",
        "[b](docs/b.md#no-heading)",
        "[b](c)",
    ] {
        caught(links_lead_somewhere, &[("README.md", bad), b], &good);
    }
}

#[test]
fn the_record_of_what_was_tried_has_what_others_cite() {
    obeyed(the_record_has_what_is_cited);
    let record = "## Index\n[One](#one-thing), [Two](#two-of-them)\n## One thing\n## Two of them\n";
    let good = [
        (RECORD, record),
        (
            "src/a.rs",
            "//! (`docs/measurements.md`, \"one\n//! thing\", \"Two\" and \"of them\"; \"three\")",
        ),
    ];
    for bad in [
        "`docs/measurements.md`, \"Three\"",
        "`docs/measurements.md`, \"One\" and \"Three\"",
    ] {
        caught(the_record_has_what_is_cited, &[(RECORD, record), ("a.md", bad)], &good);
    }
    let unlisted = format!("{record}## Three\n");
    caught(the_record_has_what_is_cited, &[(RECORD, &unlisted)], &good);
    // A link from the text is not a line of the index.
    let linked = format!("{record}As in [Three](#three).\n## Three\n");
    caught(the_record_has_what_is_cited, &[(RECORD, &linked)], &good);
}
