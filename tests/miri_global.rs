//! A program whose allocator is a `GlobalHeap`, for Miri: what collections, threads and channels do with blocks. It
//! needs Tree Borrows, since a value may be shorter than the word of its block that a free writes. `.ci/run miri` runs
//! it so.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, mpsc};
use std::thread;

use pageheap::GlobalHeap;

#[global_allocator]
static HEAP: GlobalHeap = GlobalHeap::new();

/// Short values, and such with padding, some of which nobody has written.
#[test]
fn boxes() {
    let mut bytes: Vec<Box<u8>> = (0..30).map(Box::new).collect();
    bytes.truncate(10);
    let pairs: Vec<Box<(u8, u32)>> = (0..30).map(|number| Box::new((number as u8, number))).collect();
    assert_eq!(bytes.len() + pairs.len(), 40);
    assert!(HEAP.contains((&raw const *bytes[0]).cast()));
}

#[test]
fn collections() {
    let mut words = BTreeMap::new();
    for number in 0..60_usize {
        words.insert(number * 7 % 61, number.to_string());
    }
    words.retain(|number, _| number % 3 > 0);
    let lengths: HashMap<_, _> = words.iter().map(|(number, word)| (*number, word.len())).collect();
    assert_eq!(lengths.values().sum::<usize>(), words.values().map(String::len).sum());
}

/// Long blocks, which grow and are cut.
#[test]
fn buffers() {
    let mut buffer = vec![1_u8; 3000];
    for _ in 0..6 {
        buffer.extend_from_within(..);
    }
    buffer.truncate(10_000);
    buffer.shrink_to_fit();
    assert!(buffer[9_999] == 1 && vec![0_u64; 20_000][19_999] == 0);
}

#[test]
fn threads_free_what_others_made() {
    let (sender, receiver) = mpsc::channel::<Arc<Vec<String>>>();
    let makers: Vec<_> = (0..2)
        .map(|maker| {
            let sender = sender.clone();
            thread::spawn(move || {
                for round in 0..5 {
                    let words = (0..6).map(|word| format!("{maker} {round} {word}")).collect();
                    sender.send(Arc::new(words)).unwrap();
                }
            })
        })
        .collect();
    drop(sender);
    assert_eq!(receiver.iter().map(|words| words.len()).sum::<usize>(), 60);
    makers.into_iter().for_each(|maker| maker.join().unwrap());
}
