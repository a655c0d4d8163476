//! Locks of files: QEMU's tools understand them, and they outlive a process until its last request has ended. Control
//! context.
//!
//! **The scheme is QEMU's** (`docs/interop` and `block/file-posix.c` there): each permission that an opener uses on an image
//! has a byte from 100 on, and each permission that it denies to other openers has a byte from 200 on. An opener takes read
//! locks on its bytes, then checks whether another opener holds the opposite bytes. Two openers at the same time may both fail;
//! they cannot both succeed.
//!
//! **The locks are a fence too.** They belong to the open file description, which every request in flight holds: the locks of a
//! killed process end with the last of its requests, not before. So no other lock is needed.
//!
//! A lock of the whole file, as `lockf(3)` and Cloud Hypervisor take it, covers the bytes of these locks too, so each excludes
//! the other. `flock(2)` is another kind of lock, which the kernel keeps separate; no program that uses images takes it, and it
//! is not checked.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use std::fmt;
use std::fs;
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A permission of QEMU's, by its bit number.
#[derive(Clone, Copy)]
enum Permission {
    ConsistentRead = 0,
    Write = 1,
    WriteUnchanged = 2,
    Resize = 3,
}

use Permission::{ConsistentRead, Resize, Write, WriteUnchanged};

/// The first byte of the permissions that an opener uses, and of those that it denies to others.
const USED: i64 = 100;
const REFUSED: i64 = 200;

/// The holder of a lock of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Holder {
    /// Another disk of this process.
    Ourselves,
    /// Another process.
    Process {
        /// The process ID.
        pid: u32,
        /// The name of its command.
        name: String,
    },
    /// A process that this process may not inspect, or a process that has ended and whose last requests are still in flight.
    Unknown,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ourselves => f.write_str("another disk of this process"),
            Self::Process { pid, name } => write!(f, "`{name}` (process {pid})"),
            Self::Unknown => f.write_str(
                "a process that arykd cannot inspect, or the last requests of a process that has ended",
            ),
        }
    }
}

/// The reason for which a file cannot be locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockError {
    /// Another opener has locked the file.
    Held,
    /// This file system, or this kernel, does not support the locks.
    None(Errno),
    /// The kernel returned an error, and whether another opener has locked the file is unknown.
    Os(Errno),
}

impl From<Errno> for LockError {
    /// Classifies an error of `fcntl(2)` for a lock. An unknown errno may hide a lock of another opener.
    fn from(errno: Errno) -> Self {
        match errno {
            // Another opener's lock may be of another kind and of other bytes: POSIX allows both errors for a conflicting lock.
            Errno::EAGAIN | Errno::EACCES => Self::Held,
            // A server without a lock manager; a file system without locks; a kernel without open file description locks.
            Errno::ENOLCK | Errno::EOPNOTSUPP | Errno::EINVAL => Self::None(errno),
            other => Self::Os(other),
        }
    }
}

/// Locks `file` for reading, which other openers may do too, or for writing. On an error `file` holds no lock.
pub(crate) fn lock(file: impl AsFd, writes: bool) -> Result<(), LockError> {
    let locked = try_lock(&file, writes);
    if locked.is_err() {
        // The first error is reported; where locks are not supported there is none to release.
        let _ = unlock(&file);
    }
    locked
}

fn try_lock(file: &impl AsFd, writes: bool) -> Result<(), LockError> {
    let (used, refused): (&[_], &[_]) = if writes {
        (&[ConsistentRead, Write, WriteUnchanged, Resize], &[Write, WriteUnchanged, Resize])
    } else {
        (&[ConsistentRead], &[Write, Resize])
    };
    let mine = used.iter().map(|&p| USED + p as i64).chain(refused.iter().map(|&p| REFUSED + p as i64));
    for byte in mine {
        set(file, libc::F_RDLCK, byte, 1)?;
    }
    let theirs = used.iter().map(|&p| REFUSED + p as i64).chain(refused.iter().map(|&p| USED + p as i64));
    for byte in theirs {
        if is_held(file, byte)? {
            return Err(LockError::Held);
        }
    }
    Ok(())
}

/// Releases all locks of `file`.
pub(crate) fn unlock(file: impl AsFd) -> Result<(), Errno> {
    set(file, libc::F_UNLCK, USED, REFUSED)
}

/// Counts the users of a file that is locked only while it is in use.
#[derive(Debug, Default)]
pub(crate) struct Uses(Mutex<u32>);

impl Uses {
    /// Adds a user: the first one takes the lock, and fails if another opener has it.
    pub fn enter(&self, file: impl AsFd, writes: bool) -> Result<(), LockError> {
        let mut uses = self.count();
        if *uses == 0 {
            lock(file, writes)?;
        }
        *uses += 1;
        Ok(())
    }

    /// Removes a user: the last one releases the lock. No request that was started since [`Self::enter`] is in flight.
    pub fn leave(&self, file: impl AsFd) {
        let mut uses = self.count();
        *uses -= 1;
        if *uses == 0
            && let Err(errno) = unlock(file)
        {
            tracing::error!(%errno, "cannot release the lock of a file");
        }
    }

    fn count(&self) -> MutexGuard<'_, u32> {
        // No holder of the lock panics. A caller waits for a few system calls, when the use of a disk begins or ends.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn range(kind: i32, start: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: len,
        l_pid: 0,
    }
}

fn set(file: impl AsFd, kind: i32, start: i64, len: i64) -> Result<(), Errno> {
    loop {
        match fcntl(&file, FcntlArg::F_OFD_SETLK(&range(kind, start, len))) {
            // A signal arrived while the kernel waited for the answer of a file server.
            Err(Errno::EINTR) => {}
            result => return result.map(drop),
        }
    }
}

/// Whether another open file description holds a lock on `byte`.
fn is_held(file: impl AsFd, byte: i64) -> Result<bool, Errno> {
    let mut conflicting = range(libc::F_WRLCK, byte, 1);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut conflicting))?;
    Ok(i32::from(conflicting.l_type) != libc::F_UNLCK)
}

/// Finds the holder of a lock on the file `inode` of `device`. The kernel does not report it, so this function reads `/proc` of
/// all processes that this process may inspect.
pub(crate) fn holder(device: u64, inode: u64) -> Holder {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let file = format!(" {major:02x}:{minor:02x}:{inode} ");
    let Ok(processes) = fs::read_dir("/proc") else { return Holder::Unknown };
    let pids = processes.flatten().filter_map(|p| p.file_name().to_str()?.parse::<u32>().ok());
    for pid in pids {
        if locks(pid, &file) {
            if pid == std::process::id() {
                return Holder::Ourselves;
            }
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            return Holder::Process { pid, name: name.trim_end().to_owned() };
        }
    }
    Holder::Unknown
}

/// Whether one of the descriptors of `pid` holds a lock on `file`.
fn locks(pid: u32, file: &str) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fdinfo")) else { return false };
    let infos = descriptors.flatten().filter_map(|d| fs::read_to_string(d.path()).ok());
    infos.into_iter().any(|info| info.lines().any(|l| l.starts_with("lock:") && l.contains(file)))
}
