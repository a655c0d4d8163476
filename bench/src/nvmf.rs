//! `cargo xtask bench nvmf`: the NVMe/TCP target, beside a bare loop over the same socket, and beside an NBD server.
//!
//! - [`host`]: the host, on the front-end's core; [`output`]: what it and the bare loop send.
//! - [`bare`]: the loop that the target is compared with; [`nbd`]: the peer, for scale.
//! - [`initiator`]: Aryk's own initiator instead of that host, also with digests and TLS.
//! - [`linux`]: Linux' own initiator, beside Linux' own target, in a guest; [`rdma`]: RDMA beside TCP, in a guest.
//! - [`idle`]: many connections without requests; [`rare`]: few requests; [`profile`]: where the time of the target goes.

mod bare;
mod host;
mod idle;
mod initiator;
mod linux;
mod nbd;
mod output;
mod profile;
mod rare;
mod rdma;

use crate::backend::{self, Policy, Store};
use crate::frontend::Closed;
use crate::process::Process;
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds;
use crate::rpc::Rpc;
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::{Context, Result};
use host::Host;
use serde_json::json;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const SUBSYSTEM: &str = "nqn.2016-06.io.spdk:bench";
/// Entries of a queue: one more than the greatest depth.
const ENTRIES: u16 = 129;
/// Bytes of the disk. It stays in no cache, and fits beside the peer's into small computers.
const CAPACITY: u64 = 512 << 20;
/// The aims: the target's part of the bare loop's throughput, and its system calls for each request with 32 in flight.
const RATE_AIM: f64 = 0.8;
const CALLS_AIM: f64 = 0.2;

const INTRO: &str = "Thousand requests per second over loopback, as median (least–greatest) of the rounds; each side in turn. The host is \
    one thread on core 1, which polls one queue. The bare loop is a thread on core 0, which polls one socket, reads as many bytes at once \
    as the target and answers with as many, from constant memory: it has no disk, no checks and no digests. *Busy* is the time of turns that \
    found something, for each request, of the target and of the bare loop. *Calls* are system calls of the target for each request, counted by \
    the kernel (`perf`) in a run of their own. `qemu-nbd` serves a file in /dev/shm to the same host by NBD's simple replies.";

/// Measures the selected cases.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    closed(settings, report)?;
    initiator::measure(settings, report)?;
    rare::measure(settings, report)?;
    idle::measure(settings, report)?;
    profile::measure(settings, report)?;
    linux::measure(settings, report)?;
    rdma::measure(settings, report)
}

/// An arykd whose target has a disk in memory. It is stopped, unless it is measured.
struct Target {
    process: Process,
    rpc: Rpc,
    address: SocketAddr,
}

impl Target {
    fn start(settings: &Settings, name: &str, policy: Policy) -> Result<Self> {
        let dir = settings.sockets.path().join(format!("nvmf-{name}"));
        let (process, mut rpc) = backend::arykd(&settings.arykd, policy, &dir, None)?;
        let memory = Store::Memory { size: CAPACITY, peer: PathBuf::new() };
        backend::create_disk(&mut rpc, "d0", &memory, &dir)?;
        // The port was free a moment ago.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        rpc.call("nvmf_create_transport", json!({"trtype": "TCP", "max_queue_depth": ENTRIES}))?;
        rpc.call("nvmf_create_subsystem", json!({"nqn": SUBSYSTEM, "allow_any_host": true}))?;
        rpc.call("nvmf_subsystem_add_ns", json!({"nqn": SUBSYSTEM, "namespace": {"bdev_name": "d0"}}))?;
        let port = address.port().to_string();
        let listen = json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port});
        rpc.call("nvmf_subsystem_add_listener", json!({"nqn": SUBSYSTEM, "listen_address": listen}))?;
        process.pause()?;
        Ok(Self { process, rpc, address })
    }

    /// Calls `f` with a queue of a new controller, and the admin queue, while the process runs.
    fn with_queue<T>(
        &mut self,
        workload: Workload,
        has_digests: bool,
        f: impl FnOnce(&mut Self, &mut Host) -> Result<T>,
    ) -> Result<T> {
        self.process.resume()?;
        let open = |workload| Host::open(self.address, has_digests, workload, CAPACITY);
        let (admin, id) = open(Workload::random(0, 4 << 10, 1))?.into_admin(SUBSYSTEM)?;
        let mut queue = open(workload)?;
        queue.connect(SUBSYSTEM, 1, id, ENTRIES)?;
        let value = f(self, &mut queue)?;
        drop((queue, admin));
        self.process.pause()?;
        Ok(value)
    }
}

/// Requests of one run, and what they took.
#[derive(Clone, Copy, Debug)]
struct Run {
    rate: f64,
    /// Busy time for each request, in ns.
    busy: f64,
}

/// The results of one round of a case.
#[derive(Debug)]
struct Round {
    ours: Run,
    bare: Run,
    /// Requests per second of the peer.
    nbd: f64,
}

fn workloads() -> Vec<(Workload, bool)> {
    let small = |percent| [1, 32, 128].map(|depth| (Workload::random(percent, 4 << 10, depth), false));
    let large = [0, 100].map(|percent| (Workload::random(percent, 128 << 10, 8), false));
    let digests = [0, 100].map(|percent| (Workload::random(percent, 4 << 10, 32), true));
    [&small(0)[..], &small(100), &large, &digests].concat()
}

/// The name of a case.
fn name(workload: &Workload, has_digests: bool) -> String {
    format!("nvmf/{}{}", workload.name(), if has_digests { "/digests" } else { "" })
}

fn closed(settings: &Settings, report: &mut Report) -> Result<()> {
    let mut workloads = workloads();
    workloads.retain(|(workload, has_digests)| settings.wants(&name(workload, *has_digests)));
    if workloads.is_empty() {
        return Ok(());
    }
    let mut target = Target::start(settings, "closed", settings.policy)?;
    report.command(&target.process.command);
    let peer = nbd::Server::start(&settings.memory.path().join("nbd"), CAPACITY)?;
    report.command(&peer.process.command);
    let columns = [
        "workload",
        "arykd",
        "bare loop",
        "ratio (aim 0.8)",
        "busy ns, arykd",
        "busy ns, bare",
        "calls (aim 0.2 at qd32)",
        "qemu-nbd",
        "ratio",
        "core to core, ns",
    ];
    let mut section = Section::new("One queue", INTRO, columns.map(str::to_owned).to_vec());
    for (workload, has_digests) in workloads {
        section.row(compare(settings, &mut target, &peer, workload, has_digests, report)?);
    }
    report.section(section);
    Ok(())
}

fn compare(
    settings: &Settings,
    target: &mut Target,
    peer: &nbd::Server,
    workload: Workload,
    has_digests: bool,
    report: &mut Report,
) -> Result<Vec<String>> {
    let (address, work) = bare::listen(workload.block)?;
    let rounds = rounds::run_comparable(settings.runs, || {
        let ours = run(settings, target, workload, has_digests)?;
        let bare = run_bare(settings, address, &work, workload)?;
        let nbd = peer.run(workload, settings.warm_up, settings.span)?;
        Ok(Round { ours, bare, nbd })
    })?;
    let runs = |of: fn(&Round) -> f64| rounds.each.iter().map(of).collect::<Runs>();
    let (ours, bare) = (runs(|round| round.ours.rate), runs(|round| round.bare.rate));
    let nbd = runs(|round| round.nbd);
    let (our_busy, bare_busy) = (runs(|round| round.ours.busy), runs(|round| round.bare.busy));
    let calls = calls(settings, target, workload, has_digests)?;
    let case = name(&workload, has_digests);
    report.records.push(Record::new(&case, "throughput, peer bare loop", "IOPS", &ours, &bare));
    report.records.push(Record::new(&case, "throughput, peer qemu-nbd", "IOPS", &ours, &nbd));
    report.records.push(Record::new(
        &case,
        "busy time per request, peer bare loop",
        "ns",
        &our_busy,
        &bare_busy,
    ));
    report.records.push(Record::new(&case, "system calls per request", "", &calls, &Runs::default()));
    let mut shown = case.trim_start_matches("nvmf/").to_owned();
    if has_digests {
        shown += " (not the bare loop)";
    }
    let thousands = |runs: &Runs| cell(runs, |rate| number(rate / 1e3));
    let of_calls = match calls.median() {
        Some(calls) if workload.depth == 32 && calls > CALLS_AIM => format!("{} **missed**", number(calls)),
        Some(calls) => number(calls),
        None => "–".to_owned(),
    };
    let ratio = ours.over(&bare);
    let of_bare = match ratio.median() {
        Some(median) if median < RATE_AIM => format!("{} **missed**", cell(&ratio, number)),
        _ => cell(&ratio, number),
    };
    Ok(vec![
        shown,
        thousands(&ours),
        thousands(&bare),
        of_bare,
        cell(&our_busy, number),
        cell(&bare_busy, number),
        of_calls,
        thousands(&nbd),
        cell(&ours.over(&nbd), number),
        rounds.round_trip.as_nanos().to_string(),
    ])
}

fn run(settings: &Settings, target: &mut Target, workload: Workload, has_digests: bool) -> Result<Run> {
    target.with_queue(workload, has_digests, |target, queue| {
        queue.closed(settings.warm_up)?;
        let before = target.rpc.busy()?;
        let closed = queue.closed(settings.span)?;
        let busy = target.rpc.busy()? - before;
        Ok(Run { rate: closed.rate(), busy: busy / closed.requests as f64 })
    })
}

fn run_bare(
    settings: &Settings,
    address: SocketAddr,
    work: &std::sync::mpsc::Receiver<bare::Work>,
    workload: Workload,
) -> Result<Run> {
    let mut queue = Host::open(address, false, workload, CAPACITY)?;
    let warm: Closed = queue.closed(settings.warm_up)?;
    let closed = queue.closed(settings.span)?;
    drop(queue);
    let work = work.recv().context("the bare loop has ended")?;
    debug_assert_eq!(work.requests, warm.requests + closed.requests);
    Ok(Run { rate: closed.rate(), busy: work.busy.as_nanos() as f64 / work.requests as f64 })
}

/// The target's system calls for each request; none where `perf` cannot count them.
fn calls(settings: &Settings, target: &mut Target, workload: Workload, has_digests: bool) -> Result<Runs> {
    target.with_queue(workload, has_digests, |target, queue| {
        queue.closed(settings.warm_up)?;
        let counted = Counted::begin(&target.process)?;
        let closed = queue.closed(settings.span)?;
        let counted = counted.map(Counted::end).transpose()?.flatten();
        Ok(counted.map(|calls| calls / closed.requests as f64).into_iter().collect())
    })
}

/// A count of a process's system calls, by `perf`.
struct Counted(std::process::Child);

impl Counted {
    /// Begins to count. `None`: there is no `perf`.
    fn begin(process: &Process) -> Result<Option<Self>> {
        if !Path::new("/usr/bin/perf").exists() {
            return Ok(None);
        }
        let pid = process.id().to_string();
        let mut command = Command::new("perf");
        command.args(["stat", "-x", ",", "-e", "raw_syscalls:sys_enter", "-p", &pid]);
        let child = command.stderr(std::process::Stdio::piped()).spawn()?;
        // It begins within this time.
        std::thread::sleep(Duration::from_millis(200));
        Ok(Some(Self(child)))
    }

    /// Ends the count. `None`: the kernel counts no calls for this user.
    fn end(self) -> Result<Option<f64>> {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
        let output = self.0.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok(text
            .lines()
            .find(|line| line.contains("sys_enter"))
            .and_then(|line| line.split(',').next()?.parse().ok()))
    }
}
