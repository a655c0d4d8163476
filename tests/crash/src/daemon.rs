//! `arykd` with one disk and one controller. Test tool, the front-end's thread.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::process::{Process, Signal, Stdin};
use serde_json::{Value, json};

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
    setup: Option<JoinHandle<Result<()>>>,
    given_up: Arc<AtomicBool>,
}

impl Daemon {
    /// Starts it, and has its disk and controller made meanwhile; `step`, as `popped:7`, is where it is to kill itself.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn spawn(place: &Place, shape: &Shape, step: Option<&str>) -> Result<Self> {
        let path = |path: PathBuf| path.display().to_string();
        let mut arguments = vec![path(place.arykd.clone()), "-r".into(), path(place.rpc()), "-S".into()];
        arguments.push(path(place.directory.join("vhost")));
        arguments.splice(0..0, step.map(|step| format!("ARYK_CRASH_STEP={step}")));
        let log = place.directory.join("arykd.log");
        let process = Process::spawn(Path::new("/usr/bin/env"), &arguments, Stdin::Null, &log)?;
        let given_up = Arc::new(AtomicBool::new(false));
        let (rpc, calls, until) = (place.rpc(), calls(place, shape), Arc::clone(&given_up));
        let setup = std::thread::spawn(move || {
            calls.iter().try_for_each(|(method, params)| rpc::call(&rpc, method, params, &until).map(drop))
        });
        Ok(Self { process, setup: Some(setup), given_up })
    }

    /// Whether it has ended, by itself or by [`Daemon::kill`].
    ///
    /// # Errors
    /// It could not be set up.
    pub fn has_ended(&mut self) -> Result<bool> {
        if self.process.exited()?.is_some() {
            return Ok(true);
        }
        if let Some(setup) = self.setup.take_if(|setup| setup.is_finished()) {
            let outcome = setup.join().expect("a thread of ours does not panic");
            // It may have died under the last call.
            if outcome.is_err() && !self.dies_soon()? {
                outcome?;
            }
        }
        Ok(false)
    }

    fn dies_soon(&mut self) -> Result<bool> {
        std::thread::sleep(Duration::from_millis(50));
        Ok(self.process.exited()?.is_some())
    }

    /// Kills it, as a crash would, and returns at once.
    ///
    /// # Errors
    /// It has ended before.
    pub fn kill(&mut self) -> Result<()> {
        self.process.signal(Signal::KILL)
    }

    /// Returns once it is gone, and nothing of ours speaks to it.
    pub fn bury(&mut self) {
        self.process.kill();
        self.given_up.store(true, Ordering::Relaxed);
        // Its calls must not reach the next one.
        let _ = self.setup.take().map(JoinHandle::join);
    }

    /// Ends it as an operator does.
    ///
    /// # Errors
    /// It has ended before, or does not end with success.
    pub fn stop(mut self) -> Result<()> {
        self.process.signal(Signal::TERM)?;
        let status = self.process.wait(DRAIN)?;
        ensure!(status.success(), "arykd ended with {status}");
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.bury();
    }
}

/// What makes the disk and the controller.
fn calls(place: &Place, shape: &Shape) -> Vec<(&'static str, Value)> {
    let disk = json!({"name": "disk", "filename": place.image, "block_size": shape.block_size});
    let mut controller = json!({"ctrlr": CONTROLLER, "dev_name": "disk", "num_queues": shape.queues});
    if shape.mode == Mode::Client {
        controller["connect"] = json!(place.meeting_point(Mode::Client));
    }
    vec![("bdev_uring_create", disk), ("vhost_create_blk_controller", controller)]
}
