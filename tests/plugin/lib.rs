//! A library with an allocator of its own, to be loaded and unloaded by `tests/global_process/libraries.rs`.

use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;

use pageheap::GlobalHeap;

#[global_allocator]
static HEAP: GlobalHeap = GlobalHeap::new();

/// Allocates, looks at and frees blocks of all sizes, by any thread. Whether each was as it was left.
#[unsafe(no_mangle)]
pub extern "C" fn plugin_work(seed: usize) -> bool {
    let mut kept: Vec<Vec<u8>> = Vec::new();
    for number in 0..100_usize {
        let size = (seed * 7919 + number * 104_729) % [100, 1000, 8_000, 60_000][number % 4] + 1;
        kept.push(vec![number as u8; size]);
        if number % 3 == 0 {
            let block = kept.swap_remove(number * 31 % kept.len());
            if block.iter().any(|&byte| byte != block[0]) {
                return false;
            }
        }
    }
    black_box(kept)
        .iter()
        .all(|block| block.iter().all(|&byte| byte == block[0]))
}

/// A block of 100 bytes that are `byte`, which the library never frees.
#[unsafe(no_mangle)]
pub extern "C" fn plugin_give(byte: u8) -> *const u8 {
    let layout = Layout::new::<[u8; 100]>();
    // SAFETY: written inside, if there is a block.
    unsafe {
        let block = HEAP.alloc(layout);
        if !block.is_null() {
            block.write_bytes(byte, 100);
        }
        block
    }
}
