//! The structures that the host and the controller exchange, as in the NVMe Base Specification 2.0 and the NVM Command Set
//! Specification 1.0. Context: any.
//!
//! These definitions were written from the specifications only, and share nothing with the driver's: an error in one of
//! the two then shows as a failed test. Larger structures (identify data, log pages) have no types: the code that builds
//! one writes fields into a [`Page`] at the offsets that the specification lists.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a submission queue entry of the admin and NVM command sets.
pub(crate) const SQE_LEN: u64 = 64;
/// Bytes of a completion queue entry.
pub(crate) const CQE_LEN: u64 = 16;

/// A submission queue entry (NVMe 2.0 §3.3.3.1).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SubmissionEntry {
    /// Opcode.
    pub opcode: u8,
    /// Bits 1:0 FUSE, bits 7:6 PSDT.
    pub flags: u8,
    /// Command identifier.
    pub cid: U16,
    /// Namespace identifier.
    pub nsid: U32,
    /// Command Dword 2.
    pub cdw2: U32,
    /// Command Dword 3.
    pub cdw3: U32,
    /// Metadata pointer.
    pub mptr: U64,
    /// Data pointer: PRP entry 1 and 2, or one SGL descriptor.
    pub dptr: [u8; 16],
    /// Command Dword 10.
    pub cdw10: U32,
    /// Command Dword 11.
    pub cdw11: U32,
    /// Command Dword 12.
    pub cdw12: U32,
    /// Command Dword 13.
    pub cdw13: U32,
    /// Command Dword 14.
    pub cdw14: U32,
    /// Command Dword 15.
    pub cdw15: U32,
}

impl SubmissionEntry {
    pub(crate) fn prp1(&self) -> u64 {
        u64::from_le_bytes(first(&self.dptr))
    }

    pub(crate) fn prp2(&self) -> u64 {
        u64::from_le_bytes(first(&self.dptr[8..]))
    }

    /// 0: normal, 1: first command of a fused operation, 2: second command, 3: reserved.
    pub(crate) const fn fuse(&self) -> u8 {
        self.flags & 3
    }

    /// 0: PRPs; 1 or 2: SGLs; 3: reserved.
    pub(crate) const fn psdt(&self) -> u8 {
        self.flags >> 6
    }

    /// Starting LBA of commands with CDW10 and CDW11 for it.
    pub(crate) fn slba(&self) -> u64 {
        u64::from(self.cdw10.get()) | u64::from(self.cdw11.get()) << 32
    }

    /// Number of logical blocks, counted from one, of commands with bits 15:0 of CDW12 for it.
    pub(crate) fn blocks(&self) -> u64 {
        u64::from(self.cdw12.get() & 0xffff) + 1
    }
}

/// The first `N` bytes of `bytes`, which are at least as many.
pub(crate) fn first<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[..N]);
    out
}

/// A completion queue entry (NVMe 2.0 §3.3.3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CompletionEntry {
    /// Dword 0: the command's result.
    pub result: U32,
    /// Dword 1.
    pub reserved: U32,
    /// SQ Head Pointer.
    pub sq_head: U16,
    /// SQ Identifier.
    pub sqid: U16,
    /// Command identifier.
    pub cid: U16,
    /// Bit 0: Phase Tag. Bits 15:1: the status.
    pub status: U16,
}

/// The Status Field of a completion (NVMe 2.0 §3.3.3.2.1), without the Phase Tag: SC in bits 7:0, SCT in bits 10:8, CRD
/// in bits 12:11, M in bit 13, DNR in bit 14.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u16);

/// Bit 14 of a [`Status`]: Do Not Retry.
const DNR: u16 = 1 << 14;

impl Status {
    /// A status with Do Not Retry set: the same command would fail again.
    pub const fn new(sct: u8, sc: u8) -> Self {
        Self((sct as u16 & 7) << 8 | sc as u16 | DNR)
    }

    /// The same status with Do Not Retry cleared, and a Command Retry Delay (0 to 3).
    #[must_use]
    pub const fn retryable(self, crd: u8) -> Self {
        Self(self.0 & !DNR & !(3 << 11) | (crd as u16 & 3) << 11)
    }

    /// The same status with a Command Retry Delay of 0.
    pub(crate) const fn without_delay(self) -> Self {
        Self(self.0 & !(3 << 11))
    }

    /// The same status with More set: the error log has details.
    #[must_use]
    pub const fn with_more(self) -> Self {
        Self(self.0 | 1 << 13)
    }

    /// Status Code Type.
    pub const fn sct(self) -> u8 {
        (self.0 >> 8 & 7) as u8
    }

    /// Status Code.
    pub const fn sc(self) -> u8 {
        self.0 as u8
    }

    /// Successful Completion.
    pub const SUCCESS: Self = Self(0);

    pub(crate) const INVALID_OPCODE: Self = Self::new(0, 0x01);
    pub(crate) const INVALID_FIELD: Self = Self::new(0, 0x02);
    pub(crate) const CID_CONFLICT: Self = Self::new(0, 0x03);
    pub(crate) const DATA_TRANSFER_ERROR: Self = Self::new(0, 0x04).retryable(0);
    pub(crate) const ABORT_REQUESTED: Self = Self::new(0, 0x07).retryable(0);
    pub(crate) const SQ_DELETED: Self = Self::new(0, 0x08).retryable(0);
    pub(crate) const FUSED_FAILED: Self = Self::new(0, 0x09).retryable(0);
    pub(crate) const FUSED_MISSING: Self = Self::new(0, 0x0a);
    pub(crate) const INVALID_NAMESPACE: Self = Self::new(0, 0x0b);
    pub(crate) const COMMAND_SEQUENCE: Self = Self::new(0, 0x0c);
    pub(crate) const SGL_SEGMENT_INVALID: Self = Self::new(0, 0x0d);
    pub(crate) const SGL_COUNT_INVALID: Self = Self::new(0, 0x0e);
    pub(crate) const SGL_LENGTH_INVALID: Self = Self::new(0, 0x0f);
    pub(crate) const SGL_TYPE_INVALID: Self = Self::new(0, 0x11);
    pub(crate) const PRP_OFFSET_INVALID: Self = Self::new(0, 0x13);
    pub(crate) const ATOMIC_UNIT_EXCEEDED: Self = Self::new(0, 0x14);
    pub(crate) const SGL_OFFSET_INVALID: Self = Self::new(0, 0x16);
    pub(crate) const SANITIZE_IN_PROGRESS: Self = Self::new(0, 0x1d).retryable(0);
    pub(crate) const WRITE_PROTECTED: Self = Self::new(0, 0x20);
    pub(crate) const LBA_OUT_OF_RANGE: Self = Self::new(0, 0x80);
    pub(crate) const FORMAT_IN_PROGRESS: Self = Self::new(0, 0x84).retryable(0);

    pub(crate) const CQ_INVALID: Self = Self::new(1, 0x00);
    pub(crate) const INVALID_QID: Self = Self::new(1, 0x01);
    pub(crate) const INVALID_QUEUE_SIZE: Self = Self::new(1, 0x02);
    pub(crate) const AER_LIMIT: Self = Self::new(1, 0x05);
    pub(crate) const INVALID_FIRMWARE_SLOT: Self = Self::new(1, 0x06);
    pub(crate) const INVALID_FIRMWARE_IMAGE: Self = Self::new(1, 0x07);
    pub(crate) const INVALID_VECTOR: Self = Self::new(1, 0x08);
    pub(crate) const INVALID_LOG_PAGE: Self = Self::new(1, 0x09);
    pub(crate) const INVALID_FORMAT: Self = Self::new(1, 0x0a);
    pub(crate) const INVALID_QUEUE_DELETION: Self = Self::new(1, 0x0c);
    pub(crate) const FEATURE_NOT_SAVEABLE: Self = Self::new(1, 0x0d);
    pub(crate) const FEATURE_NOT_CHANGEABLE: Self = Self::new(1, 0x0e);
    pub(crate) const FEATURE_NOT_NAMESPACE_SPECIFIC: Self = Self::new(1, 0x0f);
    pub(crate) const OVERLAPPING_RANGE: Self = Self::new(1, 0x14);
    pub(crate) const INVALID_COMMAND_SET: Self = Self::new(1, 0x2c);
    pub(crate) const INSUFFICIENT_CAPACITY: Self = Self::new(1, 0x15);
    pub(crate) const NSID_UNAVAILABLE: Self = Self::new(1, 0x16);
    pub(crate) const ALREADY_ATTACHED: Self = Self::new(1, 0x18);
    pub(crate) const NOT_ATTACHED: Self = Self::new(1, 0x1a);
    pub(crate) const CONTROLLER_LIST_INVALID: Self = Self::new(1, 0x1c);
    pub(crate) const COMMAND_SIZE_LIMIT: Self = Self::new(1, 0x83);

    pub(crate) const UNRECOVERED_READ: Self = Self::new(2, 0x81);
    pub(crate) const COMPARE_FAILURE: Self = Self::new(2, 0x85);
    pub(crate) const ACCESS_DENIED: Self = Self::new(2, 0x86);
}

/// Opcodes of the admin command set (NVMe 2.0 §5).
pub mod admin {
    /// Delete I/O Submission Queue.
    pub const DELETE_SQ: u8 = 0x00;
    /// Create I/O Submission Queue.
    pub const CREATE_SQ: u8 = 0x01;
    /// Get Log Page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Delete I/O Completion Queue.
    pub const DELETE_CQ: u8 = 0x04;
    /// Create I/O Completion Queue.
    pub const CREATE_CQ: u8 = 0x05;
    /// Identify.
    pub const IDENTIFY: u8 = 0x06;
    /// Abort.
    pub const ABORT: u8 = 0x08;
    /// Set Features.
    pub const SET_FEATURES: u8 = 0x09;
    /// Get Features.
    pub const GET_FEATURES: u8 = 0x0a;
    /// Asynchronous Event Request.
    pub const ASYNC_EVENT: u8 = 0x0c;
    /// Namespace Management.
    pub const NAMESPACE_MANAGEMENT: u8 = 0x0d;
    /// Firmware Commit.
    pub const FIRMWARE_COMMIT: u8 = 0x10;
    /// Firmware Image Download.
    pub const FIRMWARE_DOWNLOAD: u8 = 0x11;
    /// Namespace Attachment.
    pub const NAMESPACE_ATTACHMENT: u8 = 0x15;
    /// Keep Alive.
    pub const KEEP_ALIVE: u8 = 0x18;
    /// Doorbell Buffer Config.
    pub const DOORBELL_BUFFER: u8 = 0x7c;
    /// Format NVM.
    pub const FORMAT_NVM: u8 = 0x80;
    /// Security Receive.
    pub const SECURITY_RECEIVE: u8 = 0x82;
    /// Sanitize.
    pub const SANITIZE: u8 = 0x84;
}

/// Opcodes of the NVM command set (NVM Command Set 1.0 §3).
pub mod nvm {
    /// Flush.
    pub const FLUSH: u8 = 0x00;
    /// Write.
    pub const WRITE: u8 = 0x01;
    /// Read.
    pub const READ: u8 = 0x02;
    /// Write Uncorrectable.
    pub const WRITE_UNCORRECTABLE: u8 = 0x04;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    /// Verify.
    pub const VERIFY: u8 = 0x0c;
    /// Copy.
    pub const COPY: u8 = 0x19;
}

/// A structure of 4,096 bytes that the controller fills field by field, at the offsets of the specification.
pub(crate) struct Page(pub(crate) Box<[u8; 4096]>);

impl Page {
    pub(crate) fn new() -> Self {
        Self(Box::new([0; 4096]))
    }

    pub(crate) fn bytes(&mut self, at: usize, value: &[u8]) {
        self.0[at..at + value.len()].copy_from_slice(value);
    }

    pub(crate) fn u8(&mut self, at: usize, value: u8) {
        self.0[at] = value;
    }

    pub(crate) fn u16(&mut self, at: usize, value: u16) {
        self.bytes(at, &value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, at: usize, value: u32) {
        self.bytes(at, &value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, at: usize, value: u64) {
        self.bytes(at, &value.to_le_bytes());
    }

    pub(crate) fn u128(&mut self, at: usize, value: u128) {
        self.bytes(at, &value.to_le_bytes());
    }

    /// An ASCII field of `len` bytes, padded with spaces.
    pub(crate) fn ascii(&mut self, at: usize, len: usize, value: &str) {
        let field = &mut self.0[at..at + len];
        field.fill(b' ');
        for (byte, c) in field.iter_mut().zip(value.bytes()) {
            *byte = if c.is_ascii_graphic() || c == b' ' { c } else { b'?' };
        }
    }
}
