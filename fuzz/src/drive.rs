//! What fuzz targets do with their input: decode it, drive the subject and a naive twin side by side, and compare.
//!
//! One function for each target, listed in [`DRIVERS`]. Bytes are read one by one and are zero after the end, so every
//! input is valid and a truncated input is a shorter story. `tests/corpus.rs` runs the same functions over the kept
//! inputs with `cargo test`, without a fuzzer.

#[path = "../../tests/model/arenas.rs"]
pub mod arenas;
#[path = "../../tests/model/blocks.rs"]
pub mod blocks;
#[path = "../../tests/common/bytes.rs"]
mod bytes;
#[path = "../../tests/model/lists.rs"]
pub mod lists;
#[path = "../../tests/model/mod.rs"]
mod model;
#[path = "objects.rs"]
pub mod objects;

use model::{Options, Runner, decode};
use pageheap::internals::{Shape, Summary, WORD_PAGES, bitmap};
use pageheap::source::{Contents, Simulated};
use pageheap::{Config, Geometry, PageCount, PageHeap};

/// What a target calls with its input; it panics if subject and twin differ.
pub type Driver = fn(&[u8]);

/// Every driver, by the name of its target and its folder of the corpus; and how long its inputs may be. The fuzzer has
/// to be told (`-len_control=0 -max_len=`): by itself it begins with the length of the longest that is kept, and takes
/// long to go beyond. The length is what the driver reads, or, for arenas and pools, some hundred steps. `.ci/run fuzz`
/// finds the numbers here.
pub const DRIVERS: &[(&str, Driver, usize)] = &[
    ("summary", summary, 107),
    ("bitmap", bitmap, 185),
    ("radix", radix, 264),
    ("heap", heap, 264),
    ("arena", arenas::arena, 512),
    ("pool", arenas::pool, 512),
    ("free_list", lists::fuzz_free_list, 904),
    ("sharded", lists::fuzz_sharded, 904),
    ("global", objects::global, 601),
];

/// Where steps are counted, that many fit an input, behind what comes before the first.
const _: () = {
    let [_, _, radix, heap, _, _, free_list, sharded, global] = DRIVERS else {
        panic!("another driver");
    };
    assert!(radix.2 == 8 + 4 * MOST_STEPS && heap.2 == radix.2);
    assert!(free_list.2 == 4 + 3 * lists::MOST_STEPS && sharded.2 == free_list.2);
    assert!(global.2 == 1 + 4 * objects::MOST_STEPS);
};

/// The input bytes, read one after another; zero after the end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> usize {
        let Some((&first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        usize::from(first)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.byte() << 8 | self.byte()) % end
    }

    /// A word of the bitmap: mostly full, empty or in a few runs, as in heaps, sometimes noise.
    fn word(&mut self) -> u64 {
        let (start, pages) = (self.below(WORD_PAGES), 1 + self.below(WORD_PAGES));
        let run = u64::MAX >> (WORD_PAGES - pages.min(WORD_PAGES - start)) << start;
        match self.byte() % 6 {
            0 => 0,
            1 => u64::MAX,
            2 => run,
            3 => !run,
            4 => run ^ run >> 3,
            _ => (0..8).fold(0, |word, _| word << 8 | self.byte() as u64),
        }
    }
}

/// `start`, `max` and `end`, counted page by page.
fn fields(pages: &[bool]) -> (usize, usize, usize) {
    let run = |pages: &mut dyn Iterator<Item = &bool>| pages.take_while(|&&free| free).count();
    let max = (0..pages.len()).map(|first| run(&mut pages[first..].iter())).max();
    (run(&mut pages.iter()), max.unwrap_or(0), run(&mut pages.iter().rev()))
}

fn naive(pages: &[bool], scale: usize) -> Summary {
    let (start, max, end) = fields(pages);
    Summary::new(start * scale, max * scale, end * scale)
}

/// Summaries of regions, merged, compared with counting. Each bit of a word stands for `1 << zoom` pages, so that
/// regions reach 2^21 pages, where the packing changes its form.
pub fn summary(input: &[u8]) {
    let mut bytes = Bytes(input);
    let (parts, bits) = (1_usize << (bytes.byte() % 4), 1_usize << (bytes.byte() % 7));
    let zoom = bytes.byte() % 16;
    let scale = 1_usize << zoom;
    if (parts * bits) << zoom > 1 << 21 {
        return;
    }
    let shift = (bits << zoom).trailing_zeros();
    let pages: Vec<bool> = (0..parts)
        .flat_map(|_| {
            let word = bytes.word();
            (0..bits).map(move |bit| word >> bit & 1 == 1)
        })
        .collect();
    let children: Vec<Summary> = pages.chunks(bits).map(|part| naive(part, scale)).collect();
    for (child, part) in children.iter().zip(pages.chunks(bits)) {
        let (start, max, end) = fields(part);
        assert_eq!(
            (child.start(), child.max(), child.end()),
            (start * scale, max * scale, end * scale)
        );
        assert_eq!(Summary::from_bits(child.to_bits()), *child);
        assert_eq!(child.to_bits() == 0, max == 0, "zero is nothing free, and nothing else");
    }
    let whole = naive(&pages, scale);
    assert_eq!(
        Summary::merge(children.iter().copied(), shift),
        whole,
        "merge of {children:?}"
    );
    let words: Vec<u64> = children.iter().map(|child| child.to_bits()).collect();
    assert_eq!(Summary::merge_block(&words, shift), whole, "merge of {children:?}");
    if let [first, second, ..] = children[..] {
        assert_eq!(first.then(shift, second, shift), naive(&pages[..2 * bits], scale));
    }
    // A pair and its neighbour, twice the size; a pair and one more.
    if let [a, b, c, d, ..] = children[..] {
        let (left, right) = (a.then(shift, b, shift), c.then(shift, d, shift));
        assert_eq!(left.then(shift + 1, right, shift + 1), naive(&pages[..4 * bits], scale));
        assert_eq!(left.then(shift + 1, c, shift), naive(&pages[..3 * bits], scale));
    }
    for (a, b) in children.iter().flat_map(|a| children.iter().map(move |b| (a, b))) {
        let covers = a.start() >= b.start() && a.max() >= b.max() && a.end() >= b.end();
        assert_eq!(a.covers(*b), covers, "{a:?} covers {b:?}");
    }
}

/// The sequential side of the bitmap, compared with a row of booleans.
pub fn bitmap(input: &[u8]) {
    let mut bytes = Bytes(input);
    let mut words: Vec<u64> = (0..1 + bytes.byte() % 8).map(|_| bytes.word()).collect();
    let mut pages: Vec<bool> = words
        .iter()
        .flat_map(|word| (0..64).map(move |bit| word >> bit & 1 == 1))
        .collect();
    let len = pages.len();
    for _ in 0..16 {
        let from = bytes.below(len);
        let count = 1 + bytes.below(len - from);
        match bytes.byte() % 4 {
            0 => {
                bitmap::set(&mut words, from, count);
                pages[from..from + count].fill(true);
            }
            1 => {
                bitmap::clear(&mut words, from, count);
                pages[from..from + count].fill(false);
            }
            _ => {}
        }
        compare(&words, &pages, from, count);
        if bytes.0.is_empty() {
            return;
        }
    }
}

fn compare(words: &[u64], pages: &[bool], from: usize, count: usize) {
    let free = |run: &[bool]| run.iter().all(|&free| free);
    let first = (from..)
        .take_while(|first| first + count <= pages.len())
        .find(|&first| free(&pages[first..first + count]));
    assert_eq!(
        bitmap::find(words, count, from),
        first,
        "{count} pages from {from} in {words:x?}"
    );
    let (start, max, end) = fields(pages);
    assert_eq!(bitmap::summarize(words), Summary::new(start, max, end), "{words:x?}");
    let counted = pages[from..from + count].iter().filter(|&&free| free).count();
    assert_eq!(
        bitmap::count(words, from, count),
        counted,
        "{count} pages from {from} in {words:x?}"
    );
    let before = pages[..from].iter().rev().take_while(|&&free| free).count();
    assert_eq!(bitmap::free_before(words, from), before, "page {from} of {words:x?}");
    let behind = pages[from..].iter().take_while(|&&free| free).count();
    assert_eq!(bitmap::free_behind(words, from), behind, "page {from} of {words:x?}");
    let wanted = 1 + (count - 1) % WORD_PAGES;
    for (&word, bits) in words.iter().zip(pages.chunks(WORD_PAGES)) {
        let first = (0..=WORD_PAGES - wanted).find(|&first| free(&bits[first..first + wanted]));
        assert_eq!(bitmap::find_in_word(word, wanted), first, "{wanted} pages in {word:x}");
    }
    let mut page = from;
    for piece in bitmap::Pieces::new(from, count) {
        let pages = piece.mask.count_ones() as usize;
        assert_eq!(piece.mask, bitmap::mask(page % WORD_PAGES, pages));
        assert_eq!(piece.word, page / WORD_PAGES);
        page += pages;
    }
    assert_eq!(page, from + count);
}

/// Where heaps begin, up to a few pages: as in `Simulated`, 2^44 with 64-bit pointers.
const BASE: usize = 1 << (usize::BITS / 16 * 11);

/// Sets up a heap from the first bytes of an input.
fn side_by_side<G: Shape>(bytes: &mut Bytes<'_>, most_pages: usize, most_slots: usize) {
    let granule = [4096, 4096, 16384, 65536][bytes.byte() % 4];
    let pages = 1 + bytes.below(most_pages);
    let limit = bytes.below(2 * pages);
    let unit = granule.max(G::PAGE_BYTES);
    let base = BASE + bytes.byte() % 70 * unit;
    let flags = bytes.byte();
    let options = Options {
        zero: flags & 1 == 1,
        shards: (flags >> 1) % (most_slots + 1),
        caches: (flags >> 4) % (most_slots + 1),
    };
    let contents = if options.zero {
        Contents::Zero
    } else {
        Contents::Unknown
    };
    let source = Simulated::new(granule).with_base(base).with_contents(contents);
    let mut config = Config::new(pages << G::PAGE_SHIFT)
        .shards(options.shards)
        .caches(options.caches);
    if limit < pages {
        config = config.limit(PageCount(1 + limit));
    }
    let heap: PageHeap<&Simulated, G> = PageHeap::with_shape(&source, config).expect("a heap of one page at least");
    let mut runner = Runner::new(&heap, options);
    runner.run(&decode(&bytes.0[..bytes.0.len().min(4 * MOST_STEPS)]));
    runner.finish();
    drop(runner);
    drop(heap);
    source.assert_all_returned();
}

/// The most steps of one input: each step compares every page.
const MOST_STEPS: usize = 64;

/// The free set by itself, in small shapes, where a few pages reach every level: claims, releases, searches, hints.
pub fn radix(input: &[u8]) {
    let mut bytes = Bytes(input);
    match bytes.byte() % 4 {
        0 => side_by_side::<Geometry<1, 12, 2, 1>>(&mut bytes, 500, 0),
        1 => side_by_side::<Geometry<3, 12, 2, 1>>(&mut bytes, 700, 0),
        2 => side_by_side::<Geometry<5, 12, 2, 1>>(&mut bytes, 2500, 0),
        _ => side_by_side::<Geometry<4, 12, 4, 2>>(&mut bytes, 2500, 0),
    }
}

/// Heaps with caches and shards, in the shapes that programs use.
pub fn heap(input: &[u8]) {
    let mut bytes = Bytes(input);
    match bytes.byte() % 4 {
        0 => side_by_side::<Geometry<5, 12>>(&mut bytes, 5000, 3),
        1 => side_by_side::<Geometry<1>>(&mut bytes, 3000, 3),
        2 => side_by_side::<Geometry<2, 16, 8, 1>>(&mut bytes, 1000, 3),
        _ => side_by_side::<Geometry>(&mut bytes, 5000, 3),
    }
}
