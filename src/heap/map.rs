//! What every page is, run by run: the heap as something to look at.
//!
//! ```text
//!   page   0      40        64     70        128
//!          │ in use │ cached  │ free  │ released  │ in use …         one entry each, in order of address
//!   last    metadata: the tables, as if behind the last page
//! ```
//!
//! An entry is as long as pages in a row are the same. Nothing is stopped for it: each word is read at its own moment,
//! so where others work the map is of a heap that never was, but never a page of it is missing or named twice.
//!
//! Cost: ~3 ns a word of 64 pages where nothing is in use, and there 1 ns more for each cache ever lent.

#![forbid(unsafe_code)]

use core::iter::Peekable;

use crate::geometry::{Shape, WORD_PAGES};
use crate::source::Source;
use crate::units::{PageCount, PageIndex, PageRun};

use super::PageHeap;

/// What a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PageUse {
    /// Allocated: a run of somebody's; of a [`GlobalHeap`](crate::GlobalHeap), a block of its own.
    Run,
    /// Of a [`GlobalHeap`](crate::GlobalHeap): cut into slots of so many bytes.
    Span {
        /// Bytes in a slot.
        slot: usize,
    },
    /// In a thread's cache, or its buffer.
    Cached,
    /// Free, with memory behind it.
    Free,
    /// Free, without.
    Released,
    /// The heap's tables. They lie in a range of their own; a map names them last, as pages behind the last one.
    Metadata,
}

/// Pages in a row that are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MapEntry {
    /// The pages.
    pub run: PageRun,
    /// What they are.
    pub is: PageUse,
}

/// Joins neighbours that are the same.
#[derive(Debug)]
pub(crate) struct Joined<I: Iterator<Item = PageUse>> {
    pages: Peekable<I>,
    start: usize,
}

impl<I: Iterator<Item = PageUse>> Joined<I> {
    /// Of what each page is, from page 0, and so many bytes of tables.
    pub(crate) fn with_tables(pages: I, bytes: usize, page_bytes: usize) -> impl Iterator<Item = MapEntry> {
        let mut joined = Some(Self::new(pages));
        let mut end = 0;
        core::iter::from_fn(move || {
            let entry = joined.as_mut()?.next().or_else(|| {
                joined = None;
                let run = PageRun::new(PageIndex(end), PageCount(bytes.div_ceil(page_bytes)))?;
                Some(MapEntry {
                    run,
                    is: PageUse::Metadata,
                })
            })?;
            end = entry.run.end().0;
            Some(entry)
        })
    }

    fn new(pages: I) -> Self {
        Self {
            pages: pages.peekable(),
            start: 0,
        }
    }
}

impl<I: Iterator<Item = PageUse>> Iterator for Joined<I> {
    type Item = MapEntry;

    fn next(&mut self) -> Option<MapEntry> {
        let is = self.pages.next()?;
        let mut count = 1;
        while self.pages.next_if_eq(&is).is_some() {
            count += 1;
        }
        let run = PageRun::new(PageIndex(self.start), PageCount(count))?;
        self.start += count;
        Some(MapEntry { run, is })
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// What every page is, in order of address, neighbours that are the same together: up to what the heap has grown
    /// to. The last entry is [`PageUse::Metadata`].
    ///
    /// ```
    /// use pageheap::source::System;
    /// use pageheap::{Config, PageCount, PageHeap, PageUse};
    ///
    /// let heap: PageHeap<System> = PageHeap::new(System, Config::new(1 << 30)).unwrap();
    /// let run = heap.allocate(PageCount(3)).unwrap();
    /// let entries: Vec<_> = heap.map().collect();
    /// assert_eq!((entries[0].run, entries[0].is), (run, PageUse::Run));
    /// assert_eq!(entries[1].is, PageUse::Released, "never used");
    /// ```
    pub fn map(&self) -> impl Iterator<Item = MapEntry> + '_ {
        Joined::with_tables(self.pages(), self.table_bytes(), G::PAGE_BYTES)
    }

    /// Bytes of the heap's tables.
    pub(crate) fn table_bytes(&self) -> usize {
        self.metadata.bytes()
    }

    /// What each page is.
    pub(crate) fn pages(&self) -> impl Iterator<Item = PageUse> + '_ {
        let grown = self.set.grown();
        (0..grown.div_ceil(WORD_PAGES)).flat_map(move |word| {
            let (free, scavenged) = (self.set.free.load(word), self.set.scavenged.load(word));
            let cached = if free == u64::MAX { 0 } else { self.cached_in(word) };
            (0..WORD_PAGES.min(grown - word * WORD_PAGES)).map(move |page| {
                let is = |bits: u64| bits >> page & 1 == 1;
                match (is(free), is(scavenged), is(cached)) {
                    (true, true, _) => PageUse::Released,
                    (true, false, _) => PageUse::Free,
                    (false, _, true) => PageUse::Cached,
                    (false, _, false) => PageUse::Run,
                }
            })
        })
    }

    /// The pages of a word that are in caches.
    fn cached_in(&self, word: usize) -> u64 {
        let mut cached = 0;
        self.for_each_slot(|slot| {
            for (index, pages) in slot.words() {
                cached |= if index == word { pages } else { 0 };
            }
        });
        cached
    }
}
