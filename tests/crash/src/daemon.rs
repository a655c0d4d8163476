//! `arykd` with one disk and one controller. Test tool, the front-end's thread.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::process::{Process, Signal, Stdin};
use serde_json::json;

use crate::content::{self, SECTOR};
use crate::load::SECTORS;
use crate::rpc;
use crate::shape::{Mode, Shape};

/// An orderly end waits for what runs.
const DRAIN: Duration = Duration::from_secs(20);
const CONTROLLER: &str = "blk";

/// Where everything of one life is.
#[derive(Debug)]
pub struct Place {
    /// Sockets and logs.
    directory: PathBuf,
    /// The disk.
    image: PathBuf,
    /// The program.
    arykd: PathBuf,
}

impl Place {
    /// Sockets and logs in `directory`; the disk, which is made here, in `disks`.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn new(directory: &Path, disks: &Path, arykd: &Path) -> Result<Self> {
        let image = disks.join("crash.img");
        let sectors: Vec<u8> = (0..SECTORS).flat_map(|sector| content::fill(sector, 0)).collect();
        std::fs::write(&image, sectors).with_context(|| image.display().to_string())?;
        std::fs::create_dir_all(directory.join("vhost"))?;
        Ok(Self { directory: directory.to_owned(), image, arykd: arykd.to_owned() })
    }

    /// Where the front-end and the daemon meet.
    #[must_use]
    pub fn meeting_point(&self, mode: Mode) -> PathBuf {
        match mode {
            Mode::Server => self.directory.join("vhost").join(CONTROLLER),
            Mode::Client => self.directory.join("front-end"),
        }
    }

    fn rpc(&self) -> PathBuf {
        self.directory.join("rpc")
    }

    /// What is on the disk, as any other program reads it.
    ///
    /// # Errors
    /// It cannot be read, or has another length than it was made with.
    pub fn image(&self) -> Result<Vec<u8>> {
        let bytes = std::fs::read(&self.image)?;
        ensure!(bytes.len() as u64 == SECTORS * SECTOR as u64, "the disk has {} bytes", bytes.len());
        Ok(bytes)
    }
}

/// A running daemon; killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    process: Process,
}

impl Daemon {
    /// Starts it, with its disk and controller.
    ///
    /// # Errors
    /// It does not start, or refuses.
    pub fn start(place: &Place, shape: &Shape) -> Result<Self> {
        let path = |path: PathBuf| path.display().to_string();
        let arguments =
            ["-r".to_owned(), path(place.rpc()), "-S".to_owned(), path(place.directory.join("vhost"))];
        let log = place.directory.join("arykd.log");
        let process = Process::spawn(&place.arykd, &arguments, Stdin::Null, &log)?;
        let disk = json!({"name": "disk", "filename": place.image, "block_size": shape.block_size});
        rpc::call(&place.rpc(), "bdev_uring_create", &disk)?;
        let mut controller = json!({"ctrlr": CONTROLLER, "dev_name": "disk", "num_queues": shape.queues});
        if shape.mode == Mode::Client {
            controller["connect"] = json!(place.meeting_point(Mode::Client));
        }
        rpc::call(&place.rpc(), "vhost_create_blk_controller", &controller)?;
        Ok(Self { process })
    }

    /// Ends it as an operator does.
    ///
    /// # Errors
    /// It has ended before, or does not end with success.
    pub fn stop(mut self) -> Result<()> {
        self.process.signal(Signal::TERM).with_context(|| self.last_words())?;
        let status = self.process.wait(DRAIN)?;
        ensure!(status.success(), "arykd ended with {status}\n{}", self.last_words());
        Ok(())
    }

    /// What it logged last.
    #[must_use]
    pub fn last_words(&self) -> String {
        self.process.last_words()
    }
}
