//! The part of a unit's channel that other code on its reactor can reach: commands to the channel, which run at its next poll.
//! Reactor context.

use crate::TaskFilter;
use crate::reservations::Refused;
use aryk_reactor::{Commands, LocalGroups};
use futures_channel::oneshot;
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

/// The part of a channel of the nexus with this number.
#[derive(Debug)]
pub(crate) struct UnitCell {
    pub nexus: u32,
    pub commands: Commands<Command>,
}

/// The cells of all channels on a reactor, by the serial number of their unit.
pub(crate) type Cells = LocalGroups<UnitCell>;
