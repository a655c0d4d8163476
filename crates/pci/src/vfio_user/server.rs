//! The server: gives a function of this process, such as a model of a device, to another process. Control context, on the
//! caller's thread.

use super::connection::{Broken, Connection, Message};
use super::message::{
    Capabilities, Command, DMA_READ_WRITE, DeviceInfo, DmaMap, DmaUnmap, Header, IrqInfo, Kind, MINOR,
    RegionAccess, RegionInfo, SetIrqs, SparseArea, Version,
};
use crate::{Function, PciError, Registers, Width};
use aryk_dma::{DmaRange, MapError, Mapping, PAGE};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use vfio_bindings::bindings::vfio as abi;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// How long a client may take to read a reply.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The regions and kinds of interrupts that a PCI function has.
const REGIONS: u32 = abi::VFIO_PCI_NUM_REGIONS;
const IRQS: u32 = abi::VFIO_PCI_NUM_IRQS;

/// A function that a server gives to other processes: in addition to what drivers use, the client chooses the IOVA of its memory.
pub trait Served: Function {
    /// Length of BAR 0 in bytes.
    fn registers_len(&self) -> u64;

    /// Length of configuration space in bytes: 256 or 4,096.
    fn config_len(&self) -> u16;

    /// The part of BAR 0 that clients may map, in whole pages: offset and length. The function watches these registers, since it
    /// is not called for their writes. [`Function::map_registers`] of that part must return a part of registers in memory that
    /// stand for the BAR from its start on: `Registers::in_memory(registers_len)` and [`Registers::part`].
    fn mappable(&self) -> Option<(u64, u64)>;

    /// Gives the function access to memory at an IOVA; [`Function::unmap`] ends it.
    ///
    /// # Errors
    /// [`PciError`] if the function cannot use that memory there. The server has checked that no other mapping has these IOVAs.
    fn map_at(&self, iova: u64, memory: &DmaRange) -> Result<(), PciError>;
}

/// Serves a function to the client of `socket` until that disconnects. Then the function is reset, without bus mastering, memory
/// and interrupts, and can be served to the next client.
///
/// # Errors
/// [`PciError::Protocol`] if the client broke the protocol; [`PciError::Os`]. The function was reset in these cases too.
pub fn serve(socket: UnixStream, function: &dyn Served) -> Result<(), PciError> {
    let connection = Connection::new(socket, TIMEOUT);
    let connection = connection.map_err(|_| PciError::os("set a socket's timeout", Errno::INVAL))?;
    let mappable = match function.mappable() {
        Some((offset, len)) => Some(Mappable::of(function, offset, len)?),
        None => None,
    };
    let mut session =
        Session { connection, function, mappable, peer: None, mapped: BTreeMap::new(), eventfds: Vec::new() };
    let result = session.run();
    session.clear();
    result.map_err(|broken| match broken {
        Broken::Os(errno) => PciError::os("serve a vfio-user client", errno),
        broken => {
            let name = function.name().to_owned();
            PciError::Protocol { name, what: "a client's request", reason: broken.to_string() }
        }
    })
}

struct Session<'a> {
    connection: Connection,
    function: &'a dyn Served,
    mappable: Option<Mappable>,
    /// The client's capabilities, from the handshake.
    peer: Option<Capabilities>,
    /// By IOVA: the memory, and its length.
    mapped: BTreeMap<u64, Arc<Mapping>>,
    eventfds: Vec<OwnedFd>,
}

/// The registers that clients may map.
struct Mappable {
    registers: Registers,
    offset: u64,
    len: u64,
    /// Offset of BAR 0 in the file of the registers.
    bar: u64,
}

impl Mappable {
    fn of(function: &dyn Served, offset: u64, len: u64) -> Result<Self, PciError> {
        let registers = function.map_registers(offset, len)?;
        let bar = registers.with_file(|_, start| start.checked_sub(offset)).flatten();
        let bar =
            bar.ok_or(PciError::Unsupported("registers that do not stand for the BAR from its start on"))?;
        Ok(Self { registers, offset, len, bar })
    }
}

/// The body of a reply, and the file that goes with it.
struct Answer {
    body: Vec<u8>,
    with_file: bool,
}

impl Answer {
    fn of(body: &[u8]) -> Self {
        Self { body: body.to_vec(), with_file: false }
    }
}

impl Session<'_> {
    fn run(&mut self) -> Result<(), Broken> {
        loop {
            let message = match self.connection.receive() {
                Err(Broken::Closed) => return Ok(()),
                message => message?,
            };
            let header = message.header;
            let Some(Kind::Command { wants_reply }) = header.kind() else {
                return Err(Broken::Invalid("a reply to no request"));
            };
            let command = Command::parse(header.command);
            // The handshake comes first, once.
            if (command == Some(Command::Version)) == self.peer.is_some() {
                return Err(Broken::Invalid("no handshake, or a second one"));
            }
            let answer = command.ok_or(Errno::NOSYS).and_then(|command| self.answer(command, message));
            if wants_reply {
                self.reply(header, answer)?;
            }
        }
    }

    fn reply(&self, header: Header, answer: Result<Answer, Errno>) -> Result<(), Broken> {
        let (kind, answer) = match answer {
            Ok(answer) => (Kind::Reply, answer),
            Err(errno) => (Kind::Failure(errno.raw_os_error().cast_unsigned()), Answer::of(&[])),
        };
        let reply = Header::new(header.id, header.command, kind, answer.body.len());
        let send = |fds: &[BorrowedFd<'_>]| self.connection.send(&reply, [&answer.body, &[]], fds);
        let mappable = self.mappable.as_ref().filter(|_| answer.with_file);
        let sent = mappable.and_then(|mappable| mappable.registers.with_file(|file, _| send(&[file])));
        sent.unwrap_or_else(|| send(&[]))
    }

    fn answer(&mut self, command: Command, message: Message) -> Result<Answer, Errno> {
        let Message { body, fds, .. } = message;
        match command {
            Command::Version => self.greet(&body),
            Command::DmaMap => self.map(&parse(&body)?, &fds),
            Command::DmaUnmap => self.unmap(&parse(&body)?),
            Command::GetInfo => {
                let flags = abi::VFIO_DEVICE_FLAGS_PCI | abi::VFIO_DEVICE_FLAGS_RESET;
                let argsz = size_of::<DeviceInfo>() as u32;
                Ok(Answer::of(DeviceInfo { argsz, flags, regions: REGIONS, irqs: IRQS }.as_bytes()))
            }
            Command::GetRegionInfo => self.region(parse(&body)?),
            Command::GetIrqInfo => {
                let index = parse::<IrqInfo>(&body)?.index;
                let count = self.interrupts(index)?;
                let (argsz, flags) = (size_of::<IrqInfo>() as u32, abi::VFIO_IRQ_INFO_EVENTFD);
                Ok(Answer::of(IrqInfo { argsz, flags, index, count }.as_bytes()))
            }
            Command::SetIrqs => self.set_interrupts(&parse(&body)?, fds),
            Command::RegionRead => self.read(&parse(&body)?),
            Command::RegionWrite => self.write(&body),
            Command::Reset => self.function.reset().map(|()| Answer::of(&[])).map_err(|error| errno(&error)),
            // The server's own requests.
            Command::DmaRead | Command::DmaWrite => Err(Errno::NOSYS),
        }
    }

    fn greet(&mut self, body: &[u8]) -> Result<Answer, Errno> {
        self.peer = Some(Capabilities::parse(body).map_err(|_| Errno::INVAL)?);
        let theirs = parse::<Version>(body)?;
        let mut ours = Capabilities::OURS.message();
        let minor = theirs.minor.min(MINOR);
        ours[2..4].copy_from_slice(&minor.to_le_bytes());
        Ok(Answer::of(&ours))
    }

    fn map(&mut self, request: &DmaMap, fds: &[OwnedFd]) -> Result<Answer, Errno> {
        // Memory without a file would need a request to the client for each access: the function has no interface for that.
        let [file] = fds else { return Err(Errno::OPNOTSUPP) };
        let DmaMap { flags, offset, iova, len, .. } = *request;
        let is_aligned = [offset, iova, len].iter().all(|n| n.is_multiple_of(PAGE));
        let end = iova.checked_add(len).filter(|_| is_aligned && len > 0).ok_or(Errno::INVAL)?;
        // Memory that the function may only read is not told apart.
        if flags != DMA_READ_WRITE {
            return Err(Errno::OPNOTSUPP);
        }
        let before = self.mapped.range(..end).next_back();
        if before.is_some_and(|(start, mapping)| start + mapping.len() > iova) {
            return Err(Errno::EXIST);
        }
        if self.mapped.len() >= Capabilities::OURS.mappings as usize {
            return Err(Errno::NOSPC);
        }
        let mapping = Mapping::shared(file.as_fd(), offset, len).map_err(|error| match error {
            MapError::Os(errno) => errno,
            MapError::NoRoom { .. } | MapError::TooMany { .. } => Errno::NOMEM,
            MapError::NotMemory(_) | MapError::TooShort { .. } | MapError::BadRange { .. } => Errno::INVAL,
        })?;
        let mapping = Arc::new(mapping);
        let range = mapping.dma_range(0, len).ok_or(Errno::INVAL)?;
        self.function.map_at(iova, &range).map_err(|error| errno(&error))?;
        self.mapped.insert(iova, mapping);
        Ok(Answer::of(&[]))
    }

    fn unmap(&mut self, request: &DmaUnmap) -> Result<Answer, Errno> {
        let DmaUnmap { flags, iova, len, .. } = *request;
        if flags != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        self.mapped.get(&iova).filter(|mapping| mapping.len() == len).ok_or(Errno::NOENT)?;
        self.function.unmap(iova, len).map_err(|error| errno(&error))?;
        self.mapped.remove(&iova);
        Ok(Answer::of(request.as_bytes()))
    }

    fn region(&self, request: RegionInfo) -> Result<Answer, Errno> {
        let index = request.index;
        if index >= REGIONS {
            return Err(Errno::INVAL);
        }
        let len = self.len(index);
        let access = abi::VFIO_REGION_INFO_FLAG_READ | abi::VFIO_REGION_INFO_FLAG_WRITE;
        let flags = if len > 0 { access } else { 0 };
        let fixed = size_of::<RegionInfo>();
        let mut info = RegionInfo { argsz: fixed as u32, flags, index, cap_offset: 0, size: len, offset: 0 };
        let Some(mappable) = self.mappable.as_ref().filter(|_| index == 0) else {
            return Ok(Answer::of(info.as_bytes()));
        };
        info.argsz += size_of::<SparseArea>() as u32;
        if request.argsz < info.argsz {
            return Ok(Answer::of(info.as_bytes()));
        }
        info.flags |= abi::VFIO_REGION_INFO_FLAG_MMAP | abi::VFIO_REGION_INFO_FLAG_CAPS;
        (info.cap_offset, info.offset) = (fixed as u32, mappable.bar);
        let (offset, len) = (mappable.offset, mappable.len);
        let id = abi::VFIO_REGION_INFO_CAP_SPARSE_MMAP as u16;
        let area = SparseArea { id, version: 1, next: 0, areas: 1, reserved: 0, offset, len };
        Ok(Answer { body: [info.as_bytes(), area.as_bytes()].concat(), with_file: true })
    }

    fn len(&self, region: u32) -> u64 {
        match region {
            0 => self.function.registers_len(),
            abi::VFIO_PCI_CONFIG_REGION_INDEX => u64::from(self.function.config_len()),
            _ => 0,
        }
    }

    fn interrupts(&self, index: u32) -> Result<u32, Errno> {
        match index {
            abi::VFIO_PCI_MSIX_IRQ_INDEX => Ok(u32::from(self.function.vectors())),
            index if index < IRQS => Ok(0),
            _ => Err(Errno::INVAL),
        }
    }

    fn set_interrupts(&mut self, request: &SetIrqs, fds: Vec<OwnedFd>) -> Result<Answer, Errno> {
        let SetIrqs { flags, index, start, count, .. } = *request;
        let vectors = self.interrupts(index)?;
        let end = start.checked_add(count).filter(|end| *end <= vectors).ok_or(Errno::INVAL)?;
        let disable = abi::VFIO_IRQ_SET_DATA_NONE | abi::VFIO_IRQ_SET_ACTION_TRIGGER;
        let enable = abi::VFIO_IRQ_SET_DATA_EVENTFD | abi::VFIO_IRQ_SET_ACTION_TRIGGER;
        if flags == disable && count == 0 {
            self.eventfds.clear();
        } else if flags == enable && count as usize == fds.len() && start as usize <= self.eventfds.len() {
            let (start, end) = (start as usize, self.eventfds.len().min(end as usize));
            self.eventfds.splice(start..end, fds);
        } else {
            return Err(Errno::INVAL);
        }
        let eventfds: Vec<_> = self.eventfds.iter().map(AsFd::as_fd).collect();
        self.function.set_interrupts(&eventfds).map_err(|error| errno(&error))?;
        Ok(Answer::of(&[]))
    }

    /// Checks an access, and returns the offset.
    fn check(&self, access: &RegionAccess) -> Result<u64, Errno> {
        let count = u64::from(access.count);
        let end = access.offset.checked_add(count).filter(|end| *end <= self.len(access.region));
        end.filter(|_| count > 0 && count <= Capabilities::OURS.data as u64).ok_or(Errno::INVAL)?;
        Ok(access.offset)
    }

    fn read(&self, access: &RegionAccess) -> Result<Answer, Errno> {
        let offset = self.check(access)?;
        let mut body = access.as_bytes().to_vec();
        let start = body.len();
        body.resize(start + access.count as usize, 0);
        let out = &mut body[start..];
        if access.region != 0 {
            let offset = u16::try_from(offset).map_err(|_| Errno::INVAL)?;
            self.function.read_config(offset, out).map_err(|error| errno(&error))?;
            return Ok(Answer { body, with_file: false });
        }
        // Clients also read whole ranges of registers.
        for (i, out) in out.chunks_mut(register(offset, access.count)?.bytes()).enumerate() {
            let width = if out.len() == 8 { Width::Eight } else { Width::Four };
            let value = self.function.read_register(offset + (i * width.bytes()) as u64, width);
            out.copy_from_slice(&value.map_err(|error| errno(&error))?.to_le_bytes()[..out.len()]);
        }
        Ok(Answer { body, with_file: false })
    }

    fn write(&self, body: &[u8]) -> Result<Answer, Errno> {
        let (access, data) = RegionAccess::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
        let offset = self.check(&access)?;
        if data.len() != access.count as usize {
            return Err(Errno::INVAL);
        }
        if access.region == 0 {
            for (i, data) in data.chunks(register(offset, access.count)?.bytes()).enumerate() {
                let width = if data.len() == 8 { Width::Eight } else { Width::Four };
                let mut bytes = [0; 8];
                bytes[..data.len()].copy_from_slice(data);
                let at = offset + (i * width.bytes()) as u64;
                let result = self.function.write_register(at, width, u64::from_le_bytes(bytes));
                result.map_err(|error| errno(&error))?;
            }
        } else {
            let offset = u16::try_from(offset).map_err(|_| Errno::INVAL)?;
            self.function.write_config(offset, data).map_err(|error| errno(&error))?;
        }
        Ok(Answer::of(access.as_bytes()))
    }

    /// Takes the function away from the client that is gone.
    fn clear(&mut self) {
        // A function that fails here fails for the next client too, which sees the error.
        let _ = self.function.set_bus_master(false);
        let _ = self.function.set_interrupts(&[]);
        let _ = self.function.reset();
        for (iova, mapping) in std::mem::take(&mut self.mapped) {
            let _ = self.function.unmap(iova, mapping.len());
        }
    }
}

/// The width of the registers of an access.
fn register(offset: u64, count: u32) -> Result<Width, Errno> {
    let is = |n: u32| offset.is_multiple_of(u64::from(n)) && count.is_multiple_of(n);
    if is(8) {
        return Ok(Width::Eight);
    }
    is(4).then_some(Width::Four).ok_or(Errno::INVAL)
}

/// The structure at the start of a request.
fn parse<T: FromBytes + Immutable + KnownLayout>(body: &[u8]) -> Result<T, Errno> {
    T::read_from_prefix(body).map(|(value, _)| value).map_err(|_| Errno::INVAL)
}

/// The errno of a reply.
fn errno(error: &PciError) -> Errno {
    match error {
        PciError::Os { errno, .. } => *errno,
        PciError::OutOfBounds { .. } | PciError::NotMapped { .. } => Errno::INVAL,
        PciError::Unsupported(_) => Errno::OPNOTSUPP,
        PciError::MappingLimit { .. } | PciError::AddressSpace { .. } => Errno::NOSPC,
        PciError::LockLimit { .. } => Errno::NOMEM,
        PciError::Gone { .. } => Errno::NODEV,
        PciError::TimedOut { .. } => Errno::TIMEDOUT,
        _ => Errno::IO,
    }
}
