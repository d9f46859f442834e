//! An experiment, after the proposal for Go's page allocator: in which order should free memory go back?
//!
//! ```sh
//! cargo run --release --example release_order                          # tables
//! cargo run --release --example release_order order.svg caches.svg     # and the graphs
//! ```
//!
//! Heaps of three shapes, 1 GiB each, are released run by run, using 1 % of a processor, in two orders: from the
//! highest address down, and whole huge pages first. The cost of a call is modelled after measurements on a 4 KiB
//! kernel: 290 ns, plus 130 ns for each 4 KiB; a whole huge page takes 5 µs. The graph shows how much of the free
//! memory is back after how much time. The policy that chooses runs is the one that ships.
//!
//! The second table shows how much further a heap grows, and its longest free run, the more caches hold words of it.
//! (A heap grows by steps: that of the last row has taken one step more than the others, and most of that is one free
//! run.)

use std::fmt::Write as _;
use std::{env, fs};

use pageheap::internals::scavenge::{Limits, candidate};
use pageheap::source::{Numbers, Region, Split};
use pageheap::{Config, PageCount, PageHeap, PageUse};

const PAGES: usize = (1 << 30) / 8192;
const CHUNK_WORDS: usize = 8;
const HUGE: usize = 256;
/// Pages live in the second experiment: 312 MiB.
const LIVE: usize = 40_000;

/// A generator of sufficiently random numbers: xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % end
    }
}

/// The free bits of a heap: runs in use and free in alternation, with lengths that depend on their height in the heap.
fn shape(lengths: impl Fn(usize, &mut Random) -> (usize, usize)) -> Vec<u64> {
    let (mut free, mut page, mut random) = (vec![0_u64; PAGES / 64], 0, Random(0x5eed));
    while page < PAGES {
        let (used, hole) = lengths(page, &mut random);
        for page in (page + used)..(page + used + hole).min(PAGES) {
            free[page / 64] |= 1 << (page % 64);
        }
        page += used + hole.max(1);
    }
    free
}

/// How much is back, and when: (nanoseconds of work, pages).
fn give_back(free: &[u64], passes: &[usize]) -> Vec<(f64, usize)> {
    let mut scavenged = vec![0_u64; free.len()];
    let (mut time, mut pages, mut points) = (0.0, 0, vec![(0.0, 0)]);
    for &least in passes {
        for chunk in (0..free.len() / CHUNK_WORDS).rev() {
            let words = chunk * CHUNK_WORDS..(chunk + 1) * CHUNK_WORDS;
            let limits = Limits {
                least,
                // As in the background, where far more is wanted: a whole run at a time.
                most: usize::MAX,
                huge: HUGE,
            };
            while let Some((start, run)) = candidate(&free[words.clone()], &scavenged[words.clone()], 511, limits) {
                for page in start..start + run {
                    scavenged[words.start + page / 64] |= 1 << (page % 64);
                }
                let whole = run / HUGE;
                time += 290.0 + 5000.0 * whole as f64 + 260.0 * (run - whole * HUGE) as f64;
                pages += run;
                points.push((time, pages));
            }
        }
    }
    points
}

/// When a share of the free pages is back, in seconds at 1 %.
fn after(points: &[(f64, usize)], share: f64) -> f64 {
    let all = points.last().map_or(0, |point| point.1) as f64;
    let point = points.iter().find(|point| point.1 as f64 >= share * all);
    point.map_or(0.0, |point| point.0 * 100.0 / 1e9)
}

/// Draws the curves: time to the right, share upwards.
fn draw(curves: &[(String, Vec<(f64, usize)>)]) -> String {
    const COLORS: [&str; 6] = ["#1f6f8b", "#7fb6c6", "#e0803c", "#efbd97", "#5a7d2a", "#afc98a"];
    let (width, height) = (720.0, 360.0);
    let longest = curves
        .iter()
        .filter_map(|(_, points)| points.last())
        .map(|point| point.0)
        .fold(0.0, f64::max);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <path d=\"M40 10V{}H{}\" fill=\"none\" stroke=\"#444\"/>\n\
         <text x=\"44\" y=\"14\">free memory given back, 0 to 100 %</text>\
         <text x=\"{}\" y=\"{}\" text-anchor=\"end\">{:.1} s at 1 % of a processor</text>\n",
        width + 60.0,
        height + 140.0,
        height + 20.0,
        width + 40.0,
        width + 40.0,
        height + 36.0,
        longest * 100.0 / 1e9
    );
    for (index, (name, points)) in curves.iter().enumerate() {
        let all = points.last().map_or(1, |point| point.1.max(1)) as f64;
        let mut path = String::new();
        for point in points.iter().step_by(points.len() / 200 + 1).chain(points.last()) {
            let (x, y) = (
                40.0 + width * point.0 / longest,
                height + 20.0 - height * point.1 as f64 / all,
            );
            let _ = write!(path, "{}{x:.1} {y:.1}", if path.is_empty() { 'M' } else { 'L' });
        }
        let (color, y) = (COLORS[index % COLORS.len()], height + 56.0 + 14.0 * index as f64);
        let _ = writeln!(
            svg,
            "<path d=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>\
             <path d=\"M44 {0}H64\" stroke=\"{color}\" stroke-width=\"3\"/><text x=\"70\" y=\"{1}\">{name}</text>",
            y - 4.0,
            y
        );
    }
    svg + "</svg>\n"
}

/// A heap that has been at work, with a number of caches and a constant amount of live memory.
struct Fragments {
    caches: usize,
    /// Percent of what is live.
    grown: usize,
    /// Pages in caches.
    cached: usize,
    /// Pages in the longest free run.
    longest: usize,
    /// Percent of the free pages that are in runs of at least 16.
    in_runs: usize,
}

/// How far a heap grows for a live set of constant size, and what is free in it, with `caches` caches.
fn fragmentation(caches: usize) -> Fragments {
    let bytes: &'static mut [_] = Box::leak(Box::new_uninit_slice(32 << 20));
    let numbers = Numbers::new(1 << 30, 1 << 31);
    let source = Split::new(numbers, Region::from_static(bytes));
    let heap = PageHeap::new(source, Config::new(1 << 31).caches(caches)).expect("room");
    let handles: Vec<_> = (0..caches).map(|_| heap.cache().expect("one of so many")).collect();
    let (mut random, mut runs, mut live) = (Random(7), Vec::new(), 0);
    for _ in 0..2_000_000 {
        let pages = 1 + random.below(6) * random.below(4);
        let cache = random.below(caches.max(1));
        if live + pages <= LIVE {
            let run = handles.get(cache).map_or_else(
                || heap.allocate(PageCount(pages)),
                |cache| cache.allocate(PageCount(pages)),
            );
            runs.push(run.expect("room"));
            live += pages;
        } else {
            let run = runs.swap_remove(random.below(runs.len()));
            live -= run.pages().0;
            // SAFETY: allocated above, and nobody uses it: the pages are numbers.
            unsafe {
                match handles.get(cache) {
                    Some(cache) => cache.free(run),
                    None => heap.free(run),
                }
            }
        }
    }
    let stats = heap.stats();
    let free: Vec<usize> = heap
        .map()
        .filter(|entry| entry.is == PageUse::Free || entry.is == PageUse::Released)
        .map(|entry| entry.run.pages().0)
        .collect();
    let long = free.iter().filter(|&&pages| pages >= 16).sum::<usize>();
    Fragments {
        caches,
        grown: stats.grown.0 * 100 / LIVE,
        cached: stats.cached.0,
        longest: free.iter().copied().max().unwrap_or(0),
        in_runs: 100 * long / free.iter().sum::<usize>().max(1),
    }
}

/// Draws a bar for each number of caches: how far the heap has grown. Live pages are filled, cached ones hatched.
fn draw_caches(all: &[Fragments]) -> String {
    let (left, width, row) = (90, 400, 26);
    let scale = |hundredths: usize| hundredths * width / 130;
    let height = 40 + row * all.len();
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"640\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"4\" y=\"20\">caches</text><text x=\"{left}\" y=\"20\">what is live (dark), in caches (yellow), \
         free (grey)</text>\n"
    );
    for (index, of) in all.iter().enumerate() {
        let (y, cached) = (32 + row * index, (of.cached * 100).div_ceil(LIVE));
        let mut bar = |from: usize, to: usize, color: &str| {
            let (x, width) = (left + scale(from), scale(to) - scale(from));
            let _ = writeln!(
                svg,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"18\" fill=\"{color}\"/>"
            );
        };
        bar(0, 100, "#1f6f8b");
        bar(100, 100 + cached, "#d9b93b");
        bar(100 + cached, of.grown.max(100 + cached), "#b9c4c9");
        let (text, label) = (y + 14, left + scale(of.grown) + 8);
        let _ = writeln!(
            svg,
            "<text x=\"4\" y=\"{text}\">{}</text><text x=\"{label}\" y=\"{text}\">{} %, longest free run {}</text>",
            of.caches, of.grown, of.longest
        );
    }
    svg + "</svg>\n"
}

fn main() {
    type Lengths = fn(usize, &mut Random) -> (usize, usize);
    let shapes: [(&str, Lengths); 3] = [
        ("short holes everywhere", |_, random| {
            (1 + random.below(12), 1 + random.below(12))
        }),
        ("emptier towards the top", |page, random| {
            (1 + random.below(200), 1 + random.below(1 + page / 64))
        }),
        ("old blocks high up", |page, random| {
            let high = page > PAGES / 2;
            (1 + random.below(60), 1 + random.below(if high { 60 } else { 3000 }))
        }),
    ];
    println!(
        "{:<26}{:<20}{:>8}{:>8}{:>8}{:>8}   s to give back 25, 50, 90, 100 %",
        "shape", "order", 25, 50, 90, 100
    );
    let mut curves = Vec::new();
    for (name, lengths) in shapes {
        let free = shape(lengths);
        for (order, passes) in [("highest address", &[1][..]), ("huge pages first", &[HUGE, 1][..])] {
            let points = give_back(&free, passes);
            let times = [0.25, 0.5, 0.9, 1.0].map(|share| format!("{:>8.2}", after(&points, share)));
            println!("{name:<26}{order:<20}{}", times.concat());
            curves.push((format!("{name}, {order}"), points));
        }
    }
    if let Some(path) = env::args().nth(1) {
        fs::write(&path, draw(&curves)).expect("the graph can be written");
        println!("{path}");
    }
    println!(
        "\n{:>8}{:>14}{:>16}{:>20}{:>22}",
        "caches", "grown/live, %", "pages cached", "longest free run", "in runs of 16+, %"
    );
    let all: Vec<_> = [0, 1, 4, 16, 64, 128, 256].map(fragmentation).into();
    for of in &all {
        println!(
            "{:>8}{:>14}{:>16}{:>20}{:>22}",
            of.caches, of.grown, of.cached, of.longest, of.in_runs
        );
    }
    if let Some(path) = env::args().nth(2) {
        fs::write(&path, draw_caches(&all)).expect("the graph can be written");
        println!("{path}");
    }
}
