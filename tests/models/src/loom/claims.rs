//! Does a page ever have two owners? Does the next owner see what the last one wrote?
//!
//! The cells of the [`World`] answer: loom fails a run in which two threads are on a page and the one does not know
//! that the other has left. Either both were given the page, or the handover lacks an acquire or a release.

use pageheap::internals::Word;

use super::world::{One, Two, World, pages_of};
use super::{explore, spawn};

#[test]
fn two_claims_get_two_pages() {
    explore(3, || {
        let world = World::<One>::new(1, &[(63, 2)], &[]);
        let other = world.clone();
        let thread = spawn(move || other.claim(1).unwrap().start);
        let mine = world.claim(1).unwrap().start;
        let theirs = thread.join().unwrap();
        assert_ne!(mine, theirs);
        world.finish(0);
    });
}

#[test]
fn three_claims_of_two_pages_get_them_and_one_no() {
    explore(2, || {
        let world = World::<One>::new(1, &[(63, 2)], &[]);
        let claim = |world: &World<One>| usize::from(world.claim(1).is_some());
        let (second, third) = (world.clone(), world.clone());
        let second = spawn(move || claim(&second));
        let third = spawn(move || claim(&third));
        let claimed = claim(&world) + second.join().unwrap() + third.join().unwrap();
        assert_eq!(claimed, 2);
        world.finish(0);
    });
}

#[test]
fn a_word_swapped_away_has_nothing_of_what_a_run_was_claimed_from_it() {
    explore(3, || {
        let world = World::<One>::new(1, &[(60, 3)], &[]);
        let other = world.clone();
        let thread = spawn(move || pages_of(other.claim_word()));
        let mine = 2 * usize::from(world.claim(2).is_some());
        let theirs = thread.join().unwrap();
        // Whichever was first: two pages and the third, or all three and none.
        assert!(mine + theirs == 3 && theirs != 0);
        world.finish(0);
    });
}

#[test]
fn two_swaps_get_two_words() {
    explore(3, || {
        let world = World::<One>::new(1, &[(62, 3)], &[]);
        let other = world.clone();
        let thread = spawn(move || pages_of(other.claim_word()));
        let mine = pages_of(world.claim_word());
        assert_eq!(mine + thread.join().unwrap(), 3);
        world.finish(0);
    });
}

#[test]
fn a_run_over_two_words_and_a_swap_of_one_share_nothing() {
    explore(2, || {
        let world = World::<One>::new(1, &[(62, 4)], &[]);
        let other = world.clone();
        let thread = spawn(move || pages_of(other.claim_word()));
        let mine = world.claim_at(62, 4).map_or(0, |_| 4);
        let theirs = thread.join().unwrap();
        world.finish(4 - mine - theirs);
    });
}

#[test]
fn a_word_put_back_is_claimed_once() {
    explore(2, || {
        let world = World::<One>::new(1, &[(62, 2)], &[]);
        let other = world.clone();
        let thread = spawn(move || {
            let Some(word) = other.claim_word() else { return 0 };
            other.release_word(word);
            0
        });
        let mine = usize::from(world.claim(1).is_some());
        world.finish(2 - mine - thread.join().unwrap());
    });
}

#[test]
fn who_claims_a_page_sees_what_its_last_owner_wrote_and_that_it_was_scavenged() {
    explore(3, || {
        let world = World::<One>::new(1, &[], &[(70, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            let word = Word {
                index: 1,
                free: 1 << 6,
                scavenged: 1 << 6,
            };
            other.release_word(word);
        });
        let claim = world.claim(1);
        if let Some(claim) = claim {
            assert_eq!((claim.start, claim.scavenged), (70, 1));
        }
        thread.join().unwrap();
        let (_, free, scavenged) = world.set.count();
        assert_eq!(free, scavenged);
        world.finish(usize::from(claim.is_none()));
    });
}

#[test]
fn a_page_passes_through_three_hands() {
    explore(2, || {
        let world = World::<One>::new(1, &[], &[(70, 1)]);
        let pass = |world: &World<One>| {
            if let Some(claim) = world.claim_at(70, 1) {
                world.release(claim.start, 1);
            }
        };
        let (second, third) = (world.clone(), world.clone());
        let second = spawn(move || pass(&second));
        let third = spawn(move || pass(&third));
        world.release(70, 1);
        second.join().unwrap();
        third.join().unwrap();
        world.finish(1);
    });
}

/// A double free, which is misuse: the set stays intact, and one of the two callers is told.
#[test]
fn of_two_who_release_a_run_of_a_word_at_once_one_is_told() {
    explore(3, || {
        let world = World::<One>::new(1, &[], &[(60, 3)]);
        let other = world.clone();
        let thread = spawn(move || other.set.release(60, 3).is_ok());
        let mine = world.set.release(60, 3).is_ok();
        assert_ne!(mine, thread.join().unwrap());
        world.finish(3);
    });
}

#[test]
fn pages_of_one_word_are_released_and_claimed_by_neighbours() {
    explore(3, || {
        let world = World::<Two>::new(1, &[(5, 1)], &[(6, 1)]);
        let other = world.clone();
        let thread = spawn(move || other.release(6, 1));
        let claim = world.claim(2);
        thread.join().unwrap();
        world.finish(if claim.is_some() { 0 } else { 2 });
    });
}
