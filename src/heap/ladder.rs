//! The reservation ladder: as much of the wish as the source has, and never nothing where a page could be served.
//!
//! ```text
//!   wish ─▶ what fits the budget with its tables ─▶ refused? half (an eighth less below 1 GiB) ─▶ … ─▶ the least
//! ```
//!
//! Worked: a wish of 1 TiB where the address space is limited to 256 MiB fits nothing but some 248 MiB of pages and
//! their tables; if the system refuses that too, 217 MiB are asked for, then 190, … At most 40 or so calls, once.

use crate::geometry::Shape;
use crate::metadata::{Metadata, Plan};
use crate::source::{Purpose, Reservation, Source};

use super::{Config, NewHeapError, PageHeap};

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// The reservation ladder.
    pub(super) fn reserve(source: &S, config: &Config) -> Result<(Reservation, Metadata, usize), NewHeapError> {
        let granule = source.granule();
        let page = G::PAGE_BYTES;
        let align = config.align.max(page).max(granule);
        let align = align.checked_next_power_of_two().ok_or(NewHeapError::NoPages)?;
        let least = config
            .reserve
            .min(Config::LEAST_BYTES)
            .max(page)
            .next_multiple_of(granule.max(page));
        let slots = config.shards.saturating_add(config.caches);
        let unit = granule.max(page);
        let mut wish = Self::fitting(config.reserve.max(least), source.budget(), slots, granule).max(unit);
        // Where the source has not even the least, as much as it has.
        let least = least.min(wish & !(unit - 1));
        let mut failure = NewHeapError::NoPages;
        loop {
            let bytes = wish & !(unit - 1);
            if let Some(pages) = source.reserve(Purpose::Pages, bytes, align) {
                let capacity = bytes >> G::PAGE_SHIFT;
                let plan = Plan::new::<G>(capacity, slots, granule);
                if let Some(metadata) = plan.and_then(|plan| Metadata::reserve(source, plan)) {
                    return Ok((pages, metadata, capacity));
                }
                failure = NewHeapError::NoMetadata;
                // SAFETY: just reserved, and nothing refers to it.
                unsafe { source.unreserve(Purpose::Pages, pages) };
            }
            if wish <= least {
                return Err(failure);
            }
            wish = lower(wish).max(least);
        }
    }

    /// The most bytes of pages, up to `wish`, that fit a budget together with their tables.
    fn fitting(wish: usize, budget: usize, slots: usize, granule: usize) -> usize {
        let fits = |bytes: usize| {
            let plan = Plan::new::<G>(bytes >> G::PAGE_SHIFT, slots, granule);
            // A page more: the base has to be aligned.
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

/// The next step down the ladder of reservations: half, or seven eighths where every eighth may count.
pub(crate) fn lower(wish: usize) -> usize {
    const COUNTS: usize = 1 << 30;
    wish - if wish > COUNTS { wish / 2 } else { wish / 8 }
}
