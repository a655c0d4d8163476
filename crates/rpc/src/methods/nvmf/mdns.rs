//! `nvmf_publish_mdns_prr`, `nvmf_stop_mdns_prr`: a target announces its discovery services on the local network, by multicast
//! DNS, so that hosts and discovery controllers find them (NVMe TP-8009). Control context.
//!
//! The discovery service answers at each address at which a subsystem listens, so these are the addresses that are announced.

use super::{Control, DEFAULT_TARGET, Error, Named, OfTarget, Phase, Table, object};
use aryk_mdns::{Name, Offer, Socket};
use aryk_nvme_fabrics::nqn;
use aryk_nvmf::{Channel, Transport};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::sleep;
use uuid::Uuid;

pub(super) const PUBLISH: &str = "nvmf_publish_mdns_prr";
/// The kind of service.
const KIND: &str = "_nvme-disc._tcp.local";
/// Addresses that are announced, at most.
const ADDRESSES_MAX: usize = 16;
/// Time between two looks at the listeners.
const LOOK: Duration = Duration::from_secs(1);

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        PUBLISH,
        Phase::RunTime,
        "Announces the discovery services of a target on the local network, by multicast DNS.",
        publish,
    );
    table.add(
        "nvmf_stop_mdns_prr",
        Phase::RunTime,
        "Takes the announcement of a target's discovery services back.",
        stop,
    );
}

/// A target that is announced.
#[derive(Debug)]
pub(super) struct Published {
    target: Weak<Named>,
    /// The announcement is taken back when this is dropped.
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Published {
    fn is_of(&self, named: &Rc<Named>) -> bool {
        self.target.ptr_eq(&Rc::downgrade(named))
    }

    /// Takes the announcement back.
    pub(super) async fn end(self) {
        drop(self.stop);
        // An error means that the task has ended with the daemon.
        let _ = self.task.await;
    }
}

/// The socket of multicast DNS.
pub(crate) fn open_socket() -> Result<Socket, Error> {
    Socket::open().map_err(|error: io::Error| {
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
        let hint = match errno {
            Errno::AFNOSUPPORT => " (the service needs the drop-in mdns.conf)",
            _ => "",
        };
        Error::errno(errno, format!("multicast DNS cannot be used: {error}{hint}"))
    })
}

async fn publish(control: &Control, p: OfTarget) -> Result<bool, Error> {
    let named = find(control, &p)?;
    control.check_open()?;
    if let Some(published) = &*control.nvmf.published.borrow()
        && !published.task.is_finished()
    {
        return Err(match published.is_of(&named) {
            true => Error::errno(Errno::EXIST, "the target is announced already"),
            false => Error::errno(Errno::INVAL, "another target is announced, and only one can be"),
        });
    }
    let socket = open_socket()?;
    let host = control.nvmf.announced_as.get_or_init(|| {
        let random = Uuid::new_v4().simple().to_string();
        // No other host has the same name.
        format!("aryk-{}", &random[..16])
    });
    let host = host.clone();
    let (stop, stopped) = oneshot::channel();
    let (sender, offers) = watch::channel(Vec::new());
    let target = Rc::downgrade(&named);
    let follows = follow(Weak::clone(&target), host, sender, stopped);
    let task = spawn_local(async move {
        tokio::join!(aryk_mdns::publish(socket, offers), follows);
    });
    control.nvmf.published.replace(Some(Published { target, stop, task }));
    object::made(control, PUBLISH, &p);
    Ok(true)
}

async fn stop(control: &Control, p: OfTarget) -> Result<bool, Error> {
    let named = find(control, &p)?;
    object::forget(control, PUBLISH, &p);
    end(control, &named).await;
    Ok(true)
}

/// Takes the announcement of a target back, if there is one.
pub(super) async fn end(control: &Control, named: &Rc<Named>) {
    let published = control.nvmf.published.borrow_mut().take_if(|published| published.is_of(named));
    if let Some(published) = published {
        published.end().await;
    }
}

/// Whether this daemon itself announces a service, or has done so: others may still know it.
pub(crate) fn is_own(control: &Control, service: &Name) -> bool {
    control.nvmf.announced_as.get().is_some_and(|host| service.to_string().starts_with(host))
}

fn find(control: &Control, p: &OfTarget) -> Result<Rc<Named>, Error> {
    let found = control.nvmf.find(p.tgt_name.as_deref());
    found.map_err(|_| {
        let name = p.tgt_name.as_deref().unwrap_or(DEFAULT_TARGET);
        Error::Internal(format!("there is no NVMe-oF target '{name}'"))
    })
}

/// Offers the addresses of a target's discovery service, as they are now, until the target or the announcement ends.
async fn follow(
    target: Weak<Named>,
    host: String,
    offers: watch::Sender<Vec<Offer>>,
    mut stopped: oneshot::Receiver<()>,
) {
    loop {
        let Some(named) = target.upgrade() else { return };
        let now = offers_of(&host, &plain_listeners(&named));
        drop(named);
        offers.send_if_modified(|before| {
            let is_new = *before != now;
            *before = now;
            is_new
        });
        tokio::select! {
            () = sleep(LOOK) => {}
            _ = &mut stopped => return,
        }
    }
}

/// Where a target listens by TCP without TLS, over IPv4.
fn plain_listeners(named: &Named) -> BTreeSet<SocketAddrV4> {
    let all = named.target.list().into_iter().flat_map(|subsystem| subsystem.listeners);
    let plain =
        all.filter(|(address, of)| address.transport == Transport::Tcp && of.channel == Channel::Plain);
    plain
        .filter_map(|(address, _)| match address.socket {
            std::net::SocketAddr::V4(address) => Some(address),
            std::net::SocketAddr::V6(_) => None,
        })
        .collect()
}

/// The services for these addresses.
fn offers_of(host: &str, addresses: &BTreeSet<SocketAddrV4>) -> Vec<Offer> {
    let of_kind = Name::parse(KIND).expect("a short name");
    let offer = |at: &SocketAddrV4| {
        let address = Some(*at.ip()).filter(|address| *address != Ipv4Addr::UNSPECIFIED);
        let place = address.map(|address| format!("-{}", address.to_string().replace('.', "-")));
        let host = format!("{host}{}", place.unwrap_or_default());
        Some(Offer {
            of_kind: of_kind.clone(),
            name: of_kind.within(&format!("{host}-{}", at.port()))?,
            host: Name::of([&*host, "local"])?,
            port: at.port(),
            text: aryk_mdns::text([("p", "tcp"), ("nqn", nqn::DISCOVERY)]),
            address,
        })
    };
    // Loopback is no link.
    let reachable = addresses.iter().filter(|at| !at.ip().is_loopback());
    reachable.filter_map(offer).take(ADDRESSES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_is_a_service_with_the_properties_that_hosts_look_for() {
        let addresses = ["0.0.0.0:4420", "127.0.0.1:4420", "192.0.2.1:4420", "192.0.2.1:8009"];
        let offers = offers_of("aryk-0", &addresses.map(|at| at.parse().unwrap()).into());
        let names: Vec<String> =
            offers.iter().map(|offer| format!("{} {}", offer.name, offer.host)).collect();
        assert_eq!(
            names,
            [
                "aryk-0-4420._nvme-disc._tcp.local aryk-0.local",
                "aryk-0-192-0-2-1-4420._nvme-disc._tcp.local aryk-0-192-0-2-1.local",
                "aryk-0-192-0-2-1-8009._nvme-disc._tcp.local aryk-0-192-0-2-1.local",
            ]
        );
        assert_eq!((offers[0].address, offers[1].address), (None, Some(Ipv4Addr::new(192, 0, 2, 1))));
        assert_eq!(aryk_mdns::text_value(&offers[0].text, "NQN"), Some(nqn::DISCOVERY.as_bytes()));
        let many = (1..=99).map(|port| SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port)).collect();
        assert_eq!(offers_of("aryk-0", &many).len(), ADDRESSES_MAX);
    }
}
