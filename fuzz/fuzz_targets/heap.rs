//! See `drive::heap`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| pageheap_fuzz::drive::heap(bytes));
