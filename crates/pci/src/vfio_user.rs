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
//! A client differs from the kernel's VFIO in this:
//! - It cannot mask a vector, because the protocol leaves the MSI-X table to the client: [`crate::Function::vector_mask`] returns
//!   `None`. A driver polls a queue pair without a vector, or accepts interrupts while it polls.
//! - Most servers refuse memory without a file, such as a VM's: [`crate::PciError::NoFile`]. The driver copies the data through
//!   memory of [`aryk_dma::Mapping::in_file`].
//! - It cannot stop a server that hangs: a server that continues after its connection was closed may still access memory that it
//!   had mapped. An operator uses it for devices of servers that he trusts with the memory.
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
