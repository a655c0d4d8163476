//! What a reactor runs. Reactor context.

use crate::Cx;
use aryk_slots::Key;

/// Names a root on its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RootId(pub(crate) Key);

impl RootId {
    /// A number for trace records, which no other root of the reactor has at the time (up to 65,536 of them).
    pub const fn trace_number(self) -> u16 {
        self.0.index() as u16
    }
}

/// Names a poller on its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PollerId(pub(crate) Key);

/// Whether something may be left alone until it wakes us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Armed {
    /// Its wake-up is on, and there was nothing after it was turned on.
    Yes,
    /// There is work: look at it first.
    Busy,
}

/// The owner of the top of a tree of channels.
pub trait Root: 'static {
    /// Does a bounded amount of work; whether there was any.
    fn poll(&mut self, cx: &mut Cx) -> bool;

    /// Called when it is to be polled every turn from now on: its own wake-ups may be turned off.
    fn promoted(&mut self, cx: &mut Cx) {
        let _ = cx;
    }

    /// Called when polling it every turn is to end: turns its wake-ups on, fences, and looks again.
    fn park(&mut self, cx: &mut Cx) -> Armed {
        let _ = cx;
        Armed::Yes
    }
}

/// What the channels of one device share on one reactor: a queue pair, a ring, a connection.
pub trait Driver: 'static {
    /// Takes up to `budget` completions, puts them into its channels' outboxes and wakes their roots; how many.
    fn reap(&mut self, budget: u32, cx: &mut Cx) -> u32;

    /// Hands over what was submitted in this turn: doorbells, system calls. After all submissions of the turn.
    fn flush(&mut self, cx: &mut Cx);

    /// Turns its wake-ups on, fences, and looks again.
    fn arm(&mut self, cx: &mut Cx) -> Armed;

    /// What it is called where a stuck reactor is told of.
    fn name(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }
}
