//! Figures that must agree do, and are machine-readable.

use std::alloc::{GlobalAlloc, Layout};

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use pageheap::source::{Contents, Failure, OverSystem, Purpose, Refused, Reservation, Source, System, Verb, Verbs};
use pageheap::{ClassStats, Figure, GlobalHeap, GlobalStats, HugePages, PageCount, PageUse, Snapshot, Stats};
use serde_json::Value;

use super::*;

static HEAP: GlobalHeap = new_heap().background(false);

/// Every sum that relates figures.
#[track_caller]
fn agree(snapshot: &Snapshot) {
    let (stats, pages) = (&snapshot.stats, &snapshot.stats.pages);
    assert_eq!(
        pages.grown.0,
        pages.in_use.0 + pages.cached.0 + pages.free.0,
        "{snapshot}"
    );
    assert_eq!(
        pages.backed.0,
        pages.grown.0 - pages.scavenged.0 - pages.holes.0,
        "{snapshot}"
    );
    assert!(pages.peak_backed >= pages.backed && pages.in_use >= stats.span_pages);
    assert!(pages.released_lazily <= pages.released);
    let sum = |figure: fn(&pageheap::ClassStats) -> usize| snapshot.classes().iter().map(figure).sum::<usize>();
    assert_eq!(sum(|class| class.spans), stats.spans);
    assert_eq!(sum(|class| class.span_pages.0), stats.span_pages.0);
    assert_eq!(
        sum(|class| class.live * class.slot_bytes),
        stats.slot_bytes,
        "{snapshot}"
    );
    assert_eq!(
        sum(|class| class.cached * class.slot_bytes),
        stats.magazine_bytes + stats.stored_bytes
    );
    assert_eq!(
        snapshot
            .classes()
            .iter()
            .map(|class| class.refills + class.flushes)
            .sum::<u64>(),
        stats.batches
    );
    for class in snapshot.classes() {
        let slots = class.live + class.cached + class.racks + class.free;
        assert!(
            slots * class.slot_bytes <= class.span_pages.0 * pages.page_bytes,
            "{class:?}"
        );
        assert!(class.fragmentation(pages.page_bytes) <= 100 && class.peak_span_pages >= class.span_pages);
        // Spans that are no longer there have been released.
        assert!(
            class.span_pages == class.peak_span_pages || class.released_spans > 0,
            "{class:?}"
        );
        let flags_or_row = match class.slot_bytes {
            ..64 => 128,
            64..=1024 => 0,
            1025.. => 8,
        };
        assert_eq!(
            class.metadata_bytes,
            class.span_pages.0 * (32 + flags_or_row),
            "{class:?}"
        );
    }
    assert!(sum(|class| class.metadata_bytes) <= pages.metadata_bytes, "{snapshot}");
}

/// Half of a gigabyte is in blocks: a hundred times that does not fit 32 bits.
#[test]
fn much_has_its_hundredths() {
    let mut class = ClassStats::default();
    (class.slot_bytes, class.span_pages, class.live) = (1024, PageCount(1 << 17), 1 << 19);
    assert_eq!(class.fragmentation(8192), 50);
    let mut whole = Snapshot::default();
    (whole.stats.pages.backed, whole.stats.pages.page_bytes) = (PageCount(1 << 17), 8192);
    whole.stats.slot_bytes = 3 << 28;
    assert_eq!(whole.fragmentation(), 25);
}

/// For slots with marks and slots with flags; the second time, the spans released the first time still count.
#[test]
fn what_describes_a_class_and_the_spans_that_went_are_counted() {
    static HEAP: GlobalHeap = new_heap().background(false);
    // Classes whose slots are not used as racks. The last has one span, which is released on its own.
    for (size, count) in [(300, 5000), (300, 5000), (9000, 5000), (9000, 5000), (700, 1)] {
        fill_and_empty(&HEAP, Layout::from_size_align(size, 8).unwrap(), count);
    }
}

/// Makes spans of a class that has none, and releases them all.
fn fill_and_empty(heap: &GlobalHeap, layout: Layout, count: usize) {
    let before = heap.snapshot();
    // SAFETY: the size is not zero; blocks are freed with their layout.
    let blocks: Vec<_> = (0..count).map(|_| unsafe { heap.alloc(layout) }).collect();
    let full = heap.snapshot();
    agree(&full);
    let mut classes = full.classes().iter().zip(before.classes());
    let index = classes
        .position(|(now, then)| now.live == then.live + count)
        .expect("the class");
    let class = |snapshot: &Snapshot| snapshot.classes()[index];
    let made = class(&full);
    assert!(
        made.spans > count / 100 && made.span_pages == made.peak_span_pages && made.metadata_bytes > 0,
        "{full}"
    );
    assert_eq!(made.released_spans, class(&before).released_spans, "{full}");
    // SAFETY: as above.
    blocks
        .into_iter()
        .for_each(|block| unsafe { heap.dealloc(block, layout) });
    heap.flush_thread();
    let spare = heap.snapshot();
    heap.release(usize::MAX);
    let empty = heap.snapshot();
    agree(&empty);
    let left = class(&empty);
    assert_eq!((left.spans, left.metadata_bytes), (0, 0), "{empty}");
    assert_eq!(left.released_spans, made.released_spans + made.spans as u64, "{empty}");
    // A difference reports this even for a class that has nothing left and did nothing else.
    let change = json_of(&empty.since(&spare));
    let classes = change["classes"].as_array().unwrap();
    let told = classes.iter().find(|class| class["slot_bytes"] == made.slot_bytes);
    let released = left.released_spans - class(&spare).released_spans;
    assert_eq!(told.expect("the class")["class_released_spans_total"], released);
    assert!(released > 0, "{spare}");
}

#[test]
fn sums_agree_and_machines_can_read_them() {
    let before = HEAP.snapshot();
    let mut blocks = Vec::new();
    for number in 0..30_000_usize {
        let size = [8, 100, 1000, 9000, 40_000][number % 5] + number % 7;
        let layout = Layout::from_size_align(size, 8).unwrap();
        // SAFETY: the size is not zero; the block is freed with its layout.
        let block = unsafe { HEAP.alloc(layout) };
        // Pages that are never written to are not resident.
        // SAFETY: the first byte of a block that was just allocated.
        unsafe { block.write(1) };
        blocks.push((block, layout));
        if number % 3 == 0 {
            let (block, layout) = blocks.swap_remove(number * 31 % blocks.len());
            // SAFETY: as above.
            unsafe { HEAP.dealloc(block, layout) };
        }
        if number % 5000 == 0 {
            agree(&HEAP.snapshot());
            HEAP.release(1 << 20);
            agree(&HEAP.snapshot());
        }
    }
    let full = HEAP.snapshot();
    agree(&full);
    assert!(full.fragmentation() < 25, "{full}");
    let live: usize = blocks.iter().map(|(_, layout)| layout.size()).sum();
    assert!(full.stats.bytes_in_use() >= live && full.stats.bytes_in_use() <= live + live / 4);
    if cfg!(target_os = "linux") {
        assert!(full.resident > full.stats.pages.backed.0 * 8192 / 8, "{full}");
    }
    // The map agrees.
    let spans = HEAP.map().filter(|entry| matches!(entry.is, PageUse::Span { .. }));
    assert_eq!(
        spans.map(|entry| entry.run.pages().0).sum::<usize>(),
        full.stats.span_pages.0
    );
    // SAFETY: as above.
    blocks
        .into_iter()
        .for_each(|(block, layout)| unsafe { HEAP.dealloc(block, layout) });
    assert!(HEAP.snapshot().fragmentation() > 90, "all is free, and there yet");
    HEAP.flush_thread();
    HEAP.release(usize::MAX);
    let empty = HEAP.snapshot();
    agree(&empty);
    assert!(empty.stats.pages.backed.0 < 20, "{empty}");
    let change = empty.since(&before);
    assert_eq!(
        (change.stats.pages.grown, change.stats.batches),
        (empty.stats.pages.grown, empty.stats.batches)
    );
    assert_eq!(empty.since(&empty).stats.batches, 0);
    machines_can_read(&full);
}

/// As JSON, and as Prometheus text.
fn machines_can_read(full: &Snapshot) {
    let mut json = String::new();
    full.json(&mut json).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["grown_bytes"], full.stats.pages.grown.0 * 8192);
    let limit = HEAP.current_limit().unwrap();
    assert_eq!(
        (&json["limit_bytes"], &json["soft_limit_bytes"]),
        (&limit.into(), &limit.into())
    );
    let classes = json["classes"].as_array().unwrap().iter();
    assert!(classes.filter(|class| class["class_live"] != 0).count() >= 4);

    let mut text = String::new();
    full.prometheus(&mut text).unwrap();
    let mut names = std::collections::HashSet::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("# TYPE ") {
            assert!(names.insert(name.split(' ').next().unwrap().to_owned()), "{name} twice");
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(
                value.parse::<u64>().is_ok() && names.contains(name.split('{').next().unwrap()),
                "{line}"
            );
        }
    }
    assert!(
        names.len() == 50 && full.to_string().contains("resident"),
        "{}",
        names.len()
    );
}

/// A snapshot in which every counter and every gauge has a different value, which grows with `by`.
fn distinct(by: u64) -> Snapshot {
    let mut last = 1000 * by;
    let mut next = move || {
        last += by;
        last
    };
    let mut snapshot = Snapshot::default();
    let stats = &mut snapshot.stats;
    let pages = &mut stats.pages;
    let calls = &mut pages.calls;
    for counter in [
        &mut pages.refills,
        &mut pages.flushes,
        &mut pages.growths,
        &mut pages.refusals,
        &mut pages.released,
        &mut pages.released_lazily,
        &mut pages.scavenge_nanoseconds,
        &mut calls.reserve,
        &mut calls.prepare,
        &mut calls.commit,
        &mut calls.release,
        &mut calls.advise,
        &mut calls.discard,
        &mut calls.unreserve,
        &mut calls.clear,
        &mut calls.barrier,
        &mut stats.batches,
    ] {
        *counter = next();
    }
    for count in [
        &mut pages.limit,
        &mut pages.soft_limit,
        &mut pages.grown,
        &mut pages.in_use,
        &mut pages.cached,
        &mut pages.free,
        &mut pages.scavenged,
        &mut pages.backed,
        &mut pages.peak_backed,
        &mut pages.holes,
        &mut stats.span_pages,
    ] {
        *count = PageCount(next() as usize);
    }
    for number in [
        &mut pages.metadata_bytes,
        &mut stats.spans,
        &mut stats.slot_bytes,
        &mut stats.threads,
        &mut snapshot.resident,
    ] {
        *number = next() as usize;
    }
    pages.page_bytes = 8192;
    snapshot
        .classes_mut()
        .iter_mut()
        .for_each(|class| fill_class(class, &mut next));
    snapshot
}

fn fill_class(class: &mut ClassStats, next: &mut impl FnMut() -> u64) {
    for number in [
        &mut class.slot_bytes,
        &mut class.spans,
        &mut class.span_pages.0,
        &mut class.live,
        &mut class.metadata_bytes,
    ] {
        *number = next() as usize;
    }
    for counter in [&mut class.refills, &mut class.flushes, &mut class.released_spans] {
        *counter = next();
    }
}

fn json_of(snapshot: &Snapshot) -> Value {
    let mut text = String::new();
    snapshot.json(&mut text).unwrap();
    serde_json::from_str(&text).expect("JSON")
}

/// Returns the number of counters. Each is reduced by its earlier value; everything else is as it is now.
fn less(now: &Value, then: &Value, change: &Value) -> usize {
    let mut counters = 0;
    for (name, value) in now.as_object().unwrap() {
        let number = |of: &Value| of[name].as_u64().unwrap();
        if name.ends_with("_total") {
            counters += 1;
            assert_eq!(number(change), value.as_u64().unwrap() - number(then), "{name}");
            assert!(number(change) > 0, "{name}");
        } else if name != "classes" {
            assert_eq!(&change[name], value, "{name}");
        }
    }
    counters
}

#[test]
fn a_difference_is_that_of_every_counter_and_of_nothing_else() {
    let (then, now) = (distinct(3), distinct(5));
    let change = now.since(&then);
    let [then, now, change] = [then, now, change].map(|snapshot| json_of(&snapshot));
    assert_eq!(less(&now, &then, &change), 17);
    let classes = |of: &Value| of["classes"].as_array().unwrap().clone();
    for ((now, then), change) in classes(&now).iter().zip(&classes(&then)).zip(&classes(&change)) {
        assert_eq!(less(now, then, change), 3);
    }
}

/// As JSON and as Prometheus text, each layer reports the figures of the layer below and its own.
#[test]
fn pages_and_objects_have_the_same_figures_by_the_same_names() {
    let snapshot = distinct(7);
    let (mut pages, mut objects) = (String::new(), String::new());
    snapshot.stats.pages.json(&mut pages).unwrap();
    snapshot.stats.json(&mut objects).unwrap();
    let parse = |text: &str| {
        serde_json::from_str::<Value>(text)
            .unwrap()
            .as_object()
            .unwrap()
            .clone()
    };
    let (pages, objects, all) = (parse(&pages), parse(&objects), json_of(&snapshot));
    assert_eq!(
        (pages.len(), objects.len(), all.as_object().unwrap().len()),
        (28, 37, 40)
    );
    assert!(pages.iter().all(|(name, value)| objects[name] == *value));
    assert!(objects.iter().all(|(name, value)| all[name] == *value));
    for (text, figures) in [
        (written(|out| snapshot.stats.pages.prometheus(out)), &pages),
        (written(|out| snapshot.stats.prometheus(out)), &objects),
    ] {
        let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(lines.len(), figures.len());
        for line in lines {
            let (name, value) = line.strip_prefix("pageheap_").unwrap().split_once(' ').unwrap();
            assert_eq!(figures[name].to_string(), value, "{name}");
        }
    }
}

/// A metric may stand in a text only once, so a program with several heaps names them.
#[test]
fn the_metrics_of_a_heap_can_have_a_name_of_its_own() {
    let snapshot = distinct(7);
    for (usual, named) in [
        (
            written(|out| snapshot.prometheus(out)),
            written(|out| snapshot.prometheus_as("arenas", out)),
        ),
        (
            written(|out| snapshot.stats.prometheus(out)),
            written(|out| snapshot.stats.prometheus_as("arenas", out)),
        ),
        (
            written(|out| snapshot.stats.pages.prometheus(out)),
            written(|out| snapshot.stats.pages.prometheus_as("arenas", out)),
        ),
    ] {
        assert_eq!(usual.replace("pageheap_", "arenas_"), named);
        assert!(!named.contains("pageheap"));
    }
}

/// Each metric is there once, with a line for each heap. Without the label of one heap and the lines of all others, the
/// text is what that heap writes by itself.
#[test]
fn several_heaps_share_their_metrics_and_a_label_tells_them_apart() {
    const HEAPS: [(&str, &str); 3] = [("ada", "ada"), ("a\"b\\c\nd", r#"a\"b\\c\nd"#), ("{é=}", "{é=}")];
    let snapshots = [3, 5, 7].map(distinct);
    for (shared, alone) in [
        (
            labelled(&HEAPS, &snapshots, |heaps, out| {
                Snapshot::prometheus_of("pageheap", "tenant", heaps, out)
            }),
            snapshots.map(|snapshot| written(|out| snapshot.prometheus(out))),
        ),
        (
            labelled(&HEAPS, &snapshots.map(|snapshot| snapshot.stats), |heaps, out| {
                GlobalStats::prometheus_of("pageheap", "tenant", heaps, out)
            }),
            snapshots.map(|snapshot| written(|out| snapshot.stats.prometheus(out))),
        ),
        (
            labelled(&HEAPS, &snapshots.map(|snapshot| snapshot.stats.pages), |heaps, out| {
                Stats::prometheus_of("pageheap", "tenant", heaps, out)
            }),
            snapshots.map(|snapshot| written(|out| snapshot.stats.pages.prometheus(out))),
        ),
    ] {
        let heads = |text: &str| text.lines().filter(|line| line.starts_with('#')).count();
        assert_eq!(heads(&shared), heads(&alone[0]));
        for ((_, label), alone) in HEAPS.iter().zip(&alone) {
            let label = format!("tenant=\"{label}\"");
            let mine = shared
                .lines()
                .filter(|line| line.starts_with('#') || line.contains(&label));
            let mine: String = mine.map(|line| format!("{line}\n")).collect();
            let bare = mine
                .replace(&format!("{{{label}}}"), "")
                .replace(&format!("{label},"), "");
            assert_eq!(&bare, alone);
        }
        let lines: usize = alone.iter().map(|text| text.lines().count()).sum();
        assert_eq!(shared.lines().count(), lines - 2 * heads(&alone[0]));
    }
}

/// What is written about heaps with these names.
fn labelled<T: Copy>(
    heaps: &[(&'static str, &str); 3],
    of: &[T; 3],
    write: impl FnOnce(&[(&str, T)], &mut String) -> std::fmt::Result,
) -> String {
    let heaps: Vec<_> = heaps.iter().zip(of).map(|((name, _), of)| (*name, *of)).collect();
    written(|out| write(&heaps, out))
}

/// Of heaps without classes, and of no heap at all.
#[test]
fn what_there_is_nothing_of_has_no_line() {
    let of = |heaps: &[(&str, Snapshot)]| written(|out| Snapshot::prometheus_of("heap", "name", heaps, out));
    let values = |text: &str| text.lines().filter(|line| !line.starts_with('#')).count();
    assert_eq!(values(&of(&[])), 0);
    let new = of(&[("new", Snapshot::default())]);
    assert_eq!(values(&new), Snapshot::default().figures().count());
    assert!(!new.contains("slot="));
}

/// A program that writes another format gets the names, the meanings, the kinds and the values of the texts.
#[test]
fn figures_are_those_of_the_texts() {
    let snapshot = distinct(7);
    let (text, json) = (written(|out| snapshot.prometheus(out)), json_of(&snapshot));
    let class = &snapshot.classes()[3];
    let classes = class.figures(8192).map(|figure| (figure, &json["classes"][3]));
    let whole = snapshot.figures().map(|figure| (figure, &json));
    let all: Vec<_> = whole.chain(classes).collect();
    for (
        Figure {
            name,
            help,
            is_counter,
            value,
            ..
        },
        json,
    ) in &all
    {
        assert_eq!(json[name], *value, "{name}");
        let kind = if *is_counter { "counter" } else { "gauge" };
        let head = format!("# HELP pageheap_{name} {help}.\n# TYPE pageheap_{name} {kind}\n");
        assert_eq!(
            (text.matches(&head).count(), name.ends_with("_total")),
            (1, *is_counter),
            "{name}"
        );
    }
    assert_eq!(all.len(), text.matches("# TYPE").count());
    // Each layer has those of the layer below, and its own.
    let [pages, objects]: [Vec<_>; 2] = [
        snapshot.stats.pages.figures().collect(),
        snapshot.stats.figures().collect(),
    ];
    assert_eq!(pages, objects[..pages.len()]);
    assert!(snapshot.figures().collect::<Vec<_>>().ends_with(&objects));
}

/// A difference of two counts has what is in use now. How much has been added is another question.
#[test]
fn what_was_added_since_an_earlier_count_may_be_negative() {
    static HEAP: GlobalHeap = new_heap().background(false);
    const LAYOUT: Layout = Layout::new::<[u8; 1000]>();
    let allocate = || {
        // SAFETY: the size is not zero.
        let block = unsafe { HEAP.alloc(LAYOUT) };
        NonNull::new(block).unwrap()
    };
    // SAFETY: allocated with this layout, and freed once.
    let free = |block: NonNull<u8>| unsafe { HEAP.dealloc(block.as_ptr(), LAYOUT) };
    free(allocate());
    let before = HEAP.stats();
    let blocks: Vec<_> = (0..100).map(|_| allocate()).collect();
    let full = HEAP.stats();
    let added = full.bytes_added_since(&before);
    assert!((100_000..200_000).contains(&added), "{added}");
    assert_eq!(before.bytes_added_since(&full), -added);
    assert_eq!(full.since(&before).bytes_in_use(), full.bytes_in_use());
    blocks.into_iter().for_each(free);
    assert_eq!(HEAP.stats().bytes_added_since(&before), 0);
    // A thread's structure stays, for the next thread.
    let [first, second] = [(); 2].map(|()| {
        std::thread::spawn(move || free(allocate())).join().unwrap();
        HEAP.stats().bytes_added_since(&before)
    });
    assert_eq!(first, second);
    // 3 KiB with 64-bit pointers.
    assert!((size_of::<usize>() as isize * 200..4 << 10).contains(&first), "{first}");
}

fn written(write: impl FnOnce(&mut String) -> std::fmt::Result) -> String {
    let mut text = String::new();
    write(&mut text).unwrap();
    text
}

/// The calls that a heap reports are those its source received.
#[track_caller]
fn same<const COMMITS: bool>(heap: &PageHeap<Simulated<COMMITS>>) {
    let (calls, asked) = (heap.stats().calls, |verb| heap.source().calls(verb) as u64);
    let told = [
        calls.reserve,
        calls.prepare,
        calls.commit,
        calls.advise,
        calls.unreserve,
    ];
    let counted = [
        Verb::Reserve,
        Verb::Prepare,
        Verb::Commit,
        Verb::Advise,
        Verb::Unreserve,
    ];
    assert_eq!(told, counted.map(asked));
    assert_eq!(calls.release, asked(Verb::Release) + asked(Verb::ReleaseLazily));
}

/// Takes pages in all ways, and gives them back in all ways.
fn use_up<const COMMITS: bool>(heap: &PageHeap<Simulated<COMMITS>>) {
    let cache = heap.cache().unwrap();
    for round in 0..300 {
        let Some(run) = cache.allocate(PageCount(1 + round % 40)) else {
            continue;
        };
        if round % 3 == 0 {
            // SAFETY: just allocated.
            unsafe { cache.free(run) };
        }
        same(heap);
        match round % 50 {
            10 => drop(heap.scavenge(PageCount(20))),
            20 => drop(heap.release(PageCount(20))),
            _ => (),
        }
    }
    same(heap);
}

#[test]
fn calls_are_those_of_the_source_verb_by_verb() {
    let advised = Config::new(64 << 20).huge_pages(HugePages::Advise);
    use_up(&PageHeap::new(Simulated::new(4096), advised.release_lazily(true)).unwrap());
    let committing = PageHeap::new(Simulated::committing(4096), Config::new(64 << 20)).unwrap();
    use_up(&committing);
    assert!(committing.stats().calls.commit > 0);
    // Less is reserved than requested; and the pages are given back when there are no tables for them.
    for refused in [&[0_usize, 1][..], &[1], &[0, 2, 4]] {
        let source = Simulated::new(4096);
        for &after in refused {
            source.fail(Verb::Reserve, Failure::Calls { after, times: 1 });
        }
        let heap = PageHeap::new(source, Config::new(64 << 20)).unwrap();
        assert_eq!(heap.source().failures(Verb::Reserve), refused.len());
        same(&heap);
        use_up(&heap);
    }
    // Tables and pages are refused too, while the heap is being made and afterwards.
    for (verb, failure) in [
        (Verb::Prepare, Failure::Calls { after: 0, times: 1 }),
        (Verb::Prepare, Failure::Calls { after: 3, times: 4 }),
        (Verb::Prepare, Failure::Every(3)),
        (Verb::Release, Failure::Every(2)),
    ] {
        let source = Simulated::new(4096).failing(verb, failure);
        let heap = PageHeap::new(source, Config::new(64 << 20)).unwrap();
        same(&heap);
        use_up(&heap);
        assert!(heap.source().failures(verb) > 0 && heap.stats().in_use.0 > 0);
    }
}

/// In the simulated source, each call takes a microsecond.
#[test]
fn the_time_of_all_who_give_back_is_counted() {
    let heap = PageHeap::new(Simulated::new(4096), Config::new(64 << 20)).unwrap();
    let mut before = (0, 0);
    let mut check = |what: &str| {
        let stats = heap.stats();
        let (calls, time) = (stats.calls.release, stats.scavenge_nanoseconds);
        assert!(calls > before.0, "{what} called nobody");
        assert_eq!(time - before.1, (calls - before.0) * 1000, "{what}");
        before = (calls, time);
    };
    let mut runs: Vec<_> = (0..1000).map(|_| heap.allocate(PageCount(1)).unwrap()).collect();
    runs.retain(|run| {
        run.start().0 % 2 == 0 || {
            // SAFETY: just allocated.
            unsafe { heap.free(*run) };
            false
        }
    });
    heap.scavenge(PageCount(50));
    check("scavenge");
    heap.release(PageCount(50));
    check("release");
    heap.release_as_a_layer(PageCount(50));
    check("release for a layer above");
    heap.set_soft_limit(PageCount(heap.backed().0));
    let _above = heap.allocate(PageCount(100)).unwrap();
    check("whoever went above the soft limit");
}

/// The system, with a count of each call.
struct Counting {
    reserve: AtomicU64,
    prepare: AtomicU64,
    release: AtomicU64,
    discard: AtomicU64,
    discarded: AtomicU64,
}

impl Counting {
    const fn new() -> Self {
        Self {
            reserve: AtomicU64::new(0),
            prepare: AtomicU64::new(0),
            release: AtomicU64::new(0),
            discard: AtomicU64::new(0),
            discarded: AtomicU64::new(0),
        }
    }
}

// SAFETY: every verb is the system's.
unsafe impl Verbs for Counting {
    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        self.reserve.fetch_add(1, Ordering::Relaxed);
        System.reserve(purpose, bytes, align)
    }

    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        self.prepare.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.prepare(purpose, start, bytes) }
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        self.release.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, bytes: usize) {
        self.discard.fetch_add(1, Ordering::Relaxed);
        self.discarded.fetch_add(bytes as u64, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.discard(start, bytes) }
    }
}

#[test]
fn calls_of_both_layers_are_those_of_the_source() {
    static COUNTED: OverSystem<Counting> = OverSystem(Counting::new());
    // SAFETY: the system's pages are memory.
    static HEAP: GlobalHeap<&OverSystem<Counting>> =
        unsafe { GlobalHeap::with_source(&COUNTED, Config::new(by_width(1 << 30, 256 << 20))) };
    let layout = Layout::from_size_align(1000, 8).unwrap();
    // SAFETY: the layout is not empty; blocks are freed with it.
    unsafe {
        let blocks: Vec<_> = (0..100_000).map(|_| HEAP.alloc(layout)).collect();
        blocks.into_iter().for_each(|block| HEAP.dealloc(block, layout));
    }
    HEAP.release(usize::MAX);
    let stats = HEAP.stats();
    let (calls, asked) = (stats.pages.calls, |count: &AtomicU64| count.load(Ordering::Relaxed));
    let counts = [&COUNTED.reserve, &COUNTED.prepare, &COUNTED.release, &COUNTED.discard];
    let told = [calls.reserve, calls.prepare, calls.release, calls.discard];
    assert_eq!(told, counts.map(asked), "{stats}");
    assert!(calls.discard > 0, "{stats}");
    // Windows counts a thread's time in steps of 15 ms.
    assert!(cfg!(windows) || stats.pages.scavenge_nanoseconds > 0, "{stats}");
}

/// What is written down of free pages goes back with them: for slots of 8 bytes 160 bytes a page.
#[test]
fn what_is_known_of_free_pages_goes_back_with_them() {
    const BLOCKS: usize = 1 << 20;
    static COUNTED: OverSystem<Counting> = OverSystem(Counting::new());
    // SAFETY: the system's pages are memory.
    static HEAP: GlobalHeap<&OverSystem<Counting>> =
        unsafe { GlobalHeap::with_source(&COUNTED, Config::new(by_width(1 << 30, 256 << 20))) };
    if COUNTED.granule() > 1 << 14 {
        // A granule would describe more pages than go back at a time.
        return;
    }
    let layout = Layout::new::<u64>();
    for round in 1..=2 {
        // SAFETY: the layout is not empty; blocks are freed with it.
        unsafe {
            let blocks: Vec<_> = (0..BLOCKS).map(|_| HEAP.alloc(layout)).collect();
            blocks.into_iter().for_each(|block| HEAP.dealloc(block, layout));
        }
        HEAP.flush_thread();
        HEAP.release(usize::MAX);
        HEAP.check().unwrap();
        let bytes = COUNTED.0.discarded.load(Ordering::Relaxed);
        assert!(
            bytes >= round * (BLOCKS / 1024 * 140) as u64,
            "{bytes} bytes: {}",
            HEAP.stats()
        );
    }
}
