//! Property tests against naive twins.
