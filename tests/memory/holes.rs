//! Memory between live blocks: it is given back, and nothing of the blocks is.

use std::collections::BTreeSet;

use super::*;

const MIB: usize = 1 << 20;
const OS_PAGE: usize = 4096;

/// A block filled with its own number.
struct Stamped(Vec<u64>);

impl Stamped {
    fn new(number: usize, bytes: usize) -> Self {
        Self(vec![number as u64; bytes / 8])
    }

    fn is_whole(&self) -> bool {
        self.0.iter().all(|&word| word == self.0[0])
    }
}

/// Bytes of the system's pages that the blocks touch.
fn touched(blocks: &[Stamped]) -> usize {
    let pages = blocks.iter().flat_map(|block| {
        let range = block.0.as_ptr_range();
        range.start.addr() / OS_PAGE..range.end.addr().div_ceil(OS_PAGE)
    });
    pages.collect::<BTreeSet<_>>().len() * OS_PAGE
}

fn check(blocks: &[Stamped]) {
    assert!(blocks.iter().all(Stamped::is_whole), "a live block was altered");
    let pages = HEAP.stats().pages;
    assert_eq!(
        pages.backed.0,
        pages.grown.0 - pages.scavenged.0 - pages.holes.0,
        "{}",
        HEAP.stats()
    );
}

/// Of 128 MiB in blocks of 1 to 32 KiB, every eighth block stays: only the system pages that these touch remain
/// resident.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room")]
fn what_lies_between_blocks_goes_back() {
    if !is_child() {
        return assert!(run("holes::what_lies_between_blocks_goes_back"));
    }
    let size = |number: usize| 1100 + number * 7919 % 31_000;
    let before = resident();
    let make = || (0..8192).map(|number| Stamped::new(number, size(number)));
    let mut number = 0;
    let mut blocks: Vec<_> = make().collect();
    blocks.retain(|_| {
        number += 1;
        number % 8 == 0
    });
    let (pages, full) = (touched(&blocks), resident());
    HEAP.release(usize::MAX);
    let now = resident();
    println!(
        "{} MiB full, {} MiB of pages with blocks, {} MiB released: {}",
        full / MIB,
        pages / MIB,
        now / MIB,
        HEAP.stats()
    );
    assert!(HEAP.stats().pages.holes.0 > 0);
    // Plus the list, the magazines and the tables.
    assert!(
        now <= before + pages + 2 * MIB,
        "{now}, {before} + {pages}\n{}",
        HEAP.stats()
    );
    check(&blocks);
    // And all of it can be used again.
    let holes = HEAP.stats().pages.holes.0;
    blocks.extend(make());
    assert!(HEAP.stats().pages.holes.0 < holes / 4, "{}", HEAP.stats());
    check(&blocks);
    drop(blocks);
    HEAP.release(usize::MAX);
    assert!(resident() <= before + 2 * MIB, "{}", HEAP.stats());
    check(&[]);
}

/// In the child of a fork, the count matches what is there.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room")]
fn a_child_counts_the_holes_it_has() {
    if !is_child() {
        return assert!(run("holes::a_child_counts_the_holes_it_has"));
    }
    let blocks: Vec<_> = (0..4000).map(|number| Stamped::new(number, 9000)).collect();
    let mut number = 0;
    let mut blocks = blocks;
    blocks.retain(|_| {
        number += 1;
        number % 5 == 0
    });
    HEAP.release(usize::MAX);
    let holes = HEAP.stats().pages.holes;
    assert!(holes.0 > 500, "{}", HEAP.stats());
    // SAFETY: the child checks its heap and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let fork = HEAP.stats().pages;
        let agrees = fork.backed.0 == fork.grown.0 - fork.scavenged.0 - fork.holes.0 && fork.holes <= holes;
        check(&blocks);
        // SAFETY: ends the child without running the parent's handlers.
        unsafe { libc::_exit(if agrees && fork.holes.0 > 500 { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just forked.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    check(&blocks);
}
