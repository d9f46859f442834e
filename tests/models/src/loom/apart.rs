//! Do caches that are refilled apart keep one owner for each page, and leave summaries and hints that promise enough?
//!
//! A claim apart may come back empty-handed: `None` proves nothing. So the models count what was got, and
//! [`World::finish`] checks that the rest is free, promised by the tree, and not below a hint. Two berths: chunks 0
//! and 2 share one.

use super::world::{CHUNK, One, Three, Two, World, pages_of};
use super::{explore, spawn};

/// Takes up to `words` words apart, as one cache does. Returns how many pages they had.
fn refill<G: pageheap::internals::Shape>(world: &World<G>, cache: u32, words: usize) -> usize {
    let (mut last, mut pages) = (0, 0);
    for _ in 0..words {
        let Some(word) = world.claim_word_apart(cache, last) else {
            break;
        };
        last = word.index;
        pages += pages_of(Some(word));
    }
    pages
}

#[test]
fn two_caches_apart_share_no_page_of_one_chunk() {
    explore(3, || {
        let world = World::<One>::new(1, &[(63, 2)], &[]);
        let other = world.clone();
        let thread = spawn(move || refill(&other, 1, 1));
        let mine = refill(&world, 2, 1);
        world.finish(2 - mine - thread.join().unwrap());
    });
}

#[test]
fn two_caches_apart_share_no_page_of_two_chunks() {
    explore(2, || {
        // Each may find the other's chunk empty, and correct its leaf while the other looks.
        let world = World::<Two>::new(2, &[(5, 1), (CHUNK + 5, 1)], &[]);
        let other = world.clone();
        let thread = spawn(move || refill(&other, 1, 2));
        let mine = refill(&world, 2, 2);
        let theirs = thread.join().unwrap();
        world.finish(2 - mine - theirs);
    });
}

#[test]
fn two_caches_whose_chunks_share_a_berth_share_no_page() {
    explore(2, || {
        let world = World::<Three>::new(3, &[(5, 1), (2 * CHUNK + 5, 1)], &[]);
        let other = world.clone();
        let thread = spawn(move || refill(&other, 1, 2));
        let mine = refill(&world, 2, 1);
        let theirs = thread.join().unwrap();
        world.finish(2 - mine - theirs);
    });
}

#[test]
fn a_page_released_while_its_chunk_is_found_empty_is_promised() {
    explore(3, || {
        // The second refill finds the chunk empty, and corrects its leaf.
        let world = World::<Two>::new(2, &[(5, 1)], &[(70, 1)]);
        let other = world.clone();
        let thread = spawn(move || refill(&other, 1, 2));
        world.release(70, 1);
        world.finish(2 - thread.join().unwrap());
    });
}

#[test]
fn a_page_released_in_the_next_chunk_while_a_node_is_found_broken_is_promised() {
    explore(3, || {
        // The claim corrects its leaf. The node above still promises its pages, and the hint for one page is 0.
        let world = World::<Two>::new(4, &[(2 * CHUNK + 5, 2)], &[(3 * CHUNK + 5, 1)]);
        world.claim(2).unwrap();
        let other = world.clone();
        let thread = spawn(move || refill(&other, 1, 1));
        world.release(3 * CHUNK + 5, 1);
        world.finish(1 - thread.join().unwrap());
    });
}

#[test]
fn a_word_put_back_while_another_cache_is_refilled_apart_is_not_lost() {
    explore(3, || {
        let world = World::<Two>::new(2, &[(62, 3)], &[]);
        let other = world.clone();
        let thread = spawn(move || {
            if let Some(word) = other.claim_word_apart(1, 0) {
                other.release_word(word);
            }
        });
        let mine = refill(&world, 2, 2);
        thread.join().unwrap();
        world.finish(3 - mine);
    });
}

#[test]
fn a_run_over_two_words_and_a_word_taken_apart_share_nothing() {
    explore(3, || {
        let world = World::<One>::new(1, &[(62, 4)], &[]);
        let other = world.clone();
        let thread = spawn(move || refill(&other, 1, 2));
        let mine = 4 * usize::from(world.claim(4).is_some());
        world.finish(4 - mine - thread.join().unwrap());
    });
}

#[test]
fn a_run_over_two_chunks_given_back_after_a_word_was_taken_apart_is_not_lost() {
    explore(2, || {
        // The second chunk's word is taken while the run's first half is in hand.
        let world = World::<Two>::new(2, &[(CHUNK - 2, 4)], &[]);
        let other = world.clone();
        let thread = spawn(move || refill(&other, 1, 2));
        let mine = 4 * usize::from(world.claim(4).is_some());
        world.finish(4 - mine - thread.join().unwrap());
    });
}

#[test]
fn a_word_taken_apart_and_one_taken_at_the_hint_are_two_and_the_hint_is_right() {
    explore(3, || {
        let world = World::<Two>::new(2, &[(5, 1), (70, 1)], &[(CHUNK + 5, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            let pages = refill(&other, 1, 1);
            other.release(CHUNK + 5, 1);
            pages
        });
        let mine = pages_of(world.claim_word());
        let theirs = thread.join().unwrap();
        assert_ne!(mine, 0, "two words were free, and the other thread takes one");
        world.finish(3 - mine - theirs);
    });
}

#[test]
fn a_page_moved_by_a_refill_apart_is_not_missed_by_a_proof() {
    explore(3, || {
        // As in `proof.rs`: they release a page, and take at most one.
        let world = World::<Two>::new(2, &[(CHUNK + 5, 1)], &[(5, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            other.release(5, 1);
            refill(&other, 1, 1)
        });
        world.claim(1).expect("a page is free throughout");
        world.finish(1 - thread.join().unwrap());
    });
}

#[test]
fn a_page_moved_up_by_a_refill_apart_is_not_missed_by_a_proof() {
    explore(3, || {
        let world = World::<Two>::new(2, &[(5, 1)], &[(CHUNK + 5, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            other.release(CHUNK + 5, 1);
            refill(&other, 1, 1)
        });
        assert_eq!(pages_of(world.claim_word()), 1, "a page is free throughout");
        world.finish(1 - thread.join().unwrap());
    });
}

#[test]
fn a_page_released_while_a_node_is_found_to_begin_with_none_is_promised() {
    explore(3, || {
        // As above, but the node promises a run at its start, which no leaf is asked for.
        let world = World::<Two>::new(4, &[(2 * CHUNK, 2)], &[(2 * CHUNK + 70, 1)]);
        world.claim(2).unwrap();
        let other = world.clone();
        let thread = spawn(move || refill(&other, 1, 2));
        world.release(2 * CHUNK + 70, 1);
        world.finish(1 - thread.join().unwrap());
    });
}
