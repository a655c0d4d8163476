//! Detects a front-end that does not share the memory that it announces. Control context; a separate thread reads the mappings.
//!
//! QEMU's `memory-backend-memfd,share=off` passes a memfd like any other, but maps it privately: the guest's writes never reach
//! the file, and its queues stay empty forever without an error. The kernel's list of the front-end's mappings shows this, if
//! this process may read the list.

use crate::memory::FileId;
use rustix::fs::{major, minor};
use std::collections::BTreeSet;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

/// The maximum number of reads of one front-end's mappings. Each read holds the front-end's memory lock for some milliseconds.
const READS_MAX: u32 = 16;

/// The state of the check of one front-end's mappings.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// Process of the front-end, as the socket reports it.
    pid: Option<i32>,
    /// Files that have been checked.
    known: BTreeSet<FileId>,
    reads: u32,
    /// Resolves to whether one of the files is mapped privately.
    reading: Option<JoinHandle<bool>>,
}

impl Sharing {
    pub(crate) fn of(stream: &UnixStream) -> Self {
        // The kernel reports 0 for a process of another PID namespace.
        let pid = stream.peer_cred().ok().and_then(|peer| peer.pid()).filter(|&pid| pid > 0);
        Self { pid, ..Self::default() }
    }

    /// The process of the front-end.
    pub(crate) const fn pid(&self) -> Option<i32> {
        self.pid
    }

    /// Reads the mappings, if some of these files have not been checked.
    pub(crate) fn check(&mut self, files: impl Iterator<Item = FileId>) {
        let Some(pid) = self.pid.filter(|_| self.reading.is_none() && self.reads < READS_MAX) else { return };
        let new: Vec<FileId> = files.filter(|file| !self.known.contains(file)).collect();
        if new.is_empty() {
            return;
        }
        self.known.extend(&new);
        self.reads += 1;
        self.reading = Some(tokio::task::spawn_blocking(move || {
            // This process may lack the permission to read the mappings of another user's process.
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
            new.iter().any(|file| is_private(&maps, *file))
        }));
    }

    /// Waits until a check has found memory that is not shared; forever, if no check does. The future can be cancelled without
    /// loss.
    pub(crate) async fn found_private(&mut self) {
        if let Some(reading) = &mut self.reading {
            let found = reading.await;
            self.reading = None;
            if found.is_ok_and(|private| private) {
                // A single report is enough.
                self.reads = READS_MAX;
                return;
            }
        }
        std::future::pending().await
    }
}

/// Whether a file is mapped, and all of its mappings are private. `maps` is the kernel's `/proc/PID/maps`.
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
    fn mappings_are_parsed() {
        let file = |major, minor, inode| (makedev(major, minor), inode);
        assert!(is_private(MAPS, file(0, 1, 1043)));
        assert!(!is_private(MAPS, file(0, 1, 1044)), "one shared mapping");
        assert!(is_private(MAPS, file(0x103, 2, 1045)));
        assert!(!is_private(MAPS, file(0, 2, 1043)), "another device");
        assert!(!is_private(MAPS, file(0, 1, 104)), "not mapped");
        for garbage in ["", "\n\n", "7f00 rw-p", "7f00 rw-p 0 00:01", "a b c d e f", "\u{fffd} \u{fffd}"] {
            assert!(!is_private(garbage, file(0, 1, 1043)), "{garbage:?}");
        }
    }

    #[test]
    fn a_program_is_mapped_privately_but_guest_memory_is_shared() {
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
            sharing.check([shared].into_iter());
            let found = tokio::time::timeout(patience, sharing.found_private()).await;
            assert!(found.is_err(), "the memory is shared");
            sharing.check([shared, program].into_iter());
            let found = tokio::time::timeout(patience * 10, sharing.found_private()).await;
            found.expect("this program is mapped privately");
            sharing.check([(0, 0)].into_iter());
            assert!(sharing.reading.is_none(), "no further check");
        });
    }
}
