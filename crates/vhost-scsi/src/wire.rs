//! What passes between a guest and a SCSI host (virtio 1.2, section 5.6). Any context; pure.

use aryk_scsi::{Outcome, Status, lun_number};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Feature bits (section 5.6.3).
pub(crate) mod feature {
    /// Units come and go.
    pub const HOTPLUG: u64 = 1 << 1;
    /// Units' parameters change.
    pub const CHANGE: u64 = 1 << 2;
}

/// Targets of a controller.
pub const TARGETS: u8 = 8;
/// Bytes of a CDB, in all requests.
const CDB: usize = 32;
/// Bytes of sense data, in all responses.
const SENSE: usize = 96;

/// `struct virtio_scsi_config` (section 5.6.4).
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Config {
    num_queues: u32,
    seg_max: u32,
    max_sectors: u32,
    cmd_per_lun: u32,
    event_info_size: u32,
    sense_size: u32,
    cdb_size: u32,
    max_channel: u16,
    max_target: u16,
    max_lun: u32,
}

impl Config {
    /// With so many request queues.
    pub const fn new(queues: u16) -> Self {
        Self {
            num_queues: queues as u32,
            // What a queue of 128 descriptors takes with request and response.
            seg_max: 126,
            max_sectors: 0xffff,
            cmd_per_lun: 128,
            event_info_size: size_of::<Event>() as u32,
            sense_size: SENSE as u32,
            cdb_size: CDB as u32,
            max_channel: 0,
            max_target: TARGETS as u16 - 1,
            max_lun: 0x3fff,
        }
    }
}

/// Where the driver may write, and what it may write there: the lengths that are so already.
pub(crate) fn may_write(config: &Config, offset: u32, data: &[u8]) -> bool {
    let own = config.as_bytes();
    let start = offset as usize;
    let is_size = start >= 20 && start + data.len() <= 28;
    is_size && own.get(start..start + data.len()) == Some(data)
}

/// A unit, as requests address it (section 5.6.6.1): a 1, the target, and a LUN of a single level.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(transparent)]
pub(crate) struct Address([u8; 8]);

impl Address {
    /// Unit 0 of a target, as events have it.
    pub const fn of_target(target: u8) -> Self {
        Self([1, target, 0, 0, 0, 0, 0, 0])
    }

    /// The target, if there could be such; and the unit in it, if there could be such.
    pub fn target(self) -> Option<(u8, Option<u16>)> {
        let [first, target, ..] = self.0;
        let rest = u64::from_be_bytes(self.0) << 16;
        (first == 1 && target < TARGETS).then(|| (target, lun_number(rest.to_be_bytes())))
    }
}

/// What a command's request begins with; data follows.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C, packed)]
pub(crate) struct Command {
    pub address: Address,
    pub tag: u64,
    pub attribute: u8,
    pub priority: u8,
    pub reference: u8,
    pub cdb: [u8; CDB],
}

const _: () = assert!(size_of::<Command>() == 51);

/// What the device does with a request (section 5.6.6.1.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Response {
    Ok = 0,
    Overrun = 1,
    Aborted = 2,
    BadTarget = 3,
    Failure = 9,
    /// Of a query: there is such.
    Succeeded = 10,
    Rejected = 11,
    IncorrectLun = 12,
}

/// How a command ended (section 5.6.6.1): two words, for so it is copied. A copy of halves that were just stored apart
/// waits until those have left the processor, behind all that was stored for others before: there was a sixth of a
/// reactor's samples. Its sense, if there is some, and data follow.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C, packed(4))]
pub(crate) struct Verdict {
    /// Bytes of sense, and of data that were not moved.
    lengths: u64,
    /// A qualifier of 16 bits, the command's status, and the response.
    end: u32,
}

/// A command's answer where it has sense; data follows.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Answer {
    verdict: Verdict,
    sense: [u8; SENSE],
}

/// Bytes of an answer, with or without sense.
pub(crate) const ANSWER: u32 = size_of::<Answer>() as u32;
const _: () = assert!(ANSWER == 108);

impl Verdict {
    /// Of a request that reached no unit.
    #[inline]
    pub const fn without_status(response: Response, residual: u32) -> Self {
        Self::new(0, residual, 0, response)
    }

    #[inline]
    const fn new(sense_len: u32, residual: u32, status: u8, response: Response) -> Self {
        let lengths = sense_len as u64 | (residual as u64) << 32;
        Self { lengths: lengths.to_le(), end: u32::from_ne_bytes([0, 0, status, response as u8]) }
    }

    /// Of a command that went well, of whose data so much was not moved.
    #[inline]
    pub const fn good(residual: u32) -> Self {
        Self::without_status(Response::Ok, residual)
    }
}

impl Answer {
    /// Of a command that ended so, of `given` bytes of data.
    pub fn new(outcome: &Outcome, given: u32, descriptors: bool) -> Self {
        let response = match outcome {
            Outcome { overrun: Some(_), .. } => Response::Overrun,
            Outcome { aborted: true, .. } => Response::Aborted,
            _ => Response::Ok,
        };
        let (mut sense, mut sense_len) = ([0; SENSE], 0);
        if outcome.status == Status::CheckCondition {
            let (bytes, len) = if descriptors { outcome.sense.descriptors() } else { outcome.sense.fixed() };
            sense_len = len as u32;
            sense[..bytes.len()].copy_from_slice(&bytes);
        }
        let verdict = Verdict::new(sense_len, given - outcome.moved, outcome.status as u8, response);
        Self { verdict, sense }
    }
}

/// What requests of the control queue begin with (section 5.6.6.2).
pub(crate) mod control {
    /// A task management function.
    pub const TMF: u32 = 0;
    /// Which asynchronous notifications there are.
    pub const QUERY: u32 = 1;
    /// Which are wanted.
    pub const SUBSCRIBE: u32 = 2;
}

/// A task management function, behind its type.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C, packed)]
pub(crate) struct Tmf {
    pub function: u32,
    pub address: Address,
    pub tag: u64,
}

/// Functions (section 5.6.6.2).
pub(crate) mod tmf {
    pub const ABORT_TASK: u32 = 0;
    pub const ABORT_TASK_SET: u32 = 1;
    pub const CLEAR_TASK_SET: u32 = 3;
    pub const NEXUS_RESET: u32 = 4;
    pub const UNIT_RESET: u32 = 5;
    pub const QUERY_TASK: u32 = 6;
    pub const QUERY_TASK_SET: u32 = 7;
}

/// What a guest is told unasked (section 5.6.6.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Event {
    pub event: u32,
    pub address: Address,
    pub reason: u32,
}

const _: () = assert!(size_of::<Event>() == 16);

const TRANSPORT_RESET: u32 = 1;
const PARAM_CHANGE: u32 = 3;

impl Event {
    /// The feature without which nobody is told of it.
    pub const fn feature(&self) -> u64 {
        if self.event == PARAM_CHANGE { feature::CHANGE } else { feature::HOTPLUG }
    }

    /// Transport reset, rescan: there is a unit now.
    pub const fn plugged(target: u8) -> Self {
        Self { event: TRANSPORT_RESET, address: Address::of_target(target), reason: 1 }
    }

    /// Transport reset, removed.
    pub const fn unplugged(target: u8) -> Self {
        Self { event: TRANSPORT_RESET, address: Address::of_target(target), reason: 2 }
    }

    /// Parameters have changed: capacity data (ASC 2Ah, ASCQ 09h).
    pub const fn resized(target: u8) -> Self {
        Self { event: PARAM_CHANGE, address: Address::of_target(target), reason: 0x092a }
    }

    /// Parameters have changed: mode parameters (ASC 2Ah, ASCQ 01h).
    pub const fn changed(target: u8) -> Self {
        Self { event: PARAM_CHANGE, address: Address::of_target(target), reason: 0x012a }
    }
}
