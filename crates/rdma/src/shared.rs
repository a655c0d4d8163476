//! Receives that connections of a device share (SRQ). Any context.
//!
//! A message takes one of them, and arrives at its *place*. The connection that has got the message copies it, and posts the
//! receive again: no connection keeps a place, and the device alone knows which receives are posted. So connections of several
//! reactors share no list, and no lock but the one in the device's driver, once for all receives that a connection posts
//! together.
//!
//! A queue pair that ends may have taken receives whose completions were not polled. The thread posts them again before it
//! destroys the queue pair: at once, every [`RETURN_INTERVAL`], and when the device has said that it takes no more, or after
//! [`LAST_PATIENCE`]. No other completion is lost: the completion queue of each connection has room for all receives.

use crate::CallError;
use crate::endpoint::{link, posted, sges};
use crate::manager::Manager;
use crate::verbs::{Mr, RecvWr, Srq};
use aryk_dma::{Arena, Buffer, Sgl};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// How long a device may take to say that a queue pair takes no more receives. Linux' `rdma_rxe` (6.1) says nothing, and one of
/// several threads that manage connections of a device may take the event of another.
pub(crate) const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// The interval at which the thread posts the receives again that such a queue pair has taken.
pub(crate) const RETURN_INTERVAL: Duration = Duration::from_millis(10);

/// When the other computer sends a message again for which there was no receive: after 0.32 ms, as InfiniBand encodes it. Without
/// that, librdmacm has it wait for 655 ms.
pub(crate) const RESEND_AFTER: u8 = 10;

/// Receives of one message each, which connections of a device share. They end with their last clone and after their last
/// connection. Cheap to clone.
#[derive(Clone)]
pub struct SharedReceives(Arc<Inner>);

struct Inner {
    /// `Some` until it is dropped.
    parts: Option<SharedParts>,
    manager: Manager,
}

/// What shared receives consist of. The thread destroys it.
pub(crate) struct SharedParts {
    pub srq: *mut Srq,
    pub mr: *mut Mr,
    pub arena: Arena,
    /// All places. It is lent.
    pub buffer: Buffer,
    /// The memory of the buffer.
    pub whole: Sgl,
    pub count: u32,
    /// Bytes of a place.
    pub bytes: u32,
}

// SAFETY: libibverbs allows calls from any thread; the memory of places is accessed by copies only.
unsafe impl Send for SharedParts {}
// SAFETY: as above.
unsafe impl Sync for SharedParts {}

impl fmt::Debug for SharedReceives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceives").field("count", &self.count()).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(parts) = self.parts.take() {
            self.manager.free_receives(parts);
        }
    }
}

impl SharedReceives {
    pub(crate) fn new(parts: SharedParts, manager: Manager) -> Self {
        Self(Arc::new(Inner { parts: Some(parts), manager }))
    }

    fn parts(&self) -> &SharedParts {
        self.0.parts.as_ref().expect("present until dropped")
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.parts().count
    }

    pub(crate) fn srq(&self) -> *mut Srq {
        self.parts().srq
    }

    /// The place of a receive.
    ///
    /// # Panics
    /// If there is no such receive.
    pub(crate) fn place(&self, id: u32) -> Sgl {
        let SharedParts { whole, count, bytes, .. } = self.parts();
        assert!(id < *count, "a receive that was posted");
        whole.slice(id * bytes, *bytes)
    }

    /// The key of the places.
    pub(crate) fn key(&self) -> u32 {
        // SAFETY: the registration exists until the parts are destroyed.
        unsafe { (*self.parts().mr).lkey }
    }

    /// Posts receives that no connection has.
    ///
    /// # Errors
    /// libibverbs's.
    pub(crate) fn post(&self, ids: impl Iterator<Item = u32>) -> Result<(), CallError> {
        let mut requests = Vec::new();
        let mut pieces = Vec::new();
        for id in ids {
            pieces.extend(sges(&self.place(id), self.key()));
            requests.push(RecvWr::new(id.into(), 1));
        }
        let first = link(&mut requests, &mut pieces);
        if first.is_null() {
            return Ok(());
        }
        // SAFETY: the requests and their pieces stay in place during the call.
        unsafe { self.post_list(first) }
    }

    /// Posts a list of receives.
    ///
    /// # Errors
    /// libibverbs's.
    ///
    /// # Safety
    /// The requests and their pieces stay in place during the call, and the pieces are places of these receives.
    pub(crate) unsafe fn post_list(&self, first: *mut RecvWr) -> Result<(), CallError> {
        let (srq, mut failed) = (self.srq(), std::ptr::null_mut());
        // SAFETY: the caller's promise. The queue exists, and its memory stays in place until it is destroyed.
        let errno = unsafe { ((*(*srq).context).post_srq_recv)(srq, first, &raw mut failed) };
        posted("ibv_post_srq_recv", errno)
    }
}
