//! The right to derive a key, which a thread gives back while it reads or writes a header: a disk that does not respond must not
//! keep the keys of other disks from being derived. Any thread that may block.

use aryk_luks::Store;
use std::io;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The right to derive a key.
pub(super) struct Permit {
    permit: OwnedSemaphorePermit,
    runtime: Handle,
}

impl Permit {
    /// Needs a tokio runtime.
    pub(super) fn new(permit: OwnedSemaphorePermit) -> Self {
        Self { permit, runtime: Handle::current() }
    }

    /// The store of a thread that derives keys between its accesses. The thread must be none of the runtime's.
    pub(super) fn around(self, store: &mut dyn Store) -> Around<'_> {
        let semaphore = Arc::clone(self.permit.semaphore());
        Around { store, semaphore, permit: Some(self.permit), runtime: self.runtime }
    }
}

/// A store, whose accesses are without the permit.
pub(super) struct Around<'a> {
    store: &'a mut dyn Store,
    semaphore: Arc<Semaphore>,
    permit: Option<OwnedSemaphorePermit>,
    runtime: Handle,
}

impl Around<'_> {
    fn without_permit<R>(&mut self, access: impl FnOnce(&mut dyn Store) -> io::Result<R>) -> io::Result<R> {
        self.permit = None;
        let result = access(self.store);
        let permit = self.runtime.block_on(Arc::clone(&self.semaphore).acquire_owned());
        self.permit = Some(permit.map_err(io::Error::other)?);
        result
    }
}

impl Store for Around<'_> {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.without_permit(|store| store.read_at(offset, buffer))
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.without_permit(|store| store.write_at(offset, data))
    }

    fn sync(&mut self) -> io::Result<()> {
        self.without_permit(|store| store.sync())
    }
}
