//! Messages of DNS, as far as multicast DNS needs them. Any context. The bytes come from any host of a link.

use std::fmt;
use std::net::Ipv4Addr;

/// The longest name, with the lengths of its labels.
const NAME_MAX: usize = 255;
const LABEL_MAX: usize = 63;
const HEADER_LEN: usize = 12;
/// Questions and records of a message that are read; one with more is refused.
const QUESTIONS_MAX: usize = 64;
const RECORDS_MAX: usize = 256;

const CLASS_IN: u16 = 1;
/// In the class of a record: earlier records of its name and type do not count any more.
const FLUSH: u16 = 1 << 15;
const RESPONSE: u16 = 1 << 15;
const AUTHORITATIVE: u16 = 1 << 10;

/// The type of a record, or that of the records for which a question asks.
pub mod kind {
    /// An IPv4 address.
    pub const A: u16 = 1;
    /// Another name.
    pub const PTR: u16 = 12;
    /// Properties of a service.
    pub const TXT: u16 = 16;
    /// Where a service is.
    pub const SRV: u16 = 33;
    /// Any, in questions.
    pub const ANY: u16 = 255;
}

/// Why a message is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// It ends within a field.
    Short,
    /// A name is too long, or refers to what does not come before it.
    Name,
    /// The header is not one of multicast DNS.
    Header,
    /// There are too many questions or records.
    TooMany,
}

/// A name, in lower case, as its labels with their lengths, and a zero at the end.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Box<[u8]>);

impl Name {
    /// The name of these labels. `None`: there is an empty or too long label, or the name is too long.
    pub fn of<'a>(labels: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let mut bytes = Vec::new();
        for label in labels {
            let len = u8::try_from(label.len()).ok().filter(|len| (1..=LABEL_MAX as u8).contains(len))?;
            bytes.push(len);
            bytes.extend(label.bytes().map(|byte| byte.to_ascii_lowercase()));
        }
        bytes.push(0);
        (bytes.len() <= NAME_MAX).then(|| Self(bytes.into()))
    }

    /// The name of a host or of a kind of service, in its usual form, such as `_nvme-disc._tcp.local`.
    pub fn parse(text: &str) -> Option<Self> {
        Self::of(text.trim_end_matches('.').split('.'))
    }

    /// This name with a label before it.
    pub fn within(&self, label: &str) -> Option<Self> {
        let len = u8::try_from(label.len()).ok().filter(|len| (1..=LABEL_MAX as u8).contains(len))?;
        let mut bytes = vec![len];
        bytes.extend(label.bytes().map(|byte| byte.to_ascii_lowercase()));
        bytes.extend_from_slice(&self.0);
        (bytes.len() <= NAME_MAX).then(|| Self(bytes.into()))
    }

    fn labels(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &*self.0;
        std::iter::from_fn(move || {
            let (&len, after) = rest.split_first()?;
            let (label, after) = after.split_at(len.into());
            rest = after;
            (len > 0).then_some(label)
        })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, label) in self.labels().enumerate() {
            write!(f, "{}{}", if place > 0 { "." } else { "" }, label.escape_ascii())?;
        }
        Ok(())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// For the records of this name.
    pub name: Name,
    /// Of this type.
    pub kind: u16,
}

/// What a record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// Another name.
    Ptr(Name),
    /// Where a service is.
    Srv {
        /// The host.
        host: Name,
        /// The port there.
        port: u16,
    },
    /// Properties of a service: strings, each with its length before it.
    Txt(Vec<u8>),
    /// An address of a host.
    A(Ipv4Addr),
}

/// A record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The name that the record is about.
    pub name: Name,
    /// For how many seconds it holds; 0: it holds no more.
    pub ttl: u32,
    /// Earlier records of this name and type do not count any more.
    pub flushes: bool,
    /// The data of the record.
    pub data: Data,
}

/// A message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Identifier: 0, but in questions of programs that know only DNS.
    pub id: u16,
    /// Whether it answers.
    pub is_response: bool,
    /// Questions.
    pub questions: Vec<Question>,
    /// Records of all sections, in order. Those of other types and classes than multicast DNS has for services are left out.
    pub records: Vec<Record>,
}

/// Reads a message from the start.
struct Reader<'a> {
    all: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let bytes = self.all.get(self.at..).and_then(|rest| rest.get(..len)).ok_or(Malformed::Short)?;
        self.at += len;
        Ok(bytes)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        let bytes = self.take(2)?;
        Ok(u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from(self.u16()?) << 16 | u32::from(self.u16()?))
    }

    fn name(&mut self) -> Result<Name, Malformed> {
        let (mut bytes, mut at, mut after) = (Vec::new(), self.at, None);
        // What a reference leads to comes before all that was read of the name.
        let mut limit = self.at;
        loop {
            let &len = self.all.get(at).ok_or(Malformed::Short)?;
            match len >> 6 {
                0 => {
                    let label = self.all.get(at..).and_then(|rest| rest.get(..1 + usize::from(len)));
                    bytes.extend(label.ok_or(Malformed::Short)?.iter().map(u8::to_ascii_lowercase));
                    // A length is no letter.
                    if bytes.len() > NAME_MAX {
                        return Err(Malformed::Name);
                    }
                    at += 1 + usize::from(len);
                    if len == 0 {
                        self.at = after.unwrap_or(at);
                        return Ok(Name(bytes.into()));
                    }
                }
                3 => {
                    let &low = self.all.get(at + 1).ok_or(Malformed::Short)?;
                    let to = usize::from(len & 0x3f) << 8 | usize::from(low);
                    // References to references would let a short record cost much time.
                    let leads_on = self.all.get(to).is_some_and(|len| len >> 6 == 3);
                    if to >= limit || leads_on {
                        return Err(Malformed::Name);
                    }
                    after.get_or_insert(at + 2);
                    (at, limit) = (to, to);
                }
                _ => return Err(Malformed::Name),
            }
        }
    }

    fn record(&mut self) -> Result<Option<Record>, Malformed> {
        let name = self.name()?;
        let (kind, class, ttl) = (self.u16()?, self.u16()?, self.u32()?);
        let len = usize::from(self.u16()?);
        let end = self.at.checked_add(len).filter(|end| *end <= self.all.len()).ok_or(Malformed::Short)?;
        let mut inner = Reader { all: &self.all[..end], at: self.at };
        self.at = end;
        if class & !FLUSH != CLASS_IN {
            return Ok(None);
        }
        let data = match kind {
            kind::PTR => Data::Ptr(inner.name()?),
            kind::SRV => {
                inner.take(4)?;
                let port = inner.u16()?;
                Data::Srv { port, host: inner.name()? }
            }
            kind::TXT => Data::Txt(inner.take(len)?.to_vec()),
            kind::A => {
                let address = inner.take(4)?;
                Data::A(Ipv4Addr::new(address[0], address[1], address[2], address[3]))
            }
            _ => return Ok(None),
        };
        Ok(Some(Record { name, ttl, flushes: class & FLUSH != 0, data }))
    }
}

impl Message {
    /// Reads a message.
    ///
    /// # Errors
    /// [`Malformed`]. A message that ends too early is refused as a whole.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader { all: bytes, at: 0 };
        let (id, flags) = (reader.u16()?, reader.u16()?);
        // The kind of request, and the error, must be 0.
        if flags & 0x780f != 0 {
            return Err(Malformed::Header);
        }
        let counts = [reader.u16()?, reader.u16()?, reader.u16()?, reader.u16()?].map(usize::from);
        let records: usize = counts[1..].iter().sum();
        if counts[0] > QUESTIONS_MAX || records > RECORDS_MAX {
            return Err(Malformed::TooMany);
        }
        let mut message = Self { id, is_response: flags & RESPONSE != 0, ..Self::default() };
        for _ in 0..counts[0] {
            let (name, kind, class) = (reader.name()?, reader.u16()?, reader.u16()?);
            // The highest bit asks for an answer to the sender alone, which is a favour.
            if class & !FLUSH == CLASS_IN {
                message.questions.push(Question { name, kind });
            }
        }
        for _ in 0..records {
            message.records.extend(reader.record()?);
        }
        Ok(message)
    }

    /// The bytes of the message, with all records as answers. Names are written in full.
    pub fn encode(&self) -> Vec<u8> {
        let flags = if self.is_response { RESPONSE | AUTHORITATIVE } else { 0 };
        let mut bytes = Vec::with_capacity(HEADER_LEN + 128);
        let counts = [self.questions.len() as u16, self.records.len() as u16, 0, 0];
        for word in [self.id, flags].into_iter().chain(counts) {
            bytes.extend(word.to_be_bytes());
        }
        for question in &self.questions {
            bytes.extend_from_slice(&question.name.0);
            bytes.extend([question.kind, CLASS_IN].into_iter().flat_map(u16::to_be_bytes));
        }
        for record in &self.records {
            record.encode(&mut bytes);
        }
        bytes
    }
}

impl Record {
    fn encode(&self, bytes: &mut Vec<u8>) {
        let (kind, data) = match &self.data {
            Data::Ptr(name) => (kind::PTR, name.0.to_vec()),
            Data::Srv { host, port } => {
                let words = [0, 0, *port].into_iter().flat_map(u16::to_be_bytes);
                (kind::SRV, words.chain(host.0.iter().copied()).collect())
            }
            Data::Txt(text) => (kind::TXT, text.clone()),
            Data::A(address) => (kind::A, address.octets().to_vec()),
        };
        let class = if self.flushes { CLASS_IN | FLUSH } else { CLASS_IN };
        bytes.extend_from_slice(&self.name.0);
        bytes.extend([kind, class].into_iter().flat_map(u16::to_be_bytes));
        bytes.extend(self.ttl.to_be_bytes());
        bytes.extend((data.len() as u16).to_be_bytes());
        bytes.extend(data);
    }

    /// The type.
    pub const fn kind(&self) -> u16 {
        match self.data {
            Data::Ptr(_) => kind::PTR,
            Data::Srv { .. } => kind::SRV,
            Data::Txt(_) => kind::TXT,
            Data::A(_) => kind::A,
        }
    }
}

/// The value of the first property of this name among those of a service (RFC 6763, section 6.4), which may be in capitals.
pub fn text_value<'a>(mut text: &'a [u8], key: &str) -> Option<&'a [u8]> {
    while let Some((&len, rest)) = text.split_first() {
        let (property, after) = rest.split_at_checked(len.into())?;
        text = after;
        let Some(equals) = property.iter().position(|byte| *byte == b'=') else { continue };
        if property[..equals].eq_ignore_ascii_case(key.as_bytes()) {
            return Some(&property[equals + 1..]);
        }
    }
    None
}

/// The properties of a service. Those that are longer than a string can be are cut off.
pub fn text<'a>(properties: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (key, value) in properties {
        let property: Vec<u8> = key.bytes().chain([b'=']).chain(value.bytes()).take(255).collect();
        bytes.push(property.len() as u8);
        bytes.extend(property);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    fn service() -> Message {
        let instance = name("_nvme-disc._tcp.local").within("a b").unwrap();
        let record = |data, flushes| Record { name: instance.clone(), ttl: 120, flushes, data };
        Message {
            is_response: true,
            questions: vec![Question { name: instance.clone(), kind: kind::ANY }],
            records: vec![
                Record {
                    name: name("_nvme-disc._tcp.local"),
                    ttl: 4500,
                    flushes: false,
                    data: Data::Ptr(instance.clone()),
                },
                record(Data::Srv { host: name("h.local"), port: 8009 }, true),
                record(Data::Txt(text([("p", "tcp"), ("NQN", "nqn.a")])), true),
                record(Data::A(Ipv4Addr::new(192, 0, 2, 1)), true),
            ],
            ..Message::default()
        }
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        let bytes = service().encode();
        assert_eq!(Message::parse(&bytes), Ok(service()));
        for len in 0..bytes.len() {
            assert_eq!(Message::parse(&bytes[..len]), Err(Malformed::Short), "{len}");
        }
        let Data::Txt(properties) = &service().records[2].data else { panic!() };
        assert_eq!(text_value(properties, "nqn"), Some(&b"nqn.a"[..]));
        assert_eq!(text_value(properties, "q"), None);
        assert_eq!(text_value(&[5, b'a'], "a"), None);
        assert_eq!(name("A.Local.").to_string(), "a.local");
    }

    #[test]
    fn names_refer_back_and_never_forward() {
        let mut bytes = vec![0, 0, 0x84, 0, 0, 0, 0, 2, 0, 0, 0, 0];
        // The second record's name is `b` before the first one's, which is behind the header.
        let address = [0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 1, 2, 3, 4];
        bytes.extend([1, b'A', 0]);
        bytes.extend(address);
        bytes.extend([1, b'b', 0xc0, 12]);
        bytes.extend(address);
        let names: Vec<String> =
            Message::parse(&bytes).unwrap().records.iter().map(|record| record.name.to_string()).collect();
        assert_eq!(names, ["a", "b.a"]);
        let reference = bytes.len() - address.len() - 1;
        // To itself, to what follows, and into its own label.
        for to in [reference as u8 - 1, bytes.len() as u8 - 1, reference as u8 - 3] {
            let mut looped = bytes.clone();
            looped[reference] = to;
            assert_eq!(Message::parse(&looped), Err(Malformed::Name), "{to}");
        }
        // To a reference, which leads to a name.
        let chained = bytes.len() as u8;
        bytes[7] = 3;
        bytes.extend([0xc0, reference as u8 - 1]);
        bytes.extend(address);
        assert_eq!(Message::parse(&bytes), Err(Malformed::Name));
        bytes[usize::from(chained) + 1] = 12;
        assert!(Message::parse(&bytes).is_ok());
    }

    #[test]
    fn what_is_too_long_or_too_much_is_refused() {
        let label = "x".repeat(63);
        assert!(Name::of([&*label; 3]).is_some_and(|name| name.within(&label[..61]).is_some()));
        assert!(Name::of([&*label; 4]).is_none() && Name::of([&*"x".repeat(64)]).is_none());
        assert!(Name::of([""]).is_none() && Name::of([&*label; 3]).unwrap().within(&label[..62]).is_none());
        let many = |questions: u16, records: u16| {
            let words = [0, 0, questions, records, 0, 0].into_iter().flat_map(u16::to_be_bytes);
            Message::parse(&words.collect::<Vec<u8>>())
        };
        assert_eq!(many(65, 0), Err(Malformed::TooMany));
        assert_eq!(many(0, 257), Err(Malformed::TooMany));
        assert_eq!(many(64, 256), Err(Malformed::Short));
        assert_eq!(Message::parse(&[0, 0, 0x28, 0, 0, 0, 0, 0, 0, 0, 0, 0]), Err(Malformed::Header));
    }

    proptest! {
        /// What any bytes mean is the same after it was written and read again.
        #[test]
        fn any_bytes_are_refused_or_mean_the_same_again(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200),
            places in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            of_service in any::<bool>(),
        ) {
            if of_service {
                bytes = service().encode();
                let len = bytes.len();
                places.iter().for_each(|(place, byte)| bytes[place.index(len)] = *byte);
            }
            if let Ok(message) = Message::parse(&bytes) {
                prop_assert_eq!(Message::parse(&message.encode()), Ok(message));
            }
        }
    }
}
