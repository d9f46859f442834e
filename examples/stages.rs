//! Where is the memory? Fills a heap from several threads, empties it, releases memory, and counts pages after each
//! stage.
//!
//! ```sh
//! cargo run --release --example stages            # 4 threads, 256 MiB
//! cargo run --release --example stages -- 8 1024
//! ```

use std::fmt::Display;
use std::time::Instant;

use pageheap::source::System;
use pageheap::{Cache, Config, PageCount, PageHeap, PageRun};

type Heap = PageHeap<System>;

fn main() {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<usize>());
    let mut next = |default| match numbers.next() {
        None => default,
        Some(Ok(number)) if number > 0 => number,
        Some(_) => panic!("usage: stages [threads] [MiB]"),
    };
    let (threads, mebibytes) = (next(4), next(256));
    let heap = Heap::new(System, Config::new(mebibytes << 21)).expect("address space for the heap");
    let pages = (mebibytes << 20) / heap.stats().page_bytes;
    show("a new heap", &heap);

    let begin = Instant::now();
    let kept = on_threads(threads, |seed| fill(&heap, seed as u64 + 1, pages / threads));
    show(
        format_args!("filled by {threads} threads, {:.1?}", begin.elapsed()),
        &heap,
    );

    let begin = Instant::now();
    let mut runs: Vec<PageRun> = kept.into_iter().flatten().collect();
    let half = runs.split_off(runs.len() / 2);
    free(&heap, half);
    show(
        format_args!("half of it freed in one batch, {:.1?}", begin.elapsed()),
        &heap,
    );

    free(&heap, runs);
    show("all of it freed", &heap);

    let begin = Instant::now();
    let released = heap.scavenge(PageCount(usize::MAX));
    show(
        format_args!("{released} given back to the system, {:.1?}", begin.elapsed()),
        &heap,
    );
    heap.check().expect("the heap's books are right");
}

fn on_threads<T: Send>(threads: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|index| scope.spawn(move || work(index))).collect();
        let join = |worker: std::thread::ScopedJoinHandle<'_, T>| worker.join().expect("no worker panics");
        workers.into_iter().map(join).collect()
    })
}

/// Allocates until it holds `pages` pages, mostly a few at a time, freeing one run in four again; writes to each page.
fn fill(heap: &Heap, mut seed: u64, pages: usize) -> Vec<PageRun> {
    let cache = heap.cache().expect("a cache for each thread");
    let (mut held, mut runs) = (0, Vec::new());
    while held < pages {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        let wish = match seed % 64 {
            0 => 256,
            1..8 => 16,
            few => 1 + few as usize % 4,
        };
        let run = cache.allocate(PageCount(wish)).expect("room for what was asked");
        touch(&cache, run);
        if seed >> 32 & 3 == 0 {
            // SAFETY: the run is ours, and nothing uses it any more.
            unsafe { cache.free(run) };
        } else {
            held += wish;
            runs.push(run);
        }
    }
    runs
}

fn touch(cache: &Cache<'_, System>, run: PageRun) {
    let bytes = cache.heap().pointer(run);
    for offset in (0..bytes.len()).step_by(4096) {
        // SAFETY: inside the run, which is ours: memory from the system.
        unsafe { bytes.cast::<u8>().add(offset).write(1) };
    }
}

fn free(heap: &Heap, mut runs: Vec<PageRun>) {
    // SAFETY: the runs are ours, and nothing uses them any more.
    unsafe { heap.free_batch(&mut runs) };
}

fn show(stage: impl Display, heap: &Heap) {
    println!("--- {stage}");
    println!("{}", heap.stats());
    if let Some(bytes) = resident() {
        println!("process   {:>9.1} MiB resident", bytes as f64 / f64::from(1 << 20));
    }
    println!();
}

/// Resident bytes of this process, if the system reports them in `/proc`.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? << 10)
}
