//! What a layer above a page heap contributes when the page heap is scavenged.
//!
//! ```text
//!   tick ─▶ gather, activity? ─▶ a look ─▶ trim ─▶ free pages go ─▶ nothing left, and silent ─▶ punch ─▶ rest
//! ```
//!
//! A page heap by itself has no layer above: it knows only free pages and caches.

#![forbid(unsafe_code)]

use core::ptr::NonNull;

/// A layer that keeps free memory where the page heap below does not see it.
pub(crate) trait Above {
    /// Whether the driving thread is about to sleep indefinitely, and everything is to be given up first.
    fn settles(&self) -> bool {
        false
    }

    /// Gives up what it keeps only until somebody needs pages. Called before each look at the pages, which sees it as
    /// free.
    fn gather(&self) {}

    /// A number that changes with the layer's activity.
    fn activity(&self) -> u64 {
        0
    }

    /// Gives up what is kept in stores, all of it or some. Returns whether nothing is kept now.
    fn trim(&self, all: bool) -> bool {
        let _ = all;
        true
    }

    /// Gives back parts of allocated pages, below page `end`, while `go_on`. Returns the page below which there is
    /// still something to examine: 0 when all is done.
    fn punch(&self, end: usize, go_on: &dyn Fn() -> bool) -> usize {
        let _ = (end, go_on);
        0
    }
}

/// A table with an entry for each page, which carries no information while the page is free.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beside {
    /// The entry of page 0, on a granule boundary.
    pub(crate) base: NonNull<u8>,
    /// Bytes in an entry.
    pub(crate) entry: usize,
}

/// No layer above.
#[derive(Debug)]
pub(crate) struct Nothing;

impl Above for Nothing {}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::cell::{Cell, RefCell};
    use core::time::Duration;
    use std::vec::Vec;

    use super::*;
    use crate::free_set::Request;
    use crate::heap::{Clock, Config, PageHeap};
    use crate::source::{Simulated, Verb};
    use crate::units::{PageCount, PageIndex, PageRun};

    /// A layer that counts how often it is asked.
    #[derive(Default)]
    struct Asked {
        settles: Cell<bool>,
        gathers: Cell<u32>,
        activity: Cell<u64>,
        trims: Cell<u32>,
        punches: Cell<u32>,
    }

    impl Above for Asked {
        fn settles(&self) -> bool {
            self.settles.get()
        }

        fn gather(&self) {
            self.gathers.set(self.gathers.get() + 1);
        }

        fn activity(&self) -> u64 {
            self.activity.get()
        }

        fn trim(&self, _all: bool) -> bool {
            self.trims.set(self.trims.get() + 1);
            true
        }

        fn punch(&self, _end: usize, _go_on: &dyn Fn() -> bool) -> usize {
            self.punches.set(self.punches.get() + 1);
            0
        }
    }

    /// A layer, a heap below it, and the time.
    struct World {
        above: Asked,
        heap: PageHeap<Simulated>,
        now: Cell<Duration>,
    }

    impl World {
        fn new() -> Self {
            Self {
                above: Asked::default(),
                heap: PageHeap::new(Simulated::new(4096), Config::new(1 << 20)).unwrap(),
                now: Cell::new(Duration::from_secs(1)),
            }
        }

        /// One step, after a second.
        fn tick(&self) -> Duration {
            self.now.set(self.now.get() + Duration::from_secs(1));
            self.heap.tick_with(&|| self.now.get(), &self.above)
        }

        /// Steps until nothing is left to do. Returns how often the layer was trimmed and punched.
        fn rest(&self) -> (u32, u32) {
            let Asked { trims, punches, .. } = &self.above;
            [trims, punches].into_iter().for_each(|count| count.set(0));
            assert!((0..20).any(|_| self.tick() == Duration::MAX));
            (trims.get(), punches.get())
        }
    }

    /// Both are small numbers. Where they only were put together, two that changed alike looked like none that did.
    #[test]
    fn two_signs_of_life_do_not_cancel_each_other() {
        let (world, request) = (World::new(), Request::of(100));
        let run = world.heap.allocate(PageCount(100)).unwrap();
        world.heap.set.release(run.start().0, 100).unwrap();
        // (After ten seconds it goes because no look has found it in use.)
        for look in 0..9 {
            let claim = world.heap.set.claim(&request).unwrap();
            world.heap.set.release(claim.start, 100).unwrap();
            world.above.activity.set(world.heap.set.passes().into());
            world.tick();
            assert_eq!(world.heap.source().calls(Verb::Release), 0, "look {look}");
        }
    }

    /// What was given up before that does not count: more may have been kept since.
    #[test]
    fn a_layer_gives_up_all_each_time_the_driver_is_about_to_sleep() {
        let world = World::new();
        for round in 0..3 {
            world.above.settles.set(true);
            assert!(world.rest().0 > 0, "round {round}");
            // The driver is woken, and falls asleep again.
            world.above.settles.set(false);
            world.tick();
        }
    }

    /// A layer that notes whether it is asked for all that it keeps.
    #[derive(Default)]
    struct Trimmed(RefCell<Vec<bool>>);

    impl Above for Trimmed {
        fn trim(&self, all: bool) -> bool {
            self.0.borrow_mut().push(all);
            true
        }
    }

    /// The time on a slow machine: each part of a tick takes half a millisecond.
    struct Slow(Cell<Duration>);

    impl Clock for Slow {
        fn now(&self) -> Duration {
            self.0.get()
        }

        fn work(&self) -> Duration {
            self.0.set(self.0.get() + Duration::from_micros(500));
            self.0.get()
        }
    }

    /// A program takes a few pages between looks while its excess goes, and falls silent. With each look there are
    /// fewer free pages, and at some time less than ten times as many as it took.
    #[test]
    fn the_scavengers_own_work_is_no_sign_of_life() {
        let (free, few) = (64 * 512, PageCount(20));
        let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 30)).unwrap();
        let (above, clock) = (Trimmed::default(), Slow(Cell::new(Duration::from_secs(1))));
        let look = || {
            heap.tick_with(&clock, &above);
            clock.0.set(clock.0.get() + Duration::from_millis(250));
        };
        let run = heap.allocate(PageCount(free)).unwrap();
        heap.set.release(run.start().0, free).unwrap();
        // For ten seconds it keeps all.
        for taken in 0..60 {
            look();
            let behind = PageIndex(free + taken * few.0);
            heap.allocate_at(PageRun::new(behind, few).unwrap()).unwrap();
        }
        above.0.borrow_mut().clear();
        (0..60).for_each(|_| look());
        let trims = above.0.borrow();
        let mut silent = trims.iter().skip_while(|&&all| !all);
        assert!(silent.clone().count() > 10 && silent.all(|&all| all), "{trims:?}");
        assert_eq!(heap.backed(), PageCount(60 * few.0), "all that is free has gone");
    }

    /// What nobody has asked for must not pass for pages in use.
    #[test]
    fn a_layer_gives_up_what_it_keeps_for_nobody_before_each_look() {
        let world = World::new();
        world.rest();
        for activity in 0..20 {
            world.above.activity.set(activity);
            let before = world.above.gathers.get();
            world.tick();
            assert_eq!(world.above.gathers.get(), before + 1, "tick {activity}");
        }
    }

    #[test]
    fn a_layer_is_punched_once_in_each_silence() {
        let world = World::new();
        for round in 0..3 {
            world.above.activity.set(round);
            assert_eq!(world.rest().1, 1, "round {round}");
            assert_eq!(world.rest().1, 0, "nothing has changed");
        }
    }
}
