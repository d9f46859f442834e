//! The reservation ladder: as much of the request as the source has, and never nothing if a page could be served.
//!
//! ```text
//!   wish ─▶ what fits the budget with its tables ─▶ refused? half (an eighth less below 1 GiB *) ─▶ … ─▶ the least
//! ```
//!
//! In memory of several pieces, tables that do not fit into the highest lie below the last gap, and the pages below
//! them: so when tables are refused, the next wish is what fits there together with them. (What fits is reckoned with
//! a page to spare for alignment. So where no piece has more than four pages, a heap may be refused that a smaller wish
//! would have got.)
//!
//! (* And above 1 GiB too if pointers have 32 bits: there, 2 GiB cannot be reserved at once, but 1.7 can.)
//!
//! Worked example: a request for 1 TiB under an address-space limit of 256 MiB. The budget of `System` is three
//! quarters of that, and not quite 192 MiB of pages fit into it together with their tables. If the system refuses that
//! too, the heap asks for 168 MiB, then 147, … At most about 40 calls, once. (Some hundreds if tables come from
//! elsewhere, and are refused for a MiB of pages: then the ladder goes on, down to a page.)

use crate::geometry::Shape;
use crate::metadata::{Metadata, Plan};
use crate::source::{HugePages, Purpose, Reservation, Source};

use super::scan::HUGE_BYTES;
use super::{Calls, Config, NewHeapError, PageHeap};

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// The reservation ladder.
    pub(super) fn reserve(source: &S, config: &Config) -> Result<(Reservation, Metadata, usize, Calls), NewHeapError> {
        let mut calls = Calls::default();
        let (granule, page) = (source.granule(), G::PAGE_BYTES);
        let no_pages = |bytes| NewHeapError::no_pages(source, bytes);
        let align = config.align.max(page).max(granule).checked_next_power_of_two();
        let align = align.ok_or_else(|| no_pages(config.reserve))?;
        let least = config
            .reserve
            .min(Config::LEAST_BYTES)
            .max(page)
            .next_multiple_of(granule.max(page));
        let slots = config.shards.saturating_add(config.caches);
        let unit = granule.max(page);
        let (most, budget) = (config.reserve.max(least), source.budget());
        // The full size, and one page less in case the base has to be aligned. If tables come from the same budget,
        // that page is always left, so that a heap has the same number of pages wherever its base is.
        let (all, spared) = if S::APART {
            (most.min(budget), most.min(budget.saturating_sub(unit)))
        } else {
            let fitting = Self::fitting(most, budget, slots, granule);
            (fitting, fitting)
        };
        let (mut wish, spared) = (all.max(unit), spared.max(unit));
        // If the source does not have even the minimum, take as much as it has, less what the alignment may cost.
        let mut least = least.min(spared.saturating_sub(align - unit).max(unit) & !(unit - 1));
        let (mut failure, mut has_shrunk) = (None, false);
        loop {
            let bytes = wish & !(unit - 1);
            let mut fallback = 0;
            if let Some(pages) = Self::reserve_pages(source, bytes, align, config.huge_pages, &mut calls) {
                let capacity = bytes >> G::PAGE_SHIFT;
                let plan = Plan::new::<G>(capacity, slots, granule);
                if let Some(plan) = plan {
                    calls.reserve += 1;
                    match Metadata::reserve(source, plan) {
                        Ok((metadata, asked)) => {
                            calls.prepare += asked;
                            return Ok((pages, metadata, capacity, calls));
                        }
                        Err(asked) => {
                            calls.prepare += asked;
                            calls.unreserve += asked;
                        }
                    }
                }
                failure = Some(NewHeapError::no_metadata(source, plan.map(|plan| plan.total())));
                // Perhaps they have no room above the last gap: so try what has room below it, together with them. Or
                // the source counts in longer units than its granule: a little less would do. Elsewhere, a page may.
                let tables = plan.map_or(0, |plan| plan.total().saturating_add(unit.saturating_mul(2)));
                let below = Self::bytes_below_gap(source, pages.base, bytes.saturating_add(tables));
                let fitting = below.map_or(0, |below| Self::fitting(bytes - unit, below, slots, granule));
                fallback = fitting.max(usize::from(S::APART && wish <= least) * unit) & !(unit - 1);
                if !core::mem::replace(&mut has_shrunk, true) {
                    fallback = fallback.max(bytes.saturating_sub(tables) & !(unit - 1));
                }
                calls.unreserve += 1;
                // SAFETY: just reserved, and nothing refers to it.
                unsafe { source.unreserve(Purpose::Pages, pages) };
            }
            if fallback > 0 {
                least = least.min(fallback);
            }
            if wish <= least {
                return Err(failure.unwrap_or_else(|| no_pages(bytes)));
            }
            wish = if wish > spared { spared } else { lower(wish) }
                .max(fallback)
                .max(least);
        }
    }

    /// Reserves `bytes` bytes of pages. If huge pages are requested, the range begins on a huge-page boundary, if
    /// possible.
    fn reserve_pages(
        source: &S,
        bytes: usize,
        align: usize,
        huge: HugePages,
        calls: &mut Calls,
    ) -> Option<Reservation> {
        let matters = huge == HugePages::Advise && bytes >= HUGE_BYTES;
        let huge = if matters { align.max(HUGE_BYTES) } else { align };
        let mut reserve = |align| {
            calls.reserve += 1;
            Reservation::of(source, Purpose::Pages, bytes, align)
        };
        reserve(huge).or_else(|| (huge > align).then(|| reserve(align))?)
    }

    /// The most bytes of pages, up to `wish`, that fit a budget together with their tables.
    fn fitting(wish: usize, budget: usize, slots: usize, granule: usize) -> usize {
        let fits = |bytes: usize| {
            let plan = Plan::new::<G>(bytes >> G::PAGE_SHIFT, slots, granule);
            // One page more: the base has to be aligned.
            plan.and_then(|plan| plan.total().checked_add(bytes)?.checked_add(G::PAGE_BYTES.max(granule)))
                .is_some_and(|total| total <= budget)
        };
        if fits(wish) {
            return wish;
        }
        let (mut low, mut high) = (0, wish.min(budget));
        while high - low > granule.max(G::PAGE_BYTES) {
            let middle = low + (high - low) / 2;
            if fits(middle) { low = middle } else { high = middle }
        }
        low
    }
}

/// The next step down the ladder: half, or seven eighths where every eighth may count.
pub(crate) fn lower(wish: usize) -> usize {
    let counts = usize::BITS < u64::BITS || wish <= 1 << 30;
    wish - if counts { wish / 8 } else { wish / 2 }
}
