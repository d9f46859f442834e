//! An arena's statistics.
//!
//! ```text
//!   limit      ├──────────────────────────────────────────────────┤
//!   reserved   ├───────────────────────────────────┤                 pages taken
//!   committed  ├───────────────────────┤                             handed out at least once since
//!   allocated  ├───────────┤        peak ┆                           handed out now, with padding
//! ```

#![forbid(unsafe_code)]

use core::fmt::{self, Write};

use crate::heap::figures::{self, Figure, gauges};

const GAUGES: [(&str, &str); 6] = [
    ("limit_bytes", "The most that may be taken from the backing"),
    ("reserved_bytes", "Bytes in pages taken from the backing"),
    (
        "committed_bytes",
        "Bytes handed out at least once since they were taken",
    ),
    ("allocated_bytes", "Bytes handed out"),
    ("peak_bytes", "The most bytes that were ever handed out at one time"),
    ("slabs", "Blocks taken from the backing"),
];

/// An arena at one moment, in bytes. While other threads are at work, the fields may be of slightly different moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ArenaStats {
    /// The maximum of `reserved`; `usize::MAX` without a limit.
    pub limit: usize,
    /// Pages taken from the backing.
    pub reserved: usize,
    /// The part of `reserved` that has been handed out at least once since it was taken: an upper bound on resident
    /// memory, if the system provides memory on first touch. It excludes what an arena keeps for itself: a page at the
    /// end of each slab, and the nodes of a list's slots. For a sharded list, all slots that its shards, or the
    /// depot between them, have ever had are included, also those never handed out.
    pub committed: usize,
    /// Handed out at present, including padding between objects.
    pub allocated: usize,
    /// The maximum that `allocated` has reached. For a sharded list, slots in its shards and in the depot between
    /// them are included, so it is the same as `committed`.
    pub peak: usize,
    /// Blocks taken from the backing and not returned.
    pub slabs: usize,
}

impl ArenaStats {
    /// Every figure, but for the limit if there is none. All are gauges.
    pub fn figures(&self) -> impl Iterator<Item = Figure> + use<> {
        let values = [
            self.limit,
            self.reserved,
            self.committed,
            self.allocated,
            self.peak,
            self.slabs,
        ];
        let figures = gauges(GAUGES, values.map(|value| value as u64));
        figures.skip(usize::from(self.limit == usize::MAX))
    }

    /// Writes one JSON object with every figure by its name; without a limit, there is no `limit_bytes`.
    ///
    /// ```
    /// use pageheap::arena::{Arena, ArenaConfig};
    ///
    /// let arena = Arena::with_config(ArenaConfig::new().limit(1 << 20))?;
    /// let mut text = String::new();
    /// arena.stats().json(&mut text)?;
    /// assert!(text.starts_with("{\"limit_bytes\":1048576,\"reserved_bytes\":0,"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn json<W: Write>(&self, out: &mut W) -> fmt::Result {
        out.write_char('{')?;
        figures::json(self.figures(), out)?;
        out.write_char('}')
    }

    /// Writes Prometheus' text format: each figure by a name that begins with `prefix` and an underscore. An arena has
    /// no name of its own, and a metric may stand in a text only once. (For several arenas:
    /// [`prometheus_of`](Self::prometheus_of).) `prefix` has to be the beginning of a metric's name: a letter, then
    /// letters, digits and underscores.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn prometheus_as<W: Write>(&self, prefix: &str, out: &mut W) -> fmt::Result {
        figures::prometheus(prefix, self.figures(), figures::only(self), Self::figures, out)
    }

    /// As [`prometheus_as`](Self::prometheus_as), for several arenas whose metrics have the same names: each metric has
    /// a line for each arena, with the label `label`. Each of `arenas` is that label's value and statistics. The values
    /// have to differ; they may be any text, and are escaped. `label` has to be the name of a label: a letter, then
    /// letters, digits and underscores. An arena without a limit has no line for it.
    ///
    /// ```
    /// use pageheap::arena::{Arena, ArenaStats};
    ///
    /// let (requests, cache) = (Arena::new(), Arena::new());
    /// let arenas = [("requests", requests.stats()), ("cache", cache.stats())];
    /// let mut text = String::new();
    /// ArenaStats::prometheus_of("arena", "name", &arenas, &mut text)?;
    /// assert!(text.contains("\narena_allocated_bytes{name=\"cache\"} 0\n"));
    /// # Ok::<(), std::fmt::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn prometheus_of<W: Write>(prefix: &str, label: &str, arenas: &[(&str, Self)], out: &mut W) -> fmt::Result {
        let arenas = figures::several(label, arenas);
        figures::prometheus(prefix, Self::default().figures(), arenas, Self::figures, out)
    }
}

impl fmt::Display for ArenaStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit {
            usize::MAX => writeln!(f, "limit      {:>14}", "none")?,
            limit => writeln!(f, "limit      {limit:>14} bytes")?,
        }
        writeln!(f, "reserved   {:>14} bytes in {} slabs", self.reserved, self.slabs)?;
        writeln!(f, "committed  {:>14} bytes", self.committed)?;
        write!(f, "allocated  {:>14} bytes, {} at its peak", self.allocated, self.peak)
    }
}
