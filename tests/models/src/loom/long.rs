//! Does a claim of a long run that meets a taken page leave anything behind?

use super::world::{CHUNK, One, Two, World};
use super::{explore, spawn};
use pageheap::Geometry;
use pageheap::internals::{Shape, Word};

/// One thread claims `run`, another claims page `obstacle` of it.
fn run_and_obstacle<G: Shape>(preemptions: usize, chunks: usize, run: (usize, usize), obstacle: usize) {
    explore(preemptions, move || {
        let world = World::<G>::new(chunks, &[run], &[]);
        let other = world.clone();
        let thread = spawn(move || other.claim_at(obstacle, 1).is_some());
        let whole = world.claim_at(run.0, run.1).is_some();
        let part = thread.join().unwrap();
        assert!(whole != part, "one of them gets its pages");
        world.finish(if whole { 0 } else { run.1 - 1 });
    });
}

#[test]
fn a_run_over_two_words_goes_back_whole() {
    run_and_obstacle::<One>(3, 1, (62, 4), 65);
}

#[test]
fn a_run_over_two_chunks_goes_back_whole() {
    run_and_obstacle::<Two>(3, 2, (CHUNK - 2, 4), CHUNK + 1);
}

#[test]
fn a_run_over_three_words_goes_back_whole() {
    run_and_obstacle::<Geometry<1, 13, 2, 4>>(3, 1, (62, 68), 129);
}

#[test]
fn of_two_runs_that_overlap_one_is_claimed() {
    explore(3, || {
        let world = World::<Geometry<1, 13, 2, 4>>::new(1, &[(62, 68)], &[]);
        let other = world.clone();
        let thread = spawn(move || usize::from(other.claim_at(127, 3).is_some()) * 3);
        let mine = usize::from(world.claim_at(62, 67).is_some()) * 67;
        let theirs = thread.join().unwrap();
        assert!((mine == 0) != (theirs == 0));
        world.finish(68 - mine - theirs);
    });
}

#[test]
fn what_goes_back_is_still_scavenged() {
    explore(3, || {
        let world = World::<One>::new(1, &[(64, 2)], &[(62, 2)]);
        world.release_word(Word {
            index: 0,
            free: 3 << 62,
            scavenged: 3 << 62,
        });
        let other = world.clone();
        let thread = spawn(move || other.claim_at(65, 1).is_some());
        let whole = world.claim_at(62, 4);
        assert!(whole.is_none_or(|claim| claim.scavenged == 2));
        assert_ne!(whole.is_some(), thread.join().unwrap());
        assert_eq!(world.set.count().2, if whole.is_some() { 0 } else { 2 });
        world.finish(if whole.is_some() { 0 } else { 3 });
    });
}

#[test]
fn a_run_put_back_in_two_words_is_claimed_meanwhile_or_after() {
    explore(3, || {
        let world = World::<Two>::new(2, &[], &[(CHUNK - 1, 2)]);
        let other = world.clone();
        let thread = spawn(move || other.release(CHUNK - 1, 2));
        let claimed = world.claim(1).map_or(0, |_| 1);
        thread.join().unwrap();
        world.finish(2 - claimed);
    });
}

#[test]
fn a_chunk_claimed_whole_corrects_its_leaf_against_a_release() {
    explore(3, || {
        let world = World::<Two>::new(2, &[(0, CHUNK)], &[(CHUNK + 5, 1)]);
        let other = world.clone();
        let thread = spawn(move || other.release(CHUNK + 5, 1));
        world.claim_at(0, CHUNK).unwrap();
        thread.join().unwrap();
        world.finish(1);
    });
}

#[test]
fn a_chunk_claimed_whole_and_given_back_in_part_by_another_is_promised() {
    explore(3, || {
        // The thread that claims the chunk lowers its leaf while the new owner of page 5 puts that page back.
        let world = World::<Two>::new(2, &[(0, 5), (6, CHUNK - 6)], &[(5, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            other.release(5, 1);
            other.claim_at(0, CHUNK).map_or(0, |_| CHUNK)
        });
        let mine = world.claim_at(0, CHUNK).map_or(0, |_| CHUNK);
        let theirs = thread.join().unwrap();
        assert!(mine + theirs == CHUNK || mine + theirs == 0);
        world.finish(CHUNK - mine - theirs);
    });
}
