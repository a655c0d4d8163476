//! Keys of the kernel's keyring, as `keyctl add user NAME …` creates them. Any context except a reactor's: the kernel may run a
//! program that finds the key.

use crate::SecretBytes;
use std::ffi::CString;
use std::io;

/// Bytes of a key of the type `user`, at most.
const LEN_MAX: usize = 32_767;

/// Reads the key of the type `user` with this description, from the keyrings of this process: its session's, its user's.
///
/// # Errors
/// `ENOKEY`: there is no such key. `EACCES`: this process may not read it. `EPERM`, `ENOSYS`: a sandbox forbids these calls.
pub fn read_kernel_key(name: &str) -> io::Result<SecretBytes> {
    let name = CString::new(name).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: both strings end with a zero; the kernel takes no further information and adds the key to no keyring.
    let serial = unsafe { libc::syscall(libc::SYS_request_key, c"user".as_ptr(), name.as_ptr(), none, 0) };
    if serial < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut key = SecretBytes::zeroed(LEN_MAX);
    let read = libc::c_long::from(libc::KEYCTL_READ);
    // SAFETY: the kernel writes at most `LEN_MAX` bytes to the buffer, which has as many.
    let len = unsafe { libc::syscall(libc::SYS_keyctl, read, serial, key.as_mut_ptr(), LEN_MAX) };
    let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
    if len > LEN_MAX {
        return Err(io::Error::from(io::ErrorKind::FileTooLarge));
    }
    key.truncate(len);
    Ok(key)
}
