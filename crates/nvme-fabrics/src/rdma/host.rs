//! A host's side of a connection: commands go out, completions come back. NVMe RDMA Transport 1.0 §3.1. Any context.
//!
//! The queue knows neither the connection nor the memory of the data. Its owner chooses the command identifiers, sends the
//! capsules, and passes on what it receives.
//!
//! **Invariants.** A controller completes only a command that it has, and only once. A command ends when its completion has come
//! and the host's own device has reported that its capsule has left ([`HostQueue::sent`]): the device does not access the capsule
//! afterwards, and the two reports come in any order. The queue allocates nothing once it has been created.

use aryk_nvme::spec::entry::{CompletionEntry, SubmissionEntry};
use aryk_nvme::spec::status::Status;
use zerocopy::FromBytes;

use crate::sgl::Sgl;

/// A command that has ended, whose identifier is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The command.
    pub cid: u16,
    /// Its status.
    pub status: Status,
    /// DW0 and DW1 of its completion.
    pub result: u64,
}

/// What a controller must not do: the connection must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A message has not the length of a completion.
    #[error("a message of {0} bytes")]
    Length(usize),
    /// A completion of a command that the controller does not have.
    #[error("a completion of command {0}, which it does not have")]
    Command(u16),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// Neither has come.
    Submitted,
    /// Its capsule has left.
    Sent,
    /// Its completion has come.
    Completed(Ended),
}

/// See the [module](self).
#[derive(Debug)]
pub struct HostQueue {
    slots: Box<[State]>,
}

impl HostQueue {
    /// The queue of a new connection for `commands` commands at a time.
    pub fn new(commands: u16) -> Self {
        Self { slots: vec![State::Free; usize::from(commands)].into() }
    }

    /// Adds a command whose data is there. Returns it as it is to be sent.
    ///
    /// # Panics
    /// The identifier is in use or too large.
    pub fn submit(&mut self, cid: u16, entry: SubmissionEntry, data: Sgl) -> SubmissionEntry {
        let slot = &mut self.slots[usize::from(cid)];
        assert_eq!(*slot, State::Free, "a command identifier is used once at a time");
        *slot = State::Submitted;
        entry.with_cid(cid).with_sgl(data.encode())
    }

    /// The capsule of a command has left. Returns the command if that was its end.
    ///
    /// # Panics
    /// If it had left before.
    pub fn sent(&mut self, cid: u16) -> Option<Ended> {
        let slot = &mut self.slots[usize::from(cid)];
        match *slot {
            State::Submitted => *slot = State::Sent,
            State::Completed(ended) => {
                *slot = State::Free;
                return Some(ended);
            }
            State::Free | State::Sent => unreachable!("a capsule leaves once"),
        }
        None
    }

    /// Takes a message of the controller. Returns the command if that was its end.
    ///
    /// # Errors
    /// The controller violates the protocol: the connection must end.
    pub fn receive(&mut self, message: &[u8]) -> Result<Option<Ended>, Violation> {
        let entry =
            CompletionEntry::read_from_bytes(message).map_err(|_| Violation::Length(message.len()))?;
        let cid = entry.cid();
        let ended = Ended { cid, status: entry.status(), result: entry.result_64() };
        let slot = self.slots.get_mut(usize::from(cid)).ok_or(Violation::Command(cid))?;
        match *slot {
            State::Submitted => *slot = State::Completed(ended),
            State::Sent => {
                *slot = State::Free;
                return Ok(Some(ended));
            }
            State::Free | State::Completed(_) => return Err(Violation::Command(cid)),
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::{Queue, Region};
    use crate::sgl::DataBlocks;
    use aryk_nvme::spec::opcode::io;
    use zerocopy::IntoBytes;

    fn completion(cid: u16) -> CompletionEntry {
        CompletionEntry::new(cid, Status::new(0), 7)
    }

    fn ended(cid: u16) -> Ended {
        Ended { cid, status: Status::new(0), result: 7 }
    }

    #[test]
    fn a_command_ends_after_its_capsule_has_left_and_its_completion_has_come() {
        let mut queue = HostQueue::new(2);
        let sgl = Sgl::Keyed { address: 0x1000, len: 512, key: 9, invalidates: false };
        let entry = queue.submit(1, SubmissionEntry::new(io::READ, 1), sgl);
        assert_eq!((entry.cid(), Sgl::decode(&entry, DataBlocks::Keyed)), (1, Ok(sgl)));
        assert_eq!(queue.sent(1), None);
        assert_eq!(queue.receive(completion(1).as_bytes()), Ok(Some(ended(1))));
        queue.submit(1, entry, sgl);
        assert_eq!(queue.receive(completion(1).as_bytes()), Ok(None));
        assert_eq!(
            queue.receive(completion(1).as_bytes()),
            Err(Violation::Command(1)),
            "a second completion"
        );
        assert_eq!(queue.sent(1), Some(ended(1)));
    }

    /// Commands of all kinds against a controller's side, which completes the last one first.
    #[test]
    fn a_host_and_a_controller_agree() {
        const COMMANDS: u16 = 5;
        let (mut host, mut controller) = (HostQueue::new(COMMANDS), Queue::new(COMMANDS + 1));
        controller.connect(COMMANDS + 1, true);
        let region = |cid: u16| Region { address: 0x1000 * u64::from(cid), key: 7 + u32::from(cid) };
        for round in 0..3 {
            let mut open = Vec::new();
            for cid in 0..COMMANDS {
                let Region { address, key } = region(cid);
                let (opcode, sgl) = match (cid + round) % COMMANDS {
                    0 => (io::READ, Sgl::Keyed { address, len: 4096, key, invalidates: false }),
                    1 => (io::WRITE, Sgl::InCapsule { offset: 0, len: 512 }),
                    2 => (io::WRITE, Sgl::Keyed { address, len: 512, key, invalidates: false }),
                    _ => (io::FLUSH, Sgl::Keyed { address: 0, len: 0, key: 0, invalidates: false }),
                };
                let entry = host.submit(cid, SubmissionEntry::new(opcode, 1), sgl);
                let (slot, received) = controller.receive(entry.as_bytes()).unwrap();
                assert_eq!((received, Sgl::decode(&received, DataBlocks::Keyed)), (entry, Ok(sgl)));
                open.push((cid, slot, opcode, sgl));
                assert_eq!(host.sent(cid), None);
            }
            for (cid, slot, opcode, sgl) in open.into_iter().rev() {
                let reply = match (opcode, sgl) {
                    (io::READ, _) => {
                        let (written, reply) = controller.complete_with_data(slot, 4096, 0);
                        assert_eq!(written, Some(region(cid)));
                        reply
                    }
                    (io::WRITE, Sgl::Keyed { len, .. }) => {
                        assert_eq!(controller.request_data(slot, len), region(cid));
                        controller.has_read(slot);
                        controller.complete(slot, Status::new(0), 0)
                    }
                    _ => controller.complete(slot, Status::new(0), 0),
                };
                assert_eq!(reply.invalidates, None);
                let ended = Ended { cid, status: Status::new(0), result: 0 };
                assert_eq!(host.receive(reply.entry.as_bytes()), Ok(Some(ended)));
                controller.sent(slot);
            }
        }
    }

    #[test]
    fn completions_of_no_command_and_other_messages_are_violations() {
        let mut queue = HostQueue::new(2);
        for cid in [0, 1, 2, u16::MAX] {
            assert_eq!(queue.receive(completion(cid).as_bytes()), Err(Violation::Command(cid)));
        }
        for len in [0, 15] {
            assert_eq!(queue.receive(&completion(0).as_bytes()[..len]), Err(Violation::Length(len)));
        }
        assert_eq!(queue.receive(&[0; 17]), Err(Violation::Length(17)));
    }
}
