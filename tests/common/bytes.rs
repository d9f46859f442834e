//! Whether many bytes have one value.

/// Whether each of `bytes` is `value`: the first is, and each is like the next. As one comparison of slices, because in
/// a program that is not optimised a loop takes fifty times as long.
pub fn all_are(bytes: &[u8], value: u8) -> bool {
    let Some((&first, rest)) = bytes.split_first() else {
        return true;
    };
    first == value && *rest == bytes[..rest.len()]
}
