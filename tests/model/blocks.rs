//! A backing for arenas and lists that checks its user: whole pages, each block given back once and whole.

#![allow(dead_code, reason = "some of it is for arenas, some for lists")]

use std::alloc::{self, Layout};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ptr::NonNull;

use pageheap::arena::{Backing, Block};

/// Bytes in a page of [`Blocks`], by default.
pub const PAGE: usize = 4096;

/// A backing that checks its user, and refuses blocks on demand. Blocks come from the system allocator, so that a
/// sanitizer sees their bounds.
pub struct Blocks {
    taken: RefCell<BTreeMap<usize, Layout>>,
    page: usize,
    /// Every `refuse`-th block is refused; 0: none.
    refuse: usize,
    asked: Cell<usize>,
    refused: Cell<usize>,
    given: Cell<usize>,
}

impl Blocks {
    /// No blocks yet.
    pub fn new(refuse: usize) -> Self {
        Self {
            taken: RefCell::default(),
            page: PAGE,
            refuse,
            asked: Cell::new(0),
            refused: Cell::new(0),
            given: Cell::new(0),
        }
    }

    /// Sets the page size.
    pub fn pages(mut self, page: usize) -> Self {
        self.page = page;
        self
    }

    /// How often it has refused.
    pub fn refused(&self) -> usize {
        self.refused.get()
    }

    /// How many blocks were given back.
    pub fn given(&self) -> usize {
        self.given.get()
    }

    /// How many blocks are taken.
    pub fn count(&self) -> usize {
        self.taken.borrow().len()
    }

    /// Whether none is taken.
    pub fn is_empty(&self) -> bool {
        self.taken.borrow().is_empty()
    }

    /// How often it was asked for a block, or given one back.
    pub fn turns(&self) -> usize {
        self.asked.get() + self.given.get()
    }

    /// The blocks: where each begins, and its length in bytes.
    pub fn all(&self) -> Vec<(usize, usize)> {
        let taken = self.taken.borrow();
        taken.iter().map(|(&start, layout)| (start, layout.size())).collect()
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> usize {
        self.taken.borrow().values().map(Layout::size).sum()
    }

    /// Whether all of these bytes lie in one block.
    pub fn has(&self, start: usize, bytes: usize) -> bool {
        let taken = self.taken.borrow();
        let below = taken.range(..=start).next_back();
        below.is_some_and(|(block, layout)| start + bytes <= block + layout.size())
    }
}

// SAFETY: memory of the system allocator, each block once; it unwinds only when a test has failed.
unsafe impl Backing for Blocks {
    fn page_bytes(&self) -> usize {
        self.page
    }

    fn take(&self, bytes: usize, align: usize) -> Option<Block> {
        assert!(
            bytes != 0 && bytes.is_multiple_of(self.page),
            "{bytes} bytes are not whole pages"
        );
        self.asked.set(self.asked.get() + 1);
        if self.refuse != 0 && self.asked.get().is_multiple_of(self.refuse) {
            self.refused.set(self.refused.get() + 1);
            return None;
        }
        let layout = Layout::from_size_align(bytes, align).ok()?;
        // SAFETY: not of zero bytes.
        let start = NonNull::new(unsafe { alloc::alloc(layout) })?;
        self.taken.borrow_mut().insert(start.addr().get(), layout);
        Some(Block {
            memory: NonNull::slice_from_raw_parts(start, bytes),
            zeroed: false,
        })
    }

    unsafe fn give(&self, memory: NonNull<[u8]>) {
        let layout = self.taken.borrow_mut().remove(&memory.addr().get());
        let layout = layout.expect("a block that was taken is given back");
        self.given.set(self.given.get() + 1);
        assert_eq!(layout.size(), memory.len(), "whole");
        // SAFETY: allocated above, with this layout.
        unsafe { alloc::dealloc(memory.cast().as_ptr(), layout) };
    }
}
