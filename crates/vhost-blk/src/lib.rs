//! vhost-user-blk: a disk of the block layer as a guest's virtio block device (virtio 1.2, section 5.2).
#![forbid(unsafe_code)]

mod config;
mod controller;
mod controllers;
#[cfg(any(test, fuzzing))]
pub mod guest;
mod moving;
mod queue;
mod request;

pub use aryk_vhost_device::{Alarm, EndpointError, Errors, Link, MOVE_PATIENCE, MoveError, Parts, Trouble};
pub use aryk_vhost_user::{ListenError, SocketOptions};
pub use controllers::{Controllers, Error, Info, Options, QUEUES, QUEUES_MAX};
pub use queue::Queue;
pub use request::Disk;
