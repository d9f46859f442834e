//! Memory given back lazily: resident until the kernel wants it, never taken for zero; and ways to release it at once.

use std::alloc::GlobalAlloc;
use std::time::Instant;

use super::*;

/// Ticks until there is nothing left to do.
fn rest(heap: &GlobalHeap) {
    let begin = Instant::now();
    loop {
        let pause = heap.tick(&|| begin.elapsed());
        if pause == Duration::MAX {
            return;
        }
        std::thread::sleep(pause.min(Duration::from_millis(100)));
        assert!(begin.elapsed() < Duration::from_secs(60), "{}", heap.stats());
    }
}

#[test]
fn it_is_the_kernels_when_it_wants_it_and_gone_when_we_do() {
    if !is_child() {
        return assert!(run("lazy::it_is_the_kernels_when_it_wants_it_and_gone_when_we_do"));
    }
    static LAZY: GlobalHeap = GlobalHeap::new().background(false).release_lazily(true);
    const BYTES: usize = 64 << 20;
    // SAFETY: layouts are not empty; reads and writes are inside the blocks, which are freed with their layouts.
    unsafe {
        let block = LAZY.alloc(layout(BYTES));
        block.write_bytes(7, BYTES);
        LAZY.dealloc(block, layout(BYTES));
        rest(&LAZY);
        let stats = LAZY.stats().pages;
        assert!(stats.released_lazily >= (BYTES / 8192) as u64, "{stats}");
        assert_eq!(stats.released, stats.released_lazily, "all of it, once: {stats}");
        let lazy = figure("smaps_rollup", "LazyFree");
        println!("{} MiB are the kernel's if it wants them", lazy >> 20);
        assert!(lazy >= BYTES * 9 / 10, "{lazy}");
        // Honest: whether it is still there is unknown, so it counts as backed.
        assert!(stats.backed.0 * 8192 >= BYTES);
        // And it is not taken for zero.
        for size in [BYTES / 16, 100_000, 5000] {
            let zero = LAZY.alloc_zeroed(layout(size));
            assert!((0..size).all(|at| zero.add(at).read() == 0));
            zero.write_bytes(9, size);
            LAZY.dealloc(zero, layout(size));
        }
        let before = resident();
        assert!(LAZY.release(usize::MAX) >= BYTES);
        assert!(resident() + BYTES * 9 / 10 <= before, "{} of {before}", resident());
        assert!(LAZY.stats().pages.backed.0 < 100, "{}", LAZY.stats());
    }
}

#[test]
fn the_environment_has_the_last_word() {
    const NAME: &str = "lazy::the_environment_has_the_last_word";
    if !is_child() {
        for way in ["lazily", "at-once", "nonsense"] {
            assert!(ends_well(command(NAME).env("PAGEHEAP_RELEASE", way)), "{way}");
        }
        return;
    }
    // Nobody tells it that the system is short of memory: then it would all be released at once.
    static OWN: GlobalHeap = GlobalHeap::new().system_root("/nowhere");
    let way = std::env::var("PAGEHEAP_RELEASE").unwrap();
    // SAFETY: the layout is not empty; writes are inside the block; it is freed with its layout.
    unsafe {
        let blocks: Vec<_> = (0..640).map(|_| OWN.alloc(layout(100_000))).collect();
        for block in blocks {
            block.write_bytes(1, 100_000);
            OWN.dealloc(block, layout(100_000));
        }
    }
    let gone = || OWN.stats().pages.released as usize >= (48 << 20) / 8192;
    assert!(soon(gone), "{}", OWN.stats());
    let pages = OWN.stats().pages;
    assert_eq!(pages.released_lazily > 0, way == "lazily", "{pages}");
}

/// Verified blocks in a heap whose memory is constantly released lazily.
#[test]
fn nobodys_page_is_altered_and_nothing_lazy_is_zero() {
    const NAME: &str = "lazy::nobodys_page_is_altered_and_nothing_lazy_is_zero";
    if !is_child() {
        return assert!(ends_well(command(NAME).env("PAGEHEAP_RELEASE", "lazily")));
    }
    work(if cfg!(debug_assertions) { 600 } else { 6000 });
    HEAP.flush_thread();
    HEAP.scavenge(pageheap::PageCount(usize::MAX));
    assert!(HEAP.stats().pages.released_lazily > 0);
    work(100);
}
