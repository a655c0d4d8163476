//! `bdev_rbd_*`: clients of Ceph clusters, and disks in their images. Control context.
//!
//! The note of a disk has the addresses of the clients that may write to its image: a restarted daemon excludes them from the
//! cluster before it opens the image. It adds those of its own client to the note, durably, before it opens the image.

mod image;
mod options;
mod waits;

use super::details::{Details, Rbd};
use super::{Control, Error, Name, Phase, Table, is_default, volumes};
use crate::config::{Call, Subsystem};
use crate::journal;
use crate::params::{Count, CpuMask};
use aryk_bdev::{Bdev, Bytes, Identity};
use aryk_bdev_rbd as module;
use aryk_bdev_rbd::{Cluster, ClusterConfig, Clusters, Spec};
use options::Options;
pub(crate) use options::{for_output, wrapped_by};
use rustix::io::Errno;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;
use waits::Waits;

const MODULE: &str = "rbd";
pub(crate) const CREATE: &str = "bdev_rbd_create";
pub(crate) const REGISTER: &str = "bdev_rbd_register_cluster";
/// The parameter with the addresses of clients, which only the state store has.
const CLIENTS: &str = "clients";
/// How long the store may take to write the addresses of a new client.
const WRITE_PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        REGISTER,
        Phase::RunTime,
        "Connects a client to a Ceph cluster, for disks that name it.",
        register_cluster,
    );
    table.add(
        "bdev_rbd_unregister_cluster",
        Phase::RunTime,
        "Ends a client of `bdev_rbd_register_cluster` that no disk uses.",
        unregister_cluster,
    );
    table.add(
        "bdev_rbd_get_clusters_info",
        Phase::RunTime,
        "Describes the client of that name, or lists all clients of Ceph clusters: those that are registered, and those that disks share.",
        get_clusters,
    );
    table.add(CREATE, Phase::RunTime, "Creates a disk in an image of a Ceph cluster.", create);
    table.add(
        "bdev_rbd_delete",
        Phase::RunTime,
        "Removes a disk of `bdev_rbd_create`; its image stays.",
        async |control: &Control, p: Name| control.remove_disk(MODULE, &p.name).await,
    );
    table.add("bdev_rbd_resize", Phase::RunTime, "Changes the size of a disk and its image.", resize);
    image::register(table);
}

#[derive(Debug)]
pub(crate) struct State {
    pub clusters: Clusters,
    waits: Waits,
}

impl State {
    pub(crate) fn new(clusters: Clusters) -> Self {
        Self { clusters, waits: Waits::default() }
    }
}

impl Default for State {
    fn default() -> Self {
        Self::new(Clusters::new(None, None))
    }
}

/// The cluster that a disk's call names.
pub(crate) fn cluster_of(call: &Call) -> Option<&str> {
    if call.method == CREATE { call.params.get("cluster_name")?.as_str() } else { None }
}

/// Parameters of `bdev_rbd_register_cluster`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Register {
    /// Name for the client.
    name: String,
    /// Ceph's user, such as `admin` for `client.admin`, which is the default.
    #[serde(skip_serializing_if = "Option::is_none")]
    user_id: Option<String>,
    /// Options of Ceph's configuration, such as `mon_host`. Without `config_file`, no file is read then.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Map<String, Value>>")]
    config_param: Option<Options>,
    /// Path of the configuration file. Default: Ceph's.
    #[serde(skip_serializing_if = "Option::is_none")]
    config_file: Option<PathBuf>,
    /// Path of the file with the user's key. Default: Ceph's.
    #[serde(skip_serializing_if = "Option::is_none")]
    key_file: Option<PathBuf>,
    /// Aryk only: name of the user's key in the keyring, which has it as `ceph auth print-key` prints it.
    #[serde(skip_serializing_if = "Option::is_none")]
    key_name: Option<String>,
    /// Cores for the client's threads. Default: those of `arykd --client-cpus`.
    #[serde(skip_serializing_if = "Option::is_none")]
    core_mask: Option<CpuMask>,
}

async fn register_cluster(control: &Control, mut p: Register) -> Result<String, Error> {
    control.rbd.waits.check(REGISTER, &p.name)?;
    if p.name.is_empty() || p.name.len() > super::NAME_LEN_MAX {
        return Err(Error::invalid(format!("a cluster's name has 1 to {} bytes", super::NAME_LEN_MAX)));
    }
    let source = options::Source {
        about: [REGISTER, &p.name],
        key_name: p.key_name.as_deref(),
        key_file: p.key_file.as_ref(),
    };
    let (options, key) = options::open(control, source, &mut p.config_param).await?;
    let config = ClusterConfig {
        user: p.user_id.clone(),
        file: p.config_file.clone(),
        key_file: p.key_file.clone(),
        key,
        options,
        cores: p.core_mask.clone().map(|mask| mask.0),
    };
    control.check_open()?;
    let registered = control.rbd.clusters.register(&p.name, config).await;
    let failed = registered.as_ref().err().filter(|error| error.has_used_cluster());
    control.rbd.waits.note(REGISTER, &p.name, failed.map(Error::from));
    registered?;
    control.config.made(Subsystem::Rbd, &p.name, REGISTER, &p);
    Ok(p.name)
}

/// Parameters of `bdev_rbd_unregister_cluster`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Unregister {
    /// Name of the client.
    name: String,
}

async fn unregister_cluster(control: &Control, p: Unregister) -> Result<bool, Error> {
    // The call that registers it may have failed after a restart.
    let is_noted = control.config.forget_absent(Subsystem::Rbd, &p.name);
    match control.rbd.clusters.unregister(&p.name).await {
        Err(module::Error::NoCluster(_)) if is_noted => {}
        other => other?,
    }
    control.config.removed(Subsystem::Rbd, &p.name);
    Ok(true)
}

/// Ends a client whose call could not be stored, or was revoked.
pub(crate) async fn unmake(control: &Control, name: &str) -> Result<(), Error> {
    control.config.removed(Subsystem::Rbd, name);
    Ok(control.rbd.clusters.unregister(name).await?)
}

/// Parameters of `bdev_rbd_get_clusters_info`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetClusters {
    /// Name of a registered client. Default: all clients.
    name: Option<String>,
}

/// A client of a Ceph cluster. Without a name, `bdev_rbd_get_clusters_info` gives a list of these.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "RbdCluster")]
struct ClusterInfo {
    /// The name under which it is registered; missing for one that disks share.
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_name: Option<String>,
    /// Ceph's user.
    #[serde(skip_serializing_if = "Option::is_none")]
    user_id: Option<String>,
    /// Path of the configuration file.
    #[serde(skip_serializing_if = "Option::is_none")]
    config_file: Option<PathBuf>,
    /// Path of the file with the user's key.
    #[serde(skip_serializing_if = "Option::is_none")]
    key_file: Option<PathBuf>,
    /// Options of Ceph's configuration, without keys.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    config_param: BTreeMap<String, String>,
    /// Cores of the client's threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    core_mask: Option<String>,
    /// The client's addresses, as in the cluster's list of excluded clients.
    addresses: String,
    /// Number of disks that use the client.
    disks: u64,
    /// Whether the cluster has excluded the client (blocklisted): its disks fail.
    blocklisted: bool,
    /// Number of images that were opened.
    opens: u64,
    /// Number of images that could not be opened.
    failed_opens: u64,
    /// Number of images that librbd did not close in time, and that are left to it.
    quarantined: u64,
}

impl From<module::ClusterInfo> for ClusterInfo {
    fn from(info: module::ClusterInfo) -> Self {
        let module::ClusterInfo { name, config, addresses, disks, is_blocklisted, counts, .. } = info;
        Self {
            cluster_name: name,
            user_id: config.user,
            config_file: config.file,
            key_file: config.key_file,
            config_param: config.options,
            core_mask: config.cores.map(|cores| cores.to_string()),
            addresses,
            disks: disks as u64,
            blocklisted: is_blocklisted,
            opens: counts.opens,
            failed_opens: counts.failed_opens,
            quarantined: counts.quarantined,
        }
    }
}

/// One client, if a name was given; otherwise all.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum ClustersInfo {
    One(Box<ClusterInfo>),
    All(Vec<ClusterInfo>),
}

/// The schema of one client: the clients that are generated from it know no choices.
impl JsonSchema for ClustersInfo {
    fn schema_name() -> Cow<'static, str> {
        ClusterInfo::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        ClusterInfo::json_schema(generator)
    }
}

async fn get_clusters(control: &Control, p: GetClusters) -> Result<ClustersInfo, Error> {
    let mut all = control.rbd.clusters.list();
    let Some(name) = p.name else {
        return Ok(ClustersInfo::All(all.into_iter().map(ClusterInfo::from).collect()));
    };
    match all.iter().position(|info| info.name.as_deref() == Some(&name)) {
        Some(at) => Ok(ClustersInfo::One(Box::new(all.swap_remove(at).into()))),
        None => Err(module::Error::NoCluster(name).into()),
    }
}

/// Parameters of `bdev_rbd_create`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Name of the new disk. Default: the first free name of `Ceph0`, `Ceph1`, …
    name: Option<String>,
    /// Ceph's user, such as `admin` for `client.admin`, which is the default.
    #[serde(skip_serializing_if = "Option::is_none")]
    user_id: Option<String>,
    /// Name of the pool.
    pool_name: String,
    /// Name of the image, or `IMAGE@SNAPSHOT`, which is read-only.
    rbd_name: String,
    /// Block size in bytes.
    block_size: u32,
    /// Options of Ceph's configuration, such as `mon_host`. Without `config_file`, no file is read then.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Map<String, Value>>")]
    config: Option<Options>,
    /// Name of a client of `bdev_rbd_register_cluster`. Default: a client that all disks with the same `user_id`, `config`,
    /// `config_file` and key share.
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_name: Option<String>,
    /// Default: a random uuid.
    uuid: Option<Uuid>,
    /// Whether writes are refused.
    #[serde(default, skip_serializing_if = "is_default")]
    read_only: bool,
    /// Aryk only: namespace in the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace_name: Option<String>,
    /// Aryk only: path of Ceph's configuration file. Default: Ceph's.
    #[serde(skip_serializing_if = "Option::is_none")]
    config_file: Option<PathBuf>,
    /// Aryk only: path of the file with the user's key. Default: Ceph's.
    #[serde(skip_serializing_if = "Option::is_none")]
    key_file: Option<PathBuf>,
    /// Aryk only: name of the user's key in the keyring, which has it as `ceph auth print-key` prints it.
    #[serde(skip_serializing_if = "Option::is_none")]
    key_name: Option<String>,
    /// Aryk only: size in bytes of the image that is created if there is none. An image of another size is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<Count>,
    /// Aryk only: addresses of clients that may still write to the image, which the daemon stores: they are excluded from the
    /// cluster first.
    #[serde(default, skip_serializing_if = "is_default")]
    clients: Vec<String>,
}

impl Create {
    /// The cluster of the disk `disk`. A key among the options is wrapped from then on.
    async fn cluster(&mut self, control: &Control, disk: &str) -> Result<Cluster, Error> {
        let Some(name) = &self.cluster_name else {
            let source = options::Source {
                about: [CREATE, disk],
                key_name: self.key_name.as_deref(),
                key_file: self.key_file.as_ref(),
            };
            let (options, key) = options::open(control, source, &mut self.config).await?;
            let (user, file, key_file) =
                (self.user_id.clone(), self.config_file.clone(), self.key_file.clone());
            return Ok(Cluster::Shared(ClusterConfig { user, file, key_file, key, options, cores: None }));
        };
        if self.user_id.is_some()
            || self.config.is_some()
            || self.config_file.is_some()
            || self.key_file.is_some()
            || self.key_name.is_some()
        {
            return Err(Error::invalid(
                "a disk of a registered cluster has that cluster's user and configuration",
            ));
        }
        Ok(Cluster::Registered(name.clone()))
    }

    fn spec(&self) -> Result<Spec, Error> {
        let (image, snapshot) = match self.rbd_name.split_once('@') {
            Some((image, snapshot)) => (image, Some(snapshot.to_owned())),
            None => (&*self.rbd_name, None),
        };
        if self.pool_name.is_empty() || image.is_empty() || snapshot.as_ref().is_some_and(String::is_empty) {
            return Err(Error::invalid("the names of a pool, an image and a snapshot must not be empty"));
        }
        // Ceph's name of the namespace that each pool has is empty.
        let namespace = self.namespace_name.clone().filter(|name| !name.is_empty());
        let pool = self.pool_name.clone();
        Ok(Spec { pool, namespace, image: image.to_owned(), snapshot })
    }

    /// Adds the clients in the note of an absent disk with this name, which may still write to the image: an orchestrator may
    /// create a disk again before the daemon has restored it.
    fn add_predecessors(&mut self, control: &Control, name: &str) {
        let noted = control.config.noted(Subsystem::Bdev, name).filter(|call| call.method == CREATE);
        let noted = noted
            .and_then(|call| serde_json::from_value::<Vec<String>>(call.params.get(CLIENTS)?.clone()).ok());
        for client in noted.unwrap_or_default() {
            if !self.clients.contains(&client) {
                self.clients.push(client);
            }
        }
    }

    fn config(&self, clusters: &Clusters, identity: Identity, spec: Spec) -> module::Config {
        let mut predecessors = self.clients.clone();
        // An earlier try of this disk, which goes on, may have noted a client of this daemon.
        predecessors.retain(|client| !clusters.has_live(client));
        module::Config {
            identity,
            spec,
            block_size: self.block_size,
            read_only: self.read_only,
            // An image that existed before the restart is missing, not new: a new one would hold zeroes instead of its data.
            size: self.size.map(|bytes| Bytes(bytes.0)).filter(|_| !journal::is_restore()),
            predecessors,
        }
    }
}

async fn create(control: &Control, mut p: Create) -> Result<String, Error> {
    let name = p.name.take().unwrap_or_else(|| free_name(control));
    let identity = super::identity(&name, p.uuid)?;
    (p.name, p.uuid) = (Some(name.clone()), Some(identity.uuid));
    control.rbd.waits.check(CREATE, &name)?;
    let spec = p.spec()?;
    let cluster = p.cluster(control, &name).await?;
    if control.disks.find(&name).is_ok() {
        return Err(aryk_bdev::Error::Exists(name).into());
    }
    control.check_open()?;
    p.add_predecessors(control, &name);
    let first = open(control, &p, &cluster, (&identity, &spec)).await;
    let opened = match first {
        // The cluster had excluded the client before, which shows only now: a new client takes its place.
        Err(Opening::Module(error)) if error.is_blocklisted() => {
            open(control, &p, &cluster, (&identity, &spec)).await
        }
        other => other,
    };
    let failed = opened.as_ref().err().filter(|opening| opening.has_used_cluster());
    control.rbd.waits.note(CREATE, &name, failed.map(Error::from));
    let (bdev, addresses) = opened?;
    p.clients = vec![addresses];
    let rbd = Rbd {
        pool_name: p.pool_name.clone(),
        rbd_name: p.rbd_name.clone(),
        namespace_name: p.namespace_name.clone(),
        cluster_name: p.cluster_name.clone(),
        user_id: p.user_id.clone(),
    };
    let details = Details { rbd: Some(rbd), ..Details::default() };
    Ok(control.made_disk(&bdev, MODULE, details, (CREATE, &p)))
}

/// Why an image was not opened.
enum Opening {
    Module(module::Error),
    Other(Error),
}

impl Opening {
    const fn has_used_cluster(&self) -> bool {
        match self {
            Self::Module(error) => error.has_used_cluster(),
            // The client was connected, and could not be noted.
            Self::Other(_) => true,
        }
    }
}

impl From<module::Error> for Opening {
    fn from(error: module::Error) -> Self {
        Self::Module(error)
    }
}

impl From<Opening> for Error {
    fn from(opening: Opening) -> Self {
        Self::from(&opening)
    }
}

impl From<&Opening> for Error {
    fn from(opening: &Opening) -> Self {
        match opening {
            Opening::Module(error) => error.into(),
            Opening::Other(error) => error.clone(),
        }
    }
}

/// Creates the disk of a call by the present client of its cluster, and returns it with the client's addresses.
async fn open(
    control: &Control,
    p: &Create,
    cluster: &Cluster,
    (identity, spec): (&Identity, &Spec),
) -> Result<(Arc<Bdev>, String), Opening> {
    let client = module::connect(&control.rbd.clusters, cluster).await?;
    let addresses = client.addresses().to_owned();
    note_client(control, &identity.name, &p.clients, &addresses).await.map_err(Opening::Other)?;
    let config = p.config(&control.rbd.clusters, identity.clone(), spec.clone());
    let opened = module::create(client, &control.env, config).await;
    if opened.is_err() && !p.clients.contains(&addresses) {
        // Nobody has written by this client to the image. The daemon tries again, with a new client each time.
        drop(control.config.change_absent(Subsystem::Bdev, &identity.name, CLIENTS, p.clients.clone()));
    }
    Ok((opened?, addresses))
}

/// Adds the addresses of this daemon's client to the note of a disk that was created before, and waits until they are stored.
async fn note_client(control: &Control, disk: &str, noted: &[String], addresses: &str) -> Result<(), Error> {
    if noted.iter().any(|client| client == addresses) {
        return Ok(());
    }
    let all: Vec<&str> = noted.iter().map(String::as_str).chain([addresses]).collect();
    let Some(written) = control.config.change_absent(Subsystem::Bdev, disk, CLIENTS, all) else {
        return Ok(());
    };
    let written = tokio::time::timeout(WRITE_PATIENCE, written).await;
    match written {
        Ok(Ok(Ok(()))) => Ok(()),
        _ => Err(Error::errno(Errno::IO, "the address of the Ceph client cannot be stored")),
    }
}

/// The clients, for the metrics.
pub(crate) fn metrics(control: &Control) -> Vec<aryk_metrics::RbdClient> {
    let describe = |info: module::ClusterInfo| aryk_metrics::RbdClient {
        name: info.label,
        disks: info.disks as u64,
        is_blocklisted: info.is_blocklisted,
        opens: info.counts.opens,
        failed_opens: info.counts.failed_opens,
        quarantined: info.counts.quarantined,
        errors: module::Class::ALL.map(|of| (of.name(), info.counts.errors[of as usize])).into(),
    };
    control.rbd.clusters.list().into_iter().map(describe).collect()
}

fn free_name(control: &Control) -> String {
    let mut names = (0_u32..).map(|n| format!("Ceph{n}"));
    names.find(|name| control.disks.find(name).is_err()).expect("a free number exists")
}

/// Parameters of `bdev_rbd_resize`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Resize {
    /// Name, alias or uuid.
    name: String,
    /// New size in MiB.
    new_size: Count,
    /// Aryk only: allow a smaller size, and discard the data beyond it.
    #[serde(default)]
    shrink: bool,
}

async fn resize(control: &Control, p: Resize) -> Result<bool, Error> {
    let bdev = control.disks.find_made_by(&[MODULE], &p.name)?;
    let size = p.new_size.0.checked_mul(1 << 20).map(Bytes);
    let size = size.ok_or_else(|| Error::invalid("the size is more than a disk can have"))?;
    if p.shrink && size < bdev.blocks().to_bytes(bdev.geometry().block_size) {
        volumes::check_shrinking(control, &bdev)?;
    }
    let size = if p.shrink { module::Size::Exactly(size) } else { module::Size::GrowTo(size) };
    let Bytes(bytes) = match module::resize(&bdev, size).await? {
        module::Resized::Done(bytes) => bytes,
        module::Resized::Shrinking(shrinking) => shrinking.settle().await.cut().await?,
    };
    if control.config.params(Subsystem::Bdev, bdev.name()).is_some_and(|params| params.get("size").is_some())
    {
        control.config.changed(Subsystem::Bdev, bdev.name(), "size", bytes);
    }
    Ok(true)
}

impl From<module::Error> for Error {
    fn from(error: module::Error) -> Self {
        Self::from(&error)
    }
}

impl From<&module::Error> for Error {
    fn from(error: &module::Error) -> Self {
        use module::Error as Rbd;
        let errno = match error {
            Rbd::Bdev(error) => return error.clone().into(),
            Rbd::Load(_) => Errno::NOSYS,
            Rbd::Thread(error) => Errno::from_io_error(error).unwrap_or(Errno::AGAIN),
            Rbd::NoCluster(_) => Errno::NOENT,
            Rbd::ClusterExists(_) => Errno::EXIST,
            Rbd::TooManyClients => Errno::USERS,
            Rbd::ClusterInUse { .. } | Rbd::Resizing(_) | Rbd::Left(_) => Errno::BUSY,
            Rbd::Connect(error)
            | Rbd::Fence { error, .. }
            | Rbd::Pool { error, .. }
            | Rbd::Image { error, .. } => Errno::from_raw_os_error(error.errno),
            Rbd::NotOurs(_) => Errno::NODEV,
            Rbd::ReadOnly(_) => Errno::ROFS,
            Rbd::Ending => Errno::CANCELED,
            Rbd::Encrypted(_) => Errno::NOTSUP,
            Rbd::NoAnswer(_) => Errno::TIMEDOUT,
            Rbd::OtherSize { .. }
            | Rbd::Empty(_)
            | Rbd::ZeroCopy(_)
            | Rbd::BlockSize(_)
            | Rbd::NotAMultiple { .. }
            | Rbd::Shrinks { .. } => Errno::INVAL,
        };
        Self::errno(errno, error.to_string())
    }
}

#[cfg(test)]
mod tests;
