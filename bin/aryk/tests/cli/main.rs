//! Tests of the real `aryk` with the real `arykd`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod absent;
mod apply;
mod bench;
mod doctor;
mod guard;
mod harness;
mod import;
mod keys;
mod person;
mod watch;
