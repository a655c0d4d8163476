//! Holds back the writes of a volume while all shards of its pool take a snapshot. Control and reactor context.
//!
//! A write may be in several shards, and one that a VM submits after another may be in another shard. So that a snapshot has both
//! or none, no write of the volume is under way while the shards take it: the channels hold back new ones, and those under way
//! end first. A gate opens by itself after [`PATIENCE`], also if the command that closed it was dropped.

use crate::Error;
use crate::pool::lock;
use aryk_reactor::{Cx, Handle, RootId};
use aryk_volume::WriteGate;
use futures_channel::oneshot;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a gate stays closed, at most.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long the snapshots behind it may take: the rest is for messages under way.
const TIME: Duration = Duration::from_secs(1);

/// The numbers of gates are the process's, because reactors have gates of several pools.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// The gate of a volume's disk.
pub(crate) struct Gate {
    number: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The reactors on which it is.
    reactors: Vec<Handle>,
    /// When it was closed last, until it was opened.
    closed: Option<Instant>,
}

/// The gates of a reactor, by their numbers.
#[derive(Default)]
struct Gates(RefCell<HashMap<u64, Weak<LocalGate>>>);

/// What a gate is on a reactor: shared by the channels of its volume there.
pub(crate) struct LocalGate {
    gate: RefCell<WriteGate>,
    /// How often it was closed: an old timer does not open it.
    round: Cell<u64>,
    /// The roots of channels that have held back writes.
    waiting: RefCell<Vec<RootId>>,
    /// Told when no write is under way. Dropped when the gate opens.
    drained: RefCell<Option<oneshot::Sender<()>>>,
}

impl LocalGate {
    /// Whether a write may begin, which is then under way. Otherwise `root` is woken when the gate opens.
    pub fn enter(&self, root: RootId) -> bool {
        let has_entered = self.gate.borrow_mut().enter();
        if !has_entered {
            self.waiting.borrow_mut().push(root);
        }
        has_entered
    }

    /// A write has ended.
    pub fn leave(&self) {
        if self.gate.borrow_mut().leave()
            && let Some(drained) = self.drained.take()
        {
            // The command that closed the gate may have been dropped.
            let _ = drained.send(());
        }
    }

    /// Closes it. Returns a receiver that gets a message when no write is under way.
    fn close(self: &Rc<Self>, cx: &mut Cx) -> oneshot::Receiver<()> {
        let (sender, drained) = oneshot::channel();
        self.round.set(self.round.get() + 1);
        if self.gate.borrow_mut().close() {
            let _ = sender.send(());
        } else {
            *self.drained.borrow_mut() = Some(sender);
        }
        let (gate, round) = (Rc::downgrade(self), self.round.get());
        cx.call_at(cx.now().after(PATIENCE), move |cx| {
            if let Some(gate) = gate.upgrade().filter(|gate| gate.round.get() == round) {
                gate.open(cx);
            }
        });
        drained
    }

    fn open(&self, cx: &mut Cx) {
        self.gate.borrow_mut().open();
        self.drained.take();
        for root in self.waiting.take() {
            cx.wake(root);
        }
    }
}

impl Gate {
    pub fn new() -> Self {
        Self { number: NUMBERS.fetch_add(1, Ordering::Relaxed), state: Mutex::default() }
    }

    /// The gate on this reactor, for a channel.
    pub fn local(&self, cx: &mut Cx) -> Rc<LocalGate> {
        let gates = cx.local_state::<Gates>();
        if let Some(local) = gates.find(self.number) {
            return local;
        }
        let local = Rc::new(LocalGate {
            gate: RefCell::default(),
            round: Cell::new(0),
            waiting: RefCell::default(),
            drained: RefCell::default(),
        });
        let mut all = gates.0.borrow_mut();
        all.retain(|_, gate| gate.strong_count() > 0);
        all.insert(self.number, Rc::downgrade(&local));
        drop(all);
        let is_closed = {
            let mut state = lock(&self.state);
            if !state.reactors.contains(cx.handle()) {
                state.reactors.push(cx.handle().clone());
            }
            state.closed.is_some_and(|closed| closed.elapsed() < PATIENCE)
        };
        // Who has closed the gate did not know of this reactor.
        if is_closed {
            drop(local.close(cx));
        }
        local
    }
}

impl Gates {
    fn find(&self, number: u64) -> Option<Rc<LocalGate>> {
        self.0.borrow().get(&number).and_then(Weak::upgrade)
    }
}

/// Sets when gates were closed. Returns the reactors on which they are.
fn set(gates: &[&Gate], closed: Option<Instant>) -> Vec<Handle> {
    let mut reactors = Vec::new();
    for gate in gates {
        let mut state = lock(&gate.state);
        state.closed = closed;
        state.reactors.retain(|reactor| !reactor.has_ended());
        reactors.extend(state.reactors.iter().cloned());
    }
    reactors.sort_unstable_by_key(Handle::core);
    reactors.dedup();
    reactors
}

/// Gates that are closed.
pub(crate) struct Closed<'a> {
    gates: Vec<&'a Gate>,
    reactors: Vec<Handle>,
    since: Instant,
}

impl<'a> Closed<'a> {
    /// Closes gates: [`Closed::drained`] waits until all of their channels know. Call [`Closed::open`] afterwards in any case.
    #[expect(clippy::disallowed_methods, reason = "the control plane has no reactor's clock")]
    pub fn new(gates: Vec<&'a Gate>) -> Self {
        let since = Instant::now();
        let reactors = set(&gates, Some(since));
        Self { gates, reactors, since }
    }

    /// Waits until no write is under way.
    ///
    /// # Errors
    /// [`Error::Busy`]: writes did not end in time.
    pub async fn drained(&self) -> Result<(), Error> {
        let mut waiting = Vec::new();
        for reactor in &self.reactors {
            let numbers: Vec<u64> = self.gates.iter().map(|gate| gate.number).collect();
            let close = move |cx: &mut Cx| {
                let gates = cx.local_state::<Gates>();
                let there: Vec<_> = numbers.iter().filter_map(|number| gates.find(*number)).collect();
                there.iter().map(|gate| gate.close(cx)).collect::<Vec<_>>()
            };
            // A reactor that has ended has no channels.
            waiting.extend(reactor.call(close).await.unwrap_or_default());
        }
        for drained in waiting {
            drained.await.map_err(|_| BUSY)?;
        }
        self.check_time()
    }

    /// Whether the gates are closed for certain.
    ///
    /// # Errors
    /// [`Error::Busy`]: they may have opened.
    pub fn check_time(&self) -> Result<(), Error> {
        if self.since.elapsed() < TIME { Ok(()) } else { Err(BUSY) }
    }

    /// Opens the gates.
    pub async fn open(self) {
        for reactor in set(&self.gates, None) {
            let numbers: Vec<u64> = self.gates.iter().map(|gate| gate.number).collect();
            let open = move |cx: &mut Cx| {
                let gates = cx.local_state::<Gates>();
                numbers.iter().filter_map(|number| gates.find(*number)).for_each(|gate| gate.open(cx));
            };
            // A reactor that has ended has no channels.
            let _ = reactor.cast(open).await;
        }
    }
}

const BUSY: Error = Error::Busy("the writes of the volume do not end in time; try again later");
