//! The subsystem that a host of NVMe over TCP uses, as `scenario` creates it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

pub const SUBSYSTEM: &str = "nqn.2016-06.io.spdk:cnode1";
/// Tests of other processes do not listen there, and the kernel does not choose it for connections.
pub const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 14_329);
pub const BLOCK: usize = 512;
pub const IN_CAPSULE_MAX: u32 = 8192;
