//! Simulations of volumes by seed: the engine and its store on a disk in virtual time that fails as disks do. Any context; no I/O
//! and no clock.
//!
//! | module | what it owns |
//! | --- | --- |
//! | `disk` | the disk: latencies, faults, crashes that lose, reorder and tear what is not durable |
//! | `script` | the steps of a simulation, made from its seed |
//! | `world` | one simulation: engine, store, disk |
//! | `model` | what may be read, for each part of each volume; `pattern`: what tells one write from another |
//! | `damage` | a pool of which any byte is damaged |
//! | `fixture` | images of pools, which every later version reads |
//! | `journal` | simulations of the store without the engine |
//! | `shards` | simulations of a pool of several shards: snapshots, sizes and reverts across them |
//! | `run` | a seed, or a range of them; makes a failing list of steps shorter |
//!
//! Pools have one shard, except in `shards`: what joins several is in the module (`crates/modules/volume/src/striped.rs`,
//! `pool/changes.rs`), around engines that know nothing of each other.
//!
//! A seed reproduces exactly: all chance comes from it, and the engine has none of its own.
#![forbid(unsafe_code)]

pub mod damage;
pub mod disk;
pub mod fixture;
pub mod journal;
pub mod model;
pub mod pattern;
pub mod run;
pub mod script;
pub mod shards;
mod world;

pub use world::Counts;
