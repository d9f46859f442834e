//! The same names under loom or shuttle: the checker's atomics, tables in boxes.
//!
//! The interface equals that of `native`. loom's atomics cannot be created by zeroing memory, so a table makes its
//! entries one by one. loom treats SeqCst accesses as AcqRel but SeqCst fences fully, which is why the protocols are
//! written with fences. shuttle is sequentially consistent: it explores schedules, not weak memory.
//!
//! A thread sleeps on a word until another wakes it, and if none does, the checker reports a deadlock: under shuttle,
//! and under loom if the model asks for it ([`Lock::with_sleepers`](super::Lock::with_sleepers)), since that makes
//! several times as many interleavings. On any other word of loom's a sleep ends when other threads have run.

extern crate std;

#[cfg(loom)]
use core::cell::Cell;
use core::cell::{RefCell, RefMut};
use core::fmt;
use core::ops::Deref;
use core::ptr::NonNull;
use std::boxed::Box;
use std::collections::VecDeque;

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicPtr, AtomicU8, AtomicU16, AtomicU64, AtomicUsize};
#[cfg(loom)]
use loom::{
    sync::atomic::{AtomicU32 as CheckerU32, Ordering, fence as checker_fence},
    thread::{Thread, current, park, yield_now},
};
#[cfg(all(shuttle, not(loom)))]
pub use shuttle::sync::atomic::{AtomicPtr, AtomicU8, AtomicU16, AtomicU64, AtomicUsize};
#[cfg(all(shuttle, not(loom)))]
use shuttle::{
    sync::atomic::{AtomicU32 as CheckerU32, Ordering, fence as checker_fence},
    thread::{Thread, current, park, yield_now},
};

/// One stripe: every pass meets every other, and there is less to explore.
pub(crate) const STRIPES: usize = 1;

/// One place, shared by all.
pub(crate) const SHARED: usize = 1;

/// Two places, of which one may be passed by.
pub(crate) const ASIDE: usize = 2;

/// A sequentially consistent (SeqCst) fence.
pub(crate) fn fence() {
    checker_fence(Ordering::SeqCst);
}

/// A full fence: a model follows the language's memory model, not x86's.
pub(crate) fn fence_after_rmw() {
    fence();
}

/// A full fence, for the same reason.
pub(crate) fn fence_after_load() {
    fence();
}

#[cfg(loom)]
loom::thread_local! {
    /// Whether this thread is one [without light fences](super::Barrier::without_light).
    static WITHOUT_LIGHT: Cell<bool> = Cell::new(false);
}

#[cfg(loom)]
fn is_without_light() -> bool {
    WITHOUT_LIGHT.with(Cell::get)
}

/// shuttle's fences do nothing.
#[cfg(all(shuttle, not(loom)))]
fn is_without_light() -> bool {
    false
}

#[cfg(loom)]
impl super::Barrier {
    /// Calls `body`, during which the light halves of this thread are what they are outside a model: nothing. They are
    /// more in a model, since that has no heavy half that reaches other threads, and hide what else is missing: a full
    /// fence acquires and releases.
    ///
    /// For a model in which no other thread's heavy half is to find this thread in `body`, because there is none, or
    /// because `body` would do the same whatever it saw. `body` has no heavy half either.
    pub fn without_light<R>(body: impl FnOnce() -> R) -> R {
        WITHOUT_LIGHT.with(|without| assert!(!without.replace(true), "one in another"));
        let result = body();
        WITHOUT_LIGHT.with(|without| without.set(false));
        result
    }
}

/// The light half of an asymmetric fence. A model has no such system call, so what that guarantees needs a fence on
/// this side too.
pub(crate) fn fence_light() {
    if !is_without_light() {
        fence();
    }
}

/// The heavy half.
pub(crate) fn fence_heavy() -> bool {
    assert!(!is_without_light(), "see `Barrier::without_light`");
    fence();
    true
}

/// There is one process.
pub(crate) fn process() -> u32 {
    0
}

/// A model says itself which thread is which.
pub(crate) fn thread() -> usize {
    super::bias::UNKNOWN
}

/// Lets another thread run first.
pub(crate) fn relax(_round: u32) {
    yield_now();
}

/// The checker's word, and the threads that sleep on it, in the order in which they came; or `None` if none does.
///
/// Those are not the checker's to know: whoever changes them does so in one step with an access to the word. Each such
/// access is a read-modify-write that changes nothing, so it sees the word's last value, as a kernel does; it orders
/// nothing; and the checker tries it before and after what others do with the word.
#[derive(Debug)]
pub struct AtomicU32 {
    word: CheckerU32,
    sleepers: Option<RefCell<VecDeque<Thread>>>,
}

// SAFETY: a checker runs all threads of a model in turns, on one thread of the system. It changes turns only in its own
// operations, of which none is made while the cell is borrowed.
unsafe impl Sync for AtomicU32 {}

impl AtomicU32 {
    /// A word with this value.
    #[must_use]
    pub fn new(value: u32) -> Self {
        Self {
            word: CheckerU32::new(value),
            sleepers: if cfg!(loom) { None } else { Some(RefCell::default()) },
        }
    }

    /// A word with this value, on which threads sleep until they are woken.
    #[must_use]
    pub(super) fn with_sleepers(value: u32) -> Self {
        Self {
            word: CheckerU32::new(value),
            sleepers: Some(RefCell::default()),
        }
    }

    /// Those threads, for a moment without an operation of the checker's.
    fn sleepers(&self) -> Option<RefMut<'_, VecDeque<Thread>>> {
        self.sleepers.as_ref().map(RefCell::borrow_mut)
    }

    /// Makes this thread one that sleeps, if the word has the value expected. Returns whether it has.
    fn lie_down(&self, expected: u32, sleeper: &Thread) -> bool {
        // Relaxed, twice: see the type.
        let seen = self
            .word
            .compare_exchange(expected, expected, Ordering::Relaxed, Ordering::Relaxed);
        if let Some(mut sleepers) = self.sleepers()
            && seen.is_ok()
        {
            sleepers.push_back(sleeper.clone());
        }
        seen.is_ok()
    }

    fn is_asleep(&self, sleeper: &Thread) -> bool {
        self.sleepers()
            .is_some_and(|sleepers| sleepers.iter().any(|other| other.id() == sleeper.id()))
    }
}

impl Deref for AtomicU32 {
    type Target = CheckerU32;

    fn deref(&self) -> &CheckerU32 {
        &self.word
    }
}

/// How often one who is about to sleep on `word` spins before, of `most`: hardly ever if it then sleeps. A thread that
/// spins lets the others run, and under loom they then mostly run until nobody has to sleep any more.
pub(crate) fn spins(word: &AtomicU32, most: u32) -> u32 {
    match word.sleepers {
        None => most,
        Some(_) if cfg!(loom) => 0,
        Some(_) => 1,
    }
}

/// Sleeps until it is woken, if `word` is `expected`.
pub(crate) fn wait(word: &AtomicU32, expected: u32, _round: u32) {
    if word.sleepers.is_none() {
        return yield_now();
    }
    let sleeper = current();
    if word.lie_down(expected, &sleeper) {
        // What ends a pause may be an earlier wake, or nothing.
        while word.is_asleep(&sleeper) {
            park();
        }
    }
}

/// As [`wait`]; if there is a time, until other threads have run. Until then it may be woken like any other.
pub(crate) fn wait_for(word: &AtomicU32, expected: u32, time: Option<core::time::Duration>) {
    if time.is_none() || word.sleepers.is_none() {
        return wait(word, expected, 0);
    }
    let sleeper = current();
    if word.lie_down(expected, &sleeper) {
        yield_now();
        // Relaxed: see the type.
        word.fetch_add(0, Ordering::Relaxed);
        if let Some(mut sleepers) = word.sleepers() {
            sleepers.retain(|other| other.id() != sleeper.id());
        }
    }
}

/// Wakes the thread that has slept on `word` for longest. Returns whether there was one. If the model has no sleepers,
/// all that wait look again, and there was one if the word has changed when others have run.
pub(crate) fn wake(word: &AtomicU32) -> bool {
    if word.sleepers.is_none() {
        // Relaxed, twice: only compared.
        let before = word.load(Ordering::Relaxed);
        yield_now();
        return word.load(Ordering::Relaxed) != before;
    }
    // Relaxed: see the type.
    word.fetch_add(0, Ordering::Relaxed);
    let sleeper = word.sleepers().and_then(|mut sleepers| sleepers.pop_front());
    sleeper.inspect(Thread::unpark).is_some()
}

/// There is no time.
pub(crate) fn clock() -> u64 {
    0
}

/// Every thread that has waited once has waited for long.
pub(crate) fn is_long_since(_begin: u64) -> bool {
    true
}

/// A type whose tables start as [`zeroed`](Self::zeroed).
///
/// # Safety
///
/// None here; outside a model the all-zero bit pattern must be that value.
pub unsafe trait Zeroed {
    /// The value whose bytes would be all zero.
    fn zeroed() -> Self;
}

// SAFETY: the trait requires nothing in a model.
unsafe impl Zeroed for AtomicU64 {
    fn zeroed() -> Self {
        Self::new(0)
    }
}

// SAFETY: the trait requires nothing in a model.
unsafe impl Zeroed for AtomicU32 {
    fn zeroed() -> Self {
        Self::new(0)
    }
}

/// A row of shared values, boxed.
pub struct Table<T> {
    entries: Box<[T]>,
}

impl<T: Zeroed> Table<T> {
    /// A table without entries.
    #[must_use]
    pub fn empty() -> Self {
        Self { entries: Box::new([]) }
    }

    /// A table of `len` entries, whatever is at `base`.
    ///
    /// # Safety
    ///
    /// None here; see the native table.
    #[must_use]
    pub unsafe fn new(_base: NonNull<u8>, len: usize) -> Self {
        Self {
            entries: (0..len).map(|_| T::zeroed()).collect(),
        }
    }

    /// Entry `index`.
    ///
    /// # Panics
    /// Past the end.
    #[must_use]
    pub fn get(&self, index: usize) -> &T {
        &self.entries[index]
    }

    /// Entry `index`.
    ///
    /// # Safety
    ///
    /// None here; see the native table.
    #[must_use]
    pub unsafe fn at(&self, index: usize) -> &T {
        self.get(index)
    }

    /// The `count` entries from `first` on.
    ///
    /// # Panics
    /// Past the end.
    #[must_use]
    pub fn row(&self, first: usize, count: usize) -> &[T] {
        &self.entries[first..first + count]
    }

    /// The number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the table has no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<T> fmt::Debug for Table<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Table({} entries)", self.entries.len())
    }
}
