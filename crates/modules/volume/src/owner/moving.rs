//! The move of the root of a part to another reactor while volumes are used. Reactor context.
//!
//! First, both reactors get what they need, so that nothing can fail later: the other one a branch, if it has none, and a root
//! with channels of the base and of foreign disks, which waits; this one a branch, which waits. Then the root *drains*: it takes
//! no requests, hands out nothing, and waits for what the disks have. If that takes longer than the order allows, the root stays.
//! Otherwise it leaves: the engine, the store, and all requests and commands that they have go to the other root in one message.
//!
//! The channels of volumes do not notice. On the reactor that the root leaves, the branch takes over the inbox, and the requests
//! of its channels become requests of the branch. On the reactor to which the root comes, the branch that is there ends when the
//! base has nothing of it, and leaves the inbox and its requests to the root. Other branches learn where the root is by their
//! rings, which the root takes along.
//!
//! Calls of the control plane wait for the end of a move; a call that ends the pool ends a move that has not left.

use super::clients::Link;
use super::{Answering, Call, InFlight, Owner, Phase, Running};
use crate::branch::{Branch, InFlight as OfBranch, Successor};
use crate::foreign::ForeignDisks;
use crate::inbox::{Aborted, Client, Inbox, Inboxes, Submitted};
use crate::part::Place;
use crate::{Growing, Settings};
use aryk_bdev::{Descriptor, OpenError};
use aryk_reactor::{Bell, CoreSet, Cx, Handle, Hold, MoveError, Moving, RootId, TimerId};
use aryk_slots::{Key, Slots};
use aryk_volume::State;
use futures_channel::oneshot;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The result of a move.
pub(crate) type Moved = Result<(), MoveError>;

/// An order to leave the reactor. Both reactors were prepared for channels of the base, and the other one for those of foreign
/// disks.
pub(crate) struct Leave {
    pub to: Hold,
    /// How long the base may take for what it has.
    pub patience: Duration,
    pub done: oneshot::Sender<Moved>,
}

/// The root on the other reactor, which waits.
struct There {
    root: RootId,
    bell: Bell,
}

/// A move that has begun.
pub(super) struct Leaving {
    order: Leave,
    /// The branch on this reactor.
    successor: Successor,
    /// Once it is there, the root drains, until this time.
    there: Option<(There, TimerId)>,
    is_detaching: bool,
}

/// A part between two reactors.
struct Detached {
    thread: Moving,
    running: Running,
    settings: Settings,
    requests: Slots<InFlight>,
    commands: HashMap<u64, Answering>,
    next_command: u64,
    growing: Option<oneshot::Sender<Growing>>,
    state: Option<State>,
    read_bytes: u64,
    branches: Slots<Link>,
    /// Requests of branches that the engine does not have yet, and what branches have aborted.
    submitted: VecDeque<Submitted>,
    aborted: Aborted,
    waiting: VecDeque<Call>,
    order: Leave,
}

impl Owner {
    /// Has the root leave its reactor.
    pub fn leave(&mut self, order: Leave, cx: &mut Cx) {
        let refuse = |order: Leave, why| drop(order.done.send(Err(why)));
        if !matches!(self.phase, Phase::Running(_)) {
            return refuse(order, MoveError::Ending);
        }
        if self.leaving.is_some() || self.is_withdrawing || self.is_settling {
            return refuse(order, MoveError::Moving);
        }
        if *order.to == *cx.handle() {
            return drop(order.done.send(Ok(())));
        }
        let successor = Successor::new(&self.place, &self.clients.inbox, order.to.clone(), cx);
        let successor = match successor {
            Ok(successor) => successor,
            Err(error) => return refuse(order, MoveError::Open(error.to_string())),
        };
        let (place, foreign) = (Arc::clone(&self.place), self.foreign.list());
        let (home, root, to) = (cx.handle().clone(), self.root, order.to.clone());
        cx.post(&order.to, move |cx| {
            let made = Self::wait_for(&place, foreign, cx);
            cx.post(&home, move |cx| {
                let owner = cx.root::<Self>(root).expect("it waits for the answer");
                owner.borrow_mut().go_on(made, to, cx);
            });
        });
        self.leaving = Some(Leaving { order, successor, there: None, is_detaching: false });
    }

    /// Adds a root on this reactor, which waits for the one on another reactor.
    fn wait_for(
        place: &Arc<Place>,
        foreign: Vec<(String, Descriptor)>,
        cx: &mut Cx,
    ) -> Result<There, OpenError> {
        let base = place.base()?;
        let inbox = match cx.local_state::<Inboxes>().find(place.number) {
            Some(inbox) => inbox,
            None => Branch::start(place, place.owner()?, cx)?,
        };
        let name = format!("volumes on {}", base.bdev().name());
        let thread = cx.add_thread(name.clone(), CoreSet::from_iter([cx.handle().core()]));
        let made = cx.add_root(thread, &name, |root, cx| {
            let channel = base.open_channel(root, cx)?;
            let mut disks = ForeignDisks::default();
            for (name, disk) in foreign {
                match disks.add(name, disk, root, cx) {
                    // One that is being removed is not opened again.
                    Ok(()) | Err(OpenError::Removed) => {}
                    Err(error) => return Err(error),
                }
            }
            let inbox = Rc::new(Inbox::new(root));
            let owner = Self::over(channel, Arc::clone(place), Phase::Arriving, inbox, thread);
            Ok(Self { foreign: disks, ..owner })
        });
        let made = made.inspect_err(|_| cx.remove_thread(thread));
        // Otherwise, a branch without channels ends.
        inbox.set_heir(made.is_ok(), cx);
        let (root, bell) = (made?.id(), Bell::new(cx.handle()));
        cx.answer_bell(&bell, root);
        Ok(There { root, bell })
    }

    /// The other reactor has answered.
    fn go_on(&mut self, made: Result<There, OpenError>, to: Hold, cx: &mut Cx) {
        match (made, &mut self.leaving) {
            (Ok(there), Some(leaving)) => {
                let root = self.root;
                let until = cx.call_at(cx.now().after(leaving.order.patience), move |cx| {
                    if let Some(owner) = cx.root::<Self>(root) {
                        owner.borrow_mut().stay(MoveError::TooSlow, cx);
                    }
                });
                leaving.there = Some((there, until));
            }
            (Ok(there), None) => self.withdraw(there, to, cx),
            (Err(error), Some(_)) => {
                self.stay(MoveError::Open(error.to_string()), cx);
                self.is_withdrawing = false;
            }
            (Err(_), None) => self.is_withdrawing = false,
        }
        cx.wake(self.root);
    }

    /// Has another reactor remove the root that waits there.
    fn withdraw(&self, there: There, to: Hold, cx: &mut Cx) {
        let (home, root, number) = (cx.handle().clone(), self.root, self.place.number);
        cx.post(&to.clone(), move |cx| {
            let Self { thread, disk, foreign, .. } =
                cx.take_root::<Self>(there.root).expect("it waits until it is removed");
            drop((disk, foreign));
            cx.remove_thread(thread);
            if let Some(inbox) = cx.local_state::<Inboxes>().find(number) {
                inbox.set_heir(false, cx);
            }
            cx.post(&home, move |cx| {
                // The other reactor stays until this.
                let _to = to;
                let owner = cx.root::<Self>(root).expect("it waits for the answer");
                owner.borrow_mut().is_withdrawing = false;
                cx.wake(root);
            });
        });
    }

    /// Has the root stay, if it has not left.
    fn stay(&mut self, why: MoveError, cx: &mut Cx) {
        let Some(Leaving { order, successor, there, .. }) = self.leaving.take() else { return };
        successor.remove(cx);
        self.is_withdrawing = true;
        if let Some((there, until)) = there {
            cx.cancel_timer(until);
            self.withdraw(there, order.to, cx);
        }
        // The caller may have been dropped.
        let _ = order.done.send(Err(why));
        self.run_waiting(cx);
        cx.wake(self.root);
    }

    /// The pool ends: so does the move.
    pub(super) fn end_move(&mut self, cx: &mut Cx) {
        self.stay(MoveError::Ending, cx);
        self.tell_settled(Err(MoveError::Ending));
    }

    fn run_waiting(&mut self, cx: &mut Cx) {
        for call in std::mem::take(&mut self.waiting) {
            call(self, cx);
        }
    }

    /// Whether the root waits for its disks, to leave.
    pub(super) fn is_draining(&self) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| leaving.there.is_some())
    }

    /// A turn of a root that drains: clients get what has ended, and the root leaves when its disks have nothing.
    pub(super) fn drain(&mut self, cx: &mut Cx) {
        self.abort_requests(cx);
        self.take_replies(cx);
        self.look_at_state(cx);
        let are_idle = self.are_disks_idle();
        let Some(leaving) = self.leaving.as_mut().filter(|leaving| are_idle && !leaving.is_detaching) else {
            return;
        };
        leaving.is_detaching = true;
        // When the root does not run.
        let root = self.root;
        cx.call_at(cx.now(), move |cx| {
            let Some(owner) = cx.root::<Self>(root) else { return };
            let leaves = owner.borrow_mut().leaves();
            drop(owner);
            if leaves && let Some(owner) = cx.take_root::<Self>(root) {
                owner.detach(cx);
            }
        });
    }

    fn are_disks_idle(&self) -> bool {
        self.foreign.is_idle() && self.disk.as_ref().is_some_and(super::BaseDisk::is_idle)
    }

    /// Whether the root leaves, and nothing keeps it.
    fn leaves(&mut self) -> bool {
        let are_idle = self.are_disks_idle() && !self.signals.is_base_removed.load(Ordering::Acquire);
        let Some(leaving) = self.leaving.as_mut().filter(|leaving| leaving.there.is_some()) else {
            return false;
        };
        leaving.is_detaching = false;
        are_idle
    }

    /// Leaves the reactor.
    fn detach(self, cx: &mut Cx) {
        let Self { thread, place, disk, foreign, phase, settings, clients, requests, commands, .. } = self;
        let Self { next_command, growing, state, read_bytes, leaving, waiting, signals, .. } = self;
        drop((disk, foreign));
        let (Phase::Running(running), Some(Leaving { order, successor, there, .. })) = (phase, leaving)
        else {
            unreachable!("an open pool leaves by an order")
        };
        let (There { root, bell }, until) = there.expect("it waits");
        cx.cancel_timer(until);
        signals.set_bell(bell);
        place.set_root(order.to.clone(), root);
        let (inbox, mut branches, mut requests) = (clients.inbox, clients.branches, requests);
        let (submitted, aborted) = inbox.take_of_branches();
        successor.start(order.to.clone(), cx, |ends, take| {
            let link = branches.add(Link::new(ends));
            for (_, request) in requests.iter_mut() {
                let Client::Channel(channel) = request.client else { continue };
                let of_branch = OfBranch::of(channel, request.volume, &request.io, request.is_aborted);
                request.client = Client::Branch(link);
                request.io.tag = take(of_branch);
                branches.get_mut(link).expect("just added").add_request();
            }
        });
        let thread = cx.release_thread(thread);
        let to = Handle::clone(&order.to);
        let detached = Detached {
            thread,
            running,
            settings,
            requests,
            commands,
            next_command,
            growing,
            state,
            read_bytes,
            branches,
            submitted,
            aborted,
            waiting,
            order,
        };
        cx.post(&to, move |cx| {
            let owner = cx.root::<Self>(root).expect("it waits for this");
            owner.borrow_mut().arrive(detached, cx);
        });
    }

    /// Takes over from the root on the reactor before.
    fn arrive(&mut self, detached: Detached, cx: &mut Cx) {
        let Detached { thread, running, settings, requests, commands, next_command, .. } = detached;
        let Detached { growing, state, read_bytes, branches, submitted, aborted, .. } = detached;
        let Detached { mut waiting, order, .. } = detached;
        let before = std::mem::replace(&mut self.thread, cx.adopt_thread(thread));
        cx.set_thread(self.root, self.thread);
        cx.remove_thread(before);
        self.foreign.set_names(&running.engine.foreign_disks());
        self.foreign.note_removed();
        self.phase = Phase::Running(running);
        (self.settings, self.requests, self.commands) = (settings, requests, commands);
        (self.next_command, self.growing) = (next_command, growing);
        (self.state, self.read_bytes) = (state, read_bytes);
        self.clients.branches = branches;
        self.clients.inbox.add_before(submitted, aborted);
        let links: Vec<Key> = self.clients.branches.iter().map(|(key, _)| key).collect();
        for link in links {
            self.clients.tell_home(link, order.to.clone(), self.signals.bell(), cx);
        }
        (self.is_settling, self.settled) = (true, Some(order.done));
        let root = self.root;
        // The pool is in use here, also if the base does not answer to the branch.
        cx.call_at(cx.now().after(order.patience), move |cx| {
            if let Some(owner) = cx.root::<Self>(root) {
                owner.borrow_mut().tell_settled(Ok(()));
            }
        });
        waiting.append(&mut self.waiting);
        self.waiting = waiting;
        self.run_waiting(cx);
        cx.wake(self.root);
    }

    /// Passes on all that is on its way between the root and a branch of its reactor. Returns whether there was anything.
    pub fn exchange(&mut self, branch: Key, cx: &mut Cx) -> bool {
        let Phase::Running(running) = &mut self.phase else { return false };
        self.clients.exchange(branch, running, cx)
    }

    /// Takes over the channels of the branch that was on this reactor, and their requests.
    pub fn inherit(&mut self, link: Key, mut of_branch: Slots<OfBranch>, inbox: Rc<Inbox>, cx: &mut Cx) {
        self.abort_requests(cx);
        let mut take = |client: &mut Client, tag: &mut aryk_bdev::Tag| {
            if *client != Client::Branch(link) {
                return false;
            }
            let request = of_branch.remove(Key::from_raw(tag.0)).expect("it is the branch's");
            (*client, *tag) = (Client::Channel(request.channel), request.tag);
            request.is_aborted
        };
        for (_, request) in self.requests.iter_mut() {
            request.is_aborted |= take(&mut request.client, &mut request.io.tag);
        }
        let (mut submitted, aborted) = self.clients.inbox.take_of_branches();
        for request in &mut submitted {
            take(&mut request.client, &mut request.io.tag);
        }
        assert!(of_branch.is_empty(), "the root has all requests of a branch without reads");
        self.clients.branches.remove(link);
        inbox.add_before(submitted, aborted);
        inbox.set_root(self.root, cx);
        inbox.set_heir(false, cx);
        self.clients.inbox = inbox;
        self.is_settling = false;
        self.tell_settled(Ok(()));
    }

    fn tell_settled(&mut self, result: Moved) {
        if let Some(settled) = self.settled.take() {
            // The caller may have been dropped.
            let _ = settled.send(result);
        }
    }

    /// Sets the cores on which the scheduler may have the root run.
    pub fn set_cores(&self, cores: CoreSet, cx: &mut Cx) {
        cx.set_thread_cores(self.thread, cores);
    }

    /// The foreign disks of which the root has channels.
    pub fn foreign_disks(&self) -> Vec<Descriptor> {
        self.foreign.list().into_iter().map(|(_, disk)| disk).collect()
    }
}
