//! The test cases: Linux guests use disks that `arykd` serves, while the case disturbs one of them.

mod contrib;
mod disks;
mod encrypted;
mod fence;
mod life;
mod matrix;
mod nvme;
pub mod rdma;
mod recovery;
mod remote;
mod scsi;
mod share;
mod volumes;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::process::tail;
use crate::{Daemon, Disk, Guest, Image, Vm};

/// Timeout of any script in these cases on a busy test machine, so that a hang is found.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(240);

/// What all cases share: the image and the programs.
#[derive(Clone, Debug)]
pub struct Lab {
    /// The guest's image.
    pub image: Image,
    /// The directory of `arykd` and `aryk`.
    pub bin: PathBuf,
    /// The directory of the programs of the tests' build, and of its examples.
    pub tests: PathBuf,
}

/// The body of a case.
type Body = dyn Fn(&Site<'_>) -> Result<()> + Send + Sync;

/// A test case.
pub struct Case {
    /// Its name, with a `/` between group and variant.
    pub name: String,
    body: Box<Body>,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Case").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Case {
    fn new(name: impl Into<String>, body: impl Fn(&Site<'_>) -> Result<()> + Send + Sync + 'static) -> Self {
        Self { name: name.into(), body: Box::new(body) }
    }

    /// Runs the case in an empty directory.
    ///
    /// # Errors
    /// The case's failure, with the end of the daemon's log.
    pub fn run(&self, lab: &Lab) -> Result<()> {
        with_site(lab, |site| (self.body)(site))
    }
}

/// Runs `body` in an empty directory.
///
/// # Errors
/// The failure of `body`, with the end of the daemon's log.
pub(crate) fn with_site<T>(lab: &Lab, body: impl FnOnce(&Site<'_>) -> Result<T>) -> Result<T> {
    let directory = tempfile::tempdir()?;
    let site = Site { lab, directory: directory.path() };
    body(&site).with_context(|| format!("arykd said:\n{}", tail(&directory.path().join("arykd.log"), 20)))
}

/// All cases; with `long`, every point of the matrices.
#[must_use]
pub fn list(long: bool) -> Vec<Case> {
    let mut cases = matrix::cases(long);
    cases.extend(contrib::cases());
    cases.extend(disks::cases());
    cases.extend(encrypted::cases());
    cases.extend(life::cases());
    cases.extend(nvme::cases());
    cases.extend(rdma::cases());
    cases.extend(recovery::cases(long));
    cases.extend(remote::cases());
    cases.extend(scsi::cases(long));
    cases.extend(share::cases());
    cases.extend(fence::cases());
    cases.extend(volumes::cases());
    cases
}

/// The place where one case runs.
pub(crate) struct Site<'a> {
    lab: &'a Lab,
    directory: &'a Path,
}

impl Site<'_> {
    pub(crate) fn daemon(&self, options: &[&str]) -> Result<Daemon> {
        Daemon::start(&self.lab.bin, self.directory, options)
    }

    pub(crate) const fn directory(&self) -> &Path {
        self.directory
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// An example of this project that a guest runs.
    pub(crate) fn example(&self, name: &str) -> PathBuf {
        self.lab.tests.join("examples").join(name)
    }

    /// A program of the tests' build that a guest runs.
    pub(crate) fn tool(&self, name: &str) -> PathBuf {
        self.lab.tests.join(name)
    }

    /// A delivered program that a guest runs.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.lab.bin.join(name)
    }

    /// Creates a disk in a file named after it.
    pub(crate) fn file_disk(&self, daemon: &Daemon, name: &str, size: &str) -> Result<()> {
        let path = self.path(&format!("{name}.img")).display().to_string();
        daemon.aryk(&["disk", "create", name, "--file", &path, "--size", size]).map(drop)
    }

    /// Boots a guest with logs in a directory of its own, so that several may run at once.
    pub(crate) fn boot(&self, vm: &Vm, script: &str) -> Result<Guest> {
        let logs = tempfile::Builder::new().prefix("guest-").tempdir_in(self.directory)?.keep();
        Guest::boot(&self.lab.image, vm, script, &logs)
    }

    /// A daemon with one file-backed disk attached, and a VM that has the disk.
    fn one_disk(&self, queues: u16) -> Result<(Daemon, Vm)> {
        let daemon = self.daemon(&[])?;
        self.file_disk(&daemon, "disk0", "256M")?;
        let socket = daemon.attach("disk0", &[])?;
        Ok((daemon, Vm::with_disks(vec![Disk::new(&socket, queues)])))
    }
}
