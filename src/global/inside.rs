//! Which threads are inside the hook for exhausted memory, where threads have storage of their own: one flag each.

#![forbid(unsafe_code)]

use core::cell::Cell;

std::thread_local! {
    #[allow(clippy::missing_const_for_thread_local, reason = "it is; clippy misses that on Android")]
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A thread inside the hook for exhausted memory: at most once a thread.
pub(super) struct Inside(());

impl Inside {
    /// Enters, if this thread is not already inside.
    pub(super) fn enter() -> Option<Self> {
        // Not `then_some`: a value made in vain would, when dropped, clear the flag. A thread that has destroyed its
        // thread-locals counts as inside.
        let was_inside = INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true);
        (!was_inside).then(|| Self(()))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.set(false));
    }
}
