//! Back-end side of the vhost-user protocol, as QEMU's "Vhost-user Protocol" (`docs/interop/vhost-user.rst`) defines it: a
//! front-end such as QEMU sends a guest's memory and virtqueues, and this crate passes them to a [`Device`].
//!
//! All code runs in control context, on one current-thread tokio runtime within a `LocalSet`. Each front-end has its own task;
//! nothing blocks, so no front-end can delay another.
//!
//! - [`Device`]: the interface of a device type. A device receives checked [`QueueSetup`]s and never sees a message.
//! - [`Listener`] and [`Server`]: a controller's socket, which serves one front-end after the other.
//! - [`Client`]: a controller that connects to the front-end's socket whenever a front-end listens there.
//! - [`serve_front_end`]: serves one front-end on a connected socket.
//! - [`SessionHandle`]: lets a device, from any thread, end a session or announce a changed configuration.
//! - [`message`]: the codec; pure.
//!
//! ```text
//! let listener = Listener::bind("/run/aryk/vm1.sock", SocketOptions::default())?;
//! let server = Server::start("vm1", listener, Rc::new(device))?;   // on a LocalSet
//! …
//! server.stop().await;
//! ```
//!
//! A queue runs in the device from `start_queue` to `stop_queue`. When the guest's memory changes while the queue runs, the
//! session calls `set_memory` with the new addresses of the rings. The device must drop the old table as soon as its requests
//! allow, because the session answers the front-end only when removed memory is no longer in use.
//!
//! Offered: VIRTIO_F_VERSION_1, indirect descriptors, EVENT_IDX, and the protocol features MQ, REPLY_ACK, CONFIG,
//! CONFIGURE_MEM_SLOTS, BACKEND_REQ, RESET_DEVICE and STATUS; packed rings, INFLIGHT_SHMFD, and dirty logging (LOG_ALL,
//! LOG_SHMFD) if the device supports them.
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
