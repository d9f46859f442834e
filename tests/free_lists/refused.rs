//! A kernel that grants the barrier when a list is made, but refuses it later: which slots can still be allocated.

use std::alloc::Layout;
use std::ptr::NonNull;

use pageheap::arena::{ArenaConfig, ShardedFreeList};
use pageheap::internals::has_fence;

#[path = "../common/filter.rs"]
mod filter;

use super::child;

fn all(mut take: impl FnMut() -> Option<NonNull<[u8]>>) -> Vec<NonNull<u8>> {
    std::iter::from_fn(|| take().map(NonNull::cast)).collect()
}

#[test]
fn without_the_barrier_only_other_owners_slots_are_out_of_reach() {
    if !child::is_one() {
        return child::runs("refused::without_the_barrier_only_other_owners_slots_are_out_of_reach");
    }
    if !has_fence() {
        // There is no barrier to refuse.
        return;
    }
    let layout = Layout::from_size_align(64, 8).unwrap();
    let list = ShardedFreeList::with_config(layout, 2, ArenaConfig::new().limit(1 << 16)).unwrap();
    let (one, other) = (list.owner().unwrap(), list.owner().unwrap());
    let slots = all(|| list.allocate().ok());
    let count = slots.len();
    assert!(count > 300);
    filter::refuse(&[filter::Refusal::new(libc::SYS_membarrier, libc::EPERM)]);
    let (others, rest) = slots.split_at(10);
    // SAFETY: ours, each freed once.
    unsafe {
        others.iter().for_each(|&slot| other.deallocate(slot));
        rest.iter().for_each(|&slot| list.deallocate(slot));
    }
    // The other owner may be using the slots that it keeps, so they are out of reach. All others can be allocated.
    let mine = all(|| one.allocate().ok());
    let kept: Vec<_> = others.iter().filter(|slot| !mine.contains(slot)).collect();
    assert!(!kept.is_empty() && kept.len() < 10, "{}", kept.len());
    assert_eq!(mine.len(), count - kept.len(), "slots of the lanes are free");
    // So can those in the asking owner's shard.
    // SAFETY: as above.
    mine.iter().for_each(|&slot| unsafe { one.deallocate(slot) });
    assert_eq!(all(|| one.allocate().ok()).len(), mine.len());
    // The other owner can still use its slots, and flush them for all.
    assert!(other.allocate().is_ok());
    other.flush();
    assert_eq!(all(|| list.allocate().ok()).len(), kept.len() - 1);
    // Retired slots stay where they are: nobody can tell whether there are readers.
    // SAFETY: as above.
    mine.iter().for_each(|&slot| unsafe { one.retire(slot) });
    assert!(one.allocate().is_err());
}
