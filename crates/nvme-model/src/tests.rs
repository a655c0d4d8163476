//! Tests of the model from the specification, by a naive host (`host`) that shares no code with the driver and uses only
//! what the crate exports.

mod admin;
mod faults;
mod host;
mod hostile;
mod io;
mod lifecycle;
mod pointers;
mod transport;
