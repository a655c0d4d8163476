//! VMs' memory that the target of a controller accesses by itself, over RDMA. Context: the thread of NVMe over Fabrics; a thread
//! for each device registers memory, which takes long.
//!
//! A controller has a protection domain on each device that its connections use. All memory of VMs is registered there, as long
//! as the controller lives: the target, and no other one, can read and write it at any time. The operator turns that on
//! ([`RemoteConfig::is_direct`](super::RemoteConfig::is_direct)) for targets that are trusted as the VM's own host.
//!
//! Guests take no turns: a guest waits while the memory of another is registered, with bounce buffers after some seconds.

use super::rdma::Lost;
use crate::shared::lock;
use aryk_bdev::{Attachment, BoxFuture, Memory, MemoryClient, MemoryLookup, RegisterError};
use aryk_dma::{DmaRange, Mapping};
use aryk_rdma::{Device, Domain, Keys, Pending, Registration};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, mpsc};
use tokio::sync::{OnceCell, oneshot};
use tokio::task::spawn_local;

/// Bytes that connections can still register when a VM's memory is: without its connections, a disk is of no use.
const ROOM: u64 = 32 << 20;

/// The client of [`Memory`] that registers VMs' memory for a controller.
pub fn client_name(controller: &str) -> String {
    format!("nvme-rdma {controller}")
}

/// Keys as the value of a range of memory. No device gives keys of all ones.
pub(super) fn to_value(keys: Keys) -> u64 {
    u64::from(keys.local) << 32 | u64::from(keys.remote)
}

/// The keys of [`to_value`].
pub(super) fn from_value(value: u64) -> Keys {
    Keys { local: (value >> 32) as u32, remote: value as u32 }
}

/// A device of a controller.
#[derive(Debug)]
struct Attached {
    domain: Domain,
    attachment: Attachment,
}

#[derive(Debug)]
struct Inner {
    controller: String,
    memory: Memory,
    devices: Mutex<HashMap<Device, Arc<OnceCell<Attached>>>>,
}

/// The devices of a controller on which VMs' memory is registered. Clones are the same.
#[derive(Clone, Debug)]
pub struct DirectMemory(Arc<Inner>);

impl DirectMemory {
    pub(super) fn new(controller: &str, memory: &Memory) -> Self {
        let (controller, memory) = (controller.to_owned(), memory.clone());
        Self(Arc::new(Inner { controller, memory, devices: Mutex::default() }))
    }

    /// Begins to end all registrations. No connection is made any more.
    pub(super) fn end(&self) {
        lock(&self.0.devices).clear();
    }

    /// The domain of a new connection, and the keys of the memory that is registered there. `None`: nothing is, so that data is
    /// copied. The first connection of a device waits until all memory is registered, or the patience for that is over.
    ///
    /// # Errors
    /// The device's.
    pub(super) async fn of(&self, pending: &Pending) -> Result<Option<(Domain, MemoryLookup)>, Lost> {
        let place = Arc::clone(lock(&self.0.devices).entry(pending.device()).or_default());
        if !place.initialized() {
            let (domain, inner, place) = (pending.domain().await?, Arc::clone(&self.0), Arc::clone(&place));
            // It goes on if the attempt to connect takes too long.
            let attaching = spawn_local(async move {
                let attached = place.get_or_try_init(|| inner.attach(domain)).await;
                if let Err(error) = attached {
                    let controller = &inner.controller;
                    tracing::warn!(controller, %error, "VMs' memory is not registered: all data is copied");
                }
            });
            // A task that has panicked has attached nothing.
            let _ = attaching.await;
        }
        Ok(place.get().map(|attached| (attached.domain.clone(), attached.attachment.lookup())))
    }
}

impl Inner {
    async fn attach(&self, domain: Domain) -> Result<Attached, String> {
        let registrar = Registrar::start(client_name(&self.controller), domain.clone());
        let registrar = registrar.map_err(|error| error.to_string())?;
        let attachment = self.memory.attach(registrar).await.map_err(|error| error.to_string())?;
        Ok(Attached { domain, attachment })
    }
}

/// Work of the thread.
enum Work {
    Register { memory: DmaRange, reply: oneshot::Sender<Result<Keys, RegisterError>> },
    Unregister { address: u64, reply: oneshot::Sender<()> },
}

/// A domain, as the block layer's client for VMs' memory.
struct Registrar {
    name: String,
    work: mpsc::Sender<Work>,
}

impl Registrar {
    /// Starts the thread, which ends with the registrar.
    fn start(name: String, domain: Domain) -> io::Result<Self> {
        let (work, receiver) = mpsc::channel();
        let run = move || register_in_turn(&domain, &receiver);
        std::thread::Builder::new().name("aryk-rdma-map".to_owned()).spawn(run)?;
        Ok(Self { name, work })
    }
}

fn register_in_turn(domain: &Domain, work: &mpsc::Receiver<Work>) {
    let mut registered: HashMap<u64, Registration> = HashMap::new();
    while let Ok(work) = work.recv() {
        match work {
            // The caller of either is gone if the block layer was dropped.
            Work::Register { memory, reply } => match domain.register(&memory) {
                Ok(registration) => match check_room(domain) {
                    Ok(()) => {
                        let keys = registration.keys();
                        registered.insert(memory.addr(), registration);
                        let _ = reply.send(Ok(keys));
                    }
                    Err(error) => end(Some(registration), memory.addr(), reply, Err(error)),
                },
                Err(error) => drop(reply.send(Err(RegisterError::failed(error)))),
            },
            Work::Unregister { address, reply } => end(registered.remove(&address), address, reply, ()),
        }
    }
}

/// Ends a registration, and replies. Without its end, there is no reply: a device may access the memory for ever.
fn end<T>(registration: Option<Registration>, address: u64, reply: oneshot::Sender<T>, value: T) {
    match registration.map_or(Ok(()), Registration::end) {
        Ok(()) => drop(reply.send(value)),
        Err(error) => {
            tracing::error!(%error, address, "a VM's memory stays registered for RDMA");
            std::mem::forget(reply);
        }
    }
}

/// Fails if connections could not register their buffers now: the limit of locked memory counts them, too.
fn check_room(domain: &Domain) -> Result<(), RegisterError> {
    let room = Arc::new(Mapping::anonymous(ROOM).map_err(RegisterError::failed)?);
    let registered = domain.register(&room.dma_pages()).and_then(Registration::end);
    registered.map_err(|error| match Errno::from_raw_os_error(error.errno) {
        Errno::NOMEM => RegisterError::failed(format!(
            "beside it, connections could not register {} MiB: raise the limit of locked memory (ulimit -l)",
            ROOM >> 20
        )),
        _ => RegisterError::failed(error),
    })
}

impl MemoryClient for Registrar {
    fn name(&self) -> &str {
        &self.name
    }

    fn register(&self, memory: DmaRange, _: Arc<str>) -> BoxFuture<'_, Result<u64, RegisterError>> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let ended = || RegisterError::failed("the thread for it has ended");
            self.work.send(Work::Register { memory, reply }).map_err(|_| ended())?;
            answer.await.map_err(|_| ended())?.map(to_value)
        })
    }

    fn unregister(&self, memory: DmaRange, _: Arc<str>, _: u64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let work = Work::Unregister { address: memory.addr(), reply };
            if self.work.send(work).is_err() || answer.await.is_err() {
                // The thread has panicked: a device may access the memory.
                std::future::pending::<()>().await;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_has_both_keys() {
        for keys in [Keys { local: 0, remote: u32::MAX }, Keys { local: 0x8000_0001, remote: 7 }] {
            assert_eq!(from_value(to_value(keys)), keys);
        }
    }
}
