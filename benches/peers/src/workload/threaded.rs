//! Multi-threaded workloads on bare blocks.

use super::Work;
use super::block::Block;
use super::crew::{Crew, Hand};
use super::random::Random;
use super::single::{self, Batches, free_both_ways, mix};
use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

type Slots = Vec<Option<Block>>;

fn empty_slots(count: usize) -> Slots {
    (0..count).map(|_| None).collect()
}

fn crew(threads: usize, make: impl Fn(usize) -> Hand + Send + Sync + 'static) -> Work {
    let crew = Crew::new(threads, make);
    Box::new(move |ops| crew.work(ops))
}

/// Tight pairs on several threads at once.
pub fn pairs(threads: usize, size: usize) -> Work {
    crew(threads, move |_| {
        Box::new(move |ops| {
            for _ in 0..ops {
                drop(Block::new(black_box(size)));
            }
        })
    })
}

/// Many of one size, then all freed in the order they were allocated, on several threads at once. An operation is an
/// allocation and its free.
pub fn bulk(threads: usize, size: usize, count: usize) -> Work {
    crew(threads, move |_| Box::new(single::bulk(size, count)))
}

/// As many blocks on each of several threads, which free theirs in random order at the same time.
pub fn scattered(threads: usize, size: usize) -> Work {
    crew(threads, move |_| Box::new(single::scattered(size)))
}

/// `random_mixed`, each thread with its own slots.
pub fn mixed(threads: usize, slots: usize, smallest: usize, largest: usize) -> Work {
    crew(threads, move |index| {
        let mut random = Random::new(index as u64 + 1);
        let mut slots = empty_slots(slots);
        Box::new(move |ops| mix(&mut slots, &mut random, smallest, largest, ops))
    })
}

/// The server that Larson and Krishnan describe: a thread frees and replaces random ones of its 5,000 blocks of
/// 8..1000 B; after 100 times as many it ends, and another goes on with its blocks. An operation is a free and an
/// allocation.
pub fn larson(threads: usize) -> Work {
    const BLOCKS: usize = 5000;
    const LIFE: u64 = 100 * BLOCKS as u64;
    let generation = |mut slots: Slots, mut random: Random, ops: u64| {
        for _ in 0..ops {
            let at = random.below(BLOCKS);
            // The old block is freed first; plain assignment would allocate the new one before that.
            slots[at] = None;
            slots[at] = Some(Block::new(random.between(8, 1000)));
        }
        (slots, random)
    };
    let mut states: Vec<(Slots, Random)> = (0..threads)
        .map(|index| (empty_slots(BLOCKS), Random::new(index as u64 + 3)))
        .collect();
    Box::new(move |ops| {
        let mut left = (ops / threads as u64).max(1);
        while left > 0 {
            let life = left.min(LIFE);
            let running = states.drain(..);
            let running = running.map(|(slots, random)| thread::spawn(move || generation(slots, random, life)));
            let running: Vec<_> = running.collect();
            states = running
                .into_iter()
                .map(|thread| thread.join().expect("no panic"))
                .collect();
            left -= life;
        }
    })
}

/// A bounded queue under a lock, because the items are few and large. A thread waits only because the queue is empty
/// or full, so a wake-up is needed only when it stops being so.
#[derive(Debug)]
pub struct Queue<T> {
    items: Mutex<VecDeque<T>>,
    changed: Condvar,
    bound: usize,
}

impl<T> Queue<T> {
    pub fn new(bound: usize) -> Arc<Self> {
        let items = Mutex::new(VecDeque::with_capacity(bound));
        Arc::new(Self {
            items,
            changed: Condvar::new(),
            bound,
        })
    }

    pub fn send(&self, item: T) {
        let mut items = self.items.lock().expect("no panic");
        while items.len() == self.bound {
            items = self.changed.wait(items).expect("no panic");
        }
        items.push_back(item);
        if items.len() == 1 {
            self.changed.notify_all();
        }
    }

    pub fn receive(&self) -> T {
        let mut items = self.items.lock().expect("no panic");
        loop {
            if let Some(item) = items.pop_front() {
                if items.len() == self.bound - 1 {
                    self.changed.notify_all();
                }
                return item;
            }
            items = self.changed.wait(items).expect("no panic");
        }
    }
}

/// Like `xmalloc-test`: half of the threads allocate, batch by batch, and the other half free what they receive. The
/// sizes are its own, 8..2,048 B, or all the same. An operation is an allocation and its free.
pub fn producer_consumer(pairs: usize, batch: usize, size: Option<usize>) -> Work {
    const SIZES: [usize; 17] = [
        8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    ];
    handed_over(pairs, batch, move |random| {
        size.unwrap_or_else(|| SIZES[random.below(SIZES.len())])
    })
}

/// The same with buffers of 32 KiB to 1 MiB, hardly two of one size.
pub fn large_buffers() -> Work {
    handed_over(1, 16, |random| (32 << 10) + random.below(992 << 10))
}

fn handed_over(pairs: usize, batch: usize, size: impl Fn(&mut Random) -> usize + Copy + Send + Sync + 'static) -> Work {
    let queue = Queue::<Vec<Block>>::new(100);
    crew(2 * pairs, move |index| {
        let queue = Arc::clone(&queue);
        if index % 2 == 0 {
            let mut random = Random::new(index as u64 + 5);
            Box::new(move |ops| {
                assert!((2 * ops).is_multiple_of(batch as u64));
                for _ in 0..2 * ops / batch as u64 {
                    let blocks = (0..batch).map(|at| {
                        let block = Block::new(size(&mut random));
                        block.fill(at as u8, 128);
                        block
                    });
                    queue.send(blocks.collect());
                }
            })
        } else {
            Box::new(move |ops| {
                for _ in 0..2 * ops / batch as u64 {
                    drop(queue.receive());
                }
            })
        }
    })
}

/// Like mimalloc's `test-stress`: rounds of threads, each of which allocates lists of words (1 in 100 a hundred times
/// as long), keeps a third to its end, frees two of three of the rest at random, and swaps one of four with a table
/// that all threads share and that outlives them. An operation is an allocation and its free.
pub fn mstress(threads: usize) -> Work {
    const SCALE: usize = 25;
    const TRANSFERS: usize = 1000;
    let transfers: Arc<Vec<Mutex<Option<Block>>>> = Arc::new((0..TRANSFERS).map(|_| Mutex::new(None)).collect());
    let mut sweeper = Random::new(43);
    Box::new(move |ops| {
        let in_round: usize = (0..threads).map(|index| 150 * SCALE * (index % 8 + 1)).sum();
        assert!(ops.is_multiple_of(in_round as u64));
        for _ in 0..ops / in_round as u64 {
            let running = (0..threads).map(|index| {
                let transfers = Arc::clone(&transfers);
                thread::spawn(move || stress(100 * SCALE * (index % 8 + 1), &transfers, Random::new(index as u64 + 9)))
            });
            for thread in running.collect::<Vec<_>>() {
                thread.join().expect("no panic");
            }
            for slot in transfers.iter() {
                if sweeper.chance(50) {
                    *slot.lock().expect("no panic") = None;
                }
            }
        }
    })
}

fn stress(mut allocations: usize, transfers: &[Mutex<Option<Block>>], mut random: Random) {
    let items = |random: &mut Random, shifts: usize| {
        let long = if random.chance(1) { 100 } else { 1 };
        let block = Block::new((8 * long) << random.below(shifts));
        block.fill(1, usize::MAX);
        block
    };
    let mut to_retain = allocations / 2;
    let mut retained = Vec::with_capacity(to_retain);
    let mut data: Slots = Vec::new();
    while allocations > 0 || to_retain > 0 {
        if to_retain == 0 || allocations > 0 && random.chance(50) {
            allocations -= 1;
            data.push(Some(items(&mut random, 5)));
        } else {
            to_retain -= 1;
            retained.push(items(&mut random, 7));
        }
        if !data.is_empty() && random.chance(66) {
            let at = random.below(data.len());
            data[at] = None;
        }
        if !data.is_empty() && random.chance(25) {
            let at = random.below(data.len());
            let mut slot = transfers[random.below(transfers.len())].lock().expect("no panic");
            std::mem::swap(&mut *slot, &mut data[at]);
        }
    }
}

/// `sh8bench` is `sh6bench` on threads that free each other's batches: here each thread gives its batch to the next.
pub fn sh8(threads: usize) -> Work {
    const FULL: usize = 4096;
    let queues: Arc<Vec<_>> = Arc::new((0..threads).map(|_| Queue::<Vec<Block>>::new(16)).collect());
    crew(threads, move |index| {
        let queues = Arc::clone(&queues);
        let mut batches = Batches::new(FULL);
        Box::new(move |ops| {
            // As many batches from each thread as to each: a round leaves the queues empty.
            assert!(ops.is_multiple_of(FULL as u64));
            for _ in 0..ops / FULL as u64 {
                while !batches.allocate() {}
                queues[(index + 1) % queues.len()].send(batches.let_go());
                free_both_ways(queues[index].receive());
            }
        })
    })
}

/// Like Hoard's `cache-scratch`: one thread allocates small blocks side by side, one for each thread. Each thread
/// frees its block, then allocates one, writes it often, and frees it, again and again. False sharing of a line with
/// another thread shows in the time. An operation is an allocation, 1,000 writes and the free.
pub fn cache_scratch(threads: usize) -> Work {
    Box::new(move |ops| {
        let blocks: Vec<Block> = (0..threads).map(|_| Block::new(8)).collect();
        let running = blocks.into_iter().map(|block| {
            thread::spawn(move || {
                drop(block);
                for _ in 0..ops / threads as u64 {
                    let block = Block::new(8);
                    for write in 0..1000 {
                        block.touch(write % 8);
                    }
                }
            })
        });
        for thread in running.collect::<Vec<_>>() {
            thread.join().expect("no panic");
        }
    })
}

/// Short threads, some at a time, each with 100 blocks of 16..512 B. An operation is a thread.
pub fn short_threads(at_once: u64) -> Work {
    Box::new(move |ops| {
        for first in (0..ops).step_by(at_once as usize) {
            let running = (first..(first + at_once).min(ops)).map(|seed| {
                thread::spawn(move || {
                    let mut random = Random::new(seed);
                    let blocks: Vec<Block> = (0..100).map(|_| Block::new(random.between(16, 512))).collect();
                    drop(blocks);
                })
            });
            for thread in running.collect::<Vec<_>>() {
                thread.join().expect("no panic");
            }
        }
    })
}

/// More threads than processors: 1,000 slots each of 16..1,040 B, and every 64th block goes to a slot that all share.
pub fn oversubscribed(threads: usize) -> Work {
    let shared: Arc<Vec<Mutex<Option<Block>>>> = Arc::new((0..256).map(|_| Mutex::new(None)).collect());
    crew(threads, move |index| {
        let shared = Arc::clone(&shared);
        let mut random = Random::new(index as u64 + 1);
        let mut slots = empty_slots(1000);
        Box::new(move |ops| {
            for _ in 0..ops / 64 {
                mix(&mut slots, &mut random, 16, 1040, 63);
                let mut slot = shared[random.below(256)].lock().expect("no panic");
                let old = slot.replace(Block::new(random.between(16, 1040)));
                drop(slot);
                drop(old);
            }
        })
    })
}
