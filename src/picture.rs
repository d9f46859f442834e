//! A heap as a picture: text for a terminal, SVG for a page.
//!
//! ```text
//!   ####==####c.  ####....      # spans, = runs, c cached, . free, blank released, / not memory, m tables;
//!   ####======..m               one character stands for several pages, and shows what most of them are
//! ```
//!
//! A picture is divided into **cells** of equally many pages. Both kinds are drawn as the map is read, row by row, into
//! any [`fmt::Write`]. Nothing is allocated, so the program's own allocator may draw itself, with a writer that does
//! not allocate either.
//!
//! Worked example: a heap of 128 MiB in cells of 16 pages (128 KiB) and rows of 64 is 16 rows; its SVG has one
//! rectangle for each stretch of equal cells, typically 10 to 30 KiB.

#![forbid(unsafe_code)]

use core::fmt;

use crate::heap::{MapEntry, PageUse};

/// The number of kinds of pages, in the order of a cell's counts.
const KINDS: usize = 7;
const SIGNS: [char; KINDS] = ['#', '=', 'c', '.', ' ', '/', 'm'];
const COLORS: [&str; KINDS] = [
    "#1f6f8b", "#e0803c", "#d9b93b", "#b9c4c9", "#f4f4f2", "#4a4a4a", "#6b4e8e",
];
const NAMES: [&str; KINDS] = ["spans", "runs", "cached", "free", "released", "gaps", "metadata"];

/// Width and height of a cell, in units of an SVG picture.
const CELL: usize = 10;
/// Heights: of the legend, of a title, of the gap between two frames.
const HEAD: usize = 30;
const TITLE: usize = 20;
const GAP: usize = 12;

fn kind(is: PageUse) -> usize {
    match is {
        PageUse::Span { .. } => 0,
        PageUse::Run => 1,
        PageUse::Cached => 2,
        PageUse::Free => 3,
        PageUse::Released => 4,
        PageUse::Gap => 5,
        PageUse::Metadata => 6,
    }
}

/// How to draw a heap: how many pages per cell, how many cells per row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Picture {
    /// Pages per cell; 0 means 1.
    pub pages: usize,
    /// Cells per row; 0 means 1.
    pub columns: usize,
}

impl Picture {
    /// A picture with `pages` pages per cell and `columns` cells per row; zeros count as ones.
    #[must_use]
    pub const fn new(pages: usize, columns: usize) -> Self {
        Self {
            pages: if pages == 0 { 1 } else { pages },
            columns: if columns == 0 { 1 } else { columns },
        }
    }

    /// What most pages of each cell are, cell by cell. For a picture without zeros.
    fn cells(self, map: impl Iterator<Item = MapEntry>, mut paint: impl FnMut(usize) -> fmt::Result) -> fmt::Result {
        let (mut counts, mut filled) = ([0; KINDS], 0);
        let mut finish = |counts: &mut [usize; KINDS]| {
            // The first of equals, so that pages in use show.
            let most = (0..KINDS).rev().max_by_key(|&kind| counts[kind]).unwrap_or(0);
            *counts = [0; KINDS];
            paint(most)
        };
        for MapEntry { run, is } in map {
            let mut left = run.pages().0;
            while left > 0 {
                let part = left.min(self.pages - filled);
                counts[kind(is)] += part;
                filled += part;
                left -= part;
                if filled == self.pages {
                    filled = 0;
                    finish(&mut counts)?;
                }
            }
        }
        if filled > 0 { finish(&mut counts) } else { Ok(()) }
    }

    /// Draws as text, one line per row.
    ///
    /// ```
    /// use pageheap::{Config, PageCount, PageHeap, Picture, source::System};
    ///
    /// let heap = PageHeap::new(System, Config::new(1 << 30)).unwrap();
    /// heap.allocate(PageCount(100)).unwrap();
    /// let mut text = String::new();
    /// Picture::new(16, 64).text(heap.map(), &mut text).unwrap();
    /// assert!(text.starts_with("====== "));
    /// ```
    ///
    /// # Errors
    /// Those of `out`.
    pub fn text<W: fmt::Write>(self, map: impl Iterator<Item = MapEntry>, out: &mut W) -> fmt::Result {
        let (mut column, picture) = (0, Self::new(self.pages, self.columns));
        picture.cells(map, |kind| {
            if column == picture.columns {
                column = 0;
                out.write_char('\n')?;
            }
            column += 1;
            out.write_char(SIGNS[kind])
        })?;
        out.write_char('\n')
    }

    /// Draws a complete SVG picture, with a title and a legend, of a heap of up to `pages` pages.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn svg<W: fmt::Write>(
        self,
        title: &str,
        pages: usize,
        map: impl Iterator<Item = MapEntry>,
        out: &mut W,
    ) -> fmt::Result {
        let mut film = Film::begin(self, 1, pages, out)?;
        film.frame(title, map)?;
        film.end()
    }
}

/// Several pictures of one heap, one below the other: an SVG written incrementally.
#[derive(Debug)]
pub struct Film<'w, W: fmt::Write> {
    picture: Picture,
    out: &'w mut W,
    top: usize,
}

impl<'w, W: fmt::Write> Film<'w, W> {
    /// Writes the head and the legend; leaves room for `frames` frames of a heap of up to `pages` pages.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn begin(picture: Picture, frames: usize, pages: usize, out: &'w mut W) -> Result<Self, fmt::Error> {
        let picture = Picture::new(picture.pages, picture.columns);
        // Sizes that are too large for a picture saturate: nobody draws that much.
        let width = picture.columns.saturating_mul(CELL);
        // Plus the tables: 2.05 % in a heap of objects, and some pages at least.
        let pages = pages.saturating_add(pages / 40).saturating_add(picture.pages.max(16));
        let rows = pages.div_ceil(picture.pages).div_ceil(picture.columns);
        let frame = rows.saturating_mul(CELL).saturating_add(TITLE + GAP);
        let height = frame.saturating_mul(frames).saturating_add(HEAD);
        write!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
        )?;
        for (kind, name) in NAMES.iter().enumerate() {
            let (x, color) = (kind * 90 + 4, COLORS[kind]);
            writeln!(
                out,
                "<rect x=\"{x}\" y=\"6\" width=\"12\" height=\"12\" fill=\"{color}\" stroke=\"#888\"/>\
                 <text x=\"{}\" y=\"17\">{name}</text>",
                x + 18
            )?;
        }
        Ok(Self {
            picture,
            out,
            top: HEAD,
        })
    }

    /// Draws the heap once more, below the existing frames. Characters of the title that XML does not allow (`\0`)
    /// become U+FFFD.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn frame(&mut self, title: &str, map: impl Iterator<Item = MapEntry>) -> fmt::Result {
        let Picture { columns, .. } = self.picture;
        write!(self.out, "<text x=\"4\" y=\"{}\">", self.top + 14)?;
        for char in title.chars() {
            match char {
                '<' => self.out.write_str("&lt;")?,
                // Required only after `]]`.
                '>' => self.out.write_str("&gt;")?,
                '&' => self.out.write_str("&amp;")?,
                '\t' | '\n' | '\r' => self.out.write_char(char)?,
                '\0'..' ' | '\u{fffe}' | '\u{ffff}' => self.out.write_char(char::REPLACEMENT_CHARACTER)?,
                char => self.out.write_char(char)?,
            }
        }
        self.out.write_str("</text>\n")?;
        self.top += TITLE;
        let (mut cell, mut stretch, top) = (0, None, self.top);
        let out = &mut *self.out;
        self.picture.cells(map, |kind| {
            let (row, column) = (cell / columns, cell % columns);
            cell += 1;
            stretch = match stretch {
                Some((same, from, at)) if same == kind && at == row => Some((same, from, at)),
                last => {
                    rectangle(out, top, last, if column == 0 { columns } else { column })?;
                    Some((kind, column, row))
                }
            };
            Ok(())
        })?;
        // Up to the last cell, which may be the last of a row. Without cells there is no stretch.
        rectangle(out, top, stretch, cell.saturating_sub(1) % columns + 1)?;
        self.top += cell.div_ceil(columns) * CELL + GAP;
        Ok(())
    }

    /// Writes the tail.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn end(self) -> fmt::Result {
        self.out.write_str("</svg>\n")
    }
}

/// Draws a stretch of equal cells, from one column of a row up to another.
fn rectangle<W: fmt::Write>(out: &mut W, top: usize, stretch: Option<(usize, usize, usize)>, to: usize) -> fmt::Result {
    let Some((kind, from, row)) = stretch else {
        return Ok(());
    };
    let (x, y, width) = (from * CELL, top + row * CELL, (to - from) * CELL);
    writeln!(
        out,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{}\" fill=\"{}\"/>",
        CELL - 1,
        COLORS[kind]
    )
}
