//! A guest that works on disks of a SCSI controller as it is told (`agent.sh`), and says what its kernel says of them. One thread, beside the guest's
//! own reader.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::cases::{PATIENCE, Site};
use crate::machine::{Front, Guest, Report};
use crate::{Disk, Machine};

const SCRIPT: &str = include_str!("agent.sh");
/// MiB of a guest in which eight fios run.
const MEMORY_MIB: u32 = 512;

/// A command that the guest has been given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Task(u64);

/// What a guest's kernel says of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// It is there.
    Added,
    /// It is gone.
    Removed,
    /// It has another size.
    Resized,
}

#[derive(Debug)]
struct Heard {
    at: Instant,
    news: News,
    target: u8,
    sectors: u64,
}

/// The guest.
#[derive(Debug)]
pub(super) struct Agent {
    guest: Guest,
    given: u64,
    heard: VecDeque<Heard>,
    /// Commands that are over, by number: the status, and the answer.
    done: BTreeMap<Task, (u8, String)>,
}

impl Agent {
    /// A guest whose controller is at the daemon's socket `controller`, with further properties of QEMU's device; up and listening.
    pub fn boot(site: &Site<'_>, controller: &str, properties: &str) -> Result<Self> {
        let socket = site.path("vhost").join(controller);
        let disk = Disk { front: Front::Scsi, properties: properties.to_owned(), ..Disk::new(&socket, 2) };
        let machine = Machine { memory_mib: MEMORY_MIB, ..Machine::with_disks(vec![disk]) };
        let mut guest = site.boot(&machine, SCRIPT)?;
        guest.wait_line("ready", PATIENCE)?;
        Ok(Self { guest, given: 0, heard: VecDeque::new(), done: BTreeMap::new() })
    }

    /// The machine itself.
    pub const fn guest(&self) -> &Guest {
        &self.guest
    }

    /// Gives it a command.
    pub fn begin(&mut self, command: &str) -> Result<Task> {
        self.given += 1;
        self.guest.send(&format!("{} {command}", self.given))?;
        Ok(Task(self.given))
    }

    /// Waits for a command's end, and gives its answer.
    ///
    /// # Errors
    /// It failed, or does not end.
    pub fn end(&mut self, task: Task) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        while !self.done.contains_key(&task) {
            let came = self.take_line(deadline)?;
            ensure!(came, "the guest's command {} does not end\n{}", task.0, self.guest.last_words());
        }
        let (status, answer) = self.done.remove(&task).expect("just seen");
        ensure!(status == 0, "the guest's command {} failed with {status}: {answer}", task.0);
        Ok(answer)
    }

    /// A whole command.
    pub fn run(&mut self, command: &str) -> Result<String> {
        let task = self.begin(command)?;
        self.end(task).with_context(|| command.to_owned())
    }

    /// Whether a command goes on, as far as is known by now.
    pub fn goes_on(&mut self, task: Task) -> Result<bool> {
        while self.take_line(Instant::now())? {}
        Ok(!self.done.contains_key(&task))
    }

    /// Waits until the kernel has said this of a target; when that was, and how many sectors its disk had then.
    pub fn hear(&mut self, news: News, target: u8) -> Result<(Instant, u64)> {
        self.hear_within(news, target, PATIENCE)?
            .with_context(|| format!("target {target}: {news:?} is not heard\n{}", self.guest.last_words()))
    }

    /// The same, if it is said in time.
    pub fn hear_within(
        &mut self,
        news: News,
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

    /// Ends the guest, whose commands are over.
    pub fn finish(mut self) -> Result<Report> {
        self.guest.send("0 end")?;
        self.guest.finish(PATIENCE)
    }

    /// Files what the guest says next; whether it said something in time.
    fn take_line(&mut self, deadline: Instant) -> Result<bool> {
        let Some((at, line)) = self.guest.line_within(deadline)? else { return Ok(false) };
        let words: Vec<_> = line.splitn(4, ' ').collect();
        match words[..] {
            ["heard", news, target, sectors] => {
                let news = match news {
                    "add" => News::Added,
                    "remove" => News::Removed,
                    _ => News::Resized,
                };
                let (target, sectors) = (target.parse()?, sectors.trim().parse()?);
                self.heard.push_back(Heard { at, news, target, sectors });
            }
            ["did", number, status, answer] => {
                let task = Task(number.parse()?);
                self.done.insert(task, (status.parse()?, answer.trim().to_owned()));
            }
            ["aryk-done", ..] => bail!("the guest's script has ended: {line}"),
            // What programs in the background say.
            _ => {}
        }
        Ok(true)
    }
}
