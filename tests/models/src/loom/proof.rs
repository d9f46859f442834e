//! Is every refusal justified?
//!
//! In the programs below enough was free the whole time that an allocation ran: every other claimer has first released
//! as much. So the allocation must not fail.
//!
//! Two refusals may be wrong, and are beyond these models. After `PROOF_SEARCHES` searches, each disturbed, the set
//! refuses without proof. And after `PROOF_ROUNDS` looks without calm, each of which costs a preemption here, the bits
//! decide, and they do not count what a preempted claimer of a long run is about to give back. (Bits that move from
//! where the scan has not been to where it has been are counted: `shuttle` has a model of that.)

use super::paper::{finish, heap_with, take};
use super::world::{CHUNK, One, Three, Two, World, pages_of};
use super::{explore, spawn};
use pageheap::PageCount;
use pageheap::internals::Shape;

/// One page is free. A thread puts `theirs` back and takes one; we take one.
fn exchange<G: Shape>(preemptions: usize, chunks: usize, free: usize, theirs: usize) {
    explore(preemptions, move || {
        let world = World::<G>::new(chunks, &[(free, 1)], &[(theirs, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            other.release(theirs, 1);
            other.claim(1).expect("they released a page, and we claim but one");
        });
        world.claim(1).expect("a page is free throughout");
        thread.join().unwrap();
        world.finish(0);
    });
}

#[test]
fn a_page_moved_down_in_a_chunk_is_not_missed() {
    exchange::<One>(4, 1, 70, 5);
}

#[test]
fn a_page_moved_up_in_a_chunk_is_not_missed() {
    exchange::<One>(4, 1, 5, 70);
}

#[test]
fn a_page_moved_down_to_another_chunk_is_not_missed() {
    exchange::<Two>(3, 2, CHUNK + 5, 5);
}

#[test]
fn a_page_moved_up_to_another_chunk_is_not_missed() {
    exchange::<Two>(3, 2, 5, CHUNK + 5);
}

#[test]
fn a_page_moved_to_another_node_is_not_missed() {
    exchange::<Three>(2, 3, 5, 2 * CHUNK + 5);
}

#[test]
fn a_page_moved_by_its_number_is_not_missed() {
    explore(4, || {
        // As above, but the other thread takes exactly the page that was free before.
        let world = World::<Two>::new(2, &[(CHUNK + 5, 1)], &[(5, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            other.release(5, 1);
            usize::from(other.claim_at(CHUNK + 5, 1).is_some())
        });
        world.claim(1).expect("a page is free throughout");
        let theirs = thread.join().unwrap();
        world.finish(1 - theirs);
    });
}

#[test]
fn a_word_moved_is_not_missed() {
    explore(3, || {
        let world = World::<Two>::new(2, &[(5, 1)], &[(CHUNK + 5, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            other.release(CHUNK + 5, 1);
            assert_ne!(pages_of(other.claim_word()), 0);
        });
        assert_ne!(pages_of(world.claim_word()), 0);
        thread.join().unwrap();
        world.finish(0);
    });
}

#[test]
fn a_page_moved_from_the_word_one_is_about_to_take_is_not_missed() {
    explore(6, || {
        // The leaf promises a page all the time, and rightly: only the prover's flag makes the mover pass the
        // turnstile. The page moves down when the word above has been chosen, up again, and once more down.
        let world = World::<One>::new(1, &[(70, 1)], &[(5, 1)]);
        let other = world.clone();
        let thread = spawn(move || {
            let moves = [(5, 70), (70, 5), (5, 70)];
            let stopped = moves.into_iter().find(|&(from, to)| {
                other.release(from, 1);
                other.claim_at(to, 1).is_none()
            });
            usize::from(stopped.is_none())
        });
        assert_ne!(pages_of(world.claim_word()), 0, "a page is free throughout");
        let theirs = thread.join().unwrap();
        world.finish(1 - theirs);
    });
}

#[test]
fn a_run_moved_over_two_words_is_not_missed() {
    explore(3, || {
        let world = World::<Two>::new(2, &[(63, 2)], &[(CHUNK - 1, 2)]);
        let other = world.clone();
        let thread = spawn(move || {
            other.release(CHUNK - 1, 2);
            other.claim(2).expect("they released two, and we claim but two");
        });
        world.claim(2).expect("two pages are free throughout");
        thread.join().unwrap();
        world.finish(0);
    });
}

#[test]
fn who_released_a_page_can_claim_it_while_another_is_on_its_way_to_the_root() {
    explore(3, || {
        // Our release finds the leaf right, because the other has told it; but the root, the only way to find the
        // page, may not know yet.
        let world = World::<Two>::new(4, &[], &[(2 * CHUNK + 5, 1), (2 * CHUNK + 70, 1)]);
        let other = world.clone();
        let thread = spawn(move || other.release(2 * CHUNK + 5, 1));
        world.release(2 * CHUNK + 70, 1);
        world.claim(1).unwrap();
        thread.join().unwrap();
        world.finish(1);
    });
}

#[test]
fn who_released_a_page_can_claim_it_while_a_run_over_two_chunks_is_told_to_the_root() {
    explore(3, || {
        let world = World::<Two>::new(4, &[], &[(3 * CHUNK - 1, 2), (2 * CHUNK + 5, 1)]);
        let other = world.clone();
        let thread = spawn(move || other.release(3 * CHUNK - 1, 2));
        world.release(2 * CHUNK + 5, 1);
        world.claim(1).unwrap();
        thread.join().unwrap();
        world.finish(2);
    });
}

#[test]
fn a_page_released_before_is_seen_by_a_third() {
    explore(2, || {
        // The third claims page 70's equal once the second has said that it is back.
        let world = World::<Two>::new(4, &[], &[(2 * CHUNK + 5, 1), (2 * CHUNK + 70, 1)]);
        let (first, second) = (world.clone(), world.clone());
        let said = std::sync::Arc::new(loom::sync::atomic::AtomicBool::new(false));
        let say = said.clone();
        let first = spawn(move || first.release(2 * CHUNK + 5, 1));
        let second = spawn(move || {
            second.release(2 * CHUNK + 70, 1);
            say.store(true, core::sync::atomic::Ordering::Release);
        });
        let told = said.load(core::sync::atomic::Ordering::Acquire);
        let claimed = world.claim(1).is_some();
        assert!(claimed || !told, "the release had returned");
        first.join().unwrap();
        second.join().unwrap();
        world.finish(2 - usize::from(claimed));
    });
}

#[test]
fn pages_that_a_long_claim_gives_back_are_not_missed() {
    explore(3, || {
        // Page 65 is in use, so the long claim takes 63 and 64 and puts them back.
        let world = World::<One>::new(1, &[(63, 2)], &[]);
        let other = world.clone();
        let thread = spawn(move || assert!(other.claim_at(63, 3).is_none()));
        world.claim(1).expect("nobody keeps a page");
        thread.join().unwrap();
        world.finish(1);
    });
}

#[test]
fn a_word_that_a_long_claim_gives_back_is_not_missed() {
    explore(3, || {
        let world = World::<Two>::new(2, &[(CHUNK - 1, 1)], &[]);
        let other = world.clone();
        let thread = spawn(move || assert!(other.claim_at(CHUNK - 1, 2).is_none()));
        assert_eq!(pages_of(world.claim_word()), 1);
        thread.join().unwrap();
        world.finish(0);
    });
}

#[test]
fn a_run_that_a_longer_claim_gives_back_is_not_missed() {
    explore(3, || {
        let world = World::<One>::new(1, &[(62, 4)], &[]);
        let other = world.clone();
        let thread = spawn(move || assert!(other.claim_at(62, 5).is_none()));
        world.claim(3).expect("nobody keeps a page");
        thread.join().unwrap();
        world.finish(1);
    });
}

/// A run is taken with the room behind it, and the room is put back: it was nobody's, so nobody may miss it.
#[test]
fn the_room_behind_a_run_is_not_missed() {
    explore(3, || {
        let heap = heap_with::<One>(1, &[(5, 2)]);
        let other = heap.clone();
        let thread = spawn(move || usize::from(other.allocate_apart(PageCount(1), PageCount(1)).is_some()));
        take(&heap, 1).expect("the other needs but one");
        let theirs = thread.join().unwrap();
        finish(&heap, 1 - theirs, 0, None);
    });
}

#[test]
fn of_a_run_and_two_that_would_break_it_somebody_gets_his() {
    explore(2, || {
        let world = World::<One>::new(1, &[(62, 4)], &[]);
        let (second, third) = (world.clone(), world.clone());
        let second = spawn(move || usize::from(second.claim(4).is_some()) * 4);
        let third = spawn(move || usize::from(third.claim_at(65, 1).is_some()));
        let mine = usize::from(world.claim(1).is_some());
        let (second, third) = (second.join().unwrap(), third.join().unwrap());
        assert!(
            second == 4 || mine == 1,
            "without the run there are pages enough for one"
        );
        assert!(second == 4 || mine + third >= 1);
        world.finish(4 - mine - second - third);
    });
}

#[test]
fn two_who_prove_at_once_do_not_hide_a_page_from_each_other() {
    explore(2, || {
        // Two searches correct the same stale leaf, and neither may conclude anything from the fact that the other has
        // begun.
        let world = World::<Two>::new(1, &[(5, 1), (70, 1)], &[]);
        world.claim_at(5, 1).unwrap();
        let other = world.clone();
        let thread = spawn(move || usize::from(other.claim(1).is_some()));
        let mine = usize::from(world.claim(1).is_some());
        assert_eq!(mine + thread.join().unwrap(), 1);
        world.finish(0);
    });
}
