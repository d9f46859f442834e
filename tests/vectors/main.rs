//! Replays recordings of the Go page allocator: every record must give the same result. See `README.md`.

#[path = "../common/mod.rs"]
mod common;
mod heap;
mod index;
mod load;
mod primitives;

use std::collections::BTreeMap;

use heap::Replay;
use index::Index;
use load::{list, records, size, sizes, text};
use primitives::Outcome;
use serde_json::Value;

/// How many records of each kind a file has, and whether they are replayed.
type Counts = &'static [(&'static str, usize, Outcome)];

use Outcome::{Replayed, Skipped};

/// Replays a file of single records, and counts them.
fn replay_file(name: &str, expected: Counts) {
    let mut counts = BTreeMap::new();
    for record in records(name).skip(1) {
        let kind = text(&record["k"]).to_owned();
        if kind == "heap" && !heap::fits(&record["init"]["inuse"]) {
            println!("{name}: no addresses for {}", record["t"]);
            continue;
        }
        let outcome = match &kind[..] {
            "heap" => table(&record),
            "scavindex" => scavenge_index(&record),
            kind => primitives::replay(kind, &record),
        };
        let (count, recorded) = counts.entry(kind).or_insert((0, outcome));
        *count += 1;
        assert_eq!(*recorded, outcome, "{record}");
    }
    let counts: Vec<_> = counts
        .iter()
        .map(|(kind, &(count, outcome))| (&kind[..], count, outcome))
        .collect();
    for (kind, count, _) in counts.iter().filter(|(_, _, outcome)| *outcome == Skipped) {
        println!("{name}: {count} records of {kind} skipped: a heap here is one contiguous range");
    }
    assert_eq!(counts, expected, "{name}");
}

#[test]
fn primitives_replay() {
    replay_file("primitives.jsonl.gz", PRIMITIVES);
}

#[test]
fn tables_replay() {
    replay_file("tables.jsonl.gz", TABLES);
}

/// One of Go's table tests of a whole heap: contents before, steps, contents after.
fn table(record: &Value) -> Outcome {
    let mut replay = Replay::new(&record["init"]["inuse"]);
    for chunk in list(&record["init"]["chunks"]) {
        let first = size(&chunk["c"]) * 512;
        let mut runs: Vec<_> = list(&chunk["alloc"]).iter().map(|run| (sizes(run), true)).collect();
        runs.extend(list(&chunk["scav"]).iter().map(|run| (sizes(run), false)));
        runs.sort_unstable();
        for ([start, pages], used) in runs {
            replay.fill(first + start, pages, used, !used);
        }
    }
    replay.fill_to(usize::MAX);
    let name = &record["t"];
    replay.compare_state(&record["init"], name);
    for step in list(&record["ops"]) {
        replay.step(step);
    }
    replay.compare_state(&record["final"], name);
    Replayed
}

/// Go's choice of chunks, tested alone. The replay has its own copy ([`Index`]); the scavenging tables mean something
/// only if that copy is right.
fn scavenge_index(record: &Value) -> Outcome {
    let mut index = Index::new(size(&record["init"]["hi"]));
    for step in list(&record["ops"]) {
        match text(&step[0]) {
            "alloc" => index.allocate(size(&step[1]), size(&step[2])),
            "free" => index.free(size(&step[1]), size(&step[2])),
            "nextgen" => index.next_generation(),
            "reset" => index.reset(),
            "setempty" => index.set_empty(size(&step[1])),
            "find" => {
                let force = step[1].as_bool().expect("a flag");
                let theirs = load::index(&step[2]).map(|chunk| (chunk, size(&step[3])));
                assert_eq!(index.find(force), theirs, "{}: {step}", record["t"]);
            }
            _ => panic!("a step of an unknown kind: {step}"),
        }
    }
    Replayed
}

/// Replays a trace, and counts its steps.
fn replay_trace(shape: &str, expected: &[(&str, usize)]) {
    let mut records = records(&format!("trace-{shape}-1.jsonl.gz")).skip(1);
    let header = records.next().expect("a header");
    let mut replay = Replay::new(&header["inuse"]);
    let mut begun = false;
    for record in records {
        if record.is_array() {
            if !begun {
                replay.fill_to(usize::MAX);
                begun = true;
            }
            replay.step(&record);
            continue;
        }
        for [page, pages, used, scavenged] in list(&record["runs"]).iter().map(sizes) {
            replay.fill(page, pages, used == 1, scavenged == 1);
        }
    }
    let steps: Vec<_> = replay.steps.iter().map(|(kind, &count)| (&kind[..], count)).collect();
    assert_eq!(steps, expected, "{shape}");
}

#[test]
fn trace_fragmented() {
    replay_trace(
        "fragmented",
        &[
            ("a", 12486),
            ("c", 5270),
            ("f", 13610),
            ("k", 62),
            ("l", 970),
            ("r", 2283),
        ],
    );
}

#[cfg(target_pointer_width = "64")] // The heap is 64 GiB.
#[test]
fn trace_huge_64g() {
    replay_trace(
        "huge-64g",
        &[("a", 7555), ("c", 2736), ("f", 9684), ("k", 42), ("l", 774), ("r", 961)],
    );
}

#[test]
fn trace_nearly_full() {
    replay_trace(
        "nearly-full",
        &[
            ("a", 14007),
            ("c", 8951),
            ("f", 10357),
            ("k", 62),
            ("l", 995),
            ("r", 3481),
        ],
    );
}

#[test]
fn trace_one_chunk() {
    replay_trace(
        "one-chunk",
        &[
            ("a", 10480),
            ("c", 7369),
            ("f", 13607),
            ("k", 62),
            ("l", 1178),
            ("r", 1619),
        ],
    );
}

#[test]
fn trace_sixteen() {
    replay_trace(
        "sixteen",
        &[
            ("a", 13079),
            ("c", 5562),
            ("f", 12661),
            ("k", 62),
            ("l", 1054),
            ("r", 1812),
        ],
    );
}

const PRIMITIVES: Counts = &[
    ("bits.find", 4000, Replayed),
    ("bits.popcnt", 500, Replayed),
    ("bits.summarize", 3000, Replayed),
    ("findbitrange64", 4000, Replayed),
    ("merge", 3000, Replayed),
    ("pack", 500, Replayed),
    ("scavcandidate", 2000, Replayed),
];

/// Number of heaps in the tables that have enough addresses: five span more than 32 bits.
const HEAPS: usize = if usize::BITS < u64::BITS { 164 } else { 169 };

const TABLES: Counts = &[
    ("bits.clear", 24, Replayed),
    ("bits.find", 41, Replayed),
    ("bits.popcnt", 39, Replayed),
    ("bits.set", 129, Replayed),
    ("bits.summarize", 1009, Replayed),
    ("fillaligned", 13112, Replayed),
    ("findbitrange64", 136, Replayed),
    ("heap", HEAPS, Replayed),
    ("pcache.alloc", 73, Replayed),
    ("ranges.add", 132, Skipped),
    ("ranges.findsucc", 18, Skipped),
    ("scavcandidate", 93, Replayed),
    ("scavindex", 32, Replayed),
];
