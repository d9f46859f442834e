//! A run under release belongs to no thread, and no thread waits for it unless it was configured to.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use pageheap::source::{Contents, OverSystem, Refused, Source as _, System, Verbs};
use pageheap::{Config, Heap, PageCount, PageHeap, PageIndex, PageRun};

/// Where a release waits: at the first door for the observer, at the second until the observer lets it go.
type Doors = [Barrier; 2];

/// The system, but a release that finds doors stops half way.
#[derive(Default)]
struct Slow {
    doors: Mutex<Option<&'static Doors>>,
    /// The most bytes in one call.
    most: AtomicUsize,
    /// Whether a release that has passed doors is refused.
    refuses: AtomicBool,
}

// SAFETY: the verb is the system's, delayed.
unsafe impl Verbs for Slow {
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        self.most.fetch_max(bytes, Ordering::Relaxed);
        let doors = self.doors.lock().unwrap().take();
        if let Some(doors) = doors {
            doors.iter().for_each(|door| _ = door.wait());
            if self.refuses.load(Ordering::Relaxed) {
                return Err(Refused);
            }
        }
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }
}

type Source = &'static OverSystem<Slow>;

/// A source without doors.
fn source() -> Source {
    Box::leak(Box::default())
}

/// Stops the next release until the second door is passed.
fn stop_the_next(source: Source) -> &'static Doors {
    let doors = Box::leak(Box::new([Barrier::new(2), Barrier::new(2)]));
    *source.doors.lock().unwrap() = Some(doors);
    doors
}

/// How often a thread asks that must be refused.
const ASKED: usize = 200;

/// What `ask` returns while `release` is inside the source's verb: `None` if it does not return in that time.
fn meanwhile<T: Send, R: Send>(
    source: Source,
    release: impl FnOnce() -> T + Send,
    ask: impl FnOnce() -> R + Send,
) -> Option<R> {
    let [inside, on] = stop_the_next(source);
    thread::scope(|scope| {
        scope.spawn(release);
        inside.wait();
        let (say, hear) = mpsc::channel();
        scope.spawn(move || say.send(ask()));
        let answer = hear.recv_timeout(Duration::from_secs(30)).ok();
        on.wait();
        answer
    })
}

/// A heap of 64 pages, which is its limit; the last `free` are free.
fn of_64_pages(free: usize, config: Config) -> PageHeap<Source> {
    let heap = PageHeap::new(source(), config).expect("a heap");
    let run = heap.allocate(PageCount(64)).expect("room");
    let free = run.split_at(PageCount(64 - free)).map_or(run, |(_, free)| free);
    // SAFETY: the run is ours.
    unsafe { heap.free(free) };
    heap
}

/// The whole heap was free, no thread had allocated anything, and yet a page was refused: a false "no", twice proved.
/// So not all of it is released at once, and a thread that asks is served without waiting.
#[test]
fn no_refusal_while_pages_of_a_heap_at_its_limit_are_being_released() {
    let heap = of_64_pages(64, Config::new(64 << 13));
    let release = || heap.scavenge(PageCount(64));
    let answer = meanwhile(heap.source(), release, || heap.allocate(PageCount(56)));
    assert!(answer.flatten().is_some(), "{answer:?}, with 64 of 64 pages free");
}

/// A run extended so as to split no huge page was nearly all of a small heap. So was any run of a heap with room to
/// grow, which was no help if its source had no more memory.
#[test]
fn no_more_is_in_hand_than_an_eighth_or_a_huge_page() {
    for (pages, free) in [
        (512, 511),
        (600, 400),
        (1024, 511),
        (1024, 700),
        (2400, 511),
        (2400, 2399),
        (300, 299),
    ] {
        for reserve in [pages, 4 * pages] {
            let source = source();
            let heap = PageHeap::new(source, Config::new(reserve << 13)).expect("a heap");
            let run = heap.allocate(PageCount(pages)).expect("room");
            let grown = heap.stats().grown.0;
            let (low, high) = run.split_at(PageCount(free)).unwrap();
            // SAFETY: allocated here.
            unsafe { heap.free(low) };
            let released = heap.scavenge(PageCount(usize::MAX));
            assert_eq!(released, PageCount(free), "not all has gone");
            let most = (grown / 8).max(if grown < 512 { 0 } else { 256 });
            let seen = source.most.load(Ordering::Relaxed) >> 13;
            assert!(seen <= most, "{free} of {pages} free: {seen} pages in hand, not {most}");
            // SAFETY: allocated here.
            unsafe { heap.free(high) };
        }
    }
}

/// No allocation waits for a release, even if the pages under release are the only free ones. The test asks so
/// often that even fractions of a second would add up.
#[test]
fn who_has_not_asked_to_wait_is_refused_at_once() {
    let heap = of_64_pages(8, Config::new(64 << 13));
    let release = || heap.scavenge(PageCount(64));
    let ask = || (0..ASKED).all(|_| heap.allocate(PageCount(1)).is_none());
    let refused = meanwhile(heap.source(), release, ask);
    assert_eq!(
        refused,
        Some(true),
        "waited, or got a page that was in the source's hands"
    );
    assert!(heap.allocate(PageCount(8)).is_some(), "the refusal lost pages");
}

#[test]
fn who_has_asked_to_wait_gets_them() {
    let heap = of_64_pages(8, Config::new(64 << 13).wait_for_release(true));
    let [inside, on] = stop_the_next(heap.source());
    let answer = thread::scope(|scope| {
        scope.spawn(|| heap.scavenge(PageCount(64)));
        inside.wait();
        // Asked in the middle of the release, which ends once the thread has had time to look.
        let asker = scope.spawn(|| heap.allocate(PageCount(1)));
        thread::sleep(Duration::from_millis(100));
        on.wait();
        asker.join().unwrap()
    });
    assert!(answer.is_some(), "refused, with 8 of 64 pages free");
}

const BLOCK: Layout = Layout::new::<[u8; 100 << 10]>();
const SMALL: Layout = Layout::new::<[u64; 3]>();

fn objects(config: Config) -> (Heap<Source>, Source) {
    let source = source();
    (Heap::new(source, config).expect("a heap"), source)
}

/// A refused thread waited for the scavenger's turn, to reach what sleeping threads keep, and for the scavenger's pages
/// in hand; and it did so holding the lock of all the heap's threads.
#[test]
fn who_is_refused_an_object_does_not_wait_for_the_scavenger() {
    let (heap, source) = objects(Config::new(32 << 20));
    let mut blocks: Vec<_> = std::iter::from_fn(|| heap.allocate(BLOCK)).collect();
    // SAFETY: the heap's block, and ours.
    unsafe { heap.free(blocks.pop().unwrap(), BLOCK) };
    let ask = || (0..ASKED).all(|_| heap.allocate(BLOCK).is_none());
    let refused = meanwhile(source, || heap.release(usize::MAX), ask);
    assert_eq!(refused, Some(true), "waited, or got what was in the source's hands");
    assert!(heap.allocate(BLOCK).is_some(), "the refusal lost memory");
}

/// A thread over the soft limit released free memory while it held the lock of all the heap's threads.
#[test]
fn a_thread_that_assists_keeps_nobody_waiting() {
    let (heap, source) = objects(Config::new(256 << 20).soft_limit(PageCount(2048)));
    let blocks: Vec<_> = (0..128).map(|_| heap.allocate(BLOCK).expect("room")).collect();
    for block in blocks.iter().step_by(2) {
        // SAFETY: the heap's block, and ours.
        unsafe { heap.free(*block, BLOCK) };
    }
    let large = Layout::new::<[u8; 4 << 20]>();
    let assist = || heap.allocate(large).is_some();
    let served = meanwhile(source, assist, || heap.allocate(SMALL).is_some());
    assert_eq!(served, Some(true), "waited for another thread's release");
    assert!(
        heap.stats().pages.backed <= PageCount(2048 + 2048 / 20),
        "nobody assisted"
    );
}

/// So did a thread that had 64 MiB zeroed by giving them back.
#[test]
#[cfg_attr(windows, ignore = "committed pages are overwritten")]
fn a_thread_that_wants_zeroes_keeps_nobody_waiting() {
    let (heap, source) = objects(Config::new(256 << 20));
    let large = Layout::new::<[u8; 64 << 20]>();
    let block = heap.allocate(large).expect("room");
    // SAFETY: the heap's block, ours, and this long.
    unsafe {
        block.write_bytes(1, large.size());
        heap.free(block, large);
    }
    let zeroed = || {
        let block = heap.allocate_zeroed(large).expect("room");
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), large.size()) };
        assert!(bytes.iter().step_by(4096).all(|&byte| byte == 0));
    };
    let served = meanwhile(source, zeroed, || heap.allocate(SMALL).is_some());
    assert_eq!(served, Some(true), "waited for another thread's release");
}

/// A shard was in use while its user released memory for a soft limit, so what else was in its cache was out of reach.
#[test]
fn while_who_uses_a_shard_releases_its_cache_is_within_reach() {
    let heap = PageHeap::new(source(), Config::new(128 << 13).shards(1)).expect("a heap");
    let all = heap.allocate(PageCount(128)).expect("room");
    // SAFETY: this thread's.
    unsafe { heap.free(all) };
    // The upper half stays scavenged for the shard's word; of the lower one something can be released.
    let upper = PageRun::new(PageIndex(64), PageCount(64)).expect("a run");
    let upper = heap.allocate_at(upper).expect("free").run;
    heap.scavenge(PageCount(64));
    // SAFETY: as above.
    unsafe { heap.free(upper) };
    heap.set_soft_limit(PageCount(8));
    let ask = || {
        let cached = heap.stats().cached.0;
        heap.set_soft_limit(PageCount(usize::MAX));
        let got = std::iter::from_fn(|| heap.allocate(PageCount(1))).count();
        (cached, got)
    };
    let use_shard = || heap.allocate_on(0, PageCount(1));
    let (cached, got) = meanwhile(heap.source(), use_shard, ask).expect("an answer");
    assert!(
        cached >= 60 && got > cached,
        "{got} pages could be had, {cached} were in the cache"
    );
}

/// A thread that assists in vain notes at how many pages it may be worthwhile again. It had counted the pages before
/// its scan, and noted that even if most had gone back meanwhile: then nobody assisted any more.
#[test]
fn what_failed_says_nothing_once_memory_has_gone_back() {
    const SOFT: usize = 1000;
    let source = source();
    source.refuses.store(true, Ordering::Relaxed);
    let heap = PageHeap::new(source, Config::new(1 << 30).soft_limit(PageCount(SOFT))).expect("a heap");
    let give = |run| {
        // SAFETY: this thread's, freed once.
        unsafe { heap.free(run) };
    };
    let low = heap.allocate(PageCount(100)).expect("room");
    let live = heap.allocate(PageCount(8000)).expect("room");
    let (hole, _low) = low.split_at(PageCount(1)).expect("two parts");
    give(hole);
    heap.set_soft_limit(PageCount(SOFT));
    let assist = || heap.allocate(PageCount(200));
    let release = || {
        give(live);
        heap.release(PageCount(usize::MAX));
        heap.backed().0
    };
    let left = meanwhile(source, assist, release).expect("nothing waits");
    assert!(left < SOFT, "{left} pages are backed");
    let mut most = 0;
    for pages in (250..800).step_by(50) {
        let next = heap.allocate(PageCount(pages)).expect("room");
        let (rest, _) = next.split_at(PageCount(pages - 1)).expect("two parts");
        give(rest);
        most = most.max(heap.backed().0);
    }
    assert!(most <= SOFT + 256, "{most} pages were backed");
}
