//! Events of a function outside of its data path: eventfds that a watcher off the reactors waits for. Any context.

use crate::PciError;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{ReadWriteFlags, preadv2};
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The eventfds of a function's events. Clones share them.
#[derive(Clone, Debug)]
pub struct Events {
    error: Arc<OwnedFd>,
    removal: Arc<OwnedFd>,
}

impl Events {
    /// New eventfds, not blocking, closed on exec.
    ///
    /// # Errors
    /// [`PciError::Os`] if there are too many descriptors.
    pub fn new() -> Result<Self, PciError> {
        let create = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map(Arc::new);
        let create = || create().map_err(|errno| PciError::os("create an eventfd", errno));
        Ok(Self { error: create()?, removal: create()? })
    }

    /// Signalled when the device reports a fatal error (AER), or its server has closed the connection.
    pub fn error(&self) -> BorrowedFd<'_> {
        self.error.as_fd()
    }

    /// Signalled when the kernel or the server asks for the device back: its removal waits until this process closes the
    /// function.
    pub fn removal(&self) -> BorrowedFd<'_> {
        self.removal.as_fd()
    }

    /// Signals [`Events::error`], in place of a device.
    pub fn signal_error(&self) {
        signal(&self.error);
    }

    /// Signals [`Events::removal`], in place of a device.
    pub fn signal_removal(&self) {
        signal(&self.removal);
    }

    /// Whether [`Events::error`] was signalled since the last call.
    pub fn take_error(&self) -> bool {
        take(&self.error)
    }

    /// Whether [`Events::removal`] was signalled since the last call.
    pub fn take_removal(&self) -> bool {
        take(&self.removal)
    }
}

fn signal(fd: &OwnedFd) {
    // A full counter (EAGAIN) is signalled already; nothing else can happen to an eventfd of ours.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

fn take(fd: &OwnedFd) -> bool {
    // Another process may have the same open file, and have cleared O_NONBLOCK. The offset means "none".
    let mut bytes = [0; 8];
    let read = preadv2(fd, &mut [IoSliceMut::new(&mut bytes)], u64::MAX, ReadWriteFlags::NOWAIT);
    read == Ok(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_taken_once() {
        let events = Events::new().unwrap();
        assert!(!events.take_error() && !events.take_removal());
        events.clone().signal_error();
        events.signal_error();
        assert!(events.take_error() && !events.take_error() && !events.take_removal());
        events.signal_removal();
        assert!(events.take_removal() && !events.take_error());
    }
}
