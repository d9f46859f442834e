//! A free that programs can inline: the fast path as one statement in assembler, on x86-64 Linux with glibc.
//!
//! ```text
//!   marked? ── key mine? ── room? ── mark it ── entry := slot ── top := entry                        16 instructions
//!     └────────────┴───────────┴─▶ refused: the seat noted ── `give_unpushed`
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
//! A statement in assembler counts 5 for each operand. With this one, which also finds the thread's structure, and a
//! slow path with two arguments instead of three, a free costs 65, and the step is inlined; with 70 it is not. So the
//! slow path gets no size: it asks the table of spans. A wrong layout is noticed all the same, because the statement
//! notes in the structure at which magazine it tried, and the slow path compares that with the block's class.
//! (`tests/inlined` shows whether the step is inlined: then a program that drops a tree has no symbol with
//! `deallocating_next`.) A call from within a statement would count less, but then the compiler must be told which
//! registers it changes, and those that new processors bring have no names yet.
//!
//! What the statement does is what `Thread::push` does, with its accesses in the same order; each line names the
//! function that it replaces. On x86-64 a plain load acquires and a plain store releases, so nothing else is needed for
//! the partners named there. The models explore the parts that it is made of (`sync/owner.rs`,
//! `tests/models/src/loom/stake.rs`). Tests here run both, from many states, and compare what they leave behind; and
//! they stop the statement after each instruction, for another thread to seize the magazine meanwhile.
//!
//! A sanitizer of threads does not see what a statement in assembler stores.
//!
//! **Elsewhere** the caller finds the magazine and calls the one copy of the rest.

use core::ptr::NonNull;

use crate::object::Seat;
use crate::source::Source;

use super::GlobalHeap;

#[cfg(all(
    target_arch = "x86_64",
    target_pointer_width = "64",
    target_os = "linux",
    target_env = "gnu",
    feature = "std",
    not(feature = "rust-dylib"),
    not(miri)
))]
mod imp {
    use core::arch::asm;

    use super::*;
    use crate::global::pthread::{self, FRESH};
    use crate::object::Thread;
    use crate::sync::Ordering;

    impl<S: Source + 'static> GlobalHeap<S> {
        /// Fast path: frees a slot of up to 1 KiB, whose magazine the caller has found.
        ///
        /// # Safety
        ///
        /// As for [`GlobalAlloc::dealloc`](core::alloc::GlobalAlloc::dealloc), with a layout that has this seat.
        #[inline(always)]
        pub(in crate::global) unsafe fn give_marked(&self, memory: NonNull<u8>, seat: Seat) {
            // Relaxed: as in `take_slot`.
            let objects = self.objects.load(Ordering::Relaxed);
            // SAFETY: the caller gives the block up: a slot of this class, as it was allocated with such a layout.
            unsafe {
                if !push(objects, seat, memory) {
                    self.give_unpushed(memory);
                }
            }
        }

        /// A slot that was refused, at a seat that is not passed on: the table of spans knows.
        ///
        /// # Safety
        ///
        /// As for [`give_marked`](Self::give_marked), which has just tried.
        #[cold]
        #[inline(never)]
        unsafe fn give_unpushed(&self, memory: NonNull<u8>) {
            // SAFETY: the structure is the calling thread's; the caller's promise.
            unsafe {
                let class = self.opened_for(memory).class_refused(pthread::own(), memory);
                self.dealloc_slow(memory, class.bytes(), 1);
            }
        }
    }

    /// [`Thread::push`] to the calling thread's structure, for the heap at `objects`. But if the slot is refused, the
    /// structure has a [note](Thread::has_refused_at) of the seat.
    ///
    /// # Safety
    ///
    /// As for [`Thread::push`].
    #[inline(always)]
    #[must_use]
    pub(super) unsafe fn push<T>(objects: *const T, seat: Seat, slot: NonNull<u8>) -> bool {
        // SAFETY: the same accesses as those of the functions named, whose promises the caller keeps: to the thread's
        // pointer, to two bytes of the slot, to the magazine at the seat, to the two keys of a structure, and, if the
        // structure is the caller's and has room, to the slot's word and an entry of the rack.
        unsafe {
            asm!(
                // `current::get`.
                "mov {thread}, qword ptr [rip + {fresh}_current@GOTTPOFF]",
                "mov {thread}, qword ptr fs:[{thread}]",
                // `unindexed`: from here on the magazine's address.
                "add {seat}, {thread}",
                // `mark::seems_free`: the upper two bytes.
                "cmp word ptr [{slot} + {UPPER_AT}], {UPPER}",
                "je 2f",
                // `Owner::admits`; the word is the heap's address up to here. Acquire: pairs with the release of
                // `unbar`.
                "cmp {word}, qword ptr [{thread} + {OWNER_KEY}]",
                "jne 2f",
                // `Magazine::room_at`.
                "mov {top}, qword ptr [{seat}]",
                "cmp {top}, qword ptr [{seat} + {LIMIT}]",
                "jae 2f",
                "add {top}, {ENTRY_BYTES}",
                // `mark::write`.
                "mov {word}, qword ptr [{thread} + {MARK_KEY}]",
                "xor {word}, {slot}",
                "mov qword ptr [{slot}], {word}",
                // The entry, and `Stake::set`. Release: pairs with the acquire of `Stake::seen`.
                "mov qword ptr [{top}], {slot}",
                "mov qword ptr [{seat}], {top}",
                // Behind the function's end, where a profiler finds neither its name nor its caller.
                ".subsection 1",
                "2:",
                // The seat again.
                "sub {seat}, {thread}",
                "mov word ptr [{thread} + {REFUSED}], {seat:x}",
                "jmp {refused}",
                ".subsection 0",
                fresh = sym FRESH,
                thread = out(reg) _,
                slot = in(reg) slot.as_ptr(),
                seat = inout(reg) seat.bytes() => _,
                word = inout(reg) objects => _,
                top = out(reg) _,
                UPPER_AT = const Thread::MARK_UPPER_AT,
                UPPER = const Thread::MARK_UPPER,
                REFUSED = const Thread::REFUSED,
                OWNER_KEY = const Thread::OWNER_KEY,
                ENTRY_BYTES = const Thread::ENTRY_BYTES,
                LIMIT = const Thread::LIMIT,
                MARK_KEY = const Thread::MARK_KEY,
                refused = label { return false },
                options(nostack)
            );
        }
        true
    }
}

#[cfg(not(all(
    target_arch = "x86_64",
    target_pointer_width = "64",
    target_os = "linux",
    target_env = "gnu",
    feature = "std",
    not(feature = "rust-dylib"),
    not(miri)
)))]
mod imp {
    use super::*;

    impl<S: Source + 'static> GlobalHeap<S> {
        /// Frees a slot of up to 1 KiB, whose magazine the caller has found.
        ///
        /// # Safety
        ///
        /// As for [`GlobalAlloc::dealloc`](core::alloc::GlobalAlloc::dealloc), with a layout that has this seat.
        #[inline(always)]
        pub(in crate::global) unsafe fn give_marked(&self, memory: NonNull<u8>, seat: Seat) {
            // SAFETY: the caller's promise.
            unsafe { self.give_seated(memory, seat) };
        }
    }
}

#[cfg(all(
    test,
    target_arch = "x86_64",
    target_pointer_width = "64",
    target_os = "linux",
    target_env = "gnu",
    feature = "std",
    not(feature = "rust-dylib"),
    not(miri)
))]
mod tests {
    extern crate std;

    use core::ptr;
    use std::boxed::Box;
    use std::vec::Vec;

    use super::*;
    use crate::global::pthread;
    use crate::object::parts::{self as mark, Magazine, Rack};
    use crate::object::{SizeClass, Thread};
    use crate::sync::Owned;

    /// A rack's slots.
    const ROOM: u32 = 6;

    /// All that a push reads or writes.
    #[repr(C, align(64))]
    struct World {
        thread: [usize; size_of::<Thread>() / size_of::<usize>()],
        rack: [usize; 2 + ROOM as usize],
        /// The first is freed.
        slots: [[usize; 8]; 1 + ROOM as usize],
    }

    impl World {
        fn new() -> Box<Self> {
            Box::new(Self {
                thread: [0; _],
                rack: [0; _],
                slots: [[0; _]; _],
            })
        }
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
        magazine.forget();
        magazine.load(rack);
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
            push: impl FnOnce(&'static Thread, *const u64, Seat, NonNull<u8>) -> bool,
        ) -> (bool, Vec<usize>) {
            static HOMES: [u64; 2] = [0; 2];
            let world = ptr::from_mut(world);
            // SAFETY: a world, for which any words are valid. All-zero bytes are a structure, and no rack.
            unsafe {
                world.write_bytes(0, 1);
                let thread = &*world.cast::<Thread>();
                let slot = NonNull::new_unchecked((&raw mut (*world).slots).cast::<u8>());
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
                let before = pthread::replace(thread);
                // SAFETY: as above.
                let done = unsafe { imp::push(home, seat, slot) };
                pthread::replace(before);
                if !done {
                    assert!(thread.has_refused_at(seat));
                    thread.owner().forget_refusal();
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
        let mut world = World::new();
        let slot = (&raw mut world.slots).cast::<u8>();
        // SAFETY: the world's slot.
        unsafe { mark::write(mark::key(), slot) };
        let upper = (Thread::MARK_UPPER as usize) << 48;
        let words = [world.slots[0][0], upper, upper ^ 1 << 63, upper ^ 1 << 48, 0];
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

    /// A push or a pop while another thread seizes the structure: whichever instructions the two have come to, each
    /// slot is in one place afterwards. The processor's trap flag stops the call after each instruction, and the
    /// handler is the other thread.
    mod seized {
        use core::arch::asm;
        use core::cell::Cell;
        use core::ffi::{c_int, c_void};
        use core::mem;

        use super::*;

        /// The slots that are there before.
        const SLOTS: u32 = 2;

        /// What is stopped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Call {
            Push,
            Pop,
        }

        /// The other thread, by the number of instructions after which it bars the user, looks at the top, takes what
        /// is below, and lets go.
        struct Seizer<'a> {
            thread: &'a Thread,
            seat: Seat,
            at: [usize; 4],
            step: usize,
            seen: usize,
            taken: Vec<*mut u8>,
        }

        impl Seizer<'_> {
            fn go(&mut self) {
                let [bars, looks, takes, lets_go] = self.at.map(|at| at == self.step);
                let owner = self.thread.owner();
                // SAFETY: the magazine's first word.
                let top = unsafe { &mut *ptr::from_ref(self.thread).byte_add(self.seat.bytes()).cast_mut().cast() };
                if bars {
                    owner.set(3);
                }
                if looks {
                    self.seen = *top;
                }
                if takes {
                    // It looks once.
                    let now = mem::replace(top, self.seen);
                    let taken = &mut self.taken;
                    self.thread
                        .magazine(class())
                        .seize(|rack| taken.extend(core::iter::from_fn(|| rack.pop())));
                    *top = now;
                    let are_marked = self
                        .taken
                        .iter()
                        // SAFETY: the world's slots.
                        .all(|&slot| unsafe { mark::is_on(slot) });
                    assert!(are_marked, "what is taken is whole: {:?}", self.at);
                }
                if lets_go {
                    owner.set(self.thread.key());
                }
                self.step += 1;
            }
        }

        std::thread_local! {
            static SEIZER: Cell<*mut Seizer<'static>> = const { Cell::new(ptr::null_mut()) };
        }

        /// Once the other has let go, the rest of the call is not stopped: it does nothing there.
        extern "C" fn stopped(_signal: c_int, _info: *mut libc::siginfo_t, context: *mut c_void) {
            // SAFETY: stored by the thread that is stopped here, which does not use it meanwhile; what the handler of
            // a signal is given.
            unsafe {
                let seizer = &mut *SEIZER.get();
                seizer.go();
                if seizer.step > seizer.at[3] {
                    let context = &mut *context.cast::<libc::ucontext_t>();
                    context.uc_mcontext.gregs[libc::REG_EFL as usize] &= !0x100;
                }
            }
        }

        /// Sets the trap flag, or clears it.
        #[inline(always)]
        fn stop(each: bool) {
            // SAFETY: changes this one flag. The handler is installed, so what runs here goes on as if it had not been
            // stopped.
            unsafe {
                if each {
                    asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq");
                } else {
                    asm!("pushfq", "and qword ptr [rsp], -0x101", "popfq");
                }
            }
        }

        fn class() -> SizeClass {
            SizeClass::of(64, 1).unwrap()
        }

        fn install() {
            // SAFETY: a handler of this type; nobody else in this program uses the signal.
            unsafe {
                let mut action: libc::sigaction = mem::zeroed();
                action.sa_sigaction = stopped as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
                action.sa_flags = libc::SA_SIGINFO;
                assert_eq!(libc::sigaction(libc::SIGTRAP, &action, ptr::null_mut()), 0);
            }
        }

        /// What happened in a run.
        #[derive(Clone, Copy, Debug)]
        struct Outcome {
            /// Whether the call had more than the last of the instructions.
            is_longer: bool,
            /// Whether it was not refused.
            is_done: bool,
            /// How many slots were taken.
            taken: usize,
        }

        fn run(world: &mut World, call: Call, at: [usize; 4]) -> Outcome {
            let case = Case {
                class: class(),
                loaded: Loaded::Open(SLOTS),
                is_ours: true,
                word: 0,
            };
            let mut outcome = None;
            case.after(world, |thread, home, seat, slot| {
                let magazine = thread.magazine(class());
                // Those that are loaded are marked, as free slots are.
                let slots = [0, 1, 2].map(|number| slot.as_ptr().wrapping_add(64 * number));
                // SAFETY: the world's slots.
                slots[1..]
                    .iter()
                    .for_each(|&slot| unsafe { mark::write(mark::key(), slot) });
                let mut seizer = Seizer {
                    thread,
                    seat,
                    at,
                    step: 0,
                    seen: 0,
                    taken: Vec::with_capacity(8),
                };
                let other = &raw mut seizer;
                SEIZER.set(other.cast());
                let before = pthread::replace(thread);
                stop(true);
                let done = match call {
                    // SAFETY: the world's slot.
                    Call::Push => unsafe { imp::push(home, seat, slot) }.then_some(slot),
                    Call::Pop => thread.pop(home, seat),
                };
                stop(false);
                pthread::replace(before);
                // SAFETY: it is this function's again.
                let seizer = unsafe { &mut *other };
                let is_longer = seizer.step > at[3];
                while seizer.step <= at[3] {
                    seizer.go();
                }
                let mut found = seizer.taken.clone();
                found.extend(core::iter::from_fn(|| magazine.pop()).map(NonNull::as_ptr));
                if call == Call::Pop {
                    found.extend(done.map(NonNull::as_ptr));
                }
                found.sort_unstable();
                let pushed = call == Call::Push && done.is_some();
                assert_eq!(found, slots[usize::from(!pushed)..], "{call:?}, seized at {at:?}");
                assert_eq!(magazine.unload().map(|rack| (rack.len(), rack.room())), Some((0, ROOM)));
                outcome = Some(Outcome {
                    is_longer,
                    is_done: done.is_some(),
                    taken: seizer.taken.len(),
                });
                done.is_some()
            });
            outcome.unwrap()
        }

        /// All instructions of a push; of a pop, which is not in assembler, many.
        fn run_all(call: Call, most: usize) {
            mark::draw_key();
            install();
            let mut world = World::new();
            let mut steps = 0;
            while run(&mut world, call, [steps; 4]).is_longer {
                steps += 1;
            }
            let mut outcomes = std::collections::BTreeMap::new();
            for first in 0..=steps {
                for last in (first..=steps).step_by(steps / most + 1) {
                    for [second, third] in [[first, first], [first, last], [last, last]] {
                        let outcome = run(&mut world, call, [first, second, third, last]);
                        *outcomes.entry((outcome.is_done, outcome.taken)).or_insert(0) += 1;
                    }
                }
            }
            // All slots are taken before the call or without it; or all but the one that it has, puts back or adds.
            let expected: &[_] = match call {
                Call::Push => &[(false, 2), (true, 2), (true, 3)],
                Call::Pop => &[(false, 1), (false, 2), (true, 1)],
            };
            let seen: Vec<_> = outcomes.keys().copied().collect();
            assert!(steps >= 13 && seen == expected, "{steps} instructions: {outcomes:?}");
        }

        #[test]
        fn a_pushed_slot_is_in_one_place_whenever_another_thread_seizes_the_magazine() {
            run_all(Call::Push, usize::MAX);
        }

        #[test]
        fn a_popped_slot_is_in_one_place_whenever_another_thread_seizes_the_magazine() {
            run_all(Call::Pop, 2);
        }
    }
}
