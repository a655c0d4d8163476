//! Failures of PCI functions, by what the operator can do about them.
//!
//! Each transport gives each errno of its calls a meaning. An errno without one is [`PciError::Os`], after which the caller knows
//! nothing about the state of the function: the caller closes the function and opens it again.

use aryk_dma::MapError;
use rustix::io::Errno;

/// Why a call on a PCI function failed.
#[derive(Debug, thiserror::Error)]
pub enum PciError {
    /// There is no such function.
    #[error("{name}: no such PCI function (`lspci -D` lists all)")]
    NotFound {
        /// Address or path.
        name: String,
    },
    /// Another process, or the kernel, uses the function.
    #[error("{name} is in use: {reason}")]
    InUse {
        /// Address or path.
        name: String,
        /// The user of the function, or the command that names the user.
        reason: String,
    },
    /// The function is no NVMe controller.
    #[error(
        "{name} is {kind} (PCI class {class:06x}), not an NVMe controller (class 010802): `aryk nvme list` shows the controllers"
    )]
    WrongClass {
        /// Address.
        name: String,
        /// Class, subclass and programming interface.
        class: u32,
        /// The class for people, as "an Ethernet controller".
        kind: &'static str,
    },
    /// The driver vfio-pci is not loaded.
    #[error("the kernel's driver vfio-pci is not loaded: run `modprobe vfio-pci`")]
    NoDriver,
    /// The process lacks a permission.
    #[error(
        "no permission to open {path}: give this process's user access to the file (a udev rule, or chown), or run as root"
    )]
    Permission {
        /// The file.
        path: String,
    },
    /// The host has no IOMMU, or the function is outside of it.
    #[error(
        "{name} has no IOMMU: enable VT-d or AMD-Vi in the firmware and boot the kernel with intel_iommu=on or amd_iommu=on iommu=pt"
    )]
    NoIommu {
        /// Address.
        name: String,
    },
    /// The function is bound to a driver of the kernel, or to none.
    #[error("{name} is bound to {driver}, not to vfio-pci: run `aryk nvme bind {name}`")]
    NotBound {
        /// Address.
        name: String,
        /// The driver, or "no driver".
        driver: String,
    },
    /// A function of the same IOMMU group belongs to a driver of the kernel.
    #[error(
        "{name} shares IOMMU group {group} with {other}, which is bound to {driver}: bind {other} to vfio-pci too, or move one of them to another slot"
    )]
    SharedGroup {
        /// Address.
        name: String,
        /// Number of the group.
        group: u32,
        /// Address of the other function.
        other: String,
        /// The driver of the other function.
        driver: String,
    },
    /// The IOMMU cannot isolate interrupts, and the kernel refuses that.
    #[error(
        "{name}: the IOMMU does not remap interrupts: enable interrupt remapping (x2APIC) in the firmware, or load vfio_iommu_type1 with allow_unsafe_interrupts=1"
    )]
    NoInterruptRemapping {
        /// Address.
        name: String,
    },
    /// A mapping would lock more memory than the process may.
    #[error(
        "cannot lock {len} bytes of memory for DMA: RLIMIT_MEMLOCK is {limit}: raise it (`ulimit -l unlimited`, LimitMEMLOCK=infinity in the systemd unit)"
    )]
    LockLimit {
        /// Bytes of the mapping.
        len: u64,
        /// The limit, for people.
        limit: String,
    },
    /// The container has as many DMA mappings as it may.
    #[error(
        "no more DMA mappings: {limit} are the limit: map fewer, larger regions (hugepages), or raise the parameter dma_entry_limit of the module vfio_iommu_type1"
    )]
    MappingLimit {
        /// The limit of mappings.
        limit: u32,
    },
    /// A server can only access memory whose file it receives.
    #[error(
        "{name} cannot access {len} bytes of memory in place: a vfio-user server maps memory by its file, and this process has none for memory of a VM: copy the data through buffers (DMA mode `bounce`)"
    )]
    NoFile {
        /// Path.
        name: String,
        /// Bytes of the mapping.
        len: u64,
    },
    /// There is no free IOVA range.
    #[error("no free range of {len} bytes in the IOMMU's address space (aligned to {align:#x})")]
    AddressSpace {
        /// Bytes of the mapping.
        len: u64,
        /// Required alignment.
        align: u64,
    },
    /// A range outside of the registers, of configuration space or of the vectors, or not aligned.
    #[error("{what}: offset {offset:#x}, length {len:#x} is out of bounds or not aligned")]
    OutOfBounds {
        /// What the range is of.
        what: &'static str,
        /// First byte, or first vector.
        offset: u64,
        /// Bytes, or vectors.
        len: u64,
    },
    /// No mapping has this address and length.
    #[error("no DMA mapping of {len:#x} bytes at IOVA {iova:#x}")]
    NotMapped {
        /// Address.
        iova: u64,
        /// Bytes.
        len: u64,
    },
    /// The function, the kernel or the transport cannot do this.
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    /// The function was removed, or its server closed the connection.
    #[error("{name} is gone: {reason}")]
    Gone {
        /// Address or path.
        name: String,
        /// The failure that this process saw.
        reason: String,
    },
    /// The server did not reply.
    #[error("{name} did not reply to {what} within {seconds} s")]
    TimedOut {
        /// Path.
        name: String,
        /// The request.
        what: &'static str,
        /// The limit.
        seconds: u64,
    },
    /// The server's reply breaks the protocol.
    #[error("{name}: invalid reply to {what}: {reason}")]
    Protocol {
        /// Path.
        name: String,
        /// The request.
        what: &'static str,
        /// The broken rule of the protocol.
        reason: String,
    },
    /// A failure without another meaning.
    #[error("cannot {what}: {errno}")]
    Os {
        /// What the process tried, as "map registers".
        what: &'static str,
        /// The kernel's or the server's error.
        errno: Errno,
    },
}

impl PciError {
    /// An errno without another meaning.
    pub const fn os(what: &'static str, errno: Errno) -> Self {
        Self::Os { what, errno }
    }

    /// A failed mapping of registers or memory of this process.
    pub(crate) const fn mapping(what: &'static str, error: MapError) -> Self {
        match error {
            MapError::Os(errno) => Self::Os { what, errno },
            MapError::BadRange { offset, len } => Self::OutOfBounds { what, offset, len },
            // Limits of guests' memory, which is not mapped here.
            MapError::NotMemory(_)
            | MapError::TooShort { .. }
            | MapError::NoRoom { .. }
            | MapError::TooMany { .. } => Self::Os { what, errno: Errno::INVAL },
        }
    }
}
