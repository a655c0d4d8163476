//! PCI functions that another process emulates, by the vfio-user protocol over a UNIX socket. Control context: calls wait for the
//! other process.
//!
//! - [`Client`]: a [`crate::Function`] whose device is served by another process.
//! - [`serve`]: serves a [`Served`] function of this process to another process.
//!
//! The protocol is public (libvfio-user's `docs/vfio-user.rst`, version 0.1): a header and a structure per message, modelled on
//! the kernel's VFIO. Memory for DMA goes to the server as a file; the client reads and writes other memory for the server, by
//! messages. Registers that the server shares as a file are mapped; interrupts are eventfds.
//!
//! Both sides take the other for hostile: each length, count, flag and descriptor is checked, and a peer that breaks the protocol
//! or does not answer loses its connection.

mod client;
mod connection;
mod message;
mod server;

pub use client::Client;
pub use server::{Served, serve};

#[cfg(test)]
mod tests;
