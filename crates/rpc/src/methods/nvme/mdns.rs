//! `bdev_nvme_start_mdns_discovery`, `_stop_mdns_discovery`, `_get_mdns_discovery_info`: discovery services that hosts of the
//! local network announce by multicast DNS are followed, each as by `bdev_nvme_start_discovery`. Control context.
//!
//! Every host of the network may announce anything. So what it announces is checked ([`entry`]), at most [`FOLLOWED_MAX`]
//! services are followed, and in each [`INTERVAL`] one more at most. A service that is announced no more stays, as in SPDK: it
//! may only have lost the network. One that has never named a subsystem has no disks, so that no VM depends on its name; when it
//! cannot be reached, it is forgotten once it is announced no more, or when all places are taken and others are announced.

use super::describe::Trid;
use super::discovery::{self, START};
use super::remote::random_host;
use super::{Control, Error, Phase, Table};
use crate::Methods;
use crate::config::Subsystem;
use crate::methods::nvmf::{is_own, open_mdns};
use crate::methods::{NAME_LEN_MAX, NoParams};
use aryk_bdev_nvme::fabrics::Transport;
use aryk_log_limit::{LogLimit, limited};
use aryk_mdns::{Name, Service, Socket, text_value};
use aryk_nvme_fabrics::nqn::Nqn;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::to_raw_value;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

pub(crate) const START_MDNS: &str = "bdev_nvme_start_mdns_discovery";

/// Services that are followed, at most.
const FOLLOWED_MAX: usize = 16;
/// The least time between two services that begin to be followed.
const INTERVAL: Duration = Duration::from_millis(250);
/// For so long a service may be out of reach before it gives its place to another.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time before a service is followed again that was forgotten, or could not be followed.
const RETRY: Duration = Duration::from_secs(600);
/// The longest time between two looks.
const LOOK_MAX: Duration = Duration::from_secs(10);
/// Lines about one mDNS discovery: a burst, then one per period.
const LINES: u32 = 20;
const LINE_PERIOD: Duration = Duration::from_secs(10);

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        START_MDNS,
        Phase::RunTime,
        "Follows the discovery services of NVMe over TCP that hosts announce on the local network, by multicast DNS.",
        start,
    );
    table.add(
        "bdev_nvme_stop_mdns_discovery",
        Phase::RunTime,
        "Stops to follow announced discovery services, and detaches the controllers that were attached for them.",
        async |control: &Control, p: Stop| stop(control, &p.name).await,
    );
    table.add(
        "bdev_nvme_get_mdns_discovery_info",
        Phase::RunTime,
        "Lists the mDNS discoveries, with the services that they have found.",
        async |control: &Control, _: NoParams| Ok::<_, Error>(list(control)),
    );
}

/// Parameters of `bdev_nvme_start_mdns_discovery`.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NvmeStartMdns")]
struct Start {
    /// Name of the discovery. The services that it finds are called `NAME0`, `NAME1` and so on, and their controllers `NAME00`,
    /// `NAME01` and so on.
    name: String,
    /// The kind of service: `_nvme-disc._tcp`.
    svcname: String,
    /// NQN by which this host connects, to services and to subsystems. Default: a random one, which the daemon stores.
    #[serde(skip_serializing_if = "Option::is_none")]
    hostnqn: Option<String>,
}

/// Parameters of `bdev_nvme_stop_mdns_discovery`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NvmeStopMdns")]
struct Stop {
    /// Name of the discovery.
    name: String,
}

/// A running mDNS discovery.
#[derive(Debug)]
pub(crate) struct Mdns {
    params: Start,
    /// The name of the kind of service.
    of_kind: Name,
    /// The socket, until the task has it.
    socket: RefCell<Option<Socket>>,
    is_ending: watch::Sender<bool>,
    /// Whether the task has ended.
    has_ended: watch::Sender<bool>,
}

/// The kind of service with a name such as `_nvme-disc._tcp`.
fn kind_of(svcname: &str) -> Result<Name, Error> {
    let refusal =
        || Error::invalid(format!("`svcname` '{svcname}' is no kind of service such as _nvme-disc._tcp"));
    let (kind, protocol) = svcname.split_once('.').ok_or_else(refusal)?;
    let is_kind = kind.len() > 1 && kind.starts_with('_') && ["_tcp", "_udp"].contains(&protocol);
    Name::of([kind, protocol, "local"]).filter(|_| is_kind).ok_or_else(refusal)
}

async fn start(control: &Control, mut p: Start) -> Result<bool, Error> {
    // Names of disks have two numbers and an NSID behind this one.
    const LONGEST: usize = NAME_LEN_MAX - 28;
    if p.name.is_empty() || p.name.len() > LONGEST {
        return Err(Error::invalid(format!("the name of an mDNS discovery has 1 to {LONGEST} bytes")));
    }
    let of_kind = kind_of(&p.svcname)?;
    let host: Result<Nqn, _> = p.hostnqn.get_or_insert_with(random_host).parse();
    host.map_err(|error| Error::invalid(format!("`hostnqn`: {error}")))?;
    control.check_open()?;
    let is_same = |mdns: &&Rc<Mdns>| mdns.params.name == p.name || mdns.of_kind == of_kind;
    if let Some(mdns) = control.nvme.mdns.borrow().values().find(is_same) {
        let (name, kind) = (&mdns.params.name, &mdns.params.svcname);
        return Err(Error::errno(
            Errno::EXIST,
            format!("the mDNS discovery '{name}' looks for {kind} already"),
        ));
    }
    let socket = RefCell::new(Some(open_mdns()?));
    let (is_ending, has_ended) = (watch::channel(false).0, watch::channel(false).0);
    let mdns = Rc::new(Mdns { params: p, of_kind, socket, is_ending, has_ended });
    let name = &mdns.params.name;
    control.nvme.mdns.borrow_mut().insert(name.clone(), Rc::clone(&mdns));
    control.config.made(Subsystem::Mdns, name, START_MDNS, &mdns.params);
    let follower = control.nvme.browsing.borrow().clone();
    if follower.is_none_or(|follower| follower.send(Rc::clone(&mdns)).is_err()) {
        // The daemon ends.
        mdns.has_ended.send_replace(true);
    }
    Ok(true)
}

async fn stop(control: &Control, name: &str) -> Result<bool, Error> {
    let running = control.nvme.mdns.borrow().get(name).cloned();
    if let Some(mdns) = &running {
        mdns.is_ending.send_replace(true);
        // The sender is there as long as `mdns`.
        let _ = mdns.has_ended.subscribe().wait_for(|has_ended| *has_ended).await;
    }
    // First, so that a crash leaves no service without its discovery.
    for followed in followed_by(control, name) {
        if let Err(error) = discovery::stop(control, &followed.name).await {
            tracing::debug!(service = followed.name, %error, "a client has stopped it");
        }
    }
    let was_noted = control.config.forget(Subsystem::Mdns, name);
    if let Some(mdns) = &running {
        control.nvme.mdns.borrow_mut().retain(|_, other| !Rc::ptr_eq(other, mdns));
    }
    match was_noted || running.is_some() {
        true => Ok(true),
        false => Err(Error::no_device("mDNS discovery", name)),
    }
}

/// Ends a discovery whose call could not be stored, or was revoked.
pub(crate) async fn unmake(control: &Control, name: &str) -> Result<(), Error> {
    stop(control, name).await.map(drop)
}

/// A service that is followed, or is absent.
struct Followed {
    name: String,
    address: SocketAddr,
    subsystem: String,
    /// Whether it has named a subsystem.
    has_named: bool,
}

/// The services that an mDNS discovery has found.
fn followed_by(control: &Control, mdns: &str) -> Vec<Followed> {
    let calls = control.config.calls(Subsystem::Discovery);
    let of_it = calls.iter().filter(|call| call.params["mdns"] == mdns);
    of_it
        .filter_map(|call| {
            let text = |param: &str| call.params[param].as_str().map(str::to_owned);
            Some(Followed {
                name: text("name")?,
                address: SocketAddr::new(text("traddr")?.parse().ok()?, text("trsvcid")?.parse().ok()?),
                subsystem: text("subnqn")?,
                has_named: call.params.get("numbers").is_some(),
            })
        })
        .collect()
}

/// An mDNS discovery.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeMdnsDiscovery")]
struct Description {
    name: String,
    /// The kind of service.
    svcname: String,
    /// The services that it has found, and follows.
    referrals: Vec<Found>,
}

/// A discovery service that was found.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeMdnsReferral")]
struct Found {
    /// Its name, as in `bdev_nvme_get_discovery_info`.
    name: String,
    trid: Trid,
}

fn list(control: &Control) -> Vec<Description> {
    let describe = |mdns: &Rc<Mdns>| {
        let found = |followed: Followed| Found {
            trid: Trid::of_target(Transport::Tcp, followed.address, &followed.subsystem),
            name: followed.name,
        };
        Description {
            name: mdns.params.name.clone(),
            svcname: mdns.params.svcname.clone(),
            referrals: followed_by(control, &mdns.params.name).into_iter().map(found).collect(),
        }
    };
    control.nvme.mdns.borrow().values().map(describe).collect()
}

/// Why a service that is announced is not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Refusal {
    #[error("its protocol is not TCP")]
    Protocol,
    #[error("it has no valid NQN")]
    Name,
    #[error("it has no address of a host")]
    Address,
}

/// What is followed of a service that a host announces: its NQN, and where it is.
fn entry(text: &[u8], places: &[SocketAddrV4]) -> Result<(Nqn, SocketAddrV4), Refusal> {
    if !text_value(text, "p").is_some_and(|protocol| protocol.eq_ignore_ascii_case(b"tcp")) {
        return Err(Refusal::Protocol);
    }
    let name = text_value(text, "nqn").and_then(|name| std::str::from_utf8(name).ok());
    let name = name.and_then(|name| name.parse().ok()).ok_or(Refusal::Name)?;
    let is_host = |ip: &Ipv4Addr| {
        // An announcement must not lead to the services of this host itself.
        !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || ip.octets()[0] >= 240)
    };
    let place = places.iter().find(|at| at.port() != 0 && is_host(at.ip()));
    Ok((name, *place.ok_or(Refusal::Address)?))
}

/// Follows what each mDNS discovery finds, as long as the daemon lives. Needs a tokio `LocalSet`.
pub(crate) async fn follow(
    control: Weak<Control>,
    methods: Weak<Methods<Control>>,
    mut started: UnboundedReceiver<Rc<Mdns>>,
) {
    while let Some(mdns) = started.recv().await {
        let (control, methods) = (Weak::clone(&control), Weak::clone(&methods));
        tokio::task::spawn_local(async move {
            let mut finder = Finder {
                mdns: Rc::clone(&mdns),
                begun: BTreeMap::new(),
                again: BTreeMap::new(),
                next: Instant::now(),
                lines: LogLimit::new(LINES, LINE_PERIOD),
            };
            if let Some(socket) = mdns.socket.take() {
                let (sender, found) = watch::channel(BTreeSet::new());
                // The browser ends with the last receiver.
                let browses = aryk_mdns::browse(socket, mdns.of_kind.clone(), sender);
                tokio::join!(browses, finder.run(&control, &methods, found));
            }
            mdns.has_ended.send_replace(true);
        });
    }
}

/// Where a discovery service is, and its name: another host may announce the same address with another name.
type Place = (SocketAddr, Nqn);

impl Followed {
    fn is_at(&self, (address, subsystem): &Place) -> bool {
        self.address == *address && self.subsystem == subsystem.as_str()
    }
}

/// Follows what one mDNS discovery finds.
struct Finder {
    mdns: Rc<Mdns>,
    /// Since when services are followed, or are known to be, by name.
    begun: BTreeMap<String, Instant>,
    /// When services are followed again at the earliest that were forgotten, or could not be followed.
    again: BTreeMap<Place, Instant>,
    /// When the next service may be followed.
    next: Instant,
    lines: LogLimit,
}

impl Finder {
    async fn run(
        &mut self,
        control: &Weak<Control>,
        methods: &Weak<Methods<Control>>,
        mut found: watch::Receiver<BTreeSet<Service>>,
    ) {
        let Some(start_up) = control.upgrade().map(|control| Rc::clone(&control.start_up)) else { return };
        let mut ending = self.mdns.is_ending.subscribe();
        // Until then, the services that were found before are being followed again.
        tokio::select! {
            () = start_up.until_over() => {}
            _ = ending.wait_for(|is_ending| *is_ending) => return,
        }
        loop {
            let next = {
                let (Some(control), Some(methods)) = (control.upgrade(), methods.upgrade()) else { return };
                if control.is_closing() {
                    return;
                }
                let announced = self.announced(&control, &found.borrow_and_update());
                self.look(&control, &methods, &announced).await
            };
            tokio::select! {
                changed = found.changed() => if changed.is_err() { return },
                () = sleep_until(next) => {}
                _ = ending.wait_for(|is_ending| *is_ending) => return,
            }
        }
    }

    /// The services that other daemons announce now and that can be followed.
    fn announced(&self, control: &Control, found: &BTreeSet<Service>) -> BTreeSet<Place> {
        let mut announced = BTreeSet::new();
        for service in found.iter().filter(|service| !is_own(control, &service.name)) {
            match entry(&service.text, &service.places) {
                Ok((subsystem, place)) => {
                    announced.insert((SocketAddr::V4(place), subsystem));
                }
                Err(refusal) => {
                    let (discovery, service) = (&self.mdns.params.name, &service.name);
                    limited!(self.lines, info, discovery, %service, %refusal, "an announced service is ignored");
                }
            }
        }
        announced
    }

    /// Does what is due. Returns when to look again at the latest.
    async fn look(
        &mut self,
        control: &Rc<Control>,
        methods: &Methods<Control>,
        announced: &BTreeSet<Place>,
    ) -> Instant {
        let now = Instant::now();
        let followed = followed_by(control, &self.mdns.params.name);
        self.begun.retain(|name, _| followed.iter().any(|service| service.name == *name));
        for service in &followed {
            self.begun.entry(service.name.clone()).or_insert(now);
        }
        self.again.retain(|place, again| announced.contains(place) && *again > now);
        let is_new = |place: &&Place| {
            !self.again.contains_key(*place) && followed.iter().all(|service| !service.is_at(place))
        };
        let mut new: Vec<&Place> = announced.iter().filter(is_new).collect();
        let is_full = followed.len() >= FOLLOWED_MAX;
        if let Some(useless) = followed
            .iter()
            .find(|service| self.is_useless(service, control, announced, !new.is_empty() && is_full))
        {
            let of_useless = announced.iter().filter(|place| useless.is_at(place));
            self.again.extend(of_useless.map(|place| (place.clone(), now + RETRY)));
            if let Err(error) = discovery::stop(control, &useless.name).await {
                tracing::debug!(service = useless.name, %error, "a client has stopped it");
            }
            return now;
        }
        if new.is_empty() {
            return now + LOOK_MAX;
        }
        if is_full {
            let (discovery, most) = (&self.mdns.params.name, FOLLOWED_MAX);
            limited!(
                self.lines,
                warn,
                discovery,
                most,
                "more discovery services are announced than are followed"
            );
            return now + LOOK_MAX;
        }
        if now < self.next {
            return self.next;
        }
        self.next = now + INTERVAL;
        // No host is first by its address.
        let at = new.swap_remove(fastrand::usize(..new.len()));
        self.begin(control, methods, at).await;
        self.next
    }

    /// Whether a service is forgotten: it has never named a subsystem, and cannot be reached.
    fn is_useless(
        &self,
        service: &Followed,
        control: &Control,
        announced: &BTreeSet<Place>,
        others_wait: bool,
    ) -> bool {
        let is_late = self.begun.get(&service.name).is_some_and(|begun| begun.elapsed() >= PATIENCE);
        let is_meant = others_wait || !announced.iter().any(|place| service.is_at(place));
        is_meant && is_late && !service.has_named && discovery::cannot_be_asked(control, &service.name)
    }

    /// Begins to follow a service.
    async fn begin(&mut self, control: &Control, methods: &Methods<Control>, place: &Place) {
        let (at, subsystem) = place;
        let prefix = &self.mdns.params.name;
        let name = |number: u32| format!("{prefix}{number}");
        let is_free = |name: &String| {
            !control.nvme.discoveries.borrow().contains_key(name)
                && control.config.noted(Subsystem::Discovery, name).is_none()
                && !control.config.has_absent(Subsystem::Discovery, |absent| absent == name)
        };
        let Some(name) = (0..).map(name).find(is_free) else { return };
        let params = json!({
            "name": name,
            "trtype": "TCP",
            "traddr": at.ip().to_string(),
            "trsvcid": at.port().to_string(),
            "subnqn": subsystem.as_str(),
            "hostnqn": self.mdns.params.hostnqn,
            "mdns": prefix,
        });
        let params = to_raw_value(&params).expect("a call is valid JSON");
        match methods.call(START, Some(params)).await {
            Ok(_) => {
                tracing::info!(discovery = prefix, service = name, address = %at, "a discovery service was found")
            }
            Err(error) => {
                let discovery = prefix;
                limited!(self.lines, warn, discovery, address = %at, %error, "a discovery service cannot be followed");
                self.again.insert(place.clone(), Instant::now() + RETRY);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_mdns::text;
    use proptest::prelude::*;

    fn places(all: &[&str]) -> Vec<SocketAddrV4> {
        all.iter().map(|at| at.parse().unwrap()).collect()
    }

    #[test]
    fn a_service_has_a_protocol_a_name_and_a_place() {
        let sane = text([("P", "TCP"), ("NQN", "nqn.2014-08.org.nvmexpress.discovery")]);
        let found =
            |text: &[u8], at: &[&str]| entry(text, &places(at)).map(|(name, at)| format!("{name} {at}"));
        let expected = "nqn.2014-08.org.nvmexpress.discovery 192.0.2.1:8009".to_owned();
        let hosts = ["127.0.0.1:8009", "0.0.0.0:8009", "224.0.0.1:8009", "255.255.255.255:1", "192.0.2.9:0"];
        assert_eq!(found(&sane, &[&hosts[..], &["192.0.2.1:8009"]].concat()), Ok(expected));
        assert_eq!(found(&sane, &hosts), Err(Refusal::Address));
        assert_eq!(found(&text([("p", "udp"), ("nqn", "nqn.a")]), &[]), Err(Refusal::Protocol));
        assert_eq!(found(&text([("nqn", "nqn.a")]), &[]), Err(Refusal::Protocol));
        assert_eq!(found(&text([("p", "tcp")]), &[]), Err(Refusal::Name));
        assert_eq!(found(&text([("p", "tcp"), ("nqn", "a b")]), &[]), Err(Refusal::Name));
    }

    #[test]
    fn a_kind_of_service_is_named_as_by_spdk() {
        assert_eq!(kind_of("_nvme-disc._tcp").unwrap().to_string(), "_nvme-disc._tcp.local");
        for wrong in ["", "_nvme-disc", "nvme._tcp", "_._tcp", "_a._tcp.local", "_a._sctp", &"_a".repeat(99)]
        {
            assert!(kind_of(wrong).is_err(), "{wrong}");
        }
    }

    proptest! {
        /// Whatever a host announces, only valid names and the addresses of other hosts are followed.
        #[test]
        fn what_is_followed_is_valid(
            mut bytes in prop::collection::vec(any::<u8>(), 0..300),
            places in prop::collection::vec((any::<u32>(), 0..3_u16), 0..5),
            name in "[ -~]{0,230}",
            is_text in any::<bool>(),
        ) {
            if is_text {
                bytes = text([("p", "tcp"), ("nqn", &name)]);
            }
            let places: Vec<SocketAddrV4> =
                places.into_iter().map(|(ip, port)| SocketAddrV4::new(ip.into(), port)).collect();
            if let Ok((name, at)) = entry(&bytes, &places) {
                prop_assert!(places.contains(&at) && at.port() > 0);
                prop_assert!(!at.ip().is_loopback() && !at.ip().is_multicast() && !at.ip().is_unspecified());
                prop_assert!(name.as_str().parse::<Nqn>().is_ok() && name.as_str().len() <= 223);
            }
        }
    }
}
