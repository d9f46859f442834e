//! Tables, a sharded list, an owner of a shard, like `arena::Owner`; and a user of a list of free slots, like
//! `arena::FreeList`.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use pageheap::internals::free_list::{
    FreeAlready, FreeSlot, FreeSlots, Hyaline, LANES, MAX_BATCH, Node, Nodes, Pocket, Shards,
};
use pageheap::internals::{AtomicU32, Barrier, Table, Zeroed};

/// A table on the heap of the checker.
pub fn table<T: Zeroed>(len: usize) -> Table<T> {
    // SAFETY: under a checker the address means nothing.
    unsafe { Table::new(NonNull::dangling(), len) }
}

/// A list of `nodes` for so many owners, with so many spare nodes.
pub fn list<N: Nodes>(nodes: N, owners: usize, spares: usize) -> Arc<Shards<N>> {
    list_in_batches(nodes, owners, spares, MAX_BATCH)
}

/// The same, of slots of which a batch has at most so many.
pub fn list_in_batches<N: Nodes>(nodes: N, owners: usize, spares: usize, most: u32) -> Arc<Shards<N>> {
    let hyaline = Hyaline::new(&nodes, table(owners), table(spares), Barrier::new());
    Arc::new(Shards::new(nodes, table(LANES + owners), hyaline, Barrier::new(), most))
}

/// The sole owner of a shard of a list, which remembers what is in its pocket.
pub struct Hand<N: Nodes + 'static> {
    pub list: Arc<Shards<N>>,
    pub shard: usize,
    /// Of nodes of the list, which outlives this.
    pocket: Pocket<'static>,
}

// SAFETY: the addresses in the pocket lead to nothing.
unsafe impl<N: Nodes + Send + Sync + 'static> Send for Hand<N> {}

/// Where a slot's memory would be.
fn memory(slot: u32) -> *mut u8 {
    ptr::without_provenance_mut(slot as usize * 64)
}

impl<N: Nodes> Hand<N> {
    /// An owner with a shard; `None` if all are lent.
    pub fn lend(list: &Arc<Shards<N>>) -> Option<Self> {
        Some(Self {
            list: list.clone(),
            shard: list.lend()?,
            pocket: Pocket::new(),
        })
    }

    pub fn allocate(&self) -> Option<u32> {
        let (slot, at) = self.list.allocate(self.list.shard(self.shard), &self.pocket)?;
        assert!(
            at.is_null() || at == memory(slot),
            "the pocket remembers another slot's memory"
        );
        Some(slot)
    }

    pub fn free(&self, slot: u32) -> Result<(), FreeAlready> {
        let shard = self.list.shard(self.shard);
        if let Some(freed) = self.list.free_again(shard, &self.pocket, memory(slot)) {
            return freed;
        }
        self.list
            .free(shard, &self.pocket, (slot, memory(slot)), self.node(slot))
    }

    pub fn retire(&self, slot: u32) -> Result<(), FreeAlready> {
        self.list.retire(self.list.shard(self.shard), slot, self.node(slot))
    }

    pub fn take_back(self) {
        self.list.take_back(self.shard);
    }

    fn node(&self, slot: u32) -> &'static Node {
        // SAFETY: nodes stay in place as long as the list exists, which is as long as this does.
        unsafe { &*ptr::from_ref(self.list.nodes().node(slot)) }
    }
}

/// [`FreeSlots`], by numbers only.
pub struct Numbers<N>(pub FreeSlots<N>);

impl<N: Nodes<AtomicU32>> Numbers<N> {
    pub fn new(nodes: N) -> Self {
        Self(FreeSlots::new(nodes))
    }

    pub fn nodes(&self) -> &N {
        self.0.nodes()
    }

    pub fn allocate(&self) -> Option<u32> {
        self.0.allocate().map(number)
    }

    pub fn allocate_many(&self, most: usize) -> Vec<u32> {
        let mut slots = Vec::new();
        let count = self.0.allocate_many(most, |taken| slots.push(number(taken)));
        assert_eq!(count, slots.len());
        slots
    }

    pub fn free(&self, slot: u32) -> Result<(), FreeAlready> {
        self.0.free(slot, at(slot), self.nodes().node(slot))
    }

    pub fn free_many(&self, slots: impl IntoIterator<Item = u32>) -> Result<usize, usize> {
        let slots = slots.into_iter();
        self.0
            .free_many(slots.map(|slot| (slot, at(slot), self.nodes().node(slot))))
    }

    /// Slots that are free, each once.
    pub fn count_free(&self) -> u64 {
        let mut seen = Vec::new();
        self.0.each_free(|taken| seen.push(number(taken)));
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), count, "a slot is free twice");
        count as u64
    }
}

fn at(slot: u32) -> NonNull<u8> {
    NonNull::new(memory(slot)).expect("slots are numbered from 1")
}

fn number(taken: FreeSlot) -> u32 {
    match taken {
        FreeSlot::Number(slot) => slot,
        FreeSlot::Memory(memory) => (memory.addr().get() / 64) as u32,
    }
}
