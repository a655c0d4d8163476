//! Controllers of other hosts, by NVMe over TCP or RDMA: disks in their namespaces.
//!
//! | file | context | contents |
//! | --- | --- | --- |
//! | `controllers` | control | all controllers, and the thread of their admin queues |
//! | `control` | that thread | one controller: its life, its queues, what happens when it is lost |
//! | `admin` | that thread | what is asked of a controller, and the checks of its answers |
//! | `connection` | that thread | a connection until a reactor has it, and that of an admin queue; `tcp` and `rdma` carry it |
//! | `disk` | control | the disk of a namespace |
//! | `direct` | that thread | VMs' memory that the target accesses by itself, over RDMA |
//! | `discovery` | that thread | follows a discovery service |
//! | `driver` | reactor | the I/O queues of a reactor |
//! | `rdma` | that thread, then a reactor | a connection of RDMA, its buffers |
//! | `path` | that thread | the connection of an admin queue, from the first attempt until it is lost |
//! | `shared` | any | what these share |
//!
//! A controller has up to [`PATHS_MAX`](driver::PATHS_MAX) paths: addresses at which the same subsystem answers, for the target
//! each a controller of its own. A path has an admin queue, and an I/O queue on each reactor with channels, each with a
//! connection of its own. The admin queues of all controllers are tasks of one thread, off the reactors and apart from the
//! daemon's control. That thread also connects the I/O queues, and gives each connection to its reactor.
//!
//! **Loss.** If one connection of a path is lost, all of them are closed, and the thread connects again. Requests that change
//! nothing take another path at once, or wait for this one. A change that is still under way at the other host must not land
//! behind a later one of the same blocks. So it is submitted again only when the lost controller must have ended: a target of
//! Aryk says that it ends the earlier controller of a path before it takes the next
//! ([`ENDS_EARLIER`](aryk_nvme_fabrics::association::ENDS_EARLIER)); of any other, the thread waits until the keep-alive timeout
//! has passed there. Until then, later changes of these blocks wait, on all paths and all reactors; others go on. Which changes
//! are submitted again, the rules of a reset say ([`aryk_nvme::replay`]).

mod admin;
mod connection;
mod control;
mod controllers;
mod direct;
mod discovery;
mod disk;
mod driver;
mod path;
mod rdma;
mod shared;
#[cfg(test)]
mod tests;

pub use controllers::{Following, RemoteController, RemoteControllers};
pub use direct::{DirectMemory, client_name};
pub use discovery::Heard;
pub use driver::{Carried, PATHS_MAX, PathTraffic, Policy};
use driver::{Choice, best_paths, bits};
pub use rdma::{Lost, RdmaThread};

use crate::shared::lock;
use crate::{Exposed, NamespaceInfo};
use aryk_nvme::claims::ControllerInfo;
use aryk_nvme::spec::status::Status;
use aryk_nvme_fabrics::chap::{Allowed, Failure, Secrets};
use aryk_nvme_fabrics::nqn::Nqn;
use aryk_nvme_fabrics::psk::{self, ConfiguredPsk, PskError, TlsPsk, Version};
use aryk_nvme_fabrics::subsystem::AnaState;
use aryk_tls::{Psk, TlsError};
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use uuid::Uuid;

/// The default of all limits of time.
const PATIENCE: Duration = Duration::from_secs(30);
/// The most bytes of one read or write.
const DATA_MAX: u64 = 1 << 20;

/// The secrets with which a host authenticates, on all connections of a controller. With a secret of the controller, a target
/// that does not prove that it knows it is refused. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct HostSecrets(Arc<Mutex<Option<Arc<Secrets>>>>);

impl HostSecrets {
    /// These secrets.
    pub fn new(secrets: Option<Arc<Secrets>>) -> Self {
        Self(Arc::new(Mutex::new(secrets)))
    }

    fn get(&self) -> Option<Arc<Secrets>> {
        lock(&self.0).clone()
    }

    /// Later connections use these.
    fn set(&self, secrets: Option<Arc<Secrets>>) {
        *lock(&self.0) = secrets;
    }
}

/// The transport of a controller's connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    #[default]
    Tcp,
    /// RDMA.
    Rdma,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        })
    }
}

/// How a controller of another host is attached.
#[derive(Clone, Debug)]
pub struct RemoteConfig {
    /// The controller's name.
    pub name: String,
    /// What carries all of its connections.
    pub transport: Transport,
    /// What manages connections of RDMA: [`RemoteControllers`] sets it.
    pub rdma: RdmaThread,
    /// The target may read and write VMs' memory by itself, all of it and at any time, so that data is not copied; only over
    /// RDMA. Then guests must not give pages back: no balloon, free page reporting or post-copy migration.
    pub is_direct: bool,
    /// The memory that is registered for that: [`RemoteControllers`] sets it.
    pub direct: Option<DirectMemory>,
    /// Where the target listens.
    pub address: SocketAddr,
    /// The address of this host that connections have; any by default.
    pub source: Option<SocketAddr>,
    /// Further paths, as the two fields before. One of all needs to be connected for the controller to be attached.
    pub further: Vec<(SocketAddr, Option<SocketAddr>)>,
    /// How the paths of disks are used, by NSID.
    pub policies: BTreeMap<u32, Policy>,
    /// How the paths of other disks are used.
    pub policy: Policy,
    /// The subsystem.
    pub subsystem: Nqn,
    /// The name by which this host connects.
    pub host: Nqn,
    /// HOSTID: the target ends an earlier controller of this identifier and [`RemoteConfig::host`]. So it is the controller's
    /// own.
    pub host_id: [u8; 16],
    /// The life of this configuration: another one in each process, and each time that a client attaches the controller. A target
    /// of this project ends the controllers of other lives of this host, through all of its listeners, before it takes a new one.
    pub incarnation: [u8; 16],
    /// By what this host proves who it is, if the target wants that.
    pub secrets: HostSecrets,
    /// By which hashes and groups.
    pub allowed: Allowed,
    /// The keys of TLS, the best first. With one, the target must use TLS, too.
    pub psks: Vec<Psk>,
    /// PDUs have header digests; a target without them is refused.
    pub header_digest: bool,
    /// PDUs have data digests; a target without them is refused.
    pub data_digest: bool,
    /// Which namespaces become disks.
    pub exposed: Exposed,
    /// Commands in flight on each reactor; lowered to what the target's queues hold.
    pub depth: u16,
    /// I/O queues at most; other reactors send their requests through these.
    pub queues: u16,
    /// KATO: the target ends the controller if it hears nothing for so long.
    pub keep_alive: Duration,
    /// For so long requests wait for a lost controller, before its disks are removed. `None`: for ever.
    pub loss_timeout: Option<Duration>,
    /// For so long requests wait for a lost controller before they fail, until it is back. `None`: as long as the disks stay.
    pub fast_fail: Option<Duration>,
    /// Time between two attempts to connect to a lost controller. The first attempts come sooner.
    pub reconnect_delay: Duration,
    /// The time that a request may take; after it, the connection counts as lost.
    pub patience: Duration,
    /// The same for an admin command.
    pub admin_patience: Duration,
    /// The time that an attempt to connect may take.
    pub connect_patience: Duration,
    /// The time for which what was sent may be without an acknowledgement of the target's kernel.
    pub acknowledge_patience: Duration,
    /// Attempts after a status that allows another; [`WITHOUT_LIMIT`](crate::WITHOUT_LIMIT): any number.
    pub retries: u16,
}

impl RemoteConfig {
    /// A controller with the defaults.
    pub fn new(name: &str, address: SocketAddr, subsystem: Nqn, host: Nqn, host_id: [u8; 16]) -> Self {
        Self {
            name: name.to_owned(),
            transport: Transport::default(),
            rdma: RdmaThread::default(),
            is_direct: false,
            direct: None,
            address,
            source: None,
            further: Vec::new(),
            policies: BTreeMap::new(),
            policy: Policy::ActivePassive,
            subsystem,
            host,
            host_id,
            incarnation: *Uuid::new_v4().as_bytes(),
            secrets: HostSecrets::default(),
            allowed: Allowed::default(),
            psks: Vec::new(),
            header_digest: false,
            data_digest: false,
            exposed: Exposed::All,
            depth: 127,
            queues: 128,
            keep_alive: Duration::from_secs(10),
            loss_timeout: Some(Duration::from_secs(600)),
            fast_fail: None,
            reconnect_delay: Duration::from_secs(2),
            patience: PATIENCE,
            admin_patience: PATIENCE,
            connect_patience: PATIENCE,
            acknowledge_patience: PATIENCE,
            retries: 4,
        }
    }

    /// Has connections use TLS with this key.
    ///
    /// # Errors
    /// [`PskError::NameWithSpace`].
    pub fn set_tls_key(&mut self, key: &ConfiguredPsk) -> Result<(), PskError> {
        self.psks.clear();
        // SPDK's target fails if the first identity is not one of the version that it knows.
        for version in [Version::Names, Version::Digest] {
            let TlsPsk { identity, hash, secret } = match key.of_tls(version, &self.host, &self.subsystem) {
                Err(PskError::NamesTooLong) => continue,
                derived => derived?,
            };
            let hash = match hash {
                psk::Hash::Sha256 => aryk_tls::Hash::Sha256,
                psk::Hash::Sha384 => aryk_tls::Hash::Sha384,
            };
            let psk = Psk::new(&identity, &secret, hash);
            self.psks.push(psk.expect("an identity is not empty, and a derived key is long enough"));
        }
        Ok(())
    }
}

impl RemoteConfig {
    /// The configuration for a path.
    fn at(&self, address: SocketAddr, source: Option<SocketAddr>) -> Self {
        Self { address, source, ..self.clone() }
    }

    /// The configurations for all paths.
    fn of_paths(&self) -> impl Iterator<Item = Self> {
        let first = (self.address, self.source);
        let all = std::iter::once(first).chain(self.further.iter().copied());
        all.map(|(address, source)| self.at(address, source))
    }
}

/// How far a controller is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemotePhase {
    /// The controller is connected for the first time.
    Connecting,
    /// The controller serves I/O.
    Ready,
    /// The connection is lost; requests wait.
    Lost,
    /// The connection is lost for long; requests fail.
    Failing,
    /// A client has disabled the controller; requests wait.
    Disabled,
    /// The controller ends.
    Ending,
}

/// The state of a controller, and what the controller says of itself.
#[derive(Clone, Debug)]
pub struct RemoteInfo {
    /// How far it is.
    pub phase: RemotePhase,
    /// The subsystem.
    pub subsystem: Nqn,
    /// The name by which this host connects.
    pub host: Nqn,
    /// What the controller says of itself; `None` before it has.
    pub controller: Option<ControllerInfo>,
    /// Its namespaces.
    pub namespaces: Vec<NamespaceInfo>,
    /// The controller's paths.
    pub paths: Vec<PathInfo>,
    /// Times that a path was lost.
    pub losses: u64,
    /// Why one was lost last.
    pub last_loss: Option<String>,
    /// Attempts after a status that allows another.
    pub retried: u64,
    /// Requests that were submitted again after a loss.
    pub resubmitted: u64,
    /// Requests that failed because they could not be submitted again without being seen.
    pub failed_by_loss: u64,
}

impl RemoteInfo {
    /// The numbers of the paths that take the requests of a namespace on a core.
    pub fn current_paths(&self, nsid: u32, core: u16) -> Vec<usize> {
        let access = |number: usize| {
            let path = self.paths.iter().find(|path| path.number == number)?;
            path.access.iter().find(|access| access.nsid == nsid)
        };
        let numbers = self.paths.iter().map(|path| path.number);
        let Some(any) = numbers.clone().find_map(access) else { return Vec::new() };
        let preferred = numbers.clone().find(|number| access(*number).is_some_and(|of| of.is_preferred));
        let choice = Choice { policy: any.policy, preferred };
        let connected = self.paths.iter().filter(|path| path.is_connected && path.queues.contains(&core));
        let connected = bits(connected.map(|path| path.number));
        let best = best_paths(connected, |number| access(number).map(|of| of.state), choice);
        numbers.filter(|number| best >> number & 1 == 1).collect()
    }
}

/// The state of a path to a controller.
#[derive(Clone, Debug)]
pub struct PathInfo {
    /// The path's number.
    pub number: usize,
    /// Where the target listens.
    pub address: SocketAddr,
    /// The address of this host that connections have; any by default.
    pub source: Option<SocketAddr>,
    /// Whether the path is connected.
    pub is_connected: bool,
    /// The identifier of the controller at its end, or of the last one; 0 before the first.
    pub controller_id: u16,
    /// Whether the target ends an earlier controller of this host, at the same address, before it takes a new one.
    pub ends_earlier: bool,
    /// Its I/O queues: the core of each.
    pub queues: Vec<u16>,
    /// The access that the path gives to the namespaces that are disks.
    pub access: Vec<PathAccess>,
    /// Times that it was lost.
    pub losses: u64,
    /// Why it was lost last.
    pub last_loss: Option<String>,
}

impl PathInfo {
    /// A path that has not been connected yet.
    fn unknown(number: usize, config: &RemoteConfig) -> Self {
        Self {
            number,
            address: config.address,
            source: config.source,
            is_connected: false,
            controller_id: 0,
            ends_earlier: false,
            queues: Vec::new(),
            access: Vec::new(),
            losses: 0,
            last_loss: None,
        }
    }
}

/// The access to a namespace through a path.
#[derive(Clone, Copy, Debug)]
pub struct PathAccess {
    /// The namespace.
    pub nsid: u32,
    /// The access that the controller gives.
    pub state: AnaState,
    /// How the paths of the namespace are used.
    pub policy: Policy,
    /// Whether the operator prefers this path.
    pub is_preferred: bool,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The controller has a path to this address.
    #[error("the controller {name} has a path to {address} already")]
    PathExists {
        /// The controller's name.
        name: String,
        /// Where.
        address: SocketAddr,
    },
    /// The controller has no path like this, or no other one.
    #[error("the controller {0} has no such path, or no other")]
    NoSuchPath(String),
    /// The controller has as many paths as it can.
    #[error("the controller {0} has {PATHS_MAX} paths, which is the most")]
    TooManyPaths(String),
    /// Another controller has the name.
    #[error("there is a controller {0} already")]
    Exists(String),
    /// There is no such controller.
    #[error("there is no NVMe controller {0}")]
    NotFound(String),
    /// The controller has no such namespace, or it cannot be a disk.
    #[error("namespace {nsid} of {name}: {reason}")]
    Namespace {
        /// The controller's name.
        name: String,
        /// NSID.
        nsid: u32,
        /// Why there is no disk of it.
        reason: String,
    },
    /// The target cannot be used.
    #[error("{address}: {reason}")]
    Target {
        /// Where.
        address: SocketAddr,
        /// Why.
        reason: ConnectError,
    },
    /// A disk cannot be registered.
    #[error(transparent)]
    Registry(#[from] aryk_bdev::Error),
    /// The kernel refused a thread.
    #[error("cannot start the thread of NVMe over Fabrics: {0}")]
    Thread(#[from] std::io::Error),
    /// The controller is not disabled.
    #[error("the controller {0} is not disabled")]
    NotDisabled(String),
    /// No path is connected.
    #[error("the controller {0} is not connected")]
    Away(String),
    /// The controller was detached meanwhile.
    #[error("the controller {0} has been detached")]
    Ended(String),
}

/// Why a connection cannot be used, or cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kernel's error.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The target closed the connection.
    #[error("the target has closed the connection")]
    Closed,
    /// The target did not answer in time.
    #[error("the target does not answer")]
    Silent,
    /// The target violates the protocol.
    #[error("the target violates the protocol: {0}")]
    Violation(aryk_nvme_fabrics::tcp::Fatal),
    /// The target ended the connection.
    #[error("the target has ended the connection: {0}")]
    Terminated(aryk_nvme_fabrics::tcp::Fatal),
    /// The target refused a command.
    #[error("{command}: {}", connection::status_name(command, *status))]
    Status {
        /// The command.
        command: &'static str,
        /// The target's answer.
        status: Status,
    },
    /// One side has not proved who it is.
    #[error("authentication: {0}")]
    Authentication(#[from] Failure),
    /// The target closed the connection instead of answering a proof: Linux' target does so after a wrong one, before or after it
    /// has said why.
    #[error("the target has closed the connection during authentication: it may know another key")]
    ClosedInAuthentication,
    /// TLS has failed.
    #[error("TLS: {0}")]
    Tls(#[from] TlsError),
    /// A connection of RDMA has failed.
    #[error("RDMA: {0}")]
    Rdma(#[from] Lost),
    /// The controller says what cannot be true.
    #[error(transparent)]
    Claim(#[from] aryk_nvme::claims::BadClaim),
    /// The target wants what this host does not do, or does not do what this host wants.
    #[error("{0}")]
    Unsupported(&'static str),
    /// Another controller answers at the address.
    #[error("another subsystem answers there: its serial number is '{0}'")]
    Other(String),
}
