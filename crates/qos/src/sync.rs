//! The primitives of [`crate::bucket`], so that a test can substitute loom's.

pub use std::sync::atomic::{AtomicU64, Ordering};
