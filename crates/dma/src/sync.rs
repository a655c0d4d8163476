//! The primitives that [`crate::fault`] reads ranges with, so that a test can put loom's in their place.

pub use std::sync::atomic::{AtomicUsize, Ordering, fence};
