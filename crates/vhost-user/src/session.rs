//! One front-end's session: translates its requests, in order, into calls of the device. Control context.
//!
//! The session stores what a front-end has announced (features, memory, each queue's [`Vring`]) and keeps the device up to
//! date: a queue runs in the device when its front-end has started and enabled it and has sent its complete setup. So messages
//! may come in any order, and may be repeated while queues run.
//!
//! **Invariants.** A failed request changes nothing, or leaves queues stopped. However a session ends, all its queues are
//! stopped before the device is notified. A session never waits for other sessions, and they never wait for it: after each
//! message the other sessions can run.

use crate::connection::Connection;
use crate::device::{Device, Event, SessionHandle};
use crate::error::SHARE;
use crate::inflight::Inflight;
use crate::memory::{GuestMemory, SLOTS_MAX};
use crate::message::{self, CONFIG_MAX, Code, Message, Request};
use crate::sharing::Sharing;
use crate::vring::{Kick, Vring, is_packed};
use crate::{Error, Stats};
use aryk_dma::DirtyLog;
use aryk_log_limit::limited;
use rustix::net::SendFlags;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;

mod queues;
mod starts;

pub(crate) use starts::Started;
use starts::Starts;

/// VHOST_USER_F_PROTOCOL_FEATURES: the bit that announces protocol features; the session hides it from drivers.
pub(crate) const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// VIRTIO_RING_F_INDIRECT_DESC.
pub const F_INDIRECT_DESC: u64 = 1 << 28;
/// VIRTIO_RING_F_EVENT_IDX.
pub const F_EVENT_IDX: u64 = 1 << 29;
/// VIRTIO_F_VERSION_1.
pub const F_VERSION_1: u64 = 1 << 32;

/// VHOST_F_LOG_ALL: writes to guest memory are logged. The bit is hidden from drivers.
const F_LOG_ALL: u64 = 1 << 26;
/// VIRTIO_F_RING_PACKED.
pub const F_RING_PACKED: u64 = 1 << 34;

/// Ring features, offered for every device.
const TRANSPORT_FEATURES: u64 = F_VERSION_1 | F_INDIRECT_DESC | F_EVENT_IDX | F_PROTOCOL_FEATURES;

/// "Protocol features", of the specification.
pub(crate) mod protocol {
    pub(crate) const MQ: u64 = 1 << 0;
    pub(crate) const LOG_SHMFD: u64 = 1 << 1;
    pub(crate) const REPLY_ACK: u64 = 1 << 3;
    pub(crate) const BACKEND_REQ: u64 = 1 << 5;
    pub(crate) const CONFIG: u64 = 1 << 9;
    pub(crate) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub(crate) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(crate) const RESET_DEVICE: u64 = 1 << 13;
    pub(crate) const STATUS: u64 = 1 << 16;
    /// Offered for every device.
    pub(crate) const ALWAYS: u64 =
        MQ | REPLY_ACK | BACKEND_REQ | CONFIG | CONFIGURE_MEM_SLOTS | RESET_DEVICE | STATUS;
}

/// How long the memory of a session may be in use after its queues have stopped: requests that their disks still have then use
/// other memory.
const ENDED_GRACE: Duration = Duration::from_millis(200);

/// The protocol feature that a request requires.
fn needed_feature(request: &Request) -> u64 {
    match request {
        Request::SetLogBase(_) | Request::SetLogFd => protocol::LOG_SHMFD,
        Request::GetInflightFd { .. } | Request::SetInflightFd(_) => protocol::INFLIGHT_SHMFD,
        Request::ResetDevice => protocol::RESET_DEVICE,
        Request::SetStatus(_) | Request::GetStatus => protocol::STATUS,
        _ => 0,
    }
}

/// A reply, and the file descriptor that is sent with it.
struct Reply(Vec<u8>, Option<OwnedFd>);

impl From<Vec<u8>> for Reply {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes, None)
    }
}

/// The reason for which a session ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The front-end hung up between two messages, or while a request was handled.
    FrontEndLeft,
    /// [`crate::Server::stop`] was called.
    Stopped,
}

/// Serves one front-end until it disconnects, fails, or must be stopped; then `device` is ready for the next.
///
/// `session` must be new; `device` uses it to reach this front-end.
///
/// # Errors
/// The error that ended the session. It has been logged and counted.
///
/// # Panics
/// If the device has no queues, or more than 256, or a configuration space that is too long.
pub async fn serve_front_end<D: Device>(
    stream: UnixStream,
    device: &D,
    session: SessionHandle,
    stats: &Stats,
) -> Result<End, Error> {
    let queues = device.num_queues();
    assert!((1..=256).contains(&queues), "{queues} queues");
    let vrings = std::iter::repeat_with(Vring::default).take(queues.into()).collect();
    let starts = Rc::new(Starts::default());
    let mut front_end = Session {
        device,
        starts: Rc::clone(&starts),
        handle: session.clone(),
        stats,
        sharing: Sharing::of(&stream),
        connection: Connection::new(stream),
        left: false,
        features: None,
        protocol: 0,
        memory: GuestMemory::new(stats.peer.clone()),
        vrings,
        inflight: None,
        log: None,
        status: 0,
        backend_channel: None,
    };
    stats.began(front_end.sharing.pid());
    limited!(stats.lines.sessions, info, "front-end connected");
    device.connected(session.clone());
    let end = starts.beside(front_end.run()).await;
    starts.beside(front_end.finish()).await;
    device.disconnected();
    stats.ended(end.as_ref().err());
    match &end {
        Ok(End::FrontEndLeft) => limited!(stats.lines.sessions, info, "front-end disconnected"),
        Ok(End::Stopped) => tracing::info!("the back-end has disconnected the front-end"),
        Err(error) => {
            limited!(stats.lines.faults, warn, "the back-end has disconnected the front-end: {error}")
        }
    }
    end
}

struct Session<'d, D> {
    device: &'d D,
    starts: Rc<Starts<'d>>,
    handle: SessionHandle,
    stats: &'d Stats,
    connection: Connection,
    /// Whether the front-end has hung up, so that no call needs to watch for it.
    left: bool,
    sharing: Sharing,
    /// Features acknowledged by SET_FEATURES, unmodified. No queue runs before that.
    features: Option<u64>,
    /// Protocol features acknowledged.
    protocol: u64,
    memory: GuestMemory,
    vrings: Vec<Vring>,
    inflight: Option<Inflight>,
    /// The log for writes while F_LOG_ALL is set.
    log: Option<Arc<DirtyLog>>,
    /// The virtio device status (virtio 1.2, section 2.1), as the front-end has set it.
    status: u8,
    /// The channel for the back-end's own requests.
    backend_channel: Option<OwnedFd>,
}

impl<D: Device> Session<'_, D> {
    async fn run(&mut self) -> Result<End, Error> {
        loop {
            let (message, mut fds) = tokio::select! {
                biased;
                event = self.handle.event() => match event {
                    Event::Failed(reason) => return Err(Error::Ended(reason)),
                    Event::Stop => return Ok(End::Stopped),
                    Event::ConfigChanged => { self.notify_config_change(); continue }
                },
                next = self.connection.next() => match next? {
                    Some(next) => next,
                    None => return Ok(End::FrontEndLeft),
                },
                (index, started) = queues::next_started(&mut self.vrings) => {
                    self.has_started(index, started).await?;
                    continue;
                }
                () = self.sharing.found_private() => {
                    limited!(
                        self.stats.lines.faults,
                        warn,
                        "the front-end has mapped its memory file privately, so that the guest's writes do not reach the back-end; {SHARE}"
                    );
                    self.stats.memory_private();
                    continue;
                }
            };
            self.stats.message();
            tracing::trace!(?message, fds = fds.len(), "request");
            let (code, need_reply) = (message.code, message.need_reply);
            let handled = self.handle(message, &mut fds).await;
            self.connection.close_memory(fds);
            let reply = match handled {
                Ok(Some(reply)) => Some(reply),
                Ok(None) if self.acks(need_reply) => Some(message::reply_u64(code, 0).into()),
                Ok(None) => None,
                // The device has failed because the session must end; the next turn of the loop reads the reason.
                Err(_) if self.handle.is_ending() => continue,
                Err(error) if self.acks(need_reply) && !has_reply(code) => {
                    limited!(self.stats.lines.faults, warn, "request refused: {error}");
                    self.stats.refused(&error);
                    Some(message::reply_u64(code, 1).into())
                }
                Err(error) => return Err(error),
            };
            if let Some(Reply(bytes, fd)) = reply
                && !self.connection.send(&bytes, fd.as_ref().map(AsFd::as_fd)).await?
            {
                return Ok(End::FrontEndLeft);
            }
            tokio::task::yield_now().await;
        }
    }

    /// Waits for the device. Logs if the front-end hangs up before the device has finished.
    async fn wait<T>(&self, what: &str, work: impl Future<Output = T>) -> T {
        if self.left {
            return work.await;
        }
        let left = || self.handle.front_end_left();
        self.connection.wait_watching((what, &self.stats.lines.sessions), left, work).await
    }

    /// Waits until memory that the front-end has released is unmapped, if its limit requires that. A device may keep the memory
    /// forever, so the wait ends with the session.
    pub(super) async fn await_room(&self, sizes: impl Iterator<Item = u64>) -> Result<(), Error> {
        tokio::select! {
            biased;
            () = self.memory.room_for(sizes) => Ok(()),
            () = self.ending() => Err(Error::Ended("removed memory is not unmapped yet".to_owned())),
        }
    }

    /// Waits until the session must end, or the front-end has hung up.
    async fn ending(&self) {
        tokio::select! {
            () = self.handle.ending() => {}
            () = self.connection.hung_up() => self.handle.front_end_left(),
        }
    }

    /// "VHOST_USER_PROTOCOL_F_REPLY_ACK".
    fn acks(&self, need_reply: bool) -> bool {
        need_reply && self.protocol & protocol::REPLY_ACK != 0
    }

    /// Stops all queues, releases the memory, and hangs up.
    async fn finish(mut self) {
        self.left = true;
        self.handle.front_end_left();
        self.halt_all().await;
        let revoke = async || self.device.revoke_memory().await;
        self.memory.clear().retire(ENDED_GRACE, revoke).await;
        self.connection.close(self.backend_channel).await;
    }

    /// Carries out a request. Returns the reply of a request that always has one.
    async fn handle(&mut self, message: Message, fds: &mut Vec<OwnedFd>) -> Result<Option<Reply>, Error> {
        let code = message.code;
        if needed_feature(&message.request) & !self.protocol != 0 {
            return Err(Error::NotNegotiated(code));
        }
        let value = match message.request {
            Request::GetFeatures => self.offered(),
            Request::GetProtocolFeatures => self.offered_protocol(),
            Request::GetQueueNum => self.vrings.len() as u64,
            Request::GetMaxMemSlots => SLOTS_MAX as u64,
            Request::GetStatus => self.status.into(),
            Request::GetConfig { offset, size, flags } => {
                return Ok(Some(message::reply_config(offset, flags, &self.config(offset, size)).into()));
            }
            Request::GetVringBase(state) => return Ok(Some(self.get_vring_base(code, state).await?.into())),
            Request::SetLogBase(desc) => {
                self.set_log(code, desc, &fds[0]).await?;
                return Ok(Some(message::reply_log(&desc).into()));
            }
            Request::GetInflightFd { desc, padded } => {
                let packed = (self.is_packed(), self.device.packed());
                let (fd, desc) = Inflight::create(code, &desc, packed, self.vrings.len())?;
                return Ok(Some(Reply(message::reply_inflight(&desc, padded), Some(fd))));
            }
            other => {
                self.apply(code, other, fds).await?;
                return Ok(None);
            }
        };
        Ok(Some(message::reply_u64(code, value).into()))
    }

    /// Carries out a request that has no specific reply.
    async fn apply(&mut self, code: Code, request: Request, fds: &mut Vec<OwnedFd>) -> Result<(), Error> {
        match request {
            Request::SetFeatures(bits) => self.set_features(code, bits).await,
            Request::SetProtocolFeatures(bits) => {
                self.protocol = check_offered(code, bits, self.offered_protocol())?;
                Ok(())
            }
            Request::SetConfig { offset, data } => {
                let written = self.device.set_config(offset, &data);
                written.map_err(|source| Error::Device { code, source })
            }
            Request::SetMemTable(regions) => {
                self.await_room(regions.iter().map(|region| region.size)).await?;
                let removed = self.memory.set(&regions, fds)?;
                self.memory_changed(code, removed).await
            }
            Request::AddMemReg(region) => {
                self.await_room([region.size].into_iter()).await?;
                let removed = self.memory.add(region, &fds[0])?;
                self.memory_changed(code, removed).await
            }
            Request::RemMemReg(region) => {
                let removed = self.memory.remove(&region)?;
                self.memory_changed(code, removed).await
            }
            Request::SetBackendReqFd => match std::mem::replace(&mut self.backend_channel, fds.pop()) {
                Some(old) => self.connection.close_later(old),
                None => Ok(()),
            },
            Request::ResetOwner => {
                // Deprecated; the specification permits the back-end to disable all rings.
                for index in 0..self.vrings.len() {
                    self.halt(index).await;
                    self.vrings[index].kick = Kick::Stopped;
                }
                Ok(())
            }
            Request::SetInflightFd(desc) => {
                self.await_room([desc.size].into_iter()).await?;
                let (packed, queues) = (self.is_packed(), self.vrings.len());
                let given = (self.memory.peer(), &fds[0]);
                self.set_inflight(code, Inflight::map(code, desc, packed, queues, given)?).await
            }
            Request::ResetDevice => {
                self.reset().await;
                Ok(())
            }
            Request::SetStatus(status) => {
                let what = "a device status of more than 8 bits";
                self.status = u8::try_from(status).map_err(|_| Error::BadPayload { code, what })?;
                if status == 0 {
                    self.reset().await;
                }
                Ok(())
            }
            // SET_OWNER starts a session, which has already started with the connection. SET_LOG_FD passes an eventfd that
            // signals new marks to the front-end; no front-end is known to use it.
            Request::SetOwner
            | Request::SetLogFd
            | Request::SetLogBase(_)
            | Request::GetStatus
            | Request::GetInflightFd { .. }
            | Request::GetFeatures
            | Request::GetProtocolFeatures
            | Request::GetQueueNum
            | Request::GetMaxMemSlots
            | Request::GetConfig { .. }
            | Request::GetVringBase(_) => Ok(()),
            vring => self.set_vring(code, vring, fds.pop().map(Arc::new)).await,
        }
    }

    fn offered(&self) -> u64 {
        let packed = if self.device.packed() { F_RING_PACKED } else { 0 };
        let log = if self.device.logs_writes() { F_LOG_ALL } else { 0 };
        self.device.features() | TRANSPORT_FEATURES | packed | log
    }

    fn offered_protocol(&self) -> u64 {
        let inflight = if self.device.tracks_inflight() { protocol::INFLIGHT_SHMFD } else { 0 };
        let log = if self.device.logs_writes() { protocol::LOG_SHMFD } else { 0 };
        protocol::ALWAYS | inflight | log
    }

    /// Whether rings are packed. They count as split until the features are known.
    fn is_packed(&self) -> bool {
        self.features.is_some_and(is_packed)
    }

    async fn set_features(&mut self, code: Code, bits: u64) -> Result<(), Error> {
        let bits = check_offered(code, bits, self.offered())?;
        let before = self.features.replace(bits);
        for index in 0..self.vrings.len() {
            // A migration starts and ends while queues run.
            let logging_only = before.is_some_and(|before| (before ^ bits) & !F_LOG_ALL == 0);
            if !logging_only {
                self.halt(index).await;
            }
            if before.is_some_and(|before| is_packed(before) != is_packed(bits)) {
                // The base is a position in a ring of the other format.
                self.vrings[index].base = None;
                self.vrings[index].stopped_at = None;
            }
            self.settle(code, index).await?;
            self.update_log(index).await;
        }
        Ok(())
    }

    /// `size` bytes of the configuration space from `offset`. Fields that the front-end expects but the device does not have
    /// are zero.
    fn config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut config = self.device.config();
        assert!(config.len() <= CONFIG_MAX, "a configuration space of {} bytes", config.len());
        config.resize(CONFIG_MAX, 0);
        config[offset as usize..][..size as usize].to_vec()
    }

    /// "VHOST_USER_BACKEND_CONFIG_CHANGE_MSG".
    fn notify_config_change(&mut self) {
        if self.protocol & protocol::CONFIG == 0 {
            return;
        }
        let Some(channel) = &self.backend_channel else { return };
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match rustix::net::send(channel, &message::config_change(), flags) {
            // A full channel already contains this message: the front-end will notice the change when it reads one.
            Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
            Err(error) => {
                tracing::warn!("cannot notify the front-end of the changed configuration: {error}");
                let channel = self.backend_channel.take().expect("checked above");
                // The front-end's channels are counted, so this keeps a limited number of descriptors.
                let _ = self.connection.close_later(channel);
            }
        }
    }
}

fn check_offered(code: Code, bits: u64, offered: u64) -> Result<u64, Error> {
    match bits & !offered {
        0 => Ok(bits),
        bits => Err(Error::UnknownFeatures { code, bits }),
    }
}

/// Whether a request always has a reply, which has no field for a failure.
fn has_reply(code: Code) -> bool {
    message::ALWAYS_ANSWERED.contains(&code)
}
