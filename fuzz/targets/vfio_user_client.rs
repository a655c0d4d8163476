//! A vfio-user client with a hostile server: wrong answers at any point, with file descriptors of every kind, and accesses to
//! memory at any address. The client reports errors, and the server reaches no memory that is not mapped.
//!
//! The input is a list of steps, one for each request of the client: a byte for the shape of the answer, then its parameters.
//! Without a step, the answer is right.
#![no_main]

use aryk_dma::{Mapping, PAGE};
use aryk_pci::vfio_user::Client;
use aryk_pci::{Function, Width};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// Commands of the protocol.
const VERSION: u16 = 1;
const GET_INFO: u16 = 4;
const GET_REGION_INFO: u16 = 5;
const GET_IRQ_INFO: u16 = 7;
const REGION_READ: u16 = 9;
const REGION_WRITE: u16 = 10;
const DMA_READ: u16 = 11;
const DMA_WRITE: u16 = 12;

/// The length of the server's registers.
const BAR: u64 = 0x3000;

/// The byte of all memory before the server writes to it.
const UNTOUCHED: u8 = 0x5a;

/// Short, because each input without an answer costs it. A timeout is an error like any other.
const TIMEOUT: Duration = Duration::from_millis(20);

struct Server {
    socket: UnixStream,
    registers: OwnedFd,
    /// The newest memory that the client has mapped.
    iova: u64,
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn message(id: u16, command: u16, flags: u32, error: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = [id.to_le_bytes(), command.to_le_bytes()].concat();
    bytes.extend(words(&[16 + body.len() as u32, flags, error]));
    bytes.extend(body);
    bytes
}

/// A right answer.
fn answer(command: u16, request: &[u8]) -> Vec<u8> {
    let word = |at: usize| request.get(at..at + 4).map_or(0, |b| u32::from_le_bytes(b.try_into().unwrap()));
    match command {
        VERSION => [words(&[1 << 16]), b"{\"capabilities\":{\"max_msg_fds\":2}}\0".to_vec()].concat(),
        GET_INFO => words(&[16, 3, 9, 5]),
        // Readable, writable, mappable from 0x1000 on: a sparse area.
        GET_REGION_INFO if word(8) == 0 => {
            words(&[64, 0xf, 0, 32, BAR as u32, 0, 0, 0, 1 | 1 << 16, 0, 1, 0, 0x1000, 0, 0x2000, 0])
        }
        GET_REGION_INFO => words(&[32, 3, word(8), 0, 256, 0, 0, 0]),
        GET_IRQ_INFO => words(&[16, 1, word(8), 5]),
        REGION_READ => [&request[..request.len().min(16)], &vec![0; word(12) as usize % 4096]].concat(),
        REGION_WRITE => request[..request.len().min(16)].to_vec(),
        _ => Vec::new(),
    }
}

impl Server {
    fn run(mut self, input: &mut Unstructured<'_>) {
        while let Some((id, command, request)) = self.receive() {
            if command == 2 && request.len() == 32 {
                self.iova = u64::from_le_bytes(request[16..24].try_into().unwrap());
            }
            if self.step(input, id, command, &request).is_err() {
                // No more steps: all answers are right.
                let fds: &[BorrowedFd<'_>] =
                    if command == GET_REGION_INFO { &[self.registers.as_fd()] } else { &[] };
                self.send(&message(id, command, 1, 0, &answer(command, &request)), fds);
            }
        }
    }

    fn receive(&mut self) -> Option<(u16, u16, Vec<u8>)> {
        let mut head = [0; 16];
        loop {
            self.socket.read_exact(&mut head).ok()?;
            let half = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
            let size = u32::from_le_bytes(head[4..8].try_into().unwrap());
            let mut body = vec![0; size as usize - 16];
            self.socket.read_exact(&mut body).ok()?;
            // Answers to the server's own requests are read, and not looked at.
            if head[8] & 0xf == 0 {
                return Some((half(0), half(2), body));
            }
        }
    }

    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        // The client may have closed its end.
        let _ = sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    }

    /// Takes a step of the input.
    fn step(&self, input: &mut Unstructured<'_>, id: u16, command: u16, request: &[u8]) -> Result<()> {
        if input.is_empty() {
            return Err(libfuzzer_sys::arbitrary::Error::NotEnoughData);
        }
        let mut body = answer(command, request);
        match input.int_in_range(0..=7)? {
            // Changed bytes.
            0 => {
                for _ in 0..input.int_in_range(1..=4)? {
                    let at = input.choose_index(body.len().max(1))?;
                    if let Some(byte) = body.get_mut(at) {
                        *byte = input.arbitrary()?;
                    }
                }
                self.send(&message(id, command, 1, 0, &body), &[self.registers.as_fd()]);
            }
            // Another length.
            1 => {
                body.resize(input.int_in_range(0..=300)?, input.arbitrary()?);
                self.send(&message(id, command, 1, 0, &body), &[]);
            }
            // Another header.
            2 => {
                let (id, command) = (input.arbitrary()?, input.arbitrary()?);
                self.send(&message(id, command, input.arbitrary()?, input.arbitrary()?, &body), &[]);
            }
            // A failure.
            3 => self.send(&message(id, command, 0x21, input.arbitrary()?, &[]), &[]),
            // Any bytes.
            4 => {
                let len = input.int_in_range(0..=64)?;
                self.send(input.bytes(len.min(input.len()))?, &[]);
                let _ = self.socket.shutdown(std::net::Shutdown::Both);
            }
            // Descriptors.
            5 => {
                let other = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
                let file = if input.arbitrary()? { self.registers.as_fd() } else { other.as_fd() };
                let fds = vec![file; input.int_in_range(0..=20)?];
                self.send(&message(id, command, 1, 0, &body), &fds);
            }
            // An access to memory, then the right answer.
            6 => {
                let iova = self.iova.wrapping_add_signed(input.int_in_range(-5000..=9000)?);
                let (count, len): (u64, usize) =
                    (input.int_in_range(0..=9000)?, input.int_in_range(0..=9000)?);
                let mut access = [iova.to_le_bytes(), count.to_le_bytes()].concat();
                let command_of_access = if input.arbitrary()? { DMA_WRITE } else { DMA_READ };
                if command_of_access == DMA_WRITE {
                    access.resize(16 + if input.arbitrary()? { count as usize } else { len }, 0);
                }
                self.send(&message(3, command_of_access, 0, 0, &access), &[]);
                self.send(&message(id, command, 1, 0, &body), &[]);
            }
            // Registers that end.
            _ => {
                ftruncate(&self.registers, input.int_in_range(0..=BAR)?).expect("a memfd");
                self.send(&message(id, command, 1, 0, &body), &[self.registers.as_fd()]);
            }
        }
        Ok(())
    }
}

/// Calls everything that a driver calls. Errors are the server's fault.
fn drive(client: &Client, memory: &Arc<Mapping>) {
    let _ = client.read_register(0, Width::Eight);
    let _ = client.write_register(0x14, Width::Four, 1);
    if let Ok(registers) = client.map_registers(0x1000, 0x2000) {
        registers.write(0x1ffc, 1);
        assert!(registers.read(0x1ffc) == 1 || registers.is_lost());
    }
    let _ = client.map_registers(0, 8);
    let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    let _ = client.set_interrupts(&vec![fd.as_fd(); usize::from(client.vectors().min(5))]);
    let range = memory.dma_range(PAGE, PAGE).expect("a page");
    if let Ok(iova) = client.map(&range) {
        assert!(iova != 0 && iova.is_multiple_of(PAGE));
        let _ = client.reset();
        let _ = client.set_bus_master(true);
        if client.unmap(iova, PAGE).is_ok() {
            let mut before = [0; PAGE as usize];
            assert!(range.read(0, &mut before));
            let _ = client.read_register(0, Width::Four);
            let mut after = [0; PAGE as usize];
            assert!(range.read(0, &mut after));
            assert_eq!(before, after, "the server has written to memory that was unmapped");
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let registers = memfd_create("bar", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&registers, BAR).expect("a memfd");
    let memory = Arc::new(Mapping::anonymous(3 * PAGE).expect("memory"));
    let all = memory.dma_range(0, 3 * PAGE).expect("all pages");
    assert!(all.write(0, &[UNTOUCHED; 3 * PAGE as usize]));
    let (ours, socket) = UnixStream::pair().expect("sockets");
    std::thread::scope(|scope| {
        scope.spawn(|| Server { socket, registers, iova: PAGE }.run(&mut Unstructured::new(data)));
        if let Ok(client) = Client::over(ours, "fuzz", TIMEOUT) {
            drive(&client, &memory);
        }
    });
    let mut pages = vec![0; 3 * PAGE as usize];
    assert!(all.read(0, &mut pages));
    let (first, rest) = pages.split_at(PAGE as usize);
    let outside = first.iter().chain(&rest[PAGE as usize..]);
    assert!(outside.into_iter().all(|byte| *byte == UNTOUCHED), "the server has written outside");
});
