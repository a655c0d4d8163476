//! Fabrics commands: those with opcode 7Fh, which connect queues and access properties. NVMe 2.0 §6. Any context.

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::Code;

use crate::property::{Access, Width};

/// The opcode of all Fabrics commands.
pub const OPCODE: u8 = 0x7f;

/// Connect: attaches a queue to a controller; its data is a [`crate::connect::ConnectData`]. NVMe 2.0 §6.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    /// RECFMT; 0 is the only format there is.
    pub record_format: u16,
    /// QID; 0 is the admin queue.
    pub qid: u16,
    /// SQSIZE: entries of the queue, less one.
    pub sqsize: u16,
    /// CATTR bit 2: the host does not want submission queue flow control.
    pub disables_flow_control: bool,
    /// KATO: the keep-alive timeout in milliseconds, 0 for none; of the admin queue.
    pub keep_alive_ms: u32,
}

/// A Fabrics command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Property Set. NVMe 2.0 §6.6.
    PropertySet {
        /// The property.
        access: Access,
        /// The property's new value.
        value: u64,
    },
    /// Connect.
    Connect(Connect),
    /// Property Get. NVMe 2.0 §6.5.
    PropertyGet(Access),
    /// Authentication Send: `len` bytes of a security protocol's data. NVMe 2.0 §6.2.
    AuthenticationSend {
        /// SECP and SPSP: the security protocol.
        protocol: u32,
        /// TL.
        len: u32,
    },
    /// Authentication Receive. NVMe 2.0 §6.1.
    AuthenticationReceive {
        /// SECP and SPSP: the security protocol.
        protocol: u32,
        /// AL.
        len: u32,
    },
    /// Disconnect: the end of an I/O queue. NVMe 2.0 §6.4.
    Disconnect {
        /// RECFMT; 0 is the only format there is.
        record_format: u16,
    },
}

/// FCTYPE.
mod fctype {
    pub(super) const PROPERTY_SET: u8 = 0x00;
    pub(super) const CONNECT: u8 = 0x01;
    pub(super) const PROPERTY_GET: u8 = 0x04;
    pub(super) const AUTHENTICATION_SEND: u8 = 0x05;
    pub(super) const AUTHENTICATION_RECEIVE: u8 = 0x06;
    pub(super) const DISCONNECT: u8 = 0x08;
}

/// CATTR bit 2, in CDW11.
const DISABLES_FLOW_CONTROL: u32 = 1 << (16 + 2);

impl Command {
    /// Reads a command whose opcode is [`OPCODE`].
    ///
    /// # Errors
    /// The command's type is unknown, or the width of its property.
    pub const fn decode(entry: &SubmissionEntry) -> Result<Self, Code> {
        let (cdw10, cdw11) = (entry.cdw(10), entry.cdw(11));
        let width = match cdw10 & 7 {
            0 => Some(Width::Four),
            1 => Some(Width::Eight),
            _ => None,
        };
        // FCTYPE is where other commands have the low byte of NSID.
        Ok(match (entry.nsid() as u8, width) {
            (fctype::PROPERTY_SET, Some(width)) => Self::PropertySet {
                access: Access { offset: cdw11, width },
                value: entry.cdw(12) as u64 | (entry.cdw(13) as u64) << 32,
            },
            (fctype::PROPERTY_GET, Some(width)) => Self::PropertyGet(Access { offset: cdw11, width }),
            (fctype::PROPERTY_SET | fctype::PROPERTY_GET, None) => return Err(Code::INVALID_FIELD),
            (fctype::CONNECT, _) => Self::Connect(Connect {
                record_format: cdw10 as u16,
                qid: (cdw10 >> 16) as u16,
                sqsize: cdw11 as u16,
                disables_flow_control: cdw11 & DISABLES_FLOW_CONTROL != 0,
                keep_alive_ms: entry.cdw(12),
            }),
            (fctype::AUTHENTICATION_SEND, _) => Self::AuthenticationSend { protocol: cdw10 >> 8, len: cdw11 },
            (fctype::AUTHENTICATION_RECEIVE, _) => {
                Self::AuthenticationReceive { protocol: cdw10 >> 8, len: cdw11 }
            }
            (fctype::DISCONNECT, _) => Self::Disconnect { record_format: cdw10 as u16 },
            _ => return Err(Code::INVALID_OPCODE),
        })
    }

    /// The submission queue entry, without command identifier and data pointer.
    pub const fn encode(&self) -> SubmissionEntry {
        match *self {
            Self::PropertySet { access, value } => entry(fctype::PROPERTY_SET)
                .with_cdw10_11(access.width as u32, access.offset)
                .with_cdw12_13(value as u32, (value >> 32) as u32),
            Self::PropertyGet(access) => {
                entry(fctype::PROPERTY_GET).with_cdw10_11(access.width as u32, access.offset)
            }
            Self::Connect(connect) => {
                let flags = if connect.disables_flow_control { DISABLES_FLOW_CONTROL } else { 0 };
                let cdw10 = connect.record_format as u32 | (connect.qid as u32) << 16;
                entry(fctype::CONNECT)
                    .with_cdw10_11(cdw10, connect.sqsize as u32 | flags)
                    .with_cdw12_13(connect.keep_alive_ms, 0)
            }
            Self::AuthenticationSend { protocol, len } => {
                entry(fctype::AUTHENTICATION_SEND).with_cdw10_11(protocol << 8, len)
            }
            Self::AuthenticationReceive { protocol, len } => {
                entry(fctype::AUTHENTICATION_RECEIVE).with_cdw10_11(protocol << 8, len)
            }
            Self::Disconnect { record_format } => {
                entry(fctype::DISCONNECT).with_cdw10_11(record_format as u32, 0)
            }
        }
    }
}

const fn entry(fctype: u8) -> SubmissionEntry {
    SubmissionEntry::new(OPCODE, fctype as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn commands_are_read_as_they_were_written() {
        let connect = Connect {
            record_format: 0x0102,
            qid: 0x0304,
            sqsize: 0x0506,
            disables_flow_control: true,
            keep_alive_ms: 0x0708_090a,
        };
        let access = Access { offset: 0x14, width: Width::Four };
        for command in [
            Command::Connect(connect),
            Command::Connect(Connect { disables_flow_control: false, ..connect }),
            Command::PropertySet { access, value: 0x1122_3344_5566_7788 },
            Command::PropertyGet(Access { offset: 0, width: Width::Eight }),
            Command::AuthenticationSend { protocol: 0xe9_0001, len: 512 },
            Command::AuthenticationReceive { protocol: 0xe9_0001, len: 4096 },
            Command::Disconnect { record_format: 0 },
        ] {
            let entry = command.encode();
            assert_eq!((entry.opcode(), Command::decode(&entry)), (OPCODE, Ok(command)));
        }
    }

    #[test]
    fn fields_are_where_the_specification_puts_them() {
        let connect = Connect {
            record_format: 0,
            qid: 0x0102,
            sqsize: 0x7f,
            disables_flow_control: true,
            keep_alive_ms: 0x1d4c0,
        };
        let entry = Command::Connect(connect).encode();
        let bytes = entry.as_bytes();
        assert_eq!((bytes[0], bytes[4]), (0x7f, 1));
        assert_eq!(bytes[40..52], [0, 0, 2, 1, 0x7f, 0, 4, 0, 0xc0, 0xd4, 1, 0]);
        let access = Access { offset: 0x14, width: Width::Eight };
        let entry = Command::PropertySet { access, value: 0x0807_0605_0403_0201 }.encode();
        assert_eq!(entry.as_bytes()[40..56], [1, 0, 0, 0, 0x14, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn unknown_types_and_widths_are_refused() {
        assert_eq!(Command::decode(&entry(0x02)), Err(Code::INVALID_OPCODE));
        assert_eq!(Command::decode(&entry(0xc0)), Err(Code::INVALID_OPCODE));
        let width = entry(fctype::PROPERTY_GET).with_cdw10_11(2, 0);
        assert_eq!(Command::decode(&width), Err(Code::INVALID_FIELD));
    }
}
