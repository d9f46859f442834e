//! Stories told by chance: see `tests/model/arenas.rs`. `PROPTEST_CASES` raises the number.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence};

use super::twins;

fn cases(default: u32) -> Config {
    let asked = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok());
    Config {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct("tests/arenas/regressions.txt"))),
        cases: asked.unwrap_or(default),
        ..Config::default()
    }
}

proptest! {
    #![proptest_config(cases(150))]

    #[test]
    fn an_arena_and_its_twin(story in vec(any::<u8>(), 0..600)) {
        twins::arena(&story);
    }

    #[test]
    fn a_pool_and_its_twin(story in vec(any::<u8>(), 0..600)) {
        twins::pool(&story);
    }
}
