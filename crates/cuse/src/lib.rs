//! Character devices that answer Linux's NVMe ioctls, so that `nvme` and `smartctl` work on a drive that this process holds.
//!
//! [`Device::create`] speaks the FUSE protocol with `/dev/cuse`, and the kernel creates `/dev/NAME`. One thread per device, in
//! control context, reads the requests of the device's callers. It passes the NVMe commands among them to the owner's
//! [`NvmeDevice`], and writes the answers back; it never waits for a command. This crate knows neither the driver nor the block
//! layer.
//!
//! # What a caller may do
//! The kernel creates `/dev/NAME` for root alone (mode 0600); a udev rule for the subsystem `cuse` may change that. Beyond these
//! permissions, each command needs a verdict of [`policy`]:
//!
//! | ioctl | answer |
//! | --- | --- |
//! | `NVME_IOCTL_ID` | the namespace's ID; `ENOTTY` at a controller's device, as the kernel's driver answers |
//! | `NVME_IOCTL_ADMIN_CMD`, `…ADMIN64_CMD` | commands that read: always; commands that change the drive: with [`Access::Change`] |
//! | `NVME_IOCTL_RESET` | with [`Access::Change`] |
//! | `NVME_IOCTL_RESCAN` | always |
//! | `NVME_IOCTL_SUBSYS_RESET` | `EOPNOTSUPP`: it would reset controllers of other owners |
//! | `NVME_IOCTL_IO_CMD`, `…IO64_CMD`, `…IO64_CMD_VEC`, `NVME_IOCTL_SUBMIT_IO` | `EPERM`, reads too |
//!
//! I/O commands are refused because the namespaces belong to VMs: a write would destroy their data, and a read would pass their
//! data and their limits by. Tools for a drive's health need neither.
//!
//! | errno | reason |
//! | --- | --- |
//! | `EPERM` | the policy refuses the command |
//! | `EINVAL` | a field of the ioctl's structure is wrong, or the caller changed the structure during the call |
//! | `EMSGSIZE` | the command transfers more than [`DATA_MAX`] bytes, or more than the controller (MDTS); tools read long logs in parts |
//! | `EBUSY` | [`IN_FLIGHT_MAX`] commands are in flight |
//! | `EINTR` | a signal ended the call; the controller still executes the command |
//! | `ENOTTY` | not an NVMe ioctl |
//!
//! # Trust
//! The caller's bytes are hostile: they are copied once, and checked. The kernel copies to and from the caller's memory, at
//! addresses that the caller's structure names, so a wrong address is the caller's `EFAULT`. In the other direction, this process
//! can ask the kernel for any memory of a caller during its ioctl. Therefore callers, which are often root's tools, trust this
//! process: permission to open `/dev/cuse` can become root's rights, as soon as root runs a tool on the device.
#![forbid(unsafe_code)]

mod device;
mod ioctl;
pub mod policy;
mod request;
mod session;
mod wire;

pub use device::{Answer, CuseError, Device, IN_FLIGHT_MAX, NvmeDevice};
pub use ioctl::Shape;
pub use policy::Access;
pub use request::{AdminCommand, Caller, Completion, DATA_MAX, Data, PAGE, Request};
pub use rustix::io::Errno;
pub use session::{Node, Received, receive};
