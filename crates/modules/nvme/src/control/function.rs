//! Opening and closing the function of a controller, each on a thread of its own: where a drive was pulled out without the
//! kernel's notice, the kernel resets the function and waits up to a minute for it. The controller's thread answers callers
//! meanwhile.

use super::Command;
use crate::{Error, Location};
use aryk_nvme::controller::{Controller, Options};
use aryk_pci::vfio::{Vfio, VfioFunction};
use aryk_pci::{Address, Function, vfio_user};
use aryk_reactor::Clock;
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot::{self, error::TryRecvError};

/// A function, and its controller, which is being enabled.
pub(super) struct Opened {
    pub(super) function: Arc<dyn Function>,
    pub(super) controller: Controller,
}

/// What a thread has to open a function.
pub(super) struct Opener {
    pub(super) name: String,
    pub(super) location: Location,
    pub(super) options: Options,
    pub(super) vfio: Arc<Vfio>,
}

impl Opener {
    fn open(self) -> Result<Opened, Error> {
        let function: Arc<dyn Function> = match &self.location {
            Location::Pci(address) => Arc::new(self.open_at(*address)?),
            Location::Socket(path) => Arc::new(vfio_user::Client::connect(path)?),
            Location::Model(function) => Arc::clone(function),
        };
        let now = Clock::Monotonic.now();
        let controller = Controller::attach(Arc::clone(&function), self.options, now.0)?;
        Ok(Opened { function, controller })
    }

    fn open_at(&self, address: Address) -> Result<VfioFunction, Error> {
        let function = self.vfio.open(address)?;
        if let Some(file) = function.refused_file() {
            let (controller, file) = (&self.name, file.display());
            tracing::info!(controller, %file, "no permission for the file: the drive is opened by its IOMMU group");
        }
        Ok(function)
    }
}

/// A call to the kernel on a thread of its own. [`Command::CallEnded`] announces its end.
#[derive(Debug)]
pub(super) struct Call<T>(oneshot::Receiver<T>);

impl<T: Send + 'static> Call<T> {
    fn start(
        thread: &str,
        wake: UnboundedSender<Command>,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> std::io::Result<Self> {
        let (sender, result) = oneshot::channel();
        std::thread::Builder::new().name(thread.into()).spawn(move || {
            // A function that is no longer wanted is closed here.
            drop(sender.send(call()));
            // The controller's thread may have ended.
            let _ = wake.send(Command::CallEnded);
        })?;
        Ok(Self(result))
    }

    /// The result, once the call is over. `Ok(None)`: it has panicked, or its result was taken.
    pub(super) fn take(&mut self) -> Result<Option<T>, Running> {
        match self.0.try_recv() {
            Ok(result) => Ok(Some(result)),
            Err(TryRecvError::Empty) => Err(Running),
            Err(TryRecvError::Closed) => Ok(None),
        }
    }

    /// Drops the result on another thread, once the call is over.
    pub(super) fn discard(self, wake: UnboundedSender<Command>) -> Option<Call<()>> {
        // Without a thread, the thread of the call drops the result.
        Call::start("aryk-nvme-close", wake, move || drop(self.0.blocking_recv())).ok()
    }

    /// Waits for the end; at once, if the result was taken.
    pub(super) async fn ended(mut self) {
        // The channel must not be awaited after its result was taken. The result is dropped here.
        if self.take().is_err() {
            let _ = self.0.await;
        }
    }
}

/// The call is not over.
pub(super) struct Running;

/// Begins to open a function.
pub(super) fn open(
    opener: Opener,
    wake: UnboundedSender<Command>,
) -> std::io::Result<Call<Result<Opened, Error>>> {
    Call::start("aryk-nvme-open", wake, move || opener.open())
}

/// Begins to close a function: the last reference to it is among what is dropped.
pub(super) fn close(what: impl Send + 'static, wake: UnboundedSender<Command>) -> Option<Call<()>> {
    // Without a thread it is closed here.
    Call::start("aryk-nvme-close", wake, move || drop(what)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc::unbounded_channel;

    #[test]
    fn a_call_may_be_awaited_before_and_after_its_result_was_taken() {
        for is_taken in [false, true] {
            let (sender, mut commands) = unbounded_channel();
            let mut call = Call::start("test", sender, || 7).unwrap();
            assert!(matches!(commands.blocking_recv(), Some(Command::CallEnded)));
            if is_taken {
                assert_eq!(call.take().ok(), Some(Some(7)));
                assert_eq!(call.take().ok(), Some(None));
            }
            tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(call.ended());
        }
    }
}
