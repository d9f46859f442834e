//! An inner node that promises too much over correct leaves (after a correction has overtaken a raise) was never
//! corrected if the promise was of a run that straddles entries, or if the search ended inside the block. And what a
//! search for an alignment steps over.

use std::alloc::{Layout, alloc_zeroed};
use std::ptr::NonNull;

use pageheap::Geometry;
use pageheap::internals::bitmap::Bitmap;
use pageheap::internals::{AtomicU64, FreeSet, Request, Summary, Table, Tree, Zeroed};

type G = Geometry;

fn memory(entries: usize) -> NonNull<u8> {
    // SAFETY: the layout has a size.
    NonNull::new(unsafe { alloc_zeroed(Layout::from_size_align(entries * 8, 64).unwrap()) }).unwrap()
}

fn table<T: Zeroed>(base: NonNull<u8>, entries: usize) -> Table<T> {
    // SAFETY: zeroed, aligned, leaked.
    unsafe { Table::new(base, entries) }
}

/// A set of `pages` pages, all free, and the tables of its levels.
fn set(pages: usize) -> (FreeSet<G>, [NonNull<u8>; 5]) {
    let words = pages.div_ceil(512) * 8;
    let bases: [NonNull<u8>; 5] = std::array::from_fn(|level| memory(Tree::<G>::entries(level, pages).max(1)));
    let levels = std::array::from_fn(|level| table(bases[level], Tree::<G>::entries(level, pages)));
    let set = FreeSet::new(
        Bitmap::new(table(memory(words), words)),
        Bitmap::new(table(memory(words), words)),
        Tree::new(levels),
    );
    set.extend(pages, false);
    (set, bases)
}

fn poke(bases: &[NonNull<u8>; 5], level: usize, index: usize, summary: Summary) {
    // SAFETY: an entry of the table.
    unsafe { bases[level].cast::<AtomicU64>().add(index).as_ref() }
        .store(summary.to_bits(), std::sync::atomic::Ordering::Relaxed);
}

#[test]
fn a_broken_promise_of_a_straddling_run_is_corrected() {
    let (set, bases) = set(16 * 512);
    // All pages are taken except the last 100 of the first block of chunks.
    set.claim_at(0, 16 * 512).unwrap();
    set.release(8 * 512 - 100, 100).unwrap();
    set.settle();
    set.check().unwrap();
    // The second block claims to begin with 400 free pages. It has none, and its leaves say so.
    poke(&bases, 3, 1, Summary::new(400, 400, 0));
    assert!(set.claim(&Request::of(200)).is_none());
    assert!(set.claim(&Request::of(200)).is_none());
    assert_eq!(
        set.summary(3, 1),
        Summary::NONE,
        "still promises, and trips every search"
    );
}

#[test]
fn a_broken_promise_of_the_last_block_is_corrected() {
    // The heap ends inside the second block of chunks.
    let (set, bases) = set(12 * 512);
    set.claim_at(0, 12 * 512).unwrap();
    set.settle();
    poke(&bases, 3, 1, Summary::new(0, 400, 0));
    assert!(set.claim(&Request::of(200)).is_none());
    assert!(set.claim(&Request::of(200)).is_none());
    assert_eq!(set.summary(3, 1), Summary::NONE, "still promises");
}

/// Blocks shorter than their alignment leave a gap behind each. A search for one more went from gap to gap, so that the
/// time it took grew with the number of blocks. A gap that reaches from one chunk into the next is looked at by itself.
#[test]
fn gaps_between_aligned_blocks_are_not_tried_one_by_one() {
    const CHUNKS: usize = 32;
    for (pages, align, phase) in [(1, 2, 0), (4, 8, 0), (3, 8, 7), (20, 64, 12), (100, 256, 100)] {
        let (set, _) = set(CHUNKS * 512);
        let request = Request { pages, align, phase };
        let mut blocks = 0;
        while set.claim(&request).is_some() {
            blocks += 1;
        }
        assert!(blocks >= (CHUNKS * 512 - 256) / align, "{request:?}: {blocks}");
        let (tries, _) = set.effort(&request);
        assert!(tries <= CHUNKS, "{request:?}: {tries} tries, {blocks} gaps");
        set.check().unwrap();
    }
}

/// A search that passes over what is not aligned changes nothing: no summary has told a lie.
#[test]
fn what_is_not_aligned_breaks_no_promise() {
    let (set, _) = set(32 * 512);
    let request = Request {
        pages: 5,
        align: 8,
        phase: 0,
    };
    set.claim_at(0, 32 * 512).unwrap();
    // Runs of five pages that are not aligned: within each chunk, and from every second one into the next.
    for chunk in 0..32 {
        set.release(512 * chunk + 17, 5).unwrap();
        if chunk % 2 == 1 {
            set.release(512 * chunk - 2, 5).unwrap();
        }
    }
    set.settle();
    assert_eq!(set.effort(&request).1, 0);
    assert_eq!(set.claim(&request), None);
    set.claim_at(512 * 31 - 2, 5).unwrap();
    set.release(512 * 31 - 8, 5).unwrap();
    assert_eq!(set.claim(&request).map(|claim| claim.start), Some(512 * 31 - 8));
    set.check().unwrap();
}

/// A cache that takes a chunk's last word takes the next one from the chunk behind: nobody corrected the leaf. A heap
/// that caches had filled left a lie in each chunk for the first longer run to find.
#[test]
fn caches_leave_no_lies_behind_for_a_longer_run() {
    const CHUNKS: usize = 64;
    let (set, _) = set(CHUNKS * 512);
    (1..CHUNKS).for_each(|_| (0..8).for_each(|_| assert!(set.claim_word().is_some())));
    let before = set.passes();
    let found = set.claim(&Request::of(300)).map(|claim| claim.start);
    assert_eq!(found, Some((CHUNKS - 1) * 512));
    // The nodes above wait for a search that believes them.
    let passes = set.passes() - before;
    assert!(passes <= CHUNKS as u32 / 4, "{passes} passes, {CHUNKS} chunks");
    set.check().unwrap();
}

/// A search for a word passed over what an inner node had promised in vain, and did not correct it: so all later ones
/// did the same, in each block of a heap that caches had filled.
#[test]
fn a_search_for_a_word_corrects_what_it_believed_in_vain() {
    const BLOCKS: usize = 64;
    let (set, _) = set(BLOCKS * 8 * 512);
    (0..BLOCKS * 64).for_each(|_| assert!(set.claim_word().is_some()));
    assert_ne!(set.summary(3, BLOCKS - 1), Summary::NONE, "claims are lazy");
    assert!(set.claim_word().is_none());
    // It begins below the first nodes, and so does not believe them.
    for (level, index) in (1..BLOCKS)
        .map(|block| (3, block))
        .chain((1..BLOCKS / 8).map(|node| (2, node)))
    {
        assert_eq!(set.summary(level, index), Summary::NONE, "level {level}, entry {index}");
    }
    // The next one has nothing to correct.
    let before = set.passes();
    assert!(set.claim_word().is_none());
    assert_eq!(set.passes(), before);
    set.check().unwrap();
}

/// A word given back with gaps made its leaf, and all nodes above, promise one run from its first page to its last.
#[test]
fn one_thread_at_a_time_join_is_exact() {
    use pageheap::internals::Word;
    let (set, _) = set(512);
    set.claim_at(0, 512).unwrap();
    set.settle();
    set.release_word(Word {
        index: 3,
        free: 1 << 2 | 1 << 60,
        scavenged: 0,
    })
    .unwrap();
    assert_eq!(set.summary(4, 0), Summary::new(0, 1, 0));
    assert_eq!(set.summary(0, 0), Summary::new(0, 1, 0));
}
