//! Protection domains, and memory of VMs that is registered in them. Context: registrations belong on a thread that may block.
//!
//! A registration pins the pages, and gives the other computers of the domain's connections a key to read and write all of it. It
//! lasts until [`Registration::end`], also after the last handle of the domain is dropped.

use crate::CallError;
use crate::manager::Manager;
use crate::verbs::{Mr, access};
use aryk_dma::DmaRange;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

/// A protection domain of a device: the registrations that connections may use. It ends with its last clone, and after its last
/// connection and registration. Cheap to clone.
#[derive(Clone)]
pub struct Domain(Arc<Inner>);

struct Inner {
    pd: *mut c_void,
    manager: Manager,
}

// SAFETY: libibverbs allows calls from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain").finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.manager.free_domain(FreedDomain(self.pd));
    }
}

/// A protection domain without a handle.
pub(crate) struct FreedDomain(pub(crate) *mut c_void);

// SAFETY: libibverbs allows calls from any thread; no one else has it.
unsafe impl Send for FreedDomain {}

/// The keys of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys {
    /// For requests of this computer.
    pub local: u32,
    /// For requests of the other computers of the domain's connections.
    pub remote: u32,
}

impl Domain {
    /// The owner of a new protection domain.
    pub(crate) fn new(pd: *mut c_void, manager: Manager) -> Self {
        Self(Arc::new(Inner { pd, manager }))
    }

    pub(crate) fn pd(&self) -> *mut c_void {
        self.0.pd
    }

    /// Registers memory for reads and writes of the other computers. Blocks while the kernel pins the pages.
    ///
    /// # Errors
    /// libibverbs's: `ENOMEM` beyond the limit of locked memory, `EFAULT` for memory that is not mapped for writes.
    pub fn register(&self, memory: &DmaRange) -> Result<Registration, CallError> {
        let flags = access::LOCAL_WRITE | access::REMOTE_READ | access::REMOTE_WRITE;
        let (first, len) = (memory.addr() as *mut c_void, memory.len() as usize);
        let register = self.0.manager.library().0.ibv_reg_mr;
        // SAFETY: the protection domain exists. The kernel checks that the range is mapped, and keeps its pages until the end of
        // the registration. By the invariant of `aryk_dma`, such memory is accessed by copies only, so that it may change.
        let mr = unsafe { register(self.0.pd, first, len, flags) };
        let mr = CallError::check_pointer("ibv_reg_mr", mr)?;
        Ok(Registration { mr, domain: self.clone() })
    }
}

/// Registered memory, until [`Registration::end`].
#[must_use = "it lasts until its end"]
#[derive(Debug)]
pub struct Registration {
    mr: *mut Mr,
    domain: Domain,
}

// SAFETY: libibverbs allows calls from any thread.
unsafe impl Send for Registration {}

impl Registration {
    /// Its keys.
    pub fn keys(&self) -> Keys {
        // SAFETY: the registration exists until its end.
        let mr = unsafe { &*self.mr };
        Keys { local: mr.lkey, remote: mr.rkey }
    }

    /// Ends it: afterwards no device accesses the memory.
    ///
    /// # Errors
    /// libibverbs's: a device may access the memory for ever.
    pub fn end(self) -> Result<(), CallError> {
        let deregister = self.domain.0.manager.library().0.ibv_dereg_mr;
        // SAFETY: it exists, and is used no more.
        match unsafe { deregister(self.mr) } {
            0 => Ok(()),
            errno => Err(CallError::new("ibv_dereg_mr", errno.wrapping_abs())),
        }
    }
}
