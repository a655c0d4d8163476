//! A crash test: the test's own guest keeps its queues full while `arykd` is killed under it, and checks everything that
//! it reads.
//!
//! [`front_end`] is the guest and its front-end, with [`session`]s and [`memory`], made of `aryk-front-end`'s parts;
//! [`checker`] decides which values a read may return, [`content`] defines the content of sectors, [`load`] draws the
//! next request, [`requests`] builds it. The disk is a file, an NVMe [`drive`], or an image on [`ceph`], with
//! [`encryption`] in some lives, and a [`volume`] in others. [`life`] is one front-end from start to end, with the [`daemon`]s
//! that it connects to; [`report`] adds them up. A test tool: it measures time, sleeps and starts processes. One thread, beside
//! that of key rotations; `unsafe` is left to `aryk-dma`.
#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "it waits for other processes, in wall time")]

pub mod ceph;
pub mod checker;
pub mod content;
pub mod daemon;
pub mod drive;
pub mod encryption;
pub mod front_end;
pub mod life;
pub mod load;
pub mod memory;
pub mod report;
pub mod requests;
pub mod session;
pub mod shape;
pub mod volume;

pub use aryk_guest_tests::random;
