//! PCI functions as the kernel shows them in sysfs: their drivers, IOMMU groups and block devices. Control context.
//!
//! All functions read files below a root, which tests replace.

use crate::{Address, PciError};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

mod binding;
mod drive;
mod usage;

pub use drive::{Drive, Identity};
pub use usage::{BlockDevice, Usage};

/// Class, subclass and programming interface of an NVMe I/O controller (PCI Code and ID Assignment Specification).
pub const CLASS_NVME: u32 = 0x01_08_02;

/// The kernel's file systems.
#[derive(Clone, Debug)]
pub struct Sysfs {
    sys: PathBuf,
    proc: PathBuf,
    dev: PathBuf,
}

/// A PCI function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionInfo {
    /// The address on this host.
    pub address: Address,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Class, subclass and programming interface.
    pub class: u32,
    /// The driver that the function is bound to.
    pub driver: Option<String>,
    /// Its IOMMU group; `None` without an IOMMU.
    pub group: Option<u32>,
    /// The node of memory that is close to the function.
    pub numa_node: Option<u32>,
}

impl FunctionInfo {
    /// Whether the function is bound to VFIO, so that a process can drive it.
    pub fn is_bound_to_vfio(&self) -> bool {
        self.driver.as_deref().is_some_and(is_vfio)
    }

    /// Whether VFIO refuses the whole IOMMU group because of this function's driver.
    pub fn blocks_group(&self) -> bool {
        let driver = self.driver.as_deref();
        driver.is_some_and(|driver| !is_vfio(driver) && !HARMLESS_DRIVERS.contains(&driver))
    }
}

/// Whether this is vfio-pci, or a variant of it for certain devices, as `mlx5_vfio_pci`.
fn is_vfio(driver: &str) -> bool {
    driver.replace('-', "_").ends_with("vfio_pci")
}

/// Drivers that the kernel accepts beside VFIO in a group: they do no DMA.
const HARMLESS_DRIVERS: [&str; 2] = ["pcieport", "pci-stub"];

impl Default for Sysfs {
    fn default() -> Self {
        Self::at(Path::new("/"))
    }
}

impl Sysfs {
    /// The file systems `sys`, `proc` and `dev` below `root`.
    pub fn at(root: &Path) -> Self {
        Self { sys: root.join("sys"), proc: root.join("proc"), dev: root.join("dev") }
    }

    /// All NVMe I/O controllers, by address.
    ///
    /// # Errors
    /// [`PciError::Os`] if sysfs cannot be read. Functions that the kernel removes during the call are left out.
    pub fn nvme_functions(&self) -> Result<Vec<FunctionInfo>, PciError> {
        let mut found = Vec::new();
        for name in names(&self.sys.join("bus/pci/devices"))? {
            let Ok(address) = name.parse() else { continue };
            match self.function(address) {
                Ok(info) if info.class == CLASS_NVME => found.push(info),
                Ok(_) | Err(PciError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        found.sort_unstable_by_key(|info| info.address);
        Ok(found)
    }

    /// Reads the properties of one function.
    ///
    /// # Errors
    /// [`PciError::NotFound`]; [`PciError::Os`] if sysfs cannot be read.
    pub fn function(&self, address: Address) -> Result<FunctionInfo, PciError> {
        let directory = self.directory(address);
        let number = |file: &str, bits: u32| {
            let text = read(&directory.join(file))
                .map_err(|error| named(error, &address.to_string(), "read sysfs"))?;
            let value = u64::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok();
            value.filter(|value| value >> bits == 0).ok_or(PciError::os("parse sysfs", Errno::INVAL))
        };
        let numa_node = read(&directory.join("numa_node")).ok();
        let group = link_name(&directory.join("iommu_group"))?;
        Ok(FunctionInfo {
            address,
            vendor: number("vendor", 16)? as u16,
            device: number("device", 16)? as u16,
            class: number("class", 24)? as u32,
            driver: link_name(&directory.join("driver"))?,
            group: group.and_then(|name| name.parse().ok()),
            // -1: the host has only one.
            numa_node: numa_node.and_then(|text| text.trim().parse().ok()),
        })
    }

    /// Checks that the function exists, is an NVMe controller, is bound to VFIO and behind an IOMMU, and that its group has no
    /// function of another driver.
    ///
    /// # Errors
    /// [`PciError::NotFound`], [`PciError::WrongClass`], [`PciError::NotBound`], [`PciError::NoIommu`],
    /// [`PciError::SharedGroup`].
    pub fn check_openable(&self, address: Address) -> Result<FunctionInfo, PciError> {
        let info = self.controller(address)?;
        let name = address.to_string();
        let Some(group) = info.group else { return Err(PciError::NoIommu { name }) };
        if !info.is_bound_to_vfio() {
            let driver = info.driver.clone().unwrap_or_else(|| "no driver".to_owned());
            return Err(PciError::NotBound { name, driver });
        }
        // The kernel invents such a group for a device without an IOMMU.
        let group_name = self.group_directory(group).join("name");
        if read(&group_name).is_ok_and(|text| text.trim() == "vfio-noiommu") {
            return Err(PciError::NoIommu { name });
        }
        for other in self.group_members(group)? {
            if other.address != address && other.blocks_group() {
                let driver = other.driver.unwrap_or_default();
                return Err(PciError::SharedGroup { name, group, other: other.address.to_string(), driver });
            }
        }
        Ok(info)
    }

    /// The PCI functions of an IOMMU group, by address.
    ///
    /// # Errors
    /// [`PciError::Os`] if sysfs cannot be read. Functions that the kernel removes during the call are left out.
    pub fn group_members(&self, group: u32) -> Result<Vec<FunctionInfo>, PciError> {
        let mut members = Vec::new();
        for name in names(&self.group_directory(group).join("devices"))? {
            // A device on another bus is in no group with PCI functions; if there were one, VFIO itself refuses the group.
            let Ok(address) = name.parse() else { continue };
            match self.function(address) {
                Ok(info) => members.push(info),
                Err(PciError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        members.sort_unstable_by_key(|info| info.address);
        Ok(members)
    }

    /// The files by which a process opens a function that is bound to VFIO: those of its group and of itself, as far as the
    /// kernel has them.
    ///
    /// # Errors
    /// As [`Sysfs::function`].
    pub fn vfio_files(&self, address: Address) -> Result<Vec<PathBuf>, PciError> {
        let info = self.function(address)?;
        let files = self.vfio_names(&info).into_iter().map(|name| self.dev.join(name));
        Ok(files.filter(|file| file.exists()).collect())
    }

    /// The names of these files below `/dev`.
    fn vfio_names(&self, info: &FunctionInfo) -> Vec<String> {
        let group = info.group.map(|group| format!("vfio/{group}"));
        let device = self.vfio_device(info.address).map(|device| format!("vfio/devices/{device}"));
        group.into_iter().chain(device).collect()
    }

    /// The name of the function's character device below `/dev/vfio/devices`, if the kernel has these.
    pub(crate) fn vfio_device(&self, address: Address) -> Option<String> {
        names(&self.directory(address).join("vfio-dev"))
            .ok()?
            .into_iter()
            .find(|name| name.starts_with("vfio"))
    }

    pub(crate) fn dev(&self) -> &Path {
        &self.dev
    }

    fn directory(&self, address: Address) -> PathBuf {
        self.sys.join("bus/pci/devices").join(address.to_string())
    }

    fn group_directory(&self, group: u32) -> PathBuf {
        self.sys.join(format!("kernel/iommu_groups/{group}"))
    }
}

/// The names in a directory, sorted; none if there is no such directory.
fn names(directory: &Path) -> Result<BTreeSet<String>, PciError> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries.map_err(|error| os(&error))?,
    };
    // Names of the kernel are ASCII.
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
}

fn read(path: &Path) -> std::io::Result<String> {
    std::fs::read_to_string(path)
}

/// The last part of a link's target, if there is such a link.
fn link_name(path: &Path) -> Result<Option<String>, PciError> {
    match std::fs::read_link(path) {
        Ok(target) => Ok(target.file_name().and_then(|name| name.to_str()).map(str::to_owned)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(os(&error)),
    }
}

/// A failure of sysfs.
fn os(error: &Error) -> PciError {
    PciError::os("read sysfs", errno(error))
}

fn errno(error: &Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// A failure of a function's file: without the file there is no function.
fn named(error: Error, name: &str, what: &'static str) -> PciError {
    match error.kind() {
        ErrorKind::NotFound => PciError::NotFound { name: name.to_owned() },
        _ => PciError::os(what, errno(&error)),
    }
}

#[cfg(test)]
pub(crate) mod tests;
