//! The ends of threads: destructors that allocate, in every round there is; keys and stacks in short supply.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// As many rounds of destructors as POSIX promises.
const ROUNDS: usize = 4;

/// Keys set by each thread: some made before the heap's own key, some after.
static KEYS: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];
static RUN: AtomicUsize = AtomicUsize::new(0);

/// Allocates in every round, frees what the round before allocated, and keeps the last.
unsafe extern "C" fn again(value: *mut c_void) {
    // SAFETY: the value is a box that `start` or the round before made.
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
    // SAFETY: a key made in the test, and the value its destructor takes.
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
        // SAFETY: a place for a key, and a destructor that stays.
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

/// Rounds still to come for the thread's one value, which is not a block: nothing is allocated before the last.
static LATE_KEY: AtomicUsize = AtomicUsize::new(0);
static LATE_RUN: AtomicUsize = AtomicUsize::new(0);

/// Comes back in every round, and in the last uses the heap for the first time in the thread's life.
unsafe extern "C" fn only_in_the_last(rounds: *mut c_void) {
    let left = rounds.addr() - 1;
    if left > 0 {
        let key = LATE_KEY.load(Ordering::Relaxed) as libc::pthread_key_t;
        // SAFETY: a key made in the test; the value is a number.
        unsafe { libc::pthread_setspecific(key, std::ptr::without_provenance(left)) };
        return;
    }
    let texts: Vec<String> = (0..200).map(|number| "l".repeat(number * 7)).collect();
    assert!(texts.iter().enumerate().all(|(number, text)| text.len() == number * 7));
    LATE_RUN.fetch_add(1, Ordering::Relaxed);
}

/// The heap's own destructor is not called for such a thread any more.
#[test]
fn a_first_use_in_the_last_round_of_destructors_leaves_nothing_behind() {
    if !is_child() {
        return assert!(run(
            "destructors::a_first_use_in_the_last_round_of_destructors_leaves_nothing_behind"
        ));
    }
    extern "C" fn start(_: *mut c_void) -> *mut c_void {
        let key = LATE_KEY.load(Ordering::Relaxed) as libc::pthread_key_t;
        // SAFETY: a key made below; the value is a number.
        unsafe { libc::pthread_setspecific(key, std::ptr::without_provenance(ROUNDS)) };
        std::ptr::null_mut()
    }
    let mut made = 0;
    // SAFETY: a place for a key, and a destructor that stays.
    let answer = unsafe { libc::pthread_key_create(&mut made, Some(only_in_the_last)) };
    assert_eq!(answer, 0);
    LATE_KEY.store(made as usize, Ordering::Relaxed);
    let batch = |count: usize| {
        for _ in 0..count {
            // SAFETY: a thread that is waited for.
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
    // SAFETY: what is freed was allocated with the layout; each address stands for a block of its own.
    unsafe {
        let block = alloc(layout).expose_provenance();
        let raw = |work: fn(usize) -> usize, value: usize| {
            // A raw thread: std's would allocate before the closure.
            extern "C" fn start(pair: *mut c_void) -> *mut c_void {
                // SAFETY: `raw` waits for us, and its pair.
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

/// The deepest path, from a thread's first call, on the smallest stack there is.
#[test]
fn a_stack_of_sixteen_kibibytes_suffices() {
    extern "C" fn start(_: *mut c_void) -> *mut c_void {
        let mut blocks = [const { Vec::new() }; 16];
        for (shift, block) in blocks.iter_mut().enumerate() {
            *block = Vec::<u64>::with_capacity(1 << shift);
        }
        std::ptr::null_mut()
    }
    // SAFETY: attributes that are initialised, used and destroyed; a thread that is waited for.
    unsafe {
        let (mut attributes, mut id) = (std::mem::zeroed(), std::mem::zeroed());
        assert_eq!(libc::pthread_attr_init(&mut attributes), 0);
        // Unoptimised code is not what the promise is about.
        let bytes: usize = if cfg!(debug_assertions) { 64 << 10 } else { 16 << 10 };
        // No C library takes less than its least: 16 KiB on x86, 128 KiB on ARM.
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
