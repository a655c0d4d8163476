//! Tests of whole pools, on a store in memory, against a model of volumes.

mod beside;
mod chains;
mod cold;
mod compact;
mod damage;
mod model;
mod opening;
mod pressure;
mod random;
mod rebuild;
mod reserve;
mod rig;
mod rows;
mod scenes;
mod scrub;
mod space;
mod wide;
