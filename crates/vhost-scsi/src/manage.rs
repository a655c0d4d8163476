//! Task management, on the control queue (virtio 1.2, section 5.6.6.2). Reactor context.
//!
//! A task management function is answered when the commands that it concerns have ended, on whichever reactor they run;
//! meanwhile the queue handles further requests. If the commands do not end because the kernel or a store holds them, the
//! function fails after [`DEADLINE`]; the commands are still in flight then, and end as aborted later. The function's task also
//! ends at the deadline, so a guest that repeats functions has at most [`WAITING_MAX`] of them in memory.

use crate::queue::{Queue, Targets};
use crate::wire::{Address, Response, Tmf, control, tmf};
use aryk_reactor::{Cx, RootId, TimerId};
use aryk_scsi::{Lun, Nexus, TaskFilter};
use aryk_vhost_device::GuestQueue;
use aryk_virtqueue::Chain;
use futures_channel::oneshot;
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// How long a function may take. Linux waits for the answer without a limit of its own.
const DEADLINE: Duration = Duration::from_secs(5);

/// The maximum number of waiting functions; more fail at once. Guests send one at a time. Each end of a command checks all
/// waiting functions, so their number is bounded.
const WAITING_MAX: usize = 64;

/// A request about asynchronous notifications, after the type field.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C, packed)]
struct Notifications {
    address: Address,
    events: u32,
}

/// A waiting function: its chain's head, and a serial number.
type Function = (u16, u64);

/// A function that waits for commands to end.
struct Waiting {
    function: Function,
    /// The timer that fails the function.
    deadline: TimerId,
    /// Dropping this ends the function's task.
    _task: oneshot::Sender<Infallible>,
}

/// The task management functions in progress, and the targets' disks.
pub struct Manager {
    targets: Targets,
    waiting: Vec<Waiting>,
    serial: u64,
}

impl Manager {
    pub const fn new(targets: Targets) -> Self {
        Self { targets, waiting: Vec::new(), serial: 0 }
    }

    /// Sets the disk of a target, or that it has none.
    pub fn set_target(&mut self, target: u8, nexus: Option<Arc<Nexus>>) {
        self.targets[usize::from(target)] = nexus;
    }

    /// Starts the request in `chain`.
    pub fn start(&mut self, head: u16, chain: &mut Chain, guest: &mut GuestQueue, cx: &mut Cx) {
        let kind = chain.take_header::<u32>(guest.sgs.memory());
        let kind = kind.ok().flatten();
        let function = match kind {
            Some(control::TMF) => chain.take_header::<Tmf>(guest.sgs.memory()).ok().flatten(),
            _ => None,
        };
        let address = match kind {
            Some(control::QUERY | control::SUBSCRIBE) => {
                let body = chain.take_header::<Notifications>(guest.sgs.memory());
                body.ok().flatten().map(|body| body.address)
            }
            _ => None,
        };
        let mut list = guest.sgs.begin(head);
        let placed = chain.writable().iter().all(|p| list.push(p.addr, p.len).is_ok());
        if !placed || chain.writable().is_empty() {
            guest.complete_unanswerable(head);
            return;
        }
        if let Some(function) = function {
            self.manage(&function, head, guest, cx);
        } else if let Some(address) = address {
            // The device offers no asynchronous notifications: the set of events in the answer is empty.
            let known = address.target().is_some_and(|(t, _)| self.targets[usize::from(t)].is_some());
            let response = if known { Response::Ok } else { Response::BadTarget };
            answer(head, &[0, 0, 0, 0, response as u8], guest);
        } else {
            answer(head, &[Response::Failure as u8], guest);
        }
    }

    fn manage(&mut self, function: &Tmf, head: u16, guest: &mut GuestQueue, cx: &mut Cx) {
        let nexus = match function.address.target() {
            Some((target, unit)) => match &self.targets[usize::from(target)] {
                Some(nexus) if unit == Some(nexus.unit()) => Arc::clone(nexus),
                Some(_) => return answer(head, &[Response::IncorrectLun as u8], guest),
                None => return answer(head, &[Response::BadTarget as u8], guest),
            },
            None => return answer(head, &[Response::BadTarget as u8], guest),
        };
        let own = |tag| TaskFilter::Nexus(nexus.number(), tag);
        let work = match function.function {
            tmf::ABORT_TASK => Work::Abort(own(Some(function.tag))),
            tmf::ABORT_TASK_SET | tmf::NEXUS_RESET => Work::Abort(own(None)),
            tmf::CLEAR_TASK_SET => Work::Abort(TaskFilter::All),
            tmf::UNIT_RESET => Work::Reset,
            tmf::QUERY_TASK => Work::Count(own(Some(function.tag))),
            tmf::QUERY_TASK_SET => Work::Count(own(None)),
            _ => return answer(head, &[Response::Rejected as u8], guest),
        };
        if self.waiting.len() == WAITING_MAX {
            return answer(head, &[Response::Failure as u8], guest);
        }
        self.begin(work, nexus, head, guest.id, cx);
    }

    fn begin(&mut self, work: Work, nexus: Arc<Nexus>, head: u16, id: RootId, cx: &mut Cx) {
        self.serial += 1;
        let (function, local) = ((head, self.serial), cx.local().clone());
        let deadline = move |cx: &mut Cx| end(id, function, Response::Failure, cx);
        let deadline = cx.call_at(cx.now().after(DEADLINE), deadline);
        let (task, is_over) = oneshot::channel();
        self.waiting.push(Waiting { function, deadline, _task: task });
        let task = async move {
            let response = work.carry_out(nexus.lun(), is_over).await;
            local.defer(move |cx| end(id, function, response, cx));
        };
        cx.local().spawn(task).detach();
    }

    /// Answers a function, unless it has been answered before, for example at its deadline.
    fn ended(&mut self, function: Function, response: Response, guest: &mut GuestQueue, cx: &mut Cx) {
        if let Some(at) = self.waiting.iter().position(|waiting| waiting.function == function) {
            cx.cancel_timer(self.waiting.swap_remove(at).deadline);
            answer(function.0, &[response as u8], guest);
            guest.publish(cx);
            cx.wake(guest.id);
        }
    }

    /// The queue stops: fails all waiting functions.
    pub fn give_up(&mut self, guest: &mut GuestQueue, cx: &mut Cx) {
        for Waiting { function, deadline, .. } in self.waiting.drain(..) {
            cx.cancel_timer(deadline);
            answer(function.0, &[Response::Failure as u8], guest);
        }
    }
}

/// The work of a function.
enum Work {
    Abort(TaskFilter),
    Reset,
    Count(TaskFilter),
}

impl Work {
    /// Does the work. Fails if the sender of `is_over` is dropped before the commands have ended.
    async fn carry_out(self, lun: &Lun, is_over: oneshot::Receiver<Infallible>) -> Response {
        let done = match self {
            Self::Abort(which) => unless_over(is_over, lun.abort(which)).await.map(|_| Response::Ok),
            Self::Reset => {
                let begun = async {
                    lun.abort(TaskFilter::All).await;
                    lun.begin_reset().await
                };
                match unless_over(is_over, begun).await {
                    Some(reset) => {
                        // Run to its end, so that the stored state and the active state agree. Only one reset runs at a time.
                        reset.carry_out().await;
                        Some(Response::Ok)
                    }
                    None => None,
                }
            }
            Self::Count(which) => {
                let response = |count| if count > 0 { Response::Succeeded } else { Response::Ok };
                unless_over(is_over, lun.count(which)).await.map(response)
            }
        };
        done.unwrap_or(Response::Failure)
    }
}

/// Runs `work` until it ends or the sender of `is_over` is dropped. Returns the result of `work` if that ended first.
async fn unless_over<T>(
    mut is_over: oneshot::Receiver<Infallible>,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = pin!(work);
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(result) => Poll::Ready(Some(result)),
        Poll::Pending => Pin::new(&mut is_over).poll(context).map(|_| None),
    })
    .await
}

/// Answers a function of the control queue `id`, if both still exist.
fn end(id: RootId, function: Function, response: Response, cx: &mut Cx) {
    if let Some(queue) = cx.root::<Queue>(id) {
        let mut queue = queue.borrow_mut();
        let (manager, guest) = queue.manager();
        manager.ended(function, response, guest, cx);
    }
}

/// Writes the answer of a request, as much of it as fits, and completes the chain.
fn answer(head: u16, bytes: &[u8], guest: &mut GuestQueue) {
    let all = guest.sgs.sgl(head);
    let len = bytes.len().min(all.len() as usize);
    all.write(0, &bytes[..len]);
    guest.complete(head, len as u32, |_| 0..len as u32);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::{Context, Waker};

    #[test]
    fn a_failed_function_ends_its_task() {
        let (task, is_over) = oneshot::channel();
        let (commands, ended) = oneshot::channel::<()>();
        let mut waits = Box::pin(unless_over(is_over, ended));
        let mut context = Context::from_waker(Waker::noop());
        assert!(waits.as_mut().poll(&mut context).is_pending() && !commands.is_canceled());
        drop(task);
        assert_eq!(waits.as_mut().poll(&mut context), Poll::Ready(None));
        drop(waits);
        assert!(commands.is_canceled(), "the function's task ends with it");
    }
}
