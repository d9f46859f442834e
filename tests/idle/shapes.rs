//! What programs leave behind, by the shape of their memory.

use std::sync::{Arc, Barrier};
use std::thread;

use super::*;

/// A tree like that of a JSON parser.
enum Json {
    Number(f64),
    Text(String),
    List(Vec<Json>),
    Object(Vec<(String, Json)>),
}

/// A tree of about `nodes` nodes.
fn tree(nodes: usize, seed: usize) -> Json {
    if nodes <= 1 {
        return match seed % 3 {
            0 => Json::Number(seed as f64),
            1 => Json::Text("a value".repeat(1 + seed % 5)),
            _ => Json::List(Vec::new()),
        };
    }
    let children = 2 + seed % 7;
    let part = |index: usize| tree((nodes - 1) / children, seed.wrapping_mul(31).wrapping_add(index));
    if seed.is_multiple_of(2) {
        Json::List((0..children).map(part).collect())
    } else {
        Json::Object(
            (0..children)
                .map(|index| (format!("key number {index}"), part(index)))
                .collect(),
        )
    }
}

fn count(tree: &Json) -> usize {
    match tree {
        Json::Number(number) => usize::from(*number >= 0.0),
        Json::Text(text) => usize::from(!text.is_empty()),
        Json::List(list) => 1 + list.iter().map(count).sum::<usize>(),
        Json::Object(object) => {
            1 + object
                .iter()
                .map(|(key, value)| key.len().min(1) + count(value))
                .sum::<usize>()
        }
    }
}

#[test]
fn a_tree_of_json_is_dropped() {
    if !is_child() {
        return assert!(run("shapes::a_tree_of_json_is_dropped"));
    }
    let before = resident();
    let trees: Vec<Json> = (0..64).map(|seed| tree(85_000, seed)).collect();
    assert!(trees.iter().map(count).sum::<usize>() > 1_000_000);
    println!("peak {:.1} MiB", mib(resident()));
    assert!(resident() > before + (300 << 20));
    drop(trees);
    settle(before, 0);
}

#[test]
fn trees_of_two_threads_are_freed_by_a_third() {
    if !is_child() {
        return assert!(run("shapes::trees_of_two_threads_are_freed_by_a_third"));
    }
    let before = resident();
    let make =
        |seed: usize| thread::spawn(move || (0..16).map(|tree_of| tree(100_000, seed + tree_of)).collect::<Vec<_>>());
    let (one, two) = (make(1), make(1000));
    let trees = (one.join().unwrap(), two.join().unwrap());
    let barrier = Arc::new(Barrier::new(2));
    let other = barrier.clone();
    // The third thread stays, with what it has freed in its magazines.
    let third = thread::spawn(move || {
        drop(trees);
        other.wait();
        other.wait();
    });
    barrier.wait();
    settle(before, 0);
    barrier.wait();
    third.join().unwrap();
}

/// Blocks of about `bytes` bytes in total, all written to.
pub fn blocks(bytes: usize, size: usize) -> Vec<Vec<u8>> {
    (0..bytes / size).map(|_| vec![1; size]).collect()
}

fn waves(threads: usize) {
    for (size, name) in [(100, "small"), (3000, "medium"), (200_000, "large")] {
        let before = resident();
        let barrier = Arc::new(Barrier::new(threads + 1));
        let asleep: Vec<_> = (0..threads)
            .map(|_| {
                let barrier = barrier.clone();
                thread::spawn(move || {
                    drop(blocks((256 << 20) / threads, size));
                    barrier.wait();
                    barrier.wait();
                })
            })
            .collect();
        barrier.wait();
        print!("{name}, {threads} threads: ");
        settle(before, 0);
        barrier.wait();
        asleep.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn waves_of_blocks_by_one_thread() {
    if !is_child() {
        return assert!(run("shapes::waves_of_blocks_by_one_thread"));
    }
    waves(1);
}

#[test]
fn waves_of_blocks_by_four_threads() {
    if !is_child() {
        return assert!(run("shapes::waves_of_blocks_by_four_threads"));
    }
    waves(4);
}

#[test]
fn a_part_stays() {
    if !is_child() {
        return assert!(run("shapes::a_part_stays"));
    }
    let before = resident();
    let keep = blocks(64 << 20, 5000);
    let rest = blocks(256 << 20, 5000);
    drop(rest);
    settle(before, 64 << 20);
    assert!(keep.iter().all(|block| all_are(block, 1)));
}

#[test]
fn threads_that_sleep_with_full_caches() {
    if !is_child() {
        return assert!(run("shapes::threads_that_sleep_with_full_caches"));
    }
    const THREADS: usize = 32;
    let before = resident();
    let barrier = Arc::new(Barrier::new(THREADS + 1));
    let asleep: Vec<_> = (0..THREADS)
        .map(|_| {
            let barrier = barrier.clone();
            thread::spawn(move || {
                // A word of pages for its cache, another for its buffer, each page written to.
                let runs: Vec<Vec<u8>> = (0..60).map(|_| vec![1; 40_000]).collect();
                drop(runs);
                barrier.wait();
                barrier.wait();
            })
        })
        .collect();
    barrier.wait();
    settle(before, 0);
    assert_eq!(HEAP.stats().pages.cached.0, 0, "{}", HEAP.stats());
    barrier.wait();
    asleep.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Blocks of all sizes, freed in random order: each one that is kept for later pins a page.
#[test]
fn blocks_of_all_sizes_are_freed_in_no_order_by_threads_that_then_sleep() {
    if !is_child() {
        return assert!(run(
            "shapes::blocks_of_all_sizes_are_freed_in_no_order_by_threads_that_then_sleep"
        ));
    }
    for threads in [1, 4] {
        let before = resident();
        let barrier = Arc::new(Barrier::new(threads + 1));
        let asleep: Vec<_> = (0..threads)
            .map(|seed| {
                let barrier = barrier.clone();
                thread::spawn(move || {
                    let (mut random, mut kept, mut bytes) = (seed as u64 * 2 + 1, Vec::new(), 0);
                    let mut below = |end: usize| {
                        random = random
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1_442_695_040_888_963_407);
                        (random >> 33) as usize % end
                    };
                    while bytes < (256 << 20) / threads {
                        let most = [200, 2000, 20_000, 200_000][below(4)];
                        let size = 1 + below(most);
                        kept.push(vec![1_u8; size]);
                        bytes += size;
                    }
                    while !kept.is_empty() {
                        let block = kept.swap_remove(below(kept.len()));
                        assert_eq!(block[block.len() / 2], 1);
                    }
                    drop(kept);
                    barrier.wait();
                    barrier.wait();
                })
            })
            .collect();
        barrier.wait();
        print!("{threads} threads: ");
        settle(before, 0);
        barrier.wait();
        asleep.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

/// `bytes` bytes of each size from 1 KiB to 32 KiB, each block written to: what a thread has in its magazines after
/// freeing them.
fn of_every_size(bytes: usize) -> Vec<Vec<Vec<u8>>> {
    let sizes = std::iter::successors(Some(1024), |size| Some(size + size / 8));
    let sizes = sizes.take_while(|&size| size <= 32 << 10);
    sizes.map(|size| blocks(bytes, size)).collect()
}

/// Long enough for the background thread to find nothing left to give back, and to sleep for ever.
fn until_it_sleeps() {
    thread::sleep(SILENCE * 2);
}

/// Threads free blocks and then sleep, while the background thread does not exist yet or sleeps for ever. With `kept`
/// they have held the blocks until then; otherwise they allocate them just before.
fn in_magazines(threads: usize, bytes: usize, kept: bool) {
    let before = resident();
    let barrier = Arc::new(Barrier::new(threads + 1));
    let asleep: Vec<_> = (0..threads)
        .map(|_| {
            let barrier = barrier.clone();
            thread::spawn(move || {
                let blocks = kept.then(|| of_every_size(bytes));
                barrier.wait();
                barrier.wait();
                drop(blocks.unwrap_or_else(|| of_every_size(bytes)));
                barrier.wait();
                barrier.wait();
            })
        })
        .collect();
    barrier.wait();
    if kept {
        until_it_sleeps();
    }
    barrier.wait();
    barrier.wait();
    settle(before, 0);
    barrier.wait();
    asleep.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Every eighth block stays, of any length from 1 to 32 KiB: nothing of the others stays, even where they share spans.
#[test]
fn what_lies_between_blocks_that_stay() {
    if !is_child() {
        return assert!(run("shapes::what_lies_between_blocks_that_stay"));
    }
    const OS_PAGE: usize = 4096;
    let before = resident();
    let mut blocks: Vec<Vec<u8>> = (0..8192).map(|number| vec![1; 1100 + number * 7919 % 31_000]).collect();
    let mut number = 0;
    blocks.retain(|_| {
        number += 1;
        number % 8 == 0
    });
    let pages = blocks.iter().flat_map(|block| {
        let range = block.as_ptr_range();
        range.start.addr() / OS_PAGE..range.end.addr().div_ceil(OS_PAGE)
    });
    let live = pages.collect::<std::collections::BTreeSet<_>>().len() * OS_PAGE;
    settle(before, live);
    assert!(blocks.iter().all(|block| all_are(block, 1)));
}

/// Every freed block stays in a magazine, and no run is freed.
#[test]
fn what_is_freed_lies_in_magazines_alone() {
    if !is_child() {
        return assert!(run("shapes::what_is_freed_lies_in_magazines_alone"));
    }
    // A process of one thread: the harness has two.
    // SAFETY: the child allocates and frees, starts a thread and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // The background thread does not exist yet.
        let before = resident();
        drop(of_every_size(400_000));
        settle(before, 0);
        // It sleeps.
        until_it_sleeps();
        drop(of_every_size(400_000));
        settle(before, 0);
        // SAFETY: ends the child without running the parent's handlers.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just forked.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "{status:#x}");
    if libc::WEXITSTATUS(status) != 0 {
        std::process::exit(libc::WEXITSTATUS(status));
    }
}

#[test]
fn several_threads_free_into_their_magazines_and_nobody_is_there() {
    if !is_child() {
        return assert!(run(
            "shapes::several_threads_free_into_their_magazines_and_nobody_is_there"
        ));
    }
    in_magazines(4, 200_000, false);
}

/// No thread starts later, and no thread frees more blocks of a size than its magazine has held.
#[test]
fn several_threads_free_as_much_as_they_took_and_nobody_is_there() {
    if !is_child() {
        return assert!(run(
            "shapes::several_threads_free_as_much_as_they_took_and_nobody_is_there"
        ));
    }
    const THREADS: usize = 16;
    let barrier = Arc::new(Barrier::new(THREADS + 1));
    let asleep: Vec<_> = (0..THREADS)
        .map(|_| {
            let barrier = barrier.clone();
            thread::spawn(move || {
                barrier.wait();
                barrier.wait();
                // Not in a `Vec`: its growth would free.
                let blocks: [_; 100] = std::array::from_fn(|_| Box::new([1_u8; 3_000]));
                barrier.wait();
                drop(blocks);
                barrier.wait();
                barrier.wait();
            })
        })
        .collect();
    barrier.wait();
    let before = resident();
    barrier.wait();
    barrier.wait();
    barrier.wait();
    settle(before, 0);
    barrier.wait();
    asleep.into_iter().for_each(|thread| thread.join().unwrap());
}

/// The tails cut off large blocks that stay in place are free, though no block may have been freed.
#[test]
fn several_threads_make_blocks_shorter_and_nobody_is_there() {
    if !is_child() {
        return assert!(run("shapes::several_threads_make_blocks_shorter_and_nobody_is_there"));
    }
    let before = resident();
    let barrier = Arc::new(Barrier::new(5));
    let asleep: Vec<_> = (0..4)
        .map(|_| {
            let barrier = barrier.clone();
            thread::spawn(move || {
                let mut block = vec![1_u8; 16 << 20];
                barrier.wait();
                block.truncate(100 << 10);
                block.shrink_to_fit();
                barrier.wait();
                barrier.wait();
                block
            })
        })
        .collect();
    barrier.wait();
    barrier.wait();
    settle(before, 4 * (100 << 10));
    barrier.wait();
    asleep.into_iter().for_each(|thread| drop(thread.join().unwrap()));
}

#[test]
fn several_threads_free_what_they_had_before_he_slept() {
    if !is_child() {
        return assert!(run("shapes::several_threads_free_what_they_had_before_he_slept"));
    }
    in_magazines(4, 200_000, true);
}
