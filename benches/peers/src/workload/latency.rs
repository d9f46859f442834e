//! The latency test: how long single calls take, and how long the slowest of them.
//!
//! ```text
//!   read the clock ─ one call ─ read the clock      each call by itself, into a histogram (`hdrhistogram`)
//! ```
//!
//! A call to allocate includes the first write to the block's first and last byte, because allocators differ in whether
//! they have touched the page before. A time is the clock's, so it includes what the machine does meanwhile: another
//! thread or another guest on the processor, interrupts, and two readings of the clock. The scenario `clock` is what
//! these take by themselves: a figure near its own says nothing about an allocator.

use super::block::Block;
use super::crew::{Crew, Hand};
use super::random::Random;
use super::threaded::Queue;
use hdrhistogram::Histogram;
use std::hint::black_box;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// The times of all calls of a kind, in nanoseconds. Recording does not allocate.
#[derive(Debug)]
struct Times(Histogram<u64>);

impl Times {
    /// The longest time that is told from longer ones.
    const MOST_NS: u64 = 10_000_000_000;

    fn new() -> Self {
        Self(Histogram::new_with_bounds(1, Self::MOST_NS, 2).expect("bounds in order, two digits"))
    }

    /// Runs the call, and notes how long it took.
    #[inline]
    fn of<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let result = call();
        self.0.saturating_record(begin.elapsed().as_nanos() as u64);
        result
    }

    fn add(&mut self, others: &Self) {
        self.0.add(&others.0).expect("they have the same bounds");
    }
}

/// The two kinds.
#[derive(Debug)]
pub struct Both {
    allocate: Times,
    free: Times,
}

impl Both {
    fn new() -> Self {
        Self {
            allocate: Times::new(),
            free: Times::new(),
        }
    }

    #[inline]
    fn block(&mut self, size: usize) -> Block {
        self.allocate.of(|| Block::new(size))
    }

    #[inline]
    fn free(&mut self, block: Option<Block>) {
        if let Some(block) = block {
            self.free.of(|| drop(block));
        }
    }

    fn add(&mut self, others: &Self) {
        self.allocate.add(&others.allocate);
        self.free.add(&others.free);
    }

    fn forget(&mut self) {
        self.allocate.0.reset();
        self.free.0.reset();
    }
}

/// What does a number of calls, and returns their times.
pub type Scenario = fn(u64) -> Both;

/// By name, with the number of allocations: about as many as take a second.
pub const SCENARIOS: &[(&str, u64, Scenario)] = &[
    ("clock", 4_000_000, clock),
    ("small", 4_000_000, |calls| {
        replaced(calls, 65_536, |random| random.between(16, 1040))
    }),
    ("any", 2_000_000, |calls| replaced(calls, 8192, any)),
    ("large", 500_000, |calls| {
        replaced(calls, 100, |random| random.between(32 << 10, 1 << 20))
    }),
    ("burst", 2_000_000, burst),
    ("after-silence", 300_000, after_silence),
    ("handoff", 4_000_000, handoff),
    ("crowd", 4_000_000, crowd),
];

/// Runs one, and prints a line for each kind of call.
pub fn run(scenario: Scenario, calls: u64) {
    let both = scenario(calls);
    for (call, Times(times)) in [("allocate", &both.allocate), ("free", &both.free)] {
        print!("call={call} count={} mean={:.1}", times.len(), times.mean());
        for percentile in [50.0, 99.0, 99.9, 99.99] {
            print!(" p{percentile}={}", times.value_at_percentile(percentile));
        }
        println!(" max={}", times.max());
    }
}

/// Nothing: the clock, and the machine.
fn clock(calls: u64) -> Both {
    let mut both = Both::new();
    for call in 0..calls {
        both.allocate.of(|| black_box(call));
        both.free.of(|| black_box(call));
    }
    both
}

/// From 16 B to 64 KiB, each doubling equally likely.
fn any(random: &mut Random) -> usize {
    let power = 4 + random.below(12);
    random.between(1 << power, 2 << power)
}

/// Blocks in `slots`, replaced at random, once they are full.
fn replaced(calls: u64, slots: usize, size: impl Fn(&mut Random) -> usize) -> Both {
    let (mut both, mut random) = (Both::new(), Random::new(1));
    let mut blocks: Vec<Option<Block>> = (0..slots).map(|_| Some(Block::new(size(&mut random)))).collect();
    for _ in 0..calls {
        let block = &mut blocks[random.below(slots)];
        both.free(block.take());
        *block = Some(both.block(size(&mut random)));
    }
    both
}

/// 16 to 1,040 B: a heap that grows from nothing to half a million blocks, which are freed in random order; again and
/// again.
fn burst(calls: u64) -> Both {
    const BLOCKS: u64 = 500_000;
    let (mut both, mut random) = (Both::new(), Random::new(2));
    let mut blocks = Vec::with_capacity(BLOCKS as usize);
    let mut left = calls;
    while left > 0 {
        let now = left.min(BLOCKS);
        blocks.extend((0..now).map(|_| both.block(random.between(16, 1040))));
        while !blocks.is_empty() {
            let at = random.below(blocks.len());
            both.free(Some(blocks.swap_remove(at)));
        }
        left -= now;
    }
    both
}

/// The same after a second without a call, in which memory may have been given back; three times.
fn after_silence(calls: u64) -> Both {
    let mut both = Both::new();
    drop(burst(calls / 3));
    for _ in 0..3 {
        thread::sleep(Duration::from_secs(1));
        both.add(&burst(calls / 3));
    }
    both
}

/// One thread allocates 16 to 1,040 B, another frees what it gets, in batches of 256.
fn handoff(calls: u64) -> Both {
    const BATCH: u64 = 256;
    let queue = Queue::<Vec<Block>>::new(16);
    let calls = calls.next_multiple_of(BATCH);
    let both = Arc::new(Mutex::new(Both::new()));
    let crew = Crew::new(2, {
        let both = Arc::clone(&both);
        move |index| {
            let (queue, both) = (Arc::clone(&queue), Arc::clone(&both));
            let (mut own, mut random) = (Both::new(), Random::new(3));
            let work = move |ops: u64| {
                own.forget();
                for _ in 0..ops / BATCH {
                    if index == 0 {
                        queue.send((0..BATCH).map(|_| own.block(random.between(16, 1040))).collect());
                    } else {
                        queue.receive().into_iter().for_each(|block| own.free(Some(block)));
                    }
                }
                both.lock().expect("no panic").add(&own);
            };
            Box::new(work) as Hand
        }
    });
    measured(&crew, &both, 2 * calls)
}

/// Eight threads, each with 4,096 slots of 16 to 1,040 B, replaced at random; one block in 64 goes to a slot that all
/// share.
fn crowd(calls: u64) -> Both {
    const THREADS: usize = 8;
    let shared: Arc<Vec<Mutex<Option<Block>>>> = Arc::new((0..256).map(|_| Mutex::new(None)).collect());
    let both = Arc::new(Mutex::new(Both::new()));
    let crew = Crew::new(THREADS, {
        let both = Arc::clone(&both);
        move |index| {
            let (shared, both) = (Arc::clone(&shared), Arc::clone(&both));
            let (mut own, mut random) = (Both::new(), Random::new(4 + index as u64));
            let mut blocks: Vec<Option<Block>> = (0..4096).map(|_| None).collect();
            let work = move |ops: u64| {
                own.forget();
                for op in 0..ops {
                    let block = &mut blocks[random.below(4096)];
                    own.free(block.take());
                    let mut new = Some(own.block(random.between(16, 1040)));
                    if op % 64 == 0 {
                        std::mem::swap(&mut new, &mut shared[random.below(256)].lock().expect("no panic"));
                    }
                    *block = new;
                }
                both.lock().expect("no panic").add(&own);
            };
            Box::new(work) as Hand
        }
    });
    measured(&crew, &both, calls)
}

/// An eighth of the work to warm up, and then what counts.
fn measured(crew: &Crew, both: &Mutex<Both>, ops: u64) -> Both {
    crew.work(ops / 8);
    both.lock().expect("no panic").forget();
    crew.work(ops);
    std::mem::replace(&mut *both.lock().expect("no panic"), Both::new())
}
