//! The workloads, on the allocator that this program was built with.
//!
//! ```text
//! workload                           a number of the sources, and the list
//! workload NAME [OPERATIONS]         one of them: an eighth of the operations to warm up, then what is measured
//! workload idle SCENARIO SECONDS     fill, free, and be silent
//! workload latency SCENARIO [CALLS]  how long single calls take
//! ```
//!
//! Operations are rounded up to what a workload does at once. The result, with the operations that were done, is
//! printed as one line of `name=value`. While it is measured, no clock is read and nothing is written.

mod allocator;
mod block;
mod crew;
mod crowds;
mod idle;
mod latency;
mod meter;
mod programs;
mod random;
mod single;
mod threaded;

use meter::Reading;
use std::process::ExitCode;
use std::time::Duration;

/// A prepared workload: performs a number of operations at each call, and keeps its state in between.
pub type Work = Box<dyn FnMut(u64)>;

struct Workload {
    group: &'static str,
    name: &'static str,
    /// About as many as take a fifth of a second.
    ops: u64,
    /// Operations come by so many at once: all threads' batches.
    unit: u64,
    prepare: fn() -> Work,
}

macro_rules! workloads {
    ($($group:literal { $($name:literal $ops:literal $(in $unit:literal)? $make:expr;)* })*) => {
        const WORKLOADS: &[Workload] = &[$($(
            Workload { group: $group, name: $name, ops: $ops, unit: 1 $(* $unit)?, prepare: || $make },
        )*)*];
    };
}

workloads! {
    "pairs" {
        "pair-16" 30_000_000 single::pair(16);
        "pair-64" 30_000_000 single::pair(64);
        "pair-256" 30_000_000 single::pair(256);
        "pair-1k" 20_000_000 single::pair(1 << 10);
        "pair-4k" 20_000_000 single::pair(4 << 10);
        "pair-16k" 15_000_000 single::pair(16 << 10);
        "pair-64k" 10_000_000 single::pair(64 << 10);
        "pair-256k" 2_000_000 single::pair(256 << 10);
        "pair-1m" 2_000_000 single::pair(1 << 20);
        "sweep" 1_000_000 single::sweep();
    }
    "random" {
        "random-4096" 15_000_000 single::random_mixed(4096, 16, 1040);
        "random-8192" 12_000_000 single::random_mixed(8192, 16, 1040);
        "random-65536" 5_000_000 single::random_mixed(65536, 16, 1040);
        "mid-1t" 8_000_000 single::random_mixed(2048, 8 << 10, 32 << 10);
        "mid-2t" 6_000_000 threaded::mixed(2, 2048, 8 << 10, 32 << 10);
        "mid-8t" 6_000_000 threaded::mixed(8, 2048, 8 << 10, 32 << 10);
    }
    "bulk" {
        "bulk-64" 20_000_000 in 64 Box::new(single::bulk(64, 64));
        "bulk-64-many" 10_000_000 in 100_000 Box::new(single::bulk(64, 100_000));
        "bulk-1k" 4_000_000 in 1000 Box::new(single::bulk(1 << 10, 1000));
        "bulk-4k" 1_000_000 in 4096 Box::new(single::bulk(4 << 10, 4096));
        "bulk-16k" 1_000_000 in 256 Box::new(single::bulk(16 << 10, 256));
        "bulk-64k" 500_000 in 256 Box::new(single::bulk(64 << 10, 256));
        "sh6-1t" 10_000_000 single::sh6();
    }
    "growth" {
        "realloc-steps" 1_500_000 single::realloc_steps();
        "vec-4k" 400_000 single::vec_growth(4 << 10);
        "vec-64m" 4 single::vec_growth(64 << 20);
        "zeroed-1m" 20_000 single::zeroed(1 << 20, 1 << 16);
        "zeroed-1m-all" 8_000 single::zeroed(1 << 20, 1 << 12);
        "zeroed-64m" 100 single::zeroed(64 << 20, 1 << 20);
        "fragmentation" 3_000_000 single::fragmentation();
    }
    "threads" {
        "pair-64-2t" 40_000_000 threaded::pairs(2, 64);
        "random-2t" 15_000_000 threaded::mixed(2, 4096, 16, 1040);
        "larson-1t" 8_000_000 threaded::larson(1);
        "larson-2t" 8_000_000 threaded::larson(2);
        "larson-8t" 8_000_000 threaded::larson(8);
        "mstress-2t" 1_500_000 in 11_250 threaded::mstress(2);
        "mstress-8t" 1_500_000 in 135_000 threaded::mstress(8);
        "cache-scratch-1t" 300_000 threaded::cache_scratch(1);
        "cache-scratch-2t" 300_000 threaded::cache_scratch(2);
        "threads-10000" 10_000 threaded::short_threads(4);
        "threads-64" 8_000_000 threaded::oversubscribed(64);
    }
    "handoff" {
        "xmalloc-1+1" 3_000_000 in 4096 threaded::producer_consumer(1, 4096, None);
        "xmalloc-4+4" 4_000_000 in 16_384 threaded::producer_consumer(4, 4096, None);
        "handoff-64" 6_000_000 in 256 threaded::producer_consumer(1, 256, Some(64));
        "handoff-4k" 500_000 in 256 threaded::producer_consumer(1, 256, Some(4096));
        "sh8-2t" 8_000_000 in 8192 threaded::sh8(2);
        "sh8-8t" 8_000_000 in 32_768 threaded::sh8(8);
    }
    "programs" {
        "btree" 2_500_000 programs::btree();
        "hash-map" 1_500_000 programs::hash_map();
        "binary-trees" 6_000_000 in 195_243 programs::binary_trees();
        "json" 15 programs::json();
        "syn" 20 programs::syn();
    }
    // What the groups above leave out: alignment, contents like those of a free block, shrinking, more than 1 MiB;
    // many small blocks freed in random order; large buffers made in one thread and dropped in another.
    "shapes" {
        "aligned-16" 20_000_000 single::vector(0_u128, 4);
        "aligned-64" 20_000_000 single::vector(single::Line::ZERO, 3);
        "negative" 20_000_000 single::vector(-1_i64, 8);
        "shrink" 2_000_000 single::shrink(400_000, 300);
        "pair-2m" 500_000 single::pair(2 << 20);
        "pair-64m" 50_000 single::pair(64 << 20);
        "scattered-16" 4_000_000 Box::new(single::scattered(16));
        "scattered-48" 4_000_000 Box::new(single::scattered(48));
        "scattered-96" 4_000_000 Box::new(single::scattered(96));
        "scattered-64-2t" 8_000_000 threaded::scattered(2, 64);
        "scattered-64-8t" 32_000_000 threaded::scattered(8, 64);
        "handoff-100k" 2_000_000 in 16 threaded::producer_consumer(1, 16, Some(100_000));
        "handoff-1m" 500_000 in 16 threaded::producer_consumer(1, 16, Some(1_000_000));
        "handoff-large" 500_000 in 16 threaded::large_buffers();
    }
    // Threads that are in each other's way, and what else no cache may be made for.
    "crowds" {
        "buffers" 4_000_000 crowds::buffers_beside(0);
        "buffers-idle-250" 4_000_000 crowds::buffers_beside(250);
        "fan-out-32" 1_000_000 crowds::fan_out(32);
        "neighbours-1k" 20_000_000 crowds::neighbours(1 << 10);
        "neighbours-4k" 20_000_000 crowds::neighbours(4 << 10);
        "pair-2m-2t" 1_000_000 threaded::pairs(2, 2 << 20);
        "aligned-16k" 2_000_000 single::room::<single::Large>();
        "bulk-40k" 500_000 in 500 Box::new(single::bulk(40 << 10, 500));
        "bulk-1k-2t" 8_000_000 in 65_536 threaded::bulk(2, 1 << 10, 32_768);
    }
    // The workloads of threads on 4 and 16 of them, for machines with as many processors.
    "scaling" {
        "pair-64-4t" 120_000_000 threaded::pairs(4, 64);
        "pair-64-16t" 400_000_000 threaded::pairs(16, 64);
        "pair-64k-16t" 120_000_000 threaded::pairs(16, 64 << 10);
        "pair-1m-16t" 40_000_000 threaded::pairs(16, 1 << 20);
        "bulk-64-16t" 200_000_000 in 160_000 threaded::bulk(16, 64, 10_000);
        "bulk-4k-16t" 20_000_000 in 65_536 threaded::bulk(16, 4 << 10, 4096);
        "random-4t" 40_000_000 threaded::mixed(4, 4096, 16, 1040);
        "random-16t" 120_000_000 threaded::mixed(16, 4096, 16, 1040);
        "mid-16t" 60_000_000 threaded::mixed(16, 2048, 8 << 10, 32 << 10);
        "larson-4t" 24_000_000 threaded::larson(4);
        "larson-16t" 80_000_000 threaded::larson(16);
        "mstress-4t" 4_000_000 in 37_500 threaded::mstress(4);
        "mstress-16t" 10_000_000 in 270_000 threaded::mstress(16);
        "cache-scratch-16t" 4_000_000 threaded::cache_scratch(16);
        "threads-16-at-once" 20_000 threaded::short_threads(16);
        "xmalloc-2+2" 6_000_000 in 8192 threaded::producer_consumer(2, 4096, None);
        "xmalloc-8+8" 12_000_000 in 32_768 threaded::producer_consumer(8, 4096, None);
        "handoff-64-8+8" 24_000_000 in 2048 threaded::producer_consumer(8, 256, Some(64));
        "sh8-4t" 24_000_000 in 16_384 threaded::sh8(4);
        "sh8-16t" 80_000_000 in 65_536 threaded::sh8(16);
    }
    "sawtooth" {
        "sawtooth-100ms" 10 single::sawtooth(Duration::from_millis(100), false);
        "sawtooth-1s" 4 single::sawtooth(Duration::from_secs(1), false);
        "sawtooth-1s-busy" 4 single::sawtooth(Duration::from_secs(1), true);
        "sawtooth-2s" 4 single::sawtooth(Duration::from_secs(2), false);
        "sawtooth-5s" 2 single::sawtooth(Duration::from_secs(5), false);
        "sawtooth-10s" 2 single::sawtooth(Duration::from_secs(10), false);
    }
}

/// A number of the workloads' sources and of the libraries they use: programs are compared only if they have the same.
fn sources() -> u64 {
    const SOURCES: [&str; 14] = [
        include_str!("../../Cargo.lock"),
        include_str!("allocator.rs"),
        include_str!("block.rs"),
        include_str!("crew.rs"),
        include_str!("crowds.rs"),
        include_str!("idle.rs"),
        include_str!("item.txt"),
        include_str!("latency.rs"),
        include_str!("main.rs"),
        include_str!("meter.rs"),
        include_str!("programs.rs"),
        include_str!("random.rs"),
        include_str!("single.rs"),
        include_str!("threaded.rs"),
    ];
    // FNV-1a.
    let bytes = SOURCES.iter().flat_map(|text| text.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |number: u64, byte| {
        (number ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Prepares, warms up, measures, drops the state, and prints the result.
fn run(workload: &Workload, ops: u64) {
    let [ops, warm_up] = [ops, (ops / 8).max(1)].map(|ops| ops.next_multiple_of(workload.unit));
    let mut work = (workload.prepare)();
    work(warm_up);
    meter::mark();
    let begin = Reading::now();
    work(ops);
    let end = Reading::now();
    meter::mark();
    drop(work);
    let (final_kb, peak_kb) = meter::resident_kb();
    let cost = begin.until(&end);
    println!(
        "allocator={} group={} workload={} warm_up={warm_up} ops={ops} wall_ns={} user_ns={} system_ns={} \
         minor_faults={} major_faults={} switches={} peak_kb={peak_kb} final_kb={final_kb}",
        allocator::NAME,
        workload.group,
        workload.name,
        cost.wall_ns,
        cost.user_ns,
        cost.system_ns,
        cost.minor_faults,
        cost.major_faults,
        cost.switches,
    );
}

fn idle(mut args: impl Iterator<Item = String>) -> ExitCode {
    let name = args.next().unwrap_or_default();
    let seconds = args.next().and_then(|seconds| seconds.parse().ok());
    let scenario = idle::SCENARIOS.iter().find(|(known, _)| *known == name);
    let (Some((_, scenario)), Some(seconds)) = (scenario, seconds) else {
        let names: Vec<&str> = idle::SCENARIOS.iter().map(|(name, _)| *name).collect();
        eprintln!("workload idle SCENARIO SECONDS, with one of {}", names.join(", "));
        return ExitCode::FAILURE;
    };
    idle::run(*scenario, Duration::from_secs_f64(seconds));
    ExitCode::SUCCESS
}

fn latency(mut args: impl Iterator<Item = String>) -> ExitCode {
    let name = args.next().unwrap_or_default();
    let scenario = latency::SCENARIOS.iter().find(|(known, _, _)| *known == name);
    let Some((_, usual, scenario)) = scenario else {
        let names: Vec<&str> = latency::SCENARIOS.iter().map(|(name, _, _)| *name).collect();
        eprintln!("workload latency SCENARIO [CALLS], with one of {}", names.join(", "));
        return ExitCode::FAILURE;
    };
    match args.next().map_or(Ok(*usual), |calls| calls.parse()) {
        Ok(calls) if calls > 0 => latency::run(*scenario, calls),
        _ => {
            eprintln!("the calls are a number above zero");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(name) = args.next() else {
        println!("sources {:016x}", sources());
        WORKLOADS
            .iter()
            .for_each(|workload| println!("{} {} {}", workload.group, workload.name, workload.ops));
        return ExitCode::SUCCESS;
    };
    match &*name {
        "idle" => return idle(args),
        "latency" => return latency(args),
        _ => {}
    }
    let Some(workload) = WORKLOADS.iter().find(|workload| workload.name == name) else {
        eprintln!("no workload is called {name}; without a name there is the list");
        return ExitCode::FAILURE;
    };
    match args.next().map_or(Ok(workload.ops), |ops| ops.parse()) {
        Ok(ops) if ops > 0 => run(workload, ops),
        _ => {
            eprintln!("the operations are a number above zero");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
