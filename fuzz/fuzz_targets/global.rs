//! See `src/objects.rs`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| pageheap_fuzz::drive::objects::global(bytes));
