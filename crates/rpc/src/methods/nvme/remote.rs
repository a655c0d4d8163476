//! NVMe controllers of other hosts: the transports `TCP` and `RDMA` of `bdev_nvme_attach_controller`, and how these controllers
//! are shown. Control context.

use super::attach::{ATTACH, Attach, FOR_EVER};
use super::options::Options;
use super::{Control, Error, exposed, paths};
use crate::config::Subsystem;
use crate::methods::nvmf::{KeyNames, read_psk};
use aryk_bdev_nvme::NamespaceInfo;
use aryk_bdev_nvme::fabrics::{
    ConnectError, HostSecrets, Lost, PATHS_MAX, RemoteConfig, RemoteController, RemoteError, RemotePhase,
    Transport,
};
use aryk_nvme_fabrics::nqn::Nqn;
use rustix::io::Errno;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

/// How long the attach of a controller may take that a discovery service has named.
const DISCOVERED_TIME: Duration = Duration::from_secs(60);
/// The port of NVMe/TCP and NVMe/RDMA.
pub(super) const PORT: u16 = 4420;

/// The transport with this name, if it is one to other hosts.
pub(super) fn transport(trtype: &str) -> Option<Transport> {
    [Transport::Tcp, Transport::Rdma].into_iter().find(|of| trtype.eq_ignore_ascii_case(self::trtype(*of)))
}

/// The name of a transport.
pub(super) const fn trtype(transport: Transport) -> &'static str {
    match transport {
        Transport::Tcp => "TCP",
        Transport::Rdma => "RDMA",
    }
}

/// Attaches a controller, and returns the names of its disks.
pub(super) async fn attach(control: &Control, mut p: Attach) -> Result<Vec<String>, Error> {
    control.check_open()?;
    if control.nvme.controllers.find(&p.name).is_ok() {
        return Err(RemoteError::Exists(p.name).into());
    }
    if let Ok(controller) = control.nvme.remotes.find(&p.name) {
        return paths::add(control, &controller, &p).await;
    }
    // A restart is to be the same host for the target.
    p.hostnqn.get_or_insert_with(random_host);
    p.hostid.get_or_insert_with(|| Uuid::new_v4().to_string());
    let mut config = config(&control.nvme.options.borrow(), &p)?;
    let names = KeyNames { key: p.dhchap_key.as_deref(), controller_key: p.dhchap_ctrlr_key.as_deref() };
    config.secrets = HostSecrets::new(names.read(control).await?.map(|keys| keys.secrets));
    if let Some(name) = &p.psk {
        let set = config.set_tls_key(&read_psk(control, name).await?);
        set.map_err(|error| Error::invalid(error.to_string()))?;
    }
    let attaching = control.nvme.remotes.attach(&control.env, config);
    let disks = if p.discovery.is_some() {
        // Other subsystems wait until this attempt ends. A future that is dropped detaches the controller.
        let late = |_| Error::errno(Errno::TIMEDOUT, "the target takes too long");
        tokio::time::timeout(DISCOVERED_TIME, attaching).await.map_err(late)??
    } else {
        attaching.await?
    };
    control.config.made(Subsystem::Nvme, &p.name, ATTACH, &p);
    if let Some(attached) = &*control.nvme.attached.borrow()
        && let Ok(controller) = control.nvme.remotes.find(&p.name)
    {
        // The receiver ends with the daemon.
        let _ = attached.send(super::Followed::Remote(controller));
    }
    Ok(disks.iter().map(|disk| disk.name().to_owned()).collect())
}

/// A name for this host.
pub(super) fn random_host() -> String {
    format!("nqn.2014-08.org.nvmexpress:uuid:{}", Uuid::new_v4())
}

/// How the module attaches a controller.
pub(super) fn config(options: &Options, p: &Attach) -> Result<RemoteConfig, Error> {
    p.check_names()?;
    let transport = transport(&p.trtype).ok_or_else(|| no_transport(&p.trtype))?;
    let is_rdma = transport == Transport::Rdma;
    let refused = [
        ("bounce_bytes", p.bounce_bytes.is_some()),
        ("serial", p.serial.is_some()),
        ("dma", !is_rdma && p.has_dma()),
        ("hdgst", is_rdma && p.hdgst == Some(true)),
        ("ddgst", is_rdma && p.ddgst == Some(true)),
        ("psk", is_rdma && p.psk.is_some()),
    ];
    if let Some((name, _)) = refused.into_iter().find(|(_, is_given)| *is_given) {
        let trtype = trtype(transport);
        return Err(Error::invalid(format!("`{name}` is not supported for the transport {trtype}")));
    }
    let address = address(p)?;
    let subsystem = p.subnqn.as_deref().ok_or_else(|| Error::invalid("`subnqn` is missing"))?;
    let host = p.hostnqn.as_deref().unwrap_or_default();
    let host_id = p.hostid.as_deref().unwrap_or_default();
    let host_id = Uuid::parse_str(host_id).map_err(|_| Error::invalid("`hostid` must be a UUID"))?;
    if host_id.is_nil() {
        return Err(Error::invalid("`hostid` must not be the nil UUID"));
    }
    let mut config = RemoteConfig::new(
        &p.name,
        address,
        nqn("subnqn", subsystem)?,
        nqn("hostnqn", host)?,
        *host_id.as_bytes(),
    );
    config.transport = transport;
    config.is_direct = is_rdma && p.pins_all();
    options.apply_to_remote(&mut config);
    config.source = source(p.hostaddr.as_deref(), p.hostsvcid.as_deref())?;
    for path in p.paths.iter().flatten() {
        let (further, source) = path.addresses()?;
        if further == config.address || config.further.iter().any(|(known, _)| *known == further) {
            return Err(Error::invalid(format!("{further} is twice among the paths")));
        }
        config.further.push((further, source));
    }
    if config.further.len() >= PATHS_MAX {
        return Err(Error::invalid(format!("a controller has at most {PATHS_MAX} paths")));
    }
    config.policy = p.multipath_opts.as_ref().map_or(config.policy, paths::policy);
    config.policies = p.policies.iter().flatten().map(|of| (of.nsid, paths::policy(&of.options))).collect();
    config.exposed = exposed(p.nsid, p.disk.as_deref(), &p.name)?;
    (config.header_digest, config.data_digest) = (p.hdgst.unwrap_or(false), p.ddgst.unwrap_or(false));
    if let Some(queues) = p.num_io_queues {
        let queues = u16::try_from(queues).ok().filter(|queues| *queues > 0);
        config.queues = queues.ok_or_else(|| Error::invalid("`num_io_queues` must be 1 to 65535"))?;
    }
    apply_times(p, &mut config)?;
    Ok(config)
}

/// There is no transport with this name.
pub(super) fn no_transport(trtype: &str) -> Error {
    Error::invalid(format!("there is no transport '{trtype}', only PCIe, TCP, RDMA and VFIOUSER"))
}

/// The address of the target.
pub(super) fn address(p: &Attach) -> Result<SocketAddr, Error> {
    let address = socket_address("traddr", &p.traddr, p.trsvcid.as_deref(), PORT)?;
    let family = p.adrfam.as_deref().unwrap_or(of_family(address));
    if !family.eq_ignore_ascii_case(of_family(address)) {
        return Err(Error::invalid(format!("`traddr` is no address of the family '{family}'")));
    }
    Ok(address)
}

/// The address of this host from which it connects.
pub(super) fn source(ip: Option<&str>, port: Option<&str>) -> Result<Option<SocketAddr>, Error> {
    match (ip, port) {
        (Some(ip), port) => socket_address("hostaddr", ip, port, 0).map(Some),
        (None, Some(_)) => Err(Error::invalid("`hostsvcid` needs `hostaddr`")),
        (None, None) => Ok(None),
    }
}

/// Takes over the times for a lost controller.
fn apply_times(p: &Attach, config: &mut RemoteConfig) -> Result<(), Error> {
    match p.ctrlr_loss_timeout_sec {
        None => {}
        Some(-1) => config.loss_timeout = None,
        Some(seconds) => {
            let seconds = u64::try_from(seconds)
                .map_err(|_| Error::invalid("`ctrlr_loss_timeout_sec` must be -1, 0 or more"))?;
            config.loss_timeout = Some(Duration::from_secs(seconds));
        }
    }
    let seconds = |given: u32| Duration::from_secs(given.into());
    if let Some(after) = p.fast_io_fail_timeout_sec {
        config.fast_fail = (after > 0).then(|| seconds(after));
    }
    if let Some(delay) = p.reconnect_delay_sec.filter(|delay| *delay > 0) {
        config.reconnect_delay = seconds(delay);
    }
    let most = config.loss_timeout.unwrap_or(FOR_EVER);
    let both_given = |is_given: bool| is_given && p.ctrlr_loss_timeout_sec.is_some();
    if both_given(p.fast_io_fail_timeout_sec.is_some()) && config.fast_fail.is_some_and(|time| time > most) {
        return Err(Error::invalid(
            "`fast_io_fail_timeout_sec` must not be more than `ctrlr_loss_timeout_sec`",
        ));
    }
    if both_given(p.reconnect_delay_sec.is_some()) && config.reconnect_delay > most {
        return Err(Error::invalid("`reconnect_delay_sec` must not be more than `ctrlr_loss_timeout_sec`"));
    }
    // Options that were set after a call, and hold before it after a restart, do not refuse it.
    config.fast_fail = config.fast_fail.map(|time| time.min(most));
    config.reconnect_delay = config.reconnect_delay.min(most);
    Ok(())
}

/// The family of an address, in SPDK's words.
pub(super) const fn of_family(address: SocketAddr) -> &'static str {
    if address.is_ipv4() { "IPv4" } else { "IPv6" }
}

fn nqn(param: &str, text: &str) -> Result<Nqn, Error> {
    text.parse().map_err(|error| Error::invalid(format!("`{param}` '{text}': {error}")))
}

pub(super) fn socket_address(
    param: &str,
    ip: &str,
    port: Option<&str>,
    default: u16,
) -> Result<SocketAddr, Error> {
    let parsed: Result<IpAddr, _> = ip.parse();
    let ip = parsed.map_err(|_| Error::invalid(format!("`{param}` '{ip}' is no IP address")))?;
    let port = match port.filter(|port| !port.is_empty()) {
        None => default,
        Some(port) => port.parse().map_err(|_| Error::invalid(format!("'{port}' is no port")))?,
    };
    Ok(SocketAddr::new(ip, port))
}

/// The controller of a disk, and what it says of the disk's namespace.
pub(super) fn controller_of(control: &Control, disk: &str) -> Option<(Arc<RemoteController>, NamespaceInfo)> {
    control.nvme.remotes.list().into_iter().find_map(|controller| {
        let namespaces = controller.info().namespaces;
        let is_it = |namespace: &NamespaceInfo| namespace.disk.as_deref() == Some(disk);
        let namespace = namespaces.into_iter().find(is_it)?;
        Some((controller, namespace))
    })
}

/// The state of a path, in SPDK's words.
pub(super) const fn state(phase: RemotePhase, is_connected: bool) -> &'static str {
    match phase {
        RemotePhase::Ready if is_connected => "enabled",
        RemotePhase::Ready => "reconnect_is_delayed",
        RemotePhase::Connecting => "resetting",
        RemotePhase::Lost => "reconnect_is_delayed",
        RemotePhase::Failing => "failed",
        RemotePhase::Disabled => "disabled",
        RemotePhase::Ending => "deleting",
    }
}

impl From<RemoteError> for Error {
    fn from(error: RemoteError) -> Self {
        let errno = match &error {
            RemoteError::Exists(_) => Errno::EXIST,
            RemoteError::PathExists { .. } | RemoteError::NotDisabled(_) => Errno::ALREADY,
            RemoteError::TooManyPaths(_) => Errno::NOSPC,
            RemoteError::NotFound(_) | RemoteError::NoSuchPath(_) | RemoteError::Namespace { .. } => {
                Errno::NODEV
            }
            RemoteError::Target { reason, .. } => errno_of(reason),
            RemoteError::Away(_) => Errno::AGAIN,
            RemoteError::Registry(_) | RemoteError::Ended(_) => Errno::CANCELED,
            RemoteError::Thread(error) => Errno::from_io_error(error).unwrap_or(Errno::IO),
        };
        match error {
            RemoteError::Registry(error) => error.into(),
            error => Self::errno(errno, error.to_string()),
        }
    }
}

/// The errno of a target that cannot be used.
fn errno_of(reason: &ConnectError) -> Errno {
    match reason {
        ConnectError::Io(error) => Errno::from_io_error(error).unwrap_or(Errno::IO),
        ConnectError::Closed | ConnectError::ClosedInAuthentication => Errno::CONNRESET,
        ConnectError::Silent => Errno::TIMEDOUT,
        ConnectError::Violation(_) | ConnectError::Terminated(_) | ConnectError::Claim(_) => Errno::PROTO,
        ConnectError::Status { .. } => Errno::CONNREFUSED,
        ConnectError::Authentication(_) | ConnectError::Tls(_) => Errno::ACCESS,
        ConnectError::Unsupported(_) => Errno::NOTSUP,
        ConnectError::Other(_) => Errno::NODEV,
        ConnectError::Rdma(lost) => match lost {
            Lost::Ended => Errno::CONNRESET,
            Lost::Failed(..) => Errno::IO,
            Lost::Violation(_) | Lost::Accept(_) | Lost::Receives(_) => Errno::PROTO,
            Lost::Refused(_) => Errno::CONNREFUSED,
            Lost::Device(error) => Errno::from_raw_os_error(error.errno),
            Lost::Start(_) => Errno::NOTSUP,
        },
    }
}
