//! A program whose allocator is a `GlobalHeap`, for Miri: what collections, threads and channels do with blocks. It
//! needs Tree Borrows, since a value may be shorter than the word of its block that a free writes. `.ci/run miri` runs
//! it so.

use std::alloc::Layout;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, mpsc};
use std::thread;

use pageheap::arena::{Arena, FreeList};
use pageheap::source::System;
use pageheap::{Config, GlobalHeap, Heap};

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

/// In memory of the system's, as the program's own heap.
#[test]
fn other_heaps_and_arenas() {
    let heap = Heap::new(System, Config::new(16 << 20)).unwrap();
    let layout = Layout::new::<[u64; 10]>();
    let block = heap.allocate(layout).unwrap();
    // SAFETY: allocated above, with this layout, freed once.
    unsafe {
        block.cast().write([7_u64; 10]);
        heap.free(block, layout);
    }
    let list = FreeList::new(layout).unwrap();
    assert_eq!(list.boxed([1_u64; 10]).unwrap()[9], 1);
    assert_eq!(Arena::new().alloc(5_u32).copied(), Ok(5));
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

/// More than a background thread is started for elsewhere, and then an allocation that would look whether it may.
#[test]
fn two_mebibytes_are_freed() {
    let many: Vec<_> = (1..8).map(|size| vec![1_u8; size << 16]).collect();
    drop(many);
    assert_eq!(Box::new([1_u8; 20_000])[19_999], 1);
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
