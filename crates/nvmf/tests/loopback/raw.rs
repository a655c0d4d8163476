//! A host without rules: it sends what a test wants, and returns what comes.

use crate::target::{BLOCK, SUBSYSTEM};
use aryk_nvme::spec::entry::{CompletionEntry, SubmissionEntry};
use aryk_nvme::spec::register::{CC, Cc};
use aryk_nvme::spec::status::{Code, Status};
use aryk_nvme_fabrics::chap::{self, Action};
use aryk_nvme_fabrics::command::{Command, Connect};
use aryk_nvme_fabrics::connect::{ANY_CONTROLLER, ConnectData};
use aryk_nvme_fabrics::property::Access;
use aryk_nvme_fabrics::sgl::Sgl;
use aryk_nvme_fabrics::tcp::{Event, Format, HEADER_MAX, Header, IcReq, Limits, Parser, Side};
use rustix::net::{AddressFamily, SocketType};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::time::Duration;

/// How long the target has for a reply: less than the limits in time that it has for hosts.
const PATIENCE: Duration = Duration::from_secs(5);

/// A connection without digests.
pub struct Raw {
    socket: TcpStream,
    parser: Parser,
    received: VecDeque<(Header, Vec<u8>)>,
    host: u8,
    incarnation: Option<u8>,
}

/// The bytes of a PDU without digests.
pub fn pdu(header: &Header, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_MAX];
    let len = header.encode(&Format::default(), &mut bytes);
    bytes.truncate(len);
    bytes.extend(data);
    bytes
}

/// A command of namespace 1, with `len` bytes of data that the transport transfers.
pub fn command(cid: u16, opcode: u8, lba: u64, blocks: u32, len: u32) -> SubmissionEntry {
    SubmissionEntry::new(opcode, 1)
        .with_cid(cid)
        .with_cdw10_11(lba as u32, (lba >> 32) as u32)
        .with_cdw12_13(blocks.wrapping_sub(1), 0)
        .with_sgl(Sgl::Transport { len }.encode())
}

/// The PDU of a command without data in the capsule.
pub fn capsule(entry: SubmissionEntry) -> Vec<u8> {
    pdu(&Header::Command { entry, data_len: 0 }, &[])
}

/// The PDU of a command with data in the capsule.
pub fn capsule_with(entry: SubmissionEntry, data: &[u8]) -> Vec<u8> {
    let len = data.len() as u32;
    let entry = entry.with_sgl(Sgl::InCapsule { offset: 0, len }.encode());
    pdu(&Header::Command { entry, data_len: len }, data)
}

impl Raw {
    /// A connection whose formats are settled.
    fn open(from: Ipv4Addr, address: SocketAddr) -> Self {
        Self::open_with(from, address, 0)
    }

    /// As [`Raw::open`], of a host that allows so many R2Ts of a command besides the first.
    fn open_with(from: Ipv4Addr, address: SocketAddr, max_r2t: u32) -> Self {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrV4::new(from, 0)).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        let mut socket = TcpStream::from(socket);
        socket.set_nodelay(true).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let request = IcReq { alignment: 0, header_digest: false, data_digest: false, max_r2t };
        socket.write_all(&pdu(&Header::IcReq(request), &[])).unwrap();
        let mut bytes = [0; 128];
        socket.read_exact(&mut bytes).unwrap();
        let mut parser = Parser::new(Side::Host, Limits { capsule_data_max: 0, data_max: 1 << 20 });
        let event = parser.next(&mut &bytes[..]).unwrap();
        let Some(Event::Header(Header::IcResp(answer))) = event else { panic!("{event:?}") };
        parser.establish(request.c2h_format(&answer));
        Self { socket, parser, received: VecDeque::new(), host: 1, incarnation: None }
    }

    /// Connects a queue of `entries` entries, and returns the result of Connect. `None`: the target has ended the
    /// connection.
    fn connect(self, subsystem: &str, qid: u16, id: u16, entries: u16) -> Option<(Self, u16)> {
        let (queue, status, result) = self.try_connect(subsystem, qid, id, entries)?;
        assert!(status.is_success(), "{status:?}");
        Some((queue, result as u16))
    }

    /// As [`Raw::connect`], with any status and the whole result.
    fn try_connect(
        mut self,
        subsystem: &str,
        qid: u16,
        id: u16,
        entries: u16,
    ) -> Option<(Self, Status, u32)> {
        let connect = Connect {
            record_format: 0,
            qid,
            sqsize: entries - 1,
            disables_flow_control: false,
            keep_alive_ms: 0,
        };
        let data = ConnectData {
            host_id: [self.host; 16],
            controller_id: id,
            subsystem: subsystem.parse().unwrap(),
            host: format!("nqn.2016-06.io.spdk:host{}", self.host).parse().unwrap(),
            incarnation: self.incarnation.map(|life| [life; 16]),
        };
        self.send(&capsule_with(Command::Connect(connect).encode(), &data.encode()));
        let completion = self.completion()?;
        Some((self, completion.status(), completion.result()))
    }

    /// Connects a queue, which nothing else follows. Returns the status and the result of Connect.
    pub fn start(address: SocketAddr, qid: u16, id: u16) -> (Self, Status, u32) {
        let opened = Self::open(Ipv4Addr::LOCALHOST, address).try_connect(SUBSYSTEM, qid, id, 16);
        opened.expect("Connect is answered")
    }

    /// Authenticates. Returns how that ends; `None`: the target has ended the connection.
    pub fn prove(&mut self, mut host: chap::Host) -> Option<Action> {
        loop {
            match host.action() {
                Action::Send(message) => {
                    let len = message.len() as u32;
                    let command = Command::AuthenticationSend { protocol: chap::PROTOCOL, len };
                    self.send(&capsule_with(command.encode(), &message));
                    self.completion()?;
                }
                Action::Receive => {
                    let command = Command::AuthenticationReceive { protocol: chap::PROTOCOL, len: 2048 };
                    let (code, message) =
                        self.run(command.encode().with_sgl(Sgl::Transport { len: 2048 }.encode()));
                    assert_eq!((code, message.len()), (Code::SUCCESS, 2048));
                    host.receive(&message);
                }
                ended => return Some(ended),
            }
        }
    }

    /// Authenticates, but does not ask how that has ended.
    pub fn prove_unasked(&mut self, mut host: chap::Host) {
        let mut sent = 0;
        while sent < 2 {
            match host.action() {
                Action::Send(message) => {
                    let len = message.len() as u32;
                    let command = Command::AuthenticationSend { protocol: chap::PROTOCOL, len };
                    self.send(&capsule_with(command.encode(), &message));
                    assert!(self.completion().unwrap().status().is_success());
                    sent += 1;
                }
                Action::Receive => {
                    let command = Command::AuthenticationReceive { protocol: chap::PROTOCOL, len: 2048 };
                    let entry = command.encode().with_sgl(Sgl::Transport { len: 2048 }.encode());
                    host.receive(&self.run(entry).1);
                }
                ended => panic!("{ended:?}"),
            }
        }
    }

    /// Enables the controller of an admin queue. Returns the status.
    pub fn try_enable(&mut self) -> Code {
        self.set_configuration(Cc::enabled(4096, false).0)
    }

    /// Sets the controller's configuration. Returns the status.
    pub fn set_configuration(&mut self, cc: u32) -> Code {
        let set = Command::PropertySet { access: Access::four(CC), value: cc.into() }.encode();
        self.run(set.with_sgl(Sgl::Transport { len: 0 }.encode())).0
    }

    /// An admin queue of a controller, which is enabled.
    pub fn admin(address: SocketAddr) -> (Self, u16) {
        Self::admin_of(address, SUBSYSTEM)
    }

    /// As [`Raw::admin`], of another subsystem.
    pub fn admin_of(address: SocketAddr, subsystem: &str) -> (Self, u16) {
        Self::open(Ipv4Addr::LOCALHOST, address).enable(subsystem)
    }

    /// As [`Raw::admin`], of another host than the first.
    pub fn admin_as(address: SocketAddr, host: u8) -> (Self, u16) {
        Self { host, ..Self::open(Ipv4Addr::LOCALHOST, address) }.enable(SUBSYSTEM)
    }

    /// As [`Raw::admin`], of a host that tells its incarnation if it is given.
    pub fn admin_in(address: SocketAddr, incarnation: Option<u8>) -> (Self, u16) {
        Self { incarnation, ..Self::open(Ipv4Addr::LOCALHOST, address) }.enable(SUBSYSTEM)
    }

    /// An I/O queue of another host than the first.
    pub fn io_as(address: SocketAddr, id: u16, qid: u16, entries: u16, host: u8) -> Self {
        let queue = Self { host, ..Self::open(Ipv4Addr::LOCALHOST, address) };
        queue.connect(SUBSYSTEM, qid, id, entries).expect("it is admitted").0
    }

    /// As [`Raw::admin`], of a host with this address.
    pub fn admin_from(from: Ipv4Addr, address: SocketAddr) -> (Self, u16) {
        Self::open(from, address).enable(SUBSYSTEM)
    }

    fn enable(self, subsystem: &str) -> (Self, u16) {
        let (mut queue, id) = self.connect(subsystem, 0, ANY_CONTROLLER, 32).expect("it is admitted");
        assert_eq!(queue.try_enable(), Code::SUCCESS);
        (queue, id)
    }

    /// An I/O queue.
    pub fn io(address: SocketAddr, id: u16, qid: u16, entries: u16) -> Self {
        Self::try_io(address, id, qid, entries).expect("it is admitted")
    }

    /// As [`Raw::io`], of a host that allows so many R2Ts of a command besides the first.
    pub fn io_with(address: SocketAddr, id: u16, max_r2t: u32) -> Self {
        let opened = Self::open_with(Ipv4Addr::LOCALHOST, address, max_r2t);
        opened.connect(SUBSYSTEM, 1, id, 16).expect("it is admitted").0
    }

    /// As [`Raw::io`]. `None`: the target has ended the connection.
    pub fn try_io(address: SocketAddr, id: u16, qid: u16, entries: u16) -> Option<Self> {
        let connected = Self::open(Ipv4Addr::LOCALHOST, address).connect(SUBSYSTEM, qid, id, entries);
        connected.map(|(queue, _)| queue)
    }

    /// Runs a command without data in the capsule, while no other one completes. Returns what it returns.
    pub fn run(&mut self, entry: SubmissionEntry) -> (Code, Vec<u8>) {
        self.send(&capsule(entry));
        let mut all = Vec::new();
        loop {
            match self.receive().expect("the connection goes on") {
                (Header::Response(completion), _) => {
                    assert_eq!(completion.cid(), entry.cid());
                    return (completion.status().code(), all);
                }
                (_, data) => all.extend(data),
            }
        }
    }

    /// Sends bytes. A target that has ended the connection takes none.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.socket.write_all(bytes);
    }

    /// Bytes that have arrived and were not received.
    pub fn unread(&self) -> u64 {
        rustix::io::ioctl_fionread(&self.socket).unwrap()
    }

    /// The next PDU with its data. `None`: the target has ended the connection.
    pub fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut bytes = [0; BLOCK];
        let mut partial: Option<(Header, Vec<u8>)> = None;
        loop {
            if partial.is_none()
                && let Some(received) = self.received.pop_front()
            {
                return Some(received);
            }
            let len = self.socket.read(&mut bytes).unwrap_or(0);
            let mut input = &bytes[..len];
            if len == 0 {
                return None;
            }
            while let Some(event) = self.parser.next(&mut input).unwrap() {
                match event {
                    Event::Header(header) => partial = Some((header, Vec::new())),
                    Event::Data { bytes, .. } => partial.as_mut().expect("a header").1.extend(bytes),
                    Event::End { .. } => self.received.extend(partial.take()),
                }
            }
        }
    }

    /// The next completion; what comes before is dropped. `None`: the target has ended the connection.
    pub fn completion(&mut self) -> Option<CompletionEntry> {
        loop {
            if let (Header::Response(entry), _) = self.receive()? {
                return Some(entry);
            }
        }
    }
}
