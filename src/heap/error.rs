//! Errors of a heap, in words that name the address.

#![forbid(unsafe_code)]

use core::fmt;
use core::ptr::NonNull;

use crate::fatal::{self, Number};
use crate::source::Source;

/// Why a heap could not be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NewHeapError {
    /// The source would not reserve even the smallest range for pages, aligned as requested ([`Config::align`]). Or its
    /// reservation was shorter, or less aligned, than requested.
    ///
    /// [`Config::align`]: crate::Config::align
    #[non_exhaustive]
    NoPages {
        /// Bytes of the last reservation that was refused.
        asked: usize,
        /// Bytes that the source had left then, by its [`budget`](crate::source::Source::budget); `usize::MAX` if it
        /// does not know. They may be more than `asked`: not in a row, say, or not so aligned.
        left: usize,
    },
    /// The source had no room for the tables. [`Numbers`](crate::source::Numbers) never has any and needs a
    /// [`Split`](crate::source::Split). Or its reservation for them was not as requested.
    #[non_exhaustive]
    NoMetadata {
        /// Bytes of the tables that had no room; `usize::MAX` if there cannot be so many.
        asked: usize,
        /// As for [`NoPages`](Self::NoPages). Pages that the tables were to describe no longer count as left.
        left: usize,
    },
    /// The source's granule is not a power of two, or is smaller than a cache line; or the source commits pages in
    /// pieces larger than a page of this heap.
    Granule,
}

impl NewHeapError {
    #[cold]
    pub(crate) fn no_pages<S: Source>(source: &S, asked: usize) -> Self {
        let left = source.budget();
        Self::NoPages { asked, left }
    }

    #[cold]
    pub(crate) fn no_metadata<S: Source>(source: &S, asked: Option<usize>) -> Self {
        let asked = asked.unwrap_or(usize::MAX);
        // Where tables come from elsewhere, the budget says nothing about them.
        let left = if S::APART { usize::MAX } else { source.budget() };
        Self::NoMetadata { asked, left }
    }
}

impl fmt::Display for NewHeapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left = match *self {
            Self::NoPages { asked, left } => {
                write!(
                    f,
                    "the source would not reserve {asked} bytes of address space for the pages of the smallest heap, \
                     aligned as requested"
                )?;
                left
            }
            Self::NoMetadata { asked, left } => {
                write!(
                    f,
                    "the source has no memory for {asked} bytes of tables of the smallest heap"
                )?;
                left
            }
            Self::Granule => {
                return f.write_str(
                    "the source's granule is no power of two, less than a cache line, or more than a page where pages \
                     are committed",
                );
            }
        };
        match left {
            usize::MAX => Ok(()),
            _ => write!(f, "; it had {left} bytes left"),
        }
    }
}

impl core::error::Error for NewHeapError {}

/// Why pages could not be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FreeError {
    kind: Kind,
    address: usize,
    base: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    FreeAlready,
    Outside { page: usize, bytes: usize },
}

impl FreeError {
    pub(crate) fn free_already(address: NonNull<u8>, base: NonNull<u8>) -> Self {
        Self {
            kind: Kind::FreeAlready,
            address: address.addr().get(),
            base: base.addr().get(),
        }
    }

    /// The pages from `page` on, of `page_bytes` bytes each, do not belong to a heap whose grown part is `bytes` bytes
    /// from `base`.
    pub(crate) fn outside(page: usize, page_bytes: usize, base: NonNull<u8>, bytes: usize) -> Self {
        let base = base.addr().get();
        Self {
            kind: Kind::Outside { page, bytes },
            // A page so far away that it has no address must not be mistaken for another.
            address: page.saturating_mul(page_bytes).saturating_add(base),
            base,
        }
    }

    /// The address of the first page that could not be freed; `usize::MAX` if it would lie past the end of the address
    /// space.
    #[must_use]
    pub const fn address(&self) -> usize {
        self.address
    }

    /// Whether the page was already free: freed twice, or never allocated.
    #[must_use]
    pub const fn is_free_already(&self) -> bool {
        matches!(self.kind, Kind::FreeAlready)
    }

    #[cold]
    pub(crate) fn abort(self) -> ! {
        let what = match self.kind {
            Kind::FreeAlready => {
                "page freed that is free (freed twice, or never allocated); its address, the heap's base"
            }
            Kind::Outside { .. } => "pages freed that are not this heap's; their address, the heap's base",
        };
        fatal::abort(what, Number::Address(self.address), Number::Address(self.base))
    }
}

impl fmt::Display for FreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::FreeAlready => {
                write!(
                    f,
                    "the page at {:#x} is free already (freed twice, or never allocated)",
                    self.address
                )
            }
            Kind::Outside { page, bytes } => {
                let end = self.base.saturating_add(bytes);
                write!(
                    f,
                    "the pages from {page} on, at {:#x}, are not of the heap at {:#x}..{end:#x}",
                    self.address, self.base
                )
            }
        }
    }
}

impl core::error::Error for FreeError {}
