//! Statistics of the object layer, counted on request.

#![forbid(unsafe_code)]

use core::fmt::{self, Write};

use crate::fatal;
use crate::heap::figures::{self, Figure, counters, gauges, less};
use crate::heap::{Joined, MapEntry, PageUse, Stats};
use crate::source::Source;
use crate::units::{PageCount, PageIndex};

use super::Objects;
use super::size_class::{PAGE_BYTES, SizeClass};

const GAUGES: [(&str, &str); 8] = [
    (
        "live_bytes",
        "Bytes in blocks of the program, rounded up to slots and pages",
    ),
    ("span_bytes", "Bytes in pages cut into slots"),
    ("magazine_bytes", "Bytes in free slots in magazines of threads"),
    ("stored_bytes", "Bytes in free slots in stores of classes"),
    (
        "rack_bytes",
        "Bytes in tables of free slots' addresses: slots, and pages",
    ),
    (
        "shelf_bytes",
        "Bytes in free runs on shelves of threads, and those put aside",
    ),
    (
        "roomy_bytes",
        "Bytes in slots and pages of blocks that have room to grow",
    ),
    ("threads", "Threads with a structure of their own"),
];
const COUNTERS: [(&str, &str); 1] = [("batches_total", "Batches between magazines and classes")];

/// A [`GlobalHeap`](crate::GlobalHeap) or a [`Heap`](crate::Heap) at one moment. If other threads are at work, the
/// parts are of slightly different moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct GlobalStats {
    /// The pages. [`Stats::in_use`] counts those of spans, of large blocks and of arenas,
    /// [`shelf_pages`](Self::shelf_pages), [`rack_pages`](Self::rack_pages) and
    /// [`structure_pages`](Self::structure_pages); calls and metadata are those of both layers.
    pub pages: Stats,
    /// Pages cut into slots.
    pub span_pages: PageCount,
    /// Spans.
    pub spans: usize,
    /// Slots in use, rounded up to their classes, and threads' structures (but not those that threads share).
    pub slot_bytes: usize,
    /// Free slots in threads' magazines.
    pub magazine_bytes: usize,
    /// Pages of runs on threads' shelves, and of those put aside: free, and kept for the next large block.
    pub shelf_pages: PageCount,
    /// Free slots in the classes' stores.
    pub stored_bytes: usize,
    /// Slots that are tables of free slots' addresses, in which batches travel: in stores, spares, and blank ones. (As
    /// text, in JSON and for Prometheus the figure of this name includes [`rack_pages`](Self::rack_pages).)
    pub rack_bytes: usize,
    /// Pages with the tables of free slots' addresses that threads' magazines use.
    pub rack_pages: PageCount,
    /// Pages with structures that threads share, in a heap whose source had no more room for tables. (Elsewhere these
    /// structures are part of [`Stats::metadata_bytes`].)
    pub structure_pages: PageCount,
    /// Slots and pages that hold blocks with room: these blocks have grown and may grow on, or were shortened when
    /// there was no memory. A part of what is in use.
    pub roomy_bytes: usize,
    /// Batches moved between magazines and classes.
    pub batches: u64,
    /// Threads that have a structure of their own now.
    pub threads: usize,
    /// Structures ever made for threads; they are reused.
    pub thread_structures: usize,
}

impl GlobalStats {
    /// Bytes in blocks of the program, rounded up to slots and pages, in pages that arenas hold, and in threads' own
    /// structures, 3 KiB each. As text, in JSON and for Prometheus: `live_bytes`. (`in_use_bytes` there is
    /// [`Stats::in_use`], whole pages, with what magazines and shelves keep; `released_bytes` is [`Stats::scavenged`];
    /// `cached_bytes` are pages in page caches alone.)
    #[must_use]
    pub fn bytes_in_use(&self) -> usize {
        let large = self
            .pages
            .in_use
            .0
            .saturating_sub(self.span_pages.0 + self.shelf_pages.0 + self.rack_pages.0 + self.structure_pages.0);
        large * self.pages.page_bytes + self.slot_bytes
    }

    /// How many bytes more are in use than at an earlier count of the same heap: [`bytes_in_use`](Self::bytes_in_use)
    /// now, less what it was then; negative if there are fewer. To look for leaks, count after a warm-up and again when
    /// all that was allocated in between should be free. What is in the difference besides the program's blocks: a
    /// thread that has begun to use the heap since then has a structure of 3 KiB, which stays, for the next thread,
    /// when it ends.
    ///
    /// ```
    /// use pageheap::GlobalHeap;
    ///
    /// #[global_allocator]
    /// static HEAP: GlobalHeap = GlobalHeap::new();
    ///
    /// let before = HEAP.stats();
    /// let leaked: &mut [u8] = Vec::leak(vec![0; 100_000]);
    /// assert!(HEAP.stats().bytes_added_since(&before) >= leaked.len() as isize);
    /// ```
    #[must_use]
    pub fn bytes_added_since(&self, earlier: &Self) -> isize {
        self.bytes_in_use().wrapping_sub(earlier.bytes_in_use()).cast_signed()
    }

    /// What has changed since an earlier count of the same heap: counters are differences, all else is the current
    /// value. So [`bytes_in_use`](Self::bytes_in_use) of the result is what is in use now, not what has been added:
    /// that is [`bytes_added_since`](Self::bytes_added_since).
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut change = Self {
            pages: self.pages.since(&earlier.pages),
            ..*self
        };
        less(&mut change.batches, earlier.batches);
        change
    }

    /// Every figure: those of the pages, then its own.
    pub fn figures(&self) -> impl Iterator<Item = Figure> + use<> {
        let page = self.pages.page_bytes;
        let values = [
            self.bytes_in_use(),
            self.span_pages.0 * page,
            self.magazine_bytes,
            self.stored_bytes,
            self.rack_bytes + self.rack_pages.0 * page,
            self.shelf_pages.0 * page,
            self.roomy_bytes,
            self.threads,
        ];
        let gauges = gauges(GAUGES, values.map(|value| value as u64));
        let counters = counters(COUNTERS, [self.batches]);
        self.pages.figures().chain(gauges).chain(counters)
    }

    /// Writes one JSON object: every figure by name, including those of the pages.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn json<W: Write>(&self, out: &mut W) -> fmt::Result {
        out.write_char('{')?;
        figures::json(self.figures(), out)?;
        out.write_char('}')
    }

    /// Writes Prometheus' text format: each figure as `pageheap_…`, including those of the pages.
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
        figures::prometheus(prefix, self.figures(), figures::only(self), Self::figures, out)
    }

    /// As [`prometheus_as`](Self::prometheus_as), for several heaps whose metrics have the same names: each metric has
    /// a line for each heap, with the label `label`. The text is that of
    /// [`Snapshot::prometheus_of`](crate::Snapshot::prometheus_of), which has an example, without the classes and the
    /// process's resident memory; the requirements are the same.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn prometheus_of<W: Write>(prefix: &str, label: &str, heaps: &[(&str, Self)], out: &mut W) -> fmt::Result {
        let heaps = figures::several(label, heaps);
        figures::prometheus(prefix, Self::default().figures(), heaps, Self::figures, out)
    }
}

impl<S: Source + 'static> Objects<S> {
    /// What each page is; see [`PageHeap::map`](crate::PageHeap::map).
    pub fn map(&self) -> impl Iterator<Item = MapEntry> + '_ {
        let covered = self.spans.covered();
        let what = move |page| match (page < covered).then(|| self.span_at(PageIndex(page))).flatten() {
            Some((class, _)) => PageUse::Span { slot: class.bytes() },
            None => PageUse::Run,
        };
        let mut end = 0;
        let pieces = self.heap.pieces().flat_map(move |(is, count)| {
            let start = end;
            end += count;
            // What is a run to the heap may be several spans.
            let each = if is == PageUse::Run { 1 } else { count };
            (start..end)
                .step_by(each)
                .map(move |page| (if is == PageUse::Run { what(page) } else { is }, each))
        });
        let tables = self.heap.table_bytes() + self.tables.state().1 + self.commons.annex_size().0;
        Joined::with_tables(pieces, tables, PAGE_BYTES)
    }

    /// Counts everything. O(heap).
    pub fn stats(&self) -> GlobalStats {
        let mut stats = GlobalStats {
            pages: self.heap.stats(),
            roomy_bytes: self.roomy_bytes(),
            shelf_pages: self.aside.pages(),
            ..GlobalStats::default()
        };
        // Threads first, as in `snapshot`: a thread that begins meanwhile takes slots, and what is in its magazines
        // must not be subtracted from what was out before.
        self.for_each_thread(|thread| {
            stats.shelf_pages.0 += thread.shelf().pages().0;
            stats.rack_pages.0 += thread.plot().pages().0;
            for class in SizeClass::all() {
                stats.magazine_bytes += thread.magazine(class).count(class) as usize * class.bytes();
            }
        });
        for class in SizeClass::all() {
            let state = self.central(class).state(&self.spans, class);
            stats.spans += state.spans as usize;
            stats.span_pages.0 += state.spans as usize * class.pages();
            stats.slot_bytes += state.out as usize * class.bytes();
            stats.stored_bytes += state.stored as usize * class.bytes();
            stats.rack_bytes += self.blanks.of_class(class) * class.bytes();
            stats.batches += state.refills + state.flushes;
        }
        stats.slot_bytes = stats
            .slot_bytes
            .saturating_sub(stats.magazine_bytes + stats.stored_bytes + stats.rack_bytes);
        if !fatal::is_ending() {
            (stats.threads, stats.thread_structures) = self.register.counts();
        }
        let (prepare, bytes) = self.tables.state();
        stats.pages.calls.prepare += prepare;
        stats.pages.calls.reserve += 1;
        let (annex, pages) = self.commons.annex_size();
        let is_apart = u64::from(annex > 0);
        stats.pages.calls.prepare += is_apart;
        stats.pages.calls.reserve += is_apart;
        stats.pages.metadata_bytes += bytes + annex;
        stats.structure_pages = pages;
        stats
    }
}

impl fmt::Display for GlobalStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        writeln!(f, "{}", self.pages)?;
        let bytes = self.bytes_in_use();
        writeln!(f, "blocks    {bytes:>9} bytes, {:.1} MiB", mib(bytes))?;
        writeln!(
            f,
            "spans     {:>9}   {} pages, {:.1} MiB",
            self.spans,
            self.span_pages.0,
            mib(self.span_pages.0 * self.pages.page_bytes)
        )?;
        writeln!(
            f,
            "magazines {:>9} bytes, in store {} bytes, {} batches, racks {} bytes",
            self.magazine_bytes,
            self.stored_bytes,
            self.batches,
            self.rack_bytes + self.rack_pages.0 * self.pages.page_bytes
        )?;
        writeln!(
            f,
            "shelves   {:>9} pages, blocks with room to grow in {} bytes",
            self.shelf_pages.0, self.roomy_bytes
        )?;
        write!(
            f,
            "threads   {:>9}   of {} structures",
            self.threads, self.thread_structures
        )
    }
}
