//! A daemon with one SCSI controller, and disks for its targets: what all tests of plugging share. One thread.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::agent::{Agent, News, Task};
use crate::Daemon;
use crate::cases::Site;

/// The only controller.
pub(super) const CONTROLLER: &str = "s0";
/// How soon a call that plugs or unplugs is answered, whatever a guest or a store does. It is far less, but the machine may have other work.
pub(super) const DEADLINE: Duration = Duration::from_secs(2);
/// MiB of a disk at first.
pub(super) const DISK_MIB: u64 = 16;
/// Requests a second of a disk's load: all of them leave the guest time for what else it is asked.
const RATE: u32 = 20;

/// A daemon with a controller that has no disks.
pub(super) struct Bench {
    pub daemon: Daemon,
}

/// A disk, and what is known of it.
#[derive(Debug)]
pub(super) struct Disk {
    pub name: String,
    pub target: Option<u8>,
    pub mib: u64,
    /// It can be given another size.
    pub grows: bool,
    sum: String,
    /// What reads, writes and verifies all the while.
    load: Option<Task>,
}

impl Bench {
    pub fn new(site: &Site<'_>) -> Result<Self> {
        let daemon = site.daemon(&["-m", "0x3"])?;
        daemon.call("vhost_create_scsi_controller", &json!({"ctrlr": CONTROLLER}))?;
        Ok(Self { daemon })
    }

    /// A new disk in a file.
    pub fn file_disk(&self, site: &Site<'_>, name: &str) -> Result<Disk> {
        site.file_disk(&self.daemon, name, &format!("{DISK_MIB}M"))?;
        Ok(Disk::new(name, true))
    }

    /// A new disk in memory.
    pub fn memory_disk(&self, name: &str) -> Result<Disk> {
        self.daemon.aryk(&["disk", "create", name, "--memory", "--size", &format!("{DISK_MIB}M")])?;
        Ok(Disk::new(name, false))
    }

    /// One that there is already.
    pub fn disk(&self, name: &str) -> Disk {
        Disk::new(name, false)
    }

    /// Gives a target a disk; when that was asked for, and how long the answer took.
    pub fn plug(&self, disk: &mut Disk, target: u8) -> Result<(Instant, Duration)> {
        let params = json!({"ctrlr": CONTROLLER, "scsi_target_num": target, "bdev_name": disk.name});
        let begun = Instant::now();
        let (_, took) = self.daemon.call("vhost_scsi_controller_add_target", &params)?;
        disk.target = Some(target);
        Ok((begun, took))
    }

    /// Takes it away again, within the deadline; when that was asked for, and how long the answer took.
    pub fn unplug(&self, disk: &mut Disk) -> Result<(Instant, Duration)> {
        let target = disk.target.take().context("the disk is at no target")?;
        let params = json!({"ctrlr": CONTROLLER, "scsi_target_num": target});
        let begun = Instant::now();
        let (_, took) = self.daemon.call("vhost_scsi_controller_remove_target", &params)?;
        ensure!(took < DEADLINE, "taking {} away was answered after {took:?}", disk.name);
        Ok((begun, took))
    }

    /// Gives a disk another MiB; when that was asked for.
    pub fn grow(&self, disk: &mut Disk) -> Result<Instant> {
        disk.mib += 1;
        let begun = Instant::now();
        self.daemon.call("bdev_uring_resize", &json!({"name": disk.name, "size": disk.mib << 20}))?;
        Ok(begun)
    }
}

impl Disk {
    fn new(name: &str, grows: bool) -> Self {
        Self { name: name.to_owned(), target: None, mib: DISK_MIB, grows, sum: String::new(), load: None }
    }

    /// Its target, which it is at.
    pub fn at(&self) -> Result<u8> {
        self.target.with_context(|| format!("{} is at no target", self.name))
    }

    /// The guest fills it for the first time.
    pub fn prepare(&mut self, agent: &mut Agent) -> Result<()> {
        let target = self.at()?;
        ensure!(agent.run(&format!("lay {target}"))? == "0", "{} cannot be written", self.name);
        self.seal(agent, 0)
    }

    /// The guest writes something new to its begin, which is known from then on.
    pub fn seal(&mut self, agent: &mut Agent, generation: u64) -> Result<()> {
        self.sum = agent.run(&format!("seal {} {}-{generation}", self.at()?, self.name))?;
        ensure!(self.sum.len() == 64, "no sum: {}", self.sum);
        Ok(())
    }

    /// All that the guest has written is there, and of the blocks that it was writing when the disk was taken away, each is whole.
    pub fn check(&self, agent: &mut Agent) -> Result<()> {
        let begun = self.begin_check(agent)?;
        self.end_check(begun, agent)
    }

    /// Begins that; other disks can be looked at meanwhile.
    pub fn begin_check(&self, agent: &mut Agent) -> Result<[Task; 3]> {
        let target = self.at()?;
        let [sum, whole, sectors] =
            ["sum", "whole", "sectors"].map(|verb| agent.begin(&format!("{verb} {target}")));
        Ok([sum?, whole?, sectors?])
    }

    /// Waits for its end.
    pub fn end_check(&self, [sum, whole, sectors]: [Task; 3], agent: &mut Agent) -> Result<()> {
        let sum = agent.end(sum)?;
        ensure!(sum == self.sum, "{} has another content: {sum}, not {}", self.name, self.sum);
        let error = agent.end(whole)?;
        ensure!(error == "0", "{}: a block is not whole: fio's error {error}", self.name);
        let sectors = agent.end(sectors)?;
        ensure!(sectors == (self.mib << 11).to_string(), "{} has {sectors} sectors", self.name);
        Ok(())
    }

    /// The guest begins to write and verify it.
    pub fn load(&mut self, agent: &mut Agent) -> Result<()> {
        self.load = Some(agent.begin(&format!("load {} {RATE}", self.at()?))?);
        Ok(())
    }

    /// It still does, and has found nothing wrong.
    pub fn is_well(&self, agent: &mut Agent) -> Result<()> {
        let Some(load) = self.load else { return Ok(()) };
        if !agent.goes_on(load)? {
            let error = agent.end(load)?;
            anyhow::bail!("{}, which was not touched, has failed: fio's error {error}", self.name);
        }
        Ok(())
    }

    /// It ends well.
    pub fn relieve(&mut self, agent: &mut Agent) -> Result<()> {
        let Some(load) = self.load.take() else { return Ok(()) };
        let target = self.at()?;
        agent.run(&format!("begun {target}"))?;
        agent.run(&format!("stop {target}"))?;
        let error = agent.end(load)?;
        ensure!(error == "0", "{} has failed: fio's error {error}", self.name);
        Ok(())
    }

    /// It fails, since the disk is gone; fio's error.
    pub fn lose(&mut self, agent: &mut Agent) -> Result<Option<String>> {
        let Some(load) = self.load.take() else { return Ok(None) };
        lost(agent, load).map(Some)
    }
}

/// A load of a disk that is gone ends with an error; which it is. Linux gives a removed disk no blocks, so that a read of it may end with nothing instead of
/// failing, and fio then verifies what its buffer held before: EILSEQ. So a load whose errors count is looked at before the disk is taken away.
pub(super) fn lost(agent: &mut Agent, load: Task) -> Result<String> {
    let error = agent.end(load)?;
    ensure!(error != "0" && !error.is_empty(), "the load of a disk that was taken away has ended well");
    Ok(error)
}

/// The guest hears that a target's disk is there, gone or larger; how long that took.
pub(super) fn heard(agent: &mut Agent, news: News, target: u8, since: Instant) -> Result<Duration> {
    let (at, _) = agent.hear(news, target)?;
    Ok(at.saturating_duration_since(since))
}
