//! The vhost-user back-end protocol, as QEMU's "Vhost-user Protocol" (`docs/interop/vhost-user.rst`) has it: a
//! front-end such as QEMU hands over a guest's memory and virtqueues, and this crate hands them to a [`Device`].
//!
//! All of it runs in control context, on one current-thread tokio runtime within a `LocalSet`. Each front-end has a
//! task of its own; nothing blocks, so no front-end can delay another.
//!
//! - [`Device`]: what a device type implements. It gets checked [`QueueSetup`]s and never sees a message.
//! - [`Listener`] and [`Server`]: a controller's socket, and its front-ends one after the other.
//! - [`Client`]: the other way round: it connects to the front-end's socket whenever there is one.
//! - [`serve_front_end`]: one front-end on a connected socket, whoever connected it.
//! - [`SessionHandle`]: how a device, from any thread, ends a session or announces a changed configuration.
//! - [`message`]: the codec; pure.
//!
//! ```text
//! let listener = Listener::bind("/run/aryk/vm1.sock", SocketOptions::default())?;
//! let server = Server::start("vm1", listener, Rc::new(device))?;   // on a LocalSet
//! …
//! server.stop().await;
//! ```
//!
//! A queue runs in the device from `start_queue` to `stop_queue`. When the guest's memory changes while it runs, `set_memory`
//! comes, with the rings looked up anew; a device drops the old table as soon as its requests allow, for the session
//! answers the front-end only when removed memory is in use no more.
//!
//! Offered: VIRTIO_F_VERSION_1, indirect descriptors, EVENT_IDX, and the protocol features MQ, REPLY_ACK, CONFIG,
//! CONFIGURE_MEM_SLOTS, BACKEND_REQ, RESET_DEVICE and STATUS; packed rings, INFLIGHT_SHMFD, and dirty logging
//! (LOG_ALL, LOG_SHMFD) if the device can.
#![forbid(unsafe_code)]

mod client;
mod connection;
mod device;
mod error;
mod inflight;
mod memory;
pub mod message;
mod presence;
mod server;
mod service;
mod session;
mod sharing;
mod stats;
mod vring;

pub use aryk_unix_listener::{ListenError, Listener, SocketOptions};
pub use client::Client;
pub use device::{Device, DeviceError, EventFd, MemoryChange, QueueLog, QueueSetup, Rings, SessionHandle};
pub use error::Error;
pub use message::CONFIG_MAX;
pub use server::Server;
pub use session::{End, F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, F_VERSION_1, serve_front_end};
pub use stats::{Snapshot, Stats};
