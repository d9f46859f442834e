//! Figures that must agree do, and machines can read them.

use std::alloc::{GlobalAlloc, Layout};

use pageheap::{GlobalHeap, PageUse, Snapshot};

static HEAP: GlobalHeap = GlobalHeap::new().background(false);

/// Every sum that two figures give.
#[track_caller]
fn agree(snapshot: &Snapshot) {
    let (stats, pages) = (&snapshot.stats, &snapshot.stats.pages);
    assert_eq!(
        pages.grown.0,
        pages.in_use.0 + pages.cached.0 + pages.free.0,
        "{snapshot}"
    );
    assert_eq!(pages.backed.0, pages.grown.0 - pages.scavenged.0, "{snapshot}");
    assert!(pages.peak_backed >= pages.backed && pages.in_use >= stats.span_pages);
    assert!(pages.released_lazily <= pages.released);
    let sum = |figure: fn(&pageheap::ClassStats) -> usize| snapshot.classes.iter().map(figure).sum::<usize>();
    assert_eq!(sum(|class| class.spans), stats.spans);
    assert_eq!(sum(|class| class.span_pages), stats.span_pages.0);
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
            .classes
            .iter()
            .map(|class| class.refills + class.flushes)
            .sum::<u64>(),
        stats.batches
    );
    for class in &snapshot.classes {
        let slots = class.live + class.cached + class.racks + class.free;
        assert!(
            slots * class.slot_bytes <= class.span_pages * pages.page_bytes,
            "{class:?}"
        );
        assert!(class.fragmentation(pages.page_bytes) <= 100 && class.peak_span_pages >= class.span_pages);
    }
}

#[test]
fn sums_agree_and_machines_can_read_them() {
    let before = HEAP.snapshot();
    let mut blocks = Vec::new();
    for number in 0..30_000_usize {
        let size = [8, 100, 1000, 9000, 40_000][number % 5] + number % 7;
        let layout = Layout::from_size_align(size, 8).unwrap();
        // SAFETY: not of size zero; freed with its layout.
        blocks.push((unsafe { HEAP.alloc(layout) }, layout));
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
    // The map says the same.
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

/// As JSON, and as Prometheus' text.
fn machines_can_read(full: &Snapshot) {
    let mut json = String::new();
    full.json(&mut json).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["grown_bytes"], full.stats.pages.grown.0 * 8192);
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
        names.len() == 40 && full.to_string().contains("resident"),
        "{}",
        names.len()
    );
}
