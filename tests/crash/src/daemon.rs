//! `arykd` with one disk and one controller. Test tool, the front-end's thread.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aryk_crash_point::Step;
use aryk_guest_tests::process::{Process, Signal, Stdin};
use aryk_pci::Address;
use aryk_rpc_client::Client;
use rustix::process::{Pid, kill_process};
use serde_json::{Value, json};

use crate::ceph::{self, Image};
use crate::content::{self, SECTOR};
use crate::drive;
use crate::encryption;
use crate::load::SECTORS;
use crate::shape::{Device, Mode, Shape};
use crate::volume;

/// Timeout of an orderly shutdown, which waits for requests in flight.
const DRAIN: Duration = Duration::from_secs(20);
/// How long a daemon may take to start.
const START: Duration = Duration::from_secs(10);
const CONTROLLER: &str = "guest";

/// Where the disk's content is.
#[derive(Clone, Debug)]
pub enum Medium {
    /// In a file.
    File(PathBuf),
    /// In the namespace of a drive that `arykd` drives by VFIO.
    Drive(Address),
    /// In an image on a Ceph cluster.
    Ceph(Image),
    /// In a volume of a pool in a file.
    Volume(volume::Image),
}

/// The paths of one life.
#[derive(Debug)]
pub struct Place {
    /// Directory of sockets and logs.
    directory: PathBuf,
    /// The disk's content.
    medium: Medium,
    /// The daemon's program.
    arykd: PathBuf,
    /// The block size of the disk, if it is encrypted.
    encrypted: Option<u32>,
}

impl Place {
    /// Uses `directory` for sockets and logs; fills the disk.
    ///
    /// # Errors
    /// The disk or the directory cannot be written.
    pub fn new(directory: &Path, medium: Medium, arykd: &Path, shape: &Shape) -> Result<Self> {
        let mut sectors: Vec<u8> = (0..SECTORS).flat_map(|sector| content::fill(sector, 0)).collect();
        let encrypted = shape.encrypted.then_some(shape.block_size);
        if let Some(block_size) = encrypted {
            encryption::encrypt(&mut sectors, block_size);
        }
        match &medium {
            Medium::File(image) => {
                std::fs::write(image, sectors).with_context(|| image.display().to_string())?;
            }
            Medium::Drive(address) => drive::fill(*address, &sectors)?,
            Medium::Ceph(image) => image.fill(&sectors)?,
            Medium::Volume(image) => image.fill(&sectors)?,
        }
        std::fs::create_dir_all(directory.join("vhost"))?;
        Ok(Self { directory: directory.to_owned(), medium, arykd: arykd.to_owned(), encrypted })
    }

    /// The vhost-user socket.
    #[must_use]
    pub fn vhost_socket(&self, mode: Mode) -> PathBuf {
        match mode {
            Mode::Server => self.directory.join("vhost").join(CONTROLLER),
            Mode::Client => self.directory.join("front-end"),
        }
    }

    /// The RPC socket.
    #[must_use]
    pub fn rpc(&self) -> PathBuf {
        self.directory.join("rpc")
    }

    /// Reads the disk's content past the daemon; that of an encrypted disk with the key of this name.
    ///
    /// # Errors
    /// The disk cannot be read, or has another length than at its creation.
    pub fn content(&self, key: Option<&str>) -> Result<Vec<u8>> {
        let mut bytes = match &self.medium {
            Medium::File(image) => std::fs::read(image)?,
            Medium::Drive(address) => drive::content(*address)?,
            Medium::Ceph(image) => image.content()?,
            Medium::Volume(image) => image.content()?,
        };
        ensure!(bytes.len() as u64 == SECTORS * SECTOR as u64, "the disk has {} bytes", bytes.len());
        if let (Some(block_size), Some(key)) = (self.encrypted, key) {
            encryption::decrypt(&mut bytes, block_size, key);
        }
        Ok(bytes)
    }
}

/// A running daemon, or a series of them under a supervisor; killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    process: Process,
    supervised: bool,
}

impl Daemon {
    /// Starts the first daemon of a life, and creates its disk and controller.
    ///
    /// # Errors
    /// The daemon cannot be started, or refuses a call.
    pub fn first(place: &Place, shape: &Shape) -> Result<Self> {
        let daemon = Self::spawn(place, None, shape.supervised)?;
        let disk = if shape.encrypted { encryption::STORE } else { "disk" };
        match &place.medium {
            Medium::File(image) => {
                let disk = json!({"name": disk, "filename": image, "block_size": shape.block_size});
                call(&place.rpc(), "bdev_uring_create", &disk)?;
            }
            // The drive accesses the front-end's memory by itself, where a request allows that.
            Medium::Drive(address) => {
                let drive = json!({"name": "drive", "trtype": "PCIe", "traddr": address.to_string(), "nsid": 1,
                    "disk": disk, "dma": "pin"});
                call(&place.rpc(), "bdev_nvme_attach_controller", &drive)?;
            }
            Medium::Ceph(image) => {
                let cluster = json!({"name": "ceph", "config_file": image.conf()});
                call(&place.rpc(), "bdev_rbd_register_cluster", &cluster)?;
                let disk = json!({"name": disk, "cluster_name": "ceph", "pool_name": ceph::POOL,
                    "rbd_name": image.name(), "block_size": shape.block_size});
                call(&place.rpc(), "bdev_rbd_create", &disk)?;
            }
            // The daemon finds the pool on it.
            Medium::Volume(image) => {
                let store =
                    json!({"name": volume::STORE, "filename": image.file(), "block_size": shape.block_size});
                call(&place.rpc(), "bdev_uring_create", &store)?;
            }
        }
        if shape.encrypted {
            encryption::create(&place.rpc())?;
        }
        let disk = if shape.volume { volume::VOLUME } else { "disk" };
        let mut controller = json!({"ctrlr": CONTROLLER, "num_queues": shape.queues});
        if shape.mode == Mode::Client {
            controller["connect"] = json!(place.vhost_socket(Mode::Client));
        }
        match shape.device {
            Device::Blk => {
                controller["dev_name"] = json!(disk);
                call(&place.rpc(), "vhost_create_blk_controller", &controller)?;
            }
            Device::Scsi => {
                controller["delay"] = json!(true);
                call(&place.rpc(), "vhost_create_scsi_controller", &controller)?;
                let target = json!({"ctrlr": CONTROLLER, "scsi_target_num": 0, "bdev_name": disk});
                call(&place.rpc(), "vhost_scsi_controller_add_target", &target)?;
                let start = json!({"ctrlr": CONTROLLER});
                call(&place.rpc(), "vhost_start_scsi_controller", &start)?;
            }
        }
        Ok(daemon)
    }

    /// Starts a daemon with the state of its predecessors; `step`, such as `used:7`, is where it kills itself.
    ///
    /// # Errors
    /// The daemon cannot be started.
    pub fn spawn(place: &Place, step: Option<&str>, supervised: bool) -> Result<Self> {
        let path = |path: PathBuf| path.display().to_string();
        let mut arguments = vec![path(place.arykd.clone()), "-r".into(), path(place.rpc()), "-S".into()];
        arguments.extend([path(place.directory.join("vhost")), "--state-dir".into()]);
        arguments.push(path(place.directory.join("state")));
        arguments.extend(supervised.then(|| "--supervise".into()));
        let moves = step.is_some_and(|step| step.starts_with(Step::Moving.name()));
        if moves {
            arguments.extend(["-m".into(), "0x3".into()]);
        }
        arguments.splice(0..0, step.map(|step| format!("ARYK_CRASH_STEP={step}")));
        let log = place.directory.join("arykd.log");
        let process = Process::spawn(Path::new("env"), &arguments, Stdin::Null, &log)?;
        if moves {
            let socket = place.rpc();
            std::thread::spawn(move || move_queues(&socket));
        }
        Ok(Self { process, supervised })
    }

    /// Whether the daemon has ended, by itself or by [`Daemon::kill`].
    ///
    /// # Errors
    /// Those of `waitpid`.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.process.exited()?.is_some())
    }

    /// Kills the daemon like a crash, and returns at once. A supervisor stays.
    ///
    /// # Errors
    /// The daemon has ended before.
    pub fn kill(&mut self) -> Result<()> {
        if !self.supervised {
            return self.process.signal(Signal::KILL);
        }
        let supervisor = self.process.pid();
        let children = std::fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children"))?;
        let child = children.split_whitespace().next().and_then(|pid| Pid::from_raw(pid.parse().ok()?));
        Ok(kill_process(child.context("the supervisor has no daemon")?, Signal::KILL)?)
    }

    /// Whether a supervisor restarts the daemon.
    #[must_use]
    pub const fn is_supervised(&self) -> bool {
        self.supervised
    }

    /// Waits until the daemon has ended.
    pub fn wait_until_ended(&mut self) {
        self.process.kill();
    }

    /// Ends the daemon by SIGTERM, as an operator does.
    ///
    /// # Errors
    /// The daemon has ended before, or exits with an error.
    pub fn stop(mut self) -> Result<()> {
        self.process.signal(Signal::TERM)?;
        let status = self.process.wait(DRAIN)?;
        ensure!(status.success(), "arykd ended with {status}");
        Ok(())
    }
}

/// Moves all queues of a daemon with two cores from one core to the other, and back, until the daemon has ended. Its
/// successor has one core, and refuses.
fn move_queues(socket: &Path) {
    for round in 0_u64.. {
        let Ok(told) = call(socket, "thread_get_stats", &json!({})) else { return };
        let threads = told["threads"].as_array().into_iter().flatten();
        let ids: Vec<u64> =
            threads.filter(|t| t["name"] != "app_thread").filter_map(|t| t["id"].as_u64()).collect();
        for id in &ids {
            let params = json!({"id": id, "cpumask": format!("{:#x}", 1 << (round % 2))});
            if let Err(error) = call(socket, "thread_set_cpumask", &params)
                && !is_passing(&error.to_string())
            {
                return;
            }
        }
        if ids.is_empty() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Whether the error is temporary: the queue's requests took too long, or the queue has just ended.
fn is_passing(error: &str) -> bool {
    ["-110", "-19"].iter().any(|code| error.contains(&format!("\"code\":{code},")))
}

/// Waits for the daemon's socket, and calls a method that must succeed.
pub(crate) fn call(socket: &Path, method: &str, params: &Value) -> Result<Value> {
    Ok(Client::connect_within(socket, START).context("the RPC socket")?.result(method, params)?)
}
