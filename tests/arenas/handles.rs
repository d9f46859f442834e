//! Random stories about a local, scopes in it, and scopes in those, each held by value.
//!
//! ```text
//!   level 0   local ──▶ room ─────────────────────────────────▶ allocates, resizes, is rewound
//!   level 1     scope ──▶ room of its own ──────────▶ ends, is forgotten, is boxed, panics; its guard is leaked
//!   level 2       scope ──▶ room of its own ──────▶
//!   beside        the arena itself, other locals, other scopes
//! ```
//!
//! A handle has its own copy of its room. Changes to that copy must be carried back on every path: when a scope ends,
//! when it panics and any level catches the panic, and when an iterator, a `Display` or a `make` allocates from the
//! handle that is waiting for it. The other stories reach a handle only by reference, through a trait object. Here it
//! is a variable that is moved, as in a real program.
//!
//! Each live block is filled with its own pattern. A new block must overlap no live block, and the patterns must stay.
//! A story that fails reports its seed and draws its live blocks; `story(seed)` repeats it.

use std::alloc::Layout;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::mem::{self, ManuallyDrop};
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

/// How deep scopes may nest.
const LEVELS: usize = 8;

/// The payload of a panic that is part of the story.
struct Planned;

const WORD: usize = size_of::<u64>();

/// Whether a word lies directly behind another.
fn is_next(one: Option<usize>, next: Option<usize>) -> bool {
    one.is_some() && one.map(|place| place + WORD) == next
}

/// A live block, filled with its own pattern.
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

    /// Whether the first `bytes` bytes still hold the pattern.
    fn stays(self, bytes: usize) -> bool {
        // SAFETY: alive, and written from end to end.
        let bytes = unsafe { &self.memory.as_ref()[..bytes] };
        // The first byte is right, and each byte equals the one before: fast even without optimisation.
        bytes.is_empty() || bytes[0] == self.pattern && bytes[1..] == bytes[..bytes.len() - 1]
    }
}

/// A point to rewind to.
#[derive(Clone, Copy)]
struct Point<'a> {
    checkpoint: Checkpoint<'a>,
    /// How many blocks were alive.
    alive: usize,
    /// Where the next word was, if directly behind another.
    next: Option<usize>,
}

/// How a scope is entered, and so how it ends.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Closure,
    Guard,
    LeakedGuard,
}

/// What [`Local`] and [`Scope`] have in common.
trait Hand<'b> {
    fn take(&self, layout: Layout) -> Result<NonNull<[u8]>, ArenaError>;
    unsafe fn resize(&self, memory: NonNull<[u8]>, size: usize) -> bool;
    fn list(&self, words: impl Iterator<Item = u64>, expected: &[u64]) -> Result<NonNull<[u8]>, ArenaError>;
    fn text(&self, text: fmt::Arguments<'_>, expected: &str) -> Result<NonNull<[u8]>, ArenaError>;
    fn value(&self, make: impl FnOnce() -> [u64; 5], expected: [u64; 5]) -> Result<NonNull<[u8]>, ArenaError>;
    fn vectors(&self, story: &Story<'_, 'b>);
    fn enter(&mut self, way: Way, work: impl FnOnce(Scope<'_, 'b, &'b Blocks>));
}

macro_rules! hand {
    ($hand:ty) => {
        impl<'b> Hand<'b> for $hand {
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

            fn enter(&mut self, way: Way, work: impl FnOnce(Scope<'_, 'b, &'b Blocks>)) {
                match way {
                    Way::Closure => self.scoped(work),
                    Way::Guard => work(self.scope_guard().scope()),
                    Way::LeakedGuard => work(ManuallyDrop::new(self.scope_guard()).scope()),
                }
            }
        }
    };
}

hand!(Local<'_, &'b Blocks>);
hand!(Scope<'_, '_, &'b Blocks>);

/// One round of a story: up to a reset of the arena.
struct Story<'a, 'b> {
    seed: u64,
    bytes: &'a Bytes<'b>,
    arena: &'a Arena<&'b Blocks>,
    /// A second local, beside the one that the story is about.
    other: Local<'a, &'b Blocks>,
    level: Cell<usize>,
    made: Cell<u8>,
    /// Blocks allocated through the story's handle, in that order. Each lives as long as the handle or its scope.
    live: RefCell<Vec<Live>>,
    /// Blocks that live until the reset.
    kept: RefCell<Vec<Live>>,
}

impl<'a, 'b> Story<'a, 'b> {
    /// True one time in `end`.
    fn rarely(&self, end: usize) -> bool {
        self.bytes.byte() % end == end - 1
    }

    /// Records a new block: it must be aligned and overlap nothing, and is then filled.
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
        // SAFETY: the block was handed out to this story.
        unsafe { memory.cast::<u8>().write_bytes(live.pattern, bytes) };
        Some(live)
    }

    /// Records an allocation through the handle.
    fn add(&self, made: Result<NonNull<[u8]>, ArenaError>, align: usize) {
        let live = self.come_of(made, align);
        self.live.borrow_mut().extend(live);
    }

    /// Records an allocation beside the handle.
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

    /// Every block still holds its pattern.
    fn check(&self) {
        for live in self.live.borrow().iter().chain(&*self.kept.borrow()) {
            assert!(live.stays(live.memory.len()), "{:?} was overwritten", live.memory);
        }
    }

    /// Catches only the story's own panics. Returns whether there was none.
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

    /// Allocates a word. Returns its address if that succeeded.
    fn word(&self, hand: &impl Hand<'b>) -> Option<usize> {
        let made = hand.take(Layout::new::<u64>());
        let place = made.as_ref().ok().map(|word| word.addr().get());
        self.add(made, align_of::<u64>());
        place
    }

    /// Resizes one of the last blocks; only those from `from` on belong to the handle.
    fn resize(&self, hand: &impl Hand<'b>, from: usize) {
        let (back, size) = (self.bytes.byte() % 4, self.bytes.size());
        let last = self.live.borrow().len().checked_sub(1 + back);
        let Some(index) = last.filter(|&index| index >= from) else {
            return;
        };
        let live = self.live.borrow()[index];
        // SAFETY: alive, and the part that is cut off is not used.
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

    /// Makes a slice from an iterator that allocates as it runs, and may panic before its end.
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
                // Without a length known in advance.
                hand.list(words.filter(|_| true), &expected)
            };
            self.add(made, align_of::<u64>());
        });
    }

    /// A text whose parts allocate while they are formatted.
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

    /// A value whose constructor allocates.
    fn value(&self, hand: &impl Hand<'b>) {
        let make = || {
            self.allocate(hand);
            [7; 5]
        };
        self.add(hand.value(make, [7; 5]), align_of::<u64>());
    }

    /// Grows two collections on one handle by turns; each may be last in the piece, or not.
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

    /// By a guard half of the time. Few are leaked, since what their scopes took stays taken.
    fn way(&self) -> Way {
        match self.bytes.byte() % 8 {
            0..=3 => Way::Closure,
            4..=6 => Way::Guard,
            _ => Way::LeakedGuard,
        }
    }

    /// A scope that stays a local variable and is never passed on, so the optimiser can keep it in registers.
    fn values(&self, hand: &mut impl Hand<'b>) {
        let (count, panics, way) = (self.bytes.byte() * 4, self.rarely(4), self.way());
        Self::caught(|| {
            hand.enter(way, |scope| {
                let values: Vec<_> = (0..count).map_while(|number| scope.alloc([number; 3]).ok()).collect();
                self.check();
                assert!(values.iter().enumerate().all(|(number, value)| **value == [number; 3]));
                if panics {
                    resume_unwind(Box::new(Planned));
                }
            });
        });
    }

    /// Allocates beside the handle, which must not notice.
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

    /// A scope, after which everything is as before, including where the handle continues.
    fn nested(&self, hand: &mut impl Hand<'b>) {
        // Not always, so that the scope may be the first to allocate.
        let before = self.rarely(2).then(|| self.word(hand)).flatten();
        let (level, alive, way) = (self.level.get(), self.live.borrow().len(), self.way());
        let first = Cell::new(None);
        let work = |scope: Scope<'_, 'b, &'b Blocks>| {
            self.level.set(level + 1);
            first.set(self.word(&scope));
            self.in_scope(scope);
        };
        let ended = if level == 0 || self.rarely(3) {
            Self::caught(|| hand.enter(way, work))
        } else {
            hand.enter(way, work);
            true
        };
        self.level.set(level);
        self.live.borrow_mut().truncate(alive);
        self.check();
        let next = self.word(hand);
        // After a panic, or if the guard is leaked, the handle may not know of room that the scope added.
        if ended && way != Way::LeakedGuard && is_next(before, first.get()) {
            assert_eq!(next, first.get(), "what a scope allocated is given back");
        }
    }

    /// One step, on a handle whose own live blocks start at `from`.
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

    fn in_scope(&self, mut scope: Scope<'_, 'b, &'b Blocks>) {
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
                    // SAFETY: not rewound past this point since; nothing allocated since is used.
                    unsafe { local.rewind(checkpoint) };
                    let again = self.word(local);
                    assert!(
                        next.is_none() || again == next,
                        "what was allocated since is given back"
                    );
                }
                _ => {
                    let from = points.last().map_or(0, |point| point.alive);
                    // A local continues after any step.
                    let _ = self.step(local, from);
                }
            }
        }
    }

    /// A local, from beginning to end. Its blocks outlive it.
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
