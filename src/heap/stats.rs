//! What a heap has done, and where its pages are.
//!
//! Where pages are is computed on request, from the bitmaps and the slots (2 to 3 ns a word of pages): the allocation
//! paths keep no account. What was done is counted on paths that are slow anyway.

#![forbid(unsafe_code)]

use core::fmt;

use crate::geometry::Shape;
use crate::source::Source;
use crate::sync::{AtomicU64, Ordering};
use crate::units::PageCount;

use super::PageHeap;

/// A counter that nothing depends on.
#[derive(Debug)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(super) fn add(&self, amount: u64) {
        // Relaxed: a statistic.
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn get(&self) -> u64 {
        // Relaxed: a statistic.
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
pub(super) struct Counters {
    pub(super) growths: Counter,
    /// Pages grown across that are not memory.
    pub(super) gaps: Counter,
    pub(super) refusals: Counter,
    pub(super) reserve: Counter,
    pub(super) prepare: Counter,
    pub(super) commit: Counter,
    pub(super) release: Counter,
    pub(super) released: Counter,
    pub(super) lazily: Counter,
    pub(super) advise: Counter,
    pub(super) barrier: Counter,
    pub(super) discard: Counter,
    pub(super) unreserve: Counter,
    pub(super) clear: Counter,
    pub(super) scavenging: Counter,
}

impl Counters {
    /// Counters of a heap for which these requests have been made so far.
    pub(super) fn of(calls: &Calls) -> Self {
        let counter = |count| Counter(AtomicU64::new(count));
        Self {
            growths: counter(0),
            gaps: counter(0),
            refusals: counter(0),
            reserve: counter(calls.reserve),
            prepare: counter(calls.prepare),
            commit: counter(calls.commit),
            release: counter(calls.release),
            released: counter(0),
            lazily: counter(0),
            advise: counter(calls.advise),
            barrier: counter(calls.barrier),
            discard: counter(calls.discard),
            unreserve: counter(calls.unreserve),
            clear: counter(calls.clear),
            scavenging: counter(0),
        }
    }
}

/// How many requests a heap has made to its source or the system, by kind. With `System` each is one system call unless
/// noted otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Calls {
    /// Address space was reserved.
    pub reserve: u64,
    /// Memory was prepared because the heap or its tables grew.
    pub prepare: u64,
    /// Pages were committed. Zero if the source does not require it.
    pub commit: u64,
    /// Pages were released by the scavenger.
    pub release: u64,
    /// Huge pages were requested, or declined.
    pub advise: u64,
    /// Tables of free pages, which carry no information while the pages are free, were given back.
    pub discard: u64,
    /// Unusable address space was given back when the heap opened.
    pub unreserve: u64,
    /// Blocks to be zeroed for which the source was asked which pages are not zero. With `System` three calls or more.
    pub clear: u64,
    /// Fences through all threads, issued to reclaim what sleeping threads keep. Not requests to the source.
    pub barrier: u64,
}

/// The state of a heap at one moment. If other threads are at work, the parts are from slightly different moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Stats {
    /// Bytes in a page.
    pub page_bytes: usize,
    /// The maximum number of pages the heap may grow to.
    pub limit: PageCount,
    /// The maximum number of pages that should have memory behind them. Without a soft limit it is beyond any number of
    /// pages; the figure in JSON and for Prometheus is then that of the limit.
    pub soft_limit: PageCount,
    /// Pages the heap has grown to: in use + cached + free + gaps.
    pub grown: PageCount,
    /// Pages allocated.
    pub in_use: PageCount,
    /// Pages in caches and their buffers.
    pub cached: PageCount,
    /// Pages free for any thread.
    pub free: PageCount,
    /// Free or cached pages with no memory behind them. (In JSON and for Prometheus this is `released_bytes`;
    /// `released_pages_total` is [`released`](Self::released).)
    pub scavenged: PageCount,
    /// Pages that are not memory, by what the source [says](Source::gap).
    pub gaps: PageCount,
    /// Bytes prepared for the heap's own tables. Only the parts that have been written are resident.
    pub metadata_bytes: usize,
    /// Words taken by caches.
    pub refills: u64,
    /// Words given back by caches.
    pub flushes: u64,
    /// Times the heap grew.
    pub growths: u64,
    /// Allocations refused in the end: one per call, including those that only the limit forbids. Not counted are
    /// requests that can never be met (no pages, more than [`capacity`](PageHeap::capacity), an alignment that is not a
    /// power of two) and those for particular pages ([`allocate_at`](PageHeap::allocate_at),
    /// [`grow_in_place`](PageHeap::grow_in_place)). Under an object layer every refused block counts, whatever was
    /// requested.
    pub refusals: u64,
    /// Pages with memory behind them: grown, and neither scavenged nor holes nor gaps. Pages that were released lazily
    /// count too, because nobody knows whether the system has taken them yet; unless the source commits pages.
    pub backed: PageCount,
    /// The maximum of `backed` so far.
    pub peak_backed: PageCount,
    /// Allocated pages without memory behind them: under an object layer, parts of spans that contain no block.
    pub holes: PageCount,
    /// Pages released to the source; a page counts once for each release.
    pub released: u64,
    /// Those of them that were released lazily: the system takes them when it wants them; see
    /// [`Config::release_lazily`](crate::Config::release_lazily).
    pub released_lazily: u64,
    /// Nanoseconds spent on giving memory back. [`tick`](PageHeap::tick) measures by its clock;
    /// [`release`](PageHeap::release), [`scavenge`](PageHeap::scavenge) and the soft limit by the thread's working
    /// time, if the source knows it ([`Source::worked`]), as `System` does.
    pub scavenge_nanoseconds: u64,
    /// Requests to the source.
    pub calls: Calls,
}

impl Stats {
    /// Bytes of the pages that are not free: allocated, in caches, or not memory. The figure to compare with a
    /// [`limit`](Self::limit); `in_use` and `cached` are in it, so what an object layer keeps is too.
    #[must_use]
    pub const fn bytes_taken(&self) -> usize {
        (self.in_use.0 + self.cached.0 + self.gaps.0) * self.page_bytes
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// Does work that gives memory back outside a tick, and counts how long it took.
    pub(crate) fn timed<R>(&self, work: impl FnOnce() -> R) -> R {
        let begin = self.source.worked();
        let done = work();
        if let (Some(begin), Some(end)) = (begin, self.source.worked()) {
            let passed = end.saturating_sub(begin).as_nanos();
            self.counters.scavenging.add(u64::try_from(passed).unwrap_or(u64::MAX));
        }
        done
    }

    /// Collects the statistics. O(heap): 2 to 3 ns for each 64 pages.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut stats = Stats {
            page_bytes: G::PAGE_BYTES,
            limit: self.limit(),
            soft_limit: self.soft_limit(),
            ..Stats::default()
        };
        self.for_each_slot(|slot| {
            let state = slot.state();
            stats.cached.0 += state.pages;
            stats.scavenged.0 += state.scavenged;
            stats.refills += state.refills;
            stats.flushes += state.flushes;
        });
        let (grown, free, scavenged) = self.set.count();
        (stats.grown, stats.free) = (PageCount(grown), PageCount(free));
        stats.scavenged.0 += scavenged;
        stats.gaps = PageCount(self.counters.gaps.get() as usize);
        let in_use = grown.saturating_sub(free).saturating_sub(stats.cached.0);
        stats.in_use = PageCount(in_use.saturating_sub(stats.gaps.0));
        stats.metadata_bytes = self.metadata.bytes();
        stats.growths = self.counters.growths.get();
        stats.refusals = self.counters.refusals.get();
        (stats.backed, stats.peak_backed) = (self.backed(), self.peak_backed());
        stats.holes = self.holes();
        stats.released = self.counters.released.get();
        stats.released_lazily = self.counters.lazily.get();
        stats.scavenge_nanoseconds = self.counters.scavenging.get();
        stats.calls = Calls {
            reserve: self.counters.reserve.get(),
            prepare: self.counters.prepare.get(),
            commit: self.counters.commit.get(),
            release: self.counters.release.get(),
            advise: self.counters.advise.get(),
            discard: self.counters.discard.get(),
            unreserve: self.counters.unreserve.get(),
            clear: self.counters.clear.get(),
            barrier: self.counters.barrier.get(),
        };
        stats
    }
}

/// Its limits and its size, not everything in it. O(1).
impl<S: Source, G: Shape> fmt::Debug for PageHeap<S, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageHeap")
            .field("limit", &self.limit())
            .field("capacity", &self.capacity())
            .field("grown", &self.grown())
            .field("backed", &self.backed())
            .finish_non_exhaustive()
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |pages: PageCount| (pages.0 * self.page_bytes) as f64 / f64::from(1 << 20);
        writeln!(
            f,
            "pages     {:>9} of {} bytes, {:.1} MiB",
            self.grown.0,
            self.page_bytes,
            mib(self.grown)
        )?;
        writeln!(f, "  in use  {:>9}  {:>9.1} MiB", self.in_use.0, mib(self.in_use))?;
        writeln!(f, "  cached  {:>9}  {:>9.1} MiB", self.cached.0, mib(self.cached))?;
        writeln!(f, "  free    {:>9}  {:>9.1} MiB", self.free.0, mib(self.free))?;
        if self.gaps.0 > 0 {
            writeln!(f, "  gaps    {:>9}  {:>9.1} MiB", self.gaps.0, mib(self.gaps))?;
        }
        writeln!(
            f,
            "  (scavenged {:>6}  {:>9.1} MiB of the cached and free)",
            self.scavenged.0,
            mib(self.scavenged)
        )?;
        writeln!(
            f,
            "  (holes   {:>9}  {:>9.1} MiB of those in use)",
            self.holes.0,
            mib(self.holes)
        )?;
        writeln!(
            f,
            "  (backed  {:>9}  {:>9.1} MiB, {:.1} MiB at most)",
            self.backed.0,
            mib(self.backed),
            mib(self.peak_backed)
        )?;
        write!(f, "limit     {:>9}  {:>9.1} MiB, soft ", self.limit.0, mib(self.limit))?;
        // As many pages as there can be are no limit that anybody meant.
        if self.soft_limit.0 >= usize::MAX / self.page_bytes.max(1) {
            writeln!(f, "none")?;
        } else {
            writeln!(f, "{:.1} MiB", mib(self.soft_limit))?;
        }
        writeln!(f, "metadata  {:>9} bytes prepared", self.metadata_bytes)?;
        writeln!(f, "refills   {:>9}   flushes {}", self.refills, self.flushes)?;
        writeln!(f, "growths   {:>9}   refusals {}", self.growths, self.refusals)?;
        writeln!(
            f,
            "scavenged {:>9} pages, {} of them lazily, in {:.3} s",
            self.released,
            self.released_lazily,
            self.scavenge_nanoseconds as f64 / 1e9
        )?;
        f.write_str("source    ")?;
        let calls = self
            .figures()
            .filter_map(|figure| Some((figure.name.strip_suffix("_calls_total")?, figure.value)));
        for (index, (verb, count)) in calls.enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{verb} {count}")?;
        }
        Ok(())
    }
}
