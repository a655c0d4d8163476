//! Errors that an operator injects into the commands of a controller, to see what a failing drive would cause. Control context.

use crate::Error;
use crate::control::Command;
use crate::controllers::AttachedController;
use crate::shared::Shared;
use aryk_nvme::inject;
use aryk_nvme::spec::status::Status;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// The commands of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commands {
    /// Admin commands, also the driver's own.
    Admin,
    /// I/O commands of all namespaces.
    Io,
}

/// An error that is injected into commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    /// The opcode of the commands.
    pub opcode: u8,
    /// The status that they get.
    pub status: Status,
    /// `None`: the controller executes the commands, and the status replaces its answer. Otherwise the controller does not get
    /// them, and the status comes after this time, for which no time limit of I/O commands holds.
    pub withheld: Option<Duration>,
    /// Commands that get the status.
    pub times: u32,
}

/// A change of the injections.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Add(Injection),
    /// By opcode.
    Remove(u8),
}

impl Shared {
    /// Changes the injections; the driver and the pairs take them over afterwards.
    pub(crate) fn inject(&self, commands: Commands, change: Change) {
        let controller = &self.name;
        match change {
            Change::Add(Injection { opcode, status, withheld, times }) => tracing::warn!(
                controller, ?commands, opcode, %status, ?withheld, times,
                "an operator injects errors into the commands of the NVMe controller"
            ),
            Change::Remove(opcode) => {
                tracing::warn!(controller, ?commands, opcode, "an operator ends the injection of errors");
            }
        }
        let mut injected = self.injected();
        let list = match commands {
            Commands::Admin => &mut injected.admin,
            Commands::Io => Arc::make_mut(&mut injected.io),
        };
        match change {
            Change::Remove(opcode) => list.remove(opcode),
            Change::Add(Injection { opcode, status, withheld, times }) => {
                let how = withheld.map_or(inject::How::Replace, |after| {
                    inject::How::Withhold(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX))
                });
                let total = Arc::clone(&self.counters.injected);
                list.add(Arc::new(inject::Injection::new(opcode, status, how, times, total)));
            }
        }
    }
}

impl AttachedController {
    /// Injects an error, in place of an earlier one for the same opcode. Commands that are submitted from then on get it. It ends
    /// with the controller.
    ///
    /// # Errors
    /// [`Error::NotReady`] if the controller has ended.
    pub async fn inject(&self, commands: Commands, injection: Injection) -> Result<(), Error> {
        self.change_injections(commands, Change::Add(injection)).await
    }

    /// Ends the injection into commands with this opcode, if there is one.
    ///
    /// # Errors
    /// [`Error::NotReady`] if the controller has ended.
    pub async fn end_injection(&self, commands: Commands, opcode: u8) -> Result<(), Error> {
        self.change_injections(commands, Change::Remove(opcode)).await
    }

    async fn change_injections(&self, commands: Commands, change: Change) -> Result<(), Error> {
        if self.shared.has_ended() {
            return Err(Error::NotReady(self.name().to_owned()));
        }
        // Each part that has taken the change over drops its sender.
        let (applied, mut done) = mpsc::channel::<Infallible>(1);
        self.shared.send(Command::Inject { commands, change, applied });
        done.recv().await;
        Ok(())
    }
}
