//! Many connections without requests: their memory, and the processor time of a target that has them.

use super::host::Host;
use super::{SUBSYSTEM, Target};
use crate::backend::Policy;
use crate::report::{Record, Report, Runs, Section, number};
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::Result;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

/// I/O queues of each controller.
const QUEUES: u16 = 124;
/// Hosts, of one controller each: with their admin queues, 10,000 connections.
const HOSTS: u8 = 80;
/// Entries of a queue, which is what Linux asks for.
const ENTRIES: u16 = 128;
/// Descriptors of the target, where the limit of this user is not less, and the share of them that may be connections.
const DESCRIPTORS: u64 = 128 << 10;
const SHARE: u64 = 8;
/// Wait before a target counts as idle.
const SETTLE: Duration = Duration::from_secs(1);
/// The aims: percent of a core, and KiB of memory for each connection.
const CPU_AIM: f64 = 1.0;
const MEMORY_AIM: f64 = 32.0;

const INTRO: &str = "Connections of up to 80 hosts, each with an admin queue and 124 I/O queues of 128 entries, over loopback: as many as an eighth of the \
    descriptors that the user of the bench may have, which is what a target allows. Memory is the \
    process's anonymous memory, less that before; the sockets' buffers in the kernel are empty and are not counted. Processor time is that \
    of all threads, without requests.";

pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    if !settings.wants("nvmf/idle") {
        return Ok(());
    }
    let most = getrlimit(Resource::Nofile).maximum.unwrap_or(DESCRIPTORS).min(DESCRIPTORS);
    setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: Some(most) })?;
    // The target's connections are a share of its descriptors.
    let hosts = (most / SHARE / u64::from(QUEUES + 1)).min(u64::from(HOSTS));
    let target = Target::start(settings, "idle", Policy::Adaptive)?;
    target.process.resume()?;
    let before = target.process.memory()?;
    let mut queues = Vec::new();
    let start = Instant::now();
    for at in 1..=hosts as u8 {
        // A target limits the connections of one address.
        let from = Ipv4Addr::new(127, 0, 1, at);
        let open = || Host::open_from(from, target.address, Workload::random(0, 4 << 10, 1));
        let (admin, id) = open()?.into_admin(SUBSYSTEM)?;
        queues.push(admin.into_socket());
        for qid in 1..=QUEUES {
            let mut queue = open()?;
            queue.connect(SUBSYSTEM, qid, id, ENTRIES)?;
            queues.push(queue.into_socket());
        }
    }
    let connected = start.elapsed();
    std::thread::sleep(SETTLE);
    let memory = (target.process.memory()? - before) as f64 / 1024.0 / queues.len() as f64;
    let (since, cpu) = (Instant::now(), target.process.cpu()?);
    std::thread::sleep(settings.idle);
    let used = 100.0 * (target.process.cpu()? - cpu).as_secs_f64() / since.elapsed().as_secs_f64();
    let columns =
        ["connections", "connected in s", "percent of a core", "KiB for each"].map(str::to_owned).to_vec();
    let mut section = Section::new("Idle connections", INTRO, columns);
    let aim = |value: f64, aim: f64| {
        let is_missed = if value < aim { "" } else { ", **missed**" };
        format!("{} (aim: less than {aim}{is_missed})", number(value))
    };
    section.row(vec![
        queues.len().to_string(),
        number(connected.as_secs_f64()),
        aim(used, CPU_AIM),
        aim(memory, MEMORY_AIM),
    ]);
    for (metric, unit, value) in [("processor time", "%", used), ("memory of a connection", "KiB", memory)] {
        let runs = Runs::from_iter([value]);
        report.records.push(Record::new("nvmf/idle", metric, unit, &runs, &Runs::default()));
    }
    report.section(section);
    Ok(())
}
