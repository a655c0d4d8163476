//! Reservations of namespaces: commands of I/O queues come here, change what hosts may do, and are answered when it is so on all
//! queues and, if asked, on stable storage. Control context.
//!
//! The changes of a namespace run one at a time, in the order in which they arrive. A change is stored, then takes effect, then
//! each queue of a host that loses rights is told; and the change ends when the disk has no request any more that its host lost
//! the right to. So what a host without rights wrote is on the disk when the command that took them completes, or never will be.

use crate::association::{Live, Place, QueueRef};
use crate::queue::{IoQueue, Loss};
use crate::subsystem::{Shared, Subsystem};
use crate::target::Inner;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::io::Request;
use aryk_nvme_fabrics::nqn::Nqn;
use aryk_nvme_fabrics::reservation::{Command, DATA_LEN, Effects, HostId, Reservations, Rights, State};
use aryk_reactor::Cx;
use futures_channel::oneshot;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::timeout;

/// How long a change that comes by an admin queue waits for others: its queue does nothing else meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);

/// The data for the host, nothing for another command, or why the command fails.
pub(crate) type Answer = Result<Vec<u8>, Code>;

/// The host of an I/O queue.
#[derive(Clone, Debug)]
pub(crate) struct OfHost {
    pub place: Place,
    pub id: HostId,
}

/// The way of an I/O queue to control, which executes the commands of reservations and authentications.
pub(crate) struct Asker {
    pub host: OfHost,
    pub qid: u16,
    pub asked: UnboundedSender<Asked>,
}

/// A command of an I/O queue.
pub(crate) struct Asked {
    pub host: OfHost,
    pub qid: u16,
    pub queue: QueueRef,
    pub slot: SlotId,
    /// The number of its namespace.
    pub number: u64,
    pub entry: SubmissionEntry,
    /// Bytes that the host sends, or for which it has room.
    pub len: u32,
    pub request: Request,
    /// What the host has sent.
    pub data: Vec<u8>,
}

/// A request to store the reservations of a namespace.
#[derive(Debug)]
pub struct SaveRequest {
    /// The subsystem.
    pub subsystem: Nqn,
    /// The namespace.
    pub nsid: u32,
    /// The UUID of its disk.
    pub disk: [u8; 16],
    /// The state that replaces the stored one.
    pub state: State,
    /// Report success only when the state is on stable storage: a loss of power must neither lose this state nor bring back the
    /// one before.
    pub durable: bool,
    /// Gets whether the state was stored.
    pub done: oneshot::Sender<bool>,
}

/// Takes requests to store reservations. It must not call the target.
pub type Saver = dyn Fn(SaveRequest);

/// A queue whose host gets other rights.
struct Affected {
    queue: QueueRef,
    rights: Rights,
    loss: Loss,
}

/// A namespace, unless another one has its identifier meanwhile.
fn find(subsystem: &mut Subsystem, nsid: u32, number: u64) -> Result<&mut Shared, Code> {
    let shared = subsystem.namespaces.get_mut(&nsid).filter(|shared| shared.number == number);
    shared.ok_or(Code::INVALID_NAMESPACE_OR_FORMAT)
}

/// The queues whose hosts have other rights after a change, or whose commands it aborts.
fn affected(
    subsystem: &Subsystem,
    before: &Reservations,
    after: &Reservations,
    aborted: &[HostId],
) -> Vec<Affected> {
    let of_host = |live: &Live| {
        let host = live.controller.association().host_id;
        let (rights, is_aborted) = (after.rights(&host), aborted.contains(&host));
        let is_affected = is_aborted || before.rights(&host) != rights;
        is_affected.then_some((rights, if is_aborted { Loss::All } else { Loss::Rights }))
    };
    let hosts = subsystem.controllers.values().filter_map(|live| Some((live, of_host(live)?)));
    hosts
        .flat_map(|(live, (rights, loss))| {
            live.queues.values().map(move |queue| Affected { queue: queue.root.clone(), rights, loss })
        })
        .collect()
}

impl Inner {
    /// Executes a command of an I/O queue, and completes it.
    pub async fn execute_asked(self: Rc<Self>, asked: Asked) {
        let answer = match asked.request {
            Request::Report { len } => self.report(&asked, len),
            Request::AuthenticationSend | Request::AuthenticationReceive => {
                return self.authenticate_queue(asked).await;
            }
            _ => self.change_by(&asked).await,
        };
        let slot = asked.slot;
        // A queue that has ended needs no answer.
        let _ = asked.queue.call(move |queue, cx| queue.answer(slot, answer, cx)).await;
    }

    fn with_subsystem<R>(
        &self,
        name: &Nqn,
        f: impl FnOnce(&mut Subsystem) -> Result<R, Code>,
    ) -> Result<R, Code> {
        let mut state = self.state.borrow_mut();
        f(state.subsystem(name).ok_or(Code::INVALID_NAMESPACE_OR_FORMAT)?)
    }

    fn report(&self, asked: &Asked, len: u32) -> Answer {
        self.with_subsystem(&asked.host.place.subsystem, |subsystem| {
            let shared = find(subsystem, asked.entry.nsid(), asked.number)?;
            Ok(shared.reservations.report(len))
        })
    }

    async fn change_by(&self, asked: &Asked) -> Answer {
        let mut data = [0; DATA_LEN];
        let len = DATA_LEN.min(asked.data.len());
        data[..len].copy_from_slice(&asked.data[..len]);
        let command = Command::decode(&asked.entry, &data)?;
        let OfHost { place, id: host } = &asked.host;
        let (nqn, nsid, number) = (&place.subsystem, asked.entry.nsid(), asked.number);
        let turn = self.with_subsystem(nqn, |of| Ok(Rc::clone(&find(of, nsid, number)?.turn)))?;
        let _turn = turn.lock().await;
        self.change((nqn, nsid, number), command.aborts(), |subsystem| {
            // The next association of the host begins without the commands of this one.
            let live = subsystem.controllers.get(&place.controller);
            if live.is_none_or(|live| live.controller.association().host_id != *host) {
                return Err(Code::ABORT_REQUESTED);
            }
            let shared = find(subsystem, nsid, number)?;
            if matches!(command, Command::Register { persists: Some(true), .. })
                && !shared.namespace.can_persist
            {
                return Err(Code::INVALID_FIELD);
            }
            let mut after = shared.reservations.clone();
            let effects = after.execute(*host, command)?;
            Ok((after, effects))
        })
        .await?;
        Ok(Vec::new())
    }

    /// Sets whether the reservations of a namespace persist (PTPL).
    pub async fn set_persists(&self, nqn: &Nqn, nsid: u32, persists: bool) -> Result<(), Code> {
        let found = self.with_subsystem(nqn, |of| {
            let shared = of.namespaces.get(&nsid).ok_or(Code::INVALID_NAMESPACE_OR_FORMAT)?;
            Ok((Rc::clone(&shared.turn), shared.number))
        });
        let (turn, number) = found?;
        let _turn = timeout(PATIENCE, turn.lock()).await.map_err(|_| Code::COMMAND_INTERRUPTED)?;
        let set = |subsystem: &mut Subsystem| {
            let mut after = find(subsystem, nsid, number)?.reservations.clone();
            after.set_persists(persists);
            Ok((after, Effects::default()))
        };
        self.change((nqn, nsid, number), false, set).await
    }

    /// Makes a change of a namespace, whose turn it is.
    async fn change(
        &self,
        (nqn, nsid, number): (&Nqn, u32, u64),
        aborts: bool,
        make: impl FnOnce(&mut Subsystem) -> Result<(Reservations, Effects), Code>,
    ) -> Result<(), Code> {
        let (after, effects, saved) = self.with_subsystem(nqn, |subsystem| {
            let (after, effects) = make(subsystem)?;
            let shared = find(subsystem, nsid, number)?;
            Ok((after.clone(), effects, self.save(nqn, nsid, shared, &after)))
        })?;
        if let Some(saved) = saved
            && saved.await != Ok(true)
        {
            return Err(Code::INTERNAL_ERROR);
        }
        let (affected, shows) = self.with_subsystem(nqn, |subsystem| {
            let shared = find(subsystem, nsid, number)?;
            let before = std::mem::replace(&mut shared.reservations, after.clone());
            let shows = before.state().persists != after.state().persists;
            shared.namespace.persists = after.state().persists;
            let aborted = if aborts { &effects.preempted[..] } else { &[] };
            let affected = affected(subsystem, &before, &after, aborted);
            notify(subsystem, nsid, &effects);
            Ok((affected, shows))
        })?;
        if shows {
            self.state.borrow_mut().show_namespaces(nqn);
        }
        let mut draining = Vec::new();
        for Affected { queue, rights, loss } in affected {
            let restrict =
                move |queue: &mut IoQueue, cx: &mut Cx| queue.restrict((nsid, number), rights, loss, cx);
            // A queue that has ended has no requests.
            draining.extend(queue.call(restrict).await.ok().flatten());
        }
        for ended in draining {
            // A queue that ends at this time has no request any more either.
            let _ = ended.await;
        }
        Ok(())
    }

    /// Has the state of a namespace stored, if it has changed and can be. Returns what tells whether it was stored.
    fn save(
        &self,
        nqn: &Nqn,
        nsid: u32,
        shared: &Shared,
        after: &Reservations,
    ) -> Option<oneshot::Receiver<bool>> {
        let (before, state) = (shared.reservations.state(), after.state());
        let saver = self.saver.borrow();
        let saver = saver.as_ref().filter(|_| shared.namespace.can_persist && before != state)?;
        let (done, is_done) = oneshot::channel();
        // A request that is dropped drops `done`, and the change fails.
        saver(SaveRequest {
            subsystem: nqn.clone(),
            nsid,
            disk: shared.descriptor.bdev().identity().uuid.into_bytes(),
            state: state.clone(),
            durable: before.persists || state.persists,
            done,
        });
        Some(is_done)
    }
}

/// Tells hosts that are connected what has become of their registrations.
fn notify(subsystem: &mut Subsystem, nsid: u32, effects: &Effects) {
    for live in subsystem.controllers.values_mut() {
        let Live { controller, news, .. } = live;
        let host = controller.association().host_id;
        for (_, notice) in effects.notices.iter().filter(|(of, _)| *of == host) {
            controller.notify(nsid, *notice);
            news.notify_one();
        }
    }
}
