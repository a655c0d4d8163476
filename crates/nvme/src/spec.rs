//! The wire format: registers, queue entries, identify data, features, log pages and status codes, as the NVMe Base
//! Specification 2.0 and the NVM Command Set Specification 1.0 define them. Pure data, for any context.
//!
//! All integers are little endian. Structures that a controller fills are read as bytes and never trusted:
//! `claims` checks them.

pub mod entry;
pub mod feature;
pub mod identify;
pub mod log;
pub mod opcode;
pub mod register;
pub mod security;
pub mod status;
