//! Tests: a thread that ends in the middle of a call leaves magazines that its destructors, and the next user of its
//! structure, can use.
//!
//! The magazine is used by itself; its slots are numbers, and around its rack lie words that nobody may write to.

extern crate std;

use core::ptr::NonNull;
use std::vec::Vec;

use super::magazine::Magazine;
use super::rack::{Few, Rack};
use super::size_class::SizeClass;

const ROOM: u32 = 6;

/// A rack, with words before and behind it that nobody may write to.
#[repr(C, align(64))]
struct World {
    before: [usize; 8],
    rack: [u64; 2 + ROOM as usize],
    after: [usize; 8],
}

/// Slots by number, from 1.
fn slot(number: usize) -> NonNull<u8> {
    NonNull::without_provenance((number << 12).try_into().unwrap())
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Loaded {
    Never,
    Open,
    Shut,
    /// By a seizer, who may leave one slot, pushed meanwhile.
    Seized(bool),
    Unloaded,
}

/// In the middle of what the user has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Pop,
    Loading,
    Lowering(u32),
}

/// Fast paths and slow ones, after the user has ended: destructors of the thread's, and after `settle` the next user.
fn use_it(magazine: &Magazine, random: &mut u64, free: &mut Vec<usize>) {
    for _ in 0..30 {
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        match *random % 16 {
            // What every slow path does first.
            0 => magazine.settle(),
            1 => drop(magazine.open()),
            2 => {
                if let Some(number) = free.pop() {
                    // SAFETY: a number that is free; nobody looks at it.
                    if !unsafe { magazine.push_below(slot(number)) } {
                        free.push(number);
                    }
                }
            }
            3 => drop(magazine.has(slot(1), SizeClass::of(64, 8).unwrap())),
            4 => magazine.shut(),
            5 => {
                let mut few = Few::default();
                // SAFETY: used here only.
                let mut other = unsafe { few.rack() };
                magazine.drain(&mut other);
                assert!(other.slots().iter().all(|slot| !free.contains(&(slot.addr() >> 12))));
                magazine.fill(&mut other);
            }
            6..11 => {
                if let Some(number) = free.pop() {
                    // SAFETY: a number that is free; nobody looks at it.
                    if !unsafe { magazine.push_quick(slot(number), || true, || true) } {
                        free.push(number);
                    }
                }
            }
            _ => {
                if let Some(popped) = magazine.pop_quick(|| true) {
                    let number = popped.addr().get() >> 12;
                    assert!((1..=20).contains(&number) && !free.contains(&number), "{popped:?}");
                    free.push(number);
                }
            }
        }
    }
}

/// A magazine that has `count` slots, as `loaded` says. Those that are the program's go to `free`.
fn load(magazine: &Magazine, rack: &mut [u64; 2 + ROOM as usize], loaded: Loaded, count: usize) -> Vec<usize> {
    let mut free: Vec<usize> = (count + 1..=20).collect();
    magazine.forget();
    if loaded == Loaded::Never {
        return free;
    }
    // SAFETY: memory for a rack.
    magazine.load(unsafe { Rack::new(NonNull::from(rack).cast(), ROOM) });
    // SAFETY: nobody looks at it.
    (1..=count).for_each(|number| assert!(unsafe { magazine.push(slot(number)) }));
    match loaded {
        Loaded::Never | Loaded::Open => {}
        Loaded::Shut => magazine.shut(),
        Loaded::Seized(leaves_one) => {
            magazine.seize(|rack| while rack.pop().is_some() {});
            free.extend(1..=count);
            if leaves_one && count < ROOM as usize {
                let entry = magazine.stake().get().wrapping_add(1);
                // SAFETY: an entry of the rack above what was taken, as a push that was under way does.
                unsafe { entry.write(slot(free.pop().unwrap()).as_ptr()) };
                magazine.stake().set(entry);
            }
        }
        Loaded::Unloaded => drop(magazine.unload()),
    }
    free
}

fn end_and_go_on(loaded: Loaded, end: End, count: usize, random: &mut u64) {
    let mut world = World {
        before: [7; _],
        rack: [0; _],
        after: [7; _],
    };
    let mut bytes = [0_usize; size_of::<Magazine>() / size_of::<usize>()];
    // SAFETY: as many bytes, used as nothing else.
    let magazine: &Magazine = unsafe { &*(&raw mut bytes).cast() };
    let mut free = load(magazine, &mut world.rack, loaded, count);
    let before = free.len();
    match end {
        End::Pop => magazine.end_in_the_middle(),
        End::Loading => magazine.end_in_loading(),
        End::Lowering(stores) => magazine.end_in_lowering(stores),
    }
    let mut is_seized = false;
    if end == End::Pop && random.is_multiple_of(3) {
        // A destructor's push that is stopped while another thread seizes the magazine. (A low number, so that it would
        // be a shape that leads nearby.)
        let number = free.remove(0);
        let mut seize =
            || magazine.seize(|rack| free.extend(core::iter::from_fn(|| rack.pop()).map(|slot| slot.addr() >> 12)));
        is_seized = true;
        // SAFETY: a number that is free; nobody looks at it.
        let done = unsafe {
            magazine.push_quick(
                slot(number),
                || true,
                || {
                    seize();
                    true
                },
            )
        };
        if !done {
            free.push(number);
        }
    }
    use_it(magazine, random, &mut free);
    magazine.settle();
    use_it(magazine, random, &mut free);
    while let Some(popped) = magazine.pop() {
        assert!(!free.contains(&(popped.addr().get() >> 12)));
        free.push(popped.addr().get() >> 12);
    }
    let has_rack = !matches!(loaded, Loaded::Never | Loaded::Unloaded);
    // A rack with all of its slots, or one slot.
    let loses = if end == End::Loading || is_seized { 20 } else { 1 };
    let all = if has_rack { 20 } else { before };
    assert!(free.len() + loses >= all, "{} of {all} left", free.len());
    assert!(world.before == [7; 8] && world.after == [7; 8]);
}

#[test]
fn a_user_that_ends_in_the_middle_of_a_call_does_no_harm() {
    let states = [Loaded::Never, Loaded::Open, Loaded::Shut, Loaded::Unloaded];
    let states: Vec<_> = states.into_iter().chain([false, true].map(Loaded::Seized)).collect();
    let mut random = 1;
    for end in [End::Pop, End::Loading, End::Lowering(1), End::Lowering(2)] {
        for &loaded in &states {
            for count in (0..=ROOM as usize).flat_map(|count| [count; 100]) {
                let outcome = std::panic::catch_unwind(|| {
                    let mut random = random;
                    end_and_go_on(loaded, end, count, &mut random);
                    random
                });
                random = outcome.unwrap_or_else(|_| panic!("{loaded:?} of {count}, {end:?}, {random}"));
            }
        }
    }
}
