//! Freeing slots that are free already or foreign: an error from `try_` functions, an abort from all others.

use std::alloc::Layout;
use std::ptr::NonNull;

use pageheap::arena::{FreeList, Owner, ShardedFreeList, SlotBox, SlotError};

use super::child::{aborts, wrong};

fn layout() -> Layout {
    Layout::from_size_align(48, 16).unwrap()
}

fn sharded() -> ShardedFreeList {
    ShardedFreeList::new(layout(), 2).unwrap()
}

fn take(owner: &Owner<'_>) -> NonNull<u8> {
    owner.allocate().unwrap().cast()
}

/// The four ways to give a slot back that return an error.
type Way = unsafe fn(&ShardedFreeList, &Owner<'_>, NonNull<u8>) -> Result<(), SlotError>;

const WAYS: [Way; 4] = [
    // SAFETY: the caller's promise.
    |list, _, slot| unsafe { list.try_deallocate(slot) },
    // SAFETY: the caller's promise.
    |_, owner, slot| unsafe { owner.try_deallocate(slot) },
    // SAFETY: the caller's promise.
    |list, _, slot| unsafe { list.try_retire(slot) },
    // SAFETY: the caller's promise.
    |_, owner, slot| unsafe { owner.try_retire(slot) },
];

#[test]
fn a_slot_given_back_in_any_way_is_refused_in_all() {
    for first in WAYS {
        let list = sharded();
        let owner = list.owner().unwrap();
        let slot = take(&owner);
        let second = list.owner().unwrap();
        let reader = second.enter();
        reader.protect(|| slot);
        // SAFETY: ours, given back once; the other attempts must be refused.
        unsafe {
            assert_eq!(first(&list, &owner, slot), Ok(()));
            for again in WAYS {
                let error = again(&list, &owner, slot).unwrap_err();
                assert!(!error.is_foreign() && error.address() == slot.addr().get(), "{error}");
            }
        }
        drop(reader);
        owner.flush();
        assert_eq!(list.stats().allocated, 0);
        for again in WAYS {
            // SAFETY: free by now, so it must be refused.
            assert!(!unsafe { again(&list, &owner, slot) }.unwrap_err().is_foreign());
        }
        assert_eq!(list.census(|_| ()).live, 0);
    }
}

#[test]
fn what_is_not_a_slot_of_the_list_is_refused() {
    let (list, other) = (sharded(), sharded());
    let (owner, stranger) = (list.owner().unwrap(), other.owner().unwrap());
    let (slot, foreign) = (take(&owner), take(&stranger));
    for way in WAYS {
        // SAFETY: all of them must be refused.
        unsafe {
            for address in [foreign, slot.byte_add(16), slot.byte_add(1), NonNull::dangling()] {
                let error = way(&list, &owner, address).unwrap_err();
                assert!(error.is_foreign() && error.address() == address.addr().get(), "{error}");
            }
            // A slot that was never allocated.
            let never = slot.byte_add(48 * 1000);
            assert!(list.owns(never.as_ptr()));
            assert!(!way(&list, &owner, never).unwrap_err().is_foreign());
        }
    }
    assert_eq!((list.stats().allocated, other.stats().allocated), (48, 48));
}

// ---- without `try_` the process aborts

const FREED: &str = "not allocated (freed twice, or retired)";
const FOREIGN: &str = "not this list's";

#[test]
fn freeing_twice_into_a_list_aborts() {
    if aborts("misuse::freeing_twice_into_a_list_aborts", FREED) {
        let list = FreeList::new(layout()).unwrap();
        let slot = list.allocate().unwrap().cast();
        // SAFETY: the second call does not return.
        unsafe {
            list.deallocate(slot);
            list.deallocate(wrong(slot));
        }
    }
}

/// The slot lies in the pocket.
#[test]
fn freeing_twice_with_exclusive_access_aborts() {
    if aborts("misuse::freeing_twice_with_exclusive_access_aborts", FREED) {
        let mut list = FreeList::new(layout()).unwrap();
        let slot = list.allocate_mut().unwrap().cast();
        // SAFETY: the second call does not return.
        unsafe {
            list.deallocate_mut(slot);
            list.deallocate_mut(wrong(slot));
        }
    }
}

#[test]
fn freeing_twice_by_an_owner_aborts() {
    if aborts("misuse::freeing_twice_by_an_owner_aborts", FREED) {
        let list = sharded();
        let owner = list.owner().unwrap();
        let slot = take(&owner);
        // SAFETY: the second call does not return.
        unsafe {
            list.deallocate(slot);
            owner.deallocate(wrong(slot));
        }
    }
}

#[test]
fn freeing_what_is_foreign_aborts() {
    if aborts("misuse::freeing_what_is_foreign_aborts", FOREIGN) {
        let list = sharded();
        let slot = list.allocate().unwrap().cast::<u8>();
        // SAFETY: the call does not return.
        unsafe { list.deallocate(wrong(slot.byte_add(8))) };
    }
}

#[test]
fn retiring_twice_aborts() {
    if aborts("misuse::retiring_twice_aborts", FREED) {
        let list = sharded();
        let owner = list.owner().unwrap();
        let slot = take(&owner);
        // SAFETY: the second call does not return.
        unsafe {
            owner.retire(slot);
            owner.retire(wrong(slot));
        }
    }
}

#[test]
fn retiring_what_is_free_aborts() {
    if aborts("misuse::retiring_what_is_free_aborts", FREED) {
        let list = sharded();
        let slot = list.allocate().unwrap().cast();
        // SAFETY: the second call does not return.
        unsafe {
            list.deallocate(slot);
            list.retire(wrong(slot));
        }
    }
}

#[test]
fn retiring_what_is_foreign_aborts() {
    if aborts("misuse::retiring_what_is_foreign_aborts", FOREIGN) {
        let (list, other) = (sharded(), sharded());
        let owner = list.owner().unwrap();
        let slot = other.allocate().unwrap().cast();
        // SAFETY: the call does not return.
        unsafe { owner.retire(wrong(slot)) };
    }
}

#[test]
fn a_box_of_what_is_foreign_aborts() {
    if aborts("misuse::a_box_of_what_is_foreign_aborts", FOREIGN) {
        let (list, other) = (FreeList::new(layout()).unwrap(), sharded());
        let slot = list.allocate().unwrap().cast::<u64>();
        // SAFETY: the call does not return.
        let _ = unsafe { SlotBox::from_raw(&other, wrong(slot)) };
    }
}

#[test]
fn a_box_of_no_slot_aborts() {
    if aborts("misuse::a_box_of_no_slot_aborts", FOREIGN) {
        let list = FreeList::new(layout()).unwrap();
        let slot = list.allocate().unwrap().cast::<u8>();
        // SAFETY: the call does not return.
        let _ = unsafe { SlotBox::from_raw(&list, wrong(slot.byte_add(8))) };
    }
}
