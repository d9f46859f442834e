//! The checked build (feature `checks`): every block lies between a header and a trailer, checked when it is freed,
//! and what was freed is looked at once more when it is handed out again.
//!
//! ```text
//!   slot or run   ┌ mark │ life ┬ gap ┬ size │ align │ seal ┬───────── block ─────────┬ canary ┬ rest ┐
//!                 └─────────────┴─────┴─────────────────────┴──── as many as asked ───┴ 8 … ───┴──────┘
//!                  40 bytes if there is no gap               ▲ what the program has
//! ```
//!
//! This layer sits in front of a heap and requests more than it was asked for: 40 bytes before the block (32 if
//! pointers have 32 bits, more if the alignment is larger) and at least 8 after it. The **seal** is a number computed
//! from the block's address, size and alignment, in one way for a block in use and in another for a freed one. So when
//! a block is freed:
//!
//! | found | means |
//! |---|---|
//! | outside the heap, or not on a word | never allocated here |
//! | on a page without memory | never allocated by this address, or freed before its memory went back to the system |
//! | the seal of a freed block | freed twice |
//! | another seal | never allocated by this address, or the bytes before it were overwritten |
//! | another size or alignment | freed with the wrong layout |
//! | a canary changed | written past its end, by one byte or more |
//! | when its slot is handed out again: its first bytes changed | written to after it was freed |
//!
//! Each of these ends the process with a message that names the address, the size class and the page of the span. The
//! first [`POISONED`] bytes of a freed block are overwritten, so that a use after free becomes noticeable: reading
//! returns nonsense, and writing is found when the slot is handed out for a block that begins at the same place. For
//! that its bytes must have been nobody else's meanwhile. So its **life**, a second number like the seal, says where
//! the last block began that was freed in it, and is wiped when the slot leaves its span ([`begin`]). As long as it is
//! there, the slot has passed from thread to thread at most, and not been at home, where its memory may go back to the
//! system and its span be dissolved. (A write before a slot goes home is not found, nor one to a large block.)
//!
//! A freed block may be handed out again, with the same layout, before it is freed the second time. That second free
//! then frees the new owner's block, and nothing tells the two apart. `realloc` always moves, to make it less likely
//! that this goes unnoticed.
//!
//! The **mark** is where the heap below keeps its own mark while the block is free: a slot's first word. So the seal of
//! a freed block stays intact wherever the block lies meanwhile.
//!
//! Worked example: 100 bytes aligned to 8. The layer requests 40 + 100 + 8 = 148 bytes: a slot of 160, in class 17. The
//! block begins at byte 40; bytes 140 to 148 are the canary.
//!
//! Cost: two more cache lines for a small block, ~10 ns; and the poisoning, and reading that again. Not for production.
//! Apart from this file, everything is as in the build that ships.

use core::alloc::Layout;
use core::mem::offset_of;
use core::ptr::{self, NonNull};

use crate::fatal::{self, Number};

use super::{MOST_SLOT, Place, Plain};

/// Directly before the block.
#[repr(C)]
struct Header {
    /// Mark and life, if there is no gap.
    before: [u64; 2],
    size: usize,
    align: usize,
    seal: u64,
}

const HEADER: usize = size_of::<Header>();
const CANARY: usize = 8;

/// How much of a freed block is overwritten.
pub const POISONED: usize = 4096;

/// The byte it is overwritten with.
const POISON: u8 = 0xdf;

/// Where a slot records its life: behind the word in which the heap keeps its mark.
const LIFE: usize = 8;

/// That of a slot in which no block was freed.
const NONE: u64 = 0;

const _: () = assert!(
    LIFE + size_of::<u64>() <= offset_of!(Header, size),
    "it fits before what is looked at"
);

const LIVE: u64 = 0x11fe_b10c_5ea1_ed01;
const FREED: u64 = 0xdead_b10c_5ea1_ed02;

impl Header {
    /// The seal of a block: `state` and all that is known of it, mixed so that no bit stands for itself.
    fn seal(state: u64, address: usize, size: usize, align: usize) -> u64 {
        let mix = |sum: u64, next: usize| (sum ^ next as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        [address, size, align].into_iter().fold(state, mix)
    }

    /// The life of a slot after a block at that address, so far into it, was freed.
    fn life(address: usize, offset: usize) -> u64 {
        Self::seal(FREED, address, offset, 0)
    }

    /// Whether this is what lies before a block at that address, in that state.
    fn is(&self, state: u64, address: usize) -> bool {
        self.seal == Self::seal(state, address, self.size, self.align)
    }
}

/// The alignment of a block, and of what is requested for it. More than is asked for if it may be a panic's and these
/// want it, as the heap itself aligns a block without a seal ([`fatal::PANICS_WANT_16`]).
fn alignment(layout: Layout, panics_want_16: bool) -> usize {
    let may_be_panics = layout.align() <= 8 && layout.size().next_multiple_of(8) == fatal::PANIC_BYTES;
    if panics_want_16 && may_be_panics {
        16
    } else {
        layout.align().max(align_of::<Header>())
    }
}

/// The layout to request in place of `layout`, and where the block begins in it. `None` if the layout is too large.
fn widen(layout: Layout) -> Option<(Layout, usize)> {
    let align = alignment(layout, fatal::PANICS_WANT_16);
    let offset = HEADER.next_multiple_of(align);
    let size = layout.size().checked_add(offset)?.checked_add(CANARY)?;
    Some((Layout::from_size_align(size, align).ok()?, offset))
}

/// The canary of a block: eight bytes that occur in no text, different for each block.
fn canary(address: usize) -> [u8; CANARY] {
    (Header::seal(LIVE, address, 0, 0) | 0x8080_8080_8080_8080).to_le_bytes()
}

/// How many bytes of a block the program may use: what it asked for, and no more.
pub const fn usable_size(layout: Layout, _plain: usize) -> usize {
    layout.size()
}

/// A slot of so many bytes leaves its span: what it records is from an earlier life.
///
/// # Safety
///
/// It belongs to the caller, and has memory.
#[inline]
pub unsafe fn begin(slot: *mut u8, bytes: usize) {
    // The smallest ones are too short for any block.
    if bytes >= LIFE + size_of::<u64>() {
        // SAFETY: inside the slot, which is aligned to a word of 64 bits.
        unsafe { slot.add(LIFE).cast::<u64>().write(NONE) };
    }
}

/// Allocates memory for `layout`, under seal; all zero if requested.
pub fn allocate<P: Plain>(heap: &P, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
    let (wide, offset) = widen(layout)?;
    // A slot is zeroed here, once it has been looked at.
    let is_run = wide.size() > MOST_SLOT;
    let memory = heap.take(wide, zeroed && is_run)?;
    look_back(heap, memory, offset);
    // SAFETY: inside what was allocated: life, header, block and canary, in this order. Both are aligned: `offset` and
    // the wide layout's alignment are multiples of its alignment.
    unsafe {
        let block = memory.add(offset);
        if zeroed && !is_run {
            block.write_bytes(0, layout.size());
        }
        let (address, size, align) = (block.addr().get(), layout.size(), layout.align());
        let seal = Header::seal(LIVE, address, size, align);
        block.cast::<Header>().sub(1).write(Header {
            before: [0; 2],
            size,
            align,
            seal,
        });
        memory.add(LIFE).cast::<u64>().write(NONE);
        block.add(size).cast::<[u8; CANARY]>().write_unaligned(canary(address));
        Some(block)
    }
}

/// Aborts if the block that lay here last, in the same slot and `offset` bytes into it, was written to after it was
/// freed, as far as that can be said.
fn look_back<P: Plain>(heap: &P, memory: NonNull<u8>, offset: usize) {
    let Some(place) = heap.place(memory.addr().get()).filter(|place| place.class != 0) else {
        return;
    };
    // SAFETY: inside the slot that was just allocated, and aligned; written when it left its span, as all slots do
    // through `begin`, if not since.
    let (life, block) = unsafe { (memory.add(LIFE).cast::<u64>().read(), memory.add(offset)) };
    let address = block.addr().get();
    if life != Header::life(address, offset) {
        return;
    }
    // SAFETY: inside the slot, and aligned (see `allocate`). The life says that a block was freed there since the slot
    // left its span, so a header was written.
    let header = unsafe { block.cast::<Header>().sub(1).read() };
    if !header.is(FREED, address) {
        return;
    }
    let kept = header.size.min(POISONED);
    // SAFETY: inside the slot. The block that was freed here lay in it, and these bytes were overwritten then.
    let bytes = unsafe { core::slice::from_raw_parts(block.as_ptr(), kept) };
    if let Some(changed) = bytes.iter().position(|&byte| byte != POISON) {
        fatal::abort_about(
            "a block was written to after it was freed",
            &[
                ("address", Number::Address(address)),
                ("freed bytes", Number::Count(header.size)),
                ("first changed byte", Number::Count(changed)),
                ("sealed size class", Number::Count(place.class)),
                ("span at page", Number::Count(place.span)),
            ],
        );
    }
}

/// Frees memory; aborts if it is not what it should be.
///
/// # Safety
///
/// As for `GlobalAlloc::dealloc`; violations are detected as far as possible.
pub unsafe fn free<P: Plain>(heap: &P, memory: NonNull<u8>, layout: Layout) {
    inspect(heap, memory, layout);
    let Some((wide, offset)) = widen(layout) else {
        return;
    };
    let (address, size) = (memory.addr().get(), layout.size());
    // SAFETY: a block under a valid seal is the caller's to give up, and was widened in this way when it was allocated.
    unsafe {
        let seal = Header::seal(FREED, address, size, layout.align());
        (&raw mut (*memory.cast::<Header>().sub(1).as_ptr()).seal).write(seal);
        memory
            .sub(offset)
            .add(LIFE)
            .cast::<u64>()
            .write(Header::life(address, offset));
        memory.write_bytes(POISON, size.min(POISONED));
        heap.give(memory.sub(offset), wide);
    }
}

/// Moves a block to one of `size` bytes; `None` leaves it unchanged. Aborts if it is not what it should be.
///
/// # Safety
///
/// As for `GlobalAlloc::realloc`, and as for [`free`].
pub unsafe fn resize<P: Plain>(heap: &P, memory: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>> {
    inspect(heap, memory, layout);
    let new = Layout::from_size_align(size, layout.align()).ok()?;
    let moved = allocate(heap, new, false)?;
    // SAFETY: two blocks of at least that many bytes; the old one is given up.
    unsafe {
        ptr::copy_nonoverlapping(memory.as_ptr(), moved.as_ptr(), layout.size().min(size));
        free(heap, memory, layout);
    }
    Some(moved)
}

/// Aborts unless `memory` is a block of this layout with nothing overwritten around it.
fn inspect<P: Plain>(heap: &P, memory: NonNull<u8>, layout: Layout) {
    let (address, size, align) = (memory.addr().get(), layout.size(), layout.align());
    let header = address.wrapping_sub(HEADER);
    let place = heap.place(address).filter(|_| heap.place(header).is_some());
    let Some(place) = place.filter(|_| address.is_multiple_of(align_of::<Header>())) else {
        wrong(
            "a block was freed that is not of this heap",
            address,
            heap.place(address),
        );
    };
    // Not touched: where the source commits, it is an access violation.
    if ![header, address].into_iter().all(|at| heap.has_memory(at)) {
        wrong(
            "a block was freed that is not allocated: its page has no memory",
            address,
            Some(place),
        );
    }
    // SAFETY: both ends lie in the grown part of the heap, in no gap, and on no page that was without memory a moment
    // ago. A block in use keeps its pages; if this is none, contrary to the caller's promise, and its pages go back at
    // this very moment, a source that commits ends the process. Aligned; plain numbers.
    let header = unsafe { memory.cast::<Header>().sub(1).read() };
    if header.is(FREED, address) {
        wrong("a block was freed twice", address, Some(place));
    }
    if !header.is(LIVE, address) {
        wrong(
            "a block was freed that is not allocated, or the bytes before it were overwritten",
            address,
            Some(place),
        );
    }
    if (size, align) != (header.size, header.align) {
        fatal::abort_about(
            "a block was freed with the wrong layout",
            &[
                ("address", Number::Address(address)),
                ("allocated bytes", Number::Count(header.size)),
                ("alignment", Number::Count(header.align)),
                ("freed bytes", Number::Count(size)),
                ("alignment", Number::Count(align)),
                ("sealed size class", Number::Count(place.class)),
                ("span at page", Number::Count(place.span)),
            ],
        );
    }
    // SAFETY: after a block of that size there is a canary.
    let found = unsafe { memory.add(size).cast::<[u8; CANARY]>().read_unaligned() };
    if found != canary(address) {
        wrong("a block was written past its end", address, Some(place));
    }
}

#[cold]
#[inline(never)]
fn wrong(what: &str, address: usize, place: Option<Place>) -> ! {
    let Some(Place { class, span }) = place else {
        fatal::abort_about(what, &[("address", Number::Address(address))]);
    };
    fatal::abort_about(
        what,
        &[
            ("address", Number::Address(address)),
            ("sealed size class", Number::Count(class)),
            ("span at page", Number::Count(span)),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As blocks without a seal have it (`object/size_class.rs`); and no other block is aligned to more than it asks.
    #[test]
    fn what_may_be_a_panic_is_aligned_to_16_where_panics_want_it() {
        for (size, align) in (0..200).flat_map(|size| [1, 8, 16, 64].map(|align| (size, align))) {
            let layout = Layout::from_size_align(size, align).unwrap();
            let plain = align.max(align_of::<Header>());
            let wanted = if (49..=56).contains(&size) {
                plain.max(16)
            } else {
                plain
            };
            assert_eq!(alignment(layout, false), plain, "{layout:?}");
            assert_eq!(alignment(layout, true), wanted, "{layout:?}");
            let (wide, offset) = widen(layout).unwrap();
            assert!(wide.align().is_multiple_of(alignment(layout, fatal::PANICS_WANT_16)));
            assert!(offset.is_multiple_of(alignment(layout, fatal::PANICS_WANT_16)) && offset >= HEADER);
        }
    }
}
