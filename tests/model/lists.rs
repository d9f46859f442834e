//! Free lists driven side by side with naive twins: for property tests and fuzz targets, which add this by path.
//!
//! The twin knows which slots are live and what is written in each. A story is a row of (operation, number).

use std::alloc::Layout;
use std::collections::HashMap;
use std::ptr::NonNull;

use pageheap::arena::{ArenaConfig, FreeList, ShardedFreeList};

/// Operations from here on are a reset.
const RESET: u8 = 248;

/// What a twin knows.
#[derive(Default)]
struct Twin {
    live: Vec<NonNull<u8>>,
    written: HashMap<usize, u8>,
    most: usize,
    size: usize,
}

impl Twin {
    fn take(&mut self, slot: NonNull<u8>) {
        let mark = (slot.addr().get() >> 3) as u8 ^ self.live.len() as u8;
        // SAFETY: just allocated, and so long.
        unsafe { slot.write_bytes(mark, self.size) };
        assert!(
            self.written.insert(slot.addr().get(), mark).is_none(),
            "a slot given twice"
        );
        self.live.push(slot);
        self.most = self.most.max(self.live.len());
    }

    fn give(&mut self, pick: usize) -> Option<NonNull<u8>> {
        if self.live.is_empty() {
            return None;
        }
        let slot = self.live.swap_remove(pick % self.live.len());
        let mark = self.written.remove(&slot.addr().get()).expect("live slots are written");
        // SAFETY: ours still.
        let bytes = unsafe { std::slice::from_raw_parts(slot.as_ptr(), self.size) };
        assert!(
            bytes.iter().all(|&byte| byte == mark),
            "somebody wrote to a slot of ours"
        );
        Some(slot)
    }
}

impl Twin {
    /// Nothing is live; what is written may be overwritten.
    fn reset(&mut self) {
        self.live.clear();
        self.written.clear();
    }
}

/// A free list through a story, with slots of `layout`, at most `limit` bytes of pages, and a first slab of `slab`.
pub fn free_list(layout: Layout, slab: usize, limit: usize, story: &[(u8, usize)]) {
    let mut list = FreeList::with_config(layout, ArenaConfig::new().slab(slab).limit(limit)).expect("a small list");
    let size = layout.size();
    let mut twin = Twin {
        size,
        ..Twin::default()
    };
    for &(operation, number) in story {
        match operation % 8 {
            _ if operation >= RESET => {
                let stale = twin.give(number);
                list.reset();
                twin.reset();
                // SAFETY: nobody's since the reset: to be refused.
                let refused = stale.is_none_or(|slot| unsafe { list.try_deallocate(slot) }.is_err());
                assert!(refused, "freed, though nobody has had it since the reset");
            }
            0..=2 => {
                let alone = number % 4 == 3;
                match if alone { list.allocate_mut() } else { list.allocate() } {
                    Ok(slot) => twin.take(slot.cast()),
                    Err(error) => assert!(list.stats().reserved + size + 8192 > limit, "{error}"),
                }
            }
            3..=4 => {
                if let Some(slot) = twin.give(number) {
                    // SAFETY: the twin had it, and has it no more.
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
                let count = list.allocate_batch(&mut batch);
                assert!(batch[count..].iter().all(Option::is_none));
                batch.iter().flatten().for_each(|&slot| twin.take(slot));
            }
            _ => {
                let mut batch: Vec<_> = (0..number % 50).map(|pick| twin.give(pick)).collect();
                // SAFETY: the twin had them, and has them no more.
                unsafe { list.deallocate_batch(&mut batch) }.expect("all were allocated");
                assert!(batch.iter().all(Option::is_none));
            }
        }
        let stats = list.stats();
        let bytes = size.next_multiple_of(layout.align());
        assert_eq!(
            (stats.allocated, stats.peak),
            (twin.live.len() * bytes, twin.most * bytes)
        );
    }
}

/// A sharded list of three owners through a story: between resets, each with owners of its own.
pub fn sharded(layout: Layout, limit: usize, story: &[(u8, usize)]) {
    let list = ShardedFreeList::with_config(layout, 3, ArenaConfig::new().slab(1 << 12).limit(limit));
    let mut list = list.expect("a small list");
    let mut twin = Twin {
        size: layout.size(),
        ..Twin::default()
    };
    let mut parts = story.split(|&(operation, _)| operation >= RESET).peekable();
    while let Some(part) = parts.next() {
        sharded_part(&list, &mut twin, part);
        if parts.peek().is_some() {
            let stale = twin.give(part.len());
            list.reset();
            twin.reset();
            // SAFETY: nobody's since the reset: to be refused.
            let refused = stale.is_none_or(|slot| unsafe { list.try_deallocate(slot) }.is_err());
            assert!(refused, "freed, though nobody has had it since the reset");
            assert_eq!(list.stats().allocated, 0);
        }
    }
}

fn sharded_part(list: &ShardedFreeList, twin: &mut Twin, story: &[(u8, usize)]) {
    let owners = [(); 3].map(|()| list.owner().expect("a shard for each of three"));
    let bytes = list.layout().size().next_multiple_of(list.layout().align());
    for &(operation, number) in story {
        let owner = &owners[number % 3];
        match operation % 8 {
            0..=2 => owner.allocate().into_iter().for_each(|slot| twin.take(slot.cast())),
            3 => list.allocate().into_iter().for_each(|slot| twin.take(slot.cast())),
            4 => (0..number % 100)
                .map_while(|_| owner.allocate().ok())
                .for_each(|slot| twin.take(slot.cast())),
            5 => twin.give(number).into_iter().for_each(|slot| {
                // SAFETY: the twin had it, and has it no more: so the second time it is to be refused.
                unsafe {
                    owner.deallocate(slot);
                    assert!(owner.try_deallocate(slot).is_err(), "freed twice");
                    assert!(list.try_deallocate(slot).is_err(), "freed twice");
                }
            }),
            // SAFETY: the twin had it, and has it no more.
            6 => twin
                .give(number)
                .into_iter()
                .for_each(|slot| unsafe { list.retire(slot) }),
            // SAFETY: as above.
            _ => (0..number % 100)
                .map_while(|pick| twin.give(pick))
                .for_each(|slot| unsafe { owner.retire(slot) }),
        }
        assert_eq!(list.stats().allocated, twin.live.len() * bytes);
    }
    // Nobody reads, so all that is not live can be had: by one owner, who gathers it from the others.
    let before = list.stats();
    let more = std::iter::from_fn(|| owners[0].allocate().ok()).count() + twin.live.len();
    let stats = list.stats();
    assert!(more * bytes >= before.committed, "{before}");
    assert!(stats.reserved <= stats.limit, "{stats}");
    assert_eq!(
        (stats.allocated, stats.committed),
        (more * bytes, more * bytes),
        "{stats}"
    );
}

/// Two bytes of layout, one of slab, one of limit, and the story: three bytes a step.
pub fn decode(input: &[u8]) -> (Layout, usize, usize, Vec<(u8, usize)>) {
    let byte = |index: usize| usize::from(input.get(index).copied().unwrap_or(0));
    let layout = Layout::from_size_align(1 + byte(0) * 3, 1 << (byte(1) % 8)).expect("a small layout");
    let steps = input.get(4..).unwrap_or(&[]).chunks_exact(3).take(300);
    let story = steps
        .map(|step| (step[0], usize::from(step[1]) << 8 | usize::from(step[2])))
        .collect();
    (layout, byte(2) * 200, 40_000 + byte(3) * 1000, story)
}

/// The driver of the fuzz target `free_list`.
pub fn fuzz_free_list(input: &[u8]) {
    let (layout, slab, limit, story) = decode(input);
    free_list(layout, slab, limit, &story);
}

/// The driver of the fuzz target `sharded`.
pub fn fuzz_sharded(input: &[u8]) {
    let (layout, _, limit, story) = decode(input);
    sharded(layout, limit, &story);
}
