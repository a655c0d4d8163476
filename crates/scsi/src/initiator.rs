//! Initiators of a disk, for tests and fuzzers: each has its own nexus and channel, on a reactor that the test steps.

use crate::{Lun, Nexus, Outcome, Port, Request, UnitChannel, Units};
use aryk_bdev::{Access, Registry};
use aryk_dma::{Buffer, Sgl};
use aryk_reactor::{Armed, Clock, CoreSet, Cx, Engine, Reactor, Root, RootId, SleepPolicy, ThreadId};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};

/// The owner of a channel, which collects its outcomes.
struct Owner {
    channel: Option<UnitChannel>,
    outcomes: Vec<Outcome>,
}

impl Root for Owner {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let before = self.outcomes.len();
        if let Some(channel) = &mut self.channel {
            channel.poll_all(cx, &mut self.outcomes);
        }
        self.outcomes.len() > before
    }

    fn park(&mut self, _: &mut Cx) -> Armed {
        Armed::Yes
    }
}

/// Several initiators of one logical unit.
pub struct Initiators {
    reactor: Reactor,
    /// The logical unit.
    pub lun: Arc<Lun>,
    nexuses: Vec<Arc<Nexus>>,
    owners: Vec<(RootId, Rc<RefCell<Owner>>)>,
    thread: ThreadId,
    tag: u16,
    /// Marks each command as replayed: a predecessor may have carried it out.
    pub replayed: bool,
}

/// Commands in flight per initiator, at most.
const DEPTH: u16 = 256;

impl std::fmt::Debug for Initiators {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Initiators").field("lun", &self.lun).finish_non_exhaustive()
    }
}

impl Initiators {
    /// Creates `count` initiators of the disk `name`; each has a pending unit attention, since the disk is new to it.
    pub fn new(registry: &Registry, name: &str, access: Access, count: u8) -> Self {
        Self::of(&Units::default(), registry, name, access, count)
    }

    /// As [`Initiators::new`], with the logical units `units`.
    pub fn of(units: &Units, registry: &Registry, name: &str, access: Access, count: u8) -> Self {
        let open = || registry.open(name, access, "test", |_| ()).expect("open the disk");
        let port = |number: u8| Port { initiator: 0x3000 + u64::from(number), target: 1 };
        let nexuses: Vec<_> = (0..count).map(|number| units.nexus(open(), port(number), 0)).collect();
        let lun = Arc::clone(nexuses[0].lun());
        let mut reactor =
            Reactor::new(0, SleepPolicy::Poll, Engine::Epoll, Clock::Monotonic).expect("a reactor");
        let thread = reactor.cx().add_thread("initiators", CoreSet::default());
        let bdev = registry.find(name).expect("the disk is there");
        let mut prepared = bdev.device().prepare(reactor.cx().handle());
        let mut cx = Context::from_waker(Waker::noop());
        while prepared.as_mut().poll(&mut cx).map(|result| result.expect("prepare the reactor")).is_pending()
        {
            reactor.turn();
        }
        drop(prepared);
        let mut all =
            Self { reactor, lun, nexuses: Vec::new(), owners: Vec::new(), thread, tag: 0, replayed: false };
        nexuses.into_iter().for_each(|nexus| all.add(nexus));
        all
    }

    fn add(&mut self, nexus: Arc<Nexus>) {
        let cx = self.reactor.cx();
        let owner = cx.add_root(self.thread, "initiator", |id, cx| {
            let channel = Some(UnitChannel::open(Arc::clone(&nexus), DEPTH, id, cx)?);
            Ok::<_, aryk_bdev::OpenError>(Owner { channel, outcomes: Vec::new() })
        });
        let id = owner.expect("a channel").id();
        let owner = cx.root(id).expect("just added");
        self.owners.push((id, owner));
        self.nexuses.push(nexus);
    }

    /// The nexus of an initiator.
    pub fn nexus(&self, initiator: usize) -> &Arc<Nexus> {
        &self.nexuses[initiator]
    }

    /// Submits a command; returns its tag.
    pub fn submit(&mut self, initiator: usize, cdb: &[u8], data_out: Sgl, data_in: Sgl) -> u16 {
        self.tag = (self.tag + 1) % DEPTH;
        let owner = Rc::clone(&self.owners[initiator].1);
        let (tag, replayed) = (self.tag, self.replayed);
        let request = Request { tag, task: tag.into(), cdb, data_out, data_in, replayed };
        let mut owner = owner.borrow_mut();
        owner.channel.as_mut().expect("open").submit(request, self.reactor.cx());
        self.tag
    }

    /// Whether the initiator receives sense data in descriptor format.
    pub fn wants_descriptors(&self, initiator: usize) -> bool {
        self.owners[initiator].1.borrow().channel.as_ref().expect("open").wants_descriptors()
    }

    /// The channel of an initiator.
    #[cfg(test)]
    pub(crate) fn with_channel<T>(&self, initiator: usize, f: impl FnOnce(&UnitChannel) -> T) -> T {
        f(self.owners[initiator].1.borrow().channel.as_ref().expect("open"))
    }

    /// Runs one turn of the reactor.
    pub fn turn(&mut self) {
        self.reactor.turn();
    }

    /// The reactor's context, for other code that runs on it.
    pub fn cx(&mut self) -> &mut Cx {
        self.reactor.cx()
    }

    /// The outcome of a command, if it has ended.
    pub fn outcome(&mut self, initiator: usize, tag: u16) -> Option<Outcome> {
        let outcomes = &mut self.owners[initiator].1.borrow_mut().outcomes;
        let at = outcomes.iter().position(|o| o.tag == tag)?;
        Some(outcomes.swap_remove(at))
    }

    /// Runs turns until a command has ended.
    pub fn wait(&mut self, initiator: usize, tag: u16) -> Outcome {
        for _ in 0..10_000_000 {
            self.turn();
            if let Some(outcome) = self.outcome(initiator, tag) {
                return outcome;
            }
        }
        panic!("the command does not end");
    }

    /// Runs one command with its data; returns its outcome and the contents of a data-in list of `room` bytes, all of which were
    /// 0xee before.
    pub fn run(&mut self, initiator: usize, cdb: &[u8], out: &[u8], room: usize) -> (Outcome, Vec<u8>) {
        let mut data_out = (!out.is_empty()).then(|| Buffer::from_slice(out));
        let mut data_in = (room > 0).then(|| Buffer::from_slice(&vec![0xee; room]));
        let lend = |buffer: &mut Option<Buffer>| buffer.as_mut().map_or(Sgl::EMPTY, Buffer::lend);
        let tag = self.submit(initiator, cdb, lend(&mut data_out), lend(&mut data_in));
        let outcome = self.wait(initiator, tag);
        if let Some(buffer) = &mut data_out {
            buffer.reclaim();
        }
        let data = data_in.map(|mut buffer| {
            buffer.reclaim();
            buffer.bytes().to_vec()
        });
        (outcome, data.unwrap_or_default())
    }
}

impl Drop for Initiators {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        for (id, owner) in &self.owners {
            owner.borrow_mut().channel.take();
            self.reactor.cx().remove_root(*id);
        }
    }
}
