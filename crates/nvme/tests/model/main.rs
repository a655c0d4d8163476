//! The driver against the model controller, in virtual time. A seed reproduces everything.
//!
//! `rig` has the owner of a controller as a program would be; `traffic` adds I/O whose every read is compared with what the
//! writes before it allow.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod chaos;
mod claims;
mod commands;
mod hot_path;
mod io;
mod life;
mod recovery;
mod rig;
mod traffic;
