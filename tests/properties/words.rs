//! Bits and summaries, checked by counting.

use proptest::prelude::*;

use pageheap::internals::scavenge::{Limits, candidate, fill_aligned};
use pageheap::internals::{Band, HINT_PAGES, MAX_CHUNK_WORDS, Marks, Request, Summary, Word, bitmap};
use pageheap::source::Simulated;
use pageheap::{Config, PageCount, PageHeap, PageIndex, PageRun};

use super::cases;
use super::common::draw;
use super::model::naive;

/// Words that tend to break bit tricks: random, sparse, dense, with long runs, empty, full.
fn word() -> impl Strategy<Value = u64> {
    let run = (0..64_u32, 1..=64_u32).prop_map(|(low, len)| (u64::MAX >> (64 - len)) << low);
    prop_oneof![
        any::<u64>(),
        (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(a, b, c)| a & b & c),
        (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(a, b, c)| a | b | c),
        run.clone(),
        run.prop_map(|word| !word),
        (0..64_u32).prop_map(|bit| !(1 << bit)),
        (0..64_u32, 0..64_u32).prop_map(|(a, b)| 1 << a | 1 << b),
        Just(0),
        Just(u64::MAX),
        Just(0x5555_5555_5555_5555),
    ]
}

/// A chunk of 1, 2, 4 or 8 words.
fn chunk() -> impl Strategy<Value = Vec<u64>> {
    let words = prop_oneof![Just(1_usize), Just(2), Just(4), Just(8)];
    words.prop_flat_map(|words| proptest::collection::vec(word(), words))
}

/// One flag per bit.
fn flags(words: &[u64]) -> Vec<bool> {
    (0..words.len() * 64)
        .map(|page| words[page / 64] >> (page % 64) & 1 == 1)
        .collect()
}

fn summary((start, max, end): naive::Triple) -> Summary {
    Summary::new(start, max, end)
}

fn first_fit(flags: &[bool], count: usize, from: usize) -> Option<usize> {
    (from..(flags.len() + 1).saturating_sub(count)).find(|&start| flags[start..start + count].iter().all(|&free| free))
}

/// What `bitmap::scan` should return; looks at every run anew.
fn naive_scan(flags: &[bool], count: usize, from: usize) -> bitmap::Scan {
    let exactly = |flags: &[bool]| summary(naive::summarize(flags.iter().copied()));
    let Some(first) = first_fit(flags, count, from) else {
        return bitmap::Scan::Nothing(exactly(flags));
    };
    let mut left = flags.to_vec();
    left[first..first + count].fill(false);
    match first_fit(&left, count, from) {
        Some(_) => bitmap::Scan::First(first),
        None => bitmap::Scan::Last(first, exactly(&left)),
    }
}

/// `1 << shift` pages, free or not, in runs.
fn region(shift: u32) -> impl Strategy<Value = Vec<bool>> {
    let cuts = proptest::collection::vec((0..=1_usize << shift, any::<bool>()), 0..6);
    (any::<bool>(), cuts).prop_map(move |(first, mut cuts)| {
        cuts.sort_unstable();
        let mut flags = vec![first; 1 << shift];
        for (from, free) in cuts {
            flags[from..].fill(free);
        }
        flags
    })
}

/// A possible summary of a region of `1 << shift` pages.
fn region_summary(shift: u32) -> impl Strategy<Value = Summary> {
    let pages = 1_usize << shift;
    let mixed = (0..pages, 0..pages, any::<proptest::sample::Index>()).prop_map(move |(start, end, inner)| {
        let end = end.min(pages - 1 - start);
        let between = pages.saturating_sub(start + end + 2);
        Summary::new(start, start.max(end).max(inner.index(between + 1)), end)
    });
    prop_oneof![2 => Just(Summary::free(pages)), 1 => Just(Summary::NONE), 5 => mixed]
}

/// Joins two neighbours by the definition, with plain numbers.
fn join(left: (Summary, usize), right: (Summary, usize)) -> Summary {
    let ((a, a_pages), (b, b_pages)) = (left, right);
    let start = if a.start() == a_pages {
        a_pages + b.start()
    } else {
        a.start()
    };
    let end = if b.end() == b_pages { b_pages + a.end() } else { b.end() };
    Summary::new(start, a.max().max(b.max()).max(a.end() + b.start()), end)
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn summarize_counts(words in chunk()) {
        let expected = summary(naive::summarize(flags(&words).into_iter()));
        prop_assert_eq!(bitmap::summarize(&words), expected, "\n{}", draw::words(&words));
    }

    #[test]
    fn find_is_first_fit(words in chunk(), count in 1..=520_usize, short in any::<bool>(), from in 0..512_usize) {
        let flags = flags(&words);
        let count = if short { 1 + count % 20 } else { count };
        let from = from % flags.len();
        prop_assert_eq!(bitmap::find(&words, count, from), first_fit(&flags, count, from),
            "{} from {}\n{}", count, from, draw::words(&words));
    }

    #[test]
    fn starts_are_where_runs_begin(words in chunk(), count in 1..=600_usize, short in any::<bool>()) {
        let flags = flags(&words);
        let count = if short { 1 + count % 20 } else { count };
        let mut block = [0; MAX_CHUNK_WORDS];
        block[..words.len()].copy_from_slice(&words);
        let starts = bitmap::starts(&block, count);
        for page in 0..MAX_CHUNK_WORDS * 64 {
            prop_assert_eq!(starts[page / 64] >> (page % 64) & 1 == 1, first_fit(&flags, count, page) == Some(page),
                "{} at {}\n{}", count, page, draw::words(&words));
        }
    }

    #[test]
    fn the_lowest_aligned_bit(words in chunk(), from in 0..512_usize, shift in 0..=12_u32, first in any::<usize>()) {
        let mut block = [0; MAX_CHUNK_WORDS];
        block[..words.len()].copy_from_slice(&words);
        let (flags, align) = (flags(&block), 1 << shift);
        let first = first % align;
        let expected = (from..512).find(|&page| flags[page] && page % align == first);
        prop_assert_eq!(bitmap::lowest_aligned(&block, from, align, first), expected,
            "from {}, {} and every {}\n{}", from, first, align, draw::words(&words));
    }

    #[test]
    fn scan_finds_and_sums(words in chunk(), count in 1..=520_usize, short in any::<bool>(), from in 0..512_usize) {
        let flags = flags(&words);
        let count = if short { 1 + count % 20 } else { count };
        let from = from % flags.len();
        let (scan, expected) = (bitmap::scan(&words, count, from), naive_scan(&flags, count, from));
        let runs = (0..flags.len()).filter(|&page| flags[page] && (page == 0 || !flags[page - 1])).count();
        // If there are many runs, `scan` may stop as soon as it knows where the first one is, or give up.
        let early = match expected {
            bitmap::Scan::Last(first, _) => scan == bitmap::Scan::First(first) || scan == bitmap::Scan::Torn,
            _ => scan == bitmap::Scan::Torn,
        };
        prop_assert!(scan == expected || runs > bitmap::SCAN_RUNS && early,
            "{} from {}: {:?}, not {:?}\n{}", count, from, scan, expected, draw::words(&words));
    }

    #[test]
    fn find_in_word_is_first_fit(word in word(), count in 1..=64_usize) {
        prop_assert_eq!(bitmap::find_in_word(word, count), first_fit(&flags(&[word]), count, 0));
    }

    #[test]
    fn free_before_and_behind_count(words in chunk(), page in 0..=512_usize) {
        let pages = flags(&words);
        let page = page % (pages.len() + 1);
        let before = pages[..page].iter().rev().take_while(|free| **free).count();
        prop_assert_eq!(bitmap::free_before(&words, page), before, "page {}\n{}", page, draw::words(&words));
        let behind = pages[page..].iter().take_while(|free| **free).count();
        prop_assert_eq!(bitmap::free_behind(&words, page), behind, "page {}\n{}", page, draw::words(&words));
    }

    #[test]
    fn ranges_of_bits(words in chunk(), from in 0..512_usize, count in 0..=512_usize) {
        let mut flags = flags(&words);
        let from = from % flags.len();
        let count = count % (flags.len() - from + 1);
        let free = flags[from..from + count].iter().filter(|&&free| free).count();
        prop_assert_eq!(bitmap::count(&words, from, count), free);
        for value in [true, false] {
            let mut changed = words.clone();
            let change = if value { bitmap::set } else { bitmap::clear };
            change(&mut changed, from, count);
            flags[from..from + count].fill(value);
            prop_assert_eq!(&super::words::flags(&changed), &flags);
            flags = super::words::flags(&words);
        }
    }

    #[test]
    fn pieces_are_the_run(start in 0..10_000_usize, pages in 1..2000_usize) {
        let mut next = start;
        for piece in bitmap::Pieces::new(start, pages) {
            prop_assert_eq!(piece.word, next / 64);
            prop_assert_eq!(piece.mask.trailing_zeros() as usize, next % 64);
            let ones = piece.mask.count_ones() as usize;
            prop_assert_eq!(piece.mask, bitmap::mask(next % 64, ones));
            next += ones;
        }
        prop_assert_eq!(next, start + pages);
    }

    #[test]
    fn word_takes_the_lowest_run(free in word(), scavenged in word(), count in 1..=64_usize, index in 0..1000_usize) {
        let before = Word { index, free, scavenged: free & scavenged };
        let mut after = before;
        let claim = after.take(count);
        let bit = first_fit(&flags(&[free]), count, 0);
        let mask = bit.map_or(0, |bit| bitmap::mask(bit, count));
        prop_assert_eq!(claim.map(|claim| claim.start), bit.map(|bit| index * 64 + bit));
        prop_assert_eq!(claim.map_or(0, |claim| claim.scavenged), (before.scavenged & mask).count_ones() as usize);
        prop_assert_eq!((after.free, after.scavenged), (free & !mask, before.scavenged & !mask));
    }

    #[test]
    fn marks_taken_with_a_run_are_counted(
        runs in proptest::collection::vec((1..200_usize, any::<bool>()), 1..10),
        first in any::<proptest::sample::Index>(), len in any::<proptest::sample::Index>(),
    ) {
        let gone: Vec<_> = runs.iter().flat_map(|&(pages, gone)| vec![gone; pages]).collect();
        let heap = PageHeap::new(Simulated::new(4096), Config::new(gone.len() << 13)).expect("a heap");
        heap.allocate(PageCount(gone.len())).expect("an empty heap");
        let (set, mut page) = (heap.free_set(), 0);
        for (pages, gone) in runs {
            set.release_held(page, pages, gone).expect("in use");
            page += pages;
        }
        let start = first.index(page);
        let pages = 1 + len.index(page - start);
        set.hold(start, pages).expect("free");
        let taken = &gone[start..start + pages];
        let marks = Marks {
            count: taken.iter().filter(|&&gone| gone).count(),
            last: taken.iter().rev().take_while(|&&gone| gone).count(),
        };
        prop_assert_eq!(set.take_scavenged(start, pages), marks);
        let all = gone.iter().filter(|&&gone| gone).count();
        prop_assert_eq!(set.scavenged_in(0, page), all - marks.count);
    }

    #[test]
    fn fill_aligned_fills_groups(bits in word(), shift in 0..=6_u32) {
        let group = 1_usize << shift;
        let flags = flags(&[bits]);
        let filled = (0..64).filter(|bit| flags[bit / group * group..][..group].contains(&true));
        prop_assert_eq!(fill_aligned(bits, group), filled.fold(0, |word, bit| word | 1 << bit));
    }

    #[test]
    fn candidate_is_the_highest(
        free in chunk(), scavenged in proptest::collection::vec(word(), 8), from in 0..512_usize,
        shift in 0..=9_u32, most in 0..600_usize, huge in 0..=9_u32,
    ) {
        let scavenged: Vec<_> = free.iter().zip(&scavenged).map(|(free, scavenged)| free & scavenged).collect();
        let pages = free.len() * 64;
        let (least, huge) = (1 << shift.min(pages.trailing_zeros()), 1 << huge.min(pages.trailing_zeros()));
        let limits = Limits { least, most, huge };
        // For groups of several words, the search begins at the end of a group.
        let from = if least > 64 { (from % pages) | (least - 1) } else { from % pages };
        let idle: Vec<_> = flags(&free).into_iter().zip(flags(&scavenged)).map(|(free, gone)| free && !gone).collect();
        let group = |page: usize| idle[page / least * least..][..least].iter().all(|&idle| idle);
        let end = (0..from / 64 * 64 + 64).rev().find(|&page| group(page)).map(|page| page + 1);
        let expected = end.map(|end| {
            let run = (0..end).rev().take_while(|&page| group(page)).count();
            let most = most.div_ceil(least).max(1) * least;
            let start = end - run.min(most);
            // The huge page that `start` would split, if it is idle up to `end`.
            let whole = start / huge * huge;
            let cut = start.div_ceil(huge) * huge <= end && whole >= end - run;
            let start = if cut { whole } else { start };
            (start, end - start)
        });
        let rows = free.iter().copied().zip(scavenged.iter().copied());
        prop_assert_eq!(candidate(&free, &scavenged, from, limits), expected,
            "from {}, {:?}\n{}", from, limits, draw::rows(0, rows));
    }

    #[test]
    fn bands_are_the_longest_not_longer(count in 1..1000_usize) {
        let longest = HINT_PAGES.iter().copied().filter(|&pages| pages <= count).max();
        prop_assert_eq!(Some(Band::of(count).pages()), longest);
    }

    #[test]
    fn requests_align(page in 0..100_000_usize, shift in 0..20_u32, phase in any::<usize>()) {
        let align = 1_usize << shift;
        let request = Request { pages: 1, align, phase: phase & (align - 1) };
        let expected = (page..=page + align).find(|page| (page + request.phase).is_multiple_of(align));
        prop_assert_eq!(request.align_page(page), expected);
    }

    #[test]
    fn runs_split(start in 0..usize::MAX, pages in any::<usize>(), head in any::<usize>()) {
        let run = PageRun::new(PageIndex(start), PageCount(pages));
        prop_assert_eq!(run.is_some(), pages > 0 && start.checked_add(pages).is_some());
        let Some(run) = run else { return Ok(()) };
        let head = head % (pages.saturating_add(2));
        let Some((low, high)) = run.split_at(PageCount(head)) else {
            prop_assert!(head == 0 || head >= pages);
            return Ok(());
        };
        prop_assert_eq!((low.start(), low.pages(), low.end()), (run.start(), PageCount(head), high.start()));
        prop_assert_eq!((high.end(), high.pages()), (run.end(), PageCount(pages - head)));
        prop_assert!(run.contains(low.start()) && run.contains(high.start()) && !run.contains(run.end()));
        prop_assert!(!low.contains(high.start()) && !high.contains(low.start()));
    }

    #[test]
    fn summaries_pack(summary in region_summary(21)) {
        let again = Summary::from_bits(summary.to_bits());
        prop_assert_eq!((again.start(), again.max(), again.end()), (summary.start(), summary.max(), summary.end()));
    }
}

proptest! {
    #![proptest_config(cases(100))]

    /// Merging regions of one size equals counting them as one region.
    #[test]
    fn merge_counts(shift in 6..10_u32, regions in proptest::collection::vec(region(9), 1..9)) {
        let regions: Vec<_> = regions.iter().map(|region| &region[..1 << shift]).collect();
        let children: Vec<_> = regions.iter().map(|region| summary(naive::summarize(region.iter().copied()))).collect();
        let expected = summary(naive::summarize(regions.iter().flat_map(|region| region.iter().copied())));
        prop_assert_eq!(merged(&children, shift), expected);
    }

    /// The same for two regions of different sizes.
    #[test]
    fn then_counts(left in (0..12_u32).prop_flat_map(region), right in (0..12_u32).prop_flat_map(region)) {
        let (a, b) = (naive::summarize(left.iter().copied()), naive::summarize(right.iter().copied()));
        let expected = summary(naive::summarize(left.iter().chain(&right).copied()));
        let (left, right) = (left.len().trailing_zeros(), right.len().trailing_zeros());
        prop_assert_eq!(summary(a).then(left, summary(b), right), expected);
    }
}

proptest! {
    #![proptest_config(cases(300))]

    /// Up to 2^21 pages, where "all free" has its own encoding.
    #[test]
    fn merge_joins_up_to_the_most(
        (shift, children) in (15..=18_u32).prop_flat_map(|shift| {
            (Just(shift), proptest::collection::vec(region_summary(shift), 1..=(1_usize << (21 - shift)).min(8)))
        }),
    ) {
        let joined = children.iter().skip(1).enumerate().fold(children[0], |all, (before, &next)| {
            join((all, (before + 1) << shift), (next, 1 << shift))
        });
        prop_assert_eq!(merged(&children, shift), joined);
    }

    #[test]
    fn then_joins_up_to_the_most(a in region_summary(20), b in region_summary(20)) {
        prop_assert_eq!(a.then(20, b, 20), join((a, 1 << 20), (b, 1 << 20)));
        if a == Summary::free(1 << 20) && b == a {
            prop_assert_eq!(a.then(20, b, 20).to_bits(), 1 << 63);
        }
    }

    #[test]
    fn part_has_and_ends_as_the_fields_say(
        region in region_summary(18), before in 0..1_usize << 20, count in 1..=1_usize << 19
    ) {
        prop_assert_eq!(region.part_has(before, count), region.max() >= count || before + region.start() >= count);
        for exact in [region.max(), region.max() + 1, before + region.start(), before + region.start() + 1] {
            let has = region.max() >= exact || before + region.start() >= exact;
            prop_assert_eq!(region.part_has(before, exact), has);
        }
        prop_assert_eq!(region.part_end(), region.end());
    }

    #[test]
    fn covers_compares_fields(a in region_summary(9), b in region_summary(9)) {
        let each = a.start() >= b.start() && a.max() >= b.max() && a.end() >= b.end();
        prop_assert_eq!(a.covers(b), each);
    }
}

/// Merges in both available ways.
fn merged(children: &[Summary], shift: u32) -> Summary {
    let words: Vec<u64> = children.iter().map(|child| child.to_bits()).collect();
    let merged = Summary::merge(children.iter().copied(), shift);
    assert_eq!(
        Summary::merge_block(&words, shift),
        merged,
        "{children:?} of 2^{shift} pages"
    );
    merged
}

/// No children give nothing; eight free ones of 2^18 pages give everything.
#[test]
fn merge_at_its_ends() {
    assert_eq!(merged(&[], 9), Summary::NONE);
    let all = merged(&[Summary::free(1 << 18); 8], 18);
    assert_eq!(all.to_bits(), 1 << 63);
    assert_eq!((all.start(), all.max(), all.end()), (1 << 21, 1 << 21, 1 << 21));
    assert_eq!(format!("{all:?}"), "(2097152, 2097152, 2097152)");
}
