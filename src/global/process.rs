//! The process's own heap of pages, below arenas that are given no other: made at its first use, and held across forks.
//!
//! ```text
//!   get ── made? ──▶ it
//!            │ no
//!            ▼
//!          Opening ─▶ make ─▶ on the list of all heaps ─▶ for all to have
//! ```
//!
//! Its type belongs to the arenas ([`ProcessHeap`]), which know nothing of forks. It is made here, because what a fork
//! holds is on one list (`fork.rs`): handlers of its own would hold it before or after all other heaps, and a handler
//! of the program that came in between would wait for its own thread.
//!
//! A fork waits for the right to open heaps, with which this one is made. So in the child it is there or it is not, and
//! is never half made; and nobody has it before it is on the list.
//!
//! Worked: a library makes an arena in each call, and its host forks while three threads are in there. The fork waits
//! until none of them grows the heap. The child finds it whole, and may make arenas; those of the three threads it must
//! not use, whose locks nobody has held.
//!
//! Cost of a fork: four locks, some 200 ns; in the child what `heap/fork.rs` says.

#![forbid(unsafe_code)]

use core::ptr::NonNull;
use std::sync::OnceLock;

use crate::arena::ProcessHeap;
use crate::heap::{Config, PageHeap};
use crate::object::{Abandon, Forks, Keeper, Kin, Thread};
use crate::source::System;

use super::Opening;
use super::forever::Forever;

/// Address space to request for the heap: 1 TiB, or a quarter of a 32-bit address space.
const RESERVE_BYTES: usize = match 1_usize.checked_shl(40) {
    Some(bytes) => bytes,
    None => 1 << 30,
};

/// The heap, once it is on the list; `None` if there is none.
static HEAP: OnceLock<Option<&PageHeap<System>>> = OnceLock::new();

/// What is on the list.
static PROCESS: OnceLock<Option<Process>> = OnceLock::new();

/// Where the heap lies.
static PLACE: Forever<System> = Forever::new();

#[derive(Debug)]
struct Process {
    heap: &'static PageHeap<System>,
    kin: Kin,
}

impl ProcessHeap {
    /// The heap, made at the first call. Returns `None` if the system refused to reserve address space then; it is
    /// not asked again.
    #[must_use]
    pub fn get() -> Option<&'static PageHeap<System>> {
        HEAP.get().copied().unwrap_or_else(make)
    }
}

#[cold]
fn make() -> Option<&'static PageHeap<System>> {
    let opening = Opening::begin();
    let process = || {
        let heap = PLACE.open(System, Config::new(RESERVE_BYTES))?;
        let kin = Kin::default();
        Some(Process { heap, kin })
    };
    // With this right one thread at a time comes here, so neither of the two is ever waited for.
    *HEAP.get_or_init(|| {
        let process = PROCESS.get_or_init(process).as_ref()?;
        opening.enter(process);
        Some(process.heap)
    })
}

impl Forks for Process {
    fn kin(&self) -> &Kin {
        &self.kin
    }

    fn keeper(&self) -> Option<&Keeper> {
        None
    }

    fn try_hold_driver(&self) -> bool {
        self.heap.driver().try_hold()
    }

    fn let_go_driver(&self) {
        self.heap.driver().let_go();
    }

    fn hold(&self) {
        self.heap.hold();
    }

    fn let_go(&self) {
        self.heap.let_go();
    }

    fn recover(&self, _own: Option<NonNull<Thread>>) {
        self.heap.recover(0);
    }

    /// It stays. Its users do not register the end of their library again when `main` has begun, as those of a
    /// `GlobalHeap` do (`unload.rs`): so a library that the program is linked with, and that another one's constructor
    /// has called, would lose it under threads that still run.
    fn abandon(&self) -> Option<Abandon> {
        None
    }
}
