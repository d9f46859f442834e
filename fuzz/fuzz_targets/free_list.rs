//! See `lists::fuzz_free_list` in `tests/model/lists.rs`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| pageheap_fuzz::drive::lists::fuzz_free_list(bytes));
