//! Places addressed by one register, for words that are written by one call and read by the next.
//!
//! ```text
//!   indexed      pop   mov top, [thread + seat]     mov [thread + seat], top − 8
//!                push  mov top, [thread + seat]     mov [thread + seat], top + 8         4.9 ns until the next pop
//!   unindexed    pop   mov top, [magazine]          mov [magazine], top − 8
//!                push  mov top, [magazine]          mov [magazine], top + 8              1.3 ns
//! ```
//!
//! Each pop waits for the word that the last push stored, and the other way round. Some processors predict which store
//! a load will read, from where the two instructions lie, and pass the value on at once. Intel's Emerald Rapids, where
//! these figures are from, does so only if neither instruction has an index register. Compilers fold `base + offset`
//! into the instruction as base and index, as that is one instruction less.
//!
//! Worked: there a pair of 64 B takes 4.8 ns with an index and 2.9 without, although it has 62 instructions instead of
//! 60. With a neighbour on the other half of the core it takes 6 either way (`docs/measurements.md`, "Without an
//! index").
//!
//! Cost: one addition for each place. If the offset is a constant, there was no index, and the addition is in vain.

/// The same place. The compiler does not know that its address is a sum, so it computes that in a register.
#[inline(always)]
#[allow(clippy::pointers_in_nomem_asm_block, reason = "the address is not followed")]
pub(crate) fn unindexed<T>(place: &T) -> &T {
    #[cfg(all(target_arch = "x86_64", target_pointer_width = "64", not(miri)))]
    {
        let mut address = core::ptr::from_ref(place);
        // SAFETY: no instruction at all, only a comment. So it reads and writes nothing, and the register keeps its
        // value: `address` is still the reference that it was.
        unsafe {
            core::arch::asm!(
                "/* {address} */",
                address = inout(reg) address,
                options(pure, nomem, nostack, preserves_flags)
            );
            &*address
        }
    }
    #[cfg(not(all(target_arch = "x86_64", target_pointer_width = "64", not(miri))))]
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_same_place() {
        let words = [1_u64, 2, 3];
        assert!(words.iter().all(|word| core::ptr::eq(word, unindexed(word))));
        assert_eq!(words.map(|word| *unindexed(&word)), words);
    }
}
