//! Workloads that are small programs: containers, trees and parsers, using the allocator through the standard library.

use super::Work;
use super::random::Random;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::hint::black_box;
use std::sync::mpsc;
use std::thread;

/// A map of some 50,000 keys, into which a random key is inserted or from which it is removed; that is an operation.
pub fn btree() -> Work {
    const KEYS: usize = 100_000;
    let mut random = Random::new(1);
    let mut map: BTreeMap<u64, [u64; 3]> = BTreeMap::new();
    Box::new(move |ops| {
        for _ in 0..ops {
            let key = random.below(KEYS) as u64;
            if map.remove(&key).is_none() {
                map.insert(key, [key; 3]);
            }
        }
    })
}

/// The same with names as keys and small vectors as values, in a hash map.
pub fn hash_map() -> Work {
    const KEYS: usize = 100_000;
    let mut random = Random::new(2);
    let mut map: HashMap<String, Vec<u32>> = HashMap::new();
    Box::new(move |ops| {
        for _ in 0..ops {
            let key = format!("a name with the number {}", random.below(KEYS));
            if map.remove(&key).is_none() {
                map.insert(key, vec![7; random.between(1, 32)]);
            }
        }
    })
}

struct Node {
    left: Option<Box<Node>>,
    right: Option<Box<Node>>,
}

fn tree(depth: u32) -> Box<Node> {
    let child = || (depth > 0).then(|| tree(depth - 1));
    Box::new(Node {
        left: child(),
        right: child(),
    })
}

fn count(node: &Node) -> u64 {
    1 + node.left.as_deref().map_or(0, count) + node.right.as_deref().map_or(0, count)
}

/// As in the benchmarks game: one tree stays, others of depth 4 to 14 are made, counted and dropped. An operation is a
/// node.
pub fn binary_trees() -> Work {
    let long_lived = tree(14);
    Box::new(move |ops| {
        let mut left = ops;
        while left > 0 {
            for depth in (4..=14).step_by(2) {
                for _ in 0..1 << (14 - depth) {
                    left = left.saturating_sub(count(&tree(depth)));
                }
            }
        }
        black_box(count(&long_lived));
    })
}

/// JSON with every kind of value in it, about `bytes` bytes.
pub fn json_text(bytes: usize) -> String {
    let mut random = Random::new(3);
    let mut text = String::with_capacity(bytes + 1000);
    text.push('[');
    while text.len() < bytes {
        let id = random.next() % 1_000_000;
        let tags: Vec<String> = (0..random.below(6))
            .map(|tag| format!("\"tag-{tag}-{}\"", id % 97))
            .collect();
        let tags = tags.join(",");
        let (active, score) = (id.is_multiple_of(2), id % 100);
        write!(
            text,
            r#"{{"id":{id},"name":"user number {id}","score":{score}.5,"active":{active},"tags":[{tags}],"#
        )
        .and_then(|()| write!(text, r#""at":{{"x":{},"y":-{},"note":null}}}},"#, id % 360, id % 180))
        .expect("a string takes what is written");
    }
    text.push_str("0]");
    text
}

pub fn parse_json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).expect("it is JSON")
}

/// A text of 1 MiB is parsed to a tree, which is dropped. An operation is one such cycle.
pub fn json() -> Work {
    let text = json_text(1 << 20);
    Box::new(move |ops| {
        for _ in 0..ops {
            black_box(parse_json(&text));
        }
    })
}

/// Rust source with a bit of everything, `items` items.
pub fn rust_text(items: usize) -> String {
    (0..items)
        .map(|item| include_str!("item.txt").replace('@', &item.to_string()))
        .collect()
}

/// A syntax tree that is sent to another thread.
#[derive(Debug)]
pub struct Sent(#[expect(dead_code, reason = "only its drop is of interest")] syn::File);

// SAFETY: syn's trees are not `Send` because of the reference-counted pointers in their token streams. All of the
// pointers to a stream lie in the one tree that was parsed, which is sent as a whole and dropped as a whole.
unsafe impl Send for Sent {}

pub fn parse_rust(text: &str) -> Sent {
    Sent(syn::parse_file(text).expect("it is Rust"))
}

/// One thread parses 100 items of Rust, another drops the trees. An operation is one such cycle.
pub fn syn() -> Work {
    let text = rust_text(100);
    Box::new(move |ops| {
        let (sender, receiver) = mpsc::sync_channel::<Sent>(8);
        let dropper = thread::spawn(move || receiver.into_iter().for_each(drop));
        for _ in 0..ops {
            sender.send(parse_rust(&text)).expect("the dropper lives");
        }
        drop(sender);
        dropper.join().expect("no panic");
    })
}
