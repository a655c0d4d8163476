//! `bdev_nvme_start_discovery`, `_stop_discovery`, `_get_discovery_info`: the subsystems that a discovery service names are
//! attached by themselves. Control context.
//!
//! A service is an object of the configuration, and so is each controller that is attached for it: its note names the service. A
//! restart restores both; then the service is asked, and what it names no more is detached. As long as it cannot be asked, what
//! it said last stays. Services to which it refers are followed, too.

use super::attach::{ATTACH, Attach, DETACH};
use super::describe::Trid;
use super::options::Options;
use super::paths::Further;
use super::remote::{self, of_family, random_host};
use super::{Control, Error, Phase, Table, attach, is_attached};
use crate::Methods;
use crate::config::{Call, Subsystem};
use crate::methods::nvmf::read_psk;
use crate::methods::{NAME_LEN_MAX, NoParams};
use aryk_bdev_nvme::fabrics::{Following, Heard, PATHS_MAX, RemoteConfig, Transport as By};
use aryk_log_limit::{LogLimit, limited};
use aryk_nvme_fabrics::discovery::{Entry, Security, Subtype, Transport};
use aryk_nvme_fabrics::nqn::{DISCOVERY, Nqn};
use aryk_nvme_fabrics::psk::ConfiguredPsk;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::to_raw_value;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::sync::mpsc::{Receiver, Sender, UnboundedReceiver, channel};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use uuid::Uuid;

pub(crate) const START: &str = "bdev_nvme_start_discovery";

/// The port of discovery services.
const PORT: &str = "8009";
/// Services that one leads to, with itself.
const SERVICES_MAX: usize = 8;
/// Addresses of a subsystem that count.
const PLACES_MAX: usize = 64;
/// Subsystems that are attached or detached at the same time.
const ATTEMPTS_MAX: usize = 16;
/// Subsystems that keep a number.
const NUMBERS_MAX: usize = 1024;
/// For so long the service must not have named a subsystem before that is detached, by default: a target that restarts names its
/// subsystems one by one.
const GRACE: Duration = Duration::from_secs(60);
/// The longest time between two looks.
const LOOK_MAX: Duration = Duration::from_secs(3600);
/// Controllers that are attached for a service.
const CONTROLLERS_MAX: usize = 256;
/// Time before a subsystem that could not be attached is tried again.
const RETRY: Duration = Duration::from_secs(10);
/// How long a call waits that gives no time.
const ATTACH_TIME: Duration = Duration::from_secs(60);
/// Lines about one service: a burst, then one per period.
const LINES: u32 = 20;
const LINE_PERIOD: Duration = Duration::from_secs(10);

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        START,
        Phase::RunTime,
        "Follows a discovery service of NVMe over TCP or RDMA: the subsystems that it names are attached, and those that it names no more are \
         detached.",
        start,
    );
    table.add(
        "bdev_nvme_stop_discovery",
        Phase::RunTime,
        "Stops to follow a discovery service, and detaches the controllers that were attached for it.",
        async |control: &Control, p: Stop| stop(control, &p.name).await,
    );
    table.add(
        "bdev_nvme_get_discovery_info",
        Phase::RunTime,
        "Lists the discovery services that are followed.",
        async |control: &Control, _: NoParams| Ok::<_, Error>(list(control)),
    );
}

/// Parameters of `bdev_nvme_start_discovery`.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Start {
    /// Name of the service. Its controllers are called `NAME0`, `NAME1` and so on.
    name: String,
    /// `TCP` or `RDMA`: of the service, and of the subsystems that are attached.
    trtype: String,
    /// IP address of the service.
    traddr: String,
    /// `IPv4` or `IPv6`, of `traddr`.
    #[serde(skip_serializing_if = "Option::is_none")]
    adrfam: Option<String>,
    /// Port of the service. Default: 8009.
    #[serde(skip_serializing_if = "Option::is_none")]
    trsvcid: Option<String>,
    /// NQN by which this host connects, to the service and to subsystems. Default: a random one, which the daemon stores.
    #[serde(skip_serializing_if = "Option::is_none")]
    hostnqn: Option<String>,
    /// Whether the call waits until all subsystems are attached, apart from those that need TLS. If one cannot be, the call
    /// fails, and nothing is attached. Default: false.
    #[serde(default, skip_serializing)]
    wait_for_attach: bool,
    /// The longest time that the call waits, in milliseconds; it then waits, whatever `wait_for_attach` says. Default, and for 0:
    /// a minute.
    #[serde(default, skip_serializing)]
    attach_timeout_ms: Option<u64>,
    /// As for `bdev_nvme_attach_controller`, for each controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    ctrlr_loss_timeout_sec: Option<i32>,
    /// As for `bdev_nvme_attach_controller`, for each controller and the service itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    reconnect_delay_sec: Option<u32>,
    /// As for `bdev_nvme_attach_controller`, for each controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    fast_io_fail_timeout_sec: Option<u32>,
    /// Aryk only: seconds for which the service must not have named a subsystem before that is detached. Default: 60.
    #[serde(skip_serializing_if = "Option::is_none")]
    detach_delay_sec: Option<u32>,
    /// Aryk only: NQN of the service. Default: the one of all discovery services.
    #[serde(skip_serializing_if = "Option::is_none")]
    subnqn: Option<String>,
    /// Aryk only: name of the TLS key, in the keyring, that this host and the service have, and this host and its subsystems;
    /// needs `hostnqn`. Then the service, those to which it refers and their subsystems are connected with TLS, and those
    /// without TLS are not used.
    #[serde(skip_serializing_if = "Option::is_none")]
    psk: Option<String>,
    /// Aryk only: the daemon stores the mDNS discovery that has found the service.
    #[serde(skip_serializing_if = "Option::is_none")]
    mdns: Option<String>,
    /// Aryk only: the daemon stores the numbers of controllers, by the NQNs of their subsystems.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    numbers: BTreeMap<String, u32>,
}

impl Start {
    /// The call that attaches a subsystem, without its address.
    fn attach(&self, name: String, subsystem: &str) -> Attach {
        Attach {
            name,
            trtype: self.trtype.clone(),
            subnqn: Some(subsystem.to_owned()),
            hostnqn: self.hostnqn.clone(),
            ctrlr_loss_timeout_sec: self.ctrlr_loss_timeout_sec,
            reconnect_delay_sec: self.reconnect_delay_sec,
            fast_io_fail_timeout_sec: self.fast_io_fail_timeout_sec,
            psk: self.psk.clone(),
            discovery: Some(self.name.clone()),
            ..Attach::default()
        }
    }

    /// The call that attaches a subsystem at an address, with further paths, or adds the address to its paths.
    fn attach_at(&self, name: &str, subsystem: &Nqn, address: SocketAddr, further: &[SocketAddr]) -> Attach {
        let further: Vec<_> = further.iter().map(|&address| Further::at(address)).collect();
        Attach {
            traddr: address.ip().to_string(),
            trsvcid: Some(address.port().to_string()),
            adrfam: Some(of_family(address).to_owned()),
            paths: Some(further).filter(|further| !further.is_empty()),
            ..self.attach(name.to_owned(), subsystem.as_str())
        }
    }
}

/// Parameters of `bdev_nvme_stop_discovery`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Stop {
    /// Name of the service.
    name: String,
}

/// How far a service is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Progress {
    /// It is asked for the first time, or what it named first is being attached.
    Beginning,
    /// The subsystems that it named first are attached.
    Attached,
    /// It cannot be asked, or what it named first cannot be attached.
    Failed(String),
    /// It is to be followed no more.
    Ending,
    /// It is followed no more, and nothing is being attached for it.
    Ended,
}

/// A discovery service that is followed.
#[derive(Debug)]
pub(crate) struct Discovery {
    params: Start,
    config: RemoteConfig,
    /// The key of connections, which are then made with TLS.
    key: Option<ConfiguredPsk>,
    /// The services to which this one leads.
    referrals: RefCell<Vec<SocketAddr>>,
    /// Why services could not be asked last.
    errors: RefCell<BTreeMap<SocketAddr, String>>,
    /// The numbers of controllers. A subsystem keeps its number, so that a VM never gets the disk of another one.
    numbers: RefCell<BTreeMap<String, u32>>,
    /// Controllers that are being attached.
    attaching: RefCell<BTreeSet<String>>,
    progress: watch::Sender<Progress>,
}

impl Discovery {
    fn new(options: &Options, p: Start, key: Option<ConfiguredPsk>) -> Result<Self, Error> {
        if remote::transport(&p.trtype).is_none() {
            return Err(Error::invalid(format!(
                "discovery over '{}' is not supported, only over TCP and RDMA",
                p.trtype
            )));
        }
        // Names of disks have a number and an NSID behind this one.
        const LONGEST: usize = NAME_LEN_MAX - 24;
        if p.name.is_empty() || p.name.len() > LONGEST {
            return Err(Error::invalid(format!("the name of a discovery service has 1 to {LONGEST} bytes")));
        }
        let call = Attach {
            traddr: p.traddr.clone(),
            trsvcid: Some(
                p.trsvcid.clone().filter(|port| !port.is_empty()).unwrap_or_else(|| PORT.to_owned()),
            ),
            adrfam: p.adrfam.clone(),
            hostid: Some(Uuid::new_v4().to_string()),
            ..p.attach(p.name.clone(), p.subnqn.as_deref().unwrap_or(DISCOVERY))
        };
        let mut config = remote::config(options, &call)?;
        if let Some(key) = &key {
            config.set_tls_key(key).map_err(|error| Error::invalid(error.to_string()))?;
        }
        Ok(Self {
            key,
            numbers: RefCell::new(p.numbers.clone()),
            params: p,
            config,
            referrals: RefCell::default(),
            errors: RefCell::default(),
            attaching: RefCell::default(),
            progress: watch::channel(Progress::Beginning).0,
        })
    }

    /// Where an entry's target listens, if it does so by the transport of the service.
    fn address_of(&self, entry: &Entry) -> Option<SocketAddr> {
        let is_its = match self.config.transport {
            By::Tcp => entry.transport == Transport::Tcp,
            By::Rdma => entry.transport == Transport::Rdma,
        };
        Some(SocketAddr::new(entry.address.parse().ok()?, entry.service.parse().ok()?)).filter(|_| is_its)
    }

    /// Whether what an entry names can be connected: with a key, all of it uses TLS, and without one, nothing.
    fn is_usable(&self, entry: &Entry) -> bool {
        (entry.security == Security::Tls) == self.key.is_some()
    }

    fn is_ending(&self) -> bool {
        matches!(*self.progress.borrow(), Progress::Ending | Progress::Ended)
    }

    /// Tells a call that waits how the beginning went.
    fn has_begun(&self, progress: Progress) {
        self.progress.send_if_modified(|now| {
            let is_first = *now == Progress::Beginning;
            if is_first {
                *now = progress;
            }
            is_first
        });
    }

    /// The time for which the service must not have named a subsystem before that is detached.
    fn grace(&self) -> Duration {
        self.params.detach_delay_sec.map_or(GRACE, |seconds| Duration::from_secs(seconds.into()))
    }

    /// The name of a subsystem's controller. `None`: the service has named too many subsystems.
    fn name_of(&self, control: &Control, subsystem: &Nqn) -> Option<String> {
        let name = |number: u32| format!("{}{number}", self.params.name);
        if let Some(&number) = self.numbers.borrow().get(subsystem.as_str()) {
            return Some(name(number));
        }
        let used: BTreeSet<u32> = self.numbers.borrow().values().copied().collect();
        if used.len() >= NUMBERS_MAX {
            return None;
        }
        let disks = control.disks.registry.list();
        let is_free = |number: &u32| {
            if used.contains(number) {
                return false;
            }
            let (name, disk) = (name(*number), format!("{}n", name(*number)));
            !is_attached(control, &name)
                && control.config.noted(Subsystem::Nvme, &name).is_none()
                && !control.config.has_absent(Subsystem::Nvme, |absent| absent == name)
                && !disks.iter().any(|bdev| bdev.name().starts_with(&disk))
        };
        let number = (0..).find(is_free)?;
        let mut numbers = self.numbers.borrow_mut();
        numbers.insert(subsystem.to_string(), number);
        control.config.changed(Subsystem::Discovery, &self.params.name, "numbers", json!(*numbers));
        Some(name(number))
    }
}

async fn start(control: &Control, mut p: Start) -> Result<bool, Error> {
    let key = match &p.psk {
        Some(_) if p.hostnqn.is_none() => {
            return Err(Error::invalid("a TLS key is one of a host and needs `hostnqn`"));
        }
        Some(name) => Some(read_psk(control, name).await?),
        None => None,
    };
    p.hostnqn.get_or_insert_with(random_host);
    let discovery = Rc::new(Discovery::new(&control.nvme.options.borrow(), p, key)?);
    let name = &discovery.params.name;
    control.check_open()?;
    if control.nvme.discoveries.borrow().contains_key(name) {
        return Err(Error::errno(
            Errno::EXIST,
            format!("the discovery service '{name}' is followed already"),
        ));
    }
    control.nvme.discoveries.borrow_mut().insert(name.clone(), Rc::clone(&discovery));
    // First, so that a crash leaves no controllers without their service.
    control.config.made(Subsystem::Discovery, name, START, &discovery.params);
    let follower = control.nvme.discovering.borrow().clone();
    if follower.is_none_or(|follower| follower.send(Rc::clone(&discovery)).is_err()) {
        // The daemon ends.
        discovery.progress.send_replace(Progress::Ended);
    }
    let time = discovery.params.attach_timeout_ms.filter(|time| *time > 0);
    if discovery.params.wait_for_attach || time.is_some() {
        let time = time.map_or(ATTACH_TIME, Duration::from_millis);
        let mut progress = discovery.progress.subscribe();
        let begun = timeout(time, progress.wait_for(|now| *now != Progress::Beginning)).await;
        let refusal = match begun.map(|begun| begun.map(|progress| progress.clone())) {
            Ok(Ok(Progress::Attached)) => return Ok(true),
            Ok(Ok(Progress::Failed(reason))) => (Errno::IO, reason),
            Ok(Ok(_) | Err(_)) => (Errno::CANCELED, "it was stopped".to_owned()),
            Err(_) => (Errno::TIMEDOUT, "not all subsystems were attached in time".to_owned()),
        };
        if !discovery.is_ending() {
            control.config.removed(Subsystem::Discovery, name);
        }
        end(control, &discovery).await;
        return Err(Error::errno(refusal.0, format!("discovery '{name}': {}", refusal.1)));
    }
    Ok(true)
}

pub(super) async fn stop(control: &Control, name: &str) -> Result<bool, Error> {
    let was_noted = control.config.forget(Subsystem::Discovery, name);
    let followed = control.nvme.discoveries.borrow().get(name).cloned();
    match followed {
        Some(discovery) => end(control, &discovery).await,
        None if was_noted => detach_all_of(control, name).await,
        None => return Err(Error::no_device("discovery service", name)),
    }
    Ok(true)
}

/// Whether a service does not exist, or could not be asked when it was asked last.
pub(super) fn cannot_be_asked(control: &Control, name: &str) -> bool {
    let has_failed =
        |discovery: &Rc<Discovery>| discovery.errors.borrow().contains_key(&discovery.config.address);
    control.nvme.discoveries.borrow().get(name).is_none_or(has_failed)
}

/// Ends a service whose call could not be stored, or was revoked.
pub(crate) async fn unmake(control: &Control, name: &str) -> Result<(), Error> {
    stop(control, name).await.map(drop)
}

/// Stops to follow a service, and detaches its controllers. The name can be used again when this returns.
async fn end(control: &Control, discovery: &Rc<Discovery>) {
    discovery.progress.send_if_modified(|now| {
        let is_first = !matches!(*now, Progress::Ending | Progress::Ended);
        if is_first {
            *now = Progress::Ending;
        }
        is_first
    });
    let attaching = discovery.attaching.borrow().clone();
    for name in attaching {
        // It may be attached by now.
        let _ = control.nvme.remotes.detach(&name).await;
    }
    // An error means that the follower has gone with the daemon.
    let _ = discovery.progress.subscribe().wait_for(|now| *now == Progress::Ended).await;
    detach_all_of(control, &discovery.params.name).await;
    let mut discoveries = control.nvme.discoveries.borrow_mut();
    if discoveries.get(&discovery.params.name).is_some_and(|now| Rc::ptr_eq(now, discovery)) {
        discoveries.remove(&discovery.params.name);
    }
}

async fn detach_all_of(control: &Control, discovery: &str) {
    for controller in attached_for(control, discovery) {
        if control.config.forget(Subsystem::Nvme, &controller.name)
            && let Err(error) = attach::detach(control, &controller.name).await
        {
            // An absent one has no disks.
            tracing::debug!(controller = controller.name, %error, "it was not attached");
        }
    }
}

/// A discovery service that is followed.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeDiscovery")]
struct Description {
    name: String,
    trid: Trid,
    /// The services to which this one leads, which are followed, too.
    referrals: Vec<Referral>,
    /// Aryk only: why the service, or one of those, could not be asked last.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// A discovery service to which another refers.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeReferral")]
struct Referral {
    trid: Trid,
}

fn list(control: &Control) -> Vec<Description> {
    let discoveries = control.nvme.discoveries.borrow();
    let describe = |discovery: &Rc<Discovery>| {
        let referral =
            |&at: &SocketAddr| Referral { trid: Trid::of_target(discovery.config.transport, at, DISCOVERY) };
        Description {
            name: discovery.params.name.clone(),
            trid: Trid::of_target(
                discovery.config.transport,
                discovery.config.address,
                discovery.config.subsystem.as_str(),
            ),
            referrals: discovery.referrals.borrow().iter().map(referral).collect(),
            error: discovery.errors.borrow().values().next().cloned(),
        }
    };
    discoveries.values().map(describe).collect()
}

/// Follows each service for which a call asks, as long as the daemon lives. Needs a tokio `LocalSet`.
pub(crate) async fn follow(
    control: Weak<Control>,
    methods: Weak<Methods<Control>>,
    mut started: UnboundedReceiver<Rc<Discovery>>,
) {
    while let Some(discovery) = started.recv().await {
        let (control, methods) = (Weak::clone(&control), Weak::clone(&methods));
        tokio::task::spawn_local(async move {
            let (heard, hears) = channel(1);
            let mut follower = Follower {
                discovery: Rc::clone(&discovery),
                services: BTreeMap::new(),
                heard,
                again: BTreeMap::new(),
                missing: BTreeMap::new(),
                handled: BTreeSet::new(),
                attempts: JoinSet::new(),
                busy: BTreeSet::new(),
                lines: LogLimit::new(LINES, LINE_PERIOD),
            };
            follower.run(&control, &methods, hears).await;
            follower.drain(&control).await;
            discovery.progress.send_replace(Progress::Ended);
        });
    }
}

/// Why what an entry names is not used.
const fn reason(entry: &Entry) -> &'static str {
    match entry.security {
        Security::Tls => "it needs TLS, and there is no key",
        _ => "it does not use TLS, and there is a key",
    }
}

/// A service, from which the follower has heard or not.
struct Service {
    /// The entries that it sent last.
    entries: Option<Vec<Entry>>,
    _following: Following,
}

/// A controller in the configuration, existing or absent, that is attached for a service or by a client.
struct Attached {
    name: String,
    subsystem: Nqn,
    /// Where its paths lead.
    places: Vec<SocketAddr>,
    discovery: Option<String>,
}

impl Attached {
    fn of(call: &Call) -> Option<Self> {
        let text = |param: &str| call.params.get(param).and_then(|value| value.as_str()).map(str::to_owned);
        let first =
            remote::socket_address("traddr", &text("traddr")?, text("trsvcid").as_deref(), remote::PORT);
        let further = call.params.get("paths").cloned().unwrap_or_default();
        let further: Vec<Further> = serde_json::from_value(further).unwrap_or_default();
        let further = further.iter().filter_map(|path| path.addresses().ok()).map(|(address, _)| address);
        Some(Self {
            name: text("name")?,
            subsystem: text("subnqn")?.parse().ok()?,
            places: first.ok().into_iter().chain(further).collect(),
            discovery: text("discovery"),
        })
    }

    fn is_for(&self, discovery: &str) -> bool {
        self.discovery.as_deref() == Some(discovery)
    }
}

fn all_attached(control: &Control) -> Vec<Attached> {
    control.config.calls(Subsystem::Nvme).iter().filter_map(Attached::of).collect()
}

fn attached_for(control: &Control, discovery: &str) -> Vec<Attached> {
    let mut attached = all_attached(control);
    attached.retain(|attached| attached.is_for(discovery));
    attached
}

/// Follows one service and those to which it leads.
struct Follower {
    discovery: Rc<Discovery>,
    services: BTreeMap<SocketAddr, Service>,
    heard: Sender<Heard>,
    /// When subsystems that could not be attached, or not at all addresses, are tried again.
    again: BTreeMap<Nqn, Instant>,
    /// Since when controllers have paths to addresses that are named no more.
    missing: BTreeMap<(String, SocketAddr), Instant>,
    /// Addresses at which subsystems were attached before, and are named ever since: a client that detaches one wants it so.
    handled: BTreeSet<(Nqn, SocketAddr)>,
    /// Subsystems that are being attached or detached, as a whole or at an address.
    attempts: JoinSet<(Nqn, Attempt)>,
    busy: BTreeSet<Nqn>,
    lines: LogLimit,
}

/// What an attempt has done.
enum Attempt {
    /// Attached, with paths to these addresses.
    Attached(Vec<SocketAddr>),
    Refused(String),
    /// Attached before, and not at this address.
    PathRefused(SocketAddr, String),
    Detached,
    PathRemoved,
}

impl Follower {
    /// Follows the service until it ends, or the daemon does.
    async fn run(
        &mut self,
        control: &Weak<Control>,
        methods: &Weak<Methods<Control>>,
        mut hears: Receiver<Heard>,
    ) {
        let Some(start_up) = control.upgrade().map(|control| Rc::clone(&control.start_up)) else { return };
        let discovery = Rc::clone(&self.discovery);
        let ending = async || {
            let is_ending = |now: &Progress| matches!(now, Progress::Ending | Progress::Ended);
            // The sender is there as long as this task.
            let _ = discovery.progress.subscribe().wait_for(is_ending).await;
        };
        // Until then, absent controllers are being attached.
        tokio::select! {
            () = start_up.until_over() => {}
            () = ending() => return,
        }
        loop {
            let next = {
                let (Some(control), Some(methods)) = (control.upgrade(), methods.upgrade()) else { return };
                if control.is_closing() {
                    return;
                }
                self.look(&control, &methods)
            };
            tokio::select! {
                Some(heard) = hears.recv() => self.take(heard),
                Some(attempted) = self.attempts.join_next() => {
                    let Some(control) = control.upgrade() else { return };
                    self.attempted(&control, attempted.expect("no attempt panics, and none is cancelled"));
                }
                () = sleep_until(next) => {}
                () = ending() => return,
            }
        }
    }

    /// Waits until nothing is being attached.
    async fn drain(&mut self, control: &Weak<Control>) {
        self.services.clear();
        while let Some(attempted) = self.attempts.join_next().await {
            let Some(control) = control.upgrade() else { return };
            self.attempted(&control, attempted.expect("no attempt panics, and none is cancelled"));
        }
    }

    /// Keeps what a service has said.
    fn take(&mut self, heard: Heard) {
        let Some(service) = self.services.get_mut(&heard.service) else { return };
        match heard.entries {
            Ok(entries) => {
                self.discovery.errors.borrow_mut().remove(&heard.service);
                service.entries = Some(entries);
            }
            Err(error) => {
                let reason = format!("{}: {error}", heard.service);
                limited!(
                    self.lines, warn, discovery = self.discovery.params.name, %reason,
                    "a discovery service cannot be asked"
                );
                self.discovery.errors.borrow_mut().insert(heard.service, reason.clone());
                if heard.service == self.discovery.config.address {
                    self.discovery.has_begun(Progress::Failed(reason));
                }
            }
        }
    }

    fn attempted(&mut self, control: &Control, (subsystem, attempt): (Nqn, Attempt)) {
        let name = &self.discovery.params.name;
        self.busy.remove(&subsystem);
        control.nvme.discovered.borrow_mut().remove(&subsystem);
        match attempt {
            Attempt::Attached(places) => {
                self.handled.extend(places.into_iter().map(|place| (subsystem.clone(), place)));
            }
            Attempt::Detached => self.handled.retain(|(handled, _)| *handled != subsystem),
            Attempt::PathRemoved => {}
            Attempt::PathRefused(address, reason) => {
                limited!(
                    self.lines, warn, discovery = name, %subsystem, %address, reason,
                    "an address that a discovery service names for a subsystem cannot be used"
                );
                self.again.insert(subsystem, Instant::now() + RETRY);
            }
            Attempt::Refused(reason) => {
                limited!(
                    self.lines, warn, discovery = name, %subsystem, reason,
                    "a subsystem that a discovery service names cannot be attached"
                );
                self.discovery.has_begun(Progress::Failed(format!("{subsystem}: {reason}")));
                self.again.insert(subsystem, Instant::now() + RETRY);
            }
        }
    }

    /// Does what is due. Returns when to look again at the latest.
    fn look(&mut self, control: &Rc<Control>, methods: &Rc<Methods<Control>>) -> Instant {
        let now = Instant::now();
        let mut next = now + LOOK_MAX;
        if !self.follow_services(control) {
            return now + RETRY;
        }
        let named = self.named();
        let attached = all_attached(control);
        if self.services.values().all(|service| service.entries.is_some()) {
            next = next.min(self.detach_missing(&named, &attached, control, methods));
        }
        let is_named = |(subsystem, place): &(Nqn, SocketAddr)| {
            named.get(subsystem).is_some_and(|places| places.contains(place))
        };
        self.handled.retain(is_named);
        self.again.retain(|subsystem, again| named.contains_key(subsystem) && *again > now);
        self.attach_named(&named, &attached, control, methods);
        let is_handled = |subsystem: &Nqn| self.handled.iter().any(|(handled, _)| handled == subsystem);
        let is_settled = |subsystem: &Nqn| is_handled(subsystem) || self.again.contains_key(subsystem);
        if self.has_heard() && named.keys().all(is_settled) {
            self.discovery.has_begun(Progress::Attached);
        }
        self.again.values().copied().fold(next, Instant::min)
    }

    /// Whether all services have answered, or cannot be asked now.
    fn has_heard(&self) -> bool {
        let errors = self.discovery.errors.borrow();
        self.services.iter().all(|(at, service)| service.entries.is_some() || errors.contains_key(at))
    }

    /// Follows the services to which the first one leads, and no others. Returns whether all are followed.
    fn follow_services(&mut self, control: &Control) -> bool {
        let mut reached = vec![self.discovery.config.address];
        let mut next = 0;
        while let Some(at) = reached.get(next) {
            let entries = self.services.get(at).and_then(|service| service.entries.as_deref());
            let referrals =
                entries.unwrap_or_default().iter().filter(|entry| entry.subtype == Subtype::Referral);
            for entry in referrals {
                let Some(at) = self.discovery.address_of(entry) else { continue };
                if !self.discovery.is_usable(entry) {
                    let reason = reason(entry);
                    limited!(self.lines, warn, address = %at, reason, "a discovery service is not followed");
                    continue;
                }
                if reached.len() < SERVICES_MAX && !reached.contains(&at) {
                    reached.push(at);
                }
            }
            next += 1;
        }
        self.services.retain(|at, _| reached.contains(at));
        self.discovery.errors.borrow_mut().retain(|at, _| reached.contains(at));
        for &at in &reached {
            if self.services.contains_key(&at) {
                continue;
            }
            let host_id = *Uuid::new_v4().as_bytes();
            let mut config = RemoteConfig { address: at, host_id, ..self.discovery.config.clone() };
            if at != self.discovery.config.address {
                config.subsystem = DISCOVERY.parse().expect("a valid name");
                if let Some(key) = &self.discovery.key {
                    // This name is short, and the host's is that of the first service.
                    config.set_tls_key(key).expect("the key of the first service was set");
                }
            }
            match control.nvme.remotes.follow(config, self.heard.clone()) {
                Ok(following) => {
                    self.services.insert(at, Service { entries: None, _following: following });
                }
                Err(error) => {
                    limited!(self.lines, warn, %error, "cannot start the thread of NVMe over Fabrics");
                    return false;
                }
            }
        }
        self.discovery.referrals.replace(reached.split_off(1));
        true
    }

    /// The subsystems that the services name, and where.
    fn named(&mut self) -> BTreeMap<Nqn, Vec<SocketAddr>> {
        let mut named: BTreeMap<Nqn, Vec<SocketAddr>> = BTreeMap::new();
        for entry in self.services.values().filter_map(|service| service.entries.as_ref()).flatten() {
            if entry.subtype != Subtype::Subsystem {
                continue;
            }
            if !self.discovery.is_usable(entry) {
                let (subsystem, reason) = (&entry.subsystem, reason(entry));
                limited!(self.lines, warn, %subsystem, reason, "a subsystem is not attached");
                continue;
            }
            if let Some(at) = self.discovery.address_of(entry) {
                let places = named.entry(entry.subsystem.clone()).or_default();
                if places.len() < PLACES_MAX && !places.contains(&at) {
                    places.push(at);
                }
            }
        }
        named
    }

    /// Begins to detach controllers of this service, or paths of them, that have not been named for long. Returns when the next
    /// one will be due.
    fn detach_missing(
        &mut self,
        named: &BTreeMap<Nqn, Vec<SocketAddr>>,
        attached: &[Attached],
        control: &Control,
        methods: &Rc<Methods<Control>>,
    ) -> Instant {
        let (now, grace) = (Instant::now(), self.discovery.grace());
        let mut next = now + LOOK_MAX;
        let mut missing = BTreeMap::new();
        for controller in attached.iter().filter(|attached| attached.is_for(&self.discovery.params.name)) {
            if self.busy.contains(&controller.subsystem) {
                continue;
            }
            let places = named.get(&controller.subsystem).map(Vec::as_slice).unwrap_or_default();
            let mut due = Vec::new();
            for &place in controller.places.iter().filter(|place| !places.contains(place)) {
                let key = (controller.name.clone(), place);
                let since = self.missing.get(&key).copied().unwrap_or(now);
                missing.insert(key, since);
                if now < since + grace {
                    next = next.min(since + grace);
                } else {
                    due.push(place);
                }
            }
            let (discovery, name) = (&self.discovery.params.name, &controller.name);
            let path = match due.first() {
                None => continue,
                _ if due.len() == controller.places.len() => {
                    limited!(
                        self.lines,
                        info,
                        discovery,
                        controller = name,
                        "a subsystem is named no more, and detached"
                    );
                    None
                }
                // One that is absent keeps its paths until it is back.
                Some(_) if !is_attached(control, name) => continue,
                // The next look removes another one.
                Some(&address) => {
                    limited!(
                        self.lines, info, discovery, controller = name, %address,
                        "an address of a subsystem is named no more, and its path removed"
                    );
                    Some(address)
                }
            };
            let (subsystem, name, methods) = (controller.subsystem.clone(), name.clone(), Rc::clone(methods));
            self.busy.insert(subsystem.clone());
            self.attempts.spawn_local(async move {
                detach(&methods, &name, path).await;
                (subsystem, path.map_or(Attempt::Detached, |_| Attempt::PathRemoved))
            });
        }
        self.missing = missing;
        next
    }

    /// The addresses at which a subsystem is to be attached now, all at once, or the one to which a controller that exists gets a
    /// path.
    fn new_places(
        &mut self,
        subsystem: &Nqn,
        places: &[SocketAddr],
        existing: Option<&Attached>,
    ) -> Vec<SocketAddr> {
        if self.busy.contains(subsystem) || self.again.contains_key(subsystem) {
            return Vec::new();
        }
        let place = |place: &SocketAddr| (subsystem.clone(), *place);
        let (handled, mut new): (Vec<_>, Vec<_>) =
            places.iter().copied().partition(|at| self.handled.contains(&place(at)));
        let own = &self.discovery.params.name;
        match existing {
            // It may be detached when that service ends.
            Some(other) if other.discovery.is_some() && !other.is_for(own) => {
                if !new.is_empty() {
                    self.again.insert(subsystem.clone(), Instant::now() + RETRY);
                }
                new.clear();
            }
            Some(own) if own.discovery.is_some() => {
                let there = new.extract_if(.., |at| own.places.contains(at));
                self.handled.extend(there.map(|at| place(&at)));
                // The other paths may go.
                new.truncate(usize::from(own.places.len() < PATHS_MAX));
            }
            None if handled.is_empty() => new.truncate(PATHS_MAX),
            // A client has attached it, or has detached it.
            Some(_) | None => self.handled.extend(new.drain(..).map(|at| place(&at))),
        }
        new
    }

    /// Begins to attach what is named and not attached, with a path to each address.
    fn attach_named(
        &mut self,
        named: &BTreeMap<Nqn, Vec<SocketAddr>>,
        attached: &[Attached],
        control: &Rc<Control>,
        methods: &Rc<Methods<Control>>,
    ) {
        let discovery = Rc::clone(&self.discovery);
        let of: BTreeMap<&Nqn, &Attached> =
            attached.iter().map(|attached| (&attached.subsystem, attached)).collect();
        let mut count = attached.iter().filter(|attached| attached.is_for(&discovery.params.name)).count();
        let now = Instant::now();
        for (subsystem, places) in named {
            let existing = of.get(subsystem).copied();
            let new = self.new_places(subsystem, places, existing);
            if new.is_empty() {
                continue;
            }
            if self.attempts.len() >= ATTEMPTS_MAX {
                break;
            }
            let is_path = existing.is_some();
            let name = match existing {
                Some(own) => Some(own.name.clone()),
                None => discovery.name_of(control, subsystem).filter(|_| count < CONTROLLERS_MAX),
            };
            if name.is_none() {
                let discovery = &discovery.params.name;
                limited!(self.lines, warn, discovery, %subsystem, "the service names too many subsystems");
            }
            let (Some(name), true) = (name, control.nvme.discovered.borrow_mut().insert(subsystem.clone()))
            else {
                self.again.insert(subsystem.clone(), now + RETRY);
                continue;
            };
            count += usize::from(!is_path);
            self.busy.insert(subsystem.clone());
            let call = discovery.params.attach_at(&name, subsystem, new[0], &new[1..]);
            let (subsystem, discovery, methods) =
                (subsystem.clone(), Rc::clone(&discovery), Rc::clone(methods));
            self.attempts.spawn_local(async move {
                if !is_path {
                    discovery.attaching.borrow_mut().insert(name.clone());
                }
                let attempt = match attach_by(&discovery, &methods, &call).await {
                    Ok(()) => Attempt::Attached(new),
                    Err(reason) if is_path => Attempt::PathRefused(new[0], reason),
                    Err(reason) => Attempt::Refused(reason),
                };
                discovery.attaching.borrow_mut().remove(&name);
                (subsystem, attempt)
            });
        }
    }
}

/// Attaches a subsystem, or adds a path to it.
///
/// # Errors
/// Why it cannot be attached.
async fn attach_by(discovery: &Discovery, methods: &Methods<Control>, call: &Attach) -> Result<(), String> {
    if discovery.is_ending() {
        return Err("the service is followed no more".to_owned());
    }
    let params = to_raw_value(call).expect("a call is valid JSON");
    methods.call(ATTACH, Some(params)).await.map_err(|error| error.to_string())?;
    let (discovery, controller) = (&discovery.params.name, &call.name);
    let (subsystem, address, port) = (&call.subnqn, &call.traddr, &call.trsvcid);
    tracing::info!(discovery, controller, subsystem, address, port, "attached");
    Ok(())
}

/// Detaches a controller, or removes its path to an address.
async fn detach(methods: &Methods<Control>, controller: &str, path: Option<SocketAddr>) {
    let params = match path {
        None => json!({"name": controller}),
        Some(path) => {
            json!({"name": controller, "traddr": path.ip().to_string(), "trsvcid": path.port().to_string()})
        }
    };
    let params = to_raw_value(&params).expect("a call is valid JSON");
    if let Err(error) = methods.call(DETACH, Some(params)).await {
        tracing::warn!(controller, %error, "a controller, or a path of it, cannot be detached");
    }
}
