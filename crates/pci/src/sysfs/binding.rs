//! Binding a function to vfio-pci, and back to the kernel's driver. Control context, by the command line: a binding takes as long
//! as the drivers need.

use super::{Sysfs, Usage, errno};
use crate::{Address, PciError};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::path::PathBuf;

/// The driver that gives functions to processes.
const VFIO: &str = "vfio-pci";

/// Files that are written one after the other.
pub(super) type Plan = Vec<(PathBuf, String)>;

impl Sysfs {
    /// Binds an NVMe controller to vfio-pci. Without effect if that is its driver.
    ///
    /// # Errors
    /// [`PciError::WrongClass`] for another kind of device; [`PciError::InUse`] if something uses a block device of the
    /// controller, which names the uses; [`PciError::NoDriver`] if vfio-pci is not loaded.
    pub fn bind(&self, address: Address) -> Result<(), PciError> {
        let Some(plan) = self.plan_bind(address)? else { return Ok(()) };
        self.check_exclusive(address)?;
        let result = run(&plan).and_then(|()| self.check_driver(address, true));
        if result.is_err() {
            // The function had the kernel's driver, or none: the kernel chooses again.
            let _ = run(&self.plan_release(address, self.function(address)?.driver.is_some()));
        }
        result
    }

    /// Returns a function from vfio-pci to the kernel, which chooses a driver for it. Without effect if vfio-pci is not its
    /// driver.
    ///
    /// # Errors
    /// [`PciError::InUse`] if a process drives the function: the kernel would wait until that process closes it.
    pub fn unbind(&self, address: Address) -> Result<(), PciError> {
        match self.plan_unbind(address)? {
            Some(plan) => run(&plan).and_then(|()| self.check_driver(address, false)),
            None => Ok(()),
        }
    }

    /// The writes that bind the function to vfio-pci; `None` if it is bound. Checks what sysfs and procfs show.
    pub(super) fn plan_bind(&self, address: Address) -> Result<Option<Plan>, PciError> {
        let info = self.function(address)?;
        let name = address.to_string();
        if info.class != super::CLASS_NVME {
            return Err(PciError::WrongClass { name, class: info.class });
        }
        if info.is_bound_to_vfio() {
            return Ok(None);
        }
        if info.group.is_none() {
            return Err(PciError::NoIommu { name });
        }
        let usage: Vec<Usage> =
            self.block_devices(address)?.into_iter().flat_map(|device| device.usage).collect();
        refuse_used(&name, &usage)?;
        let drivers = self.sys.join("bus/pci/drivers");
        if !drivers.join(VFIO).exists() {
            return Err(PciError::NoDriver);
        }
        let directory = self.directory(address);
        let mut plan = vec![(directory.join("driver_override"), VFIO.to_owned())];
        if info.driver.is_some() {
            plan.push((directory.join("driver/unbind"), name.clone()));
        }
        plan.push((self.sys.join("bus/pci/drivers_probe"), name));
        Ok(Some(plan))
    }

    /// The writes that return the function to the kernel; `None` if VFIO is not its driver.
    pub(super) fn plan_unbind(&self, address: Address) -> Result<Option<Plan>, PciError> {
        let info = self.function(address)?;
        if !info.is_bound_to_vfio() {
            return Ok(None);
        }
        refuse_used(&address.to_string(), &self.vfio_users(address)?)?;
        Ok(Some(self.plan_release(address, true)))
    }

    fn plan_release(&self, address: Address, is_bound: bool) -> Plan {
        let (directory, name) = (self.directory(address), address.to_string());
        // An empty line ends the preference for a driver.
        let mut plan = vec![(directory.join("driver_override"), "\n".to_owned())];
        if is_bound {
            plan.push((directory.join("driver/unbind"), name.clone()));
        }
        plan.push((self.sys.join("bus/pci/drivers_probe"), name));
        plan
    }

    /// Opens each block device as exclusively as a file system does: that also finds mounts in other namespaces.
    fn check_exclusive(&self, address: Address) -> Result<(), PciError> {
        for device in self.block_devices(address)? {
            let path = self.dev.join(&device.name);
            let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
            match open(&path, flags, Mode::empty()) {
                Err(Errno::BUSY) => {
                    let reason =
                        format!("another mount, device or process holds {} exclusively", device.name);
                    return Err(PciError::InUse { name: address.to_string(), reason });
                }
                Err(Errno::ACCESS | Errno::PERM) => {
                    return Err(PciError::Permission { path: path.display().to_string() });
                }
                // A device without a medium, or one that is gone, has no users.
                Ok(_) | Err(Errno::NOENT | Errno::NXIO | Errno::NODEV | Errno::NOMEDIUM) => {}
                Err(errno) => return Err(PciError::os("check that a block device is unused", errno)),
            }
        }
        Ok(())
    }

    fn check_driver(&self, address: Address, wants_vfio: bool) -> Result<(), PciError> {
        let info = self.function(address)?;
        if wants_vfio && !info.is_bound_to_vfio() {
            let driver = info.driver.unwrap_or_else(|| "no driver".to_owned());
            return Err(PciError::NotBound { name: address.to_string(), driver });
        }
        Ok(())
    }
}

fn refuse_used(name: &str, usage: &[Usage]) -> Result<(), PciError> {
    if usage.is_empty() {
        return Ok(());
    }
    let reason = usage.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    Err(PciError::InUse { name: name.to_owned(), reason })
}

fn run(plan: &Plan) -> Result<(), PciError> {
    plan.iter().try_for_each(|(path, text)| {
        std::fs::write(path, text).map_err(|error| match errno(&error) {
            Errno::ACCESS | Errno::PERM | Errno::ROFS => {
                PciError::Permission { path: path.display().to_string() }
            }
            errno => PciError::os("bind a PCI function to another driver", errno),
        })
    })
}
