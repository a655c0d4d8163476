//! A guest that executes the host's commands on disks of a SCSI controller (`agent.sh`), and reports its kernel's events.
//! One thread, beside the guest's own reader.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::cases::{Site, TIMEOUT};
use crate::vm::{Front, Guest, Report};
use crate::{Disk, Vm};

const SCRIPT: &str = include_str!("agent.sh");
/// MiB of memory of a guest that runs eight fios.
const MEMORY_MIB: u32 = 512;

/// A command that was sent to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Task(u64);

/// An event of a disk, as the guest's kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiskEvent {
    /// The disk was added.
    Added,
    /// The disk was removed.
    Removed,
    /// The disk's size changed.
    Resized,
}

#[derive(Debug)]
struct Heard {
    at: Instant,
    news: DiskEvent,
    target: u8,
    sectors: u64,
}

/// The guest.
#[derive(Debug)]
pub(super) struct Agent {
    guest: Guest,
    given: u64,
    heard: VecDeque<Heard>,
    /// Ended commands, by number: the status, and the output.
    done: BTreeMap<Task, (u8, String)>,
}

impl Agent {
    /// Boots a guest whose controller is at the daemon's socket `controller`, with further properties of QEMU's device;
    /// returns when its script listens.
    pub fn boot(site: &Site<'_>, controller: &str, properties: &str) -> Result<Self> {
        let socket = site.path("vhost").join(controller);
        let disk = Disk { front: Front::Scsi, properties: properties.to_owned(), ..Disk::new(&socket, 2) };
        let vm = Vm { memory_mib: MEMORY_MIB, ..Vm::with_disks(vec![disk]) };
        let mut guest = site.boot(&vm, SCRIPT)?;
        guest.wait_line("ready", TIMEOUT)?;
        Ok(Self { guest, given: 0, heard: VecDeque::new(), done: BTreeMap::new() })
    }

    /// The VM.
    pub const fn guest(&self) -> &Guest {
        &self.guest
    }

    /// Starts a command.
    pub fn begin(&mut self, command: &str) -> Result<Task> {
        self.given += 1;
        self.guest.send(&format!("{} {command}", self.given))?;
        Ok(Task(self.given))
    }

    /// Waits until a command has ended, and returns its output.
    ///
    /// # Errors
    /// The command failed, or does not end.
    pub fn end(&mut self, task: Task) -> Result<String> {
        let deadline = Instant::now() + TIMEOUT;
        while !self.done.contains_key(&task) {
            let came = self.take_line(deadline)?;
            ensure!(came, "the guest's command {} does not end\n{}", task.0, self.guest.log_tail());
        }
        let (status, answer) = self.done.remove(&task).expect("just seen");
        ensure!(status == 0, "the guest's command {} failed with {status}: {answer}", task.0);
        Ok(answer)
    }

    /// Runs a command from start to end.
    pub fn run(&mut self, command: &str) -> Result<String> {
        let task = self.begin(command)?;
        self.end(task).with_context(|| command.to_owned())
    }

    /// Whether a command is still running, as far as the host knows.
    pub fn goes_on(&mut self, task: Task) -> Result<bool> {
        while self.take_line(Instant::now())? {}
        Ok(!self.done.contains_key(&task))
    }

    /// Waits for an event of a target; returns its time, and the disk's number of sectors then.
    pub fn hear(&mut self, news: DiskEvent, target: u8) -> Result<(Instant, u64)> {
        self.hear_within(news, target, TIMEOUT)?
            .with_context(|| format!("target {target}: {news:?} is not heard\n{}", self.guest.log_tail()))
    }

    /// As [`Agent::hear`], with a timeout; `None` if the event does not come in time.
    pub fn hear_within(
        &mut self,
        news: DiskEvent,
        target: u8,
        patience: Duration,
    ) -> Result<Option<(Instant, u64)>> {
        let deadline = Instant::now() + patience;
        loop {
            let found = self.heard.iter().position(|h| h.news == news && h.target == target);
            if let Some(at) = found {
                return Ok(self.heard.remove(at).map(|h| (h.at, h.sectors)));
            }
            if !self.take_line(deadline)? {
                return Ok(None);
            }
        }
    }

    /// Ends the guest; all its commands must have ended.
    pub fn finish(mut self) -> Result<Report> {
        self.guest.send("0 end")?;
        self.guest.finish(TIMEOUT)
    }

    /// Handles the guest's next line; returns whether there was one in time.
    fn take_line(&mut self, deadline: Instant) -> Result<bool> {
        let Some((at, line)) = self.guest.line_within(deadline)? else { return Ok(false) };
        let words: Vec<_> = line.splitn(4, ' ').collect();
        match words[..] {
            ["heard", news, target, sectors] => {
                let news = match news {
                    "add" => DiskEvent::Added,
                    "remove" => DiskEvent::Removed,
                    _ => DiskEvent::Resized,
                };
                let (target, sectors) = (target.parse()?, sectors.trim().parse()?);
                self.heard.push_back(Heard { at, news, target, sectors });
            }
            ["did", number, status, answer] => {
                let task = Task(number.parse()?);
                self.done.insert(task, (status.parse()?, answer.trim().to_owned()));
            }
            ["aryk-done", ..] => bail!("the guest's script has ended: {line}"),
            // Output of background programs.
            _ => {}
        }
        Ok(true)
    }
}
