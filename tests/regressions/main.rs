//! Bugs found by review or in use, each with the test that failed. Comments in the past tense describe the bug.

#[cfg(target_os = "linux")]
mod bias;
mod cache;
#[cfg(target_os = "linux")]
#[path = "../common/child.rs"]
mod child;
mod commit;
#[path = "../common/mod.rs"]
mod common;
mod debts;
#[cfg(target_os = "linux")]
#[path = "../common/filter.rs"]
mod filter;
mod full;
mod gather;
mod holes;
mod idle;
mod limit;
mod lock;
mod misc;
mod proof;
#[cfg(target_os = "linux")]
mod realloc;
mod region;
mod retire;
mod scavenge;
mod search;

/// How long to look for a race: `full` if `PAGEHEAP_TEST_FULL` is set, a quarter otherwise.
fn how_long(full: u64) -> std::time::Duration {
    std::time::Duration::from_secs(if common::is_full() { full } else { full.div_ceil(4) })
}
