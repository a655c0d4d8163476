//! What a caller of the device requests of its owner, and the owner's answer. Pure.

use crate::policy;

/// The most data of one admin command, in bytes. The kernel passes 32 pages in one ioctl, with the command's structure or result.
pub const DATA_MAX: usize = 31 * PAGE;
/// The least data that the owner gives the controller: what most commands transfer, without a length of their own.
pub const PAGE: usize = 4096;

/// The process that made the system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The process runs as this user.
    pub uid: u32,
    /// The process runs as this group.
    pub gid: u32,
    /// The process; 0 if it is not visible in the PID namespace of this process.
    pub pid: u32,
}

/// Data of an admin command. The command alone decides how much the controller transfers, so the data has that length, and at
/// least [`PAGE`], even if the caller claims less.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// None.
    None,
    /// The controller writes up to this number of bytes, [`PAGE`] to [`DATA_MAX`].
    FromController(usize),
    /// The controller reads these bytes, [`PAGE`] to [`DATA_MAX`] of them: the caller's, then zeroes.
    ToController(Vec<u8>),
}

/// An admin command that the [policy](crate::policy) admits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminCommand {
    /// CDW0.OPC.
    pub opcode: u8,
    /// NSID.
    pub nsid: u32,
    /// CDW10 to CDW15.
    pub cdw10_15: [u32; 6],
    /// The data.
    pub data: Data,
}

impl AdminCommand {
    /// Whether the command changes the drive, and needed [`crate::Access::Change`]: it may take minutes, and belongs into the
    /// owner's log.
    pub fn is_change(&self) -> bool {
        policy::verdict(self.opcode, self.cdw10_15[0]) == policy::Verdict::Change
    }
}

/// A request to the device's owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// An admin command.
    Admin(AdminCommand),
    /// A reset of the controller.
    Reset,
    /// A new reading of the namespaces.
    Rescan,
}

/// How a request ended. For a reset and a rescan, the default value is the success.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// The status field without the phase tag: SC, SCT, CRD, M and DNR. NVMe 2.0 §3.3.3.2.1.
    pub status: u16,
    /// DW0.
    pub result: u32,
    /// What the controller wrote. Bytes that are missing reach the caller as zeroes, bytes beyond its length do not.
    pub data: Vec<u8>,
}
