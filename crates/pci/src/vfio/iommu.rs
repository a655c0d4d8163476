//! The two ways to the kernel's IOMMU: a container of groups (type 1), and iommufd. Control context.

use super::ioctl;
use super::space::{Iommu, MAPPINGS_MAX, Space};
use crate::PciError;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// A container: groups that share an address space. It has an IOMMU while it has a group.
#[derive(Debug)]
pub(super) struct Container {
    fd: Arc<OwnedFd>,
    pub(super) space: Arc<Space>,
}

#[derive(Debug)]
struct Type1(Arc<OwnedFd>);

impl Container {
    /// A new container with the opened group `group`.
    pub(super) fn with(group: &OwnedFd, dev: &Path, name: &str) -> Result<Self, PciError> {
        let path = dev.join("vfio/vfio");
        let fd = open_device(&path).map_err(|errno| match errno {
            Errno::NOENT | Errno::NODEV => PciError::NoDriver,
            errno => open_error(errno, &path, name),
        })?;
        match ioctl::has_type1(fd.as_fd()) {
            Ok(true) => {}
            Ok(false) => {
                return Err(PciError::Unsupported("a kernel without IOMMU type 1 (vfio_iommu_type1)"));
            }
            Err(errno) => return Err(PciError::os("ask VFIO for its version", errno)),
        }
        let join = ioctl::set_container(group.as_fd(), fd.as_fd());
        join.map_err(|errno| PciError::os("add an IOMMU group to a container", errno))?;
        ioctl::set_iommu(fd.as_fd()).map_err(|errno| match errno {
            // The IOMMU does not remap interrupts, so a device could raise any interrupt of the host.
            Errno::PERM => PciError::NoInterruptRemapping { name: name.to_owned() },
            errno => PciError::os("attach an IOMMU group to the IOMMU", errno),
        })?;
        let info = ioctl::iommu(fd.as_fd());
        let info = info.map_err(|errno| PciError::os("read the IOMMU's properties", errno))?;
        let fd = Arc::new(fd);
        let space = Space::new(Box::new(Type1(Arc::clone(&fd))), info.room.unwrap_or(MAPPINGS_MAX))?;
        Ok(Self { fd, space: Arc::new(space) })
    }

    /// Adds a group. Returns `false` if its IOMMU cannot share the address space: the group needs a container of its own.
    pub(super) fn join(&self, group: &OwnedFd) -> Result<bool, PciError> {
        match ioctl::set_container(group.as_fd(), self.fd.as_fd()) {
            Ok(()) => self.space.refresh().map(|()| true),
            // Other ranges than those that are mapped, or another kind of IOMMU.
            Err(Errno::INVAL | Errno::NODEV | Errno::BUSY) => Ok(false),
            Err(errno) => Err(PciError::os("add an IOMMU group to a container", errno)),
        }
    }
}

impl Iommu for Type1 {
    fn ranges(&self) -> Result<Vec<(u64, u64)>, Errno> {
        Ok(ioctl::iommu(self.0.as_fd())?.ranges)
    }

    fn map(&self, address: u64, iova: u64, len: u64) -> Result<(), Errno> {
        ioctl::map(self.0.as_fd(), address, iova, len)
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<u64, Errno> {
        ioctl::unmap(self.0.as_fd(), iova, len)
    }
}

/// Why iommufd has no address space for this process.
#[derive(Debug)]
pub(super) enum OpenIommufd {
    /// Its file cannot be opened.
    Open(Errno),
    /// It refuses.
    Use(PciError),
}

impl From<PciError> for OpenIommufd {
    fn from(error: PciError) -> Self {
        Self::Use(error)
    }
}

/// An address space of iommufd.
#[derive(Debug)]
pub(super) struct Iommufd {
    fd: Arc<OwnedFd>,
    id: u32,
    pub(super) space: Arc<Space>,
}

#[derive(Debug)]
struct AddressSpace {
    iommufd: Arc<OwnedFd>,
    id: u32,
}

impl Iommufd {
    pub(super) fn open(dev: &Path) -> Result<Self, OpenIommufd> {
        let fd = Arc::new(open_device(&dev.join("iommu")).map_err(OpenIommufd::Open)?);
        let id = ioctl::new_address_space(fd.as_fd());
        let id = id.map_err(|errno| PciError::os("create an address space of iommufd", errno))?;
        // iommufd has no limit of mappings; memory limits them.
        let space = Space::new(Box::new(AddressSpace { iommufd: Arc::clone(&fd), id }), u32::MAX)?;
        Ok(Self { fd, id, space: Arc::new(space) })
    }

    /// Makes an opened device use this address space. Returns `false` if its IOMMU cannot share it.
    pub(super) fn attach(&self, device: &OwnedFd, name: &str) -> Result<bool, PciError> {
        ioctl::bind(device.as_fd(), self.fd.as_fd()).map_err(|errno| match errno {
            // Another process has bound the device (EINVAL), or opened its group (EBUSY).
            Errno::INVAL | Errno::BUSY => in_use(name, "/dev/vfio/devices/*"),
            Errno::NODEV => gone(name),
            errno => PciError::os("bind a device to iommufd", errno),
        })?;
        self.attach_bound(device, name)
    }

    /// As [`Iommufd::attach`], of a device that was bound to this iommufd before.
    fn attach_bound(&self, device: &OwnedFd, name: &str) -> Result<bool, PciError> {
        match ioctl::attach(device.as_fd(), self.id) {
            Ok(()) => self.space.refresh().map(|()| true),
            Err(Errno::INVAL | Errno::ADDRINUSE) => Ok(false),
            Err(Errno::PERM) => Err(PciError::NoInterruptRemapping { name: name.to_owned() }),
            Err(Errno::NODEV) => Err(gone(name)),
            Err(errno) => Err(PciError::os("attach a device to an address space", errno)),
        }
    }
}

impl Iommu for AddressSpace {
    fn ranges(&self) -> Result<Vec<(u64, u64)>, Errno> {
        ioctl::address_space_ranges(self.iommufd.as_fd(), self.id)
    }

    fn map(&self, address: u64, iova: u64, len: u64) -> Result<(), Errno> {
        ioctl::map_in(self.iommufd.as_fd(), self.id, address, iova, len)
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<u64, Errno> {
        match ioctl::unmap_in(self.iommufd.as_fd(), self.id, iova, len) {
            // Nothing is mapped there.
            Err(Errno::NOENT) => Ok(0),
            result => result,
        }
    }
}

/// Opens a file of VFIO, which no child process inherits.
pub(super) fn open_device(path: &Path) -> Result<OwnedFd, Errno> {
    open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// The meaning of a failed `open` of a file of VFIO.
pub(super) fn open_error(errno: Errno, path: &Path, name: &str) -> PciError {
    let path = || path.display().to_string();
    match errno {
        // The driver creates the file when it is bound, and removes it with the device.
        Errno::NOENT | Errno::NODEV | Errno::NXIO => gone(name),
        Errno::ACCESS | Errno::PERM => PciError::Permission { path: path() },
        Errno::BUSY => in_use(name, &path()),
        errno => PciError::os("open a VFIO device", errno),
    }
}

fn in_use(name: &str, path: &str) -> PciError {
    let reason = format!("another process drives it; `fuser -v {path}` names the process");
    PciError::InUse { name: name.to_owned(), reason }
}

pub(super) fn gone(name: &str) -> PciError {
    PciError::Gone {
        name: name.to_owned(),
        reason: "the kernel removed it, or took it from vfio-pci".to_owned(),
    }
}
