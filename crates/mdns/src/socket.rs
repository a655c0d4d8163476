//! The socket of multicast DNS, and the links of this host. Control context.

use crate::wire::Message;
use nix::ifaddrs::getifaddrs;
use nix::libc::in_pktinfo;
use nix::net::if_::{InterfaceFlags, if_nametoindex};
use nix::sys::socket::sockopt::Ipv4PacketInfo;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SetSockOpt, SockaddrIn, recvmsg};
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket as StdSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::time::{Instant, sleep_until};

/// Links of this host that count.
pub const LINKS_MAX: usize = 32;
/// Packets of hosts of the links that are received in each second.
pub const PACKETS: u32 = 200;
/// As [`PACKETS`], of other senders. A packet of theirs costs little, and without a limit, they could take all time of the task.
const STRANGE_PACKETS: u32 = 20_000;
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
    /// The number of the interface. One that is made again has another number.
    index: u32,
    /// The addresses of this host.
    pub addresses: Vec<Ipv4Addr>,
    masks: Vec<u32>,
}

impl Link {
    /// Whether an address is one of the network of this link.
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
            // An interface that has just gone has no number.
            let Ok(index) = if_nametoindex(&*interface.interface_name) else { continue };
            let empty = || Link { index, addresses: Vec::new(), masks: Vec::new() };
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
    /// The numbers of the interfaces on which the socket is in the group.
    joined: BTreeSet<u32>,
    buffer: Vec<u8>,
    /// The packet's interface, as the kernel says it.
    control: Vec<u8>,
    budget: Budget,
}

/// Packets that may be received before the time.
#[derive(Debug)]
struct Budget {
    left: u32,
    /// Those of senders that are on no link.
    strange_left: u32,
    until: Instant,
}

impl Budget {
    const fn new(until: Instant) -> Self {
        Self { left: PACKETS, strange_left: STRANGE_PACKETS, until }
    }

    /// Begins the next second, if it has come. Returns when the next packet may be received, if that is later.
    fn renew(&mut self, now: Instant) -> Option<Instant> {
        if now >= self.until {
            *self = Self::new(now + Duration::from_secs(1));
        }
        (self.left == 0 || self.strange_left == 0).then_some(self.until)
    }

    const fn spend(&mut self, is_strange: bool) {
        let left = if is_strange { &mut self.strange_left } else { &mut self.left };
        *left = left.saturating_sub(1);
    }
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
        Ipv4PacketInfo.set(&socket, &true)?;
        bind(&socket, &SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT)))?;
        let udp = UdpSocket::from_std(StdSocket::from(socket))?;
        let mut socket = Self {
            udp,
            links: BTreeMap::new(),
            joined: BTreeSet::new(),
            buffer: vec![0; PACKET_MAX],
            control: nix::cmsg_space!(in_pktinfo),
            budget: Budget::new(Instant::now()),
        };
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
        let all: BTreeSet<u32> = links.values().map(|link| link.index).collect();
        // The kernel allows a socket few memberships, and counts those of interfaces that have gone.
        for index in self.joined.extract_if(.., |index| !all.contains(index)) {
            let (udp, any) = (&self.udp, Ipv4Addr::UNSPECIFIED);
            let left = sockopt::set_ip_drop_membership_with_ifindex(udp, &GROUP, &any, index);
            tracing::debug!(index, ?left, "a link of multicast DNS has gone");
        }
        for (name, Link { index, .. }) in &links {
            if self.joined.contains(index) {
                continue;
            }
            let (udp, any) = (&self.udp, Ipv4Addr::UNSPECIFIED);
            match sockopt::set_ip_add_membership_with_ifindex(udp, &GROUP, &any, *index) {
                Ok(()) => drop(self.joined.insert(*index)),
                // The next look tries again.
                Err(error) if new.contains(name) => {
                    tracing::warn!(interface = name, %error, "a link cannot be used for multicast DNS");
                }
                Err(_) => {}
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
        let Some(Link { index, addresses, .. }) = self.links.get(link) else { return };
        let Some(first) = addresses.first() else { return };
        let chosen = sockopt::set_ip_multicast_if_with_ifindex(&self.udp, &GROUP, first, *index);
        let chosen = chosen.map_err(io::Error::from);
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
            while let Some(at) = self.budget.renew(Instant::now()) {
                sleep_until(at).await;
            }
            let Packet { len, from, index } = self.receive_packet().await?;
            let is_from = |(_, link): &(&String, &Link)| link.index == index && link.has(*from.ip());
            let found = self.links.iter().find(is_from);
            self.budget.spend(found.is_none());
            let Some((link, _)) = found else { continue };
            // A packet that was too long for the buffer ends too early. An answer of any other port is no multicast DNS.
            match Message::parse(&self.buffer[..len]) {
                Ok(message) if !message.is_response || from.port() == PORT => {
                    return Ok(Received { link: link.clone(), from, message });
                }
                _ => {}
            }
        }
    }

    /// Receives a packet into the buffer. May be cancelled at any time.
    async fn receive_packet(&mut self) -> io::Result<Packet> {
        let Self { udp, buffer, control, .. } = self;
        let receive = || {
            let mut room = [IoSliceMut::new(buffer)];
            let flags = MsgFlags::MSG_DONTWAIT;
            let received = recvmsg::<SockaddrIn>(udp.as_raw_fd(), &mut room, Some(&mut *control), flags)?;
            let index = received.cmsgs()?.find_map(|message| match message {
                ControlMessageOwned::Ipv4PacketInfo(info) => u32::try_from(info.ipi_ifindex).ok(),
                _ => None,
            });
            let from = received.address.map(|from| SocketAddrV4::new(from.ip(), from.port()));
            let (from, index) = from.zip(index).ok_or(ErrorKind::InvalidData)?;
            Ok(Packet { len: received.bytes, from, index })
        };
        udp.async_io(Interest::READABLE, receive).await
    }
}

/// A packet in the buffer.
struct Packet {
    len: usize,
    from: SocketAddrV4,
    /// The number of the interface by which it has come.
    index: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_take_nothing_from_the_hosts_of_a_link() {
        let begun = Instant::now();
        let second = |count: u64| begun + Duration::from_secs(count);
        let mut budget = Budget::new(begun);
        assert_eq!(budget.renew(begun), None);
        (1..STRANGE_PACKETS).for_each(|_| budget.spend(true));
        (1..PACKETS).for_each(|_| budget.spend(false));
        assert_eq!(budget.renew(begun), None);
        budget.spend(false);
        assert_eq!(budget.renew(begun), Some(second(1)));
        assert_eq!(budget.renew(second(1)), None, "the next second has a budget of its own");
        (0..STRANGE_PACKETS).for_each(|_| budget.spend(true));
        assert_eq!(budget.renew(second(1)), Some(second(2)));
    }
}
