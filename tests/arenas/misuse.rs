//! Broken contracts of `unsafe` functions: the process aborts and names the address.

use std::ptr::NonNull;

use pageheap::arena::{Arena, ArenaConfig, Backing, Checkpoint};
use pageheap::source::System;
use pageheap::{Config, PageHeap};

use super::child::{aborts, wrong};
use super::common::addresses;

const CHECKPOINT: &str = "a checkpoint that is not its own, or not behind it";

fn heap() -> PageHeap<System> {
    PageHeap::new(System, Config::new(addresses(1 << 30))).expect("a heap")
}

/// Where a handle continues after it has allocated this value.
fn behind(value: &mut u64) -> NonNull<u64> {
    // SAFETY: at most one past the value.
    wrong(unsafe { NonNull::from(value).add(1) })
}

#[test]
fn a_checkpoint_of_another_handle_aborts() {
    if aborts("misuse::a_checkpoint_of_another_handle_aborts", CHECKPOINT) {
        let arena = Arena::new();
        let (first, mut second) = (arena.local(), arena.local());
        behind(first.alloc(1).unwrap());
        second.alloc(2).unwrap();
        // SAFETY: the call does not return.
        unsafe { second.rewind(first.checkpoint()) };
    }
}

#[test]
fn a_checkpoint_that_was_rewound_past_aborts() {
    if aborts("misuse::a_checkpoint_that_was_rewound_past_aborts", CHECKPOINT) {
        let arena = Arena::new();
        let mut local = arena.local();
        local.alloc(1).unwrap();
        let early = local.checkpoint();
        local.alloc_slice_with(1 << 20, |_| 0_u8).unwrap();
        behind(local.alloc(2).unwrap());
        let late = local.checkpoint();
        // SAFETY: nothing is used any more; the second call does not return.
        unsafe {
            local.rewind(early);
            local.rewind(late);
        }
    }
}

/// Safe code cannot do this: the lifetime forbids it. The new piece starts where the old one did but is shorter, so the
/// next allocation would lie in memory that belongs to others.
#[test]
fn a_checkpoint_of_before_a_reset_aborts() {
    if aborts("misuse::a_checkpoint_of_before_a_reset_aborts", CHECKPOINT) {
        let heap = heap();
        let mut arena = Arena::with_config_in(ArenaConfig::new().slab(1 << 20), &heap).unwrap();
        let old = {
            let local = arena.local();
            // One piece, which is extended.
            (0..200).for_each(|_| _ = local.alloc([0_u8; 64]).unwrap());
            behind(local.alloc(1).unwrap());
            // SAFETY: a checkpoint is three addresses. This test is about what happens without the protection of its
            // lifetime.
            unsafe { std::mem::transmute::<Checkpoint<'_>, Checkpoint<'static>>(local.checkpoint()) }
        };
        arena.reset();
        let mut local = arena.local();
        local.alloc(1_u64).unwrap();
        // SAFETY: the call does not return.
        unsafe { local.rewind(old) };
    }
}

#[test]
fn a_block_that_another_heap_gave_aborts() {
    if aborts("misuse::a_block_that_another_heap_gave_aborts", "not this heap's") {
        let (one, other) = (heap(), heap());
        let block = one.take(20_000, 1).unwrap().memory;
        wrong(block.cast::<u8>());
        // SAFETY: the call does not return.
        unsafe { other.give(block) };
    }
}

#[test]
fn a_block_given_twice_aborts() {
    if aborts("misuse::a_block_given_twice_aborts", "freed twice") {
        let heap = heap();
        let block = heap.take(20_000, 1).unwrap().memory;
        wrong(block.cast::<u8>());
        // SAFETY: the second call does not return.
        unsafe {
            heap.give(block);
            heap.give(block);
        }
    }
}
