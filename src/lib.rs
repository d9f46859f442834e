//! placeholder
pub mod source;
