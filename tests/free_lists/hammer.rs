//! The hammer: 256 threads and 256 shards on a list of 128 MiB, each thread checking that nobody writes to its slots.
//!
//! `HAMMER_SECONDS` says how long (3 by default, 1 without optimisation; 60 and 600 are worth a while). No request may
//! be refused while a slot is free: each thread has at most its part of all slots, so there always is one.

use std::alloc::Layout;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pageheap::arena::{ArenaConfig, Owner, ShardedFreeList};

const BYTES: usize = 128 << 20;
const SLOT: usize = 512;
const WORDS: usize = SLOT / 8;

/// Says to a process that it is for the hammer alone.
const ALONE: &str = "HAMMER_ALONE";

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }
}

/// What one thread has: slots with its stamp in the first and the last word.
struct Hand<'l> {
    owner: Owner<'l>,
    stamp: u64,
    slots: Vec<NonNull<u8>>,
    most: usize,
    retires: bool,
    random: Random,
}

impl Hand<'_> {
    fn take(&mut self) {
        let slot = self.owner.allocate().expect("there are slots for all").cast::<u64>();
        // SAFETY: ours, and of so many words.
        unsafe {
            slot.write(self.stamp);
            slot.add(WORDS - 1).write(self.stamp);
        }
        self.slots.push(slot.cast());
    }

    fn give(&mut self, index: usize) {
        let slot = self.slots.swap_remove(index);
        // SAFETY: ours until it is deallocated or retired, which is once.
        unsafe {
            let words = slot.cast::<u64>();
            let (first, last) = (words.read(), words.add(WORDS - 1).read());
            assert_eq!(
                (first, last),
                (self.stamp, self.stamp),
                "somebody wrote to a slot of ours"
            );
            words.write(0);
            if self.retires && self.random.below(8) == 0 {
                self.owner.retire(slot);
            } else {
                self.owner.deallocate(slot);
            }
        }
    }

    /// Some hundred operations: one by one, in bursts, and in pairs.
    fn work(&mut self) -> u64 {
        let style = self.random.below(4);
        let steps = 1 + self.random.below(400);
        for _ in 0..steps {
            let fill = match style {
                0 => self.slots.len() * 2 < self.most,
                1 => true,
                2 => false,
                _ => self.random.below(2) == 0,
            };
            if self.slots.is_empty() || fill && self.slots.len() < self.most {
                self.take();
            } else {
                let index = self.random.below(self.slots.len());
                self.give(index);
            }
        }
        steps as u64
    }
}

fn seconds() -> u64 {
    let wish = std::env::var("HAMMER_SECONDS").ok().and_then(|text| text.parse().ok());
    wish.unwrap_or(if cfg!(debug_assertions) { 1 } else { 3 })
}

fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .unwrap_or(0)
        * 4096
}

/// What is hammered, and how.
struct Anvil {
    threads: usize,
    bytes: usize,
    /// Slots that no thread has, for each thread: where slots are retired, as many as may be waiting to be.
    aside: usize,
    seconds: u64,
}

fn hammer(anvil: &Anvil) {
    let &Anvil {
        threads,
        bytes,
        aside,
        seconds,
    } = anvil;
    let layout = Layout::from_size_align(SLOT, 8).unwrap();
    let config = ArenaConfig::new().limit(bytes).prealloc(bytes);
    let list = ShardedFreeList::with_config(layout, threads, config).unwrap();
    let all: Vec<_> = std::iter::from_fn(|| list.allocate().ok()).collect();
    let slots = all.len();
    // SAFETY: ours.
    all.into_iter().for_each(|slot| unsafe {
        slot.cast::<u8>().write_bytes(0, SLOT);
        list.deallocate(slot.cast());
    });
    let most = slots / threads - aside;
    let (end, total, longest) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let before = resident();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (list, end, total, longest) = (&list, &end, &total, &longest);
            scope.spawn(move || {
                let mut hand = Hand {
                    owner: list.owner().expect("a shard for each"),
                    stamp: 0xA110_C000 + thread as u64,
                    slots: Vec::with_capacity(most),
                    most,
                    retires: aside > 0,
                    random: Random(0x9E37_79B9_7F4A_7C15 ^ (thread as u64 + 1) << 20),
                };
                while !end.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    total.fetch_add(hand.work(), Ordering::Relaxed);
                    longest.fetch_max(began.elapsed().as_micros() as u64, Ordering::Relaxed);
                }
                while !hand.slots.is_empty() {
                    hand.give(0);
                }
            });
        }
        std::thread::sleep(Duration::from_secs(seconds));
        end.store(true, Ordering::Relaxed);
    });
    let grown = resident().saturating_sub(before) >> 10;
    let millions = total.into_inner() as f64 / 1e6;
    println!(
        "{threads} threads, {slots} slots, {most} for each: {millions:.0} M operations, {:.1} M/s; {} gatherings; \
         resident {grown} KiB more; longest {} us",
        millions / seconds as f64,
        list.gatherings(),
        longest.into_inner(),
    );
    // Threads and their stacks come and go; the list's own memory was all written before.
    assert!(bytes < BYTES || grown < 32 << 10, "resident memory grew by {grown} KiB");
    let again = std::iter::from_fn(|| list.allocate().ok()).count();
    assert_eq!(again, slots, "all slots can be had afterwards");
}

/// In a process of its own: what other tests have resident is not to be counted.
#[test]
fn nobody_is_refused_and_nothing_is_lost_under_the_hammer() {
    if std::env::var_os(ALONE).is_none() {
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "hammer::nobody_is_refused_and_nothing_is_lost_under_the_hammer",
                "--exact",
            ])
            .arg("--nocapture")
            .env(ALONE, "1")
            .output()
            .unwrap();
        println!("{}", String::from_utf8_lossy(&output.stdout));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    hammer(&Anvil {
        threads: 256,
        bytes: BYTES,
        aside: 64,
        seconds: seconds(),
    });
}

#[test]
fn nobody_is_refused_the_last_slot() {
    // As many slots as threads may have at the most: whoever asks has one less than his part, so one is free.
    hammer(&Anvil {
        threads: 32,
        bytes: 256 << 10,
        aside: 0,
        seconds: 1,
    });
}
