//! The end of the process while librados has clients.
//!
//! `exit` destroys the static objects of Ceph's libraries, which the threads of a client still read: librados then aborts the
//! process, seen as `terminate called after throwing an instance of 'boost::wrapexcept<boost::bad_get>'`. A client whose cluster
//! does not answer cannot be ended before.

use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Clients that librados has.
static CLIENTS: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" {
    /// glibc's `atexit` for functions that take the exit status.
    safe fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

extern "C" fn end_at_once(status: c_int, _: *mut c_void) {
    if CLIENTS.load(Ordering::SeqCst) > 0 {
        // SAFETY: it runs no destructors, and only ends the process.
        unsafe { libc::_exit(status) }
    }
}

/// Makes `exit` end the process without destructors while librados has clients. Called when Ceph's libraries are loaded: `exit`
/// calls the newest functions first, and those that destroy the libraries' objects are older.
pub(crate) fn guard() {
    static GUARD: Once = Once::new();
    // Without memory for it, `exit` may abort.
    GUARD.call_once(|| {
        on_exit(end_at_once, std::ptr::null_mut());
    });
}

/// Counts a client. It has threads until its end has returned.
pub(crate) fn begins() {
    CLIENTS.fetch_add(1, Ordering::SeqCst);
}

/// Notes that a client has ended.
pub(crate) fn has_ended() {
    CLIENTS.fetch_sub(1, Ordering::SeqCst);
}
