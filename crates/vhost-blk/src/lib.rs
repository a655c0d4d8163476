//! vhost-user-blk: a disk of the block layer as a guest's virtio block device (virtio 1.2, section 5.2).
#![forbid(unsafe_code)]

mod config;
mod controller;
#[cfg(any(test, fuzzing))]
pub mod guest;
mod moving;
mod queue;
mod request;

pub use controller::{Blk, QUEUES, create};
pub use queue::Queue;
pub use request::Disk;
