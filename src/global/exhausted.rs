//! The last step before an allocation is refused: the program's own hook, if it has set one.
//!
//! ```text
//!   alloc ─▶ no room, after all caches were flushed ─▶ hook(layout) ── false ─▶ null
//!               ▲                                          │ true: something was freed
//!               └───────── once more, 256 times ──────────┘
//! ```
//!
//! The hook runs on the allocating thread, in the middle of its call, with none of this crate's locks held. It may
//! free, drop the program's caches, and call `release`. It may allocate; if there is no room it gets null, and the hook
//! is not called again for that (but where threads cannot be told apart, and it must not allocate). It must not wait
//! for a lock that an allocating thread may hold. If it unwinds, the process ends.
//!
//! Worked: a cache of 600 entries of 100 kB, a request for 8 MiB, and a hook that drops one entry: 84 calls, and
//! attempts, of some 30 µs each. (At most 16 attempts were refused with 584 entries left.)
//!
//! Layouts larger than the heap's limit are refused without calling the hook. A [`Heap`](crate::Heap) asks its hook in
//! the same way. A thread is in one hook at a time, whichever heap's it is.

#![forbid(unsafe_code)]

use core::alloc::Layout;

use crate::fatal::{self, Number};

use super::local;

/// How often a hook may ask for another try. So one that never says no does not keep the program for ever, though for
/// seconds if other threads are busy.
const TRIES: usize = 256;

/// Calls the hook, and tries again as long as it says so.
#[cold]
#[inline(never)]
pub(crate) fn retry<R>(hook: impl Fn(Layout) -> bool, layout: Layout, attempt: impl Fn() -> Option<R>) -> Option<R> {
    let _inside = local::Inside::enter()?;
    (0..TRIES)
        .map_while(|_| ask(&hook, layout).then(&attempt))
        .find_map(|found| found)
}

fn ask(hook: impl Fn(Layout) -> bool, layout: Layout) -> bool {
    fatal::unless_it_unwinds(
        || hook(layout),
        "the hook for exhausted memory has unwound; the size asked for, its alignment",
        [Number::Count(layout.size()), Number::Count(layout.align())],
    )
}
