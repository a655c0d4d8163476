//! The order of a front-end's messages. Runs on any one thread, which waits for the replies.
//!
//! ```text
//! open → config → set_features → share → start, for each queue → enable
//! ```

use crate::{Error, Memory, Request, Ring, Wire, payload};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Feature bits of all devices (virtio 1.2, section 6; vhost-user's own is 30).
pub mod feature {
    /// The back-end logs the pages that it writes.
    pub const LOG_ALL: u64 = 1 << 26;
    /// Chains may be in indirect tables.
    pub const INDIRECT: u64 = 1 << 28;
    /// Notifications are requested by index.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The back-end has protocol features.
    pub const PROTOCOL: u64 = 1 << 30;
    /// Virtio 1.
    pub const VERSION_1: u64 = 1 << 32;
    /// Packed rings.
    pub const PACKED: u64 = 1 << 34;
}

/// Protocol feature bits: "Protocol features".
pub mod protocol {
    /// The device has several queues.
    pub const MQ: u64 = 1 << 0;
    /// The dirty-page log is shared as a file.
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// The back-end acknowledges messages on request.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The front-end can read the configuration space.
    pub const CONFIG: u64 = 1 << 9;
    /// Requests in flight are recorded in a region that survives the back-end.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// Memory regions are added and removed one by one.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
}

/// VHOST_VRING_F_LOG: the back-end logs its writes to the ring.
const LOGGED: u32 = 1;

/// What the front-end requires of a back-end.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Feature bits that the session needs.
    pub features: u64,
    /// Feature bits that are negotiated if the back-end offers them.
    pub optional: u64,
    /// Protocol feature bits that the session needs.
    pub protocol: u64,
    /// Protocol feature bits that are negotiated if the back-end offers them.
    pub optional_protocol: u64,
    /// Number of queues.
    pub queues: u16,
    /// Timeout of each reply.
    pub patience: Duration,
}

/// A queue's parameters, for [`Session::start`].
#[derive(Debug)]
pub struct Announced<'a> {
    /// The queue's index.
    pub index: u16,
    /// Number of descriptors in its ring.
    pub size: u16,
    /// The queue's ring.
    pub ring: &'a Ring,
    /// The eventfd that notifies the device.
    pub kick: BorrowedFd<'a>,
    /// The eventfd that notifies the driver.
    pub call: BorrowedFd<'a>,
}

/// A session with a back-end.
#[derive(Debug)]
pub struct Session {
    wire: Wire,
    features: u64,
    protocol: u64,
}

impl Session {
    /// Connects to a back-end that listens at `path`.
    ///
    /// # Errors
    /// No process listens there, or the errors of [`Session::open`].
    pub fn connect(path: &Path, wanted: &Wanted) -> Result<Self, Error> {
        let refused = |source| Error::Connect { path: path.to_owned(), source };
        Self::open(UnixStream::connect(path).map_err(refused)?, wanted)
    }

    /// Negotiates features on a connection.
    ///
    /// # Errors
    /// The connection broke, or the back-end lacks a required feature.
    pub fn open(stream: UnixStream, wanted: &Wanted) -> Result<Self, Error> {
        let mut wire = Wire::new(stream, wanted.patience)?;
        let offered = wire.ask_u64(Request::GET_FEATURES)?;
        let missing = wanted.features & !offered;
        if missing != 0 {
            return Err(Error::Lacks(format!("features {missing:#x} (it offers {offered:#x})")));
        }
        let features = offered & (wanted.features | wanted.optional | feature::PROTOCOL);
        let has_protocol = features & feature::PROTOCOL != 0;
        let offered = if has_protocol { wire.ask_u64(Request::GET_PROTOCOL_FEATURES)? } else { 0 };
        let missing = wanted.protocol & !offered;
        if missing != 0 {
            return Err(Error::Lacks(format!("protocol features {missing:#x} (it offers {offered:#x})")));
        }
        let protocol = offered & (wanted.protocol | wanted.optional_protocol);
        if has_protocol {
            wire.send(Request::SET_PROTOCOL_FEATURES, &payload![protocol], &[])?;
        }
        wire.acknowledged = protocol & protocol::REPLY_ACK != 0;
        let most = if protocol & protocol::MQ == 0 { 1 } else { wire.ask_u64(Request::GET_QUEUE_NUM)? };
        if most < wanted.queues.into() {
            return Err(Error::Lacks(format!("{} queues (it offers {most})", wanted.queues)));
        }
        wire.send(Request::SET_OWNER, &[], &[])?;
        Ok(Self { wire, features, protocol })
    }

    /// The negotiated feature bits.
    #[must_use]
    pub const fn features(&self) -> u64 {
        self.features
    }

    /// The connection, for messages that this type does not send, and for waiting until the peer closes it.
    #[must_use]
    pub const fn wire(&self) -> &Wire {
        &self.wire
    }

    /// Reads the first `len` bytes of the device's configuration space.
    ///
    /// # Errors
    /// The connection broke, or the reply is invalid.
    pub fn config(&self, len: usize) -> Result<Vec<u8>, Error> {
        let request = [payload![0_u32, len as u32, 0_u32], vec![0; len]].concat();
        let (mut reply, _) = self.wire.ask(Request::GET_CONFIG, &request)?;
        if reply.len() != request.len() {
            let what = format!("{} bytes instead of {}", reply.len(), request.len());
            return Err(Error::Reply { request: Request::GET_CONFIG, what });
        }
        Ok(reply.split_off(12))
    }

    /// Sends the negotiated features (SET_FEATURES).
    ///
    /// # Errors
    /// The connection broke, or the back-end refuses.
    pub fn set_features(&self) -> Result<(), Error> {
        self.wire.send(Request::SET_FEATURES, &payload![self.features], &[])
    }

    /// Sends the memory table.
    ///
    /// # Errors
    /// The connection broke, or the back-end refuses.
    pub fn share(&self, memory: &Memory) -> Result<(), Error> {
        let [guest, len, user, offset] = memory.region();
        let region = payload![guest, len, user, offset];
        if self.protocol & protocol::CONFIGURE_MEM_SLOTS != 0 {
            let message = [payload![0_u64], region].concat();
            self.wire.send(Request::ADD_MEM_REG, &message, &[memory.fd()])
        } else {
            let message = [payload![1_u32, 0_u32], region].concat();
            self.wire.send(Request::SET_MEM_TABLE, &message, &[memory.fd()])
        }
    }

    /// Sends a queue's ring, index, call and kick; the kick starts the queue.
    ///
    /// # Errors
    /// The connection broke, or the back-end refuses.
    pub fn start(&self, queue: &Announced<'_>) -> Result<(), Error> {
        let index = u32::from(queue.index);
        let wire = &self.wire;
        wire.send(Request::SET_VRING_NUM, &payload![index, u32::from(queue.size)], &[])?;
        wire.send(Request::SET_VRING_BASE, &payload![index, queue.ring.base()], &[])?;
        self.locate(queue, 0)?;
        wire.send(Request::SET_VRING_KICK, &payload![u64::from(index)], &[queue.kick])?;
        wire.send(Request::SET_VRING_CALL, &payload![u64::from(index)], &[queue.call])
    }

    fn locate(&self, queue: &Announced<'_>, flags: u32) -> Result<(), Error> {
        let parts = queue.ring.parts();
        let [desc, used, avail] = [parts.desc, parts.device, parts.driver].map(Memory::user_addr);
        let (index, noted) = (u32::from(queue.index), Memory::guest_addr(parts.device));
        self.wire.send(Request::SET_VRING_ADDR, &payload![index, flags, desc, used, avail, noted], &[])
    }

    /// Starts dirty-page logging: from now on the back-end marks the pages that it writes in `file`, of `len` bytes
    /// with one bit per page, for the memory and for the rings of `queues`, which must be started. Needs LOG_SHMFD.
    ///
    /// # Errors
    /// The connection broke, or the back-end refuses.
    pub fn log(&self, file: BorrowedFd<'_>, len: u64, queues: &[Announced<'_>]) -> Result<(), Error> {
        self.wire.ask_with(Request::SET_LOG_BASE, &payload![len, 0_u64], &[file])?;
        self.wire.send(Request::SET_FEATURES, &payload![self.features | feature::LOG_ALL], &[])?;
        queues.iter().try_for_each(|queue| self.locate(queue, LOGGED))
    }

    /// Enables the first `queues` queues, which must be started.
    ///
    /// # Errors
    /// The connection broke, or the back-end refuses.
    pub fn enable(&self, queues: u16) -> Result<(), Error> {
        // Without protocol features, queues are enabled from the start.
        if self.features & feature::PROTOCOL == 0 {
            return Ok(());
        }
        (0..u32::from(queues))
            .try_for_each(|index| self.wire.send(Request::SET_VRING_ENABLE, &payload![index, 1_u32], &[]))
    }

    /// Stops a queue (GET_VRING_BASE) and returns the base that the back-end reports.
    ///
    /// # Errors
    /// The connection broke, or the reply is invalid.
    pub fn stop(&self, queue: u16) -> Result<u32, Error> {
        let request = Request::GET_VRING_BASE;
        let (reply, _) = self.wire.ask(request, &payload![u32::from(queue), 0_u32])?;
        let bytes = reply.get(4..8).and_then(|bytes| bytes.try_into().ok());
        let wrong = || Error::Reply { request, what: format!("{} bytes", reply.len()) };
        Ok(u32::from_ne_bytes(bytes.ok_or_else(wrong)?))
    }
}
