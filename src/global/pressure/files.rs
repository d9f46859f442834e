//! The system's small files, read without memory, without changing `errno`, and without a point of cancellation.
//!
//! ```text
//!   no such file, or not for us                     nothing: empty text, no line
//!   no room for one more open file, no memory       NotNow: the caller tries again later
//! ```
//!
//! Worked: `find_at` for a line of `/proc/thread-self/cgroup` opens the file, reads up to 1,024 bytes at a time, and
//! passes line by line to its caller, until that has an answer.
//!
//! Cost: three system calls for a file that is read at once, some microseconds; 1 KiB of stack for its path, which is
//! off the stack before anything is read, and 1 KiB for lines.

use core::ffi::CStr;
use core::fmt::Write as _;

use crate::source::KeepErrno;

/// Text of a fixed size, zero-terminated.
pub(super) struct Text<const BYTES: usize = 256> {
    bytes: [u8; BYTES],
    len: usize,
}

/// The path of a folder or a file.
pub(super) type Path = Text<1024>;

/// The maximum length of a line, its end included: what a [`Path`] has room for, and what precedes it.
const LINE_BYTES: usize = 1024;

impl<const BYTES: usize> core::fmt::Write for Text<BYTES> {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let end = self.len + text.len();
        // One byte stays zero.
        let place = self.bytes[..BYTES - 1].get_mut(self.len..end).ok_or(core::fmt::Error)?;
        place.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

impl<const BYTES: usize> Text<BYTES> {
    pub(super) const fn new() -> Self {
        Self {
            bytes: [0; BYTES],
            len: 0,
        }
    }

    pub(super) fn text(&self) -> &str {
        core::str::from_utf8(&self.bytes[..self.len]).unwrap_or("")
    }
}

/// Why a look fails: a file cannot be opened or read just now, and may be at the next.
pub(super) struct NotNow;

/// The first bytes of the file at `path` below `folder`. Empty if there is none to be read.
pub(super) fn read_at(folder: &str, path: &str) -> Result<Text, NotNow> {
    open_at(folder, path)?.map_or(Ok(Text::new()), |file| file.beginning())
}

/// The first answer to a line of the file at `path` below `folder`.
pub(super) fn find_at<T>(
    folder: &str,
    path: &str,
    mut answer: impl FnMut(&str) -> Option<T>,
) -> Result<Option<T>, NotNow> {
    let Some(file) = open_at(folder, path)? else {
        return Ok(None);
    };
    let (mut bytes, mut len) = ([0; LINE_BYTES], 0);
    loop {
        let read = file.read(&mut bytes[len..])?;
        len += read;
        let mut rest = &bytes[..len];
        // At the end of the file the last line may lack a newline.
        while let Some(end) = (rest.iter().position(|&byte| byte == b'\n'))
            .or_else(|| (read == 0 && !rest.is_empty()).then_some(rest.len()))
        {
            if let Some(found) = core::str::from_utf8(&rest[..end]).ok().and_then(&mut answer) {
                return Ok(Some(found));
            }
            rest = rest.get(end + 1..).unwrap_or_default();
        }
        if read == 0 {
            return Ok(None);
        }
        // A line longer than the whole buffer is skipped.
        let begun = if rest.len() == bytes.len() { 0 } else { rest.len() };
        bytes.copy_within(len - begun..len, 0);
        len = begun;
    }
}

/// Opens the file at `path` below `folder`; none if both together are too long. Not inlined: its path is off the small
/// stack before anything is read.
#[inline(never)]
fn open_at(folder: &str, path: &str) -> Result<Option<File>, NotNow> {
    let mut whole = Path::new();
    if write!(whole, "{folder}{path}").is_err() {
        return Ok(None);
    }
    CStr::from_bytes_until_nul(&whole.bytes).map_or(Ok(None), File::open)
}

/// A file that is read and then closed.
struct File {
    number: libc::c_int,
    errno: KeepErrno,
}

impl File {
    /// Opens it; none if it is not there, or not for us.
    fn open(path: &CStr) -> Result<Option<Self>, NotNow> {
        let errno = KeepErrno::new();
        // SAFETY: a zero-terminated path.
        let number = unsafe { call::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
        if number < 0 {
            return nothing(&errno);
        }
        Ok(Some(Self { number, errno }))
    }

    /// Reads, and returns how many bytes; none at the end, and if it cannot be read.
    fn read(&self, bytes: &mut [u8]) -> Result<usize, NotNow> {
        // SAFETY: a buffer of the given length.
        let read = unsafe { call::read(self.number, bytes.as_mut_ptr().cast(), bytes.len()) };
        usize::try_from(read).or_else(|_| nothing(&self.errno))
    }

    /// The first bytes of the file.
    fn beginning(&self) -> Result<Text, NotNow> {
        let mut text = Text::new();
        text.len = self.read(&mut text.bytes[..255])?;
        Ok(text)
    }
}

/// What a call says that has just failed: that there is nothing; or nothing yet, if it failed for want of memory or of
/// room for one more open file, of the process or of the system.
fn nothing<T: Default>(errno: &KeepErrno) -> Result<T, NotNow> {
    match errno.now() {
        libc::EMFILE | libc::ENFILE | libc::ENOMEM => Err(NotNow),
        _ => Ok(T::default()),
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: opened by `open`, and closed once.
        unsafe { call::close(self.number) };
    }
}

/// The C library's functions, without its points of cancellation: a thread that is being cancelled would end here, with
/// the file open and the turn taken.
mod call {
    use core::ffi::{c_char, c_int, c_void};

    /// # Safety
    ///
    /// As for the function of this name, here and below.
    pub(super) unsafe fn open(path: *const c_char, how: c_int) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, how) as c_int }
    }

    /// # Safety
    ///
    /// As above.
    pub(super) unsafe fn read(file: c_int, bytes: *mut c_void, len: usize) -> isize {
        // SAFETY: the caller's promise.
        unsafe { libc::syscall(libc::SYS_read, file, bytes, len) as isize }
    }

    /// # Safety
    ///
    /// As above.
    pub(super) unsafe fn close(file: c_int) {
        // SAFETY: the caller's promise.
        unsafe { libc::syscall(libc::SYS_close, file) };
    }
}
