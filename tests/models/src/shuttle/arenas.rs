//! Arenas in random schedules: three threads cut, grow, rewind and reset; each grain of eight bytes has one owner.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use pageheap::arena::{Arena, ArenaConfig, Backing, Block, Pool, Reason};
use shuttle::thread::spawn;

use super::explore;

const PAGE: usize = 256;
const GRAIN: usize = 8;

/// A backing of few pages, and who owns what is on them. None of it is shuttle's, so it adds no schedules.
#[derive(Debug)]
struct Pages {
    memory: NonNull<u8>,
    taken: Mutex<Vec<bool>>,
    owners: Vec<AtomicUsize>,
}

// SAFETY: the memory is handed out by pages, each to one owner; it is not accessed here.
unsafe impl Sync for Pages {}
// SAFETY: as above.
unsafe impl Send for Pages {}

#[derive(Clone, Debug)]
struct Paper(Arc<Pages>);

impl Paper {
    fn layout(pages: usize) -> Layout {
        Layout::from_size_align(pages * PAGE, PAGE).expect("small")
    }

    fn new(pages: usize) -> Self {
        // SAFETY: not of zero bytes.
        let memory = NonNull::new(unsafe { alloc_zeroed(Self::layout(pages)) }).expect("memory");
        Self(Arc::new(Pages {
            memory,
            taken: Mutex::new(vec![false; pages]),
            owners: (0..pages * PAGE / GRAIN).map(|_| AtomicUsize::new(0)).collect(),
        }))
    }

    /// Passes memory from `from` to `to`.
    fn stamp(&self, memory: NonNull<[u8]>, from: usize, to: usize) {
        let start = memory.addr().get() - self.0.memory.addr().get();
        for owner in &self.0.owners[start / GRAIN..(start + memory.len()).div_ceil(GRAIN)] {
            assert_eq!(owner.swap(to, Ordering::SeqCst), from, "given to {to}");
        }
    }

    /// Nobody owns anything, as after a reset.
    fn forget(&self) {
        self.0.owners.iter().for_each(|owner| owner.store(0, Ordering::SeqCst));
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let taken = self.taken.get_mut().expect("no panic");
        assert!(taken.iter().all(|taken| !taken), "not all was given back");
        // SAFETY: allocated in `new`, with this layout.
        unsafe { dealloc(self.memory.as_ptr(), Paper::layout(taken.len())) };
    }
}

// SAFETY: pages are memory, and each has one owner or none.
unsafe impl Backing for Paper {
    fn page_bytes(&self) -> usize {
        PAGE
    }

    fn take(&self, bytes: usize, _align: usize) -> Option<Block> {
        let pages = bytes / PAGE;
        let mut taken = self.0.taken.lock().expect("no panic");
        let mut runs = taken.windows(pages);
        let start = runs.position(|run| run.iter().all(|taken| !taken))?;
        taken[start..start + pages].fill(true);
        // SAFETY: inside the memory.
        let memory = unsafe { self.0.memory.add(start * PAGE) };
        Some(Block {
            memory: NonNull::slice_from_raw_parts(memory, bytes),
            zeroed: false,
        })
    }

    unsafe fn give(&self, memory: NonNull<[u8]>) {
        let start = (memory.addr().get() - self.0.memory.addr().get()) / PAGE;
        self.0.taken.lock().expect("no panic")[start..start + memory.len() / PAGE].fill(false);
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, GRAIN).expect("small")
}

/// Unwraps it: no other thread has it any more.
fn own<T>(shared: Arc<T>) -> T {
    Arc::into_inner(shared).expect("the threads have ended")
}

/// Three threads cut slabs of a page, of which there are eight; larger objects get blocks of their own. The last
/// object taken grows or goes back. Then everything is reset, and the whole repeats.
#[test]
fn three_threads_cut_grow_and_reset_an_arena() {
    explore(3000, || {
        let paper = Paper::new(12);
        let mut arena = Arena::with_config_in(ArenaConfig::new().slab(PAGE), paper.clone()).expect("takes nothing");
        for _ in 0..2 {
            let shared = Arc::new(arena);
            let threads: Vec<_> = (1..=3)
                .map(|who| {
                    let (paper, arena) = (paper.clone(), Arc::clone(&shared));
                    spawn(move || {
                        for bytes in [[40, 96, 104], [16, 200, 64], [104, 8, 300]][who - 1] {
                            let memory = match arena.allocate(layout(bytes)) {
                                Ok(memory) => memory,
                                Err(error) => panic!("{error}"),
                            };
                            paper.stamp(memory, 0, who);
                            if bytes == 64 || bytes == 8 {
                                // SAFETY: allocated here; if it grows in place, the growth is ours.
                                if unsafe { arena.resize_in_place(memory, bytes + 24) } {
                                    let start = memory.cast::<u8>();
                                    // SAFETY: inside the memory as it is now.
                                    let more = NonNull::slice_from_raw_parts(unsafe { start.add(bytes) }, 24);
                                    paper.stamp(more, 0, who);
                                }
                            } else if bytes == 96 {
                                paper.stamp(memory, who, 0);
                                // SAFETY: allocated here, and not used again.
                                if !unsafe { arena.resize_in_place(memory, 0) } {
                                    paper.stamp(memory, 0, who);
                                }
                            }
                        }
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            arena = own(shared);
            let owned = paper.0.owners.iter().filter(|owner| owner.load(Ordering::SeqCst) != 0);
            assert!(owned.count() * GRAIN <= arena.stats().allocated);
            arena.reset();
            paper.forget();
            assert_eq!(arena.stats().allocated, 0);
        }
        arena.shrink_to(0);
        assert_eq!(arena.stats().reserved, 0);
    });
}

/// A refusal has only one reason, lack of pages: as long as there are some, a thread that finds the slab full gets a
/// new one, the same for all threads that find it so.
#[test]
fn slabs_are_not_taken_for_nothing() {
    explore(3000, || {
        // Three slabs for 9 times 72 bytes, of which three fit into one (224 bytes).
        let paper = Paper::new(3);
        let arena = Arena::with_config_in(ArenaConfig::new().slab(PAGE), paper.clone()).expect("takes nothing");
        let shared = Arc::new(arena);
        let threads: Vec<_> = (1..=3)
            .map(|who| {
                let (paper, arena) = (paper.clone(), Arc::clone(&shared));
                spawn(move || {
                    for _ in 0..3 {
                        paper.stamp(arena.allocate(layout(72)).expect("room for nine"), 0, who);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!((shared.stats().slabs, shared.stats().allocated), (3, 648));
        assert_eq!(shared.allocate(layout(72)).unwrap_err().reason(), Reason::NoPages);
    });
}

/// Three locals with scopes, in an arena of one slab.
#[test]
fn locals_of_three_threads_share_what_is_left() {
    explore(1500, || {
        let paper = Paper::new(80);
        let config = ArenaConfig::new().slab(80 * PAGE);
        let arena = Arc::new(Arena::with_config_in(config, paper.clone()).expect("takes nothing"));
        let threads: Vec<_> = (1..=3)
            .map(|who| {
                let (paper, arena) = (paper.clone(), Arc::clone(&arena));
                spawn(move || {
                    for bytes in [16, 40] {
                        let mut local = arena.local();
                        for _ in 0..2 {
                            local.scoped(|scope| {
                                let inside = scope.allocate(layout(64)).expect("room");
                                paper.stamp(inside, 0, who);
                                shuttle::thread::yield_now();
                                paper.stamp(inside, who, 0);
                            });
                        }
                        paper.stamp(local.allocate(layout(bytes)).expect("room"), 0, who);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Three threads fill the slabs of a pool, which is reset, and fill them again; handles know which time they are from.
#[test]
fn the_slabs_of_a_pool_turn_over() {
    explore(2000, || {
        let paper = Paper::new(8);
        let mut pool = Pool::with_config_in(ArenaConfig::new().slab(PAGE), paper.clone()).expect("takes nothing");
        let mut stale = None;
        for round in 0..3_usize {
            let shared = Arc::new(pool);
            let threads: Vec<_> = (1..=3)
                .map(|who| {
                    let (paper, pool) = (paper.clone(), Arc::clone(&shared));
                    spawn(move || {
                        let handle = pool.insert([who; 9]).expect("room");
                        let memory = pool.get(handle).expect("of this round");
                        paper.stamp(NonNull::from(memory.as_slice()).cast_bytes(), 0, who);
                        paper.stamp(pool.allocate(layout(56 + 8 * who)).expect("room"), 0, who);
                        assert_eq!(pool.get(handle), Ok(&[who; 9]));
                        handle
                    })
                })
                .collect();
            let handles: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            pool = own(shared);
            for (who, handle) in (1..).zip(&handles) {
                assert_eq!(pool.get(*handle), Ok(&[who; 9]), "round {round}");
            }
            assert!(stale.is_none_or(|stale| pool.get(stale).is_err()));
            stale = handles.first().copied();
            pool.reset();
            paper.forget();
        }
        assert!(pool.stats().slabs <= 6);
    });
}

/// The bytes of a slice of words.
trait CastBytes {
    fn cast_bytes(self) -> NonNull<[u8]>;
}

impl CastBytes for NonNull<[usize]> {
    fn cast_bytes(self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.cast(), self.len() * size_of::<usize>())
    }
}
