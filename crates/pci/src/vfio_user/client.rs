//! The client: a function whose device another process emulates. Control context, and a thread per connection.
//!
//! The thread receives all messages: it hands replies to the waiting calls, and serves the server's accesses to memory that the
//! server cannot map. When the connection breaks, a reply does not come in time, or the server refuses to unmap memory, all calls
//! fail from then on, and the event [`Events::error`] is signalled.

use super::connection::{Broken, Connection, Message, now};
use super::message::{
    Capabilities, Command, DMA_READ_WRITE, DeviceInfo, DmaAccess, DmaMap, DmaUnmap, Header, IrqInfo, Kind,
    RegionAccess, RegionInfo, SetIrqs,
};
use crate::config::{self, COMMAND_BUS_MASTER};
use crate::info::{Info, Region};
use crate::iova::Allocator;
use crate::{Events, Function, PciError, Registers, VectorMask, Width};
use aryk_dma::{DeviceMemory, DmaRange, PAGE};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;
use vfio_bindings::bindings::vfio as abi;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// How long a server may take for a reply, and to accept a connection.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The IOVAs that a client uses: 47 bits, as user space has.
const IOVA_LAST: u64 = (1 << 47) - 1;
/// The largest answer about a region.
const REGION_INFO_MAX: u32 = 4096;
/// MSI-X has at most this many vectors.
const VECTORS_MAX: u32 = 2048;

/// A function that a server emulates.
#[derive(Debug)]
pub struct Client {
    shared: Arc<Shared>,
    receiver: Option<JoinHandle<()>>,
    peer: Capabilities,
    is_resettable: bool,
    bar0: Region,
    /// The file of the registers that can be mapped.
    bar0_file: Option<OwnedFd>,
    space: Region,
    vectors: u16,
    /// Whether interrupts are enabled.
    interrupts: Mutex<bool>,
}

#[derive(Debug)]
struct Shared {
    name: String,
    connection: Connection,
    timeout: Duration,
    events: Events,
    /// The eventfds that the server has: shared with it, flags included. Only the receiver reads them, in a way that does not
    /// block whatever the server does.
    from_server: Events,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    calls: HashMap<u16, Call>,
    next_id: u16,
    /// Why the connection is over.
    over: Option<String>,
    allocator: Allocator,
    mapped: BTreeMap<u64, DmaRange>,
}

/// A call that waits for its reply.
#[derive(Debug)]
struct Call {
    command: Command,
    reply: SyncSender<Message>,
}

/// Connects to a server that may not accept connections: the kernel then waits for room in the list of those that it keeps.
pub(super) fn connect(path: &Path, timeout: Duration) -> Result<UnixStream, PciError> {
    let name = || path.display().to_string();
    let what = "connect to a vfio-user server";
    let os = |errno| PciError::os(what, errno);
    let address = SocketAddrUnix::new(path).map_err(os)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let socket = socket.map_err(os)?;
    let until = now() + timeout;
    loop {
        let left = until.saturating_duration_since(now()).max(Duration::from_millis(1));
        // For UNIX sockets, this also limits the time of `connect`, which then fails with EAGAIN.
        sockopt::set_socket_timeout(&socket, Timeout::Send, Some(left)).map_err(os)?;
        return match rustix::net::connect(&socket, &address) {
            Ok(()) => Ok(socket.into()),
            Err(Errno::INTR) if now() < until => continue,
            Err(Errno::AGAIN | Errno::INTR) => {
                let seconds = timeout.as_secs();
                Err(PciError::TimedOut { name: name(), what: "a new connection", seconds })
            }
            Err(Errno::NOENT | Errno::NOTDIR | Errno::NOTSOCK) => Err(PciError::NotFound { name: name() }),
            Err(Errno::CONNREFUSED) => {
                Err(PciError::Gone { name: name(), reason: "no server listens at the socket".to_owned() })
            }
            Err(Errno::ACCESS | Errno::PERM) => Err(PciError::Permission { path: name() }),
            Err(errno) => Err(os(errno)),
        };
    }
}

impl Client {
    /// Connects to the server that listens at `path`, and asks for the function's properties.
    ///
    /// # Errors
    /// [`PciError::NotFound`] if there is no socket, [`PciError::Gone`] if nothing listens, [`PciError::Permission`];
    /// [`PciError::Protocol`], [`PciError::TimedOut`] for a server that is none, or that does not accept connections;
    /// [`PciError::WrongClass`] if its function is no NVMe controller.
    pub fn connect(path: &Path) -> Result<Self, PciError> {
        let name = path.display().to_string();
        let client = Self::over(connect(path, TIMEOUT)?, &name, TIMEOUT)?;
        config::check_class(config::class(&client)?, &name)?;
        Ok(client)
    }

    /// As [`Client::connect`], over a connected socket, to a function of any class. `timeout` limits the time of each call.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn over(socket: UnixStream, name: &str, timeout: Duration) -> Result<Self, PciError> {
        let connection = Connection::new(socket, timeout);
        let connection = connection.map_err(|_| PciError::os("set a socket's timeout", Errno::INVAL))?;
        let mut state = State::default();
        state.allocator.allow(&[(0, IOVA_LAST)]);
        let (name, state) = (name.to_owned(), Mutex::new(state));
        let (events, from_server) = (Events::new()?, Events::new()?);
        let shared = Arc::new(Shared { name, connection, timeout, events, from_server, state });
        let receiving = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("vfio-user".to_owned());
        let receiver = thread.spawn(move || receiving.receive()).map_err(|error| {
            PciError::os("start a thread", Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
        })?;
        let mut client = Self {
            shared,
            receiver: Some(receiver),
            peer: Capabilities::OURS,
            is_resettable: false,
            bar0: Region::default(),
            bar0_file: None,
            space: Region::default(),
            vectors: 0,
            interrupts: Mutex::new(false),
        };
        client.discover()?;
        Ok(client)
    }

    /// Asks for the function's properties.
    fn discover(&mut self) -> Result<(), PciError> {
        let shared = Arc::clone(&self.shared);
        let reply = shared.call(Command::Version, [&Capabilities::OURS.message(), &[]], &[])?;
        self.peer = Capabilities::parse(&reply.body).map_err(|what| shared.broken(Command::Version, what))?;

        let ask = DeviceInfo { argsz: size_of::<DeviceInfo>() as u32, ..DeviceInfo::default() };
        let info: DeviceInfo = shared.ask(Command::GetInfo, &ask)?;
        if info.flags & abi::VFIO_DEVICE_FLAGS_PCI == 0 {
            return Err(shared.broken(Command::GetInfo, "the device is no PCI function"));
        }
        self.is_resettable = info.flags & abi::VFIO_DEVICE_FLAGS_RESET != 0;
        (self.bar0, self.bar0_file) = shared.region(0)?;
        (self.space, _) = shared.region(abi::VFIO_PCI_CONFIG_REGION_INDEX)?;
        if self.bar0.size == 0 || self.space.size < config::SPACE as u64 {
            return Err(shared.broken(Command::GetRegionInfo, "BAR 0 or configuration space is missing"));
        }
        let vectors = shared.interrupts(info.irqs, abi::VFIO_PCI_MSIX_IRQ_INDEX)?;
        self.vectors = vectors.min(VECTORS_MAX) as u16;
        let events = &shared.from_server;
        let sources =
            [(abi::VFIO_PCI_ERR_IRQ_INDEX, events.error()), (abi::VFIO_PCI_REQ_IRQ_INDEX, events.removal())];
        for (index, eventfd) in sources {
            if shared.interrupts(info.irqs, index)? > 0 {
                shared.set_interrupts(index, 0, &[eventfd])?;
            }
        }
        config::set_command(self, COMMAND_BUS_MASTER, false)
    }
}

impl Shared {
    /// The state, which no thread holds while it waits.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while holding it")
    }

    /// Sends a request, and waits for its reply.
    fn call(&self, command: Command, body: [&[u8]; 2], fds: &[BorrowedFd<'_>]) -> Result<Message, PciError> {
        let (sender, receiver) = sync_channel(1);
        let id = {
            let mut state = self.state();
            if let Some(reason) = &state.over {
                return Err(PciError::Gone { name: self.name.clone(), reason: reason.clone() });
            }
            let free = (0..=u16::MAX).map(|i| state.next_id.wrapping_add(i));
            let id = free.into_iter().find(|id| !state.calls.contains_key(id));
            let id = id.ok_or(PciError::os("send more requests at a time", Errno::BUSY))?;
            state.next_id = id.wrapping_add(1);
            state.calls.insert(id, Call { command, reply: sender });
            id
        };
        let len = body.iter().map(|part| part.len()).sum();
        let header = Header::new(id, command as u16, Kind::Command { wants_reply: true }, len);
        if let Err(broken) = self.connection.send(&header, body, fds) {
            self.end(&broken.to_string());
        }
        match receiver.recv_timeout(self.timeout) {
            Ok(message) => self.check(command, message),
            Err(RecvTimeoutError::Timeout) => {
                // The server may still execute the request: nothing is known about the device from here on.
                self.end(&format!("it did not reply to {}", command.name()));
                let (name, seconds) = (self.name.clone(), self.timeout.as_secs());
                Err(PciError::TimedOut { name, what: command.name(), seconds })
            }
            Err(RecvTimeoutError::Disconnected) => {
                let reason = self.state().over.clone().unwrap_or_default();
                Err(PciError::Gone { name: self.name.clone(), reason })
            }
        }
    }

    /// Checks the kind and the descriptors of a reply.
    fn check(&self, command: Command, message: Message) -> Result<Message, PciError> {
        match message.header.kind() {
            Some(Kind::Failure(errno)) => {
                // The errno is the server's: any number, or 0.
                let known = i32::try_from(errno).ok().filter(|errno| (1..4096).contains(errno));
                let errno = known.map_or(Errno::IO, Errno::from_raw_os_error);
                Err(PciError::os(command.name(), errno))
            }
            _ if message.fds.len() > usize::from(command == Command::GetRegionInfo) => {
                Err(self.broken(command, "it has descriptors"))
            }
            _ => Ok(message),
        }
    }

    /// A request and its reply of the same structure.
    fn ask<T: FromBytes + IntoBytes + Immutable + KnownLayout>(
        &self,
        command: Command,
        request: &T,
    ) -> Result<T, PciError> {
        let reply = self.call(command, [request.as_bytes(), &[]], &[])?;
        let read = T::read_from_prefix(&reply.body);
        read.map(|(value, _)| value).map_err(|_| self.broken(command, "it is too short"))
    }

    /// Ends the connection because of an invalid reply, and returns the error.
    fn broken(&self, command: Command, reason: &str) -> PciError {
        self.end(&format!("invalid reply to {}: {reason}", command.name()));
        PciError::Protocol { name: self.name.clone(), what: command.name(), reason: reason.to_owned() }
    }

    /// Ends the connection. All calls fail, those that wait and those to come.
    fn end(&self, reason: &str) {
        let mut state = self.state();
        if state.over.is_none() {
            state.over = Some(reason.to_owned());
            self.events.signal_error();
        }
        state.calls.clear();
        drop(state);
        self.connection.shut_down();
    }

    /// A region, and the file of the part of it that can be mapped.
    fn region(&self, index: u32) -> Result<(Region, Option<OwnedFd>), PciError> {
        let command = Command::GetRegionInfo;
        let request = RegionInfo { argsz: REGION_INFO_MAX, index, ..RegionInfo::default() };
        let mut reply = self.call(command, [request.as_bytes(), &[]], &[])?;
        let fixed = RegionInfo::read_from_prefix(&reply.body);
        let (fixed, _) = fixed.map_err(|_| self.broken(command, "it is too short"))?;
        if fixed.index != index {
            return Err(self.broken(command, "it is of another region"));
        }
        Ok((Region::parse(&Info::new(reply.body)), reply.fds.pop()))
    }

    /// The number of interrupts of a kind; 0 for kinds that the server does not have.
    fn interrupts(&self, kinds: u32, index: u32) -> Result<u32, PciError> {
        if index >= kinds {
            return Ok(0);
        }
        let argsz = size_of::<IrqInfo>() as u32;
        let info: Result<IrqInfo, _> =
            self.ask(Command::GetIrqInfo, &IrqInfo { argsz, index, ..IrqInfo::default() });
        match info {
            // As the kernel, a server refuses a kind that the device does not have.
            Err(PciError::Os { errno: Errno::INVAL, .. }) => Ok(0),
            Ok(info) if info.index != index => Err(self.broken(Command::GetIrqInfo, "it is of another kind")),
            result => Ok(result?.count),
        }
    }

    /// Makes interrupts from `start` on signal these eventfds; an empty list disables the kind.
    fn set_interrupts(&self, index: u32, start: u32, eventfds: &[BorrowedFd<'_>]) -> Result<(), PciError> {
        let data =
            if eventfds.is_empty() { abi::VFIO_IRQ_SET_DATA_NONE } else { abi::VFIO_IRQ_SET_DATA_EVENTFD };
        let request = SetIrqs {
            argsz: size_of::<SetIrqs>() as u32,
            flags: data | abi::VFIO_IRQ_SET_ACTION_TRIGGER,
            index,
            start,
            count: eventfds.len() as u32,
        };
        self.call(Command::SetIrqs, [request.as_bytes(), &[]], eventfds).map(drop)
    }

    /// Receives messages until the connection ends. Runs on its own thread.
    fn receive(&self) {
        let broken = loop {
            let result = self.wait().and_then(|()| self.connection.receive());
            let result = result.and_then(|message| self.dispatch(message));
            if let Err(broken) = result {
                break broken;
            }
        };
        self.end(&broken.to_string());
    }

    /// Waits for a message, and passes the server's events on until one comes.
    fn wait(&self) -> Result<(), Broken> {
        loop {
            let (error, removal) = (self.from_server.error(), self.from_server.removal());
            let mut fds = [self.connection.socket(), error, removal]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(Broken::Os(errno)),
            }
            if self.from_server.take_error() {
                self.events.signal_error();
            }
            if self.from_server.take_removal() {
                self.events.signal_removal();
            }
            if !fds[0].revents().is_empty() {
                return Ok(());
            }
        }
    }

    fn dispatch(&self, message: Message) -> Result<(), Broken> {
        let header = message.header;
        match header.kind() {
            None => Err(Broken::Invalid("a message of an unknown type")),
            Some(Kind::Command { wants_reply }) => self.serve(&message, wants_reply),
            Some(Kind::Reply | Kind::Failure(_)) => {
                let mut state = self.state();
                let call = state.calls.get(&header.id).ok_or(Broken::Invalid("a reply to no request"))?;
                if call.command as u16 != header.command {
                    return Err(Broken::Invalid("a reply to another request"));
                }
                let call = state.calls.remove(&header.id);
                drop(state);
                // A caller that has given up does not receive it.
                let _ = call.map(|call| call.reply.send(message));
                Ok(())
            }
        }
    }

    /// Accesses memory for the server.
    fn serve(&self, message: &Message, wants_reply: bool) -> Result<(), Broken> {
        let header = message.header;
        let answer = self.access(message);
        if !wants_reply {
            return Ok(());
        }
        let (kind, body) = match &answer {
            Ok(body) => (Kind::Reply, body.as_slice()),
            Err(errno) => (Kind::Failure(errno.raw_os_error().cast_unsigned()), [].as_slice()),
        };
        let reply = Header::new(header.id, header.command, kind, body.len());
        self.connection.send(&reply, [body, &[]], &[])
    }

    /// The body of the reply to a `DMA_READ` or `DMA_WRITE`.
    fn access(&self, message: &Message) -> Result<Vec<u8>, Errno> {
        let command = Command::parse(message.header.command);
        let (access, data) = DmaAccess::read_from_prefix(&message.body).map_err(|_| Errno::INVAL)?;
        let len = usize::try_from(access.count).ok().filter(|len| *len <= Capabilities::OURS.data);
        let len = len.ok_or(Errno::INVAL)?;
        let (range, offset) = self.state().find(access.iova, access.count).ok_or(Errno::FAULT)?;
        let mut reply = access.as_bytes().to_vec();
        let is_done = match command {
            Some(Command::DmaRead) if data.is_empty() => {
                reply.resize(size_of::<DmaAccess>() + len, 0);
                range.read(offset, &mut reply[size_of::<DmaAccess>()..])
            }
            Some(Command::DmaWrite) if data.len() == len => range.write(offset, data),
            Some(Command::DmaRead | Command::DmaWrite) => return Err(Errno::INVAL),
            _ => return Err(Errno::NOSYS),
        };
        if is_done { Ok(reply) } else { Err(Errno::FAULT) }
    }
}

impl State {
    /// The mapped memory that contains `len` bytes from `iova` on, and their offset in it.
    fn find(&self, iova: u64, len: u64) -> Option<(DmaRange, u64)> {
        let (start, range) = self.mapped.range(..=iova).next_back()?;
        let offset = iova - start;
        offset.checked_add(len).filter(|end| *end <= range.len())?;
        Some((range.clone(), offset))
    }
}

impl Client {
    fn read(&self, region: u32, offset: u64, out: &mut [u8]) -> Result<(), PciError> {
        let command = Command::RegionRead;
        let request = RegionAccess { offset, region, count: out.len() as u32 };
        let reply = self.shared.call(command, [request.as_bytes(), &[]], &[])?;
        let read = RegionAccess::read_from_prefix(&reply.body);
        let (access, data) = read.map_err(|_| self.shared.broken(command, "it is too short"))?;
        if access != request || data.len() != out.len() {
            return Err(self.shared.broken(command, "it is of another access"));
        }
        out.copy_from_slice(data);
        Ok(())
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) -> Result<(), PciError> {
        let command = Command::RegionWrite;
        let request = RegionAccess { offset, region, count: data.len() as u32 };
        let reply = self.shared.call(command, [request.as_bytes(), data], &[])?;
        match RegionAccess::read_from_prefix(&reply.body) {
            Ok((access, _)) if access == request => Ok(()),
            _ => Err(self.shared.broken(command, "it is of another access")),
        }
    }

    /// Checks a range of a region.
    fn check(&self, region: &Region, what: &'static str, offset: u64, len: u64) -> Result<(), PciError> {
        // The transport has a limit of data, which also bounds hostile sizes of regions.
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= region.size);
        if is_inside && len <= self.peer.data as u64 {
            Ok(())
        } else {
            Err(PciError::OutOfBounds { what, offset, len })
        }
    }

    /// The reply to a mapping as an error of this crate.
    fn map_error(&self, error: PciError, len: u64, has_file: bool) -> PciError {
        match error {
            // A server may support such memory, by messages for each access; most do not, and report different errors.
            PciError::Os { errno, .. } if !has_file && errno != Errno::NOSPC => {
                PciError::NoFile { name: self.shared.name.clone(), len }
            }
            PciError::Os { errno: Errno::NOSPC, .. } => PciError::MappingLimit { limit: self.peer.mappings },
            // The server charges memory to its own limits.
            PciError::Os { errno: Errno::NOMEM, .. } => {
                PciError::LockLimit { len, limit: format!("a limit of the server {}", self.shared.name) }
            }
            error => error,
        }
    }

    fn send_map(&self, iova: u64, memory: &DmaRange) -> Result<(), PciError> {
        let mut request = DmaMap {
            argsz: size_of::<DmaMap>() as u32,
            flags: DMA_READ_WRITE,
            offset: 0,
            iova,
            len: memory.len(),
        };
        let sent = memory.with_file(|file, offset| {
            request.offset = offset;
            self.shared.call(Command::DmaMap, [request.as_bytes(), &[]], &[file])
        });
        // Without a file, the server reads and writes the memory by messages.
        sent.unwrap_or_else(|| self.shared.call(Command::DmaMap, [request.as_bytes(), &[]], &[])).map(drop)
    }
}

impl Function for Client {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn read_register(&self, offset: u64, width: Width) -> Result<u64, PciError> {
        let mut bytes = [0; 8];
        let out = &mut bytes[..width.bytes()];
        self.check(&self.bar0, "registers", width.check(offset)?, out.len() as u64)?;
        self.read(0, offset, out)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn write_register(&self, offset: u64, width: Width, value: u64) -> Result<(), PciError> {
        let bytes = value.to_le_bytes();
        let data = &bytes[..width.bytes()];
        self.check(&self.bar0, "registers", width.check(offset)?, data.len() as u64)?;
        self.write(0, offset, data)
    }

    fn read_config(&self, offset: u16, out: &mut [u8]) -> Result<(), PciError> {
        self.check(&self.space, "configuration space", u64::from(offset), out.len() as u64)?;
        self.read(abi::VFIO_PCI_CONFIG_REGION_INDEX, u64::from(offset), out)
    }

    fn write_config(&self, offset: u16, data: &[u8]) -> Result<(), PciError> {
        self.check(&self.space, "configuration space", u64::from(offset), data.len() as u64)?;
        self.write(abi::VFIO_PCI_CONFIG_REGION_INDEX, u64::from(offset), data)
    }

    fn map_registers(&self, offset: u64, len: u64) -> Result<Registers, PciError> {
        let out = || PciError::OutOfBounds { what: "registers", offset, len };
        let unsupported = || PciError::Unsupported("mapping these registers of a vfio-user server");
        let end = offset.checked_add(len).filter(|&end| end <= self.bar0.size && len > 0).ok_or_else(out)?;
        let start = offset - offset % PAGE;
        let pages = end.checked_next_multiple_of(PAGE).ok_or_else(out)? - start;
        let at = self.bar0.offset.checked_add(start).filter(|_| self.bar0.is_mappable(start, pages));
        let (at, file) = at.zip(self.bar0_file.as_ref()).ok_or_else(unsupported)?;
        let memory = DeviceMemory::shared(file.as_fd(), at, pages)
            .map_err(|error| self.shared.broken(Command::GetRegionInfo, &error.to_string()))?;
        Registers::new(Arc::new(memory), offset - start, len).ok_or_else(out)
    }

    fn map(&self, memory: &DmaRange) -> Result<u64, PciError> {
        let len = memory.len();
        if !memory.addr().is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return Err(PciError::OutOfBounds { what: "memory for DMA", offset: memory.addr(), len });
        }
        let iova = {
            let mut state = self.shared.state();
            if state.mapped.len() >= self.peer.mappings as usize {
                return Err(PciError::MappingLimit { limit: self.peer.mappings });
            }
            let iova = state.allocator.allocate(len, PAGE, 0);
            let iova = iova.ok_or(PciError::AddressSpace { len, align: PAGE })?;
            // The server may access the memory before its reply arrives.
            state.mapped.insert(iova, memory.clone());
            iova
        };
        self.send_map(iova, memory).map(|()| iova).map_err(|error| {
            let mut state = self.shared.state();
            state.mapped.remove(&iova);
            // After another error than the server's own, the server may have mapped the memory: the address is not used again.
            if matches!(error, PciError::Os { .. }) {
                state.allocator.release(iova);
            }
            self.map_error(error, len, memory.with_file(|_, _| ()).is_some())
        })
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), PciError> {
        let is_mapped = self.shared.state().mapped.get(&iova).is_some_and(|range| range.len() == len);
        if !is_mapped {
            return Err(PciError::NotMapped { iova, len });
        }
        let argsz = size_of::<DmaUnmap>() as u32;
        let request = DmaUnmap { argsz, flags: 0, iova, len };
        let unmapped = self.shared.call(Command::DmaUnmap, [request.as_bytes(), &[]], &[]);
        unmapped.map_err(|error| match error {
            // The server may go on accessing the memory, as the device that it emulates: the client gives up the whole function.
            // The caller learns that this memory was not unmapped, and must not use it for anything else.
            PciError::Os { errno, .. } => {
                self.shared.broken(Command::DmaUnmap, &format!("it refuses to unmap memory: {errno}"))
            }
            error => error,
        })?;
        let mut state = self.shared.state();
        state.mapped.remove(&iova);
        state.allocator.release(iova);
        Ok(())
    }

    fn vectors(&self) -> u16 {
        self.vectors
    }

    fn set_interrupts(&self, eventfds: &[BorrowedFd<'_>]) -> Result<(), PciError> {
        if eventfds.len() > usize::from(self.vectors) {
            let len = eventfds.len() as u64;
            return Err(PciError::OutOfBounds { what: "interrupt vectors", offset: 0, len });
        }
        let mut are_enabled = self.interrupts.lock().expect("no thread panics while holding it");
        let index = abi::VFIO_PCI_MSIX_IRQ_INDEX;
        if *are_enabled {
            self.shared.set_interrupts(index, 0, &[])?;
            *are_enabled = false;
        }
        for (i, eventfds) in eventfds.chunks(self.peer.fds).enumerate() {
            *are_enabled = true;
            self.shared.set_interrupts(index, (i * self.peer.fds) as u32, eventfds)?;
        }
        Ok(())
    }

    fn vector_mask(&self, _vector: u16) -> Option<VectorMask> {
        // The protocol leaves the MSI-X table to the client, so a server has none to map.
        None
    }

    fn set_bus_master(&self, on: bool) -> Result<(), PciError> {
        config::set_command(self, COMMAND_BUS_MASTER, on)
    }

    fn reset(&self) -> Result<(), PciError> {
        if !self.is_resettable {
            return Err(PciError::Unsupported("resetting this function"));
        }
        self.shared.call(Command::Reset, [&[], &[]], &[]).map(drop)
    }

    fn events(&self) -> Option<Events> {
        Some(self.shared.events.clone())
    }
}

impl Drop for Client {
    /// Closes the connection, with which the server ends DMA and interrupts.
    fn drop(&mut self) {
        self.shared.connection.shut_down();
        if let Some(receiver) = self.receiver.take() {
            // It cannot have panicked, and if it had, nothing is left to do.
            let _ = receiver.join();
        }
    }
}
