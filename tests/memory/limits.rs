//! Limits: the system's, from the first instruction on, and the heap's own.

use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

const MIB: usize = 1 << 20;

#[cfg(target_env = "gnu")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Resource = libc::c_int;

/// Runs a test under a resource limit.
fn run_limited(name: &str, resource: Resource, bytes: usize) {
    let mut command = command(name);
    let limit = libc::rlimit {
        rlim_cur: bytes as libc::rlim_t,
        rlim_max: bytes as libc::rlim_t,
    };
    let before = move || {
        // SAFETY: the limit is read from a valid place.
        match unsafe { libc::setrlimit(resource, &limit) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: one system call between fork and exec.
    unsafe { command.pre_exec(before) };
    assert!(ends_well(&mut command));
}

/// Requirement 14, in a process limited to 256 MiB.
fn a_quarter_of_a_gigabyte() {
    let large = room(MIB, 1000);
    assert!((128..256).contains(&large), "{large} MiB in blocks of 1 MiB");
    let quarter = room(64 * MIB, 1);
    assert_eq!(quarter, 1, "a quarter of all, when all is free");
    let small = room(64, 16 * MIB);
    assert!(
        small * 64 >= 256 * MIB * 2 / 5,
        "{} MiB in blocks of 64 B",
        small * 64 / MIB
    );
    let again = room(MIB, 1000);
    assert!(again * 10 >= large * 8, "{large} MiB, then {again}");
    println!(
        "{large} and {again} MiB in large blocks, {} in small ones",
        small * 64 / MIB
    );
}

#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room")]
fn a_quarter_of_a_gigabyte_of_addresses_is_enough() {
    const NAME: &str = "limits::a_quarter_of_a_gigabyte_of_addresses_is_enough";
    if is_child() {
        a_quarter_of_a_gigabyte();
    } else {
        run_limited(NAME, libc::RLIMIT_AS, 256 * MIB);
    }
}

#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room")]
fn a_quarter_of_a_gigabyte_of_data_is_enough() {
    const NAME: &str = "limits::a_quarter_of_a_gigabyte_of_data_is_enough";
    if is_child() {
        a_quarter_of_a_gigabyte();
    } else {
        run_limited(NAME, libc::RLIMIT_DATA, 256 * MIB);
    }
}

/// At a hard limit, every refusal leaves the heap usable, and 80 % of it becomes available again, in blocks of any
/// size.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room")]
fn at_a_hard_limit_all_goes_on_and_comes_back() {
    const NAME: &str = "limits::at_a_hard_limit_all_goes_on_and_comes_back";
    if !is_child() {
        return assert!(ends_well(command(NAME).env("PAGEHEAP_LIMIT", "64M")));
    }
    for size in [64, 200, 3000, 20_000, 50_000, 200_000, MIB, 64] {
        let bytes = room(size, usize::MAX) * size;
        println!("{size}: {} MiB of 64", bytes / MIB);
        assert!(bytes >= 48 * MIB, "{size}: {bytes}");
        let whole = room(MIB, 1000);
        assert!(whole * 100 >= 64 * 80, "{whole} MiB after blocks of {size}");
    }
    let refusals = HEAP.stats().pages.refusals;
    assert_eq!(refusals, 16, "one each time: {}", HEAP.stats());
}

/// A limit that cannot be parsed is ignored, and a message says so; a value that can be parsed, or is empty, causes no
/// message.
#[test]
fn what_the_environment_says_in_vain_is_named() {
    const NAME: &str = "limits::what_the_environment_says_in_vain_is_named";
    if is_child() {
        // Says so as well, though it would have no thread anyway.
        static OTHER: GlobalHeap = GlobalHeap::new().background(false);
        assert!(OTHER.set_limit(MIB));
        return drop(blocks(MIB, 5000));
    }
    let said = |variables: &[(&str, &str)]| {
        let output = command(NAME).envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let ours = text.lines().filter(|line| line.starts_with("pageheap"));
        ours.map(str::to_owned).collect::<Vec<_>>()
    };
    let good = [
        ("PAGEHEAP_LIMIT", "512M"),
        ("PAGEHEAP_SOFT_LIMIT", ""),
        ("PAGEHEAP_BACKGROUND", "1"),
        ("PAGEHEAP_HUGE_PAGES", "avoid"),
    ];
    assert_eq!(said(&good), [""; 0]);
    let bad = [
        ("PAGEHEAP_LIMIT", "512MB"),
        ("PAGEHEAP_RESERVE", "4K"),
        ("PAGEHEAP_BACKGROUND", "off\x1b[2J"),
        ("PAGEHEAP_RELEASE", "never"),
    ];
    let wanted = [
        "pageheap: ignored: PAGEHEAP_RESERVE=4K, bytes wanted: 1M or more",
        "pageheap: ignored: PAGEHEAP_LIMIT=512MB, bytes wanted: 512M and the like",
        "pageheap: ignored: PAGEHEAP_RELEASE=never, wanted: lazily, at-once",
        "pageheap: ignored: PAGEHEAP_BACKGROUND=off?[2J, wanted: 0, 1",
    ];
    assert_eq!(said(&bad), [wanted; 2].concat());
}

/// One test of this program, under a soft limit of 64 MiB; without huge pages, which bring more memory than the heap
/// asks for, if the kernel makes them unasked.
fn softly_limited(name: &str) -> Command {
    let mut command = command(name);
    command
        .env("PAGEHEAP_SOFT_LIMIT", "64M")
        .env("PAGEHEAP_HUGE_PAGES", "avoid");
    command
}

/// Under a soft limit the resident size stays within 5 % of it, as long as the live memory does.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room")]
fn under_a_soft_limit_what_is_resident_stays() {
    const NAME: &str = "limits::under_a_soft_limit_what_is_resident_stays";
    if !is_child() {
        return assert!(ends_well(&mut softly_limited(NAME)));
    }
    static MOST: AtomicUsize = AtomicUsize::new(0);
    let before = resident();
    let look = || MOST.fetch_max(resident().saturating_sub(before), Ordering::Relaxed);
    // 40 MiB live at a time, in blocks of one length after another: the next blocks do not fit where the last were
    // freed.
    for round in 0..40 {
        let size = [1000, 9000, 60_000, 300_000, 1_500_000][round % 5] + round * 64;
        let kept = blocks(40 * MIB, size);
        look();
        drop(kept);
        // Small holes between blocks that stay and pin all their spans, and then something large.
        let torn: Vec<_> = blocks(40 * MIB, 3000 + round * 8).into_iter().enumerate().collect();
        look();
        let half: Vec<_> = torn.into_iter().filter(|(index, _)| index % 3 == 0).collect();
        let large = vec![1_u8; 12 * MIB];
        look();
        drop((half, large));
    }
    let most = MOST.load(Ordering::Relaxed);
    println!("{:.1} MiB at most, of 64", most as f64 / MIB as f64);
    assert!(most <= 64 * MIB / 100 * 105, "{most} bytes\n{}", HEAP.stats());
}

/// The same with several threads, whose sizes change gradually: what each keeps in its magazines, and what that pins.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room")]
fn under_a_soft_limit_what_several_threads_have_stays() {
    const NAME: &str = "limits::under_a_soft_limit_what_several_threads_have_stays";
    const THREADS: usize = 4;
    if !is_child() {
        return assert!(ends_well(&mut softly_limited(NAME)));
    }
    let before = resident();
    let work = |number: usize| {
        let mut random = number as u64 * 7919 + 1;
        let mut below = move |end: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 11) as usize % end
        };
        let (mut kept, mut bytes, mut most): (Vec<Vec<u8>>, _, _) = (Vec::new(), 0, 0);
        for _ in 0..30 {
            let about = [40, 700, 3000, 9000, 30_000, 60_000, 200_000, 1_000_000][below(8)];
            let mut written = 0;
            while written < 32 * MIB {
                while bytes > 40 * MIB / THREADS {
                    bytes -= kept.swap_remove(below(kept.len())).capacity();
                }
                kept.push(vec![1; about + about * (written % 7) / 7]);
                let last = kept.last().unwrap().capacity();
                (bytes, written) = (bytes + last, written + last.max(1000));
            }
            most = most.max(resident().saturating_sub(before));
            // Freed in order: what stays should not pin one page per block.
            while bytes > 10 * MIB / THREADS {
                bytes -= kept.pop().unwrap().capacity();
            }
        }
        most
    };
    let most = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|number| scope.spawn(move || work(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).max().unwrap()
    });
    println!("{:.1} MiB at most, of 64", most as f64 / MIB as f64);
    assert!(most <= 64 * MIB / 100 * 105, "{most} bytes\n{}", HEAP.stats());
}

/// One thread whose sizes change, and which frees at random, so that few spans become free. The blocks are larger than
/// 1 KiB, so that the memory between them can be released.
#[test]
#[cfg_attr(feature = "checks", ignore = "seals take room")]
fn under_a_soft_limit_what_lies_between_blocks_goes() {
    const NAME: &str = "limits::under_a_soft_limit_what_lies_between_blocks_goes";
    if !is_child() {
        return assert!(ends_well(&mut softly_limited(NAME)));
    }
    let before = resident();
    let mut random = 7919_u64;
    let mut below = move |end: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 11) as usize % end
    };
    let (mut kept, mut bytes, mut most): (Vec<Vec<u8>>, _, _) = (Vec::new(), 0, 0);
    for _ in 0..60 {
        let about = [1500, 3000, 6000, 9000, 14_000, 20_000, 30_000][below(7)];
        let mut written = 0;
        while written < 16 * MIB {
            while bytes > 40 * MIB {
                bytes -= kept.swap_remove(below(kept.len())).capacity();
            }
            kept.push(vec![1; about + about * below(7) / 7]);
            let last = kept.last().unwrap().capacity();
            (bytes, written) = (bytes + last, written + last);
        }
        most = most.max(resident().saturating_sub(before));
    }
    println!("{:.1} MiB at most, of 64", most as f64 / MIB as f64);
    assert!(most <= 64 * MIB / 100 * 105, "{most} bytes\n{}", HEAP.stats());
}
