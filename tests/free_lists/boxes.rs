//! Boxes in all lists: the slot of a value that is not made, conversion to a raw pointer and back, traits passed on.

use std::alloc::Layout;
use std::any::Any;
use std::cell::Cell;
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::marker::PhantomPinned;
use std::panic::{AssertUnwindSafe, RefUnwindSafe, UnwindSafe, catch_unwind};
use std::pin::Pin;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use pageheap::arena::{ArenaConfig, FreeList, Owner, Reason, ShardedFreeList, SlotBox};
use pageheap::source::System;
use pageheap::unsize_box;
use pageheap::{Config, PageCount, PageHeap};

use super::one::Counted;

fn layout() -> Layout {
    Layout::new::<[u64; 4]>()
}

fn one_page() -> FreeList {
    FreeList::with_config(layout(), ArenaConfig::new().limit(8192)).unwrap()
}

#[test]
fn a_value_without_a_slot_is_not_made() {
    let (list, made) = (one_page(), Cell::new(0));
    let make = || made.replace(made.get() + 1);
    let all: Vec<_> = std::iter::from_fn(|| list.boxed_with(make).ok()).collect();
    assert!(all.len() > 200 && all.iter().enumerate().all(|(index, value)| **value == index));
    assert_eq!(list.boxed_with(make).unwrap_err().reason(), Reason::NoSlots);
    let too_large = list.boxed_with(|| [make() as u64; 5]).unwrap_err();
    assert_eq!((too_large.reason(), made.get()), (Reason::SlotTooSmall, all.len()));
}

#[test]
fn a_value_whose_making_panics_leaves_its_slot() {
    let list = one_page();
    let panicked = catch_unwind(|| list.boxed_with(|| -> u64 { panic!("on purpose") }).map(drop));
    assert!(panicked.is_err());
    assert_eq!(list.stats().allocated, 0);
    // A value may be computed from others in the same list.
    let sum = list.boxed_with(|| *list.boxed(7_u64).unwrap() + *list.boxed(8_u64).unwrap());
    assert_eq!((sum.map(SlotBox::into_inner), list.stats().allocated), (Ok(15), 0));
}

/// A box of a trait object is that of its value: in the same slot, dropped once, by whatever handle.
#[test]
fn a_box_can_become_one_of_a_trait_object() {
    let (list, counted) = (Arc::new(one_page()), Rc::new(()));
    let at = |any: &dyn Any| std::ptr::from_ref(any).addr();
    let boxed = SlotBox::try_new_in(Rc::clone(&counted), Arc::clone(&list)).unwrap();
    let place = std::ptr::from_ref(&*boxed).addr();
    let any: SlotBox<dyn Any, _> = unsize_box!(boxed);
    assert_eq!((at(&*any), list.stats().allocated), (place, 32));
    assert!(any.is::<Rc<()>>() && Rc::strong_count(&counted) == 2 && Arc::strong_count(&list) == 2);
    drop(any);
    assert_eq!((Rc::strong_count(&counted), Arc::strong_count(&list)), (1, 1));
    let slice: SlotBox<[Rc<()>], &FreeList> = unsize_box!(list.boxed([(); 3].map(|()| Rc::clone(&counted))).unwrap());
    assert_eq!((slice.len(), Rc::strong_count(&counted)), (3, 4));
    drop(slice);
    assert_eq!((Rc::strong_count(&counted), list.stats().allocated), (1, 0));
}

/// A pinned value is dropped where it was made. If its box is forgotten, its slot stays its own, as the list does.
#[test]
fn a_pinned_value_stays_until_it_is_dropped() {
    struct Stays(Cell<usize>, Rc<Cell<usize>>, PhantomPinned);
    impl Drop for Stays {
        fn drop(&mut self) {
            assert_eq!(self.0.get(), std::ptr::from_ref(self).addr());
            self.1.set(self.1.get() + 1);
        }
    }
    fn unpin<T: Unpin>(_: &T) {}

    let (list, dropped) = (Rc::new(one_page()), Rc::new(Cell::new(0)));
    let pinned = || {
        let value = Stays(Cell::new(0), Rc::clone(&dropped), PhantomPinned);
        let value: Pin<SlotBox<Stays, _>> = SlotBox::try_new_in(value, Rc::clone(&list)).unwrap().into();
        value.0.set(std::ptr::from_ref(&*value).addr());
        value
    };
    let mut moved = vec![pinned()];
    moved.extend((0..20).map(|_| pinned()));
    unpin(&moved[0]);
    drop(moved);
    assert_eq!((dropped.get(), list.stats().allocated), (21, 0));
    let forgotten = pinned();
    let at = std::ptr::from_ref(&*forgotten).addr();
    std::mem::forget(forgotten);
    let mut list = list;
    assert!(Rc::get_mut(&mut list).is_none(), "nobody can reset it");
    let others: Vec<_> = std::iter::from_fn(|| list.boxed(0_u64).ok()).collect();
    assert!(others.iter().all(|other| std::ptr::from_ref(&**other).addr() != at));
    assert_eq!(dropped.get(), 21);
}

/// The same in a sharded list, from the list and from an owner.
#[test]
fn a_sharded_list_makes_a_value_once_it_has_a_slot() {
    let list = ShardedFreeList::with_config(layout(), 1, ArenaConfig::new().limit(2 * 8192)).unwrap();
    let (owner, made) = (list.owner().unwrap(), Cell::new(0));
    let make = || made.replace(made.get() + 1);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        owner.boxed_with(|| -> u64 { panic!("on purpose") }).map(drop)
    }));
    assert!(panicked.is_err() && list.stats().allocated == 0);
    let sum = owner.boxed_with(|| *list.boxed_with(|| 7_u64).unwrap() + *owner.boxed(8_u64).unwrap());
    assert_eq!((sum.map(SlotBox::into_inner), list.stats().allocated), (Ok(15), 0));
    let all: Vec<_> = std::iter::from_fn(|| owner.boxed_with(make).ok()).collect();
    assert!(all.len() > 100 && all.iter().enumerate().all(|(index, value)| **value == index));
    assert_eq!(list.boxed_with(make).unwrap_err().reason(), Reason::NoSlots);
    assert_eq!(owner.boxed_with(make).unwrap_err().reason(), Reason::NoSlots);
    assert_eq!(made.get(), all.len());
}

#[test]
fn what_comes_out_of_a_box_goes_back_into_one() {
    let drops = Cell::new(0);
    let list = FreeList::new(layout()).unwrap();
    let raw = SlotBox::into_raw(list.boxed(Counted(&drops, 0)).unwrap());
    // SAFETY: a slot of this list that nobody else holds.
    let back = unsafe { SlotBox::from_raw(&list, raw) };
    assert_eq!((drops.get(), list.stats().allocated), (0, 32));
    drop(back);
    assert_eq!((drops.get(), list.stats().allocated), (1, 0));
    // A slot that was never in a box.
    let slot = list.allocate().unwrap().cast::<Counted<'_>>();
    // SAFETY: ours, with a value in it.
    let boxed = unsafe {
        slot.write(Counted(&drops, 0));
        SlotBox::from_raw(&list, slot)
    };
    drop(SlotBox::into_inner(boxed));
    assert_eq!((drops.get(), list.stats().allocated), (2, 0));
}

/// In a sharded list it does not matter which handle made the box: the list, an owner, or another owner.
#[test]
fn owners_take_over_what_others_had_in_boxes() {
    let (list, drops) = (ShardedFreeList::new(layout(), 2).unwrap(), Cell::new(0));
    let (one, other) = (list.owner().unwrap(), list.owner().unwrap());
    for round in 0..100 {
        let raw = match round % 3 {
            0 => SlotBox::into_raw(list.boxed(Counted(&drops, 0)).unwrap()),
            1 => SlotBox::into_raw(one.boxed(Counted(&drops, 0)).unwrap()),
            _ => SlotBox::into_raw(other.boxed(Counted(&drops, 0)).unwrap()),
        };
        // SAFETY: a slot of this list that nobody else holds.
        unsafe {
            match round / 3 % 3 {
                0 => drop(SlotBox::from_raw(&list, raw)),
                1 => drop(SlotBox::from_raw(&one, raw)),
                _ => drop(SlotBox::from_raw(&other, raw)),
            }
        }
        assert_eq!((drops.get(), list.stats().allocated), (round + 1, 0));
    }
}

/// The last box that holds a list takes it along, after its value, whichever thread it is on.
#[test]
fn a_box_may_hold_its_list() {
    let heap = Arc::new(PageHeap::new(System, Config::new(1 << 30)).unwrap());
    let list = Arc::new(FreeList::new_in(layout(), Arc::clone(&heap)).unwrap());
    let boxes = [1_u64, 2, 3].map(|number| SlotBox::try_new_in(number, Arc::clone(&list)).unwrap());
    assert_eq!((Arc::strong_count(&list), list.stats().allocated), (4, 3 * 32));
    drop(list);
    let threads = boxes.map(|boxed| std::thread::spawn(move || *boxed * 2));
    assert_eq!(threads.map(|thread| thread.join().unwrap()), [2, 4, 6]);
    assert_eq!((Arc::strong_count(&heap), heap.stats().in_use), (1, PageCount::ZERO));
}

/// Whatever becomes of a box, its hold on the list ends, and so does the slot's use, unless it went on as a pointer.
#[test]
fn a_box_lets_its_list_go() {
    let (drops, list) = (Cell::new(0), Rc::new(FreeList::new(layout()).unwrap()));
    let new = || SlotBox::try_new_in(Counted(&drops, 5), Rc::clone(&list));
    let state = || (Rc::strong_count(&list), list.stats().allocated, drops.get());
    let inner = SlotBox::into_inner(new().unwrap());
    assert_eq!((inner.1, state()), (5, (1, 0, 0)));
    drop(inner);
    let raw = SlotBox::into_raw(new().unwrap());
    assert_eq!(state(), (1, 32, 1));
    // SAFETY: a slot of this list, which is still there, and nobody else has it.
    let back = unsafe { SlotBox::from_raw(Rc::clone(&list), raw) };
    assert_eq!(state(), (2, 32, 1));
    drop(back);
    assert_eq!(state(), (1, 0, 2));
    let too_large = SlotBox::try_new_in([0_u64; 5], Rc::clone(&list)).map(drop);
    assert_eq!(
        (too_large.unwrap_err().reason(), state()),
        (Reason::SlotTooSmall, (1, 0, 2))
    );
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("on purpose");
        }
    }
    let bad = SlotBox::try_new_in(Panics, Rc::clone(&list)).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| drop(bad))).is_err());
    assert_eq!(state(), (1, 0, 2));
}

/// An owner too: the slot goes back to its shard.
#[test]
fn a_box_may_hold_an_owner() {
    let list = ShardedFreeList::new(layout(), 1).unwrap();
    let owner = Rc::new(list.owner().unwrap());
    let boxed = SlotBox::try_new_in(7_u64, Rc::clone(&owner)).unwrap();
    drop(owner);
    assert!(list.owner().is_err(), "its shard is still lent");
    assert_eq!((*boxed, list.stats().allocated), (7, 32));
    drop(boxed);
    assert!(list.owner().is_ok());
    assert_eq!(list.stats().allocated, 0);
}

/// A box of an owner that became one of its list outlives the owner, in any thread. The slot is had again, by all.
#[test]
fn a_box_of_an_owner_can_become_one_of_its_list() {
    const BOXES: usize = 300;
    static LIST: LazyLock<ShardedFreeList> = LazyLock::new(|| ShardedFreeList::new(layout(), 2).unwrap());
    thread_local! {
        static OWNER: Owner<'static> = LIST.owner().unwrap();
    }
    let boxed = |number| OWNER.with(|owner| owner.boxed(number).map(SlotBox::into_list_box));
    let ended = std::thread::spawn(move || Vec::from_iter((0..BOXES).map(|number| boxed(number).unwrap())));
    let ended = ended.join().unwrap();
    assert_eq!(LIST.stats().allocated, BOXES * 32);
    assert!(ended.iter().enumerate().all(|(number, boxed)| **boxed == number));
    drop(ended);
    assert_eq!(LIST.stats().allocated, 0);
    // An owner that goes on takes each slot once, also the one it would have had in its pocket.
    for round in 0..3 {
        let boxes = Vec::from_iter((0..BOXES).map(|number| {
            drop(boxed(number).unwrap());
            boxed(number + round).unwrap()
        }));
        assert!(boxes.iter().zip(round..).all(|(boxed, number)| **boxed == number));
        assert_eq!(LIST.stats().allocated, BOXES * 32);
    }
    assert_eq!(LIST.stats().allocated, 0);
}

/// The pocket remembers a slot that leaves as a box of the list, goes round by a lane, and comes back.
#[test]
fn a_slot_out_of_the_pocket_goes_round_by_the_list() {
    let list = ShardedFreeList::new(layout(), 1).unwrap();
    let owner = list.owner().unwrap();
    let address = |boxed: &SlotBox<usize, _>| std::ptr::from_ref(&**boxed).addr();
    drop(owner.boxed(1).unwrap());
    let out = owner.boxed(2).unwrap();
    let at = address(&out);
    drop(SlotBox::into_list_box(out));
    list.flush();
    let mut all = Vec::from_iter((0..200).map(|number| owner.boxed(number).unwrap()));
    let place = all.iter().position(|boxed| address(boxed) == at);
    drop(all.swap_remove(place.expect("it comes round")));
    let again = [(); 2].map(|()| owner.boxed(7).unwrap());
    assert_eq!(again.iter().filter(|boxed| address(boxed) == at).count(), 1);
}

/// Of whatever the box is, and however it holds the owner, which it lets go.
#[test]
fn a_box_that_becomes_one_of_a_list_lets_its_owner_go() {
    let (list, drops) = (ShardedFreeList::new(layout(), 1).unwrap(), Cell::new(0));
    let owner = Rc::new(list.owner().unwrap());
    let boxed = SlotBox::try_new_in(Counted(&drops, 5), Rc::clone(&owner)).unwrap();
    let at = std::ptr::from_ref(&*boxed).addr();
    drop(owner);
    assert!(list.owner().is_err(), "its shard is still lent");
    let boxed: SlotBox<Counted<'_>, &ShardedFreeList> = SlotBox::into_list_box(boxed);
    let owner = list.owner().expect("an owner, since the box has none");
    assert_eq!((std::ptr::from_ref(&*boxed).addr(), boxed.1, drops.get()), (at, 5, 0));
    drop(boxed);
    assert_eq!((drops.get(), list.stats().allocated), (1, 0));
    let slice: SlotBox<[u32], _> = unsize_box!(owner.boxed_with(|| [3, 2, 1]).unwrap());
    let slice = SlotBox::into_list_box(slice);
    drop(owner);
    assert_eq!((&slice[..], list.stats().allocated), (&[3, 2, 1][..], 32));
}

/// A box made from a pointer valid for its value only. Regression: the pocket handed out that pointer. (Only Miri can
/// tell.)
#[test]
fn a_slot_whose_box_saw_a_part_of_it_is_whole_again() {
    let list = ShardedFreeList::new(layout(), 1).unwrap();
    let owner = list.owner().unwrap();
    let slot = owner.allocate().unwrap().cast::<u64>();
    // SAFETY: allocated here, with room for four.
    let value = unsafe {
        slot.write(7);
        NonNull::from(&mut *slot.as_ptr())
    };
    // SAFETY: a slot of this list that nobody else holds.
    drop(unsafe { SlotBox::from_raw(&owner, value) });
    let whole = owner.allocate().unwrap().cast::<[u64; 4]>();
    assert_eq!(whole.addr(), slot.addr());
    // SAFETY: allocated here, all of it.
    let read = unsafe {
        whole.write([8; 4]);
        whole.read()
    };
    assert_eq!(read, [8; 4]);
}

#[test]
fn a_box_may_be_of_a_trait_object_or_a_slice() {
    let (list, drops) = (ShardedFreeList::new(layout(), 1).unwrap(), Cell::new(0));
    let owner = list.owner().unwrap();
    trait Named {
        fn name(&self) -> u32;
    }
    impl Named for Counted<'_> {
        fn name(&self) -> u32 {
            17
        }
    }
    let raw = SlotBox::into_raw(owner.boxed(Counted(&drops, 0)).unwrap()) as NonNull<dyn Named>;
    // SAFETY: a slot of this list that nobody else holds.
    let named: SlotBox<dyn Named, &Owner<'_>> = unsafe { SlotBox::from_raw(&owner, raw) };
    assert_eq!((named.name(), drops.get()), (17, 0));
    drop(named);
    assert_eq!((drops.get(), list.stats().allocated), (1, 0));
    let raw = SlotBox::into_raw(list.boxed([3_u32, 2, 1]).unwrap()) as NonNull<[u32]>;
    // SAFETY: as above.
    let mut slice = unsafe { SlotBox::from_raw(&list, raw) };
    slice.sort_unstable();
    assert_eq!((&slice[..], format!("{slice:?}")), (&[1, 2, 3][..], "[1, 2, 3]".into()));
    drop(slice);
    let raw = SlotBox::into_raw(list.boxed(5_u8).unwrap()) as NonNull<dyn Any>;
    // SAFETY: as above.
    assert!(unsafe { SlotBox::from_raw(&list, raw) }.is::<u8>());
    assert_eq!(list.stats().allocated, 0);
}

#[test]
#[allow(
    clippy::mutable_key_type,
    reason = "of the list only slots change, and keys are values"
)]
fn a_box_is_to_others_what_its_value_is() {
    let list = FreeList::new(layout()).unwrap();
    let number = |number: u64| list.boxed(number).unwrap();
    assert!(number(1) == number(1) && number(1) != number(2) && number(1) < number(2));
    assert_eq!(number(3).cmp(&number(2)), Ordering::Greater);
    assert!(list.boxed(f64::NAN).unwrap() != list.boxed(f64::NAN).unwrap());
    let sorted: BTreeSet<_> = [3, 1, 2].map(number).into_iter().collect();
    assert_eq!(format!("{sorted:?}"), "{1, 2, 3}");
    let name = "name".to_owned();
    let names: HashMap<_, _> = [(list.boxed(name.clone()).unwrap(), 7)].into();
    assert_eq!(names.get(&name), Some(&7));
    let mut count = list.boxed(0..10).unwrap();
    assert_eq!(
        (count.len(), count.next(), count.nth(1), count.next_back()),
        (10, Some(0), Some(2), Some(9))
    );
    assert_eq!(
        count.map(|number| number * 2).collect::<Vec<_>>(),
        [6, 8, 10, 12, 14, 16]
    );
    let error = list.boxed("x".parse::<u8>().unwrap_err()).unwrap();
    let said: &dyn std::error::Error = &error;
    assert_eq!((said.to_string(), said.source().is_none()), (error.to_string(), true));
    let mut text = list.boxed("text".to_owned()).unwrap();
    AsMut::<String>::as_mut(&mut text).push('!');
    assert_eq!(
        (AsRef::<String>::as_ref(&text).as_str(), format!("{text:p}")),
        ("text!", format!("{:p}", &raw const *text))
    );
}

#[test]
fn lists_and_boxes_may_be_seen_by_who_has_caught_a_panic() {
    fn safe<T: UnwindSafe + RefUnwindSafe>() {}
    safe::<FreeList>();
    safe::<ShardedFreeList>();
    safe::<SlotBox<String, &FreeList>>();
    safe::<SlotBox<u64, Arc<ShardedFreeList>>>();
}
