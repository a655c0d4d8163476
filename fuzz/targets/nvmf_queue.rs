//! A host's side of an NVMe/TCP connection: valid and damaged PDUs in any order, to a queue whose owner executes commands late,
//! in any order, and whose socket takes what it likes.
//!
//! For any input, no code panics, data stays within what was announced or requested, every command completes once, no more
//! commands are in use than the queue has entries, and nothing is taken after a fatal error.
#![no_main]

use std::collections::BTreeMap;

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::Status;
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::tcp::{
    Fatal, Format, H2cData, HEADER_MAX, Header, IcReq, IcResp, Piece, Queue, Received, Side,
};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

const SUPPORTED: IcResp = IcResp { alignment: 1, header_digest: true, data_digest: true, h2c_data_max: 4096 };
const CAPSULE_DATA_MAX: u32 = 8192;
const ENTRIES: usize = 4;

/// A command that the owner has, with the range of its data that may arrive.
struct Slot {
    cid: u16,
    range: (u32, u32),
    is_ready: bool,
}

struct Owner {
    queue: Queue,
    slots: BTreeMap<SlotId, Slot>,
    is_connected: bool,
}

impl Owner {
    fn receive(&mut self, mut input: &[u8]) -> std::result::Result<(), Fatal> {
        while let Some(received) = self.queue.receive(&mut input)? {
            match received {
                Received::Command { slot, entry, data_len } => {
                    let new = Slot { cid: entry.cid(), range: (0, data_len), is_ready: false };
                    assert!(self.slots.insert(slot, new).is_none());
                    assert!(data_len <= CAPSULE_DATA_MAX && usize::from(slot.0) < ENTRIES);
                }
                Received::Data { slot, offset, bytes } => {
                    let slot = &self.slots[&slot];
                    let (start, end) = slot.range;
                    assert!(!slot.is_ready && offset >= start && offset + bytes.len() as u32 <= end);
                }
                Received::Ready { slot, .. } => {
                    let slot = self.slots.get_mut(&slot).expect("a command");
                    assert!(!std::mem::replace(&mut slot.is_ready, true));
                }
                Received::Terminated(_) => {}
            }
        }
        Ok(())
    }

    /// Goes on with one of the commands that are ready.
    fn execute(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let ready: Vec<SlotId> =
            self.slots.iter().filter(|(_, slot)| slot.is_ready).map(|(id, _)| *id).collect();
        if ready.is_empty() {
            return Ok(());
        }
        let id = *u.choose(&ready)?;
        if !self.is_connected {
            self.is_connected = true;
            self.queue.connect(ENTRIES as u16, u.arbitrary()?);
        }
        let data = [7; 600];
        match u.int_in_range(0..=3)? {
            0 => {
                let (offset, len) = (u32::from(u.arbitrary::<u8>()?) * 4, u.int_in_range(1..=4u32)? * 4);
                self.queue.request_data(id, offset, len);
                let slot = self.slots.get_mut(&id).expect("a command");
                (slot.range, slot.is_ready) = ((offset, offset + len), false);
                return Ok(());
            }
            1 => self.queue.complete_with_data(id, &data, u.arbitrary()?),
            _ => self.queue.complete(id, Status::new(u.arbitrary()?), u.arbitrary()?),
        }
        self.slots.get_mut(&id).expect("a command").is_ready = false;
        Ok(())
    }

    /// The socket takes some of the output.
    fn send(&mut self, most: usize) {
        let pieces = self.queue.output().map(|piece| match piece {
            Piece::Bytes(bytes) => bytes.len(),
            Piece::Data { slot, offset, len } => {
                assert!(self.slots.contains_key(&slot) && offset + len == 600);
                len as usize
            }
        });
        let all: usize = pieces.sum();
        let slots = &mut self.slots;
        self.queue.sent(all.min(most), |slot| assert!(slots.remove(&slot).is_some()));
        assert!(self.queue.in_use() <= ENTRIES && self.queue.in_use() == self.slots.len());
    }

    /// A PDU of the host: often one that fits the state.
    fn pdu(&self, u: &mut Unstructured<'_>, format: &Format) -> Result<Vec<u8>> {
        let header = if u.int_in_range(0..=2)? == 0 {
            let data_len = u32::from(u.arbitrary::<u8>()?) * 4;
            Header::Command { entry: SubmissionEntry::new(1, 1).with_cid(u.arbitrary()?), data_len }
        } else if u.int_in_range(0..=15)? == 0 {
            Header::TermReq { from: Side::Host, fatal: Fatal::of(u.arbitrary().map(status)?), data_len: 0 }
        } else {
            let slots: Vec<_> = self.slots.iter().collect();
            match slots.is_empty() {
                true => Header::Command { entry: SubmissionEntry::new(2, 1), data_len: 0 },
                false => {
                    let (id, slot) = u.choose(&slots)?;
                    let (start, end) = slot.range;
                    let len = if u.arbitrary()? { end - start } else { u.int_in_range(1..=4)? * 4 };
                    let is_last = u.arbitrary()?;
                    let len = len.clamp(4, 4096) & !3;
                    Header::H2cData(H2cData { cid: slot.cid, tag: id.0, offset: start, len, is_last })
                }
            }
        };
        let mut bytes = vec![0; HEADER_MAX];
        let start = header.encode(format, &mut bytes);
        bytes.truncate(start);
        bytes.resize(start + header.data_len() as usize, 0);
        if format.data_digest && header.data_len() != 0 && !matches!(header, Header::TermReq { .. }) {
            // Usually a wrong digest, which fails the command only.
            bytes.extend(u.arbitrary::<[u8; 4]>()?);
        }
        if u.int_in_range(0..=31)? == 0 {
            let at = u.int_in_range(0..=bytes.len() - 1)?;
            bytes[at] = u.arbitrary()?;
        }
        Ok(bytes)
    }
}

const fn status(number: u16) -> aryk_nvme_fabrics::tcp::FatalStatus {
    aryk_nvme_fabrics::tcp::FatalStatus(number)
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let request = IcReq {
        alignment: u.int_in_range(0..=31)?,
        header_digest: u.arbitrary()?,
        data_digest: u.arbitrary()?,
        max_r2t: u.arbitrary()?,
    };
    let format = request.answer(SUPPORTED).h2c_format();
    let queue = Queue::new(SUPPORTED, CAPSULE_DATA_MAX);
    let mut owner = Owner { queue, slots: BTreeMap::new(), is_connected: false };
    let mut first = [0; HEADER_MAX];
    let len = Header::IcReq(request).encode(&Format::default(), &mut first);
    owner.receive(&first[..len]).expect("a valid first PDU");
    while !u.is_empty() {
        match u.int_in_range(0..=3)? {
            0 | 1 => {
                let pdu = owner.pdu(u, &format)?;
                let (front, back) = pdu.split_at(u.int_in_range(0..=pdu.len())?);
                if let Err(fatal) = owner.receive(front).and_then(|()| owner.receive(back)) {
                    assert_eq!(owner.receive(back), Err(fatal), "nothing is taken after a fatal error");
                    owner.queue.terminate(fatal);
                    owner.send(usize::MAX);
                    return Ok(());
                }
            }
            2 => owner.execute(u)?,
            _ => owner.send(u.arbitrary::<u16>()?.into()),
        }
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});
