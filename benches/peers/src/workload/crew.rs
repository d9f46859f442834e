//! Threads that live as long as a workload, so that its rounds measure the work and not thread creation.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};

/// What a thread of a crew does: a number of operations.
pub type Hand = Box<dyn FnMut(u64) + Send>;

/// Some threads, each with its own state, that begin and end a round together.
#[derive(Debug)]
pub struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// Operations for each thread in the round that begins; zero ends the threads.
    ops: AtomicU64,
    begin: Barrier,
    end: Barrier,
}

impl Crew {
    /// `make(i)` runs on the `i`th thread.
    pub fn new(count: usize, make: impl Fn(usize) -> Hand + Send + Sync + 'static) -> Self {
        let shared = Arc::new(Shared {
            ops: AtomicU64::new(0),
            begin: Barrier::new(count + 1),
            end: Barrier::new(count + 1),
        });
        let make = Arc::new(make);
        let threads = (0..count).map(|index| {
            let (shared, make) = (Arc::clone(&shared), Arc::clone(&make));
            thread::spawn(move || {
                let mut hand = make(index);
                loop {
                    shared.begin.wait();
                    // Relaxed: the barrier orders.
                    let ops = shared.ops.load(Ordering::Relaxed);
                    if ops == 0 {
                        return;
                    }
                    hand(ops);
                    shared.end.wait();
                }
            })
        });
        Self {
            threads: threads.collect(),
            shared,
        }
    }

    /// A round of `ops` operations over all threads.
    pub fn work(&self, ops: u64) {
        // Relaxed: the barrier orders.
        self.shared
            .ops
            .store((ops / self.threads.len() as u64).max(1), Ordering::Relaxed);
        self.shared.begin.wait();
        self.shared.end.wait();
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        // Relaxed: the barrier orders.
        self.shared.ops.store(0, Ordering::Relaxed);
        self.shared.begin.wait();
        for thread in self.threads.drain(..) {
            thread.join().expect("no thread of a workload panics");
        }
    }
}
