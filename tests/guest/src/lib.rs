//! A real Linux guest in QEMU, and the tests that need one.
//!
//! | module      | owns                                                                     |
//! | ----------- | ------------------------------------------------------------------------ |
//! | [`image`]   | the guest's kernel, initrd and tools disk, assembled once from Debian's packages |
//! | [`vm`] | one VM and its guest: boot, talk, pause, kill                            |
//! | [`process`] | child processes that cannot outlive this process                         |
//! | `qmp`       | a running QEMU's monitor                                                 |
//! | [`daemon`]  | `arykd` under test, controlled by `aryk` as an operator does             |
//! | [`fio`]     | fio's measurements in the guest                                          |
//! | [`hotplug`] | disks of a SCSI controller that are plugged and unplugged: rounds, special situations, sg3-utils |
//! | [`random`]  | random numbers that a seed repeats                                       |
//! | [`cases`]   | the tests themselves                                                     |
//!
//! Runs in ordinary processes on ordinary threads, and waits in wall time. A guest boots in about two seconds under TCG:
//! QEMU enters the uncompressed kernel through PVH, the initrd holds only busybox and a few modules, and everything
//! larger is read on demand from a disk.
#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "it waits for other processes, in wall time")]

pub mod cases;
mod cpio;
pub mod daemon;
pub mod fio;
pub mod hotplug;
pub mod image;
mod kernel;
mod pairwise;
pub mod peer;
pub mod process;
mod qmp;
pub mod random;
pub mod vm;

pub use daemon::Daemon;
pub use image::Image;
pub use process::Process;
pub use vm::{Disk, Guest, Link, Nvme, Port, Vm};
