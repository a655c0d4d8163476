//! Admin commands of callers: RPC clients, the system's tools, and this module. All take the same way, so that no caller can
//! break the driver, destroy data of a disk in use, or give the controller too little memory.

use super::{Life, Thread, now};
use crate::Error;
use aryk_cuse::PAGE;
use aryk_cuse::policy::{self, Direction, Verdict};
use aryk_nvme::admin::{Command, Data};
use aryk_nvme::controller::{AdminAnswer, Refused, ResetReason};
use aryk_nvme::spec::opcode::admin as opcode;
use tokio::sync::oneshot;

/// The caller of a command, and the bytes of data that it expects.
pub(super) struct Caller {
    reply: oneshot::Sender<Result<AdminAnswer, Error>>,
    len: usize,
}

impl Caller {
    /// Answers; the caller may be gone.
    pub(super) fn answer(self, answer: Result<AdminAnswer, Error>) {
        let _ = self.reply.send(answer.map(|mut answer| {
            answer.data.truncate(self.len);
            answer
        }));
    }
}

/// What a command does that changes namespaces under their disks; `None` for other commands.
fn exclusive(command: &Command) -> Option<String> {
    let of = match command.entry.nsid() {
        u32::MAX => "all namespaces".to_owned(),
        nsid => format!("namespace {nsid}"),
    };
    match command.entry.opcode() {
        opcode::FORMAT_NVM => Some(format!("a format of {of}")),
        opcode::SANITIZE => Some("a sanitize command".to_owned()),
        _ => None,
    }
}

/// The command with as much memory as the controller may access. The opcode and the fields say how much it transfers: shorter
/// data, or data of another direction, is refused. A command without a length of its own transfers at most a page.
fn with_memory(command: &Command) -> Result<Command, Error> {
    let code = command.entry.opcode();
    let cdw = [10, 11, 12, 13, 14, 15].map(|n| command.entry.cdw(n));
    let transfer = policy::transfer(code, &cdw);
    let refuse = |reason: &str| Err(Error::WrongData { opcode: code, reason: reason.to_owned() });
    let Some(direction) = policy::direction(code) else {
        return refuse("a transfer in both directions is not supported");
    };
    let is_short = |len: usize| (len as u64) < transfer;
    let short = |len: usize| refuse(&format!("the command transfers {transfer} bytes, not {len}"));
    let data = match (direction, &command.data) {
        (Direction::None, Data::None) => Data::None,
        (Direction::None, _) => return refuse("the command has none"),
        (Direction::FromController, Data::ToController(_)) => {
            return refuse("the controller writes the data");
        }
        (Direction::ToController, Data::FromController(_)) => {
            return refuse("the controller reads the data");
        }
        (_, Data::None) if transfer > 0 => return short(0),
        (_, Data::FromController(len)) if is_short(*len) => return short(*len),
        (_, Data::ToController(bytes)) if is_short(bytes.len()) => return short(bytes.len()),
        (Direction::FromController, Data::None) => Data::FromController(PAGE),
        (Direction::FromController, Data::FromController(len)) => Data::FromController(PAGE.max(*len)),
        (Direction::ToController, Data::None) => Data::ToController(vec![0; PAGE]),
        (Direction::ToController, Data::ToController(bytes)) => {
            let mut bytes = bytes.clone();
            bytes.resize(PAGE.max(bytes.len()), 0);
            Data::ToController(bytes)
        }
    };
    Ok(Command { data, ..command.clone() })
}

impl Thread {
    /// Sends a command, unless it would break the driver, or destroy data of a disk in use.
    pub(super) fn admin(&mut self, command: &Command, reply: oneshot::Sender<Result<AdminAnswer, Error>>) {
        let len = if let Data::FromController(len) = command.data { len } else { 0 };
        let caller = Caller { reply, len };
        let sent = self.allow(command).and_then(|()| with_memory(command));
        let sent = sent.and_then(|command| match &mut self.life {
            Life::Driven(driven) => {
                driven.controller.admin(&command, now().0).map_err(|refused| match refused {
                    Refused::NotReady => Error::NotReady(self.shared.name.clone()),
                    refused => Error::Refused(refused.to_string()),
                })
            }
            Life::Away | Life::Opening(_) => Err(Error::NotReady(self.shared.name.clone())),
        });
        match sent {
            Ok(id) => {
                self.answers.insert(id, caller);
                if let Some(what) = exclusive(command) {
                    self.exclusive = Some((id, what));
                }
            }
            Err(error) => caller.answer(Err(error)),
        }
    }

    /// Refuses a command that must not reach the controller now. While a command runs that changes namespaces, disks are not
    /// opened.
    fn allow(&self, command: &Command) -> Result<(), Error> {
        let opcode = command.entry.opcode();
        match policy::verdict(opcode, command.entry.cdw(10)) {
            Verdict::Never => return Err(Error::Forbidden(opcode)),
            Verdict::Read => return Ok(()),
            Verdict::Change => {}
        }
        if exclusive(command).is_some()
            && let Some((_, running)) = &self.exclusive
        {
            // Its end resets the controller, which would interrupt the other.
            return Err(Error::Refused(format!("{running} is running: repeat the command after its end")));
        }
        match self.disks.user() {
            Some(user) if policy::may_destroy(opcode) => Err(Error::InUse { opcode, user }),
            _ => Ok(()),
        }
    }

    /// A command that changes namespaces is over: what they are now is read by a reset.
    pub(super) fn end_exclusive(&mut self, id: u64) {
        if self.exclusive.as_ref().is_some_and(|(running, _)| *running == id) {
            self.exclusive = None;
            self.reset(ResetReason::Request);
        }
    }
}
