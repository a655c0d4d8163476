//! The primitives that [`crate::mailbox`] and [`crate::trace`] are made of, so that a test can put loom's in their place.

pub use std::sync::Mutex;
pub use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
