//! The idle test: fill memory, free it, and then be silent, while the runner watches the process from outside.
//!
//! ```text
//!   ready ── fill ── full ── free ── freed ── not one call into the allocator, for as long as asked ── cpu_ns=..
//! ```
//!
//! Each word is a line on standard output, written without the standard library's buffers. Meanwhile other threads
//! sleep in the system, with whatever the allocator keeps for them.

use super::block::Block;
use super::meter::{Reading, say};
use super::programs::{json_text, parse_json, parse_rust, rust_text};
use super::random::Random;
use std::mem;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

/// A scenario: fills memory, says "full", frees it, and returns with its threads asleep.
type Scenario = fn();

/// By name.
pub const SCENARIOS: &[(&str, Scenario)] = &[
    ("json", json),
    ("syn", syn),
    ("mixed-1t", || mixed(1)),
    ("mixed-4t", || mixed(4)),
    ("asleep", asleep),
    ("thinned", thinned),
];

/// Runs a scenario, and is silent for `silence`.
pub fn run(scenario: Scenario, silence: Duration) {
    say("ready\n");
    scenario();
    let freed = Reading::now();
    say("freed\n");
    thread::sleep(silence);
    let cost = freed.until(&Reading::now());
    say("end\n");
    println!("cpu_ns={}", cost.user_ns + cost.system_ns);
}

/// A JSON tree of some 480 MB, parsed and dropped. The text is freed before the tree.
fn json() {
    let text = json_text(37 << 20);
    let tree = parse_json(&text);
    drop(text);
    say("full\n");
    drop(tree);
}

/// Two threads parse Rust, a third frees the trees; then all three sleep.
fn syn() {
    let text = Arc::new(rust_text(100));
    let (sender, receiver) = mpsc::channel();
    let done = Arc::new(Barrier::new(3));
    for _ in 0..2 {
        let (text, sender, done) = (Arc::clone(&text), sender.clone(), Arc::clone(&done));
        thread::spawn(move || {
            for _ in 0..20 {
                sender.send(parse_rust(&text)).expect("the receiver is there");
            }
            drop((text, sender));
            done.wait();
            sleep_for_ever();
        });
    }
    drop((sender, text));
    let (freed, all_freed) = mpsc::sync_channel(1);
    thread::spawn(move || {
        done.wait();
        let trees: Vec<_> = receiver.into_iter().collect();
        say("full\n");
        drop(trees);
        freed.send(()).expect("main waits");
        sleep_for_ever();
    });
    wait(&all_freed);
}

/// 256 MiB in all, a third each in blocks of 16..1,024 B, of 1..32 KiB and of 32 KiB..1 MiB, on some threads, which
/// free them in random order and then sleep.
fn mixed(threads: usize) {
    let full = Arc::new(Barrier::new(threads + 1));
    let (freed, all_freed) = mpsc::sync_channel(threads);
    for index in 0..threads {
        let (full, freed) = (Arc::clone(&full), freed.clone());
        thread::spawn(move || {
            let mut random = Random::new(index as u64 + 1);
            let mut blocks = Vec::new();
            for (smallest, largest) in [(16, 1024), (1 << 10, 32 << 10), (32 << 10, 1 << 20)] {
                let mut left = (256 << 20) / 3 / threads;
                while left > 0 {
                    let block = Block::new(random.between(smallest, largest));
                    block.fill(1, usize::MAX);
                    left = left.saturating_sub(block.size());
                    blocks.push(block);
                }
            }
            full.wait();
            full.wait();
            while !blocks.is_empty() {
                drop(blocks.swap_remove(random.below(blocks.len())));
            }
            drop((blocks, full));
            freed.send(()).expect("main waits");
            sleep_for_ever();
        });
    }
    full.wait();
    say("full\n");
    full.wait();
    (0..threads).for_each(|_| wait(&all_freed));
}

/// A thread asleep with full caches: 1,000 blocks of each of 48 sizes up to 32 KiB, twice, and then nothing.
fn asleep() {
    let (freed, all_freed) = mpsc::sync_channel(1);
    thread::spawn(move || {
        for round in 0..2 {
            let sizes = (4..16).flat_map(|power| (4..8).map(move |quarter| quarter << (power - 2)));
            let blocks = sizes.flat_map(|size| (0..1000).map(move |_| Block::new(size)));
            let blocks: Vec<Block> = blocks.inspect(|block| block.fill(1, usize::MAX)).collect();
            if round == 1 {
                say("full\n");
            }
            drop(blocks);
        }
        freed.send(()).expect("main waits");
        sleep_for_ever();
    });
    wait(&all_freed);
}

/// 128 MiB in blocks of 1..32 KiB, one in eight of which stays, at random.
fn thinned() {
    let (mut random, mut blocks, mut left) = (Random::new(1), Vec::new(), 128_usize << 20);
    while left > 0 {
        let block = Block::new(random.between(1 << 10, 32 << 10));
        block.fill(1, usize::MAX);
        left = left.saturating_sub(block.size());
        blocks.push(block);
    }
    say("full\n");
    let stay = blocks.len() / 8;
    while blocks.len() > stay {
        drop(blocks.swap_remove(random.below(blocks.len())));
    }
    mem::forget(blocks);
}

fn wait(all_freed: &Receiver<()>) {
    all_freed.recv().expect("a thread that frees says so");
}

fn sleep_for_ever() {
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}
