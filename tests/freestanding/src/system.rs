//! The operating system's part: the entry point, two system calls of Linux, and the end after a panic.

use alloc::alloc::Layout;
use core::arch::{asm, global_asm};
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, Ordering};

// The stack pointer is aligned here, and a call misaligns it by 8, as functions expect; there is no frame above.
#[cfg(target_arch = "x86_64")]
global_asm!(".globl _start", "_start:", "xor ebp, ebp", "call {main}", "ud2", main = sym start);

#[cfg(target_arch = "aarch64")]
global_asm!(".globl _start", "_start:", "mov x29, xzr", "bl {main}", "brk #1", main = sym start);

/// On ARM, the compiler's own library asks a C library whether newer atomic instructions exist. It is told that none
/// do.
#[cfg(target_arch = "aarch64")]
// SAFETY: nothing else here has this name.
#[unsafe(no_mangle)]
extern "C" fn getauxval(_what: core::ffi::c_ulong) -> core::ffi::c_ulong {
    0
}

extern "C" fn start() -> ! {
    crate::main();
    exit(0)
}

#[cfg(target_arch = "x86_64")]
mod number {
    pub const WRITE: usize = 1;
    pub const EXIT: usize = 231;
}

#[cfg(target_arch = "aarch64")]
mod number {
    pub const WRITE: usize = 64;
    pub const EXIT: usize = 94;
}

/// # Safety
///
/// As the system call's own.
unsafe fn call(number: usize, first: usize, second: usize, third: usize) -> usize {
    let result;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise; the kernel changes the registers named here and no others.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") first => result,
            in("x1") second,
            in("x2") third,
            options(nostack),
        );
    }
    result
}

/// Standard output.
pub struct Output;

impl Write for Output {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // SAFETY: the bytes are live; the kernel only reads them.
        unsafe { call(number::WRITE, 1, text.as_ptr().expose_provenance(), text.len()) };
        Ok(())
    }
}

/// Ends the process.
pub fn exit(code: usize) -> ! {
    // SAFETY: exit_group touches no memory.
    unsafe { call(number::EXIT, code, 0, 0) };
    // It does not return.
    loop {
        core::hint::spin_loop();
    }
}

/// Whether a panic is expected. No memory must be available in it.
pub static IS_EXPECTED: AtomicBool = AtomicBool::new(false);

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    // Writing cannot fail.
    let _ = writeln!(Output, "{info}");
    if !IS_EXPECTED.load(Ordering::Relaxed) {
        exit(101);
    }
    // The thread that stopped holds locks that statistics must not wait for.
    let _ = writeln!(Output, "{}", crate::HEAP.stats());
    // SAFETY: the size is not zero.
    let memory = core::hint::black_box(unsafe { alloc::alloc::alloc(Layout::new::<u64>()) });
    exit(if memory.is_null() { 0 } else { 102 })
}
