//! Whether a front-end shares the memory that it announces. Control context; the looking is done on a thread of its own.
//!
//! QEMU's `memory-backend-memfd,share=off` gives us a memfd like any other, but maps it privately: what the guest writes never
//! reaches the file, and its queues stay empty for ever without an error anywhere. The kernel's list of the front-end's mappings
//! tells, where we may read it.

use crate::memory::FileId;
use rustix::fs::{major, minor};
use std::collections::BTreeSet;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

/// Looks at one front-end's mappings at most. Each costs it some milliseconds of its memory lock.
const LOOKS_MAX: u32 = 16;

/// What is known of one front-end's mappings.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// Process of the front-end, as the socket knows it.
    pid: Option<i32>,
    /// Files that have been looked for.
    known: BTreeSet<FileId>,
    looks: u32,
    /// Finds out whether one of the files is mapped privately.
    looking: Option<JoinHandle<bool>>,
}

impl Sharing {
    pub(crate) fn of(stream: &UnixStream) -> Self {
        // 0 stands for a process of another PID namespace.
        let pid = stream.peer_cred().ok().and_then(|peer| peer.pid()).filter(|&pid| pid > 0);
        Self { pid, ..Self::default() }
    }

    /// The process of the front-end.
    pub(crate) const fn pid(&self) -> Option<i32> {
        self.pid
    }

    /// Looks, if there are files among these that are new.
    pub(crate) fn look(&mut self, files: impl Iterator<Item = FileId>) {
        let Some(pid) = self.pid.filter(|_| self.looking.is_none() && self.looks < LOOKS_MAX) else { return };
        let new: Vec<FileId> = files.filter(|file| !self.known.contains(file)).collect();
        if new.is_empty() {
            return;
        }
        self.known.extend(&new);
        self.looks += 1;
        self.looking = Some(tokio::task::spawn_blocking(move || {
            // We may not look at a process of another user.
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
            new.iter().any(|file| is_private(&maps, *file))
        }));
    }

    /// Waits until a look has found memory that is not shared; for ever, if none does. Cancelling the future loses nothing.
    pub(crate) async fn found_private(&mut self) {
        if let Some(looking) = &mut self.looking {
            let found = looking.await;
            self.looking = None;
            if found.is_ok_and(|private| private) {
                // Once is enough.
                self.looks = LOOKS_MAX;
                return;
            }
        }
        std::future::pending().await
    }
}

/// Whether a file is mapped, and nowhere shared. `maps` is what the kernel gives as `/proc/PID/maps`.
fn is_private(maps: &str, (device, inode): FileId) -> bool {
    let (device, inode) = (format!("{:02x}:{:02x}", major(device), minor(device)), inode.to_string());
    let shared = maps.lines().filter_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let rights = fields.next()?;
        let is_it = fields.nth(1)? == device && fields.next()? == inode;
        is_it.then(|| rights.ends_with('s'))
    });
    let mut seen = shared.peekable();
    seen.peek().is_some() && !seen.any(|shared| shared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::makedev;

    const MAPS: &str = "\
7f0000000000-7f0040000000 rw-p 00000000 00:01 1043                       /memfd:memory-backend-memfd (deleted)
7f0040000000-7f0080000000 rw-s 00000000 00:01 1044                       /memfd:memory-backend-memfd (deleted)
7f0080000000-7f0080001000 r--p 00000000 00:01 1044                       /memfd:memory-backend-memfd (deleted)
7f0090000000-7f0090001000 rw-p 00000000 103:02 1045                      /usr/lib/a file with spaces
7f00a0000000-7f00a0001000 rw-p 00000000 00:00 0
7f00b0000000-7f00b0001000 rw-p 00000000 00:00 0                          [heap]
";

    #[test]
    fn the_kernels_list_is_read() {
        let file = |major, minor, inode| (makedev(major, minor), inode);
        assert!(is_private(MAPS, file(0, 1, 1043)));
        assert!(!is_private(MAPS, file(0, 1, 1044)), "shared in one place");
        assert!(is_private(MAPS, file(0x103, 2, 1045)));
        assert!(!is_private(MAPS, file(0, 2, 1043)), "another device");
        assert!(!is_private(MAPS, file(0, 1, 104)), "not mapped");
        for garbage in ["", "\n\n", "7f00 rw-p", "7f00 rw-p 0 00:01", "a b c d e f", "\u{fffd} \u{fffd}"] {
            assert!(!is_private(garbage, file(0, 1, 1043)), "{garbage:?}");
        }
    }

    #[test]
    fn a_program_is_mapped_privately_and_memory_of_a_guest_is_not() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        runtime.block_on(async {
            let (ours, _theirs) = UnixStream::pair().expect("socketpair");
            let id = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
            let memory = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
            rustix::fs::ftruncate(&memory, 4096).expect("ftruncate");
            let _mapping =
                aryk_dma::Mapping::shared(std::os::fd::AsFd::as_fd(&memory), 0, 4096).expect("map");
            let shared = id(rustix::fs::fstat(&memory).expect("fstat"));
            let program = id(rustix::fs::stat("/proc/self/exe").expect("stat"));
            let patience = std::time::Duration::from_millis(300);

            let mut sharing = Sharing::of(&ours);
            sharing.look([shared].into_iter());
            let found = tokio::time::timeout(patience, sharing.found_private()).await;
            assert!(found.is_err(), "it is shared");
            sharing.look([shared, program].into_iter());
            let found = tokio::time::timeout(patience * 10, sharing.found_private()).await;
            found.expect("this program is mapped privately");
            sharing.look([(0, 0)].into_iter());
            assert!(sharing.looking.is_none(), "once is enough");
        });
    }
}
