//! Functions by the kernel's VFIO. Control context: opening a function can wait for its reset.
//!
//! A function is opened by its character device and iommufd where the kernel has both and lets this process open them, otherwise
//! by its group ([`VfioFunction::refused_file`]). One process at a time can open a function. The kernel disables a function's
//! DMA, and resets the function, when the last descriptor of its opener is closed, also when that process was killed: a successor
//! that could open the function knows that no DMA of its predecessor is under way.
//!
//! All descriptors are closed on exec.

use crate::config::{self, COMMAND_BUS_MASTER, COMMAND_MEMORY, Msix};
use crate::info::Region;
use crate::sysfs::Sysfs;
use crate::{Address, Events, Function, PciError, PendingMap, PendingUnmap, Registers, VectorMask, Width};
use aryk_dma::{DeviceMemory, DmaRange, PAGE};
use iommu::{Container, Iommufd, OpenIommufd, gone, open_device, open_error};
use rustix::io::Errno;
use rustix::io::{pread, pwrite};
use space::Space;
use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;
use vfio_bindings::bindings::vfio as abi;

mod ioctl;
mod iommu;
mod space;

/// How often a reset is tried while the kernel is busy with the device, and how long to wait between.
const RESET_ATTEMPTS: u32 = 10;
const RESET_PAUSE: Duration = Duration::from_millis(20);

/// Opens functions. A process has one: functions of one IOMMU group are open in one process, and share descriptors.
///
/// The kernel may take long to open a device, or the group of a device that another process is opening. No lock that concerns
/// other groups is held meanwhile.
#[derive(Debug, Default)]
pub struct Vfio {
    sysfs: Sysfs,
    /// The functions that are open or being opened, by group or by character device.
    functions: Mutex<HashMap<Address, Weak<()>>>,
    groups: Mutex<HashMap<u32, Arc<Mutex<Weak<Group>>>>>,
    container: Mutex<Weak<Container>>,
    iommufd: Mutex<Weak<Iommufd>>,
}

/// An opened group.
#[derive(Debug)]
struct Group {
    /// Closed before the container, which loses its IOMMU with its last group.
    fd: OwnedFd,
    container: Arc<Container>,
}

/// The owner of a device's address space.
#[derive(Debug)]
enum Keeper {
    Group(Arc<Group>),
    Iommufd(Arc<Iommufd>),
}

impl Keeper {
    fn space(&self) -> &Arc<Space> {
        match self {
            Self::Group(group) => &group.container.space,
            Self::Iommufd(iommufd) => &iommufd.space,
        }
    }
}

impl Vfio {
    /// Opens functions of this host.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens an NVMe controller for this process alone, with its DMA disabled. Blocks while the kernel resets the function; that
    /// delays no other function.
    ///
    /// # Errors
    /// [`PciError::NotFound`], [`PciError::WrongClass`], [`PciError::NotBound`], [`PciError::NoIommu`] (also for a kernel in
    /// no-IOMMU mode), [`PciError::SharedGroup`], [`PciError::Permission`], [`PciError::InUse`], [`PciError::Gone`].
    pub fn open(&self, address: Address) -> Result<VfioFunction, PciError> {
        let group = self.sysfs.check_openable(address)?.group.unwrap_or_default();
        let name = address.to_string();
        let token = self.reserve(address)?;
        let (device, keeper, refused_file) = match self.open_by_device(address, &name)? {
            ByDevice::Opened(device, iommufd) => (device, Keeper::Iommufd(iommufd), None),
            ByDevice::Refused(path) if !self.group_file(group).exists() => {
                return Err(PciError::Permission { path: path.display().to_string() });
            }
            ByDevice::Refused(path) => {
                let (device, keeper) = self.open_by_group(group, &name)?;
                (device, keeper, Some(path))
            }
            ByDevice::Absent => {
                let (device, keeper) = self.open_by_group(group, &name)?;
                (device, keeper, None)
            }
        };
        VfioFunction::new(name, device, keeper, refused_file, token)
    }

    /// Marks a function as open, until the token is dropped.
    fn reserve(&self, address: Address) -> Result<Arc<()>, PciError> {
        let mut functions = lock(&self.functions);
        functions.retain(|_, token| token.strong_count() > 0);
        if functions.contains_key(&address) {
            let reason = "this process has opened it, or is opening it".to_owned();
            return Err(PciError::InUse { name: address.to_string(), reason });
        }
        let token = Arc::new(());
        functions.insert(address, Arc::downgrade(&token));
        Ok(token)
    }

    /// Opens the character device, and attaches it to the process's address space.
    fn open_by_device(&self, address: Address, name: &str) -> Result<ByDevice, PciError> {
        let Some(device) = self.sysfs.vfio_device(address) else { return Ok(ByDevice::Absent) };
        let path = self.sysfs.dev().join("vfio/devices").join(device);
        let (iommufd, is_shared) = match self.iommufd() {
            Ok(iommufd) => iommufd,
            Err(OpenIommufd::Open(errno)) => return refused(errno, self.sysfs.dev().join("iommu"), name),
            Err(OpenIommufd::Use(error)) => return Err(error),
        };
        let device = match open_device(&path) {
            Ok(device) => device,
            Err(errno) => return refused(errno, path, name),
        };
        if iommufd.attach(&device, name)? {
            return Ok(ByDevice::Opened(device, iommufd));
        }
        Err(if is_shared {
            PciError::Unsupported("a device whose IOMMU cannot share the others' address space")
        } else {
            PciError::os("attach a device to an address space", Errno::INVAL)
        })
    }

    /// The one address space of the process for devices that are opened by character device, and whether others may use it.
    fn iommufd(&self) -> Result<(Arc<Iommufd>, bool), OpenIommufd> {
        let mut current = lock(&self.iommufd);
        if let Some(iommufd) = current.upgrade() {
            return Ok((iommufd, true));
        }
        let iommufd = Arc::new(Iommufd::open(self.sysfs.dev())?);
        *current = Arc::downgrade(&iommufd);
        Ok((iommufd, false))
    }

    fn open_by_group(&self, number: u32, name: &str) -> Result<(OwnedFd, Keeper), PciError> {
        let group = self.group(number, name)?;
        let c_name = CString::new(name).expect("an address has no NUL");
        let device = ioctl::device(group.fd.as_fd(), &c_name).map_err(|errno| match errno {
            Errno::NODEV | Errno::IO => gone(name),
            Errno::BUSY => {
                PciError::InUse { name: name.to_owned(), reason: "the kernel is using it".to_owned() }
            }
            errno => PciError::os("open a device of an IOMMU group", errno),
        })?;
        Ok((device, Keeper::Group(group)))
    }

    fn group_file(&self, number: u32) -> PathBuf {
        self.sysfs.dev().join("vfio").join(number.to_string())
    }

    /// The group with this number, which is opened unless it is open.
    fn group(&self, number: u32, name: &str) -> Result<Arc<Group>, PciError> {
        let group = Arc::clone(lock(&self.groups).entry(number).or_default());
        let mut group = lock(&group);
        if let Some(group) = group.upgrade() {
            return Ok(group);
        }
        let path = self.group_file(number);
        let fd = open_device(&path).map_err(|errno| open_error(errno, &path, name))?;
        match ioctl::is_viable(fd.as_fd()) {
            Ok(true) => {}
            // A device that was bound after the check.
            Ok(false) => {
                let reason = format!("a driver of the kernel has another device of IOMMU group {number}");
                return Err(PciError::InUse { name: name.to_owned(), reason });
            }
            Err(errno) => return Err(PciError::os("read the state of an IOMMU group", errno)),
        }
        let container = self.join_container(&fd, name)?;
        let opened = Arc::new(Group { fd, container });
        *group = Arc::downgrade(&opened);
        Ok(opened)
    }

    /// Adds a group to the last container, or to a new one if that cannot take it.
    fn join_container(&self, group: &OwnedFd, name: &str) -> Result<Arc<Container>, PciError> {
        let mut last = lock(&self.container);
        if let Some(container) = last.upgrade()
            && container.join(group)?
        {
            return Ok(container);
        }
        let container = Arc::new(Container::with(group, self.sysfs.dev(), name)?);
        *last = Arc::downgrade(&container);
        Ok(container)
    }
}

/// How far a function was opened by its character device.
#[derive(Debug)]
enum ByDevice {
    Opened(OwnedFd, Arc<Iommufd>),
    /// The kernel has no such files: the group is used.
    Absent,
    /// This process may not open this file: the group is used.
    Refused(PathBuf),
}

/// The meaning of a failed `open` of a character device of VFIO or of `/dev/iommu`: whether the group is used instead.
fn refused(errno: Errno, path: PathBuf, name: &str) -> Result<ByDevice, PciError> {
    match errno {
        // ENODEV, ENXIO: a file whose driver is not loaded.
        Errno::NOENT | Errno::NODEV | Errno::NXIO => Ok(ByDevice::Absent),
        // The owner, Landlock, or the unit's list of devices.
        Errno::ACCESS | Errno::PERM => Ok(ByDevice::Refused(path)),
        errno => Err(open_error(errno, &path, name)),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics while holding it")
}

/// A function that is open by VFIO.
#[derive(Debug)]
pub struct VfioFunction {
    name: String,
    /// Closed before the address space goes.
    device: OwnedFd,
    bar0: Region,
    space: Region,
    msix: Option<Msix>,
    is_resettable: bool,
    events: Events,
    state: Mutex<FunctionState>,
    keeper: Keeper,
    refused_file: Option<PathBuf>,
    _token: Arc<()>,
}

/// Never locked during a call that pins or unpins memory.
#[derive(Debug, Default)]
struct FunctionState {
    has_interrupts: bool,
    /// The mapped MSI-X table, once a mask was asked for.
    table: Option<Registers>,
    /// The function's own mappings: from the IOVA to length and users.
    mapped: BTreeMap<u64, (u64, u32)>,
}

impl FunctionState {
    /// Counts a mapping.
    fn add_user(&mut self, iova: u64, len: u64) {
        self.mapped.entry(iova).or_insert((len, 0)).1 += 1;
    }

    /// Uncounts a mapping; `false` if there is none.
    fn remove_user(&mut self, iova: u64, len: u64) -> bool {
        let Some((_, users)) = self.mapped.get_mut(&iova).filter(|mapped| mapped.0 == len) else {
            return false;
        };
        *users -= 1;
        if *users == 0 {
            self.mapped.remove(&iova);
        }
        true
    }
}

impl VfioFunction {
    /// The file that this process may not open, because of which it opened the function by its group; `None` if it did not try,
    /// or uses the file.
    pub fn refused_file(&self) -> Option<&Path> {
        self.refused_file.as_deref()
    }

    fn new(
        name: String,
        device: OwnedFd,
        keeper: Keeper,
        refused_file: Option<PathBuf>,
        token: Arc<()>,
    ) -> Result<Self, PciError> {
        let what = "read the properties of a VFIO device";
        let fd = device.as_fd();
        let region = |index| ioctl::region(fd, index).map_err(|errno| PciError::os(what, errno));
        let (bar0, space) = (region(0)?, region(abi::VFIO_PCI_CONFIG_REGION_INDEX)?);
        let is_resettable = ioctl::is_resettable(fd).map_err(|errno| PciError::os(what, errno))?;
        let events = Events::new()?;
        let sources =
            [(abi::VFIO_PCI_ERR_IRQ_INDEX, events.error()), (abi::VFIO_PCI_REQ_IRQ_INDEX, events.removal())];
        for (index, eventfd) in sources {
            // A kernel or a device without this event refuses it: EINVAL.
            match ioctl::interrupts(fd, index) {
                Ok(0) | Err(Errno::INVAL) => continue,
                Ok(_) => {}
                Err(errno) => return Err(PciError::os(what, errno)),
            }
            let armed = ioctl::set_interrupts(fd, index, &[eventfd]);
            armed.map_err(|errno| PciError::os("arm the events of a VFIO device", errno))?;
        }
        let state = Mutex::new(FunctionState::default());
        let msix = None;
        let mut function = Self {
            name,
            device,
            bar0,
            space,
            msix,
            is_resettable,
            events,
            state,
            keeper,
            refused_file,
            _token: token,
        };
        config::set_command(&function, COMMAND_BUS_MASTER, false)?;
        config::set_command(&function, COMMAND_MEMORY, true)?;
        let mut bytes = [0; config::SPACE];
        function.read_config(0, &mut bytes)?;
        function.msix = Msix::find(&bytes);
        Ok(function)
    }

    /// Maps the MSI-X table; `None` if the kernel does not allow that, or fails.
    fn map_table(&self) -> Option<Registers> {
        let msix = self.msix.as_ref()?;
        let region = ioctl::region(self.device.as_fd(), u32::from(msix.bar)).ok()?;
        let table = region.has_mappable_msix.then(|| self.map_region(&region, msix.offset, msix.len()));
        table?.ok()
    }

    fn map_region(&self, region: &Region, offset: u64, len: u64) -> Result<Registers, PciError> {
        let out = PciError::OutOfBounds { what: "registers", offset, len };
        let end = offset.checked_add(len).filter(|&end| end <= region.size && len > 0).ok_or(out)?;
        let start = offset - offset % PAGE;
        let pages = end.next_multiple_of(PAGE) - start;
        if !region.is_mappable(start, pages) {
            return Err(PciError::Unsupported("mapping these registers into the process"));
        }
        let memory = DeviceMemory::map(self.device.as_fd(), region.offset + start, pages)
            .map_err(|error| PciError::mapping("map registers", error))?;
        let out = PciError::OutOfBounds { what: "registers", offset, len };
        Registers::new(Arc::new(memory), offset - start, len).ok_or(out)
    }

    /// Checks a range, and returns its offset in the device's file.
    fn at(&self, region: &Region, what: &'static str, offset: u64, len: usize) -> Result<u64, PciError> {
        let len = len as u64;
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= region.size);
        if !is_inside {
            return Err(PciError::OutOfBounds { what, offset, len });
        }
        Ok(region.offset + offset)
    }

    fn read(&self, mut at: u64, mut out: &mut [u8]) -> Result<(), PciError> {
        while !out.is_empty() {
            let n = self.transferred(pread(&self.device, &mut *out, at))?;
            at += n as u64;
            out = &mut out[n..];
        }
        Ok(())
    }

    fn write(&self, mut at: u64, mut data: &[u8]) -> Result<(), PciError> {
        while !data.is_empty() {
            let n = self.transferred(pwrite(&self.device, data, at))?;
            at += n as u64;
            data = &data[n..];
        }
        Ok(())
    }

    /// The meaning of a failed access to a device's file.
    fn transferred(&self, result: Result<usize, Errno>) -> Result<usize, PciError> {
        match result {
            // EIO: the device's memory is disabled, which only a failed device or a removal does. ENODEV: removed.
            Ok(0) | Err(Errno::IO | Errno::NODEV | Errno::NXIO) => {
                let reason = "its registers cannot be accessed".to_owned();
                Err(PciError::Gone { name: self.name.clone(), reason })
            }
            Ok(n) => Ok(n),
            Err(Errno::INTR) => Ok(0),
            Err(errno) => Err(PciError::os("access a VFIO device", errno)),
        }
    }

    fn state(&self) -> MutexGuard<'_, FunctionState> {
        lock(&self.state)
    }
}

impl Function for VfioFunction {
    fn name(&self) -> &str {
        &self.name
    }

    fn read_register(&self, offset: u64, width: Width) -> Result<u64, PciError> {
        let mut bytes = [0; 8];
        let out = &mut bytes[..width.bytes()];
        self.read(self.at(&self.bar0, "registers", width.check(offset)?, out.len())?, out)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn write_register(&self, offset: u64, width: Width, value: u64) -> Result<(), PciError> {
        let bytes = value.to_le_bytes();
        let data = &bytes[..width.bytes()];
        self.write(self.at(&self.bar0, "registers", width.check(offset)?, data.len())?, data)
    }

    fn read_config(&self, offset: u16, out: &mut [u8]) -> Result<(), PciError> {
        let at = self.at(&self.space, "configuration space", u64::from(offset), out.len())?;
        self.read(at, out)
    }

    fn write_config(&self, offset: u16, data: &[u8]) -> Result<(), PciError> {
        let at = self.at(&self.space, "configuration space", u64::from(offset), data.len())?;
        self.write(at, data)
    }

    fn map_registers(&self, offset: u64, len: u64) -> Result<Registers, PciError> {
        self.map_region(&self.bar0, offset, len)
    }

    fn map(&self, memory: &DmaRange) -> Result<u64, PciError> {
        // Not under the function's lock: pinning takes long.
        let iova = self.keeper.space().map(memory)?;
        self.state().add_user(iova, memory.len());
        Ok(iova)
    }

    fn map_piece(&self, pending: &mut PendingMap) -> Result<Option<u64>, PciError> {
        let space = self.keeper.space();
        let iova = match pending.iova {
            Some(iova) => iova,
            None => *pending.iova.insert(space.begin(&pending.memory)?),
        };
        if !space.map_piece(iova)? {
            return Ok(None);
        }
        self.state().add_user(iova, pending.memory.len());
        Ok(Some(iova))
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), PciError> {
        let mut pending = PendingUnmap::new(iova, len);
        while !self.unmap_piece(&mut pending)? {}
        Ok(())
    }

    fn unmap_piece(&self, pending: &mut PendingUnmap) -> Result<bool, PciError> {
        let (iova, len) = pending.range();
        if pending.next.is_none() && !self.state().remove_user(iova, len) {
            return Err(PciError::NotMapped { iova, len });
        }
        // The mapping is the function's until it is unmapped.
        self.keeper.space().unmap_piece(pending).inspect_err(|_| self.state().add_user(iova, len))
    }

    fn vectors(&self) -> u16 {
        self.msix.map_or(0, |msix| msix.vectors)
    }

    fn set_interrupts(&self, eventfds: &[BorrowedFd<'_>]) -> Result<(), PciError> {
        if eventfds.len() > usize::from(self.vectors()) {
            let len = eventfds.len() as u64;
            return Err(PciError::OutOfBounds { what: "interrupt vectors", offset: 0, len });
        }
        let mut state = self.state();
        let index = abi::VFIO_PCI_MSIX_IRQ_INDEX;
        // Kernels before 6.5 cannot change the number of enabled vectors.
        if state.has_interrupts {
            let result = ioctl::set_interrupts(self.device.as_fd(), index, &[]);
            result.map_err(|errno| PciError::os("disable interrupts", errno))?;
            state.has_interrupts = false;
        }
        if eventfds.is_empty() {
            return Ok(());
        }
        ioctl::set_interrupts(self.device.as_fd(), index, eventfds).map_err(|errno| match errno {
            Errno::NOSPC => PciError::Unsupported("this number of interrupts on this host"),
            errno => PciError::os("enable interrupts", errno),
        })?;
        state.has_interrupts = true;
        Ok(())
    }

    fn vector_mask(&self, vector: u16) -> Option<VectorMask> {
        let mut state = self.state();
        if state.table.as_ref().is_none_or(Registers::is_lost) {
            state.table = self.map_table();
        }
        VectorMask::new(state.table.as_ref()?, vector)
    }

    fn set_bus_master(&self, on: bool) -> Result<(), PciError> {
        config::set_command(self, COMMAND_BUS_MASTER, on)
    }

    fn reset(&self) -> Result<(), PciError> {
        if !self.is_resettable {
            return Err(PciError::Unsupported("resetting this function alone"));
        }
        for _ in 1..RESET_ATTEMPTS {
            match ioctl::reset(self.device.as_fd()) {
                // Another thread of the kernel works on the device.
                Err(Errno::AGAIN | Errno::INTR) => pause(),
                result => return self.reset_result(result),
            }
        }
        self.reset_result(ioctl::reset(self.device.as_fd()))
    }

    fn events(&self) -> Option<Events> {
        Some(self.events.clone())
    }
}

impl VfioFunction {
    fn reset_result(&self, result: Result<(), Errno>) -> Result<(), PciError> {
        result.map_err(|errno| match errno {
            Errno::NOTTY | Errno::INVAL => PciError::Unsupported("resetting this function alone"),
            Errno::NODEV | Errno::IO => gone(&self.name),
            errno => PciError::os("reset a PCI function", errno),
        })
    }
}

#[expect(clippy::disallowed_methods, reason = "a reset is called where blocking is allowed")]
fn pause() {
    std::thread::sleep(RESET_PAUSE);
}

impl Drop for VfioFunction {
    /// Ends DMA and interrupts, and removes the function's mappings. Failures do not matter: mapped registers may keep the device
    /// open, but without the mappings its DMA reaches nothing.
    fn drop(&mut self) {
        let _ = self.set_bus_master(false);
        let _ = self.set_interrupts(&[]);
        let mapped = std::mem::take(&mut self.state().mapped);
        for (iova, (len, users)) in mapped {
            for _ in 0..users {
                let _ = self.keeper.space().unmap(iova, len);
            }
        }
    }
}

#[cfg(test)]
mod tests;
