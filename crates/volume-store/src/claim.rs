//! The claim: which daemon has a pool open on a disk that several hosts reach. Any context, but [`Holder`] asks the kernel:
//! control context.
//!
//! It is no part of the pool's state: no checkpoint or edit refers to it, and a pool without one opens. It has 512 bytes, so a
//! disk writes it as a whole or not at all.

use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;
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

/// The time between events of a claim.
#[derive(Clone, Copy, Debug)]
pub struct ClaimPace {
    /// Between two beats.
    pub beat: Duration,
    /// After the beginning of a beat, the process may use the disk for so long: several beats.
    pub lease: Duration,
    /// A claim that was not given back, and does not change for so long, is taken over: longer than the lease, by more than the
    /// target of a lost connection may take for a write.
    pub watch: Duration,
    /// Between two looks at a claim that is watched.
    pub look: Duration,
    /// From the read of a claim to the end of the write that replaces it, at most, where the disk does not do both at once.
    pub hurry: Duration,
    /// After that write, before the claim counts: longer than `hurry`, which is what another daemon's write may take.
    pub settle: Duration,
}

impl Default for ClaimPace {
    fn default() -> Self {
        Self {
            beat: Duration::from_secs(2),
            lease: Duration::from_secs(8),
            watch: Duration::from_secs(32),
            look: Duration::from_secs(1),
            hurry: Duration::from_secs(1),
            settle: Duration::from_secs(3),
        }
    }
}

/// A process that claims pools, as its claims name it.
#[derive(Clone, Debug)]
pub struct Holder {
    /// The life of the process: a number that no other one has.
    pub daemon: Uuid,
    /// The boot of its host; nil if that is unknown.
    pub boot: Uuid,
    /// The namespace of its process ID, by its inode; 0 if that is unknown.
    pub pid_namespace: u64,
    /// The process ID.
    pub pid: u32,
    /// The name of the host.
    pub host: String,
}

impl Holder {
    /// The holder that stands for this process, by what `/proc` says.
    pub fn of_this_process() -> Self {
        let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default().trim().to_owned();
        Self {
            daemon: Uuid::new_v4(),
            boot: read("/proc/sys/kernel/random/boot_id").parse().unwrap_or_default(),
            pid_namespace: std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino()),
            pid: std::process::id(),
            host: read("/proc/sys/kernel/hostname"),
        }
    }

    /// Whether the process that has made the claim has ended, as far as this one can tell.
    pub fn has_outlived(&self, claim: &Claim) -> bool {
        let is_here = !self.boot.is_nil()
            && self.pid_namespace != 0
            && (claim.boot, claim.pid_namespace) == (self.boot, self.pid_namespace);
        let pid = i32::try_from(claim.pid).ok().and_then(rustix::process::Pid::from_raw);
        let Some(pid) = pid.filter(|_| is_here) else { return false };
        // Another process of this ID has ended before this one began.
        claim.pid == self.pid || rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH)
    }

    /// Makes the claim of the process on a pool, with the number of a beat.
    pub fn claim(&self, pool: Uuid, beat: u64) -> Claim {
        let Self { daemon, boot, pid_namespace, pid, ref host } = *self;
        Claim { pool, daemon, boot, pid_namespace, pid, is_released: false, beat, host: host.clone() }
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
