//! Models for loom: few threads, every interleaving.

mod apart;
mod aside;
mod arenas;
mod bias;
mod caches;
mod claims;
mod free_lists;
mod gather;
mod give;
mod growth;
mod hints;
mod long;
mod lots;
mod negative;
mod negative_arenas;
mod negative_hints;
mod negative_lists;
mod owner;
mod negative_stores;
mod objects;
mod paper;
mod register;
mod rounds;
mod preempted;
mod proof;
mod reach;
mod scavenge;
mod seize;
mod stake;
mod summaries;
mod sync;
mod world;

use core::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Instant;

pub use loom::thread::spawn;

/// Runs `body` in every interleaving with at most `preemptions` preemptions, or `LOOM_MAX_PREEMPTIONS` if that is
/// more. Prints how many there were.
pub fn explore(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    explore_with(loom::model::Builder::new(), preemptions, body);
}

/// The same, but only the first `most` interleavings, unless `LOOM_MAX_PREEMPTIONS` is set.
pub fn explore_first(most: usize, preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    if builder.preemption_bound.is_none() {
        builder.max_permutations = Some(most);
    }
    explore_with(builder, preemptions, body);
}

fn explore_with(mut builder: loom::model::Builder, preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    builder.preemption_bound = builder.preemption_bound.max(Some(preemptions));
    builder.max_branches = 50_000;
    let (runs, began) = (Arc::new(AtomicUsize::new(0)), Instant::now());
    let counter = Arc::clone(&runs);
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        body();
    });
    let name = std::thread::current().name().unwrap_or("?").to_owned();
    let (runs, seconds) = (runs.load(Ordering::Relaxed), began.elapsed().as_secs_f64());
    println!("{name}: {runs} interleavings, {seconds:.1} s");
}
