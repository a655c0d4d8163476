//! The order in which a front-end says what there is to say. Any one thread, which waits for the answers.
//!
//! ```text
//! open → config → settle → share → start, for each queue → enable
//! ```

use crate::{Error, Memory, Request, Ring, Wire, payload};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Feature bits of all devices (virtio 1.2, section 6; vhost-user's own is 30).
pub mod feature {
    /// What is written to the memory is noted.
    pub const LOG_ALL: u64 = 1 << 26;
    /// Chains may be in tables of their own.
    pub const INDIRECT: u64 = 1 << 28;
    /// Notifications are asked for by index.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// There are protocol features.
    pub const PROTOCOL: u64 = 1 << 30;
    /// Virtio 1.
    pub const VERSION_1: u64 = 1 << 32;
    /// Packed rings.
    pub const PACKED: u64 = 1 << 34;
}

/// Protocol feature bits: "Protocol features".
pub mod protocol {
    /// Several queues.
    pub const MQ: u64 = 1 << 0;
    /// A log of what is written is shared as a file.
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// Messages are acknowledged.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The configuration space can be read.
    pub const CONFIG: u64 = 1 << 9;
    /// What is in flight survives the back-end.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// Memory is announced region by region.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
}

/// VHOST_VRING_F_LOG: writes to the ring are noted.
const LOGGED: u32 = 1;

/// What is asked of a back-end.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Features without which there is no session.
    pub features: u64,
    /// Features that are taken where they are offered.
    pub optional: u64,
    /// Protocol features without which there is no session.
    pub protocol: u64,
    /// Protocol features that are taken where they are offered.
    pub optional_protocol: u64,
    /// Queues.
    pub queues: u16,
    /// How long an answer may take.
    pub patience: Duration,
}

/// A queue as a session announces it.
#[derive(Debug)]
pub struct Announced<'a> {
    /// Its index.
    pub index: u16,
    /// Descriptors in its ring.
    pub size: u16,
    /// Its ring.
    pub ring: &'a Ring,
    /// For the device.
    pub kick: BorrowedFd<'a>,
    /// For the driver.
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
    /// Nobody does, or as [`Session::open`].
    pub fn connect(path: &Path, wanted: &Wanted) -> Result<Self, Error> {
        let refused = |source| Error::Connect { path: path.to_owned(), source };
        Self::open(UnixStream::connect(path).map_err(refused)?, wanted)
    }

    /// Agrees on features.
    ///
    /// # Errors
    /// The back-end is gone, or does not offer what is needed.
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
            wire.tell(Request::SET_PROTOCOL_FEATURES, &payload![protocol], &[])?;
        }
        wire.acknowledged = protocol & protocol::REPLY_ACK != 0;
        let most = if protocol & protocol::MQ == 0 { 1 } else { wire.ask_u64(Request::GET_QUEUE_NUM)? };
        if most < wanted.queues.into() {
            return Err(Error::Lacks(format!("{} queues, but {most}", wanted.queues)));
        }
        wire.tell(Request::SET_OWNER, &[], &[])?;
        Ok(Self { wire, features, protocol })
    }

    /// The features that both sides have.
    #[must_use]
    pub const fn features(&self) -> u64 {
        self.features
    }

    /// For messages that this type does not know, and for waiting until the peer hangs up.
    #[must_use]
    pub const fn wire(&self) -> &Wire {
        &self.wire
    }

    /// The first `len` bytes of the device's configuration space.
    ///
    /// # Errors
    /// The back-end is gone, or gives something else.
    pub fn config(&self, len: usize) -> Result<Vec<u8>, Error> {
        let request = [payload![0_u32, len as u32, 0_u32], vec![0; len]].concat();
        let (mut reply, _) = self.wire.ask(Request::GET_CONFIG, &request)?;
        if reply.len() != request.len() {
            let what = format!("{} bytes where {} were asked for", reply.len(), request.len());
            return Err(Error::Reply { request: Request::GET_CONFIG, what });
        }
        Ok(reply.split_off(12))
    }

    /// Settles the features.
    ///
    /// # Errors
    /// The back-end is gone, or refuses.
    pub fn settle(&self) -> Result<(), Error> {
        self.wire.tell(Request::SET_FEATURES, &payload![self.features], &[])
    }

    /// Announces the memory.
    ///
    /// # Errors
    /// The back-end is gone, or refuses.
    pub fn share(&self, memory: &Memory) -> Result<(), Error> {
        let [guest, len, user, offset] = memory.region();
        let region = payload![guest, len, user, offset];
        if self.protocol & protocol::CONFIGURE_MEM_SLOTS != 0 {
            let message = [payload![0_u64], region].concat();
            self.wire.tell(Request::ADD_MEM_REG, &message, &[memory.fd()])
        } else {
            let message = [payload![1_u32, 0_u32], region].concat();
            self.wire.tell(Request::SET_MEM_TABLE, &message, &[memory.fd()])
        }
    }

    /// Hands over a queue.
    ///
    /// # Errors
    /// The back-end is gone, or refuses.
    pub fn start(&self, queue: &Announced<'_>) -> Result<(), Error> {
        let index = u32::from(queue.index);
        let wire = &self.wire;
        wire.tell(Request::SET_VRING_NUM, &payload![index, u32::from(queue.size)], &[])?;
        wire.tell(Request::SET_VRING_BASE, &payload![index, queue.ring.base()], &[])?;
        self.locate(queue, 0)?;
        wire.tell(Request::SET_VRING_KICK, &payload![u64::from(index)], &[queue.kick])?;
        wire.tell(Request::SET_VRING_CALL, &payload![u64::from(index)], &[queue.call])
    }

    fn locate(&self, queue: &Announced<'_>, flags: u32) -> Result<(), Error> {
        let parts = queue.ring.parts();
        let [desc, used, avail] = [parts.desc, parts.device, parts.driver].map(Memory::user_addr);
        let (index, noted) = (u32::from(queue.index), Memory::guest_addr(parts.device));
        self.wire.tell(Request::SET_VRING_ADDR, &payload![index, flags, desc, used, avail, noted], &[])
    }

    /// Has it noted from now on, in a file of `len` bytes with a bit for each page, what is written to the memory and to these queues' rings. They run;
    /// LOG_SHMFD is negotiated.
    ///
    /// # Errors
    /// The back-end is gone, or refuses.
    pub fn log(&self, file: BorrowedFd<'_>, len: u64, queues: &[Announced<'_>]) -> Result<(), Error> {
        self.wire.ask_with(Request::SET_LOG_BASE, &payload![len, 0_u64], &[file])?;
        self.wire.tell(Request::SET_FEATURES, &payload![self.features | feature::LOG_ALL], &[])?;
        queues.iter().try_for_each(|queue| self.locate(queue, LOGGED))
    }

    /// Lets queues run that were handed over.
    ///
    /// # Errors
    /// The back-end is gone, or refuses.
    pub fn enable(&self, queues: u16) -> Result<(), Error> {
        // Without protocol features, they run from the start.
        if self.features & feature::PROTOCOL == 0 {
            return Ok(());
        }
        (0..u32::from(queues))
            .try_for_each(|index| self.wire.tell(Request::SET_VRING_ENABLE, &payload![index, 1_u32], &[]))
    }

    /// Takes a queue back; what the back-end says of where it is.
    ///
    /// # Errors
    /// The back-end is gone, or answers nonsense.
    pub fn stop(&self, queue: u16) -> Result<u32, Error> {
        let request = Request::GET_VRING_BASE;
        let (reply, _) = self.wire.ask(request, &payload![u32::from(queue), 0_u32])?;
        let bytes = reply.get(4..8).and_then(|bytes| bytes.try_into().ok());
        let wrong = || Error::Reply { request, what: format!("{} bytes", reply.len()) };
        Ok(u32::from_ne_bytes(bytes.ok_or_else(wrong)?))
    }
}
