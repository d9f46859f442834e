//! A program that drops a document of strings, lists and maps, like one that parses JSON.
//!
//! A step through a B-tree that is dropped frees in two places. It is inlined only if both of them are small; if not,
//! the program has a function `deallocating_next`, and dropping a document takes up to 1.7 times as long
//! (`src/global/inline.rs`). So `.ci/run inlined` looks for that name among the program's symbols.

use std::collections::BTreeMap;

use pageheap::GlobalHeap;

#[global_allocator]
static HEAP: GlobalHeap = GlobalHeap::new();

enum Document {
    Text(String),
    List(Vec<Document>),
    Map(BTreeMap<String, Document>),
}

impl Document {
    fn of(depth: u32) -> Self {
        match depth {
            0 => Self::Text("text".repeat(2)),
            1 => Self::List(vec![Self::of(0), Self::of(0)]),
            _ => Self::Map((0..9).map(|name| (name.to_string(), Self::of(depth - 1))).collect()),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::List(parts) => parts.iter().map(Self::len).sum(),
            Self::Map(parts) => parts.values().map(Self::len).sum(),
        }
    }
}

fn main() {
    let document = Document::of(4);
    let live = HEAP.stats().bytes_in_use();
    println!("{} bytes of text in {live}", document.len());
    drop(document);
    assert!(HEAP.stats().bytes_in_use() < live);
}
