//! The end of the process, with a message that names the address; and the one warning there is.
//!
//! An allocator must not unwind, must not allocate to say why it stops, and must not go on once it knows that memory is
//! being used twice. The message is put together on the stack and written by one raw write to standard error; then the
//! process aborts. Without an operating system a panic in a function that cannot unwind does the same through the
//! program's panic handler. That may be one that allocates, as std's is, and what stopped may hold the heap's lock: so
//! from here on there is no memory, and nobody waits for it.

/// Whether a panic is carried by LLVM's unwinder, which writes 16 bytes at a time to what Rust's library allocates for
/// it, 56 bytes, as if that were aligned to 16. It is what a panic is on x86-64 where the C library is not GNU's, and
/// as of Rust 1.95 it is allocated without saying so (mended since: rust-lang/rust#161368).
pub(crate) const PANICS_WANT_16: bool = cfg!(all(target_arch = "x86_64", unix, not(target_env = "gnu")));

/// The bytes of it, in steps of 8.
pub(crate) const PANIC_BYTES: usize = 56;

/// Ends the process: `what`, then the two numbers in hexadecimal.
#[cold]
#[inline(never)]
pub(crate) fn abort(what: &str, first: usize, second: usize) -> ! {
    let mut line = Line {
        bytes: [0; 200],
        len: 0,
    };
    line.push("pageheap: ");
    line.push(what);
    line.push(": ");
    line.push_hex(first);
    line.push(", ");
    line.push_hex(second);
    finish(&mut line)
}

/// Ends the process: `what`, then each number with its name, in hexadecimal.
#[cold]
#[inline(never)]
#[cfg_attr(not(feature = "checks"), allow(dead_code, reason = "for the checked build"))]
pub(crate) fn abort_about(what: &str, numbers: &[(&str, usize)]) -> ! {
    let mut line = Line {
        bytes: [0; 200],
        len: 0,
    };
    line.push("pageheap: ");
    line.push(what);
    for (index, (name, number)) in numbers.iter().enumerate() {
        line.push(if index == 0 { ": " } else { ", " });
        line.push(name);
        line.push(" ");
        line.push_hex(*number);
    }
    finish(&mut line)
}

/// Says something to who looks at standard error, and goes on: `parts` one behind the other, 189 bytes of them at the
/// most. What a terminal might take for an order is a question mark. May change `errno`.
#[cold]
#[inline(never)]
#[cfg(all(unix, feature = "std"))]
pub(crate) fn warn(parts: &[&[u8]]) {
    let mut line = Line {
        bytes: [0; 200],
        len: 0,
    };
    line.push("pageheap: ");
    for &byte in parts.iter().copied().flatten().take(189) {
        line.push_byte(if matches!(byte, b' '..=b'~') { byte } else { b'?' });
    }
    line.push("\n");
    let text = line.text();
    // SAFETY: the bytes are initialised and live; a failed write changes nothing but `errno`, which the caller minds.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

struct Line {
    bytes: [u8; 200],
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

    fn push_hex(&mut self, number: usize) {
        let digits = (usize::BITS - number.leading_zeros()).div_ceil(4).max(1);
        self.push("0x");
        for digit in (0..digits).rev() {
            let value = number >> (4 * digit) & 15;
            self.push(&"0123456789abcdef"[value..=value]);
        }
    }

    fn text(&self) -> &[u8] {
        &self.bytes[..self.len.min(self.bytes.len())]
    }
}

#[cfg(all(unix, feature = "std"))]
fn finish(line: &mut Line) -> ! {
    line.push("\n");
    let text = line.text();
    // SAFETY: the bytes are initialised and live; a failed write changes nothing, and abort has no preconditions.
    unsafe {
        let _ = libc::write(2, text.as_ptr().cast(), text.len());
        libc::abort()
    }
}

/// 1 once the process is about to end by the program's panic handler.
#[cfg(not(all(unix, feature = "std")))]
static ENDING: core::sync::atomic::AtomicBool = core::sync::atomic::AtomicBool::new(false);

/// Whether the process is about to end, by what the program does in a panic: then who stopped may hold any lock, and
/// whoever waits for one waits for ever.
#[cfg(not(all(unix, feature = "std")))]
pub(crate) fn is_ending() -> bool {
    // Relaxed: to who has stopped it is his own; others may wait.
    ENDING.load(core::sync::atomic::Ordering::Relaxed)
}

/// Never: nothing is called between the message and the end.
#[cfg(all(unix, feature = "std"))]
pub(crate) const fn is_ending() -> bool {
    false
}

#[cfg(not(all(unix, feature = "std")))]
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
