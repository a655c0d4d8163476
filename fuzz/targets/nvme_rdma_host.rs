//! What a target of NVMe over RDMA says to a host: the private data of a connection that it accepts or refuses, and messages, in
//! any order with the reports of the host's own device.
//!
//! For any input, no code panics. A command ends once, after its capsule has left and a completion of it has come.
#![no_main]

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme_fabrics::rdma::{Accept, Ended, HostQueue, Reject, Violation};
use aryk_nvme_fabrics::sgl::Sgl;
use libfuzzer_sys::fuzz_target;

const COMMANDS: u16 = 6;
const NO_DATA: Sgl = Sgl::Keyed { address: 0, len: 0, key: 0, invalidates: false };

/// What has come of a command.
#[derive(Clone, Copy, Default)]
struct Command {
    is_submitted: bool,
    is_sent: bool,
    is_completed: bool,
}

fuzz_target!(|input: &[u8]| {
    if let Ok(accept) = Accept::decode(input) {
        assert_eq!(Accept::decode(&accept.encode()), Ok(accept));
    }
    if let Some(reject) = Reject::decode(input) {
        assert_eq!(Reject::decode(&reject.encode()), Some(reject));
        assert!(!reject.name().is_empty());
    }
    let (mut queue, mut commands) = (HostQueue::new(COMMANDS), [Command::default(); COMMANDS as usize]);
    let mut input = input;
    while let Some((&step, rest)) = input.split_first() {
        input = rest;
        let cid = u16::from(step >> 2) % COMMANDS;
        let command = &mut commands[usize::from(cid)];
        let ended = match step % 4 {
            0 if !command.is_submitted => {
                command.is_submitted = true;
                assert_eq!(queue.submit(cid, SubmissionEntry::new(step, 1), NO_DATA).cid(), cid);
                None
            }
            1 if command.is_submitted && !command.is_sent => {
                command.is_sent = true;
                queue.sent(cid)
            }
            2 | 3 => {
                let len = if step % 4 == 2 { 16 } else { usize::from(step >> 2) };
                let (message, rest) = input.split_at(len.min(input.len()));
                input = rest;
                let of = message.get(12..14).map_or(u16::MAX, |cid| u16::from_le_bytes([cid[0], cid[1]]));
                match queue.receive(message) {
                    Ok(ended) => {
                        let command = &mut commands[usize::from(of)];
                        assert!(command.is_submitted && !command.is_completed && message.len() == 16);
                        command.is_completed = true;
                        ended
                    }
                    Err(Violation::Length(len)) => return assert!(len == message.len() && len != 16),
                    Err(Violation::Command(cid)) => {
                        let is_open =
                            commands.get(usize::from(cid)).is_some_and(|c| c.is_submitted && !c.is_completed);
                        return assert!(cid == of && !is_open);
                    }
                }
            }
            _ => None,
        };
        if let Some(Ended { cid, .. }) = ended {
            let command = std::mem::take(&mut commands[usize::from(cid)]);
            assert!(command.is_submitted && command.is_sent && command.is_completed, "a command ends once");
        }
        assert!(
            commands.iter().all(|command| !(command.is_sent && command.is_completed)),
            "a command ends at last"
        );
    }
});
