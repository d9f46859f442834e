//! When all threads have left, is every inner node the merge of its children, and does every leaf cover its bits?
//!
//! [`World::finish`] checks that. The models vary which changes run against each other, and on how many levels.

use super::world::{CHUNK, One, Three, Two, World};
use super::{explore, spawn};
use pageheap::internals::{Shape, Word};

/// One thread releases `theirs` and the other `mine`.
fn two_releases<G: Shape>(preemptions: usize, chunks: usize, theirs: (usize, usize), mine: (usize, usize)) {
    explore(preemptions, move || {
        let world = World::<G>::new(chunks, &[], &[theirs, mine]);
        let other = world.clone();
        let thread = spawn(move || other.release(theirs.0, theirs.1));
        world.release(mine.0, mine.1);
        thread.join().unwrap();
        world.finish(mine.1 + theirs.1);
    });
}

#[test]
fn releases_into_one_word_both_reach_the_leaf() {
    two_releases::<One>(3, 1, (5, 1), (6, 1));
}

#[test]
fn releases_that_meet_at_a_words_border_make_one_run() {
    two_releases::<One>(3, 1, (63, 1), (64, 1));
}

#[test]
fn releases_into_one_chunk_both_reach_the_root() {
    two_releases::<Two>(3, 1, (5, 1), (70, 2));
}

#[test]
fn releases_that_meet_at_a_chunks_border_make_one_run_in_the_root() {
    two_releases::<Two>(3, 2, (CHUNK - 1, 1), (CHUNK, 1));
}

#[test]
fn releases_into_two_chunks_both_climb_two_levels() {
    two_releases::<Three>(2, 2, (5, 1), (CHUNK + 5, 2));
}

#[test]
fn releases_under_two_nodes_meet_in_the_root() {
    two_releases::<Three>(2, 3, (5, 1), (2 * CHUNK + 5, 2));
}

#[test]
fn a_release_of_two_words_and_one_between_them_reach_the_leaf() {
    two_releases::<One>(2, 1, (63, 2), (65, 1));
}

/// One thread releases `theirs`; the other takes `run` and searches for another run as long, which corrects what
/// claims have left behind.
fn release_and_correction<G: Shape>(
    preemptions: usize,
    chunks: usize,
    theirs: (usize, usize),
    run: (usize, usize),
    free: &'static [(usize, usize)],
) {
    explore(preemptions, move || {
        let world = World::<G>::new(chunks, free, &[theirs]);
        let total = free.iter().map(|&(_, pages)| pages).sum::<usize>() + theirs.1;
        let other = world.clone();
        let thread = spawn(move || other.release(theirs.0, theirs.1));
        let mut claimed = usize::from(world.claim_at(run.0, run.1).is_some()) * run.1;
        world.set.settle();
        claimed += world.claim(run.1).map_or(0, |_| run.1);
        thread.join().unwrap();
        world.finish(total - claimed);
    });
}

#[test]
fn a_release_that_leaves_its_leaf_alone_is_seen_by_who_lowers_the_leaf() {
    // The leaf promises 2; page 10 alone adds nothing to that, until the 2 are gone.
    release_and_correction::<One>(3, 1, (10, 1), (5, 2), &[(5, 2)]);
}

#[test]
fn and_so_on_two_levels() {
    release_and_correction::<Two>(2, 2, (10, 1), (5, 2), &[(5, 2)]);
}

#[test]
fn a_release_at_a_words_end_that_leaves_its_leaf_alone_is_seen_by_who_lowers_the_leaf() {
    release_and_correction::<One>(3, 1, (64, 1), (5, 2), &[(5, 2)]);
}

#[test]
fn a_release_that_claims_cut_short_is_seen() {
    // Two corrections of the leaf, a claim that makes each necessary, and a release that may consider its page told.
    explore(2, || {
        let world = World::<Two>::new(1, &[(5, 2), (20, 2)], &[(10, 1)]);
        let (second, third) = (world.clone(), world.clone());
        let second = spawn(move || {
            second.claim_at(5, 2).unwrap();
            second.set.settle();
        });
        let third = spawn(move || {
            third.claim_at(20, 2).unwrap();
            third.set.settle();
        });
        world.release(10, 1);
        second.join().unwrap();
        third.join().unwrap();
        world.finish(1);
    });
}

#[test]
fn a_release_under_two_searches_that_lower_what_they_do_not_find_is_seen() {
    explore(2, || {
        // On its way to chunk 4, one search lowers the leaf of chunk 2 and is preempted. Another search, which came by
        // the root, finds that promise broken and lowers it too. The release finds its page told by the first search,
        // which has looked again, and which must now carry it to the root.
        let (first, run, page) = ((2 * CHUNK + 2, 2), (2 * CHUNK + 5, 2), (2 * CHUNK + 10, 1));
        let world = World::<Two>::new(5, &[first, run, (4 * CHUNK + 5, 3)], &[page]);
        // The hint for two pages leads to chunk 2, past the root.
        assert_eq!(world.claim(2).unwrap().start, first.0);
        world.claim_at(run.0, run.1).unwrap();
        // All three run in threads of their own, so that any order of beginning costs no preemption.
        let searches = [1, 2].map(|pages| {
            let world = world.clone();
            spawn(move || world.claim(pages).map_or(0, |_| pages))
        });
        let other = world.clone();
        let release = spawn(move || other.release(page.0, page.1));
        let claimed: usize = searches.into_iter().map(|thread| thread.join().unwrap()).sum();
        release.join().unwrap();
        world.finish(4 - claimed);
    });
}

#[test]
fn a_released_bit_claimed_at_once_leaves_nothing_promised_too_little() {
    explore(3, || {
        let world = World::<Two>::new(1, &[], &[(5, 1), (70, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            other.release(5, 1);
            usize::from(other.claim_at(5, 1).is_some())
        });
        world.release(70, 1);
        let claimed = thread.join().unwrap();
        world.finish(2 - claimed);
    });
}

#[test]
fn three_releases_into_one_chunk_all_count() {
    explore(2, || {
        let world = World::<Two>::new(1, &[], &[(5, 1), (63, 1), (64, 1)]);
        let (second, third) = (world.clone(), world.clone());
        let second = spawn(move || second.release(63, 1));
        let third = spawn(move || third.release(64, 1));
        world.release(5, 1);
        second.join().unwrap();
        third.join().unwrap();
        world.finish(3);
    });
}

#[test]
fn a_batch_and_a_release_both_reach_the_root() {
    explore(2, || {
        let world = World::<Two>::new(2, &[], &[(5, 1), (CHUNK, 1), (70, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            other.touch(5);
            other.touch(CHUNK);
            other.set.release_sorted([(5, 1), (CHUNK, 1)].into_iter()).unwrap();
        });
        world.release(70, 1);
        thread.join().unwrap();
        world.finish(3);
    });
}

#[test]
fn a_torn_word_and_a_release_that_meets_it_make_one_run() {
    explore(3, || {
        let world = World::<Two>::new(2, &[], &[(CHUNK - 64, 1), (CHUNK - 3, 3), (CHUNK, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            other.release_word(Word {
                index: 1,
                free: 1 | 0b111 << 61,
                scavenged: 0,
            });
        });
        world.release(CHUNK, 1);
        thread.join().unwrap();
        world.finish(5);
    });
}

#[test]
fn a_torn_word_and_a_correction_of_its_leaf() {
    explore(3, || {
        let world = World::<Two>::new(1, &[(70, 2)], &[(5, 1), (63, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            other.release_word(Word {
                index: 0,
                free: 1 << 5 | 1 << 63,
                scavenged: 0,
            });
        });
        world.claim_at(70, 2).unwrap();
        world.set.settle();
        thread.join().unwrap();
        world.finish(2);
    });
}

/// The run taken is the last of its length in its chunk, outside the hint's word: the leaf is corrected at once, from
/// what was read before the claim.
fn a_last_claim_and_a_release<G: Shape>(preemptions: usize, theirs: (usize, usize)) {
    explore(preemptions, move || {
        let world = World::<G>::new(2, &[(70, 2)], &[theirs]);
        let other = world.clone();
        let thread = spawn(move || other.release(theirs.0, theirs.1));
        let claimed = world.claim(2).unwrap();
        thread.join().unwrap();
        assert!(claimed.start == 70 || claimed.start == theirs.0);
        world.finish(theirs.1);
    });
}

#[test]
fn a_last_claim_corrects_its_leaf_under_a_release_of_a_page() {
    a_last_claim_and_a_release::<One>(4, (80, 1));
    a_last_claim_and_a_release::<Two>(3, (80, 1));
}

#[test]
fn a_last_claim_corrects_its_leaf_under_a_release_of_as_many() {
    a_last_claim_and_a_release::<One>(4, (80, 2));
    a_last_claim_and_a_release::<Two>(3, (80, 2));
}

#[test]
fn a_last_claim_corrects_its_leaf_under_a_release_that_meets_it() {
    a_last_claim_and_a_release::<Two>(3, (72, 1));
}

#[test]
fn two_last_claims_and_a_release_leave_nothing_promised_too_little() {
    explore(2, || {
        // Both correct the leaf; what one has lowered, the other may find lowered too far, and raise.
        let world = World::<Two>::new(3, &[(70, 2), (CHUNK + 70, 2)], &[(80, 1)]);
        let (second, third) = (world.clone(), world.clone());
        let second = spawn(move || second.claim(2).map_or(0, |_| 2));
        let third = spawn(move || third.release(80, 1));
        let claimed = world.claim(2).map_or(0, |_| 2) + second.join().unwrap();
        third.join().unwrap();
        world.finish(5 - claimed);
    });
}
