//! Draws a heap as it fills, thins, falls silent and is used again: as text for the terminal, and as a film strip in
//! SVG.
//!
//! ```sh
//! cargo run --release --example heap_map              # text
//! cargo run --release --example heap_map film.svg     # and the film; docs/film.svg is one
//! ```
//!
//! The example itself releases no memory: the background thread does that, while the program sleeps.

use std::fmt::Write as _;
use std::time::Duration;
use std::{env, fs, thread};

use pageheap::{Film, GlobalHeap, Picture};

#[global_allocator]
static HEAP: GlobalHeap = GlobalHeap::new();

/// 32 pages of 8 KiB per cell.
const PICTURE: Picture = Picture::new(32, 72);

/// A generator of sufficiently random numbers: xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % end
    }
}

/// Blocks of many sizes, mostly small, `bytes` bytes in all.
fn fill(random: &mut Random, bytes: usize) -> Vec<Vec<u8>> {
    let mut blocks = Vec::new();
    let mut left = bytes;
    while left > 0 {
        let size = match random.below(100) {
            0..70 => 16 + random.below(600),
            70..97 => 1000 + random.below(20_000),
            _ => 40_000 + random.below(1_500_000),
        };
        blocks.push(vec![1; size]);
        left = left.saturating_sub(size);
    }
    blocks
}

/// Draws the heap now, in both forms.
fn shoot(film: &mut Film<'_, String>, what: &str) {
    let stats = HEAP.stats().pages;
    let mib = |pages: usize| (pages * stats.page_bytes) >> 20;
    let title = format!(
        "{what}: {} MiB in use, {} MiB free, {} MiB released",
        mib(stats.in_use.0),
        mib(stats.free.0.saturating_sub(stats.scavenged.0)),
        mib(stats.scavenged.0)
    );
    let mut text = String::with_capacity(1 << 14);
    PICTURE.text(HEAP.map(), &mut text).expect("a string takes all");
    println!("{title}\n{text}");
    film.frame(&title, HEAP.map()).expect("a string takes all");
}

fn main() {
    let mut random = Random(0x5eed);
    let mut svg = String::with_capacity(1 << 20);
    let pages = (176 << 20) / 8192;
    let mut film = Film::begin(PICTURE, 6, pages, &mut svg).expect("a string takes all");
    let mut blocks = fill(&mut random, 128 << 20);
    shoot(&mut film, "filled");
    // Blocks that were used together mostly die together: whole stretches go, and some of what is left.
    let mut number = 0;
    blocks.retain(|_| {
        number += 1;
        number / 800 % 5 == 0 || number % 97 == 0
    });
    shoot(&mut film, "thinned");
    thread::sleep(Duration::from_secs(2));
    shoot(&mut film, "after 2 s of silence");
    let more = fill(&mut random, 48 << 20);
    shoot(&mut film, "used again");
    drop(blocks);
    drop(more);
    shoot(&mut film, "dropped");
    thread::sleep(Duration::from_secs(2));
    shoot(&mut film, "after 2 s of silence");
    film.end().expect("a string takes all");
    if let Some(path) = env::args().nth(1) {
        fs::write(&path, &svg).expect("the film can be written");
        println!("{path}: {} KiB", svg.len() >> 10);
    } else {
        let mut words = String::new();
        write!(words, "{} KiB of SVG, for whoever names a file", svg.len() >> 10).expect("a string takes all");
        println!("{words}");
    }
}
