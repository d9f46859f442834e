//! Numbers with units: page indices, page counts, runs of pages.
//!
//! A page is named by its index from the base of its heap, never by its address. Index and address have different
//! types, and only [`PageHeap`](crate::PageHeap) converts between them. A run cannot wrap: [`PageRun::new`] checks once
//! that `start + pages` fits, and all code after that computes without checks.
//!
//! ```
//! use pageheap::{PageCount, PageIndex, PageRun};
//!
//! let run = PageRun::new(PageIndex(10), PageCount(4)).unwrap();
//! assert_eq!(run.end(), PageIndex(14));
//! assert!(PageRun::new(PageIndex(usize::MAX), PageCount(2)).is_none());
//! ```

#![forbid(unsafe_code)]

use core::fmt;
use core::iter::Sum;
use core::num::NonZeroUsize;
use core::ops::{Add, AddAssign, Sub, SubAssign};

/// The index of a page: 0 is the first page of its heap's range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIndex(pub usize);

/// A number of pages.
///
/// ```
/// use pageheap::{PageCount, PageIndex, PageRun};
///
/// let runs = [(0, 3), (7, 2)].map(|(start, pages)| PageRun::new(PageIndex(start), PageCount(pages)).unwrap());
/// let mut pages: PageCount = runs.iter().map(|run| run.pages()).sum();
/// pages += PageCount(2);
/// pages -= PageCount(1);
/// assert_eq!((pages, usize::from(pages), pages - PageCount(4)), (PageCount(6), 6, PageCount(2)));
/// assert_eq!((pages.to_string(), PageCount(1).to_string()), ("6 pages".into(), "1 page".into()));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageCount(pub usize);

impl PageCount {
    /// No pages.
    pub const ZERO: Self = Self(0);

    /// How many pages of `1 << page_shift` bytes hold `bytes`, rounded up. Cannot overflow. If a page is larger than
    /// the address space, one page is enough. The shift is
    /// [`Geometry::PAGE_SHIFT`](crate::Geometry::PAGE_SHIFT), 13, unless a heap has a shape of its own.
    #[must_use]
    pub const fn holding(bytes: usize, page_shift: u32) -> Self {
        let Some(whole) = bytes.checked_shr(page_shift) else {
            return Self((bytes != 0) as usize);
        };
        Self(whole + (whole << page_shift != bytes) as usize)
    }

    /// How many bytes that many pages of `1 << page_shift` bytes have; `usize::MAX` if more than that.
    ///
    /// ```
    /// use pageheap::PageCount;
    ///
    /// assert_eq!(PageCount(3).bytes(13), 24 << 10);
    /// assert_eq!(PageCount(usize::MAX).bytes(13), usize::MAX);
    /// assert_eq!(PageCount::holding(PageCount(3).bytes(13), 13), PageCount(3));
    /// ```
    #[must_use]
    pub const fn bytes(self, page_shift: u32) -> usize {
        match 1_usize.checked_shl(page_shift) {
            Some(page) => self.0.saturating_mul(page),
            None if self.0 == 0 => 0,
            None => usize::MAX,
        }
    }

    /// The sum; `None` if that is more than a `usize` can count.
    ///
    /// ```
    /// use pageheap::PageCount;
    ///
    /// assert_eq!(PageCount(3).checked_add(PageCount(5)), Some(PageCount(8)));
    /// assert_eq!(PageCount(3).checked_add(PageCount(usize::MAX)), None);
    /// ```
    #[must_use]
    pub const fn checked_add(self, more: Self) -> Option<Self> {
        match self.0.checked_add(more.0) {
            Some(pages) => Some(Self(pages)),
            None => None,
        }
    }

    /// As many fewer; `None` if there are not as many.
    ///
    /// ```
    /// use pageheap::PageCount;
    ///
    /// assert_eq!(PageCount(5).checked_sub(PageCount(3)), Some(PageCount(2)));
    /// assert_eq!(PageCount(3).checked_sub(PageCount(5)), None);
    /// ```
    #[must_use]
    pub const fn checked_sub(self, fewer: Self) -> Option<Self> {
        match self.0.checked_sub(fewer.0) {
            Some(pages) => Some(Self(pages)),
            None => None,
        }
    }

    /// As many fewer, but not fewer than none.
    ///
    /// ```
    /// use pageheap::PageCount;
    ///
    /// assert_eq!(PageCount(5).saturating_sub(PageCount(3)), PageCount(2));
    /// assert_eq!(PageCount(3).saturating_sub(PageCount(5)), PageCount::ZERO);
    /// ```
    #[must_use]
    pub const fn saturating_sub(self, fewer: Self) -> Self {
        Self(self.0.saturating_sub(fewer.0))
    }
}

impl From<usize> for PageCount {
    fn from(pages: usize) -> Self {
        Self(pages)
    }
}

impl From<PageCount> for usize {
    fn from(pages: PageCount) -> Self {
        pages.0
    }
}

/// Counts of one heap's pages never overflow; other counts overflow as a `usize` does.
impl Add for PageCount {
    type Output = Self;

    #[inline]
    fn add(self, more: Self) -> Self {
        Self(self.0 + more.0)
    }
}

impl AddAssign for PageCount {
    #[inline]
    fn add_assign(&mut self, more: Self) {
        *self = *self + more;
    }
}

/// Overflows as a `usize` does; [`checked_sub`](PageCount::checked_sub) and
/// [`saturating_sub`](PageCount::saturating_sub) do not.
impl Sub for PageCount {
    type Output = Self;

    #[inline]
    fn sub(self, fewer: Self) -> Self {
        Self(self.0 - fewer.0)
    }
}

impl SubAssign for PageCount {
    #[inline]
    fn sub_assign(&mut self, fewer: Self) {
        *self = *self - fewer;
    }
}

impl Sum for PageCount {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::ZERO, Add::add)
    }
}

impl<'a> Sum<&'a Self> for PageCount {
    fn sum<I: Iterator<Item = &'a Self>>(counts: I) -> Self {
        counts.copied().sum()
    }
}

impl fmt::Display for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {}", self.0)
    }
}

impl fmt::Display for PageCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("1 page"),
            pages => write!(f, "{pages} pages"),
        }
    }
}

/// Pages in a row: at least one, and `start + pages` does not wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRun {
    start: PageIndex,
    /// Non-zero, so that an `Option` of a run is two words, which a function returns in registers.
    pages: NonZeroUsize,
}

impl PageRun {
    /// The run of `pages` pages from `start`; `None` if it would be empty or wrap.
    #[must_use]
    pub const fn new(start: PageIndex, pages: PageCount) -> Option<Self> {
        if start.0.checked_add(pages.0).is_none() {
            return None;
        }
        match NonZeroUsize::new(pages.0) {
            Some(pages) => Some(Self { start, pages }),
            None => None,
        }
    }

    /// A run that the caller knows to be valid: taken out of a bitmap, or part of another run.
    #[inline(always)]
    pub(crate) const fn known(start: usize, pages: usize) -> Self {
        debug_assert!(pages != 0 && start.checked_add(pages).is_some());
        Self {
            start: PageIndex(start),
            // Never zero. Telling the compiler so without a branch costs an addition.
            pages: match NonZeroUsize::new(pages) {
                Some(pages) => pages,
                None => NonZeroUsize::MIN,
            },
        }
    }

    /// The first page.
    #[inline]
    #[must_use]
    pub const fn start(self) -> PageIndex {
        self.start
    }

    /// One past the last page.
    #[inline]
    #[must_use]
    pub const fn end(self) -> PageIndex {
        PageIndex(self.start.0 + self.pages.get())
    }

    /// How many pages; never zero.
    #[inline]
    #[must_use]
    pub const fn pages(self) -> PageCount {
        PageCount(self.pages.get())
    }

    /// Whether `page` is in the run.
    #[must_use]
    pub const fn contains(self, page: PageIndex) -> bool {
        page.0 >= self.start.0 && page.0 - self.start.0 < self.pages.get()
    }

    /// Splits the run after its first `head` pages. `None` unless both parts have a page.
    #[must_use]
    pub const fn split_at(self, head: PageCount) -> Option<(Self, Self)> {
        if head.0 == 0 || head.0 >= self.pages.get() {
            return None;
        }
        let tail = Self::known(self.start.0 + head.0, self.pages.get() - head.0);
        Some((Self::known(self.start.0, head.0), tail))
    }
}

impl fmt::Display for PageRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pages {}..{}", self.start.0, self.end().0)
    }
}
