//! The parts, for this crate's own tests, models, fuzz targets and benches. No promise of any kind.

#![forbid(unsafe_code)]

pub use crate::check::Fault;
pub use crate::free_set::{Claim, FreeSet, Request, Word};
pub use crate::geometry::{HINT_PAGES, MAX_CHUNK_WORDS, MAX_LEVELS, Shape, WORD_PAGES};
pub use crate::hints::{Band, Hints};
pub use crate::metadata::{Metadata, Plan};
pub use crate::radix::{Cursor, Step, Tree};
pub use crate::summary::Summary;
pub use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Calm, Guard, Lock, Pass, Table, Turnstile, Zeroed};

pub mod bitmap {
    //! See `src/bitmap.rs`.
    pub use crate::bitmap::*;
}

pub mod scavenge {
    //! See `src/scavenge.rs`.
    pub use crate::scavenge::*;
}
