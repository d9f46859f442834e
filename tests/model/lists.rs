//! Free lists side by side with naive twins: for property tests and fuzz targets, which include this by path.
//!
//! The twin knows which slots are live and what is written in each, which guards exist, and what waits for which of
//! them. A story is a sequence of (operation, number). A list may refuse only if no slot is free. The twin counts
//! slots itself: it tests every address in the backing's blocks for whether a slot begins there.

use std::alloc::Layout;
use std::collections::{HashMap, HashSet};
use std::ptr::NonNull;

use pageheap::arena::{ArenaConfig, ArenaError, FreeList, Guard, Owner, Reason, ShardedFreeList, SlotBox};

use super::blocks::{Blocks, PAGE};
use super::bytes::all_are;

/// Operations from here on are a reset.
const RESET: u8 = 248;

/// Owners of a sharded list.
const OWNERS: usize = 3;

/// The most steps of a decoded story.
pub const MOST_STEPS: usize = 300;

/// The most guards and boxes that exist at a time.
const GUARDS: usize = 6;
const BOXES: usize = 40;

/// What is known of a list, and where its slots are.
struct Twin<'b> {
    blocks: &'b Blocks,
    layout: Layout,
    /// Bytes from one slot to the next.
    bytes: usize,
    limit: usize,
    live: Vec<NonNull<u8>>,
    written: HashMap<usize, u8>,
    most: usize,
    /// Slots in boxes, which are live too.
    boxed: HashSet<usize>,
    /// Guards that exist, by number; and how many there have been.
    inside: Vec<u64>,
    guards: u64,
    /// Which owners are inside. A session's number changes each time that an owner enters with no guard yet.
    sessions: [Session; OWNERS],
    retired: HashMap<usize, Retired>,
    /// Which guard has found which slot, unchanged since the slot was allocated.
    found: Vec<(u64, usize)>,
    /// The number of slots, as of this many turns of the backing.
    counted: (usize, usize),
}

#[derive(Clone, Copy, Default)]
struct Session {
    number: u64,
    depth: usize,
}

/// A slot that was retired.
struct Retired {
    /// Guards for which it must be kept.
    must: Vec<u64>,
    /// Sessions for which it may be kept, once that is decided: place and number.
    may: Option<Vec<(usize, u64)>>,
}

impl<'b> Twin<'b> {
    fn new(layout: Layout, limit: usize, blocks: &'b Blocks) -> Self {
        Self {
            blocks,
            layout,
            bytes: layout.size().next_multiple_of(layout.align()),
            limit,
            live: Vec::new(),
            written: HashMap::new(),
            most: 0,
            boxed: HashSet::new(),
            inside: Vec::new(),
            guards: 0,
            sessions: [Session::default(); OWNERS],
            retired: HashMap::new(),
            found: Vec::new(),
            counted: (usize::MAX, 0),
        }
    }

    fn live(&self) -> usize {
        self.live.len() + self.boxed.len()
    }

    /// A slot that was free, and may have been.
    fn arrives(&mut self, slot: NonNull<u8>) {
        let start = slot.addr().get();
        assert!(start.is_multiple_of(self.layout.align()) && self.blocks.has(start, self.bytes));
        assert!(
            !self.written.contains_key(&start) && !self.boxed.contains(&start),
            "a slot given twice"
        );
        if let Some(retired) = self.retired.remove(&start) {
            let reader = retired.must.iter().find(|guard| self.inside.contains(guard));
            assert_eq!(reader, None, "a slot given again while one from before is inside");
        }
        self.found.retain(|&(_, found)| found != start);
        self.most = self.most.max(self.live() + 1);
    }

    fn take(&mut self, slot: NonNull<u8>) {
        self.arrives(slot);
        let mark = (slot.addr().get() >> 3) as u8 ^ self.live.len() as u8;
        // SAFETY: just allocated, with this length.
        unsafe { slot.write_bytes(mark, self.layout.size()) };
        self.written.insert(slot.addr().get(), mark);
        self.live.push(slot);
    }

    fn give(&mut self, pick: usize) -> Option<NonNull<u8>> {
        if self.live.is_empty() {
            return None;
        }
        let slot = self.live.swap_remove(pick % self.live.len());
        let mark = self.written.remove(&slot.addr().get()).expect("live slots are written");
        // SAFETY: still ours.
        let bytes = unsafe { std::slice::from_raw_parts(slot.as_ptr(), self.layout.size()) };
        assert!(all_are(bytes, mark), "somebody wrote to a slot of ours");
        Some(slot)
    }

    /// Nothing is live; what is written may be overwritten.
    fn reset(&mut self) {
        self.live.clear();
        self.written.clear();
        self.retired.clear();
        self.found.clear();
    }

    /// How many slots the blocks contain.
    fn count(&mut self, owns: impl Fn(*const u8) -> bool) -> usize {
        let turns = self.blocks.turns();
        if self.counted.0 != turns {
            let slots = |(start, bytes): (usize, usize)| {
                let starts = (start..start + bytes).step_by(self.bytes);
                starts
                    .filter(|&start| owns(std::ptr::without_provenance(start)))
                    .count()
            };
            self.counted = (turns, self.blocks.all().into_iter().map(slots).sum());
        }
        self.counted.1
    }

    /// The list has refused, so all its slots must be live.
    fn all_live(&mut self, owns: impl Fn(*const u8) -> bool) {
        assert_eq!(self.live(), self.count(owns), "a no while a slot is free");
    }

    /// An error must have its reason: the limit, or a backing that has just refused. It had refused `before` times
    /// before.
    fn reason(&self, error: ArenaError, node: usize, before: usize) {
        assert_eq!(
            (error.asked(), error.align()),
            (self.layout.size(), self.layout.align())
        );
        let least = (self.bytes + node).next_multiple_of(PAGE);
        let full = self.blocks.bytes() + least > self.limit;
        match error.reason() {
            Reason::NoSlots => assert!(full, "{error}"),
            Reason::NoPages => assert!(!full && self.blocks.refused() > before, "{error}"),
            _ => panic!("{error}"),
        }
    }
}

/// Runs a story on a free list with slots of `layout`, at most `limit` bytes of pages, and a first slab of `slab`
/// bytes. Every `refuse`th block is refused.
pub fn free_list(layout: Layout, slab: usize, limit: usize, refuse: usize, story: &[(u8, usize)]) {
    let blocks = Blocks::new(refuse);
    let config = ArenaConfig::new().slab(slab).limit(limit);
    let mut list = FreeList::with_config_in(layout, config, &blocks).expect("nothing is taken yet");
    let size = layout.size();
    let mut twin = Twin::new(layout, limit, &blocks);
    for &(operation, number) in story {
        match operation % 8 {
            _ if operation >= RESET => {
                let stale = twin.give(number);
                list.reset();
                twin.reset();
                // SAFETY: nobody's since the reset; it must be refused.
                let refused = stale.is_none_or(|slot| unsafe { list.try_deallocate(slot) }.is_err());
                assert!(refused, "freed, though nobody has had it since the reset");
            }
            0..=2 => {
                let (alone, before) = (number % 4 == 3, blocks.refused());
                match if alone { list.allocate_mut() } else { list.allocate() } {
                    Ok(slot) => twin.take(slot.cast()),
                    Err(error) => {
                        twin.reason(error, 4, before);
                        twin.all_live(|slot| list.owns(slot));
                    }
                }
            }
            3..=4 => {
                if let Some(slot) = twin.give(number) {
                    // SAFETY: the twin had it and no longer does.
                    unsafe {
                        if number % 4 == 3 {
                            list.deallocate_mut(slot);
                        } else {
                            list.deallocate(slot);
                        }
                        assert!(list.try_deallocate(slot).is_err(), "freed twice");
                    }
                }
            }
            5 => {
                let mut batch = vec![None; number % 50];
                let before = blocks.refused();
                let taken = list.allocate_batch(&mut batch);
                assert_eq!(taken == Ok(0), batch.is_empty());
                let refused = |error| twin.reason(error, 4, before);
                let count = taken.map_err(refused).unwrap_or(0);
                assert!(batch[count..].iter().all(Option::is_none));
                batch.iter().flatten().for_each(|&slot| twin.take(slot));
                if count < batch.len() {
                    twin.all_live(|slot| list.owns(slot));
                }
            }
            _ => {
                let mut batch: Vec<_> = (0..number % 50).map(|pick| twin.give(pick)).collect();
                // SAFETY: the twin had them and no longer does.
                unsafe { list.deallocate_batch(&mut batch) }.expect("all were allocated");
                assert!(batch.iter().all(Option::is_none));
            }
        }
        let (stats, bytes) = (list.stats(), size.next_multiple_of(layout.align()));
        assert_eq!((stats.allocated, stats.peak), (twin.live() * bytes, twin.most * bytes));
    }
    drop(list);
    assert!(blocks.is_empty(), "everything goes back");
}

type List<'b> = ShardedFreeList<&'b Blocks>;

/// Runs a story on a sharded list of three owners; between resets the list has new owners. Every `refuse`th block is
/// refused.
pub fn sharded(layout: Layout, limit: usize, refuse: usize, story: &[(u8, usize)]) {
    let blocks = Blocks::new(refuse);
    let config = ArenaConfig::new().slab(1 << 12).limit(limit);
    let mut list = ShardedFreeList::with_config_in(layout, OWNERS, config, &blocks).expect("room for the tables");
    let mut twin = Twin::new(layout, limit, &blocks);
    let mut parts = story.split(|&(operation, _)| operation >= RESET).peekable();
    while let Some(part) = parts.next() {
        Part {
            list: &list,
            twin: &mut twin,
        }
        .go(part);
        if parts.peek().is_some() {
            let stale = twin.give(part.len());
            list.reset();
            twin.reset();
            // SAFETY: nobody's since the reset; it must be refused.
            unsafe {
                assert!(stale.is_none_or(|slot| list.try_deallocate(slot).is_err()), "freed");
                assert!(stale.is_none_or(|slot| list.try_retire(slot).is_err()), "retired");
            }
            assert_eq!(list.stats().allocated, 0);
        }
    }
    drop(list);
    assert!(blocks.is_empty(), "everything goes back");
}

type OwnerOf<'l, 'b> = Owner<'l, &'b Blocks>;

/// What refers to owners, and lives as long as the story wants.
#[derive(Default)]
struct Alive<'o, 'l, 'b> {
    /// Guards: the number, the place of the session, the guard.
    guards: Vec<(u64, usize, Guard<'o, &'b Blocks>)>,
    boxes: Vec<(u8, SlotBox<u8, &'o OwnerOf<'l, 'b>>)>,
}

/// The part of a story between two resets.
struct Part<'l, 't, 'b> {
    list: &'l List<'b>,
    twin: &'t mut Twin<'b>,
}

impl<'l, 'b> Part<'l, '_, 'b> {
    fn go(mut self, story: &[(u8, usize)]) {
        let owners = [(); OWNERS].map(|()| self.list.owner().expect("a shard for each of three"));
        let mut alive = Alive::default();
        for &(operation, number) in story {
            self.step(&owners[number % OWNERS], &mut alive, operation, number);
            let stats = self.list.stats();
            assert_eq!(stats.allocated, self.twin.live() * self.twin.bytes, "{stats}");
            assert!(stats.reserved <= stats.limit, "{stats}");
        }
        while !alive.guards.is_empty() {
            self.leave(&mut alive, 0);
        }
        drop(alive);
        self.twin.boxed.clear();
        // There is no reader, so every slot that is not live can be had: by one owner, which gathers them from the
        // others. Unless the backing refuses at that moment; then the loop makes one more attempt.
        while self.allocate(Some(&owners[0])) {}
        let census = self.list.census(|_| ());
        assert_eq!((census.sharded, census.depot, census.retired), (0, 0, 0), "{census:?}");
        assert_eq!(census.live as usize, self.twin.live());
    }

    fn step<'o>(&mut self, owner: &'o OwnerOf<'l, 'b>, alive: &mut Alive<'o, 'l, 'b>, operation: u8, number: usize) {
        let pick = number / OWNERS;
        match operation % 16 {
            0..=2 => _ = self.allocate(Some(owner)),
            3 => _ = self.allocate(None),
            // All there are, or some.
            4 if pick.is_multiple_of(8) && self.twin.bytes >= 16 => while self.allocate(Some(owner)) {},
            4 => self.allocate_batch(owner, pick % 100),
            5 => self.deallocate(owner, pick),
            6 => self.retire(alive, None, pick),
            7 => (0..pick % 100).for_each(|pick| self.retire(alive, Some(owner), pick)),
            8 => self.deallocate_batch(owner, pick % 100),
            9 if alive.boxes.len() < BOXES => self.boxed(owner, alive, number as u8),
            9 | 10 => self.unbox(alive, pick),
            11..=12 if alive.guards.len() < GUARDS => self.enter(owner, alive, number % OWNERS),
            11..=13 => self.leave(alive, pick),
            14 => self.protect(owner, alive, pick),
            _ => owner.flush(),
        }
    }

    /// Allocates by an owner, or as a guest. Returns whether there was a slot.
    fn allocate(&mut self, owner: Option<&OwnerOf<'l, 'b>>) -> bool {
        let before = self.twin.blocks.refused();
        match owner.map_or_else(|| self.list.allocate(), |owner| owner.allocate()) {
            Ok(slot) => {
                self.twin.take(slot.cast());
                true
            }
            Err(error) => {
                self.refused(Some((error, before)));
                false
            }
        }
    }

    fn allocate_batch(&mut self, owner: &OwnerOf<'l, 'b>, count: usize) {
        let mut batch = vec![None; count];
        let before = self.twin.blocks.refused();
        let taken = owner.allocate_batch(&mut batch);
        let (taken, error) = taken.map_or_else(|error| (0, Some((error, before))), |taken| (taken, None));
        assert_eq!(error.is_some(), taken == 0 && count > 0);
        assert!(batch[taken..].iter().all(Option::is_none));
        batch.iter().flatten().for_each(|&slot| self.twin.take(slot));
        if taken < count {
            self.refused(error);
        }
    }

    /// The list has refused: nothing is free, and a slot that is neither free nor live waits for a guard.
    fn refused(&mut self, error: Option<(ArenaError, usize)>) {
        if let Some((error, before)) = error {
            self.twin.reason(error, 16, before);
        }
        let census = self.list.census(|_| ());
        assert_eq!((census.sharded, census.depot), (0, 0), "a no while a slot is free");
        let present: Vec<_> = (0..OWNERS)
            .filter(|&place| self.twin.sessions[place].depth > 0)
            .map(|place| (place, self.twin.sessions[place].number))
            .collect();
        let slots = self.twin.count(|slot| self.list.owns(slot));
        let mut waiting = 0;
        for retired in self.twin.retired.values_mut() {
            waiting += usize::from(match &retired.may {
                Some(may) => may.iter().any(|session| present.contains(session)),
                None => !present.is_empty(),
            });
            // Nothing is kept in shards: so guards that come later do not hold it.
            if census.retired == 0 && retired.may.is_none() {
                retired.may = Some(present.clone());
            }
        }
        let live = self.twin.live();
        assert!(
            live <= slots && slots <= live + waiting,
            "a no with {live} of {slots} slots live, and {waiting} waiting for readers at the most"
        );
    }

    fn deallocate(&mut self, owner: &OwnerOf<'l, 'b>, pick: usize) {
        let Some(slot) = self.twin.give(pick) else {
            return;
        };
        // SAFETY: the twin had it and no longer does: so all calls but the first must be refused.
        unsafe {
            if pick.is_multiple_of(2) {
                owner.deallocate(slot);
            } else {
                self.list.deallocate(slot);
            }
            assert!(owner.try_deallocate(slot).is_err(), "freed twice");
            assert!(self.list.try_deallocate(slot).is_err(), "freed twice");
            assert!(owner.try_retire(slot).is_err(), "retired, though free");
        }
    }

    fn deallocate_batch(&mut self, owner: &OwnerOf<'l, 'b>, count: usize) {
        let mut batch: Vec<_> = (0..count).map(|pick| self.twin.give(pick)).collect();
        // SAFETY: the twin had them and no longer does.
        unsafe { owner.deallocate_batch(&mut batch) }.expect("all were allocated");
        assert!(batch.iter().all(Option::is_none));
    }

    /// Retires a slot by an owner, or as a guest.
    fn retire(&mut self, alive: &Alive<'_, 'l, 'b>, owner: Option<&OwnerOf<'l, 'b>>, pick: usize) {
        let Some(slot) = self.twin.give(pick) else {
            return;
        };
        let found = |guard| self.twin.found.contains(&(guard, slot.addr().get()));
        let guards = alive.guards.iter().map(|&(guard, ..)| guard);
        let must = guards.filter(|&guard| found(guard)).collect();
        // SAFETY: the twin had it and no longer does; the other calls must be refused.
        unsafe {
            match owner {
                Some(owner) => owner.retire(slot),
                None => self.list.retire(slot),
            }
            assert!(self.list.try_retire(slot).is_err(), "retired twice");
            assert!(self.list.try_deallocate(slot).is_err(), "freed, though retired");
        }
        let retired = Retired { must, may: None };
        self.twin.retired.insert(slot.addr().get(), retired);
    }

    fn boxed<'o>(&mut self, owner: &'o OwnerOf<'l, 'b>, alive: &mut Alive<'o, 'l, 'b>, value: u8) {
        let before = self.twin.blocks.refused();
        match owner.boxed(value) {
            Ok(boxed) => {
                let slot = NonNull::from(&*boxed);
                self.twin.arrives(slot);
                self.twin.boxed.insert(slot.addr().get());
                alive.boxes.push((value, boxed));
            }
            Err(error) => self.refused(Some((error, before))),
        }
    }

    fn unbox(&mut self, alive: &mut Alive<'_, 'l, 'b>, pick: usize) {
        if !alive.boxes.is_empty() {
            let (value, boxed) = alive.boxes.swap_remove(pick % alive.boxes.len());
            assert_eq!(*boxed, value, "somebody wrote to a box");
            self.twin.boxed.remove(&NonNull::from(&*boxed).addr().get());
        }
    }

    fn enter<'o>(&mut self, owner: &'o OwnerOf<'l, 'b>, alive: &mut Alive<'o, 'l, 'b>, place: usize) {
        let session = &mut self.twin.sessions[place];
        session.number += u64::from(session.depth == 0);
        session.depth += 1;
        self.twin.guards += 1;
        self.twin.inside.push(self.twin.guards);
        alive.guards.push((self.twin.guards, place, owner.enter()));
    }

    fn leave(&mut self, alive: &mut Alive<'_, 'l, 'b>, pick: usize) {
        if !alive.guards.is_empty() {
            let (guard, place, _) = alive.guards.swap_remove(pick % alive.guards.len());
            self.twin.inside.retain(|&other| other != guard);
            self.twin.found.retain(|&(other, _)| other != guard);
            self.twin.sessions[place].depth -= 1;
        }
    }

    /// A guard finds a live slot: any, or the latest, which may be retired later.
    fn protect(&mut self, owner: &OwnerOf<'l, 'b>, alive: &Alive<'_, 'l, 'b>, pick: usize) {
        let (Some((number, _, guard)), Some(last)) = (alive.guards.last(), self.twin.live.len().checked_sub(1)) else {
            return;
        };
        let index = if pick.is_multiple_of(4) {
            pick % (last + 1)
        } else {
            last
        };
        let slot = self.twin.live[index];
        let found = guard.protect(|| slot);
        self.twin.found.push((*number, found.addr().get()));
        if !pick.is_multiple_of(2) {
            self.retire(alive, Some(owner), index);
        }
    }
}

/// Input: two bytes of layout, the second also giving what is refused, one of slab, one of limit, and the story: three
/// bytes a step.
pub fn decode(input: &[u8]) -> (Layout, usize, usize, usize, Vec<(u8, usize)>) {
    let byte = |index: usize| usize::from(input.get(index).copied().unwrap_or(0));
    let layout = Layout::from_size_align(1 + byte(0) * 3, 1 << (byte(1) % 8)).expect("a small layout");
    let steps = input.get(4..).unwrap_or(&[]).chunks_exact(3).take(MOST_STEPS);
    let story = steps
        .map(|step| (step[0], usize::from(step[1]) << 8 | usize::from(step[2])))
        .collect();
    let refuse = [0, 0, 3, 5][byte(1) / 8 % 4];
    (layout, byte(2) * 200, 40_000 + byte(3) * 1000, refuse, story)
}

/// The driver of the fuzz target `free_list`.
pub fn fuzz_free_list(input: &[u8]) {
    let (layout, slab, limit, refuse, story) = decode(input);
    free_list(layout, slab, limit, refuse, &story);
}

/// The driver of the fuzz target `sharded`.
pub fn fuzz_sharded(input: &[u8]) {
    let (layout, _, limit, refuse, story) = decode(input);
    sharded(layout, limit, refuse, &story);
}
