//! Collections in slots, through two versions of `allocator-api2`.

use std::alloc::Layout;
use std::ptr::NonNull;

use pageheap::arena::{ArenaConfig, FreeList, ShardedFreeList};

const SLOT: Layout = Layout::new::<[u64; 16]>();
const CONFIG: ArenaConfig = ArenaConfig::new().limit(1 << 16);

/// What each version of the trait must do on a list, of any kind, with slots for 16 `u64`s.
macro_rules! lists_allocate {
    ($test:ident, $version:ident) => {
        mod $test {
            use $version::alloc::Allocator;
            use $version::{boxed::Box, vec::Vec};

            use super::*;

            fn collections(list: impl Allocator + Copy, allocated: impl Fn() -> usize) {
                let boxed = Box::new_in([7_u64; 16], list);
                let word = Box::new_in(String::from("word"), list);
                assert_eq!((boxed[15], word.as_str(), allocated()), (7, "word", 2));
                let mut numbers = Vec::new_in(list);
                numbers.push(0_u64);
                let start = numbers.as_ptr();
                (1..16).for_each(|number| numbers.push(number));
                assert!(
                    numbers.iter().copied().eq(0..16) && numbers.as_ptr() == start,
                    "it grows in place"
                );
                assert_eq!(allocated(), 3);
                assert!(numbers.try_reserve(1).is_err(), "seventeen do not fit");
                numbers.truncate(2);
                numbers.shrink_to_fit();
                assert_eq!((numbers.as_slice(), numbers.as_ptr()), (&[0, 1][..], start));
                numbers.clear();
                numbers.shrink_to_fit();
                assert_eq!(allocated(), 2, "what is shrunk to nothing is free");
                drop((boxed, word));
                assert_eq!(allocated(), 0);
                assert!(Box::try_new_in([0_u64; 17], list).is_err(), "too large");
                let nothing = Box::new_in((), list);
                let wide = Box::<[Wide; 0], _>::new_in([], list);
                assert_eq!(
                    (allocated(), wide.len()),
                    (0, 0),
                    "what is of no bytes takes no slot"
                );
                drop((nothing, wide));
            }

            fn by_hand(list: impl Allocator, allocated: impl Fn() -> usize) {
                let (one, zero) = (Layout::new::<u64>(), Layout::from_size_align(0, 64).unwrap());
                let wide = Layout::from_size_align(8, 64).unwrap();
                assert!(list.allocate(wide).is_err(), "slots are not aligned to that");
                let slot = list.allocate(one).unwrap();
                assert_eq!((slot.len(), allocated()), (SLOT.size(), 1));
                let start = slot.cast::<u8>();
                // SAFETY: allocated above with such a layout; each call passes the layout that the slot has by then.
                unsafe {
                    assert!(list.grow(start, one, Layout::new::<[u64; 17]>()).is_err());
                    assert!(list.grow(start, one, wide).is_err());
                    assert_eq!(list.grow(start, one, SLOT).unwrap().cast::<u8>(), start);
                    let nothing: NonNull<[u8]> = list.shrink(start, SLOT, zero).unwrap();
                    assert_eq!((nothing.len(), nothing.addr().get() % 64, allocated()), (0, 0, 0));
                    let again = list.grow_zeroed(nothing.cast(), zero, one).unwrap().cast::<u64>();
                    assert_eq!((again.read(), allocated()), (0, 1));
                    again.write_bytes(0xFF, 16);
                    let grown = list
                        .grow_zeroed(again.cast(), one, SLOT)
                        .unwrap()
                        .cast::<[u64; 16]>();
                    assert_eq!((grown.read()[0], &grown.read()[1..]), (u64::MAX, &[0; 15][..]));
                    list.deallocate(grown.cast(), SLOT);
                }
                assert_eq!(allocated(), 0);
            }

            #[test]
            fn slots_hold_what_fits() {
                let list = FreeList::with_config(SLOT, CONFIG).unwrap();
                collections(&list, || list.stats().allocated / SLOT.size());
                by_hand(&list, || list.stats().allocated / SLOT.size());
                let list = ShardedFreeList::with_config(SLOT, 1, CONFIG).unwrap();
                collections(&list, || list.stats().allocated / SLOT.size());
                by_hand(&list, || list.stats().allocated / SLOT.size());
                let owner = list.owner().unwrap();
                collections(&owner, || list.stats().allocated / SLOT.size());
                by_hand(&owner, || list.stats().allocated / SLOT.size());
            }

            /// A `Vec` doubles, so it stops short of the end of a slot that is no power of two elements long.
            #[test]
            fn a_vector_fills_its_slot_if_it_asks_for_no_more() {
                let list = FreeList::with_config(Layout::new::<[u64; 12]>(), CONFIG).unwrap();
                let mut numbers = Vec::new_in(&list);
                while numbers.try_reserve(1).is_ok() {
                    numbers.push(0_u64);
                }
                assert_eq!(numbers.len(), 8, "the last doubling that fits");
                let start = numbers.as_ptr();
                numbers.try_reserve_exact(4).unwrap();
                numbers.resize(12, 0);
                assert_eq!(numbers.as_ptr(), start);
                assert!(numbers.try_reserve_exact(1).is_err());
                let mut at_once = Vec::with_capacity_in(12, &list);
                at_once.resize(12, 0_u64);
                assert_eq!(list.stats().allocated, 2 * 96);
                let list = FreeList::with_config(Layout::new::<[u64; 3]>(), CONFIG).unwrap();
                assert!(
                    Vec::<u64, _>::new_in(&list).try_reserve(1).is_err(),
                    "it begins with four"
                );
                Vec::with_capacity_in(3, &list).resize(3, 0_u64);
            }

            #[test]
            fn a_full_list_refuses() {
                let list = FreeList::with_config(SLOT, CONFIG).unwrap();
                let all: std::vec::Vec<_> = std::iter::from_fn(|| Box::try_new_in(0_u64, &list).ok()).collect();
                assert!(all.len() > 450, "{}", all.len());
                drop(all);
                assert_eq!(list.stats().allocated, 0);
            }
        }
    };
}

/// Takes no bytes, but is aligned to more than a slot.
#[repr(align(64))]
struct Wide;

lists_allocate!(version_02, allocator_api2_02);
lists_allocate!(version_04, allocator_api2_04);
