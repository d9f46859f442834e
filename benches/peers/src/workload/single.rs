//! Single-threaded workloads on bare blocks.

use super::Work;
use super::block::{ALIGN, Block};
use super::random::Random;
use std::hint::black_box;
use std::thread;
use std::time::Duration;

/// A tight pair: one block lives at a time. An operation is an allocation and its free.
pub fn pair(size: usize) -> Work {
    Box::new(move |ops| {
        for _ in 0..ops {
            drop(Block::new(black_box(size)));
        }
    })
}

/// The same of a vector with room for `count` elements, of which the first is written.
pub fn vector<T: Copy + 'static>(first: T, count: usize) -> Work {
    Box::new(move |ops| {
        for _ in 0..ops {
            let mut vector = Vec::with_capacity(black_box(count));
            vector.push(first);
            drop(black_box(vector));
        }
    })
}

/// A cache line, aligned as one.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct Line(#[expect(dead_code, reason = "only its address is of interest")] u8);

impl Line {
    pub const ZERO: Self = Self(0);
}

/// As long as it is aligned: a buffer for a device, or another allocator's pages.
#[derive(Debug)]
#[repr(align(16384))]
pub struct Large(#[expect(dead_code, reason = "only its address is of interest")] u8);

/// Room for one `T`, which is not written. An operation is an allocation and its free.
pub fn room<T: 'static>() -> Work {
    Box::new(|ops| {
        for _ in 0..ops {
            drop(black_box(Vec::<T>::with_capacity(black_box(1))));
        }
    })
}

/// A vector of much room for few bytes, which gives back what it does not need. An operation is that and its free.
pub fn shrink(room: usize, bytes: usize) -> Work {
    Box::new(move |ops| {
        for _ in 0..ops {
            let mut vector: Vec<u8> = Vec::with_capacity(black_box(room));
            vector.resize(bytes, 1);
            vector.shrink_to_fit();
            drop(black_box(vector));
        }
    })
}

/// A tight pair of changing size: 8 B to 1 MiB, every power of two equally likely, but the least as likely as all that
/// would be below it. The sizes are made beforehand.
pub fn sweep() -> Work {
    let mut random = Random::new(7);
    let sizes: Vec<usize> = (0..8192)
        .map(|_| {
            let power = random.below(20);
            random.between(1 << power, 2 << power).max(ALIGN)
        })
        .collect();
    let mut slots: Vec<Option<Block>> = (0..32).map(|_| None).collect();
    Box::new(move |ops| {
        for op in 0..ops as usize {
            slots[op % 32] = Some(Block::new(sizes[op % sizes.len()]));
        }
    })
}

/// `random_mixed`: a random slot is freed if it is full, and filled if not. An operation is one of the two.
pub fn random_mixed(slots: usize, smallest: usize, largest: usize) -> Work {
    let mut random = Random::new(slots as u64);
    let mut slots: Vec<Option<Block>> = (0..slots).map(|_| None).collect();
    Box::new(move |ops| mix(&mut slots, &mut random, smallest, largest, ops))
}

/// The loop of `random_mixed`, also for threads.
#[inline]
pub fn mix(slots: &mut [Option<Block>], random: &mut Random, smallest: usize, largest: usize, ops: u64) {
    for _ in 0..ops {
        let at = random.below(slots.len());
        slots[at] = match slots[at].take() {
            Some(_) => None,
            None => Some(Block::new(random.between(smallest, largest))),
        };
    }
}

/// Many of one size, then all freed in the order they were allocated. An operation is an allocation and its free.
pub fn bulk(size: usize, count: usize) -> impl FnMut(u64) + Send {
    let mut blocks: Vec<Block> = Vec::with_capacity(count);
    move |ops| {
        assert!(ops.is_multiple_of(count as u64));
        for _ in 0..ops / count as u64 {
            for _ in 0..count {
                blocks.push(Block::new(size));
            }
            blocks.clear();
        }
    }
}

/// After the description of `sh6bench`: sizes step up by half and then halve down to one, the smaller the more often;
/// what is below 8 B is a block of 8. When the array is full, most of it is freed, half of that in order and half
/// backwards, and a part stays for a round. An operation is an allocation and its free.
#[derive(Debug)]
pub struct Batches {
    blocks: Vec<Block>,
    kept: Vec<Block>,
    base: usize,
    size: usize,
    repeat: usize,
    full: usize,
}

impl Batches {
    pub fn new(full: usize) -> Self {
        Self {
            blocks: Vec::with_capacity(full),
            kept: Vec::with_capacity(full),
            base: 1,
            size: 1,
            repeat: 0,
            full,
        }
    }

    fn next_size(&mut self) -> usize {
        if self.repeat == 0 {
            self.size /= 2;
            if self.size == 0 {
                self.base = if self.base > 1000 { 1 } else { self.base * 3 / 2 + 1 };
                self.size = self.base;
            }
            self.repeat = if self.size < 100 { 250 } else { 50 };
        }
        self.repeat -= 1;
        self.size.max(ALIGN)
    }

    /// Allocates. Returns whether the array is full; the caller then empties it by `let_go`.
    pub fn allocate(&mut self) -> bool {
        let size = self.next_size();
        self.blocks.push(Block::new(size));
        self.blocks.len() == self.full
    }

    /// Returns all but the newest eighth, which the next call returns; for whichever thread frees them.
    pub fn let_go(&mut self) -> Vec<Block> {
        let newest = self.blocks.len() - self.full / 8;
        let mut gone = std::mem::replace(&mut self.kept, self.blocks.split_off(newest));
        gone.append(&mut self.blocks);
        gone
    }
}

/// Half of them in order, half backwards.
pub fn free_both_ways(mut blocks: Vec<Block>) {
    let mut second = blocks.split_off(blocks.len() / 2);
    blocks.clear();
    while let Some(block) = second.pop() {
        drop(block);
    }
}

pub fn sh6() -> Work {
    let mut batches = Batches::new(4096);
    Box::new(move |ops| {
        for _ in 0..ops {
            if batches.allocate() {
                free_both_ways(batches.let_go());
            }
        }
    })
}

/// A block that grows from 64 B to 64 KiB by quarters. An operation is one `realloc`.
pub fn realloc_steps() -> Work {
    Box::new(|ops| {
        let mut block = Block::new(64);
        for _ in 0..ops {
            if block.size() > 1 << 16 {
                block = Block::new(64);
            }
            block.resize(block.size() * 5 / 4);
        }
    })
}

/// A `Vec` pushed to `bytes` bytes, and dropped. An operation is one such cycle.
pub fn vec_growth(bytes: usize) -> Work {
    Box::new(move |ops| {
        for _ in 0..ops {
            let mut numbers: Vec<u64> = Vec::new();
            for number in 0..bytes as u64 / 8 {
                numbers.push(number);
            }
            black_box(&numbers);
        }
    })
}

/// Zeroed blocks in which one byte in `stride` is written. An operation is an allocation, the writes and the free.
pub fn zeroed(size: usize, stride: usize) -> Work {
    Box::new(move |ops| {
        for _ in 0..ops {
            let block = Block::zeroed(size);
            for at in (0..size).step_by(stride) {
                assert!(block.is_zero(at), "a zeroed block is zero");
                block.touch(at + 1);
            }
        }
    })
}

/// Fill and thin: 64 MiB of small blocks, nine of ten freed at random, then blocks of other sizes into the gaps, the
/// same again, and all freed. An operation is an allocation and its free; the peak shows the fragmentation.
pub fn fragmentation() -> Work {
    Box::new(|ops| {
        let mut random = Random::new(11);
        let mut left = ops;
        while left > 0 {
            let mut blocks: Vec<Block> = Vec::new();
            for (smallest, largest) in [(16, 256), (128, 1024), (512, 4096)] {
                let mut bytes: usize = blocks.iter().map(Block::size).sum();
                while bytes < 64 << 20 && left > 0 {
                    let size = random.between(smallest, largest);
                    blocks.push(Block::new(size));
                    bytes += size;
                    left -= 1;
                }
                blocks.retain(|_| random.chance(10));
            }
        }
    })
}

/// Half a million blocks, allocated one after the other and freed in random order, again and again. An operation is an
/// allocation and its free.
pub fn scattered(size: usize) -> impl FnMut(u64) + Send {
    const BLOCKS: usize = 500_000;
    let mut random = Random::new(size as u64);
    let mut places: Vec<usize> = (0..BLOCKS).collect();
    for last in (1..BLOCKS).rev() {
        places.swap(last, random.below(last + 1));
    }
    let mut blocks: Vec<Option<Block>> = (0..BLOCKS).map(|_| None).collect();
    move |ops| {
        let mut left = ops as usize;
        while left > 0 {
            let count = left.min(BLOCKS);
            places[..count]
                .iter()
                .for_each(|&place| blocks[place] = Some(Block::new(size)));
            blocks.iter_mut().for_each(|block| *block = None);
            left -= count;
        }
    }
}

/// A sawtooth: 64 MiB of blocks of 1..64 KiB filled, all freed, and a pause. An operation is a tooth. An allocator
/// that gives memory back during the pause pays for it in the next tooth, by page faults.
///
/// `busy`: during the pause it allocates and frees a few blocks a hundred times a second, as a server does that waits
/// for requests.
pub fn sawtooth(rest: Duration, busy: bool) -> Work {
    const SOME: u32 = 100;
    let take_rest = move || {
        if !busy {
            return thread::sleep(rest);
        }
        for _ in 0..SOME {
            thread::sleep(rest / SOME);
            for size in [200, 5000, 100_000] {
                Block::new(size).fill(1, 1);
            }
        }
    };
    Box::new(move |ops| {
        for tooth in 0..ops {
            let mut random = Random::new(tooth + 1);
            let mut blocks: Vec<Block> = Vec::new();
            let mut left = 64_usize << 20;
            while left > 0 {
                let block = Block::new(random.between(1 << 10, 64 << 10));
                block.fill(1, usize::MAX);
                left = left.saturating_sub(block.size());
                blocks.push(block);
            }
            drop(blocks);
            take_rest();
        }
    })
}
