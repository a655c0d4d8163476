//! How hosts prove who they are: the commands Authentication Send and Authentication Receive, before a queue takes others, and
//! again during an association when the host likes, on the admin queue or on an I/O queue, which sends them here. Control
//! context; powers are computed on threads that may block, and few at a time.

use crate::queue::IoQueue;
use crate::reservation::Asked;
use crate::target::Inner;
use aryk_log_limit::limited;
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::chap::{
    Allowed, Controller, Failure, MESSAGE_MAX, PROTOCOL, Parties, Progress, Secrets,
};
use aryk_nvme_fabrics::command::Command;
use aryk_reactor::Cx;
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

    /// Why it has failed, also if the host has not been told yet.
    pub fn failure(&self) -> Option<Failure> {
        self.side.as_ref().and_then(Controller::failure)
    }

    /// Whether it goes on with the next message: one that has failed does not begin again.
    pub fn is_under_way(&self) -> bool {
        self.progress() == Progress::Pending || self.failure().is_some()
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
    /// queue: when it has been told why, or after a while in which it has not asked.
    pub async fn authenticate_queue(self: Rc<Self>, asked: Asked) {
        let Asked { host, qid, queue, slot, entry, len, data, .. } = asked;
        let place = &host.place;
        let begun = self.with_queue(place, qid, &queue, |queue| queue.proof.take()).flatten();
        let had_failed = begun.as_ref().is_some_and(|proof| proof.failure().is_some());
        let command = Command::decode(&entry);
        let begins = !begun.as_ref().is_some_and(Authentication::is_under_way)
            && matches!(command, Ok(Command::AuthenticationSend { .. }));
        let proof = if begins { self.secrets_of(place).map(Authentication::new) } else { begun };
        let (answer, failure, is_told) = match (command, proof) {
            (Ok(command), Some(mut proof)) => {
                let answer = proof.execute(&self, command, &data, len).await;
                let (failure, is_told) = (proof.failure(), matches!(proof.progress(), Progress::Failed(_)));
                // A queue that has ended needs none, nor does the next one with its identifier.
                self.with_queue(place, qid, &queue, |queue| queue.proof = Some(proof));
                (answer, failure, is_told)
            }
            // The host need not authenticate.
            (command, _) => (command.and(Err(Code::INVALID_FIELD)), None, false),
        };
        if let Some(failure) = failure.filter(|_| !had_failed) {
            self.failures.set(self.failures.get() + 1);
            let subsystem = &place.subsystem;
            limited!(self.lines, warn, %subsystem, qid, %failure, "a host has not proved who it is: its queue ends");
        }
        let follow = move |queue: &mut IoQueue, cx: &mut Cx| {
            queue.answer(slot, answer, cx);
            match failure {
                Some(_) if is_told => queue.close_behind_output(cx),
                Some(_) => queue.refuse(cx),
                None => {}
            }
        };
        // A queue that has ended needs no answer.
        let _ = queue.call(follow).await;
    }
}
