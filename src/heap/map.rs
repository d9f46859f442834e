//! What every page is, run by run: a view of the whole heap.
//!
//! ```text
//!   page   0      40        64     70        128
//!          │ in use │ cached  │ free  │ released  │ in use …         one entry each, in order of address
//!   last    metadata: the tables, as if behind the last page
//! ```
//!
//! One entry covers consecutive pages of the same kind. Taking a map stops no thread: each word is read at its own
//! moment. While other threads work, the map may show a heap that never existed as a whole, but it never omits a page
//! or lists one twice.
//!
//! Cost: ~19 ns for each piece, which is consecutive pages of one word of 64 that are the same; 1 ns more for each word
//! in which a page is in use, and each cache ever lent.

#![forbid(unsafe_code)]

use core::iter::Peekable;

use crate::geometry::{Shape, WORD_PAGES};
use crate::source::Source;
use crate::units::{PageCount, PageIndex, PageRun};

use super::PageHeap;

/// What a page is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PageUse {
    /// Allocated: part of a caller's run; in a [`GlobalHeap`](crate::GlobalHeap) or a [`Heap`](crate::Heap), of a large
    /// block, of an arena, of a free run on a thread's shelf, or of a thread's tables for free blocks.
    Run,
    /// In a [`GlobalHeap`](crate::GlobalHeap) or a [`Heap`](crate::Heap): divided into slots of this many bytes.
    Span {
        /// Bytes in a slot.
        slot: usize,
    },
    /// In a thread's cache or its buffer.
    Cached,
    /// Free, with memory behind it.
    Free,
    /// Free, with no memory behind it.
    Released,
    /// Not memory, by what the source [says](Source::gap).
    Gap,
    /// The heap's tables. They lie in a separate range; a map lists them last, as if they followed the last page.
    Metadata,
}

/// Consecutive pages of the same kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct MapEntry {
    /// The pages.
    pub run: PageRun,
    /// What they are used for.
    pub is: PageUse,
}

/// Joins neighbours of the same kind.
#[derive(Debug)]
pub(crate) struct Joined<I: Iterator<Item = (PageUse, usize)>> {
    pieces: Peekable<I>,
    start: usize,
}

impl<I: Iterator<Item = (PageUse, usize)>> Joined<I> {
    /// From what the pages are, piece by piece, starting at page 0, and the size of the tables in bytes.
    pub(crate) fn with_tables(pieces: I, bytes: usize, page_bytes: usize) -> impl Iterator<Item = MapEntry> {
        let mut joined = Some(Self::new(pieces));
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

    fn new(pieces: I) -> Self {
        Self {
            pieces: pieces.peekable(),
            start: 0,
        }
    }
}

impl<I: Iterator<Item = (PageUse, usize)>> Iterator for Joined<I> {
    type Item = MapEntry;

    fn next(&mut self) -> Option<MapEntry> {
        let (is, mut count) = self.pieces.next()?;
        while let Some((_, more)) = self.pieces.next_if(|&(other, _)| other == is) {
            count += more;
        }
        let run = PageRun::new(PageIndex(self.start), PageCount(count))?;
        self.start += count;
        Some(MapEntry { run, is })
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// What every page is, in address order, up to what the heap has grown to. Neighbours of the same kind form one
    /// entry. The last entry is [`PageUse::Metadata`].
    ///
    /// ```
    /// use pageheap::source::System;
    /// use pageheap::{Config, PageCount, PageHeap, PageUse};
    ///
    /// let heap = PageHeap::new(System, Config::new(1 << 30)).unwrap();
    /// let run = heap.allocate(PageCount(3)).unwrap();
    /// let entries: Vec<_> = heap.map().collect();
    /// assert_eq!((entries[0].run, entries[0].is), (run, PageUse::Run));
    /// assert_eq!(entries[1].is, PageUse::Released, "never used");
    /// ```
    pub fn map(&self) -> impl Iterator<Item = MapEntry> + '_ {
        Joined::with_tables(self.pieces(), self.table_bytes(), G::PAGE_BYTES)
    }

    /// Bytes of the heap's tables.
    pub(crate) fn table_bytes(&self) -> usize {
        self.metadata.bytes()
    }

    /// What the pages are, in pieces: consecutive pages of one word that are the same, and how many.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (PageUse, usize)> + '_ {
        let grown = self.set.grown();
        (0..grown.div_ceil(WORD_PAGES)).flat_map(move |word| {
            let (free, scavenged) = (self.set.free.load(word), self.set.scavenged.load(word));
            let (cached, gaps) = if free == u64::MAX {
                (0, 0)
            } else {
                (self.cached_in(word), self.gaps_in_word(word, grown))
            };
            let kinds = [
                (PageUse::Released, free & scavenged),
                (PageUse::Free, free & !scavenged),
                (PageUse::Cached, !free & cached),
                (PageUse::Gap, !free & !cached & gaps),
                (PageUse::Run, !free & !cached & !gaps),
            ];
            let (mut page, end) = (0, WORD_PAGES.min(grown - word * WORD_PAGES));
            core::iter::from_fn(move || {
                if page == end {
                    return None;
                }
                // Each page is of one kind.
                let (is, pages) = kinds.into_iter().find(|(_, pages)| pages >> page & 1 == 1)?;
                let count = ((pages >> page).trailing_ones() as usize).min(end - page);
                page += count;
                Some((is, count))
            })
        })
    }

    /// The pages of a word that are in caches.
    pub(super) fn cached_in(&self, word: usize) -> u64 {
        let mut cached = 0;
        self.for_each_slot(|slot| {
            for (index, pages) in slot.words() {
                cached |= if index == word { pages } else { 0 };
            }
        });
        cached
    }
}
