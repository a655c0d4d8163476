//! Requests for SCSI hosts (virtio 1.2, section 5.6), and for a disk behind one (SPC-4, SBC-3).

use crate::{Builder, Error, Operation, Piece, Place, Queue, RequestError};
use aryk_dma::GuestArea;
use std::time::Duration;

/// Number of queues before the first request queue: control and event queue.
pub const FIXED_QUEUES: u16 = 2;

/// Bytes of `struct virtio_scsi_config` (section 5.6.4).
pub const CONFIG_LEN: usize = 36;

/// Offset of the response: request and response are each on their own cache lines.
const ANSWER_AT: u64 = 64;
/// `struct virtio_scsi_req_cmd` with a CDB of 32 bytes (section 5.6.6.1).
const REQUEST_LEN: u32 = 51;
/// Bytes of the response, with 96 bytes of sense data.
const ANSWER_LEN: u32 = 108;
/// In a response: the status, the response code, and the sense data.
const STATUS_AT: u64 = ANSWER_AT + 10;
const SENSE_AT: u64 = ANSWER_AT + 12;
/// A response code that no device writes: the command is not completed.
const UNANSWERED: u8 = 0xff;
const CHECK_CONDITION: u8 = 2;
/// The sense key by which a unit reports an event before it executes a command (SPC-4, table 48).
const UNIT_ATTENTION: u8 = 6;
/// Number of unit attentions after which a command is no longer repeated.
const ATTENTIONS_MAX: u32 = 16;

/// The part of the CDB that the front-end uses.
type Cdb = [u8; 16];

const READ_16: u8 = 0x88;
const WRITE_16: u8 = 0x8a;
const TEST_UNIT_READY: Cdb = [0; 16];
/// READ CAPACITY (16), with an allocation length of 32 bytes.
const READ_CAPACITY: Cdb = [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];
const CAPACITY_LEN: usize = 32;
/// MODE SENSE (6), for the header without block descriptors.
const MODE_SENSE: Cdb = [0x1a, 0x08, 0x3f, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const MODE_LEN: usize = 4;

/// The parameters that a disk reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Number of blocks.
    pub blocks: u64,
    /// Bytes of a block.
    pub block_size: u32,
    /// The disk is read-only.
    pub readonly: bool,
}

/// Whether a configuration space is a SCSI host's, judged by its sizes (section 5.6.4): 96 bytes of sense data and a
/// CDB of 32 bytes. The same bytes would give a block device blocks of an impossible size.
#[must_use]
pub fn is_config(bytes: &[u8]) -> bool {
    bytes.get(20..28) == Some(&[96, 0, 0, 0, 32, 0, 0, 0])
}

/// Builds reads and writes for one disk.
#[derive(Clone, Copy, Debug)]
pub struct Requests {
    target: u8,
    lun: u16,
    block_shift: u32,
}

impl Requests {
    /// Requests for a target's unit. The block size is 512 bytes until [`Queue::probe`] reads the disk's.
    #[must_use]
    pub const fn new(target: u8, lun: u16) -> Self {
        Self { target, lun, block_shift: 9 }
    }

    /// Writes a request: the address, a tag, the attributes of a simple task, and the CDB. All stores are whole
    /// words: loading a word that was just stored in smaller parts would wait until those stores have left the store
    /// buffer.
    #[inline]
    fn write(&self, memory: &GuestArea, place: Place, cdb: &Cdb) {
        let [high, low] = self.lun.to_be_bytes();
        let address = u64::from_le_bytes([1, self.target, 0x40 | high, low, 0, 0, 0, 0]);
        let cdb = u128::from_le_bytes(*cdb);
        // Three bytes of attributes, then the CDB.
        let words = [address, place.head, (cdb << 24) as u64, (cdb >> 40) as u64, (cdb >> 104) as u64];
        memory.write(place.head as usize, &words.map(u64::to_le));
        memory.write((place.head + STATUS_AT) as usize, &[UNANSWERED; 2]);
    }
}

impl Builder for Requests {
    const SPACE: u64 = 192;

    fn pieces(&self, operation: Operation, place: Place) -> [Piece; 3] {
        let request = Piece { at: place.head, len: REQUEST_LEN, write: false };
        let answer = Piece { at: place.head + ANSWER_AT, len: ANSWER_LEN, write: true };
        let data = Piece { at: place.data, len: place.len, write: operation == Operation::Read };
        match operation {
            Operation::Read => [request, answer, data],
            Operation::Write => [request, data, answer],
        }
    }

    #[inline]
    fn set_up(&self, memory: &GuestArea, operation: Operation, place: Place, offset: u64) {
        let code = if operation == Operation::Read { READ_16 } else { WRITE_16 };
        let (lba, blocks) = (offset >> self.block_shift, place.len >> self.block_shift);
        let cdb = u128::from(code) << 120 | u128::from(lba) << 48 | u128::from(blocks) << 16;
        self.write(memory, place, &cdb.to_be_bytes());
    }

    #[inline]
    fn check(
        &self,
        memory: &GuestArea,
        operation: Operation,
        place: Place,
        written: u32,
    ) -> Result<(), RequestError> {
        answered(memory, place)?;
        let expected = place.len + ANSWER_LEN;
        if operation == Operation::Read && written != expected {
            return Err(RequestError::Length { written, expected });
        }
        Ok(())
    }
}

/// Checks the response of a command (section 5.6.6.1.1).
#[inline]
fn answered(memory: &GuestArea, place: Place) -> Result<(), RequestError> {
    let [status, response]: [u8; 2] = memory.read((place.head + STATUS_AT) as usize);
    match (response, status) {
        (0, 0) => Ok(()),
        (0, CHECK_CONDITION) => Err(check_condition(memory, place)),
        (0, 0x08) => Err(RequestError::Failed("BUSY")),
        (0, 0x18) => Err(RequestError::Failed("RESERVATION CONFLICT")),
        (0, 0x28) => Err(RequestError::Failed("TASK SET FULL")),
        (0, 0x40) => Err(RequestError::Failed("TASK ABORTED")),
        (0, other) => Err(RequestError::Nonsense(other)),
        (1, _) => Err(RequestError::Failed("'overrun'")),
        (2, _) => Err(RequestError::Failed("'aborted'")),
        (3, _) => Err(RequestError::Failed("'bad target'")),
        (4, _) => Err(RequestError::Failed("'reset'")),
        (5, _) => Err(RequestError::Failed("'busy'")),
        (6..=9, _) => Err(RequestError::Failed("'failure'")),
        (other, _) => Err(RequestError::Nonsense(other)),
    }
}

/// Parses sense data, in the fixed or the descriptor format (SPC-4, section 4.5).
#[cold]
fn check_condition(memory: &GuestArea, place: Place) -> RequestError {
    let sense: [u8; 14] = memory.read((place.head + SENSE_AT) as usize);
    let (key, code, qualifier) = match sense[0] & 0x7f {
        0x72 | 0x73 => (sense[1] & 0xf, sense[2], sense[3]),
        _ => (sense[2] & 0xf, sense[12], sense[13]),
    };
    RequestError::Sense { key, code, qualifier }
}

impl Queue<Requests> {
    /// Reads the unit's type, capacity and block size; must be called before any other request. Each command may take
    /// as long as `patience`. The queue's requests must have at least 512 bytes of data.
    ///
    /// # Errors
    /// The unit does not exist, does not answer, or is no disk.
    ///
    /// # Panics
    /// If requests are in flight, or have too little data.
    pub fn probe(&mut self, patience: Duration) -> Result<Capacity, Error> {
        self.command(&TEST_UNIT_READY, patience)?;
        let capacity: [u8; CAPACITY_LEN] = self.answer_of(&READ_CAPACITY, patience)?;
        let mode: [u8; MODE_LEN] = self.answer_of(&MODE_SENSE, patience)?;
        let last = u64::from_be_bytes(std::array::from_fn(|i| capacity[i]));
        let block_size = u32::from_be_bytes(std::array::from_fn(|i| capacity[8 + i]));
        let blocks = last.checked_add(1);
        let bytes = blocks.and_then(|blocks| blocks.checked_mul(block_size.into()));
        let (Some(blocks), Some(_)) = (blocks, bytes) else {
            return Err(self.failed(RequestError::Failed("it reports an impossible capacity")));
        };
        if !block_size.is_power_of_two() || block_size < 512 {
            return Err(self.failed(RequestError::Failed("it reports an impossible block size")));
        }
        self.set_block_size(block_size);
        Ok(Capacity { blocks, block_size, readonly: mode[2] & 0x80 != 0 })
    }

    /// Sets the block size of the disk, in bytes: a power of two.
    pub const fn set_block_size(&mut self, bytes: u32) {
        self.builder_mut().block_shift = bytes.trailing_zeros();
    }

    /// Executes a command and returns the first bytes of its data.
    fn answer_of<const N: usize>(&mut self, cdb: &Cdb, patience: Duration) -> Result<[u8; N], Error> {
        let place = self.command(cdb, patience)?;
        assert!(place.len as usize >= N, "requests of {} bytes", place.len);
        Ok(self.area().read(place.data as usize))
    }

    /// Executes a command, and repeats it as long as the unit answers with a unit attention.
    fn command(&mut self, cdb: &Cdb, patience: Duration) -> Result<Place, Error> {
        let requests = *self.builder_mut();
        let mut attentions = 0;
        loop {
            let place = self.round_trip(patience, |memory, place| requests.write(memory, place, cdb))?;
            match answered(self.area(), place) {
                Ok(()) => return Ok(place),
                Err(RequestError::Sense { key: UNIT_ATTENTION, .. }) if attentions < ATTENTIONS_MAX => {
                    attentions += 1;
                }
                Err(trouble) => return Err(self.failed(trouble)),
            }
        }
    }
}
