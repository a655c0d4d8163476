//! Roots and drivers: the objects that a reactor polls. Reactor context.

use crate::Cx;
use aryk_slots::Key;
use std::any::Any;
use std::cell::RefCell;

/// Identifies a root on its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RootId(pub(crate) Key);

impl RootId {
    /// A number for trace records, unique among the reactor's roots while there are at most 65,536 of them.
    pub const fn trace_number(self) -> u16 {
        self.0.index() as u16
    }
}

/// Identifies a poller on its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PollerId(pub(crate) Key);

/// Whether a root or driver may be left unpolled until it wakes the reactor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Armed {
    /// The wake-up of the root or driver is on, and a check after that found no work.
    Yes,
    /// There is work: the reactor must poll the root or driver again.
    Busy,
}

/// The owner of the top of a tree of channels.
pub trait Root: 'static {
    /// Does a bounded amount of work; returns whether there was any.
    fn poll(&mut self, cx: &mut Cx) -> bool;

    /// Called when the reactor begins to poll the root every turn: the root may turn its wake-ups off.
    fn promoted(&mut self, cx: &mut Cx) {
        let _ = cx;
    }

    /// Called before the reactor stops polling the root every turn: turns the root's wake-ups on, fences, then checks for work.
    fn park(&mut self, cx: &mut Cx) -> Armed {
        let _ = cx;
        Armed::Yes
    }
}

/// A root in its cell: what the reactor calls.
pub(crate) trait RootCell: Any {
    fn poll(&self, cx: &mut Cx) -> bool;
    fn promoted(&self, cx: &mut Cx);
    fn park(&self, cx: &mut Cx) -> Armed;
}

impl<T: Root> RootCell for RefCell<T> {
    fn poll(&self, cx: &mut Cx) -> bool {
        self.borrow_mut().poll(cx)
    }

    fn promoted(&self, cx: &mut Cx) {
        self.borrow_mut().promoted(cx);
    }

    fn park(&self, cx: &mut Cx) -> Armed {
        self.borrow_mut().park(cx)
    }
}

/// A queue pair, a ring or a connection that the channels of a device share on one reactor. [`Cx::driver`] finds or makes it.
///
/// A driver is **active** or **parked**. An active driver is reaped at the start of each turn and flushed at its end. It is
/// parked when it has had nothing in flight and nothing to reap for a while, and before the reactor sleeps; a parked driver costs
/// a turn nothing. Its descriptor ([`Cx::watch_driver`]), a submission ([`crate::DriverRef::activate`]) or a message
/// ([`Cx::wake_driver`]) activates it again.
pub trait Driver: 'static {
    /// Takes up to `budget` completions, puts them into the outboxes of its channels and wakes their roots; returns their
    /// number. Turns the driver's wake-ups off if that saves time.
    fn reap(&mut self, budget: u32, cx: &mut Cx) -> u32;

    /// Passes the requests that were submitted in this turn to the device, by doorbells or system calls. Called after all
    /// submissions of the turn, and before [`Driver::arm`].
    fn flush(&mut self, cx: &mut Cx);

    /// Turns the driver's wake-ups on, fences, then checks for completions: one that comes after [`Armed::Yes`] wakes the driver.
    fn arm(&mut self, cx: &mut Cx) -> Armed;

    /// Requests of its channels that were submitted and have not been reaped. While there are any, the reactor polls for longer
    /// before it sleeps.
    fn in_flight(&self) -> u32;

    /// The driver's name in reports of a stuck reactor.
    fn name(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }
}
