//! A thread that held a lock for long let others go first by sleeping among them, and so took a wake meant for one of
//! them, which slept on beside a free lock.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pageheap::internals::Lock;

const WAITERS: u64 = 6;

fn spin_for(micros: u64) {
    let began = Instant::now();
    while began.elapsed() < Duration::from_micros(micros) {
        std::hint::spin_loop();
    }
}

/// Some threads take the lock a few times each, while another holds it long and lets them go first. Returns whether all
/// end by themselves within a time so long that no wake can still be under way.
fn all_come_to_an_end(lock: &Lock) -> bool {
    let done = AtomicUsize::new(0);
    let ended = || done.load(Ordering::Relaxed) == WAITERS as usize;
    thread::scope(|scope| {
        for waiter in 0..WAITERS {
            let done = &done;
            scope.spawn(move || {
                thread::sleep(Duration::from_micros(30 * waiter));
                for _ in 0..3 {
                    let guard = lock.lock();
                    spin_for(20);
                    drop(guard);
                    thread::sleep(Duration::from_micros(50));
                }
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        let mut guard = lock.lock();
        for _ in 0..6 {
            spin_for(300);
            guard = guard.after_others();
        }
        drop(guard);
        let began = Instant::now();
        while !ended() && began.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_micros(200));
        }
        let all = ended();
        // A thread that was left asleep is woken by the next one that waits for the lock and gets it.
        while !ended() {
            thread::scope(|scope| {
                let guard = lock.lock();
                scope.spawn(|| drop(lock.lock()));
                thread::sleep(Duration::from_millis(5));
                drop(guard);
            });
        }
        all
    })
}

#[test]
fn nobody_sleeps_beside_a_free_lock() {
    let lock = Lock::new();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        assert!(all_come_to_an_end(&lock), "a waiter was not woken");
    }
}

/// A thread needs the lock again and again, on processors that are busy, so that a sleeper is always woken too late: it
/// must get its turn all the same. (A fork waited for two seconds beside a thread that was refused in a loop.)
#[test]
#[cfg(any(target_os = "linux", target_os = "android"))]
fn who_waits_for_long_gets_the_lock_though_another_takes_it_in_a_loop() {
    // Some 80 are usual: as long as a thread may run at a time. It was several thousand. What the other does while this
    // thread is off its processor, but no longer waits, counts too.
    const MOST: usize = 500;
    assert!(super::common::one_of_three(|| {
        let most = most_turns_of_another(MOST);
        println!("the other had it {most} times meanwhile");
        most <= MOST
    }));
}

/// How often the other thread had the lock while this one waited for it, at most. Ends early with more than `enough`.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn most_turns_of_another(enough: usize) -> usize {
    use std::sync::atomic::AtomicBool;

    const TURNS: usize = 40;
    let (lock, over, taken) = (Lock::new(), AtomicBool::new(false), AtomicUsize::new(0));
    let is_over = || over.load(Ordering::Relaxed);
    thread::scope(|scope| {
        for _ in 0..4 * thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while !is_over() {
                    std::hint::spin_loop();
                }
            });
        }
        scope.spawn(|| {
            while !is_over() {
                let _guard = lock.lock();
                spin_for(50);
                taken.fetch_add(1, Ordering::Relaxed);
            }
        });
        let taken = || taken.load(Ordering::Relaxed);
        let mut most = 0;
        for _ in 0..TURNS {
            // The other is at it.
            let before = taken();
            while taken() < before + 10 {
                thread::sleep(Duration::from_millis(1));
            }
            let before = taken();
            drop(lock.lock());
            most = most.max(taken() - before);
            if most > enough {
                break;
            }
        }
        over.store(true, Ordering::Relaxed);
        most
    })
}
