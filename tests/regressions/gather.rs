//! A gathering thread waited for one that held slots, and asked the backing for more at each of a million looks. And a
//! backing that was full was asked some 70 times for each allocation that failed.

use std::alloc::{self, Layout};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Barrier as Door, Mutex};
use std::time::Duration;

use pageheap::arena::{ArenaConfig, Backing, Block, FreeList, ShardedFreeList};
use pageheap::internals::free_list::{Extent, Hyaline, LANES, MAX_BATCH, Node, Nodes, Pocket, Shards};
use pageheap::internals::{Barrier, Table};

#[cfg(target_os = "linux")]
use super::{child, filter};

const SLOTS: u32 = 8;

/// A few nodes, a backing that counts requests, and a place where an owner can be stopped.
struct Gate<'d> {
    nodes: Vec<Node>,
    used: AtomicU32,
    asked: AtomicUsize,
    /// Where the next thread that looks at a node waits: once to report that it is there, once to be let go.
    stop: Mutex<Option<&'d Door>>,
    /// The request at which the backing lets that thread go on.
    opens: Mutex<Option<(usize, &'d Door)>>,
}

impl Nodes for &Gate<'_> {
    fn node(&self, slot: u32) -> &Node {
        if let Some(door) = self.stop.try_lock().ok().and_then(|mut stop| stop.take()) {
            door.wait();
            door.wait();
        }
        &self.nodes[slot as usize - 1]
    }

    fn fresh(&self, most: u32, _: bool) -> Option<(u32, u32)> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        let opens = *self.opens.lock().unwrap();
        if let Some((at, door)) = opens
            && at == asked
        {
            door.wait();
        }
        let used = self.used.load(Ordering::Acquire);
        let count = most.min(SLOTS - used);
        self.used.fetch_add(count, Ordering::AcqRel);
        (count > 0).then_some((used + 1, count))
    }

    fn extent(&self) -> Extent {
        let used = self.used.load(Ordering::Relaxed);
        Extent {
            fresh: u64::from(SLOTS - used),
            exist: u64::from(SLOTS),
            more: 0,
        }
    }

    fn each_used(&self, visit: impl FnMut(u32)) {
        (1..=self.used.load(Ordering::Relaxed)).for_each(visit);
    }
}

/// A table in leaked memory.
pub fn table<T: pageheap::internals::Zeroed>(len: usize) -> Table<T> {
    let bytes = vec![0_u8; len * size_of::<T>() + align_of::<T>()].leak();
    let skip = bytes.as_ptr().align_offset(align_of::<T>());
    // SAFETY: aligned, zero, of that many entries, leaked, and used by this table alone.
    unsafe { Table::new(NonNull::from(&mut bytes[skip]), len) }
}

impl Gate<'_> {
    fn new() -> Self {
        Self {
            nodes: (0..SLOTS).map(|_| Node::new()).collect(),
            used: AtomicU32::new(0),
            asked: AtomicUsize::new(0),
            stop: Mutex::new(None),
            opens: Mutex::new(None),
        }
    }
}

fn list<'g, 'd>(gate: &'g Gate<'d>) -> Shards<&'g Gate<'d>> {
    let hyaline = Hyaline::new(&gate, table(2), table(2), Barrier::new());
    Shards::new(gate, table(LANES + 2), hyaline, Barrier::new(), MAX_BATCH)
}

/// All slots are taken. An owner frees `freed` of them: the first into its pocket, from where it takes it again, the
/// others into its shard. It stops inside the shard, about to take one of these, while `meanwhile` runs, and continues
/// when that calls the function it is given. In the end it holds the two slots that it took.
fn with_one_inside(freed: usize, meanwhile: impl FnOnce(&Shards<&Gate<'_>>, &[u32], &dyn Fn())) {
    let door = Door::new(2);
    let gate = Gate::new();
    let shards = list(&gate);
    let owned = shards.lend().expect("a shard");
    let taken: Vec<u32> = (0..SLOTS)
        .map(|_| shards.allocate_as_guest(0).expect("a slot"))
        .collect();
    std::thread::scope(|scope| {
        let owner = scope.spawn(|| {
            let (shard, pocket) = (shards.shard(owned), Pocket::new());
            for &slot in &taken[..freed] {
                let node = &gate.nodes[slot as usize - 1];
                assert_eq!(shards.free(shard, &pocket, (slot, std::ptr::null_mut()), node), Ok(()));
            }
            let first = shards.allocate(shard, &pocket).map(|(slot, _)| slot);
            *gate.stop.lock().unwrap() = Some(&door);
            (first, shards.allocate(shard, &pocket).map(|(slot, _)| slot))
        });
        // From here on the owner is stopped inside its shard.
        door.wait();
        meanwhile(&shards, &taken, &|| _ = door.wait());
        assert_eq!(owner.join().unwrap(), (Some(taken[0]), Some(taken[freed - 1])));
    });
}

#[test]
fn the_backing_is_not_asked_while_slots_are_held() {
    with_one_inside(2, |shards, _, go_on| {
        let asked = || shards.nodes().asked.load(Ordering::Relaxed);
        let (before, begins) = (asked(), Door::new(2));
        std::thread::scope(|scope| {
            let guest = scope.spawn(|| {
                begins.wait();
                shards.allocate_as_guest(0)
            });
            begins.wait();
            std::thread::sleep(Duration::from_millis(300));
            let asked = asked() - before;
            go_on();
            assert_eq!(guest.join().unwrap(), None);
            println!("asked {asked} times");
            assert!(asked <= 8, "asked {asked} times while it waited");
        });
    });
}

/// A gathering thread looked a million times at an owner preempted with free slots in its shard, and then refused.
#[test]
fn what_is_held_is_waited_for_however_long() {
    with_one_inside(3, |shards, taken, go_on| {
        std::thread::scope(|scope| {
            let guest = scope.spawn(|| shards.allocate_as_guest(0));
            std::thread::sleep(Duration::from_secs(3));
            go_on();
            assert_eq!(guest.join().unwrap(), Some(taken[1]), "a slot was free all the time");
        });
    });
}

/// Slots that were retired while nobody reads are there for all, also while a thread passes them on as a batch.
#[test]
fn what_is_on_its_way_to_readers_is_waited_for() {
    let (door, gate) = (Door::new(2), Gate::new());
    let shards = list(&gate);
    let owned = shards.lend().expect("a shard");
    let taken: Vec<u32> = (0..SLOTS)
        .map(|_| shards.allocate_as_guest(0).expect("a slot"))
        .collect();
    // A refusal later, a batch has two slots.
    assert_eq!((shards.allocate_as_guest(0), shards.batch()), (None, 2));
    let retire = |slot: u32| shards.retire(shards.shard(owned), slot, &gate.nodes[slot as usize - 1]);
    assert_eq!(retire(taken[0]), Ok(()));
    let found = std::thread::scope(|scope| {
        *gate.stop.lock().unwrap() = Some(&door);
        let retired = scope.spawn(|| retire(taken[1]));
        // From here on that thread has both in hand, until the backing has been asked more often than a refusal takes.
        door.wait();
        *gate.opens.lock().unwrap() = Some((gate.asked.load(Ordering::Relaxed) + 20, &door));
        let found = shards.allocate_as_guest(0);
        if found.is_none() {
            door.wait();
        }
        assert_eq!(retired.join().unwrap(), Ok(()));
        found
    });
    assert!(found.is_some(), "one was retired before");
}

/// In the child of a fork, the thread that held slots does not exist: the wait must end.
#[cfg(unix)]
#[test]
fn the_child_of_a_fork_does_not_wait_for_ever() {
    with_one_inside(3, |shards, _, go_on| {
        // SAFETY: the child calls nothing that allocates or unwinds, and ends by `_exit` or a signal.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::alarm(600);
                libc::_exit(i32::from(shards.allocate_as_guest(0).is_some()));
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            status
        };
        go_on();
        assert_eq!(status, 0, "it waits, or has a slot that one inside may have");
    });
}

/// A list whose barrier the kernel refuses. An owner was refused although its own shard had slots, and what another
/// owner gave to all meanwhile was not found.
#[cfg(target_os = "linux")]
#[test]
fn without_the_barrier_owners_go_on() {
    if !child::is_one() {
        return child::runs("gather::without_the_barrier_owners_go_on");
    }
    if !pageheap::internals::has_fence() {
        // There is no barrier to refuse.
        return;
    }
    let door = Door::new(2);
    let gate = Gate::new();
    let shards = list(&gate);
    let (mine, other) = (shards.lend().unwrap(), shards.lend().unwrap());
    let taken: Vec<u32> = (0..SLOTS).map(|_| shards.allocate_as_guest(0).unwrap()).collect();
    let node = |slot: u32| &gate.nodes[slot as usize - 1];
    let free = |shard: usize, pocket: &Pocket<'static>, slot: u32| {
        // SAFETY: the nodes outlive the pockets, which live in this function.
        let node = unsafe { &*std::ptr::from_ref(node(slot)) };
        assert_eq!(
            shards.free(shards.shard(shard), pocket, (slot, std::ptr::null_mut()), node),
            Ok(())
        );
    };
    filter::refuse(&[filter::Refusal::new(libc::SYS_membarrier, libc::EPERM)]);
    // A slot in the shard's pocket that its owner does not know of.
    free(mine, &Pocket::new(), taken[7]);
    let own = shards.allocate(shards.shard(mine), &Pocket::new());
    assert_eq!(own.map(|(slot, _)| slot), Some(taken[7]), "in the asker's own shard");
    let pocket = Pocket::new();
    taken[..3].iter().for_each(|&slot| free(other, &pocket, slot));
    taken[4..6]
        .iter()
        .for_each(|&slot| shards.free_as_guest(0, slot, node(slot)).unwrap());
    let (send, receive) = std::sync::mpsc::channel();
    let found = std::thread::scope(|scope| {
        // A guest stops inside a lane that has two slots, so the owner that asks must wait.
        *gate.stop.lock().unwrap() = Some(&door);
        scope.spawn(|| shards.allocate_as_guest(0));
        door.wait();
        scope.spawn(|| send.send(shards.allocate(shards.shard(mine), &Pocket::new()).is_some()));
        let waits = receive.recv_timeout(Duration::from_millis(200)).is_err();
        shards.flush(other);
        let found = receive.recv_timeout(Duration::from_secs(10));
        door.wait();
        (waits, found)
    });
    assert_eq!(found, (true, Ok(true)), "what an owner gives to all is there for all");
}

/// A backing that counts requests, and has room for so many bytes.
#[derive(Default)]
pub struct Few {
    pub asked: AtomicUsize,
    pub room: AtomicUsize,
}

// SAFETY: memory of the system allocator, each block once.
unsafe impl Backing for Few {
    fn page_bytes(&self) -> usize {
        4096
    }

    fn take(&self, bytes: usize, align: usize) -> Option<Block> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let left = self.room.load(Ordering::Relaxed).checked_sub(bytes)?;
        // SAFETY: not of zero bytes.
        let start = NonNull::new(unsafe { alloc::alloc(Layout::from_size_align(bytes, align.max(4096)).ok()?) })?;
        self.room.store(left, Ordering::Relaxed);
        Some(Block {
            memory: NonNull::slice_from_raw_parts(start, bytes),
            zeroed: false,
        })
    }

    unsafe fn give(&self, memory: NonNull<[u8]>) {
        self.room.fetch_add(memory.len(), Ordering::Relaxed);
        // SAFETY: of this length and alignment. Slots of these tests are aligned to less.
        unsafe {
            alloc::dealloc(
                memory.as_ptr().cast(),
                Layout::from_size_align(memory.len(), 4096).unwrap(),
            )
        };
    }
}

#[test]
fn a_full_backing_is_asked_a_few_times() {
    let backing = Few::default();
    backing.room.store(4 << 20, Ordering::Relaxed);
    let layout = Layout::new::<[u64; 8]>();
    let list = ShardedFreeList::with_config_in(layout, 1, ArenaConfig::new(), &backing).unwrap();
    let one = FreeList::with_config_in(layout, ArenaConfig::new(), &backing).unwrap();
    let owner = list.owner().unwrap();
    let asked_for = |take: &dyn Fn() -> bool, finds: bool| {
        let before = backing.asked.load(Ordering::Relaxed);
        assert_eq!(take(), finds);
        backing.asked.load(Ordering::Relaxed) - before
    };
    let takes: [&dyn Fn() -> bool; 3] = [&|| owner.allocate().is_ok(), &|| list.allocate().is_ok(), &|| {
        one.allocate().is_ok()
    }];
    for take in takes {
        while take() {}
        for _ in 0..3 {
            let asked = asked_for(take, false);
            assert!((1..=2).contains(&asked), "asked {asked} times");
        }
        // Room again: all of it is used.
        backing.room.store(4 << 20, Ordering::Relaxed);
        let asked = asked_for(take, true);
        assert!(asked <= 16, "asked {asked} times");
        let more = 1 + std::iter::from_fn(|| take().then_some(())).count();
        assert!(more > (4 << 20) / 81, "{more} slots in 4 MiB");
        let asked = asked_for(take, false);
        assert!((1..=16).contains(&asked), "asked {asked} times");
    }
}

/// It was asked seven times for each slot that was freed in a lane, before the lanes were looked at.
#[test]
fn a_full_backing_is_asked_once_for_a_slot_that_lies_in_a_lane() {
    let backing = Few::default();
    backing.room.store(64 << 20, Ordering::Relaxed);
    let layout = Layout::new::<[u64; 8]>();
    let list = ShardedFreeList::with_config_in(layout, 1, ArenaConfig::new(), &backing).unwrap();
    let owner = list.owner().unwrap();
    let mut slots: Vec<_> = (0..1 << 16).map(|_| list.allocate().unwrap()).collect();
    backing.room.store(0, Ordering::Relaxed);
    slots.extend(std::iter::from_fn(|| list.allocate().ok()));
    let before = backing.asked.load(Ordering::Relaxed);
    for _ in 0..1000 {
        // SAFETY: allocated here, and not used any more.
        unsafe { list.deallocate(slots.pop().unwrap().cast()) };
        slots.push(owner.allocate().unwrap());
    }
    let asked = backing.asked.load(Ordering::Relaxed) - before;
    assert!(asked <= 1000, "asked {asked} times for a thousand slots");
    // Room again: the next slab is as long as ever.
    backing.room.store(64 << 20, Ordering::Relaxed);
    let before = backing.asked.load(Ordering::Relaxed);
    assert!((0..1 << 16).all(|_| list.allocate().is_ok()));
    let asked = backing.asked.load(Ordering::Relaxed) - before;
    assert_eq!(asked, 2, "a page, which goes back, and as many slots as there were");
}

/// Not by a gathering for each slot, as long as one is free somewhere.
#[test]
fn a_list_grows_at_once_when_its_backing_has_room_again() {
    let backing = Few::default();
    backing.room.store(4 << 20, Ordering::Relaxed);
    let layout = Layout::new::<[u64; 8]>();
    let list = ShardedFreeList::with_config_in(layout, 1, ArenaConfig::new(), &backing).unwrap();
    let owner = list.owner().unwrap();
    let mut slots: Vec<_> = std::iter::from_fn(|| list.allocate().ok()).collect();
    backing.room.store(64 << 20, Ordering::Relaxed);
    let before = list.gatherings();
    for _ in 0..1000 {
        // It lies in a lane.
        // SAFETY: allocated here, and not used any more.
        unsafe { list.deallocate(slots.pop().unwrap().cast()) };
        slots.push(owner.allocate().unwrap());
    }
    let gatherings = list.gatherings() - before;
    assert!(gatherings <= 20, "{gatherings} for a thousand slots");
}
