//! `bdev_nvme_get_transport_statistics`, `framework_get_pci_devices`. Control context.

use super::{Control, Error, Phase, Table};
use crate::dispatch::NoParams;
use aryk_bdev_nvme::fabrics::{PathInfo, RemoteController};
use aryk_bdev_nvme::{AttachedController, ErrorCounts, PairCounts};
use aryk_nvme::spec::status::CodeType;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_nvme_get_transport_statistics",
        Phase::RunTime,
        "Reports the commands of the NVMe queue pairs, by core.",
        get_transport_statistics,
    );
    table.add(
        "framework_get_pci_devices",
        Phase::Any,
        "Lists the PCI devices that the daemon drives itself: the attached NVMe controllers.",
        get_pci_devices,
    );
}

/// Result of `bdev_nvme_get_transport_statistics`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeTransportStatistics")]
struct TransportStatistics {
    poll_groups: Vec<PollGroup>,
}

/// The queue pairs of a core.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmePollGroup")]
struct PollGroup {
    /// The reactor.
    thread: String,
    transports: [Transport; 1],
}

/// Sums over the queue pairs of a core.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[schemars(rename = "NvmeTransport")]
struct Transport {
    trname: &'static str,
    /// Polls of completion queues.
    polls: u64,
    /// Polls that found no completion.
    idle_polls: u64,
    completions: u64,
    /// Requests that had to wait before they were submitted, because the queue pair was not ready or had no buffer.
    queued_requests: u64,
    submitted_requests: u64,
    /// Writes to the doorbell registers of submission queues.
    sq_doorbell_updates: u64,
    /// Writes to the doorbell registers of completion queues.
    cq_doorbell_updates: u64,
    /// Aryk only: commands in flight.
    in_flight: u64,
    /// Aryk only: commands that the controllers answered by an error.
    errors: Errors,
}

/// I/O commands that the controller answered by an error, by the type of its status code. A command that is tried again counts
/// each time.
#[derive(Debug, Clone, Copy, Default, Serialize, JsonSchema)]
#[schemars(rename = "NvmeErrors")]
pub(crate) struct Errors {
    /// Errors of all commands (SCT 0h), for example an aborted command, or a block out of range.
    generic: u64,
    /// Errors of one command (SCT 1h).
    command_specific: u64,
    /// Media and data integrity errors (SCT 2h); a compare that finds other data is one.
    media: u64,
    /// Errors of the path to the namespace (SCT 3h).
    path: u64,
    /// The vendor's errors (SCT 7h).
    vendor_specific: u64,
    /// Types that the specification reserves.
    reserved: u64,
}

impl From<ErrorCounts> for Errors {
    fn from(counts: ErrorCounts) -> Self {
        let of = |of: CodeType| counts[of as usize];
        Self {
            generic: of(CodeType::Generic),
            command_specific: of(CodeType::CommandSpecific),
            media: of(CodeType::Media),
            path: of(CodeType::Path),
            vendor_specific: of(CodeType::VendorSpecific),
            reserved: of(CodeType::Reserved),
        }
    }
}

impl Errors {
    /// The names of the types, each with its number.
    pub(crate) fn of_metrics(errors: &[(&'static str, u64)]) -> Self {
        let of =
            |of: CodeType| errors.iter().find(|(name, _)| *name == of.name()).map_or(0, |(_, count)| *count);
        CodeType::ALL.map(of).into()
    }
}

async fn get_transport_statistics(control: &Control, _: NoParams) -> Result<TransportStatistics, Error> {
    let none = || Transport { trname: "PCIE", ..Transport::default() };
    let mut cores: BTreeMap<u16, Transport> =
        control.reactors.handles().iter().map(|reactor| (reactor.core(), none())).collect();
    let mut errors: BTreeMap<u16, ErrorCounts> = BTreeMap::new();
    for controller in control.nvme.controllers.list() {
        for pair in controller.counts().pairs {
            let sums = cores.entry(pair.core).or_insert_with(none);
            sums.completions += pair.completed;
            sums.submitted_requests += pair.submitted;
            sums.polls += pair.polls;
            sums.idle_polls += pair.idle_polls;
            sums.queued_requests += pair.queued;
            sums.sq_doorbell_updates += pair.sq_doorbells;
            sums.cq_doorbell_updates += pair.cq_doorbells;
            sums.in_flight += pair.in_flight;
            let errors = errors.entry(pair.core).or_default();
            errors.iter_mut().zip(pair.errors).for_each(|(sum, count)| *sum += count);
            sums.errors = (*errors).into();
        }
    }
    let group = |(core, sums)| PollGroup { thread: format!("reactor_{core}"), transports: [sums] };
    Ok(TransportStatistics { poll_groups: cores.into_iter().map(group).collect() })
}

/// The NVMe controllers for monitoring.
pub(crate) fn metrics(control: &Control) -> Vec<aryk_metrics::Nvme> {
    let describe = |controller: &AttachedController| {
        let (info, counts) = (controller.info(), controller.counts());
        let celsius = info.smart.as_ref().and_then(|(smart, _)| smart.celsius());
        let sum = |of: fn(&PairCounts) -> u64| counts.pairs.iter().map(of).sum();
        aryk_metrics::Nvme {
            name: info.name,
            is_ready: info.phase == aryk_bdev_nvme::Phase::Ready,
            disks: info.namespaces.into_iter().filter_map(|namespace| namespace.disk).collect(),
            celsius: celsius.map(|celsius| u64::try_from(celsius).unwrap_or_default()),
            resets: counts.resets,
            aborts: counts.aborts,
            retries: counts.retried,
            warnings: counts.warnings,
            errors: CodeType::ALL.map(|of| (of.name(), counts.errors[of as usize])).into(),
            commands: counts.submitted,
            doorbells: counts.doorbells,
            in_flight: sum(|pair| pair.in_flight),
            pool_pages: sum(|pair| pair.pool.0),
            pool_free_min: {
                let there = counts.pairs.iter().filter(|pair| pair.qid.is_some());
                there.map(|pair| pair.pool.1).min().unwrap_or_default()
            },
        }
    };
    control.nvme.controllers.list().iter().map(|controller| describe(controller)).collect()
}

/// The controllers of other hosts for monitoring.
pub(crate) fn remote_metrics(control: &Control) -> Vec<aryk_metrics::Remote> {
    let of_path = |path: &PathInfo| aryk_metrics::RemotePath {
        address: path.address,
        is_connected: path.is_connected,
        losses: path.losses,
    };
    let describe = |controller: &RemoteController| {
        let info = controller.info();
        aryk_metrics::Remote {
            name: controller.name().to_owned(),
            paths: info.paths.iter().map(of_path).collect(),
            resubmitted: info.resubmitted,
            failed: info.failed_by_loss,
        }
    };
    control.nvme.remotes.list().iter().map(|controller| describe(controller)).collect()
}

/// One of the results of `framework_get_pci_devices`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "PciDevice")]
struct PciDevice {
    /// PCI address; for a device that another process emulates, the path of its socket.
    address: String,
    /// The configuration space in hexadecimal digits, as it was when the controller became ready.
    config_space: String,
}

async fn get_pci_devices(control: &Control, _: NoParams) -> Result<Vec<PciDevice>, Error> {
    let describe = |info: aryk_bdev_nvme::Info| {
        let mut config_space = String::with_capacity(2 * info.config_space.len());
        info.config_space.iter().for_each(|byte| _ = write!(config_space, "{byte:02x}"));
        PciDevice { address: info.location, config_space }
    };
    let controllers = control.nvme.controllers.list();
    Ok(controllers.iter().map(|controller| describe(controller.info())).collect())
}
