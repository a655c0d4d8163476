//! NVMe drives of this host: the identity, temperature, uses and neighbours of each. Control context.

use super::usage::Uses;
use super::{BlockDevice, FunctionInfo, Sysfs, Usage, names};
use crate::{Address, PciError};
use std::path::Path;

/// An NVMe I/O controller of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// The PCI function of the controller.
    pub function: FunctionInfo,
    /// What the kernel's driver read from the controller; `None` if another driver, or none, drives it.
    pub identity: Option<Identity>,
    /// Composite temperature in millidegrees Celsius, if the kernel's driver measures it.
    pub temperature: Option<i32>,
    /// The block devices of the kernel's driver: one per namespace.
    pub block_devices: Vec<BlockDevice>,
    /// The users of its character devices, and those of the controller as a whole.
    pub controller_users: Vec<Usage>,
    /// The processes that have its VFIO files open.
    pub vfio_users: Vec<Usage>,
    /// The other functions of its IOMMU group.
    pub neighbours: Vec<FunctionInfo>,
}

/// Texts by which a controller identifies itself (NVM Express Base Specification 2.0 §5.17.2.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Model number.
    pub model: String,
    /// Serial number.
    pub serial: String,
    /// Firmware revision.
    pub firmware: String,
}

impl Drive {
    /// The uses of the drive: by block and character devices of the kernel, or by VFIO.
    pub fn usage(&self) -> impl Iterator<Item = &Usage> {
        let of_namespaces = self.block_devices.iter().flat_map(|device| &device.usage);
        of_namespaces.chain(&self.controller_users).chain(&self.vfio_users)
    }

    /// The functions of the IOMMU group whose drivers keep VFIO from opening this one.
    pub fn blockers(&self) -> impl Iterator<Item = &FunctionInfo> {
        self.neighbours.iter().filter(|other| other.blocks_group())
    }
}

impl Sysfs {
    /// All NVMe I/O controllers with their uses, by address.
    ///
    /// # Errors
    /// [`PciError::Os`] if sysfs or procfs cannot be read. Functions that the kernel removes during the call are left out.
    pub fn nvme_drives(&self) -> Result<Vec<Drive>, PciError> {
        let uses = self.uses()?;
        self.nvme_functions()?.into_iter().map(|function| self.drive(function, &uses)).collect()
    }

    fn drive(&self, function: FunctionInfo, uses: &Uses) -> Result<Drive, PciError> {
        let address = function.address;
        let mut neighbours = function.group.map_or(Ok(Vec::new()), |group| self.group_members(group))?;
        neighbours.retain(|other| other.address != address);
        Ok(Drive {
            identity: self.identity(address)?,
            temperature: self.temperature(address)?,
            block_devices: self.block_devices_with(address, uses)?,
            controller_users: self.controller_users_with(address, uses)?,
            vfio_users: self.vfio_users_with(&function, uses),
            neighbours,
            function,
        })
    }

    fn identity(&self, address: Address) -> Result<Option<Identity>, PciError> {
        let controllers = self.directory(address).join("nvme");
        let Some(controller) = names(&controllers)?.pop_first() else { return Ok(None) };
        let text = |file| text(&controllers.join(&controller).join(file));
        Ok(Some(Identity { model: text("model"), serial: text("serial"), firmware: text("firmware_rev") }))
    }

    /// The first sensor of the drive. Its directory is below the controller, or, before Linux 5.16, below the function.
    fn temperature(&self, address: Address) -> Result<Option<i32>, PciError> {
        let function = self.directory(address);
        let mut parents = vec![function.join("hwmon")];
        for controller in names(&function.join("nvme"))? {
            let controller = function.join("nvme").join(controller);
            parents.extend([controller.join("hwmon"), controller]);
        }
        for parent in parents {
            for monitor in names(&parent)?.into_iter().filter(|name| name.starts_with("hwmon")) {
                if let Ok(degrees) = text(&parent.join(monitor).join("temp1_input")).parse() {
                    return Ok(Some(degrees));
                }
            }
        }
        Ok(None)
    }
}

/// The text of a drive, which may contain any bytes; empty if there is none.
fn text(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}
