//! How hosts prove who they are: the commands Authentication Send and Authentication Receive, before a queue takes others, and
//! again during an association when the host likes. Control context; powers are computed on threads that may block, and few at a
//! time.

use crate::target::Inner;
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::chap::{Allowed, Controller, MESSAGE_MAX, PROTOCOL, Parties, Progress, Secrets};
use aryk_nvme_fabrics::command::Command;
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
