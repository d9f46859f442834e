//! The functions that the compiler calls for copies, fills and comparisons. They work byte by byte: speed is not what
//! is tested here.
//!
//! `#![no_builtins]` at the root keeps the compiler from turning these loops into calls to themselves.

/// # Safety
///
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    for at in 0..bytes {
        // SAFETY: the caller's promise: `bytes` bytes at either pointer.
        unsafe { to.add(at).write(from.add(at).read()) };
    }
    to
}

/// # Safety
///
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    if to.addr() <= from.addr() {
        // SAFETY: the caller's promise; copying upwards is right, as the target begins below.
        return unsafe { memcpy(to, from, bytes) };
    }
    for at in (0..bytes).rev() {
        // SAFETY: the caller's promise: `bytes` bytes at either pointer.
        unsafe { to.add(at).write(from.add(at).read()) };
    }
    to
}

/// # Safety
///
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, bytes: usize) -> *mut u8 {
    for at in 0..bytes {
        // SAFETY: the caller's promise: `bytes` bytes at the pointer.
        unsafe { to.add(at).write(value as u8) };
    }
    to
}

/// # Safety
///
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, bytes: usize) -> i32 {
    for at in 0..bytes {
        // SAFETY: the caller's promise: `bytes` bytes at either pointer.
        let (left, right) = unsafe { (left.add(at).read(), right.add(at).read()) };
        if left != right {
            return i32::from(left) - i32::from(right);
        }
    }
    0
}

/// # Safety
///
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, bytes: usize) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { memcmp(left, right, bytes) }
}
