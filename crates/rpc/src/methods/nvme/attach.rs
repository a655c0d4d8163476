//! `bdev_nvme_attach_controller`, `_detach_controller`, `_reset_controller`. Control context.

use super::options::{self, MultipathOptions};
use super::paths::{self, DiskPolicy, Further};
use super::{Control, Error, Followed, Phase, Table, address, exposed, find, is_attached, remote};
use crate::config::Subsystem;
use crate::methods::{NAME_LEN_MAX, is_default};
use crate::params::Count;
use aryk_bdev_nvme as module;
use aryk_bdev_nvme::Location;
use aryk_bdev_nvme::fabrics::PathInfo;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Duration;

pub(crate) const ATTACH: &str = "bdev_nvme_attach_controller";
pub(super) const DETACH: &str = "bdev_nvme_detach_controller";

/// Bytes of `nN`, where N is the largest NSID.
const SUFFIX_LEN: usize = 11;
/// The grace time that stands for ever: a hundred years.
pub(super) const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 86_400);

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        ATTACH,
        Phase::RunTime,
        "Attaches an NVMe controller, which the daemon then drives itself; each of its namespaces becomes a disk.",
        attach,
    );
    table.add(
        DETACH,
        Phase::RunTime,
        "Removes the disks of an NVMe controller, and shuts the controller down.",
        async |control: &Control, p: Detach| detach_by_call(control, &p).await,
    );
    table.add(
        "bdev_nvme_reset_controller",
        Phase::RunTime,
        "Resets an NVMe controller; requests wait meanwhile, and are submitted again.",
        reset,
    );
    table.add(
        "bdev_nvme_disable_controller",
        Phase::RunTime,
        "Shuts an NVMe controller down; its disks stay, and their requests wait.",
        disable,
    );
    table.add(
        "bdev_nvme_enable_controller",
        Phase::RunTime,
        "Starts a disabled NVMe controller again; the requests go on when it is ready.",
        enable,
    );
}

/// Parameters of `bdev_nvme_attach_controller`. Those of another transport than `trtype` are saved, without effect.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Attach {
    /// Name of the controller: namespace 1 is the disk `NAMEn1`.
    pub(super) name: String,
    /// `PCIe`; `TCP` or `RDMA` for a controller of another host; or `VFIOUSER` for one that another process emulates.
    pub(super) trtype: String,
    /// PCI address, such as `0000:3d:00.0`; for `TCP` and `RDMA` the IP address of the target; for `VFIOUSER` the path of the
    /// socket, or of its directory, if its name is `cntrl`.
    pub(super) traddr: String,
    /// Seconds for which requests wait for a drive that has vanished, or for a target that is lost, before its disks are removed;
    /// -1: for ever. Default: 15; for `TCP` and `RDMA` 600.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ctrlr_loss_timeout_sec: Option<i32>,
    /// Queue pairs at most, for as many reactors; other reactors send their requests through these. Default: 128.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) num_io_queues: Option<u32>,
    /// Aryk only: which memory of VMs the controller accesses by itself. For `RDMA`, the target can read and write all of it at
    /// any time with `pin`, and none otherwise; not for `TCP`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) dma: Dma,
    /// Aryk only: bytes of bounce buffers on each reactor. Default: 4 MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bounce_bytes: Option<Count>,
    /// Aryk only: the only namespace that becomes a disk. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) nsid: Option<u32>,
    /// Aryk only: name of the disk of the namespace `nsid`. Default: `NAMEnNSID`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) disk: Option<String>,
    /// Aryk only: the drive's serial number; another drive is refused. The daemon stores that of the drive, so that a restart
    /// does not take another drive for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) serial: Option<String>,
    /// Aryk only: identifier of this host for the target, a UUID; only for `TCP` and `RDMA`. The target ends an earlier
    /// controller of the same host and identifier first, so no two controllers have the same. Default: a random one, which the
    /// daemon stores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hostid: Option<String>,
    /// Aryk only: the daemon stores it for the discovery service that named the subsystem; only for `TCP` and `RDMA`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) discovery: Option<String>,
    /// Aryk only: the daemon stores it when the drive went away with acknowledged writes in its volatile cache. A call with it is
    /// refused, so that the controller stays absent until a client attaches it without.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) may_have_lost_writes: bool,
    /// Seconds between two attempts to open a drive that has vanished, or to connect to a target that is lost; the first attempts
    /// come sooner. Default, and for 0: a quarter of a second; for `TCP` and `RDMA` 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reconnect_delay_sec: Option<u32>,
    /// Seconds for which requests wait for a drive that has vanished, or a target that is lost, before they fail, until it is
    /// back; at most
    /// `ctrlr_loss_timeout_sec`. Default, and for 0: they wait as long as that says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fast_io_fail_timeout_sec: Option<u32>,
    /// `IPv4` or `IPv6`, of `traddr`; only for `TCP` and `RDMA`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) adrfam: Option<String>,
    /// Port of the target; only for `TCP` and `RDMA`. Default: 4420.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) trsvcid: Option<String>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) priority: Option<String>,
    /// NQN of the target's subsystem; only for `TCP` and `RDMA`, which needs it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) subnqn: Option<String>,
    /// NQN by which this host connects; only for `TCP` and `RDMA`. Default: a random one, which the daemon stores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hostnqn: Option<String>,
    /// IP address of this host from which it connects; only for `TCP` and `RDMA`. Default: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hostaddr: Option<String>,
    /// Port of this host from which it connects; only for `TCP` and `RDMA`. Default: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hostsvcid: Option<String>,
    /// Saved, without effect: namespaces with protection information are not served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prchk_reftag: Option<bool>,
    /// Saved, without effect: namespaces with protection information are not served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prchk_guard: Option<bool>,
    /// Whether PDUs have header digests; only for `TCP`. A target without them is refused. Default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hdgst: Option<bool>,
    /// Whether PDUs have data digests; only for `TCP`. A target without them is refused. Default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ddgst: Option<bool>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fabrics_connect_timeout_us: Option<u64>,
    /// Whether a call with the name of a controller that exists adds a path to it; only for `TCP` and `RDMA`, saved without
    /// effect for others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) multipath: Option<PathMode>,
    /// How the paths of the disks are used; only for `TCP` and `RDMA`, saved without effect for others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) multipath_opts: Option<MultipathOptions>,
    /// Aryk only: further paths; only for `TCP` and `RDMA`. The controller is attached by any of its paths. The daemon stores
    /// here those that calls add.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) paths: Option<Vec<Further>>,
    /// Aryk only: what `bdev_nvme_set_multipath_policy` has set; only for `TCP` and `RDMA`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) policies: Option<Vec<DiskPolicy>>,
    /// Only for `TCP`: name of the key of TLS in the keyring, which the target must have, too; connections are encrypted then.
    /// Saved without effect for others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) psk: Option<String>,
    /// Saved, without effect: all disks are reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_bdevs: Option<u32>,
    /// Only for `TCP` and `RDMA`: name of the secret in the keyring by which this host proves who it is; saved without effect for
    /// others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) dhchap_key: Option<String>,
    /// Only for `TCP` and `RDMA`: name of the secret by which the target is to prove who it is; needs `dhchap_key`. Saved without
    /// effect for others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) dhchap_ctrlr_key: Option<String>,
    /// Saved, without effect: namespaces of other command sets are not served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) allow_unrecognized_csi: Option<bool>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) disable_sq_flow_control: Option<bool>,
}

/// Which memory of VMs an NVMe controller accesses by itself: memory of huge pages, which is pinned, or all, or none. Other
/// memory is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "NvmeDma")]
pub(super) enum Dma {
    #[default]
    Auto,
    Pin,
    Bounce,
}

/// Whether a controller gets a further path. `failover` and `multipath`: yes; how the paths are used, the policy says. `disable`:
/// the call fails.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "NvmeMultipath")]
pub(super) enum PathMode {
    Failover,
    Multipath,
    Disable,
}

impl Attach {
    /// Whether the caller says which memory of VMs is pinned.
    pub(super) fn has_dma(&self) -> bool {
        self.dma != Dma::Auto
    }

    /// Whether all memory of VMs is pinned.
    pub(super) fn pins_all(&self) -> bool {
        self.dma == Dma::Pin
    }

    /// Checks the names of the controller and of its disk.
    pub(super) fn check_names(&self) -> Result<(), Error> {
        if self.name.is_empty() || self.disk.as_ref().is_some_and(String::is_empty) {
            return Err(Error::invalid("the names of a controller and its disk must not be empty"));
        }
        if self.name.len().max(self.disk.as_ref().map_or(0, String::len)) > NAME_LEN_MAX - SUFFIX_LEN {
            let most = NAME_LEN_MAX - SUFFIX_LEN;
            return Err(Error::invalid(format!("an NVMe controller's name may have at most {most} bytes")));
        }
        Ok(())
    }

    /// How the module attaches the controller.
    async fn config(&self, control: &Control) -> Result<module::Config, Error> {
        self.check_names()?;
        let mut config = module::Config::new(&self.name, location(&self.trtype, &self.traddr).await?);
        control.nvme.options.borrow().apply(&mut config);
        config.exposed = exposed(self.nsid, self.disk.as_deref(), &self.name)?;
        config.serial.clone_from(&self.serial);
        config.dma = match self.dma {
            Dma::Auto => module::Dma::Auto,
            Dma::Pin => module::Dma::Pin,
            Dma::Bounce => module::Dma::Bounce,
        };
        match self.ctrlr_loss_timeout_sec {
            None => {}
            Some(-1) => config.grace = FOR_EVER,
            Some(seconds) => {
                let seconds = u64::try_from(seconds)
                    .map_err(|_| Error::invalid("`ctrlr_loss_timeout_sec` must be -1, 0 or more"))?;
                config.grace = Duration::from_secs(seconds);
            }
        }
        options::apply_times(self.fast_io_fail_timeout_sec, self.reconnect_delay_sec, &mut config);
        options::check_times(&config)?;
        if let Some(bytes) = self.bounce_bytes {
            const MOST: u64 = 1 << 30;
            if bytes.0 > MOST {
                return Err(Error::invalid(format!("`bounce_bytes` may be at most {MOST}")));
            }
            config.bounce_bytes = bytes.0;
        }
        if let Some(queues) = self.num_io_queues {
            // SPDK's largest number, for which a queue's number has no room.
            if queues == 0 || queues > 1 << 16 {
                return Err(Error::invalid("`num_io_queues` must be 1 to 65536"));
            }
            config.options.pairs = u16::try_from(queues).unwrap_or(u16::MAX);
        }
        Ok(config)
    }
}

/// The place of a controller.
async fn location(trtype: &str, traddr: &str) -> Result<Location, Error> {
    if trtype.eq_ignore_ascii_case("pcie") {
        return address(traddr).map(Location::Pci);
    }
    if !trtype.eq_ignore_ascii_case("vfiouser") {
        return Err(remote::no_transport(trtype));
    }
    if traddr.is_empty() {
        return Err(Error::invalid("`traddr` must be the path of a socket"));
    }
    let path = Path::new(traddr).to_owned();
    // A file system may not respond.
    let socket = tokio::task::spawn_blocking(move || if path.is_dir() { path.join("cntrl") } else { path });
    Ok(Location::Socket(socket.await.map_err(|e| Error::Internal(e.to_string()))?))
}

async fn attach(control: &Control, mut p: Attach) -> Result<Vec<String>, Error> {
    if remote::transport(&p.trtype).is_some() {
        return remote::attach(control, p).await;
    }
    if control.nvme.remotes.find(&p.name).is_ok() {
        return Err(module::Error::Exists(p.name).into());
    }
    if p.may_have_lost_writes {
        let detail = format!(
            "the drive of '{}' went away with acknowledged writes in its volatile cache, which may be lost: check the data of its \
             VMs, then attach the controller by a call without `may_have_lost_writes`",
            p.name
        );
        return Err(Error::errno(rustix::io::Errno::IO, detail));
    }
    let config = p.config(control).await?;
    control.check_open()?;
    let attached = control.nvme.controllers.attach(&control.env, config).await;
    if let Err(module::Error::Moved { name, location, .. }) = &attached {
        // After a restart, the controller is attached there.
        control.config.changed(Subsystem::Nvme, name, "trtype", p.trtype.as_str());
        control.config.changed(Subsystem::Nvme, name, "traddr", location.as_str());
    }
    let disks = attached?;
    let controller = find(control, &p.name)?;
    if let Ok(address) = controller.info().location.parse() {
        control.nvme.released.borrow_mut().remove(&address);
    }
    p.serial = controller.info().controller.map(|info| info.serial);
    control.config.made(Subsystem::Nvme, &p.name, ATTACH, &p);
    if let Some(attached) = &*control.nvme.attached.borrow() {
        // The receiver ends with the daemon.
        let _ = attached.send(Followed::Drive(controller));
    }
    Ok(disks.iter().map(|disk| disk.name().to_owned()).collect())
}

/// Parameters of `bdev_nvme_detach_controller`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Detach {
    /// Name of the controller.
    name: String,
    /// Transport of the path to remove: the controller is not detached if its own is another.
    trtype: Option<String>,
    /// Address of the path to remove: the controller is not detached if it has no such path, or has another path besides.
    /// Default: all paths.
    traddr: Option<String>,
    /// Ignored.
    #[serde(rename = "adrfam")]
    _adrfam: Option<String>,
    /// Port of the path to remove; only for `TCP` and `RDMA`, with `traddr`. Default: any.
    trsvcid: Option<String>,
    /// Ignored.
    #[serde(rename = "subnqn")]
    _subnqn: Option<String>,
    /// Ignored.
    #[serde(rename = "hostaddr")]
    _hostaddr: Option<String>,
    /// Ignored.
    #[serde(rename = "hostsvcid")]
    _hostsvcid: Option<String>,
}

async fn detach_by_call(control: &Control, p: &Detach) -> Result<bool, Error> {
    if !is_attached(control, &p.name) && control.config.forget_absent(Subsystem::Nvme, &p.name) {
        return Ok(true);
    }
    if let Ok(controller) = control.nvme.remotes.find(&p.name) {
        let is_meant = |path: &PathInfo| {
            let differs =
                |given: &Option<String>, own: String| given.as_ref().is_some_and(|given| *given != own);
            let own = controller.config().transport;
            p.trtype.as_deref().is_none_or(|trtype| remote::transport(trtype) == Some(own))
                && p.traddr.as_deref().is_none_or(|ip| ip.parse() == Ok(path.address.ip()))
                && !differs(&p.trsvcid, path.address.port().to_string())
        };
        if paths::remove(control, &controller, is_meant).await? {
            return Ok(true);
        }
        // It may be absent, and be attached just now.
        control.config.forget(Subsystem::Nvme, &p.name);
        detach(control, &p.name).await?;
        return Ok(true);
    }
    let info = find(control, &p.name)?.info();
    if let (Some(trtype), Some(traddr)) = (&p.trtype, &p.traddr) {
        let given = location(trtype, traddr).await?.to_string();
        if given != info.location {
            let detail = format!("the controller '{}' is at {}, not at {given}", p.name, info.location);
            return Err(Error::errno(rustix::io::Errno::NODEV, detail));
        }
    }
    if let Ok(address) = info.location.parse() {
        control.nvme.released.borrow_mut().insert(address);
    }
    // First, so that the end of the controller is not taken for a loss.
    control.config.removed(Subsystem::Nvme, &p.name);
    detach(control, &p.name).await?;
    Ok(true)
}

/// Detaches a controller, and forgets the settings of its disks.
pub(super) async fn detach(control: &Control, name: &str) -> Result<(), Error> {
    let disks = super::disks_of(control, name);
    let _leaving = Leaving::new(control, &disks);
    if control.nvme.remotes.find(name).is_ok() {
        control.nvme.remotes.detach(name).await?;
    } else {
        control.nvme.controllers.detach(name).await?;
    }
    control.forget_disks_of(&disks);
    Ok(())
}

/// Disks that are removed with their controller until this is dropped.
struct Leaving<'a>(&'a Control, &'a [String]);

impl<'a> Leaving<'a> {
    fn new(control: &'a Control, disks: &'a [String]) -> Self {
        control.nvme.leaving.borrow_mut().extend(disks.iter().cloned());
        Self(control, disks)
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut leaving = self.0.nvme.leaving.borrow_mut();
        self.1.iter().for_each(|disk| _ = leaving.remove(disk));
    }
}

/// Parameters of `bdev_nvme_reset_controller` and others.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Reset {
    /// Name of the controller.
    name: String,
    /// Ignored: a name stands for one controller.
    #[serde(rename = "cntlid")]
    _cntlid: Option<u16>,
}

async fn disable(control: &Control, p: Reset) -> Result<bool, Error> {
    match control.nvme.remotes.find(&p.name) {
        Ok(controller) => controller.disable().await?,
        Err(_) => find(control, &p.name)?.disable().await?,
    }
    Ok(true)
}

async fn enable(control: &Control, p: Reset) -> Result<bool, Error> {
    match control.nvme.remotes.find(&p.name) {
        Ok(controller) => controller.enable().await?,
        Err(_) => find(control, &p.name)?.enable().await?,
    }
    Ok(true)
}

async fn reset(control: &Control, p: Reset) -> Result<bool, Error> {
    if let Ok(controller) = control.nvme.remotes.find(&p.name) {
        controller.reset();
        return Ok(true);
    }
    find(control, &p.name)?.reset().await?;
    Ok(true)
}
