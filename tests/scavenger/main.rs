//! The scavenger's policy as a function of numbers, and its driver on a clock of our own.

use std::cell::Cell;
use std::time::Duration;

use pageheap::source::Simulated;
use pageheap::{Clock, Config, PageCount, PageHeap};

#[path = "../common/mod.rs"]
mod common;
mod holes;
mod index;
mod lazy;
mod limit;
mod pacer;
mod picture;
mod retention;
mod snapshot;
mod tick;

use common::bytes::all_are;
use common::{BASE, addresses, by_width, new_heap};

const SECOND: u64 = 1_000_000_000;
const MILLISECOND: u64 = 1_000_000;

/// A clock that is set by hand. Each reading of the work adds a little to it.
#[derive(Debug, Default)]
struct Hand {
    now: Cell<Duration>,
    work: Cell<Duration>,
    /// What each reading of the work costs.
    step: Duration,
}

impl Clock for Hand {
    fn now(&self) -> Duration {
        self.now.get()
    }

    fn work(&self) -> Duration {
        self.work.set(self.work.get() + self.step);
        self.work.get()
    }
}

impl Hand {
    fn pass(&self, time: Duration) {
        self.now.set(self.now.get() + time);
    }
}

/// One that is far from zero, and on which work takes time.
fn hand() -> Hand {
    Hand {
        now: Cell::new(Duration::from_secs(1)),
        step: Duration::from_micros(20),
        ..Hand::default()
    }
}

/// Takes `pages` pages, and frees those for which `free` holds.
fn torn(heap: &PageHeap<Simulated>, pages: usize, free: impl Fn(usize) -> bool) -> usize {
    let runs: Vec<_> = (0..pages).map(|_| heap.allocate(PageCount(1)).unwrap()).collect();
    let mut freed: Vec<_> = runs.into_iter().filter(|run| free(run.start().0)).collect();
    let count = freed.len();
    // SAFETY: just allocated; nothing uses them.
    unsafe { heap.free_batch(&mut freed) };
    count
}
