//! A host of NVMe over RDMA: the private data of its connection, and the messages that it sends on it.
//!
//! For any input, no code panics; a host has no more commands than its queue has entries; and no more of its memory is read or
//! written than the descriptor of the command names.
#![no_main]

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::Status;
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::rdma::{PRIVATE_DATA_LEN, Queue, Region, Request};
use aryk_nvme_fabrics::sgl::{DataBlocks, Sgl};
use libfuzzer_sys::fuzz_target;

/// Bytes of the longest message.
const MESSAGE_MAX: usize = 64 + 4096;
const TRANSFER_MAX: u32 = 128 << 10;

/// A command that the owner has.
struct Open {
    slot: SlotId,
    entry: SubmissionEntry,
    data_len: u32,
}

/// Checks that a transfer is one of the command's memory.
fn check(entry: &SubmissionEntry, region: Region, transferred: u32) {
    let Ok(Sgl::Keyed { address, len, key, .. }) = Sgl::decode(entry, DataBlocks::Keyed) else {
        panic!("a transfer without a key")
    };
    assert_eq!(region, Region { address, key });
    assert!(transferred <= len);
}

fuzz_target!(|input: &[u8]| {
    let Some((private, mut input)) = input.split_at_checked(PRIVATE_DATA_LEN) else { return };
    let entries = match Request::decode(private) {
        Ok(request) => {
            assert_eq!(Request::decode(&request.encode()), Ok(request));
            request.entries.min(16)
        }
        Err(_) => 4,
    };
    let mut queue = Queue::new(entries);
    let (mut open, mut reading, mut unsent) = (Vec::new(), Vec::new(), Vec::new());
    let mut posted = queue.receives();
    while let Some((&step, rest)) = input.split_first() {
        input = rest;
        match step % 4 {
            // A message arrives, for which a receive was posted.
            0 | 1 if posted > 0 && queue.has_room() => {
                let len = input.len().min(if step & 4 == 0 { 64 } else { MESSAGE_MAX });
                let (message, rest) = input.split_at(len);
                input = rest;
                match queue.receive(message) {
                    Ok((slot, entry)) => {
                        posted -= 1;
                        open.push(Open { slot, entry, data_len: len as u32 - 64 });
                    }
                    Err(_) => {
                        assert!(len < 64);
                        return;
                    }
                }
            }
            2 if !open.is_empty() => {
                let Open { slot, entry, data_len } = open.remove(usize::from(step / 4) % open.len());
                let sgl = Sgl::decode(&entry, DataBlocks::Keyed);
                let sgl = sgl.and_then(|sgl| sgl.check(data_len, TRANSFER_MAX).map(|()| sgl));
                match sgl {
                    Ok(Sgl::Keyed { len, .. }) if step & 0x80 != 0 && len > 0 => {
                        check(&entry, queue.request_data(slot, len), len);
                        reading.push(Open { slot, entry, data_len });
                        continue;
                    }
                    Ok(sgl) if step & 0x40 != 0 => {
                        let len = sgl.len().saturating_add(u32::from(step & 0x20 != 0));
                        if let (Some(region), reply) = queue.complete_with_data(slot, len, 0) {
                            assert!(reply.entry.status().is_success());
                            check(&entry, region, len);
                        }
                    }
                    Ok(_) => _ = queue.complete(slot, Status::new(0), 0),
                    Err(code) => _ = queue.complete(slot, code.status(), 0),
                }
                unsent.push(slot);
            }
            3 if !reading.is_empty() => {
                let of_read: Open = reading.remove(0);
                queue.has_read(of_read.slot);
                open.push(of_read);
            }
            _ if !unsent.is_empty() => queue.sent(unsent.remove(0)),
            _ => {}
        }
        assert!(open.len() + reading.len() <= usize::from(entries));
        assert_eq!(queue.unsent(), unsent.len());
        posted = posted.max(queue.receives());
        assert!(usize::from(posted) + open.len() + reading.len() <= usize::from(entries));
    }
});
