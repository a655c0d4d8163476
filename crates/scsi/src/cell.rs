//! The part of a unit's channel that other code on its reactor can reach: commands to the channel, which run at its next poll.
//! Reactor context.

use crate::TaskFilter;
use crate::reservations::Refused;
use aryk_reactor::{Cx, RootId};
use futures_channel::oneshot;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Weak;

/// A command to a unit's channel.
#[derive(Debug)]
pub(crate) enum Command {
    /// Abort these tasks, and report their number when all of them have ended.
    Abort(TaskFilter, oneshot::Sender<u32>),
    /// Report how many of these tasks run.
    Count(TaskFilter, oneshot::Sender<u32>),
    /// Refuse the tasks that the nexus has lost the right to: all tasks (`false`), or only those that change something (`true`).
    /// Report their number when all of them have ended.
    Refuse(bool, oneshot::Sender<u32>),
    /// The external work that the command with this tag waits for has ended. The weak reference is dead if the command was
    /// aborted or refused while it waited.
    Ended(u16, Weak<()>, Result<(), Refused>),
}

#[derive(Debug)]
pub(crate) struct UnitCell {
    pub nexus: u32,
    root: RootId,
    commands: RefCell<Vec<Command>>,
    has_command: Cell<bool>,
}

impl UnitCell {
    pub fn command(&self, command: Command, cx: &mut Cx) {
        self.commands.borrow_mut().push(command);
        self.has_command.set(true);
        cx.tell(self.root);
    }

    #[inline]
    pub fn has_command(&self) -> bool {
        self.has_command.get()
    }

    pub fn take_commands(&self) -> Vec<Command> {
        self.has_command.set(false);
        self.commands.take()
    }
}

/// The cells of all channels on a reactor, by the serial number of their unit.
#[derive(Debug, Default)]
pub(crate) struct Cells(RefCell<HashMap<u64, Vec<Rc<UnitCell>>>>);

impl Cells {
    /// Creates the cell of a new channel on this reactor.
    pub fn open(serial: u64, nexus: u32, root: RootId, cx: &mut Cx) -> (Rc<Self>, Rc<UnitCell>) {
        let cell = UnitCell { nexus, root, commands: RefCell::default(), has_command: Cell::new(false) };
        let cell = Rc::new(cell);
        let cells = cx.local_state::<Self>();
        cells.0.borrow_mut().entry(serial).or_default().push(Rc::clone(&cell));
        (cells, cell)
    }

    /// Removes the cell of a channel that is being closed.
    pub fn close(&self, serial: u64, cell: &Rc<UnitCell>) {
        let mut all = self.0.borrow_mut();
        let list = all.get_mut(&serial).expect("a cell exists until it is closed");
        list.retain(|c| !Rc::ptr_eq(c, cell));
        if list.is_empty() {
            all.remove(&serial);
        }
    }

    /// The cells of the unit with this serial number.
    pub fn of(serial: u64, cx: &mut Cx) -> Vec<Rc<UnitCell>> {
        let cells = cx.local_state::<Self>();
        let all = cells.0.borrow();
        all.get(&serial).cloned().unwrap_or_default()
    }
}
