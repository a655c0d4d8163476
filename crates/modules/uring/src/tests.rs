//! Tests of the module: a disk in each kind of store, on both engines.

mod data;
mod full;
mod harness;
