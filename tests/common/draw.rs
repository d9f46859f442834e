//! Draws heaps for failure messages: `#` in use, `.` free, `_` free and scavenged.

use std::fmt::Write;

use pageheap::internals::{FreeSet, Shape, WORD_PAGES};

/// One row for each word; page 0 of the word on the left.
pub fn rows(first_word: usize, words: impl Iterator<Item = (u64, u64)>) -> String {
    let mut picture = String::new();
    for (offset, (free, scavenged)) in words.enumerate() {
        let _ = write!(picture, "  word {:>6}  ", first_word + offset);
        for bit in 0..WORD_PAGES {
            picture.push(match (free >> bit & 1, scavenged >> bit & 1) {
                (1, 0) => '.',
                (1, _) => '_',
                (_, 0) => '#',
                _ => '!',
            });
        }
        picture.push('\n');
    }
    picture
}

/// Words of bits, 1 = free.
pub fn words(free: &[u64]) -> String {
    rows(0, free.iter().map(|&word| (word, 0)))
}

/// The chunk that a page lies in and its neighbours, with the summaries above it.
pub fn around<G: Shape>(set: &FreeSet<G>, page: usize) -> String {
    let chunks = set.grown().div_ceil(G::CHUNK_PAGES);
    if chunks == 0 {
        return String::from("  an empty heap\n");
    }
    let chunk = (page >> G::CHUNK_SHIFT).min(chunks - 1);
    let mut picture = format!("  {} pages grown; around page {page}:\n", set.grown());
    let near = chunk.saturating_sub(1)..(chunk + 2).min(chunks);
    let first = near.start * G::CHUNK_WORDS;
    picture += &rows(first, (first..near.end * G::CHUNK_WORDS).map(|word| set.words(word)));
    for level in 0..G::LEVELS {
        let index = page.min(set.grown() - 1) >> G::span_shift(level);
        let _ = writeln!(
            picture,
            "  level {level}, entry {index}: {:?}",
            set.summary(level, index)
        );
    }
    picture
}
