//! Functions by the kernel's VFIO. Control context: opening a function can wait for its reset.
//!
//! A function is opened by its character device and iommufd where the kernel has both and lets this process open them, otherwise
//! by its group. One process at a time can open a function. The kernel disables a function's DMA, and resets the function, when
//! the last descriptor of its opener is closed, also when that process was killed: a successor that could open the function knows
//! that no DMA of its predecessor is under way.
//!
//! All descriptors are closed on exec.

use crate::config::{self, COMMAND_BUS_MASTER, COMMAND_MEMORY, Msix};
use crate::info::Region;
use crate::sysfs::Sysfs;
use crate::{Address, Events, Function, PciError, PendingMap, Registers, VectorMask, Width};
use aryk_dma::{DeviceMemory, DmaRange, PAGE};
use iommu::{Container, Iommufd, gone, open_device, open_error};
use rustix::io::Errno;
use rustix::io::{pread, pwrite};
use space::Space;
use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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
#[derive(Debug, Default)]
pub struct Vfio {
    sysfs: Sysfs,
    opened: Mutex<Opened>,
}

#[derive(Debug, Default)]
struct Opened {
    groups: HashMap<u32, Weak<Group>>,
    container: Weak<Container>,
    iommufd: Weak<Iommufd>,
    /// The functions that are open, by group or by character device.
    functions: HashMap<Address, Weak<()>>,
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

    /// Opens a function for this process alone, with its DMA disabled. Blocks while the kernel resets the function.
    ///
    /// # Errors
    /// [`PciError::NotFound`], [`PciError::NotBound`], [`PciError::NoIommu`] (also for a kernel in no-IOMMU mode),
    /// [`PciError::SharedGroup`], [`PciError::Permission`], [`PciError::InUse`], [`PciError::Gone`].
    pub fn open(&self, address: Address) -> Result<VfioFunction, PciError> {
        let group = self.sysfs.check_openable(address)?.group;
        let name = address.to_string();
        let token = Arc::new(());
        let mut opened = self.opened.lock().expect("no thread panics while holding it");
        if opened.functions.get(&address).is_some_and(|token| token.strong_count() > 0) {
            return Err(PciError::InUse { name, reason: "this process has opened it".to_owned() });
        }
        let (device, keeper) = match self.open_by_device(&mut opened, address) {
            Some(result) => result?,
            None => self.open_by_group(&mut opened, group.unwrap_or_default(), &name)?,
        };
        opened.functions.retain(|_, token| token.strong_count() > 0);
        opened.functions.insert(address, Arc::downgrade(&token));
        drop(opened);
        VfioFunction::new(name, device, keeper, token)
    }

    /// Opens the character device; `None` if the kernel has none, or this process may open only the group.
    fn open_by_device(
        &self,
        opened: &mut Opened,
        address: Address,
    ) -> Option<Result<(OwnedFd, Keeper), PciError>> {
        let path = self.sysfs.dev().join("vfio/devices").join(self.sysfs.vfio_device(address)?);
        if !self.sysfs.dev().join("iommu").exists() {
            return None;
        }
        let name = address.to_string();
        match open_device(&path) {
            Ok(device) => Some(self.attach(opened, device, &name)),
            Err(Errno::NOENT | Errno::ACCESS | Errno::PERM) => None,
            Err(errno) => Some(Err(open_error(errno, &path, &name))),
        }
    }

    fn attach(
        &self,
        opened: &mut Opened,
        device: OwnedFd,
        name: &str,
    ) -> Result<(OwnedFd, Keeper), PciError> {
        // Devices are attached to the one address space of the process, where their IOMMU can share it.
        if let Some(iommufd) = opened.iommufd.upgrade() {
            if iommufd.attach(&device, name)? {
                return Ok((device, Keeper::Iommufd(iommufd)));
            }
            return Err(PciError::Unsupported("a device whose IOMMU cannot share the others' address space"));
        }
        let iommufd = Arc::new(Iommufd::open(self.sysfs.dev(), name)?);
        if !iommufd.attach(&device, name)? {
            return Err(PciError::os("attach a device to an address space", Errno::INVAL));
        }
        opened.iommufd = Arc::downgrade(&iommufd);
        Ok((device, Keeper::Iommufd(iommufd)))
    }

    fn open_by_group(
        &self,
        opened: &mut Opened,
        number: u32,
        name: &str,
    ) -> Result<(OwnedFd, Keeper), PciError> {
        let group = match opened.groups.get(&number).and_then(Weak::upgrade) {
            Some(group) => group,
            None => self.open_group(opened, number, name)?,
        };
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

    fn open_group(&self, opened: &mut Opened, number: u32, name: &str) -> Result<Arc<Group>, PciError> {
        let path = self.sysfs.dev().join("vfio").join(number.to_string());
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
        let joined = match opened.container.upgrade() {
            Some(container) if container.join(&fd)? => Some(container),
            _ => None,
        };
        let container = match joined {
            Some(container) => container,
            None => Arc::new(Container::with(&fd, self.sysfs.dev(), name)?),
        };
        opened.container = Arc::downgrade(&container);
        let group = Arc::new(Group { fd, container });
        opened.groups.insert(number, Arc::downgrade(&group));
        Ok(group)
    }
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
    fn new(name: String, device: OwnedFd, keeper: Keeper, token: Arc<()>) -> Result<Self, PciError> {
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
        let mut function =
            Self { name, device, bar0, space, msix, is_resettable, events, state, keeper, _token: token };
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
        self.state.lock().expect("no thread panics while holding it")
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
        if !self.state().remove_user(iova, len) {
            return Err(PciError::NotMapped { iova, len });
        }
        // The mapping is the function's until it is unmapped.
        self.keeper.space().unmap(iova, len).inspect_err(|_| self.state().add_user(iova, len))
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
