//! Stores of batches that look right and are not: copies of `object/store.rs` with one thing changed. They must fail.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU64;

use super::{explore, spawn};

/// What the copy changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// As it ships.
    Whole,
    /// A taker reads the word of the first batch while any thread may still take it, and exchanges the head for that
    /// word.
    One,
    /// A batch is put without a release.
    Relaxed,
    /// A taker puts back what it does not want by a plain store.
    Stored,
}

/// Batches 1 and 2, the word in each, and the contents of each.
struct Stack {
    how: How,
    head: AtomicU64,
    words: [UnsafeCell<u64>; 2],
    contents: [UnsafeCell<u64>; 2],
}

// SAFETY: the cells are loom's: loom reports it if a thread accesses one at a wrong time.
unsafe impl Sync for Stack {}
// SAFETY: as above.
unsafe impl Send for Stack {}

impl Stack {
    fn new(how: How) -> Arc<Self> {
        Arc::new(Self {
            how,
            head: AtomicU64::new(0),
            words: [0, 0].map(UnsafeCell::new),
            contents: [0, 0].map(UnsafeCell::new),
        })
    }

    fn read(&self, batch: u64) -> u64 {
        // SAFETY: loom checks.
        self.words[batch as usize - 1].with(|word| unsafe { *word })
    }

    fn write(&self, batch: u64, word: u64) {
        // SAFETY: as above.
        self.words[batch as usize - 1].with_mut(|place| unsafe { *place = word });
    }

    fn touch(&self, batch: u64) {
        // SAFETY: as above.
        self.contents[batch as usize - 1].with_mut(|contents| unsafe { *contents += 1 });
    }

    fn put(&self, batch: u64) {
        let order = if self.how == How::Relaxed {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            self.write(batch, head);
            match self.head.compare_exchange(head, batch, order, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    fn take(&self) -> Option<u64> {
        if self.how == How::One {
            let head = self.head.load(Ordering::Acquire);
            let next = if head == 0 { return None } else { self.read(head) };
            let answer = self
                .head
                .compare_exchange(head, next, Ordering::AcqRel, Ordering::Relaxed);
            return answer.is_ok().then_some(head);
        }
        let first = self.head.swap(0, Ordering::Acquire);
        let mut rest = if first == 0 { return None } else { self.read(first) };
        if self.how == How::Stored && rest != 0 {
            self.head.store(rest, Ordering::Release);
            return Some(first);
        }
        while rest != 0
            && self
                .head
                .compare_exchange(0, rest, Ordering::Release, Ordering::Relaxed)
                .is_err()
        {
            let mut theirs = self.head.swap(0, Ordering::Acquire);
            while theirs != 0 {
                let batch = theirs;
                theirs = self.read(batch);
                self.write(batch, rest);
                rest = batch;
            }
        }
        Some(first)
    }
}

/// One thread puts back the batches it has taken, another takes one; both exist in the end.
fn model(how: How) {
    explore(3, move || {
        let stack = Stack::new(how);
        [1, 2].into_iter().for_each(|batch| stack.put(batch));
        let other = stack.clone();
        let thread = spawn(move || {
            let taken = [other.take(), other.take()];
            for batch in taken.into_iter().flatten() {
                other.touch(batch);
                other.put(batch);
            }
        });
        if let Some(batch) = stack.take() {
            stack.touch(batch);
            stack.put(batch);
        }
        thread.join().unwrap();
        let mut all: Vec<_> = std::iter::from_fn(|| stack.take()).collect();
        all.iter().for_each(|&batch| stack.touch(batch));
        all.sort_unstable();
        assert_eq!(all, [1, 2], "a batch was lost, or is there twice");
    });
}

#[test]
fn a_store_taken_whole_passes() {
    model(How::Whole);
}

#[test]
#[should_panic]
fn a_word_read_before_the_batch_is_the_takers_fails() {
    model(How::One);
}

#[test]
#[should_panic]
fn a_batch_put_without_a_release_fails() {
    model(How::Relaxed);
}

#[test]
#[should_panic]
fn a_rest_put_back_by_a_store_fails() {
    model(How::Stored);
}
