//! The synchronisation primitives of [`crate::mailbox`] and [`crate::trace`]; a test replaces them by loom's.

pub use std::sync::Mutex;
pub use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
