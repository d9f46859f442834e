//! What stands in the first word of a free slot: a link under a key, by which a slot that comes back is seen to be
//! free.
//!
//! ```text
//!   word  =  link  xor  the process's key
//!
//!   link     the next slot's address, or 0: in a magazine, on a list, in a batch
//!            a number: on its span's list
//! ```
//!
//! Who takes a slot out wipes the word. So a slot that comes back with a word that makes a link is free already, but
//! for an accident: the key is drawn when the first heap is opened, from where the system has put things, so that no
//! program's data makes links by design.
//!
//! Worked: A, B and A again are freed. A's word is a link to nothing, B's one to A. The third call sees that the upper
//! two bytes of A's word are ones, as in every key and so in every link, and goes the slow way (`twice.rs`), which
//! finds A in the magazine. A block that begins with a small negative number goes that way too, where under the key it
//! makes no address of a slot: ~20 ns.
//!
//! Only those two bytes are looked at first: a program that has just written to the first byte of a block would have to
//! wait for the whole word. To bind a word to its slot's address too was tried, so that a copy of it elsewhere is none:
//! ten instructions a pair and a tenth of the time of small blocks, for programs that move bytes they never wrote.
//!
//! Cost: three instructions where a block is freed, two where one is allocated. Where pointers have 32 bits there is no
//! room for a test, and none is made.

use crate::sync::OnceWord;

/// Zero until the first heap is opened, and never changed afterwards.
static KEY: OnceWord = OnceWord::new();

/// Addresses are shorter than this, where there is a test.
const ADDRESS_BITS: u32 = 48;

/// The bits behind those, all of which every key has: to be compared with a constant.
const UPPER_BITS: usize = (u64::MAX << ADDRESS_BITS) as usize;

/// Which quarter of a word they are.
const UPPER: usize = if cfg!(target_endian = "little") { 3 } else { 0 };

/// The key, drawn by whoever is first: from addresses that the system chooses. Before any slot is used.
pub fn draw_key() {
    let here = 0;
    let mut key = (&raw const here).addr().rotate_left(17) ^ (&raw const KEY).addr().rotate_left(31);
    // The end of splitmix64: each bit comes to depend on all.
    for (shift, factor) in [(30, 0xbf58_476d_1ce4_e5b9_u64), (27, 0x94d0_49bb_1331_11eb)] {
        key = (key ^ key >> (shift % usize::BITS)).wrapping_mul(factor as usize);
    }
    // Who has a slot has been told of the heap that was opened behind this.
    KEY.set(key | UPPER_BITS);
}

/// The key of all links.
#[derive(Clone, Copy, Debug)]
pub struct Key(usize);

/// The key, once it has been drawn.
#[inline(always)]
pub fn key() -> Key {
    Key(KEY.get())
}

/// Writes a link to the next slot, or to none.
///
/// # Safety
///
/// The slot is the caller's, of one of a heap's classes: a word long at least, and aligned for one.
#[inline(always)]
pub unsafe fn link(slot: *mut u8, next: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { link_by(key(), slot, next) };
}

/// As [`link`], for who has the key at hand.
///
/// # Safety
///
/// As for [`link`].
#[inline(always)]
pub unsafe fn link_by(key: Key, slot: *mut u8, next: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { slot.cast::<*mut u8>().write(next.map_addr(|address| address ^ key.0)) };
}

/// The slot that [`link`] wrote.
///
/// # Safety
///
/// It did so last, and the slot is the caller's.
#[inline(always)]
pub unsafe fn next(slot: *mut u8) -> *mut u8 {
    // SAFETY: the caller's promise.
    unsafe { next_by(key(), slot) }
}

/// As [`next`], for who has the key at hand.
///
/// # Safety
///
/// As for [`next`].
#[inline(always)]
pub unsafe fn next_by(key: Key, slot: *mut u8) -> *mut u8 {
    // SAFETY: the caller's promise.
    unsafe { slot.cast::<*mut u8>().read() }.map_addr(|address| address ^ key.0)
}

/// Writes a number.
///
/// # Safety
///
/// As for [`link`].
#[inline(always)]
pub unsafe fn link_number(slot: *mut u8, number: u32) {
    // SAFETY: the caller's promise.
    unsafe { slot.cast::<usize>().write(number as usize ^ key().0) };
}

/// The number that [`link_number`] wrote; whatever else stands there makes one, too.
///
/// # Safety
///
/// The slot is the caller's, as for [`link`].
#[inline(always)]
pub unsafe fn number(slot: *mut u8) -> u32 {
    // SAFETY: the caller's promise.
    (unsafe { slot.cast::<usize>().read() } ^ key().0) as u32
}

/// Wipes the word of a slot that leaves the heap's hands.
///
/// # Safety
///
/// As for [`link`].
#[inline(always)]
pub unsafe fn wipe(slot: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { slot.cast::<usize>().write(0) };
}

/// What the word of a slot that comes back makes, if that may be a link.
///
/// # Safety
///
/// As for [`link`].
#[inline(always)]
pub unsafe fn seems_free(slot: *mut u8) -> Option<usize> {
    if usize::BITS < u64::BITS {
        return None;
    }
    // SAFETY: the caller's promise; the bytes of the word in which a link has zeros. The program may have left bytes
    // there that it never wrote; they lie in memory like others, and of a volatile read the compiler concludes nothing.
    let upper = unsafe { slot.cast::<u16>().add(UPPER).read_volatile() };
    // SAFETY: as above.
    (upper == u16::MAX).then(|| unsafe { slot.cast::<usize>().read_volatile() } ^ key().0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_seen_and_nothing_else() {
        draw_key();
        let mut word = 0_usize;
        let slot = (&raw mut word).cast::<u8>();
        // SAFETY: a word of ours.
        unsafe {
            for next in [0, 8, slot.addr(), (1 << ADDRESS_BITS) - 8] {
                link(slot, slot.with_addr(next));
                assert_eq!((self::next(slot).addr(), seems_free(slot)), (next, Some(next)));
            }
            link_number(slot, 77);
            assert_eq!((number(slot), seems_free(slot)), (77, Some(77)));
            let others = [0, 1, usize::MAX >> 1, slot.addr()];
            let seen = others.iter().filter(|&&other| {
                slot.cast::<usize>().write(other);
                seems_free(slot).is_some()
            });
            assert_eq!(seen.count(), 0, "but for one key in 2⁴⁸");
        }
    }
}
