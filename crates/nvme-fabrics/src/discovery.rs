//! The discovery log page: which subsystems a host can reach, and where. NVMe 2.0 §5.16.1.23. Any context.

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::connect::ANY_CONTROLLER;
use crate::nqn::{Nqn, NqnError};

/// Bytes of the page's header, and of each entry.
pub const RECORD_LEN: usize = 1024;
/// ASQSZ: entries of an admin queue. NVMe 2.0 demands at least 32.
const ADMIN_QUEUE_ENTRIES: u16 = 32;

/// The header of the page.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    genctr: U64,
    numrec: U64,
    recfmt: U16,
    reserved: [u8; 1006],
}

/// An entry.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawEntry {
    trtype: u8,
    adrfam: u8,
    subtype: u8,
    treq: u8,
    portid: U16,
    cntlid: U16,
    asqsz: U16,
    eflags: U16,
    reserved_12: [u8; 20],
    trsvcid: [u8; 32],
    reserved_64: [u8; 192],
    subnqn: [u8; 256],
    traddr: [u8; 256],
    tsas: [u8; 256],
}

const _: () = assert!(size_of::<RawHeader>() == RECORD_LEN && size_of::<RawEntry>() == RECORD_LEN);

/// TRTYPE: the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Transport {
    /// RDMA.
    Rdma = 1,
    /// Fibre Channel.
    FibreChannel = 2,
    /// TCP.
    Tcp = 3,
}

/// ADRFAM: the kind of address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Family {
    /// IPv4.
    Ipv4 = 1,
    /// IPv6.
    Ipv6 = 2,
}

/// SUBTYPE: what an entry names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Subtype {
    /// Another discovery service.
    Referral = 1,
    /// A subsystem with namespaces.
    Subsystem = 2,
    /// The discovery service itself.
    Current = 3,
}

/// Which protection a connection needs (TREQ and TSAS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    /// The entry does not say.
    Unspecified,
    /// A TLS 1.3 channel is required.
    Tls,
    /// TLS is not required.
    Plain,
}

/// An entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The transport.
    pub transport: Transport,
    /// The kind of address.
    pub family: Family,
    /// What the entry names.
    pub subtype: Subtype,
    /// The protection.
    pub security: Security,
    /// PORTID: the same number for all entries of one port of the subsystem.
    pub port_id: u16,
    /// TRADDR: at most 256 bytes.
    pub address: String,
    /// TRSVCID: the TCP port as text, at most 32 bytes.
    pub service: String,
    /// SUBNQN.
    pub subsystem: Nqn,
}

/// Why an entry that another target sent cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// The transport, the address family or the subtype is unknown.
    #[error("{0} of the discovery entry has the unknown value {1}")]
    Unknown(&'static str, u8),
    /// The address or the service is empty or not printable ASCII.
    #[error("{0} of the discovery entry is not an address")]
    Address(&'static str),
    /// The name of the subsystem is not valid.
    #[error("the discovery entry's subsystem: {0}")]
    Name(#[from] NqnError),
}

impl Entry {
    fn encode(&self) -> RawEntry {
        let mut raw = RawEntry::new_zeroed();
        (raw.trtype, raw.adrfam, raw.subtype) = (self.transport as u8, self.family as u8, self.subtype as u8);
        // TREQ: a secure channel is 1: required, 2: not required. TSAS of TCP: SECTYPE 2 is TLS 1.3.
        (raw.treq, raw.tsas[0]) = match self.security {
            Security::Unspecified => (0, 0),
            Security::Tls => (1, 2),
            Security::Plain => (2, 0),
        };
        raw.portid.set(self.port_id);
        raw.cntlid.set(ANY_CONTROLLER);
        raw.asqsz.set(ADMIN_QUEUE_ENTRIES);
        put_text(&mut raw.trsvcid, &self.service);
        put_text(&mut raw.traddr, &self.address);
        raw.subnqn = self.subsystem.encode();
        raw
    }

    /// Reads an entry.
    ///
    /// # Errors
    /// The entry has an unknown type, or texts that are not valid.
    pub fn decode(record: &[u8; RECORD_LEN]) -> Result<Self, EntryError> {
        let raw = RawEntry::ref_from_bytes(record).expect("an entry has 1,024 bytes");
        Ok(Self {
            transport: match raw.trtype {
                1 => Transport::Rdma,
                2 => Transport::FibreChannel,
                3 => Transport::Tcp,
                other => return Err(EntryError::Unknown("TRTYPE", other)),
            },
            family: match raw.adrfam {
                1 => Family::Ipv4,
                2 => Family::Ipv6,
                other => return Err(EntryError::Unknown("ADRFAM", other)),
            },
            subtype: match raw.subtype {
                1 => Subtype::Referral,
                2 => Subtype::Subsystem,
                3 => Subtype::Current,
                other => return Err(EntryError::Unknown("SUBTYPE", other)),
            },
            security: match raw.treq & 3 {
                1 => Security::Tls,
                2 => Security::Plain,
                _ => Security::Unspecified,
            },
            port_id: raw.portid.get(),
            address: text(&raw.traddr).ok_or(EntryError::Address("TRADDR"))?,
            service: text(&raw.trsvcid).ok_or(EntryError::Address("TRSVCID"))?,
            subsystem: Nqn::decode(&raw.subnqn)?,
        })
    }
}

/// Writes as much of `text` as fits, padded with NULs.
fn put_text(field: &mut [u8], text: &str) {
    let len = text.len().min(field.len());
    field[..len].copy_from_slice(&text.as_bytes()[..len]);
}

/// The text of an ASCII field, which NULs or blanks pad.
fn text(field: &[u8]) -> Option<String> {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    let text = std::str::from_utf8(&field[..end]).ok()?.trim_end_matches(' ');
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())).then(|| text.to_owned())
}

/// The page: the entries, and a number that changes with them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// GENCTR: counts the changes of the entries.
    pub generation: u64,
    /// The entries.
    pub entries: Vec<Entry>,
}

impl Page {
    /// The bytes of the page.
    pub fn encode(&self) -> Vec<u8> {
        let mut header = RawHeader::new_zeroed();
        header.genctr.set(self.generation);
        header.numrec.set(self.entries.len() as u64);
        let mut page = Vec::with_capacity(RECORD_LEN * (1 + self.entries.len()));
        page.extend(header.as_bytes());
        self.entries.iter().for_each(|entry| page.extend(entry.encode().as_bytes()));
        page
    }
}

/// What the header of a page says: its generation and its number of entries. A host reads the header, then the entries, and the
/// header again: if the generation is another one, the entries may belong to two generations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// GENCTR.
    pub generation: u64,
    /// NUMREC.
    pub entries: u64,
}

impl Header {
    /// Reads the header; `None` if the bytes are too few, or the entries have an unknown format.
    pub fn decode(page: &[u8]) -> Option<Self> {
        let (raw, _) = RawHeader::ref_from_prefix(page).ok()?;
        let header = Self { generation: raw.genctr.get(), entries: raw.numrec.get() };
        (raw.recfmt.get() == 0).then_some(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nqn;

    fn entry(subtype: Subtype) -> Entry {
        Entry {
            transport: Transport::Tcp,
            family: Family::Ipv4,
            subtype,
            security: Security::Plain,
            port_id: 0x0102,
            address: "192.0.2.1".to_owned(),
            service: "4420".to_owned(),
            subsystem: "nqn.2016-06.io.spdk:cnode1".parse().unwrap(),
        }
    }

    #[test]
    fn a_page_is_read_as_it_was_written() {
        let other = Entry {
            family: Family::Ipv6,
            transport: Transport::Rdma,
            security: Security::Tls,
            address: "2001:db8::1".to_owned(),
            subsystem: nqn::DISCOVERY.parse().unwrap(),
            ..entry(Subtype::Referral)
        };
        let entries = vec![entry(Subtype::Subsystem), other, entry(Subtype::Current)];
        let page = Page { generation: 9, entries: entries.clone() }.encode();
        assert_eq!(Header::decode(&page), Some(Header { generation: 9, entries: 3 }));
        let records = page[RECORD_LEN..].as_chunks::<RECORD_LEN>().0;
        let read: Vec<Entry> = records.iter().map(|record| Entry::decode(record).unwrap()).collect();
        assert_eq!(read, entries);
        assert_eq!(Header::decode(&page[..1023]), None);
    }

    #[test]
    fn fields_are_where_the_specification_puts_them() {
        let page = Page { generation: 1, entries: vec![entry(Subtype::Subsystem)] }.encode();
        let record = &page[RECORD_LEN..];
        assert_eq!(record[..10], [3, 1, 2, 2, 2, 1, 0xff, 0xff, 32, 0]);
        assert_eq!((&record[32..37], &record[512..522]), (&b"4420\0"[..], &b"192.0.2.1\0"[..]));
        assert_eq!(&record[256..260], b"nqn.");
    }

    #[test]
    fn entries_of_others_are_checked() {
        let record = |at: usize, byte| {
            let mut record = [0; RECORD_LEN];
            record.copy_from_slice(entry(Subtype::Subsystem).encode().as_bytes());
            record[at] = byte;
            Entry::decode(&record)
        };
        assert_eq!(record(0, 9), Err(EntryError::Unknown("TRTYPE", 9)));
        assert_eq!(record(1, 4), Err(EntryError::Unknown("ADRFAM", 4)));
        assert_eq!(record(2, 0), Err(EntryError::Unknown("SUBTYPE", 0)));
        assert_eq!(record(512, 0), Err(EntryError::Address("TRADDR")));
        assert_eq!(record(33, b'\n'), Err(EntryError::Address("TRSVCID")));
        assert_eq!(record(36, b' ').unwrap().service, "4420", "blanks pad as NULs do");
        assert_eq!(record(256, b'x'), Err(EntryError::Name(NqnError::NoDate)));
        let mut full = entry(Subtype::Subsystem);
        full.address = "a".repeat(300);
        let raw = full.encode();
        assert_eq!(Entry::decode(raw.as_bytes().try_into().unwrap()).unwrap().address.len(), 256);
        let mut page = Page::default().encode();
        page[16] = 1;
        assert_eq!(Header::decode(&page), None, "an unknown record format");
    }
}
