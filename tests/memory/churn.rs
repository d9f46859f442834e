//! What a long life leaves behind, in resident memory and in mappings.

use super::*;

fn maps() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Requirement 21: 40 times 100 MB.
#[test]
fn churn_leaves_nothing_behind() {
    if !is_child() {
        return assert!(run("churn::churn_leaves_nothing_behind"));
    }
    let (mut first, mut second) = (0, 0);
    for round in 0..40_usize {
        let mut kept = Vec::new();
        for number in 0..20 {
            let size = [64, 700, 9000, 70_000, 900_000][(round + number) % 5] + round * 16;
            kept.push(blocks(5_000_000, size));
        }
        // In a different order each time.
        while !kept.is_empty() {
            drop(kept.swap_remove(round * 7 % kept.len()));
        }
        let half = if round < 20 { &mut first } else { &mut second };
        *half = resident().max(*half);
    }
    println!("{} MiB, then {}", first >> 20, second >> 20);
    assert!(second <= first + first / 8 + (16 << 20), "{first}, then {second}");
}

/// Requirement 18: releasing memory between live blocks does not split mappings.
#[test]
fn holes_cut_no_mappings() {
    if !is_child() {
        return assert!(run("churn::holes_cut_no_mappings"));
    }
    let mut most = 0;
    for (round, size) in [100, 5000, 40_000, 100_000, 2_200_000].into_iter().enumerate() {
        let mut kept = blocks(256 << 20, size);
        let mut index = 0;
        kept.retain(|_| {
            index += 1;
            (index * 7 + round) % 3 == 0
        });
        HEAP.release(usize::MAX);
        most = most.max(maps());
        let mut more = blocks(64 << 20, size / 2 + 40);
        more.truncate(more.len() / 2);
        HEAP.release(usize::MAX);
        most = most.max(maps());
    }
    println!("{most} mappings at most");
    assert!(most < 2000);
}
