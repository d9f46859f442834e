//! Threads that are in each other's way although they share nothing: those that sleep, those that only free, those
//! whose blocks lie side by side.

use super::Work;
use super::block::Block;
use super::crew::Crew;
use super::random::Random;
use super::threaded::Queue;
use std::hint::black_box;
use std::sync::{Arc, Mutex};
use std::thread;

/// Buffers of 100 kB, four at a time, on two threads, beside `sleepers` that have allocated one small block each. An
/// operation is a buffer.
pub fn buffers_beside(sleepers: usize) -> Work {
    let threads: Vec<_> = (0..sleepers)
        .map(|_| {
            thread::spawn(|| {
                drop(black_box(Block::new(64)));
                thread::park();
            })
        })
        .collect();
    let crew = Crew::new(2, |_| {
        Box::new(|ops| {
            for _ in 0..ops / 4 {
                let buffers: [Block; 4] = std::array::from_fn(|_| Block::new(black_box(100_000)));
                drop(buffers);
            }
        })
    });
    Box::new(move |ops| {
        crew.work(ops);
        // They end with the process, if at all.
        black_box(&threads);
    })
}

/// One thread allocates messages of 1 to 32 KiB, in part written, and deals them out to `consumers`, who free them. An
/// operation is a message.
pub fn fan_out(consumers: usize) -> Work {
    let queues: Arc<Vec<_>> = Arc::new((0..consumers).map(|_| Queue::<Option<Block>>::new(8)).collect());
    let mut random = Random::new(5);
    Box::new(move |ops| {
        thread::scope(|scope| {
            for queue in queues.iter() {
                scope.spawn(move || while queue.receive().is_some() {});
            }
            for (_, queue) in (0..ops).zip(queues.iter().cycle()) {
                let block = Block::new(random.between(1025, 32 << 10));
                block.fill(1, usize::MAX);
                queue.send(Some(block));
            }
            queues.iter().for_each(|queue| queue.send(None));
        });
    })
}

/// Like `cache_scratch`, for longer blocks: 64 lie side by side, every other one for another of two threads, which
/// frees its own, and from then on allocates one, writes it, and frees it, again and again. An operation is such a
/// pair.
pub fn neighbours(size: usize) -> Work {
    Box::new(move |ops| {
        let dealt: [Mutex<Vec<Block>>; 2] = Default::default();
        let blocks = (0..64).map(|_| Block::new(size)).collect::<Vec<_>>();
        for (index, block) in blocks.into_iter().enumerate() {
            dealt[index % 2].lock().expect("no panic").push(block);
        }
        thread::scope(|scope| {
            for own in &dealt {
                scope.spawn(move || {
                    own.lock().expect("no panic").clear();
                    for _ in 0..ops / 2 {
                        drop(Block::new(black_box(size)));
                    }
                });
            }
        });
    })
}
