//! The protocol of hints with something omitted, as in [`negative`](super::negative): small copies that must fail.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, AtomicUsize, fence};

use super::{explore, spawn};

/// What the copy of a hint's protocol omits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hint {
    /// Nothing: releases above a watched hint change its version, and make it unwatched.
    Whole,
    /// Releases above the hint leave it unchanged.
    Blind,
    /// They make it unwatched, but it has no version.
    NoVersion,
    /// The fence between hint and search.
    NoFence,
}

/// A hint over two words, and pages in them. Here the hint names a word, with a version and a watched flag.
struct Hinted {
    words: [AtomicU64; 2],
    hint: AtomicUsize,
    how: Hint,
}

const WATCHED: usize = 1;
const VERSION: usize = 2;
const WORD: usize = 1 << 8;

impl Hinted {
    fn release(&self, word: usize, pages: u64) {
        self.words[word].fetch_or(pages, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        let mut seen = self.hint.load(Ordering::Relaxed);
        while seen / WORD > word || seen & WATCHED != 0 && self.how != Hint::Blind {
            let version = if self.how == Hint::NoVersion { 0 } else { VERSION };
            let new = (seen / WORD).min(word) * WORD + ((seen % WORD) & !WATCHED) + version;
            match self
                .hint
                .compare_exchange(seen, new, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// Takes the lowest page of a word; fails if the word is empty.
    fn take(&self, word: usize) -> bool {
        let mut bits = self.words[word].load(Ordering::Acquire);
        while bits != 0 {
            let others = bits & (bits - 1);
            match self.words[word].compare_exchange(bits, others, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => bits = now,
            }
        }
        false
    }

    /// Claims a page, and raises the hint to where it was found.
    fn claim(&self) {
        let mut seen = self.hint.load(Ordering::Acquire);
        if seen & WATCHED == 0 {
            seen = self.hint.fetch_or(WATCHED, Ordering::AcqRel) | WATCHED;
        }
        if self.how != Hint::NoFence {
            fence(Ordering::SeqCst);
        }
        let Some(word) = (seen / WORD..2).find(|&word| self.take(word)) else {
            return;
        };
        let raised = word * WORD + seen % WORD;
        let _ = self
            .hint
            .compare_exchange(seen, raised, Ordering::AcqRel, Ordering::Relaxed);
    }

    fn check(&self) {
        let hint = self.hint.load(Ordering::Acquire) / WORD;
        let lowest = (0..2).find(|&word| self.words[word].load(Ordering::Acquire) != 0);
        assert!(lowest.is_none_or(|word| hint <= word), "hidden below the hint");
    }
}

/// One or two threads claim while pages of the first word are released. `hint` is the hint's state before.
fn raises_and_a_release(how: Hint, claimers: usize, hint: usize) {
    explore(3, move || {
        let hinted = Arc::new(Hinted {
            words: [0, 3].map(AtomicU64::new),
            hint: AtomicUsize::new(hint),
            how,
        });
        let others: Vec<_> = (1..claimers)
            .map(|_| {
                let other = hinted.clone();
                spawn(move || other.claim())
            })
            .collect();
        let other = hinted.clone();
        let release = spawn(move || other.release(0, 3));
        hinted.claim();
        others.into_iter().for_each(|thread| thread.join().unwrap());
        release.join().unwrap();
        hinted.check();
    });
}

#[test]
fn a_hint_with_watch_and_version_holds() {
    raises_and_a_release(Hint::Whole, 1, 0);
    raises_and_a_release(Hint::Whole, 1, WATCHED);
    raises_and_a_release(Hint::Whole, 2, 0);
    raises_and_a_release(Hint::Whole, 2, WATCHED);
}

/// ```text
///   releaser of word 0              claimer in word 1
///                                   hint 0, watched; word 0 is empty; claims in word 1
///   word 0 := 3
///   the hint is 0: nothing to lower
///                                   hint 0 → 1: it is what it was when it was read, so the exchange succeeds
/// ```
///
/// The pages are below the hint, and stay hidden until another page is released below it.
#[test]
#[should_panic(expected = "hidden below the hint")]
fn a_hint_that_releases_above_it_leave_alone_fails() {
    raises_and_a_release(Hint::Blind, 1, 0);
}

/// ```text
///   releaser of word 0              first claimer                      second claimer
///                                   hint 0, watched; word 0 is empty
///   word 0 := 3
///   hint 0, no longer watched
///                                                                      hint 0, watched again
///                                                                      claims one page of word 0
///                                   claims in word 1
///                                   hint 0 → 1: it is what it was when it was read
/// ```
#[test]
#[should_panic(expected = "hidden below the hint")]
fn a_hint_without_a_version_fails() {
    raises_and_a_release(Hint::NoVersion, 2, 0);
}

/// Store buffering: the claimer's "watch, then words" and the releaser's "words, then hint" may both miss the other's
/// write.
#[test]
#[should_panic(expected = "hidden below the hint")]
fn a_hint_watched_without_a_fence_fails() {
    raises_and_a_release(Hint::NoFence, 1, 0);
}

/// The hint was already watched, so the claimer writes nothing; it may still see the hint that the releaser did not
/// see, and the words as they were before.
#[test]
#[should_panic(expected = "hidden below the hint")]
fn a_hint_found_watched_without_a_fence_fails() {
    explore(3, || {
        let hinted = Arc::new(Hinted {
            words: [0, 3].map(AtomicU64::new),
            hint: AtomicUsize::new(0),
            how: Hint::NoFence,
        });
        let (first, other) = (hinted.clone(), hinted.clone());
        let watcher = spawn(move || first.hint.fetch_or(WATCHED, Ordering::AcqRel));
        let release = spawn(move || other.release(0, 3));
        let seen = hinted.hint.load(Ordering::Acquire);
        if seen & WATCHED != 0 {
            hinted.claim();
        }
        watcher.join().unwrap();
        release.join().unwrap();
        hinted.check();
    });
}

/// A leaf over two pages, the node above it, and a page elsewhere: a release that finds the leaf told leaves the way
/// up to the release that told it.
struct Relied {
    pages: AtomicU64,
    leaf: AtomicUsize,
    root: AtomicUsize,
    /// How many have entered the turnstile, and left it.
    passed: [AtomicUsize; 2],
    /// The page, a version and a watched flag, as in [`Hinted`].
    hint: AtomicUsize,
    calm: bool,
}

impl Relied {
    fn release(&self, page: usize) {
        self.pages.fetch_or(1 << page, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        if self.leaf.load(Ordering::Acquire) == 0 {
            self.passed[0].fetch_add(1, Ordering::Acquire);
            self.leaf.fetch_or(1, Ordering::AcqRel);
            self.root.fetch_or(1, Ordering::AcqRel);
            self.passed[1].fetch_add(1, Ordering::Release);
        }
        fence(Ordering::SeqCst);
        let mut seen = self.hint.load(Ordering::Relaxed);
        while seen / WORD > page || seen & WATCHED != 0 {
            let new = (seen / WORD).min(page) * WORD + ((seen % WORD) & !WATCHED) + VERSION;
            match self
                .hint
                .compare_exchange(seen, new, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// How many have entered, if all have left. The number that left is read first.
    fn look(&self) -> Option<usize> {
        let left = self.passed[1].load(Ordering::Acquire);
        let entered = self.passed[0].load(Ordering::Acquire);
        (left == entered).then_some(entered)
    }

    /// Finds nothing below page 2 by the root, claims there, and raises the hint to just behind it.
    fn claim(&self) {
        let seen = self.hint.fetch_or(WATCHED, Ordering::AcqRel) | WATCHED;
        fence(Ordering::SeqCst);
        let calm = self.look();
        if self.root.load(Ordering::Acquire) != 0 {
            return;
        }
        if self.calm && (calm.is_none() || self.look() != calm) {
            return;
        }
        let raised = 3 * WORD + seen % WORD;
        let _ = self
            .hint
            .compare_exchange(seen, raised, Ordering::AcqRel, Ordering::Relaxed);
    }
}

fn a_raise_and_a_release_that_relies_on_another(calm: bool) {
    explore(3, move || {
        let relied = Arc::new(Relied {
            pages: AtomicU64::new(0),
            leaf: AtomicUsize::new(0),
            root: AtomicUsize::new(0),
            passed: [0, 0].map(AtomicUsize::new),
            hint: AtomicUsize::new(0),
            calm,
        });
        let releases = [1, 0].map(|page| {
            let other = relied.clone();
            spawn(move || other.release(page))
        });
        relied.claim();
        releases.into_iter().for_each(|thread| thread.join().unwrap());
        let hint = relied.hint.load(Ordering::Acquire) / WORD;
        let lowest = relied.pages.load(Ordering::Acquire).trailing_zeros() as usize;
        assert!(hint <= lowest, "hidden below the hint");
    });
}

#[test]
fn a_hint_raised_in_a_calm_holds() {
    a_raise_and_a_release_that_relies_on_another(true);
}

/// ```text
///   releaser of page 1              releaser of page 0              claimer
///   page 1 := free; leaf := 1
///                                   page 0 := free; leaf is told
///                                   the hint is 0, and not watched
///                                                                   hint 0, watched; the root promises nothing
///                                                                   hint 0 → 3
///   root := 1; hint 3 → 1
/// ```
#[test]
#[should_panic(expected = "hidden below the hint")]
fn a_hint_raised_without_a_calm_fails() {
    a_raise_and_a_release_that_relies_on_another(false);
}
