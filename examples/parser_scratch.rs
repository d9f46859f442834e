//! A JSON parser whose tree lies in an arena: one reset for each document instead of one free for each node.
//!
//! ```sh
//! cargo run --release --example parser_scratch
//! ```
//!
//! The tree borrows text from the document and slices from the arena. Children are collected in the arena too, by an
//! iterator that parses: it allocates from the same arena while its own slice grows. For comparison there is the same
//! parser with `Vec`s.

use std::hint::black_box;
use std::time::{Duration, Instant};

use pageheap::arena::{Arena, ArenaError, Local};

/// A value in an arena.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Json<'a> {
    Null,
    Bool(bool),
    Number(f64),
    Text(&'a str),
    List(&'a [Json<'a>]),
    Object(&'a [(&'a str, Json<'a>)]),
}

/// The same value in boxes of its own.
#[derive(Debug)]
enum Owned {
    Leaf,
    Text(String),
    List(Vec<Owned>),
    Object(Vec<(String, Owned)>),
}

/// The rest of a document.
struct Reader<'t>(&'t str);

impl<'t> Reader<'t> {
    /// Skips white space. Returns whether `token` follows, and skips that too.
    fn skip(&mut self, token: &str) -> bool {
        self.0 = self.0.trim_start();
        self.0.strip_prefix(token).map(|rest| self.0 = rest).is_some()
    }

    /// Text up to the next quotation mark, which this small parser takes for the end.
    fn text(&mut self) -> Option<&'t str> {
        let (text, rest) = self.0.split_once('"')?;
        self.0 = rest;
        Some(text)
    }

    fn number(&mut self) -> Option<f64> {
        let end = self.0.find([',', ']', '}', ' ', '\n']).unwrap_or(self.0.len());
        let (number, rest) = self.0.split_at(end);
        self.0 = rest;
        number.parse().ok()
    }

    fn key(&mut self) -> Option<&'t str> {
        let key = if self.skip("\"") { self.text() } else { None };
        key.filter(|_| self.skip(":"))
    }

    /// What `item` reads, with commas between, until `end` is found, or an item is invalid or a comma missing: `whole`
    /// says afterwards whether it was the end.
    fn items<T>(
        &mut self,
        end: &str,
        whole: &mut bool,
        mut item: impl FnMut(&mut Self) -> Option<T>,
    ) -> impl Iterator<Item = T> {
        let mut is_first = true;
        std::iter::from_fn(move || {
            *whole = self.skip(end);
            if *whole || !(is_first || self.skip(",")) {
                return None;
            }
            is_first = false;
            item(self)
        })
    }

    /// Parses a value. `None` if the document is invalid, or there is no memory: then `error` says so.
    fn value<'a>(&mut self, local: &Local<'a>, error: &mut Option<ArenaError>) -> Option<Json<'a>>
    where
        't: 'a,
    {
        Some(match () {
            () if self.skip("null") => Json::Null,
            () if self.skip("true") => Json::Bool(true),
            () if self.skip("false") => Json::Bool(false),
            () if self.skip("\"") => Json::Text(self.text()?),
            () if self.skip("[") => {
                let mut whole = false;
                let items = self.items("]", &mut whole, |reader| reader.value(local, error));
                let items = local.alloc_iter(items).map_err(|full| *error = Some(full)).ok()?;
                Json::List(whole.then_some(items)?)
            }
            () if self.skip("{") => {
                let mut whole = false;
                let pairs = self.items("}", &mut whole, |reader| {
                    Some((reader.key()?, reader.value(local, error)?))
                });
                let pairs = local.alloc_iter(pairs).map_err(|full| *error = Some(full)).ok()?;
                Json::Object(whole.then_some(pairs)?)
            }
            () => Json::Number(self.number()?),
        })
    }

    fn owned(&mut self) -> Option<Owned> {
        Some(match () {
            () if self.skip("null") || self.skip("true") || self.skip("false") => Owned::Leaf,
            () if self.skip("\"") => Owned::Text(self.text()?.to_owned()),
            () if self.skip("[") => {
                let mut whole = false;
                let items = self.items("]", &mut whole, Self::owned).collect();
                Owned::List(whole.then_some(items)?)
            }
            () if self.skip("{") => {
                let mut whole = false;
                let pairs = self.items("}", &mut whole, |reader| {
                    Some((reader.key()?.to_owned(), reader.owned()?))
                });
                let pairs = pairs.collect();
                Owned::Object(whole.then_some(pairs)?)
            }
            () => self.number().map(|_| Owned::Leaf)?,
        })
    }
}

fn values(json: &Json<'_>) -> usize {
    1 + match json {
        Json::List(items) => items.iter().map(values).sum(),
        Json::Object(pairs) => pairs.iter().map(|(_, value)| values(value)).sum(),
        Json::Null | Json::Bool(_) | Json::Number(_) | Json::Text(_) => 0,
    }
}

fn owned_values(json: &Owned) -> usize {
    1 + match json {
        Owned::List(items) => items.iter().map(owned_values).sum(),
        Owned::Object(pairs) => pairs
            .iter()
            .map(|(key, value)| usize::from(key.is_empty()) + owned_values(value))
            .sum(),
        Owned::Text(text) => usize::from(text.len() > 1 << 20),
        Owned::Leaf => 0,
    }
}

fn best(rounds: usize, mut work: impl FnMut()) -> Duration {
    let times = (0..rounds).map(|_| {
        let begin = Instant::now();
        work();
        begin.elapsed()
    });
    times.min().unwrap_or_default()
}

fn main() -> Result<(), ArenaError> {
    let user = |id: usize| {
        format!(
            r#"{{"id": {id}, "name": "user {id}", "tags": ["a", "b", "c"], "seen": [[1, 2.5], [3, null]], "ok": true}}"#
        )
    };
    let document = format!("[{}]", (0..2000).map(user).collect::<Vec<_>>().join(", "));

    let mut arena = Arena::new();
    let small = Reader(r#"{"a": [1, null], "b": "text"}"#).value(&arena.local(), &mut None);
    let (list, text) = (Json::List(&[Json::Number(1.0), Json::Null]), Json::Text("text"));
    assert_eq!(small, Some(Json::Object(&[("a", list), ("b", text)])));
    let ends = ["[1, tru]", r#"{"a": [1, 2"#, r#"{"a" 1}"#, "[[1, 2]", "[1, [tru]]"];
    let commas = ["[1 2]", "[,1]", "[1,]", r#"{"a": 1 "b": 2}"#, r#"{,"a": 1}"#];
    for invalid in ends.into_iter().chain(commas) {
        assert_eq!(Reader(invalid).value(&arena.local(), &mut None), None, "{invalid}");
        assert!(Reader(invalid).owned().is_none(), "{invalid}");
    }
    arena.reset();

    let mut count = 0;
    let mut full = None;
    let time = best(50, || {
        let json = Reader(&document).value(&arena.local(), &mut full);
        count = json.as_ref().map_or(0, values);
        black_box(&json);
        arena.reset();
    });
    full.map_or(Ok(()), Err)?;
    let owned = best(50, || {
        let json = Reader(&document).owned().expect("the document is one");
        assert_eq!(owned_values(&json), count);
        black_box(json);
    });
    let each = |time: Duration| time.as_nanos() as f64 / count as f64;
    println!(
        "{count} values in {} KiB of text; the best of 50 rounds",
        document.len() >> 10
    );
    println!("  Local and reset   {:>6.1} ns a value", each(time));
    println!("  Vec and String    {:>6.1} ns a value", each(owned));
    println!("{}", arena.stats());
    Ok(())
}
