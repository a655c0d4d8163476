//! Who may have a file open: locks that QEMU's tools understand, and that outlive a process until its last request has
//! ended. Control context.
//!
//! **The scheme is QEMU's** (`docs/interop` and `block/file-posix.c` there): for each thing that an opener does with an
//! image there is a byte from 100 on, and for each that it does not suffer others to do one from 200 on. An opener takes
//! read locks on its bytes, then looks whether anyone else holds the opposite ones. Two that open at the same time may both
//! give up; that both go on cannot happen.
//!
//! **It is a fence too.** The locks belong to the open file description, which every request in flight holds: those of a
//! process that was killed end with the last of its requests, not before. So there is no lock besides.
//!
//! Who locks the whole file, as `lockf(3)` and Cloud Hypervisor do, has our bytes too, and is kept from them. `flock(2)` is
//! another kind of lock, which the kernel keeps apart from these, and which nobody takes of images: it is not looked at.

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

/// Where the bytes of permissions in use begin, and those of permissions that others are refused.
const USED: i64 = 100;
const REFUSED: i64 = 200;

/// Who else has a file locked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Holder {
    /// This process.
    Ourselves,
    /// Another one.
    Process {
        /// Its number.
        pid: u32,
        /// Its name.
        name: String,
    },
    /// One that we are not allowed to see, or one that has ended and whose last requests are still being carried out.
    Unknown,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ourselves => f.write_str("another disk of this process"),
            Self::Process { pid, name } => write!(f, "`{name}` (process {pid})"),
            Self::Unknown => f.write_str(
                "a process that cannot be seen from here, or the last requests of one that has ended",
            ),
        }
    }
}

/// Why a file cannot be locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockError {
    /// Someone else has it.
    Held,
    /// This file system, or this kernel, has no locks.
    None(Errno),
    /// The kernel refuses, and whether someone else has the file is not known.
    Os(Errno),
}

impl From<Errno> for LockError {
    /// What an answer of `fcntl(2)` to a lock means. One that is not known here may hide another's lock.
    fn from(errno: Errno) -> Self {
        match errno {
            // Others' locks may be of another kind and of other bytes: POSIX has both for one that is in the way.
            Errno::EAGAIN | Errno::EACCES => Self::Held,
            // A server without a lock manager; a file system without locks; a kernel that knows no locks of descriptions.
            Errno::ENOLCK | Errno::EOPNOTSUPP | Errno::EINVAL => Self::None(errno),
            other => Self::Os(other),
        }
    }
}

/// Locks `file` for reading, which others may do too, or for writing. If that fails, it has no lock.
pub(crate) fn lock(file: impl AsFd, writes: bool) -> Result<(), LockError> {
    let locked = try_lock(&file, writes);
    if locked.is_err() {
        // The first error is the one to tell; where there are no locks, there is nothing to give up.
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

/// Gives up all locks of `file`.
pub(crate) fn unlock(file: impl AsFd) -> Result<(), Errno> {
    set(file, libc::F_UNLCK, USED, REFUSED)
}

/// How often a file is in use whose lock is held only as long as it is.
#[derive(Debug, Default)]
pub(crate) struct Uses(Mutex<u32>);

impl Uses {
    /// One more: the first takes the lock, unless someone else has it.
    pub fn enter(&self, file: impl AsFd, writes: bool) -> Result<(), LockError> {
        let mut uses = self.count();
        if *uses == 0 {
            lock(file, writes)?;
        }
        *uses += 1;
        Ok(())
    }

    /// One less: the last gives the lock up. Nothing is in flight any more that was started since [`Self::enter`].
    pub fn leave(&self, file: impl AsFd) {
        let mut uses = self.count();
        *uses -= 1;
        if *uses == 0
            && let Err(errno) = unlock(file)
        {
            tracing::error!(%errno, "a lock cannot be given up");
        }
    }

    fn count(&self) -> MutexGuard<'_, u32> {
        // Nothing panics while it is locked; whoever waits waits for a few system calls, when a disk's use begins or ends.
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
            // A server was asked, and a signal came before its answer.
            Err(Errno::EINTR) => {}
            result => return result.map(drop),
        }
    }
}

/// Whether another description holds a lock on `byte`.
fn is_held(file: impl AsFd, byte: i64) -> Result<bool, Errno> {
    let mut asked = range(libc::F_WRLCK, byte, 1);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut asked))?;
    Ok(i32::from(asked.l_type) != libc::F_UNLCK)
}

/// Who holds a lock on the file `inode` of `device`. The kernel does not tell, so all processes that we may look into are asked.
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
