//! Whether the thread that uses a structure is still there.
//!
//! A thread says when it goes: a pthread key's destructor gives its structure back. But a thread whose first use of the
//! heap falls into the last round of destructors is not asked again, and would leave its structure behind for ever. So
//! each structure has a *robust mutex* (POSIX.1-2008), which its user holds for as long as it lives:
//!
//! ```text
//!   arrive: lock ──▶ …lives… ──▶ leave: unlock        to the register, for the next thread
//!                       └──────▶ ends without a word   the kernel marks the mutex: its owner has died
//!                                                      find_gone: EOWNERDEAD, and the structure is the finder's
//! ```
//!
//! The kernel's mark is the proof that the thread runs no more, and its release what hands us all the thread wrote. No
//! system call at any of the three: the owner writes its number into the mutex, and the list the kernel reads is in user
//! space (a thread's first such mutex costs one call with some C libraries). ~30 ns to arrive and leave.
//!
//! Where there are no robust mutexes (macOS, Android) nobody is ever found gone: such a thread's structure, a few KiB,
//! is lost.

#[cfg(all(feature = "std", target_os = "linux"))]
pub(super) use robust::Presence;
#[cfg(not(all(feature = "std", target_os = "linux")))]
pub(super) use unknown::Presence;

#[cfg(all(feature = "std", target_os = "linux"))]
mod robust {
    use core::cell::{Cell, UnsafeCell};
    use core::ffi::c_int;
    use core::fmt;

    // Not in the libc crate for Linux. glibc since 2.12, musl since 0.9.
    unsafe extern "C" {
        fn pthread_mutexattr_setrobust(attributes: *mut libc::pthread_mutexattr_t, robustness: c_int) -> c_int;
        fn pthread_mutex_consistent(mutex: *mut libc::pthread_mutex_t) -> c_int;
    }

    /// `PTHREAD_MUTEX_ROBUST`.
    const ROBUST: c_int = 1;

    /// A thread's word that it is there. All-zero bytes: made for nobody yet.
    pub struct Presence {
        mutex: UnsafeCell<libc::pthread_mutex_t>,
        made: Cell<bool>,
    }

    impl Presence {
        /// The caller begins to use the structure, which nobody uses.
        pub fn arrive(&self) {
            if !self.made.get() {
                self.make();
            }
            // SAFETY: made, and free: its last holder has left, or is a finder who passed it on by `leave`.
            unsafe { libc::pthread_mutex_lock(self.mutex.get()) };
        }

        /// The caller, who has arrived or found the one before gone, will not use the structure any more.
        pub fn leave(&self) {
            // SAFETY: made and held by this thread.
            unsafe { libc::pthread_mutex_unlock(self.mutex.get()) };
        }

        /// Whether whoever arrived last has ended without leaving. Then the structure is the caller's, as if it had
        /// arrived.
        pub fn find_gone(&self) -> bool {
            if !self.made.get() {
                return false;
            }
            // SAFETY: made; to try is every thread's right.
            match unsafe { libc::pthread_mutex_trylock(self.mutex.get()) } {
                libc::EOWNERDEAD => {
                    // SAFETY: ours by the answer above.
                    unsafe { pthread_mutex_consistent(self.mutex.get()) };
                    true
                }
                0 => {
                    // Nobody uses it: it lies with the vacant ones.
                    self.leave();
                    false
                }
                _ => false,
            }
        }

        /// In the child of a fork: nobody is there but perhaps the caller. The mutex still names threads of the parent.
        pub fn reset(&self, present: bool) {
            self.made.set(false);
            if present {
                self.arrive();
            }
        }

        /// Makes the mutex anew, over whatever was there. Should robustness be refused, it is a mutex like any other,
        /// and nobody is found gone.
        #[cold]
        fn make(&self) {
            // SAFETY: attributes that are initialised, used and destroyed; a place for a mutex that nobody uses.
            unsafe {
                let mut attributes = core::mem::zeroed();
                if libc::pthread_mutexattr_init(&mut attributes) == 0 {
                    pthread_mutexattr_setrobust(&mut attributes, ROBUST);
                    libc::pthread_mutex_init(self.mutex.get(), &attributes);
                    libc::pthread_mutexattr_destroy(&mut attributes);
                } else {
                    *self.mutex.get() = libc::PTHREAD_MUTEX_INITIALIZER;
                }
            }
            self.made.set(true);
        }
    }

    impl fmt::Debug for Presence {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("Presence")
                .field("made", &self.made)
                .finish_non_exhaustive()
        }
    }
}

#[cfg(not(all(feature = "std", target_os = "linux")))]
mod unknown {
    /// Nobody can be found gone.
    #[derive(Debug)]
    pub struct Presence;

    impl Presence {
        pub fn arrive(&self) {}

        pub fn leave(&self) {}

        pub fn find_gone(&self) -> bool {
            false
        }

        pub fn reset(&self, _present: bool) {}
    }
}
