//! `bdev_nvme_get_controllers`, and the members of `bdev_get_bdevs` for disks of NVMe controllers. Control context.

use super::abilities::{Abilities, hexadecimal};
use super::remote::{of_family, trtype};
use super::statistics::Errors;
use super::{Control, Error, Phase, Table, find, remote};
use aryk_bdev::{Bdev, MemoryClientInfo};
use aryk_bdev_nvme::fabrics::{PathInfo, RemoteConfig, RemoteController, RemoteInfo, Transport, client_name};
use aryk_bdev_nvme::{AttachedController, Info, NamespaceInfo, Phase as State};
use aryk_nvme::claims::ControllerInfo;
use aryk_pci::Address;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::UNIX_EPOCH;

/// The product name of these disks.
const PRODUCT: &str = "NVMe disk";

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_nvme_get_controllers",
        Phase::RunTime,
        "Lists the attached NVMe controllers.",
        get_controllers,
    );
}

/// Where a controller is.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "NvmeTransportId")]
pub(crate) struct Trid {
    /// `PCIe`, `TCP`, `RDMA` or `VFIOUSER`.
    trtype: &'static str,
    /// PCI address, IP address of the target, or path of the socket.
    traddr: String,
    /// `IPv4` or `IPv6`; only for `TCP` and `RDMA`.
    #[serde(skip_serializing_if = "Option::is_none")]
    adrfam: Option<&'static str>,
    /// Port of the target; only for `TCP` and `RDMA`.
    #[serde(skip_serializing_if = "Option::is_none")]
    trsvcid: Option<String>,
    /// NQN of the target's subsystem; only for `TCP` and `RDMA`.
    #[serde(skip_serializing_if = "Option::is_none")]
    subnqn: Option<String>,
}

impl Trid {
    fn of(info: &Info) -> Self {
        let is_pci = info.location.parse::<Address>().is_ok();
        Self {
            trtype: if is_pci { "PCIe" } else { "VFIOUSER" },
            traddr: info.location.clone(),
            adrfam: None,
            trsvcid: None,
            subnqn: None,
        }
    }

    /// The first path that is connected, or the first of all.
    fn of_remote(info: &RemoteInfo, config: &RemoteConfig) -> Self {
        let first = info.paths.iter().find(|path| path.is_connected).or_else(|| info.paths.first());
        let address = first.map_or(config.address, |path| path.address);
        Self::of_target(config.transport, address, info.subsystem.as_str())
    }

    /// A subsystem at an address.
    pub(super) fn of_target(transport: Transport, address: SocketAddr, subsystem: &str) -> Self {
        Self {
            trtype: trtype(transport),
            traddr: address.ip().to_string(),
            adrfam: Some(of_family(address)),
            trsvcid: Some(address.port().to_string()),
            subnqn: Some(subsystem.to_owned()),
        }
    }
}

/// `driver_specific.nvme` of a disk.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "NvmeDetails")]
pub(crate) struct Details {
    /// PCI address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pci_address: Option<String>,
    trid: Trid,
    #[serde(skip_serializing_if = "Option::is_none")]
    ctrlr_data: Option<ControllerData>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vs: Option<Version>,
    ns_data: NamespaceData,
    /// Aryk only: name of the controller.
    controller: String,
}

/// Identity and abilities of a controller.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "NvmeControllerData")]
struct ControllerData {
    /// Controller ID.
    cntlid: u16,
    /// PCI vendor, in hexadecimal.
    vendor_id: String,
    model_number: String,
    serial_number: String,
    firmware_revision: String,
    oacs: Oacs,
    /// Always false.
    multi_ctrlr: bool,
    /// Always false.
    ana_reporting: bool,
}

/// Optional admin commands of a controller: 1 if it supports them.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "NvmeOacs")]
struct Oacs {
    security: u8,
    format: u8,
    firmware: u8,
    ns_manage: u8,
}

/// The version of the specification.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "NvmeVersion")]
struct Version {
    /// As `1.4`.
    nvme_version: String,
}

/// A namespace.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "NvmeNamespaceData")]
struct NamespaceData {
    /// Namespace ID.
    id: u32,
    /// Whether other controllers may access it too.
    can_share: bool,
    /// Aryk only: blocks that one write stores entirely or not at all, also when power fails (AWUPF, NAWUPF).
    atomic_write_blocks: u64,
}

fn controller_data(info: &ControllerInfo) -> ControllerData {
    let supported = info.supported;
    ControllerData {
        cntlid: info.controller_id,
        vendor_id: format!("{:#06x}", info.vendor),
        model_number: info.model.clone(),
        serial_number: info.serial.clone(),
        firmware_revision: info.firmware.clone(),
        oacs: Oacs {
            security: supported.security.into(),
            format: supported.format.into(),
            firmware: supported.firmware.into(),
            ns_manage: supported.namespace_management.into(),
        },
        multi_ctrlr: false,
        ana_reporting: false,
    }
}

fn version(info: &ControllerInfo) -> Version {
    let (major, minor, tertiary) = (info.version >> 16, info.version >> 8 & 0xff, info.version & 0xff);
    let third = if tertiary == 0 { String::new() } else { format!(".{tertiary}") };
    Version { nvme_version: format!("{major}.{minor}{third}") }
}

/// The controller of a disk, and the NSID of the disk's namespace.
pub(super) fn controller_of(
    control: &Control,
    bdev: &Bdev,
) -> Option<(std::sync::Arc<AttachedController>, u32)> {
    if bdev.device().product() != PRODUCT {
        return None;
    }
    control.nvme.controllers.list().into_iter().find_map(|controller| {
        let nsid = controller.nsid_of(bdev.name())?;
        Some((controller, nsid))
    })
}

/// The members of `bdev_get_bdevs` that only disks of NVMe controllers have.
pub(crate) fn details(control: &Control, bdev: &Bdev) -> Option<Details> {
    let Some((controller, id)) = controller_of(control, bdev) else { return remote_details(control, bdev) };
    let info = controller.info();
    let trid = Trid::of(&info);
    let namespace = info.namespaces.iter().find(|namespace| namespace.nsid == id)?;
    Some(Details {
        pci_address: (trid.trtype == "PCIe").then(|| trid.traddr.clone()),
        trid,
        ctrlr_data: info.controller.as_ref().map(controller_data),
        vs: info.controller.as_ref().map(version),
        ns_data: NamespaceData {
            id,
            can_share: namespace.namespace.as_ref().is_ok_and(|n| n.is_shared),
            atomic_write_blocks: bdev.device().limits().atomic_blocks.0,
        },
        controller: info.name,
    })
}

/// Those of a disk of another host.
fn remote_details(control: &Control, bdev: &Bdev) -> Option<Details> {
    let (controller, namespace) = remote::controller_of(control, bdev.name())?;
    let info = controller.info();
    Some(Details {
        pci_address: None,
        trid: Trid::of_remote(&info, controller.config()),
        ctrlr_data: info.controller.as_ref().map(controller_data),
        vs: info.controller.as_ref().map(version),
        ns_data: NamespaceData {
            id: namespace.nsid,
            can_share: namespace.namespace.as_ref().is_ok_and(|n| n.is_shared),
            atomic_write_blocks: bdev.device().limits().atomic_blocks.0,
        },
        controller: controller.name().to_owned(),
    })
}

/// Parameters of `bdev_nvme_get_controllers`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetControllers {
    /// Name of the controller. Default: all.
    name: Option<String>,
}

/// One of the results of `bdev_nvme_get_controllers`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeController")]
struct Description {
    name: String,
    /// The paths of the controller.
    ctrlrs: Vec<Path>,
    trid: Trid,
    /// Controller ID.
    cntlid: u16,
    /// Aryk only: model, serial number, firmware, as the controller reported them; missing before it was ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    ctrlr_data: Option<ControllerData>,
    /// Aryk only: what the controller supports; missing before it was ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    abilities: Option<Abilities>,
    /// Aryk only: the namespaces.
    namespaces: Vec<Namespace>,
    /// Aryk only: which memory of VMs is pinned: `auto`, `pin` or `bounce`.
    dma: &'static str,
    /// Aryk only: the memory of VMs that the drive, or the target over RDMA, accesses directly, and that is copied; missing with
    /// `bounce`, and before the controller was ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
    /// Aryk only: whether reactors sleep while requests are in flight.
    interrupts: bool,
    /// Aryk only: queue pairs that the controller allows.
    queue_pairs_max: u16,
    /// Aryk only: resets since the controller was attached.
    resets: u64,
    /// Aryk only: resets of single queue pairs, after completions that no correct controller posts.
    queue_resets: u64,
    /// Aryk only: commands that were aborted because they were late.
    aborts: u64,
    /// Aryk only: commands that were tried again, as the controller asked.
    retries: u64,
    /// Aryk only: requests that resets submitted again.
    resubmitted: u64,
    /// Aryk only: requests that failed because a reset could not submit them again.
    failed_by_reset: u64,
    /// Aryk only: errors and health warnings that the controller reported by itself.
    warnings: u64,
    /// Aryk only: I/O commands that the controller answered by an error; those that got an injected error count too. Missing for
    /// a controller of another host.
    #[serde(skip_serializing_if = "Option::is_none")]
    errors: Option<Errors>,
    /// Aryk only: commands that got an error that was injected.
    injected_errors: u64,
    /// Aryk only: the queue pairs; empty for a controller of another host.
    queue_pairs: Vec<QueuePair>,
    /// Aryk only: what only controllers of other hosts have.
    #[serde(skip_serializing_if = "Option::is_none")]
    remote: Option<Remote>,
    /// Aryk only: the last reset.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_reset: Option<LastReset>,
    /// Aryk only: the last failure of the controller, as text.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
}

/// A controller of another host.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeRemote")]
struct Remote {
    /// Cores with a queue, each with a connection of its own on each path.
    cores: Vec<u16>,
    /// Times that its connections were lost, or closed by `bdev_nvme_reset_controller`.
    losses: u64,
    /// Whether the target says that it ends an earlier controller of this host before it takes a new one. If not, changes that a
    /// lost connection had, and later ones of the same blocks, wait for the keep-alive timeout.
    ends_earlier: bool,
    /// Whether PDUs have header digests.
    hdgst: bool,
    /// Whether PDUs have data digests.
    ddgst: bool,
}

/// Regions of VMs' memory, for a controller: `aryk_memory_clients_get` lists those that are copied, and why.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeMemory")]
struct Memory {
    /// Regions that the drive, or the target, accesses directly: they are pinned.
    pinned: u64,
    /// Regions that are being pinned. Until they are, data is copied.
    pinning: u64,
    /// Regions that were copied because `dma` is `auto` and they have no huge pages, in total.
    declined: u64,
    /// Regions that could not be pinned, in total.
    failures: u64,
    /// Pieces of requests that were copied, in total.
    bounced_pieces: u64,
}

/// A path to a controller.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmePath")]
struct Path {
    /// `enabled`, `resetting`, `reconnect_is_delayed` (the drive has vanished, and requests wait), `disabled`, or `deleting`.
    state: &'static str,
    trid: Trid,
    /// Controller ID.
    cntlid: u16,
    host: Host,
}

/// The host side of a network connection: empty for drives.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[schemars(rename = "NvmeHost")]
struct Host {
    nqn: String,
    addr: String,
    svcid: String,
}

/// A namespace of a controller.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeNamespace")]
struct Namespace {
    nsid: u32,
    /// Name of its disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<String>,
    /// Bytes of a block.
    #[serde(skip_serializing_if = "Option::is_none")]
    block_size: Option<u64>,
    /// Number of blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    num_blocks: Option<u64>,
    /// Namespace Globally Unique Identifier, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    nguid: Option<String>,
    /// IEEE Extended Unique Identifier, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    eui64: Option<String>,
    /// Why the namespace is not served.
    #[serde(skip_serializing_if = "Option::is_none")]
    unserved: Option<String>,
}

/// A queue pair of a reactor.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeQueuePair")]
struct QueuePair {
    qid: u16,
    /// Core of the reactor.
    core: u16,
    /// Commands.
    submitted: u64,
    /// Completions.
    completed: u64,
    /// Writes to doorbell registers.
    doorbells: u64,
    /// Commands in flight at the last completion.
    in_flight: u64,
    /// Pages of bounce buffers.
    pool_pages: u64,
    /// The fewest pages that were free.
    pool_free_min: u64,
}

/// A reset of a controller.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeLastReset")]
struct LastReset {
    /// Why.
    reason: String,
    /// When it began, in seconds since 1970.
    at: u64,
    /// Its duration in milliseconds; missing while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    took_ms: Option<u64>,
}

const fn state(phase: State) -> &'static str {
    match phase {
        State::Ready => "enabled",
        State::Starting | State::Resetting => "resetting",
        State::Away => "reconnect_is_delayed",
        State::Disabled => "disabled",
        State::Stopping | State::Ended => "deleting",
    }
}

/// The memory of VMs, as the registry knows it by the name of its clients: a drive's function, or each device by which a
/// controller of another host is reached.
fn memory_of(control: &Control, name: &str) -> Option<Memory> {
    let clients = control.disks.registry.memory().clients();
    let of_name = clients.into_iter().filter(|client| client.name == name);
    let describe = |client: MemoryClientInfo| Memory {
        pinned: client.registered,
        pinning: client.registering,
        declined: client.declined,
        failures: client.failed,
        bounced_pieces: client.bounced,
    };
    of_name.map(describe).reduce(|sum, one| Memory {
        pinned: sum.pinned + one.pinned,
        pinning: sum.pinning + one.pinning,
        declined: sum.declined + one.declined,
        failures: sum.failures + one.failures,
        bounced_pieces: sum.bounced_pieces + one.bounced_pieces,
    })
}

fn describe(control: &Control, controller: &AttachedController) -> Description {
    let (info, counts) = (controller.info(), controller.counts());
    let memory = memory_of(control, &info.location);
    let trid = Trid::of(&info);
    let cntlid = info.controller.as_ref().map_or(0, |info| info.controller_id);
    let path = Path { state: state(info.phase), trid: trid.clone(), cntlid, host: Host::default() };
    let pair = |pair: &aryk_bdev_nvme::PairCounts| {
        pair.qid.map(|qid| QueuePair {
            qid,
            core: pair.core,
            submitted: pair.submitted,
            completed: pair.completed,
            doorbells: pair.sq_doorbells + pair.cq_doorbells,
            in_flight: pair.in_flight,
            pool_pages: pair.pool.0,
            pool_free_min: pair.pool.1,
        })
    };
    let last_reset = |reset: aryk_bdev_nvme::LastReset| LastReset {
        reason: format!("{:?}", reset.reason),
        at: reset.at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        took_ms: reset.took.map(|took| took.as_millis() as u64),
    };
    Description {
        name: info.name,
        ctrlrs: vec![path],
        trid,
        cntlid,
        ctrlr_data: info.controller.as_ref().map(controller_data),
        abilities: info.controller.as_ref().map(super::abilities::of),
        namespaces: info.namespaces.iter().map(describe_namespace).collect(),
        dma: match info.dma {
            aryk_bdev_nvme::Dma::Auto => "auto",
            aryk_bdev_nvme::Dma::Pin => "pin",
            aryk_bdev_nvme::Dma::Bounce => "bounce",
        },
        memory,
        interrupts: info.has_interrupts,
        queue_pairs_max: info.pairs_allowed,
        resets: counts.resets,
        queue_resets: counts.queue_resets,
        aborts: counts.aborts,
        retries: counts.retried,
        resubmitted: counts.resubmitted,
        failed_by_reset: counts.failed_by_reset,
        warnings: counts.warnings,
        errors: Some(counts.errors.into()),
        injected_errors: counts.injected,
        queue_pairs: counts.pairs.iter().filter_map(pair).collect(),
        remote: None,
        last_reset: info.last_reset.map(last_reset),
        last_error: info.last_failure,
    }
}

fn describe_namespace(info: &NamespaceInfo) -> Namespace {
    let namespace = info.namespace.as_ref();
    Namespace {
        nsid: info.nsid,
        disk: info.disk.clone(),
        block_size: namespace.ok().map(|namespace| 1 << namespace.block_shift),
        num_blocks: namespace.ok().map(|namespace| namespace.blocks),
        nguid: namespace.ok().and_then(|namespace| Some(hexadecimal(&namespace.ids.nguid?))),
        eui64: namespace.ok().and_then(|namespace| Some(hexadecimal(&namespace.ids.eui64?))),
        unserved: namespace.err().map(ToString::to_string),
    }
}

fn describe_remote(control: &Control, controller: &RemoteController) -> Description {
    let (info, config) = (controller.info(), controller.config());
    let trid = Trid::of_remote(&info, config);
    let cntlid = info.controller.as_ref().map_or(0, |info| info.controller_id);
    let of_path = |path: &PathInfo| Path {
        state: remote::state(info.phase, path.is_connected),
        trid: Trid::of_target(config.transport, path.address, info.subsystem.as_str()),
        cntlid: path.controller_id,
        host: Host {
            nqn: info.host.to_string(),
            addr: path.source.map(|source| source.ip().to_string()).unwrap_or_default(),
            svcid: path.source.map(|source| source.port().to_string()).unwrap_or_default(),
        },
    };
    let ctrlrs = info.paths.iter().map(of_path).collect();
    Description {
        name: controller.name().to_owned(),
        ctrlrs,
        trid,
        cntlid,
        ctrlr_data: info.controller.as_ref().map(controller_data),
        abilities: info.controller.as_ref().map(super::abilities::of),
        namespaces: info.namespaces.iter().map(describe_namespace).collect(),
        dma: if config.is_direct { "pin" } else { "bounce" },
        memory: memory_of(control, &client_name(controller.name())),
        interrupts: true,
        queue_pairs_max: config.queues,
        resets: info.losses,
        queue_resets: 0,
        aborts: 0,
        retries: info.retried,
        resubmitted: info.resubmitted,
        failed_by_reset: info.failed_by_loss,
        warnings: 0,
        errors: None,
        injected_errors: 0,
        queue_pairs: Vec::new(),
        remote: Some(Remote {
            cores: info
                .paths
                .iter()
                .flat_map(|path| path.queues.iter().copied())
                .collect::<BTreeSet<u16>>()
                .into_iter()
                .collect(),
            losses: info.losses,
            ends_earlier: info.paths.iter().all(|path| path.ends_earlier),
            hdgst: config.header_digest,
            ddgst: config.data_digest,
        }),
        last_reset: None,
        last_error: info.last_loss,
    }
}

async fn get_controllers(control: &Control, p: GetControllers) -> Result<Vec<Description>, Error> {
    let remotes = control.nvme.remotes.list();
    let Some(name) = p.name else {
        let mut all: Vec<Description> =
            control.nvme.controllers.list().iter().map(|controller| describe(control, controller)).collect();
        all.extend(remotes.iter().map(|controller| describe_remote(control, controller)));
        return Ok(all);
    };
    match remotes.iter().find(|controller| controller.name() == name) {
        Some(controller) => Ok(vec![describe_remote(control, controller)]),
        None => Ok(vec![describe(control, &*find(control, &name)?)]),
    }
}
