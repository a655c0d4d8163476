//! The bare loop, which the target is compared with: a thread that polls one socket, reads capsules by their lengths, and answers
//! each with as many bytes as a target does, from constant memory. It has no queue, no disk, no checks, and no digests.

use super::output::Output;
use crate::process::{self, BACK_END_CORE};
use anyhow::{Context, Result};
use aryk_nvme::spec::entry::CompletionEntry;
use aryk_nvme::spec::status::Status;
use aryk_nvme_fabrics::tcp::{C2hData, Format, HEADER_MAX, Header, IcResp, R2t};
use rustix::io::Errno;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Bytes of one read, as the target's.
const READ_MAX: usize = 256 << 10;
/// Bytes of the headers that it reads.
const COMMON: usize = 8;
const CAPSULE: usize = 72;
const H2C_DATA: usize = 24;
/// PDU types.
const COMMAND: u8 = 4;
/// An I/O command's opcode.
const WRITE: u8 = 1;

/// What a connection has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    /// Requests that were answered.
    pub requests: u64,
    /// Time in turns that have read something.
    pub busy: Duration,
    /// System calls of such turns.
    pub calls: u64,
}

/// Listens on a thread of its own, on the back-ends' core, which serves one connection after the other and waits in between.
/// Each connection's work is sent when the connection has ended.
///
/// # Errors
/// A process without sockets.
pub fn listen(block: u32) -> Result<(SocketAddr, std::sync::mpsc::Receiver<Work>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || -> Result<()> {
        process::pin(BACK_END_CORE)?;
        loop {
            let work = serve(&listener.accept()?.0, block)?;
            if sender.send(work).is_err() {
                return Ok(());
            }
        }
    });
    Ok((address, receiver))
}

/// The data that arrives.
#[derive(Clone, Copy, Debug, Default)]
struct Arriving {
    left: usize,
    cid: u16,
}

/// Serves until the host closes the connection.
fn serve(mut socket: &TcpStream, block: u32) -> Result<Work> {
    let settled = IcResp { alignment: 0, header_digest: false, data_digest: false, h2c_data_max: block };
    let mut first = [0; 128];
    socket.read_exact(&mut first).context("reading ICReq")?;
    socket.write_all(&encode(&Header::IcResp(settled)))?;
    socket.set_nodelay(true)?;
    socket.set_nonblocking(true)?;
    let (mut output, mut input) = (Output::new(block as usize), vec![0; READ_MAX]);
    let (mut filled, mut arriving, mut work) = (0, None, Work::default());
    loop {
        let start = Instant::now();
        let len = match rustix::io::read(socket, &mut input[filled..]) {
            Ok(0) | Err(Errno::CONNRESET) => return Ok(work),
            Ok(len) => len,
            Err(Errno::AGAIN) => {
                output.flush(socket)?;
                continue;
            }
            Err(error) => return Err(error).context("reading"),
        };
        let used = take(&input[..filled + len], &mut arriving, block, &mut output, &mut work.requests);
        input.copy_within(used..filled + len, 0);
        filled = filled + len - used;
        let calls = output.calls;
        output.flush(socket)?;
        work.calls += 1 + output.calls - calls;
        work.busy += start.elapsed();
    }
}

/// Answers what is complete in `input`, and returns the number of bytes that were used.
fn take(
    input: &[u8],
    arriving: &mut Option<Arriving>,
    block: u32,
    output: &mut Output,
    requests: &mut u64,
) -> usize {
    let mut at = 0;
    loop {
        let rest = &input[at..];
        if let Some(data) = arriving {
            let part = data.left.min(rest.len());
            at += part;
            data.left -= part;
            if data.left > 0 {
                return at;
            }
            complete(output, data.cid, requests);
            *arriving = None;
            continue;
        }
        if rest.len() < COMMON {
            return at;
        }
        let is_command = rest[0] == COMMAND;
        let header = if is_command { CAPSULE } else { H2C_DATA };
        if rest.len() < header {
            return at;
        }
        let len = u32::from_le_bytes([rest[4], rest[5], rest[6], rest[7]]) as usize;
        // A capsule has its command behind the common header, with the identifier in its third byte; H2CData has it there.
        let number = if is_command { COMMON + 2 } else { COMMON };
        let cid = u16::from_le_bytes([rest[number], rest[number + 1]]);
        at += header;
        if len > header {
            *arriving = Some(Arriving { left: len - header, cid });
        } else if rest[COMMON] == WRITE {
            output.header(&encode(&Header::R2t(R2t { cid, tag: cid, offset: 0, len: block })));
        } else {
            let data = C2hData { cid, offset: 0, len: block, is_last: true, is_success: false };
            output.header(&encode(&Header::C2hData(data)));
            output.constant(0..block as usize);
            complete(output, cid, requests);
        }
    }
}

fn complete(output: &mut Output, cid: u16, requests: &mut u64) {
    output.header(&encode(&Header::Response(CompletionEntry::new(cid, Status::new(0), 0))));
    *requests += 1;
}

fn encode(header: &Header) -> Encoded {
    let mut bytes = [0; HEADER_MAX];
    let len = header.encode(&Format::default(), &mut bytes);
    Encoded { bytes, len }
}

/// The bytes of a header.
struct Encoded {
    bytes: [u8; HEADER_MAX],
    len: usize,
}

impl std::ops::Deref for Encoded {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}
