//! The socket of multicast DNS, and the links of this host. Control context.

use crate::wire::Message;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket as StdSocket};
use std::time::Duration;
use tokio::net::UdpSocket;
use tokio::time::{Instant, sleep_until};

/// Links of this host that count.
pub const LINKS_MAX: usize = 32;
/// Packets that are received in each second.
pub const PACKETS: u32 = 200;
/// The port of multicast DNS, also that of every host that knows more than DNS.
pub const PORT: u16 = 5353;
/// The longest packet (RFC 6762, section 17).
const PACKET_MAX: usize = 9000;
const GROUP: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 251);
/// Packets stay on the link; a receiver may check this.
const TIME_TO_LIVE: u32 = 255;

/// A network to which this host is connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The addresses of this host.
    pub addresses: Vec<Ipv4Addr>,
    masks: Vec<u32>,
}

impl Link {
    /// Whether an address is one of this link.
    fn has(&self, address: Ipv4Addr) -> bool {
        let both = self.addresses.iter().zip(&self.masks);
        both.into_iter().any(|(own, mask)| (own.to_bits() ^ address.to_bits()) & mask == 0)
    }
}

/// The links of this host that are up, by the names of their interfaces.
fn links() -> io::Result<BTreeMap<String, Link>> {
    let mut links: BTreeMap<String, Link> = BTreeMap::new();
    for interface in getifaddrs().map_err(io::Error::from)? {
        let needed = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING | InterfaceFlags::IFF_MULTICAST;
        if !interface.flags.contains(needed) || interface.flags.contains(InterfaceFlags::IFF_LOOPBACK) {
            continue;
        }
        let address = interface.address.as_ref().and_then(|address| Some(address.as_sockaddr_in()?.ip()));
        let mask = interface.netmask.as_ref().and_then(|mask| Some(mask.as_sockaddr_in()?.ip()));
        let (Some(address), Some(mask)) = (address, mask) else { continue };
        if links.len() < LINKS_MAX || links.contains_key(&interface.interface_name) {
            let empty = || Link { addresses: Vec::new(), masks: Vec::new() };
            let link = links.entry(interface.interface_name).or_insert_with(empty);
            link.addresses.push(address);
            link.masks.push(mask.to_bits());
        }
    }
    Ok(links)
}

/// What a host of a link has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The link's interface.
    pub link: String,
    /// The sender.
    pub from: SocketAddrV4,
    /// The message.
    pub message: Message,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Socket {
    udp: UdpSocket,
    links: BTreeMap<String, Link>,
    buffer: Vec<u8>,
    /// Packets that may be received before the time.
    left: u32,
    until: Instant,
}

impl Socket {
    /// Opens the socket, and joins the group on all links.
    ///
    /// # Errors
    /// The kernel refuses the socket, its port, or to list the interfaces: a sandbox may do so.
    pub fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
        // Other programs of this host use the port, too.
        sockopt::set_socket_reuseaddr(&socket, true)?;
        sockopt::set_ip_multicast_ttl(&socket, TIME_TO_LIVE)?;
        bind(&socket, &SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT)))?;
        let udp = UdpSocket::from_std(StdSocket::from(socket))?;
        let (left, until) = (PACKETS, Instant::now());
        let mut socket = Self { udp, links: BTreeMap::new(), buffer: vec![0; PACKET_MAX], left, until };
        socket.refresh()?;
        Ok(socket)
    }

    /// Looks at the links of this host again. Returns the interfaces of those that are new or have changed.
    ///
    /// # Errors
    /// The kernel refuses to list the interfaces.
    pub fn refresh(&mut self) -> io::Result<Vec<String>> {
        let links = links()?;
        let is_new = |(name, link): &(&String, &Link)| self.links.get(*name) != Some(*link);
        let new: Vec<String> = links.iter().filter(is_new).map(|(name, _)| name.clone()).collect();
        for name in &new {
            let addresses = &links[name].addresses;
            if let Some(first) = addresses.first() {
                // One that has joined already is refused, and stays. So does one whose interface has just gone.
                let joined = self.udp.join_multicast_v4(GROUP, *first);
                tracing::debug!(interface = name, %first, ?joined, "a link of multicast DNS");
            }
        }
        self.links = links;
        Ok(new)
    }

    /// The links, by the names of their interfaces.
    pub const fn links(&self) -> &BTreeMap<String, Link> {
        &self.links
    }

    /// Sends a message to all hosts of a link. One that cannot be sent is lost, as on the network.
    pub fn announce(&self, link: &str, message: &[u8]) {
        let first = self.links.get(link).and_then(|link| link.addresses.first());
        let Some(first) = first else { return };
        let chosen = sockopt::set_ip_multicast_if(&self.udp, first).map_err(io::Error::from);
        let group = SocketAddrV4::new(GROUP, PORT);
        if let Err(error) = chosen.and_then(|()| self.udp.try_send_to(message, group.into())) {
            tracing::debug!(interface = link, %error, "a message of multicast DNS is lost");
        }
    }

    /// Sends a message to one host.
    pub fn answer(&self, to: SocketAddrV4, message: &[u8]) {
        if let Err(error) = self.udp.try_send_to(message, to.into()) {
            tracing::debug!(%to, %error, "a message of multicast DNS is lost");
        }
    }

    /// Waits for a valid message of a host of a link. May be cancelled at any time.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn receive(&mut self) -> io::Result<Received> {
        loop {
            if self.left == 0 {
                sleep_until(self.until).await;
            }
            let now = Instant::now();
            if now >= self.until {
                (self.left, self.until) = (PACKETS, now + Duration::from_secs(1));
            }
            let (len, from) = self.udp.recv_from(&mut self.buffer).await?;
            self.left = self.left.saturating_sub(1);
            let SocketAddr::V4(from) = from else { continue };
            let Some((link, _)) = self.links.iter().find(|(_, link)| link.has(*from.ip())) else { continue };
            // A packet that was too long for the buffer ends too early. An answer of any other port is no multicast DNS.
            match Message::parse(&self.buffer[..len]) {
                Ok(message) if !message.is_response || from.port() == PORT => {
                    return Ok(Received { link: link.clone(), from, message });
                }
                _ => {}
            }
        }
    }
}
