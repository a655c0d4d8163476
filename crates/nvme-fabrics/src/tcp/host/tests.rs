//! The host's side against a controller's side ([`Queue`]), and against controllers that violate the protocol.

use super::*;
use crate::SlotId;
use crate::sgl::DataBlocks;
use crate::tcp::queue::{Piece, Queue, Received};
use aryk_nvme::spec::entry::CompletionEntry;
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use proptest::prelude::*;
use std::collections::BTreeMap;

const COMMANDS: u16 = 7;
const DATA_MAX: u32 = 64 << 10;
const SUPPORTED: IcResp = IcResp { alignment: 3, header_digest: true, data_digest: true, h2c_data_max: 8192 };

fn wanted(header_digest: bool, data_digest: bool) -> IcReq {
    IcReq { alignment: 1, header_digest, data_digest, max_r2t: 0 }
}

/// The data of a command at a place.
fn byte(cid: u16, at: u32) -> u8 {
    (at.wrapping_mul(7) ^ at >> 8).wrapping_add(u32::from(cid) * 31) as u8
}

fn pattern(cid: u16, len: u32) -> Vec<u8> {
    (0..len).map(|at| byte(cid, at)).collect()
}

/// A controller: writes are requested in two parts, and reads get the pattern of their CID.
struct Controller {
    queue: Queue,
    slots: BTreeMap<u16, (SubmissionEntry, Vec<u8>, u32)>,
    written: BTreeMap<u16, Vec<u8>>,
}

impl Controller {
    fn new() -> Self {
        Self { queue: Queue::new(SUPPORTED, 8192), slots: BTreeMap::new(), written: BTreeMap::new() }
    }

    fn take(&mut self, mut input: &[u8]) {
        while let Some(received) = self.queue.receive(&mut input).unwrap() {
            match received {
                Received::Command { slot, entry, data_len } => {
                    self.slots.insert(slot.0, (entry, vec![0; data_len as usize], 0));
                }
                Received::Data { slot, offset, bytes } => {
                    self.slots.get_mut(&slot.0).unwrap().1[offset as usize..][..bytes.len()]
                        .copy_from_slice(bytes);
                }
                Received::Ready { slot, is_intact } => {
                    assert!(is_intact);
                    self.execute(slot);
                }
                Received::Terminated(fatal) => panic!("{fatal:?}"),
            }
        }
    }

    fn execute(&mut self, id: SlotId) {
        let (entry, data, requested) = self.slots.get_mut(&id.0).unwrap();
        let sgl = Sgl::decode(entry, DataBlocks::Transport).unwrap();
        match (entry.opcode(), sgl) {
            (io::READ, sgl) => {
                *data = pattern(entry.cid(), sgl.len());
                let data = data.clone();
                self.queue.complete_with_data(id, &data, 0);
            }
            (io::WRITE, Sgl::Transport { len }) if *requested < len => {
                let part = if *requested == 0 { len / 8 * 4 } else { len - *requested };
                data.resize(len as usize, 0);
                self.queue.request_data(id, *requested, part);
                *requested += part;
            }
            (io::WRITE, _) => {
                self.written.insert(entry.cid(), data.clone());
                self.queue.complete(id, Status::new(0), 0);
            }
            _ => self.queue.complete(id, Code::INVALID_OPCODE.status().as_final(), 0),
        }
    }

    fn output(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for piece in self.queue.output() {
            match piece {
                Piece::Bytes(header) => bytes.extend(header),
                Piece::Data { slot, offset, len } => {
                    bytes.extend(&self.slots[&slot.0].1[offset as usize..][..len as usize]);
                }
            }
        }
        self.queue.sent(bytes.len(), |_| {});
        bytes
    }
}

/// Connects both sides; their input comes in pieces of `piece` bytes, and the host has `room` bytes for its output.
struct Pair {
    host: HostQueue,
    controller: Controller,
    piece: usize,
    room: usize,
    read: BTreeMap<u16, Vec<u8>>,
    completed: BTreeMap<u16, Status>,
}

impl Pair {
    fn new(request: IcReq, piece: usize, room: usize, disables_flow_control: bool) -> Self {
        let host = HostQueue::new(request, COMMANDS, DATA_MAX);
        let mut pair = Self {
            host,
            controller: Controller::new(),
            piece,
            room,
            read: BTreeMap::new(),
            completed: BTreeMap::new(),
        };
        pair.exchange();
        assert!(pair.host.is_established);
        // The controller's side takes one command before it knows the queue's size.
        pair.submit(0, io::FLUSH, Transfer::ToController(1024));
        pair.controller.queue.connect(COMMANDS + 1, disables_flow_control);
        pair.exchange();
        pair.completed.clear();
        pair
    }

    fn submit(&mut self, cid: u16, opcode: u8, transfer: Transfer) {
        self.read.insert(cid, vec![0; transfer.len() as usize]);
        self.host.submit(cid, SubmissionEntry::new(opcode, 1), transfer);
    }

    fn exchange(&mut self) {
        loop {
            let mut out = vec![0; self.room];
            let len = self.host.encode(&mut out, |cid, offset, to| {
                to.iter_mut().zip(offset..).for_each(|(byte, at)| *byte = self::byte(cid, at));
            });
            out[..len].chunks(self.piece).for_each(|piece| self.controller.take(piece));
            let back = self.controller.output();
            for mut input in back.chunks(self.piece) {
                while let Some(received) = self.host.receive(&mut input).unwrap() {
                    match received {
                        HostReceived::Established => {}
                        HostReceived::Data { cid, offset, bytes } => {
                            self.read.get_mut(&cid).unwrap()[offset as usize..][..bytes.len()]
                                .copy_from_slice(bytes);
                        }
                        HostReceived::Completed { cid, status, is_intact, .. } => {
                            assert!(is_intact);
                            assert_eq!(self.completed.insert(cid, status), None);
                        }
                        HostReceived::Terminated(fatal) => panic!("{fatal:?}"),
                    }
                }
            }
            if len == 0 && back.is_empty() {
                return;
            }
        }
    }
}

proptest! {
    #[test]
    fn commands_of_all_kinds_end_with_their_data(
        digests in any::<(bool, bool)>(),
        disables_flow_control in any::<bool>(),
        piece in 1_usize..5000,
        room in ENCODE_MIN..100_000,
        commands in prop::collection::vec((0_u8..3, 1_u32..16_384), 1..=usize::from(COMMANDS)),
    ) {
        let mut pair = Pair::new(wanted(digests.0, digests.1), piece, room, disables_flow_control);
        for (cid, &(kind, dwords)) in (0..).zip(&commands) {
            match kind {
                0 => pair.submit(cid, io::READ, Transfer::ToHost(dwords * 4)),
                1 => pair.submit(cid, io::WRITE, Transfer::ToController(dwords * 4)),
                _ => pair.submit(cid, 0x7e, Transfer::None),
            }
        }
        pair.exchange();
        for (cid, &(kind, dwords)) in (0..).zip(&commands) {
            let status = pair.completed[&cid];
            match kind {
                0 => prop_assert!(status.is_success() && pair.read[&cid] == pattern(cid, dwords * 4)),
                1 => prop_assert!(status.is_success() && pair.controller.written[&cid] == pattern(cid, dwords * 4)),
                _ => prop_assert_eq!(status.code(), Code::INVALID_OPCODE),
            }
        }
        prop_assert!(!pair.host.has_output());
    }

    #[test]
    fn a_controllers_bytes_cause_no_panic(seed in any::<u64>(), bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let mut host = established();
        let mut random = fastrand::Rng::with_seed(seed);
        host.submit(0, SubmissionEntry::new(io::READ, 1), Transfer::ToHost(4096));
        host.submit(1, SubmissionEntry::new(io::WRITE, 1), Transfer::ToController(32_768));
        let mut out = vec![0; 100_000];
        host.encode(&mut out, |_, _, _| {});
        let header = match random.u8(0..3) {
            0 => Header::R2t(R2t { cid: random.u16(0..3), tag: 0, offset: random.u32(..), len: random.u32(..) }),
            1 => Header::C2hData(C2hData { cid: random.u16(0..3), offset: 0, len: 64, is_last: random.bool(), is_success: random.bool() }),
            _ => Header::Response(CompletionEntry::new(random.u16(..), Status::new(random.u16(..)), 0)),
        };
        let mut input = [0; HEADER_MAX];
        let len = header.encode(&Format::default(), &mut input);
        let input = [&input[..len], &bytes].concat();
        let mut rest = &input[..];
        while let Ok(Some(_)) = host.receive(&mut rest) {}
        host.encode(&mut out, |_, _, _| {});
    }
}

/// A host's side that takes commands, without digests.
fn established() -> HostQueue {
    let mut host = HostQueue::new(wanted(false, false), COMMANDS, DATA_MAX);
    host.encode(&mut [0; ENCODE_MIN], |_, _, _| {});
    let answer = IcResp { alignment: 0, header_digest: false, data_digest: false, h2c_data_max: 4096 };
    assert_eq!(give(&mut host, &Header::IcResp(answer), 0), Ok(vec![]));
    host
}

/// Passes a PDU to a host, and returns the commands that end.
fn give(host: &mut HostQueue, header: &Header, data_len: usize) -> Result<Vec<(u16, Status)>, Fatal> {
    let mut bytes = vec![0; HEADER_MAX];
    let len = header.encode(&Format { alignment: 1, ..Format::default() }, &mut bytes);
    bytes.truncate(len);
    bytes.resize(len + data_len, 0xda);
    let (mut input, mut completed) = (&bytes[..], Vec::new());
    while let Some(received) = host.receive(&mut input)? {
        if let HostReceived::Completed { cid, status, .. } = received {
            completed.push((cid, status));
        }
    }
    Ok(completed)
}

fn data(cid: u16, offset: u32, len: u32, is_last: bool, is_success: bool) -> Header {
    Header::C2hData(C2hData { cid, offset, len, is_last, is_success })
}

fn response(cid: u16, code: Code) -> Header {
    Header::Response(CompletionEntry::new(cid, code.status(), 0))
}

/// A host with a read of 512 bytes (0), a write of 16 KiB (1) and a flush (2), which the controller has.
fn busy() -> HostQueue {
    let mut host = established();
    host.submit(0, SubmissionEntry::new(io::READ, 1), Transfer::ToHost(512));
    host.submit(1, SubmissionEntry::new(io::WRITE, 1), Transfer::ToController(16_384));
    host.submit(2, SubmissionEntry::new(io::FLUSH, 1), Transfer::None);
    assert_eq!(host.encode(&mut [0; 1 << 16], |_, _, _| panic!("nothing in a capsule")), 3 * 72);
    host
}

fn r2t(offset: u32, len: u32) -> Header {
    Header::R2t(R2t { cid: 1, tag: 9, offset, len })
}

#[test]
fn a_read_ends_with_its_data_or_with_its_completion() {
    let mut host = busy();
    assert_eq!(give(&mut host, &data(0, 0, 256, false, false), 256), Ok(vec![]));
    assert_eq!(give(&mut host, &data(0, 256, 256, true, true), 256), Ok(vec![(0, Status::new(0))]));
    let mut host = busy();
    assert_eq!(give(&mut host, &data(0, 0, 512, true, false), 512), Ok(vec![]));
    assert_eq!(give(&mut host, &response(0, Code::SUCCESS), 0), Ok(vec![(0, Status::new(0))]));
    let mut host = busy();
    let failed = response(0, Code::UNRECOVERED_READ_ERROR);
    assert_eq!(give(&mut host, &failed, 0).unwrap()[0].1.code(), Code::UNRECOVERED_READ_ERROR, "no data");
    host.submit(0, SubmissionEntry::new(io::FLUSH, 1), Transfer::None);
}

#[test]
fn requested_data_goes_out_in_pieces_and_no_more_of_it() {
    let mut host = busy();
    assert_eq!(give(&mut host, &r2t(0, 8192), 0), Ok(vec![]));
    assert_eq!(
        give(&mut host, &r2t(8192, 8192), 0),
        Err(Fatal::of(FatalStatus::LIMIT_EXCEEDED)),
        "one at a time"
    );
    let mut host = busy();
    give(&mut host, &r2t(0, 8192), 0).unwrap();
    let mut places = Vec::new();
    let mut out = [0; 1 << 16];
    assert_eq!(host.encode(&mut out, |cid, at, to| places.push((cid, at, to.len()))), 2 * (24 + 4096));
    assert_eq!(places, [(1, 0, 4096), (1, 4096, 4096)]);
    give(&mut host, &r2t(8192, 8192), 0).unwrap();
    host.encode(&mut out, |_, _, _| {});
    assert_eq!(give(&mut host, &response(1, Code::SUCCESS), 0).unwrap().len(), 1);
}

#[test]
fn what_no_controller_may_send_ends_the_connection() {
    let range = Err(Fatal::of(FatalStatus::DATA_OUT_OF_RANGE));
    let unknown = Err(Fatal::field(field::CCCID));
    for (what, header, len, expected) in [
        ("data beyond the read", data(0, 0, 516, true, false), 516, range.clone()),
        ("data not in order", data(0, 4, 508, true, false), 508, range.clone()),
        ("data of a write", data(1, 0, 512, true, false), 512, unknown.clone()),
        ("data of no command", data(5, 0, 512, true, false), 512, unknown.clone()),
        ("data of a CID beyond the queue", data(7, 0, 512, true, false), 512, unknown.clone()),
        ("the last data too early", data(0, 0, 256, true, true), 256, Err(Fatal::field(field::FLAGS))),
        ("an R2T of a read", Header::R2t(R2t { cid: 0, tag: 0, offset: 0, len: 512 }), 0, unknown),
        ("an R2T beyond the write", r2t(0, 16_388), 0, range.clone()),
        ("an R2T not in order", r2t(4096, 4096), 0, range.clone()),
        ("success without the data of a read", response(0, Code::SUCCESS), 0, range.clone()),
        ("success without the data of a write", response(1, Code::SUCCESS), 0, range),
        ("a completion of no command", response(3, Code::SUCCESS), 0, Err(Fatal::field(RESPONSE_CID))),
    ] {
        let mut host = busy();
        assert_eq!(give(&mut host, &header, len), expected, "{what}");
        assert_eq!(give(&mut host, &response(2, Code::SUCCESS), 0), expected, "{what}: it is over");
    }
    let mut host = busy();
    assert_eq!(give(&mut host, &response(2, Code::SUCCESS), 0).unwrap().len(), 1);
    assert_eq!(give(&mut host, &response(2, Code::SUCCESS), 0), Err(Fatal::field(RESPONSE_CID)), "twice");
}

#[test]
fn an_answer_before_the_question_ends_the_connection() {
    let answer = IcResp { alignment: 0, header_digest: false, data_digest: false, h2c_data_max: 4096 };
    let mut host = HostQueue::new(wanted(false, false), COMMANDS, DATA_MAX);
    assert_eq!(give(&mut host, &Header::IcResp(answer), 0), Err(Fatal::of(FatalStatus::SEQUENCE)));
    let mut host = HostQueue::new(wanted(false, false), COMMANDS, DATA_MAX);
    host.encode(&mut [0; ENCODE_MIN], |_, _, _| {});
    let answer = IcResp { data_digest: true, ..answer };
    assert!(give(&mut host, &Header::IcResp(answer), 0).is_err(), "a digest that the host does not want");
}

#[test]
fn damaged_data_is_reported_with_the_completion() {
    let mut host = HostQueue::new(wanted(false, true), COMMANDS, DATA_MAX);
    host.encode(&mut [0; ENCODE_MIN], |_, _, _| {});
    let answer = IcResp { alignment: 0, header_digest: false, data_digest: true, h2c_data_max: 4096 };
    give(&mut host, &Header::IcResp(answer), 0).unwrap();
    host.submit(0, SubmissionEntry::new(io::READ, 1), Transfer::ToHost(512));
    host.encode(&mut [0; ENCODE_MIN], |_, _, _| {});
    let mut bytes = vec![0; HEADER_MAX];
    let format = Format { data_digest: true, alignment: 1, ..Format::default() };
    let len = data(0, 0, 512, true, true).encode(&format, &mut bytes);
    bytes.truncate(len);
    bytes.resize(len + 512 + DIGEST_LEN, 0x11);
    let mut input = &bytes[..];
    assert!(matches!(host.receive(&mut input), Ok(Some(HostReceived::Data { cid: 0, offset: 0, .. }))));
    let completed = host.receive(&mut input).unwrap();
    assert!(matches!(completed, Some(HostReceived::Completed { cid: 0, is_intact: false, .. })));
}

#[test]
fn nothing_is_allocated_for_a_command() {
    let mut host = established();
    let mut out = vec![0; 1 << 16];
    let info = allocation_counter::measure(|| {
        for _ in 0..100 {
            host.submit(1, SubmissionEntry::new(io::WRITE, 1), Transfer::ToController(16_384));
            host.encode(&mut out, |_, _, _| {});
            let mut bytes = [0; HEADER_MAX];
            for header in [r2t(0, 16_384), response(1, Code::SUCCESS)] {
                let len = header.encode(&Format::default(), &mut bytes);
                let mut input = &bytes[..len];
                while host.receive(&mut input).unwrap().is_some() {}
                host.encode(&mut out, |_, _, _| {});
            }
        }
    });
    assert_eq!(info.count_total, 0);
}
