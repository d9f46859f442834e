//! Traits that a box passes on from its value, the state after a caught panic, `Debug` output.

use std::alloc::Layout;
use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::fmt::Display;
use std::panic::{RefUnwindSafe, UnwindSafe, catch_unwind};
use std::sync::Arc;

use pageheap::arena::{Arena, ArenaBox, ArenaConfig, ArenaError, FreeList, Pool, ShardedFreeList};
use pageheap::source::{Numbers, System};
use pageheap::unsize_box;
use pageheap::{GlobalHeap, Heap, PageHeap};

#[test]
fn a_box_is_to_others_what_its_value_is() -> Result<(), ArenaError> {
    let (arena, other) = (Arena::new(), Pool::new());
    assert!(arena.boxed(1)? == other.boxed(1)? && arena.boxed(1)? < arena.boxed(2)?);
    let sorted: BTreeSet<_> = [arena.boxed("b")?, arena.boxed("a")?].into();
    assert_eq!(format!("{sorted:?}"), "{\"a\", \"b\"}");
    let name = "name".to_owned();
    let names: HashMap<ArenaBox<'_, String>, _> = [(arena.boxed(name.clone())?, 7)].into();
    assert_eq!(names.get(&name), Some(&7));
    let mut count = arena.boxed(0..5)?;
    assert_eq!((count.len(), count.next(), count.nth_back(1)), (5, Some(0), Some(3)));
    assert_eq!(count.collect::<Vec<_>>(), [1, 2]);
    let error = arena.boxed(arena.alloc_slice_with(usize::MAX, |_| 1_u8).expect_err("too long"))?;
    let said: &dyn std::error::Error = &error;
    assert_eq!(said.to_string(), error.to_string());
    let mut text = arena.boxed("text".to_owned())?;
    AsMut::<String>::as_mut(&mut text).push('!');
    assert_eq!(AsRef::<String>::as_ref(&text), "text!");
    Ok(())
}

/// What is in an arena already becomes a box's, as a slice and as a trait object, and is dropped once.
#[test]
fn a_box_may_be_made_of_what_is_in_the_arena() -> Result<(), ArenaError> {
    let counted = Arc::new(());
    let arena = Arena::new();
    let slice = arena.alloc_slice_with(3, |_| counted.clone())?;
    // SAFETY: nobody else drops them, or uses them after the box.
    let slice: ArenaBox<'_, [Arc<()>]> = unsafe { ArenaBox::from_mut(slice) };
    assert_eq!((slice.len(), Arc::strong_count(&counted)), (3, 4));
    drop(slice);
    assert_eq!(Arc::strong_count(&counted), 1);
    let any: ArenaBox<'_, dyn Any> = unsize_box!(arena.boxed(counted.clone())?);
    assert_eq!(Arc::strong_count(&counted), 2);
    assert!(any.is::<Arc<()>>());
    drop(any);
    assert_eq!(Arc::strong_count(&counted), 1);
    Ok(())
}

#[test]
fn heaps_and_arenas_may_be_seen_by_who_has_caught_a_panic() {
    fn safe<T: UnwindSafe + RefUnwindSafe>() {}
    safe::<PageHeap<System>>();
    safe::<PageHeap<Numbers>>();
    safe::<Heap<System>>();
    safe::<GlobalHeap>();
    safe::<Arena>();
    safe::<Pool>();
    safe::<Arena<&PageHeap<System>>>();
    safe::<Pool<Arc<PageHeap<System>>>>();
    safe::<FreeList<&PageHeap<System>>>();
    safe::<ShardedFreeList<PageHeap<System>>>();
    safe::<ArenaBox<'_, Vec<u8>>>();
}

/// Nothing leaks: values made before the panic are intact, and there is room for more.
#[test]
fn a_panic_while_something_is_made_leaves_a_heap_in_order() {
    let heap = super::promises::heap(256);
    let arena = Arena::new_in(&heap);
    let list = FreeList::new_in(Layout::new::<u64>(), &heap).expect("a list");
    let panicked = catch_unwind(|| {
        let _kept = (list.boxed(1_u64), arena.alloc(2_u64));
        let made = |index: usize| {
            assert!(index < 5);
            index
        };
        arena.alloc_slice_with(10, made).map(|_| ())
    });
    assert!(panicked.is_err());
    assert!(arena.alloc(1).is_ok() && list.boxed(1_u64).is_ok());
    assert_eq!(list.stats().allocated, 0);
    drop((arena, list));
    assert!(heap.check().is_ok());
    assert_eq!(heap.stats().in_use.0, 0);
}

/// `Debug` output fits in a line or two and takes no lock: limits and a few figures, not the contents.
#[test]
fn heaps_and_arenas_are_shown_in_a_line() {
    let (heap, config) = (
        super::promises::heap(256),
        ArenaConfig::new().limit(1 << 20).slab(1 << 16).prealloc(1 << 16),
    );
    let layout = Layout::new::<[u64; 3]>();
    let (arena, pool) = (
        Arena::new_in(&heap),
        Pool::with_config_in(config, &heap).expect("a pool"),
    );
    let list = FreeList::with_config_in(layout, config, &heap).expect("a list");
    let sharded = ShardedFreeList::new_in(layout, 4, &heap).expect("a list");
    assert_eq!(
        format!("{arena:?}"),
        "Arena { limit: None, reserved: 0, blocks: 0, .. }"
    );
    let shown = format!("{pool:?}");
    let begin = "Pool { limit: Some(1048576), reserved: 65536, blocks: 1, generation: ";
    assert!(shown.starts_with(begin) && shown.len() < 120, "{shown}");
    let shown = format!("{list:?}");
    let begin = "FreeList { limit: Some(1048576), reserved: 65536, blocks: 1, layout: Layout { size: 24,";
    assert!(shown.starts_with(begin) && shown.len() < 160, "{shown}");
    let shown = format!("{sharded:?}");
    assert!(
        shown.starts_with("ShardedFreeList { limit: None, reserved: ") && shown.len() < 160,
        "{shown}"
    );
    let owner = sharded.owner().expect("a shard");
    let guard = owner.enter();
    for shown in [format!("{owner:?}"), format!("{guard:?}")] {
        assert!(shown.contains("shard: ") && shown.len() < 220, "{shown}");
    }
    drop(guard);
    let shown = format!("{heap:?}");
    assert!(
        shown.starts_with("PageHeap { limit: PageCount(256), capacity: PageCount(") && shown.len() < 160,
        "{shown}"
    );
    // The same holds for types that refer to an arena or a heap.
    for shown in [format!("{:?}", arena.local()), format!("{:?}", heap.cache())] {
        assert!(shown.len() < 600, "{shown}");
    }
}

/// As they do without the macro.
#[test]
fn what_is_made_for_a_box_of_another_type_lives_as_long() {
    fn shown(boxed: ArenaBox<dyn Display>) -> String {
        boxed.to_string()
    }
    assert_eq!(shown(unsize_box!(Arena::new().boxed(7).unwrap())), "7");
}
