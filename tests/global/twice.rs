//! A block freed twice, by a `GlobalHeap`, whenever and wherever it lies: it is found or it is not, and is never handed
//! out twice.

use std::collections::BTreeMap;

use super::child;
use super::*;

/// What the process says of itself when it has got a block twice.
const TWICE: &str = "handed out twice";

/// Against a map of what is the program's, in processes of their own, of one size each: else a block's place may lie
/// inside another by the second time, and it is that one's.
#[test]
fn a_block_freed_twice_anywhere_is_never_handed_out_twice() {
    const SEED: &str = "PAGEHEAP_TEST_SEED";
    const NAME: &str = "twice::a_block_freed_twice_anywhere_is_never_handed_out_twice";
    const RUNS: u64 = 48;
    static HEAP: GlobalHeap = GlobalHeap::new();
    if child::is_one() {
        let seed = std::env::var(SEED).unwrap().parse().unwrap();
        free_one_twice(&HEAP, Random(seed));
        return;
    }
    let found = (1..=RUNS).filter(|seed| {
        let output = child::output(child::command(NAME).env(SEED, seed.to_string()));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!said.contains(TWICE), "seed {seed}: {said}");
        let is_found = said.contains("pageheap: a block was freed");
        assert_eq!(is_found, !output.status.success(), "seed {seed}: {said}");
        is_found
    });
    // Where it lies in another lane of the store, or another has the lock, it is left there.
    assert!(found.count() as u64 > RUNS / 2);
}

/// Whether somebody has a part of it.
fn overlaps(live: &BTreeMap<usize, usize>, address: usize, size: usize) -> bool {
    let before = live.range(..address + size).next_back();
    before.is_some_and(|(&other, &bytes)| other + bytes > address)
}

fn free_one_twice(heap: &GlobalHeap, mut random: Random) {
    const SIZES: [usize; 8] = [8, 24, 64, 80, 200, 512, 1024, 5000];
    const STEPS: usize = 6000;
    let layout = layout(SIZES[random.below(SIZES.len())], 8);
    let when = STEPS / 6 + random.below(STEPS / 2);
    let (mut live, mut freed) = (BTreeMap::new(), Vec::new());
    for step in 0..STEPS {
        // Fewer, then more again: so that spans go, and come.
        let most = if step / 1000 % 2 == 0 { 110 } else { 90 };
        match random.below(200) {
            _ if step == when => {
                let outside = |&address: &usize| !overlaps(&live, address, layout.size());
                let candidates: Vec<_> = freed.iter().copied().filter(outside).collect();
                let Some(&address) = candidates.get(random.below(candidates.len().max(1))) else {
                    continue;
                };
                // SAFETY: none: this is what must do no harm.
                unsafe { heap.dealloc(std::ptr::with_exposed_provenance_mut(address), layout) };
            }
            0 => heap.flush_thread(),
            choice if choice < most => {
                // SAFETY: not of size zero; written to inside.
                let address = unsafe {
                    let memory = heap.alloc(layout);
                    memory.cast::<usize>().write(step);
                    memory.expose_provenance()
                };
                let twice = overlaps(&live, address, layout.size());
                assert!(!twice, "{TWICE}: {address:#x}, step {step}, freed twice at {when}");
                live.insert(address, layout.size());
            }
            _ => {
                let Some(&address) = live.keys().nth(random.below(live.len().max(1))) else {
                    continue;
                };
                live.remove(&address);
                freed.push(address);
                // SAFETY: allocated with this layout.
                unsafe { heap.dealloc(std::ptr::with_exposed_provenance_mut(address), layout) };
            }
        }
    }
}
