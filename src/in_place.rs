//! A large value, written where it is to lie: as a struct literal, but without a copy on the stack.
//!
//! ```text
//!   place.write(Self { heap, spans })      stack: heap 4 KiB ─▶ Self 5 KiB ─▶ place
//!   write_fields!(place, Self { … })       stack: the largest field        ─▶ place
//! ```
//!
//! `ptr::write` of a literal puts the literal together on the stack, and copies it; if the literal has a large field,
//! it does so for each level. An allocator may be called on a stack of 16 KiB, by its first call too.
//!
//! Worked example: an object layer of 5,248 bytes holds a heap of 3,968, which holds a set of free pages of 1,920. As
//! three literals the call that opened a heap took 22 KiB of stack; field by field it takes the set once, and 6.

#![forbid(unsafe_code)]

/// Writes each field of the struct at `$place`; those named after `after` have been written. As with a struct literal,
/// a field that is forgotten does not compile.
///
/// Unsafe, for the block around it: `$place` is valid for writes of the struct, and aligned.
macro_rules! write_fields {
    ($place:expr, $Struct:ident { $($field:ident $(: $value:expr)?),+ $(,)? } $(after $($done:ident),+)?) => {{
        let place = $place;
        if false {
            // Without `..`, so it names every field.
            let $Struct { $($field: _,)+ $($($done: _,)+)? } = &*place;
        }
        $((&raw mut (*place).$field).write($crate::in_place::write_fields!(@ $field $(: $value)?));)+
    }};
    (@ $field:ident) => { $field };
    (@ $field:ident: $value:expr) => { $value };
}

pub(crate) use write_fields;
