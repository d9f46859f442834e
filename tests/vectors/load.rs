//! Reading the recorded files.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use flate2::read::GzDecoder;
use serde_json::Value;

/// The records of a file, in order.
pub fn records(name: &str) -> impl Iterator<Item = Value> + use<> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors").join(name);
    let file = File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let name = name.to_owned();
    BufReader::with_capacity(1 << 16, GzDecoder::new(file))
        .lines()
        .enumerate()
        .map(move |(line, text)| {
            let text = text.unwrap_or_else(|error| panic!("{name}, line {}: {error}", line + 1));
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}, line {}: {error}", line + 1))
        })
}

/// An integer.
pub fn int(value: &Value) -> i64 {
    value.as_i64().unwrap_or_else(|| panic!("{value} is no integer"))
}

/// An integer that is not negative.
pub fn size(value: &Value) -> usize {
    usize::try_from(int(value)).unwrap_or_else(|_| panic!("{value} is negative"))
}

/// An index, or -1 for none.
pub fn index(value: &Value) -> Option<usize> {
    usize::try_from(int(value)).ok()
}

/// A word in hexadecimal.
pub fn word(value: &Value) -> u64 {
    let text = text(value);
    u64::from_str_radix(text, 16).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Words in hexadecimal.
pub fn words(value: &Value) -> Vec<u64> {
    list(value).iter().map(word).collect()
}

/// A string.
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

/// A list; null is an empty one.
pub fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The integers of a list, all in range.
pub fn sizes<const N: usize>(value: &Value) -> [usize; N] {
    assert_eq!(list(value).len(), N, "{value}");
    std::array::from_fn(|item| size(&value[item]))
}
