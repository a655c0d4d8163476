//! Tests of the queue against a host that keeps what it receives.

use super::*;
use crate::sgl::Sgl;
use crate::tcp::{DataDigest, HEADER_MAX};
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use proptest::prelude::*;

const SUPPORTED: IcResp = IcResp { alignment: 3, header_digest: true, data_digest: true, h2c_data_max: 8192 };
const CAPSULE_DATA_MAX: u32 = 8192;

/// What a host received.
#[derive(Debug, PartialEq, Eq)]
enum Got {
    Header(Header),
    Data(Vec<u8>),
}

/// Both ends of a connection. Data of commands is kept by slot, as the owner of the queue does it.
struct Pair {
    queue: Queue,
    host: Parser,
    request: IcReq,
    format: Format,
    memory: Vec<Vec<u8>>,
    ready: Vec<(SlotId, bool)>,
    commands: Vec<(SlotId, SubmissionEntry)>,
    freed: Vec<SlotId>,
    /// Bytes that the socket takes at once.
    piece: usize,
}

impl Pair {
    fn new(header_digest: bool, data_digest: bool, piece: usize) -> Self {
        let request = IcReq { alignment: 7, header_digest, data_digest, max_r2t: 0 };
        let mut pair = Self {
            queue: Queue::new(SUPPORTED, CAPSULE_DATA_MAX),
            host: Parser::new(Side::Host, Limits { capsule_data_max: 0, data_max: 1 << 20 }),
            request,
            format: Format::default(),
            memory: Vec::new(),
            ready: Vec::new(),
            commands: Vec::new(),
            freed: Vec::new(),
            piece,
        };
        pair.send(&Header::IcReq(request), &[]).unwrap();
        let Some(Got::Header(Header::IcResp(answer))) = pair.flush().pop() else { panic!("no ICResp") };
        assert_eq!(request.check(&answer), Ok(()));
        pair.format = answer.h2c_format();
        pair
    }

    /// A pair whose queue has eight entries.
    fn connected(header_digest: bool, data_digest: bool, piece: usize, disables_flow_control: bool) -> Self {
        let mut pair = Self::new(header_digest, data_digest, piece);
        pair.command(0, SubmissionEntry::new(0x7f, 1), &[7; 1024]).unwrap();
        let (slot, is_intact) = pair.ready.pop().unwrap();
        assert!(is_intact && pair.memory[0] == [7; 1024]);
        pair.queue.connect(8, disables_flow_control);
        pair.queue.complete(slot, Status::new(0), 0x55);
        let expected = if disables_flow_control { 0xffff } else { 1 };
        let completion = CompletionEntry::new(0, Status::new(0), 0x55).with_sqhd(expected);
        assert_eq!(pair.flush(), [Got::Header(Header::Response(completion))]);
        pair
    }

    /// Sends a PDU in pieces; the controller's side keeps its data.
    fn send(&mut self, header: &Header, data: &[u8]) -> Result<Option<Fatal>, Fatal> {
        self.send_changed(header, data, |_| {})
    }

    fn send_changed(
        &mut self,
        header: &Header,
        data: &[u8],
        change: impl Fn(&mut [u8]),
    ) -> Result<Option<Fatal>, Fatal> {
        let mut bytes = vec![0; HEADER_MAX];
        let start = header.encode(&self.format, &mut bytes);
        bytes.truncate(start);
        bytes.extend(data);
        if self.format.has_data_digest(header.kind()) && !data.is_empty() {
            let mut digest = DataDigest::default();
            digest.update(data);
            bytes.extend(digest.to_wire());
        }
        change(&mut bytes);
        let mut terminated = None;
        for mut piece in bytes.chunks(self.piece) {
            while let Some(received) = self.queue.receive(&mut piece)? {
                match received {
                    Received::Command { slot, entry, data_len } => {
                        self.commands.push((slot, entry));
                        let slots = self.memory.len().max(usize::from(slot.0) + 1);
                        self.memory.resize(slots, Vec::new());
                        self.memory[usize::from(slot.0)] = vec![0; data_len as usize];
                    }
                    Received::Data { slot, offset, bytes } => {
                        self.memory[usize::from(slot.0)][offset as usize..][..bytes.len()]
                            .copy_from_slice(bytes);
                    }
                    Received::Ready { slot, is_intact } => self.ready.push((slot, is_intact)),
                    Received::Terminated(fatal) => terminated = Some(fatal),
                }
            }
        }
        Ok(terminated)
    }

    fn command(&mut self, cid: u16, entry: SubmissionEntry, data: &[u8]) -> Result<Option<Fatal>, Fatal> {
        let len = data.len() as u32;
        let sgl = if len == 0 { Sgl::Transport { len: 0 } } else { Sgl::InCapsule { offset: 0, len } };
        let entry = entry.with_cid(cid).with_sgl(sgl.encode());
        self.send(&Header::Command { entry, data_len: len }, data)
    }

    /// A command without data in its capsule, which becomes ready at once.
    fn start(&mut self, cid: u16) -> SlotId {
        self.command(cid, SubmissionEntry::new(io::WRITE, 1), &[]).unwrap();
        let (slot, is_intact) = self.ready.pop().unwrap();
        assert!(is_intact);
        slot
    }

    /// Moves all output to the host, in pieces.
    fn flush(&mut self) -> Vec<Got> {
        let mut wire = Vec::new();
        while !self.queue.is_output_empty() {
            let mut piece: Vec<u8> = Vec::new();
            for part in self.queue.output() {
                match part {
                    Piece::Bytes(bytes) => piece.extend(bytes),
                    Piece::Data { slot, offset, len } => {
                        piece.extend(&self.memory[usize::from(slot.0)][offset as usize..][..len as usize]);
                    }
                }
            }
            piece.truncate(self.piece);
            self.queue.sent(piece.len(), |slot| self.freed.push(slot));
            wire.extend(piece);
        }
        let mut input = &wire[..];
        let mut got = Vec::new();
        while let Some(event) = self.host.next(&mut input).unwrap() {
            match event {
                Event::Header(header) => {
                    if let Header::IcResp(answer) = header {
                        self.host.establish(self.request.c2h_format(&answer));
                    }
                    got.push(Got::Header(header));
                }
                Event::Data { offset: 0, bytes } => got.push(Got::Data(bytes.to_vec())),
                Event::Data { .. } => panic!("the host's input is in one piece"),
                Event::End { is_intact } => assert!(is_intact),
            }
        }
        got
    }
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256 + seed) as u8).collect()
}

fn completion(cid: u16, sqhd: u16) -> Got {
    Got::Header(Header::Response(CompletionEntry::new(cid, Status::new(0), 0).with_sqhd(sqhd)))
}

proptest! {
    #[test]
    fn writes_and_reads_arrive_in_any_division(
        header_digest in any::<bool>(),
        data_digest in any::<bool>(),
        piece in 1_usize..5000,
        disables_flow_control in any::<bool>(),
    ) {
        let mut pair = Pair::connected(header_digest, data_digest, piece, disables_flow_control);
        let sqhd = |head| if disables_flow_control { 0 } else { head };
        // A write with its data in the capsule.
        pair.command(3, SubmissionEntry::new(io::WRITE, 1), &pattern(4096, 3)).unwrap();
        let (slot, is_intact) = pair.ready.pop().unwrap();
        prop_assert!(is_intact && pair.memory[usize::from(slot.0)] == pattern(4096, 3));
        pair.queue.complete(slot, Status::new(0), 0);
        prop_assert_eq!(pair.flush(), [completion(3, sqhd(2))]);

        // A write whose data an R2T requests, in two parts.
        let slot = pair.start(4);
        let data = pattern(12288, 4);
        pair.memory[usize::from(slot.0)] = vec![0; data.len()];
        pair.queue.request_data(slot, 0, 12288);
        let r2t = R2t { cid: 4, tag: slot.0, offset: 0, len: 12288 };
        prop_assert_eq!(pair.flush(), [Got::Header(Header::R2t(r2t))]);
        let part = |offset, len, is_last| Header::H2cData(H2cData { cid: 4, tag: slot.0, offset, len, is_last });
        pair.send(&part(0, 8192, false), &data[..8192]).unwrap();
        prop_assert!(pair.ready.is_empty());
        pair.send(&part(8192, 4096, true), &data[8192..]).unwrap();
        prop_assert_eq!(pair.ready.pop(), Some((slot, true)));
        prop_assert!(pair.memory[usize::from(slot.0)] == data);
        pair.queue.complete(slot, Status::new(0), 0);
        prop_assert_eq!(pair.flush(), [completion(4, sqhd(3))]);

        // Reads of two commands at once.
        let slots = [pair.start(5), pair.start(6)];
        for slot in slots {
            pair.memory[usize::from(slot.0)] = pattern(4096, slot.0.into());
            pair.queue.complete_with_data(slot, &pattern(4096, slot.0.into()), 0);
        }
        let is_success = disables_flow_control;
        let mut expected = Vec::new();
        for (slot, cid) in slots.into_iter().zip([5, 6]) {
            let header = C2hData { cid, offset: 0, len: 4096, is_last: true, is_success };
            expected.extend([Got::Header(Header::C2hData(header)), Got::Data(pattern(4096, slot.0.into()))]);
            expected.extend((!is_success).then(|| completion(cid, 5)));
        }
        prop_assert_eq!(pair.flush(), expected);
        prop_assert_eq!((pair.queue.in_use(), pair.freed.len()), (0, 5));
    }
}

#[test]
fn a_queue_has_one_command_until_it_is_connected_and_then_its_entries() {
    let limit = Err(Fatal::of(FatalStatus::LIMIT_EXCEEDED));
    let mut pair = Pair::new(false, false, 64);
    pair.start(1);
    assert_eq!(pair.command(2, SubmissionEntry::new(0x7f, 1), &[]), limit);

    let mut pair = Pair::connected(false, false, 64, false);
    let slots: Vec<SlotId> = (0..8).map(|cid| pair.start(cid)).collect();
    assert_eq!((pair.queue.in_use(), slots.iter().max()), (8, Some(&SlotId(7))));
    pair.queue.complete(slots[3], Status::new(0), 0);
    assert_eq!(pair.queue.in_use(), 8, "the completion has not been sent");
    pair.flush();
    assert_eq!((pair.start(9), pair.freed.pop()), (slots[3], Some(slots[3])));
    assert_eq!(pair.command(10, SubmissionEntry::new(io::READ, 1), &[]), limit);
}

#[test]
fn data_that_no_r2t_requested_ends_the_connection() {
    let data = |cid, tag, offset, len, is_last| Header::H2cData(H2cData { cid, tag, offset, len, is_last });
    for (header, fatal) in [
        (data(4, 0, 0, 4096, true), Fatal::field(10)),
        (data(4, 7, 0, 4096, true), Fatal::field(10)),
        (data(4, 8, 0, 4096, true), Fatal::field(10)),
        (data(5, 1, 0, 4096, true), Fatal::field(8)),
        (data(4, 1, 0, 4096, false), Fatal::field(1)),
        (data(4, 1, 4, 4092, true), Fatal::of(FatalStatus::DATA_OUT_OF_RANGE)),
        (data(4, 1, 0, 8192, true), Fatal::of(FatalStatus::DATA_OUT_OF_RANGE)),
        (data(4, 1, 0, 16384, true), Fatal::of(FatalStatus::LIMIT_EXCEEDED)),
    ] {
        let mut pair = Pair::connected(true, true, 100, false);
        // Slot 0 has a command without an R2T, slot 7 is free, and there is no slot 8.
        let slots = [pair.start(6), pair.start(4)];
        assert_eq!(slots, [SlotId(0), SlotId(1)]);
        pair.queue.request_data(slots[1], 0, 4096);
        let len = header.data_len() as usize;
        assert_eq!(pair.send(&header, &vec![0; len]), Err(fatal), "{header:?}");
        assert_eq!(
            pair.queue.receive(&mut &[0; 64][..]),
            Err(fatal),
            "the rest is no data of an earlier command"
        );
        pair.flush();
        pair.queue.terminate(fatal);
        // Nothing is sent behind it.
        pair.queue.complete(slots[0], Status::new(0), 0);
        let got = pair.flush();
        let [Got::Header(Header::TermReq { fatal: sent, data_len, .. }), Got::Data(wrong)] = &got[..] else {
            panic!("{got:?}")
        };
        assert_eq!((*sent, wrong.len() as u32), (fatal, *data_len));
        assert_eq!(wrong[0], 6, "the header that was wrong");
    }
}

#[test]
fn a_wrong_data_digest_fails_the_command_only() {
    let mut pair = Pair::connected(false, true, 1000, false);
    let entry = SubmissionEntry::new(io::WRITE, 1).with_cid(3);
    let header = Header::Command { entry, data_len: 4096 };
    pair.send_changed(&header, &pattern(4096, 0), |bytes| *bytes.last_mut().unwrap() ^= 1).unwrap();
    let (slot, is_intact) = pair.ready.pop().unwrap();
    assert!(!is_intact);
    let failed = Code::TRANSIENT_TRANSPORT_ERROR.status();
    pair.queue.complete(slot, failed, 0);
    let expected = CompletionEntry::new(3, failed, 0).with_sqhd(2);
    assert_eq!(pair.flush(), [Got::Header(Header::Response(expected))]);

    // Of two parts, the first one is wrong.
    let slot = pair.start(4);
    pair.memory[usize::from(slot.0)] = vec![0; 8192];
    pair.queue.request_data(slot, 0, 8192);
    let part = |offset, is_last| Header::H2cData(H2cData { cid: 4, tag: slot.0, offset, len: 4096, is_last });
    pair.send_changed(&part(0, false), &[0; 4096], |bytes| bytes[2000] = 1).unwrap();
    pair.send(&part(4096, true), &[0; 4096]).unwrap();
    assert_eq!(pair.ready.pop(), Some((slot, false)));
    pair.queue.complete(slot, failed, 0);
    pair.flush();
    assert_eq!(
        (pair.start(5), pair.queue.slot(slot).is_intact),
        (slot, true),
        "the slot's next command is well"
    );
}

#[test]
fn a_host_ends_the_connection_with_its_reason() {
    let mut pair = Pair::connected(true, true, 7, false);
    let fatal = Fatal { status: FatalStatus::HEADER_DIGEST, information: 0x1234 };
    let header = Header::TermReq { from: Side::Host, fatal, data_len: 24 };
    assert_eq!(pair.send(&header, &[0; 24]), Ok(Some(fatal)));
}

#[test]
fn a_queue_that_has_warmed_up_allocates_nothing() {
    let mut queue = Queue::new(SUPPORTED, CAPSULE_DATA_MAX);
    let mut bytes = vec![0; HEADER_MAX];
    let request = IcReq { alignment: 0, header_digest: true, data_digest: true, max_r2t: 0 };
    let len = Header::IcReq(request).encode(&Format::default(), &mut bytes);
    assert_eq!(queue.receive(&mut &bytes[..len]), Ok(None));
    let format = request.answer(SUPPORTED).h2c_format();
    let entry = SubmissionEntry::new(io::READ, 1);
    let len = Header::Command { entry, data_len: 0 }.encode(&format, &mut bytes);
    let data = [1; 4096];
    let round = |queue: &mut Queue| {
        let mut input = &bytes[..len];
        while let Some(received) = queue.receive(&mut input).unwrap() {
            if let Received::Ready { slot, .. } = received {
                queue.complete_with_data(slot, &data, 0);
            }
        }
        let total = queue.output().map(|piece| match piece {
            Piece::Bytes(bytes) => bytes.len(),
            Piece::Data { len, .. } => len as usize,
        });
        let total = total.sum();
        queue.sent(total, |_| {});
    };
    round(&mut queue);
    let count = allocation_counter::measure(|| (0..100).for_each(|_| round(&mut queue)));
    assert_eq!((count.count_total, queue.in_use()), (0, 0));
}
