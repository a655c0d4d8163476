//! A controller's side of a connection, which carries one queue pair: commands come in; reads, writes and completions go out.
//! NVMe RDMA Transport 1.0 §3.1. Context: the owner of the connection, usually a reactor.
//!
//! The queue knows neither the connection nor the memory of the data, nor what commands do. Its owner passes what it receives
//! ([`Queue::receive`]), executes commands, transfers data as the queue says, and sends the replies.
//!
//! **Invariants.** A slot is in use from [`Queue::receive`] until the completion has left ([`Queue::sent`]); until then its
//! owner keeps the data that is to be written in place. The owner posts no more receives than [`Queue::receives`] says, or ends
//! a connection that has got more commands, so that a host has no more of them without a completion than its queue has entries,
//! and there are twice as many slots. The queue allocates nothing once it has been created.

use aryk_nvme::spec::entry::{CompletionEntry, SubmissionEntry};
use aryk_nvme::spec::status::{Code, Status};
use zerocopy::FromBytes;

use crate::SlotId;
use crate::sgl::{DataBlocks, Sgl};

/// SQHD of the completion of a Connect that disabled flow control.
const NO_FLOW_CONTROL: u16 = 0xffff;

/// Memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its address there.
    pub address: u64,
    /// The host's key for it.
    pub key: u32,
}

/// A completion to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The completion.
    pub entry: CompletionEntry,
    /// The key that the message invalidates, if the host wants that.
    pub invalidates: Option<u32>,
}

/// A message that is shorter than a command: the connection must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooShort;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// The owner has the command.
    Owned,
    /// Its data is being read.
    Reading,
    /// Its completion is being sent.
    Completed,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: State,
    cid: u16,
    region: Region,
    /// Bytes of the region: those that a transfer may have.
    len: u32,
    invalidates: bool,
}

const FREE: Slot =
    Slot { state: State::Free, cid: 0, region: Region { address: 0, key: 0 }, len: 0, invalidates: false };

/// The connection. See the head of the file.
#[derive(Debug)]
pub struct Queue {
    entries: u16,
    slots: Vec<Slot>,
    free: Vec<SlotId>,
    /// Commands without a completion.
    open: u16,
    is_connected: bool,
    has_flow_control: bool,
    sqhd: u16,
}

impl Queue {
    /// A connection of a host that has up to `entries` commands at the same time.
    pub fn new(entries: u16) -> Self {
        let slots = usize::from(entries) * 2;
        Self {
            entries,
            slots: vec![FREE; slots],
            free: (0..slots as u16).rev().map(SlotId).collect(),
            open: 0,
            is_connected: false,
            has_flow_control: true,
            sqhd: 0,
        }
    }

    /// The number of commands that a host can have at the same time.
    pub const fn entries(&self) -> u16 {
        self.entries
    }

    /// The number of slots.
    pub const fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Receives that the owner should have posted.
    pub const fn receives(&self) -> u16 {
        self.entries.saturating_sub(self.open)
    }

    /// Whether [`Queue::receive`] has a slot. If not, the message waits until a completion has left.
    pub const fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Gives the queue its number of entries (SQSIZE plus one), while Connect is the only command there is. The completion of
    /// Connect follows.
    ///
    /// # Panics
    /// If the queue has been connected, or the connection has fewer entries.
    pub fn connect(&mut self, entries: u16, disables_flow_control: bool) {
        assert!(!self.is_connected && (2..=self.entries).contains(&entries), "a queue is connected once");
        (self.is_connected, self.entries) = (true, entries);
        self.has_flow_control = !disables_flow_control;
        self.sqhd = if disables_flow_control { NO_FLOW_CONTROL } else { 1 % entries };
    }

    /// Takes a message: a command, behind which its data may be. Returns the slot, and the command.
    ///
    /// # Errors
    /// The message is too short.
    ///
    /// # Panics
    /// If there is no room.
    pub fn receive(&mut self, message: &[u8]) -> Result<(SlotId, SubmissionEntry), TooShort> {
        let (entry, _) = SubmissionEntry::read_from_prefix(message).map_err(|_| TooShort)?;
        let slot = self.free.pop().expect("there is room");
        let (region, len, invalidates) = match Sgl::decode(&entry, DataBlocks::Keyed) {
            Ok(Sgl::Keyed { address, len, key, invalidates }) => (Region { address, key }, len, invalidates),
            _ => (FREE.region, 0, false),
        };
        *self.slot(slot) = Slot { state: State::Owned, cid: entry.cid(), region, len, invalidates };
        self.open += 1;
        if self.has_flow_control && self.is_connected {
            self.sqhd = (self.sqhd + 1) % self.entries;
        }
        Ok((slot, entry))
    }

    fn slot(&mut self, slot: SlotId) -> &mut Slot {
        &mut self.slots[usize::from(slot.0)]
    }

    /// A slot in one state, which goes on to another.
    fn advance(&mut self, slot: SlotId, from: State, to: State) -> &mut Slot {
        let slot = self.slot(slot);
        assert_eq!(slot.state, from, "the owner follows the order of a command");
        slot.state = to;
        slot
    }

    /// Where the host has the `len` bytes of a command's data, which the owner reads now.
    ///
    /// # Panics
    /// If the owner does not have the command, or its descriptor names less memory.
    pub fn request_data(&mut self, id: SlotId, len: u32) -> Region {
        let slot = self.advance(id, State::Owned, State::Reading);
        assert!(len > 0 && len <= slot.len, "what is read is what the descriptor names");
        slot.region
    }

    /// The data of a command has been read.
    ///
    /// # Panics
    /// If it was not requested.
    pub fn has_read(&mut self, id: SlotId) {
        self.advance(id, State::Reading, State::Owned);
    }

    /// Completes a command.
    ///
    /// # Panics
    /// If the owner does not have the command.
    pub fn complete(&mut self, id: SlotId, status: Status, result: u64) -> Reply {
        let slot = *self.advance(id, State::Owned, State::Completed);
        self.open -= 1;
        let entry = CompletionEntry::new(slot.cid, status, result).with_sqhd(self.sqhd);
        if self.sqhd == NO_FLOW_CONTROL {
            // Only the completion of Connect says so.
            self.sqhd = 0;
        }
        Reply { entry, invalidates: slot.invalidates.then_some(slot.region.key) }
    }

    /// Completes a command with success, after `len` bytes of data, which the owner writes to the host's memory before it sends
    /// the completion. If the descriptor does not name so much memory, the command fails, and nothing is written.
    ///
    /// # Panics
    /// If the owner does not have the command.
    pub fn complete_with_data(&mut self, id: SlotId, len: u32, result: u64) -> (Option<Region>, Reply) {
        let slot = *self.slot(id);
        match len <= slot.len {
            true => ((len > 0).then_some(slot.region), self.complete(id, Status::new(0), result)),
            false => (None, self.complete(id, Code::SGL_DATA_LENGTH_INVALID.status().as_final(), 0)),
        }
    }

    /// Drops a command, which gets no completion: a reset of the controller has ended it.
    ///
    /// # Panics
    /// If the owner does not have the command.
    pub fn drop_command(&mut self, id: SlotId) {
        *self.advance(id, State::Owned, State::Free) = FREE;
        self.open -= 1;
        self.free.push(id);
    }

    /// A completion has left: the slot is free.
    ///
    /// # Panics
    /// If the command was not completed.
    pub fn sent(&mut self, id: SlotId) {
        *self.advance(id, State::Completed, State::Free) = FREE;
        self.free.push(id);
    }

    /// Completions that have not left.
    pub fn unsent(&self) -> usize {
        self.slots.len() - self.free.len() - usize::from(self.open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    fn command(cid: u16, sgl: Sgl) -> SubmissionEntry {
        SubmissionEntry::new(2, 1).with_cid(cid).with_sgl(sgl.encode())
    }

    fn keyed(len: u32, invalidates: bool) -> Sgl {
        Sgl::Keyed { address: 0x1000, len, key: 7, invalidates }
    }

    #[test]
    fn a_command_has_its_slot_until_its_completion_has_left() {
        let mut queue = Queue::new(4);
        queue.connect(4, false);
        let entry = command(9, keyed(512, true));
        let (slot, received) = queue.receive(entry.as_bytes()).unwrap();
        assert_eq!((received, queue.receives(), queue.unsent()), (entry, 3, 0));
        assert_eq!(queue.request_data(slot, 512), Region { address: 0x1000, key: 7 });
        queue.has_read(slot);
        let reply = queue.complete(slot, Status::new(0), 0);
        assert_eq!((reply.entry.cid(), reply.entry.sqhd(), reply.invalidates), (9, 2, Some(7)));
        assert_eq!((queue.receives(), queue.unsent()), (4, 1));
        queue.sent(slot);
        assert_eq!(queue.unsent(), 0);
    }

    #[test]
    fn no_more_is_written_than_the_descriptor_names() {
        let mut queue = Queue::new(2);
        for (sgl, len, is_written) in [
            (keyed(512, false), 512, true),
            (keyed(512, false), 513, false),
            (Sgl::InCapsule { offset: 0, len: 512 }, 512, false),
        ] {
            let (slot, _) = queue.receive(command(1, sgl).as_bytes()).unwrap();
            let (region, reply) = queue.complete_with_data(slot, len, 0);
            assert_eq!((region.is_some(), reply.entry.status().is_success()), (is_written, is_written));
            queue.sent(slot);
        }
    }

    #[test]
    fn nothing_is_written_without_data() {
        let mut queue = Queue::new(2);
        for sgl in [keyed(512, false), Sgl::InCapsule { offset: 0, len: 0 }] {
            let (slot, _) = queue.receive(command(1, sgl).as_bytes()).unwrap();
            let (region, reply) = queue.complete_with_data(slot, 0, 0);
            assert_eq!((region, reply.entry.status().is_success()), (None, true));
        }
    }

    #[test]
    fn flow_control_is_as_connect_says() {
        let mut queue = Queue::new(4);
        let connect = command(1, keyed(0, false));
        let (slot, _) = queue.receive(connect.as_bytes()).unwrap();
        queue.connect(3, true);
        assert_eq!(queue.complete(slot, Status::new(0), 0).entry.sqhd(), NO_FLOW_CONTROL);
        let (slot, _) = queue.receive(connect.as_bytes()).unwrap();
        assert_eq!(queue.complete(slot, Status::new(0), 0).entry.sqhd(), 0);
        assert_eq!((queue.entries(), queue.receives()), (3, 3));
    }

    #[test]
    fn completions_that_have_not_left_keep_as_many_slots_as_there_are_entries() {
        let mut queue = Queue::new(2);
        let entry = command(1, keyed(0, false));
        for _ in 0..4 {
            assert!(queue.has_room());
            let (slot, _) = queue.receive(entry.as_bytes()).unwrap();
            let _ = queue.complete(slot, Status::new(0), 0);
        }
        assert!(!queue.has_room());
        assert_eq!(queue.receive(&entry.as_bytes()[..63]), Err(TooShort));
        queue.sent(SlotId(2));
        assert!(queue.has_room());
    }
}
