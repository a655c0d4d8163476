//! The buffers that a call of s2n-tls reads from and writes to. Any context.
//!
//! s2n-tls reads and writes by callbacks, each with a pointer that is set once. That pointer leads to a [`Lent`], which leads to
//! the buffers of the current call, and to none between calls.

use s2n_tls::connection::Connection;
use s2n_tls::error::Error;
use std::ffi::c_void;
use std::ptr::NonNull;

/// What the current call has.
#[derive(Default)]
struct Lent {
    /// What was received and not read yet: a slice of the caller's.
    input: Option<NonNull<[u8]>>,
    /// Where bytes to send are added: a vector of the caller's.
    output: Option<NonNull<Vec<u8>>>,
}

/// A connection that uses the buffers of its caller.
pub struct Lending {
    /// Dropped first: it has a pointer to `lent`.
    connection: Connection,
    /// From `Box::into_raw`, and owned by this value.
    lent: NonNull<Lent>,
}

// SAFETY: `lent` is owned by this value, as by a box, and has pointers of another thread's buffers during a call only, which
// borrows this value mutably. A `Connection` can be sent.
unsafe impl Send for Lending {}

impl Lending {
    /// Takes a connection, and sets its callbacks.
    pub fn new(connection: Connection) -> Result<Self, Error> {
        let lent = NonNull::from(Box::leak(Box::new(Lent::default())));
        // From here on, dropping it frees `lent`.
        let mut made = Self { connection, lent };
        made.connection.set_receive_callback(Some(receive))?.set_send_callback(Some(send))?;
        let context = lent.as_ptr().cast::<c_void>();
        // SAFETY: `lent` lives as long as the connection, which is dropped first.
        unsafe { made.connection.set_receive_context(context)?.set_send_context(context)? };
        Ok(made)
    }

    /// Calls `call` with the connection, which reads from `input`, and appends to `output`. Without an output, the connection
    /// finds that it cannot send now. `input` is what is left then.
    pub fn with<T>(
        &mut self,
        input: &mut &[u8],
        output: Option<&mut Vec<u8>>,
        call: impl FnOnce(&mut Connection) -> T,
    ) -> T {
        // SAFETY: only this value has the pointer, beside the callbacks, which run during `call` only.
        unsafe {
            *self.lent.as_ptr() =
                Lent { input: Some(NonNull::from(*input)), output: output.map(NonNull::from) };
        }
        let returned = call(&mut self.connection);
        // SAFETY: as above. What is left of the input is a part of the caller's slice, which is still borrowed.
        unsafe {
            let lent = std::mem::take(&mut *self.lent.as_ptr());
            if let Some(rest) = lent.input {
                *input = rest.as_ref();
            }
        }
        returned
    }

    /// The connection, outside calls that read or write.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }
}

impl Drop for Lending {
    fn drop(&mut self) {
        // The connection must not use the pointer again; freeing a connection neither reads nor writes, but it costs nothing to
        // be sure.
        let _ = self.connection.set_receive_callback(None);
        let _ = self.connection.set_send_callback(None);
        // SAFETY: from `Box::leak` in `new`, and freed here only.
        drop(unsafe { Box::from_raw(self.lent.as_ptr()) });
    }
}

/// Says that a callback cannot go on now.
fn would_block() -> libc::c_int {
    // SAFETY: the function returns a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() = libc::EAGAIN };
    -1
}

/// Copies received bytes to a buffer of s2n-tls.
unsafe extern "C" fn receive(context: *mut c_void, buffer: *mut u8, len: u32) -> libc::c_int {
    // SAFETY: the context is the `Lent` of the connection that `with` calls, and nothing else uses it during the call.
    let lent = unsafe { &mut *context.cast::<Lent>() };
    let Some(input) = lent.input else { return would_block() };
    // SAFETY: `with` borrows the caller's slice for the whole call.
    let input: &[u8] = unsafe { input.as_ref() };
    // A callback returns a positive `int`.
    let len = input.len().min(len as usize).min(libc::c_int::MAX as usize);
    if len == 0 {
        return would_block();
    }
    let (taken, rest) = input.split_at(len);
    // SAFETY: s2n-tls gives a buffer of `len` bytes or more, which is not the caller's slice.
    unsafe { std::ptr::copy_nonoverlapping(taken.as_ptr(), buffer, len) };
    lent.input = Some(NonNull::from(rest));
    len as libc::c_int
}

/// Appends bytes to send.
unsafe extern "C" fn send(context: *mut c_void, buffer: *const u8, len: u32) -> libc::c_int {
    // SAFETY: as in `receive`.
    let lent = unsafe { &mut *context.cast::<Lent>() };
    let Some(mut output) = lent.output else { return would_block() };
    let len = (len as usize).min(libc::c_int::MAX as usize);
    if len == 0 {
        return 0;
    }
    // SAFETY: `with` borrows the caller's vector mutably for the whole call; s2n-tls gives `len` bytes of its own.
    unsafe { output.as_mut().extend_from_slice(std::slice::from_raw_parts(buffer, len)) };
    len as libc::c_int
}
