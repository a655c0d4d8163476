//! What the daemon has counted, for those who watch it: gathered once for all of them, and told by HTTP.
//!
//! | file | what it owns |
//! | --- | --- |
//! | `inventory` | what there is to be watched, as the daemon says |
//! | `observatory` | looks at all of it, shared by those who ask at the same time |
//! | `unions` | what disks did while they belonged to groups, controllers and reactors |
//! | `exposition`, `families` | the look as OpenMetrics text, piece by piece |
//! | `web`, `live`, `closer` | the web page, what happened between two looks, and one disk of it looked at closer |
//! | `server` | HTTP on TCP or a UNIX socket, with bounds on everything that a client can take |
//!
//! All of it runs in control context. Reactors are asked as [`aryk_bdev::gather`] does it, a little in each turn.
#![forbid(unsafe_code)]

mod closer;
mod exposition;
mod families;
mod inventory;
mod live;
mod observatory;
mod scrape;
mod server;
mod unions;
mod web;

pub use inventory::{Controller, Inventory};
pub use observatory::{Disk, Group, Look, Observatory, Reactor, Seat};
pub use scrape::Scrapes;
pub use server::{Address, AddressError, BindError, Server};
pub use web::Web;
