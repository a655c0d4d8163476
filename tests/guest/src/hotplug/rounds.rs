//! Eight disks under load; in each round, some are unplugged, and plugged into other targets. One thread.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::agent::{Agent, DiskEvent, Task};
use super::bench::{Bench, CONTROLLER, Disk, heard, lost};
use crate::cases::Site;
use crate::random::stream;
use fastrand::Rng;

/// Number of disks, one per target.
const DISKS: u8 = 8;
/// Upper bound of disks that one round unplugs.
const VICTIMS_MAX: u64 = 3;
/// Rounds between two checks of the kernel's messages.
const MESSAGE_CHECK_INTERVAL: u32 = 10;

/// Number, seed and ring format of the rounds.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Upper bound of rounds.
    pub rounds: u32,
    /// The seed.
    pub seed: u64,
    /// Whether the guest's rings are packed.
    pub packed: bool,
    /// Time after which no new round starts.
    pub patience: Option<Duration>,
}

/// Results of the rounds.
#[derive(Clone, Debug, Default)]
pub struct Rounds {
    /// Rounds that were run.
    pub rounds: u32,
    /// Total duration.
    pub elapsed: Duration,
    /// From the call that plugs to its reply.
    pub plug_answered: Vec<Duration>,
    /// From that call until the guest's kernel reports the disk.
    pub plug_seen: Vec<Duration>,
    /// From the call that unplugs to its reply.
    pub unplug_answered: Vec<Duration>,
    /// From that call until the guest's kernel reports the disk as removed.
    pub unplug_seen: Vec<Duration>,
    /// From the call that resizes until the guest's kernel reports the new size.
    pub resize_seen: Vec<Duration>,
    /// fio's errors of the loads of unplugged disks, with their number.
    pub errors: BTreeMap<String, u64>,
    /// The kernel's messages about failed commands, with their number.
    pub kinds: BTreeMap<String, u64>,
    /// Disks that were unplugged while the guest wrote to them as fast as possible; and all unplugged disks.
    pub under_load: (u64, u64),
}

struct Run {
    bench: Bench,
    agent: Agent,
    disks: Vec<Disk>,
    random: Rng,
    record: Rounds,
}

/// Runs all rounds in one guest.
///
/// # Errors
/// Data was lost, wrong or late, or an unplug affected another disk.
pub(crate) fn run(site: &Site<'_>, settings: Settings) -> Result<Rounds> {
    let begun = Instant::now();
    let mut run = start(site, settings)?;
    let ready = Instant::now();
    for round in 0..settings.rounds {
        if settings.patience.is_some_and(|patience| ready.elapsed() > patience) {
            break;
        }
        run.round(round).with_context(|| format!("round {round} of seed {}", settings.seed))?;
        if (round + 1) % MESSAGE_CHECK_INTERVAL == 0 {
            run.collect_messages()?;
            println!("    {} rounds, {} s", round + 1, begun.elapsed().as_secs());
        }
    }
    run.finish(begun)
}

fn start(site: &Site<'_>, settings: Settings) -> Result<Run> {
    let bench = Bench::new(site)?;
    let packed = if settings.packed { "packed=on" } else { "packed=off" };
    let mut agent = Agent::boot(site, CONTROLLER, packed)?;
    let mut disks = Vec::new();
    let mut record = Rounds::default();
    for target in 0..DISKS {
        let name = format!("disk{target}");
        let mut disk =
            if target % 2 == 0 { bench.file_disk(site, &name)? } else { bench.memory_disk(&name)? };
        let (begun, took) = bench.plug(&mut disk, target)?;
        record.plug_answered.push(took);
        record.plug_seen.push(heard(&mut agent, DiskEvent::Added, target, begun)?);
        disk.prepare(&mut agent)?;
        disk.load(&mut agent)?;
        disks.push(disk);
    }
    Ok(Run { bench, agent, disks, random: stream(settings.seed, 0), record })
}

impl Run {
    /// Unplugs some disks, checks all others, and plugs the disks again.
    fn round(&mut self, round: u32) -> Result<()> {
        let mut order: Vec<_> = (0..self.disks.len()).collect();
        self.random.shuffle(&mut order);
        let (victims, others) = order.split_at(1 + self.random.u64(..VICTIMS_MAX) as usize);
        let mut bursts: BTreeMap<usize, Task> = BTreeMap::new();
        for &victim in victims {
            let target = self.disks[victim].at()?;
            self.agent.run(&format!("begun {target}"))?;
            if self.random.u64(..100) < 30 {
                self.disks[victim].seal(&mut self.agent, (round + 1).into())?;
            }
            if self.random.u64(..100) < 60 {
                bursts.insert(victim, self.agent.begin(&format!("burst {target}"))?);
            }
        }
        for victim in bursts.keys() {
            self.agent.run(&format!("busy {} 16", self.disks[*victim].at()?))?;
        }
        for &victim in victims {
            self.disks[victim].check_load(&mut self.agent)?;
        }
        self.record.under_load.0 += bursts.len() as u64;
        self.record.under_load.1 += victims.len() as u64;
        let mut places = self.take_away(victims, &mut bursts)?;
        if let Some(&other) = others.iter().find(|&&other| self.disks[other].grows)
            && self.random.u64(..100) < 30
        {
            self.grow(other)?;
        }
        self.random.shuffle(&mut places);
        self.bring_back(victims, &places)?;
        for disk in &self.disks {
            disk.check_load(&mut self.agent)?;
        }
        self.record.rounds += 1;
        Ok(())
    }

    /// Unplugs all victims at once; returns the targets that are free then.
    fn take_away(&mut self, victims: &[usize], bursts: &mut BTreeMap<usize, Task>) -> Result<Vec<u8>> {
        let mut gone = Vec::new();
        for &victim in victims {
            let target = self.disks[victim].at()?;
            let (begun, took) = self.bench.unplug(&mut self.disks[victim])?;
            self.record.unplug_answered.push(took);
            gone.push((target, begun));
        }
        for &(target, begun) in &gone {
            self.record.unplug_seen.push(heard(&mut self.agent, DiskEvent::Removed, target, begun)?);
        }
        for victim in victims {
            let burst = bursts.remove(victim).map(|burst| lost(&mut self.agent, burst)).transpose()?;
            let load = self.disks[*victim].end_lost_load(&mut self.agent)?;
            for error in burst.into_iter().chain(load) {
                *self.record.errors.entry(error).or_default() += 1;
            }
        }
        Ok(gone.into_iter().map(|(target, _)| target).collect())
    }

    fn bring_back(&mut self, victims: &[usize], places: &[u8]) -> Result<()> {
        let mut back = Vec::new();
        for (&victim, &target) in victims.iter().zip(places) {
            let (begun, took) = self.bench.plug(&mut self.disks[victim], target)?;
            self.record.plug_answered.push(took);
            back.push((target, begun));
        }
        for (target, begun) in back {
            self.record.plug_seen.push(heard(&mut self.agent, DiskEvent::Added, target, begun)?);
        }
        let begin = |&victim: &usize| self.disks[victim].begin_check(&mut self.agent);
        let checks: Vec<_> = victims.iter().map(begin).collect::<Result<_>>()?;
        for (&victim, check) in victims.iter().zip(checks) {
            self.disks[victim].end_check(check, &mut self.agent)?;
            self.disks[victim].load(&mut self.agent)?;
        }
        Ok(())
    }

    /// Grows a disk while it is in use.
    fn grow(&mut self, other: usize) -> Result<()> {
        let disk = &mut self.disks[other];
        let begun = self.bench.grow(disk)?;
        let (at, sectors) = self.agent.hear(DiskEvent::Resized, disk.at()?)?;
        ensure!(sectors == disk.mib << 11, "{} has {sectors} sectors for the guest", disk.name);
        self.record.resize_seen.push(at.saturating_duration_since(begun));
        Ok(())
    }

    /// Collects the kernel's messages about failed commands.
    fn collect_messages(&mut self) -> Result<()> {
        let said = self.agent.run("kinds")?;
        let words: Vec<_> = said.split_whitespace().collect();
        for pair in words.chunks_exact(2) {
            *self.record.kinds.entry(pair[1].replace('_', " ")).or_default() += pair[0].parse::<u64>()?;
        }
        Ok(())
    }

    fn finish(mut self, begun: Instant) -> Result<Rounds> {
        self.collect_messages()?;
        for disk in &mut self.disks {
            disk.end_load(&mut self.agent)?;
            disk.check(&mut self.agent)?;
        }
        // As in SPDK: not while a VM uses the controller.
        let params = json!({"ctrlr": CONTROLLER});
        let refused = self.bench.daemon.call("vhost_delete_controller", &params);
        let why = refused.err().context("a controller in use could be deleted")?.to_string();
        ensure!(why.contains("Device or resource busy"), "{why}");
        self.agent.finish()?;
        self.bench.daemon.stop()?;
        self.record.elapsed = begun.elapsed();
        Ok(self.record)
    }
}
