//! Messages of the vfio-user protocol: headers, structures, capabilities of the handshake. Any context; pure.
//!
//! Integers are little-endian, as the host is.

use serde_json::Value;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The protocol's version.
pub(super) const MAJOR: u16 = 0;
pub(super) const MINOR: u16 = 1;

/// Most data in a message, as both sides announce it; also the protocol's default.
pub(super) const DATA_MAX: usize = 1 << 20;
/// Longest message that is received: data, with the largest structure before it.
pub(super) const SIZE_MAX: usize = DATA_MAX + 64;
/// Most descriptors in a message, as both sides announce it.
pub(super) const FDS_MAX: usize = 16;
/// Most DMA mappings of a connection.
pub(super) const MAPPINGS_MAX: u32 = 65_535;

/// Flags of a header: the type in bits 0 to 3, and single bits.
const TYPE: u32 = 0xf;
const REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// The requests that this implementation sends or serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Command {
    Version = 1,
    DmaMap = 2,
    DmaUnmap = 3,
    GetInfo = 4,
    GetRegionInfo = 5,
    GetIrqInfo = 7,
    SetIrqs = 8,
    RegionRead = 9,
    RegionWrite = 10,
    DmaRead = 11,
    DmaWrite = 12,
    Reset = 13,
}

impl Command {
    const ALL: [Self; 12] = [
        Self::Version,
        Self::DmaMap,
        Self::DmaUnmap,
        Self::GetInfo,
        Self::GetRegionInfo,
        Self::GetIrqInfo,
        Self::SetIrqs,
        Self::RegionRead,
        Self::RegionWrite,
        Self::DmaRead,
        Self::DmaWrite,
        Self::Reset,
    ];

    pub(super) fn parse(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|command| *command as u16 == number)
    }

    /// For error texts.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Version => "VERSION",
            Self::DmaMap => "DMA_MAP",
            Self::DmaUnmap => "DMA_UNMAP",
            Self::GetInfo => "DEVICE_GET_INFO",
            Self::GetRegionInfo => "DEVICE_GET_REGION_INFO",
            Self::GetIrqInfo => "DEVICE_GET_IRQ_INFO",
            Self::SetIrqs => "DEVICE_SET_IRQS",
            Self::RegionRead => "REGION_READ",
            Self::RegionWrite => "REGION_WRITE",
            Self::DmaRead => "DMA_READ",
            Self::DmaWrite => "DMA_WRITE",
            Self::Reset => "DEVICE_RESET",
        }
    }
}

/// The start of each message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Header {
    pub(super) id: u16,
    pub(super) command: u16,
    /// Bytes of the whole message.
    pub(super) size: u32,
    flags: u32,
    error: u32,
}

/// Bytes of a header.
pub(super) const HEADER: usize = size_of::<Header>();

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Command {
        wants_reply: bool,
    },
    Reply,
    /// A reply with an errno, which may be 0.
    Failure(u32),
}

impl Header {
    /// The header of a message with `len` bytes after it.
    pub(super) const fn new(id: u16, command: u16, kind: Kind, len: usize) -> Self {
        let (flags, error) = match kind {
            Kind::Command { wants_reply: true } => (0, 0),
            Kind::Command { wants_reply: false } => (NO_REPLY, 0),
            Kind::Reply => (REPLY, 0),
            Kind::Failure(errno) => (REPLY | ERROR, errno),
        };
        Self { id, command, size: (HEADER + len) as u32, flags, error }
    }

    /// The kind of the message; `None` if the protocol has no such kind. Unknown flags are ignored, as the protocol asks.
    pub(super) const fn kind(&self) -> Option<Kind> {
        match (self.flags & TYPE, self.flags & ERROR != 0) {
            (0, _) => Some(Kind::Command { wants_reply: self.flags & NO_REPLY == 0 }),
            (REPLY, false) => Some(Kind::Reply),
            (REPLY, true) => Some(Kind::Failure(self.error)),
            _ => None,
        }
    }

    /// Bytes after the header; `None` for a size that no message has.
    pub(super) fn body(&self) -> Option<usize> {
        let size = self.size as usize;
        (size <= SIZE_MAX).then(|| size.checked_sub(HEADER))?
    }
}

/// Declares structures of messages.
macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub(super) struct $name { $(pub(super) $field: $kind),* }
    )*};
}

structures! {
    /// `VERSION`, before the capabilities in JSON.
    Version { major: u16, minor: u16 }
    /// `DMA_MAP`. The file of the memory is the message's descriptor.
    DmaMap { argsz: u32, flags: u32, offset: u64, iova: u64, len: u64 }
    /// `DMA_UNMAP`, and its reply.
    DmaUnmap { argsz: u32, flags: u32, iova: u64, len: u64 }
    /// `DEVICE_GET_INFO`.
    DeviceInfo { argsz: u32, flags: u32, regions: u32, irqs: u32 }
    /// `DEVICE_GET_REGION_INFO`, before capabilities: `struct vfio_region_info`.
    RegionInfo { argsz: u32, flags: u32, index: u32, cap_offset: u32, size: u64, offset: u64 }
    /// The one capability that a server's region has: `struct vfio_region_info_cap_sparse_mmap`, with one area.
    SparseArea { id: u16, version: u16, next: u32, areas: u32, reserved: u32, offset: u64, len: u64 }
    /// `DEVICE_GET_IRQ_INFO`.
    IrqInfo { argsz: u32, flags: u32, index: u32, count: u32 }
    /// `DEVICE_SET_IRQS`. The eventfds are the message's descriptors.
    SetIrqs { argsz: u32, flags: u32, index: u32, start: u32, count: u32 }
    /// `REGION_READ` and `REGION_WRITE`, before the data.
    RegionAccess { offset: u64, region: u32, count: u32 }
    /// `DMA_READ` and `DMA_WRITE`, before the data.
    DmaAccess { iova: u64, count: u64 }
}

/// Flags of a DMA mapping: the device may read, and may write.
pub(super) const DMA_READ_WRITE: u32 = 1 | 2;

/// What a side can receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Capabilities {
    /// Descriptors in a message.
    pub(super) fds: usize,
    /// Bytes of data in a message.
    pub(super) data: usize,
    /// DMA mappings.
    pub(super) mappings: u32,
}

/// Longest text of capabilities.
const CAPABILITIES_TEXT_MAX: usize = 4096;

impl Capabilities {
    /// The capabilities of this implementation.
    pub(super) const OURS: Self = Self { fds: FDS_MAX, data: DATA_MAX, mappings: MAPPINGS_MAX };

    /// The body of a `VERSION` message.
    pub(super) fn message(self) -> Vec<u8> {
        let text = serde_json::json!({"capabilities": {
            "max_msg_fds": self.fds,
            "max_data_xfer_size": self.data,
            "max_dma_maps": self.mappings,
            "pgsizes": aryk_dma::PAGE,
        }});
        let mut body = Version { major: MAJOR, minor: MINOR }.as_bytes().to_vec();
        body.extend_from_slice(text.to_string().as_bytes());
        body.push(0);
        body
    }

    /// The other side's, from the body of its `VERSION` message; or what is wrong with that. Larger values than ours do not
    /// count.
    pub(super) fn parse(body: &[u8]) -> Result<Self, &'static str> {
        let (version, text) = Version::read_from_prefix(body).map_err(|_| "it is too short")?;
        if version.major != MAJOR {
            return Err("another major version of the protocol");
        }
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        if text.len() > CAPABILITIES_TEXT_MAX {
            return Err("its capabilities are too long");
        }
        let json = if text.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(text).map_err(|_| "its capabilities are not JSON")?
        };
        let number = |name: &str, default: u64| match &json["capabilities"][name] {
            Value::Null => Ok(default),
            value => value.as_u64().filter(|n| *n > 0).ok_or("a capability is no positive number"),
        };
        let (ours, at_most) =
            (Self::OURS, |n: u64, max: usize| usize::try_from(n).map_or(max, |n| n.min(max)));
        Ok(Self {
            fds: at_most(number("max_msg_fds", 1)?, ours.fds),
            data: at_most(number("max_data_xfer_size", DATA_MAX as u64)?, ours.data),
            mappings: at_most(number("max_dma_maps", 65_535)?, ours.mappings as usize) as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_say_what_they_were_made_of() {
        for kind in [
            Kind::Command { wants_reply: true },
            Kind::Command { wants_reply: false },
            Kind::Reply,
            Kind::Failure(22),
        ] {
            let header = Header::new(7, Command::Reset as u16, kind, 5);
            assert_eq!((header.kind(), header.body()), (Some(kind), Some(5)));
        }
        assert_eq!(Header { flags: 2, ..Header::default() }.kind(), None);
        for (size, body) in [(0, None), (15, None), (16, Some(0)), (SIZE_MAX as u32, Some(SIZE_MAX - 16))] {
            assert_eq!(Header { size, ..Header::default() }.body(), body);
        }
        assert_eq!(Header { size: u32::MAX, ..Header::default() }.body(), None);
    }

    #[test]
    fn the_lengths_of_structures_are_the_protocols() {
        let lengths = [
            (size_of::<Header>(), 16),
            (size_of::<DmaMap>(), 32),
            (size_of::<DmaUnmap>(), 24),
            (size_of::<DeviceInfo>(), 16),
            (size_of::<RegionInfo>(), 32),
            (size_of::<SparseArea>(), 32),
            (size_of::<IrqInfo>(), 16),
            (size_of::<SetIrqs>(), 20),
            (size_of::<RegionAccess>(), 16),
            (size_of::<DmaAccess>(), 16),
        ];
        assert!(lengths.iter().all(|(ours, theirs)| ours == theirs), "{lengths:?}");
        for command in Command::ALL {
            assert_eq!(Command::parse(command as u16), Some(command));
        }
        assert_eq!(Command::parse(6), None);
    }

    #[test]
    fn capabilities_have_defaults_and_bounds() {
        let parse = |text: &str| {
            let mut body = vec![0, 0, 1, 0];
            body.extend_from_slice(text.as_bytes());
            Capabilities::parse(&body)
        };
        let defaults = Capabilities { fds: 1, data: 1 << 20, mappings: 65_535 };
        for text in ["", "\0", "{}", "{\"capabilities\":{}}\0", "[]", "7"] {
            assert_eq!(parse(text), Ok(defaults), "{text}");
        }
        let some =
            "{\"capabilities\":{\"max_msg_fds\":8,\"max_data_xfer_size\":4096,\"max_dma_maps\":3}}\0junk";
        assert_eq!(parse(some), Ok(Capabilities { fds: 8, data: 4096, mappings: 3 }));
        let much = "{\"capabilities\":{\"max_msg_fds\":18446744073709551615,\"max_data_xfer_size\":1e3}}";
        assert!(parse(much).is_err());
        let much = "{\"capabilities\":{\"max_msg_fds\":18446744073709551615}}";
        assert_eq!(parse(much).unwrap().fds, FDS_MAX);
        for text in ["{", "{\"capabilities\":{\"max_msg_fds\":0}}", "{\"capabilities\":{\"max_msg_fds\":-1}}"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(Capabilities::parse(&[0, 0, 1]).is_err());
        assert!(Capabilities::parse(&[1, 0, 0, 0]).is_err());
        assert_eq!(Capabilities::parse(&Capabilities::OURS.message()), Ok(Capabilities::OURS));
    }
}
