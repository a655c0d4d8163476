//! A disk that is another disk, until it is told to fail: requests that fail, that never end, or whose data is wrong.
//! Control context; its channels in reactor context, which take a lock while something is injected, and only then.
#![forbid(unsafe_code)]

mod channel;

use aryk_bdev::{Base, Bdev, Channel, Decorator, Identity, Op, OpSet, OpenError, Registry};
use aryk_reactor::{Cx, RootId};
use channel::ErrorChannel;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// What happens to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It fails with [`aryk_bdev::Status::Medium`].
    Failure,
    /// It fails with [`aryk_bdev::Status::NoSpace`].
    NoMem,
    /// It does not go on until it is told to ([`resume`]), and does not end before, unless it is aborted or the disk is reset.
    Pending,
    /// One byte of what is read or written is changed. A request that is shorter is left alone.
    CorruptData {
        /// The byte's place in the request's data.
        offset: u64,
        /// What it is combined with by exclusive or; not 0.
        value: u8,
    },
}

/// A fault, and which requests it befalls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Injection {
    /// What happens.
    pub fault: Fault,
    /// To which operations.
    pub ops: OpSet,
    /// To how many requests of each operation.
    pub count: u32,
    /// Only to requests that find so many others in flight on their channel.
    pub queue_depth: u32,
}

/// What it is to be.
#[derive(Clone, Debug)]
pub struct Config {
    /// By what it is found.
    pub identity: Identity,
    /// The disk that it is made of.
    pub base: String,
}

/// Why it cannot be made or told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no such disk of this module, or its name is taken, or its base is in use.
    #[error(transparent)]
    Registry(#[from] aryk_bdev::Error),
    /// Exclusive or with nothing changes nothing.
    #[error("data is not corrupted by a value of 0")]
    CorruptsNothing,
}

/// Makes one.
///
/// # Errors
/// As [`Registry::open`] and [`Registry::register`].
pub fn create(registry: &Registry, config: Config) -> Result<Arc<Bdev>, Error> {
    let base = Base::open(registry, &config.base, &config.identity.name)?;
    Ok(registry.register(config.identity, Arc::new(ErrorDevice { base, injected: Arc::default() }))?)
}

/// Injects a fault, in the place of earlier ones for the same operations.
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

/// Injects nothing any more. Requests that are held stay so.
///
/// # Errors
/// [`Error::Registry`].
pub fn clear(registry: &Registry, name: &str) -> Result<(), Error> {
    on_device(registry, name, |injected| *injected = Table::default())
}

/// Has requests that are held go on, and holds none any more.
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

/// What is still to befall requests, by operation.
type Table = [Option<Injection>; Op::ALL.len()];

#[derive(Default)]
struct Injected {
    any: AtomicBool,
    /// How often what was held was told to go on.
    resumed: AtomicU64,
    table: Mutex<Table>,
}

impl Injected {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no one panics holding it")
    }

    fn resumed(&self) -> u64 {
        self.resumed.load(Ordering::Acquire)
    }

    /// What befalls a request that finds `in_flight` others.
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
