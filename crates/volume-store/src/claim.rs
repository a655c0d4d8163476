//! The claim: which daemon has a pool open on a disk that several hosts reach. Any context.
//!
//! It is no part of the pool's state: no checkpoint or edit refers to it, and a pool without one opens. It has 512 bytes, so a
//! disk writes it as a whole or not at all.

use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::superblock::{PLACES, sum};

/// Bytes of a claim.
pub const CLAIM_BYTES: usize = 512;
/// Bytes that are kept for it: a block of the disk.
pub(crate) const ROOM_BYTES: u64 = 4096;
/// The byte offset of the claim. Its room is directly before the second superblock.
pub const CLAIM_PLACE: u64 = PLACES[1] - ROOM_BYTES;
/// Bytes of a host's name.
const HOST_BYTES_MAX: usize = 64;

const MAGIC: [u8; 8] = *b"ARYKHOLD";
const VERSION: u32 = 1;

/// A claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The pool.
    pub pool: Uuid,
    /// The life of the daemon that made the claim.
    pub daemon: Uuid,
    /// The boot of its host.
    pub boot: Uuid,
    /// The namespace of its process ID, by its inode.
    pub pid_namespace: u64,
    /// Its process ID.
    pub pid: u32,
    /// Whether the daemon has given the pool back.
    pub is_released: bool,
    /// Increases with each write of the claim.
    pub beat: u64,
    /// The name of its host; longer ones are cut.
    pub host: String,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    version: U32,
    checksum: U32,
    pool: [u8; 16],
    daemon: [u8; 16],
    boot: [u8; 16],
    pid_namespace: U64,
    pid: U32,
    is_released: U32,
    beat: U64,
    host: [u8; HOST_BYTES_MAX],
    reserved: [u8; CLAIM_BYTES - 152],
}

const _: () = assert!(size_of::<Raw>() == CLAIM_BYTES);

impl Claim {
    /// The bytes of the claim.
    pub fn encode(&self) -> [u8; CLAIM_BYTES] {
        let mut raw = Raw::new_zeroed();
        raw.magic = MAGIC;
        raw.version = VERSION.into();
        raw.pool = self.pool.into_bytes();
        raw.daemon = self.daemon.into_bytes();
        raw.boot = self.boot.into_bytes();
        raw.pid_namespace = self.pid_namespace.into();
        raw.pid = self.pid.into();
        raw.is_released = u32::from(self.is_released).into();
        raw.beat = self.beat.into();
        let host = &self.host.as_bytes()[..self.host.floor_char_boundary(HOST_BYTES_MAX)];
        raw.host[..host.len()].copy_from_slice(host);
        raw.checksum = sum(raw.as_bytes()).into();
        let mut bytes = [0; CLAIM_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// The claim in these [`CLAIM_BYTES`] bytes. `None` if there is none, as on the disk of a pool that only one host has ever
    /// reached.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let raw = Raw::read_from_bytes(bytes).ok()?;
        if raw.magic != MAGIC || raw.checksum.get() != sum(bytes) {
            return None;
        }
        // A claim of a newer version has a checksum too, and stays a claim: what it says here is the same.
        let host = raw.host.split(|byte| *byte == 0).next().unwrap_or_default();
        Some(Self {
            pool: Uuid::from_bytes(raw.pool),
            daemon: Uuid::from_bytes(raw.daemon),
            boot: Uuid::from_bytes(raw.boot),
            pid_namespace: raw.pid_namespace.get(),
            pid: raw.pid.get(),
            is_released: raw.is_released.get() != 0,
            beat: raw.beat.get(),
            // It is shown to people.
            host: String::from_utf8_lossy(host).replace(char::is_control, " "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim() -> Claim {
        Claim {
            pool: Uuid::from_u128(1),
            daemon: Uuid::from_u128(2),
            boot: Uuid::from_u128(3),
            pid_namespace: 4,
            pid: 5,
            is_released: false,
            beat: 6,
            host: "hv7".to_owned(),
        }
    }

    #[test]
    fn a_claim_is_read_as_it_was_written() {
        for is_released in [false, true] {
            let claim = Claim { is_released, ..claim() };
            assert_eq!(Claim::parse(&claim.encode()), Some(claim));
        }
        let long = Claim { host: "ä".repeat(100), ..claim() };
        assert_eq!(Claim::parse(&long.encode()).unwrap().host, "ä".repeat(32));
    }

    #[test]
    fn bytes_that_were_changed_are_no_claim() {
        let bytes = claim().encode();
        assert_eq!(Claim::parse(&bytes[1..]), None);
        for at in 0..CLAIM_BYTES {
            let mut bytes = bytes;
            bytes[at] ^= 1;
            assert_eq!(Claim::parse(&bytes[..]), None, "byte {at}");
        }
    }
}
