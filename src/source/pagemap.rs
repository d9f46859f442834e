//! Which pages of a range the kernel keeps anything of: what is not among them reads as zero, and need not be written.
//!
//! ```text
//!   range     │ · · · █ · · · · · · █ █ · · · · · │     · never written since it was mapped, or released: zero
//!                     ╰─ 0 ─╯       ╰──╯                █ has a page, or one in swap: is written with zeros
//! ```
//!
//! `/proc/self/pagemap` answers by an `ioctl` of its own, `PAGEMAP_SCAN` (Linux 6.7): stretches of pages that are
//! present or swapped, but for those that are the kernel's page of zeros. So it needs no guess about swap, as `mincore`
//! would, and no pass over a word for each page, as reading that file would.
//!
//! Worked: a block of 64 MiB was touched in 64 places when it was freed, and is to be zero. To give it back and take 64
//! faults costs 190 µs, to write it 3 ms; to ask and to write 64 pages 30. Asking costs 2.5 µs for the file and 2 for
//! each MiB with little in it, and ends where an eighth of the pages has been found: then it is refused.
//!
//! The file is opened for each question and closed behind it. One that stayed open could be closed by the program, and
//! its number be another file's, whose bytes say nothing of our pages; and in the child of a fork it would tell of the
//! parent's. All three calls are made past the C library, whose own could be points at which a thread is cancelled.
//! Where the file is not there, or not to be had, or knows no such question, nobody asks again.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};

use super::KeepErrno;

/// `PAGEMAP_SCAN`: `_IOWR('f', 16, struct pm_scan_arg)`, where directions are as on most processors.
const SCAN: libc::c_ulong =
    3 << 30 | (size_of::<Question>() as libc::c_ulong) << 16 | (b'f' as libc::c_ulong) << 8 | 16;

/// The page is in memory.
const PRESENT: u64 = 1 << 3;
/// It is in swap, or on its way from one place to another.
const SWAPPED: u64 = 1 << 4;
/// It is the one page of zeros that all share who have only read.
const ZERO_PAGE: u64 = 1 << 5;

/// Of how many pages one may be found.
const PART: usize = 8;

/// Stretches to an answer.
const STRETCHES: usize = 32;

/// `struct page_region`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Stretch {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg`.
#[derive(Default)]
#[repr(C)]
struct Question {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    /// Where the answer ends.
    walk_end: u64,
    answer: u64,
    stretches: u64,
    most_pages: u64,
    /// Of a page that is told of: these are not so,
    inverted: u64,
    /// of these all are, or are not,
    all_of: u64,
    /// and of these one.
    any_of: u64,
    told: u64,
}

const _: () = assert!(size_of::<Question>() == 96);

/// Nobody here answers.
static UNKNOWN: AtomicBool = AtomicBool::new(false);

/// The pages of this process.
struct Pagemap(libc::c_long);

impl Pagemap {
    fn open() -> Option<Self> {
        let place = c"/proc/self/pagemap".as_ptr();
        // SAFETY: a path that ends with zero.
        let number = unsafe {
            libc::syscall(
                libc::SYS_openat,
                libc::AT_FDCWD,
                place,
                libc::O_RDONLY | libc::O_CLOEXEC,
            )
        };
        (number >= 0).then_some(Self(number))
    }

    /// Answers the question: how many stretches.
    fn ask(&self, question: &mut Question, answer: &mut [Stretch; STRETCHES]) -> Option<usize> {
        question.walk_end = 0;
        question.answer = answer.as_mut_ptr().addr() as u64;
        question.stretches = STRETCHES as u64;
        // SAFETY: the kernel writes to the question and to as many stretches as it is told there is room for.
        let count = unsafe { libc::syscall(libc::SYS_ioctl, self.0, SCAN, &raw mut *question) };
        usize::try_from(count).ok().filter(|&count| count <= STRETCHES)
    }
}

impl Drop for Pagemap {
    fn drop(&mut self) {
        // SAFETY: opened by `open`, and closed once.
        unsafe { libc::syscall(libc::SYS_close, self.0) };
    }
}

/// Makes a range read as zero by writing to those of its pages of `page` bytes that may be anything else. Whether it
/// does: not if that is more than an eighth of it, or nobody knows.
///
/// # Safety
///
/// The range is private anonymous memory of ours, page-aligned, may be written to, and is used by nobody else; its
/// contents may be lost, all or in part.
pub(super) unsafe fn clear(start: NonNull<u8>, bytes: usize, page: usize) -> bool {
    // Relaxed, here and below: the word stands for itself.
    if UNKNOWN.load(Ordering::Relaxed) {
        return false;
    }
    let errno = KeepErrno::new();
    // SAFETY: the caller's promise.
    let cleared = Pagemap::open().and_then(|pagemap| unsafe { clear_by(&pagemap, start, bytes, page) });
    // Too many files are open, or the kernel has no memory for the answer: that may change.
    if cleared.is_none() && ![libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EINTR].contains(&errno.now()) {
        UNKNOWN.store(true, Ordering::Relaxed);
    }
    cleared.unwrap_or(false)
}

/// The same; `None` if there is no answer.
///
/// # Safety
///
/// As for [`clear`].
unsafe fn clear_by(pagemap: &Pagemap, start: NonNull<u8>, bytes: usize, page: usize) -> Option<bool> {
    let mut question = Question {
        size: size_of::<Question>() as u64,
        start: start.addr().get() as u64,
        end: (start.addr().get() + bytes) as u64,
        most_pages: (bytes / page / PART).max(1) as u64,
        inverted: ZERO_PAGE,
        all_of: ZERO_PAGE,
        any_of: PRESENT | SWAPPED,
        told: PRESENT | SWAPPED,
        ..Question::default()
    };
    let (begin, end) = (question.start, question.end);
    let mut answer = [Stretch::default(); STRETCHES];
    while question.start < end {
        let count = pagemap.ask(&mut question, &mut answer)?;
        let found: u64 = answer[..count].iter().map(|stretch| stretch.end - stretch.start).sum();
        question.most_pages = question.most_pages.saturating_sub(found / page as u64);
        // All that there may be has been found: what is behind it is not known.
        if question.most_pages == 0 {
            return Some(false);
        }
        for stretch in &answer[..count] {
            // What is not so would be no answer to this question.
            if stretch.start < begin || stretch.end > end || stretch.end < stretch.start {
                return None;
            }
            let (at, len) = ((stretch.start - begin) as usize, (stretch.end - stretch.start) as usize);
            // SAFETY: in the caller's range, just checked.
            unsafe { start.add(at).write_bytes(0, len) };
        }
        // An answer that leads nowhere is none.
        if question.walk_end <= question.start {
            return None;
        }
        question.start = question.walk_end;
    }
    Some(true)
}
