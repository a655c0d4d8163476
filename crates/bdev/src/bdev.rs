//! A disk, and its being open. Control context, but for what channels ask of it.

use crate::cell::{Cells, ChannelCell, Command};
use crate::{BdevChannel, Device, Geometry, OpenError, Stats};
use aryk_reactor::{Cx, Handle, RootId};
use futures_channel::oneshot;
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use uuid::Uuid;

/// By what a disk is found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Its name.
    pub name: String,
    /// Other names.
    pub aliases: Vec<String>,
    /// Its UUID, which is also a name.
    pub uuid: Uuid,
}

impl Identity {
    /// A name, and a random UUID.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), aliases: Vec::new(), uuid: Uuid::new_v4() }
    }
}

/// What openers are told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The disk is being removed: close it.
    Removed,
    /// The disk has this many blocks now.
    Resized {
        /// Blocks.
        blocks: u64,
    },
}

/// How an opener is told. Called in control context, and must not call back into the registry.
pub(crate) type Listener = Arc<dyn Fn(Event) + Send + Sync>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Claim {
    None,
    Shared,
    Exclusive,
}

struct Opener {
    id: u64,
    claim: Claim,
    owner: String,
    listener: Listener,
}

#[derive(Default)]
struct Openers {
    next: u64,
    list: Vec<Opener>,
    /// Who waits for the last to close.
    waiting: Vec<oneshot::Sender<()>>,
}

/// A disk that has been registered.
pub struct Bdev {
    serial: u64,
    identity: Identity,
    device: Arc<dyn Device>,
    blocks: AtomicU64,
    removing: AtomicBool,
    resetting: AtomicBool,
    openers: Mutex<Openers>,
    /// Reactors with channels of it, and how many each has.
    reactors: Mutex<Vec<(Handle, usize)>>,
    /// What channels that are closed have counted.
    closed: Mutex<Stats>,
}

impl fmt::Debug for Bdev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bdev").field("name", &self.identity.name).finish_non_exhaustive()
    }
}

/// A lock that is held for a few instructions only, and whose holder does not panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no one panics holding it")
}

impl Bdev {
    pub(crate) fn new(serial: u64, identity: Identity, device: Arc<dyn Device>) -> Self {
        Self {
            serial,
            identity,
            blocks: AtomicU64::new(device.geometry().blocks),
            device,
            removing: AtomicBool::new(false),
            resetting: AtomicBool::new(false),
            openers: Mutex::default(),
            reactors: Mutex::default(),
            closed: Mutex::default(),
        }
    }

    /// By what it is found.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.identity.name
    }

    /// Its number, unique in this process.
    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    /// What its module made of it.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Its device, if that is a `T`: how a module finds its own again.
    pub fn device_as<T: Device>(&self) -> Option<&T> {
        let any: &dyn Any = &*self.device;
        any.downcast_ref()
    }

    /// Its shape now.
    pub fn geometry(&self) -> Geometry {
        Geometry { blocks: self.blocks(), ..self.device.geometry() }
    }

    /// Its number of blocks now.
    #[inline]
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Whether its removal has begun.
    #[inline]
    pub fn is_removing(&self) -> bool {
        self.removing.load(Ordering::Relaxed)
    }

    /// Who has claimed it, if someone has: for one writer, or for several.
    pub fn claimed_by(&self) -> Option<String> {
        let openers = lock(&self.openers);
        openers.list.iter().find(|o| o.claim != Claim::None).map(|o| o.owner.clone())
    }

    /// Marks it as being removed, and tells its openers; `false` if it already was.
    pub(crate) fn begin_removal(&self) -> bool {
        let first = !self.removing.swap(true, Ordering::Relaxed);
        if first {
            self.tell(Event::Removed);
        }
        first
    }

    pub(crate) fn set_blocks(&self, blocks: u64) {
        if self.blocks.swap(blocks, Ordering::Relaxed) != blocks {
            self.tell(Event::Resized { blocks });
        }
    }

    fn tell(&self, event: Event) {
        let listeners: Vec<_> = lock(&self.openers).list.iter().map(|o| Arc::clone(&o.listener)).collect();
        listeners.iter().for_each(|listener| listener(event));
    }

    /// Waits until nobody has it open.
    pub(crate) async fn closed_by_all(&self) {
        let (sender, receiver) = oneshot::channel();
        {
            let mut openers = lock(&self.openers);
            if openers.list.is_empty() {
                return;
            }
            openers.waiting.push(sender);
        }
        // The sender is kept until it is used.
        let _ = receiver.await;
    }

    /// Opens it, unless the claims of others forbid; then says whose.
    pub(crate) fn open(
        self: &Arc<Self>,
        claim: Claim,
        owner: &str,
        listener: Listener,
    ) -> Result<Descriptor, String> {
        let mut openers = lock(&self.openers);
        let clashes = |o: &&Opener| match claim {
            Claim::None => false,
            Claim::Shared => o.claim == Claim::Exclusive,
            Claim::Exclusive => o.claim != Claim::None,
        };
        if let Some(other) = openers.list.iter().find(clashes) {
            return Err(other.owner.clone());
        }
        let id = openers.next;
        openers.next += 1;
        openers.list.push(Opener { id, claim, owner: owner.to_owned(), listener });
        Ok(Descriptor(Arc::new(Opening { bdev: Arc::clone(self), id, writable: claim != Claim::None })))
    }

    fn close(&self, id: u64) {
        let mut openers = lock(&self.openers);
        openers.list.retain(|o| o.id != id);
        if openers.list.is_empty() {
            for waiting in openers.waiting.drain(..) {
                // Whoever has stopped waiting does not want to know.
                let _ = waiting.send(());
            }
        }
    }

    pub(crate) fn channel_opened(&self, on: &Handle) {
        let mut reactors = lock(&self.reactors);
        match reactors.iter_mut().find(|(h, _)| h == on) {
            Some((_, count)) => *count += 1,
            None => reactors.push((on.clone(), 1)),
        }
    }

    pub(crate) fn channel_closed(&self, on: &Handle, stats: &Stats) {
        let mut reactors = lock(&self.reactors);
        if let Some((_, count)) = reactors.iter_mut().find(|(h, _)| h == on) {
            *count -= 1;
        }
        reactors.retain(|(_, count)| *count > 0);
        drop(reactors);
        lock(&self.closed).merge(stats);
    }

    /// Runs `f` for each channel of this disk, on its reactor, and gathers what it gives. Goes only to reactors that have some.
    pub(crate) async fn for_each_channel<R, F>(&self, f: F) -> Vec<R>
    where
        R: Send + 'static,
        F: Fn(&ChannelCell, &mut Cx) -> R + Clone + Send + 'static,
    {
        let handles: Vec<_> = lock(&self.reactors).iter().map(|(h, _)| h.clone()).collect();
        let mut all = Vec::new();
        for handle in handles {
            let (serial, f) = (self.serial, f.clone());
            let on_reactor = move |cx: &mut Cx| -> Vec<R> {
                Cells::of(serial, cx).iter().map(|cell| f(cell, cx)).collect()
            };
            // If the reactor is gone, so are its channels.
            all.extend(handle.call(on_reactor).await.into_iter().flatten());
        }
        all
    }

    /// What all its channels, also those that are closed, have counted.
    pub async fn stats(&self) -> Stats {
        let open = self.for_each_channel(|cell, _| cell.stats.borrow().clone()).await;
        let mut sum = lock(&self.closed).clone();
        open.iter().for_each(|stats| sum.merge(stats));
        sum
    }

    /// Sets all counts to zero.
    pub async fn clear_stats(&self) {
        *lock(&self.closed) = Stats::default();
        self.for_each_channel(|cell, _| cell.stats.borrow_mut().clear()).await;
    }

    /// Aborts every request that the device has, waits for them to complete, and goes on. Requests that come meanwhile wait. `false` if a reset is
    /// under way already.
    pub async fn reset(&self) -> bool {
        if self.resetting.swap(true, Ordering::Acquire) {
            return false;
        }
        let freeze = |cell: &ChannelCell, cx: &mut Cx| {
            let (sender, receiver) = oneshot::channel();
            cell.command(Command::Freeze(sender), cx);
            receiver
        };
        for frozen in self.for_each_channel(freeze).await {
            // A channel that was closed meanwhile has nothing in flight.
            let _ = frozen.await;
        }
        self.for_each_channel(|cell, cx| cell.command(Command::Thaw, cx)).await;
        self.resetting.store(false, Ordering::Release);
        true
    }
}

struct Opening {
    bdev: Arc<Bdev>,
    id: u64,
    writable: bool,
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.bdev.close(self.id);
    }
}

/// A disk that is open. Clones, and the channels made of it, keep it open.
#[derive(Clone)]
pub struct Descriptor(Arc<Opening>);

impl fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "open {}", self.0.bdev.name())
    }
}

impl Descriptor {
    /// The disk.
    pub fn bdev(&self) -> &Arc<Bdev> {
        &self.0.bdev
    }

    /// Whether this opening may write.
    pub fn is_writable(&self) -> bool {
        self.0.writable && !self.0.bdev.device.is_read_only()
    }

    /// A channel for the calling reactor, whose completions wake `root`.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<BdevChannel, OpenError> {
        BdevChannel::open(self.clone(), root, cx)
    }
}
