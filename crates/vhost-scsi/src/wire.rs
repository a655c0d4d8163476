//! The wire format of virtio-scsi (virtio 1.2, section 5.6). Any context; pure.

use aryk_scsi::{Outcome, Status, lun_number};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Feature bits (section 5.6.3).
pub(crate) mod feature {
    /// Hot plug and hot unplug events.
    pub const HOTPLUG: u64 = 1 << 1;
    /// Events for changed parameters of a unit.
    pub const CHANGE: u64 = 1 << 2;
}

/// The number of targets of a controller.
pub const TARGETS: u8 = 8;
/// The size of a CDB in each request, in bytes.
const CDB: usize = 32;
/// The size of the sense data in each response, in bytes.
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
    /// The configuration of a controller with this number of request queues.
    pub const fn new(queues: u16) -> Self {
        Self {
            num_queues: queues as u32,
            // The data segments that fit into a queue of 128 descriptors beside request and response.
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

/// Whether the driver may write this data to the configuration space: only to the two length fields, and only the values that
/// they have.
pub(crate) fn may_write(config: &Config, offset: u32, data: &[u8]) -> bool {
    let own = config.as_bytes();
    let start = offset as usize;
    let is_size = start >= 20 && start + data.len() <= 28;
    is_size && own.get(start..start + data.len()) == Some(data)
}

/// The address of a unit in a request (section 5.6.6.1): a 1, the target, and a single-level LUN.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(transparent)]
pub(crate) struct Address([u8; 8]);

impl Address {
    /// Unit 0 of a target, in the format of events.
    pub const fn of_target(target: u8) -> Self {
        Self([1, target, 0, 0, 0, 0, 0, 0])
    }

    /// The target, if its number is valid, and the unit in it, if its number is valid.
    #[inline]
    pub fn target(self) -> Option<(u8, Option<u16>)> {
        let [first, target, ..] = self.0;
        let rest = u64::from_be_bytes(self.0) << 16;
        (first == 1 && target < TARGETS).then(|| (target, lun_number(rest.to_be_bytes())))
    }
}

/// The start of a command's request; data follows.
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

/// The response code of a request (section 5.6.6.1.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Response {
    Ok = 0,
    Overrun = 1,
    Aborted = 2,
    BadTarget = 3,
    Failure = 9,
    /// The answer of a query: the command exists.
    Succeeded = 10,
    Rejected = 11,
    IncorrectLun = 12,
}

/// The result of a command (section 5.6.6.1), in two words, because it is copied in two words. If its halves were stored
/// separately just before the copy, the copy would wait until those stores have left the store buffer, behind all earlier
/// stores: a sixth of a reactor's profile samples was there. Sense data, if any, and data follow.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C, packed(4))]
pub(crate) struct AnswerHead {
    /// The lengths of the sense data and of the data that was not transferred, in bytes.
    lengths: u64,
    /// A qualifier of 16 bits, the command's status, and the response.
    end: u32,
}

/// The answer of a command that has sense data; data follows.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Answer {
    head: AnswerHead,
    sense: [u8; SENSE],
}

/// The size of an answer in bytes, with or without sense data.
pub(crate) const ANSWER: u32 = size_of::<Answer>() as u32;
const _: () = assert!(ANSWER == 108);

impl AnswerHead {
    /// For a request that reached no unit.
    #[inline]
    pub const fn without_status(response: Response, residual: u32) -> Self {
        Self::new(0, residual, 0, response)
    }

    #[inline]
    const fn new(sense_len: u32, residual: u32, status: u8, response: Response) -> Self {
        let lengths = sense_len as u64 | (residual as u64) << 32;
        Self { lengths: lengths.to_le(), end: u32::from_ne_bytes([0, 0, status, response as u8]) }
    }

    /// For a command that succeeded; `residual` bytes of its data were not transferred.
    #[inline]
    pub const fn good(residual: u32) -> Self {
        Self::without_status(Response::Ok, residual)
    }
}

impl Answer {
    /// For a command that ended with `outcome`; the guest provided `given` bytes of data.
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
        let head = AnswerHead::new(sense_len, given - outcome.moved, outcome.status as u8, response);
        Self { head, sense }
    }
}

/// Types of requests of the control queue (section 5.6.6.2).
pub(crate) mod control {
    /// A task management function.
    pub const TMF: u32 = 0;
    /// Query of the available asynchronous notifications.
    pub const QUERY: u32 = 1;
    /// Subscription to asynchronous notifications.
    pub const SUBSCRIBE: u32 = 2;
}

/// A task management function, after the type field.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C, packed)]
pub(crate) struct Tmf {
    pub function: u32,
    pub address: Address,
    pub tag: u64,
}

/// Task management functions (section 5.6.6.2).
pub(crate) mod tmf {
    pub const ABORT_TASK: u32 = 0;
    pub const ABORT_TASK_SET: u32 = 1;
    pub const CLEAR_TASK_SET: u32 = 3;
    pub const NEXUS_RESET: u32 = 4;
    pub const UNIT_RESET: u32 = 5;
    pub const QUERY_TASK: u32 = 6;
    pub const QUERY_TASK_SET: u32 = 7;
}

/// An event for the guest (section 5.6.6.3).
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
    /// The feature that the guest must acknowledge to receive this event.
    pub const fn feature(&self) -> u64 {
        if self.event == PARAM_CHANGE { feature::CHANGE } else { feature::HOTPLUG }
    }

    /// Transport reset, rescan: the target has a unit now.
    pub const fn plugged(target: u8) -> Self {
        Self { event: TRANSPORT_RESET, address: Address::of_target(target), reason: 1 }
    }

    /// Transport reset, removed: the target has no unit now.
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
