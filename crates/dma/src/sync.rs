//! The primitives with which [`crate::fault`] reads ranges, so that a test can substitute loom's.

pub use std::sync::atomic::{AtomicUsize, Ordering, fence};
