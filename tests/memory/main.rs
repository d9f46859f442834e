//! What a process does with its memory where it is told to, or forced to: huge pages, lazy releases, limits, pressure,
//! system calls that fail. Each test in a process of its own, which has the heap for its allocator.

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

#[global_allocator]
static HEAP: GlobalHeap = GlobalHeap::new();

/// Whether it ended well; what it said is shown.
fn ends_well(command: &mut Command) -> bool {
    let output = child::output(command);
    print!("{}", String::from_utf8_lossy(&output.stdout));
    if !output.status.success() {
        println!("{output:?}");
    }
    output.status.success()
}

/// Runs one test of this program in a child; whether it ended well.
fn run(name: &str) -> bool {
    ends_well(&mut command(name))
}

/// A line of a file in `/proc/self`, as a number of KiB, in bytes.
fn figure(file: &str, name: &str) -> usize {
    let text = std::fs::read_to_string(format!("/proc/self/{file}")).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).expect("a line");
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// Resident bytes of anonymous memory.
fn resident() -> usize {
    figure("status", "RssAnon")
}

/// What `/proc/self/smaps` says of the mapping that an address lies in: a line's words.
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

/// Waits for what another thread is about to do.
fn soon(what: impl Fn() -> bool) -> bool {
    (0..800).any(|_| {
        std::thread::sleep(Duration::from_millis(25));
        what()
    })
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 8).unwrap()
}

/// Blocks of about `bytes` bytes in all, written to.
fn blocks(bytes: usize, size: usize) -> Vec<Vec<u8>> {
    (0..bytes / size).map(|_| vec![1; size]).collect()
}

/// As many blocks of this size as can be had, up to `most`; freed again. How many.
fn room(size: usize, most: usize) -> usize {
    // A list inside the blocks themselves: there is no memory for another.
    let (mut last, mut count) = (std::ptr::null_mut::<u8>(), 0);
    // SAFETY: blocks are not empty and as large as a pointer; freed with their layout.
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

/// Allocates, frees, resizes by threads, with a look at every byte; nothing may be lost, and zero is zero.
fn work(rounds: usize) {
    std::thread::scope(|scope| {
        for seed in 1..4_usize {
            scope.spawn(move || work_alone(seed, rounds));
        }
    });
}

fn work_alone(seed: usize, rounds: usize) {
    let mut random = (seed as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut below = move |end: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 20) as usize % end
    };
    let mut kept: Vec<Vec<u8>> = Vec::new();
    let whole = |block: &[u8]| block.iter().all(|byte| Some(byte) == block.first());
    for round in 0..rounds {
        let most = [100, 5000, 80_000, 600_000][below(4)];
        let size = 1 + below(most);
        if below(4) == 0 {
            // SAFETY: the layout is not empty; read inside, freed with it.
            unsafe {
                let block = alloc_zeroed(layout(size));
                assert!(!block.is_null());
                assert!(std::slice::from_raw_parts(block, size).iter().all(|&byte| byte == 0));
                block.write_bytes(0xee, size);
                dealloc(block, layout(size));
            }
        }
        kept.push(vec![round as u8; size]);
        if kept.len() > 60 {
            let mut block = kept.swap_remove(below(60));
            assert!(whole(&block));
            if below(3) == 0 {
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
