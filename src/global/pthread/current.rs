//! The thread's pointer to its structure, or to a placeholder for none.
//!
//! ```text
//!   x86-64 Linux with glibc   a word in the thread's own block   mov place, [rip + …]; mov thread, fs:[place]
//!   elsewhere                 `thread_local!`
//! ```
//!
//! `thread_local!` would work everywhere, but it makes each read a function, and a compiler that inlines `alloc` into a
//! program may leave that function out of line: a call within each call. In a loaded library it is a call of
//! `__tls_get_addr` on top. A word in the block that threads have from their beginning needs neither. A library loaded
//! late gets it from the C library's spare space; if none is left, it fails to load and says so. This is not used with
//! musl, which keeps nothing spare; nor if the crate is in a Rust `dylib` (feature `rust-dylib`), because the program
//! would have to see the library's word.

pub(super) use imp::{get, place, set};

#[cfg(all(
    target_arch = "x86_64",
    target_pointer_width = "64",
    target_os = "linux",
    target_env = "gnu",
    not(feature = "rust-dylib"),
    not(miri)
))]
mod imp {
    use core::arch::{asm, global_asm};
    use core::ptr::{self, NonNull};

    use crate::global::pthread::FRESH;
    use crate::object::Thread;

    // Hidden: a library's word is not the program's. Named after FRESH, whose own name is unique to this copy of the
    // crate: there may be another in the program, of a version that differs only after its three numbers, or from
    // elsewhere.
    global_asm!(
        ".pushsection .tdata, \"awT\", @progbits",
        ".p2align 3",
        ".hidden {fresh}_current",
        ".globl {fresh}_current",
        ".type {fresh}_current, @object",
        "{fresh}_current:",
        ".quad {fresh}",
        ".size {fresh}_current, 8",
        ".popsection",
        fresh = sym FRESH,
    );

    /// The pointer, which is never null. (Were that its type, each inlined call would tell the compiler so, by two
    /// instructions that count as any other where it decides what to inline.)
    #[inline(always)]
    pub fn get() -> *mut Thread {
        let thread: *mut Thread;
        // SAFETY: two reads: of the word's distance from the thread's block, which the loader has written, and of the
        // word, which is FRESH's address or what `set` wrote: never null.
        unsafe {
            asm!(
                "mov {place}, qword ptr [rip + {fresh}_current@GOTTPOFF]",
                "mov {thread}, qword ptr fs:[{place}]",
                fresh = sym FRESH,
                place = out(reg) _,
                thread = out(reg) thread,
                options(nostack, preserves_flags, readonly)
            );
        }
        thread
    }

    /// Its address.
    pub fn place() -> *const NonNull<Thread> {
        let place: usize;
        // SAFETY: as in `get`; the first word of the block is its own address.
        unsafe {
            asm!(
                "mov {place}, qword ptr fs:[0]",
                "add {place}, qword ptr [rip + {fresh}_current@GOTTPOFF]",
                fresh = sym FRESH,
                place = out(reg) place,
                options(nostack, readonly)
            );
        }
        ptr::with_exposed_provenance(place)
    }

    /// Changes it.
    pub fn set(thread: NonNull<Thread>) {
        // SAFETY: the word is this thread's, and only read and written here.
        unsafe { place().cast_mut().write(thread) };
    }
}

#[cfg(not(all(
    target_arch = "x86_64",
    target_pointer_width = "64",
    target_os = "linux",
    target_env = "gnu",
    not(feature = "rust-dylib"),
    not(miri)
)))]
mod imp {
    use core::cell::Cell;
    use core::ptr::{self, NonNull};

    use crate::global::pthread::FRESH;
    use crate::object::Thread;

    std::thread_local! {
        #[allow(clippy::missing_const_for_thread_local, reason = "it is; clippy misses that on Android")]
        static CURRENT: Cell<NonNull<Thread>> = const { Cell::new(FRESH.as_thread()) };
    }

    /// The pointer, which is never null.
    #[inline(always)]
    pub fn get() -> *mut Thread {
        CURRENT.get().as_ptr()
    }

    /// Its address.
    pub fn place() -> *const NonNull<Thread> {
        CURRENT.with(|current| ptr::from_ref(current).cast())
    }

    /// Changes it.
    pub fn set(thread: NonNull<Thread>) {
        CURRENT.set(thread);
    }
}
