//! The daemon's statistics for monitoring: gathered once for all clients, and served over HTTP.
//!
//! | file | content |
//! | --- | --- |
//! | `inventory` | the daemon's objects that are reported on |
//! | `collector` | snapshots of all counts, shared by concurrent clients |
//! | `aggregates` | sums of disks' counts per group, controller and reactor |
//! | `exposition`, `families` | a snapshot as OpenMetrics text, piece by piece |
//! | `web`, `live`, `disk_details` | the web page, the rates between two snapshots, and the details of one disk |
//! | `server` | HTTP on TCP or a UNIX socket, with limits on each resource that a client can hold |
//!
//! All of it runs in control context. [`aryk_bdev::gather`] reads the reactors' counts, a few in each turn.
#![forbid(unsafe_code)]

mod aggregates;
mod collector;
mod disk_details;
mod exposition;
mod families;
mod inventory;
mod live;
mod scrape;
mod server;
mod web;

pub use collector::{Collector, ControllerCounts, Disk, Group, Reactor, Snapshot};
pub use inventory::{
    Controller, Host, HostWork, Inventory, LocalFuture, Nvme, Pool, PoolMember, RbdClient, Remote, RemotePath,
};
pub use scrape::Scrapes;
pub use server::{Address, AddressError, BindError, Server};
pub use web::Web;
