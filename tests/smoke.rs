//! Smoke.
#![allow(clippy::all, clippy::undocumented_unsafe_blocks, missing_docs, unused)]
use pageheap::source::*;
use pageheap::*;
use std::ptr::NonNull;
struct Bare;
unsafe impl Source for Bare {
    fn granule(&self) -> usize {
        4096
    }
    fn budget(&self) -> usize {
        usize::MAX
    }
    fn reserve(&self, p: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        let base = match p {
            Purpose::Pages => NonNull::without_provenance(std::num::NonZero::new(1usize << 44).unwrap()),
            Purpose::Metadata => NonNull::new(unsafe {
                std::alloc::alloc_zeroed(std::alloc::Layout::from_size_align(bytes, align).unwrap())
            })?,
        };
        Some(Reservation { base, bytes })
    }
    unsafe fn prepare(&self, _: Purpose, _: NonNull<u8>, _: usize) -> Result<Contents, Refused> {
        Ok(Contents::Zero)
    }
    unsafe fn commit(&self, _: NonNull<u8>, _: usize) -> Result<(), Refused> {
        Ok(())
    }
    unsafe fn release(&self, _: NonNull<u8>, _: usize) -> Result<Contents, Refused> {
        Ok(Contents::Zero)
    }
    unsafe fn unreserve(&self, _: Purpose, _: Reservation) {}
}
fn rng(s: &mut u64) -> u64 {
    *s ^= *s << 13;
    *s ^= *s >> 7;
    *s ^= *s << 17;
    *s
}
#[test]
fn smoke() {
    let heap: PageHeap<Bare> = PageHeap::new(Bare, Config::new(1 << 26)).unwrap();
    let mut live: Vec<PageRun> = vec![];
    let mut used = vec![false; heap.capacity().0];
    let mut s = 88172645463325252u64;
    for step in 0..200000 {
        if rng(&mut s) % 2 == 0 || live.is_empty() {
            let n = match rng(&mut s) % 10 {
                0..=5 => 1,
                6..=8 => 1 + rng(&mut s) % 20,
                _ => 1 + rng(&mut s) % 700,
            } as usize;
            // naive
            let mut run = 0;
            let mut want = None;
            for (p, u) in used.iter().enumerate() {
                run = if *u { 0 } else { run + 1 };
                if run == n {
                    want = Some(p + 1 - n);
                    break;
                }
            }
            let got = heap.allocate(PageCount(n));
            assert_eq!(got.map(|r| r.start().0), want, "step {step} n {n}");
            if let Some(r) = got {
                for p in r.start().0..r.end().0 {
                    used[p] = true
                }
                live.push(r)
            }
        } else {
            let i = rng(&mut s) as usize % live.len();
            let r = live.swap_remove(i);
            for p in r.start().0..r.end().0 {
                used[p] = false
            }
            unsafe { heap.free(r) }
        }
        if step % 100 == 0 {
            heap.check().unwrap();
        }
    }
    println!("{}", heap.stats());
    let t = std::time::Instant::now();
    let cache = heap.cache().unwrap();
    for r in live.drain(..) {
        unsafe { cache.free(r) }
    }
    cache.flush();
    heap.check().unwrap();
    drop(cache);
    println!("{:?}", t.elapsed());
}

#[test]
fn quick_bench() {
    let heap: PageHeap<Bare> = PageHeap::new(Bare, Config::new(1 << 33)).unwrap();
    let all = heap.allocate(heap.capacity()).unwrap();
    unsafe { heap.free(all) };
    let n = heap.capacity().0;
    let mut runs: Vec<PageRun> = Vec::with_capacity(n);
    let ns = |t: std::time::Instant, k: usize| t.elapsed().as_nanos() as f64 / k as f64;
    for round in 0..3 {
        runs.clear();
        let t = std::time::Instant::now();
        while let Some(r) = heap.allocate(PageCount(1)) {
            runs.push(r)
        }
        let a = ns(t, n);
        let t = std::time::Instant::now();
        for _ in 0..1000 {
            assert!(heap.allocate(PageCount(1)).is_none());
        }
        let miss = ns(t, 1000);
        let mut s = 88172645463325252u64;
        for i in (1..runs.len()).rev() {
            let j = rng(&mut s) as usize % (i + 1);
            runs.swap(i, j);
        }
        let t = std::time::Instant::now();
        for r in &runs[..n / 4] {
            unsafe { heap.free(*r) }
        }
        let f1 = ns(t, n / 4);
        let t = std::time::Instant::now();
        for r in &runs[n / 4..] {
            unsafe { heap.free(*r) }
        }
        let f = ns(t, n - n / 4);
        // fragmented 75 %: random pages in use
        let t = std::time::Instant::now();
        while let Some(r) = heap.free_set().claim_word() {
            std::hint::black_box(r);
        }
        let refill = ns(t, n / 64);
        let mut words: Vec<pageheap::internals::Word> = (0..n / 64)
            .map(|index| pageheap::internals::Word {
                index,
                free: u64::MAX,
                scavenged: 0,
            })
            .collect();
        let t = std::time::Instant::now();
        for &w in &words {
            heap.free_set().release_word(w).unwrap();
        }
        let flush = ns(t, n / 64);
        while heap.free_set().claim_word().is_some() {}
        let mut s = 88172645463325252u64;
        for i in (1..words.len()).rev() {
            let j = rng(&mut s) as usize % (i + 1);
            words.swap(i, j);
        }
        let t = std::time::Instant::now();
        for &w in &words {
            heap.free_set().release_word(w).unwrap();
        }
        let flush_random = ns(t, n / 64);
        let cache = heap.cache().unwrap();
        let t = std::time::Instant::now();
        for i in 0..n {
            std::hint::black_box(cache.allocate(PageCount(1)).unwrap());
        }
        let a1 = ns(t, n);
        let t = std::time::Instant::now();
        for i in 0..n {
            unsafe { cache.free(PageRun::new(PageIndex(i), PageCount(1)).unwrap()) }
        }
        let f2 = ns(t, n);
        cache.flush();
        let t = std::time::Instant::now();
        for _ in 0..1000000 {
            let r = cache.allocate(PageCount(1)).unwrap();
            unsafe { cache.free(r) }
        }
        let p = ns(t, 1000000);
        cache.flush();
        println!(
            "{round}: alloc1 {a:.1} miss {miss:.0} free random 1st quarter {f1:.1} rest {f:.1} | refill {refill:.1} flush seq {flush:.1} random {flush_random:.1} | cached alloc {a1:.2} free {f2:.2} pair {p:.2}"
        );
        // fragmented
        let mut used: Vec<PageRun> = vec![];
        while let Some(r) = heap.allocate(PageCount(1)) {
            used.push(r)
        }
        for i in (1..used.len()).rev() {
            let j = rng(&mut s) as usize % (i + 1);
            used.swap(i, j);
        }
        // free a quarter in clusters of 1..64 pages
        let mut free = vec![false; n];
        let mut left = n / 4;
        while left > 0 {
            let len = (1 + rng(&mut s) as usize % 64).min(left);
            let at = rng(&mut s) as usize % (n - 64);
            for p in at..at + len {
                if !free[p] {
                    free[p] = true;
                    left -= 1;
                    if left == 0 {
                        break;
                    }
                }
            }
        }
        for p in 0..n {
            if free[p] {
                unsafe { heap.free(PageRun::new(PageIndex(p), PageCount(1)).unwrap()) }
            }
        }
        print!("   fragmented:");
        for k in [2usize, 3, 4, 8, 12, 16, 31, 32, 64] {
            let mut got = Vec::with_capacity(n);
            let t = std::time::Instant::now();
            while let Some(r) = heap.allocate(PageCount(k)) {
                got.push(r)
            }
            let a = ns(t, got.len());
            let t = std::time::Instant::now();
            for r in got.iter().rev() {
                unsafe { heap.free(*r) }
            }
            let f = ns(t, got.len());
            print!(" {k}: {a:.0}/{f:.0} ({})", got.len());
        }
        println!();
        heap.check().unwrap();
        for p in 0..n {
            if !free[p] {
                unsafe { heap.free(PageRun::new(PageIndex(p), PageCount(1)).unwrap()) }
            }
        }
    }
    heap.check().unwrap();
}
