//! What stands in the first word of a free slot that the program had: a key, by which a slot that comes back is seen to
//! be free.
//!
//! ```text
//!   word  =  number · 2³²  xor  the slot's address  xor  the process's key
//!
//!   number   0: in a magazine, or a rack, or one itself
//!            of the next slot: on its span's list
//! ```
//!
//! Who takes a slot out wipes the word. So a slot that comes back with a word that makes a small number is free
//! already, but for an accident: the key is drawn when the first heap is opened, from where the system has put things,
//! so that no program's data makes one by design. (Who reads memory that he never wrote may find marks in it: the key
//! is against accidents, not against who looks for it.) A mark that is copied to another block's beginning, by who
//! moves bytes that he never wrote, is none there.
//!
//! Worked: A, B and A again are freed. The first word of each is its mark. The third call sees that the upper two bytes
//! of A's word are ones, as in every key, and goes the slow way (`twice.rs`), which finds A in the magazine. A block
//! that begins with a small negative number goes that way too, where under the key it makes no small one: ~20 ns.
//!
//! Only those two bytes are looked at first: a program that has just written to the first byte of a block would have to
//! wait for the whole word.
//!
//! **Where pointers have 32 bits** a word is 32 bits, the number is not shifted, and the upper two bytes are to be
//! those of the slot's address under the key. So of random words one in 65,536 is looked for in vain, and one in 2³² is
//! a mark by chance: then a block is lost. Below 64 bytes, where numbers of neighbours are possible too, it is one in
//! 2²²; and there a mark copied from less than a kilobyte away is one.
//!
//! Cost: five instructions where a block is freed, one where one is allocated.

use crate::sync::OnceWord;

/// Zero until the first heap is opened, and never changed afterwards.
static KEY: OnceWord = OnceWord::new();

/// Addresses are shorter than this, where they leave room for more.
const ADDRESS_BITS: u32 = 48;

/// The bits behind those, all of which every key has: to be compared with a constant. None of 32.
const UPPER_BITS: usize = if usize::BITS < u64::BITS {
    0
} else {
    (u64::MAX << ADDRESS_BITS) as usize
};

/// Where a number begins in a word: above what addresses of neighbours differ in.
const NUMBER_SHIFT: u32 = if usize::BITS < u64::BITS { 0 } else { 32 };

/// How far to shift a word for its upper two bytes.
const UPPER_SHIFT: u32 = usize::BITS - u16::BITS;

/// Where they are in it, in such steps.
const UPPER: usize = if cfg!(target_endian = "little") {
    size_of::<usize>() / 2 - 1
} else {
    0
};

/// The key, drawn by whoever is first: from addresses that the system chooses. Before any slot is used.
pub fn draw_key() {
    let here = 0;
    let mut key = (&raw const here).addr().rotate_left(17) ^ (&raw const KEY).addr().rotate_left(31);
    // The end of splitmix64: each bit comes to depend on all.
    for (shift, factor) in [(30, 0xbf58_476d_1ce4_e5b9_u64), (27, 0x94d0_49bb_1331_11eb)] {
        key = (key ^ key >> (shift % usize::BITS)).wrapping_mul(factor as usize);
    }
    // Who has a slot has been told of the heap that was opened behind this.
    KEY.set((key | UPPER_BITS).max(1));
}

/// The key of all marks.
#[derive(Clone, Copy, Debug)]
pub struct Key(usize);

/// The key, once it has been drawn.
#[inline(always)]
pub fn key() -> Key {
    Key(KEY.get())
}

/// Writes the mark of a slot in a magazine.
///
/// # Safety
///
/// The slot is the caller's, of one of a heap's classes: a word long at least, and aligned for one.
#[inline(always)]
pub unsafe fn write(key: Key, slot: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { slot.cast::<usize>().write(slot.addr() ^ key.0) };
}

/// Writes a number.
///
/// # Safety
///
/// As for [`write()`].
#[inline(always)]
pub unsafe fn link_number(slot: *mut u8, number: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        slot.cast::<usize>()
            .write((number as usize) << NUMBER_SHIFT ^ slot.addr() ^ key().0)
    };
}

/// The number that [`link_number`] wrote; if something else stands there more than any slot has, as a rule.
///
/// # Safety
///
/// The slot is the caller's, as for [`write()`].
#[inline(always)]
pub unsafe fn number(slot: *mut u8) -> u32 {
    // SAFETY: the caller's promise.
    let word = unsafe { slot.cast::<usize>().read() };
    u32::try_from(number_in(slot, word)).unwrap_or(u32::MAX)
}

/// The number in a slot's word. What is below a number is above it here.
#[inline(always)]
fn number_in(slot: *mut u8, word: usize) -> usize {
    (word ^ slot.addr() ^ key().0).rotate_right(NUMBER_SHIFT)
}

/// Wipes the word of a slot that leaves the heap's hands.
///
/// # Safety
///
/// As for [`write()`].
#[inline(always)]
pub unsafe fn wipe(slot: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { slot.cast::<usize>().write(0) };
}

/// The number that the word of a slot that comes back makes, if it may be a mark; more than any slot has, if it is
/// none.
///
/// # Safety
///
/// As for [`write()`].
#[inline(always)]
pub unsafe fn seems_free(slot: *mut u8) -> Option<usize> {
    // SAFETY: the caller's promise; two bytes of the word. The program may have left bytes there that it never wrote;
    // they lie in memory like others, and of a volatile read the compiler concludes nothing.
    let upper = unsafe { slot.cast::<u16>().add(UPPER).read_volatile() };
    let marked = if usize::BITS < u64::BITS {
        ((slot.addr() ^ key().0) >> UPPER_SHIFT) as u16
    } else {
        u16::MAX
    };
    // SAFETY: as above.
    (upper == marked).then(|| number_in(slot, unsafe { slot.cast::<usize>().read_volatile() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_seen_and_nothing_else() {
        draw_key();
        let mut word = 0_usize;
        let slot = (&raw mut word).cast::<u8>();
        // SAFETY: a word of ours.
        unsafe {
            write(key(), slot);
            assert_eq!(seems_free(slot), Some(0));
            link_number(slot, 77);
            assert_eq!((number(slot), seems_free(slot)), (77, Some(77)));
            wipe(slot);
            assert_eq!(seems_free(slot), None);
            // Another page's, copied here: no number of a slot.
            slot.cast::<usize>().write((slot.addr() + (1 << 12)) ^ key().0);
            assert!(seems_free(slot).is_none_or(|number| number >= 1 << 12));
            let others = [1, usize::MAX >> 1, slot.addr()];
            let seen = others.iter().filter(|&&other| {
                slot.cast::<usize>().write(other);
                seems_free(slot).is_some()
            });
            assert_eq!(seen.count(), 0, "but for one key in 2⁴⁸, or of 32 bits in 2¹⁴");
        }
    }
}
