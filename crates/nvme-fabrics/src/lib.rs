//! NVMe over Fabrics without I/O, for targets and initiators: bytes, commands and time go in; bytes, completions and events come
//! out.
//!
//! Cited sections are those of the NVMe Base Specification 2.0 ("NVMe 2.0") and of the NVMe TCP Transport Specification 1.0.
//! Commands, identify data and status codes that all transports share are in `aryk_nvme::spec`.
//!
//! **Invariants.** Bytes of a peer cause errors, never panics. [`tcp`] knows nothing of what is above it, so that another
//! transport takes its place.
#![forbid(unsafe_code)]

pub mod tcp;
