//! What Windows says about memory: whether it is short, and how much of it the process has.
//!
//! The system signals a notification while physical memory is low; what is low depends on the machine, some tens of
//! MiB. Whoever watches sees an event each second that it lasts, and all free memory goes back. There is no limit of a
//! group to be read, and no time that tasks have stalled.

use windows_sys::Win32::Foundation::{CloseHandle, HANDLE};
use windows_sys::Win32::System::Memory::{
    CreateMemoryResourceNotification, LowMemoryResourceNotification, QueryMemoryResourceNotification,
};
use windows_sys::Win32::System::ProcessStatus::{K32GetProcessMemoryInfo, PROCESS_MEMORY_COUNTERS};
use windows_sys::Win32::System::Threading::GetCurrentProcess;

use crate::scavenge::pressure::Pressure;
use crate::source::KeepErrno;

/// The right to look. Here anybody has it at any time.
pub(super) struct Turn;

impl Turn {
    /// Begins.
    pub(super) fn begin() -> Option<Self> {
        Some(Self)
    }
}

/// The system's notification; null if it has none.
pub(super) struct Watch(HANDLE);

impl Watch {
    /// Opens the notification.
    pub(super) fn new(_root: &'static str) -> Self {
        // SAFETY: no preconditions. Null on failure.
        Self(unsafe { CreateMemoryResourceNotification(LowMemoryResourceNotification) })
    }

    /// The current situation; always known.
    pub(super) fn look(&mut self) -> Option<Pressure> {
        let mut is_low = 0;
        // SAFETY: a handle that `new` opened, and a place to write to. A call that fails leaves it 0.
        let known = !self.0.is_null() && unsafe { QueryMemoryResourceNotification(self.0, &mut is_low) } != 0;
        Some(Pressure {
            limit: u64::MAX,
            events: u64::from(known && is_low != 0),
            ..Pressure::default()
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: opened by `new`, and closed once.
            unsafe { CloseHandle(self.0) };
        }
    }
}

/// Whether the process is known to have one thread: never.
pub(super) fn is_alone() -> bool {
    false
}

/// Resident bytes of the process (its working set); 0 if the system does not say.
pub(crate) fn resident() -> usize {
    let _error = KeepErrno::new();
    let mut counters = PROCESS_MEMORY_COUNTERS::default();
    // SAFETY: a place of that size to write to. A call that fails leaves zeroes.
    unsafe { K32GetProcessMemoryInfo(GetCurrentProcess(), &mut counters, size_of_val(&counters) as u32) };
    counters.WorkingSetSize
}
