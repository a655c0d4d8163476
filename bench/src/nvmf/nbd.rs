//! The peer: `qemu-nbd` with a file in memory, and a host for it. NBD is not NVMe/TCP: it shows what another server of disks
//! takes for almost the same bytes on the same socket. One connection of `qemu-nbd` has at most 16 requests at a time; the host's
//! others wait in the socket.

use super::output::Output;
use crate::process::{BACK_END_CORE, Process};
use crate::workload::Workload;
use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use rustix::io::Errno;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

const READ_MAX: usize = 256 << 10;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const EXPORT_NAME: u32 = 1;
/// NBD_FLAG_C_FIXED_NEWSTYLE and NBD_FLAG_C_NO_ZEROES.
const CLIENT_FLAGS: u32 = 3;
const REPLY: usize = 16;
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A `qemu-nbd`, which is stopped unless it is measured.
#[derive(Debug)]
pub struct Server {
    /// The process.
    pub process: Process,
    address: SocketAddr,
    capacity: u64,
}

impl Server {
    /// Starts it with a file of `capacity` bytes without holes.
    ///
    /// # Errors
    /// It does not listen.
    pub fn start(file: &Path, capacity: u64) -> Result<Self> {
        let mut out = std::fs::File::create(file)?;
        let chunk: Vec<u8> = (0..1 << 20).map(|at: u32| (at >> 3) as u8 | 1).collect();
        for _ in 0..capacity >> 20 {
            out.write_all(&chunk)?;
        }
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let (core, port) = (BACK_END_CORE.to_string(), address.port().to_string());
        let path = file.display().to_string();
        let args = ["-c", &core, "qemu-nbd", "-f", "raw", "-t", "-b", "127.0.0.1", "-p", &port, &path];
        let process = Process::start("qemu-nbd", Path::new("taskset"), &args)?;
        let start = Instant::now();
        while TcpStream::connect(address).is_err() {
            ensure!(start.elapsed() < START_TIMEOUT, "qemu-nbd does not listen at {address}");
            std::thread::sleep(Duration::from_millis(5));
        }
        process.pause()?;
        Ok(Self { process, address, capacity })
    }

    /// Requests per second of one connection, which keeps the workload's number in flight for `span`.
    ///
    /// # Errors
    /// A request has failed, or the connection.
    pub fn run(&self, workload: Workload, warm_up: Duration, span: Duration) -> Result<f64> {
        self.process.resume()?;
        let mut queue = Queue::connect(self.address, workload, self.capacity)?;
        queue.closed(warm_up)?;
        let rate = queue.closed(span)?;
        drop(queue);
        self.process.pause()?;
        Ok(rate)
    }
}

struct Queue {
    socket: TcpStream,
    output: Output,
    input: Vec<u8>,
    filled: usize,
    /// Bytes of the present reply's data that are to come, and the request's number.
    arriving: Option<(usize, u64)>,
    workload: Workload,
    capacity: u64,
    random: Rng,
}

impl Queue {
    fn connect(address: SocketAddr, workload: Workload, capacity: u64) -> Result<Self> {
        let mut socket = TcpStream::connect(address)?;
        let mut hello = [0; 18];
        socket.read_exact(&mut hello).context("reading the greeting of qemu-nbd")?;
        ensure!(hello.starts_with(b"NBDMAGICIHAVEOPT"), "qemu-nbd does not greet");
        socket.write_all(&CLIENT_FLAGS.to_be_bytes())?;
        let option =
            [&OPTION_MAGIC.to_be_bytes()[..], &EXPORT_NAME.to_be_bytes(), &0_u32.to_be_bytes()].concat();
        socket.write_all(&option)?;
        let mut export = [0; 10];
        socket.read_exact(&mut export).context("reading the export of qemu-nbd")?;
        let size = u64::from_be_bytes(export[..8].try_into().expect("8 bytes"));
        ensure!(size == capacity, "the export has {size} bytes");
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            output: Output::new(workload.block as usize),
            input: vec![0; READ_MAX],
            filled: 0,
            arriving: None,
            workload,
            capacity,
            random: Rng::with_seed(capacity),
        })
    }

    fn submit(&mut self, number: u64) {
        let Workload { block, write_percent, .. } = self.workload;
        let offset = self.random.u64(0..self.capacity / u64::from(block)) * u64::from(block);
        let is_write = write_percent == 100;
        let mut request = [0; 28];
        request[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        request[7] = is_write.into();
        request[8..16].copy_from_slice(&number.to_be_bytes());
        request[16..24].copy_from_slice(&offset.to_be_bytes());
        request[24..].copy_from_slice(&block.to_be_bytes());
        self.output.header(&request);
        if is_write {
            self.output.constant(0..block as usize);
        }
    }

    fn closed(&mut self, span: Duration) -> Result<f64> {
        let start = Instant::now();
        (0..self.workload.depth as u64).for_each(|number| self.submit(number));
        let (mut left, mut requests) = (self.workload.depth, 0_u64);
        while left > 0 {
            let is_going = start.elapsed() < span;
            for number in self.turn()? {
                requests += 1;
                if is_going {
                    self.submit(number);
                } else {
                    left -= 1;
                }
            }
            ensure!(start.elapsed() < span + START_TIMEOUT, "qemu-nbd does not answer");
        }
        Ok(requests as f64 / start.elapsed().as_secs_f64())
    }

    /// Sends what waits, reads once, and returns the requests that have completed.
    fn turn(&mut self) -> Result<Vec<u64>> {
        self.output.flush(&self.socket)?;
        let len = match rustix::io::read(&self.socket, &mut self.input[self.filled..]) {
            Ok(0) => anyhow::bail!("qemu-nbd has ended the connection"),
            Ok(len) => self.filled + len,
            Err(Errno::AGAIN) => return Ok(Vec::new()),
            Err(error) => return Err(error).context("reading from qemu-nbd"),
        };
        let (mut at, mut done) = (0, Vec::new());
        loop {
            if let Some((left, number)) = &mut self.arriving {
                let part = (*left).min(len - at);
                at += part;
                *left -= part;
                if *left > 0 {
                    break;
                }
                done.push(*number);
                self.arriving = None;
            }
            let rest = &self.input[at..len];
            if rest.len() < REPLY {
                break;
            }
            ensure!(rest[..4] == REPLY_MAGIC.to_be_bytes() && rest[4..8] == [0; 4], "a request has failed");
            let number = u64::from_be_bytes(rest[8..16].try_into().expect("8 bytes"));
            at += REPLY;
            let data = if self.workload.write_percent == 100 { 0 } else { self.workload.block as usize };
            self.arriving = Some((data, number));
        }
        self.input.copy_within(at..len, 0);
        self.filled = len - at;
        Ok(done)
    }
}
