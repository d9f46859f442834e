//! A source for tests, which knows the state of every granule and detects wrong use.
//!
//! Pages are only addresses, so a terabyte costs nothing, and the base may be anywhere, up to the last granule of the
//! address space. Metadata is real memory. Every verb checks its range against the map of states. An illegal step
//! panics with a drawing of the reservation, which marks the range:
//!
//! ```text
//!   commit of Pages at 0x100000002000 + 0x2000: must be [Prepared, Ready], and some of it is Reserved
//!   Pages at 0x100000000000, a mark is 0x1000 bytes
//!   ..rrrPPPR..
//!       ^^
//! ```
//!
//! | mark | `.` | `r` | `P` | `R` |
//! |---|---|---|---|---|
//! | state | None | Reserved | Prepared | Ready |
//!
//! Reservations of more than 64 granules are drawn as runs: `r*61440 P*4096`.
//!
//! **Injected failures.** A [`Failure`] set for a [`Verb`] makes calls of it fail, the same ones in every run. A call
//! is checked before it fails, so an injected failure never hides a wrong step. A failing `unreserve` simulates a
//! refused `munmap`: the caller is not told, and the addresses are never handed out again.
//!
//! **Metadata** of up to 4 MiB is filled with 0xA5 while Reserved. A heap that reads a table too early does not find
//! the zeros of later, and one that writes to a table too early is found out by `prepare`.
//!
//! The panics break the rule that verbs must not unwind, and the bookkeeping allocates from the global allocator: so
//! this is only for tests of heaps that are not the global allocator of the process. Cost: a mutex and a search in a
//! tree of runs per call.

extern crate std;

use core::ops;
use core::ptr::NonNull;
use core::time::Duration;
use std::format;
use std::string::String;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::vec::Vec;

use super::ledger::first_gap;
use super::{Contents, HugePages, Purpose, Refused, Reservation, Source};
use map::{Map, Plan, Range};

mod map;

/// The default address of pages; [`Simulated::with_base`] sets another. 2^44 on 64-bit machines, far from real memory.
const BASE: usize = 1 << (usize::BITS / 16 * 11);

/// A checking [`Source`] for tests, into which failures can be injected.
///
/// With `COMMITS`, pages must be committed before [`assert_ready`](Self::assert_ready) accepts them; make one with
/// [`committing`](Simulated::committing). Without, `commit` is an illegal step; make one with [`new`](Simulated::new).
#[derive(Debug)]
pub struct Simulated<const COMMITS: bool = false> {
    granule: usize,
    /// Addresses.
    gaps: Vec<ops::Range<usize>>,
    map: Mutex<Map>,
}

/// A verb of [`Source`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// [`Source::reserve`]
    Reserve,
    /// [`Source::prepare`]
    Prepare,
    /// [`Source::commit`]
    Commit,
    /// [`Source::release`]
    Release,
    /// [`Source::unreserve`]
    Unreserve,
    /// [`Source::release_lazily`]
    ReleaseLazily,
    /// [`Source::advise`]
    Advise,
}

/// Which calls of a verb fail. Calls are counted from the moment the failure is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The first `after` calls may succeed, the next `times` fail.
    Calls {
        /// Calls before the first that fails.
        after: usize,
        /// Calls that fail.
        times: usize,
    },
    /// Every n-th call fails; with 1 all of them, with 0 none.
    Every(usize),
    /// Calls for more than this many bytes fail.
    Above(usize),
}

/// The state of a granule, as in the drawing at the top of the module `source`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Ours, backed by nothing.
    Reserved,
    /// May be made Ready.
    Prepared,
    /// May be used.
    Ready,
}

impl Simulated<false> {
    /// A source with granules of `granule` bytes, a power of two, whose Prepared pages may be used at once.
    ///
    /// # Panics
    /// If `granule` is no power of two.
    pub fn new(granule: usize) -> Self {
        Self::with_granule(granule)
    }
}

impl Simulated<true> {
    /// Like [`new`](Simulated::new), but Prepared pages must be committed before use.
    ///
    /// # Panics
    /// If `granule` is no power of two.
    pub fn committing(granule: usize) -> Self {
        Self::with_granule(granule)
    }
}

impl<const COMMITS: bool> Simulated<COMMITS> {
    fn with_granule(granule: usize) -> Self {
        assert!(
            granule.is_power_of_two(),
            "a granule of {granule} bytes is no power of two"
        );
        let map = Map {
            budget: usize::MAX,
            base: BASE,
            contents: Contents::Zero,
            ranges: Vec::new(),
            plans: Vec::new(),
            calls: [0; 7],
            failures: [0; 7],
            advised: Vec::new(),
        };
        Simulated {
            granule,
            gaps: Vec::new(),
            map: Mutex::new(map),
        }
    }

    /// Refuses reservations beyond `bytes` bytes in total.
    #[must_use]
    pub fn with_budget(self, bytes: usize) -> Self {
        self.map().budget = bytes;
        self
    }

    /// Places pages from address `base` on.
    #[must_use]
    pub fn with_base(self, base: usize) -> Self {
        self.map().base = base;
        self
    }

    /// Has gaps at these addresses.
    #[must_use]
    pub fn with_gaps(self, gaps: &[ops::Range<usize>]) -> Self {
        let gaps = gaps.to_vec();
        Self { gaps, ..self }
    }

    /// Reports `contents` for prepared and released pages; by default [`Contents::Zero`].
    #[must_use]
    pub fn with_contents(self, contents: Contents) -> Self {
        self.set_contents(contents);
        self
    }

    /// Injects a failure from the start.
    #[must_use]
    pub fn failing(self, verb: Verb, failure: Failure) -> Self {
        self.fail(verb, failure);
        self
    }

    /// Reports `contents` for pages prepared and released from now on.
    pub fn set_contents(&self, contents: Contents) {
        self.map().contents = contents;
    }

    /// Injects a failure from now on, in addition to those already set.
    pub fn fail(&self, verb: Verb, failure: Failure) {
        self.map().plans.push(Plan {
            verb,
            failure,
            calls: 0,
        });
    }

    /// Removes all injected failures.
    pub fn heal(&self) {
        self.map().plans.clear();
    }

    /// Calls of `verb` so far, including failed ones.
    pub fn calls(&self, verb: Verb) -> usize {
        self.map().calls[verb as usize]
    }

    /// Calls of `verb` that were refused so far.
    pub fn failures(&self, verb: Verb) -> usize {
        self.map().failures[verb as usize]
    }

    /// The policies set for huge pages, in order: offset into the reservation, length, policy.
    pub fn advised(&self) -> Vec<(usize, usize, HugePages)> {
        self.map().advised.clone()
    }

    /// Bytes of pages in `state`.
    pub fn bytes_in(&self, state: State) -> usize {
        let map = self.map();
        let pages = map
            .ranges
            .iter()
            .filter(|range| range.purpose == Purpose::Pages && !range.lost);
        pages
            .flat_map(Range::runs)
            .filter(|run| run.state == state)
            .map(|run| run.bytes)
            .sum()
    }

    /// A drawing of all reservations.
    pub fn states(&self) -> String {
        self.map().draw(self.granule)
    }

    /// Checks that the granules of these pages may be used: that they are Ready, or Prepared if nothing needs to be
    /// committed.
    ///
    /// # Panics
    /// If not, with a drawing.
    pub fn assert_ready(&self, start: NonNull<u8>, bytes: usize) {
        let usable: &[State] = if COMMITS {
            &[State::Ready]
        } else {
            &[State::Prepared, State::Ready]
        };
        let map = self.map();
        let checked = map.find(Purpose::Pages, start, bytes).and_then(|(index, offset)| {
            self.check_gaps(start, bytes)?;
            let range = &map.ranges[index];
            let mask = self.granule - 1;
            let end = ((offset + bytes + mask) & !mask).min(range.bytes);
            range.check(offset & !mask..end, usable, self.granule)
        });
        let complaint = checked
            .err()
            .map(|why| map.complain("use of", Purpose::Pages, start, bytes, &why, self.granule));
        drop(map);
        refute(complaint);
    }

    /// Checks that every reservation has been given back (or lost to a failing `unreserve`).
    ///
    /// # Panics
    /// If not, with a drawing.
    pub fn assert_all_returned(&self) {
        let map = self.map();
        let kept = map.ranges.iter().any(|range| !range.lost);
        let complaint = kept.then(|| format!("not given back:\n{}", map.draw(self.granule)));
        drop(map);
        refute(complaint);
    }

    /// Checks that a range touches no gap.
    fn check_gaps(&self, start: NonNull<u8>, bytes: usize) -> Result<(), String> {
        match self.gap(start, bytes) {
            Some(gap) => Err(format!("{gap:#x?} of it is a gap")),
            None => Ok(()),
        }
    }

    /// Locks the map, even after a panic of a thread that held it: it is changed only after all checks.
    fn map(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One transition of granules: checks it, lets it fail if that was injected, records it.
    fn step(&self, step: Step, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let Step {
            verb,
            purpose,
            from,
            to,
        } = step;
        let mut map = self.map();
        let fails = map.count(verb, bytes);
        let checked = map.find(purpose, start, bytes).and_then(|(index, offset)| {
            map.ranges[index].check(offset..offset + bytes, from, self.granule)?;
            if purpose == Purpose::Pages && verb != Verb::Prepare {
                self.check_gaps(start, bytes)?;
            }
            if purpose == Purpose::Metadata && !fails {
                map.ranges[index].clear(offset, bytes)?;
            }
            Ok((index, offset))
        });
        match checked {
            Ok(_) if fails => Err(Refused),
            Ok((index, offset)) => {
                map.ranges[index].set(offset, bytes, to);
                Ok(if purpose == Purpose::Metadata {
                    Contents::Zero
                } else {
                    map.contents
                })
            }
            Err(why) => {
                let complaint = map.complain(verb.name(), purpose, start, bytes, &why, self.granule);
                drop(map);
                panic!("{complaint}");
            }
        }
    }
}

/// What a verb does to granules.
struct Step {
    verb: Verb,
    purpose: Purpose,
    /// The states in which it may be called.
    from: &'static [State],
    to: State,
}

// SAFETY:
// * `place` gives pages addresses that no other reservation has, and metadata comes from the system's allocator;
// * metadata is zeroed by `prepare`; pages are not memory, so nothing is promised about them, and whatever is reported
//   of their contents is true of bytes that cannot be read;
// * a failing verb returns before anything is changed.
unsafe impl<const COMMITS: bool> Source for Simulated<COMMITS> {
    const COMMITS: bool = COMMITS;

    fn granule(&self) -> usize {
        self.granule
    }

    /// What is left of the budget; everything if none was set.
    fn budget(&self) -> usize {
        let map = self.map();
        if map.budget == usize::MAX {
            usize::MAX
        } else {
            map.budget.saturating_sub(map.reserved())
        }
    }

    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        let mask = self.granule - 1;
        let legal = bytes != 0 && bytes & mask == 0 && align & mask == 0 && align.is_power_of_two();
        refute((!legal).then(|| {
            format!(
                "reserve of {bytes:#x} bytes aligned to {align:#x}, not whole granules of {:#x}",
                self.granule
            )
        }));
        let mut map = self.map();
        let over = map.reserved().checked_add(bytes).is_none_or(|total| map.budget < total);
        if map.count(Verb::Reserve, bytes) {
            return None;
        }
        let range = if over {
            None
        } else {
            Range::new(&map, purpose, bytes, align, self.granule)
        };
        let Some(range) = range else {
            map.failures[Verb::Reserve as usize] += 1;
            return None;
        };
        let base = range.base;
        map.ranges.push(range);
        Some(Reservation { base, bytes })
    }

    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let to = if purpose == Purpose::Pages {
            State::Prepared
        } else {
            State::Ready
        };
        self.step(
            Step {
                verb: Verb::Prepare,
                purpose,
                from: &[State::Reserved],
                to,
            },
            start,
            bytes,
        )
    }

    unsafe fn commit(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
        refute((!COMMITS).then(|| String::from("commit at a source with nothing to commit")));
        let purpose = Purpose::Pages;
        let step = Step {
            verb: Verb::Commit,
            purpose,
            from: &[State::Prepared, State::Ready],
            to: State::Ready,
        };
        self.step(step, start, bytes).map(|_| ())
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let purpose = Purpose::Pages;
        let from = &[State::Prepared, State::Ready];
        self.step(
            Step {
                verb: Verb::Release,
                purpose,
                from,
                to: State::Prepared,
            },
            start,
            bytes,
        )
    }

    /// What the pages read as is always unknown, whatever [`release`](Source::release) reports.
    unsafe fn release_lazily(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let purpose = Purpose::Pages;
        let step = Step {
            verb: Verb::ReleaseLazily,
            purpose,
            from: &[State::Prepared, State::Ready],
            to: State::Prepared,
        };
        self.step(step, start, bytes).map(|_| Contents::Unknown)
    }

    unsafe fn advise(&self, start: NonNull<u8>, bytes: usize, huge: HugePages) -> Result<(), Refused> {
        let mut map = self.map();
        let fails = map.count(Verb::Advise, bytes);
        let all = &[State::Reserved, State::Prepared, State::Ready];
        let checked = map.find(Purpose::Pages, start, bytes).and_then(|(index, offset)| {
            map.ranges[index].check(offset..offset + bytes, all, self.granule)?;
            Ok(offset)
        });
        match checked {
            Ok(_) if fails => Err(Refused),
            Ok(offset) => {
                map.advised.push((offset, bytes, huge));
                Ok(())
            }
            Err(why) => {
                let complaint = map.complain(Verb::Advise.name(), Purpose::Pages, start, bytes, &why, self.granule);
                drop(map);
                panic!("{complaint}");
            }
        }
    }

    fn gap(&self, start: NonNull<u8>, bytes: usize) -> Option<ops::Range<usize>> {
        first_gap(self.gaps.iter().cloned(), start.addr().get(), bytes)
    }

    /// A microsecond for each call of a verb.
    fn worked(&self) -> Option<Duration> {
        Some(Duration::from_micros(self.map().calls.iter().sum::<usize>() as u64))
    }

    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        let Reservation { base, bytes } = reservation;
        let mut map = self.map();
        let fails = map.count(Verb::Unreserve, bytes);
        let same = |range: &Range| (range.purpose, range.base.addr(), range.bytes) == (purpose, base.addr(), bytes);
        match map.ranges.iter().position(|range| same(range) && !range.lost) {
            Some(index) if fails => map.ranges[index].lost = true,
            Some(index) => drop(map.ranges.swap_remove(index)),
            None => {
                let why = "no such reservation";
                let complaint = map.complain(Verb::Unreserve.name(), purpose, base, bytes, why, self.granule);
                drop(map);
                panic!("{complaint}");
            }
        }
    }
}

impl Verb {
    fn name(self) -> &'static str {
        match self {
            Verb::Reserve => "reserve of",
            Verb::Prepare => "prepare of",
            Verb::Commit => "commit of",
            Verb::Release => "release of",
            Verb::Unreserve => "unreserve of",
            Verb::ReleaseLazily => "lazy release of",
            Verb::Advise => "advice for",
        }
    }
}

/// Panics with the complaint, if there is one. Called with no lock held.
fn refute(complaint: Option<String>) {
    if let Some(complaint) = complaint {
        panic!("{complaint}");
    }
}
