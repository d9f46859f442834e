//! Which thread forks.
//!
//! At most one, as far as this copy of the crate knows: from the time it has begun to hold the locks of all heaps until
//! it has let them go, in either process. In the child it is the only thread, and known by the same address.

#![forbid(unsafe_code)]

use core::sync::atomic::AtomicUsize;

use super::{Ordering, thread};

/// That thread, or 0. Not modelled: a model does not fork.
static FORKING: AtomicUsize = AtomicUsize::new(0);

/// Whether the calling thread forks.
#[cold]
pub(crate) fn is_forking() -> bool {
    // Relaxed: a thread's own number is written by that thread alone; partner: none.
    let forking = FORKING.load(Ordering::Relaxed);
    forking != 0 && forking == thread()
}

/// From here on the calling thread forks, or does no longer.
#[cfg(all(unix, feature = "std"))]
pub(crate) fn set_forking(forks: bool) {
    // Relaxed: as above.
    FORKING.store(if forks { thread() } else { 0 }, Ordering::Relaxed);
}
