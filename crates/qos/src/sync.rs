//! The primitives that [`crate::bucket`] is made of, so that a test can put loom's in their place.

pub use std::sync::atomic::{AtomicU64, Ordering};
