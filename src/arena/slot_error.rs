//! Why a slot could not be freed.

#![forbid(unsafe_code)]

use core::fmt;

use crate::fatal::{self, Number};

/// A slot that was not freed, because it is not one of the list's or is not allocated. The list is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotError {
    address: usize,
    foreign: bool,
}

impl SlotError {
    #[cold]
    pub(super) fn foreign(address: *const u8) -> Self {
        Self {
            address: address.addr(),
            foreign: true,
        }
    }

    #[cold]
    pub(super) fn not_allocated(address: *const u8) -> Self {
        Self {
            address: address.addr(),
            foreign: false,
        }
    }

    /// The address that was to be freed.
    #[must_use]
    pub const fn address(&self) -> usize {
        self.address
    }

    /// Whether no slot of the list begins there. Otherwise one does, but was not allocated: it was freed twice,
    /// retired, or never handed out.
    #[must_use]
    pub const fn is_foreign(&self) -> bool {
        self.foreign
    }

    #[cold]
    pub(super) fn abort(self, slot_bytes: usize) -> ! {
        let what = if self.foreign {
            "slot freed that is not this list's; its address, the bytes of a slot"
        } else {
            "slot freed that is not allocated (freed twice, or retired); its address, the bytes of a slot"
        };
        fatal::abort(what, Number::Address(self.address), Number::Count(slot_bytes))
    }
}

impl fmt::Display for SlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.address;
        if self.foreign {
            write!(f, "no slot of the list begins at {address:#x}")
        } else {
            write!(f, "the slot at {address:#x} is not allocated (freed twice, or retired)")
        }
    }
}

impl core::error::Error for SlotError {}
