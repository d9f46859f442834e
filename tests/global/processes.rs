//! What needs a process of its own: this test program again, with one test chosen and a variable set.

use std::process::{Command, Output};

use super::*;

const CHILD: &str = "PAGEHEAP_TEST_CHILD";

/// Runs the test `name` of this file in a child.
fn run(name: &str) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args([
            &format!("processes::{name}"),
            "--exact",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(CHILD, "1")
        .output()
        .unwrap()
}

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

#[test]
fn a_quarter_of_a_gigabyte_is_enough_to_start_and_half_is_usable() {
    const LIMIT: usize = 256 << 20;
    static HEAP: GlobalHeap = GlobalHeap::new();
    if !is_child() {
        let output = run("a_quarter_of_a_gigabyte_is_enough_to_start_and_half_is_usable");
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let limit = libc::rlimit {
        rlim_cur: LIMIT as libc::rlim_t,
        rlim_max: LIMIT as libc::rlim_t,
    };
    // SAFETY: a valid limit.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
    let fill = |size: usize| {
        let mut blocks = Vec::with_capacity(100_000);
        while blocks.len() < blocks.capacity()
            && let Some(block) = Block::new(&HEAP, layout(size, 8), 1)
        {
            blocks.push(block);
        }
        let used = blocks.len() * size;
        blocks.into_iter().for_each(|block| block.free(&HEAP));
        used
    };
    let first = fill(1 << 20);
    assert!(first >= LIMIT / 2, "{first}");
    assert!(fill(64 << 10) >= LIMIT / 2);
    assert!(fill(LIMIT / 4) >= LIMIT / 4);
    assert!(fill(1 << 20) >= first / 10 * 8);
}

/// Misuse ends the process with a message; each case is one that costs nothing to find.
macro_rules! aborts {
    ($($name:ident: $message:literal, $work:expr;)*) => {$(
        #[test]
        fn $name() {
            static HEAP: GlobalHeap = GlobalHeap::new();
            if !is_child() {
                let output = run(stringify!($name));
                let errors = String::from_utf8_lossy(&output.stderr);
                assert!(!output.status.success() && errors.contains($message), "{output:?}");
                return;
            }
            let work: fn(&GlobalHeap) = $work;
            work(&HEAP);
            HEAP.flush_thread();
        }
    )*};
}

aborts! {
    a_foreign_block_is_refused: "not of this heap", |heap| {
        Block::new(heap, layout(64, 8), 0).unwrap().free(heap);
        let stranger = Box::leak(Box::new([0_u8; 64]));
        // SAFETY: none: this is what must be found out.
        unsafe { heap.dealloc(stranger.as_mut_ptr(), layout(64, 8)) };
    };
    a_foreign_large_block_is_refused: "not of this heap", |heap| {
        Block::new(heap, layout(64, 8), 0).unwrap().free(heap);
        let stranger = vec![0_u8; 1 << 20].leak();
        // SAFETY: none: this is what must be found out.
        unsafe { heap.dealloc(stranger.as_mut_ptr(), layout(1 << 20, 8)) };
    };
    another_layout_is_refused: "wrong layout", |heap| {
        let block = Block::new(heap, layout(64, 8), 0).unwrap();
        // SAFETY: none: this is what must be found out.
        unsafe { heap.dealloc(block.memory, layout(640, 8)) };
    };
    the_inside_of_a_block_is_refused: "inside it", |heap| {
        let block = Block::new(heap, layout(64, 8), 0).unwrap();
        // SAFETY: none: this is what must be found out.
        unsafe { heap.dealloc(block.memory.add(8), layout(64, 8)) };
    };
    a_large_block_is_not_freed_twice: "freed twice", |heap| {
        let block = Block::new(heap, layout(1 << 20, 8), 0).unwrap();
        // SAFETY: none: this is what must be found out.
        unsafe {
            heap.dealloc(block.memory, block.layout);
            heap.dealloc(block.memory, block.layout);
        }
    };
    a_fresh_slot_cannot_be_freed: "not allocated", |heap| {
        let block = Block::new(heap, layout(1024, 8), 0).unwrap();
        // SAFETY: none: this is what must be found out.
        unsafe { heap.dealloc(block.memory.add(7 * 1024), layout(1024, 8)) };
    };
    a_freed_slot_written_to_is_found: "written to", |heap| {
        let blocks: Vec<_> = (0..8).map(|_| Block::new(heap, layout(1024, 8), 0).unwrap()).collect();
        let first = blocks[0].memory;
        blocks.into_iter().for_each(|block| block.free(heap));
        heap.flush_thread();
        for slot in 0..8 {
            // SAFETY: none: this is what must be found out.
            unsafe { first.add(slot * 1024).cast::<u32>().write(u32::MAX) };
        }
        let _kept: Vec<_> = (0..8).map(|_| Block::new(heap, layout(1024, 8), 0)).collect();
    };
}
