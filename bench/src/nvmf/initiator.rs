//! Aryk on both sides: the target on one core, the initiator, whose load is made in its reactor, on the other.

use super::{CAPACITY, ENTRIES, SUBSYSTEM, Target};
use crate::load::{self, Load, block_on};
use crate::process::{FRONT_END_CORE, unpinned};
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds;
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::{Context, Result};
use aryk_bdev::{Env, Registry};
use aryk_bdev_nvme::fabrics::{RemoteConfig, RemoteControllers};
use aryk_nvme_fabrics::nqn::Nqn;
use aryk_nvme_fabrics::psk::ConfiguredPsk;
use aryk_reactor::{CoreSet, Handle, Options, Reactors, SleepPolicy};
use serde_json::json;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

const HOST: &str = "nqn.2016-06.io.spdk:bench-host";
/// The host with a TLS key: the target refuses its connections without TLS.
const TLS_HOST: &str = "nqn.2016-06.io.spdk:bench-tls-host";
/// A key of an example in the specification of NVMe/TCP's interchange format.
const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";

const INTRO: &str = "Thousand requests per second over loopback: the target on core 0, an initiator in the bench's process on core 1, whose \
    reactor makes the requests itself. Rows are in turns. *Busy* is the target's time for each request, as above; *of plain* is the \
    throughput beside that without digests and TLS in the same rounds.";

/// What protects the data on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protection {
    None,
    Digests,
    Tls,
}

const PROTECTIONS: [(Protection, &str); 3] =
    [(Protection::None, "plain"), (Protection::Digests, "digests"), (Protection::Tls, "tls")];

/// Measures the selected cases.
pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let small = |writes: u32| [1, 32, 128].map(|depth| Workload::random(writes, 4 << 10, depth));
    let large = [0, 100].map(|writes| Workload::random(writes, 128 << 10, 8));
    let mut workloads = [&small(0)[..], &small(100), &large].concat();
    let name = |workload: &Workload| format!("nvmf/initiator/{}", workload.name());
    workloads.retain(|workload| settings.wants(&name(workload)));
    if workloads.is_empty() {
        return Ok(());
    }
    let mut target = Target::start(settings, "initiator", settings.policy)?;
    let tls = listen_with_tls(settings, &mut target)?;
    let columns =
        ["workload", "plain", "busy ns", "digests", "of plain", "tls", "of plain"].map(str::to_owned);
    let mut section = Section::new("Aryk's initiator", INTRO, columns.to_vec());
    for workload in workloads {
        let rounds = rounds::run_comparable(settings.runs, || {
            let run =
                |(protection, _): &(Protection, &str)| run(settings, &mut target, tls, workload, *protection);
            PROTECTIONS.iter().map(run).collect::<Result<Vec<_>>>()
        })?;
        let of = |protection: usize| rounds.each.iter().map(move |round| round[protection]);
        let rates = [0, 1, 2].map(|protection| of(protection).map(|(rate, _)| rate).collect::<Runs>());
        let busy = of(0).map(|(_, busy)| busy).collect::<Runs>();
        for ((_, protection), rate) in PROTECTIONS.iter().zip(&rates) {
            let metric = format!("throughput, {protection}");
            report.records.push(Record::new(&name(&workload), &metric, "IOPS", rate, &Runs::default()));
        }
        let thousands = |runs: &Runs| cell(runs, |rate| number(rate / 1e3));
        let of_plain = |runs: &Runs| cell(&runs.over(&rates[0]), number);
        section.row(vec![
            workload.name(),
            thousands(&rates[0]),
            cell(&busy, number),
            thousands(&rates[1]),
            of_plain(&rates[1]),
            thousands(&rates[2]),
            of_plain(&rates[2]),
        ]);
    }
    report.section(section);
    Ok(())
}

/// Adds a listener that requires TLS, and the host's key.
fn listen_with_tls(settings: &Settings, target: &mut Target) -> Result<SocketAddr> {
    target.process.resume()?;
    let path = settings.sockets.path().join("tls-key");
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
    std::io::Write::write_all(&mut file, KEY.as_bytes())?;
    target.rpc.call("keyring_file_add_key", json!({"name": "k", "path": path}))?;
    target.rpc.call("nvmf_subsystem_add_host", json!({"nqn": SUBSYSTEM, "host": TLS_HOST, "psk": "k"}))?;
    // The port was free a moment ago.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let port = address.port().to_string();
    let listen = json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port});
    let listener = json!({"nqn": SUBSYSTEM, "listen_address": listen, "secure_channel": true});
    target.rpc.call("nvmf_subsystem_add_listener", listener)?;
    target.process.pause()?;
    Ok(address)
}

/// Requests per second, and the target's busy time for each in ns.
fn run(
    settings: &Settings,
    target: &mut Target,
    tls: SocketAddr,
    workload: Workload,
    protection: Protection,
) -> Result<(f64, f64)> {
    target.process.resume()?;
    let address = if protection == Protection::Tls { tls } else { target.address };
    let host = Initiator::connect(address, protection)?;
    let load = Load::begin(&host.env, &host.disk, &host.handle, workload, CAPACITY)?;
    std::thread::sleep(settings.warm_up);
    let (before, done) = (target.rpc.busy()?, load.done());
    let loads = vec![load];
    let rate = load::rates(&loads, std::time::Duration::ZERO, settings.span)[0];
    let (busy, requests) = (target.rpc.busy()? - before, loads[0].done() - done);
    load::end(loads)?;
    drop(host);
    target.process.pause()?;
    Ok((rate, busy / requests as f64))
}

/// An initiator in this process, with one reactor and one disk.
struct Initiator {
    env: Env,
    disk: String,
    handle: Handle,
    controllers: RemoteControllers,
    // Dropped last.
    _reactors: Reactors,
}

impl Initiator {
    fn connect(address: SocketAddr, protection: Protection) -> Result<Self> {
        let start = || {
            let cores = CoreSet::from_iter([FRONT_END_CORE as u16]);
            Reactors::start(&Options { cores, policy: SleepPolicy::Poll, ..Options::default() })
        };
        let reactors = unpinned(start)??;
        let env = Env::new(Arc::new(Registry::new()), &reactors);
        let handle = env.reactors().handles().pop().context("there is a reactor")?;
        let nqn = |text: &str| text.parse::<Nqn>();
        let host = if protection == Protection::Tls { TLS_HOST } else { HOST };
        let mut config = RemoteConfig::new("far", address, nqn(SUBSYSTEM)?, nqn(host)?, [7; 16]);
        config.depth = ENTRIES - 1;
        (config.header_digest, config.data_digest) =
            (protection == Protection::Digests, protection == Protection::Digests);
        if protection == Protection::Tls {
            config.set_tls_key(&ConfiguredPsk::parse(KEY.as_bytes())?)?;
        }
        let controllers = RemoteControllers::default();
        let disks = unpinned(|| block_on(controllers.attach(&env, config)))??;
        let disk = disks.first().context("the subsystem has a namespace")?.name().to_string();
        Ok(Self { env, disk, handle, controllers, _reactors: reactors })
    }
}

impl Drop for Initiator {
    fn drop(&mut self) {
        // The target notices a connection that is only dropped, too.
        let _ = block_on(self.controllers.detach("far"));
    }
}
