//! How hosts prove who they are: the commands Authentication Send and Authentication Receive, before a queue takes others, and
//! again during an association when the host likes, on the admin queue or on an I/O queue, which sends them here. Control
//! context; powers are computed on threads that may block, and few at a time.

use crate::association::Live;
use crate::queue::IoQueue;
use crate::reservation::Asked;
use crate::target::Inner;
use aryk_log_limit::limited;
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::chap::{Allowed, Controller, MESSAGE_MAX, PROTOCOL, Parties, Progress, Secrets};
use aryk_nvme_fabrics::command::Command;
use std::rc::Rc;
use std::sync::Arc;
use tokio::task::spawn_blocking;

/// The authentication of one queue.
#[derive(Debug)]
pub(crate) struct Authentication {
    /// `None` while a thread computes.
    side: Option<Controller>,
}

impl Authentication {
    pub fn new((parties, secrets): (Parties, Arc<Secrets>)) -> Self {
        Self { side: Some(Controller::new(secrets, parties, Allowed::default())) }
    }

    pub fn progress(&self) -> Progress {
        self.side.as_ref().map_or(Progress::Pending, Controller::progress)
    }

    /// Executes a command, whose capsule has `message`, or whose host has room for `data_max` bytes. Returns what it returns.
    pub async fn execute(
        &mut self,
        inner: &Inner,
        command: Command,
        message: &[u8],
        data_max: u32,
    ) -> Result<Vec<u8>, Code> {
        match command {
            Command::AuthenticationSend { protocol: PROTOCOL, len }
                if len as usize == message.len() && message.len() <= MESSAGE_MAX =>
            {
                self.receive(inner, message.to_vec()).await;
                Ok(Vec::new())
            }
            Command::AuthenticationReceive { protocol: PROTOCOL, len } if len == data_max => {
                let side = self.side.as_mut().ok_or(Code::COMMAND_SEQUENCE_ERROR)?;
                let mut message = side.send().ok_or(Code::COMMAND_SEQUENCE_ERROR)?;
                if message.len() > len as usize {
                    return Err(Code::INVALID_FIELD);
                }
                message.resize(len as usize, 0);
                Ok(message)
            }
            _ => Err(Code::INVALID_FIELD),
        }
    }

    async fn receive(&mut self, inner: &Inner, message: Vec<u8>) {
        let permit = Arc::clone(&inner.computing).acquire_owned().await;
        let Some(mut side) = self.side.take() else { return };
        let compute = move || {
            let _permit = permit;
            side.receive(&message);
            side
        };
        self.side = spawn_blocking(compute).await.ok();
    }
}

impl Inner {
    /// Executes a command of a host that authenticates again on an I/O queue, and completes it. A host that fails loses the
    /// queue.
    pub async fn authenticate_queue(self: Rc<Self>, asked: Asked) {
        let Asked { host, qid, queue, slot, entry, len, data, .. } = asked;
        let of_queue = |live: &mut Live| live.queues.get_mut(&qid).and_then(|queue| queue.proof.take());
        let begun = self.with_live(&host.place, of_queue).flatten();
        let is_under_way = begun.as_ref().is_some_and(|proof| proof.progress() == Progress::Pending);
        let command = Command::decode(&entry);
        let begins = !is_under_way && matches!(command, Ok(Command::AuthenticationSend { .. }));
        let proof = if begins { self.secrets_of(&host.place).map(Authentication::new) } else { begun };
        let (answer, failure) = match (command, proof) {
            (Ok(command), Some(mut proof)) => {
                let answer = proof.execute(&self, command, &data, len).await;
                let progress = proof.progress();
                let keep = |live: &mut Live| {
                    if let Some(queue) = live.queues.get_mut(&qid) {
                        queue.proof = Some(proof);
                    }
                };
                // A queue that has ended needs none.
                let _ = self.with_live(&host.place, keep);
                let failure = match progress {
                    Progress::Failed(failure) => Some(failure),
                    Progress::Pending | Progress::Authenticated => None,
                };
                (answer, failure)
            }
            // The host need not authenticate.
            (command, _) => (command.and(Err(Code::INVALID_FIELD)), None),
        };
        // A queue that has ended needs no answer.
        let _ = queue.call(move |queue, cx| queue.answer(slot, answer, cx)).await;
        if let Some(failure) = failure {
            self.failures.set(self.failures.get() + 1);
            let subsystem = &host.place.subsystem;
            limited!(self.lines, warn, %subsystem, qid, %failure, "a host has not proved who it is: its queue ends");
            let _ = queue.call(IoQueue::close).await;
        }
    }
}
