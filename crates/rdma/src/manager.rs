//! The thread that manages connections, as others see it. Any context: what takes time is awaited.

mod thread;

use crate::domain::FreedDomain;
use crate::shared::SharedParts;
use crate::verbs::{CmId, CompChannel, Cq, Mr, Qp};
use crate::{CallError, Domain, Endpoint, Library, LoadError, SharedReceives};
use aryk_dma::{Arena, Buffer};
use futures_channel::oneshot;
use rustix::event::{EventfdFlags, eventfd};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use thread::Command;

/// Why there is no manager.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The libraries cannot be used.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The kernel's interface cannot be used.
    #[error("cannot manage RDMA connections ({0}): load the kernel's modules rdma_ucm and ib_uverbs")]
    Interface(CallError),
    /// The kernel has no device.
    #[error("this computer has no RDMA device")]
    NoDevice,
    /// There is no thread for it.
    #[error("cannot start a thread for RDMA: {0}")]
    Thread(#[from] io::Error),
}

/// Takes the connections that others ask a listener for.
pub type Requests = Box<dyn Fn(Pending) + Send>;

/// A connection's number on the thread: the address of librdmacm's structure for it, which its owner's drop destroys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct IdKey(pub(crate) usize);

impl IdKey {
    pub(crate) const fn pointer(self) -> *mut CmId {
        self.0 as *mut CmId
    }
}

/// What an endpoint consists of. The thread destroys it.
pub(crate) struct Parts {
    pub id: IdKey,
    pub qp: *mut Qp,
    pub cq: *mut Cq,
    pub channel: *mut CompChannel,
    /// The registration of all buffers, for requests of this computer.
    pub mr: *mut Mr,
    /// The registration of the buffers that the other computer can access, if there are any.
    pub shared: Option<*mut Mr>,
    /// The protection domain, if it is not that of all endpoints which share nothing.
    pub domain: Option<Domain>,
    /// Its receives, if it has none of its own.
    pub receives: Option<SharedReceives>,
    pub arena: Arena,
    /// Reports of the completion queue that were taken.
    pub events: u32,
    pub can_invalidate: bool,
    pub reads_max: u8,
}

// SAFETY: libibverbs and librdmacm allow calls from any thread; one owner has all parts.
unsafe impl Send for Parts {}

impl Parts {
    /// The key of the arena's registration, for requests of this computer.
    pub(crate) fn key(&self) -> u32 {
        // SAFETY: the registration exists until the parts are destroyed.
        unsafe { (*self.mr).lkey }
    }

    /// As [`Parts::key`], for requests of the other computer. `None`: there is nothing for it.
    pub(crate) fn remote_key(&self) -> Option<u32> {
        // SAFETY: as above.
        self.shared.map(|mr| unsafe { (*mr).rkey })
    }
}

/// What an endpoint has.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Receives that are posted at the same time, and pieces of each; not used if they are shared.
    pub receives: (u32, u32),
    /// The receives that it shares with other endpoints, if it has none of its own. It shares no buffers then, and is of no other
    /// protection domain.
    pub shared_receives: Option<SharedReceives>,
    /// Other requests that are posted at the same time, and pieces of each.
    pub sends: (u32, u32),
    /// The sizes of its buffers, which the device can access.
    pub buffers: Vec<usize>,
    /// The other computer may read and write the last so many of the buffers by a key, which it is given
    /// ([`Endpoint::remote`]).
    pub shared: usize,
    /// The protection domain: what is registered there, the other computer may access, too. `None`: one of its own if it shares
    /// buffers, and otherwise that of all endpoints which share nothing.
    pub domain: Option<Domain>,
    /// What the other computer is told if there is no memory for it.
    pub rejection: Vec<u8>,
}

struct Inner {
    library: Library,
    commands: mpsc::Sender<Command>,
    bell: OwnedFd,
}

/// The thread that manages connections. Cheap to clone; the thread ends after the last clone, listener and connection.
#[derive(Clone)]
pub struct Manager(Arc<Inner>);

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manager").finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::End);
        self.ring();
    }
}

impl Inner {
    fn ring(&self) {
        // It fails only if the thread is about to be woken by many others.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }
}

impl Manager {
    /// Loads the libraries, and starts the thread on the cores of the calling thread.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start() -> Result<Self, StartError> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
        let rung = bell.try_clone()?;
        let (commands, receiver) = mpsc::channel();
        let (reply, started) = oneshot::channel();
        std::thread::Builder::new().name("rdma".into()).spawn(move || thread::run(receiver, rung, reply))?;
        let ended = || StartError::Thread(io::Error::other("the thread has ended"));
        let library = started.await.map_err(|_| ended())??;
        Ok(Self(Arc::new(Inner { library, commands, bell })))
    }

    pub(crate) fn library(&self) -> &Library {
        &self.0.library
    }

    fn command(&self, command: Command) {
        // The thread lives for as long as a manager does.
        let _ = self.0.commands.send(command);
        self.0.ring();
    }

    /// Listens at an address; the thread calls `requests`, which does not block. Returns the listener, with the port that the
    /// kernel has chosen for port 0.
    ///
    /// # Errors
    /// librdmacm's: `ENODEV` if no RDMA device has the address.
    pub async fn listen(&self, address: SocketAddr, requests: Requests) -> Result<Listener, CallError> {
        let (reply, listening) = oneshot::channel();
        self.command(Command::Listen { manager: self.clone(), address, requests, reply });
        listening.await.unwrap_or(Err(CallError::new("rdma_listen", libc::ECANCELED)))
    }

    /// Finds the way to an address, from an address of this computer or from any. The owner makes the queue pair, posts receives,
    /// and connects ([`Endpoint::connect`]).
    ///
    /// # Errors
    /// librdmacm's: there is no way to the address by an RDMA device.
    pub async fn resolve(
        &self,
        address: SocketAddr,
        source: Option<SocketAddr>,
    ) -> Result<Pending, CallError> {
        let (reply, resolved) = oneshot::channel();
        self.command(Command::Resolve { manager: self.clone(), address, source, reply });
        resolved.await.unwrap_or(Err(CallError::new("rdma_resolve_addr", libc::ECANCELED)))
    }

    pub(crate) fn connect(&self, id: IdKey, private_data: &[u8], reply: thread::Reply) {
        self.command(Command::Connect { id, private_data: private_data.to_vec(), reply });
    }

    pub(crate) fn accept(&self, id: IdKey, private_data: &[u8], reply: thread::Reply) {
        self.command(Command::Accept { id, private_data: private_data.to_vec(), reply });
    }

    pub(crate) fn disconnect(&self, id: IdKey) {
        self.command(Command::Disconnect(id));
    }

    pub(crate) fn destroy(&self, parts: Parts, lent: Vec<Buffer>, ended: oneshot::Sender<()>) {
        self.command(Command::Destroy { parts, lent, ended });
    }

    pub(crate) fn free_receives(&self, parts: SharedParts) {
        self.command(Command::FreeReceives(parts));
    }

    pub(crate) fn free_domain(&self, domain: FreedDomain) {
        self.command(Command::FreeDomain(domain));
    }
}

/// An address that is listened at, until this is dropped.
#[derive(Debug)]
pub struct Listener {
    pub(crate) manager: Manager,
    pub(crate) id: IdKey,
    pub(crate) address: SocketAddr,
}

impl Listener {
    /// The address.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.manager.command(Command::Forget(self.id));
    }
}

/// What another computer says that asks for a connection.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Its address.
    pub peer: SocketAddr,
    /// The address that it asks.
    pub local: SocketAddr,
    /// Its data.
    pub private_data: Vec<u8>,
    /// Reads of its memory that it executes at the same time.
    pub reads_max: u8,
}

/// A device, as long as the thread of its connections lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Device(usize);

/// A connection that another computer asks for, or is to be asked for. Its drop refuses it.
#[derive(Debug)]
pub struct Pending {
    manager: Manager,
    /// `None`: an endpoint has it.
    id: Option<IdKey>,
    device: Device,
    /// What the other computer says; of a connection that is to be asked for, the addresses.
    pub parameters: Parameters,
}

impl Pending {
    fn new(manager: Manager, id: IdKey, device: Device, parameters: Parameters) -> Self {
        Self { manager, id: Some(id), device, parameters }
    }

    /// The device that the connection is of.
    pub const fn device(&self) -> Device {
        self.device
    }

    /// Makes a protection domain of the connection's device.
    ///
    /// # Errors
    /// libibverbs's.
    pub async fn domain(&self) -> Result<Domain, CallError> {
        let (reply, made) = oneshot::channel();
        let (device, manager) = (self.device, self.manager.clone());
        self.manager.command(Command::MakeDomain { device, manager, reply });
        made.await.unwrap_or(Err(CallError::new("ibv_alloc_pd", libc::ECANCELED)))
    }

    /// Makes receives that the connections of the device of this one can share: so many, or as many as the device can have, for
    /// messages of up to so many bytes.
    ///
    /// # Errors
    /// libibverbs's: there is no memory, or the device cannot have such receives.
    pub async fn share_receives(&self, count: u32, bytes: u32) -> Result<SharedReceives, CallError> {
        let (reply, made) = oneshot::channel();
        let (device, local, manager) = (self.device, self.parameters.local, self.manager.clone());
        let size = (count, bytes);
        self.manager.command(Command::ShareReceives { device, local, size, manager, reply });
        made.await.unwrap_or(Err(CallError::new("ibv_create_srq", libc::ECANCELED)))
    }

    /// Makes the queue pair and its buffers. The owner posts receives, and accepts the connection ([`Endpoint::accept`]) or asks
    /// for it ([`Endpoint::connect`]).
    ///
    /// # Errors
    /// libibverbs's: there is no memory, or the device cannot have such a queue pair.
    pub async fn prepare(mut self, setup: Setup) -> Result<(Endpoint, Vec<Buffer>), CallError> {
        let Some(id) = self.id.take() else { unreachable!("it is prepared once") };
        let (reply, prepared) = oneshot::channel();
        let reads_max = self.parameters.reads_max;
        let manager = self.manager.clone();
        self.manager.command(Command::Prepare { id, setup, reads_max, manager, reply });
        prepared.await.unwrap_or(Err(CallError::new("rdma_create_qp", libc::ECANCELED)))
    }

    /// Refuses the connection, with data for the other computer.
    pub fn reject(mut self, private_data: &[u8]) {
        if let Some(id) = self.id.take() {
            self.manager.command(Command::Reject { id, private_data: private_data.to_vec() });
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.manager.command(Command::Forget(id));
        }
    }
}
