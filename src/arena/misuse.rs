//! Programs that must not compile, each with a twin that differs in one line and compiles.
//!
//! ```text
//!   compile_fail,E0502    let value = arena.alloc(17); arena.reset(); use(value)   one line is wrong
//!   its twin              let value = arena.alloc(17); arena.stats(); use(value)   compiles, and runs
//! ```
//!
//! That a program does not compile proves little by itself: the reason may be a misspelt name. So each names its error,
//! which `.ci/run refusals` compares, and has a twin that is the same except for the wrong line; `tests/tidy.rs` looks
//! for both. The examples in the documentation have their twins here. Nothing of this is part of any build: `cargo test
//! --doc` reads it.
//!
//! Worked: if `reset` were renamed, the first program would still not compile, but for another reason: E0599 instead of
//! E0502.
//!
//! **The twins of the examples** of `Arena`: a value used after a reset, and one that outlives its arena.
//!
//! ```
//! use pageheap::arena::Arena;
//!
//! let mut arena = Arena::new();
//! let value = arena.alloc(17).unwrap();
//! arena.stats();
//! assert_eq!(*value, 17);
//! ```
//!
//! ```
//! use pageheap::arena::Arena;
//!
//! let value = {
//!     let arena = Arena::new();
//!     arena.boxed(&17).map(pageheap::arena::ArenaBox::into_inner).unwrap()
//! };
//! assert_eq!(*value, 17);
//! ```
//!
//! Of `Local` and `Scope`: a value that leaves its scope, in two ways, and the outer handle used inside.
//!
//! ```
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let mut local = arena.local();
//! let mut outside = &mut 0;
//! local.scoped(|scope| {
//!     *outside = *scope.alloc(17).unwrap();
//! });
//! assert_eq!(*outside, 17);
//! ```
//!
//! ```
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let mut local = arena.local();
//! let outside = std::cell::RefCell::new(Vec::new());
//! local.scoped(|scope| {
//!     outside.borrow_mut().push(*scope.alloc(17).unwrap());
//! });
//! assert_eq!(outside.into_inner().len(), 1);
//! ```
//!
//! ```
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let mut local = arena.local();
//! local.scoped(|scope| {
//!     scope.alloc(18).unwrap();
//!     scope.alloc(17).unwrap();
//! });
//! ```
//!
//! Of `ScopeGuard`: a value used after its guard is gone.
//!
//! ```
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let mut local = arena.local();
//! let mut guard = local.scope_guard();
//! let inside = guard.scope().alloc(17).unwrap();
//! arena.stats();
//! assert_eq!(*inside, 17);
//! ```
//!
//! Of `Pool` and `Handle`: a value used after a reset, a handle on another thread, and a value that lives shorter.
//!
//! ```
//! use pageheap::arena::Pool;
//!
//! let mut pool = Pool::new();
//! let buffer = pool.alloc_slice_copy(&[1, 2, 3]).unwrap();
//! pool.stats();
//! assert_eq!(buffer[0], 1);
//! ```
//!
//! ```
//! use std::cell::Cell;
//! use std::sync::Mutex;
//!
//! use pageheap::arena::Pool;
//!
//! let pool = Pool::new();
//! let (cell, mutex) = (pool.insert(Cell::new(1)).unwrap(), pool.insert(Mutex::new(1)).unwrap());
//! std::thread::scope(|scope| {
//!     scope.spawn(|| assert!(pool.get(mutex).is_ok()));
//!     assert!(pool.get(cell).is_ok());
//! });
//! ```
//!
//! ```
//! use pageheap::arena::{Handle, Pool};
//!
//! let mut pool = Pool::new();
//! let name: Handle<&'static str> = pool.insert("long").unwrap();
//! let text = String::from("short");
//! *pool.get_mut(name).unwrap() = text.leak();
//! ```
//!
//! Of the lists: a box without its list, a reset while there is an owner, an owner on two threads.
//!
//! ```
//! use pageheap::arena::FreeList;
//!
//! let list = FreeList::for_type::<u64>();
//! let number = list.boxed(7_u64).unwrap();
//! list.stats();
//! assert_eq!(*number, 7);
//! ```
//!
//! ```
//! use pageheap::arena::ShardedFreeList;
//!
//! let mut list = ShardedFreeList::new(core::alloc::Layout::new::<u64>(), 2).unwrap();
//! let owner = list.owner().unwrap();
//! list.stats();
//! owner.allocate().unwrap();
//! ```
//!
//! ```
//! use core::alloc::Layout;
//! use pageheap::arena::ShardedFreeList;
//!
//! let list = ShardedFreeList::new(Layout::new::<u64>(), 4).unwrap();
//! let owner = list.owner().unwrap();
//! std::thread::scope(|scope| {
//!     scope.spawn(move || assert!(owner.allocate().is_ok()));
//! });
//! ```
//!
//! **After a reset**, what the examples do not show: the value of a local, the local itself, its checkpoint, a box in
//! an arena, the value of a handle.
//!
//! ```compile_fail,E0502
//! use pageheap::arena::Arena;
//!
//! let mut arena = Arena::new();
//! let value = arena.local().alloc(17).unwrap();
//! arena.reset();
//! assert_eq!(*value, 17);
//! ```
//!
//! ```
//! use pageheap::arena::Arena;
//!
//! let mut arena = Arena::new();
//! let value = arena.local().alloc(17).unwrap();
//! arena.stats();
//! assert_eq!(*value, 17);
//! ```
//!
//! ```compile_fail,E0502
//! use pageheap::arena::Arena;
//!
//! let mut arena = Arena::new();
//! let local = arena.local();
//! arena.reset();
//! assert_eq!(*local.alloc(17).unwrap(), 17);
//! ```
//!
//! ```
//! use pageheap::arena::Arena;
//!
//! let mut arena = Arena::new();
//! let local = arena.local();
//! arena.stats();
//! assert_eq!(*local.alloc(17).unwrap(), 17);
//! ```
//!
//! ```compile_fail,E0502
//! use pageheap::arena::Arena;
//!
//! let mut arena = Arena::new();
//! let checkpoint = arena.local().checkpoint();
//! arena.reset();
//! // SAFETY: nothing was allocated by either.
//! unsafe { arena.local().rewind(checkpoint) };
//! ```
//!
//! ```
//! use pageheap::arena::Arena;
//!
//! let mut arena = Arena::new();
//! let checkpoint = arena.local().checkpoint();
//! arena.stats();
//! // SAFETY: nothing was allocated by either.
//! unsafe { arena.local().rewind(checkpoint) };
//! ```
//!
//! ```compile_fail,E0502
//! use pageheap::arena::Arena;
//!
//! let mut arena = Arena::new();
//! let words = arena.boxed(vec![1, 2]).unwrap();
//! arena.reset();
//! assert_eq!(words.len(), 2);
//! ```
//!
//! ```
//! use pageheap::arena::Arena;
//!
//! let mut arena = Arena::new();
//! let words = arena.boxed(vec![1, 2]).unwrap();
//! arena.stats();
//! assert_eq!(words.len(), 2);
//! ```
//!
//! ```compile_fail,E0502
//! use pageheap::arena::Pool;
//!
//! let mut pool = Pool::new();
//! let handle = pool.insert(17).unwrap();
//! let value = pool.get(handle).unwrap();
//! pool.reset();
//! assert_eq!(*value, 17);
//! ```
//!
//! ```
//! use pageheap::arena::Pool;
//!
//! let mut pool = Pool::new();
//! let handle = pool.insert(17).unwrap();
//! let value = pool.get(handle).unwrap();
//! pool.stats();
//! assert_eq!(*value, 17);
//! ```
//!
//! A box after the reset of its list, of either kind, and a guard.
//!
//! ```compile_fail,E0502
//! use pageheap::arena::FreeList;
//!
//! let mut list = FreeList::for_type::<u64>();
//! let number = list.boxed(7_u64).unwrap();
//! list.reset();
//! assert_eq!(*number, 7);
//! ```
//!
//! ```
//! use pageheap::arena::FreeList;
//!
//! let mut list = FreeList::for_type::<u64>();
//! let number = list.boxed(7_u64).unwrap();
//! list.stats();
//! assert_eq!(*number, 7);
//! ```
//!
//! ```compile_fail,E0502
//! use core::alloc::Layout;
//! use pageheap::arena::ShardedFreeList;
//!
//! let mut list = ShardedFreeList::new(Layout::new::<u64>(), 2).unwrap();
//! let number = list.boxed(7_u64).unwrap();
//! list.reset();
//! assert_eq!(*number, 7);
//! ```
//!
//! ```
//! use core::alloc::Layout;
//! use pageheap::arena::ShardedFreeList;
//!
//! let mut list = ShardedFreeList::new(Layout::new::<u64>(), 2).unwrap();
//! let number = list.boxed(7_u64).unwrap();
//! list.stats();
//! assert_eq!(*number, 7);
//! ```
//!
//! ```compile_fail,E0502
//! use core::alloc::Layout;
//! use pageheap::arena::ShardedFreeList;
//!
//! let mut list = ShardedFreeList::new(Layout::new::<u64>(), 2).unwrap();
//! let owner = list.owner().unwrap();
//! let guard = owner.enter();
//! list.reset();
//! drop(guard);
//! ```
//!
//! ```
//! use core::alloc::Layout;
//! use pageheap::arena::ShardedFreeList;
//!
//! let mut list = ShardedFreeList::new(Layout::new::<u64>(), 2).unwrap();
//! let owner = list.owner().unwrap();
//! let guard = owner.enter();
//! list.stats();
//! drop(guard);
//! ```
//!
//! **Outliving the source**: the value of a pool, and that of one of its handles; an owner, its box and its guard.
//!
//! ```compile_fail,E0505
//! use pageheap::arena::Pool;
//!
//! let pool = Pool::new();
//! let value = pool.alloc(17).unwrap();
//! drop(pool);
//! assert_eq!(*value, 17);
//! ```
//!
//! ```
//! use pageheap::arena::Pool;
//!
//! let pool = Pool::new();
//! let value = pool.alloc(17).unwrap();
//! pool.stats();
//! assert_eq!(*value, 17);
//! ```
//!
//! ```compile_fail,E0505
//! use pageheap::arena::Pool;
//!
//! let pool = Pool::new();
//! let handle = pool.insert(17).unwrap();
//! let value = pool.get(handle).unwrap();
//! drop(pool);
//! assert_eq!(*value, 17);
//! ```
//!
//! ```
//! use pageheap::arena::Pool;
//!
//! let pool = Pool::new();
//! let handle = pool.insert(17).unwrap();
//! let value = pool.get(handle).unwrap();
//! pool.stats();
//! assert_eq!(*value, 17);
//! ```
//!
//! ```compile_fail,E0505
//! use core::alloc::Layout;
//! use pageheap::arena::ShardedFreeList;
//!
//! let list = ShardedFreeList::new(Layout::new::<u64>(), 2).unwrap();
//! let owner = list.owner().unwrap();
//! drop(list);
//! assert!(owner.allocate().is_ok());
//! ```
//!
//! ```
//! use core::alloc::Layout;
//! use pageheap::arena::ShardedFreeList;
//!
//! let list = ShardedFreeList::new(Layout::new::<u64>(), 2).unwrap();
//! let owner = list.owner().unwrap();
//! list.stats();
//! assert!(owner.allocate().is_ok());
//! ```
//!
//! ```compile_fail,E0505
//! use core::alloc::Layout;
//! use pageheap::arena::ShardedFreeList;
//!
//! let list = ShardedFreeList::new(Layout::new::<u64>(), 2).unwrap();
//! let owner = list.owner().unwrap();
//! let number = owner.boxed(7_u64).unwrap();
//! drop(owner);
//! assert_eq!(*number, 7);
//! ```
//!
//! ```
//! use core::alloc::Layout;
//! use pageheap::arena::ShardedFreeList;
//!
//! let list = ShardedFreeList::new(Layout::new::<u64>(), 2).unwrap();
//! let owner = list.owner().unwrap();
//! let number = owner.boxed(7_u64).unwrap();
//! owner.flush();
//! assert_eq!(*number, 7);
//! ```
//!
//! ```compile_fail,E0505
//! use core::alloc::Layout;
//! use pageheap::arena::ShardedFreeList;
//!
//! let list = ShardedFreeList::new(Layout::new::<u64>(), 2).unwrap();
//! let owner = list.owner().unwrap();
//! let guard = owner.enter();
//! drop(owner);
//! drop(guard);
//! ```
//!
//! ```
//! use core::alloc::Layout;
//! use pageheap::arena::ShardedFreeList;
//!
//! let list = ShardedFreeList::new(Layout::new::<u64>(), 2).unwrap();
//! let owner = list.owner().unwrap();
//! let guard = owner.enter();
//! owner.flush();
//! drop(guard);
//! ```
//!
//! **In a scope that has a guard**: its value once it begins anew, and the handle that it is a part of.
//!
//! ```compile_fail,E0499
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let mut local = arena.local();
//! let mut guard = local.scope_guard();
//! let inside = guard.scope().alloc(17).unwrap();
//! guard.scope();
//! assert_eq!(*inside, 17);
//! ```
//!
//! ```compile_fail,E0502
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let mut local = arena.local();
//! let mut guard = local.scope_guard();
//! local.alloc(18).unwrap();
//! assert_eq!(*guard.scope().alloc(17).unwrap(), 17);
//! ```
//!
//! ```
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let mut local = arena.local();
//! let mut guard = local.scope_guard();
//! arena.alloc(18).unwrap();
//! assert_eq!(*guard.scope().alloc(17).unwrap(), 17);
//! ```
//!
//! **On two threads**: a local, which allocates without atomic operations, and a guard of an owner.
//!
//! ```compile_fail,E0277
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let local = arena.local();
//! std::thread::scope(|scope| {
//!     scope.spawn(|| assert!(local.alloc(17).is_ok()));
//! });
//! ```
//!
//! ```
//! use pageheap::arena::Arena;
//!
//! let arena = Arena::new();
//! let local = arena.local();
//! std::thread::scope(|scope| {
//!     scope.spawn(move || assert!(local.alloc(17).is_ok()));
//! });
//! ```
//!
//! ```compile_fail,E0277
//! use core::alloc::Layout;
//! use pageheap::arena::ShardedFreeList;
//!
//! let list = ShardedFreeList::new(Layout::new::<u64>(), 2).unwrap();
//! let owner = list.owner().unwrap();
//! let guard = owner.enter();
//! std::thread::scope(|scope| {
//!     scope.spawn(|| drop(guard));
//! });
//! ```
//!
//! ```
//! use core::alloc::Layout;
//! use pageheap::arena::ShardedFreeList;
//!
//! let list = ShardedFreeList::new(Layout::new::<u64>(), 2).unwrap();
//! let owner = list.owner().unwrap();
//! let guard = owner.enter();
//! std::thread::scope(|scope| {
//!     scope.spawn(|| drop(list.owner()));
//! });
//! ```
//!
//! **Pinned, but not for ever**: a box could be forgotten, and its list or arena dropped.
//!
//! ```compile_fail,E0597
//! use pageheap::arena::{FreeList, SlotBox};
//!
//! let list = FreeList::for_type::<u64>();
//! let list: &FreeList = &list;
//! let number = SlotBox::into_pin(list.boxed(7_u64).unwrap());
//! assert_eq!(*number, 7);
//! ```
//!
//! ```
//! use pageheap::arena::{FreeList, SlotBox};
//!
//! let list = FreeList::for_type::<u64>();
//! let list: &FreeList = Box::leak(Box::new(list));
//! let number = SlotBox::into_pin(list.boxed(7_u64).unwrap());
//! assert_eq!(*number, 7);
//! ```
//!
//! ```compile_fail,E0597
//! use pageheap::arena::{Arena, ArenaBox};
//!
//! let arena = Arena::new();
//! let arena: &Arena = &arena;
//! let number = ArenaBox::into_pin(arena.boxed(7).unwrap());
//! assert_eq!(*number, 7);
//! ```
//!
//! ```
//! use pageheap::arena::{Arena, ArenaBox};
//!
//! let arena = Arena::new();
//! let arena: &Arena = Box::leak(Box::new(arena));
//! let number = ArenaBox::into_pin(arena.boxed(7).unwrap());
//! assert_eq!(*number, 7);
//! ```
//!
//! **A box of what the value is not**: another type, or a trait that it lacks.
//!
//! ```compile_fail,E0308
//! use pageheap::arena::{Arena, ArenaBox};
//! use pageheap::unsize_box;
//!
//! let arena = Arena::new();
//! let numbers: ArenaBox<u64> = unsize_box!(arena.boxed([1, 2]).unwrap());
//! assert_eq!(size_of_val(&*numbers), 8);
//! ```
//!
//! ```
//! use pageheap::arena::{Arena, ArenaBox};
//! use pageheap::unsize_box;
//!
//! let arena = Arena::new();
//! let numbers: ArenaBox<[u32]> = unsize_box!(arena.boxed([1, 2]).unwrap());
//! assert_eq!(size_of_val(&*numbers), 8);
//! ```
//!
//! ```compile_fail,E0277
//! use std::fmt::Display;
//!
//! use pageheap::arena::{FreeList, SlotBox};
//! use pageheap::unsize_box;
//!
//! let list = FreeList::for_type::<[u64; 4]>();
//! let shown: SlotBox<dyn Display, _> = unsize_box!(list.boxed([7]).unwrap());
//! assert_eq!(shown.to_string(), "7");
//! ```
//!
//! ```
//! use std::fmt::Display;
//!
//! use pageheap::arena::{FreeList, SlotBox};
//! use pageheap::unsize_box;
//!
//! let list = FreeList::for_type::<[u64; 4]>();
//! let shown: SlotBox<dyn Display, _> = unsize_box!(list.boxed(7).unwrap());
//! assert_eq!(shown.to_string(), "7");
//! ```
//!
//! **More for longer than it lasts**: a trait object that borrows cannot become one that does not.
//!
//! ```compile_fail,E0597
//! use pageheap::arena::{Arena, ArenaBox};
//! use pageheap::unsize_box;
//!
//! let (arena, name) = (Arena::new(), String::from("name"));
//! let shown: ArenaBox<dyn AsRef<str> + 'static> = unsize_box!(arena.boxed(name.as_str()).unwrap());
//! assert_eq!((*shown).as_ref(), "name");
//! ```
//!
//! ```
//! use pageheap::arena::{Arena, ArenaBox};
//! use pageheap::unsize_box;
//!
//! let (arena, name) = (Arena::new(), String::from("name"));
//! let shown: ArenaBox<dyn AsRef<str> + '_> = unsize_box!(arena.boxed(name.as_str()).unwrap());
//! assert_eq!((*shown).as_ref(), "name");
//! ```

#![forbid(unsafe_code)]
