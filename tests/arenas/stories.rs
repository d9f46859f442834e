//! Random stories: see `tests/model/arenas.rs`. `PROPTEST_CASES` raises their number.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence};

use super::twins;

/// A configuration with `default` cases, or as many as `PROPTEST_CASES` asks for.
pub fn cases(default: u32) -> Config {
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

/// Pseudo-random bytes, the same for the same seed, which must not be 0.
pub fn by_chance(mut seed: u64) -> impl FnMut() -> u8 {
    move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 32) as u8
    }
}

/// A few fixed stories, short enough for an interpreter that checks every access.
#[test]
fn noise() {
    let mut noise = by_chance(0x9e37_79b9_7f4a_7c15);
    let most = if cfg!(miri) { 200 } else { 400 };
    for len in [0, 1, 20, 50, 100, 200, 400].into_iter().filter(|&len| len <= most) {
        let story: Vec<u8> = (0..len).map(|_| noise()).collect();
        twins::arena(&story);
        twins::pool(&story);
    }
}
