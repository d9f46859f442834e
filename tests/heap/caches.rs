//! Caches: handles and shards.

use super::*;

#[test]
fn a_cache_serves_from_the_lowest_word() {
    let heap = heap(4096);
    take(&heap, 130);
    let cache = heap.cache().expect("a cache");
    let take_cached = |pages| cache.allocate(PageCount(pages)).map(numbers);
    assert_eq!(take_cached(1), Some((130, 1)));
    assert_eq!(take(&heap, 1), Some((192, 1)), "the word is the cache's");
    assert_eq!(take_cached(16), Some((131, 16)));
    assert_eq!(take_cached(17), Some((193, 17)), "too long for a cache");
    assert_eq!(take_cached(45), Some((210, 45)));
    assert_eq!(heap.stats().refills, 1);
    assert_eq!(heap.stats().cached, PageCount(192 - 147));
    check(&heap, 512, 512 - 255);
}

#[test]
fn pages_freed_into_a_cache_come_back_from_it() {
    let heap = heap(4096);
    let cache = heap.cache().expect("a cache");
    let [a, b] = [1, 2].map(|pages| cache.allocate(PageCount(pages)).expect("room"));
    // SAFETY: pages of a simulated source are numbers.
    unsafe { cache.free(a) };
    assert_eq!(cache.allocate(PageCount(1)), Some(a));
    // SAFETY: as above.
    unsafe { cache.free(b) };
    assert_eq!(heap.stats().cached, PageCount(63));
    assert_eq!(heap.stats().flushes, 0);
}

#[test]
fn pages_of_another_word_gather_and_leave_together() {
    let heap = heap(4096);
    take(&heap, 256);
    let cache = heap.cache().expect("a cache");
    let free = |start, pages| {
        // SAFETY: pages of a simulated source are numbers.
        let freed = unsafe { cache.try_free(run(start, pages)) };
        assert_eq!(freed, Ok(()));
    };
    free(100, 3);
    free(110, 5);
    assert_eq!((heap.stats().cached.0, heap.stats().flushes), (8, 0));
    check(&heap, 512, 256);
    free(200, 1);
    assert_eq!((heap.stats().cached.0, heap.stats().flushes), (1, 1));
    free(120, 20);
    assert_eq!(heap.stats().cached.0, 1, "a run over a border goes straight home");
    check(&heap, 512, 256 + 28);
    cache.flush();
    check(&heap, 512, 256 + 29);
}

#[test]
fn a_cache_flushes_when_dropped() {
    let heap = heap(4096);
    let cache = heap.cache().expect("a cache");
    cache.allocate(PageCount(1)).expect("room");
    assert_eq!(heap.stats().cached.0, 63);
    drop(cache);
    assert_eq!(heap.stats().cached.0, 0);
    check(&heap, 512, 511);
}

#[test]
fn a_cache_flushes_itself_before_it_says_no() {
    let heap = heap(64);
    let cache = heap.cache().expect("a cache");
    assert_eq!(cache.allocate(PageCount(1)).map(numbers), Some((0, 1)));
    assert_eq!(cache.allocate(PageCount(60)).map(numbers), Some((1, 60)));
    assert_eq!(cache.allocate(PageCount(4)), None);
    assert_eq!(cache.allocate(PageCount(3)).map(numbers), Some((61, 3)));
    assert_eq!(cache.allocate(PageCount(1)), None);
    check(&heap, 64, 0);
}

#[test]
fn a_cache_flushes_what_was_freed_into_its_buffer_before_it_says_no() {
    let heap = heap(128);
    take(&heap, 128);
    let cache = heap.cache().expect("a cache");
    // SAFETY: pages of a simulated source are numbers.
    unsafe { cache.free(run(70, 20)) };
    assert_eq!(take(&heap, 1), None, "they are in the cache");
    assert_eq!(cache.allocate(PageCount(20)).map(numbers), Some((70, 20)));
}

#[test]
fn who_runs_out_calls_on_other_caches() {
    let heap = heap(64);
    let cache = heap.cache().expect("a cache");
    cache.allocate(PageCount(1)).expect("room");
    assert_eq!(
        take(&heap, 1),
        None,
        "63 are in the cache, and its owner has not come by"
    );
    assert_eq!(cache.allocate(PageCount(1)).map(numbers), Some((1, 1)), "its fast path");
    assert_eq!(cache.allocate(PageCount(17)).map(numbers), Some((2, 17)), "heeded here");
    assert_eq!(heap.stats().cached.0, 0);
    assert_eq!(take(&heap, 45), Some((19, 45)));
}

#[test]
fn as_many_caches_as_were_asked_for() {
    let heap = over(Simulated::new(4096), Config::new(1 << 24).caches(3));
    let [first, _second, third] = [(); 3].map(|()| heap.cache().expect("a cache"));
    assert!(heap.cache().is_none());
    drop(first);
    let again = heap.cache().expect("the place of the first");
    assert!(heap.cache().is_none());
    drop((again, third));
    assert!(heap.cache().is_some());
    let none = over(Simulated::new(4096), Config::new(1 << 24).caches(0));
    assert!(none.cache().is_none());
}

#[test]
fn a_thousand_caches() {
    let heap = over(Simulated::new(4096), Config::new(1 << 30).caches(1000));
    let caches: Vec<_> = (0..1000).map(|_| heap.cache().expect("a cache")).collect();
    for (index, cache) in caches.iter().enumerate() {
        assert_eq!(cache.allocate(PageCount(1)).map(numbers), Some((index * 64, 1)));
    }
    assert_eq!(heap.stats().cached.0, 63_000);
    heap.check().expect("no page in two of them");
    drop(caches);
    assert_eq!(heap.stats().in_use.0, 1000);
}

#[test]
fn shards_are_named_by_number() {
    let heap = over(Simulated::new(4096), Config::new(1 << 24).shards(2));
    let on = |shard, pages| heap.allocate_on(shard, PageCount(pages)).map(numbers);
    assert_eq!(on(0, 1), Some((0, 1)));
    assert_eq!(on(1, 1), Some((64, 1)));
    assert_eq!(on(2, 1), Some((1, 1)), "modulo");
    assert_eq!(on(usize::MAX, 1), Some((65, 1)));
    assert_eq!(on(0, 100), Some((128, 100)));
    // SAFETY: pages of a simulated source are numbers.
    unsafe { heap.free_on(0, run(64, 2)) };
    assert_eq!(heap.stats().cached.0, 62 + 62 + 2);
    check(&heap, 512, 512 - 228);
    heap.flush_shards();
    assert_eq!(heap.stats().cached.0, 0);
    check(&heap, 512, 512 - 102);
}

#[test]
fn without_shards_a_number_is_the_heap() {
    let heap = heap(512);
    assert_eq!(heap.allocate_on(7, PageCount(3)).map(numbers), Some((0, 3)));
    // SAFETY: pages of a simulated source are numbers.
    unsafe { heap.free_on(3, run(0, 3)) };
    heap.flush_shards();
    check(&heap, 512, 512);
}

#[test]
fn shards_are_flushed_before_anybody_runs_out() {
    let heap = over(Simulated::new(4096), Config::new(128 * PAGE).shards(2));
    heap.allocate_on(0, PageCount(1)).expect("room");
    heap.allocate_on(1, PageCount(1)).expect("room");
    assert_eq!(take(&heap, 63), Some((1, 63)));
    assert_eq!(take(&heap, 63), Some((65, 63)));
    let again = over(Simulated::new(4096), Config::new(128 * PAGE).shards(2));
    again.allocate_on(0, PageCount(1)).expect("room");
    again.allocate_on(1, PageCount(1)).expect("room");
    let both = again.allocate_on(1, PageCount(63)).map(numbers);
    assert_eq!(both, Some((65, 63)), "by a shard: its own first");
    assert_eq!(
        again.allocate_on(1, PageCount(63)).map(numbers),
        Some((1, 63)),
        "then the others'"
    );
}

/// Regression: growth lacked just the pages that a shard held at the end of the heap. After the flush, nothing tried
/// again.
#[test]
fn pages_that_shards_had_at_the_end_count_for_growth() {
    type Want = fn(&PageHeap<Simulated>) -> Option<PageRun>;
    let wants: [(&str, Want); 4] = [
        ("plain", |heap| heap.allocate(PageCount(551))),
        ("aligned", |heap| {
            let allocation = heap.allocate_aligned(PageCount(551), PAGE)?;
            Some(allocation.run)
        }),
        ("by another shard", |heap| heap.allocate_on(1, PageCount(551))),
        ("by a cache", |heap| heap.cache()?.allocate(PageCount(551))),
    ];
    for limit in [None, Some(PageCount(1000))] {
        for (name, want) in wants {
            let config = Config::new(limit.map_or(1000, |_| 4096) * PAGE).shards(2).caches(1);
            let heap = over(Simulated::new(4096), limit.map_or(config, |limit| config.limit(limit)));
            take(&heap, 448);
            assert_eq!(heap.allocate_on(0, PageCount(1)).map(numbers), Some((448, 1)));
            assert_eq!((heap.stats().grown.0, heap.stats().cached.0), (512, 63));
            assert_eq!(want(&heap).map(numbers), Some((449, 551)), "{name}, {limit:?}");
            check(&heap, 1000, 0);
            assert_eq!((want(&heap), heap.stats().refusals), (None, 1), "{name}: all is taken");
        }
    }
}

#[test]
fn stats_say_what_happened() {
    let heap = over(Simulated::new(4096), Config::new(1 << 24).shards(1));
    let cache = heap.cache().expect("a cache");
    cache.allocate(PageCount(2)).expect("room");
    take(&heap, 100);
    cache.flush();
    heap.scavenge(PageCount(usize::MAX));
    take(&heap, 1 << 20);
    let stats = heap.stats();
    let parts = (stats.in_use.0, stats.cached.0, stats.free.0, stats.grown.0);
    assert_eq!(parts, (102, 0, 410, 512));
    assert_eq!(stats.bytes_taken(), 102 * heap.page_bytes());
    assert_eq!(
        (stats.refills, stats.flushes, stats.growths, stats.refusals),
        (1, 1, 1, 0)
    );
    assert_eq!(
        (stats.calls.reserve, stats.calls.commit, stats.calls.release),
        (2, 0, 0)
    );
    assert_eq!(
        stats.calls.prepare as usize,
        heap.source().calls(pageheap::source::Verb::Prepare)
    );
    let text = stats.to_string();
    for part in [
        "512 of 8192 bytes, 4.0 MiB",
        "MiB, soft none\n",
        "102",
        "410",
        "refills           1",
        "reserve 2",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    heap.set_soft_limit(PageCount(256));
    let text = heap.stats().to_string();
    assert!(text.contains("MiB, soft 2.0 MiB\n"), "{text}");
}

/// Caches that are refilled at the same time use chunks of their own, from the lowest on; and each all of its chunk
/// before it goes on, to where no other is. What they cannot have apart they get the ordinary way.
#[test]
fn caches_apart_have_a_chunk_each() {
    const CHUNK: usize = 8;
    let heap = heap(4096);
    let all = take(&heap, 5 * 512).expect("room");
    give(&heap, all.0, all.1);
    let set = heap.free_set();
    let mut taken: [Vec<usize>; 3] = Default::default();
    let mut claim = |cache: usize| {
        let last = taken[cache].last().copied().unwrap_or(0);
        let word = set.claim_word_apart(cache as u32 + 1, last)?;
        assert_eq!(word.free, u64::MAX);
        taken[cache].push(word.index);
        Some(())
    };
    for _ in 0..CHUNK {
        (0..3).for_each(|cache| claim(cache).expect("a chunk for each"));
    }
    // Two are left for three.
    for _ in 0..CHUNK {
        [2, 0].iter().for_each(|&cache| claim(cache).expect("a chunk for each"));
    }
    assert!([0, 1, 2].iter().all(|&cache| claim(cache).is_none()));
    let chunks = |words: &[usize]| -> Vec<_> { words.chunks(CHUNK).map(|words| words[0] / CHUNK).collect() };
    assert_eq!(
        taken.each_ref().map(|words| chunks(words)),
        [vec![0, 4], vec![1], vec![2, 3]]
    );
    for words in &taken {
        assert!(
            words
                .iter()
                .zip(&words[1..])
                .all(|(one, next)| next - one == 1 || next % CHUNK == 0)
        );
    }
    let words = taken.into_iter().flatten();
    words.for_each(|word| give(&heap, word * 64, 64));
    // The hint is where it was: nobody else has noticed anything.
    assert_eq!(take(&heap, 1), Some((0, 1)));
    check(&heap, 5 * 512, 5 * 512 - 1);
}

/// Its own berth, left behind, keeps a cache from nothing.
#[test]
fn a_cache_that_comes_back_finds_its_chunk() {
    let heap = heap(4096);
    let all = take(&heap, 3 * 512).expect("room");
    give(&heap, all.0, all.1);
    let set = heap.free_set();
    let one = set.claim_word_apart(1, 0).expect("a word");
    let two = set.claim_word_apart(2, 0).expect("a word");
    assert_eq!((one.index, two.index), (0, 8));
    // Meanwhile it was elsewhere.
    assert_eq!(set.claim_word_apart(1, 16).map(|word| word.index), Some(1));
    set.leave_apart(1, 1);
    assert_eq!(
        set.claim_word_apart(3, 0).map(|word| word.index),
        Some(2),
        "nobody is there"
    );
}

/// A thread that only frees does not drive a cache from the lowest word.
#[test]
fn beside_a_thread_that_frees_first_fit_stays() {
    let heap = heap(1 << 16);
    let all = take(&heap, 1 << 16).expect("room");
    give(&heap, all.0, all.1 / 2);
    let set = heap.free_set();
    let (sender, receiver) = std::sync::mpsc::sync_channel::<usize>(512);
    std::thread::scope(|scope| {
        scope.spawn(|| receiver.into_iter().for_each(|word| give(&heap, word * 64, 64)));
        for _ in 0..100_000 {
            if let Some((word, met)) = set.claim_word_within(8) {
                assert_ne!(met, Some(true));
                sender.send(word.index).expect("somebody frees");
            }
        }
        drop(sender);
    });
}
