//! The paths of NVMe controllers of other hosts: they are added by `bdev_nvme_attach_controller`, removed by
//! `bdev_nvme_detach_controller`, and used as the methods here say. Control context.

use super::attach::{Attach, PathMode};
use super::options::{MultipathOptions, PathPolicy, PathSelector};
use super::remote::{self, of_family};
use super::{Control, Error, Phase, Table};
use crate::config::Subsystem;
use crate::methods::nvmf::KeyNames;
use aryk_bdev_nvme::NamespaceInfo;
use aryk_bdev_nvme::fabrics::{
    PathInfo, Policy, RemoteController, RemoteError, RemotePhase, Transport as By,
};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

/// Requests that a path takes before the next one, if the caller does not say.
const ROUND_ROBIN: u32 = 1;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_nvme_get_io_paths",
        Phase::RunTime,
        "Lists the paths of disks of other hosts, for each core with a queue.",
        async |control: &Control, p: OfDisk| get_io_paths(control, p.name.as_deref()),
    );
    table.add(
        "bdev_nvme_set_multipath_policy",
        Phase::RunTime,
        "Sets how the paths of a disk of another host are used.",
        set_policy,
    );
    table.add(
        "bdev_nvme_set_preferred_path",
        Phase::RunTime,
        "Sets the path that takes the requests of a disk of another host, while it is one of the best.",
        set_preferred,
    );
    table.add(
        "bdev_nvme_set_keys",
        Phase::RunTime,
        "Sets or removes the secrets with which this host authenticates at a controller of another host (DH-HMAC-CHAP).",
        set_keys,
    );
}

/// A further path of a controller.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NvmeFurtherPath")]
pub(super) struct Further {
    /// IP address of the target.
    traddr: String,
    /// Port of the target.
    trsvcid: String,
    /// IP address of this host from which it connects. Default: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    hostaddr: Option<String>,
    /// Port of this host from which it connects. Default: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    hostsvcid: Option<String>,
}

impl Further {
    /// A path from any address of this host.
    pub(super) fn at(address: SocketAddr) -> Self {
        let (traddr, trsvcid) = (address.ip().to_string(), address.port().to_string());
        Self { traddr, trsvcid, hostaddr: None, hostsvcid: None }
    }

    fn of(path: &PathInfo) -> Self {
        Self {
            traddr: path.address.ip().to_string(),
            trsvcid: path.address.port().to_string(),
            hostaddr: path.source.map(|source| source.ip().to_string()),
            hostsvcid: path.source.map(|source| source.port().to_string()),
        }
    }

    /// The addresses, as the module has them.
    pub(super) fn addresses(&self) -> Result<(SocketAddr, Option<SocketAddr>), Error> {
        let address = remote::socket_address("traddr", &self.traddr, Some(&self.trsvcid), remote::PORT)?;
        let source = remote::source(self.hostaddr.as_deref(), self.hostsvcid.as_deref())?;
        Ok((address, source))
    }
}

/// How the paths of a namespace's disk are used.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "NvmeDiskPolicy")]
pub(super) struct DiskPolicy {
    /// The namespace.
    pub(super) nsid: u32,
    /// How the paths of the namespace's disk are used.
    pub(super) options: MultipathOptions,
}

/// How the paths of disks are used, as the module has it.
pub(super) fn policy(options: &MultipathOptions) -> Policy {
    match (options.policy, options.selector) {
        (Some(PathPolicy::ActiveActive), Some(PathSelector::QueueDepth)) => Policy::QueueDepth,
        (Some(PathPolicy::ActiveActive), _) => {
            Policy::RoundRobin(options.min_io.unwrap_or(ROUND_ROBIN).max(1))
        }
        _ => Policy::ActivePassive,
    }
}

/// Adds a path to a controller that exists, and returns the names of its disks.
pub(super) async fn add(
    control: &Control,
    controller: &RemoteController,
    p: &Attach,
) -> Result<Vec<String>, Error> {
    let name = &p.name;
    if matches!(p.multipath, Some(PathMode::Disable)) {
        let detail = format!("there is a controller {name} already, and `multipath` is `disable`");
        return Err(Error::errno(Errno::ALREADY, detail));
    }
    if controller.info().phase == RemotePhase::Connecting {
        return Err(RemoteError::Exists(name.clone()).into());
    }
    let own = controller.config().transport;
    if remote::transport(&p.trtype) != Some(own) {
        let own = remote::trtype(own);
        return Err(Error::invalid(format!("all paths of the controller {name} are by the transport {own}")));
    }
    if p.paths.is_some() || p.policies.is_some() {
        return Err(Error::invalid("a call adds one path: `paths` and `policies` are for the first one"));
    }
    let subsystem = p.subnqn.as_deref().unwrap_or_default();
    if subsystem != controller.config().subsystem.as_str() {
        let detail =
            format!("the controller {name} has paths to the subsystem {}", controller.config().subsystem);
        return Err(Error::errno(Errno::EXIST, detail));
    }
    let noted = control.config.params(Subsystem::Nvme, name).unwrap_or_default();
    let given = serde_json::to_value(p).map_err(|error| Error::Internal(error.to_string()))?;
    // The others are of the path, or say the same of any path.
    let of_controller =
        ["hostnqn", "hostid", "hdgst", "ddgst", "nsid", "disk", "psk", "dhchap_key", "dhchap_ctrlr_key"];
    let differs = |param: &&&str| given.get(**param).is_some_and(|value| noted.get(**param) != Some(value));
    if let Some(param) = of_controller.iter().find(differs) {
        let detail = format!("`{param}` must be as for the other paths of the controller {name}, or missing");
        return Err(Error::invalid(detail));
    }
    let address = remote::address(p)?;
    let source = remote::source(p.hostaddr.as_deref(), p.hostsvcid.as_deref())?;
    control.nvme.remotes.add_path(name, address, source).await?;
    store(control, controller);
    let namespaces = controller.info().namespaces;
    Ok(namespaces.into_iter().filter_map(|namespace| namespace.disk).collect())
}

/// Removes a path of a controller that has others. Returns whether the address is that of one; otherwise the controller is to be
/// detached.
pub(super) async fn remove(
    control: &Control,
    controller: &RemoteController,
    is_meant: impl Fn(&PathInfo) -> bool,
) -> Result<bool, Error> {
    let paths = controller.info().paths;
    let meant: Vec<&PathInfo> = paths.iter().filter(|path| is_meant(path)).collect();
    if meant.is_empty() {
        let own = remote::trtype(controller.config().transport);
        let there: Vec<String> = paths.iter().map(|path| path.address.to_string()).collect();
        let detail =
            format!("the controller '{}' has paths to {}, by {own}", controller.name(), there.join(", "));
        return Err(Error::errno(Errno::NODEV, detail));
    }
    if meant.len() == paths.len() {
        return Ok(false);
    }
    for path in meant {
        controller.remove_path(path.number).await?;
        store(control, controller);
    }
    Ok(true)
}

/// Stores the paths of a controller with the call that attaches it.
fn store(control: &Control, controller: &RemoteController) {
    let paths: Vec<Further> = controller.info().paths.iter().map(Further::of).collect();
    let Some((first, further)) = paths.split_first() else { return };
    let params = [
        ("traddr", json!(first.traddr)),
        ("trsvcid", json!(first.trsvcid)),
        ("adrfam", Value::Null),
        ("hostaddr", json!(first.hostaddr)),
        ("hostsvcid", json!(first.hostsvcid)),
        ("paths", if further.is_empty() { Value::Null } else { json!(further) }),
    ];
    // One record: its storing need not be waited for.
    drop(control.config.changed_durably(Subsystem::Nvme, controller.name(), params));
}

/// Parameters of `bdev_nvme_get_io_paths`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct OfDisk {
    /// Name of the disk. Default: all disks of other hosts.
    name: Option<String>,
}

/// The result of `bdev_nvme_get_io_paths`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeIoPaths")]
struct IoPaths {
    poll_groups: Vec<PollGroup>,
}

/// The paths of a core.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmePathGroup")]
struct PollGroup {
    /// `reactor_` and the core.
    thread: String,
    io_paths: Vec<IoPath>,
}

/// A path of a disk.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeIoPath")]
struct IoPath {
    /// Name of the disk.
    bdev_name: String,
    /// Identifier of the controller at the path's end.
    cntlid: u16,
    /// Whether the next request may take this path.
    current: bool,
    /// Whether the path is connected.
    connected: bool,
    /// Whether the controller gives access to the namespace.
    accessible: bool,
    transport: Transport,
}

/// Where a path leads to.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmePathTransport")]
struct Transport {
    trtype: &'static str,
    traddr: String,
    trsvcid: String,
    adrfam: &'static str,
}

fn get_io_paths(control: &Control, disk: Option<&str>) -> Result<IoPaths, Error> {
    if let Some(disk) = disk {
        find(control, disk)?;
    }
    let mut groups: BTreeMap<u16, Vec<IoPath>> = BTreeMap::new();
    for controller in control.nvme.remotes.list() {
        let info = controller.info();
        let is_meant = |name: &&String| disk.is_none_or(|disk| *name == disk);
        for namespace in &info.namespaces {
            let Some(name) = namespace.disk.as_ref().filter(is_meant) else { continue };
            let cores = info.paths.iter().flat_map(|path| path.queues.iter().copied());
            for core in cores.collect::<std::collections::BTreeSet<u16>>() {
                let current = info.current_paths(namespace.nsid, core);
                let transport = controller.config().transport;
                let paths = info.paths.iter();
                let describe = |path: &PathInfo| {
                    io_path(name, namespace.nsid, (transport, path), current.contains(&path.number))
                };
                groups.entry(core).or_default().extend(paths.map(describe));
            }
        }
    }
    let group = |(core, io_paths)| PollGroup { thread: format!("reactor_{core}"), io_paths };
    Ok(IoPaths { poll_groups: groups.into_iter().map(group).collect() })
}

fn io_path(disk: &str, nsid: u32, (transport, path): (By, &PathInfo), current: bool) -> IoPath {
    let access = path.access.iter().find(|access| access.nsid == nsid);
    IoPath {
        bdev_name: disk.to_owned(),
        cntlid: path.controller_id,
        current,
        connected: path.is_connected,
        accessible: access.is_some_and(|access| access.state.is_usable()),
        transport: Transport {
            trtype: remote::trtype(transport),
            traddr: path.address.ip().to_string(),
            trsvcid: path.address.port().to_string(),
            adrfam: of_family(path.address),
        },
    }
}

/// The controller of a disk of another host.
pub(super) fn find(control: &Control, disk: &str) -> Result<(Arc<RemoteController>, NamespaceInfo), Error> {
    let detail = || Error::errno(Errno::NODEV, format!("'{disk}' is no NVMe disk of another host"));
    remote::controller_of(control, disk).ok_or_else(detail)
}

/// Parameters of `bdev_nvme_set_multipath_policy`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetPolicy {
    /// Name of the disk.
    name: String,
    /// How many paths take requests.
    policy: PathPolicy,
    /// Only with `active_active`. Default: `round_robin`.
    selector: Option<PathSelector>,
    /// Requests that a path takes before the next one, at least 1; only with `round_robin`. Default: 1.
    rr_min_io: Option<u32>,
}

async fn set_policy(control: &Control, p: SetPolicy) -> Result<bool, Error> {
    if p.rr_min_io == Some(0) {
        return Err(Error::invalid("`rr_min_io` must be at least 1"));
    }
    let is_active = matches!(p.policy, PathPolicy::ActiveActive);
    if !is_active && (p.selector.is_some() || p.rr_min_io.is_some()) {
        return Err(Error::invalid("`selector` and `rr_min_io` need the policy `active_active`"));
    }
    if p.rr_min_io.is_some() && matches!(p.selector, Some(PathSelector::QueueDepth)) {
        return Err(Error::invalid("`rr_min_io` needs the selector `round_robin`"));
    }
    let (controller, namespace) = find(control, &p.name)?;
    let options = MultipathOptions { policy: Some(p.policy), selector: p.selector, min_io: p.rr_min_io };
    controller.set_policy(namespace.nsid, policy(&options)).await?;
    let params = control.config.params(Subsystem::Nvme, controller.name()).unwrap_or_default();
    let noted = params.get("policies").cloned().unwrap_or_default();
    let mut policies: Vec<DiskPolicy> = serde_json::from_value(noted).unwrap_or_default();
    policies.retain(|of| of.nsid != namespace.nsid);
    policies.push(DiskPolicy { nsid: namespace.nsid, options });
    control.config.changed(Subsystem::Nvme, controller.name(), "policies", json!(policies));
    Ok(true)
}

/// Parameters of `bdev_nvme_set_preferred_path`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetPreferred {
    /// Name of the disk.
    name: String,
    /// Identifier of the controller at the path's end.
    cntlid: u16,
}

async fn set_preferred(control: &Control, p: SetPreferred) -> Result<bool, Error> {
    let (controller, namespace) = find(control, &p.name)?;
    controller.prefer(namespace.nsid, p.cntlid).await?;
    Ok(true)
}

/// Parameters of `bdev_nvme_set_keys`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NvmeSetKeys")]
struct SetKeys {
    /// Name of the controller.
    name: String,
    /// Name of the secret in the keyring by which this host proves who it is. Default: it does not.
    dhchap_key: Option<String>,
    /// Name of the secret by which the target is to prove who it is; needs `dhchap_key`.
    dhchap_ctrlr_key: Option<String>,
}

async fn set_keys(control: &Control, p: SetKeys) -> Result<bool, Error> {
    let controller = control.nvme.remotes.find(&p.name)?;
    let names = KeyNames { key: p.dhchap_key.as_deref(), controller_key: p.dhchap_ctrlr_key.as_deref() };
    let keys = names.read(control).await?;
    controller.set_secrets(keys.map(|keys| keys.secrets)).await?;
    let params = [("dhchap_key", json!(p.dhchap_key)), ("dhchap_ctrlr_key", json!(p.dhchap_ctrlr_key))];
    // One record: its storing need not be waited for.
    drop(control.config.changed_durably(Subsystem::Nvme, &p.name, params));
    Ok(true)
}
