//! `qemu-storage-daemon` as the back-end: proves the harness without Aryk, and serves for comparison.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};

use crate::process::{Process, Stdin, wait_until};

/// A running `qemu-storage-daemon` that exports one file; killed when dropped.
#[derive(Debug)]
pub struct StorageDaemon {
    process: Process,
    socket: PathBuf,
}

impl StorageDaemon {
    /// Serves `file` with `queues` queues at `peer.sock` in `directory`.
    ///
    /// # Errors
    /// The daemon cannot be started, or refuses the file.
    pub fn start(file: &Path, queues: u16, directory: &Path) -> Result<Self> {
        let socket = directory.join("peer.sock");
        let arguments = [
            "--blockdev".to_owned(),
            format!(
                "driver=file,node-name=d0,filename={},cache.direct=on,aio=io_uring,discard=unmap",
                file.display()
            ),
            "--export".to_owned(),
            format!(
                "type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={},writable=on,num-queues={queues}",
                socket.display()
            ),
        ];
        let program = Path::new("qemu-storage-daemon");
        let process = Process::spawn(program, &arguments, Stdin::Null, &directory.join("peer.log"))?;
        let mut daemon = Self { process, socket };
        wait_until("qemu-storage-daemon's socket", Duration::from_secs(10), || daemon.ready())?;
        Ok(daemon)
    }

    /// The path of its socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    fn ready(&mut self) -> Result<Option<()>> {
        if let Some(status) = self.process.exited()? {
            bail!("qemu-storage-daemon ended: {status}\n{}", self.process.log_tail());
        }
        Ok(self.socket.exists().then_some(()))
    }
}
