//! The hammer: 256 threads and 256 shards on a list of 128 MiB, each thread checking that nobody writes to its slots.
//!
//! `HAMMER_SECONDS` sets the duration: 3 by default, 1 without optimisation, 60 if `PAGEHEAP_TEST_FULL` is set. No
//! request may be refused while a slot is free. Each thread holds at most its share of all slots, so one always is.
//! Some threads read what others publish, replace and retire. A thread about to retire a slot first checks how many may
//! be waiting for readers, and frees the slot at once if there are many: a reader that is preempted for seconds holds
//! back all that was allocated before, which is nearly every slot.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pageheap::arena::{ArenaConfig, Owner, ShardedFreeList};
use pageheap::source::{Source, System};

use super::child;
use super::random::Random;

const BYTES: usize = 128 << 20;
const SLOT: usize = 512;
const WORDS: usize = SLOT / 8;

/// Places where all threads can find a slot.
const PLACES: usize = 16;

/// What the threads share.
struct Common {
    end: AtomicBool,
    operations: AtomicU64,
    reads: AtomicU64,
    /// The longest time that one round of operations took, in microseconds.
    longest: AtomicU64,
    /// Slots retired so far; and for each reader, that count when it entered, or `u64::MAX`.
    retired: AtomicU64,
    entered: Vec<AtomicU64>,
    /// How many slots may be waiting for readers.
    waiting: u64,
    places: [AtomicPtr<AtomicU64>; PLACES],
}

impl Common {
    fn new(threads: usize, readers: usize) -> Self {
        Self {
            end: AtomicBool::new(false),
            operations: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            longest: AtomicU64::new(0),
            retired: AtomicU64::new(0),
            entered: (0..readers).map(|_| AtomicU64::new(u64::MAX)).collect(),
            // Less, per thread, one between the check and the retirement, one in the middle of it, and one for the
            // places.
            waiting: (threads * (WAITING - 3)) as u64,
            places: std::array::from_fn(|_| AtomicPtr::default()),
        }
    }

    /// Counts one more slot as retired, unless too many may be waiting.
    fn may_retire(&self) -> bool {
        let entered = self.entered.iter().map(|entered| entered.load(Ordering::SeqCst));
        let retired = self.retired.load(Ordering::SeqCst);
        let may = retired.saturating_sub(entered.min().unwrap_or(u64::MAX)) < self.waiting;
        if may {
            self.retired.fetch_add(1, Ordering::SeqCst);
        }
        may
    }
}

/// One thread's state: its slots have its stamp in the first and the last word.
struct Hand<'l> {
    owner: Owner<'l>,
    common: &'l Common,
    /// Its index among the readers, if it is one.
    reader: Option<usize>,
    stamp: u64,
    slots: Vec<NonNull<u8>>,
    most: usize,
    random: Random,
}

/// The first and the last word of a slot, which other threads may be reading.
fn ends<'l>(slot: NonNull<u8>) -> [&'l AtomicU64; 2] {
    let words = slot.cast::<AtomicU64>();
    // SAFETY: a slot of the list stays memory while the list lives; all threads access these words atomically.
    unsafe { [words.as_ref(), words.add(WORDS - 1).as_ref()] }
}

fn write(slot: NonNull<u8>, stamp: u64) {
    ends(slot)
        .into_iter()
        .for_each(|word| word.store(stamp, Ordering::Relaxed));
}

fn read(slot: NonNull<u8>) -> [u64; 2] {
    ends(slot).map(|word| word.load(Ordering::Relaxed))
}

impl Hand<'_> {
    fn take(&mut self) {
        let slot = self.owner.allocate().expect("there are slots for all").cast();
        write(slot, self.stamp);
        self.slots.push(slot);
    }

    /// Takes out one of our slots, and checks that no other thread wrote to it.
    fn pick(&mut self, index: usize) -> NonNull<u8> {
        let slot = self.slots.swap_remove(index);
        assert_eq!(read(slot), [self.stamp; 2], "somebody wrote to a slot of ours");
        slot
    }

    fn give(&mut self, index: usize) {
        let slot = self.pick(index);
        write(slot, 0);
        let retires = self.random.below(8) == 0 && self.common.may_retire();
        // SAFETY: ours until it is deallocated or retired, which happens once.
        unsafe {
            if retires {
                self.owner.retire(slot);
            } else {
                self.owner.deallocate(slot);
            }
        }
    }

    /// Publishes one of our slots in place of another, which is retired.
    fn publish(&mut self, index: usize) {
        if !self.common.may_retire() {
            return;
        }
        let slot = self.pick(index);
        // A value that no other thread writes, nor this one at another time.
        write(slot, self.stamp << 32 | self.random.0 >> 32);
        let place = &self.common.places[self.random.below(PLACES)];
        if let Some(old) = NonNull::new(place.swap(slot.cast().as_ptr(), Ordering::AcqRel)) {
            // SAFETY: unreachable for new readers, and this thread alone gives it back.
            unsafe { self.owner.retire(old.cast()) };
        }
    }

    /// Enters, sometimes twice, and reads published slots.
    fn read(&mut self, reader: usize) {
        let now = self.common.retired.load(Ordering::SeqCst);
        self.common.entered[reader].store(now, Ordering::SeqCst);
        let (twice, first) = (self.random.below(2) == 0, self.random.below(PLACES));
        for place in (0..4).map(|step| &self.common.places[(first + step) % PLACES]) {
            let outer = twice.then(|| self.owner.enter());
            let guard = self.owner.enter();
            drop(outer);
            let found = guard.protect(|| place.load(Ordering::Acquire));
            if let Some(slot) = NonNull::new(found) {
                let before = read(slot.cast());
                (0..self.random.below(200)).for_each(|_| std::hint::spin_loop());
                if self.random.below(16) == 0 {
                    std::thread::yield_now();
                }
                let after = read(slot.cast());
                assert_eq!(before, [before[0]; 2], "a slot was used again under a reader");
                assert_eq!(before, after, "a slot was used again under a reader");
                self.common.reads.fetch_add(1, Ordering::Relaxed);
            }
            drop(guard);
        }
        self.common.entered[reader].store(u64::MAX, Ordering::SeqCst);
    }

    /// Up to 400 operations: one by one, in bursts, or in pairs.
    fn work(&mut self) -> u64 {
        let style = self.random.below(4);
        let steps = 1 + self.random.below(400);
        for step in 0..steps {
            let fill = match style {
                0 => self.slots.len() * 2 < self.most,
                1 => true,
                2 => false,
                _ => self.random.below(2) == 0,
            };
            if self.slots.is_empty() || fill && self.slots.len() < self.most {
                self.take();
                continue;
            }
            let index = self.random.below(self.slots.len());
            match self.reader {
                Some(reader) if step % 16 == 0 => self.read(reader),
                // Without readers no slots are set aside for publishing.
                _ if !self.common.entered.is_empty() && step % 32 == 1 => self.publish(index),
                _ => self.give(index),
            }
        }
        steps as u64
    }
}

fn seconds() -> u64 {
    let wish = std::env::var("HAMMER_SECONDS").ok().and_then(|text| text.parse().ok());
    let full = std::env::var_os("PAGEHEAP_TEST_FULL").is_some();
    wish.unwrap_or(match (full, cfg!(debug_assertions)) {
        (true, _) => 60,
        (false, true) => 1,
        (false, false) => 3,
    })
}

fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .unwrap_or(0)
        * System.granule()
}

/// The parameters of a run.
struct Anvil {
    threads: usize,
    /// How many of these read what others publish.
    readers: usize,
    bytes: usize,
    seconds: u64,
}

/// Of each thread's share of the slots: how many retired slots its shard may keep, and how many slots may be waiting
/// for readers.
const KEPT: usize = 64;
const WAITING: usize = 64;

/// Threads and their stacks, once all have started.
const STACKS: usize = 32 << 20;

/// How much more may be resident in the second half than in the first.
const DRIFT: usize = 8 << 20;

/// Waits for the given time. Returns the peak resident size in each half.
fn watch(seconds: u64) -> [usize; 2] {
    let (began, time) = (Instant::now(), Duration::from_secs(seconds));
    let mut most = [0; 2];
    while began.elapsed() < time {
        std::thread::sleep(time / 40);
        let half = usize::from(began.elapsed() >= time / 2);
        most[half] = most[half].max(resident());
    }
    most
}

/// A list whose slots have all been written to, and their number.
fn prepare(threads: usize, bytes: usize) -> (ShardedFreeList, usize) {
    let layout = Layout::from_size_align(SLOT, 8).unwrap();
    let config = ArenaConfig::new().limit(bytes).prealloc(bytes);
    let list = ShardedFreeList::with_config(layout, threads, config).unwrap();
    let all: Vec<_> = std::iter::from_fn(|| list.allocate().ok()).collect();
    let slots = all.len();
    // SAFETY: allocated here.
    all.into_iter().for_each(|slot| unsafe {
        slot.cast::<u8>().write_bytes(0, SLOT);
        list.deallocate(slot.cast());
    });
    (list, slots)
}

fn hammer(anvil: &Anvil) {
    let &Anvil {
        threads,
        readers,
        bytes,
        seconds,
    } = anvil;
    let (list, slots) = prepare(threads, bytes);
    // Without readers nothing waits, all threads can take what shards keep, and nothing is published.
    let aside = if readers == 0 { 0 } else { KEPT + WAITING };
    let most = slots / threads - aside;
    let common = Common::new(threads, readers);
    let before = resident();
    let peaks = std::thread::scope(|scope| {
        for thread in 0..threads {
            let (list, common) = (&list, &common);
            scope.spawn(move || {
                let mut hand = Hand {
                    owner: list.owner().expect("a shard for each"),
                    common,
                    reader: (thread < readers).then_some(thread),
                    stamp: 0xA110_C000 + thread as u64,
                    slots: Vec::with_capacity(most),
                    most,
                    random: Random(0x9E37_79B9_7F4A_7C15 ^ (thread as u64 + 1) << 20),
                };
                while !common.end.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    common.operations.fetch_add(hand.work(), Ordering::Relaxed);
                    let took = began.elapsed().as_micros() as u64;
                    common.longest.fetch_max(took, Ordering::Relaxed);
                }
                while !hand.slots.is_empty() {
                    hand.give(0);
                }
            });
        }
        let peaks = watch(seconds);
        common.end.store(true, Ordering::Relaxed);
        peaks
    });
    for place in &common.places {
        if let Some(slot) = NonNull::new(place.swap(std::ptr::null_mut(), Ordering::AcqRel)) {
            // SAFETY: no other thread is left.
            unsafe { list.deallocate(slot.cast()) };
        }
    }
    let millions = common.operations.into_inner() as f64 / 1e6;
    let grown = peaks.map(|peak| peak.saturating_sub(before));
    let (retired, reads) = (common.retired.into_inner(), common.reads.into_inner());
    println!(
        "{threads} threads, {slots} slots, {most} for each: {millions:.0} M operations, {:.1} M/s; {retired} retired, \
         {reads} reads; {} gatherings; resident {:?} KiB more; longest {} us",
        millions / seconds as f64,
        list.gatherings(),
        grown.map(|bytes| bytes >> 10),
        common.longest.into_inner(),
    );
    assert!(retired > 0 && (reads > 0 || readers == 0));
    // The list's own memory was all written, so it was resident before.
    if bytes == BYTES {
        assert!(grown[0].max(grown[1]) < STACKS, "resident memory grew by {grown:?}");
        assert!(grown[1] < grown[0] + DRIFT, "resident memory grows: {grown:?}");
    }
    let again = std::iter::from_fn(|| list.allocate().ok()).count();
    assert_eq!(again, slots, "all slots can be had afterwards");
}

/// In a process of its own, so that the resident memory of other tests does not count.
#[test]
fn nobody_is_refused_and_nothing_is_lost_under_the_hammer() {
    if !child::is_one() {
        return child::runs("hammer::nobody_is_refused_and_nothing_is_lost_under_the_hammer");
    }
    hammer(&Anvil {
        threads: 256,
        readers: 16,
        bytes: BYTES,
        seconds: seconds(),
    });
}

#[test]
fn nobody_is_refused_the_last_slot() {
    // As many slots as the threads may hold at most. A thread that asks holds one less than its share, so one is free.
    hammer(&Anvil {
        threads: 32,
        readers: 0,
        bytes: 256 << 10,
        seconds: 1,
    });
}
