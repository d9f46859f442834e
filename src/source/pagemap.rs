//! Which pages of a range the kernel keeps anything of: what is not among them reads as zero, and need not be written.
//!
//! ```text
//!   range     │ · · · █ · · · · · · █ █ · · · · · │     · never written since it was mapped, or released: zero
//!                     ╰─ 0 ─╯       ╰──╯                █ has a page: is written with zeros
//! ```
//!
//! `/proc/thread-self/pagemap` answers by an `ioctl` of its own, `PAGEMAP_SCAN` (Linux 6.7): stretches of pages that
//! are present or swapped, but for those that are the kernel's page of zeros. So it needs no guess about swap, as
//! `mincore` would, and no pass over a word for each page, as reading that file would. (By way of `self` it would be
//! the file of the thread that began the process: which may have ended, and then older kernels fall over the question.)
//!
//! Worked: a block of 64 MiB was touched in 64 places when it was freed, and is to be zero. To give it back and take 64
//! faults costs 190 µs, to write it 3 ms; to ask and to write 64 pages 40 to 60. Asking costs 2.5 µs for the file and 2
//! for each MiB with little in it. It ends where an eighth of the pages has been found, or one in swap: then it is
//! refused, and has cost as much as an eighth at the most. One byte touched in a huge page is 512 pages.
//!
//! **The file** is opened for each question and closed behind it. One that stayed open could be closed by the program,
//! and its number be another file's. So there is a number in use for some microseconds that the program has not asked
//! for; who sends files to numbers of his own choice (`dup2`) while other threads run meets such numbers from any
//! library. In the child of a fork it would stay for ever: a fork waits for who asks, for 0.1 s at the most, and nobody
//! asks meanwhile; who is at a long range makes way. (So it is with the files that tell of pressure,
//! `global/pressure.rs`.) All three calls are made past the C library, whose own could be points at which a thread is
//! cancelled.
//!
//! **Not zero, though not there**, is memory that somebody else fills in where it is first touched: in a process that
//! is being restored page by page (`userfaultfd`, as CRIU's lazy pages). Nobody says so here; such a process is to be
//! started with `PAGEHEAP_SPARSE_ZEROING=0`.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

use crate::sync::{relax, wait_for};

use super::KeepErrno;

/// `PAGEMAP_SCAN`: `_IOWR('f', 16, struct pm_scan_arg)`. (Both directions are the same two bits on all processors.)
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

/// So much of a range is asked about at a time: what takes half a millisecond or so. A fork waits for no more.
const STEP: u64 = 256 << 20;

/// As [`STEP`], in pages that are written.
const STEP_PAGES: u64 = 512;

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

/// Who asks, in one word, so that each change is of all of it:
///
/// ```text
///   births · 2¹⁶ │ how many ask · 2 │ whether the process forks
/// ```
///
/// A birth is that of this process by a fork: a file from before tells of the parent's pages.
static ASKING: AtomicU32 = AtomicU32::new(0);

/// The process forks: nobody begins.
const FORKING: u32 = 1;

/// One who asks.
const ONE: u32 = 2;

/// Above both: as many threads do not ask at a time.
const BIRTH_SHIFT: u32 = 16;

/// How often a fork waits for who asks, and how long at a time: he has the file for less, unless he is preempted. Each
/// takes some 50 µs more than it is told to: 0.1 s in all. Counted, for a clock may be refused.
const WAITS: u32 = 600;
const WAIT: Duration = Duration::from_micros(100);

/// Before those it spins and yields.
const ROUNDS: u32 = 10;

/// Whether somebody asks.
fn is_asked(asking: u32) -> bool {
    (asking & ((1 << BIRTH_SHIFT) - 1)) / ONE != 0
}

/// Before a fork: nobody has the file, so that the child does not either; unless somebody keeps it too long. One at a
/// time.
pub(crate) fn hold() {
    // Acquire, twice: pairs with the release of who has closed it.
    let mut asking = ASKING.fetch_or(FORKING, Ordering::Acquire) | FORKING;
    for round in 0..ROUNDS + WAITS {
        if !is_asked(asking) {
            break;
        }
        // Nobody wakes us: who asks has nobody to think of.
        if round < ROUNDS {
            relax(round);
        } else {
            wait_for(&ASKING, asking, Some(WAIT));
        }
        asking = ASKING.load(Ordering::Acquire);
    }
}

/// Behind it, in the parent.
pub(crate) fn let_go() {
    // Relaxed, here and in the child: who asks has nothing of ours to read.
    ASKING.fetch_and(!FORKING, Ordering::Relaxed);
}

/// Behind it, in the child, which has one thread: nobody asks.
pub(crate) fn recover() {
    // Relaxed, twice: as above.
    let births = (ASKING.load(Ordering::Relaxed) >> BIRTH_SHIFT).wrapping_add(1);
    ASKING.store(births << BIRTH_SHIFT, Ordering::Relaxed);
}

/// The right to ask, or to read any other file: it is given up behind the file.
#[must_use]
pub(crate) struct Turn {
    births: u32,
}

impl Turn {
    /// None while the process forks.
    pub(crate) fn begin() -> Option<Self> {
        // Relaxed, twice: what is read is this word alone, and all its changes are in one order: we see the fork, or it
        // sees us. Looked at first, so that who waits there is not kept by who will not ask.
        if ASKING.load(Ordering::Relaxed) & FORKING != 0 {
            return None;
        }
        let asking = ASKING.fetch_add(ONE, Ordering::Relaxed);
        let turn = Self {
            births: asking >> BIRTH_SHIFT,
        };
        (asking & FORKING == 0).then_some(turn)
    }

    /// Whether this is still the process that opened the file, and it does not fork: who has a long range makes way.
    fn lasts(&self) -> bool {
        // Relaxed: as in `begin`.
        let asking = ASKING.load(Ordering::Relaxed);
        asking >> BIRTH_SHIFT == self.births && asking & FORKING == 0
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Not in the child of a fork that came from a handler of a signal, which had found us here: it began anew.
        let less = |asking: u32| (asking >> BIRTH_SHIFT == self.births).then(|| asking.wrapping_sub(ONE));
        // Release: the file is closed; partner: `hold`. Relaxed: what is not changed says nothing.
        let _ = ASKING.try_update(Ordering::Release, Ordering::Relaxed, less);
    }
}

/// The pages of this process.
struct Pagemap {
    file: libc::c_long,
    /// Given up behind the file.
    turn: Turn,
}

impl Pagemap {
    fn open() -> Option<Self> {
        let turn = Turn::begin()?;
        let place = c"/proc/thread-self/pagemap".as_ptr();
        // Should it be no such file, opening it does not wait either.
        let how = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: a path that ends with zero.
        let file = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, place, how) };
        (file >= 0).then(|| Self { file, turn })
    }

    /// Answers the question: how many stretches.
    fn ask(&self, question: &mut Question, answer: &mut [Stretch; STRETCHES]) -> Option<usize> {
        question.walk_end = 0;
        question.answer = answer.as_mut_ptr().addr() as u64;
        question.stretches = STRETCHES as u64;
        // SAFETY: the kernel writes to the question and to as many stretches as it is told there is room for.
        let count = unsafe { libc::syscall(libc::SYS_ioctl, self.file, SCAN, &raw mut *question) };
        usize::try_from(count).ok().filter(|&count| count <= STRETCHES)
    }
}

impl Drop for Pagemap {
    fn drop(&mut self) {
        // SAFETY: opened by `open`, and closed once.
        unsafe { libc::syscall(libc::SYS_close, self.file) };
    }
}

/// Makes a range read as zero by writing to those of its pages of `page` bytes that may be anything else. Whether it
/// does: not if that is an eighth of it or more, or one of them is in swap, or nobody knows.
///
/// # Safety
///
/// The range is private anonymous memory of ours, page-aligned, may be written to, and is used by nobody else; its
/// contents may be lost, all or in part.
pub(super) unsafe fn clear(start: NonNull<u8>, bytes: usize, page: usize) -> bool {
    let _errno = KeepErrno::new();
    // SAFETY: the caller's promise.
    Pagemap::open().is_some_and(|pagemap| unsafe { clear_by(&pagemap, start, bytes, page) }.is_some())
}

/// The same.
///
/// # Safety
///
/// As for [`clear`].
unsafe fn clear_by(pagemap: &Pagemap, start: NonNull<u8>, bytes: usize, page: usize) -> Option<()> {
    let begin = start.addr().get() as u64;
    let end = begin + bytes as u64;
    let mut left = (bytes / page / PART).max(1) as u64;
    let mut question = Question {
        size: size_of::<Question>() as u64,
        start: begin,
        inverted: ZERO_PAGE,
        all_of: ZERO_PAGE,
        any_of: PRESENT | SWAPPED,
        told: PRESENT | SWAPPED,
        ..Question::default()
    };
    let mut answer = [Stretch::default(); STRETCHES];
    while question.start < end {
        question.end = end.min(question.start + STEP);
        question.most_pages = left.min(STEP_PAGES);
        let count = pagemap.ask(&mut question, &mut answer)?;
        let answer = &answer[..count];
        // What leads nowhere, or is not so, is no answer to this question; and what is in swap would be read to be
        // written.
        let is_good = |stretch: &Stretch| {
            question.start <= stretch.start
                && stretch.start <= stretch.end
                && stretch.end <= question.end
                && stretch.categories & SWAPPED == 0
        };
        if question.walk_end <= question.start || question.walk_end > question.end || !answer.iter().all(is_good) {
            return None;
        }
        let found: u64 = answer.iter().map(|stretch| stretch.end - stretch.start).sum();
        left = left.saturating_sub(found / page as u64);
        // As many as it may be: what is behind them is not known.
        if left == 0 || !pagemap.turn.lasts() {
            return None;
        }
        for stretch in answer {
            let (at, len) = ((stretch.start - begin) as usize, (stretch.end - stretch.start) as usize);
            // SAFETY: in the caller's range, just checked.
            unsafe { start.add(at).write_bytes(0, len) };
        }
        question.start = question.walk_end;
    }
    Some(())
}
