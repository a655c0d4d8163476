//! A real Ceph cluster on one host, and the tests that need one.
//!
//! | module      | owns                                                              |
//! | ----------- | ----------------------------------------------------------------- |
//! | [`cluster`] | the cluster: its daemons, pools and images, and their disturbances |
//! | [`network`] | a network that can be cut                                         |
//! | [`scsi`]    | a VM with a SCSI controller, and its verified load                |
//! | `settings`  | the cluster's configuration file                                  |
//! | [`vm`]      | a VM's disk, driven by a test                                     |
//! | [`cases`]   | the tests themselves                                              |
//!
//! Runs in ordinary processes on ordinary threads, and waits in wall time. No process outlives the thread that started the
//! cluster.
#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "it waits for other processes, in wall time")]

pub mod cases;
pub mod cluster;
pub mod network;
pub mod scsi;
mod settings;
pub mod vm;

pub use cluster::{Cluster, Kind, Store};
