//! What many threads cost in memory and mappings. Each test runs in a process of its own, since the figures are per
//! process.

#![cfg(target_os = "linux")]

use super::*;

#[test]
fn ten_thousand_threads_cost_as_much_as_a_few() {
    if !is_child() {
        return assert!(run("footprint::ten_thousand_threads_cost_as_much_as_a_few"));
    }
    let wave = |count: usize| {
        let threads: Vec<_> = (0..count)
            .map(|number| {
                thread::spawn(move || {
                    let words: Vec<_> = (0..50).map(|word| format!("{number} {word}")).collect();
                    words.concat().len()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>()
    };
    wave(20);
    let before = resident();
    (0..500).for_each(|_| assert!(wave(20) > 0));
    let grown = resident().saturating_sub(before);
    assert!(grown <= 16 << 20, "{grown} bytes more\n{}", HEAP.stats());
    assert!(maps() < 1000, "{} mappings", maps());
    let stats = HEAP.stats();
    assert!(stats.thread_structures < 60, "{stats}");
}

#[test]
fn a_wave_of_work_is_given_back() {
    if !is_child() {
        return assert!(run("footprint::a_wave_of_work_is_given_back"));
    }
    let before = resident();
    for size in [100, 3000, 100_000] {
        let blocks: Vec<Vec<u8>> = (0..(64 << 20) / size).map(|_| vec![1; size]).collect();
        assert!(resident() >= before + (60 << 20));
        drop(blocks);
        HEAP.flush_thread();
        HEAP.scavenge(pageheap::PageCount(usize::MAX));
        let left = resident().saturating_sub(before);
        assert!(left <= 6 << 20, "{size}: {left} bytes more\n{}", HEAP.stats());
    }
}

#[test]
fn blocks_freed_by_others_are_used_again() {
    if !is_child() {
        return assert!(run("footprint::blocks_freed_by_others_are_used_again"));
    }
    let (to, from) = mpsc::sync_channel::<Vec<Box<[u64; 8]>>>(40);
    let freeing = thread::spawn(move || from.into_iter().map(|batch| batch.len()).sum::<usize>());
    let before = resident();
    for round in 0..2_000 {
        to.send((0..1_000).map(|number| Box::new([round * number; 8])).collect())
            .unwrap();
    }
    drop(to);
    assert_eq!(freeing.join().unwrap(), 2_000_000);
    let grown = resident().saturating_sub(before);
    assert!(grown <= 64 << 20, "{grown} bytes more\n{}", HEAP.stats());
}
