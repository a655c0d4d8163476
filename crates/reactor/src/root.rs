//! Roots and drivers: the objects that a reactor polls. Reactor context.

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

/// Whether a root or driver may be left unpolled until it wakes the reactor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Armed {
    /// Its wake-up is on, and there was nothing after it was turned on.
    Yes,
    /// There is work: poll again first.
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

/// What the channels of one device share on one reactor: a queue pair, a ring, a connection. [`Cx::driver`] finds or makes it.
///
/// A driver is **active** or **parked**. An active driver is reaped at the start of each turn and flushed at its end. It is
/// parked when it has had nothing in flight and nothing to reap for a while, and before the reactor sleeps; a parked driver costs
/// a turn nothing. Its descriptor ([`Cx::watch_driver`]), a submission ([`crate::DriverRef::activate`]) or a message
/// ([`Cx::wake_driver`]) activates it again.
pub trait Driver: 'static {
    /// Takes up to `budget` completions, puts them into the outboxes of its channels and wakes their roots; how many. It turns
    /// its own wake-ups off if that is worth it.
    fn reap(&mut self, budget: u32, cx: &mut Cx) -> u32;

    /// Hands over what was submitted in this turn: doorbells, system calls. After all submissions of the turn, and before
    /// [`Driver::arm`].
    fn flush(&mut self, cx: &mut Cx);

    /// Turns its wake-ups on, fences, and looks again: a completion that comes after [`Armed::Yes`] wakes it.
    fn arm(&mut self, cx: &mut Cx) -> Armed;

    /// Requests of its channels that were submitted and have not been reaped. While there are any, the reactor polls for longer
    /// before it sleeps.
    fn in_flight(&self) -> u32;

    /// What it is called where a stuck reactor is reported.
    fn name(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }
}
