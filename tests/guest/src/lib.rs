//! A real Linux guest in QEMU, and the tests that need one.
//!
//! | module      | owns                                                                     |
//! | ----------- | ------------------------------------------------------------------------ |
//! | [`image`]   | the guest's kernel, initrd and tools disk, assembled once from Debian's packages |
//! | [`machine`] | one running guest: boot, talk, pause, kill                               |
//! | [`process`] | child processes that cannot outlive us                                   |
//! | `qmp`       | a running QEMU's monitor                                                 |
//! | [`daemon`]  | `arykd` under test, driven by `aryk` as an operator would                |
//! | [`fio`]     | what fio measured in the guest                                           |
//! | [`hotplug`] | disks of a SCSI controller that come and go: rounds, odd moments, what the guest sees |
//! | [`random`]  | randomness that a seed repeats                                           |
//! | [`cases`]   | the tests themselves                                                     |
//!
//! Runs in ordinary processes on ordinary threads; wall time is what it waits for. A guest boots in
//! about two seconds under TCG: the uncompressed kernel is entered through PVH, the initrd holds only
//! busybox and a few modules, and everything larger is read on demand from a disk.
#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "it waits for other processes, in wall time")]

pub mod cases;
mod cpio;
pub mod daemon;
pub mod fio;
pub mod hotplug;
pub mod image;
mod kernel;
pub mod machine;
mod pairwise;
pub mod peer;
pub mod process;
mod qmp;
pub mod random;
mod rpc;

pub use daemon::Daemon;
pub use image::Image;
pub use machine::{Disk, Guest, Link, Machine};
pub use process::Process;
