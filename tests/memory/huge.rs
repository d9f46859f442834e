//! The huge page advice in force, as the kernel reports it: the mapping's flags `hg` and `nh`.

use std::alloc::GlobalAlloc;

use pageheap::HugePages;

use super::filter::{Refusal, refuse};
use super::*;

/// Whether huge pages were requested, and whether they were forbidden, where this heap's block lies.
fn flags(heap: &GlobalHeap) -> (bool, bool) {
    // SAFETY: the layout is not empty; the write is inside the block; it is freed with its layout.
    unsafe {
        let block = heap.alloc(layout(10 << 20));
        assert!(!block.is_null());
        block.write(1);
        let flags = mapping(block, "VmFlags:");
        heap.dealloc(block, layout(10 << 20));
        let has = |flag: &str| flags.iter().any(|word| word == flag);
        (has("hg"), has("nh"))
    }
}

#[test]
fn the_kernel_is_told_what_the_program_says_and_nothing_by_default() {
    if !is_child() {
        return assert!(run(
            "huge::the_kernel_is_told_what_the_program_says_and_nothing_by_default"
        ));
    }
    static SYSTEM: GlobalHeap = GlobalHeap::new().background(false);
    static ADVISE: GlobalHeap = GlobalHeap::new().background(false).huge_pages(HugePages::Advise);
    static AVOID: GlobalHeap = GlobalHeap::new().background(false).huge_pages(HugePages::Avoid);
    assert_eq!(flags(&HEAP), (false, false));
    assert_eq!(flags(&SYSTEM), (false, false));
    assert_eq!(flags(&ADVISE), (true, false));
    assert_eq!(flags(&AVOID), (false, true));
    assert_eq!(SYSTEM.stats().pages.calls.advise, 0);
    assert_eq!(ADVISE.stats().pages.calls.advise, 1);
    for heap in [&ADVISE, &AVOID] {
        heap.release(usize::MAX);
        assert!(heap.stats().pages.backed.0 < 100, "{}", heap.stats());
    }
}

#[test]
fn the_environment_has_the_last_word() {
    const NAME: &str = "huge::the_environment_has_the_last_word";
    if !is_child() {
        for wish in ["system", "advise", "avoid", "nonsense"] {
            assert!(ends_well(command(NAME).env("PAGEHEAP_HUGE_PAGES", wish)), "{wish}");
        }
        return;
    }
    static ADVISE: GlobalHeap = GlobalHeap::new().background(false).huge_pages(HugePages::Advise);
    let wish = std::env::var("PAGEHEAP_HUGE_PAGES").unwrap();
    let (here, there) = match wish.as_str() {
        "advise" => ((true, false), (true, false)),
        "avoid" => ((false, true), (false, true)),
        "system" => ((false, false), (false, false)),
        _ => ((false, false), (true, false)),
    };
    assert_eq!((flags(&HEAP), flags(&ADVISE)), (here, there));
}

/// Where the kernel gives huge pages to programs that request them, a heap that does gets them, whole, and gives them
/// back.
#[test]
fn who_asks_gets_them_where_there_are_any() {
    if !is_child() {
        return assert!(run("huge::who_asks_gets_them_where_there_are_any"));
    }
    static ADVISE: GlobalHeap = GlobalHeap::new().background(false).huge_pages(HugePages::Advise);
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    // SAFETY: the layout is not empty; writes are inside the block; it is freed with its layout.
    unsafe {
        let block = ADVISE.alloc(layout(64 << 20));
        block.write_bytes(1, 64 << 20);
        let huge: usize = mapping(block, "AnonHugePages:")[0].parse().unwrap();
        println!("{} MiB of 64 in huge pages; {}", huge >> 10, setting.trim());
        let possible = setting.contains("[madvise]") || setting.contains("[always]");
        // The system may have none left.
        assert!(!possible || huge == 0 || huge >= 32 << 10);
        ADVISE.dealloc(block, layout(64 << 20));
        let before = resident();
        ADVISE.release(usize::MAX);
        assert!(resident() + (60 << 20) < before, "{} of {before}", resident());
    }
}

#[test]
fn a_refusal_changes_nothing() {
    if !is_child() {
        return assert!(run("huge::a_refusal_changes_nothing"));
    }
    static ADVISE: GlobalHeap = GlobalHeap::new().background(false).huge_pages(HugePages::Advise);
    refuse(&[Refusal::new(libc::SYS_madvise, libc::EINVAL)]);
    assert_eq!(flags(&ADVISE), (false, false));
    assert_eq!(ADVISE.stats().pages.calls.advise, 1);
    ADVISE.check().unwrap();
}

/// Requirement 25: a program's memory is made of huge pages only if it asks for that.
#[test]
fn a_gigabyte_touched_here_and_there_costs_little() {
    // With 32-bit pointers a heap has no more than that.
    const BYTES: usize = by_width(1 << 30, 1 << 29);
    if !is_child() {
        return assert!(run("huge::a_gigabyte_touched_here_and_there_costs_little"));
    }
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let before = resident();
    // SAFETY: the layout is not empty; writes are inside the block; it is freed with its layout.
    unsafe {
        let block = alloc(layout(BYTES));
        (0..BYTES).step_by(1 << 20).for_each(|at| block.add(at).write(1));
        let cost = resident() - before;
        // With `always`, the system was told to use them, but not by us.
        assert!(cost <= 64 << 20 || setting.contains("[always]"), "{} MiB", cost >> 20);
        assert!(!mapping(block, "VmFlags:").iter().any(|flag| flag == "hg"));
        dealloc(block, layout(BYTES));
    }
}
