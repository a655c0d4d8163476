//! Character devices by which the system's tools (`nvme`, `smartctl`) reach a controller: `/dev/aryk/NAME` for the controller,
//! `/dev/aryk/NAMEnN` for namespace N. The thread owns the devices, so they end with the controller. A tool's command takes the
//! way of any other admin command; before that, `aryk_cuse` refuses what a tool may not send.

use super::{Command, Life, Thread};
use crate::Error;
use crate::shared::Shared;
use aryk_cuse::{
    Access, Answer, Caller, Completion, CuseError, Data, Device, Errno, Node, NvmeDevice, Request,
};
use aryk_nvme::admin;
use aryk_nvme::controller::AdminAnswer;
use aryk_nvme::spec::entry::SubmissionEntry;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::oneshot;

/// The directory of the devices below `/dev`.
const DIRECTORY: &str = "aryk";
/// The most namespaces with a device: each device has a thread.
const NAMESPACES_MAX: usize = 32;

/// The devices of a controller.
pub(super) struct Tools {
    access: Access,
    /// By namespace; `None` is the controller's.
    devices: BTreeMap<Option<u32>, Device>,
}

/// Passes the requests of the tools to the thread. A controller that has ended drops them, and the tools receive `EIO`.
#[derive(Debug)]
pub(crate) struct Owner(pub(crate) Arc<Shared>);

impl NvmeDevice for Owner {
    fn serve(&self, request: Request, caller: Caller, answer: Answer) {
        self.0.send(Command::Tool { request: Box::new(request), caller, answer });
    }
}

impl Thread {
    /// Creates the devices, and returns their names below `/dev`.
    pub(super) fn register_tools(&mut self, access: Access) -> Result<Vec<String>, Error> {
        if self.tools.is_some() {
            return Err(CuseError::Exists(name_of(&self.shared.name, None)).into());
        }
        let device = self.create_device(None, access)?;
        self.tools = Some(Tools { access, devices: BTreeMap::from([(None, device)]) });
        self.update_tools();
        let devices = self.tools.iter().flat_map(|tools| tools.devices.values());
        Ok(devices.map(|device| device.name().to_owned()).collect())
    }

    /// Makes the devices follow the namespaces.
    pub(super) fn update_tools(&mut self) {
        let Some(mut tools) = self.tools.take() else { return };
        let nsids: Vec<u32> = self.shared.info().namespaces.iter().map(|namespace| namespace.nsid).collect();
        tools.devices.retain(|nsid, _| nsid.is_none_or(|nsid| nsids.contains(&nsid)));
        for nsid in nsids.into_iter().take(NAMESPACES_MAX).map(Some) {
            if tools.devices.contains_key(&nsid) {
                continue;
            }
            match self.create_device(nsid, tools.access) {
                Ok(device) => drop(tools.devices.insert(nsid, device)),
                Err(error) => {
                    tracing::warn!(controller = self.shared.name, nsid, %error, "a namespace has no device for tools");
                }
            }
        }
        self.tools = Some(tools);
    }

    fn create_device(&self, nsid: Option<u32>, access: Access) -> Result<Device, CuseError> {
        let owner = Arc::new(Owner(Arc::clone(&self.shared)));
        Device::create(&name_of(&self.shared.name, nsid), Node { nsid, access }, owner)
    }

    /// Begins a tool's request. A task answers it.
    pub(super) fn serve_tool(&mut self, request: Request, caller: Caller, answer: Answer) {
        let controller = &self.shared.name;
        match request {
            Request::Admin(command) => {
                if command.is_change() {
                    let (opcode, uid, pid) = (command.opcode, caller.uid, caller.pid);
                    tracing::warn!(
                        controller,
                        opcode,
                        uid,
                        pid,
                        "a tool sends a command that changes the drive"
                    );
                }
                let command = translate(command);
                if self.is_too_long(&command) {
                    return answer.complete(Err(Errno::MSGSIZE));
                }
                let (reply, received) = oneshot::channel();
                self.admin(&command, reply);
                tokio::task::spawn_local(async move { answer.complete(outcome(received.await)) });
            }
            Request::Reset => {
                tracing::warn!(
                    controller,
                    uid = caller.uid,
                    pid = caller.pid,
                    "a tool resets the NVMe controller"
                );
                let (reply, received) = oneshot::channel();
                self.reset_for(reply);
                tokio::task::spawn_local(async move {
                    let done = received.await.map(|()| Completion::default());
                    answer.complete(done.map_err(|_| Errno::IO));
                });
            }
            Request::Rescan => {
                let Life::Driven(driven) = &mut self.life else { return answer.complete(Err(Errno::AGAIN)) };
                if driven.controller.rescan().is_err() {
                    // The controller resets: the tool may try again.
                    return answer.complete(Err(Errno::AGAIN));
                }
                let (reply, received) = oneshot::channel();
                self.rescans.push(reply);
                tokio::task::spawn_local(async move {
                    let done = received.await.map(|()| Completion::default());
                    answer.complete(done.map_err(|_| Errno::IO));
                });
            }
        }
    }

    /// Whether the controller transfers less by one command.
    fn is_too_long(&self, command: &admin::Command) -> bool {
        let len = match &command.data {
            admin::Data::None => 0,
            admin::Data::FromController(len) => *len,
            admin::Data::ToController(bytes) => bytes.len(),
        };
        let Life::Driven(driven) = &self.life else { return false };
        driven.controller.info().is_some_and(|info| len as u64 > info.transfer_max)
    }
}

fn name_of(controller: &str, nsid: Option<u32>) -> String {
    let suffix = nsid.map_or_else(String::new, |nsid| format!("n{nsid}"));
    format!("{DIRECTORY}/{controller}{suffix}")
}

fn translate(command: aryk_cuse::AdminCommand) -> admin::Command {
    let patience = if command.is_change() { admin::Patience::Long } else { admin::Patience::Normal };
    let [cdw10, cdw11, cdw12, cdw13, cdw14, cdw15] = command.cdw10_15;
    let entry = SubmissionEntry::new(command.opcode, command.nsid)
        .with_cdw10_11(cdw10, cdw11)
        .with_cdw12_13(cdw12, cdw13)
        .with_cdw14_15(cdw14, cdw15);
    let data = match command.data {
        Data::None => admin::Data::None,
        Data::FromController(len) => admin::Data::FromController(len),
        Data::ToController(bytes) => admin::Data::ToController(bytes),
    };
    admin::Command { entry, data, patience }
}

fn outcome(
    received: Result<Result<AdminAnswer, Error>, oneshot::error::RecvError>,
) -> Result<Completion, Errno> {
    match received {
        Ok(Ok(AdminAnswer { status, result, data })) => {
            Ok(Completion { status: status.bits(), result, data })
        }
        // The controller resets, or is away: the tool may try again.
        Ok(Err(Error::NotReady(_))) => Err(Errno::AGAIN),
        // Too many commands are in flight, or a disk is in use.
        Ok(Err(Error::Refused(_) | Error::InUse { .. })) => Err(Errno::BUSY),
        Ok(Err(Error::Forbidden(_))) => Err(Errno::PERM),
        Ok(Err(Error::WrongData { .. })) => Err(Errno::INVAL),
        Ok(Err(_)) | Err(_) => Err(Errno::IO),
    }
}
