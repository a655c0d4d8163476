//! A daemon with one SCSI controller, and disks for its targets: common to all hotplug tests. One thread.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::agent::{Agent, DiskEvent, Task};
use crate::Daemon;
use crate::cases::Site;

/// The only controller.
pub(super) const CONTROLLER: &str = "s0";
/// Timeout of a call that plugs or unplugs, independent of the guest and the store. Calls take much less, but the test machine
/// may have other work.
pub(super) const DEADLINE: Duration = Duration::from_secs(2);
/// Initial size of a disk in MiB.
pub(super) const DISK_MIB: u64 = 16;
/// Requests per second of a disk's load: together they leave the guest time for other commands.
const RATE: u32 = 20;

/// A daemon with a controller that has no disks.
pub(super) struct Bench {
    pub daemon: Daemon,
}

/// A disk, and its expected content.
#[derive(Debug)]
pub(super) struct Disk {
    pub name: String,
    pub target: Option<u8>,
    pub mib: u64,
    /// Whether the disk can be resized.
    pub grows: bool,
    sum: String,
    /// The command that reads, writes and verifies the disk.
    load: Option<Task>,
}

impl Bench {
    pub fn new(site: &Site<'_>) -> Result<Self> {
        let daemon = site.daemon(&["-m", "0x3"])?;
        daemon.call("vhost_create_scsi_controller", &json!({"ctrlr": CONTROLLER}))?;
        Ok(Self { daemon })
    }

    /// Creates a disk in a file.
    pub fn file_disk(&self, site: &Site<'_>, name: &str) -> Result<Disk> {
        site.file_disk(&self.daemon, name, &format!("{DISK_MIB}M"))?;
        Ok(Disk::new(name, true))
    }

    /// Creates a disk in memory.
    pub fn memory_disk(&self, name: &str) -> Result<Disk> {
        self.daemon.aryk(&["disk", "create", name, "--memory", "--size", &format!("{DISK_MIB}M")])?;
        Ok(Disk::new(name, false))
    }

    /// A disk that exists already.
    pub fn disk(&self, name: &str) -> Disk {
        Disk::new(name, false)
    }

    /// Plugs a disk into a target; returns the time and the duration of the call.
    pub fn plug(&self, disk: &mut Disk, target: u8) -> Result<(Instant, Duration)> {
        let params = json!({"ctrlr": CONTROLLER, "scsi_target_num": target, "bdev_name": disk.name});
        let begun = Instant::now();
        let (_, took) = self.daemon.call("vhost_scsi_controller_add_target", &params)?;
        disk.target = Some(target);
        Ok((begun, took))
    }

    /// Unplugs the disk, within the deadline; returns the time and the duration of the call.
    pub fn unplug(&self, disk: &mut Disk) -> Result<(Instant, Duration)> {
        let target = disk.target.take().context("the disk is at no target")?;
        let params = json!({"ctrlr": CONTROLLER, "scsi_target_num": target});
        let begun = Instant::now();
        let (_, took) = self.daemon.call("vhost_scsi_controller_remove_target", &params)?;
        ensure!(took < DEADLINE, "unplugging {} took {took:?}", disk.name);
        Ok((begun, took))
    }

    /// Grows a disk by one MiB; returns the time of the call.
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

    /// The target that the disk is plugged into.
    pub fn at(&self) -> Result<u8> {
        self.target.with_context(|| format!("{} is at no target", self.name))
    }

    /// Makes the guest write the whole verified part for the first time.
    pub fn prepare(&mut self, agent: &mut Agent) -> Result<()> {
        let target = self.at()?;
        ensure!(agent.run(&format!("lay {target}"))? == "0", "{} cannot be written", self.name);
        self.seal(agent, 0)
    }

    /// Makes the guest write new content to the start of the disk, and stores its checksum.
    pub fn seal(&mut self, agent: &mut Agent, generation: u64) -> Result<()> {
        self.sum = agent.run(&format!("seal {} {}-{generation}", self.at()?, self.name))?;
        ensure!(self.sum.len() == 64, "no sum: {}", self.sum);
        Ok(())
    }

    /// Checks that all content that the guest has written is there, and that each block that it was writing during an
    /// unplug is either old or new, never torn.
    pub fn check(&self, agent: &mut Agent) -> Result<()> {
        let begun = self.begin_check(agent)?;
        self.end_check(begun, agent)
    }

    /// Starts that check; other disks can be checked at the same time.
    pub fn begin_check(&self, agent: &mut Agent) -> Result<[Task; 3]> {
        let target = self.at()?;
        let [sum, whole, sectors] =
            ["sum", "whole", "sectors"].map(|verb| agent.begin(&format!("{verb} {target}")));
        Ok([sum?, whole?, sectors?])
    }

    /// Waits for the end of the check.
    pub fn end_check(&self, [sum, whole, sectors]: [Task; 3], agent: &mut Agent) -> Result<()> {
        let sum = agent.end(sum)?;
        ensure!(sum == self.sum, "{} has checksum {sum} instead of {}", self.name, self.sum);
        let error = agent.end(whole)?;
        ensure!(error == "0", "{}: a block is torn or lost: fio's error {error}", self.name);
        let sectors = agent.end(sectors)?;
        ensure!(sectors == (self.mib << 11).to_string(), "{} has {sectors} sectors", self.name);
        Ok(())
    }

    /// Makes the guest start to write and verify the disk.
    pub fn load(&mut self, agent: &mut Agent) -> Result<()> {
        self.load = Some(agent.begin(&format!("load {} {RATE}", self.at()?))?);
        Ok(())
    }

    /// Checks that the load is still running, without an error.
    pub fn check_load(&self, agent: &mut Agent) -> Result<()> {
        let Some(load) = self.load else { return Ok(()) };
        if !agent.goes_on(load)? {
            let error = agent.end(load)?;
            anyhow::bail!("{}, which stayed plugged, failed: fio's error {error}", self.name);
        }
        Ok(())
    }

    /// Ends the load, which must have succeeded.
    pub fn end_load(&mut self, agent: &mut Agent) -> Result<()> {
        let Some(load) = self.load.take() else { return Ok(()) };
        let target = self.at()?;
        agent.run(&format!("begun {target}"))?;
        agent.run(&format!("stop {target}"))?;
        let error = agent.end(load)?;
        ensure!(error == "0", "{} has failed: fio's error {error}", self.name);
        Ok(())
    }

    /// Waits for the end of the load of an unplugged disk, which must have failed; returns fio's error.
    pub fn end_lost_load(&mut self, agent: &mut Agent) -> Result<Option<String>> {
        let Some(load) = self.load.take() else { return Ok(None) };
        lost(agent, load).map(Some)
    }
}

/// Waits for the end of the load of an unplugged disk, which must have failed; returns fio's error. Linux gives a removed
/// disk a size of 0, so that a read may end without data instead of failing, and fio then verifies the old content of its
/// buffer: EILSEQ. So a load whose errors matter is checked before the unplug.
pub(super) fn lost(agent: &mut Agent, load: Task) -> Result<String> {
    let error = agent.end(load)?;
    ensure!(error != "0" && !error.is_empty(), "the load of an unplugged disk succeeded");
    Ok(error)
}

/// Waits until the guest reports a target's disk as added, removed or resized; returns the time since `since`.
pub(super) fn heard(agent: &mut Agent, news: DiskEvent, target: u8, since: Instant) -> Result<Duration> {
    let (at, _) = agent.hear(news, target)?;
    Ok(at.saturating_duration_since(since))
}
