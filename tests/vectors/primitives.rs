//! Replays the small functions, one record at a time.

use pageheap::internals::scavenge::{Limits, candidate, fill_aligned};
use pageheap::internals::{Summary, Word, bitmap};
use serde_json::Value;

use super::common::draw;
use super::load::{index, list, size, sizes, word, words};

/// What was done with a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Replayed,
    /// It is about something this crate does not have.
    Skipped,
}

/// Replays one record of any kind except `heap` and `scavindex`.
pub fn replay(kind: &str, record: &Value) -> Outcome {
    match kind {
        "bits.find" => find(record),
        "bits.summarize" => summarize(record),
        "bits.popcnt" => popcnt(record),
        "bits.set" => change(record, bitmap::set),
        "bits.clear" => change(record, bitmap::clear),
        "findbitrange64" => find_in_word(record),
        "fillaligned" => assert_eq!(
            fill_aligned(word(&record["x"]), size(&record["m"])),
            word(&record["r"]),
            "{record}"
        ),
        "merge" => merge(record),
        "pack" => pack(record),
        "pcache.alloc" => cache(record),
        "scavcandidate" => scavenge(record),
        "ranges.add" | "ranges.findsucc" => return Outcome::Skipped,
        _ => panic!("a record of an unknown kind: {record}"),
    }
    Outcome::Replayed
}

/// The record's words, 1 = free.
fn free(value: &Value) -> Vec<u64> {
    words(value).iter().map(|word| !word).collect()
}

fn summary(value: &Value) -> Summary {
    let [start, max, end] = sizes(value);
    Summary::new(start, max, end)
}

fn find(record: &Value) {
    let words = free(&record["bits"]);
    let (count, from) = (size(&record["n"]), size(&record["from"]));
    let found = bitmap::find(&words, count, from);
    let picture = || draw::words(&words);
    assert_eq!(found, index(&record["i"]), "{count} from {from}\n{}", picture());
    if found.is_some() {
        let first = bitmap::find(&words, 1, from);
        assert_eq!(first, index(&record["first"]), "first from {from}\n{}", picture());
    }
}

fn summarize(record: &Value) {
    let words = free(&record["bits"]);
    let sum = bitmap::summarize(&words);
    assert_eq!(sum, summary(&record["sum"]), "\n{}", draw::words(&words));
}

fn popcnt(record: &Value) {
    let words = words(&record["bits"]);
    let ones = bitmap::count(&words, size(&record["i"]), size(&record["n"]));
    assert_eq!(ones, size(&record["r"]), "{record}\n{}", draw::words(&words));
}

fn change(record: &Value, change: fn(&mut [u64], usize, usize)) {
    let mut now = words(&record["before"]);
    change(&mut now, size(&record["i"]), size(&record["n"]));
    assert_eq!(now, words(&record["after"]), "{record}\n{}", draw::words(&now));
}

fn find_in_word(record: &Value) {
    let found = bitmap::find_in_word(word(&record["x"]), size(&record["n"]));
    let expected = Some(size(&record["r"])).filter(|&bit| bit < 64);
    assert_eq!(found, expected, "{record}\n{}", draw::words(&[word(&record["x"])]));
}

fn merge(record: &Value) {
    let children = list(&record["in"]).iter().map(summary);
    let shift = size(&record["logPages"]) as u32;
    assert_eq!(Summary::merge(children, shift), summary(&record["sum"]), "{record}");
    // The same in pairs from the left, if the left part is a power of two pages.
    if let [left, right, ..] = list(&record["in"]) {
        let pair = Summary::merge([left, right].into_iter().map(summary), shift);
        assert_eq!(summary(left).then(shift, summary(right), shift), pair, "{record}");
    }
}

fn pack(record: &Value) {
    let (sum, packed) = (summary(&record["sum"]), word(&record["packed"]));
    assert_eq!(sum.to_bits(), packed, "{record}: {sum:?}");
    let [start, max, end] = sizes(&record["sum"]);
    let unpacked = Summary::from_bits(packed);
    assert_eq!(
        (unpacked.start(), unpacked.max(), unpacked.end()),
        (start, max, end),
        "{record}"
    );
}

/// A cache written out: `[page, free, scavenged]`.
pub fn cached(value: &Value) -> Word {
    Word {
        index: index(&value[0]).unwrap_or(0) / 64,
        free: word(&value[1]),
        scavenged: word(&value[2]),
    }
}

fn cache(record: &Value) {
    let (before, after) = (cached(&record["before"]), cached(&record["after"]));
    let mut now = before;
    let claim = now.take(size(&record["n"]));
    let picture = || draw::rows(before.index, [(before.free, before.scavenged)].into_iter());
    assert_eq!(
        claim.map(|claim| claim.start),
        index(&record["page"]),
        "{record}\n{}",
        picture()
    );
    let scavenged = claim.map_or(0, |claim| claim.scavenged);
    assert_eq!(scavenged, size(&record["scav"]), "{record}\n{}", picture());
    assert_eq!(now, after, "{record}\n{}", picture());
}

fn scavenge(record: &Value) {
    let (free, scavenged) = (free(&record["alloc"]), words(&record["scav"]));
    let limits = Limits {
        least: size(&record["min"]),
        most: size(&record["max"]),
        huge: 256,
    };
    let found = candidate(&free, &scavenged, size(&record["from"]), limits);
    let expected = Some((size(&record["i"]), size(&record["n"]))).filter(|&(_, pages)| pages > 0);
    let rows = free.iter().copied().zip(scavenged.iter().copied());
    assert_eq!(
        found,
        expected,
        "from {}, {limits:?}\n{}",
        record["from"],
        draw::rows(0, rows)
    );
}
