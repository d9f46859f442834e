//! Checks the object layer's counts against its spans, for a heap that nobody uses at the moment.

#![forbid(unsafe_code)]

use core::fmt;

use crate::check::Fault;
use crate::source::Source;
use crate::units::PageIndex;

use super::Objects;
use super::size_class::{CLASSES, SizeClass};
use super::span::has_row;

/// How often to wait for the scavenger, a quarter of a second each.
const PATIENCE: u32 = 8;

/// A broken invariant of the object layer, or of the pages below.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ObjectFault {
    /// In the heap of pages.
    Pages(Fault),
    /// A page of a span does not lead to its first page.
    Page {
        /// The page.
        page: usize,
    },
    /// A span's slots do not add up: out + home = all (I10), and it is on its class's list exactly if it has room.
    Span {
        /// The span's first page.
        page: usize,
        /// Bytes in a slot.
        bytes: usize,
        /// Slots out.
        out: u32,
        /// Slots home; `None` if that cannot be told.
        home: Option<u32>,
        /// All of them.
        slots: u32,
    },
    /// A page is free, but in the table, as a block's first page: so no arena could give it back.
    Entry {
        /// The page.
        page: usize,
    },
    /// The row of a page is not empty, though the page is free, or in a span that has none (I11).
    Row {
        /// The page.
        page: usize,
    },
    /// The heap counts fewer bytes in roomy blocks than there are (I18).
    Room {
        /// Counted, and found.
        bytes: [usize; 2],
    },
    /// The heap counts other holes than there are (I19).
    Holes {
        /// Counted, and found.
        bytes: [usize; 2],
    },
    /// A class counts other spans, slots, or spans with room than there are.
    Class {
        /// Bytes in a slot.
        bytes: usize,
        /// Spans counted and found.
        spans: [u64; 2],
        /// Slots out, counted and found.
        out: [u64; 2],
        /// Spans with room, on the list and found.
        room: [u64; 2],
    },
}

#[derive(Clone, Copy, Default)]
struct Sum {
    spans: u64,
    out: u64,
    room: u64,
}

impl<S: Source + 'static> Objects<S> {
    /// Recomputes every count from the spans, and checks the heap of pages. For a heap that nobody uses meanwhile:
    /// otherwise the result is meaningless, though the call does no harm. O(heap). Waits, some seconds at most, for a
    /// thread that ticks or releases, because that may have slots in hand.
    ///
    /// # Errors
    /// The first invariant found broken.
    pub fn check(&self) -> Result<(), ObjectFault> {
        // Bounded: the holder may be code below whose clock calls this.
        let driver = self.heap.driver();
        // The turn may come to us because a long job made way for a fork, and not for us.
        let mut turn = None;
        for _ in 0..PATIENCE {
            turn = turn.or_else(|| driver.turn_within());
            driver.pass_on(&mut turn);
            if turn.is_some() {
                break;
            }
        }
        self.heap.check().map_err(ObjectFault::Pages)?;
        // Receives spans that have arrived before they are counted.
        SizeClass::all().for_each(|class| {
            let _state = self.central(class).state(&self.spans, class);
        });
        let mut found = [Sum::default(); CLASSES];
        let mut roomy = 0;
        for page in (0..self.spans.covered().min(self.heap.grown().0)).map(PageIndex) {
            roomy += self.spans.roomy_from(page);
            let span = self.span_at(page);
            // In the child of a fork the pages of a span that was just being made are in no span, and never free.
            let has_none = span.map_or_else(|| self.heap.is_free(page), |(class, _)| !has_row(class));
            if has_none && !self.spans.is_row_empty(page) {
                return Err(ObjectFault::Row { page: page.0 });
            }
            let Some((class, back)) = span else {
                if self.heap.is_free(page) && !self.spans.entry(page).is_vacant() {
                    return Err(ObjectFault::Entry { page: page.0 });
                }
                continue;
            };
            let first = page.0.checked_sub(back).map(PageIndex);
            if back >= class.pages() || first.and_then(|first| self.span_at(first)) != Some((class, 0)) {
                return Err(ObjectFault::Page { page: page.0 });
            }
            if back == 0 {
                self.check_span(class, page, &mut found[class.index()])?;
            }
        }
        if roomy > self.roomy_bytes() {
            return Err(ObjectFault::Room {
                bytes: [self.roomy_bytes(), roomy],
            });
        }
        let bytes = [self.heap.hole_bytes(), self.spans.hole_bytes(self.heap.grown().0)];
        if bytes[0] != bytes[1] {
            return Err(ObjectFault::Holes { bytes });
        }
        SizeClass::all().try_for_each(|class| self.check_class(class, found[class.index()]))
    }

    fn check_class(&self, class: SizeClass, found: Sum) -> Result<(), ObjectFault> {
        let (state, mut listed) = (self.central(class).state(&self.spans, class), 0);
        self.central(class)
            .for_each_with_room(&self.spans, class, |_, _| listed += 1);
        if (u64::from(state.spans), state.out, listed) == (found.spans, found.out, found.room) {
            return Ok(());
        }
        Err(ObjectFault::Class {
            bytes: class.bytes(),
            spans: [state.spans.into(), found.spans],
            out: [state.out, found.out],
            room: [listed, found.room],
        })
    }

    fn check_span(&self, class: SizeClass, page: PageIndex, found: &mut Sum) -> Result<(), ObjectFault> {
        let Some((out, home)) = self.central(class).count(&self.spans, class, page) else {
            return Ok(());
        };
        found.spans += 1;
        found.out += u64::from(out);
        found.room += u64::from(out < class.slots());
        if home.is_some_and(|home| out + home == class.slots()) {
            return Ok(());
        }
        Err(ObjectFault::Span {
            page: page.0,
            bytes: class.bytes(),
            out,
            home,
            slots: class.slots(),
        })
    }
}

impl fmt::Display for ObjectFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Pages(fault) => write!(f, "{fault}"),
            Self::Page { page } => write!(
                f,
                "page {page} says it is in a span, but the span's first page does not"
            ),
            Self::Span {
                page,
                bytes,
                out,
                home,
                slots,
            } => write!(
                f,
                "span at page {page}, slots of {bytes} bytes: {out} out + {home:?} home, of {slots}"
            ),
            Self::Entry { page } => write!(f, "page {page} is free, but a block begins there by the table"),
            Self::Row { page } => write!(f, "page {page} is in no span of small slots, but some are out"),
            Self::Room { bytes } => write!(
                f,
                "{} bytes in roomy blocks are counted; there are {}",
                bytes[0], bytes[1]
            ),
            Self::Holes { bytes } => write!(f, "{} bytes in holes are counted; there are {}", bytes[0], bytes[1]),
            Self::Class {
                bytes,
                spans,
                out,
                room,
            } => write!(
                f,
                "class of {bytes} bytes counts {} spans, {} slots out, {} spans with room; there are {}, {}, {}",
                spans[0], out[0], room[0], spans[1], out[1], room[1]
            ),
        }
    }
}

impl fmt::Debug for ObjectFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl core::error::Error for ObjectFault {}

#[cfg(test)]
mod tests {
    use core::alloc::Layout;

    use super::super::size_class::PAGE_BYTES;
    use super::*;

    /// As if a free had forgotten the table.
    #[test]
    fn a_free_page_that_is_in_the_table_is_found() {
        let objects = Objects::for_test(4 << 20, 1, false);
        let layout = Layout::from_size_align(200 * PAGE_BYTES, 8).unwrap();
        let run = objects.allocate_run(&objects.shared(), layout).unwrap().run;
        objects.check().unwrap();
        objects.free_run(None, run);
        assert_eq!(objects.check(), Err(ObjectFault::Entry { page: run.start().0 }));
        objects.spans.entry(run.start()).leave();
        objects.check().unwrap();
    }
}
