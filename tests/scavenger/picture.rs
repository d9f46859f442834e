//! The map names every page once and agrees with the counts; the pictures are drawn from the map.

use core::alloc::Layout;
use core::mem::MaybeUninit;

use pageheap::source::Region;
use pageheap::{Film, Heap, PageUse, Picture};
use proptest::prelude::*;

use super::*;

/// The number of pages of a kind in the map.
fn pages(heap: &PageHeap<Simulated>, kind: PageUse) -> usize {
    heap.map()
        .filter(|entry| entry.is == kind)
        .map(|entry| entry.run.pages().0)
        .sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_page_is_named_once_and_the_sums_agree(
        lengths in prop::collection::vec((1..90_usize, any::<u8>()), 1..120)
    ) {
        let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 28)).unwrap();
        let cache = heap.cache().unwrap();
        let mut kept = Vec::new();
        for (length, what) in lengths {
            let run = cache.allocate(PageCount(length)).unwrap();
            match what % 4 {
                0 => kept.push(run),
                // SAFETY: just allocated.
                1 => unsafe { cache.free(run) },
                // SAFETY: as above.
                2 => unsafe { heap.free(run) },
                _ => {
                    // SAFETY: as above.
                    unsafe { cache.free(run) };
                    heap.scavenge(PageCount(usize::from(what)));
                }
            }
        }
        let (entries, stats) = (heap.map().collect::<Vec<_>>(), heap.stats());
        let joined = |pair: &[pageheap::MapEntry]| pair[0].run.end() == pair[1].run.start() && pair[0].is != pair[1].is;
        prop_assert!(entries.windows(2).all(joined));
        let (tables, entries) = entries.split_last().unwrap();
        let most = stats.metadata_bytes.div_ceil(stats.page_bytes);
        prop_assert_eq!((tables.is, tables.run.pages().0), (PageUse::Metadata, most));
        prop_assert_eq!(entries[0].run.start().0, 0);
        prop_assert_eq!(entries.last().unwrap().run.end().0, stats.grown.0);
        prop_assert_eq!(pages(&heap, PageUse::Run), stats.in_use.0);
        prop_assert_eq!(pages(&heap, PageUse::Cached), stats.cached.0);
        prop_assert_eq!(pages(&heap, PageUse::Free) + pages(&heap, PageUse::Released), stats.free.0);
    }
}

#[test]
fn a_picture_has_a_sign_for_every_cell_and_a_line_for_every_row() {
    let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 28)).unwrap();
    let run = heap.allocate(PageCount(100)).unwrap();
    let middle = run
        .split_at(PageCount(40))
        .unwrap()
        .1
        .split_at(PageCount(32))
        .unwrap()
        .0;
    // SAFETY: part of the run just allocated.
    unsafe { heap.free(middle) };
    let mut text = String::new();
    Picture::new(10, 20).text(heap.map(), &mut text).unwrap();
    let rows: Vec<&str> = text.lines().collect();
    assert_eq!(
        (rows.len(), rows[0].len(), rows[2].len()),
        (3, 20, 12),
        "52 cells of 10 for 512 pages"
    );
    assert_eq!(rows[0], "====...===          ");
}

/// Also for the tables of a heap of objects, which has more of them.
#[test]
fn a_picture_has_room_for_all_rows() {
    let memory = vec![MaybeUninit::uninit(); 64 << 20].leak();
    let heap = Heap::new(Region::from_static(memory), Config::new(usize::MAX)).unwrap();
    while heap.allocate(Layout::new::<[u8; 1 << 20]>()).is_some() {}
    let mut svg = String::new();
    let grown = heap.stats().pages.grown;
    Picture::new(1, 16)
        .svg("a heap", grown.0, heap.map(), &mut svg)
        .unwrap();
    let numbers = |name: &'static str| {
        let values = svg.split(name).skip(1).map(|rest| rest.split_once('"').unwrap().0);
        values.filter_map(|value| value.parse::<usize>().ok())
    };
    let (height, lowest) = (numbers(" height=\"").next().unwrap(), numbers(" y=\"").max().unwrap());
    assert!((lowest..lowest + 200).contains(&height), "{lowest} of {height}");
}

/// The fields are public: drawing terminates, and the result is what `new` would have given.
#[test]
fn a_picture_of_zeros_is_one_of_ones() {
    let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 20)).unwrap();
    let drawn = |picture: Picture| {
        let (mut text, mut svg) = (String::new(), String::new());
        picture.text(heap.map(), &mut text).unwrap();
        picture.svg("a heap", 128, heap.map(), &mut svg).unwrap();
        (text, svg)
    };
    let [pages, columns] = [0; 2];
    assert_eq!(drawn(Picture { pages, columns }), drawn(Picture::new(1, 1)));
}

/// However many pages, cells or frames are requested, only what exists is drawn.
#[test]
fn a_picture_may_be_as_large_as_numbers_are() {
    let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 20)).unwrap();
    let _run = heap.allocate(PageCount(3)).unwrap();
    let most = [1, usize::MAX / 10, usize::MAX / 2, usize::MAX];
    for (cell, columns) in most.iter().flat_map(|&cell| most.map(|columns| (cell, columns))) {
        for (pages, frames) in most.iter().flat_map(|&pages| most.map(|frames| (pages, frames))) {
            let mut svg = String::new();
            let mut film = Film::begin(Picture::new(cell, columns), frames, pages, &mut svg).unwrap();
            (0..2).for_each(|_| film.frame("a heap", heap.map()).unwrap());
            film.end().unwrap();
        }
        let (mut text, mut svg) = (String::new(), String::new());
        Picture::new(cell, columns).text(heap.map(), &mut text).unwrap();
        Picture::new(cell, columns).svg("", cell, heap.map(), &mut svg).unwrap();
        assert!(text.starts_with(['=', ' ']), "{text}");
    }
}

/// XML cannot represent some characters, not even as a number.
#[test]
fn a_title_may_be_any_text() {
    let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 20)).unwrap();
    let titled = |title: &str| {
        let mut svg = String::new();
        Picture::new(16, 8).svg(title, 128, heap.map(), &mut svg).unwrap();
        let begin = svg.find("y=\"44\">").unwrap() + "y=\"44\">".len();
        let end = svg[begin..].find("</text>").unwrap();
        svg[begin..][..end].to_owned()
    };
    assert_eq!(titled("a < b && c ]]> d \"'"), "a &lt; b &amp;&amp; c ]]&gt; d \"'");
    assert_eq!(
        titled("\t\n\r \u{7f}\u{85}\u{fffd}\u{10ffff}"),
        "\t\n\r \u{7f}\u{85}\u{fffd}\u{10ffff}"
    );
    let none = ('\0'..' ').filter(|char| !"\t\n\r".contains(*char));
    for char in none.chain(['\u{fffe}', '\u{ffff}']) {
        assert_eq!(titled(&format!("a{char}b")), "a\u{fffd}b", "{char:?}");
    }
}

#[test]
fn a_film_is_well_formed_and_as_high_as_it_says() {
    let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 28)).unwrap();
    let _run = heap.allocate(PageCount(100)).unwrap();
    let mut svg = String::new();
    let mut film = Film::begin(Picture::new(16, 8), 2, 512, &mut svg).unwrap();
    film.frame("one < two & three", heap.map()).unwrap();
    film.frame("two", heap.map()).unwrap();
    film.end().unwrap();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>") && svg.contains("one &lt; two &amp; three"));
    assert_eq!(svg.matches('<').count(), svg.matches('>').count());
    // Two frames of four rows, and one row for the tables.
    assert!(
        svg.contains(&format!("height=\"{}\"", 30 + 2 * (20 + 5 * 10 + 12))),
        "{svg}"
    );
    // The cells of each frame are as wide as all its rows together.
    let widths = svg.lines().filter(|line| line.contains("height=\"9\""));
    let width = |line: &str| {
        line.split("width=\"")
            .nth(1)
            .unwrap()
            .split('"')
            .next()
            .unwrap()
            .parse::<usize>()
            .unwrap()
    };
    assert_eq!(widths.map(width).sum::<usize>(), 2 * (32 + 1) * 10);
}
