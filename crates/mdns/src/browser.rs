//! What other hosts of a link announce: the services of one kind. Control context; the caller gives the time, and does the I/O.
//!
//! A service counts when its place, its text and an address of its host are known. Records of hosts and services that no pointer
//! has named are ignored, in each message from its start to its end, so that what is kept has its limit in [`SERVICES_MAX`].

use crate::wire::{Data, Message, Name, Question, Record, kind};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;
use tokio::time::Instant;

/// Services of a link that are kept.
pub const SERVICES_MAX: usize = 64;
/// Addresses of a host that are kept.
pub const ADDRESSES_MAX: usize = 4;
/// The longest text of a service.
pub const TEXT_MAX: usize = 1024;
/// The longest time for which a record holds.
const TTL_MAX: Duration = Duration::from_secs(4500);
/// For so long a record holds that is taken back (RFC 6762, section 10.1).
const GOODBYE: Duration = Duration::from_secs(1);
/// The shortest time between two questions, which doubles, and the longest.
const ASK_FIRST: Duration = Duration::from_secs(1);
const ASK_LAST: Duration = Duration::from_secs(60);
/// A message with questions that is longer than this gets no further services.
const KNOWN_LEN: usize = 1000;

/// A service that a host announces.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Service {
    /// The name of the service.
    pub name: Name,
    /// Its properties: see [`crate::text_value`].
    pub text: Vec<u8>,
    /// The addresses of the service, at most [`ADDRESSES_MAX`].
    pub places: Vec<SocketAddrV4>,
}

/// The records of a service, each with the time until which it holds.
#[derive(Debug)]
struct Known {
    until: Instant,
    place: Option<(Name, u16, Instant)>,
    text: Option<(Vec<u8>, Instant)>,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Browser {
    of_kind: Name,
    services: BTreeMap<Name, Known>,
    /// The addresses of the services' hosts.
    hosts: BTreeMap<Name, BTreeMap<Ipv4Addr, Instant>>,
    ask_at: Instant,
    interval: Duration,
}

impl Browser {
    /// Nothing is known yet.
    pub fn new(of_kind: Name, now: Instant) -> Self {
        let (services, hosts) = (BTreeMap::new(), BTreeMap::new());
        Self { of_kind, services, hosts, ask_at: now, interval: ASK_FIRST }
    }

    /// Takes a message of a host of the link.
    pub fn take(&mut self, message: &Message, now: Instant) {
        if !message.is_response {
            return;
        }
        // A host may send the records in any order.
        for record in &message.records {
            if let Data::Ptr(service) = &record.data
                && record.name == self.of_kind
            {
                self.take_pointer(service, until(record, now), record.ttl);
            }
        }
        for record in &message.records {
            self.take_part(record, until(record, now));
        }
        let named: BTreeSet<&Name> =
            self.services.values().filter_map(|known| known.place.as_ref()).map(|(host, ..)| host).collect();
        self.hosts.retain(|host, _| named.contains(host));
        let mut begun = BTreeSet::new();
        for record in message.records.iter().filter(|record| named.contains(&record.name)) {
            let Data::A(address) = record.data else { continue };
            let addresses = self.hosts.entry(record.name.clone()).or_default();
            if record.flushes && begun.insert(&record.name) {
                // Those of this message come again.
                addresses.values_mut().for_each(|until| *until = (*until).min(now + GOODBYE));
            }
            if addresses.len() == ADDRESSES_MAX && !addresses.contains_key(&address) {
                // The next one comes in the place of one that is about to go.
                let leaving = addresses.iter().find(|(_, until)| **until <= now + GOODBYE);
                let Some((&leaving, _)) = leaving else { continue };
                addresses.remove(&leaving);
            }
            addresses.insert(address, until(record, now));
        }
    }

    fn take_pointer(&mut self, service: &Name, until: Instant, ttl: u32) {
        let has_room = self.services.len() < SERVICES_MAX;
        match self.services.get_mut(service) {
            Some(known) => known.until = until,
            None if ttl > 0 && has_room => {
                self.services.insert(service.clone(), Known { until, place: None, text: None });
            }
            None => {}
        }
    }

    fn take_part(&mut self, record: &Record, until: Instant) {
        let Some(known) = self.services.get_mut(&record.name) else { return };
        match &record.data {
            Data::Srv { host, port } => known.place = Some((host.clone(), *port, until)),
            Data::Txt(text) if text.len() <= TEXT_MAX => known.text = Some((text.clone(), until)),
            Data::Txt(_) | Data::Ptr(_) | Data::A(_) => {}
        }
    }

    /// Forgets what holds no longer.
    pub fn expire(&mut self, now: Instant) {
        self.services.retain(|_, known| known.until > now);
        for known in self.services.values_mut() {
            known.place.take_if(|(.., until)| *until <= now);
            known.text.take_if(|(_, until)| *until <= now);
        }
        self.hosts.values_mut().for_each(|addresses| addresses.retain(|_, until| *until > now));
    }

    /// The services of which all is known.
    pub fn services(&self) -> impl Iterator<Item = Service> {
        self.services.iter().filter_map(|(name, known)| {
            let (host, port, _) = known.place.as_ref()?;
            let (text, _) = known.text.as_ref()?;
            let addresses = self.hosts.get(host).filter(|addresses| !addresses.is_empty())?;
            let places = addresses.keys().map(|address| SocketAddrV4::new(*address, *port)).collect();
            Some(Service { name: name.clone(), text: text.clone(), places })
        })
    }

    /// When something is due: a question, or something holds no longer.
    pub fn next(&self) -> Instant {
        let of_service = |known: &Known| {
            let parts = known.place.as_ref().map(|(.., until)| *until);
            let parts = parts.into_iter().chain(known.text.as_ref().map(|(_, until)| *until));
            parts.fold(known.until, Instant::min)
        };
        let services = self.services.values().map(of_service);
        let addresses = self.hosts.values().flat_map(|addresses| addresses.values().copied());
        services.chain(addresses).fold(self.ask_at, Instant::min)
    }

    /// The question that is due: for all services, with those that are known and hold for long, and for what is not known of
    /// them.
    pub fn ask(&mut self, now: Instant) -> Option<Message> {
        if now < self.ask_at {
            return None;
        }
        (self.ask_at, self.interval) = (now + self.interval, (2 * self.interval).min(ASK_LAST));
        let mut message = Message {
            questions: vec![Question { name: self.of_kind.clone(), kind: kind::PTR }],
            ..Message::default()
        };
        for (name, known) in &self.services {
            if known.place.is_none() || known.text.is_none() {
                message.questions.push(Question { name: name.clone(), kind: kind::ANY });
            }
            let host = known.place.as_ref().map(|(host, ..)| host);
            if let Some(host) = host.filter(|host| self.hosts.get(host).is_none_or(BTreeMap::is_empty)) {
                message.questions.push(Question { name: host.clone(), kind: kind::A });
            }
            if message.encode().len() > KNOWN_LEN {
                break;
            }
            let left = known.until.saturating_duration_since(now);
            // A service of which a part is about to expire is to answer in full.
            let is_whole = known.place.as_ref().is_some_and(|(.., until)| *until > now + 2 * ASK_LAST);
            if is_whole && left > TTL_MAX / 2 {
                message.records.push(Record {
                    name: self.of_kind.clone(),
                    ttl: left.as_secs() as u32,
                    flushes: false,
                    data: Data::Ptr(name.clone()),
                });
            }
        }
        Some(message)
    }
}

/// Until when a record holds that comes now.
fn until(record: &Record, now: Instant) -> Instant {
    now + Duration::from_secs(record.ttl.into()).clamp(GOODBYE, TTL_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::text;
    use proptest::prelude::*;

    fn kind_of_service() -> Name {
        Name::parse("_nvme-disc._tcp.local").unwrap()
    }

    fn announced(number: usize, ttl: u32) -> Message {
        let host = Name::parse(&format!("h{number}.local")).unwrap();
        let service = kind_of_service().within(&format!("s{number}")).unwrap();
        let record = |name: &Name, flushes, data| Record { name: name.clone(), ttl, flushes, data };
        Message {
            is_response: true,
            records: vec![
                record(&host, true, Data::A(Ipv4Addr::new(192, 0, 2, number as u8))),
                record(&service, true, Data::Srv { host: host.clone(), port: 8009 }),
                record(&service, true, Data::Txt(text([("p", "tcp")]))),
                record(&kind_of_service(), false, Data::Ptr(service.clone())),
            ],
            ..Message::default()
        }
    }

    fn after(seconds: u64) -> Instant {
        use std::sync::OnceLock;
        static START: OnceLock<Instant> = OnceLock::new();
        *START.get_or_init(Instant::now) + Duration::from_secs(seconds)
    }

    fn names(browser: &Browser) -> Vec<String> {
        browser.services().map(|service| service.name.to_string()).collect()
    }

    #[test]
    fn a_service_is_known_until_it_expires_or_is_taken_back() {
        let mut browser = Browser::new(kind_of_service(), after(0));
        browser.take(&announced(1, 120), after(0));
        browser.take(&announced(2, 4500), after(0));
        let services: Vec<Service> = browser.services().collect();
        assert_eq!(services[0].places, ["192.0.2.1:8009".parse().unwrap()]);
        assert_eq!(crate::text_value(&services[1].text, "P"), Some(&b"tcp"[..]));
        browser.expire(after(119));
        assert_eq!(names(&browser), ["s1._nvme-disc._tcp.local", "s2._nvme-disc._tcp.local"]);
        browser.expire(after(120));
        assert_eq!(names(&browser), ["s2._nvme-disc._tcp.local"]);
        browser.take(&announced(2, 0), after(130));
        browser.expire(after(130));
        assert_eq!(names(&browser).len(), 1);
        browser.expire(after(131));
        assert_eq!(names(&browser).len(), 0);
        // A message that takes a service back does not make it known.
        browser.take(&announced(3, 0), after(140));
        assert!(browser.services.is_empty());
    }

    #[test]
    fn the_address_of_a_host_changes() {
        let mut browser = Browser::new(kind_of_service(), after(0));
        browser.take(&announced(1, 120), after(0));
        let mut moved = announced(1, 120);
        moved.records[0].data = Data::A(Ipv4Addr::new(192, 0, 2, 9));
        browser.take(&moved, after(10));
        browser.expire(after(12));
        let service = browser.services().next().unwrap();
        assert_eq!(service.places, ["192.0.2.9:8009".parse().unwrap()]);
    }

    #[test]
    fn questions_become_rare_and_name_what_is_known_and_what_is_not() {
        let mut browser = Browser::new(kind_of_service(), after(0));
        let mut all = announced(1, 4500);
        all.records.extend(announced(2, 4500).records.drain(3..));
        browser.take(&all, after(0));
        let question = browser.ask(after(0)).unwrap();
        assert_eq!((question.questions.len(), question.records.len()), (2, 1), "{question:?}");
        assert_eq!(question.questions[1].name, kind_of_service().within("s2").unwrap());
        assert!(browser.ask(after(0)).is_none());
        let times: Vec<u64> = (1..400).filter(|seconds| browser.ask(after(*seconds)).is_some()).collect();
        assert_eq!(times, [1, 3, 7, 15, 31, 63, 123, 183, 243, 303, 363]);
        assert_eq!(browser.next(), after(423));
    }

    #[test]
    fn no_more_is_kept_than_the_limits_allow() {
        let mut browser = Browser::new(kind_of_service(), after(0));
        for number in 0..2 * SERVICES_MAX {
            browser.take(&announced(number, 4500), after(0));
        }
        assert_eq!(names(&browser).len(), SERVICES_MAX);
        let mut many = announced(1, 4500);
        let address = |last| Data::A(Ipv4Addr::new(198, 51, 100, last));
        let host = many.records[0].name.clone();
        many.records.extend((0..99).map(|last| Record {
            name: host.clone(),
            ttl: 9,
            flushes: false,
            data: address(last),
        }));
        many.records[2].data = Data::Txt(vec![0; TEXT_MAX + 1]);
        browser.take(&many, after(0));
        let service = browser.services().find(|service| service.name.to_string().starts_with("s1."));
        let service = service.unwrap();
        assert_eq!((service.places.len(), service.text.len()), (ADDRESSES_MAX, 6));
        // All addresses of a host may be other ones at once.
        let host = browser.hosts.keys().next().unwrap().clone();
        let moved = (0..ADDRESSES_MAX as u8).map(|at| Record {
            name: host.clone(),
            ttl: 120,
            flushes: true,
            data: Data::A(Ipv4Addr::new(198, 51, 100, at)),
        });
        browser
            .take(&Message { is_response: true, records: moved.collect(), ..Message::default() }, after(0));
        let has_moved = |service: &Service| {
            service.places.len() == ADDRESSES_MAX
                && service.places.iter().all(|at| at.ip().octets()[0] == 198)
        };
        browser.expire(after(2));
        assert!(browser.services().any(|service| has_moved(&service)));
        // A place becomes free when a service expires.
        browser.expire(after(4500));
        browser.take(&announced(200, 4500), after(4500));
        assert_eq!(names(&browser), ["s200._nvme-disc._tcp.local"]);
    }

    proptest! {
        /// For any records that a link sends, the limits hold, and the questions can be sent.
        #[test]
        fn the_limits_hold_for_any_records(
            messages in prop::collection::vec(
                prop::collection::vec((0..200_usize, 0..4_usize, 0..300_u32, any::<bool>(), 0..9_usize), 0..40),
                0..40,
            ),
        ) {
            let mut browser = Browser::new(kind_of_service(), after(0));
            for (time, message) in messages.iter().enumerate() {
                let record = |&(number, part, ttl, flushes, other): &(usize, usize, u32, bool, usize)| {
                    let mut record = announced(number, ttl).records.swap_remove(part);
                    record.flushes = flushes;
                    if let Data::Srv { host, .. } = &mut record.data {
                        *host = announced(number + other, 1).records.swap_remove(0).name;
                    }
                    record
                };
                let records = message.iter().map(record).collect();
                browser.take(&Message { is_response: true, records, ..Message::default() }, after(time as u64));
                browser.expire(after(time as u64));
                prop_assert!(browser.services.len() <= SERVICES_MAX && browser.hosts.len() <= SERVICES_MAX);
                prop_assert!(browser.hosts.values().all(|addresses| addresses.len() <= ADDRESSES_MAX));
                prop_assert!(browser.next() > after(time as u64) || browser.ask_at <= after(time as u64));
                if let Some(question) = browser.ask(after(time as u64)) {
                    prop_assert!(question.encode().len() < 9000);
                }
            }
        }
    }
}
