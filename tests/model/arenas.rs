//! Arenas side by side with a naive twin that remembers every byte: memory handed out overlaps nothing live, keeps
//! what was written to it, lies in a block of the backing, and every refusal has a reason.
//!
//! Input bytes are read one by one and are zero after the end, so every input is a valid story.

use std::alloc::Layout;
use std::cell::Cell;
use std::ptr::NonNull;

use pageheap::arena::{Arena, ArenaConfig, ArenaError, ArenaStats, Handle, Local, Pool, Reason, Scope};

use super::blocks::{Blocks, PAGE};
use super::bytes::all_are;

/// The input bytes of a story.
pub struct Bytes<'a>(Cell<&'a [u8]>);

impl<'a> Bytes<'a> {
    /// All bytes of the input.
    pub fn new(input: &'a [u8]) -> Self {
        Self(Cell::new(input))
    }

    /// The next byte; 0 after the end.
    pub fn byte(&self) -> usize {
        let Some((&first, rest)) = self.0.get().split_first() else {
            return 0;
        };
        self.0.set(rest);
        usize::from(first)
    }

    /// Whether all bytes have been read.
    pub fn is_empty(&self) -> bool {
        self.0.get().is_empty()
    }

    /// A size: mostly small, sometimes that of slabs, rarely larger.
    pub fn size(&self) -> usize {
        let (kind, low, high) = (self.byte(), self.byte(), self.byte());
        let size = match kind % 16 {
            0 => 0,
            1..=10 => 1 + low % 100,
            11..=13 => low << 4 | high >> 4,
            14 => low << 8 | high,
            _ => (low << 8 | high) << 2,
        };
        // An interpreter is slow for each byte.
        if cfg!(miri) { size % 700 } else { size }
    }

    /// A layout of such a size, mostly aligned to 8.
    pub fn layout(&self) -> Layout {
        let size = self.size();
        let align = match self.byte() % 32 {
            0..=15 => 8,
            shift @ 16..=29 => 1 << (shift - 16),
            _ => 2 * PAGE,
        };
        Layout::from_size_align(size, align).expect("small")
    }
}

/// Memory handed out, filled with a pattern of its own.
#[derive(Clone, Copy, Debug)]
struct Live {
    memory: NonNull<[u8]>,
    pattern: u8,
}

/// All live memory, by address.
#[derive(Default)]
struct Twin {
    live: Vec<Live>,
    made: u8,
}

impl Twin {
    fn add(&mut self, blocks: &Blocks, memory: NonNull<[u8]>, layout: Layout) {
        let (start, bytes) = (memory.addr().get(), memory.len());
        assert_eq!(bytes, layout.size());
        assert!(
            start.is_multiple_of(layout.align()),
            "{start:#x} aligned to {}",
            layout.align()
        );
        if bytes == 0 {
            return;
        }
        assert!(blocks.has(start, bytes), "{start:#x} + {bytes} is in no block");
        self.made = self.made.wrapping_add(37);
        let live = Live {
            memory,
            pattern: self.made,
        };
        fill(live, 0);
        self.live.push(live);
    }

    /// Everything is as it was written, so nothing overlaps.
    fn check(&self) {
        for live in &self.live {
            // SAFETY: live, and initialised by `fill`.
            let bytes = unsafe { live.memory.as_ref() };
            assert!(all_are(bytes, live.pattern), "{live:?} was overwritten: {bytes:?}");
        }
    }

    fn bytes(&self) -> usize {
        self.live.iter().map(|live| live.memory.len()).sum()
    }
}

/// Writes the pattern from byte `from` on.
fn fill(live: Live, from: usize) {
    let more = live.memory.len().saturating_sub(from);
    // SAFETY: inside memory that was handed out to us, or of no bytes.
    unsafe {
        live.memory
            .cast::<u8>()
            .add(from.min(live.memory.len()))
            .write_bytes(live.pattern, more)
    };
}

/// What a [`Local`], a [`Scope`], an [`Arena`] and a [`Pool`] have in common.
trait Hand {
    fn take(&self, layout: Layout) -> Result<NonNull<[u8]>, ArenaError>;
    unsafe fn resize(&self, memory: NonNull<[u8]>, size: usize) -> bool;
    fn words(&self, words: &[u32], kind: usize) -> Result<NonNull<[u8]>, ArenaError>;
    fn nested(&mut self, work: &mut dyn FnMut(&mut dyn Hand));
}

macro_rules! hand {
    ($hand:ty, $self:ident, $work:ident: $nested:expr) => {
        impl Hand for $hand {
            fn take(&self, layout: Layout) -> Result<NonNull<[u8]>, ArenaError> {
                self.allocate(layout)
            }

            unsafe fn resize(&self, memory: NonNull<[u8]>, size: usize) -> bool {
                // SAFETY: the caller's promise.
                unsafe { self.resize_in_place(memory, size) }
            }

            fn words(&self, words: &[u32], kind: usize) -> Result<NonNull<[u8]>, ArenaError> {
                let text: String = words.iter().map(u32::to_string).collect();
                match kind % 6 {
                    0 => self.alloc_slice_copy(words).map(|copy| same(copy, words)),
                    1 => self.alloc_slice_clone(words).map(|copy| same(copy, words)),
                    2 => self.alloc_iter(words.iter().copied()).map(|copy| same(copy, words)),
                    // An iterator that does not know its length.
                    3 => self.alloc_iter(words.iter().copied().filter(|_| true)).map(|copy| same(copy, words)),
                    4 => self.alloc_str(&text).map(|copy| {
                        // SAFETY: not read as text again.
                        same(unsafe { copy.as_bytes_mut() }, text.as_bytes())
                    }),
                    _ => {
                        let spaced = words.iter().fold(String::new(), |all, word| all + &format!("{word:>4}"));
                        let copy = self.alloc_fmt(format_args!("{spaced}{}", words.len()))?;
                        let expected = format!("{spaced}{}", words.len());
                        // SAFETY: not read as text again.
                        Ok(same(unsafe { copy.as_bytes_mut() }, expected.as_bytes()))
                    }
                }
            }

            fn nested(&mut $self, $work: &mut dyn FnMut(&mut dyn Hand)) {
                $nested
            }
        }
    };
}

hand!(Local<'_, &Blocks>, self, work: self.scoped(|mut scope| work(&mut scope)));
hand!(Scope<'_, '_, &Blocks>, self, work: self.scoped(|mut scope| work(&mut scope)));
hand!(&Arena<&Blocks>, self, work: work(self));
hand!(&Pool<&Blocks>, self, work: work(self));

/// The bytes of a copy, after comparing it.
pub fn same<T: PartialEq + std::fmt::Debug>(copy: &mut [T], words: &[T]) -> NonNull<[u8]> {
    assert_eq!(copy, words);
    let bytes = size_of_val(copy);
    NonNull::slice_from_raw_parts(NonNull::from(copy).cast(), bytes)
}

/// A story: its input, and what it acts on.
struct Story<'a> {
    bytes: Bytes<'a>,
    blocks: &'a Blocks,
    limit: usize,
    /// The most bytes live at a time: ever, and since pages were last given back.
    peak: Cell<usize>,
    touched: Cell<usize>,
    /// How many blocks had been given back by then.
    given: Cell<usize>,
}

impl<'a> Story<'a> {
    fn new(bytes: Bytes<'a>, blocks: &'a Blocks, limit: usize) -> Self {
        Self {
            bytes,
            blocks,
            limit,
            peak: Cell::new(0),
            touched: Cell::new(0),
            given: Cell::new(blocks.given()),
        }
    }

    /// Resets `touched` if pages have been given back since the last call.
    fn note_given(&self) {
        let given = self.blocks.given();
        if self.given.replace(given) != given {
            self.touched.set(0);
        }
    }

    /// Records the live bytes, which have grown.
    fn note(&self, twin: &Twin) {
        let bytes = twin.bytes();
        self.note_given();
        self.peak.set(self.peak.get().max(bytes));
        self.touched.set(self.touched.get().max(bytes));
    }

    /// Allocates and writes to the memory. A refusal must have a reason.
    fn allocate(&self, hand: &dyn Hand, twin: &mut Twin) {
        let layout = self.bytes.layout();
        let refused = self.blocks.refused();
        match hand.take(layout) {
            Ok(memory) => {
                twin.add(self.blocks, memory, layout);
                self.note(twin);
            }
            Err(error) => {
                assert_eq!((error.asked(), error.align()), (layout.size(), layout.align()));
                match error.reason() {
                    // A block of its own, with slack for a piece's head and a slab's foot, would exceed the limit.
                    Reason::Limit => {
                        let least = (layout.size() + layout.align() + 128).next_multiple_of(PAGE);
                        let reserved = self.blocks.bytes();
                        assert!(
                            reserved + least > self.limit,
                            "{error}: {reserved} of {} reserved",
                            self.limit
                        );
                    }
                    Reason::NoPages => assert!(self.blocks.refused() > refused, "{error}"),
                    _ => panic!("{error}"),
                }
            }
        }
    }

    /// Resizes something in place, if possible.
    fn resize(&self, hand: &dyn Hand, twin: &mut Twin, from: usize) {
        let (back, size) = (self.bytes.byte() % 4, self.bytes.size());
        // Only what was allocated through this hand since the scope began: from `from` on.
        let Some(index) = twin.live.len().checked_sub(1 + back).filter(|&index| index >= from) else {
            return;
        };
        let live = &mut twin.live[index];
        let old = live.memory.len();
        // SAFETY: live, and the part given up is not used.
        if unsafe { hand.resize(live.memory, size) } {
            live.memory = NonNull::slice_from_raw_parts(live.memory.cast(), size);
            assert!(size == 0 || self.blocks.has(live.memory.addr().get(), size));
            fill(*live, old.min(size));
            self.note(twin);
        }
        let live = &twin.live[index];
        if size == 0 && live.memory.is_empty() {
            twin.live.remove(index);
        }
    }

    fn words(&self, hand: &dyn Hand, twin: &mut Twin) {
        let (len, kind) = (self.bytes.byte() % 40, self.bytes.byte());
        let words: Vec<u32> = (0..len as u32).map(|index| index * index).collect();
        if let Ok(memory) = hand.words(&words, kind) {
            let layout = Layout::from_size_align(memory.len(), 1).expect("small");
            twin.add(self.blocks, memory, layout);
            self.note(twin);
        }
    }

    /// Goes on until the input ends or says so. What is taken in a scope is forgotten at its end.
    fn go(&self, hand: &mut dyn Hand, twin: &mut Twin, depth: usize) {
        let from = twin.live.len();
        while !self.bytes.is_empty() {
            match self.bytes.byte() % 16 {
                0..=8 => self.allocate(hand, twin),
                9..=10 => self.resize(hand, twin, from),
                11..=12 => self.words(hand, twin),
                13 if depth < 5 => {
                    let before = twin.live.len();
                    hand.nested(&mut |inner| self.go(inner, twin, depth + 1));
                    twin.live.truncate(before);
                }
                14 => twin.check(),
                _ => break,
            }
        }
        twin.check();
    }

    fn check(&self, stats: ArenaStats, twin: &Twin) {
        assert_eq!(stats.reserved, self.blocks.bytes(), "\n{stats}");
        assert_eq!(stats.slabs, self.blocks.count(), "\n{stats}");
        assert!(stats.reserved <= stats.limit, "\n{stats}");
        assert!(stats.committed <= stats.reserved, "\n{stats}");
        assert!(stats.allocated <= stats.committed, "\n{stats}");
        assert!(
            twin.bytes() <= stats.allocated && stats.allocated <= stats.peak,
            "\n{stats}"
        );
        self.note_given();
        let (peak, touched) = (self.peak.get(), self.touched.get());
        assert!(
            peak <= stats.peak && touched <= stats.committed,
            "{peak} bytes were in use at a time, {touched} of pages that are still there\n{stats}"
        );
    }
}

fn config(bytes: &Bytes<'_>) -> (ArenaConfig, usize) {
    let limit = match bytes.byte() % 4 {
        0 => usize::MAX,
        _ => (1 + bytes.byte() % 64) * PAGE + bytes.byte(),
    };
    let config = ArenaConfig::new();
    let config = if limit == usize::MAX {
        config
    } else {
        config.limit(limit)
    };
    let config = match bytes.byte() % 3 {
        0 => config.slab(bytes.byte() * 400),
        _ => config,
    };
    (config.prealloc(bytes.byte() % 4 * PAGE), limit)
}

/// An arena, with locals and scopes.
pub fn arena(input: &[u8]) {
    let bytes = Bytes::new(input);
    let blocks = Blocks::new([0, 0, 2, 5][bytes.byte() % 4]);
    let (config, limit) = config(&bytes);
    let story = Story::new(bytes, &blocks, limit);
    let Ok(mut arena) = Arena::with_config_in(config, &blocks) else {
        assert!(blocks.is_empty(), "nothing is kept of an arena that was not made");
        return;
    };
    while !story.bytes.is_empty() {
        let mut twin = Twin::default();
        for _ in 0..1 + story.bytes.byte() % 6 {
            match story.bytes.byte() % 3 {
                0 => story.go(&mut &arena, &mut twin, 0),
                1 => story.go(&mut arena.local(), &mut twin, 0),
                _ => {
                    // Two at a time.
                    let (mut one, mut other) = (arena.local(), arena.local());
                    story.go(&mut one, &mut twin, 0);
                    story.go(&mut other, &mut twin, 0);
                    story.go(&mut one, &mut twin, 0);
                }
            }
            twin.check();
            story.check(arena.stats(), &twin);
        }
        let kept = blocks.bytes();
        arena.reset();
        assert_eq!(arena.stats().allocated, 0);
        // Except for blocks that no object needed.
        assert!(
            blocks.bytes() == kept || blocks.given() > story.given.get(),
            "a reset keeps all pages"
        );
        if story.bytes.byte().is_multiple_of(4) {
            let most = story.bytes.size();
            arena.shrink_to(most);
            assert!(blocks.bytes() <= most, "all is free after a reset");
            story.check(arena.stats(), &Twin::default());
        }
    }
    drop(arena);
    assert!(blocks.is_empty(), "everything goes back");
}

/// A pool, with handles of this round and of others.
pub fn pool(input: &[u8]) {
    let bytes = Bytes::new(input);
    let blocks = Blocks::new([0, 0, 2, 5][bytes.byte() % 4]);
    let (config, limit) = config(&bytes);
    let story = Story::new(bytes, &blocks, limit);
    let Ok(mut pool) = Pool::with_config_in(config.slab((1 + story.bytes.byte()) * 256), &blocks) else {
        assert!(blocks.is_empty(), "nothing is kept of a pool that was not made");
        return;
    };
    let other = Pool::new_in(&blocks);
    let mut stale: Vec<Handle<[u32]>> = Vec::new();
    while !story.bytes.is_empty() {
        let mut twin = Twin::default();
        let mut handles = Vec::new();
        for _ in 0..1 + story.bytes.byte() % 8 {
            let len = story.bytes.byte() as u32;
            let words: Vec<u32> = (0..len).map(|word| word + len).collect();
            if let Ok(handle) = pool.insert_slice(&words) {
                handles.push((handle, words));
            }
            story.go(&mut &pool, &mut twin, 0);
            story.check(pool.stats(), &twin);
        }
        for (handle, words) in &mut handles {
            assert_eq!(pool.get(*handle), Ok(&words[..]));
            assert!(other.get(*handle).is_err());
            if let (Ok([first, ..]), Some(word)) = (pool.get_mut(*handle), words.first_mut()) {
                (*first, *word) = (7, 7);
            }
        }
        twin.check();
        assert!(
            handles
                .iter()
                .all(|(handle, words)| pool.get(*handle) == Ok(&words[..]))
        );
        stale.extend(handles.iter().map(|(handle, _)| *handle));
        pool.reset();
        assert!(stale.iter().all(|handle| pool.get(*handle).is_err()));
        assert_eq!(pool.stats().allocated, 0);
        if story.bytes.byte().is_multiple_of(4) {
            pool.shrink_to(0);
            assert_eq!(blocks.bytes(), 0, "all is free after a reset");
        }
    }
    drop((pool, other));
    assert!(blocks.is_empty(), "everything goes back");
}
