//! When all threads have left, is there a run of a hint's length below the hint?
//!
//! [`World::finish`] checks that. Hints start at 0, watched by nobody; a claim in the second word watches one, raises
//! it, and leaves it watched.

use std::sync::Arc;

use pageheap::internals::Shape;

use super::world::{CHUNK, One, Two, World, pages_of};
use super::{explore, spawn};

/// Releases runs of pages, each by a thread of its own, while this thread claims. Returns what `claim` returned, after
/// all threads have ended.
fn against<G: Shape, T, const N: usize>(
    world: &Arc<World<G>>,
    releases: [(usize, usize); N],
    claim: impl FnOnce(&World<G>) -> T,
) -> T {
    let threads = releases.map(|(start, pages)| {
        let world = Arc::clone(world);
        spawn(move || world.release(start, pages))
    });
    let claimed = claim(world);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    claimed
}

#[test]
fn a_raise_and_a_release_that_tells_nobody() {
    explore(4, || {
        // The leaf promises a page; page 5 does not change that.
        let world = World::<One>::new(1, &[(70, 1)], &[(5, 1)]);
        against(&world, [(5, 1)], |world| world.claim(1).unwrap());
        world.finish(1);
    });
}

#[test]
fn a_raise_and_a_release_that_tells_the_leaf() {
    explore(4, || {
        let world = World::<One>::new(1, &[(70, 1)], &[(5, 2)]);
        against(&world, [(5, 2)], |world| world.claim(1).unwrap());
        world.finish(2);
    });
}

#[test]
fn a_raise_and_a_release_that_tells_the_root() {
    explore(3, || {
        let world = World::<Two>::new(2, &[(CHUNK + 5, 1)], &[(5, 1)]);
        against(&world, [(5, 1)], |world| world.claim(1).unwrap());
        world.finish(1);
    });
}

#[test]
fn a_raise_and_a_release_that_tells_a_root_of_leaves() {
    explore(4, || {
        // There is no level above: only one fence lies between telling the leaf and reading the hint.
        let world = World::<One>::new(2, &[(CHUNK + 5, 1)], &[(5, 1)]);
        against(&world, [(5, 1)], |world| world.claim(1).unwrap());
        world.finish(1);
    });
}

#[test]
fn a_raise_by_a_word_and_a_release_that_tells_a_root_of_leaves() {
    explore(4, || {
        let world = World::<One>::new(2, &[(CHUNK + 5, 1)], &[(63, 3)]);
        let claimed = against(&world, [(63, 3)], |world| pages_of(world.claim_word()));
        world.finish(4 - claimed);
    });
}

#[test]
fn a_raise_by_a_word_and_a_release_into_that_word() {
    explore(4, || {
        let world = World::<One>::new(1, &[(5, 1)], &[(6, 1)]);
        let claimed = against(&world, [(6, 1)], |world| pages_of(world.claim_word()));
        world.finish(2 - claimed);
    });
}

#[test]
fn a_raise_by_the_last_word_of_a_chunk_and_a_release_into_that_chunk() {
    explore(3, || {
        // The leaf is corrected between the two readings of the turnstile.
        let world = World::<Two>::new(2, &[(70, 1)], &[(5, 1)]);
        let claimed = against(&world, [(5, 1)], |world| pages_of(world.claim_word()));
        world.finish(2 - claimed);
    });
}

#[test]
fn a_raise_and_a_release_that_relies_on_anothers_walk() {
    explore(3, || {
        // Both releases are into chunk 2: the second finds its leaf right and returns, while the first has yet to tell
        // the root.
        let world = World::<Two>::new(5, &[(4 * CHUNK + 5, 1)], &[(2 * CHUNK + 5, 1), (2 * CHUNK + 70, 1)]);
        against(&world, [(2 * CHUNK + 5, 1), (2 * CHUNK + 70, 1)], |world| {
            world.claim(1).unwrap()
        });
        world.finish(2);
    });
}

#[test]
fn a_raise_of_the_hint_for_two_pages_and_two_releases_that_make_them() {
    explore(3, || {
        let world = World::<One>::new(1, &[(70, 2)], &[(5, 1), (6, 1)]);
        let mine = against(&world, [(5, 1), (6, 1)], |world| world.claim(2).unwrap());
        assert!(mine.start == 70 || mine.start == 5);
        world.finish(2);
    });
}

#[test]
fn a_raise_of_the_hint_for_two_pages_and_two_releases_that_meet_at_a_words_border() {
    explore(3, || {
        let world = World::<One>::new(1, &[(70, 2)], &[(63, 1), (64, 1)]);
        against(&world, [(63, 1), (64, 1)], |world| world.claim(2).unwrap());
        world.finish(2);
    });
}

#[test]
fn two_raises_and_a_release() {
    explore(2, || {
        let world = World::<One>::new(1, &[(70, 2)], &[(5, 1)]);
        let (second, third) = (world.clone(), world.clone());
        let second = spawn(move || second.release(5, 1));
        let third = spawn(move || third.claim(1).unwrap());
        world.claim(1).unwrap();
        second.join().unwrap();
        third.join().unwrap();
        world.finish(1);
    });
}

#[test]
fn a_raise_and_a_run_given_back() {
    explore(3, || {
        // A long claim takes 63 and 64, meets 65 and goes back, while 66 is claimed and the hint raised over what it
        // held.
        let world = World::<One>::new(1, &[(63, 2), (66, 1)], &[]);
        let other = world.clone();
        let thread = spawn(move || assert!(other.claim_at(63, 3).is_none()));
        world.claim(1).unwrap();
        thread.join().unwrap();
        world.finish(2);
    });
}

#[test]
fn a_raise_and_a_page_that_is_released_and_claimed_again() {
    explore(3, || {
        let world = World::<One>::new(1, &[(70, 2)], &[(5, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            other.release(5, 1);
            usize::from(other.claim_at(5, 1).is_some())
        });
        world.claim(1).unwrap();
        let claimed = thread.join().unwrap();
        world.finish(2 - claimed);
    });
}

/// A world whose hint was raised to page 71 and is watched: the next search of its length writes nothing before it
/// reads.
fn watched<G: Shape>(chunks: usize, free: (usize, usize), held: &[(usize, usize)]) -> Arc<World<G>> {
    let world = World::<G>::new(chunks, &[(69, free.1), free], held);
    assert_eq!(world.claim(free.1).unwrap().start, 69);
    world
}

#[test]
fn a_raise_of_a_hint_that_was_watched_and_a_release_above_it() {
    explore(4, || {
        // Page 75 is above the hint, so there is nothing to lower. But it is below what the search finds, if it is
        // missed.
        let world = watched::<One>(2, (CHUNK + 5, 1), &[(75, 1)]);
        against(&world, [(75, 1)], |world| world.claim(1).unwrap());
        world.finish(1);
    });
}

#[test]
fn a_raise_of_a_hint_that_was_watched_and_a_release_below_it() {
    explore(4, || {
        let world = watched::<Two>(2, (CHUNK + 5, 1), &[(5, 1)]);
        against(&world, [(5, 1)], |world| world.claim(1).unwrap());
        world.finish(1);
    });
}

#[test]
fn a_raise_of_a_hint_that_was_watched_and_a_release_that_relies_on_anothers_walk() {
    explore(3, || {
        let world = watched::<Two>(5, (4 * CHUNK + 5, 1), &[(2 * CHUNK + 5, 1), (2 * CHUNK + 70, 1)]);
        against(&world, [(2 * CHUNK + 70, 1), (2 * CHUNK + 5, 1)], |world| {
            world.claim(1).unwrap()
        });
        world.finish(2);
    });
}

#[test]
fn a_raise_of_a_hint_that_was_watched_and_two_releases_that_make_a_run() {
    explore(3, || {
        let world = watched::<One>(2, (CHUNK + 5, 2), &[(75, 1), (76, 1)]);
        against(&world, [(75, 1), (76, 1)], |world| world.claim(2).unwrap());
        world.finish(2);
    });
}

#[test]
fn two_raises_of_a_hint_that_was_watched_and_a_release_of_two_pages() {
    explore(2, || {
        // One search may begin before the release and end after the other search, which finds one of the two pages and
        // watches the hint again.
        let world = watched::<One>(2, (CHUNK + 5, 1), &[(75, 2)]);
        let (second, third) = (world.clone(), world.clone());
        let second = spawn(move || second.release(75, 2));
        let third = spawn(move || usize::from(third.claim(1).is_some()));
        let mut claimed = usize::from(world.claim(1).is_some());
        second.join().unwrap();
        claimed += third.join().unwrap();
        world.finish(3 - claimed);
    });
}

#[test]
fn a_raise_of_a_hint_that_was_watched_and_a_run_given_back() {
    explore(3, || {
        // A long claim takes 127, meets 128 and goes back, while the hint is raised over what it held.
        let world = World::<One>::new(3, &[(70, 1), (127, 1), (2 * CHUNK + 5, 1)], &[]);
        assert_eq!(world.claim(1).unwrap().start, 70);
        let other = world.clone();
        let thread = spawn(move || assert!(other.claim_at(127, 2).is_none()));
        world.claim(1).unwrap();
        thread.join().unwrap();
        world.finish(1);
    });
}

#[test]
fn a_raise_by_a_word_of_a_hint_that_was_watched_and_a_release_above_it() {
    explore(4, || {
        let world = watched::<One>(2, (CHUNK + 5, 1), &[(75, 1)]);
        let claimed = against(&world, [(75, 1)], |world| pages_of(world.claim_word()));
        world.finish(2 - claimed);
    });
}
