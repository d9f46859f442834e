//! Traits that a box takes over from its contents: it reads, compares, prints and iterates as they do, like `Box`.
//!
//! ```text
//!   ArenaBox<T> ┐
//!   SlotBox<T>  ┴─ Deref, DerefMut ─▶ T      AsRef, Borrow, Eq, Ord, Hash, Display, Error, Iterator, …: those of T
//! ```
//!
//! Each box defines how it reaches and drops its contents; the macro `like_a_box` adds what follows from that.
//!
//! Worked: a lookup of a `&String` in a `HashMap<ArenaBox<String>, u32>` works through `Borrow`: the string hashes like
//! its box.
//!
//! Cost: only that of the contents' own methods.

#![forbid(unsafe_code)]

/// Implements the traits of a box of `T` through its contents: `like_a_box!([its other parameters] the box)`.
macro_rules! like_a_box {
    ([$($other:tt)*] $boxed:ty) => {
        impl<T: ?Sized, $($other)*> AsRef<T> for $boxed {
            #[inline]
            fn as_ref(&self) -> &T {
                self
            }
        }

        impl<T: ?Sized, $($other)*> AsMut<T> for $boxed {
            #[inline]
            fn as_mut(&mut self) -> &mut T {
                self
            }
        }

        impl<T: ?Sized, $($other)*> core::borrow::Borrow<T> for $boxed {
            #[inline]
            fn borrow(&self) -> &T {
                self
            }
        }

        impl<T: ?Sized, $($other)*> core::borrow::BorrowMut<T> for $boxed {
            #[inline]
            fn borrow_mut(&mut self) -> &mut T {
                self
            }
        }

        impl<T: ?Sized + PartialEq, $($other)*> PartialEq for $boxed {
            #[inline]
            fn eq(&self, other: &Self) -> bool {
                **self == **other
            }
        }

        impl<T: ?Sized + Eq, $($other)*> Eq for $boxed {}

        impl<T: ?Sized + PartialOrd, $($other)*> PartialOrd for $boxed {
            #[inline]
            fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
                (**self).partial_cmp(&**other)
            }
        }

        impl<T: ?Sized + Ord, $($other)*> Ord for $boxed {
            #[inline]
            fn cmp(&self, other: &Self) -> core::cmp::Ordering {
                (**self).cmp(&**other)
            }
        }

        impl<T: ?Sized + core::hash::Hash, $($other)*> core::hash::Hash for $boxed {
            #[inline]
            fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
                (**self).hash(state);
            }
        }

        impl<T: ?Sized + fmt::Debug, $($other)*> fmt::Debug for $boxed {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                (**self).fmt(f)
            }
        }

        impl<T: ?Sized + fmt::Display, $($other)*> fmt::Display for $boxed {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                (**self).fmt(f)
            }
        }

        impl<T: ?Sized, $($other)*> fmt::Pointer for $boxed {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Pointer::fmt(&core::ptr::from_ref::<T>(self), f)
            }
        }

        impl<T: ?Sized + core::error::Error, $($other)*> core::error::Error for $boxed {
            fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
                (**self).source()
            }
        }

        impl<T: ?Sized + Iterator, $($other)*> Iterator for $boxed {
            type Item = T::Item;

            fn next(&mut self) -> Option<T::Item> {
                (**self).next()
            }

            fn size_hint(&self) -> (usize, Option<usize>) {
                (**self).size_hint()
            }

            fn nth(&mut self, index: usize) -> Option<T::Item> {
                (**self).nth(index)
            }
        }

        impl<T: ?Sized + DoubleEndedIterator, $($other)*> DoubleEndedIterator for $boxed {
            fn next_back(&mut self) -> Option<T::Item> {
                (**self).next_back()
            }

            fn nth_back(&mut self, index: usize) -> Option<T::Item> {
                (**self).nth_back(index)
            }
        }

        impl<T: ?Sized + ExactSizeIterator, $($other)*> ExactSizeIterator for $boxed {
            fn len(&self) -> usize {
                (**self).len()
            }
        }

        impl<T: ?Sized + core::iter::FusedIterator, $($other)*> core::iter::FusedIterator for $boxed {}
    };
}

pub(super) use like_a_box;
