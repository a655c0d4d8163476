//! The host of all measurements: one queue on the calling thread, which polls one socket and keeps requests in flight. It is the
//! same for each back-end that speaks NVMe/TCP. Data that arrives is checked by digests, where there are any, and dropped.

use super::output::Output;
use crate::frontend::Closed;
use crate::workload::Workload;
use anyhow::{Context, Result, bail, ensure};
use aryk_nvme::spec::entry::{CompletionEntry, SubmissionEntry};
use aryk_nvme::spec::register::{CC, Cc};
use aryk_nvme_fabrics::command::{Command, Connect};
use aryk_nvme_fabrics::connect::{ANY_CONTROLLER, ConnectData};
use aryk_nvme_fabrics::property::Access;
use aryk_nvme_fabrics::sgl::Sgl;
use aryk_nvme_fabrics::tcp::{
    DIGEST_LEN, DataDigest, Event, Format, H2cData, HEADER_MAX, Header, IcReq, Limits, Parser, Side,
};
use fastrand::Rng;
use hdrhistogram::Histogram;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketType};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Bytes of one read.
const READ_MAX: usize = 256 << 10;
/// Writes of at most this length have their data in the capsule.
const IN_CAPSULE_MAX: u32 = 8192;
/// The size of a block of the namespace.
const BLOCK: u64 = 512;
const READ: u8 = 2;
const WRITE: u8 = 1;
/// Turns of the loop between two readings of the clock.
const TURNS_PER_CLOCK_READ: u64 = 64;
/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A host with one queue.
#[derive(Debug)]
pub struct Host {
    socket: TcpStream,
    parser: Parser,
    format: Format,
    output: Output,
    input: Vec<u8>,
    workload: Workload,
    /// Bytes of the namespace.
    capacity: u64,
    /// The digest of the constant data.
    digest: [u8; DIGEST_LEN],
    random: Rng,
}

impl Host {
    /// Connects a socket and agrees on digests.
    ///
    /// # Errors
    /// The peer does not answer as it should.
    pub fn open(address: SocketAddr, has_digests: bool, workload: Workload, capacity: u64) -> Result<Self> {
        let socket = TcpStream::connect(address).with_context(|| format!("connecting to {address}"))?;
        Self::begin(socket, has_digests, workload, capacity)
    }

    /// As [`Self::open`] without digests, from an address of this computer's.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_from(from: Ipv4Addr, address: SocketAddr, workload: Workload) -> Result<Self> {
        let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
        net::bind(&socket, &SocketAddr::from((from, 0)))?;
        net::connect(&socket, &address).with_context(|| format!("connecting to {address}"))?;
        Self::begin(TcpStream::from(socket), false, workload, 0)
    }

    fn begin(socket: TcpStream, has_digests: bool, workload: Workload, capacity: u64) -> Result<Self> {
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
        let request =
            IcReq { alignment: 0, header_digest: has_digests, data_digest: has_digests, max_r2t: 0 };
        let limits = Limits { capsule_data_max: 0, data_max: workload.block.max(4096) };
        let output = Output::new(workload.block as usize);
        let mut digest = DataDigest::default();
        digest.update(output.data());
        let mut host = Self {
            socket,
            parser: Parser::new(Side::Host, limits),
            format: Format::default(),
            digest: digest.to_wire(),
            output,
            input: vec![0; READ_MAX],
            workload,
            capacity,
            random: Rng::with_seed(capacity),
        };
        host.send(&Header::IcReq(request));
        let Header::IcResp(answer) = host.header()? else { bail!("the target does not begin with ICResp") };
        request.check(&answer).map_err(|fatal| anyhow::anyhow!("ICResp is refused: {fatal:?}"))?;
        ensure!(answer.h2c_data_max >= workload.block, "MAXH2CDATA is {}", answer.h2c_data_max);
        host.parser.establish(request.c2h_format(&answer));
        host.format = answer.h2c_format();
        Ok(host)
    }

    /// Makes this the admin queue of a new controller and enables that. Returns the queue and the controller's number.
    ///
    /// # Errors
    /// The target refuses.
    pub fn into_admin(mut self, subsystem: &str) -> Result<(Self, u16)> {
        let queue = &mut self;
        let id = queue.connect(subsystem, 0, ANY_CONTROLLER, 32)?;
        let value = Cc::enabled(4096, false).0.into();
        let enable = Command::PropertySet { access: Access::four(CC), value }.encode();
        queue.command(enable.with_sgl(Sgl::Transport { len: 0 }.encode()), &[]);
        queue.completion()?;
        Ok((self, id))
    }

    /// Connects this queue to a controller, and returns the controller's number.
    ///
    /// # Errors
    /// The target refuses.
    pub fn connect(&mut self, subsystem: &str, qid: u16, controller_id: u16, entries: u16) -> Result<u16> {
        let connect = Connect {
            record_format: 0,
            qid,
            sqsize: entries - 1,
            disables_flow_control: false,
            keep_alive_ms: 0,
        };
        let data = ConnectData {
            host_id: [1; 16],
            controller_id,
            subsystem: subsystem.parse()?,
            host: "nqn.2014-08.org.nvmexpress:uuid:5f1ad9c1-7a3b-4d52-8d5f-9f3b6f0c8e11".parse()?,
            incarnation: None,
        }
        .encode();
        let len = data.len() as u32;
        self.command(
            Command::Connect(connect).encode().with_sgl(Sgl::InCapsule { offset: 0, len }.encode()),
            &data,
        );
        Ok(self.completion()?.result() as u16)
    }

    /// The socket, which stays connected.
    pub fn into_socket(self) -> TcpStream {
        self.socket
    }

    /// Keeps the workload's number of requests in flight for `span`.
    ///
    /// # Errors
    /// A request has failed, or the connection.
    pub fn closed(&mut self, span: Duration) -> Result<Closed> {
        let start = Instant::now();
        for cid in 0..self.workload.depth {
            self.submit(cid as u16);
        }
        let (mut left, mut requests, mut turns, mut is_going) = (self.workload.depth, 0, 0_u64, true);
        let mut progress = (start, 0);
        while left > 0 {
            self.turn(|host, cid| {
                requests += 1;
                if is_going {
                    host.submit(cid);
                } else {
                    left -= 1;
                }
            })?;
            turns += 1;
            if turns.is_multiple_of(TURNS_PER_CLOCK_READ) {
                is_going = is_going && start.elapsed() < span;
                if progress.1 != requests {
                    progress = (Instant::now(), requests);
                }
                ensure!(progress.0.elapsed() < TIMEOUT, "no request has completed for {TIMEOUT:?}");
            }
        }
        Ok(Closed { requests, elapsed: start.elapsed() })
    }

    /// Sends requests on a Poisson schedule of `rate` a second for `span`. Latencies count from the scheduled times, in ns.
    ///
    /// # Errors
    /// As [`Self::closed`].
    pub fn open_loop(&mut self, rate: f64, span: Duration) -> Result<(u64, Histogram<u64>)> {
        let mut latency = Histogram::new_with_bounds(1, 60_000_000_000, 3)?;
        let mut free: Vec<u16> = (0..self.workload.depth as u16).collect();
        let mut due_at = vec![Duration::ZERO; free.len()];
        let gap = |random: &mut Rng| Duration::from_secs_f64(-(1.0 - random.f64()).ln() / rate);
        let (start, mut due, mut requests) = (Instant::now(), gap(&mut self.random), 0);
        while due < span || free.len() < due_at.len() {
            let now = start.elapsed();
            while due <= now.min(span) {
                let Some(cid) = free.pop() else { break };
                due_at[usize::from(cid)] = due;
                self.submit(cid);
                due += gap(&mut self.random);
            }
            self.turn(|_, cid| {
                requests += 1;
                let took = start.elapsed().saturating_sub(due_at[usize::from(cid)]);
                latency.saturating_record(took.as_nanos() as u64);
                free.push(cid);
            })?;
            ensure!(now < span + TIMEOUT, "a request has not completed for {TIMEOUT:?}");
        }
        Ok((requests, latency))
    }

    /// Sends what waits, and reads once.
    fn turn(&mut self, mut completed: impl FnMut(&mut Self, u16)) -> Result<()> {
        self.output.flush(&self.socket)?;
        let mut input = std::mem::take(&mut self.input);
        let result = match rustix::io::read(&self.socket, &mut input) {
            Ok(0) => Err(anyhow::anyhow!("the target has ended the connection")),
            Ok(len) => self.take(&input[..len], &mut completed),
            Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(error).context("reading from the target"),
        };
        self.input = input;
        result
    }

    fn take(&mut self, mut input: &[u8], completed: &mut impl FnMut(&mut Self, u16)) -> Result<()> {
        while let Some(event) = self.parser.next(&mut input).map_err(|fatal| anyhow::anyhow!("{fatal:?}"))? {
            match event {
                Event::Header(Header::Response(entry)) => {
                    ensure!(entry.status().is_success(), "a request has failed: {entry:?}");
                    completed(self, entry.cid());
                }
                Event::Header(Header::R2t(r2t)) => {
                    ensure!(r2t.offset == 0 && r2t.len == self.workload.block, "an R2T of a part: {r2t:?}");
                    let data = H2cData { cid: r2t.cid, tag: r2t.tag, offset: 0, len: r2t.len, is_last: true };
                    self.send(&Header::H2cData(data));
                    self.send_data();
                }
                Event::Header(Header::C2hData(data)) => {
                    ensure!(!data.is_success, "SUCCESS, although the queue has flow control");
                }
                Event::Header(header) => bail!("the target sends {header:?}"),
                Event::End { is_intact } => ensure!(is_intact, "data has another digest"),
                Event::Data { .. } => {}
            }
        }
        Ok(())
    }

    fn submit(&mut self, cid: u16) {
        let Workload { block, write_percent, .. } = self.workload;
        let lba = self.random.u64(0..self.capacity / u64::from(block)) * (u64::from(block) / BLOCK);
        let is_write = self.random.u32(0..100) < write_percent;
        let entry = SubmissionEntry::new(if is_write { WRITE } else { READ }, 1)
            .with_cid(cid)
            .with_cdw10_11(lba as u32, (lba >> 32) as u32)
            .with_cdw12_13(block / BLOCK as u32 - 1, 0);
        if is_write && block <= IN_CAPSULE_MAX {
            let entry = entry.with_sgl(Sgl::InCapsule { offset: 0, len: block }.encode());
            self.send(&Header::Command { entry, data_len: block });
            self.send_data();
        } else {
            let entry = entry.with_sgl(Sgl::Transport { len: block }.encode());
            self.send(&Header::Command { entry, data_len: 0 });
        }
    }

    fn send(&mut self, header: &Header) {
        let mut bytes = [0; HEADER_MAX];
        let len = header.encode(&self.format, &mut bytes);
        self.output.header(&bytes[..len]);
    }

    fn send_data(&mut self) {
        self.output.constant(0..self.workload.block as usize);
        if self.format.data_digest {
            let digest = self.digest;
            self.output.header(&digest);
        }
    }

    /// Sends a command of the connection's beginning.
    fn command(&mut self, entry: SubmissionEntry, data: &[u8]) {
        self.send(&Header::Command { entry, data_len: data.len() as u32 });
        self.output.header(data);
        if self.format.data_digest && !data.is_empty() {
            let mut digest = DataDigest::default();
            digest.update(data);
            self.output.header(&digest.to_wire());
        }
    }

    /// Waits for the completion of a command of the connection's beginning.
    fn completion(&mut self) -> Result<CompletionEntry> {
        let Header::Response(entry) = self.header()? else { bail!("the target sends no completion") };
        ensure!(entry.status().is_success(), "the target refuses: {entry:?}");
        Ok(entry)
    }

    /// Waits for the next header.
    fn header(&mut self) -> Result<Header> {
        let start = Instant::now();
        loop {
            self.output.flush(&self.socket)?;
            let mut input = [0; 128];
            let len = match rustix::io::read(&self.socket, &mut input) {
                Ok(0) => bail!("the target has ended the connection"),
                Ok(len) => len,
                Err(Errno::AGAIN) => {
                    ensure!(start.elapsed() < TIMEOUT, "the target does not answer");
                    continue;
                }
                Err(error) => return Err(error).context("reading from the target"),
            };
            let (mut rest, mut found) = (&input[..len], None);
            while let Some(event) =
                self.parser.next(&mut rest).map_err(|fatal| anyhow::anyhow!("{fatal:?}"))?
            {
                if let Event::Header(header) = event {
                    found = Some(header);
                    if matches!(header, Header::IcResp(_)) {
                        break;
                    }
                }
            }
            if let Some(header) = found {
                return Ok(header);
            }
        }
    }
}
