//! The driver of the fuzz targets, as a library for them. `tests/corpus.rs` includes the same file.

pub mod drive;
