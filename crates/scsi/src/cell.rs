//! What of a unit's channel others on its reactor may reach: commands to it, which it heeds at its next poll. Reactor context.

use crate::Which;
use crate::reservations::Refused;
use aryk_reactor::{Cx, RootId};
use futures_channel::oneshot;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Weak;

/// What a channel is told.
#[derive(Debug)]
pub(crate) enum Command {
    /// Abort these, and say how many they were when they are over.
    Abort(Which, oneshot::Sender<u32>),
    /// Say how many there are of these.
    Count(Which, oneshot::Sender<u32>),
    /// Refuse all, which the nexus may do no more, or only those that change something, and say how many they were when they are over.
    Refuse(bool, oneshot::Sender<u32>),
    /// What the command with this tag has waited for elsewhere is over. That it waits is gone if it was given up.
    Over(u16, Weak<()>, Result<(), Refused>),
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
    /// Makes the cell of a new channel on this reactor.
    pub fn open(serial: u64, nexus: u32, root: RootId, cx: &mut Cx) -> (Rc<Self>, Rc<UnitCell>) {
        let cell = UnitCell { nexus, root, commands: RefCell::default(), has_command: Cell::new(false) };
        let cell = Rc::new(cell);
        let cells = cx.local_state::<Self>();
        cells.0.borrow_mut().entry(serial).or_default().push(Rc::clone(&cell));
        (cells, cell)
    }

    /// Forgets the cell of a channel that is being closed.
    pub fn close(&self, serial: u64, cell: &Rc<UnitCell>) {
        let mut all = self.0.borrow_mut();
        let list = all.get_mut(&serial).expect("a cell is there until it is closed");
        list.retain(|c| !Rc::ptr_eq(c, cell));
        if list.is_empty() {
            all.remove(&serial);
        }
    }

    /// The cells of a unit.
    pub fn of(serial: u64, cx: &mut Cx) -> Vec<Rc<UnitCell>> {
        let cells = cx.local_state::<Self>();
        let all = cells.0.borrow();
        all.get(&serial).cloned().unwrap_or_default()
    }
}
