//! Tests of whole pools, on a store in memory, against a model of volumes.

mod model;
mod random;
mod rig;
mod scenes;
mod wide;
