//! A heap's statistics for machines: names, kinds and values; JSON, Prometheus' text format, and differences.
//!
//! ```text
//!   Stats ───────────┐                                                              ┌─ the program, for other formats
//!   GlobalStats ─────┼─▶ figures: (name, what it means, gauge or counter, value) … ─┼─ "name":value, …      JSON
//!   Snapshot ────────┘                                                              └─ pageheap_name value  Prometheus
//! ```
//!
//! The figures of a layer are those of the layer below, followed by its own. A figure has the same name everywhere, so
//! a reader of one kind of statistics can read the others. Sizes are in bytes, except that what was released is counted
//! in pages (`released_pages_total`); names of counters end with `_total`.
//!
//! A metric may stand in a text for Prometheus only once. So several heaps either have metrics of different names, or
//! share them: each metric is written once, with one line for each heap, which a label tells apart.
//!
//! Worked example: a heap of 512 pages of 8 KiB, one of them allocated, reports `"grown_bytes":4194304` and
//! `"in_use_bytes":8192`.
//!
//! Arenas have figures of their own (`arena/stats.rs`), which are written by the same functions.
//!
//! Nothing here allocates: text goes to any writer.

#![forbid(unsafe_code)]

use core::fmt::{self, Write};
use core::iter;

use crate::units::PageCount;

use super::Stats;

/// One figure of a heap or an arena, for a program that reports it in a format of its own. JSON and Prometheus' text
/// need not be written with it: there are methods for them.
///
/// ```
/// # #[cfg(all(any(unix, windows), feature = "std"))] {
/// use pageheap::source::System;
/// use pageheap::{Config, PageCount, PageHeap};
///
/// let heap = PageHeap::new(System, Config::new(1 << 30)).unwrap();
/// heap.allocate(PageCount(3)).unwrap();
/// let in_use = heap.stats().figures().find(|figure| figure.name == "in_use_bytes").unwrap();
/// assert_eq!((in_use.value, in_use.is_counter), (3 * 8192, false));
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Figure {
    /// Its name in JSON; for Prometheus it comes after a prefix. Lower-case words joined by underscores; that of a
    /// counter ends with `_total`, that of a size in bytes with `_bytes`.
    pub name: &'static str,
    /// What it means, in one sentence without its full stop.
    pub help: &'static str,
    /// Whether it is a counter, which only ever grows. All others are gauges: they rise and fall.
    pub is_counter: bool,
    /// Its value. [`Stats`], [`GlobalStats`](crate::GlobalStats) and the others say what it includes.
    pub value: u64,
}

const GAUGES: [(&str, &str); 12] = [
    ("limit_bytes", "Bytes the heap may grow to"),
    (
        "soft_limit_bytes",
        "Bytes that should have memory at most; the limit if that is less",
    ),
    ("backed_bytes", "Bytes in pages with memory behind them"),
    (
        "peak_backed_bytes",
        "The most bytes in pages that ever had memory behind them",
    ),
    ("holes_bytes", "Bytes allocated without memory: free parts of spans"),
    ("grown_bytes", "Bytes the heap has grown to"),
    ("in_use_bytes", "Bytes in allocated pages"),
    ("cached_bytes", "Bytes in pages in caches of threads"),
    ("free_bytes", "Bytes in free pages"),
    ("released_bytes", "Bytes in pages free or cached without memory"),
    ("gap_bytes", "Bytes in pages that are not memory"),
    ("metadata_bytes", "Bytes in the heap's own tables, prepared"),
];
const COUNTERS: [(&str, &str); 16] = [
    ("refills_total", "Words of pages taken by caches"),
    ("flushes_total", "Words of pages given back by caches"),
    ("growths_total", "Times the heap grew"),
    ("refusals_total", "Times it had to say no"),
    ("reserve_calls_total", "System calls to reserve addresses"),
    ("prepare_calls_total", "System calls to grow"),
    ("commit_calls_total", "System calls to commit"),
    ("release_calls_total", "System calls to give memory back"),
    ("advise_calls_total", "System calls about huge pages"),
    ("discard_calls_total", "System calls to give tables of free pages back"),
    (
        "unreserve_calls_total",
        "System calls to give back addresses of no use, as it opened",
    ),
    (
        "clear_calls_total",
        "Blocks to be zeroed where the system was asked which pages are not zero",
    ),
    (
        "barrier_calls_total",
        "System calls to take back what sleeping threads keep",
    ),
    ("released_pages_total", "Pages given back"),
    (
        "released_lazily_pages_total",
        "Pages given back that the system takes when it wants them",
    ),
    ("scavenge_nanoseconds_total", "Time spent on giving memory back"),
];

/// Combines the values of gauges with their names.
pub(crate) fn gauges<const N: usize>(
    names: [(&'static str, &'static str); N],
    values: [u64; N],
) -> impl Iterator<Item = Figure> {
    named(names, false, values)
}

/// Combines the values of counters with their names.
pub(crate) fn counters<const N: usize>(
    names: [(&'static str, &'static str); N],
    values: [u64; N],
) -> impl Iterator<Item = Figure> {
    named(names, true, values)
}

fn named<const N: usize>(
    names: [(&'static str, &'static str); N],
    is_counter: bool,
    values: [u64; N],
) -> impl Iterator<Item = Figure> {
    let named = names.into_iter().zip(values);
    named.map(move |((name, help), value)| Figure {
        name,
        help,
        is_counter,
        value,
    })
}

/// The members of a JSON object.
pub(crate) fn json<W: Write>(figures: impl Iterator<Item = Figure>, out: &mut W) -> fmt::Result {
    for (index, Figure { name, value, .. }) in figures.enumerate() {
        let comma = if index > 0 { "," } else { "" };
        write!(out, "{comma}\"{name}\":{value}")?;
    }
    Ok(())
}

/// What the names of metrics begin with, unless the program has another name for the heap.
pub(crate) const PREFIX: &str = "pageheap";

/// What tells a sample of a metric from others: which of several heaps it is of, as a label and its value, and which
/// size class.
#[derive(Clone, Copy, Default)]
pub(crate) struct Labels<'a> {
    pub of: Option<(&'a str, &'a str)>,
    pub slot: Option<usize>,
}

impl fmt::Display for Labels<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.of, self.slot) {
            (None, None) => Ok(()),
            (None, Some(slot)) => write!(f, "{{slot=\"{slot}\"}}"),
            (Some((label, value)), None) => write!(f, "{{{label}=\"{}\"}}", Escaped(value)),
            (Some((label, value)), Some(slot)) => write!(f, "{{{label}=\"{}\",slot=\"{slot}\"}}", Escaped(value)),
        }
    }
}

/// The value of a label, as it stands between quotes.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for char in self.0.chars() {
            match char {
                '\n' => f.write_str("\\n")?,
                '\\' | '"' => write!(f, "\\{char}")?,
                _ => f.write_char(char)?,
            }
        }
        Ok(())
    }
}

/// Prometheus' text: the meaning and the type of each metric of `names`, then its value for each of `of`, with these
/// labels. What lacks a figure of that name has no line there.
pub(crate) fn prometheus<'a, T, I: Iterator<Item = Figure>, W: Write>(
    prefix: &str,
    names: I,
    of: impl Iterator<Item = (Labels<'a>, T)> + Clone,
    figures: impl Fn(T) -> I,
    out: &mut W,
) -> fmt::Result {
    for figure in names {
        let Figure { name, help, .. } = figure;
        let kind = if figure.is_counter { "counter" } else { "gauge" };
        writeln!(out, "# HELP {prefix}_{name} {help}.\n# TYPE {prefix}_{name} {kind}")?;
        for (labels, one) in of.clone() {
            if let Some(Figure { value, .. }) = figures(one).find(|figure| figure.name == name) {
                writeln!(out, "{prefix}_{name}{labels} {value}")?;
            }
        }
    }
    Ok(())
}

/// One of a kind, without a label, as [`prometheus`] wants it.
pub(crate) fn only<T>(one: &T) -> impl Iterator<Item = (Labels<'_>, &T)> + Clone {
    iter::once((Labels::default(), one))
}

/// Several of a kind, with the label that tells them apart, as [`prometheus`] wants them.
pub(crate) fn several<'a, T>(
    label: &'a str,
    of: &'a [(&'a str, T)],
) -> impl Iterator<Item = (Labels<'a>, &'a T)> + Clone {
    of.iter().map(move |(value, one)| {
        let of = Some((label, *value));
        (Labels { of, slot: None }, one)
    })
}

/// `part` as a percentage of `whole`; 0 if `whole` is 0. Not computed in `usize`, which may have 32 bits: a hundred
/// times 43 MB overflows that.
pub(crate) fn hundredths(part: usize, whole: usize) -> usize {
    (100 * part as u64).checked_div(whole as u64).unwrap_or(0) as usize
}

/// Turns a counter into what has been added since.
pub(crate) fn less(now: &mut u64, then: u64) {
    *now = now.saturating_sub(then);
}

impl Stats {
    /// Every figure: first the gauges, then the counters.
    pub fn figures(&self) -> impl Iterator<Item = Figure> + use<> {
        let bytes = |count: PageCount| (count.0 * self.page_bytes) as u64;
        let values = [
            bytes(self.limit),
            bytes(self.soft_limit.min(self.limit)),
            bytes(self.backed),
            bytes(self.peak_backed),
            bytes(self.holes),
            bytes(self.grown),
            bytes(self.in_use),
            bytes(self.cached),
            bytes(self.free),
            bytes(self.scavenged),
            bytes(self.gaps),
            self.metadata_bytes as u64,
        ];
        let mut copy = *self;
        let counted = copy.counters().map(|counter| *counter);
        gauges(GAUGES, values).chain(counters(COUNTERS, counted))
    }

    /// All counters, in the order of their names.
    fn counters(&mut self) -> [&mut u64; COUNTERS.len()] {
        let calls = &mut self.calls;
        [
            &mut self.refills,
            &mut self.flushes,
            &mut self.growths,
            &mut self.refusals,
            &mut calls.reserve,
            &mut calls.prepare,
            &mut calls.commit,
            &mut calls.release,
            &mut calls.advise,
            &mut calls.discard,
            &mut calls.unreserve,
            &mut calls.clear,
            &mut calls.barrier,
            &mut self.released,
            &mut self.released_lazily,
            &mut self.scavenge_nanoseconds,
        ]
    }

    /// The change since an earlier snapshot of the same heap: counters are the difference, everything else is the
    /// current value.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let (mut change, mut earlier) = (*self, *earlier);
        for (now, then) in change.counters().into_iter().zip(earlier.counters()) {
            less(now, *then);
        }
        change
    }

    /// Writes one JSON object with every figure by its name.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn json<W: Write>(&self, out: &mut W) -> fmt::Result {
        out.write_char('{')?;
        json(self.figures(), out)?;
        out.write_char('}')
    }

    /// Writes Prometheus' text format: each figure as `pageheap_…`.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn prometheus<W: Write>(&self, out: &mut W) -> fmt::Result {
        self.prometheus_as(PREFIX, out)
    }

    /// As [`prometheus`](Self::prometheus), with names that begin with `prefix` and an underscore: for a program that
    /// reports several heaps, because a metric may stand in a text only once. (With a label instead:
    /// [`prometheus_of`](Self::prometheus_of).) `prefix` has to be the beginning of a metric's name: a letter, then
    /// letters, digits and underscores.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn prometheus_as<W: Write>(&self, prefix: &str, out: &mut W) -> fmt::Result {
        prometheus(prefix, self.figures(), only(self), Self::figures, out)
    }

    /// As [`prometheus_as`](Self::prometheus_as), for several heaps whose metrics have the same names: each metric has
    /// a line for each heap, with the label `label`. The text is that of
    /// [`Snapshot::prometheus_of`](crate::Snapshot::prometheus_of), which has an example, without what it says of
    /// objects; the requirements are the same.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn prometheus_of<W: Write>(prefix: &str, label: &str, heaps: &[(&str, Self)], out: &mut W) -> fmt::Result {
        let heaps = several(label, heaps);
        prometheus(prefix, Self::default().figures(), heaps, Self::figures, out)
    }
}
