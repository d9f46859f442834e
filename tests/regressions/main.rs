//! Bugs that were found by review or in use, each with the test that failed.

mod cache;
mod commit;
#[path = "../common/mod.rs"]
mod common;
mod debts;
mod gather;
mod holes;
mod idle;
mod limit;
mod lock;
mod misc;
mod proof;
mod region;
mod retire;
mod scavenge;
mod search;
