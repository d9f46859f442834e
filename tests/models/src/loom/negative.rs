//! Protocols that look right and are not: small copies of what ships, each with something omitted. They must fail.
//!
//! A model that never fails proves nothing. So each of these is run twice: as it ships, and it passes; and with one
//! thing missing, and loom finds the interleaving in the comment. Try here first before you remove a fence or a second
//! look.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, AtomicUsize, fence};

use pageheap::internals::Summary;
use pageheap::internals::bitmap::summarize;

use super::{explore, spawn};

/// How a node is refreshed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refresh {
    /// As it ships: fence, read, merge, change, and once more after a change.
    Again,
    /// The same without the fence.
    AgainWithoutFence,
    /// One change that succeeds is enough.
    Once,
    /// Two attempts, whatever their outcome: the f-array, with a compare-exchange in place of its load-linked and
    /// store-conditional.
    Twice,
}

/// Two words and their summary.
struct Node {
    words: [AtomicU64; 2],
    summary: AtomicU64,
    how: Refresh,
}

impl Node {
    fn new(how: Refresh, words: [u64; 2]) -> Arc<Self> {
        Arc::new(Self {
            words: words.map(AtomicU64::new),
            summary: AtomicU64::new(summarize(&words).to_bits()),
            how,
        })
    }

    fn merge(&self) -> Summary {
        let words = [0, 1].map(|word: usize| self.words[word].load(Ordering::Acquire));
        summarize(&words)
    }

    fn give(&self, (word, mask): (usize, u64)) {
        self.words[word].fetch_or(mask, Ordering::AcqRel);
        self.refresh();
    }

    fn take(&self, (word, mask): (usize, u64)) -> bool {
        let taken = self.words[word].fetch_and(!mask, Ordering::AcqRel) & mask != 0;
        if taken {
            self.refresh();
        }
        taken
    }

    fn refresh(&self) {
        for round in 0.. {
            if self.how != Refresh::AgainWithoutFence {
                fence(Ordering::SeqCst);
            }
            let old = Summary::from_bits(self.summary.load(Ordering::Acquire));
            let new = self.merge();
            if old == new {
                return;
            }
            let (old, new) = (old.to_bits(), new.to_bits());
            let changed = self
                .summary
                .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
                .is_ok();
            let done = match self.how {
                Refresh::Again | Refresh::AgainWithoutFence => false,
                Refresh::Once => changed,
                Refresh::Twice => round == 1,
            };
            if done {
                return;
            }
        }
    }

    fn check(&self) {
        let says = Summary::from_bits(self.summary.load(Ordering::Acquire));
        assert_eq!(says, self.merge(), "stale");
    }
}

/// The first page of the node: it shows in `start`.
const FIRST: (usize, u64) = (0, 1);
/// The last page: it shows in `end`.
const LAST: (usize, u64) = (1, 1 << 63);

/// One page is claimed while another, which changes the summary as much, is given back.
fn a_claim_and_a_release(how: Refresh) {
    explore(3, move || {
        let node = Node::new(how, [1 << 5, 0]);
        let other = node.clone();
        let thread = spawn(move || other.give((1, 1 << 5)));
        node.take((0, 1 << 5));
        thread.join().unwrap();
        node.check();
    });
}

/// The last page is claimed while the first is claimed and comes back.
fn a_page_that_comes_and_goes(how: Refresh) {
    explore(3, move || {
        let node = Node::new(how, [1, 1 << 63]);
        let other = node.clone();
        let thread = spawn(move || {
            other.take(FIRST);
            other.give(FIRST);
        });
        node.take(LAST);
        thread.join().unwrap();
        node.check();
    });
}

/// A page is given back while another thread takes it: two successive changes of one word, and two looks at the node.
fn a_bit_that_comes_and_goes(how: Refresh) {
    explore(3, move || {
        let node = Node::new(how, [0, 0]);
        let other = node.clone();
        let thread = spawn(move || other.give(FIRST));
        node.take(FIRST);
        thread.join().unwrap();
        node.check();
    });
}

#[test]
fn protocol_r_holds() {
    a_claim_and_a_release(Refresh::Again);
    a_page_that_comes_and_goes(Refresh::Again);
    a_bit_that_comes_and_goes(Refresh::Again);
}

/// ```text
///   releaser                        claimer
///   bit := 1
///   reads summary: says 0
///                                   bit := 0
///                                   reads summary: says 0; merges: 0; right, leaves
///   merges: reads bit as 1 (nothing tells it otherwise), summary := 1
///   reads summary: says 1; merges: may still read the bit as 1; right, leaves
/// ```
///
/// Store buffering, the one thing that acquire and release do not order: the claimer's "bit, then summary" and the
/// releaser's "summary, then bit" may both miss the other's write.
#[test]
#[should_panic(expected = "stale")]
fn protocol_r_without_the_fence_fails() {
    a_bit_that_comes_and_goes(Refresh::AgainWithoutFence);
}

/// ```text
///   claims page 5                   gives page 69
///   page 5 := 0
///   reads summary (0, 1, 0), merges (0, 0, 0)
///                                   page 69 := 1
///                                   reads summary (0, 1, 0), merges (0, 1, 0): right, leaves
///   summary := (0, 0, 0), with page 69 free. It does not look again.
/// ```
#[test]
#[should_panic(expected = "stale")]
fn protocol_r_without_a_second_look_fails() {
    a_claim_and_a_release(Refresh::Once);
}

/// ```text
///   claims the last page            claims the first page and gives it back
///   first try: summary := (1, 1, 0)
///                                   first page := 0
///   second try: reads summary (1, 1, 0), merges (0, 0, 0)
///                                   summary := (0, 0, 0);  first page := 1;  summary := (1, 1, 0)
///   summary (1, 1, 0) → (0, 0, 0) succeeds: it is what it was when it was read
/// ```
///
/// Load-linked would have noticed that it went away and came back (ABA). With compare-exchange two attempts are no
/// better than one.
#[test]
#[should_panic(expected = "stale")]
fn the_f_array_with_compare_exchange_fails() {
    a_page_that_comes_and_goes(Refresh::Twice);
}

/// Two children and their parent, for the join: what each child promises, and the run that the two form together.
struct Pair {
    children: [AtomicUsize; 2],
    parent: AtomicUsize,
    fenced: bool,
}

impl Pair {
    /// A run of one page, at the border, becomes free in `child`; the parent must promise as much as the two have
    /// there.
    fn raise(&self, child: usize) {
        self.children[child].fetch_max(1, Ordering::AcqRel);
        if self.fenced {
            fence(Ordering::SeqCst);
        }
        let sibling = self.children[1 - child].load(Ordering::Acquire);
        self.parent.fetch_max(1 + sibling, Ordering::AcqRel);
    }
}

fn two_runs_that_meet(fenced: bool) {
    explore(3, move || {
        let pair = Arc::new(Pair {
            children: [0, 0].map(AtomicUsize::new),
            parent: AtomicUsize::new(0),
            fenced,
        });
        let other = pair.clone();
        let thread = spawn(move || other.raise(0));
        pair.raise(1);
        thread.join().unwrap();
        assert_eq!(
            pair.parent.load(Ordering::Acquire),
            2,
            "a run of two is promised as one of one"
        );
    });
}

#[test]
fn a_join_of_two_runs_that_meet_holds() {
    two_runs_that_meet(true);
}

/// ```text
///   left := 1                       right := 1
///   reads right as 0                reads left as 0
///   parent promises 1               parent promises 1, of two pages in a row
/// ```
#[test]
#[should_panic(expected = "a run of two")]
fn a_join_without_the_fence_fails() {
    two_runs_that_meet(false);
}

/// What the proof that nothing is free omits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    /// Nothing: a flag, two looks at how many have passed, and releases that pass while the flag is up.
    Whole,
    /// The flag: releases never pass.
    NoFlag,
    /// The fence between flag and look.
    NoFence,
    /// The order: the releaser looks at the flag before it gives its page.
    FlagFirst,
    /// The second look: what the search did not find does not exist.
    OneLook,
}

/// Two pages that wander, and a thread that claims there is none.
struct Proved {
    words: [AtomicU64; 2],
    provers: AtomicUsize,
    passed: AtomicUsize,
    how: Proof,
}

impl Proved {
    fn release(&self, word: usize) {
        let early = self.how == Proof::FlagFirst && self.provers.load(Ordering::Relaxed) != 0;
        self.words[word].fetch_or(1, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        let proving = match self.how {
            Proof::Whole | Proof::NoFence | Proof::OneLook => self.provers.load(Ordering::Relaxed) != 0,
            Proof::NoFlag => false,
            Proof::FlagFirst => early,
        };
        if proving {
            self.passed.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn claim_in(&self, word: usize) -> bool {
        self.words[word].swap(0, Ordering::AcqRel) != 0
    }

    fn claim(&self) -> bool {
        self.provers.fetch_add(1, Ordering::AcqRel);
        if self.how != Proof::NoFence {
            fence(Ordering::SeqCst);
        }
        loop {
            let before = self.passed.load(Ordering::Acquire);
            // A look before each claim, as in a search.
            let found = (0..2).any(|word| self.words[word].load(Ordering::Acquire) != 0 && self.claim_in(word));
            if found || self.how == Proof::OneLook || self.passed.load(Ordering::Acquire) == before {
                self.provers.fetch_sub(1, Ordering::Release);
                return found;
            }
        }
    }
}

/// One page is free at every moment: the other thread gives back word 0 before it takes word 1.
fn a_page_that_wanders(how: Proof) {
    explore(3, move || {
        let proved = Arc::new(Proved {
            words: [0, 1].map(AtomicU64::new),
            provers: AtomicUsize::new(0),
            passed: AtomicUsize::new(0),
            how,
        });
        let other = proved.clone();
        let thread = spawn(move || {
            other.release(0);
            other.claim_in(1)
        });
        let mine = proved.claim();
        let theirs = thread.join().unwrap();
        assert!(mine, "no, with a page free throughout (theirs: {theirs})");
    });
}

#[test]
fn a_proof_with_flag_and_fence_holds() {
    a_page_that_wanders(Proof::Whole);
}

/// ```text
///   prover                          the other
///   word 0 is empty
///                                   word 0 := 1, and passes nowhere
///                                   takes word 1
///   word 1 is empty; nobody has passed: "no"
/// ```
#[test]
#[should_panic(expected = "a page free throughout")]
fn a_proof_without_the_flag_fails() {
    a_page_that_wanders(Proof::NoFlag);
}

/// The prover's "flag, then words" against the releaser's "word, then flag": without a fence on either side, both may
/// miss the other's write.
#[test]
#[should_panic(expected = "a page free throughout")]
fn a_proof_without_the_fence_fails() {
    a_page_that_wanders(Proof::NoFence);
}

/// The flag goes up between the releaser's look at it and its release of the page.
#[test]
#[should_panic(expected = "a page free throughout")]
fn a_proof_whose_releaser_looks_at_the_flag_first_fails() {
    a_page_that_wanders(Proof::FlagFirst);
}

/// As without the flag: but here the other thread has passed, and nobody looks.
#[test]
#[should_panic(expected = "a page free throughout")]
fn a_proof_without_the_second_look_fails() {
    a_page_that_wanders(Proof::OneLook);
}
