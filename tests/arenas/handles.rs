//! A local, scopes in it and scopes in those, each a value, in stories told by chance.
//!
//! ```text
//!   level 0   local ──▶ room ─────────────────────────────────▶ allocates, resizes, is rewound
//!   level 1     scope ──▶ room of its own ──────────▶ ends, is forgotten, is boxed, panics
//!   level 2       scope ──▶ room of its own ──────▶
//!   beside        the arena itself, other locals, other scopes
//! ```
//!
//! A handle's room is a copy of its own, and what becomes of it has to come back on every way: when a scope ends, when
//! it panics and somebody at any level catches that, when an iterator, a `Display` or a `make` allocates from the
//! handle that is waiting for it. The other stories know a handle by reference only, through a trait object; here it is
//! what a program has, a variable that is moved.
//!
//! What is alive is written full of a pattern of its own. A new block overlaps nothing that is alive, and the patterns
//! stay. A story that fails says its seed, and draws what was alive: `story(seed)` tells it again.

use std::alloc::Layout;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::mem;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::thread;

use allocator_api2_04::alloc::Allocator;
use allocator_api2_04::vec::Vec as VecIn;
use pageheap::arena::{Arena, ArenaConfig, ArenaError, Checkpoint, Local, Reason, Scope};

use super::blocks::Blocks;
use super::stories::by_chance;
use super::twins::{Bytes, same};

/// How deep scopes are in each other.
const LEVELS: usize = 8;

/// What a panic that belongs to the story carries.
struct Planned;

const WORD: usize = size_of::<u64>();

/// Whether a word lies right behind another.
fn is_next(one: Option<usize>, next: Option<usize>) -> bool {
    one.is_some() && one.map(|place| place + WORD) == next
}

/// Memory handed out, filled with a pattern of its own.
#[derive(Clone, Copy)]
struct Live {
    memory: NonNull<[u8]>,
    pattern: u8,
    level: usize,
}

impl Live {
    fn overlaps(self, other: Self) -> bool {
        let [(start, end), (from, to)] = [self, other].map(|live| {
            let start = live.memory.addr().get();
            (start, start + live.memory.len())
        });
        start < to && from < end
    }

    /// Whether the first `bytes` bytes are as they were written.
    fn stays(self, bytes: usize) -> bool {
        // SAFETY: alive, and written from end to end.
        let bytes = unsafe { &self.memory.as_ref()[..bytes] };
        // The first is right, and each is as the one before: quick without optimisation, too.
        bytes.is_empty() || bytes[0] == self.pattern && bytes[1..] == bytes[..bytes.len() - 1]
    }
}

/// What there is to go back to.
#[derive(Clone, Copy)]
struct Point<'a> {
    checkpoint: Checkpoint<'a>,
    /// How many were alive.
    alive: usize,
    /// Where the next word was, if that was right behind another.
    next: Option<usize>,
}

/// What a [`Local`] and a [`Scope`] have in common.
trait Hand<'b> {
    fn take(&self, layout: Layout) -> Result<NonNull<[u8]>, ArenaError>;
    unsafe fn resize(&self, memory: NonNull<[u8]>, size: usize) -> bool;
    fn list(&self, words: impl Iterator<Item = u64>, expected: &[u64]) -> Result<NonNull<[u8]>, ArenaError>;
    fn text(&self, text: fmt::Arguments<'_>, expected: &str) -> Result<NonNull<[u8]>, ArenaError>;
    fn value(&self, make: impl FnOnce() -> [u64; 5], expected: [u64; 5]) -> Result<NonNull<[u8]>, ArenaError>;
    fn vectors(&self, story: &Story<'_, 'b>);
    fn enter(&mut self, work: impl FnOnce(Scope<'_, &'b Blocks>));
}

macro_rules! hand {
    ($hand:ident) => {
        impl<'b> Hand<'b> for $hand<'_, &'b Blocks> {
            fn take(&self, layout: Layout) -> Result<NonNull<[u8]>, ArenaError> {
                self.allocate(layout)
            }

            unsafe fn resize(&self, memory: NonNull<[u8]>, size: usize) -> bool {
                // SAFETY: the caller's promise.
                unsafe { self.resize_in_place(memory, size) }
            }

            fn list(&self, words: impl Iterator<Item = u64>, expected: &[u64]) -> Result<NonNull<[u8]>, ArenaError> {
                self.alloc_iter(words).map(|list| same(list, expected))
            }

            fn text(&self, text: fmt::Arguments<'_>, expected: &str) -> Result<NonNull<[u8]>, ArenaError> {
                let made = self.alloc_fmt(text);
                // SAFETY: not read as text again.
                made.map(|text| same(unsafe { text.as_bytes_mut() }, expected.as_bytes()))
            }

            fn value(&self, make: impl FnOnce() -> [u64; 5], expected: [u64; 5]) -> Result<NonNull<[u8]>, ArenaError> {
                self.alloc_with(make).map(|value| same(value, &expected))
            }

            fn vectors(&self, story: &Story<'_, 'b>) {
                story.grow_by_turns(self);
            }

            fn enter(&mut self, work: impl FnOnce(Scope<'_, &'b Blocks>)) {
                self.scoped(work);
            }
        }
    };
}

hand!(Local);
hand!(Scope);

/// One round of a story: up to a reset of the arena.
struct Story<'a, 'b> {
    seed: u64,
    bytes: &'a Bytes<'b>,
    arena: &'a Arena<&'b Blocks>,
    /// A local that stays beside the one the story is about.
    other: Local<'a, &'b Blocks>,
    level: Cell<usize>,
    made: Cell<u8>,
    /// What was allocated through the handle the story is about, in that order, and lives as long as that or its scope.
    live: RefCell<Vec<Live>>,
    /// What lives until the reset.
    kept: RefCell<Vec<Live>>,
}

impl<'a, 'b> Story<'a, 'b> {
    /// One in `end` times.
    fn rarely(&self, end: usize) -> bool {
        self.bytes.byte() % end == end - 1
    }

    /// New memory: it is aligned, overlaps nothing, and is written to.
    fn new_live(&self, memory: NonNull<[u8]>, align: usize) -> Option<Live> {
        assert!(memory.addr().get().is_multiple_of(align), "{memory:?} to {align}");
        if memory.is_empty() {
            return None;
        }
        self.made.set(self.made.get().wrapping_add(37));
        let live = Live {
            memory,
            pattern: self.made.get(),
            level: self.level.get(),
        };
        let (start, bytes) = (memory.addr().get(), memory.len());
        assert!(
            self.arena.backing().has(start, bytes),
            "{start:#x} + {bytes} is in no block"
        );
        for other in self.live.borrow().iter().chain(&*self.kept.borrow()) {
            assert!(!live.overlaps(*other), "{memory:?} overlaps {:?}", other.memory);
        }
        // SAFETY: handed out to us.
        unsafe { memory.cast::<u8>().write_bytes(live.pattern, bytes) };
        Some(live)
    }

    /// What came of allocating through the handle.
    fn add(&self, made: Result<NonNull<[u8]>, ArenaError>, align: usize) {
        let live = self.come_of(made, align);
        self.live.borrow_mut().extend(live);
    }

    /// What came of allocating beside it.
    fn keep(&self, made: Result<NonNull<[u8]>, ArenaError>, align: usize) {
        let live = self.come_of(made, align);
        self.kept.borrow_mut().extend(live);
    }

    fn come_of(&self, made: Result<NonNull<[u8]>, ArenaError>, align: usize) -> Option<Live> {
        match made {
            Ok(memory) => self.new_live(memory, align),
            Err(error) => {
                assert!(matches!(error.reason(), Reason::Limit | Reason::NoPages), "{error}");
                None
            }
        }
    }

    /// Everything is as it was written.
    fn check(&self) {
        for live in self.live.borrow().iter().chain(&*self.kept.borrow()) {
            assert!(live.stays(live.memory.len()), "{:?} was overwritten", live.memory);
        }
    }

    /// Catches a panic of the story, and no other. Whether there was none.
    fn caught(work: impl FnOnce()) -> bool {
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(()) => true,
            Err(panic) if panic.is::<Planned>() => false,
            Err(panic) => resume_unwind(panic),
        }
    }

    fn allocate(&self, hand: &impl Hand<'b>) {
        let layout = self.bytes.layout();
        self.add(hand.take(layout), layout.align());
    }

    /// Allocates a word: where it is, if it is.
    fn word(&self, hand: &impl Hand<'b>) -> Option<usize> {
        let made = hand.take(Layout::new::<u64>());
        let place = made.as_ref().ok().map(|word| word.addr().get());
        self.add(made, align_of::<u64>());
        place
    }

    /// Makes one of the last longer or shorter: of those from `from` on, which are the handle's own.
    fn resize(&self, hand: &impl Hand<'b>, from: usize) {
        let (back, size) = (self.bytes.byte() % 4, self.bytes.size());
        let last = self.live.borrow().len().checked_sub(1 + back);
        let Some(index) = last.filter(|&index| index >= from) else {
            return;
        };
        let live = self.live.borrow()[index];
        // SAFETY: alive, and what is given up is not used.
        if unsafe { hand.resize(live.memory, size) } {
            assert!(
                live.stays(size.min(live.memory.len())),
                "{:?} was overwritten",
                live.memory
            );
            self.live.borrow_mut().remove(index);
            self.add(Ok(NonNull::slice_from_raw_parts(live.memory.cast(), size)), 1);
        }
    }

    /// A slice of what an iterator gives that allocates on its way, and may not come to its end.
    fn iterate(&self, hand: &impl Hand<'b>) {
        let (len, end) = (self.bytes.byte() % 60, self.bytes.byte());
        let words = (0..len).map(|index| {
            match self.bytes.byte() % 32 {
                0..=4 => self.allocate(hand),
                5 => self.elsewhere(),
                _ if index == end => resume_unwind(Box::new(Planned)),
                _ => {}
            }
            index as u64
        });
        let expected: Vec<u64> = (0..len as u64).collect();
        Self::caught(|| {
            let made = if self.rarely(2) {
                hand.list(words, &expected)
            } else {
                // Does not say how many there are.
                hand.list(words.filter(|_| true), &expected)
            };
            self.add(made, align_of::<u64>());
        });
    }

    /// Text whose parts allocate.
    fn text(&self, hand: &impl Hand<'b>) {
        let part = fmt::from_fn(|text| {
            if self.rarely(4) {
                self.allocate(hand);
            }
            text.write_str("of a text")
        });
        let made = hand.text(format_args!("{part}, {part}"), "of a text, of a text");
        self.add(made, 1);
    }

    /// A value whose making allocates.
    fn value(&self, hand: &impl Hand<'b>) {
        let make = || {
            self.allocate(hand);
            [7; 5]
        };
        self.add(hand.value(make, [7; 5]), align_of::<u64>());
    }

    /// Two collections on one handle: who grows may be last, or not.
    fn grow_by_turns(&self, hand: impl Allocator + Copy) {
        let (mut long, mut short) = (VecIn::new_in(hand), VecIn::new_in(hand));
        let (end, often) = (self.bytes.byte() * 8, 2 + self.bytes.byte());
        let beside = self.bytes.byte() * 8;
        for number in 0..end {
            if long.try_reserve(1).is_err() {
                break;
            }
            long.push(number);
            if number % often == 0 && short.try_reserve(1).is_ok() {
                short.push(number as u32);
            }
            if number == beside {
                self.elsewhere();
            }
        }
        long.truncate(self.bytes.byte());
        if self.rarely(2) {
            long.shrink_to_fit();
        }
        self.check();
        assert!(long.iter().copied().eq(0..long.len()));
        assert!(
            short
                .iter()
                .zip(0..)
                .all(|(&number, index)| number as usize == index * often)
        );
    }

    /// A scope that is a variable of who allocates, and is shown to nobody: in registers, where this is optimised.
    fn values(&self, hand: &mut impl Hand<'b>) {
        let (count, panics) = (self.bytes.byte() * 4, self.rarely(4));
        Self::caught(|| {
            hand.enter(|scope| {
                let values: Vec<_> = (0..count).map_while(|number| scope.alloc([number; 3]).ok()).collect();
                self.check();
                assert!(values.iter().enumerate().all(|(number, value)| **value == [number; 3]));
                if panics {
                    resume_unwind(Box::new(Planned));
                }
            });
        });
    }

    /// What goes on beside the handle, and is none of its business.
    fn elsewhere(&self) {
        let layout = self.bytes.layout();
        match self.bytes.byte() % 4 {
            0 => self.keep(self.arena.allocate(layout), layout.align()),
            1 => self.keep(self.other.allocate(layout), layout.align()),
            2 => {
                let mut local = self.arena.local();
                self.keep(local.allocate(layout), layout.align());
                local.scoped(|scope| scope.allocate(self.bytes.layout()).is_ok());
                self.keep(local.allocate(layout), layout.align());
            }
            _ => {
                let local = self.arena.local();
                for number in 0..self.bytes.byte() % 32 {
                    let made = local.alloc([number; 3]);
                    self.keep(made.map(|value| same(value, &[number; 3])), align_of::<usize>());
                }
            }
        }
    }

    /// A scope, at whose end all is as before: also where the handle goes on.
    fn nested(&self, hand: &mut impl Hand<'b>) {
        // Not always: a scope may be the first of all.
        let before = self.rarely(2).then(|| self.word(hand)).flatten();
        let (level, alive) = (self.level.get(), self.live.borrow().len());
        let first = Cell::new(None);
        let work = |scope: Scope<'_, &'b Blocks>| {
            self.level.set(level + 1);
            first.set(self.word(&scope));
            self.in_scope(scope);
        };
        let ended = if level == 0 || self.rarely(3) {
            Self::caught(|| hand.enter(work))
        } else {
            hand.enter(work);
            true
        };
        self.level.set(level);
        self.live.borrow_mut().truncate(alive);
        self.check();
        let next = self.word(hand);
        // After a panic the handle may not know of the room that the scope has made.
        if ended && is_next(before, first.get()) {
            assert_eq!(next, first.get(), "what a scope allocated is given back");
        }
    }

    /// One thing, with a handle that has allocated what is alive from `from` on.
    fn step(&self, hand: &mut impl Hand<'b>, from: usize) -> ControlFlow<()> {
        let level = self.level.get();
        match self.bytes.byte() % 32 {
            0..=11 => self.allocate(hand),
            12..=14 => self.resize(hand, from),
            15..=16 => self.iterate(hand),
            17 => self.text(hand),
            18 => self.value(hand),
            19 => hand.vectors(self),
            20 => self.elsewhere(),
            21 => self.check(),
            22..=25 if level < LEVELS => self.nested(hand),
            26..=27 => self.values(hand),
            28 if level > 0 && self.rarely(4) => resume_unwind(Box::new(Planned)),
            29..=31 => return ControlFlow::Break(()),
            _ => {}
        }
        ControlFlow::Continue(())
    }

    fn in_scope(&self, mut scope: Scope<'_, &'b Blocks>) {
        let from = self.live.borrow().len();
        while !self.bytes.is_empty() {
            match self.bytes.byte() % 50 {
                #[expect(
                    clippy::forget_non_drop,
                    reason = "it does not matter whether there is something to drop"
                )]
                1 => return mem::forget(scope),
                2 => scope = *Box::new(scope),
                _ if self.step(&mut scope, from).is_break() => return,
                _ => {}
            }
        }
    }

    fn in_local(&self, local: &mut Local<'a, &'b Blocks>) {
        let mut points: Vec<Point<'_>> = Vec::new();
        while !self.bytes.is_empty() && !self.rarely(64) {
            match self.bytes.byte() % 12 {
                1 => {
                    let before = self.rarely(2).then(|| self.word(local)).flatten();
                    let (checkpoint, alive) = (local.checkpoint(), self.live.borrow().len());
                    let next = self.word(local);
                    points.push(Point {
                        checkpoint,
                        alive,
                        next: next.filter(|_| is_next(before, next)),
                    });
                }
                2 if !points.is_empty() => {
                    points.truncate(1 + self.bytes.byte() % points.len());
                    let Point {
                        checkpoint,
                        alive,
                        next,
                    } = points[points.len() - 1];
                    if self.rarely(2) {
                        points.pop();
                    }
                    self.live.borrow_mut().truncate(alive);
                    // SAFETY: not rewound further back since; nothing allocated since is used.
                    unsafe { local.rewind(checkpoint) };
                    let again = self.word(local);
                    assert!(
                        next.is_none() || again == next,
                        "what was allocated since is given back"
                    );
                }
                _ => {
                    let from = points.last().map_or(0, |point| point.alive);
                    // A local goes on.
                    let _ = self.step(local, from);
                }
            }
        }
    }

    /// A local, from its beginning to its end. What it allocated stays.
    fn tell(&self) {
        let mut local = self.arena.local();
        self.in_local(&mut local);
        if self.rarely(4) {
            mem::forget(local);
        }
        self.kept.borrow_mut().append(&mut self.live.borrow_mut());
        self.check();
    }
}

impl fmt::Display for Story<'_, '_> {
    fn fmt(&self, drawing: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            drawing,
            "story {} failed at level {}; alive were",
            self.seed,
            self.level.get()
        )?;
        let blocks = self.arena.backing().all();
        let row = |drawing: &mut fmt::Formatter<'_>, level: &dyn fmt::Display, live: &Live| {
            let (start, bytes) = (live.memory.addr().get(), live.memory.len());
            let block = blocks.partition_point(|&(block, _)| block <= start).saturating_sub(1);
            let offset = start - blocks.get(block).map_or(0, |&(block, _)| block);
            writeln!(drawing, "  level {level:<6} block {block:<3} {offset:>#9x} + {bytes}")
        };
        for live in &*self.kept.borrow() {
            row(drawing, &"kept", live)?;
        }
        for live in &*self.live.borrow() {
            row(drawing, &live.level, live)?;
        }
        Ok(())
    }
}

impl Drop for Story<'_, '_> {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{self}");
        }
    }
}

fn story(seed: u64) {
    let mut noise = by_chance((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let len = if cfg!(miri) { 300 } else { 4000 };
    let input: Vec<u8> = (0..len).map(|_| noise()).collect();
    let bytes = Bytes::new(&input);
    let blocks = Blocks::new([0, 0, 3, 5][bytes.byte() % 4]);
    let config = match bytes.byte() % 4 {
        0..=1 => ArenaConfig::new(),
        2 => ArenaConfig::new().slab(1 << 20),
        _ => ArenaConfig::new().limit(1 << 20),
    };
    let mut arena = Arena::with_config_in(config, &blocks).expect("nothing is taken yet");
    while !bytes.is_empty() {
        let story = Story {
            seed,
            bytes: &bytes,
            arena: &arena,
            other: arena.local(),
            level: Cell::new(0),
            made: Cell::new(0),
            live: RefCell::default(),
            kept: RefCell::default(),
        };
        while !bytes.is_empty() && !story.rarely(4) {
            story.tell();
        }
        drop(story);
        arena.reset();
    }
    drop(arena);
    assert!(blocks.is_empty(), "everything goes back");
}

#[test]
fn what_is_alive_stays_whatever_becomes_of_handles() {
    let stories = match () {
        () if cfg!(miri) => 2,
        () if cfg!(debug_assertions) => 60,
        () => 600,
    };
    (0..stories).for_each(story);
}
