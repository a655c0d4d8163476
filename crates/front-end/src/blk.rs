//! Block devices (virtio 1.2, section 5.2).

use crate::{Builder, Error, Operation, Piece, Place, Request, RequestError};
use aryk_dma::GuestArea;

/// Feature bits (section 5.2.3).
pub mod feature {
    /// The disk is read-only.
    pub const RO: u64 = 1 << 5;
    /// The device reports its block size.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// The device has a write cache, which the FLUSH request flushes.
    pub const FLUSH: u64 = 1 << 9;
    /// The device has several queues.
    pub const MQ: u64 = 1 << 12;
    /// The device executes DISCARD.
    pub const DISCARD: u64 = 1 << 13;
    /// The device executes WRITE ZEROES.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// Bytes of `struct virtio_blk_config` that every back-end has (section 5.2.4).
pub const CONFIG_LEN: usize = 60;
/// Bytes of a sector, the unit of all addresses on the disk.
pub const SECTOR: u64 = 512;

/// Request types (section 5.2.6).
const IN: u32 = 0;
const OUT: u32 = 1;

/// Length of the header: header and status are on one cache line.
const HEADER_LEN: u32 = 16;
const STATUS_AT: u64 = 16;
/// A status that no device writes: the request is not completed.
const UNANSWERED: u8 = 0xff;

/// The fields of a device's configuration space that the front-end uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Capacity in sectors.
    pub capacity: u64,
    /// Bytes of a block.
    pub block_size: u32,
}

impl Config {
    /// Parses the configuration space; `features` are the negotiated bits, which decide the fields that are valid.
    ///
    /// # Errors
    /// The space is too short, or holds impossible values.
    pub fn parse(bytes: &[u8], features: u64) -> Result<Self, Error> {
        let wrong = |what: String| Error::Reply { request: Request::GET_CONFIG, what };
        let field = |at: usize| {
            let bytes: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_le_bytes(bytes))
        };
        let [Some(low), Some(high), Some(block_size)] = [field(0), field(4), field(20)] else {
            return Err(wrong(format!("a configuration space of {} bytes", bytes.len())));
        };
        let block_size = if features & feature::BLK_SIZE == 0 { SECTOR as u32 } else { block_size };
        if !block_size.is_power_of_two() || u64::from(block_size) < SECTOR {
            return Err(wrong(format!("blocks of {block_size} bytes")));
        }
        let capacity = u64::from(low) | u64::from(high) << 32;
        if capacity.checked_mul(SECTOR).is_none() {
            return Err(wrong(format!("a disk of {capacity} sectors")));
        }
        Ok(Self { capacity, block_size })
    }
}

/// Builds requests for block devices.
#[derive(Clone, Copy, Debug)]
pub struct Requests;

impl Builder for Requests {
    const SPACE: u64 = 64;

    fn pieces(&self, operation: Operation, place: Place) -> [Piece; 3] {
        [
            Piece { at: place.head, len: HEADER_LEN, write: false },
            Piece { at: place.data, len: place.len, write: operation == Operation::Read },
            Piece { at: place.head + STATUS_AT, len: 1, write: true },
        ]
    }

    #[inline]
    fn set_up(&self, memory: &GuestArea, operation: Operation, place: Place, offset: u64) {
        let kind = if operation == Operation::Read { IN } else { OUT };
        let header = [u64::from(kind), offset / SECTOR].map(u64::to_le);
        memory.write(place.head as usize, &header);
        memory.write((place.head + STATUS_AT) as usize, &UNANSWERED);
    }

    #[inline]
    fn check(
        &self,
        memory: &GuestArea,
        operation: Operation,
        place: Place,
        written: u32,
    ) -> Result<(), RequestError> {
        let status: u8 = memory.read((place.head + STATUS_AT) as usize);
        match status {
            0 => {}
            1 => return Err(RequestError::Failed("an I/O error")),
            2 => return Err(RequestError::Failed("'unsupported'")),
            other => return Err(RequestError::Nonsense(other)),
        }
        let expected = place.len + 1;
        if operation == Operation::Read && written != expected {
            return Err(RequestError::Length { written, expected });
        }
        Ok(())
    }
}
