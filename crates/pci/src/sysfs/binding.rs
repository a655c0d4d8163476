//! Binding a function to vfio-pci, and back to the kernel's driver. Control context, by the command line: a binding takes as long
//! as the drivers need.

use super::{FunctionInfo, Sysfs, Usage, errno};
use crate::{Address, PciError, config};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// The driver that gives functions to processes.
const VFIO: &str = "vfio-pci";

/// Drivers from which a drive is taken: the uses of the first one are known, the other has none.
const RELEASING_DRIVERS: [&str; 2] = ["nvme", "pci-stub"];

/// Files that are written one after the other.
pub(super) type Plan = Vec<(PathBuf, String)>;

impl Sysfs {
    /// Checks that [`Sysfs::bind`] may bind the function, as far as that can be known before.
    ///
    /// # Errors
    /// As [`Sysfs::bind`].
    pub fn check_bindable(&self, address: Address) -> Result<(), PciError> {
        self.plan_bind(address).map(drop)
    }

    /// Binds an NVMe controller to vfio-pci. Returns whether that changed anything: vfio-pci may be its driver already.
    ///
    /// # Errors
    /// [`PciError::WrongClass`] for another kind of device; [`PciError::InUse`] if something uses the controller or
    /// one of its namespaces, which names the uses; [`PciError::NoDriver`] if vfio-pci is not loaded; [`PciError::NoIommu`].
    pub fn bind(&self, address: Address) -> Result<bool, PciError> {
        let Some(plan) = self.plan_bind(address)? else { return Ok(false) };
        // Open until the kernel's driver has released the drive, so that no mount comes between.
        let _guards = self.open_exclusively(address)?;
        let result = run(&plan).and_then(|()| self.check_vfio(address));
        if result.is_err() {
            // The function had the kernel's driver, or none: the kernel chooses again.
            let _ = run(&self.plan_release(address, self.function(address)?.driver.is_some()));
        }
        result.map(|()| true)
    }

    /// Checks that [`Sysfs::unbind`] may unbind the function, as far as that can be known before.
    ///
    /// # Errors
    /// As [`Sysfs::unbind`].
    pub fn check_unbindable(&self, address: Address) -> Result<(), PciError> {
        self.plan_unbind(address).map(drop)
    }

    /// Returns an NVMe controller from vfio-pci, or from no driver, to the kernel, which chooses a driver for it. Returns whether
    /// its driver is another one now.
    ///
    /// # Errors
    /// [`PciError::WrongClass`] for another kind of device; [`PciError::InUse`] if a process drives the function: the kernel
    /// would wait until that process closes it.
    pub fn unbind(&self, address: Address) -> Result<bool, PciError> {
        let Some(plan) = self.plan_unbind(address)? else { return Ok(false) };
        let before = self.function(address)?.driver;
        run(&plan)?;
        Ok(self.function(address)?.driver != before)
    }

    /// Whether the driver vfio-pci is loaded.
    pub fn has_vfio_pci(&self) -> bool {
        self.sys.join("bus/pci/drivers").join(VFIO).exists()
    }

    /// The properties of an NVMe controller.
    pub(super) fn controller(&self, address: Address) -> Result<FunctionInfo, PciError> {
        let info = self.function(address)?;
        config::check_class(info.class, &address.to_string())?;
        Ok(info)
    }

    /// The writes that bind the function to vfio-pci; `None` if it is bound. Checks what sysfs and procfs show.
    pub(super) fn plan_bind(&self, address: Address) -> Result<Option<Plan>, PciError> {
        let info = self.controller(address)?;
        let name = address.to_string();
        if info.is_bound_to_vfio() {
            return Ok(None);
        }
        if info.group.is_none() {
            return Err(PciError::NoIommu { name });
        }
        if let Some(driver) = info.driver.as_deref().filter(|driver| !RELEASING_DRIVERS.contains(driver)) {
            // Such a driver (UIO, Xen) serves a user that Aryk cannot see.
            let reason = format!(
                "the driver {driver} has it; if nothing uses it: echo {name} >/sys/bus/pci/drivers/{driver}/unbind"
            );
            return Err(PciError::InUse { name, reason });
        }
        let uses = self.uses()?;
        let devices = self.block_devices_with(address, &uses)?;
        let mut usage: Vec<Usage> = devices.into_iter().flat_map(|device| device.usage).collect();
        usage.extend(self.controller_users_with(address, &uses)?);
        refuse_used(&name, &usage)?;
        if !self.has_vfio_pci() {
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

    /// The writes that return the function to the kernel; `None` if a driver of the kernel has it.
    pub(super) fn plan_unbind(&self, address: Address) -> Result<Option<Plan>, PciError> {
        let info = self.controller(address)?;
        if info.driver.is_some() && !info.is_bound_to_vfio() {
            return Ok(None);
        }
        refuse_used(&address.to_string(), &self.vfio_users(address)?)?;
        Ok(Some(self.plan_release(address, info.driver.is_some())))
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
    fn open_exclusively(&self, address: Address) -> Result<Vec<OwnedFd>, PciError> {
        let mut guards = Vec::new();
        for device in self.block_devices(address)? {
            let path = self.dev.join(&device.name);
            let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
            match open(&path, flags, Mode::empty()) {
                Ok(guard) => guards.push(guard),
                Err(Errno::BUSY) => {
                    let reason =
                        format!("another mount, device or process holds {} exclusively", device.name);
                    return Err(PciError::InUse { name: address.to_string(), reason });
                }
                Err(Errno::ACCESS | Errno::PERM) => {
                    return Err(PciError::Permission { path: path.display().to_string() });
                }
                // A device without a medium, or one that is gone, has no users.
                Err(Errno::NOENT | Errno::NXIO | Errno::NODEV | Errno::NOMEDIUM) => {}
                Err(errno) => return Err(PciError::os("check that a block device is unused", errno)),
            }
        }
        Ok(guards)
    }

    fn check_vfio(&self, address: Address) -> Result<(), PciError> {
        let info = self.function(address)?;
        if info.is_bound_to_vfio() {
            return Ok(());
        }
        let driver = info.driver.unwrap_or_else(|| "no driver".to_owned());
        Err(PciError::NotBound { name: address.to_string(), driver })
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
