//! Disks and their openings. Control context, except for the methods that channels call.

use crate::cell::{Cells, ChannelCell, Command};
use crate::qos::DiskQos;
use crate::ranges::Ranges;
use crate::sampling::Sampling;
use crate::{
    BaseEvent, BdevChannel, Blocks, Clear, Deadline, Device, Geometry, Histogram, OpenError, Recording, Stats,
};
use aryk_reactor::{Cx, Handle, RootId};
use futures_channel::oneshot;
use std::any::Any;
use std::convert::Infallible;
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::Poll;
use std::time::Duration;
use uuid::Uuid;

/// The namespace of the UUIDs of parts. It is SPDK's, so that a part has the same UUID as in SPDK.
const PARTS: Uuid = uuid::uuid!("976b899e-3e1e-4d71-ab69-c2b08e9df8b8");

/// The names by which a disk is found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The name of the disk.
    pub name: String,
    /// Other names.
    pub aliases: Vec<String>,
    /// Its UUID, which is also a name.
    pub uuid: Uuid,
}

impl Identity {
    /// An identity of a name and a random UUID.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), aliases: Vec::new(), uuid: Uuid::new_v4() }
    }

    /// The UUID of a disk of one kind that is made of all of this disk: always the same UUID. Each kind has a namespace.
    pub fn uuid_of_whole(&self, namespace: Uuid) -> Uuid {
        Uuid::new_v5(&namespace, self.uuid.as_bytes())
    }

    /// The UUID of a disk that is made of some blocks of this disk: always the same UUID.
    pub fn uuid_of_part(&self, offset: Blocks, blocks: Blocks) -> Uuid {
        let mut name = [0; 32];
        name[..16].copy_from_slice(self.uuid.as_bytes());
        name[16..24].copy_from_slice(&offset.0.to_le_bytes());
        name[24..].copy_from_slice(&blocks.0.to_le_bytes());
        Uuid::new_v5(&PARTS, &name)
    }
}

/// An event of a disk, for its openers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The disk is being removed, and the opener must close it.
    Removed,
    /// The disk has this many blocks now.
    Resized {
        /// Blocks.
        blocks: Blocks,
    },
    /// The limits, the operations or the read-only state of the disk have changed ([`Device::limits`], [`Device::ops`],
    /// [`Device::is_read_only`]). Its channels have applied the new ones.
    Changed,
}

/// The state of a disk's removal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RemovalState {
    /// Openers have the disk open.
    InUse,
    /// The device closes.
    Closing,
    /// The caller of the removal has given up: the disk fails its requests, and can be removed again.
    Abandoned,
}

/// The function that an opener gets events by. It is called in control context, and must not call the registry.
pub(crate) type Listener = Arc<dyn Fn(Event) + Send + Sync>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Claim {
    /// Not a user of the disk.
    Probe,
    None,
    /// Nobody writes.
    Frozen,
    Shared,
    Exclusive,
}

impl Claim {
    const fn is_writer(self) -> bool {
        matches!(self, Self::Shared | Self::Exclusive)
    }

    /// Whether an opening with this claim may not be beside an opening with that one.
    const fn excludes(self, other: Self) -> bool {
        match self {
            Self::Probe | Self::None => false,
            Self::Frozen => other.is_writer(),
            Self::Shared => matches!(other, Self::Frozen | Self::Exclusive),
            Self::Exclusive => matches!(other, Self::Frozen | Self::Shared | Self::Exclusive),
        }
    }
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
    /// Removals that wait for the last opener to close the disk.
    waiting: Vec<oneshot::Sender<()>>,
    /// One for each opener that prepares a reactor. They are dropped when the removal of the disk begins, which cancels the
    /// preparation.
    preparing: Vec<oneshot::Sender<Infallible>>,
}

/// A registered disk.
pub struct Bdev {
    serial: u64,
    identity: Identity,
    /// Its other names.
    aliases: Mutex<Vec<String>>,
    device: Arc<dyn Device>,
    /// The size in [`Blocks`].
    blocks: AtomicU64,
    /// Whether a removal of the disk or of one of its bases is under way: the disk cannot be opened any more.
    doomed: AtomicBool,
    /// Whether that removal has reached this disk: new requests fail.
    removing: AtomicBool,
    /// Whether the device is closing.
    closing: AtomicBool,
    resetting: AtomicBool,
    /// Whether the store is away.
    stalled: AtomicBool,
    openers: Mutex<Openers>,
    /// Disks that are made of this one and stay without it when it is removed.
    staying: Mutex<Vec<Weak<Bdev>>>,
    places: Arc<Mutex<Vec<Place>>>,
    ranges: Ranges,
    deadline: Mutex<Option<Deadline>>,
    qos: Mutex<DiskQos>,
    sampling: Sampling,
    recording: Mutex<Option<(Recording, Histogram)>>,
}

/// A reactor that has, or had, channels of a disk.
pub(crate) struct Place {
    pub reactor: Handle,
    pub channels: usize,
    /// The counts of closed channels. Written on that reactor only.
    pub closed: Stats,
}

/// The time that requests in flight have when a disk is removed, before they are aborted.
const REMOVAL_GRACE: Duration = Duration::from_secs(10);

impl fmt::Debug for Bdev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bdev").field("name", &self.identity.name).finish_non_exhaustive()
    }
}

/// Takes a lock that is held for a few instructions only, and whose holder does not panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no one panics holding it")
}

impl Bdev {
    pub(crate) fn new(serial: u64, identity: Identity, device: Arc<dyn Device>) -> Self {
        Self {
            serial,
            aliases: Mutex::new(identity.aliases.clone()),
            identity,
            blocks: AtomicU64::new(device.geometry().blocks.0),
            device,
            doomed: AtomicBool::new(false),
            removing: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            resetting: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            openers: Mutex::default(),
            staying: Mutex::default(),
            places: Arc::default(),
            ranges: Ranges::default(),
            deadline: Mutex::default(),
            qos: Mutex::default(),
            sampling: Sampling::default(),
            recording: Mutex::default(),
        }
    }

    /// The names with which the disk was registered. Its aliases may have changed since ([`Bdev::aliases`]).
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Its other names.
    pub fn aliases(&self) -> Vec<String> {
        lock(&self.aliases).clone()
    }

    /// Sets its other names. The caller holds the registry's lock, and has changed the registry's names.
    pub(crate) fn set_aliases(&self, aliases: Vec<String>) {
        *lock(&self.aliases) = aliases;
    }

    /// The name of the disk.
    pub fn name(&self) -> &str {
        &self.identity.name
    }

    /// Its number, unique in this process.
    pub fn serial(&self) -> u64 {
        self.serial
    }

    /// The ranges of blocks that compound requests hold exclusively.
    pub(crate) fn ranges(&self) -> &Ranges {
        &self.ranges
    }

    /// The reactors that have, or had, channels of it.
    pub(crate) const fn places(&self) -> &Arc<Mutex<Vec<Place>>> {
        &self.places
    }

    pub(crate) const fn qos(&self) -> &Mutex<DiskQos> {
        &self.qos
    }

    pub(crate) fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// The module's device of the disk.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Its device, if that is a `T`: a module finds its own devices by this.
    pub fn device_as<T: Device>(&self) -> Option<&T> {
        let any: &dyn Any = &*self.device;
        any.downcast_ref()
    }

    /// The current shape of the disk.
    pub fn geometry(&self) -> Geometry {
        Geometry { blocks: self.blocks(), ..self.device.geometry() }
    }

    /// Its current number of blocks.
    #[inline]
    pub fn blocks(&self) -> Blocks {
        Blocks(self.blocks.load(Ordering::Relaxed))
    }

    /// Whether its removal has begun.
    #[inline]
    pub fn is_removing(&self) -> bool {
        self.removing.load(Ordering::Relaxed)
    }

    /// Whether its store is away for a time, as its module has reported ([`crate::Registry::stalled`]): requests wait for it.
    pub fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }

    /// Sets whether its store is away. Returns whether that is new. The caller holds the registry's lock, which orders this with
    /// the reports to observers.
    pub(crate) fn set_stalled(&self, is_stalled: bool) -> bool {
        self.stalled.swap(is_stalled, Ordering::Relaxed) != is_stalled
    }

    /// The number of openers that may write.
    pub fn writers(&self) -> usize {
        lock(&self.openers).list.iter().filter(|o| o.claim.is_writer()).count()
    }

    /// The owner of a claim for one writer, for several or for none, if there is one.
    pub fn claimed_by(&self) -> Option<String> {
        let openers = lock(&self.openers);
        openers
            .list
            .iter()
            .find(|o| matches!(o.claim, Claim::Frozen | Claim::Shared | Claim::Exclusive))
            .map(|o| o.owner.clone())
    }

    /// The owner of a claim for no writer, if there is one.
    pub fn frozen_by(&self) -> Option<String> {
        let openers = lock(&self.openers);
        openers.list.iter().find(|o| o.claim == Claim::Frozen).map(|o| o.owner.clone())
    }

    /// The owners of all openings but probes, and whether each may write.
    pub fn openers(&self) -> Vec<(String, bool)> {
        let openers = lock(&self.openers);
        let users = openers.list.iter().filter(|o| o.claim != Claim::Probe);
        users.map(|o| (o.owner.clone(), o.claim.is_writer())).collect()
    }

    /// The state of its removal, if it is being removed.
    pub fn removal_state(&self) -> Option<RemovalState> {
        if self.closing.load(Ordering::Relaxed) {
            return Some(RemovalState::Closing);
        }
        if self.is_doomed() {
            return Some(RemovalState::InUse);
        }
        self.removing.load(Ordering::Relaxed).then_some(RemovalState::Abandoned)
    }

    /// Closes the device, which is shown by [`Bdev::removal_state`] until then or until the future is dropped.
    pub(crate) async fn close_device(&self) {
        struct Closing<'a>(&'a AtomicBool);
        impl Drop for Closing<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::Relaxed);
            }
        }
        assert!(
            lock(&self.openers).list.is_empty(),
            "a device is closed after the last opener has closed the disk"
        );
        self.closing.store(true, Ordering::Relaxed);
        let _closing = Closing(&self.closing);
        self.device.close().await;
    }

    /// Whether a removal of it or of one of its bases is under way.
    pub fn is_doomed(&self) -> bool {
        self.doomed.load(Ordering::Relaxed)
    }

    /// Sets whether a removal is under way. The caller holds the registry's lock, which orders this with openings.
    pub(crate) fn set_doomed(&self, doomed: bool) {
        self.doomed.store(doomed, Ordering::Relaxed);
    }

    /// Notes that `above`, which is made of this disk, stays without it.
    pub(crate) fn add_staying(&self, above: &Arc<Self>) {
        let mut staying = lock(&self.staying);
        if staying.iter().all(|known| !std::ptr::eq(known.as_ptr(), Arc::as_ptr(above))) {
            staying.push(Arc::downgrade(above));
        }
    }

    /// Makes the disks that stay without this one stop using it: first no channel reads from it, then no channel writes to it. If
    /// both were one step, a channel could read old data here after another channel had stopped writing here.
    pub(crate) async fn part_from_staying(self: &Arc<Self>) {
        let staying: Vec<_> = lock(&self.staying).iter().filter_map(Weak::upgrade).collect();
        for above in staying {
            above.tell_channels(self, BaseEvent::Removing).await;
            above.device.base_event(self, BaseEvent::Removed);
            above.tell_channels(self, BaseEvent::Removed).await;
        }
        // Cleared last: if this removal is cancelled, the next one starts from the beginning.
        lock(&self.staying).clear();
    }

    /// Sends an event of a base to each channel of this disk, and waits until all channels have got it.
    pub(crate) async fn tell_channels(&self, base: &Arc<Self>, event: BaseEvent) {
        let base = Arc::clone(base);
        let tell = move |cell: &Rc<ChannelCell>, cx: &mut Cx| {
            let (told, knows) = oneshot::channel();
            cell.command(Command::BaseEvent { base: Arc::clone(&base), event, told }, cx);
            knows
        };
        for knows in self.for_each_channel(tell).await {
            // If a channel was closed in between, so was its channel of the base.
            let _ = knows.await;
        }
    }

    /// Fails new requests and those that rate limits hold, sends openers [`Event::Removed`], and aborts requests in flight after
    /// [`REMOVAL_GRACE`].
    pub(crate) async fn begin_removal(&self) {
        assert!(
            self.is_doomed(),
            "a removal marks all disks that it will remove before it begins with the first"
        );
        if !self.removing.swap(true, Ordering::Relaxed) {
            lock(&self.openers).preparing.clear();
            self.tell(Event::Removed);
        }
        // Each time: a removal that was abandoned may have reached some of the channels only.
        let abort_late = |cell: &Rc<ChannelCell>, cx: &mut Cx| {
            cell.command(Command::FailLimited, cx);
            let (cell, at) = (Rc::downgrade(cell), cx.now().after(REMOVAL_GRACE));
            cx.call_at(at, move |cx| {
                if let Some(cell) = cell.upgrade() {
                    cell.command(Command::Abort, cx);
                }
            });
        };
        self.for_each_channel(abort_late).await;
    }

    pub(crate) fn set_blocks(&self, blocks: Blocks) {
        if self.blocks.swap(blocks.0, Ordering::Relaxed) != blocks.0 {
            self.tell(Event::Resized { blocks });
        }
    }

    /// Makes each channel apply the current limits, operations and read-only state of the device, waits until all have, and sends
    /// openers [`Event::Changed`].
    pub(crate) async fn reload_properties(&self) {
        let reload = |cell: &Rc<ChannelCell>, cx: &mut Cx| {
            let (done, reloaded) = oneshot::channel();
            cell.command(Command::ReloadProperties(done), cx);
            reloaded
        };
        for reloaded in self.for_each_channel(reload).await {
            // A channel that was closed in between needs none.
            let _ = reloaded.await;
        }
        self.tell(Event::Changed);
    }

    fn tell(&self, event: Event) {
        let listeners: Vec<_> = lock(&self.openers).list.iter().map(|o| Arc::clone(&o.listener)).collect();
        listeners.iter().for_each(|listener| listener(event));
    }

    /// Waits until the disk has no opener.
    pub(crate) async fn closed_by_all(&self) {
        let (sender, receiver) = oneshot::channel();
        {
            let mut openers = lock(&self.openers);
            if openers.list.is_empty() {
                return;
            }
            openers.waiting.push(sender);
        }
        // The sender is kept until the last opener has closed the disk.
        let _ = receiver.await;
    }

    /// Opens the disk. If the claim of another opener forbids that, returns the owner of that claim.
    pub(crate) fn open(
        self: &Arc<Self>,
        claim: Claim,
        owner: &str,
        listener: Listener,
    ) -> Result<Descriptor, String> {
        let mut openers = lock(&self.openers);
        if let Some(other) = openers.list.iter().find(|o| claim.excludes(o.claim)) {
            return Err(other.owner.clone());
        }
        let id = openers.next;
        openers.next += 1;
        openers.list.push(Opener { id, claim, owner: owner.to_owned(), listener });
        Ok(Descriptor(Arc::new(Opening { bdev: Arc::clone(self), id, writable: claim.is_writer() })))
    }

    fn close(&self, id: u64) {
        let mut openers = lock(&self.openers);
        let before = openers.list.len();
        openers.list.retain(|o| o.id != id);
        assert!(openers.list.len() + 1 == before, "each opening is closed once");
        if openers.list.is_empty() {
            for waiting in openers.waiting.drain(..) {
                // The receiver may have been dropped.
                let _ = waiting.send(());
            }
        }
    }

    /// Prepares a reactor for channels of this disk, as [`Device::prepare`]. The removal of the disk cancels that.
    pub(crate) async fn prepare(&self, reactor: &Handle) -> Result<(), OpenError> {
        let mut removal = self.removal()?;
        let mut prepared = self.device.prepare(reactor);
        poll_fn(|cx| match Pin::new(&mut removal).poll(cx) {
            Poll::Ready(_) => Poll::Ready(Err(OpenError::Removed)),
            Poll::Pending => prepared.as_mut().poll(cx),
        })
        .await
    }

    /// A receiver that is ready when the removal of the disk begins.
    fn removal(&self) -> Result<oneshot::Receiver<Infallible>, OpenError> {
        let (sender, receiver) = oneshot::channel();
        // The lock orders this with a removal that begins now: either it is seen here, or it finds the sender.
        let mut openers = lock(&self.openers);
        if self.is_removing() {
            return Err(OpenError::Removed);
        }
        openers.preparing.retain(|sender| !sender.is_canceled());
        openers.preparing.push(sender);
        Ok(receiver)
    }

    pub(crate) fn channel_opened(&self, on: &Handle) {
        let mut places = lock(&self.places);
        if let Some(place) = places.iter_mut().find(|p| p.reactor == *on) {
            place.channels += 1;
            return;
        }
        // An ended reactor had the same core: its counts are kept under the core.
        let former = |p: &&mut Place| p.reactor.core() == on.core() && p.reactor.has_ended();
        match places.iter_mut().find(former) {
            Some(place) => (place.reactor, place.channels) = (on.clone(), 1),
            None => places.push(Place { reactor: on.clone(), channels: 1, closed: Stats::default() }),
        }
    }

    pub(crate) fn channel_closed(&self, on: &Handle, stats: &Stats) {
        let mut places = lock(&self.places);
        let place = places.iter_mut().find(|p| p.reactor == *on).expect("the channel was opened there");
        assert!(place.channels > 0, "a channel is closed once, on its reactor");
        place.channels -= 1;
        place.closed.merge(stats);
    }

    /// Runs `f` on each reactor that has channels of this disk, with their cells.
    async fn on_each_reactor<R, F>(&self, f: F) -> Vec<R>
    where
        R: Send + 'static,
        F: Fn(&[Rc<ChannelCell>], &mut Cx) -> R + Clone + Send + 'static,
    {
        let used = |p: &&Place| p.channels > 0;
        let reactors: Vec<_> = lock(&self.places).iter().filter(used).map(|p| p.reactor.clone()).collect();
        let mut all = Vec::new();
        for reactor in reactors {
            let (serial, f) = (self.serial, f.clone());
            // If the reactor is gone, so are its channels.
            all.extend(reactor.call(move |cx| f(&cx.local_state::<Cells>().of(serial), cx)).await);
        }
        all
    }

    /// Runs `f` for each channel of this disk on its reactor, and returns the results. Reactors without channels are not called.
    pub(crate) async fn for_each_channel<R, F>(&self, f: F) -> Vec<R>
    where
        R: Send + 'static,
        F: Fn(&Rc<ChannelCell>, &mut Cx) -> R + Clone + Send + 'static,
    {
        let each = move |cells: &[Rc<ChannelCell>], cx: &mut Cx| -> Vec<R> {
            cells.iter().map(|cell| f(cell, cx)).collect()
        };
        self.on_each_reactor(each).await.into_iter().flatten().collect()
    }

    /// Makes each of its channels be polled, because its module has something new for them.
    pub async fn wake_channels(&self) {
        self.for_each_channel(|cell, cx| cx.wake_for_event(cell.root())).await;
    }

    /// The sum of the counts of all its channels, open and closed.
    pub async fn stats(&self) -> Stats {
        let places = Arc::clone(&self.places);
        // No channel closes on its reactor during the call, so each one is counted once.
        let of_reactor = move |cells: &[Rc<ChannelCell>], cx: &mut Cx| {
            let mut sum = closed_on(&places, cx.handle());
            cells.iter().for_each(|cell| sum.merge(&cell.read_stats()));
            (cx.handle().clone(), sum)
        };
        let asked = self.on_each_reactor(of_reactor).await;
        let mut sum = Stats::default();
        asked.iter().for_each(|(_, stats)| sum.merge(stats));
        let was_asked = |p: &&Place| asked.iter().any(|(reactor, _)| *reactor == p.reactor);
        lock(&self.places).iter().filter(|p| !was_asked(p)).for_each(|p| sum.merge(&p.closed));
        sum
    }

    /// The counts of each open channel, with the number of the thread that the channel belongs to.
    pub async fn channel_stats(&self) -> Vec<(u64, Stats)> {
        let one = |cell: &Rc<ChannelCell>, cx: &mut Cx| {
            (cx.thread_of(cell.root()).unwrap_or_default(), cell.read_stats())
        };
        self.for_each_channel(one).await
    }

    /// Sets counts to zero.
    pub async fn clear_stats(&self, what: Clear) {
        lock(&self.places).iter_mut().for_each(|p| p.closed.clear(what));
        self.for_each_channel(move |cell, _| cell.stats.borrow_mut().clear(what)).await;
        if what == Clear::All
            && let Some((_, before)) = &mut *lock(&self.recording)
        {
            *before = Histogram::default();
        }
    }

    /// Starts a new recording of latencies for [`Bdev::recorded`], or ends the recording.
    pub async fn record_latencies(&self, recording: Option<Recording>) {
        let before = match recording {
            Some(Recording { op, .. }) => self.stats().await.latencies(op),
            None => Histogram::default(),
        };
        *lock(&self.recording) = recording.map(|recording| (recording, before));
    }

    /// The latencies since [`Bdev::record_latencies`], in nanoseconds.
    pub async fn recorded(&self) -> Option<(Recording, Histogram)> {
        let (recording, before) = lock(&self.recording).clone()?;
        Some((recording, self.stats().await.latencies(recording.op).since(&before)))
    }

    /// The deadline of its requests, if it has one.
    pub fn deadline(&self) -> Option<Deadline> {
        *lock(&self.deadline)
    }

    /// Sets or removes the deadline of its requests, also of those in flight.
    pub async fn set_deadline(&self, deadline: Option<Deadline>) {
        // Set first, so that a channel that is opened from now on reads it.
        *lock(&self.deadline) = deadline;
        self.for_each_channel(move |cell, cx| cell.command(Command::SetDeadline(deadline), cx)).await;
    }

    /// Aborts all requests that the device has, and waits until they complete. Requests that are submitted during that time wait.
    /// Returns `false` if another reset is under way.
    pub async fn reset(self: &Arc<Self>) -> bool {
        if self.resetting.swap(true, Ordering::Acquire) {
            return false;
        }
        let resetting = Resetting(Arc::clone(self));
        let Some(reactor) = lock(&self.places).iter().find(|p| p.channels > 0).map(|p| p.reactor.clone())
        else {
            return true;
        };
        // A task of a reactor is polled to its end also if the caller is dropped, which would leave channels frozen.
        let start = move |cx: &mut Cx| {
            let (done, wait) = oneshot::channel::<()>();
            let task = async move {
                resetting.0.freeze_and_thaw().await;
                drop((resetting, done));
            };
            cx.local().spawn(task).detach();
            wait
        };
        if let Ok(wait) = reactor.call(start).await {
            // The sender is dropped at the end.
            let _ = wait.await;
        }
        true
    }

    /// Makes each of its channels wait until the device has completed what it has of that channel, and then use another one
    /// that the device opens: after the device has changed what carries its requests out. Requests that are submitted
    /// during that time wait.
    ///
    /// # Errors
    /// [`OpenError`] if a channel could not be opened, or the disk is being reset; the channels that it failed for keep
    /// what they have.
    pub async fn reopen_channels(&self) -> Result<(), OpenError> {
        let reopen = |cell: &Rc<ChannelCell>, cx: &mut Cx| {
            let (sender, receiver) = oneshot::channel();
            cell.command(Command::Reopen(sender), cx);
            receiver
        };
        let mut result = Ok(());
        for reopened in self.for_each_channel(reopen).await {
            // A channel that was closed in between needs no other.
            result = result.and(reopened.await.unwrap_or(Ok(())));
        }
        result
    }

    async fn freeze_and_thaw(&self) {
        let freeze = |cell: &Rc<ChannelCell>, cx: &mut Cx| {
            let (sender, receiver) = oneshot::channel();
            cell.command(Command::Freeze(sender), cx);
            receiver
        };
        for frozen in self.for_each_channel(freeze).await {
            // A channel that was closed in between has nothing in flight.
            let _ = frozen.await;
        }
        self.for_each_channel(|cell, cx| cell.command(Command::Thaw, cx)).await;
    }
}

/// A reset that is under way.
struct Resetting(Arc<Bdev>);

impl Drop for Resetting {
    fn drop(&mut self) {
        self.0.resetting.store(false, Ordering::Release);
    }
}

fn closed_on(places: &Mutex<Vec<Place>>, reactor: &Handle) -> Stats {
    lock(places).iter().find(|p| p.reactor == *reactor).map(|p| p.closed.clone()).unwrap_or_default()
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

/// An opening of a disk. Its clones and its channels keep the disk open.
#[derive(Clone)]
pub struct Descriptor(Arc<Opening>);

/// The identity of an opening. It does not keep the disk open. Clones of a descriptor have the same identity.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct OpeningId {
    disk: u64,
    opening: u64,
}

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

    /// The identity of the opening.
    pub fn id(&self) -> OpeningId {
        OpeningId { disk: self.0.bdev.serial, opening: self.0.id }
    }

    /// Whether this opening may write.
    pub fn is_writable(&self) -> bool {
        self.0.writable && !self.0.bdev.device.is_read_only()
    }

    /// Prepares a reactor for channels, which may take seconds. The opener awaits this in control context each time before it
    /// calls [`Descriptor::open_channel`] there, and cancels it by dropping the future. It returns [`OpenError::Removed`] when
    /// the removal of the disk begins.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn prepare(&self, reactor: &Handle) -> Result<(), OpenError> {
        self.0.bdev.prepare(reactor).await
    }

    /// Opens a channel on the calling reactor, which is prepared ([`Descriptor::prepare`]). Completions of the channel wake
    /// `root`.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<BdevChannel, OpenError> {
        BdevChannel::open(self.clone(), root, cx)
    }
}
