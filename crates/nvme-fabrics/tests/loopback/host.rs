//! The host: one connection with a queue pair, and commands that wait for their completions.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::opcode::{admin, io};
use aryk_nvme::spec::register::{CC, CSTS, Cc, Csts};
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::command::{Command, Connect};
use aryk_nvme_fabrics::connect::{ANY_CONTROLLER, ConnectData};
use aryk_nvme_fabrics::property::Access;
use aryk_nvme_fabrics::sgl::Sgl;
use aryk_nvme_fabrics::tcp::{
    DataDigest, Event, Fatal, Format, H2cData, HEADER_MAX, Header, IcReq, IcResp, Limits, Parser, Side, Span,
};

use super::target::{BLOCK, IN_CAPSULE_MAX, SUBSYSTEM};

/// Entries of every queue.
const ENTRIES: u16 = 16;

/// How long a test waits for an answer before it fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the host wants.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    pub header_digest: bool,
    pub data_digest: bool,
    pub disables_flow_control: bool,
    pub alignment: u8,
}

/// A command in flight.
struct Pending {
    cid: u16,
    /// What the controller may request.
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    span: Span,
    status: Option<Code>,
    result: u64,
}

/// A connection.
pub struct Connection {
    socket: TcpStream,
    parser: Parser,
    format: Format,
    h2c_data_max: usize,
    pending: Vec<Pending>,
    next_cid: u16,
    /// The command whose data arrives, and the place of the PDU's data.
    target: Option<(u16, u32)>,
    /// The command that succeeds at the end of the PDU that arrives.
    succeeded: Option<u16>,
    /// Bytes that are sent beyond those that an R2T requests.
    excess: usize,
    terminated: Option<Fatal>,
}

fn data(subsystem: &str, controller_id: u16, host: u8) -> Vec<u8> {
    let data = ConnectData {
        host_id: [host; 16],
        controller_id,
        subsystem: subsystem.parse().unwrap(),
        host: format!("nqn.2016-06.io.spdk:host{host}").parse().unwrap(),
        incarnation: None,
    };
    data.encode().to_vec()
}

impl Connection {
    fn open(address: SocketAddr, options: Options) -> Self {
        let request = IcReq {
            alignment: options.alignment,
            header_digest: options.header_digest,
            data_digest: options.data_digest,
            max_r2t: 0,
        };
        let mut socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut bytes = [0; HEADER_MAX];
        let len = Header::IcReq(request).encode(&Format::default(), &mut bytes);
        socket.write_all(&bytes[..len]).unwrap();
        let mut parser = Parser::new(Side::Host, Limits { capsule_data_max: 0, data_max: 1 << 20 });
        socket.read_exact(&mut bytes[..128]).unwrap();
        let event = parser.next(&mut &bytes[..128]).unwrap();
        let Some(Event::Header(Header::IcResp(answer))) = event else { panic!("{event:?}") };
        request.check(&answer).unwrap();
        parser.establish(request.c2h_format(&answer));
        let IcResp { h2c_data_max, .. } = answer;
        Self {
            socket,
            parser,
            format: answer.h2c_format(),
            h2c_data_max: h2c_data_max as usize,
            pending: Vec::new(),
            next_cid: 0,
            target: None,
            succeeded: None,
            excess: 0,
            terminated: None,
        }
    }

    fn connect(&mut self, options: Options, qid: u16, data: &[u8]) -> Result<u64, Code> {
        let connect = Connect {
            record_format: 0,
            qid,
            sqsize: ENTRIES - 1,
            disables_flow_control: options.disables_flow_control,
            keep_alive_ms: 0,
        };
        self.run(Command::Connect(connect).encode(), data, 0).map(|(result, _)| result)
    }

    /// An admin queue of a controller that is not enabled; and the controller's identifier.
    pub fn try_admin(
        address: SocketAddr,
        options: Options,
        subsystem: &str,
        host: u8,
    ) -> Result<(Self, u16), Code> {
        let mut queue = Self::open(address, options);
        let id = queue.connect(options, 0, &data(subsystem, ANY_CONTROLLER, host))?;
        Ok((queue, id as u16))
    }

    /// An admin queue of a controller, which is enabled; and the controller's identifier.
    pub fn admin(address: SocketAddr, options: Options, subsystem: &str, host: u8) -> (Self, u16) {
        let (mut queue, id) = Self::try_admin(address, options, subsystem, host).unwrap();
        assert!(queue.configure(Cc::enabled(4096, false)).is_ready());
        (queue, id)
    }

    /// Sets CC, and returns CSTS.
    pub fn configure(&mut self, cc: Cc) -> Csts {
        let value = cc.0.into();
        self.run(Command::PropertySet { access: Access::four(CC), value }.encode(), &[], 0).unwrap();
        let (csts, _) = self.run(Command::PropertyGet(Access::four(CSTS)).encode(), &[], 0).unwrap();
        Csts(csts as u32)
    }

    /// An I/O queue.
    pub fn io(address: SocketAddr, options: Options, id: u16, qid: u16, host: u8) -> Result<Self, Code> {
        let mut queue = Self::open(address, options);
        queue.connect(options, qid, &data(SUBSYSTEM, id, host))?;
        Ok(queue)
    }

    pub fn identify(&mut self, structure: u8, nsid: u32) -> Vec<u8> {
        let entry = SubmissionEntry::new(admin::IDENTIFY, nsid).with_cdw10_11(structure.into(), 0);
        self.run(entry, &[], 4096).unwrap().1
    }

    pub fn log(&mut self, id: u8, offset: u64, len: usize) -> Vec<u8> {
        let dwords = len as u32 / 4 - 1;
        let entry = SubmissionEntry::new(admin::GET_LOG_PAGE, 0)
            .with_cdw10_11(u32::from(id) | dwords << 16, dwords >> 16)
            .with_cdw12_13(offset as u32, (offset >> 32) as u32);
        self.run(entry, &[], len).unwrap().1
    }

    pub fn write(&mut self, lba: u64, data: &[u8]) -> Result<(), Code> {
        self.command(io::WRITE, lba, data.len() / BLOCK, data, 0).map(|_| ())
    }

    pub fn read(&mut self, lba: u64, blocks: usize) -> Result<Vec<u8>, Code> {
        self.command(io::READ, lba, blocks, &[], blocks * BLOCK)
    }

    /// Runs a command of namespace 1 with these blocks.
    pub fn command(
        &mut self,
        opcode: u8,
        lba: u64,
        blocks: usize,
        data: &[u8],
        expects: usize,
    ) -> Result<Vec<u8>, Code> {
        self.run(entry(opcode, lba, blocks), data, expects).map(|(_, data)| data)
    }

    /// Starts a read, or a write of zeroes, and returns its identifier.
    pub fn start(&mut self, opcode: u8, lba: u64, blocks: usize) -> u16 {
        let len = blocks * BLOCK;
        match opcode {
            io::WRITE => self.submit_write(lba, &vec![0; len]),
            _ => self.submit(entry(opcode, lba, blocks), &[], len),
        }
    }

    /// Starts a write of this data, and returns its identifier.
    pub fn submit_write(&mut self, lba: u64, data: &[u8]) -> u16 {
        self.submit(entry(io::WRITE, lba, data.len() / BLOCK), data, 0)
    }

    /// Waits for this many commands, all of which succeed.
    pub fn finish(&mut self, count: usize) -> Vec<(u16, Vec<u8>)> {
        while self.pending.iter().filter(|pending| pending.status.is_some()).count() < count {
            self.receive();
        }
        let done = self.pending.drain(..).map(|pending| {
            assert_eq!(pending.status, Some(Code::SUCCESS));
            (pending.cid, pending.incoming)
        });
        done.collect()
    }

    /// Runs a command, and returns its result and its data.
    pub fn run(
        &mut self,
        entry: SubmissionEntry,
        data: &[u8],
        expects: usize,
    ) -> Result<(u64, Vec<u8>), Code> {
        let cid = self.submit(entry, data, expects);
        self.wait(cid)
    }

    /// Waits for a command, and returns its result and its data.
    pub fn wait(&mut self, cid: u16) -> Result<(u64, Vec<u8>), Code> {
        loop {
            let place = self.pending.iter().position(|pending| pending.cid == cid).unwrap();
            match self.pending[place].status {
                Some(Code::SUCCESS) => {
                    let pending = self.pending.remove(place);
                    return Ok((pending.result, pending.incoming));
                }
                Some(code) => {
                    self.pending.remove(place);
                    return Err(code);
                }
                None => self.receive(),
            }
        }
    }

    /// Starts a command, and returns its identifier.
    pub fn submit(&mut self, entry: SubmissionEntry, data: &[u8], expects: usize) -> u16 {
        let cid = self.next_cid;
        self.next_cid += 1;
        let is_in_capsule = !data.is_empty() && data.len() <= IN_CAPSULE_MAX as usize;
        let len = data.len().max(expects) as u32;
        let sgl = if is_in_capsule { Sgl::InCapsule { offset: 0, len } } else { Sgl::Transport { len } };
        self.pending.push(Pending {
            cid,
            outgoing: if is_in_capsule { Vec::new() } else { data.to_vec() },
            incoming: vec![0; expects],
            span: Span::new(0, expects as u32),
            status: None,
            result: 0,
        });
        let data = if is_in_capsule { data } else { &[] };
        let entry = entry.with_cid(cid).with_sgl(sgl.encode());
        self.send(&Header::Command { entry, data_len: data.len() as u32 }, data);
        cid
    }

    fn send(&mut self, header: &Header, data: &[u8]) {
        let mut bytes = vec![0; HEADER_MAX];
        let start = header.encode(&self.format, &mut bytes);
        bytes.truncate(start);
        bytes.extend(data);
        if self.format.data_digest && !data.is_empty() {
            let mut digest = DataDigest::default();
            digest.update(data);
            bytes.extend(digest.to_wire());
        }
        self.socket.write_all(&bytes).unwrap();
    }

    /// Receives once, and handles what came.
    fn receive(&mut self) {
        let mut bytes = [0; 5000];
        let len = self.socket.read(&mut bytes).unwrap();
        assert!(len > 0, "the target closed the connection");
        let (mut input, mut requested) = (&bytes[..len], Vec::new());
        while let Some(event) = self.parser.next(&mut input).unwrap() {
            match event {
                Event::Header(header) => requested.extend(self.begin(header)),
                Event::Data { offset, bytes } => {
                    if let Some((cid, start)) = self.target {
                        let at = (start + offset) as usize;
                        self.find(cid).incoming[at..at + bytes.len()].copy_from_slice(bytes);
                    }
                }
                Event::End { is_intact } => {
                    assert!(is_intact);
                    if let Some(cid) = self.succeeded.take() {
                        self.find(cid).status = Some(Code::SUCCESS);
                    }
                }
            }
        }
        for (cid, tag, offset, len) in requested {
            self.send_requested(cid, tag, offset, len + self.excess);
        }
    }

    fn begin(&mut self, header: Header) -> Option<(u16, u16, usize, usize)> {
        self.target = None;
        match header {
            Header::R2t(r2t) => return Some((r2t.cid, r2t.tag, r2t.offset as usize, r2t.len as usize)),
            Header::Response(entry) => {
                let pending = self.find(entry.cid());
                (pending.status, pending.result) = (Some(entry.status().code()), entry.result_64());
            }
            Header::C2hData(data) => {
                let pending = self.find(data.cid);
                pending.span.accept(data.offset, data.len, data.is_last).unwrap();
                self.succeeded = data.is_success.then_some(data.cid);
                self.target = Some((data.cid, data.offset));
            }
            Header::TermReq { fatal, .. } => self.terminated = Some(fatal),
            Header::IcReq(_) | Header::IcResp(_) | Header::Command { .. } | Header::H2cData(_) => {
                panic!("{header:?}")
            }
        }
        None
    }

    fn find(&mut self, cid: u16) -> &mut Pending {
        self.pending.iter_mut().find(|pending| pending.cid == cid).expect("a command in flight")
    }

    fn send_requested(&mut self, cid: u16, tag: u16, offset: usize, len: usize) {
        let data = self.find(cid).outgoing[offset..offset + len].to_vec();
        let mut at = offset;
        for piece in data.chunks(self.h2c_data_max) {
            let header = H2cData {
                cid,
                tag,
                offset: at as u32,
                len: piece.len() as u32,
                is_last: at + piece.len() == offset + len,
            };
            self.send(&Header::H2cData(header), piece);
            at += piece.len();
        }
    }

    /// Sends data without an R2T, and returns why the controller ends the connection.
    pub fn send_unrequested_data(&mut self) -> Fatal {
        let header = H2cData { cid: 1, tag: 3, offset: 0, len: 512, is_last: true };
        self.send(&Header::H2cData(header), &[0; 512]);
        self.receive_fatal()
    }

    /// Answers the R2T of a write of 3 blocks at block 0 with a block more than it requests, and returns why the controller ends
    /// the connection.
    pub fn send_excessive_data(&mut self) -> Fatal {
        let data = vec![0xee; 4 * BLOCK];
        let cid = self.submit(entry(io::WRITE, 0, 3), &data[..3 * BLOCK], 0);
        self.find(cid).outgoing = data;
        self.excess = BLOCK;
        self.receive_fatal()
    }

    fn receive_fatal(&mut self) -> Fatal {
        while self.terminated.is_none() {
            self.receive();
        }
        self.terminated.unwrap()
    }
}

fn entry(opcode: u8, lba: u64, blocks: usize) -> SubmissionEntry {
    SubmissionEntry::new(opcode, 1)
        .with_cdw10_11(lba as u32, (lba >> 32) as u32)
        .with_cdw12_13(blocks as u32 - 1, 0)
}
