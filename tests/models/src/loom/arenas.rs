//! Is a byte of an arena ever handed out twice, and does its next owner see that the last one is done with it?
//!
//! Slabs are 256 bytes, of which 224 can be cut. Every grain of eight bytes has a loom cell, to which its owner
//! writes: so loom finds two owners at a time, and two in a row without a happens-before.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::Mutex;

use loom::cell::UnsafeCell;
use pageheap::arena::{Arena, ArenaConfig, Backing, Block, Pool, Reason};

use super::{explore, spawn};

const PAGE: usize = 256;
const GRAIN: usize = 8;

/// A backing of few pages, and what is written on them.
#[derive(Clone, Debug)]
struct Paper(Arc<Pages>);

impl std::ops::Deref for Paper {
    type Target = Pages;

    fn deref(&self) -> &Pages {
        &self.0
    }
}

/// Pages of real memory, with a cell for each grain.
#[derive(Debug)]
struct Pages {
    memory: NonNull<u8>,
    pages: usize,
    /// Which pages are taken. Only for the backing's own records, so not loom's.
    taken: Mutex<Vec<bool>>,
    cells: Vec<UnsafeCell<usize>>,
}

// SAFETY: the cells are loom's: loom reports it if a thread accesses one at a wrong time.
unsafe impl Sync for Pages {}
// SAFETY: as above.
unsafe impl Send for Pages {}

impl Pages {
    fn layout(pages: usize) -> Layout {
        Layout::from_size_align(pages * PAGE, PAGE).expect("small")
    }

    fn paper(pages: usize) -> Paper {
        // SAFETY: not of zero bytes.
        let memory = NonNull::new(unsafe { alloc_zeroed(Self::layout(pages)) }).expect("memory");
        let pages = Self {
            memory,
            pages,
            taken: Mutex::new(vec![false; pages]),
            cells: (0..pages * PAGE / GRAIN).map(|_| UnsafeCell::new(0)).collect(),
        };
        Paper(Arc::new(pages))
    }

    /// Writes to memory that was handed out.
    fn touch(&self, memory: NonNull<[u8]>) {
        let start = memory.addr().get() - self.memory.addr().get();
        for cell in &self.cells[start / GRAIN..(start + memory.len()).div_ceil(GRAIN)] {
            // SAFETY: loom checks that no other thread does so at this time.
            cell.with_mut(|contents| unsafe { *contents += 1 });
        }
    }

    /// Checks that no grain was handed out twice. Returns how many were handed out.
    fn touched_once(&self) -> usize {
        // SAFETY: as above.
        let often = |cell: &UnsafeCell<usize>| cell.with(|contents| unsafe { *contents });
        assert!(
            self.cells.iter().all(|cell| often(cell) <= 1),
            "handed out twice, one after the other"
        );
        self.cells.iter().map(often).sum()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        assert!(
            self.taken.lock().expect("no panic").iter().all(|taken| !taken),
            "not all was given back"
        );
        // SAFETY: allocated in `paper`, with this layout.
        unsafe { dealloc(self.memory.as_ptr(), Self::layout(self.pages)) };
    }
}

// SAFETY: pages are memory, and each has one owner or none.
unsafe impl Backing for Paper {
    fn page_bytes(&self) -> usize {
        PAGE
    }

    fn take(&self, bytes: usize, _align: usize) -> Option<Block> {
        let pages = bytes / PAGE;
        let mut taken = self.taken.lock().expect("no panic");
        let start = taken
            .windows(pages)
            .position(|pages| pages.iter().all(|taken| !taken))?;
        taken[start..start + pages].fill(true);
        // SAFETY: inside the memory.
        let memory = unsafe { self.memory.add(start * PAGE) };
        Some(Block {
            memory: NonNull::slice_from_raw_parts(memory, bytes),
            zeroed: false,
        })
    }

    unsafe fn give(&self, memory: NonNull<[u8]>) {
        let start = (memory.addr().get() - self.memory.addr().get()) / PAGE;
        let mut taken = self.taken.lock().expect("no panic");
        taken[start..start + memory.len() / PAGE].fill(false);
    }
}

type Shared = Arc<Arena<Paper>>;

/// An arena in slabs of a page, and at most `pages` of them.
fn arena(pages: usize) -> (Paper, Arena<Paper>) {
    let paper = Pages::paper(pages);
    let arena = Arena::with_config_in(ArenaConfig::new().slab(PAGE), paper.clone()).expect("takes nothing");
    (paper, arena)
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, GRAIN).expect("small")
}

/// Takes memory and writes to it. `None` if there is none, which must be for lack of pages.
fn take(paper: &Paper, arena: &Arena<Paper>, bytes: usize) -> Option<NonNull<[u8]>> {
    match arena.allocate(layout(bytes)) {
        Ok(memory) => {
            paper.touch(memory);
            Some(memory)
        }
        Err(error) => {
            assert_eq!(error.reason(), Reason::NoPages);
            None
        }
    }
}

/// Unwraps the arena: no other thread has it any more.
fn own(arena: Shared) -> Arena<Paper> {
    Arc::try_unwrap(arena).expect("the threads have ended")
}

#[test]
fn two_threads_cut_one_slab_without_overlap() {
    explore(3, || {
        let (paper, arena) = arena(1);
        let arena = Arc::new(arena);
        let (other_paper, other) = (paper.clone(), Arc::clone(&arena));
        let thread = spawn(move || {
            take(&other_paper, &other, 16).unwrap();
            take(&other_paper, &other, 24).unwrap();
        });
        take(&paper, &arena, 40).unwrap();
        take(&paper, &arena, 8).unwrap();
        thread.join().unwrap();
        assert_eq!((paper.touched_once(), arena.stats().allocated), (11, 88));
    });
}

#[test]
fn two_who_find_the_slab_full_share_the_next_one() {
    explore(3, || {
        // Two slabs and no more: a thread that takes a second for itself leaves none for the other.
        let (paper, arena) = arena(2);
        let arena = Arc::new(arena);
        take(&paper, &arena, 104).unwrap();
        take(&paper, &arena, 104).unwrap();
        let (other_paper, other) = (paper.clone(), Arc::clone(&arena));
        let thread = spawn(move || take(&other_paper, &other, 32).unwrap());
        take(&paper, &arena, 40).unwrap();
        thread.join().unwrap();
        assert_eq!(arena.stats().slabs, 2);
        assert_eq!(
            (paper.touched_once() * GRAIN, arena.stats().allocated),
            (208 + 72, 208 + 72)
        );
    });
}

#[test]
fn who_read_the_old_slab_does_not_cut_the_new_one_by_it() {
    explore(4, || {
        // One thread fills two slabs and opens the third, while the other loads and exchanges.
        let (paper, arena) = arena(3);
        let arena = Arc::new(arena);
        take(&paper, &arena, 96).unwrap();
        let (other_paper, other) = (paper.clone(), Arc::clone(&arena));
        let thread = spawn(move || {
            take(&other_paper, &other, 96);
            take(&other_paper, &other, 96);
            take(&other_paper, &other, 96);
        });
        take(&paper, &arena, 8).unwrap();
        thread.join().unwrap();
        let bytes = 4 * 96 + 8;
        assert_eq!((paper.touched_once() * GRAIN, arena.stats().allocated), (bytes, bytes));
    });
}

#[test]
fn what_is_given_back_is_taken_by_one_who_sees_that_it_was() {
    explore(3, || {
        let (paper, arena) = arena(1);
        let arena = Arc::new(arena);
        take(&paper, &arena, 100).unwrap();
        let (other_paper, other) = (paper.clone(), Arc::clone(&arena));
        let thread = spawn(move || {
            let memory = take(&other_paper, &other, 64)?;
            // SAFETY: allocated here, and not used again.
            Some(unsafe { other.resize_in_place(memory, 0) })
        });
        // 224 less 104: both fit if one is given back before the other is taken.
        let mine = take(&paper, &arena, 64).is_some();
        let other = thread.join().unwrap();
        assert!(mine || other.is_some());
        let kept = usize::from(mine) + usize::from(other == Some(false));
        assert_eq!(arena.stats().allocated, 104 + 64 * kept);
    });
}

#[test]
fn what_fell_before_the_slab_was_left_is_counted() {
    explore(3, || {
        let (paper, arena) = arena(2);
        let arena = Arc::new(arena);
        take(&paper, &arena, 104).unwrap();
        let (other_paper, other) = (paper.clone(), Arc::clone(&arena));
        let thread = spawn(move || {
            let memory = take(&other_paper, &other, 64).unwrap();
            // SAFETY: allocated here, and not used again.
            unsafe { other.resize_in_place(memory, 0) }
        });
        // Does not fit in the first slab while the other block is there.
        take(&paper, &arena, 104).unwrap();
        let fell = thread.join().unwrap();
        let stats = arena.stats();
        assert_eq!(stats.allocated, 208 + if fell { 0 } else { 64 });
        assert_eq!(stats.committed, if stats.slabs == 2 { 272 } else { 208 });
        assert!((stats.allocated..=272).contains(&stats.peak));
    });
}

#[test]
fn the_last_block_grows_for_one_of_two() {
    explore(3, || {
        let (paper, arena) = arena(1);
        let arena = Arc::new(arena);
        let memory = take(&paper, &arena, 16).unwrap();
        let (other_paper, other) = (paper.clone(), Arc::clone(&arena));
        let thread = spawn(move || take(&other_paper, &other, 16).unwrap());
        // SAFETY: allocated here.
        if unsafe { arena.resize_in_place(memory, 48) } {
            paper.touch(NonNull::slice_from_raw_parts(memory.cast(), 48));
        }
        thread.join().unwrap();
    });
}

#[test]
fn locals_leave_pieces_to_those_who_come_after() {
    explore(2, || {
        let paper = Pages::paper(80);
        let config = ArenaConfig::new().slab(80 * PAGE);
        let arena = Arc::new(Arena::with_config_in(config, paper.clone()).expect("takes nothing"));
        let work = |paper: &Paper, arena: &Arena<Paper>| {
            for bytes in [16, 24] {
                let mut local = arena.local();
                paper.touch(local.allocate(layout(bytes)).unwrap());
                local.scoped(|scope| paper.touch(scope.allocate(layout(64)).unwrap()));
            }
        };
        let (other_paper, other) = (paper.clone(), Arc::clone(&arena));
        let thread = spawn(move || work(&other_paper, &other));
        work(&paper, &arena);
        thread.join().unwrap();
    });
}

#[test]
fn after_a_reset_all_is_there_again() {
    explore(2, || {
        let (paper, arena) = arena(2);
        let mut arena = arena;
        for _ in 0..2 {
            let shared = Arc::new(arena);
            let (other_paper, other) = (paper.clone(), Arc::clone(&shared));
            let thread = spawn(move || take(&other_paper, &other, 104).map(|_| ()).unwrap());
            take(&paper, &shared, 104).unwrap();
            thread.join().unwrap();
            take(&paper, &shared, 104).unwrap();
            arena = own(shared);
            arena.reset();
        }
        assert_eq!(arena.stats().slabs, 2);
    });
}

#[test]
fn a_handle_given_to_another_thread_names_what_was_inserted() {
    explore(3, || {
        let paper = Pages::paper(2);
        let pool = Pool::with_config_in(ArenaConfig::new().slab(PAGE), paper.clone()).expect("takes nothing");
        let pool = Arc::new(pool);
        let handle = pool.insert([17_u64; 10]).unwrap();
        let other = Arc::clone(&pool);
        let thread = spawn(move || {
            let own = other.insert([18_u64; 10]).unwrap();
            assert_eq!((other.get(handle), other.get(own)), (Ok(&[17; 10]), Ok(&[18; 10])));
        });
        let mine = pool.insert([19_u64; 10]).unwrap();
        assert_eq!(pool.get(mine), Ok(&[19; 10]));
        thread.join().unwrap();
        let mut pool = Arc::try_unwrap(pool).expect("the threads have ended");
        pool.reset();
        assert!(pool.get(handle).is_err());
    });
}
