//! A heap's figures at one moment, for people and machines: `Display`, JSON, Prometheus, and differences.
//!
//! ```text
//!   GlobalHeap::snapshot() ─▶ Snapshot ─┬─ Display       a page of text
//!                                 │     ├─ json          one object, a list of classes in it
//!                                 │     └─ prometheus    its text format, a metric a figure, label `slot` for classes
//!                              since(earlier)            counters less, gauges as they are now
//! ```
//!
//! **These sums agree** when nobody is at work: grown = in use + cached + free + gap pages; backed = grown - released -
//! holes - gap pages; the spans of all classes are the spans of the heap; each slot of a class is live, cached, a rack
//! or free. A dissolved span counts as released: spans + released >= peak. The system's figure of resident memory is
//! given beside ours; what it has in excess is code, stacks, and other mappings.
//!
//! Nothing here allocates: a snapshot is 8 KiB of plain numbers, and text goes to any writer.

#![forbid(unsafe_code)]

use core::fmt::{self, Write};

use crate::heap::figures::{self, Figure, Labels, counters, gauges};
use crate::source::Source;
use crate::units::PageCount;

use super::size_class::{CLASSES, SizeClass};
use super::spans::metadata_of_page;
use super::{GlobalStats, Objects};

/// One size class at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes in a slot.
    pub slot_bytes: usize,
    /// Its spans.
    pub spans: usize,
    /// Pages of those spans.
    pub span_pages: PageCount,
    /// The most pages its spans ever had.
    pub peak_span_pages: PageCount,
    /// Slots in use. In one class this includes threads' structures, 3 KiB each.
    pub live: usize,
    /// Free slots in threads' magazines and in the class's store.
    pub cached: usize,
    /// Slots that are tables of such slots, of this class or another.
    pub racks: usize,
    /// Free slots in the spans.
    pub free: usize,
    /// Bytes of the heap's tables that describe its spans: 32 a page, 128 more where slots have less than 64 bytes, and
    /// 8 flags where they have more than 1 KiB; a part of [`Stats::metadata_bytes`](crate::Stats::metadata_bytes).
    /// Excludes what every class has, used or not (64 bytes, and 24 in each lane of the store), magazines, and the
    /// tables of its free slots, which count as [`racks`](Self::racks) of their own class.
    pub metadata_bytes: usize,
    /// How often a magazine was refilled.
    pub refills: u64,
    /// How often slots came back from magazines.
    pub flushes: u64,
    /// Empty spans that became free pages, for any class or large block. Whether these still have memory is another
    /// matter: [`Stats::released`](crate::Stats::released) counts what went back to the source.
    pub released_spans: u64,
}

impl ClassStats {
    /// The percentage of the class's pages that is not in blocks of the program.
    #[must_use]
    pub fn fragmentation(&self, page_bytes: usize) -> usize {
        let bytes = self.span_pages.0 * page_bytes;
        let live = (self.live * self.slot_bytes).min(bytes);
        figures::hundredths(bytes - live, bytes)
    }

    /// Every figure of the class, in a heap with pages of `page_bytes`: first the gauges, then the counters.
    pub fn figures(&self, page_bytes: usize) -> impl Iterator<Item = Figure> + use<> {
        let values = [
            self.span_pages.0 * page_bytes,
            self.peak_span_pages.0 * page_bytes,
            self.live,
            self.cached,
            self.racks,
            self.free,
            self.metadata_bytes,
            self.fragmentation(page_bytes),
        ];
        let counted = [self.refills, self.flushes, self.released_spans];
        gauges(CLASS_GAUGES, values.map(|value| value as u64)).chain(counters(CLASS_COUNTERS, counted))
    }
}

/// A [`GlobalHeap`](crate::GlobalHeap) or a [`Heap`](crate::Heap) at one moment, with its classes and the system's view
/// of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Snapshot {
    /// The heap.
    pub stats: GlobalStats,
    /// Private, because how many there are may change.
    classes: [ClassStats; CLASSES],
    /// Resident bytes of the whole process, as the system counts them; 0 if it does not say.
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

const CLASS_GAUGES: [(&str, &str); 8] = [
    ("class_span_bytes", "Bytes in pages of the class"),
    (
        "class_peak_span_bytes",
        "The most bytes in pages that the class ever had",
    ),
    ("class_live", "Slots of the program"),
    ("class_cached", "Free slots in magazines and in store"),
    ("class_racks", "Slots that are tables of free slots' addresses"),
    ("class_free", "Free slots in spans"),
    (
        "class_metadata_bytes",
        "Entries in the heap's tables that describe spans",
    ),
    (
        "class_fragmentation_percent",
        "Percentage of the pages that is not in blocks of the program",
    ),
];
const CLASS_COUNTERS: [(&str, &str); 3] = [
    ("class_refills_total", "Times a magazine was refilled"),
    ("class_flushes_total", "Times slots of magazines came back"),
    ("class_released_spans_total", "Empty spans that became free pages"),
];

const OWN: [(&str, &str); 2] = [
    ("resident_bytes", "Resident memory of the process, by the system"),
    (
        "fragmentation_percent",
        "Percentage of the memory behind pages that is not in blocks of the program",
    ),
];

impl Snapshot {
    /// The percentage of the memory behind pages that is not in blocks of the program: free, cached, stored, or the
    /// rest of a page.
    #[must_use]
    pub fn fragmentation(&self) -> usize {
        let bytes = self.stats.pages.backed.0 * self.stats.pages.page_bytes;
        let unused = bytes.saturating_sub(self.stats.bytes_in_use());
        figures::hundredths(unused, bytes)
    }

    /// The classes, from the smallest slots to the largest. How many there are may differ between versions.
    #[must_use]
    pub const fn classes(&self) -> &[ClassStats] {
        &self.classes
    }

    /// For tests, which make up figures.
    #[doc(hidden)]
    #[cfg(feature = "internals")]
    pub const fn classes_mut(&mut self) -> &mut [ClassStats] {
        &mut self.classes
    }

    /// What has changed since an earlier snapshot of the same heap: counters are differences, all else is the current
    /// value, so also what is in use. How much that has grown: [`GlobalStats::bytes_added_since`].
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut change = *self;
        change.stats = self.stats.since(&earlier.stats);
        for (class, before) in change.classes.iter_mut().zip(&earlier.classes) {
            figures::less(&mut class.refills, before.refills);
            figures::less(&mut class.flushes, before.flushes);
            figures::less(&mut class.released_spans, before.released_spans);
        }
        change
    }

    /// Every figure of the heap as a whole: its own, then those of [`stats`](Self::stats). Each class has its own:
    /// [`ClassStats::figures`].
    pub fn figures(&self) -> impl Iterator<Item = Figure> + use<> {
        let own = [self.resident as u64, self.fragmentation() as u64];
        gauges(OWN, own).chain(self.stats.figures())
    }

    /// The classes that have, or had, anything; in a difference also those that have only lost something.
    fn used(&self) -> impl Iterator<Item = &ClassStats> + Clone {
        let has_done = |class: &ClassStats| class.refills + class.flushes + class.released_spans > 0;
        self.classes
            .iter()
            .filter(move |class| class.spans > 0 || has_done(class))
    }

    /// Writes one JSON object: every figure by name, and `classes`, a list of one object for each class in use.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn json<W: Write>(&self, out: &mut W) -> fmt::Result {
        out.write_char('{')?;
        figures::json(self.figures(), out)?;
        out.write_str(",\"classes\":[")?;
        for (index, class) in self.used().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(out, "{comma}{{\"slot_bytes\":{},", class.slot_bytes)?;
            figures::json(class.figures(self.stats.pages.page_bytes), out)?;
            out.write_char('}')?;
        }
        out.write_str("]}")
    }

    /// Writes Prometheus' text format: each figure as `pageheap_…`, those of classes with the label `slot`.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn prometheus<W: Write>(&self, out: &mut W) -> fmt::Result {
        self.prometheus_as(figures::PREFIX, out)
    }

    /// As [`prometheus`](Self::prometheus), with names that begin with `prefix` and an underscore: for a program that
    /// reports several heaps, because a metric may stand in a text only once. (With a label instead:
    /// [`prometheus_of`](Self::prometheus_of).) `prefix` has to be the beginning of a metric's name: a letter, then
    /// letters, digits and underscores.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn prometheus_as<W: Write>(&self, prefix: &str, out: &mut W) -> fmt::Result {
        Self::metrics(prefix, figures::only(self), out)
    }

    /// As [`prometheus_as`](Self::prometheus_as), for several heaps whose metrics have the same names: each metric has
    /// a line for each heap, or for each of its classes, with the label `label`. Each of `heaps` is that label's value
    /// and a snapshot. The values have to differ; they may be any text, and are escaped. `label` has to be the name of
    /// a label: a letter, then letters, digits and underscores, and not `slot`, which is that of classes. Cost: for
    /// each line a look through the figures of its heap or class. A program with a heap for each tenant, one of whom
    /// has used nothing yet:
    ///
    /// ```
    /// # #[cfg(all(any(unix, windows), feature = "std"))] {
    /// use std::alloc::Layout;
    /// use pageheap::source::System;
    /// use pageheap::{Config, Heap, Snapshot};
    ///
    /// let [ada, bob] = [(); 2].map(|()| Heap::new(System, Config::new(1 << 30)).unwrap());
    /// ada.allocate(Layout::new::<[u8; 1 << 20]>()).unwrap();
    /// let mut text = String::new();
    /// let heaps = [("ada", ada.snapshot()), ("bob", bob.snapshot())];
    /// Snapshot::prometheus_of("pageheap", "tenant", &heaps, &mut text).unwrap();
    /// assert_eq!(text.matches("# TYPE pageheap_live_bytes gauge").count(), 1);
    /// assert!(text.contains("\npageheap_live_bytes{tenant=\"ada\"} 1"));
    /// assert!(text.contains("\npageheap_live_bytes{tenant=\"bob\"} 0\n"));
    /// # }
    /// ```
    ///
    /// [`resident`](Self::resident) is that of the process for each of them: it is not to be summed over heaps.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn prometheus_of<W: Write>(prefix: &str, label: &str, heaps: &[(&str, Self)], out: &mut W) -> fmt::Result {
        Self::metrics(prefix, figures::several(label, heaps), out)
    }

    fn metrics<'a, W: Write>(
        prefix: &str,
        of: impl Iterator<Item = (Labels<'a>, &'a Self)> + Clone,
        out: &mut W,
    ) -> fmt::Result {
        figures::prometheus(prefix, Self::default().figures(), of.clone(), Self::figures, out)?;
        let classes = of.flat_map(|(labels, snapshot)| {
            snapshot.used().map(move |class| {
                let slot = Some(class.slot_bytes);
                (Labels { slot, ..labels }, (class, snapshot.stats.pages.page_bytes))
            })
        });
        let figures_of = |(class, page_bytes): (&ClassStats, _)| class.figures(page_bytes);
        figures::prometheus(prefix, ClassStats::default().figures(0), classes, figures_of, out)
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.stats)?;
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        writeln!(f, "resident  {:>9.1} MiB, by the system", mib(self.resident))?;
        writeln!(f, "unused    {:>9} % of what is backed", self.fragmentation())?;
        write!(
            f,
            "    slot    spans     live   cached    racks     free metadata  refills  flushes released  unused"
        )?;
        for class in self.used() {
            let ClassStats {
                slot_bytes,
                spans,
                live,
                cached,
                racks,
                free,
                metadata_bytes,
                refills,
                flushes,
                released_spans,
                ..
            } = class;
            let unused = class.fragmentation(self.stats.pages.page_bytes);
            write!(
                f,
                "\n{slot_bytes:>8} {spans:>8} {live:>8} {cached:>8} {racks:>8} {free:>8} {metadata_bytes:>8} \
                 {refills:>8} {flushes:>8} {released_spans:>8} {unused:>6}%"
            )?;
        }
        Ok(())
    }
}

impl<S: Source + 'static> Objects<S> {
    /// Counts everything, by classes too, into an empty snapshot; `resident` is the system's figure. (Where the caller
    /// has it: as a result of this function its 8 KiB would be on the stack once more.)
    pub fn take_snapshot(&self, snapshot: &mut Snapshot, resident: usize) {
        let classes = &mut snapshot.classes;
        self.for_each_thread(|thread| {
            for class in SizeClass::all() {
                classes[class.index()].cached += thread.magazine(class).count(class) as usize;
            }
        });
        for class in SizeClass::all() {
            let state = self.central(class).state(&self.spans, class);
            let (out, spans) = (state.out as usize, state.spans as usize);
            let stats = &mut classes[class.index()];
            stats.slot_bytes = class.bytes();
            stats.spans = spans;
            stats.span_pages = PageCount(spans * class.pages());
            stats.peak_span_pages = PageCount(state.peak_spans as usize * class.pages());
            stats.cached += state.stored as usize;
            stats.racks = self.blanks.of_class(class);
            stats.live = out.saturating_sub(stats.cached + stats.racks);
            stats.free = (spans * class.slots() as usize).saturating_sub(out);
            stats.metadata_bytes = spans * class.pages() * metadata_of_page(class);
            stats.refills = state.refills;
            stats.flushes = state.flushes;
            stats.released_spans = state.released_spans;
        }
        snapshot.stats = self.stats();
        snapshot.resident = resident;
    }
}
