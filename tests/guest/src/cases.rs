//! The tests: what a guest does with disks that `arykd` serves, and what happens to either meanwhile.

mod contrib;
mod disks;
mod fence;
mod life;
mod matrix;
mod recovery;
mod scsi;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::process::tail;
use crate::{Daemon, Disk, Guest, Image, Machine};

/// Long enough for any script here on a busy machine; a hang is found in the end.
pub(crate) const PATIENCE: Duration = Duration::from_secs(240);

/// What all cases share.
#[derive(Clone, Debug)]
pub struct Lab {
    /// The guest's image.
    pub image: Image,
    /// The directory of `arykd` and `aryk`.
    pub bin: PathBuf,
}

/// What a case does at its site.
type Body = dyn Fn(&Site<'_>) -> Result<()> + Send + Sync;

/// One test.
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

    /// Runs it in an empty directory.
    ///
    /// # Errors
    /// What went wrong, with the daemon's last words.
    pub fn run(&self, lab: &Lab) -> Result<()> {
        with_site(lab, |site| (self.body)(site))
    }
}

/// Does something in an empty directory.
///
/// # Errors
/// What went wrong, with the daemon's last words.
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
    cases.extend(life::cases());
    cases.extend(recovery::cases(long));
    cases.extend(scsi::cases(long));
    cases.extend(fence::cases());
    cases
}

/// Where one case runs.
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

    /// Creates a disk in a file named after it.
    pub(crate) fn file_disk(&self, daemon: &Daemon, name: &str, size: &str) -> Result<()> {
        let path = self.path(&format!("{name}.img")).display().to_string();
        daemon.aryk(&["disk", "create", name, "--file", &path, "--size", size]).map(drop)
    }

    /// Boots a guest with logs in a directory of its own, so that several may run at once.
    pub(crate) fn boot(&self, machine: &Machine, script: &str) -> Result<Guest> {
        let logs = tempfile::Builder::new().prefix("guest-").tempdir_in(self.directory)?.keep();
        Guest::boot(&self.lab.image, machine, script, &logs)
    }

    /// A daemon with one file-backed disk attached, and a machine that has it.
    fn one_disk(&self, queues: u16) -> Result<(Daemon, Machine)> {
        let daemon = self.daemon(&[])?;
        self.file_disk(&daemon, "disk0", "256M")?;
        let socket = daemon.attach("disk0", &[])?;
        Ok((daemon, Machine::with_disks(vec![Disk::new(&socket, queues)])))
    }
}
