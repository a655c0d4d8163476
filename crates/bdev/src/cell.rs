//! What of a channel others on its reactor may reach: its statistics, and commands to it. Reactor context.
//!
//! A channel is its opener's alone. Whoever wants something of all channels of a disk goes to each reactor that has some
//! ([`crate::Bdev::for_each_channel`]), finds their cells there, and leaves a command, which the channel heeds at its next poll.

use crate::{Bdev, Stats};
use aryk_reactor::{Cx, RootId};
use futures_channel::oneshot;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};

/// What a channel is told.
#[derive(Debug)]
pub(crate) enum Command {
    /// Abort all requests that the device has, hold those to come, and say when the device has none.
    Freeze(oneshot::Sender<()>),
    /// Go on.
    Thaw,
}

#[derive(Debug)]
pub(crate) struct ChannelCell {
    pub root: RootId,
    pub stats: RefCell<Stats>,
    command: RefCell<Option<Command>>,
    has_command: Cell<bool>,
}

impl ChannelCell {
    pub fn command(&self, command: Command, cx: &mut Cx) {
        *self.command.borrow_mut() = Some(command);
        self.has_command.set(true);
        cx.wake(self.root);
    }

    #[inline]
    pub fn take_command(&self) -> Option<Command> {
        if self.has_command.replace(false) { self.command.borrow_mut().take() } else { None }
    }
}

/// The cells of all channels on a reactor, by disk.
#[derive(Debug, Default)]
pub(crate) struct Cells(RefCell<HashMap<u64, Vec<Weak<ChannelCell>>>>);

impl Cells {
    /// Makes the cell of a new channel of `bdev` on this reactor.
    pub fn open(bdev: &Bdev, root: RootId, cx: &mut Cx) -> Rc<ChannelCell> {
        let cell = Rc::new(ChannelCell {
            root,
            stats: RefCell::default(),
            command: RefCell::default(),
            has_command: Cell::new(false),
        });
        let cells = cx.local_state::<Self>();
        cells.0.borrow_mut().entry(bdev.serial()).or_default().push(Rc::downgrade(&cell));
        bdev.channel_opened(cx.handle());
        cell
    }

    /// The cells of the disk `serial`. Forgets those that are gone.
    pub fn of(serial: u64, cx: &mut Cx) -> Vec<Rc<ChannelCell>> {
        let cells = cx.local_state::<Self>();
        let mut all = cells.0.borrow_mut();
        let Some(list) = all.get_mut(&serial) else { return Vec::new() };
        let live: Vec<_> = list.iter().filter_map(Weak::upgrade).collect();
        list.retain(|cell| cell.strong_count() > 0);
        if list.is_empty() {
            all.remove(&serial);
        }
        live
    }
}
