//! The end of the process, with a message that names the address; and the one warning there is.
//!
//! An allocator must not unwind, must not allocate to report why it stops, and must not go on once it knows that memory
//! is being used twice. The message is built on the stack and written to standard error by one raw write; then the
//! process aborts. Without an operating system, a panic in a function that cannot unwind does the same through the
//! program's panic handler. That handler may allocate, as std's does, and the interrupted thread may hold the heap's
//! lock: so from then on the heap has no memory, and no thread waits for it.

/// Whether panics use LLVM's unwinder. It writes 16 bytes at a time to the 56 bytes that Rust's library allocates for
/// it, as if they were aligned to 16. That is the case on x86-64 if the C library is not GNU's; as of Rust 1.95 the
/// alignment is not requested (fixed since: rust-lang/rust#161368).
pub(crate) const PANICS_WANT_16: bool = cfg!(all(target_arch = "x86_64", unix, not(target_env = "gnu")));

/// The size of that allocation in bytes, rounded to a multiple of 8.
pub(crate) const PANIC_BYTES: usize = 56;

/// A number in a message.
#[derive(Clone, Copy)]
pub(crate) enum Number {
    /// In hexadecimal.
    Address(usize),
    /// In decimal: of bytes, or of whatever is counted.
    Count(usize),
}

/// Calls a function of the program's in the middle of an allocation, from where nothing may unwind: if it does, the
/// process ends, and says so.
#[inline(always)]
pub(crate) fn unless_it_unwinds<R>(call: impl FnOnce() -> R, what: &'static str, numbers: [Number; 2]) -> R {
    /// Dropped by unwinding only.
    struct Unwinding(&'static str, [Number; 2]);
    impl Drop for Unwinding {
        fn drop(&mut self) {
            abort(self.0, self.1[0], self.1[1]);
        }
    }
    let unwinding = Unwinding(what, numbers);
    let result = call();
    core::mem::forget(unwinding);
    result
}

/// Ends the process: prints `what`, then the two numbers.
#[cold]
#[inline(never)]
pub(crate) fn abort(what: &str, first: Number, second: Number) -> ! {
    let mut line = Line {
        bytes: [0; LENGTH],
        len: 0,
    };
    line.push("pageheap: ");
    line.push(what);
    line.push(": ");
    line.push_number(first);
    line.push(", ");
    line.push_number(second);
    finish(&mut line)
}

/// Ends the process: prints `what`, then each number with its name.
#[cold]
#[inline(never)]
#[cfg_attr(not(feature = "checks"), allow(dead_code, reason = "for the checked build"))]
pub(crate) fn abort_about(what: &str, numbers: &[(&str, Number)]) -> ! {
    let mut line = Line {
        bytes: [0; LENGTH],
        len: 0,
    };
    line.push("pageheap: ");
    line.push(what);
    for (index, (name, number)) in numbers.iter().enumerate() {
        line.push(if index == 0 { ": " } else { ", " });
        line.push(name);
        line.push(" ");
        line.push_number(*number);
    }
    finish(&mut line)
}

/// Prints a warning to standard error and continues: `parts` one after the other, at most 189 bytes of them. Bytes that
/// a terminal might interpret become question marks. May change `errno`.
#[cold]
#[inline(never)]
#[cfg(all(any(unix, windows), feature = "std"))]
pub(crate) fn warn(parts: &[&[u8]]) {
    let mut line = Line {
        bytes: [0; LENGTH],
        len: 0,
    };
    line.push("pageheap: ");
    for &byte in parts.iter().copied().flatten().take(189) {
        line.push_byte(if matches!(byte, b' '..=b'~') { byte } else { b'?' });
    }
    line.push("\n");
    system::write(line.text());
}

/// The most bytes of a message.
const LENGTH: usize = 256;

struct Line {
    bytes: [u8; LENGTH],
    len: usize,
}

impl Line {
    fn push(&mut self, text: &str) {
        for &byte in text.as_bytes() {
            self.push_byte(byte);
        }
    }

    fn push_byte(&mut self, byte: u8) {
        if let Some(cell) = self.bytes.get_mut(self.len) {
            *cell = byte;
            self.len += 1;
        }
    }

    fn push_number(&mut self, number: Number) {
        let (number, base) = match number {
            Number::Address(number) => {
                self.push("0x");
                (number, 16)
            }
            Number::Count(number) => (number, 10),
        };
        // The power of the base that belongs to the first digit.
        let mut power = 1;
        while number / power >= base {
            power *= base;
        }
        while power > 0 {
            let digit = number / power % base;
            self.push(&"0123456789abcdef"[digit..=digit]);
            power /= base;
        }
    }

    fn text(&self) -> &[u8] {
        &self.bytes[..self.len.min(self.bytes.len())]
    }
}

#[cfg(all(any(unix, windows), feature = "std"))]
fn finish(line: &mut Line) -> ! {
    line.push("\n");
    system::write(line.text());
    system::abort()
}

#[cfg(all(unix, feature = "std"))]
mod system {
    /// Writes to standard error. May change `errno`. A system call where that is possible, since the function is a
    /// point of cancellation: a warning would unwind out of an allocation.
    pub(super) fn write(text: &[u8]) {
        // SAFETY: the bytes are initialised and live; a failed write changes nothing else.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        unsafe {
            libc::syscall(libc::SYS_write, 2, text.as_ptr(), text.len())
        };
        // SAFETY: as above.
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        unsafe {
            libc::write(2, text.as_ptr().cast(), text.len())
        };
    }

    pub(super) fn abort() -> ! {
        // SAFETY: no preconditions.
        unsafe { libc::abort() }
    }
}

#[cfg(all(windows, feature = "std"))]
mod system {
    use core::ptr;

    use windows_sys::Win32::Storage::FileSystem::WriteFile;
    use windows_sys::Win32::System::Console::{GetStdHandle, STD_ERROR_HANDLE};

    /// Writes to standard error. May change the thread's error code.
    pub(super) fn write(text: &[u8]) {
        let mut written = 0;
        // SAFETY: the bytes are initialised and live, and there is a place for the count; without a standard error the
        // write fails.
        unsafe {
            let error = GetStdHandle(STD_ERROR_HANDLE);
            WriteFile(error, text.as_ptr(), text.len() as u32, &mut written, ptr::null_mut());
        }
    }

    /// Fails fast: no handler of the program runs.
    pub(super) fn abort() -> ! {
        std::process::abort()
    }
}

/// Whether the process is ending, and all other threads have been stopped: then a lock that one of them held is never
/// released.
#[cfg(all(windows, feature = "std"))]
pub(crate) fn is_shutting_down() -> bool {
    #[cfg_attr(
        target_arch = "x86",
        link(name = "ntdll", kind = "raw-dylib", import_name_type = "undecorated")
    )]
    #[cfg_attr(not(target_arch = "x86"), link(name = "ntdll", kind = "raw-dylib"))]
    unsafe extern "system" {
        // Documented, but not in windows-sys.
        safe fn RtlDllShutdownInProgress() -> u8;
    }
    RtlDllShutdownInProgress() != 0
}

/// Never: elsewhere threads run until the process has ended.
#[cfg(not(all(windows, feature = "std")))]
pub(crate) const fn is_shutting_down() -> bool {
    false
}

/// 1 once the process is about to end through the program's panic handler.
#[cfg(not(all(any(unix, windows), feature = "std")))]
static ENDING: core::sync::atomic::AtomicBool = core::sync::atomic::AtomicBool::new(false);

/// Whether the process is about to end through the program's panic handler: then the thread that stopped may hold any
/// lock, and a thread that waits for one waits forever.
#[cfg(not(all(any(unix, windows), feature = "std")))]
pub(crate) fn is_ending() -> bool {
    // Relaxed: the thread that stopped sees its own store; others may wait.
    ENDING.load(core::sync::atomic::Ordering::Relaxed)
}

/// Never: nothing of the program runs between the message and the end.
#[cfg(all(any(unix, windows), feature = "std"))]
pub(crate) const fn is_ending() -> bool {
    false
}

#[cfg(not(all(any(unix, windows), feature = "std")))]
fn finish(line: &mut Line) -> ! {
    /// A panic cannot leave a function with a foreign calling convention: it ends the process (or, without std, the
    /// panic handler does).
    extern "C" fn stop(line: &Line) -> ! {
        panic!("{}", core::str::from_utf8(line.text()).unwrap_or("pageheap"))
    }
    // Relaxed: as in `is_ending`.
    ENDING.store(true, core::sync::atomic::Ordering::Relaxed);
    stop(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_hexadecimal_and_counts_decimal() {
        let mut line = Line {
            bytes: [0; LENGTH],
            len: 0,
        };
        for number in [0, 9, 10, 15, 16, 100, 255, 256] {
            line.push_number(Number::Address(number));
            line.push(" ");
            line.push_number(Number::Count(number));
            line.push(" ");
        }
        let most = u32::MAX as usize;
        line.push_number(Number::Address(most));
        line.push_number(Number::Count(most));
        let text = core::str::from_utf8(line.text()).unwrap();
        let few = "0x0 0 0x9 9 0xa 10 0xf 15 0x10 16 0x64 100 0xff 255 0x100 256 ";
        assert_eq!(text.strip_prefix(few), Some("0xffffffff4294967295"));
        line.len = 0;
        line.push_number(Number::Address(usize::MAX));
        assert_eq!(line.len, 2 + size_of::<usize>() * 2);
    }
}
