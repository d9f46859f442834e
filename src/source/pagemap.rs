//! Which pages of a range have any contents in the kernel: all others read as zero and need not be written.
//!
//! ```text
//!   range     │ · · · █ · · · · · · █ █ · · · · · │     · not written since it was mapped or released: zero
//!                     ╰─ 0 ─╯       ╰──╯                █ has a page: is overwritten with zeros
//! ```
//!
//! The file `/proc/thread-self/pagemap` has an `ioctl`, `PAGEMAP_SCAN` (Linux 6.7). It returns the stretches of pages
//! that are present or swapped, without those that are the kernel's zero page. So there is no guess about swap, as with
//! `mincore`, and no pass over one word per page, as when reading that file. (Through `self` it would be the file of
//! the process's first thread. That thread may have ended, and older kernels then crash on the query.)
//!
//! Example: a block of 64 MiB had been touched in 64 places when it was freed, and must now be zero. Giving it back and
//! taking 64 page faults costs 190 µs, overwriting it 3 ms, querying and overwriting 64 pages 40 to 60 µs. A query
//! costs 2.5 µs for the file, and 2 for each MiB with little in it. It stops once it has found an eighth of the pages,
//! or one in swap. Clearing is then refused, at a cost of at most an eighth of the block. One byte touched in a huge
//! page counts as 512 pages.
//!
//! **The file** is opened for each query and closed after it. If it stayed open, the program could close it, and its
//! descriptor could become another file's. So for some microseconds a descriptor is in use that the program has not
//! opened. A program that chooses descriptors itself (`dup2`) while other threads run has that problem with any
//! library. In the child of a fork the descriptor would stay open for ever. Therefore a fork waits for running queries,
//! for at most 0.1 s; no query starts meanwhile, and one over a long range gives up. (The same holds for the files that
//! report pressure, `global/pressure.rs`.) All three calls bypass the C library, whose versions may be cancellation
//! points.
//!
//! **Absent but not zero** is memory that is filled in when it is first touched: in a process that is being restored
//! page by page (`userfaultfd`, as with CRIU's lazy pages). The kernel does not report this; start such a process with
//! `PAGEHEAP_SPARSE_ZEROING=0`.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

use crate::sync::{relax, wait_for};

use super::KeepErrno;

/// `PAGEMAP_SCAN`: `_IOWR('f', 16, struct pm_scan_arg)`. (Both directions together are the same two bits on all
/// architectures.)
const SCAN: libc::c_ulong =
    3 << 30 | (size_of::<Question>() as libc::c_ulong) << 16 | (b'f' as libc::c_ulong) << 8 | 16;

/// The page is in memory.
const PRESENT: u64 = 1 << 3;
/// The page is in swap, or being migrated.
const SWAPPED: u64 = 1 << 4;
/// The page is the zero page, shared by all mappings that were only read.
const ZERO_PAGE: u64 = 1 << 5;

/// At most one in this many pages may have contents.
const PART: usize = 8;

/// Stretches per answer.
const STRETCHES: usize = 32;

/// The most bytes per query, which take about half a millisecond. A fork waits for no more.
const STEP: u64 = 256 << 20;

/// The same, in pages that are overwritten.
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
    /// The end of the answered part.
    walk_end: u64,
    answer: u64,
    stretches: u64,
    most_pages: u64,
    /// Of a reported page, these categories are inverted,
    inverted: u64,
    /// all of these must match,
    all_of: u64,
    /// and at least one of these.
    any_of: u64,
    told: u64,
}

const _: () = assert!(size_of::<Question>() == 96);

/// The running queries, in one word, so that each change is atomic:
///
/// ```text
///   births · 2¹⁶ │ queries running · 2 │ whether the process forks
/// ```
///
/// `births` counts forks in which this process was the child: a file opened before one describes the parent's pages.
static ASKING: AtomicU32 = AtomicU32::new(0);

/// The process is forking: no query starts.
const FORKING: u32 = 1;

/// One running query.
const ONE: u32 = 2;

/// Above both: never that many threads query at the same time.
const BIRTH_SHIFT: u32 = 16;

/// How often a fork waits for running queries, and how long each time. A query holds the file for less, unless its
/// thread is preempted. Each wait takes some 50 µs longer than requested: 0.1 s in all. Waits are counted because a
/// clock may be refused.
const WAITS: u32 = 600;
const WAIT: Duration = Duration::from_micros(100);

/// Rounds of spinning and yielding before the waits.
const ROUNDS: u32 = 10;

/// Whether a query is running.
fn is_asked(asking: u32) -> bool {
    (asking & ((1 << BIRTH_SHIFT) - 1)) / ONE != 0
}

/// Before a fork: waits until no thread has the file open, so that the child does not inherit it, unless a thread holds
/// it for too long. One caller at a time.
pub(crate) fn hold() {
    // Acquire, twice: the file is closed; partner: the Release in `Turn::drop`.
    let mut asking = ASKING.fetch_or(FORKING, Ordering::Acquire) | FORKING;
    for round in 0..ROUNDS + WAITS {
        if !is_asked(asking) {
            break;
        }
        // Nobody wakes us: a query does not notify anyone when it ends.
        if round < ROUNDS {
            relax(round);
        } else {
            wait_for(&ASKING, asking, Some(WAIT));
        }
        asking = ASKING.load(Ordering::Acquire);
    }
}

/// After a fork, in the parent.
pub(crate) fn let_go() {
    // Relaxed, here and in the child: there is no partner, since a query reads nothing of ours.
    ASKING.fetch_and(!FORKING, Ordering::Relaxed);
}

/// After a fork, in the child, which has one thread: no query is running.
pub(crate) fn recover() {
    // Relaxed, twice: as above.
    let births = (ASKING.load(Ordering::Relaxed) >> BIRTH_SHIFT).wrapping_add(1);
    ASKING.store(births << BIRTH_SHIFT, Ordering::Relaxed);
}

/// The right to query, or to read any other file. Given up after the file is closed.
#[must_use]
pub(crate) struct Turn {
    births: u32,
}

impl Turn {
    /// `None` while the process is forking.
    pub(crate) fn begin() -> Option<Self> {
        // Relaxed, twice: only this word is read, and all its changes are in one order, so we see the fork or it sees
        // us. It is loaded first so that a waiting fork is not held up by a thread that will not query.
        if ASKING.load(Ordering::Relaxed) & FORKING != 0 {
            return None;
        }
        let asking = ASKING.fetch_add(ONE, Ordering::Relaxed);
        let turn = Self {
            births: asking >> BIRTH_SHIFT,
        };
        (asking & FORKING == 0).then_some(turn)
    }

    /// Whether this is still the process that opened the file, and it is not forking. Otherwise a query over a long
    /// range gives up.
    fn lasts(&self) -> bool {
        // Relaxed: as in `begin`.
        let asking = ASKING.load(Ordering::Relaxed);
        asking >> BIRTH_SHIFT == self.births && asking & FORKING == 0
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Not in the child of a fork made by a signal handler that interrupted us here: its count has started anew.
        let less = |asking: u32| (asking >> BIRTH_SHIFT == self.births).then(|| asking.wrapping_sub(ONE));
        // Release: the file is closed; partner: `hold`. Relaxed: a failed update publishes and reads nothing.
        let _ = ASKING.try_update(Ordering::Release, Ordering::Relaxed, less);
    }
}

/// The `pagemap` file of this process.
struct Pagemap {
    file: libc::c_long,
    /// Given up after the file is closed.
    turn: Turn,
}

impl Pagemap {
    fn open() -> Option<Self> {
        let turn = Turn::begin()?;
        let place = c"/proc/thread-self/pagemap".as_ptr();
        // Non-blocking, in case this is some other kind of file.
        let how = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: a path that ends with a zero byte.
        let file = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, place, how) };
        (file >= 0).then(|| Self { file, turn })
    }

    /// Asks the kernel. Returns the number of stretches in the answer.
    fn ask(&self, question: &mut Question, answer: &mut [Stretch; STRETCHES]) -> Option<usize> {
        question.walk_end = 0;
        question.answer = answer.as_mut_ptr().addr() as u64;
        question.stretches = STRETCHES as u64;
        // SAFETY: the kernel writes to the question, and to as many stretches as it is told there is room for.
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

/// Makes a range read as zero by writing to those of its pages of `page` bytes that may be non-zero. Returns whether it
/// did. It does not if these are an eighth of the range or more, if one of them is in swap, or if the kernel does not
/// say.
///
/// # Safety
///
/// The range is private anonymous memory of ours, page-aligned and writable, and nobody else uses it; all or part of
/// its contents may be lost.
pub(super) unsafe fn clear(start: NonNull<u8>, bytes: usize, page: usize) -> bool {
    let _errno = KeepErrno::new();
    Pagemap::open().is_some_and(|pagemap| {
        let ask = |question: &mut _, answer: &mut _| pagemap.ask(question, answer).filter(|_| pagemap.turn.lasts());
        // SAFETY: the caller's promise.
        unsafe { clear_by(ask, start, bytes, page) }.is_some()
    })
}

/// The same, with the file open. `ask` answers a question with the number of stretches, if it can, and if this is still
/// the process that opened the file.
///
/// # Safety
///
/// As for [`clear`].
unsafe fn clear_by(
    mut ask: impl FnMut(&mut Question, &mut [Stretch; STRETCHES]) -> Option<usize>,
    start: NonNull<u8>,
    bytes: usize,
    page: usize,
) -> Option<()> {
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
        let count = ask(&mut question, &mut answer)?;
        let answer = &answer[..count];
        // A stretch outside the range, or turned around, is no answer to this question. And a page in swap would be
        // read in just to be overwritten.
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
        // The most pages allowed have been found, and what lies behind them is unknown.
        if left == 0 {
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

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::boxed::Box;
    use std::vec;
    use std::vec::Vec;

    const PAGE: usize = 4096;

    /// What a fake kernel says of these pages, which are all dirty but those that have no memory or that of zeroes.
    struct Paper {
        pages: Box<[[u8; PAGE]]>,
        categories: Vec<u64>,
    }

    impl Paper {
        fn new(pages: usize, categories: &[(usize, u64)]) -> Self {
            let mut paper = Self {
                pages: vec![[0; PAGE]; pages].into_boxed_slice(),
                categories: vec![0; pages],
            };
            for &(page, is) in categories {
                paper.categories[page] = is;
                paper.pages[page].fill(u8::from(is & ZERO_PAGE == 0));
            }
            paper
        }

        fn start(&mut self) -> NonNull<u8> {
            NonNull::from(&mut *self.pages).cast()
        }

        /// As `PAGEMAP_SCAN` does.
        fn answer(&self, start: u64, question: &mut Question, answer: &mut [Stretch; STRETCHES]) -> usize {
            let (mut count, mut pages) = (0, 0);
            let at = |address: u64| ((address - start) as usize) / PAGE;
            for page in at(question.start)..at(question.end) {
                question.walk_end = start + (page * PAGE) as u64;
                let is = self.categories[page] ^ question.inverted;
                if is & question.all_of != question.all_of || is & question.any_of == 0 {
                    continue;
                }
                let (at, categories) = (question.walk_end, self.categories[page] & question.told);
                let last = answer[..count]
                    .last_mut()
                    .filter(|last| last.end == at && last.categories == categories);
                if pages == question.most_pages || last.is_none() && count == STRETCHES {
                    return count;
                }
                pages += 1;
                let end = at + PAGE as u64;
                if let Some(last) = last {
                    last.end = end;
                    continue;
                }
                answer[count] = Stretch {
                    start: at,
                    end,
                    categories,
                };
                count += 1;
            }
            question.walk_end = question.end;
            count
        }

        /// Clears all pages; `change` may alter the question when it has been answered, and the answer.
        fn clear(&mut self, change: impl Fn(&mut Question, &mut [Stretch])) -> bool {
            let start = self.start();
            let ask = |question: &mut Question, answer: &mut [Stretch; STRETCHES]| {
                let count = self.answer(start.addr().get() as u64, question, answer);
                change(question, &mut answer[..count]);
                Some(count)
            };
            // SAFETY: these pages are the test's.
            unsafe { clear_by(ask, start, self.pages.len() * PAGE, PAGE) }.is_some()
        }

        fn dirty(&self) -> usize {
            self.pages
                .iter()
                .filter(|page| page.iter().any(|&byte| byte != 0))
                .count()
        }
    }

    #[test]
    fn what_has_memory_is_cleared_unless_it_is_much() {
        let few = [(0, PRESENT), (7, PRESENT), (8, PRESENT | ZERO_PAGE), (63, PRESENT)];
        let mut paper = Paper::new(64, &few);
        assert_eq!(paper.dirty(), 3);
        assert!(paper.clear(|_, _| ()));
        assert_eq!(paper.dirty(), 0);
        let many: Vec<_> = (10..18).map(|page| (page, PRESENT)).collect();
        assert!(!Paper::new(64, &many).clear(|_, _| ()));
        assert!(Paper::new(64, &many[1..]).clear(|_, _| ()));
    }

    /// As many as an answer has room for, and more.
    #[test]
    fn one_answer_may_not_be_enough() {
        for apart in [2, 3, 9] {
            let pages: Vec<_> = (0..40).map(|page| (page * apart + page % 2, PRESENT)).collect();
            let mut paper = Paper::new(512, &pages);
            assert!(paper.clear(|_, _| ()));
            assert_eq!(paper.dirty(), 0, "{apart}");
        }
    }

    /// It is not zero, and what a kernel reports as neither present nor in swap is taken for zero.
    #[test]
    fn a_page_in_swap_is_not_overlooked() {
        let mut paper = Paper::new(64, &[(3, PRESENT), (5, SWAPPED)]);
        assert!(!paper.clear(|_, _| ()));
        assert!(paper.dirty() > 0);
    }

    #[test]
    fn nonsense_is_no_answer() {
        type Change = fn(&mut Question, &mut [Stretch]);
        let changes: [Change; 6] = [
            |question, _| question.walk_end = question.start,
            |question, _| question.walk_end = 0,
            |question, _| question.walk_end = question.end + 1,
            |question, answer| answer[0].start = question.start - 1,
            |question, answer| answer[0].end = question.end + 1,
            |_, answer| (answer[0].start, answer[0].end) = (answer[0].end, answer[0].start),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut paper = Paper::new(64, &[(3, PRESENT)]);
            assert!(!paper.clear(change), "{number}");
            assert_eq!(paper.dirty(), 1, "{number}");
        }
    }

    /// A signal handler that interrupts a query may fork: in the child the query goes on, but is not counted.
    #[test]
    fn a_query_that_began_before_a_fork_is_not_counted_in_the_child() {
        // Relaxed: queries of other tests change the count, but not this.
        let births = || ASKING.load(Ordering::Relaxed) >> BIRTH_SHIFT;
        let turn = (0..u32::MAX)
            .find_map(|_| Turn::begin())
            .expect("no test forks for ever");
        recover();
        let child = births();
        assert!(!turn.lasts());
        drop(turn);
        assert_eq!(births(), child);
    }
}
