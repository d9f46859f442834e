//! The ends of threads: destructors that allocate, in every round; keys and stacks in short supply.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// As many rounds of destructors as POSIX guarantees.
const ROUNDS: usize = 4;

/// Keys that each thread sets: some created before the heap's own key, some after it.
static KEYS: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];
static RUN: AtomicUsize = AtomicUsize::new(0);

/// Allocates in every round, frees what the previous round allocated, and keeps the last.
unsafe extern "C" fn again(value: *mut c_void) {
    // SAFETY: the value is a box made by `start` or by the previous round.
    let (key, round, old) = *unsafe { Box::from_raw(value.cast::<(usize, usize, Vec<String>)>()) };
    assert!(old.iter().enumerate().all(|(number, text)| text.len() == number));
    RUN.fetch_add(1, Ordering::Relaxed);
    if round < ROUNDS {
        set(key, round + 1);
    }
}

fn set(key: usize, round: usize) {
    let texts = (0..60).map(|number| "z".repeat(number)).collect::<Vec<String>>();
    let value = Box::into_raw(Box::new((key, round, texts)));
    // SAFETY: a key created in the test, and the value its destructor expects.
    let answer = unsafe { libc::pthread_setspecific(KEYS[key].load(Ordering::Relaxed) as _, value.cast()) };
    assert_eq!(answer, 0);
}

struct Late(Vec<String>);

impl Drop for Late {
    fn drop(&mut self) {
        let more: Vec<String> = self.0.iter().map(|text| text.repeat(2)).collect();
        assert!(more.len() == self.0.len());
    }
}

thread_local! {
    static LATE: RefCell<Late> = const { RefCell::new(Late(Vec::new())) };
}

#[test]
fn destructors_may_allocate_in_every_round() {
    if !is_child() {
        return assert!(run("destructors::destructors_may_allocate_in_every_round"));
    }
    for key in &KEYS {
        let mut made = 0;
        // SAFETY: a place for a key, and a destructor that is never unloaded.
        assert_eq!(unsafe { libc::pthread_key_create(&mut made, Some(again)) }, 0);
        key.store(made as usize, Ordering::Relaxed);
    }
    let batch = |count: usize| {
        for _ in 0..count {
            thread::spawn(|| {
                LATE.with_borrow_mut(|late| late.0.extend((0..20).map(|number| number.to_string())));
                (0..KEYS.len()).for_each(|key| set(key, 1));
            })
            .join()
            .unwrap();
        }
    };
    batch(100);
    let before = HEAP.stats();
    batch(2_900);
    let after = HEAP.stats();
    assert_eq!(RUN.load(Ordering::Relaxed), 3_000 * KEYS.len() * ROUNDS);
    assert!(after.pages.grown.0 <= before.pages.grown.0 + 128, "{before}\n{after}");
    assert_eq!(before.thread_structures, after.thread_structures);
}

/// Rounds left for the thread's only value. It is a number, not a block: nothing is allocated before the last round.
static LATE_KEY: AtomicUsize = AtomicUsize::new(0);
static LATE_RUN: AtomicUsize = AtomicUsize::new(0);

/// Runs in every round, and in the last uses the heap for the first time in the thread's life.
unsafe extern "C" fn only_in_the_last(rounds: *mut c_void) {
    let left = rounds.addr() - 1;
    if left > 0 {
        let key = LATE_KEY.load(Ordering::Relaxed) as libc::pthread_key_t;
        // SAFETY: a key created in the test; the value is a number.
        unsafe { libc::pthread_setspecific(key, std::ptr::without_provenance(left)) };
        return;
    }
    let texts: Vec<String> = (0..200).map(|number| "l".repeat(number * 7)).collect();
    assert!(texts.iter().enumerate().all(|(number, text)| text.len() == number * 7));
    LATE_RUN.fetch_add(1, Ordering::Relaxed);
}

/// For such a thread the heap's own destructor is no longer called.
#[test]
fn a_first_use_in_the_last_round_of_destructors_leaves_nothing_behind() {
    if !is_child() {
        return assert!(run(
            "destructors::a_first_use_in_the_last_round_of_destructors_leaves_nothing_behind"
        ));
    }
    extern "C" fn start(_: *mut c_void) -> *mut c_void {
        let key = LATE_KEY.load(Ordering::Relaxed) as libc::pthread_key_t;
        // SAFETY: a key created below; the value is a number.
        unsafe { libc::pthread_setspecific(key, std::ptr::without_provenance(ROUNDS)) };
        std::ptr::null_mut()
    }
    let mut made = 0;
    // SAFETY: a place for a key, and a destructor that is never unloaded.
    let answer = unsafe { libc::pthread_key_create(&mut made, Some(only_in_the_last)) };
    assert_eq!(answer, 0);
    LATE_KEY.store(made as usize, Ordering::Relaxed);
    let batch = |count: usize| {
        for _ in 0..count {
            // SAFETY: the thread is joined.
            unsafe {
                let mut id = std::mem::zeroed();
                let answer = libc::pthread_create(&mut id, std::ptr::null(), start, std::ptr::null_mut());
                assert_eq!(answer, 0);
                assert_eq!(libc::pthread_join(id, std::ptr::null_mut()), 0);
            }
        }
    };
    batch(100);
    let before = HEAP.stats();
    batch(2_900);
    let after = HEAP.stats();
    assert_eq!(LATE_RUN.load(Ordering::Relaxed), 3_000);
    assert!(
        after.thread_structures <= before.thread_structures + 8,
        "{before}\n{after}"
    );
    assert!(after.pages.grown.0 <= before.pages.grown.0 + 128, "{before}\n{after}");
}

#[test]
fn a_thread_may_begin_with_all_kinds_of_calls_and_forty_keys_taken() {
    use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, realloc};
    for _ in 0..40 {
        let mut made = 0;
        // SAFETY: a place for a key.
        assert_eq!(unsafe { libc::pthread_key_create(&mut made, None) }, 0);
    }
    let layout = Layout::new::<[u64; 13]>();
    // SAFETY: each block is freed with the layout it was allocated with; each address stands for a block of its own.
    unsafe {
        let block = alloc(layout).expose_provenance();
        let raw = |work: fn(usize) -> usize, value: usize| {
            // A raw thread: one of std's would allocate before the closure runs.
            extern "C" fn start(pair: *mut c_void) -> *mut c_void {
                // SAFETY: `raw` waits for this thread, and keeps its pair alive.
                let pair = unsafe { &mut *pair.cast::<(fn(usize) -> usize, usize)>() };
                pair.1 = pair.0(pair.1);
                std::ptr::null_mut()
            }
            let (mut pair, mut id) = ((work, value), std::mem::zeroed());
            let answer = libc::pthread_create(&mut id, std::ptr::null(), start, (&raw mut pair).cast());
            assert_eq!(answer, 0);
            assert_eq!(libc::pthread_join(id, std::ptr::null_mut()), 0);
            pair.1
        };
        const LAYOUT: Layout = Layout::new::<[u64; 13]>();
        let block = raw(
            |block| realloc(std::ptr::with_exposed_provenance_mut(block), LAYOUT, 100_000).expose_provenance(),
            block,
        );
        assert_ne!(block, 0);
        raw(
            |block| {
                let large = Layout::from_size_align(100_000, LAYOUT.align()).unwrap();
                dealloc(std::ptr::with_exposed_provenance_mut(block), large);
                0
            },
            block,
        );
        let block = raw(|_| alloc_zeroed(LAYOUT).expose_provenance(), 0);
        raw(
            |block| {
                dealloc(std::ptr::with_exposed_provenance_mut(block), LAYOUT);
                0
            },
            block,
        );
    }
}

/// The deepest path, from a thread's first call, on the smallest possible stack.
#[test]
fn a_stack_of_sixteen_kibibytes_suffices() {
    extern "C" fn start(_: *mut c_void) -> *mut c_void {
        let mut blocks = [const { Vec::new() }; 16];
        for (shift, block) in blocks.iter_mut().enumerate() {
            *block = Vec::<u64>::with_capacity(1 << shift);
        }
        std::ptr::null_mut()
    }
    // SAFETY: attributes that are initialised, used and destroyed; a thread that is joined.
    unsafe {
        let (mut attributes, mut id) = (std::mem::zeroed(), std::mem::zeroed());
        assert_eq!(libc::pthread_attr_init(&mut attributes), 0);
        // The guarantee is not about unoptimised code.
        let bytes: usize = if cfg!(debug_assertions) { 64 << 10 } else { 16 << 10 };
        // No C library accepts less than its minimum: 16 KiB on x86, 128 KiB on ARM.
        let bytes = bytes.max(libc::PTHREAD_STACK_MIN);
        assert_eq!(libc::pthread_attr_setstacksize(&mut attributes, bytes), 0);
        assert_eq!(
            libc::pthread_create(&mut id, &attributes, start, std::ptr::null_mut()),
            0
        );
        assert_eq!(libc::pthread_join(id, std::ptr::null_mut()), 0);
        libc::pthread_attr_destroy(&mut attributes);
    }
}
