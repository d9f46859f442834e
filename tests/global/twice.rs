//! A block freed twice to a `GlobalHeap`, at any time and wherever it lies: whether or not that is detected, the block
//! is never handed out twice.

use std::collections::BTreeMap;

use super::child;
use super::*;

/// What the process prints when it gets a block twice.
const TWICE: &str = "handed out twice";

/// What it prints when each block that it has freed overlaps another that is live, all the time.
const NOTHING: &str = "nothing to free twice";

/// Compares with a map of the program's live blocks. Each run is a process of its own with a single size: otherwise the
/// address might lie inside another live block by the second free, and belong to that one.
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
    let mut nothing = 0;
    let found = (1..=RUNS).filter(|seed| {
        let output = child::output(child::command(NAME).env(SEED, seed.to_string()));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!said.contains(TWICE), "seed {seed}: {said}");
        nothing += u64::from(String::from_utf8_lossy(&output.stdout).contains(NOTHING));
        let is_found = said.contains("pageheap: a block was freed");
        assert_eq!(is_found, !output.status.success(), "seed {seed}: {said}");
        is_found
    });
    // A block that lies in another lane of the store, or whose lock another thread holds, is left there undetected.
    assert!(found.count() as u64 > RUNS / 2);
    assert!(nothing < RUNS / 8, "{nothing} runs freed no block twice");
}

/// Whether a live block overlaps this range.
fn overlaps(live: &BTreeMap<usize, usize>, address: usize, size: usize) -> bool {
    let before = live.range(..address + size).next_back();
    before.is_some_and(|(&other, &bytes)| other + bytes > address)
}

fn free_one_twice(heap: &GlobalHeap, mut random: Random) {
    const SIZES: [usize; 8] = [8, 24, 64, 80, 200, 512, 1024, 5000];
    const STEPS: usize = 6000;
    let layout = layout(SIZES[random.below(SIZES.len())], 8);
    let mut when = STEPS / 6 + random.below(STEPS / 2);
    let (mut live, mut freed) = (BTreeMap::new(), Vec::new());
    for step in 0..STEPS {
        // Fewer live blocks, then more again, so that spans are released and allocated.
        let most = if step / 1000 % 2 == 0 { 110 } else { 90 };
        match random.below(200) {
            _ if step == when => {
                let outside = |&address: &usize| !overlaps(&live, address, layout.size());
                let candidates: Vec<_> = freed.iter().copied().filter(outside).collect();
                let Some(&address) = candidates.get(random.below(candidates.len().max(1))) else {
                    when += 1;
                    continue;
                };
                // SAFETY: none: this is the misuse that must do no harm.
                unsafe { heap.dealloc(std::ptr::with_exposed_provenance_mut(address), layout) };
            }
            0 => heap.flush_thread(),
            choice if choice < most => {
                // SAFETY: the size is not zero; the write is inside the block.
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
    if when >= STEPS {
        println!("{NOTHING}");
    }
}
