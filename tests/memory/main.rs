//! What a process does with its memory when it is told to or forced to: huge pages, lazy releases, limits, pressure,
//! failing system calls. Each test runs in a process of its own, with the heap as its allocator.

#![cfg(target_os = "linux")]

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::process::Command;
use std::time::Duration;

use pageheap::GlobalHeap;

#[path = "../common/child.rs"]
mod child;
mod churn;
mod clock;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/filter.rs"]
mod filter;
mod forks;
mod guests;
mod holes;
mod hostile;
mod huge;
mod lazy;
mod limits;
mod pressure;
mod zeroed;

use child::{command, is_one as is_child};
use common::by_width;
use common::bytes::all_are;
use common::random::Random;

#[global_allocator]
static HEAP: GlobalHeap = GlobalHeap::new();

/// Whether the command succeeded; its output is shown.
fn ends_well(command: &mut Command) -> bool {
    let output = child::output(command);
    print!("{}", String::from_utf8_lossy(&output.stdout));
    if !output.status.success() {
        println!("{output:?}");
    }
    output.status.success()
}

/// Runs one test of this program in a child and says whether it succeeded.
fn run(name: &str) -> bool {
    ends_well(&mut command(name))
}

/// The figure in a line of a file in `/proc/self`: given in KiB, returned in bytes.
fn figure(file: &str, name: &str) -> usize {
    let text = std::fs::read_to_string(format!("/proc/self/{file}")).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).expect("a line");
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// Resident bytes of anonymous memory.
fn resident() -> usize {
    figure("status", "RssAnon")
}

/// The words of a line that `/proc/self/smaps` has about the mapping of an address.
fn mapping(address: *const u8, name: &str) -> Vec<String> {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    for line in text.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        let bounds = first.split_once('-').map(|(from, to)| {
            let number = |text| usize::from_str_radix(text, 16).ok();
            (number(from), number(to))
        });
        if let Some((Some(from), Some(to))) = bounds {
            inside = (from..to).contains(&address.addr());
        } else if inside && first == name {
            return line.split_whitespace().skip(1).map(str::to_owned).collect();
        }
    }
    panic!("no {name} of {address:p}");
}

/// Waits for something that another thread is about to do.
fn soon(what: impl Fn() -> bool) -> bool {
    (0..2400).any(|_| {
        std::thread::sleep(Duration::from_millis(25));
        what()
    })
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 8).unwrap()
}

/// Blocks of about `bytes` bytes in total, all written to.
fn blocks(bytes: usize, size: usize) -> Vec<Vec<u8>> {
    (0..bytes / size).map(|_| vec![1; size]).collect()
}

/// Allocates blocks of this size until refused, `most` at most, and frees them again. Returns how many there were.
fn room(size: usize, most: usize) -> usize {
    // The list lies inside the blocks themselves: there is no memory for another.
    let (mut last, mut count) = (std::ptr::null_mut::<u8>(), 0);
    // SAFETY: blocks are not empty and large enough for a pointer; each is freed with its layout.
    unsafe {
        while count < most {
            let block = alloc(layout(size));
            if block.is_null() {
                break;
            }
            block.cast::<*mut u8>().write(last);
            (last, count) = (block, count + 1);
        }
        while !last.is_null() {
            let next = last.cast::<*mut u8>().read();
            dealloc(last, layout(size));
            last = next;
        }
    }
    count
}

/// Threads allocate, free and resize, and verify every byte: nothing may be lost, and zeroed memory is zero.
fn work(rounds: usize) {
    std::thread::scope(|scope| {
        for seed in 1..4_usize {
            scope.spawn(move || work_alone(seed, rounds));
        }
    });
}

fn work_alone(seed: usize, rounds: usize) {
    let mut random = Random(seed as u64);
    let mut kept: Vec<Vec<u8>> = Vec::new();
    let whole = |block: &[u8]| all_are(block, block[0]);
    for round in 0..rounds {
        let most = [100, 5000, 80_000, 600_000][random.below(4)];
        let size = 1 + random.below(most);
        if random.below(4) == 0 {
            // SAFETY: the layout is not empty; reads and writes are inside the block; it is freed with its layout.
            unsafe {
                let block = alloc_zeroed(layout(size));
                assert!(!block.is_null());
                assert!(all_are(std::slice::from_raw_parts(block, size), 0));
                block.write_bytes(0xee, size);
                dealloc(block, layout(size));
            }
        }
        kept.push(vec![round as u8; size]);
        if kept.len() > 60 {
            let mut block = kept.swap_remove(random.below(60));
            assert!(whole(&block));
            if random.below(3) == 0 {
                block.resize(size, block[0]);
                assert!(whole(&block));
            }
        }
        if round % 100 == 0 {
            HEAP.scavenge(pageheap::PageCount(200));
        }
    }
    assert!(kept.iter().all(|block| whole(block)));
}
