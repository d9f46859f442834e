//! Marks: the first word of a free slot that the program has used holds a keyed value, by which a double free is
//! detected.
//!
//! ```text
//!   word  =  the slot's address  xor  the process's key
//! ```
//!
//! An allocation wipes the word. So if a slot is freed that has this word, it is free already, barring accidents. The
//! key is drawn when the first heap is opened, from where the system has placed things, so that no program has such a
//! word among its data by design. (A program that reads memory it never wrote may find marks there: the key protects
//! against accidents, not attackers.) A mark that is copied to the beginning of another block, by moving bytes that
//! were never written, is no mark there, and one that comes back is seen (`stray.rs`).
//!
//! Worked: A, B and A again are freed. The first two frees write marks. The third finds 0xFFDE in the upper two bytes
//! of A's word, as in every mark, and takes the slow path (`twice.rs`), which finds A in the magazine. A block whose
//! first word has those two bytes by accident also takes that path, where the other six are compared: 20 to 30 ns,
//! where other frees take 2.
//!
//! Only those two bytes are read at first: if the program has just written to the block's first byte, a read of the
//! whole word would stall on that store. Data rarely have 0xFFDE in that place. Small negative integers have 0xFFFF,
//! and so have white pixels; infinities, NaNs, addresses that interpreters tag, and texts have others. (But a fourth
//! integer of 16 bits may be -34, and a second pixel opaque with 0xDE beside the alpha.) Marks had 0xFFFF once: then
//! half the nodes of a JSON tree took the slow path, for what a negative number had left in their padding
//! (`docs/measurements.md`, "JSON on Zen 4").
//!
//! **The upper two bytes of an address** are zero in programs, so that a mark has those of the key. In a kernel they
//! may be anything: ones, if it lives in the upper half of the addresses, or the end of 57 bits. So without std they
//! are left out of marks: no two slots of a heap differ in them alone. With std they are not, nor by the statement in
//! `global/inline.rs`. If an address has such bits there, as in a [`Region`](crate::source::Region) whose addresses
//! are tagged, no mark is recognised.
//!
//! **With 32-bit pointers** a word is 32 bits, and its upper two bytes are compared with those of the slot's address
//! under the key. So one random word in 65,536 takes the slow path in vain, and one in 2³² is a mark by chance, which
//! loses the block.
//!
//! Cost: five instructions for a free, one for an allocation. (Without std one or two more for a free.)

use crate::sync::OnceWord;

/// Zero until the first heap is opened, and never changed afterwards.
static KEY: OnceWord = OnceWord::new();

/// Marks tell addresses apart by this many bits, if a word has room for more.
const ADDRESS_BITS: u32 = 48;

/// What every key has in the bits above those, if a word has 64 bits, so that they can be compared with a constant:
/// 0xFFDE. It is one byte, sign-extended to two, and so are the constants of the comparisons. With a constant of two
/// bytes the instruction is longer, and some x86 decoders stall on it.
pub const UPPER: i16 = -34;

/// Those bits. None if a word has 32 bits.
const UPPER_MASK: usize = if usize::BITS < u64::BITS {
    0
} else {
    (u64::MAX << ADDRESS_BITS) as usize
};

/// What they are in every key.
const UPPER_BITS: usize = ((UPPER as u64) << ADDRESS_BITS) as usize & UPPER_MASK;

/// What of a slot's address is in its mark: all but those bits where it may have any. With std it is taken to have
/// none: to leave them out would take an instruction more.
const MARKED_BITS: usize = if cfg!(feature = "std") { usize::MAX } else { !UPPER_MASK };

/// How far to shift a word for its upper two bytes.
const UPPER_SHIFT: u32 = usize::BITS - u16::BITS;

/// The position of the upper two bytes in the word, in units of two bytes.
const UPPER_INDEX: usize = if cfg!(target_endian = "little") {
    size_of::<usize>() / 2 - 1
} else {
    0
};

/// The position of those two bytes in the word, in bytes.
pub const UPPER_AT: usize = size_of::<u16>() * UPPER_INDEX;

/// Draws the key, once, from addresses that the system chooses. Called before any slot is used.
pub fn draw_key() {
    let here = 0;
    let mut key = (&raw const here).addr().rotate_left(17) ^ (&raw const KEY).addr().rotate_left(31);
    // The end of splitmix64: each bit comes to depend on all bits.
    for (shift, factor) in [(30, 0xbf58_476d_1ce4_e5b9_u64), (27, 0x94d0_49bb_1331_11eb)] {
        key = (key ^ key >> (shift % usize::BITS)).wrapping_mul(factor as usize);
    }
    // A thread that has a slot has learnt of a heap that was opened after this.
    KEY.set((key & !UPPER_MASK | UPPER_BITS).max(1));
}

/// The key of all marks.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Key(usize);

/// The key, once it has been drawn.
#[inline(always)]
pub fn key() -> Key {
    Key(KEY.get())
}

/// Writes the slot's mark.
///
/// # Safety
///
/// The caller owns the slot, of one of a heap's classes: a word long at least, and aligned for one.
#[inline(always)]
pub unsafe fn write(key: Key, slot: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { slot.cast::<usize>().write(of(key, slot)) };
}

/// Wipes the word of a slot that the program gets.
///
/// # Safety
///
/// As for [`write()`].
#[inline(always)]
pub unsafe fn wipe(slot: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { slot.cast::<usize>().write(0) };
}

/// Whether a freed slot may bear a mark: by the upper two bytes.
///
/// # Safety
///
/// As for [`write()`].
#[inline(always)]
pub unsafe fn seems_free(slot: *mut u8) -> bool {
    let marked = if usize::BITS < u64::BITS {
        (of(key(), slot) >> UPPER_SHIFT) as u16
    } else {
        UPPER as u16
    };
    // Miri knows whether they were written, and takes the read for wrong where they were not.
    if cfg!(miri) {
        return false;
    }
    // SAFETY: the caller's promise; two bytes of the word. The program may never have written those bytes; they are in
    // memory like all others, and the compiler concludes nothing from a volatile read.
    let upper = unsafe { slot.cast::<u16>().add(UPPER_INDEX).read_volatile() };
    upper == marked
}

/// Whether a freed slot bears its mark.
///
/// # Safety
///
/// As for [`write()`].
#[inline]
pub unsafe fn is_on(slot: *mut u8) -> bool {
    // SAFETY: the caller's promise; as in `seems_free`.
    unsafe { seems_free(slot) && slot.cast::<usize>().read_volatile() == of(key(), slot) }
}

/// The mark of the slot, under that key.
#[inline(always)]
fn of(key: Key, slot: *mut u8) -> usize {
    slot.addr() & MARKED_BITS ^ key.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "no mark is looked at")]
    fn a_mark_is_seen_and_nothing_else() {
        draw_key();
        let mut word = 0_usize;
        let slot = (&raw mut word).cast::<u8>();
        // SAFETY: our own word.
        unsafe {
            write(key(), slot);
            assert!(seems_free(slot) && is_on(slot));
            wipe(slot);
            assert!(!seems_free(slot));
            // Its address; marks of other slots, copied here; other bits changed.
            let others = [3, 12, 20, UPPER_SHIFT, usize::BITS - 1].map(|bit| of(key(), slot) ^ 1 << bit);
            for other in [1, slot.addr()].into_iter().chain(others) {
                slot.cast::<usize>().write(other);
                assert!(!is_on(slot), "{other:#x}");
                // With 32-bit pointers also the address, for one key in 2¹⁵.
                let upper = (other ^ of(key(), slot)) >> UPPER_SHIFT;
                assert_eq!(seems_free(slot), upper == 0, "{other:#x}");
            }
        }
    }

    /// What programs often have at the beginning of a block. (With 32-bit pointers it depends on the slot's address.)
    #[test]
    #[cfg(target_pointer_width = "64")]
    fn usual_data_are_taken_for_no_mark() {
        draw_key();
        let mut word = 0_usize;
        let slot = (&raw mut word).cast::<u8>();
        let doubled = |half: u32| u64::from(half) << 32 | u64::from(half);
        let words = [
            // Small negative integers of 32 and 64 bits, and pixels: white, and the usual greys.
            -1_i64 as u64,
            i64::from(i32::MIN) as u64,
            doubled(-2_i32 as u32),
            doubled(0xffdd_dddd),
            doubled(0xffcc_cccc),
            // Infinities and NaNs.
            f64::NEG_INFINITY.to_bits(),
            f64::NAN.to_bits() | 1 << 63,
            doubled(f32::NEG_INFINITY.to_bits()),
            doubled(f32::NAN.to_bits() | 1 << 31),
            // Addresses, of the kernel too.
            slot.addr() as u64,
            !(slot.addr() as u64),
            // Texts.
            u64::from_ne_bytes(*b"UTF-8 \xc3\xbf"),
            0xff9f_ff61_ff5e_ff01,
        ];
        for data in words {
            // SAFETY: our own word.
            let seen = unsafe {
                slot.cast::<u64>().write(data);
                seems_free(slot)
            };
            assert!(!seen, "{data:#x}");
        }
    }

    /// Of a kernel's addresses; and of tags, or of 57 bits.
    #[test]
    #[cfg(all(target_pointer_width = "64", not(feature = "std")))]
    fn the_upper_bits_of_an_address_are_in_no_mark() {
        draw_key();
        for address in [0xffff_8000_0010_0000, 0x0123_4567_89ab_c000] {
            let mark = of(key(), core::ptr::without_provenance_mut(address));
            assert_eq!((mark >> UPPER_SHIFT) as i16, UPPER, "{address:#x}");
        }
    }
}
