//! The SGL descriptor of a command in a capsule: where its data is. NVMe 2.0 §4.1.2; NVMe TCP Transport 1.0 §3.3.2; NVMe RDMA
//! Transport 1.0 §3.1.3. Any context.

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::Code;

use crate::command;

/// Type and subtype of a data block descriptor whose address is an offset in the capsule's data.
const IN_CAPSULE: u8 = 0x01;
/// Type and subtype of a transport data block: the transport transfers the data.
const TRANSPORT: u8 = 0x5a;
/// Type and subtype of a keyed data block descriptor, and of one whose key the controller invalidates at the end.
const KEYED: u8 = 0x40;
const KEYED_INVALIDATE: u8 = 0x4f;
/// The largest length of a keyed descriptor.
const KEYED_LEN_MAX: u64 = 0xff_ffff;
/// The bit of an opcode, and of a Fabrics command's type, that says that data goes to the host.
const TO_HOST: u8 = 0b10;

/// The descriptors that a transport has, beside those of data in capsules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataBlocks {
    /// Transport data blocks: TCP.
    Transport,
    /// Keyed data blocks: RDMA.
    Keyed,
}

/// Where a command's data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sgl {
    /// In the capsule, from an offset on.
    InCapsule {
        /// Offset in the capsule's data.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// The transport transfers this many bytes, after a request (R2T) if they come from the host.
    Transport {
        /// Bytes.
        len: u32,
    },
    /// The controller reads or writes memory of the host.
    Keyed {
        /// The memory's address.
        address: u64,
        /// Bytes, less than 2²⁴.
        len: u32,
        /// The host's key for the memory.
        key: u32,
        /// The completion invalidates the key.
        invalidates: bool,
    },
}

impl Sgl {
    /// Reads SGL1 of a command.
    ///
    /// # Errors
    /// The descriptor has a type that the transport does not have; with keyed descriptors, data to the host has one of these.
    pub const fn decode(entry: &SubmissionEntry, blocks: DataBlocks) -> Result<Self, Code> {
        let [address, rest] = entry.data_pointer();
        let len = rest as u32;
        // FCTYPE is where other commands have the low byte of NSID.
        let direction = if entry.opcode() == command::OPCODE { entry.nsid() as u8 } else { entry.opcode() };
        let kind = (rest >> 56) as u8;
        match (kind, blocks) {
            (IN_CAPSULE, DataBlocks::Keyed) if direction & TO_HOST != 0 => Err(Code::SGL_TYPE_INVALID),
            (IN_CAPSULE, _) => Ok(Self::InCapsule { offset: address, len }),
            (TRANSPORT, DataBlocks::Transport) => Ok(Self::Transport { len }),
            (KEYED | KEYED_INVALIDATE, DataBlocks::Keyed) => Ok(Self::Keyed {
                address,
                len: (rest & KEYED_LEN_MAX) as u32,
                key: (rest >> 24) as u32,
                invalidates: kind == KEYED_INVALIDATE,
            }),
            _ => Err(Code::SGL_TYPE_INVALID),
        }
    }

    /// The two words of the descriptor.
    pub const fn encode(self) -> [u64; 2] {
        match self {
            Self::InCapsule { offset, len } => [offset, len as u64 | (IN_CAPSULE as u64) << 56],
            Self::Transport { len } => [0, len as u64 | (TRANSPORT as u64) << 56],
            Self::Keyed { address, len, key, invalidates } => {
                let kind = if invalidates { KEYED_INVALIDATE } else { KEYED };
                [address, len as u64 & KEYED_LEN_MAX | (key as u64) << 24 | (kind as u64) << 56]
            }
        }
    }

    /// Bytes.
    pub const fn len(self) -> u32 {
        match self {
            Self::InCapsule { len, .. } | Self::Transport { len } | Self::Keyed { len, .. } => len,
        }
    }

    /// Whether there is no data.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Checks that data in a capsule is exactly what a capsule with `capsule_len` bytes of data has. No transfer is larger than
    /// `transfer_max` bytes.
    ///
    /// # Errors
    /// The status with which the command fails.
    pub const fn check(self, capsule_len: u32, transfer_max: u32) -> Result<(), Code> {
        match self {
            // ICDOFF is 0: the data begins behind the command.
            Self::InCapsule { offset: 1.., .. } => Err(Code::SGL_OFFSET_INVALID),
            Self::InCapsule { offset: 0, len } if len != capsule_len => Err(Code::SGL_DATA_LENGTH_INVALID),
            Self::Transport { .. } | Self::Keyed { .. } if capsule_len != 0 => {
                Err(Code::SGL_DATA_LENGTH_INVALID)
            }
            _ if self.len() > transfer_max => Err(Code::INVALID_FIELD),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_read_as_they_were_written() {
        for sgl in [Sgl::InCapsule { offset: 0, len: 4096 }, Sgl::Transport { len: u32::MAX }] {
            let entry = SubmissionEntry::new(1, 1).with_sgl(sgl.encode());
            assert_eq!(Sgl::decode(&entry, DataBlocks::Transport), Ok(sgl));
            assert!(!sgl.is_empty());
        }
    }

    #[test]
    fn keyed_descriptors_are_read_as_they_were_written() {
        for invalidates in [false, true] {
            let sgl =
                Sgl::Keyed { address: 0x1234_5678_9abc_def0, len: 0xff_ffff, key: 0x0a0b_0c0d, invalidates };
            let entry = SubmissionEntry::new(2, 1).with_sgl(sgl.encode());
            assert_eq!(Sgl::decode(&entry, DataBlocks::Keyed), Ok(sgl));
            assert_eq!(Sgl::decode(&entry, DataBlocks::Transport), Err(Code::SGL_TYPE_INVALID));
        }
        let sgl = Sgl::Keyed { address: 1, len: 0x03_0201, key: 0x0706_0504, invalidates: true };
        assert_eq!(sgl.encode()[1].to_le_bytes(), [1, 2, 3, 4, 5, 6, 7, 0x4f]);
        let transport = SubmissionEntry::new(1, 1).with_sgl(Sgl::Transport { len: 512 }.encode());
        assert_eq!(Sgl::decode(&transport, DataBlocks::Keyed), Err(Code::SGL_TYPE_INVALID));
    }

    #[test]
    fn data_to_the_host_needs_a_key_where_there_are_keys() {
        let sgl = Sgl::InCapsule { offset: 0, len: 512 };
        for (opcode, nsid, is_right) in [(1, 1, true), (2, 1, false), (0x7f, 1, true), (0x7f, 6, false)] {
            let entry = SubmissionEntry::new(opcode, nsid).with_sgl(sgl.encode());
            assert_eq!(Sgl::decode(&entry, DataBlocks::Keyed).is_ok(), is_right, "{opcode:#x} {nsid}");
            assert_eq!(Sgl::decode(&entry, DataBlocks::Transport), Ok(sgl));
        }
    }

    #[test]
    fn data_in_a_capsule_is_all_of_it() {
        let (inside, outside) = (Sgl::InCapsule { offset: 0, len: 512 }, Sgl::Transport { len: 4096 });
        assert_eq!((inside.check(512, 512), outside.check(0, 4096)), (Ok(()), Ok(())));
        assert_eq!(inside.check(1024, 4096), Err(Code::SGL_DATA_LENGTH_INVALID));
        assert_eq!(outside.check(512, 4096), Err(Code::SGL_DATA_LENGTH_INVALID));
        assert_eq!(
            (inside.check(512, 508), outside.check(0, 4095)),
            (Err(Code::INVALID_FIELD), Err(Code::INVALID_FIELD))
        );
        assert_eq!(Sgl::InCapsule { offset: 4, len: 512 }.check(512, 4096), Err(Code::SGL_OFFSET_INVALID));
        let keyed = Sgl::Keyed { address: 0, len: 512, key: 1, invalidates: false };
        assert_eq!((keyed.check(0, 512), keyed.check(0, 511)), (Ok(()), Err(Code::INVALID_FIELD)));
        assert_eq!(keyed.check(512, 512), Err(Code::SGL_DATA_LENGTH_INVALID));
    }
}
