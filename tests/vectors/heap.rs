//! A heap on which recorded steps are replayed.

use std::collections::BTreeMap;

use pageheap::internals::scavenge::{Limits, candidate};
use pageheap::internals::{Summary, Word, bitmap};
use pageheap::{Config, PageCount, PageHeap, PageIndex, PageRun};
use serde_json::Value;

use super::common::draw;
use super::index::Index;
use super::load::{index, list, size, sizes, text, word};
use super::primitives::cached;
use pageheap::source::Simulated;

/// log2 of the pages of an entry, from the root to the leaves.
const LOG_PAGES: [u32; 5] = [21, 18, 15, 12, 9];
const CHUNK: usize = 512;

/// A mapped part of the recorded heap. Our heap is one range, with holes as pages in use. A hole of more than 2^22
/// pages is shortened by a multiple of 2^21, so that every summary keeps its place in its block.
#[derive(Clone, Copy, Debug)]
struct Region {
    start: usize,
    pages: usize,
    left_out: usize,
}

/// The heap and the state of its replay.
#[derive(Debug)]
pub struct Replay {
    heap: PageHeap<Simulated>,
    regions: Vec<Region>,
    caches: [Word; 4],
    index: Index,
    /// Initial contents are set up to this recorded page.
    filled: usize,
    /// Steps replayed, by kind.
    pub steps: BTreeMap<String, usize>,
}

fn run(start: usize, pages: usize) -> PageRun {
    PageRun::new(PageIndex(start), PageCount(pages)).expect("a run")
}

/// Whether a heap with these mapped ranges has enough addresses: always, with 64-bit pointers.
pub fn fits(in_use: &Value) -> bool {
    regions(in_use).1 <= isize::MAX as usize >> 13
}

/// The ranges, and their pages including the holes between them.
fn regions(in_use: &Value) -> (Vec<Region>, usize) {
    let (mut end, mut left_out) = (0, 0);
    let mut regions = Vec::new();
    for [start, pages] in list(in_use).iter().map(sizes) {
        let hole = start - end;
        if hole > 1 << 22 {
            left_out += (hole - (1 << 22)) & !((1 << 21) - 1);
        }
        regions.push(Region { start, pages, left_out });
        end = start + pages;
    }
    (regions, end - left_out)
}

impl Replay {
    /// A heap with these ranges mapped and contents still to be filled in.
    pub fn new(in_use: &Value) -> Self {
        let (regions, pages) = regions(in_use);
        let config = Config::new(pages << 13).limit(PageCount(pages));
        let heap = PageHeap::new(Simulated::new(4096), config).expect("a heap");
        assert_eq!(heap.capacity(), PageCount(pages));
        heap.allocate_at(run(0, pages)).expect("the whole of it");
        let mut chunks = Index::new(pages.div_ceil(CHUNK));
        chunks.allocate(0, pages);
        Self {
            heap,
            regions,
            caches: [Word::default(); 4],
            index: chunks,
            filled: 0,
            steps: BTreeMap::new(),
        }
    }

    /// Our index of a recorded page.
    fn ours(&self, page: usize) -> usize {
        let region = self.regions.iter().rev().find(|region| region.start <= page);
        page - region.expect("a mapped page").left_out
    }

    /// The recorded index of one of our pages.
    fn theirs(&self, page: usize) -> usize {
        let region = self
            .regions
            .iter()
            .rev()
            .find(|region| region.start - region.left_out <= page);
        page + region.expect("a mapped page").left_out
    }

    // ---- initial contents -------------------------------------------------------------------------------------------

    /// Sets the initial contents of a run; called in ascending order.
    pub fn fill(&mut self, page: usize, pages: usize, used: bool, scavenged: bool) {
        self.fill_to(page);
        if !used {
            self.release(page, pages, scavenged);
        }
        self.filled = page + pages;
    }

    /// Pages that the recording does not name are free.
    pub fn fill_to(&mut self, end: usize) {
        for region in self.regions.clone() {
            let start = region.start.max(self.filled);
            let end = (region.start + region.pages).min(end);
            if start < end {
                self.release(start, end - start, false);
            }
        }
        self.filled = end;
    }

    fn release(&mut self, page: usize, pages: usize, scavenged: bool) {
        let start = self.ours(page);
        self.heap
            .free_set()
            .release_held(start, pages, scavenged)
            .expect("pages in use");
        self.index.free(start, pages);
    }

    // ---- steps ------------------------------------------------------------------------------------------------------

    /// Replays a step, and compares its result.
    pub fn step(&mut self, step: &Value) {
        let kind = text(&step[0]);
        match kind {
            "a" => self.allocate(step),
            "f" => self.free(step),
            "r" => self.refill(step),
            "c" => self.allocate_cached(step),
            "l" => self.flush(step),
            "s" => self.scavenge(step),
            "g" => self.index.next_generation(),
            "k" => self.checkpoint(step),
            _ => panic!("a step of an unknown kind: {step}"),
        }
        *self.steps.entry(kind.to_owned()).or_default() += 1;
    }

    fn compare<T: PartialEq + std::fmt::Debug>(&self, ours: T, theirs: T, step: &Value, page: Option<usize>) {
        if ours != theirs {
            let picture = draw::around(self.heap.free_set(), page.unwrap_or(0));
            let count: usize = self.steps.values().sum();
            panic!("step {count}, {step}: {ours:?}, recorded {theirs:?}\n{picture}");
        }
    }

    fn allocate(&mut self, step: &Value) {
        let pages = size(&step[1]);
        let allocation = self.heap.allocate_tracked(PageCount(pages));
        let found = allocation.map(|allocation| allocation.run.start().0);
        let theirs = index(&step[2]).map(|page| self.ours(page));
        let scavenged = allocation.map_or(0, |allocation| allocation.scavenged.0);
        self.compare((found, scavenged), (theirs, size(&step[3])), step, found.or(theirs));
        if let Some(page) = found {
            self.index.allocate(page, pages);
        }
    }

    fn free(&mut self, step: &Value) {
        let (page, pages) = (self.ours(size(&step[1])), size(&step[2]));
        // SAFETY: pages are numbers here.
        let freed = unsafe { self.heap.try_free(run(page, pages)) };
        self.compare(freed, Ok(()), step, Some(page));
        self.index.free(page, pages);
    }

    fn refill(&mut self, step: &Value) {
        let word = self.heap.free_set().claim_word();
        let page = word.map(|word| self.theirs(word.index * 64));
        let bits = word.map_or((0, 0), |word| (word.free, word.scavenged));
        let theirs = if step[1].is_array() {
            &list(&step[1])[..3]
        } else {
            &list(step)[2..5]
        };
        let [at, free, scavenged] = theirs else { unreachable!() };
        let theirs = (index(at), (self::word(free), self::word(scavenged)));
        self.compare((page, bits), theirs, step, page.or(theirs.0));
        let Some(word) = word else { return };
        // Counts as one allocation of that many pages.
        let pages = word.free.count_ones() as usize;
        self.index.allocate(word.index * 64, pages);
        if let Some(cache) = step[1].as_u64() {
            self.caches[cache as usize] = word;
        }
    }

    fn allocate_cached(&mut self, step: &Value) {
        let [cache, pages] = [size(&step[1]), size(&step[2])];
        let claim = self.caches[cache].take(pages);
        let page = claim.map(|claim| self.theirs(claim.start));
        let scavenged = claim.map_or(0, |claim| claim.scavenged);
        self.compare((page, scavenged), (index(&step[3]), size(&step[4])), step, page);
    }

    fn flush(&mut self, step: &Value) {
        let word = if step[1].is_array() {
            let word = cached(&step[1]);
            Word {
                index: self.ours(word.index * 64) / 64,
                ..word
            }
        } else {
            std::mem::take(&mut self.caches[size(&step[1])])
        };
        let flushed = self.heap.free_set().release_word(word);
        self.compare(flushed, Ok(()), step, Some(word.index * 64));
        (0..64)
            .filter(|bit| word.free >> bit & 1 == 1)
            .for_each(|bit| self.index.free(word.index * 64 + bit, 1));
    }

    /// Go's scavenging loop, with our choice of the candidate.
    fn scavenge(&mut self, step: &Value) {
        let wanted = index(&step[2]).unwrap_or(usize::MAX).div_ceil(8192);
        let (mut released, mut last) = (0, None);
        while released < wanted {
            let Some((chunk, from)) = self.index.find(size(&step[1]) == 1) else {
                break;
            };
            let (free, scavenged): (Vec<_>, Vec<_>) = self.chunk(chunk).unzip();
            let limits = Limits {
                least: 1,
                most: wanted - released,
                huge: 256,
            };
            let Some((page, pages)) = candidate(&free, &scavenged, from, limits) else {
                self.index.set_empty(chunk);
                continue;
            };
            let page = chunk * CHUNK + page;
            let set = self.heap.free_set();
            set.hold(page, pages).expect("a candidate is free");
            set.release_held(page, pages, true).expect("held pages");
            (released, last) = (released + pages, Some(page));
        }
        self.compare(released, size(&step[3]), step, last);
    }

    // ---- comparisons ------------------------------------------------------------------------------------------------

    /// The words of one of our chunks.
    fn chunk(&self, chunk: usize) -> impl Iterator<Item = (u64, u64)> {
        (chunk * 8..chunk * 8 + 8).map(|word| self.heap.free_set().words(word))
    }

    /// The words of all mapped chunks.
    fn words(&self) -> impl Iterator<Item = (u64, u64)> {
        let chunks = self.regions.iter().flat_map(|region| {
            let first = (region.start - region.left_out) / CHUNK;
            first..first + region.pages / CHUNK
        });
        chunks.flat_map(|chunk| self.chunk(chunk))
    }

    /// Checks the heap, once before claims are settled and once after.
    fn check(&self, context: &dyn std::fmt::Display) {
        let check = |when| {
            if let Err(fault) = self.heap.check() {
                panic!("{context}, {when} leaves are settled: {fault}");
            }
        };
        check("before");
        self.heap.free_set().settle();
        check("after");
    }

    fn checkpoint(&mut self, step: &Value) {
        self.check(step.get(1).expect("the step's number"));
        let hash = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x100_0000_01b3);
        let (mut pages, mut used, mut gone) = (0, 0xcbf2_9ce4_8422_2325, 0xcbf2_9ce4_8422_2325);
        for (free, scavenged) in self.words() {
            pages += free.count_ones() as usize;
            (used, gone) = (hash(used, !free), hash(gone, scavenged));
        }
        let short = Value::from(format!("checkpoint at {}", step[1]));
        self.compare(pages, size(&step[2]), &short, None);
        self.compare(used, word(&step[4]), &short, None);
        self.compare(gone, word(&step[5]), &short, None);
        self.summaries(&step[6], &short);
    }

    /// Compares summaries `[level, entry, start, max, end]`.
    pub fn summaries(&self, sums: &Value, context: &Value) {
        for [level, entry, start, max, end] in list(sums).iter().map(sizes) {
            let shift = LOG_PAGES[level];
            let region = self.regions.iter().find(|region| {
                let last = region.start + region.pages - 1;
                (region.start >> shift..=last >> shift).contains(&entry)
            });
            let left_out = region.expect("an entry of a mapped page").left_out;
            let entry = entry - (left_out >> shift);
            let says = self.heap.free_set().summary(level, entry);
            let theirs = Summary::new(start, max, end);
            self.compare(
                (level, entry, says),
                (level, entry, theirs),
                context,
                Some(entry << shift),
            );
        }
    }

    /// Compares the whole state with `{chunks, sums}`.
    pub fn compare_state(&self, state: &Value, context: &Value) {
        self.check(context);
        for chunk in list(&state["chunks"]) {
            let ranges = |value: &Value| {
                let mut words = [0; 8];
                for [start, pages] in list(value).iter().map(sizes) {
                    bitmap::set(&mut words, start, pages);
                }
                words
            };
            let first = self.ours(size(&chunk["c"]) * CHUNK);
            let (free, scavenged): (Vec<_>, Vec<_>) = self.chunk(first / CHUNK).unzip();
            let used = ranges(&chunk["alloc"]).map(|word| !word);
            self.compare(&free[..], &used[..], context, Some(first));
            self.compare(&scavenged[..], &ranges(&chunk["scav"])[..], context, Some(first));
        }
        self.summaries(&state["sums"], context);
    }
}
