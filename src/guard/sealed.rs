//! The checked build (feature `checks`): every block lies between a header and a trailer, checked when it is freed.
//!
//! ```text
//!   slot or run   ┌ gap ┬ mark  │ size │ align │ seal ┬──────────── block ────────────┬ canary ┬ rest ┐
//!                 └─────┴───────── 40 bytes ──────────┴─────── as many as asked ──────┴ 8 … ───┴──────┘
//!                       never looked at               ▲ what the program has
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
//! | the seal of a freed block | freed twice |
//! | another seal | never allocated by this address, or the bytes before it were overwritten |
//! | another size or alignment | freed with the wrong layout |
//! | a canary changed | written past its end, by one byte or more |
//!
//! Each of these ends the process with a message that names the address, the size class and the page of the span. The
//! first [`POISONED`] bytes of a freed block are overwritten, so that a use after free becomes noticeable.
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
//! Cost: two more cache lines for a small block, ~10 ns; and the poisoning. Not for production. Apart from this file,
//! everything is as in the build that ships.

use core::alloc::Layout;
use core::ptr::{self, NonNull};

use crate::fatal::{self, Number};

use super::{Place, Plain};

/// Directly before the block.
#[repr(C)]
struct Header {
    /// Overwritten while the block is free: the heap may keep its own mark here.
    mark: [u64; 2],
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

const LIVE: u64 = 0x11fe_b10c_5ea1_ed01;
const FREED: u64 = 0xdead_b10c_5ea1_ed02;

impl Header {
    /// The seal of a block: `state` and all that is known of it, mixed so that no bit stands for itself.
    fn seal(state: u64, address: usize, size: usize, align: usize) -> u64 {
        let mix = |sum: u64, next: usize| (sum ^ next as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        [address, size, align].into_iter().fold(state, mix)
    }
}

/// The layout to request in place of `layout`, and where the block begins in it. `None` if the layout is too large.
fn widen(layout: Layout) -> Option<(Layout, usize)> {
    let offset = HEADER.next_multiple_of(layout.align());
    let size = layout.size().checked_add(offset)?.checked_add(CANARY)?;
    let wide = Layout::from_size_align(size, layout.align().max(align_of::<Header>())).ok()?;
    Some((wide, offset))
}

/// The canary of a block: eight bytes that occur in no text, different for each block.
fn canary(address: usize) -> [u8; CANARY] {
    (Header::seal(LIVE, address, 0, 0) | 0x8080_8080_8080_8080).to_le_bytes()
}

/// How many bytes of a block the program may use: what it asked for, and no more.
pub const fn usable_size(layout: Layout, _plain: usize) -> usize {
    layout.size()
}

/// Allocates memory for `layout`, under seal; all zero if requested.
pub fn allocate<P: Plain>(heap: &P, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
    let (wide, offset) = widen(layout)?;
    let memory = heap.take(wide, zeroed)?;
    // SAFETY: inside what was allocated: header, block and canary, in this order. The header is aligned: `offset` and
    // the wide layout's alignment are multiples of its alignment.
    unsafe {
        let block = memory.add(offset);
        let (address, size, align) = (block.addr().get(), layout.size(), layout.align());
        let seal = Header::seal(LIVE, address, size, align);
        block.cast::<Header>().sub(1).write(Header {
            mark: [0; 2],
            size,
            align,
            seal,
        });
        block.add(size).cast::<[u8; CANARY]>().write_unaligned(canary(address));
        Some(block)
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
    // SAFETY: inside the grown part of the heap and in no gap, so memory; aligned; plain numbers.
    let header = unsafe { memory.cast::<Header>().sub(1).read() };
    let sealed = |state| header.seal == Header::seal(state, address, header.size, header.align);
    if sealed(FREED) {
        wrong("a block was freed twice", address, Some(place));
    }
    if !sealed(LIVE) {
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
