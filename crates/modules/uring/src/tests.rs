//! Tests of the module: a disk in each kind of store, with both engines.

mod block_devices;
mod bounds;
mod conformance;
mod contention;
mod creation;
mod data;
mod fence;
mod full;
mod harness;
mod locks;
mod losses;
mod shape;
mod steps;
