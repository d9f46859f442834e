//! The only way to everything that threads share: atomics, fences, tables of them, the lock, the turnstile.
//!
//! No other module names `core::sync::atomic`. (The exceptions, listed in `tests/tidy.rs`, are the memory sources and
//! the process-wide state of the global allocator, which are not modelled.) Under a model checker the same names
//! resolve to the checker's types, so it explores the code that ships:
//!
//! | built with | atomics and fences | tables |
//! |---|---|---|
//! | nothing special | `core::sync::atomic` | slices of memory from a [`Source`](crate::source::Source) |
//! | `--cfg loom` and the feature `internals` | `loom` | boxed slices |
//! | `--cfg shuttle` and the feature `internals` | `shuttle` | boxed slices |
//!
//! Only [`Ordering`] always comes from `core`.

pub use core::sync::atomic::Ordering;

mod barrier;
mod forking;
mod lock;
mod once;
mod owner;
mod rest;
mod bias;
mod turnstile;

#[cfg(any(all(loom, feature = "internals"), all(shuttle, feature = "internals")))]
mod model;
#[cfg(all(
    windows,
    feature = "std",
    not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals")))
))]
mod windows;
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
mod native;

#[cfg(any(all(loom, feature = "internals"), all(shuttle, feature = "internals")))]
use model as imp;
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
use native as imp;

pub use barrier::Barrier;
pub(crate) use bias::UNKNOWN;
pub use bias::{Alone, BiasedLock, Held};
pub(crate) use forking::is_forking;
#[cfg(all(unix, feature = "std"))]
pub(crate) use forking::set_forking;
pub(crate) use imp::{ASIDE, SHARED, STRIPES};
pub use imp::{AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Table, Zeroed};
pub(crate) use imp::{
    clock, fence_after_load, fence_after_rmw, fence_heavy, fence_light, is_long_since, process, relax, spins, thread,
    wait, wait_for, wake,
};
pub use lock::{Guard, Lock};
pub use once::OnceWord;
pub use owner::{Owned, Owner, Stake, seize};
pub(crate) use rest::{rest, sleep};
pub use turnstile::{Calm, Pass, Turnstile};
