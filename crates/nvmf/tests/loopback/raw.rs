//! A host without rules: it sends what a test wants, and returns what comes.

use crate::target::{BLOCK, SUBSYSTEM};
use aryk_nvme::spec::entry::{CompletionEntry, SubmissionEntry};
use aryk_nvme::spec::register::{CC, Cc};
use aryk_nvme_fabrics::command::{Command, Connect};
use aryk_nvme_fabrics::connect::{ANY_CONTROLLER, ConnectData};
use aryk_nvme_fabrics::property::Access;
use aryk_nvme_fabrics::sgl::Sgl;
use aryk_nvme_fabrics::tcp::{Event, Format, HEADER_MAX, Header, IcReq, Limits, Parser, Side};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

/// A connection without digests.
pub struct Raw {
    pub socket: TcpStream,
    parser: Parser,
    received: VecDeque<(Header, Vec<u8>)>,
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
    pub fn open(address: SocketAddr) -> Self {
        let mut socket = TcpStream::connect(address).unwrap();
        let request = IcReq { alignment: 0, header_digest: false, data_digest: false, max_r2t: 0 };
        socket.write_all(&pdu(&Header::IcReq(request), &[])).unwrap();
        let mut bytes = [0; 128];
        socket.read_exact(&mut bytes).unwrap();
        let mut parser = Parser::new(Side::Host, Limits { capsule_data_max: 0, data_max: 1 << 20 });
        let event = parser.next(&mut &bytes[..]).unwrap();
        let Some(Event::Header(Header::IcResp(answer))) = event else { panic!("{event:?}") };
        parser.establish(request.c2h_format(&answer));
        Self { socket, parser, received: VecDeque::new() }
    }

    /// Connects a queue of `entries` entries of host 1, and returns the result of Connect.
    pub fn connect(address: SocketAddr, subsystem: &str, qid: u16, id: u16, entries: u16) -> (Self, u16) {
        let mut queue = Self::open(address);
        let connect = Connect {
            record_format: 0,
            qid,
            sqsize: entries - 1,
            disables_flow_control: false,
            keep_alive_ms: 0,
        };
        let data = ConnectData {
            host_id: [1; 16],
            controller_id: id,
            subsystem: subsystem.parse().unwrap(),
            host: "nqn.2016-06.io.spdk:host1".parse().unwrap(),
        };
        queue.send(&capsule_with(Command::Connect(connect).encode(), &data.encode()));
        let completion = queue.completion().expect("a completion of Connect");
        assert!(completion.status().is_success(), "{completion:?}");
        (queue, completion.result() as u16)
    }

    /// An admin queue of a controller, which is enabled.
    pub fn admin(address: SocketAddr) -> (Self, u16) {
        let (mut queue, id) = Self::connect(address, SUBSYSTEM, 0, ANY_CONTROLLER, 32);
        let value = Cc::enabled(4096, false).0.into();
        let enable = Command::PropertySet { access: Access::four(CC), value }.encode();
        queue.send(&capsule(enable.with_sgl(Sgl::Transport { len: 0 }.encode())));
        assert!(queue.completion().unwrap().status().is_success());
        (queue, id)
    }

    /// Sends bytes. A target that has ended the connection takes none.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.socket.write_all(bytes);
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
