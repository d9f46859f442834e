//! The map of states behind a [`Simulated`](super::Simulated): reservations, their runs of granules, their pictures.
//!
//! A reservation is a map from the first offset of a run to the state of its granules; a run ends where the next
//! begins:
//!
//! ```text
//!   ..rrrPPPR..        0 → Reserved, 3 → Prepared, 6 → Ready        (in granules)
//! ```
//!
//! All is plain bookkeeping under the caller's mutex, by offsets, so that a reservation may end at the very top of
//! the address space. Nothing here panics: what is wrong comes back as a text.

extern crate std;

use core::fmt::Write;
use core::num::NonZeroUsize;
use core::ptr::NonNull;
use std::alloc::{GlobalAlloc, Layout};
use std::collections::BTreeMap;
use std::string::String;
use std::vec::Vec;
use std::{format, write, writeln};

use super::{Failure, Purpose, State, Verb};
use crate::source::{Contents, HugePages};

/// What Reserved metadata is filled with.
const POISON: u8 = 0xA5;
/// Metadata up to this size is poisoned; filling more would cost memory that nobody uses.
const POISONED: usize = 4 << 20;
/// Reservations up to this many granules are drawn granule by granule.
const DRAWN: usize = 64;

/// Everything a [`Simulated`] knows.
#[derive(Debug)]
pub(super) struct Map {
    /// Most bytes ever reserved at a time.
    pub(super) budget: usize,
    /// Where pages start.
    pub(super) base: usize,
    /// What is said of pages.
    pub(super) contents: Contents,
    /// All reservations, lost ones too.
    pub(super) ranges: Vec<Range>,
    /// Failures ordered.
    pub(super) plans: Vec<Plan>,
    /// By verb.
    pub(super) calls: [usize; 7],
    /// By verb.
    pub(super) failures: [usize; 7],
    /// Advice for huge pages: offset, length, the wish.
    pub(super) advised: Vec<(usize, usize, HugePages)>,
}

/// A failure ordered.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) verb: Verb,
    pub(super) failure: Failure,
    /// Calls of the verb since.
    pub(super) calls: usize,
}

impl Map {
    /// Bytes in reservations.
    pub(super) fn reserved(&self) -> usize {
        self.ranges.iter().map(|range| range.bytes).sum()
    }

    /// Counts a call. Whether it is to fail.
    pub(super) fn count(&mut self, verb: Verb, bytes: usize) -> bool {
        self.calls[verb as usize] += 1;
        let mut fails = false;
        for plan in self.plans.iter_mut().filter(|plan| plan.verb == verb) {
            plan.calls += 1;
            fails |= match plan.failure {
                Failure::Calls { after, times } => after < plan.calls && plan.calls - after <= times,
                Failure::Every(n) => n != 0 && plan.calls.is_multiple_of(n),
                Failure::Above(most) => most < bytes,
            };
        }
        self.failures[verb as usize] += usize::from(fails);
        fails
    }

    /// The reservation that the bytes lie in, and where.
    pub(super) fn find(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<(usize, usize), String> {
        let within = |range: &Range| {
            let offset = start.addr().get().wrapping_sub(range.base.addr().get());
            (offset < range.bytes && !range.lost).then_some(offset)
        };
        let mut hits = self
            .ranges
            .iter()
            .enumerate()
            .filter_map(|(at, range)| Some((at, range, within(range)?)));
        let (index, range, offset) = hits
            .clone()
            .find(|(_, range, _)| range.purpose == purpose)
            .or_else(|| hits.next())
            .ok_or("in no reservation")?;
        if range.purpose != purpose {
            return Err(format!("in a reservation for {:?}", range.purpose));
        }
        if bytes == 0 || range.bytes - offset < bytes {
            return Err(String::from("empty, or beyond the end of the reservation"));
        }
        Ok((index, offset))
    }

    /// Where pages of `bytes` bytes fit, with at least a granule between them and any others.
    fn place(&self, bytes: usize, align: usize, granule: usize) -> Option<usize> {
        let mut at = self.base.checked_next_multiple_of(align)?.max(align);
        loop {
            let last = at.checked_add(bytes - 1)?;
            let pages = self.ranges.iter().filter(|range| range.purpose == Purpose::Pages);
            let ends = |range: &Range| (range.base.addr().get(), range.base.addr().get() + (range.bytes - 1));
            let Some((_, end)) = pages.map(ends).find(|&(start, end)| at <= end && start <= last) else {
                return Some(at);
            };
            at = end.checked_add(1 + granule)?.checked_next_multiple_of(align)?;
        }
    }

    /// All reservations, one a line.
    pub(super) fn draw(&self, granule: usize) -> String {
        self.ranges.iter().map(|range| range.draw(granule, None)).collect()
    }

    /// What to panic with: the step, what is wrong with it, and the picture.
    pub(super) fn complain(
        &self,
        step: &str,
        purpose: Purpose,
        start: NonNull<u8>,
        bytes: usize,
        why: &str,
        granule: usize,
    ) -> String {
        let mut text = format!("{step} {purpose:?} at {start:p} + {bytes:#x}: {why}\n");
        let reach = |range: &Range| {
            let offset = start.addr().get().wrapping_sub(range.base.addr().get());
            (offset < range.bytes).then_some((offset, bytes))
        };
        for range in &self.ranges {
            text.push_str(&range.draw(granule, reach(range)));
        }
        text
    }
}

/// A reservation.
#[derive(Debug)]
pub(super) struct Range {
    pub(super) purpose: Purpose,
    pub(super) base: NonNull<u8>,
    pub(super) bytes: usize,
    /// `unreserve` was made to fail: nobody's, for ever.
    pub(super) lost: bool,
    /// First offset of every run → state of its granules. Neighbours differ, and 0 is always a key.
    starts: BTreeMap<usize, State>,
    /// What metadata consists of.
    memory: Option<Memory>,
}

// SAFETY: `base` is a number, or points to the memory that this owns alone; no thread is special to either.
unsafe impl Send for Range {}

impl State {
    fn mark(self) -> char {
        match self {
            State::Reserved => 'r',
            State::Prepared => 'P',
            State::Ready => 'R',
        }
    }
}

/// Granules in a row in one state.
#[derive(Clone, Copy)]
pub(super) struct Run {
    offset: usize,
    pub(super) bytes: usize,
    pub(super) state: State,
}

impl Range {
    pub(super) fn new(map: &Map, purpose: Purpose, bytes: usize, align: usize, granule: usize) -> Option<Range> {
        let memory = match purpose {
            Purpose::Pages => None,
            Purpose::Metadata => Some(Memory::new(bytes, align)?),
        };
        let base = match &memory {
            Some(memory) => memory.base,
            None => NonNull::without_provenance(NonZeroUsize::new(map.place(bytes, align, granule)?)?),
        };
        let starts = BTreeMap::from([(0, State::Reserved)]);
        Some(Range {
            purpose,
            base,
            bytes,
            lost: false,
            starts,
            memory,
        })
    }

    /// All runs in order.
    pub(super) fn runs(&self) -> impl Iterator<Item = Run> {
        let ends = self.starts.keys().skip(1).copied().chain([self.bytes]);
        self.starts.iter().zip(ends).map(|((&offset, &state), end)| Run {
            offset,
            bytes: end - offset,
            state,
        })
    }

    /// Whether the bytes are whole granules in one of the states `from`; if not, what is wrong.
    pub(super) fn check(&self, part: core::ops::Range<usize>, from: &[State], granule: usize) -> Result<(), String> {
        if (part.start | part.end) & (granule - 1) != 0 {
            return Err(format!("not on borders of granules of {granule:#x} bytes"));
        }
        let touched = |run: &Run| run.offset < part.end && part.start < run.offset + run.bytes;
        match self.runs().filter(touched).find(|run| !from.contains(&run.state)) {
            None => Ok(()),
            Some(run) => Err(format!("must be {from:?}, and some of it is {:?}", run.state)),
        }
    }

    /// Puts whole granules into a state, keeping neighbouring runs different.
    pub(super) fn set(&mut self, offset: usize, bytes: usize, state: State) {
        let end = offset + bytes;
        let at = |starts: &BTreeMap<usize, State>, place: usize| starts.range(..=place).next_back().map(|run| *run.1);
        let after = if end < self.bytes { at(&self.starts, end) } else { None };
        while let Some((&start, _)) = self.starts.range(offset..end).next() {
            self.starts.remove(&start);
        }
        let before = offset.checked_sub(1).and_then(|place| at(&self.starts, place));
        if before != Some(state) {
            self.starts.insert(offset, state);
        }
        match after {
            Some(after) if after != state => drop(self.starts.insert(end, after)),
            _ => drop(self.starts.remove(&end)),
        }
    }

    /// Makes metadata zero, if nobody has written it before.
    pub(super) fn clear(&self, offset: usize, bytes: usize) -> Result<(), String> {
        match &self.memory {
            Some(memory) => memory.clear(offset, bytes),
            None => Err(String::from("pages have no memory")),
        }
    }

    /// One line, and another with marks under `marked` (offset and length).
    fn draw(&self, granule: usize, marked: Option<(usize, usize)>) -> String {
        let lost = if self.lost { ", lost" } else { "" };
        let mut text = format!(
            "{:?} at {:p}, a mark is {granule:#x} bytes{lost}\n",
            self.purpose, self.base
        );
        if self.bytes / granule <= DRAWN {
            text.push_str("..");
            self.runs()
                .for_each(|run| text.extend(core::iter::repeat_n(run.state.mark(), run.bytes / granule)));
            text.push_str("..\n");
            if let Some((offset, bytes)) = marked {
                let count = bytes.div_ceil(granule).clamp(1, DRAWN);
                text.extend(core::iter::repeat_n(' ', 2 + offset / granule).chain(core::iter::repeat_n('^', count)));
                text.push('\n');
            }
        } else {
            for run in self.runs() {
                // Writing to a string cannot fail.
                let _ = write!(text, "{}*{} ", run.state.mark(), run.bytes / granule);
            }
            text.push('\n');
            if let Some((offset, bytes)) = marked {
                let _ = writeln!(
                    text,
                    "the step is about {} from number {}",
                    bytes / granule,
                    offset / granule
                );
            }
        }
        text
    }
}

/// Memory of the system's allocator, given back when dropped.
#[derive(Debug)]
struct Memory {
    base: NonNull<u8>,
    layout: Layout,
}

impl Memory {
    fn new(bytes: usize, align: usize) -> Option<Memory> {
        let layout = Layout::from_size_align(bytes, align).ok()?;
        // SAFETY: reservations are not empty.
        let base = NonNull::new(unsafe { std::alloc::System.alloc_zeroed(layout) })?;
        if bytes <= POISONED {
            // SAFETY: just allocated, `bytes` long.
            unsafe { base.write_bytes(POISON, bytes) };
        }
        Some(Memory { base, layout })
    }

    /// Replaces poison by zero. An error if there was anything else.
    fn clear(&self, offset: usize, bytes: usize) -> Result<(), String> {
        // SAFETY: the part lies within the allocation (checked by `find`), and nobody uses what is not yet prepared.
        let part = unsafe { core::slice::from_raw_parts_mut(self.base.add(offset).as_ptr(), bytes) };
        let blank = if self.layout.size() <= POISONED { POISON } else { 0 };
        if let Some(place) = part.iter().position(|&byte| byte != blank) {
            return Err(format!(
                "written before it was prepared, at offset {:#x}",
                offset + place
            ));
        }
        if blank != 0 {
            part.fill(0);
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once.
        unsafe { std::alloc::System.dealloc(self.base.as_ptr(), self.layout) };
    }
}
