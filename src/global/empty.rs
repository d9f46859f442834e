//! A heap that gets its memory at run time: for kernels, which learn at boot which bytes are free.
//!
//! ```text
//!   empty ────── init(region) ──▶ closed ────── first allocation ──▶ open
//!     │                             │                                  │
//!   alloc: null                   init: refused                      init: refused
//! ```
//!
//! Where a closed heap keeps its source, an empty one has none. `init` and the opening take turns by [`Opening`], so a
//! thread that allocates meanwhile finds either no source or a complete one. After `init` nothing costs more than in
//! other heaps; before it, each allocation takes the lock of `Opening` once, and returns null.

#![forbid(unsafe_code)]

use core::cell::Cell;
use core::ptr;

use crate::source::Region;

use super::{GlobalHeap, Opening};

impl<const GAPS: usize> GlobalHeap<Region<GAPS>> {
    /// A heap without memory, for programs that find out at run time which bytes are free, as a kernel does at boot.
    /// Until [`init`](Self::init) every allocation returns null; after that it is a heap as by
    /// [`in_region`](Self::in_region).
    ///
    /// ```
    /// use pageheap::GlobalHeap;
    /// use pageheap::source::Region;
    /// # use std::alloc::{GlobalAlloc, Layout};
    ///
    /// static HEAP: GlobalHeap<Region> = GlobalHeap::empty();
    ///
    /// /// # Safety
    /// /// The bytes are free, and nothing else uses them from now on.
    /// unsafe fn boot(start: *mut u8, bytes: usize) {
    ///     // SAFETY: the caller's promise.
    ///     let region = unsafe { Region::new(start, bytes) };
    ///     HEAP.init(region).expect("the heap has no memory yet");
    /// }
    /// # let layout = Layout::new::<u64>();
    /// # let memory = vec![0_u8; 1 << 16].leak().as_mut_ptr_range();
    /// # // SAFETY: a size that is not zero, a block that is freed once, and bytes that live for ever.
    /// # unsafe {
    /// #     assert!(HEAP.alloc(layout).is_null());
    /// #     boot(memory.start, 1 << 16);
    /// #     let block = HEAP.alloc(layout);
    /// #     assert!(memory.contains(&block));
    /// #     HEAP.dealloc(block, layout);
    /// # }
    /// ```
    #[must_use]
    pub const fn empty() -> Self {
        let mut heap =
            Self::in_region(Region::from_static(&mut []).with_gaps([const { ptr::null_mut()..ptr::null_mut() }; GAPS]));
        heap.source = Cell::new(None);
        heap
    }

    /// Gives an [`empty`](Self::empty) heap its memory. Any thread may call it, while others allocate: they get null
    /// before it, memory after it. [`Region`] says how many bytes a heap needs at least; with fewer, every allocation
    /// still returns null.
    ///
    /// # Errors
    /// The heap has a region already. It keeps that one, and this one is returned, unused.
    pub fn init(&self, region: Region<GAPS>) -> Result<(), Region<GAPS>> {
        let _opening = Opening::begin();
        // Under `Opening` the source is either in the cell or in the open heap, or there is none.
        let present = self.source.take();
        if present.is_some() || self.opened().is_some() {
            self.source.set(present);
            return Err(region);
        }
        self.source.set(Some(region));
        Ok(())
    }
}
