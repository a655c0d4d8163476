//! The client against the server in this process, and both against peers that break the protocol.

use super::connection::{Connection, Message};
use super::message::{
    Capabilities, Command, DeviceInfo, DmaAccess, DmaMap, Header, IrqInfo, Kind, RegionAccess, RegionInfo,
    SetIrqs,
};
use super::{Client, Served, serve};
use crate::{Events, Function, PciError, Registers, VectorMask, Width};
use aryk_dma::{DmaRange, Mapping, PAGE};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

mod hostile;

const TIMEOUT: Duration = Duration::from_secs(20);
const VECTORS: u16 = 40;
const REGISTERS: u64 = 0x3000;
/// Writing an IOVA here makes the function copy a page from it to the IOVA in the next register, and signal vector 39.
const COPY: u64 = 0x100;
const TARGET: u64 = 0x108;

/// A function of registers that keep their values.
#[derive(Debug)]
struct Toy {
    registers: Registers,
    state: Mutex<ToyState>,
}

#[derive(Debug)]
struct ToyState {
    space: [u8; 256],
    mapped: BTreeMap<u64, DmaRange>,
    eventfds: Vec<OwnedFd>,
    resets: u32,
}

impl Toy {
    fn new() -> Self {
        let mut space = [0; 256];
        space[9..12].copy_from_slice(&[2, 8, 1]);
        let state = ToyState { space, mapped: BTreeMap::new(), eventfds: Vec::new(), resets: 0 };
        Self { registers: Registers::in_memory(REGISTERS).unwrap(), state: Mutex::new(state) }
    }

    fn copy(&self, from: u64) {
        let to = self.read_register(TARGET, Width::Eight).unwrap();
        let state = self.state.lock().unwrap();
        let mut page = [0; PAGE as usize];
        assert!(state.mapped[&from].read(0, &mut page) && state.mapped[&to].write(0, &page));
        rustix::io::write(state.eventfds.last().unwrap(), &1_u64.to_ne_bytes()).unwrap();
    }
}

impl Function for Toy {
    fn name(&self) -> &'static str {
        "toy"
    }

    fn read_register(&self, offset: u64, width: Width) -> Result<u64, PciError> {
        let high = if width == Width::Eight { self.registers.read(offset + 4) } else { 0 };
        Ok(u64::from(self.registers.read(offset)) | u64::from(high) << 32)
    }

    fn write_register(&self, offset: u64, width: Width, value: u64) -> Result<(), PciError> {
        self.registers.write(offset, value as u32);
        if width == Width::Eight {
            self.registers.write(offset + 4, (value >> 32) as u32);
        }
        if offset == COPY {
            self.copy(value);
        }
        Ok(())
    }

    fn read_config(&self, offset: u16, out: &mut [u8]) -> Result<(), PciError> {
        let offset = usize::from(offset);
        out.copy_from_slice(&self.state.lock().unwrap().space[offset..offset + out.len()]);
        Ok(())
    }

    fn write_config(&self, offset: u16, data: &[u8]) -> Result<(), PciError> {
        let offset = usize::from(offset);
        self.state.lock().unwrap().space[offset..offset + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn map_registers(&self, offset: u64, len: u64) -> Result<Registers, PciError> {
        Ok(self.registers.part(offset, len).unwrap())
    }

    fn map(&self, _memory: &DmaRange) -> Result<u64, PciError> {
        Err(PciError::Unsupported("another mapping than the client's"))
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), PciError> {
        let removed = self.state.lock().unwrap().mapped.remove(&iova);
        removed.map(drop).ok_or(PciError::NotMapped { iova, len })
    }

    fn vectors(&self) -> u16 {
        VECTORS
    }

    fn set_interrupts(&self, eventfds: &[BorrowedFd<'_>]) -> Result<(), PciError> {
        let own = eventfds.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        self.state.lock().unwrap().eventfds = own;
        Ok(())
    }

    fn vector_mask(&self, _vector: u16) -> Option<VectorMask> {
        None
    }

    fn set_bus_master(&self, on: bool) -> Result<(), PciError> {
        self.write_config(4, &[if on { 4 } else { 0 }])
    }

    fn reset(&self) -> Result<(), PciError> {
        self.state.lock().unwrap().resets += 1;
        Ok(())
    }

    fn events(&self) -> Option<Events> {
        None
    }
}

impl Served for Toy {
    fn registers_len(&self) -> u64 {
        REGISTERS
    }

    fn config_len(&self) -> u16 {
        256
    }

    fn mappable(&self) -> Option<(u64, u64)> {
        Some((0x1000, 0x1000))
    }

    fn map_at(&self, iova: u64, memory: &DmaRange) -> Result<(), PciError> {
        assert!(self.state.lock().unwrap().mapped.insert(iova, memory.clone()).is_none());
        Ok(())
    }
}

/// The server's thread, which returns what `serve` does.
type Server = JoinHandle<Result<(), PciError>>;

fn served() -> (Arc<Toy>, Client, Server) {
    let toy = Arc::new(Toy::new());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let function = Arc::clone(&toy);
    let server = std::thread::spawn(move || serve(theirs, &*function));
    (toy, Client::over(ours, "toy", TIMEOUT).unwrap(), server)
}

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn is_signalled(fd: &OwnedFd) -> bool {
    rustix::io::read(fd, &mut [0; 8]) == Ok(8)
}

fn is_out_of_bounds<T>(result: &Result<T, PciError>) -> bool {
    matches!(result, Err(PciError::OutOfBounds { .. }))
}

#[test]
fn registers_and_configuration_space_are_read_and_written() {
    let (toy, client, server) = served();
    client.write_register(0x14, Width::Four, 0x46_0001).unwrap();
    assert_eq!(toy.registers.read(0x14), 0x46_0001);
    client.write_register(0x28, Width::Eight, 0x1122_3344_5566_7788).unwrap();
    assert_eq!(client.read_register(0x28, Width::Eight).unwrap(), 0x1122_3344_5566_7788);
    assert_eq!(client.read_register(0x2c, Width::Four).unwrap(), 0x1122_3344);
    client.write_config(0x40, &[1, 2, 3]).unwrap();
    let mut out = [0; 4];
    client.read_config(0x3f, &mut out).unwrap();
    assert_eq!(out, [0, 1, 2, 3]);
    client.set_bus_master(true).unwrap();
    assert_eq!(toy.state.lock().unwrap().space[4], 4);

    for offset in [2, REGISTERS, REGISTERS - 4, u64::MAX - 7] {
        assert!(is_out_of_bounds(&client.read_register(offset, Width::Eight)), "{offset:#x}");
    }
    assert!(is_out_of_bounds(&client.write_register(REGISTERS, Width::Four, 0)));
    assert!(is_out_of_bounds(&client.read_config(253, &mut out)));
    assert!(is_out_of_bounds(&client.write_config(u16::MAX, &out)));
    assert!(client.vector_mask(0).is_none());
    client.reset().unwrap();
    assert_eq!(toy.state.lock().unwrap().resets, 1);
    drop(client);
    server.join().unwrap().unwrap();
}

#[test]
fn mapped_registers_are_shared_without_messages() {
    let (toy, client, server) = served();
    let doorbells = client.map_registers(0x1008, 16).unwrap();
    doorbells.write(4, 77);
    assert_eq!(toy.registers.read(0x100c), 77);
    toy.registers.write(0x1010, 78);
    assert_eq!(doorbells.read(8), 78);
    for (offset, len) in [(0, 16), (0xff8, 16), (0x1ff8, 16), (0x2000, 16)] {
        let error = client.map_registers(offset, len).unwrap_err();
        assert!(matches!(error, PciError::Unsupported(_)), "{offset:#x}: {error}");
    }
    for (offset, len) in [(0x1000, 0), (REGISTERS, 4), (u64::MAX, 4), (0x1002, 4)] {
        assert!(is_out_of_bounds(&client.map_registers(offset, len)), "{offset:#x}");
    }
    drop(client);
    doorbells.write(4, 79);
    assert!(!doorbells.is_lost(), "the mapping stays");
    server.join().unwrap().unwrap();
}

#[test]
fn the_device_reads_and_writes_memory_in_files_and_signals_eventfds() {
    let (toy, client, server) = served();
    assert_eq!(client.vectors(), VECTORS);
    let eventfds: Vec<_> = (0..VECTORS).map(|_| new_eventfd()).collect();
    let borrowed: Vec<_> = eventfds.iter().map(AsFd::as_fd).collect();
    client.set_interrupts(&borrowed).unwrap();
    let memory = Arc::new(Mapping::in_file(4 * PAGE).unwrap());
    let ranges = [0, 2].map(|page| memory.dma_range(page * PAGE, PAGE).unwrap());
    let iovas = [client.map(&ranges[0]).unwrap(), client.map(&ranges[1]).unwrap()];
    assert!(iovas[0] != iovas[1] && iovas[0] != 0);
    assert!(ranges[0].write(100, b"through the device"));
    client.write_register(TARGET, Width::Eight, iovas[1]).unwrap();
    client.write_register(COPY, Width::Eight, iovas[0]).unwrap();
    let mut out = [0; 18];
    assert!(ranges[1].read(100, &mut out));
    assert_eq!(&out, b"through the device");
    assert!(is_signalled(&eventfds[39]));
    assert!(!eventfds[..39].iter().any(is_signalled), "the order of the vectors");

    client.unmap(iovas[0], PAGE).unwrap();
    assert_eq!(toy.state.lock().unwrap().mapped.len(), 1);
    for (iova, len) in [(iovas[0], PAGE), (iovas[1], 2 * PAGE), (1, PAGE)] {
        assert!(matches!(client.unmap(iova, len), Err(PciError::NotMapped { .. })));
    }
    assert_eq!(client.map(&ranges[0]).unwrap(), iovas[0], "the address is free again");
    client.set_interrupts(&borrowed[..3]).unwrap();
    assert_eq!(toy.state.lock().unwrap().eventfds.len(), 3);
    client.set_interrupts(&[]).unwrap();
    assert_eq!(toy.state.lock().unwrap().eventfds.len(), 0);
    let much = vec![eventfds[0].as_fd(); usize::from(VECTORS) + 1];
    assert!(is_out_of_bounds(&client.set_interrupts(&much)));
    drop(client);
    server.join().unwrap().unwrap();
}

#[test]
fn a_client_that_goes_leaves_a_function_that_is_reset() {
    let (toy, client, server) = served();
    let memory = Arc::new(Mapping::in_file(PAGE).unwrap());
    client.map(&memory.dma_range(0, PAGE).unwrap()).unwrap();
    client.set_bus_master(true).unwrap();
    client.set_interrupts(&[new_eventfd().as_fd()]).unwrap();
    drop(client);
    server.join().unwrap().unwrap();
    let state = toy.state.lock().unwrap();
    assert!(state.mapped.is_empty() && state.eventfds.is_empty());
    assert_eq!((state.resets, state.space[4]), (1, 0));
}

#[test]
fn memory_that_the_server_cannot_use_is_refused() {
    let (toy, client, _server) = served();
    let anonymous = Arc::new(Mapping::anonymous(PAGE).unwrap());
    let error = client.map(&anonymous.dma_range(0, PAGE).unwrap()).unwrap_err();
    assert!(matches!(error, PciError::NoFile { len: PAGE, .. }), "{error}");
    assert!(error.to_string().contains("copy the data through buffers"), "{error}");
    let memory = Arc::new(Mapping::in_file(2 * PAGE).unwrap());
    assert!(is_out_of_bounds(&client.map(&memory.dma_range(512, PAGE).unwrap())));
    assert!(toy.state.lock().unwrap().mapped.is_empty());
    client.map(&memory.dma_range(0, PAGE).unwrap()).unwrap();
}

/// A server that a test scripts: it answers all of the handshake.
struct Script(Connection);

impl Script {
    /// A connected client, and its server. `change` changes the bodies of the answers to the handshake.
    fn connect(
        timeout: Duration,
        change: impl Fn(Command, &mut Vec<u8>) + Send + 'static,
    ) -> (Result<Client, PciError>, Self) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || {
            let (script, mut reads) = (Self(Connection::new(theirs, TIMEOUT).unwrap()), 0);
            while let Ok(message) = script.0.receive() {
                let command = Command::parse(message.header.command).unwrap();
                let mut body = handshake(command, &message.body);
                change(command, &mut body);
                script.reply(&message, &body);
                reads += u32::from(command == Command::RegionRead);
                // The handshake ends with two reads of the command register, whose bits are clear.
                if reads == 2 {
                    break;
                }
            }
            script
        });
        let client = Client::over(ours, "script", timeout);
        // A client that has given up has closed the connection.
        (client, server.join().unwrap())
    }

    fn reply(&self, to: &Message, body: &[u8]) {
        let header = Header::new(to.header.id, to.header.command, Kind::Reply, body.len());
        let _ = self.0.send(&header, [body, &[]], &[]);
    }

    /// Sends a request to the client, and returns its reply.
    fn ask(&self, command: u16, body: &[u8]) -> Message {
        let header = Header::new(9, command, Kind::Command { wants_reply: true }, body.len());
        self.0.send(&header, [body, &[]], &[]).unwrap();
        let reply = self.0.receive().unwrap();
        assert_eq!((reply.header.id, reply.header.command), (9, command));
        reply
    }
}

/// The answers of a server with BAR 0, configuration space and one MSI-X vector.
fn handshake(command: Command, request: &[u8]) -> Vec<u8> {
    match command {
        Command::Version => Capabilities::OURS.message(),
        Command::GetInfo => DeviceInfo { argsz: 16, flags: 0b11, regions: 9, irqs: 5 }.as_bytes().to_vec(),
        Command::GetRegionInfo => {
            let (asked, _) = RegionInfo::read_from_prefix(request).unwrap();
            let (argsz, flags, size) = (32, 0b11, 0x2000);
            RegionInfo { argsz, flags, index: asked.index, size, cap_offset: 0, offset: 0 }
                .as_bytes()
                .to_vec()
        }
        Command::GetIrqInfo => {
            let (asked, _) = IrqInfo::read_from_prefix(request).unwrap();
            IrqInfo { argsz: 16, flags: 1, index: asked.index, count: 1 }.as_bytes().to_vec()
        }
        // The registers read 0.
        Command::RegionRead => {
            let (asked, _) = RegionAccess::read_from_prefix(request).unwrap();
            [asked.as_bytes(), &vec![0; asked.count as usize]].concat()
        }
        Command::RegionWrite => request[..16].to_vec(),
        _ => request.to_vec(),
    }
}

#[test]
fn the_client_reads_and_writes_memory_for_a_server_that_cannot_map_it() {
    let (client, script) = Script::connect(TIMEOUT, |_, _| ());
    let client = client.unwrap();
    let memory = Arc::new(Mapping::anonymous(2 * PAGE).unwrap());
    let range = memory.dma_range(0, 2 * PAGE).unwrap();
    let iova = std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let request = script.0.receive().unwrap();
            let (map, _) = DmaMap::read_from_prefix(&request.body).unwrap();
            assert!(request.fds.is_empty());
            assert_eq!((map.flags, map.len, map.argsz), (3, 2 * PAGE, 32));
            // Before the reply, as a server may.
            let access = DmaAccess { iova: map.iova + 4000, count: 5 };
            let reply = script.ask(Command::DmaWrite as u16, &[access.as_bytes(), b"hello"].concat());
            assert_eq!((reply.header.kind(), reply.body.as_slice()), (Some(Kind::Reply), access.as_bytes()));
            script.reply(&request, &[]);
        });
        let iova = client.map(&range).unwrap();
        server.join().unwrap();
        iova
    });
    let mut out = [0; 5];
    assert!(range.read(4000, &mut out));
    assert_eq!(&out, b"hello");
    let access = |iova, count| DmaAccess { iova, count };
    let read = script.ask(Command::DmaRead as u16, access(iova + 4001, 3).as_bytes());
    assert_eq!((read.header.kind(), &read.body[16..]), (Some(Kind::Reply), b"ell".as_slice()));

    let refused = |command: u16, body: &[u8], errno: Errno| {
        let kind = script.ask(command, body).header.kind();
        assert_eq!(kind, Some(Kind::Failure(errno.raw_os_error().cast_unsigned())), "{command} {body:?}");
    };
    let (read, write) = (Command::DmaRead as u16, Command::DmaWrite as u16);
    for (iova, count) in [(iova - 1, 1), (iova, 2 * PAGE + 1), (iova + 2 * PAGE, 1), (u64::MAX, 1), (0, 1)] {
        refused(read, access(iova, count).as_bytes(), Errno::FAULT);
    }
    refused(read, access(iova, u64::MAX).as_bytes(), Errno::INVAL);
    refused(read, &[access(iova, 1).as_bytes(), b"x"].concat(), Errno::INVAL);
    refused(write, &[access(iova, 2).as_bytes(), b"x"].concat(), Errno::INVAL);
    refused(read, &[0; 15], Errno::INVAL);
    refused(Command::Reset as u16, access(iova, 1).as_bytes(), Errno::NOSYS);
    refused(99, access(iova, 1).as_bytes(), Errno::NOSYS);
    drop(memory);
    refused(read, access(iova, 1).as_bytes(), Errno::FAULT);
}

#[test]
fn a_connection_that_ends_fails_all_calls_and_signals_the_error_event() {
    let (client, script) = Script::connect(TIMEOUT, |_, _| ());
    let client = client.unwrap();
    let events = client.events().unwrap();
    assert!(!events.take_error() && !events.take_removal());
    std::thread::scope(|scope| {
        let call = scope.spawn(|| client.read_register(0, Width::Four));
        script.0.receive().unwrap();
        drop(script);
        let error = call.join().unwrap().unwrap_err();
        assert!(matches!(&error, PciError::Gone { .. }), "{error}");
    });
    assert!(events.take_error());
    let error = client.reset().unwrap_err();
    assert!(error.to_string().contains("script is gone: the connection was closed"), "{error}");
    let memory = Arc::new(Mapping::in_file(PAGE).unwrap());
    assert!(client.map(&memory.dma_range(0, PAGE).unwrap()).is_err());
}

#[test]
fn events_of_the_server_arrive_by_their_eventfds() {
    // The script answers SET_IRQS in the handshake by itself; the eventfds arrive with it.
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let server = std::thread::spawn(move || {
        let script = Script(Connection::new(theirs, TIMEOUT).unwrap());
        while let Ok(message) = script.0.receive() {
            let command = Command::parse(message.header.command).unwrap();
            script.reply(&message, &handshake(command, &message.body));
            if command == Command::SetIrqs {
                let (request, _) = SetIrqs::read_from_prefix(&message.body).unwrap();
                assert_eq!((request.flags, request.count), (0b10_0100, 1));
                message.fds.into_iter().for_each(|fd| sender.send((request.index, fd)).unwrap());
            }
        }
    });
    let client = Client::over(ours, "script", TIMEOUT).unwrap();
    let events = client.events().unwrap();
    let eventfds = BTreeMap::from([receiver.recv().unwrap(), receiver.recv().unwrap()]);
    assert_eq!(eventfds.keys().copied().collect::<Vec<_>>(), [3, 4]);
    for _ in 0..2 {
        assert!(!events.take_error() && !events.take_removal());
        rustix::io::write(&eventfds[&4], &1_u64.to_ne_bytes()).unwrap();
        while !events.take_removal() {
            std::thread::yield_now();
        }
        assert!(!events.take_error());
        rustix::io::write(&eventfds[&3], &1_u64.to_ne_bytes()).unwrap();
        while !events.take_error() {
            std::thread::yield_now();
        }
    }
    drop(client);
    server.join().unwrap();
}

#[test]
fn a_server_that_does_not_reply_loses_the_connection() {
    // The limit holds for each call of the handshake too, whose replies come from a thread that may have to wait for a processor.
    let (client, script) = Script::connect(Duration::from_secs(2), |_, _| ());
    let client = client.unwrap();
    let error = client.read_register(0, Width::Four).unwrap_err();
    assert!(matches!(error, PciError::TimedOut { what: "REGION_READ", .. }), "{error}");
    let error = client.reset().unwrap_err();
    assert!(error.to_string().contains("it did not reply to REGION_READ"), "{error}");
    assert!(client.events().unwrap().take_error());
    drop(script);
}

#[test]
fn without_a_server_the_error_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    assert!(matches!(Client::connect(&path), Err(PciError::NotFound { .. })));
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let error = Client::connect(&path).unwrap_err();
    assert!(error.to_string().contains("no server listens"), "{error}");
}

#[test]
fn a_connected_function_of_a_path_is_named_by_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || serve(listener.accept().unwrap().0, &Toy::new()));
    let client = Client::connect(&path).unwrap();
    assert_eq!(client.name(), path.display().to_string());
    drop(client);
    server.join().unwrap().unwrap();
}

#[test]
fn a_function_of_another_class_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let toy = Toy::new();
    toy.state.lock().unwrap().space[9..12].copy_from_slice(&[0, 0, 2]);
    let server = std::thread::spawn(move || serve(listener.accept().unwrap().0, &toy));
    let error = Client::connect(&path).unwrap_err().to_string();
    let named = format!("{} is an Ethernet controller (PCI class 020000), not an NVMe", path.display());
    assert!(error.starts_with(&named), "{error}");
    server.join().unwrap().unwrap();
}
