//! A free that programs can inline: the fast path of [`Thread::push`] as one statement in assembler, on x86-64.
//!
//! ```text
//!   marked? ── top := busy ── key mine? ── room? ── mark it ── entry := slot ── top := entry         17 instructions
//!     └───────────────────────────┴───────────┴─▶ refused: top as it was, `free_seated`
//! ```
//!
//! Inlined, the fast path saves a call, a jump back, and moves between registers: a tenth of a small pair. But then the
//! function *around* a free must be small enough to be inlined too. LLVM inlines a function that costs less than 250.
//! It counts 5 for an instruction, and 25 for a call plus 5 for each argument, also for one that is hardly ever made.
//! Worked: a step through a B-tree that is being dropped frees in two places. With the Rust code of this path in both
//! of them the step costs 355 and stays out of line. Then it returns its result through memory, six words stored one
//! by one and loaded two by two, which processors cannot forward: each step waits for the cache misses of the step
//! before it, and a JSON tree is dropped in 1.3 to 1.7 of the time (`docs/measurements.md`).
//!
//! A statement in assembler counts 5 for each operand. With the fast path in one, and the slow path called from
//! another, a free costs about 65, and the step is inlined. A `dealloc` that is never inlined costs 45.
//!
//! What the statement does is what [`Thread::push`] does, in the same order; each line names the function that it
//! replaces. On x86-64 a plain load acquires and a plain store releases, and a statement that may use memory is what
//! `fence_light` is, so nothing else is needed for the partners named there. The models explore the parts that it is
//! made of (`sync/owner.rs`, `tests/models/src/loom/stake.rs`). A test here runs both, from many states, and compares
//! what they leave behind.
//!
//! **On other processors**, and for loads of other kinds, a free is a call of the one copy of `push`.

use core::ptr::NonNull;

use super::thread::{Seat, Thread};

/// A heap whose slots are freed by the calling thread's own structure.
pub trait Frees {
    /// The calling thread's structure, of whichever heap, or a placeholder.
    fn thread() -> &'static Thread;

    /// Frees a slot of up to 1 KiB, in any case.
    ///
    /// # Safety
    ///
    /// The caller owns the slot, of the class of this seat, and of this heap, which takes it over.
    unsafe fn free_seated(&self, slot: NonNull<u8>, seat: Seat);
}

pub use imp::free;

#[cfg(all(target_arch = "x86_64", target_pointer_width = "64", not(miri)))]
mod imp {
    use core::arch::asm;
    use core::ptr::{self, NonNull};

    use crate::object::magazine::{ENTRY_BYTES, LIMIT};
    use crate::object::mark;
    use crate::object::thread::{MARK_KEY, OWNER_KEY, Seat, Thread};
    use crate::sync::BUSY;

    use super::Frees;

    /// Fast path: frees a slot of up to 1 KiB. `objects` is the address of the heap's objects.
    ///
    /// # Safety
    ///
    /// As for [`Frees::free_seated`].
    #[inline(always)]
    pub unsafe fn free<H: Frees, T>(heap: &H, objects: *const T, slot: NonNull<u8>, seat: Seat) {
        // SAFETY: the caller's promise.
        if unsafe { !push(H::thread(), objects, seat, slot) } {
            // SAFETY: a function with these three arguments; it does not unwind, as functions of other languages
            // cannot. The caller's promise; the slot was not accepted, so it still belongs to the caller.
            unsafe {
                asm!(
                    "call {refused}",
                    refused = sym refused::<H>,
                    in("rdi") ptr::from_ref(heap),
                    in("rsi") slot.as_ptr(),
                    in("rdx") seat.bytes(),
                    clobber_abi("sysv64")
                );
            }
        }
    }

    /// [`Thread::push`]. But if the slot is refused, the top of the magazine may still be announced, and must be
    /// [withdrawn](Thread::withdraw).
    ///
    /// # Safety
    ///
    /// As for [`Thread::push`].
    #[inline(always)]
    #[must_use]
    pub(super) unsafe fn push<T>(thread: &Thread, objects: *const T, seat: Seat, slot: NonNull<u8>) -> bool {
        // SAFETY: the same accesses as those of the functions named, whose promises the caller keeps: to two bytes of
        // the slot, to the magazine at the seat, to the two keys of a structure, and, if the structure is the
        // caller's and has room, to the slot's word and an entry of the rack.
        unsafe {
            asm!(
                // `mark::seems_free`: the upper two bytes.
                "cmp word ptr [{slot} + {UPPER}], -1",
                "je {refused}",
                // `Stake::begin`. Relaxed; the compiler keeps the order, and the heavy fence of a seizer does the rest.
                "mov {top}, qword ptr [{thread} + {seat}]",
                "add {top}, {BUSY}",
                "mov qword ptr [{thread} + {seat}], {top}",
                // `Owner::admits`. Acquire: pairs with the release of `unbar`.
                "cmp {objects}, qword ptr [{thread} + {OWNER_KEY}]",
                "jne {refused}",
                // `Magazine::room_at`.
                "add {top}, {ENTRY_BYTES} - {BUSY}",
                "cmp {top}, qword ptr [{thread} + {seat} + {LIMIT}]",
                "ja {refused}",
                // `mark::write`.
                "mov {mark}, qword ptr [{thread} + {MARK_KEY}]",
                "xor {mark}, {slot}",
                "mov qword ptr [{slot}], {mark}",
                // The entry, and `Stake::end`. Release: pairs with the acquire of `Stake::get`.
                "mov qword ptr [{top}], {slot}",
                "mov qword ptr [{thread} + {seat}], {top}",
                slot = in(reg) slot.as_ptr(),
                thread = in(reg) ptr::from_ref(thread),
                seat = in(reg) seat.bytes(),
                objects = in(reg) objects,
                top = out(reg) _,
                mark = out(reg) _,
                UPPER = const mark::UPPER_AT,
                BUSY = const BUSY,
                OWNER_KEY = const OWNER_KEY,
                ENTRY_BYTES = const ENTRY_BYTES,
                LIMIT = const LIMIT,
                MARK_KEY = const MARK_KEY,
                refused = label { return false },
                options(nostack)
            );
        }
        true
    }

    /// Takes the announcement back, and frees the slot in another way.
    ///
    /// # Safety
    ///
    /// As for [`Frees::free_seated`]; the calling thread has announced nothing but a push at this seat.
    #[cold]
    #[inline(never)]
    unsafe extern "sysv64" fn refused<H: Frees>(heap: &H, slot: NonNull<u8>, seat: Seat) {
        H::thread().withdraw(seat);
        // SAFETY: the caller's promise.
        unsafe { heap.free_seated(slot, seat) };
    }
}

#[cfg(not(all(target_arch = "x86_64", target_pointer_width = "64", not(miri))))]
mod imp {
    use core::ptr::NonNull;

    use crate::object::thread::Seat;

    use super::Frees;

    /// Frees a slot of up to 1 KiB. `objects` is the address of the heap's objects.
    ///
    /// # Safety
    ///
    /// As for [`Frees::free_seated`].
    #[inline(always)]
    pub unsafe fn free<H: Frees, T>(heap: &H, _objects: *const T, slot: NonNull<u8>, seat: Seat) {
        // SAFETY: the caller's promise.
        unsafe { heap.free_seated(slot, seat) };
    }
}

#[cfg(all(test, target_arch = "x86_64", target_pointer_width = "64", not(miri)))]
mod tests {
    extern crate std;

    use core::ptr;
    use std::boxed::Box;
    use std::vec::Vec;

    use super::super::magazine::Magazine;
    use super::super::mark;
    use super::super::rack::Rack;
    use super::super::size_class::SizeClass;
    use super::*;
    use crate::sync::BUSY;

    /// A rack's slots.
    const ROOM: u32 = 6;

    /// All that a push reads or writes.
    #[repr(C, align(64))]
    struct World {
        thread: [usize; size_of::<Thread>() / size_of::<usize>()],
        rack: [usize; 2 + ROOM as usize],
        slot: [usize; 2],
    }

    const WORDS: usize = size_of::<World>() / size_of::<usize>();

    /// What a magazine has loaded: slots, and what happened then.
    #[derive(Clone, Copy, Debug)]
    enum Loaded {
        Never,
        Open(u32),
        Shut(u32),
        Taken(u32),
        Forgotten(u32),
    }

    fn load(magazine: &Magazine, loaded: Loaded, rack: Rack, slot: NonNull<u8>) {
        let (Loaded::Open(count) | Loaded::Shut(count) | Loaded::Taken(count) | Loaded::Forgotten(count)) = loaded
        else {
            return;
        };
        assert!(magazine.load(rack).is_none());
        // SAFETY: the magazine does not look at its slots, and none of these is taken out.
        assert!((0..count).all(|number| unsafe { magazine.push(slot.add(64 * (1 + number as usize))) }));
        match loaded {
            Loaded::Shut(_) => magazine.shut(),
            Loaded::Taken(_) => drop(magazine.unload()),
            Loaded::Forgotten(_) => magazine.forget(),
            Loaded::Never | Loaded::Open(_) => {}
        }
    }

    /// # Safety
    ///
    /// None.
    unsafe fn leave(_thread: NonNull<Thread>) {}

    /// One state, and what either push makes of it.
    struct Case {
        class: SizeClass,
        loaded: Loaded,
        is_ours: bool,
        word: usize,
    }

    impl Case {
        /// Sets the world up, pushes, and returns whether that succeeded, with all words of the world.
        fn after(
            &self,
            world: &mut World,
            push: impl FnOnce(&Thread, *const u64, Seat, NonNull<u8>) -> bool,
        ) -> (bool, Vec<usize>) {
            static HOMES: [u64; 2] = [0; 2];
            let world = ptr::from_mut(world);
            // SAFETY: a world, for which any words are valid. All-zero bytes are a structure, and no rack.
            unsafe {
                world.write_bytes(0, 1);
                let thread = &*world.cast::<Thread>();
                let slot = NonNull::new_unchecked((&raw mut (*world).slot).cast::<u8>());
                let rack = Rack::new(NonNull::new_unchecked((&raw mut (*world).rack).cast()), ROOM);
                thread.set_owner(&HOMES[usize::from(!self.is_ours)], leave);
                load(thread.magazine(self.class), self.loaded, rack, slot);
                slot.cast().write(self.word);
                let done = push(thread, &HOMES[0], Seat::from(self.class), slot);
                (done, world.cast::<[usize; WORDS]>().read().to_vec())
            }
        }

        /// Whether both pushes accept; fails if they differ in anything.
        fn is_accepted(&self, world: &mut World) -> bool {
            // SAFETY: the world's slot.
            let (plain, expected) = self.after(world, |thread, home, seat, slot| unsafe {
                thread.push(home, seat, slot)
            });
            let (inlined, words) = self.after(world, |thread, home, seat, slot| {
                // SAFETY: as above.
                let done = unsafe { imp::push(thread, home, seat, slot) };
                if !done {
                    // SAFETY: the magazine's first word.
                    let top = unsafe { ptr::from_ref(thread).byte_add(seat.bytes()).cast::<usize>().read() };
                    assert_eq!(
                        top & BUSY != 0,
                        self.word >> 48 != 0xffff,
                        "announced if not refused for its mark"
                    );
                    thread.withdraw(seat);
                }
                done
            });
            let differ = |&at: &usize| words[at] != expected[at];
            let differences: Vec<_> = (0..WORDS)
                .filter(differ)
                .map(|at| (at, words[at], expected[at]))
                .collect();
            assert!(
                plain == inlined && differences.is_empty(),
                "{:?} bytes, {:?}, ours: {}, first word {:#x}: {plain}, inlined {inlined}; words: {differences:x?}",
                self.class.bytes(),
                self.loaded,
                self.is_ours,
                self.word
            );
            inlined
        }
    }

    #[test]
    fn the_statement_does_what_push_does() {
        mark::draw_key();
        let mut world = Box::new(World {
            thread: [0; _],
            rack: [0; _],
            slot: [0; _],
        });
        let slot = (&raw mut world.slot).cast::<u8>();
        // SAFETY: the world's slot.
        unsafe { mark::write(mark::key(), slot) };
        let words = [world.slot[0], usize::MAX << 48, usize::MAX >> 1, usize::MAX << 49, 0];
        let counts = 0..=ROOM;
        let states = [Loaded::Open, Loaded::Shut, Loaded::Taken, Loaded::Forgotten].into_iter();
        let states = states
            .flat_map(|state| counts.clone().map(state))
            .chain([Loaded::Never]);
        let mut accepted = 0;
        for loaded in states {
            for class in [1, 64, 1 << 10].map(|bytes| SizeClass::of(bytes, 1).unwrap()) {
                for (is_ours, word) in [true, false]
                    .into_iter()
                    .flat_map(|ours| words.map(|word| (ours, word)))
                {
                    let case = Case {
                        class,
                        loaded,
                        is_ours,
                        word,
                    };
                    accepted += u32::from(case.is_accepted(&mut world));
                }
            }
        }
        // Of three classes, into open racks that have room, with a word that is no mark.
        assert_eq!(accepted, 3 * ROOM * 3);
    }
}
