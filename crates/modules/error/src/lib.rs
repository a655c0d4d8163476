//! The error disk: forwards requests to a base disk and injects faults on command: requests that fail, that never complete, or
//! whose data is wrong. Control context; its channels run in reactor context and take a lock only while a fault is injected.
#![forbid(unsafe_code)]

mod channel;

use aryk_bdev::{Base, Bdev, Channel, Decorator, Env, Identity, Op, OpSet, OpenError, Registry};
use aryk_reactor::{Cx, RootId};
use channel::ErrorChannel;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// A fault of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The request fails with [`aryk_bdev::Status::Medium`].
    Failure,
    /// The request fails with [`aryk_bdev::Status::NoSpace`].
    NoMem,
    /// The request is held until [`resume`], and completes earlier only if it is aborted or the disk is reset.
    Pending,
    /// One byte of the data of a read or write is changed. A request that ends before `offset` is not changed.
    CorruptData {
        /// The offset of the byte in the request's data.
        offset: u64,
        /// The byte is combined with this value by exclusive or; not 0.
        value: u8,
    },
}

/// A fault, and the requests to which it is applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Injection {
    /// The fault.
    pub fault: Fault,
    /// The operations to which it is applied.
    pub ops: OpSet,
    /// The number of requests of each operation to which it is applied.
    pub count: u32,
    /// The fault is applied only to requests with at least this many other requests in flight on their channel.
    pub queue_depth: u32,
}

/// Configuration of an error disk.
#[derive(Clone, Debug)]
pub struct Config {
    /// Names and UUID of the disk.
    pub identity: Identity,
    /// The name of the base disk.
    pub base: String,
}

/// An error of creating an error disk or of injecting a fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The module has no disk of this name, or the name is taken, or the base is in use.
    #[error(transparent)]
    Registry(#[from] aryk_bdev::Error),
    /// An exclusive or with 0 does not change the data.
    #[error("a value of 0 does not corrupt data; give a value from 1 to 255")]
    CorruptsNothing,
}

/// Creates an error disk.
///
/// # Errors
/// As [`aryk_bdev::Registry::open`] and [`aryk_bdev::Registry::register`].
pub fn create(env: &Env, config: Config) -> Result<Arc<Bdev>, Error> {
    let base = Base::open(env.registry(), &config.base, &config.identity.name)?;
    Ok(env.registry().register(config.identity, Arc::new(ErrorDevice { base, injected: Arc::default() }))?)
}

/// Injects a fault, which replaces earlier faults of the same operations.
///
/// # Errors
/// [`Error`].
pub fn inject(registry: &Registry, name: &str, injection: Injection) -> Result<(), Error> {
    if matches!(injection.fault, Fault::CorruptData { value: 0, .. }) {
        return Err(Error::CorruptsNothing);
    }
    let remaining = Some(injection).filter(|i| i.count > 0);
    on_device(registry, name, |injected| {
        for op in Op::ALL.into_iter().filter(|&op| injection.ops.contains(op)) {
            injected[op as usize] = remaining;
        }
    })
}

/// Removes all faults. Requests that are held stay held.
///
/// # Errors
/// [`Error::Registry`].
pub fn clear(registry: &Registry, name: &str) -> Result<(), Error> {
    on_device(registry, name, |injected| *injected = Table::default())
}

/// Resumes the requests that are held, and stops holding further ones.
///
/// # Errors
/// [`Error::Registry`].
pub async fn resume(registry: &Registry, name: &str) -> Result<(), Error> {
    on_device(registry, name, |injected| {
        let holds = |injection: &Option<Injection>| injection.is_some_and(|i| i.fault == Fault::Pending);
        injected.iter_mut().filter(|injection| holds(injection)).for_each(|injection| *injection = None);
    })?;
    let bdev = registry.find(name)?;
    if let Some(device) = bdev.device_as::<ErrorDevice>() {
        device.injected.resumed.fetch_add(1, Ordering::Release);
    }
    bdev.wake_channels().await;
    Ok(())
}

fn on_device(registry: &Registry, name: &str, change: impl FnOnce(&mut Table)) -> Result<(), Error> {
    let bdev = registry.find(name)?;
    let not_ours = || aryk_bdev::Error::NotFound(name.to_owned());
    let device = bdev.device_as::<ErrorDevice>().ok_or_else(not_ours)?;
    let mut table = device.injected.lock();
    change(&mut table);
    device.injected.any.store(table.iter().any(Option::is_some), Ordering::Relaxed);
    Ok(())
}

/// The faults that are still to be injected, by operation.
type Table = [Option<Injection>; Op::ALL.len()];

#[derive(Default)]
struct Injected {
    any: AtomicBool,
    /// How often held requests were resumed.
    resumed: AtomicU64,
    table: Mutex<Table>,
}

impl Injected {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no holder of the lock panics")
    }

    fn resumed(&self) -> u64 {
        self.resumed.load(Ordering::Acquire)
    }

    /// Takes the fault for a request with `in_flight` other requests in flight, and counts it.
    #[inline]
    fn take(&self, op: Op, in_flight: u32) -> Option<Fault> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        let mut table = self.lock();
        let entry = &mut table[op as usize];
        let injection = entry.as_mut().filter(|i| in_flight >= i.queue_depth)?;
        let fault = injection.fault;
        injection.count -= 1;
        if injection.count == 0 {
            *entry = None;
            self.any.store(table.iter().any(Option::is_some), Ordering::Relaxed);
        }
        Some(fault)
    }
}

struct ErrorDevice {
    base: Base,
    injected: Arc<Injected>,
}

impl Decorator for ErrorDevice {
    fn product(&self) -> &'static str {
        "Error Injection Disk"
    }

    fn base(&self) -> &Base {
        &self.base
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let base = self.base.open_channel(root, cx)?;
        Ok(Box::new(ErrorChannel::new(base, Arc::clone(&self.injected), root, Decorator::limits(self).depth)))
    }
}
