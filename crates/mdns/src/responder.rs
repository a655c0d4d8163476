//! The announcements of this host on a link. Control context; the caller gives the time, and does the I/O.
//!
//! All services of a link are announced together: one message for each, twice, when they are new, and again when a host asks
//! for one of them, at most once a second; programs that know only DNS get answers of their own, ten in a second. When one
//! ends, a message takes it back.

use crate::wire::{Data, Message, Name, Record, kind};
use std::net::Ipv4Addr;
use std::time::Duration;
use tokio::time::Instant;

/// For how long records hold: of hosts, and others (RFC 6762, section 10).
const TTL_HOST: u32 = 120;
const TTL_OTHER: u32 = 4500;
/// The longest time for which programs that know only DNS may keep an answer.
const TTL_LEGACY: u32 = 10;
/// The least time between two announcements.
const INTERVAL: Duration = Duration::from_secs(1);
/// The least time between two answers for senders alone.
const LEGACY_INTERVAL: Duration = Duration::from_millis(100);
/// The time after which several hosts answer the same question, in milliseconds.
const DELAY_MS: std::ops::Range<u64> = 20..120;

/// A service of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The name of its kind of services.
    pub of_kind: Name,
    /// The name of the service.
    pub name: Name,
    /// The name of its host. Services with the same one have the same `address`.
    pub host: Name,
    /// The port of the service.
    pub port: u16,
    /// Its properties: see [`crate::wire::text`].
    pub text: Vec<u8>,
    /// The only address at which it is; `None`: all addresses of this host.
    pub address: Option<Ipv4Addr>,
}

impl Offer {
    /// Whether it can be reached through a link with these addresses of this host.
    pub fn is_at(&self, addresses: &[Ipv4Addr]) -> bool {
        self.address.is_none_or(|address| addresses.contains(&address))
    }

    /// The message that announces it, or takes it back, on a link with these addresses of this host.
    fn announcement(&self, addresses: &[Ipv4Addr], is_end: bool) -> Message {
        let record = |name: &Name, ttl, flushes, data| Record {
            name: name.clone(),
            ttl: if is_end { 0 } else { ttl },
            flushes,
            data,
        };
        let mut records = vec![
            record(&self.of_kind, TTL_OTHER, false, Data::Ptr(self.name.clone())),
            record(&self.name, TTL_HOST, true, Data::Srv { host: self.host.clone(), port: self.port }),
            record(&self.name, TTL_OTHER, true, Data::Txt(self.text.clone())),
        ];
        let of_it = addresses.iter().filter(|address| self.address.is_none_or(|only| only == **address));
        records.extend(of_it.map(|address| record(&self.host, TTL_HOST, true, Data::A(*address))));
        Message { is_response: true, records, ..Message::default() }
    }

    /// Whether a message asks for it and does not know it already. `kinds` is the name under which kinds of services are listed.
    fn is_asked_by(&self, message: &Message, kinds: &Name) -> bool {
        let knows = |record: &Record| {
            record.name == self.of_kind
                && record.ttl >= TTL_OTHER / 2
                && matches!(&record.data, Data::Ptr(name) if *name == self.name)
        };
        let is_known = message.records.iter().any(knows);
        message.questions.iter().any(|question| {
            let is_of = |name: &Name, kinds: &[u16]| {
                question.name == *name && (question.kind == kind::ANY || kinds.contains(&question.kind))
            };
            is_of(&self.of_kind, &[kind::PTR]) && !is_known
                || is_of(&self.name, &[kind::SRV, kind::TXT])
                || is_of(&self.host, &[kind::A])
                || is_of(kinds, &[kind::PTR])
        })
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct Responder {
    kinds: Name,
    offers: Vec<Offer>,
    /// Announcements that are due without a question.
    left: u8,
    announce_at: Option<Instant>,
    announced_at: Option<Instant>,
    /// When the sender of a question has last got an answer for itself.
    answered_at: Option<Instant>,
}

impl Default for Responder {
    fn default() -> Self {
        let kinds = Name::parse("_services._dns-sd._udp.local").expect("a short name");
        Self { kinds, offers: Vec::new(), left: 0, announce_at: None, announced_at: None, answered_at: None }
    }
}

impl Responder {
    /// Offers these services from now on. Returns the messages that take the others back.
    pub fn offer(&mut self, offers: Vec<Offer>, addresses: &[Ipv4Addr], now: Instant) -> Vec<Message> {
        if offers == self.offers {
            return Vec::new();
        }
        let ended = self.offers.iter().filter(|offer| !offers.contains(offer));
        let goodbye = |ended: &Offer| {
            let has_host = offers.iter().any(|offer| offer.host == ended.host);
            ended.announcement(if has_host { &[] } else { addresses }, true)
        };
        let goodbyes = ended.map(goodbye).collect();
        self.offers = offers;
        (self.left, self.announce_at) = (2, Some(now));
        goodbyes
    }

    /// Takes a message of a host of the link. Returns the answer for the sender alone, if that knows only DNS.
    pub fn take(
        &mut self,
        message: &Message,
        is_legacy: bool,
        addresses: &[Ipv4Addr],
        now: Instant,
    ) -> Option<Message> {
        if message.is_response {
            return None;
        }
        let asked = self.offers.iter().find(|offer| offer.is_asked_by(message, &self.kinds))?;
        if is_legacy {
            // The sender may have forged its address: the answer is not much longer than the question, and comes rarely.
            let is_soon = self.answered_at.is_some_and(|before| now < before + LEGACY_INTERVAL);
            if is_soon || message.questions.len() != 1 {
                return None;
            }
            self.answered_at = Some(now);
            let mut answer = asked.announcement(addresses, false);
            (answer.id, answer.questions) = (message.id, message.questions.clone());
            for record in &mut answer.records {
                (record.ttl, record.flushes) = (TTL_LEGACY, false);
            }
            return Some(answer);
        }
        let soon = now + Duration::from_millis(fastrand::u64(DELAY_MS));
        let at = self.announced_at.map_or(soon, |before| soon.max(before + INTERVAL));
        self.announce_at.get_or_insert(at);
        None
    }

    /// When an announcement is due.
    pub const fn next(&self) -> Option<Instant> {
        self.announce_at
    }

    /// The announcements that are due.
    pub fn announce(&mut self, addresses: &[Ipv4Addr], now: Instant) -> Vec<Message> {
        if self.announce_at.is_none_or(|at| at > now) {
            return Vec::new();
        }
        self.left = self.left.saturating_sub(1);
        (self.announce_at, self.announced_at) = ((self.left > 0).then(|| now + INTERVAL), Some(now));
        let mut messages: Vec<Message> =
            self.offers.iter().map(|offer| offer.announcement(addresses, false)).collect();
        if let Some((message, offer)) = messages.first_mut().zip(self.offers.first()) {
            message.records.push(Record {
                name: self.kinds.clone(),
                ttl: TTL_OTHER,
                flushes: false,
                data: Data::Ptr(offer.of_kind.clone()),
            });
        }
        messages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Browser;
    use crate::wire::{Question, text};

    const LINK: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];

    fn offer(name: &str, address: Option<Ipv4Addr>) -> Offer {
        let of_kind = Name::parse("_nvme-disc._tcp.local").unwrap();
        let name = of_kind.within(name).unwrap();
        let host = Name::parse(address.map_or("h.local", |_| "h-2.local")).unwrap();
        Offer { of_kind, name, host, port: 8009, text: text([("p", "tcp")]), address }
    }

    fn question(name: &str, kind: u16) -> Message {
        let name = Name::parse(name).unwrap();
        Message { questions: vec![Question { name, kind }], ..Message::default() }
    }

    #[test]
    fn a_browser_finds_what_is_offered_until_it_is_taken_back() {
        let now = Instant::now();
        let mut responder = Responder::default();
        let mut browser = Browser::new(offer("a", None).of_kind, now);
        assert!(responder.offer(vec![offer("a", None), offer("b", Some(LINK[1]))], &LINK, now).is_empty());
        let announced = responder.announce(&LINK, now);
        announced.iter().for_each(|message| browser.take(message, now));
        let places: Vec<usize> = browser.services().map(|service| service.places.len()).collect();
        assert_eq!(places, [2, 1]);
        assert_eq!((announced[0].records.len(), announced[1].records.len()), (6, 4));
        // They are announced twice.
        assert_eq!(responder.next(), Some(now + INTERVAL));
        assert_eq!(responder.announce(&LINK, now + INTERVAL).len(), 2);
        assert_eq!(responder.next(), None);
        for goodbye in responder.offer(vec![offer("b", Some(LINK[1]))], &LINK, now) {
            browser.take(&goodbye, now);
        }
        browser.expire(now + INTERVAL);
        let left: Vec<Name> = browser.services().map(|service| service.name).collect();
        assert_eq!(left, [offer("b", None).name]);
        for goodbye in responder.offer(Vec::new(), &LINK, now) {
            browser.take(&goodbye, now);
        }
        browser.expire(now + INTERVAL);
        assert_eq!(browser.services().count(), 0);
    }

    #[test]
    fn questions_are_answered_once_a_second() {
        let mut now = Instant::now();
        let mut responder = Responder::default();
        responder.offer(vec![offer("a", None)], &LINK, now);
        for _ in 0..2 {
            assert_eq!(responder.announce(&LINK, now).len(), 1);
            now += INTERVAL;
        }
        let asked = |responder: &mut Responder, message: &Message, now| {
            assert_eq!(responder.take(message, false, &LINK, now), None);
            let due = responder.next();
            due.inspect(|due| assert_eq!(responder.announce(&LINK, *due).len(), 1));
            due
        };
        for (name, kind) in [
            ("_nvme-disc._tcp.local", kind::PTR),
            ("a._nvme-disc._tcp.local", kind::SRV),
            ("a._nvme-disc._tcp.local", kind::ANY),
            ("H.local", kind::A),
            ("_services._dns-sd._udp.local", kind::PTR),
        ] {
            let first = asked(&mut responder, &question(name, kind), now).unwrap();
            assert!(first >= now && first < now + Duration::from_millis(1120), "{name}");
            let second = asked(&mut responder, &question(name, kind), first).unwrap();
            assert!(second >= first + INTERVAL, "{name}");
            now = second + INTERVAL;
        }
        for (name, kind) in [("_nvme-disc._udp.local", kind::PTR), ("b._nvme-disc._tcp.local", kind::SRV)] {
            assert_eq!(asked(&mut responder, &question(name, kind), now), None);
        }
        // A host that knows the service gets no answer, and neither does one that answers.
        let mut known = question("_nvme-disc._tcp.local", kind::PTR);
        known.records = offer("a", None).announcement(&LINK, false).records;
        assert_eq!(asked(&mut responder, &known, now), None);
        let answer = Message { is_response: true, ..question("_nvme-disc._tcp.local", kind::PTR) };
        assert_eq!(asked(&mut responder, &answer, now), None);
    }

    #[test]
    fn a_program_that_knows_only_dns_is_answered_alone() {
        let mut responder = Responder::default();
        let now = Instant::now();
        responder.offer(vec![offer("a", None)], &LINK, now);
        responder.announce(&LINK, now);
        let asked = Message { id: 7, ..question("_nvme-disc._tcp.local", kind::PTR) };
        let answer = responder.take(&asked, true, &LINK, now).unwrap();
        assert_eq!((answer.id, &answer.questions), (7, &asked.questions));
        assert!(answer.records.iter().all(|record| record.ttl == 10 && !record.flushes));
        assert_eq!(responder.take(&asked, true, &LINK, now + LEGACY_INTERVAL / 2), None);
        let mut long = asked.clone();
        long.questions.extend(asked.questions.clone());
        assert_eq!(responder.take(&long, true, &LINK, now + LEGACY_INTERVAL), None);
        assert!(responder.take(&asked, true, &LINK, now + LEGACY_INTERVAL).is_some());
    }
}
