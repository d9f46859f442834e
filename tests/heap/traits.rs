//! What every program may rely on: numbers, errors and figures are values; what holds memory goes where its users may.
//! To compile this is the test.

use std::fmt::Debug;
use std::hash::Hash;

use pageheap::arena::{
    Arena, ArenaBox, ArenaConfig, ArenaError, ArenaStats, Block, FreeList, Guard, Handle, Local, Owner, Pool,
    ProcessHeap, Reason, Scope, ScopeGuard, ShardedFreeList, SlotBox, SlotError, StaleHandle,
};
use pageheap::source::{Contents, Numbers, Purpose, Refused, Region, Reservation, Split};
use pageheap::{
    Cache, Calls, ClassStats, Fault, FreeError, Geometry, GlobalHeap, GlobalStats, Heap, HugePages, MapEntry,
    NewHeapError, ObjectFault, PageUse, Picture, Pressure, Snapshot, Stats,
};

use super::*;

/// Compiles only if `T` is not `Sync`: otherwise both implementations apply.
macro_rules! assert_not_sync {
    ($type:ty) => {{
        trait Ambiguous<Which> {
            fn here() {}
        }
        impl<T: ?Sized> Ambiguous<()> for T {}
        struct IsSync;
        impl<T: ?Sized + Sync> Ambiguous<IsSync> for T {}
        <$type as Ambiguous<_>>::here();
    }};
}

const fn value<T: Copy + Debug + Eq + Hash>() {}
const fn sent<T: Send>() {}
const fn shared<T: Send + Sync>() {}

macro_rules! shared_values {
    ($($type:ty),* $(,)?) => {
        const _: () = { $(value::<$type>(); shared::<$type>();)* };
    };
}

shared_values! {
    PageCount, PageIndex, PageRun, Allocation, MapEntry, PageUse, Geometry, Config, HugePages, Picture, Pressure,
    Calls, Stats, GlobalStats, ClassStats, Snapshot, Fault, ObjectFault, FreeError, NewHeapError,
    Contents, Purpose, Refused, ArenaConfig, ArenaError, ArenaStats, Reason, SlotError, StaleHandle, Handle<str>,
    ProcessHeap,
}

// Addresses are values too. Where they may be used, their holder knows.
const _: () = {
    value::<Reservation>();
    value::<Block>();
};

const _: () = {
    shared::<Region<2>>();
    shared::<Numbers>();
    shared::<Split<Numbers, Region>>();
    shared::<PageHeap<Region>>();
    shared::<Heap<Region>>();
    shared::<GlobalHeap<Region>>();
    shared::<Arena>();
    shared::<Pool>();
    shared::<FreeList>();
    shared::<ShardedFreeList>();
    shared::<ArenaBox<'static, str>>();
    shared::<SlotBox<str, &'static FreeList>>();
    // One user at a time, in any thread.
    sent::<Cache<'static, Region>>();
    sent::<Local<'static>>();
    sent::<Scope<'static, 'static>>();
    sent::<ScopeGuard<'static>>();
    sent::<Owner<'static>>();
};

/// A source that cannot be shown.
#[cfg(any(unix, windows))]
struct Mute;

// SAFETY: the system's verbs.
#[cfg(any(unix, windows))]
unsafe impl pageheap::source::Verbs for Mute {}

// What stands on it can.
#[cfg(any(unix, windows))]
const _: () = {
    const fn shown<T: Debug>() {}
    type Source = &'static pageheap::source::OverSystem<Mute>;
    shown::<PageHeap<Source>>();
    shown::<Cache<'static, Source>>();
    shown::<Heap<Source>>();
    shown::<Arena<PageHeap<Source>>>();
    shown::<Local<'static, PageHeap<Source>>>();
    shown::<Scope<'static, 'static, PageHeap<Source>>>();
    shown::<ScopeGuard<'static, PageHeap<Source>>>();
};

/// Those that are for one thread at a time cannot be shared.
#[test]
fn what_one_thread_uses_at_a_time_is_not_shared() {
    assert_not_sync!(Cache<'static, Region>);
    assert_not_sync!(Local<'static>);
    assert_not_sync!(Scope<'static, 'static>);
    assert_not_sync!(ScopeGuard<'static>);
    assert_not_sync!(Owner<'static>);
    assert_not_sync!(Guard<'static>);
}
