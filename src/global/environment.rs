//! What the environment can change in a heap over the system's memory, when it opens. Nothing needs to be set.
//!
//! | variable | instead of | value |
//! |---|---|---|
//! | `PAGEHEAP_RESERVE` | [`reserve`](crate::GlobalHeap::reserve) | bytes |
//! | `PAGEHEAP_LIMIT` | [`limit`](crate::GlobalHeap::limit) | bytes |
//! | `PAGEHEAP_SOFT_LIMIT` | [`soft_limit`](crate::GlobalHeap::soft_limit) | bytes |
//! | `PAGEHEAP_BACKGROUND` | [`background`](crate::GlobalHeap::background) | `0`: none; `1`: as the `static` says |
//! | `PAGEHEAP_HUGE_PAGES` | [`huge_pages`](crate::GlobalHeap::huge_pages) | `system`, `advise` or `avoid` |
//! | `PAGEHEAP_RELEASE` | [`release_lazily`](crate::GlobalHeap::release_lazily) | `lazily` or `at-once` |
//! | `PAGEHEAP_SPARSE_ZEROING` | [`sparse_zeroing`](crate::GlobalHeap::sparse_zeroing) | `0` or `1` |
//!
//! Bytes are a decimal number, optionally followed by `K`, `M`, `G` or `T` for powers of 1,024, or by `KiB` and so on:
//! `PAGEHEAP_LIMIT=512M`. (Not `MB`, which may be 1,000,000 bytes, nor `m`, which may be a thousandth.) A value that
//! cannot be parsed is ignored, and a line on standard error says so, because a program that was to be limited and is
//! not should not look as if it were:
//!
//! ```text
//!   pageheap: ignored: PAGEHEAP_LIMIT=512MB, bytes wanted: 512M and the like
//! ```
//!
//! A reservation of less than a megabyte is ignored too, because hardly any program reaches `main` with that; a limit
//! is applied however small. An empty value counts as unset. Programs that run with more rights than their caller
//! (set-user-ID) ignore the environment.
//!
//! A variable whose name is misspelt is not noticed: the heap looks for the names above, and does not go through all
//! of the environment, which another thread may be changing, and in which a program may have variables of its own
//! that begin alike. [`current_limit`](crate::GlobalHeap::current_limit) says what has come of it.
//!
//! It is read once per heap, at its first allocation: seven walks through the environment, no memory.

use core::ffi::CStr;

use crate::fatal;
use crate::heap::Config;
use crate::source::{HugePages, KeepErrno};

/// Applies the environment to the configuration and to whether there is to be a background thread.
#[cold]
pub(super) fn overridden(mut config: Config, background: bool) -> (Config, bool) {
    const BYTES: &str = "bytes wanted: 512M and the like";
    let bytes = |name| read(name, BYTES, parse_bytes);
    let enough = |text: &[u8]| parse_bytes(text).filter(|&bytes| bytes >= Config::LEAST_BYTES);
    if let Some(reserve) = read(c"PAGEHEAP_RESERVE", "bytes wanted: 1M or more", enough) {
        config.reserve = reserve;
    }
    if let Some(limit) = bytes(c"PAGEHEAP_LIMIT") {
        config = config.limit_bytes(limit);
    }
    if let Some(limit) = bytes(c"PAGEHEAP_SOFT_LIMIT") {
        config = config.soft_limit_bytes(limit);
    }
    let wish = read(
        c"PAGEHEAP_HUGE_PAGES",
        "wanted: system, advise, avoid",
        |text| match text {
            b"system" => Some(HugePages::System),
            b"advise" => Some(HugePages::Advise),
            b"avoid" => Some(HugePages::Avoid),
            _ => None,
        },
    );
    config.huge_pages = wish.unwrap_or(config.huge_pages);
    let lazily = read(c"PAGEHEAP_RELEASE", "wanted: lazily, at-once", |text| match text {
        b"lazily" => Some(true),
        b"at-once" => Some(false),
        _ => None,
    });
    config.lazily = lazily.unwrap_or(config.lazily);
    let switch = |name| {
        read(name, "wanted: 0, 1", |text| match text {
            b"0" => Some(false),
            b"1" => Some(true),
            _ => None,
        })
    };
    config.sparse = switch(c"PAGEHEAP_SPARSE_ZEROING").unwrap_or(config.sparse);
    let may = switch(c"PAGEHEAP_BACKGROUND").unwrap_or(true);
    (config, background && may)
}

/// Room for a value, where reading one means copying it. None of ours is as long.
const MOST_BYTES: usize = 64;

/// The parsed value of a variable, if it is set and not empty. A value that cannot be parsed causes a warning that says
/// what is wanted.
fn read<T>(name: &CStr, wanted: &str, parse: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
    let mut room = [0; MOST_BYTES];
    let text = system::value(name, &mut room).filter(|text| !text.is_empty())?;
    let parsed = parse(text);
    if parsed.is_none() {
        let _errno = KeepErrno::new();
        fatal::warn(&[b"ignored: ", name.to_bytes(), b"=", text, b", ", wanted.as_bytes()]);
    }
    parsed
}

#[cfg(unix)]
mod system {
    use core::ffi::{CStr, c_char};

    /// The value of a variable.
    pub(super) fn value<'a>(name: &CStr, _room: &'a mut [u8; super::MOST_BYTES]) -> Option<&'a [u8]> {
        // Miri lacks the calls: there no variable is set.
        if cfg!(miri) {
            return None;
        }
        // SAFETY: a zero-terminated string. Changing the environment while another thread reads it breaks POSIX's rule,
        // and not only this code; it is usually read here before the program starts its own threads.
        let text = unsafe { get(name.as_ptr()) };
        // SAFETY: null, or a zero-terminated string that stays in place.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_bytes())
    }

    /// # Safety
    ///
    /// `name` is a zero-terminated string.
    #[cfg(target_os = "linux")]
    unsafe fn get(name: *const c_char) -> *const c_char {
        // Not in the libc crate. glibc since 2.17, musl since 1.1.24.
        unsafe extern "C" {
            fn secure_getenv(name: *const c_char) -> *const c_char;
        }
        // SAFETY: the caller's promise.
        unsafe { secure_getenv(name) }
    }

    /// # Safety
    ///
    /// `name` is a zero-terminated string.
    #[cfg(not(target_os = "linux"))]
    unsafe fn get(name: *const c_char) -> *const c_char {
        if has_more_rights() {
            return core::ptr::null();
        }
        // SAFETY: the caller's promise.
        unsafe { libc::getenv(name) }
    }

    /// Whether the program was started with more rights than its caller has. It may have given them up since: then its
    /// user and its effective user are the same, but the environment is still the caller's.
    #[cfg(target_os = "android")]
    fn has_more_rights() -> bool {
        // SAFETY: no preconditions.
        unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
    }

    /// As above: macOS and the BSDs have a call for it.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    fn has_more_rights() -> bool {
        // Not in the libc crate for every Unix.
        unsafe extern "C" {
            safe fn issetugid() -> core::ffi::c_int;
        }
        issetugid() != 0
    }
}

#[cfg(windows)]
mod system {
    use core::ffi::CStr;

    use windows_sys::Win32::System::Environment::GetEnvironmentVariableA;

    use crate::source::KeepErrno;

    /// The value of a variable. One that does not fit is nonsense: something else that is nonsense stands for it.
    pub(super) fn value<'a>(name: &CStr, room: &'a mut [u8; super::MOST_BYTES]) -> Option<&'a [u8]> {
        let _error = KeepErrno::new();
        // SAFETY: a zero-terminated name, and a place as long as it says.
        let len = unsafe { GetEnvironmentVariableA(name.as_ptr().cast(), room.as_mut_ptr(), room.len() as u32) };
        // If it does not fit, this is how long it is, with its end.
        Some(room.get(..len as usize).unwrap_or(b"(too long)"))
    }
}

/// Parses values such as `512M`.
fn parse_bytes(text: &[u8]) -> Option<usize> {
    let named = text.strip_suffix(b"iB");
    let (digits, shift) = match named.unwrap_or(text).split_last()? {
        (b'K', digits) => (digits, 10),
        (b'M', digits) => (digits, 20),
        (b'G', digits) => (digits, 30),
        (b'T', digits) => (digits, 40),
        _ if named.is_some() => return None,
        _ => (text, 0),
    };
    if digits.is_empty() {
        return None;
    }
    let number = digits.iter().try_fold(0_usize, |number, &digit| {
        let digit = digit.checked_sub(b'0').filter(|&digit| digit < 10)?;
        number.checked_mul(10)?.checked_add(usize::from(digit))
    })?;
    number.checked_mul(1_usize.checked_shl(shift)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_decimal_numbers_with_a_power_of_1024() {
        let good: [(&[u8], usize); 7] = [
            (b"0", 0),
            (b"12345", 12345),
            (b"7K", 7 << 10),
            (b"512M", 512 << 20),
            (b"3G", 3 << 30),
            (b"3GiB", 3 << 30),
            (b"100KiB", 100 << 10),
        ];
        for (text, bytes) in good {
            assert_eq!(parse_bytes(text), Some(bytes), "{text:?}");
        }
        let terabytes = parse_bytes(b"2T").map(|bytes| bytes as u64);
        assert_eq!(terabytes, (usize::BITS == u64::BITS).then_some(2 << 40));
        let bad: [&[u8]; 14] = [
            b"",
            b"M",
            b"MiB",
            b"iB",
            b"7iB",
            b"7MB",
            b"7Mi",
            b"-1",
            b"1m",
            b" 1",
            b"1 ",
            b"0x10",
            b"99999999999999999999",
            b"99999999999T",
        ];
        for text in bad {
            assert_eq!(parse_bytes(text), None, "{text:?}");
        }
    }
}
