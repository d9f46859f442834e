//! A heap's figures at one moment, for people and for machines: `Display`, JSON, Prometheus, and what changed since.
//!
//! ```text
//!   GlobalHeap::snapshot() ─▶ Snapshot ─┬─ Display       a page of text
//!                                 │     ├─ json          one object, a list of classes in it
//!                                 │     └─ prometheus    its text format, a metric a figure, label `slot` for classes
//!                              since(earlier)            counters less, gauges as they are now
//! ```
//!
//! **Sums that agree**, when nobody is at work: grown = in use + cached + free pages; backed = grown - released pages;
//! the spans of all classes are the spans of the heap; a class's slots are live, cached, racks or free. The system's
//! own figure of resident memory stands beside ours; what it has more is code, stacks, and what others map.
//!
//! Nothing here allocates: a snapshot is plain numbers, 4 KiB of them, and text goes to any writer.

#![forbid(unsafe_code)]

use core::fmt::{self, Write};

use crate::source::Source;
use crate::units::PageCount;

use super::size_class::{CLASSES, SizeClass};
use super::{GlobalStats, Objects};

/// One size class at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassStats {
    /// Bytes in a slot.
    pub slot_bytes: usize,
    /// Spans of it.
    pub spans: usize,
    /// Pages of those.
    pub span_pages: usize,
    /// The most pages its spans ever had.
    pub peak_span_pages: usize,
    /// Slots that the program has.
    pub live: usize,
    /// Free slots in magazines of threads, and in the class's store.
    pub cached: usize,
    /// Slots that are tables of such slots, of this class or another.
    pub racks: usize,
    /// Free slots in the spans.
    pub free: usize,
    /// How often a magazine was refilled.
    pub refills: u64,
    /// How often slots of magazines came back.
    pub flushes: u64,
}

impl ClassStats {
    /// How many hundredths of the class's pages are not in blocks of the program.
    #[must_use]
    pub fn fragmentation(&self, page_bytes: usize) -> usize {
        let bytes = self.span_pages * page_bytes;
        let live = (self.live * self.slot_bytes).min(bytes);
        (100 * (bytes - live)).checked_div(bytes).unwrap_or(0)
    }
}

/// A global heap at one moment, with its classes and what the system says of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The heap.
    pub stats: GlobalStats,
    /// Its classes, from the smallest slots to the largest.
    pub classes: [ClassStats; CLASSES],
    /// Resident bytes of the whole process, as the system counts them; 0 where it does not say.
    pub resident: usize,
}

impl Default for Snapshot {
    fn default() -> Self {
        Self {
            stats: GlobalStats::default(),
            classes: [ClassStats::default(); CLASSES],
            resident: 0,
        }
    }
}

/// Whether a figure only ever grows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Gauge,
    Counter,
}

/// One figure: its name, what it means, its kind, its value.
type Figure = (&'static str, &'static str, Kind, u64);

/// Names, and what they mean.
const GAUGES: [(&str, &str); 17] = [
    ("resident_bytes", "Resident memory of the process, by the system"),
    ("backed_bytes", "Pages with memory behind them"),
    ("peak_backed_bytes", "The most of them there ever were"),
    ("live_bytes", "Blocks of the program, rounded up to slots and pages"),
    ("grown_bytes", "Pages the heap has grown to"),
    ("in_use_bytes", "Pages allocated"),
    ("cached_bytes", "Pages in caches of threads"),
    ("free_bytes", "Pages free"),
    ("released_bytes", "Pages free or cached without memory"),
    ("span_bytes", "Pages cut into slots"),
    ("magazine_bytes", "Free slots in magazines of threads"),
    ("stored_bytes", "Free slots in stores of classes"),
    ("rack_bytes", "Tables of free slots' addresses"),
    ("shelf_bytes", "Free runs on shelves of threads"),
    ("metadata_bytes", "The heap's own tables, prepared"),
    ("threads", "Threads with a structure of their own"),
    (
        "fragmentation_percent",
        "Hundredths of the pages with memory not in blocks of the program",
    ),
];
const COUNTERS: [(&str, &str); 14] = [
    ("refills_total", "Words of pages taken by caches"),
    ("flushes_total", "Words of pages given back by caches"),
    ("batches_total", "Batches between magazines and classes"),
    ("growths_total", "Times the heap grew"),
    ("refusals_total", "Times it had to say no"),
    ("reserve_calls_total", "System calls to reserve addresses"),
    ("prepare_calls_total", "System calls to grow"),
    ("commit_calls_total", "System calls to commit"),
    ("release_calls_total", "System calls to give memory back"),
    ("advise_calls_total", "System calls about huge pages"),
    (
        "barrier_calls_total",
        "System calls to take back what sleeping threads keep",
    ),
    ("released_pages_total", "Pages given back"),
    (
        "released_lazily_pages_total",
        "Of those, the ones the system takes when it wants them",
    ),
    ("scavenge_nanoseconds_total", "Time spent scavenging"),
];
const CLASS_GAUGES: [(&str, &str); 7] = [
    ("class_span_bytes", "Pages of the class"),
    ("class_peak_span_bytes", "The most of them there ever were"),
    ("class_live", "Slots of the program"),
    ("class_cached", "Free slots in magazines"),
    ("class_racks", "Slots that are tables of free slots' addresses"),
    ("class_free", "Free slots in spans"),
    (
        "class_fragmentation_percent",
        "Hundredths of the pages not in blocks of the program",
    ),
];
const CLASS_COUNTERS: [(&str, &str); 2] = [
    ("class_refills_total", "Times a magazine was refilled"),
    ("class_flushes_total", "Times slots of magazines came back"),
];

fn named<const N: usize>(
    names: [(&'static str, &'static str); N],
    kind: Kind,
    values: [u64; N],
) -> impl Iterator<Item = Figure> {
    let named = names.into_iter().zip(values);
    named.map(move |((name, help), value)| (name, help, kind, value))
}

impl Snapshot {
    /// How many hundredths of the memory behind pages are not in blocks of the program: free, cached, in store, or the
    /// rest of a page.
    #[must_use]
    pub fn fragmentation(&self) -> usize {
        let bytes = self.stats.pages.backed.0 * self.stats.pages.page_bytes;
        let unused = bytes.saturating_sub(self.stats.bytes_in_use());
        (100 * unused).checked_div(bytes).unwrap_or(0)
    }

    /// What has changed since an earlier snapshot of the same heap: counters are the difference, all else is as now.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut change = *self;
        let less = |now: &mut u64, then: u64| *now = now.saturating_sub(then);
        let (pages, before) = (&mut change.stats.pages, &earlier.stats.pages);
        less(&mut pages.refills, before.refills);
        less(&mut pages.flushes, before.flushes);
        less(&mut pages.growths, before.growths);
        less(&mut pages.refusals, before.refusals);
        less(&mut pages.released, before.released);
        less(&mut pages.released_lazily, before.released_lazily);
        less(&mut pages.scavenge_nanoseconds, before.scavenge_nanoseconds);
        less(&mut pages.calls.reserve, before.calls.reserve);
        less(&mut pages.calls.prepare, before.calls.prepare);
        less(&mut pages.calls.commit, before.calls.commit);
        less(&mut pages.calls.release, before.calls.release);
        less(&mut pages.calls.advise, before.calls.advise);
        less(&mut pages.calls.barrier, before.calls.barrier);
        less(&mut change.stats.batches, earlier.stats.batches);
        for (class, before) in change.classes.iter_mut().zip(&earlier.classes) {
            less(&mut class.refills, before.refills);
            less(&mut class.flushes, before.flushes);
        }
        change
    }

    /// All figures of the heap as a whole.
    fn figures(&self) -> impl Iterator<Item = Figure> {
        let (stats, pages, calls) = (&self.stats, &self.stats.pages, &self.stats.pages.calls);
        let bytes = |count: PageCount| (count.0 * pages.page_bytes) as u64;
        let gauges = [
            self.resident as u64,
            bytes(pages.backed),
            bytes(pages.peak_backed),
            stats.bytes_in_use() as u64,
            bytes(pages.grown),
            bytes(pages.in_use),
            bytes(pages.cached),
            bytes(pages.free),
            bytes(pages.scavenged),
            bytes(stats.span_pages),
            stats.magazine_bytes as u64,
            stats.stored_bytes as u64,
            stats.rack_bytes as u64,
            (stats.shelf_pages.0 * stats.pages.page_bytes) as u64,
            pages.metadata_bytes as u64,
            stats.threads as u64,
            self.fragmentation() as u64,
        ];
        let counters = [
            pages.refills,
            pages.flushes,
            stats.batches,
            pages.growths,
            pages.refusals,
            calls.reserve,
            calls.prepare,
            calls.commit,
            calls.release,
            calls.advise,
            calls.barrier,
            pages.released,
            pages.released_lazily,
            pages.scavenge_nanoseconds,
        ];
        named(GAUGES, Kind::Gauge, gauges).chain(named(COUNTERS, Kind::Counter, counters))
    }

    fn class_figures(&self, class: &ClassStats) -> impl Iterator<Item = Figure> {
        let page = self.stats.pages.page_bytes;
        let gauges = [
            class.span_pages * page,
            class.peak_span_pages * page,
            class.live,
            class.cached,
            class.racks,
            class.free,
            class.fragmentation(page),
        ];
        let counters = [class.refills, class.flushes];
        let gauges = gauges.map(|value| value as u64);
        named(CLASS_GAUGES, Kind::Gauge, gauges).chain(named(CLASS_COUNTERS, Kind::Counter, counters))
    }

    /// The classes that have, or had, anything.
    fn used(&self) -> impl Iterator<Item = &ClassStats> {
        self.classes.iter().filter(|class| class.spans > 0 || class.refills > 0)
    }

    /// Writes one JSON object: every figure by its name, and `classes`, a list of objects of those in use.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn json<W: Write>(&self, out: &mut W) -> fmt::Result {
        out.write_char('{')?;
        for (name, _, _, value) in self.figures() {
            write!(out, "\"{name}\":{value},")?;
        }
        out.write_str("\"classes\":[")?;
        for (index, class) in self.used().enumerate() {
            write!(
                out,
                "{}{{\"slot_bytes\":{}",
                if index > 0 { "," } else { "" },
                class.slot_bytes
            )?;
            for (name, _, _, value) in self.class_figures(class) {
                write!(out, ",\"{name}\":{value}")?;
            }
            out.write_char('}')?;
        }
        out.write_str("]}")
    }

    /// Writes Prometheus' text format: each figure as `pageheap_…`, those of classes with the label `slot`.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn prometheus<W: Write>(&self, out: &mut W) -> fmt::Result {
        for figure in self.figures() {
            head(out, figure)?;
            writeln!(out, "pageheap_{} {}", figure.0, figure.3)?;
        }
        for (index, figure) in self.class_figures(&ClassStats::default()).enumerate() {
            head(out, figure)?;
            for class in self.used() {
                let Some(figure) = self.class_figures(class).nth(index) else {
                    break;
                };
                writeln!(
                    out,
                    "pageheap_{}{{slot=\"{}\"}} {}",
                    figure.0, class.slot_bytes, figure.3
                )?;
            }
        }
        Ok(())
    }
}

/// What a metric means, and what it is.
fn head<W: Write>(out: &mut W, (name, help, kind, _): Figure) -> fmt::Result {
    let kind = if kind == Kind::Counter { "counter" } else { "gauge" };
    writeln!(out, "# HELP pageheap_{name} {help}.\n# TYPE pageheap_{name} {kind}")
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.stats)?;
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        writeln!(f, "resident  {:>9.1} MiB, by the system", mib(self.resident))?;
        writeln!(f, "unused    {:>9} % of what is backed", self.fragmentation())?;
        write!(
            f,
            "    slot    spans     live   cached    racks     free  refills  flushes  unused"
        )?;
        for class in self.used() {
            let ClassStats {
                slot_bytes,
                spans,
                live,
                cached,
                racks,
                free,
                refills,
                flushes,
                ..
            } = class;
            let unused = class.fragmentation(self.stats.pages.page_bytes);
            write!(
                f,
                "\n{slot_bytes:>8} {spans:>8} {live:>8} {cached:>8} {racks:>8} {free:>8} {refills:>8} {flushes:>8} \
                 {unused:>6}%"
            )?;
        }
        Ok(())
    }
}

impl<S: Source + 'static> Objects<S> {
    /// Counts, by classes too; `resident` is what the system says.
    pub fn snapshot(&self, resident: usize) -> Snapshot {
        let mut classes = [ClassStats::default(); CLASSES];
        let mut cached = [0; CLASSES];
        self.for_each_thread(|thread| {
            for class in SizeClass::all() {
                cached[class.index()] += thread.magazine(class).count(class) as usize;
            }
        });
        for class in SizeClass::all() {
            let (state, index) = (self.central(class).state(&self.spans, class), class.index());
            cached[index] += state.stored as usize;
            let (out, spans) = (state.out as usize, state.spans as usize);
            let racks = self.blanks.of_class(class);
            classes[index] = ClassStats {
                slot_bytes: class.bytes(),
                spans,
                span_pages: spans * class.pages(),
                peak_span_pages: state.peak_spans as usize * class.pages(),
                live: out.saturating_sub(cached[index] + racks),
                cached: cached[index],
                racks,
                free: (spans * class.slots() as usize).saturating_sub(out),
                refills: state.refills,
                flushes: state.flushes,
            };
        }
        Snapshot {
            stats: self.stats(),
            classes,
            resident,
        }
    }
}
