//! Properties: small functions are checked by counting, the heap against the naive model of `tests/model`.
//!
//! `PROPTEST_CASES` sets the number of cases for all of them.

mod aligned;
#[path = "../common/mod.rs"]
mod common;
mod heaps;
#[path = "../model/mod.rs"]
mod model;
mod words;

use proptest::test_runner::FileFailurePersistence;

/// A configuration with `default` cases, or as many as `PROPTEST_CASES` says.
fn cases(default: u32) -> proptest::test_runner::Config {
    let asked = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok());
    proptest::test_runner::Config {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "tests/properties/regressions.txt",
        ))),
        max_shrink_time: 10_000,
        cases: asked.unwrap_or(default),
        ..proptest::test_runner::Config::default()
    }
}
