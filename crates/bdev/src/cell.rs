//! The part of a channel that other code on its reactor reaches: statistics and commands. Reactor context.
//!
//! A channel belongs to its opener. Code that needs all channels of a disk calls each reactor that has some
//! ([`crate::Bdev::for_each_channel`]), finds their cells there, and adds a command to each. The channel carries the command out
//! at its next poll.

use crate::ranges::{Extent, HeldOff, RangeLock};
use crate::{BaseEvent, Bdev, Deadline, OpenError, Stats};
use aryk_reactor::{Commands, Cx, Handle, LocalGroups, RootId};
use aryk_slots::Key;
use futures_channel::oneshot;
use std::cell::{Cell, RefCell, RefMut};
use std::rc::Rc;
use std::sync::Arc;

/// A command to a channel.
#[derive(Debug)]
pub(crate) enum Command {
    /// Abort all requests that the device has, hold new ones, and report when the device has none.
    Freeze(oneshot::Sender<()>),
    /// Send requests again.
    Thaw,
    /// Let the device complete what it has, then open another channel of it instead of this one's.
    Reopen(oneshot::Sender<Result<(), OpenError>>),
    /// Abort all requests.
    Abort,
    /// Hold off some requests for some blocks, and report when such requests before have completed.
    Fence { id: u64, extent: Extent, held_off: HeldOff, quiet: oneshot::Sender<()> },
    /// End a fence.
    Unfence(u64),
    /// A compound request holds its blocks exclusively.
    Granted { key: Key, lock: RangeLock },
    /// Set the deadline of requests.
    SetDeadline(Option<Deadline>),
    /// Check deadlines: some requests may be late.
    LookAtDeadlines,
    /// Apply the new rate limits of the disk.
    LookAtLimits,
    /// The disk is being removed: fail the requests that its rate limits hold.
    FailLimited,
    /// Apply the current limits, operations and read-only state of the device, and report that.
    ReloadProperties(oneshot::Sender<()>),
    /// Pass an event of a base on to the device's channel, and report that.
    BaseEvent { base: Arc<Bdev>, event: BaseEvent, told: oneshot::Sender<()> },
}

#[derive(Debug)]
pub(crate) struct ChannelCell {
    pub commands: Commands<Command>,
    /// The name of the channel's disk.
    name: String,
    /// All counts but the depths.
    pub stats: RefCell<Stats>,
    /// Requests in flight, and those of them that wait.
    depths: Cell<(u32, u32)>,
    /// The most requests in flight since [`ChannelCell::take_in_flight_max`] was called last.
    in_flight_max: Cell<u32>,
}

impl ChannelCell {
    /// The root of the channel.
    #[inline]
    pub const fn root(&self) -> RootId {
        self.commands.root()
    }

    /// Adds a command, which the channel carries out at its next poll.
    pub fn command(&self, command: Command, cx: &mut Cx) {
        self.commands.add(command, cx);
    }

    #[inline]
    fn set_depths(&self, in_flight: u32, waiting: u32) {
        self.depths.set((in_flight, waiting));
        if in_flight > self.in_flight_max.get() {
            self.in_flight_max.set(in_flight);
        }
    }

    /// The most requests in flight since the last call.
    pub fn take_in_flight_max(&self) -> u32 {
        self.in_flight_max.replace(self.depths.get().0)
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> u32 {
        self.depths.get().0
    }

    /// Requests in flight, and those of them that wait.
    pub fn depths(&self) -> (u32, u32) {
        self.depths.get()
    }

    /// The counts, and the current depths.
    pub fn read_stats(&self) -> Stats {
        let (in_flight, waiting) = self.depths.get();
        let mut stats = self.stats.borrow().clone();
        (stats.in_flight, stats.waiting) = (in_flight.into(), waiting.into());
        stats
    }
}

/// The cells of all channels on a reactor, by disk.
pub(crate) type Cells = LocalGroups<ChannelCell>;

/// A channel's place among the channels of its disk and of its reactor. [`Registration::close`] ends it.
#[derive(Debug)]
pub(crate) struct Registration {
    cells: Rc<Cells>,
    cell: Rc<ChannelCell>,
    reactor: Handle,
}

impl Registration {
    /// Registers a new channel of `bdev` on this reactor.
    pub fn new(bdev: &Bdev, root: RootId, cx: &mut Cx) -> Self {
        let cell = Rc::new(ChannelCell {
            commands: Commands::new(root),
            name: bdev.name().to_owned(),
            stats: RefCell::default(),
            depths: Cell::default(),
            in_flight_max: Cell::default(),
        });
        let cells = cx.local_state::<Cells>();
        cells.add(bdev.serial(), &cell);
        bdev.channel_opened(cx.handle());
        Self { cells, cell, reactor: cx.handle().clone() }
    }

    /// Ends the registration of a channel of `bdev`, which keeps its counts.
    pub fn close(&self, bdev: &Bdev) {
        self.cells.remove(bdev.serial(), &self.cell);
        bdev.channel_closed(&self.reactor, &self.cell.stats.take());
    }

    /// The part that others on the reactor reach.
    pub const fn cell(&self) -> &Rc<ChannelCell> {
        &self.cell
    }

    #[inline]
    pub fn root(&self) -> RootId {
        self.cell.root()
    }

    /// The channel's counts.
    #[inline]
    pub fn stats_mut(&self) -> RefMut<'_, Stats> {
        self.cell.stats.borrow_mut()
    }

    /// Publishes the number of requests in flight; that of those that wait has not changed.
    #[inline]
    pub fn set_in_flight(&self, in_flight: u32) {
        self.cell.set_depths(in_flight, self.cell.depths.get().1);
    }

    /// Publishes the number of requests in flight, and of those of them that wait.
    #[inline]
    pub fn set_depths(&self, in_flight: u32, waiting: u32) {
        self.cell.set_depths(in_flight, waiting);
    }

    #[inline]
    pub fn has_command(&self) -> bool {
        self.cell.commands.has_some()
    }

    pub fn take_command(&self) -> Option<Command> {
        self.cell.commands.take()
    }
}

/// The channels that are open on this reactor: each one's disk by name, and the number of the thread that it belongs to, as
/// [`aryk_reactor::ThreadStats::id`]. Those of disks that others are made of too.
pub fn open_channels(cx: &mut Cx) -> Vec<(u64, String)> {
    let mut all = Vec::new();
    let cells = cx.local_state::<Cells>();
    cells.for_all(|cell| all.extend(cx.thread_of(cell.root()).map(|thread| (thread, cell.name.clone()))));
    all
}
