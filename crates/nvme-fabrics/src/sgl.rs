//! The SGL descriptor of a command in a capsule: where its data is. NVMe 2.0 §4.1.2; NVMe TCP Transport 1.0 §3.3.2. Any context.

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::Code;

/// Type and subtype of a data block descriptor whose address is an offset in the capsule's data.
const IN_CAPSULE: u8 = 0x01;
/// Type and subtype of a transport data block: the transport transfers the data.
const TRANSPORT: u8 = 0x5a;

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
}

impl Sgl {
    /// Reads SGL1 of a command.
    ///
    /// # Errors
    /// The descriptor has a type that the TCP transport does not have.
    pub const fn decode(entry: &SubmissionEntry) -> Result<Self, Code> {
        let [offset, rest] = entry.data_pointer();
        let len = rest as u32;
        match (rest >> 56) as u8 {
            IN_CAPSULE => Ok(Self::InCapsule { offset, len }),
            TRANSPORT => Ok(Self::Transport { len }),
            _ => Err(Code::SGL_TYPE_INVALID),
        }
    }

    /// The two words of the descriptor.
    pub const fn encode(self) -> [u64; 2] {
        match self {
            Self::InCapsule { offset, len } => [offset, len as u64 | (IN_CAPSULE as u64) << 56],
            Self::Transport { len } => [0, len as u64 | (TRANSPORT as u64) << 56],
        }
    }

    /// Bytes.
    pub const fn len(self) -> u32 {
        match self {
            Self::InCapsule { len, .. } | Self::Transport { len } => len,
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
            Self::Transport { .. } if capsule_len != 0 => Err(Code::SGL_DATA_LENGTH_INVALID),
            Self::InCapsule { len, .. } | Self::Transport { len } if len > transfer_max => {
                Err(Code::INVALID_FIELD)
            }
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
            assert_eq!(Sgl::decode(&entry), Ok(sgl));
            assert!(!sgl.is_empty());
        }
        let keyed = SubmissionEntry::new(1, 1).with_sgl([0, 0x40 << 56]);
        assert_eq!(Sgl::decode(&keyed), Err(Code::SGL_TYPE_INVALID));
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
    }
}
