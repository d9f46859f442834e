//! What a thread keeps, in parts, and which of them rest: have been the same, look after look.
//!
//! ```text
//!   part     shelf   up to 1 KiB   above             magazines, by the size of their slots
//!   print     831        2037        0               of its pages and share, or of their counts; 0: nothing is kept
//!   same       8          3          0               so often in a row it had been that before
//!            rests      changes
//! ```
//!
//! A program is rarely silent as long as one of its threads works. Those that sleep meanwhile must not keep what they
//! have for ever, so it is looked at once a second, and what rests is taken from them. That a thread is not at work at
//! all cannot be the condition: most threads of a server sleep, and write a line to a log now and then. Such a line
//! changes the count of one class, by one; the part that has this class stays, all others go. Without parts, 64 threads
//! that had used a block of each length once, and allocated 64 bytes a second from then on, kept 776 MiB, now 12.
//!
//! A part of a thread that works may rest as well, if it frees what it allocates; it is then emptied, and begins anew.
//!
//! A structure has two bytes for each part: there is room for six, before a 49th cache line begins. A look reads what
//! all magazines hold, 80 words in 40 lines.

#![forbid(unsafe_code)]

use core::cell::Cell;

use super::size_class::SizeClass;

/// How many parts there are.
const PARTS: usize = 3;

/// A part rests if its print was the same this often in a row. That of a thread that works is the same twice if it has
/// freed all that it allocated meanwhile; seldom so often.
const LOOKS_TO_REST: u16 = 8;

/// In a part's word, how often its print was the same: the lower bits.
const SAME: u16 = 0xF;

/// The shelf's part.
const SHELF: usize = 0;

/// The part of the magazines for blocks of more than 1 KiB.
const FLAGGED: usize = 2;

/// The part that a class's magazine belongs to.
fn part_of(class: SizeClass) -> usize {
    if class.is_flagged() { FLAGGED } else { 1 }
}

/// A set of parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts(u8);

impl Parts {
    /// Every part.
    pub const ALL: Self = Self((1 << PARTS) - 1);

    /// Whether there is one.
    pub const fn any(self) -> bool {
        self.0 != 0
    }

    /// Whether the shelf is one.
    pub const fn has_shelf(self) -> bool {
        self.0 >> SHELF & 1 != 0
    }

    /// Whether there is one with magazines.
    pub const fn has_slots(self) -> bool {
        self.0 & !(1 << SHELF) != 0
    }

    /// Whether the magazines for blocks of more than 1 KiB are one.
    pub const fn has_flagged(self) -> bool {
        self.0 >> FLAGGED & 1 != 0
    }

    /// Whether the magazine of a class is in one.
    pub fn has(self, class: SizeClass) -> bool {
        self.0 >> part_of(class) & 1 != 0
    }
}

/// A number for each part, which changes with what is kept in it; 0 if that is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prints([u16; PARTS]);

impl Prints {
    /// Of the shelf's print, and the slots of each class.
    pub fn of(shelf: usize, slots: impl Iterator<Item = (SizeClass, u32)>) -> Self {
        let mut sums = [0_u32; PARTS];
        sums[SHELF] = shelf as u32;
        for (class, count) in slots {
            let sum = &mut sums[part_of(class)];
            *sum = sum.wrapping_mul(31).wrapping_add(count);
        }
        // The lower bits, which every count changes; in a part's word above the other number.
        Self(sums.map(|sum| {
            if sum == 0 {
                0
            } else {
                ((sum << 1 | 1) as u16) << SAME.count_ones()
            }
        }))
    }

    /// Whether something is kept.
    #[cfg(test)]
    pub fn any(self) -> bool {
        self.0.iter().any(|&print| print != 0)
    }
}

/// What was seen of one thread lately, by one looker at a time: for each part, its print when it was looked at, and how
/// often in a row it had been that before. All-zero bytes: nothing yet.
#[derive(Debug, Default)]
pub struct Resting([Cell<u16>; PARTS]);

impl Resting {
    /// Notes what is kept now. Returns the parts that rest.
    pub fn note(&self, Prints(now): Prints) -> Parts {
        for (part, now) in self.0.iter().zip(now) {
            let (print, same) = (part.get() & !SAME, part.get() & SAME);
            let is_same = now == print && now != 0;
            part.set(now | if is_same { (same + 1).min(LOOKS_TO_REST) } else { 0 });
        }
        self.parts()
    }

    /// As if nothing had been seen yet.
    pub fn forget(&self) {
        self.0.iter().for_each(|part| part.set(0));
    }

    /// The parts that rested when it was noted last.
    pub fn parts(&self) -> Parts {
        let rests = |part: &usize| self.0[*part].get() & SAME == LOOKS_TO_REST;
        Parts((0..PARTS).filter(rests).fold(0, |parts, part| parts | 1 << part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(bytes: usize) -> SizeClass {
        SizeClass::of(bytes, 8).unwrap()
    }

    #[test]
    fn a_part_rests_that_others_leave_alone() {
        let (small, large) = (class(64), class(30_000));
        let resting = Resting::default();
        for look in 0..30_u32 {
            let slots = SizeClass::all().map(|class| (class, if class == small { 100 - look } else { 2 }));
            let parts = resting.note(Prints::of(7, slots));
            assert_eq!((parts.has_shelf(), parts.has(large)), (look >= 8, look >= 8), "{look}");
            assert!(!parts.has(small) && parts.has_flagged() == parts.has(large) && parts == resting.parts());
        }
        // What is gone does not rest, nor what has come.
        for shelf in [0, 3] {
            let parts = resting.note(Prints::of(shelf, SizeClass::all().map(|class| (class, 0))));
            assert!(!parts.any());
        }
        assert!(Parts::ALL.has_slots() && !Parts(1 << SHELF).has_slots() && Parts::ALL.has_shelf());
        assert!(SizeClass::all().all(|class| Parts::ALL.has(class)));
    }

    #[test]
    fn one_slot_more_or_less_is_another_print() {
        let print = |changed: SizeClass, count| {
            Prints::of(
                0,
                SizeClass::all().map(|class| (class, if class == changed { count } else { 50 })),
            )
        };
        for class in SizeClass::all() {
            assert!(print(class, 50) != print(class, 49) && print(class, 50) != print(class, 51));
        }
        let none = Prints::of(0, SizeClass::all().map(|class| (class, 0)));
        assert!(!none.any() && Prints::of(1, core::iter::empty()).any());
    }
}
